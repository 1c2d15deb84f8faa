// messages.h - what the programs print in the same way: library errors, limits, rows of --help.
#ifndef MESSAGES_H
#define MESSAGES_H

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "utf8_files.h"

#ifndef _WIN32
#include <unistd.h>
#endif

#if defined(__MINGW32__)
#define PRINTF(a, b) __attribute__((format(gnu_printf, a, b)))
#elif defined(__GNUC__)
#define PRINTF(a, b) __attribute__((format(printf, a, b)))
#else
#define PRINTF(a, b)
#endif

// Writes an error message; returns false, so that a function can end with it.
PRINTF(2, 3)
static inline bool error_set(char error[1024], const char* format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(error, 1024, format, args);
    va_end(args);
    return false;
}

// Whether everything that was printed so far has been written.
static inline bool output_flush(char error[1024]) {
    errno = 0;
    bool before = ferror(stdout) == 0;
    if (fflush(stdout) == 0 && before) {
        return true;
    }
    if (errno == 0) { // an earlier write failed and its reason is lost: another one tells it
        clearerr(stdout);
        fputc('\n', stdout);
        fflush(stdout);
    }
    return error_set(error, "cannot write to standard output: %s",
                     strerror(errno != 0 ? errno : EIO));
}

// Whether standard output is a terminal that understands escape sequences.
static inline bool terminal_live(void) {
    const char* kind = getenv("TERM");
#ifdef _WIN32
    return _isatty(1) != 0 && (kind == NULL || strcmp(kind, "dumb") != 0);
#else
    return isatty(STDOUT_FILENO) != 0 && kind != NULL && kind[0] != '\0' &&
           strcmp(kind, "dumb") != 0;
#endif
}

// A library error without the API calls that it starts with ("qlora_model_open: ..."): the user of
// a program knows its options, not the functions that it calls.
static inline const char* message_text(const char* text) {
    while (strncmp(text, "qlora_", 6) == 0) {
        size_t name = strspn(text, "abcdefghijklmnopqrstuvwxyz0123456789_");
        if (strncmp(text + name, ": ", 2) != 0) {
            break;
        }
        text += name + 2;
    }
    return text;
}

// Replaces the library's words for what a user of a program sets by the names of the options, which
// are shorter. Returns false, as errors do.
static inline bool message_options(char* text) {
    static const struct {
        const char* field;
        const char* option;
    } words[] = {{"desc.targets", "--targets"},
                 {"desc.rope_scale", "--rope-scale"},
                 {"desc.expert_layout", "--expert-layout"},
                 {"leave desc.verify out", "leave --verify out"},
                 {"desc.new_tokens", "--add-tokens"},
                 {"desc.save_modules", "--save-modules"},
                 {"desc.offload is ON", "--offload is on"},
                 {"desc.offload", "--offload"},
                 {"desc.recompute is OFF", "--recompute is off"},
                 {"desc.tile", "--tile"},
                 {"desc.head is NF4", "--head is nf4"},
                 {"it must be FULL", "use full"},
                 {"desc.recompute", "--recompute"},
                 {"desc.require_backend", "--backend"},
                 {"desc.mode is BF16", "--mode is bf16"},
                 {"desc.mode is FP8", "--mode is fp8"},
                 {"use AUTO or OFF", "use auto or off"},
                 {"use F32 or AUTO", "use f32 or auto"},
                 {"use BF16 or AUTO", "use bf16 or auto"},
                 {"desc.columns", "--columns"},
                 {"desc.system", "--system"},
                 {"desc.preference PAIRS", "--method dpo"},
                 {"desc.prompts ASK_CHAT", "--chat"},
                 {"set the format", "use --format"}};
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++) {
        char* at = strstr(text, words[i].field);
        if (at != NULL) {
            size_t length = strlen(words[i].option);
            const char* rest = at + strlen(words[i].field);
            memcpy(at, words[i].option, length);
            memmove(at + length, rest, strlen(rest) + 1);
        }
    }
    return false;
}

// Whether there is nothing of this name, neither a file nor a folder.
static inline bool path_missing(const char* path) {
    FILE* file = fopen(path, "rb");
    if (file != NULL) {
        fclose(file);
        return false;
    }
    return errno == ENOENT || errno == ENOTDIR;
}

// Whether dir has no file of this name. Other faults are left to the library, which reports them.
static inline bool file_missing(const char* dir, const char* name) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    return path_missing(path);
}

// Whether a path is a GGUF file. A model may be one; an adapter must be a folder.
static inline bool file_is_gguf(const char* path) {
    char magic[4];
    FILE* file = fopen(path, "rb");
    if (file == NULL) {
        return false;
    }
    bool is = fread(magic, 1, sizeof magic, file) == sizeof magic &&
              memcmp(magic, "GGUF", sizeof magic) == 0;
    fclose(file);
    return is;
}

// The name within owner/name, as the Hugging Face hub calls what it has; NULL for other paths.
static inline const char* hub_name(const char* path) {
    static const char letters[] =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-";
    size_t owner = strspn(path, letters);
    const char* name = path + owner + 1;
    bool hub = owner > 0 && path[0] != '.' && path[owner] == '/' && name[0] != '\0' &&
               name[0] != '.' && name[strspn(name, letters)] == '\0';
    return hub ? name : NULL;
}

#define HUB_ADVICE 640

// How to get what a path on the hub stands for, which is added to the message that it is not here;
// "" if the path does not look like one. `option` is the one that it was given to. Only a model is
// looked for there if the first folder of the path exists: other things of one's own are often in
// folders of folders.
static inline const char* hub_advice(const char* path, const char* option, char out[HUB_ADVICE]) {
    char owner[160];
    const char* name = hub_name(path);
    bool model = strcmp(option, "--model") == 0;
    bool data = strcmp(option, "--data") == 0 || strcmp(option, "--eval-data") == 0;
    if (name == NULL || strlen(path) >= sizeof owner || !path_missing(path) ||
        strstr(name, ".json") != NULL) {
        return "";
    }
    snprintf(owner, sizeof owner, "%.*s", (int)(name - path - 1), path);
    if (!model && !path_missing(owner)) {
        return "";
    }
    bool gguf = model && (strstr(name, "GGUF") != NULL || strstr(name, "gguf") != NULL);
    snprintf(out, HUB_ADVICE,
             "; to download it from Hugging Face: hf download %s%s%s --local-dir %s, then %s %s%s",
             data ? "--repo-type dataset " : "", path, gguf ? " FILE.gguf" : "", name, option, name,
             data   ? "/FILE"
             : gguf ? "/FILE.gguf"
                    : "");
    return out;
}

// What is wrong with a path given as --model, or NULL: a folder has a config.json, and the name of
// a GGUF file ends in .gguf.
static inline const char* model_fault(const char* path, char out[HUB_ADVICE]) {
    char advice[HUB_ADVICE];
    size_t length = strlen(path);
    bool named = length >= 5 && strcmp(path + length - 5, ".gguf") == 0;
    if (!named && file_is_gguf(path)) {
        return "this is a GGUF file; its name must end in .gguf";
    }
    if (named) {
        FILE* file = fopen(path, "rb");
        bool missing = file == NULL && errno == ENOENT;
        if (file != NULL) {
            fclose(file);
        }
        return missing ? "no such file" : NULL;
    }
    if (!file_missing(path, "config.json")) {
        return NULL;
    }
    if (errno == ENOTDIR) {
        return "this is a file; give its folder";
    }
    snprintf(out, HUB_ADVICE, "config.json not found%.600s", hub_advice(path, "--model", advice));
    return out;
}

// A limit of an option as people write it: 1000000 rather than 1e+06, and 1M for a size in bytes.
static inline const char* limit_text(double value, bool size, char out[32]) {
    static const char units[] = " KMGT";
    int unit = 0;
    while (size && unit < 4 && value >= 1024.0) {
        value /= 1024.0;
        unit++;
    }
    if (value == floor(value)) {
        snprintf(out, 32, "%.0f%.*s", value, unit > 0 ? 1 : 0, &units[unit]);
    } else {
        snprintf(out, 32, "%g%.*s", value, unit > 0 ? 1 : 0, &units[unit]);
    }
    return out;
}

// The length of the first word. A short "(default X)" counts as one word, with what follows it.
static inline int help_word(const char* text) {
    size_t end = strcspn(text, ")");
    bool whole = strncmp(text, "(default", 8) == 0 && text[end] != '\0' && end < 24;
    return (int)(whole ? end + strcspn(text + end, " ") : strcspn(text, " "));
}

// One option of --help: the option, then its description from column `indent` on, wrapped at 80
// columns. The description of a long option starts on the next line.
static inline void help_row(const char* option, int indent, const char* text) {
    int column = printf("  %-*s", indent - 2, option);
    if (option[0] != '\0' && (int)strlen(option) + 2 >= indent) {
        printf("\n%*s", indent, "");
        column = indent;
    }
    while (*text != '\0') {
        int length = help_word(text);
        if (column > indent && column + 1 + length > 80) {
            printf("\n%*s", indent, "");
            column = indent;
        }
        column += printf("%s%.*s", column > indent ? " " : "", length, text);
        text += length;
        text += *text == ' ' ? 1 : 0;
    }
    printf("\n");
}

#endif
