// fp8.c - FP8 products: e4m3 numbers, the operators on the CPU against plain loops, the kernels and
// cuBLASLt against the CPU, and models in FP8 mode.
#include "machines.h"
#include "model_rig.h"

// ---- numbers

static double fp8_value(int code) { // of the 127 codes that are not negative
    int exponent = code >> 3;
    int mantissa = code & 7;
    return exponent == 0 ? ldexp(mantissa, -9) : ldexp(8 + mantissa, exponent - 10);
}

// The nearest code by halving (values of codes ascend); of two equally near ones, the even one.
static int fp8_nearest(double size) {
    int below = 0;
    int above = 126;
    while (above - below > 1) {
        int middle = (below + above) / 2;
        *(fp8_value(middle) <= size ? &below : &above) = middle;
    }
    double down = fabs(fp8_value(below) - size);
    double up = fabs(fp8_value(above) - size);
    return down < up || (down <= up && below % 2 == 0) ? below : above;
}

TEST e4m3_rounds_to_the_nearest(void) {
    for (int code = 0; code < 127; code++) {
        float value = (float)fp8_value(code);
        ASSERT_EQ_FMT(code, (int)qlora__e4m3_from(value), "%#x");
        ASSERT_EQ_FMT(code | 0x80, (int)qlora__e4m3_from(-value), "%#x");
        ASSERT(qlora__bits(qlora__e4m3_to((uint8_t)code)) == qlora__bits(value));
        ASSERT(qlora__bits(qlora__e4m3_to((uint8_t)(code | 0x80))) == qlora__bits(-value));
        // Halfway to the next code, and next to that.
        float middle = (float)((fp8_value(code) + (code < 126 ? fp8_value(code + 1) : 480)) / 2);
        for (int by = -1; by <= 1; by++) {
            float x = qlora__from_bits((uint32_t)((int64_t)qlora__bits(middle) + by));
            ASSERT_EQ_FMT(fp8_nearest((double)x), (int)qlora__e4m3_from(x), "%#x");
        }
    }
    test_random random = test_random_start("e4m3");
    for (int i = 0; i < 2000; i++) {
        float x =
            (float)ldexp(test_random_normal(&random), (int)test_random_below(&random, 20) - 12);
        int sign = x < 0.0f ? 0x80 : 0;
        ASSERT_EQ_FMT(fp8_nearest(fabs((double)x)) | sign, (int)qlora__e4m3_from(x), "%#x");
    }
    PASS();
}

TEST e4m3_saturates(void) {
    ASSERT_EQ_FMT(0x7e, (int)qlora__e4m3_from(1e30f), "%#x");
    ASSERT_EQ_FMT(0xfe, (int)qlora__e4m3_from(-INFINITY), "%#x");
    ASSERT_EQ_FMT(0x7f, (int)qlora__e4m3_from(qlora__from_bits(0xffc00000u)), "%#x");
    for (int code = 0x7f; code < 0x100; code += 0x80) {
        float nan = qlora__e4m3_to((uint8_t)code);
        ASSERT((qlora__bits(nan) & 0x7fffffffu) > 0x7f800000u);
    }
    PASS();
}

// ---- operators

enum { FP8_T = 50, FP8_IN = 48, FP8_OUT = 56, FP8_PARTS = 2, FP8_MOST = 64 };

// A stack of two NF4 weights with its memory. With 40 columns, no sum is a multiple of 16, nor is
// the place of the second weight; with 48, the kernels take whole words.
typedef struct fp8_stack {
    int in;
    qlora_nf4 w[FP8_PARTS];
    qlora_tensor memory[8];
    qlora_linear_desc linear;
    qlora__fp8 fp8;
} fp8_stack;

static bool fp8_stack_make(qlora_ctx* ctx, int in, bool plain_scales, fp8_stack* s) {
    static const int64_t outs[FP8_PARTS] = {24, 32};
    test_random random = test_random_start("fp8 weights");
    float values[FP8_OUT * FP8_IN];
    bool ok = true;
    memset(s, 0, sizeof *s);
    s->in = in;
    s->linear.in = in;
    s->linear.count = FP8_PARTS;
    for (int i = 0; i < FP8_PARTS; i++) {
        qlora_nf4_desc desc;
        qlora_tensor source;
        memset(&desc, 0, sizeof desc);
        desc.rows = outs[i];
        desc.cols = in;
        desc.plain_scales = plain_scales;
        for (int64_t k = 0; k < outs[i] * in; k++) { // the second weight is larger
            values[k] = (float)test_random_normal(&random) * (i == 0 ? 0.02f : 0.1f);
        }
        ok = ok && qlora_nf4_create(ctx, &desc, &s->w[i]) == QLORA_OK &&
             test_tensor(ctx, QLORA_F32, outs[i], in, values, &source) == QLORA_OK &&
             qlora_nf4_quantise(ctx, &source, &s->w[i]) == QLORA_OK &&
             qlora_tensor_destroy(ctx, &source) == QLORA_OK;
        s->linear.parts[i].out = outs[i];
        s->linear.parts[i].nf4 = &s->w[i];
    }
    static const uint8_t zeros[FP8_T * FP8_MOST] = {0};
    qlora_tensor* m = s->memory;
    ok = ok &&
         qlora_tensor_create(ctx, QLORA_U8, FP8_OUT, qlora__fp8_pitch(in), &m[0]) == QLORA_OK &&
         qlora_tensor_create(ctx, QLORA_U8, in, qlora__fp8_pitch(FP8_OUT), &m[1]) == QLORA_OK &&
         qlora_tensor_create(ctx, QLORA_F32, 1, 2, &m[2]) == QLORA_OK &&
         qlora_tensor_create(ctx, QLORA_U8, FP8_T, FP8_MOST, &m[3]) == QLORA_OK &&
         qlora_tensor_create(ctx, QLORA_F32, 1, FP8_T, &m[4]) == QLORA_OK &&
         qlora_tensor_create(ctx, QLORA_F32, 1, FP8_OUT, &m[5]) == QLORA_OK &&
         qlora_fill(ctx, 1.0f, &m[5]) == QLORA_OK &&
         qlora_tensor_write(ctx, &m[3], zeros, sizeof zeros) == QLORA_OK; // compared as a whole
    s->fp8.weights = m[0];
    s->fp8.transposed = m[1];
    s->fp8.factors = m[2];
    s->fp8.codes = m[3];
    s->fp8.scales = m[4];
    s->fp8.ones = m[5];
    s->linear.fp8 = &s->fp8;
    return ok;
}

static bool fp8_stack_drop(qlora_ctx* ctx, fp8_stack* s) {
    bool ok = true;
    for (int i = 0; i < 6; i++) {
        ok = qlora_tensor_destroy(ctx, &s->memory[i]) == QLORA_OK && ok;
    }
    for (int i = 0; i < FP8_PARTS; i++) {
        ok = qlora_nf4_destroy(ctx, &s->w[i]) == QLORA_OK && ok;
    }
    return ok;
}

// The private operators, as the public ones would call them.
static qlora_result fp8_prepare(qlora_ctx* ctx, fp8_stack* s) {
    QLORA__ENTER(ctx, "fp8_prepare");
    qlora_result r = qlora__fp8_measure(ctx, &s->linear);
    r = r == QLORA_OK ? qlora__fp8_place(ctx, &s->linear, false) : r;
    r = r == QLORA_OK ? qlora__fp8_place(ctx, &s->linear, true) : r;
    return qlora__leave(ctx, r);
}

static qlora_result fp8_multiply(qlora_ctx* ctx, fp8_stack* s, bool transposed,
                                 const qlora_tensor* x, const qlora_tensor* y, bool adds) {
    QLORA__ENTER(ctx, "fp8_multiply");
    return qlora__leave(ctx, qlora__fp8_product(ctx, &s->fp8, transposed, false, x, y, adds));
}

// Everything that the operators write.
typedef struct fp8_results {
    uint8_t weights[FP8_OUT * FP8_MOST];
    uint8_t transposed[FP8_IN * FP8_MOST];
    float factors[2];
    uint8_t codes[2][FP8_T * FP8_MOST];
    float scales[2][FP8_T];
    float y[FP8_T * FP8_OUT];
    float dx[FP8_T * FP8_IN];
} fp8_results;

static bool fp8_run(const test_machine* machine, int in, bool plain_scales, fp8_results* out) {
    qlora_ctx* ctx = test_open(machine, NULL);
    fp8_stack s;
    qlora_tensor x;
    qlora_tensor y;
    qlora_tensor dx;
    float values[FP8_T * FP8_OUT];
    memset(out, 0, sizeof *out);
    memset(&s, 0, sizeof s);
    memset(&x, 0, sizeof x);
    memset(&y, 0, sizeof y);
    memset(&dx, 0, sizeof dx);
    bool ok = ctx != NULL && fp8_stack_make(ctx, in, plain_scales, &s) &&
              fp8_prepare(ctx, &s) == QLORA_OK;
    // Every column has the largest number of a row; row 2 is zero.
    test_random random = test_random_start("fp8 rows");
    for (int i = 0; i < FP8_T * in; i++) {
        int row = i / in;
        double size = ldexp(test_random_normal(&random), row % 5 * 5 - 12);
        values[i] = row == 2 ? 0.0f : (float)(i % in == row % in ? 16.0 * size : size);
    }
    ok = ok && test_tensor(ctx, QLORA_BF16, FP8_T, in, values, &x) == QLORA_OK &&
         qlora_tensor_create(ctx, QLORA_BF16, FP8_T, FP8_OUT, &y) == QLORA_OK &&
         qlora_tensor_create(ctx, QLORA_BF16, FP8_T, in, &dx) == QLORA_OK &&
         qlora_fill(ctx, 7.0f, &y) == QLORA_OK; // overwritten
    for (int i = 0; i < FP8_T * FP8_OUT; i++) {
        values[i] = (float)test_random_normal(&random);
    }
    // dx = y W is the second product, so that both widths are read and written.
    ok = ok && fp8_multiply(ctx, &s, false, &x, &y, false) == QLORA_OK &&
         qlora_tensor_read(ctx, &s.fp8.codes, out->codes[0], sizeof out->codes[0]) == QLORA_OK &&
         qlora_tensor_read(ctx, &s.fp8.scales, out->scales[0], sizeof out->scales[0]) == QLORA_OK &&
         test_read(ctx, &y, out->y) && qlora_fill(ctx, 0.5f, &dx) == QLORA_OK &&
         qlora_tensor_destroy(ctx, &y) == QLORA_OK &&
         test_tensor(ctx, QLORA_BF16, FP8_T, FP8_OUT, values, &y) == QLORA_OK &&
         fp8_multiply(ctx, &s, true, &y, &dx, true) == QLORA_OK &&
         qlora_tensor_read(ctx, &s.fp8.codes, out->codes[1], sizeof out->codes[1]) == QLORA_OK &&
         qlora_tensor_read(ctx, &s.fp8.scales, out->scales[1], sizeof out->scales[1]) == QLORA_OK &&
         test_read(ctx, &dx, out->dx) &&
         qlora_tensor_read(ctx, &s.fp8.factors, out->factors, sizeof out->factors) == QLORA_OK &&
         qlora_tensor_read(ctx, &s.fp8.weights, out->weights, s.fp8.weights.bytes) == QLORA_OK &&
         qlora_tensor_read(ctx, &s.fp8.transposed, out->transposed, s.fp8.transposed.bytes) ==
             QLORA_OK;
    if (!ok && ctx != NULL) {
        printf("    %s\n", qlora_last_error(ctx));
    }
    return ok && qlora_tensor_destroy(ctx, &x) == QLORA_OK &&
           qlora_tensor_destroy(ctx, &y) == QLORA_OK &&
           qlora_tensor_destroy(ctx, &dx) == QLORA_OK && fp8_stack_drop(ctx, &s) &&
           test_close_ctx(machine, ctx);
}

static const test_machine* fp8_cpu(void) {
    for (size_t i = 0; i < test_machine_count(); i++) {
        if (strcmp(test_machine_at(i)->backend, "cpu") == 0) {
            return test_machine_at(i);
        }
    }
    return NULL;
}

// Rows of weights and of x: within half a step of the numbers they stand for, the same in both
// forms, and filled up with zeros. Products: the sum over those numbers, rounded to bf16.
TEST fp8_products_are_those_of_their_operands(void) {
    const int in = 40;
    const int in_pitch = (int)qlora__fp8_pitch(in);
    const int out_pitch = (int)qlora__fp8_pitch(FP8_OUT);
    fp8_results* r = (fp8_results*)malloc(sizeof *r);
    ASSERT(r != NULL && fp8_run(fp8_cpu(), in, false, r));
    for (int n = 0; n < FP8_OUT; n++) {
        for (int k = 0; k < in_pitch; k++) {
            uint8_t code = r->weights[n * in_pitch + k];
            ASSERT(k < in ? code == r->transposed[k * out_pitch + n] : code == 0);
        }
    }
    for (int k = 0; k < in; k++) {
        for (int n = FP8_OUT; n < out_pitch; n++) {
            ASSERT_EQ(0, r->transposed[k * out_pitch + n]);
        }
    }
    for (int t = 0; t < FP8_T; t++) {
        int most = 0;
        for (int k = 0; k < in_pitch; k++) {
            int size = r->codes[0][t * in_pitch + k] & 0x7f;
            most = size > most ? size : most;
        }
        ASSERT_EQ_FMT(t == 2 ? 0 : 0x7e, most, "%#x"); // the largest becomes 448
        for (int n = 0; n < FP8_OUT; n++) {
            double sum = 0.0;
            for (int k = 0; k < in; k++) {
                sum += (double)qlora__e4m3_to(r->codes[0][t * in_pitch + k]) *
                       (double)qlora__e4m3_to(r->weights[n * in_pitch + k]);
            }
            sum *= (double)r->scales[0][t];
            ASSERT(fabs(sum - (double)r->y[t * FP8_OUT + n]) <= fabs(sum) / 256.0);
        }
        for (int k = 0; k < in; k++) {
            double sum = 0.0;
            for (int n = 0; n < FP8_OUT; n++) {
                sum += (double)qlora__e4m3_to(r->codes[1][t * out_pitch + n]) *
                       (double)qlora__e4m3_to(r->weights[n * in_pitch + k]);
            }
            sum = sum * (double)r->scales[1][t] + 0.5;
            ASSERT(fabs(sum - (double)r->dx[t * in + k]) <= fabs(sum) / 256.0);
        }
    }
    free(r);
    PASS();
}

// The values that the codes of the weights stand for, against the dequantised weights.
TEST fp8_weights_are_near(void) {
    const int in = 48;
    const int pitch = (int)qlora__fp8_pitch(in);
    const test_machine* machine = fp8_cpu();
    qlora_ctx* ctx = test_open(machine, NULL);
    fp8_stack s;
    ASSERT(ctx != NULL && fp8_stack_make(ctx, in, true, &s));
    ASSERT_EQm(qlora_last_error(ctx), QLORA_OK, fp8_prepare(ctx, &s));
    double scale = (double)((const float*)s.fp8.factors.data)[0];
    int row = 0;
    double most = 0.0;
    for (int i = 0; i < FP8_PARTS; i++) {
        for (int64_t e = 0; e < s.w[i].rows * in; e++) {
            int64_t r = row + e / in;
            float exact = s.w[i].maps[qlora__nf4_code_at(s.w[i].codes, e)] *
                          qlora__nf4_absmax(&s.w[i], e / s.w[i].block);
            uint8_t code = ((const uint8_t*)s.fp8.weights.data)[r * pitch + e % in];
            double got = (double)qlora__e4m3_to(code) * scale;
            // Half a step of 3 bits, or of the smallest step.
            ASSERT(fabs(got - (double)exact) <= fabs((double)exact) / 15.9 + scale / 1023.0);
            most = fabs(got) > most ? fabs(got) : most;
        }
        row += (int)s.w[i].rows;
    }
    ASSERT(fabs(most / scale - 448.0) < 1e-3);
    ASSERT(fp8_stack_drop(ctx, &s));
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// Rows that are longer than what a thread keeps, and not aligned.
enum { FP8_LONG = 33016, FP8_LD = FP8_LONG + 13 };

static bool fp8_long_rows(const test_machine* machine, uint8_t* codes, float scales[2]) {
    qlora_ctx* ctx = test_open(machine, NULL);
    const int64_t pitch = qlora__fp8_pitch(FP8_LONG);
    fp8_stack s;
    qlora_tensor x;
    qlora_tensor y;
    float* values = (float*)malloc(sizeof(float) * 2 * FP8_LD);
    test_random random = test_random_start("fp8 long rows");
    memset(&s, 0, sizeof s);
    memset(&x, 0, sizeof x);
    memset(&y, 0, sizeof y);
    for (int i = 0; i < 2 * FP8_LD && values != NULL; i++) {
        values[i] = (float)test_random_normal(&random);
    }
    bool ok = ctx != NULL && values != NULL &&
              test_tensor(ctx, QLORA_BF16, 2, FP8_LD, values, &x) == QLORA_OK &&
              qlora_tensor_create(ctx, QLORA_BF16, 2, 8, &y) == QLORA_OK &&
              qlora_tensor_create(ctx, QLORA_U8, 8, pitch, &s.fp8.weights) == QLORA_OK &&
              qlora_tensor_create(ctx, QLORA_F32, 1, 2, &s.fp8.factors) == QLORA_OK &&
              qlora_tensor_create(ctx, QLORA_U8, 2, pitch, &s.fp8.codes) == QLORA_OK &&
              qlora_tensor_create(ctx, QLORA_F32, 1, 2, &s.fp8.scales) == QLORA_OK &&
              qlora_tensor_create(ctx, QLORA_F32, 1, 8, &s.fp8.ones) == QLORA_OK &&
              qlora_fill(ctx, 1.0f, &s.fp8.ones) == QLORA_OK &&
              qlora_fill(ctx, 3.0f, &s.fp8.factors) == QLORA_OK &&
              qlora_tensor_zero(ctx, &s.fp8.weights) == QLORA_OK;
    qlora_tensor part = x;
    part.cols = FP8_LONG;
    ok = ok && fp8_multiply(ctx, &s, false, &part, &y, false) == QLORA_OK &&
         qlora_tensor_read(ctx, &s.fp8.codes, codes, (size_t)(2 * pitch)) == QLORA_OK &&
         qlora_tensor_read(ctx, &s.fp8.scales, scales, 2 * sizeof *scales) == QLORA_OK;
    qlora_tensor* all[] = {
        &x, &y, &s.fp8.weights, &s.fp8.factors, &s.fp8.codes, &s.fp8.scales, &s.fp8.ones};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        ok = ok && qlora_tensor_destroy(ctx, all[i]) == QLORA_OK;
    }
    free(values);
    return test_close_ctx(machine, ctx) && ok;
}

TEST fp8_takes_long_rows(const test_machine* machine) {
    if (!test_has_fp8(machine)) {
        SKIPm("FP8 needs compute capability 9.0 and cuBLASLt");
    }
    const size_t bytes = (size_t)(2 * qlora__fp8_pitch(FP8_LONG));
    uint8_t* expected = (uint8_t*)malloc(bytes);
    uint8_t* got = (uint8_t*)malloc(bytes);
    float scales[2][2];
    ASSERT(expected != NULL && got != NULL);
    ASSERT(fp8_long_rows(fp8_cpu(), expected, scales[0]));
    ASSERT(fp8_long_rows(machine, got, scales[1]));
    ASSERT_MEM_EQ(expected, got, bytes);
    ASSERT_MEM_EQ(scales[0], scales[1], sizeof scales[0]);
    free(expected);
    free(got);
    PASS();
}

// ---- models

static setup fp8_setup(const test_machine* machine) {
    setup s = setup_make(machine);
    s.model.mode = QLORA_MODE_FP8;
    return s;
}

// Other ways to the same bits.
static void fp8_eager(setup* s) {
    s->train.eager = true;
    s->model.recompute = QLORA_CHOICE_ON;
}

static void fp8_cached(setup* s) {
    s->model.cache = QLORA_CHOICE_ON;
    s->machine.order = FAKE_RANDOM;
}

TEST fp8_has_the_same_bits(const test_machine* machine) {
    static const struct {
        const char* name;
        void (*vary)(setup* s);
    } ways[] = {{"eager and recomputed", fp8_eager}, {"cached, in another order", fp8_cached}};
    if (strcmp(machine->backend, "cpu") != 0 && !test_has_fp8(machine)) {
        SKIPm("FP8 needs compute capability 9.0 and cuBLASLt");
    }
    if (test_brief() && strcmp(machine->backend, "fake") == 0) {
        SKIPm("brief run: sessions in the interpreter");
    }
    for (int beside = 0; beside < 2; beside++) {
        setup s = fp8_setup(machine);
        s.config.layers = 1;
        s.config.intermediate = 44; // no multiple of 8
        s.model.dropout = beside == 1 ? 0.0f : s.model.dropout;
        outcome expected;
        ASSERT(run_session(&s, &expected));
        ASSERT(outcome_sane(&expected));
        for (size_t i = beside == 1 ? 0 : 1; i < sizeof ways / sizeof ways[0]; i++) {
            setup other = s;
            outcome got;
            ways[i].vary(&other);
            ASSERTm(ways[i].name, run_session(&other, &got));
            ASSERTm(ways[i].name, outcome_same(&expected, &got));
            outcome_free(&got);
        }
        outcome_free(&expected);
    }
    PASS();
}

// Many rows have the codes of a few: sequences together, and each of them alone.
TEST fp8_rows_are_independent(void) {
    static const int32_t lengths[3] = {9, 5, 8};
    setup s = fp8_setup(fp8_cpu());
    rig r;
    data d;
    double together[3];
    ASSERT(rig_open(&r, &s));
    data_make(&d, "rows", lengths, 3);
    ASSERT_EQ(QLORA_OK, qlora_eval_sequences(r.model, &d.batch, together));
    for (int i = 0; i < 3; i++) {
        qlora_batch one = batch_part(&d.batch, i);
        double alone = 0.0;
        ASSERT_EQ(QLORA_OK, qlora_eval_sequences(r.model, &one, &alone));
        ASSERT(fabs(alone - together[i]) <= 1e-4 * fabs(alone));
    }
    ASSERT(rig_close(&r, &s));
    PASS();
}

// The committed golden folder: the losses of 20 steps, on average within 1 % of those in f32.
TEST fp8_trains_like_f32(void) {
    int figures = 0;
    ASSERT_EQ_FMT(0, judge(QLORA_BACKEND_CPU, QLORA_MODE_FP8, false, &figures), "%d");
    ASSERT_EQ_FMT(2 * 9, figures, "%d");
    PASS();
}

// Both forms of the weights are placed in turn.
TEST fp8_trains_in_tiles(void) {
    int figures = 0;
    ASSERT_EQ_FMT(0, judge_with(QLORA_BACKEND_CPU, QLORA_MODE_FP8, false, 16, &figures), "%d");
    ASSERT_EQ_FMT(2 * 9, figures, "%d");
    PASS();
}

static bool fp8_refused(const setup* given, const char* why) {
    setup s = *given;
    rig r;
    memset(&r, 0, sizeof r);
    r.ctx = test_open(&s.machine, s.change);
    s.model.config = &s.config;
    bool refused = r.ctx != NULL && qlora_model_open(r.ctx, &s.model, &r.model) != QLORA_OK &&
                   strstr(qlora_last_error(r.ctx), why) != NULL;
    if (!refused && r.ctx != NULL) {
        printf("    expected: %s; got: %s\n", why, qlora_last_error(r.ctx));
    }
    return test_close_ctx(&s.machine, r.ctx) && refused;
}

static double fp8_largest(const float* values, size_t n) {
    double most = 0.0;
    for (size_t i = 0; i < n; i++) {
        most = fabs((double)values[i]) > most ? fabs((double)values[i]) : most;
    }
    return most;
}

// The kernels give the bytes of the loops, and cuBLASLt their sums; without either, a model is
// refused.
TEST fp8_kernels_are_the_loops(const test_machine* machine) {
    if (!test_has_fp8(machine)) {
        setup s = fp8_setup(machine);
        const char* why = machine->cublas || strcmp(machine->backend, "fake") == 0
                              ? "needs compute capability 9.0"
                              : "FP8 needs cuBLAS";
        ASSERT(fp8_refused(&s, why));
        PASS();
    }
    fp8_results* expected = (fp8_results*)malloc(sizeof *expected);
    fp8_results* got = (fp8_results*)malloc(sizeof *got);
    ASSERT(expected != NULL && got != NULL);
    for (int way = 0; way < 4; way++) {
        int in = way < 2 ? 40 : 48;
        ASSERT(fp8_run(fp8_cpu(), in, way % 2 == 1, expected));
        ASSERT(fp8_run(machine, in, way % 2 == 1, got));
        ASSERT_MEM_EQ(expected->factors, got->factors, sizeof got->factors);
        ASSERT_MEM_EQ(expected->weights, got->weights, sizeof got->weights);
        ASSERT_MEM_EQ(expected->transposed, got->transposed, sizeof got->transposed);
        size_t pitches[2] = {(size_t)qlora__fp8_pitch(in), (size_t)qlora__fp8_pitch(FP8_OUT)};
        ASSERT_MEM_EQ(expected->codes[0], got->codes[0], FP8_T * pitches[0]);
        ASSERT_MEM_EQ(expected->codes[1], got->codes[1], FP8_T * pitches[1]);
        ASSERT_MEM_EQ(expected->scales, got->scales, sizeof got->scales);
        // A real GPU cuts each of the 32 terms that it adds at once to 13 bits below the largest,
        // which loses at most 2^-8 of it.
        double part = strcmp(machine->backend, "cuda") == 0 ? 1.0 / 256 : 0.0;
        for (size_t t = 0; t < FP8_T; t++) {
            const float* row = expected->y + t * FP8_OUT;
            ASSERT_CLOSE(row, got->y + t * FP8_OUT, FP8_OUT, part * fp8_largest(row, FP8_OUT),
                         1.0 / 128);
        }
        for (size_t t = 0; t < FP8_T; t++) {
            const float* row = expected->dx + t * (size_t)in;
            double least = part > 0.0 ? part * fp8_largest(row, (size_t)in) : 1e-3;
            ASSERT_CLOSE(row, got->dx + t * (size_t)in, (size_t)in, least, 1.0 / 128);
        }
    }
    free(expected);
    free(got);
    PASS();
}

static void fp8_without_cublas(qlora_ctx_desc* desc) {
    desc->cublas_library = "none";
}

TEST fp8_is_refused_by_name(const test_machine* machine) {
    bool fake = strcmp(machine->backend, "fake") == 0;
    setup s = fp8_setup(machine);
    if (fake && machine->cc != 90) {
        ASSERT(fp8_refused(&s, "needs compute capability 9.0"));
        PASS();
    }
    if (!fake) {
        SKIPm("the machine is what it is");
    }
    s.change = fp8_without_cublas;
    ASSERT(fp8_refused(&s, "FP8 needs cuBLAS: disabled"));
    s = fp8_setup(machine);
    s.model.base = QLORA_BASE_16BIT;
    ASSERT(fp8_refused(&s, "model.layers.0.self_attn.q_proj is in 16 or 32 bits"));
    s = fp8_setup(machine);
    s.model.dora = true;
    s.model.dropout = 0.0f;
    ASSERT(fp8_refused(&s, "which DoRA does not support"));
    s = fp8_setup(machine);
    s.config.intermediate = 42;
    ASSERT(fp8_refused(&s, "config.intermediate is 42"));
    PASS();
}

// Every call of cuBLASLt fails once while a model is opened: nothing is left behind.
TEST fp8_fails_cleanly(const test_machine* machine) {
    static const char* const calls[] = {"cublasLtCreate",
                                        "cublasLtMatmulDescCreate",
                                        "cublasLtMatmulDescSetAttribute",
                                        "cublasLtMatrixLayoutCreate",
                                        "cublasLtMatmulPreferenceCreate",
                                        "cublasLtMatmulPreferenceSetAttribute",
                                        "cublasLtMatmulAlgoGetHeuristic",
                                        "cublasLtMatmul"};
    if (!test_has_fp8(machine) || test_fake() == NULL) {
        SKIPm("FP8 needs compute capability 9.0 and cuBLASLt");
    }
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
        setup s = fp8_setup(machine);
        qlora_ctx* ctx = test_open(machine, NULL);
        qlora_model* model = NULL;
        s.model.config = &s.config;
        ASSERT(ctx != NULL);
        test_fake()->fail_at(calls[i], 1, 13, false);
        ASSERT_EQm(calls[i], QLORA_ERR_CUBLAS, qlora_model_open(ctx, &s.model, &model));
        ASSERTm(qlora_last_error(ctx), strstr(qlora_last_error(ctx), calls[i]) != NULL);
        test_fake()->fail_clear();
        ASSERTm(calls[i], test_close_ctx(machine, ctx));
    }
    // A product that the library does not have is refused by its sizes.
    setup s = fp8_setup(machine);
    qlora_ctx* ctx = test_open(machine, NULL);
    qlora_model* model = NULL;
    s.model.config = &s.config;
    test_fake()->fail_at("cublasLtMatmulAlgoGetHeuristic", 1, 15, false);
    ASSERT_EQ(QLORA_ERR_UNSUPPORTED, qlora_model_open(ctx, &s.model, &model));
    ASSERTm(qlora_last_error(ctx), strstr(qlora_last_error(ctx), "24 x 32 x") != NULL);
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

SUITE(fp8_suite) {
    RUN_TEST(e4m3_rounds_to_the_nearest);
    RUN_TEST(e4m3_saturates);
    RUN_TEST(fp8_products_are_those_of_their_operands);
    RUN_TEST(fp8_weights_are_near);
    RUN_ON(TEST_GPUS, fp8_kernels_are_the_loops);
    RUN_ON(TEST_ONE_FAKE, fp8_takes_long_rows);
    RUN_ON(TEST_ONE_EACH, fp8_has_the_same_bits);
    RUN_TEST(fp8_rows_are_independent);
    RUN_TEST(fp8_trains_like_f32);
    RUN_TEST(fp8_trains_in_tiles);
    RUN_ON(TEST_FAKES, fp8_is_refused_by_name);
    RUN_ON(TEST_ONE_FAKE, fp8_fails_cleanly);
}
