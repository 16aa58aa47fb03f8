// Instructions that CUDA C++ has no word for, and types of fixed size. No include of any toolkit header: kernels are compiled
// at run time on machines that have none.
#pragma once
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE static __device__ __forceinline__
#define DEVICE_MEMBER __device__ __forceinline__

// Two f16 in one register: the low half first.
DEVICE u32 half2_of(float low, float high) {
    u32 d;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}
DEVICE u16 half_of(float x) {
    u16 d;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(d) : "f"(x));
    return d;
}
DEVICE u16 bf16_of(float x) {
    u16 d;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(d) : "f"(x));
    return d;
}
DEVICE float float_of(u16 half) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(half));
    return x;
}
DEVICE u32 mul2(u32 a, u32 b) {
    u32 d;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
// 2^x, subnormal results flushed: -inf gives 0.
DEVICE float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// c[16][8] += a[16][16] * b[16][8], f16 in, f32 out. Lane (g, t) = (lane / 4, lane % 4) holds
//   a0: row g,     columns 2t, 2t+1        a1: row g + 8, the same columns
//   a2: row g,     columns 2t + 8, 2t + 9  a3: row g + 8, the same columns
//   b0: rows 2t, 2t+1 of column g          b1: rows 2t + 8, 2t + 9
//   c0, c1: row g, columns 2t, 2t+1        c2, c3: row g + 8
DEVICE void mma(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// The same with c = 0 before.
DEVICE void mma_first(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
        : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(0.0f));
}
// Transposes an 8x8 tile of f16 over the warp.
DEVICE u32 transpose8(u32 a) {
    u32 d;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
    return d;
}

// Shared memory by 32-bit address. Volatile: what the copy engine has written is not known to the compiler.
DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEVICE uint4 load_shared4(u32 a) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a));
    return v;
}
DEVICE uint2 load_shared2(u32 a) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(a));
    return v;
}
DEVICE u32 load_shared(u32 a) {
    u32 x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(a) : "memory");
    return x;
}
DEVICE float load_shared_float(u32 a) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(a) : "memory");
    return x;
}
DEVICE void store_shared(u32 a, u32 x) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(a), "r"(x) : "memory"); }
DEVICE void store_shared_float(u32 a, float x) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(a), "f"(x) : "memory"); }
DEVICE void store_shared_float4(u32 a, float4 x) {
    asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(a), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w) : "memory");
}
DEVICE float4 load_shared_float4(u32 a) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(a) : "memory");
    return v;
}

// Asynchronous copies of 16 bytes a lane (sm_80 on).
DEVICE void copy16(u32 to, const u8* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT>
DEVICE void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }

// The bulk copy engine and the barriers that it reports to (sm_90 on).
#if __CUDA_ARCH__ >= 900
DEVICE void barrier_init(u32 barrier) { asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(barrier) : "memory"); }
DEVICE void barrier_wait(u32 barrier, u32 parity) {
    asm volatile("{\n.reg .pred p;\nL%=: mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n@!p bra L%=;\n}" ::"r"(barrier), "r"(parity)
                 : "memory");
}
DEVICE void bulk_copy(u32 to, const u8* from, u32 bytes, u32 barrier) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes),
                 "r"(barrier)
                 : "memory");
}
// Orders ordinary accesses of shared memory before those of the copy engine.
DEVICE void fence_copy_engine() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
#endif

// The two ends of an early launch: a kernel launched early may begin beside the one in front of it, and touches what that wrote behind
// wait_for_inputs only; let_next_start lets the next one begin. What is never written between steps (weights) may be read before.
DEVICE void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEVICE void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
