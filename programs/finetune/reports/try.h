// try.h - the line that uses what was trained: generate, with the options that this run needs.
#ifndef FINETUNE_TRY_H
#define FINETUNE_TRY_H

#define TRY_PROMPT 100 // bytes of a prompt that fit into the line

// Adds a word of a command line, in quotes if the shell would change it.
static void put_word(blob* out, const char* text, size_t size) {
    static const char plain[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
                                "_./:@%+,-" FOLDER_SEPARATORS;
    bool bare = size > 0;
    bool weak = true; // double quotes suffice
    for (size_t i = 0; i < size; i++) {
        bare = bare && text[i] != '\0' && strchr(plain, text[i]) != NULL;
        weak = weak && strchr("\"$`\\!", text[i]) == NULL;
    }
#ifdef _WIN32
    weak = true; // the only quotes there
#endif
    put(out, bare ? "" : weak ? "\"" : "'");
    for (size_t i = 0; i < size; i++) {
        if (!weak && text[i] == '\'') {
            put(out, "'\\''");
        } else {
            blob_add(out, &text[i], 1);
        }
    }
    put(out, bare ? "" : weak ? "\"" : "'");
}

static void put_option(blob* out, const char* name, const char* value) {
    if (value != NULL) {
        put(out, " --%s ", name);
        put_word(out, value, strlen(value));
    }
}

// Adds an option of this run as it was given, if it was.
static void put_setting(const app* a, blob* out, const char* name) {
    char room[256];
    const option* row = option_find(&a->set, name, strlen(name));
    put_option(out, name, setting_text(&a->set, row, room));
}

// Adds the name of generate, which is where finetune is; in the sources, make builds it. False if
// it is not there.
static bool put_generate(const app* a, blob* out) {
    char path[PATH_SIZE];
    size_t folder = strlen(a->program);
    while (folder > 0 && strchr(FOLDER_SEPARATORS, a->program[folder - 1]) == NULL) {
        folder--;
    }
    snprintf(path, sizeof path, "%.*sgenerate", (int)folder, a->program);
    size_t length = strlen(path);
    bool there = folder == 0 || path_is_file(path); // without a folder: from PATH
    snprintf(path + length, sizeof path - length, ".exe");
    there = there || path_is_file(path);
    path[length] = '\0';
    if (!there && path_is_file("Makefile") && path_is_file("programs/generate.c")) {
        put(out, "make build/generate && build/generate");
        return true;
    }
    put_word(out, path, length);
    return there;
}

// Whether the data has conversations.
static bool data_talks(const app* a) {
    for (size_t i = 0; i < a->data.inputs.count; i++) {
        qlora_text_data_info info;
        if (a->data.inputs.data[i].data != NULL &&
            qlora_text_data_query(a->data.inputs.data[i].data, &info) == QLORA_OK && info.chat) {
            return true;
        }
    }
    return false;
}

// The start of a text such as those in the data: the prompt of the first sample.
static bool data_prompt(const app* a, qlora_text_bytes* text) {
    qlora_text_sample s;
    qlora_text_data* data = a->data.inputs.count > 0 ? a->data.inputs.data[0].data : NULL;
    if (data == NULL || qlora_text_sample_read(data, 0, &s) != QLORA_OK) {
        return false;
    }
    size_t length = s.count > 0 && s.labels[0] == -100 ? (size_t)prompt_length(&s) : 0;
    if (qlora_text_decode(a->tok, s.ids, length, QLORA_TEXT_SKIP, text) != QLORA_OK) {
        return false;
    }
    for (size_t i = 0; i < text->count; i++) {
        if (text->data[i] < ' ' || text->data[i] > '~') { // a char may have a sign, or not
            return false;
        }
    }
    return text->count > 0 && text->count <= TRY_PROMPT;
}

// Adds what to ask: --chat for a model that was trained on conversations, otherwise a prompt.
static void put_question(const app* a, blob* out) {
    const options* o = &a->o;
    qlora_text_bytes text;
    memset(&text, 0, sizeof text);
    if (data_talks(a)) {
        put(out, " --chat");
    } else if (o->sampling.prompt != NULL || o->sampling.prompts.count > 0) {
        put_option(out, "prompt",
                   o->sampling.prompt != NULL ? o->sampling.prompt : o->sampling.prompts.items[0]);
    } else if (data_prompt(a, &text)) {
        put(out, " --prompt ");
        put_word(out, text.data, text.count);
    } else {
        put(out, " --prompt \"Once upon a time\"");
    }
    qlora_text_bytes_free(a->text, &text);
}

static void try_print(app* a) {
    const options* o = &a->o;
    char adapter[PATH_SIZE];
    blob line;
    memset(&line, 0, sizeof line);
    bool there = put_generate(a, &line);
    put_option(&line, "model", o->demo ? a->demo_dir : o->model.path);
    out_path(a, "adapter", adapter);
    put_option(&line, "adapter", adapter);
    if (o->model.base != QLORA_BASE_NF4) {
        put_setting(a, &line, "base");
    }
    put_setting(a, &line, "rope-scale");
    put_setting(a, &line, "quantised-dir");
    put(&line,
        o->model.keep_quantised && o->model.quantised_dir == NULL ? " --keep-quantised" : "");
    put_question(a, &line);
    if (line.data != NULL && blob_add(&line, "", 1)) {
        say(a, "Try it%s:  %s\n", there ? "" : ", once generate is built", line.data);
    }
    blob_free(&line);
}

#endif
