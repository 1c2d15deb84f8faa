// hopper.cuh - what compute capability 9.0 adds: tensor copies, mbarriers, warpgroup products.
//
// Tiles in shared memory have rows of 64 elements (128 bytes) with the 128-byte swizzle, in which
// both tensor copies write and wgmma reads them; they start at multiples of 1,024 bytes. Wider
// tiles are several of these side by side ("panels").
#ifndef QLORA_HOPPER_CUH
#define QLORA_HOPPER_CUH

#include "common.cuh"

// The opaque descriptor that cuTensorMapEncodeTiled fills.
struct __align__(128) tensor_map {
    uint64_t opaque[16];
};

enum { PANEL = 64, PANEL_ROW = 128 /* bytes */, SWIZZLE_BYTES = 1024 };

__device__ __forceinline__ uint32_t shared_address(const void* p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

// ---- mbarriers ----

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to tensor copies.
__device__ __forceinline__ void barrier_publish() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and makes the phase wait for this many bytes as well.
__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ bool barrier_done(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared.b64 p, [%1], %2;\n"
                 "selp.b32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
    return done != 0;
}

// Waits for the end of the phase with this parity; a new barrier is in phase 0.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
    while (!barrier_done(barrier, parity)) {
    }
}

// ---- tensor copies ----

// Copies a box whose first element is column x of row y; what is outside the matrix becomes zero.
__device__ __forceinline__ void copy_box(uint32_t to, const tensor_map* map, uint32_t barrier,
                                         int32_t x, int32_t y) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4}], [%2];" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(x), "r"(y)
                 : "memory");
}

// ---- warpgroup products ----

// Describes an operand at a shared address. If the product sums along its rows, `leading` is not
// used; otherwise (a transposed operand) it is the distance between panels in bytes.
__device__ __forceinline__ uint64_t operand(uint32_t address, uint32_t leading) {
    return (uint64_t)((address & 0x3ffff) >> 4) | (uint64_t)(leading >> 4) << 16 |
           (uint64_t)(SWIZZLE_BYTES >> 4) << 32 | (uint64_t)1 << 62;
}

__device__ __forceinline__ void products_begin() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void products_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most LEFT committed groups are unfinished.
template <int LEFT> __device__ __forceinline__ void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// Keeps the compiler from moving uses of accumulators across a wait.
template <int N> __device__ __forceinline__ void products_hold(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) {
        asm volatile("" : "+f"(d[i])::"memory");
    }
}

#define HOPPER_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define HOPPER_D16(i) HOPPER_D4(i), HOPPER_D4(i + 4), HOPPER_D4(i + 8), HOPPER_D4(i + 12)
#define HOPPER_D64(i) HOPPER_D16(i), HOPPER_D16(i + 16), HOPPER_D16(i + 32), HOPPER_D16(i + 48)

#define HOPPER_LIST_32                                                                             \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,"   \
    "%25,%26,%27,%28,%29,%30,%31"
#define HOPPER_LIST_48                                                                             \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,"   \
    "%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define HOPPER_LIST_64                                                                             \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,"   \
    "%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47," \
    "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define HOPPER_LIST_128                                                                            \
    HOPPER_LIST_64                                                                                 \
    ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,"    \
    "%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,"  \
    "%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,"   \
    "%125,%126,%127"

// d = a b^T (+ d, if add is not 0) over 16 columns of bf16: 64 rows of a, 128 or 256 rows of b. TA
// and TB are 1 if the operand is stored transposed.
template <int TA, int TB>
__device__ __forceinline__ void product(float (&d)[64], uint64_t a, uint64_t b, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" HOPPER_LIST_64
                 "}, %64, %65, p, 1, 1, %67, %68;\n}"
                 : HOPPER_D64(0)
                 : "l"(a), "l"(b), "r"(add), "n"(TA), "n"(TB));
}

template <int TA, int TB>
__device__ __forceinline__ void product(float (&d)[128], uint64_t a, uint64_t b, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" HOPPER_LIST_128
                 "}, %128, %129, p, 1, 1, %131, %132;\n}"
                 : HOPPER_D64(0), HOPPER_D64(64)
                 : "l"(a), "l"(b), "r"(add), "n"(TA), "n"(TB));
}

template <int TA, int TB>
__device__ __forceinline__ void product(float (&d)[32], uint64_t a, uint64_t b, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" HOPPER_LIST_32
                 "}, %32, %33, p, 1, 1, %35, %36;\n}"
                 : HOPPER_D16(0), HOPPER_D16(16)
                 : "l"(a), "l"(b), "r"(add), "n"(TA), "n"(TB));
}

// d += a b, with a in registers (64 x 16, as the accumulators of a product are laid out) and b
// stored with its 16 rows along the sum.
__device__ __forceinline__ void product_registers(float (&d)[32], const uint32_t* a, uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" HOPPER_LIST_32
                 "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
                 : HOPPER_D16(0), HOPPER_D16(16)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ __forceinline__ void product_registers(float (&d)[48], const uint32_t* a, uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 {" HOPPER_LIST_48
                 "}, {%48, %49, %50, %51}, %52, 1, 1, 1, 1;"
                 : HOPPER_D16(0), HOPPER_D16(16), HOPPER_D16(32)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ __forceinline__ void product_registers(float (&d)[128], const uint32_t* a, uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" HOPPER_LIST_128
                 "}, {%128, %129, %130, %131}, %132, 1, 1, 1, 1;"
                 : HOPPER_D64(0), HOPPER_D64(64)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ __forceinline__ void product_registers(float (&d)[64], const uint32_t* a, uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" HOPPER_LIST_64
                 "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
                 : HOPPER_D64(0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// Moves registers from the warps that copy to those that multiply.
template <int COUNT = 40> __device__ __forceinline__ void registers_few() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT = 232> __device__ __forceinline__ void registers_many() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

#endif
