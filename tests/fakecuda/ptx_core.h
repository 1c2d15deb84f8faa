// ptx_core.h - the interpreter's data structures: types, registers, instructions, modules, warps.
//
// The files ptx_*.h are parts of one translation unit, ptx.c; nothing else includes them.
#ifndef FAKECUDA_PTX_CORE_H
#define FAKECUDA_PTX_CORE_H

#include "ptx.h"

#include <ctype.h>
#include <float.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef __clang__
#pragma STDC FP_CONTRACT OFF
#endif

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int8_t s8;
typedef int16_t s16;
typedef int32_t s32;
typedef int64_t s64;
typedef float f32;
typedef double f64;

#define PTX_LANES 32
#define PTX_FULL 0xffffffffu
#define PTX_POISON 0xCB
#define PTX_NONE 0xffffffffu // no register, no target
#define PTX_MAX_ARGS 14      // mma: 4 results, 4 + 2 + 4 inputs
#define PTX_BARRIERS 16
#define PTX_WARPGROUPS 8 // of 128 threads; each has a barrier of its own after those

// Generic addresses of everything except global memory. Above all addresses that a host or
// driver returns.
#define PTX_WINDOW_BYTES ((u64)1 << 32)
#define PTX_MODULE_BASE 0xFC00000000000000u // .global and .const variables of the module
#define PTX_PARAM_BASE 0xFB00000000000000u
#define PTX_LOCAL_BASE 0xFD00000000000000u
#define PTX_SHARED_BASE 0xFE00000000000000u

// ---- Types --------------------------------------------------------------------------------------

typedef enum ptx_type {
    TYPE_NONE,
    TYPE_PRED,
    TYPE_B8,
    TYPE_U8,
    TYPE_S8,
    TYPE_B16,
    TYPE_U16,
    TYPE_S16,
    TYPE_F16,
    TYPE_BF16,
    TYPE_B32,
    TYPE_U32,
    TYPE_S32,
    TYPE_F32,
    TYPE_F16X2,
    TYPE_BF16X2,
    TYPE_TF32,
    TYPE_B64,
    TYPE_U64,
    TYPE_S64,
    TYPE_F64
} ptx_type;

typedef struct ptx_type_info {
    const char* name;
    u32 bytes;
    char kind; // 'p'redicate, untyped 'b'its, 'u'nsigned, 's'igned, 'f'loat, 'v' two halves
} ptx_type_info;

static const ptx_type_info PTX_TYPES[] = {
    {"", 0, 0},         {"pred", 4, 'p'}, {"b8", 1, 'b'},  {"u8", 1, 'u'},  {"s8", 1, 's'},
    {"b16", 2, 'b'},    {"u16", 2, 'u'},  {"s16", 2, 's'}, {"f16", 2, 'f'}, {"bf16", 2, 'f'},
    {"b32", 4, 'b'},    {"u32", 4, 'u'},  {"s32", 4, 's'}, {"f32", 4, 'f'}, {"f16x2", 4, 'v'},
    {"bf16x2", 4, 'v'}, {"tf32", 4, 'f'}, {"b64", 8, 'b'}, {"u64", 8, 'u'}, {"s64", 8, 's'},
    {"f64", 8, 'f'},
};

#define PTX_TYPE_COUNT (sizeof PTX_TYPES / sizeof PTX_TYPES[0])

typedef enum ptx_space {
    SPACE_GENERIC,
    SPACE_GLOBAL,
    SPACE_SHARED,
    SPACE_LOCAL,
    SPACE_CONST,
    SPACE_PARAM
} ptx_space;

typedef enum ptx_round {
    ROUND_NEAREST,
    ROUND_ZERO,
    ROUND_DOWN,
    ROUND_UP,
    ROUND_AWAY // nearest, ties away from zero: cvt.rna.tf32
} ptx_round;

enum { // ptx_insn.flags
    FLAG_FTZ = 1,
    FLAG_SAT = 2,
    FLAG_TO_INTEGER = 4, // .rni .rzi .rmi .rpi
    FLAG_TRANS = 8,
    FLAG_NAN = 16,     // min.NaN, max.NaN
    FLAG_ROUNDED = 32, // a rounding modifier was written
    FLAG_RELU = 64
};

// ---- Registers ----------------------------------------------------------------------------------

// A register holds one value for each of the 32 lanes; a predicate is one word with one bit per
// lane. Registers are always read at the width they were declared with.
typedef union ptx_reg16 {
    u16 u16s[PTX_LANES];
    s16 s16s[PTX_LANES];
} ptx_reg16;

typedef union ptx_reg32 {
    u32 u32s[PTX_LANES];
    s32 s32s[PTX_LANES];
    f32 f32s[PTX_LANES];
} ptx_reg32;

typedef union ptx_reg64 {
    u64 u64s[PTX_LANES];
    s64 s64s[PTX_LANES];
    f64 f64s[PTX_LANES];
} ptx_reg64;

#define LANES_u16(w, at) (((ptx_reg16*)(void*)((w)->file + (at)))->u16s)
#define LANES_s16(w, at) (((ptx_reg16*)(void*)((w)->file + (at)))->s16s)
#define LANES_u32(w, at) (((ptx_reg32*)(void*)((w)->file + (at)))->u32s)
#define LANES_s32(w, at) (((ptx_reg32*)(void*)((w)->file + (at)))->s32s)
#define LANES_f32(w, at) (((ptx_reg32*)(void*)((w)->file + (at)))->f32s)
#define LANES_u64(w, at) (((ptx_reg64*)(void*)((w)->file + (at)))->u64s)
#define LANES_s64(w, at) (((ptx_reg64*)(void*)((w)->file + (at)))->s64s)
#define LANES_f64(w, at) (((ptx_reg64*)(void*)((w)->file + (at)))->f64s)
#define PRED(w, at) (*(u32*)(void*)((w)->file + (at)))

// ---- Instructions -------------------------------------------------------------------------------

typedef struct ptx_warp ptx_warp;
typedef struct ptx_insn ptx_insn;
typedef struct ptx_run ptx_run;

// Executes for the lanes in mask, which is never 0. Returns false after a trap.
typedef bool (*ptx_exec)(ptx_warp* w, const ptx_insn* in, u32 mask);
// Compares lane by lane; bit l of the result is lane l.
typedef u32 (*ptx_compare)(const void* a, const void* b);

typedef enum ptx_kind {
    KIND_PLAIN,
    KIND_MEMBERS, // waits for the lanes in its member mask
    KIND_WHOLE,   // waits for every live lane of the warp: mma, ldmatrix
    KIND_BARRIER,
    KIND_WARPGROUP, // waits for the four warps of its warpgroup: wgmma.wait_group
    KIND_BRANCH,
    KIND_BRANCH_INDEX,
    KIND_EXIT
} ptx_kind;

// What every instruction needs comes first, in one line of the cache.
struct ptx_insn {
    ptx_exec exec;
    u32 guard;   // predicate, or PTX_NONE
    u32 negated; // bit i: predicate arg[i] is inverted; bit 31: the guard
    u8 kind;     // ptx_kind
    u8 type;     // ptx_type
    u8 type2;
    u8 space;
    u8 round;
    u8 vector;  // elements of ld, st, ldmatrix, packing mov
    u8 sub;     // which operation of the family
    u8 members; // index of the member-mask operand of KIND_MEMBERS
    u32 flags;
    u32 target;             // instruction index, or index of the branch table
    s64 offset;             // displacement of an address, or an immediate without a register
    ptx_compare compare;    // setp, set
    u32 arg[PTX_MAX_ARGS];  // byte offsets into the register file, results first
    u8 width[PTX_MAX_ARGS]; // bytes of the register at arg[i]
    u32 results;            // bit i: arg[i] is written
    u32 list_count;
    u32* list; // wgmma: the registers of its result
    int line;
    const char* name; // mnemonic, for trap messages
};

// ---- Modules ------------------------------------------------------------------------------------

typedef struct ptx_constant {
    u32 at; // offset in the register file
    u32 bytes;
    u64 value;
    bool dynamic_shared; // value is relative to the start of dynamic shared memory
} ptx_constant;

typedef struct ptx_special {
    u32 at;
    u32 id; // row of PTX_SPECIALS
} ptx_special;

typedef struct ptx_param {
    const char* name;
    u32 at;
    u32 bytes;
} ptx_param;

typedef struct ptx_table { // .branchtargets
    u32* target;
    u32 count;
} ptx_table;

struct ptx_kernel {
    ptx_module* module;
    const char* name;
    ptx_insn* code;
    u32 code_count;
    ptx_param* params;
    u32 param_count;
    u32 param_bytes;
    u32 max_threads;
    u32 poison_bytes;   // of registers that may be read before they are written
    u32 register_bytes; // constants and special registers follow
    u32 file_bytes;
    ptx_constant* constants;
    u32 constant_count;
    ptx_special* specials;
    u32 special_count;
    ptx_table* tables;
    u32 table_count;
    u32 static_shared;
    u32 dynamic_align;
    u32 local_bytes;
};

typedef struct ptx_symbol {
    const char* name;
    ptx_space space;
    u64 address;
    u32 bytes;
    u32 align;
    bool dynamic; // .extern .shared name[]
} ptx_symbol;

struct ptx_module {
    char* pool; // all names point into this
    int version;
    const char* target;
    ptx_kernel* kernels;
    u32 kernel_count;
    ptx_symbol* symbols;
    u32 symbol_count;
    u8* data;       // .global and .const variables
    bool* readonly; // one per byte of data
    u32 data_bytes;
};

// ---- A launch -----------------------------------------------------------------------------------

typedef struct ptx_copy { // a cp.async in flight
    u32 lane;
    u32 group;
    u32 to; // shared offset
    u32 bytes;
    u32 source_bytes;
    const u8* from;
} ptx_copy;

typedef struct ptx_bulk { // a tensor copy in flight
    const ptx_insn* in;
    ptx_tensor_map map;
    u64 to;      // shared offset
    u64 barrier; // the same
    s32 at[2];
    u32 warp;
    u32 lane;
} ptx_bulk;

typedef struct ptx_product { // a wgmma in flight
    const ptx_insn* in;
    u64 a; // matrix descriptors
    u64 b;
    u32 group;
    bool accumulate;
} ptx_product;

struct ptx_warp {
    u8* file; // registers, then constants and special registers
    u8* local;
    ptx_run* run;
    u32 index;
    u32 live;          // lanes that exist and have not exited
    u32 waiting;       // lanes at a barrier
    u32 held;          // lanes at a warp-synchronous instruction whose members have not all arrived
    u32 group;         // lanes being executed
    u32 now;           // their instruction
    u32 stop;          // lowest instruction of the other runnable lanes
    u32 pc[PTX_LANES]; // for the lanes outside group
    u8 barrier[PTX_LANES];
    u32 copy_group[PTX_LANES]; // number of the cp.async group being filled
    ptx_copy* copies;
    u32 copy_count;
    u32 copy_capacity;
    bool turn_over; // it has to wait for an mbarrier, or reads what another block may change
    u32 early;      // lanes that have not executed griddepcontrol.wait yet
    bool fenced;    // wgmma.fence since the last wait
    u32 product_group;
    ptx_product* products;
    u32 product_count;
    u32 product_capacity;
};

typedef struct ptx_barrier {
    u32 arrived;
    u32 votes;    // threads that arrived with a true predicate, for bar.red
    u32 expected; // 0: every live thread of the block
} ptx_barrier;

struct ptx_run {
    const ptx_kernel* kernel;
    const ptx_env* env;
    u32 grid[3];
    u32 block[3];
    u32 at[3]; // the current block
    u32 dynamic_shared;
    u8* params;
    u8* shared;
    u32 shared_bytes;
    u32 shared_room; // the same, rounded up; the warps' memory follows
    ptx_warp* warps;
    u32 warp_count;
    u32 threads;
    ptx_barrier barriers[PTX_BARRIERS + PTX_WARPGROUPS];
    ptx_bulk* bulks;
    u32 bulk_count;
    u32 bulk_capacity;
    u8* unfenced; // per 16 bytes of shared memory: 1 + the warp whose write has no proxy fence yet
    u64 events;   // phases and copies completed
    u64 random;
    u64 clock;
    ptx_stats stats;
    ptx_result result;
    char* trap;
    size_t trap_size;
};

// ---- Small helpers ------------------------------------------------------------------------------

static inline bool lane_on(u32 mask, u32 lane) {
    return (mask >> lane & 1u) != 0;
}

static inline u32 lane_count(u32 mask) {
    return (u32)__builtin_popcount(mask);
}

static inline u32 lane_first(u32 mask) {
    return (u32)__builtin_ctz(mask);
}

static inline u32 round_up(u32 x, u32 to) {
    return (x + to - 1) / to * to;
}

static inline bool same(const char* a, const char* b) {
    return strcmp(a, b) == 0;
}

// Only tests use this code: without memory, there is no way to report the error.
static void* must(void* p) {
    if (p == NULL) {
        fputs("ptx: out of memory\n", stderr);
        abort();
    }
    return p;
}

static void* must_alloc(size_t bytes) {
    return must(calloc(bytes ? bytes : 1, 1));
}

// Makes room for one more element after count; capacities are powers of two and need not be stored.
static void* grow(void* array, u32 count, size_t element) {
    if ((count & (count - 1)) != 0) {
        return array;
    }
    return must(realloc(array, (count ? (size_t)count * 2 : 1) * element));
}

// Reads and writes one lane of a register of any width.
static u64 lane_get(const ptx_warp* w, u32 at, u32 bytes, u32 lane) {
    switch (bytes) {
    case 2:
        return LANES_u16(w, at)[lane];
    case 4:
        return LANES_u32(w, at)[lane];
    default:
        return LANES_u64(w, at)[lane];
    }
}

static void lane_put(ptx_warp* w, u32 at, u32 bytes, u32 lane, u64 value) {
    switch (bytes) {
    case 2:
        LANES_u16(w, at)[lane] = (u16)value;
        break;
    case 4:
        LANES_u32(w, at)[lane] = (u32)value;
        break;
    default:
        LANES_u64(w, at)[lane] = value;
        break;
    }
}

#if defined(__GNUC__)
__attribute__((format(printf, 5, 6)))
#endif
static bool
trap(ptx_warp* w, const ptx_insn* in, ptx_result result, u32 lane, const char* format, ...) {
    ptx_run* run = w->run;
    char text[256];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    const u32 thread = w->index * PTX_LANES + lane;
    run->result = result;
    if (run->trap != NULL && run->trap_size > 0) {
        snprintf(run->trap, run->trap_size,
                 "%s: line %d: %s: %s; block (%u,%u,%u) thread (%u,%u,%u)", run->kernel->name,
                 in->line, in->name, text, run->at[0], run->at[1], run->at[2],
                 thread % run->block[0], thread / run->block[0] % run->block[1],
                 thread / run->block[0] / run->block[1]);
    }
    return false;
}

#endif
