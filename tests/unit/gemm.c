// gemm.c - every product on every path against float64.
#define _POSIX_C_SOURCE 200809L // setenv

#include "machines.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

typedef struct gemm_case {
    int64_t M;
    int64_t N;
    int64_t K;
    bool ta;
    bool tb;
    qlora_dtype a;
    qlora_dtype b;
    qlora_dtype c;
    float beta;
    int64_t pad; // extra columns in every matrix, filled with NaN
} gemm_case;

// A buffer of rows x (cols + pad), the padding filled with NaN that must not leak.
typedef struct padded {
    float* values; // rows x cols, rounded to the dtype
    qlora_tensor whole;
    qlora_tensor view;
    int64_t pad;
} padded;

static float rounded(float x, qlora_dtype dtype) {
    if (dtype == QLORA_BF16) {
        uint32_t u;
        memcpy(&u, &x, 4);
        u = (u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u;
        memcpy(&x, &u, 4);
    } else if (dtype == QLORA_F16) {
        int e = 0;
        frexpf(x, &e);
        float step = ldexpf(1.0f, (e - 1 < -14 ? -14 : e - 1) - 10);
        x = nearbyintf(x / step) * step;
    }
    return x;
}

static bool padded_make(qlora_ctx* ctx, test_random* random, qlora_dtype dtype, int64_t rows,
                        int64_t cols, int64_t pad, float scale, padded* p) {
    int64_t ld = cols + pad;
    float* image = (float*)malloc((size_t)(rows * ld + 1) * 4);
    p->pad = pad;
    p->values = (float*)malloc((size_t)(rows * cols + 1) * 4);
    for (int64_t i = 0; i < rows; i++) {
        for (int64_t j = 0; j < ld; j++) {
            float x = rounded((float)test_random_normal(random) * scale, dtype);
            image[i * ld + j] = j < cols ? x : NAN;
            if (j < cols) {
                p->values[i * cols + j] = x;
            }
        }
    }
    bool ok = test_tensor(ctx, dtype, rows, ld, image, &p->whole) == QLORA_OK &&
              qlora_tensor_view(ctx, &p->whole, 0, rows, 0, cols, &p->view) == QLORA_OK;
    free(image);
    return ok;
}

// Reads the matrix back; returns false if anything outside the columns was written.
static bool padded_read(qlora_ctx* ctx, const padded* p, float* out) {
    int64_t ld = p->whole.cols;
    float* image = (float*)malloc((size_t)(p->whole.rows * ld + 1) * 4);
    bool ok = test_read(ctx, &p->whole, image);
    for (int64_t i = 0; ok && i < p->whole.rows; i++) {
        for (int64_t j = 0; j < ld; j++) {
            if (j < p->view.cols) {
                out[i * p->view.cols + j] = image[i * ld + j];
            } else if (image[i * ld + j] == image[i * ld + j]) {
                fprintf(stderr, "the padding of row %lld was overwritten\n", (long long)i);
                ok = false;
            }
        }
    }
    free(image);
    return ok;
}

static void padded_free(qlora_ctx* ctx, padded* p) {
    qlora_tensor_destroy(ctx, &p->whole);
    free(p->values);
}

static void reference(const gemm_case* c, float alpha, const float* a, const float* b,
                      const float* before, float* out) {
    for (int64_t i = 0; i < c->M; i++) {
        for (int64_t j = 0; j < c->N; j++) {
            double sum = 0.0;
            for (int64_t k = 0; k < c->K; k++) {
                double x = (double)a[c->ta ? k * c->M + i : i * c->K + k];
                double y = (double)b[c->tb ? j * c->K + k : k * c->N + j];
                sum += x * y;
            }
            out[i * c->N + j] =
                (float)((double)alpha * sum +
                        (c->beta != 0.0f ? (double)c->beta * (double)before[i * c->N + j] : 0.0));
        }
    }
}

// Allowed error: fp32 1e-6 sqrt(K/64) in the relative 2-norm; a cast operand or a bf16 result adds
// one rounding of its type.
static double limit_of(const gemm_case* c) {
    double limit = 1e-6 * sqrt((double)(c->K > 64 ? c->K : 64) / 64.0);
    if (c->c == QLORA_BF16 || (c->a != c->b && (c->a == QLORA_BF16 || c->b == QLORA_BF16))) {
        limit += 4e-3;
    } else if (c->a != c->b) {
        limit += 5e-4;
    }
    return limit;
}

static const char* run_case(qlora_ctx* ctx, test_random* random, const gemm_case* c,
                            qlora_path path, float scale, float alpha) {
    padded a;
    padded b;
    padded out;
    memset(&a, 0, sizeof a);
    memset(&b, 0, sizeof b);
    memset(&out, 0, sizeof out);
    const char* wrong = NULL;
    if (!padded_make(ctx, random, c->a, c->ta ? c->K : c->M, c->ta ? c->M : c->K, c->pad, scale,
                     &a) ||
        !padded_make(ctx, random, c->b, c->tb ? c->N : c->K, c->tb ? c->K : c->N, c->pad, 0.02f,
                     &b) ||
        !padded_make(ctx, random, c->c, c->M, c->N, c->pad, 1.0f, &out)) {
        return "tensors";
    }
    if (c->beta == 0.0f && c->M * c->N > 0) { // overwriting must not read the old contents
        float* poison = (float*)malloc((size_t)(c->M * (c->N + c->pad)) * 4);
        for (int64_t i = 0; i < c->M * (c->N + c->pad); i++) {
            poison[i] = NAN;
        }
        qlora_tensor_destroy(ctx, &out.whole);
        test_tensor(ctx, c->c, c->M, c->N + c->pad, poison, &out.whole);
        qlora_tensor_view(ctx, &out.whole, 0, c->M, 0, c->N, &out.view);
        free(poison);
    }
    qlora_gemm_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.trans_a = c->ta;
    desc.trans_b = c->tb;
    desc.alpha = alpha;
    desc.beta = c->beta;
    desc.path = path;
    if (qlora_gemm(ctx, &desc, &a.view, &b.view, &out.view) != QLORA_OK) {
        fprintf(stderr, "%s\n", qlora_last_error(ctx));
        wrong = "qlora_gemm failed";
    }
    size_t n = (size_t)(c->M * c->N);
    float* expected = (float*)malloc(n * 4 + 4);
    float* got = (float*)malloc(n * 4 + 4);
    reference(c, alpha, a.values, b.values, out.values, expected);
    if (wrong == NULL && !padded_read(ctx, &out, got)) {
        wrong = "cannot read the result back";
    }
    if (wrong == NULL && n > 0) {
        bool zero = c->K == 0 && c->beta == 0.0f;
        if (zero ? !test_close(expected, got, n, 0.0, 0.0)
                 : !test_rel_l2(expected, got, n, limit_of(c))) {
            wrong = "wrong numbers";
        }
    }
    free(expected);
    free(got);
    padded_free(ctx, &a);
    padded_free(ctx, &b);
    padded_free(ctx, &out);
    return wrong;
}

static void describe_case(const gemm_case* c, qlora_path path, const char* wrong) {
    fprintf(stderr, "%s: %lldx%lldx%lld %c%c %s %s -> %s beta %g pad %lld on %s\n", wrong,
            (long long)c->M, (long long)c->N, (long long)c->K, c->ta ? 't' : 'n', c->tb ? 't' : 'n',
            qlora_dtype_name(c->a), qlora_dtype_name(c->b), qlora_dtype_name(c->c), (double)c->beta,
            (long long)c->pad, qlora_path_name(path));
}

static size_t paths_of(const test_machine* machine, qlora_path out[2]) {
    if (strcmp(machine->backend, "cpu") == 0) {
        out[0] = QLORA_PATH_CPU;
        return 1;
    }
    out[0] = QLORA_PATH_PTX;
    out[1] = QLORA_PATH_CUBLAS;
    return machine->cublas ? 2 : 1;
}

static const qlora_dtype TYPES[][3] = {
    {QLORA_F32, QLORA_F32, QLORA_F32},   {QLORA_BF16, QLORA_BF16, QLORA_BF16},
    {QLORA_BF16, QLORA_BF16, QLORA_F32}, {QLORA_F16, QLORA_F16, QLORA_F32},
    {QLORA_F32, QLORA_BF16, QLORA_F32},  {QLORA_F32, QLORA_F16, QLORA_F32},
    {QLORA_BF16, QLORA_F32, QLORA_F32},
};

TEST gemm_every_form(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx)
        SKIPm(test_open_reason());
    static const int64_t sizes[][3] = {
        {1, 1, 1},   {0, 5, 3},     {5, 0, 3},     {4, 3, 0},    {1, 17, 33},    {19, 1, 40},
        {37, 29, 1}, {65, 16, 130}, {16, 70, 129}, {64, 40, 24}, {130, 136, 40},
    };
    test_random random = test_random_start("gemm_every_form");
    qlora_path paths[2];
    size_t path_count = paths_of(machine, paths);
    for (size_t p = 0; p < path_count; p++) {
        for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
            for (size_t t = 0; t < sizeof TYPES / sizeof TYPES[0]; t++) {
                for (int form = 0; form < 4; form++) {
                    // Every size is combined with every form; types, beta and padding alternate.
                    gemm_case c = {sizes[s][0],
                                   sizes[s][1],
                                   sizes[s][2],
                                   (form & 1) != 0,
                                   (form & 2) != 0,
                                   TYPES[t][0],
                                   TYPES[t][1],
                                   TYPES[t][2],
                                   (s + t + (size_t)form) % 2 ? 1.0f : 0.0f,
                                   (int64_t)((s + t) % 3) * 8};
                    if ((s + t * 3 + (size_t)form) % 3 != 0 && t != 0) {
                        continue;
                    }
                    const char* wrong = run_case(ctx, &random, &c, paths[p], 1.0f, 1.0f);
                    if (wrong != NULL) {
                        describe_case(&c, paths[p], wrong);
                        FAILm(wrong);
                    }
                }
            }
        }
    }
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// In an earlier system, f16 gradients overflowed to NaN at 2.56e5. Here f16 operands are scaled, so
// f16 must hold as well.
TEST gemm_large_gradients(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx)
        SKIPm(test_open_reason());
    test_random random = test_random_start("gemm_large_gradients");
    qlora_path paths[2];
    size_t path_count = paths_of(machine, paths);
    static const float scales[] = {2.56e5f, 1e-30f, 1e15f};
    for (size_t p = 0; p < path_count; p++) {
        for (size_t t = 0; t < sizeof TYPES / sizeof TYPES[0]; t++) {
            for (size_t s = 0; s < 3; s++) {
                if (TYPES[t][0] == QLORA_F16) {
                    continue; // f16 itself cannot hold them
                }
                gemm_case c = {24,          40,          136,         false, true,
                               TYPES[t][0], TYPES[t][1], TYPES[t][2], 0.0f,  0};
                const char* wrong = run_case(ctx, &random, &c, paths[p], scales[s], 1.0f);
                if (wrong != NULL) {
                    describe_case(&c, paths[p], wrong);
                    FAILm(wrong);
                }
            }
        }
    }
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

TEST gemm_named_products(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx)
        SKIPm(test_open_reason());
    // C = A B with A 2x3, B 3x2, computed by hand.
    const float a_values[] = {1, 2, 3, 4, 5, 6};
    const float b_values[] = {1, 0, 2, 1, 0, 3};
    const float dc_values[] = {1, 2, 3, 4};
    const float c_expected[] = {5, 11, 14, 23};
    const float da_expected[] = {1, 4, 6, 3, 10, 12};
    const float db_expected[] = {13, 18, 17, 24, 21, 30};
    float got[6];
    qlora_tensor a, b, c, dc, da, db;
    ASSERT_EQ(QLORA_OK, test_tensor(ctx, QLORA_F32, 2, 3, a_values, &a));
    ASSERT_EQ(QLORA_OK, test_tensor(ctx, QLORA_F32, 3, 2, b_values, &b));
    ASSERT_EQ(QLORA_OK, test_tensor(ctx, QLORA_F32, 2, 2, dc_values, &dc));
    ASSERT_EQ(QLORA_OK, test_tensor(ctx, QLORA_F32, 2, 2, NULL, &c));
    ASSERT_EQ(QLORA_OK, test_tensor(ctx, QLORA_F32, 2, 3, NULL, &da));
    ASSERT_EQ(QLORA_OK, test_tensor(ctx, QLORA_F32, 3, 2, NULL, &db));
    bool gpu = qlora_ctx_backend(ctx) == QLORA_BACKEND_CUDA;
    for (int pass = 0; pass < 2; pass++) {
        uint32_t path = gpu && pass == 1 ? QLORA_PRODUCT_PTX : 0;
        float twice[6];
        ASSERT_EQ(QLORA_OK, qlora_gemm_forward(ctx, &a, &b, &c, path));
        ASSERT(test_read(ctx, &c, got));
        ASSERT_CLOSE(c_expected, got, 4, 0, 0);
        ASSERT_EQ(QLORA_OK, qlora_gemm_backward_a(ctx, &dc, &b, &da, path));
        ASSERT(test_read(ctx, &da, got));
        ASSERT_CLOSE(da_expected, got, 6, 0, 0);
        ASSERT_EQ(QLORA_OK, qlora_gemm_backward_b(ctx, &a, &dc, &db, path));
        ASSERT_EQ(QLORA_OK,
                  qlora_gemm_backward_b(ctx, &a, &dc, &db, path | QLORA_PRODUCT_ACCUMULATE));
        ASSERT(test_read(ctx, &db, got));
        for (int i = 0; i < 6; i++) {
            twice[i] = 2.0f * db_expected[i];
        }
        ASSERT_CLOSE(twice, got, 6, 0, 0);
        qlora_path expected = !gpu                           ? QLORA_PATH_CPU
                              : pass == 0 && machine->cublas ? QLORA_PATH_CUBLAS
                                                             : QLORA_PATH_PTX;
        ASSERT_EQ(expected, test_last_path(ctx));
    }
    qlora_tensor* all[] = {&a, &b, &c, &dc, &da, &db};
    for (int i = 0; i < 6; i++) {
        ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, all[i]));
    }
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

static void little_scratch(qlora_ctx_desc* desc) {
    desc->scratch_bytes = 28160;
}

// An f32 operand whose copy does not fit into the scratch buffer is cast in slices: the result is
// the same, in all three products and with either 16-bit type.
TEST gemm_mixed_in_slices(const test_machine* machine) {
    enum { M = 200, K = 72, N = 84 };
    static float values[3][M * N + M * K];
    static float got[2][M * N + M * K];
    qlora_ctx* ctx[2] = {NULL, NULL};
    test_random random = test_random_start("gemm_mixed_in_slices");
    for (int i = 0; i < 3; i++) {
        test_random_fill(&random, values[i], M * N, 1.0f);
    }
    for (int half = 0; half < 2; half++) {
        qlora_dtype type = half == 0 ? QLORA_BF16 : QLORA_F16;
        for (int kind = 0; kind < 3; kind++) {
            // forward: x W; backward_a: dy W^T; backward_b with f32 activations: x^T dy
            const int64_t rows[3] = {M, kind == 1 ? K : kind == 2 ? M : K, kind == 2 ? K : M};
            const int64_t cols[3] = {kind == 1 ? N : K, N, kind == 1 ? K : N};
            size_t count = (size_t)(rows[2] * cols[2]);
            for (int scratch = 0; scratch < 2; scratch++) {
                ctx[scratch] = test_open(machine, scratch == 1 ? little_scratch : NULL);
                if (!ctx[scratch])
                    SKIPm(test_open_reason());
                qlora_tensor t[3];
                ASSERT_EQ(QLORA_OK,
                          test_tensor(ctx[scratch], QLORA_F32, rows[0], cols[0], values[0], &t[0]));
                ASSERT_EQ(QLORA_OK,
                          test_tensor(ctx[scratch], type, rows[1], cols[1], values[1], &t[1]));
                ASSERT_EQ(QLORA_OK,
                          test_tensor(ctx[scratch], QLORA_F32, rows[2], cols[2], values[2], &t[2]));
                qlora_result r = kind == 0 ? qlora_gemm_forward(ctx[scratch], &t[0], &t[1], &t[2],
                                                                QLORA_PRODUCT_ACCUMULATE)
                                 : kind == 1
                                     ? qlora_gemm_backward_a(ctx[scratch], &t[0], &t[1], &t[2], 0)
                                     : qlora_gemm_backward_b(ctx[scratch], &t[0], &t[1], &t[2], 0);
                ASSERT_EQm(qlora_last_error(ctx[scratch]), QLORA_OK, r);
                ASSERT(test_read(ctx[scratch], &t[2], got[scratch]));
                for (int i = 0; i < 3; i++) {
                    ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx[scratch], &t[i]));
                }
                ASSERT(test_close_ctx(machine, ctx[scratch]));
            }
            ASSERT_CLOSE(got[0], got[1], count, 1e-4f, 1e-4f);
        }
    }
    PASS();
}

// Heads next to each other in one row, as in attention, and one matrix shared by a whole batch.
TEST gemm_batched(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx)
        SKIPm(test_open_reason());
    enum { T = 21, H = 3, D = 8 };
    test_random random = test_random_start("gemm_batched");
    float q[T * H * D];
    float k[T * D];
    float expected[H * T * T];
    float got[H * T * T];
    test_random_fill(&random, q, T * H * D, 1.0f);
    test_random_fill(&random, k, T * D, 1.0f);
    for (int h = 0; h < H; h++) {
        for (int i = 0; i < T; i++) {
            for (int j = 0; j < T; j++) {
                double sum = 0.0;
                for (int d = 0; d < D; d++) {
                    sum += (double)q[(i * H + h) * D + d] * (double)k[j * D + d];
                }
                expected[(h * T + i) * T + j] = (float)(0.5 * sum);
            }
        }
    }
    qlora_tensor tq, tk, scores;
    ASSERT_EQ(QLORA_OK, test_tensor(ctx, QLORA_F32, T, H * D, q, &tq));
    ASSERT_EQ(QLORA_OK, test_tensor(ctx, QLORA_F32, T, D, k, &tk));
    ASSERT_EQ(QLORA_OK, qlora_tensor_create_batched(ctx, QLORA_F32, H, T, T, &scores));
    qlora_tensor heads = tq;
    heads.cols = D;
    heads.batch = H;
    heads.batch_stride = D;
    qlora_path paths[2];
    size_t path_count = paths_of(machine, paths);
    for (size_t p = 0; p < path_count; p++) {
        qlora_gemm_desc desc = {false, true, 0.5f, 0.0f, paths[p]};
        ASSERT_EQ(QLORA_OK, qlora_gemm(ctx, &desc, &heads, &tk, &scores));
        ASSERT(test_read(ctx, &scores, got));
        ASSERT_REL_L2(expected, got, H * T * T, 1e-6);
    }
    ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, &tq));
    ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, &tk));
    ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, &scores));
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

#define REFUSED(RESULT, NEEDLE, CALL)                                                              \
    do {                                                                                           \
        ASSERT_EQ_FMT((int)(RESULT), (int)(CALL), "%d");                                           \
        if (strstr(qlora_last_error(ctx), (NEEDLE)) == NULL) {                                     \
            fprintf(stderr, "message: %s\n", qlora_last_error(ctx));                               \
            FAILm("the message lacks: " NEEDLE);                                                   \
        }                                                                                          \
    } while (0)

TEST gemm_bad_input(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx)
        SKIPm(test_open_reason());
    qlora_ctx_desc other_desc;
    memset(&other_desc, 0, sizeof other_desc);
    other_desc.require_backend = QLORA_BACKEND_CPU;
    qlora_ctx* other = NULL;
    ASSERT_EQ(QLORA_OK, qlora_ctx_create(&other_desc, &other));
    qlora_tensor a, b, c, foreign, ids, half;
    ASSERT_EQ(QLORA_OK, test_tensor(ctx, QLORA_F32, 4, 4, NULL, &a));
    ASSERT_EQ(QLORA_OK, test_tensor(ctx, QLORA_F32, 4, 4, NULL, &b));
    ASSERT_EQ(QLORA_OK, test_tensor(ctx, QLORA_F32, 4, 4, NULL, &c));
    ASSERT_EQ(QLORA_OK, test_tensor(ctx, QLORA_F16, 4, 4, NULL, &half));
    ASSERT_EQ(QLORA_OK, test_tensor(other, QLORA_F32, 4, 4, NULL, &foreign));
    ASSERT_EQ(QLORA_OK, qlora_tensor_create(ctx, QLORA_I32, 4, 4, &ids));
    qlora_tensor small = a;
    small.bytes = 60;
    qlora_tensor negative = a;
    negative.rows = -4;
    qlora_tensor huge = a;
    huge.rows = INT64_MAX / 2;
    huge.ld = INT64_MAX / 2;
    qlora_tensor wide = a;
    wide.cols = 5;
    qlora_tensor rows5 = a;
    rows5.rows = 3;
    qlora_tensor none = a;
    none.data = NULL;
    qlora_result argument = QLORA_ERR_ARGUMENT;
    REFUSED(argument, "A is NULL", qlora_gemm_forward(ctx, NULL, &b, &c, 0));
    REFUSED(argument, "C is NULL", qlora_gemm_forward(ctx, &a, &b, NULL, 0));
    REFUSED(argument, "another context", qlora_gemm_forward(ctx, &a, &foreign, &c, 0));
    REFUSED(argument, "B.dtype is i32", qlora_gemm_forward(ctx, &a, &ids, &c, 0));
    REFUSED(argument, "A needs 64 bytes; its buffer has 60",
            qlora_gemm_forward(ctx, &small, &b, &c, 0));
    REFUSED(argument, "A.rows is -4", qlora_gemm_forward(ctx, &negative, &b, &c, 0));
    REFUSED(argument, "A.ld is 4; it must be at least cols (5)",
            qlora_gemm_forward(ctx, &wide, &b, &c, 0));
    REFUSED(argument, "A is 3 x 4; expected 4 x any", qlora_gemm_forward(ctx, &rows5, &b, &c, 0));
    REFUSED(argument, "has 0", qlora_gemm_forward(ctx, &none, &b, &c, 0));
    REFUSED(argument, "overlaps A", qlora_gemm_forward(ctx, &a, &b, &a, 0));
    REFUSED(argument, "overlaps B", qlora_gemm_forward(ctx, &a, &b, &b, 0));
    REFUSED(argument, "PRODUCT_PTX and QLORA_PRODUCT_CUBLAS exclude",
            qlora_gemm_forward(ctx, &a, &b, &c, QLORA_PRODUCT_PTX | QLORA_PRODUCT_CUBLAS));
    REFUSED(argument, "PRODUCT_FUSED is for NF4",
            qlora_gemm_forward(ctx, &a, &b, &c, QLORA_PRODUCT_FUSED));
    REFUSED(argument, "1048576", qlora_gemm_forward(ctx, &a, &b, &c, 1u << 20));
    REFUSED(argument, "desc is NULL", qlora_gemm(ctx, NULL, &a, &b, &c));
    REFUSED(QLORA_ERR_LIMIT, "overflow", qlora_gemm_forward(ctx, &huge, &b, &c, 0));
    REFUSED(QLORA_ERR_UNSUPPORTED, "into f16", qlora_gemm_forward(ctx, &a, &b, &half, 0));
    ASSERT_EQ(argument, qlora_gemm_forward(NULL, &a, &b, &c, 0));
    if (strcmp(machine->backend, "cpu") == 0) {
        REFUSED(QLORA_ERR_UNSUPPORTED, "PTX",
                qlora_gemm_forward(ctx, &a, &b, &c, QLORA_PRODUCT_PTX));
    } else if (!machine->cublas) {
        REFUSED(QLORA_ERR_UNSUPPORTED, "cuBLAS",
                qlora_gemm_forward(ctx, &a, &b, &c, QLORA_PRODUCT_CUBLAS));
    }
    // Views of one buffer with the same ld and disjoint columns are fine.
    qlora_tensor left, right, product;
    ASSERT_EQ(QLORA_OK, qlora_tensor_zero(ctx, &a));
    ASSERT_EQ(QLORA_OK, qlora_tensor_zero(ctx, &b));
    ASSERT_EQ(QLORA_OK, qlora_tensor_view(ctx, &a, 0, 4, 0, 2, &left));
    ASSERT_EQ(QLORA_OK, qlora_tensor_view(ctx, &a, 0, 4, 2, 2, &right));
    ASSERT_EQ(QLORA_OK, qlora_tensor_view(ctx, &b, 0, 2, 0, 2, &product));
    ASSERT_EQ(QLORA_OK, qlora_gemm_forward(ctx, &left, &product, &right, 0));
    ASSERT_STR_EQ("", qlora_last_error(ctx));
    qlora_tensor* all[] = {&a, &b, &c, &half, &ids};
    for (int i = 0; i < 5; i++) {
        ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, all[i]));
    }
    ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(other, &foreign));
    ASSERT_EQ(QLORA_OK, qlora_ctx_destroy(other));
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// TF32 is a setting of the context, and never affects the backward pass unless requested. The fake
// cuBLAS rounds like the real one, so the error shows which mode ran.
static void with_tf32(qlora_ctx_desc* desc) {
    desc->math = QLORA_MATH_TF32;
}

static double tf32_error(qlora_ctx* ctx, uint32_t flags, bool backward) {
    enum { N = 48 };
    test_random random = test_random_start("tf32");
    float a[N * N];
    float b[N * N];
    float got[N * N];
    test_random_fill(&random, a, N * N, 1.0f);
    test_random_fill(&random, b, N * N, 1.0f);
    qlora_tensor ta, tb, tc;
    test_tensor(ctx, QLORA_F32, N, N, a, &ta);
    test_tensor(ctx, QLORA_F32, N, N, b, &tb);
    test_tensor(ctx, QLORA_F32, N, N, NULL, &tc);
    qlora_result r = backward ? qlora_gemm_backward_a(ctx, &ta, &tb, &tc, flags)
                              : qlora_gemm_forward(ctx, &ta, &tb, &tc, flags);
    test_read(ctx, &tc, got);
    double difference = 0.0;
    double norm = 0.0;
    for (int i = 0; i < N; i++) {
        for (int j = 0; j < N; j++) {
            double sum = 0.0;
            for (int k = 0; k < N; k++) {
                sum += (double)a[i * N + k] * (double)(backward ? b[j * N + k] : b[k * N + j]);
            }
            difference += (sum - (double)got[i * N + j]) * (sum - (double)got[i * N + j]);
            norm += sum * sum;
        }
    }
    qlora_tensor_destroy(ctx, &ta);
    qlora_tensor_destroy(ctx, &tb);
    qlora_tensor_destroy(ctx, &tc);
    return r == QLORA_OK ? sqrt(difference / norm) : -1.0;
}

TEST gemm_tf32_modes(const test_machine* machine) {
    if (!machine->cublas)
        SKIPm("TF32 needs cuBLAS");
    qlora_ctx* ctx = test_open(machine, with_tf32);
    if (!ctx)
        SKIPm(test_open_reason());
    double forward = tf32_error(ctx, 0, false);
    ASSERT(forward > 1e-5 && forward < 2e-3);
    double backward = tf32_error(ctx, 0, true);
    ASSERT(backward >= 0.0 && backward < 1e-6);
    double ptx = tf32_error(ctx, QLORA_PRODUCT_PTX, false); // our kernels have no TF32
    ASSERT(ptx >= 0.0 && ptx < 1e-6);
    ASSERT_EQ(QLORA_OK, qlora_ctx_set_math(ctx, QLORA_MATH_TF32_ALL));
    ASSERT(tf32_error(ctx, 0, true) > 1e-5);
    ASSERT(tf32_error(ctx, 0, false) > 1e-5);
    ASSERT_EQ(QLORA_OK, qlora_ctx_set_math(ctx, QLORA_MATH_F32));
    double plain = tf32_error(ctx, 0, false);
    ASSERT(plain >= 0.0 && plain < 1e-6);
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// 96 products of one tile each are a case for the kernels with the biggest tiles; rows of 41 are
// too odd for tensor cores.
TEST gemm_big_tiles(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx)
        SKIPm(test_open_reason());
    enum { BATCH = 96, M = 24, N = 20, K = 41 };
    static float a[BATCH * M * K];
    static float b[N * K];
    static float expected[BATCH * M * N];
    static float got[BATCH * M * N];
    test_random random = test_random_start("gemm_big_tiles");
    for (int i = 0; i < BATCH * M * K; i++) { // small integers: exact in every type
        a[i] = (float)test_random_below(&random, 9) - 4.0f;
        b[i % (N * K)] = (float)(i % 7) - 3.0f;
    }
    for (int i = 0; i < BATCH * M * N; i++) {
        expected[i] = 0.0f;
        for (int k = 0; k < K; k++) {
            expected[i] += a[i / N * K + k] * b[i % N * K + k];
        }
    }
    for (int type = 0; type < 2; type++) {
        qlora_dtype dtype = type == 0 ? QLORA_F32 : QLORA_BF16;
        qlora_path path = strcmp(machine->backend, "cpu") == 0 ? QLORA_PATH_CPU : QLORA_PATH_PTX;
        qlora_gemm_desc desc = {false, true, 1.0f, 0.0f, path};
        qlora_tensor ta, tb, tc;
        ASSERT_EQ(QLORA_OK, test_tensor(ctx, dtype, BATCH * M, K, a, &ta));
        ASSERT_EQ(QLORA_OK, test_tensor(ctx, dtype, N, K, b, &tb));
        ASSERT_EQ(QLORA_OK, qlora_tensor_create_batched(ctx, QLORA_F32, BATCH, M, N, &tc));
        qlora_tensor parts = ta;
        parts.rows = M;
        parts.batch = BATCH;
        parts.batch_stride = M * K;
        ASSERT_EQ(QLORA_OK, qlora_gemm(ctx, &desc, &parts, &tb, &tc));
        ASSERT(test_read(ctx, &tc, got));
        ASSERT_CLOSE(expected, got, BATCH * M * N, 0.0, 0.0);
        if (strcmp(machine->backend, "fake") == 0) {
            const char* kernel = type == 0 ? "qlora_gemm_big_f32" : "qlora_gemm_big_half";
            ASSERT_EQ(1, (int)test_fake()->kernel_runs(kernel));
        }
        ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, &ta));
        ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, &tb));
        ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, &tc));
    }
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

static fake_order warpgroup_order;

// Four multiprocessors, so that small products fill the device.
static void few_multiprocessors(qlora_ctx_desc* desc) {
    (void)desc;
    if (test_fake() != NULL) {
        fake_config config = test_fake()->defaults();
        config.device[0].cc = 90;
        config.device[0].sms = 4;
        config.order = warpgroup_order;
        config.seed = 11;
        test_fake()->reset(&config);
    }
}

// A product that a certain kernel makes.
typedef struct kernel_case {
    const char* kernel; // the end of its name
    gemm_case c;
    float alpha;
} kernel_case;

// Whether the product is right and, on a fake GPU, made by that kernel, in one launch.
static bool kernel_case_holds(qlora_ctx* ctx, test_random* random, bool fake, const char* family,
                              const kernel_case* k) {
    char kernel[64];
    snprintf(kernel, sizeof kernel, "qlora_gemm_%s_%s", family, k->kernel);
    int before = fake ? (int)test_fake()->kernel_runs(kernel) : 0;
    const char* wrong = run_case(ctx, random, &k->c, QLORA_PATH_PTX, 1.0f, k->alpha);
    if (wrong == NULL && fake && (int)test_fake()->kernel_runs(kernel) != before + 1) {
        wrong = "made by another kernel";
    }
    if (wrong != NULL) {
        describe_case(&k->c, QLORA_PATH_PTX, wrong);
    }
    return wrong == NULL;
}

// Products that take each of the kernels with warpgroup instructions on such a device, with edges
// inside a tile and a slice, or a single tile that is mostly outside.
static const kernel_case warpgroup_cases[] = {
    {"nn_256", {250, 496, 136, false, false, QLORA_BF16, QLORA_BF16, QLORA_BF16, 0.0f, 8}, 1.0f},
    {"nt_256", {250, 498, 72, false, true, QLORA_BF16, QLORA_BF16, QLORA_BF16, 1.0f, 8}, 0.5f},
    {"tn_256", {248, 496, 72, true, false, QLORA_BF16, QLORA_BF16, QLORA_F32, 1.0f, 8}, 1.0f},
    {"nn_128", {250, 200, 72, false, false, QLORA_BF16, QLORA_BF16, QLORA_BF16, 1.0f, 0}, 1.0f},
    {"nt_128", {134, 198, 136, false, true, QLORA_BF16, QLORA_BF16, QLORA_BF16, 0.0f, 8}, 3.0f},
    {"nt_128", {134, 200, 136, false, true, QLORA_BF16, QLORA_BF16, QLORA_BF16, 0.0f, 8}, 1.0f},
    {"nn_64", {250, 16, 200, false, false, QLORA_BF16, QLORA_BF16, QLORA_BF16, 0.0f, 8}, 1.0f},
    {"nn_64", {120, 24, 1640, false, false, QLORA_BF16, QLORA_BF16, QLORA_BF16, 1.0f, 8}, 0.5f},
    {"nn_64", {130, 40, 1096, false, false, QLORA_BF16, QLORA_BF16, QLORA_F32, 1.0f, 0}, 1.0f},
    {"nt_64", {250, 50, 72, false, true, QLORA_BF16, QLORA_BF16, QLORA_F32, 1.0f, 0}, 0.25f},
    {"tn_64", {40, 56, 1096, true, false, QLORA_BF16, QLORA_BF16, QLORA_F32, 1.0f, 8}, 1.0f},
    {"tn_64", {248, 16, 200, true, false, QLORA_BF16, QLORA_BF16, QLORA_F32, 1.0f, 0}, 2.0f},
};

// Every kernel with warpgroup instructions, whenever the copies and products happen.
TEST gemm_warpgroups(const test_machine* machine) {
    static const fake_order orders[] = {FAKE_FORWARD, FAKE_REVERSE, FAKE_RANDOM};
    bool fake = strcmp(machine->backend, "fake") == 0;
    if (strcmp(machine->backend, "cpu") == 0) {
        SKIPm("a GPU's kernels");
    }
    test_random random = test_random_start("gemm_warpgroups");
    for (int order = 0; order < (fake ? 3 : 1); order++) {
        warpgroup_order = orders[order];
        qlora_ctx* ctx = test_open(machine, few_multiprocessors);
        if (!ctx)
            SKIPm(test_open_reason());
        for (size_t i = 0; i < sizeof warpgroup_cases / sizeof warpgroup_cases[0]; i++) {
            kernel_case k = warpgroup_cases[i];
            k.c.M *= fake ? 1 : 8; // a real device has more multiprocessors
            k.c.K *= fake ? 1 : 4;
            ASSERT(kernel_case_holds(ctx, &random, fake, "wg", &k));
        }
        // The two with few tiles and a long K.
        ASSERT_EQ_FMT(fake ? 2 : 0, fake ? (int)test_fake()->kernel_runs("qlora_gemm_wg_sum") : 0,
                      "%d");
        ASSERT(test_close_ctx(machine, ctx));
    }
    PASS();
}

// Products for each of the tensor-core kernels of compute capability 8.0, with edges inside a
// block, a slice and a chunk.
static const kernel_case tensor_cases[] = {
    {"nn", {250, 496, 136, false, false, QLORA_BF16, QLORA_BF16, QLORA_BF16, 0.0f, 8}, 1.0f},
    {"nn", {130, 509, 69, false, false, QLORA_BF16, QLORA_BF16, QLORA_F32, 1.0f, 3}, 0.5f},
    {"nt", {250, 498, 72, false, true, QLORA_BF16, QLORA_BF16, QLORA_BF16, 1.0f, 8}, 0.5f},
    {"nt", {255, 128, 35, false, true, QLORA_BF16, QLORA_BF16, QLORA_F32, 1.0f, 5}, 1.0f},
    {"nt", {134, 198, 328, false, true, QLORA_BF16, QLORA_BF16, QLORA_BF16, 0.0f, 8}, 3.0f},
    {"nt", {66, 72, 3, false, true, QLORA_BF16, QLORA_BF16, QLORA_F32, 0.0f, 5}, 1.0f},
    {"nn", {2056, 136, 40, false, false, QLORA_BF16, QLORA_BF16, QLORA_BF16, 0.0f, 0}, 1.0f},
    {"tn", {136, 72, 200, true, false, QLORA_BF16, QLORA_BF16, QLORA_F32, 1.0f, 8}, 1.0f},
    {"nn", {130, 72, 72, false, false, QLORA_F16, QLORA_F16, QLORA_F32, 1.0f, 0}, 1.0f},
    {"nt", {70, 136, 200, false, true, QLORA_F16, QLORA_F16, QLORA_F32, 0.0f, 8}, 2.0f},
    {"tn", {72, 136, 33, true, false, QLORA_F16, QLORA_F16, QLORA_F32, 1.0f, 8}, 1.0f},
    {"narrow", {250, 16, 328, false, false, QLORA_BF16, QLORA_BF16, QLORA_BF16, 0.0f, 8}, 1.0f},
    {"narrow", {70, 48, 648, false, true, QLORA_BF16, QLORA_BF16, QLORA_BF16, 1.0f, 8}, 0.5f},
    {"narrow", {130, 45, 99, false, true, QLORA_BF16, QLORA_BF16, QLORA_F32, 1.0f, 5}, 1.0f},
    {"narrow", {40, 136, 523, true, false, QLORA_BF16, QLORA_BF16, QLORA_F32, 1.0f, 8}, 1.0f},
    {"narrow", {200, 16, 40, true, false, QLORA_BF16, QLORA_BF16, QLORA_F32, 0.0f, 0}, 2.0f},
};

// Opens a context that uses no kernels for devices after compute capability 8.0.
static qlora_ctx* open_sm_80(const test_machine* machine, void (*change)(qlora_ctx_desc* desc)) {
    setenv("QLORA_GPU_TARGET", "sm_80", 1);
    qlora_ctx* ctx = test_open(machine, change);
    unsetenv("QLORA_GPU_TARGET");
    return ctx;
}

// Every tensor-core kernel of compute capability 8.0, whenever the copies happen.
TEST gemm_tensor_cores(const test_machine* machine) {
    static const fake_order orders[] = {FAKE_FORWARD, FAKE_REVERSE, FAKE_RANDOM};
    bool fake = strcmp(machine->backend, "fake") == 0;
    if (strcmp(machine->backend, "cpu") == 0) {
        SKIPm("a GPU's kernels");
    }
    test_random random = test_random_start("gemm_tensor_cores");
    for (int order = 0; order < (fake ? 3 : 1); order++) {
        warpgroup_order = orders[order];
        qlora_ctx* ctx = open_sm_80(machine, few_multiprocessors);
        if (!ctx)
            SKIPm(test_open_reason());
        ASSERT_STR_EQ("sm_80", qlora_ctx_target(ctx));
        for (size_t i = 0; i < sizeof tensor_cases / sizeof tensor_cases[0]; i++) {
            ASSERT(kernel_case_holds(ctx, &random, fake, "tc", &tensor_cases[i]));
        }
        ASSERT(test_close_ctx(machine, ctx));
    }
    PASS();
}

// Batches on tensor cores, with both operands in batches and with one B for all.
TEST gemm_tensor_batches(const test_machine* machine) {
    enum { BATCH = 3, M = 72, K = 40, WIDEST = 80 };
    static float a[BATCH * M * K];
    static float b[BATCH * WIDEST * K];
    static float expected[BATCH * M * WIDEST];
    static float got[BATCH * M * WIDEST];
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx)
        SKIPm(test_open_reason());
    qlora_path path = strcmp(machine->backend, "cpu") == 0 ? QLORA_PATH_CPU : QLORA_PATH_PTX;
    for (int form = 0; form < 4; form++) {
        int N = form % 2 ? WIDEST : 24; // and the narrow kernel
        bool shared = form / 2 != 0;
        for (int i = 0; i < BATCH * M * K; i++) { // small integers: exact in every type
            a[i] = (float)(i * 7 % 11) - 5.0f;
        }
        for (int i = 0; i < BATCH * N * K; i++) {
            b[i] = (float)(i * 5 % 13) - 6.0f;
        }
        for (int i = 0; i < BATCH * M * N; i++) {
            const float* column = b + ((shared ? 0 : i / (M * N) * N) + i % N) * K;
            expected[i] = 0.0f;
            for (int k = 0; k < K; k++) {
                expected[i] += a[i / N * K + k] * column[k];
            }
        }
        qlora_gemm_desc desc = {false, true, 1.0f, 0.0f, path};
        qlora_tensor ta, tb, tc;
        ASSERT_EQ(QLORA_OK, test_tensor(ctx, QLORA_BF16, BATCH * M, K, a, &ta));
        ASSERT_EQ(QLORA_OK, test_tensor(ctx, QLORA_BF16, BATCH * N, K, b, &tb));
        ASSERT_EQ(QLORA_OK, qlora_tensor_create_batched(ctx, QLORA_F32, BATCH, M, N, &tc));
        qlora_tensor left = ta;
        qlora_tensor right = tb;
        left.rows = M;
        left.batch = BATCH;
        left.batch_stride = M * K;
        right.rows = N;
        right.batch = shared ? 1 : BATCH;
        right.batch_stride = N * K;
        ASSERT_EQ(QLORA_OK, qlora_gemm(ctx, &desc, &left, &right, &tc));
        ASSERT(test_read(ctx, &tc, got));
        ASSERT_CLOSE(expected, got, (size_t)(BATCH * M * N), 0.0, 0.0);
        ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, &ta));
        ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, &tb));
        ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, &tc));
    }
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

SUITE(gemm_suite) {
    RUN_ON(TEST_ONE_EACH, gemm_tensor_cores);
    RUN_ON(TEST_EVERYWHERE, gemm_tensor_batches);
    RUN_ON(TEST_ONE_EACH, gemm_warpgroups);
    RUN_ON(TEST_ONE_EACH, gemm_big_tiles);
    RUN_ON(TEST_EVERYWHERE, gemm_named_products);
    RUN_ON(TEST_EVERYWHERE, gemm_every_form);
    RUN_ON(TEST_EVERYWHERE, gemm_large_gradients);
    RUN_ON(TEST_EVERYWHERE, gemm_batched);
    RUN_ON(TEST_EVERYWHERE, gemm_mixed_in_slices);
    RUN_ON(TEST_EVERYWHERE, gemm_bad_input);
    RUN_ON(TEST_GPUS, gemm_tf32_modes);
}
