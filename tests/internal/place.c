// place.c - operands of several stacks in one launch: the same bits as weight by weight and adapter
// by adapter; and layers whose weights have no copies, placed again after the head.
#include "machines.h"
#include "model_rig.h"

SUITE_EXTERN(place_suite);

enum { PLACE_COLS = 2056, PLACE_ROWS = 136 };

static const struct {
    int64_t in;
    int count;
    struct {
        int64_t out;
        int64_t rank;
        int32_t block2;
        bool plain;
    } parts[QLORA_LINEAR_PARTS];
} place_cases[QLORA__PLACE_STACKS] = {
    {136, 3, {{72, 8, 0, false}, {24, 4, 4, false}, {40, 3, 0, true}}},
    {PLACE_COLS, 1, {{40, 12, 0, false}}},      // two blocks beside each other
    {100, 2, {{30, 0, 0, false}, {13, 5, 0, false}}}, // rows that are not aligned
    {64, 2, {{16, 0, 0, true}, {9, 0, 0, false}}}};   // no adapters

typedef struct place_stack_data {
    qlora_linear_desc linear;
    qlora_nf4 nf4[QLORA_LINEAR_PARTS];
    qlora_tensor a[QLORA_LINEAR_PARTS];
    qlora_tensor sb[QLORA_LINEAR_PARTS];
    qlora_tensor operand;
} place_stack_data;

static bool place_random(qlora_ctx* ctx, int64_t rows, int64_t cols, test_random* random,
                         qlora_tensor* out) {
    static float values[PLACE_ROWS * PLACE_COLS];
    for (int64_t i = 0; i < rows * cols; i++) {
        values[i] = (float)test_random_normal(random);
    }
    return test_tensor(ctx, QLORA_BF16, rows, cols, values, out) == QLORA_OK;
}

static bool place_make(qlora_ctx* ctx, int number, test_random* random, place_stack_data* s) {
    bool ok = true;
    memset(s, 0, sizeof *s);
    s->linear.in = place_cases[number].in;
    s->linear.count = place_cases[number].count;
    for (int i = 0; i < s->linear.count && ok; i++) {
        qlora_linear_part* p = &s->linear.parts[i];
        qlora_nf4_desc desc;
        qlora_tensor w;
        memset(&desc, 0, sizeof desc);
        p->out = place_cases[number].parts[i].out;
        p->rank = place_cases[number].parts[i].rank;
        desc.rows = p->out;
        desc.cols = s->linear.in;
        desc.block2 = place_cases[number].parts[i].block2;
        desc.plain_scales = place_cases[number].parts[i].plain;
        p->scale = 1.0f;
        ok = place_random(ctx, p->out, s->linear.in, random, &w) &&
             qlora_nf4_create(ctx, &desc, &s->nf4[i]) == QLORA_OK &&
             qlora_nf4_quantise(ctx, &w, &s->nf4[i]) == QLORA_OK &&
             qlora_tensor_destroy(ctx, &w) == QLORA_OK;
        p->nf4 = &s->nf4[i];
        if (ok && p->rank > 0) {
            ok = place_random(ctx, p->rank, s->linear.in, random, &s->a[i]) &&
                 place_random(ctx, p->out, p->rank, random, &s->sb[i]);
            p->a = &s->a[i];
            p->sb = &s->sb[i];
        }
    }
    int64_t pad = qlora_linear_pad(&s->linear);
    ok = ok && place_random(ctx, qlora_linear_out(&s->linear) + pad, s->linear.in + pad, random,
                            &s->operand);
    s->linear.operand = &s->operand;
    return ok;
}

static void place_free(qlora_ctx* ctx, place_stack_data* s) {
    for (int i = 0; i < s->linear.count; i++) {
        qlora_nf4_destroy(ctx, &s->nf4[i]);
        if (s->linear.parts[i].rank > 0) {
            qlora_tensor_destroy(ctx, &s->a[i]);
            qlora_tensor_destroy(ctx, &s->sb[i]);
        }
    }
    qlora_tensor_destroy(ctx, &s->operand);
}

// Whether the operand has what the kernels of single weights and adapters write.
static bool place_is_right(qlora_ctx* ctx, place_stack_data* s) {
    static float got[PLACE_ROWS * PLACE_COLS * 2];
    static float want[PLACE_ROWS * PLACE_COLS * 2];
    size_t bytes = (size_t)(s->operand.rows * s->operand.cols) * sizeof(float);
    return test_read(ctx, &s->operand, got) &&
           qlora_linear_place(ctx, &s->linear, QLORA_LINEAR_WEIGHTS) == QLORA_OK &&
           qlora_linear_place(ctx, &s->linear, QLORA_LINEAR_ADAPTERS) == QLORA_OK &&
           test_read(ctx, &s->operand, want) && memcmp(got, want, bytes) == 0;
}

static qlora_result place_run(qlora_ctx* ctx, const qlora_linear_desc* stacks, int count) {
    QLORA__ENTER(ctx, "place");
    return qlora__leave(ctx, qlora__linear_place_at_once(ctx, stacks, count));
}

TEST operands_are_written_at_once(const test_machine* machine) {
    static place_stack_data sets[QLORA__PLACE_STACKS];
    test_random random = test_random_start("place");
    qlora_ctx* ctx = test_open(machine, NULL);
    if (ctx == NULL) {
        SKIPm(test_open_reason());
    }
    for (int count = 1; count <= QLORA__PLACE_STACKS; count++) {
        qlora_linear_desc stacks[QLORA__PLACE_STACKS];
        for (int i = 0; i < count; i++) {
            ASSERT(place_make(ctx, (i + count) % QLORA__PLACE_STACKS, &random, &sets[i]));
            ASSERT(qlora__linear_places_at_once(ctx, &sets[i].linear));
            stacks[i] = sets[i].linear;
        }
        ASSERT_EQ(QLORA_OK, place_run(ctx, stacks, count));
        for (int i = 0; i < count; i++) {
            ASSERT(place_is_right(ctx, &sets[i]));
            uint32_t both = QLORA_LINEAR_WEIGHTS | QLORA_LINEAR_ADAPTERS;
            ASSERT_EQ(QLORA_OK, qlora_linear_place(ctx, &sets[i].linear, both));
            ASSERT(place_is_right(ctx, &sets[i]));
            place_free(ctx, &sets[i]);
        }
    }
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// The logits go far enough to overwrite the operands of the last layer, which the backward pass
// needs once more.
TEST operands_are_placed_after_the_head(const test_machine* machine) {
    outcome outcomes[2];
    for (int i = 0; i < 2; i++) {
        setup s = setup_make(machine);
        rig r;
        s.config.vocab = 1500;
        s.model.mode = QLORA_MODE_BF16;
        s.model.dropout = 0.0f;
        s.model.head_chunk = s.model.tokens;
        s.model.recompute = QLORA_CHOICE_OFF;
        s.model.cache = i == 0 ? QLORA_CHOICE_OFF : QLORA_CHOICE_ON;
        ASSERT(rig_open(&r, &s));
        const qlora_model* m = r.model;
        ASSERT(m->work.places_layers);
        ASSERT((char*)m->work.logits.data + m->work.logits.bytes >=
               (char*)m->work.operand.data + m->work.operand.bytes);
        ASSERT(rig_close(&r, &s));
        ASSERT(run_session(&s, &outcomes[i]));
        ASSERT(outcome_sane(&outcomes[i]));
    }
    ASSERT(outcome_same(&outcomes[0], &outcomes[1]));
    outcome_free(&outcomes[0]);
    outcome_free(&outcomes[1]);
    PASS();
}

// A plan of two large layers for a GPU.
static bool place_plan(qlora_ctx* ctx, int64_t tokens, long extra, qlora_plan* out) {
    qlora_model_config c;
    qlora_model_desc desc;
    qlora_plan_desc machine;
    memset(&c, 0, sizeof c);
    memset(&desc, 0, sizeof desc);
    memset(&machine, 0, sizeof machine);
    c.family = QLORA_FAMILY_LLAMA;
    c.vocab = 512;
    c.hidden = 2048;
    c.intermediate = 8192;
    c.layers = 2;
    c.heads = 32;
    c.kv_heads = 8;
    c.head_dim = 64;
    c.max_positions = 8192;
    c.rms_eps = 1e-5;
    c.rope.theta = 10000.0;
    c.rope.factor = 1.0;
    desc.config = &c;
    desc.mode = QLORA_MODE_BF16;
    desc.tokens = tokens;
    desc.cache = QLORA_CHOICE_OFF;
    machine.capability = 90;
    place_extra = extra;
    bool ok = qlora_plan_make(ctx, &desc, &machine, out) == QLORA_OK;
    place_extra = 1000;
    if (!ok) {
        printf("%s\n", qlora_last_error(ctx));
    }
    return ok;
}

// With few tokens, the operands of all stacks would be the larger part of the memory.
TEST few_tokens_take_no_more_memory(void) {
    qlora_ctx* ctx = test_open(test_machine_at(0), NULL);
    qlora_plan without;
    qlora_plan with;
    ASSERT(ctx != NULL);
    ASSERT(place_plan(ctx, 16, 0, &without) && place_plan(ctx, 16, 1, &with));
    ASSERT_EQ(without.total, with.total);
    ASSERT(place_plan(ctx, 8192, 0, &without) && place_plan(ctx, 8192, 1, &with));
    ASSERT(with.total > without.total);
    uint64_t activation = (uint64_t)8192 * 8192 * 2;
    ASSERT(with.total - without.total <= activation);
    ASSERT(test_close_ctx(test_machine_at(0), ctx));
    PASS();
}

// The run before the weights are loaded leaves out layers that, with their neighbours, are like
// earlier ones; the first, the second and the last layer run, and so do all if some are offloaded.
TEST the_dry_run_leaves_out_layers(const test_machine* machine) {
    static const char* const expected[] = {"0011110", "0001110", "0000000"};
    for (int i = 0; i < 3; i++) {
        setup s = setup_make(machine);
        rig r;
        s.config.layers = 7;
        for (int l = 0; l < 7; l++) {
            s.config.sliding[l] = i == 1 ? (uint8_t)(l % 2) : 0;
        }
        s.model.recompute = i == 2 ? QLORA_CHOICE_ON : s.model.recompute;
        s.model.offload = i == 2 ? QLORA_CHOICE_ON : s.model.offload;
        ASSERT(rig_open(&r, &s));
        for (int l = 0; l < 7; l++) {
            ASSERT_EQ(expected[i][l] == '1', r.model->layers[l].like_another);
        }
        ASSERT(rig_close(&r, &s));
    }
    PASS();
}

SUITE(place_suite) {
    RUN_TEST(few_tokens_take_no_more_memory);
    RUN_ON(TEST_ONE_GPU, operands_are_written_at_once);
    RUN_ON(TEST_ONE_GPU, operands_are_placed_after_the_head);
    RUN_ON(TEST_ONE_GPU, the_dry_run_leaves_out_layers);
}
