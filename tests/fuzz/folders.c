// folders.c - libFuzzer target: a valid model, adapter or checkpoint folder with one change.
//
// The first byte selects the folder, the others the change (see mutate.h). Opening must succeed or
// fail with a message, leak nothing, and never need more memory than for the valid folder and ten
// times the size of the files. What is accepted must mean what the change says: rules for the
// values of the configs (folder_models.h), the format of safetensors checked a second time, and for
// checkpoints the same state as before. Sometimes a file call or an allocation fails as well. Run
// it in the root of the repository, with -timeout=5.
#include "formats_world.h"

#include <regex.h>

#include "fuzz/folder_models.h"

#define FILES 16
#define TOKENS 12

enum { MODEL, ADAPTER, CHECKPOINT, KINDS };

typedef struct file {
    char name[WORLD_NAME];
    buffer bytes;
} file;

typedef struct folders {
    file files[FILES];
    int count;
    int first[KINDS + 1]; // of each folder's files; the last is their end
    size_t peak[KINDS];
    uint64_t print[KINDS]; // of the results
    bool extras;           // as in folder_config
    bool ready;
} folders;

// What one attempt did.
typedef struct attempt {
    qlora_result result;
    uint64_t print;
    size_t peak;
} attempt;

static size_t memory_now;
static size_t memory_peak;

static void* counted_alloc(size_t bytes, size_t align, void* user) {
    void* pointer = world_alloc(bytes, align, user);
    memory_now += pointer != NULL ? bytes : 0;
    memory_peak = memory_now > memory_peak ? memory_now : memory_peak;
    return pointer;
}

static void counted_free(void* pointer, size_t bytes, void* user) {
    memory_now -= bytes;
    world_free(pointer, bytes, user);
}

// Ends the run with a reason, which libFuzzer prints together with the input.
static void must(bool ok, const char* what, const char* which) {
    if (!ok) {
        fprintf(stderr, "finding: %s: %s\n", what, which);
        abort();
    }
}

static qlora_result ctx_open(world* w, qlora_ctx** out) {
    qlora_ctx_desc d;
    memset(&d, 0, sizeof d);
    d.require_backend = QLORA_BACKEND_CPU;
    d.threads = 1;
    d.scratch_bytes = 1 << 20; // most of the time would be spent on the memory of the default
    d.allocator.alloc = counted_alloc;
    d.allocator.free = counted_free;
    d.allocator.user = w;
    d.files = w->env.files;
    return qlora_ctx_create(&d, out);
}

static uint64_t print_of(const world* w, const void* data, size_t bytes, const char* prefix) {
    qlora__hash hash;
    qlora__hash_begin(&hash);
    qlora__hash_add(&hash, data, bytes);
    for (int i = 0; prefix != NULL && i < WORLD_FILES; i++) {
        if (strncmp(w->files[i].name, prefix, strlen(prefix)) == 0) {
            qlora__hash_add(&hash, w->files[i].data, w->files[i].size);
        }
    }
    return qlora__hash_end(&hash);
}

static qlora_result logits_print(qlora_model* model, uint64_t* print) {
    static const int32_t ids[TOKENS] = {1, 7, 3, 23, 0, 5, 5, 11, 2, 17, 9, 4};
    static float logits[TOKENS * 4096];
    int32_t count = TOKENS;
    qlora_model_info info;
    qlora_batch b;
    memset(&b, 0, sizeof b);
    b.ids = ids;
    b.labels = ids;
    b.lengths = &count;
    b.count = 1;
    QLORA__TRY(qlora_model_query(model, &info));
    int64_t vocab = info.plan->config.vocab;
    must(vocab >= 24 && vocab <= 4096, "the vocabulary has another size", "vocab_size");
    QLORA__TRY(qlora_eval_logits(model, &b, logits));
    *print = print_of(NULL, logits, (size_t)(TOKENS * vocab) * sizeof(float), NULL);
    return QLORA_OK;
}

// Opens the model, with the adapter or not, and a trainer for a checkpoint; loads what there is.
static qlora_result folder_open(world* w, qlora_ctx* ctx, int kind, bool extras, bool save,
                                uint64_t* print) {
    qlora_model_desc d;
    qlora_model* model = NULL;
    qlora_trainer* trainer = NULL;
    memset(&d, 0, sizeof d);
    d.dir = "m";
    d.adapter = kind == ADAPTER ? "a" : NULL;
    d.rank = kind == CHECKPOINT ? 2 : kind == ADAPTER ? 0 : -1;
    d.train_norms = extras && kind != MODEL;
    d.dora = extras && kind == CHECKPOINT;
    d.base = QLORA_BASE_32BIT;
    d.mode = QLORA_MODE_F32;
    d.tokens = TOKENS;
    d.max_sequences = 1;
    d.purpose = kind == CHECKPOINT ? QLORA_PURPOSE_TRAIN : QLORA_PURPOSE_EVALUATE;
    qlora_result r = qlora_model_open(ctx, &d, &model);
    if (r == QLORA_OK && kind != CHECKPOINT) {
        r = logits_print(model, print);
    }
    if (r == QLORA_OK && kind == CHECKPOINT) {
        r = qlora_trainer_create(model, NULL, &trainer);
        r = r == QLORA_OK && !save ? qlora_checkpoint_load(trainer, "c", NULL, NULL) : r;
        r = r == QLORA_OK ? qlora_checkpoint_save(trainer, save ? "c" : "d", "here", 4) : r;
        *print = print_of(w, "", 0, "d/");
    }
    char why[QLORA__ERROR_SIZE];
    snprintf(why, sizeof why, "%s", qlora_last_error(ctx));
    must((r == QLORA_OK) == (why[0] == '\0'), "result and message contradict each other", why);
    must(qlora_trainer_destroy(trainer) == QLORA_OK && qlora_model_close(model) == QLORA_OK,
         "an object cannot be destroyed", "");
    return r;
}

static void files_add(folders* f, const char* name, const buffer* b) {
    must(f->count < FILES, "too many files", name);
    snprintf(f->files[f->count].name, WORLD_NAME, "%s", name);
    f->files[f->count++].bytes = buffer_make(b->data, b->size);
}

// Tries one folder with file number `changed` replaced (-1 = none), and operation number `fault`
// failing (0 = none).
static attempt folder_try(folders* f, int kind, int changed, const buffer* instead, long fault) {
    static world w;
    attempt a = {QLORA_OK, 0, 0};
    qlora_ctx* ctx = NULL;
    world_begin(&w);
    for (int i = 0; i < f->count; i++) {
        const buffer* b = i == changed ? instead : &f->files[i].bytes;
        world_set(w.files, f->files[i].name, b->data, b->size);
    }
    memory_now = 0;
    memory_peak = 0;
    w.fail_at = fault;
    a.result = ctx_open(&w, &ctx);
    if (a.result == QLORA_OK) {
        a.result = folder_open(&w, ctx, kind, f->extras, false, &a.print);
        must(qlora_ctx_destroy(ctx) == QLORA_OK, "the context cannot be destroyed", "");
    }
    a.peak = memory_peak;
    must(world_end(&w) && memory_now == 0, "memory or a file was not given back", "");
    return a;
}

static void folders_make(folders* f, const folder_config* config) {
    static world w;
    qlora_model_config c;
    qlora_ctx* ctx = NULL;
    uint64_t print = 0;
    world_begin(&w);
    buffer text = buffer_make(config->text, strlen(config->text));
    must(qlora__config_parse(&w.env, "valid", text.data, text.size, &c) == QLORA_OK, "valid",
         w.env.error);
    buffer weights = model_file(&c);
    buffer adapter = adapter_file(&c, config->extras);
    buffer norms = norms_file(&c);
    const char* lora_text = adapter_texts[config->extras ? 1 : 0];
    buffer lora = buffer_make(lora_text, strlen(lora_text));
    f->extras = config->extras;
    files_add(f, "m/config.json", &text);
    files_add(f, "m/model.safetensors", &weights);
    f->first[ADAPTER] = f->count;
    files_add(f, "a/adapter_config.json", &lora);
    files_add(f, "a/adapter_model.safetensors", &adapter);
    if (config->extras) {
        files_add(f, "a/trained_norms.safetensors", &norms);
    }
    f->first[CHECKPOINT] = f->count;
    for (int i = 0; i < f->count; i++) {
        world_put(&w, f->files[i].name, f->files[i].bytes.data, f->files[i].bytes.size);
    }
    must(ctx_open(&w, &ctx) == QLORA_OK, "valid", "context");
    qlora_result r = folder_open(&w, ctx, CHECKPOINT, f->extras, true, &print);
    must(r == QLORA_OK, "valid checkpoint", qlora_result_name(r));
    must(qlora_ctx_destroy(ctx) == QLORA_OK, "valid", "context");
    for (int i = 0; i < WORLD_FILES; i++) {
        if (strncmp(w.files[i].name, "c/", 2) == 0 && w.files[i].size > 0) {
            buffer b = {w.files[i].data, w.files[i].size};
            files_add(f, w.files[i].name, &b);
        }
    }
    f->first[KINDS] = f->count;
    free(text.data);
    free(weights.data);
    free(adapter.data);
    free(norms.data);
    free(lora.data);
    must(world_end(&w), "memory was not given back", "");
    for (int kind = 0; kind < KINDS; kind++) {
        attempt a = folder_try(f, kind, -1, NULL, 0);
        must(a.result == QLORA_OK, "a valid folder is refused", f->files[f->first[kind]].name);
        f->peak[kind] = a.peak;
        f->print[kind] = a.print;
    }
    f->ready = true;
}

// ---- what a change must do ----------------------------------------------------------------------

// Whether a value counts as absent: null, and for a switch also false and what is empty.
static bool value_off(const qlora__json* json, uint32_t value, bool a_switch) {
    qlora__json_kind kind = qlora__json_kind_of(json, value);
    bool nested = kind == QLORA__JSON_ARRAY || kind == QLORA__JSON_OBJECT;
    return value == 0 || kind == QLORA__JSON_NULL ||
           (a_switch && (kind == QLORA__JSON_FALSE || (nested && json->tokens[value].count == 0)));
}

// The value of a path whose last name may be written as another regular expression, as in
// "rank_pattern/down_proj", where "down.proj" selects the same module; 0 if there is none.
static uint32_t value_find(const qlora__json* json, const char* path) {
    uint32_t value = qlora__json_find_path(json, 0, path);
    const char* last = strchr(path, '/');
    if (value != 0 || last == NULL || strstr(path, "_pattern/") == NULL) {
        return value;
    }
    char name[128];
    char key[128];
    char whole[160];
    snprintf(name, sizeof name, "%.*s", (int)(last - path), path);
    uint32_t object = qlora__json_find(json, 0, name);
    if (object == 0 || qlora__json_kind_of(json, object) != QLORA__JSON_OBJECT) {
        return 0;
    }
    for (uint32_t k = object + 1; k < json->tokens[object].next; k = json->tokens[k + 1].next) {
        regex_t regex;
        qlora__json_string(json, k, key, sizeof key);
        snprintf(whole, sizeof whole, "^(.*\\.)?(%s)$", key);
        if (regcomp(&regex, whole, REG_EXTENDED | REG_NOSUB) != 0) {
            continue;
        }
        snprintf(whole, sizeof whole, "model.layers.1.mlp.%s", last + 1);
        bool selects = regexec(&regex, whole, 0, NULL, 0) == 0;
        regfree(&regex);
        if (selects) {
            return k + 1;
        }
    }
    return 0;
}

// Whether a value of two texts differs: numbers as numbers, everything else byte by byte.
static bool value_differs(const qlora__json* a, const qlora__json* b, const char* path,
                          bool absent_is_equal) {
    uint32_t x = qlora__json_find_path(a, 0, path);
    uint32_t y = value_find(b, path);
    x = value_off(a, x, absent_is_equal) ? 0 : x;
    y = value_off(b, y, absent_is_equal) ? 0 : y;
    double m = 0.0;
    double n = 0.0;
    if (x == 0 || y == 0) {
        return y == 0 && absent_is_equal ? false : x != y;
    }
    if (qlora__json_double(a, x, &m) && qlora__json_double(b, y, &n)) {
        return fabs(m - n) > 1e-4 * fabs(m);
    }
    size_t size = a->tokens[x].end - a->tokens[x].begin;
    return size != b->tokens[y].end - b->tokens[y].begin ||
           memcmp(a->text + a->tokens[x].begin, b->text + b->tokens[y].begin, size) != 0;
}

// The first of the names whose value differs; "" if none does.
static const char* names_differ(const qlora__json* a, const qlora__json* b, const char* names,
                                bool absent_is_equal, char out[128]) {
    while (*names != '\0') {
        size_t length = strcspn(names, " ");
        snprintf(out, 128, "%.*s", (int)length, names);
        if (value_differs(a, b, out, absent_is_equal)) {
            return out;
        }
        names += length + 1;
    }
    out[0] = '\0';
    return out;
}

static void config_judge(qlora__env* env, const folder_rules* rules, const buffer* before,
                         const buffer* after, bool same) {
    qlora__json a;
    qlora__json b;
    char name[128];
    must(qlora__json_parse(env, "a", before->data, before->size, 0, &a) == QLORA_OK, "valid", "");
    must(qlora__json_parse(env, "b", after->data, after->size, 0, &b) == QLORA_OK,
         "a config that is not JSON was accepted", (const char*)after->data);
    names_differ(&a, &b, rules->refused, true, name);
    must(name[0] == '\0', "a value that must be refused was accepted", name);
    bool matters = names_differ(&a, &b, rules->matters, false, name)[0] != '\0';
    must(!matters || !same, "a changed value was ignored", name);
    bool may = matters || names_differ(&a, &b, rules->may, false, name)[0] != '\0';
    must(may || same, "a change without a meaning changed the results", (const char*)after->data);
    qlora__json_free(env, &a);
    qlora__json_free(env, &b);
}

static int64_t tensor_bits(const qlora__json* j, uint32_t entry) {
    static const struct {
        const char* name;
        int64_t bits;
    } rows[] = {{"F32", 32}, {"F16", 16}, {"BF16", 16}, {"F8_E4M3", 8}};
    uint32_t dtype = qlora__json_find(j, entry, "dtype");
    for (size_t i = 0; dtype != 0 && i < sizeof rows / sizeof rows[0]; i++) {
        if (qlora__json_is(j, dtype, rows[i].name)) {
            return rows[i].bits;
        }
    }
    return 0; // of no type that a weight can have
}

// Checks an accepted file once more, by the text of its header: every tensor of the valid file is
// there with its shape, in a type of real numbers, inside the file and of the size it needs.
static void tensors_judge(qlora__env* env, const buffer* before, const buffer* after, bool same) {
    qlora__json a;
    qlora__json b;
    uint64_t was = qlora__load_u64(before->data);
    must(after->size > 8, "an empty file was accepted", "");
    uint64_t is = qlora__load_u64(after->data);
    must(is <= after->size - 8, "a header beyond the file was accepted", "");
    must(qlora__json_parse(env, "a", before->data + 8, was, 0, &a) == QLORA_OK, "valid", "");
    must(qlora__json_parse(env, "b", after->data + 8, is, 0, &b) == QLORA_OK,
         "a header that is not JSON was accepted", "");
    for (uint32_t k = 1; k < a.tokens[0].next; k = a.tokens[k + 1].next) {
        char name[160];
        int64_t from = 0;
        int64_t to = 0;
        qlora__json_string(&a, k, name, sizeof name);
        uint32_t entry = qlora__json_find(&b, 0, name);
        must(entry != 0, "a missing tensor was accepted", name);
        uint32_t shape = qlora__json_find(&b, entry, "shape");
        uint32_t offsets = qlora__json_find(&b, entry, "data_offsets");
        must(shape != 0 && offsets != 0, "an entry without shape or offsets was accepted", name);
        uint32_t valid = qlora__json_find(&a, k + 1, "shape");
        int64_t bits = tensor_bits(&b, entry);
        must(bits > 0, "a weight of another type was accepted", name);
        must(a.tokens[valid].count == b.tokens[shape].count, "another rank was accepted", name);
        for (uint32_t i = 0; i < a.tokens[valid].count; i++) {
            int64_t x = 0;
            int64_t y = 0;
            must(qlora__json_int(&a, valid + 1 + i, &x) && qlora__json_int(&b, shape + 1 + i, &y) &&
                     x == y,
                 "another shape was accepted", name);
            bits *= x;
        }
        must(qlora__json_int(&b, offsets + 1, &from) && qlora__json_int(&b, offsets + 2, &to) &&
                 from >= 0 && to - from == bits / 8 && (uint64_t)to <= after->size - 8 - is,
             "wrong offsets were accepted", name);
        must(tensor_bits(&a, k + 1) == tensor_bits(&b, entry) || !same, "the type was ignored",
             name);
    }
    qlora__json_free(env, &a);
    qlora__json_free(env, &b);
}

// A change that keeps the checksum of a checkpoint's state right, so that it is read further.
static bool checkpoint_mend(choices* c, const char* name, buffer* b) {
    if (strstr(name, "state.safetensors") == NULL || b->size < 16 || choose(c, 2) == 0) {
        return false;
    }
    qlora__hash hash;
    qlora__hash_begin(&hash);
    qlora__hash_add(&hash, b->data, b->size - 8);
    qlora__store_u64(b->data + b->size - 8, qlora__hash_end(&hash));
    return true;
}

static void judge(const folders* f, const folder_config* config, int kind, int changed,
                  const buffer* b, attempt a) {
    static world w;
    bool same = a.print == f->print[kind];
    const buffer* before = &f->files[changed].bytes;
    world_begin(&w);
    if (kind == CHECKPOINT) {
        must(same, "a changed checkpoint was accepted", f->files[changed].name);
    } else if (changed == f->first[kind]) {
        const folder_rules* rules =
            kind == MODEL ? &config->rules : &adapter_rules[config->extras ? 1 : 0];
        config_judge(&w.env, rules, before, b, same);
    } else {
        tensors_judge(&w.env, before, b, same);
    }
    must(world_end(&w), "memory was not given back", "");
}

static int fuzz_folders(const uint8_t* data, size_t size) {
    static folders all[FOLDER_CONFIGS];
    static world w;
    if (size < 4) {
        return 0;
    }
    size_t number = data[0] / KINDS % FOLDER_CONFIGS;
    folders* f = &all[number];
    if (!f->ready) {
        folders_make(f, &folder_configs[number]);
    }
    choices c = choices_of(data + 1, size - 1);
    int kind = data[0] % KINDS;
    int changed = f->first[kind] + (int)choose(&c, (size_t)(f->first[kind + 1] - f->first[kind]));
    const buffer* valid = &f->files[changed].bytes;
    buffer b = buffer_make(valid->data, valid->size);
    world_begin(&w);
    mutate_file(&w.env, &c, f->files[changed].name, &b);
    must(world_end(&w), "memory was not given back", "");
    long fault = choose(&c, 8) == 0 ? 1 + (long)choose(&c, 300) : 0;
    bool mended = kind == CHECKPOINT && checkpoint_mend(&c, f->files[changed].name, &b);
    attempt a = folder_try(f, kind, changed, &b, fault);
    bool unchanged = b.size == valid->size && memcmp(b.data, valid->data, b.size) == 0;
    if (a.result == QLORA_OK && fault == 0 && !mended && !unchanged) {
        judge(f, &folder_configs[number], kind, changed, &b, a);
    }
    must(!unchanged || fault != 0 || a.result == QLORA_OK, "the valid folder was refused", "");
    size_t files = b.size;
    for (int i = 0; i < f->count; i++) {
        files += f->files[i].bytes.size;
    }
    if (a.peak > f->peak[kind] + 10 * files) {
        fprintf(stderr, "%zu bytes; the valid folder needs %zu, the files have %zu\n", a.peak,
                f->peak[kind], files);
        must(false, "more memory than ten times the files",
             changed == f->first[kind] ? (const char*)b.data : f->files[changed].name);
    }
    free(b.data);
    return 0;
}
