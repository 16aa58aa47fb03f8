// What the model's kernels share: conversions, reductions of a warp and a block, and the two ends of an early launch.
// No header of CUDA is needed or available.
#pragma once

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define FULL 0xffffffffu

// A kernel launched early may run beside the one before it; until here it may touch weights only.
__device__ __forceinline__ void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel start its loads of weights.
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

__device__ __forceinline__ float from_bf16(u16 x) { return __uint_as_float((u32)x << 16); }

__device__ __forceinline__ u16 to_bf16(float x) {
    u16 out;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out) : "f"(x));
    return out;
}

__device__ __forceinline__ u32 pack_bf16(float low, float high) { return to_bf16(low) | (u32)to_bf16(high) << 16; }

__device__ __forceinline__ u16 to_f16(float x) {
    u16 out;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out) : "f"(x));
    return out;
}

__device__ __forceinline__ float from_f16(u16 x) {
    float out;
    asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(x));
    return out;
}

// NaN or infinity.
__device__ __forceinline__ bool is_lost(u16 f16) { return (f16 & 0x7c00) == 0x7c00; }

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int i = 16; i > 0; i /= 2) x += __shfl_xor_sync(FULL, x, i);
    return x;
}

// Sum over a block; every thread gets it. `room`: 32 floats in shared memory, for one call.
__device__ __forceinline__ float block_sum(float x, float* room) {
    const u32 lane = threadIdx.x % 32;
    x = warp_sum(x);
    if (lane == 0) room[threadIdx.x / 32] = x;
    __syncthreads();
    return warp_sum(lane < blockDim.x / 32 ? room[lane] : 0.f);
}

__device__ __forceinline__ float silu(float x) { return x / (1.f + __expf(-x)); }

// What a step says of one row. `error`: 0, LOST with layer, head and tensor, or NAN_LOGIT.
struct Outcome {
    u32 token;
    u32 error;
    u32 detail;  // LOST: bits of the value (f32); NAN_LOGIT: which token
    u32 unused;
};

#define LOST 0x80000000u       // | layer << 16 | head << 1 | 1 for V
#define NAN_LOGIT 0x7fffffffu
#define NOBODY 0xffffffffu     // position of a row that pads the batch
