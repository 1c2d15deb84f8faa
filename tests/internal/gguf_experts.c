// gguf_experts.c - mixtures of experts in GGUF files: what is refused by name, files that are
// merged into files, and adapters with the matrices of all experts. Included after gguf.c, whose
// helpers it uses.

SUITE_EXTERN(gguf_experts_suite);

static bool gguf_experts_here(const char* folder, const char* part, char* path, size_t size) {
    char name[200];
    snprintf(name, sizeof name, "experts/%s/%s", folder, part);
    shared_path(path, size, name);
    snprintf(name, sizeof name, "experts/%s/golden.json", folder);
    char golden[512];
    FILE* file = fopen(shared_path(golden, sizeof golden, name), "rb");
    if (file) {
        fclose(file);
    }
    return file != NULL;
}

// Opens a model with an adapter for `purpose`.
static qlora_result gguf_experts_open(qlora_ctx* ctx, const char* dir, const char* adapter,
                                      qlora_model** out) {
    qlora_model_desc desc;
    gguf_eval_desc(&desc, dir);
    desc.rank = adapter ? 0 : -1;
    desc.adapter = adapter;
    return qlora_model_open(ctx, &desc, out);
}

static char gguf_experts_error[1024]; // of the last merge

// Merges a model and its adapter into a file or a folder.
static qlora_result gguf_experts_merge(qlora_ctx* ctx, const char* dir, const char* adapter,
                                       const char* out, qlora_gguf_format format) {
    qlora_model* model = NULL;
    qlora_merge_desc merge;
    memset(&merge, 0, sizeof merge);
    merge.dir = out;
    merge.gguf = format;
    merge.verify = true;
    remove(out);
    QLORA__TRY(gguf_experts_open(ctx, dir, adapter, &model));
    qlora_result r = qlora_merge_save(model, &merge);
    snprintf(gguf_experts_error, sizeof gguf_experts_error, "%s", qlora_last_error(ctx));
    qlora_model_close(model);
    return r;
}

// Logits of 16 tokens.
static bool gguf_experts_eval(qlora_ctx* ctx, const char* dir, const char* adapter, float* out) {
    qlora_model* model = NULL;
    bool good = gguf_experts_open(ctx, dir, adapter, &model) == QLORA_OK && gguf_eval(model, out);
    if (!good) {
        printf("\n%s\n", qlora_last_error(ctx));
    }
    qlora_model_close(model);
    return good;
}

static const char* const gguf_mixtures[] = {"mixtral",    "qwen2moe",    "olmoe",
                                            "granitemoe", "granite4moe", "glm4moe"};
#define GGUF_MIXTURES (sizeof gguf_mixtures / sizeof gguf_mixtures[0])

// A file with an adapter becomes a file, and a folder, with the logits of the model with the
// adapter.
TEST gguf_mixtures_are_merged(void) {
    static float want[16 * 512];
    static float got[16 * 512];
    char base[512];
    char file[512];
    char folder[512];
    qlora_ctx_desc machine;
    qlora_ctx* ctx = NULL;
    snprintf(base, sizeof base, "%s", test_path("mixture.gguf"));
    snprintf(file, sizeof file, "%s", test_path("merged_mixture.gguf"));
    snprintf(folder, sizeof folder, "%s", test_path("merged_mixture"));
    memset(&machine, 0, sizeof machine);
    machine.require_backend = QLORA_BACKEND_CPU;
    ASSERT_EQ(QLORA_OK, qlora_ctx_create(&machine, &ctx));
    for (size_t i = 0; i < GGUF_MIXTURES; i++) {
        char dir[512];
        char adapter[512];
        if (!gguf_experts_here(gguf_mixtures[i], "model", dir, sizeof dir)) {
            qlora_ctx_destroy(ctx);
            SKIPm("the shared folder was not found");
        }
        gguf_experts_here(gguf_mixtures[i], "adapter20", adapter, sizeof adapter);
        gguf_folder_drop(folder);
        memset(want, 0, sizeof want);
        memset(got, 0, sizeof got);
        ASSERT_EQm(gguf_experts_error, QLORA_OK,
                   gguf_experts_merge(ctx, dir, NULL, base, QLORA_GGUF_AS_DTYPE));
        ASSERT_EQm(gguf_experts_error, QLORA_OK,
                   gguf_experts_merge(ctx, base, adapter, file, QLORA_GGUF_AS_DTYPE));
        ASSERT_EQm(gguf_experts_error, QLORA_OK,
                   gguf_experts_merge(ctx, base, adapter, folder, QLORA_GGUF_AS_DTYPE));
        ASSERT(gguf_experts_eval(ctx, dir, adapter, want));
        ASSERT(gguf_experts_eval(ctx, dir, NULL, got));
        double changed = gguf_folder_error(ctx, dir, want, got);
        for (int k = 0; k < 3; k++) {
            const char* out = k == 0 ? file : k == 1 ? folder : base;
            double error = k < 2 ? gguf_folder_error(ctx, out, want, got) : -1.0;
            if (k == 2) { // the adapter on a model from a file
                error = gguf_experts_eval(ctx, base, adapter, got) ? 0.0 : -1.0;
                for (size_t j = 0; j < sizeof got / sizeof got[0]; j++) {
                    error = fmax(error, fabs((double)got[j] - (double)want[j]));
                }
            }
            if (!(error >= 0.0 && error <= 1e-5 && changed > 1e-3)) {
                printf("\n%s %d: error %g, changed %g\n", gguf_mixtures[i], k, error, changed);
            }
            ASSERTm(gguf_mixtures[i], error >= 0.0 && error <= 1e-5 && changed > 1e-3);
        }
    }
    remove(base);
    remove(file);
    gguf_folder_drop(folder);
    ASSERT_EQ(QLORA_OK, qlora_ctx_destroy(ctx));
    PASS();
}

static int gguf_experts_calls; // of the next long writes, which one changes a float
static int64_t (*gguf_experts_good)(void*, const void*, size_t, void*);

static int64_t gguf_experts_bad(void* file, const void* data, size_t bytes, void* user) {
    static uint8_t copy[1 << 18];
    if (bytes < 4096 || bytes > sizeof copy || gguf_experts_calls-- != 0) {
        return gguf_experts_good(file, data, bytes, user);
    }
    memcpy(copy, data, bytes);
    copy[bytes / 8 * 4 + 3] ^= 0x40; // the exponent of one value
    return gguf_experts_good(file, copy, bytes, user);
}

// A wrong value in any matrix of a merged model that has an adapter is found.
TEST gguf_merges_are_verified(void) {
    static const char* const outs[] = {"verified", "verified.gguf"};
    qlora_ctx_desc machine;
    qlora_ctx* ctx = NULL;
    char dir[512];
    char adapter[512];
    char out[512];
    if (!gguf_experts_here("olmoe", "model", dir, sizeof dir)) {
        SKIPm("the shared folder was not found");
    }
    gguf_experts_here("olmoe", "adapter20", adapter, sizeof adapter);
    memset(&machine, 0, sizeof machine);
    machine.require_backend = QLORA_BACKEND_CPU;
    ASSERT_EQ(QLORA_OK, qlora_ctx_create(&machine, &ctx));
    gguf_experts_good = ctx->env.files.write;
    for (int i = 0; i < 2; i++) {
        int found = 0;
        int whole = 0;
        snprintf(out, sizeof out, "%s", test_path(outs[i]));
        for (int call = 0; call < 80; call += 4) {
            gguf_folder_drop(out);
            gguf_experts_calls = call;
            ctx->env.files.write = gguf_experts_bad;
            qlora_result r = gguf_experts_merge(ctx, dir, adapter, out, QLORA_GGUF_AS_DTYPE);
            ctx->env.files.write = gguf_experts_good;
            bool wrong = r == QLORA_ERR_FILE && strstr(gguf_experts_error, "a random token");
            bool header = r == QLORA_ERR_FORMAT;
            ASSERTm(gguf_experts_error, wrong || header || r == QLORA_OK);
            found += wrong ? 1 : 0;
            whole += gguf_experts_calls >= 0 ? 1 : 0;
        }
        if (found < 12) {
            printf("\n%s: %d found, %d without a change\n", outs[i], found, whole);
        }
        ASSERT(found >= 12); // a quarter of 2 layers with 8 experts of 3 matrices, and attention
        gguf_folder_drop(out);
        remove(out);
    }
    ASSERT_EQ(QLORA_OK, qlora_ctx_destroy(ctx));
    PASS();
}

// B_e A_e of an expert from PEFT's files: rows e r .. of A, columns e, e + E, .. of B.
static double gguf_experts_peft(const qlora__st_tensor* a, const qlora__st_tensor* b,
                                int64_t experts, int64_t e, int64_t row, int64_t col) {
    int64_t rank = a->shape[0] / experts;
    double sum = 0.0;
    for (int64_t j = 0; j < rank; j++) {
        float x = 0.0f;
        float y = 0.0f;
        qlora__st_read_f32(a, (uint64_t)((e * rank + j) * a->shape[1] + col), 1, &x);
        qlora__st_read_f32(b, (uint64_t)(row * b->shape[1] + j * experts + e), 1, &y);
        sum += (double)x * (double)y;
    }
    return sum;
}

// The same from a GGUF adapter, as llama.cpp multiplies: ne of a is [in, r, E], of b [r, out, E].
static double gguf_experts_llama(const qlora__gguf_tensor* a, const qlora__gguf_tensor* b,
                                 uint64_t e, uint64_t row, uint64_t col) {
    uint64_t rank = b->shape[0];
    double sum = 0.0;
    for (uint64_t j = 0; j < rank; j++) {
        float x = 0.0f;
        float y = 0.0f;
        memcpy(&x, a->data + 4 * ((e * rank + j) * a->shape[0] + col), 4);
        memcpy(&y, b->data + 4 * ((e * b->shape[1] + row) * rank + j), 4);
        sum += (double)x * (double)y;
    }
    return sum;
}

// olmoe has gate_up of rank 6 and alpha 18, down of rank 3 and alpha 9, and one alpha in the file.
TEST gguf_adapters_have_all_experts(void) {
    static const struct {
        const char* gguf;
        const char* peft;
        int64_t first; // row of B
    } pairs[] = {{"ffn_gate_exps", "base_layer.", 0},
                 {"ffn_up_exps", "base_layer.", 72},
                 {"ffn_down_exps", "", 0}};
    static qlora__gguf_file f;
    static qlora__st st;
    char dir[512];
    char adapter[512];
    char path[512];
    qlora_ctx_desc machine;
    qlora_ctx* ctx = NULL;
    qlora_model* model = NULL;
    double alpha = 0.0;
    if (!gguf_experts_here("olmoe", "model", dir, sizeof dir)) {
        SKIPm("the shared folder was not found");
    }
    gguf_experts_here("olmoe", "adapter20", adapter, sizeof adapter);
    gguf_experts_here("olmoe", "adapter20/adapter_model.safetensors", path, sizeof path);
    memset(&machine, 0, sizeof machine);
    machine.require_backend = QLORA_BACKEND_CPU;
    ASSERT_EQ(QLORA_OK, qlora_ctx_create(&machine, &ctx));
    ASSERT_EQ(QLORA_OK, gguf_experts_open(ctx, dir, adapter, &model));
    const char* out = test_path("experts_adapter.gguf");
    ASSERT_EQm(qlora_last_error(ctx), QLORA_OK, qlora_adapter_save_gguf(model, out, NULL));
    ASSERT_EQ(QLORA_OK, qlora_model_close(model));
    ASSERT_EQ(QLORA_OK, qlora__gguf_file_open(&ctx->env, out, &f));
    ASSERT_EQ(QLORA_OK, qlora__st_open(&ctx->env, path, &st));
    ASSERT_EQ(QLORA_OK,
              qlora__gguf_get_positive(&ctx->env, &f.meta, "adapter.lora.alpha", -1.0, &alpha));
    for (size_t i = 0; i < 3 * 2 * 8; i++) {
        char name[200];
        size_t k = i % 3;
        int64_t layer = (int64_t)(i / 3 % 2);
        int64_t e = (int64_t)(i / 6);
        const qlora__gguf_tensor* g[2];
        const qlora__st_tensor* p[2];
        for (int h = 0; h < 2; h++) {
            snprintf(name, sizeof name, "blk.%d.%s.weight.lora_%c", (int)layer, pairs[k].gguf,
                     "ab"[h]);
            g[h] = qlora__gguf_tensor_find(&f, name);
            ASSERTm(name, g[h] != NULL && g[h]->rank == 3 && g[h]->shape[2] == 8);
            snprintf(name, sizeof name,
                     "base_model.model.model.layers.%d.mlp.experts.%slora_%c.weight", (int)layer,
                     pairs[k].peft, "AB"[h]);
            p[h] = qlora__st_find(&st, name);
            ASSERTm(name, p[h] != NULL);
        }
        ASSERT_EQ(k < 2 ? 72 : 128, g[1]->shape[1]);
        double rank = (double)g[1]->shape[0];
        ASSERT_EQ(k < 2 ? 6 : 3, g[1]->shape[0]);
        for (int64_t at = 0; at < 50; at++) {
            int64_t row = at * 13 % 72;
            int64_t col = at * 7 % 72;
            double theirs =
                alpha / rank *
                gguf_experts_llama(g[0], g[1], (uint64_t)e, (uint64_t)row, (uint64_t)col);
            double ours = 3.0 * gguf_experts_peft(p[0], p[1], 8, e, pairs[k].first + row, col);
            ASSERT_IN_RANGE(ours, theirs, 1e-6);
        }
    }
    qlora__st_close(&ctx->env, &st);
    qlora__gguf_close(&ctx->env, &f);
    remove(out);
    ASSERT_EQ(QLORA_OK, qlora_ctx_destroy(ctx));
    PASS();
}

// ---- what is refused ----

typedef struct gguf_experts_change {
    const char* folder;
    const char* find; // a key or the name of a tensor
    const char* put;  // of the same length; NULL: the U32 or BOOL value after the key is changed
    uint32_t value;
    const char* says;
} gguf_experts_change;

static const gguf_experts_change gguf_experts_changes[] = {
    {"glm4moe", "glm4moe.expert_weights_norm", "glm4moe.expert_weights_nose", 0,
     "glm4moe.expert_weights_nose is not known in this architecture"},
    {"glm4moe", "glm4moe.expert_gating_func", NULL, 1,
     "glm4moe.expert_gating_func is 1; it must be an integer from 2 to 2"},
    {"glm4moe", "glm4moe.expert_group_count", NULL, 3,
     "expert_group_count is 3, of which 2 are used; that does not fit 8 experts"},
    {"glm4moe", "glm4moe.expert_used_count", NULL, 9,
     "glm4moe.expert_used_count is 9; it must be an integer from 1 to 8"},
    {"glm4moe", "glm4moe.leading_dense_block_count", NULL, 0,
     "the tensor blk.0.ffn_down.weight is not known"},
    {"glm4moe", "blk.1.exp_probs_b.bias", "blk.1.exp_probs_c.bias", 0,
     "the tensor blk.1.exp_probs_c.bias is not known"},
    {"glm4moe", "blk.1.ffn_up_exps", "blk.1.ffn_no_exps", 0,
     "the tensor blk.1.ffn_no_exps.weight is not known"},
    {"granitemoe", "blk.1.ffn_up_exps", "blk.1.ffn_no_exps", 0,
     "blk.1.ffn_up_exps.weight must exist and have the shape of blk.1.ffn_gate_exps.weight"},
    {"granitemoe", "granitemoe.expert_count", NULL, 6,
     "blk.0.ffn_gate_exps.weight must be the matrices of 6 experts"},
    {"mixtral", "llama.expert_count", NULL, 0, "ffn_gate_exps.weight has 3 dimensions"},
    {"mixtral", "llama.expert_count", NULL, 2000,
     "llama.expert_count is 2000; it must be an integer from 0 to 1024"},
    {"mixtral", "llama.expert_feed_forward_length", "llama.expert_feed_forward_lengxx", 0,
     "llama.expert_feed_forward_lengxx is not known in this architecture"},
    {"qwen2moe", "qwen2moe.expert_shared_feed_forward_length", NULL, 79, "[79,112]"},
    {"qwen2moe", "blk.0.ffn_gate_inp_shexp", "blk.0.ffn_gate_inp_shexq", 0,
     "the tensor blk.0.ffn_gate_inp_shexq.weight is not known"},
    {"olmoe", "qlora.none", "qlora.none", 0, NULL}};

// Changes the first place of a text in a file, or the value after it. False if it is not there.
static bool gguf_experts_patch(const char* path, const gguf_experts_change* c) {
    FILE* file = fopen(path, "rb+");
    static char bytes[1 << 16];
    size_t length = strlen(c->find);
    size_t size = file ? fread(bytes, 1, sizeof bytes, file) : 0;
    bool found = false;
    for (size_t i = 0; i + length + 8 < size && !found; i++) {
        found = memcmp(bytes + i, c->find, length) == 0;
        if (found && c->put) {
            fseek(file, (long)i, SEEK_SET);
            fwrite(c->put, 1, length, file);
        } else if (found) {
            uint32_t value = c->value;
            fseek(file, (long)(i + length + 4), SEEK_SET);
            fwrite(&value, 1, 4, file);
        }
    }
    if (file) {
        fclose(file);
    }
    return found;
}

TEST gguf_mixtures_are_refused_by_name(const gguf_experts_change* c) {
    const char* out = test_path("refused_mixture.gguf");
    char dir[512];
    qlora_ctx_desc machine;
    qlora_ctx* ctx = NULL;
    qlora_model* model = NULL;
    if (!gguf_experts_here(c->folder, "model", dir, sizeof dir)) {
        SKIPm("the shared folder was not found");
    }
    memset(&machine, 0, sizeof machine);
    machine.require_backend = QLORA_BACKEND_CPU;
    ASSERT_EQ(QLORA_OK, qlora_ctx_create(&machine, &ctx));
    ASSERT_EQm(gguf_experts_error, QLORA_OK,
               gguf_experts_merge(ctx, dir, NULL, out, QLORA_GGUF_AS_DTYPE));
    ASSERT_EQ(c->says != NULL, gguf_experts_patch(out, c));
    qlora_result r = gguf_experts_open(ctx, out, NULL, &model);
    ASSERT_EQ(c->says == NULL, r == QLORA_OK);
    if (c->says != NULL) {
        ASSERTm(qlora_last_error(ctx), strstr(qlora_last_error(ctx), c->says) != NULL);
    }
    qlora_model_close(model);
    remove(out);
    ASSERT_EQ(QLORA_OK, qlora_ctx_destroy(ctx));
    PASS();
}

// ---- files of other converters ----

static void gguf_other_number(FILE* file, uint64_t value, size_t size) {
    for (size_t i = 0; i < size; i++) {
        fputc((int)(value >> (8 * i) & 255), file);
    }
}

static void gguf_other_text(FILE* file, const char* text) {
    gguf_other_number(file, strlen(text), 8);
    fputs(text, file);
}

// Writes a tensor's line in the table, under another name if `layer` is not -1.
static void gguf_other_line(FILE* file, const qlora__gguf_tensor* t, int layer, uint64_t* at) {
    char name[QLORA__GGUF_NAME];
    const char* rest = layer >= 0 ? strchr(t->name + 4, '.') : NULL;
    bool vector = strstr(t->name, "ffn_gate_inp_shexp") != NULL;
    snprintf(name, sizeof name, "%s", t->name);
    if (rest != NULL) {
        snprintf(name, sizeof name, "blk.%d%.50s", layer, rest);
    }
    gguf_other_text(file, name);
    gguf_other_number(file, vector ? 1 : t->rank, 4);
    for (uint32_t i = 0; i < (vector ? 1 : t->rank); i++) {
        gguf_other_number(file, t->shape[i], 8);
    }
    gguf_other_number(file, t->type->id, 4);
    gguf_other_number(file, *at, 8);
    *at += (t->bytes + 31) / 32 * 32;
}

// A copy in which the gate of the MLP beside the experts is a vector and, if `last` is not -1, a
// layer with the tensors of that one follows, which predicts further tokens.
static bool gguf_other_write(qlora__env* env, const char* from, const char* to, int last) {
    static qlora__gguf_file f;
    char prefix[16];
    uint64_t at = 0;
    uint32_t more = 0;
    FILE* file = fopen(to, "wb");
    bool good = file != NULL && qlora__gguf_file_open(env, from, &f) == QLORA_OK;
    if (!good) {
        return false;
    }
    snprintf(prefix, sizeof prefix, "blk.%d.", last);
    for (uint32_t i = 0; i < f.count && last >= 0; i++) {
        more += strncmp(f.tensors[i].name, prefix, strlen(prefix)) == 0 ? 1 : 0;
    }
    fputs("GGUF", file);
    gguf_other_number(file, 3, 4);
    gguf_other_number(file, f.count + more, 8);
    gguf_other_number(file, f.meta.count + (last >= 0 ? 1u : 0u), 8);
    fwrite(f.meta.file + 24, 1, (size_t)f.meta.table - 24, file);
    if (last >= 0) {
        gguf_other_text(file, "glm4moe.nextn_predict_layers");
        gguf_other_number(file, 4, 4);
        gguf_other_number(file, 1, 4);
    }
    for (int pass = 0; pass < 4; pass++) { // lines, lines of the last layer, then the data of both
        if (pass == 2) {
            gguf_other_number(file, 0, (size_t)(-ftell(file) & 31));
        }
        for (uint32_t i = 0; i < f.count; i++) {
            const qlora__gguf_tensor* t = &f.tensors[i];
            bool again = last >= 0 && strncmp(t->name, prefix, strlen(prefix)) == 0;
            if (pass % 2 == 1 && !again) {
                continue;
            }
            if (pass < 2) {
                gguf_other_line(file, t, pass == 1 ? last + 1 : -1, &at);
            } else {
                fwrite(t->data, 1, (size_t)t->bytes, file);
                gguf_other_number(file, 0, (size_t)((32 - t->bytes % 32) % 32));
            }
        }
    }
    qlora__gguf_close(env, &f);
    return fclose(file) == 0;
}

// They mean the same as ours, and are merged with what they have.
TEST gguf_mixtures_of_other_converters(void) {
    static const struct {
        const char* folder;
        int last;
    } cases[] = {{"qwen2moe", -1}, {"glm4moe", 2}};
    static const gguf_experts_change blocks = {NULL, "glm4moe.block_count", NULL, 4, NULL};
    static float want[16 * 512];
    static float got[16 * 512];
    char base[512];
    char other[512];
    char merged[512];
    qlora_ctx_desc machine;
    qlora_ctx* ctx = NULL;
    snprintf(base, sizeof base, "%s", test_path("ours.gguf"));
    snprintf(other, sizeof other, "%s", test_path("theirs.gguf"));
    snprintf(merged, sizeof merged, "%s", test_path("theirs_merged.gguf"));
    memset(&machine, 0, sizeof machine);
    machine.require_backend = QLORA_BACKEND_CPU;
    ASSERT_EQ(QLORA_OK, qlora_ctx_create(&machine, &ctx));
    for (size_t i = 0; i < 2; i++) {
        char dir[512];
        char adapter[512];
        if (!gguf_experts_here(cases[i].folder, "model", dir, sizeof dir)) {
            qlora_ctx_destroy(ctx);
            SKIPm("the shared folder was not found");
        }
        gguf_experts_here(cases[i].folder, "adapter20", adapter, sizeof adapter);
        ASSERT_EQm(gguf_experts_error, QLORA_OK,
                   gguf_experts_merge(ctx, dir, NULL, base, QLORA_GGUF_AS_DTYPE));
        ASSERT(gguf_other_write(&ctx->env, base, other, cases[i].last));
        ASSERT(cases[i].last < 0 || gguf_experts_patch(other, &blocks));
        ASSERT_EQm(gguf_experts_error, QLORA_OK,
                   gguf_experts_merge(ctx, other, adapter, merged, QLORA_GGUF_AS_DTYPE));
        memset(want, 0, sizeof want);
        memset(got, 0, sizeof got);
        ASSERT(gguf_experts_eval(ctx, dir, adapter, want));
        double error = gguf_folder_error(ctx, merged, want, got);
        ASSERTm(cases[i].folder, error >= 0.0 && error <= 1e-5);
        ASSERT(gguf_experts_eval(ctx, dir, NULL, want));
        error = gguf_folder_error(ctx, other, want, got);
        ASSERTm(cases[i].folder, error >= 0.0 && error <= 1e-5);
    }
    remove(base);
    remove(other);
    remove(merged);
    ASSERT_EQ(QLORA_OK, qlora_ctx_destroy(ctx));
    PASS();
}

SUITE(gguf_experts_suite) {
    RUN_TEST(gguf_mixtures_are_merged);
    RUN_TEST(gguf_merges_are_verified);
    RUN_TEST(gguf_adapters_have_all_experts);
    RUN_TEST(gguf_mixtures_of_other_converters);
    for (size_t i = 0; i < sizeof gguf_experts_changes / sizeof gguf_experts_changes[0]; i++) {
        greatest_set_test_suffix(gguf_experts_changes[i].find);
        RUN_TESTp(gguf_mixtures_are_refused_by_name, &gguf_experts_changes[i]);
    }
}
