// nccl.c - the test double that qlora.h loads as libnccl.so.2: sends and receives between processes
// on this machine, queued on the fake driver's streams like a kernel.
//
// The id is the name of a folder with one pipe per direction. As in a communicator that does not
// block, calls return "in progress" first. A process that aborts leaves a mark in the folder, which
// ends the exchanges of the others with an error.
#define _GNU_SOURCE
#include "fake.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#define FAKE_PROTOTYPE(name, kind, release, args) int name args;
FAKE_NCCL_FUNCTIONS(FAKE_PROTOTYPE)
const char* ncclGetErrorString(int code);
const char* ncclGetLastError(void* comm);

enum { SUCCESS = 0, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, IN_PROGRESS = 7 };
enum { WORLD = 8, OPS = 4096, LAUNCH_FAILED = 719, ILLEGAL_ADDRESS = 700 };

typedef struct communicator {
    int rank;
    int world;
    int pending; // answers that are still "in progress"
    int to[WORLD];
    int from[WORLD];
    char dir[64];
} communicator;

typedef struct op {
    uint64_t address;
    size_t bytes;
    int peer;
    bool receive;
} op;

typedef struct group {
    communicator* comm;
    void* stream;
    int count;
    op ops[OPS];
} group;

static group now; // tests use one thread
static bool open_group;

static const fake_inside* inside(void) {
    static const fake_inside* found = NULL;
    if (!found) {
        void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
        void* symbol = library ? dlsym(library, "fake_get_inside") : NULL;
        const fake_inside* (*get)(void);
        if (symbol) {
            memcpy(&get, &symbol, sizeof get);
            found = get();
        }
    }
    return found;
}

// Counts a call and takes an injected fault.
static int begin(const char* name) {
    int late = 0;
    int status = inside()->enter(name, &late);
    return status ? status : late;
}

static int end(const char* name, int status) {
    return inside()->leave(name, status, "");
}

int ncclGetVersion(int* version) {
    int status = begin("ncclGetVersion");
    *version = 22809;
    return end("ncclGetVersion", status);
}

int ncclGetUniqueId(fake_nccl_id* id) {
    int status = begin("ncclGetUniqueId");
    memset(id, 0, sizeof *id);
    const char* folder = getenv("TMPDIR");
    snprintf(id->bytes, sizeof id->bytes, "%.80s/fakenccl-XXXXXX", folder ? folder : P_tmpdir);
    if (!status && !mkdtemp(id->bytes)) {
        status = SYSTEM_ERROR;
    }
    return end("ncclGetUniqueId", status);
}

static int pipe_open(const char* dir, int from, int to) {
    char path[128];
    snprintf(path, sizeof path, "%s/%d-%d", dir, from, to);
    if (mkfifo(path, 0600) != 0 && errno != EEXIST) {
        return -1;
    }
    return open(path, O_RDWR | O_NONBLOCK | O_CLOEXEC);
}

static void pipes_close(communicator* c) {
    for (int i = 0; i < c->world; i++) {
        if (i != c->rank) {
            close(c->to[i]);
            close(c->from[i]);
        }
    }
}

static void mark(const char* dir, const char* name, int rank) {
    char path[128];
    snprintf(path, sizeof path, "%s/%s-%d", dir, name, rank);
    int file = open(path, O_CREAT | O_WRONLY, 0600);
    if (file >= 0) {
        close(file);
    }
}

// Whether process `rank` has left a mark; -1: any of them.
static bool marked(const communicator* c, const char* name, int rank) {
    bool any = false;
    for (int i = 0; i < c->world; i++) {
        char path[128];
        snprintf(path, sizeof path, "%s/%s-%d", c->dir, name, i);
        any = any || ((rank < 0 || i == rank) && access(path, F_OK) == 0);
    }
    return any;
}

int ncclCommInitRankConfig(void** out, int world, fake_nccl_id id, int rank, const void* config) {
    static const int undefined[] = {20, 24, 28, 40, 44};
    const char* bytes = (const char*)config;
    int status = begin("ncclCommInitRankConfig");
    size_t size = 0;
    int value = 0;
    memcpy(&size, bytes, sizeof size);
    bool good = world >= 1 && world <= WORLD && rank >= 0 && rank < world && size == 48;
    for (size_t i = 0; i < sizeof undefined / sizeof undefined[0]; i++) {
        memcpy(&value, bytes + undefined[i], sizeof value);
        good = good && value == INT_MIN;
    }
    memcpy(&value, bytes + 16, sizeof value); // blocking
    if (!status && (!good || value != 0 || id.bytes[0] != '/')) {
        status = INVALID_ARGUMENT;
    }
    if (!status) {
        communicator* c = (communicator*)calloc(1, sizeof *c);
        c->rank = rank;
        c->world = world;
        c->pending = 2;
        snprintf(c->dir, sizeof c->dir, "%.60s", id.bytes);
        for (int i = 0; i < world; i++) {
            if (i != rank) {
                c->to[i] = pipe_open(c->dir, rank, i);
                c->from[i] = pipe_open(c->dir, i, rank);
            }
        }
        mark(c->dir, "joined", rank);
        *out = c;
        status = IN_PROGRESS;
    }
    return end("ncclCommInitRankConfig", status);
}

int ncclGroupStart(void) {
    int status = begin("ncclGroupStart");
    if (!status) {
        status = open_group ? INVALID_USAGE : SUCCESS;
        open_group = true;
        now.count = 0;
    }
    return end("ncclGroupStart", status);
}

static int op_add(const char* name, const void* data, size_t bytes, int type, int peer, void* comm,
                  void* stream, bool receive) {
    int status = begin(name);
    communicator* c = (communicator*)comm;
    if (!status && (!open_group || type != 1 || bytes == 0 || peer < 0 || peer >= c->world ||
                    peer == c->rank || now.count == OPS)) {
        status = INVALID_ARGUMENT;
    }
    if (!status) {
        op* o = &now.ops[now.count++];
        o->address = (uint64_t)(uintptr_t)data;
        o->bytes = bytes;
        o->peer = peer;
        o->receive = receive;
        now.comm = c;
        now.stream = stream;
    }
    return end(name, status);
}

int ncclSend(const void* data, size_t bytes, int type, int peer, void* comm, void* stream) {
    return op_add("ncclSend", data, bytes, type, peer, comm, stream, false);
}

int ncclRecv(void* data, size_t bytes, int type, int peer, void* comm, void* stream) {
    return op_add("ncclRecv", data, bytes, type, peer, comm, stream, true);
}

// Moves what fits of the first unfinished operation of one direction; the next ones have to wait.
static bool op_move(group* g, char** data, size_t* done, int peer, bool receive) {
    for (int i = 0; i < g->count; i++) {
        op* o = &g->ops[i];
        if (o->peer != peer || o->receive != receive || done[i] == o->bytes) {
            continue;
        }
        size_t left = o->bytes - done[i];
        ssize_t n = receive ? read(g->comm->from[peer], data[i] + done[i], left)
                            : write(g->comm->to[peer], data[i] + done[i], left);
        done[i] += n > 0 ? (size_t)n : 0;
        return n > 0;
    }
    return false;
}

// The work on the stream.
static int group_run(void* ctx, const void* payload) {
    static char* data[OPS];
    static size_t done[OPS];
    group* g = (group*)malloc(sizeof *g);
    memcpy(g, payload, sizeof *g);
    int status = 0;
    size_t left = 1;
    for (int i = 0; i < g->count && !status; i++) {
        data[i] =
            (char*)inside()->resolve(ctx, g->ops[i].address, g->ops[i].bytes, g->ops[i].receive);
        done[i] = 0;
        status = data[i] ? 0 : ILLEGAL_ADDRESS;
    }
    const char* patience = getenv("FAKENCCL_WAITS"); // of 200 us or more
    int most = patience ? atoi(patience) : 300000;
    for (int waits = 0; left > 0 && !status;) {
        bool moved = false;
        bool dead = marked(g->comm, "dead", -1); // asked first: what was sent before still arrives
        for (int peer = 0; peer < g->comm->world; peer++) {
            if (peer != g->comm->rank) {
                moved = op_move(g, data, done, peer, false) || moved;
                moved = op_move(g, data, done, peer, true) || moved;
            }
        }
        left = 0;
        for (int i = 0; i < g->count; i++) {
            left += g->ops[i].bytes - done[i];
        }
        if (!moved && left > 0) {
            usleep(200);
            status = dead || ++waits > most ? LAUNCH_FAILED : 0;
        }
    }
    free(g);
    return status;
}

int ncclGroupEnd(void) {
    void* ctx = NULL;
    int status = begin("ncclGroupEnd");
    open_group = false;
    if (!status && now.count > 0) {
        status = inside()->current(&ctx) ||
                         inside()->submit(ctx, now.stream, group_run, &now, sizeof now)
                     ? SYSTEM_ERROR
                     : IN_PROGRESS;
        now.comm->pending = 1;
    }
    return end("ncclGroupEnd", status);
}

int ncclCommGetAsyncError(void* comm, int* state) {
    communicator* c = (communicator*)comm;
    int status = begin("ncclCommGetAsyncError");
    bool all = true; // a communicator is ready when all processes have joined
    for (int i = 0; i < c->world; i++) {
        all = all && marked(c, "joined", i);
    }
    *state = c->pending > 0 || !all ? IN_PROGRESS : SUCCESS;
    c->pending -= c->pending > 0 ? 1 : 0;
    return end("ncclCommGetAsyncError", status);
}

int ncclCommFinalize(void* comm) {
    int status = begin("ncclCommFinalize");
    ((communicator*)comm)->pending = 1;
    return end("ncclCommFinalize", status ? status : IN_PROGRESS);
}

static int drop(const char* name, void* comm, bool aborted) {
    communicator* c = (communicator*)comm;
    int status = begin(name);
    if (aborted) {
        mark(c->dir, "dead", c->rank);
    }
    pipes_close(c);
    free(c);
    return end(name, status);
}

int ncclCommDestroy(void* comm) {
    return drop("ncclCommDestroy", comm, false);
}

int ncclCommAbort(void* comm) {
    return drop("ncclCommAbort", comm, true);
}

const char* ncclGetErrorString(int code) {
    return code == 0 ? "no error" : "fake error";
}

const char* ncclGetLastError(void* comm) {
    (void)comm;
    return "";
}
