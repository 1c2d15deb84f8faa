// ---- one process only ---------------------------------------------------------------------------

static qlora_result qlora__comm_start(qlora_trainer* t) {
    return t->desc.comm == NULL || t->desc.comm->world <= 1
               ? QLORA_OK
               : qlora__fail(t->ctx, QLORA_ERR_UNSUPPORTED,
                             "desc.comm has %d processes, but the library was built with "
                             "QLORA_NO_COMM",
                             (int)t->desc.comm->world);
}

static void qlora__comm_stop(qlora_trainer* t) {
    (void)t;
}

static qlora_result qlora__comm_sum(qlora_trainer* t) {
    (void)t;
    return QLORA_OK;
}

static double qlora__comm_ms(const qlora_trainer* t, const qlora__report* report) {
    (void)t;
    (void)report;
    return 0.0;
}

static qlora_result qlora__comm_wait(qlora_trainer* t, void* event) {
    (void)t;
    (void)event;
    return QLORA_OK;
}

static qlora_result qlora__comm_slot(qlora_trainer* t) {
    (void)t;
    return QLORA_OK;
}

qlora_result qlora_comm_gather(qlora_ctx* ctx, const qlora_comm* comm, const void* mine,
                               size_t bytes, void* all) {
    QLORA__ENTER(ctx, "qlora_comm_gather");
    qlora_result r = QLORA_OK;
    if (comm == NULL || comm->world > 1 || mine == NULL || all == NULL) {
        r = qlora__fail(ctx, QLORA_ERR_UNSUPPORTED, "the library was built with QLORA_NO_COMM");
    } else {
        memcpy(all, mine, bytes);
    }
    return qlora__leave(ctx, r);
}

void qlora_comm_close(qlora_comm* comm) {
    (void)comm;
}

static qlora__node qlora__comm_share(const qlora_trainer* t) {
    qlora__node all = {0, t->leaves};
    return all;
}

qlora_result qlora_comm_mpi(const char* library, double limit, qlora_comm* out, char* why,
                            size_t why_size) {
    (void)library;
    (void)limit;
    (void)out;
    if (why != NULL && why_size > 0) {
        snprintf(why, why_size, "the library was built with QLORA_NO_COMM");
    }
    return QLORA_ERR_UNSUPPORTED;
}
