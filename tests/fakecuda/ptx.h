// ptx.h - a PTX interpreter: runs the kernels that qlora.h ships on any machine.
//
// It executes warps in lock step with 32-lane registers, checks every memory access for bounds and
// alignment, fills registers and shared memory with poison, and rejects every instruction form that
// it does not support. Only tests use it. One module or launch at a time per thread; no
// global state.
#ifndef FAKECUDA_PTX_H
#define FAKECUDA_PTX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ptx_module ptx_module;
typedef struct ptx_kernel ptx_kernel;

typedef enum ptx_order {
    PTX_ORDER_FORWARD, // warps of a block, and blocks of a grid, in ascending order
    PTX_ORDER_REVERSE,
    PTX_ORDER_RANDOM // reshuffled at every turn, from ptx_env.seed
} ptx_order;

// What the interpreter needs from its environment.
typedef struct ptx_env {
    // Maps [address, address + bytes) of the device's global space to host memory, or returns NULL
    // if that range is not inside one live allocation. Module-scope variables (.const, .global)
    // belong to the interpreter and are never passed to this function.
    void* (*resolve)(void* user, uint64_t address, size_t bytes, bool write);
    void* user;
    ptx_order order;
    uint64_t seed;
    uint64_t max_steps; // warp instructions before a launch counts as hung; 0 = no limit
    // The kernel may begin before the one before it has ended: every thread has to execute
    // griddepcontrol.wait, and may write to no global memory before.
    bool early;
    // A cooperative launch: all blocks are resident, and take turns where one waits for another
    // with ld.acquire or ld.relaxed.
    bool together;
    // If set, called for every access to global memory; false if the kernel before may still write
    // there. `waited`: after griddepcontrol.wait, or there is nothing to wait for.
    bool (*watch)(void* user, uint64_t address, size_t bytes, bool write, bool waited);
    // If set, called for every access to global memory, also those of bulk copies.
    void (*touch)(void* user, uint64_t address, size_t bytes, bool write);
} ptx_env;

typedef struct ptx_kernel_info {
    const char* name;
    uint32_t params;        // number of parameters
    uint32_t static_shared; // bytes
    uint32_t max_threads;   // from .maxntid, 0 if absent
} ptx_kernel_info;

// A tensor map of the fake driver, in place of the opaque 128 bytes of cuTensorMapEncodeTiled: a
// matrix of size[1] rows of size[0] elements, copied in boxes with the 128-byte swizzle.
#define PTX_TENSOR_MAP_BYTES 128
#define PTX_TENSOR_MAP_MAGIC 0x70616d726f736e65u

typedef struct ptx_tensor_map {
    uint64_t magic;
    uint64_t base;
    uint64_t size[2];
    uint64_t stride; // bytes between rows
    uint32_t box[2];
    uint32_t element; // bytes
} ptx_tensor_map;

typedef struct ptx_stats {
    uint64_t warp_instructions;
    uint64_t lane_instructions;
    uint64_t mma;
} ptx_stats;

// Parses a whole module. On failure, returns NULL and writes "line N: reason" to log.
ptx_module* ptx_load(const char* text, char* log, size_t log_size);
void ptx_free(ptx_module* module);

// "7.0" -> 70, "sm_90a" -> text; both as declared in the module.
int ptx_version(const ptx_module* module);
const char* ptx_target(const ptx_module* module);

size_t ptx_kernel_count(const ptx_module* module);
const ptx_kernel* ptx_kernel_at(const ptx_module* module, size_t index);
const ptx_kernel* ptx_find(const ptx_module* module, const char* name);
ptx_kernel_info ptx_describe(const ptx_kernel* kernel);
// Byte size of parameter i, 0 if there is none.
size_t ptx_param_size(const ptx_kernel* kernel, uint32_t index);

typedef enum ptx_result {
    PTX_OK = 0,
    PTX_TRAP_ADDRESS,    // outside every allocation, or past the end of shared or local memory
    PTX_TRAP_MISALIGNED, // address not a multiple of the access size
    PTX_TRAP_SYNC,       // barrier or warp-synchronous instruction that can never complete
    PTX_TRAP_HANG,       // max_steps reached
    PTX_TRAP_OTHER       // an instruction that cannot be executed as written
} ptx_result;

// args[i] points to the value of parameter i, as in cuLaunchKernel's kernelParams. On a trap,
// `trap` describes what happened, with the PTX line, block and thread.
ptx_result ptx_launch(const ptx_kernel* kernel, const ptx_env* env, const uint32_t grid[3],
                      const uint32_t block[3], uint32_t dynamic_shared, void* const* args,
                      ptx_stats* stats, char* trap, size_t trap_size);

#ifdef __cplusplus
}
#endif

#endif
