// merge: merges a LoRA adapter into its model, or converts it to a GGUF adapter for llama.cpp.
//
//   cc -O2 -I. -o merge programs/merge.c -ldl -lm -lpthread
//   ./merge --model DIR --adapter DIR --out DIR
//   ./merge --model DIR --adapter DIR --gguf FILE
//
// It calls only the public functions of qlora.h.
#define QLORA_IMPLEMENTATION
#include "qlora.h"

#define PROGRAM "merge"
#include "adapter_files.h"
#include "folders.h"
#include "tool.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

// ---- the program ------------------------------------------------------------------------------

typedef struct options {
    const char* model;
    const char* adapter;
    const char* out;
    const char* gguf;
    const char* rope_scale;
    int64_t shard;
    int64_t threads;
    int64_t backend;
    int64_t base;
    int64_t dtype;
    int64_t expert_layout;
    bool verify;
    bool verbose;
    bool help;
    bool version;
} options;

#define BASE_FP8 2 // of --base, after the values of qlora_merge_base

#define AT(field) offsetof(options, field)
// clang-format off
static const option option_table[] = {
    {"model", OPT_TEXT, AT(model), false, 0, 0, "DIR",
        "folder of the base model, or GGUF file (required)"},
    {"adapter", OPT_TEXT, AT(adapter), false, 0, 0, "DIR",
        "folder of the PEFT adapter, or of a finetune run (required)"},
    {"out", OPT_TEXT, AT(out), false, 0, 0, "DIR",
        "empty or new output folder, or a new FILE.gguf"},
    {"gguf", OPT_TEXT, AT(gguf), false, 0, 0, "FILE",
        "write a new GGUF adapter for llama.cpp (--lora) instead"},
    {"base", OPT_CHOICE, AT(base), false, 0, 0, "original|trained|fp8",
        "weights to merge into, see below (default original)"},
    {"dtype", OPT_CHOICE, AT(dtype), false, 0, 0, "bf16|f16|f32|q8_0|q4_0",
        "type of the merged weights; the last two only for GGUF (default bf16)"},
    {"rope-scale", OPT_TEXT, AT(rope_scale), false, 0, 0, "TYPE:F",
        "scaling that the adapter was trained with, as in yarn:4; written into the merged config"},
    {"expert-layout", OPT_CHOICE, AT(expert_layout), false, 0, 0, "auto|peft|peft-0.18|unsloth",
        "order of the matrices of experts in --adapter, for folders that may have several "
        "(default auto: what the folder says, or its shapes)"},
    {"verify", OPT_FLAG, AT(verify), false, 0, 0, "",
        "read the merged weights back: a random token must give the same through every matrix as "
        "through the base and the adapter"},
    {"shard", OPT_SIZE, AT(shard), false, 1048576.0, 1125899906842624.0, "SIZE",
        "maximum file size; 2G and 2GiB are binary, 2GB is decimal (default 5GB)"},
    {"backend", OPT_CHOICE, AT(backend), false, 0, 0, "auto|cpu|cuda",
        "where the base is quantised (default cpu)"},
    {"threads", OPT_WHOLE, AT(threads), false, 1, 64, "N", "CPU threads (default: one per core)"},
    {"verbose", OPT_FLAG, AT(verbose), false, 0, 0, "", "print the library's log messages"},
    {"help", OPT_FLAG, AT(help), false, 0, 0, "", "show this help"},
    {"version", OPT_FLAG, AT(version), false, 0, 0, "", "print the version"},
};
// clang-format on

typedef struct progress {
    time_t start;
    const char* what;
    int percent;
} progress;

// Prints one line per 10% of a long operation.
static bool on_progress(void* user, const char* what, uint64_t done, uint64_t total) {
    progress* p = (progress*)user;
    int percent = total > 0 ? (int)(100.0 * (double)done / (double)total) / 10 * 10 : 100;
    bool next = p->what == NULL || strcmp(p->what, what) != 0 || percent > p->percent;
    if (next && difftime(time(NULL), p->start) > 2.0) {
        fprintf(stderr, "%s: %d%%\n", what, percent);
        p->percent = percent;
    }
    p->what = what;
    return true;
}

static bool lib(qlora_ctx* ctx, qlora_result r) {
    return r == QLORA_OK || fail_library(qlora_last_error(ctx));
}

// No file is replaced, so that a mistaken --gguf cannot destroy a model or the data.
static bool gguf_free(const char* path) {
    return !path_exists(path) || fail("--gguf %s: the file exists; choose another name", path);
}

// ---- the output folder --------------------------------------------------------------------------

// The folder contains this file while a merge is running. If it is there at the start, an earlier
// merge was interrupted, and the weights beside it are that merge's own.
static const char marker[] = ".merge-unfinished";

// A name that a merge gives to its weights: model.safetensors, model-00001-of-00002.safetensors,
// the index, or one of them being written.
static bool name_is_ours(const char* name) {
    char stem[64];
    unsigned part = 0;
    unsigned parts = 0;
    snprintf(stem, sizeof stem, "%s", name);
    if (name_ends(stem, ".tmp")) {
        stem[strlen(stem) - 4] = '\0';
    }
    char again[64];
    bool numbered = sscanf(stem, "model-%u-of-%u.safetensors", &part, &parts) == 2;
    snprintf(again, sizeof again, "model-%05u-of-%05u.safetensors", part, parts);
    return strcmp(stem, "model.safetensors") == 0 ||
           strcmp(stem, "model.safetensors.index.json") == 0 ||
           (numbered && strcmp(stem, again) == 0);
}

static bool name_is_weights(const char* name) {
    static const char* const endings[] = {".safetensors",
                                          ".safetensors.index.json",
                                          ".safetensors.tmp",
                                          ".gguf",
                                          ".pt",
                                          ".pth",
                                          ".h5",
                                          ".msgpack",
                                          ".onnx",
                                          ".ckpt",
                                          ".npz"};
    bool binary = name_ends(name, ".bin") && strncmp(name, "tok", 3) != 0; // tok512.bin
    for (size_t i = 0; i < sizeof endings / sizeof endings[0]; i++) {
        binary = binary || name_ends(name, endings[i]);
    }
    return binary || name_ends(name, ".bin.index.json");
}

typedef struct output {
    const char* model;
    const char* out;
    bool formed; // the adapter has a chat template, which replaces the model's
    bool ours; // the marker is there
    bool ok;
} output;

// Without the marker, everything in the folder is somebody else's; with it, only weights that a
// merge does not write are.
static bool name_judge(void* user, const char* name) {
    output* f = (output*)user;
    if (!f->ours || (name_is_weights(name) && !name_is_ours(name))) {
        f->ok = fail("--out %s: the folder contains %s, which an interrupted merge did not leave; "
                     "choose an empty or new folder",
                     f->out, name);
    }
    return f->ok;
}

// Removes the weights of an interrupted merge.
static bool weights_clear(void* user, const char* name) {
    output* f = (output*)user;
    char path[FOLDER_PATH];
    snprintf(path, sizeof path, "%s/%s", f->out, name);
    if (name_is_ours(name) && remove(path) != 0) {
        f->ok = fail("cannot remove %s: %s", path, strerror(errno));
    }
    return f->ok;
}

// Copies a file of the model that is neither weights nor its config, which the library writes:
// those of the tokenizer have many names, and a merged model without them cannot be used.
static bool model_file_copy(void* user, const char* name) {
    output* f = (output*)user;
    char from[FOLDER_PATH];
    char to[FOLDER_PATH];
    char error[1024];
    snprintf(from, sizeof from, "%s/%s", f->model, name);
    snprintf(to, sizeof to, "%s/%s", f->out, name);
    if (name[0] == '.' || strcmp(name, "config.json") == 0 || name_is_weights(name) ||
        name_ends(name, ".md") || !path_is_file(from) ||
        (f->formed && strncmp(name, "chat_template.", 14) == 0)) {
        return true;
    }
    f->ok = file_copy(from, to, error) || fail("%s", error);
    return f->ok;
}

static bool folder_copy(const char* model, const char* out, const char* name) {
    char from[FOLDER_PATH];
    char to[FOLDER_PATH];
    output f;
    memset(&f, 0, sizeof f);
    snprintf(from, sizeof from, "%s/%s", model, name);
    snprintf(to, sizeof to, "%s/%s", out, name);
    if (file_missing(model, name) || path_is_file(from)) {
        return true;
    }
    folder_parents(to);
    (void)remove(to); // a link to another folder; a folder of an interrupted merge is not empty
    (void)FOLDER_MAKE(to);
    f.model = from;
    f.out = to;
    f.ok = true;
    return folder_each(from, model_file_copy, &f) == 0 && f.ok;
}

// Whether --out can be used, before anything slow starts: a folder that is not empty must have been
// left by an interrupted merge.
static bool out_check(const options* o) {
    output f;
    memset(&f, 0, sizeof f);
    f.out = o->out;
    f.ok = true;
    if (!file_missing(o->out, "config.json")) {
        return fail("--out %s: config.json already exists; choose a folder that does not contain a "
                    "model",
                    o->out);
    }
    f.ours = !file_missing(o->out, marker);
    int code = folder_each(o->out, name_judge, &f);
    return (f.ok && (code == 0 || code == ENOENT)) ||
           (f.ok && fail("cannot create %s: %s", o->out, strerror(code)));
}

// Prepares --out: creates it (*made), removes what an interrupted merge left, and copies the
// model's other files; from a GGUF file, the library makes them. It writes the weights and, last,
// config.json.
static bool out_begin(const options* o, bool* made) {
    char path[FOLDER_PATH];
    output f;
    memset(&f, 0, sizeof f);
    f.model = o->model;
    f.out = o->out;
    f.formed = folder_has_template(o->adapter);
    f.ok = true;
    if (!out_check(o)) { // the folder may have changed since the start
        return false;
    }
    folder_parents(o->out);
    *made = FOLDER_MAKE(o->out) == 0;
    int code = folder_each(o->out, weights_clear, &f);
    if (code != 0) {
        return fail("cannot create %s: %s", o->out, strerror(code));
    }
    snprintf(path, sizeof path, "%s/%s", o->out, marker);
    FILE* file = f.ok ? file_create_new(path) : NULL;
    if (f.ok && (file == NULL || fclose(file) != 0)) {
        return fail("cannot create %s: %s", path, strerror(errno));
    }
    bool folder = !file_is_gguf(o->model);
    code = f.ok && folder ? folder_each(o->model, model_file_copy, &f) : 0;
    if (code != 0) {
        return fail("cannot read %s: %s", o->model, strerror(code));
    }
    const char* source = f.formed ? o->adapter : o->model;
    return f.ok &&
           ((!folder && !f.formed) || folder_copy(source, o->out, "additional_chat_templates"));
}

static bool name_is_marker(void* user, const char* name) {
    bool* alone = (bool*)user;
    *alone = *alone && strcmp(name, marker) == 0;
    return *alone;
}

// After a failure that came before anything was written, --out is left as it was.
static void out_abandon(const options* o, bool made) {
    char path[FOLDER_PATH];
    bool alone = true;
    if (folder_each(o->out, name_is_marker, &alone) == 0 && alone) {
        snprintf(path, sizeof path, "%s/%s", o->out, marker);
        (void)remove(path);
        if (made) {
            (void)remove(o->out);
        }
    }
}

static bool out_end(const options* o) {
    char path[FOLDER_PATH];
    snprintf(path, sizeof path, "%s/%s", o->out, marker);
    return remove(path) == 0 || fail("cannot remove %s: %s", path, strerror(errno));
}

// ---- merging ----------------------------------------------------------------------------------

// A merged GGUF file is never written over another file.
static bool file_check(const options* o) {
    bool file = o->out != NULL && name_ends(o->out, ".gguf");
    if (!file && o->dtype >= 3) {
        return fail("--dtype %s needs --out FILE.gguf", o->dtype == 3 ? "q8_0" : "q4_0");
    }
    if (!file) {
        return o->out == NULL || out_check(o);
    }
    return !path_exists(o->out) || fail("--out %s already exists; choose another name", o->out);
}

static bool options_check(options* o, char adapter[FOLDER_PATH]) {
    if (o->model == NULL || o->adapter == NULL) {
        return fail("%s DIR is required; see --help", o->model == NULL ? "--model" : "--adapter");
    }
    if ((o->out != NULL) == (o->gguf != NULL)) {
        return fail(o->out != NULL ? "--out and --gguf cannot be used together"
                                   : "either --out DIR (a merged model) or --gguf FILE (an adapter "
                                     "for llama.cpp) is required");
    }
    if (o->gguf != NULL && o->verify) {
        return fail("--verify needs --out");
    }
    if (o->gguf != NULL && !gguf_free(o->gguf)) {
        return false;
    }
    if (file_is_gguf(o->adapter)) {
        return fail("--adapter %s is a GGUF file; a folder with safetensors is needed", o->adapter);
    }
    char why[HUB_ADVICE];
    const char* fault = model_fault(o->model, why);
    if (fault != NULL) {
        return fail("--model %s: %s", o->model, fault);
    }
    if (!folder_adapter(o->adapter, adapter)) {
        return fail("--adapter %s: adapter_config.json not found%s", o->adapter,
                    adapter_advice(o->adapter, why));
    }
    o->adapter = adapter;
    return file_check(o);
}

// What the library warns of, such as a file without a tokenizer, must be known to the user.
static void on_log(void* user, qlora_log_level level, qlora_log_item item, const char* text,
                   const char* file, int line) {
    (void)user;
    (void)item;
    (void)file;
    (void)line;
    if (level <= QLORA_LOG_WARN) {
        fprintf(stderr, "note: %s\n", text);
    }
}

// Merged into other weights than those that it was trained on, an adapter gives another model.
static void base_note(const options* o, const qlora_model* model) {
    qlora_model_info info;
    bool known = qlora_model_query(model, &info) == QLORA_OK && info.trained_base[0] != '\0';
    bool original = known && info.base[0] == '\0'; // nothing was loaded
    const char* trained = known ? info.trained_base : "";
    bool coded = strcmp(trained, "nf4") == 0 || strcmp(trained, "fp8") == 0;
    if (original && coded && !info.plan->config.quantized) {
        fprintf(stderr,
                "note: %s was trained on a base in %s and is merged into the original weights; "
                "--base %s merges it into those of the training\n",
                o->adapter, trained, strcmp(trained, "nf4") == 0 ? "trained" : "fp8");
    } else if (known && !original) {
        fprintf(stderr,
                "note: %s was trained on a base in %s and is merged into one in %s; --base %s "
                "merges it into that of the training\n",
                o->adapter, trained, info.base,
                strcmp(trained, "nf4") == 0   ? "trained"
                : strcmp(trained, "fp8") == 0 ? "fp8"
                                              : "original");
    }
}

// Writes --out: a file, or a folder with what belongs to a model.
static bool out_write(const options* o, qlora_ctx* ctx, qlora_model* model,
                      const qlora_merge_desc* d) {
    bool made = false;
    if (name_ends(o->out, ".gguf")) {
        folder_parents(o->out);
        return lib(ctx, qlora_merge_save(model, d));
    }
    if (out_begin(o, &made) && lib(ctx, qlora_merge_save(model, d))) {
        return out_end(o);
    }
    out_abandon(o, made);
    return false;
}

static bool run(const options* o, qlora_ctx* ctx) {
    static const struct {
        qlora_dtype dtype;
        qlora_gguf_format gguf;
    } types[] = {{QLORA_BF16, QLORA_GGUF_AS_DTYPE},
                 {QLORA_F16, QLORA_GGUF_AS_DTYPE},
                 {QLORA_F32, QLORA_GGUF_AS_DTYPE},
                 {QLORA_F32, QLORA_GGUF_Q8_0},
                 {QLORA_F32, QLORA_GGUF_Q4_0}};
    progress p;
    qlora_model_desc m;
    qlora_merge_desc d;
    qlora_model* model = NULL;
    memset(&p, 0, sizeof p);
    p.start = time(NULL);
    memset(&m, 0, sizeof m);
    memset(&d, 0, sizeof d);
    m.dir = o->model;
    m.adapter = o->adapter;
    m.rope_scale = o->rope_scale;
    m.expert_layout = (qlora_expert_layout)o->expert_layout;
    m.mode = QLORA_MODE_F32;
    m.base = o->base == BASE_FP8 ? QLORA_BASE_FP8 : QLORA_BASE_NF4;
    m.progress = on_progress;
    m.progress_user = &p;
    // Nothing is computed. The weights are needed only where they were quantised here.
    bool weights = o->gguf == NULL && o->base != QLORA_MERGE_ORIGINAL;
    m.purpose = weights ? QLORA_PURPOSE_EVALUATE : QLORA_PURPOSE_ADAPTER;
    m.tokens = 1;
    m.cache = QLORA_CHOICE_OFF;
    bool ok = lib(ctx, qlora_model_open(ctx, &m, &model));
    if (ok && o->gguf == NULL) {
        base_note(o, model);
    }
    if (ok && o->gguf != NULL) {
        folder_parents(o->gguf);
        ok = lib(ctx, qlora_adapter_save_gguf(model, o->gguf, NULL));
    } else if (ok) {
        d.dir = o->out;
        d.dtype = types[o->dtype].dtype;
        d.gguf = types[o->dtype].gguf;
        d.base = weights ? QLORA_MERGE_TRAINED : QLORA_MERGE_ORIGINAL;
        d.shard_bytes = (uint64_t)o->shard;
        d.tokenizer_dir = o->adapter; // where it has such files
        d.verify = o->verify;
        d.progress = on_progress;
        d.progress_user = &p;
        ok = out_write(o, ctx, model, &d);
    }
    ok = lib(ctx, qlora_model_close(model)) && ok;
    if (ok) {
        printf("wrote %s\n", o->gguf != NULL ? o->gguf : o->out);
    }
    return ok;
}

static void help_print(const option_set* set) {
    printf("usage: merge --model PATH --adapter DIR --out PATH | --gguf FILE [options]\n\n");
    options_print(set, NULL, 31);
    printf("\n--base original merges into the weights in --model; --base trained merges into\n"
           "the dequantised 4-bit weights that the adapter was trained on (in a folder with\n"
           "FP8 weights, these), --base fp8 into those of finetune --base fp8.\n"
           "An interrupted merge has no config.json; run the same command again.\n"
           "--out FILE.gguf writes one file for llama.cpp, from a folder or a GGUF file;\n"
           "--out DIR from a GGUF file makes config.json and the tokenizer's files from it.\n"
           "Exit status: 0 on success, 1 on error.\n");
}

int main(int argc, char** argv) {
    options o;
    memset(&o, 0, sizeof o);
    o.backend = QLORA_BACKEND_CPU;
    const option_set set = {option_table, sizeof option_table / sizeof option_table[0], &o};
    int status = 0;
    if (!tool_start(&set, argc, argv, &o.version, &status)) {
        return status;
    }
    if (o.help) {
        help_print(&set);
        return tool_end(true);
    }
    char adapter[FOLDER_PATH];
    if (!options_check(&o, adapter)) {
        return 1;
    }
    static char why[512];
    qlora_ctx_desc d;
    memset(&d, 0, sizeof d);
    d.require_backend = (qlora_backend)o.backend;
    d.threads = (int32_t)o.threads;
    d.log = o.verbose ? qlora_log_stderr : on_log;
    d.error_text = why;
    d.error_text_size = sizeof why;
    qlora_ctx* ctx = NULL;
    if (qlora_ctx_create(&d, &ctx) != QLORA_OK) {
        fail("%s", message_text(why));
        return 1;
    }
    bool ok = run(&o, ctx);
    qlora_ctx_destroy(ctx);
    return tool_end(ok);
}
