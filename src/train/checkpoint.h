// ---- checkpoints --------------------------------------------------------------------------------

//   DIR/step-N/   adapter_model.safetensors and adapter_config.json, which PEFT reads; trained
//                 norms if any; and, written last, state.safetensors: moments, counters, settings,
//                 position, checksums
//   DIR/latest    names of the complete checkpoints, newest first; a new checkpoint becomes valid
//                 when this file is replaced, so a crash leaves either the old one or the new one
//   DIR/pending   names of folders to remove after a crash unless `latest` contains them
//
// A folder that is named in `latest` is never written to.

#define QLORA__STATE_FILE "state.safetensors"
#define QLORA__MAX_KEPT 64

typedef struct qlora__ckpt_list {
    qlora__module_name names[QLORA__MAX_KEPT + 2];
    int count;
} qlora__ckpt_list;

static const char* const qlora__ckpt_files[] = {"adapter_model.safetensors", "adapter_config.json",
                                                QLORA__NORMS_FILE, QLORA__STATE_FILE};
#define QLORA__CKPT_HASHED 3 // the first three; the state file contains its own checksum

static bool qlora__ckpt_has(const qlora__ckpt_list* list, const char* name) {
    for (int i = 0; i < list->count; i++) {
        if (strcmp(list->names[i].text, name) == 0) {
            return true;
        }
    }
    return false;
}

// Accepts only names that this code creates, so that no file can refer to a path outside the
// folder.
static bool qlora__ckpt_name_fits(const char* name, size_t size) {
    bool fits = size > 5 && size < 40 && memcmp(name, "step-", 5) == 0;
    for (size_t i = 5; i < size && fits; i++) {
        fits = (name[i] >= '0' && name[i] <= '9') || name[i] == '-';
    }
    return fits;
}

// Reads a file of names, one per line; a missing file is an empty list.
static qlora_result qlora__ckpt_list_read(qlora_ctx* ctx, const char* dir, const char* file,
                                          qlora__ckpt_list* list) {
    char path[QLORA__PATH_ROOM];
    bool exists = false;
    memset(list, 0, sizeof *list);
    QLORA__TRY(qlora__path_join(&ctx->env, dir, file, path));
    QLORA__TRY(qlora__file_exists(&ctx->env, path, &exists));
    if (!exists) {
        return QLORA_OK;
    }
    qlora__map map;
    QLORA__TRY(qlora__map_open(&ctx->env, path, &map));
    const char* text = (const char*)map.data;
    bool good = map.size > 0 && map.size < 8192 && text[map.size - 1] == '\n';
    for (size_t at = 0; good && at < map.size;) {
        size_t size = 0;
        while (text[at + size] != '\n') {
            size++;
        }
        good = list->count <= QLORA__MAX_KEPT && qlora__ckpt_name_fits(text + at, size);
        if (good) {
            memcpy(list->names[list->count].text, text + at, size);
            list->names[list->count++].text[size] = '\0';
        }
        at += size + 1;
    }
    qlora__map_close(&ctx->env, &map);
    return good
               ? QLORA_OK
               : qlora__fail(ctx, QLORA_ERR_FORMAT,
                             "%s is damaged; it must contain one checkpoint folder per line", path);
}

static qlora_result qlora__ckpt_list_write(qlora_ctx* ctx, const char* dir, const char* file,
                                           const qlora__ckpt_list* list) {
    char path[QLORA__PATH_ROOM];
    qlora__string text;
    QLORA__TRY(qlora__path_join(&ctx->env, dir, file, path));
    qlora__string_begin(&ctx->env, &text);
    for (int i = 0; i < list->count; i++) {
        qlora__string_puts(&text, list->names[i].text);
        qlora__string_puts(&text, "\n");
    }
    qlora_result r = text.result;
    if (r == QLORA_OK) {
        r = qlora__file_write(&ctx->env, path, text.data, text.size);
    }
    qlora__string_free(&text);
    return r;
}

// Removes a checkpoint. Errors are ignored, because leftovers only take up disk space.
static void qlora__ckpt_remove(qlora_ctx* ctx, const char* dir, const char* name) {
    char folder[QLORA__PATH_ROOM];
    if (qlora__path_join(&ctx->env, dir, name, folder) != QLORA_OK) {
        return;
    }
    // The state is removed first: without it, the folder is not a checkpoint.
    for (int i = (int)(sizeof qlora__ckpt_files / sizeof qlora__ckpt_files[0]) - 1; i >= 0; i--) {
        char temporary[64];
        snprintf(temporary, sizeof temporary, "%s.tmp", qlora__ckpt_files[i]);
        qlora__file_remove(&ctx->env, folder, qlora__ckpt_files[i]);
        qlora__file_remove(&ctx->env, folder, temporary);
    }
    ctx->env.files.remove(folder, ctx->env.files.user);
}

static qlora_result qlora__ckpt_hash(qlora_ctx* ctx, const char* folder, const char* name,
                                     uint64_t* out) {
    char path[QLORA__PATH_ROOM];
    bool exists = false;
    *out = 0;
    QLORA__TRY(qlora__path_join(&ctx->env, folder, name, path));
    QLORA__TRY(qlora__file_exists(&ctx->env, path, &exists));
    if (exists) {
        qlora__map map;
        qlora__hash hash;
        QLORA__TRY(qlora__map_open(&ctx->env, path, &map));
        qlora__hash_begin(&hash);
        qlora__hash_add(&hash, map.data, (size_t)map.size);
        *out = qlora__hash_end(&hash);
        qlora__map_close(&ctx->env, &map);
    }
    return QLORA_OK;
}

// ---- saving -------------------------------------------------------------------------------------

// Moments in 8 bits are stored as they are: m.NAME has the codes, m.NAME.scales their scales.
static void qlora__state_add_moments(const qlora_model* m, qlora__save_list* list) {
    qlora__trained t;
    qlora__moments moments;
    size_t at = 0;
    bool coded = m->desc.optimizer == QLORA_OPTIMIZER_ADAMW_8BIT;
    for (int64_t i = 0; !coded && qlora__trained_at(m, i, &t); i++) {
        qlora__save_add(list, "m.", &m->moment1, &t);
        qlora__save_add(list, "v.", &m->moment2, &t);
    }
    for (int64_t i = 0; coded && qlora__moments_next(m, i, &at, &t, &moments); i++) {
        for (int k = 0; k < 2; k++) {
            char name[224];
            const char* memory = (const char*)m->moments.data;
            snprintf(name, sizeof name, "%c.%s", "mv"[k], t.name);
            qlora__save_add_moments(list, name, moments.coded ? QLORA__ST_U8 : QLORA__ST_F32,
                                    memory + moments.values[k], moments.count);
            if (moments.coded) {
                snprintf(name, sizeof name, "%c.%s.scales", "mv"[k], t.name);
                qlora__save_add_moments(list, name, QLORA__ST_F32, memory + moments.scales[k],
                                        moments.blocks);
            }
        }
    }
}

static qlora_result qlora__state_write(qlora_trainer* t, const char* folder, const qlora__state* s,
                                       const void* position, size_t position_bytes) {
    qlora_ctx* ctx = t->ctx;
    const qlora_model* m = t->m;
    char path[QLORA__PATH_ROOM];
    char texts[QLORA__STATE_ROWS][24];
    const char* metadata[2 * QLORA__STATE_ROWS + 3];
    uint64_t hashes[QLORA__CKPT_HASHED];
    qlora__save_list list;
    for (int i = 0; i < QLORA__CKPT_HASHED; i++) {
        QLORA__TRY(qlora__ckpt_hash(ctx, folder, qlora__ckpt_files[i], &hashes[i]));
    }
    int count = 0;
    for (int i = 0; i < s->count; i++) {
        if (!s->rows[i].later || s->rows[i].value != 0) {
            snprintf(texts[i], sizeof texts[i], "%lld", (long long)s->rows[i].value);
            metadata[2 * count] = s->rows[i].name;
            metadata[2 * count++ + 1] = texts[i];
        }
    }
    metadata[2 * count] = "cpu_tier";
    metadata[2 * count + 1] = qlora__state_tier(m);
    metadata[2 * count + 2] = NULL;
    QLORA__TRY(qlora__path_join(&ctx->env, folder, QLORA__STATE_FILE, path));
    QLORA__TRY(qlora__save_open(ctx, 4 * m->range_count + 4, &list));
    qlora__state_add_moments(m, &list);
    qlora__save_add_bytes(&list, "hashes", QLORA__ST_U64, hashes, sizeof hashes);
    qlora__save_add_bytes(&list, "record", QLORA__ST_F32, s->record, sizeof s->record);
    if (t->method->report != NULL) {
        qlora__save_add_bytes(&list, "preference", QLORA__ST_U8, s->preference,
                              sizeof s->preference);
    }
    qlora__save_add_bytes(&list, "position", QLORA__ST_U8, position, position_bytes);
    qlora_result r = qlora__save_write(ctx, &list, path, metadata, true);
    qlora__save_close(ctx, &list);
    return r;
}

// Collects the state of the device and the trainer after waiting for all steps.
static qlora_result qlora__state_take(const qlora_trainer* t, qlora__state* s) {
    qlora_adamw_state adamw;
    memset(s, 0, sizeof *s);
    QLORA__TRY(qlora__copy_out(t->ctx, &adamw, t->m->adamw.data, sizeof adamw)); // waits
    s->step = t->step;
    const qlora__record* record = &t->records[qlora__record_of(t->step)];
    const qlora__report* report = &t->reports[qlora__record_of(t->step)];
    s->tokens = report->tokens;
    memcpy(&s->lr_bits, &report->lr, sizeof s->lr_bits);
    s->updates = adamw.updates;
    s->skipped = adamw.skipped;
    s->skip = adamw.skip;
    memcpy(s->record, record->totals, sizeof record->totals);
    s->record[4] = qlora__record_norm(t, record);
    s->record[5] = record->results[1];
    memcpy(s->preference, record->preference, sizeof record->preference);
    s->preference[QLORA__PREFERENCE_SUMS] = report->total;
    s->preference[QLORA__PREFERENCE_SUMS + 1] = report->chosen_labels;
    s->preference[QLORA__PREFERENCE_SUMS + 2] = report->sft_alpha;
    qlora__state_fill(t, s);
    return QLORA_OK;
}

static qlora_result qlora__ckpt_fill(qlora_trainer* t, const char* dir, const char* name,
                                     const void* position, size_t position_bytes) {
    qlora_ctx* ctx = t->ctx;
    char folder[QLORA__PATH_ROOM];
    qlora__state state;
    QLORA__TRY(qlora__path_join(&ctx->env, dir, name, folder));
    QLORA__TRY(qlora__state_take(t, &state));
    QLORA__TRY(qlora__adapter_write(ctx, t->m, folder, t->m->dir));
    QLORA__TRY(qlora__state_write(t, folder, &state, position, position_bytes));
    return qlora__dir_sync(&ctx->env, dir); // the folder's own name
}

// Chooses a name that no complete checkpoint has: step-N, or step-N-2 and so on if step N is saved
// again.
static void qlora__ckpt_choose(const qlora_trainer* t, const qlora__ckpt_list* list,
                               qlora__module_name* out) {
    snprintf(out->text, sizeof out->text, "step-%lld", (long long)t->step);
    for (int i = 2; qlora__ckpt_has(list, out->text); i++) {
        snprintf(out->text, sizeof out->text, "step-%lld-%d", (long long)t->step, i);
    }
}

static qlora_result qlora__ckpt_need(qlora_trainer* t, const char* dir) {
    if (dir == NULL || dir[0] == '\0') {
        return qlora__fail(t->ctx, QLORA_ERR_ARGUMENT, "dir is %s", dir == NULL ? "NULL" : "empty");
    }
    QLORA__TRY(qlora__not_sliced(t->ctx, t));
    return qlora__not_in_capture(t->ctx, "saving or loading a checkpoint");
}

// Inserts name at the front, and moves names beyond `keep` to `dropped`.
static void qlora__ckpt_list_push(qlora__ckpt_list* list, const qlora__module_name* name, int keep,
                                  qlora__ckpt_list* dropped) {
    memset(dropped, 0, sizeof *dropped);
    for (int i = keep - 1; i < list->count; i++) {
        dropped->names[dropped->count++] = list->names[i];
    }
    list->count = list->count < keep - 1 ? list->count : keep - 1;
    for (int i = list->count; i > 0; i--) {
        list->names[i] = list->names[i - 1];
    }
    list->names[0] = *name;
    list->count++;
}

static qlora_result qlora__checkpoint_save(qlora_trainer* t, const char* dir, const void* position,
                                           size_t position_bytes) {
    qlora_ctx* ctx = t->ctx;
    qlora__ckpt_list list;
    qlora__ckpt_list pending;
    qlora__module_name name;
    QLORA__TRY(qlora__ckpt_need(t, dir));
    if (position == NULL && position_bytes > 0) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "position is NULL and position_bytes is %llu",
                           (unsigned long long)position_bytes);
    }
    if (t->tokens > 0) {
        return qlora__fail(ctx, QLORA_ERR_STATE,
                           "a step is in progress; call qlora_train_update before saving");
    }
    QLORA__TRY(qlora__trainer_sound(ctx, t));
    QLORA__TRY(qlora__comm_wait(t, t->reports[qlora__record_of(t->step)].event));
    QLORA__TRY(qlora__dir_make(&ctx->env, dir));
    QLORA__TRY(qlora__ckpt_list_read(ctx, dir, "latest", &list));
    if (qlora__ckpt_list_read(ctx, dir, "pending", &pending) != QLORA_OK) {
        pending.count = 0; // only used to remove leftovers
    }
    for (int i = 0; i < pending.count; i++) {
        if (!qlora__ckpt_has(&list, pending.names[i].text)) {
            qlora__ckpt_remove(ctx, dir, pending.names[i].text);
        }
    }
    int keep = t->desc.keep_checkpoints;
    qlora__ckpt_choose(t, &list, &name);
    qlora__ckpt_list_push(&list, &name, keep, &pending);
    pending.names[pending.count++] = name;
    QLORA__TRY(qlora__ckpt_list_write(ctx, dir, "pending", &pending));
    qlora_result r = qlora__ckpt_fill(t, dir, name.text, position, position_bytes);
    if (r != QLORA_OK) {
        qlora__ckpt_remove(ctx, dir, name.text);
        qlora__file_remove(&ctx->env, dir, "pending");
        return r;
    }
    // If this fails, either list may be on the disk, so the old and the new checkpoint are both
    // kept.
    QLORA__TRY(qlora__ckpt_list_write(ctx, dir, "latest", &list));
    for (int i = 0; i + 1 < pending.count; i++) {
        qlora__ckpt_remove(ctx, dir, pending.names[i].text);
    }
    qlora__file_remove(&ctx->env, dir, "pending");
    QLORA__LOG(ctx, INFO, CHECKPOINT, "saved %s/%s", dir, name.text);
    return QLORA_OK;
}

qlora_result qlora_checkpoint_save(qlora_trainer* trainer, const char* dir, const void* position,
                                   size_t position_bytes) {
    QLORA__TRY(qlora__trainer_enter(trainer, "qlora_checkpoint_save"));
    return qlora__trainer_leave(trainer,
                                qlora__checkpoint_save(trainer, dir, position, position_bytes));
}

// ---- loading ------------------------------------------------------------------------------------

// Opens the state of a checkpoint and verifies all its files; QLORA_ERR_FORMAT if one is damaged.
static qlora_result qlora__ckpt_open(qlora_ctx* ctx, const char* folder, qlora__st* state) {
    char path[QLORA__PATH_ROOM];
    bool exists = false;
    QLORA__TRY(qlora__path_join(&ctx->env, folder, QLORA__STATE_FILE, path));
    QLORA__TRY(qlora__file_exists(&ctx->env, path, &exists));
    if (!exists) {
        return qlora__fail(ctx, QLORA_ERR_FORMAT, "%s is missing", path);
    }
    QLORA__TRY(qlora__st_open(&ctx->env, path, state));
    qlora_result r = qlora__st_verify(&ctx->env, state);
    const qlora__st_tensor* hashes = qlora__st_find(state, "hashes");
    if (r == QLORA_OK && (hashes == NULL || hashes->bytes != 8 * QLORA__CKPT_HASHED)) {
        r = qlora__fail(ctx, QLORA_ERR_FORMAT, "%s contains no checksums of the other files", path);
    }
    for (int i = 0; i < QLORA__CKPT_HASHED && r == QLORA_OK; i++) {
        uint64_t hash = 0;
        r = qlora__ckpt_hash(ctx, folder, qlora__ckpt_files[i], &hash);
        if (r == QLORA_OK && hash != qlora__load_u64(hashes->data + 8 * i)) {
            r = qlora__fail(ctx, QLORA_ERR_FORMAT, "%s/%s is %s", folder, qlora__ckpt_files[i],
                            hash == 0 ? "missing" : "damaged");
        }
    }
    if (r != QLORA_OK) {
        qlora__st_close(&ctx->env, state);
    }
    return r;
}

static bool qlora__state_number(const qlora__st* st, const char* name, int64_t* out) {
    char text[32];
    if (!qlora__st_metadata(st, name, text, sizeof text)) {
        return false;
    }
    bool negative = text[0] == '-';
    uint64_t value = 0;
    const char* p = text + (negative ? 1 : 0);
    size_t digits = 0;
    for (; *p >= '0' && *p <= '9' && digits < 19; p++) {
        value = value * 10 + (uint64_t)(*p - '0');
        digits++;
    }
    if (digits == 0 || *p != '\0' || value > (uint64_t)INT64_MAX + (negative ? 1u : 0u)) {
        return false;
    }
    *out = negative ? (int64_t)(0 - value) : (int64_t)value;
    return true;
}

static double qlora__state_show(const qlora__state_row* row, int64_t value) {
    double real = (double)value;
    if (row->real) {
        memcpy(&real, &value, sizeof real);
    }
    return real;
}

// Another tier rounds differently, so later steps differ in the last bits; nothing else changes.
// Before there were tiers, checkpoints did not name one, and the CPU had what is now the portable
// tier. A change of the backend is in the table.
static void qlora__state_compare_tier(const qlora_model* m, const qlora__st* st) {
    qlora_ctx* ctx = m->ctx;
    char text[32];
    if (!qlora__st_metadata(st, "cpu_tier", text, sizeof text)) {
        snprintf(text, sizeof text, "%s", qlora__on_cpu(ctx) ? "portable" : "none");
    }
    const char* now = qlora__state_tier(m);
    if (strcmp(text, now) != 0 && strcmp(text, "none") != 0 && strcmp(now, "none") != 0) {
        QLORA__LOG(ctx, WARN, CHECKPOINT, "%s was saved with the CPU tier %s, this trainer has %s",
                   st->label, text, now);
    }
}

// Compares the numbers of a checkpoint with those of the trainer, and takes those that are
// restored.
static qlora_result qlora__state_compare(const qlora_model* m, const qlora__st* st,
                                         qlora__state* s) {
    qlora_ctx* ctx = m->ctx;
    for (int i = 0; i < s->count; i++) {
        const qlora__state_row* row = &s->rows[i];
        int64_t value = 0;
        if (!qlora__state_number(st, row->name, &value) && !row->later) {
            return qlora__fail(ctx, QLORA_ERR_FORMAT, "%s: %s is missing", st->label, row->name);
        }
        if (row->kind == QLORA__BACK) {
            *row->back = value;
        } else if (value != row->value && row->kind == QLORA__PRINT) {
            return qlora__fail(ctx, QLORA_ERR_STATE, "%s was saved for another base model: %s",
                               st->label,
                               strcmp(row->name, "base_config") == 0
                                   ? "its config differs in a field that changes the results"
                                   : "its weights are not the same");
        } else if (value != row->value && row->kind == QLORA__SAME) {
            return qlora__fail(ctx, QLORA_ERR_STATE,
                               "%s was saved with %s = %g, but this trainer has %g, so results "
                               "would differ",
                               st->label, row->name, qlora__state_show(row, value),
                               qlora__state_show(row, row->value));
        } else if (value != row->value) {
            QLORA__LOG(ctx, WARN, CHECKPOINT, "%s was saved with %s = %g, this trainer has %g",
                       st->label, row->name, qlora__state_show(row, value),
                       qlora__state_show(row, row->value));
        }
    }
    qlora__state_compare_tier(m, st);
    const qlora__st_tensor* record = qlora__st_find(st, "record");
    if (s->step < 0) {
        return qlora__fail(ctx, QLORA_ERR_FORMAT, "%s: step is %lld; it must not be negative",
                           st->label, (long long)s->step);
    }
    if (record == NULL || record->bytes != sizeof s->record) {
        return qlora__fail(ctx, QLORA_ERR_FORMAT, "%s: record has %llu bytes; it must have %d",
                           st->label, (unsigned long long)(record != NULL ? record->bytes : 0),
                           (int)sizeof s->record);
    }
    memcpy(s->record, record->data, sizeof s->record);
    const qlora__st_tensor* sums = qlora__st_find(st, "preference");
    if (sums != NULL && sums->bytes == sizeof s->preference) {
        memcpy(s->preference, sums->data, sizeof s->preference);
    }
    return QLORA_OK;
}

// Finds a tensor of the state with `count` values.
static qlora_result qlora__state_tensor(qlora_ctx* ctx, const qlora__st* st, const char* name,
                                        qlora__st_dtype dtype, int64_t count,
                                        const qlora__st_tensor** out) {
    *out = qlora__st_find(st, name);
    if (*out == NULL) {
        return qlora__fail(ctx, QLORA_ERR_STATE, "%s: %s is missing", st->label, name);
    }
    if ((*out)->dtype != dtype || qlora__st_elements(*out) != (uint64_t)count) {
        return qlora__fail(ctx, QLORA_ERR_STATE, "%s: %s does not contain %lld %s values",
                           st->label, name, (long long)count,
                           dtype == QLORA__ST_F32 ? "F32" : "U8");
    }
    return QLORA_OK;
}

// The same for 8-bit moments.
static qlora_result qlora__state_moments8(qlora_ctx* ctx, const qlora_model* m, const qlora__st* st,
                                          float* values) {
    qlora__trained t;
    qlora__moments moments;
    size_t at = 0;
    for (int64_t i = 0; qlora__moments_next(m, i, &at, &t, &moments); i++) {
        for (int k = 0; k < 4; k++) { // m, v, and their scales
            bool scales = k >= 2;
            bool floats = scales || !moments.coded;
            int64_t count = scales ? moments.blocks : moments.count;
            char* to = (char*)m->moments.data + (scales ? moments.scales : moments.values)[k % 2];
            const qlora__st_tensor* tensor = NULL;
            char name[224];
            if (scales && !moments.coded) {
                continue;
            }
            snprintf(name, sizeof name, "%c.%s%s", "mv"[k % 2], t.name, scales ? ".scales" : "");
            QLORA__TRY(qlora__state_tensor(ctx, st, name, floats ? QLORA__ST_F32 : QLORA__ST_U8,
                                           count, &tensor));
            if (values != NULL && floats) {
                qlora__st_read_f32(tensor, 0, (uint64_t)count, values);
                QLORA__TRY(qlora__floats_in(ctx, to, count, values));
            } else if (values != NULL) {
                QLORA__TRY(qlora__copy_in(ctx, to, tensor->data, (size_t)count));
            }
        }
    }
    return QLORA_OK;
}

// Checks that all moments are present; with a buffer for values, also loads them.
static qlora_result qlora__state_moments(qlora_ctx* ctx, const qlora_model* m, const qlora__st* st,
                                         float* values) {
    const struct {
        char which;
        const qlora_tensor* arena;
    } kinds[] = {{'m', &m->moment1}, {'v', &m->moment2}};
    qlora__trained t;
    if (m->desc.optimizer == QLORA_OPTIMIZER_ADAMW_8BIT) {
        return qlora__state_moments8(ctx, m, st, values);
    }
    for (int64_t i = 0; qlora__trained_at(m, i, &t); i++) {
        for (int k = 0; k < 2; k++) {
            const qlora__st_tensor* tensor = NULL;
            int64_t n = t.rows * t.cols;
            char name[224];
            snprintf(name, sizeof name, "%c.%s", kinds[k].which, t.name);
            QLORA__TRY(qlora__state_tensor(ctx, st, name, QLORA__ST_F32, n, &tensor));
            if (values != NULL) {
                qlora_tensor window;
                qlora__arena_window(kinds[k].arena, t.at, 1, n, &window);
                qlora__st_read_f32(tensor, 0, (uint64_t)n, values);
                QLORA__TRY(qlora__floats_in(ctx, window.data, n, values));
            }
        }
    }
    return QLORA_OK;
}

static qlora_result qlora__state_apply(qlora_trainer* t, const qlora__st* st, const qlora__state* s,
                                       float* values) {
    qlora_ctx* ctx = t->ctx;
    qlora_model* m = t->m;
    qlora_adamw_state adamw;
    QLORA__TRY(qlora__state_moments(ctx, m, st, values));
    QLORA__TRY(qlora__copy_out(ctx, &adamw, m->adamw.data, sizeof adamw));
    adamw.updates = s->updates;
    adamw.skipped = s->skipped;
    adamw.skip = (int32_t)s->skip;
    QLORA__TRY(qlora__copy_in(ctx, m->adamw.data, &adamw, sizeof adamw));
    QLORA__TRY(qlora__tensor_zero(ctx, &m->gradients));
    QLORA__TRY(qlora__sums_clear(ctx, m));
    QLORA__TRY(qlora__tensor_zero(ctx, &m->flag));
    QLORA__TRY(qlora__sync(ctx));
    qlora__record* record = &t->records[qlora__record_of(s->step)];
    qlora__report* report = &t->reports[qlora__record_of(s->step)];
    memcpy(record->totals, s->record, sizeof record->totals);
    memset(record->loads, 0, sizeof record->loads);
    memset(record->results, 0, sizeof record->results); // the norm of all, as one group
    memcpy(record->preference, s->preference, sizeof record->preference);
    report->total = s->preference[QLORA__PREFERENCE_SUMS];
    report->chosen_labels = s->preference[QLORA__PREFERENCE_SUMS + 1];
    report->sft_alpha = s->preference[QLORA__PREFERENCE_SUMS + 2];
    memcpy(record->results, s->record + 4, 2 * sizeof(float));
    record->adamw = adamw;
    record->flag = 0;
    report->step = s->step;
    report->tokens = s->tokens;
    memcpy(&report->lr, &s->lr_bits, sizeof report->lr);
    t->step = s->step;
    t->tokens = 0;
    t->failed = false;
    qlora__tree_reset(t);
    return QLORA_OK;
}

// Checks everything before anything is changed.
static qlora_result qlora__ckpt_load_one(qlora_trainer* t, const char* folder, const qlora__st* st,
                                         void* position, size_t* position_bytes) {
    qlora_ctx* ctx = t->ctx;
    qlora_model* m = t->m;
    qlora__state state;
    memset(&state, 0, sizeof state);
    qlora__state_fill(t, &state);
    QLORA__TRY(qlora__state_compare(m, st, &state));
    const qlora__st_tensor* saved = qlora__st_find(st, "position");
    if (saved == NULL) {
        return qlora__fail(ctx, QLORA_ERR_FORMAT, "%s: position is missing", st->label);
    }
    if (position_bytes != NULL &&
        (saved->bytes > *position_bytes || (position == NULL && saved->bytes > 0))) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "the saved position has %llu bytes, but the buffer only %llu",
                           (unsigned long long)saved->bytes,
                           (unsigned long long)(position != NULL ? *position_bytes : 0));
    }
    QLORA__TRY(qlora__state_moments(ctx, m, st, NULL));
    size_t room = (size_t)qlora__max(m->longest_range, m->plan.config.hidden) * 4;
    float* values = (float*)qlora__alloc(ctx, room);
    if (values == NULL) {
        return QLORA_ERR_MEMORY;
    }
    qlora_result r = qlora__adapter_read(ctx, m, folder, QLORA_EXPERT_LAYOUT_AUTO);
    r = r == QLORA_OK ? qlora__state_apply(t, st, &state, values) : r;
    qlora__free(ctx, values, room);
    if (r == QLORA_OK && position_bytes != NULL) {
        if (saved->bytes > 0) {
            memcpy(position, saved->data, (size_t)saved->bytes);
        }
        *position_bytes = (size_t)saved->bytes;
    }
    return r;
}

static qlora_result qlora__checkpoint_load(qlora_trainer* t, const char* dir, void* position,
                                           size_t* position_bytes) {
    qlora_ctx* ctx = t->ctx;
    qlora__ckpt_list list;
    QLORA__TRY(qlora__ckpt_need(t, dir));
    QLORA__TRY(qlora__model_idle(ctx, t->m, "loading a checkpoint"));
    QLORA__TRY(qlora__ckpt_list_read(ctx, dir, "latest", &list));
    if (list.count == 0) {
        return qlora__fail(ctx, QLORA_ERR_FILE, "%s contains no checkpoint", dir);
    }
    for (int i = 0; i < list.count; i++) {
        char folder[QLORA__PATH_ROOM];
        qlora__st state;
        QLORA__TRY(qlora__path_join(&ctx->env, dir, list.names[i].text, folder));
        qlora_result r = qlora__ckpt_open(ctx, folder, &state);
        if (r == QLORA_ERR_FORMAT && i + 1 < list.count) {
            QLORA__LOG(ctx, WARN, CHECKPOINT, "%s is incomplete, trying an older one: %.300s",
                       folder, ctx->env.error);
            continue;
        }
        QLORA__TRY(r);
        r = qlora__ckpt_load_one(t, folder, &state, position, position_bytes);
        qlora__st_close(&ctx->env, &state);
        if (r == QLORA_OK) {
            QLORA__LOG(ctx, INFO, CHECKPOINT, "loaded %s", folder);
        }
        return r;
    }
    return QLORA_ERR_FORMAT; // not reached: the last one returns
}

qlora_result qlora_checkpoint_load(qlora_trainer* trainer, const char* dir, void* position,
                                   size_t* position_bytes) {
    QLORA__TRY(qlora__trainer_enter(trainer, "qlora_checkpoint_load"));
    return qlora__trainer_leave(trainer,
                                qlora__checkpoint_load(trainer, dir, position, position_bytes));
}

static qlora_result qlora__checkpoint_exists(qlora_ctx* ctx, const char* dir, bool* out) {
    qlora__ckpt_list list;
    if (dir == NULL || out == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s is NULL", dir == NULL ? "dir" : "out");
    }
    QLORA__TRY(qlora__ckpt_list_read(ctx, dir, "latest", &list));
    *out = list.count > 0;
    return QLORA_OK;
}

qlora_result qlora_checkpoint_exists(qlora_ctx* ctx, const char* dir, bool* out) {
    QLORA__ENTER(ctx, "qlora_checkpoint_exists");
    return qlora__leave(ctx, qlora__checkpoint_exists(ctx, dir, out));
}
