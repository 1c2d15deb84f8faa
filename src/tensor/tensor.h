// ---- buffers ------------------------------------------------------------------------------------

static qlora_result qlora__buffer_create(qlora_ctx* ctx, size_t bytes, qlora__buffer** out) {
    QLORA__TRY(qlora__not_in_capture(ctx, "allocating memory"));
    qlora__buffer* b = (qlora__buffer*)qlora__alloc_zero(ctx, sizeof *b);
    if (b == NULL) {
        return QLORA_ERR_MEMORY;
    }
    b->bytes = bytes > 0 ? bytes : 1;
    b->data = qlora__on_cpu(ctx) ? qlora__alloc(ctx, b->bytes) : qlora__device_alloc(ctx, b->bytes);
    if (b->data == NULL) {
        qlora__free(ctx, b, sizeof *b);
        if (ctx->dead[0] != '\0') {
            return QLORA_ERR_DEVICE_LOST;
        }
        return qlora__on_cpu(ctx) ? QLORA_ERR_MEMORY : QLORA_ERR_DEVICE_MEMORY;
    }
    if (!qlora__on_cpu(ctx)) {
        ctx->device_bytes += b->bytes;
        ctx->device_allocations++;
        if (ctx->device_bytes > ctx->device_peak) {
            ctx->device_peak = ctx->device_bytes;
        }
    }
    b->id = ++ctx->next_buffer_id;
    b->next = ctx->buffers;
    ctx->buffers = b;
    *out = b;
    return QLORA_OK;
}

static void qlora__buffer_destroy(qlora_ctx* ctx, qlora__buffer* buffer) {
    if (buffer == NULL) {
        return;
    }
    qlora__buffer** link = &ctx->buffers;
    while (*link != buffer) {
        link = &(*link)->next;
    }
    *link = buffer->next;
    qlora__graphs_invalidate(ctx, buffer->id, "a buffer that it uses was freed");
    if (qlora__on_cpu(ctx)) {
        qlora__free(ctx, buffer->data, buffer->bytes);
    } else {
        qlora__device_free(ctx, buffer->data, buffer->bytes);
        ctx->device_bytes -= buffer->bytes;
    }
    qlora__free(ctx, buffer, sizeof *buffer);
}

// ---- copies and fills on the context's stream ---------------------------------------------------

#ifndef QLORA_NO_CUDA

static qlora_result qlora__sync(qlora_ctx* ctx) {
    if (qlora__on_cpu(ctx)) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__not_in_capture(ctx, "waiting for the device"));
    return qlora__cu(ctx, ctx->gpu->cu.StreamSynchronize(ctx->gpu->stream), "cuStreamSynchronize");
}

static qlora_result qlora__copy_in(qlora_ctx* ctx, void* target, const void* source, size_t bytes) {
    if (bytes == 0) {
        return QLORA_OK;
    }
    if (qlora__on_cpu(ctx)) {
        memcpy(target, source, bytes);
        return QLORA_OK;
    }
    QLORA__TRY(qlora__not_in_capture(ctx, "copying from host memory"));
    int code = ctx->gpu->cu.MemcpyHtoDAsync((qlora__CUdeviceptr)(uintptr_t)target, source, bytes,
                                            ctx->gpu->stream);
    QLORA__TRY(qlora__cu(ctx, code, "cuMemcpyHtoDAsync"));
    return qlora__sync(ctx); // the caller may change source right after this call
}

static qlora_result qlora__copy_out(qlora_ctx* ctx, void* target, const void* source,
                                    size_t bytes) {
    if (bytes == 0) {
        return QLORA_OK;
    }
    if (qlora__on_cpu(ctx)) {
        memcpy(target, source, bytes);
        return QLORA_OK;
    }
    QLORA__TRY(qlora__not_in_capture(ctx, "copying to host memory"));
    int code = ctx->gpu->cu.MemcpyDtoHAsync(target, (qlora__CUdeviceptr)(uintptr_t)source, bytes,
                                            ctx->gpu->stream);
    QLORA__TRY(qlora__cu(ctx, code, "cuMemcpyDtoHAsync"));
    return qlora__sync(ctx);
}

// Copies between two places of the memory that the context computes in; they must not overlap.
static QLORA__UNUSED qlora_result qlora__copy_within(qlora_ctx* ctx, void* target,
                                                     const void* source, size_t bytes) {
    if (bytes == 0) {
        return QLORA_OK;
    }
    if (qlora__on_cpu(ctx)) {
        memcpy(target, source, bytes);
        return QLORA_OK;
    }
    int code = ctx->gpu->cu.MemcpyDtoDAsync((qlora__CUdeviceptr)(uintptr_t)target,
                                            (qlora__CUdeviceptr)(uintptr_t)source, bytes,
                                            ctx->gpu->stream);
    return qlora__cu(ctx, code, "cuMemcpyDtoDAsync");
}

// Zeroes height rows of width bytes, pitch bytes apart.
static qlora_result qlora__zero(qlora_ctx* ctx, void* data, size_t pitch, size_t width,
                                size_t height) {
    if (width == 0 || height == 0) {
        return QLORA_OK;
    }
    if (qlora__on_cpu(ctx)) {
        for (size_t i = 0; i < height; i++) {
            memset((char*)data + i * pitch, 0, width);
        }
        return QLORA_OK;
    }
    qlora__CUdeviceptr address = (qlora__CUdeviceptr)(uintptr_t)data;
    if (pitch == width || height == 1) {
        int code = ctx->gpu->cu.MemsetD8Async(address, 0, width * height, ctx->gpu->stream);
        return qlora__cu(ctx, code, "cuMemsetD8Async");
    }
    int code = ctx->gpu->cu.MemsetD2D8Async(address, pitch, 0, width, height, ctx->gpu->stream);
    return qlora__cu(ctx, code, "cuMemsetD2D8Async");
}

#else

static qlora_result qlora__sync(qlora_ctx* ctx) {
    (void)ctx;
    return QLORA_OK;
}

static qlora_result qlora__copy_in(qlora_ctx* ctx, void* target, const void* source, size_t bytes) {
    (void)ctx;
    if (bytes > 0) {
        memcpy(target, source, bytes);
    }
    return QLORA_OK;
}

static qlora_result qlora__copy_out(qlora_ctx* ctx, void* target, const void* source,
                                    size_t bytes) {
    return qlora__copy_in(ctx, target, source, bytes);
}

static QLORA__UNUSED qlora_result qlora__copy_within(qlora_ctx* ctx, void* target,
                                                     const void* source, size_t bytes) {
    return qlora__copy_in(ctx, target, source, bytes);
}

static qlora_result qlora__zero(qlora_ctx* ctx, void* data, size_t pitch, size_t width,
                                size_t height) {
    (void)ctx;
    for (size_t i = 0; i < height && width > 0; i++) {
        memset((char*)data + i * pitch, 0, width);
    }
    return QLORA_OK;
}

#endif

qlora_result qlora_ctx_sync(qlora_ctx* ctx) {
    QLORA__ENTER(ctx, "qlora_ctx_sync");
    return qlora__leave(ctx, qlora__sync(ctx));
}

// ---- tensors ------------------------------------------------------------------------------------

static qlora_result qlora__tensor_shape(qlora_ctx* ctx, qlora_dtype dtype, int64_t batch,
                                        int64_t rows, int64_t cols, int64_t ld, qlora_tensor* out) {
    memset(out, 0, sizeof *out);
    out->dtype = dtype;
    out->rows = rows;
    out->cols = cols;
    out->ld = ld;
    out->batch = batch;
    out->owner = ctx;
    if ((int)dtype < 0 || dtype > QLORA_U8) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "dtype is %d; it must be one of qlora_dtype",
                           (int)dtype);
    }
    QLORA__TRY(qlora__need_sizes(ctx, out, ""));
    size_t matrix = 0;
    size_t all = 0;
    size_t bytes = 0;
    if (!qlora__mul((size_t)rows, (size_t)ld, &matrix) ||
        !qlora__mul(matrix, (size_t)batch, &all) ||
        !qlora__mul(all, qlora_dtype_bytes(dtype), &bytes) || bytes > (size_t)INT64_MAX) {
        return qlora__fail(ctx, QLORA_ERR_LIMIT,
                           "the size in bytes of %lld x %lld x %lld elements overflows",
                           (long long)batch, (long long)rows, (long long)ld);
    }
    out->batch_stride = (int64_t)matrix;
    out->bytes = bytes;
    return QLORA_OK;
}

static qlora_result qlora__tensor_create(qlora_ctx* ctx, qlora_dtype dtype, int64_t batch,
                                         int64_t rows, int64_t cols, qlora_tensor* out) {
    if (out == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "out is NULL");
    }
    qlora_tensor t;
    QLORA__TRY(qlora__tensor_shape(ctx, dtype, batch, rows, cols, cols, &t));
    qlora__buffer* buffer = NULL;
    QLORA__TRY(qlora__buffer_create(ctx, t.bytes, &buffer));
    t.data = buffer->data;
    ctx->living[QLORA__TENSORS]++;
    *out = t;
    return QLORA_OK;
}

qlora_result qlora_tensor_create(qlora_ctx* ctx, qlora_dtype dtype, int64_t rows, int64_t cols,
                                 qlora_tensor* out) {
    QLORA__ENTER(ctx, "qlora_tensor_create");
    return qlora__leave(ctx, qlora__tensor_create(ctx, dtype, 1, rows, cols, out));
}

qlora_result qlora_tensor_create_batched(qlora_ctx* ctx, qlora_dtype dtype, int64_t batch,
                                         int64_t rows, int64_t cols, qlora_tensor* out) {
    QLORA__ENTER(ctx, "qlora_tensor_create_batched");
    return qlora__leave(ctx, qlora__tensor_create(ctx, dtype, batch, rows, cols, out));
}

static qlora_result qlora__tensor_destroy(qlora_ctx* ctx, qlora_tensor* tensor) {
    if (tensor == NULL || tensor->data == NULL) {
        return QLORA_OK;
    }
    if (tensor->owner != ctx) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "tensor belongs to another context");
    }
    QLORA__TRY(qlora__not_in_capture(ctx, "freeing memory"));
    qlora__buffer* b = ctx->buffers;
    while (b != NULL && b->data != tensor->data) {
        b = b->next;
    }
    if (b == NULL || b == ctx->scratch) {
        return qlora__fail(
            ctx, QLORA_ERR_ARGUMENT,
            "tensor does not own a buffer: it is a view, wraps other memory, or was destroyed "
            "before; views and wrapped tensors must not be destroyed");
    }
    qlora__buffer_destroy(ctx, b);
    ctx->living[QLORA__TENSORS]--;
    memset(tensor, 0, sizeof *tensor);
    return QLORA_OK;
}

qlora_result qlora_tensor_destroy(qlora_ctx* ctx, qlora_tensor* tensor) {
    QLORA__TRY(qlora__enter_destroy(ctx, "qlora_tensor_destroy"));
    return qlora__leave(ctx, qlora__tensor_destroy(ctx, tensor));
}

static qlora_result qlora__tensor_wrap(qlora_ctx* ctx, void* data, size_t bytes, qlora_dtype dtype,
                                       int64_t rows, int64_t cols, int64_t ld, qlora_tensor* out) {
    if (out == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "out is NULL");
    }
    qlora_tensor t;
    QLORA__TRY(qlora__tensor_shape(ctx, dtype, 1, rows, cols, ld == 0 ? cols : ld, &t));
    t.data = data;
    t.bytes = bytes;
    size_t needed = 0;
    bool counted = qlora__tensor_bytes(&t, &needed);
    if (data == NULL && needed > 0) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "data is NULL");
    }
    if (!counted || needed > bytes) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "bytes is %llu; a tensor of %lld x %lld %s with ld %lld needs %llu",
                           (unsigned long long)bytes, (long long)rows, (long long)cols,
                           qlora_dtype_name(dtype), (long long)t.ld, (unsigned long long)needed);
    }
    if ((uintptr_t)data % qlora_dtype_bytes(dtype) != 0) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "data must be aligned to %d bytes for %s",
                           (int)qlora_dtype_bytes(dtype), qlora_dtype_name(dtype));
    }
    *out = t;
    return QLORA_OK;
}

qlora_result qlora_tensor_wrap(qlora_ctx* ctx, void* data, size_t bytes, qlora_dtype dtype,
                               int64_t rows, int64_t cols, int64_t ld, qlora_tensor* out) {
    QLORA__ENTER(ctx, "qlora_tensor_wrap");
    return qlora__leave(ctx, qlora__tensor_wrap(ctx, data, bytes, dtype, rows, cols, ld, out));
}

static qlora_result qlora__view_inside(qlora_ctx* ctx, const char* name, int64_t first,
                                       int64_t count, int64_t size) {
    if (first < 0 || count < 0 || first > size - count) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "%lld %ss from %s %lld on are not inside the tensor's %lld",
                           (long long)count, name, name, (long long)first, (long long)size);
    }
    return QLORA_OK;
}

static qlora_result qlora__tensor_view(qlora_ctx* ctx, const qlora_tensor* t, int64_t row,
                                       int64_t rows, int64_t col, int64_t cols, qlora_tensor* out) {
    if (t->batch != 1) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "tensor.batch is %lld; a view needs batch 1",
                           (long long)t->batch);
    }
    QLORA__TRY(qlora__view_inside(ctx, "row", row, rows, t->rows));
    QLORA__TRY(qlora__view_inside(ctx, "column", col, cols, t->cols));
    size_t offset = ((size_t)row * (size_t)t->ld + (size_t)col) * qlora_dtype_bytes(t->dtype);
    qlora_tensor v = *t;
    v.rows = rows;
    v.cols = cols;
    v.bytes = t->bytes > offset ? t->bytes - offset : 0;
    v.data = v.bytes > 0 ? (char*)t->data + offset : t->data; // an empty view at the very end
    *out = v;
    return QLORA_OK;
}

static qlora_result qlora__tensor_view_checked(qlora_ctx* ctx, const qlora_tensor* t, int64_t row,
                                               int64_t rows, int64_t col, int64_t cols,
                                               qlora_tensor* out) {
    QLORA__TRY(qlora__need(ctx, t, "tensor", ~0u, -1, -1));
    if (out == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "out is NULL");
    }
    return qlora__tensor_view(ctx, t, row, rows, col, cols, out);
}

qlora_result qlora_tensor_view(qlora_ctx* ctx, const qlora_tensor* tensor, int64_t row,
                               int64_t rows, int64_t col, int64_t cols, qlora_tensor* out) {
    QLORA__ENTER(ctx, "qlora_tensor_view");
    return qlora__leave(ctx, qlora__tensor_view_checked(ctx, tensor, row, rows, col, cols, out));
}

static qlora_result qlora__tensor_copy_check(qlora_ctx* ctx, const qlora_tensor* t,
                                             const void* host, size_t bytes) {
    QLORA__TRY(qlora__need_batch(ctx, t, "tensor", ~0u, -1, -1, -1));
    size_t whole = 0;
    qlora__tensor_bytes(t, &whole);
    bool contiguous = (t->rows <= 1 || t->ld == t->cols) &&
                      (t->batch <= 1 || t->batch_stride == t->rows * t->cols);
    if (!contiguous) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "the tensor is not contiguous (ld %lld, %lld columns)",
                           (long long)t->ld, (long long)t->cols);
    }
    if (host == NULL && bytes > 0) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "the host memory is NULL");
    }
    if (bytes != whole) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "bytes is %llu; the tensor has %llu",
                           (unsigned long long)bytes, (unsigned long long)whole);
    }
    return QLORA_OK;
}

static qlora_result qlora__tensor_write(qlora_ctx* ctx, const qlora_tensor* t, const void* source,
                                        size_t bytes) {
    QLORA__TRY(qlora__tensor_copy_check(ctx, t, source, bytes));
    return qlora__copy_in(ctx, t->data, source, bytes);
}

qlora_result qlora_tensor_write(qlora_ctx* ctx, const qlora_tensor* tensor, const void* source,
                                size_t bytes) {
    QLORA__ENTER(ctx, "qlora_tensor_write");
    return qlora__leave(ctx, qlora__tensor_write(ctx, tensor, source, bytes));
}

static qlora_result qlora__tensor_read(qlora_ctx* ctx, const qlora_tensor* t, void* target,
                                       size_t bytes) {
    QLORA__TRY(qlora__tensor_copy_check(ctx, t, target, bytes));
    return qlora__copy_out(ctx, target, t->data, bytes);
}

qlora_result qlora_tensor_read(qlora_ctx* ctx, const qlora_tensor* tensor, void* target,
                               size_t bytes) {
    QLORA__ENTER(ctx, "qlora_tensor_read");
    return qlora__leave(ctx, qlora__tensor_read(ctx, tensor, target, bytes));
}

static qlora_result qlora__tensor_zero(qlora_ctx* ctx, const qlora_tensor* t) {
    QLORA__TRY(qlora__need_batch(ctx, t, "tensor", ~0u, -1, -1, -1));
    size_t size = qlora_dtype_bytes(t->dtype);
    for (int64_t i = 0; i < t->batch; i++) {
        char* matrix = (char*)t->data + (size_t)i * (size_t)t->batch_stride * size;
        QLORA__TRY(qlora__zero(ctx, matrix, (size_t)t->ld * size, (size_t)t->cols * size,
                               (size_t)t->rows));
    }
    return QLORA_OK;
}

qlora_result qlora_tensor_zero(qlora_ctx* ctx, const qlora_tensor* tensor) {
    QLORA__ENTER(ctx, "qlora_tensor_zero");
    return qlora__leave(ctx, qlora__tensor_zero(ctx, tensor));
}

// ---- floats in host memory ----------------------------------------------------------------------

// Copies floats to an f32 tensor.
static QLORA__UNUSED qlora_result qlora__floats_in(qlora_ctx* ctx, void* data, int64_t count,
                                                   const float* in) {
    if (sizeof(QLORA__REAL) == sizeof(float)) {
        return qlora__copy_in(ctx, data, in, (size_t)count * sizeof(float));
    }
    for (int64_t i = 0; i < count; i++) {
        ((QLORA__REAL*)data)[i] = (QLORA__REAL)in[i];
    }
    return QLORA_OK;
}

// Copies numbers of an f32 tensor to host memory.
static QLORA__UNUSED qlora_result qlora__floats_out(qlora_ctx* ctx, const void* data, int64_t count,
                                                    float* out) {
    if (sizeof(QLORA__REAL) == sizeof(float)) {
        return qlora__copy_out(ctx, out, data, (size_t)count * sizeof(float));
    }
    for (int64_t i = 0; i < count; i++) { // the CPU in double precision, for tests
        out[i] = (float)((const QLORA__REAL*)data)[i];
    }
    return QLORA_OK;
}
