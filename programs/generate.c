// generate: continues a text, or chats, with a model and perhaps an adapter.
//
//   cc -O2 -I. -o generate programs/generate.c -ldl -lm -lpthread
//   ./generate --model DIR --prompt "Once upon a time"
//   ./generate --model DIR --adapter DIR --chat
//
// It calls the public functions of qlora.h and qlora_text.h only.
#define QLORA_IMPLEMENTATION
#include "qlora.h"
#define TEXT_IMPLEMENTATION
#include "qlora_text.h"

#define PROGRAM "generate"
#include "options.h"

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
    const char* prompt;
    const char* system;
    const char* template_name;
    double max_tokens;
    double context;
    double temperature;
    double top_k;
    double top_p;
    double seed;
    double device;
    double threads;
    int backend;
    int mode;
    int base;
    int cache;
    bool chat;
    bool no_echo;
    bool stats;
    bool verbose;
    bool help;
} options;

typedef struct app {
    options o;
    qlora_ctx* ctx;
    qlora_model* model;
    text_tok* tok;
    text_chat* chat;
    text_stream stream;
    text_bytes out;
    text_bytes answer; // all that was said in this turn
    text_error why;
    int32_t stops[MAX_STOPS];
    int32_t stop_count;
    int64_t made; // tokens of the last text
    bool broken;  // standard output is gone, or memory is
} app;

static volatile sig_atomic_t interrupted;

static void on_interrupt(int number) {
    (void)number;
    interrupted = 1;
}

static double seconds_now(void) {
#ifdef _WIN32
    return (double)clock() / CLOCKS_PER_SEC; // there it is the time of day
#else
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
#endif
}

static bool lib(const app* a, qlora_result r) {
    return r == QLORA_OK || fail("%s", qlora_last_error(a->ctx));
}

// Prints what the stream let go of, and keeps it for the next turn of a chat.
static bool show(app* a, bool quiet) {
    bool ok = text_bytes_add(&a->answer, a->out.data, a->out.count, &a->why);
    if (ok && !quiet && a->out.count > 0) {
        ok = fwrite(a->out.data, 1, a->out.count, stdout) == a->out.count && fflush(stdout) == 0;
    }
    a->out.count = 0;
    return ok;
}

static bool on_token(void* user, int32_t token) {
    app* a = (app*)user;
    a->made++;
    if (!text_stream_push(a->tok, &a->stream, token, TEXT_SKIP, &a->out, &a->why) ||
        !show(a, false)) {
        a->broken = true;
    }
    return !a->broken && !interrupted;
}

static bool text_end(app* a) {
    bool ok = text_stream_end(&a->stream, &a->out, &a->why) && show(a, false) && !a->broken;
    ok = ok && fputc('\n', stdout) != EOF && fflush(stdout) == 0;
    return ok || fail("the text could not be written");
}

// The text after `prompt`, printed as it comes; Ctrl-C ends it.
static bool speak(app* a, const text_ids* prompt, int64_t most) {
    const options* o = &a->o;
    qlora_generate_desc d;
    memset(&d, 0, sizeof d);
    d.prompt = prompt->data;
    d.prompt_tokens = (int64_t)prompt->count;
    d.max_tokens = most;
    d.temperature = (float)o->temperature;
    d.top_k = (int32_t)o->top_k;
    d.top_p = (float)o->top_p;
    d.seed = (uint64_t)o->seed;
    d.stops = a->stops;
    d.stop_count = a->stop_count;
    a->made = 0;
    interrupted = 0;
    double start = seconds_now();
    void (*before)(int) = signal(SIGINT, on_interrupt);
    qlora_result r = qlora_generate(a->model, &d, on_token, a);
    signal(SIGINT, before == SIG_ERR ? SIG_DFL : before);
    double seconds = seconds_now() - start;
    bool ok = lib(a, r) && text_end(a);
    if (ok && o->stats) {
        fprintf(stderr, "[%lld tokens after %lld in %.2f s, %.1f tokens/s]\n", (long long)a->made,
                (long long)prompt->count, seconds,
                (double)(a->made + d.prompt_tokens) / (seconds > 0.0 ? seconds : 1e-9));
    }
    return ok;
}

// ---- opening ----------------------------------------------------------------------------------

// The model's own stops, and in a chat those of its format.
static void stops_collect(app* a, const qlora_model_config* config) {
    int32_t count = text_tok_count(a->tok);
    for (int32_t i = 0; i < config->stop_count; i++) {
        a->stops[a->stop_count++] = config->stop_ids[i];
    }
    for (int32_t id = 0; a->chat != NULL && id < count && a->stop_count < MAX_STOPS; id++) {
        if (text_chat_stops(a->chat, id)) {
            a->stops[a->stop_count++] = id;
        }
    }
    if (a->stop_count == 0) {
        a->stops[a->stop_count++] = -1;
    }
}

enum { MODE_TF32 = 2 }; // its place in the list of --mode: F32 with the context's math

static bool context_open(app* a) {
    static char why[512];
    qlora_ctx_desc d;
    memset(&d, 0, sizeof d);
    d.require_backend = (qlora_backend)a->o.backend;
    d.device = (int32_t)a->o.device;
    d.threads = (int32_t)a->o.threads;
    d.math = a->o.mode == MODE_TF32 ? QLORA_MATH_TF32 : QLORA_MATH_F32;
    d.log = a->o.verbose ? qlora_log_stderr : NULL;
    d.error_text = why;
    d.error_text_size = sizeof why;
    return qlora_ctx_create(&d, &a->ctx) == QLORA_OK || fail("%s", why);
}

// Norms that were trained lie beside the adapter.
static bool norms_exist(const char* adapter) {
    char path[1024];
    snprintf(path, sizeof path, "%s/trained_norms.safetensors", adapter != NULL ? adapter : "");
    FILE* file = adapter != NULL ? fopen(path, "rb") : NULL;
    if (file != NULL) {
        fclose(file);
    }
    return file != NULL;
}

// `prompt` tokens at a time and `room` in all.
static bool model_open(app* a, int64_t prompt, int64_t room) {
    const options* o = &a->o;
    qlora_model_desc m;
    qlora_train_desc t;
    memset(&m, 0, sizeof m);
    memset(&t, 0, sizeof t);
    m.dir = o->model;
    m.adapter = o->adapter;
    m.train_norms = norms_exist(o->adapter);
    m.rank = -1;
    m.mode = o->mode == MODE_TF32 ? QLORA_MODE_F32 : (qlora_mode)o->mode;
    m.base = (qlora_base_format)o->base;
    t.no_training = true;
    t.tokens = prompt < 1024 ? prompt : 1024;
    t.max_sequences = 1;
    t.head_chunk = 16; // no more than one row of logits is ever wanted
    t.generate_tokens = room;
    t.cache = (qlora_choice)o->cache;
    if (o->cache == QLORA_CHOICE_AUTO && qlora_ctx_backend(a->ctx) == QLORA_BACKEND_CPU) {
        t.cache = QLORA_CHOICE_ON; // the CPU would widen every weight for every token
    }
    if (!lib(a, qlora_model_open(a->ctx, &m, &t, NULL, &a->model))) {
        return false;
    }
    stops_collect(a, &qlora_model_plan(a->model)->config);
    return true;
}

// ---- one text ---------------------------------------------------------------------------------

static bool complete(app* a) {
    const options* o = &a->o;
    text_bytes given;
    text_ids ids;
    memset(&given, 0, sizeof given);
    memset(&ids, 0, sizeof ids);
    bool ok = true;
    if (strcmp(o->prompt, "-") == 0) {
        char piece[4096];
        size_t n = 0;
        while (ok && (n = fread(piece, 1, sizeof piece, stdin)) > 0) {
            ok = text_bytes_add(&given, piece, n, &a->why);
        }
    } else {
        ok = text_bytes_add(&given, o->prompt, strlen(o->prompt), &a->why);
    }
    int32_t bos = text_tok_bos(a->tok);
    ok = ok && (bos < 0 || text_ids_add(&ids, bos, &a->why)) &&
         text_encode(a->tok, given.data, given.count, 0, &ids, &a->why);
    if (!ok) {
        fail("the prompt: %s", a->why.text);
    } else if (ids.count == 0) {
        ok = fail("the prompt is empty, and this model has no token to begin a text with");
    }
    int64_t most = (int64_t)o->max_tokens;
    ok = ok && model_open(a, (int64_t)ids.count, (int64_t)ids.count + most);
    // The prompt goes through the stream, too: whether a space stands before a word depends on it.
    for (size_t i = 0; ok && i < ids.count; i++) {
        ok = (text_stream_push(a->tok, &a->stream, ids.data[i], TEXT_SKIP, &a->out, &a->why) &&
              show(a, o->no_echo)) ||
             fail("the text could not be written");
    }
    ok = ok && speak(a, &ids, most);
    text_bytes_free(&given);
    text_ids_free(&ids);
    return ok;
}

// ---- chat -------------------------------------------------------------------------------------

typedef struct talk {
    text_message messages[MAX_MESSAGES];
    size_t count;
    size_t first; // 1 behind a system message
} talk;

static bool talk_add(app* a, talk* t, const char* role, const char* content, size_t length) {
    char* copy = (char*)malloc(length + 1);
    if (copy == NULL) {
        snprintf(a->why.text, sizeof a->why.text, "out of memory");
        return false;
    }
    if (length > 0) {
        memcpy(copy, content, length);
    }
    copy[length] = '\0';
    text_message* m = &t->messages[t->count++];
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

// A line of any length; false at the end of the input.
static bool line_read(text_bytes* line, text_error* why) {
    int c = 0;
    line->count = 0;
    while ((c = fgetc(stdin)) != EOF && c != '\n') {
        char byte = (char)c;
        if (!text_bytes_add(line, &byte, 1, why)) {
            return false;
        }
    }
    if (line->count > 0 && line->data[line->count - 1] == '\r') {
        line->count--;
    }
    return c != EOF || line->count > 0;
}

// The conversation as a prompt; the oldest turns go when there is no room for an answer.
static bool talk_encode(app* a, talk* t, text_ids* ids) {
    size_t room = (size_t)a->o.context;
    size_t answer = (size_t)a->o.max_tokens < room / 4 ? (size_t)a->o.max_tokens : room / 4;
    for (;;) {
        ids->count = 0;
        if (!text_chat_encode(a->chat, a->tok, t->messages, t->count, true, ids, NULL, &a->why)) {
            return fail("%s", a->why.text);
        }
        if (ids->count + answer < room) {
            return true;
        }
        if (t->count < t->first + 3) {
            talk_drop(t, t->count - 1, 1);
            ids->count = 0;
            fail("that is too long for --context %g", a->o.context);
            return true;
        }
        talk_drop(t, t->first, 2);
        fprintf(stderr, "[the oldest question and answer are forgotten]\n");
    }
}

static bool turn(app* a, talk* t, const text_bytes* line, text_ids* ids) {
    if (t->count + 2 > MAX_MESSAGES) {
        talk_drop(t, t->first, 2);
    }
    if (!talk_add(a, t, "user", line->data, line->count)) {
        return fail("%s", a->why.text);
    }
    if (!talk_encode(a, t, ids)) {
        return false;
    }
    if (ids->count == 0) {
        return true; // too long, and said so
    }
    int64_t room = (int64_t)a->o.context - (int64_t)ids->count;
    int64_t most = (int64_t)a->o.max_tokens < room ? (int64_t)a->o.max_tokens : room;
    memset(&a->stream, 0, sizeof a->stream);
    a->answer.count = 0;
    if (!speak(a, ids, most)) {
        return false;
    }
    return talk_add(a, t, "assistant", a->answer.data, a->answer.count) || fail("%s", a->why.text);
}

static bool converse(app* a) {
    static talk t;
    text_bytes line;
    text_ids ids;
    memset(&line, 0, sizeof line);
    memset(&ids, 0, sizeof ids);
    bool ok = text_chat_open(a->tok, a->o.model, a->o.template_name, &a->chat, &a->why) ||
              fail("%s", a->why.text);
    ok = ok && model_open(a, (int64_t)a->o.context, (int64_t)a->o.context);
    if (ok && a->o.system != NULL) {
        ok = talk_add(a, &t, "system", a->o.system, strlen(a->o.system)) || fail("%s", a->why.text);
        t.first = t.count;
    }
    if (ok) {
        fprintf(stderr,
                "[chat format %s, %s; /clear forgets, /exit or the end of the input leaves]\n",
                text_chat_name(a->chat), text_chat_source(a->chat));
    }
    while (ok) {
        fprintf(stderr, "> ");
        if (!line_read(&line, &a->why)) {
            break;
        }
        if (line.count == 5 && memcmp(line.data, "/exit", 5) == 0) {
            break;
        }
        if (line.count == 6 && memcmp(line.data, "/clear", 6) == 0) {
            talk_drop(&t, t.first, t.count - t.first);
        } else if (line.count > 0) {
            ok = turn(a, &t, &line, &ids);
        }
    }
    talk_drop(&t, 0, t.count);
    text_bytes_free(&line);
    text_ids_free(&ids);
    return ok;
}

// ---- main -------------------------------------------------------------------------------------

static bool options_check(const options* o) {
    if (o->model == NULL) {
        return fail("--model DIR is missing; --help lists the options");
    }
    if ((o->prompt != NULL) == o->chat) {
        return fail("give --prompt TEXT, or --chat");
    }
    if (!o->chat && (o->system != NULL || o->template_name != NULL)) {
        return fail("--system and --template belong to --chat");
    }
    return true;
}

static bool run(app* a) {
    const char* vocabulary = a->o.tokenizer != NULL ? a->o.tokenizer : a->o.model;
    if (!text_tok_open(vocabulary, &a->tok, &a->why)) {
        return fail("%s", a->why.text);
    }
    return context_open(a) && (a->o.chat ? converse(a) : complete(a));
}

int main(int argc, char** argv) {
    static app a;
    options* o = &a.o;
    o->max_tokens = 256;
    o->context = 2048;
    o->temperature = 0.7;
    o->top_p = 0.95;
    o->seed = 1;
    // clang-format off
    const option table[] = {
        TEXT("model", "DIR", &o->model, "the model's folder, as Hugging Face has it"),
        TEXT("adapter", "DIR", &o->adapter, "a PEFT adapter; without, the bare model"),
        TEXT("tokenizer", "PATH", &o->tokenizer, "tokenizer.json or its folder; --model"),
        TEXT("prompt", "TEXT", &o->prompt, "what to continue; - reads standard input"),
        FLAG("no-echo", &o->no_echo, "print only what is new"),
        FLAG("chat", &o->chat, "a conversation, line by line"),
        TEXT("system", "TEXT", &o->system, "its first message"),
        TEXT("template", "NAME", &o->template_name, "chat format; the model's own"),
        NUMBER("context", "N", &o->context, 16, 1e6, "most tokens of a conversation: 2048"),
        NUMBER("max-tokens", "N", &o->max_tokens, 1, 1e6, "most new tokens: 256"),
        NUMBER("temperature", "X", &o->temperature, 0, 100, "0.7; 0 takes the likeliest"),
        NUMBER("top-k", "N", &o->top_k, 0, 1e6, "only the N likeliest; 0 is all"),
        NUMBER("top-p", "X", &o->top_p, 0, 1, "only the likeliest X of all: 0.95"),
        NUMBER("seed", "N", &o->seed, 0, 9e15, "1; the same seed says the same"),
        CHOICE("backend", "auto|cpu|cuda", &o->backend, "auto: the GPU where there is one"),
        CHOICE("mode", "auto|f32|tf32|bf16", &o->mode, "number format (default auto)"),
        CHOICE("base", "nf4|16bit|32bit", &o->base, "how the weights are kept: nf4"),
        CHOICE("cache", "auto|on|off", &o->cache, "wide copies of 4-bit weights"),
        NUMBER("device", "N", &o->device, 0, 1023, "which GPU: 0"),
        NUMBER("threads", "N", &o->threads, 1, 64, "of the CPU; one a core"),
        FLAG("stats", &o->stats, "tokens and time, on standard error"),
        FLAG("verbose", &o->verbose, "show what the library logs"),
        FLAG("help", &o->help, "this text"),
    };
    // clang-format on
    const size_t count = sizeof table / sizeof table[0];
    if (!options_read(table, count, argc, argv)) {
        return 1;
    }
    if (o->help) {
        printf("usage: generate --model DIR [--adapter DIR] --prompt TEXT | --chat [options]\n\n");
        options_print(table, count);
        printf("\nCtrl-C ends the text. Exit status: 0, or 1 after an error.\n");
        return 0;
    }
    bool ok = options_check(o) && run(&a);
    text_chat_close(a.chat);
    text_tok_close(a.tok);
    text_bytes_free(&a.out);
    text_bytes_free(&a.answer);
    qlora_model_close(a.model);
    qlora_ctx_destroy(a.ctx);
    return ok ? 0 : 1;
}
