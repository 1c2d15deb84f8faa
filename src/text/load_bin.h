// ---- the .bin form: int32 longest token; then per id float score, int32 length, bytes

typedef struct text__scored {
    float score;
    int32_t id;
} text__scored;

static int text__scored_compare(const void* a, const void* b) {
    float x = ((const text__scored*)a)->score;
    float y = ((const text__scored*)b)->score;
    return x > y ? -1 : x < y ? 1 : 0;
}

static uint32_t text__little32(const unsigned char* p) {
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

enum { TEXT__MAX_SCORED = 1024 };

// Names and words; `scored` gets the ids that merging can make. The first three ids are <unk>, <s>
// and </s>, whatever they are called.
static bool text__load_scored(text_tok* tok, const unsigned char* p, size_t size,
                              text__scored* scored, size_t* scored_count, text_error* error) {
    static const char* const control[] = {"<unk>", "<s>", "</s>"};
    size_t at = 4;
    for (int32_t id = 0; at < size; id++) {
        uint32_t length = size - at >= 8 ? text__little32(p + at + 4) : UINT32_MAX;
        if (size - at < 8 || length > TEXT__MAX_SCORED || length > size - at - 8) {
            return text__fail(error, "token %d: its length is wrong or the file is cut", (int)id);
        }
        uint32_t bits = text__little32(p + at);
        float score;
        memcpy(&score, &bits, sizeof(score));
        if (!(score > -1e30f && score < 1e30f)) {
            return text__fail(error, "token %d: its score is not a number", (int)id);
        }
        const char* name = (const char*)p + at + 8;
        if (id < 3) {
            TEXT__TRY(
                text__tok_name(tok, id, control[id], strlen(control[id]), TEXT__K_SPECIAL, error));
        } else {
            TEXT__TRY(text__tok_word(tok, name, length, id, error));
            if (length > 0 && !(tok->kinds[id] & TEXT__K_BYTE)) {
                scored[*scored_count].score = score;
                scored[*scored_count].id = id;
                (*scored_count)++;
            }
        }
        at += 8 + length;
    }
    return tok->count > 3 || text__fail(error, "it has no tokens");
}

// Every way to put a token together from two others is a merge; a better score is a lower rank.
static bool text__load_scored_merges(text_tok* tok, text__scored* scored, size_t count,
                                     text_error* error) {
    qsort(scored, count, sizeof(scored[0]), text__scored_compare);
    uint32_t rank = 0;
    for (size_t i = 0; i < count; i++) {
        rank += i > 0 && scored[i].score < scored[i - 1].score ? 1 : 0;
        text__span span = tok->spans[scored[i].id];
        for (uint32_t left = 1; left < span.size; left++) {
            const char* name = tok->names.data + span.at;
            int32_t a = text__words_find(&tok->words, name, left);
            int32_t b = a < 0 ? -1 : text__words_find(&tok->words, name + left, span.size - left);
            if (b >= 0) {
                TEXT__TRY(text__pairs_put(&tok->merges, (uint32_t)a, (uint32_t)b, rank,
                                          (uint32_t)scored[i].id, error));
            }
        }
    }
    return true;
}

static bool text__load_bin_steps(text_tok* tok, text_error* error) {
    text__step* step = text__steps_add(&tok->normalizer, TEXT__N_PREPEND, error);
    TEXT__TRY(step != NULL);
    TEXT__TRY(text__copy(" ", 1, &step->a, &step->a_size, error));
    TEXT__TRY(text__steps_add(&tok->decoder, TEXT__D_BYTE_FALLBACK, error) != NULL);
    TEXT__TRY(text__steps_add(&tok->decoder, TEXT__D_FUSE, error) != NULL);
    step = text__steps_add(&tok->decoder, TEXT__D_STRIP, error);
    TEXT__TRY(step != NULL);
    step->start = 1;
    TEXT__TRY(text__copy(" ", 1, &step->a, &step->a_size, error));
    return text_ids_add(&tok->prefix, 1, error);
}

static bool text__load_bin(text_tok* tok, const char* file, const char* data, size_t size,
                           text_error* error) {
    const unsigned char* p = (const unsigned char*)data;
    if (size < 4 || text__little32(p) == 0 || text__little32(p) > TEXT__MAX_SCORED) {
        return text__fail(error, "%s: neither a tokenizer.json nor a tokenizer.bin of llama2.c",
                          file);
    }
    tok->byte_fallback = true;
    tok->fuse_unknown = true;
    tok->unknown = 0;
    tok->cut[0] = ' ';
    tok->cut_size = 1;
    text__scored* scored = (text__scored*)text__zalloc(size / 8 + 1, sizeof(text__scored), error);
    TEXT__TRY(scored != NULL);
    size_t count = 0;
    text_error why;
    why.text[0] = 0;
    bool good = text__load_scored(tok, p, size, scored, &count, &why) &&
                text__load_scored_merges(tok, scored, count, &why) &&
                text__load_bin_steps(tok, &why);
    TEXT_FREE(scored);
    if (!good) {
        return text__fail(error, "%s: %s", file, why.text);
    }
    for (unsigned b = 0; b < 256; b++) {
        char byte = (char)(unsigned char)b;
        tok->byte_ids[b] = text__words_find(&tok->words, &byte, 1);
    }
    tok->cut_safe = text__cut_is_safe(tok);
    return true;
}

bool text_tok_load(const char* name, const void* data, size_t size, text_tok** out,
                   text_error* error) {
    const char* text = (const char*)data;
    text_tok* tok;
    *out = NULL;
    bool good = text__tok_new(&tok, error);
    if (good) {
        // the .bin starts with a small number, so its fourth byte is zero
        bool binary = size >= 4 && text[3] == 0;
        good = binary ? text__load_bin(tok, name, text, size, error)
                      : text__load_json(tok, name, text, size, error);
    }
    if (!good) {
        text_tok_close(tok);
        return false;
    }
    *out = tok;
    return true;
}

bool text_tok_open(const char* path, text_tok** out, text_error* error) {
    static const char* const names[] = {"tokenizer.json", "tokenizer.bin", "tok512.bin"};
    text_bytes file;
    memset(&file, 0, sizeof(file));
    bool found = false;
    bool good = true;
    *out = NULL;
    for (size_t i = 0; good && !found && i < TEXT__COUNT(names); i++) {
        good = text__folder_read(path, names[i], &file, &found, error);
    }
    if (good && !found && !text_file_read(path, &file, error)) {
        // a folder can be opened on some systems, but not read
        bool folder = file.capacity > 0 && file.count == 0;
        good = folder ? text__fail(error,
                                   "%s: cannot be read; as a folder it has no tokenizer.json, "
                                   "tokenizer.bin or tok512.bin",
                                   path)
                      : false;
    }
    good = good && text_tok_load(path, file.data, file.count, out, error);
    text_bytes_free(&file);
    return good;
}

int32_t text_tok_count(const text_tok* tok) {
    return (int32_t)tok->count;
}

static bool text__tok_has(const text_tok* tok, int32_t id, unsigned kind) {
    return id >= 0 && (size_t)id < tok->count && (tok->kinds[id] & kind);
}

bool text_tok_is_special(const text_tok* tok, int32_t id) {
    return text__tok_has(tok, id, TEXT__K_SPECIAL);
}

bool text_tok_is_added(const text_tok* tok, int32_t id) {
    return text__tok_has(tok, id, TEXT__K_ADDED);
}

int32_t text_tok_bos(const text_tok* tok) {
    return tok->prefix.count > 0 ? tok->prefix.data[0] : -1;
}

const char* text_tok_name(const text_tok* tok, int32_t id, size_t* length) {
    if (!text__tok_has(tok, id, TEXT__K_EXISTS)) {
        *length = 0;
        return NULL;
    }
    *length = tok->spans[id].size;
    return tok->names.data + tok->spans[id].at;
}

static bool text__name_is(const text_tok* tok, int32_t id, const char* name, size_t size) {
    return text__tok_has(tok, id, TEXT__K_EXISTS) && tok->spans[id].size == size &&
           memcmp(tok->names.data + tok->spans[id].at, name, size) == 0;
}

int32_t text_tok_find(const text_tok* tok, const char* token) {
    size_t size = strlen(token);
    for (size_t i = 0; i < tok->added_count; i++) {
        text__span name = tok->added[i].name;
        if (name.size == size && memcmp(tok->names.data + name.at, token, size) == 0) {
            return tok->added[i].id;
        }
    }
    for (int32_t id = 0; id < 3; id++) { // the control tokens of a .bin
        if (text__tok_has(tok, id, TEXT__K_SPECIAL) && text__name_is(tok, id, token, size)) {
            return id;
        }
    }
    return size == 0 ? -1 : text__model_find(tok, token, size);
}
