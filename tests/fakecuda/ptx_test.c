// ptx_test.c - tests the PTX interpreter with small hand-written kernels; needs no GPU and no nvcc.
//
//     cc -O2 -ffp-contract=off tests/fakecuda/ptx.c tests/fakecuda/ptx_test.c -lm && ./a.out
//
// Prints the number of checks; exits with 1 if any failed.
#include "ptx.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// ---- Harness ------------------------------------------------------------------------------------

typedef struct test_range {
    uint64_t address;
    size_t bytes;
    uint8_t* host;
} test_range;

typedef struct test_state {
    int checks;
    int failures;
    test_range ranges[8];
    int range_count;
    ptx_order order;
    uint64_t max_steps;
    bool together;
    char log[512];  // from the last load
    char trap[512]; // from the last launch
    ptx_stats stats;
} test_state;

static void check(test_state* t, bool ok, const char* what) {
    t->checks++;
    if (!ok) {
        t->failures++;
        printf("FAIL %s (log: %s) (trap: %s)\n", what, t->log, t->trap);
    }
}

static void check_u64(test_state* t, uint64_t got, uint64_t want, const char* what) {
    t->checks++;
    if (got != want) {
        t->failures++;
        printf("FAIL %s: got 0x%llx, expected 0x%llx (log: %s) (trap: %s)\n", what,
               (unsigned long long)got, (unsigned long long)want, t->log, t->trap);
    }
}

// Device memory: invented addresses with gaps between them, so that accesses cannot run into
// a neighbour.
static uint64_t device_alloc(test_state* t, void* host, size_t bytes) {
    test_range* r = &t->ranges[t->range_count++];
    r->address = 0x100000000u * (uint64_t)t->range_count;
    r->bytes = bytes;
    r->host = (uint8_t*)host;
    return r->address;
}

static void* device_resolve(void* user, uint64_t address, size_t bytes, bool write) {
    const test_state* t = (const test_state*)user;
    (void)write;
    for (int i = 0; i < t->range_count; i++) {
        const test_range* r = &t->ranges[i];
        if (address >= r->address && bytes <= r->bytes &&
            address - r->address <= r->bytes - bytes) {
            return r->host + (address - r->address);
        }
    }
    return NULL;
}

// Loads a module made of the common header and the given body.
static ptx_module* load(test_state* t, const char* body) {
    static const char HEAD[] = ".version 7.0\n.target sm_80\n.address_size 64\n";
    char* text = (char*)malloc(sizeof HEAD + strlen(body));
    if (text == NULL) {
        abort();
    }
    strcpy(text, HEAD);
    strcat(text, body);
    t->trap[0] = 0;
    ptx_module* module = ptx_load(text, t->log, sizeof t->log);
    free(text);
    return module;
}

static ptx_result launch(test_state* t, const ptx_module* module, const char* name, uint32_t blocks,
                         uint32_t threads, uint32_t dynamic, void* const* args) {
    const ptx_env env = {device_resolve, t,           t->order, 42,  t->max_steps,
                         false,          t->together, NULL,     NULL};
    const uint32_t grid[3] = {blocks, 1, 1};
    const uint32_t block[3] = {threads, 1, 1};
    return ptx_launch(ptx_find(module, name), &env, grid, block, dynamic, args, &t->stats, t->trap,
                      sizeof t->trap);
}

// A kernel "k" with the buffers out and in, and %r0 = thread, %rd0 = &out[thread] of 4 bytes.
static const char FRAME[] = ".visible .entry k(.param .u64 out, .param .u64 in) {\n"
                            ".reg .pred %%p<8>; .reg .b16 %%h<8>; .reg .b32 %%r<40>;\n"
                            ".reg .b64 %%rd<20>; .reg .f32 %%f<40>; .reg .f64 %%d<8>;\n"
                            "mov.u32 %%r0, %%tid.x;\n"
                            "ld.param.u64 %%rd1, [out]; ld.param.u64 %%rd2, [in];\n"
                            "cvta.to.global.u64 %%rd1, %%rd1; cvta.to.global.u64 %%rd2, %%rd2;\n"
                            "mad.wide.u32 %%rd0, %%r0, 4, %%rd1;\n"
                            "mad.wide.u32 %%rd3, %%r0, 4, %%rd2;\n"
                            "%s\n"
                            "ret;\n}\n";

typedef struct test_io {
    void* out;
    size_t out_bytes;
    void* in;
    size_t in_bytes;
} test_io;

// Runs a body inside FRAME. *ok is set to whether it could be loaded.
static ptx_result run_body(test_state* t, const char* body, uint32_t threads, uint32_t dynamic,
                           const test_io* io) {
    const size_t size = sizeof FRAME + strlen(body);
    char* text = (char*)malloc(size);
    if (text == NULL) {
        abort();
    }
    snprintf(text, size, FRAME, body);
    ptx_module* module = load(t, text);
    free(text);
    if (module == NULL) {
        check(t, false, body);
        return PTX_TRAP_OTHER;
    }
    t->range_count = 0;
    uint64_t out = device_alloc(t, io->out, io->out_bytes);
    uint64_t in = device_alloc(t, io->in, io->in_bytes);
    void* args[2] = {&out, &in};
    const ptx_result result = launch(t, module, "k", 1, threads, dynamic, args);
    ptx_free(module);
    return result;
}

static uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

// ---- Arithmetic ---------------------------------------------------------------------------------

// The instruction reads a, b, c as %h1-3, %r1-3, %rd1-3, %f1-3, %d1-3 and writes %h0, %r0, %rd0
// (for kinds h, r, l), %f0 or %d0 (for f and d), or predicate %p0.
typedef struct arithmetic_case {
    const char* text;
    char kind;
    uint64_t a;
    uint64_t b;
    uint64_t c;
    uint64_t want;
} arithmetic_case;

#define F(x) ((uint64_t)(x))

static const arithmetic_case ARITHMETIC[] = {
    {"add.s32 %r0, %r1, %r2;", 'r', 0x7fffffff, 1, 0, 0x80000000},
    {"add.s16 %h0, %h1, %h2;", 'h', 0xffff, 2, 0, 1},
    {"add.s64 %rd0, %rd1, %rd2;", 'l', 0xffffffffffffffff, 2, 0, 1},
    {"add.s32 %r0, %r1, -5;", 'r', 3, 0, 0, 0xfffffffe},
    {"add.sat.s32 %r0, %r1, %r2;", 'r', 0x7fffffff, 1, 0, 0x7fffffff},
    {"sub.s32 %r0, %r1, %r2;", 'r', 3, 5, 0, 0xfffffffe},
    {"mul.lo.s32 %r0, %r1, %r2;", 'r', 0x10001, 0x10001, 0, 0x20001},
    {"mul.hi.u32 %r0, %r1, %r2;", 'r', 0xffffffff, 0xffffffff, 0, 0xfffffffe},
    {"mul.hi.s32 %r0, %r1, %r2;", 'r', 0xffffffff, 0xffffffff, 0, 0},
    {"mul.hi.u64 %rd0, %rd1, %rd2;", 'l', 0xffffffffffffffff, 0xfffffffffffffffe, 0,
     0xfffffffffffffffd},
    {"mul.hi.s64 %rd0, %rd1, %rd2;", 'l', 0xffffffffffffffff, 5, 0, 0xffffffffffffffff},
    {"mul.wide.s32 %rd0, %r1, %r2;", 'l', 0xffffffff, 3, 0, 0xfffffffffffffffd},
    {"mul.wide.u32 %rd0, %r1, %r2;", 'l', 0xffffffff, 3, 0, 0x2fffffffd},
    {"mul.wide.u16 %r0, %h1, %h2;", 'r', 0xffff, 0xffff, 0, 0xfffe0001},
    {"mul.wide.s16 %r0, %h1, %h2;", 'r', 0xffff, 0xffff, 0, 1},
    {"mad.lo.s32 %r0, %r1, %r2, %r3;", 'r', 7, 6, 0xffffffff, 41},
    {"mad.wide.s32 %rd0, %r1, %r2, %rd3;", 'l', 0xffffffff, 2, 1, 0xffffffffffffffff},
    {"div.s32 %r0, %r1, %r2;", 'r', 0xfffffff9, 2, 0, 0xfffffffd},
    {"div.s32 %r0, %r1, %r2;", 'r', 0x80000000, 0xffffffff, 0, 0x80000000},
    {"div.u32 %r0, %r1, %r2;", 'r', 7, 0, 0, 0xffffffff},
    {"div.s64 %rd0, %rd1, %rd2;", 'l', 0x8000000000000000, 0xffffffffffffffff, 0,
     0x8000000000000000},
    {"bfind.shiftamt.u32 %r0, %r1;", 'r', 0x10, 0, 0, 27},
    {"rem.s32 %r0, %r1, %r2;", 'r', 0xfffffff9, 2, 0, 0xffffffff},
    {"rem.u64 %rd0, %rd1, %rd2;", 'l', 100, 7, 0, 2},
    {"min.s32 %r0, %r1, %r2;", 'r', 0xffffffff, 1, 0, 0xffffffff},
    {"min.u32 %r0, %r1, %r2;", 'r', 0xffffffff, 1, 0, 1},
    {"max.s64 %rd0, %rd1, %rd2;", 'l', 0xffffffffffffffff, 1, 0, 1},
    {"abs.s32 %r0, %r1;", 'r', 0xfffffffb, 0, 0, 5},
    {"neg.s16 %h0, %h1;", 'h', 1, 0, 0, 0xffff},
    {"sad.u32 %r0, %r1, %r2, %r3;", 'r', 3, 10, 100, 107},
    {"shl.b32 %r0, %r1, %r2;", 'r', 1, 32, 0, 0},
    {"shr.s32 %r0, %r1, %r2;", 'r', 0x80000000, 40, 0, 0xffffffff},
    {"shr.u32 %r0, %r1, %r2;", 'r', 0x80000000, 31, 0, 1},
    {"shl.b64 %rd0, %rd1, %r2;", 'l', 3, 63, 0, 0x8000000000000000},
    {"shr.s16 %h0, %h1, %r2;", 'h', 0x8000, 15, 0, 0xffff},
    {"shf.l.wrap.b32 %r0, %r1, %r2, %r3;", 'r', 0x80000000, 1, 1, 3},
    {"shf.r.clamp.b32 %r0, %r1, %r2, %r3;", 'r', 5, 9, 40, 9},
    {"popc.b64 %r0, %rd1;", 'r', 0xf0f0, 0, 0, 8},
    {"clz.b32 %r0, %r1;", 'r', 1, 0, 0, 31},
    {"brev.b32 %r0, %r1;", 'r', 1, 0, 0, 0x80000000},
    {"bfind.s32 %r0, %r1;", 'r', 0xffffff00, 0, 0, 7},
    {"bfe.u32 %r0, %r1, %r2, %r3;", 'r', 0xabcd1234, 8, 8, 0x12},
    {"bfe.s32 %r0, %r1, %r2, %r3;", 'r', 0x0000f000, 12, 4, 0xffffffff},
    {"bfi.b32 %r0, %r1, %r2, 8, 4;", 'r', 0xff, 0, 0, 0xf00},
    {"lop3.b32 %r0, %r1, %r2, %r3, 0xe8;", 'r', 0xf0, 0xcc, 0xaa, 0xe8},
    {"lop3.b32 %r0, %r1, %r2, %r3, 0x78;", 'r', 0xf0, 0xcc, 0xaa, 0x78},
    {"prmt.b32 %r0, %r1, %r2, %r3;", 'r', 0x33221180, 0x77665544, 0x8057, 0xff805577},
    {"not.b32 %r0, %r1;", 'r', 0xf, 0, 0, 0xfffffff0},
    {"cnot.b32 %r0, %r1;", 'r', 0, 0, 0, 1},
    {"slct.u32.s32 %r0, %r1, %r2, %r3;", 'r', 1, 2, 0xffffffff, 2},
    {"mov.b32 {%h1, %h2}, %r1; mov.b32 %r0, {%h2, %h1};", 'r', 0x12345678, 0, 0, 0x56781234},
    {"mov.b64 {_, %r0}, %rd1;", 'r', 0x1122334455667788, 0, 0, 0x11223344},
    {"mov.b64 %rd0, {%h1, %h2, %h3, %h1};", 'l', 1, 2, 3, 0x0001000300020001},
    {"setp.lt.s32 %p1, %r1, %r2; selp.b32 %r0, 7, 9, %p1;", 'r', 0xffffffff, 0, 0, 7},
    {"setp.lt.u32 %p1, %r1, %r2; selp.b32 %r0, 7, 9, %p1;", 'r', 0xffffffff, 0, 0, 9},
    {"setp.ne.s32 %p1, %r3, 0; setp.lt.and.s32 %p0, %r1, %r2, !%p1;", 'p', 1, 2, 0, 1},
    {"setp.ne.s32 %p1, %r3, 0; setp.lt.or.s32 %p2|%p0, %r1, %r2, %p1;", 'p', 1, 2, 0, 0},
    {"setp.ne.s32 %p1, %r3, 0; setp.lt.or.s32 %p2|%p0, %r1, %r2, %p1;", 'p', 1, 2, 1, 1},
    {"setp.ne.s32 %p1, %r3, 0; setp.lt.xor.s32 %p0, %r1, %r2, %p1;", 'p', 1, 2, 1, 0},
    {"setp.eq.f32 %p0, %f1, %f2;", 'p', 0x80000000, 0, 0, 1},
    {"setp.ne.f32 %p0, %f1, %f2;", 'p', 0x7fc00000, 0, 0, 0},
    {"setp.neu.f32 %p0, %f1, %f2;", 'p', 0x7fc00000, 0, 0, 1},
    {"setp.equ.f32 %p0, %f1, %f2;", 'p', 0x7fc00000, 0, 0, 1},
    {"setp.leu.f32 %p0, %f1, %f2;", 'p', 0x7fc00000, 0, 0, 1},
    {"setp.num.f32 %p0, %f1, %f2;", 'p', 0x7fc00000, 0, 0, 0},
    {"setp.gt.ftz.f32 %p0, %f1, %f2;", 'p', 1, 0, 0, 0},
    {"set.gt.u32.f32 %r0, %f1, %f2;", 'r', 0x3f800000, 0, 0, 0xffffffff},
    {"setp.lt.f16 %p0, %h1, %h2;", 'p', 0xc000, 0x3c00, 0, 1},
    {"setp.ge.bf16 %p0, %h1, %h2;", 'p', 0x7fc0, 0x3f80, 0, 0},
    {"copysign.f64 %d0, %d1, %d2;", 'l', 0x8000000000000000, 0x3ff0000000000000, 0,
     0xbff0000000000000},
    {"cvt.rn.f16.f64 %h0, %d1;", 'h', 0x3ff0020000000001, 0, 0, 0x3c01},
    {"{.reg.b32 x; mov.b32 x, 0X1FU; mov.b32 %r0, x;}", 'r', 0, 0, 0, 31},
    {"testp.subnormal.f32 %p0, %f1;", 'p', 1, 0, 0, 1},
    // f32: one rounding, PTX's NaN, flush to zero.
    {"add.f32 %f0, %f1, %f2;", 'r', 0x3f800000, 0x33800000, 0, 0x3f800000},
    {"add.f32 %f0, %f1, %f2;", 'r', 0x7f800000, 0xff800000, 0, 0x7fffffff},
    {"add.ftz.f32 %f0, %f1, %f2;", 'r', 1, 1, 0, 0},
    {"add.f32 %f0, %f1, %f2;", 'r', 1, 1, 0, 2},
    {"add.sat.f32 %f0, %f1, %f2;", 'r', 0x3f800000, 0x3f800000, 0, 0x3f800000},
    {"add.rz.f32 %f0, %f1, %f2;", 'r', 0x3f800000, 0xb2800000, 0, 0x3f7fffff},
    {"add.rp.f32 %f0, %f1, %f2;", 'r', 0x3f800000, 1, 0, 0x3f800001},
    {"mul.rm.f32 %f0, %f1, %f2;", 'r', 0x3f800001, 0x3f800001, 0, 0x3f800002},
    {"mul.rp.f32 %f0, %f1, %f2;", 'r', 0x3f800001, 0x3f800001, 0, 0x3f800003},
    {"fma.rn.f32 %f0, %f1, %f2, %f3;", 'r', 0x3f800001, 0x3f800001, 0xbf800002, 0x28800000},
    {"fma.rm.f32 %f0, %f1, %f2, %f3;", 'r', 0x3f800000, 0x3f800000, 0x80000001, 0x3f7fffff},
    {"mul.f32 %f4, %f1, %f2; add.f32 %f0, %f4, %f3;", 'r', 0x3f800001, 0x3f800001, 0xbf800002, 0},
    {"min.f32 %f0, %f1, %f2;", 'r', 0x7fc00000, 0x3f800000, 0, 0x3f800000},
    {"min.f32 %f0, %f1, %f2;", 'r', 0, 0x80000000, 0, 0x80000000},
    {"max.NaN.f32 %f0, %f1, %f2;", 'r', 0x7fc00000, 0x3f800000, 0, 0x7fffffff},
    {"div.rn.f32 %f0, %f1, %f2;", 'r', 0x3f800000, 0x40400000, 0, 0x3eaaaaab},
    {"rcp.approx.ftz.f32 %f0, %f1;", 'r', 0x40000000, 0, 0, 0x3f000000},
    {"sqrt.rn.f32 %f0, %f1;", 'r', 0x40000000, 0, 0, 0x3fb504f3},
    {"ex2.approx.f32 %f0, %f1;", 'r', 0x40400000, 0, 0, 0x41000000},
    {"lg2.approx.f32 %f0, %f1;", 'r', 0x41000000, 0, 0, 0x40400000},
    {"neg.f32 %f0, %f1;", 'r', 0, 0, 0, 0x80000000},
    {"fma.rn.f64 %d0, %d1, %d2, %d3;", 'l', 0x3ff0000000000001, 0x3ff0000000000001,
     0xbff0000000000002, 0x3970000000000000},
    // Halves.
    {"fma.rn.f16x2 %r0, %r1, %r2, %r3;", 'r', 0x3c003c00, 0x40004200, 0x3c003c00, 0x42004400},
    {"add.f16 %h0, %h1, %h2;", 'h', 0x0001, 0x0001, 0, 0x0002},
    {"mul.bf16x2 %r0, %r1, %r2;", 'r', 0x40003f80, 0x40004000, 0, 0x40804000},
    // Conversions.
    {"cvt.f32.f16 %f0, %h1;", 'r', 0x0001, 0, 0, 0x33800000},
    {"cvt.f32.f16 %f0, %h1;", 'r', 0xfc00, 0, 0, 0xff800000},
    {"cvt.f32.f16 %f0, %h1;", 'r', 0x7e00, 0, 0, 0x7fffffff},
    {"cvt.rn.f16.f32 %h0, %f1;", 'h', 0x33000000, 0, 0, 0},
    {"cvt.rn.f16.f32 %h0, %f1;", 'h', 0x33000001, 0, 0, 1},
    {"cvt.rn.f16.f32 %h0, %f1;", 'h', 0x477fefff, 0, 0, 0x7bff},
    {"cvt.rn.f16.f32 %h0, %f1;", 'h', 0x3f801000, 0, 0, 0x3c00},
    {"cvt.rn.f16.f32 %h0, %f1;", 'h', 0x3f803000, 0, 0, 0x3c02},
    {"cvt.rn.f16.f32 %h0, %f1;", 'h', 0x477ff000, 0, 0, 0x7c00},
    {"cvt.rz.f16.f32 %h0, %f1;", 'h', 0x477ff000, 0, 0, 0x7bff},
    {"cvt.rn.f16.f32 %h0, %f1;", 'h', 0xffc00000, 0, 0, 0x7fff},
    {"cvt.rn.bf16.f32 %h0, %f1;", 'h', 0x3f808000, 0, 0, 0x3f80},
    {"cvt.rn.bf16.f32 %h0, %f1;", 'h', 0x3f818000, 0, 0, 0x3f82},
    {"cvt.rn.bf16.f32 %h0, %f1;", 'h', 0x7f800001, 0, 0, 0x7fff},
    {"cvt.rn.bf16x2.f32 %r0, %f1, %f2;", 'r', 0x3f800000, 0x40000000, 0, 0x3f804000},
    {"cvt.rn.satfinite.e4m3x2.f32 %h0, %f1, %f2;", 'h', 0x3f800000, 0x40000000, 0, 0x3840},
    {"cvt.rn.satfinite.e4m3x2.f32 %h0, %f1, %f2;", 'h', 0xce6e6b28, 0x43e00000, 0, 0xfe7e},
    {"cvt.rn.satfinite.e4m3x2.f32 %h0, %f1, %f2;", 'h', 0x3f880000, 0x3f980000, 0, 0x383a},
    {"cvt.rn.satfinite.e4m3x2.f32 %h0, %f1, %f2;", 'h', 0x3a800000, 0x3b400000, 0, 0x0002},
    {"cvt.rn.satfinite.e4m3x2.f32 %h0, %f1, %f2;", 'h', 0x7fc00000, 0xff800000, 0, 0x7ffe},
    {"cvt.rna.tf32.f32 %r0, %f1;", 'r', 0x3f801000, 0, 0, 0x3f802000},
    {"cvt.rzi.s32.f32 %r0, %f1;", 'r', 0xbfc00000, 0, 0, 0xffffffff},
    {"cvt.rni.s32.f32 %r0, %f1;", 'r', 0x40200000, 0, 0, 2},
    {"cvt.rmi.f32.f32 %f0, %f1;", 'r', 0xbf000000, 0, 0, 0xbf800000},
    {"cvt.rzi.s32.f32 %r0, %f1;", 'r', 0x7fc00000, 0, 0, 0},
    {"cvt.rzi.s32.f32 %r0, %f1;", 'r', 0x4f800000, 0, 0, 0x7fffffff},
    {"cvt.rzi.s32.f32 %r0, %f1;", 'r', 0x4f000000, 0, 0, 0x7fffffff},
    {"cvt.rzi.s32.f32 %r0, %f1;", 'r', 0xcf000000, 0, 0, 0x80000000},
    {"cvt.rzi.u32.f32 %r0, %f1;", 'r', 0xbf800000, 0, 0, 0},
    {"cvt.rzi.u64.f32 %rd0, %f1;", 'l', 0x7fc00000, 0, 0, 0x8000000000000000},
    {"cvt.sat.f32.f32 %f0, %f1;", 'r', 0x7fc00000, 0, 0, 0},
    {"cvt.rn.f32.s32 %f0, %r1;", 'r', 0xfeffffff, 0, 0, 0xcb800000},
    {"cvt.rz.f32.u32 %f0, %r1;", 'r', 0xffffffff, 0, 0, 0x4f7fffff},
    {"cvt.rn.f32.u64 %f0, %rd1;", 'r', 0x8000008000000001, 0, 0, 0x5f000001},
    {"cvt.rn.f32.f64 %f0, %d1;", 'r', 0x3ff0000010000001, 0, 0, 0x3f800001},
    {"cvt.f64.f32 %d0, %f1;", 'l', 0x3f800000, 0, 0, 0x3ff0000000000000},
    {"cvt.s32.s8 %r0, %r1;", 'r', 0x1280, 0, 0, 0xffffff80},
    {"cvt.u16.u8 %h0, %h1;", 'h', 0x12ff, 0, 0, 0xff},
    {"cvt.sat.u8.s32 %r0, %r1;", 'r', 300, 0, 0, 255},
    {"cvt.sat.s16.s32 %r0, %r1;", 'r', 0xffff0000, 0, 0, 0xffff8000},
    {"cvt.s64.s32 %rd0, %r1;", 'l', 0x80000000, 0, 0, 0xffffffff80000000},
    {"cvt.u64.u32 %rd0, %r1;", 'l', 0x80000000, 0, 0, 0x80000000},
};

// The same instruction in a full warp and in a warp with some inactive lanes.
static void test_arithmetic(test_state* t) {
    static const char TEXT[] =
        ".reg .pred %%q0; .reg .b64 %%out;\n"
        "add.s64 %%out, %%rd1, 0; mad.wide.u32 %%out, %%r0, 8, %%out;\n"
        "ld.global.u64 %%rd4, [%%rd2]; ld.global.u64 %%rd5, [%%rd2+8];\n"
        "ld.global.u64 %%rd6, [%%rd2+16];\n"
        "mov.u64 %%rd1, %%rd4; mov.u64 %%rd2, %%rd5; mov.u64 %%rd3, %%rd6;\n"
        "mov.b64 %%d1, %%rd1; mov.b64 %%d2, %%rd2; mov.b64 %%d3, %%rd3;\n"
        "cvt.u32.u64 %%r1, %%rd1; cvt.u32.u64 %%r2, %%rd2; cvt.u32.u64 %%r3, %%rd3;\n"
        "mov.b32 %%f1, %%r1; mov.b32 %%f2, %%r2; mov.b32 %%f3, %%r3;\n"
        "cvt.u16.u64 %%h1, %%rd1; cvt.u16.u64 %%h2, %%rd2; cvt.u16.u64 %%h3, %%rd3;\n"
        "%s\n%s\nst.global.u64 [%%out], %%rd0;";
    static const char* const KINDS[] = {
        "h", "cvt.u64.u16 %rd0, %h0;",   "r", "cvt.u64.u32 %rd0, %r0;", "l", "",
        "p", "selp.u64 %rd0, 1, 0, %p0;"};
    for (size_t i = 0; i < sizeof ARITHMETIC / sizeof ARITHMETIC[0]; i++) {
        const arithmetic_case* c = &ARITHMETIC[i];
        const bool f32 = strstr(c->text, "%f0") != NULL;
        const bool f64 = strstr(c->text, "%d0") != NULL;
        const char* end =
            f32 ? "mov.b32 %r0, %f0; cvt.u64.u32 %rd0, %r0;" : (f64 ? "mov.b64 %rd0, %d0;" : "");
        for (size_t k = 0; k < 8 && !f32 && !f64; k += 2) {
            end = KINDS[k][0] == c->kind ? KINDS[k + 1] : end;
        }
        char body[2048];
        snprintf(body, sizeof body, TEXT, c->text, end);
        uint64_t in[3] = {c->a, c->b, c->c};
        for (uint32_t threads = 32; threads == 32 || threads == 7; threads -= 25) {
            uint64_t out[32];
            memset(out, 0, sizeof out);
            const test_io io = {out, sizeof out, in, sizeof in};
            check(t, run_body(t, body, threads, 0, &io) == PTX_OK, c->text);
            check_u64(t, out[0], c->want, c->text);
            check_u64(t, out[threads - 1], c->want, c->text);
        }
    }
}

// ---- Control ------------------------------------------------------------------------------------

static uint32_t collatz(uint32_t n) {
    uint32_t steps = 0;
    for (; n != 1; steps++) {
        n = n & 1 ? 3 * n + 1 : n / 2;
    }
    return steps;
}

static void test_divergence(test_state* t) {
    static const char BODY[] = "add.s32 %r1, %r0, 1; mov.u32 %r2, 0;\n"
                               "$L_loop: setp.eq.s32 %p1, %r1, 1; @%p1 bra $L_done;\n"
                               "add.s32 %r2, %r2, 1; and.b32 %r3, %r1, 1;\n"
                               "setp.eq.s32 %p2, %r3, 0; @%p2 bra $L_even;\n"
                               "mad.lo.s32 %r1, %r1, 3, 1; bra.uni $L_loop;\n"
                               "$L_even: shr.u32 %r1, %r1, 1; bra.uni $L_loop;\n"
                               "$L_done: activemask.b32 %r4;\n"
                               "@!%p1 add.s32 %r2, %r2, 1000;\n"
                               "st.global.u32 [%rd0], %r2;\n"
                               "st.global.u32 [%rd3], %r4;\n";
    uint32_t steps[45];
    uint32_t masks[45];
    const test_io io = {steps, sizeof steps, masks, sizeof masks};
    check(t, run_body(t, BODY, 45, 0, &io) == PTX_OK, "divergence runs");
    bool equal = true;
    for (uint32_t i = 0; i < 45; i++) {
        equal = equal && steps[i] == collatz(i + 1);
    }
    check(t, equal, "divergence: every thread counts its own steps");
    check_u64(t, masks[0], 0xffffffffu, "divergence: lanes meet again");
    check_u64(t, masks[40], 0x1fffu, "divergence: lanes that do not exist stay off");
}

static void test_branch_table(test_state* t) {
    static const char BODY[] = "and.b32 %r1, %r0, 3;\n"
                               "$L_table: .branchtargets $L_a, $L_b, $L_c, $L_a;\n"
                               "brx.idx %r1, $L_table;\n"
                               "$L_a: mov.u32 %r2, 10; bra $L_end;\n"
                               "$L_b: mov.u32 %r2, 20; bra $L_end;\n"
                               "$L_c: mov.u32 %r2, 30; exit;\n"
                               "$L_end: st.global.u32 [%rd0], %r2;\n";
    uint32_t out[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    const uint32_t want[8] = {10, 20, 0, 10, 10, 20, 0, 10};
    uint32_t in[8];
    const test_io io = {out, sizeof out, in, sizeof in};
    check(t, run_body(t, BODY, 8, 0, &io) == PTX_OK, "brx.idx runs");
    check(t, memcmp(out, want, sizeof want) == 0, "brx.idx and exit");
}

// Each thread reads what a thread of another warp wrote: correct with the barrier in every order,
// and wrong without it in at least one.
static void test_barrier(test_state* t) {
    static const char BODY[] = ".shared .align 4 .b8 box[512];\n"
                               "mov.u32 %%r1, box; mad.lo.s32 %%r2, %%r0, 4, %%r1;\n"
                               "st.shared.u32 [%%r2], %%r0; %s\n"
                               "xor.b32 %%r3, %%r0, 127; mad.lo.s32 %%r2, %%r3, 4, %%r1;\n"
                               "ld.shared.u32 %%r4, [%%r2]; st.global.u32 [%%rd0], %%r4;\n";
    static const char* const BARRIERS[] = {"bar.sync 0;", "barrier.sync 3;", "bar.sync 1, 128;",
                                           ""};
    for (int b = 0; b < 4; b++) {
        char body[512];
        snprintf(body, sizeof body, BODY, BARRIERS[b]);
        int wrong = 0;
        for (int order = 0; order < 3; order++) {
            uint32_t out[128];
            uint32_t in[128];
            const test_io io = {out, sizeof out, in, sizeof in};
            t->order = (ptx_order)order;
            check(t, run_body(t, body, 128, 0, &io) == PTX_OK, "barrier runs");
            for (uint32_t i = 0; i < 128; i++) {
                wrong += out[i] != (i ^ 127u);
            }
        }
        check(t, (wrong == 0) == (b < 3), b < 3 ? BARRIERS[b] : "a missing barrier shows");
    }
    t->order = PTX_ORDER_FORWARD;
}

// bar.red counts over both warps; the second one has 8 threads.
static void test_barrier_red(test_state* t) {
    static const char BODY[] =
        "setp.lt.u32 %p1, %r0, 35; bar.red.popc.u32 %r1, 0, %p1; bar.red.and.pred %p2, 0, %p1;\n"
        "bar.red.or.pred %p3, 0, !%p1; selp.b32 %r2, 1000, 0, %p2; selp.b32 %r3, 100000, 0, %p3;\n"
        "add.s32 %r1, %r1, %r2; add.s32 %r1, %r1, %r3; st.global.u32 [%rd0], %r1;\n";
    uint32_t out[40];
    uint32_t in[40];
    const test_io io = {out, sizeof out, in, sizeof in};
    for (int order = 0; order < 3; order++) {
        t->order = (ptx_order)order;
        check(t, run_body(t, BODY, 40, 0, &io) == PTX_OK, "bar.red runs");
        check_u64(t, out[0], 100035, "bar.red");
        check_u64(t, out[39], 100035, "bar.red");
    }
    t->order = PTX_ORDER_FORWARD;
}

// ---- Warp-wide ----------------------------------------------------------------------------------

typedef struct warp_case {
    const char* text; // writes %r1
    uint32_t lane;
    uint32_t want;
} warp_case;

static const warp_case WARP[] = {
    {"shfl.sync.bfly.b32 %r1, %r0, 5, 31, -1;", 9, 12},
    {"shfl.sync.idx.b32 %r1, %r0, 3, 31, -1;", 20, 3},
    {"shfl.sync.idx.b32 %r1, %r0, 3, 0x181f, -1;", 20, 19},
    {"shfl.sync.up.b32 %r1, %r0, 4, 0, -1;", 10, 6},
    {"shfl.sync.up.b32 %r1|%p1, %r0, 4, 0, -1; @!%p1 mov.u32 %r1, 99;", 2, 99},
    {"shfl.sync.up.b32 %r1|%p1, %r0, 4, 0, -1; @!%p1 mov.u32 %r1, 99;", 4, 0},
    {"shfl.sync.down.b32 %r1, %r0, 4, 31, -1;", 10, 14},
    {"shfl.sync.down.b32 %r1|%p1, %r0, 4, 31, -1; @!%p1 mov.u32 %r1, 99;", 30, 99},
    {"setp.gt.u32 %p1, %r0, 15; vote.sync.ballot.b32 %r1, %p1, -1;", 0, 0xffff0000},
    {"setp.gt.u32 %p1, %r0, 15; vote.sync.any.pred %p2, !%p1, -1; selp.b32 %r1, 1, 0, %p2;", 3, 1},
    {"setp.gt.u32 %p1, %r0, 15; vote.sync.all.pred %p2, %p1, -1; selp.b32 %r1, 1, 0, %p2;", 3, 0},
    {"and.b32 %r2, %r0, 7; match.any.sync.b32 %r1, %r2, -1;", 9, 0x02020202},
    {"match.all.sync.b32 %r1|%p1, 5, -1;", 9, 0xffffffff},
    {"redux.sync.add.s32 %r1, %r0, -1;", 4, 496},
    {"redux.sync.max.u32 %r1, %r0, -1;", 4, 31},
    {"redux.sync.xor.b32 %r1, %r0, -1;", 4, 0},
    {"mov.u32 %r1, %lanemask_lt;", 5, 31},
    {"mov.u32 %r1, %laneid;", 5, 5},
    {"mov.u32 %r1, %ntid.x;", 5, 32},
    {"mov.u32 %r1, WARP_SZ;", 5, 32},
    {"mov.u32 %r1, %clock; mov.u32 %r2, %clock; sub.s32 %r1, %r2, %r1;", 0, 1},
    // Sub-warps with separate masks in one instruction.
    {"and.b32 %r2, %r0, 16; mov.u32 %r3, 0xffff; shl.b32 %r3, %r3, %r2;"
     "shfl.sync.bfly.b32 %r1, %r0, 1, 0x101f, %r3;",
     17, 16},
    // A lane that has exited is not waited for and has no value.
    {"setp.lt.u32 %p1, %r0, 8; @!%p1 exit; shfl.sync.bfly.b32 %r1, %r0, 1, 31, -1;", 3, 2},
    {"setp.lt.u32 %p1, %r0, 8; @!%p1 exit; shfl.sync.bfly.b32 %r1, %r0, 8, 31, -1;", 3, 0xCBCBCBCB},
    {"setp.lt.u32 %p1, %r0, 4; @%p1 bra $A; bra $B; $A: shfl.sync.bfly.b32 %r1, %r0, 1, 31, -1;"
     "st.global.u32 [%rd0], %r1; $B: exit;",
     3, 2},
    // Lanes that arrive by different paths wait for each other.
    {"mov.u32 %r2, %r0; setp.lt.u32 %p1, %r0, 7; @%p1 bra $A; add.s32 %r2, %r2, 100; bra $B;"
     "$A: add.s32 %r2, %r2, 200; $B: shfl.sync.bfly.b32 %r1, %r2, 31, 31, -1;",
     31, 200},
};

static void test_warp(test_state* t) {
    for (size_t i = 0; i < sizeof WARP / sizeof WARP[0]; i++) {
        char body[1024];
        uint32_t out[32];
        uint32_t in[32];
        const test_io io = {out, sizeof out, in, sizeof in};
        snprintf(body, sizeof body, "%s\nst.global.u32 [%%rd0], %%r1;", WARP[i].text);
        check(t, run_body(t, body, 32, 0, &io) == PTX_OK, WARP[i].text);
        check_u64(t, out[WARP[i].lane], WARP[i].want, WARP[i].text);
    }
}

// ---- Memory -------------------------------------------------------------------------------------

// Before the wait, the target holds poison whatever it held before; the second group stays
// in flight.
static void test_cp_async(test_state* t) {
    static const char BODY[] =
        ".shared .align 16 .b8 box[1024];\n"
        "mov.u32 %r1, box; mad.lo.s32 %r1, %r0, 32, %r1; mad.wide.u32 %rd4, %r0, 16, %rd2;\n"
        "mov.u32 %r9, 7; st.shared.v4.u32 [%r1], {%r9, %r9, %r9, %r9};\n"
        "cp.async.cg.shared.global [%r1], [%rd4], 16;\n"
        "cp.async.commit_group;\n"
        "cp.async.ca.shared.global [%r1+16], [%rd4], 8, 4;\n"
        "cp.async.commit_group;\n"
        "ld.shared.u32 %r2, [%r1];\n"
        "cp.async.wait_group 1;\n"
        "ld.shared.u32 %r3, [%r1+12]; ld.shared.u32 %r4, [%r1+16];\n"
        "cp.async.wait_all;\n"
        "ld.shared.v2.u32 {%r5, %r6}, [%r1+16];\n"
        "mad.wide.u32 %rd5, %r0, 20, %rd1;\n"
        "st.global.u32 [%rd5], %r2; st.global.u32 [%rd5+4], %r3; st.global.u32 [%rd5+8], %r4;\n"
        "st.global.u32 [%rd5+12], %r5; st.global.u32 [%rd5+16], %r6;\n";
    uint32_t in[32 * 4];
    uint32_t out[32 * 5];
    for (uint32_t i = 0; i < 128; i++) {
        in[i] = 1000 + i;
    }
    const test_io io = {out, sizeof out, in, sizeof in};
    check(t, run_body(t, BODY, 32, 0, &io) == PTX_OK, "cp.async runs");
    check_u64(t, out[5 * 5], 0xCBCBCBCBu, "cp.async lands late");
    check_u64(t, out[5 * 5 + 1], 1000 + 4 * 5 + 3, "cp.async landed at wait_group");
    check_u64(t, out[5 * 5 + 2], 0xCBCBCBCBu, "cp.async: the newest group is still in flight");
    check_u64(t, out[5 * 5 + 3], 1000 + 4 * 5, "cp.async landed at wait_all");
    check_u64(t, out[5 * 5 + 4], 0, "cp.async fills with zeros after the source size");
}

static void test_atomics(test_state* t) {
    static const char BODY[] =
        "atom.global.cta.add.u32 %r1, [%rd1], 2; red.global.max.s32 [%rd1+4], %r0;\n"
        "atom.global.inc.u32 %r2, [%rd1+8], 9; atom.global.exch.b32 %r3, [%rd1+12], %r0;\n"
        "atom.global.cas.b32 %r4, [%rd1+16], %r0, 77; red.global.add.f32 [%rd1+20], 0f3F000000;\n"
        "atom.global.min.u64 %rd5, [%rd1+24], 5; red.global.or.b32 [%rd1+32], %r0;\n"
        ".shared .align 4 .b8 box[4]; setp.eq.s32 %p1, %r0, 0; @%p1 st.shared.u32 [box], 5;\n"
        "bar.sync 0; atom.shared.add.u32 %r5, [box], 1; bar.sync 0;\n"
        "ld.shared.u32 %r6, [box]; st.global.u32 [%rd3], %r6;\n";
    uint32_t out[9] = {10, 0x80000000, 0, 5, 3, 0, 9, 0, 0};
    uint32_t in[64];
    const test_io io = {out, sizeof out, in, sizeof in};
    check(t, run_body(t, BODY, 64, 0, &io) == PTX_OK, "atomics run");
    check_u64(t, out[0], 138, "atom.add");
    check_u64(t, out[1], 63, "red.max.s32");
    check_u64(t, out[2], 64 % 10, "atom.inc wraps");
    check_u64(t, out[3], 63, "atom.exch");
    check_u64(t, out[4], 77, "atom.cas");
    check_u64(t, out[5], bits_of(32.0f), "red.add.f32");
    check_u64(t, out[6], 5, "atom.min.u64");
    check_u64(t, out[8], 63, "red.or");
    check_u64(t, in[63], 69, "atom.shared");
}

// Vectors, widths, generic addresses, local and constant memory, dynamic shared memory.
static void test_spaces(test_state* t) {
    static const char TEXT[] =
        ".const .align 4 .b8 table[8] = {1, 0, 0, 0, 255, 255, 255, 255};\n"
        ".global .align 4 .u32 counter = 40;\n"
        ".shared .align 4 .b8 common[128];\n"
        ".extern .shared .align 16 .b8 dynamic[];\n"
        ".visible .entry k(.param .align 8 .b8 s[16], .param .u64 .ptr .global .align 4 out)\n"
        ".maxntid 32, 1, 1 .minnctapersm 2\n{\n"
        ".local .align 8 .b8 depot[16]; .reg .b64 %SP; .reg .b64 %rd<9>; .reg .b32 %r<20>;\n"
        ".reg .b16 %rs<4>; // comment\n"
        "/* another\n one */ ld.param.u64 %rd1, [out]; ld.param.u32 %r1, [s+12];\n"
        ".pragma \"nounroll\";\n"
        "\t.loc 1 2 3\n"
        "mov.u32 %r2, %tid.x; mad.wide.u32 %rd1, %r2, 4, %rd1;\n"
        "mov.u64 %rd2, depot; cvta.local.u64 %SP, %rd2; st.u32 [%SP+8], %r2;\n"
        "ld.local.s16 %r3, [%rd2+8];\n"
        "ld.const.s32 %rd3, [table+4]; cvt.u32.u64 %r4, %rd3;\n"
        "mov.u64 %rd4, counter; ld.global.u32 %r5, [%rd4]; st.global.u32 [counter], 41;\n"
        "mov.u32 %r6, dynamic; mad.lo.s32 %r6, %r2, 4, %r6; st.shared.u32 [%r6], 100;\n"
        "cvt.u64.u32 %rd5, %r6; cvta.shared.u64 %rd5, %rd5; ld.u32 %r7, [%rd5];\n"
        "mov.u32 %r8, common; mad.lo.s32 %r8, %r2, 4, %r8; st.shared.u32 [%r8], 3;\n"
        "ld.shared.u32 %r9, [%r6];\n"
        "{ .reg .b32 %r3; mov.u32 %r3, 5; }\n"
        "ld.shared.u8 %rs1, [%r6]; cvt.u32.u16 %r10, %rs1;\n"
        "add.s32 %r1, %r1, %r3; add.s32 %r1, %r1, %r4; add.s32 %r1, %r1, %r5;\n"
        "add.s32 %r1, %r1, %r7; add.s32 %r1, %r1, %r9; add.s32 %r1, %r1, %r10;\n"
        "st.global.u32 [%rd1], %r1;\nret;\n}\n";
    ptx_module* module = load(t, TEXT);
    check(t, module != NULL, "spaces load");
    if (module == NULL) {
        return;
    }
    const ptx_kernel* kernel = ptx_find(module, "k");
    const ptx_kernel_info info = ptx_describe(kernel);
    check_u64(t, info.static_shared, 128, "shared bytes of the module variable that is used");
    check_u64(t, info.max_threads, 32, "maxntid");
    check_u64(t, ptx_param_size(kernel, 0), 16, "size of a struct parameter");
    check_u64(t, (uint64_t)ptx_version(module), 70, "version");
    uint32_t out[32];
    uint32_t s[4] = {0, 0, 0, 1000000};
    t->range_count = 0;
    uint64_t address = device_alloc(t, out, sizeof out);
    void* args[2] = {s, &address};
    check(t, launch(t, module, "k", 1, 32, 128, args) == PTX_OK, "spaces run");
    check_u64(t, out[9], 1000000 + 9 - 1 + 40 + 100 + 100 + 100, "spaces");
    check(t, launch(t, module, "k", 1, 32, 128, args) == PTX_OK, "spaces run again");
    check_u64(t, out[9], 1000000 + 9 - 1 + 41 + 100 + 100 + 100, "a module variable stays");
    check(t, launch(t, module, "k", 1, 33, 128, args) != PTX_OK, "more threads than maxntid");
    check(t, launch(t, module, "k", 1, 32, 124, args) == PTX_TRAP_ADDRESS,
          "shared memory too small");
    ptx_free(module);
}

// ---- Matrices -----------------------------------------------------------------------------------

static uint16_t small_bf16(uint32_t i) { // small integers are exact in every format
    return (uint16_t)(bits_of((float)((int)(i * 7 % 13) - 6)) >> 16);
}

static float bf16_value(uint16_t x) {
    const uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, sizeof y);
    return y;
}

// C = A B^T + 1 with A 16 x 16 and B 8 x 16, and B also stored transposed and read with .trans.
static void test_mma(test_state* t) {
    static const char BODY[] =
        ".shared .align 16 .b8 sa[512]; .shared .align 16 .b8 sb[256];\n"
        "mov.u32 %%r1, sa; mov.u32 %%r2, sb; mad.lo.s32 %%r3, %%r0, 16, %%r1;\n"
        "mad.wide.u32 %%rd4, %%r0, 16, %%rd2; ld.global.v4.u32 {%%r4,%%r5,%%r6,%%r7}, [%%rd4];\n"
        "st.shared.v4.u32 [%%r3], {%%r4,%%r5,%%r6,%%r7};\n"
        "setp.lt.u32 %%p1, %%r0, 16; mad.lo.s32 %%r3, %%r0, 16, %%r2;\n"
        "@%%p1 ld.global.v4.u32 {%%r4,%%r5,%%r6,%%r7}, [%%rd4+512];\n"
        "@%%p1 st.shared.v4.u32 [%%r3], {%%r4,%%r5,%%r6,%%r7};\n"
        "bar.sync 0;\n"
        "and.b32 %%r3, %%r0, 15; shl.b32 %%r3, %%r3, 5; shr.u32 %%r4, %%r0, 4;\n"
        "mad.lo.s32 %%r3, %%r4, 16, %%r3; add.s32 %%r3, %%r3, %%r1;\n"
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%%r10,%%r11,%%r12,%%r13}, [%%r3];\n"
        "%s\n"
        "mov.f32 %%f1, 0f3F800000;\n"
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%%f2,%%f3,%%f4,%%f5},\n"
        "{%%r10,%%r11,%%r12,%%r13}, {%%r14,%%r15}, {%%f1,%%f1,%%f1,%%f1};\n"
        "mad.wide.u32 %%rd5, %%r0, 16, %%rd1;\n"
        "st.global.v4.f32 [%%rd5], {%%f2,%%f3,%%f4,%%f5};\n";
    static const char* const READS[] = {
        // B as 8 rows of 16: rows by lane % 8, the two halves of K by lane / 8.
        "and.b32 %r3, %r0, 7; shl.b32 %r3, %r3, 5; shr.u32 %r4, %r0, 3; and.b32 %r4, %r4, 1;\n"
        "mad.lo.s32 %r3, %r4, 16, %r3; add.s32 %r3, %r3, %r2;\n"
        "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r14,%r15}, [%r3];",
        // B^T as 16 rows of 8.
        "and.b32 %r3, %r0, 15; mad.lo.s32 %r3, %r3, 16, %r2;\n"
        "ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%r14,%r15}, [%r3];"};
    for (uint32_t trans = 0; trans < 2; trans++) {
        uint16_t in[24 * 16];
        float out[32][4];
        char body[2048];
        for (uint32_t i = 0; i < 24 * 16; i++) {
            in[i] = small_bf16(i);
        }
        snprintf(body, sizeof body, BODY, READS[trans]);
        const test_io io = {out, sizeof out, in, sizeof in};
        check(t, run_body(t, body, 32, 0, &io) == PTX_OK, "mma runs");
        check_u64(t, t->stats.mma, 1, "mma is counted");
        bool equal = true;
        for (uint32_t l = 0; l < 32; l++) {
            for (uint32_t i = 0; i < 4; i++) {
                const uint32_t row = l / 4 + 8 * (i / 2);
                const uint32_t column = l % 4 * 2 + i % 2;
                float sum = 1.0f;
                for (uint32_t k = 0; k < 16; k++) {
                    const uint32_t b = 256 + (trans ? k * 8 + column : column * 16 + k);
                    sum += bf16_value(in[row * 16 + k]) * bf16_value(in[b]);
                }
                equal = equal && bits_of(sum) == bits_of(out[l][i]);
            }
        }
        check(t, equal, trans ? "ldmatrix.trans and mma" : "ldmatrix and mma");
    }
}

typedef struct shape_case {
    const char* text;
    uint32_t one; // 1.0 in both halves, or as tf32
    uint32_t want;
} shape_case;

// Matrices of ones: every sum is K, plus C = 0. A mistake in a shape shows in the number.
static void test_mma_shapes(test_state* t) {
    static const shape_case SHAPES[] = {
        {"m16n8k16.row.col.f32.f16.f16.f32 {%f2,%f3,%f4,%f5}, {%r1,%r1,%r1,%r1}, {%r1,%r1}, "
         "{%f1,%f1,%f1,%f1};",
         0x3c003c00, 0x41800000},
        {"m16n8k8.row.col.f32.f16.f16.f32 {%f2,%f3,%f4,%f5}, {%r1,%r1}, {%r1}, {%f1,%f1,%f1,%f1};",
         0x3c003c00, 0x41000000},
        {"m16n8k8.row.col.f32.bf16.bf16.f32 {%f2,%f3,%f4,%f5}, {%r1,%r1}, {%r1}, "
         "{%f1,%f1,%f1,%f1};",
         0x3f803f80, 0x41000000},
        {"m16n8k8.row.col.f32.tf32.tf32.f32 {%f2,%f3,%f4,%f5}, {%r1,%r1,%r1,%r1}, {%r1,%r1}, "
         "{%f1,%f1,%f1,%f1};",
         0x3f801fff, 0x41000000},
        {"m16n8k16.row.col.f16.f16.f16.f16 {%f5,%f3}, {%r1,%r1,%r1,%r1}, {%r1,%r1}, {%f1,%f1};",
         0x3c003c00, 0x4c004c00},
    };
    for (size_t i = 0; i < sizeof SHAPES / sizeof SHAPES[0]; i++) {
        char body[512];
        uint32_t out[32];
        uint32_t in[32];
        const test_io io = {out, sizeof out, in, sizeof in};
        snprintf(body, sizeof body,
                 "mov.u32 %%r1, %u; mov.f32 %%f1, 0f00000000; mma.sync.aligned.%s "
                 "st.global.f32 [%%rd0], %%f5;",
                 SHAPES[i].one, SHAPES[i].text);
        check(t, run_body(t, body, 32, 0, &io) == PTX_OK, SHAPES[i].text);
        check_u64(t, out[31], SHAPES[i].want, SHAPES[i].text);
    }
}

// ---- Traps --------------------------------------------------------------------------------------

typedef struct trap_case {
    const char* text;
    ptx_result want;
    const char* says; // must appear in the message
} trap_case;

static const trap_case TRAPS[] = {
    {"ld.global.u32 %r1, [%rd0+4];", PTX_TRAP_ADDRESS, "thread (31,0,0)"},
    {"st.global.u32 [%rd0+-4], %r0;", PTX_TRAP_ADDRESS, "write of 4 bytes"},
    {"ld.global.u32 %r1, [%rd0+1];", PTX_TRAP_MISALIGNED, "thread (0,0,0)"},
    {"ld.global.u16 %h1, [%rd0+1];", PTX_TRAP_MISALIGNED, "thread (0,0,0)"},
    {"ld.global.v4.u32 {%r1,%r2,%r3,%r4}, [%rd0];", PTX_TRAP_MISALIGNED, "16 bytes"},
    {"ld.shared.u32 %r1, [%r0+0];", PTX_TRAP_ADDRESS, "shared read"},
    {".shared .align 4 .b8 box[8]; st.shared.u32 [box+8], %r0;", PTX_TRAP_ADDRESS, "shared write"},
    {".local .align 4 .b8 box[8]; ld.local.u32 %r1, [box+8];", PTX_TRAP_ADDRESS, "local read"},
    {"mov.u64 %rd4, 0; ld.u32 %r1, [%rd4];", PTX_TRAP_ADDRESS, "at 0x0"},
    {"ld.u32 %r1, [%rd9];", PTX_TRAP_MISALIGNED, "0xcbcbcbcbcbcbcbcb"},
    {"atom.global.add.u32 %r1, [%rd2+128], 1;", PTX_TRAP_ADDRESS, "line "},
    {".shared .align 16 .b8 box[64]; mov.u32 %r1, box;"
     "cp.async.cg.shared.global [%r1], [%rd2+120], 16;",
     PTX_TRAP_MISALIGNED, "cp.async"},
    {".shared .align 16 .b8 box[64]; mov.u32 %r1, box;"
     "cp.async.cg.shared.global [%r1], [%rd2+128], 16;",
     PTX_TRAP_ADDRESS, "cp.async"},
    {".shared .align 16 .b8 box[64]; mov.u32 %r1, box;"
     "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r2}, [%r1+8];",
     PTX_TRAP_MISALIGNED, "ldmatrix"},
    {"setp.lt.u32 %p1, %r0, 3; @%p1 bra $A; bra $B; $A: shfl.sync.bfly.b32 %r1, %r0, 1, 31, -1; "
     "$B: bar.sync 0;",
     PTX_TRAP_SYNC, "wait for lanes 0xfffffff8"},
    {"shfl.sync.bfly.b32 %r1, %r0, 1, 31, 0x0000ffff;", PTX_TRAP_SYNC, "not in its member mask"},
    {"setp.lt.u32 %p1, %r0, 16; @%p1 shfl.sync.bfly.b32 %r1, %r0, 16, 31, 0xffff;", PTX_TRAP_SYNC,
     "does not take part"},
    {"setp.lt.u32 %p1, %r0, 16; @%p1 bra $A; bar.sync 0; bra $B; $A: bar.sync 0; $B:",
     PTX_TRAP_SYNC, "wait for lanes"},
    {"bar.sync 1, 64;", PTX_TRAP_SYNC, "only 32 threads arrive"},
    {"setp.lt.u32 %p1, %r0, 31; @!%p1 exit; mov.f32 %f1, 0f00000000;"
     "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%f2,%f3,%f4,%f5}, {%r1,%r1}, {%r1}, "
     "{%f1,%f1,%f1,%f1};",
     PTX_TRAP_SYNC, "needs all 32 lanes"},
    {"$A: bra $A;", PTX_TRAP_HANG, "10000"},
    {"trap;", PTX_TRAP_OTHER, "the kernel trapped"},
    {"$T: .branchtargets $A; brx.idx 1, $T; $A:", PTX_TRAP_OTHER, "index 1"},
};

static void test_traps(test_state* t) {
    t->max_steps = 10000;
    for (size_t i = 0; i < sizeof TRAPS / sizeof TRAPS[0]; i++) {
        for (int order = 0; order < 3; order++) {
            uint32_t out[32];
            uint32_t in[32];
            const test_io io = {out, sizeof out, in, sizeof in};
            t->order = (ptx_order)order;
            check_u64(t, run_body(t, TRAPS[i].text, 32, 0, &io), TRAPS[i].want, TRAPS[i].text);
            check(t, strstr(t->trap, TRAPS[i].says) != NULL && strstr(t->trap, "line ") != NULL,
                  TRAPS[i].text);
        }
    }
    t->max_steps = 0;
    t->order = PTX_ORDER_FORWARD;
}

// Constant memory cannot be written, not even through a generic address.
static void test_const_write(test_state* t) {
    ptx_module* module = load(t, ".const .align 4 .u32 one = 1;\n.entry k() { .reg .b64 %rd<2>;\n"
                                 "mov.u64 %rd1, one; st.u32 [%rd1], 5; ret; }\n");
    check(t, module != NULL, "const loads");
    if (module != NULL) {
        check(t, launch(t, module, "k", 1, 1, 0, NULL) == PTX_TRAP_ADDRESS, "const is read-only");
        ptx_free(module);
    }
}

// ---- Refusals -----------------------------------------------------------------------------------

static const char* const REFUSED[] = {
    "add.s33 %r1, %r1, %r1;",
    "add.s32 %r1, %r1;",
    "add.s32 %r1, %r1, %rd1;",
    "add.s32 %rd1, %r1, %r1;",
    "add.s32.sat %r1, %r1, %r1;",
    "add.s32 %r1, %r1, %r2, %r3;",
    "add.rn.s32 %r1, %r1, %r1;",
    "add.sat.u32 %r1, %r1, %r1;",
    "add.s32 %r99, %r1, %r1;",
    "add.s32 %tid.x, %r1, %r1;",
    "add.s32 _, %r1, %r1;",
    "add.f32 %f1, %f1, 1;",
    "add.s16 %h1, %h1, 70000;",
    "fma.f32 %f1, %f1, %f1, %f1;",
    "mul.wide.s64 %rd1, %rd1, %rd1;",
    "frobnicate.b32 %r1, %r1;",
    "setp.lt.b32 %p1, %r1, %r1;",
    "setp.lo.s32 %p1, %r1, %r1;",
    "cvt.f32.s32 %f1, %r1;",
    "cvt.s32.f32 %r1, %f1;",
    "cvt.rn.s32.f32 %r1, %f1;",
    "cvt.rn.f64.f32 %d1, %f1;",
    "ld.global.v3.u32 {%r1,%r2,%r3}, [%rd1];",
    "ld.global.v2.u32 {%r1,%r2,%r3,%r4}, [%rd1];",
    "ld.shared.nc.u32 %r1, [%r1];",
    "ld.param.u64 %rd1, [out+4];",
    "ld.global.u32 %h1, [%rd1];",
    "atom.global.add.s64 %rd1, [%rd1], 1;",
    "cp.async.cg.shared.global [%r1], [%rd1], 8;",
    "shfl.bfly.b32 %r1, %r1, 1, 31;",
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.f16.f32 {%f1,%f2,%f3,%f4}, {%r1,%r2,%r3,%r4}, "
    "{%r1,%r2}, {%f1,%f2,%f3,%f4};",
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1,%f2,%f3,%f4}, {%r1,%r2}, "
    "{%r1,%r2}, {%f1,%f2,%f3,%f4};",
    "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r1,%r2}, [%r1];",
    "bra $L_nowhere;",
    "$A: $A: ret;",
    "mov.u32 %r1, nobody;",
    "call foo;",
    "{ .reg .b32 inner; } mov.u32 %r1, inner;",
    ".tex .u64 t;",
};

static void test_refused(test_state* t) {
    for (size_t i = 0; i < sizeof REFUSED / sizeof REFUSED[0]; i++) {
        char text[2048];
        snprintf(text, sizeof text, FRAME, REFUSED[i]);
        ptx_module* module = load(t, text);
        check(t, module == NULL, REFUSED[i]);
        check(t, strncmp(t->log, "line ", 5) == 0, REFUSED[i]);
        ptx_free(module);
    }
    ptx_module* module =
        ptx_load(".version 7.0\n.target sm_80\n\n.func f() { ret; }", t->log, sizeof t->log);
    check(t, module == NULL && strstr(t->log, "line 4: device functions") != NULL, "line number");
    check(t, ptx_load("", t->log, sizeof t->log) == NULL, "an empty text");
    check(t, ptx_load(".version 7.0\n.target sm_80\n.entry k() {", NULL, 0) == NULL, "no end");
}

// ---- Orders -------------------------------------------------------------------------------------

// The last block to write wins: forward and reverse must differ, and a seed must give the same
// result twice.
static void test_orders(test_state* t) {
    ptx_module* module =
        load(t, ".entry k(.param .u64 out) { .reg .b64 %rd<2>; .reg .b32 %r<2>;\n"
                "ld.param.u64 %rd1, [out]; mov.u32 %r1, %ctaid.x; st.global.u32 [%rd1], %r1; }\n");
    check(t, module != NULL, "order loads");
    if (module == NULL) {
        return;
    }
    uint32_t last[4] = {0, 0, 0, 0};
    for (int run = 0; run < 4; run++) {
        t->range_count = 0;
        uint64_t address = device_alloc(t, &last[run], sizeof last[run]);
        void* args[1] = {&address};
        t->order = (ptx_order)(run < 3 ? run : 2);
        check(t, launch(t, module, "k", 50, 32, 0, args) == PTX_OK, "order runs");
    }
    check_u64(t, last[0], 49, "forward: the last block writes last");
    check_u64(t, last[1], 0, "reverse: the first block writes last");
    check(t, last[2] == last[3], "a seed gives the same order again");
    t->order = PTX_ORDER_FORWARD;
    ptx_free(module);
}

// Each of four blocks counts itself and waits for `wanted` of them: in a cooperative launch, all
// end in any order; one by one, the first waits in vain, and so do all if more are wanted than
// come.
static void test_together(test_state* t) {
    ptx_module* module =
        load(t, ".entry k(.param .u64 out, .param .u32 wanted) {\n"
                ".reg .b64 %rd<2>; .reg .b32 %r<3>; .reg .pred %p<1>;\n"
                "ld.param.u64 %rd1, [out]; ld.param.u32 %r2, [wanted];\n"
                "red.release.gpu.global.add.u32 [%rd1], 1;\n"
                "$again: ld.acquire.gpu.global.u32 %r1, [%rd1];\n"
                "setp.lt.u32 %p0, %r1, %r2; @%p0 bra $again; bar.warp.sync -1;\n"
                "st.global.u32 [%rd1+4], %r1; ret; }\n");
    check(t, module != NULL, "together loads");
    if (module == NULL) {
        return;
    }
    for (int run = 0; run < 5; run++) {
        uint32_t count[2] = {0, 0};
        uint32_t wanted = run == 4 ? 5 : 4;
        t->range_count = 0;
        uint64_t address = device_alloc(t, count, sizeof count);
        void* args[2] = {&address, &wanted};
        t->order = (ptx_order)(run < 3 ? run : 0);
        t->together = run != 3;
        t->max_steps = run == 3 ? 10000 : 0;
        const ptx_result result = launch(t, module, "k", 4, 1, 0, args);
        check_u64(t, result, run < 3 ? PTX_OK : run == 3 ? PTX_TRAP_HANG : PTX_TRAP_SYNC,
                  "blocks wait for each other");
        check_u64(t, count[1], run < 3 ? 4 : 0, "a block that has waited");
    }
    t->order = PTX_ORDER_FORWARD;
    t->together = false;
    t->max_steps = 0;
    ptx_free(module);
}

// Registers share storage, but a thread that needs a value still has it: after the other threads of
// its warp have gone another way, in the next turn of a loop, and where a thread was left out.
static void test_registers(test_state* t) {
    static const struct {
        const char* body;
        uint32_t even; // result of these threads
        uint32_t odd;
    } rows[] = {
        {"mov.u32 %r1, 5; add.s32 %r2, %r1, 1; st.global.u32 [%rd0], %r2;"
         "@%p1 mov.u32 %r3, 7; st.global.u32 [%rd0], %r3;",
         0xCBCBCBCB, 7},
        {"@%p1 bra $odd; mov.u32 %r1, 1; bra $end; $odd: mov.u32 %r2, 2; $end:"
         "@%p1 mov.u32 %r1, %r2; st.global.u32 [%rd0], %r1;",
         1, 2},
        {"@%p1 bra $odd; mov.u32 %r1, 1; bra $end; $odd: mov.u32 %r2, 2; $end:"
         "st.global.u32 [%rd0], %r1;",
         1, 0xCBCBCBCB},
        {"mov.u32 %r1, 10; mov.u32 %r2, 0; mov.u32 %r3, 0; $again: add.s32 %r4, %r2, %r1;"
         "mul.lo.s32 %r5, %r4, 1; add.s32 %r6, %r3, 1; mov.u32 %r2, %r5; mov.u32 %r3, %r6;"
         "setp.lt.u32 %p2, %r6, 4; @%p2 bra $again; st.global.u32 [%rd0], %r2;",
         40, 40},
        {"mov.u32 %r1, 3; @%p1 bra $odd; add.s32 %r2, %r1, 1; add.s32 %r3, %r2, %r2; bra $end;"
         "$odd: add.s32 %r4, %r0, 90; sub.s32 %r5, %r4, %r0; mov.u32 %r3, %r5; $end:"
         "add.s32 %r6, %r1, %r3; st.global.u32 [%rd0], %r6;",
         11, 93},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        char body[640];
        uint32_t out[32];
        memset(out, 0, sizeof out);
        snprintf(body, sizeof body, "and.b32 %%r20, %%r0, 1; setp.eq.u32 %%p1, %%r20, 1; %s",
                 rows[i].body);
        const test_io io = {out, sizeof out, out, sizeof out};
        check_u64(t, run_body(t, body, 32, 0, &io), PTX_OK, rows[i].body);
        check_u64(t, out[6], rows[i].even, rows[i].body);
        check_u64(t, out[31], rows[i].odd, rows[i].body);
    }
}

int main(void) {
    static test_state t;
    test_arithmetic(&t);
    test_registers(&t);
    test_divergence(&t);
    test_branch_table(&t);
    test_barrier(&t);
    test_barrier_red(&t);
    test_warp(&t);
    test_cp_async(&t);
    test_atomics(&t);
    test_spaces(&t);
    test_mma(&t);
    test_mma_shapes(&t);
    test_traps(&t);
    test_const_write(&t);
    test_refused(&t);
    test_orders(&t);
    test_together(&t);
    printf("ptx: %d checks, %d failed\n", t.checks, t.failures);
    return t.failures != 0;
}
