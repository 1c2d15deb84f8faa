// early.cuh - kernels that begin before the one before them has ended (compute capability 9.0).
//
// Launched with the attribute that allows it, a block may start while the kernel before still runs.
// Up to early_wait, it may read only what no kernel of the same graph writes, and write nothing but
// shared memory. Every thread calls early_wait, also if it has nothing to do: a kernel may then
// rely on the end of all kernels before it, not only of the last one. Other devices, and launches
// without the attribute, wait before a block starts; there, both calls are nothing but a comment,
// at which tools/embed cuts the text: what lies between is the same for all targets and is stored
// once.
#ifndef QLORA_EARLY_CUH
#define QLORA_EARLY_CUH

// The next kernel may start as soon as every block has come here; it waits for what it needs.
__device__ __forceinline__ void early_next() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#else
    asm volatile("// early" ::: "memory");
#endif
}

__device__ __forceinline__ void early_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#else
    asm volatile("// early" ::: "memory");
#endif
}

#endif
