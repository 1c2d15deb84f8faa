// model.c - the committed golden folder, figure by figure, on every kind of machine; and, if
// ../shared (or $QLORA_SHARED) is present, a real model: its losses on real text, and 20 steps
// against a trajectory computed independently in float64.
#define GOLDEN_NO_MAIN
#include "golden/golden.c"

#include "test.h"

#include "qlora_text.h"
#include "fakecuda/fake.h"

// The folder path is relative to the root of the repository, where make and the tests run.
static const char* const tiny = "tests/golden/tiny";

enum { NO_MACHINE = -2 };

static int judge_with(qlora_backend backend, qlora_mode mode, bool graph, int64_t tile,
                      int* figures) {
    char why[1024] = "";
    qlora_choice offload =
        tile > 0 && backend == QLORA_BACKEND_CUDA ? QLORA_CHOICE_ON : QLORA_CHOICE_AUTO;
    options opt = {backend, mode, graph, true, false, tile, offload};
    qlora_ctx* ctx = NULL;
    qlora_ctx_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.require_backend = backend;
    desc.threads = 1;
    desc.scratch_bytes = (size_t)4 << 20;
    desc.error_text = why;
    desc.error_text_size = sizeof why;
    if (qlora_ctx_create(&desc, &ctx) != QLORA_OK) {
        fprintf(stderr, "%s\n", why);
        return NO_MACHINE;
    }
    bool refused = false;
    int failures = run_fixture(ctx, &opt, tiny, figures, &refused);
    if (qlora_ctx_destroy(ctx) != QLORA_OK) {
        fprintf(stderr, "%s\n", qlora_last_error(ctx));
        return -1;
    }
    return failures;
}

static int judge(qlora_backend backend, qlora_mode mode, bool graph, int* figures) {
    return judge_with(backend, mode, graph, 0, figures);
}

// Logits and loss of the base; then twice 2 + 1 + 1 + 3 + adapter + text, and in f32 also
// generated text.
enum { FIGURES = 2 + 2 * 10, FIGURES_BF16 = 2 + 2 * 8 };

TEST golden_on_the_cpu(void) {
    int figures = 0;
    ASSERT_EQ_FMT(0, judge(QLORA_BACKEND_CPU, QLORA_MODE_F32, false, &figures), "%d");
    ASSERT_EQ_FMT((int)FIGURES, figures, "%d");
    PASS();
}

TEST golden_in_tiles(void) {
    int figures = 0;
    ASSERT_EQ_FMT(0, judge_with(QLORA_BACKEND_CPU, QLORA_MODE_F32, false, 16, &figures), "%d");
    ASSERT_EQ_FMT((int)FIGURES, figures, "%d");
    PASS();
}

// Some folders of training methods; make soak runs all of them.
TEST methods_on_the_cpu(void) {
    static const struct {
        const char* name;
        int figures;
    } folders[] = {{"kto", 36}, {"dora", 22}, {"trained-tokens", 22}};
    char path[512];
    const char* shared = getenv("QLORA_SHARED");
    const options opt = {QLORA_BACKEND_CPU, QLORA_MODE_F32, false, true, false, 0,
                         QLORA_CHOICE_AUTO};
    snprintf(path, sizeof path, "%s/methods/kto/golden.json",
             shared != NULL ? shared : "../shared");
    FILE* there = fopen(path, "rb");
    if (there == NULL) {
        SKIPm("no ../shared/methods");
    }
    fclose(there);
    qlora_ctx_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.require_backend = QLORA_BACKEND_CPU;
    qlora_ctx* ctx = NULL;
    ASSERT_EQ(QLORA_OK, qlora_ctx_create(&desc, &ctx));
    for (size_t i = 0; i < sizeof folders / sizeof folders[0]; i++) {
        int figures = 0;
        bool refused = false;
        snprintf(path, sizeof path, "%s/methods/%s", shared != NULL ? shared : "../shared",
                 folders[i].name);
        ASSERT_EQm(path, 0, run_fixture(ctx, &opt, path, &figures, &refused));
        ASSERT_EQ_FMT(folders[i].figures, figures, "%d");
    }
    ASSERT_EQ(QLORA_OK, qlora_ctx_destroy(ctx));
    PASS();
}

// The real GPU or the fake one: a process loads only one of them.
TEST golden_on_a_gpu(const char* name) {
    bool bf16 = strcmp(name, "bf16") == 0;
    int figures = 0;
    const fake_api* fake = fake_open();
    if (fake != NULL) {
        fake->reset(NULL);
    }
    qlora_mode mode = bf16 ? QLORA_MODE_BF16 : QLORA_MODE_F32;
    int failures = judge(QLORA_BACKEND_CUDA, mode, true, &figures);
    if (failures == NO_MACHINE && fake == NULL) {
        SKIPm("no GPU");
    }
    ASSERT_EQ_FMT(0, failures, "%d");
    ASSERT_EQ_FMT(bf16 ? (int)FIGURES_BF16 : (int)FIGURES, figures, "%d");
    if (fake != NULL) {
        const char* wrong = fake->done();
        ASSERTm(wrong, wrong == NULL);
    }
    PASS();
}

// ---- stories260K

static const char* model_shared_path(const char* name, char out[512]) {
    const char* folder = getenv("QLORA_SHARED");
    snprintf(out, 512, "%s/%s", folder != NULL ? folder : "../shared", name);
    return out;
}

static bool is_there(const char* path) {
    FILE* f = fopen(path, "rb");
    if (f != NULL) {
        fclose(f);
    }
    return f != NULL;
}

enum { STORIES = 5, STORY_TOKENS = 4096 };

typedef struct stories {
    int32_t ids[STORY_TOKENS];
    int32_t lengths[STORIES];
    int32_t longest;
    qlora_batch batch;
} stories;

static bool space(char c) {
    return c == '\n' || c == ' ' || c == '\r';
}

// Splits at the separator and trims spaces; BOS and the leading space are added by the tokenizer.
static bool stories_read(stories* out) {
    static const char separator[] = "<|endoftext|>";
    char path[512];
    static char text[1 << 20];
    qlora_text* lib = NULL;
    qlora_text_tok* tok = NULL;
    memset(out, 0, sizeof *out);
    FILE* file = fopen(model_shared_path("data/tinystories-sample.txt", path), "rb");
    size_t size = file != NULL ? fread(text, 1, sizeof text - 1, file) : 0;
    if (file != NULL) {
        fclose(file);
    }
    text[size] = 0;
    model_shared_path("models/stories260K/tok512.bin", path);
    bool ok = size > 0 && qlora_text_create(NULL, &lib) == QLORA_OK &&
              qlora_text_tok_open(lib, path, &tok) == QLORA_OK;
    const char* at = text;
    const char* limit = text + size;
    int32_t tokens = 0;
    for (int i = 0; i < STORIES && ok; i++) {
        const char* end = strstr(at, separator);
        const char* next = end != NULL ? end + strlen(separator) : limit;
        end = end != NULL ? end : limit;
        while (at < end && space(*at)) {
            at++;
        }
        while (end > at && space(end[-1])) {
            end--;
        }
        qlora_text_ids ids = {NULL, 0, 0};
        ok = qlora_text_encode(tok, at, (size_t)(end - at), QLORA_TEXT_SPECIAL, &ids) == QLORA_OK &&
             ids.count > 1 && tokens + (int32_t)ids.count <= STORY_TOKENS;
        if (ok) {
            memcpy(out->ids + tokens, ids.data, ids.count * sizeof ids.data[0]);
            out->lengths[i] = (int32_t)ids.count;
            out->longest = out->lengths[i] > out->longest ? out->lengths[i] : out->longest;
            tokens += out->lengths[i];
        }
        qlora_text_ids_free(lib, &ids);
        at = next;
    }
    ok = qlora_text_tok_close(tok) == QLORA_OK && qlora_text_destroy(lib) == QLORA_OK && ok;
    out->batch.ids = out->ids;
    out->batch.labels = out->ids;
    out->batch.lengths = out->lengths;
    out->batch.count = STORIES;
    return ok;
}

static qlora_ctx* plain_cpu(void) {
    qlora_ctx* ctx = NULL;
    qlora_ctx_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.require_backend = QLORA_BACKEND_CPU;
    desc.threads = 2;
    return qlora_ctx_create(&desc, &ctx) == QLORA_OK ? ctx : NULL;
}

static double stories_loss(qlora_ctx* ctx, const char* folder, qlora_base_format base,
                           const stories* text) {
    char path[512];
    qlora_model* model = NULL;
    qlora_model_desc desc;
    qlora_eval_info info;
    memset(&info, 0, sizeof info);
    memset(&desc, 0, sizeof desc);
    desc.dir = model_shared_path(folder, path);
    desc.base = base;
    desc.rank = -1;
    desc.tokens = STORY_TOKENS;
    desc.purpose = QLORA_PURPOSE_EVALUATE;
    bool ok = qlora_model_open(ctx, &desc, &model) == QLORA_OK &&
              qlora_eval(model, &text->batch, &info) == QLORA_OK;
    if (!ok) {
        fprintf(stderr, "%s\n", qlora_last_error(ctx));
    }
    ok = qlora_model_close(model) == QLORA_OK && ok;
    return ok ? info.loss / info.labels : (double)NAN;
}

TEST stories_have_their_losses(void) {
    char path[512];
    stories text;
    if (!is_there(model_shared_path("models/stories260K/tok512.bin", path))) {
        SKIPm("../shared not found (set QLORA_SHARED)");
    }
    ASSERT(stories_read(&text));
    qlora_ctx* ctx = plain_cpu();
    ASSERT(ctx != NULL);
    double dense = stories_loss(ctx, "models/stories260K", QLORA_BASE_16BIT, &text);
    // The folder is in f32; rounded to bf16 first, it gives bitsandbytes' own codes.
    double nf4 = stories_loss(ctx, "models/stories260K", QLORA_BASE_NF4, &text);
    double bnb = stories_loss(ctx, "models/stories260K-bnb-nf4", QLORA_BASE_NF4, &text);
    ASSERT_IN_RANGE(1.266, dense, 0.001);
    ASSERT_IN_RANGE(1.371, nf4, 0.002);
    ASSERT_IN_RANGE(1.371, bnb, 0.002);
    ASSERT_EQ(QLORA_OK, qlora_ctx_destroy(ctx));
    PASS();
}

// ---- the float64 trajectory

enum { TRAJECTORY_STEPS = 20, TRAJECTORY_BATCH = 4, TRAJECTORY_LENGTH = 65 };

typedef struct trajectory {
    qlora__map map;
    qlora__json json;
    int32_t ids[TRAJECTORY_STEPS * TRAJECTORY_BATCH * TRAJECTORY_LENGTH];
} trajectory;

static double trajectory_number(const trajectory* t, const char* name, uint32_t index) {
    double value = (double)NAN;
    uint32_t list = qlora__json_find_path(&t->json, 0, name);
    uint32_t token = qlora__json_at(&t->json, list, index);
    return token != 0 && qlora__json_double(&t->json, token, &value) ? value : (double)NAN;
}

static bool trajectory_open(qlora_ctx* ctx, trajectory* t) {
    char path[512];
    memset(t, 0, sizeof *t);
    model_shared_path("fixtures/stories260K-shakespeare/trajectory.json", path);
    if (qlora__map_open(&ctx->env, path, &t->map) != QLORA_OK ||
        qlora__json_parse(&ctx->env, path, t->map.data, (size_t)t->map.size, 0, &t->json) !=
            QLORA_OK) {
        return false;
    }
    uint32_t rows = qlora__json_find_path(&t->json, 0, "tokens");
    for (uint32_t i = 0; i < TRAJECTORY_STEPS * TRAJECTORY_BATCH; i++) {
        uint32_t row = qlora__json_at(&t->json, rows, i);
        for (uint32_t j = 0; j < TRAJECTORY_LENGTH; j++) {
            int64_t id = -1;
            qlora__json_int(&t->json, qlora__json_at(&t->json, row, j), &id);
            t->ids[i * TRAJECTORY_LENGTH + j] = (int32_t)id;
        }
    }
    return true;
}

// Worst relative 2-norm of parameters or gradients against a file of the trajectory. With `write`,
// copies the file's values into the model instead.
static double trajectory_compare(golden_session* s, const char* file, bool gradients, bool write) {
    char path[512];
    char name[128];
    qlora_ctx* ctx = model_ctx(s->model);
    qlora__st st;
    double worst = 0.0;
    snprintf(name, sizeof name, "fixtures/stories260K-shakespeare/%s.safetensors", file);
    if (qlora__st_open(&ctx->env, model_shared_path(name, path), &st) != QLORA_OK) {
        return (double)NAN;
    }
    for (int64_t i = 0; i < model_parameters(s->model); i++) {
        qlora_parameter_info p;
        float got[8 * 512];
        float want[8 * 512];
        qlora_result r = qlora_parameter_query(s->model, i, &p);
        const qlora__st_tensor* t = r == QLORA_OK ? qlora__st_find(&st, p.name) : NULL;
        size_t n = t != NULL ? (size_t)qlora__st_elements(t) : 0;
        if (n == 0 || n != (size_t)(p.rows * p.cols) || n > sizeof got / sizeof got[0]) {
            fprintf(stderr, "%s does not have the expected form in %s\n", p.name, file);
            return (double)NAN;
        }
        qlora__st_read_f32(t, 0, n, want);
        r = write       ? qlora_parameter_write(s->model, i, want)
            : gradients ? qlora_gradient_read(s->trainer, i, got)
                        : qlora_parameter_read(s->model, i, got);
        double error = r != QLORA_OK ? (double)NAN : write ? 0.0 : tensor_error(got, want, n, 1e-5);
        worst = error <= worst ? worst : error;
    }
    qlora__st_close(&ctx->env, &st);
    return worst;
}

static bool trajectory_session(qlora_ctx* ctx, golden_session* s) {
    char path[512];
    qlora_model_desc desc;
    qlora_train_desc train;
    memset(s, 0, sizeof *s);
    memset(&desc, 0, sizeof desc);
    memset(&train, 0, sizeof train);
    desc.dir = model_shared_path("models/stories260K-bnb-nf4", path);
    desc.mode = QLORA_MODE_F32;
    desc.rank = 8;
    desc.alpha = 16.0f;
    desc.tokens = TRAJECTORY_BATCH * TRAJECTORY_LENGTH;
    train.lr = 1e-3;
    train.weight_decay = 0.01;
    train.max_norm = 1.0;
    train.schedule = QLORA_SCHEDULE_CONSTANT;
    return qlora_model_open(ctx, &desc, &s->model) == QLORA_OK &&
           qlora_trainer_create(s->model, &train, &s->trainer) == QLORA_OK;
}

TEST trajectory_of_shakespeare(void) {
    static trajectory t; // its tokens are too large for the stack
    static const int32_t lengths[] = {65, 65, 65, 65};
    char path[512];
    golden_session s;
    if (!is_there(model_shared_path("fixtures/stories260K-shakespeare/trajectory.json", path))) {
        SKIPm("../shared not found (set QLORA_SHARED)");
    }
    qlora_ctx* ctx = plain_cpu();
    ASSERT(ctx != NULL);
    ASSERTm(qlora_last_error(ctx), trajectory_open(ctx, &t));
    ASSERTm(qlora_last_error(ctx), trajectory_session(ctx, &s));
    ASSERT(trajectory_compare(&s, "lora_init", false, true) <= 0.0);
    for (int step = 0; step < TRAJECTORY_STEPS; step++) {
        qlora_batch b;
        qlora_train_info info;
        memset(&b, 0, sizeof b);
        b.ids = t.ids + step * TRAJECTORY_BATCH * TRAJECTORY_LENGTH;
        b.labels = b.ids;
        b.lengths = lengths;
        b.count = TRAJECTORY_BATCH;
        ASSERT_EQ(QLORA_OK, qlora_train_micro(s.trainer, &b, qlora_batch_labels(&b)));
        if (step < 2) {
            double worst = trajectory_compare(&s, step == 0 ? "lora_grad_step0" : "lora_grad_step1",
                                              true, false);
            ASSERT_IN_RANGE(0.0, worst, 5e-5);
        }
        ASSERT_EQ(QLORA_OK, qlora_train_update(s.trainer));
        ASSERT_EQ(QLORA_OK, qlora_train_query(s.trainer, &info));
        double loss = trajectory_number(&t, "loss", (uint32_t)step);
        double norm = trajectory_number(&t, "grad_norm_before_clip", (uint32_t)step);
        ASSERT_IN_RANGE(loss, info.loss, 1e-6 * loss + 1e-6);
        ASSERT_IN_RANGE(norm, (double)info.grad_norm, 1e-5 * norm);
    }
    ASSERT_IN_RANGE(0.0, trajectory_compare(&s, "lora_final_step20", false, false), 5e-4);
    golden_close(&s);
    qlora__json_free(&ctx->env, &t.json);
    qlora__map_close(&ctx->env, &t.map);
    ASSERT_EQ(QLORA_OK, qlora_ctx_destroy(ctx));
    PASS();
}

// ---- the rotation

// A small Phi 3 with longrope factors for texts of more than 8 tokens.
static void rotation_config(qlora_model_config* c) {
    memset(c, 0, sizeof *c);
    c->family = QLORA_FAMILY_PHI3;
    c->vocab = 16;
    c->hidden = 16;
    c->intermediate = 16;
    c->layers = 2;
    c->heads = 2;
    c->max_positions = 64;
    c->rms_eps = 1e-5;
    c->rope.type = QLORA_ROPE_LONGROPE;
    c->rope.theta = 1e4;
    c->rope.factor = 8.0;
    c->rope.original_max_position = 8.0;
    for (int i = 0; i < 4; i++) {
        c->rope.short_factor[i] = 1.0f;
        c->rope.long_factor[i] = 2.0f;
    }
}

static qlora_result rotation_open(qlora_ctx* ctx, const qlora_model_config* c, int64_t length,
                                  int64_t generated, qlora_model** out) {
    qlora_model_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.config = c;
    desc.mode = QLORA_MODE_F32;
    desc.base = QLORA_BASE_32BIT;
    desc.rank = -1;
    desc.purpose = QLORA_PURPOSE_EVALUATE;
    desc.tokens = length;
    desc.max_length = length;
    desc.generate_tokens = generated;
    return qlora_model_open(ctx, &desc, out);
}

// The row of a text's position in the table is the one that qlora_rope_table has for its length.
static bool rotation_row(const qlora_model* m, int64_t tokens, int64_t position) {
    qlora_rope_desc rope = m->plan.config.rope;
    float want[16 * 8];
    rope.use_long = (double)tokens > rope.original_max_position;
    int64_t row = qlora__angle_row(m, position, qlora__is_long(m, tokens));
    return qlora_rope_table(NULL, &rope, 8, m->positions, want) == QLORA_OK &&
           row < m->base.rope.rows &&
           memcmp((const float*)m->base.rope.data + row * 8, want + position * 8,
                  8 * sizeof *want) == 0;
}

// A table has both sets of factors if there can be texts of both kinds. Row p is right for the last
// token of a text of p + 1 tokens, whatever its length: the device needs no other.
TEST longrope_has_rows_for_both(void) {
    static const struct {
        int64_t length;
        int64_t generated;
        double original;
        int64_t rows;
    } rows[] = {{8, 0, 8.0, 8},       {9, 0, 8.0, 9 + 8},    {4, 8, 8.0, 8},
                {4, 9, 8.0, 9 + 8},   {12, 4, 8.0, 12 + 8},  {12, 4, 3.5, 12 + 3},
                {12, 4, 0.5, 12 + 0}, {12, 4, 1e300, 12}};
    qlora_model_config c;
    qlora_model* m = NULL;
    qlora_ctx* ctx = plain_cpu();
    ASSERT(ctx != NULL);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        rotation_config(&c);
        c.rope.original_max_position = rows[i].original;
        c.rope.use_long = i % 2 == 0; // is ignored
        ASSERT_EQm(qlora_last_error(ctx), QLORA_OK,
                   rotation_open(ctx, &c, rows[i].length, rows[i].generated, &m));
        ASSERT_EQ_FMT((int)rows[i].rows, (int)m->base.rope.rows, "%d");
        ASSERT(m->base.rope.data == m->base.rope_sliding.data);
        for (int64_t tokens = 1; tokens <= m->positions; tokens++) {
            for (int64_t p = 0; p < tokens; p++) {
                ASSERT(rotation_row(m, tokens, p));
            }
            ASSERT_EQ_FMT((int)tokens - 1,
                          (int)qlora__angle_row(m, tokens - 1, qlora__is_long(m, tokens)), "%d");
        }
        ASSERT_EQ(QLORA_OK, qlora_model_close(m));
    }
    memcpy(c.rope.long_factor, c.rope.short_factor, sizeof c.rope.long_factor);
    c.rope.original_max_position = 8.0;
    ASSERT_EQ(QLORA_OK, rotation_open(ctx, &c, 12, 0, &m));
    ASSERT_EQ(12, (int)m->base.rope.rows); // equal factors leave nothing to choose
    ASSERT_EQ(QLORA_OK, qlora_model_close(m));
    ASSERT_EQ(QLORA_OK, qlora_ctx_destroy(ctx));
    PASS();
}

// One number of tokens decides for all layers.
TEST longrope_has_one_limit(void) {
    qlora_model_config c;
    qlora_model* m = NULL;
    qlora_ctx* ctx = plain_cpu();
    ASSERT(ctx != NULL);
    rotation_config(&c);
    c.window = 4;
    c.sliding[1] = 1;
    c.rope_sliding = c.rope;
    c.rope_sliding.original_max_position = 6.0;
    ASSERT_EQ(QLORA_OK, rotation_open(ctx, &c, 6, 0, &m)); // no text is long
    ASSERT_EQ(QLORA_OK, qlora_model_close(m));
    ASSERT_EQ(QLORA_ERR_UNSUPPORTED, rotation_open(ctx, &c, 9, 0, &m));
    ASSERT(strstr(qlora_last_error(ctx), "texts of up to 8 tokens, config.rope_sliding in texts of "
                                         "up to 6"));
    c.rope_sliding.type = QLORA_ROPE_DEFAULT;
    ASSERT_EQ(QLORA_OK, rotation_open(ctx, &c, 9, 0, &m));
    ASSERT_EQ(9 + 8, (int)m->base.rope_sliding.rows);
    const float* angles = (const float*)m->base.rope_sliding.data; // the same for both kinds
    ASSERT_MEM_EQ(angles, angles + 9 * 8, 8 * 8 * sizeof *angles);
    ASSERT_EQ(QLORA_OK, qlora_model_close(m));
    ASSERT_EQ(QLORA_OK, qlora_ctx_destroy(ctx));
    PASS();
}

// There is one table for scaled queries.
TEST scaled_queries_need_one_rotation(void) {
    qlora_model_config c;
    qlora_model* m = NULL;
    qlora_ctx* ctx = plain_cpu();
    ASSERT(ctx != NULL);
    rotation_config(&c);
    c.family = QLORA_FAMILY_MINISTRAL3;
    c.rope.type = QLORA_ROPE_DEFAULT;
    c.query_beta = 0.1;
    c.query_period = 8.0;
    c.rope_sliding = c.rope;
    c.rope_sliding.theta = 2e4;
    ASSERT_EQ(QLORA_OK, rotation_open(ctx, &c, 8, 0, &m)); // no layer has a window
    ASSERT_EQ(QLORA_OK, qlora_model_close(m));
    c.window = 4;
    c.sliding[1] = 1;
    ASSERT_EQ(QLORA_ERR_UNSUPPORTED, rotation_open(ctx, &c, 8, 0, &m));
    ASSERT(strstr(qlora_last_error(ctx), "config.query_beta is 0.1"));
    c.rope_sliding = c.rope;
    ASSERT_EQ(QLORA_OK, rotation_open(ctx, &c, 8, 0, &m));
    ASSERT_EQ(QLORA_OK, qlora_model_close(m));
    ASSERT_EQ(QLORA_OK, qlora_ctx_destroy(ctx));
    PASS();
}

// A golden folder gets room for its sequences and its text, however long those are.
TEST golden_folders_have_their_room(void) {
    fixture f;
    qlora_model_desc desc;
    char text[1024] = "{\"greedy_prompt\": [3";
    qlora_ctx* ctx = plain_cpu();
    ASSERT(ctx != NULL);
    memset(&f, 0, sizeof f);
    memset(&desc, 0, sizeof desc);
    f.ctx = ctx;
    for (int i = 1; i < 70; i++) {
        strcat(text, ", 4");
    }
    strcat(text, "], \"greedy_ids_after_20_steps\": [5");
    for (int i = 1; i < 100; i++) {
        strcat(text, ", 6");
    }
    strcat(text, "]}");
    ASSERT_EQ(QLORA_OK,
              qlora__json_parse(&ctx->env, "golden.json", text, strlen(text), 0, &f.json));
    ASSERT(text_open(&f));
    ASSERT(f.prompt_count == 70 && f.text_count == 170);
    ASSERT(f.text[0] == 3 && f.text[69] == 4 && f.text[70] == 5 && f.text[169] == 6);
    f.batch = 2;
    f.seq = 48;
    golden_room(&f, &desc);
    ASSERT_EQ(170, (int)desc.generate_tokens);
    ASSERT_EQ(170, (int)desc.max_length);
    ASSERT(desc.tokens >= 170);
    f.seq = 200;
    golden_room(&f, &desc);
    ASSERT_EQ(170, (int)desc.generate_tokens);
    ASSERT_EQ(200, (int)desc.max_length);
    ASSERT_EQ(400, (int)desc.tokens);
    free(f.text);
    qlora__json_free(&ctx->env, &f.json);
    ASSERT_EQ(QLORA_OK, qlora_ctx_destroy(ctx));
    PASS();
}

SUITE(golden_suite) {
    static const char* const names[] = {"f32", "bf16"};
    if (test_wants("cpu")) {
        RUN_TEST(golden_on_the_cpu);
        RUN_TEST(golden_in_tiles);
        if (!test_brief()) { // long runs of what the test above does on small models
            RUN_TEST(stories_have_their_losses);
            RUN_TEST(trajectory_of_shakespeare);
            RUN_TEST(methods_on_the_cpu);
        }
        RUN_TEST(golden_folders_have_their_room);
        RUN_TEST(longrope_has_rows_for_both);
        RUN_TEST(longrope_has_one_limit);
        RUN_TEST(scaled_queries_need_one_rotation);
    }
    const char* kind = fake_open() != NULL ? "fake" : "cuda";
    for (int i = 0; i < 2 && test_wants(kind); i++) {
        greatest_set_test_suffix(names[i]);
        RUN_TESTp(golden_on_a_gpu, names[i]);
    }
}
