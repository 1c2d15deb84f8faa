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
// Older compilers do not know the BF16 instructions. These are written in assembly, because
// compilers have no intrinsics for them in a function whose file is compiled without them.
#if defined(__clang__) && __clang_major__ >= 12
#define QLORA__NEON_BF16
#define QLORA__TARGET_NEON_BF16 __attribute__((target("bf16")))
#elif !defined(__clang__) && __GNUC__ >= 10
#define QLORA__NEON_BF16
#define QLORA__TARGET_NEON_BF16 __attribute__((target("+bf16")))
#endif
#endif
#ifdef QLORA__X86
// In C++, GCC 12 warns of its own intrinsics wherever they are used.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
// Written in assembly, too: not all compilers that know the instructions have the intrinsics.
#if defined(__clang__) ? __clang_major__ >= 12 : defined(__GNUC__) && __GNUC__ >= 11
#define QLORA__X86_BF16
#endif
#if defined(_MSC_VER) && !defined(__clang__)
#include <intrin.h>
#elif defined(_MSC_VER)
// Older clangs leave these out of immintrin.h when they act as MSVC; the order matters.
#include <smmintrin.h>
// clang-format off
#include <avxintrin.h>
#include <avx2intrin.h>
#include <fmaintrin.h>
#include <f16cintrin.h>
#include <avx512fintrin.h>
#include <avx512vlintrin.h>
#include <avx512bwintrin.h>
#include <avx512dqintrin.h>
// clang-format on
#endif
#endif

// Put before a kernel of the tier, and before every helper of it that has vectors as arguments.
// MSVC compiles every intrinsic in every function. A table may only carry kernels whose arguments
// are scalars and pointers.
#if defined(__GNUC__) || defined(__clang__)
#define QLORA__NOINLINE __attribute__((noinline))
#define QLORA__INLINE inline __attribute__((always_inline))
// Between a product of vectors and a sum: compilers may otherwise fuse the two.
#define QLORA__ROUNDED(v, constraint) __asm__("" : "+" constraint(v))
#define QLORA__TARGET_AVX2 __attribute__((target("avx2,fma,f16c")))
// gcc 13 and its AddressSanitizer place variables of 64 bytes on boundaries of 32 (PR 110027).
#if defined(__SANITIZE_ADDRESS__) && !defined(__clang__) && __GNUC__ == 13
#define QLORA__TARGET_AVX512                                                                       \
    __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl"),                     \
                   no_sanitize_address))
#else
#define QLORA__TARGET_AVX512                                                                       \
    __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")))
#endif
#else
#define QLORA__NOINLINE __declspec(noinline)
#define QLORA__INLINE __forceinline
#define QLORA__ROUNDED(v, constraint) (void)(v)
#define QLORA__TARGET_AVX2
#define QLORA__TARGET_AVX512
#endif

// Asks for the cache line of an address that will soon be read, or written.
#if defined(__GNUC__) || defined(__clang__)
#define QLORA__WILL_READ(address) __builtin_prefetch((address), 0)
#define QLORA__WILL_WRITE(address) __builtin_prefetch((address), 1)
#elif defined(QLORA__X86)
#define QLORA__WILL_READ(address) _mm_prefetch((const char*)(address), _MM_HINT_T0)
#define QLORA__WILL_WRITE(address) QLORA__WILL_READ(address)
#else
#define QLORA__WILL_READ(address) ((void)(address))
#define QLORA__WILL_WRITE(address) ((void)(address))
#endif

// c[rows][cols] (+)= a[k][rows] b[k][cols]: every element is one sum in ascending k, each step a
// fused multiply-add, so the result does not depend on where K is cut.
typedef void (*qlora__tile_fn)(int64_t steps, const float* a, const float* b, float* c, int64_t ldc,
                               bool add);

// Products: kernels of the loops in cpu/panels.h. A panel has, for each k, `rows` rows of A or
// `cols` columns of B side by side; both are multiples of four.
typedef struct qlora__cpu_tiles {
    int64_t steps; // at most this many per tile, so that both panels stay in a cache
    int64_t block; // columns of B that are packed at a time, at most
    int64_t rows;
    int64_t cols;
    qlora__tile_fn tile;
    int64_t narrow; // columns of a second tile, for the few columns of adapters
    qlora__tile_fn narrow_tile;
} qlora__cpu_tiles;

typedef struct qlora__cpu_gemm {
    qlora__cpu_tiles tiles;
    // out[k * width + i] = lines[i][k] for four lines
    void (*pack4)(const float* const* lines, int64_t steps, int64_t width, float* out);
    // The same for eight lines; NULL: only four at a time
    void (*pack8)(const float* const* lines, int64_t steps, int64_t width, float* out);
    // Copies n / width pieces of a row to panels: out[i * jump + j] = from[i * width + j]; NULL: in
    // plain C
    void (*spread)(const float* from, int64_t n, int64_t width, int64_t jump, float* out);
    // bf16 or f16 to f32
    void (*widen)(const uint16_t* from, qlora_dtype dtype, int64_t n, float* out);
    // bf16(levels[code] * scale) as f32, for codes of one block with a finite scale; the first code
    // is the high half of a byte
    void (*nf4)(const float* levels, float scale, const uint8_t* codes, int64_t n, float* out);
} qlora__cpu_gemm;

// How one side of a product is packed in bf16. A line of a panel takes half the memory of one in
// f32. Panels are `width` lines wide and have groups of steps, whose layout is up to the tile.
typedef struct qlora__cpu_bf16_side {
    // Packs n steps of `together` lines as those from `line` on of the panel `out`; steps from n
    // to the end of the group are zero.
    void (*lines)(const uint16_t* const* lines, int64_t n, int64_t width, int64_t line,
                  uint16_t* out);
    // Packs four steps, from k on, of n lines: rows[i][j] is step k + i of line j. n is a multiple
    // of the width, and panels are `jump` elements apart. May read four elements after a row.
    void (*quad)(const uint16_t* const* rows, int64_t k, int64_t n, int64_t width, int64_t jump,
                 uint16_t* out);
} qlora__cpu_bf16_side;

// Products of operands in bf16. The number of steps is a multiple of `group`, and the products of
// an element within a group are added in one order.
typedef struct qlora__cpu_bf16 {
    qlora__cpu_tiles tiles;
    int64_t group;    // a multiple of four
    int64_t together; // at most eight
    // to[i] = bf16(from[i] * factor)
    void (*round)(const float* from, float factor, int64_t n, uint16_t* to);
    // The same as nf4 above, in bf16.
    void (*nf4)(const float* levels, float scale, const uint8_t* codes, int64_t n, uint16_t* out);
    qlora__cpu_bf16_side left;
    qlora__cpu_bf16_side right;
    // Called by a thread before its tiles and after them; NULL: nothing to do
    void (*begin)(void);
    void (*end)(void);
} qlora__cpu_bf16;

typedef struct qlora__cpu_rows qlora__cpu_rows;     // operators on rows, attention
typedef struct qlora__cpu_stream qlora__cpu_stream; // products with few rows

struct qlora__cpu_table {
    qlora_cpu_tier tier;
    const char* name;
    const char* needs;     // what the processor must have, for messages
    bool (*present)(void); // whether it has that, and the operating system saves the registers
    bool proven;           // has run on a processor or an emulator; others are used only on request
    const qlora__cpu_gemm* gemm;     // NULL: the portable loops
    const qlora__cpu_rows* rows;     // cpu/rows.h
    const qlora__cpu_stream* stream; // cpu/stream.h; NULL where gemm is
    const qlora__cpu_bf16* bf16;     // NULL: operands are rounded, and multiplied as f32
    const char* f32_name;            // the first tier that has the same bits where none is rounded
};
