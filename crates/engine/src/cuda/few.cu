// Products of few rows with a weight matrix: bound by reading weights, which are read once, 16 bytes a load.
//
// y[r][j] = sum_i w[j][i] * x[r][i], rows 1 to 8. Weights are mma's right operand (8 outputs), rows its left one; of the 32
// inputs of a warp's load lane t holds 8 neighbours, on both sides alike, so that no order has to be mended.
// A tile is 8 outputs (of the gated kernel: 8 gates and their 8 ups). The warps of a block share its inputs, 64 neighbours at
// a time, and their sums are added in the order of warps: a row's result depends neither on other rows nor on the grid.
// The loads of the next batch, of the next tile too, are under way while one is multiplied; the first ones before the kernel
// in front has finished.
//
// One row, Qwen3-4B's shape, 12 layers in a graph on an H200 that reads 4,300 GB/s: qkv 9.9 us (3,190 GB/s), gate_up 27.4 (3,640),
// head 185 (4,200), output 8.7 (2,410); down goes to the library's split sums, 16.7 (2,980). What is left of a short product is
// the wait for its input with 64 KB in flight per multiprocessor.
// What lost: squares and norm weights loaded behind the wait, qkv 12.0, gate_up 30.4; asking besides for the rest of a block's
// weights by bulk prefetch into the second-level cache, 13.8 and 33.3; with that, the output projection's weights asked for by
// the kernel in front of attention, a whole step 4.0 ms instead of 3.3.
//
// k is a multiple of 64, n of 8. Shared memory: x as bf16, rows of `stride` bytes; 2 * MATRICES * WARPS * 64 sums; 33 floats.
#include "device.cuh"

#define WARPS 8
#define THREADS (WARPS * 32)
#define LOADS 8  // 16-byte loads of a lane in a batch

enum Input { PLAIN, NORMED };             // bf16 rows; f32 rows that are normalized first
enum Output { STORE, ADD, GATED, LOGITS };  // bf16; added to f32; silu(first) * second as bf16; f32

struct Few {
    const void* x;          // bf16 or f32 [rows][k]
    const float* norm;      // f32 [k] of NORMED
    const u16* w;           // bf16 [n][k], of GATED [2 n][k]
    void* out;              // [rows][n]
    u32 rows, n, k, stride;  // bytes between rows of x in shared memory
    float epsilon;
    u32 first;              // row of x that is row 0
};

__device__ __forceinline__ uint4 load_weights(const u16* at) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at));
    return v;
}

__device__ __forceinline__ void multiply(float (&c)[4], u32 a0, u32 a2, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(0), "r"(a2), "r"(0), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float squared(float4 v, float sum) {
    return fmaf(v.w, v.w, fmaf(v.z, v.z, fmaf(v.y, v.y, fmaf(v.x, v.x, sum))));
}

__device__ __forceinline__ uint2 normed(float4 v, float4 w, float scale) {
    return make_uint2(pack_bf16(v.x * scale * w.x, v.y * scale * w.y), pack_bf16(v.z * scale * w.z, v.w * scale * w.w));
}

// The norm's weights that a thread needs first: they wait for nobody.
#define HELD 3

// Rows of x into shared memory, as bf16. Squares are added in one order, whether a block does a row or each warp one of its own.
template <int INPUT>
__device__ __forceinline__ void stage(const Few& p, char* rows, float* room) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float4 weights[HELD];
    if (INPUT == NORMED && p.rows == 1) {
#pragma unroll
        for (u32 i = 0; i < HELD; i++) {
            const u32 at = threadIdx.x + i * THREADS;
            if (at < p.k / 4) weights[i] = ((const float4*)p.norm)[at];
        }
    }
    wait_for_inputs();
    if (INPUT == PLAIN) {
        const u32 pieces = p.k / 8;
        for (u32 i = threadIdx.x; i < p.rows * pieces; i += THREADS) {
            const u32 row = i / pieces, piece = i % pieces;
            *(uint4*)(rows + row * p.stride + piece * 16) = ((const uint4*)p.x)[(u64)(row + p.first) * pieces + piece];
        }
    } else if (p.rows == 1) {
        const float4* x = (const float4*)((const float*)p.x + (u64)p.first * p.k);
        float4 values[HELD];
        float squares = 0.f;
#pragma unroll
        for (u32 i = 0; i < HELD; i++) {
            const u32 at = threadIdx.x + i * THREADS;
            if (at < p.k / 4) values[i] = x[at];
        }
#pragma unroll
        for (u32 i = 0; i < HELD; i++) {
            if (threadIdx.x + i * THREADS < p.k / 4) squares = squared(values[i], squares);
        }
        for (u32 i = threadIdx.x + HELD * THREADS; i < p.k / 4; i += THREADS) squares = squared(x[i], squares);
        const float scale = rsqrtf(block_sum(squares, room) / p.k + p.epsilon);
#pragma unroll
        for (u32 i = 0; i < HELD; i++) {
            const u32 at = threadIdx.x + i * THREADS;
            if (at < p.k / 4) *(uint2*)(rows + at * 8) = normed(values[i], weights[i], scale);
        }
        for (u32 i = threadIdx.x + HELD * THREADS; i < p.k / 4; i += THREADS)
            *(uint2*)(rows + i * 8) = normed(x[i], ((const float4*)p.norm)[i], scale);
    } else if (warp < p.rows) {
        const float4* x = (const float4*)((const float*)p.x + (u64)(warp + p.first) * p.k);
        float squares[WARPS] = {};
        for (u32 first = lane; first < p.k / 4; first += THREADS) {
#pragma unroll
            for (int w = 0; w < WARPS; w++) {
                if (first + w * 32 < p.k / 4) squares[w] = squared(x[first + w * 32], squares[w]);
            }
        }
#pragma unroll
        for (int w = 0; w < WARPS; w++) squares[w] = warp_sum(squares[w]);
#pragma unroll
        for (int half = WARPS / 2; half > 0; half /= 2) {
#pragma unroll
            for (int w = 0; w < half; w++) squares[w] += squares[w + half];
        }
        const float scale = rsqrtf(squares[0] / p.k + p.epsilon);
        for (u32 i = lane; i < p.k / 4; i += 32)
            *(uint2*)(rows + warp * p.stride + i * 8) = normed(x[i], ((const float4*)p.norm)[i], scale);
    }
    __syncthreads();
}

template <int INPUT, int OUTPUT>
__device__ __forceinline__ void few(const Few& p) {
    constexpr int MATRICES = OUTPUT == GATED ? 2 : 1;
    constexpr int UNITS = LOADS / 2 / MATRICES;  // of 64 inputs, in a batch
    extern __shared__ uint4 memory[];
    char* rows = (char*)memory;
    float* sums = (float*)(rows + p.rows * p.stride);
    float* room = sums + 2 * MATRICES * WARPS * 64;
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const u32 tiles = p.n / 8, units = p.k / 64, batches = (units + WARPS * UNITS - 1) / (WARPS * UNITS);

    // Lane t of output g: inputs 64 u + 8 t, and 32 behind them.
    auto load = [&](uint4 (&held)[LOADS], u32 tile, u32 batch) {
#pragma unroll
        for (int i = 0; i < UNITS; i++) {
            const u32 unit = (batch * UNITS + i) * WARPS + warp;
#pragma unroll
            for (int m = 0; m < MATRICES; m++) {
                const u16* at = p.w + ((u64)m * p.n + tile * 8 + g) * p.k + unit * 64 + t * 8;
                const bool there = unit < units;
                held[(i * MATRICES + m) * 2] = there ? load_weights(at) : make_uint4(0, 0, 0, 0);
                held[(i * MATRICES + m) * 2 + 1] = there ? load_weights(at + 32) : make_uint4(0, 0, 0, 0);
            }
        }
    };

    uint4 held[LOADS], next[LOADS];
    u32 tile = blockIdx.x, batch = 0, parity = 0;
    let_next_start();
    load(held, tile, 0);
    stage<INPUT>(p, rows, room);
    float c[MATRICES][4] = {};
    while (tile < tiles) {
        const bool ends = batch + 1 == batches;
        const u32 next_tile = ends ? tile + gridDim.x : tile, next_batch = ends ? 0 : batch + 1;
        if (next_tile < tiles) load(next, next_tile, next_batch);
#pragma unroll
        for (int i = 0; i < UNITS; i++) {
            const u32 unit = (batch * UNITS + i) * WARPS + warp;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                uint4 x = make_uint4(0, 0, 0, 0);
                if (g < p.rows && unit < units) x = *(const uint4*)(rows + g * p.stride + unit * 128 + half * 64 + t * 16);
#pragma unroll
                for (int m = 0; m < MATRICES; m++) {
                    const uint4 w = held[(i * MATRICES + m) * 2 + half];
                    multiply(c[m], x.x, x.y, w.x, w.y);
                    multiply(c[m], x.z, x.w, w.z, w.w);
                }
            }
        }
        if (ends) {
            // Two rooms for sums, by turns: the barrier of the next tile keeps this tile's readers apart from its writers.
            float* of_tile = sums + parity * MATRICES * WARPS * 64;
            parity ^= 1;
#pragma unroll
            for (int m = 0; m < MATRICES; m++) {
                *(float2*)(of_tile + (m * WARPS + warp) * 64 + g * 8 + t * 2) = make_float2(c[m][0], c[m][1]);
                c[m][0] = c[m][1] = c[m][2] = c[m][3] = 0.f;
            }
            __syncthreads();
            const u32 row = threadIdx.x / 8;
            if (row < p.rows) {
                float y[MATRICES];
#pragma unroll
                for (int m = 0; m < MATRICES; m++) {
                    y[m] = 0.f;
#pragma unroll
                    for (int w = 0; w < WARPS; w++) y[m] += of_tile[(m * WARPS + w) * 64 + threadIdx.x];
                }
                const u64 at = (u64)row * p.n + tile * 8 + threadIdx.x % 8;
                if (OUTPUT == STORE) ((u16*)p.out)[at] = to_bf16(y[0]);
                if (OUTPUT == ADD) ((float*)p.out)[at] += y[0];
                if (OUTPUT == GATED) ((u16*)p.out)[at] = to_bf16(silu(y[0]) * y[MATRICES - 1]);
                if (OUTPUT == LOGITS) ((float*)p.out)[at] = y[0];
            }
        }
#pragma unroll
        for (int i = 0; i < LOADS; i++) held[i] = next[i];
        tile = next_tile;
        batch = next_batch;
    }
}

#define KERNEL(name, input, output) \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) name(const Few p) { few<input, output>(p); }

KERNEL(few_normed_store, NORMED, STORE)
KERNEL(few_plain_add, PLAIN, ADD)
KERNEL(few_normed_gated, NORMED, GATED)
KERNEL(few_normed_logits, NORMED, LOGITS)
