// Elements from the first to the last of a tensor; false when that overflows.
static bool qlora__tensor_span(const qlora_tensor* t, size_t* elements) {
    *elements = 0;
    if (t->rows == 0 || t->cols == 0 || t->batch == 0) {
        return true;
    }
    size_t last_row = 0;
    size_t last_batch = 0;
    size_t sum = 0;
    return qlora__mul((size_t)(t->rows - 1), (size_t)t->ld, &last_row) &&
           qlora__mul((size_t)(t->batch - 1), (size_t)t->batch_stride, &last_batch) &&
           qlora__add(last_row, last_batch, &sum) && qlora__add(sum, (size_t)t->cols, elements);
}

static bool qlora__tensor_bytes(const qlora_tensor* t, size_t* bytes) {
    size_t elements = 0;
    return qlora__tensor_span(t, &elements) &&
           qlora__mul(elements, qlora_dtype_bytes(t->dtype), bytes);
}

// The checks that every operator makes of every tensor; -1 accepts any size.
static qlora_result qlora__need_batch(qlora_ctx* ctx, const qlora_tensor* t, const char* name,
                                      unsigned dtypes, int64_t batch, int64_t rows, int64_t cols) {
    if (t == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s is NULL", name);
    }
    if (t->owner != ctx) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s belongs to %s", name,
                           t->owner == NULL ? "no context; use qlora_tensor_create or _wrap"
                                            : "another context");
    }
    if ((int)t->dtype < 0 || t->dtype > QLORA_U8 || (dtypes >> t->dtype & 1u) == 0) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s has dtype %s, which is not accepted here",
                           name, qlora_dtype_name(t->dtype));
    }
    if (t->rows < 0 || t->cols < 0 || t->batch < 0 || t->batch_stride < 0 || t->ld < t->cols) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "%s has %lld rows, %lld columns, ld %lld, batch %lld: sizes may not be "
                           "negative and ld not below the columns",
                           name, (long long)t->rows, (long long)t->cols, (long long)t->ld,
                           (long long)t->batch);
    }
    if ((rows >= 0 && t->rows != rows) || (cols >= 0 && t->cols != cols)) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s is %lld x %lld, expected %lld x %lld%s",
                           name, (long long)t->rows, (long long)t->cols, (long long)rows,
                           (long long)cols, rows < 0 || cols < 0 ? " (-1: any)" : "");
    }
    if (batch >= 0 && t->batch != batch) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s has a batch of %lld, expected %lld", name,
                           (long long)t->batch, (long long)batch);
    }
    size_t bytes = 0;
    if (!qlora__tensor_bytes(t, &bytes)) {
        return qlora__fail(ctx, QLORA_ERR_LIMIT, "%s: the size overflows", name);
    }
    if (bytes > t->bytes || (t->data == NULL && bytes > 0)) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s needs %llu bytes, its buffer has %llu",
                           name, (unsigned long long)bytes,
                           (unsigned long long)(t->data == NULL ? 0 : t->bytes));
    }
    return qlora__capture_note(ctx, t->data);
}

static QLORA__UNUSED qlora_result qlora__need(qlora_ctx* ctx, const qlora_tensor* t,
                                              const char* name, unsigned dtypes, int64_t rows,
                                              int64_t cols) {
    return qlora__need_batch(ctx, t, name, dtypes, 1, rows, cols);
}

// Two windows of one buffer with the same ld and different columns do not overlap.
static bool qlora__tensors_overlap(const qlora_tensor* x, const qlora_tensor* y) {
    size_t x_bytes = 0;
    size_t y_bytes = 0;
    if (!qlora__tensor_bytes(x, &x_bytes) || !qlora__tensor_bytes(y, &y_bytes) || x_bytes == 0 ||
        y_bytes == 0) {
        return false;
    }
    uintptr_t x0 = (uintptr_t)x->data;
    uintptr_t y0 = (uintptr_t)y->data;
    if (x0 + x_bytes <= y0 || y0 + y_bytes <= x0) {
        return false;
    }
    size_t size = qlora_dtype_bytes(x->dtype);
    if (size != qlora_dtype_bytes(y->dtype) || x->ld != y->ld || x->batch != 1 || y->batch != 1) {
        return true;
    }
    const qlora_tensor* low = x0 <= y0 ? x : y;
    const qlora_tensor* high = x0 <= y0 ? y : x;
    uintptr_t gap = (uintptr_t)high->data - (uintptr_t)low->data;
    if (gap % size != 0) {
        return true;
    }
    int64_t column = (int64_t)(gap / size) % low->ld;
    return column < low->cols || column + high->cols > low->ld;
}

static QLORA__UNUSED qlora_result qlora__need_apart(qlora_ctx* ctx, const char* out_name,
                                                    const qlora_tensor* out, const char* in_name,
                                                    const qlora_tensor* in) {
    if (qlora__tensors_overlap(out, in)) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s overlaps %s", out_name, in_name);
    }
    return QLORA_OK;
}
