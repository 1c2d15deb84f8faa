// step_layers.c - all layers of a decoding step in one launch, whose blocks wait for each other:
// against passes, as a graph and kernel by kernel, and where the driver does not allow it. It uses
// what step.c defines.

// Kinds that the kernel takes: rows are multiples of 256.
static const step_kind layers_kinds[] = {
    {"llama", QLORA_FAMILY_LLAMA, 256, 4, 2, 64, 0, 16, false, false, false, QLORA_BASE_NF4},
    {"window", QLORA_FAMILY_MISTRAL, 256, 2, 1, 128, 40, 8, false, false, false, QLORA_BASE_NF4},
    {"qwen3", QLORA_FAMILY_QWEN3, 256, 8, 2, 32, 0, 24, false, true, true, QLORA_BASE_NF4},
    {"phi3", QLORA_FAMILY_PHI3, 256, 4, 4, 64, 0, 20, false, false, false, QLORA_BASE_NF4},
    {"granite", QLORA_FAMILY_GRANITE, 256, 4, 2, 64, 0, 3, false, false, true, QLORA_BASE_NF4},
    {"qwen2", QLORA_FAMILY_QWEN2, 256, 12, 1, 64, 0, -1, true, false, true, QLORA_BASE_NF4},
    {"wide heads", QLORA_FAMILY_LLAMA, 256, 2, 1, 256, 0, 8, false, false, false, QLORA_BASE_NF4},
};

static const step_kind layers_long = {
    "many heads", QLORA_FAMILY_LLAMA, 256, 36, 4, 64, 0, 8, false, false, false, QLORA_BASE_NF4};

static const step_kind layers_large = {
    "large", QLORA_FAMILY_LLAMA, 2048, 32, 8, 64, 0, 16, false, false, false, QLORA_BASE_NF4};

#define LAYERS_OFF 1e-3 // of log-probabilities

// Whether the device has room for a block of the kernel.
static bool layers_room(const qlora_ctx* ctx) {
    return ctx->gpu->max_shared >= 227 * 1024;
}

static bool layers_taken(qlora_model* m) {
    int64_t blocks;
    int64_t shared;
    return qlora__decode_layers_fit(m, &blocks, &shared);
}

// The texts of a kind are those of passes, and the kernel made them.
static bool layers_hold(qlora_ctx* ctx, const step_kind* k, size_t cases) {
    qlora_model* m = NULL;
    step_now = step_ways[0];
    if (step_open(ctx, k, 8, &m) != QLORA_OK) {
        printf("%s: %s\n", k->name, qlora_last_error(ctx));
        return false;
    }
    bool taken = layers_taken(m);
    if (!taken) {
        printf("%s: the layers do not fit one launch\n", k->name);
    }
    return qlora_model_close(m) == QLORA_OK && taken && step_kind_holds(ctx, k, cases);
}

TEST layers_in_one_launch_are_passes(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx) {
        SKIPm(test_open_reason());
    }
    bool all = (machine->sets & TEST_ONE_EACH) != 0;
    size_t count = all ? sizeof layers_kinds / sizeof layers_kinds[0] : 2;
    for (size_t i = 0; i < count && layers_room(ctx); i++) {
        ASSERT(layers_hold(ctx, &layers_kinds[i], i == 1 ? 2 : 1));
    }
    if (strcmp(machine->backend, "cuda") == 0 && layers_room(ctx)) {
        ASSERT(layers_hold(ctx, &layers_large, 2));
    }
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// Whether the texts of a kind are like those that single kernels make: they differ only in the
// order of a few sums, so errors that the comparison with a pass would not show are seen.
static bool layers_alike(qlora_ctx* ctx, const step_kind* k) {
    int32_t ids[2][STEP_ROOM];
    double logprobs[2][8];
    bool held = true;
    for (int alone = 0; alone < 2 && held; alone++) {
        qlora_model* m = NULL;
        qlora_generate_desc d;
        memset(&d, 0, sizeof d);
        step_now.variants = QLORA__DECODE_ALL & ~(alone != 0 ? QLORA__DECODE_LAYERS : 0u);
        held = step_open(ctx, k, 9, &m) == QLORA_OK;
        step_now = step_ways[0];
        held = held && layers_taken(m) == (alone == 0) &&
               step_text(m, &d, ids[alone], 5, 4, logprobs[alone]) &&
               qlora_model_close(m) == QLORA_OK;
    }
    for (int i = 0; i < 4 && held; i++) {
        held = fabs(logprobs[0][i] - logprobs[1][i]) <= LAYERS_OFF;
    }
    return held && memcmp(ids[0], ids[1], 9 * sizeof(int32_t)) == 0;
}

TEST layers_are_like_single_kernels(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx) {
        SKIPm(test_open_reason());
    }
    size_t count = sizeof layers_kinds / sizeof layers_kinds[0];
    for (size_t i = 0; i < (test_brief() ? 1 : count) && layers_room(ctx); i++) {
        ASSERT(layers_alike(ctx, &layers_kinds[i]));
    }
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// The parameters of three layers are in shared memory: of one layer, of two, of three, and of those
// whose places are used again.
TEST any_number_of_layers_is_taken(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx) {
        SKIPm(test_open_reason());
    }
    static const int64_t depths[] = {1, 3, 5};
    bool held = true;
    for (size_t i = 0; i < sizeof depths / sizeof depths[0] && layers_room(ctx); i++) {
        if (test_brief() && depths[i] == 3) {
            continue; // which are in the same places as the first of five
        }
        step_depth = depths[i];
        held = held && layers_hold(ctx, &layers_kinds[0], 1);
        step_depth = 2;
    }
    ASSERT(held);
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// An adapter for the first kind, whose projections have ranks of their own.
static bool layers_mixed_make(stage* s, const int* ranks) {
    static const char* const modules[] = {
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
        "mlp.gate_proj",    "mlp.up_proj",      "mlp.down_proj"};
    static const int64_t shapes[][2] = {{256, 256}, {256, 128}, {256, 128}, {256, 256},
                                        {256, 512}, {256, 512}, {512, 256}};
    tensor_plan plans[28];
    char config[700];
    memset(plans, 0, sizeof plans);
    for (int i = 0; i < 28; i++) {
        int module = i / 2 % 7;
        bool b = i % 2 == 1;
        snprintf(plans[i].name, sizeof plans[i].name,
                 "base_model.model.model.layers.%d.%s.lora_%c.weight", i / 14, modules[module],
                 b ? 'B' : 'A');
        plans[i].shape[0] = b ? shapes[module][1] : ranks[module];
        plans[i].shape[1] = b ? ranks[module] : shapes[module][0];
    }
    int n = snprintf(config, sizeof config,
                     "{\"peft_type\":\"LORA\",\"r\":4,\"lora_alpha\":8,\"lora_dropout\":0.0,"
                     "\"bias\":\"none\",\"target_modules\":[\"q_proj\",\"k_proj\",\"v_proj\","
                     "\"o_proj\",\"gate_proj\",\"up_proj\",\"down_proj\"],\"rank_pattern\":{"
                     "\"q_proj\":%d,\"k_proj\":%d,\"v_proj\":%d,\"o_proj\":%d,"
                     "\"gate_proj\":%d,\"up_proj\":%d,\"down_proj\":%d}}",
                     ranks[0], ranks[1], ranks[2], ranks[3], ranks[4], ranks[5], ranks[6]);
    world_put(&s->w, "mixed/adapter_config.json", config, (size_t)n);
    return write_tensors(s->ctx, "mixed/adapter_model.safetensors", plans, 28, 0.1f);
}

// Values of z that a projection reads begin anywhere, and its rank may be larger than the first
// one's or smaller.
TEST projections_may_have_other_ranks(const test_machine* machine) {
    static const int ranks[][7] = {{10, 8, 8, 8, 9, 8, 16}, {8, 16, 12, 24, 16, 8, 3}};
    static stage s;
    for (size_t i = 0; i < sizeof ranks / sizeof ranks[0]; i++) {
        if (!stage_begin(&s, machine)) {
            SKIPm("no such machine");
        }
        ASSERT(layers_mixed_make(&s, ranks[i]));
        step_adapter = "mixed";
        bool held = !layers_room(s.ctx) || layers_hold(s.ctx, &layers_kinds[0], 1);
        step_adapter = NULL;
        ASSERT(held);
        ASSERT(stage_end(&s));
    }
    PASS();
}

// A thread has several vectors of x.
TEST rows_may_be_long(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx) {
        SKIPm(test_open_reason());
    }
    ctx->gpu->sm_count = 6;
    step_depth = 1;
    bool held = !layers_room(ctx) || layers_alike(ctx, &layers_long);
    step_depth = 2;
    ASSERT(held);
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// On a small device, a block has many tiles, several values of z and several items of attention.
TEST few_blocks_take_all_layers(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx) {
        SKIPm(test_open_reason());
    }
    static const int counts[] = {1, 3, 7};
    for (size_t i = 0; i < sizeof counts / sizeof counts[0] && layers_room(ctx); i++) {
        ctx->gpu->sm_count = counts[i];
        ASSERT(layers_hold(ctx, &layers_kinds[i], i == 1 ? 2 : 1));
    }
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// Blocks that divide pieces share tiles; the sums are those of blocks that divide tiles, but for
// their order. Grids for which no block, some blocks and every block but the first begin within a
// tile.
TEST blocks_may_share_tiles(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx) {
        SKIPm(test_open_reason());
    }
    static const int counts[] = {16, 3, 7, 13};
    const step_kind* k = &layers_kinds[5]; // o has three pieces, down two
    for (size_t i = 0; i < sizeof counts / sizeof counts[0] && layers_room(ctx); i++) {
        int32_t ids[2][STEP_ROOM];
        double logprobs[2][8];
        ctx->gpu->sm_count = counts[i];
        for (int split = 0; split < 2; split++) {
            qlora_model* m = NULL;
            qlora_generate_desc d;
            qlora__decode_layer layer;
            memset(&d, 0, sizeof d);
            layers_split_from = split != 0 ? 0 : 12;
            ASSERT_EQ(QLORA_OK, step_open(ctx, k, 9, &m));
            ASSERT(layers_taken(m));
            ASSERT(qlora__decode_layer_of(m, 0, &layer));
            int mask = qlora__decode_layers_mask(m, &layer, counts[i]);
            ASSERT_EQ(split != 0, (mask >> QLORA__DOWN & 1) != 0);
            // Whole tiles need less room, so a block that has just that much divides these.
            int64_t room = ctx->gpu->max_shared;
            ctx->gpu->max_shared = (int)(QLORA__LAYERS_SHARED - 1 +
                                         qlora__decode_stack_most(&layer, QLORA__DOWN, true,
                                                                  counts[i]));
            mask = qlora__decode_layers_mask(m, &layer, counts[i]);
            ctx->gpu->max_shared = (int)room;
            ASSERT_EQ(0, mask >> QLORA__DOWN & 1);
            ASSERT(step_text(m, &d, ids[split], 5, 4, logprobs[split]));
            ASSERT_EQ(QLORA_OK, qlora_model_close(m));
        }
        bool held = layers_hold(ctx, k, 1);
        layers_split_from = 12;
        ASSERT(held);
        ASSERT_MEM_EQ(ids[0], ids[1], 9 * sizeof(int32_t));
        ASSERT_CLOSE_DOUBLE(logprobs[0], logprobs[1], 4, LAYERS_OFF, 0.0);
    }
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// The same bits as a graph and without one, with and without adapters, and again.
TEST layers_have_the_same_bits_again(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx) {
        SKIPm(test_open_reason());
    }
    int32_t ids[6][STEP_ROOM];
    double logprobs[6][8];
    for (int i = 0; i < 6 && layers_room(ctx); i++) {
        if (test_brief() && i / 2 == 1) {
            continue; // without a graph is "again" as well
        }
        qlora_model* m = NULL;
        qlora_generate_desc d;
        memset(&d, 0, sizeof d);
        ASSERT_EQ(QLORA_OK, step_open(ctx, &layers_kinds[0], 9, &m));
        m->decode.eager = i >= 4;
        ASSERT_EQ(QLORA_OK, qlora_adapter_use(m, i % 2 != 0));
        ASSERT(step_text(m, &d, ids[i], 5, 3, logprobs[i])); // the other way comes first
        ASSERT_EQ(QLORA_OK, qlora_adapter_use(m, i % 2 == 0));
        ASSERT(step_text(m, &d, ids[i], 5, 3, logprobs[i]));
        ASSERT(layers_taken(m));
        ASSERT_EQ(i < 4, m->decode.graphs[1 - i % 2] != NULL);
        ASSERT_EQ(QLORA_OK, qlora_model_close(m));
        if (i >= 2) {
            ASSERT_MEM_EQ(ids[i % 2], ids[i], 8 * sizeof(int32_t));
            ASSERT_MEM_EQ(logprobs[i % 2], logprobs[i], 3 * sizeof(double));
        }
    }
    ASSERT(!layers_room(ctx) || memcmp(logprobs[0], logprobs[1], 3 * sizeof(double)) != 0);
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// Whether a text of four tokens has the log-probabilities of a pass.
static bool layers_text_is_right(qlora_model* m) {
    int32_t ids[STEP_ROOM];
    double logprobs[8];
    double below = 0.0;
    qlora_generate_desc d;
    memset(&d, 0, sizeof d);
    return step_text(m, &d, ids, 5, 4, logprobs) &&
           step_off(m, ids, 5, 4, logprobs, &below) <= 0.02;
}

// Where the driver refuses the launch, smaller kernels make the steps.
TEST a_refused_launch_has_a_substitute(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx) {
        SKIPm(test_open_reason());
    }
    const fake_api* fake = test_fake();
    static const int codes[] = {720, 801, 1, 701};
    for (int i = 0; i < (test_brief() ? 2 : 4) && layers_room(ctx); i++) {
        qlora_model* m = NULL;
        ASSERT_EQ(QLORA_OK, step_open(ctx, &layers_kinds[0], 9, &m));
        ASSERT(layers_taken(m));
        m->decode.variants &= ~QLORA__DECODE_EARLY; // the call is that of the layers alone
        fake->fail_at("cuLaunchKernelEx", 1, codes[i], false);
        ASSERT(layers_text_is_right(m));
        fake->fail_clear();
        ASSERT(!layers_taken(m));
        ASSERT(!m->decode.eager);
        ASSERT(m->decode.graphs[1] != NULL);
        ASSERT_EQ(QLORA_OK, qlora_model_close(m));
    }
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// The same if a graph cannot be made either, and the launch is refused only after that.
TEST a_launch_refused_late_has_a_substitute(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx) {
        SKIPm(test_open_reason());
    }
    const fake_api* fake = test_fake();
    qlora_model* m = NULL;
    if (layers_room(ctx)) {
        ASSERT_EQ(QLORA_OK, step_open(ctx, &layers_kinds[0], 9, &m));
        m->decode.variants &= ~QLORA__DECODE_EARLY;
        fake->fail_at("cuGraphInstantiateWithFlags", 1, 720, false);
        fake->fail_at("cuLaunchKernelEx", 2, 720, false);
        ASSERT(layers_text_is_right(m));
        fake->fail_clear();
        ASSERT(!layers_taken(m));
        ASSERT_EQ(QLORA_OK, qlora_model_close(m));
    }
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// If the parameters cannot be sent, nothing is launched; a text that begins later is right.
TEST nothing_runs_without_parameters(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx) {
        SKIPm(test_open_reason());
    }
    const fake_api* fake = test_fake();
    for (uint64_t nth = 1; nth <= 4 && layers_room(ctx); nth++) {
        qlora_model* m = NULL;
        qlora_generation* g = NULL;
        int32_t ids[] = {1, 2, 3, 4, 5};
        int32_t token;
        bool stopped;
        qlora_generate_desc d;
        memset(&d, 0, sizeof d);
        d.prompt = ids;
        d.prompt_tokens = 5;
        ASSERT_EQ(QLORA_OK, step_open(ctx, &layers_kinds[0], 9, &m));
        ASSERT_EQ(QLORA_OK, qlora_generate_begin(m, &d, &g));
        ASSERT_EQ(QLORA_OK, qlora_generate_next(g, &token, &stopped)); // from the prompt
        fake->fail_at("cuMemcpyHtoDAsync_v2", nth, 2, false);
        ASSERT_EQ(QLORA_ERR_DEVICE_MEMORY, qlora_generate_next(g, &token, &stopped));
        fake->fail_clear();
        ASSERT_EQ(QLORA_OK, qlora_generate_end(g));
        ASSERT(layers_text_is_right(m));
        ASSERT(layers_taken(m));
        ASSERT_EQ(QLORA_OK, qlora_model_close(m));
    }
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

SUITE(step_layers_suite) {
    RUN_ON(TEST_TENSOR_CORES, layers_in_one_launch_are_passes);
    RUN_ON(TEST_ONE_GPU, layers_are_like_single_kernels);
    RUN_ON(TEST_ONE_GPU, any_number_of_layers_is_taken);
    RUN_ON(TEST_ONE_GPU, projections_may_have_other_ranks);
    RUN_ON(TEST_ONE_GPU, rows_may_be_long);
    RUN_ON(TEST_ONE_FAKE, few_blocks_take_all_layers);
    RUN_ON(TEST_ONE_GPU, blocks_may_share_tiles);
    RUN_ON(TEST_TENSOR_CORES, layers_have_the_same_bits_again);
    RUN_ON(TEST_ONE_FAKE, a_refused_launch_has_a_substitute);
    RUN_ON(TEST_ONE_FAKE, a_launch_refused_late_has_a_substitute);
    RUN_ON(TEST_ONE_FAKE, nothing_runs_without_parameters);
}
