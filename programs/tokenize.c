// tokenize: text to token ids and back, with a model's own tokenizer.
//
//   cc -std=c99 -O2 -I. -o tokenize programs/tokenize.c
//   echo "Hello world" | ./tokenize model/tokenizer.json
//   echo "[9906, 1917]" | ./tokenize model/tokenizer.json --decode
#define QLORA_TEXT_IMPLEMENTATION
#include "qlora_text.h"

#define PROGRAM "tokenize"
#include "json_array.h"
#include "tool.h"

#include <errno.h>
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

typedef struct options {
    const char* tokenizer;
    const char* json;
    const char* chat;
    const char* template_name;
    const char* chat_template;
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

#define AT(field) offsetof(options, field)
// clang-format off
static const option option_table[] = {
    {"", OPT_ARGUMENT, AT(tokenizer), false, 0, 0, "TOKENIZER",
        "tokenizer.json, a tokenizer.bin from llama2.c, or a folder with one of them"},
    {"json", OPT_TEXT, AT(json), false, 0, 0, "FILE",
        "read a JSON array of strings from FILE (- for standard input) instead, and print one "
        "array per line"},
    {"special", OPT_FLAG, AT(special), false, 0, 0, "",
        "add special tokens such as BOS, as specified by the tokenizer's post-processor"},
    {"decode", OPT_FLAG, AT(decode), false, 0, 0, "",
        "decode instead: read JSON arrays of ids from standard input, one per line, and print the "
        "exact text, with a newline between two texts but none after the last. With --json FILE, "
        "read an array of arrays of ids and print one JSON string per line, with U+FFFD for "
        "invalid UTF-8"},
    {"chat", OPT_TEXT, AT(chat), false, 0, 0, "FILE",
        "render a conversation: FILE is a JSON object with \"messages\", optionally \"tools\", and "
        "any other variable of the template"},
    {"chat-template", OPT_TEXT, AT(chat_template), false, 0, 0, "FILE",
        "the Jinja template for --chat (default: the one next to TOKENIZER)"},
    {"template", OPT_TEXT, AT(template_name), false, 0, 0, "NAME",
        "a built-in format instead of a template: chatml, llama3, mistral, gemma, phi3, zephyr, "
        "alpaca or plain"},
    {"generation-prompt", OPT_FLAG, AT(generation_prompt), false, 0, 0, "",
        "end the rendering where the assistant's answer begins"},
    {"text", OPT_FLAG, AT(text), false, 0, 0, "",
        "print the rendering and nothing else; TOKENIZER is not needed"},
    {"bos", OPT_TEXT, AT(bos), false, 0, 0, "TEXT",
        "bos_token, as the template sees it; likewise --eos, --pad and --unk"},
    {"eos", OPT_TEXT, AT(eos), false, 0, 0, "TEXT", "eos_token"},
    {"pad", OPT_TEXT, AT(pad), false, 0, 0, "TEXT", "pad_token"},
    {"unk", OPT_TEXT, AT(unk), false, 0, 0, "TEXT", "unk_token"},
    {"now", OPT_TEXT, AT(now), false, 0, 0, "TIME",
        "the clock of the template, such as 2026-07-26T12:00:00 (default: now)"},
    {"help", OPT_FLAG, AT(help), false, 0, 0, "", "show this help"},
    {"version", OPT_FLAG, AT(version), false, 0, 0, "", "print the version"},
};
// clang-format on

typedef struct work {
    qlora_text* text;
    qlora_text_tok* tok;
    uint32_t flags;
    qlora_text_ids ids;
    qlora_text_bytes bytes;
    const char* chat; // the file of --chat
    blob string;
    blob out;     // printed at the end, so that an error never leaves partial output,
    bool partial; // except a text and its ids that cannot be trained
    char error[1024];
} work;

// The innermost fault; callers add where it is and print it.
PRINTF(2, 3)
static bool wrong(work* w, const char* format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(w->error, sizeof(w->error), format, args);
    va_end(args);
    return false;
}

static void log_warn(void* user, qlora_log_level level, qlora_log_item item, const char* text,
                     const char* file, int line) {
    (void)user;
    (void)item;
    (void)file;
    (void)line;
    if (level <= QLORA_LOG_WARN) {
        fprintf(stderr, "[%s]\n", text);
    }
}

// The library does not know the file of the conversation.
static bool text_ok(work* w, qlora_result r) {
    static const char unnamed[] = "the conversation";
    if (r == QLORA_OK) {
        return true;
    }
    const char* text = message_text(qlora_text_last_error(w->text));
    bool named = w->chat != NULL && strncmp(text, unnamed, sizeof unnamed - 1) == 0;
    return wrong(w, "%s%s", named ? w->chat : "", named ? text + sizeof unnamed - 1 : text);
}

static bool out_add(work* w, const void* data, size_t size) {
    return blob_add(&w->out, data, size) || wrong(w, "out of memory");
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
            return wrong(w, "element %lu: %s", (unsigned long)i, r->wrong);
        }
        if (!text_ok(w, qlora_text_token_query(w->tok, id, &info)) ||
            !text_ok(w, qlora_text_ids_add(w->text, &w->ids, id))) {
            return false;
        }
    }
    if (r->wrong != NULL) {
        return wrong(w, "%s", r->wrong);
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
        if (!decode(w, &r, 0) || (!json_end(&r) && !wrong(w, "%s", r.wrong))) {
            char why[sizeof(w->error)];
            snprintf(why, sizeof(why), "%s", w->error);
            return wrong(w, "line %lu: %.900s", (unsigned long)line, why);
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
               (json_quote(w->bytes.data, w->bytes.count, &w->out) || wrong(w, "out of memory")) &&
               out_add(w, "\n", 1);
    }
    w->string.count = 0;
    return (json_string(r, &w->string) || wrong(w, "%s", r->wrong)) &&
           encode(w, w->string.data, w->string.count);
}

static bool elements(work* w, const char* name, const blob* input, bool decoding) {
    json_reader r = json_start(input->data, input->count);
    bool more = false;
    for (size_t i = 0; json_next(&r, i, &more) && more; i++) {
        if (!element(w, &r, decoding)) {
            char why[sizeof(w->error)];
            snprintf(why, sizeof(why), "%s", w->error);
            return wrong(w, "%.400s: element %lu: %.500s", name, (unsigned long)i, why);
        }
    }
    if (r.wrong != NULL || !json_end(&r)) {
        size_t line = 1;
        for (const char* p = input->data; p < r.at; p++) {
            line += *p == '\n' ? 1 : 0;
        }
        return wrong(w, "%.400s:%lu: %s", name, (unsigned long)line, r.wrong);
    }
    return true;
}

static bool input_read(work* w, const options* o, const char* name, blob* input) {
    bool from_file = o->json != NULL && strcmp(o->json, "-") != 0;
    int code = from_file ? blob_read_path(input, o->json) : blob_read(input, stdin);
    return code == 0 || wrong(w, "cannot read %s: %s", name, strerror(code));
}

// Options that need --chat, and the other way round.
static bool options_check(const options* o) {
    bool formed = o->chat_template != NULL || o->template_name != NULL;
    bool only_chat = formed || o->bos != NULL || o->eos != NULL || o->pad != NULL ||
                     o->unk != NULL || o->now != NULL || o->generation_prompt || o->text;
    char why[HUB_ADVICE];
    const char* hub = o->tokenizer != NULL ? hub_advice(o->tokenizer, "tokenize", why) : "";
    if (hub[0] != '\0') {
        return fail("%s: no such file or folder%s", o->tokenizer, hub);
    }
    if (o->chat == NULL) {
        return only_chat ? fail("the options of a chat need --chat FILE; see --help")
                         : o->tokenizer != NULL || fail("TOKENIZER is required; see --help");
    }
    if (o->json != NULL || o->decode || o->special) {
        return fail("--chat cannot be used with --json, --decode or --special");
    }
    if (o->chat_template != NULL && o->template_name != NULL) {
        return fail("--chat-template and --template cannot be used together");
    }
    return o->tokenizer != NULL || formed ||
           fail("--chat needs TOKENIZER, --chat-template FILE or --template NAME");
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
            return wrong(w, "this machine has no clock; use --now TIME");
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
            return wrong(w, "--now is %.60s; it must be a time such as 2026-07-26T12:00:00",
                         o->now);
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
    return code == 0 || wrong(w, "cannot read %s: %s", path, strerror(code));
}

// The template of --chat-template or --template.
static bool template_read(const options* o, work* w, blob* source) {
    if (o->template_name == NULL) {
        return file_read(w, o->chat_template, source);
    }
    const char* text = qlora_text_chat_template(o->template_name);
    if (text == NULL) {
        return wrong(w, "unknown chat format \"%.60s\"; see --help", o->template_name);
    }
    return blob_add(source, text, strlen(text)) || wrong(w, "out of memory");
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
    const char* name = o->template_name != NULL ? o->template_name : o->chat_template;
    bool good = clock_read(o, w, &desc.clock) && template_read(o, w, &source) &&
                text_ok(w, qlora_text_template_compile(w->text, name, source.data, source.count,
                                                       &compiled)) &&
                text_ok(w, qlora_text_template_render(compiled, &desc, &w->bytes, NULL)) &&
                out_add(w, w->bytes.data, w->bytes.count);
    qlora_text_template_close(compiled);
    blob_free(&source);
    return good;
}

static bool out_ids(work* w, const qlora_text_ids* ids, const qlora_text_ids* labels) {
    for (size_t i = 0; i < ids->count; i++) {
        char number[24];
        int value = labels == NULL ? (int)ids->data[i] : labels->data[i] != -100 ? 1 : 0;
        int size = snprintf(number, sizeof(number), "%s%d", i > 0 ? ", " : "[", value);
        if (!out_add(w, number, (size_t)size)) {
            return false;
        }
    }
    return out_add(w, ids->count > 0 ? "]\n" : "[]\n", ids->count > 0 ? 2 : 3);
}

static bool chat_encode(const options* o, work* w, const blob* conversation, qlora_text_chat* chat,
                        qlora_text_ids* labels) {
    return text_ok(w,
                   qlora_text_chat_encode_json(chat, conversation->data, conversation->count,
                                               o->generation_prompt, &w->bytes, &w->ids, labels));
}

// One encoding gives the text, its ids and what is trained, so that they are of the same tokens.
static bool chat_show(const options* o, work* w, const blob* conversation, qlora_text_chat* chat,
                      qlora_text_ids* labels) {
    char why[sizeof(w->error)];
    if (o->text) {
        return chat_encode(o, w, conversation, chat, NULL) &&
               out_add(w, w->bytes.data, w->bytes.count);
    }
    bool masked = !o->generation_prompt && chat_encode(o, w, conversation, chat, labels);
    memcpy(why, w->error, sizeof(why));
    // a template may say nothing about training
    bool good = (masked || chat_encode(o, w, conversation, chat, NULL)) &&
                (json_quote(w->bytes.data, w->bytes.count, &w->out) || wrong(w, "out of memory")) &&
                out_add(w, "\n", 1) && out_ids(w, &w->ids, NULL);
    if (!good || o->generation_prompt) {
        return good;
    }
    w->partial = !masked;
    return masked ? out_ids(w, &w->ids, labels) : wrong(w, "%s", why);
}

// With a tokenizer: the text as a JSON string, its ids, and 1 where it is trained.
static bool chat_ids(const options* o, work* w, const blob* conversation) {
    qlora_text_chat* chat = NULL;
    qlora_text_chat_desc desc;
    qlora_text_ids labels;
    char folder[1024];
    memset(&desc, 0, sizeof(desc));
    memset(&labels, 0, sizeof(labels));
    snprintf(folder, sizeof(folder), "%s", o->tokenizer);
    char* slash = strrchr(folder, '/');
    const char* ending = strrchr(folder, '.');
    bool file = ending != NULL && (strcmp(ending, ".json") == 0 || strcmp(ending, ".bin") == 0);
    if (file && slash != NULL) {
        *slash = '\0';
    }
    desc.tok = w->tok;
    desc.folder = file && slash == NULL ? "." : folder;
    desc.name = o->template_name;
    desc.template_file = o->chat_template;
    if (o->bos != NULL || o->eos != NULL || o->pad != NULL || o->unk != NULL) {
        return wrong(w, "--bos, --eos, --pad and --unk are for --text; with TOKENIZER, the special "
                        "tokens are the model's");
    }
    bool good = clock_read(o, w, &desc.clock) &&
                text_ok(w, qlora_text_chat_open(w->text, &desc, &chat)) &&
                chat_show(o, w, conversation, chat, &labels);
    qlora_text_ids_free(w->text, &labels);
    qlora_text_chat_close(chat);
    return good;
}

static bool chat_run(const options* o, work* w) {
    blob conversation;
    memset(&conversation, 0, sizeof(conversation));
    bool good = file_read(w, o->chat, &conversation) &&
                (o->tokenizer != NULL ? chat_ids(o, w, &conversation)
                 : o->text            ? chat_text(o, w, &conversation)
                                      : wrong(w, "without TOKENIZER, --chat needs --text"));
    blob_free(&conversation);
    return good;
}

static bool run(const options* o, work* w) {
    blob input;
    qlora_text_desc desc;
    memset(&input, 0, sizeof(input));
    memset(&desc, 0, sizeof(desc));
    desc.log = log_warn;
    w->chat = o->chat;
    w->flags = o->special ? (uint32_t)QLORA_TEXT_SPECIAL : 0u;
    const char* name = o->json != NULL ? o->json : "standard input";
    bool good =
        (qlora_text_create(&desc, &w->text) == QLORA_OK || wrong(w, "out of memory")) &&
        (o->tokenizer == NULL || text_ok(w, qlora_text_tok_open(w->text, o->tokenizer, &w->tok))) &&
        (o->chat != NULL || input_read(w, o, name, &input));
    if (good && o->chat != NULL) {
        good = chat_run(o, w);
    } else if (good && o->json != NULL) {
        good = elements(w, name, &input, o->decode);
    } else if (good) {
        good = o->decode ? decode_lines(w, &input) : encode(w, input.data, input.count);
    }
    if ((good || w->partial) && w->out.count > 0) {
        fwrite(w->out.data, 1, w->out.count, stdout);
        good = output_flush(w->error) && good;
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
    const option_set set = {option_table, sizeof option_table / sizeof option_table[0], &o};
    int status = 0;
    if (!tool_start(&set, argc, argv, &o.version, &status)) {
        return status;
    }
    if (o.help) {
        printf("usage: tokenize TOKENIZER [--special] [--json FILE] [--decode]\n"
               "       tokenize --chat FILE [TOKENIZER] [--chat-template FILE | --template NAME]\n"
               "                [--text] ...\n\n"
               "Reads text from standard input, exactly as it is, and prints its token ids as a\n"
               "JSON array.\n\n");
        options_print(&set, NULL, 17);
        printf("\nExit status: 0 on success, 1 on error (reported on standard error).\n");
        return tool_end(true);
    }
    if (!options_check(&o)) {
        return 1;
    }
    BINARY(stdin);
    BINARY(stdout);
    return run(&o, &w) ? 0 : (fail("%s", w.error), 1);
}
