// ---- NCCL, opened at run time -------------------------------------------------------------------
//
// Only sends and receives are used: they copy, so the bits are ours. The communicator does not
// block, so that every wait has a limit and can be ended.

// Passed by value.
typedef struct qlora__nccl_id {
    char bytes[QLORA_NCCL_ID_BYTES];
} qlora__nccl_id;

// ncclConfig_t of NCCL 2.18, which later versions accept. What has no value is INT32_MIN.
typedef struct qlora__nccl_config {
    size_t size;
    unsigned magic;
    unsigned version;
    int blocking;
    int cluster;
    int least;
    int most;
    const char* network;
    int split;
    int traffic; // padding before 2.26
} qlora__nccl_config;

// clang-format off
#define QLORA__NCCL_SYMBOLS(X)                                                                     \
    X(int,         GetVersion,         (int*))                                                     \
    X(int,         GetUniqueId,        (qlora__nccl_id*))                                          \
    X(int,         CommInitRankConfig, (void**, int, qlora__nccl_id, int, qlora__nccl_config*))    \
    X(int,         Send,               (const void*, size_t, int, int, void*, void*))              \
    X(int,         Recv,               (void*, size_t, int, int, void*, void*))                    \
    X(int,         GroupStart,         (void))                                                     \
    X(int,         GroupEnd,           (void))                                                     \
    X(int,         CommFinalize,       (void*))                                                    \
    X(int,         CommDestroy,        (void*))                                                    \
    X(int,         CommAbort,          (void*))                                                    \
    X(int,         CommGetAsyncError,  (void*, int*))                                              \
    X(const char*, GetErrorString,     (int))                                                      \
    X(const char*, GetLastError,       (void*))
// clang-format on

typedef struct qlora__nccl_table {
#define QLORA__X(type, field, args) type(*field) args;
    QLORA__NCCL_SYMBOLS(QLORA__X)
#undef QLORA__X
} qlora__nccl_table;

static const qlora__symbol qlora__nccl_symbols[] = {
#define QLORA__X(type, field, args) {"nccl" #field, offsetof(qlora__nccl_table, field), true},
    QLORA__NCCL_SYMBOLS(QLORA__X)
#undef QLORA__X
};

#define QLORA__NCCL_IN_PROGRESS 7
#define QLORA__NCCL_UINT8 1

typedef struct qlora__nccl {
    qlora_ctx* ctx;
    qlora__nccl_table f;
    void* comm;
    double limit_ms;
    double first_limit_ms;
    double since; // when the last exchange was queued
    bool broken;
} qlora__nccl;

// Opens the library and checks its version.
static bool qlora__nccl_open(const char* library, qlora__nccl_table* f, char* why, size_t size) {
    static const char* const names[] = {"libnccl.so.2", "libnccl.so"};
    char setting[300];
    char missing[256];
    int version = 0;
    if (library == NULL && qlora__os_setting("QLORA_NCCL_LIBRARY", setting, sizeof setting)) {
        library = setting;
    }
    void* handle = qlora__library_first(library, names, 2, why, size);
    if (handle == NULL) {
        return false;
    }
    if (!qlora__symbols_load(handle, qlora__nccl_symbols,
                             sizeof qlora__nccl_symbols / sizeof qlora__nccl_symbols[0], f, missing,
                             sizeof missing)) {
        snprintf(why, size, "the NCCL library has no %.200s", missing);
        return false;
    }
    int code = f->GetVersion(&version);
    if (code != 0 || version < 21800) {
        snprintf(why, size,
                 code != 0 ? "ncclGetVersion failed (%d)" : "NCCL has version %d; 21800 is needed",
                 code != 0 ? code : version);
        return false;
    }
    return true;
}

// Ends a communicator that has failed: its kernels stop, and nothing more can be exchanged.
static void qlora__nccl_break(qlora__nccl* n) {
    n->broken = true;
    if (n->comm != NULL) {
        qlora__graphs_part(n->ctx, "the exchange between GPUs was ended");
        n->f.CommAbort(n->comm);
        n->comm = NULL;
    }
}

static bool qlora__nccl_fail(qlora__nccl* n, int code, const char* call, char* why, size_t size) {
    const char* text = n->f.GetErrorString(code);
    const char* last = n->f.GetLastError(n->comm);
    snprintf(why, size, "%s failed: %.80s (%d)%s%.200s", call, text != NULL ? text : "", code,
             last != NULL && last[0] != '\0' ? ": " : "", last != NULL ? last : "");
    if (n->ctx->capture == NULL) { // otherwise it may still work without a graph
        qlora__nccl_break(n);
    }
    return false;
}

// Waits while a call is in progress.
static bool qlora__nccl_settle(qlora__nccl* n, int code, const char* call, char* why, size_t size) {
    double start = qlora__clock_ms();
    while (code == QLORA__NCCL_IN_PROGRESS) {
        int asked = n->f.CommGetAsyncError(n->comm, &code);
        if (asked != 0) {
            return qlora__nccl_fail(n, asked, "ncclCommGetAsyncError", why, size);
        }
        if (code == QLORA__NCCL_IN_PROGRESS && qlora__clock_ms() - start > n->limit_ms) {
            snprintf(why, size, "%s has waited for other ranks for %g s", call, n->limit_ms * 1e-3);
            qlora__nccl_break(n);
            return false;
        }
        if (code == QLORA__NCCL_IN_PROGRESS) {
            qlora__sleep_us(50);
        }
    }
    return code == 0 || qlora__nccl_fail(n, code, call, why, size);
}

static bool qlora__nccl_exchange(const qlora_message* messages, int64_t count, void* stream,
                                 char* why, size_t size, void* user) {
    qlora__nccl* n = (qlora__nccl*)user;
    if (n->broken) {
        snprintf(why, size, "an earlier exchange failed");
        return false;
    }
    n->since = qlora__clock_ms();
    if (count == 0) {
        return true;
    }
    if (n->ctx->capture != NULL) {
        n->ctx->capture->exchanges = true;
    }
    int code = n->f.GroupStart();
    if (code != 0) {
        return qlora__nccl_fail(n, code, "ncclGroupStart", why, size);
    }
    const char* call = "";
    for (int64_t i = 0; i < count && code == 0; i++) {
        const qlora_message* m = &messages[i];
        call = m->receive ? "ncclRecv" : "ncclSend";
        code = m->receive
                   ? n->f.Recv(m->data, m->bytes, QLORA__NCCL_UINT8, m->peer, n->comm, stream)
                   : n->f.Send(m->data, m->bytes, QLORA__NCCL_UINT8, m->peer, n->comm, stream);
        code = code == QLORA__NCCL_IN_PROGRESS ? 0 : code;
    }
    int ended = n->f.GroupEnd();
    n->since = qlora__clock_ms();
    if (code != 0) {
        return qlora__nccl_fail(n, code, call, why, size);
    }
    return qlora__nccl_settle(n, ended, "ncclGroupEnd", why, size);
}

static bool qlora__nccl_alive(char* why, size_t size, void* user) {
    qlora__nccl* n = (qlora__nccl*)user;
    int state = 0;
    if (n->broken) {
        snprintf(why, size, "an earlier exchange failed");
        return false;
    }
    int code = n->f.CommGetAsyncError(n->comm, &state);
    if (code != 0) {
        return qlora__nccl_fail(n, code, "ncclCommGetAsyncError", why, size);
    }
    if (state != 0 && state != QLORA__NCCL_IN_PROGRESS) {
        return qlora__nccl_fail(n, state, "the exchange between GPUs", why, size);
    }
    if (qlora__clock_ms() - n->since > n->limit_ms) {
        snprintf(why, size, "the exchange between GPUs has not ended for %g s", n->limit_ms * 1e-3);
        qlora__nccl_break(n);
        return false;
    }
    return true;
}

static void qlora__nccl_limit(double seconds, void* user) {
    qlora__nccl* n = (qlora__nccl*)user;
    n->limit_ms = seconds > 0.0 ? seconds * 1e3 : n->first_limit_ms;
}

static void qlora__nccl_abort(void* user) {
    qlora__nccl_break((qlora__nccl*)user);
}

static void qlora__nccl_close(void* user) {
    qlora__nccl* n = (qlora__nccl*)user;
    qlora_ctx* ctx = n->ctx;
    char why[400];
    bool entered = qlora__enter_destroy(ctx, "qlora_comm_close") == QLORA_OK;
    qlora__graphs_part(ctx, "the exchange between GPUs was closed");
    if (!n->broken && n->comm != NULL &&
        qlora__nccl_settle(n, n->f.CommFinalize(n->comm), "ncclCommFinalize", why, sizeof why)) {
        n->f.CommDestroy(n->comm);
    }
    if (entered) {
        qlora__leave(ctx, QLORA_OK);
    }
    qlora__free(ctx, n, sizeof *n);
}

qlora_result qlora_nccl_id(const char* library, void* id, char* why, size_t why_size) {
    qlora__nccl_table f;
    qlora__nccl_id made;
    char reason[400] = "id is NULL";
    memset(&made, 0, sizeof made);
    bool ok = id != NULL && qlora__nccl_open(library, &f, reason, sizeof reason);
    int code = ok ? f.GetUniqueId(&made) : 0;
    if (ok && code != 0) {
        snprintf(reason, sizeof reason, "ncclGetUniqueId failed (%d)", code);
        ok = false;
    }
    if (ok) {
        memcpy(id, &made, sizeof made);
    }
    if (why != NULL && why_size > 0) {
        snprintf(why, why_size, "%s", ok ? "" : reason);
    }
    return ok ? QLORA_OK : id == NULL ? QLORA_ERR_ARGUMENT : QLORA_ERR_COMM;
}

static qlora_result qlora__nccl_start(qlora_ctx* ctx, const qlora_nccl_desc* d, qlora__nccl* n) {
    char why[400] = "";
    qlora__nccl_id id;
    qlora__nccl_config config;
    memset(&config, 0, sizeof config);
    config.size = sizeof config;
    config.magic = 0xcafebeefu;
    config.version = 21800;
    config.cluster = INT32_MIN;
    config.least = INT32_MIN;
    config.most = INT32_MIN;
    config.split = INT32_MIN;
    config.traffic = INT32_MIN;
    memcpy(&id, d->id, sizeof id);
    bool ok = qlora__nccl_open(d->library, &n->f, why, sizeof why);
    int code = ok ? n->f.CommInitRankConfig(&n->comm, d->world, id, d->rank, &config) : 0;
    ok = ok && qlora__nccl_settle(n, code, "ncclCommInitRankConfig", why, sizeof why);
    return ok ? QLORA_OK
              : qlora__fail(ctx, QLORA_ERR_COMM, "rank %d of %d: %s", (int)d->rank, (int)d->world,
                            why);
}

static qlora_result qlora__comm_nccl(qlora_ctx* ctx, const qlora_nccl_desc* d, qlora_comm* out) {
    if (d == NULL || out == NULL || d->id == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s is NULL",
                           d == NULL     ? "desc"
                           : out == NULL ? "out"
                                         : "desc.id");
    }
    if (d->reserved_must_be_zero0 != 0 || d->reserved_must_be_zero1 != 0) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "the NCCL desc was not zeroed before its fields were set");
    }
    QLORA__TRY(qlora__need_whole(ctx, "desc.world", d->world, 1, 4096));
    QLORA__TRY(qlora__need_whole(ctx, "desc.rank", d->rank, 0, d->world - 1));
    QLORA__TRY(qlora__need_real(ctx, "desc.limit", d->limit, 0.0, 1e9));
    if (qlora__on_cpu(ctx)) {
        return qlora__fail(ctx, QLORA_ERR_STATE,
                           "NCCL needs a GPU, but the context runs on the "
                           "CPU");
    }
    char setting[8];
    qlora__nccl* n = (qlora__nccl*)qlora__alloc_zero(ctx, sizeof *n);
    if (n == NULL) {
        return QLORA_ERR_MEMORY;
    }
    n->ctx = ctx;
    n->limit_ms = (d->limit > 0.0 ? d->limit : 600.0) * 1e3;
    n->first_limit_ms = n->limit_ms;
    qlora_result r = qlora__nccl_start(ctx, d, n);
    if (r != QLORA_OK) {
        qlora__free(ctx, n, sizeof *n);
        return r;
    }
    memset(out, 0, sizeof *out);
    out->rank = d->rank;
    out->world = d->world;
    out->device = true;
    out->graph = !qlora__os_setting("QLORA_NCCL_GRAPH", setting, sizeof setting) ||
                 strcmp(setting, "0") != 0;
    out->exchange = qlora__nccl_exchange;
    out->alive = qlora__nccl_alive;
    out->limit = qlora__nccl_limit;
    out->abort = qlora__nccl_abort;
    out->close = qlora__nccl_close;
    out->user = n;
    return QLORA_OK;
}

qlora_result qlora_comm_nccl(qlora_ctx* ctx, const qlora_nccl_desc* desc, qlora_comm* out) {
    QLORA__ENTER(ctx, "qlora_comm_nccl");
    return qlora__leave(ctx, qlora__comm_nccl(ctx, desc, out));
}
