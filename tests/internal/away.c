// away.c - pinned host memory: large memory is registered, and the driver's where that fails.
#include "machines.h"

#include <string.h>

enum { AWAY_COUNT = 1000 };

static qlora_result away_copy(qlora_ctx* ctx, bool back, const qlora_tensor* t, void* host) {
    QLORA__ENTER(ctx, "away_copy");
    QLORA__TRY(qlora__away_open(ctx));
    QLORA__TRY(qlora__away_copy(ctx, 0, back, t, host));
    return qlora__leave(ctx, qlora__away_wait(ctx, 1));
}

// Copies numbers from the device to the end of the memory and back.
static bool away_copies(qlora_ctx* ctx, char* end) {
    float values[AWAY_COUNT];
    float got[AWAY_COUNT];
    qlora_tensor there;
    qlora_tensor back;
    for (int i = 0; i < AWAY_COUNT; i++) {
        values[i] = (float)i;
    }
    memset(got, 0, sizeof got);
    char* host = end - sizeof values;
    bool ok = qlora_tensor_create(ctx, QLORA_F32, 1, AWAY_COUNT, &there) == QLORA_OK &&
              qlora_tensor_create(ctx, QLORA_F32, 1, AWAY_COUNT, &back) == QLORA_OK &&
              qlora_tensor_write(ctx, &there, values, sizeof values) == QLORA_OK;
    ok = ok && away_copy(ctx, false, &there, host) == QLORA_OK &&
         away_copy(ctx, true, &back, host) == QLORA_OK;
    ok = ok && qlora_tensor_read(ctx, &back, got, sizeof got) == QLORA_OK &&
         memcmp(values, got, sizeof got) == 0;
    return qlora_tensor_destroy(ctx, &there) == QLORA_OK &&
           qlora_tensor_destroy(ctx, &back) == QLORA_OK && ok;
}

static qlora_result away_alloc(qlora_ctx* ctx, size_t bytes, qlora__away_memory* out) {
    QLORA__ENTER(ctx, "away_alloc");
    return qlora__leave(ctx, qlora__away_alloc(ctx, bytes, out));
}

static qlora_result away_free(qlora_ctx* ctx, qlora__away_memory* memory) {
    QLORA__ENTER(ctx, "away_free");
    qlora__away_free(ctx, memory);
    return qlora__leave(ctx, QLORA_OK);
}

TEST large_memory_is_registered(const test_machine* machine) {
    if (strcmp(machine->backend, "cpu") == 0) {
        SKIPm("needs a GPU");
    }
    static const struct {
        size_t bytes;
        const char* fails[2]; // calls that fail
        bool own;
        qlora_result result;
    } cases[] = {{QLORA__AWAY_LARGE, {NULL, NULL}, true, QLORA_OK},
                 {QLORA__AWAY_LARGE + 100, {NULL, NULL}, true, QLORA_OK},
                 {QLORA__AWAY_LARGE - 1, {NULL, NULL}, false, QLORA_OK},
                 {QLORA__AWAY_LARGE, {"cuMemHostRegister_v2", NULL}, false, QLORA_OK},
                 {QLORA__AWAY_LARGE, {"cuDeviceGetAttribute", NULL}, false, QLORA_OK},
                 {QLORA__AWAY_LARGE,
                  {"cuMemHostRegister_v2", "cuMemHostAlloc"},
                  false,
                  QLORA_ERR_MEMORY}};
    const fake_api* fake = strcmp(machine->backend, "fake") == 0 ? test_fake() : NULL;
    qlora_ctx* ctx = test_open(machine, NULL);
    ASSERTm(test_open_reason(), ctx != NULL);
    for (size_t i = 0; i < (fake != NULL ? sizeof cases / sizeof cases[0] : 3); i++) {
        qlora__away_memory memory;
        uint64_t pinned = fake != NULL ? fake->stats().live_pinned : 0;
        for (int k = 0; k < 2 && cases[i].fails[k] != NULL; k++) {
            fake->fail_at(cases[i].fails[k], 1, 2, false);
        }
        ASSERT_EQ(cases[i].result, away_alloc(ctx, cases[i].bytes, &memory));
        if (fake != NULL) {
            fake->fail_clear();
        }
        if (cases[i].result != QLORA_OK) {
            ASSERTm(qlora_last_error(ctx), strstr(qlora_last_error(ctx), "were refused") != NULL);
            ASSERT(memory.data == NULL && memory.own == NULL);
            continue;
        }
        ASSERT_EQ(cases[i].own, memory.own != NULL);
        ASSERT(fake == NULL || fake->stats().live_pinned - pinned == cases[i].bytes);
        ASSERT(away_copies(ctx, (char*)memory.data + cases[i].bytes));
        ASSERT_EQ(QLORA_OK, away_free(ctx, &memory));
        ASSERT(fake == NULL || fake->stats().live_pinned == pinned);
    }
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// Where copies are hidden depends on the shape of the model and the length of its sequences.
TEST hidden_copies_are_chosen(const test_machine* machine) {
    static const struct {
        int64_t hidden;
        int64_t intermediate;
        int64_t heads;
        int64_t kv_heads;
        int64_t head_dim;
        int64_t length;
        bool normed; // q and k, which are then copied before and after it
        int64_t window;
        bool hides[3]; // attention; with the input: its output, all of it
    } cases[] = {{896, 4864, 14, 2, 64, 512, false, 0, {false, false, false}},
                 {2048, 8192, 32, 8, 64, 2048, false, 0, {true, true, false}},
                 {1536, 8960, 12, 2, 128, 2048, false, 0, {true, true, false}},
                 {4096, 14336, 32, 8, 128, 2048, false, 0, {true, true, true}},
                 {2560, 9728, 32, 8, 128, 2048, false, 0, {true, true, false}},
                 {2560, 9728, 32, 8, 128, 2048, true, 0, {false, true, false}},
                 {896, 4864, 14, 2, 64, 32768, false, 512, {false, false, false}},
                 {896, 4864, 14, 2, 64, 32768, false, 0, {true, true, true}}};
    qlora_ctx* ctx = test_open(machine, NULL);
    ASSERTm(test_open_reason(), ctx != NULL);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        qlora_model_config c;
        qlora_model_desc desc;
        qlora_plan_desc given;
        qlora_model* m = NULL;
        memset(&c, 0, sizeof c);
        memset(&desc, 0, sizeof desc);
        memset(&given, 0, sizeof given);
        c.family = cases[i].normed       ? QLORA_FAMILY_QWEN3
                   : cases[i].window > 0 ? QLORA_FAMILY_MISTRAL
                                         : QLORA_FAMILY_LLAMA;
        c.qk_norm = cases[i].normed;
        c.window = cases[i].window;
        c.sliding[0] = cases[i].window > 0 ? 1 : 0;
        c.vocab = 64;
        c.hidden = cases[i].hidden;
        c.intermediate = cases[i].intermediate;
        c.layers = 1;
        c.heads = cases[i].heads;
        c.kv_heads = cases[i].kv_heads;
        c.head_dim = cases[i].head_dim;
        c.rms_eps = 1e-5;
        c.rope.theta = 10000.0;
        desc.config = &c;
        desc.tokens = cases[i].length;
        desc.max_sequences = 1;
        given.capability = 90;
        ASSERT_EQm(qlora_last_error(ctx), QLORA_OK, qlora__plan_build(ctx, &desc, &given, &m));
        int64_t o = cases[i].heads * cases[i].head_dim;
        int64_t all = qlora__attention_elements(&m->plan.config);
        ASSERT_EQ((cases[i].normed ? 3 : 2) * (o + cases[i].kv_heads * cases[i].head_dim), all);
        ASSERT_EQ(cases[i].hides[0], qlora__copies_hide(m, all, 10000));
        ASSERT_EQ(cases[i].hides[1], qlora__copies_hide(m, c.hidden + o, 10000));
        ASSERT_EQ(cases[i].hides[2], qlora__copies_hide(m, c.hidden + all, 10000));
        ASSERT(qlora__copies_hide(m, c.hidden + all, 0));
        qlora__model_free(m);
    }
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// Layers whose attention is on the device are spread among the others, whose turns follow each
// other. Recomputed layers all have turns.
TEST turns_are_spread(void) {
    enum { MOST = 16 };
    static const struct {
        int64_t layers;
        int64_t away;
        int64_t recompute;
        int64_t own[MOST]; // then 0
    } cases[] = {{16, 14, 0, {5, 10}},     {16, 16, 0, {0}}, {7, 5, 0, {2, 4}},
                 {8, 3, 0, {1, 2, 4, 5, 6}}, {5, 3, 5, {0}}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        static qlora__layer layers[MOST];
        static qlora_model m;
        int64_t number = 0;
        int owns = 0;
        m.layers = layers;
        m.plan.config.layers = cases[i].layers;
        m.plan.offloaded_attention = cases[i].away;
        m.plan.recompute_layers = cases[i].recompute;
        qlora__plan_offload_slots(&m);
        for (int64_t l = 0; l < cases[i].layers; l++) {
            bool own = cases[i].own[owns] > 0 && l == cases[i].own[owns];
            long long want = own ? -1 : (long long)number;
            ASSERT_EQ_FMT(want, (long long)layers[l].offload_number, "%lld");
            number += own ? 0 : 1;
            owns += own ? 1 : 0;
        }
        ASSERT_EQ(cases[i].recompute > 0 ? cases[i].layers : cases[i].away, number);
    }
    PASS();
}

SUITE(away_suite) {
    RUN_TEST(turns_are_spread);
    RUN_ON(TEST_CPU, hidden_copies_are_chosen);
    RUN_ON(TEST_ONE_EACH, large_memory_is_registered);
}
