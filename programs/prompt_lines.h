// prompt_lines.h - prompts in a file, one JSON object per line: {"prompt": TEXT} or a conversation.
#ifndef QLORA_PROMPT_LINES_H
#define QLORA_PROMPT_LINES_H

#include "json_array.h"
#include "messages.h"

typedef enum prompt_kind { PROMPT_WRONG, PROMPT_BLANK, PROMPT_TEXT, PROMPT_CHAT } prompt_kind;

// JSON is UTF-8; anything else would be tokens that nobody means.
static inline bool prompt_is_utf8(const blob* text) {
    const unsigned char* s = (const unsigned char*)text->data;
    for (size_t i = 0, more = 0; i < text->count; i += 1 + more) {
        unsigned char c = s[i];
        more = c < 0x80 ? 0 : c < 0xE0 ? 1 : c < 0xF0 ? 2 : 3;
        if ((c >= 0x80 && c < 0xC2) || c > 0xF4 || text->count - i <= more) {
            return false;
        }
        for (size_t k = 1; k <= more; k++) {
            if (s[i + k] >> 6 != 2) {
                return false;
            }
        }
        // longer than needed, half a surrogate pair, or beyond the last character
        if ((c == 0xE0 && s[i + 1] < 0xA0) || (c == 0xED && s[i + 1] > 0x9F) ||
            (c == 0xF0 && s[i + 1] < 0x90) || (c == 0xF4 && s[i + 1] > 0x8F)) {
            return false;
        }
    }
    return true;
}

// One field of a line; `text` gets that of "prompt".
static inline bool prompt_field_read(json_reader* r, blob* name, blob* text, prompt_kind* kind) {
    name->count = 0;
    json_space(r);
    if (r->at < r->end && *r->at != '"') {
        return json_wrong(r, "a key in quotes was expected");
    }
    if (!json_string(r, name)) {
        return false;
    }
    if (!json_take(r, ':')) {
        return json_wrong(r, "':' was expected");
    }
    json_space(r);
    if (r->end - r->at >= 4 && memcmp(r->at, "null", 4) == 0) { // the same as no field
        return json_skip(r);
    }
    if (name->count == 8 && memcmp(name->data, "messages", 8) == 0) {
        *kind = PROMPT_CHAT;
    } else if (name->count == 6 && memcmp(name->data, "prompt", 6) == 0 && *kind != PROMPT_CHAT) {
        *kind = PROMPT_TEXT;
        text->count = 0;
        return json_string(r, text);
    }
    return json_skip(r);
}

// Reads a line: an object with "messages", which is a conversation, or else with "prompt", whose
// text is stored. Other fields are for other programs.
static inline prompt_kind prompt_line_read(const char* line, size_t size, blob* text,
                                           char error[1024]) {
    blob name;
    prompt_kind kind = PROMPT_WRONG;
    bool more = true;
    memset(&name, 0, sizeof name);
    json_reader r = json_start(line, size);
    json_space(&r);
    if (r.at == r.end) {
        return PROMPT_BLANK;
    }
    bool object = json_take(&r, '{');
    bool ok = object || json_wrong(&r, "an object was expected");
    while (ok && more) {
        ok = prompt_field_read(&r, &name, text, &kind);
        name.count = ok ? 0 : name.count; // of the field that is wrong
        more = ok && json_take(&r, ',');
    }
    ok = ok && (json_take(&r, '}') || json_wrong(&r, "',' or '}' was expected"));
    ok = ok && (json_end(&r) || json_wrong(&r, "something follows the object"));
    if (!ok) {
        bool at_prompt = kind == PROMPT_TEXT && name.count == 6 && name.data[0] == 'p';
        if (at_prompt || !object) {
            error_set(error, "%s%s", at_prompt ? "\"prompt\": " : "", r.wrong);
        } else {
            error_set(error, "invalid JSON at column %lld: %s", (long long)(r.at - line) + 1,
                      r.wrong);
        }
    } else if (kind == PROMPT_WRONG) {
        error_set(error, "there is neither \"prompt\" nor \"messages\"");
    } else if (kind == PROMPT_TEXT && !prompt_is_utf8(text)) {
        error_set(error, "\"prompt\" is not UTF-8");
        ok = false;
    }
    blob_free(&name);
    return ok ? kind : PROMPT_WRONG;
}

#endif
