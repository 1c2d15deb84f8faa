// prompt_lines.h - prompts in a file, one JSON object per line: {"prompt": TEXT} or a conversation.
#ifndef QLORA_PROMPT_LINES_H
#define QLORA_PROMPT_LINES_H

#include "json_array.h"
#include "messages.h"

typedef enum prompt_kind { PROMPT_WRONG, PROMPT_BLANK, PROMPT_TEXT, PROMPT_CHAT } prompt_kind;

// One field of a line; `text` gets that of "prompt".
static inline bool prompt_field_read(json_reader* r, blob* name, blob* text, prompt_kind* kind) {
    name->count = 0;
    json_space(r);
    if (!json_string(r, name)) {
        return false;
    }
    if (!json_take(r, ':')) {
        return json_wrong(r, "':' was expected");
    }
    json_space(r);
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
    bool ok = json_take(&r, '{') || json_wrong(&r, "an object was expected");
    while (ok && more) {
        ok = prompt_field_read(&r, &name, text, &kind);
        name.count = ok ? 0 : name.count; // of the field that is wrong
        more = ok && json_take(&r, ',');
    }
    ok = ok && (json_take(&r, '}') || json_wrong(&r, "',' or '}' was expected"));
    ok = ok && (json_end(&r) || json_wrong(&r, "something follows the object"));
    if (!ok) {
        bool at_prompt = kind == PROMPT_TEXT && name.count == 6 && name.data[0] == 'p';
        error_set(error, "%s%s", at_prompt ? "\"prompt\": " : "", r.wrong);
    } else if (kind == PROMPT_WRONG) {
        error_set(error, "there is neither \"prompt\" nor \"messages\"");
    }
    blob_free(&name);
    return ok ? kind : PROMPT_WRONG;
}

#endif
