// step.c - steps of decoding on the device: the products of few rows against plain loops, texts of
// every kind of model against qlora_eval_logits, the choice of a token against the host's, and a
// graph against the same kernels one by one.
#include "machines.h"
#include "model_rig.h"

#define STEP_VOCAB 67
#define STEP_ROOM 160

typedef struct step_kind {
    const char* name;
    qlora_family family;
    int64_t hidden;
    int64_t heads;
    int64_t kv_heads;
    int64_t head_dim;
    int64_t window; // of every second layer
    int32_t rank;
    bool bias;
    bool qk_norm;
    bool tied;
    qlora_base_format base;
} step_kind;

static const step_kind step_kinds[] = {
    {"llama", QLORA_FAMILY_LLAMA, 128, 4, 2, 32, 0, 16, false, false, false, QLORA_BASE_NF4},
    {"qwen2", QLORA_FAMILY_QWEN2, 64, 12, 1, 16, 0, 8, true, false, true, QLORA_BASE_NF4},
    {"qwen3", QLORA_FAMILY_QWEN3, 64, 8, 2, 24, 0, 4, false, true, true, QLORA_BASE_NF4},
    {"mistral", QLORA_FAMILY_MISTRAL, 72, 4, 1, 16, 40, 20, false, false, false, QLORA_BASE_16BIT},
    {"gemma2", QLORA_FAMILY_GEMMA2, 64, 2, 1, 32, 140, 8, false, false, true, QLORA_BASE_NF4},
    {"phi3", QLORA_FAMILY_PHI3, 64, 2, 2, 32, 0, 8, false, false, false, QLORA_BASE_NF4},
    {"olmo2", QLORA_FAMILY_OLMO2, 64, 4, 4, 16, 0, 3, false, true, false, QLORA_BASE_NF4},
    {"granite", QLORA_FAMILY_GRANITE, 64, 4, 2, 16, 0, 8, false, false, true, QLORA_BASE_NF4},
    {"glm4", QLORA_FAMILY_GLM4, 64, 2, 1, 64, 0, -1, true, false, false, QLORA_BASE_NF4},
    {"arcee", QLORA_FAMILY_ARCEE, 128, 4, 2, 32, 0, 16, false, false, false, QLORA_BASE_NF4},
    {"cohere2", QLORA_FAMILY_COHERE2, 128, 4, 2, 64, 40, 8, false, false, true, QLORA_BASE_NF4},
    {"4-bit head", QLORA_FAMILY_LLAMA, 64, 4, 2, 16, 0, 4, false, false, false, QLORA_BASE_16BIT},
    {"wide", QLORA_FAMILY_MISTRAL, 192, 12, 1, 128, 40, 16, false, false, false, QLORA_BASE_NF4},
};

static int64_t step_depth = 2; // layers
static const char* step_adapter = NULL; // a folder
static int64_t step_short = 0;          // tokens of the longest text with longrope's short factors

static qlora_model_config step_config(const step_kind* k) {
    qlora_model_config c;
    memset(&c, 0, sizeof c);
    c.family = k->family;
    c.vocab = STEP_VOCAB;
    c.hidden = k->hidden;
    c.intermediate = k->hidden > 1024 ? 5632 : k->hidden > 256 ? 704 : k->hidden == 256 ? 512 : 192;
    c.layers = step_depth;
    c.heads = k->heads;
    c.kv_heads = k->kv_heads;
    c.head_dim = k->head_dim;
    c.max_positions = 512;
    c.rms_eps = 1e-5;
    c.rope.theta = 10000.0;
    c.rope.factor = 1.0;
    c.window = k->window;
    c.sliding[1] = k->window > 0 ? 1 : 0;
    c.qkv_bias = k->bias;
    c.qk_norm = k->qk_norm;
    c.tied = k->tied;
    if (k->family == QLORA_FAMILY_GEMMA2) {
        c.attention_cap = 5.0;
        c.logits_cap = 8.0;
    } else if (k->family == QLORA_FAMILY_COHERE2) {
        c.logits_divisor = 0.5;
        c.no_rope[0] = 1;
    } else if (k->family == QLORA_FAMILY_GRANITE) {
        c.residual_scale = 0.5;
        c.embedding_scale = 2.0;
        c.logits_divisor = 3.0;
        c.attention_scale = 0.2;
        c.no_rope[1] = 1;
    }
    if (step_short > 0) {
        c.rope.type = QLORA_ROPE_LONGROPE;
        c.rope.original_max_position = (double)step_short;
        for (int64_t i = 0; i < k->head_dim / 2; i++) {
            c.rope.short_factor[i] = 1.0f + 0.1f * (float)i;
            c.rope.long_factor[i] = 3.0f + 0.5f * (float)i;
        }
    }
    return c;
}

#define STEP_TEXTS 9 // two groups of rows

// The ways of a step, and the texts of a model that has it: with all variants, for one text and for
// many, without them, and what models use.
typedef struct step_way {
    uint32_t variants;
    int64_t texts;
} step_way;

static const step_way step_ways[] = {
    {QLORA__DECODE_ALL, 1},
    {QLORA__DECODE_ALL, STEP_TEXTS},
    {0, 1},
    {QLORA__DECODE_ALL & ~QLORA__DECODE_ONE, 1},
    {QLORA__DECODE_USED, 3},
    {QLORA__DECODE_ALL & ~QLORA__DECODE_WARPGROUP, STEP_TEXTS},
};
static step_way step_now = {QLORA__DECODE_ALL, 1};
static int64_t step_room = STEP_ROOM; // generate_tokens
static int64_t step_positions = 0;    // generate_positions
static qlora_purpose step_purpose = QLORA_PURPOSE_EVALUATE;

static bool step_fill_adapters(qlora_model* model) {
    test_random random = test_random_start("adapters of a decoding step");
    qlora_model_info info;
    bool ok = qlora_model_query(model, &info) == QLORA_OK;
    for (int64_t i = 0; ok && i < info.parameters; i++) {
        qlora_parameter_info p;
        ok = qlora_parameter_query(model, i, &p) == QLORA_OK;
        float* values = (float*)malloc((size_t)(p.rows * p.cols) * 4);
        test_random_fill(&random, values, (size_t)(p.rows * p.cols), 0.1f);
        ok = ok && qlora_parameter_write(model, i, values) == QLORA_OK;
        free(values);
    }
    return ok;
}

static qlora_result step_open_texts(qlora_ctx* ctx, const step_kind* k, qlora_mode mode,
                                    int64_t tokens, int64_t texts, qlora_model** out) {
    qlora_model_config config = step_config(k);
    qlora_model_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.config = &config;
    desc.seed = 5;
    desc.weight_std = 0.2f;
    desc.base = k->base;
    desc.head = strcmp(k->name, "4-bit head") == 0 ? QLORA_HEAD_NF4 : QLORA_HEAD_FULL;
    desc.mode = mode;
    desc.rank = step_adapter != NULL ? 0 : k->rank;
    desc.adapter = step_adapter;
    desc.tokens = tokens;
    desc.max_sequences = 2;
    desc.generate_tokens = step_room;
    desc.generate_sequences = texts;
    desc.generate_positions = step_positions;
    desc.purpose = step_purpose;
    qlora_result r = qlora_model_open(ctx, &desc, out);
    if (r == QLORA_OK) {
        (*out)->decode.variants = step_now.variants;
    }
    bool fills = r == QLORA_OK && k->rank > 0 && step_adapter == NULL;
    return fills && !step_fill_adapters(*out) ? QLORA_ERR_STATE : r;
}

static qlora_result step_open(qlora_ctx* ctx, const step_kind* k, int64_t tokens,
                              qlora_model** out) {
    return step_open_texts(ctx, k, QLORA_MODE_BF16, tokens, step_now.texts, out);
}

static void step_prompt(int32_t* ids, int32_t count) {
    for (int32_t i = 0; i < count; i++) {
        ids[i] = (i * 31 + i * i % 17) % STEP_VOCAB;
    }
}

// Generates `fresh` tokens after a prompt; their log-probabilities in logprobs.
static bool step_text(qlora_model* m, qlora_generate_desc* d, int32_t* ids, int32_t prompt,
                      int32_t fresh, double* logprobs) {
    static const int32_t none[1] = {-1};
    qlora_generation* g = NULL;
    step_prompt(ids, prompt);
    d->prompt = ids;
    d->prompt_tokens = prompt;
    d->stops = none;
    d->stop_count = 1;
    bool ok = qlora_generate_begin(m, d, &g) == QLORA_OK;
    for (int32_t i = 0; ok && i < fresh; i++) {
        bool stopped = false;
        ok = qlora_generate_next(g, &ids[prompt + i], &stopped) == QLORA_OK && !stopped &&
             qlora_generate_logprob(g, &logprobs[i]) == QLORA_OK;
        ok = ok && g->chose == (i > 0); // the first token comes from the logits of the prompt
    }
    if (!ok) {
        printf("generation: %s\n", qlora_last_error(m->ctx));
    }
    return qlora_generate_end(g) == QLORA_OK && ok;
}

// The largest difference of the log-probabilities from those of the whole text, and how far a
// chosen token is below the top, relative to the largest logit.
static double step_off(qlora_model* m, const int32_t* ids, int32_t prompt, int32_t fresh,
                       const double* logprobs, double* below) {
    int32_t count = prompt + fresh;
    float* logits = (float*)malloc((size_t)(count * STEP_VOCAB) * 4);
    qlora_batch b;
    memset(&b, 0, sizeof b);
    b.ids = ids;
    b.labels = ids;
    b.lengths = &count;
    b.count = 1;
    double worst = qlora_eval_logits(m, &b, logits) == QLORA_OK ? 0.0 : NAN;
    *below = 0.0;
    for (int32_t i = 0; i < fresh; i++) {
        const float* row = logits + (prompt + i - 1) * STEP_VOCAB;
        double top = -INFINITY;
        double most = 0.0;
        double sum = 0.0;
        for (int v = 0; v < STEP_VOCAB; v++) {
            top = fmax(top, (double)row[v]);
            most = fmax(most, fabs((double)row[v]));
        }
        for (int v = 0; v < STEP_VOCAB; v++) {
            sum += exp((double)row[v] - top);
        }
        double want = (double)row[ids[prompt + i]] - top - log(sum);
        double off = fabs(want - logprobs[i]) / most;
        worst = off <= worst ? worst : off;
        *below = fmax(*below, (top - (double)row[ids[prompt + i]]) / most);
    }
    free(logits);
    return worst;
}

static bool step_kind_holds(qlora_ctx* ctx, const step_kind* k, size_t count) {
    qlora_model* m = NULL;
    bool ok = step_open(ctx, k, count > 1 ? STEP_ROOM : 8, &m) == QLORA_OK;
    if (!ok) {
        printf("%s: %s\n", k->name, qlora_last_error(ctx));
        return false;
    }
    // From the first page, and across its end.
    static const int32_t cases[2][2] = {{3, 3}, {127, 3}};
    for (size_t i = 0; ok && i < count; i++) {
        int32_t ids[STEP_ROOM];
        double logprobs[8];
        double below = 0.0;
        qlora_generate_desc d;
        memset(&d, 0, sizeof d);
        ok = step_text(m, &d, ids, cases[i][0], cases[i][1], logprobs);
        double off = step_off(m, ids, cases[i][0], cases[i][1], logprobs, &below);
        ok = ok && off <= 0.02 && below <= 0.02;
        if (!ok) {
            printf("%s, prompt of %d: log-probabilities %g off, a token %g below the top\n",
                   k->name, (int)cases[i][0], off, below);
        }
    }
    return qlora_model_close(m) == QLORA_OK && ok;
}

TEST steps_are_passes(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx) {
        SKIPm(test_open_reason());
    }
    bool all = (machine->sets & TEST_ONE_EACH) != 0;
    size_t count = sizeof step_kinds / sizeof step_kinds[0];
    for (size_t v = 0; v < sizeof step_ways / sizeof step_ways[0]; v++) {
        step_now = step_ways[v];
        for (size_t i = all ? 0 : 5; i < (all ? count : 6); i++) {
            // Long prompts cost most: those of windows are enough, and of many texts the last one.
            bool last = i + 1 == count && (v == 1 || step_ways[v].texts == STEP_TEXTS);
            bool both = last || (v == 0 && step_kinds[i].window > 0);
            bool other = all && test_brief() && (i + v) % 2 == 0 && !both;
            if (other || (test_checked(machine) && (i + v) % 4 != 0)) {
                continue; // every kind and every way remain
            }
            size_t cases = both ? 2 : 1;
            ASSERT(step_kind_holds(ctx, &step_kinds[i], cases));
        }
    }
    step_now = step_ways[0];
    qlora_cache_info info;
    ASSERT_EQ(QLORA_OK, qlora_cache_query(ctx, &info));
    ASSERT_EQ(0, (int)info.jit_after_seal);
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// The kernels of many texts for heads of 64 and 128, with and without warpgroup instructions.
TEST steps_of_many_are_passes(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx) {
        SKIPm(test_open_reason());
    }
    size_t count = sizeof step_kinds / sizeof step_kinds[0];
    for (int way = 0; way < 2; way++) {
        step_now = step_ways[way == 0 ? 1 : sizeof step_ways / sizeof step_ways[0] - 1];
        ASSERT_EQ(STEP_TEXTS, (int)step_now.texts);
        for (size_t i = count - 2; i < count; i++) {
            ASSERT(step_kind_holds(ctx, &step_kinds[i], 1));
        }
    }
    step_now = step_ways[0];
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// ---- the logits of many texts

#define STEP_HEAD_VOCAB 600
#define STEP_HEAD_TEXTS 70 // two groups of rows

// Random rows times the head: every logit against a sum in double precision.
static bool step_head_holds(qlora_ctx* ctx, const step_kind* k, int64_t texts,
                            uint32_t variants) {
    qlora_model_config config = step_config(k);
    qlora_model_desc desc;
    qlora_model* m = NULL;
    memset(&desc, 0, sizeof desc);
    config.vocab = STEP_HEAD_VOCAB;
    desc.config = &config;
    desc.mode = QLORA_MODE_BF16;
    desc.weight_std = 0.2f;
    desc.rank = -1;
    desc.tokens = 8;
    desc.generate_tokens = 16;
    desc.generate_sequences = texts;
    desc.purpose = QLORA_PURPOSE_EVALUATE;
    if (qlora_model_open(ctx, &desc, &m) != QLORA_OK) {
        printf("%s: %s\n", k->name, qlora_last_error(ctx));
        return false;
    }
    m->decode.variants = variants;
    const qlora__decode* d = &m->decode;
    const qlora_tensor* table = qlora__head_table(m);
    size_t x_count = (size_t)(texts * d->x.ld);
    size_t w_count = (size_t)(STEP_HEAD_VOCAB * table->ld);
    size_t y_count = (size_t)(texts * d->logits.ld);
    uint16_t* x = (uint16_t*)malloc((x_count + w_count + y_count) * 2);
    uint16_t* w = x + x_count;
    uint16_t* y = w + w_count;
    test_random random = test_random_start("the head of many texts");
    for (size_t i = 0; i < x_count; i++) {
        x[i] = qlora__bf16_from((float)test_random_normal(&random));
    }
    bool ok = qlora__enter(ctx, "test") == QLORA_OK &&
              qlora__copy_in(ctx, d->x.data, x, x_count * 2) == QLORA_OK &&
              qlora__decode_head(m) == QLORA_OK &&
              qlora__copy_out(ctx, y, d->logits.data, y_count * 2) == QLORA_OK &&
              qlora__copy_out(ctx, w, table->data, w_count * 2) == QLORA_OK;
    ok = qlora__leave(ctx, ok ? QLORA_OK : QLORA_ERR_STATE) == QLORA_OK;
    double cap = m->plan.config.logits_cap;
    for (int64_t i = 0; ok && i < texts * STEP_HEAD_VOCAB; i++) {
        int64_t n = i / STEP_HEAD_VOCAB;
        int64_t v = i % STEP_HEAD_VOCAB;
        double sum = 0.0;
        for (int64_t c = 0; c < config.hidden; c++) {
            sum += (double)qlora__bf16_to(x[n * d->x.ld + c]) *
                   (double)qlora__bf16_to(w[v * table->ld + c]);
        }
        sum /= m->plan.config.logits_divisor;
        sum = cap > 0.0 ? cap * tanh(sum / cap) : sum;
        double got = (double)qlora__bf16_to(y[n * d->logits.ld + v]);
        ok = fabs(got - sum) <= 0.01 + 0.01 * fabs(sum);
        if (!ok) {
            printf("%s: logit %d of text %d is %g, not %g\n", k->name, (int)v, (int)n, got, sum);
        }
    }
    free(x);
    return qlora_model_close(m) == QLORA_OK && ok;
}

// A block has several tiles of rows, the last of which is not whole, and several stages of columns.
TEST the_head_of_many_is_a_product(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx) {
        SKIPm(test_open_reason());
    }
    static const step_kind long_rows = {"long rows", QLORA_FAMILY_LLAMA, 384, 2, 1, 64, 0, -1,
                                        false,       false,              true, QLORA_BASE_NF4};
    static const uint32_t ways[2] = {QLORA__DECODE_ALL,
                                     QLORA__DECODE_ALL & ~QLORA__DECODE_WARPGROUP};
    ctx->gpu->sm_count = 4;
    for (int way = 0; way < 2; way++) {
        ASSERT(step_head_holds(ctx, &long_rows, STEP_HEAD_TEXTS, ways[way]));
        ASSERT(step_head_holds(ctx, &step_kinds[4], STEP_HEAD_TEXTS, ways[way])); // a cap
        ASSERT(step_head_holds(ctx, &step_kinds[7], STEP_HEAD_TEXTS, ways[way])); // a divisor
    }
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// A warp has several rows, and rows end anywhere in what it has in flight.
TEST the_head_of_one_is_a_product(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx) {
        SKIPm(test_open_reason());
    }
    ctx->gpu->sm_count = 3;
    step_kind rows = {"rows",  QLORA_FAMILY_LLAMA, 1280, 2, 1, 64, 0, -1,
                      false, false,              true, QLORA_BASE_NF4};
    step_kind cap = step_kinds[4];
    step_kind divisor = step_kinds[7];
    cap.hidden = 512;
    divisor.hidden = 256;
    ASSERT(step_head_holds(ctx, &rows, 1, QLORA__DECODE_ALL));
    ASSERT(step_head_holds(ctx, &cap, 1, QLORA__DECODE_ALL));
    ASSERT(step_head_holds(ctx, &divisor, 1, QLORA__DECODE_ALL));
    if (strcmp(machine->backend, "cuda") == 0) {
        rows.hidden = 4352; // longer than what is in flight
        ASSERT(step_head_holds(ctx, &rows, 1, QLORA__DECODE_ALL));
    }
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// ---- the choice of a token

typedef struct step_choice {
    float temperature;
    int32_t top_k;
    float top_p;
    float min_p;
    float penalty;
} step_choice;

static const step_choice step_choices[] = {
    {0.0f, 0, 0.0f, 0.0f, 1.0f},  {0.0f, 0, 0.0f, 0.0f, 1.7f},   {1.0f, 0, 0.0f, 0.0f, 1.0f},
    {1.3f, 5, 0.0f, 0.0f, 1.0f},  {0.7f, 0, 0.8f, 0.0f, 1.0f},   {2.0f, 0, 0.0f, 0.1f, 1.0f},
    {1.1f, 9, 0.9f, 0.05f, 1.2f}, {1e-30f, 3, 0.5f, 0.0f, 1.0f}, {50.0f, 60, 0.99f, 0.0f, 1.0f},
};

// Chooses with the kernels and with the host, from the same logits.
static bool step_choice_holds(qlora_model* m, const step_choice* c, const uint16_t* logits,
                              uint64_t seed) {
    qlora_ctx* ctx = m->ctx;
    const qlora__decode* d = &m->decode;
    qlora_generate_desc desc;
    qlora_generation* g = NULL;
    int32_t prompt[2] = {3, 4};
    memset(&desc, 0, sizeof desc);
    desc.prompt = prompt;
    desc.prompt_tokens = 2;
    desc.temperature = c->temperature;
    desc.top_k = c->top_k;
    desc.top_p = c->top_p;
    desc.min_p = c->min_p;
    desc.repetition_penalty = c->penalty;
    desc.seed = seed;
    if (qlora_generate_begin(m, &desc, &g) != QLORA_OK) {
        return false;
    }
    for (int i = 0; i < STEP_VOCAB; i++) {
        g->logits[i] = qlora__bf16_to(logits[i]);
        g->seen[i] = i % 3 == 0;
    }
    g->waiting = 7;
    g->length = 41;
    g->seen[7] = 1;
    qlora__decode_text text;
    g->pending = true;
    bool ok = qlora__enter(ctx, "test") == QLORA_OK && qlora__generate_upload(g) == QLORA_OK &&
              qlora__generate_enlist(ctx, m) == QLORA_OK;
    int32_t want = qlora__sample(g, STEP_VOCAB, 41);
    ok = ok && qlora__copy_in(ctx, d->logits.data, logits, STEP_VOCAB * 2) == QLORA_OK;
    ok = ok && qlora__decode_pick(m) == QLORA_OK;
    ok = ok && qlora__copy_out(ctx, &text, d->state.data, sizeof text) == QLORA_OK;
    double logprob = 0.0;
    g->chosen = ok ? text.chosen : 0;
    g->chose = false;
    ok = ok && qlora__generate_logprob(g, &logprob) == QLORA_OK;
    uint8_t seen = 0;
    ok = ok && qlora__copy_out(ctx, &seen, (char*)d->seen.data + want, 1) == QLORA_OK;
    ok = qlora__leave(ctx, ok ? QLORA_OK : QLORA_ERR_STATE) == QLORA_OK;
    if (!ok) {
        printf("%s\n", qlora_last_error(ctx));
    } else if (text.chosen != want || !(fabs(text.logprob - logprob) < 1e-4) ||
               text.token != want || text.position != 42 || text.bad != -1 ||
               (c->penalty != 1.0f && seen != 1)) {
        printf("temperature %g top_k %d top_p %g min_p %g penalty %g seed %d: chose %d, not %d "
               "(log-probability %g, not %g)\n",
               (double)c->temperature, (int)c->top_k, (double)c->top_p, (double)c->min_p,
               (double)c->penalty, (int)seed, (int)text.chosen, (int)want, text.logprob, logprob);
        ok = false;
    }
    return qlora_generate_end(g) == QLORA_OK && ok;
}

TEST the_device_chooses_as_the_host(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx) {
        SKIPm(test_open_reason());
    }
    qlora_model* m = NULL;
    ASSERT_EQ(QLORA_OK, step_open(ctx, &step_kinds[5], 8, &m));
    test_random random = test_random_start("the_device_chooses_as_the_host");
    for (size_t i = 0; i < sizeof step_choices / sizeof step_choices[0]; i++) {
        for (uint64_t seed = 0; seed < (test_brief() ? 2u : 4u); seed++) {
            uint16_t logits[STEP_VOCAB];
            for (int v = 0; v < STEP_VOCAB; v++) { // few different values: many are equal
                float x = (float)test_random_normal(&random) * 3.0f;
                logits[v] = qlora__bf16_from(seed % 2 == 0 ? floorf(x) : x);
            }
            ASSERT(step_choice_holds(m, &step_choices[i], logits, seed));
        }
    }
    ASSERT_EQ(QLORA_OK, qlora_model_close(m));
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// ---- a graph against its kernels one by one

TEST a_graph_has_the_bits_of_its_kernels(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx) {
        SKIPm(test_open_reason());
    }
    qlora_model* m = NULL;
    int32_t ids[STEP_ROOM];
    double logprobs[8];
    ASSERT_EQ(QLORA_OK, step_open(ctx, &step_kinds[1], 9, &m));
    qlora_generate_desc d;
    memset(&d, 0, sizeof d);
    d.temperature = 1.0f;
    d.seed = 3;
    ASSERT(step_text(m, &d, ids, 5, 4, logprobs));
    ASSERT(m->decode.graphs[1] != NULL);
    // The same positions again, without the graph.
    qlora_generation* g = NULL;
    d.prompt = ids;
    d.prompt_tokens = 5;
    ASSERT_EQ(QLORA_OK, qlora_generate_begin(m, &d, &g));
    int32_t token = 0;
    bool stopped = false;
    ASSERT_EQ(QLORA_OK, qlora_generate_next(g, &token, &stopped));
    ASSERT_EQ(ids[5], token);
    ASSERT_EQ(QLORA_OK, qlora__enter(ctx, "test"));
    g->pending = true;
    ASSERT_EQ(QLORA_OK, qlora__generate_upload(g));
    ASSERT_EQ(QLORA_OK, qlora__generate_enlist(ctx, m));
    for (int i = 1; i < 4; i++) {
        qlora__decode_text text;
        ASSERT_EQ(QLORA_OK, qlora__decode_enqueue(ctx, m));
        ASSERT_EQ(QLORA_OK, qlora__copy_out(ctx, &text, m->decode.state.data, sizeof text));
        ASSERT_EQ(ids[5 + i], text.chosen);
        ASSERT(memcmp(&logprobs[i], &text.logprob, sizeof(double)) == 0);
    }
    ASSERT_EQ(QLORA_OK, qlora__leave(ctx, QLORA_OK));
    ASSERT_EQ(QLORA_OK, qlora_generate_end(g));
    ASSERT_EQ(QLORA_OK, qlora_model_close(m));
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// The kernel of a single row keeps it in shared memory. If it does not fit, another one is used.
TEST a_row_may_be_longer_than_shared_memory(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx) {
        SKIPm(test_open_reason());
    }
    qlora_model* m = NULL;
    int32_t ids[STEP_ROOM];
    double logprobs[8];
    qlora_generate_desc d;
    memset(&d, 0, sizeof d);
    ASSERT_EQ(QLORA_OK, step_open(ctx, &step_kinds[1], 9, &m));
    ctx->gpu->max_shared = 60000; // less than that kernel's table
    ASSERT(step_text(m, &d, ids, 5, 4, logprobs));
    ASSERT(!m->decode.eager);
    ASSERT_EQ(QLORA_OK, qlora_model_close(m));
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// On a small device, a block of the kernel for a single row has many pieces: its ring is filled
// more than once, rows end within a piece, and tiles are shared by warps.
TEST a_block_may_have_many_pieces(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx) {
        SKIPm(test_open_reason());
    }
    static const step_kind kind = {"llama, wide", QLORA_FAMILY_LLAMA, 320, 5, 1, 64, 0, 16, false,
                                   false,         false,              QLORA_BASE_NF4};
    ctx->gpu->sm_count = 1;
    step_now = step_ways[0];
    ASSERT(step_kind_holds(ctx, &kind, 1));
    ctx->gpu->sm_count = 3;
    ASSERT(step_kind_holds(ctx, &kind, 1));
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

static const step_kind step_long_rows[3] = {
    {"llama, long rows", QLORA_FAMILY_LLAMA, 128, 12, 2, 128, 0, 16, false, false, false,
     QLORA_BASE_NF4},
    {"qwen3, long rows", QLORA_FAMILY_QWEN3, 128, 6, 1, 64, 0, 20, false, true, true,
     QLORA_BASE_NF4},
    {"olmo2, long rows", QLORA_FAMILY_OLMO2, 256, 2, 2, 64, 0, 40, false, true, false,
     QLORA_BASE_NF4}};

// The same of many texts: on a small device a block takes many chunks of columns, in one split or
// in some, and the next kernel adds partial sums of every stack.
TEST a_block_may_have_many_chunks(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx) {
        SKIPm(test_open_reason());
    }
    // Of olmo2, norms are over whole rows of q, and not every kernel has room for its z.
    static const int32_t counts[3] = {2, 5, 5};
    for (int i = 0; i < 6; i++) {
        ctx->gpu->sm_count = counts[i / 2];
        step_now = step_ways[i % 2 == 0 ? 1 : sizeof step_ways / sizeof step_ways[0] - 1];
        ASSERT(step_kind_holds(ctx, &step_long_rows[i / 2], 1));
    }
    step_now = step_ways[0];
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// Runs a step of `texts` texts, of which text i begins with token i * 7 % 5, or, from the second
// step on, goes on with what it chose. Texts of the same token must have the same logits.
static bool step_rows_alike(qlora_ctx* ctx, qlora_model* m, int64_t texts) {
    const qlora__decode* d = &m->decode;
    size_t bytes = (size_t)texts * sizeof(qlora__decode_text);
    size_t row = (size_t)d->logits.ld * 2;
    qlora__decode_text* state = (qlora__decode_text*)calloc((size_t)texts, sizeof *state);
    char* logits = (char*)malloc((size_t)texts * row);
    for (int64_t i = 0; i < texts; i++) {
        state[i].token = (int32_t)(i * 7 % 5);
        state[i].alive = 1;
        state[i].penalty = 1.0f;
    }
    bool ok = qlora__enter(ctx, "test") == QLORA_OK;
    ok = ok && qlora__copy_in(ctx, d->state.data, state, bytes) == QLORA_OK;
    for (int step = 0; ok && step < 2; step++) {
        ok = qlora__decode_enqueue(ctx, m) == QLORA_OK &&
             qlora__copy_out(ctx, logits, d->logits.data, (size_t)texts * row) == QLORA_OK;
        for (int64_t i = 5; ok && i < texts; i++) {
            ok = memcmp(logits + (size_t)i * row, logits + (size_t)(i % 5) * row,
                        STEP_VOCAB * 2) == 0;
        }
        ok = ok && memcmp(logits, logits + row, STEP_VOCAB * 2) != 0;
    }
    ok = qlora__leave(ctx, ok ? QLORA_OK : QLORA_ERR_STATE) == QLORA_OK && ok;
    free(state);
    free(logits);
    return ok;
}

// More texts than a block has rows: the bits of a row are the same in every block.
TEST rows_of_all_blocks_are_alike(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx) {
        SKIPm(test_open_reason());
    }
    ctx->gpu->sm_count = 5;
    for (int way = 0; way < 2; way++) {
        qlora_model* m = NULL;
        step_now = step_ways[way == 0 ? 1 : sizeof step_ways / sizeof step_ways[0] - 1];
        ASSERT_EQ(QLORA_OK,
                  step_open_texts(ctx, &step_long_rows[1], QLORA_MODE_BF16, 8, 67, &m));
        ASSERT(step_rows_alike(ctx, m, 67));
        ASSERT_EQ(QLORA_OK, qlora_model_close(m));
    }
    step_now = step_ways[0];
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// Keys of wide heads come half a page at a time.
TEST a_head_may_be_wide(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx) {
        SKIPm(test_open_reason());
    }
    static const step_kind kind = {"llama, wide heads", QLORA_FAMILY_LLAMA, 64, 2, 1, 192, 0, 8,
                                   false,               false,              false,
                                   QLORA_BASE_NF4};
    step_now = step_ways[0];
    ASSERT(step_kind_holds(ctx, &kind, 2));
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// Where no graph can be captured, a text is generated without one.
TEST a_text_needs_no_graph(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx) {
        SKIPm(test_open_reason());
    }
    qlora_model* m[2] = {NULL, NULL};
    int32_t ids[2][STEP_ROOM];
    double logprobs[2][8];
    qlora_generate_desc d;
    memset(&d, 0, sizeof d);
    const fake_api* fake = test_fake();
    for (int i = 0; i < 2; i++) {
        ASSERT_EQ(QLORA_OK, step_open(ctx, &step_kinds[1], 9, &m[i]));
        if (i == 1) {
            fake->fail_at("cuStreamEndCapture", 1, 900, false);
        }
        ASSERT(step_text(m[i], &d, ids[i], 5, 4, logprobs[i]));
        fake->fail_clear();
        ASSERT_EQ(i == 1, m[i]->decode.eager);
        ASSERT_EQ(i == 1, m[i]->decode.graphs[1] == NULL);
        ASSERT_EQ(i == 0, m[i]->decode.ahead);
        ASSERT_EQ(QLORA_OK, qlora_model_close(m[i]));
    }
    ASSERT_MEM_EQ(ids[0], ids[1], 9 * sizeof(int32_t));
    ASSERT_MEM_EQ(logprobs[0], logprobs[1], 4 * sizeof(double));
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// Switching adapters makes graphs invalid. They are captured again.
TEST adapters_go_off_and_on(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx) {
        SKIPm(test_open_reason());
    }
    qlora_model* m = NULL;
    int32_t ids[4][STEP_ROOM];
    double logprobs[4][8];
    qlora_generate_desc d;
    memset(&d, 0, sizeof d);
    ASSERT_EQ(QLORA_OK, step_open(ctx, &step_kinds[1], 9, &m));
    for (int i = 0; i < 4; i++) {
        ASSERT_EQ(QLORA_OK, qlora_adapter_use(m, i % 2 == 0));
        ASSERT(step_text(m, &d, ids[i], 5, 4, logprobs[i]));
    }
    for (int i = 0; i < 2; i++) {
        ASSERT_MEM_EQ(ids[i], ids[i + 2], 9 * sizeof(int32_t));
        ASSERT_MEM_EQ(logprobs[i], logprobs[i + 2], 4 * sizeof(double));
    }
    ASSERT(memcmp(logprobs[0], logprobs[1], 4 * sizeof(double)) != 0);
    ASSERT_EQ(QLORA_OK, qlora_model_close(m));
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// ---- several texts at once

typedef struct step_run {
    int32_t tokens[8];
    double logprobs[8];
} step_run;

static bool step_begin(qlora_model* m, int text, qlora_generation** g) {
    static const int32_t none[1] = {-1};
    int32_t ids[8];
    qlora_generate_desc d;
    memset(&d, 0, sizeof d);
    step_prompt(ids, 8);
    ids[0] = text;
    d.prompt = ids;
    d.prompt_tokens = 1 + text % 7;
    d.stops = none;
    d.stop_count = 1;
    d.temperature = text == 1 ? 1.5f : 0.0f;
    d.top_k = 20;
    d.repetition_penalty = text == 3 ? 1.5f : 0.0f;
    d.seed = (uint64_t)text;
    return qlora_generate_begin(m, &d, g) == QLORA_OK;
}

// The tokens of some texts, in the order of `order`; the second of them ends after two tokens, and
// one more begins instead.
static bool step_together(qlora_model* m, const int* order, int count, step_run* runs) {
    qlora_generation* list[STEP_TEXTS];
    int who[STEP_TEXTS];
    int made[STEP_TEXTS];
    bool ok = true;
    for (int i = 0; ok && i < count; i++) {
        who[i] = order[i];
        made[i] = 0;
        ok = step_begin(m, who[i], &list[i]);
    }
    for (int step = 0; ok && step < 3; step++) {
        int32_t tokens[STEP_TEXTS];
        bool stopped[STEP_TEXTS];
        ok = qlora_generate_next_each(list, count, tokens, stopped) == QLORA_OK;
        for (int i = 0; ok && i < count; i++) {
            runs[who[i]].tokens[made[i]] = tokens[i];
            ok = !stopped[i] &&
                 qlora_generate_logprob(list[i], &runs[who[i]].logprobs[made[i]]) == QLORA_OK;
            made[i]++;
        }
        if (ok && step == 1 && count > 2) {
            ok = qlora_generate_end(list[1]) == QLORA_OK;
            who[1] = STEP_TEXTS;
            made[1] = 0;
            ok = ok && step_begin(m, who[1], &list[1]);
        }
    }
    for (int i = 0; ok && i < count; i++) {
        ok = qlora_generate_end(list[i]) == QLORA_OK;
    }
    if (!ok) {
        printf("%s\n", qlora_last_error(m->ctx));
    }
    return ok;
}

static enum greatest_test_res texts_apart(const test_machine* machine, bool many) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx) {
        SKIPm(test_open_reason());
    }
    step_now = step_ways[many ? 1 : 2];
    static const int ways[2][STEP_TEXTS] = {{0, 1, 2, 3, 4, 5, 6, 7, 8},
                                            {7, 3, 8, 0, 5, 1, 2, 6, 4}};
    static const int few[3] = {1, 8, STEP_TEXTS}; // steps are slow on a fake GPU
    step_run alone[STEP_TEXTS + 1];
    step_run runs[2][STEP_TEXTS + 1];
    qlora_model* m = NULL;
    bool gpu = qlora_ctx_backend(ctx) == QLORA_BACKEND_CUDA;
    // On a small device, the columns of every stack of the long rows are split.
    const step_kind* kind = many ? &step_long_rows[1] : &step_kinds[5];
    if (many) {
        ctx->gpu->sm_count = 5;
    }
    ASSERT_EQ(QLORA_OK, step_open_texts(ctx, kind, gpu ? QLORA_MODE_BF16 : QLORA_MODE_F32, 8,
                                        STEP_TEXTS, &m));
    memset(alone, 0, sizeof alone);
    memset(runs, 0, sizeof runs);
    for (int i = 0; i < 3; i++) {
        ASSERT(step_together(m, &few[i], 1, alone));
    }
    for (int way = 0; way < 2; way++) {
        ASSERT(step_together(m, ways[way], STEP_TEXTS, runs[way]));
        for (int i = 0; i < 3; i++) {
            // The second of the order has two tokens, and the one that took its place has one.
            size_t count = few[i] == STEP_TEXTS ? 1 : few[i] == ways[way][1] ? 2 : 3;
            ASSERT_MEM_EQ(alone[few[i]].tokens, runs[way][few[i]].tokens, count * 4);
            ASSERT_MEM_EQ(alone[few[i]].logprobs, runs[way][few[i]].logprobs, count * 8);
        }
    }
    for (int i = 0; i < STEP_TEXTS; i++) {
        ASSERT_MEM_EQ(runs[0][i].tokens, runs[1][i].tokens, 2 * 4);
        ASSERT_MEM_EQ(runs[0][i].logprobs, runs[1][i].logprobs, 2 * 8);
    }
    // One more text than there is room for.
    qlora_generation* list[STEP_TEXTS + 1];
    for (int i = 0; i < STEP_TEXTS; i++) {
        ASSERT(step_begin(m, i, &list[i]));
    }
    ASSERT(!step_begin(m, 0, &list[STEP_TEXTS]));
    ASSERT(strstr(qlora_last_error(ctx), "generate_sequences") != NULL);
    int32_t tokens[2];
    bool stopped[2];
    qlora_generation* twice[2] = {list[0], list[0]};
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_generate_next_each(twice, 2, tokens, stopped));
    for (int i = 0; i < STEP_TEXTS; i++) {
        ASSERT_EQ(QLORA_OK, qlora_generate_end(list[i]));
    }
    step_now = step_ways[0];
    ASSERT_EQ(QLORA_OK, qlora_model_close(m));
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

TEST texts_do_not_see_each_other(const test_machine* machine) {
    return texts_apart(machine, false);
}

TEST many_texts_do_not_see_each_other(const test_machine* machine) {
    return texts_apart(machine, true);
}

SUITE(step_suite) {
    RUN_ON(TEST_ONE_GPU, many_texts_do_not_see_each_other);
    RUN_ON(TEST_ONE_EACH, texts_do_not_see_each_other);
    RUN_ON(TEST_TENSOR_CORES, steps_are_passes);
    RUN_ON(TEST_ONE_GPU, steps_of_many_are_passes);
    RUN_ON(TEST_ONE_GPU, the_head_of_many_is_a_product);
    RUN_ON(TEST_ONE_GPU, the_head_of_one_is_a_product);
    RUN_ON(TEST_ONE_FAKE, the_device_chooses_as_the_host);
    RUN_ON(TEST_ONE_FAKE, a_graph_has_the_bits_of_its_kernels);
    RUN_ON(TEST_ONE_FAKE, adapters_go_off_and_on);
    RUN_ON(TEST_ONE_FAKE, a_block_may_have_many_pieces);
    RUN_ON(TEST_ONE_GPU, a_block_may_have_many_chunks);
    RUN_ON(TEST_ONE_GPU, rows_of_all_blocks_are_alike);
    RUN_ON(TEST_ONE_FAKE, a_head_may_be_wide);
    RUN_ON(TEST_ONE_FAKE, a_text_needs_no_graph);
    RUN_ON(TEST_ONE_FAKE, a_row_may_be_longer_than_shared_memory);
}
