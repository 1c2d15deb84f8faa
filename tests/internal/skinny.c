// skinny.c - the gradients of adapters in one launch, compared with sums in double precision.

#include "machines.h"

SUITE_EXTERN(skinny_suite);

enum { SKINNY_ROWS = 530, SKINNY_COLS = 200, SKINNY_ROOM = 8 };

typedef struct skinny_part {
    int64_t cols;
    int64_t rank;
    bool transposed;
    int norm; // W is the input of a norm with weights: 1 in f32, 2 in bf16; 0: it is not
} skinny_part;

static const struct {
    int64_t rows;
    bool add;
    int count;
    skinny_part parts[QLORA__SKINNY_PRODUCTS];
} skinny_cases[] = {
    {70, true, 4, {{136, 48, false, 1}, {64, 16, true, 0}, {8, 8, true, 0}, {200, 24, true, 0}}},
    {530, true, 2, {{72, 16, false, 0}, {64, 16, true, 0}}},
    {64, false, 1, {{128, 64, false, 2}}},
    {1, false, 3, {{8, 8, false, 1}, {16, 40, true, 0}, {24, 56, true, 0}}},
    {257, true, 1, {{192, 32, true, 0}}}};

typedef struct skinny_data {
    qlora_tensor s;
    qlora_tensor w;
    qlora_tensor d;
    qlora_tensor rstd;
    qlora_tensor norm;
    float want[SKINNY_COLS * 64];
} skinny_data;

// Values that bf16 has.
static void skinny_fill(float* x, int64_t n, double size, test_random* random) {
    for (int64_t i = 0; i < n; i++) {
        x[i] = qlora__bf16_to(qlora__bf16_from((float)(size * test_random_normal(random))));
    }
}

// Makes the tensors of a product, and what is expected.
static bool skinny_make(qlora_ctx* ctx, int64_t rows, bool add, const skinny_part* p, float scale,
                        test_random* random, skinny_data* d) {
    static float s[SKINNY_ROWS * (64 + SKINNY_ROOM)];
    static float w[SKINNY_ROWS * (SKINNY_COLS + SKINNY_ROOM)];
    float rstd[SKINNY_ROWS];
    float norm[SKINNY_COLS];
    int64_t lds = p->rank + SKINNY_ROOM;
    int64_t ldw = p->cols + SKINNY_ROOM;
    skinny_fill(s, rows * lds, 1.0, random);
    skinny_fill(w, rows * ldw, 1.0, random);
    skinny_fill(norm, p->cols, 1.0, random);
    skinny_fill(d->want, p->rank * p->cols, 10.0, random);
    for (int64_t i = 0; i < rows; i++) {
        rstd[i] = 0.1f + (float)fabs(test_random_normal(random));
    }
    bool ok = test_tensor(ctx, QLORA_BF16, rows, lds, s, &d->s) == QLORA_OK &&
              test_tensor(ctx, QLORA_BF16, rows, ldw, w, &d->w) == QLORA_OK &&
              test_tensor(ctx, QLORA_F32, 1, rows, rstd, &d->rstd) == QLORA_OK &&
              test_tensor(ctx, p->norm == 2 ? QLORA_BF16 : QLORA_F32, 1, p->cols, norm, &d->norm) ==
                  QLORA_OK &&
              test_tensor(ctx, QLORA_F32, p->transposed ? p->cols : p->rank,
                          p->transposed ? p->rank : p->cols, d->want, &d->d) == QLORA_OK;
    for (int64_t c = 0; c < p->cols; c++) {
        for (int64_t r = 0; r < p->rank; r++) {
            float* want = &d->want[p->transposed ? c * p->rank + r : r * p->cols + c];
            double sum = 0.0;
            for (int64_t i = 0; i < rows; i++) {
                float v = s[i * lds + SKINNY_ROOM + r];
                v = p->norm != 0 ? qlora__bf16_to(qlora__bf16_from(v * rstd[i])) : v;
                sum += (double)v * (double)w[i * ldw + c];
            }
            sum *= p->norm != 0 ? (double)norm[c] : 1.0;
            *want = (float)((add ? (double)*want : 0.0) + (double)scale * sum);
        }
    }
    return ok;
}

static int64_t skinny_numbers(const qlora__skinny* k) {
    int64_t numbers = 0;
    for (int32_t i = 0; i < k->count; i++) {
        numbers += (int64_t)k->products[i].rank * k->products[i].cols;
    }
    return numbers;
}

static qlora_result skinny_run(qlora_ctx* ctx, qlora__skinny* k) {
    qlora_tensor parts;
    int64_t room = qlora__skinny_splits(k->rows, qlora__skinny_strips(k)) * skinny_numbers(k);
    qlora_result r = qlora_tensor_create(ctx, QLORA_F32, 1, room, &parts);
    if (r != QLORA_OK) {
        return r;
    }
    QLORA__ENTER(ctx, "skinny");
    r = qlora__leave(ctx, qlora__skinny_launch(ctx, k, parts.data));
    qlora_tensor_destroy(ctx, &parts);
    return r;
}

static void skinny_free(qlora_ctx* ctx, skinny_data* d) {
    qlora_tensor_destroy(ctx, &d->s);
    qlora_tensor_destroy(ctx, &d->w);
    qlora_tensor_destroy(ctx, &d->d);
    qlora_tensor_destroy(ctx, &d->rstd);
    qlora_tensor_destroy(ctx, &d->norm);
}

TEST skinny_sums_are_right(const test_machine* machine) {
    static skinny_data sets[QLORA__SKINNY_PRODUCTS];
    static float got[SKINNY_COLS * 64];
    test_random random = test_random_start("skinny");
    qlora_ctx* ctx = test_open(machine, NULL);
    if (ctx == NULL) {
        SKIPm(test_open_reason());
    }
    for (size_t n = 0; n < sizeof skinny_cases / sizeof skinny_cases[0]; n++) {
        int64_t rows = skinny_cases[n].rows;
        qlora__skinny k;
        memset(&k, 0, sizeof k);
        k.add = skinny_cases[n].add;
        for (int i = 0; i < skinny_cases[n].count; i++) {
            const skinny_part* p = &skinny_cases[n].parts[i];
            float scale = 1.0f / (float)(1 + i);
            ASSERT(skinny_make(ctx, rows, k.add != 0, p, scale, &random, &sets[i]));
            qlora_tensor s = qlora__window(&sets[i].s, rows, SKINNY_ROOM, p->rank);
            qlora_tensor w = qlora__window(&sets[i].w, rows, 0, p->cols);
            ASSERT(qlora__skinny_add(&k, &s, &w, &sets[i].d, p->transposed, scale));
            if (p->norm != 0) {
                qlora__skinny_norm(&k, &sets[i].rstd, &sets[i].norm);
            }
        }
        ASSERT_EQ(QLORA_OK, skinny_run(ctx, &k));
        for (int i = 0; i < skinny_cases[n].count; i++) {
            const skinny_part* p = &skinny_cases[n].parts[i];
            ASSERT(test_read(ctx, &sets[i].d, got));
            ASSERT_CLOSE(sets[i].want, got, (size_t)(p->rank * p->cols), 2e-4, 1e-5);
            skinny_free(ctx, &sets[i]);
        }
    }
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// What the kernel does not take.
TEST skinny_refuses(void) {
    static const struct {
        int64_t rank;
        int64_t cols;
        int64_t ld; // of S
        int64_t rows;
        qlora_dtype dtype;
        bool taken;
    } cases[] = {{16, 64, 16, 8, QLORA_BF16, true},      {64, 8, 72, 8, QLORA_BF16, true},
                 {72, 64, 72, 8, QLORA_BF16, false},     {12, 64, 16, 8, QLORA_BF16, false},
                 {16, 60, 16, 8, QLORA_BF16, false},     {16, 64, 20, 8, QLORA_BF16, false},
                 {16, 64, 16, 8, QLORA_F32, false},      {16, 4096, 16, 8192, QLORA_BF16, true},
                 {16, 4096, 16, 8193, QLORA_BF16, false}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        qlora__skinny k;
        qlora_tensor s;
        qlora_tensor w;
        qlora_tensor d;
        memset(&k, 0, sizeof k);
        memset(&s, 0, sizeof s);
        s.dtype = cases[i].dtype;
        s.rows = cases[i].rows;
        s.cols = cases[i].rank;
        s.ld = cases[i].ld;
        w = s;
        w.cols = cases[i].cols;
        w.ld = 4096;
        d = s;
        d.dtype = QLORA_F32;
        ASSERT_EQ(cases[i].taken, qlora__skinny_add(&k, &s, &w, &d, false, 1.0f));
        ASSERT_EQ(cases[i].taken ? 1 : 0, k.count);
    }
    PASS();
}

SUITE(skinny_suite) {
    RUN_ON(TEST_ONE_GPU, skinny_sums_are_right);
    RUN_TEST(skinny_refuses);
}
