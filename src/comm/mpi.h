// ---- MPI, opened at run time --------------------------------------------------------------------
//
// One set of prototypes serves all three binary interfaces: handles are passed as uintptr_t, of
// which MPICH reads the low 32 bits.

typedef uintptr_t qlora__mpi_handle;

// clang-format off
#define QLORA__MPI_SYMBOLS(X)                                                                      \
    X(true,  Init_thread,         (int*, char***, int, int*))                                      \
    X(true,  Initialized,         (int*))                                                          \
    X(true,  Finalized,           (int*))                                                          \
    X(true,  Finalize,            (void))                                                          \
    X(true,  Get_library_version, (char*, int*))                                                   \
    X(true,  Comm_rank,           (qlora__mpi_handle, int*))                                       \
    X(true,  Comm_size,           (qlora__mpi_handle, int*))                                       \
    X(true,  Comm_set_errhandler, (qlora__mpi_handle, qlora__mpi_handle))                          \
    X(true,  Isend,               (const void*, int, qlora__mpi_handle, int, int,                  \
                                   qlora__mpi_handle, qlora__mpi_handle*))                         \
    X(true,  Irecv,               (void*, int, qlora__mpi_handle, int, int,                        \
                                   qlora__mpi_handle, qlora__mpi_handle*))                         \
    X(true,  Test,                (qlora__mpi_handle*, int*, void*))                               \
    X(true,  Abort,               (qlora__mpi_handle, int))                                        \
    X(true,  Error_string,        (int, char*, int*))                                              \
    X(false, Abi_get_version,     (int*, int*))
// clang-format on

typedef struct qlora__mpi_table {
#define QLORA__X(required, field, args) int(*field) args;
    QLORA__MPI_SYMBOLS(QLORA__X)
#undef QLORA__X
} qlora__mpi_table;

typedef struct qlora__mpi_symbol {
    const char* name;
    size_t offset;
    bool required;
} qlora__mpi_symbol;

static const qlora__mpi_symbol qlora__mpi_symbols[] = {
#define QLORA__X(required, field, args)                                                            \
    {"MPI_" #field, offsetof(qlora__mpi_table, field), required},
    QLORA__MPI_SYMBOLS(QLORA__X)
#undef QLORA__X
};

// What differs between the interfaces. Open MPI's handles are addresses of objects.
typedef struct qlora__mpi_abi {
    const char* name;
    const char* symbols[3]; // world, byte, errors_return, if they are addresses
    uintptr_t values[3];    // otherwise
    uintptr_t status_ignore;
    int funneled;
} qlora__mpi_abi;

enum { QLORA__MPI_OPEN, QLORA__MPI_MPICH, QLORA__MPI_STANDARD };

static const qlora__mpi_abi qlora__mpi_abis[] = {
    {"Open MPI",
     {"ompi_mpi_comm_world", "ompi_mpi_byte", "ompi_mpi_errors_return"},
     {0, 0, 0},
     0,
     1},
    {"MPICH", {NULL, NULL, NULL}, {0x44000000u, 0x4c00010du, 0x54000001u}, 1, 1},
    {"the standard interface", {NULL, NULL, NULL}, {0x101u, 0x247u, 0x143u}, 0, 1024}};

#define QLORA__MPI_PIECE ((size_t)1 << 30) // counts are ints
#define QLORA__MPI_TAG 0x716c

typedef struct qlora__mpi {
    void* library;
    qlora__mpi_table f;
    const qlora__mpi_abi* abi;
    qlora__mpi_handle world;
    qlora__mpi_handle byte;
    double limit_ms;
    double first_limit_ms;
    bool runs; // it is initialised
    bool ours; // initialised here, so finalised here
    bool broken;
    qlora__mpi_handle* requests;
    int32_t* peers; // of the requests
    size_t room;
} qlora__mpi;

static void* qlora__mpi_status(const qlora__mpi* mpi) {
    return (void*)mpi->abi->status_ignore;
}

static bool qlora__mpi_fails(const qlora__mpi* mpi, int code, const char* call, char* why,
                             size_t size) {
    char text[8192] = "";
    int length = 0;
    if (code == 0) {
        return false;
    }
    // Before it is initialised, Open MPI ends a process that asks for the text.
    if (!mpi->runs || mpi->f.Error_string(code, text, &length) != 0) {
        text[0] = '\0';
    }
    if (text[0] == '\0') {
        snprintf(why, size, "%s failed: error %d", call, code);
    } else {
        snprintf(why, size, "%s failed: %.200s (%d)", call, text, code);
    }
    return true;
}

// Makes room for a number of requests.
static bool qlora__mpi_room(qlora__mpi* mpi, size_t count) {
    if (count <= mpi->room) {
        return true;
    }
    qlora__os_free(mpi->requests, mpi->room * sizeof *mpi->requests, NULL);
    qlora__os_free(mpi->peers, mpi->room * sizeof *mpi->peers, NULL);
    mpi->requests = (qlora__mpi_handle*)qlora__os_alloc(count * sizeof *mpi->requests, 16, NULL);
    mpi->peers = (int32_t*)qlora__os_alloc(count * sizeof *mpi->peers, 16, NULL);
    mpi->room = mpi->requests != NULL && mpi->peers != NULL ? count : 0;
    return mpi->room > 0;
}

// Starts a message, in pieces.
static bool qlora__mpi_begin(qlora__mpi* mpi, const qlora_message* m, size_t* count, char* why,
                             size_t size) {
    for (size_t at = 0; at < m->bytes; at += QLORA__MPI_PIECE) {
        size_t left = m->bytes - at;
        int bytes = (int)(left < QLORA__MPI_PIECE ? left : QLORA__MPI_PIECE);
        qlora__mpi_handle* request = &mpi->requests[*count];
        char* data = (char*)m->data + at;
        *request = 0; // MPICH writes 4 of its bytes
        int code = m->receive ? mpi->f.Irecv(data, bytes, mpi->byte, m->peer, QLORA__MPI_TAG,
                                             mpi->world, request)
                              : mpi->f.Isend(data, bytes, mpi->byte, m->peer, QLORA__MPI_TAG,
                                             mpi->world, request);
        if (qlora__mpi_fails(mpi, code, m->receive ? "MPI_Irecv" : "MPI_Isend", why, size)) {
            return false;
        }
        mpi->peers[(*count)++] = m->peer;
    }
    return true;
}

// Waits for all requests, asleep most of the time: processes may have to share a core.
static bool qlora__mpi_finish(qlora__mpi* mpi, size_t count, char* why, size_t size) {
    double start = qlora__clock_ms();
    size_t done = 0;
    while (done < count) {
        size_t before = done;
        for (size_t i = 0; i < count; i++) {
            int flag = 0;
            if (mpi->peers[i] < 0) {
                continue;
            }
            int code = mpi->f.Test(&mpi->requests[i], &flag, qlora__mpi_status(mpi));
            if (qlora__mpi_fails(mpi, code, "MPI_Test", why, size)) {
                return false;
            }
            if (flag != 0) {
                mpi->peers[i] = -1;
                done++;
            }
        }
        double waited = qlora__clock_ms() - start;
        if (done == before && waited > mpi->limit_ms) {
            size_t i = 0;
            while (mpi->peers[i] < 0) {
                i++;
            }
            snprintf(why, size, "rank %d has not answered for %g s", (int)mpi->peers[i],
                     mpi->limit_ms * 1e-3);
            return false;
        }
        if (done == before) {
            qlora__sleep_us(waited < 1.0 ? 1 : 50);
        }
    }
    return true;
}

static bool qlora__mpi_exchange(const qlora_message* messages, int64_t count, void* stream,
                                char* why, size_t size, void* user) {
    qlora__mpi* mpi = (qlora__mpi*)user;
    size_t pieces = 0;
    (void)stream;
    if (mpi->broken) {
        snprintf(why, size, "an earlier exchange failed");
        return false;
    }
    for (int64_t i = 0; i < count; i++) {
        pieces += (messages[i].bytes + QLORA__MPI_PIECE - 1) / QLORA__MPI_PIECE;
    }
    mpi->broken = true;
    if (!qlora__mpi_room(mpi, pieces)) {
        snprintf(why, size, "out of memory");
        return false;
    }
    size_t begun = 0;
    for (int pass = 0; pass < 2; pass++) { // receives first, so that nothing has to be buffered
        for (int64_t i = 0; i < count; i++) {
            if (messages[i].receive == (pass == 0) &&
                !qlora__mpi_begin(mpi, &messages[i], &begun, why, size)) {
                return false;
            }
        }
    }
    mpi->broken = !qlora__mpi_finish(mpi, begun, why, size);
    return !mpi->broken;
}

static void qlora__mpi_limit(double seconds, void* user) {
    qlora__mpi* mpi = (qlora__mpi*)user;
    mpi->limit_ms = seconds > 0.0 ? seconds * 1e3 : mpi->first_limit_ms;
}

static void qlora__mpi_abort(void* user) {
    qlora__mpi* mpi = (qlora__mpi*)user;
    mpi->f.Abort(mpi->world, 1);
}

static void qlora__mpi_free(qlora__mpi* mpi) {
    qlora__os_free(mpi->requests, mpi->room * sizeof *mpi->requests, NULL);
    qlora__os_free(mpi->peers, mpi->room * sizeof *mpi->peers, NULL);
    qlora__os_free(mpi, sizeof *mpi, NULL);
}

// The library stays open: what it started may still run.
static void qlora__mpi_close(void* user) {
    qlora__mpi* mpi = (qlora__mpi*)user;
    int finalized = 0;
    if (mpi->ours && !mpi->broken && mpi->f.Finalized(&finalized) == 0 && finalized == 0) {
        mpi->f.Finalize();
    }
    qlora__mpi_free(mpi);
}

static bool qlora__mpi_load(qlora__mpi* mpi, const char* name, char* why, size_t size) {
    mpi->library = qlora__library_open(name, why, size);
    if (mpi->library == NULL) {
        return false;
    }
    for (size_t i = 0; i < sizeof qlora__mpi_symbols / sizeof qlora__mpi_symbols[0]; i++) {
        const qlora__mpi_symbol* s = &qlora__mpi_symbols[i];
        void* address = qlora__library_symbol(mpi->library, s->name);
        if (address == NULL && s->required) {
            snprintf(why, size, "%.200s has no %s", name, s->name);
            return false;
        }
        memcpy((char*)&mpi->f + s->offset, &address, sizeof address);
    }
    return true;
}

// Finds out which interface the library has.
static bool qlora__mpi_identify(qlora__mpi* mpi, char* why, size_t size) {
    char version[8192] = "";
    int length = 0;
    int major = -1;
    int minor = -1;
    if (mpi->f.Abi_get_version != NULL && mpi->f.Abi_get_version(&major, &minor) == 0 &&
        major >= 1) {
        mpi->abi = &qlora__mpi_abis[QLORA__MPI_STANDARD];
    } else if (qlora__library_symbol(mpi->library, "ompi_mpi_comm_world") != NULL) {
        mpi->abi = &qlora__mpi_abis[QLORA__MPI_OPEN];
    } else {
        if (mpi->f.Get_library_version(version, &length) != 0) {
            version[0] = '\0';
        }
        if (strstr(version, "MPICH") == NULL && strstr(version, "Intel(R) MPI") == NULL &&
            strstr(version, "MVAPICH") == NULL) {
            snprintf(why, size,
                     "the MPI library is \"%.100s\"; Open MPI, MPICH and the MPI 5.0 "
                     "interface are supported",
                     version);
            return false;
        }
        mpi->abi = &qlora__mpi_abis[QLORA__MPI_MPICH];
    }
    uintptr_t handles[3];
    for (int i = 0; i < 3; i++) {
        handles[i] = mpi->abi->values[i];
        if (mpi->abi->symbols[i] != NULL) {
            handles[i] = (uintptr_t)qlora__library_symbol(mpi->library, mpi->abi->symbols[i]);
        }
        if (handles[i] == 0) {
            snprintf(why, size, "the MPI library has no %s", mpi->abi->symbols[i]);
            return false;
        }
    }
    mpi->world = handles[0];
    mpi->byte = handles[1];
    return true;
}

static bool qlora__mpi_init(qlora__mpi* mpi, qlora_comm* out, char* why, size_t size) {
    int initialized = 0;
    int provided = 0;
    int rank = 0;
    int world = 0;
    uintptr_t returns = mpi->abi->values[2];
    if (mpi->abi->symbols[2] != NULL) {
        returns = (uintptr_t)qlora__library_symbol(mpi->library, mpi->abi->symbols[2]);
    }
    if (qlora__mpi_fails(mpi, mpi->f.Initialized(&initialized), "MPI_Initialized", why, size)) {
        return false;
    }
    if (initialized == 0) {
        int code = mpi->f.Init_thread(NULL, NULL, mpi->abi->funneled, &provided);
        if (qlora__mpi_fails(mpi, code, "MPI_Init_thread", why, size)) {
            return false;
        }
        mpi->ours = true;
    }
    mpi->runs = true;
    int code = mpi->f.Comm_set_errhandler(mpi->world, returns);
    if (qlora__mpi_fails(mpi, code, "MPI_Comm_set_errhandler", why, size) ||
        qlora__mpi_fails(mpi, mpi->f.Comm_rank(mpi->world, &rank), "MPI_Comm_rank", why, size) ||
        qlora__mpi_fails(mpi, mpi->f.Comm_size(mpi->world, &world), "MPI_Comm_size", why, size)) {
        return false;
    }
    memset(out, 0, sizeof *out);
    out->rank = rank;
    out->world = world;
    out->exchange = qlora__mpi_exchange;
    out->limit = qlora__mpi_limit;
    out->abort = qlora__mpi_abort;
    out->close = qlora__mpi_close;
    out->user = mpi;
    return true;
}

// The names to try, in the order that the launcher's variables suggest: the wrong library would
// give every process a world of its own, without an error.
static void qlora__mpi_names(const char* names[4]) {
    static const char* const open_first[4] = {"libmpi.so.40", "libmpi_abi.so.1", "libmpi.so.12",
                                              "libmpich.so.12"};
    static const char* const mpich_first[4] = {"libmpich.so.12", "libmpi.so.12", "libmpi_abi.so.1",
                                               "libmpi.so.40"};
    char text[32];
    bool mpich = qlora__os_setting("PMI_RANK", text, sizeof text) ||
                 qlora__os_setting("MPI_LOCALRANKID", text, sizeof text);
    bool open = qlora__os_setting("OMPI_COMM_WORLD_SIZE", text, sizeof text);
    memcpy((void*)names, mpich && !open ? mpich_first : open_first, sizeof open_first);
}

static bool qlora__mpi_start(qlora__mpi* mpi, const char* library, qlora_comm* out, char* why,
                             size_t size) {
    const char* names[4];
    char first[300] = "";
    char setting[300];
    bool loaded = false;
    qlora__mpi_names(names);
    if (library == NULL && qlora__os_setting("QLORA_MPI_LIBRARY", setting, sizeof setting)) {
        library = setting;
    }
    for (int i = 0; i < 4 && !loaded; i++) {
        loaded = qlora__mpi_load(mpi, library != NULL ? library : names[i], why, size);
        if (i == 0) {
            snprintf(first, sizeof first, "%.280s", why);
        }
        if (library != NULL) {
            break;
        }
    }
    if (!loaded) {
        snprintf(why, size, "%s", first);
        return false;
    }
    return qlora__mpi_identify(mpi, why, size) && qlora__mpi_init(mpi, out, why, size);
}

qlora_result qlora_comm_mpi(const char* library, double limit, qlora_comm* out, char* why,
                            size_t why_size) {
    char reason[400] = "";
    bool fits = out != NULL && limit >= 0.0 && limit <= 1e9;
    qlora__mpi* mpi = fits ? (qlora__mpi*)qlora__os_alloc(sizeof *mpi, 16, NULL) : NULL;
    bool ok = false;
    if (!fits) {
        snprintf(reason, sizeof reason, "%s",
                 out == NULL ? "out is NULL" : "limit must be from 0 to 1e9 seconds");
    } else if (mpi == NULL) {
        snprintf(reason, sizeof reason, "out of memory");
    } else {
        memset(mpi, 0, sizeof *mpi);
        mpi->limit_ms = (limit > 0.0 ? limit : 600.0) * 1e3;
        mpi->first_limit_ms = mpi->limit_ms;
        ok = qlora__mpi_start(mpi, library, out, reason, sizeof reason);
    }
    if (!ok && mpi != NULL) {
        qlora__mpi_free(mpi);
    }
    if (why != NULL && why_size > 0) {
        snprintf(why, why_size, "%s", reason);
    }
    return ok ? QLORA_OK : fits ? QLORA_ERR_COMM : QLORA_ERR_ARGUMENT;
}
