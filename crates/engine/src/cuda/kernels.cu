// The small kernels of a step: embedding, norm, heads (bias, norm, rotary embedding, basis), gate, choice of a token; and two
// that make weights: random ones, and output projections that take rotated heads.
//
// Shapes stand at each kernel. One row of a batch never reads another.
#include "device.cuh"

// stream f32 [rows][hidden] = table bf16 [vocabulary][hidden] of tokens; also begins the rows' outcomes.
// Grid: rows.
extern "C" __global__ void embed(const u32* tokens, const u16* table, float* stream, Outcome* outcomes, u32 hidden) {
    wait_for_inputs();
    let_next_start();
    const u64 row = blockIdx.x;
    const u16* from = table + (u64)tokens[row] * hidden;
    for (u32 i = threadIdx.x; i < hidden; i += blockDim.x) stream[row * hidden + i] = from_bf16(from[i]);
    if (threadIdx.x == 0) outcomes[row] = Outcome{0, 0, 0, 0};
}

// out bf16 [rows][hidden] = x / sqrt(mean(x^2) + epsilon) * weight. Grid: rows; `first`: the row of x that is row 0.
extern "C" __global__ void rms_norm(const float* x, const float* weight, u16* out, u32 hidden, float epsilon, u32 first) {
    __shared__ float room[33];
    wait_for_inputs();
    let_next_start();
    x += (u64)(blockIdx.x + first) * hidden;
    float squares = 0.f;
    for (u32 i = threadIdx.x; i < hidden; i += blockDim.x) squares += x[i] * x[i];
    const float scale = rsqrtf(block_sum(squares, room) / hidden + epsilon);
    for (u32 i = threadIdx.x; i < hidden; i += blockDim.x) out[(u64)blockIdx.x * hidden + i] = to_bf16(x[i] * scale * weight[i]);
}

// out bf16 [rows][width] = silu(gate) * up, of bf16 [rows][gate width, up width]. Grid: (ceil(width / threads), rows).
extern "C" __global__ void gate(const u16* gate_up, u16* out, u32 width) {
    wait_for_inputs();
    let_next_start();
    const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= width) return;
    const u16* row = gate_up + (u64)blockIdx.y * 2 * width;
    out[(u64)blockIdx.y * width + i] = to_bf16(silu(from_bf16(row[i])) * from_bf16(row[width + i]));
}

// The first `count` signs of the basis, one bit each: 1 is minus.
struct Signs {
    u32 minus[8];
};

#define TURN_PLAIN 1
#define TURN_SIGNED 2

// Rotates a head in shared memory: signs, then the Hadamard matrix over blocks of the largest power of two that divides d.
__device__ __forceinline__ void turn_head(float* head, u32 d, u32 turn, const Signs& signs) {
    const u32 lane = threadIdx.x % 32;
    if (turn == TURN_SIGNED) {
        for (u32 i = lane; i < d; i += 32) {
            if (signs.minus[i / 32] >> (i % 32) & 1) head[i] = -head[i];
        }
    }
    const u32 size = d & -d;
    for (u32 half = 1; half < size; half *= 2) {
        __syncwarp();
        for (u32 p = lane; p < d / 2; p += 32) {
            const u32 low = p / half * 2 * half + p % half;
            const float a = head[low], b = head[low + half];
            head[low] = a + b;
            head[low + half] = a - b;
        }
    }
    __syncwarp();
    const float scale = rsqrtf((float)size);
    for (u32 i = lane; i < d; i += 32) head[i] *= scale;
    __syncwarp();
}

struct Heads {
    const u16* qkv;           // bf16 [rows][(q_heads + 2 kv_heads) * d]
    const float* biases;      // f32 [(q_heads + 2 kv_heads) * d], null: none
    const float* norms;       // f32 [2][d], of q and of k; null: none
    const double* turns;      // f64 [d / 2]: full turns per position
    const u32* positions;     // [rows]
    u16 *q, *k, *v;           // f16 [rows][q_heads | kv_heads][d]
    Outcome* outcomes;        // [rows]
    Signs signs;
    u32 rows, q_heads, kv_heads, d, layer, neighbours, turn_keys, turn_values;
    float epsilon;
};

// From products to what the cache takes. One warp per head of a row; grid: (ceil(heads / warps), rows); shared: d floats a warp.
extern "C" __global__ void split_heads(const Heads p) {
    extern __shared__ float rooms[];
    wait_for_inputs();
    let_next_start();
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, all = p.q_heads + 2 * p.kv_heads;
    const u32 at = blockIdx.x * (blockDim.x / 32) + warp, row = blockIdx.y, d = p.d;
    if (at >= all) return;
    float* head = rooms + warp * d;
    const u64 from = ((u64)row * all + at) * d;
    const bool is_v = at >= p.q_heads + p.kv_heads, is_k = !is_v && at >= p.q_heads;
    float squares = 0.f;
    for (u32 i = lane; i < d; i += 32) {
        float x = from_bf16(p.qkv[from + i]);
        if (p.biases) x += p.biases[at * d + i];
        head[i] = x;
        squares += x * x;
    }
    __syncwarp();
    if (!is_v) {
        if (p.norms) {
            const float scale = rsqrtf(warp_sum(squares) / d + p.epsilon);
            for (u32 i = lane; i < d; i += 32) head[i] *= scale * p.norms[is_k * d + i];
            __syncwarp();
        }
        const u32 position = p.positions[row];
        for (u32 i = lane; i < d / 2; i += 32) {
            // In f64 until less than a turn is left: an f32 angle is off by 1e-4 at position 8192.
            double turn = position == NOBODY ? 0.0 : position * p.turns[i];
            turn -= floor(turn);
            float sin, cos;
            sincospif(2.f * (float)turn, &sin, &cos);
            const u32 a = p.neighbours ? 2 * i : i, b = p.neighbours ? a + 1 : i + d / 2;
            const float x = head[a], y = head[b];
            head[a] = x * cos - y * sin;
            head[b] = x * sin + y * cos;
        }
        __syncwarp();
    }
    const u32 turn = is_v ? p.turn_values : p.turn_keys;
    if (turn) turn_head(head, d, turn, p.signs);
    const u32 kv = is_v ? at - p.q_heads - p.kv_heads : at - p.q_heads;
    u16* to = is_v   ? p.v + ((u64)row * p.kv_heads + kv) * d
              : is_k ? p.k + ((u64)row * p.kv_heads + kv) * d
                     : p.q + ((u64)row * p.q_heads + at) * d;
    const bool checked = (is_v || is_k) && p.positions[row] != NOBODY;
    for (u32 i = lane; i < d; i += 32) {
        const u16 rounded = to_f16(head[i]);
        to[i] = rounded;
        if (checked && is_lost(rounded)) {
            // The first one of a row is named; layers come one after another.
            if (atomicCAS(&p.outcomes[row].error, 0, LOST | p.layer << 16 | kv << 1 | is_v) == 0)
                p.outcomes[row].detail = __float_as_uint(head[i]);
        }
    }
}

// Likelier first, of equal ones the lowest; a NaN before all.
__device__ __forceinline__ void keep_likelier(float& best, u32& token, float x, u32 i) {
    const bool lost = x != x, was_lost = best != best;
    if (lost ? !was_lost || i < token : !was_lost && (x > best || (x == best && i < token))) {
        best = x;
        token = i;
    }
}

__device__ __forceinline__ void block_best(float& best, u32& token) {
    __shared__ float bests[32];
    __shared__ u32 tokens[32];
    const u32 lane = threadIdx.x % 32, warps = blockDim.x / 32;
#pragma unroll
    for (int i = 16; i > 0; i /= 2) {
        const float x = __shfl_xor_sync(FULL, best, i);
        const u32 t = __shfl_xor_sync(FULL, token, i);
        keep_likelier(best, token, x, t);
    }
    if (lane == 0) {
        bests[threadIdx.x / 32] = best;
        tokens[threadIdx.x / 32] = token;
    }
    __syncthreads();
    for (u32 w = 0; w < warps; w++) keep_likelier(best, token, bests[w], tokens[w]);
}

#define NEGATIVE_INFINITY __uint_as_float(0xff800000u)

// The likeliest of each part of each row: found f32 and u32 [rows][gridDim.x]. logits: f32 [rows][vocabulary].
extern "C" __global__ void likeliest_of_parts(const float* logits, float* found, u32* tokens, u32 vocabulary) {
    wait_for_inputs();
    let_next_start();
    const u32 parts = gridDim.x, share = (vocabulary + parts - 1) / parts;
    const u32 first = blockIdx.x * share, end = min(first + share, vocabulary);
    const float* row = logits + (u64)blockIdx.y * vocabulary;
    float best = NEGATIVE_INFINITY;
    u32 token = NOBODY;
    for (u32 i = first + threadIdx.x; i < end; i += blockDim.x) keep_likelier(best, token, row[i], i);
    block_best(best, token);
    if (threadIdx.x == 0) {
        found[blockIdx.y * parts + blockIdx.x] = best;
        tokens[blockIdx.y * parts + blockIdx.x] = token;
    }
}

// The likeliest of all parts into the rows' outcomes. Grid: rows; one warp.
extern "C" __global__ void likeliest(const float* found, const u32* tokens, Outcome* outcomes, u32 parts, u32 first) {
    wait_for_inputs();
    let_next_start();
    float best = NEGATIVE_INFINITY;
    u32 token = NOBODY;
    for (u32 i = threadIdx.x; i < parts; i += 32) keep_likelier(best, token, found[blockIdx.x * parts + i], tokens[blockIdx.x * parts + i]);
    block_best(best, token);
    if (threadIdx.x != 0) return;
    Outcome& out = outcomes[blockIdx.x + first];
    out.token = token;
    if (best != best && out.error == 0) {
        out.error = NAN_LOGIT;
        out.detail = token;
    }
}

__device__ __forceinline__ u64 scrambled(u64 x) {
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return x ^ x >> 31;
}

// out bf16 [count]: about normal with this deviation (a sum of four uniform numbers), from seed and index alone.
extern "C" __global__ void random_fill(u16* out, u64 count, u64 seed, float deviation) {
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += (u64)gridDim.x * blockDim.x) {
        const u64 bits = scrambled(scrambled(seed) ^ i);
        float sum = 0.f;
#pragma unroll
        for (int j = 0; j < 4; j++) sum += (float)(bits >> 16 * j & 0xffff) * (1.f / 65536.f);
        out[i] = to_bf16((sum - 1.99997f) * 1.7320508f * deviation);
    }
}

// An output projection that takes heads as they are stored: weights bf16 [rows][heads * d], each head of a row rotated.
// With y the stored head, W * (s * H(y)) = (H(s * W)) * y. Grid: (heads, rows); one warp; shared: d floats.
extern "C" __global__ void turn_weights(u16* weights, Signs signs, u32 d, u32 turn) {
    extern __shared__ float rooms[];
    u16* head = weights + ((u64)blockIdx.y * gridDim.x + blockIdx.x) * d;
    for (u32 i = threadIdx.x; i < d; i += 32) rooms[i] = from_bf16(head[i]);
    __syncwarp();
    turn_head(rooms, d, turn, signs);
    for (u32 i = threadIdx.x; i < d; i += 32) head[i] = to_bf16(rooms[i]);
}
