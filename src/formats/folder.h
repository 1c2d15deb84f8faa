// ---- reading a Hugging Face model folder --------------------------------------------------------

// A tensor of the folder under its plain name: without the prefixes "model.", "language_model." and
// "base_model.", in any order, so that names are the same whatever wrapper wrote the file.
typedef struct qlora__folder_entry {
    const char* name;
    const qlora__st_tensor* tensor;
} qlora__folder_entry;

// The values of the tensor of a GGUF file that was asked for last.
typedef struct qlora__folder_cache {
    qlora__st_tensor tensor;
    uint8_t* data;
    size_t bytes;
} qlora__folder_cache;

// A tensor of a GGUF file under the name that a folder would give it.
typedef struct qlora__folder_made {
    qlora__st_tensor tensor;
    qlora__gguf_view view;
    int64_t shape[3];
    char name[96];
} qlora__folder_made;

// A model folder, or a GGUF file that looks like one.
typedef struct qlora__folder {
    qlora__gguf_model gguf;   // no files: a folder
    qlora__folder_made* made; // one per entry of a GGUF file
    qlora__folder_cache* cache;
    uint32_t made_room;
    qlora__st* shards;
    uint32_t shard_count;
    uint32_t shard_room;
    qlora__folder_entry* entries;
    uint32_t* by_name;
    uint32_t count;
    uint32_t room;
    char dir[QLORA__PATH_ROOM];
} qlora__folder;

#define QLORA__MAX_SHARDS 4096

static const char* qlora__plain_name(const char* name) {
    for (;;) {
        if (strncmp(name, "model.", 6) == 0) {
            name += 6;
        } else if (strncmp(name, "base_model.", 11) == 0) {
            name += 11;
        } else if (strncmp(name, "language_model.", 15) == 0) {
            name += 15;
        } else {
            return name;
        }
    }
}

static void qlora__folder_close(qlora__env* env, qlora__folder* f) {
    for (uint32_t i = 0; i < f->shard_count; i++) {
        qlora__st_close(env, &f->shards[i]);
    }
    if (f->cache != NULL) {
        qlora__env_free(env, f->cache->data, f->cache->bytes);
        qlora__env_free(env, f->cache, sizeof *f->cache);
    }
    qlora__env_free(env, f->made, f->made_room * sizeof *f->made);
    if (QLORA__GGUF) {
        qlora__gguf_model_close(env, &f->gguf);
    }
    qlora__env_free(env, f->shards, f->shard_room * sizeof *f->shards);
    qlora__env_free(env, f->entries, f->room * (sizeof *f->entries + sizeof *f->by_name));
    memset(f, 0, sizeof *f);
}

static bool qlora__folder_less(const void* user, uint32_t a, uint32_t b) {
    const qlora__folder_entry* e = (const qlora__folder_entry*)user;
    return strcmp(e[a].name, e[b].name) < 0;
}

static qlora_result qlora__folder_reserve(qlora__env* env, qlora__folder* f, uint32_t count) {
    size_t bytes = 0;
    if (!qlora__mul(count, sizeof *f->entries + sizeof *f->by_name, &bytes)) {
        return qlora__env_fail(env, QLORA_ERR_MEMORY, "%s: too many tensors", f->dir);
    }
    if (count == 0) {
        return QLORA_OK;
    }
    f->entries = (qlora__folder_entry*)qlora__env_alloc(env, bytes);
    if (f->entries == NULL) {
        return QLORA_ERR_MEMORY;
    }
    f->room = count;
    f->by_name = (uint32_t*)(void*)(f->entries + count);
    return QLORA_OK;
}

static void qlora__folder_add(qlora__folder* f, const qlora__st_tensor* tensor) {
    f->entries[f->count].name = qlora__plain_name(tensor->name);
    f->entries[f->count].tensor = tensor;
    f->by_name[f->count] = f->count;
    f->count++;
}

static qlora_result qlora__folder_sort(qlora__env* env, qlora__folder* f) {
    qlora__sort(f->by_name, f->count, qlora__folder_less, f->entries);
    for (uint32_t i = 1; i < f->count; i++) {
        const qlora__folder_entry* a = &f->entries[f->by_name[i - 1]];
        const qlora__folder_entry* b = &f->entries[f->by_name[i]];
        if (strcmp(a->name, b->name) == 0) {
            return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: %s and %s are the same tensor",
                                   f->dir, a->tensor->name, b->tensor->name);
        }
    }
    return QLORA_OK;
}

// The shard named by a value of weight_map; it is opened when it is first mentioned.
static qlora_result qlora__folder_shard(qlora__env* env, qlora__folder* f, const qlora__json* json,
                                        uint32_t value, uint32_t* shard) {
    char name[256];
    char path[QLORA__PATH_ROOM];
    size_t length = qlora__json_string(json, value, name, sizeof name);
    // Only plain names are allowed: an index must not lead out of its folder.
    if (length == 0 || length >= sizeof name || strlen(name) != length ||
        strpbrk(name, "/\\:") != NULL || name[0] == '.') {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "%s: weight_map: \"%s\" must be a plain file name without a path",
                               json->label, length < sizeof name ? name : "...");
    }
    QLORA__TRY(qlora__path_join(env, f->dir, name, path));
    // Consecutive tensors are usually in the same file, so the search starts with the last one.
    for (uint32_t i = f->shard_count; i > 0; i--) {
        if (strcmp(f->shards[i - 1].path, path) == 0) {
            *shard = i - 1;
            return QLORA_OK;
        }
    }
    bool exists = false;
    QLORA__TRY(qlora__file_exists(env, path, &exists));
    if (!exists) {
        return qlora__env_fail(env, QLORA_ERR_FILE,
                               "%s: this shard is listed in the index but does not exist", path);
    }
    if (f->shard_count == f->shard_room) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: weight_map names more than %u shards",
                               json->label, f->shard_room);
    }
    QLORA__TRY(qlora__st_open(env, path, &f->shards[f->shard_count]));
    *shard = f->shard_count;
    f->shard_count++;
    return QLORA_OK;
}

static bool qlora__json_value_less(const void* user, uint32_t a, uint32_t b) {
    const qlora__json* json = (const qlora__json*)user;
    return qlora__json_key_less(json, a + 1, b + 1);
}

// Counts the different files that a weight_map names: sorts the values and counts the changes.
static qlora_result qlora__folder_count_shards(qlora__env* env, const qlora__json* json,
                                               uint32_t map, uint32_t* count) {
    uint32_t n = json->tokens[map].count;
    uint32_t* keys = (uint32_t*)qlora__env_alloc(env, n * sizeof *keys);
    if (keys == NULL) {
        return QLORA_ERR_MEMORY;
    }
    uint32_t key = map + 1;
    for (uint32_t i = 0; i < n; i++) {
        keys[i] = key;
        key = json->tokens[key + 1].next;
    }
    qlora__sort(keys, n, qlora__json_value_less, json);
    *count = 1;
    for (uint32_t i = 1; i < n; i++) {
        *count += qlora__json_value_less(json, keys[i - 1], keys[i]) ? 1u : 0u;
    }
    qlora__env_free(env, keys, n * sizeof *keys);
    return QLORA_OK;
}

static qlora_result qlora__folder_read_index(qlora__env* env, qlora__folder* f,
                                             const qlora__json* json) {
    uint32_t map = qlora__json_find(json, 0, "weight_map");
    if (map == 0) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: weight_map is missing", json->label);
    }
    if (qlora__json_kind_of(json, map) != QLORA__JSON_OBJECT) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: weight_map must be an object",
                               json->label);
    }
    if (json->tokens[map].count == 0) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: weight_map is empty", json->label);
    }
    for (uint32_t k = map + 1; k < json->tokens[map].next; k = json->tokens[k + 1].next) {
        if (qlora__json_kind_of(json, k + 1) != QLORA__JSON_STRING) {
            return qlora__env_fail(env, QLORA_ERR_FORMAT,
                                   "%s: weight_map must map tensor names to file names",
                                   json->label);
        }
    }
    uint32_t room = 0;
    size_t bytes = 0;
    QLORA__TRY(qlora__folder_count_shards(env, json, map, &room));
    if (room > QLORA__MAX_SHARDS || !qlora__mul(room, sizeof *f->shards, &bytes)) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "%s: weight_map names %u shards; the limit is %d", json->label, room,
                               QLORA__MAX_SHARDS);
    }
    f->shards = (qlora__st*)qlora__env_alloc(env, bytes);
    if (f->shards == NULL) {
        return QLORA_ERR_MEMORY;
    }
    f->shard_room = room;
    QLORA__TRY(qlora__folder_reserve(env, f, json->tokens[map].count));
    for (uint32_t k = map + 1; k < json->tokens[map].next; k = json->tokens[k + 1].next) {
        char name[256];
        uint32_t shard = 0;
        QLORA__TRY(qlora__folder_shard(env, f, json, k + 1, &shard));
        size_t length = qlora__json_string(json, k, name, sizeof name);
        const qlora__st_tensor* t =
            length < sizeof name ? qlora__st_find(&f->shards[shard], name) : NULL;
        if (t == NULL) {
            return qlora__env_fail(
                env, QLORA_ERR_FORMAT,
                "%s: tensor %s is listed in the index but missing from this shard",
                f->shards[shard].path, name);
        }
        qlora__folder_add(f, t);
    }
    return qlora__folder_sort(env, f);
}

static qlora_result qlora__folder_open_index(qlora__env* env, qlora__folder* f, const char* path) {
    qlora__map map;
    qlora__json json;
    QLORA__TRY(qlora__map_open(env, path, &map));
    qlora_result result =
        qlora__json_parse(env, path, map.data, map.size, QLORA__JSON_UNIQUE, &json);
    if (result == QLORA_OK) {
        result = qlora__folder_read_index(env, f, &json);
        qlora__json_free(env, &json);
    }
    qlora__map_close(env, &map);
    return result;
}

static qlora_result qlora__folder_open_single(qlora__env* env, qlora__folder* f, const char* path) {
    f->shards = (qlora__st*)qlora__env_alloc(env, sizeof *f->shards);
    if (f->shards == NULL) {
        return QLORA_ERR_MEMORY;
    }
    f->shard_room = 1;
    QLORA__TRY(qlora__st_open(env, path, &f->shards[0]));
    f->shard_count = 1;
    QLORA__TRY(qlora__folder_reserve(env, f, f->shards[0].count));
    for (uint32_t i = 0; i < f->shards[0].count; i++) {
        qlora__folder_add(f, &f->shards[0].tensors[i]);
    }
    return qlora__folder_sort(env, f);
}

// Opens the weights of a model folder: model.safetensors, or the shards that its index names. All
// files stay mapped until qlora__folder_close. After a failure there is nothing to close.
static QLORA__UNUSED qlora_result qlora__folder_open_dir(qlora__env* env, const char* dir,
                                                         qlora__folder* f) {
    char path[QLORA__PATH_ROOM];
    memset(f, 0, sizeof *f);
    QLORA__TRY(qlora__path_join(env, "", dir, f->dir));
    QLORA__TRY(qlora__path_join(env, dir, "model.safetensors", path));
    bool exists = false;
    QLORA__TRY(qlora__file_exists(env, path, &exists));
    bool single = exists;
    if (!exists) {
        QLORA__TRY(qlora__path_join(env, dir, "model.safetensors.index.json", path));
        QLORA__TRY(qlora__file_exists(env, path, &exists));
    }
    if (!exists) {
        return qlora__env_fail(
            env, QLORA_ERR_FILE,
            "%s: found neither model.safetensors nor model.safetensors.index.json", dir);
    }
    qlora_result result =
        single ? qlora__folder_open_single(env, f, path) : qlora__folder_open_index(env, f, path);
    if (result != QLORA_OK) {
        qlora__folder_close(env, f);
    }
    return result;
}

// Returns NULL if the folder has no such tensor. The "model." prefix of the name is optional.
static const qlora__st_tensor* qlora__folder_find(const qlora__folder* f, const char* name) {
    const char* plain = qlora__plain_name(name);
    uint32_t low = 0;
    uint32_t high = f->count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        const qlora__folder_entry* e = &f->entries[f->by_name[middle]];
        int order = strcmp(e->name, plain);
        if (order == 0) {
            return e->tensor;
        }
        if (order < 0) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return NULL;
}

// Finds an F32, BF16 or F16 tensor of the shape [rows, cols], or [rows] if cols is -1. `hint` ends
// the message about another shape.
static qlora_result qlora__folder_need_hint(qlora__env* env, const qlora__folder* f,
                                            const char* name, int64_t rows, int64_t cols,
                                            const char* hint, const qlora__st_tensor** out) {
    char have[96];
    char want[96];
    int64_t shape[2];
    uint32_t rank = cols < 0 ? 1 : 2;
    shape[0] = rows;
    shape[1] = cols;
    const qlora__st_tensor* t = qlora__folder_find(f, name);
    if (t == NULL) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: tensor %s is missing", f->dir, name);
    }
    if (!qlora__st_is_float(t)) {
        return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                               "%s: %s has dtype %s; supported are F32, BF16 and F16", f->dir, name,
                               qlora__st_dtypes[t->dtype].name);
    }
    if (t->rank != rank || t->shape[0] != rows || (rank == 2 && t->shape[1] != cols)) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: %s has shape %s; it must be %s%s",
                               f->dir, name, qlora__shape_text(t->shape, t->rank, have),
                               qlora__shape_text(shape, rank, want), hint);
    }
    *out = t;
    return QLORA_OK;
}

static qlora_result qlora__folder_need(qlora__env* env, const qlora__folder* f, const char* name,
                                       int64_t rows, int64_t cols, const qlora__st_tensor** out) {
    return qlora__folder_need_hint(env, f, name, rows, cols, "", out);
}

// ---- writing a Hugging Face model folder --------------------------------------------------------

// Copies a file atomically, such as the files of the tokenizer.
static QLORA__UNUSED qlora_result qlora__file_copy(qlora__env* env, const char* from,
                                                   const char* to) {
    qlora__map map;
    QLORA__TRY(qlora__map_open(env, from, &map));
    qlora_result result = qlora__file_write(env, to, map.data, (size_t)map.size);
    qlora__map_close(env, &map);
    return result;
}

// Writes model.safetensors.index.json, which assigns each tensor to one of `shards`. The names keep
// the order of the caller; `bytes` is the total size of the tensors.
static QLORA__UNUSED qlora_result qlora__index_write(qlora__env* env, const char* dir,
                                                     const char* const* names,
                                                     const uint32_t* shard_of, uint32_t count,
                                                     const char* const* shards, uint64_t bytes) {
    char path[QLORA__PATH_ROOM];
    qlora__string text;
    qlora__json_writer w;
    QLORA__TRY(qlora__path_join(env, dir, "model.safetensors.index.json", path));
    qlora__string_begin(env, &text);
    qlora__json_write_begin(&w, &text, 2);
    qlora__json_write_open(&w, NULL, '{');
    qlora__json_write_open(&w, "metadata", '{');
    qlora__json_write_int(&w, "total_size", (int64_t)bytes);
    qlora__json_write_close(&w, '}');
    qlora__json_write_open(&w, "weight_map", '{');
    for (uint32_t i = 0; i < count; i++) {
        qlora__json_write_string(&w, names[i], shards[shard_of[i]]);
    }
    qlora__json_write_close(&w, '}');
    qlora__json_write_close(&w, '}');
    qlora_result result = text.result;
    if (result == QLORA_OK) {
        result = qlora__file_write(env, path, text.data, text.size);
    }
    qlora__string_free(&text);
    return result;
}

// Writes the rotation of a scaled config. Newer files have it in rope_parameters, with theta and
// what does not belong to a type; older ones in rope_scaling, beside rope_theta.
static void qlora__config_rewrite_rope(qlora__json_writer* w, const qlora__json* json,
                                       const qlora_model_config* scaled) {
    uint32_t old = qlora__json_find(json, 0, "rope_parameters");
    bool newer = old != 0 && qlora__json_kind_of(json, old) == QLORA__JSON_OBJECT;
    qlora__json_write_int(w, "max_position_embeddings", scaled->max_positions);
    qlora__json_write_open(w, newer ? "rope_parameters" : "rope_scaling", '{');
    qlora__scale_write(w, scaled);
    uint32_t partial = newer ? qlora__json_find(json, old, "partial_rotary_factor") : 0;
    double number = 0.0;
    if (newer) {
        qlora__json_write_double(w, "rope_theta", scaled->rope.theta);
    }
    if (partial != 0 && qlora__json_double(json, partial, &number)) {
        qlora__json_write_double(w, "partial_rotary_factor", number);
    }
    qlora__json_write_close(w, '}');
}

// Writes the members of a config with the type of its weights and, unless it is 0, the size of the
// vocabulary replaced and without quantization_config; everything else is copied unchanged.
// `scaled`: a config whose rotation was scaled on request, which the file must then have, or NULL.
static void qlora__config_rewrite(const qlora__json* json, const char* dtype, int64_t vocab,
                                  const qlora_model_config* scaled, qlora__string* text) {
    qlora__json_writer w;
    bool sized = vocab == 0;
    qlora__json_write_begin(&w, text, 2);
    qlora__json_write_open(&w, NULL, '{');
    for (uint32_t k = 1; k < json->count; k = json->tokens[k + 1].next) {
        if (scaled != NULL && (qlora__json_is(json, k, "rope_scaling") ||
                               qlora__json_is(json, k, "rope_parameters") ||
                               qlora__json_is(json, k, "max_position_embeddings"))) {
            continue;
        }
        const qlora__json_token* key = &json->tokens[k];
        const qlora__json_token* value = &json->tokens[k + 1];
        uint32_t quote = value->kind == QLORA__JSON_STRING ? 1 : 0;
        if (qlora__json_is(json, k, "quantization_config")) {
            continue;
        }
        qlora__json_write_key(&w, NULL);
        qlora__string_add(text, json->text + key->begin - 1, key->end - key->begin + 2);
        qlora__string_puts(text, ": ");
        if (qlora__json_is(json, k, "dtype") || qlora__json_is(json, k, "torch_dtype")) {
            qlora__json_write_quoted(text, dtype, strlen(dtype));
        } else if (vocab > 0 && qlora__json_is(json, k, "vocab_size")) {
            char number[24];
            snprintf(number, sizeof number, "%lld", (long long)vocab);
            qlora__string_puts(text, number);
            sized = true;
        } else {
            qlora__string_add(text, json->text + value->begin - quote,
                              value->end - value->begin + 2 * quote);
        }
    }
    if (scaled != NULL) {
        qlora__config_rewrite_rope(&w, json, scaled);
    }
    if (!sized) { // a default of the family
        qlora__json_write_int(&w, "vocab_size", vocab);
    }
    qlora__json_write_close(&w, '}');
}

// Writes config.json for weights exported as `dtype` ("bfloat16", ...), based on the original one.
// vocab 0 = as there.
static QLORA__UNUSED qlora_result qlora__config_export(qlora__env* env, const char* from_dir,
                                                       const char* to_dir, const char* dtype,
                                                       int64_t vocab,
                                                       const qlora_model_config* scaled) {
    char path[QLORA__PATH_ROOM];
    qlora__map map;
    qlora__json json;
    qlora__string text;
    QLORA__TRY(qlora__path_join(env, from_dir, "config.json", path));
    QLORA__TRY(qlora__map_open(env, path, &map));
    qlora__string_begin(env, &text);
    qlora_result result =
        qlora__json_parse(env, path, map.data, map.size, QLORA__JSON_WORDS, &json);
    if (result == QLORA_OK) {
        if (qlora__json_kind_of(&json, 0) == QLORA__JSON_OBJECT) {
            qlora__config_rewrite(&json, dtype, vocab, scaled, &text);
            result = text.result;
        } else {
            result = qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: expected a JSON object", path);
        }
        qlora__json_free(env, &json);
    }
    qlora__map_close(env, &map);
    if (result == QLORA_OK) {
        result = qlora__path_join(env, to_dir, "config.json", path);
    }
    if (result == QLORA_OK) {
        result = qlora__file_write(env, path, text.data, text.size);
    }
    qlora__string_free(&text);
    return result;
}

// ---- bitsandbytes 4-bit tensors and FP8 tensors -------------------------------------------------

// The weight of a linear layer as stored in its file. If nf4 and fp8 are false, `weight` is a
// 16-bit or 32-bit matrix. If fp8 is true, it is a matrix of e4m3 codes with one scale for every
// block of 128 x 128. If nf4 is true: packed codes, two per byte, high nibble first, with one scale
// for every `block` elements. Scale i is absmax[i] (F32, BF16 or F16) or, if nested,
//   map2[codes[i]] * absmax2[i / block2] + offset
typedef struct qlora__linear_source {
    int64_t rows;
    int64_t cols;
    bool nf4;
    bool fp8;
    bool nested;
    const qlora__st_tensor* weight;
    const qlora__st_tensor* scales;  // fp8; F32, BF16 or F16
    const qlora__st_tensor* absmax;  // nf4; U8 codes when nested
    const qlora__st_tensor* map;     // F32 [16], the NF4 code book
    const qlora__st_tensor* absmax2; // nested: F32
    const qlora__st_tensor* map2;    // nested: F32 [256]
    int64_t block;
    int64_t block2;
    float offset;
    qlora_dtype dtype; // type to which the dequantised values are rounded
} qlora__linear_source;

static const char qlora__bnb_suffix[] = ".quant_state.bitsandbytes__nf4";

// Finds `name` + `suffix` with `count` elements of the given type; F32 also accepts BF16 and F16.
static qlora_result qlora__bnb_part(qlora__env* env, const qlora__folder* f, const char* name,
                                    const char* suffix, uint64_t count, qlora__st_dtype dtype,
                                    const qlora__st_tensor** out) {
    char full[320];
    snprintf(full, sizeof full, "%s%s", name, suffix);
    const qlora__st_tensor* t = qlora__folder_find(f, full);
    if (t == NULL) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: tensor %s is missing", f->dir, full);
    }
    bool type_fits = t->dtype == dtype || (dtype == QLORA__ST_F32 && qlora__st_is_float(t));
    if (!type_fits) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "%s: %s has dtype %s; the quant_state requires %s", f->dir, full,
                               qlora__st_dtypes[t->dtype].name, qlora__st_dtypes[dtype].name);
    }
    if (qlora__st_elements(t) != count) {
        return qlora__env_fail(
            env, QLORA_ERR_FORMAT, "%s: %s has %llu elements; the quant_state requires %llu",
            f->dir, full, (unsigned long long)qlora__st_elements(t), (unsigned long long)count);
    }
    *out = t;
    return QLORA_OK;
}

// Reports a key of the quant_state that is missing or has a wrong value.
static qlora_result qlora__bnb_wrong(const qlora__config_reader* r, const char* key,
                                     const char* allowed) {
    char shown[48];
    uint32_t value = qlora__config_find(r, key);
    if (value == 0) {
        return qlora__env_fail(r->env, QLORA_ERR_FORMAT, "%s: %s is missing", r->json->label, key);
    }
    return qlora__env_fail(r->env, QLORA_ERR_FORMAT, "%s: %s is %s; it must be %s", r->json->label,
                           key, qlora__config_show(r, value, shown), allowed);
}

static qlora_result qlora__bnb_block(const qlora__config_reader* r, const char* key, int64_t* out) {
    QLORA__TRY(qlora__config_int(r, key, -1, 32, 4096, out));
    if ((*out & (*out - 1)) != 0) {
        return qlora__bnb_wrong(r, key, "a power of two");
    }
    return QLORA_OK;
}

// Reads the shape [rows, cols]; returns false if it is not valid.
static bool qlora__bnb_shape(const qlora__json* json, uint32_t shape, qlora__linear_source* w) {
    return shape != 0 && qlora__json_kind_of(json, shape) == QLORA__JSON_ARRAY &&
           json->tokens[shape].count == 2 && qlora__json_offset(json, shape + 1, &w->rows) &&
           qlora__json_offset(json, shape + 2, &w->cols) && w->rows >= 1 && w->cols >= 1 &&
           w->rows <= INT32_MAX && w->cols <= INT32_MAX;
}

// Reads the JSON inside a quant_state tensor.
static qlora_result qlora__bnb_state(qlora__env* env, const qlora__json* json,
                                     qlora__linear_source* w) {
    qlora__config_reader r;
    r.env = env;
    r.json = json;
    r.object = 0;
    uint32_t type = qlora__config_find(&r, "quant_type");
    uint32_t dtype = qlora__config_find(&r, "dtype");
    if (type != 0 && !qlora__json_is(json, type, "nf4")) {
        return qlora__config_refuse(&r, "quant_type", type, "only nf4 is supported");
    }
    if (type == 0) {
        return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                               "%s: quant_type is missing; only nf4 is supported", json->label);
    }
    if (!qlora__bnb_shape(json, qlora__config_find(&r, "shape"), w)) {
        return qlora__bnb_wrong(&r, "shape", "two integers from 1 to 2147483647");
    }
    QLORA__TRY(qlora__bnb_block(&r, "blocksize", &w->block));
    w->nested = qlora__config_find(&r, "nested_blocksize") != 0;
    w->block2 = 256;
    if (w->nested) {
        double offset = 0.0;
        QLORA__TRY(qlora__bnb_block(&r, "nested_blocksize", &w->block2));
        uint32_t value = qlora__config_find(&r, "nested_offset");
        if (value == 0 || !qlora__json_double(json, value, &offset) || offset > 3.4e38 ||
            offset < -3.4e38) {
            return qlora__bnb_wrong(&r, "nested_offset", "a number from -3.4e38 to 3.4e38");
        }
        w->offset = (float)offset;
    }
    w->dtype = QLORA_BF16;
    if (dtype != 0 && qlora__json_is(json, dtype, "float16")) {
        w->dtype = QLORA_F16;
    } else if (dtype != 0 && qlora__json_is(json, dtype, "float32")) {
        w->dtype = QLORA_F32;
    } else if (dtype == 0 || !qlora__json_is(json, dtype, "bfloat16")) {
        return qlora__bnb_wrong(&r, "dtype", "bfloat16, float16 or float32");
    }
    return QLORA_OK;
}

// Finds the tensors that accompany the packed codes and checks the sizes that the quant_state
// implies.
static qlora_result qlora__bnb_parts(qlora__env* env, const qlora__folder* f, const char* name,
                                     qlora__linear_source* w) {
    uint64_t n = (uint64_t)w->rows * (uint64_t)w->cols;
    uint64_t packed = (n + 1) / 2;
    uint64_t blocks = (n + (uint64_t)w->block - 1) / (uint64_t)w->block;
    uint64_t blocks2 = (blocks + (uint64_t)w->block2 - 1) / (uint64_t)w->block2;
    // Other storage types contain the same bytes, rounded up to whole elements.
    if (w->weight->bytes < packed || w->weight->bytes >= packed + 8) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "%s: %s has %llu bytes; %lld x %lld codes need %llu", f->dir, name,
                               (unsigned long long)w->weight->bytes, (long long)w->rows,
                               (long long)w->cols, (unsigned long long)packed);
    }
    QLORA__TRY(qlora__bnb_part(env, f, name, ".quant_map", 16, QLORA__ST_F32, &w->map));
    float book[16];
    qlora__st_read_f32(w->map, 0, 16, book);
    for (int i = 0; i < 16; i++) {
        float off = book[i] - qlora__nf4_levels[i];
        if (!(off <= 1e-6f && off >= -1e-6f)) {
            return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                                   "%s: %s.quant_map is not the NF4 code book", f->dir, name);
        }
    }
    if (!w->nested) {
        return qlora__bnb_part(env, f, name, ".absmax", blocks, QLORA__ST_F32, &w->absmax);
    }
    QLORA__TRY(qlora__bnb_part(env, f, name, ".absmax", blocks, QLORA__ST_U8, &w->absmax));
    QLORA__TRY(qlora__bnb_part(env, f, name, ".nested_quant_map", 256, QLORA__ST_F32, &w->map2));
    return qlora__bnb_part(env, f, name, ".nested_absmax", blocks2, QLORA__ST_F32, &w->absmax2);
}

#define QLORA__FP8_SUFFIX "_scale_inv" // after ".weight"; in spite of the name, codes times it

// Finds the scales of FP8 codes.
static qlora_result qlora__fp8_parts(qlora__env* env, const qlora__folder* f, const char* name,
                                     int64_t rows, int64_t cols, qlora__linear_source* w) {
    const qlora__st_tensor* t = w->weight;
    char have[96];
    char want[96];
    char full[320];
    int64_t shape[2] = {rows, cols};
    bool shaped = t->rank == 2 && t->shape[0] > 0 && t->shape[1] > 0;
    if (!shaped || (rows >= 0 && (t->shape[0] != rows || t->shape[1] != cols))) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: %s has shape %s; it must be %s", f->dir,
                               name, qlora__shape_text(t->shape, t->rank, have),
                               rows >= 0 ? qlora__shape_text(shape, 2, want) : "that of a matrix");
    }
    w->fp8 = true;
    w->rows = t->shape[0];
    w->cols = t->shape[1];
    w->dtype = QLORA_BF16;
    snprintf(full, sizeof full, "%s" QLORA__FP8_SUFFIX, name);
    shape[0] = qlora__fp8_blocks(w->rows);
    shape[1] = qlora__fp8_blocks(w->cols);
    return qlora__folder_need(env, f, full, shape[0], shape[1], &w->scales);
}

// Checks the values of FP8 codes and of their scales, which folders are trusted with otherwise.
static QLORA__UNUSED qlora_result qlora__fp8_values(qlora__env* env, const qlora__folder* f,
                                                    const qlora__linear_source* w) {
    uint64_t n = w->weight->bytes;
    uint64_t nan = qlora__fp8_first_nan(w->weight->data, n);
    if (nan < n) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "%s: %s[%llu,%llu] is a NaN; weights must be finite", f->dir,
                               w->weight->name, (unsigned long long)(nan / (uint64_t)w->cols),
                               (unsigned long long)(nan % (uint64_t)w->cols));
    }
    for (uint64_t i = 0; i < qlora__st_elements(w->scales); i++) {
        float scale = 0.0f;
        qlora__st_read_f32(w->scales, i, 1, &scale);
        if (!(scale >= 0.0f && scale <= QLORA__FP8_LARGEST)) {
            return qlora__env_fail(
                env, QLORA_ERR_FORMAT, "%s: %s[%llu,%llu] is %g; it must be from 0 to 1e30", f->dir,
                w->scales->name, (unsigned long long)(i / (uint64_t)w->scales->shape[1]),
                (unsigned long long)(i % (uint64_t)w->scales->shape[1]), (double)scale);
        }
    }
    return QLORA_OK;
}

// Finds the weight [rows, cols] of a linear layer. The tensors themselves determine whether it is
// plain, 4-bit or FP8, because the config's lists of skipped modules are not reliable. `name` ends
// in ".weight". For a 4-bit or FP8 weight of unknown shape, rows is -1.
static QLORA__UNUSED qlora_result qlora__folder_linear(qlora__env* env, const qlora__folder* f,
                                                       const char* name, int64_t rows, int64_t cols,
                                                       qlora__linear_source* out) {
    char state_name[320];
    qlora__linear_source w;
    qlora__json json;
    memset(&w, 0, sizeof w);
    snprintf(state_name, sizeof state_name, "%s.quant_state.bitsandbytes__fp4", name);
    if (qlora__folder_find(f, state_name) != NULL) {
        return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                               "%s: %s is in bitsandbytes' fp4 format; only nf4 is supported",
                               f->dir, name);
    }
    snprintf(state_name, sizeof state_name, "%s%s", name, qlora__bnb_suffix);
    const qlora__st_tensor* state = qlora__folder_find(f, state_name);
    w.weight = qlora__folder_find(f, name);
    if (state == NULL && w.weight != NULL && w.weight->dtype == QLORA__ST_F8_E4M3) {
        QLORA__TRY(qlora__fp8_parts(env, f, name, rows, cols, &w));
        *out = w;
        return QLORA_OK;
    }
    if (state == NULL) {
        QLORA__TRY(qlora__folder_need(env, f, name, rows, cols, &w.weight));
        w.rows = rows;
        w.cols = cols;
        w.dtype = w.weight->dtype == QLORA__ST_F32    ? QLORA_F32
                  : w.weight->dtype == QLORA__ST_BF16 ? QLORA_BF16
                                                      : QLORA_F16;
        *out = w;
        return QLORA_OK;
    }
    w.nf4 = true;
    if (w.weight == NULL) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: tensor %s is missing", f->dir, name);
    }
    QLORA__TRY(
        qlora__json_parse(env, state_name, state->data, state->bytes, QLORA__JSON_UNIQUE, &json));
    qlora_result result = qlora__bnb_state(env, &json, &w);
    qlora__json_free(env, &json);
    QLORA__TRY(result);
    if (rows >= 0 && (w.rows != rows || w.cols != cols)) {
        return qlora__env_fail(
            env, QLORA_ERR_FORMAT, "%s: %s has shape [%lld,%lld]; it must be [%lld,%lld]", f->dir,
            name, (long long)w.rows, (long long)w.cols, (long long)rows, (long long)cols);
    }
    QLORA__TRY(qlora__bnb_parts(env, f, name, &w));
    *out = w;
    return QLORA_OK;
}
