// ---- device memory in a build without CUDA ------------------------------------------------------

static void* qlora__device_alloc(qlora_ctx* ctx, size_t bytes) {
    (void)bytes;
    qlora__fail(ctx, QLORA_ERR_BACKEND, "built with QLORA_NO_CUDA");
    return NULL;
}

static void qlora__device_free(qlora_ctx* ctx, void* data, size_t bytes) {
    (void)ctx;
    (void)data;
    (void)bytes;
}
