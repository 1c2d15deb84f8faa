// long.c - what long sequences need: inputs of layers in host memory (the same bits), everything
// but attention in tiles of tokens (the same numbers), plans that choose both, and clean failures.
#include "model_rig.h"

#define ASSERT_OK(R, CALL) ASSERT_EQm(qlora_last_error((R).ctx), QLORA_OK, (CALL))

enum { LAYERS = 3, TILE = 7 };

// Small, because the interpreter runs it many times.
static setup long_setup(const test_machine* machine, qlora_mode mode, bool dropout) {
    setup s = setup_make(machine);
    s.config.layers = LAYERS;
    s.config.hidden = 16;
    s.config.intermediate = 16;
    s.config.heads = 2;
    s.config.kv_heads = 1;
    s.config.qk_norm = false;
    s.config.family = QLORA_FAMILY_LLAMA;
    s.model.rank = 2;
    s.model.head_chunk = 24;
    s.model.train_norms = dropout;
    s.model.mode = mode;
    s.model.dropout = dropout ? 0.1f : 0.0f; // without it, the second stream is in use as well
    s.model.recompute = QLORA_CHOICE_ON;
    s.train.require_graph = strcmp(machine->backend, "cpu") != 0; // no silent fallback
    return s;
}

// ---- the same bits

static void vary_eager(setup* s) {
    s->machine.order = FAKE_RANDOM;
    s->train.eager = true;
    s->train.require_graph = false;
}

static void vary_reverse(setup* s) {
    s->machine.order = FAKE_REVERSE;
    s->eval_between = true;
}

static void vary_random(setup* s) {
    s->machine.order = FAKE_RANDOM;
}

static void vary_cached(setup* s) {
    s->model.cache = QLORA_CHOICE_ON;
    s->machine.order = FAKE_RANDOM;
}

typedef struct way {
    const char* name;
    void (*vary)(setup* s);
} way;

static const way ways[] = {{"reverse", vary_reverse}, // the most likely to fail comes first
                           {"random, cached", vary_cached},
                           {"random", vary_random},
                           {"eager", vary_eager}};

// Way number `i` with the settings of `s` gives the bits of `expected`.
static bool way_is_same(const setup* s, int i, const outcome* expected) {
    setup varied = *s;
    outcome got;
    ways[i].vary(&varied);
    bool same = run_session(&varied, &got) && outcome_same(expected, &got);
    if (!same) {
        fprintf(stderr, "%s\n", ways[i].name);
    }
    outcome_free(&got);
    return same;
}

TEST offload_gives_the_same_bits(const test_machine* machine) {
    if (strcmp(machine->backend, "cpu") == 0) {
        SKIPm("needs a GPU");
    }
    setup s = long_setup(machine, QLORA_MODE_F32, false);
    outcome expected;
    ASSERT(run_session(&s, &expected));
    s.model.offload = QLORA_CHOICE_ON;
    ASSERT(way_is_same(&s, 0, &expected));
    ASSERT(test_brief() || way_is_same(&s, 1, &expected));
    outcome_free(&expected);
    PASS();
}

// Groups of layers of which only the first has its input on the host: several, one that ends with
// the model, and one that begins with the last layer.
TEST groups_give_the_same_bits(const test_machine* machine) {
    if (strcmp(machine->backend, "cpu") == 0) {
        SKIPm("needs a GPU");
    }
    bool few = test_checked(machine);
    setup s = long_setup(machine, QLORA_MODE_F32, false);
    outcome expected;
    s.config.layers = few ? 3 : 5;
    ASSERT(run_session(&s, &expected));
    s.model.offload = QLORA_CHOICE_ON;
    for (int64_t every = 2; every <= (few ? 2 : 4); every++) {
        s.every = every;
        ASSERT(way_is_same(&s, every == 3 ? 2 : 0, &expected));
    }
    outcome_free(&expected);
    s = long_setup(machine, QLORA_MODE_BF16, true);
    s.config.layers = few ? 3 : 5;
    s.model.tile = TILE;
    ASSERT(run_session(&s, &expected));
    s.model.offload = QLORA_CHOICE_ON;
    s.every = few ? 2 : 4;
    ASSERT(way_is_same(&s, 3, &expected));
    outcome_free(&expected);
    PASS();
}

// A plan that keeps attention on the host, with q, k and v or without.
static bool plan_attention(const setup* s, bool heads, uint64_t* bytes) {
    setup varied = *s;
    qlora_plan p;
    qlora_plan_desc budget;
    qlora_ctx* ctx = test_open(&s->machine, NULL);
    memset(&budget, 0, sizeof budget);
    varied.model.config = &varied.config;
    bool ok = ctx != NULL && qlora_plan_make(ctx, &varied.model, &budget, &p) == QLORA_OK &&
              p.attention_layers == s->config.layers && p.heads_layers == s->config.layers;
    budget.bytes = p.total + p.context - 1;
    if (ok && !heads) {
        uint64_t host = p.host;
        ok = qlora_plan_make(ctx, &varied.model, &budget, &p) == QLORA_OK &&
             p.attention_layers == s->config.layers && p.heads_layers == 0 && p.host < host;
    }
    *bytes = p.total + p.context;
    return test_close_ctx(&s->machine, ctx) && ok;
}

// What layers keep of attention goes to the host with their inputs: all of it in all layers, in the
// first ones, or without q, k and v.
TEST kept_attention_gives_the_same_bits(const test_machine* machine) {
    static const struct {
        qlora_mode mode;
        bool dropout;
        bool normed;
        int64_t tile;
        int64_t attention; // 0 = all
        int64_t heads;
        int way;
    } cases[] = {{QLORA_MODE_F32, false, false, 0, 0, 0, 2},
                 {QLORA_MODE_BF16, false, true, 0, 3, 2, 0},
                 {QLORA_MODE_BF16, false, false, TILE, 4, 4, 0},
                 {QLORA_MODE_BF16, true, false, 0, 0, 0, 3},
                 {QLORA_MODE_BF16, false, false, 0, 0, -1, 0}};
    if (strcmp(machine->backend, "cpu") == 0) {
        SKIPm("needs a GPU");
    }
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        if (test_checked(machine) && i % 2 == 0) {
            continue;
        }
        setup s = long_setup(machine, cases[i].mode, cases[i].dropout);
        outcome expected;
        s.config.layers = 5;
        s.config.qk_norm = cases[i].normed;
        s.config.family = cases[i].normed ? QLORA_FAMILY_QWEN3 : QLORA_FAMILY_LLAMA;
        s.model.tile = cases[i].tile;
        ASSERT(run_session(&s, &expected));
        s.model.recompute = QLORA_CHOICE_AUTO;
        s.model.offload = QLORA_CHOICE_ON;
        ASSERT(plan_attention(&s, cases[i].heads >= 0, &s.budget));
        s.attention = cases[i].attention;
        s.heads = cases[i].heads > 0 ? cases[i].heads : 0;
        ASSERT(way_is_same(&s, cases[i].way, &expected));
        outcome_free(&expected);
    }
    PASS();
}

// The smallest budget with copies of all weights, which fit with attention on the host, that of
// `others` layers excepted.
static bool plan_away(const setup* s, int64_t others, uint64_t* bytes) {
    setup varied = *s;
    qlora_plan p;
    qlora_plan_desc budget;
    qlora_ctx* ctx = test_open(&s->machine, NULL);
    memset(&budget, 0, sizeof budget);
    varied.model.config = &varied.config;
    bool ok = ctx != NULL && qlora_plan_make(ctx, &varied.model, &budget, &p) == QLORA_OK &&
              p.cached_layers == s->config.layers && p.offloaded_attention == 0 && p.host == 0;
    budget.bytes = p.total + p.context - 1;
    while (ok) {
        ok = qlora_plan_make(ctx, &varied.model, &budget, &p) == QLORA_OK;
        if (!ok || p.cached_layers < s->config.layers) {
            break;
        }
        ok = p.offloaded_attention >= 3 && p.host > 0 && p.recompute_layers == 0 &&
             p.offloaded_layers == 0;
        budget.bytes = p.total + p.context;
        *bytes = p.offloaded_attention == s->config.layers - others ? budget.bytes : *bytes;
        budget.bytes--;
    }
    budget.bytes = *bytes;
    ok = ok && qlora_plan_make(ctx, &varied.model, &budget, &p) == QLORA_OK &&
         p.offloaded_attention == s->config.layers - others;
    return test_close_ctx(&s->machine, ctx) && ok;
}

// Layers that are not recomputed, too, with layers among them whose attention is on the device.
TEST attention_on_the_host_gives_the_same_bits(const test_machine* machine) {
    if (strcmp(machine->backend, "cpu") == 0) {
        SKIPm("needs a GPU");
    }
    for (int i = 0; i < 6; i++) {
        if (test_checked(machine) && i % 2 == 0) {
            continue;
        }
        setup s = long_setup(machine, i == 0 ? QLORA_MODE_F32 : QLORA_MODE_BF16, i == 2);
        outcome expected;
        s.config.layers = 7;
        s.config.qk_norm = i == 1;
        s.config.family = i == 1 ? QLORA_FAMILY_QWEN3 : QLORA_FAMILY_LLAMA;
        s.model.recompute = i == 3 ? QLORA_CHOICE_OFF : QLORA_CHOICE_AUTO;
        s.model.cache = QLORA_CHOICE_AUTO;
        s.model.targets = i == 4 ? QLORA_TARGET_Q | QLORA_TARGET_O : 0;
        ASSERT(run_session(&s, &expected));
        ASSERT(plan_away(&s, i % 3, &s.budget));
        ASSERT(way_is_same(&s, i == 0 ? 2 : i == 2 ? 3 : 0, &expected));
        outcome_free(&expected);
    }
    PASS();
}

// In FP8 mode, kernels write codes beside what is copied.
TEST fp8_attention_on_the_host_gives_the_same_bits(const test_machine* machine) {
    if (!test_has_fp8(machine)) {
        SKIPm("FP8 needs compute capability 9.0 and cuBLASLt");
    }
    for (int64_t others = 0; others < (test_checked(machine) ? 1 : 3); others++) {
        setup s = long_setup(machine, QLORA_MODE_FP8, false);
        outcome expected;
        s.config.layers = test_checked(machine) ? 3 : 6;
        s.config.head_dim = 16;
        s.model.rank = 8;
        s.model.recompute = QLORA_CHOICE_AUTO;
        s.model.cache = QLORA_CHOICE_AUTO;
        ASSERT(run_session(&s, &expected));
        ASSERT(plan_away(&s, others, &s.budget));
        ASSERT(way_is_same(&s, others == 1 ? 2 : 0, &expected));
        outcome_free(&expected);
    }
    PASS();
}

static bool numbers_are_same(const outcome* a, const outcome* b) {
    double sum = 0.0;
    double difference = 0.0;
    for (size_t i = 0; i < a->count && a->count == b->count; i++) {
        double d = (double)a->values[i] - (double)b->values[i];
        sum += (double)a->values[i] * (double)a->values[i];
        difference += d * d;
    }
    return sum > 0.0 && difference <= 1e-8 * sum &&
           fabs(a->losses[0] - b->losses[0]) <= 1e-6 * a->losses[0] &&
           fabs(a->eval - b->eval) <= 1e-4 * a->eval;
}

// Tiles of any size, also of one token and of more than all, give the numbers of all tokens at
// once; a tile gives its own bits by any route, with inputs on the host or not.
TEST tiles_give_the_same_numbers(const test_machine* machine) {
    static const int64_t tiles[] = {TILE, 16, TOKENS, 1, 1000};
    bool gpu = strcmp(machine->backend, "cpu") != 0;
    setup s = long_setup(machine, QLORA_MODE_F32, false);
    outcome expected;
    ASSERT(run_session(&s, &expected));
    for (int i = 0; i < (gpu ? 1 : 5); i++) {
        outcome got;
        s.model.tile = tiles[i];
        ASSERT(run_session(&s, &got));
        ASSERT(numbers_are_same(&expected, &got));
        s.model.offload = gpu ? QLORA_CHOICE_ON : QLORA_CHOICE_AUTO;
        ASSERT(way_is_same(&s, 0, &got));
        ASSERT(test_brief() || way_is_same(&s, 2, &got));
        outcome_free(&got);
    }
    outcome_free(&expected);
    PASS();
}

// The same with dropout, trained norms and 16 bits.
TEST bf16_tiles_give_the_same_bits(const test_machine* machine) {
    if (strcmp(machine->backend, "cpu") == 0) {
        SKIPm("needs a GPU");
    }
    setup s = long_setup(machine, QLORA_MODE_BF16, true);
    outcome expected;
    s.model.tile = TILE;
    ASSERT(run_session(&s, &expected));
    s.model.offload = QLORA_CHOICE_ON;
    ASSERT(way_is_same(&s, 3, &expected));
    outcome_free(&expected);
    PASS();
}

// ---- 4,096 tokens

enum { MANY = 4096, MANY_TILE = 1024 };

// As little as possible beside the tokens.
static setup many_setup(const test_machine* machine) {
    setup s = long_setup(machine, QLORA_MODE_F32, false);
    s.config.layers = 2;
    s.config.hidden = 8;
    s.config.intermediate = 8;
    s.config.heads = 1;
    s.config.head_dim = 2;
    s.config.max_positions = MANY;
    bool is_fake = strcmp(machine->backend, "fake") == 0;
    s.config.window = 64; // where it is interpreted: neither tiles nor copies change attention
    s.config.sliding[0] = s.config.sliding[1] = is_fake ? 1 : 0;
    s.model.rank = 1;
    s.model.tokens = MANY;
    s.model.max_sequences = 1;
    s.model.head_chunk = MANY;
    return s;
}

// Loss and gradients of one sequence.
static bool many_run(const setup* s, outcome* out) {
    static int32_t ids[MANY];
    static const int32_t length = MANY;
    test_random random = test_random_start("many");
    qlora_batch batch;
    qlora_train_info info;
    rig r;
    memset(out, 0, sizeof *out);
    memset(&batch, 0, sizeof batch);
    for (int i = 0; i < MANY; i++) {
        ids[i] = (int32_t)test_random_below(&random, VOCAB);
    }
    batch.ids = ids;
    batch.labels = ids;
    batch.lengths = &length;
    batch.count = 1;
    bool ok = rig_open(&r, s) &&
              qlora_train_micro(r.trainer, &batch, qlora_batch_labels(&batch)) == QLORA_OK &&
              (out->values = rig_read(&r, true, &out->count)) != NULL &&
              qlora_train_update(r.trainer) == QLORA_OK &&
              qlora_train_query(r.trainer, &info) == QLORA_OK;
    out->losses[0] = ok ? info.loss : 0.0;
    out->norms[0] = ok ? info.grad_norm : 0.0f;
    return (ok || rig_says(&r, "4,096 tokens")) && rig_close(&r, s);
}

// Inputs on the host give the same bits, tiles the same numbers, in a sequence of 4,096 tokens.
TEST many_tokens_give_the_same(const test_machine* machine) {
    bool gpu = strcmp(machine->backend, "cpu") != 0;
    if (test_brief()) {
        SKIPm("takes long");
    }
    setup s = many_setup(machine);
    outcome all;
    outcome tiled;
    outcome away;
    ASSERT(many_run(&s, &all));
    ASSERT(all.losses[0] > 1.0 && all.count > 0);
    s.model.tile = MANY_TILE;
    ASSERT(many_run(&s, &tiled));
    ASSERT(numbers_are_same(&all, &tiled));
    for (int i = 0; i < 2 && gpu; i++) {
        s.model.offload = QLORA_CHOICE_ON;
        s.model.tile = i == 0 ? 0 : MANY_TILE;
        ASSERT(many_run(&s, &away));
        ASSERT(outcome_same(i == 0 ? &all : &tiled, &away));
        outcome_free(&away);
    }
    outcome_free(&all);
    outcome_free(&tiled);
    PASS();
}

// ---- plans

static qlora_model_config llama_8b(void) {
    qlora_model_config c;
    memset(&c, 0, sizeof c);
    c.family = QLORA_FAMILY_LLAMA;
    c.vocab = 128256;
    c.hidden = 4096;
    c.intermediate = 14336;
    c.layers = 32;
    c.heads = 32;
    c.kv_heads = 8;
    c.head_dim = 128;
    c.rms_eps = 1e-5;
    c.rope.theta = 500000.0;
    return c;
}

static qlora_result plan_8b(qlora_ctx* ctx, int64_t tokens, int32_t rank, double bytes,
                            qlora_choice offload, qlora_plan* out) {
    qlora_model_config c = llama_8b();
    qlora_model_desc m;
    qlora_plan_desc budget;
    memset(&m, 0, sizeof m);
    memset(&budget, 0, sizeof budget);
    m.config = &c;
    m.tokens = tokens;
    m.max_sequences = 1;
    m.rank = rank;
    m.offload = offload;
    budget.bytes = (uint64_t)bytes;
    budget.capability = 90;
    return qlora_plan_make(ctx, &m, &budget, out);
}

// What the plan of an 8B model must reach; 0.5 GB of each card are the driver's.
TEST long_sequences_fit(const test_machine* machine) {
    static const struct {
        int64_t tokens;
        double gigabytes;
    } goals[] = {{6000, 8}, {40000, 12}, {80000, 16}, {160000, 24}, {380000, 48}, {700000, 80}};
    qlora_ctx* ctx = test_open(machine, NULL);
    ASSERT(ctx != NULL);
    qlora_plan p;
    for (size_t i = 0; i < sizeof goals / sizeof goals[0]; i++) {
        double bytes = (goals[i].gigabytes - 0.5) * 1e9;
        qlora_result r = plan_8b(ctx, goals[i].tokens, 32, bytes, QLORA_CHOICE_AUTO, &p);
        ASSERT_EQm(qlora_last_error(ctx), QLORA_OK, r);
        ASSERT((double)(p.total + p.context) <= bytes);
        // 8 KiB per token and layer but the last, and the embedding
        uint64_t inputs = (uint64_t)p.offloaded_layers * (uint64_t)goals[i].tokens * 8192;
        uint64_t embedding = p.offloaded_embedding ? (uint64_t)128256 * 8192 : 0;
        ASSERT(p.host >= inputs + embedding);
        ASSERT((p.host == inputs + embedding) == (p.offloaded_attention == 0));
    }
    // With enough memory, nothing of this is used.
    ASSERT_EQ(QLORA_OK, plan_8b(ctx, 8192, 16, 60e9, QLORA_CHOICE_AUTO, &p));
    ASSERT(p.tile == 0 && p.host == 0 && p.recompute_layers == 0);
    ASSERT_EQ(QLORA_OK, plan_8b(ctx, 8192, 16, 7.5 * 1073741824.0, QLORA_CHOICE_AUTO, &p));
    ASSERT_EQ(QLORA_ERR_DEVICE_MEMORY, plan_8b(ctx, 160000, 32, 23.5e9, QLORA_CHOICE_OFF, &p));
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// Long sequences keep the output of attention before whole layers, short ones after them.
TEST attention_is_kept_first(const test_machine* machine) {
    static const struct {
        int64_t tokens;
        double gigabytes;
        int64_t recompute;
        int64_t attention;
    } cases[] = {{32768, 22.5, 32, 6}, {32768, 24, 32, 11}, {32768, 30.1, 32, 32},
                 {32768, 40, 28, 28},  {2048, 12, 8, 2}};
    qlora_ctx* ctx = test_open(machine, NULL);
    ASSERT(ctx != NULL);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        qlora_plan p;
        ASSERT_EQ(QLORA_OK, plan_8b(ctx, cases[i].tokens, 16, cases[i].gigabytes * 1e9,
                                    QLORA_CHOICE_OFF, &p));
        ASSERT_EQ_FMT((long long)cases[i].recompute, (long long)p.recompute_layers, "%lld");
        ASSERT_EQ_FMT((long long)cases[i].attention, (long long)p.attention_layers, "%lld");
        ASSERT((double)(p.total + p.context) <= cases[i].gigabytes * 1e9);
    }
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// Plans that offload keep what attention needs on the host, as far as its memory goes, or on the
// device, if that has room for more. The tile, on which results depend, does not follow the host.
TEST attention_is_kept_on_the_host(const test_machine* machine) {
    static const struct {
        double gigabytes;
        int64_t host; // layers whose attention it has room for; -1 = no limit
        int64_t attention;
        bool here;
        int64_t heads;
        int64_t tile;
    } cases[] = {{7.5, -1, 32, false, 32, 8192}, {7.0, -1, 32, false, 32, 4096},
                 {7.5, 30, 32, false, 0, 8192},  {7.5, 10, 10, false, 0, 8192},
                 {7.5, 0, 9, true, 0, 8192},     {6.5, -1, 0, false, 0, 4096}};
    qlora_model_config c = llama_8b();
    qlora_model_desc m;
    qlora_ctx* ctx = test_open(machine, NULL);
    ASSERT(ctx != NULL);
    memset(&m, 0, sizeof m);
    m.config = &c;
    m.tokens = 8192;
    m.max_length = 2048;
    m.max_sequences = 4;
    uint64_t o = (uint64_t)8192 * ((4096 + 16) * 2 + 32 * 4);
    uint64_t qkv = (uint64_t)8192 * (4096 + 2 * 1024 + 3 * 16) * 2;
    uint64_t inputs = ((uint64_t)31 * 8192 + 128256) * 8192; // and the embedding
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        qlora_plan_desc budget;
        qlora_plan p;
        memset(&budget, 0, sizeof budget);
        budget.bytes = (uint64_t)(cases[i].gigabytes * 1073741824.0);
        budget.capability = 90;
        budget.host_bytes = cases[i].host >= 0 ? inputs + (uint64_t)cases[i].host * o : 0;
        ASSERT_EQm(qlora_last_error(ctx), QLORA_OK, qlora_plan_make(ctx, &m, &budget, &p));
        ASSERT_EQ_FMT((long long)cases[i].attention, (long long)p.attention_layers, "%lld");
        int64_t on_host = cases[i].here ? 0 : cases[i].attention;
        ASSERT_EQ_FMT((long long)on_host, (long long)p.offloaded_attention, "%lld");
        ASSERT_EQ_FMT((long long)cases[i].heads, (long long)p.heads_layers, "%lld");
        ASSERT_EQ_FMT((long long)cases[i].tile, (long long)p.tile, "%lld");
        uint64_t away = (uint64_t)(on_host < 30 ? on_host : 30);
        uint64_t host = inputs + away * (o + (p.heads_layers > 0 ? qkv : 0));
        ASSERT_EQ_FMT((unsigned long long)host, (unsigned long long)p.host, "%llu");
        ASSERT(p.total + p.context <= budget.bytes && p.offloaded_layers == 31);
    }
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// A budget of the caller's has room for more copies of weights with attention on the host and fewer
// rows of logits at a time, unless the caller says otherwise.
TEST copies_take_what_others_leave(const test_machine* machine) {
    static const struct {
        int64_t chunk;
        qlora_choice offload;
        double gigabytes;
        int64_t cached;
        int64_t away;
        int64_t rows;
    } cases[] = {{0, QLORA_CHOICE_AUTO, 0.0, 24, 0, 1024},
                 {0, QLORA_CHOICE_AUTO, 2.45, 17, 23, 512},
                 {0, QLORA_CHOICE_OFF, 2.45, 11, 0, 512},
                 {1024, QLORA_CHOICE_OFF, 2.45, 6, 0, 1024},
                 {0, QLORA_CHOICE_OFF, 2.92, 22, 0, 1024},
                 {0, QLORA_CHOICE_AUTO, 3.0, 24, 0, 1024}};
    qlora_model_config c = llama_8b();
    qlora_model_desc m;
    qlora_ctx* ctx = test_open(machine, NULL);
    ASSERT(ctx != NULL);
    c.family = QLORA_FAMILY_QWEN2;
    c.vocab = 151936;
    c.hidden = 896;
    c.intermediate = 4864;
    c.layers = 24;
    c.heads = 14;
    c.kv_heads = 2;
    c.head_dim = 64;
    c.tied = true;
    c.qkv_bias = true;
    memset(&m, 0, sizeof m);
    m.config = &c;
    m.max_sequences = 4;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        qlora_plan_desc budget;
        qlora_plan p;
        memset(&budget, 0, sizeof budget);
        budget.bytes = (uint64_t)(cases[i].gigabytes * 1073741824.0);
        budget.capability = 90;
        m.head_chunk = cases[i].chunk;
        m.offload = cases[i].offload;
        m.cache = cases[i].gigabytes > 0.0 ? QLORA_CHOICE_AUTO : QLORA_CHOICE_ON;
        ASSERT_EQm(qlora_last_error(ctx), QLORA_OK, qlora_plan_make(ctx, &m, &budget, &p));
        ASSERT_EQ_FMT((long long)cases[i].cached, (long long)p.cached_layers, "%lld");
        ASSERT_EQ_FMT((long long)cases[i].away, (long long)p.offloaded_attention, "%lld");
        ASSERT_EQ_FMT((long long)cases[i].rows, (long long)p.head_chunk, "%lld");
        ASSERT((p.host > 0) == (cases[i].away > 0));
    }
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// Host memory has a limit of its own, and a plan within it is chosen if there is one.
TEST host_memory_is_limited(const test_machine* machine) {
    setup s = long_setup(machine, QLORA_MODE_F32, false);
    rig r;
    qlora_plan p;
    qlora_plan_desc budget;
    memset(&r, 0, sizeof r);
    memset(&budget, 0, sizeof budget);
    r.ctx = test_open(machine, NULL);
    ASSERT(r.ctx != NULL);
    s.model.config = &s.config;
    s.model.tokens = 8192;
    s.model.offload = QLORA_CHOICE_ON;
    budget.capability = 90;
    ASSERT_OK(r, qlora_plan_make(r.ctx, &s.model, &budget, &p));
    ASSERT(p.host > 0 && p.offloaded_layers == LAYERS - 1 && p.offloaded_embedding);
    ASSERT_EQ((int64_t)1, p.offload_every);
    uint64_t input = (uint64_t)8192 * 16 * 4;
    uint64_t all = p.host;
    budget.host_bytes = p.host - 1; // the input of one layer is computed again
    ASSERT_OK(r, qlora_plan_make(r.ctx, &s.model, &budget, &p));
    ASSERT_EQ((int64_t)2, p.offload_every);
    ASSERT_EQ_FMT((unsigned long long)(all - input), (unsigned long long)p.host, "%llu");
    budget.host_bytes = p.host - 1;
    ASSERT_EQ(QLORA_ERR_MEMORY, qlora_plan_make(r.ctx, &s.model, &budget, &p));
    ASSERT(strstr(qlora_last_error(r.ctx), "of host memory, but only") != NULL);
    budget.bytes = p.total + p.context;
    s.model.offload = QLORA_CHOICE_AUTO;
    ASSERT_OK(r, qlora_plan_make(r.ctx, &s.model, &budget, &p));
    ASSERT(p.host == 0 && p.tile > 0);
    s.config.tied = true; // a tied embedding is also the head
    s.model.offload = QLORA_CHOICE_ON;
    budget.bytes = 0;
    ASSERT_OK(r, qlora_plan_make(r.ctx, &s.model, &budget, &p));
    ASSERT(!p.offloaded_embedding && p.offloaded_layers == LAYERS - 1);
    ASSERT(test_close_ctx(machine, r.ctx));
    PASS();
}

// With less host memory, larger groups are chosen, up to those that need the least.
TEST groups_fit_the_host(const test_machine* machine) {
    static const struct {
        int64_t inputs; // that the host has room for
        int64_t every;
        int64_t needed;
    } cases[] = {{31, 1, 31}, {30, 2, 16}, {16, 2, 16}, {15, 3, 12}, {11, 4, 10}, {9, 0, 0}};
    qlora_ctx* ctx = test_open(machine, NULL);
    ASSERT(ctx != NULL);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        qlora_model_config c = llama_8b();
        qlora_model_desc m;
        qlora_plan_desc budget;
        qlora_plan p;
        memset(&m, 0, sizeof m);
        memset(&budget, 0, sizeof budget);
        uint64_t input = (uint64_t)40000 * 4096 * 2;
        uint64_t embedding = (uint64_t)c.vocab * 4096 * 2;
        m.config = &c;
        m.tokens = 40000;
        m.max_sequences = 1;
        m.offload = QLORA_CHOICE_ON;
        budget.capability = 90;
        budget.host_bytes = embedding + (uint64_t)cases[i].inputs * input;
        qlora_result r = qlora_plan_make(ctx, &m, &budget, &p);
        ASSERT_EQm(qlora_last_error(ctx), cases[i].every > 0 ? QLORA_OK : QLORA_ERR_MEMORY, r);
        if (r == QLORA_OK) {
            ASSERT_EQ(cases[i].every, p.offload_every);
            ASSERT_EQ_FMT((unsigned long long)(embedding + (uint64_t)cases[i].needed * input),
                          (unsigned long long)p.host, "%llu");
        }
    }
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// What is planned is what is allocated, on the device and on the host.
TEST offload_is_planned(const test_machine* machine) {
    if (strcmp(machine->backend, "cpu") == 0) {
        SKIPm("needs a GPU");
    }
    bool is_fake = strcmp(machine->backend, "fake") == 0;
    for (int i = 0; i < 3; i++) {
        setup s = long_setup(machine, QLORA_MODE_F32, false);
        s.model.offload = i > 0 ? QLORA_CHOICE_ON : QLORA_CHOICE_OFF;
        s.model.tile = i > 1 ? TILE : 0;
        rig r;
        qlora_memory_info before;
        qlora_memory_info after;
        memset(&r, 0, sizeof r);
        r.ctx = test_open(&s.machine, NULL);
        ASSERTm(test_open_reason(), r.ctx != NULL);
        uint64_t pinned = is_fake ? test_fake()->stats().live_pinned : 0;
        ASSERT_OK(r, test_memory(r.ctx, &before));
        ASSERT(rig_start(&r, &s));
        ASSERT_OK(r, test_memory(r.ctx, &after));
        const qlora_plan* p = model_plan(r.model);
        ASSERT_EQ_FMT((unsigned long long)p->total,
                      (unsigned long long)(after.device_bytes - before.device_bytes), "%llu");
        ASSERT((p->host > 0) == (i > 0));
        ASSERT(!is_fake || test_fake()->stats().live_pinned - pinned >= p->host);
        ASSERT(rig_close(&r, &s));
    }
    PASS();
}

// ---- 40,000 tokens

enum { WIDE = 8, TOKENS_FAR = 40000, WIDE_TENSORS = 8 };
enum { WIDE_Q, WIDE_K, WIDE_V, WIDE_DO, WIDE_O, WIDE_DQ, WIDE_DK, WIDE_DV };

typedef struct wide_rig {
    float* x[WIDE_TENSORS]; // [TOKENS_FAR, WIDE] on the host
    float* lse;
} wide_rig;

static double wide_dot(const float* a, int64_t i, const float* b, int64_t j) {
    double sum = 0.0;
    for (int d = 0; d < WIDE; d++) {
        sum += (double)a[i * WIDE + d] * (double)b[j * WIDE + d];
    }
    return sum;
}

// A sum of rows in float64, and that of their absolute values, by which rounding is judged: the
// terms have both signs, so that the sum of 40,000 of them is much smaller.
typedef struct wide_sum {
    double x[WIDE];
    double size[WIDE];
} wide_sum;

// `size`: of the numbers that the factor is a difference of.
static void wide_add(wide_sum* sum, double factor, double size, const float* a, int64_t i) {
    for (int d = 0; d < WIDE; d++) {
        sum->x[d] += factor * (double)a[i * WIDE + d];
        sum->size[d] += size * fabs((double)a[i * WIDE + d]);
    }
}

// Rounding to float32 in a sum of n terms adds up like the root of n: 200 times 2^-24.
#define WIDE_LIMIT 1.2e-5

static bool wide_close(const char* what, int64_t row, const wide_sum* expected, const float* a) {
    for (int d = 0; d < WIDE; d++) {
        double off = fabs(expected->x[d] - (double)a[row * WIDE + d]);
        if (!(off <= WIDE_LIMIT * expected->size[d])) {
            fprintf(stderr, "%s[%lld]: difference %g of a sum of %g\n", what, (long long)row, off,
                    expected->size[d]);
            return false;
        }
    }
    return true;
}

static const double wide_scale = 0.35355339059327379; // 1 / sqrt(WIDE)

// Row `i` of the output and of the gradient of q; returns the logarithm of its sum.
static double wide_query(const wide_rig* r, int64_t i, wide_sum* o, wide_sum* dq) {
    double total = 0.0;
    double inner = 0.0;
    memset(o, 0, sizeof *o);
    memset(dq, 0, sizeof *dq);
    for (int64_t j = 0; j <= i; j++) {
        total += exp(wide_scale * wide_dot(r->x[WIDE_Q], i, r->x[WIDE_K], j));
    }
    for (int64_t j = 0; j <= i; j++) {
        double p = exp(wide_scale * wide_dot(r->x[WIDE_Q], i, r->x[WIDE_K], j)) / total;
        wide_add(o, p, p, r->x[WIDE_V], j);
    }
    for (int d = 0; d < WIDE; d++) {
        inner += o->x[d] * (double)r->x[WIDE_DO][i * WIDE + d];
    }
    for (int64_t j = 0; j <= i; j++) {
        double p = exp(wide_scale * wide_dot(r->x[WIDE_Q], i, r->x[WIDE_K], j)) / total;
        double dp = wide_dot(r->x[WIDE_DO], i, r->x[WIDE_V], j);
        wide_add(dq, wide_scale * p * (dp - inner), wide_scale * p * (fabs(dp) + fabs(inner)),
                 r->x[WIDE_K], j);
    }
    return log(total);
}

// Row `j` of the gradients of k and v, with the sums and outputs of the queries that see it.
static void wide_key(const wide_rig* r, int64_t j, wide_sum* dk, wide_sum* dv) {
    memset(dk, 0, sizeof *dk);
    memset(dv, 0, sizeof *dv);
    for (int64_t i = j; i < TOKENS_FAR; i++) {
        double score = wide_scale * wide_dot(r->x[WIDE_Q], i, r->x[WIDE_K], j);
        double p = exp(score - (double)r->lse[i]);
        double inner = wide_dot(r->x[WIDE_DO], i, r->x[WIDE_O], i);
        double dp = wide_dot(r->x[WIDE_DO], i, r->x[WIDE_V], j);
        wide_add(dk, wide_scale * p * (dp - inner), wide_scale * p * (fabs(dp) + fabs(inner)),
                 r->x[WIDE_Q], i);
        wide_add(dv, p, p, r->x[WIDE_DO], i);
    }
}

// Attention of a sequence of 40,000 tokens, forward and backward.
static bool wide_run(qlora_ctx* ctx, wide_rig* r) {
    static const int32_t ends[2] = {0, TOKENS_FAR};
    const size_t bytes = (size_t)TOKENS_FAR * WIDE * sizeof(float);
    qlora_tensor t[WIDE_TENSORS];
    qlora_tensor seqs;
    qlora_tensor lse;
    qlora_attention_desc desc;
    test_random random = test_random_start("wide");
    memset(&desc, 0, sizeof desc);
    desc.heads = 1;
    desc.head_dim = WIDE;
    bool ok = qlora_tensor_create(ctx, QLORA_I32, 1, 2, &seqs) == QLORA_OK &&
              qlora_tensor_write(ctx, &seqs, ends, sizeof ends) == QLORA_OK &&
              qlora_tensor_create(ctx, QLORA_F32, 1, TOKENS_FAR, &lse) == QLORA_OK;
    for (int i = 0; i < WIDE_TENSORS && ok; i++) {
        test_random_fill(&random, r->x[i], (size_t)TOKENS_FAR * WIDE, 1.0f);
        ok = test_tensor(ctx, QLORA_F32, TOKENS_FAR, WIDE, r->x[i], &t[i]) == QLORA_OK;
    }
    ok = ok &&
         qlora_attention_forward(ctx, &desc, &t[WIDE_Q], &t[WIDE_K], &t[WIDE_V], &seqs, &t[WIDE_O],
                                 &lse) == QLORA_OK &&
         qlora_attention_backward(ctx, &desc, &t[WIDE_Q], &t[WIDE_K], &t[WIDE_V], &seqs,
                                  &t[WIDE_O], &lse, &t[WIDE_DO], &t[WIDE_DQ], &t[WIDE_DK],
                                  &t[WIDE_DV]) == QLORA_OK &&
         qlora_tensor_read(ctx, &lse, r->lse, (size_t)TOKENS_FAR * 4) == QLORA_OK;
    for (int i = WIDE_O; i < WIDE_TENSORS && ok; i++) {
        ok = qlora_tensor_read(ctx, &t[i], r->x[i], bytes) == QLORA_OK;
    }
    for (int i = 0; i < WIDE_TENSORS; i++) {
        qlora_tensor_destroy(ctx, &t[i]);
    }
    qlora_tensor_destroy(ctx, &lse);
    qlora_tensor_destroy(ctx, &seqs);
    return ok;
}

// The rows of all tensors at both ends, at block edges and in between, against loops in float64.
TEST attention_of_40000_tokens(const test_machine* machine) {
    static const int64_t rows[] = {0, 1, 63, 4096, 20000, 32767, 32768, TOKENS_FAR - 1};
    if (test_brief()) {
        SKIPm("takes long");
    }
    wide_rig r;
    qlora_ctx* ctx = test_open(machine, NULL);
    ASSERT(ctx != NULL);
    const size_t count = (size_t)TOKENS_FAR * WIDE;
    r.lse = (float*)malloc((WIDE_TENSORS * count + TOKENS_FAR) * sizeof *r.lse);
    ASSERT(r.lse != NULL);
    for (int i = 0; i < WIDE_TENSORS; i++) {
        r.x[i] = r.lse + TOKENS_FAR + (size_t)i * count;
    }
    ASSERTm(qlora_last_error(ctx), wide_run(ctx, &r));
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        int64_t row = rows[i];
        wide_sum o;
        wide_sum dq;
        wide_sum dk;
        wide_sum dv;
        double lse = wide_query(&r, row, &o, &dq);
        wide_key(&r, row, &dk, &dv);
        ASSERT(fabs(lse - (double)r.lse[row]) <= 1e-6 * (1.0 + fabs(lse)));
        ASSERT(wide_close("o", row, &o, r.x[WIDE_O]));
        // The first query sees one key: its gradient is a difference of equal numbers.
        ASSERT(row == 0 || wide_close("dq", row, &dq, r.x[WIDE_DQ]));
        ASSERT(wide_close("dk", row, &dk, r.x[WIDE_DK]));
        ASSERT(wide_close("dv", row, &dv, r.x[WIDE_DV]));
    }
    free(r.lse);
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// ---- offsets of more than 31 bits

// The last of three rows begins beyond 2^31 elements.
enum { FAR_ROWS = 3, FAR_COLS = 64, FAR_TENSORS = 11 };
static const int64_t far_step = ((int64_t)1 << 30) + 64;

typedef struct far_rig {
    qlora_ctx* ctx;
    qlora_dtype dtype;
    qlora_tensor memory;
    qlora_tensor home;   // of the memory; all tensors are columns of it
    qlora_tensor square; // [FAR_COLS, FAR_COLS]
    int count;
    qlora_tensor vector;  // f32 [1, FAR_COLS]
    qlora_tensor table;   // f32 [FAR_ROWS, FAR_COLS] of the rotation
    qlora_tensor numbers; // i32 0, 1, 2
    qlora_tensor seqs;
    qlora_tensor lse;
    qlora_tensor flag;
} far_rig;

// The next tensor of the rig, filled with numbers that depend on its place.
static bool far_tensor(far_rig* r, qlora_tensor* out) {
    float values[FAR_COLS];
    uint16_t half[FAR_COLS];
    char name[16];
    snprintf(name, sizeof name, "far %d", r->count);
    test_random random = test_random_start(name);
    int64_t col = FAR_COLS * r->count++;
    for (int64_t row = 0; row < FAR_ROWS; row++) {
        qlora_tensor one;
        test_random_fill(&random, values, FAR_COLS, 0.5f);
        for (int i = 0; i < FAR_COLS; i++) {
            uint32_t bits = 0;
            memcpy(&bits, &values[i], sizeof bits);
            half[i] = (uint16_t)(bits >> 16);
        }
        bool f32 = r->dtype == QLORA_F32;
        if (qlora_tensor_view(r->ctx, &r->home, row, 1, col, FAR_COLS, &one) != QLORA_OK ||
            qlora_tensor_write(r->ctx, &one, f32 ? (void*)values : (void*)half,
                               FAR_COLS * qlora_dtype_bytes(r->dtype)) != QLORA_OK) {
            return false;
        }
    }
    return qlora_tensor_view(r->ctx, &r->home, 0, FAR_ROWS, col, FAR_COLS, out) == QLORA_OK;
}

// Runs operators on the tensors t, each with its results in other ones.
static qlora_result far_operators(far_rig* r, const qlora_tensor* t) {
    qlora_attention_desc heads;
    qlora_rotation_desc turn;
    memset(&heads, 0, sizeof heads);
    memset(&turn, 0, sizeof turn);
    heads.heads = 1;
    heads.head_dim = FAR_COLS;
    turn.head_dim = FAR_COLS;
    turn.heads = 1;
    qlora_result results[] = {
        qlora_scale(r->ctx, 0.5f, &t[0], &t[1]),
        qlora_rmsnorm_forward(r->ctx, &t[0], &r->vector, 1e-5f, &t[2]),
        qlora_swiglu_forward(r->ctx, &t[0], &t[2], &t[3]),
        qlora_rope_apply(r->ctx, &turn, &t[3], &r->numbers, &r->table, NULL, &r->flag),
        qlora_embed(r->ctx, &t[3], &r->numbers, &t[4], &r->flag),
        qlora_rmsnorm_backward(r->ctx, &t[4], &t[0], &r->vector, 1e-5f, &t[1], &t[5], NULL),
        qlora_attention_forward(r->ctx, &heads, &t[0], &t[1], &t[2], &r->seqs, &t[6], &r->lse),
        qlora_attention_backward(r->ctx, &heads, &t[0], &t[1], &t[2], &r->seqs, &t[6], &r->lse,
                                 &t[3], &t[7], &t[8], &t[9]),
        qlora_gemm_forward(r->ctx, &t[7], &r->square, &t[10], QLORA_PRODUCT_PTX)};
    for (size_t i = 0; i < sizeof results / sizeof results[0]; i++) {
        if (results[i] != QLORA_OK) {
            fprintf(stderr, "operator %d: %s\n", (int)i, qlora_last_error(r->ctx));
            return results[i];
        }
    }
    return QLORA_OK;
}

static bool far_open(far_rig* r, qlora_ctx* ctx, qlora_dtype dtype, int64_t step) {
    static const int32_t numbers[FAR_ROWS] = {0, 1, 2};
    static const int32_t ends[2] = {0, FAR_ROWS};
    float values[FAR_COLS * FAR_COLS];
    int64_t wide = FAR_COLS * FAR_TENSORS;
    test_random random = test_random_start("far");
    memset(r, 0, sizeof *r);
    r->ctx = ctx;
    r->dtype = dtype;
    test_random_fill(&random, values, FAR_COLS * FAR_COLS, 0.5f);
    return qlora_tensor_create(ctx, dtype, 1, (FAR_ROWS - 1) * step + wide, &r->memory) ==
               QLORA_OK &&
           qlora_tensor_wrap(ctx, r->memory.data, r->memory.bytes, dtype, FAR_ROWS, wide, step,
                             &r->home) == QLORA_OK &&
           test_tensor(ctx, QLORA_F32, 1, FAR_COLS, values, &r->vector) == QLORA_OK &&
           test_tensor(ctx, QLORA_F32, FAR_ROWS, FAR_COLS, values, &r->table) == QLORA_OK &&
           test_tensor(ctx, dtype, FAR_COLS, FAR_COLS, values, &r->square) == QLORA_OK &&
           qlora_tensor_create(ctx, QLORA_F32, 1, FAR_ROWS, &r->lse) == QLORA_OK &&
           qlora_tensor_create(ctx, QLORA_I32, 1, 1, &r->flag) == QLORA_OK &&
           qlora_tensor_create(ctx, QLORA_I32, 1, FAR_ROWS, &r->numbers) == QLORA_OK &&
           qlora_tensor_write(ctx, &r->numbers, numbers, sizeof numbers) == QLORA_OK &&
           qlora_tensor_create(ctx, QLORA_I32, 1, 2, &r->seqs) == QLORA_OK &&
           qlora_tensor_write(ctx, &r->seqs, ends, sizeof ends) == QLORA_OK;
}

static void far_close(far_rig* r) {
    qlora_tensor* all[] = {&r->memory, &r->vector, &r->table,   &r->square,
                           &r->lse,    &r->flag,   &r->numbers, &r->seqs};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        qlora_tensor_destroy(r->ctx, all[i]);
    }
}

// Everything that is in the tensors after the operators.
static bool far_run(far_rig* r, uint8_t out[FAR_ROWS][FAR_COLS * FAR_TENSORS * 4]) {
    qlora_tensor t[FAR_TENSORS];
    int64_t wide = FAR_COLS * FAR_TENSORS;
    for (int i = 0; i < FAR_TENSORS; i++) {
        if (!far_tensor(r, &t[i])) {
            return false;
        }
    }
    bool ok = far_operators(r, t) == QLORA_OK;
    for (int64_t row = 0; row < FAR_ROWS && ok; row++) {
        qlora_tensor one;
        ok = qlora_tensor_view(r->ctx, &r->home, row, 1, 0, wide, &one) == QLORA_OK &&
             qlora_tensor_read(r->ctx, &one, out[row],
                               (size_t)wide * qlora_dtype_bytes(r->dtype)) == QLORA_OK;
    }
    return ok;
}

// Operators give the same bits on rows that are more than 2^31 elements from the first one.
TEST far_rows_are_reached(const test_machine* machine) {
    if (strcmp(machine->backend, "cpu") == 0) {
        SKIPm("needs a GPU");
    }
    static uint8_t bits[2][FAR_ROWS][FAR_COLS * FAR_TENSORS * 4];
    const fake_api* fake = test_fake();
    qlora_ctx_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.require_backend = QLORA_BACKEND_CUDA;
    desc.scratch_bytes = (size_t)4 << 20;
    if (fake != NULL) {
        fake_config config = fake->defaults();
        config.device[0].cc = machine->cc;
        config.device[0].total_bytes = (uint64_t)64 << 30;
        config.host_bytes = (uint64_t)64 << 30;
        fake->reset(&config);
    }
    qlora_ctx* ctx = NULL;
    ASSERT_EQ(QLORA_OK, qlora_ctx_create(&desc, &ctx));
    for (int d = 0; d < 2; d++) {
        qlora_dtype dtype = d == 0 ? QLORA_BF16 : QLORA_F32;
        memset(bits, 0, sizeof bits);
        for (int i = 0; i < 2; i++) {
            far_rig r;
            bool open = far_open(&r, ctx, dtype, i == 0 ? FAR_COLS * FAR_TENSORS : far_step);
            bool ran = open && far_run(&r, bits[i]);
            far_close(&r);
            if (!open && i == 1) {
                ASSERT_EQ(QLORA_OK, qlora_ctx_destroy(ctx));
                SKIPm("too little memory for a tensor of 8.6 GB");
            }
            ASSERTm(qlora_last_error(ctx), ran);
        }
        for (int row = 0; row < FAR_ROWS; row++) {
            ASSERT_MEM_EQ(bits[0][row], bits[1][row], sizeof bits[0][row]);
        }
    }
    ASSERT_EQ(QLORA_OK, qlora_ctx_destroy(ctx));
    ASSERT(fake == NULL || fake->done() == NULL);
    PASS();
}

// ---- refusals and failures

TEST contradictions_are_refused(const test_machine* machine) {
    static const struct {
        qlora_choice recompute;
        qlora_choice offload;
        int64_t tile;
        const char* cpu; // NULL: accepted
        const char* gpu;
    } cases[] = {
        {QLORA_CHOICE_AUTO, QLORA_CHOICE_ON, 0, "offload is ON, which needs a GPU", NULL},
        {QLORA_CHOICE_OFF, QLORA_CHOICE_AUTO, 8, "tile is set, which needs every layer recomputed",
         "tile is set, which needs every layer recomputed"},
        {QLORA_CHOICE_OFF, QLORA_CHOICE_ON, 0, "offload is ON, which needs a GPU",
         "offload is ON, which needs every layer recomputed"},
        {QLORA_CHOICE_OFF, QLORA_CHOICE_AUTO, -1, NULL, NULL},
        {QLORA_CHOICE_AUTO, (qlora_choice)3, 0, "desc.offload is 3", "desc.offload is 3"},
        {QLORA_CHOICE_AUTO, QLORA_CHOICE_AUTO, (int64_t)1 << 25, "desc.tile is", "desc.tile is"},
    };
    bool gpu = strcmp(machine->backend, "cpu") != 0;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        setup s = long_setup(machine, QLORA_MODE_F32, false);
        s.model.recompute = cases[i].recompute;
        s.model.offload = cases[i].offload;
        s.model.tile = cases[i].tile;
        s.model.config = &s.config;
        const char* expected = gpu ? cases[i].gpu : cases[i].cpu;
        qlora_plan p;
        qlora_ctx* ctx = test_open(machine, NULL);
        ASSERT(ctx != NULL);
        qlora_result r = qlora_plan_make(ctx, &s.model, NULL, &p);
        ASSERT_EQm(qlora_last_error(ctx), expected == NULL, r == QLORA_OK);
        ASSERTm(qlora_last_error(ctx),
                expected == NULL || strstr(qlora_last_error(ctx), expected) != NULL);
        ASSERT(test_close_ctx(machine, ctx));
    }
    PASS();
}

TEST refused_host_memory_is_an_error(const test_machine* machine) {
    const fake_api* fake = test_fake();
    setup s = long_setup(machine, QLORA_MODE_F32, false);
    rig r;
    memset(&r, 0, sizeof r);
    s.model.offload = QLORA_CHOICE_ON;
    s.model.config = &s.config;
    r.ctx = test_open(machine, NULL);
    ASSERTm(test_open_reason(), r.ctx != NULL);
    fake->fail_at("cuMemHostAlloc", 1, 2, false);
    ASSERT_EQ(QLORA_ERR_MEMORY, qlora_model_open(r.ctx, &s.model, &r.model));
    fake->fail_clear();
    ASSERTm(qlora_last_error(r.ctx),
            strstr(qlora_last_error(r.ctx), "of pinned host memory, which were refused") != NULL);
    ASSERT_EQ(NULL, r.model);
    ASSERT_OK(r, qlora_model_open(r.ctx, &s.model, &r.model)); // nothing is left of the failure
    ASSERT(rig_close(&r, &s));
    PASS();
}

// What attention needs on the host is not needed: if it is refused, a plan that needs less is made.
TEST refused_host_memory_for_attention_is_not(const test_machine* machine) {
    const fake_api* fake = test_fake();
    setup s = long_setup(machine, QLORA_MODE_F32, false);
    rig r;
    uint64_t host[2];
    s.config.layers = 5;
    s.model.recompute = QLORA_CHOICE_AUTO;
    s.model.offload = QLORA_CHOICE_ON;
    s.model.config = &s.config;
    for (int i = 0; i < 2; i++) {
        qlora_model_info info;
        memset(&r, 0, sizeof r);
        r.ctx = test_open(machine, NULL);
        ASSERTm(test_open_reason(), r.ctx != NULL);
        if (i == 1) {
            fake->fail_at("cuMemHostAlloc", 1, 2, false);
        }
        ASSERT_OK(r, qlora_model_open(r.ctx, &s.model, &r.model));
        fake->fail_clear();
        ASSERT_OK(r, qlora_model_query(r.model, &info));
        ASSERT((info.plan->heads_layers == s.config.layers) == (i == 0));
        host[i] = info.plan->host;
        ASSERT(rig_close(&r, &s));
    }
    ASSERT(host[1] > 0 && host[1] <= host[0] / 2);
    PASS();
}

// A copy that fails, while a graph is captured or in a step without graphs, fails the step; dropped
// and taken again, the step gives the bits of a run without failures.
TEST failed_copies_are_errors(const test_machine* machine) {
    static const char* const copies[] = {"cuMemcpyDtoHAsync_v2", "cuMemcpyHtoDAsync_v2"};
    const fake_api* fake = test_fake();
    outcome expected;
    memset(&expected, 0, sizeof expected);
    for (int i = 0; i < 2; i++) {
        setup s = long_setup(machine, QLORA_MODE_F32, false);
        s.model.offload = QLORA_CHOICE_ON;
        s.train.eager = i == 1;
        s.train.require_graph = i == 0;
        rig r;
        data d;
        outcome got;
        data_make(&d, "failing", run_lengths[0], 3);
        ASSERT(i == 1 || run_session(&s, &expected));
        ASSERT(rig_open(&r, &s));
        double labels = qlora_batch_labels(&d.batch);
        fake->fail_at(copies[i], 2, 1, false); // the first one in is the batch
        ASSERT(qlora_train_micro(r.trainer, &d.batch, labels) != QLORA_OK);
        ASSERTm(qlora_last_error(r.ctx), strstr(qlora_last_error(r.ctx), "cuMemcpy") != NULL);
        fake->fail_clear();
        ASSERT_OK(r, qlora_train_cancel(r.trainer));
        ASSERT(run_steps(&r, &s, &got));
        ASSERT(outcome_same(&expected, &got));
        outcome_free(&got);
        ASSERT(rig_close(&r, &s));
    }
    outcome_free(&expected);
    PASS();
}

// Copies of a step that failed are not still running when the next one begins.
TEST failed_steps_leave_no_copies(const test_machine* machine) {
    const fake_api* fake = test_fake();
    setup s = long_setup(machine, QLORA_MODE_F32, false);
    outcome expected;
    s.config.layers = 5;
    s.model.offload = QLORA_CHOICE_ON;
    s.model.recompute = QLORA_CHOICE_AUTO;
    s.machine.order = FAKE_REVERSE;
    ASSERT(run_session(&s, &expected));
    for (int i = 0; i < 8; i++) {
        rig r;
        data d;
        outcome got;
        bool done = false;
        s.train.eager = i % 2 == 1;
        s.train.require_graph = i % 2 == 0;
        data_make(&d, "failing", run_lengths[0], 3);
        ASSERT(rig_open(&r, &s));
        ASSERT_OK(r, qlora_train_begin(r.trainer, &d.batch, 1));
        fake->fail_at("cuMemcpyHtoDAsync_v2", (uint64_t)(2 + i / 2), 1, false); // 1: the batch
        ASSERT(qlora_train_slice(r.trainer, 0.0, &done) == QLORA_OK);
        while (qlora_train_slice(r.trainer, 1e9, &done) == QLORA_OK && !done) {
        }
        ASSERT(!done);
        fake->fail_clear();
        ASSERT_OK(r, qlora_train_cancel(r.trainer));
        ASSERT(run_steps(&r, &s, &got));
        ASSERT(outcome_same(&expected, &got));
        outcome_free(&got);
        ASSERT(rig_close(&r, &s));
    }
    outcome_free(&expected);
    PASS();
}

// ---- rotary factors by the length of a text

enum { LONGROPE_SHORT = 6, LONGROPE_COUNT = 4 };
typedef enum longrope_sets { SETS_BOTH, SETS_SHORT, SETS_LONG } longrope_sets;

// Longrope as it is, or with one of its two sets in the place of both.
static setup longrope_setup(const test_machine* machine, qlora_mode mode, longrope_sets sets) {
    setup s = long_setup(machine, mode, mode != QLORA_MODE_FP8); // kernels write codes without it
    qlora_rope_desc* rope = &s.config.rope;
    s.config.family = QLORA_FAMILY_PHI3;
    s.config.layers = 2;
    s.config.head_dim = 16;
    s.config.window = 0;
    s.config.sliding[1] = 0;
    s.model.rank = 8;
    s.model.recompute = QLORA_CHOICE_AUTO;
    s.model.cache = QLORA_CHOICE_AUTO;
    rope->type = QLORA_ROPE_LONGROPE;
    rope->factor = 4.0;
    rope->original_max_position = LONGROPE_SHORT;
    for (int i = 0; i < 8; i++) {
        float low = 1.0f + 0.1f * (float)i;
        float high = 2.0f + 0.5f * (float)i;
        rope->short_factor[i] = sets == SETS_LONG ? high : low;
        rope->long_factor[i] = sets == SETS_SHORT ? low : high;
    }
    return s;
}

typedef struct longrope_run {
    float logits[TOKENS * VOCAB];
    double loss;
    float* gradients;
    size_t count;
} longrope_run;

// Logits and gradients of a micro-batch.
static bool longrope_train(const setup* s, const data* d, longrope_run* out) {
    rig r;
    qlora_train_info info;
    memset(out, 0, sizeof *out);
    bool ok =
        rig_open(&r, s) && qlora_eval_logits(r.model, &d->batch, out->logits) == QLORA_OK &&
        qlora_train_micro(r.trainer, &d->batch, qlora_batch_labels(&d->batch)) == QLORA_OK;
    out->gradients = ok ? rig_read(&r, true, &out->count) : NULL;
    ok = out->gradients != NULL && qlora_train_update(r.trainer) == QLORA_OK &&
         qlora_train_query(r.trainer, &info) == QLORA_OK;
    out->loss = ok ? info.loss : 0.0;
    return (ok || rig_says(&r, "step")) && rig_close(&r, s);
}

static bool longrope_same(const longrope_run* a, const longrope_run* b) {
    return memcmp(&a->loss, &b->loss, sizeof a->loss) == 0 && a->count == b->count &&
           memcmp(a->gradients, b->gradients, a->count * sizeof *a->gradients) == 0;
}

// Whether the logits of sequence n are the same.
static bool longrope_same_logits(const longrope_run* a, const longrope_run* b, const data* d,
                                 int n) {
    size_t at = 0;
    for (int i = 0; i < n; i++) {
        at += (size_t)d->lengths[i] * VOCAB;
    }
    return memcmp(a->logits + at, b->logits + at, (size_t)d->lengths[n] * VOCAB * 4) == 0;
}

// Texts of both kinds in a micro-batch, only those of one kind with labels: each is computed with
// the factors of its own length, forwards and backwards, as if there were no others.
static enum greatest_test_res longrope_mixed(const test_machine* machine, qlora_mode mode) {
    static const int32_t lengths[LONGROPE_COUNT] = {9, 2, LONGROPE_SHORT, LONGROPE_SHORT + 1};
    static longrope_run runs[3];
    for (int kind = 0; kind < 2; kind++) { // short ones, long ones
        data d;
        int32_t at = 0;
        data_make(&d, "longrope", lengths, LONGROPE_COUNT);
        for (int n = 0; n < LONGROPE_COUNT; n++) {
            bool judged = (lengths[n] > LONGROPE_SHORT) == (kind == 1);
            for (int32_t i = 0; i < lengths[n]; i++, at++) {
                d.labels[at] = judged ? d.ids[at] : -100;
            }
        }
        for (int sets = 0; sets < 3; sets++) {
            setup s = longrope_setup(machine, mode, (longrope_sets)sets);
            ASSERT(longrope_train(&s, &d, &runs[sets]));
        }
        ASSERT(longrope_same(&runs[SETS_BOTH], &runs[kind == 0 ? SETS_SHORT : SETS_LONG]));
        ASSERT_FALSE(longrope_same(&runs[SETS_BOTH], &runs[kind == 0 ? SETS_LONG : SETS_SHORT]));
        for (int n = 0; n < LONGROPE_COUNT; n++) {
            bool is_long = lengths[n] > LONGROPE_SHORT;
            longrope_run* own = &runs[is_long ? SETS_LONG : SETS_SHORT];
            longrope_run* other = &runs[is_long ? SETS_SHORT : SETS_LONG];
            ASSERT(longrope_same_logits(&runs[SETS_BOTH], own, &d, n));
            ASSERT_FALSE(longrope_same_logits(&runs[SETS_BOTH], other, &d, n));
        }
        for (int sets = 0; sets < 3; sets++) {
            free(runs[sets].gradients);
        }
    }
    PASS();
}

TEST the_length_of_a_text_decides(const test_machine* machine) {
    bool gpu = strcmp(machine->backend, "cpu") != 0;
    return longrope_mixed(machine, gpu ? QLORA_MODE_BF16 : QLORA_MODE_F32);
}

TEST the_length_of_a_text_decides_in_fp8(const test_machine* machine) {
    if (!test_has_fp8(machine)) {
        SKIPm("FP8 needs compute capability 9.0 and cuBLASLt");
    }
    return longrope_mixed(machine, QLORA_MODE_FP8);
}

// Nothing changes for short texts if a model is planned for longer ones, trained or generated.
TEST room_for_long_texts_changes_nothing(const test_machine* machine) {
    static const int32_t lengths[LONGROPE_COUNT] = {5, 2, LONGROPE_SHORT, 1};
    static longrope_run runs[3];
    data d;
    data_make(&d, "longrope, short", lengths, LONGROPE_COUNT);
    for (int i = 0; i < 3; i++) {
        setup s = longrope_setup(machine, QLORA_MODE_F32, SETS_BOTH);
        s.model.max_length = i == 1 ? LONGROPE_SHORT + 1 : LONGROPE_SHORT;
        s.model.generate_tokens = i == 2 ? 20 : 0;
        ASSERT(longrope_train(&s, &d, &runs[i]));
        ASSERT(longrope_same(&runs[0], &runs[i]));
        for (int n = 0; n < LONGROPE_COUNT; n++) {
            ASSERT(longrope_same_logits(&runs[0], &runs[i], &d, n));
        }
    }
    for (int i = 0; i < 3; i++) {
        free(runs[i].gradients);
    }
    PASS();
}

// A step of a micro-batch, whole or in slices: its loss, and the parameters that it leaves.
static bool longrope_step(const setup* s, const data* d, bool sliced, longrope_run* out) {
    rig r;
    qlora_train_info info;
    memset(out, 0, sizeof *out);
    bool ok = rig_open(&r, s);
    bool done = !sliced;
    if (ok && sliced) {
        ok = qlora_train_begin(r.trainer, &d->batch, 1) == QLORA_OK;
        while (ok && !done) {
            ok = qlora_train_slice(r.trainer, 0.0, &done) == QLORA_OK;
        }
    } else if (ok) {
        ok = qlora_train_step(r.trainer, &d->batch, 1, NULL) == QLORA_OK;
    }
    out->gradients = ok ? rig_read(&r, false, &out->count) : NULL;
    ok = out->gradients != NULL && qlora_train_query(r.trainer, &info) == QLORA_OK;
    out->loss = ok ? info.loss : 0.0;
    return (ok || rig_says(&r, "step")) && rig_close(&r, s);
}

// A step in slices chooses the factors of each text as a whole step does: of texts that are all
// short, all long, or on both sides of the limit, in a model that has one set of factors or both.
TEST slices_choose_by_length(const test_machine* machine) {
    static const struct {
        int32_t lengths[LONGROPE_COUNT];
        int64_t max_length;
        bool is_short;
        bool is_long;
    } cases[] = {{{LONGROPE_SHORT, 2, 5, 1}, LONGROPE_SHORT, true, false},
                 {{LONGROPE_SHORT, 2, 5, 1}, LONGROPE_SHORT + 1, true, false},
                 {{LONGROPE_SHORT + 1, 7, 7, 3}, 0, true, true},
                 {{LONGROPE_SHORT, LONGROPE_SHORT + 1, 2, 9}, 9, true, true},
                 {{LONGROPE_SHORT + 1, 7, 8, 0}, 0, false, true}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        data d;
        longrope_run runs[2][3];
        int count = LONGROPE_COUNT - (cases[i].lengths[LONGROPE_COUNT - 1] == 0 ? 1 : 0);
        data_make(&d, "longrope, slices", cases[i].lengths, count);
        for (int sets = 0; sets < 3; sets++) {
            setup s = longrope_setup(machine, QLORA_MODE_F32, (longrope_sets)sets);
            s.model.max_length = cases[i].max_length;
            ASSERT(longrope_step(&s, &d, false, &runs[0][sets]));
            ASSERT(longrope_step(&s, &d, true, &runs[1][sets]));
            ASSERT(longrope_same(&runs[0][sets], &runs[1][sets]));
        }
        for (int sets = SETS_SHORT; sets <= SETS_LONG; sets++) {
            bool other = sets == SETS_SHORT ? cases[i].is_long : cases[i].is_short;
            ASSERT(longrope_same(&runs[1][SETS_BOTH], &runs[0][sets]) != other);
        }
        for (int n = 0; n < 6; n++) {
            free(runs[n / 3][n % 3].gradients);
        }
    }
    PASS();
}

// The tokens of a text and their log-probabilities, whole or in slices.
static bool longrope_text(qlora_model* m, const qlora_generate_desc* desc, bool sliced,
                          int32_t tokens[4], double logprobs[4], int64_t* computed) {
    qlora_generation* g = NULL;
    qlora_generate_desc d = *desc;
    qlora_generation_info info;
    bool stopped = false;
    d.in_slices = sliced;
    bool ok = qlora_generate_begin(m, &d, &g) == QLORA_OK;
    for (int i = 0; ok && i < 4; i++) {
        bool done = !sliced;
        ok = sliced || qlora_generate_next(g, &tokens[i], &stopped) == QLORA_OK;
        while (ok && !done) {
            ok = qlora_generate_slice(g, 0.0, &tokens[i], &stopped, &done) == QLORA_OK;
        }
        ok = ok && qlora_generate_logprob(g, &logprobs[i]) == QLORA_OK;
    }
    ok = ok && qlora_generate_query(g, &info) == QLORA_OK;
    *computed = ok ? info.computed : 0;
    return qlora_generate_end(g) == QLORA_OK && ok;
}

// So does a text in slices that stays short, outgrows the short factors, or is long from the start.
TEST texts_in_slices_choose_by_length(const test_machine* machine) {
    static const int32_t prompt[] = {3, 17, 42, 9, 30, 5, 21, 8};
    static const int32_t stops[] = {-1};
    setup s = longrope_setup(machine, QLORA_MODE_F32, SETS_BOTH);
    rig r;
    s.model.generate_tokens = 16;
    ASSERT(rig_open(&r, &s));
    for (int64_t count = 2; count <= LONGROPE_SHORT + 1; count++) {
        int32_t tokens[2][4];
        double logprobs[2][4];
        int64_t computed[2];
        qlora_generate_desc d;
        memset(&d, 0, sizeof d);
        d.prompt = prompt;
        d.prompt_tokens = count;
        d.max_tokens = 4;
        d.temperature = 0.8f;
        d.stops = stops;
        d.stop_count = 1;
        for (int i = 0; i < 2; i++) { // whole, in slices
            ASSERT(longrope_text(r.model, &d, i == 1, tokens[i], logprobs[i], &computed[i]));
        }
        ASSERT_MEM_EQ(tokens[0], tokens[1], sizeof tokens[0]);
        ASSERT_MEM_EQ(logprobs[0], logprobs[1], sizeof logprobs[0]);
        bool outgrows = count <= LONGROPE_SHORT && count + 3 > LONGROPE_SHORT;
        ASSERT_EQ_FMT((int)count + 3 + (outgrows ? LONGROPE_SHORT : 0), (int)computed[1], "%d");
    }
    ASSERT(rig_close(&r, &s));
    PASS();
}

SUITE(long_suite) {
    RUN_ON(TEST_CPU | TEST_ONE_GPU, the_length_of_a_text_decides);
    RUN_ON(TEST_ONE_EACH, slices_choose_by_length);
    RUN_ON(TEST_ONE_EACH, texts_in_slices_choose_by_length);
    RUN_ON(TEST_ONE_GPU, the_length_of_a_text_decides_in_fp8);
    RUN_ON(TEST_ONE_EACH, room_for_long_texts_changes_nothing);
    RUN_ON(TEST_ONE_EACH, offload_gives_the_same_bits);
    RUN_ON(TEST_ONE_EACH, groups_give_the_same_bits);
    RUN_ON(TEST_ONE_EACH, kept_attention_gives_the_same_bits);
    RUN_ON(TEST_ONE_EACH, attention_on_the_host_gives_the_same_bits);
    RUN_ON(TEST_ONE_GPU, fp8_attention_on_the_host_gives_the_same_bits);
    RUN_ON(TEST_CPU, groups_fit_the_host);
    RUN_ON(TEST_ONE_EACH, tiles_give_the_same_numbers);
    RUN_ON(TEST_ONE_EACH, bf16_tiles_give_the_same_bits);
    RUN_ON(TEST_ONE_EACH, many_tokens_give_the_same);
    RUN_ON(TEST_CPU, long_sequences_fit);
    RUN_ON(TEST_CPU, attention_is_kept_first);
    RUN_ON(TEST_CPU, attention_is_kept_on_the_host);
    RUN_ON(TEST_CPU, copies_take_what_others_leave);
    RUN_ON(TEST_CPU, host_memory_is_limited);
    RUN_ON(TEST_CPU, attention_of_40000_tokens);
    RUN_ON(TEST_ONE_EACH, offload_is_planned);
    RUN_ON(TEST_ONE_EACH, far_rows_are_reached);
    RUN_ON(TEST_CPU | TEST_ONE_FAKE, contradictions_are_refused);
    RUN_ON(TEST_ONE_FAKE, refused_host_memory_is_an_error);
    RUN_ON(TEST_ONE_FAKE, refused_host_memory_for_attention_is_not);
    RUN_ON(TEST_ONE_FAKE, failed_copies_are_errors);
    RUN_ON(TEST_ONE_FAKE, failed_steps_leave_no_copies);
}
