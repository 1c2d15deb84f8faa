// json.c - libFuzzer target: any bytes through the JSON reader, its queries and the writer.

#include "formats_world.h"

// Writes a number or string token and reads it back: it must have the same value.
static void fuzz_json_again(world* w, const qlora__json* json, uint32_t token) {
    qlora__string text;
    qlora__json_writer writer;
    qlora__json back;
    double x = 0.0;
    double y = 0.0;
    qlora__string_begin(&w->env, &text);
    qlora__json_write_begin(&writer, &text, 0);
    if (qlora__json_kind_of(json, token) == QLORA__JSON_STRING) {
        size_t length = qlora__json_string(json, token, NULL, 0);
        char* decoded = malloc(length + 1);
        qlora__json_string(json, token, decoded, length + 1);
        if (strlen(decoded) == length) {
            qlora__json_write_string(&writer, NULL, decoded);
            if (qlora__json_parse(&w->env, "again", text.data, text.size, 0, &back) != QLORA_OK ||
                !qlora__json_equals(&back, 0, decoded, length)) {
                abort();
            }
            qlora__json_free(&w->env, &back);
        }
        free(decoded);
    } else if (qlora__json_double(json, token, &x)) {
        qlora__json_write_double(&writer, NULL, x);
        if (qlora__json_parse(&w->env, "again", text.data, text.size, 0, &back) != QLORA_OK ||
            !qlora__json_double(&back, 0, &y) || memcmp(&x, &y, sizeof x) != 0) {
            abort();
        }
        qlora__json_free(&w->env, &back);
    }
    qlora__string_free(&text);
}

static int fuzz_json(const uint8_t* data, size_t size) {
    static world w;
    world_begin(&w);
    qlora__json json;
    bool unique =
        qlora__json_parse(&w.env, "fuzz", data, size, QLORA__JSON_UNIQUE, &json) == QLORA_OK;
    if (unique) {
        qlora__json_free(&w.env, &json);
    }
    if (qlora__json_parse(&w.env, "fuzz", data, size, 0, &json) == QLORA_OK) {
        for (uint32_t i = 0; i < json.count; i++) {
            const qlora__json_token* t = &json.tokens[i];
            int64_t n = 0;
            if (t->next <= i || t->next > json.count || t->begin > t->end || t->end > json.size) {
                abort();
            }
            qlora__json_int(&json, i, &n);
            qlora__json_offset(&json, i, &n);
            qlora__json_find_path(&json, i, "a/b");
            qlora__json_at(&json, i, 2);
            if (i < 64) {
                fuzz_json_again(&w, &json, i);
            }
        }
        qlora__json_free(&w.env, &json);
    } else if (unique || w.env.error[0] == '\0') {
        abort(); // rejected without a message, or only without the flag
    }
    if (!world_end(&w)) {
        abort();
    }
    return 0;
}
