// Scratch memory by marks, calls that destroy objects, and captures.

// ---- scratch memory by marks --------------------------------------------------------------------

// Work on one stream runs in order, so scratch memory can be reused as soon as the call that uses
// it has been queued: mark, take, queue, release.
static QLORA__UNUSED size_t qlora__scratch_mark(const qlora_ctx* ctx) {
    return ctx->scratch_used;
}

static QLORA__UNUSED void qlora__scratch_release(qlora_ctx* ctx, size_t mark) {
    ctx->scratch_used = mark;
}

static QLORA__UNUSED size_t qlora__scratch_free(const qlora_ctx* ctx) {
    return ctx->scratch->bytes - ctx->scratch_used;
}

// ---- calls that destroy -------------------------------------------------------------------------

// Objects on a lost device can still be destroyed: their memory disappears with the CUDA context.
// If a working device cannot be made current, nothing is destroyed and the caller may try again.
static qlora_result qlora__enter_destroy(qlora_ctx* ctx, const char* call) {
    if (ctx == NULL) {
        return QLORA_ERR_ARGUMENT;
    }
    ctx->calls++;
    if (ctx->depth == 0) {
        ctx->env.call = call;
        ctx->env.error[0] = '\0';
        qlora_result r = ctx->activate != NULL ? ctx->activate(ctx) : QLORA_OK;
        if (r != QLORA_OK && ctx->dead[0] == '\0') {
            return r;
        }
        ctx->not_current = r != QLORA_OK;
        ctx->env.error[0] = '\0';
        qlora__floating_default(&ctx->floating);
    }
    ctx->scratch_marks[ctx->depth++] = ctx->scratch_used;
    return QLORA_OK;
}

// ---- captures -----------------------------------------------------------------------------------

// Records the first thing that invalidated the capture in progress. Does nothing without a capture.
static void qlora__capture_broke(qlora_ctx* ctx, const char* what, const char* why) {
    qlora__capture* capture = ctx->capture;
    if (capture != NULL && capture->broke[0] == '\0') {
        snprintf(capture->broke, sizeof capture->broke, "%s%s", what, why);
    }
}

// Rejects an operation that cannot be captured. The capture then fails with an error that names it.
static qlora_result qlora__not_in_capture(qlora_ctx* ctx, const char* what) {
    if (ctx->capture == NULL) {
        return QLORA_OK;
    }
    qlora__capture_broke(ctx, what, "");
    return qlora__fail(ctx, QLORA_ERR_CAPTURE,
                       "%s cannot be part of a graph; do it before the capture", what);
}
