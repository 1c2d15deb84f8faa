// folders.c - libFuzzer target: a valid model, adapter or checkpoint folder with one change.
//
// The first byte selects the folder, the others the change (see mutate.h). Opening must succeed or
// fail with a message, leak nothing, and never need more memory than for the valid folder and ten
// times the size of the files. Run it in the root of the repository, with -timeout=5.
#ifndef QLORA_IMPLEMENTATION
#define QLORA_STATIC
#define QLORA_NO_CUDA
#define QLORA_IMPLEMENTATION
#endif
#include "qlora.h"
#include "formats_world.h"

#include "fuzz/mutate.h"

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

#define FILES 24

typedef struct file {
    char name[WORLD_NAME];
    buffer bytes;
} file;

typedef struct folders {
    file files[FILES];
    int count;
    int first[4]; // of each folder's files; [3] is their end
    size_t peak[3];
    bool ready;
} folders;

static size_t memory_now;
static size_t memory_peak;

static void* counted_alloc(size_t bytes, size_t align, void* user) {
    memory_now += bytes;
    memory_peak = memory_now > memory_peak ? memory_now : memory_peak;
    return world_alloc(bytes, align, user);
}

static void counted_free(void* pointer, size_t bytes, void* user) {
    memory_now -= bytes;
    world_free(pointer, bytes, user);
}

static void must(bool ok) {
    if (!ok) {
        abort();
    }
}

static qlora_ctx* ctx_open(world* w) {
    qlora_ctx* ctx = NULL;
    qlora_ctx_desc d;
    memset(&d, 0, sizeof d);
    d.require_backend = QLORA_BACKEND_CPU;
    d.threads = 1;
    d.allocator.alloc = counted_alloc;
    d.allocator.free = counted_free;
    d.allocator.user = w;
    d.files = w->env.files;
    must(qlora_ctx_create(&d, &ctx) == QLORA_OK);
    return ctx;
}

// Opens the model, with the adapter or not, and a trainer for a checkpoint; loads what there is.
static qlora_result folder_open(qlora_ctx* ctx, int kind, bool save) {
    qlora_model_desc d;
    qlora_model* model = NULL;
    qlora_trainer* trainer = NULL;
    memset(&d, 0, sizeof d);
    d.dir = "m";
    d.adapter = kind == 1 ? "a" : NULL;
    d.rank = kind == 1 ? 0 : 2;
    d.tokens = 4;
    d.max_sequences = 1;
    d.purpose = kind == 2 ? QLORA_PURPOSE_TRAIN : QLORA_PURPOSE_EVALUATE;
    qlora_result r = qlora_model_open(ctx, &d, &model);
    if (r == QLORA_OK && kind == 2) {
        r = qlora_trainer_create(model, NULL, &trainer);
    }
    if (r == QLORA_OK && kind == 2) {
        r = save ? qlora_checkpoint_save(trainer, "c", "here", 4)
                 : qlora_checkpoint_load(trainer, "c", NULL, NULL);
    }
    char why[QLORA__ERROR_SIZE];
    snprintf(why, sizeof why, "%s", qlora_last_error(ctx));
    must((r == QLORA_OK) == (why[0] == '\0'));
    must(qlora_trainer_destroy(trainer) == QLORA_OK);
    must(qlora_model_close(model) == QLORA_OK);
    return r;
}

static void files_add(folders* f, const char* name, const void* data, size_t size) {
    must(f->count < FILES);
    snprintf(f->files[f->count].name, WORLD_NAME, "%s", name);
    f->files[f->count++].bytes = buffer_make(data, size);
}

static void files_read(folders* f, const char* path, const char* name) {
    buffer b;
    must(buffer_file(path, &b));
    files_add(f, name, b.data, b.size);
    free(b.data);
}

// Tries one folder with file number `changed` replaced; -1 = none.
static qlora_result folder_try(folders* f, int kind, int changed, const buffer* instead) {
    static world w;
    world_begin(&w);
    for (int i = 0; i < f->count; i++) {
        const buffer* b = i == changed ? instead : &f->files[i].bytes;
        world_put(&w, f->files[i].name, b->data, b->size);
    }
    memory_now = 0;
    memory_peak = 0;
    qlora_ctx* ctx = ctx_open(&w);
    qlora_result r = folder_open(ctx, kind, false);
    must(qlora_ctx_destroy(ctx) == QLORA_OK);
    must(world_end(&w) && memory_now == 0);
    return r;
}

// The valid folders: the tiny model and adapter of tests/golden, and a checkpoint made from them.
static void folders_make(folders* f) {
    static world w;
    files_read(f, "tests/golden/tiny/model/config.json", "m/config.json");
    files_read(f, "tests/golden/tiny/model/model.safetensors", "m/model.safetensors");
    f->first[1] = f->count;
    files_read(f, "tests/golden/tiny/adapter20/adapter_config.json", "a/adapter_config.json");
    files_read(f, "tests/golden/tiny/adapter20/adapter_model.safetensors",
               "a/adapter_model.safetensors");
    f->first[2] = f->count;
    world_begin(&w);
    for (int i = 0; i < f->count; i++) {
        world_put(&w, f->files[i].name, f->files[i].bytes.data, f->files[i].bytes.size);
    }
    qlora_ctx* ctx = ctx_open(&w);
    must(folder_open(ctx, 2, true) == QLORA_OK);
    must(qlora_ctx_destroy(ctx) == QLORA_OK);
    for (int i = 0; i < WORLD_FILES; i++) {
        if (strncmp(w.files[i].name, "c/", 2) == 0 && w.files[i].size > 0) {
            files_add(f, w.files[i].name, w.files[i].data, w.files[i].size);
        }
    }
    must(f->count > f->first[2]);
    f->first[3] = f->count;
    must(world_end(&w));
    for (int kind = 0; kind < 3; kind++) {
        must(folder_try(f, kind, -1, NULL) == QLORA_OK);
        f->peak[kind] = memory_peak;
    }
    f->ready = true;
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static folders f;
    static world w;
    if (size < 4) {
        return 0;
    }
    if (!f.ready) {
        folders_make(&f);
    }
    choices c = choices_of(data + 1, size - 1);
    int kind = data[0] % 3;
    int changed = f.first[kind] + (int)choose(&c, (size_t)(f.first[kind + 1] - f.first[kind]));
    buffer b = buffer_make(f.files[changed].bytes.data, f.files[changed].bytes.size);
    world_begin(&w);
    mutate_file(&w.env, &c, f.files[changed].name, &b);
    must(world_end(&w));
    (void)folder_try(&f, kind, changed, &b);
    size_t files = b.size;
    for (int i = 0; i < f.count; i++) {
        files += f.files[i].bytes.size;
    }
    must(memory_peak <= f.peak[kind] + 10 * files);
    free(b.data);
    return 0;
}
