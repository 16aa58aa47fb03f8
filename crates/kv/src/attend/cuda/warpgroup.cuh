// Barriers that some threads arrive at and others wait for, and the matrix instructions of a warpgroup (sm_90a).
#pragma once
#include "ptx.cuh"

// Barriers in shared memory (mbarrier; sm_80 on): a phase ends with the `count`th arrival. Phases are told apart by parity.
DEVICE void phase_init(u32 barrier, u32 count) { asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory"); }
DEVICE void phase_arrive(u32 barrier) {
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(barrier) : "memory");
}
DEVICE void phase_wait(u32 barrier, u32 parity) {
#if __CUDA_ARCH__ >= 900
    asm volatile("{\n.reg .pred p;\nL%=: mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n@!p bra L%=;\n}" ::"r"(barrier), "r"(parity)
                 : "memory");
#else
    asm volatile("{\n.reg .pred p;\nL%=: mbarrier.test_wait.parity.shared.b64 p, [%0], %1;\n@!p bra L%=;\n}" ::"r"(barrier), "r"(parity)
                 : "memory");
#endif
}
// Barrier of the block number `id` among `threads` threads.
DEVICE void join(u32 id, u32 threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

#if WGMMA
// d[64][N] (+)= a[64][16] * b[16][N] by four warps, f16 in, f32 out, not finished before wgmma_wait. Warp w holds rows 16 w ..
// 16 w + 15 of a and d: of a the registers of mma's left operand, of d those of N / 8 results of mma. b, and a if it is in shared
// memory, is told by a descriptor. add: 0: d is not read.
#define EIGHT(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
DEVICE void wgmma32(float* d, const u32* a, u64 b, int add) {
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %21, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {"
                 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
                 "}, {%16,%17,%18,%19}, %20, add, 1, 1, 0;\n}"
                 : EIGHT(0), EIGHT(8)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}
DEVICE void wgmma64(float* d, const u32* a, u64 b, int add) {
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %37, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
                 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,"
                 "%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
                 "}, {%32,%33,%34,%35}, %36, add, 1, 1, 0;\n}"
                 : EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}
DEVICE void wgmma128(float* d, const u32* a, u64 b, int add) {
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %69, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
                 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,"
                 "%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,"
                 "%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
                 "}, {%64,%65,%66,%67}, %68, add, 1, 1, 0;\n}"
                 : EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24), EIGHT(32), EIGHT(40), EIGHT(48), EIGHT(56)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}
DEVICE void wgmma64_shared(float* d, u64 a, u64 b, int add) {
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
                 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,"
                 "%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
                 "}, %32, %33, add, 1, 1, 0, 0;\n}"
                 : EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24)
                 : "l"(a), "l"(b), "r"(add));
}
#undef EIGHT

// A matrix in shared memory without swizzle: 8 rows x 16 bytes (8 of k) lie together, `next_k` bytes from the 8 next of k and 128
// bytes from the next 8 rows.
DEVICE u64 matrix_at(u32 address, u32 next_k) { return (u64)(address >> 4) | (u64)(next_k >> 4) << 16 | (u64)(128 >> 4) << 32; }
// Before the first wgmma that reads or writes registers which other instructions wrote.
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>
DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory"); }
// Keeps the compiler from moving uses of x before here.
template <int N>
DEVICE void hold(float* x) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(x[i])::"memory");
}
template <int COUNT>
DEVICE void more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT>
DEVICE void fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }
#endif
