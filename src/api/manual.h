/* qlora.h - v0.1.0 - QLoRA fine-tuning of language models from C - SPDX: MIT-0 OR Unlicense

   Do this in ONE C or C++ file:

       #define QLORA_IMPLEMENTATION
       #include "qlora.h"

   and include "qlora.h" without the macro everywhere else. kernels_ptx.h must lie beside qlora.h.
   Link with -ldl -lm -lpthread on Linux, with nothing more on Windows.

   CONTENTS  (grep -n '^//@@' qlora.h lists every part)

       api        declarations: results, descs, tensors, cache, GEMM, operators, graphs, models
       platform   dynamic libraries, threads, clock, files; the only place with _WIN32
       core       errors, log, memory, checked arithmetic, CPU threads, random numbers
       numbers    16-bit floating point, element access, NF4
       formats    JSON, safetensors, Hugging Face folders, PEFT adapters, GGUF adapters
       driver     CUDA driver and cuBLAS: symbols, device facts, error names
       tensor     memory, tensors, copies and fills on the context's stream
       cache      kernel registry, PTX for a target, modules, seal, launch
       context    creation, backend choice, stream, native handles, description
       cpu        CPU loops of the matrix products
       gemm       the GEMM family, dense and NF4: cuBLAS, our PTX, CPU
       ops        operators: the formula, the CPU loop, the launch; pre-warm
       graph      capture, replay, invalidation
       model      plan, arena, weights, layers forward and backward, on both backends
       adapter    PEFT folders saved, merged export, GGUF export
       train      micro-step, update, schedules, evaluation, checkpoints
       generate   decoding with a key/value cache

   This file is assembled from the parts in src/ of the repository; changes are made there.

   QUICK START

       qlora_ctx_desc desc = {0};                 // zero means "the default" everywhere
       char why[256] = "";
       desc.error_text = why;                     // where creation says what went wrong
       desc.error_text_size = sizeof why;
       desc.log = qlora_log_stderr;
       qlora_ctx* ctx = NULL;
       if (qlora_ctx_create(&desc, &ctx) != QLORA_OK) { puts(why); return 1; }
       ...
       qlora_ctx_destroy(ctx);

   BUILD AND LINK
       C99 or C++11, 64-bit, little endian. Linux, macOS and BSD (CPU only there), Windows
       (mingw-w64, MSVC). Give the implementation its own file: it takes about ten seconds at
       -O2. Include it before any system header there, or build with -D_POSIX_C_SOURCE=200809L.

   CONFIGURATION (define before the implementation; none of them changes a public type)
       QLORA_STATIC          every function is static: a private copy for one file
       QLORA_DLL             mark functions for a shared library
       QLORA_NO_CUDA         leave the GPU out: no dynamic loading, no kernels_ptx.h
       QLORA_NO_MODEL        leave out model, trainer and file formats: the bare runtime
       QLORA_ASSERT(x)       our own invariants only; never files, arguments or devices
       QLORA_KERNELS_HEADER  another name for "kernels_ptx.h"
       QLORA_PTX_NO_F32 ...  leave out a group of kernels: kernels_ptx.h lists groups and sizes. A
                             call that needs one fails and names the macro; no slower kernel is
                             used instead. QLORA_NO_MODEL alone leaves out none, since every kernel
                             belongs to an operator of the runtime
       QLORA_DEBUG           synchronise after every launch, so that a fault names its kernel

   ERRORS
       Every call that can fail returns a qlora_result and writes its outputs only on success.
       qlora_last_error(ctx) says what, where and what to do; it is never NULL, "" after a
       successful call, and valid until the next call on that context. The library never exits,
       aborts or prints. After a fault on the device (an illegal address, say) CUDA makes every
       later call of that CUDA context fail: such a qlora_ctx answers QLORA_ERR_DEVICE_LOST and can
       only be destroyed. A destroy or close that returns an error has freed nothing: repeat it.

   MEMORY
       Host memory goes through desc.allocator, device memory through desc.device_allocator. The
       operators allocate nothing: what they need lies in a scratch of desc.scratch_bytes made at
       creation. A tensor is a small struct that points at memory; qlora_tensor_create allocates,
       qlora_tensor_wrap and qlora_tensor_view do not.

   THREADS
       A context and everything made from it is used by one thread at a time; different contexts are
       independent. Log and allocator callbacks may come from any thread and must not call back.

   LOG
       Silent unless desc.log is set; qlora_log_stderr is supplied.

   DEVICES AND FALLBACK
       CUDA when it is usable (compute capability 7.5 or newer), else the CPU. qlora_ctx_backend
       tells which, qlora_ctx_reason why; desc.require_backend turns the fallback into an error. The
       device's primary context is used unless desc.cu_context is given; it is current only inside
       our calls.

   NUMERICS
       Same inputs, same bytes: no float atomics, one writer per output, fixed order of summation,
       choices from committed tables and the context's settings, on the same device, driver and
       cuBLAS. The CPU's results do not depend on the number of threads. F32 is exact fp32 (TF32
       off) unless desc.math says otherwise; 16-bit operands accumulate in fp32. Built with
       -ffast-math the CPU results are unspecified.

   LIMITS
       Rows, columns and leading dimensions of a GEMM fit in 31 bits; buffers in 63.

   QLORA DOES NOT
       pre-train, distribute over several GPUs, run mixtures of experts or vision towers, or use the
       network.
*/
