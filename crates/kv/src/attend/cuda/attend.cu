// Decode attention: one query row per request over its whole cache, read as it is stored.
//
// Defined from outside: HEAD_DIM GROUP_LEN K_BITS V_BITS (record.cuh; K_BITS 16: every key is plain), WARPS, SLOTS (ring of a
// warp), BLOCKS_PER_SM, SHARED (bytes of shared memory), PARAMS_BYTES, SOFTCAP (0, 1), OUT_BF16 (0: f32).
//
// A block of WARPS warps takes items (plan.cuh). Within an item warp w takes units w, w + WARPS, ...; each warp copies its next
// parts into its own ring in shared memory while it works on one:
//   scores  c[tokens][heads] = K * q': codes are mma's left operand as they are (record.cuh), the key scale is folded into q once
//           per group, the key zeros are one more product
//   softmax in f32 with a lazy maximum: p = 2^(c - m), and m moves only when some p is 2 or more
//   values  acc[channels][heads] += V * (p * value scale), value zeros and the sum of p by one more product
// Then warps are merged, and of a row that several blocks share the last one to finish merges their partial results in order.
//
// What lost: a ring filled by one warp for all (waits at barriers), the key scale times a power of two in the record (it
// overflows f16 for large scales).
#include "attend.cuh"

// A warp's partial result of an item.
struct State {
    float acc[SLICES][4];  // values: channels of slice i, g and g + 8, heads 2 t, 2 t + 1
    float zeros[4];        // rows 0..7: sums of value zeros by value group; rows 8..15: sums of weights
    float m0, m1;          // maxima of heads 2 t, 2 t + 1
};

DEVICE void rescale(State& s, float f0, float f1) {
#pragma unroll
    for (int i = 0; i < SLICES; i++) s.acc[i][0] *= f0, s.acc[i][1] *= f1, s.acc[i][2] *= f0, s.acc[i][3] *= f1;
    s.zeros[0] *= f0, s.zeros[1] *= f1, s.zeros[2] *= f0, s.zeros[3] *= f1;
}

// Weights of the scores of `N` tiles, as the right operand of the value product. scores = c * unit + bias.
template <int N>
DEVICE void softmax(State& s, const float (*c)[4], float unit, float bias0, float bias1, u32 (*w)[2]) {
    u32 large = 0;
    float b0 = bias0 - s.m0, b1 = bias1 - s.m1;
#pragma unroll
    for (int i = 0; i < N; i++) {
        w[i][0] = half2_of(exp2_approx(c[i][0] * unit + b0), exp2_approx(c[i][1] * unit + b1));
        w[i][1] = half2_of(exp2_approx(c[i][2] * unit + b0), exp2_approx(c[i][3] * unit + b1));
        large |= w[i][0] | w[i][1];
    }
    // An f16 of 2 or more, infinity among them, has this bit.
    if (__any_sync(FULL, large & 0x40004000u)) {
        float x0 = c[0][0], x1 = c[0][1];
#pragma unroll
        for (int i = 0; i < N; i++) x0 = fmaxf(x0, fmaxf(c[i][0], c[i][2])), x1 = fmaxf(x1, fmaxf(c[i][1], c[i][3]));
#pragma unroll 1
        for (int o = 4; o < 32; o <<= 1) x0 = fmaxf(x0, __shfl_xor_sync(FULL, x0, o)), x1 = fmaxf(x1, __shfl_xor_sync(FULL, x1, o));
        const float n0 = fmaxf(s.m0, x0 * unit + bias0), n1 = fmaxf(s.m1, x1 * unit + bias1);
        rescale(s, exp2_approx(s.m0 - n0), exp2_approx(s.m1 - n1));
        s.m0 = n0, s.m1 = n1;
        b0 = bias0 - n0, b1 = bias1 - n1;
#pragma unroll
        for (int i = 0; i < N; i++) {
            w[i][0] = half2_of(exp2_approx(c[i][0] * unit + b0), exp2_approx(c[i][1] * unit + b1));
            w[i][1] = half2_of(exp2_approx(c[i][2] * unit + b0), exp2_approx(c[i][3] * unit + b1));
        }
    }
#pragma unroll
    for (int i = 0; i < N; i++) w[i][0] = transpose8(w[i][0]), w[i][1] = transpose8(w[i][1]);
}

// Scores of tokens outside [from, to) are no scores. first: position of the first tile's first token.
template <int N>
DEVICE void mask(float (*c)[4], u32 first, u32 from, u32 to, u32 g) {
    const float none = __int_as_float(0xff800000);
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
        for (int s = 0; s < 2; s++) {
            const u32 token = first + i * 16 + s * 8 + g;
            if (token < from || token >= to) c[i][2 * s] = none, c[i][2 * s + 1] = none;
        }
}

// Scores c * unit + bias become cap * tanh(score / cap), with unit 1 and bias 0.
template <int N>
DEVICE void cap_scores(float (*c)[4], float& unit, float& bias0, float& bias1, float cap) {
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            // tanh(x) = 1 - 2 / (1 + e^(2x)); scores are in units of log2(e), so e^(2x) is 2^(2 score log2(e) / cap).
            const float x = (c[i][j] * unit + (j % 2 ? bias1 : bias0)) / cap;
            c[i][j] = cap * (1.0f - 2.0f / (1.0f + exp2_approx(2.8853900817779268f * x)));
        }
    unit = 1.0f, bias0 = bias1 = 0.0f;
}

#if K_BITS != 16
// q * scale of a group and q * zero, from the parameters at `st`. The power of two of each code's place goes into q'.
DEVICE void fold_keys(u32 (*qs)[2], float& bias0, float& bias1, u32 st, u32 q, u32 g, u32 t) {
    float z[4];
#pragma unroll
    for (int i = 0; i < SLICES; i++) {
        const uint2 x = load_shared2(q + g * Q_WORDS * 4 + i * 32 + t * 8);
        const uint4 params = load_shared4(st + (i * 4 + t) * 16);
        if (i == 0) mma_first(z, params.z, params.z, params.w, params.w, x.x, x.y);
        else mma(z, params.z, params.z, params.w, params.w, x.x, x.y);
        qs[i][0] = mul2(params.x, x.x), qs[i][1] = mul2(params.y, x.y);
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const u32 one = 0x3c00u - (u32)place(K_BITS, i, k) * 0x400u;  // 2^-place
            if (place(K_BITS, i, k) > 0) qs[i][k] = mul2(qs[i][k], pair(one));
        }
    }
    bias0 = z[0], bias1 = z[1];
}

// Scores of a part: c[tile] = codes * q', in units of 1 / UNIT.
DEVICE void score_part(float (*c)[4], const u32 (*qs)[2], u32 codes, u32 lane) {
    Words<K_WORDS> words = {codes, lane, {0, 0, 0, 0}};
    constexpr int STEP = K_BITS == 2 ? 2 : K_BITS == 3 ? 4 : 1, EACH = K_BITS == 8 ? 2 : K_BITS == 3 ? 3 : 1;
#pragma unroll
    for (int first = 0; first < SLICES; first += STEP)
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            u32 w[EACH];
#pragma unroll
            for (int k = 0; k < EACH; k++) w[k] = words.get(word_of(K_BITS, first, tile) + k);
#pragma unroll
            for (int i = first; i < first + STEP && i < SLICES; i++) {
                const Tile x = unpack<K_BITS>(w, i);
                if (i == 0) mma_first(c[tile], x.u[0][0], x.u[1][0], x.u[0][1], x.u[1][1], qs[i][0], qs[i][1]);
                else mma(c[tile], x.u[0][0], x.u[1][0], x.u[0][1], x.u[1][1], qs[i][0], qs[i][1]);
            }
        }
}

// Adds the values of a part, with weights w of its tokens.
DEVICE void add_part(State& s, const u32 (*w)[2], u32 codes, u32 params, u32 lane, u32 g, u32 t) {
    constexpr u32 ONES = 0x3c003c00u;
    u32 ws[TILES][2];
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
        uint2 z = make_uint2(0, 0);
        if ((int)g < V_GROUPS) z = load_shared2(params + ((tile * V_GROUPS + g) * 4 + t) * 16 + 8);
        mma(s.zeros, z.x, ONES, z.y, ONES, w[tile][0], w[tile][1]);
    }
    Words<V_WORDS> words = {codes, lane, {0, 0, 0, 0}};
    constexpr int STEP = V_BITS == 2 ? 2 : V_BITS == 3 ? 4 : 1, EACH = V_BITS == 8 ? 2 : V_BITS == 3 ? 3 : 1;
#pragma unroll
    for (int first = 0; first < SLICES; first += STEP) {
        u32 words_of_step[TILES][EACH];
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
#pragma unroll
            for (int k = 0; k < EACH; k++) words_of_step[tile][k] = words.get(word_of(V_BITS, first, tile) + k);
#pragma unroll
        for (int i = first; i < first + STEP && i < SLICES; i++) {
            if (i == 0 || v_group(i) != v_group(i - 1)) {
#pragma unroll
                for (int tile = 0; tile < TILES; tile++) {
                    const uint2 scale = load_shared2(params + ((tile * V_GROUPS + v_group(i)) * 4 + t) * 16);
                    ws[tile][0] = mul2(scale.x, w[tile][0]), ws[tile][1] = mul2(scale.y, w[tile][1]);
                }
            }
#pragma unroll
            for (int tile = 0; tile < TILES; tile++) {
                const Tile x = unpack<V_BITS>(words_of_step[tile], i);
                mma(s.acc[i], x.u[0][0], x.u[0][1], x.u[1][0], x.u[1][1], ws[tile][0], ws[tile][1]);
            }
        }
    }
}
#endif

// The partial result of a warp's units of an item.
template <class R>
DEVICE void run_units(State& s, const Params& p, u32 layer, const R& row, u32 begin, u32 end, u32 ring, u32 barriers, u32 q,
                      Feed& feed, u32& slot, u32& parity) {
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, t = lane & 3, g = lane >> 2;
#pragma unroll
    for (int i = 0; i < SLICES; i++) s.acc[i][0] = s.acc[i][1] = s.acc[i][2] = s.acc[i][3] = 0.0f;
    s.zeros[0] = s.zeros[1] = s.zeros[2] = s.zeros[3] = 0.0f;
    s.m0 = s.m1 = NOTHING;
    auto wait = [&] {
#if BULK
        barrier_wait(barriers + slot * 8, parity);
#else
        copy_wait<SLOTS - 1>();
        __syncwarp();
#endif
        return ring + slot * SLOT_BYTES;
    };
    auto done = [&] {
        __syncwarp();
        feed_next(feed, p, layer, row, end, ring, barriers, slot, lane);
        if (++slot == SLOTS) slot = 0, parity ^= 1;
    };
    u32 unit = begin + warp;
    const u32 sinks = row.e.edge > 0 ? p.rule.sinks : 0, from = max(row.e.first, sinks);
#if K_BITS != 16
    const u32 packed_end = min(end, row.e.groups);
    for (; unit < packed_end; unit += WARPS) {
        const u32 first = (row.e.first_group + unit) * GROUP_LEN;
        u32 qs[SLICES][2];
        float bias0 = 0.0f, bias1 = 0.0f;
#pragma unroll 1
        for (int part = 0; part < PARTS; part++) {
            const u32 st = wait();
            if (PARTS == 1 || part == 0) fold_keys(qs, bias0, bias1, st, q, g, t);
            float c[TILES][4];
            score_part(c, qs, st + K_PARAM_BYTES, lane);
            float unit_of_c = UNIT, b0 = bias0, b1 = bias1;
#if SOFTCAP
            cap_scores<TILES>(c, unit_of_c, b0, b1, p.softcap);
#endif
            if (first < from) {
                // Hardly ever: the statement keeps it a branch.
                asm volatile("" ::: "memory");
                mask<TILES>(c, first + part * PART_LEN, from, row.e.len, g);
            }
            u32 w[TILES][2];
            softmax<TILES>(s, c, unit_of_c, b0, b1, w);
            add_part(s, w, st + K_PARAM_BYTES + K_CODE_BYTES, st + K_PARAM_BYTES + K_CODE_BYTES + V_CODE_BYTES, lane, g, t);
            done();
        }
    }
    // Codes were added as integers in f16's smallest unit; from here on values are themselves.
#pragma unroll
    for (int i = 0; i < SLICES; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) s.acc[i][e] *= UNIT / (float)(1 << place(V_BITS, i, e / 2));
#endif
    for (; unit < end; unit += WARPS) {
        const u32 i = unit - row.e.groups;
        const bool sink = i >= row.e.tiles;
        const u32 first = sink ? 0 : (row.e.first_tile + i) * 16;
        u32 st = wait();
        float c[1][4];
#pragma unroll
        for (int k = 0; k < SLICES; k++) {
            const uint4 a = load_shared4(st + k * 512 + lane * 16);
            const uint2 x = load_shared2(q + g * Q_WORDS * 4 + k * 32 + t * 8);
            if (k == 0) mma_first(c[0], a.x, a.y, a.z, a.w, x.x, x.y);
            else mma(c[0], a.x, a.y, a.z, a.w, x.x, x.y);
        }
        done();
        float unit_of_c = 1.0f, b0 = 0.0f, b1 = 0.0f;
#if SOFTCAP
        cap_scores<1>(c, unit_of_c, b0, b1, p.softcap);
#endif
        const u32 low = sink ? row.e.first : p.all_paged ? row.e.first : K_BITS == 16 ? from : max(row.e.first, row.e.edge);
        const u32 high = sink ? sinks : row.e.len;
        if (first < low || first + 16 > high) mask<1>(c, first, low, high, g);
        u32 w[1][2];
        softmax<1>(s, c, unit_of_c, b0, b1, w);
        mma(s.zeros, 0u, 0x3c003c00u, 0u, 0x3c003c00u, w[0][0], w[0][1]);
        st = wait();
#pragma unroll
        for (int k = 0; k < SLICES; k++) {
            const uint4 a = load_shared4(st + k * 512 + lane * 16);
            mma(s.acc[k], a.x, a.y, a.z, a.w, w[0][0], w[0][1]);
        }
        done();
    }
}

// Merges the warps of a block. Afterwards the sums of all lie at `sum`, lane by lane, and every thread has the block's maxima.
DEVICE void merge_warps(State& s, u32 work, u32 sum, u32 maxima) {
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, t = lane & 3, g = lane >> 2;
    if (g == 0) {
        store_shared_float(maxima + warp * 32 + t * 8, s.m0);
        store_shared_float(maxima + warp * 32 + t * 8 + 4, s.m1);
    }
    __syncthreads();
    float n0 = NOTHING, n1 = NOTHING;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        n0 = fmaxf(n0, load_shared_float(maxima + w * 32 + t * 8));
        n1 = fmaxf(n1, load_shared_float(maxima + w * 32 + t * 8 + 4));
    }
    rescale(s, exp2_approx(s.m0 - n0), exp2_approx(s.m1 - n1));
    s.m0 = n0, s.m1 = n1;
    // The upper half of the warps writes, the lower half adds its own, then all threads sum what is left.
    const u32 own = work + warp % MERGED * STATE_BYTES + lane * 4;
    auto value = [&](int i) { return i < SLICES * 4 ? s.acc[i / 4][i % 4] : s.zeros[i - SLICES * 4]; };
    if (warp >= MERGED) {
#pragma unroll
        for (int i = 0; i < STATES; i++) store_shared_float(own + i * 128, value(i));
    }
    __syncthreads();
    if (warp < MERGED) {
#pragma unroll
        for (int i = 0; i < STATES; i++) store_shared_float(own + i * 128, value(i) + load_shared_float(own + i * 128));
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < STATES * LANES; i += WARPS * 32) {
        float x = 0.0f;
#pragma unroll
        for (int w = 0; w < MERGED; w++) x += load_shared_float(work + w * STATE_BYTES + i * 4);
        store_shared_float(sum + i * 4, x);
    }
    __syncthreads();
}

DEVICE void store_out(const Params& p, u64 at, float x) {
#if OUT_BF16
    ((u16*)p.out)[at] = bf16_of(x);
#else
    ((float*)p.out)[at] = x;
#endif
}

// Of n partial results the weight of each in the merged one is 2^(m - M) / L; lane-wise over a warp. `extra`: a logit that takes
// part in the sum only (NOTHING: none).
struct Total {
    float m, inverse;
};
DEVICE Total total_of(const float* partials, const Item& it, u32 head, float extra, u32 lane) {
    auto at = [&](u32 i) { return partials + (u64)(i == 0 ? it.zero_slot : it.first_slot + i * it.slot_step) * PARTIAL + HEADS * HEAD_DIM; };
    float m = extra, own_m = NOTHING, own_sum = 0.0f;
    for (u32 i = lane; i < it.splits; i += 32) {
        const float x = __ldcg(at(i) + head), sum = __ldcg(at(i) + HEADS + head), n = fmaxf(own_m, x);
        own_sum = own_sum * exp2_approx(own_m - n) + sum * exp2_approx(x - n);
        own_m = n;
    }
    m = fmaxf(m, own_m);
#pragma unroll
    for (int o = 16; o; o >>= 1) m = fmaxf(m, __shfl_xor_sync(FULL, m, o));
    float sum = own_sum * exp2_approx(own_m - m);
#pragma unroll
    for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(FULL, sum, o);
    return {m, 1.0f / (sum + exp2_approx(extra - m))};
}

DEVICE void keep(volatile Kept& to, const Item& it, const Row& row, u32 piece) {
    to.piece = piece;
    to.item.request = it.request, to.item.head = it.head, to.item.begin = it.begin, to.item.end = it.end;
    to.item.split = it.split, to.item.splits = it.splits, to.item.slot = it.slot;
    to.item.first_slot = it.first_slot, to.item.slot_step = it.slot_step, to.item.zero_slot = it.zero_slot;
    to.row.e.len = row.e.len, to.row.e.first = row.e.first, to.row.e.edge = row.e.edge;
    to.row.e.first_group = row.e.first_group, to.row.e.groups = row.e.groups;
    to.row.e.first_tile = row.e.first_tile, to.row.e.tiles = row.e.tiles, to.row.e.sink_tiles = row.e.sink_tiles;
    to.row.slot = row.slot, to.row.kv_head = row.kv_head;
}

// The query heads of an item: the first one, how many, and where their vectors begin in q and out.
struct Heads {
    u32 first, n;
    u64 at;
};
DEVICE Heads heads_of(const Params& p, const Item& it, u32 layer) {
    const u32 block = it.head % p.head_blocks * p.pass, first = it.head / p.head_blocks * p.ratio + block;
    return {first, min(p.pass, p.ratio - block), (((u64)layer * p.batch + it.request) * p.kv_heads * p.ratio + first) * HEAD_DIM};
}

// Writes an item's result: the row's, or a partial one, and when it was the row's last one, the merged result.
DEVICE void finish_item(const Params& p, const volatile Item& kept, const State& s, u32 work) {
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, layer = blockIdx.y;
    const u32 sum = work + MERGED * STATE_BYTES, maxima = work + WORK_BYTES + Q_BYTES, flag = maxima + WARPS * 32 + WARPS * SLOTS * 8;
    float* partials = p.partials + (u64)layer * p.partial_stride * PARTIAL;
    u32* counters = p.counters + (u64)layer * p.batch * p.kv_heads * p.head_blocks;
    const Item it = {kept.request, kept.head, kept.begin, kept.end, kept.split, kept.splits, kept.slot, kept.first_slot, kept.slot_step, kept.zero_slot};
    const Heads h = heads_of(p, it, layer);
    const u32 first_head = h.first, n = h.n, counter = it.request * p.kv_heads * p.head_blocks + it.head;
    const u64 q_row = h.at;
    float* own = partials + (u64)it.slot * PARTIAL;
    for (u32 o = threadIdx.x; o < n * HEAD_DIM; o += WARPS * 32) {
        const u32 head = o / HEAD_DIM, channel = o % HEAD_DIM, slice = channel / 16, r = channel % 16;
        const u32 holder = r % 8 * 4 + head / 2, e = r / 8 * 2 + head % 2;
        float v = load_shared_float(sum + ((slice * 4 + e) * 32 + holder) * 4);
#if K_BITS != 16
        v += load_shared_float(sum + ((SLICES * 4 + head % 2) * 32 + v_group(slice) * 4 + head / 2) * 4);
#endif
        float weights = load_shared_float(sum + ((SLICES * 4 + 2 + head % 2) * 32 + head / 2) * 4);
        if (it.splits > 1) {
            __stcg(own + o, v);
            if (channel == 0) __stcg(own + HEADS * HEAD_DIM + HEADS + head, weights);
        } else {
            if (p.sink_logits) {
                const float logit = p.sink_logits[first_head + head] * 1.4426950408889634f;
                float m = NOTHING;
                for (int w = 0; w < WARPS; w++) m = fmaxf(m, load_shared_float(maxima + w * 32 + head * 4));
                const float most = fmaxf(m, logit), f = exp2_approx(m - most);
                v *= f, weights = weights * f + exp2_approx(logit - most);
            }
            store_out(p, q_row + o, v / weights);
        }
    }
    if (it.splits > 1) {
        if (warp == 0 && lane < 4) {
            __stcg(own + HEADS * HEAD_DIM + 2 * lane, s.m0);
            __stcg(own + HEADS * HEAD_DIM + 2 * lane + 1, s.m1);
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            u32 before;
            asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(counters + counter) : "memory");
            if (before == it.splits - 1) counters[counter] = 0;
            store_shared(flag, before == it.splits - 1);
        }
        __syncthreads();
        if (load_shared(flag)) {
            // The last one to come merges all: first each head's weight, then four channels a thread, split by split in order.
            for (u32 head = warp; head < n; head += WARPS) {
                const float extra = p.sink_logits ? p.sink_logits[first_head + head] * 1.4426950408889634f : NOTHING;
                const Total total = total_of(partials, it, head, extra, lane);
                if (lane == 0) store_shared_float(maxima + head * 8, total.m), store_shared_float(maxima + head * 8 + 4, total.inverse);
            }
            __syncthreads();
            constexpr u32 FOURS = HEAD_DIM / 4, THREADS = WARPS * 32;
            const u32 positions = n * FOURS, teams = max(1u, THREADS / positions);
            const u32 team = threadIdx.x / positions;
            for (u32 pos = teams > 1 ? threadIdx.x % positions : threadIdx.x; pos < positions && team < teams; pos += THREADS) {
                const u32 head = pos / FOURS;
                const float m = load_shared_float(maxima + head * 8), inverse = load_shared_float(maxima + head * 8 + 4);
                float4 a = make_float4(0, 0, 0, 0);
#pragma unroll 4
                for (u32 i = team; i < it.splits; i += teams) {
                    const float* part = partials + (u64)(i == 0 ? it.zero_slot : it.first_slot + i * it.slot_step) * PARTIAL;
                    const float f = exp2_approx(__ldcg(part + HEADS * HEAD_DIM + head) - m) * inverse;
                    const float4 b = __ldcg((const float4*)part + pos);
                    a.x += f * b.x, a.y += f * b.y, a.z += f * b.z, a.w += f * b.w;
                }
                store_shared_float4(work + (team * positions + pos) * 16, a);
            }
            __syncthreads();
            for (u32 pos = threadIdx.x; pos < positions; pos += THREADS) {
                float4 a = load_shared_float4(work + pos * 16);
                for (u32 i = 1; i < teams; i++) {
                    const float4 b = load_shared_float4(work + (i * positions + pos) * 16);
                    a.x += b.x, a.y += b.y, a.z += b.z, a.w += b.w;
                }
                const u64 at = q_row + pos * 4;
                store_out(p, at, a.x), store_out(p, at + 1, a.y), store_out(p, at + 2, a.z), store_out(p, at + 3, a.w);
            }
        }
    }
}

// Which item comes next for this block, if any; `piece` becomes the one after it.
DEVICE bool next_item(Item& it, u32& piece, const Glance& seen, const Params& p, Row& row) {
    const u32 heads = p.kv_heads * p.head_blocks, c = blockIdx.x, grid = gridDim.x;
    const bool balanced = p.chunk == 0 && seen.cut == 0;
    const u32 quota = (seen.pieces + grid - 1) / grid;
    const u32 stop = balanced ? min(seen.pieces, (c + 1) * quota) : seen.pieces;
    if (piece >= stop) return false;
    const Request r = request_of(seen, p.plan, p.lens, p.slots, p.first_visible, p.batch, piece);
    const u32 of_row = (r.after - r.before) / heads;
    it.request = r.number;
    it.head = (piece - r.before) / of_row;
    const u32 start = r.before + it.head * of_row, at = piece - start;
    row.e = extent_of(p.rule, r.len, r.first, K_BITS != 16);
    row.slot = r.slot;
    row.kv_head = it.head / p.head_blocks;
    if (!balanced) {
        const u32 units = row.e.units();
        it.begin = p.chunk ? at * p.chunk : (u32)((u64)units * at / of_row);
        it.end = p.chunk ? min(it.begin + p.chunk, units) : (u32)((u64)units * (at + 1) / of_row);
        it.split = at, it.splits = of_row, it.slot = piece;
        it.zero_slot = it.first_slot = start, it.slot_step = 1;
        piece += grid;
        return true;
    }
    it.begin = at;
    it.end = min(of_row, at + stop - piece);
    // Of a row's blocks the first one's part ends its own work, the others' begin it: two places a block.
    const u32 first = start / quota, last = (start + of_row - 1) / quota;
    it.split = c - first, it.splits = last - first + 1;
    it.slot = 2 * c + (at == 0 ? 1 : 0);
    it.zero_slot = 2 * first + 1, it.first_slot = 2 * first, it.slot_step = 2;
    piece += it.end - it.begin;
    return true;
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS_PER_SM) attend(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) u8 shared[];
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const u32 work = shared_address(shared), q = work + WORK_BYTES, maxima = q + Q_BYTES;
    const u32 ring = work + warp * RING_BYTES, barriers = maxima + WARPS * 32 + warp * SLOTS * 8;
    const u32 sum = work + MERGED * STATE_BYTES;
    // The item waits here while registers are needed for its units.
    volatile Kept& kept = *(Kept*)(shared + WORK_BYTES + Q_BYTES + WARPS * 32 + WARPS * SLOTS * 8 + 16);
    const u32 layer = blockIdx.y;
#if BULK
    if (lane == 0) {
#pragma unroll
        for (int i = 0; i < SLOTS; i++) barrier_init(barriers + i * 8);
        fence_copy_engine();
    }
    __syncwarp();
#endif
    wait_for_inputs();
    let_next_start();
    u32 slot = 0, parity = 0;
    for (bool first = true;; first = false) {
        Item it;
        Row row;
        const Glance seen = glance(p.plan, p.lens, p.slots, p.first_visible, p.batch, lane);
        const bool balanced = p.chunk == 0 && seen.cut == 0;
        u32 piece = !first ? kept.piece : balanced ? blockIdx.x * ((seen.pieces + gridDim.x - 1) / gridDim.x) : blockIdx.x;
        if (!next_item(it, piece, seen, p, row)) break;
        // Every warp has read what is kept before it is written anew.
        __syncthreads();
        if (threadIdx.x == 0) keep(kept, it, row, piece);
        Feed feed = {it.begin + warp, 0, 0};
        if (feed.unit < it.end) feed.page = page_number(p, row, feed.unit);
#pragma unroll 1
        for (int i = 0; i < SLOTS; i++) feed_next(feed, p, layer, row, it.end, ring, barriers, (slot + i) % SLOTS, lane);
        // The row's query heads, scaled; heads and channels that are not there are zeros.
        const Heads h = heads_of(p, it, layer);
        for (u32 i = threadIdx.x; i < HEADS * CHANNELS / 2; i += WARPS * 32) {
            const u32 head = i / (CHANNELS / 2), channel = i % (CHANNELS / 2) * 2;
            u32 x = 0;
            if (head < h.n && channel < HEAD_DIM) {
                const u32 two = *(const u32*)(p.q + h.at + head * HEAD_DIM + channel);
                x = half2_of(float_of(two & 0xffff) * p.scale, float_of(two >> 16) * p.scale);
            }
            store_shared(q + head * Q_WORDS * 4 + channel * 2, x);
        }
        __syncthreads();
        State s;
        run_units(s, p, layer, kept.row, kept.item.begin, kept.item.end, ring, barriers, q, feed, slot, parity);
        __syncthreads();
        merge_warps(s, work, sum, maxima);
        finish_item(p, kept.item, s, work);
        // What was written here plainly is next written by the copy engine.
#if BULK
        fence_copy_engine();
#endif
        __syncthreads();
    }
}
