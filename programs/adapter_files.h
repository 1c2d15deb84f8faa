// adapter_files.h - what an adapter's folder has besides the adapter: rows, a chat template.
#ifndef ADAPTER_FILES_H
#define ADAPTER_FILES_H

#include "folders.h"
#include "json_array.h"

// Whether an adapter may have rows of the embedding of its own, so that its tokenizer may have more
// tokens than the model. The library finds out; this only says what to expect.
static inline bool adapter_has_rows(const char* adapter) {
    static const char* const names[] = {"\"embed_tokens", ".embed_tokens\"",
                                        "\"trainable_token_indices\": [",
                                        "\"trainable_token_indices\":["};
    char path[FOLDER_PATH];
    blob text;
    bool has = false;
    memset(&text, 0, sizeof text);
    snprintf(path, sizeof path, "%s/adapter_config.json", adapter);
    bool read = blob_read_path(&text, path) == 0 && blob_add(&text, "", 1);
    for (size_t i = 0; read && i < sizeof names / sizeof names[0]; i++) {
        has = has || strstr(text.data, names[i]) != NULL;
    }
    blob_free(&text);
    return has;
}

// Whether an object in JSON has a member that is not null. What cannot be read has none.
static inline bool json_has_member(const char* path, const char* name) {
    blob text;
    blob key;
    bool has = false;
    memset(&text, 0, sizeof text);
    memset(&key, 0, sizeof key);
    bool ok = blob_read_path(&text, path) == 0 && text.data != NULL;
    json_reader r = json_start(ok ? text.data : "", ok ? text.count : 0);
    ok = ok && json_take(&r, '{');
    while (ok && !has) {
        key.count = 0;
        json_space(&r);
        ok = json_string(&r, &key) && json_take(&r, ':');
        json_space(&r);
        has = ok && key.count == strlen(name) && memcmp(key.data, name, key.count) == 0 &&
              !(r.end - r.at >= 4 && memcmp(r.at, "null", 4) == 0);
        ok = ok && json_skip(&r) && json_take(&r, ',');
    }
    blob_free(&text);
    blob_free(&key);
    return has;
}

// Whether a folder has a chat template, in whatever file.
static inline bool folder_has_template(const char* folder) {
    static const char* const names[] = {"chat_template.json", "tokenizer_config.json"};
    bool has = !file_missing(folder, "chat_template.jinja");
    for (size_t i = 0; i < 2 && !has; i++) {
        char path[FOLDER_PATH];
        snprintf(path, sizeof path, "%s/%s", folder, names[i]);
        has = json_has_member(path, "chat_template");
    }
    return has;
}

#endif
