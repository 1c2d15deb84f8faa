// The table of CPU kernels. A tier is a set of instructions with kernels written for it; each
// context uses the table of one tier, chosen when it is created. Kernels get their instructions
// from attributes of the function, never from the compiler's flags, so a program runs everywhere.

#if !defined(QLORA_NO_SIMD) && defined(__aarch64__) && defined(__GNUC__)
#define QLORA__NEON // part of every 64-bit ARM processor, with fused multiply-add
#endif
#if !defined(QLORA_NO_SIMD) && (defined(__x86_64__) || defined(_M_X64))
#define QLORA__X86
#endif

#ifdef QLORA__NEON
#include <arm_neon.h>
#endif
#ifdef QLORA__X86
#include <immintrin.h>
#if defined(_MSC_VER)
#include <intrin.h>
#endif
#endif

// Put before a kernel of the tier, and before every helper of it that has vectors as arguments.
// MSVC compiles every intrinsic in every function. A table may only carry kernels whose arguments
// are scalars and pointers.
#if defined(__GNUC__) || defined(__clang__)
#define QLORA__NOINLINE __attribute__((noinline))
#define QLORA__TARGET_AVX2 __attribute__((target("avx2,fma,f16c")))
#define QLORA__TARGET_AVX512                                                                       \
    __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")))
#else
#define QLORA__NOINLINE __declspec(noinline)
#define QLORA__TARGET_AVX2
#define QLORA__TARGET_AVX512
#endif

typedef struct qlora__cpu_gemm qlora__cpu_gemm; // products
typedef struct qlora__cpu_rows qlora__cpu_rows; // operators on rows, attention

struct qlora__cpu_table {
    qlora_cpu_tier tier;
    const char* name;
    const char* needs;     // what the processor must have, for messages
    bool (*present)(void); // whether it has that, and the operating system saves the registers
    bool proven;           // has run on a processor or an emulator; others are used only on request
    const qlora__cpu_gemm* gemm; // NULL: the portable loops
    const qlora__cpu_rows* rows; // cpu/rows.h
};
