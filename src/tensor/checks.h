// ---- checks of arguments ------------------------------------------------------------------------

// The value is from `least` to `most`; INT64_MAX means that there is no upper limit.
static QLORA__UNUSED qlora_result qlora__need_whole(qlora_ctx* ctx, const char* name, int64_t value,
                                                    int64_t least, int64_t most) {
    if (value >= least && value <= most) {
        return QLORA_OK;
    }
    if (most == INT64_MAX) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s is %lld; it must be at least %lld", name,
                           (long long)value, (long long)least);
    }
    return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s is %lld; it must be from %lld to %lld", name,
                       (long long)value, (long long)least, (long long)most);
}

// The value is at least `least` and less than `below`; a NaN is neither.
static QLORA__UNUSED qlora_result qlora__need_real(qlora_ctx* ctx, const char* name, double value,
                                                   double least, double below) {
    if (value >= least && value < below) {
        return QLORA_OK;
    }
    if (below >= 1e300) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s is %g; it must be a finite number%s", name,
                           value, least < 0.0 ? "" : " that is not negative");
    }
    return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s is %g; it must be at least %g and less than %g",
                       name, value, least, below);
}

// Counts the elements from the first to the last one of a tensor, with the gaps between its rows.
// Returns false if the number overflows.
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

// Sizes are not negative, and rows do not overlap. The prefix is "x." for a tensor x.
static qlora_result qlora__need_sizes(qlora_ctx* ctx, const qlora_tensor* t, const char* prefix) {
    static const char* const names[] = {"rows", "cols", "batch", "batch_stride"};
    const int64_t sizes[] = {t->rows, t->cols, t->batch, t->batch_stride};
    for (int i = 0; i < 4; i++) {
        if (sizes[i] < 0) {
            return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s%s is %lld; it must not be negative",
                               prefix, names[i], (long long)sizes[i]);
        }
    }
    if (t->ld < t->cols) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%sld is %lld; it must be at least cols (%lld)",
                           prefix, (long long)t->ld, (long long)t->cols);
    }
    return QLORA_OK;
}

static qlora_result qlora__need_dtype(qlora_ctx* ctx, const qlora_tensor* t, const char* name,
                                      unsigned dtypes) {
    char allowed[64] = "";
    size_t used = 0;
    if ((int)t->dtype >= 0 && t->dtype <= QLORA_U8 && (dtypes >> t->dtype & 1u) != 0) {
        return QLORA_OK;
    }
    for (int i = QLORA_F32; i <= QLORA_U8; i++) {
        if ((dtypes >> i & 1u) != 0) {
            qlora__append(allowed, sizeof allowed, &used, "%s%s", used > 0 ? " or " : "",
                          qlora_dtype_name((qlora_dtype)i));
        }
    }
    return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s.dtype is %s (%d); it must be %s", name,
                       qlora_dtype_name(t->dtype), (int)t->dtype, allowed);
}

static qlora_result qlora__need_shape(qlora_ctx* ctx, const qlora_tensor* t, const char* name,
                                      int64_t rows, int64_t cols) {
    char wanted[2][24];
    if ((rows < 0 || t->rows == rows) && (cols < 0 || t->cols == cols)) {
        return QLORA_OK;
    }
    snprintf(wanted[0], sizeof wanted[0], "%lld", (long long)rows);
    snprintf(wanted[1], sizeof wanted[1], "%lld", (long long)cols);
    return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s is %lld x %lld; expected %s x %s", name,
                       (long long)t->rows, (long long)t->cols, rows < 0 ? "any" : wanted[0],
                       cols < 0 ? "any" : wanted[1]);
}

// The checks that every operator does for each of its tensors. A size of -1 accepts any.
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
    char prefix[64];
    snprintf(prefix, sizeof prefix, "%.60s.", name);
    QLORA__TRY(qlora__need_dtype(ctx, t, name, dtypes));
    QLORA__TRY(qlora__need_sizes(ctx, t, prefix));
    QLORA__TRY(qlora__need_shape(ctx, t, name, rows, cols));
    if (batch >= 0 && t->batch != batch) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s.batch is %lld; expected %lld", name,
                           (long long)t->batch, (long long)batch);
    }
    size_t bytes = 0;
    if (!qlora__tensor_bytes(t, &bytes)) {
        return qlora__fail(ctx, QLORA_ERR_LIMIT, "%s: the size in bytes overflows", name);
    }
    if (bytes > t->bytes || (t->data == NULL && bytes > 0)) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s needs %llu bytes; its buffer has %llu",
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

// Columns that the matrices of a tensor take up, from the first one of each row on; 0 if they are
// not next to each other in the same rows.
static int64_t qlora__tensor_width(const qlora_tensor* t) {
    int64_t width = t->batch > 1 ? (t->batch - 1) * t->batch_stride + t->cols : t->cols;
    return t->batch == 1 || (t->batch_stride >= t->cols && width <= t->ld) ? width : 0;
}

// Views of one buffer with the same ld and disjoint columns do not overlap.
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
    if (size != qlora_dtype_bytes(y->dtype) || x->ld != y->ld || qlora__tensor_width(x) == 0 ||
        qlora__tensor_width(y) == 0) {
        return true;
    }
    const qlora_tensor* low = x0 <= y0 ? x : y;
    const qlora_tensor* high = x0 <= y0 ? y : x;
    uintptr_t gap = (uintptr_t)high->data - (uintptr_t)low->data;
    if (gap % size != 0) {
        return true;
    }
    int64_t column = (int64_t)(gap / size) % low->ld;
    return column < qlora__tensor_width(low) || column + qlora__tensor_width(high) > low->ld;
}

static QLORA__UNUSED qlora_result qlora__need_apart(qlora_ctx* ctx, const char* out_name,
                                                    const qlora_tensor* out, const char* in_name,
                                                    const qlora_tensor* in) {
    if (qlora__tensors_overlap(out, in)) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s overlaps %s", out_name, in_name);
    }
    return QLORA_OK;
}
