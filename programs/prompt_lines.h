// prompt_lines.h - prompts in a file, one JSON object per line: {"prompt": TEXT} or a conversation.
#ifndef QLORA_PROMPT_LINES_H
#define QLORA_PROMPT_LINES_H

#include "json_array.h"
#include "messages.h"

typedef enum prompt_kind { PROMPT_WRONG, PROMPT_BLANK, PROMPT_TEXT, PROMPT_CHAT } prompt_kind;

// Reads a line. `text` gets that of {"prompt": TEXT}; every other object is a conversation.
static inline prompt_kind prompt_line_read(const char* line, size_t size, blob* text,
                                           char error[1024]) {
    blob name;
    memset(&name, 0, sizeof name);
    json_reader r = json_start(line, size);
    json_space(&r);
    if (json_end(&r)) {
        return PROMPT_BLANK;
    }
    r = json_start(line, size);
    bool plain = json_take(&r, '{');
    json_space(&r);
    plain = plain && json_string(&r, &name) && name.count == 6 &&
            memcmp(name.data, "prompt", 6) == 0 && json_take(&r, ':');
    bool ok = true;
    if (plain) {
        json_space(&r);
        ok = json_string(&r, text) || error_set(error, "\"prompt\": %s", r.wrong);
        ok = ok && ((json_take(&r, '}') && json_end(&r)) ||
                    error_set(error, "something follows \"prompt\""));
    }
    blob_free(&name);
    return !ok ? PROMPT_WRONG : plain ? PROMPT_TEXT : PROMPT_CHAT;
}

#endif
