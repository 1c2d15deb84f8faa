// ---- what PEFT saves beside an adapter of a model with new tokens -------------------------------

// If the embedding of a model was resized, PEFT's save_embedding_layers stores whole matrices with
// the adapter: the base's below trained rows (base_layer), which must be the base's here, and those
// beside a trained matrix (original_module, and modules_to_save once more). Nothing of it is used.
static const struct {
    const char* name;
    const char* equals; // the tensor with the same values: in the adapter, or in the base
    bool in_base;
} qlora__peft_copies[] = {
    {"embed_tokens.token_adapter.base_layer.weight", "model.embed_tokens.weight", true},
    {"lm_head.token_adapter.base_layer.weight", "lm_head.weight", true},
    {"lm_head.token_adapter.trainable_tokens_delta",
     "embed_tokens.token_adapter.trainable_tokens_delta", false}, // a tied head
    {"embed_tokens.modules_to_save.weight", "embed_tokens.weight", false},
    {"lm_head.modules_to_save.weight", "lm_head.weight", false},
    {"embed_tokens.original_module.weight", NULL, false}, // without adapters
    {"lm_head.original_module.weight", NULL, false},
};

#define QLORA__PEFT_COPIES (sizeof qlora__peft_copies / sizeof qlora__peft_copies[0])

static const qlora__st_tensor* qlora__peft_tensor(const qlora__peft* peft, const char* name) {
    for (uint32_t i = 0; i < peft->tensors.count; i++) {
        if (strcmp(peft->tensors.entries[i].name, name) == 0) {
            return peft->tensors.entries[i].tensor;
        }
    }
    return NULL;
}

// Whether a tensor of the file is such a copy; that of rows is one only if they are not trained.
static bool qlora__is_peft_copy(const qlora_model* m, const char* name) {
    for (size_t i = 0; i < QLORA__PEFT_COPIES; i++) {
        bool rows = strstr(qlora__peft_copies[i].name, "tokens_delta") != NULL;
        if (strcmp(name, qlora__peft_copies[i].name) == 0) {
            return !rows || (!m->tables.head_rows && m->tables.token_count > 0 &&
                             (m->plan.config.tied || m->tables.tokens_twice));
        }
    }
    return false;
}

// Compares the first `count` values of two tensors.
static bool qlora__same_values(const qlora__st_tensor* a, const qlora__st_tensor* b,
                               uint64_t count) {
    float x[256];
    float y[256];
    bool same = true;
    for (uint64_t at = 0; at < count && same; at += 256) {
        uint64_t n = count - at < 256 ? count - at : 256;
        qlora__st_read_f32(a, at, n, x);
        qlora__st_read_f32(b, at, n, y);
        for (uint64_t i = 0; i < n; i++) {
            same = same && x[i] <= y[i] && x[i] >= y[i]; // not a NaN
        }
    }
    return same;
}

// Compares a copy with what it is a copy of.
static qlora_result qlora__peft_copy_check(qlora_ctx* ctx, const qlora_model* m,
                                           const qlora__folder* base, const qlora__peft* peft,
                                           size_t which) {
    const char* name = qlora__peft_copies[which].name;
    const char* equals = qlora__peft_copies[which].equals;
    bool in_base = qlora__peft_copies[which].in_base;
    const qlora__st_tensor* t = qlora__peft_tensor(peft, name);
    const qlora__st_tensor* other = NULL;
    if (t == NULL || equals == NULL || !qlora__is_peft_copy(m, name)) {
        return QLORA_OK;
    }
    if (in_base) {
        equals = m->plan.config.tied ? "model.embed_tokens.weight" : equals;
        other = base != NULL ? qlora__folder_find(base, equals) : NULL;
        if (other != NULL) {
            QLORA__TRY(qlora__folder_make(&ctx->env, base, &other));
        }
    } else {
        other = qlora__peft_tensor(peft, equals);
    }
    uint64_t count = other != NULL ? qlora__st_elements(other) : 0;
    bool fits = other != NULL && qlora__st_is_float(t) && qlora__st_is_float(other) &&
                t->rank == 2 && other->rank == 2 && t->shape[1] == other->shape[1] &&
                (in_base ? t->shape[0] >= other->shape[0] : t->shape[0] == other->shape[0]);
    if (fits && qlora__same_values(t, other, count)) {
        return QLORA_OK;
    }
    return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED,
                       "%s: %s does not have the values of %s of the %s; save the adapter with "
                       "save_embedding_layers=False",
                       peft->tensors.dir, t->name, equals, in_base ? "base" : "adapter");
}

// dir: the folder of the base, or NULL.
static qlora_result qlora__peft_copies_check(qlora_ctx* ctx, const qlora_model* m, const char* dir,
                                             const qlora__peft* peft) {
    qlora__folder folder;
    bool exists = false;
    bool any = false;
    for (size_t i = 0; i < QLORA__PEFT_COPIES; i++) {
        any = any || (qlora__peft_tensor(peft, qlora__peft_copies[i].name) != NULL &&
                      qlora__is_peft_copy(m, qlora__peft_copies[i].name));
    }
    if (!any) {
        return QLORA_OK;
    }
    if (dir != NULL) {
        QLORA__TRY(qlora__source_exists(ctx, dir, &exists));
    }
    if (exists) {
        QLORA__TRY(qlora__folder_open(&ctx->env, dir, &folder));
    }
    qlora_result r = QLORA_OK;
    for (size_t i = 0; i < QLORA__PEFT_COPIES && r == QLORA_OK; i++) {
        r = qlora__peft_copy_check(ctx, m, exists ? &folder : NULL, peft, i);
    }
    if (exists) {
        qlora__folder_close(&ctx->env, &folder);
    }
    return r;
}
