// mpi_hang.c - stands between finetune and a real MPI library, for use_mpi.sh: rank 1 hangs when it
// sends its third message of one byte to another rank, which says that it waits for rank 0.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int MPI_Isend(const void* data, int count, uintptr_t type, int to, int tag, uintptr_t comm,
              uintptr_t* request);
int MPI_Isend(const void* data, int count, uintptr_t type, int to, int tag, uintptr_t comm,
              uintptr_t* request) {
    static int seen;
    int (*next)(const void*, int, uintptr_t, int, int, uintptr_t, uintptr_t*);
    void* symbol = dlsym(RTLD_NEXT, "MPI_Isend");
    const char* rank = getenv("OMPI_COMM_WORLD_RANK");
    memcpy(&next, &symbol, sizeof symbol);
    if (rank != NULL && strcmp(rank, "1") == 0 && count == 1 && ++seen == 3) {
        for (;;) {
            pause();
        }
    }
    return next(data, count, type, to, tag, comm, request);
}
