// Prefill attention: rows of one sequence at consecutive positions, over packed history and plain tiles.
//
// Defined from outside: HEAD_DIM GROUP_LEN K_BITS V_BITS (record.cuh; K_BITS 16: every key is plain), WGMMA (1: sm_90a), WARPS
// (that multiply; 16 rows each), STAGE (tokens), SLOTS (stages in flight), SOFTCAP (0, 1), OUT_BF16 (0: f32),
// PARAMS_BYTES and SHARED (bytes, as the launcher knows them: prefill.rs).
//
// WARPS 8, STAGE 64, SLOTS 2; without wgmma heads of 256 channels: WARPS 4, STAGE 32 (then all fits in 99 KB of shared memory).
//
// A block takes the rows of a row tile (some tokens, all query heads of one kv head; row = token * ratio + head) and walks the
// keys that they see in stages of STAGE tokens, which begin at multiples of STAGE. FEEDERS warps decode: they read records or
// plain tiles and write x_hat, rounded to f16, to shared memory; WARPS warps multiply. Every 32 tokens of a stage are packed or
// plain as a whole, since the edge is a multiple of the group; sinks take their tokens' places in the first 16. So those who multiply
// see keys by position only. Stages of keys and of values are handed over apart, by barriers.
//
// In shared memory, rows of 16 bytes, such that a lane's registers of two tiles are whole rows (no transpose, no conflicts):
//   keys    [slice pair][t] chunks of [token]: channels 4 t .. 4 t + 3 of both slices. The order of channels is q's too.
//   values  [32 tokens][t] chunks of [channel]: tokens 2 t, 2 t + 1, + 8, + 16, + 24 of the 32
// Chunks are 32 bytes apart in banks. wgmma takes weights as it left the scores: lane t has columns 8 j + 2 t + h, and k 8 j + 2 t + h
// of the value product is token 8 t + 2 j + h; so key rows are put in that order: row 8 j + 2 t + h holds token 8 t + 2 j + h. With mma
// the order of tokens is their own.
//
// Softmax as usual: a running maximum of each row, so that a row's result depends on its own keys only (when no keys are split).
//
// What bounds it (H200, 32 query heads, 8 kv heads, head_dim 128, k4v4g64w128, whole prompt of 8k: 437 TFLOP/s, cuDNN's f16 598):
// feeding. Alone, those who feed reach 613, those who multiply 571 with the reads going on and 660 without; together they seem to
// compete for issue slots: without stores 449, without the fence 446, with three stages in flight 440.
// What lost, on the same rows:
//   softmax behind the wait for the products, where ptxas puts it if nothing prevents it: 414
//   chunks not 32 bytes apart in banks: 363 (those that are: 444)
//   no codes read ahead: 409; parameters not read ahead: 416
//   every sector of the next stage read ahead into L1 in place of registers: 378 (f16: 291)
//   pages found by dividing, plain tiles not read ahead (f16: 412, now 441)
//   mma.sync with the same feeding: 286; it is what cards without wgmma run
#include "prefill.cuh"

// Registers a thread of each kind.
#ifdef FEED_REGISTERS
#elif HEAD_DIM > 128
#define FEED_REGISTERS 88
#define MULTIPLY_REGISTERS 208
#else
#define FEED_REGISTERS 120
#define MULTIPLY_REGISTERS 192
#endif

// Two rows of a thread: g and g + 8 of its warp's 16. Their positions, and where they lie in q and out, are kept in shared memory.
struct Rows {
    float m[2], sum[2];  // what is subtracted from scores (the maximum less LIFT); this thread's sum of weights
};

// Scores of keys that a row does not see are no scores. first: position of the stage.
DEVICE void mask(float* s, const Params& p, u32 row, u32 first, u32 t) {
    const float none = __int_as_float(0xff800000);
    u32 position[2], low[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        position[i] = load_shared(row + i * 64);
        low[i] = first_seen(p.rule, position[i], p.first_visible);
    }
#pragma unroll
    for (int j = 0; j < STAGE / 8; j++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
#if WGMMA
            const u32 token = first + j / 4 * 32 + t * 8 + j % 4 * 2 + h;
#else
            const u32 token = first + j * 8 + t * 2 + h;
#endif
#pragma unroll
            for (int i = 0; i < 2; i++)
                if (token > position[i] || token < low[i]) s[j * 4 + i * 2 + h] = none;
        }
}

DEVICE void cap_scores(float* s, float scale, float cap) {
#pragma unroll
    for (int i = 0; i < STAGE / 2; i++) {
        // tanh(x) = 1 - 2 / (1 + e^(2x)); scores are in units of log2(e), so e^(2x) is 2^(2 score log2(e) / cap).
        const float x = s[i] * scale / cap;
        s[i] = cap * (1.0f - 2.0f / (1.0f + exp2_approx(2.8853900817779268f * x)));
    }
}

// Scores become weights; f: what sums so far are multiplied by.
DEVICE void softmax(float* s, Rows& r, float unit, float* f) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float x = fmaxf(s[i * 2], s[i * 2 + 1]);
#pragma unroll
        for (int j = 1; j < STAGE / 8; j++) x = fmaxf(x, fmaxf(s[j * 4 + i * 2], s[j * 4 + i * 2 + 1]));
        x = fmaxf(x, __shfl_xor_sync(FULL, x, 1));
        x = fmaxf(x, __shfl_xor_sync(FULL, x, 2));
        const float n = fmaxf(r.m[i], x * unit - LIFT);
        f[i] = exp2_approx(r.m[i] - n);
        r.m[i] = n;
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < STAGE / 8; j++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float& c = s[j * 4 + i * 2 + h];
                c = exp2_approx(c * unit - n);
                sum += c;
            }
        r.sum[i] = r.sum[i] * f[i] + sum;
    }
}

DEVICE void rescale(float* o, const float* f) {
    // Most stages leave the maximum of all rows as it is; a factor of 1 changes nothing.
    if (__any_sync(FULL, f[0] != 1.0f || f[1] != 1.0f)) {
#pragma unroll
        for (int i = 0; i < SUMS; i++) o[i] *= f[i / 2 % 2];
    }
}

// Weights as left operands: [16 columns][register].
DEVICE void pack_weights(u32 (*w)[4], const float* s) {
#pragma unroll
    for (int i = 0; i < STAGE / 16; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) w[i][e] = half2_of(s[i * 8 + e / 2 * 4 + e % 2 * 2], s[i * 8 + e / 2 * 4 + e % 2 * 2 + 1]);
}

// Channel of the left operand of slice-step i, register e (row g + 8 (e % 2)): two channels from here on.
DEVICE u32 q_channel(int i, int e, u32 t) {
#if WGMMA
    return (i / 2 * 2 + t / 2) * 16 + i % 2 * 8 + t % 2 * 2 + e / 2 * 4;
#else
    return i * 16 + t * 4 + e / 2 * 2;
#endif
}

constexpr int Q_REGISTERS = Q_SHARED ? 1 : SLICES;

#if WGMMA
// s = q * keys of stage k; not finished before wgmma_wait.
DEVICE void multiply_keys(float* s, const u32 (*q)[4], u32 q_at, u32 keys) {
#pragma unroll
    for (int i = 0; i < SLICES; i++)
#pragma unroll
        for (int n = 0; n < STAGE / 64; n++) {
            const u64 b = matrix_at(keys + i * 2 * K_CHUNK + n * 1024, K_CHUNK);
            if (Q_SHARED) wgmma64_shared(s + n * 32, matrix_at(q_at + i * 2048, 1024), b, i > 0);
            else wgmma64(s + n * 32, q[Q_SHARED ? 0 : i], b, i > 0);
        }
}
// o += weights * values.
DEVICE void multiply_values(float* o, const u32 (*w)[4], u32 values) {
#pragma unroll
    for (int i = 0; i < STAGE / 16; i++) {
        const u32 at = values + i * 2 * V_CHUNK;
#pragma unroll
        for (int n = 0; n + 128 <= CHANNELS; n += 128) wgmma128(o + n / 2, w[i], matrix_at(at + n * 16, V_CHUNK), 1);
        if (CHANNELS < 128) wgmma64(o, w[i], matrix_at(at, V_CHUNK), 1);
        if (CHANNELS == 96) wgmma32(o + 32 % SUMS, w[i], matrix_at(at + 1024, V_CHUNK), 1);
    }
}
#else
DEVICE void multiply_keys(float* s, const u32 (*q)[4], u32 q_at, u32 keys, u32 lane) {
    const u32 at = keys + lane % 4 * K_CHUNK + lane / 4 * 16;
#pragma unroll
    for (int i = 0; i < SLICES; i += 2) {
        u32 a[2][4];
#pragma unroll
        for (int n = 0; n < 2; n++) {
            uint4 x = make_uint4(0, 0, 0, 0);
            if (Q_SHARED) x = load_shared4(q_at + (i + n) * 512 + lane * 16);
            a[n][0] = x.x, a[n][1] = x.y, a[n][2] = x.z, a[n][3] = x.w;
            if (Q_SHARED) continue;
#pragma unroll
            for (int e = 0; e < 4; e++) a[n][e] = q[(i + n) % Q_REGISTERS][e];
        }
#pragma unroll
        for (int j = 0; j < STAGE / 8; j++) {
            const uint4 b = load_shared4(at + i * 2 * K_CHUNK + j * 128);
            if (i == 0) mma_first(s + j * 4, a[0][0], a[0][1], a[0][2], a[0][3], b.x, b.y);
            else mma(s + j * 4, a[0][0], a[0][1], a[0][2], a[0][3], b.x, b.y);
            mma(s + j * 4, a[1][0], a[1][1], a[1][2], a[1][3], b.z, b.w);
        }
    }
}
DEVICE void multiply_values(float* o, const u32 (*w)[4], u32 values, u32 lane) {
    const u32 at = values + lane % 4 * V_CHUNK + lane / 4 * 16;
#pragma unroll
    for (int b = 0; b < BLOCKS; b++)
#pragma unroll
        for (int j = 0; j < CHANNELS / 8; j++) {
            const uint4 x = load_shared4(at + b * 4 * V_CHUNK + j * 128);
            mma(o + j * 4, w[2 * b][0], w[2 * b][1], w[2 * b][2], w[2 * b][3], x.x, x.y);
            mma(o + j * 4, w[2 * b + 1][0], w[2 * b + 1][1], w[2 * b + 1][2], w[2 * b + 1][3], x.z, x.w);
        }
}
#endif

DEVICE void store_two(const Params& p, u64 at, float x, float y) {
#if OUT_BF16
    *(u32*)((u16*)p.out + at) = (u32)bf16_of(x) | (u32)bf16_of(y) << 16;
#else
    *(float2*)((float*)p.out + at) = make_float2(x, y);
#endif
}

DEVICE void multiply(const Params& p, const Work& work, const Ring& ring) {
    const u32 thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, g = lane >> 2, t = lane & 3;
    const u32 q_heads = p.kv_heads * p.ratio, rows = (work.last + 1 - work.first) * p.ratio;
    const u32 row = ring.rows + (warp * 16 + g) * 8;
    u32 at[2];
    Rows r;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const u32 n = warp * 16 + g + i * 8, token = n / p.ratio;
        at[i] = n < rows ? (work.first + token - p.begin) * q_heads + work.kv_head * p.ratio + n % p.ratio : NOBODY;
        if (t == 0) store_shared(row + i * 64, n < rows ? work.first + token : work.last), store_shared(row + i * 64 + 4, at[i]);
        r.m[i] = NOTHING, r.sum[i] = 0.0f;
    }
    __syncwarp();
    u32 q[Q_REGISTERS][4];
    const u32 q_at = ring.q + (WGMMA ? warp / 4 * 64 : warp * 16) * CHANNELS * 2;
#pragma unroll
    for (int i = 0; i < SLICES; i++) {
        u32 x[4];
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const u32 channel = q_channel(i, e, t);
            x[e] = at[e % 2] != NOBODY && channel < HEAD_DIM ? *(const u32*)(p.q + (u64)at[e % 2] * HEAD_DIM + channel) : 0;
            if (!Q_SHARED) q[i % Q_REGISTERS][e] = x[e];
            else if (WGMMA) store_shared(q_at + (i * 2 + e / 2) * 1024 + (warp % 4 * 16 + g + e % 2 * 8) * 16 + t * 4, x[e]);
        }
        if (Q_SHARED && !WGMMA) store_shared4(q_at + i * 512 + lane * 16, x[0], x[1], x[2], x[3]);
    }
#if WGMMA
    if (Q_SHARED) {
        fence_copy_engine();
        join(1 + warp / 4, 128);
    }
#else
    __syncwarp();
#endif
    float o[SUMS], s[STAGE / 2], f[2];
    u32 w[STAGE / 16][4];
#pragma unroll
    for (int i = 0; i < SUMS; i++) o[i] = 0.0f;
    const u32 stages = work.end - work.begin;
    const u32 all_low = first_seen(p.rule, work.last, p.first_visible);
    auto weigh = [&](u32 k) {
        float unit = p.scale;
#if SOFTCAP
        cap_scores(s, unit, p.softcap);
        unit = 1.0f;
#endif
        const u32 first = (work.begin + k) * STAGE;
        if (first < all_low || first + STAGE > work.first + 1) mask(s, p, row, first, t);
        softmax(s, r, unit, f);
    };
    auto done = [&](u32 side, u32 k) {
        __syncwarp();
        if (lane == 0) phase_arrive(ring.empty(side, k));
    };
#if WGMMA
    if (stages > 0) {
        phase_wait(ring.full(0, 0), 0);
        wgmma_fence();
        multiply_keys(s, q, q_at, ring.keys_at(0));
        wgmma_commit();
        wgmma_wait<0>();
        hold<STAGE / 2>(s);
        done(0, 0);
        weigh(0);
        pack_weights(w, s);
        phase_wait(ring.full(1, 0), 0);
        // The scores of a stage and the softmax of them run beside the values of the one before.
#pragma unroll 1
        for (u32 k = 1; k < stages; k++) {
            phase_wait(ring.full(0, k), ring.parity(k));
            hold<STAGE / 2>(s);
            hold<SUMS>(o);
            wgmma_fence();
            multiply_keys(s, q, q_at, ring.keys_at(k));
            wgmma_commit();
            wgmma_fence();
            multiply_values(o, w, ring.values_at(k - 1));
            wgmma_commit();
            wgmma_wait<1>();
            hold<STAGE / 2>(s);
            done(0, k);
            weigh(k);
            hold<STAGE / 2>(s);
            // ptxas would move the softmax behind the wait for the products; not behind a branch that depends on it, as the wait for
            // the next values does here. `never` is 0, which ptxas does not know.
            const u32 never = p.row_tiles >> 31 & (__float_as_uint(r.sum[0]) | __float_as_uint(r.sum[1]));
            phase_wait(ring.full(1, k), ring.parity(k) ^ never);
            wgmma_wait<0>();
            hold<SUMS>(o);
            done(1, k - 1);
            rescale(o, f);
            pack_weights(w, s);
        }
        hold<SUMS>(o);
        wgmma_fence();
        multiply_values(o, w, ring.values_at(stages - 1));
        wgmma_commit();
        wgmma_wait<0>();
        hold<SUMS>(o);
    }
#else
#pragma unroll 1
    for (u32 k = 0; k < stages; k++) {
        phase_wait(ring.full(0, k), ring.parity(k));
        multiply_keys(s, q, q_at, ring.keys_at(k), lane);
        done(0, k);
        weigh(k);
        rescale(o, f);
        pack_weights(w, s);
        phase_wait(ring.full(1, k), ring.parity(k));
        multiply_values(o, w, ring.values_at(k), lane);
        done(1, k);
    }
#endif
#pragma unroll
    for (int i = 0; i < 2; i++) {
        r.sum[i] += __shfl_xor_sync(FULL, r.sum[i], 1);
        r.sum[i] += __shfl_xor_sync(FULL, r.sum[i], 2);
    }
    if (p.splits > 1) {
        const u32 item = load_shared(ring.notes), split = load_shared(ring.notes + 4);
        // Thread by thread: the last block's threads hold the same rows and channels.
        float* all = p.partials + (u64)item * p.splits * PARTIAL + thread;
        constexpr u32 THREADS = WARPS * 32;
        float* own = all + (u64)split * PARTIAL;
#pragma unroll
        for (int i = 0; i < SUMS; i++) __stcg(own + i * THREADS, o[i]);
#pragma unroll
        for (int i = 0; i < 2; i++) __stcg(own + (SUMS + i) * THREADS, r.m[i]), __stcg(own + (SUMS + 2 + i) * THREADS, r.sum[i]);
        join(3, THREADS);
        if (thread == 0) {
            u32 before;
            asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(p.counters + item) : "memory");
            if (before == p.splits - 1) p.counters[item] = 0;
            store_shared(ring.notes + 8, before == p.splits - 1);
        }
        join(3, THREADS);
        if (!load_shared(ring.notes + 8)) return;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            r.m[i] = NOTHING, r.sum[i] = 0.0f;
            for (u32 n = 0; n < p.splits; n++) r.m[i] = fmaxf(r.m[i], __ldcg(all + (u64)n * PARTIAL + (SUMS + i) * THREADS));
        }
#pragma unroll
        for (int i = 0; i < SUMS; i++) o[i] = 0.0f;
#pragma unroll 1
        for (u32 n = 0; n < p.splits; n++) {
            const float* part = all + (u64)n * PARTIAL;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                f[i] = exp2_approx(__ldcg(part + (SUMS + i) * THREADS) - r.m[i]);
                r.sum[i] += f[i] * __ldcg(part + (SUMS + 2 + i) * THREADS);
            }
#pragma unroll
            for (int i = 0; i < SUMS; i++) o[i] += f[i / 2 % 2] * __ldcg(part + i * THREADS);
        }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const u32 mine = load_shared(row + i * 64 + 4);
        if (mine == NOBODY) continue;
        float factor = 1.0f;
        if (p.sink_logits) {
            const float logit = p.sink_logits[mine % q_heads] * 1.4426950408889634f;
            const float most = fmaxf(r.m[i], logit - LIFT);
            factor = exp2_approx(r.m[i] - most);
            r.sum[i] = r.sum[i] * factor + exp2_approx(logit - most);
        }
        factor /= r.sum[i];
#pragma unroll
        for (int j = 0; j < CHANNELS / 8; j++)
            if (j * 8 < HEAD_DIM) {
                const float* two = o + j * 4 + i * 2;
                store_two(p, (u64)mine * HEAD_DIM + j * 8 + t * 2, two[0] * factor, two[1] * factor);
            }
    }
}

// Grid: row_tiles * kv_heads * splits, the last tiles (the longest) first.
extern "C" __global__ void __launch_bounds__((WARPS + FEEDERS) * 32, 1) prefill(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) u8 shared[];
    const u32 base = shared_address(shared), warp = threadIdx.x >> 5;
    Ring ring;
    ring.keys = base, ring.values = base + SLOTS * K_STAGE, ring.q = ring.values + SLOTS * V_STAGE;
    ring.rows = ring.q + Q_BYTES, ring.barriers = ring.rows + ROWS * 8, ring.notes = ring.barriers + SLOTS * 32;
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < 2 * SLOTS; i++) {
            phase_init(ring.barriers + i * 16, FEEDERS / 2 < BLOCKS ? FEEDERS / 2 : BLOCKS);
            phase_init(ring.barriers + i * 16 + 8, WARPS);
        }
#if WGMMA
        fence_copy_engine();
#endif
    }
    const u32 of_tile = p.kv_heads * p.splits, tile = p.row_tiles - 1 - blockIdx.x / of_tile;
    const u32 kv_head = blockIdx.x % of_tile / p.splits, split = blockIdx.x % p.splits;
    const RowTile rows = p.tiles[tile];
    Work work;
    work.first = rows.first, work.last = rows.first + rows.tokens - 1, work.kv_head = kv_head;
    work.low = first_seen(p.rule, work.first, p.first_visible);
    work.edge = K_BITS == 16 ? 0 : edge_of(p.rule, work.first);
    work.sinks = work.edge > 0 ? p.rule.sinks : 0;
    const u32 from = work.low / STAGE, stages = work.last / STAGE + 1 - from;
    work.begin = from + stages * split / p.splits, work.end = from + stages * (split + 1) / p.splits;
    if (threadIdx.x == 0) store_shared(ring.notes, tile * p.kv_heads + kv_head), store_shared(ring.notes + 4, split);
    __syncthreads();
    if (warp < WARPS) {
#if WGMMA
        more_registers<MULTIPLY_REGISTERS>();
#endif
        multiply(p, work, ring);
    } else {
#if WGMMA
        fewer_registers<FEED_REGISTERS>();
#endif
        const u32 lane = threadIdx.x & 31, feeder = warp - WARPS;
        const Feeder f = {p, work, ring, lane, lane >> 2, lane & 3, Divisor(K_BITS == 16 ? p.tiles_of_page : p.groups_of_page)};
        if (feeder < 2) f.run<0>(feeder);
        else f.run<1>(feeder - 2);
    }
}
