// Reads a buffer once, 16 bytes per load, eight loads in flight per thread: the ceiling of everything that reads.
//
// data: [count] of 16 bytes, aligned; out: one word, written when the exclusive or of a thread's words is a number that hardly
// ever comes, so that no load can be left out. Grid: any.
extern "C" __global__ void __launch_bounds__(512) read_all(const uint4* __restrict__ data, unsigned long long count, unsigned* __restrict__ out) {
    const unsigned long long stride = (unsigned long long)gridDim.x * blockDim.x;
    unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
    unsigned seen = 0;
    for (; i + 7 * stride < count; i += 8 * stride) {
        uint4 a[8];
#pragma unroll
        for (int j = 0; j < 8; j++)
            asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                         : "=r"(a[j].x), "=r"(a[j].y), "=r"(a[j].z), "=r"(a[j].w)
                         : "l"(data + i + j * stride));
#pragma unroll
        for (int j = 0; j < 8; j++) seen ^= a[j].x ^ a[j].y ^ a[j].z ^ a[j].w;
    }
    for (; i < count; i += stride) {
        const uint4 a = data[i];
        seen ^= a.x ^ a.y ^ a.z ^ a.w;
    }
    if (seen == 0x1234567u) *out = seen;
}
