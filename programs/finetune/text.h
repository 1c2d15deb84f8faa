// text.h - the object that tokenizers, chats and data files are made from.
#ifndef FINETUNE_TEXT_H
#define FINETUNE_TEXT_H

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
