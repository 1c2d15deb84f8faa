// ---- without NCCL -------------------------------------------------------------------------------

qlora_result qlora_nccl_id(const char* library, void* id, char* why, size_t why_size) {
    (void)library;
    (void)id;
    if (why != NULL && why_size > 0) {
        snprintf(why, why_size, "the library was built without NCCL");
    }
    return QLORA_ERR_UNSUPPORTED;
}

qlora_result qlora_comm_nccl(qlora_ctx* ctx, const qlora_nccl_desc* desc, qlora_comm* out) {
    QLORA__ENTER(ctx, "qlora_comm_nccl");
    (void)desc;
    (void)out;
    return qlora__leave(
        ctx, qlora__fail(ctx, QLORA_ERR_UNSUPPORTED, "the library was built without NCCL"));
}
