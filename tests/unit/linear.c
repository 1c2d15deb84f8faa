// linear.c - the LoRA linear operator: stacked projections, ranks, biases, dropout, both
// forms, forward and backward, on every machine, against float64.
#include "machines.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { MAX_PARTS = QLORA_LINEAR_PARTS };

typedef struct linear_case {
    int64_t T;
    int64_t in;
    int32_t count;
    int64_t out[MAX_PARTS];
    int64_t rank[MAX_PARTS];
    unsigned dense; // bit i: part i has a dense weight
    unsigned bias;  // bit i: part i has a bias
    qlora_dtype dtype;
    bool operand;
    float dropout;
} linear_case;

static const linear_case CASES[] = {
    {9, 64, 1, {40, 0, 0}, {8, 0, 0}, 0, 0, QLORA_F32, true, 0.0f},
    {9, 64, 1, {40, 0, 0}, {8, 0, 0}, 0, 0, QLORA_F32, false, 0.0f},
    {17, 72, 3, {32, 16, 24}, {5, 3, 9}, 2, 5, QLORA_F32, true, 0.0f},
    {17, 72, 3, {32, 16, 24}, {5, 3, 9}, 2, 5, QLORA_F32, false, 0.0f},
    {70, 96, 3, {64, 32, 32}, {16, 0, 8}, 0, 7, QLORA_BF16, true, 0.0f},
    {70, 96, 3, {64, 32, 32}, {16, 0, 8}, 0, 7, QLORA_BF16, false, 0.0f},
    {6, 40, 2, {13, 11, 0}, {0, 0, 0}, 1, 2, QLORA_F32, true, 0.0f}, // no adapters at all
    {6, 40, 2, {13, 11, 0}, {0, 0, 0}, 1, 2, QLORA_BF16, false, 0.0f},
    {1, 1, 1, {1, 0, 0}, {1, 0, 0}, 1, 1, QLORA_F32, true, 0.0f},
    {21, 64, 2, {24, 40, 0}, {4, 7, 0}, 0, 0, QLORA_F32, true, 0.25f},
    {21, 64, 2, {24, 40, 0}, {4, 7, 0}, 0, 1, QLORA_F32, false, 0.25f},
    {21, 64, 3, {24, 16, 16}, {8, 0, 8}, 0, 0, QLORA_BF16, true, 0.1f},
    {0, 64, 1, {40, 0, 0}, {8, 0, 0}, 0, 1, QLORA_F32, true, 0.0f},
};

// All data of one case on the host, rounded to the storage type.
typedef struct world {
    const linear_case* c;
    int64_t pad;
    int64_t out;
    int64_t rank;
    float scale[MAX_PARTS];
    float* w[MAX_PARTS]; // the dequantised weight
    float* bias[MAX_PARTS];
    float* a[MAX_PARTS];
    float* sb[MAX_PARTS];
    float* da[MAX_PARTS]; // initial contents
    float* db[MAX_PARTS];
    float* mask[MAX_PARTS]; // 0 or 1 / (1 - p), [T, in]
    float* x;
    float* dy;
    // on the machine
    qlora_tensor weight_t[MAX_PARTS];
    qlora_nf4 nf4[MAX_PARTS];
    qlora_tensor bias_t[MAX_PARTS];
    qlora_tensor a_t[MAX_PARTS];
    qlora_tensor sb_t[MAX_PARTS];
    qlora_tensor da_t[MAX_PARTS];
    qlora_tensor db_t[MAX_PARTS];
    qlora_tensor positions;
    qlora_tensor sequences;
    qlora_tensor state;
    qlora_tensor operand;
    qlora_linear_desc linear;
} world;

static float stored(float x, qlora_dtype dtype) {
    if (dtype == QLORA_BF16) {
        uint32_t u;
        memcpy(&u, &x, sizeof u);
        u = (u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u;
        memcpy(&x, &u, sizeof x);
    }
    return x;
}

static float* values_of(test_random* random, int64_t rows, int64_t cols, float scale,
                        qlora_dtype dtype) {
    size_t n = (size_t)(rows * cols);
    float* x = (float*)malloc(n * 4 + 4);
    test_random_fill(random, x, n, scale);
    for (size_t i = 0; i < n; i++) {
        x[i] = stored(x[i], dtype);
    }
    return x;
}

// [rows, cols + pad], with the extra columns filled with NaN that must be overwritten, not read.
static bool upload_padded(qlora_ctx* ctx, qlora_dtype dtype, int64_t rows, int64_t cols,
                          int64_t pad, const float* values, qlora_tensor* out) {
    int64_t ld = cols + pad;
    float* image = (float*)malloc((size_t)(rows * ld) * 4 + 4);
    for (int64_t i = 0; i < rows * ld; i++) {
        image[i] = i % ld < cols && values != NULL ? values[i / ld * cols + i % ld] : NAN;
    }
    bool ok = test_tensor(ctx, dtype, rows, ld, image, out) == QLORA_OK;
    free(image);
    return ok;
}

static bool world_weight(qlora_ctx* ctx, test_random* random, world* s, int32_t i) {
    const linear_case* c = s->c;
    qlora_linear_part* p = &s->linear.parts[i];
    s->w[i] = values_of(random, c->out[i], c->in, 0.1f, c->dtype);
    if ((c->dense >> i & 1u) != 0) {
        p->dense = &s->weight_t[i];
        return test_tensor(ctx, c->dtype, c->out[i], c->in, s->w[i], &s->weight_t[i]) == QLORA_OK;
    }
    qlora_nf4_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.rows = c->out[i];
    desc.cols = c->in;
    qlora_tensor source;
    qlora_tensor wide;
    p->nf4 = &s->nf4[i];
    return test_tensor(ctx, QLORA_F32, c->out[i], c->in, s->w[i], &source) == QLORA_OK &&
           qlora_nf4_create(ctx, &desc, &s->nf4[i]) == QLORA_OK &&
           qlora_nf4_quantise(ctx, &source, &s->nf4[i]) == QLORA_OK &&
           qlora_tensor_create(ctx, QLORA_F32, c->out[i], c->in, &wide) == QLORA_OK &&
           qlora_nf4_dequantise(ctx, &s->nf4[i], &wide, true) == QLORA_OK &&
           test_read(ctx, &wide, s->w[i]) && qlora_tensor_destroy(ctx, &wide) == QLORA_OK &&
           qlora_tensor_destroy(ctx, &source) == QLORA_OK;
}

// Dropout's mask, obtained by applying it to ones.
static bool world_mask(qlora_ctx* ctx, world* s, int32_t i) {
    const linear_case* c = s->c;
    size_t n = (size_t)(c->T * c->in);
    s->mask[i] = (float*)malloc(n * 4 + 4);
    for (size_t k = 0; k < n; k++) {
        s->mask[i][k] = 1.0f;
    }
    if (c->dropout == 0.0f) {
        return true;
    }
    qlora_tensor t;
    qlora_dropout_desc d;
    memset(&d, 0, sizeof d);
    d.x = &t;
    d.y = &t;
    d.positions = &s->positions;
    d.sequences = &s->sequences;
    d.state = &s->state;
    d.p = c->dropout;
    d.layer = s->linear.layer;
    d.projection = s->linear.parts[i].projection;
    return test_tensor(ctx, QLORA_F32, c->T, c->in, s->mask[i], &t) == QLORA_OK &&
           qlora_dropout(ctx, &d) == QLORA_OK && test_read(ctx, &t, s->mask[i]) &&
           qlora_tensor_destroy(ctx, &t) == QLORA_OK;
}

static bool world_part(qlora_ctx* ctx, test_random* random, world* s, int32_t i) {
    const linear_case* c = s->c;
    qlora_linear_part* p = &s->linear.parts[i];
    p->out = c->out[i];
    p->rank = c->rank[i];
    p->scale = 0.5f * (float)(i + 1);
    p->projection = 3 + i;
    s->scale[i] = p->scale;
    s->bias[i] = values_of(random, 1, p->out, 1.0f, c->dtype);
    s->a[i] = values_of(random, p->rank, c->in, 0.2f, c->dtype);
    s->sb[i] = values_of(random, p->out, p->rank, 0.2f, c->dtype);
    s->da[i] = values_of(random, p->rank, c->in, 1.0f, QLORA_F32);
    s->db[i] = values_of(random, p->out, p->rank, 1.0f, QLORA_F32);
    if (!world_weight(ctx, random, s, i) ||
        test_tensor(ctx, c->dtype, 1, p->out, s->bias[i], &s->bias_t[i]) != QLORA_OK ||
        test_tensor(ctx, c->dtype, p->rank, c->in, s->a[i], &s->a_t[i]) != QLORA_OK ||
        test_tensor(ctx, c->dtype, p->out, p->rank, s->sb[i], &s->sb_t[i]) != QLORA_OK ||
        test_tensor(ctx, QLORA_F32, p->rank, c->in, s->da[i], &s->da_t[i]) != QLORA_OK ||
        test_tensor(ctx, QLORA_F32, p->out, p->rank, s->db[i], &s->db_t[i]) != QLORA_OK) {
        return false;
    }
    p->bias = (c->bias >> i & 1u) != 0 ? &s->bias_t[i] : NULL;
    p->a = &s->a_t[i];
    p->sb = &s->sb_t[i];
    p->da = &s->da_t[i];
    p->db = &s->db_t[i];
    return world_mask(ctx, s, i);
}

static bool world_make(qlora_ctx* ctx, test_random* random, const linear_case* c, world* s) {
    memset(s, 0, sizeof *s);
    s->c = c;
    s->linear.in = c->in;
    s->linear.count = c->count;
    s->linear.dropout = c->dropout;
    s->linear.layer = 11;
    int32_t* numbers = (int32_t*)calloc((size_t)c->T + 4, 4);
    int32_t state[4] = {77, 5, 9, 0};
    for (int64_t i = 0; i < c->T; i++) {
        numbers[i] = (int32_t)(i * 3);
    }
    bool ok = qlora_tensor_create(ctx, QLORA_I32, 1, c->T, &s->positions) == QLORA_OK &&
              qlora_tensor_create(ctx, QLORA_I32, 1, c->T, &s->sequences) == QLORA_OK &&
              qlora_tensor_create(ctx, QLORA_I32, 1, 4, &s->state) == QLORA_OK &&
              qlora_tensor_write(ctx, &s->positions, numbers, (size_t)c->T * 4) == QLORA_OK &&
              qlora_tensor_zero(ctx, &s->sequences) == QLORA_OK &&
              qlora_tensor_write(ctx, &s->state, state, sizeof state) == QLORA_OK;
    free(numbers);
    s->linear.positions = &s->positions;
    s->linear.sequences = &s->sequences;
    s->linear.state = &s->state;
    for (int32_t i = 0; ok && i < c->count; i++) {
        ok = world_part(ctx, random, s, i);
        s->rank += c->rank[i];
    }
    s->pad = qlora_linear_pad(&s->linear);
    s->out = qlora_linear_out(&s->linear);
    s->x = values_of(random, c->T, c->in, 1.0f, c->dtype);
    s->dy = values_of(random, c->T, s->out, 1.0f, c->dtype);
    if (ok && c->operand) {
        s->linear.operand = &s->operand;
        ok = upload_padded(ctx, c->dtype, s->out + s->pad, c->in + s->pad, 0, NULL, &s->operand) &&
             qlora_linear_place(ctx, &s->linear, QLORA_LINEAR_WEIGHTS) == QLORA_OK &&
             qlora_linear_place(ctx, &s->linear, QLORA_LINEAR_ADAPTERS) == QLORA_OK;
    }
    if (!ok) {
        fprintf(stderr, "%s\n", qlora_last_error(ctx));
    }
    return ok;
}

static void world_free(qlora_ctx* ctx, world* s) {
    for (int i = 0; i < MAX_PARTS; i++) {
        float* host[] = {s->w[i], s->bias[i], s->a[i], s->sb[i], s->da[i], s->db[i], s->mask[i]};
        qlora_tensor* device[] = {&s->weight_t[i], &s->bias_t[i], &s->a_t[i],
                                  &s->sb_t[i],     &s->da_t[i],   &s->db_t[i]};
        for (size_t k = 0; k < sizeof host / sizeof host[0]; k++) {
            free(host[k]);
        }
        for (size_t k = 0; k < sizeof device / sizeof device[0]; k++) {
            qlora_tensor_destroy(ctx, device[k]);
        }
        qlora_nf4_destroy(ctx, &s->nf4[i]);
    }
    qlora_tensor* device[] = {&s->positions, &s->sequences, &s->state, &s->operand};
    for (size_t k = 0; k < sizeof device / sizeof device[0]; k++) {
        qlora_tensor_destroy(ctx, device[k]);
    }
    free(s->x);
    free(s->dy);
}

// ---- the formulas in float64 --------------------------------------------------------------------

typedef struct truth {
    float* z; // [T, pad]
    float* u;
    float* y;
    float* dx;
    float* da[MAX_PARTS];
    float* db[MAX_PARTS];
} truth;

// The function is long because all formulas are kept together.
static truth truth_make(const world* s) {
    const linear_case* c = s->c;
    truth t;
    memset(&t, 0, sizeof t);
    t.z = (float*)calloc((size_t)(c->T * s->pad) + 1, 4);
    t.u = (float*)calloc((size_t)(c->T * s->pad) + 1, 4);
    t.y = (float*)calloc((size_t)(c->T * s->out) + 1, 4);
    t.dx = (float*)calloc((size_t)(c->T * c->in) + 1, 4);
    double* dx = (double*)calloc((size_t)(c->T * c->in) + 1, 8);
    int64_t at = 0;
    int64_t col = 0;
    for (int32_t i = 0; i < c->count; i++) {
        int64_t R = c->rank[i];
        int64_t O = c->out[i];
        t.da[i] = (float*)calloc((size_t)(R * c->in) + 1, 4);
        t.db[i] = (float*)calloc((size_t)(O * R) + 1, 4);
        double* da = (double*)calloc((size_t)(R * c->in) + 1, 8);
        double* db = (double*)calloc((size_t)(O * R) + 1, 8);
        for (int64_t r = 0; r < c->T; r++) {
            const float* x = s->x + r * c->in;
            const float* m = s->mask[i] + r * c->in;
            const float* dy = s->dy + r * s->out + col;
            float* z = t.z + r * s->pad + at;
            float* u = t.u + r * s->pad + at;
            for (int64_t k = 0; k < R; k++) {
                double zs = 0.0;
                double us = 0.0;
                for (int64_t j = 0; j < c->in; j++) {
                    zs += (double)x[j] * (double)m[j] * (double)s->a[i][k * c->in + j];
                }
                for (int64_t o = 0; o < O; o++) {
                    us += (double)dy[o] * (double)s->sb[i][o * R + k];
                }
                z[k] = stored((float)zs, c->dtype);
                u[k] = stored((float)us, c->dtype);
                for (int64_t j = 0; j < c->in; j++) {
                    da[k * c->in + j] += (double)u[k] * (double)x[j] * (double)m[j];
                    dx[r * c->in + j] +=
                        (double)u[k] * (double)m[j] * (double)s->a[i][k * c->in + j];
                }
                for (int64_t o = 0; o < O; o++) {
                    db[o * R + k] += (double)s->scale[i] * (double)dy[o] * (double)z[k];
                }
            }
            for (int64_t o = 0; o < O; o++) {
                double sum = (c->bias >> i & 1u) != 0 ? (double)s->bias[i][o] : 0.0;
                for (int64_t j = 0; j < c->in; j++) {
                    sum += (double)x[j] * (double)s->w[i][o * c->in + j];
                    dx[r * c->in + j] += (double)dy[o] * (double)s->w[i][o * c->in + j];
                }
                for (int64_t k = 0; k < R; k++) {
                    sum += (double)z[k] * (double)s->sb[i][o * R + k];
                }
                t.y[r * s->out + col + o] = (float)sum;
            }
        }
        for (int64_t k = 0; k < R * c->in; k++) {
            t.da[i][k] = (float)(da[k] + (double)s->da[i][k]);
        }
        for (int64_t k = 0; k < O * R; k++) {
            t.db[i][k] = (float)(db[k] + (double)s->db[i][k]);
        }
        free(da);
        free(db);
        at += R;
        col += O;
    }
    for (int64_t k = 0; k < c->T * c->in; k++) {
        t.dx[k] = (float)dx[k];
    }
    free(dx);
    return t;
}

static void truth_free(truth* t) {
    free(t->z);
    free(t->u);
    free(t->y);
    free(t->dx);
    for (int i = 0; i < MAX_PARTS; i++) {
        free(t->da[i]);
        free(t->db[i]);
    }
}

// ---- comparison ---------------------------------------------------------------------------------

static bool matches(qlora_ctx* ctx, const qlora_tensor* t, const float* expected, double limit,
                    const char* name) {
    size_t n = (size_t)(t->rows * t->cols);
    float* got = (float*)malloc(n * 4 + 4);
    bool ok = test_read(ctx, t, got) && (n == 0 || test_rel_l2(expected, got, n, limit));
    if (!ok) {
        fprintf(stderr, "%s is wrong\n", name);
    }
    free(got);
    return ok;
}

// The columns after a matrix: z or u, and zeros up to the padding.
static bool tail_matches(qlora_ctx* ctx, const qlora_tensor* t, int64_t cols, int64_t rank,
                         const float* expected, double limit, const char* name) {
    int64_t pad = t->cols - cols;
    size_t n = (size_t)(t->rows * pad);
    float* image = (float*)malloc((size_t)(t->rows * t->cols) * 4 + 4);
    float* got = (float*)malloc(n * 4 + 4);
    bool ok = test_read(ctx, t, image);
    for (int64_t i = 0; ok && i < t->rows * pad; i++) {
        got[i] = image[i / pad * t->cols + cols + i % pad];
        ok = i % pad < rank || got[i] == 0.0f;
    }
    ok = ok && (n == 0 || rank == 0 || test_rel_l2(expected, got, n, limit));
    if (!ok) {
        fprintf(stderr, "%s is wrong\n", name);
    }
    free(image);
    free(got);
    return ok;
}

static bool run_case(qlora_ctx* ctx, test_random* random, const linear_case* c) {
    world s;
    if (!world_make(ctx, random, c, &s)) {
        return false;
    }
    truth t = truth_make(&s);
    double limit = c->dtype == QLORA_BF16 ? 5e-3 : 3e-6;
    qlora_tensor x, y, dy, dx;
    bool ok = upload_padded(ctx, c->dtype, c->T, c->in, s.pad, s.x, &x) &&
              upload_padded(ctx, c->dtype, c->T, s.out, s.pad, s.dy, &dy) &&
              upload_padded(ctx, c->dtype, c->T, s.out, 0, NULL, &y) &&
              upload_padded(ctx, c->dtype, c->T, c->in, 0, NULL, &dx);
    if (!ok || qlora_linear_forward(ctx, &s.linear, &x, &y) != QLORA_OK ||
        qlora_linear_backward(ctx, &s.linear, &x, &dy, &dx, 0) != QLORA_OK) {
        fprintf(stderr, "%s\n", qlora_last_error(ctx));
        return false;
    }
    ok = matches(ctx, &y, t.y, limit, "y") && matches(ctx, &dx, t.dx, limit, "dx") &&
         tail_matches(ctx, &x, c->in, s.rank, t.z, limit, "z") &&
         tail_matches(ctx, &dy, s.out, s.rank, t.u, limit, "u");
    for (int32_t i = 0; ok && i < c->count; i++) {
        ok = matches(ctx, &s.da_t[i], t.da[i], limit, "dA") &&
             matches(ctx, &s.db_t[i], t.db[i], limit, "dB");
    }
    // Again, overwriting: the old contents are gone. dx may be omitted.
    if (ok && c->T > 0) {
        ok = qlora_linear_backward(ctx, &s.linear, &x, &dy, NULL, QLORA_LINEAR_OVERWRITE) ==
             QLORA_OK;
        for (int32_t i = 0; ok && i < c->count; i++) {
            for (int64_t k = 0; k < c->rank[i] * c->in; k++) {
                t.da[i][k] -= s.da[i][k];
            }
            ok = matches(ctx, &s.da_t[i], t.da[i], limit, "dA overwritten");
        }
    }
    qlora_tensor* all[] = {&x, &y, &dy, &dx};
    for (int i = 0; i < 4; i++) {
        qlora_tensor_destroy(ctx, all[i]);
    }
    truth_free(&t);
    world_free(ctx, &s);
    return ok;
}

TEST linear_is_right(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx)
        SKIPm(test_open_reason());
    test_random random = test_random_start("linear_is_right");
    for (size_t i = 0; i < sizeof CASES / sizeof CASES[0]; i++) {
        bool runs = CASES[i].dtype == QLORA_F32 || test_has_bf16(machine);
        if (runs && !run_case(ctx, &random, &CASES[i])) {
            fprintf(stderr, "case %d\n", (int)i);
            FAIL();
        }
    }
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

static void small_scratch(qlora_ctx_desc* desc) {
    desc->scratch_bytes = 24 * 1024;
}

// Weights and masked rows go through the scratch in slices, and gradients that have no room for
// parts of sums need none.
TEST linear_in_little_scratch(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, small_scratch);
    if (!ctx)
        SKIPm(test_open_reason());
    test_random random = test_random_start("linear_in_little_scratch");
    static const linear_case cases[] = {
        {70, 64, 2, {96, 72, 0}, {4, 8, 0}, 0, 1, QLORA_F32, false, 0.5f},
        {70, 64, 2, {96, 72, 0}, {4, 8, 0}, 0, 0, QLORA_F32, true, 0.5f},
        {1024, 64, 1, {64, 0, 0}, {8, 0, 0}, 1, 0, QLORA_BF16, true, 0.0f},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        if (cases[i].dtype == QLORA_F32 || test_has_bf16(machine)) {
            ASSERT(run_case(ctx, &random, &cases[i]));
        }
    }
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// Stacked projections give the same as separate ones, bit for bit on the CPU.
TEST linear_stack_equals_parts(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx)
        SKIPm(test_open_reason());
    test_random random = test_random_start("linear_stack_equals_parts");
    const linear_case* c = &CASES[3]; // three parts, plain form
    world s;
    ASSERT(world_make(ctx, &random, c, &s));
    qlora_tensor x, y;
    ASSERT(upload_padded(ctx, c->dtype, c->T, c->in, s.pad, s.x, &x));
    ASSERT(upload_padded(ctx, c->dtype, c->T, s.out, 0, NULL, &y));
    ASSERT_EQ(QLORA_OK, qlora_linear_forward(ctx, &s.linear, &x, &y));
    size_t n = (size_t)(c->T * s.out);
    float* stacked = (float*)malloc(n * 4);
    ASSERT(test_read(ctx, &y, stacked));
    int64_t col = 0;
    for (int32_t i = 0; i < c->count; i++) {
        qlora_linear_desc one = s.linear;
        one.count = 1;
        one.parts[0] = s.linear.parts[i];
        qlora_tensor x1, y1;
        ASSERT(upload_padded(ctx, c->dtype, c->T, c->in, qlora_linear_pad(&one), s.x, &x1));
        ASSERT(upload_padded(ctx, c->dtype, c->T, c->out[i], 0, NULL, &y1));
        ASSERT_EQ(QLORA_OK, qlora_linear_forward(ctx, &one, &x1, &y1));
        float* alone = (float*)malloc((size_t)(c->T * c->out[i]) * 4);
        ASSERT(test_read(ctx, &y1, alone));
        for (int64_t r = 0; r < c->T; r++) {
            ASSERT_CLOSE(alone + r * c->out[i], stacked + r * s.out + col, (size_t)c->out[i], 0.0,
                         0.0);
        }
        free(alone);
        qlora_tensor_destroy(ctx, &x1);
        qlora_tensor_destroy(ctx, &y1);
        col += c->out[i];
    }
    free(stacked);
    qlora_tensor_destroy(ctx, &x);
    qlora_tensor_destroy(ctx, &y);
    world_free(ctx, &s);
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// Gradients of A stored one below the other in one buffer are one product, with the same result.
TEST linear_joins_gradients(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx)
        SKIPm(test_open_reason());
    test_random random = test_random_start("linear_joins_gradients");
    for (size_t k = 2; k < 6; k++) {
        const linear_case* c = &CASES[k];
        if (c->dtype != QLORA_F32 && !test_has_bf16(machine)) {
            continue;
        }
        world s;
        ASSERT(world_make(ctx, &random, c, &s));
        truth t = truth_make(&s);
        qlora_tensor x, y, dy, joined, view[MAX_PARTS];
        ASSERT(upload_padded(ctx, c->dtype, c->T, c->in, s.pad, s.x, &x));
        ASSERT(upload_padded(ctx, c->dtype, c->T, s.out, s.pad, s.dy, &dy));
        ASSERT(upload_padded(ctx, c->dtype, c->T, s.out, 0, NULL, &y));
        ASSERT(upload_padded(ctx, QLORA_F32, s.rank, c->in, 5, NULL, &joined)); // NaN: overwritten
        int64_t row = 0;
        for (int32_t i = 0; i < c->count; i++) {
            ASSERT_EQ(QLORA_OK,
                      qlora_tensor_view(ctx, &joined, row, c->rank[i], 0, c->in, &view[i]));
            s.linear.parts[i].da = &view[i];
            row += c->rank[i];
        }
        ASSERT_EQ(QLORA_OK, qlora_linear_forward(ctx, &s.linear, &x, &y));
        ASSERT_EQ(QLORA_OK,
                  qlora_linear_backward(ctx, &s.linear, &x, &dy, NULL, QLORA_LINEAR_OVERWRITE));
        float* image = (float*)malloc((size_t)(s.rank * (c->in + 5)) * 4);
        ASSERT(test_read(ctx, &joined, image));
        row = 0;
        for (int32_t i = 0; i < c->count; i++) {
            for (int64_t r = 0; r < c->rank[i]; r++, row++) {
                float* expected = t.da[i] + r * c->in;
                for (int64_t j = 0; j < c->in; j++) {
                    expected[j] -= s.da[i][r * c->in + j];
                }
                ASSERT_REL_L2(expected, image + row * (c->in + 5), (size_t)c->in,
                              c->dtype == QLORA_BF16 ? 5e-3 : 3e-6);
                ASSERT(image[row * (c->in + 5) + c->in] != image[row * (c->in + 5) + c->in]);
            }
        }
        free(image);
        qlora_tensor* all[] = {&x, &y, &dy, &joined};
        for (int i = 0; i < 4; i++) {
            ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, all[i]));
        }
        truth_free(&t);
        world_free(ctx, &s);
    }
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

TEST linear_refuses(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx)
        SKIPm(test_open_reason());
    test_random random = test_random_start("linear_refuses");
    const linear_case* c = &CASES[2];
    world s;
    ASSERT(world_make(ctx, &random, c, &s));
    qlora_tensor x, y, dy;
    ASSERT(upload_padded(ctx, c->dtype, c->T, c->in, s.pad, s.x, &x));
    ASSERT(upload_padded(ctx, c->dtype, c->T, s.out, s.pad, s.dy, &dy));
    ASSERT(upload_padded(ctx, c->dtype, c->T, s.out, 0, NULL, &y));
    qlora_tensor narrow;
    ASSERT_EQ(QLORA_OK, qlora_tensor_view(ctx, &x, 0, c->T, 0, c->in, &narrow));
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_linear_forward(ctx, NULL, &x, &y));
    ASSERT_EQ(QLORA_ERR_ARGUMENT,
              qlora_linear_forward(ctx, &s.linear, &narrow, &y)); // no room for z
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_linear_backward(ctx, &s.linear, &x, &y, NULL, 0)); // nor u
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_linear_backward(ctx, &s.linear, &x, &dy, NULL, 1));
    qlora_linear_desc bad = s.linear;
    bad.count = 4;
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_linear_forward(ctx, &bad, &x, &y));
    bad = s.linear;
    bad.parts[0].dense = bad.parts[1].dense; // two weights
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_linear_forward(ctx, &bad, &x, &y));
    bad = s.linear;
    bad.parts[1].a = NULL;
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_linear_forward(ctx, &bad, &x, &y));
    bad = s.linear;
    bad.parts[2].da = NULL; // forward does not need it, backward does
    ASSERT_EQ(QLORA_OK, qlora_linear_forward(ctx, &bad, &x, &y));
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_linear_backward(ctx, &bad, &x, &dy, NULL, 0));
    bad = s.linear;
    bad.dropout = 1.0f;
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_linear_forward(ctx, &bad, &x, &y));
    bad = s.linear;
    bad.operand = NULL;
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_linear_place(ctx, &bad, QLORA_LINEAR_WEIGHTS));
    qlora_tensor_destroy(ctx, &x);
    qlora_tensor_destroy(ctx, &y);
    qlora_tensor_destroy(ctx, &dy);
    world_free(ctx, &s);
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

SUITE(linear_suite) {
    RUN_ON(TEST_EVERYWHERE, linear_is_right);
    RUN_ON(TEST_EVERYWHERE, linear_in_little_scratch);
    RUN_ON(TEST_CPU, linear_stack_equals_parts);
    RUN_ON(TEST_EVERYWHERE, linear_joins_gradients);
    RUN_ON(TEST_EVERYWHERE, linear_refuses);
}
