// optimizer.c - AdamW with 8-bit moments against plain loops in double, and the noise of NEFTune.
// tests/adamw8_check.py compares whole runs with bitsandbytes.
#include "machines.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

// ---- maps ----

// Some values of bitsandbytes' create_dynamic_map, whose map of v has no negative ones.
TEST maps_are_those_of_bitsandbytes(void) {
    static const struct {
        int at;
        float value;
    } want[2][12] = {
        {{0, -0x1.fc6666p-1f},
         {1, -0x1.f53334p-1f},
         {64, -0x1.93d70ap-4f},
         {120, -0x1.743e96p-14f},
         {126, -0x1.27476ep-21f},
         {127, 0.0f},
         {128, 0x1.27476ep-21f},
         {131, 0x1.64840cp-16f},
         {140, 0x1.78d5p-11f},
         {190, 0x1.93d70ap-4f},
         {254, 0x1.fc6666p-1f},
         {255, 1.0f}},
        {{0, 0.0f},
         {1, 0x1.5cf754p-22f},
         {2, 0x1.a0133p-21f},
         {3, 0x1.1d367p-19f},
         {7, 0x1.0624dcp-16f},
         {20, 0x1.ad42c6p-12f},
         {60, 0x1.30a3d6p-7f},
         {100, 0x1.00f5c4p-4f},
         {129, 0x1.e1999ap-4f},
         {200, 0x1.3bccccp-1f},
         {254, 0x1.fe3334p-1f},
         {255, 1.0f}},
    };
    for (int k = 0; k < 2; k++) {
        float map[QLORA__MOMENTS_MAP];
        qlora__moments_map(k == 0, map);
        for (int i = 0; i < 12; i++) {
            float got = map[want[k][i].at];
            ASSERT_EQ_FMT(qlora__bits(want[k][i].value), qlora__bits(got), "%#x");
        }
        for (int i = 1; i < QLORA__MOMENTS_MAP; i++) {
            ASSERT(map[i] > map[i - 1]);
            ASSERT_EQ_FMT(i, (int)qlora__moments_code(map, map[i]), "%d");
            float middle = (map[i - 1] + map[i]) * 0.5f;
            ASSERT_EQ_FMT(i - 1, (int)qlora__moments_code(map, middle), "%d");
            ASSERT_EQ_FMT(i, (int)qlora__moments_code(map, nextafterf(middle, 2.0f)), "%d");
        }
        ASSERT_EQ_FMT(0, (int)qlora__moments_code(map, -1.0f), "%d");
    }
    PASS();
}

// ---- steps ----

// A tensor in 8 bits whose last block is short, one that is too short for that, and one that has
// exactly the least number of elements. The gaps between them must stay as they are.
enum { OPT_RANGES = 3, OPT_ELEMENTS = 10000, OPT_STEPS = 6 };

static const int64_t opt_begins[OPT_RANGES] = {8, 5200, 5800};
static const int64_t opt_counts[OPT_RANGES] = {5001, 303, 4096};

typedef struct opt_rig {
    qlora_ctx* ctx;
    qlora_tensor param;
    qlora_tensor grad;
    qlora_tensor shadow;
    qlora_tensor copy; // the second one of the first range, in rows of 3 of 5 elements
    qlora_tensor m;    // of plain AdamW
    qlora_tensor v;
    qlora_tensor ranges;
    qlora_tensor state;
    qlora_tensor flag;
    qlora_tensor memory;
    size_t bytes;
    qlora__moments moments[OPT_RANGES];
} opt_rig;

#define OPT_COPY_ROWS (5001 / 3)

// Zero moments, as the model starts them.
static bool opt_moments(opt_rig* r) {
    size_t at = qlora__moments_head(OPT_RANGES);
    for (int i = 0; i < OPT_RANGES; i++) {
        r->moments[i] = qlora__moments_place(at, opt_counts[i]);
        at = r->moments[i].end;
    }
    r->bytes = at;
    char* image = (char*)calloc(1, at);
    qlora__moments_map(true, (float*)(void*)image);
    qlora__moments_map(false, (float*)(void*)image + 256);
    for (int i = 0; i < OPT_RANGES; i++) {
        int64_t place = (int64_t)r->moments[i].values[0];
        memcpy(image + 2048 + 8 * i, &place, 8);
    }
    bool ok = qlora_tensor_create(r->ctx, QLORA_U8, 1, (int64_t)at, &r->memory) == QLORA_OK &&
              qlora_tensor_write(r->ctx, &r->memory, image, at) == QLORA_OK;
    free(image);
    return ok;
}

static bool opt_open(opt_rig* r, const test_machine* machine) {
    static float zero[OPT_ELEMENTS];
    static float start[OPT_ELEMENTS];
    memset(r, 0, sizeof *r);
    r->ctx = test_open(machine, NULL);
    if (r->ctx == NULL) {
        return false;
    }
    test_random random = test_random_start("parameters");
    test_random_fill(&random, start, OPT_ELEMENTS, 0.5f);
    qlora_adamw_range ranges[OPT_RANGES];
    qlora_adamw_state state;
    memset(ranges, 0, sizeof ranges);
    memset(&state, 0, sizeof state);
    state.lr = 0.01;
    state.beta1 = 0.9;
    state.beta2 = 0.99;
    state.eps = 1e-8;
    state.weight_decay = 0.2;
    qlora_tensor* const floats[] = {&r->grad, &r->m, &r->v, &r->shadow};
    bool ok = test_tensor(r->ctx, QLORA_F32, 1, OPT_ELEMENTS, start, &r->param) == QLORA_OK &&
              test_tensor(r->ctx, QLORA_F32, OPT_COPY_ROWS, 5, zero, &r->copy) == QLORA_OK &&
              qlora_tensor_create(r->ctx, QLORA_U8, 1, sizeof ranges, &r->ranges) == QLORA_OK &&
              qlora_tensor_create(r->ctx, QLORA_U8, 1, sizeof state, &r->state) == QLORA_OK &&
              qlora_tensor_create(r->ctx, QLORA_I32, 1, 1, &r->flag) == QLORA_OK && opt_moments(r);
    for (int i = 0; i < 4; i++) {
        ok = ok && test_tensor(r->ctx, QLORA_F32, 1, OPT_ELEMENTS, zero, floats[i]) == QLORA_OK;
    }
    for (int i = 0; i < OPT_RANGES; i++) {
        ranges[i].begin = opt_begins[i];
        ranges[i].count = opt_counts[i];
        ranges[i].decay = 1.0f;
        ranges[i].shadow_scale = 2.0f;
        ranges[i].lr = i == 2 ? 3.0 : 0.0;
    }
    ranges[0].copy = r->copy.data;
    ranges[0].copy_cols = 3;
    ranges[0].copy_ld = 5;
    return ok && qlora_tensor_write(r->ctx, &r->ranges, ranges, sizeof ranges) == QLORA_OK &&
           qlora_tensor_write(r->ctx, &r->state, &state, sizeof state) == QLORA_OK;
}

static bool opt_close(opt_rig* r, const test_machine* machine) {
    qlora_tensor* const all[] = {&r->param, &r->grad,  &r->shadow, &r->copy,   &r->m,
                                 &r->v,     &r->state, &r->flag,   &r->memory, &r->ranges};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        if (qlora_tensor_destroy(r->ctx, all[i]) != QLORA_OK) {
            return false;
        }
    }
    return test_close_ctx(machine, r->ctx);
}

// Gradients of very different sizes, some of them zero.
static void opt_gradient(int step, float* out) {
    test_random random = test_random_start("gradients");
    random.state ^= (uint64_t)(step + 1) * 0x9E3779B97F4A7C15u;
    for (int i = 0; i < OPT_ELEMENTS; i++) {
        double size = ldexp(1.0, -2 * (int)test_random_below(&random, 12));
        out[i] =
            test_random_below(&random, 9) == 0 ? 0.0f : (float)(test_random_normal(&random) * size);
    }
}

static bool opt_step(opt_rig* r, bool coded, bool skipped, const float* gradient) {
    int32_t flag = skipped ? 1 : 0;
    qlora_adamw_desc args;
    memset(&args, 0, sizeof args);
    args.param = &r->param;
    args.grad = &r->grad;
    args.m = coded ? NULL : &r->m;
    args.v = coded ? NULL : &r->v;
    args.shadow = &r->shadow;
    args.ranges = &r->ranges;
    args.state = &r->state;
    args.not_finite = &r->flag;
    args.longest_range = 5001;
    if (qlora_tensor_write(r->ctx, &r->grad, gradient, OPT_ELEMENTS * 4) != QLORA_OK ||
        qlora_tensor_write(r->ctx, &r->flag, &flag, sizeof flag) != QLORA_OK) {
        return false;
    }
    if (!coded) {
        return qlora_adamw_step(r->ctx, &args) == QLORA_OK;
    }
    return qlora__enter(r->ctx, "opt_step") == QLORA_OK &&
           qlora__leave(r->ctx, qlora__adamw8_step(r->ctx, &args, &r->memory)) == QLORA_OK;
}

// One of the moments of an element as it is stored.
static double opt_value(const opt_rig* r, const char* image, int range, int which, int64_t i) {
    const qlora__moments* p = &r->moments[range];
    const float* map = (const float*)(const void*)image + 256 * which;
    const char* values = image + p->values[which];
    if (!p->coded) {
        return (double)((const float*)(const void*)values)[i];
    }
    float scale = ((const float*)(const void*)(image + p->scales[which]))[i / 256];
    return (double)map[(unsigned char)values[i]] * (double)scale;
}

// The distance from a value to the nearest one that a block can store.
static double opt_nearest(const opt_rig* r, const char* image, int range, int which, int64_t i,
                          double value) {
    const float* map = (const float*)(const void*)image + 256 * which;
    double scale =
        (double)((const float*)(const void*)(image + r->moments[range].scales[which]))[i / 256];
    double best = INFINITY;
    for (int k = 0; k < 256; k++) {
        bool kept = which == 1 || value >= 0.0 || map[k] < 0.0f; // the sign of m
        double off = fabs((double)map[k] * scale - value);
        best = kept && off < best ? off : best;
    }
    return best;
}

typedef struct opt_images {
    char* before;
    char* after;
    float p[2][OPT_ELEMENTS];
    float gradient[OPT_ELEMENTS];
} opt_images;

// What a step does to an element of a range; `after` is compared.
static bool opt_element(const opt_rig* r, const opt_images* o, int t, int range, int64_t i) {
    int64_t e = opt_begins[range] + i;
    double lr = range == 2 ? 0.03 : 0.01;
    double g = (double)o->gradient[e];
    double m = opt_value(r, o->before, range, 0, i);
    double v = opt_value(r, o->before, range, 1, i);
    double before = m;
    m = 0.9 * m + 0.1 * g;
    v = 0.99 * v + 0.01 * g * g;
    double p = (double)o->p[0][e] * (1.0 - lr * 0.2);
    double step = lr / (1.0 - pow(0.9, t)) / (sqrt(v / (1.0 - pow(0.99, t))) + 1e-8);
    p -= step * m;
    double want[2] = {m, v};
    double rounding[2] = {1e-6 * (fabs(m) + fabs(before) + fabs(0.1 * g)), 1e-6 * v};
    double off = 2e-6 * (1.0 + fabs(p) + step * fabs(m)) + step * rounding[0];
    bool same = fabs(p - (double)o->p[1][e]) <= off;
    for (int k = 0; k < 2; k++) {
        double got = opt_value(r, o->after, range, k, i);
        double allowed = rounding[k] + 1e-30;
        if (r->moments[range].coded) {
            float scale =
                ((const float*)(const void*)(o->after + r->moments[range].scales[k]))[i / 256];
            allowed += opt_nearest(r, o->after, range, k, i, want[k]);
            same = same && fabs(want[k]) <= (double)scale * 1.000001;
            same = same && (k == 1 || want[k] >= -rounding[k] || got < 0.0); // the sign of m
        }
        same = same && fabs(got - want[k]) <= allowed;
    }
    return same;
}

TEST steps_store_the_nearest_codes(const test_machine* machine) {
    static opt_images o;
    static float shadow[OPT_ELEMENTS];
    static float copy[OPT_COPY_ROWS * 5];
    opt_rig r;
    if (!opt_open(&r, machine)) {
        SKIPm(test_open_reason());
    }
    o.before = (char*)calloc(1, r.bytes);
    o.after = (char*)calloc(1, r.bytes);
    ASSERT_EQ(QLORA_OK, qlora_tensor_read(r.ctx, &r.memory, o.before, r.bytes));
    ASSERT(test_read(r.ctx, &r.param, o.p[0]));
    int t = 0;
    for (int step = 0; step < OPT_STEPS; step++) {
        bool skipped = step == 3;
        opt_gradient(step, o.gradient);
        ASSERT(opt_step(&r, true, skipped, o.gradient));
        ASSERT_EQ(QLORA_OK, qlora_tensor_read(r.ctx, &r.memory, o.after, r.bytes));
        ASSERT(test_read(r.ctx, &r.param, o.p[1]));
        t += skipped ? 0 : 1;
        for (int range = 0; range < OPT_RANGES && !skipped; range++) {
            for (int64_t i = 0; i < opt_counts[range]; i++) {
                ASSERT(opt_element(&r, &o, t, range, i));
            }
        }
        if (skipped) {
            ASSERT_MEM_EQ(o.before, o.after, r.bytes);
            ASSERT_MEM_EQ(o.p[0], o.p[1], sizeof o.p[0]);
        }
        memcpy(o.before, o.after, r.bytes);
        memcpy(o.p[0], o.p[1], sizeof o.p[0]);
        static float left[OPT_ELEMENTS];
        ASSERT(test_read(r.ctx, &r.grad, left));
        for (int64_t i = 0; i < opt_counts[0]; i++) {
            ASSERT(left[opt_begins[0] + i] == 0.0f);
        }
    }
    ASSERT(test_read(r.ctx, &r.shadow, shadow));
    ASSERT(test_read(r.ctx, &r.copy, copy));
    for (int64_t i = 0; i < 5001; i++) {
        ASSERT(shadow[8 + i] == 2.0f * o.p[1][8 + i]);
        ASSERT(copy[i / 3 * 5 + i % 3] == shadow[8 + i]);
    }
    ASSERT(shadow[7] == 0.0f && shadow[8 + 5001] == 0.0f); // between the ranges
    free(o.before);
    free(o.after);
    ASSERT(opt_close(&r, machine));
    PASS();
}

// Tensors below the limit have the moments of plain AdamW, bit for bit.
TEST short_tensors_stay_in_f32(const test_machine* machine) {
    static float gradient[OPT_ELEMENTS];
    static float p[2][OPT_ELEMENTS];
    for (int coded = 0; coded < 2; coded++) {
        opt_rig r;
        if (!opt_open(&r, machine)) {
            SKIPm(test_open_reason());
        }
        for (int step = 0; step < 3; step++) {
            opt_gradient(step, gradient);
            ASSERT(opt_step(&r, coded == 1, false, gradient));
        }
        ASSERT(test_read(r.ctx, &r.param, p[coded]));
        ASSERT(opt_close(&r, machine));
    }
    ASSERT_MEM_EQ(p[0] + opt_begins[1], p[1] + opt_begins[1], 303 * sizeof(float));
    ASSERT(memcmp(p[0] + opt_begins[0], p[1] + opt_begins[0], 5001 * sizeof(float)) != 0);
    PASS();
}

// ---- noise ----

enum { NOISE_ROWS = 11, NOISE_COLS = 22, NOISE_SEQUENCES = 4 };

TEST noise_follows_its_formula(const test_machine* machine) {
    static const int32_t seqs[NOISE_SEQUENCES + 1] = {0, 3, 9, 9, 9}; // rows 9 and 10 are padding
    static const int32_t state[4] = {77, 5, 1234, 0};
    int32_t positions[NOISE_ROWS] = {0, 1, 2, 0, 1, 2, 3, 4, 5, 0, 0};
    int32_t sequences[NOISE_ROWS] = {40, 40, 40, 7, 7, 7, 7, 7, 7, 0, 0};
    qlora_ctx* ctx = test_open(machine, NULL);
    if (ctx == NULL) {
        SKIPm(test_open_reason());
    }
    float start[NOISE_ROWS * NOISE_COLS];
    float got[NOISE_ROWS * NOISE_COLS];
    test_random random = test_random_start("noise");
    test_random_fill(&random, start, NOISE_ROWS * NOISE_COLS, 1.0f);
    qlora_tensor h;
    qlora_tensor ints[4];
    const int32_t* const from[4] = {positions, sequences, seqs, state};
    const int64_t counts[4] = {NOISE_ROWS, NOISE_ROWS, NOISE_SEQUENCES + 1, 4};
    ASSERT_EQ(QLORA_OK, test_tensor(ctx, QLORA_F32, NOISE_ROWS, NOISE_COLS, start, &h));
    for (int i = 0; i < 4; i++) {
        ASSERT_EQ(QLORA_OK, qlora_tensor_create(ctx, QLORA_I32, 1, counts[i], &ints[i]));
        ASSERT_EQ(QLORA_OK, qlora_tensor_write(ctx, &ints[i], from[i], (size_t)counts[i] * 4));
    }
    const qlora__batch_rows rows = {&ints[0], &ints[1], &ints[2], &ints[3]};
    ASSERT_EQ(QLORA_OK, qlora__enter(ctx, "noise"));
    ASSERT_EQ(QLORA_OK, qlora__leave(ctx, qlora__noise(ctx, &h, &rows, 5.0f)));
    ASSERT(test_read(ctx, &h, got));
    uint64_t mixed = (((uint64_t)5 << 32) | 77) + (uint64_t)1234 * 0x9e3779b97f4a7c15u;
    const uint32_t key[2] = {(uint32_t)mixed, (uint32_t)(mixed >> 32)};
    double lengths[NOISE_ROWS] = {3, 3, 3, 6, 6, 6, 6, 6, 6, 0, 0};
    double sum = 0.0;
    for (int row = 0; row < NOISE_ROWS; row++) {
        for (int c = 0; c < NOISE_COLS; c++) {
            const uint32_t counter[4] = {(uint32_t)c / 4, (uint32_t)positions[row],
                                         (uint32_t)sequences[row], 0x80000000u};
            uint32_t words[4];
            qlora__philox(counter, key, words);
            double u = (double)(words[c % 4] >> 8) / 8388608.0 - 1.0;
            double noise = row < 9 ? u * 5.0 / sqrt(lengths[row] * NOISE_COLS) : 0.0;
            double off = (double)got[row * NOISE_COLS + c] - (double)start[row * NOISE_COLS + c];
            ASSERT(fabs(off - noise) < 1e-6);
            sum += row < 9 ? u : 0.0;
        }
    }
    ASSERT(fabs(sum / (9 * NOISE_COLS)) < 0.15); // both signs
    for (int i = 0; i < 4; i++) {
        ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, &ints[i]));
    }
    ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, &h));
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

SUITE(optimizer_suite) {
    RUN_TEST(maps_are_those_of_bitsandbytes);
    RUN_ON(TEST_ONE_EACH, steps_store_the_nearest_codes);
    RUN_ON(TEST_ONE_EACH, short_tensors_stay_in_f32);
    RUN_ON(TEST_ONE_EACH, noise_follows_its_formula);
}
