// card.h - README.md of an adapter folder, as users of PEFT expect it: the base, how to load the
// adapter, and how it was trained.
#ifndef FINETUNE_CARD_H
#define FINETUNE_CARD_H

// A card with this line is replaced; anybody else's is kept.
#define CARD_MARK "<!-- Written by finetune of qlora.h. Without this line, the file is kept. -->\n"

// The name of the base: --base-name; of a folder in the hub's cache, .../models--OWNER--NAME/...,
// the name there; otherwise the path.
static const char* base_named(const app* a, char room[PATH_SIZE]) {
    static const char mark[] = "models--";
    const char* dir = a->model_desc.dir;
    const char* at = dir;
    if (a->o.model.base_name != NULL) {
        return a->o.model.base_name;
    }
    for (const char* next = strstr(dir, mark); next != NULL; next = strstr(next + 1, mark)) {
        at = next + sizeof mark - 1;
    }
    size_t length = strcspn(at, FOLDER_SEPARATORS);
    const char* dashes = strstr(at, "--");
    if (at == dir || dashes == NULL || dashes == at || dashes + 2 >= at + length ||
        strstr(at, "snapshots") == NULL) {
        return dir;
    }
    snprintf(room, PATH_SIZE, "%.*s/%.*s", (int)(dashes - at), at,
             (int)(length - (size_t)(dashes + 2 - at)), dashes + 2);
    return room;
}

// Whether a line of the settings has a path.
static bool card_path(const app* a, const char* line) {
    const option* row = option_find(&a->set, line, strcspn(line, " :\n"));
    return row != NULL &&
           (strncmp(row->words, "FILE", 4) == 0 || strncmp(row->words, "DIR", 3) == 0);
}

// The settings without paths, which mean nothing elsewhere and may be private.
static bool card_settings(const app* a, blob* out) {
    blob all;
    memset(&all, 0, sizeof all);
    bool ok = settings_write(&a->set, SETTINGS_ALL, &all) && blob_add(&all, "", 1);
    for (char* line = all.data; ok && *line != '\0';) {
        size_t size = strcspn(line, "\n") + 1;
        ok = card_path(a, line) || blob_add(out, line, size);
        line += size;
    }
    blob_free(&all);
    return ok;
}

static bool card_text(app* a, blob* out) {
    char room[PATH_SIZE];
    const char* base = base_named(a, room);
    bool hub = hub_name(base) != NULL && !path_exists(base); // not a folder of folders
    bool gguf = ends_in(base, ".gguf");
    put(out, "---\n");
    if (hub) { // the hub refuses other names
        put(out, "base_model: %s\n", base);
    }
    put(out, "library_name: peft\npipeline_tag: text-generation\ntags:\n- lora\n---\n" CARD_MARK);
    put(out, "\n# Adapter\n\nA LoRA adapter for %.300s%s, trained with qlora.h %s.\n\n",
        gguf ? "the model in " : "", base, QLORA_VERSION_STRING);
    put(out, "```python\nfrom peft import PeftModel\nfrom transformers import "
             "AutoModelForCausalLM\n\n");
    put(out, "base = AutoModelForCausalLM.from_pretrained(\"%.300s\")\n", gguf ? "BASE" : base);
    if (a->plan.config.vocab > a->plan.base_vocab) {
        put(out, "base.resize_token_embeddings(%lld)\n", (long long)a->plan.config.vocab);
    }
    put(out, "model = PeftModel.from_pretrained(base, \"THIS FOLDER\")\n```\n\n");
    if (gguf) {
        put(out, "BASE is the model that the GGUF file was made from.\n\n");
    }
    if (a->o.model.rope_scale != NULL) {
        put(out,
            "It was trained with the rotation scaled (%s): the config of the base needs the "
            "same scaling.\n\n",
            a->o.model.rope_scale);
    }
    put(out, "## Training\n\nStep %lld of %lld", (long long)a->progress.step,
        (long long)a->progress.total_steps);
    if (known(a->progress.last_loss)) {
        put(out, ", loss %.4f", a->progress.last_loss);
    }
    if (known(a->progress.last_eval)) {
        put(out, ", held-out loss %.4f", a->progress.last_eval);
    }
    put(out, ". Options of finetune:\n\n```text\n");
    return card_settings(a, out) && blob_add(out, "```\n", 4);
}

// Writes README.md into an adapter folder.
static bool card_write(app* a, const char* dir) {
    char path[PATH_SIZE + 80];
    char temporary[PATH_SIZE + 96];
    blob text;
    blob old;
    memset(&text, 0, sizeof text);
    memset(&old, 0, sizeof old);
    snprintf(path, sizeof path, "%s/README.md", dir);
    snprintf(temporary, sizeof temporary, "%s.tmp", path);
    bool ours = !path_exists(path);
    if (!ours && blob_read_path(&old, path) == 0 && blob_add(&old, "", 1)) {
        ours = strstr(old.data, CARD_MARK) != NULL;
    }
    blob_free(&old);
    bool ok = !ours || card_text(a, &text) || error_set(a->error, "out of memory");
    if (ok && ours) {
        int code = file_create(&a->files, temporary, text.data, text.count);
        code = code == 0 ? a->files.rename(temporary, path, a->files.user) : code;
        if (code != 0) {
            (void)(a->files.remove)(temporary, a->files.user);
            ok = error_set(a->error, "cannot write %s: %s", path, strerror(code));
        }
    }
    blob_free(&text);
    return ok;
}

#endif
