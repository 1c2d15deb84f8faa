// qlora_text.h with parts left out: what is left works, and what is not there says so. Prints the
// errors. Status 0: all that is left works.
//
//     text_left_out TOKENIZER
#define QLORA_TEXT_IMPLEMENTATION
#include "qlora_text.h"

#include <stdio.h>

static int failures;

static void expect(bool ok, const char* what) {
    if (!ok) {
        printf("failed: %s\n", what);
        failures++;
    }
}

// Every call that gets here fails, with all parts as well: the files are damaged or not there.
static void refused(const char* what, const qlora_text* text, qlora_result r) {
    expect(r != QLORA_OK, what);
    printf("%s: %s: %s\n", what, r == QLORA_ERR_UNSUPPORTED ? "unsupported" : "error",
           qlora_text_last_error(text));
}

// Text to ids and back, and a pattern.
static void tokens(qlora_text* text, qlora_text_tok* tok) {
    qlora_text_ids ids;
    qlora_text_bytes bytes;
    qlora_text_pattern* pattern = NULL;
    qlora_text_match match;
    memset(&ids, 0, sizeof ids);
    memset(&bytes, 0, sizeof bytes);
    memset(&match, 0, sizeof match);
    expect(qlora_text_encode(tok, "Hello you", 9, 0, &ids) == QLORA_OK, "encode");
    expect(qlora_text_decode(tok, ids.data, ids.count, 0, &bytes) == QLORA_OK, "decode");
    expect(bytes.count == 9 && memcmp(bytes.data, "Hello you", 9) == 0, "the text comes back");
    expect(qlora_text_pattern_compile(text, "l+", 2, &pattern) == QLORA_OK &&
               qlora_text_pattern_find(pattern, "Hello", 5, 0, &match) == QLORA_OK &&
               match.whole.begin == 2 && match.whole.end == 4,
           "a pattern");
    qlora_text_pattern_close(pattern);
    qlora_text_bytes_free(text, &bytes);
    qlora_text_ids_free(text, &ids);
}

static void gguf(qlora_text* text) {
    qlora_text_tok* tok = NULL;
    qlora_result r = qlora_text_tok_load(text, "x.gguf", "GGUF\3\0\0\0", 8, &tok);
    refused("gguf", text, r);
}

#if !defined(QLORA_TEXT_NO_DATA) && !defined(QLORA_TEXT_NO_TEMPLATES)
static void data(qlora_text* text, qlora_text_chat* chat) {
    static const char lines[] = "{\"text\": \"one\"}\n{\"text\": \"two\"}\n";
    qlora_text_data* file = NULL;
    qlora_text_data_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.path = "x.jsonl";
    desc.chat = chat;
    expect(qlora_text_data_load(text, &desc, lines, sizeof lines - 1, &file) == QLORA_OK &&
               qlora_text_data_count(file) == 2,
           "data in JSON");
    qlora_text_data_close(file);
    desc.path = "x.parquet";
    qlora_result r = qlora_text_data_load(text, &desc, "PAR1", 4, &file);
    refused("parquet", text, r);
}
#endif // no data, or nothing to make it with

#ifndef QLORA_TEXT_NO_TEMPLATES
static void chats(qlora_text* text, qlora_text_tok* tok) {
    qlora_text_chat* chat = NULL;
    qlora_text_ids ids;
    qlora_text_chat_desc desc;
    memset(&ids, 0, sizeof ids);
    memset(&desc, 0, sizeof desc);
    desc.tok = tok;
    desc.name = "chatml";
    expect(qlora_text_chat_open(text, &desc, &chat) == QLORA_OK, "a chat");
    qlora_text_message message;
    memset(&message, 0, sizeof message);
    message.role = "user";
    message.content = "Hello";
    message.length = 5;
    expect(qlora_text_chat_encode(chat, &message, 1, true, &ids, NULL) == QLORA_OK && ids.count > 0,
           "a conversation");
    qlora_text_ids_free(text, &ids);
#ifndef QLORA_TEXT_NO_DATA
    data(text, chat);
#endif // QLORA_TEXT_NO_DATA
    expect(qlora_text_chat_close(chat) == QLORA_OK, "closing the chat");
    desc.name = NULL;
    desc.folder = "x.gguf"; // there is no such file
    qlora_result r = qlora_text_chat_open(text, &desc, &chat);
    refused("folder", text, r);
}
#endif // QLORA_TEXT_NO_TEMPLATES

int main(int argc, char** argv) {
    qlora_text* text = NULL;
    qlora_text_tok* tok = NULL;
    if (qlora_text_create(NULL, &text) != QLORA_OK ||
        qlora_text_tok_open(text, argc > 1 ? argv[1] : "", &tok) != QLORA_OK) {
        printf("no tokenizer: %s\n", qlora_text_last_error(text));
        return 1;
    }
    tokens(text, tok);
    gguf(text);
#ifndef QLORA_TEXT_NO_TEMPLATES
    chats(text, tok);
#endif // QLORA_TEXT_NO_TEMPLATES
    expect(qlora_text_tok_close(tok) == QLORA_OK && qlora_text_destroy(text) == QLORA_OK,
           "closing everything");
    return failures == 0 ? 0 : 1;
}
