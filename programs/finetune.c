// finetune: trains a LoRA adapter for a language model, on a GPU or on the CPU.
//
//   cc -O2 -I. -o finetune programs/finetune.c -ldl -lm -lpthread
//   ./finetune --model DIR --data FILE --out DIR
//   ./finetune --demo --out DIR          (needs neither a model nor data)
//
// In this file: options, the state of a run, the terminal, samples, packing, files, the plot, the
// run, reports, the demo. It calls only the public functions of qlora.h and qlora_text.h.
#define QLORA_IMPLEMENTATION
#include "qlora.h"
#define QLORA_TEXT_IMPLEMENTATION
#include "qlora_text.h"

#include "blob.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "messages.h"

#ifdef _WIN32
#include <direct.h>
#include <io.h>
// Not <windows.h>: its declarations conflict with those in qlora.h's implementation.
__declspec(dllimport) unsigned long long __stdcall GetTickCount64(void);
#else
#include <dirent.h>
#include <sys/ioctl.h>
#include <unistd.h>
#endif

#if defined(__MINGW32__)
#define PRINTF(a, b) __attribute__((format(gnu_printf, a, b)))
#elif defined(__GNUC__)
#define PRINTF(a, b) __attribute__((format(printf, a, b)))
#else
#define PRINTF(a, b)
#endif

#define PATH_SIZE 1024
#define OPEN_PACKS 32 // packs that can still take a sample

// ---- options ----------------------------------------------------------------------------------

typedef struct options {
    const char* model;
    const char* data;
    const char* out;
    const char* eval_data;
    const char* adapter;
    const char* template_name;
    const char* base_name;
    const char* prompt;
    int64_t rank;
    int64_t targets;
    int64_t steps;
    int64_t warmup;
    int64_t length;
    int64_t tokens;
    int64_t accumulate;
    int64_t seed;
    int64_t eval_every;
    int64_t save_every;
    int64_t device;
    int64_t threads;
    int64_t memory;
    int64_t samples;
    int64_t schedule;
    int64_t backend;
    int64_t mode;
    int64_t base;
    int64_t recompute;
    int64_t cache;
    int64_t resume;
    double alpha;
    double dropout;
    double lr;
    double epochs;
    double beta2;
    double weight_decay;
    double max_norm;
    double eval;
    bool rslora;
    bool train_norms;
    bool truncate;
    bool train_prompt;
    bool last_turn;
    bool plan;
    bool doctor;
    bool demo;
    bool verbose;
    bool help;
    bool version;
} options;

typedef enum option_kind {
    OPT_HEADING, // a heading in the help
    OPT_TEXT,
    OPT_WHOLE,
    OPT_SIZE, // integer with an optional suffix K, M, G or T
    OPT_REAL,
    OPT_FLAG,
    OPT_CHOICE, // one of `words`, stored as its index
    OPT_TARGETS
} option_kind;

typedef struct option {
    const char* name;
    option_kind kind;
    size_t offset; // in options
    bool fixed;    // a resumed run must use the same value
    double low;    // range of a number
    double high;
    const char* words; // the choices, or the value's name in the help
    const char* help;
} option;

enum { RESUME_AUTO = 0, RESUME_NEVER, RESUME_MUST };

#define AT(field) offsetof(options, field)
// clang-format off
static const option option_table[] = {
    {"Model and data", OPT_HEADING, 0, false, 0, 0, "", ""},
    {"model", OPT_TEXT, AT(model), true, 0, 0, "DIR",
        "model folder in Hugging Face format (required)"},
    {"data", OPT_TEXT, AT(data), true, 0, 0, "FILE",
        "training data: .jsonl, .json or .txt, see below (required)"},
    {"out", OPT_TEXT, AT(out), false, 0, 0, "DIR",
        "output folder for the adapter, checkpoint, log and plot (required)"},
    {"template", OPT_TEXT, AT(template_name), true, 0, 0, "NAME",
        "chat format, see below (default: taken from the model)"},
    {"adapter", OPT_TEXT, AT(adapter), true, 0, 0, "DIR",
        "start from this PEFT adapter; sets rank, alpha and targets"},
    {"base-name", OPT_TEXT, AT(base_name), false, 0, 0, "NAME",
        "base model name stored in the adapter (default: --model)"},
    {"Adapter", OPT_HEADING, 0, false, 0, 0, "", ""},
    {"rank", OPT_WHOLE, AT(rank), true, 1, 1024, "N",
        "LoRA rank (default 16)"},
    {"alpha", OPT_REAL, AT(alpha), true, 1e-6, 1e6, "X",
        "LoRA alpha (default: twice the rank)"},
    {"targets", OPT_TARGETS, AT(targets), true, 0, 0, "LIST",
        "modules to adapt: all, or some of q,k,v,o,gate,up,down (default all)"},
    {"rslora", OPT_FLAG, AT(rslora), true, 0, 0, "",
        "scale by alpha / sqrt(rank) instead of alpha / rank"},
    {"dropout", OPT_REAL, AT(dropout), true, 0, 0.99, "X",
        "LoRA dropout probability (default 0)"},
    {"train-norms", OPT_FLAG, AT(train_norms), true, 0, 0, "",
        "also train the RMSNorm weights"},
    {"Training", OPT_HEADING, 0, false, 0, 0, "", ""},
    {"epochs", OPT_REAL, AT(epochs), true, 1e-6, 1e6, "X",
        "passes over the data (default 3)"},
    {"steps", OPT_WHOLE, AT(steps), true, 1, 1e9, "N",
        "number of steps; overrides --epochs"},
    {"lr", OPT_REAL, AT(lr), true, 0, 10, "X",
        "peak learning rate (default 2e-4)"},
    {"schedule", OPT_CHOICE, AT(schedule), true, 0, 0, "cosine|linear|constant",
        "learning rate after the warm-up (default cosine)"},
    {"warmup", OPT_WHOLE, AT(warmup), true, 0, 1e9, "N",
        "warm-up steps (default 3% of the total)"},
    {"beta2", OPT_REAL, AT(beta2), true, 0, 0.999999, "X",
        "AdamW beta2 (default 0.999)"},
    {"weight-decay", OPT_REAL, AT(weight_decay), true, 0, 10, "X",
        "AdamW weight decay (default 0)"},
    {"max-norm", OPT_REAL, AT(max_norm), true, -1, 1e9, "X",
        "clip gradients to this norm; -1 = off (default 1)"},
    {"length", OPT_WHOLE, AT(length), true, 2, 1e6, "N",
        "maximum sample length in tokens (default 1024, or the model's limit if lower)"},
    {"tokens", OPT_WHOLE, AT(tokens), true, 2, 1e7, "N",
        "maximum tokens per micro-batch (default 4096, or --length if higher)"},
    {"accumulate", OPT_WHOLE, AT(accumulate), true, 1, 65536, "N",
        "micro-batches per step (default 2)"},
    {"seed", OPT_WHOLE, AT(seed), true, 0, 9e15, "N",
        "random seed (default 1)"},
    {"truncate", OPT_FLAG, AT(truncate), true, 0, 0, "",
        "truncate samples that are too long (default: skip them)"},
    {"train-prompt", OPT_FLAG, AT(train_prompt), true, 0, 0, "",
        "also train on the prompts"},
    {"last-turn", OPT_FLAG, AT(last_turn), true, 0, 0, "",
        "train only on the last answer of each conversation"},
    {"Evaluation and checkpoints", OPT_HEADING, 0, false, 0, 0, "", ""},
    {"eval", OPT_REAL, AT(eval), true, 0, 1e6, "X",
        "held-out samples: a count, or a fraction below 1, capped at 200 samples (default 0.05)"},
    {"eval-data", OPT_TEXT, AT(eval_data), true, 0, 0, "FILE",
        "evaluate on this file instead of held-out samples"},
    {"eval-every", OPT_WHOLE, AT(eval_every), false, 1, 1e9, "N",
        "steps between evaluations (default: ten per run)"},
    {"save-every", OPT_WHOLE, AT(save_every), false, 1, 1e9, "N",
        "steps between checkpoints (default: ten per run)"},
    {"resume", OPT_CHOICE, AT(resume), false, 0, 0, "auto|never|must",
        "auto resumes if --out has a checkpoint, never starts over, must fails without a "
        "checkpoint (default auto)"},
    {"prompt", OPT_TEXT, AT(prompt), false, 0, 0, "TEXT",
        "prompt to complete before and after training"},
    {"Machine", OPT_HEADING, 0, false, 0, 0, "", ""},
    {"backend", OPT_CHOICE, AT(backend), false, 0, 0, "auto|cpu|cuda",
        "auto uses a GPU if available (default auto)"},
    {"device", OPT_WHOLE, AT(device), false, 0, 1023, "N",
        "GPU number (default 0)"},
    {"threads", OPT_WHOLE, AT(threads), false, 1, 64, "N",
        "CPU threads (default: one per core)"},
    {"mode", OPT_CHOICE, AT(mode), true, 0, 0, "auto|f32|tf32|bf16",
        "arithmetic precision; auto uses bf16 if the GPU supports it, otherwise f32 (default "
        "auto)"},
    {"base", OPT_CHOICE, AT(base), true, 0, 0, "nf4|16bit|32bit",
        "storage format of the frozen weights (default nf4)"},
    {"recompute", OPT_CHOICE, AT(recompute), false, 0, 0, "auto|on|off",
        "recompute activations in the backward pass to save memory; auto recomputes as few "
        "layers as possible (default auto)"},
    {"cache", OPT_CHOICE, AT(cache), false, 0, 0, "auto|on|off",
        "keep 16-bit copies of the 4-bit weights; auto copies as many as fit (default auto)"},
    {"memory", OPT_SIZE, AT(memory), false, 1048576.0, 1125899906842624.0, "SIZE",
        "memory limit in bytes, e.g. 8G for 8 GiB (default: all free memory)"},
    {"Other", OPT_HEADING, 0, false, 0, 0, "", ""},
    {"plan", OPT_FLAG, AT(plan), false, 0, 0, "",
        "print the memory plan and exit"},
    {"doctor", OPT_FLAG, AT(doctor), false, 0, 0, "",
        "print the first samples and any problems in the data, then exit"},
    {"samples", OPT_WHOLE, AT(samples), false, 0, 1e9, "N",
        "number of samples that --doctor prints (default 3)"},
    {"demo", OPT_FLAG, AT(demo), true, 0, 0, "",
        "train a small generated model on generated text"},
    {"verbose", OPT_FLAG, AT(verbose), false, 0, 0, "",
        "print the library's log messages"},
    {"help", OPT_FLAG, AT(help), false, 0, 0, "",
        "show this help"},
    {"version", OPT_FLAG, AT(version), false, 0, 0, "",
        "print the version"},
};
// clang-format on
#define OPTION_COUNT (sizeof option_table / sizeof option_table[0])

static const char* const target_names[] = {"q", "k", "v", "o", "gate", "up", "down"};

static void* option_at(options* o, const option* row) {
    return (char*)o + row->offset;
}

static void options_default(options* o) {
    memset(o, 0, sizeof *o);
    o->rank = 16;
    o->targets = QLORA_TARGET_ALL;
    o->epochs = 3.0;
    o->lr = 2e-4;
    o->warmup = -1;
    o->accumulate = 2;
    o->seed = 1;
    o->beta2 = 0.999;
    o->max_norm = 1.0;
    o->eval = 0.05;
    o->samples = 3;
}

static void help_print(void) {
    printf("usage: finetune --model DIR --data FILE --out DIR [options]\n"
           "       finetune --demo [--out DIR]\n\n"
           "Trains a LoRA adapter on the samples in FILE. Ctrl-C saves and stops; run the\n"
           "same command again to resume with bit-identical results.\n");
    for (size_t i = 0; i < OPTION_COUNT; i++) {
        const option* row = &option_table[i];
        if (row->kind == OPT_HEADING) {
            printf("\n%s\n", row->name);
            continue;
        }
        char left[64];
        snprintf(left, sizeof left, "--%s %s", row->name, row->words);
        help_row(left, 37, row->help);
    }
    printf("\nChat formats:");
    for (size_t i = 0; qlora_text_chat_names(i) != NULL; i++) {
        printf(" %s", qlora_text_chat_names(i));
    }
    printf(
        "\nData: one JSON object per sample (.jsonl: one per line; .json: an array):\n"
        "  {\"text\"}  {\"prompt\", \"completion\"}  {\"messages\": [{\"role\", \"content\"}]}\n"
        "  {\"conversations\": [{\"from\", \"value\"}]}  {\"instruction\", \"input\", \"output\"}\n"
        "  .txt: plain text, split into samples of --length tokens\n"
        "Exit status: 0 on success, 1 on error (reported on standard error), 130 after\n"
        "Ctrl-C.\n");
}

PRINTF(2, 3)
static bool fail(char error[1024], const char* format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(error, 1024, format, args);
    va_end(args);
    return false;
}

// The number of letters to change, add or drop to get from a to b.
static size_t word_distance(const char* a, const char* b) {
    size_t row[32];
    size_t width = strlen(b) < 31 ? strlen(b) : 31;
    for (size_t j = 0; j <= width; j++) {
        row[j] = j;
    }
    for (size_t i = 0; a[i] != '\0'; i++) {
        size_t corner = row[0];
        row[0] = i + 1;
        for (size_t j = 1; j <= width; j++) {
            size_t best = corner + (a[i] == b[j - 1] ? 0 : 1);
            corner = row[j];
            best = row[j] + 1 < best ? row[j] + 1 : best;
            row[j] = row[j - 1] + 1 < best ? row[j - 1] + 1 : best;
        }
    }
    return row[width];
}

static bool option_unknown(const char* word, char error[1024]) {
    const char* nearest = NULL;
    size_t distance = 3;
    for (size_t i = 0; i < OPTION_COUNT && strncmp(word, "--", 2) == 0; i++) {
        size_t d = word_distance(word + 2, option_table[i].name);
        if (option_table[i].kind != OPT_HEADING && d < distance) {
            nearest = option_table[i].name;
            distance = d;
        }
    }
    if (nearest != NULL) {
        return fail(error, "unknown option %s; did you mean --%s?", word, nearest);
    }
    return fail(error,
                word[0] == '-' ? "unknown option %s; see --help"
                               : "unexpected argument '%s'; options start with --",
                word);
}

static bool number_read(const option* row, const char* text, double* out, char error[1024]) {
    char* end = NULL;
    errno = 0;
    double value = strtod(text, &end);
    if (row->kind == OPT_SIZE && end != text && *end != '\0') {
        const char* units = "KMGT";
        const char* unit = strchr(units, toupper((unsigned char)*end));
        if (unit != NULL) {
            value *= pow(1024.0, (double)(unit - units + 1));
            end++;
            end += *end == 'i' ? 1 : 0;
            end += *end == 'B' ? 1 : 0;
        }
    }
    if (end == text || *end != '\0' || errno != 0) {
        return fail(error, "--%s: '%s' is not a number", row->name, text);
    }
    if (row->kind != OPT_REAL && value != floor(value)) {
        return fail(error, "--%s: '%s' is not a whole number", row->name, text);
    }
    if (!(value >= row->low && value <= row->high)) {
        char low[32];
        char high[32];
        return fail(error, "--%s: %s is out of range; use %s to %s", row->name, text,
                    limit_text(row->low, row->kind == OPT_SIZE, low),
                    limit_text(row->high, row->kind == OPT_SIZE, high));
    }
    *out = value;
    return true;
}

static bool choice_read(const option* row, const char* text, int64_t* out, char error[1024]) {
    const char* at = row->words;
    for (int64_t number = 0; *at != '\0'; number++) {
        size_t length = strcspn(at, "|");
        if (strlen(text) == length && strncmp(at, text, length) == 0) {
            *out = number;
            return true;
        }
        at += length;
        at += *at == '|' ? 1 : 0;
    }
    return fail(error, "--%s: '%s' is not one of %s", row->name, text, row->words);
}

static bool targets_read(const option* row, const char* text, int64_t* out, char error[1024]) {
    int64_t bits = strcmp(text, "all") == 0 ? QLORA_TARGET_ALL : 0;
    for (const char* at = text; bits != QLORA_TARGET_ALL && *at != '\0';) {
        size_t length = strcspn(at, ",");
        size_t stem = length > 5 && strncmp(at + length - 5, "_proj", 5) == 0 ? length - 5 : length;
        int64_t bit = 0;
        for (int i = 0; i < 7; i++) {
            bit |= strlen(target_names[i]) == stem && strncmp(target_names[i], at, stem) == 0
                       ? 1 << i
                       : 0;
        }
        if (bit == 0) {
            return fail(error, "--%s: '%.*s' is not one of q, k, v, o, gate, up, down", row->name,
                        (int)length, at);
        }
        bits |= bit;
        at += length;
        at += *at == ',' ? 1 : 0;
    }
    *out = bits;
    return bits != 0 ||
           fail(error, "--%s needs a value: all, or some of q,k,v,o,gate,up,down", row->name);
}

static bool option_set(options* o, const option* row, const char* text, char error[1024]) {
    void* at = option_at(o, row);
    double number = 0.0;
    switch (row->kind) {
    case OPT_TEXT:
        *(const char**)at = text;
        return text[0] != '\0' || fail(error, "--%s needs a non-empty value", row->name);
    case OPT_CHOICE:
        return choice_read(row, text, (int64_t*)at, error);
    case OPT_TARGETS:
        return targets_read(row, text, (int64_t*)at, error);
    case OPT_REAL:
        return number_read(row, text, (double*)at, error);
    default:
        if (!number_read(row, text, &number, error)) {
            return false;
        }
        *(int64_t*)at = (int64_t)number;
        return true;
    }
}

static const option* option_find(const char* name, size_t length) {
    for (size_t i = 0; i < OPTION_COUNT; i++) {
        const option* row = &option_table[i];
        if (row->kind != OPT_HEADING && strlen(row->name) == length &&
            strncmp(row->name, name, length) == 0) {
            return row;
        }
    }
    return NULL;
}

static bool options_read(int argc, char** argv, options* o, char error[1024]) {
    for (int i = 1; i < argc; i++) {
        const char* word = strcmp(argv[i], "-h") == 0 ? "--help" : argv[i];
        const char* equals = strchr(word, '=');
        size_t length = equals != NULL ? (size_t)(equals - word) : strlen(word);
        const option* row =
            length > 2 && strncmp(word, "--", 2) == 0 ? option_find(word + 2, length - 2) : NULL;
        if (row == NULL) {
            return option_unknown(word, error);
        }
        if (row->kind == OPT_FLAG) {
            if (equals != NULL) {
                return fail(error, "--%s does not take a value", row->name);
            }
            *(bool*)option_at(o, row) = true;
            continue;
        }
        if (equals == NULL && i + 1 == argc) {
            return fail(error, "--%s needs a value: %s", row->name, row->words);
        }
        if (!option_set(o, row, equals != NULL ? equals + 1 : argv[++i], error)) {
            return false;
        }
    }
    return true;
}

static bool options_check(options* o, char error[1024]) {
    if (o->demo && (o->model != NULL || o->data != NULL)) {
        return fail(error, "--demo creates its own model and data; drop --model and --data");
    }
    if (o->model == NULL && !o->demo) {
        return fail(error, "--model DIR is required; see --help, or try --demo");
    }
    if (o->data == NULL && !o->demo && !o->plan) {
        return fail(error, "--data FILE is required");
    }
    if (o->out == NULL && !o->plan && !o->doctor) {
        return fail(error, "--out DIR is required: the adapter is saved there");
    }
    if (o->tokens != 0 && o->length != 0 && o->length > o->tokens) {
        return fail(error,
                    "--length (%lld) must not exceed --tokens (%lld): a sample has to fit into one "
                    "micro-batch",
                    (long long)o->length, (long long)o->tokens);
    }
    if (o->eval >= 1.0 && o->eval != floor(o->eval)) {
        return fail(error, "--eval: %g is neither a fraction below 1 nor a whole number", o->eval);
    }
    if (o->model != NULL && file_missing(o->model, "config.json")) {
        return fail(error, "--model %s: config.json not found", o->model);
    }
    if (o->adapter != NULL && file_missing(o->adapter, "adapter_config.json")) {
        return fail(error, "--adapter %s: adapter_config.json not found", o->adapter);
    }
    return true;
}

// One line for each option that must stay the same when a run is resumed: "name value".
static void settings_write(options* o, char* out, size_t size) {
    size_t used = 0;
    out[0] = '\0';
    for (size_t i = 0; i < OPTION_COUNT && used < size; i++) {
        const option* row = &option_table[i];
        const void* at = option_at(o, row);
        if (!row->fixed) {
            continue;
        }
        int n = 0;
        if (row->kind == OPT_TEXT) {
            const char* text = *(const char* const*)at;
            n = snprintf(out + used, size - used, "%s %.200s\n", row->name,
                         text != NULL ? text : "-");
        } else if (row->kind == OPT_REAL) {
            n = snprintf(out + used, size - used, "%s %.17g\n", row->name, *(const double*)at);
        } else if (row->kind == OPT_FLAG) {
            n = snprintf(out + used, size - used, "%s %d\n", row->name, *(const bool*)at ? 1 : 0);
        } else {
            n = snprintf(out + used, size - used, "%s %lld\n", row->name,
                         (long long)*(const int64_t*)at);
        }
        used += n > 0 ? (size_t)n : 0;
    }
}

// A line of settings_write as the user would write it: "schedule 0" is "--schedule cosine".
static void setting_show(const char* line, size_t length, char out[256]) {
    size_t name = strcspn(line, " \n");
    const option* row = name < length ? option_find(line, name) : NULL;
    if (row == NULL) {
        snprintf(out, 256, "'%.*s'", (int)length, line);
        return;
    }
    const char* value = line + name + 1;
    int value_length = (int)(length - name - 1);
    long number = strtol(value, NULL, 10);
    if ((row->kind == OPT_TEXT && value_length == 1 && *value == '-') ||
        (row->kind == OPT_FLAG && number == 0)) {
        snprintf(out, 256, "no --%s", row->name);
    } else if (row->kind == OPT_FLAG) {
        snprintf(out, 256, "--%s", row->name);
    } else if (row->kind == OPT_CHOICE) {
        const char* word = row->words;
        for (; number > 0 && strchr(word, '|') != NULL; number--) {
            word = strchr(word, '|') + 1;
        }
        snprintf(out, 256, "--%s %.*s", row->name, (int)strcspn(word, "|"), word);
    } else if (row->kind == OPT_TARGETS) {
        int used = snprintf(out, 256, "--%s", row->name);
        for (int i = 0; i < 7; i++) {
            used += (number >> i & 1) == 0
                        ? 0
                        : snprintf(out + used, 256 - (size_t)used, "%s%s",
                                   strchr(out, ' ') == NULL ? " " : ",", target_names[i]);
        }
    } else if (row->kind == OPT_REAL) {
        snprintf(out, 256, "--%s %g", row->name, strtod(value, NULL));
    } else {
        snprintf(out, 256, "--%s %.*s", row->name, value_length, value);
    }
}

// Compares two results of settings_write; the first lines that differ go to line_a and line_b.
static bool settings_equal(const char* a, const char* b, char line_a[256], char line_b[256]) {
    while (*a != '\0' || *b != '\0') {
        size_t na = strcspn(a, "\n");
        size_t nb = strcspn(b, "\n");
        if (na != nb || memcmp(a, b, na) != 0) {
            setting_show(a, na, line_a);
            setting_show(b, nb, line_b);
            return false;
        }
        a += na + (a[na] == '\n' ? 1 : 0);
        b += nb + (b[nb] == '\n' ? 1 : 0);
    }
    return true;
}

// ---- the state of a run ------------------------------------------------------------------------

typedef struct sample {
    const int32_t* ids;
    const int32_t* labels;
    int32_t length; // as trained: truncated with --truncate
    int32_t trained;
    int32_t number; // index in the data
} sample;

typedef struct samples {
    sample* data;
    size_t count;
} samples;

typedef struct counts { // statistics of the data, taken before training
    size_t all;
    size_t used;
    size_t too_long;
    size_t longest; // in tokens
    size_t empty;
    size_t masked; // samples without a trained token
    size_t no_end; // samples whose last token is not trained
    size_t two_bos;
    uint64_t tokens; // in the samples used
    uint64_t trained;
} counts;

// Pack p contains the samples order[starts[p]] to order[starts[p + 1] - 1].
typedef struct packs {
    uint32_t* order;
    size_t* starts;
    size_t count;
} packs;

typedef struct point { // one entry of the log and the plot
    int64_t step;
    double loss;
    double grad_norm;
    double lr;
    double tokens_per_s;
    double eval_loss; // NAN if this step was not evaluated
} point;

typedef struct screen {
    bool live; // standard output is a terminal: the progress line is redrawn in place
    bool drawn;
    double drawn_at;
} screen;

enum { TOLD_LOG = 1, TOLD_PICTURE = 2, TOLD_CHECKPOINT = 4 };

#define SETTINGS_SIZE 8192
#define POSITION_MAGIC "ftune 1"
typedef struct position { // our own data in a checkpoint
    char magic[8];
    uint64_t settings_hash;
    uint64_t data_hash;
    int64_t total_steps;
    double seconds;
    double first_eval;
    double first_loss;
    uint64_t tokens;
} position;

typedef struct app {
    options o;
    char error[1024];
    qlora_ctx* ctx;
    qlora_files files;
    qlora_model_config config;
    qlora_model_desc model_desc;
    qlora_train_desc train_desc;
    qlora_plan plan;
    qlora_model* model;
    qlora_trainer* trainer;
    qlora_text* text;
    qlora_text_tok* tok;
    qlora_text_chat* chat;
    qlora_text_data* data;
    qlora_text_data* eval_data;
    counts counted;
    samples train;
    samples eval;
    uint64_t data_hash;
    uint64_t settings_hash;
    bool resuming;
    // the batch being assembled
    int32_t* ids;
    int32_t* labels;
    int32_t* lengths;
    int32_t* numbers;
    // the progress of the run
    int64_t step;
    int64_t total_steps;
    int64_t epoch;
    size_t next_pack;
    packs now; // packs of the current epoch
    packs eval_packs;
    double seconds; // training time, including earlier sessions
    double first_eval;
    double last_eval;
    double first_loss;
    double last_loss;
    uint64_t tokens_seen;
    int64_t skipped_in_row;
    double pace; // seconds per step, smoothed
    double step_flop;
    double peak_flop; // the device's peak FLOP/s; 0 = unknown
    point* points;
    size_t point_count;
    size_t point_room;
    FILE* log;
    blob log_rest;   // lines that have not been written to disk yet
    bool log_torn;   // the log ends in a partial line: write nothing more to it
    bool out_made;   // this process created the folder
    bool out_empty;  // the folder was empty when the run started
    bool files_made; // this process created settings.txt and the log
    bool stopped;    // by Ctrl-C, during a long call
    bool failed;     // an error was reported on standard error
    int told;        // ongoing failures that have been reported: TOLD_ bits
    uint64_t memory;
    double memory_at;
    double svg_at;
    double svg_cost;
    screen screen;
} app;

static volatile sig_atomic_t stop_asked;

static void stop_handler(int number) {
    stop_asked = 1;
    signal(number, SIG_DFL); // a second Ctrl-C ends the program at once
}

static bool lib(app* a, qlora_result result, const char* doing) {
    if (result == QLORA_OK) {
        return true;
    }
    a->stopped = a->stopped || result == QLORA_ERR_STOPPED;
    const char* text = qlora_last_error(a->ctx);
    return fail(a->error, "%s: %s", doing,
                text[0] != '\0' ? message_text(text) : qlora_result_text(result));
}

static void* take(app* a, size_t count, size_t size) {
    void* p = calloc(count > 0 ? count : 1, size);
    if (p == NULL) {
        fail(a->error, "out of memory");
    }
    return p;
}

static bool known(double value) { // neither NaN nor infinite
    return value - value == 0.0;
}

static double seconds_now(void) {
#ifdef _WIN32
    return (double)GetTickCount64() * 1e-3;
#else
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
#endif
}

static uint64_t mix(uint64_t x) { // a bijection whose outputs look random
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static void out_path(const app* a, const char* name, char path[PATH_SIZE]) {
    snprintf(path, PATH_SIZE, "%s/%s", a->o.out, name);
}

// ---- the terminal -------------------------------------------------------------------------------

static void screen_open(screen* s) {
#ifdef _WIN32
    s->live = _isatty(1) != 0;
#else
    s->live = isatty(STDOUT_FILENO) != 0;
#endif
}

static int screen_width(void) {
#ifndef _WIN32
    struct winsize size;
    if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) {
        return size.ws_col;
    }
#endif
    return 80;
}

static void screen_clear(screen* s) {
    if (s->drawn) {
        printf("\r\033[K");
        s->drawn = false;
    }
}

// Prints a permanent line; the progress line is later redrawn below it.
PRINTF(2, 3)
static void say(app* a, const char* format, ...) {
    va_list args;
    screen_clear(&a->screen);
    va_start(args, format);
    vprintf(format, args);
    va_end(args);
    fflush(stdout);
}

// Prints the current error. The exit status will be 1.
static void complain(app* a) {
    screen_clear(&a->screen);
    fflush(stdout);
    fprintf(stderr, "finetune: %s\n", a->error);
    a->error[0] = '\0';
    a->failed = true;
}

// A failure that does not stop training is reported when it first occurs, not at every step.
static void bear(app* a, int what, bool ok) {
    if (!ok && (a->told & what) == 0) {
        complain(a);
    }
    a->error[0] = '\0';
    a->told = ok ? a->told & ~what : a->told | what;
}

static void draw(screen* s, const char* line) {
    if (s->live) {
        printf("\r\033[K%s", line);
        s->drawn = true;
    } else {
        printf("%s\n", line);
    }
    fflush(stdout);
}

static const char* short_number(double value, char out[32]) {
    static const char units[] = " kMGT";
    size_t unit = 0;
    while (fabs(value) >= 999.5 && unit < 4) {
        value /= 1000.0;
        unit++;
    }
    int places = unit == 0 || value >= 99.95 ? 0 : 1;
    snprintf(out, 32, "%.*f%.*s", places, value, unit > 0 ? 1 : 0, &units[unit]);
    return out;
}

static const char* short_time(double seconds, char out[32]) {
    long long s = (long long)(seconds + 0.5);
    if (s >= 3600) {
        snprintf(out, 32, "%lldh%02lldm", s / 3600, s % 3600 / 60);
    } else if (s >= 60) {
        snprintf(out, 32, "%lldm%02llds", s / 60, s % 60);
    } else {
        snprintf(out, 32, "%llds", s);
    }
    return out;
}

static const char* short_bytes(uint64_t bytes, char out[32]) {
    double mib = (double)bytes / 1048576.0;
    snprintf(out, 32, mib >= 1024.0 ? "%.1f GiB" : "%.0f MiB", mib >= 1024.0 ? mib / 1024.0 : mib);
    return out;
}

// Querying the driver takes longer than a short step, and the memory in use hardly changes.
static uint64_t memory_used(app* a) {
    qlora_ctx_info info;
    double now = seconds_now();
    if ((a->memory_at == 0.0 || now - a->memory_at > 5.0) &&
        qlora_ctx_query(a->ctx, &info) == QLORA_OK) {
        const qlora_memory_info* m = &info.memory;
        a->memory = m->device_bytes > 0 ? m->device_bytes : m->host_bytes;
        a->memory_at = now;
    }
    return a->memory;
}

// Joins the fields that fit into the width, dropping the least important ones; rank 0 is the most
// important.
static void line_fit(char fields[][40], const int* ranks, int count, int width, char out[256]) {
    bool chosen[16] = {false};
    int used = 0;
    for (int rank = 0; rank < count; rank++) {
        for (int i = 0; i < count; i++) {
            int length = (int)strlen(fields[i]);
            if (ranks[i] == rank && length > 0 && used + length + (used > 0 ? 2 : 0) < width) {
                chosen[i] = true;
                used += length + (used > 0 ? 2 : 0);
            }
        }
    }
    out[0] = '\0';
    for (int i = 0; i < count; i++) {
        if (chosen[i]) {
            strcat(out, out[0] != '\0' ? "  " : "");
            strcat(out, fields[i]);
        }
    }
}

static void progress_draw(app* a, const point* p) {
    double now = seconds_now();
    int64_t every = a->total_steps / 50 > 1 ? a->total_steps / 50 : 1;
    bool due =
        a->screen.live ? now - a->screen.drawn_at > 0.1 : p->step == 1 || p->step % every == 0;
    if (!due && p->step != a->total_steps) {
        return;
    }
    a->screen.drawn_at = now;
    char text[32];
    char fields[8][40];
    const int ranks[8] = {0, 1, 5, 4, 3, 6, 7, 2};
    snprintf(fields[0], 40, "step %lld/%lld", (long long)p->step, (long long)a->total_steps);
    snprintf(fields[1], 40, "loss %.4f", p->loss);
    snprintf(fields[2], 40, "grad %.3g", p->grad_norm);
    snprintf(fields[3], 40, "lr %.2g", p->lr);
    snprintf(fields[4], 40, "%s tok/s", short_number(p->tokens_per_s, text));
    fields[5][0] = '\0';
    if (a->peak_flop > 0.0 && a->pace > 0.0) {
        snprintf(fields[5], 40, "%.0f%% peak", 100.0 * a->step_flop / a->pace / a->peak_flop);
    }
    snprintf(fields[6], 40, "%s", short_bytes(memory_used(a), text));
    double left = a->pace * (double)(a->total_steps - p->step);
    snprintf(fields[7], 40, "%s left", short_time(left, text));
    char line[256];
    line_fit(fields, ranks, 8, a->screen.live ? screen_width() : 200, line);
    draw(&a->screen, line);
}

static bool load_progress(void* user, const char* what, uint64_t done, uint64_t total) {
    app* a = (app*)user;
    double now = seconds_now();
    if (a->screen.live && total > 0 && (now - a->screen.drawn_at > 0.1 || done == total)) {
        char line[80];
        snprintf(line, sizeof line, "%s %3.0f%%", what, 100.0 * (double)done / (double)total);
        a->screen.drawn_at = now;
        draw(&a->screen, line);
    }
    return stop_asked == 0;
}

// ---- samples -----------------------------------------------------------------------------------

static bool text_fail(app* a, const char* what) {
    return fail(a->error, "%s%s", what, message_text(qlora_text_last_error(a->text)));
}

static bool text_open(app* a) {
    qlora_text_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.files = a->files;
    desc.error_text = a->error;
    desc.error_text_size = sizeof a->error;
    return a->text != NULL || qlora_text_create(&desc, &a->text) == QLORA_OK;
}

static bool tokenizer_open(app* a) {
    char error[1024] = "";
    qlora_text_tok_info info;
    qlora_text_chat_desc desc;
    memset(&desc, 0, sizeof desc);
    if (!text_open(a)) {
        return false;
    }
    if (a->tok == NULL && qlora_text_tok_open(a->text, a->o.model, &a->tok) != QLORA_OK) {
        return text_fail(a, "the model's tokenizer: ");
    }
    if (qlora_text_tok_query(a->tok, &info) != QLORA_OK) {
        return text_fail(a, "");
    }
    if (info.count > a->config.vocab) {
        // Ids beyond the model's vocabulary would read past its embedding; found sample by sample.
        snprintf(error, sizeof error, "the tokenizer has %d tokens, the model %lld",
                 (int)info.count, (long long)a->config.vocab);
        say(a, "note: %s\n", error);
    }
    desc.tok = a->tok;
    desc.folder = a->o.demo ? NULL : a->o.model;
    desc.name = a->o.template_name;
    return qlora_text_chat_open(a->text, &desc, &a->chat) == QLORA_OK ||
           text_fail(a, "the chat format (see --template): ");
}

static bool data_open(app* a, const char* path, qlora_text_data** out) {
    qlora_text_data_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.path = path;
    desc.chat = a->chat;
    desc.chunk_tokens = (size_t)a->o.length;
    desc.train_prompt = a->o.train_prompt;
    desc.last_turn_only = a->o.last_turn;
    return qlora_text_data_open(a->text, &desc, out) == QLORA_OK || text_fail(a, "");
}

static size_t trained_count(const int32_t* labels, size_t length) {
    size_t trained = 0;
    for (size_t i = 1; i < length; i++) {
        trained += labels[i] != -100 ? 1 : 0;
    }
    return trained;
}

static bool ids_check(app* a, const qlora_text_sample* s, size_t number) {
    for (size_t i = 0; i < s->count; i++) {
        if (s->ids[i] < 0 || s->ids[i] >= a->config.vocab || s->labels[i] >= a->config.vocab) {
            return fail(a->error,
                        "sample %zu (line %zu): token id %d is out of range; the model's ids are 0 "
                        "to %lld",
                        number + 1, s->line, (int)s->ids[i], (long long)a->config.vocab - 1);
        }
    }
    return true;
}

// Collects the samples that can be used for training and counts the others.
static bool samples_take(app* a, qlora_text_data* data, samples* out, counts* c) {
    memset(c, 0, sizeof *c);
    c->all = qlora_text_data_count(data);
    out->data = (sample*)take(a, c->all, sizeof *out->data);
    if (out->data == NULL) {
        return false;
    }
    qlora_text_tok_info info;
    if (qlora_text_tok_query(a->tok, &info) != QLORA_OK) {
        return text_fail(a, "");
    }
    int32_t bos = info.bos;
    for (size_t i = 0; i < c->all; i++) {
        qlora_text_sample s;
        if (qlora_text_sample_read(data, i, &s) != QLORA_OK) {
            return text_fail(a, "");
        }
        size_t length = s.count;
        if (!ids_check(a, &s, i)) {
            return false;
        }
        c->longest = length > c->longest ? length : c->longest;
        bool too_long = length > (size_t)a->o.length;
        c->too_long += too_long ? 1 : 0;
        c->empty += length < 2 ? 1 : 0;
        c->no_end += length >= 2 && s.labels[length - 1] == -100 ? 1 : 0;
        c->two_bos += length >= 2 && bos >= 0 && s.ids[0] == bos && s.ids[1] == bos ? 1 : 0;
        length = too_long ? (size_t)a->o.length : length;
        size_t trained = trained_count(s.labels, length);
        c->masked += length >= 2 && trained == 0 ? 1 : 0;
        if (length < 2 || trained == 0 || (too_long && !a->o.truncate)) {
            continue;
        }
        sample* t = &out->data[out->count++];
        t->ids = s.ids;
        t->labels = s.labels;
        t->length = (int32_t)length;
        t->trained = (int32_t)trained;
        t->number = (int32_t)i;
        c->tokens += length;
        c->trained += trained;
    }
    c->used = out->count;
    return true;
}

static void shuffle(uint32_t* order, size_t count, uint64_t key) {
    for (size_t i = count; i > 1; i--) {
        size_t j = (size_t)(mix(key ^ mix(i)) % i);
        uint32_t keep = order[i - 1];
        order[i - 1] = order[j];
        order[j] = keep;
    }
}

// Moves the held-out samples from a->train to a->eval.
static bool samples_split(app* a) {
    size_t all = a->train.count;
    double wish = a->o.eval < 1.0 ? fmin(200.0, ceil(a->o.eval * (double)all)) : a->o.eval;
    size_t held = (size_t)wish;
    if (a->eval_data != NULL || held == 0 || all < 2) {
        return true;
    }
    if (held >= all) {
        return fail(a->error, "--eval %g would hold out all %zu samples, leaving none to train on",
                    a->o.eval, all);
    }
    uint32_t* order = (uint32_t*)take(a, all, sizeof *order);
    sample* kept = (sample*)take(a, all, sizeof *kept);
    a->eval.data = (sample*)take(a, held, sizeof *kept);
    if (order == NULL || kept == NULL || a->eval.data == NULL) {
        free(order);
        free(kept);
        return false;
    }
    for (size_t i = 0; i < all; i++) {
        order[i] = (uint32_t)i;
    }
    shuffle(order, all, mix((uint64_t)a->o.seed ^ 0x6576616cu));
    for (size_t i = 0; i < all; i++) {
        if (i < held) {
            a->eval.data[a->eval.count++] = a->train.data[order[i]];
        } else {
            kept[i - held] = a->train.data[order[i]];
        }
    }
    free(order);
    free(a->train.data);
    a->train.data = kept;
    a->train.count = all - held;
    return true;
}

#define HASH_START 0xcbf29ce484222325u

static uint64_t hash_more(uint64_t hash, const void* data, size_t bytes) {
    const unsigned char* p = (const unsigned char*)data;
    for (size_t i = 0; i < bytes; i++) {
        hash = (hash ^ p[i]) * 0x100000001b3u;
    }
    return hash;
}

static uint64_t samples_hash(const samples* s, uint64_t hash) {
    for (size_t i = 0; i < s->count; i++) {
        size_t bytes = (size_t)s->data[i].length * sizeof(int32_t);
        hash = hash_more(hash, s->data[i].ids, bytes);
        hash = hash_more(hash, s->data[i].labels, bytes);
    }
    return hash;
}

static void counts_print(app* a) {
    const counts* c = &a->counted;
    say(a, "data: %zu samples, %llu tokens, %llu of them trained; %zu held out\n",
        c->used - a->eval.count * (a->eval_data == NULL ? 1 : 0), (unsigned long long)c->tokens,
        (unsigned long long)c->trained, a->eval.count);
    if (c->too_long > 0) {
        say(a, "  %zu too long for --length %lld (the longest has %zu tokens): %s\n", c->too_long,
            (long long)a->o.length, c->longest,
            a->o.truncate ? "truncated" : "skipped; use --truncate to shorten them instead");
    }
    if (c->empty > 0) {
        say(a, "  %zu empty: skipped\n", c->empty);
    }
    if (c->masked > 0) {
        say(a, "  %zu with nothing to train on: skipped\n", c->masked);
    }
}

static bool samples_open(app* a) {
    if (a->data == NULL && !data_open(a, a->o.data, &a->data)) {
        return false;
    }
    if (!samples_take(a, a->data, &a->train, &a->counted)) {
        return false;
    }
    if (a->o.eval_data != NULL) {
        counts unused;
        if (!data_open(a, a->o.eval_data, &a->eval_data) ||
            !samples_take(a, a->eval_data, &a->eval, &unused)) {
            return false;
        }
    }
    if (a->train.count == 0 && !a->o.doctor) {
        const counts* c = &a->counted;
        return fail(a->error,
                    "%s: none of the %zu samples can be used for training: %zu too long for "
                    "--length %lld, %zu empty, %zu with nothing to train on; see --doctor",
                    a->o.data, c->all, c->too_long, (long long)a->o.length, c->empty, c->masked);
    }
    if (!samples_split(a)) {
        return false;
    }
    a->data_hash = samples_hash(&a->eval, samples_hash(&a->train, HASH_START));
    return true;
}

// ---- packing -----------------------------------------------------------------------------------

static void packs_free(packs* p) {
    free(p->order);
    free(p->starts);
    memset(p, 0, sizeof *p);
}

typedef struct open_pack {
    uint32_t number;
    int64_t tokens;
    int64_t sequences;
} open_pack;

// Assigns each sample, in the order of `order`, to the first of a few open packs that has room. If
// none has, the fullest pack is closed. Returns the number of packs.
static uint32_t packs_assign(const app* a, const samples* s, const uint32_t* order,
                             uint32_t* pack_of) {
    open_pack open[OPEN_PACKS];
    int open_count = 0;
    uint32_t made = 0;
    for (size_t i = 0; i < s->count; i++) {
        int64_t length = s->data[order[i]].length;
        int at = 0;
        int fullest = 0;
        while (at < open_count && (open[at].tokens + length > a->model_desc.tokens ||
                                   open[at].sequences == a->model_desc.max_sequences)) {
            fullest = open[at].tokens > open[fullest].tokens ? at : fullest;
            at++;
        }
        if (at == open_count) {
            at = open_count < OPEN_PACKS ? open_count++ : fullest;
            open[at].number = made++;
            open[at].tokens = 0;
            open[at].sequences = 0;
        }
        open[at].tokens += length;
        open[at].sequences++;
        pack_of[order[i]] = open[at].number;
    }
    return made;
}

// Packs every sample once, shuffled by key (0: unshuffled), within the token budget.
static bool packs_make(app* a, const samples* s, uint64_t key, packs* out) {
    packs_free(out);
    uint32_t* order = (uint32_t*)take(a, s->count, sizeof *order);
    uint32_t* pack_of = (uint32_t*)take(a, s->count, sizeof *pack_of);
    out->order = (uint32_t*)take(a, s->count, sizeof *order);
    out->starts = (size_t*)take(a, s->count + 2, sizeof *out->starts);
    bool ok = order != NULL && pack_of != NULL && out->order != NULL && out->starts != NULL;
    if (ok) {
        for (size_t i = 0; i < s->count; i++) {
            order[i] = (uint32_t)i;
        }
        if (key != 0) {
            shuffle(order, s->count, key);
        }
        out->count = packs_assign(a, s, order, pack_of);
        for (size_t i = 0; i < s->count; i++) {
            out->starts[pack_of[i] + 2]++;
        }
        for (size_t p = 0; p < out->count; p++) {
            out->starts[p + 2] += out->starts[p + 1];
        }
        for (size_t i = 0; i < s->count; i++) {
            out->order[out->starts[pack_of[order[i]] + 1]++] = order[i];
        }
    }
    free(order);
    free(pack_of);
    return ok;
}

static bool epoch_make(app* a, int64_t epoch, packs* out) {
    uint64_t key = mix(mix((uint64_t)a->o.seed) ^ (uint64_t)epoch);
    return packs_make(a, &a->train, key != 0 ? key : 1, out);
}

static int64_t epoch_steps(const app* a, const packs* p) {
    return ((int64_t)p->count + a->o.accumulate - 1) / a->o.accumulate;
}

static bool total_steps_find(app* a) {
    if (a->o.steps > 0) {
        a->total_steps = a->o.steps;
        return true;
    }
    packs p;
    memset(&p, 0, sizeof p);
    double left = a->o.epochs;
    for (int64_t epoch = 0; left > 1e-9; epoch++, left -= 1.0) {
        if (!epoch_make(a, epoch, &p)) {
            return false;
        }
        a->total_steps += (int64_t)ceil(fmin(left, 1.0) * (double)epoch_steps(a, &p) - 1e-9);
    }
    packs_free(&p);
    return true;
}

// Moves to the epoch and pack at which a step starts.
static bool position_seek(app* a, int64_t step) {
    int64_t before = 0;
    for (a->epoch = 0;; a->epoch++) {
        if (!epoch_make(a, a->epoch, &a->now)) {
            return false;
        }
        int64_t here = epoch_steps(a, &a->now);
        if (step < before + here) {
            a->next_pack = (size_t)((step - before) * a->o.accumulate);
            return true;
        }
        before += here;
    }
}

static bool batch_room(app* a) {
    size_t tokens = (size_t)a->model_desc.tokens;
    size_t sequences = (size_t)a->model_desc.max_sequences;
    a->ids = (int32_t*)take(a, tokens, sizeof(int32_t));
    a->labels = (int32_t*)take(a, tokens, sizeof(int32_t));
    a->lengths = (int32_t*)take(a, sequences, sizeof(int32_t));
    a->numbers = (int32_t*)take(a, sequences, sizeof(int32_t));
    return a->ids != NULL && a->labels != NULL && a->lengths != NULL && a->numbers != NULL;
}

static qlora_batch batch_fill(app* a, const samples* s, const packs* p, size_t pack) {
    qlora_batch batch;
    memset(&batch, 0, sizeof batch);
    size_t used = 0;
    for (size_t i = p->starts[pack]; i < p->starts[pack + 1]; i++) {
        const sample* one = &s->data[p->order[i]];
        size_t bytes = (size_t)one->length * sizeof(int32_t);
        memcpy(a->ids + used, one->ids, bytes);
        memcpy(a->labels + used, one->labels, bytes);
        a->lengths[batch.count] = one->length;
        a->numbers[batch.count] = one->number;
        used += (size_t)one->length;
        batch.count++;
    }
    batch.ids = a->ids;
    batch.labels = a->labels;
    batch.lengths = a->lengths;
    batch.sequences = a->numbers;
    return batch;
}

static int64_t pack_labels(const samples* s, const packs* p, size_t pack) {
    int64_t labels = 0;
    for (size_t i = p->starts[pack]; i < p->starts[pack + 1]; i++) {
        labels += s->data[p->order[i]].trained;
    }
    return labels;
}

// ---- files -------------------------------------------------------------------------------------

// Writes to a temporary name, then renames, so that readers never see a partial file.
static bool file_replace(app* a, const char* name, const void* data, size_t size) {
    char path[PATH_SIZE];
    char temporary[PATH_SIZE + 8];
    out_path(a, name, path);
    snprintf(temporary, sizeof temporary, "%s.new", path);
    FILE* file = fopen(temporary, "wb");
    bool ok = file != NULL;
    int code = errno;
    if (ok) {
        ok = (size == 0 || fwrite(data, 1, size, file) == size) && fflush(file) == 0;
        code = errno;
        if (fclose(file) != 0 && ok) {
            ok = false;
            code = errno;
        }
        if (ok && (code = a->files.rename(temporary, path, a->files.user)) != 0) {
            ok = false;
        }
        if (!ok) {
            remove(temporary);
        }
    }
    return ok || fail(a->error, "cannot write %s: %s", path, strerror(code));
}

PRINTF(2, 3)
static void put(blob* out, const char* format, ...) {
    char text[512];
    va_list args;
    va_start(args, format);
    int n = vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (n > 0) {
        blob_add(out, text, (size_t)n < sizeof text ? (size_t)n : sizeof text - 1);
    }
}

static void put_number(blob* out, const char* name, double value, const char* format) {
    put(out, ",\"%s\":", name);
    if (known(value)) {
        put(out, format, value);
    } else {
        put(out, "null"); // JSON has no NaN
    }
}

static bool points_add(app* a, const point* p) {
    if (a->point_count == a->point_room) {
        size_t room = a->point_room * 2 + 256;
        point* grown = (point*)realloc(a->points, room * sizeof *grown);
        if (grown == NULL) {
            return fail(a->error, "out of memory");
        }
        a->points = grown;
        a->point_room = room;
    }
    a->points[a->point_count++] = *p;
    return true;
}

static int file_cut(const char* path, long size) {
#ifdef _WIN32
    FILE* file = fopen(path, "r+b");
    int result = file != NULL ? _chsize(_fileno(file), size) : -1;
    if (file != NULL) {
        fclose(file);
    }
    return result;
#else
    return truncate(path, size);
#endif
}

// Writes the pending lines. If the disk is full, a partial write is undone and the lines stay
// pending.
static bool log_flush(app* a) {
    char path[PATH_SIZE];
    out_path(a, "log.jsonl", path);
    if (a->log == NULL) {
        a->log = fopen(path, "ab");
        if (a->log == NULL) {
            return fail(a->error, "cannot write %s: %s", path, strerror(errno));
        }
        fseek(a->log, 0, SEEK_END);
    }
    long before = ftell(a->log);
    size_t count = a->log_rest.count;
    if (count == 0 ||
        (fwrite(a->log_rest.data, 1, count, a->log) == count && fflush(a->log) == 0)) {
        a->log_rest.count = 0;
        return true;
    }
    int code = errno;
    fclose(a->log);
    a->log = NULL;
    a->log_torn = before < 0 || file_cut(path, before) != 0;
    return fail(a->error, "cannot write %s%s: %s", path,
                a->log_torn ? " or remove its last, partial line" : "", strerror(code));
}

// Appends one line. If that fails, training continues.
static void log_line(app* a, const blob* line) {
    if (!a->log_torn) {
        bool ok = blob_add(&a->log_rest, line->data, line->count) ||
                  fail(a->error, "cannot write the log: out of memory");
        bear(a, TOLD_LOG, ok && log_flush(a));
    }
}

static void log_step(app* a, const point* p, const qlora_train_info* info) {
    blob line;
    memset(&line, 0, sizeof line);
    put(&line, "{\"step\":%lld", (long long)p->step);
    put_number(&line, "loss", p->loss, "%.9g");
    put_number(&line, "grad_norm", p->grad_norm, "%.9g");
    put_number(&line, "lr", p->lr, "%.9g");
    put_number(&line, "tokens_per_s", p->tokens_per_s, "%.1f");
    put_number(&line, "seconds", a->seconds, "%.3f");
    put(&line, ",\"tokens\":%lld,\"labels\":%.0f,\"memory_bytes\":%llu%s}\n",
        (long long)info->tokens, info->labels, (unsigned long long)memory_used(a),
        info->last_skipped ? ",\"skipped\":true" : "");
    log_line(a, &line);
    blob_free(&line);
}

static void log_eval(app* a, const point* p) {
    blob line;
    memset(&line, 0, sizeof line);
    put(&line, "{\"step\":%lld", (long long)p->step);
    put_number(&line, "eval_loss", p->eval_loss, "%.9g");
    put_number(&line, "perplexity", exp(p->eval_loss), "%.9g");
    put(&line, "}\n");
    log_line(a, &line);
    blob_free(&line);
}

static double log_value(const char* line, const char* end, const char* name) {
    char key[40];
    int n = snprintf(key, sizeof key, "\"%s\":", name);
    for (const char* at = line; at + n < end; at++) {
        if (strncmp(at, key, (size_t)n) == 0) {
            return at[n] == 'n' ? (double)NAN : strtod(at + n, NULL);
        }
    }
    return (double)NAN;
}

// Reads a whole file. A missing file leaves `out` empty; one that exists must be readable.
static bool file_read(app* a, const char* path, blob* out) {
    int code = blob_read_path(out, path);
    return code == 0 || code == ENOENT ||
           fail(a->error, "cannot read %s: %s", path, strerror(code));
}

// Keeps the log's lines up to a->step and restores the plot's points from them.
static bool log_trim(app* a) {
    char path[PATH_SIZE];
    blob text;
    blob kept;
    memset(&text, 0, sizeof text);
    memset(&kept, 0, sizeof kept);
    out_path(a, "log.jsonl", path);
    bool ok = a->step == 0 || file_read(a, path, &text);
    if (ok && text.count > 0) {
        const char* end = text.data + text.count;
        for (const char* line = text.data; ok && line < end;) {
            const char* stop = (const char*)memchr(line, '\n', (size_t)(end - line));
            double step = stop != NULL ? log_value(line, stop, "step") : (double)NAN;
            if (stop == NULL || !(step <= (double)a->step)) {
                break; // a partial line, or one later than the checkpoint
            }
            point p;
            p.step = (int64_t)step;
            p.loss = log_value(line, stop, "loss");
            p.grad_norm = log_value(line, stop, "grad_norm");
            p.lr = log_value(line, stop, "lr");
            p.tokens_per_s = log_value(line, stop, "tokens_per_s");
            p.eval_loss = log_value(line, stop, "eval_loss");
            a->last_loss = known(p.loss) ? p.loss : a->last_loss;
            a->last_eval = known(p.eval_loss) ? p.eval_loss : a->last_eval;
            ok = points_add(a, &p) && blob_add(&kept, line, (size_t)(stop + 1 - line));
            line = stop + 1;
        }
    }
    ok = ok && file_replace(a, "log.jsonl", kept.data, kept.count);
    blob_free(&text);
    blob_free(&kept);
    return ok;
}

static void name_take(const char* name, char first[256]) {
    bool ours = strcmp(name, ".") == 0 || strcmp(name, "..") == 0 ||
                strcmp(name, ".finetune") == 0 || strcmp(name, ".finetune.new") == 0;
    if (!ours && (first[0] == '\0' || strcmp(name, first) < 0)) {
        snprintf(first, 256, "%s", name);
    }
}

// Finds the first name in a folder, in the order of strcmp ("" if it is empty). Returns 0 or errno.
static int folder_look(const char* path, char first[256]) {
    first[0] = '\0';
#ifdef _WIN32
    struct _finddata_t entry;
    char all[PATH_SIZE + 8];
    snprintf(all, sizeof all, "%s/*", path);
    intptr_t folder = _findfirst(all, &entry);
    if (folder == -1) {
        return errno;
    }
    do {
        name_take(entry.name, first);
    } while (_findnext(folder, &entry) == 0);
    _findclose(folder);
#else
    DIR* folder = opendir(path);
    if (folder == NULL) {
        return errno;
    }
    for (struct dirent* entry = readdir(folder); entry != NULL; entry = readdir(folder)) {
        name_take(entry->d_name, first);
    }
    closedir(folder);
#endif
    return 0;
}

// A run of finetune is recognised by its settings.txt: these names come first in every version.
static bool settings_ours(const blob* text) {
    static const char* const names[] = {"model ", "data ", "template ", "adapter ", "rank "};
    const char* line = text->count > 0 ? text->data : "";
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        if (strncmp(line, names[i], strlen(names[i])) != 0) {
            return false;
        }
        line += strcspn(line, "\n");
        line += *line == '\n' ? 1 : 0;
    }
    return true;
}

// A folder that is not empty must contain a run of finetune. If only its settings are missing, the
// checkpoint identifies it; nothing is overwritten before that has been read.
static bool out_check(app* a, const char* first) {
    char path[PATH_SIZE];
    blob kept;
    memset(&kept, 0, sizeof kept);
    a->out_empty = first[0] == '\0';
    if (a->out_empty) {
        return true;
    }
    bool ours = false;
    out_path(a, "settings.txt", path);
    bool ok = file_read(a, path, &kept);
    ours = ok && settings_ours(&kept);
    if (ok && kept.data == NULL && a->o.resume != RESUME_NEVER) {
        out_path(a, "checkpoint", path);
        ok = lib(a, qlora_checkpoint_exists(a->ctx, path, &ours), "looking for a checkpoint");
    }
    blob_free(&kept);
    return ok && (ours || fail(a->error,
                               "--out %s: the folder contains '%s' but no finetune run; choose an "
                               "empty or new folder",
                               a->o.out, first));
}

// Creates the folder and its parents, and checks that it is writable before the long start.
static bool out_make(app* a) {
    char path[PATH_SIZE];
    char first[256];
    snprintf(path, sizeof path, "%s", a->o.out);
    if (strlen(a->o.out) + 64 > PATH_SIZE) {
        return fail(a->error, "--out: the path is longer than %d characters", PATH_SIZE - 64);
    }
    int before = folder_look(a->o.out, first);
    int code = before;
    if (before != 0) {
        for (size_t i = 1; path[i] != '\0'; i++) {
            if (path[i] == '/' || path[i] == '\\') {
                char keep = path[i];
                path[i] = '\0';
                a->files.make_dir(path, a->files.user); // errors show up in the last call
                path[i] = keep;
            }
        }
        code = a->files.make_dir(a->o.out, a->files.user);
        if (code != 0) {
            return fail(a->error, "cannot create the output folder %s: %s", a->o.out,
                        strerror(code));
        }
        code = folder_look(a->o.out, first);
    }
    if (code == ENOENT || code == ENOTDIR) { // something else has that name
        return fail(a->error, "--out %s is not a folder", a->o.out);
    }
    if (code != 0) {
        return fail(a->error, "cannot read the output folder %s: %s", a->o.out, strerror(code));
    }
    a->out_made = before == ENOENT;
    if (!out_check(a, first) || !file_replace(a, ".finetune", "1\n", 2)) {
        return false;
    }
    out_path(a, ".finetune", path);
    remove(path);
    return true;
}

// Compares the options with those of a run to be resumed, before anything slow starts.
static bool settings_check(app* a) {
    char path[PATH_SIZE];
    char settings[SETTINGS_SIZE];
    char then[256];
    char now[256];
    blob kept;
    memset(&kept, 0, sizeof kept);
    settings_write(&a->o, settings, sizeof settings);
    a->settings_hash = hash_more(HASH_START, settings, strlen(settings));
    out_path(a, "checkpoint", path);
    if (!out_make(a) ||
        !lib(a, qlora_checkpoint_exists(a->ctx, path, &a->resuming), "looking for a checkpoint")) {
        return false;
    }
    if (!a->resuming && a->o.resume == RESUME_MUST) {
        return fail(a->error, "--resume must: no checkpoint found in %s", path);
    }
    a->resuming = a->resuming && a->o.resume != RESUME_NEVER;
    if (!a->resuming) {
        return true;
    }
    out_path(a, "settings.txt", path);
    bool ok = file_read(a, path, &kept) &&
              (kept.data == NULL || settings_equal(kept.data, settings, then, now) ||
               fail(a->error,
                    "%s contains a run with different options: it used %s, this command has %s; "
                    "use the same options, a different --out, or --resume never to start over",
                    a->o.out, then, now));
    blob_free(&kept);
    return ok;
}

// The model is ready, so the folder now belongs to this run: its options go into OUT/settings.txt,
// and an earlier run's checkpoint is invalidated by removing its list, even if this run ends before
// it saves one.
static bool out_begin(app* a) {
    char path[PATH_SIZE];
    char settings[SETTINGS_SIZE];
    if (!a->resuming) {
        a->files_made = a->out_empty;
        settings_write(&a->o, settings, sizeof settings);
        if (!file_replace(a, "settings.txt", settings, strlen(settings))) {
            return false;
        }
        out_path(a, "checkpoint/latest", path);
        if (remove(path) != 0 && errno != ENOENT) {
            return fail(a->error, "cannot remove %s: %s", path, strerror(errno));
        }
    }
    return log_trim(a) && log_flush(a);
}

// Removes what a failed start has created and nothing else; a run that has started keeps its files.
static void out_unmake(app* a) {
    char path[PATH_SIZE];
    if (a->log != NULL) {
        fclose(a->log);
        a->log = NULL;
    }
    if (a->files_made) {
        out_path(a, "log.jsonl", path);
        remove(path);
        out_path(a, "settings.txt", path);
        remove(path);
    }
    if (a->out_made) { // rmdir removes it only if it is empty
#ifdef _WIN32
        (void)_rmdir(a->o.out);
#else
        (void)rmdir(a->o.out);
#endif
    }
}

// ---- the plot ----------------------------------------------------------------------------------

#define PICTURE_BUCKETS 300

typedef struct panel {
    const char* title;
    double top;
    double height;
    double low; // range of the values
    double high;
} panel;

typedef struct series {
    double x[PICTURE_BUCKETS];
    double y[PICTURE_BUCKETS];
    int count;
} series;

static double point_value(const point* p, int which) {
    return which == 0 ? p->loss : which == 1 ? p->lr : which == 2 ? p->tokens_per_s : p->eval_loss;
}

// Averages the points into at most PICTURE_BUCKETS buckets, so that long runs give small files.
static void series_make(const app* a, int which, series* out) {
    double sum_x[PICTURE_BUCKETS] = {0.0};
    double sum_y[PICTURE_BUCKETS] = {0.0};
    int64_t counted[PICTURE_BUCKETS] = {0};
    int64_t last = a->point_count > 0 ? a->points[a->point_count - 1].step : 0;
    for (size_t i = 0; i < a->point_count; i++) {
        double y = point_value(&a->points[i], which);
        if (known(y)) {
            int64_t bucket = a->points[i].step * (PICTURE_BUCKETS - 1) / (last > 0 ? last : 1);
            sum_x[bucket] += (double)a->points[i].step;
            sum_y[bucket] += y;
            counted[bucket]++;
        }
    }
    out->count = 0;
    for (int b = 0; b < PICTURE_BUCKETS; b++) {
        if (counted[b] > 0) {
            out->x[out->count] = sum_x[b] / (double)counted[b];
            out->y[out->count++] = sum_y[b] / (double)counted[b];
        }
    }
}

static void series_range(const series* s, double* low, double* high) {
    for (int i = 0; i < s->count; i++) {
        *low = fmin(*low, s->y[i]);
        *high = fmax(*high, s->y[i]);
    }
}

static void series_smooth(series* s) { // centred moving average
    series raw = *s;
    int reach = s->count / 40;
    for (int i = 0; i < s->count; i++) {
        int left = reach < i ? reach : i;
        int right = left < s->count - 1 - i ? left : s->count - 1 - i;
        double sum = 0.0;
        for (int j = i - left; j <= i + right; j++) {
            sum += raw.y[j];
        }
        s->y[i] = sum / (double)(left + right + 1);
    }
}

#define PLOT_LEFT 76.0
#define PLOT_WIDTH 780.0

static double plot_x(const app* a, double step) {
    return PLOT_LEFT + PLOT_WIDTH * step / (double)(a->total_steps > 0 ? a->total_steps : 1);
}

static double plot_y(const panel* p, double value) {
    double range = p->high > p->low ? p->high - p->low : 1.0;
    return p->top + p->height * (1.0 - (value - p->low) / range);
}

static double tick_size(double range, int wanted) {
    double raw = range / wanted;
    double power = pow(10.0, floor(log10(raw > 0.0 ? raw : 1.0)));
    double lead = raw / power;
    return power * (lead <= 1.0 ? 1.0 : lead <= 2.0 ? 2.0 : lead <= 5.0 ? 5.0 : 10.0);
}

static void panel_frame(blob* out, const panel* p) {
    double tick = tick_size(p->high - p->low, p->height > 150.0 ? 7 : 2);
    put(out, "<text x=\"%.0f\" y=\"%.1f\" class=\"h\">%s</text>\n", PLOT_LEFT, p->top - 8.0,
        p->title);
    for (double v = ceil(p->low / tick - 1e-9) * tick; v <= p->high + tick * 1e-6; v += tick) {
        double y = plot_y(p, v);
        char label[32];
        if (fabs(v) >= 1000.0) {
            short_number(v, label);
        } else {
            snprintf(label, sizeof label, "%.3g", fabs(v) < tick * 1e-6 ? 0.0 : v);
        }
        put(out, "<line x1=\"%.0f\" y1=\"%.1f\" x2=\"%.0f\" y2=\"%.1f\" class=\"g\"/>\n", PLOT_LEFT,
            y, PLOT_LEFT + PLOT_WIDTH, y);
        put(out, "<text x=\"%.0f\" y=\"%.1f\" text-anchor=\"end\">%s</text>\n", PLOT_LEFT - 8.0,
            y + 4.0, label);
    }
}

static void series_draw(const app* a, blob* out, const panel* p, const series* s,
                        const char* kind) {
    if (s->count == 0) {
        return;
    }
    put(out, "<polyline class=\"%s\" points=\"", kind);
    for (int i = 0; i < s->count; i++) {
        put(out, "%.1f,%.1f ", plot_x(a, s->x[i]), plot_y(p, s->y[i]));
    }
    put(out, "\"/>\n");
    for (int i = 0; strcmp(kind, "e") == 0 && i < s->count; i++) {
        put(out, "<circle class=\"d\" cx=\"%.1f\" cy=\"%.1f\" r=\"4\"/>\n", plot_x(a, s->x[i]),
            plot_y(p, s->y[i]));
    }
}

static void steps_axis(const app* a, blob* out, double y) {
    double tick = fmax(1.0, tick_size((double)a->total_steps, 8));
    for (double v = 0.0; v <= (double)a->total_steps; v += tick) {
        put(out, "<text x=\"%.1f\" y=\"%.0f\" text-anchor=\"middle\">%.0f</text>\n", plot_x(a, v),
            y, v);
    }
    put(out, "<text x=\"%.0f\" y=\"%.0f\" text-anchor=\"end\">step</text>\n",
        PLOT_LEFT + PLOT_WIDTH, y + 18.0);
}

static void picture_head(const app* a, blob* out) {
    put(out, "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 880 600\" width=\"880\" "
             "height=\"600\">\n<style>\n"
             "text { font: 12px sans-serif; fill: #555 }\n"
             ".h { font: bold 13px sans-serif; fill: #222 }\n"
             ".t { font: bold 17px sans-serif; fill: #111 }\n");
    put(out, ".g { stroke: #e4e4e4; stroke-width: 1 }\n"
             "polyline { fill: none; stroke-linejoin: round }\n"
             ".r { stroke: #a9c8ea; stroke-width: 1 }\n"
             ".s { stroke: #1f6fc0; stroke-width: 2.2 }\n"
             ".e { stroke: #d9622b; stroke-width: 2 }\n"
             ".d { fill: #d9622b }\n"
             ".l { stroke: #4a9a62; stroke-width: 2 }\n"
             ".p { stroke: #8a63b5; stroke-width: 1.6 }\n</style>\n"
             "<rect width=\"880\" height=\"600\" fill=\"#fff\"/>\n");
    put(out, "<text x=\"%.0f\" y=\"30\" class=\"t\">step %lld of %lld, loss %.4f", PLOT_LEFT,
        (long long)a->step, (long long)a->total_steps, a->last_loss);
    if (known(a->last_eval)) {
        put(out, ", held out %.4f", a->last_eval);
    }
    put(out, "</text>\n");
    put(out, "<line x1=\"600\" y1=\"52\" x2=\"630\" y2=\"52\" class=\"s\"/>"
             "<text x=\"636\" y=\"56\">training</text>"
             "<line x1=\"712\" y1=\"52\" x2=\"742\" y2=\"52\" class=\"e\"/>"
             "<circle class=\"d\" cx=\"727\" cy=\"52\" r=\"4\"/>"
             "<text x=\"748\" y=\"56\">held out</text>\n");
}

static void picture_panels(const app* a, blob* out) {
    series s;
    series eval;
    panel p = {"loss", 64.0, 290.0, 1e30, -1e30};
    series_make(a, 0, &s);
    series_make(a, 3, &eval);
    series_range(&s, &p.low, &p.high);
    series_range(&eval, &p.low, &p.high);
    p.low = p.low > 1e29 || p.low < 0.3 * p.high ? 0.0 : p.low;
    p.high = p.high > p.low ? p.high : p.low + 1.0;
    panel_frame(out, &p);
    series_draw(a, out, &p, &s, "r");
    series_smooth(&s);
    series_draw(a, out, &p, &s, "s");
    series_draw(a, out, &p, &eval, "e");

    panel lr = {"learning rate", 398.0, 60.0, 0.0, 1e-30};
    series_make(a, 1, &s);
    series_range(&s, &lr.low, &lr.high);
    panel_frame(out, &lr);
    series_draw(a, out, &lr, &s, "l");

    panel speed = {"tokens per second", 500.0, 50.0, 0.0, 1.0};
    series_make(a, 2, &s);
    series_range(&s, &speed.low, &speed.high);
    panel_frame(out, &speed);
    series_draw(a, out, &speed, &s, "p");
    steps_axis(a, out, 572.0);
}

// Writes the plot if it is due, or `now`; plotting takes at most 2% of the time.
static void picture_write(app* a, bool now) {
    double start = seconds_now();
    if (a->point_count == 0 || (!now && start - a->svg_at < fmax(2.0, 50.0 * a->svg_cost))) {
        return;
    }
    blob out;
    memset(&out, 0, sizeof out);
    picture_head(a, &out);
    picture_panels(a, &out);
    put(&out, "</svg>\n");
    bear(a, TOLD_PICTURE, file_replace(a, "training.svg", out.data, out.count));
    blob_free(&out);
    a->svg_at = seconds_now();
    a->svg_cost = a->svg_at - start;
}

// ---- the run -----------------------------------------------------------------------------------

// Dense 16-bit tensor peak with fp32 accumulation from the vendor's data sheets, in TFLOP/s.
static const struct {
    const char* name;
    double peak;
} peak_table[] = {
    {"H100 PCIe", 756.0}, {"H100 NVL", 835.0}, {"H200", 989.0},    {"GH200", 989.0},
    {"H100", 989.0},      {"H800", 989.0},     {"H20", 148.0},     {"B200", 2250.0},
    {"A100", 312.0},      {"A800", 312.0},     {"A40", 149.7},     {"A10", 125.0},
    {"L40S", 362.0},      {"L40", 181.0},      {"L4", 121.0},      {"RTX A6000", 154.8},
    {"RTX 5090", 209.5},  {"RTX 4090", 165.2}, {"RTX 4080", 97.5}, {"RTX 3090", 71.0},
    {"RTX 3080", 59.5},
};

static void peak_find(app* a) {
    char text[2048];
    qlora_describe(a->ctx, text, sizeof text);
    const char* device = strstr(text, "device:");
    if (device == NULL || a->plan.mode != QLORA_MODE_BF16) {
        return;
    }
    for (size_t i = 0; i < sizeof peak_table / sizeof peak_table[0]; i++) {
        if (strstr(device, peak_table[i].name) != NULL) {
            a->peak_flop = peak_table[i].peak * 1e12;
            return;
        }
    }
}

// Useful work: 4 FLOP per frozen weight and token (forward, input gradient), 6 per adapter weight,
// causal attention, and the head for trained tokens. Recomputation is not counted.
static double pack_flop(const app* a, const samples* s, const packs* p, size_t pack) {
    const qlora_model_config* c = &a->config;
    double q = (double)(c->heads * c->head_dim);
    double kv = (double)(c->kv_heads * c->head_dim);
    double hidden = (double)c->hidden;
    double linear =
        (double)c->layers * hidden * (2.0 * q + 2.0 * kv + 3.0 * (double)c->intermediate);
    double flop = 0.0;
    for (size_t i = p->starts[pack]; i < p->starts[pack + 1]; i++) {
        double length = s->data[p->order[i]].length;
        double trained = s->data[p->order[i]].trained;
        flop += length * (4.0 * linear + 6.0 * (double)a->plan.parameters);
        flop += trained * 4.0 * hidden * (double)c->vocab;
        flop += 7.0 * length * length * q * (double)c->layers;
    }
    return flop;
}

static bool step_train(app* a, qlora_train_info* info) {
    if (a->next_pack >= a->now.count) {
        a->epoch++;
        a->next_pack = 0;
        if (!epoch_make(a, a->epoch, &a->now)) {
            return false;
        }
    }
    size_t end = a->next_pack + (size_t)a->o.accumulate;
    end = end < a->now.count ? end : a->now.count;
    int64_t labels = 0; // in the whole step, so that every trained token has the same weight
    a->step_flop = 0.0;
    for (size_t p = a->next_pack; p < end; p++) {
        labels += pack_labels(&a->train, &a->now, p);
        a->step_flop += pack_flop(a, &a->train, &a->now, p);
    }
    for (; a->next_pack < end; a->next_pack++) {
        qlora_batch batch = batch_fill(a, &a->train, &a->now, a->next_pack);
        if (!lib(a, qlora_train_micro(a->trainer, &batch, (double)labels), "training")) {
            return false;
        }
    }
    if (!lib(a, qlora_train_update(a->trainer), "training") ||
        !lib(a, qlora_train_query(a->trainer, info), "training")) {
        return false;
    }
    a->skipped_in_row = info->last_skipped ? a->skipped_in_row + 1 : 0;
    if (a->skipped_in_row == 10) {
        return fail(a->error,
                    "step %lld: ten consecutive non-finite gradients; try a lower --lr or --mode "
                    "f32",
                    (long long)info->step);
    }
    return true;
}

static bool evaluate(app* a) {
    if (a->eval.count == 0) {
        return true;
    }
    double loss = 0.0;
    double labels = 0.0;
    for (size_t p = 0; p < a->eval_packs.count; p++) {
        qlora_eval_info info;
        qlora_batch batch = batch_fill(a, &a->eval, &a->eval_packs, p);
        if (!lib(a, qlora_eval(a->model, &batch, &info), "evaluating")) {
            return false;
        }
        loss += info.loss;
        labels += info.labels;
    }
    a->last_eval = labels > 0.0 ? loss / labels : (double)NAN;
    if (a->step == 0) {
        a->first_eval = a->last_eval;
    }
    point p = {a->step, (double)NAN, (double)NAN, (double)NAN, (double)NAN, a->last_eval};
    if (a->screen.live || a->step == 0 || a->step == a->total_steps || a->total_steps <= 1000) {
        say(a, "step %lld: held out %.4f, ppl %.4g\n", (long long)a->step, a->last_eval,
            exp(a->last_eval));
    }
    log_eval(a, &p);
    return points_add(a, &p);
}

static bool checkpoint_save(app* a) {
    char path[PATH_SIZE];
    position* p = (position*)take(a, 1, sizeof *p);
    if (p == NULL) {
        return false;
    }
    memcpy(p->magic, POSITION_MAGIC, 8);
    p->settings_hash = a->settings_hash;
    p->data_hash = a->data_hash;
    p->total_steps = a->total_steps;
    p->seconds = a->seconds;
    p->first_eval = a->first_eval;
    p->first_loss = a->first_loss;
    p->tokens = a->tokens_seen;
    out_path(a, "checkpoint", path);
    bool ok = lib(a, qlora_checkpoint_save(a->trainer, path, p, sizeof *p), "saving a checkpoint");
    free(p);
    return ok;
}

static bool position_check(app* a, const position* p) {
    if (memcmp(p->magic, POSITION_MAGIC, 8) != 0 || p->settings_hash != a->settings_hash) {
        return fail(a->error,
                    "%s/checkpoint was saved with different options; use --resume never to start "
                    "over",
                    a->o.out);
    }
    if (p->data_hash != a->data_hash) {
        return fail(a->error,
                    "the data has changed since %s/checkpoint was saved; use --resume never to "
                    "start over",
                    a->o.out);
    }
    return true;
}

static bool checkpoint_load(app* a) {
    char path[PATH_SIZE];
    out_path(a, "checkpoint", path);
    if (!a->resuming) {
        return true;
    }
    position* p = (position*)take(a, 1, sizeof *p);
    if (p == NULL) {
        return false;
    }
    size_t size = sizeof *p;
    bool ok = lib(a, qlora_checkpoint_load(a->trainer, path, p, &size), "resuming");
    ok = ok && (size == sizeof *p || fail(a->error, "%s was not saved by finetune", path));
    ok = ok && position_check(a, p);
    qlora_train_info info;
    ok = ok && lib(a, qlora_train_query(a->trainer, &info), "resuming");
    if (ok) {
        a->step = info.step;
        a->seconds = p->seconds;
        a->first_eval = p->first_eval;
        a->first_loss = p->first_loss;
        a->tokens_seen = p->tokens;
    }
    free(p);
    return ok;
}

static bool adapter_save(app* a) {
    char path[PATH_SIZE];
    const char* name = a->o.base_name != NULL ? a->o.base_name
                       : a->o.model != NULL   ? a->o.model
                                              : "demo";
    out_path(a, "adapter", path);
    qlora_adapter_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.base_name = name;
    bool ok = lib(a, qlora_adapter_save(a->model, path, &desc), "saving the adapter");
    if (!ok) {
        complain(a);
    }
    out_path(a, "adapter.gguf", path);
    if (!lib(a, qlora_adapter_save_gguf(a->model, path, NULL),
             "saving the adapter for llama.cpp")) {
        complain(a);
        ok = false;
    }
    return ok;
}

static int64_t interval(const app* a, int64_t wished) {
    int64_t tenth = (a->total_steps + 9) / 10;
    return wished > 0 ? wished : tenth > 1 ? tenth : 1;
}

static bool step_record(app* a, const qlora_train_info* info, double seconds) {
    point p;
    p.step = info->step;
    p.loss = info->loss;
    p.grad_norm = (double)info->grad_norm;
    p.lr = info->lr;
    p.tokens_per_s = seconds > 0.0 ? (double)info->tokens / seconds : 0.0;
    p.eval_loss = (double)NAN;
    a->pace = a->pace > 0.0 ? a->pace + 0.1 * (seconds - a->pace) : seconds;
    a->step = info->step;
    a->seconds += seconds;
    a->last_loss = info->loss;
    a->first_loss = info->step == 1 ? info->loss : a->first_loss;
    a->tokens_seen += (uint64_t)info->tokens;
    if (info->last_skipped) {
        say(a, "step %lld: skipped because of a non-finite gradient\n", (long long)info->step);
    }
    progress_draw(a, &p);
    log_step(a, &p, info);
    if (!points_add(a, &p)) {
        return false;
    }
    picture_write(a, false);
    return true;
}

// Saves each result independently, the checkpoint first, so that one failure does not lose the
// others.
static bool results_save(app* a) {
    a->files_made = false; // from here on there may be results to keep
    a->out_made = false;
    bool saved = checkpoint_save(a);
    if (!saved) {
        complain(a);
    }
    bool ok = adapter_save(a) && saved;
    if (a->log_rest.count > 0 && !a->log_torn) {
        bear(a, TOLD_LOG, log_flush(a));
    }
    picture_write(a, true);
    return ok;
}

static bool train_loop(app* a) {
    int64_t eval_every = interval(a, a->o.eval_every);
    int64_t save_every = interval(a, a->o.save_every);
    if (a->step == 0 && !evaluate(a)) {
        return false;
    }
    bool ok = true;
    while (ok && a->step < a->total_steps && stop_asked == 0) {
        qlora_train_info info;
        double start = seconds_now();
        if (!step_train(a, &info)) {
            return false;
        }
        bool last = info.step == a->total_steps;
        ok = step_record(a, &info, seconds_now() - start) &&
             ((!last && info.step % eval_every != 0) || evaluate(a));
        if (ok && !last && a->step % save_every == 0) {
            bear(a, TOLD_CHECKPOINT, checkpoint_save(a));
        }
    }
    if (!ok) { // the steps so far are complete and are saved anyway
        complain(a);
    }
    return results_save(a) && ok;
}

// ---- reports -----------------------------------------------------------------------------------

// Escapes control characters, which would disturb the terminal, and starts each line with a margin.
static void text_print(const char* text, size_t size, const char* margin) {
    size_t width = strlen(margin);
    printf("%s", margin);
    for (size_t i = 0; i < size; i++) {
        unsigned char c = (unsigned char)text[i];
        if (c == '\n') {
            printf("\n%*s%s", (int)width - 2, "", margin + width - 2);
        } else if (c < 32 || c == 127) {
            printf("\\x%02x", c);
        } else {
            putchar(c);
        }
    }
    printf("\n");
}

// Prints runs of trained and untrained tokens. Each run is decoded on its own, so that partial
// characters remain visible.
static bool sample_print(app* a, const qlora_text_sample* s, size_t number) {
    printf("sample %zu (line %zu): %zu tokens, %zu trained\n", number + 1, s->line, s->count,
           s->trained);
    for (size_t begin = 0; begin < s->count;) {
        bool trained = begin > 0 && s->labels[begin] != -100;
        size_t end = begin + 1;
        while (end < s->count && (s->labels[end] != -100) == trained) {
            end++;
        }
        qlora_text_bytes text;
        memset(&text, 0, sizeof text);
        if (qlora_text_decode(a->tok, s->ids + begin, end - begin, QLORA_TEXT_REPLACE, &text) !=
            QLORA_OK) {
            return text_fail(a, "");
        }
        text_print(text.data, text.count, trained ? "  TRAINED > " : "          | ");
        qlora_text_bytes_free(a->text, &text);
        begin = end;
    }
    return true;
}

static bool doctor_print(app* a) {
    const counts* c = &a->counted;
    size_t shown = (size_t)a->o.samples < c->all ? (size_t)a->o.samples : c->all;
    qlora_text_chat_info chat;
    if (qlora_text_chat_query(a->chat, &chat) != QLORA_OK) {
        return text_fail(a, "");
    }
    printf("chat format: %s (%s)\n\n", chat.name, chat.source);
    for (size_t i = 0; i < shown; i++) {
        qlora_text_sample s;
        if (qlora_text_sample_read(a->data, i, &s) != QLORA_OK) {
            return text_fail(a, "");
        }
        if (!sample_print(a, &s, i)) {
            return false;
        }
    }
    const struct {
        const char* what;
        size_t count;
        const char* then;
    } rows[] = {
        {"samples", c->all, ""},
        {"too long for --length", c->too_long, a->o.truncate ? "truncated" : "skipped"},
        {"empty", c->empty, "skipped"},
        {"nothing to train on", c->masked, "skipped"},
        {"end not trained", c->no_end, "the model will not learn to stop"},
        {"duplicate BOS at start", c->two_bos, "the text itself starts with one"},
        {"used", c->used, ""},
        {"of these held out", a->eval_data == NULL ? a->eval.count : 0, ""},
        {"longest, in tokens", c->longest, ""},
    };
    printf("\n");
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        bool remark = rows[i].then[0] != '\0' && rows[i].count > 0;
        printf("  %-24s %10zu%s%s\n", rows[i].what, rows[i].count, remark ? "   " : "",
               remark ? rows[i].then : "");
    }
    printf("  %-24s %10llu\n  %-24s %10llu (%.1f%%)\n", "tokens used",
           (unsigned long long)c->tokens, "of these trained", (unsigned long long)c->trained,
           c->tokens > 0 ? 100.0 * (double)c->trained / (double)c->tokens : 0.0);
    packs p;
    memset(&p, 0, sizeof p);
    if (a->train.count > 0 && epoch_make(a, 0, &p)) {
        printf("  %-24s %10zu\n  %-24s %10lld\n", "micro-batches per epoch", p.count, "total steps",
               (long long)a->total_steps);
    }
    packs_free(&p);
    return true;
}

static void plan_show(app* a) {
    char text[4096];
    qlora_plan_describe(&a->plan, text, sizeof text);
    printf("%s", text);
}

typedef struct shown {
    qlora_text* text;
    qlora_text_ids ids;
} shown;

static bool token_show(void* user, int32_t token) {
    shown* s = (shown*)user;
    return qlora_text_ids_add(s->text, &s->ids, token) == QLORA_OK;
}

// Generates greedily, so that the same model always gives the same text.
static bool prompt_show(app* a, const char* when) {
    shown all;
    qlora_text_bytes text;
    qlora_generate_desc desc;
    memset(&all, 0, sizeof all);
    all.text = a->text;
    memset(&text, 0, sizeof text);
    memset(&desc, 0, sizeof desc);
    if (a->o.prompt == NULL) {
        return true;
    }
    bool ok = qlora_text_encode(a->tok, a->o.prompt, strlen(a->o.prompt), QLORA_TEXT_SPECIAL,
                                &all.ids) == QLORA_OK ||
              text_fail(a, "--prompt: ");
    size_t given = all.ids.count;
    int32_t* prompt = ok ? (int32_t*)take(a, given, sizeof *prompt) : NULL;
    if (prompt != NULL) {
        memcpy(prompt, all.ids.data, given * sizeof *prompt);
        desc.prompt = prompt;
        desc.prompt_tokens = (int64_t)given;
        ok = lib(a, qlora_generate(a->model, &desc, token_show, &all), "generating") &&
             (qlora_text_decode(a->tok, all.ids.data, all.ids.count,
                                QLORA_TEXT_REPLACE | QLORA_TEXT_SKIP, &text) == QLORA_OK ||
              text_fail(a, ""));
        if (ok) {
            say(a, "%s training:\n", when);
            text_print(text.data, text.count, "  | ");
        }
    }
    free(prompt);
    qlora_text_ids_free(a->text, &all.ids);
    qlora_text_bytes_free(a->text, &text);
    return ok && prompt != NULL;
}

static void summary_print(app* a) {
    char tokens[32];
    char time_taken[32];
    char pace[32];
    say(a, "\n%lld steps, %s tokens in %s (%s tokens/s)\n", (long long)a->step,
        short_number((double)a->tokens_seen, tokens), short_time(a->seconds, time_taken),
        short_number(a->seconds > 0.0 ? (double)a->tokens_seen / a->seconds : 0.0, pace));
    say(a, "loss %.4f -> %.4f", a->first_loss, a->last_loss);
    if (known(a->first_eval) && known(a->last_eval)) {
        say(a, "; held out %.4f -> %.4f, perplexity %.4g -> %.4g", a->first_eval, a->last_eval,
            exp(a->first_eval), exp(a->last_eval));
    }
    say(a,
        "\n\n  %s/adapter       the adapter in PEFT format\n"
        "  %s/adapter.gguf  the adapter for llama.cpp\n"
        "  %s/training.svg  plot of the run\n"
        "  %s/log.jsonl     metrics, one line per step\n",
        a->o.out, a->o.out, a->o.out, a->o.out);
    if (!a->o.demo) {
        say(a,
            "\nPEFT:       model = PeftModel.from_pretrained(base, \"%s/adapter\")\n"
            "llama.cpp:  llama-cli -m BASE.gguf --lora %s/adapter.gguf\n",
            a->o.out, a->o.out);
    }
}

// ---- the demo's model and text -----------------------------------------------------------------

#define DEMO_SAMPLES 1500

static void demo_defaults(options* o) {
    o->out = "demo-out";
    o->rank = 64; // the model's width: the adapters can turn random weights into any others
    o->alpha = 64.0;
    o->train_norms = true;
    o->lr = 1e-2;
    o->beta2 = 0.98;
    o->steps = 200;
    o->warmup = 10;
    o->length = 64;
    o->tokens = 512;
    o->accumulate = 1;
    o->eval = 20;
    o->eval_every = 40;
    o->resume = RESUME_NEVER;
    o->template_name = "plain";
    o->prompt = "3 and 4 is";
}

static void demo_config(qlora_model_config* c) {
    memset(c, 0, sizeof *c);
    c->family = QLORA_FAMILY_LLAMA;
    c->vocab = 257; // the bytes and an end token
    c->hidden = 64;
    c->intermediate = 128;
    c->layers = 2;
    c->heads = 4;
    c->kv_heads = 4;
    c->head_dim = 16;
    c->max_positions = 256;
    c->rms_eps = 1e-5;
    c->rope.theta = 10000.0;
    c->rope.factor = 1.0;
    c->tied = true;
    c->dtype = QLORA_F32;
    c->bos_id = -1;
    c->pad_id = -1;
    c->stop_count = 1;
    c->stop_ids[0] = 256;
}

// A tokenizer.json whose tokens are the 256 bytes, spelled as in byte-level BPE: printable Latin-1
// bytes represent themselves, the others are mapped to code points from 256 on.
static bool demo_tokenizer(app* a) {
    blob json;
    int other = 256;
    memset(&json, 0, sizeof json);
    put(&json, "{\"model\":{\"type\":\"BPE\",\"merges\":[],\"vocab\":{");
    for (int byte = 0; byte < 256; byte++) {
        bool printable = (byte > 32 && byte < 127) || (byte > 160 && byte != 173);
        put(&json, "%s\"\\u%04x\":%d", byte > 0 ? "," : "", (unsigned)(printable ? byte : other++),
            byte);
    }
    put(&json, "}},\"added_tokens\":[{\"id\":256,\"content\":\"<|endoftext|>\",\"special\":true}],"
               "\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false},"
               "\"decoder\":{\"type\":\"ByteLevel\"}}");
    bool ok = text_open(a) && (qlora_text_tok_load(a->text, "demo/tokenizer.json", json.data,
                                                   json.count, &a->tok) == QLORA_OK ||
                               text_fail(a, ""));
    blob_free(&json);
    return ok;
}

static bool demo_data(app* a) {
    static const char* const kinds[] = {"red", "old", "shy", "big"};
    static const char* const animals[] = {"hen", "cat", "dog", "owl"};
    blob json;
    memset(&json, 0, sizeof json);
    for (uint64_t i = 0; i < DEMO_SAMPLES; i++) {
        uint64_t r = mix(i + 1000 * (uint64_t)a->o.seed);
        int first = 1 + (int)(r % 4);
        int second = 1 + (int)(r / 4 % 4);
        put(&json, "{\"text\": \"%d and %d is %d, said the %s %s.\"}\n", first, second,
            first + second, kinds[r / 16 % 4], animals[r / 64 % 4]);
    }
    qlora_text_data_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.path = "demo.jsonl";
    desc.chat = a->chat;
    bool ok = qlora_text_data_load(a->text, &desc, json.data, json.count, &a->data) == QLORA_OK ||
              text_fail(a, "");
    blob_free(&json);
    return ok;
}

// ---- from the options to the run ---------------------------------------------------------------

enum { MODE_TF32 = 2 }; // its place in the list of --mode: F32 with the context's math

static bool context_open(app* a) {
    char why[512] = "";
    qlora_ctx_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.require_backend = (qlora_backend)a->o.backend;
    desc.device = (int32_t)a->o.device;
    desc.threads = (int32_t)a->o.threads;
    desc.math = a->o.mode == MODE_TF32 ? QLORA_MATH_TF32 : QLORA_MATH_F32;
    desc.log = a->o.verbose ? qlora_log_stderr : NULL;
    desc.error_text = why;
    desc.error_text_size = sizeof why;
    if (qlora_ctx_create(&desc, &a->ctx) != QLORA_OK) {
        return fail(a->error, "%s", message_text(why));
    }
    if (a->o.mode == QLORA_MODE_BF16 && qlora_ctx_backend(a->ctx) == QLORA_BACKEND_CPU &&
        !a->o.plan && !a->o.doctor) {
        return fail(a->error, "--mode bf16 needs a GPU (%s); use --mode f32 or auto",
                    qlora_ctx_reason(a->ctx));
    }
    qlora_ctx_info info;
    if (qlora_ctx_query(a->ctx, &info) != QLORA_OK) {
        return fail(a->error, "%s", qlora_last_error(a->ctx));
    }
    a->files = info.desc->files;
    return true;
}

static bool model_describe(app* a) {
    const options* o = &a->o;
    qlora_model_desc* d = &a->model_desc;
    if (o->demo) {
        demo_config(&a->config);
        d->config = &a->config;
        d->weight_std = 0.15f;
    } else {
        d->dir = o->model;
        if (!lib(a, qlora_config_read(a->ctx, o->model, &a->config), "--model")) {
            return false;
        }
    }
    d->seed = (uint64_t)o->seed;
    d->base = (qlora_base_format)o->base;
    d->mode = o->mode == MODE_TF32 ? QLORA_MODE_F32 : (qlora_mode)o->mode;
    d->adapter = o->adapter;
    d->rank = (int32_t)o->rank;
    d->alpha = (float)o->alpha;
    d->rslora = o->rslora;
    d->dropout = (float)o->dropout;
    d->targets = (uint32_t)o->targets;
    d->train_norms = o->train_norms;
    d->progress = load_progress;
    d->progress_user = a;
    return true;
}

static bool lengths_choose(app* a) {
    options* o = &a->o;
    int64_t most = a->config.max_positions > 0 ? a->config.max_positions : INT64_MAX;
    if (o->length == 0) {
        o->length = o->tokens != 0 && o->tokens < 1024 ? o->tokens : 1024;
        o->length = o->length < most ? o->length : most;
    }
    if (o->length > most) {
        return fail(a->error, "--length (%lld) must not exceed the model's limit of %lld tokens",
                    (long long)o->length, (long long)most);
    }
    if (o->tokens == 0) {
        o->tokens = o->length > 4096 ? o->length : 4096;
    }
    return true;
}

static void train_describe(app* a) {
    const options* o = &a->o;
    qlora_model_desc* m = &a->model_desc;
    m->tokens = o->tokens;
    m->max_length = o->length;
    m->max_sequences = o->tokens / 8 > 1 ? o->tokens / 8 : 1;
    m->recompute = (qlora_choice)o->recompute;
    m->cache = (qlora_choice)o->cache;
    m->generate_tokens = o->prompt != NULL ? (o->length < 160 ? o->length : 160) : 0;
    qlora_train_desc* d = &a->train_desc;
    d->lr = o->lr > 0.0 ? o->lr : -1.0;
    d->beta2 = o->beta2;
    d->weight_decay = o->weight_decay;
    d->max_norm = o->max_norm > 0.0 ? o->max_norm : -1.0;
    d->schedule = (qlora_schedule)o->schedule;
    d->seed = (uint64_t)o->seed;
}

static bool plan_make(app* a) {
    qlora_plan_desc budget;
    memset(&budget, 0, sizeof budget);
    budget.bytes = (uint64_t)a->o.memory;
    a->train_desc.total_steps = a->total_steps;
    a->train_desc.warmup_steps = a->o.warmup >= 0 ? a->o.warmup : (a->total_steps * 3 + 99) / 100;
    qlora_result result = qlora_plan_make(a->ctx, &a->model_desc, &budget, &a->plan);
    return lib(a, result,
               result == QLORA_ERR_DEVICE_MEMORY ? "not enough memory" : "planning the memory");
}

// The prompt and at least one new token must fit into the memory planned for generating.
static bool prompt_check(app* a) {
    qlora_text_ids ids;
    memset(&ids, 0, sizeof ids);
    if (a->o.prompt == NULL || a->tok == NULL) {
        return true;
    }
    bool ok = qlora_text_encode(a->tok, a->o.prompt, strlen(a->o.prompt), QLORA_TEXT_SPECIAL,
                                &ids) == QLORA_OK ||
              text_fail(a, "--prompt: ");
    long long limit = (long long)a->model_desc.generate_tokens - 1;
    ok = ok && ((long long)ids.count <= limit ||
                fail(a->error, "--prompt has %zu tokens; the limit is %lld", ids.count, limit));
    qlora_text_ids_free(a->text, &ids);
    return ok;
}

// Does everything that can fail before the model's weights are loaded.
static bool prepare(app* a) {
    if (!context_open(a) || !model_describe(a) || !lengths_choose(a)) {
        return false;
    }
    train_describe(a);
    if (a->o.demo && !demo_tokenizer(a)) {
        return false;
    }
    if (a->o.data != NULL || a->o.demo) {
        if (!tokenizer_open(a) || (a->o.demo && !demo_data(a)) || !samples_open(a) ||
            (a->train.count > 0 && !total_steps_find(a))) {
            return false;
        }
    }
    return prompt_check(a) && (a->o.doctor || plan_make(a));
}

static bool model_start(app* a) {
    char memory[32];
    a->model_desc.plan = &a->plan;
    if (!lib(a, qlora_model_open(a->ctx, &a->model_desc, &a->model), "loading the model")) {
        return false;
    }
    if (!lib(a, qlora_trainer_create(a->model, &a->train_desc, &a->trainer),
             "preparing the training") ||
        !batch_room(a) || !checkpoint_load(a) || !packs_make(a, &a->eval, 0, &a->eval_packs) ||
        !out_begin(a)) {
        return false;
    }
    peak_find(a);
    say(a, "model: %lld layers, hidden size %lld, %lld trainable parameters, %s\n",
        (long long)a->config.layers, (long long)a->config.hidden, (long long)a->plan.parameters,
        short_bytes(a->plan.total + a->plan.context, memory));
    if (a->step > 0) {
        say(a, "resumed after step %lld of %lld\n", (long long)a->step, (long long)a->total_steps);
    }
    return a->step == a->total_steps || position_seek(a, a->step);
}

static bool train(app* a) {
    double start = seconds_now();
    say(a, "%s: %s\n", qlora_ctx_backend(a->ctx) == QLORA_BACKEND_CUDA ? "GPU" : "CPU",
        qlora_ctx_reason(a->ctx));
    counts_print(a);
    a->first_eval = (double)NAN;
    a->last_eval = (double)NAN;
    if (!settings_check(a) || !model_start(a)) {
        out_unmake(a);
        if (a->stopped) {
            say(a, "stopped before training started\n");
        }
        return false;
    }
    char text[32];
    say(a, "ready after %s\n", short_time(seconds_now() - start, text));
    bool fresh = a->step == 0;
    bool ok = (!fresh || prompt_show(a, "before")) && train_loop(a);
    if (!ok) {
        if (a->step == 0) {
            out_unmake(a);
        }
        return false;
    }
    if (a->step < a->total_steps) {
        say(a,
            "\nstopped after step %lld of %lld and saved to %s; run the same command to resume\n",
            (long long)a->step, (long long)a->total_steps, a->o.out);
        return true;
    }
    ok = prompt_show(a, "after");
    summary_print(a);
    return ok;
}

static void app_close(app* a) {
    screen_clear(&a->screen);
    if (a->log != NULL) {
        fclose(a->log);
    }
    packs_free(&a->now);
    packs_free(&a->eval_packs);
    free(a->train.data);
    free(a->eval.data);
    free(a->ids);
    free(a->labels);
    free(a->lengths);
    free(a->numbers);
    free(a->points);
    blob_free(&a->log_rest);
    if (a->trainer != NULL) {
        qlora_trainer_destroy(a->trainer);
    }
    if (a->model != NULL) {
        qlora_model_close(a->model);
    }
    if (a->ctx != NULL) {
        qlora_ctx_destroy(a->ctx);
    }
    qlora_text_data_close(a->data);
    qlora_text_data_close(a->eval_data);
    qlora_text_chat_close(a->chat);
    qlora_text_tok_close(a->tok);
    qlora_text_destroy(a->text);
}

static bool run(app* a, int argc, char** argv) {
    options_default(&a->o);
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--demo") == 0) {
            demo_defaults(&a->o);
        }
    }
    if (!options_read(argc, argv, &a->o, a->error)) {
        return false;
    }
    if (a->o.help) {
        help_print();
        return true;
    }
    if (a->o.version) {
        printf("finetune (qlora.h) " QLORA_VERSION_STRING "\n");
        return true;
    }
    screen_open(&a->screen);
    if (!options_check(&a->o, a->error) || !prepare(a)) {
        return false;
    }
    if (a->o.doctor) {
        return doctor_print(a);
    }
    if (a->o.plan) {
        plan_show(a);
        return true;
    }
    return train(a);
}

int main(int argc, char** argv) {
    static app a; // zeroed, and too large for some stacks
    signal(SIGINT, stop_handler);
    signal(SIGTERM, stop_handler);
#ifdef SIGXFSZ
    signal(SIGXFSZ, SIG_IGN); // a file that must not grow makes its write fail instead
#endif
    bool ok = run(&a, argc, argv);
    if (!ok && !a.stopped && (a.error[0] != '\0' || !a.failed)) {
        complain(&a);
    }
    app_close(&a);
    return a.failed ? 1 : stop_asked != 0 ? 130 : 0;
}
