// tokenize: text to token ids and back, with a model's own tokenizer.
//
//   cc -std=c99 -O2 -I. -o tokenize programs/tokenize.c
//   echo "Hello world" | ./tokenize model/tokenizer.json
//   echo "[9906, 1917]" | ./tokenize model/tokenizer.json --decode
#define QLORA_TEXT_IMPLEMENTATION
#include "qlora_text.h"

#include "json_array.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#ifdef _WIN32 // line ends must stay as they are
#include <fcntl.h>
#include <io.h>
#define BINARY(file) _setmode(_fileno(file), _O_BINARY)
#else
#define BINARY(file) ((void)(file))
#endif

static const char usage[] =
    "usage: tokenize TOKENIZER [--special] [--json FILE] [--decode]\n"
    "       tokenize --chat FILE [TOKENIZER] [--chat-template FILE] [--text] [...]\n"
    "\n"
    "  TOKENIZER    tokenizer.json, a tokenizer.bin from llama2.c, or a folder with\n"
    "               one of them\n"
    "\n"
    "Reads text from standard input, exactly as it is, and prints its token ids as a\n"
    "JSON array.\n"
    "\n"
    "  --json FILE  read a JSON array of strings from FILE (- for standard input)\n"
    "               instead, and print one array per line\n"
    "  --special    add special tokens such as BOS, as specified by the tokenizer's\n"
    "               post-processor\n"
    "  --decode     decode instead: read JSON arrays of ids from standard input, one\n"
    "               per line, and print the exact text, with a newline between two\n"
    "               texts but none after the last. With --json FILE, read an array of\n"
    "               arrays of ids and print one JSON string per line, with U+FFFD for\n"
    "               invalid UTF-8\n"
    "\n"
    "Chat: renders a conversation with a chat template.\n"
    "\n"
    "  --chat FILE  a JSON object: \"messages\", optionally \"tools\", and any other\n"
    "               variable of the template\n"
    "  --chat-template FILE\n"
    "               the template; without it, the one next to TOKENIZER\n"
    "  --template NAME\n"
    "               one of the built-in templates instead\n"
    "  --text       print the rendering and nothing else\n"
    "  --generation-prompt\n"
    "               end where the assistant's answer begins\n"
    "  --bos TEXT, --eos TEXT, --pad TEXT, --unk TEXT\n"
    "               the special tokens that the template sees\n"
    "  --now TIME   the clock of the template, such as 2026-07-26T12:00:00\n"
    "\n"
    "  --help       show this help\n"
    "  --version    print the version\n"
    "\n"
    "Exit status: 0 on success, 1 on error (reported on standard error).\n";

typedef struct options {
    const char* tokenizer;
    const char* json;
    const char* chat;
    const char* chat_template;
    const char* template_name;
    const char* bos;
    const char* eos;
    const char* pad;
    const char* unk;
    const char* now;
    bool generation_prompt;
    bool text;
    bool special;
    bool decode;
    bool help;
    bool version;
} options;

typedef struct work {
    qlora_text* text;
    qlora_text_tok* tok;
    uint32_t flags;
    qlora_text_ids ids;
    qlora_text_bytes bytes;
    blob string;
    blob out; // printed at the end, so that an error never leaves partial output
    char error[1024];
} work;

#if defined(__GNUC__) && !defined(__MINGW32__)
__attribute__((format(printf, 2, 3)))
#endif
static bool
fail(work* w, const char* format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(w->error, sizeof(w->error), format, args);
    va_end(args);
    return false;
}

static bool text_ok(work* w, qlora_result r) {
    // without the name of the call: it means nothing to the user of a program
    const char* why = qlora_text_last_error(w->text);
    const char* colon = strncmp(why, "qlora_", 6) == 0 ? strstr(why, ": ") : NULL;
    return r == QLORA_OK || fail(w, "%s", colon != NULL ? colon + 2 : why);
}

// Sets the option that `word` names; *used is how many words it took, 0 when there is no such option.
static bool option_read(options* o, work* w, const char* word, const char* next, int* used) {
    const struct {
        const char* name;
        bool* flag;
        const char** value;
    } known[] = {{"--help", &o->help, NULL},
                 {"-h", &o->help, NULL},
                 {"--version", &o->version, NULL},
                 {"--special", &o->special, NULL},
                 {"--decode", &o->decode, NULL},
                 {"--generation-prompt", &o->generation_prompt, NULL},
                 {"--text", &o->text, NULL},
                 {"--json", NULL, &o->json},
                 {"--chat", NULL, &o->chat},
                 {"--chat-template", NULL, &o->chat_template},
                 {"--template", NULL, &o->template_name},
                 {"--bos", NULL, &o->bos},
                 {"--eos", NULL, &o->eos},
                 {"--pad", NULL, &o->pad},
                 {"--unk", NULL, &o->unk},
                 {"--now", NULL, &o->now}};
    for (size_t i = 0; i < sizeof(known) / sizeof(known[0]); i++) {
        if (strcmp(word, known[i].name) != 0) {
            continue;
        }
        *used = known[i].flag != NULL ? 1 : 2;
        if (known[i].flag != NULL) {
            *known[i].flag = true;
        } else if (next == NULL) {
            return fail(w, "%s needs a value%s", word, strcmp(word, "--json") == 0 ? ": FILE" : "");
        } else {
            *known[i].value = next;
        }
        return true;
    }
    *used = 0;
    return true;
}

// Options that need --chat, and the other way round.
static bool options_check(const options* o, work* w) {
    bool only_chat = o->chat_template != NULL || o->template_name != NULL || o->bos != NULL ||
                     o->eos != NULL || o->pad != NULL || o->unk != NULL || o->now != NULL ||
                     o->generation_prompt || o->text;
    if (o->chat == NULL) {
        return only_chat ? fail(w, "this option needs --chat FILE as well")
                         : o->tokenizer != NULL || fail(w, "TOKENIZER is required");
    }
    if (o->json != NULL || o->decode || o->special) {
        return fail(w, "--chat cannot be used with --json, --decode or --special");
    }
    if (o->chat_template != NULL && o->template_name != NULL) {
        return fail(w, "--chat-template and --template cannot be used together");
    }
    return o->tokenizer != NULL || o->chat_template != NULL || o->template_name != NULL ||
           fail(w, "--chat needs TOKENIZER or --chat-template FILE");
}

static bool options_read(int argc, char** argv, options* o, work* w) {
    for (int i = 1; i < argc; i++) {
        const char* word = argv[i];
        int used = 0;
        if (!option_read(o, w, word, i + 1 < argc ? argv[i + 1] : NULL, &used)) {
            return false;
        }
        if (o->help || o->version) {
            return true;
        }
        if (used > 0) {
            i += used - 1;
        } else if (word[0] == '-') {
            return fail(w, "unknown option %s", word);
        } else if (o->tokenizer != NULL) {
            return fail(w, "unexpected argument: %s", word);
        } else {
            o->tokenizer = word;
        }
    }
    return options_check(o, w);
}

static bool out_add(work* w, const void* data, size_t size) {
    return blob_add(&w->out, data, size) || fail(w, "out of memory");
}

static bool encode(work* w, const char* text, size_t length) {
    w->ids.count = 0;
    if (!text_ok(w, qlora_text_encode(w->tok, text, length, w->flags, &w->ids)) ||
        !out_add(w, "[", 1)) {
        return false;
    }
    for (size_t i = 0; i < w->ids.count; i++) {
        char number[24];
        int size = snprintf(number, sizeof(number), "%s%d", i > 0 ? ", " : "", (int)w->ids.data[i]);
        if (!out_add(w, number, (size_t)size)) {
            return false;
        }
    }
    return out_add(w, "]\n", 2);
}

// The ids of one array to text in w->bytes. An id that the tokenizer lacks is an error.
static bool decode(work* w, json_reader* r, uint32_t flags) {
    bool more = false;
    w->ids.count = 0;
    w->bytes.count = 0;
    for (size_t i = 0; json_next(r, i, &more) && more; i++) {
        qlora_text_token_info info;
        int32_t id = 0;
        if (!json_int32(r, &id)) {
            return fail(w, "element %lu: %s", (unsigned long)i, r->wrong);
        }
        if (!text_ok(w, qlora_text_token_query(w->tok, id, &info)) ||
            !text_ok(w, qlora_text_ids_add(w->text, &w->ids, id))) {
            return false;
        }
    }
    if (r->wrong != NULL) {
        return fail(w, "%s", r->wrong);
    }
    return text_ok(w, qlora_text_decode(w->tok, w->ids.data, w->ids.count, flags, &w->bytes));
}

static bool decode_lines(work* w, const blob* input) {
    size_t line = 0;
    bool printed = false;
    for (size_t at = 0; at < input->count;) {
        const char* start = input->data + at;
        const char* newline = (const char*)memchr(start, '\n', input->count - at);
        size_t size = newline != NULL ? (size_t)(newline - start) : input->count - at;
        at += size + 1;
        line++;
        if (strspn(start, " \t\r") >= size) {
            continue;
        }
        json_reader r = json_start(start, size);
        if (!decode(w, &r, 0) || (!json_end(&r) && !fail(w, "%s", r.wrong))) {
            char why[sizeof(w->error)];
            snprintf(why, sizeof(why), "%s", w->error);
            return fail(w, "line %lu: %.900s", (unsigned long)line, why);
        }
        if ((printed && !out_add(w, "\n", 1)) || !out_add(w, w->bytes.data, w->bytes.count)) {
            return false;
        }
        printed = true;
    }
    return true;
}

// One element of the array in --json.
static bool element(work* w, json_reader* r, bool decoding) {
    if (decoding) {
        return decode(w, r, QLORA_TEXT_REPLACE) &&
               (json_quote(w->bytes.data, w->bytes.count, &w->out) || fail(w, "out of memory")) &&
               out_add(w, "\n", 1);
    }
    w->string.count = 0;
    return (json_string(r, &w->string) || fail(w, "%s", r->wrong)) &&
           encode(w, w->string.data, w->string.count);
}

static bool elements(work* w, const char* name, const blob* input, bool decoding) {
    json_reader r = json_start(input->data, input->count);
    bool more = false;
    for (size_t i = 0; json_next(&r, i, &more) && more; i++) {
        if (!element(w, &r, decoding)) {
            char why[sizeof(w->error)];
            snprintf(why, sizeof(why), "%s", w->error);
            return fail(w, "%.400s: element %lu: %.500s", name, (unsigned long)i, why);
        }
    }
    if (r.wrong != NULL || !json_end(&r)) {
        size_t line = 1;
        for (const char* p = input->data; p < r.at; p++) {
            line += *p == '\n' ? 1 : 0;
        }
        return fail(w, "%.400s:%lu: %s", name, (unsigned long)line, r.wrong);
    }
    return true;
}

static bool input_read(work* w, const options* o, const char* name, blob* input) {
    bool from_file = o->json != NULL && strcmp(o->json, "-") != 0;
    int code = from_file ? blob_read_path(input, o->json) : blob_read(input, stdin);
    return code == 0 || fail(w, "cannot read %s: %s", name, strerror(code));
}

// ---- chat

// 2026-07-26T12:00:00, in seconds since 1970. Without --now: the clock of this machine, local time.
static bool clock_read(const options* o, work* w, int64_t* out) {
    int n[6] = {1970, 1, 1, 0, 0, 0};
    char end = 0;
    if (o->now == NULL) {
        time_t seconds = time(NULL);
        const struct tm* local = localtime(&seconds);
        if (local == NULL) {
            return fail(w, "this machine has no clock; use --now TIME");
        }
        n[0] = local->tm_year + 1900;
        n[1] = local->tm_mon + 1;
        n[2] = local->tm_mday;
        n[3] = local->tm_hour;
        n[4] = local->tm_min;
        n[5] = local->tm_sec;
    } else {
        int read =
            sscanf(o->now, "%d-%d-%dT%d:%d:%d%c", &n[0], &n[1], &n[2], &n[3], &n[4], &n[5], &end);
        bool day = n[1] >= 1 && n[1] <= 12 && n[2] >= 1 && n[2] <= 31 && n[0] >= 1 && n[0] <= 9999;
        bool hour = n[3] >= 0 && n[3] <= 23 && n[4] >= 0 && n[4] <= 59 && n[5] >= 0 && n[5] <= 59;
        if ((read != 3 && read != 6) || !day || !hour) {
            return fail(w, "--now is %.60s; it must be a time such as 2026-07-26T12:00:00", o->now);
        }
    }
    // days since 1970, with years that start in March
    int64_t year = n[0] - (n[1] <= 2 ? 1 : 0);
    int64_t month = n[1] > 2 ? n[1] - 3 : n[1] + 9;
    int64_t days =
        365 * year + year / 4 - year / 100 + year / 400 + (153 * month + 2) / 5 + n[2] - 1 - 719468;
    *out = days * 86400 + n[3] * 3600 + n[4] * 60 + n[5];
    return true;
}

static bool file_read(work* w, const char* path, blob* out) {
    int code = blob_read_path(out, path);
    return code == 0 || fail(w, "cannot read %s: %s", path, strerror(code));
}

// Without a tokenizer: the text alone.
static bool chat_text(const options* o, work* w, const blob* conversation) {
    qlora_text_template* compiled = NULL;
    qlora_text_render_desc desc;
    blob source;
    memset(&source, 0, sizeof(source));
    memset(&desc, 0, sizeof(desc));
    desc.conversation = conversation->data;
    desc.conversation_size = conversation->count;
    desc.generation_prompt = o->generation_prompt;
    desc.bos_token = o->bos;
    desc.eos_token = o->eos;
    desc.pad_token = o->pad;
    desc.unk_token = o->unk;
    bool good = clock_read(o, w, &desc.clock) && file_read(w, o->chat_template, &source) &&
                text_ok(w, qlora_text_template_compile(w->text, o->chat_template, source.data,
                                                       source.count, &compiled)) &&
                text_ok(w, qlora_text_template_render(compiled, &desc, &w->bytes, NULL)) &&
                out_add(w, w->bytes.data, w->bytes.count);
    qlora_text_template_close(compiled);
    blob_free(&source);
    return good;
}

static bool chat_run(const options* o, work* w) {
    blob conversation;
    memset(&conversation, 0, sizeof(conversation));
    bool good = file_read(w, o->chat, &conversation) && chat_text(o, w, &conversation);
    blob_free(&conversation);
    return good;
}

static bool run(const options* o, work* w) {
    blob input;
    memset(&input, 0, sizeof(input));
    w->flags = o->special ? (uint32_t)QLORA_TEXT_SPECIAL : 0u;
    const char* name = o->json != NULL ? o->json : "standard input";
    bool good =
        (qlora_text_create(NULL, &w->text) == QLORA_OK || fail(w, "out of memory")) &&
        (o->tokenizer == NULL || text_ok(w, qlora_text_tok_open(w->text, o->tokenizer, &w->tok))) &&
        (o->chat != NULL || input_read(w, o, name, &input));
    if (good && o->chat != NULL) {
        good = chat_run(o, w);
    } else if (good && o->json != NULL) {
        good = elements(w, name, &input, o->decode);
    } else if (good) {
        good = o->decode ? decode_lines(w, &input) : encode(w, input.data, input.count);
    }
    if (good && w->out.count > 0 &&
        (fwrite(w->out.data, 1, w->out.count, stdout) != w->out.count || fflush(stdout) != 0)) {
        good = fail(w, "cannot write standard output: %s", strerror(errno));
    }
    qlora_text_ids_free(w->text, &w->ids);
    qlora_text_bytes_free(w->text, &w->bytes);
    qlora_text_tok_close(w->tok);
    qlora_text_destroy(w->text);
    blob_free(&w->string);
    blob_free(&w->out);
    blob_free(&input);
    return good;
}

int main(int argc, char** argv) {
    options o;
    work w;
    memset(&o, 0, sizeof(o));
    memset(&w, 0, sizeof(w));
    if (!options_read(argc, argv, &o, &w)) {
        fprintf(stderr, "tokenize: %s (see tokenize --help)\n", w.error);
        return 1;
    }
    if (o.help) {
        fputs(usage, stdout);
        return 0;
    }
    if (o.version) {
        fputs("tokenize (qlora.h) " QLORA_VERSION_STRING "\n", stdout);
        return 0;
    }
    BINARY(stdin);
    BINARY(stdout);
    if (!run(&o, &w)) {
        fprintf(stderr, "tokenize: %s\n", w.error);
        return 1;
    }
    return 0;
}
