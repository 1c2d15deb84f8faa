// head.c - a head that is kept in 4 bits: the same numbers as with its dequantised copy, in any
// slices; what the plan counts, what a checkpoint remembers, and what is refused.
#include "machines.h"
#include "model_rig.h"

#define HEAD_ASSERT_OK(R, CALL) ASSERT_EQm(qlora_last_error((R).ctx), QLORA_OK, (CALL))

enum { HEAD_VOCAB = 330, HEAD_IDS = 16 };

static setup head_setup(const test_machine* machine, qlora_mode mode) {
    setup s = setup_make(machine);
    s.config.vocab = HEAD_VOCAB; // several slices, the last one shorter
    s.config.logits_divisor = 3.0;
    s.config.family = QLORA_FAMILY_GRANITE;
    s.config.qk_norm = false;
    s.model.mode = mode;
    s.model.head = QLORA_HEAD_NF4;
    s.model.dropout = 0.0f;
    return s;
}

static float head_sum_of_squares(const float* a, const float* b, size_t n) {
    double sum = 0.0;
    for (size_t i = 0; i < n; i++) {
        double d = (double)a[i] - (b != NULL ? (double)b[i] : 0.0);
        sum += d * d;
    }
    return (float)sum;
}

// Relative difference of two vectors; a NaN is larger than any limit.
static float head_difference(const float* a, const float* b, size_t n) {
    float all = head_sum_of_squares(a, NULL, n);
    float off = head_sum_of_squares(a, b, n);
    return all > 0.0f && off >= 0.0f ? sqrtf(off / all) : 1e30f;
}

// Logits, then the gradients of a micro-batch; the caller frees.
static float* head_numbers(rig* r, const data* d, size_t* count, double* loss) {
    size_t logits = (size_t)HEAD_IDS * HEAD_VOCAB;
    size_t n = 0;
    qlora_train_info info;
    float* gradients = NULL;
    float* all = (float*)malloc(logits * sizeof *all);
    bool ok = all != NULL && qlora_eval_logits(r->model, &d->batch, all) == QLORA_OK &&
              qlora_train_micro(r->trainer, &d->batch, qlora_batch_labels(&d->batch)) == QLORA_OK &&
              (gradients = rig_read(r, true, &n)) != NULL &&
              qlora_train_update(r->trainer) == QLORA_OK &&
              qlora_train_query(r->trainer, &info) == QLORA_OK;
    float* grown = ok ? (float*)realloc(all, (logits + n) * sizeof *all) : NULL;
    if (grown == NULL) {
        free(all);
        free(gradients);
        return NULL;
    }
    memcpy(grown + logits, gradients, n * sizeof *grown);
    free(gradients);
    *count = n;
    *loss = info.loss;
    return grown;
}

// A model with a 4-bit head computes what a model computes whose head has the dequantised values.
static bool head_is_its_copy(const setup* s, float limit) {
    static const int32_t lengths[2] = {9, HEAD_IDS - 9};
    setup full = *s;
    rig r[2];
    data d;
    size_t count[2] = {0, 0};
    double loss[2] = {0.0, 0.0};
    float* numbers[2];
    memset(r, 0, sizeof r);
    full.model.head = QLORA_HEAD_FULL;
    data_make(&d, "head", lengths, 2);
    for (int i = 0; i < HEAD_IDS; i++) {
        d.ids[i] = (d.ids[i] * 37 + i) % HEAD_VOCAB;
        d.labels[i] = d.ids[i];
    }
    bool ok = rig_open(&r[0], s);
    r[1].ctx = r[0].ctx;
    ok = ok && rig_start(&r[1], &full) && rig_stir(&r[1]) &&
         qlora_nf4_dequantise(r[0].ctx, &r[0].model->base.head_nf4, &r[1].model->base.head,
                              r[0].model->compute == QLORA_F32) == QLORA_OK;
    for (int i = 0; i < 2; i++) {
        numbers[i] = ok ? head_numbers(&r[i], &d, &count[i], &loss[i]) : NULL;
    }
    ok = ok && numbers[0] != NULL && numbers[1] != NULL && count[0] == count[1];
    size_t logits = (size_t)HEAD_IDS * HEAD_VOCAB;
    float first = ok ? head_difference(numbers[1], numbers[0], logits) : 1e30f;
    float second =
        ok ? head_difference(numbers[1] + logits, numbers[0] + logits, count[0]) : 1e30f;
    bool same = first <= limit && second <= limit && fabs(loss[0] - loss[1]) <= (double)limit;
    if (!same) {
        fprintf(stderr, "logits differ by %g, gradients by %g, losses %.9g and %.9g: %s\n",
                (double)first, (double)second, loss[0], loss[1], qlora_last_error(r[0].ctx));
    }
    free(numbers[0]);
    free(numbers[1]);
    ok = qlora_trainer_destroy(r[1].trainer) == QLORA_OK &&
         qlora_model_close(r[1].model) == QLORA_OK;
    return rig_close(&r[0], s) && ok && same;
}

TEST four_bit_heads_are_their_copies(const test_machine* machine) {
    bool gpu = strcmp(machine->backend, "cpu") != 0;
    setup s = head_setup(machine, QLORA_MODE_F32);
    ASSERT(head_is_its_copy(&s, 2e-6f));
    s.model.tile = 5;
    s.model.recompute = QLORA_CHOICE_ON;
    ASSERT(head_is_its_copy(&s, 2e-6f));
    s = head_setup(machine, QLORA_MODE_BF16);
    s.config.logits_divisor = 1.0;
    ASSERT(!gpu || machine->cc < 80 || head_is_its_copy(&s, 4e-3f));
    PASS();
}

// The operand has room for the whole head, and the logits need more memory than s before it.
TEST four_bit_heads_have_the_operand(const test_machine* machine) {
    setup s = head_setup(machine, QLORA_MODE_F32);
    s.config.intermediate = 200;
    s.model.head_chunk = s.model.tokens;
    ASSERT(head_is_its_copy(&s, 2e-6f));
    PASS();
}

// Scratch that holds fewer rows and columns of the weight than the room does.
static void head_little_scratch(qlora_ctx_desc* desc) {
    desc->scratch_bytes = (size_t)192 << 10;
}

// The products of many chunks in one call leave the scratch as it was.
TEST four_bit_heads_return_scratch(const test_machine* machine) {
    setup s = head_setup(machine, QLORA_MODE_F32);
    s.change = head_little_scratch;
    s.model.head_chunk = 1;
    ASSERT(head_is_its_copy(&s, 2e-6f));
    PASS();
}

static qlora_result head_multiply(qlora_ctx* ctx, const qlora__coded_way* way,
                                  const qlora_tensor* x, const qlora_nf4* w,
                                  const qlora_tensor* y) {
    QLORA__ENTER(ctx, "head_multiply"); // frees the scratch on return
    return qlora__leave(ctx, qlora__nf4_multiply(ctx, way, x, w, y));
}

// Products with weights that are dequantised in a given room, in slices, are those with scratch.
TEST rooms_are_used(const test_machine* machine) {
    enum { N = 512, K = 256, M = 40, ROOM = 320 * K }; // more rows than a fused product takes
    qlora_ctx* ctx = test_open(machine, head_little_scratch);
    test_random random = test_random_start("room");
    static float values[N * K];
    static float got[2][M * N];
    qlora_tensor w;
    qlora_tensor x[2];
    qlora_tensor y[2];
    qlora_tensor room;
    qlora_nf4 nf4;
    qlora_nf4_desc desc;
    ASSERT(ctx != NULL);
    memset(&desc, 0, sizeof desc);
    desc.rows = N;
    desc.cols = K;
    test_random_fill(&random, values, N * K, 1.0f);
    ASSERT_EQ(QLORA_OK, test_tensor(ctx, QLORA_F32, N, K, values, &w));
    ASSERT_EQ(QLORA_OK, test_tensor(ctx, QLORA_F32, M, K, values, &x[0]));
    ASSERT_EQ(QLORA_OK, test_tensor(ctx, QLORA_F32, M, N, values, &x[1]));
    ASSERT_EQ(QLORA_OK, qlora_tensor_create(ctx, QLORA_F32, M, N, &y[0]));
    ASSERT_EQ(QLORA_OK, qlora_tensor_create(ctx, QLORA_F32, M, K, &y[1]));
    ASSERT_EQ(QLORA_OK, qlora_tensor_create(ctx, QLORA_F32, 1, ROOM, &room));
    ASSERT_EQ(QLORA_OK, qlora_nf4_create(ctx, &desc, &nf4));
    ASSERT_EQ(QLORA_OK, qlora_nf4_quantise(ctx, &w, &nf4));
    for (int backward = 0; backward < 2; backward++) {
        size_t n = (size_t)(backward != 0 ? M * K : M * N);
        ASSERT_EQ(QLORA_OK, qlora_tensor_zero(ctx, &room));
        for (int i = 0; i < 2; i++) {
            const qlora__coded_way way = {QLORA_MATH_F32, backward != 0, 0, 0.25f,
                                          i == 0 ? NULL : &room};
            ASSERT_EQ(QLORA_OK, head_multiply(ctx, &way, &x[backward], &nf4, &y[backward]));
            ASSERT_EQ(QLORA_OK, qlora_tensor_read(ctx, &y[backward], got[i], n * sizeof(float)));
        }
        ASSERT(head_difference(got[0], got[1], n) <= 1e-6f);
        ASSERT_EQ(QLORA_OK, qlora_tensor_read(ctx, &room, values, ROOM * sizeof(float)));
        bool used = head_sum_of_squares(values, NULL, ROOM) > 0.0f;
        ASSERT_EQ(strcmp(machine->backend, "cpu") != 0 || ctx->cpu->gemm == NULL, used);
    }
    qlora_tensor* all[] = {&w, &x[0], &x[1], &y[0], &y[1], &room};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, all[i]));
    }
    ASSERT_EQ(QLORA_OK, qlora_nf4_destroy(ctx, &nf4));
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// The bits do not depend on graphs or the order of blocks.
TEST four_bit_heads_are_repeatable(const test_machine* machine) {
    setup s = head_setup(machine, QLORA_MODE_F32);
    outcome expected;
    outcome got;
    s.model.recompute = QLORA_CHOICE_ON;
    ASSERT(run_session(&s, &expected));
    s.machine.order = FAKE_REVERSE;
    s.train.eager = true;
    s.eval_between = true;
    ASSERT(run_session(&s, &got));
    ASSERT(outcome_same(&expected, &got));
    outcome_free(&got);
    outcome_free(&expected);
    PASS();
}

// 4 bits and an f32 per 64 values instead of 16 bits.
TEST four_bit_heads_are_planned(const test_machine* machine) {
    setup s = head_setup(machine, QLORA_MODE_AUTO);
    rig r;
    qlora_plan plans[2];
    qlora_plan_desc budget;
    memset(&r, 0, sizeof r);
    memset(&budget, 0, sizeof budget);
    budget.capability = 90;
    r.ctx = test_open(machine, NULL);
    ASSERT(r.ctx != NULL);
    s.config.vocab = 128256;
    s.config.hidden = 256;
    s.model.config = &s.config;
    for (int i = 0; i < 2; i++) {
        s.model.head = i == 0 ? QLORA_HEAD_FULL : QLORA_HEAD_NF4;
        HEAD_ASSERT_OK(r, qlora_plan_make(r.ctx, &s.model, &budget, &plans[i]));
    }
    uint64_t n = (uint64_t)128256 * 256;
    qlora_nf4_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.rows = 128256;
    desc.cols = 256;
    desc.plain_scales = true;
    size_t bytes = qlora_nf4_bytes(&desc);
    ASSERT(bytes >= n / 2 + n / 16 && bytes < n / 2 + n / 16 + 4096);
    ASSERT_EQ_FMT((unsigned long long)(n * 2 - qlora__align_up(bytes, 256)),
                  (unsigned long long)(plans[0].base - plans[1].base), "%llu");
    s.model.plan = &plans[0]; // another head is another model
    qlora_result result = qlora_model_open(r.ctx, &s.model, &r.model);
    ASSERT(result != QLORA_OK);
    ASSERT(test_close_ctx(machine, r.ctx));
    PASS();
}

TEST four_bit_heads_are_refused(const test_machine* machine) {
    static const int32_t row = 3;
    static const struct {
        int head;
        bool tied;
        uint32_t save;
        bool rows;
        const char* expected; // NULL: accepted
    } cases[] = {
        {1, false, 0, false, NULL},
        {1, false, QLORA_SAVE_EMBED, false, NULL},
        {1, false, 0, true, NULL}, // of the embedding only
        {1, true, 0, false, "desc.head is NF4, but the head of this model is its embedding"},
        {1, false, QLORA_SAVE_HEAD, false, "desc.head is NF4, but the head of this model is tra"},
        {1, true, QLORA_SAVE_EMBED, false, "desc.head is NF4, but the head of this model is tra"},
        {1, true, 0, true, "desc.head is NF4, but the head of this model is trained"},
        {2, false, 0, false, "desc.head is 2"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        setup s = head_setup(machine, QLORA_MODE_F32);
        qlora_plan p;
        s.model.head = (qlora_head_format)cases[i].head;
        s.config.tied = cases[i].tied;
        s.model.save_modules = cases[i].save;
        s.model.token_rows = cases[i].rows ? &row : NULL;
        s.model.token_row_count = cases[i].rows ? 1 : 0;
        s.model.config = &s.config;
        qlora_ctx* ctx = test_open(machine, NULL);
        ASSERT(ctx != NULL);
        qlora_result r = qlora_plan_make(ctx, &s.model, NULL, &p);
        ASSERT_EQm(qlora_last_error(ctx), cases[i].expected == NULL, r == QLORA_OK);
        const char* said = qlora_last_error(ctx);
        ASSERTm(said, cases[i].expected == NULL || strstr(said, cases[i].expected) != NULL);
        ASSERT(test_close_ctx(machine, ctx));
    }
    PASS();
}

// A run goes on with the head that it began with.
TEST four_bit_heads_are_remembered(const test_machine* machine) {
    char dir[] = "build/test-head-XXXXXX";
    setup s = head_setup(machine, QLORA_MODE_F32);
    rig r;
    ASSERT(mkdtemp(dir) != NULL);
    ASSERT(rig_open(&r, &s));
    HEAD_ASSERT_OK(r, qlora_checkpoint_save(r.trainer, dir, NULL, 0));
    HEAD_ASSERT_OK(r, qlora_checkpoint_load(r.trainer, dir, NULL, NULL));
    ASSERT(rig_close(&r, &s));
    s.model.head = QLORA_HEAD_FULL;
    ASSERT(rig_open(&r, &s));
    ASSERT_EQ(QLORA_ERR_STATE, qlora_checkpoint_load(r.trainer, dir, NULL, NULL));
    ASSERTm(qlora_last_error(r.ctx),
            strstr(qlora_last_error(r.ctx), "was saved with head = 1, but this trainer has 0") !=
                NULL);
    ASSERT(rig_close(&r, &s));
    PASS();
}

SUITE(head_suite) {
    RUN_ON(TEST_ONE_EACH, rooms_are_used);
    RUN_ON(TEST_ONE_EACH, four_bit_heads_are_their_copies);
    RUN_ON(TEST_ONE_EACH, four_bit_heads_have_the_operand);
    RUN_ON(TEST_ONE_EACH, four_bit_heads_return_scratch);
    RUN_ON(TEST_ONE_EACH, four_bit_heads_are_repeatable);
    RUN_ON(TEST_CPU, four_bit_heads_are_planned);
    RUN_ON(TEST_CPU, four_bit_heads_are_refused);
    RUN_ON(TEST_CPU, four_bit_heads_are_remembered);
}
