// text.h - characters, and the object that tokenizers, chats and data files are made from.
#ifndef FINETUNE_TEXT_H
#define FINETUNE_TEXT_H

// The length of the UTF-8 character at `at`, or 0 if it is none, or one that XML does not allow.
static size_t character_size(const unsigned char* at, size_t left) {
    static const unsigned least[5] = {0, 0, 0x80, 0x800, 0x10000};
    size_t size = at[0] < 0x80 ? 1 : at[0] < 0xc2 ? 0 : at[0] < 0xe0 ? 2 : at[0] < 0xf0 ? 3 : 4;
    if (size <= 1) {
        bool control = at[0] < 32 && at[0] != '\n' && at[0] != '\t';
        return size == 0 || control || at[0] == 127 ? 0 : 1;
    }
    unsigned code = at[0] & (0x7fu >> size);
    for (size_t i = 1; i < size; i++) {
        if (i >= left || (at[i] & 0xc0u) != 0x80u) {
            return 0;
        }
        code = code << 6 | (at[i] & 0x3fu);
    }
    bool wrong = code < least[size] || code > 0x10ffff || (code >= 0xd800 && code < 0xe000) ||
                 (code & 0xfffe) == 0xfffe;
    return wrong ? 0 : size;
}

static bool text_fail(app* a, const char* what) {
    error_set(a->error, "%s%s", what, message_text(qlora_text_last_error(a->text)));
    return message_options(a->error);
}

static bool text_open(app* a) {
    qlora_text_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.files = a->files;
    desc.error_text = a->error;
    desc.error_text_size = sizeof a->error;
    return a->text != NULL || qlora_text_create(&desc, &a->text) == QLORA_OK;
}

#endif
