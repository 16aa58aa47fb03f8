// Counts the pieces of work of every request (plan.cuh), once per step for all layers that share a rule. One block.
#include "plan.cuh"

#define THREADS 1024

// plan[b] = pieces of requests before b, plan[batch] = all. heads: rows of a request.
extern "C" __global__ void __launch_bounds__(THREADS, 1) plan_steps(const Rule rule, const u32* lens, const u32* first_visible, u32* plan,
                                                                   u32 batch, u32 heads, u32 packed, u32 chunk) {
    __shared__ u32 of_warp[32];
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    u32 before = 0;
    for (u32 from = 0; from < batch; from += THREADS) {
        const u32 b = from + threadIdx.x;
        u32 own = 0;
        if (b < batch) {
            const u32 units = extent_of(rule, lens[b], first_visible ? first_visible[b] : 0, packed).units();
            own = (chunk ? (units + chunk - 1) / chunk : units) * heads;
        }
        u32 sum = own;
#pragma unroll
        for (u32 o = 1; o < 32; o *= 2) {
            const u32 x = __shfl_up_sync(0xffffffffu, sum, o);
            if (lane >= o) sum += x;
        }
        if (lane == 31) of_warp[warp] = sum;
        __syncthreads();
        u32 earlier = 0, all = 0;
        for (u32 w = 0; w < THREADS / 32; w++) {
            if (w < warp) earlier += of_warp[w];
            all += of_warp[w];
        }
        if (b < batch) plan[b] = before + earlier + sum - own;
        before += all;
        __syncthreads();
    }
    if (threadIdx.x == 0) plan[batch] = before;
}
