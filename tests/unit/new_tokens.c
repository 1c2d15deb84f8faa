// new_tokens.c - rows for tokens that a model does not know yet, and the files of a tokenizer with
// more tokens. tests/tokens_check.py compares both with transformers and PEFT.
#define _POSIX_C_SOURCE 200809L // mkdtemp

#include "qlora.h"
#include "qlora_text.h"

#include "test.h"

#include <sys/stat.h>

#include "model_rig.h"

#define ASSERT_OK(R, CALL) ASSERT_EQm(qlora_last_error((R).ctx), QLORA_OK, (CALL))

enum { HIDDEN = 32 };

static const int32_t from_rows[] = {3, 50, 50, 7};
static const qlora_new_token both_tokens[] = {{VOCAB, from_rows, 4}, {VOCAB + 1, NULL, 0}};
// One of them is a row that the model has.
static const qlora_new_token mixed_tokens[] = {{60, from_rows, 1}, {VOCAB, NULL, 0}};

static setup new_setup(const test_machine* machine, bool tied, uint32_t save,
                       const qlora_new_token* tokens) {
    setup s = setup_make(machine);
    s.config.tied = tied;
    s.model.dropout = 0.0f;
    s.model.train_norms = false;
    s.model.save_modules = save;
    s.model.new_tokens = tokens;
    s.model.new_token_count = tokens != NULL ? 2 : 0;
    return s;
}

// A trained tensor by the end of its name; NULL if there is none. The caller frees it.
static float* tensor_of(rig* r, const char* end, bool gradient, int64_t* rows) {
    for (int64_t i = 0; i < model_parameters(r->model); i++) {
        qlora_parameter_info p;
        if (qlora_parameter_query(r->model, i, &p) != QLORA_OK) {
            return NULL;
        }
        if (strcmp(p.name + strlen(p.name) - strlen(end), end) == 0) {
            float* values = (float*)malloc((size_t)(p.rows * p.cols) * sizeof *values);
            qlora_result read = gradient ? qlora_gradient_read(r->trainer, i, values)
                                         : qlora_parameter_read(r->model, i, values);
            *rows = p.rows;
            if (read != QLORA_OK) {
                free(values);
                values = NULL;
            }
            return values;
        }
    }
    return NULL;
}

static const char* const whole_names[] = {"embed_tokens.weight", "lm_head.weight"};
static const char* const row_names[] = {"embed_tokens.token_adapter.trainable_tokens_delta",
                                        "lm_head.token_adapter.trainable_tokens_delta"};

static bool rig_bare(rig* r, const setup* s) { // a model as it starts
    memset(r, 0, sizeof *r);
    r->ctx = test_open(&s->machine, s->change);
    return r->ctx != NULL && rig_start(r, s);
}

// A second model in the context of the first one.
static bool rig_beside(rig* r, const rig* first, const setup* s) {
    memset(r, 0, sizeof *r);
    r->ctx = first->ctx;
    return rig_start(r, s);
}

static bool rig_leave(rig* r) {
    return qlora_trainer_destroy(r->trainer) == QLORA_OK && qlora_model_close(r->model) == QLORA_OK;
}

// The mean of rows of a matrix; rows NULL = of the first `count`.
static void mean_of(const float* table, const int32_t* rows, int64_t count, float* out) {
    for (int c = 0; c < HIDDEN; c++) {
        double sum = 0.0;
        for (int64_t i = 0; i < count; i++) {
            sum += (double)table[(rows != NULL ? rows[i] : i) * HIDDEN + c];
        }
        out[c] = (float)(sum / (double)count);
    }
}

// Rows start as the means that were asked for, in the embedding and, if it is a matrix of its own,
// in the head; the same if the matrices are trained as a whole.
TEST rows_start_as_means(const test_machine* machine) {
    for (int tied = 0; tied < 2; tied++) {
        uint32_t save = QLORA_SAVE_EMBED | (tied ? 0u : QLORA_SAVE_HEAD);
        setup old = new_setup(machine, tied != 0, save, NULL);
        setup rows = new_setup(machine, tied != 0, 0, both_tokens);
        setup whole = new_setup(machine, tied != 0, save, both_tokens);
        rig a;
        rig b;
        rig c;
        ASSERT(rig_bare(&a, &old) && rig_beside(&b, &a, &rows) && rig_beside(&c, &a, &whole));
        qlora_model_info info;
        ASSERT_OK(b, qlora_model_query(b.model, &info));
        ASSERT_EQ_FMT(VOCAB + 2, (int)info.plan->config.vocab, "%d");
        ASSERT_EQ_FMT(VOCAB, (int)info.plan->base_vocab, "%d");
        for (int head = 0; head < 2 - tied; head++) {
            int64_t n[3];
            float want[2 * HIDDEN];
            float* base = tensor_of(&a, whole_names[head], false, &n[0]);
            float* own = tensor_of(&b, row_names[head], false, &n[1]);
            float* all = tensor_of(&c, whole_names[head], false, &n[2]);
            ASSERT(base != NULL && own != NULL && all != NULL);
            ASSERT(n[0] == VOCAB && n[1] == 2 && n[2] == VOCAB + 2);
            mean_of(base, from_rows, 4, want);
            mean_of(base, NULL, VOCAB, want + HIDDEN);
            ASSERT_CLOSE(want, own, 2 * HIDDEN, 1e-7, 1e-6);
            ASSERT_CLOSE(want, all + VOCAB * HIDDEN, 2 * HIDDEN, 1e-7, 1e-6);
            ASSERT_MEM_EQ(base, all, VOCAB * HIDDEN * sizeof *base);
            free(base);
            free(own);
            free(all);
        }
        int64_t ignored;
        ASSERT(tied == 0 || tensor_of(&b, row_names[1], false, &ignored) == NULL);
        ASSERT(rig_leave(&c) && rig_leave(&b) && rig_close(&a, &old));
    }
    PASS();
}

static void new_data(data* d) {
    data_make(d, "new tokens", run_lengths[0], 3);
    d->ids[0] = VOCAB;
    d->ids[3] = VOCAB;
    d->labels[3] = VOCAB;
    d->ids[12] = 60;
    d->labels[12] = 60;
}

// The gradients of rows are those rows of the gradients of the whole matrices.
TEST rows_have_their_gradients(const test_machine* machine) {
    for (int tied = 0; tied < 2; tied++) {
        uint32_t save = QLORA_SAVE_EMBED | (tied ? 0u : QLORA_SAVE_HEAD);
        setup rows = new_setup(machine, tied != 0, 0, mixed_tokens);
        setup whole = new_setup(machine, tied != 0, save, mixed_tokens);
        rig a;
        rig b;
        data d;
        new_data(&d);
        ASSERT(rig_bare(&a, &rows) && rig_beside(&b, &a, &whole));
        ASSERT_OK(a, qlora_train_gradients(a.trainer, &d.batch, 1));
        ASSERT_OK(b, qlora_train_gradients(b.trainer, &d.batch, 1));
        for (int head = 0; head < 2 - tied; head++) {
            int64_t n[2];
            float* own = tensor_of(&a, row_names[head], true, &n[0]);
            float* all = tensor_of(&b, whole_names[head], true, &n[1]);
            ASSERT(own != NULL && all != NULL && n[0] == 2 && n[1] == VOCAB + 1);
            ASSERT_REL_L2(all + 60 * HIDDEN, own, 2 * HIDDEN, 1e-5);
            free(own);
            free(all);
        }
        ASSERT(rig_leave(&b) && rig_close(&a, &rows));
    }
    PASS();
}

// A few steps; the log-probabilities with the adapters, without them, and all parameters.
static float* new_run(const setup* s, size_t* count, double logps[6]) {
    rig r;
    data d;
    qlora_train_info info;
    float* values = NULL;
    new_data(&d);
    bool ok = rig_open(&r, s) && qlora_train_step(r.trainer, &d.batch, 1, &info) == QLORA_OK &&
              qlora_train_step(r.trainer, &d.batch, 1, &info) == QLORA_OK &&
              (values = rig_read(&r, false, count)) != NULL &&
              qlora_eval_sequences(r.model, &d.batch, logps) == QLORA_OK &&
              qlora_adapter_use(r.model, false) == QLORA_OK &&
              qlora_eval_sequences(r.model, &d.batch, logps + 3) == QLORA_OK;
    if (!ok) {
        rig_says(&r, "training");
        free(values);
        values = NULL;
    }
    return rig_close(&r, s) ? values : NULL;
}

TEST rows_train_alike(const test_machine* machine) {
    for (int tied = 0; tied < 2; tied++) {
        setup s = new_setup(machine, tied != 0, 0, mixed_tokens);
        setup cpu = new_setup(test_machine_at(0), tied != 0, 0, mixed_tokens);
        size_t n[2] = {0, 0};
        double got[6];
        double want[6];
        float* a = new_run(&cpu, &n[0], want);
        float* b = new_run(&s, &n[1], got);
        ASSERT(a != NULL && b != NULL && n[0] == n[1]);
        ASSERT_REL_L2(a, b, n[0], 1e-4);
        ASSERT_CLOSE_DOUBLE(want, got, 6, 1e-4, 1e-5);
        free(a);
        free(b);
    }
    PASS();
}

static bool remove_all(const char* dir, const char* const* names) {
    bool ok = true;
    for (size_t i = 0; names[i] != NULL; i++) {
        char path[160];
        snprintf(path, sizeof path, "%s/%s", dir, names[i]);
        ok = remove(path) == 0 && ok;
    }
    return ok;
}

// A saved adapter brings its rows along, and a run that stops goes on with the same bits.
TEST rows_are_saved(const test_machine* machine) {
    static const char* const adapter[] = {"adapter_model.safetensors", "adapter_config.json", "",
                                          NULL};
    static const char* const checkpoint[] = {"step-1/adapter_model.safetensors",
                                             "step-1/adapter_config.json",
                                             "step-1/state.safetensors",
                                             "step-1",
                                             "latest",
                                             "",
                                             NULL};
    for (int kind = 0; kind < 4; kind++) {
        bool tied = kind % 2 == 1;
        uint32_t save = kind < 2 ? 0 : QLORA_SAVE_EMBED | (tied ? 0u : QLORA_SAVE_HEAD);
        setup s = new_setup(machine, tied, save, mixed_tokens);
        char dir[] = "build/test-tokens-XXXXXX";
        char steps[] = "build/test-tokens-XXXXXX";
        rig r;
        data d;
        double want[3];
        double got[3];
        qlora_train_info info;
        qlora_train_info again;
        ASSERT(mkdtemp(dir) != NULL && mkdtemp(steps) != NULL);
        new_data(&d);
        ASSERT(rig_open(&r, &s));
        ASSERT_OK(r, qlora_train_step(r.trainer, &d.batch, 1, &info));
        ASSERT_OK(r, qlora_adapter_save(r.model, dir, NULL));
        ASSERT_OK(r, qlora_eval_sequences(r.model, &d.batch, want));
        ASSERT_OK(r, qlora_checkpoint_save(r.trainer, steps, NULL, 0));
        ASSERT_OK(r, qlora_train_step(r.trainer, &d.batch, 1, &info));
        ASSERT(rig_close(&r, &s));
        ASSERT(rig_bare(&r, &s));
        ASSERT_OK(r, qlora_checkpoint_load(r.trainer, steps, NULL, NULL));
        ASSERT_OK(r, qlora_train_step(r.trainer, &d.batch, 1, &again));
        ASSERT_MEM_EQ(&info.loss, &again.loss, sizeof info.loss);
        ASSERT_MEM_EQ(&info.grad_norm, &again.grad_norm, sizeof info.grad_norm);
        ASSERT(rig_close(&r, &s));
        setup opened = new_setup(machine, tied, 0, NULL);
        opened.model.adapter = dir;
        opened.model.purpose = QLORA_PURPOSE_EVALUATE;
        opened.budget = (uint64_t)1 << 32; // with a plan made before
        ASSERT(rig_bare(&r, &opened));
        ASSERT_OK(r, qlora_eval_sequences(r.model, &d.batch, got));
        ASSERT_CLOSE_DOUBLE(want, got, 3, 1e-6, 1e-6);
        ASSERT(rig_close(&r, &opened));
        ASSERT(remove_all(dir, adapter) && remove_all(steps, checkpoint));
    }
    PASS();
}

// A merged model has the rows, and its config their number.
TEST rows_are_merged(const test_machine* machine) {
    static const char* const adapter[] = {"adapter_model.safetensors", "adapter_config.json", "",
                                          NULL};
    static const char* const model[] = {"model.safetensors", "config.json", "", NULL};
    static const char base[] = "tests/golden/tiny/model";
    setup s = new_setup(machine, false, 0, both_tokens);
    char dir[] = "build/test-tokens-XXXXXX";
    char out[] = "build/test-tokens-XXXXXX";
    char merged[64];
    rig r;
    data d;
    double want[3];
    double got[3];
    qlora_merge_desc merge;
    ASSERT(mkdtemp(dir) != NULL && mkdtemp(out) != NULL);
    ASSERT(rig_bare(&r, &s)); // for the context
    ASSERT(rig_leave(&r));
    ASSERT_OK(r, qlora_config_read(r.ctx, base, &s.config));
    qlora_new_token tokens[2] = {{(int32_t)s.config.vocab, NULL, 0},
                                 {(int32_t)s.config.vocab + 1, from_rows, 2}};
    s.model.dir = base;
    s.model.new_tokens = tokens;
    s.model.base = QLORA_BASE_32BIT;
    rig first = r;
    ASSERT(rig_beside(&r, &first, &s) && rig_stir(&r));
    data_make(&d, "merged", run_lengths[0], 3);
    d.ids[1] = tokens[0].id;
    d.labels[5] = d.ids[5] = tokens[1].id;
    ASSERT_OK(r, qlora_eval_sequences(r.model, &d.batch, want));
    ASSERT_OK(r, qlora_adapter_save(r.model, dir, NULL));
    ASSERT(rig_leave(&r));
    s.model.new_tokens = NULL;
    s.model.new_token_count = 0;
    s.model.adapter = dir;
    s.model.purpose = QLORA_PURPOSE_ADAPTER;
    ASSERT(rig_beside(&r, &first, &s));
    memset(&merge, 0, sizeof merge);
    snprintf(merged, sizeof merged, "%s/model.gguf", out);
    merge.dir = merged;
    ASSERT_EQ(QLORA_ERR_UNSUPPORTED, qlora_merge_save(r.model, &merge));
    merge.dir = out;
    ASSERT_OK(r, qlora_merge_save(r.model, &merge));
    ASSERT(rig_leave(&r));
    s.model.adapter = NULL;
    s.model.dir = out;
    s.model.rank = -1;
    s.model.purpose = QLORA_PURPOSE_EVALUATE;
    ASSERT(rig_beside(&r, &first, &s));
    qlora_model_info info;
    ASSERT_OK(r, qlora_model_query(r.model, &info));
    ASSERT_EQ_FMT((int)tokens[1].id + 1, (int)info.plan->config.vocab, "%d");
    ASSERT_OK(r, qlora_eval_sequences(r.model, &d.batch, got));
    ASSERT_CLOSE_DOUBLE(want, got, 3, 1e-4, 1e-5);
    ASSERT(rig_leave(&r));
    ASSERT(test_close_ctx(&s.machine, first.ctx));
    ASSERT(remove_all(dir, adapter) && remove_all(out, model));
    PASS();
}

// What cannot be meant is refused by name.
TEST wrong_rows_are_refused(const test_machine* machine) {
    static const int32_t outside[] = {5, VOCAB};
    const struct {
        bool tied;
        uint32_t save;
        qlora_new_token tokens[2];
        const char* message;
    } rows[] = {
        {true, 0, {{VOCAB, NULL, 0}, {VOCAB + 2, NULL, 0}}, "new_tokens[1].id is 63"},
        {true, 0, {{-1, NULL, 0}, {VOCAB, NULL, 0}}, "new_tokens[0].id is -1"},
        {true, 0, {{VOCAB, NULL, 0}, {VOCAB, NULL, 0}}, "id is 61, as that of token 0"},
        {true, 0, {{VOCAB, outside, 2}, {8, NULL, 0}}, "new_tokens[0].from[1] is 61"},
        {true, 0, {{VOCAB, NULL, 1}, {8, NULL, 0}}, "new_tokens[0].from does not have"},
        {true, QLORA_SAVE_EMBED, {{VOCAB + 2, NULL, 0}, {8, NULL, 0}}, "new_tokens[0].id is 63"},
        {false, QLORA_SAVE_EMBED, {{VOCAB, NULL, 0}, {8, NULL, 0}}, "it must be both or none"},
        {false, QLORA_SAVE_EMBED, {{60, NULL, 0}, {8, NULL, 0}}, "it must be both or none"},
        {false, QLORA_SAVE_HEAD, {{VOCAB, NULL, 0}, {8, NULL, 0}}, "it must be both or none"},
    };
    rig_quiet = true;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        setup s = new_setup(machine, rows[i].tied, rows[i].save, rows[i].tokens);
        rig r;
        ASSERT_FALSE(rig_bare(&r, &s));
        ASSERTm(qlora_last_error(r.ctx), strstr(qlora_last_error(r.ctx), rows[i].message) != NULL);
        ASSERT(rig_close(&r, &s));
    }
    setup s = new_setup(machine, true, 0, both_tokens);
    rig r;
    s.model.adapter = "build/nowhere";
    ASSERT_FALSE(rig_bare(&r, &s));
    ASSERT(strstr(qlora_last_error(r.ctx), "desc.new_tokens and desc.adapter") != NULL);
    ASSERT(rig_close(&r, &s));
    rig_quiet = false;
    PASS();
}

// ---- the tokenizer ------------------------------------------------------------------------------

static bool write_text(const char* dir, const char* name, const char* text) {
    char path[160];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE* file = fopen(path, "wb");
    return file != NULL && fputs(text, file) >= 0 && fclose(file) == 0;
}

static bool read_text(const char* dir, const char* name, char* out, size_t room) {
    char path[160];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE* file = fopen(path, "rb");
    size_t n = file != NULL ? fread(out, 1, room - 1, file) : 0;
    out[n] = '\0';
    return file != NULL && fclose(file) == 0;
}

#define MODEL                                                                                      \
    "\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":1,\"ab\":2,\"c\":3},\"merges\":[\"a "    \
    "b\"]}"

// The three forms that added_tokens may have.
static const char* const token_files[] = {
    "{" MODEL ", \"added_tokens\": [ {\"id\":4,\"content\":\"<s>\",\"special\":true} ] }",
    "{" MODEL ",\"added_tokens\":null,\"decoder\":null}",
    "{" MODEL "}",
};

// The ids of a text, as digits.
static const char* ids_of(qlora_text* text, qlora_text_tok* tok, const char* of, char out[64]) {
    qlora_text_ids ids;
    size_t used = 0;
    memset(&ids, 0, sizeof ids);
    out[0] = '\0';
    if (qlora_text_encode(tok, of, strlen(of), 0, &ids) == QLORA_OK) {
        for (size_t i = 0; i < ids.count && used < 50; i++) {
            used +=
                (size_t)snprintf(out + used, 64 - used, "%s%d", i > 0 ? " " : "", (int)ids.data[i]);
        }
    }
    qlora_text_ids_free(text, &ids);
    return out;
}

TEST tokenizers_grow(void) {
    static const char* const names[] = {"tokenizer.json",
                                        "tokenizer_config.json",
                                        "added_tokens.json",
                                        "special_tokens_map.json",
                                        "",
                                        NULL};
    static const char* const config =
        "{\"a\": 1, \"added_tokens_decoder\": {\"4\": {\"content\": \"<s>\"}}}";
    for (size_t form = 0; form < 3; form++) {
        char from[] = "build/test-tokens-XXXXXX";
        char to[] = "build/test-tokens-XXXXXX";
        char got[4096];
        char ids[64];
        qlora_text* text = NULL;
        qlora_text_tok* tok = NULL;
        qlora_text_new_token tokens[3];
        int32_t next = form == 0 ? 5 : 4;
        memset(tokens, 0, sizeof tokens);
        tokens[0].text = "<|new \"one\"|>";
        tokens[0].special = true;
        tokens[1].text = "ab"; // it exists
        tokens[2].text = "\xC3\xA9t\xC3\xA9";
        ASSERT(mkdtemp(from) != NULL && mkdtemp(to) != NULL);
        ASSERT(write_text(from, "tokenizer.json", token_files[form]));
        ASSERT(form != 0 || write_text(from, "tokenizer_config.json", config));
        ASSERT(form != 0 || write_text(from, "added_tokens.json", "{}"));
        ASSERT(form != 0 || write_text(from, "special_tokens_map.json", "{\"x\": 2}"));
        ASSERT_EQ(QLORA_OK, qlora_text_create(NULL, &text));
        ASSERT_EQm(qlora_text_last_error(text), QLORA_OK,
                   qlora_text_tok_open_with(text, from, tokens, 3, &tok));
        ASSERT(tokens[0].id == next && tokens[1].id == 2 && tokens[2].id == next + 1);
        ASSERT(!tokens[0].known && tokens[1].known && !tokens[2].known);
        const char* said = "a<|new \"one\"|>b\xC3\xA9t\xC3\xA9"
                           "ab";
        char want[64];
        snprintf(want, sizeof want, "0 %d 1 %d 2", (int)next, (int)next + 1);
        ASSERT_STR_EQ(want, ids_of(text, tok, said, ids));
        ASSERT_EQ(QLORA_OK, qlora_text_tok_close(tok));
        ASSERT_EQm(qlora_text_last_error(text), QLORA_OK,
                   qlora_text_tok_save(text, from, tokens, 3, to));
        ASSERT_EQ(QLORA_OK, qlora_text_tok_open(text, to, &tok));
        ASSERT_STR_EQ(want, ids_of(text, tok, said, ids));
        qlora_text_token_info info;
        ASSERT_EQ(QLORA_OK, qlora_text_token_query(tok, next, &info));
        ASSERT(info.special && info.added);
        ASSERT_EQ(QLORA_OK, qlora_text_token_query(tok, next + 1, &info));
        ASSERT(!info.special && info.added);
        ASSERT_EQ(QLORA_OK, qlora_text_tok_close(tok));
        ASSERT(read_text(to, "tokenizer_config.json", got, sizeof got));
        ASSERTm(got, strstr(got, form == 0 ? "\"5\":{\"content\":\"<|new \\\"one\\\"|>\""
                                           : "PreTrainedTokenizerFast") != NULL);
        ASSERT(form != 0 || read_text(to, "added_tokens.json", got, sizeof got));
        ASSERT(form != 0 ||
               strcmp(got, "{\"<|new \\\"one\\\"|>\":5,\"\xC3\xA9t\xC3\xA9\":6}") == 0);
        ASSERT(form != 0 || (read_text(to, "special_tokens_map.json", got, sizeof got) &&
                             strcmp(got, "{\"x\": 2}") == 0));
        ASSERT_EQ(QLORA_OK, qlora_text_destroy(text));
        (void)remove_all(from, names);
        (void)remove_all(to, names);
    }
    PASS();
}

TEST wrong_tokens_are_refused(void) {
    static const char* const names[] = {"tokenizer.json", "", NULL};
    static const struct {
        const char* file;
        const char* texts[2];
        const char* message;
    } rows[] = {
        {"{" MODEL "}", {"x", "x"}, "new token 1 is \"x\", as token 0 is"},
        {"{" MODEL "}", {"", "x"}, "new token 0 has 0 bytes"},
        {"{" MODEL "}", {"x", "\xFF"}, "new token 1 is not UTF-8"},
        {"{" MODEL ",\"added_tokens\":7}", {"x", "y"}, "added_tokens is not an array"},
        {"{\"model\":{\"vocab\":{\"a\":0,\"z\":2},\"merges\":[]}}",
         {"x", "y"},
         "id 1 has no token"},
        {NULL, {"x", "y"}, "need a folder with tokenizer.json"},
    };
    qlora_text* text = NULL;
    ASSERT_EQ(QLORA_OK, qlora_text_create(NULL, &text));
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        char dir[] = "build/test-tokens-XXXXXX";
        qlora_text_new_token tokens[2];
        qlora_text_tok* tok = NULL;
        memset(tokens, 0, sizeof tokens);
        tokens[0].text = rows[i].texts[0];
        tokens[1].text = rows[i].texts[1];
        ASSERT(mkdtemp(dir) != NULL);
        ASSERT(rows[i].file == NULL || write_text(dir, "tokenizer.json", rows[i].file));
        ASSERT(qlora_text_tok_open_with(text, dir, tokens, 2, &tok) != QLORA_OK);
        ASSERTm(qlora_text_last_error(text),
                strstr(qlora_text_last_error(text), rows[i].message) != NULL);
        (void)remove_all(dir, names);
    }
    ASSERT_EQ(QLORA_OK, qlora_text_destroy(text));
    PASS();
}

// ---- the chat format of an adapter --------------------------------------------------------------

// Opens the chat of a model with an adapter, whose folders may be NULL.
static qlora_text_chat* chat_of(qlora_text_tok* tok, const char* model, const char* adapter,
                                const char* name, qlora_text_chat_info* info, qlora_text* text) {
    qlora_text_chat_desc desc;
    qlora_text_chat* chat = NULL;
    memset(&desc, 0, sizeof desc);
    desc.tok = tok;
    desc.folder = model;
    desc.tokenizer_folder = adapter;
    desc.name = name;
    bool ok = qlora_text_chat_open(text, &desc, &chat) == QLORA_OK &&
              qlora_text_chat_query(chat, info) == QLORA_OK;
    return ok ? chat : NULL;
}

static const char* const kept_files[] = {"tokenizer.json",
                                         "tokenizer_config.json",
                                         "config.json",
                                         "additional_chat_templates/tool_use.jinja",
                                         "chat_template.jinja",
                                         "additional_chat_templates",
                                         "",
                                         NULL};

// What the training of an adapter rendered is what every later use renders, and what transformers
// finds in the adapter's folder.
TEST formats_are_kept(void) {
    static const char* const config =
        "{\"eos_token\": \"a\", \"chat_template\": \"{{ messages[0].content }}<s>\"}";
    char model[] = "build/test-tokens-XXXXXX";
    char adapter[] = "build/test-tokens-XXXXXX";
    char got[4096];
    qlora_text* text = NULL;
    qlora_text_tok* tok = NULL;
    qlora_text_chat_info info;
    const char* zephyr = qlora_text_chat_template("zephyr");
    ASSERT(mkdtemp(model) != NULL && mkdtemp(adapter) != NULL);
    ASSERT(write_text(model, "tokenizer.json", token_files[0]));
    ASSERT(write_text(model, "tokenizer_config.json", config));
    ASSERT(write_text(model, "config.json", "{\"eos_token_id\": 3}"));
    ASSERT_EQ(QLORA_OK, qlora_text_create(NULL, &text));
    ASSERT_EQ(QLORA_OK, qlora_text_tok_open(text, model, &tok));
    // a template that was chosen is saved in both places where it is looked for
    qlora_text_chat* chat = chat_of(tok, model, NULL, "zephyr", &info, text);
    ASSERTm(qlora_text_last_error(text), chat != NULL && !info.own && !info.replaced);
    ASSERT_EQm(qlora_text_last_error(text), QLORA_OK,
               qlora_text_chat_save(chat, model, NULL, 0, adapter));
    ASSERT_EQ(QLORA_OK, qlora_text_chat_close(chat));
    ASSERT(read_text(adapter, "chat_template.jinja", got, sizeof got));
    ASSERT_STR_EQ(zephyr, got);
    ASSERT(read_text(adapter, "tokenizer_config.json", got, sizeof got));
    ASSERTm(got, strstr(got, "\"chat_template\": \"{%- for m in messages %}") != NULL);
    ASSERTm(got, strstr(got, "\"eos_token\": \"a\"") != NULL && strstr(got, "<s>") == NULL);
    // and it is used, as the built-in format that it is, unless another one is chosen
    static const char* const chosen[] = {NULL, "zephyr", "chatml"};
    for (size_t i = 0; i < 3; i++) {
        chat = chat_of(tok, model, adapter, chosen[i], &info, text);
        ASSERT(chat != NULL);
        ASSERT_STR_EQ(i == 2 ? "chatml" : "zephyr", info.name);
        ASSERT(info.own == (i == 0) && info.replaced == (i == 2));
        ASSERT_EQ(QLORA_OK, qlora_text_chat_close(chat));
    }
    // special tokens are those of the adapter's tokenizer; the ids that end a text are also the
    // model's
    ASSERT(write_text(adapter, "tokenizer_config.json", "{\"eos_token\": {\"content\": \"b\"}}"));
    chat = chat_of(tok, model, adapter, NULL, &info, text);
    ASSERT(chat != NULL && info.eos == 1 && info.stop_count == 2);
    ASSERT(info.stops[0] == 3 && info.stops[1] == 1);
    // saved again, as it is: now with a template for tools
    ASSERT_EQ(QLORA_OK, qlora_text_chat_close(chat));
    (void)remove_all(adapter, kept_files);
    ASSERT(mkdir(adapter, 0777) == 0);
    ASSERT(write_text(model, "tokenizer_config.json",
                      "{\"chat_template\": [{\"name\": \"tool_use\", \"template\": \"T\"}, "
                      "{\"name\": \"default\", \"template\": \"D\"}]}"));
    char tools[64];
    snprintf(tools, sizeof tools, "%s/additional_chat_templates", model);
    ASSERT(mkdir(tools, 0777) == 0 && write_text(tools, "tool_use.jinja", "U"));
    ASSERT(write_text(model, "chat_template.jinja", "E"));
    chat = chat_of(tok, model, NULL, NULL, &info, text);
    ASSERT(chat != NULL);
    ASSERT_EQm(qlora_text_last_error(text), QLORA_OK,
               qlora_text_chat_save(chat, model, NULL, 0, adapter));
    ASSERT_EQ(QLORA_OK, qlora_text_chat_close(chat));
    ASSERT(read_text(adapter, "additional_chat_templates/tool_use.jinja", got, sizeof got));
    ASSERT_STR_EQ("U", got);
    ASSERT(read_text(adapter, "chat_template.jinja", got, sizeof got) && strcmp(got, "E") == 0);
    ASSERT_EQ(QLORA_OK, qlora_text_tok_close(tok));
    ASSERT_EQ(QLORA_OK, qlora_text_destroy(text));
    (void)remove_all(model, kept_files);
    (void)remove_all(adapter, kept_files);
    PASS();
}

// A guess is kept only if something was rendered with it.
TEST guesses_are_kept_if_used(void) {
    char model[] = "build/test-tokens-XXXXXX";
    char adapter[] = "build/test-tokens-XXXXXX";
    char got[4096];
    qlora_text* text = NULL;
    qlora_text_tok* tok = NULL;
    qlora_text_chat_info info;
    qlora_text_ids ids;
    qlora_text_message message;
    memset(&ids, 0, sizeof ids);
    memset(&message, 0, sizeof message);
    message.role = "user";
    message.content = "a";
    message.length = 1;
    ASSERT(mkdtemp(model) != NULL && mkdtemp(adapter) != NULL);
    ASSERT(write_text(model, "tokenizer.json", token_files[0]));
    ASSERT_EQ(QLORA_OK, qlora_text_create(NULL, &text));
    ASSERT_EQ(QLORA_OK, qlora_text_tok_open(text, model, &tok));
    qlora_text_chat* chat = chat_of(tok, model, NULL, NULL, &info, text);
    ASSERT(chat != NULL && strcmp(info.name, "alpaca") == 0);
    ASSERT_EQ(QLORA_OK, qlora_text_chat_save(chat, model, NULL, 0, adapter));
    ASSERT_FALSE(read_text(adapter, "chat_template.jinja", got, sizeof got));
    ASSERT_EQ(QLORA_OK, qlora_text_chat_encode(chat, &message, 1, true, &ids, NULL));
    ASSERT_EQ(QLORA_OK, qlora_text_chat_save(chat, model, NULL, 0, adapter));
    ASSERT(read_text(adapter, "chat_template.jinja", got, sizeof got));
    ASSERT_STR_EQ(qlora_text_chat_template("alpaca"), got);
    // a model whose tokenizer is another file: the template alone
    (void)remove_all(adapter, kept_files);
    ASSERT(mkdir(adapter, 0777) == 0);
    ASSERT_EQ(QLORA_OK, qlora_text_chat_save(chat, "build/nowhere.d", NULL, 0, adapter));
    ASSERT(read_text(adapter, "chat_template.jinja", got, sizeof got));
    ASSERT_FALSE(read_text(adapter, "tokenizer.json", got, sizeof got));
    qlora_text_ids_free(text, &ids);
    ASSERT_EQ(QLORA_OK, qlora_text_chat_close(chat));
    ASSERT_EQ(QLORA_OK, qlora_text_tok_close(tok));
    ASSERT_EQ(QLORA_OK, qlora_text_destroy(text));
    (void)remove_all(model, kept_files);
    (void)remove_all(adapter, kept_files);
    PASS();
}

SUITE_EXTERN(new_tokens_suite);
SUITE(new_tokens_suite) {
    RUN_ON(TEST_CPU, rows_start_as_means);
    RUN_ON(TEST_CPU, rows_have_their_gradients);
    RUN_ON(TEST_ONE_EACH, rows_train_alike);
    RUN_ON(TEST_CPU, rows_are_saved);
    RUN_ON(TEST_CPU, rows_are_merged);
    RUN_ON(TEST_CPU, wrong_rows_are_refused);
    RUN_TEST(tokenizers_grow);
    RUN_TEST(wrong_tokens_are_refused);
    RUN_TEST(formats_are_kept);
    RUN_TEST(guesses_are_kept_if_used);
}
