// A plain f16 cache and attention over it, written to be checked by eye: the control of tests of the model. Slow.
#include "device.cuh"

struct Plain {
    u16 *k, *v;            // f16 [slot][max_tokens][kv_heads][d] of one layer
    const u32* positions;  // [rows], NOBODY: padding
    const u32* slots;      // [rows]
    u32 max_tokens, q_heads, kv_heads, d;
    float scale;
};

// k, v: f16 [rows][kv_heads][d]. Grid: rows.
extern "C" __global__ void plain_append(const Plain p, const u16* k, const u16* v) {
    const u32 row = blockIdx.x, position = p.positions[row], len = p.kv_heads * p.d;
    if (position == NOBODY) return;
    const u64 to = ((u64)p.slots[row] * p.max_tokens + position) * len;
    for (u32 i = threadIdx.x; i < len; i += blockDim.x) {
        p.k[to + i] = k[(u64)row * len + i];
        p.v[to + i] = v[(u64)row * len + i];
    }
}

// q: f16 [rows][q_heads][d]; out: bf16, the same shape. A row sees positions up to its own. Grid: (q_heads, rows); one warp.
extern "C" __global__ void plain_attend(const Plain p, const u16* q, u16* out) {
    const u32 lane = threadIdx.x, head = blockIdx.x, row = blockIdx.y, position = p.positions[row];
    const u64 at = ((u64)row * p.q_heads + head) * p.d;
    float asked[8], acc[8], most = -1e30f, sum = 0.f;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        asked[i] = lane + i * 32 < p.d ? from_f16(q[at + lane + i * 32]) : 0.f;
        acc[i] = 0.f;
    }
    const u32 len = p.kv_heads * p.d;
    const u64 from = (u64)p.slots[row] * p.max_tokens * len + head / (p.q_heads / p.kv_heads) * p.d;
    const u32 keys = position == NOBODY ? 0 : position + 1;
    for (u32 key = 0; key < keys; key++) {
        const u64 of = from + (u64)key * len;
        float score = 0.f;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            if (lane + i * 32 < p.d) score += asked[i] * from_f16(p.k[of + lane + i * 32]);
        }
        score = warp_sum(score) * p.scale;
        const float top = fmaxf(most, score), shrink = __expf(most - top), weight = __expf(score - top);
        most = top;
        sum = sum * shrink + weight;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            if (lane + i * 32 < p.d) acc[i] = acc[i] * shrink + weight * from_f16(p.v[of + lane + i * 32]);
        }
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        if (lane + i * 32 < p.d) out[at + lane + i * 32] = to_bf16(keys ? acc[i] / sum : 0.f);
    }
}
