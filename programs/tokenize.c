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

#ifdef _WIN32 // line ends must stay as they are
#include <fcntl.h>
#include <io.h>
#define BINARY(file) _setmode(_fileno(file), _O_BINARY)
#else
#define BINARY(file) ((void)(file))
#endif

static const char usage[] =
    "usage: tokenize TOKENIZER [--special] [--json FILE] [--decode]\n"
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
    "  --help       show this help\n"
    "  --version    print the version\n"
    "\n"
    "Exit status: 0 on success, 1 on error (reported on standard error).\n";

typedef struct options {
    const char* tokenizer;
    const char* json;
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

static bool options_read(int argc, char** argv, options* o, work* w) {
    for (int i = 1; i < argc; i++) {
        const char* word = argv[i];
        if (strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0) {
            o->help = true;
            return true;
        } else if (strcmp(word, "--version") == 0) {
            o->version = true;
            return true;
        } else if (strcmp(word, "--special") == 0) {
            o->special = true;
        } else if (strcmp(word, "--decode") == 0) {
            o->decode = true;
        } else if (strcmp(word, "--json") == 0) {
            if (i + 1 == argc) {
                return fail(w, "--json needs a value: FILE");
            }
            o->json = argv[++i];
        } else if (word[0] == '-') {
            return fail(w, "unknown option %s", word);
        } else if (o->tokenizer != NULL) {
            return fail(w, "unexpected argument: %s", word);
        } else {
            o->tokenizer = word;
        }
    }
    return o->tokenizer != NULL || fail(w, "TOKENIZER is required");
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

static bool run(const options* o, work* w) {
    blob input;
    memset(&input, 0, sizeof(input));
    w->flags = o->special ? (uint32_t)QLORA_TEXT_SPECIAL : 0u;
    const char* name = o->json != NULL ? o->json : "standard input";
    bool good = (qlora_text_create(NULL, &w->text) == QLORA_OK || fail(w, "out of memory")) &&
                text_ok(w, qlora_text_tok_open(w->text, o->tokenizer, &w->tok)) &&
                input_read(w, o, name, &input);
    if (good && o->json != NULL) {
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
