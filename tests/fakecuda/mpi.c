// mpi.c - the test double that qlora.h loads as an MPI library, with the interface of MPICH: one
// process that believes to be rank 0 of 2. What it sends to rank 1 comes back to it.
//
// fakempi_fail(call, code) makes the next call of that name fail; NULL: none. fakempi_late(n) lets
// a message arrive at the n-th test.
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// clang-format off
#define FAKE_MPI_FUNCTIONS(X)                                                                      \
    X(Init_thread, (int* count, char*** values, int required, int* provided))                      \
    X(Initialized, (int* flag))                                                                    \
    X(Finalized, (int* flag))                                                                      \
    X(Finalize, (void))                                                                            \
    X(Get_library_version, (char* text, int* length))                                              \
    X(Comm_rank, (int comm, int* rank))                                                            \
    X(Comm_size, (int comm, int* size))                                                            \
    X(Comm_set_errhandler, (int comm, int handler))                                                \
    X(Isend, (const void* data, int bytes, int type, int peer, int tag, int comm, int* request))   \
    X(Irecv, (void* data, int bytes, int type, int peer, int tag, int comm, int* request))         \
    X(Test, (int* request, int* flag, void* status))                                               \
    X(Abort, (int comm, int code))                                                                 \
    X(Error_string, (int code, char* text, int* length))
// clang-format on

#define FAKE_MPI_PROTOTYPE(name, args) int MPI_##name args;
FAKE_MPI_FUNCTIONS(FAKE_MPI_PROTOTYPE)
void fakempi_fail(const char* call, int code);
void fakempi_late(int tests);
int fakempi_calls(const char* call);

enum { WORLD = 0x44000000, BYTE = 0x4c00010d, RETURNS = 0x54000001, SLOTS = 64, INVALID = 12 };

typedef struct message {
    char* data;  // sent
    void* place; // where a received one goes
    int bytes;
    bool used;
} message;

static message sent[SLOTS];
static message wanted[SLOTS];
static const char* fails;
static int fails_code;
static int late;
static int tests;
static int aborts;
static bool initialized;
static bool finalized;
static bool early; // a call that is not allowed before the start

void fakempi_fail(const char* call, int code) {
    fails = call;
    fails_code = code;
    initialized = false; // as in a new process
    for (int i = 0; i < SLOTS; i++) { // what an exchange that failed has left behind
        if (sent[i].used) {
            free(sent[i].data);
        }
        sent[i].used = false;
        wanted[i].used = false;
    }
}

void fakempi_late(int n) {
    late = n;
}

int fakempi_calls(const char* call) {
    return strcmp(call, "Abort") == 0      ? aborts
           : strcmp(call, "Finalize") == 0 ? finalized
                                           : early;
}

static int begin(const char* name) {
    bool hit = fails != NULL && strcmp(fails, name) == 0;
    fails = hit ? NULL : fails;
    return hit ? fails_code : 0;
}

int MPI_Init_thread(int* count, char*** values, int required, int* provided) {
    int code = begin("Init_thread");
    (void)count;
    (void)values;
    *provided = required;
    initialized = initialized || code == 0;
    return code;
}

int MPI_Initialized(int* flag) {
    *flag = initialized;
    return begin("Initialized");
}

int MPI_Finalized(int* flag) {
    *flag = 0; // each provider of a test is finalised
    return begin("Finalized");
}

int MPI_Finalize(void) {
    finalized = true;
    initialized = false;
    return begin("Finalize");
}

int MPI_Get_library_version(char* text, int* length) {
    *length = sprintf(text, "MPICH Version: fake");
    return begin("Get_library_version");
}

int MPI_Comm_rank(int comm, int* rank) {
    *rank = 0;
    return comm == WORLD ? begin("Comm_rank") : INVALID;
}

int MPI_Comm_size(int comm, int* size) {
    *size = 2;
    return comm == WORLD ? begin("Comm_size") : INVALID;
}

int MPI_Comm_set_errhandler(int comm, int handler) {
    return comm == WORLD && handler == RETURNS ? begin("Comm_set_errhandler") : INVALID;
}

static int slot_take(message* list, int* request, int first) {
    for (int i = 0; i < SLOTS; i++) {
        if (!list[i].used) {
            memset(&list[i], 0, sizeof list[i]);
            list[i].used = true;
            *request = first + i;
            return i;
        }
    }
    return -1;
}

int MPI_Isend(const void* data, int bytes, int type, int peer, int tag, int comm, int* request) {
    int code = begin("Isend");
    (void)tag;
    if (code != 0 || type != BYTE || peer != 1 || comm != WORLD) {
        return code != 0 ? code : INVALID;
    }
    int i = slot_take(sent, request, 1);
    if (i < 0) {
        return INVALID;
    }
    sent[i].data = (char*)malloc((size_t)bytes);
    sent[i].bytes = bytes;
    memcpy(sent[i].data, data, (size_t)bytes);
    tests = 0;
    return 0;
}

int MPI_Irecv(void* data, int bytes, int type, int peer, int tag, int comm, int* request) {
    int code = begin("Irecv");
    (void)tag;
    if (code != 0 || type != BYTE || peer != 1 || comm != WORLD) {
        return code != 0 ? code : INVALID;
    }
    int i = slot_take(wanted, request, 1 + SLOTS);
    if (i < 0) {
        return INVALID;
    }
    wanted[i].place = data;
    wanted[i].bytes = bytes;
    return 0;
}

int MPI_Test(int* request, int* flag, void* status) {
    int code = begin("Test");
    *flag = 0;
    if (code != 0 || status != (void*)1) {
        return code != 0 ? code : INVALID;
    }
    if (*request <= SLOTS) { // a send ends when it is received
        *flag = sent[*request - 1].used ? 0 : 1;
        return 0;
    }
    message* to = &wanted[*request - 1 - SLOTS];
    for (int i = 0; i < SLOTS && ++tests > late && *flag == 0; i++) {
        if (sent[i].used && sent[i].bytes == to->bytes) {
            memcpy(to->place, sent[i].data, (size_t)to->bytes);
            free(sent[i].data);
            sent[i].used = false;
            to->used = false;
            *flag = 1;
        }
    }
    return 0;
}

int MPI_Abort(int comm, int code) {
    aborts++;
    return comm == WORLD && code != 0 ? begin("Abort") : INVALID;
}

int MPI_Error_string(int code, char* text, int* length) {
    early = early || !initialized; // Open MPI ends the process
    *length = sprintf(text, "fake error %d", code);
    return begin("Error_string");
}
