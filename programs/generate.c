// generate: completes a text or chats, with a model and an optional adapter.
//
//   cc -O2 -I. -o generate programs/generate.c -ldl -lm -lpthread
//   ./generate --model DIR --prompt "Once upon a time"
//   ./generate --model DIR --adapter DIR --chat
//   ./generate --model DIR --data prompts.jsonl --out answers.jsonl --batch 64
//
// It calls only the public functions of qlora.h and qlora_text.h.
#define QLORA_IMPLEMENTATION
#include "qlora.h"
#define QLORA_TEXT_IMPLEMENTATION
#include "qlora_text.h"

#define PROGRAM "generate"
#include "adapter_files.h"
#include "auto_mode.h"
#include "folders.h"
#include "json_array.h"
#include "tool.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MAX_STOPS 64
#define MAX_MESSAGES 512

// ---- the program ------------------------------------------------------------------------------

typedef struct options {
    const char* model;
    const char* adapter;
    const char* tokenizer;
    const char* rope_scale;
    int64_t expert_layout;
    const char* prompt;
    const char* prompt_file;
    const char* data;
    const char* format;
    const char* columns;
    const char* score;
    const char* out;
    int64_t batch;
    int64_t positions;
    int64_t samples;
    const char* system;
    const char* template_name;
    const char* chat_template;
    option_texts stops;
    double temperature;
    double top_p;
    double min_p;
    double penalty;
    int64_t max_tokens;
    int64_t context;
    int64_t top_k;
    int64_t seed;
    int64_t device;
    int64_t threads;
    int64_t backend;
    int64_t mode;
    int64_t base;
    int64_t cache;
    bool keep_quantised;
    const char* quantised_dir;
    bool chat;
    bool no_echo;
    bool ids;
    bool logprobs;
    bool stats;
    bool verbose;
    bool help;
    bool version;
} options;

#define AT(field) offsetof(options, field)
// clang-format off
static const option option_table[] = {
    {"Model and prompt", OPT_HEADING, 0, false, 0, 0, "", ""},
    {"model", OPT_TEXT, AT(model), false, 0, 0, "DIR",
        "model folder (Hugging Face) or GGUF file (required)"},
    {"adapter", OPT_TEXT, AT(adapter), false, 0, 0, "DIR",
        "PEFT adapter or finetune run to apply (default: none)"},
    {"expert-layout", OPT_CHOICE, AT(expert_layout), false, 0, 0, "auto|peft|peft-0.18|unsloth",
        "order of the matrices of experts in --adapter, for folders that may have several "
        "(default auto: what the folder says, or its shapes)"},
    {"tokenizer", OPT_TEXT, AT(tokenizer), false, 0, 0, "PATH",
        "tokenizer file or folder (default: --adapter if it has a tokenizer, otherwise --model); "
        "a folder's chat template and special tokens are used as well"},
    {"rope-scale", OPT_TEXT, AT(rope_scale), false, 0, 0, "TYPE:F",
        "scale the rotary positions for texts longer than the model's limit: yarn:F or linear:F, "
        "as in yarn:4; an adapter needs the scaling that it was trained with (default: none)"},
    {"prompt", OPT_ANY_TEXT, AT(prompt), false, 0, 0, "TEXT",
        "text to continue; - reads standard input"},
    {"prompt-file", OPT_TEXT, AT(prompt_file), false, 0, 0, "FILE",
        "read the prompt from a file, exactly as it is"},
    {"With --data", OPT_HEADING, 0, false, 0, 0, "", ""},
    {"data", OPT_TEXT, AT(data), false, 0, 0, "FILE",
        "answer the prompts of this file (- reads standard input). It is read like the --data of "
        "finetune: prompts, questions, instructions or conversations in .jsonl, .json, .csv, .tsv "
        "or .parquet. Answers in it are references: the model does not see them, and its own are "
        "compared with them"},
    {"out", OPT_TEXT, AT(out), false, 0, 0, "FILE",
        "for --data: the answers, one JSON object per line, appended as they end and at the end "
        "put in the order of the prompts; text i has the random seed --seed + i. A prompt that is "
        "too long gets a line with \"error\". Run the same command again to resume"},
    {"format", OPT_TEXT, AT(format), false, 0, 0, "NAME",
        "for --data: what the file is, or which form its records have, as for finetune"},
    {"columns", OPT_TEXT, AT(columns), false, 0, 0, "A=B,...",
        "for --data: names in the file, as for finetune: question=ask,answer=reply"},
    {"score", OPT_TEXT, AT(score), false, 0, 0, "REGEX",
        "for --data: print how many answers are right, besides exact matches: those whose last "
        "match of REGEX, or of its first group, is that of the reference; a reference without a "
        "match counts as a whole. Answers that are there already are scored again"},
    {"batch", OPT_WHOLE, AT(batch), false, 1, 64, "N",
        "for --data: texts to generate at the same time (default 16)"},
    {"positions", OPT_WHOLE, AT(positions), false, 1, 1e9, "N",
        "for --data: tokens that the texts at the same time can have together, with their prompts; "
        "one that does not fit waits until others end (default: all of --batch at the length of "
        "the longest)"},
    {"samples", OPT_WHOLE, AT(samples), false, 1, 1e4, "N",
        "for --data: answers to every prompt, one after the other in --out; a prompt is computed "
        "once for those that are generated at the same time (default 1)"},
    {"With --chat", OPT_HEADING, 0, false, 0, 0, "", ""},
    {"chat", OPT_FLAG, AT(chat), false, 0, 0, "",
        "chat interactively, one line per message; with --prompt, answer once"},
    {"system", OPT_ANY_TEXT, AT(system), false, 0, 0, "TEXT",
        "system message for --chat; with --data, for all conversations, which must not have one"},
    {"template", OPT_TEXT, AT(template_name), false, 0, 0, "NAME",
        "chat format (default: the adapter's, otherwise the model's own)"},
    {"chat-template", OPT_TEXT, AT(chat_template), false, 0, 0, "FILE",
        "Jinja template of the chat (default: the adapter's, otherwise the model's own)"},
    {"context", OPT_WHOLE, AT(context), false, 16, 1e6, "N",
        "maximum tokens in a conversation (default 2048, or the model's limit if lower)"},
    {"Text", OPT_HEADING, 0, false, 0, 0, "", ""},
    {"max-tokens", OPT_WHOLE, AT(max_tokens), false, 1, 1e6, "N",
        "maximum new tokens (default 256)"},
    {"temperature", OPT_REAL, AT(temperature), false, 0, 100, "X",
        "sampling temperature; 0 = greedy (default 0.7)"},
    {"top-k", OPT_WHOLE, AT(top_k), false, 0, 1e6, "N",
        "sample from the N most likely tokens; 0 = all (default 0)"},
    {"top-p", OPT_REAL, AT(top_p), false, 0, 1, "X",
        "nucleus sampling: smallest set with probability X (default 0.95)"},
    {"min-p", OPT_REAL, AT(min_p), false, 0, 1, "X",
        "drop tokens below X times the highest probability; 0 = off (default 0)"},
    {"repetition-penalty", OPT_REAL, AT(penalty), false, 0.01, 100, "X",
        "make tokens that already occur in the text less likely; 1 = off (default 1)"},
    {"stop", OPT_TEXTS, AT(stops), false, 0, 0, "TEXT",
        "end the text before TEXT; may be repeated"},
    {"seed", OPT_WHOLE, AT(seed), false, 0, 9e15, "N",
        "random seed; the same seed gives the same text (default 1)"},
    {"Machine", OPT_HEADING, 0, false, 0, 0, "", ""},
    {"backend", OPT_CHOICE, AT(backend), false, 0, 0, "auto|cpu|cuda",
        "auto uses a GPU if available (default auto)"},
    {"mode", OPT_CHOICE, AT(mode), false, 0, 0, "auto|f32|tf32|bf16|fp8",
        "arithmetic precision; auto uses bf16 if the GPU supports it or the CPU has instructions "
        "for it (AMX, AVX512_BF16, BF16 of ARM), otherwise f32; on the CPU, bf16 rounds the "
        "operands of products with weights for prompts; fp8 is bf16 with approximate products for "
        "prompts (default auto)"},
    {"base", OPT_CHOICE, AT(base), false, 0, 0, "nf4|16bit|32bit|fp8",
        "storage format of the base weights; fp8 has less than a third of the error of nf4 and "
        "twice its size (default nf4)"},
    {"cache", OPT_CHOICE, AT(cache), false, 0, 0, "auto|on|off",
        "keep 16-bit copies of 4-bit or FP8 weights; auto copies as many as fit, on the CPU "
        "none (default auto)"},
    {"keep-quantised", OPT_FLAG, AT(keep_quantised), false, 0, 0, "",
        "keep the 4-bit or FP8 weights in a file next to the model, which the next start reads"},
    {"quantised-dir", OPT_TEXT, AT(quantised_dir), false, 0, 0, "DIR",
        "keep them in this folder instead, e.g. if the model's folder is read-only"},
    {"device", OPT_WHOLE, AT(device), false, 0, 1023, "N",
        "GPU number; fails if there is no such GPU (default 0)"},
    {"threads", OPT_WHOLE, AT(threads), false, 1, 64, "N", "CPU threads (default: one per core)"},
    {"Output", OPT_HEADING, 0, false, 0, 0, "", ""},
    {"no-echo", OPT_FLAG, AT(no_echo), false, 0, 0, "", "print only the generated text"},
    {"ids", OPT_FLAG, AT(ids), false, 0, 0, "",
        "instead of the text, print one JSON object per new token: id and text"},
    {"logprobs", OPT_FLAG, AT(logprobs), false, 0, 0, "",
        "like --ids, with the logarithm of the token's probability, before --temperature and the "
        "like"},
    {"stats", OPT_FLAG, AT(stats), false, 0, 0, "",
        "print counts, seconds and speed of prompt tokens and new tokens on standard error"},
    {"verbose", OPT_FLAG, AT(verbose), false, 0, 0, "", "print the library's log messages"},
    {"help", OPT_FLAG, AT(help), false, 0, 0, "", "show this help"},
    {"version", OPT_FLAG, AT(version), false, 0, 0, "", "print the version"},
};
// clang-format on

typedef struct app {
    options o;
    qlora_ctx* ctx;
    qlora_model* model;
    qlora_text* text;
    qlora_text_tok* tok;
    qlora_text_chat* chat;
    qlora_generation* generation; // of all turns of a chat
    qlora_text_stream stream;
    qlora_text_stream shown; // for --ids: special tokens included
    blob line;
    qlora_text_bytes out;
    qlora_text_bytes answer; // the whole text of this turn
    size_t printed;          // how much of it was printed
    bool too_long;           // a message did not fit
    size_t stop_from;        // where --stop is looked for: after the prompt
    qlora_model_config config;
    int64_t limit;     // tokens that the model can have in a text
    int64_t sequences; // texts at the same time; 0 = 1
    uint64_t identity; // for --data: of the model and the adapter
    bool talks;        // for --data: some prompts are conversations
    int32_t stops[MAX_STOPS];
    int32_t stop_count;
    int64_t made;     // tokens in the last text
    bool own_format;  // the chat format is the adapter's
    bool broken;      // writing failed, or memory ran out
    bool ended;       // by a --stop text
    bool interrupted; // by Ctrl-C
} app;

static volatile sig_atomic_t interrupted;

static void on_interrupt(int number) {
    (void)number;
    interrupted = 1;
}

static double seconds_now(void) {
#ifdef _WIN32
    return (double)clock() / CLOCKS_PER_SEC; // wall-clock time on Windows
#else
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
#endif
}

static bool lib(const app* a, qlora_result r) {
    return r == QLORA_OK || fail_library(qlora_last_error(a->ctx));
}

static bool text_fail(const app* a, const char* what) {
    return fail("%s%s", what, message_text(qlora_text_last_error(a->text)));
}

// The first place where a --stop text begins: all of it, or with `part` a text that ends too early
// to tell. Returns the end of the answer if there is none.
static size_t stop_find(const app* a, bool part) {
    const qlora_text_bytes* t = &a->answer;
    for (size_t at = a->stop_from; at < t->count; at++) {
        for (int64_t i = 0; i < a->o.stops.count; i++) {
            size_t length = strlen(a->o.stops.items[i]);
            size_t left = t->count - at < length ? t->count - at : length;
            if ((part || left == length) && memcmp(t->data + at, a->o.stops.items[i], left) == 0) {
                return at;
            }
        }
    }
    return t->count;
}

static bool lists_tokens(const app* a) {
    return a->o.ids || a->o.logprobs;
}

// Prints the text that the stream has released, and keeps it for the next turn of a chat. At the
// `end`, what was held back is printed.
static bool show(app* a, bool quiet, bool end) {
    quiet = quiet || lists_tokens(a);
    bool ok = a->ended ||
              qlora_text_bytes_add(a->text, &a->answer, a->out.data, a->out.count) == QLORA_OK;
    a->out.count = 0;
    size_t found = stop_find(a, false);
    a->ended = a->ended || found < a->answer.count;
    a->answer.count = found;
    size_t ready = end || a->ended ? a->answer.count : stop_find(a, true);
    a->stop_from = a->stop_from < ready ? ready : a->stop_from;
    if (ok && !quiet && ready > a->printed) {
        size_t size = ready - a->printed;
        ok = fwrite(a->answer.data + a->printed, 1, size, stdout) == size && fflush(stdout) == 0;
    }
    a->printed = ready;
    return ok;
}

// A token that the tokenizer cannot name is shown as U+FFFD.
static bool token_push(app* a, qlora_text_stream* stream, uint32_t flags, int32_t token) {
    qlora_text_token_info info;
    if (qlora_text_token_query(a->tok, token, &info) != QLORA_OK) {
        return qlora_text_bytes_add(a->text, &a->out, "\xEF\xBF\xBD", 3) == QLORA_OK;
    }
    return qlora_text_stream_push(a->tok, stream, token, flags, &a->out) == QLORA_OK;
}

// A line of --ids: all that a token adds to the text, so that the lines make up the whole text.
// Bytes of a character that is not complete yet come with the token that completes it.
static bool token_print(app* a, int32_t token) {
    double logprob = 0.0;
    char part[64];
    a->line.count = 0;
    snprintf(part, sizeof part, "{\"id\": %d, \"text\": ", (int)token);
    if (!token_push(a, &a->shown, 0, token) || !blob_add(&a->line, part, strlen(part)) ||
        !json_quote(a->out.data, a->out.count, &a->line)) {
        return fail("out of memory");
    }
    a->out.count = 0;
    if (a->o.logprobs && !lib(a, qlora_generate_logprob(a->generation, &logprob))) {
        return false;
    }
    snprintf(part, sizeof part, ", \"logprob\": %.6f", logprob);
    return ((!a->o.logprobs || blob_add(&a->line, part, strlen(part))) &&
            blob_add(&a->line, "}\n", 2)) ||
           fail("out of memory");
}

// One new token: the last one of a turn is its stop token, which is not part of the answer.
static bool token_take(app* a, int32_t token, bool stop) {
    if (lists_tokens(a)) {
        if (!token_print(a, token)) {
            return false;
        }
        a->broken =
            fwrite(a->line.data, 1, a->line.count, stdout) != a->line.count || fflush(stdout) != 0;
    }
    if (!stop) {
        a->broken = a->broken || !token_push(a, &a->stream, QLORA_TEXT_SKIP, token) ||
                    !show(a, false, false);
    }
    return true;
}

// A token of the prompt. --ids continues it as well, so both streams read it.
static bool prompt_show(app* a, int32_t token) {
    bool ok = token_push(a, &a->shown, 0, token);
    a->out.count = 0;
    return ok && token_push(a, &a->stream, QLORA_TEXT_SKIP, token) && show(a, a->o.no_echo, false);
}

static bool text_end(app* a) {
    bool ok = qlora_text_stream_end(a->tok, &a->stream, &a->out) == QLORA_OK &&
              show(a, false, true) && !a->broken;
    ok = ok && (lists_tokens(a) || fputc('\n', stdout) != EOF) && fflush(stdout) == 0;
    return ok || fail("cannot write to standard output: %s", strerror(errno));
}

// The options of sampling, without a prompt.
static qlora_generate_desc generate_desc(const app* a) {
    const options* o = &a->o;
    qlora_generate_desc d;
    memset(&d, 0, sizeof d);
    d.temperature = (float)o->temperature;
    d.top_k = (int32_t)o->top_k;
    d.top_p = o->top_p > 1e-30 ? (float)o->top_p : 1e-30f; // 0, the smallest set, is "off" there
    d.min_p = (float)o->min_p;
    d.repetition_penalty = (float)o->penalty;
    d.seed = (uint64_t)o->seed;
    d.stops = a->stops;
    d.stop_count = a->stop_count;
    return d;
}

// Begins the generation, or continues that of the turns before: only what is new is computed.
static bool prompt_run(app* a, const qlora_text_ids* prompt, int64_t* kept) {
    qlora_generate_desc d;
    *kept = 0;
    if (a->generation != NULL) {
        return lib(
            a, qlora_generate_prompt(a->generation, prompt->data, (int64_t)prompt->count, kept));
    }
    d = generate_desc(a);
    d.prompt = prompt->data;
    d.prompt_tokens = (int64_t)prompt->count;
    return lib(a, qlora_generate_begin(a->model, &d, &a->generation));
}

// The next tokens, `most` of them at most, printed as they come.
static bool tokens_run(app* a, int64_t most, bool* full) {
    bool stopped = false;
    *full = false;
    while (!stopped && a->made < most && !a->broken && !a->ended && !interrupted) {
        int32_t token = -1;
        if (!lib(a, qlora_generate_next(a->generation, &token, &stopped))) {
            return false;
        }
        if (token >= 0) { // a stop token was computed like the others, so it counts
            a->made++;
            if (!token_take(a, token, stopped)) {
                return false;
            }
        }
    }
    *full = a->made == most && !stopped && !a->ended;
    return true;
}

static double per_second(int64_t tokens, double seconds) {
    return (double)tokens / (seconds > 0.0 ? seconds : 1e-9);
}

static void stats_print(const app* a, int64_t prompt, int64_t kept, const double seconds[2]) {
    char from_before[64] = "";
    if (kept > 0) { // of the turns before
        snprintf(from_before, sizeof from_before, " (%lld in the cache)", (long long)kept);
    }
    fprintf(stderr,
            "[prompt: %lld token%s%s, %.2f s, %.1f tokens/s; new: %lld token%s, %.2f s, %.1f "
            "tokens/s%s]\n",
            (long long)prompt, prompt == 1 ? "" : "s", from_before, seconds[0],
            per_second(prompt - kept, seconds[0]), (long long)a->made, a->made == 1 ? "" : "s",
            seconds[1], per_second(a->made, seconds[1]),
            a->o.mode == QLORA_MODE_BF16 ? "; bf16" : "");
}

// Generates the text after `prompt` and prints it as it comes; Ctrl-C ends it.
static bool speak(app* a, const qlora_text_ids* prompt, int64_t most) {
    int64_t kept = 0;
    bool full = false;
    double seconds[2] = {0.0, 0.0}; // for the prompt, and for the new tokens
    a->made = 0;
    a->ended = false;
    a->stop_from = a->answer.count;
    interrupted = 0;
    double start = seconds_now();
    void (*before)(int) = signal(SIGINT, on_interrupt);
    bool ok = prompt_run(a, prompt, &kept);
    seconds[0] = seconds_now() - start;
    ok = ok && tokens_run(a, most, &full);
    seconds[1] = seconds_now() - start - seconds[0];
    signal(SIGINT, before == SIG_ERR ? SIG_DFL : before);
    a->interrupted = interrupted != 0;
    ok = ok && text_end(a);
    if (ok && full && (int64_t)prompt->count + most >= a->limit) {
        fprintf(stderr, "[stopped at the model's limit of %lld tokens]\n", (long long)a->limit);
    }
    if (ok && a->o.stats) {
        stats_print(a, (int64_t)prompt->count, kept, seconds);
    }
    return ok;
}

// ---- opening ----------------------------------------------------------------------------------

// What a chat is formed with. The template and the special tokens come from where the tokenizer
// comes from, if they are there, and otherwise from the model.
static qlora_text_chat_desc chat_describe(const app* a) {
    qlora_text_chat_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.tok = a->tok;
    desc.folder = a->o.model;
    desc.tokenizer_folder = a->o.adapter;
    if (a->o.tokenizer != NULL && path_is_folder(a->o.tokenizer)) {
        desc.tokenizer_folder = a->o.tokenizer;
    }
    return desc;
}

// Collects the model's own stop ids, in a chat those of the chat format, and in a text with an
// adapter that of its tokenizer: training ends texts with it.
static bool stops_collect(app* a, const qlora_model_config* config) {
    qlora_text_chat_info info;
    qlora_text_chat* plain = NULL;
    memset(&info, 0, sizeof info);
    for (int32_t i = 0; i < config->stop_count; i++) {
        a->stops[a->stop_count++] = config->stop_ids[i];
    }
    bool talks = a->chat != NULL && (a->talks || a->o.data == NULL);
    if (!talks && a->o.adapter != NULL) {
        qlora_text_chat_desc desc = chat_describe(a);
        desc.name = "plain";
        if (qlora_text_chat_open(a->text, &desc, &plain) != QLORA_OK) {
            return text_fail(a, "the stop tokens: ");
        }
    }
    qlora_text_chat* chat = talks ? a->chat : plain;
    if (chat != NULL && qlora_text_chat_query(chat, &info) != QLORA_OK) {
        info.stop_count = 0;
    }
    for (size_t i = 0; i < info.stop_count && a->stop_count < MAX_STOPS; i++) {
        a->stops[a->stop_count++] = info.stops[i];
    }
    if (a->stop_count == 0) {
        a->stops[a->stop_count++] = -1;
    }
    return qlora_text_chat_close(plain) == QLORA_OK;
}

enum { MODE_TF32 = 2 }; // its place in the list of --mode: F32 with the context's math

// Whether the tokenizer is that of the adapter, which may have more tokens than the model.
static bool adapter_tokens(const app* a) {
    return a->o.tokenizer == NULL && a->o.adapter != NULL &&
           !file_missing(a->o.adapter, "tokenizer.json");
}

static bool context_open(app* a) {
    static char why[512];
    qlora_ctx_desc d;
    memset(&d, 0, sizeof d);
    bool chosen = a->o.device >= 0; // a GPU that was asked for must exist
    d.require_backend = chosen ? QLORA_BACKEND_CUDA : (qlora_backend)a->o.backend;
    d.device = chosen ? (int32_t)a->o.device : 0;
    d.threads = (int32_t)a->o.threads;
    d.math = a->o.mode == MODE_TF32 ? QLORA_MATH_TF32 : QLORA_MATH_F32;
    d.log = a->o.verbose ? qlora_log_stderr : NULL;
    d.error_text = why;
    d.error_text_size = sizeof why;
    if (qlora_ctx_create(&d, &a->ctx) != QLORA_OK) {
        return fail("%s", message_text(why));
    }
    if (!lib(a, qlora_config_read(a->ctx, a->o.model, &a->config)) ||
        (a->o.rope_scale != NULL &&
         !lib(a, qlora_config_scale(a->ctx, a->o.rope_scale, &a->config)))) {
        return false;
    }
    qlora_text_tok_info tok;
    if (adapter_tokens(a) && adapter_has_rows(a->o.adapter) &&
        qlora_text_tok_query(a->tok, &tok) == QLORA_OK && tok.count > a->config.vocab) {
        a->config.vocab = tok.count; // until the model is open
    }
    a->limit = a->config.max_positions > 0 ? a->config.max_positions : INT64_MAX;
    if (qlora_ctx_backend(a->ctx) != QLORA_BACKEND_CPU) {
        return true;
    }
    if (a->o.mode == QLORA_MODE_AUTO && cpu_has_bf16(a->ctx)) {
        a->o.mode = QLORA_MODE_BF16;
    }
    if (a->o.mode == QLORA_MODE_FP8 && a->o.backend != QLORA_BACKEND_CPU) {
        return fail("--mode fp8 needs a GPU of compute capability 9.0 (%s); use --mode f32 or auto",
                    qlora_ctx_reason(a->ctx));
    }
    return true;
}

// A tokenizer that does not belong to the model gives wrong text without a word, so differences are
// reported before anything is printed, and ids that the model does not have are refused.
static bool tokenizer_check(const app* a, const qlora_text_ids* prompt) {
    for (size_t i = 0; i < prompt->count; i++) {
        if (prompt->data[i] >= a->config.vocab) {
            return fail("the tokenizer belongs to another model: the prompt has token %d; the "
                        "vocabulary has %lld",
                        (int)prompt->data[i], (long long)a->config.vocab);
        }
    }
    return true;
}

static bool tokenizer_warn(const app* a) {
    qlora_text_tok_info info;
    if (qlora_text_tok_query(a->tok, &info) != QLORA_OK) {
        return text_fail(a, "");
    }
    if (info.count < a->config.vocab) {
        fprintf(stderr,
                "[the model's vocabulary has %lld tokens, the tokenizer %d; a token without a name "
                "is printed as U+FFFD]\n",
                (long long)a->config.vocab, (int)info.count);
    } else if (info.count > a->config.vocab) {
        fprintf(stderr, "[the tokenizer has %d tokens, the model's vocabulary only %lld]\n",
                (int)info.count, (long long)a->config.vocab);
    }
    return true;
}

// Opens the model for prompts of `prompt` tokens and `room` tokens in total.
static bool model_open(app* a, int64_t prompt, int64_t room) {
    const options* o = &a->o;
    qlora_model_desc m;
    memset(&m, 0, sizeof m);
    m.dir = o->model;
    m.adapter = o->adapter;
    m.rope_scale = o->rope_scale;
    m.expert_layout = (qlora_expert_layout)o->expert_layout;
    m.rank = -1;
    m.mode = o->mode == MODE_TF32 ? QLORA_MODE_F32 : (qlora_mode)o->mode;
    m.base = (qlora_base_format)o->base;
    m.purpose = QLORA_PURPOSE_EVALUATE;
    int64_t most = a->sequences > 0 ? 8192 : 1024; // of a prompt in one pass
    m.tokens = prompt < most ? prompt : most;
    m.generate_sequences = a->sequences;
    m.max_sequences = 1;
    m.head_chunk = 16; // only one row of logits is ever needed
    m.generate_tokens = room;
    m.generate_positions = o->positions;
    m.cache = (qlora_choice)o->cache;
    m.keep_quantised = o->keep_quantised;
    m.quantised_dir = o->quantised_dir;
    if (!lib(a, qlora_model_open(a->ctx, &m, &a->model))) {
        return false;
    }
    qlora_model_info info;
    if (!lib(a, qlora_model_query(a->model, &info))) {
        return false;
    }
    if (o->positions > 0 && room > info.generate_positions) {
        return fail("--positions %lld is too small: the longest prompt and its answer can have "
                    "%lld tokens; raise it, or lower --max-tokens",
                    (long long)o->positions, (long long)room);
    }
    if (info.trained_base[0] != '\0') {
        fprintf(stderr,
                "note: %s was trained on a base in %s and is used on one in %s, where its answers "
                "are others; --base %s has those of the training\n",
                o->adapter, info.trained_base, info.base, info.trained_base);
    }
    a->config.vocab = info.plan->config.vocab;
    return stops_collect(a, &a->config) && tokenizer_warn(a);
}

// ---- the prompt -------------------------------------------------------------------------------

// The prompt as it was given: on the command line, in a file, or on standard input.
static bool prompt_read(app* a, qlora_text_bytes* out) {
    const options* o = &a->o;
    const char* path = o->prompt_file != NULL ? o->prompt_file : o->prompt;
    bool standard = strcmp(path, "-") == 0;
    if (o->prompt_file == NULL && !standard) {
        return qlora_text_bytes_add(a->text, out, path, strlen(path)) == QLORA_OK ||
               fail("out of memory");
    }
    FILE* file = standard ? stdin : fopen(path, "rb");
    if (file == NULL) {
        return fail("--prompt-file %s: %s", path, strerror(errno));
    }
    char piece[4096];
    size_t n = 0;
    bool ok = true;
    while (ok && (n = fread(piece, 1, sizeof piece, file)) > 0) {
        ok = qlora_text_bytes_add(a->text, out, piece, n) == QLORA_OK || fail("out of memory");
    }
    ok = ok && (ferror(file) == 0 ||
                fail("cannot read %s: %s", standard ? "standard input" : path, strerror(errno)));
    if (!standard) {
        fclose(file);
    }
    return ok;
}

// Checks everything about the prompt that does not need the weights.
static bool prompt_check(const app* a, const qlora_text_ids* ids, int64_t limit, const char* what) {
    if (!tokenizer_check(a, ids)) {
        return false;
    }
    return (int64_t)ids->count < limit ||
           fail("the prompt has %lld tokens; %s %lld, and the text needs at least one more",
                (long long)ids->count, what, (long long)limit);
}

// ---- one text ---------------------------------------------------------------------------------

// Says that `what` brings its own BOS, as it does in training.
static void bos_tell(const app* a, int32_t bos, const char* what) {
    qlora_text_token_info info;
    if (qlora_text_token_query(a->tok, bos, &info) == QLORA_OK) {
        fprintf(stderr, "[%s begins with %.*s; as in training, it is not added a second time]\n",
                what, (int)info.length, info.name);
    }
}

// The ids of a text to continue: as in training, BOS is not added to a text that begins with it.
static bool text_encode(app* a, const char* text, size_t size, qlora_text_ids* ids) {
    qlora_text_tok_info tok;
    bool ok = qlora_text_tok_query(a->tok, &tok) == QLORA_OK &&
              qlora_text_encode(a->tok, text, size, 0, ids) == QLORA_OK;
    if (ok && tok.bos >= 0 && ids->count > 0 && ids->data[0] == tok.bos) {
        bos_tell(a, tok.bos, "the prompt");
    }
    ids->count = 0;
    return ok && qlora_text_encode(a->tok, text, size, QLORA_TEXT_BOS, ids) == QLORA_OK;
}

static bool complete(app* a) {
    const options* o = &a->o;
    qlora_text_bytes given;
    qlora_text_ids ids;
    memset(&given, 0, sizeof given);
    memset(&ids, 0, sizeof ids);
    bool ok = prompt_read(a, &given);
    if (ok && !text_encode(a, given.data, given.count, &ids)) {
        ok = text_fail(a, "the prompt: ");
    }
    if (ok && ids.count == 0) {
        ok = fail("the prompt is empty and the tokenizer has no BOS token to start from");
    }
    ok = ok && prompt_check(a, &ids, a->limit, "the model's limit is");
    int64_t room = a->limit - (int64_t)ids.count;
    int64_t most = o->max_tokens < room ? o->max_tokens : room;
    ok = ok && model_open(a, (int64_t)ids.count, (int64_t)ids.count + most);
    // The prompt also goes through the stream: it decides whether the first word needs a space.
    a->stop_from = SIZE_MAX;
    for (size_t i = 0; ok && i < ids.count; i++) {
        ok = prompt_show(a, ids.data[i]) ||
             fail("cannot write to standard output: %s", strerror(errno));
    }
    ok = ok && speak(a, &ids, most);
    qlora_text_bytes_free(a->text, &given);
    qlora_text_ids_free(a->text, &ids);
    return ok;
}

// ---- chat -------------------------------------------------------------------------------------

typedef struct talk {
    qlora_text_message messages[MAX_MESSAGES];
    size_t count;
    size_t first; // index of the first message after the system message
} talk;

static bool talk_add(talk* t, const char* role, const char* content, size_t length) {
    char* copy = (char*)malloc(length + 1);
    if (copy == NULL) {
        return fail("out of memory");
    }
    if (length > 0) {
        memcpy(copy, content, length);
    }
    copy[length] = '\0';
    qlora_text_message* m = &t->messages[t->count++];
    memset(m, 0, sizeof *m);
    m->role = role;
    m->content = copy;
    m->length = length;
    return true;
}

static void talk_drop(talk* t, size_t first, size_t count) {
    for (size_t i = first; i < first + count; i++) {
        free((void*)(uintptr_t)t->messages[i].content);
    }
    memmove(t->messages + first, t->messages + first + count,
            (t->count - first - count) * sizeof t->messages[0]);
    t->count -= count;
}

// Reads a line of any length; false at the end of the input.
static bool line_read(const app* a, qlora_text_bytes* line) {
    int c = 0;
    line->count = 0;
    while ((c = fgetc(stdin)) != EOF && c != '\n') {
        char byte = (char)c;
        if (qlora_text_bytes_add(a->text, line, &byte, 1) != QLORA_OK) {
            return false;
        }
    }
    if (line->count > 0 && line->data[line->count - 1] == '\r') {
        line->count--;
    }
    return c != EOF || line->count > 0;
}

// Encodes the conversation as a prompt, and drops the oldest turns until an answer has room.
static bool talk_encode(app* a, talk* t, qlora_text_ids* ids) {
    size_t room = (size_t)a->o.context;
    size_t answer = (size_t)a->o.max_tokens < room / 4 ? (size_t)a->o.max_tokens : room / 4;
    for (;;) {
        ids->count = 0;
        if (qlora_text_chat_encode(a->chat, t->messages, t->count, true, ids, NULL) != QLORA_OK) {
            return text_fail(a, "");
        }
        if (ids->count + answer < room) {
            return true;
        }
        if (t->count < t->first + 3) {
            talk_drop(t, t->count - 1, 1);
            ids->count = 0;
            a->too_long = true;
            if (a->o.context < a->limit) {
                fail("the message does not fit into --context %lld; shorten it or raise --context",
                     (long long)a->o.context);
            } else {
                fail("the message does not fit into the model's limit of %lld tokens; shorten it",
                     (long long)a->limit);
            }
            return true;
        }
        talk_drop(t, t->first, 2);
        fprintf(stderr, "[dropped the oldest exchange to stay within --context]\n");
    }
}

static bool turn(app* a, talk* t, const qlora_text_bytes* line, qlora_text_ids* ids) {
    if (t->count + 2 > MAX_MESSAGES) {
        talk_drop(t, t->first, 2);
    }
    if (!talk_add(t, "user", line->data, line->count) || !talk_encode(a, t, ids)) {
        return false;
    }
    if (ids->count == 0) {
        return true; // too long, which has been reported
    }
    int64_t room = a->o.context - (int64_t)ids->count;
    int64_t most = a->o.max_tokens < room ? a->o.max_tokens : room;
    memset(&a->stream, 0, sizeof a->stream);
    memset(&a->shown, 0, sizeof a->shown);
    a->answer.count = 0;
    a->printed = 0;
    if (!tokenizer_check(a, ids) || !speak(a, ids, most)) {
        return false;
    }
    return talk_add(t, "assistant", a->answer.data, a->answer.count);
}

// What strftime_now prints in a template: seconds of local time since 1970, 0 without a clock.
static int64_t local_clock(void) {
    time_t now = time(NULL);
    const struct tm* utc = gmtime(&now);
    struct tm copy;
    if (utc == NULL) {
        return 0;
    }
    copy = *utc;
    copy.tm_isdst = -1;
    time_t shifted = mktime(&copy); // what the clock would be if local time were UTC
    return shifted == (time_t)-1 ? (int64_t)now : (int64_t)now + (int64_t)(now - shifted);
}

static bool chat_format_open(app* a) {
    qlora_text_chat_info info;
    qlora_text_chat_desc desc = chat_describe(a);
    const options* o = &a->o;
    desc.name = o->template_name;
    desc.template_file = o->chat_template;
    desc.clock = o->data == NULL ? local_clock() : 0; // a file has the same prompts every day
    if (qlora_text_chat_open(a->text, &desc, &a->chat) != QLORA_OK ||
        qlora_text_chat_query(a->chat, &info) != QLORA_OK) {
        return text_fail(a, "the chat format (see --template): ");
    }
    if (info.replaced && o->adapter != NULL) {
        bool named = o->template_name != NULL;
        fprintf(stderr, "[--%s %s is used; %s has another chat format]\n",
                named ? "template" : "chat-template", named ? o->template_name : o->chat_template,
                desc.tokenizer_folder);
    }
    if (desc.tokenizer_folder != o->adapter && o->adapter != NULL &&
        folder_has_template(o->adapter)) {
        fprintf(stderr, "[--tokenizer %s is used, not the chat format of %s]\n", o->tokenizer,
                o->adapter);
    }
    a->own_format = info.own && desc.tokenizer_folder == o->adapter;
    return true;
}

// Opens the chat format and starts the conversation with --system.
static bool chat_open(app* a, talk* t) {
    if (!chat_format_open(a)) {
        return false;
    }
    if (a->o.context > a->limit) {
        return fail("--context %lld exceeds the model's limit of %lld tokens",
                    (long long)a->o.context, (long long)a->limit);
    }
    a->o.context = a->o.context > 0 ? a->o.context : a->limit < 2048 ? a->limit : 2048;
    if (a->o.system != NULL && !talk_add(t, "system", a->o.system, strlen(a->o.system))) {
        return false;
    }
    t->first = t->count;
    return true;
}

// Answers one message, from --prompt or --prompt-file.
static bool answer_once(app* a, talk* t) {
    qlora_text_bytes given;
    qlora_text_ids ids;
    memset(&given, 0, sizeof given);
    memset(&ids, 0, sizeof ids);
    bool ok = prompt_read(a, &given) && talk_add(t, "user", given.data, given.count);
    if (ok &&
        qlora_text_chat_encode(a->chat, t->messages, t->count, true, &ids, NULL) != QLORA_OK) {
        ok = text_fail(a, "");
    }
    ok = ok && prompt_check(a, &ids, a->o.context, "--context is");
    int64_t room = a->o.context - (int64_t)ids.count;
    int64_t most = a->o.max_tokens < room ? a->o.max_tokens : room;
    ok = ok && model_open(a, (int64_t)ids.count, (int64_t)ids.count + most) && speak(a, &ids, most);
    qlora_text_bytes_free(a->text, &given);
    qlora_text_ids_free(a->text, &ids);
    return ok;
}

static bool input_is_terminal(void) {
#ifdef _WIN32
    return _isatty(0) != 0;
#else
    return isatty(STDIN_FILENO) != 0;
#endif
}

// Answers line by line until /exit or the end of the input.
static bool converse(app* a, talk* t) {
    qlora_text_bytes line;
    qlora_text_ids ids;
    qlora_text_chat_info info;
    memset(&line, 0, sizeof line);
    memset(&ids, 0, sizeof ids);
    memset(&info, 0, sizeof info);
    bool ok = model_open(a, a->o.context, a->o.context) &&
              (qlora_text_chat_query(a->chat, &info) == QLORA_OK || text_fail(a, ""));
    if (ok) {
        fprintf(stderr, "[chat format %s, %s%s; /clear starts over, /exit or Ctrl-D quits]\n",
                info.name, info.source, a->own_format ? " of the adapter" : "");
    }
    while (ok) {
        fprintf(stderr, "> ");
        if (!line_read(a, &line)) {
            break;
        }
        if (line.count == 5 && memcmp(line.data, "/exit", 5) == 0) {
            break;
        }
        if (line.count == 6 && memcmp(line.data, "/clear", 6) == 0) {
            talk_drop(t, t->first, t->count - t->first);
        } else if (line.count > 0) {
            ok = turn(a, t, &line, &ids);
        }
    }
    a->interrupted = false;                            // Ctrl-C ended an answer, not the program
    ok = ok && !(a->too_long && !input_is_terminal()); // nobody saw the message in a script
    qlora_text_bytes_free(a->text, &line);
    qlora_text_ids_free(a->text, &ids);
    return ok;
}

static bool chat(app* a) {
    static talk t;
    bool once = a->o.prompt != NULL || a->o.prompt_file != NULL;
    bool ok = chat_open(a, &t) && (once ? answer_once(a, &t) : converse(a, &t));
    talk_drop(&t, 0, t.count);
    return ok;
}

#include "generate/batch.h"

// ---- main -------------------------------------------------------------------------------------

static bool batch_check(options* o) {
    const char* other = o->prompt != NULL        ? "prompt"
                        : o->prompt_file != NULL ? "prompt-file"
                        : o->no_echo             ? "no-echo"
                        : o->ids                 ? "ids"
                        : o->logprobs            ? "logprobs"
                        : o->context != 0        ? "context"
                                                 : NULL;
    if (o->data == NULL) {
        const char* only = o->out != NULL       ? "out"
                           : o->batch != 0      ? "batch"
                           : o->positions != 0  ? "positions"
                           : o->samples != 0    ? "samples"
                           : o->format != NULL  ? "format"
                           : o->columns != NULL ? "columns"
                           : o->score != NULL   ? "score"
                                                : NULL;
        return only == NULL || fail("--%s can only be used with --data", only);
    }
    o->batch = o->batch > 0 ? o->batch : 16;
    o->samples = o->samples > 0 ? o->samples : 1;
    if (o->out == NULL) {
        return fail("--data needs --out FILE for the answers");
    }
    if (o->samples > 1 && o->temperature <= 0.0) {
        return fail("--samples %lld: with --temperature 0 all answers to a prompt would be the "
                    "same; give a temperature above 0",
                    (long long)o->samples);
    }
    return other == NULL || fail("--data and --%s cannot be used together", other);
}

static bool options_check(options* o, char adapter[FOLDER_PATH]) {
    if (o->model == NULL) {
        return fail("--model DIR is required; see --help");
    }
    if (o->prompt != NULL && o->prompt_file != NULL) {
        return fail("--prompt and --prompt-file cannot be used together");
    }
    if (o->prompt == NULL && o->prompt_file == NULL && !o->chat && o->data == NULL) {
        return fail("--prompt TEXT, --prompt-file FILE, --chat or --data FILE is required");
    }
    if (!batch_check(o)) {
        return false;
    }
    if (o->device >= 0 && o->backend == QLORA_BACKEND_CPU) {
        return fail("--device and --backend cpu cannot be used together");
    }
    if (o->adapter != NULL && file_is_gguf(o->adapter)) {
        return fail("--adapter %s is a GGUF file; a folder with safetensors is needed", o->adapter);
    }
    if (!o->chat && o->context != 0) {
        return fail("--context can only be used with --chat; see --max-tokens");
    }
    bool formed = o->template_name != NULL || o->chat_template != NULL;
    if (!o->chat && o->data == NULL && (o->system != NULL || formed)) {
        return fail("--%s can only be used with --chat", o->system != NULL ? "system" : "template");
    }
    if (o->template_name != NULL && o->chat_template != NULL) {
        return fail("--template and --chat-template cannot be used together");
    }
    char why[HUB_ADVICE];
    const char* fault = model_fault(o->model, why);
    if (fault != NULL) {
        return fail("--model %s: %s", o->model, fault);
    }
    const char* hub = o->tokenizer != NULL ? hub_advice(o->tokenizer, "--tokenizer", why) : "";
    if (hub[0] != '\0') {
        return fail("--tokenizer %s: no such file or folder%s", o->tokenizer, hub);
    }
    if (o->adapter != NULL && !folder_adapter(o->adapter, adapter)) {
        return fail("--adapter %s: adapter_config.json not found%s", o->adapter,
                    adapter_advice(o->adapter, why));
    }
    o->adapter = o->adapter != NULL ? adapter : NULL;
    return true;
}

static bool run(app* a) {
    const char* vocabulary = a->o.tokenizer != NULL ? a->o.tokenizer
                             : adapter_tokens(a)    ? a->o.adapter
                                                    : a->o.model;
    qlora_text_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.log = a->o.verbose ? qlora_log_stderr : NULL;
    if (qlora_text_create(&desc, &a->text) != QLORA_OK) {
        return fail("out of memory");
    }
    if (qlora_text_tok_open(a->text, vocabulary, &a->tok) != QLORA_OK) {
        return text_fail(a, "");
    }
    return context_open(a) && (a->o.data != NULL ? answer_all(a)
                               : a->o.chat       ? chat(a)
                                                 : complete(a));
}

static void app_close(app* a) {
    (void)qlora_generate_end(a->generation);
    blob_free(&a->line);
    qlora_text_bytes_free(a->text, &a->out);
    qlora_text_bytes_free(a->text, &a->answer);
    qlora_text_chat_close(a->chat);
    qlora_text_tok_close(a->tok);
    qlora_text_destroy(a->text);
    qlora_model_close(a->model);
    qlora_ctx_destroy(a->ctx);
}

static void options_default(options* o) {
    o->max_tokens = 256;
    o->device = -1;
    o->penalty = 1.0;
    o->temperature = 0.7;
    o->top_p = 0.95;
    o->seed = 1;
}

int main(int argc, char** argv) {
    static app a;
    options* o = &a.o;
    options_default(o);
    const option_set set = {option_table, sizeof option_table / sizeof option_table[0], o};
    static const char* const first[] = {"model", "adapter", "prompt",     "chat", "system",
                                        "data",  "out",     "max-tokens", "stop", "temperature",
                                        "seed",  "base",    NULL};
    int status = 0;
    if (!tool_start(&set, argc, argv, &o->version, &status)) {
        return status;
    }
    if (o->help) {
        printf("usage: generate --model DIR [--adapter DIR] --prompt TEXT | --chat [options]\n"
               "       generate --model DIR [--adapter DIR] --data FILE --out FILE [options]\n\n");
        options_print(&set, first, 31);
        printf(
            "\nCtrl-C ends the text. Exit status: 0 on success, 1 on error, 130 after Ctrl-C.\n");
        return tool_end(true);
    }
    char adapter[FOLDER_PATH];
    bool ok = options_check(o, adapter) && run(&a);
    app_close(&a);
    status = tool_end(ok);
    return status == 0 && a.interrupted ? 130 : status;
}
