// Appending on the GPU: rows into plain tiles, whole groups into records, and records back into plain tiles.
//
// Defined from outside: HEAD_DIM GROUP_LEN K_BITS V_BITS (record.cuh; K_BITS 16: only write_rows), ROWS_BYTES, PACK_BYTES and
// PACK_SHARED_BYTES (sizes as the launcher, mod.rs, knows them).
//
// The quantizer is the formula of crates/kv/src/quant/affine.rs: zero = f16(min), scale = f16((max - min) / (2^bits - 1)) rounded
// once, code = clamp(rint((x - zero) / scale)) by true division; the same numbers come out as on the CPU.
#include "extent.cuh"
#include "record.cuh"
using namespace record;

constexpr int THREADS = 256;

// Where plain tiles lie: tile i of kv head h at base + h * head_stride + (i - first) % ring * TILE_BYTES.
struct Tiles {
    u8* base;
    u64 slot_stride;   // bytes from one slot's tiles to the next one's (rings), 0: one sequence
    u64 layer_stride;  // from one layer's to the next one's
    u32 ring;          // tiles of one head
    u32 first;         // number of the first tile held
};
DEVICE u8* tile_at(const Tiles& t, u32 layer, u32 slot, u32 head, u32 tile) {
    return t.base + layer * t.layer_stride + slot * t.slot_stride + ((u64)head * t.ring + (tile - t.first) % t.ring) * TILE_BYTES;
}

// Pages: records of a group, or plain tiles.
struct Paged {
    u8* base;
    u64 layer_stride;
    u32 log2;  // groups (tiles) of a page
};
DEVICE u8* paged_at(const Paged& p, const u32* table, u32 layer, u32 kv_heads, u32 head, u32 i, u32 bytes) {
    const u32 page = table[i >> p.log2];
    return p.base + layer * p.layer_stride + ((u64)(page * kv_heads + head << p.log2) + (i & (1u << p.log2) - 1)) * bytes;
}

// The first value that f16 cannot hold, by position: who writes a flag wins.
struct Fault {
    u32 seen, tensor, layer, head, position, slot, bits;  // bits: of the f16 value
};
DEVICE void report(Fault* fault, u32 tensor, u32 layer, u32 head, u32 position, u32 slot, u16 x) {
    if (atomicCAS(&fault->seen, 0u, 1u) == 0) {
        fault->tensor = tensor, fault->layer = layer, fault->head = head, fault->position = position, fault->slot = slot, fault->bits = x;
    }
}
DEVICE bool finite(u16 x) { return (x & 0x7c00) != 0x7c00; }

struct RowsParams {
    const u16* k;  // f16 [rows][kv_heads][head_dim]
    const u16* v;
    const u32* lens;   // [batch] tokens, the new one included; null: one sequence, rows at positions first ..
    const u32* slots;  // [batch]
    const u32* table;  // [slot][table_len]
    u32 table_len, kv_heads, layer, first, slot;
    u32 named;         // the layer as faults name it
    u32 sinks;         // first tokens kept apart
    u32 paged;         // rows go into pages (a plain cache), else into tiles
    Tiles tiles;
    Tiles sink_tiles;  // one tile a head
    Paged pages;
    Fault* fault;
};
static_assert(sizeof(RowsParams) == ROWS_BYTES, "");

// One row a block: row blockIdx.x. A value that f16 cannot hold is reported and stored as 0: its request ends, and whoever gets
// its place next finds numbers only.
extern "C" __global__ void __launch_bounds__(THREADS) write_rows(const __grid_constant__ RowsParams p) {
    wait_for_inputs();
    let_next_start();
    const u32 row = blockIdx.x;
    u32 position = p.first + row, slot = p.slot;
    if (p.lens) {
        if (p.lens[row] == 0) return;
        position = p.lens[row] - 1, slot = p.slots[row];
    }
    const u32* table = p.table + (u64)slot * p.table_len;
    const u32 token = position % 16, tile = position / 16;
    for (u32 i = threadIdx.x; i < p.kv_heads * HEAD_DIM / 2; i += THREADS) {
        const u32 head = i / (HEAD_DIM / 2), channel = i % (HEAD_DIM / 2) * 2;
        const u64 at = ((u64)row * p.kv_heads + head) * HEAD_DIM + channel;
        u32 k = *(const u32*)(p.k + at), v = *(const u32*)(p.v + at);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const u16 x = k >> 16 * h, y = v >> 16 * h;
            if (!finite(x)) report(p.fault, 0, p.named, head, position, slot, x), k &= ~(0xffffu << 16 * h);
            if (!finite(y)) report(p.fault, 1, p.named, head, position, slot, y), v &= ~(0xffffu << 16 * h);
        }
        auto put = [&](u8* to, u32 token) {
            *(u32*)(to + tile_key_at(token, channel)) = k;
            *(u16*)(to + tile_value_at(token, channel)) = v;
            *(u16*)(to + tile_value_at(token, channel + 1)) = v >> 16;
        };
        if (p.paged) put(paged_at(p.pages, table, p.layer, p.kv_heads, head, tile, TILE_BYTES), token);
        else put(tile_at(p.tiles, p.layer, slot, head, tile), token);
        if (position < p.sinks) put(tile_at(p.sink_tiles, p.layer, slot, head, 0), position);
    }
}

struct MoveParams {
    Tiles from, to;
    u32 kv_heads, layer, from_slot, to_slot, first, count;  // tiles
};
// Copies tiles first .. first + count of every head; one tile a block: (tile, head).
extern "C" __global__ void __launch_bounds__(THREADS) move_tiles(const __grid_constant__ MoveParams p) {
    const u32 tile = p.first + blockIdx.x, head = blockIdx.y;
    const uint4* from = (const uint4*)tile_at(p.from, p.layer, p.from_slot, head, tile);
    uint4* to = (uint4*)tile_at(p.to, p.layer, p.to_slot, head, tile);
    for (u32 i = threadIdx.x; i < TILE_BYTES / 16; i += THREADS) to[i] = from[i];
}

#if K_BITS != 16
struct PackParams {
    Rule rule;
    const u32* lens;   // [batch]; null: groups first_group + blockIdx.y of one sequence
    const u32* slots;
    const u32* table;
    u32 table_len, kv_heads, layer, first_group, slot;
    Tiles tiles;       // where the rows are
    Paged records;
    Paged copies;      // plain tiles of packed groups (dequantized); base null: none
    u32 first_layer;
};
static_assert(sizeof(PackParams) == PACK_BYTES, "");

// Codes of a group in shared memory, one byte each: [token][CHANNELS].
constexpr int CODE_BYTES = GROUP_LEN * CHANNELS;
constexpr int K_PARAM_FLOATS = 2 * CHANNELS, V_PARAM_FLOATS = 2 * GROUP_LEN * V_GROUPS;
constexpr int PACK_SHARED = CODE_BYTES + 4 * (K_PARAM_FLOATS > V_PARAM_FLOATS ? K_PARAM_FLOATS : V_PARAM_FLOATS);
static_assert(PACK_SHARED == PACK_SHARED_BYTES, "");

// (max - min) / (2^bits - 1), rounded to f16 once: the difference of two f16 is exact in f64, and a division by a small whole number
// is rounded right by one step of refinement, without the subroutine that general division needs.
DEVICE u16 scale_of(float min, float max, int bits) {
    const double range = (double)max - (double)min, top = (double)((1 << bits) - 1), inverse = 1.0 / top;
    const double near = range * inverse, scale = fma(fma(-near, top, range), inverse, near);
    u16 half;
    asm("cvt.rn.f16.f64 %0, %1;" : "=h"(half) : "d"(scale));
    return half;
}
DEVICE u8 code_of(float x, float zero, float scale, int bits) {
    if (scale == 0.0f) return 0;
    const float quotient = __fdiv_rn(x - zero, scale);
    return (u8)__float2int_rn(fminf(fmaxf(quotient, 0.0f), (float)((1 << bits) - 1)));
}

DEVICE float key_of(const u8* tile, u32 token, u32 channel) { return float_of(*(const u16*)(tile + tile_key_at(token, channel))); }
DEVICE float value_of(const u8* tile, u32 token, u32 channel) { return float_of(*(const u16*)(tile + tile_value_at(token, channel))); }

// A word of a part's codes: `codes` [token][CHANNELS] of the part. KEYS: which operand.
template <int BITS, bool KEYS>
DEVICE u32 pack_word(const u8* codes, u32 word, u32 lane) {
    const u32 g = lane / 4, t = lane % 4;
    u32 x = 0;
    auto code = [&](u32 tile, u32 slice, u32 s, u32 q, u32 h) -> u32 {
        if (slice >= SLICES) return 0;
        const u32 token = tile * 16 + (KEYS ? g + 8 * s : 2 * t + 8 * s + h);
        const u32 channel = slice * 16 + (KEYS ? 4 * t + 2 * q + h : g + 8 * q);
        return codes[token * CHANNELS + channel];
    };
    if (BITS == 4) {
        const u32 slice = word / TILES, tile = word % TILES;
        for (u32 i = 0; i < 8; i++) x |= code(tile, slice, i & 1, i >> 1 & 1, i >> 2) << (16 * (i >> 2) + 8 * (i & 1) + 4 * (i >> 1 & 1));
    } else if (BITS == 8) {
        const u32 q = word % 2, slice = word / 2 / TILES, tile = word / 2 % TILES;
        for (u32 i = 0; i < 4; i++) x |= code(tile, slice, i & 1, q, i >> 1) << (16 * (i >> 1) + 8 * (i & 1));
    } else if (BITS == 2) {
        const u32 pair = word / TILES, tile = word % TILES;
        for (u32 i = 0; i < 16; i++) {
            const u32 s = i & 1, q = i >> 1 & 1, f = i >> 2 & 1, h = i >> 3;
            x |= code(tile, 2 * pair + f, s, q, h) << (16 * h + 8 * s + 4 * f + 2 * q);
        }
    } else {
        const u32 which = word % 3, four = word / 3 / TILES, tile = word / 3 % TILES;
        for (u32 i = 0; i < 32; i++) {
            const u32 s = i & 1, q = i >> 1 & 1, f = i >> 2 & 1, h = i >> 3 & 1, l = i >> 4;
            const u32 c = code(tile, 4 * four + 2 * l + f, s, q, h);
            if (which == 2) x |= (c >> 2) << (16 * h + 8 * l + s + 2 * (2 * f + q));
            else if (which == l) x |= (c & 3) << (16 * h + 8 * s + 4 * f + 2 * q);
        }
    }
    return x;
}

// Packs group `group` of one head. All threads of the block.
DEVICE void pack_group(const PackParams& p, u32 layer, u32 slot, u32 head, u32 group, u8* record, u8* shared) {
    u8* codes = shared;
    float* zeros = (float*)(shared + CODE_BYTES);
    const u32 first = group * GROUP_LEN, sinks = p.rule.sinks > first ? p.rule.sinks - first : 0;
    auto tile = [&](u32 token) -> const u8* { return tile_at(p.tiles, layer, slot, head, (first + token) / 16); };
    // Keys: a channel a thread.
    float* scales = zeros + CHANNELS;
    for (u32 channel = threadIdx.x; channel < CHANNELS; channel += THREADS) {
        u16 zero = 0, scale = 0;
        if (channel < HEAD_DIM) {
            float min = 3.4e38f, max = -3.4e38f;
            for (u32 token = sinks; token < GROUP_LEN; token++) {
                const float x = key_of(tile(token), token % 16, channel);
                min = fminf(min, x), max = fmaxf(max, x);
            }
            zero = half_of(min + 0.0f), scale = scale_of(min, max, K_BITS);
        }
        zeros[channel] = float_of(zero), scales[channel] = float_of(scale);
        u16* params = (u16*)(record + (channel / 16 * 4 + channel % 16 / 4) * 16 + channel % 4 * 2);
        params[0] = scale, params[4] = zero;
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < CODE_BYTES; i += THREADS) {
        const u32 token = i / CHANNELS, channel = i % CHANNELS;
        codes[i] = channel < HEAD_DIM ? code_of(key_of(tile(token), token % 16, channel), zeros[channel], scales[channel], K_BITS) : 0;
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < PARTS * K_WORDS * LANES; i += THREADS) {
        const u32 part = i / (K_WORDS * LANES), word = i / LANES % K_WORDS, lane = i % LANES;
        u8* to = record + K_PARAM_BYTES + part * PART_BYTES;
        *(u32*)(to + word_at(K_WORDS, word, lane)) = pack_word<K_BITS, true>(codes + part * PART_LEN * CHANNELS, word, lane);
    }
    __syncthreads();
    // Values: a token and value group a thread.
    scales = zeros + GROUP_LEN * V_GROUPS;
    for (u32 i = threadIdx.x; i < GROUP_LEN * V_GROUPS; i += THREADS) {
        const u32 token = i / V_GROUPS, group = i % V_GROUPS;
        float min = 3.4e38f, max = -3.4e38f;
        for (u32 channel = group * V_GROUP_LEN; channel < ::min((group + 1) * V_GROUP_LEN, (u32)HEAD_DIM); channel++) {
            const float x = value_of(tile(token), token % 16, channel);
            min = fminf(min, x), max = fmaxf(max, x);
        }
        const u16 zero = half_of(min + 0.0f), scale = scale_of(min, max, V_BITS);
        zeros[i] = float_of(zero), scales[i] = float_of(scale);
        const u32 part = token / PART_LEN, of_tile = token % 16;
        u8* params = record + K_PARAM_BYTES + part * PART_BYTES + K_CODE_BYTES + V_CODE_BYTES;
        u16* at = (u16*)(params + ((token % PART_LEN / 16 * V_GROUPS + group) * 4 + of_tile % 8 / 2) * 16) + of_tile / 8 * 2 + of_tile % 2;
        at[0] = scale, at[4] = zero;
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < CODE_BYTES; i += THREADS) {
        const u32 token = i / CHANNELS, channel = i % CHANNELS, at = token * V_GROUPS + v_group(channel / 16);
        codes[i] = channel < HEAD_DIM ? code_of(value_of(tile(token), token % 16, channel), zeros[at], scales[at], V_BITS) : 0;
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < PARTS * V_WORDS * LANES; i += THREADS) {
        const u32 part = i / (V_WORDS * LANES), word = i / LANES % V_WORDS, lane = i % LANES;
        u8* to = record + K_PARAM_BYTES + part * PART_BYTES + K_CODE_BYTES;
        *(u32*)(to + word_at(V_WORDS, word, lane)) = pack_word<V_BITS, false>(codes + part * PART_LEN * CHANNELS, word, lane);
    }
    __syncthreads();
}

// Code of a word as pack_word placed it.
template <int BITS>
DEVICE u32 code_in(const u8* codes, int words, u32 slice, u32 tile, u32 s, u32 q, u32 h, u32 lane) {
    const u32 word = word_of(BITS, slice, tile);
    auto get = [&](u32 w) { return *(const u32*)(codes + word_at(words, w, lane)); };
    if (BITS == 4) return get(word) >> (16 * h + 8 * s + 4 * q) & 15;
    if (BITS == 8) return get(word + q) >> (16 * h + 8 * s) & 255;
    if (BITS == 2) return get(word) >> (16 * h + 8 * s + 4 * (slice % 2) + 2 * q) & 3;
    const u32 l = slice / 2 % 2, f = slice % 2;
    const u32 low = get(word + l) >> (16 * h + 8 * s + 4 * f + 2 * q) & 3, high = get(word + 2) >> (16 * h + 8 * l + s + 2 * (2 * f + q)) & 1;
    return low | high << 2;
}

// Fills the plain tiles of a group with what its record gives back: code * scale + zero, rounded to f16. `tile_of(i)`: where tile i
// of the group goes.
template <class F>
DEVICE void dequantize_group(const u8* record, F tile_of) {
    for (u32 i = threadIdx.x; i < GROUP_LEN / 16 * SLICES * LANES; i += THREADS) {
        const u32 lane = i % LANES, slice = i / LANES % SLICES, tile = i / (LANES * SLICES), g = lane / 4, t = lane % 4;
        const u32 part = tile / TILES, in_part = tile % TILES;
        const u8* codes = record + K_PARAM_BYTES + part * PART_BYTES;
        const u8* params = codes + K_CODE_BYTES + V_CODE_BYTES;
        u32 k[4], v[4];
#pragma unroll
        for (u32 r = 0; r < 4; r++) {
            u32 ks = 0, vs = 0;
#pragma unroll
            for (u32 h = 0; h < 2; h++) {
                // Registers of an operand: keys (s, q) = (r % 2, r / 2), values (r / 2, r % 2).
                const u16* kp = (const u16*)(record + (slice * 4 + t) * 16) + 2 * (r / 2) + h;
                const u32 kc = code_in<K_BITS>(codes, K_WORDS, slice, in_part, r % 2, r / 2, h, lane);
                ks |= (u32)half_of(kc * float_of(kp[0]) + float_of(kp[4])) << 16 * h;
                const u16* vp = (const u16*)(params + ((in_part * V_GROUPS + v_group(slice)) * 4 + t) * 16) + 2 * (r / 2) + h;
                const u32 vc = code_in<V_BITS>(codes + K_CODE_BYTES, V_WORDS, slice, in_part, r / 2, r % 2, h, lane);
                const u32 channel = slice * 16 + g + 8 * (r % 2);
                const float x = channel < HEAD_DIM ? vc * float_of(vp[0]) + float_of(vp[4]) : 0.0f;
                vs |= (u32)half_of(x) << 16 * h;
            }
            k[r] = ks, v[r] = vs;
        }
        u8* to = tile_of(tile) + slice * 512 + lane * 16;
        *(uint4*)to = make_uint4(k[0], k[1], k[2], k[3]);
        *(uint4*)(to + TILE_HALF_BYTES) = make_uint4(v[0], v[1], v[2], v[3]);
    }
}

DEVICE void copy_group(const PackParams& p, u32 layer, const u32* table, u32 head, u32 group, const u8* record) {
    dequantize_group(record, [&](u32 tile) {
        return paged_at(p.copies, table, layer, p.kv_heads, head, group * (GROUP_LEN / 16) + tile, TILE_BYTES);
    });
}

// Packs what is due. Decode (lens): blocks (kv head, request, layer), groups that the newest token is the first to see packed.
// Prefill: blocks (kv head, group) of one sequence and layer.
extern "C" __global__ void __launch_bounds__(THREADS) pack_due(const __grid_constant__ PackParams p) {
    extern __shared__ __align__(16) u8 shared[];
    const u32 head = blockIdx.x, layer = p.first_layer + blockIdx.z;
    u32 slot = p.slot, group = p.first_group + blockIdx.y, end = group + 1;
    if (p.lens) {
        const u32 len = p.lens[blockIdx.y];
        if (len < 2) return;
        slot = p.slots[blockIdx.y];
        group = edge_of(p.rule, len - 2) / GROUP_LEN, end = edge_of(p.rule, len - 1) / GROUP_LEN;
    }
    const u32* table = p.table + (u64)slot * p.table_len;
    for (; group < end; group++) {
        u8* record = paged_at(p.records, table, layer, p.kv_heads, head, group, RECORD_BYTES);
        pack_group(p, layer, slot, head, group, record, shared);
        if (p.copies.base) copy_group(p, layer, table, head, group, record);
    }
}

// Dequantizes every packed group of a step's requests into the copies: blocks (kv head, request, run of groups).
extern "C" __global__ void __launch_bounds__(THREADS) dequantize_all(const __grid_constant__ PackParams p) {
    const u32 head = blockIdx.x, len = p.lens[blockIdx.y];
    if (len == 0) return;
    const u32* table = p.table + (u64)p.slots[blockIdx.y] * p.table_len;
    const u32 end = edge_of(p.rule, len - 1) / GROUP_LEN;
    for (u32 group = blockIdx.z; group < end; group += gridDim.z)
        copy_group(p, p.layer, table, head, group, paged_at(p.records, table, p.layer, p.kv_heads, head, group, RECORD_BYTES));
}
#endif
