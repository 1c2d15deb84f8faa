// adapter.c - adapters, merged exports and checkpoints, on an in-memory file system that can fail
// at any operation and lose data in a power failure; if the shared folder is present (QLORA_SHARED,
// else ../shared), also on the files of PEFT and bitsandbytes.

#include "formats_world.h"
#include "machines.h"
#include "model_info.h"

#include <dirent.h>
#include <math.h>
#include <stdio.h>

SUITE_EXTERN(adapter_suite);

// ---- a world that contains a model folder ----

// Renames and removals reach the disk at once, or (late) only when their folder is synced: file
// systems may do either.
typedef struct late_change {
    char from[WORLD_NAME]; // "" = a removal
    char to[WORLD_NAME];
    unsigned char* data;
    size_t size;
} late_change;

typedef struct stage {
    world w;
    bool late;
    late_change changes[16];
    int change_count;
    qlora_ctx* ctx;
    char mapped[24][64]; // names of the files that were mapped, in order
    int mapped_count;
} stage;

static stage* stage_of(void* user) {
    return (stage*)user; // the world is its first member
}

static void stage_apply(stage* s) {
    for (int i = 0; i < s->change_count; i++) {
        late_change* c = &s->changes[i];
        if (!world_cut(&s->w)) {
            if (c->data != NULL) {
                world_set(s->w.disk, c->to, c->data, c->size);
            } else if (world_slot(s->w.disk, c->to) != NULL) {
                world_drop(world_slot(s->w.disk, c->to));
            }
        }
        free(c->data);
    }
    s->change_count = 0;
}

static void stage_change(stage* s, const char* to, const void* data, size_t size) {
    late_change* c = &s->changes[s->change_count++];
    memset(c, 0, sizeof *c);
    snprintf(c->to, sizeof c->to, "%s", to);
    if (data != NULL) {
        c->data = malloc(size + 1);
        memcpy(c->data, data, size);
        c->size = size;
    }
    if (!s->late || s->change_count == 16) {
        stage_apply(s);
    }
}

static int stage_rename(const char* from, const char* to, void* user) {
    stage* s = stage_of(user);
    world_file* f = world_slot(s->w.files, from);
    size_t synced = f != NULL ? f->synced : 0;
    unsigned char* bytes = malloc(synced + 1);
    if (f != NULL) {
        memcpy(bytes, f->data, synced);
    }
    long cut = s->w.cut_at;
    s->w.cut_at = 1; // a separate record of the disk's contents
    int code = world_rename(from, to, user);
    s->w.cut_at = cut;
    if (code == 0) {
        stage_change(s, to, bytes, synced);
    }
    free(bytes);
    return code;
}

static int stage_remove(const char* path, void* user) {
    stage* s = stage_of(user);
    int code = world_remove(path, user);
    if (code == 0) {
        stage_change(s, path, NULL, 0);
    }
    return code;
}

static int stage_sync_dir(const char* path, void* user) {
    int code = world_sync_dir(path, user);
    if (code == 0) {
        stage_apply(stage_of(user));
    }
    return code;
}

// Files that are not in the world belong to the operating system.
// How often a file of this name was mapped.
static int stage_mapped(const stage* s, const char* name) {
    int count = 0;
    for (int i = 0; i < s->mapped_count; i++) {
        count += strcmp(s->mapped[i], name) == 0 ? 1 : 0;
    }
    return count;
}

static int stage_map(const char* path, const void** data, uint64_t* bytes, void** handle,
                     void* user) {
    stage* noted = stage_of(user);
    if (noted->mapped_count < 24) {
        const char* slash = strrchr(path, '/');
        snprintf(noted->mapped[noted->mapped_count++], sizeof noted->mapped[0], "%s",
                 slash != NULL ? slash + 1 : path);
    }
    if (world_slot(stage_of(user)->w.files, path) == NULL && path[0] == '.') {
        return qlora__os_map(path, data, bytes, handle, NULL);
    }
    if (world_slot(stage_of(user)->w.files, path) == NULL && path[0] == '/') {
        return qlora__os_map(path, data, bytes, handle, NULL);
    }
    return world_map(path, data, bytes, handle, user);
}

static void stage_unmap(const void* data, uint64_t bytes, void* handle, void* user) {
    if (handle == NULL) {
        qlora__os_unmap(data, bytes, handle, NULL);
        return;
    }
    world_unmap(data, bytes, handle, user);
}

static int stage_open(const char* path, qlora_file_mode mode, void** file, void* user) {
    if (mode == QLORA_FILE_READ && (path[0] == '/' || path[0] == '.')) {
        int code = qlora__os_open(path, mode, file, NULL);
        if (code == 0) {
            qlora__os_close(*file, NULL);
            *file = NULL;
            stage_of(user)->w.handles++;
        }
        return code;
    }
    return world_open(path, mode, file, user);
}

static void* stage_alloc(size_t bytes, size_t align, void* user) {
    void* p = NULL;
    if (world_fails((world*)user) ||
        (p = test_alloc_aligned(bytes, align < 64 ? 64 : align)) == NULL) {
        return NULL;
    }
    ((world*)user)->blocks++;
    memset(p, 0xCB, bytes);
    return p;
}

static void stage_free(void* pointer, size_t bytes, void* user) {
    (void)bytes;
    ((world*)user)->blocks--;
    test_free_aligned(pointer);
}

static bool stage_begin(stage* s, const test_machine* machine) {
    bool is_cpu = machine == NULL || strcmp(machine->backend, "cpu") == 0;
    memset(s, 0, sizeof *s);
    world_begin(&s->w);
    if (!is_cpu && strcmp(machine->backend, "fake") == 0) {
        fake_config config = test_fake()->defaults();
        config.device[0].cc = machine->cc;
        config.driver_version = machine->driver;
        config.order = machine->order;
        config.seed = 7;
        test_fake()->reset(&config);
    }
    qlora_ctx_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.require_backend = is_cpu ? QLORA_BACKEND_CPU : QLORA_BACKEND_CUDA;
    desc.threads = 2;
    desc.scratch_bytes = (size_t)4 << 20;
    desc.cublas_library = is_cpu || machine->cublas ? NULL : "none";
    desc.allocator = s->w.env.allocator;
    desc.allocator.alloc = stage_alloc;
    desc.allocator.free = stage_free;
    desc.files = s->w.env.files;
    desc.files.open = stage_open;
    desc.files.rename = stage_rename;
    desc.files.remove = stage_remove;
    desc.files.sync_dir = stage_sync_dir;
    desc.files.map = stage_map;
    desc.files.unmap = stage_unmap;
    return qlora_ctx_create(&desc, &s->ctx) == QLORA_OK;
}

static bool stage_end(stage* s) {
    bool good = qlora_ctx_destroy(s->ctx) == QLORA_OK;
    for (int i = 0; i < s->change_count; i++) {
        free(s->changes[i].data);
    }
    return world_end(&s->w) && good;
}

static void files_copy(world_file* to, const world_file* from) {
    for (int i = 0; i < WORLD_FILES; i++) {
        world_drop(&to[i]);
    }
    for (int i = 0; i < WORLD_FILES; i++) {
        if (from[i].name[0] != '\0') {
            world_set(to, from[i].name, from[i].data, from[i].size);
        }
    }
}

static void files_drop(world_file* files) {
    for (int i = 0; i < WORLD_FILES; i++) {
        world_drop(&files[i]);
    }
}

// ---- tiny models ----

static const char adapter_config_text[] =
    "{\"architectures\":[\"LlamaForCausalLM\"],\"model_type\":\"llama\",\"vocab_size\":40,"
    "\"hidden_size\":16,\"intermediate_size\":24,\"num_hidden_layers\":2,\"num_attention_heads\":2,"
    "\"num_key_value_heads\":1,\"head_dim\":8,\"hidden_act\":\"silu\",\"rms_norm_eps\":1e-5,"
    "\"max_position_embeddings\":64,\"tie_word_embeddings\":false,\"rope_theta\":10000.0,"
    "\"torch_dtype\":\"float32\"}";

static const struct {
    const char* name;
    int64_t rows;
    int64_t cols; // 0: a vector
} layer_tensors[] = {
    {"input_layernorm.weight", 16, 0},   {"post_attention_layernorm.weight", 16, 0},
    {"self_attn.q_proj.weight", 16, 16}, {"self_attn.k_proj.weight", 8, 16},
    {"self_attn.v_proj.weight", 8, 16},  {"self_attn.o_proj.weight", 16, 16},
    {"mlp.gate_proj.weight", 24, 16},    {"mlp.up_proj.weight", 24, 16},
    {"mlp.down_proj.weight", 16, 24}};

typedef struct tensor_plan {
    char name[128];
    int64_t shape[2];
} tensor_plan;

// Writes random tensors to one file; norms are close to 1.
static bool write_tensors(qlora_ctx* ctx, const char* path, const tensor_plan* plans,
                          uint32_t count, float scale) {
    qlora__st_entry entries[64];
    qlora__st_writer w;
    test_random random = test_random_start(path);
    for (uint32_t i = 0; i < count; i++) {
        entries[i].name = plans[i].name;
        entries[i].shape = plans[i].shape;
        entries[i].dtype = QLORA__ST_F32;
        entries[i].rank = plans[i].shape[1] > 0 ? 2 : 1;
    }
    if (qlora__st_write_begin(&ctx->env, path, entries, count, NULL, false, &w) != QLORA_OK) {
        return false;
    }
    for (uint32_t i = 0; i < count; i++) {
        float values[8192];
        const tensor_plan* p = &plans[w.order[i]];
        size_t n = (size_t)(p->shape[0] * (p->shape[1] > 0 ? p->shape[1] : 1));
        test_random_fill(&random, values, n, scale);
        for (size_t j = 0; j < n && p->shape[1] == 0; j++) {
            values[j] = 1.0f + 0.1f * values[j];
        }
        if (qlora__st_write(&ctx->env, &w, values, n * 4) != QLORA_OK) {
            return false;
        }
    }
    return qlora__st_write_commit(&ctx->env, &w) == QLORA_OK;
}

static bool folder_make(stage* s, const char* dir) {
    tensor_plan plans[32];
    char path[WORLD_NAME];
    uint32_t count = 0;
    memset(plans, 0, sizeof plans);
    for (int l = 0; l < 2; l++) {
        for (size_t i = 0; i < sizeof layer_tensors / sizeof layer_tensors[0]; i++) {
            snprintf(plans[count].name, sizeof plans[count].name, "model.layers.%d.%s", l,
                     layer_tensors[i].name);
            plans[count].shape[0] = layer_tensors[i].rows;
            plans[count++].shape[1] = layer_tensors[i].cols;
        }
    }
    static const tensor_plan others[] = {{"model.norm.weight", {16, 0}},
                                         {"model.embed_tokens.weight", {40, 16}},
                                         {"lm_head.weight", {40, 16}}};
    for (int i = 0; i < 3; i++) {
        plans[count++] = others[i];
    }
    snprintf(path, sizeof path, "%s/config.json", dir);
    world_put(&s->w, path, adapter_config_text, sizeof adapter_config_text - 1);
    snprintf(path, sizeof path, "%s/generation_config.json", dir);
    world_put(&s->w, path, "{\"eos_token_id\":3}", 18);
    snprintf(path, sizeof path, "%s/model.safetensors", dir);
    return write_tensors(s->ctx, path, plans, count, 0.3f);
}

typedef struct session {
    qlora_model* model;
    qlora_trainer* trainer;
} session;

typedef struct opening {
    const char* dir;
    const char* adapter;
    qlora_base_format base;
    qlora_mode mode;
    int32_t rank; // 0 = 3
    bool rslora;
    bool norms;
    bool eager;
    float dropout;
    uint64_t seed;
    int32_t keep;
    int64_t tokens; // 0 = 32
    qlora_choice recompute;
    uint32_t targets;
    qlora_optimizer optimizer;
    double neftune;
    const char* scale;
} opening;

static bool session_open(stage* s, const opening* o, session* out) {
    qlora_model_desc desc;
    qlora_train_desc train;
    memset(&desc, 0, sizeof desc);
    memset(&train, 0, sizeof train);
    memset(out, 0, sizeof *out);
    desc.dir = o->dir;
    desc.adapter = o->adapter;
    desc.rope_scale = o->scale;
    desc.base = o->base;
    desc.mode = o->mode != QLORA_MODE_AUTO ? o->mode : QLORA_MODE_F32;
    desc.rank = o->rank != 0 ? o->rank : 3;
    desc.alpha = 5.0f;
    desc.rslora = o->rslora;
    desc.train_norms = o->norms;
    desc.dropout = o->dropout;
    desc.seed = 11;
    desc.targets = o->targets;
    desc.tokens = o->tokens != 0 ? o->tokens : 32;
    desc.max_sequences = 4;
    train.lr = 0.01;
    train.warmup_steps = 2;
    train.total_steps = 20;
    train.weight_decay = 0.01;
    train.seed = o->seed;
    train.eager = o->eager;
    train.require_graph = !o->eager && qlora_ctx_backend(s->ctx) == QLORA_BACKEND_CUDA;
    train.keep_checkpoints = o->keep;
    desc.recompute = o->recompute;
    desc.optimizer = o->optimizer;
    train.neftune = o->neftune;
    if (qlora_model_open(s->ctx, &desc, &out->model) != QLORA_OK ||
        qlora_trainer_create(out->model, &train, &out->trainer) != QLORA_OK) {
        printf("\n%s\n", qlora_last_error(s->ctx));
        return false;
    }
    return true;
}

static bool session_close(session* s) {
    return qlora_trainer_destroy(s->trainer) == QLORA_OK && qlora_model_close(s->model) == QLORA_OK;
}

static qlora_batch batch_of(int64_t number, int32_t* ids, int32_t* lengths) {
    test_random random = test_random_start("batch");
    random.state ^= (uint64_t)(number + 1) * 0x9E3779B97F4A7C15u;
    qlora_batch b;
    memset(&b, 0, sizeof b);
    lengths[0] = 7 + (int32_t)test_random_below(&random, 3);
    lengths[1] = 6;
    for (int i = 0; i < 16; i++) {
        ids[i] = (int32_t)test_random_below(&random, 40);
    }
    b.ids = ids;
    b.labels = ids;
    b.lengths = lengths;
    b.count = 2;
    return b;
}

#define SKIPPED_STEP 1

// Runs steps first .. first + count, two micro-batches each. In one of them, the gradients are
// not finite.
static bool train_steps(session* s, int64_t first, int64_t count) {
    for (int64_t step = first; step < first + count; step++) {
        int32_t ids[2][16];
        int32_t lengths[2][2];
        qlora_batch batches[2];
        for (int i = 0; i < 2; i++) {
            batches[i] = batch_of(2 * step + i, ids[i], lengths[i]);
        }
        double labels = qlora_batch_labels(&batches[0]) + qlora_batch_labels(&batches[1]);
        labels = step == SKIPPED_STEP ? 1e-45 : labels; // 1 / labels is infinite
        if (qlora_train_micro(s->trainer, &batches[0], labels) != QLORA_OK ||
            qlora_train_micro(s->trainer, &batches[1], labels) != QLORA_OK ||
            qlora_train_update(s->trainer) != QLORA_OK) {
            printf("\n%s\n", qlora_last_error(model_ctx(s->model)));
            return false;
        }
    }
    return true;
}

// A hash of everything that determines later steps: parameters, moments, counters, the last
// step's metrics.
static uint64_t fingerprint(session* s) {
    qlora_model* m = s->model;
    qlora__hash hash;
    qlora__hash_begin(&hash);
    size_t bytes = (size_t)m->elements * 4;
    float* values = (float*)malloc(bytes);
    const qlora_tensor* arenas[] = {&m->parameters, &m->moment1, &m->moment2};
    qlora__trained t;
    bool coded = m->moments.data != NULL;
    if (coded) {
        char* image = (char*)malloc(m->moments.bytes);
        if (qlora_tensor_read(m->ctx, &m->moments, image, m->moments.bytes) != QLORA_OK) {
            abort();
        }
        qlora__hash_add(&hash, image, m->moments.bytes);
        free(image);
    }
    for (int a = 0; a < (coded ? 1 : 3); a++) {
        if (qlora__enter(m->ctx, "fingerprint") != QLORA_OK ||
            qlora__leave(m->ctx, qlora__floats_out(m->ctx, arenas[a]->data, m->elements, values)) !=
                QLORA_OK) {
            abort();
        }
        for (int64_t i = 0; qlora__trained_at(m, i, &t); i++) {
            qlora__hash_add(&hash, values + t.at, (size_t)(t.rows * t.cols) * 4);
        }
    }
    free(values);
    qlora_train_info info;
    memset(&info, 0, sizeof info);
    if (qlora_train_query(s->trainer, &info) != QLORA_OK) {
        abort();
    }
    const qlora__record* last = &s->trainer->records[qlora__record_of(s->trainer->step)];
    double figures[] = {(double)info.step, (double)info.skipped,       info.loss,
                        info.labels,       (double)info.tokens,        (double)info.grad_norm,
                        info.lr,           (double)last->adamw.updates};
    qlora__hash_add(&hash, figures, sizeof figures);
    return qlora__hash_end(&hash);
}

// The adapter as PEFT's folder, with a name of the base.
static qlora_result save_named(qlora_model* model, const char* dir, const char* base_name) {
    qlora_adapter_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.base_name = base_name;
    return qlora_adapter_save(model, dir, &desc);
}

static qlora_result merge_save(qlora_model* model, const char* dir, qlora_dtype dtype,
                               qlora_merge_base base, uint64_t shard_bytes,
                               qlora_progress_fn progress, void* user) {
    qlora_merge_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.dir = dir;
    desc.dtype = dtype;
    desc.base = base;
    desc.shard_bytes = shard_bytes;
    desc.progress = progress;
    desc.progress_user = user;
    return qlora_merge_save(model, &desc);
}

// Random values in every trained tensor; norms stay near 1.
static bool scramble(session* s, const char* name) {
    test_random random = test_random_start(name);
    for (int64_t i = 0; i < model_parameters(s->model); i++) {
        qlora_parameter_info p;
        float values[1024];
        if (qlora_parameter_query(s->model, i, &p) != QLORA_OK) {
            return false;
        }
        test_random_fill(&random, values, (size_t)(p.rows * p.cols), 0.3f);
        for (int64_t j = 0; j < p.cols && strstr(p.name, "norm") != NULL; j++) {
            values[j] = 1.0f + 0.3f * values[j];
        }
        if (qlora_parameter_write(s->model, i, values) != QLORA_OK) {
            return false;
        }
    }
    return true;
}

#define LOGITS (13 * 40)
static bool logits_of(session* s, float* out) {
    int32_t ids[16];
    int32_t lengths[2];
    qlora_batch b = batch_of(3, ids, lengths);
    lengths[0] = 7;
    return qlora_eval_logits(s->model, &b, out) == QLORA_OK;
}

static bool has_file(const stage* s, const char* name) {
    for (int i = 0; i < WORLD_FILES; i++) {
        if (strcmp(s->w.files[i].name, name) == 0) {
            return true;
        }
    }
    return false;
}

static int count_files(const stage* s, const char* prefix) {
    int count = 0;
    for (int i = 0; i < WORLD_FILES; i++) {
        count += strncmp(s->w.files[i].name, prefix, strlen(prefix)) == 0 ? 1 : 0;
    }
    return count;
}

// ---- PEFT folders ----

TEST saved_adapters_come_back(const test_machine* machine) {
    static stage s;
    if (!stage_begin(&s, machine)) {
        SKIPm("no such machine");
    }
    ASSERT(folder_make(&s, "m"));
    opening o = {0};
    o.dir = "m";
    o.base = QLORA_BASE_NF4;
    o.rslora = true;
    o.norms = true;
    session a;
    session b;
    ASSERT(session_open(&s, &o, &a));
    ASSERT(scramble(&a, "saved"));
    uint64_t want = fingerprint(&a);
    ASSERT_EQ(QLORA_OK, save_named(a.model, "out", "some/base"));
    float want_logits[LOGITS];
    float got_logits[LOGITS];
    ASSERT(logits_of(&a, want_logits));
    ASSERT(session_close(&a));
    ASSERT(session_open(&s, &o, &b));
    ASSERT(fingerprint(&b) != want);
    ASSERT_EQ(QLORA_OK, qlora_adapter_load(b.model, "out", NULL));
    ASSERT_EQ(want, fingerprint(&b));
    ASSERT(logits_of(&b, got_logits));
    ASSERT_MEM_EQ(want_logits, got_logits, sizeof want_logits);
    ASSERT(session_close(&b));
    o.adapter = "out"; // ranks and scales from the folder
    o.rank = 7;
    ASSERT(session_open(&s, &o, &b));
    ASSERT_EQ(want, fingerprint(&b));
    ASSERT(session_close(&b));
    o.adapter = NULL;
    ASSERT(session_open(&s, &o, &b)); // a different rank: rejected, nothing changed
    uint64_t before = fingerprint(&b);
    ASSERT_EQ(QLORA_ERR_FORMAT, qlora_adapter_load(b.model, "out", NULL));
    ASSERT(strstr(qlora_last_error(s.ctx), "rank") != NULL);
    ASSERT_EQ(before, fingerprint(&b));
    ASSERT_EQ(QLORA_ERR_FILE, qlora_adapter_load(b.model, "nowhere", NULL));
    ASSERT(session_close(&b));
    o.rank = 3;
    o.targets = QLORA_TARGET_Q | QLORA_TARGET_V; // the folder has more than the model
    ASSERT(session_open(&s, &o, &b));
    ASSERT_EQ(QLORA_ERR_FORMAT, qlora_adapter_load(b.model, "out", NULL));
    ASSERT(session_close(&b));
    ASSERT(stage_end(&s));
    PASS();
}

static qlora_result adapter_alone(stage* s, const char* dir, const char* adapter, bool norms,
                                  qlora_model** out) {
    qlora_model_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.dir = dir;
    desc.adapter = adapter;
    desc.mode = QLORA_MODE_F32;
    desc.train_norms = norms;
    desc.purpose = QLORA_PURPOSE_ADAPTER;
    return qlora_model_open(s->ctx, &desc, out);
}

// PEFT's folder "some" with one kind of norms.
static bool some_norms_make(stage* s) {
    static const char config[] =
        "{\"peft_type\":\"LORA\",\"r\":2,\"target_modules\":[\"q_proj\"],"
        "\"modules_to_save\":[\"input_layernorm\"]}";
    static const char* const ends[] = {"self_attn.q_proj.lora_A", "self_attn.q_proj.lora_B",
                                       "input_layernorm"};
    tensor_plan plans[6];
    memset(plans, 0, sizeof plans);
    for (int i = 0; i < 6; i++) {
        snprintf(plans[i].name, sizeof plans[i].name, "base_model.model.model.layers.%d.%s.weight",
                 i / 3, ends[i % 3]);
        plans[i].shape[0] = i % 3 == 0 ? 2 : 16;
        plans[i].shape[1] = i % 3 == 0 ? 16 : i % 3 == 1 ? 2 : 0;
    }
    world_put(&s->w, "some/adapter_config.json", config, sizeof config - 1);
    return write_tensors(s->ctx, "some/adapter_model.safetensors", plans, 6, 0.4f);
}

// PEFT's file alone has the norms: what the base stores, under PEFT's names, in modules_to_save.
TEST norms_are_in_the_peft_file(void) {
    static stage s;
    opening o = {0};
    session a;
    float want[LOGITS];
    float got[LOGITS];
    static qlora__st file;
    ASSERT(stage_begin(&s, NULL));
    ASSERT(folder_make(&s, "m"));
    o.dir = "m";
    o.norms = true;
    ASSERT(session_open(&s, &o, &a));
    ASSERT(scramble(&a, "norms"));
    uint64_t print = fingerprint(&a);
    ASSERT(logits_of(&a, want));
    ASSERT_EQ(QLORA_OK, qlora_adapter_save(a.model, "out", NULL));
    ASSERT_EQ(QLORA_OK, qlora_adapter_save(a.model, "both", NULL));
    ASSERT(session_close(&a));
    ASSERT_EQ(QLORA_OK, qlora__st_open(&s.ctx->env, "out/adapter_model.safetensors", &file));
    const qlora__st_tensor* t =
        qlora__st_find(&file, "base_model.model.model.layers.1.input_layernorm.weight");
    ASSERT(t != NULL && t->rank == 1 && t->shape[0] == 16);
    ASSERT(qlora__st_find(&file, "base_model.model.model.norm.weight") != NULL);
    qlora__st_close(&s.ctx->env, &file);
    world_drop(world_slot(s.w.files, "out/trained_norms.safetensors"));
    o.adapter = "out";
    o.norms = false; // the folder decides
    ASSERT(session_open(&s, &o, &a));
    ASSERT_EQ(print, fingerprint(&a));
    ASSERT(logits_of(&a, got));
    ASSERT_MEM_EQ(want, got, sizeof want);
    // A file beside it with other values is not ignored, nor does it win.
    ASSERT(scramble(&a, "others"));
    ASSERT_EQ(QLORA_OK, qlora_adapter_save(a.model, "others", NULL));
    ASSERT(session_close(&a));
    const world_file* others = world_slot(s.w.files, "others/trained_norms.safetensors");
    world_put(&s.w, "both/trained_norms.safetensors", others->data, others->size);
    o.adapter = "both";
    ASSERT_FALSE(session_open(&s, &o, &a));
    ASSERT(strstr(qlora_last_error(s.ctx), "is not that of trained_norms.safetensors") != NULL);
    // A model without norms takes no such adapter; some of the norms are enough unless it trains.
    o.adapter = NULL;
    ASSERT(session_open(&s, &o, &a));
    ASSERT_EQ(QLORA_ERR_FORMAT, qlora_adapter_load(a.model, "out", NULL));
    ASSERT(strstr(qlora_last_error(s.ctx), "modules_to_save") != NULL);
    ASSERT(session_close(&a));
    ASSERT(some_norms_make(&s));
    o.adapter = "some";
    ASSERT_FALSE(session_open(&s, &o, &a));
    ASSERT(strstr(qlora_last_error(s.ctx), "but not model.layers.0.post_att") != NULL);
    qlora_model* alone = NULL;
    ASSERT_EQ(QLORA_OK, adapter_alone(&s, "m", "some", false, &alone));
    ASSERT_EQ(QLORA_OK, qlora_model_close(alone));
    ASSERT(stage_end(&s));
    PASS();
}

// The format of the base is kept with the adapter, and compared where it is used.
TEST adapters_know_their_base(void) {
    static const struct {
        qlora_base_format trained;
        qlora_base_format used;
        const char* base;
        const char* other;
    } rows[] = {{QLORA_BASE_32BIT, QLORA_BASE_NF4, "nf4", "32bit"},
                {QLORA_BASE_NF4, QLORA_BASE_32BIT, "32bit", "nf4"},
                {QLORA_BASE_NF4, QLORA_BASE_FP8, "fp8", "nf4"},
                {QLORA_BASE_16BIT, QLORA_BASE_32BIT, "32bit", "16bit"}, // of f32 files
                {QLORA_BASE_FP8, QLORA_BASE_FP8, "fp8", ""}};
    static stage s;
    ASSERT(stage_begin(&s, NULL));
    ASSERT(folder_make(&s, "m"));
    ASSERT_STR_EQ("unknown", qlora_base_format_name((qlora_base_format)-1));
    ASSERT_STR_EQ("unknown", qlora_base_format_name((qlora_base_format)(QLORA_BASE_FP8 + 1)));
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        opening o = {0};
        session a;
        qlora_model_info info;
        ASSERT_STR_EQ(rows[i].base, qlora_base_format_name(rows[i].used));
        o.dir = "m";
        o.base = rows[i].trained;
        ASSERT(session_open(&s, &o, &a));
        ASSERT_EQ(QLORA_OK, qlora_adapter_save(a.model, "ad", NULL));
        ASSERT_EQ(QLORA_OK, qlora_model_query(a.model, &info));
        ASSERT_STR_EQ("", info.trained_base);
        ASSERT(session_close(&a));
        o.base = rows[i].used;
        o.adapter = "ad";
        ASSERT(session_open(&s, &o, &a));
        ASSERT_EQ(QLORA_OK, qlora_model_query(a.model, &info));
        ASSERT_STR_EQ(rows[i].base, info.base);
        ASSERT_STR_EQ(rows[i].other, info.trained_base);
        ASSERT(session_close(&a));
        qlora_model* alone = NULL;
        ASSERT_EQ(QLORA_OK, adapter_alone(&s, "m", "ad", false, &alone));
        ASSERT_EQ(QLORA_OK, qlora_model_query(alone, &info));
        ASSERT_STR_EQ("", info.base);
        ASSERT(info.trained_base[0] != '\0');
        ASSERT_EQ(QLORA_OK, qlora_model_close(alone));
    }
    ASSERT(stage_end(&s));
    PASS();
}

// An adapter with patterns, a subset of layers and uneven ranks.
static const char pattern_config[] =
    "{\"peft_type\":\"LORA\",\"r\":4,\"lora_alpha\":6,\"lora_dropout\":0.0,\"bias\":\"none\","
    "\"target_modules\":\"model.layers.(0.self_attn.(q|k)_proj|1.(self_attn.q|mlp.up|mlp.down)_"
    "proj)\","
    "\"rank_pattern\":{\"1.mlp.up_proj\":2},\"alpha_pattern\":{\"k_proj\":3.5,\"mlp.up_proj\":8},"
    "\"use_rslora\":true}";

static const struct {
    const char* module;
    int64_t rank;
    double alpha;
    int64_t in;
    int64_t out;
} pattern_modules[] = {{"model.layers.0.self_attn.q_proj", 4, 6, 16, 16},
                       {"model.layers.0.self_attn.k_proj", 4, 3.5, 16, 8},
                       {"model.layers.1.self_attn.q_proj", 4, 6, 16, 16},
                       {"model.layers.1.mlp.up_proj", 2, 8, 16, 24},
                       {"model.layers.1.mlp.down_proj", 4, 6, 24, 16}};
#define PATTERN_MODULES 5

static bool pattern_make(stage* s) {
    tensor_plan plans[2 * PATTERN_MODULES];
    memset(plans, 0, sizeof plans);
    for (int i = 0; i < 2 * PATTERN_MODULES; i++) {
        bool b = i % 2 == 1;
        snprintf(plans[i].name, sizeof plans[i].name, "base_model.model.%s.lora_%c.weight",
                 pattern_modules[i / 2].module, b ? 'B' : 'A');
        plans[i].shape[0] = b ? pattern_modules[i / 2].out : pattern_modules[i / 2].rank;
        plans[i].shape[1] = b ? pattern_modules[i / 2].rank : pattern_modules[i / 2].in;
    }
    world_put(&s->w, "pattern/adapter_config.json", pattern_config, sizeof pattern_config - 1);
    return write_tensors(s->ctx, "pattern/adapter_model.safetensors", plans, 2 * PATTERN_MODULES,
                         0.4f);
}

// Checks that every tensor of one file is in the other, byte for byte, and that there are
// no others.
static bool same_tensors(qlora_ctx* ctx, const char* a, const char* b) {
    static qlora__st x;
    static qlora__st y;
    if (qlora__st_open(&ctx->env, a, &x) != QLORA_OK) {
        printf("\n%s\n", ctx->env.error);
        return false;
    }
    if (qlora__st_open(&ctx->env, b, &y) != QLORA_OK) {
        printf("\n%s\n", ctx->env.error);
        qlora__st_close(&ctx->env, &x);
        return false;
    }
    bool same = x.count == y.count && x.count > 0;
    for (uint32_t i = 0; i < x.count && same; i++) {
        const qlora__st_tensor* t = qlora__st_find(&y, x.tensors[i].name);
        same = t != NULL && t->dtype == x.tensors[i].dtype && t->rank == x.tensors[i].rank &&
               t->bytes == x.tensors[i].bytes && t->shape[0] == x.tensors[i].shape[0] &&
               memcmp(t->data, x.tensors[i].data, (size_t)t->bytes) == 0;
    }
    qlora__st_close(&ctx->env, &x);
    qlora__st_close(&ctx->env, &y);
    return same;
}

// An adapter with DoRA on o_proj of layer 1 only, or one that trains rows of the embedding.
static bool single_make(stage* s, const char* dir, const char* field) {
    static const tensor_plan plans[] = {
        {"base_model.model.model.layers.1.self_attn.o_proj.lora_A.weight", {4, 16}},
        {"base_model.model.model.layers.1.self_attn.o_proj.lora_B.weight", {16, 4}},
        {"base_model.model.model.layers.1.self_attn.o_proj.lora_magnitude_vector", {16, 0}},
        {"base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta", {2, 16}}};
    char config[512];
    char path[WORLD_NAME];
    bool dora = strstr(field, "use_dora") != NULL;
    tensor_plan chosen[3] = {plans[0], plans[1], plans[dora ? 2 : 3]};
    snprintf(config, sizeof config,
             "{\"peft_type\":\"LORA\",\"r\":4,\"lora_alpha\":6,\"lora_dropout\":0.1,"
             "\"bias\":\"none\",\"target_modules\":[\"o_proj\"],"
             "\"layers_to_transform\":[1],%s}",
             field);
    snprintf(path, sizeof path, "%s/adapter_config.json", dir);
    world_put(&s->w, path, config, strlen(config));
    snprintf(path, sizeof path, "%s/adapter_model.safetensors", dir);
    return write_tensors(s->ctx, path, chosen, 3, 0.4f);
}

static bool opens_with(stage* s, const qlora_model_desc* desc, const char* message) {
    qlora_model* model = NULL;
    bool opened = qlora_model_open(s->ctx, desc, &model) == QLORA_OK;
    bool good =
        message == NULL ? opened : !opened && strstr(qlora_last_error(s->ctx), message) != NULL;
    if (!good) {
        printf("\nexpected %s, got %s\n", message != NULL ? message : "a model",
               opened ? "a model" : qlora_last_error(s->ctx));
    }
    return qlora_model_close(model) == QLORA_OK && good;
}

// DoRA does not go with dropout, which can be switched off, nor with a bias, in any layer.
TEST dora_of_other_folders(void) {
    static stage s;
    qlora_model_config config;
    qlora_model_desc desc;
    ASSERT(stage_begin(&s, NULL));
    ASSERT(folder_make(&s, "m"));
    ASSERT(single_make(&s, "dora", "\"use_dora\":true"));
    ASSERT_EQ(QLORA_OK, qlora_config_read(s.ctx, "m", &config));
    memset(&desc, 0, sizeof desc);
    desc.config = &config;
    desc.adapter = "dora";
    desc.tokens = 32;
    desc.mode = QLORA_MODE_F32;
    ASSERT(opens_with(&s, &desc, "needs 0 (desc.dropout negative)"));
    desc.dropout = -1.0f;
    ASSERT(opens_with(&s, &desc, NULL));
    config.o_bias = true;
    ASSERT(opens_with(&s, &desc, "self_attn.o_proj, which has a bias"));
    ASSERT(stage_end(&s));
    PASS();
}

// Opens "m" with two trained rows that differ from the base's.
static bool rows_open(stage* s, const char* adapter, session* a) {
    static const int32_t rows[] = {3, 5};
    qlora_model_desc desc;
    qlora_train_desc train;
    memset(&desc, 0, sizeof desc);
    memset(&train, 0, sizeof train);
    memset(a, 0, sizeof *a);
    desc.dir = "m";
    desc.adapter = adapter;
    desc.token_rows = adapter == NULL ? rows : NULL;
    desc.token_row_count = adapter == NULL ? 2 : 0;
    desc.rank = 3;
    desc.base = QLORA_BASE_32BIT;
    desc.tokens = 32;
    desc.mode = QLORA_MODE_F32;
    return qlora_model_open(s->ctx, &desc, &a->model) == QLORA_OK &&
           qlora_trainer_create(a->model, &train, &a->trainer) == QLORA_OK;
}

// Changes the config of "m" so that it ties the head, which stays in the file.
static bool tie_config(stage* s) {
    char text[sizeof adapter_config_text + 64];
    static const char old[] = "\"tie_word_embeddings\":false";
    const char* flag = strstr(adapter_config_text, old);
    if (flag == NULL) {
        return false;
    }
    snprintf(text, sizeof text, "%.*s\"tie_word_embeddings\":true%s",
             (int)(flag - adapter_config_text), adapter_config_text, flag + sizeof old - 1);
    world_put(&s->w, "m/config.json", text, strlen(text));
    return true;
}

// Moves the trained rows, which are the last parameter, and returns the loss.
static bool rows_loss(session* a, const float* rows, float by, const float* way, double* out) {
    float moved[32];
    int32_t ids[16];
    int32_t lengths[2];
    qlora_eval_info info;
    qlora_batch b = batch_of(3, ids, lengths);
    for (int i = 0; i < 32; i++) {
        moved[i] = rows[i] + by * way[i];
    }
    bool ok = qlora_parameter_write(a->model, model_parameters(a->model) - 1, moved) == QLORA_OK &&
              qlora_eval(a->model, &b, &info) == QLORA_OK;
    *out = ok ? info.loss : 0.0;
    return ok;
}

// Where the config ties the head but the files have one, PEFT trains the same rows of both.
TEST rows_of_a_head_of_its_own(void) {
    static stage s;
    static float logits[4][LOGITS];
    ASSERT(stage_begin(&s, NULL));
    ASSERT(folder_make(&s, "m"));
    ASSERT(tie_config(&s));
    session a;
    opening o = {0};
    o.dir = "m";
    o.base = QLORA_BASE_32BIT;
    o.rank = -1;
    ASSERT(session_open(&s, &o, &a));
    ASSERT(logits_of(&a, logits[0]));
    ASSERT(session_close(&a));
    ASSERTm(qlora_last_error(s.ctx), rows_open(&s, NULL, &a));
    ASSERT(scramble(&a, "rows"));
    ASSERT(logits_of(&a, logits[1]));
    int64_t last = model_parameters(a.model) - 1;
    float rows[32];
    float gradient[32];
    double losses[2];
    double slope = 0.0;
    int32_t ids[16];
    int32_t lengths[2];
    qlora_batch b = batch_of(3, ids, lengths);
    ASSERT_EQ(QLORA_OK, qlora_parameter_read(a.model, last, rows));
    ASSERT_EQ(QLORA_OK, qlora_train_gradients(a.trainer, &b, 1));
    ASSERT_EQ(QLORA_OK, qlora_gradient_read(a.trainer, last, gradient));
    ASSERT_EQ(QLORA_OK, qlora_train_cancel(a.trainer));
    for (int i = 0; i < 32; i++) {
        slope += (double)gradient[i] * (double)gradient[i] * qlora_batch_labels(&b);
    }
    float by = (float)(0.02 / sqrt(slope));
    ASSERT(rows_loss(&a, rows, by, gradient, &losses[0]));
    ASSERT(rows_loss(&a, rows, -by, gradient, &losses[1]));
    double got = (losses[0] - losses[1]) / (2.0 * (double)by);
    ASSERT_CLOSE_DOUBLE(&slope, &got, 1, 0.0, 2e-2);
    ASSERT(rows_loss(&a, rows, 0.0f, gradient, &losses[0]));
    ASSERT_EQ(QLORA_OK, qlora_adapter_use(a.model, false)); // both matrices are the base's again
    ASSERT(logits_of(&a, logits[2]));
    ASSERT_CLOSE(logits[0], logits[2], LOGITS, 1e-5, 1e-5);
    ASSERT_EQ(QLORA_OK, qlora_adapter_use(a.model, true));
    ASSERT_EQ(QLORA_OK, save_named(a.model, "rows", "m"));
    ASSERT_EQ(QLORA_OK,
              merge_save(a.model, "merged", QLORA_F32, QLORA_MERGE_ORIGINAL, 0, NULL, NULL));
    ASSERT(session_close(&a));
    ASSERT(rows_open(&s, "rows", &a));
    ASSERT(logits_of(&a, logits[3]));
    ASSERT_MEM_EQ(logits[1], logits[3], sizeof logits[1]);
    ASSERT(session_close(&a));
    o.dir = "merged";
    ASSERT(session_open(&s, &o, &a));
    ASSERT(logits_of(&a, logits[3]));
    ASSERT_CLOSE(logits[1], logits[3], LOGITS, 1e-4, 1e-4);
    ASSERT(session_close(&a));
    ASSERT(stage_end(&s));
    PASS();
}

// Whole matrices are refused there.
TEST whole_heads_of_their_own_are_refused(void) {
    static stage s;
    static const char config[] =
        "{\"peft_type\":\"LORA\",\"r\":4,\"lora_alpha\":6,\"bias\":\"none\","
        "\"target_modules\":[\"o_proj\"],\"layers_to_transform\":[1],"
        "\"modules_to_save\":[\"embed_tokens\"],\"ensure_weight_tying\":true}";
    static const tensor_plan plans[] = {
        {"base_model.model.model.layers.1.self_attn.o_proj.lora_A.weight", {4, 16}},
        {"base_model.model.model.layers.1.self_attn.o_proj.lora_B.weight", {16, 4}},
        {"base_model.model.model.embed_tokens.weight", {40, 16}}};
    qlora_model_desc desc;
    memset(&desc, 0, sizeof desc);
    ASSERT(stage_begin(&s, NULL));
    ASSERT(folder_make(&s, "m"));
    ASSERT(tie_config(&s));
    world_put(&s.w, "whole/adapter_config.json", config, sizeof config - 1);
    ASSERT(write_tensors(s.ctx, "whole/adapter_model.safetensors", plans, 3, 0.3f));
    desc.dir = "m";
    desc.adapter = "whole";
    desc.tokens = 32;
    ASSERT(opens_with(&s, &desc, "ties the head to the embedding"));
    ASSERT(stage_end(&s));
    PASS();
}

TEST patterns_survive(void) {
    static stage s;
    ASSERT(stage_begin(&s, NULL));
    ASSERT(folder_make(&s, "m"));
    ASSERT(pattern_make(&s));
    opening o = {0};
    o.dir = "m";
    o.base = QLORA_BASE_32BIT;
    o.adapter = "pattern";
    session a;
    ASSERT(session_open(&s, &o, &a));
    ASSERT_EQ(2 * PATTERN_MODULES, (int)model_parameters(a.model));
    ASSERT_EQ(QLORA_OK, qlora_adapter_save(a.model, "out", NULL));
    ASSERT(
        same_tensors(s.ctx, "pattern/adapter_model.safetensors", "out/adapter_model.safetensors"));
    static qlora__peft peft;
    ASSERT_EQ(QLORA_OK, qlora__peft_open(&s.ctx->env, "out", &peft));
    int found = 0;
    for (int l = 0; l < 2; l++) {
        for (int i = 0; i < QLORA__PROJECTIONS; i++) {
            char module[64];
            qlora__peft_module at;
            snprintf(module, sizeof module, "model.layers.%d.%s", l,
                     qlora__layout_seven.rows[i].module);
            ASSERT_EQ(QLORA_OK, qlora__peft_lookup(&s.ctx->env, &peft, module, &at));
            for (int k = 0; k < PATTERN_MODULES; k++) {
                if (strcmp(pattern_modules[k].module, module) == 0) {
                    ASSERT_EQ(pattern_modules[k].rank, at.rank);
                    ASSERT_IN_RANGE(pattern_modules[k].alpha, at.alpha, 1e-12);
                    ASSERT_IN_RANGE(at.alpha / sqrt((double)at.rank), at.scale, 1e-12);
                    found++;
                    at.rank = 0;
                }
            }
            ASSERT_EQ(0, (int)at.rank);
        }
    }
    ASSERT_EQ(PATTERN_MODULES, found);
    qlora__peft_close(&s.ctx->env, &peft);
    ASSERT(session_close(&a));
    ASSERT(stage_end(&s));
    PASS();
}

// ---- GGUF ----

typedef struct gguf_reader {
    const unsigned char* data;
    size_t size;
    size_t at;
    bool bad;
} gguf_reader;

static uint64_t gguf_number(gguf_reader* r, int bytes) {
    uint64_t value = 0;
    if (r->size - r->at < (size_t)bytes) {
        r->bad = true;
        return 0;
    }
    for (int i = 0; i < bytes; i++) {
        value |= (uint64_t)r->data[r->at++] << (8 * i);
    }
    return value;
}

static void gguf_text(gguf_reader* r, char out[64]) {
    uint64_t n = gguf_number(r, 8);
    if (r->bad || n > 63 || r->size - r->at < n) {
        r->bad = true;
        out[0] = '\0';
        return;
    }
    memcpy(out, r->data + r->at, (size_t)n);
    out[n] = '\0';
    r->at += (size_t)n;
}

// Reads the key/values into architecture and alpha; the reader is then at the tensor list.
static bool gguf_head(gguf_reader* r, uint64_t* tensors, char architecture[64], float* alpha) {
    if (r->size < 8 || memcmp(r->data, "GGUF", 4) != 0) {
        return false;
    }
    r->at = 4;
    if (gguf_number(r, 4) != 3) {
        return false;
    }
    *tensors = gguf_number(r, 8);
    uint64_t pairs = gguf_number(r, 8);
    bool adapter = false;
    bool lora = false;
    for (uint64_t i = 0; i < pairs && !r->bad; i++) {
        char key[64];
        char text[64] = "";
        gguf_text(r, key);
        uint64_t type = gguf_number(r, 4);
        uint32_t word = 0;
        if (type == 8) {
            gguf_text(r, text);
        } else {
            word = (uint32_t)gguf_number(r, 4); // u32 and f32 only
        }
        if (strcmp(key, "general.architecture") == 0) {
            memcpy(architecture, text, 64);
        } else if (strcmp(key, "adapter.lora.alpha") == 0 && type == 6) {
            memcpy(alpha, &word, 4);
        }
        adapter = adapter || (strcmp(key, "general.type") == 0 && strcmp(text, "adapter") == 0);
        lora = lora || (strcmp(key, "adapter.type") == 0 && strcmp(text, "lora") == 0);
    }
    return !r->bad && adapter && lora;
}

// The row of ours that corresponds to a row of llama.cpp's, from the rule:
//   new 2i <- i, new 2i + 1 <- i + half
static int64_t gguf_row(const char* name, int64_t row) {
    if (strstr(name, "attn_q.") == NULL && strstr(name, "attn_k.") == NULL) {
        return row;
    }
    int64_t head = row / 8 * 8;
    int64_t i = row % 8;
    return head + (i % 2 == 0 ? i / 2 : 4 + i / 2);
}

static const char* const gguf_modules[][2] = {{"q_proj", "attn_q"},      {"k_proj", "attn_k"},
                                              {"v_proj", "attn_v"},      {"o_proj", "attn_output"},
                                              {"gate_proj", "ffn_gate"}, {"up_proj", "ffn_up"},
                                              {"down_proj", "ffn_down"}};

// The trained tensor that corresponds to a GGUF name.
static bool gguf_partner(session* s, const char* name, qlora__trained* out) {
    for (int64_t i = 0; qlora__trained_at(s->model, i, out); i++) {
        char want[96];
        for (int k = 0; k < 7; k++) {
            if (strstr(out->name, gguf_modules[k][0]) != NULL) {
                snprintf(want, sizeof want, "blk.%c.%s.weight.lora_%c", out->name[13],
                         gguf_modules[k][1], out->is_b ? 'b' : 'a');
                if (strcmp(want, name) == 0) {
                    return true;
                }
            }
        }
    }
    return false;
}

// llama.cpp compares the architecture with that of the base file, which for a wrapper is its own.
TEST gguf_of_a_wrapped_mistral(void) {
    static stage s;
    ASSERT(stage_begin(&s, NULL));
    ASSERT(folder_make(&s, "m"));
    opening o = {0};
    o.dir = "m";
    o.base = QLORA_BASE_32BIT;
    session a;
    ASSERT(session_open(&s, &o, &a));
    a.model->plan.config.family = QLORA_FAMILY_MISTRAL;
    a.model->arch = qlora__arch_of(QLORA_FAMILY_MISTRAL);
    for (int wrapped = 0; wrapped < 2; wrapped++) {
        uint64_t tensors = 0;
        char architecture[64] = "";
        float alpha = 0.0f;
        a.model->plan.config.wrapped = wrapped != 0;
        ASSERT_EQ(QLORA_OK, qlora_adapter_save_gguf(a.model, "a.gguf", NULL));
        const world_file* f = world_slot(s.w.files, "a.gguf");
        ASSERT(f != NULL);
        gguf_reader r = {f->data, f->size, 0, false};
        ASSERT(gguf_head(&r, &tensors, architecture, &alpha));
        ASSERT_STR_EQ(wrapped ? "mistral3" : "llama", architecture);
    }
    ASSERT(session_close(&a));
    ASSERT(stage_end(&s));
    PASS();
}

TEST gguf_is_what_llama_cpp_reads(const char* adapter) {
    static stage s;
    ASSERT(stage_begin(&s, NULL));
    ASSERT(folder_make(&s, "m"));
    ASSERT(pattern_make(&s));
    opening o = {0};
    o.dir = "m";
    o.base = QLORA_BASE_32BIT;
    o.adapter = adapter;
    o.rslora = true;
    session a;
    ASSERT(session_open(&s, &o, &a));
    ASSERT(scramble(&a, "gguf"));
    ASSERT_EQ(QLORA_OK, qlora_adapter_save_gguf(a.model, "a.gguf", NULL));
    const world_file* f = world_slot(s.w.files, "a.gguf");
    ASSERT(f != NULL);
    gguf_reader r = {f->data, f->size, 0, false};
    uint64_t tensors = 0;
    char architecture[64] = "";
    float alpha = 0.0f;
    ASSERT(gguf_head(&r, &tensors, architecture, &alpha));
    ASSERT_STR_EQ("llama", architecture);
    ASSERT_IN_RANGE((adapter == NULL ? 5.0 * sqrt(3.0) : 6.0 * 2.0), (double)alpha, 1e-5);
    ASSERT_EQ((uint64_t)model_parameters(a.model), tensors);
    // the list comes first, because the data starts right after it
    gguf_reader list = r;
    for (uint64_t i = 0; i < tensors; i++) {
        char name[64];
        gguf_text(&r, name);
        gguf_number(&r, 4);
        gguf_number(&r, 8);
        gguf_number(&r, 8);
        gguf_number(&r, 4);
        gguf_number(&r, 8);
    }
    ASSERT_FALSE(r.bad);
    size_t start = (r.at + 31) / 32 * 32;
    for (uint64_t i = 0; i < tensors; i++) {
        char name[64];
        qlora__trained t;
        gguf_text(&list, name);
        ASSERT(gguf_partner(&a, name, &t));
        ASSERT_EQ(2, (int)gguf_number(&list, 4));
        ASSERT_EQ((uint64_t)t.cols, gguf_number(&list, 8));
        ASSERT_EQ((uint64_t)t.rows, gguf_number(&list, 8));
        ASSERT_EQ(0, (int)gguf_number(&list, 4)); // F32
        uint64_t offset = gguf_number(&list, 8);
        ASSERT_EQ(0, (int)(offset % 32));
        size_t n = (size_t)(t.rows * t.cols);
        ASSERT(start + offset + n * 4 <= f->size);
        float got[1024];
        float own[1024];
        memcpy(got, f->data + start + offset, n * 4);
        qlora_tensor window;
        qlora__arena_window(&a.model->parameters, t.at, t.rows, t.cols, &window);
        memcpy(own, window.data, n * 4);
        // llama.cpp computes alpha / rank * B A; the rank is B's inner size
        double factor = t.is_b ? (double)alpha / (double)t.cols : 1.0;
        for (int64_t row = 0; row < t.rows; row++) {
            for (int64_t c = 0; c < t.cols; c++) {
                int64_t from = t.is_b ? gguf_row(name, row) : row;
                double want =
                    (double)own[from * t.cols + c] * (t.is_b ? (double)t.projection->scale : 1.0);
                double have = (double)got[row * t.cols + c] * factor;
                ASSERT(fabs(want - have) <= 1e-6 * fabs(want) + 1e-30);
                if (adapter == NULL) { // one scale for all is the file's alpha; B is unchanged
                    ASSERT_MEM_EQ(&own[from * t.cols + c], &got[row * t.cols + c], 4);
                }
            }
        }
    }
    ASSERT(session_close(&a));
    ASSERT(stage_end(&s));
    PASS();
}

// ---- merged exports ----

typedef struct merge_case {
    qlora_base_format base;
    qlora_merge_base onto;
    bool norms;
    uint64_t shard;
} merge_case;

TEST merged_models_answer_alike(const merge_case* c) {
    static stage s;
    ASSERT(stage_begin(&s, NULL));
    ASSERT(folder_make(&s, "m"));
    opening o = {0};
    o.dir = "m";
    o.base = c->base;
    o.norms = c->norms;
    session a;
    session b;
    float want[LOGITS];
    float got[LOGITS];
    float bare[LOGITS];
    ASSERT(session_open(&s, &o, &a));
    ASSERT(logits_of(&a, bare));
    ASSERT(scramble(&a, "merge"));
    ASSERT(logits_of(&a, want));
    ASSERT_EQ(QLORA_OK, merge_save(a.model, "out", QLORA_F32, c->onto, c->shard, NULL, NULL));
    ASSERT_EQ(c->shard == 0, has_file(&s, "out/model.safetensors"));
    ASSERT_EQ(c->shard != 0, has_file(&s, "out/model.safetensors.index.json"));
    ASSERT(has_file(&s, "out/generation_config.json"));
    ASSERT(session_close(&a));
    opening merged = {0};
    merged.dir = "out";
    merged.base = QLORA_BASE_32BIT;
    merged.rank = -1;
    ASSERT(session_open(&s, &merged, &b));
    ASSERT(logits_of(&b, got));
    ASSERT_REL_L2(want, got, LOGITS, 2e-6);
    test_quiet(true);
    bool moved = !test_rel_l2(want, bare, LOGITS, 0.05); // the adapter had an effect
    test_quiet(false);
    ASSERT(moved);
    ASSERT(session_close(&b));
    ASSERT(stage_end(&s));
    PASS();
}

static bool same_file(stage* s, const char* a, const char* b) {
    const world_file* one = world_slot(s->w.files, a);
    const world_file* two = world_slot(s->w.files, b);
    return one != NULL && two != NULL && one->size == two->size && one->size > 0 &&
           memcmp(one->data, two->data, one->size) == 0;
}

// An adapter that was opened without the base is exported and merged to the same bytes.
TEST adapters_need_no_weights(bool norms) {
    static stage s;
    opening o = {0};
    session a;
    qlora_model* alone = NULL;
    qlora_eval_info info;
    int32_t ids[64];
    int32_t lengths[8];
    o.dir = "m";
    o.norms = norms;
    ASSERT(stage_begin(&s, NULL));
    ASSERT(folder_make(&s, "m"));
    ASSERT(session_open(&s, &o, &a));
    ASSERT(scramble(&a, "alone"));
    ASSERT_EQ(QLORA_OK, qlora_adapter_save(a.model, "ad", NULL));
    ASSERT_EQ(norms ? QLORA_ERR_UNSUPPORTED : QLORA_OK,
              qlora_adapter_save_gguf(a.model, "a.gguf", NULL));
    ASSERT_EQ(QLORA_OK, merge_save(a.model, "a", QLORA_F32, QLORA_MERGE_ORIGINAL, 0, NULL, NULL));
    ASSERT(session_close(&a));
    ASSERT_EQ(QLORA_OK, adapter_alone(&s, "m", "ad", false, &alone)); // the folder says it
    ASSERT_EQ(0, (int)model_plan(alone)->base);
    ASSERT_EQ(norms ? QLORA_ERR_UNSUPPORTED : QLORA_OK,
              qlora_adapter_save_gguf(alone, "b.gguf", NULL));
    ASSERT_EQ(norms, strstr(qlora_last_error(s.ctx), "trained norms; merge the ad") != NULL);
    ASSERT_EQ(QLORA_OK, merge_save(alone, "b", QLORA_F32, QLORA_MERGE_ORIGINAL, 0, NULL, NULL));
    ASSERT(norms || same_file(&s, "a.gguf", "b.gguf"));
    ASSERT(same_file(&s, "a/model.safetensors", "b/model.safetensors"));
    qlora_batch batch = batch_of(0, ids, lengths);
    ASSERT_EQ(QLORA_ERR_STATE, qlora_eval(alone, &batch, &info));
    ASSERT_STR_EQ("qlora_eval: evaluating needs weights, but the model was opened with "
                  "QLORA_PURPOSE_ADAPTER",
                  qlora_last_error(s.ctx));
    ASSERT_EQ(QLORA_ERR_STATE,
              merge_save(alone, "t", QLORA_F32, QLORA_MERGE_TRAINED, 0, NULL, NULL));
    ASSERT_EQ(QLORA_OK, qlora_model_close(alone));
    ASSERT_EQ(QLORA_ERR_ARGUMENT, adapter_alone(&s, "m", NULL, norms, &alone));
    ASSERT(stage_end(&s));
    PASS();
}

// A hash of the merged weights, in bf16, over the 4-bit base.
static bool merge_hash(const test_machine* machine, uint64_t* out) {
    static stage s;
    opening o = {0};
    session a;
    o.dir = "m";
    o.base = QLORA_BASE_NF4;
    if (!stage_begin(&s, machine) || !folder_make(&s, "m") || !session_open(&s, &o, &a) ||
        !scramble(&a, "merge") ||
        merge_save(a.model, "out", QLORA_BF16, QLORA_MERGE_TRAINED, 0, NULL, NULL) != QLORA_OK) {
        return false;
    }
    const world_file* f = world_slot(s.w.files, "out/model.safetensors");
    qlora__hash hash;
    qlora__hash_begin(&hash);
    qlora__hash_add(&hash, f->data, f->size);
    *out = qlora__hash_end(&hash);
    return session_close(&a) && stage_end(&s);
}

TEST merging_is_the_same_everywhere(const test_machine* machine) {
    uint64_t want = 0;
    uint64_t got = 1;
    ASSERT(merge_hash(NULL, &want));
    ASSERT(merge_hash(machine, &got));
    ASSERT_EQ(want, got);
    PASS();
}

typedef struct stopper {
    int calls;
    int stop_at; // 0 = never
    uint64_t last;
    uint64_t total;
} stopper;

static bool stopper_tell(void* user, const char* what, uint64_t done, uint64_t total) {
    stopper* st = (stopper*)user;
    (void)what;
    st->calls++;
    st->last = done;
    st->total = total;
    return st->calls != st->stop_at;
}

TEST merges_round_stop_and_refuse(void) {
    static stage s;
    ASSERT(stage_begin(&s, NULL));
    ASSERT(folder_make(&s, "m"));
    opening o = {0};
    o.dir = "m";
    o.base = QLORA_BASE_32BIT;
    session a;
    ASSERT(session_open(&s, &o, &a));
    ASSERT(scramble(&a, "merge"));
    ASSERT_EQ(QLORA_OK, merge_save(a.model, "f32", QLORA_F32, QLORA_MERGE_ORIGINAL, 0, NULL, NULL));
    static const qlora_dtype halves[] = {QLORA_BF16, QLORA_F16};
    static const char* const names[] = {"bf16/model.safetensors", "f16/model.safetensors"};
    static const char* const dirs[] = {"bf16", "f16"};
    for (int k = 0; k < 2; k++) {
        static qlora__st x;
        static qlora__st y;
        ASSERT_EQ(QLORA_OK,
                  merge_save(a.model, dirs[k], halves[k], QLORA_MERGE_ORIGINAL, 0, NULL, NULL));
        ASSERT_EQ(QLORA_OK, qlora__st_open(&s.ctx->env, "f32/model.safetensors", &x));
        ASSERT_EQ(QLORA_OK, qlora__st_open(&s.ctx->env, names[k], &y));
        ASSERT_EQ(x.count, y.count);
        for (uint32_t i = 0; i < x.count; i++) {
            const qlora__st_tensor* t = qlora__st_find(&y, x.tensors[i].name);
            ASSERT(t != NULL && t->bytes * 2 == x.tensors[i].bytes);
            for (uint64_t j = 0; j < qlora__st_elements(t); j++) {
                float exact = 0.0f;
                uint16_t half = 0;
                qlora__st_read_f32(&x.tensors[i], j, 1, &exact);
                memcpy(&half, t->data + 2 * j, 2);
                ASSERT_EQ(k == 0 ? qlora__bf16_from(exact) : qlora__f16_from(exact), half);
            }
        }
        qlora__st_close(&s.ctx->env, &x);
        qlora__st_close(&s.ctx->env, &y);
    }
    const world_file* config = world_slot(s.w.files, "bf16/config.json");
    ASSERT(config != NULL);
    ASSERT(strstr((const char*)config->data, "\"bfloat16\"") !=
           NULL); // followed by a byte of malloc's
    stopper st = {0, 4, 0, 0};
    ASSERT_EQ(QLORA_ERR_STOPPED, merge_save(a.model, "half", QLORA_F32, QLORA_MERGE_ORIGINAL, 4000,
                                            stopper_tell, &st));
    ASSERT_FALSE(has_file(&s, "half/config.json"));
    st.stop_at = 0;
    ASSERT_EQ(QLORA_OK, merge_save(a.model, "half", QLORA_F32, QLORA_MERGE_ORIGINAL, 4000,
                                   stopper_tell, &st));
    ASSERT(st.total > 0 && st.last == st.total);
    ASSERT_EQ(QLORA_ERR_ARGUMENT,
              merge_save(a.model, "m", QLORA_F32, QLORA_MERGE_ORIGINAL, 0, NULL, NULL));
    ASSERT(strstr(qlora_last_error(s.ctx), "already exists") != NULL);
    ASSERT_EQ(QLORA_ERR_ARGUMENT,
              merge_save(a.model, "x", QLORA_U8, QLORA_MERGE_ORIGINAL, 0, NULL, NULL));
    ASSERT(session_close(&a));
    ASSERT(stage_end(&s));
    PASS();
}

// ---- checkpoints ----

typedef struct resume_case {
    bool eager;
    bool eager_after;
    qlora_mode mode;
    qlora_choice recompute_after;
    int32_t rank; // 0 = 3
    qlora_optimizer optimizer;
    double neftune;
} resume_case;

static const resume_case resume_cases[] = {
    {false, false, QLORA_MODE_F32, QLORA_CHOICE_AUTO, 0, QLORA_OPTIMIZER_ADAMW, 0.0},
    {true, true, QLORA_MODE_F32, QLORA_CHOICE_AUTO, 0, QLORA_OPTIMIZER_ADAMW, 5.0},
    // Of rank 256, some tensors have 4096 elements, and others have fewer.
    {true, true, QLORA_MODE_F32, QLORA_CHOICE_AUTO, 256, QLORA_OPTIMIZER_ADAMW_8BIT, 0.0},
    {false, true, QLORA_MODE_F32, QLORA_CHOICE_ON, 0, QLORA_OPTIMIZER_ADAMW, 0.0},
    {false, false, QLORA_MODE_BF16, QLORA_CHOICE_AUTO, 0, QLORA_OPTIMIZER_ADAMW, 0.0},
};

TEST resuming_is_bitwise(const test_machine* machine) {
    size_t cases = strcmp(machine->backend, "cpu") == 0 ? 4 : 5;
    for (size_t k = 0; k < cases; k++) {
        const resume_case* c = &resume_cases[k];
        static stage s;
        if (!stage_begin(&s, machine)) {
            SKIPm("no such machine");
        }
        ASSERT(folder_make(&s, "m"));
        opening o = {0};
        o.dir = "m";
        o.base = QLORA_BASE_NF4;
        o.dropout = 0.2f;
        o.norms = k == 0;
        o.mode = c->mode;
        o.eager = c->eager;
        o.rank = c->rank;
        o.targets = c->rank > 0 ? QLORA_TARGET_Q | QLORA_TARGET_K : 0;
        o.optimizer = c->optimizer;
        o.neftune = c->neftune;
        session a;
        ASSERT(session_open(&s, &o, &a));
        ASSERT(train_steps(&a, 0, 4));
        uint64_t want = fingerprint(&a);
        ASSERT(session_close(&a));
        ASSERT(session_open(&s, &o, &a));
        ASSERT(train_steps(&a, 0, 2));
        ASSERT_EQ(QLORA_OK, qlora_checkpoint_save(a.trainer, "run", "here", 4));
        uint64_t middle = fingerprint(&a);
        ASSERT(session_close(&a));
        o.eager = c->eager_after;
        o.recompute = c->recompute_after;
        ASSERT(session_open(&s, &o, &a));
        char position[8] = "";
        size_t size = sizeof position;
        ASSERT_EQm(qlora_last_error(s.ctx), QLORA_OK,
                   qlora_checkpoint_load(a.trainer, "run", position, &size));
        ASSERT_EQ(4, (int)size);
        ASSERT_MEM_EQ("here", position, 4);
        ASSERT_EQ(middle, fingerprint(&a));
        ASSERT(train_steps(&a, 2, 2));
        ASSERT_EQ(want, fingerprint(&a));
        ASSERT(session_close(&a));
        ASSERT(stage_end(&s));
        if (strcmp(machine->backend, "fake") == 0) {
            ASSERT_EQ(NULL, test_fake()->done());
        }
    }
    PASS();
}

static void tier_log(void* user, qlora_log_level level, qlora_log_item item, const char* text,
                     const char* file, int line) {
    (void)file;
    (void)line;
    if (level == QLORA_LOG_WARN && item == QLORA_LOG_ITEM_CHECKPOINT) {
        snprintf((char*)user, 256, "%s", text);
    }
}

// A trainer with a checkpoint in "run".
static bool session_saved(stage* s, session* a) {
    opening o = {0};
    o.dir = "m";
    o.base = QLORA_BASE_NF4;
    return folder_make(s, "m") && session_open(s, &o, a) && train_steps(a, 0, 1) &&
           qlora_checkpoint_save(a->trainer, "run", NULL, 0) == QLORA_OK;
}

// Loads that checkpoint, and returns the last warning, "" if there is none.
static const char* load_warning(stage* s, session* a) {
    static char warning[256];
    qlora_log_fn log = s->ctx->env.log;
    void* log_user = s->ctx->env.log_user;
    warning[0] = '\0';
    s->ctx->env.log = tier_log;
    s->ctx->env.log_user = warning;
    bool ok = qlora_checkpoint_load(a->trainer, "run", NULL, NULL) == QLORA_OK;
    s->ctx->env.log = log;
    s->ctx->env.log_user = log_user;
    return ok ? warning : "refused";
}

// A checkpoint contains the name of the tier; another tier is logged and not refused.
TEST resuming_names_the_tier(void) {
    static stage s;
    session a;
    ASSERT(stage_begin(&s, NULL));
    ASSERT(session_saved(&s, &a));
    ASSERT_STR_EQ("", load_warning(&s, &a));
    const qlora__cpu_table* own = s.ctx->cpu;
    qlora__cpu_table other = *own;
    other.f32_name = "another";
    s.ctx->cpu = &other;
    const char* warning = load_warning(&s, &a);
    s.ctx->cpu = own;
    ASSERTm(warning, strstr(warning, own->f32_name) != NULL);
    ASSERTm(warning, strstr(warning, "has another") != NULL);
    ASSERT(session_close(&a));
    ASSERT(stage_end(&s));
    PASS();
}

// On the GPU, max_length divides the sums of attention, so that another one is logged.
TEST resuming_names_the_length(const test_machine* machine) {
    static stage s;
    session a;
    if (!stage_begin(&s, machine)) {
        SKIPm("no such machine");
    }
    ASSERT(session_saved(&s, &a));
    ASSERT_STR_EQ("", load_warning(&s, &a));
    a.model->plan.max_length = a.model->plan.tokens - 1;
    const char* warning = load_warning(&s, &a);
    bool named = strstr(warning, "max_length = 0, this trainer has") != NULL;
    ASSERT_EQm(warning, strcmp(machine->backend, "cpu") != 0, named);
    ASSERT(session_close(&a));
    ASSERT(stage_end(&s));
    PASS();
}

// Two trainers of the same model on one world: one saves, the other loads.
typedef struct pair {
    stage s;
    session a;
    session b;
    uint64_t old_print;
    uint64_t new_print;
    world_file files[WORLD_FILES]; // after the first save
    world_file disk[WORLD_FILES];
} pair;

static bool pair_begin(pair* p) {
    opening o = {0};
    memset(p, 0, sizeof *p);
    if (!stage_begin(&p->s, NULL) || !folder_make(&p->s, "m")) {
        return false;
    }
    o.dir = "m";
    o.base = QLORA_BASE_NF4;
    o.norms = true;
    o.keep = 1; // the old one is removed: the hard case
    o.targets = QLORA_TARGET_Q;
    if (!session_open(&p->s, &o, &p->a) || !session_open(&p->s, &o, &p->b) ||
        !train_steps(&p->a, 0, 1) ||
        qlora_checkpoint_save(p->a.trainer, "run", "1", 1) != QLORA_OK) {
        return false;
    }
    p->old_print = fingerprint(&p->a);
    if (!train_steps(&p->a, 2, 1)) {
        return false;
    }
    p->new_print = fingerprint(&p->a);
    stage_apply(&p->s);
    files_copy(p->files, p->s.w.files);
    files_copy(p->disk, p->s.w.disk);
    return p->old_print != p->new_print;
}

static void pair_rewind(pair* p) {
    stage_apply(&p->s);
    files_copy(p->s.w.files, p->files);
    files_copy(p->s.w.disk, p->disk);
    p->s.w.operations = 0;
    p->s.w.fail_at = 0;
    p->s.w.fail_on = false;
    p->s.w.cut_at = 0;
    p->s.w.close_failed = false;
}

static bool pair_end(pair* p) {
    files_drop(p->files);
    files_drop(p->disk);
    bool good = session_close(&p->a) && session_close(&p->b);
    return stage_end(&p->s) && good;
}

// Loads into b: 1 = the old checkpoint, 2 = the new one, 0 = neither.
static int pair_load(pair* p) {
    char position = '?';
    size_t size = 1;
    if (qlora_checkpoint_load(p->b.trainer, "run", &position, &size) != QLORA_OK) {
        printf("\n%s\n", qlora_last_error(p->s.ctx));
        return 0;
    }
    uint64_t print = fingerprint(&p->b);
    return print == p->old_print && position == '1' && size == 1   ? 1
           : print == p->new_print && position == '2' && size == 1 ? 2
                                                                   : 0;
}

TEST power_cuts_leave_old_or_new(void) {
    static pair p;
    ASSERT(pair_begin(&p));
    int seen[3] = {0, 0, 0};
    for (int late = 0; late < 2; late++) {
        pair_rewind(&p);
        p.s.late = late != 0;
        ASSERT_EQ(QLORA_OK, qlora_checkpoint_save(p.a.trainer, "run", "2", 1));
        long operations = p.s.w.operations;
        ASSERT(operations > 20);
        for (long cut = 1; cut <= operations + 1; cut++) {
            pair_rewind(&p);
            p.s.w.cut_at = cut;
            ASSERT_EQ(QLORA_OK, qlora_checkpoint_save(p.a.trainer, "run", "2", 1));
            for (int i = 0; i < p.s.change_count; i++) { // unsynced changes are lost
                free(p.s.changes[i].data);
            }
            p.s.change_count = 0;
            files_copy(p.s.w.files, p.s.w.disk);
            p.s.w.cut_at = 0;
            int which = pair_load(&p);
            if (which == 0) {
                printf("\nlate %d, power cut at operation %ld of %ld\n", late, cut, operations);
            }
            ASSERT(which != 0);
            seen[which]++;
            if (which == 1) { // saving again removes what the interrupted save left
                ASSERT_EQ(QLORA_OK, qlora_checkpoint_save(p.b.trainer, "run", "1", 1));
                ASSERT_EQ(1, pair_load(&p));
                ASSERT_EQ(4, count_files(&p.s, "run/step-"));
            }
            if (cut % 8 == 0) { // and saving can continue from there
                ASSERT_EQ(QLORA_OK, qlora_checkpoint_save(p.a.trainer, "run", "2", 1));
                ASSERT_EQ(2, pair_load(&p));
            }
        }
    }
    p.s.late = false;
    ASSERT(seen[1] > 10 && seen[2] >= 2);
    ASSERT(pair_end(&p));
    PASS();
}

TEST failed_saves_leave_old_or_new(void) {
    static pair p;
    ASSERT(pair_begin(&p));
    long blocks = p.s.w.blocks;
    long handles = p.s.w.handles; // of the weights that the models have mapped
    int failures = 0;
    for (int persistent = 0; persistent < 2; persistent++) {
        bool whole = false;
        for (long n = 1; !whole; n++) {
            pair_rewind(&p);
            p.s.w.fail_at = n;
            p.s.w.fail_on = persistent != 0;
            qlora_result r = qlora_checkpoint_save(p.a.trainer, "run", "2", 1);
            whole = p.s.w.operations < n;
            p.s.w.fail_at = 0;
            p.s.w.fail_on = false;
            ASSERT_EQ(r == QLORA_OK, qlora_last_error(p.s.ctx)[0] == '\0');
            ASSERT_EQ(blocks, p.s.w.blocks);
            ASSERT_EQ(handles, p.s.w.handles);
            failures += r != QLORA_OK ? 1 : 0;
            int which = pair_load(&p);
            if (which == 0 || (r == QLORA_OK && which != 2)) {
                printf("\nfailure at operation %ld, persistent %d\n", n, persistent);
            }
            ASSERT(which == 2 || (which == 1 && r != QLORA_OK));
            if (n % 8 == 0) {
                ASSERT_EQ(QLORA_OK, qlora_checkpoint_save(p.a.trainer, "run", "2", 1));
                ASSERT_EQ(2, pair_load(&p));
            }
        }
    }
    ASSERT(failures > 40);
    ASSERT(pair_end(&p));
    PASS();
}

TEST failed_loads_change_nothing(void) {
    static pair p;
    ASSERT(pair_begin(&p));
    long blocks = p.s.w.blocks;
    long handles = p.s.w.handles; // of the weights that the models have mapped
    int failures = 0;
    for (long n = 1;; n++) {
        char position = '?';
        size_t size = 1;
        ASSERT(scramble(&p.b, "before"));
        p.b.trainer->step = 77;
        uint64_t before = fingerprint(&p.b);
        pair_rewind(&p);
        p.s.w.fail_at = n;
        qlora_result r = qlora_checkpoint_load(p.b.trainer, "run", &position, &size);
        p.s.w.fail_at = 0;
        ASSERT_EQ(blocks, p.s.w.blocks);
        ASSERT_EQ(handles, p.s.w.handles);
        if (r == QLORA_OK) {
            ASSERT_EQ(p.old_print, fingerprint(&p.b));
            if (p.s.w.operations < n) {
                break;
            }
            ASSERT(p.s.w.close_failed); // only closing a file that was read may fail unnoticed
            continue;
        }
        failures++;
        ASSERT(qlora_last_error(p.s.ctx)[0] != '\0');
        ASSERT_EQ('?', position);
        ASSERT_EQ(before, fingerprint(&p.b));
        ASSERT(n < 5000);
    }
    ASSERT(failures > 10);
    ASSERT(pair_end(&p));
    PASS();
}

typedef enum file_job { JOB_SAVE, JOB_LOAD, JOB_GGUF, JOB_MERGE, JOB_UNPACK } file_job;

static qlora_result job_run(file_job job, session* s) {
    switch (job) {
    case JOB_SAVE:
        return save_named(s->model, "out", "base");
    case JOB_LOAD:
        return qlora_adapter_load(s->model, "given", NULL);
    case JOB_GGUF:
        return qlora_adapter_save_gguf(s->model, "a.gguf", NULL);
    default:
        return merge_save(s->model, "merged", QLORA_BF16, QLORA_MERGE_TRAINED, 4000, NULL, NULL);
    }
}

// The model of a folder as a GGUF file, with a tokenizer and a chat template.
static bool file_make(stage* s) {
    static const char tokens[] =
        "{\"model\":{\"type\":\"BPE\",\"byte_fallback\":true,\"unk_token\":\"<unk>\",\"vocab\":"
        "{\"<unk>\":0,\"a\":1,\"b\":2,\"ab\":3,\"abb\":4},\"merges\":[\"a b\",\"ab b\"]}}";
    opening o = {0};
    session a;
    o.dir = "m";
    world_put(&s->w, "m/tokenizer.json", tokens, sizeof tokens - 1);
    world_put(&s->w, "m/chat_template.jinja", "{{ messages }}", 14);
    return session_open(s, &o, &a) &&
           merge_save(a.model, "m.gguf", QLORA_F32, QLORA_MERGE_ORIGINAL, 0, NULL, NULL) ==
               QLORA_OK &&
           session_close(&a);
}

// Every allocation and file operation fails once: an error is returned, nothing leaks, nothing is
// half done.
TEST failures_are_clean(const file_job* job) {
    static stage s;
    static world_file start[WORLD_FILES];
    ASSERT(stage_begin(&s, NULL));
    ASSERT(folder_make(&s, "m"));
    ASSERT(*job != JOB_UNPACK || file_make(&s));
    opening o = {0};
    o.dir = *job == JOB_UNPACK ? "m.gguf" : "m";
    o.base = QLORA_BASE_NF4;
    o.norms = *job != JOB_GGUF;
    o.targets = QLORA_TARGET_Q | QLORA_TARGET_UP;
    session a;
    ASSERT(session_open(&s, &o, &a));
    ASSERT(scramble(&a, "given"));
    uint64_t given = fingerprint(&a);
    ASSERT_EQ(QLORA_OK, save_named(a.model, "given", "base"));
    ASSERT_EQ(QLORA_OK, save_named(a.model, "out", "an older base"));
    size_t old_size = world_slot(s.w.files, "out/adapter_config.json")->size;
    ASSERT(scramble(&a, "other"));
    uint64_t other = fingerprint(&a);
    files_copy(start, s.w.files);
    long blocks = s.w.blocks;
    long handles = s.w.handles; // of the weights that the model has mapped
    int failures = 0;
    for (long n = 1;; n++) {
        files_copy(s.w.files, start);
        s.w.operations = 0;
        s.w.close_failed = false;
        s.w.fail_at = n;
        qlora_result r = job_run(*job, &a);
        s.w.fail_at = 0;
        ASSERT_EQ(blocks, s.w.blocks);
        ASSERT_EQ(handles, s.w.handles);
        if (r == QLORA_OK && s.w.operations < n) {
            break;
        }
        bool read_close = r == QLORA_OK && s.w.close_failed;
        ASSERT(r != QLORA_OK || read_close || *job >= JOB_MERGE);
        ASSERT_EQ(r == QLORA_OK, qlora_last_error(s.ctx)[0] == '\0');
        failures += r != QLORA_OK ? 1 : 0;
        if (*job == JOB_LOAD) {
            ASSERT_EQ(r == QLORA_OK ? given : other, fingerprint(&a));
            ASSERT(scramble(&a, "other"));
        }
        if (*job == JOB_SAVE && has_file(&s, "out/adapter_config.json")) {
            // a config is only ever next to the weights it was written for
            const world_file* config = world_slot(s.w.files, "out/adapter_config.json");
            bool old_config = config->size == old_size;
            ASSERT_EQ(old_config, same_tensors(s.ctx, "given/adapter_model.safetensors",
                                               "out/adapter_model.safetensors"));
        }
        if (r != QLORA_OK && *job >= JOB_MERGE && has_file(&s, "merged/config.json")) {
            opening m = {0};
            session b;
            m.dir = "merged";
            m.rank = -1;
            ASSERT(session_open(&s, &m, &b)); // only its last sync can have failed
            ASSERT(session_close(&b));
        }
        ASSERT(n < 5000);
    }
    ASSERT(failures > 10);
    files_drop(start);
    ASSERT(session_close(&a));
    ASSERT(stage_end(&s));
    PASS();
}

// What a kernel found out of range belongs to its step: it is reported until the step is cancelled.
TEST cancelling_clears_the_flag(const test_machine* machine) {
    static stage s;
    session a;
    opening o = {0};
    if (!stage_begin(&s, machine)) {
        SKIPm("no such machine");
    }
    ASSERT(folder_make(&s, "m"));
    o.dir = "m";
    o.base = QLORA_BASE_NF4;
    ASSERT(session_open(&s, &o, &a));
    int32_t ids[16];
    int32_t lengths[2];
    qlora_batch batch = batch_of(0, ids, lengths);
    ASSERT_EQ(QLORA_OK, qlora_train_micro(a.trainer, &batch, qlora_batch_labels(&batch)));
    const int32_t found = 1;
    qlora_train_info info;
    ASSERT_EQ(QLORA_OK, qlora__enter(s.ctx, "test"));
    ASSERT_EQ(QLORA_OK,
              qlora__leave(s.ctx, qlora__copy_in(s.ctx, a.model->flag.data, &found, sizeof found)));
    for (int i = 0; i < 2; i++) {
        ASSERT_EQ(QLORA_ERR_STATE, qlora_train_query(a.trainer, &info));
        ASSERT(strstr(qlora_last_error(s.ctx), "out of range") != NULL);
    }
    ASSERT_EQ(QLORA_OK, qlora_train_cancel(a.trainer));
    ASSERT(train_steps(&a, 0, 1));
    ASSERT_EQ(QLORA_OK, qlora_train_query(a.trainer, &info));
    ASSERT(session_close(&a));
    ASSERT(stage_end(&s));
    PASS();
}

// ---- an adapter folder is one unit ----

// What a model with (1) or without (0) trained norms loads from "out": a fingerprint, 0 if it
// refuses.
static uint64_t unit_load(session* loader) {
    if (!scramble(loader, "before")) {
        return 1;
    }
    return qlora_adapter_load(loader->model, "out", NULL) == QLORA_OK ? fingerprint(loader) : 0;
}

typedef struct unit_case {
    stage s;
    session writers[2]; // without and with trained norms
    session loaders[2];
    world_file files[WORLD_FILES]; // with the old adapter
    world_file disk[WORLD_FILES];
    uint64_t want[2][2]; // what each loader finds in the old and the new folder
    bool loads;          // the state after a crash loaded at least once
} unit_case;

static bool unit_begin(unit_case* u, int from, int to) {
    opening o = {0};
    memset(u, 0, sizeof *u);
    if (!stage_begin(&u->s, NULL) || !folder_make(&u->s, "m")) {
        return false;
    }
    o.dir = "m";
    o.base = QLORA_BASE_NF4;
    o.targets = QLORA_TARGET_Q;
    for (int i = 0; i < 2; i++) {
        o.norms = i == 1;
        if (!session_open(&u->s, &o, &u->writers[i]) || !session_open(&u->s, &o, &u->loaders[i])) {
            return false;
        }
    }
    bool good = true;
    for (int step = 0; step < 2; step++) {
        session* writer = &u->writers[step == 0 ? from : to];
        if (step == 1) {
            stage_apply(&u->s);
            files_copy(u->files, u->s.w.files);
            files_copy(u->disk, u->s.w.disk);
        }
        good = good && scramble(writer, step == 0 ? "old" : "new") &&
               save_named(writer->model, "out", "base") == QLORA_OK;
        for (int i = 0; i < 2; i++) {
            u->want[step][i] = unit_load(&u->loaders[i]);
        }
    }
    return good;
}

static void unit_rewind(unit_case* u) {
    stage_apply(&u->s);
    files_copy(u->s.w.files, u->files);
    files_copy(u->s.w.disk, u->disk);
    u->s.w.operations = 0;
}

// Whether both loaders find the old adapter, the new one, or nothing that loads.
static bool unit_holds(unit_case* u, const char* what, long n) {
    bool good = true;
    for (int i = 0; i < 2; i++) {
        uint64_t got = unit_load(&u->loaders[i]);
        good = good && (got == 0 || got == u->want[0][i] || got == u->want[1][i]);
        u->loads = u->loads || got != 0;
    }
    if (!good) {
        printf("\n%s at operation %ld: a mixture of two adapters loads\n", what, n);
    }
    return good;
}

// An adapter is written over another one, and every file operation fails once, or is the last one
// before the power goes. The norms of the old one never stay beside the matrices of the new one.
TEST adapter_folders_are_units(const int* way) {
    static unit_case u;
    int from = *way / 2;
    int to = *way % 2;
    ASSERT(unit_begin(&u, from, to));
    // The new folder is what was saved: with norms, only a model that has them loads it.
    ASSERT(u.want[1][1] != 0);
    ASSERT_EQ(to == 1, u.want[1][0] == 0);
    ASSERT_EQ(to == 1, has_file(&u.s, "out/trained_norms.safetensors"));
    ASSERT_FALSE(u.want[0][1] == u.want[1][1]);
    long operations = 0;
    for (int late = 0; late < 2; late++) {
        for (long cut = 1; cut <= operations + 1; cut++) {
            unit_rewind(&u);
            u.s.late = late != 0;
            u.s.w.cut_at = cut;
            ASSERT_EQ(QLORA_OK, save_named(u.writers[to].model, "out", "base"));
            operations = u.s.w.operations;
            for (int i = 0; i < u.s.change_count; i++) { // unsynced changes are lost
                free(u.s.changes[i].data);
            }
            u.s.change_count = 0;
            files_copy(u.s.w.files, u.s.w.disk);
            u.s.w.cut_at = 0;
            u.s.late = false;
            ASSERT(unit_holds(&u, late != 0 ? "late power cut" : "power cut", cut));
        }
    }
    for (long n = 1; n <= operations; n++) {
        unit_rewind(&u);
        u.s.w.fail_at = n;
        qlora_result r = save_named(u.writers[to].model, "out", "base");
        u.s.w.fail_at = 0;
        ASSERT(unit_holds(&u, "failure", n));
        ASSERT(r != QLORA_OK || unit_load(&u.loaders[1]) == u.want[1][1]);
        ASSERT_EQ(0, count_files(&u.s, "out/adapter_model.safetensors.tmp"));
    }
    ASSERT(u.loads && operations > 10);
    files_drop(u.files);
    files_drop(u.disk);
    for (int i = 0; i < 2; i++) {
        ASSERT(session_close(&u.writers[i]) && session_close(&u.loaders[i]));
    }
    ASSERT(stage_end(&u.s));
    PASS();
}

// ---- the base of a checkpoint ----

// Changes one byte or one word of a file of the world.
static void file_edit(stage* s, const char* name, const char* from, const char* to) {
    world_file* f = world_slot(s->w.files, name);
    size_t n = strlen(from);
    for (size_t i = 0; f != NULL && i + n <= f->size; i++) {
        if (memcmp(f->data + i, from, n) == 0) {
            memcpy(f->data + i, to, n);
            return;
        }
    }
    abort();
}

// A checkpoint continues on the same base in another folder, and on no other base.
TEST checkpoints_know_their_base(void) {
    static stage s;
    session a;
    opening o = {0};
    ASSERT(stage_begin(&s, NULL));
    ASSERT(folder_make(&s, "m"));
    o.dir = "m";
    o.base = QLORA_BASE_NF4;
    ASSERT(session_open(&s, &o, &a));
    ASSERT(train_steps(&a, 0, 1));
    ASSERT_EQ(QLORA_OK, qlora_checkpoint_save(a.trainer, "run", NULL, 0));
    ASSERT(session_close(&a));
    static const char* const files[] = {"config.json", "generation_config.json",
                                        "model.safetensors"};
    static const struct {
        const char* from;
        const char* to;
        const char* says; // NULL: the same model
    } edits[] = {{"", "", NULL},
                 {"\"max_position_embeddings\":64", "\"max_position_embeddings\":65", NULL},
                 {"\"rms_norm_eps\":1e-5", "\"rms_norm_eps\":1e-6", "config"},
                 {"\"rope_theta\":10000.0", "\"rope_theta\":20000.0", "config"},
                 {NULL, NULL, "weights"}};
    for (size_t i = 0; i < sizeof edits / sizeof edits[0]; i++) {
        for (int k = 0; k < 3; k++) { // another folder with the same contents
            char from[WORLD_NAME];
            char to[WORLD_NAME];
            snprintf(from, sizeof from, "m/%s", files[k]);
            snprintf(to, sizeof to, "copy/%s", files[k]);
            const world_file* f = world_slot(s.w.files, from);
            world_put(&s.w, to, f->data, f->size);
        }
        if (edits[i].from != NULL) {
            file_edit(&s, "copy/config.json", edits[i].from, edits[i].to);
        } else {
            world_file* f = world_slot(s.w.files, "copy/model.safetensors");
            f->data[f->size - 3] ^= 1;
        }
        o.dir = "copy";
        ASSERT(session_open(&s, &o, &a));
        qlora_result r = qlora_checkpoint_load(a.trainer, "run", NULL, NULL);
        if (edits[i].says == NULL) {
            ASSERT_EQm(qlora_last_error(s.ctx), QLORA_OK, r);
        } else {
            ASSERT_EQ(QLORA_ERR_STATE, r);
            ASSERT(strstr(qlora_last_error(s.ctx), "another base model: its ") != NULL);
            ASSERT(strstr(qlora_last_error(s.ctx), edits[i].says) != NULL);
        }
        ASSERT(session_close(&a));
    }
    ASSERT(stage_end(&s));
    PASS();
}

// ---- scaled rotations ----

// What cannot be scaled is refused by name.
TEST scalings_are_checked(void) {
    static const struct {
        const char* scale;
        const char* from; // of the config
        const char* to;
        const char* says;
    } cases[] = {
        {"yarn:4", "", "", NULL},
        {"linear:1.5", "", "", NULL},
        {"", "", "", "it must be yarn:F or linear:F"},
        {"yarn", "", "", "it must be yarn:F or linear:F"},
        {"yarn:", "", "", "it must be yarn:F or linear:F"},
        {"yarn:4x", "", "", "it must be yarn:F or linear:F"},
        {"yarn:-4", "", "", "it must be yarn:F or linear:F"},
        {"yarn:4.", "", "", "it must be yarn:F or linear:F"},
        {"llama3:8", "", "", "it must be yarn:F or linear:F"},
        {"yarn:1", "", "", "greater than 1"},
        {"yarn:1025", "", "", "at most 1024"},
        {"yarn:1.01", "", "", "64.64"},
        {"dynamic:2", "", "", "dynamic scaling is not supported"},
        {"yarn:4", "\"rope_theta\":10000.0",
         "\"rope_scaling\":{\"rope_type\":\"linear\",\"factor\":2.0}",
         "already has a scaled rotation (rope_type linear)"}};
    static const struct {
        qlora_family family;
        const char* says;
    } families[] = {{QLORA_FAMILY_PHI3, "longrope only"},
                    {QLORA_FAMILY_OLMO3, "with and without a window"},
                    {QLORA_FAMILY_MINISTRAL3, "a scaling of its own"},
                    {QLORA_FAMILY_QWEN3_VL, "multimodal"}};
    static stage s;
    ASSERT(stage_begin(&s, NULL));
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        qlora_model_config c;
        char text[1024];
        const char* at = strstr(adapter_config_text, cases[i].from);
        ASSERT(at != NULL);
        snprintf(text, sizeof text, "%.*s%s%s", (int)(at - adapter_config_text),
                 adapter_config_text, cases[i].to, at + strlen(cases[i].from));
        world_put(&s.w, "c/config.json", text, strlen(text));
        ASSERT_EQm(cases[i].scale, QLORA_OK, qlora_config_read(s.ctx, "c", &c));
        qlora_result r = qlora_config_scale(s.ctx, cases[i].scale, &c);
        if (cases[i].says == NULL) {
            ASSERT_EQm(qlora_last_error(s.ctx), QLORA_OK, r);
            ASSERT_EQ(i == 0 ? (int64_t)256 : (int64_t)96, c.max_positions);
        } else {
            ASSERTm(cases[i].scale, r == QLORA_ERR_ARGUMENT || r == QLORA_ERR_UNSUPPORTED);
            ASSERTm(qlora_last_error(s.ctx), strstr(qlora_last_error(s.ctx), cases[i].says));
            ASSERT_EQ((int64_t)64, c.max_positions);
        }
    }
    for (size_t i = 0; i < sizeof families / sizeof families[0]; i++) {
        qlora_model_config c;
        ASSERT(folder_make(&s, "m"));
        ASSERT_EQ(QLORA_OK, qlora_config_read(s.ctx, "m", &c));
        c.family = families[i].family;
        ASSERT_EQ(QLORA_ERR_UNSUPPORTED, qlora_config_scale(s.ctx, "yarn:4", &c));
        ASSERTm(qlora_last_error(s.ctx), strstr(qlora_last_error(s.ctx), families[i].says));
    }
    ASSERT(stage_end(&s));
    PASS();
}

// An adapter, a checkpoint and a plan belong to their scaling, and a merged folder has it.
TEST scalings_are_kept(void) {
    static const char* const others[] = {NULL, "yarn:4", "linear:2"};
    static float logits[3][LOGITS];
    static stage s;
    static qlora_plan made;
    session a;
    opening o = {0};
    qlora_model_desc desc;
    memset(&desc, 0, sizeof desc);
    ASSERT(stage_begin(&s, NULL));
    ASSERT(folder_make(&s, "m"));
    desc.dir = "m";
    desc.tokens = 96;
    desc.max_length = 96;
    ASSERT(opens_with(&s, &desc, "longer texts need desc.rope_scale"));
    desc.rope_scale = "yarn:2";
    ASSERT(opens_with(&s, &desc, NULL));
    ASSERT_EQ(QLORA_OK, qlora_plan_make(s.ctx, &desc, NULL, &made));
    desc.plan = &made;
    ASSERT(opens_with(&s, &desc, NULL));
    desc.rope_scale = "yarn:4";
    ASSERT(opens_with(&s, &desc, "rope_scale"));
    o.dir = "m";
    o.base = QLORA_BASE_32BIT;
    ASSERT(session_open(&s, &o, &a));
    ASSERT(logits_of(&a, logits[2]));
    ASSERT(session_close(&a));
    o.scale = "yarn:2";
    ASSERT(session_open(&s, &o, &a));
    ASSERT(logits_of(&a, logits[0])); // the adapters are still zero
    ASSERT(memcmp(logits[0], logits[2], sizeof logits[0]) != 0);
    ASSERT(train_steps(&a, 0, 1));
    ASSERT(scramble(&a, "scaled"));
    ASSERT(logits_of(&a, logits[0]));
    ASSERT_EQ(QLORA_OK, save_named(a.model, "scaled", "m"));
    ASSERT_EQ(QLORA_OK, qlora_checkpoint_save(a.trainer, "run", NULL, 0));
    ASSERT_EQ(QLORA_OK,
              merge_save(a.model, "wide", QLORA_F32, QLORA_MERGE_ORIGINAL, 0, NULL, NULL));
    ASSERT(session_close(&a));
    o.scale = NULL;
    o.dir = "wide"; // with its own config
    ASSERT(session_open(&s, &o, &a));
    ASSERT(logits_of(&a, logits[1]));
    ASSERT_CLOSE(logits[0], logits[1], LOGITS, 1e-4, 1e-4);
    ASSERT_EQ((int64_t)128, a.model->plan.config.max_positions);
    ASSERT(session_close(&a));
    desc.plan = NULL;
    for (int i = 0; i < 3; i++) {
        desc.rope_scale = others[i];
        desc.adapter = "scaled";
        desc.max_length = 32;
        ASSERT(opens_with(&s, &desc, "trained with the scaling \"yarn:2\""));
        o.dir = "m";
        o.scale = others[i];
        ASSERT(session_open(&s, &o, &a));
        ASSERT_EQ(QLORA_ERR_STATE, qlora_checkpoint_load(a.trainer, "run", NULL, NULL));
        ASSERT(session_close(&a));
    }
    o.scale = "yarn:2";
    o.adapter = "scaled";
    ASSERT(session_open(&s, &o, &a));
    ASSERT(logits_of(&a, logits[1]));
    ASSERT_MEM_EQ(logits[0], logits[1], sizeof logits[0]);
    ASSERT(session_close(&a));
    desc.dir = "wide"; // an adapter also fits a base that is scaled alike
    desc.rope_scale = NULL;
    ASSERT(opens_with(&s, &desc, NULL));
    desc.rope_scale = "yarn:2";
    ASSERT(opens_with(&s, &desc, "already has a scaled rotation (rope_type yarn)"));
    ASSERT(stage_end(&s));
    PASS();
}

// Every field of a config that changes the computation changes its hash, and no other one does. A
// new field changes the size of the struct: then decide, and add it to qlora__identity_config.
TEST every_field_of_the_config_counts(void) {
    qlora_model_config c;
    memset(&c, 0, sizeof c);
    c.layers = 3;
    uint64_t want = qlora__identity_config(&c);
    ASSERT_EQ_FMT((size_t)3328, sizeof c, "%zu");
    const size_t fields[][2] = {
#define FIELD(name) {offsetof(qlora_model_config, name), sizeof c.name}
        FIELD(family),
        FIELD(vocab),
        FIELD(hidden),
        FIELD(intermediate),
        FIELD(heads),
        FIELD(kv_heads),
        FIELD(head_dim),
        FIELD(window),
        FIELD(tied),
        FIELD(qkv_bias),
        FIELD(o_bias),
        FIELD(mlp_bias),
        FIELD(qk_norm),
        FIELD(rms_eps),
        FIELD(rope.theta),
        FIELD(rope.factor),
        FIELD(rope_sliding.beta_fast),
        FIELD(rope.no_truncate),
        FIELD(rope_sliding.type),
        FIELD(sliding),
        FIELD(no_rope),
        FIELD(rope.short_factor),
        FIELD(rope_sliding.long_factor),
        FIELD(rope_dims),
        FIELD(embedding_scale),
        FIELD(residual_scale),
        FIELD(attention_scale),
        FIELD(logits_divisor),
        FIELD(attention_cap),
        FIELD(logits_cap),
        FIELD(query_beta),
        FIELD(query_period),
        FIELD(norm_offset),
        FIELD(experts), // from here on, only with experts
        FIELD(experts_per_token),
        FIELD(expert_intermediate),
        FIELD(shared_intermediate),
        FIELD(expert_groups),
        FIELD(expert_groups_used),
        FIELD(routed_scale),
        FIELD(renormalise),
        FIELD(dense),
#undef FIELD
    };
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        qlora_model_config other = c;
        other.experts = fields[i][0] > offsetof(qlora_model_config, experts) ? 4 : 0;
        uint64_t before = qlora__identity_config(&other);
        ((unsigned char*)&other)[fields[i][0]] ^= 1;
        ASSERT(qlora__identity_config(&other) != before);
    }
    c.dtype = 2;
    c.stop_count = 1;
    c.stop_ids[0] = 7;
    c.bos_id = 5;
    c.pad_id = 6;
    c.max_positions = 99;
    c.quantized = true;
    c.rope.use_long = !c.rope.use_long; // of the plan; a row of its own in a checkpoint
    c.router_loss = true;
    ASSERT(qlora__identity_config(&c) == want);
    PASS();
}

// A mixture of experts with random weights, whose experts, router and norms are trained.
static bool experts_open(stage* s, const char* adapter, uint32_t targets, session* out) {
    qlora_model_config c;
    qlora_model_desc desc;
    qlora_train_desc train;
    memset(&c, 0, sizeof c);
    memset(&desc, 0, sizeof desc);
    memset(&train, 0, sizeof train);
    memset(out, 0, sizeof *out);
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
    c.qkv_bias = true;
    c.experts = 5;
    c.experts_per_token = 2;
    c.expert_intermediate = 8;
    c.shared_intermediate = 12;
    c.dense[1] = 1;
    desc.config = &c;
    desc.adapter = adapter;
    desc.mode = QLORA_MODE_F32;
    desc.rank = 3;
    desc.targets = targets;
    desc.train_norms = true;
    desc.tokens = 32;
    desc.max_sequences = 4;
    desc.seed = 11;
    desc.weight_std = 0.2f;
    train.lr = 0.01;
    train.total_steps = 20;
    return qlora_model_open(s->ctx, &desc, &out->model) == QLORA_OK &&
           qlora_trainer_create(out->model, &train, &out->trainer) == QLORA_OK;
}

// Adapters of experts, beside trained norms, and the state of their training come back as they
// were, whichever parameters of the experts there are.
TEST experts_come_back(void) {
    static const uint32_t targets[] = {QLORA_TARGET_ATTENTION | QLORA_TARGET_EXPERTS_IN |
                                           QLORA_TARGET_EXPERTS_OUT,
                                       QLORA_TARGET_EXPERTS_IN | QLORA_TARGET_ROUTER,
                                       QLORA_TARGET_EXPERTS_OUT | QLORA_TARGET_SHARED_GATE};
    stage s;
    session a;
    session b;
    ASSERT(stage_begin(&s, NULL));
    for (size_t i = 0; i < sizeof targets / sizeof targets[0]; i++) {
        ASSERT(experts_open(&s, NULL, targets[i], &a));
        ASSERT(scramble(&a, "experts"));
        ASSERT(train_steps(&a, 0, 1));
        ASSERT_EQ(QLORA_OK, qlora_adapter_save(a.model, "e", NULL));
        ASSERT_EQ(QLORA_OK, qlora_checkpoint_save(a.trainer, "run", NULL, 0));
        uint64_t want = fingerprint(&a);
        ASSERT(experts_open(&s, "e", 0, &b));
        ASSERT_EQ(QLORA_OK, qlora_checkpoint_load(b.trainer, "run", NULL, NULL));
        ASSERT(fingerprint(&b) == want);
        ASSERT_EQ(QLORA_OK, qlora_adapter_save(b.model, "f", NULL));
        const world_file* first = world_slot(s.w.files, "e/adapter_model.safetensors");
        const world_file* again = world_slot(s.w.files, "f/adapter_model.safetensors");
        ASSERT(first != NULL && again != NULL && first->size == again->size);
        ASSERT_MEM_EQ(first->data, again->data, first->size);
        ASSERT_EQ(QLORA_ERR_UNSUPPORTED, qlora_adapter_save_gguf(a.model, "e.gguf", NULL));
        ASSERT(session_close(&b));
        ASSERT(session_close(&a));
    }
    ASSERT(stage_end(&s));
    PASS();
}

// Of a large tensor, a change anywhere in the blocks that are hashed is seen, and so are the first
// and the last byte.
TEST large_tensors_are_sampled(void) {
    static uint8_t bytes[(1 << 20) + 5];
    qlora__st_tensor t;
    qlora__hash h;
    memset(&t, 0, sizeof t);
    t.data = bytes;
    t.bytes = sizeof bytes;
    static const size_t places[] = {0, 4095, sizeof bytes - 1, sizeof bytes - 4096};
    qlora__hash_begin(&h);
    qlora__identity_tensor(&h, "x", &t);
    uint64_t want = qlora__hash_end(&h);
    ASSERT_EQ_FMT((int)(2 + 16 + 64 * 4096), (int)h.bytes, "%d");
    for (size_t i = 0; i < sizeof places / sizeof places[0]; i++) {
        bytes[places[i]] = 1;
        qlora__hash_begin(&h);
        qlora__identity_tensor(&h, "x", &t);
        ASSERT(qlora__hash_end(&h) != want);
        bytes[places[i]] = 0;
    }
    PASS();
}

// If any byte of this file of the newest checkpoint is wrong, the older one, of step 4, is loaded.
static bool damage_is_seen(stage* s, session* a, const char* path) {
    world_file* file = world_slot(s->w.files, path);
    bool ok = file != NULL && file->size > 0;
    for (size_t at = 0; ok && at < file->size; at += 97) {
        int value = 0;
        size_t size = sizeof value;
        file->data[at] ^= 0x10;
        ok = qlora_checkpoint_load(a->trainer, "run", &value, &size) == QLORA_OK && value == 4 &&
             size == sizeof value;
        file->data[at] ^= 0x10;
    }
    return ok;
}

TEST checkpoints_are_kept_and_checked(void) {
    static stage s;
    ASSERT(stage_begin(&s, NULL));
    ASSERT(folder_make(&s, "m"));
    opening o = {0};
    o.dir = "m";
    o.base = QLORA_BASE_NF4;
    o.dropout = 0.1f;
    o.targets = QLORA_TARGET_Q;
    session a;
    bool exists = true;
    char position[4];
    size_t size = 0;
    ASSERT_EQ(QLORA_OK, qlora_checkpoint_exists(s.ctx, "run", &exists));
    ASSERT_FALSE(exists);
    ASSERT(session_open(&s, &o, &a));
    ASSERT_EQ(QLORA_ERR_FILE, qlora_checkpoint_load(a.trainer, "run", NULL, NULL));
    uint64_t prints[5];
    for (int i = 1; i < 5; i++) {
        ASSERT(train_steps(&a, i, 1));
        ASSERT_EQ(QLORA_OK, qlora_checkpoint_save(a.trainer, "run", &i, sizeof i));
        prints[i] = fingerprint(&a);
    }
    ASSERT(has_file(&s, "run/step-4/state.safetensors") &&
           has_file(&s, "run/step-3/state.safetensors"));
    ASSERT(!has_file(&s, "run/step-2/state.safetensors") && !has_file(&s, "run/pending"));
    ASSERT_EQ(QLORA_OK, qlora_checkpoint_exists(s.ctx, "run", &exists));
    ASSERT(exists);
    ASSERT_EQ(QLORA_ERR_ARGUMENT,
              qlora_checkpoint_load(a.trainer, "run", position, &size)); // buffer too small
    // a checkpoint's adapter is a valid adapter
    ASSERT_EQ(QLORA_OK, qlora_adapter_load(a.model, "run/step-3", NULL));
    // saving the same step again uses a new folder and never overwrites
    ASSERT_EQ(QLORA_OK, qlora_checkpoint_load(a.trainer, "run", NULL, NULL));
    ASSERT_EQ(prints[4], fingerprint(&a));
    ASSERT_EQ(QLORA_OK, qlora_checkpoint_save(a.trainer, "run", NULL, 0));
    ASSERT(has_file(&s, "run/step-4-2/state.safetensors") &&
           has_file(&s, "run/step-4/state.safetensors"));
    // every damaged byte is detected, and the older checkpoint is used
    ASSERT(damage_is_seen(&s, &a, "run/step-4-2/state.safetensors"));
    ASSERT(damage_is_seen(&s, &a, "run/step-4-2/adapter_model.safetensors"));
    ASSERT(damage_is_seen(&s, &a, "run/step-4-2/adapter_config.json"));
    // half a step
    ASSERT_EQ(QLORA_OK, qlora_checkpoint_load(a.trainer, "run", NULL, NULL));
    ASSERT(train_steps(&a, 4, 1));
    uint64_t next = fingerprint(&a);
    ASSERT_EQ(QLORA_OK, qlora_checkpoint_load(a.trainer, "run", NULL, NULL));
    int32_t ids[16];
    int32_t lengths[2];
    qlora_batch b = batch_of(1, ids, lengths);
    ASSERT_EQ(QLORA_OK, qlora_train_micro(a.trainer, &b, 10.0));
    ASSERT_EQ(QLORA_ERR_STATE, qlora_checkpoint_save(a.trainer, "run", NULL, 0));
    ASSERT_EQ(QLORA_OK, qlora_checkpoint_load(a.trainer, "run", NULL, NULL)); // drops the half step
    ASSERT_EQ(prints[4], fingerprint(&a));
    ASSERT(train_steps(&a, 4, 1));
    ASSERT_EQ(next, fingerprint(&a));
    ASSERT(session_close(&a));
    // settings that change results
    opening others[3] = {o, o, o};
    others[0].seed = 5;
    others[1].dropout = 0.2f;
    others[2].base = QLORA_BASE_32BIT;
    static const char* const what[] = {"dropout_seed", "dropout", "base"};
    for (int i = 0; i < 3; i++) {
        ASSERT(session_open(&s, &others[i], &a));
        uint64_t before = fingerprint(&a);
        ASSERT_EQ(QLORA_ERR_STATE, qlora_checkpoint_load(a.trainer, "run", NULL, NULL));
        ASSERT(strstr(qlora_last_error(s.ctx), what[i]) != NULL);
        ASSERT_EQ(before, fingerprint(&a));
        ASSERT(session_close(&a));
    }
    // settings that may differ: tokens on the CPU
    o.tokens = 40;
    ASSERT(session_open(&s, &o, &a));
    ASSERT_EQ(QLORA_OK, qlora_checkpoint_load(a.trainer, "run", NULL, NULL));
    ASSERT_EQ(prints[4], fingerprint(&a));
    // a list that points elsewhere
    static const char* const lists[] = {"",        "step-4",      "../step-4\n",
                                        "step-\n", "step-4/..\n", "\n"};
    for (size_t i = 0; i < sizeof lists / sizeof lists[0]; i++) {
        world_put(&s.w, "run/latest", lists[i], strlen(lists[i]));
        ASSERT_EQ(QLORA_ERR_FORMAT, qlora_checkpoint_load(a.trainer, "run", NULL, NULL));
        ASSERT_EQ(QLORA_ERR_FORMAT, qlora_checkpoint_save(a.trainer, "run", NULL, 0));
    }
    ASSERT(session_close(&a));
    ASSERT(stage_end(&s));
    PASS();
}

// Between a plan and the loaded weights, each file is opened once per call, and config.json is not
// read again when a plan is given.
TEST folders_are_read_once(void) {
    static const char* const names[] = {"config.json", "model.safetensors", "adapter_config.json",
                                        "adapter_model.safetensors"};
    static const int want[2][4] = {{1, 1, 1, 1}, {1, 2, 2, 2}};
    for (int planned = 0; planned < 2; planned++) {
        static stage s;
        qlora_model_desc desc;
        qlora_plan made;
        qlora_model* model = NULL;
        memset(&desc, 0, sizeof desc);
        desc.dir = "./tests/golden/tiny/model-bnb4";
        desc.adapter = "./tests/golden/tiny/adapter0";
        desc.tokens = 64;
        ASSERT(stage_begin(&s, NULL));
        if (planned == 1) {
            ASSERT_EQm(qlora_last_error(s.ctx), QLORA_OK,
                       qlora_plan_make(s.ctx, &desc, NULL, &made));
            desc.plan = &made;
        }
        ASSERT_EQm(qlora_last_error(s.ctx), QLORA_OK, qlora_model_open(s.ctx, &desc, &model));
        for (int i = 0; i < 4; i++) {
            ASSERT_EQ_FMT(want[planned][i], stage_mapped(&s, names[i]), "%d");
        }
        if (planned == 1) { // a plan of another folder
            qlora_model* other = NULL;
            desc.adapter = "./tests/golden/tiny/adapter20";
            ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_model_open(s.ctx, &desc, &other));
            ASSERT(strstr(qlora_last_error(s.ctx), "another model folder, adapter") != NULL);
        }
        ASSERT_EQ(QLORA_OK, qlora_model_close(model));
        ASSERT(stage_end(&s));
    }
    PASS();
}

// ---- PEFT's own files ----

// Plans what the tests of a folder do; false: the library refuses some of it as unsupported. Its
// message, the only judge, is printed, so that a folder is tested as soon as it is supported.
static bool fixture_is_supported(const char* dir) {
    static stage s;
    char model[512];
    char adapter[512];
    qlora_model_desc desc;
    qlora_plan made;
    memset(&desc, 0, sizeof desc);
    snprintf(model, sizeof model, "%s/model", dir);
    snprintf(adapter, sizeof adapter, "%s/adapter0", dir);
    desc.dir = model;
    desc.adapter = adapter;
    desc.tokens = 64;
    if (!stage_begin(&s, NULL)) {
        return true; // the tests say what is wrong
    }
    bool refused = qlora_plan_make(s.ctx, &desc, NULL, &made) == QLORA_ERR_UNSUPPORTED;
    if (refused) {
        printf("not tested: %s\n", qlora_last_error(s.ctx));
    }
    return !stage_end(&s) || !refused;
}

TEST fixture_adapters_survive(const char* dir) {
    static stage s;
    char model[512];
    char adapter[512];
    char file[600];
    snprintf(model, sizeof model, "%s/model", dir);
    snprintf(adapter, sizeof adapter, "%s/adapter0", dir);
    snprintf(file, sizeof file, "%s/adapter_model.safetensors", adapter);
    ASSERT(stage_begin(&s, NULL));
    opening o = {0};
    o.dir = model;
    o.adapter = adapter;
    o.base = QLORA_BASE_32BIT;
    session a;
    ASSERT(session_open(&s, &o, &a));
    ASSERT_EQ(QLORA_OK, qlora_adapter_save(a.model, "out", NULL));
    ASSERT(same_tensors(s.ctx, file, "out/adapter_model.safetensors"));
    uint64_t want = fingerprint(&a);
    ASSERT(session_close(&a));
    o.adapter = "out";
    ASSERT(session_open(&s, &o, &a));
    ASSERT_EQ(want, fingerprint(&a));
    ASSERT(session_close(&a));
    ASSERT(stage_end(&s));
    PASS();
}

static bool folder_has(const char* dir, const char* name) {
    char path[800];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE* f = fopen(path, "rb");
    if (f != NULL) {
        fclose(f);
    }
    return f != NULL;
}

static float* fixture_logits(session* s, size_t* count) {
    int32_t ids[16];
    int32_t lengths[2];
    qlora_batch b = batch_of(3, ids, lengths);
    lengths[0] = 7;
    *count = 13 * (size_t)model_plan(s->model)->config.vocab;
    float* out = (float*)malloc(*count * sizeof *out);
    return qlora_eval_logits(s->model, &b, out) == QLORA_OK ? out : NULL;
}

// Every tensor of the merged folder has the shape of that in the 16-bit folder and, but for what 4
// bits lose and the adapter adds, its values: those of a vision part too.
static bool merged_resembles(qlora_ctx* ctx, const char* merged, const char* original) {
    static qlora__folder a;
    static qlora__folder b;
    bool good = qlora__folder_open(&ctx->env, merged, &a) == QLORA_OK &&
                qlora__folder_open(&ctx->env, original, &b) == QLORA_OK && a.count == b.count;
    for (uint32_t i = 0; good && i < a.count; i++) {
        const qlora__st_tensor* x = a.entries[i].tensor;
        const qlora__st_tensor* y = qlora__folder_find(&b, a.entries[i].name);
        good = y != NULL && x->dtype == QLORA__ST_F32 && x->rank == y->rank &&
               memcmp(x->shape, y->shape, x->rank * sizeof x->shape[0]) == 0;
        double difference = 0.0;
        double size = 1e-30;
        for (uint64_t k = 0; good && k < qlora__st_elements(x); k++) {
            float p = 0.0f;
            float q = 0.0f;
            qlora__st_read_f32(x, k, 1, &p);
            qlora__st_read_f32(y, k, 1, &q);
            difference += ((double)p - (double)q) * ((double)p - (double)q);
            size += (double)q * (double)q;
        }
        bool adapted = strncmp(a.entries[i].name, "layers.", 7) == 0;
        good = good && (adapted || difference <= 0.04 * size);
        if (!good) {
            fprintf(stderr, "%s\n", a.entries[i].name);
        }
    }
    qlora__folder_close(&ctx->env, &a);
    qlora__folder_close(&ctx->env, &b);
    return good;
}

// bitsandbytes' 4-bit weights are exported as plain ones; the result is the same for either base.
TEST fixture_merges(const char* dir) {
    static stage s;
    char model[512];
    char adapter[512];
    snprintf(model, sizeof model, "%s/model-bnb4", dir);
    opening o = {0};
    if (!folder_has(model, "config.json")) { // no such folder exists of this family
        snprintf(model, sizeof model, "%s/model", dir);
        o.base = QLORA_BASE_32BIT;
    }
    snprintf(adapter, sizeof adapter, "%s/adapter20", dir);
    ASSERT(stage_begin(&s, NULL));
    o.dir = model;
    o.adapter = adapter;
    session a;
    ASSERT(session_open(&s, &o, &a));
    size_t n = 0;
    float* want = fixture_logits(&a, &n);
    ASSERT_EQ(QLORA_OK, merge_save(a.model, "t", QLORA_F32, QLORA_MERGE_TRAINED, 0, NULL, NULL));
    ASSERT_EQ(QLORA_OK,
              merge_save(a.model, "o", QLORA_F32, QLORA_MERGE_ORIGINAL, 100000, NULL, NULL));
    ASSERT(session_close(&a));
    qlora_model* alone = NULL;
    ASSERT_EQ(QLORA_OK, adapter_alone(&s, model, adapter, false, &alone));
    ASSERT_EQ(QLORA_OK, merge_save(alone, "w", QLORA_F32, QLORA_MERGE_ORIGINAL, 0, NULL, NULL));
    ASSERT(same_file(&s, "t/model.safetensors", "w/model.safetensors"));
    ASSERT_EQ(QLORA_OK, qlora_model_close(alone));
    char original[512];
    snprintf(original, sizeof original, "%s/model", dir);
    ASSERT(merged_resembles(s.ctx, "t", original));
    for (int i = 0; i < 2; i++) {
        opening merged = {0};
        merged.dir = i == 0 ? "t" : "o";
        merged.base = QLORA_BASE_32BIT;
        merged.rank = -1;
        ASSERT(session_open(&s, &merged, &a));
        ASSERT_FALSE(model_plan(a.model)->config.quantized);
        float* got = fixture_logits(&a, &n);
        ASSERT(want != NULL && got != NULL);
        ASSERT_REL_L2(want, got, n, 5e-6);
        free(got);
        ASSERT(session_close(&a));
    }
    free(want);
    ASSERT(stage_end(&s));
    PASS();
}

// Every folder below one of the shared ones; returns how many there are.
static int run_fixtures_of(const char* root) {
    int count = 0;
    DIR* folder = opendir(root);
    for (struct dirent* e = NULL; folder != NULL && (e = readdir(folder)) != NULL;) {
        char dir[512];
        snprintf(dir, sizeof dir, "%.400s/%.100s", root, e->d_name);
        if (e->d_name[0] == '.' || !folder_has(dir, "adapter0/adapter_config.json")) {
            continue;
        }
        count++;
        if (!fixture_is_supported(dir)) {
            continue;
        }
        greatest_set_test_suffix(e->d_name);
        RUN_TESTp(fixture_adapters_survive, dir);
        greatest_set_test_suffix(e->d_name);
        RUN_TESTp(fixture_merges, dir);
    }
    if (folder != NULL) {
        closedir(folder);
    }
    return count;
}

static void run_fixtures(void) {
    static const char* const folders[] = {"fixtures", "experts", "blocks", "hybrids"};
    const char* shared = getenv("QLORA_SHARED");
    for (int i = 0; i < 4; i++) {
        char root[480];
        snprintf(root, sizeof root, "%.400s/%s", shared != NULL ? shared : "../shared", folders[i]);
        if (run_fixtures_of(root) == 0) {
            printf("no folders under %s: PEFT's own adapters there are not tested\n", root);
        }
    }
}

SUITE(adapter_suite) {
    RUN_ON(TEST_ONE_EACH, saved_adapters_come_back);
    RUN_TEST(norms_are_in_the_peft_file);
    RUN_TEST(adapters_know_their_base);
    RUN_TEST(patterns_survive);
    RUN_TEST(dora_of_other_folders);
    RUN_TEST(rows_of_a_head_of_its_own);
    RUN_TEST(whole_heads_of_their_own_are_refused);
    RUN_TEST(folders_are_read_once);
    static const int ways[] = {0, 1, 2, 3};
    for (int i = 0; i < 4; i++) {
        RUN_TEST1(adapter_folders_are_units, &ways[i]);
    }
    RUN_TEST(checkpoints_know_their_base);
    RUN_TEST(scalings_are_checked);
    RUN_TEST(scalings_are_kept);
    RUN_ON(TEST_ONE_EACH, cancelling_clears_the_flag);
    RUN_TEST(every_field_of_the_config_counts);
    RUN_TEST(experts_come_back);
    RUN_TEST(large_tensors_are_sampled);
    static const char* const adapters[] = {NULL, "pattern"};
    for (int i = 0; i < 2; i++) {
        greatest_set_test_suffix(i == 0 ? "plain" : "pattern");
        RUN_TESTp(gguf_is_what_llama_cpp_reads, adapters[i]);
    }
    RUN_TEST(gguf_of_a_wrapped_mistral);
    static const merge_case merges[] = {
        {QLORA_BASE_32BIT, QLORA_MERGE_ORIGINAL, false, 0},
        {QLORA_BASE_32BIT, QLORA_MERGE_TRAINED, true, 3000},
        {QLORA_BASE_NF4, QLORA_MERGE_TRAINED, false, 3000},
        {QLORA_BASE_NF4, QLORA_MERGE_TRAINED, true, 1},
    };
    for (size_t i = 0; i < sizeof merges / sizeof merges[0]; i++) {
        char suffix[16];
        snprintf(suffix, sizeof suffix, "%u", (unsigned)i);
        greatest_set_test_suffix(suffix);
        RUN_TESTp(merged_models_answer_alike, &merges[i]);
    }
    RUN_ON(TEST_ONE_EACH, merging_is_the_same_everywhere);
    RUN_TEST(merges_round_stop_and_refuse);
    RUN_TESTp(adapters_need_no_weights, false);
    RUN_TESTp(adapters_need_no_weights, true);
    RUN_ON(TEST_ONE_EACH, resuming_is_bitwise);
    RUN_TEST(resuming_names_the_tier);
    RUN_ON(TEST_ONE_EACH, resuming_names_the_length);
    RUN_TEST(power_cuts_leave_old_or_new);
    RUN_TEST(failed_saves_leave_old_or_new);
    RUN_TEST(failed_loads_change_nothing);
    static const file_job jobs[] = {JOB_SAVE, JOB_LOAD, JOB_GGUF, JOB_MERGE, JOB_UNPACK};
    static const char* const job_names[] = {"save", "load", "gguf", "merge", "unpack"};
    for (int i = 0; i < 5; i++) {
        greatest_set_test_suffix(job_names[i]);
        RUN_TESTp(failures_are_clean, &jobs[i]);
    }
    RUN_TEST(checkpoints_are_kept_and_checked);
    run_fixtures();
}
