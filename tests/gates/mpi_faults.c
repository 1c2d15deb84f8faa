// mpi_faults.c - stands between finetune and a real MPI library, for use_mpi.sh: MPI_FAULT=CALL:N:R
// makes call number N of that name fail in rank R. Linked with that library, so that everything
// else is found in it.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// clang-format off
#define FUNCTIONS(X)                                                                               \
    X(Init_thread, (int* a, char*** b, int c, int* d), (a, b, c, d))                               \
    X(Initialized, (int* a), (a))                                                                  \
    X(Comm_rank, (uintptr_t a, int* b), (a, b))                                                    \
    X(Comm_size, (uintptr_t a, int* b), (a, b))                                                    \
    X(Comm_set_errhandler, (uintptr_t a, uintptr_t b), (a, b))                                     \
    X(Isend, (const void* a, int b, uintptr_t c, int d, int e, uintptr_t f, uintptr_t* g),         \
      (a, b, c, d, e, f, g))                                                                       \
    X(Irecv, (void* a, int b, uintptr_t c, int d, int e, uintptr_t f, uintptr_t* g),               \
      (a, b, c, d, e, f, g))                                                                       \
    X(Test, (uintptr_t* a, int* b, void* c), (a, b, c))                                            \
    X(Finalized, (int* a), (a))                                                                    \
    X(Finalize, (void), ())
// clang-format on

// Whether this call is the one that fails. `count` is that of its name.
static int fault(const char* name, int* count) {
    char call[32] = "";
    int number = 0;
    int rank = 0;
    const char* wish = getenv("MPI_FAULT");
    const char* here = getenv("OMPI_COMM_WORLD_RANK");
    return wish != NULL && here != NULL &&
           sscanf(wish, "%31[^:]:%d:%d", call, &number, &rank) == 3 && strcmp(call, name) == 0 &&
           atoi(here) == rank && ++*count == number;
}

#define DEFINE(name, parameters, arguments)                                                        \
    int MPI_##name parameters;                                                                     \
    int MPI_##name parameters {                                                                    \
        static int count;                                                                          \
        int(*next) parameters;                                                                     \
        void* symbol = dlsym(RTLD_NEXT, "MPI_" #name);                                             \
        memcpy(&next, &symbol, sizeof symbol);                                                     \
        return fault(#name, &count) ? 15 : next arguments;                                         \
    }
FUNCTIONS(DEFINE)
