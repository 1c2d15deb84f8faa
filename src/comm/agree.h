// ---- processes that agree -----------------------------------------------------------------------

static qlora_result qlora__comm_check(qlora_ctx* ctx, const qlora_comm* comm) {
    QLORA__TRY(qlora__need_whole(ctx, "comm->world", comm->world, 0, 4096));
    QLORA__TRY(
        qlora__need_whole(ctx, "comm->rank", comm->rank, 0, comm->world > 0 ? comm->world - 1 : 0));
    if (comm->world > 1 && comm->exchange == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "comm->exchange is NULL, but comm->world is %d",
                           (int)comm->world);
    }
    if (comm->world > 1 && comm->device && qlora__on_cpu(ctx)) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "comm->device is set, but the context runs on the CPU");
    }
    return QLORA_OK;
}

// Exchanges `bytes` of every process; room has world + 1 times that, in the memory of the provider.
static qlora_result qlora__gather_run(qlora_ctx* ctx, const qlora_comm* comm, size_t bytes,
                                      char* room) {
    size_t list = (size_t)comm->world * 2 * sizeof(qlora_message);
    qlora_message* messages = (qlora_message*)qlora__alloc(ctx, list);
    char why[400] = "";
    int64_t count = 0;
    if (messages == NULL) {
        return QLORA_ERR_MEMORY;
    }
    for (int32_t peer = 0; peer < comm->world; peer++) {
        for (int i = 0; i < 2 && peer != comm->rank; i++) {
            qlora_message* m = &messages[count++];
            m->receive = i == 1;
            m->data = i == 1 ? room + (size_t)peer * bytes : room + (size_t)comm->world * bytes;
            m->bytes = bytes;
            m->peer = peer;
        }
    }
    bool ok = comm->exchange(messages, count, qlora__comm_stream(ctx), why, sizeof why, comm->user);
    qlora__free(ctx, messages, list);
    return ok ? QLORA_OK : qlora__comm_fail(ctx, comm, why);
}

static qlora_result qlora__gather_device(qlora_ctx* ctx, const qlora_comm* comm, const void* mine,
                                         size_t bytes, void* all) {
    void* room = NULL;
    void* event = NULL;
    size_t world = (size_t)comm->world;
    QLORA__TRY(qlora__scratch(ctx, (world + 1) * bytes, &room));
    char* sent = (char*)room + world * bytes;
    QLORA__TRY(qlora__copy_in(ctx, sent, mine, bytes));
    QLORA__TRY(qlora__event_create(ctx, &event));
    qlora_result r = qlora__gather_run(ctx, comm, bytes, (char*)room);
    r = r == QLORA_OK ? qlora__event_record(ctx, event) : r;
    r = r == QLORA_OK ? qlora__comm_wait_event(ctx, comm, NULL, event) : r;
    r = r == QLORA_OK ? qlora__copy_out(ctx, all, room, world * bytes) : r;
    if (r == QLORA_OK) {
        memcpy((char*)all + (size_t)comm->rank * bytes, mine, bytes);
    }
    qlora__event_drop(ctx, event);
    return r;
}

static qlora_result qlora__comm_gather(qlora_ctx* ctx, const qlora_comm* comm, const void* mine,
                                       size_t bytes, void* all) {
    if (comm == NULL || mine == NULL || all == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s is NULL",
                           comm == NULL   ? "comm"
                           : mine == NULL ? "mine"
                                          : "all");
    }
    QLORA__TRY(qlora__comm_check(ctx, comm));
    if (comm->world > 1 && bytes > 0 && comm->device) {
        return qlora__gather_device(ctx, comm, mine, bytes, all);
    }
    if (bytes > 0) {
        memcpy((char*)all + (size_t)comm->rank * bytes, mine, bytes);
    }
    if (comm->world <= 1 || bytes == 0) {
        return QLORA_OK;
    }
    size_t size = ((size_t)comm->world + 1) * bytes;
    char* room = (char*)qlora__alloc(ctx, size);
    if (room == NULL) {
        return QLORA_ERR_MEMORY;
    }
    memcpy(room + (size_t)comm->world * bytes, mine, bytes);
    qlora_result r = qlora__gather_run(ctx, comm, bytes, room);
    for (int32_t peer = 0; peer < comm->world && r == QLORA_OK; peer++) {
        if (peer != comm->rank) {
            memcpy((char*)all + (size_t)peer * bytes, room + (size_t)peer * bytes, bytes);
        }
    }
    qlora__free(ctx, room, size);
    return r;
}

qlora_result qlora_comm_gather(qlora_ctx* ctx, const qlora_comm* comm, const void* mine,
                               size_t bytes, void* all) {
    QLORA__ENTER(ctx, "qlora_comm_gather");
    return qlora__leave(ctx, qlora__comm_gather(ctx, comm, mine, bytes, all));
}

void qlora_comm_close(qlora_comm* comm) {
    if (comm != NULL && comm->close != NULL) {
        comm->close(comm->user);
        memset(comm, 0, sizeof *comm);
    }
}

// What must be equal in all processes.
typedef struct qlora__facts {
    int64_t elements;
    int64_t values[QLORA__STATE_ROWS];
    char tier[16];
    char gpu[128];
    int32_t graph; // it can exchange by graphs, which all of them or none must do
} qlora__facts;

// The name of the GPU; "" on the CPU.
static const char* qlora__facts_gpu(const qlora_ctx* ctx) {
#ifndef QLORA_NO_CUDA
    if (!qlora__on_cpu(ctx)) {
        return ctx->gpu->device_name;
    }
#endif
    (void)ctx;
    return "";
}

static qlora_result qlora__facts_compare(const qlora_trainer* t, const qlora__state* state,
                                         const qlora__facts* all) {
    qlora_ctx* ctx = t->ctx;
    for (int32_t rank = 1; rank < t->world; rank++) {
        const qlora__facts* a = &all[0];
        const qlora__facts* b = &all[rank];
        if (strcmp(a->gpu, b->gpu) != 0) {
            return qlora__fail(ctx, QLORA_ERR_COMM,
                               "rank %d has %s, but rank 0 has %s; all ranks need the same GPU",
                               (int)rank, b->gpu[0] != '\0' ? b->gpu : "none",
                               a->gpu[0] != '\0' ? a->gpu : "none");
        }
        if (strcmp(a->tier, b->tier) != 0) {
            return qlora__fail(ctx, QLORA_ERR_COMM,
                               "rank %d has the CPU tier %s, but rank 0 has %s; all ranks need the "
                               "same",
                               (int)rank, b->tier, a->tier);
        }
        for (int i = 0; i < state->count; i++) {
            const qlora__state_row* row = &state->rows[i];
            if (a->values[i] == b->values[i] || row->kind == QLORA__BACK) {
                continue;
            }
            if (row->kind == QLORA__PRINT) {
                return qlora__fail(ctx, QLORA_ERR_COMM,
                                   "rank %d has another base model than rank 0: %s differs",
                                   (int)rank, row->name);
            }
            double values[2];
            for (int k = 0; k < 2; k++) {
                int64_t bits = k == 0 ? a->values[i] : b->values[i];
                values[k] = (double)bits;
                if (row->real) {
                    memcpy(&values[k], &bits, sizeof bits);
                }
            }
            return qlora__fail(ctx, QLORA_ERR_COMM,
                               "rank %d has %s = %.9g, but rank 0 has %.9g; all ranks need the "
                               "same",
                               (int)rank, row->name, values[1], values[0]);
        }
        if (a->elements != b->elements) {
            return qlora__fail(ctx, QLORA_ERR_COMM,
                               "rank %d trains %lld elements, but rank 0 trains %lld", (int)rank,
                               (long long)b->elements, (long long)a->elements);
        }
    }
    return QLORA_OK;
}

// After a refusal, nobody leaves before all have the words: the end of one process may take with it
// what it has sent. Whether this last exchange works does not matter; the error stays the refusal.
static void qlora__comm_part(qlora_trainer* t) {
    qlora_ctx* ctx = t->ctx;
    char refusal[sizeof ctx->env.error];
    memcpy(refusal, ctx->env.error, sizeof refusal);
    char mine = 1;
    char* all = (char*)qlora__alloc(ctx, (size_t)t->world);
    if (all != NULL) {
        (void)qlora__comm_gather(ctx, &t->comm, &mine, sizeof mine, all);
        qlora__free(ctx, all, (size_t)t->world);
    }
    memcpy(ctx->env.error, refusal, sizeof refusal);
}

// Compares machine, model and settings with those of the other processes.
static qlora_result qlora__comm_agree(qlora_trainer* t) {
    qlora_ctx* ctx = t->ctx;
    qlora__state state;
    qlora__facts mine;
    memset(&state, 0, sizeof state);
    memset(&mine, 0, sizeof mine);
    qlora__state_fill(t, &state);
    mine.elements = t->m->elements;
    snprintf(mine.tier, sizeof mine.tier, "%s", qlora__state_tier(t->m));
    snprintf(mine.gpu, sizeof mine.gpu, "%s", qlora__facts_gpu(ctx));
    mine.graph = t->swap_graphs ? 1 : 0;
    for (int i = 0; i < state.count; i++) {
        mine.values[i] = state.rows[i].value;
    }
    size_t bytes = (size_t)t->world * sizeof mine;
    qlora__facts* all = (qlora__facts*)qlora__alloc(ctx, bytes);
    if (all == NULL) {
        return QLORA_ERR_MEMORY;
    }
    qlora_result r = qlora__comm_gather(ctx, &t->comm, &mine, sizeof mine, all);
    if (r == QLORA_OK) {
        r = qlora__facts_compare(t, &state, all);
        if (r != QLORA_OK) {
            qlora__comm_part(t);
        }
    }
    for (int32_t i = 0; i < t->world && r == QLORA_OK; i++) {
        t->swap_graphs = t->swap_graphs && all[i].graph != 0;
    }
    qlora__free(ctx, all, bytes);
    return r;
}
