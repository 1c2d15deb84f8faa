// tiers.c - the CPU tiers: which one a context uses, and that each computes what the portable one
// does.
#define _POSIX_C_SOURCE 200809L // setenv

#include "machines.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static qlora_cpu_tier wanted;

static void with_tier(qlora_ctx_desc* desc) {
    desc->cpu_tier = wanted;
}

// Runs with the environment variable set to `value`; NULL = not set. The caller restores it.
static void set_variable(const char* value) {
    if (value != NULL) {
        setenv("QLORA_CPU_TIER", value, 1);
    } else {
        unsetenv("QLORA_CPU_TIER");
    }
}

static bool describes(qlora_ctx* ctx, const char* name) {
    char text[2048];
    char line[64];
    snprintf(line, sizeof line, "CPU tier: %s", name);
    qlora_describe(ctx, text, sizeof text);
    return strstr(text, line) != NULL;
}

TEST tiers_are_chosen_and_named(const test_machine* machine) {
    ASSERT(qlora_cpu_tier_usable(QLORA_CPU_TIER_BEST));
    ASSERT(qlora_cpu_tier_usable(QLORA_CPU_TIER_PORTABLE));
    ASSERT_FALSE(qlora_cpu_tier_usable(QLORA_CPU_TIER_COUNT));
    ASSERT_STR_EQ("unknown", qlora_cpu_tier_name(QLORA_CPU_TIER_COUNT));
    for (int i = 1; i < QLORA_CPU_TIER_COUNT; i++) {
        wanted = (qlora_cpu_tier)i;
        qlora_ctx* ctx = test_open(machine, with_tier);
        ASSERT_EQ(qlora_cpu_tier_usable(wanted), ctx != NULL);
        if (ctx == NULL) {
            ASSERT(strstr(test_open_reason(), "desc.cpu_tier is ") != NULL);
            ASSERT(strstr(test_open_reason(), qlora_cpu_tier_name(wanted)) != NULL);
            continue;
        }
        qlora_ctx_info info;
        ASSERT_EQ(QLORA_OK, qlora_ctx_query(ctx, &info));
        ASSERT_EQ(wanted, info.desc->cpu_tier);
        ASSERT(describes(ctx, qlora_cpu_tier_name(wanted)));
        ASSERT(test_close_ctx(machine, ctx));
    }
    wanted = QLORA_CPU_TIER_COUNT;
    ASSERT_EQ(NULL, test_open(machine, with_tier));
    ASSERT(strstr(test_open_reason(), "desc.cpu_tier is 8") != NULL);
    PASS();
}

TEST tiers_come_from_the_environment(const test_machine* machine) {
    const char* before = getenv("QLORA_CPU_TIER");
    char kept[32];
    snprintf(kept, sizeof kept, "%s", before != NULL ? before : "");
    set_variable("sse9");
    qlora_ctx* unknown = test_open(machine, NULL);
    bool told = strstr(test_open_reason(), "QLORA_CPU_TIER is \"sse9\"") != NULL &&
                strstr(test_open_reason(), "portable") != NULL;
    set_variable("portable");
    qlora_ctx* portable = test_open(machine, NULL);
    set_variable("sse9"); // not read if the desc names a tier
    wanted = QLORA_CPU_TIER_PORTABLE;
    qlora_ctx* named = test_open(machine, with_tier);
    set_variable(qlora_cpu_tier_usable(QLORA_CPU_TIER_NEON) ? "avx2" : "neon");
    qlora_ctx* missing = test_open(machine, NULL);
    bool refused = strstr(test_open_reason(), "usable here: portable") != NULL;
    set_variable("best");
    qlora_ctx* best = test_open(machine, NULL);
    set_variable(kept[0] != '\0' ? kept : NULL);
    ASSERT(unknown == NULL && told);
    ASSERT(missing == NULL && refused);
    ASSERT(portable != NULL && describes(portable, "portable"));
    ASSERT(named != NULL && describes(named, "portable"));
    ASSERT(best != NULL);
    ASSERT_EQ(QLORA_OK, qlora_ctx_destroy(portable));
    ASSERT_EQ(QLORA_OK, qlora_ctx_destroy(named));
    ASSERT_EQ(QLORA_OK, qlora_ctx_destroy(best));
    PASS();
}

// ---- products -----------------------------------------------------------------------------------

static int32_t threads_wanted;

static void with_tier_and_threads(qlora_ctx_desc* desc) {
    desc->cpu_tier = wanted;
    desc->threads = threads_wanted;
}

typedef struct tier_product {
    int64_t m;
    int64_t n;
    int64_t k;
    bool ta;
    bool tb;
    qlora_dtype a;
    qlora_dtype b;
    qlora_dtype c;
    float alpha;
    float beta;
    int64_t batch;
} tier_product;

// Whole numbers, so that every sum is exact in any order and all tiers must agree in every bit.
static bool whole_tensor(qlora_ctx* ctx, test_random* random, qlora_dtype dtype, int64_t batch,
                         int64_t rows, int64_t cols, qlora_tensor* out) {
    size_t n = (size_t)(batch * rows * cols);
    uint16_t* half = (uint16_t*)malloc(n * 2 + 4);
    float* values = (float*)malloc(n * 4 + 4);
    for (size_t i = 0; i < n; i++) {
        uint32_t bits = 0;
        values[i] = (float)test_random_below(random, 17) - 8.0f;
        memcpy(&bits, &values[i], 4);
        uint32_t exponent = (bits >> 23 & 255u) - 112u;
        half[i] = (uint16_t)(bits >> 16); // bf16; f16 below
        if (dtype == QLORA_F16) {
            half[i] =
                values[i] == 0.0f
                    ? 0
                    : (uint16_t)((bits >> 16 & 0x8000u) | exponent << 10 | (bits >> 13 & 0x3ffu));
        }
    }
    bool wide = dtype == QLORA_F32;
    bool ok = qlora_tensor_create_batched(ctx, dtype, batch, rows, cols, out) == QLORA_OK &&
              qlora_tensor_write(ctx, out, wide ? (void*)values : (void*)half,
                                 n * (wide ? 4 : 2)) == QLORA_OK;
    free(values);
    free(half);
    return ok;
}

// The product in one tier; `out` receives the bytes of C.
static bool tier_multiply(const test_machine* machine, const tier_product* p, qlora_cpu_tier tier,
                          int32_t threads, void* out) {
    wanted = tier;
    threads_wanted = threads;
    qlora_ctx* ctx = test_open(machine, with_tier_and_threads);
    test_random random = test_random_start("tier_multiply");
    qlora_tensor a, b, c;
    qlora_gemm_desc d;
    memset(&d, 0, sizeof d);
    d.trans_a = p->ta;
    d.trans_b = p->tb;
    d.alpha = p->alpha;
    d.beta = p->beta;
    size_t bytes = (size_t)(p->batch * p->m * p->n) * qlora_dtype_bytes(p->c);
    bool ok =
        ctx != NULL &&
        whole_tensor(ctx, &random, p->a, p->batch, p->ta ? p->k : p->m, p->ta ? p->m : p->k, &a) &&
        whole_tensor(ctx, &random, p->b, p->batch, p->tb ? p->n : p->k, p->tb ? p->k : p->n, &b) &&
        whole_tensor(ctx, &random, p->c, p->batch, p->m, p->n, &c) &&
        qlora_gemm(ctx, &d, &a, &b, &c) == QLORA_OK &&
        qlora_tensor_read(ctx, &c, out, bytes) == QLORA_OK;
    ok = ok && qlora_tensor_destroy(ctx, &a) == QLORA_OK &&
         qlora_tensor_destroy(ctx, &b) == QLORA_OK && qlora_tensor_destroy(ctx, &c) == QLORA_OK;
    return ok && test_close_ctx(machine, ctx);
}

TEST tiers_multiply_alike(const test_machine* machine) {
    static const tier_product cases[] = {
        {1, 1, 1, false, false, QLORA_F32, QLORA_F32, QLORA_F32, 1, 0, 1},
        {3, 50, 401, false, true, QLORA_F32, QLORA_F32, QLORA_F32, 2, 1, 1},
        {4, 7, 800, false, true, QLORA_F32, QLORA_BF16, QLORA_F32, 1, 0, 1},
        {9, 13, 385, false, true, QLORA_F32, QLORA_F32, QLORA_F32, 1, 0, 1},
        {101, 97, 390, false, true, QLORA_BF16, QLORA_F32, QLORA_F32, 1, 1, 1},
        {100, 49, 400, true, false, QLORA_F32, QLORA_F16, QLORA_F32, 2, -1, 1},
        {17, 100, 33, true, true, QLORA_F16, QLORA_F16, QLORA_F32, 1, 0, 1},
        {30, 600, 65, false, false, QLORA_BF16, QLORA_BF16, QLORA_BF16, 1, 0, 1},
        {13, 515, 770, false, true, QLORA_BF16, QLORA_BF16, QLORA_BF16, 0.5f, 1, 1},
        {1030, 24, 6, false, true, QLORA_F32, QLORA_F32, QLORA_F32, 1, 0, 1},
        {6, 5, 70, false, false, QLORA_F32, QLORA_F32, QLORA_F32, 1, 1, 3},
        {200, 16, 1300, false, true, QLORA_F32, QLORA_F32, QLORA_F32, 1, 0, 1},
        {70, 32, 41, true, false, QLORA_F32, QLORA_F32, QLORA_F32, 1, 1, 1},
        {1030, 5, 2200, false, false, QLORA_F32, QLORA_F32, QLORA_F32, 1, 0, 1},
        {5, 6, 0, false, true, QLORA_F32, QLORA_F32, QLORA_F32, 1, 1, 1},
        // panels that fill their memory, with sums behind them
        {768, 3, 4300, false, true, QLORA_BF16, QLORA_BF16, QLORA_BF16, 1, 0, 1},
        // few rows, as in decoding: weights of every type, adapters, queries over a cache
        {1, 70, 576, false, true, QLORA_F32, QLORA_BF16, QLORA_F32, 1, 0, 1},
        {1, 9, 77, false, true, QLORA_F32, QLORA_F16, QLORA_F32, 1, 0, 1},
        {2, 11, 31, false, true, QLORA_BF16, QLORA_BF16, QLORA_F32, 1, 1, 1},
        {1, 33, 16, false, true, QLORA_F32, QLORA_F32, QLORA_F32, 1, 1, 1},
        {7, 41, 64, false, true, QLORA_F32, QLORA_F32, QLORA_F32, 0.5f, 0, 3},
        {3, 64, 41, false, false, QLORA_F32, QLORA_F32, QLORA_F32, 1, 0, 3},
        {8, 48, 6, false, false, QLORA_BF16, QLORA_F32, QLORA_F32, 2, 1, 2},
        {5, 32, 131, false, false, QLORA_F32, QLORA_F16, QLORA_F32, 1, 0, 2},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const tier_product* p = &cases[i];
        size_t bytes = (size_t)(p->batch * p->m * p->n) * qlora_dtype_bytes(p->c);
        char* expected = (char*)calloc(1, bytes);
        char* got = (char*)malloc(bytes);
        bool same = tier_multiply(machine, p, QLORA_CPU_TIER_PORTABLE, 1, expected);
        for (int t = 1; t < QLORA_CPU_TIER_COUNT && same; t++) {
            for (int32_t threads = 1; threads <= 4 && qlora_cpu_tier_usable((qlora_cpu_tier)t);
                 threads += 3) {
                memset(got, 0x55, bytes);
                same = same && tier_multiply(machine, p, (qlora_cpu_tier)t, threads, got) &&
                       memcmp(expected, got, bytes) == 0;
            }
        }
        free(expected);
        free(got);
        if (!same) {
            fprintf(stderr, "product %d in tier %s\n", (int)i, qlora_cpu_tier_name(wanted));
            FAIL();
        }
    }
    PASS();
}

// ---- LoRA linear --------------------------------------------------------------------------------

enum { LINEAR_ROWS = 101, LINEAR_IN = 700, LINEAR_PARTS = 3, LINEAR_OUTPUTS = 10 };

// All tensors of a linear operator with three parts, the second with an NF4 weight.
typedef struct tier_linear {
    qlora_tensor x;
    qlora_tensor y;
    qlora_tensor dy;
    qlora_tensor dx;
    qlora_tensor weight[LINEAR_PARTS];
    qlora_tensor a[LINEAR_PARTS];
    qlora_tensor joint; // a[0] and a[1], one after the other, and views of it
    qlora_tensor view[2];
    qlora_tensor sb[LINEAR_PARTS];
    qlora_tensor da[LINEAR_PARTS];
    qlora_tensor db[LINEAR_PARTS];
    qlora_nf4 nf4;
    qlora_linear_desc linear;
} tier_linear;

// Small whole numbers: all sums are exact.
static bool small_tensor(qlora_ctx* ctx, test_random* random, int64_t rows, int64_t cols,
                         qlora_tensor* out) {
    size_t n = (size_t)(rows * cols);
    float* values = (float*)malloc(n * 4 + 4);
    for (size_t i = 0; i < n; i++) {
        values[i] = (float)test_random_below(random, 3) - 1.0f;
    }
    bool ok = test_tensor(ctx, QLORA_F32, rows, cols, values, out) == QLORA_OK;
    free(values);
    return ok;
}

static bool tier_linear_make(qlora_ctx* ctx, tier_linear* l) {
    static const int64_t outs[LINEAR_PARTS] = {50, 33, 24};
    static const int64_t ranks[LINEAR_PARTS] = {16, 5, 0};
    test_random random = test_random_start("tier_linear");
    memset(l, 0, sizeof *l);
    l->linear.in = LINEAR_IN;
    l->linear.count = LINEAR_PARTS;
    bool ok = true;
    for (int i = 0; i < LINEAR_PARTS && ok; i++) {
        qlora_linear_part* p = &l->linear.parts[i];
        p->out = outs[i];
        p->rank = ranks[i];
        p->scale = 2.0f;
        p->dense = i != 1 ? &l->weight[i] : NULL;
        p->nf4 = i == 1 ? &l->nf4 : NULL;
        p->a = &l->a[i];
        p->sb = &l->sb[i];
        p->da = &l->da[i];
        p->db = &l->db[i];
        ok = small_tensor(ctx, &random, outs[i], LINEAR_IN, &l->weight[i]) &&
             small_tensor(ctx, &random, ranks[i], LINEAR_IN, &l->a[i]) &&
             small_tensor(ctx, &random, outs[i], ranks[i], &l->sb[i]) &&
             small_tensor(ctx, &random, ranks[i], LINEAR_IN, &l->da[i]) &&
             small_tensor(ctx, &random, outs[i], ranks[i], &l->db[i]);
    }
    int64_t pad = qlora_linear_pad(&l->linear);
    int64_t out = qlora_linear_out(&l->linear);
    qlora_nf4_desc desc; // -1, 0 and 1 are levels of NF4
    memset(&desc, 0, sizeof desc);
    desc.rows = outs[1];
    desc.cols = LINEAR_IN;
    desc.plain_scales = true;
    return ok && qlora_nf4_create(ctx, &desc, &l->nf4) == QLORA_OK &&
           qlora_nf4_quantise(ctx, &l->weight[1], &l->nf4) == QLORA_OK &&
           small_tensor(ctx, &random, LINEAR_ROWS, LINEAR_IN + pad, &l->x) &&
           small_tensor(ctx, &random, LINEAR_ROWS, out, &l->y) &&
           small_tensor(ctx, &random, LINEAR_ROWS, out + pad, &l->dy) &&
           small_tensor(ctx, &random, LINEAR_ROWS, LINEAR_IN, &l->dx);
}

// Replaces the first two A by copies that follow each other in memory.
static bool tier_linear_join(qlora_ctx* ctx, tier_linear* l) {
    int64_t rows[2] = {l->a[0].rows, l->a[1].rows};
    float* values = (float*)malloc((size_t)((rows[0] + rows[1]) * LINEAR_IN) * sizeof *values);
    bool ok =
        test_read(ctx, &l->a[0], values) &&
        test_read(ctx, &l->a[1], values + rows[0] * LINEAR_IN) &&
        test_tensor(ctx, QLORA_F32, rows[0] + rows[1], LINEAR_IN, values, &l->joint) == QLORA_OK;
    for (int i = 0; i < 2 && ok; i++) {
        ok = qlora_tensor_view(ctx, &l->joint, i * rows[0], rows[i], 0, LINEAR_IN, &l->view[i]) ==
             QLORA_OK;
        l->linear.parts[i].a = &l->view[i];
    }
    free(values);
    return ok;
}

// x and dy, with z and u, y, dx and the gradients of the adapters, one after another.
static bool tier_linear_run(const test_machine* machine, qlora_cpu_tier tier, int32_t threads,
                            float* out) {
    wanted = tier;
    threads_wanted = threads;
    qlora_ctx* ctx = test_open(machine, with_tier_and_threads);
    tier_linear l;
    bool ok = ctx != NULL && tier_linear_make(ctx, &l) &&
              (threads == 1 || tier_linear_join(ctx, &l)) &&
              qlora_linear_forward(ctx, &l.linear, &l.x, &l.y) == QLORA_OK &&
              qlora_linear_backward(ctx, &l.linear, &l.x, &l.dy, &l.dx, 0) == QLORA_OK;
    qlora_tensor* outputs[] = {&l.x,     &l.y,     &l.dy,    &l.dx,    &l.da[0],
                               &l.da[1], &l.da[2], &l.db[0], &l.db[1], &l.db[2]};
    for (int i = 0; i < LINEAR_OUTPUTS && ok; i++) {
        ok = test_read(ctx, outputs[i], out);
        out += outputs[i]->rows * outputs[i]->cols;
    }
    for (int i = 0; i < LINEAR_OUTPUTS && ctx != NULL; i++) {
        ok = qlora_tensor_destroy(ctx, outputs[i]) == QLORA_OK && ok;
    }
    for (int i = 0; i < LINEAR_PARTS && ctx != NULL; i++) {
        ok = qlora_tensor_destroy(ctx, &l.weight[i]) == QLORA_OK && ok;
        ok = qlora_tensor_destroy(ctx, &l.a[i]) == QLORA_OK && ok;
        ok = qlora_tensor_destroy(ctx, &l.sb[i]) == QLORA_OK && ok;
    }
    return ctx != NULL && qlora_tensor_destroy(ctx, &l.joint) == QLORA_OK &&
           qlora_nf4_destroy(ctx, &l.nf4) == QLORA_OK && test_close_ctx(machine, ctx) && ok;
}

// The panels that the products share give what separate products give, also if adapters are joined.
TEST tiers_add_adapters_alike(const test_machine* machine) {
    size_t n = 4 * LINEAR_ROWS * (LINEAR_IN + 128);
    float* out = (float*)calloc(2 * n, sizeof *out);
    bool same = tier_linear_run(machine, QLORA_CPU_TIER_PORTABLE, 1, out);
    for (int t = 1; t < QLORA_CPU_TIER_COUNT && same; t++) {
        for (int32_t threads = 1; threads <= 3 && qlora_cpu_tier_usable((qlora_cpu_tier)t);
             threads += 2) {
            memset(out + n, 0, n * sizeof *out);
            same = same && tier_linear_run(machine, (qlora_cpu_tier)t, threads, out + n) &&
                   memcmp(out, out + n, n * sizeof *out) == 0;
        }
    }
    free(out);
    ASSERT(same);
    PASS();
}

// ---- NF4 ----------------------------------------------------------------------------------------

// Products of a weight and rows of the identity are the dequantised weight, to the bit.
static bool nf4_shows_through(qlora_ctx* ctx, test_random* random, int64_t rows, int64_t cols,
                              int32_t block, bool plain, int64_t at_once, bool backward) {
    int64_t in = backward ? rows : cols;
    int64_t out = backward ? cols : rows;
    qlora_nf4_desc desc;
    qlora_nf4 w;
    qlora_tensor source, x, y;
    memset(&desc, 0, sizeof desc);
    desc.rows = rows;
    desc.cols = cols;
    desc.plain_scales = plain;
    desc.block = block;
    desc.block2 = block != 0 ? 4 : 0; // several groups
    float* values = (float*)calloc((size_t)(rows * cols), 4);
    float* unit = (float*)calloc((size_t)(at_once * in), 4);
    float* got = (float*)calloc((size_t)(at_once * out), 4);
    test_random_fill(random, values, (size_t)(rows * cols), 0.1f);
    bool ok = test_tensor(ctx, QLORA_F32, rows, cols, values, &source) == QLORA_OK &&
              qlora_nf4_create(ctx, &desc, &w) == QLORA_OK &&
              qlora_nf4_quantise(ctx, &source, &w) == QLORA_OK &&
              qlora_nf4_dequantise(ctx, &w, &source, true) == QLORA_OK &&
              test_read(ctx, &source, values) &&
              qlora_tensor_create(ctx, QLORA_F32, at_once, in, &x) == QLORA_OK &&
              qlora_tensor_create(ctx, QLORA_F32, at_once, out, &y) == QLORA_OK;
    for (int64_t first = 0; ok && first < in; first += at_once) {
        memset(unit, 0, (size_t)(at_once * in) * 4);
        for (int64_t i = 0; i < at_once && first + i < in; i++) {
            unit[i * in + first + i] = 1.0f;
        }
        ok = qlora_tensor_write(ctx, &x, unit, (size_t)(at_once * in) * 4) == QLORA_OK &&
             (backward ? qlora_nf4_gemm_backward(ctx, &x, &w, &y, 0)
                       : qlora_nf4_gemm_forward(ctx, &x, &w, &y, 0)) == QLORA_OK &&
             test_read(ctx, &y, got);
        for (int64_t i = 0; ok && i < at_once && first + i < in; i++) {
            for (int64_t j = 0; ok && j < out; j++) {
                float want = values[backward ? (first + i) * cols + j : j * cols + first + i];
                ok = got[i * out + j] == want;
            }
        }
    }
    free(values);
    free(unit);
    free(got);
    return ok && qlora_nf4_destroy(ctx, &w) == QLORA_OK &&
           qlora_tensor_destroy(ctx, &source) == QLORA_OK &&
           qlora_tensor_destroy(ctx, &x) == QLORA_OK && qlora_tensor_destroy(ctx, &y) == QLORA_OK;
}

TEST tiers_dequantise_to_the_bit(const test_machine* machine) {
    test_random random = test_random_start("tiers_dequantise_to_the_bit");
    for (int t = 1; t < QLORA_CPU_TIER_COUNT; t++) {
        wanted = (qlora_cpu_tier)t;
        if (!qlora_cpu_tier_usable(wanted)) {
            continue;
        }
        qlora_ctx* ctx = test_open(machine, with_tier);
        ASSERT(ctx != NULL);
        for (int form = 0; form < 4; form++) {
            bool plain = form % 2 != 0;
            int64_t at_once = form / 2 != 0 ? 3 : 40;
            for (int back = 0; back < 2; back++) {
                ASSERT(nf4_shows_through(ctx, &random, 37, 67, 0, plain, at_once, back != 0));
                ASSERT(nf4_shows_through(ctx, &random, 29, 192, 0, plain, at_once, back != 0));
            }
            // codes that are read as they are stored: whole blocks, parts of blocks, half blocks
            ASSERT(nf4_shows_through(ctx, &random, 6, 128, 64, plain, 1, false));
            ASSERT(nf4_shows_through(ctx, &random, 7, 320, 256, plain, 2, false));
            ASSERT(nf4_shows_through(ctx, &random, 5, 64, 32, plain, 1, false));
        }
        ASSERT(test_close_ctx(machine, ctx));
    }
    PASS();
}

// One row times a weight, with n threads; `scale` replaces one of the plain scales.
static bool stream_row(const test_machine* machine, int32_t threads, float scale, float* got) {
    enum { ROWS = 210, COLS = 576 };
    static float values[ROWS * COLS];
    static float scales[ROWS * COLS / 64];
    float x[COLS];
    test_random random = test_random_start("stream_row");
    threads_wanted = threads;
    qlora_ctx* ctx = test_open(machine, with_tier_and_threads);
    qlora_nf4_desc desc;
    qlora_nf4 w;
    qlora_tensor source, from, to;
    qlora_nf4_parts parts;
    memset(&desc, 0, sizeof desc);
    memset(&parts, 0, sizeof parts);
    desc.rows = ROWS;
    desc.cols = COLS;
    desc.plain_scales = true;
    parts.absmax = scales;
    test_random_fill(&random, values, ROWS * COLS, 0.1f);
    test_random_fill(&random, x, COLS, 1.0f);
    bool ok = ctx != NULL && test_tensor(ctx, QLORA_F32, ROWS, COLS, values, &source) == QLORA_OK &&
              test_tensor(ctx, QLORA_F32, 1, COLS, x, &from) == QLORA_OK &&
              qlora_tensor_create(ctx, QLORA_F32, 1, ROWS, &to) == QLORA_OK &&
              qlora_nf4_create(ctx, &desc, &w) == QLORA_OK &&
              qlora_nf4_quantise(ctx, &source, &w) == QLORA_OK &&
              qlora_nf4_read(ctx, &w, &parts) == QLORA_OK;
    scales[13] = ok && scale != 0.0f ? scale : scales[13]; // block 4 of row 1
    return ok && qlora_nf4_write(ctx, &w, &parts) == QLORA_OK &&
           qlora_nf4_gemm_forward(ctx, &from, &w, &to, 0) == QLORA_OK && test_read(ctx, &to, got) &&
           qlora_nf4_destroy(ctx, &w) == QLORA_OK &&
           qlora_tensor_destroy(ctx, &source) == QLORA_OK &&
           qlora_tensor_destroy(ctx, &from) == QLORA_OK &&
           qlora_tensor_destroy(ctx, &to) == QLORA_OK && test_close_ctx(machine, ctx);
}

// The bits do not depend on the threads, and a scale that is not finite reaches its row only.
TEST tiers_stream_the_same_bits(const test_machine* machine) {
    enum { ROWS = 210 };
    float one[ROWS], four[ROWS], bad[ROWS], portable[ROWS];
    const uint32_t all_ones = 0x7fffffffu;
    float payload = 0.0f;
    memcpy(&payload, &all_ones, 4); // a NaN that rounding up would turn into a zero
    wanted = QLORA_CPU_TIER_PORTABLE;
    ASSERT(stream_row(machine, 1, 0.0f, portable));
    for (int t = 2; t < QLORA_CPU_TIER_COUNT; t++) {
        wanted = (qlora_cpu_tier)t;
        if (!qlora_cpu_tier_usable(wanted)) {
            continue;
        }
        ASSERT(stream_row(machine, 1, 0.0f, one));
        ASSERT(stream_row(machine, 4, 0.0f, four));
        ASSERT_MEM_EQ(one, four, sizeof one);
        ASSERT_REL_L2(portable, one, ROWS, 1e-6);
        ASSERT(stream_row(machine, 1, payload, bad));
        for (int i = 0; i < ROWS; i++) {
            ASSERT_EQ(i == 1, bad[i] != bad[i]);
            ASSERT(i == 1 || bad[i] == one[i]);
        }
    }
    PASS();
}

SUITE(tiers_suite) {
    RUN_ON(TEST_CPU, tiers_stream_the_same_bits);
    RUN_ON(TEST_CPU, tiers_multiply_alike);
    RUN_ON(TEST_CPU, tiers_add_adapters_alike);
    RUN_ON(TEST_CPU, tiers_dequantise_to_the_bit);
    RUN_ON(TEST_CPU, tiers_are_chosen_and_named);
    RUN_ON(TEST_CPU, tiers_come_from_the_environment);
}
