// tokenize: converts text to token ids and back with a model's own tokenizer.
//
//   cc -std=c99 -O2 -o tokenize programs/tokenize.c
//   echo "Hello world" | ./tokenize model/tokenizer.json
//   echo "[9906, 1917]" | ./tokenize model/tokenizer.json --decode
#define TEXT_IMPLEMENTATION
#include "qlora_text.h"

#include "qlora.h" // its version

#include <errno.h>
#include <stdio.h>
#include <string.h>

#ifdef _WIN32 // line endings must not be converted
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
    text_tok* tok;
    unsigned flags;
    text_ids ids;
    text_bytes bytes;
    text_bytes out; // printed at the end, so that an error never leaves partial output
} work;

static bool fail(text_error* error, const char* what, const char* name) {
    snprintf(error->text, sizeof(error->text), "%s%s", what, name);
    return false;
}

static bool options_read(int argc, char** argv, options* o, text_error* error) {
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
                return fail(error, "--json needs a value: FILE", "");
            }
            o->json = argv[++i];
        } else if (word[0] == '-') {
            return fail(error, "unknown option ", word);
        } else if (o->tokenizer != NULL) {
            return fail(error, "unexpected argument: ", word);
        } else {
            o->tokenizer = word;
        }
    }
    return o->tokenizer != NULL || fail(error, "TOKENIZER is required", "");
}

static bool stdin_read(text_bytes* out, text_error* error) {
    char block[65536];
    size_t got;
    while ((got = fread(block, 1, sizeof(block), stdin)) > 0) {
        if (!text_bytes_add(out, block, got, error)) {
            return false;
        }
    }
    return !ferror(stdin) || fail(error, "cannot read standard input: ", strerror(errno));
}

static bool encode_and_print(void* user, const char* text, size_t length, text_error* error) {
    work* w = (work*)user;
    w->ids.count = 0;
    if (!text_encode(w->tok, text, length, w->flags, &w->ids, error)) {
        return false;
    }
    if (!text_bytes_add(&w->out, "[", 1, error)) {
        return false;
    }
    for (size_t i = 0; i < w->ids.count; i++) {
        char number[24];
        int size = snprintf(number, sizeof(number), "%s%d", i > 0 ? ", " : "", w->ids.data[i]);
        if (!text_bytes_add(&w->out, number, (size_t)size, error)) {
            return false;
        }
    }
    return text_bytes_add(&w->out, "]\n", 2, error);
}

// Decodes one array of ids into w->bytes. An id that the tokenizer does not have is an error.
static bool decode(work* w, const char* json, size_t size, unsigned flags, text_error* error) {
    w->ids.count = 0;
    w->bytes.count = 0;
    if (!text_json_ids(json, size, &w->ids, error)) {
        return false;
    }
    for (size_t i = 0; i < w->ids.count; i++) {
        size_t length;
        if (text_tok_name(w->tok, w->ids.data[i], &length) == NULL) {
            char number[16];
            snprintf(number, sizeof(number), "%d", (int)w->ids.data[i]);
            return fail(error, "the tokenizer has no token with id ", number);
        }
    }
    return text_decode(w->tok, w->ids.data, w->ids.count, flags, &w->bytes, error);
}

static bool decode_lines(work* w, const text_bytes* input, text_error* error) {
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
        text_error why;
        why.text[0] = 0;
        if (!decode(w, start, size, 0, &why)) {
            snprintf(error->text, sizeof(error->text), "line %lu: %.400s", (unsigned long)line,
                     why.text);
            return false;
        }
        if ((printed && !text_bytes_add(&w->out, "\n", 1, error)) ||
            !text_bytes_add(&w->out, w->bytes.data, w->bytes.count, error)) {
            return false;
        }
        printed = true;
    }
    return true;
}

static bool decode_array(void* user, const char* json, size_t size, text_error* error) {
    work* w = (work*)user;
    return decode(w, json, size, TEXT_REPLACE, error) &&
           text_json_quote(w->bytes.data, w->bytes.count, &w->out, error) &&
           text_bytes_add(&w->out, "\n", 1, error);
}

static bool run(const options* o, text_error* error) {
    work w;
    text_bytes input;
    memset(&w, 0, sizeof(w));
    memset(&input, 0, sizeof(input));
    w.flags = o->special ? (unsigned)TEXT_SPECIAL : 0u;
    bool from_file = o->json != NULL && strcmp(o->json, "-") != 0;
    bool good = text_tok_open(o->tokenizer, &w.tok, error) &&
                (from_file ? text_file_read(o->json, &input, error) : stdin_read(&input, error)) &&
                text_bytes_add(&input, "", 1, error);
    if (good) {
        input.count--; // do not count the terminating zero byte
        const char* name = o->json != NULL ? o->json : "standard input";
        if (o->json == NULL) {
            good = o->decode ? decode_lines(&w, &input, error)
                             : encode_and_print(&w, input.data, input.count, error);
        } else if (o->decode) {
            good = text_json_elements(name, input.data, input.count, decode_array, &w, error);
        } else {
            good = text_json_strings(name, input.data, input.count, encode_and_print, &w, error);
        }
    }
    if (good && w.out.count > 0 &&
        (fwrite(w.out.data, 1, w.out.count, stdout) != w.out.count || fflush(stdout) != 0)) {
        good = fail(error, "cannot write to standard output: ", strerror(errno));
    }
    text_tok_close(w.tok);
    text_ids_free(&w.ids);
    text_bytes_free(&w.bytes);
    text_bytes_free(&w.out);
    text_bytes_free(&input);
    return good;
}

int main(int argc, char** argv) {
    options o;
    text_error error;
    memset(&o, 0, sizeof(o));
    error.text[0] = 0;
    if (!options_read(argc, argv, &o, &error)) {
        fprintf(stderr, "tokenize: %s (see tokenize --help)\n", error.text);
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
    if (!run(&o, &error)) {
        fprintf(stderr, "tokenize: %s\n", error.text);
        return 1;
    }
    return 0;
}
