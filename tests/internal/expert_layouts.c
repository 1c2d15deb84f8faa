// expert_layouts.c - matrices of experts in adapter folders that other programs wrote: orders of B,
// exchanged roles, and experts with numbers. Included after adapter.c, whose helpers it uses.

SUITE_EXTERN(expert_layouts_suite);

#define LAYOUT_EXPERTS 5
#define LAYOUT_RANK 3

// Writes folder `to` with the matrices of folder "e", in which those of experts have the layout;
// the metadata say `said`, the config names `base`.
static bool layout_write(stage* s, const char* to, int layout, const char* said, const char* base) {
    qlora__st st;
    qlora__st_writer w;
    qlora__st_entry entries[32];
    int64_t shapes[32][2];
    const char* metadata[3] = {"expert_layout", said, NULL};
    char path[64];
    static float values[32][4096];
    static char names[32][128];
    bool ok =
        qlora__st_open(&s->w.env, "e/adapter_model.safetensors", &st) == QLORA_OK && st.count <= 32;
    for (uint32_t i = 0; ok && i < st.count; i++) {
        const qlora__st_tensor* t = &st.tensors[i];
        static float own[4096];
        int64_t rows = t->shape[0];
        int64_t cols = t->shape[1];
        bool b = strstr(t->name, "lora_B") != NULL;
        bool experts = strstr(t->name, ".experts.") != NULL;
        bool exchanged = experts && layout == QLORA_EXPERT_LAYOUT_PEFT_018;
        snprintf(names[i], sizeof names[i], "%s", t->name);
        qlora__st_read_f32(t, 0, (uint64_t)(rows * cols), own);
        for (int64_t r = 0; r < rows; r++) {
            for (int64_t c = 0; c < cols; c++) {
                int64_t e = b ? c % LAYOUT_EXPERTS : r / LAYOUT_RANK;
                int64_t j = b ? c / LAYOUT_EXPERTS : r % LAYOUT_RANK;
                int64_t at = r * cols + c;
                if (exchanged && b) { // becomes A [E r, out]
                    at = (e * LAYOUT_RANK + j) * rows + r;
                } else if (exchanged) { // becomes B [in, r E]
                    at = c * rows + j * LAYOUT_EXPERTS + e;
                } else if (experts && b && layout == QLORA_EXPERT_LAYOUT_UNSLOTH) {
                    at = r * cols + e * LAYOUT_RANK + j;
                }
                values[i][at] = own[r * cols + c];
            }
        }
        if (exchanged) {
            names[i][strlen(names[i]) - 8] = b ? 'A' : 'B';
        }
        shapes[i][0] = exchanged ? cols : rows;
        shapes[i][1] = exchanged ? rows : cols;
        entries[i].name = names[i];
        entries[i].dtype = QLORA__ST_F32;
        entries[i].rank = 2;
        entries[i].shape = shapes[i];
    }
    snprintf(path, sizeof path, "%s/adapter_model.safetensors", to);
    ok = ok && qlora__st_write_begin(&s->w.env, path, entries, st.count, said ? metadata : NULL,
                                     false, &w) == QLORA_OK;
    for (uint32_t i = 0; ok && i < st.count; i++) {
        uint32_t k = w.order[i];
        size_t size = (size_t)(shapes[k][0] * shapes[k][1]) * 4;
        ok = qlora__st_write(&s->w.env, &w, values[k], size) == QLORA_OK;
    }
    ok = ok && qlora__st_write_commit(&s->w.env, &w) == QLORA_OK;
    qlora__st_close(&s->w.env, &st);
    const world_file* config = world_slot(s->w.files, "e/adapter_config.json");
    static char text[8192];
    const char* key = "\"base_model_name_or_path\": null";
    const char* found = ok ? strstr((const char*)config->data, key) : NULL;
    ok = ok && found != NULL && config->size < sizeof text / 2;
    if (ok) {
        int head = (int)(found - (const char*)config->data);
        int tail = (int)config->size - head - (int)strlen(key);
        snprintf(text, sizeof text, "%.*s\"base_model_name_or_path\": \"%s\"%.*s", head,
                 (const char*)config->data, base, tail, found + strlen(key));
        snprintf(path, sizeof path, "%s/adapter_config.json", to);
        ok = qlora__file_write(&s->w.env, path, text, strlen(text)) == QLORA_OK;
    }
    return ok;
}

static qlora_result layout_open(stage* s, const char* adapter, int layout, uint32_t targets,
                                qlora_model** out) {
    qlora_model_config c;
    qlora_model_desc desc;
    memset(&c, 0, sizeof c);
    memset(&desc, 0, sizeof desc);
    c.family = QLORA_FAMILY_QWEN2_MOE;
    c.vocab = 40;
    c.hidden = 16;
    c.intermediate = 24;
    c.layers = 2;
    c.heads = 2;
    c.kv_heads = 1;
    c.head_dim = 8;
    c.rms_eps = 1e-5;
    c.rope.theta = 1e4;
    c.experts = LAYOUT_EXPERTS;
    c.experts_per_token = 2;
    c.expert_intermediate = 8; // gate and up have as many rows as the model is wide
    c.shared_intermediate = 12;
    c.dense[1] = 1;
    desc.config = &c;
    desc.adapter = adapter;
    desc.expert_layout = (qlora_expert_layout)layout;
    desc.mode = QLORA_MODE_F32;
    desc.rank = LAYOUT_RANK;
    desc.targets = targets;
    desc.tokens = 32;
    desc.seed = 11;
    desc.weight_std = 0.2f;
    return qlora_model_open(s->ctx, &desc, out);
}

// Random values for all that is trained.
static bool layout_scramble(qlora_model* model) {
    test_random random = test_random_start("layout_scramble");
    qlora_model_info info;
    static float values[4096];
    bool good = qlora_model_query(model, &info) == QLORA_OK;
    for (int64_t i = 0; good && i < info.parameters; i++) {
        qlora_parameter_info p;
        good = qlora_parameter_query(model, i, &p) == QLORA_OK && p.rows * p.cols <= 4096;
        test_random_fill(&random, values, (size_t)(p.rows * p.cols), 0.1f);
        good = good && qlora_parameter_write(model, i, values) == QLORA_OK;
    }
    return good;
}

static bool layout_same(qlora_model* a, qlora_model* b) {
    qlora_model_info x;
    qlora_model_info y;
    static float one[4096];
    static float two[4096];
    bool same = qlora_model_query(a, &x) == QLORA_OK && qlora_model_query(b, &y) == QLORA_OK &&
                x.parameters == y.parameters;
    for (int64_t i = 0; same && i < x.parameters; i++) {
        qlora_parameter_info p;
        same = qlora_parameter_query(a, i, &p) == QLORA_OK && p.rows * p.cols <= 4096 &&
               qlora_parameter_read(a, i, one) == QLORA_OK &&
               qlora_parameter_read(b, i, two) == QLORA_OK &&
               memcmp(one, two, (size_t)(p.rows * p.cols) * 4) == 0;
    }
    return same;
}

#define LAYOUT_IN (QLORA_TARGET_ATTENTION | QLORA_TARGET_EXPERTS_IN)
#define LAYOUT_ALL (LAYOUT_IN | QLORA_TARGET_EXPERTS_OUT | QLORA_TARGET_ROUTER)

// Folders of all layouts, with and without words about it.
TEST layouts_are_read(void) {
    static const struct {
        uint32_t targets;
        int layout; // of the folder
        const char* said;
        const char* base;
        int given;
        const char* refusal[2]; // what the error has; NULL: the folder is read
    } cases[] = {
        {LAYOUT_ALL, 1, NULL, "m", 0, {NULL, NULL}},
        {LAYOUT_ALL, 1, "peft", "unsloth/m", 0, {NULL, NULL}},
        {LAYOUT_ALL, 1, NULL, "Unsloth/m", 1, {NULL, NULL}},
        {LAYOUT_ALL, 1, NULL, "unsloth/m", 0, {"(peft)", "(unsloth)"}},
        {LAYOUT_ALL, 3, NULL, "unsloth/m", 3, {NULL, NULL}},
        {LAYOUT_ALL, 3, "unsloth", "m", 0, {NULL, NULL}},
        {LAYOUT_ALL, 3, "by unsloth", "m", 0, {"expert_layout is \"by unsloth\"", "known are"}},
        {LAYOUT_ALL, 3, "unsloth", "m", 1, {"expert_layout is peft", "say unsloth"}},
        {LAYOUT_ALL, 2, NULL, "m", 0, {NULL, NULL}},
        {LAYOUT_ALL, 2, NULL, "unsloth/m", 0, {NULL, NULL}}, // the shapes of one layout only
        {LAYOUT_ALL, 2, "peft-0.18", "m", 2, {NULL, NULL}},
        {LAYOUT_ALL, 2, NULL, "m", 1, {"is peft, but", "those of peft-0.18"}},
        {LAYOUT_ALL, 1, NULL, "m", 2, {"is peft-0.18, but", "those of peft"}},
        {LAYOUT_IN, 1, NULL, "m", 0, {"(peft)", "(peft-0.18)"}},
        {LAYOUT_IN, 2, NULL, "m", 2, {NULL, NULL}},
        {LAYOUT_IN, 2, "peft-0.18", "m", 0, {NULL, NULL}},
        {LAYOUT_IN, 1, NULL, "m", 4, {"desc.expert_layout is 4", "0 to 3"}}};
    stage s;
    qlora_model* a = NULL;
    qlora_model* b = NULL;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char number[16];
        snprintf(number, sizeof number, "case %d", (int)i);
        ASSERT(stage_begin(&s, NULL));
        ASSERT_EQ(QLORA_OK, layout_open(&s, NULL, 0, cases[i].targets, &a));
        ASSERT(layout_scramble(a));
        ASSERT_EQ(QLORA_OK, qlora_adapter_save(a, "e", NULL));
        ASSERT(layout_write(&s, "f", cases[i].layout, cases[i].said, cases[i].base));
        qlora_result r = layout_open(&s, "f", cases[i].given, 0, &b);
        if (cases[i].refusal[0]) {
            ASSERTm(number, r != QLORA_OK);
            for (int k = 0; k < 2; k++) {
                ASSERTm(qlora_last_error(s.ctx),
                        strstr(qlora_last_error(s.ctx), cases[i].refusal[k]) != NULL);
            }
        } else {
            ASSERT_EQm(qlora_last_error(s.ctx), QLORA_OK, r);
            ASSERTm(number, layout_same(a, b));
            // the same of a folder that is loaded later, and what is written says what it is
            qlora_adapter_desc desc;
            memset(&desc, 0, sizeof desc);
            desc.expert_layout = (qlora_expert_layout)cases[i].given;
            ASSERT(layout_scramble(b));
            ASSERT_EQm(qlora_last_error(s.ctx), QLORA_OK, qlora_adapter_load(b, "f", &desc));
            ASSERTm(number, layout_same(a, b));
            ASSERT_EQ(QLORA_OK, qlora_adapter_save(b, "g", NULL));
            const world_file* first = world_slot(s.w.files, "e/adapter_model.safetensors");
            const world_file* again = world_slot(s.w.files, "g/adapter_model.safetensors");
            ASSERT_EQ(first->size, again->size);
            ASSERT_MEM_EQ(first->data, again->data, first->size);
            ASSERT_EQ(QLORA_OK, qlora_model_close(b));
        }
        ASSERT_EQ(QLORA_OK, qlora_model_close(a));
        ASSERT(stage_end(&s));
    }
    PASS();
}

// README.md can name Unsloth as well.
TEST layouts_of_a_model_card(void) {
    static const char card[] = "# a model\n\nTrained 2x faster with UNSLOTH.\n";
    stage s;
    qlora_model* a = NULL;
    qlora_model* b = NULL;
    ASSERT(stage_begin(&s, NULL));
    ASSERT_EQ(QLORA_OK, layout_open(&s, NULL, 0, LAYOUT_ALL, &a));
    ASSERT(layout_scramble(a));
    ASSERT_EQ(QLORA_OK, qlora_adapter_save(a, "e", NULL));
    ASSERT(layout_write(&s, "f", 1, NULL, "m"));
    ASSERT_EQ(QLORA_OK, qlora__file_write(&s.w.env, "f/README.md", card, sizeof card - 1));
    ASSERT_EQ(QLORA_ERR_UNSUPPORTED, layout_open(&s, "f", 0, 0, &b));
    ASSERT(strstr(qlora_last_error(s.ctx), "names Unsloth") != NULL);
    ASSERT_EQ(QLORA_OK, layout_open(&s, "f", 3, 0, &b));
    ASSERT(!layout_same(a, b));
    ASSERT_EQ(QLORA_OK, qlora_model_close(b));
    ASSERT_EQ(QLORA_OK, qlora_model_close(a));
    ASSERT(stage_end(&s));
    PASS();
}

// ---- experts with numbers ----

static const char* const numbered_modules[3] = {"gate_proj", "up_proj", "down_proj"};

// A value of A or B of a matrix of an expert; the same wherever it is asked for.
static float numbered_value(int64_t layer, int64_t e, int module, bool b, int64_t at) {
    uint32_t x = (uint32_t)(layer * 7919 + e * 104729 + module * 1299709 + (b ? 15485863 : 0) + at);
    x = x * 2654435761u;
    x ^= x >> 15;
    return (float)(x % 2001u) / 1000.0f - 1.0f;
}

// Writes an adapter as transformers 4 named it, with matrices of every expert; the down_proj of
// expert `leave` is left out, if it is not -1.
static bool numbered_write(stage* s, const char* config, int64_t rank, int64_t leave) {
    static char names[64][128];
    static float values[512];
    qlora__st_entry entries[64];
    int64_t shapes[64][2];
    int64_t who[64][3];
    qlora__st_writer w;
    uint32_t count = 0;
    for (int64_t e = 0; e < LAYOUT_EXPERTS; e++) {
        for (int k = 0; k < 6; k++) {
            int module = k / 2;
            int64_t in = module < 2 ? 16 : 8;
            int64_t out = module < 2 ? 8 : 16;
            if (e == leave && module == 2) {
                continue;
            }
            snprintf(names[count], sizeof names[0],
                     "base_model.model.model.layers.0.mlp.experts.%d.%s.lora_%c.weight", (int)e,
                     numbered_modules[module], "AB"[k % 2]);
            shapes[count][0] = k % 2 == 0 ? rank : out;
            shapes[count][1] = k % 2 == 0 ? in : rank;
            who[count][0] = e;
            who[count][1] = module;
            who[count][2] = k % 2;
            entries[count].name = names[count];
            entries[count].dtype = QLORA__ST_F32;
            entries[count].rank = 2;
            entries[count].shape = shapes[count];
            count++;
        }
    }
    bool ok = qlora__st_write_begin(&s->w.env, "n/adapter_model.safetensors", entries, count, NULL,
                                    false, &w) == QLORA_OK;
    for (uint32_t i = 0; ok && i < count; i++) {
        uint32_t k = w.order[i];
        int64_t n = shapes[k][0] * shapes[k][1];
        for (int64_t at = 0; at < n; at++) {
            values[at] = numbered_value(0, who[k][0], (int)who[k][1], who[k][2] != 0, at);
        }
        ok = qlora__st_write(&s->w.env, &w, values, (size_t)n * 4) == QLORA_OK;
    }
    return ok && qlora__st_write_commit(&s->w.env, &w) == QLORA_OK &&
           qlora__file_write(&s->w.env, "n/adapter_config.json", config, strlen(config)) ==
               QLORA_OK;
}

// Element [row, col] of B A of a matrix of an expert, from the values of the file.
static double numbered_product(int64_t rank, int64_t e, int module, int64_t row, int64_t col) {
    int64_t in = module < 2 ? 16 : 8;
    double sum = 0.0;
    for (int64_t j = 0; j < rank; j++) {
        sum += (double)numbered_value(0, e, module, true, row * rank + j) *
               (double)numbered_value(0, e, module, false, j * in + col);
    }
    return sum;
}

// The same of a model's adapter, which PEFT has as two stacks.
static double numbered_of_model(const float* a, const float* b, int64_t rank, int64_t e,
                                int64_t row, int64_t col, int64_t in) {
    double sum = 0.0;
    for (int64_t j = 0; j < rank; j++) {
        sum += (double)a[(e * rank + j) * in + col] *
               (double)b[row * rank * LAYOUT_EXPERTS + j * LAYOUT_EXPERTS + e];
    }
    return sum;
}

static const char numbered_config[] =
    "{\"peft_type\":\"LORA\",\"r\":2,\"lora_alpha\":6,\"target_modules\":"
    "\"model\\\\.layers\\\\.0\\\\.mlp\\\\.experts\\\\..*\"}";

TEST numbered_experts_are_read(void) {
    stage s;
    qlora_model* model = NULL;
    static float values[4][4096];
    ASSERT(stage_begin(&s, NULL));
    ASSERT(numbered_write(&s, numbered_config, 2, -1));
    ASSERT_EQm(qlora_last_error(s.ctx), QLORA_OK, layout_open(&s, "n", 0, 0, &model));
    qlora_model_info info;
    ASSERT_EQ(QLORA_OK, qlora_model_query(model, &info));
    ASSERT_EQ(4, info.parameters);
    for (int64_t i = 0; i < 4; i++) {
        qlora_parameter_info p;
        ASSERT_EQ(QLORA_OK, qlora_parameter_query(model, i, &p));
        ASSERT_EQ(i == 0 ? 20 : i == 1 ? 16 : i == 2 ? 10 : 16, p.rows);
        ASSERT_EQ(QLORA_OK, qlora_parameter_read(model, i, values[i]));
    }
    const qlora__layer* layer = &model->layers[0];
    int first = qlora__first_expert(layer->layout);
    ASSERT_EQ(4, layer->projections[first].rank); // gate and up have half of it each
    ASSERT_EQ(2, layer->projections[first + 2].rank);
    ASSERT_EQ(3.0f, layer->projections[first].scale);
    ASSERT_EQ(3.0f, layer->projections[first + 2].scale);
    for (int64_t e = 0; e < LAYOUT_EXPERTS; e++) {
        for (int64_t i = 0; i < 16 * 16; i++) {
            int64_t row = i / 16;
            int64_t col = i % 16;
            double want = numbered_product(2, e, row < 8 ? 0 : 1, row % 8, col);
            ASSERT_IN_RANGE(want, numbered_of_model(values[0], values[1], 4, e, row, col, 16),
                            1e-6);
            if (col < 8) {
                want = numbered_product(2, e, 2, row, col);
                ASSERT_IN_RANGE(want, numbered_of_model(values[2], values[3], 2, e, row, col, 8),
                                1e-6);
            }
        }
    }
    ASSERT_EQ(QLORA_OK, qlora_adapter_save(model, "p", NULL)); // stacked, as PEFT has it now
    qlora_model* again = NULL;
    ASSERT_EQm(qlora_last_error(s.ctx), QLORA_OK, layout_open(&s, "p", 0, 0, &again));
    ASSERT(layout_same(model, again));
    ASSERT_EQ(QLORA_OK, qlora_model_close(again));
    ASSERT_EQ(QLORA_OK, qlora_model_close(model));
    ASSERT(stage_end(&s));
    PASS();
}

TEST numbered_experts_that_have_no_form(void) {
    static const struct {
        const char* config;
        int64_t leave;
        const char* says;
    } cases[] = {{numbered_config, 3, "experts.3.down_proj.lora_A.weight"},
                 {"{\"peft_type\":\"LORA\",\"r\":2,\"use_rslora\":true,"
                  "\"target_modules\":\"model\\\\.layers\\\\.0\\\\.mlp\\\\.experts\\\\..*\"}",
                  -1, "use_rslora with an adapter for each expert"},
                 {"{\"peft_type\":\"LORA\",\"r\":2,\"alpha_pattern\":{\"experts.2.up_proj\":5},"
                  "\"target_modules\":\"model\\\\.layers\\\\.0\\\\.mlp\\\\.experts\\\\..*\"}",
                  -1, "experts.2.up_proj has rank 2 and scale 2.5"}};
    stage s;
    qlora_model* model = NULL;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        ASSERT(stage_begin(&s, NULL));
        ASSERT(numbered_write(&s, cases[i].config, 2, cases[i].leave));
        ASSERT(layout_open(&s, "n", 0, 0, &model) != QLORA_OK);
        ASSERTm(qlora_last_error(s.ctx), strstr(qlora_last_error(s.ctx), cases[i].says) != NULL);
        ASSERT(stage_end(&s));
    }
    PASS();
}

// ---- what is saved is checked ----

static int layout_calls; // of the next writes, which one changes a float

static int64_t layout_bad_write(void* file, const void* data, size_t bytes, void* user) {
    static uint8_t copy[1 << 16];
    if (bytes > sizeof copy || bytes < 240 || layout_calls-- != 0) {
        return world_write(file, data, bytes, user);
    }
    memcpy(copy, data, bytes);
    copy[bytes - 30] ^= 0x10; // in the second half of a float
    return world_write(file, copy, bytes, user);
}

// A byte that is wrong in any matrix of experts is found, and the older file stays.
TEST saved_experts_are_read_back(void) {
    stage s;
    qlora_model* a = NULL;
    int found = 0;
    ASSERT(stage_begin(&s, NULL));
    ASSERT_EQ(QLORA_OK, layout_open(&s, NULL, 0, LAYOUT_ALL, &a));
    ASSERT(layout_scramble(a));
    ASSERT_EQ(QLORA_OK, qlora_adapter_save(a, "e", NULL));
    const world_file* file = world_slot(s.w.files, "e/adapter_model.safetensors");
    static uint8_t before[1 << 16];
    size_t size = file->size;
    ASSERT(size <= sizeof before);
    memcpy(before, file->data, size);
    int64_t (*good)(void*, const void*, size_t, void*) = s.ctx->env.files.write;
    for (int call = 0; call < 24; call++) {
        layout_calls = call;
        s.ctx->env.files.write = layout_bad_write;
        qlora_result r = qlora_adapter_save(a, "e", NULL);
        s.ctx->env.files.write = good;
        if (r != QLORA_OK) {
            found += strstr(qlora_last_error(s.ctx), "gives other products") != NULL ? 1 : 0;
            ASSERT_EQ(size, file->size);
            ASSERT_MEM_EQ(before, file->data, size);
        }
        ASSERT_EQ(QLORA_OK, qlora_adapter_save(a, "e", NULL));
        file = world_slot(s.w.files, "e/adapter_model.safetensors");
    }
    ASSERT_EQ(4, found); // A and B, into the experts and out of them
    ASSERT_EQ(QLORA_OK, qlora_model_close(a));
    ASSERT(stage_end(&s));
    PASS();
}

SUITE(expert_layouts_suite) {
    RUN_TEST(layouts_are_read);
    RUN_TEST(layouts_of_a_model_card);
    RUN_TEST(numbered_experts_are_read);
    RUN_TEST(numbered_experts_that_have_no_form);
    RUN_TEST(saved_experts_are_read_back);
}
