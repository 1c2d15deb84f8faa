// ---- 8-bit moments ------------------------------------------------------------------------------

// The moments of trained tensor number `index`, which follow those of the tensors before it: *at
// starts at 0 and is advanced. False past the last tensor.
static bool qlora__moments_next(const qlora_model* m, int64_t index, size_t* at, qlora__trained* t,
                                qlora__moments* out) {
    if (index >= m->range_count || !qlora__trained_at(m, index, t)) {
        return false;
    }
    *at = index == 0 ? qlora__moments_head(m->range_count) : *at;
    *out = qlora__moments_place(*at, t->rows * t->cols);
    *at = out->end;
    return true;
}

// Zeroes all moments, and writes the maps and the places.
static qlora_result qlora__moments_start(qlora_ctx* ctx, qlora_model* m) {
    size_t bytes = qlora__moments_head(m->range_count);
    char* head = (char*)qlora__alloc_zero(ctx, bytes);
    if (head == NULL) {
        return QLORA_ERR_MEMORY;
    }
    QLORA__REAL* maps = (QLORA__REAL*)(void*)head;
    qlora__moments_map(true, maps);
    qlora__moments_map(false, maps + QLORA__MOMENTS_MAP);
    char* places = (char*)(maps + 2 * QLORA__MOMENTS_MAP);
    qlora__trained t;
    qlora__moments moments;
    size_t at = 0;
    for (int64_t i = 0; qlora__moments_next(m, i, &at, &t, &moments); i++) {
        int64_t place = (int64_t)moments.values[0];
        memcpy(places + (size_t)i * sizeof place, &place, sizeof place);
    }
    qlora_result r = qlora__tensor_zero(ctx, &m->moments);
    r = r == QLORA_OK ? qlora__copy_in(ctx, m->moments.data, head, bytes) : r;
    qlora__free(ctx, head, bytes);
    return r;
}
