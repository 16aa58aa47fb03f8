// Counts the pieces of work of every request (plan.cuh), once per step for all layers that share a rule. One block.
#include "plan.cuh"

#define THREADS 1024
// Units: two for each of sixteen warps; and of a part of a longer row (half as many blocks were as fast at 4,096 tokens).
#define SHORT_ROW 32
#define LEAST_PART 8

// Sum over the block; every thread gets it.
DEVICE u32 sum_block(u32 x, u32* of_warp) {
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    x = __reduce_add_sync(0xffffffffu, x);
    __syncthreads();
    if (lane == 0) of_warp[warp] = x;
    __syncthreads();
    return __reduce_add_sync(0xffffffffu, of_warp[lane]);
}

// Writes plan [batch + 2]. heads: rows of a request; blocks: of attention's grid; chunk: units of a piece in the invariant mode, else 0.
extern "C" __global__ void __launch_bounds__(THREADS, 1) plan_steps(const Rule rule, const u32* lens, const u32* first_visible, u32* plan,
                                                                   u32 batch, u32 heads, u32 packed, u32 chunk, u32 blocks) {
    __shared__ u32 of_warp[32];
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    auto units_of = [&](u32 b) { return extent_of(rule, lens[b], first_visible ? first_visible[b] : 0, packed).units(); };
    // Sums over all requests, of at most a request a thread or a few.
    auto sum_of = [&](auto f) {
        u32 x = 0;
        for (u32 b = threadIdx.x; b < batch; b += THREADS) x += f(units_of(b));
        return sum_block(x, of_warp);
    };
    u32 cut = chunk;
    if (!chunk) {
        const u32 rows = heads * sum_of([](u32 units) { return units > 0; });
        if (rows <= blocks) {
            // The smallest part of which there are no more than blocks, between an even share and a whole row; but no smaller than what
            // keeps a block's warps at work, and short rows stay whole: merging parts takes longer than reading them.
            const bool short_rows = sum_of([](u32 units) { return units > SHORT_ROW; }) == 0;
            const u32 least = short_rows ? SHORT_ROW : LEAST_PART;
            u32 low = max(least, heads * sum_of([](u32 units) { return units; }) / blocks), high = low;
            auto fits = [&](u32 q) { return heads * sum_of([&](u32 units) { return (units + q - 1) / q; }) <= blocks; };
            while (!fits(high)) low = high + 1, high *= 2;
            while (low < high) {
                const u32 middle = (low + high) / 2;
                if (fits(middle)) high = middle;
                else low = middle + 1;
            }
            cut = high;
        }
    }
    u32 before = 0;
    for (u32 from = 0; from < batch; from += THREADS) {
        const u32 b = from + threadIdx.x;
        u32 own = 0;
        if (b < batch) own = (cut ? (units_of(b) + cut - 1) / cut : units_of(b)) * heads;
        u32 sum = own;
#pragma unroll
        for (u32 o = 1; o < 32; o *= 2) {
            const u32 x = __shfl_up_sync(0xffffffffu, sum, o);
            if (lane >= o) sum += x;
        }
        __syncthreads();
        if (lane == 31) of_warp[warp] = sum;
        __syncthreads();
        u32 earlier = 0, all = 0;
        for (u32 w = 0; w < THREADS / 32; w++) {
            if (w < warp) earlier += of_warp[w];
            all += of_warp[w];
        }
        if (b < batch) plan[b] = before + earlier + sum - own;
        before += all;
    }
    if (threadIdx.x == 0) plan[batch] = before, plan[batch + 1] = chunk ? 0 : cut;
}
