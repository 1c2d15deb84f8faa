// linear.c - the LoRA linear operator compiled in double: its backward pass against
// finite differences.
#include "test.h"

#include <stdlib.h>

enum { T = 5, IN = 24, PARTS = 3 };

static const int64_t OUT[PARTS] = {6, 9, 4};
static const int64_t RANK[PARTS] = {3, 0, 5};

typedef struct linear_rig {
    qlora_ctx* ctx;
    qlora_tensor x; // [T, IN + pad]
    qlora_tensor y;
    qlora_tensor g; // weights of the loss: loss = sum of y g
    qlora_tensor dy;
    qlora_tensor dx;
    qlora_tensor operand;
    qlora_tensor weight[PARTS];
    qlora_nf4 nf4[PARTS];
    qlora_tensor bias[PARTS];
    qlora_tensor a[PARTS];
    qlora_tensor b[PARTS]; // B itself; sb is computed from it
    qlora_tensor sb[PARTS];
    qlora_tensor da[PARTS];
    qlora_tensor db[PARTS];
    qlora_tensor positions;
    qlora_tensor sequences;
    qlora_tensor state;
    qlora_linear_desc linear;
    bool ok;
} linear_rig;

static double* at(const qlora_tensor* t, int64_t row, int64_t col) {
    return (double*)t->data + row * t->ld + col;
}

static void make(linear_rig* r, test_random* random, qlora_dtype dtype, int64_t rows, int64_t cols,
                 qlora_tensor* out) {
    r->ok = r->ok && qlora_tensor_create(r->ctx, dtype, rows, cols, out) == QLORA_OK;
    for (int64_t i = 0; r->ok && i < rows * cols; i++) {
        if (dtype == QLORA_F32) {
            ((double*)out->data)[i] = 0.5 * test_random_normal(random);
        } else {
            ((int32_t*)out->data)[i] = (int32_t)test_random_below(random, 1000);
        }
    }
}

static void rig_part(linear_rig* r, test_random* random, int i) {
    qlora_linear_part* p = &r->linear.parts[i];
    p->out = OUT[i];
    p->rank = RANK[i];
    p->scale = 0.75f * (float)(i + 1);
    p->projection = i;
    make(r, random, QLORA_F32, OUT[i], IN, &r->weight[i]);
    make(r, random, QLORA_F32, 1, OUT[i], &r->bias[i]);
    make(r, random, QLORA_F32, RANK[i], IN, &r->a[i]);
    make(r, random, QLORA_F32, OUT[i], RANK[i], &r->b[i]);
    make(r, random, QLORA_F32, OUT[i], RANK[i], &r->sb[i]);
    make(r, random, QLORA_F32, RANK[i], IN, &r->da[i]);
    make(r, random, QLORA_F32, OUT[i], RANK[i], &r->db[i]);
    if (i == 1) {
        qlora_nf4_desc desc;
        memset(&desc, 0, sizeof desc);
        desc.rows = OUT[i];
        desc.cols = IN;
        r->ok = r->ok && qlora_nf4_create(r->ctx, &desc, &r->nf4[i]) == QLORA_OK &&
                qlora_nf4_quantise(r->ctx, &r->weight[i], &r->nf4[i]) == QLORA_OK;
        p->nf4 = &r->nf4[i];
    } else {
        p->dense = &r->weight[i];
    }
    p->bias = i == 2 ? NULL : &r->bias[i];
    p->a = &r->a[i];
    p->sb = &r->sb[i];
    p->da = &r->da[i];
    p->db = &r->db[i];
}

static void rig_make(linear_rig* r, bool operand, float dropout) {
    memset(r, 0, sizeof *r);
    qlora_ctx_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.require_backend = QLORA_BACKEND_CPU;
    desc.threads = 1;
    r->ok = qlora_ctx_create(&desc, &r->ctx) == QLORA_OK;
    test_random random = test_random_start("internal_linear");
    r->linear.in = IN;
    r->linear.count = PARTS;
    r->linear.dropout = dropout;
    for (int i = 0; i < PARTS && r->ok; i++) {
        rig_part(r, &random, i);
    }
    int64_t pad = qlora_linear_pad(&r->linear);
    int64_t out = qlora_linear_out(&r->linear);
    make(r, &random, QLORA_F32, T, IN + pad, &r->x);
    make(r, &random, QLORA_F32, T, out, &r->y);
    make(r, &random, QLORA_F32, T, out, &r->g);
    make(r, &random, QLORA_F32, T, out + pad, &r->dy);
    make(r, &random, QLORA_F32, T, IN, &r->dx);
    make(r, &random, QLORA_F32, out + pad, IN + pad, &r->operand);
    make(r, &random, QLORA_I32, 1, T, &r->positions);
    make(r, &random, QLORA_I32, 1, T, &r->sequences);
    make(r, &random, QLORA_I32, 1, 4, &r->state);
    r->linear.positions = &r->positions;
    r->linear.sequences = &r->sequences;
    r->linear.state = &r->state;
    r->linear.operand = operand ? &r->operand : NULL;
}

static void rig_free(linear_rig* r) {
    qlora_tensor* all[] = {&r->x,       &r->y,         &r->g,         &r->dy,   &r->dx,
                           &r->operand, &r->positions, &r->sequences, &r->state};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        qlora_tensor_destroy(r->ctx, all[i]);
    }
    for (int i = 0; i < PARTS; i++) {
        qlora_tensor* own[] = {&r->weight[i], &r->bias[i], &r->a[i], &r->b[i],
                               &r->sb[i],     &r->da[i],   &r->db[i]};
        for (size_t k = 0; k < sizeof own / sizeof own[0]; k++) {
            qlora_tensor_destroy(r->ctx, own[k]);
        }
        qlora_nf4_destroy(r->ctx, &r->nf4[i]);
    }
    qlora_ctx_destroy(r->ctx);
}

static double loss(linear_rig* r) {
    for (int i = 0; i < PARTS; i++) {
        for (int64_t k = 0; k < OUT[i] * RANK[i]; k++) {
            ((double*)r->sb[i].data)[k] =
                (double)r->linear.parts[i].scale * ((double*)r->b[i].data)[k];
        }
    }
    r->ok = r->ok &&
            (r->linear.operand == NULL ||
             qlora_linear_place(r->ctx, &r->linear, QLORA_LINEAR_WEIGHTS | QLORA_LINEAR_ADAPTERS) ==
                 QLORA_OK) &&
            qlora_linear_forward(r->ctx, &r->linear, &r->x, &r->y) == QLORA_OK;
    double sum = 0.0;
    for (int64_t i = 0; i < r->y.rows * r->y.cols; i++) {
        sum += ((double*)r->y.data)[i] * ((double*)r->g.data)[i];
    }
    return sum;
}

// Every element of a matrix of rows x cols: central differences against the gradient.
static bool agrees(linear_rig* r, const qlora_tensor* input, int64_t cols,
                   const qlora_tensor* gradient, const char* name) {
    const double h = 1e-4;
    for (int64_t i = 0; i < input->rows; i++) {
        for (int64_t j = 0; j < cols; j++) {
            double* p = at(input, i, j);
            double before = *p;
            *p = before + h;
            double up = loss(r);
            *p = before - h;
            double down = loss(r);
            *p = before;
            double expected = (up - down) / (2.0 * h);
            double got = *at(gradient, i, j);
            if (!(fabs(expected - got) <= 1e-7 + 1e-6 * fabs(expected))) {
                fprintf(stderr, "%s[%d,%d]: %.9g by differences, %.9g by backward\n", name, (int)i,
                        (int)j, expected, got);
                return false;
            }
        }
    }
    return true;
}

static bool check(bool operand, float dropout) {
    linear_rig r;
    rig_make(&r, operand, dropout);
    bool ok = r.ok;
    if (ok) {
        loss(&r);
        for (int64_t i = 0; i < T; i++) {
            memcpy(at(&r.dy, i, 0), at(&r.g, i, 0), (size_t)r.g.cols * sizeof(double));
        }
        ok = r.ok && qlora_linear_backward(r.ctx, &r.linear, &r.x, &r.dy, &r.dx,
                                           QLORA_LINEAR_OVERWRITE) == QLORA_OK;
    }
    if (!ok) {
        fprintf(stderr, "%s\n", qlora_last_error(r.ctx));
    }
    ok = ok && agrees(&r, &r.x, IN, &r.dx, "dx");
    for (int i = 0; ok && i < PARTS; i++) {
        ok =
            agrees(&r, &r.a[i], IN, &r.da[i], "dA") && agrees(&r, &r.b[i], RANK[i], &r.db[i], "dB");
    }
    ok = ok && r.ok;
    rig_free(&r);
    return ok;
}

TEST linear_backward_by_differences(void) {
    ASSERT(check(false, 0.0f));
    ASSERT(check(true, 0.0f));
    PASS();
}

TEST linear_dropout_by_differences(void) {
    ASSERT(check(false, 0.4f));
    ASSERT(check(true, 0.4f));
    PASS();
}

SUITE(linear_double_suite) {
    RUN_TEST(linear_backward_by_differences);
    RUN_TEST(linear_dropout_by_differences);
}
