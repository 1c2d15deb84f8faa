// The format of a chat, kept with an adapter: where transformers and qlora_text_chat_open look for
// it.

// Writes the template, and that for tools, as files of their own.
static qlora_result qlora__text_shown_write(qlora__env* env, const qlora_text_chat* chat,
                                            const char* to) {
    char path[QLORA__PATH_ROOM];
    const qlora__text_owned* tools = &chat->shown[1];
    if (tools->data != NULL) {
        QLORA__TRY(qlora__path_join(env, to, QLORA__TEXT_TOOLS_FOLDER, path));
        QLORA__TRY(qlora__dir_make(env, path));
        QLORA__TRY(qlora__path_join(env, to, QLORA__TEXT_TOOLS_FILE, path));
        QLORA__TRY(qlora__file_write(env, path, tools->data, tools->size));
    }
    QLORA__TRY(qlora__path_join(env, to, "chat_template.jinja", path));
    return qlora__file_write(env, path, chat->shown[0].data, chat->shown[0].size);
}

static qlora_result qlora__text_chat_save(qlora__env* env, const qlora_text_chat* chat,
                                          qlora__text_carry* c) {
    char path[QLORA__PATH_ROOM];
    qlora__text_found found;
    bool exists = false;
    qlora_result r = qlora__text_found_read(env, c->folder, &found);
    bool same = r == QLORA_OK && qlora__text_owned_same(&found.text, &chat->shown[0]) &&
                qlora__text_owned_same(&found.tools, &chat->shown[1]);
    qlora__text_found_free(env, &found);
    QLORA__TRY(r);
    if (!qlora__gguf_path(c->folder)) {
        QLORA__TRY(qlora__path_join(env, c->folder, "tokenizer.json", path));
        QLORA__TRY(qlora__file_exists(env, path, &exists));
    }
    QLORA__TRY(qlora__dir_make(env, c->to));
    // A guess that nothing was rendered with says nothing about the training.
    if ((chat->guessed && !chat->used) || (same && exists)) {
        return exists ? qlora__text_tok_save(env, c) : QLORA_OK;
    }
    QLORA__TRY(qlora__text_shown_write(env, chat, c->to));
    c->template_ = chat->shown[0].data;
    c->template_size = chat->shown[0].size;
    return exists ? qlora__text_tok_save(env, c) : QLORA_OK;
}

qlora_result qlora_text_chat_save(qlora_text_chat* chat, const char* folder,
                                  const qlora_text_new_token* tokens, size_t count,
                                  const char* to) {
    if (chat == NULL) {
        return QLORA_ERR_ARGUMENT;
    }
    qlora__env* env = &chat->text->env;
    qlora__text_enter(chat->text, "qlora_text_chat_save");
    QLORA__TEXT_NEED(env, folder);
    QLORA__TEXT_NEED(env, to);
    if (tokens == NULL && count > 0) {
        return qlora__env_fail(env, QLORA_ERR_ARGUMENT, "tokens is NULL");
    }
    qlora__text_carry c = qlora__text_carry_of(folder, tokens, count, to);
    return qlora__text_chat_save(env, chat, &c);
}
