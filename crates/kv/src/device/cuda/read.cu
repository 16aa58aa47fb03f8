// Reads a buffer once, 16 bytes per load, and keeps the loads alive with an exclusive or.
//
// data: [count] of 16 bytes, aligned; out: [gridDim.x * blockDim.x] words.
// Grid: any; four loads in flight per thread.

extern "C" __global__ void __launch_bounds__(512) read_all(const uint4* __restrict__ data, unsigned long long count,
                                                           unsigned* __restrict__ out) {
    const unsigned long long stride = (unsigned long long)gridDim.x * blockDim.x;
    unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
    const unsigned long long thread = i;
    unsigned seen = 0;
    for (; i + 3 * stride < count; i += 4 * stride) {
        uint4 a[4];
#pragma unroll
        for (int j = 0; j < 4; j++) a[j] = data[i + j * stride];
#pragma unroll
        for (int j = 0; j < 4; j++) seen ^= a[j].x ^ a[j].y ^ a[j].z ^ a[j].w;
    }
    for (; i < count; i += stride) {
        const uint4 a = data[i];
        seen ^= a.x ^ a.y ^ a.z ^ a.w;
    }
    out[thread] = seen;
}
