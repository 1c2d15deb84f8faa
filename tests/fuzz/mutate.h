// mutate.h - valid files changed in one place, with knowledge of their structure. Include it after
// the implementation of qlora.h or qlora_text.h.
//
// The bytes of the fuzzer are a list of choices, so that its own mutations stay meaningful.
#ifndef QLORA_FUZZ_MUTATE_H
#define QLORA_FUZZ_MUTATE_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct choices {
    const uint8_t* data;
    size_t left;
    uint64_t state; // of the numbers that follow when the bytes are used up
} choices;

static choices choices_of(const uint8_t* data, size_t size) {
    choices c = {data, size, 0xcbf29ce484222325u};
    for (size_t i = 0; i < size; i++) {
        c.state = (c.state ^ data[i]) * 0x100000001b3u;
    }
    return c;
}

// A number below `count`.
static size_t choose(choices* c, size_t count) {
    size_t value = 0;
    if (c->left == 0) {
        c->state = c->state * 6364136223846793005u + 1442695040888963407u;
        value = (size_t)(c->state >> 33);
    }
    for (int i = 0; i < 2 && c->left > 0; i++) {
        value = value << 8 | *c->data++;
        c->left--;
    }
    return count > 0 ? value % count : 0;
}

typedef struct buffer {
    unsigned char* data;
    size_t size;
} buffer;

static buffer buffer_make(const void* data, size_t size) {
    buffer b;
    b.data = (unsigned char*)malloc(size + 1);
    if (b.data == NULL) {
        abort();
    }
    if (size > 0) {
        memcpy(b.data, data, size);
    }
    b.data[size] = 0;
    b.size = size;
    return b;
}

// Replaces the bytes from `begin` to `end`.
static void buffer_splice(buffer* b, size_t begin, size_t end, const void* with, size_t size) {
    unsigned char* data = (unsigned char*)malloc(b->size - (end - begin) + size + 1);
    if (data == NULL) {
        abort();
    }
    memcpy(data, b->data, begin);
    if (size > 0) {
        memcpy(data + begin, with, size);
    }
    memcpy(data + begin + size, b->data + end, b->size - end);
    b->size = b->size - (end - begin) + size;
    data[b->size] = 0;
    free(b->data);
    b->data = data;
}

static QLORA__UNUSED bool buffer_file(const char* path, buffer* out) {
    FILE* file = fopen(path, "rb");
    if (file == NULL) {
        return false;
    }
    fseek(file, 0, SEEK_END);
    long size = ftell(file);
    rewind(file);
    out->data = (unsigned char*)malloc((size_t)size + 1);
    bool ok = out->data != NULL && fread(out->data, 1, (size_t)size, file) == (size_t)size;
    out->size = (size_t)size;
    fclose(file);
    return ok;
}

// Any file: one byte, a piece missing, a piece twice, the end missing, bytes added.
static void mutate_bytes(choices* c, buffer* b) {
    size_t at = choose(c, b->size + 1);
    size_t length = 1 + choose(c, 64);
    length = length < b->size - at ? length : b->size - at;
    unsigned char piece[64];
    memcpy(piece, b->data + at, length);
    switch (choose(c, 7)) {
    case 0:
    case 5:
    case 6:
        if (at < b->size) {
            b->data[at] = (unsigned char)choose(c, 256);
        }
        break;
    case 1:
        buffer_splice(b, at, at + length, NULL, 0);
        break;
    case 2:
        buffer_splice(b, at, at, piece, length);
        break;
    case 3:
        buffer_splice(b, at, b->size, NULL, 0);
        break;
    default:
        buffer_splice(b, b->size, b->size, piece, length);
    }
}

static const char* const mutate_values[] = {"null",
                                            "true",
                                            "false",
                                            "0",
                                            "-1",
                                            "1",
                                            "2",
                                            "7",
                                            "0.5",
                                            "-0.0",
                                            "1e308",
                                            "1e-320",
                                            "1e999",
                                            "2147483647",
                                            "2147483648",
                                            "-2147483649",
                                            "4294967296",
                                            "9223372036854775807",
                                            "18446744073709551616",
                                            "\"\"",
                                            "\"x\"",
                                            "\"\\u0000\"",
                                            "\"\\ud800\"",
                                            "\"none\"",
                                            "\"all\"",
                                            "\"default\"",
                                            "\"float16\"",
                                            "\"F64\"",
                                            "\"U8\"",
                                            "\"F16\"",
                                            "\"BF16\"",
                                            "\"I16\"",
                                            "\"I32\"",
                                            "\"gelu\"",
                                            "\"linear\"",
                                            "[]",
                                            "[0]",
                                            "[1,2,3]",
                                            "[[[[]]]]",
                                            "{}",
                                            "{\"a\":1}",
                                            "{\"type\":\"x\"}",
                                            "[\"(a+)+$\"]",
                                            "\"(a+)+$\""};

// The bytes of a token; of a string with its quotes.
static void token_range(const qlora__json_token* t, size_t* begin, size_t* end) {
    size_t quote = t->kind == QLORA__JSON_STRING ? 1 : 0;
    *begin = t->begin - quote;
    *end = t->end + quote;
}

// The index of the value that token `k` is the key of, or 0.
static uint32_t token_value_of(const qlora__json* json, uint32_t k) {
    uint32_t inside = 0; // the innermost container seen so far
    while (inside < k) {
        bool object = json->tokens[inside].kind == QLORA__JSON_OBJECT;
        uint32_t at = inside + 1;
        while (json->tokens[object ? at + 1 : at].next <= k) {
            at = json->tokens[object ? at + 1 : at].next;
        }
        if (at == k) {
            return object ? k + 1 : 0;
        }
        inside = object ? at + 1 : at;
    }
    return 0;
}

// Removes bytes and one comma next to them.
static void splice_out(buffer* b, size_t begin, size_t end) {
    size_t after = end + strspn((const char*)b->data + end, " \t\r\n");
    if (after < b->size && b->data[after] == ',') {
        end = after + 1;
    } else {
        size_t before = begin;
        while (before > 0 && strchr(" \t\r\n", b->data[before - 1]) != NULL) {
            before--;
        }
        begin = before > 0 && b->data[before - 1] == ',' ? before - 1 : begin;
    }
    buffer_splice(b, begin, end, NULL, 0);
}

// A number becomes twice or half as large, or a little larger or smaller; true becomes false.
static void mutate_number(choices* c, buffer* b, const qlora__json_token* t) {
    char text[64];
    size_t length = t->end - t->begin;
    snprintf(text, sizeof text, "%.*s", (int)(length < 63 ? length : 63),
             (const char*)b->data + t->begin);
    double x = strtod(text, NULL);
    const double others[] = {2.0 * x, x / 2.0, x + 1.0, x - 1.0, 1.25 * x, -x};
    if (t->kind == QLORA__JSON_TRUE || t->kind == QLORA__JSON_FALSE) {
        snprintf(text, sizeof text, "%s", t->kind == QLORA__JSON_TRUE ? "false" : "true");
    } else if (t->kind == QLORA__JSON_NUMBER || t->kind == QLORA__JSON_STRING) {
        snprintf(text, sizeof text, "%.9g", others[choose(c, 6)]);
    } else {
        return;
    }
    buffer_splice(b, t->begin, t->end, text, strlen(text));
}

// One of the numbers and of the values true and false; 0 if there is none.
static uint32_t token_number(choices* c, const qlora__json* json) {
    uint32_t count = 0;
    uint32_t found = 0;
    for (int pass = 0; pass < 2; pass++) {
        size_t wanted = pass == 1 ? choose(c, count) : SIZE_MAX;
        for (uint32_t k = 1; k < json->count && found == 0; k++) {
            qlora__json_kind kind = json->tokens[k].kind;
            if (kind != QLORA__JSON_NUMBER && kind != QLORA__JSON_TRUE &&
                kind != QLORA__JSON_FALSE) {
                continue;
            }
            count += pass == 0 ? 1u : 0u;
            found = pass == 1 && wanted-- == 0 ? k : 0;
        }
    }
    return found;
}

// Two neighbours in a list change places, as in a transposed shape.
static void mutate_order(choices* c, buffer* b, const qlora__json* json) {
    uint32_t lists = 0;
    for (uint32_t k = 0; k < json->count; k++) {
        bool list = json->tokens[k].kind == QLORA__JSON_ARRAY && json->tokens[k].count > 1;
        lists += list ? 1 : 0;
    }
    size_t wanted = choose(c, lists);
    for (uint32_t k = 0; k < json->count && lists > 0; k++) {
        const qlora__json_token* t = &json->tokens[k];
        if (t->kind != QLORA__JSON_ARRAY || t->count < 2 || wanted-- > 0) {
            continue;
        }
        uint32_t x = k + 1;
        for (size_t skip = choose(c, t->count - 1); skip > 0; skip--) {
            x = json->tokens[x].next;
        }
        size_t range[4];
        token_range(&json->tokens[x], &range[0], &range[1]);
        token_range(&json->tokens[json->tokens[x].next], &range[2], &range[3]);
        buffer first = buffer_make(b->data + range[0], range[1] - range[0]);
        buffer second = buffer_make(b->data + range[2], range[3] - range[2]);
        buffer_splice(b, range[2], range[3], first.data, first.size);
        buffer_splice(b, range[0], range[1], second.data, second.size);
        free(first.data);
        free(second.data);
        return;
    }
}

// JSON: a value replaced by another kind of value or by another one of the file; a member or an
// element removed, repeated or added; a letter of a name changed.
static void mutate_json(qlora__env* env, choices* c, buffer* b) {
    qlora__json json;
    memset(&json, 0, sizeof json);
    if (qlora__json_parse(env, "valid", b->data, b->size, 0, &json) != QLORA_OK || json.count < 2) {
        mutate_bytes(c, b);
        return;
    }
    uint32_t k = 1 + (uint32_t)choose(c, json.count - 1);
    uint32_t value = token_value_of(&json, k);
    const char* word = mutate_values[choose(c, sizeof mutate_values / sizeof mutate_values[0])];
    size_t begin = 0;
    size_t end = 0;
    size_t from = 0;
    size_t to = 0;
    char text[4096];
    token_range(&json.tokens[k], &begin, &end);
    token_range(&json.tokens[value != 0 ? value : k], &from, &to);
    size_t whole = to - begin < 2000 ? to - begin : 2000;
    switch (choose(c, 10)) {
    case 0:
        buffer_splice(b, from, to, word, strlen(word));
        break;
    case 6: // another number of about the same size
        mutate_number(c, b, &json.tokens[value != 0 ? value : k]);
        break;
    case 8:
    case 9: // the same, never in a place without a number
        k = token_number(c, &json);
        if (k != 0) {
            mutate_number(c, b, &json.tokens[k]);
        }
        break;
    case 7:
        mutate_order(c, b, &json);
        break;
    case 1: {
        size_t other_begin = 0;
        size_t other_end = 0;
        token_range(&json.tokens[choose(c, json.count)], &other_begin, &other_end);
        buffer other = buffer_make(b->data + other_begin, other_end - other_begin);
        buffer_splice(b, from, to, other.data, other.size);
        free(other.data);
        break;
    }
    case 2:
        splice_out(b, begin, to);
        break;
    case 3: // twice
        snprintf(text, sizeof text, ",%.*s", (int)whole, (const char*)b->data + begin);
        buffer_splice(b, to, to, text, strlen(text));
        break;
    case 4: // one more
        snprintf(text, sizeof text, value != 0 ? ",\"more\":%s" : ",%s", word);
        buffer_splice(b, to, to, text, strlen(text));
        break;
    default:
        if (end - begin > 2) {
            b->data[begin + 1 + choose(c, end - begin - 2)] = (unsigned char)choose(c, 128);
        }
    }
    qlora__json_free(env, &json);
}

// JSON: a member is added to one of the objects.
static void mutate_member(qlora__env* env, choices* c, buffer* b, const char* member) {
    qlora__json json;
    size_t objects = 0;
    memset(&json, 0, sizeof json);
    if (qlora__json_parse(env, "valid", b->data, b->size, 0, &json) != QLORA_OK) {
        return;
    }
    for (uint32_t k = 0; k < json.count; k++) {
        objects += json.tokens[k].kind == QLORA__JSON_OBJECT ? 1 : 0;
    }
    size_t wanted = choose(c, objects);
    for (uint32_t k = 0; k < json.count && objects > 0; k++) {
        if (json.tokens[k].kind == QLORA__JSON_OBJECT && wanted-- == 0) {
            char text[256];
            int size =
                snprintf(text, sizeof text, "%s%s", member, json.tokens[k].count > 0 ? "," : "");
            size_t at = json.tokens[k].begin + 1;
            buffer_splice(b, at, at, text, (size_t)size);
            break;
        }
    }
    qlora__json_free(env, &json);
}

// JSON lines: one of the lines gets the member, or is changed like any JSON if there is none.
static void mutate_line(qlora__env* env, choices* c, buffer* b, const char* member) {
    size_t lines = 0;
    for (size_t i = 0; i < b->size; i++) {
        lines += b->data[i] == '\n' ? 1 : 0;
    }
    size_t wanted = choose(c, lines);
    size_t begin = 0;
    for (size_t i = 0; wanted > 0; i++) {
        if (b->data[i] == '\n') {
            wanted--;
            begin = i + 1;
        }
    }
    size_t end = begin;
    while (end < b->size && b->data[end] != '\n') {
        end++;
    }
    buffer line = buffer_make(b->data + begin, end - begin);
    if (member != NULL) {
        mutate_member(env, c, &line, member);
    } else {
        mutate_json(env, c, &line);
    }
    buffer_splice(b, begin, end, line.data, line.size);
    free(line.data);
}

// Another type for one of the tensors of a header, often one of the same size.
static void mutate_dtype(choices* c, buffer* b) {
    static const char* const names[] = {"F32", "F16", "BF16", "I16", "U16", "I32", "U32", "F64"};
    static const char* const halves[] = {"F16", "BF16", "I16", "U16"};
    static const char key[] = "\"dtype\":\"";
    size_t wanted = choose(c, 24);
    const char* name = names[choose(c, sizeof names / sizeof names[0])];
    const char* at = strstr((const char*)b->data, key);
    for (; at != NULL && wanted > 0; wanted--) {
        const char* next = strstr(at + 1, key);
        at = next != NULL ? next : at;
    }
    if (at != NULL) {
        size_t begin = (size_t)(at - (const char*)b->data) + sizeof key - 1;
        if (strstr(at + sizeof key - 1, "16\"") == strpbrk(at + sizeof key - 1, "123468")) {
            name = halves[choose(c, sizeof halves / sizeof halves[0])];
        }
        buffer_splice(b, begin, begin + strcspn(at + sizeof key - 1, "\""), name, strlen(name));
    }
}

// safetensors: the header, its length, or the data.
static void mutate_safetensors(qlora__env* env, choices* c, buffer* b) {
    uint64_t length = 0;
    for (int i = 7; i >= 0 && b->size >= 8; i--) {
        length = length << 8 | b->data[i];
    }
    size_t kind = choose(c, 10);
    if (b->size < 8 || length > b->size - 8 || kind == 0 || kind > 7) {
        mutate_bytes(c, b);
        return;
    }
    if (kind > 1) {
        buffer header = buffer_make(b->data + 8, (size_t)length);
        if (kind == 2) {
            mutate_dtype(c, &header);
        } else {
            mutate_json(env, c, &header);
        }
        buffer_splice(b, 8, 8 + (size_t)length, header.data, header.size);
        length = header.size;
        free(header.data);
    } else {
        length = length + choose(c, 17) - 8;
    }
    for (int i = 0; i < 8; i++) {
        b->data[i] = (unsigned char)(length >> (8 * i));
    }
}

static void mutate_file(qlora__env* env, choices* c, const char* name, buffer* b) {
    size_t length = strlen(name);
    if (choose(c, 10) == 9) {
        mutate_bytes(c, b);
    } else if (length > 12 && strcmp(name + length - 12, ".safetensors") == 0) {
        mutate_safetensors(env, c, b);
    } else if (length > 5 && strcmp(name + length - 5, ".json") == 0) {
        mutate_json(env, c, b);
    } else if (length > 6 && strcmp(name + length - 6, ".jsonl") == 0) {
        mutate_line(env, c, b, NULL);
    } else {
        mutate_bytes(c, b);
    }
}

#endif
