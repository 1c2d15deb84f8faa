/* qlora.h - v0.3.0-dev - QLoRA fine-tuning of language models from C - SPDX: MIT-0 OR Unlicense

   Do this in ONE C or C++ file:

       #define QLORA_IMPLEMENTATION
       #include "qlora.h"

   and include "qlora.h" without the macro everywhere else. Keep kernels_ptx.h in the same folder.
   Link with -ldl -lm -lpthread on Linux and with nothing else on Windows. qlora_text.h next to it
   is the tokenizer, the chat formats and the data files.

   CONTENTS  (grep -n '^//@@' qlora.h lists every part)

       api        declarations: context, models, training, generation, adapters, then the runtime
       platform   dynamic libraries, threads, clock, files; the only place with _WIN32
       core       errors, log, memory, checked arithmetic, CPU threads, random numbers
       numbers    16-bit floating point, element access, NF4
       cpu        CPU tiers: detection, kernels for each, matrix products
       arch       the description of a block, one row per family of models
       formats    JSON, GGUF, safetensors, Hugging Face folders, PEFT and GGUF adapters
       driver     CUDA driver and cuBLAS: symbols, device facts, error names
       tensor     memory, tensors, copies and fills on the context's stream, staging
       cache      kernel registry, PTX for a target, modules, seal, launch
       context    creation, backend choice, stream, native handles, description
       gemm       the GEMM family, dense and NF4: cuBLAS, our PTX, CPU
       ops        operators: the formula, the CPU loop, the launch; pre-warm
       graph      capture, replay, invalidation
       model      plan, arena, weights, layers forward and backward, evaluation
       adapter    PEFT folders, copies between models, merged export, GGUF export
       trainer    state of a trainer, partial sums of a step, what its results depend on
       comm       several processes: shares of a step, their sum, providers
       train      steps, slices, schedules, checkpoints
       generate   decoding with a key/value cache, one token per call or in slices

   This file is assembled from the parts in src/ of the repository; changes are made there.

   QUICK START

       qlora_ctx_desc machine = {0};              // zero means "the default" everywhere
       qlora_model_desc what = {0};
       qlora_train_desc how = {0};
       machine.log = qlora_log_stderr;
       what.dir = "path/to/model";                // Hugging Face format
       what.tokens = 2048;                        // per micro-batch
       what.generate_tokens = 256;
       how.lr = 2e-4;

       qlora_ctx* ctx; qlora_model* model; qlora_trainer* trainer; qlora_train_info info;
       qlora_ctx_create(&machine, &ctx);          // a GPU if there is one, otherwise the CPU
       qlora_model_open(ctx, &what, &model);      // plans the memory, loads, quantises to 4 bits
       qlora_trainer_create(model, &how, &trainer);
       for (int step = 0; step < steps; step++) {
           qlora_train_step(trainer, batches, count, &info);
           printf("loss %g\n", info.loss);
       }
       qlora_adapter_save(model, "adapter", NULL); // PEFT loads this folder
       qlora_trainer_destroy(trainer);
       qlora_model_close(model);
       qlora_ctx_destroy(ctx);

     Every call returns a qlora_result, which a program checks. In a game loop, replace
     qlora_train_step by qlora_train_begin and one qlora_train_slice(trainer, 4.0, &done) per frame;
     qlora_generate_begin and qlora_generate_next produce one token per call, and
     qlora_generate_prompt continues a chat without computing its earlier turns again.

   BUILD AND LINK
       C99 or C++11, 64-bit, little endian. Linux, Windows (mingw-w64, MSVC), macOS and BSD (CPU
       only). Put the implementation in a file of its own: it takes 10 to 40 seconds to compile at
       -O2. Include it before any system header there, or build with -D_POSIX_C_SOURCE=200809L.

   CONFIGURATION (define before the implementation; none of them changes a public type)
       QLORA_STATIC          make every function static: a private copy for one file
       QLORA_DLL             mark functions for a shared library
       QLORA_NO_CUDA         leave out the GPU: no dynamic loading, no kernels_ptx.h
       QLORA_NO_MODEL        leave out models, training and file formats: the bare runtime
       QLORA_NO_TRAIN        leave out trainers and several processes: QLORA_PURPOSE_TRAIN is
                             refused by name. Operators stay, their kernels with QLORA_PTX_NO_TRAIN
                             do not
       QLORA_NO_GENERATE     leave out generation: generate_tokens is refused by name
       QLORA_NO_MERGE        leave out qlora_merge_save
       QLORA_NO_GGUF         leave out GGUF files: a path of one is refused by name
       QLORA_NO_COMM         leave out training with several processes
       QLORA_NO_SIMD         leave out the CPU kernels for NEON, AVX2, AVX-512, AMX
       QLORA_PTX_NO_BF16 ... leave out groups of GPU kernels; kernels_ptx.h lists them with sizes
       QLORA_ASSERT(x)       checks our own invariants only; never files, arguments or devices
       QLORA_KERNELS_HEADER  another name for "kernels_ptx.h", which may be packed (make ptx-packed)
       QLORA_DEBUG           synchronise after every launch, so that a fault names its kernel

   OBJECTS
       qlora_ctx (device, memory hooks, error text) -> qlora_model (base, adapters, memory) ->
       qlora_trainer (optimizer, graphs) and qlora_generation (one text). Children are destroyed
       first; destroying a parent that still has children fails, names them, and frees nothing.
       A setting belongs to the object that uses it: the machine to the context, weights, memory and
       the format of the moments to the model, learning rate and schedule to the trainer.
       qlora_ctx_create compares the version and the struct sizes of this header with those of the
       implementation.

   ERRORS
       Every call that can fail returns a qlora_result and writes its outputs only on success.
       qlora_last_error(ctx) explains what failed, where, and what to do; it is never NULL, is ""
       after a successful call, and stays valid until the next call on that context. The library
       never exits, aborts or prints. After a fault on the device (an illegal address, for example),
       CUDA makes every later call in that CUDA context fail: such a qlora_ctx returns
       QLORA_ERR_DEVICE_LOST and can only be destroyed. A destroy or close that returns an error has
       freed nothing; call it again.

   MEMORY
       Host memory goes through desc.allocator, device memory through desc.device_allocator. A model
       allocates everything when it is opened, and a trainer when it is created; steps, evaluation
       and generation allocate no device memory, except a step of more micro-batches than
       desc.accumulate of the model for its partial sums. On the CPU, the first slice of a context
       starts a thread and uses the memory of the context, as a whole step does. Only what is
       computed in the middle of it (another model, an operator, something else in slices)
       allocates qlora_plan.context once more, which no plan counts, and keeps it for the next time.
       The operators use a scratch buffer of desc.scratch_bytes that is allocated with the context.
       A tensor is a small struct that points to memory; qlora_tensor_create allocates,
       qlora_tensor_wrap and qlora_tensor_view do not.

   TIME
       A step can be taken whole, by halves (micro, update) or in slices of a few milliseconds, with
       the same bits each way; an evaluation and a generated token whole or in slices.
       qlora_train_query waits for the last step, qlora_train_poll never waits. Long calls take a
       progress function that can stop them.

   THREADS
       A context and everything created from it must be used by one thread at a time; different
       contexts are independent. Log and allocator callbacks may come from any thread and must not
       call back. Whatever rounding, subnormal numbers as zero or traps the caller has set, calls
       compute and call back with the defaults, and then restore what they found.

   LOG
       Silent unless desc.log is set; qlora_log_stderr is supplied.

   DEVICES AND FALLBACK
       CUDA when it is usable (compute capability 7.5 or later), otherwise the CPU.
       qlora_ctx_backend returns which, qlora_ctx_reason why; desc.require_backend turns the
       fallback into an error, and so does naming a device other than 0 or a CUDA handle. The
       device's primary context is used unless desc.cu_context is given; it is current only inside
       our calls.

   NUMERICS
       Deterministic: no float atomics, one writer per output, a fixed order of summation, choices
       from committed tables and the context's settings. The same inputs give the same bytes on the
       same device, driver and cuBLAS with the same QLORA_GPU_TARGET, and on the CPU with the same
       tier for any number of threads; the micro-batches of a step are summed in a fixed tree, so
       the bytes do not depend on the number of processes either. Tiers (qlora_cpu_tier) differ from
       each other by rounding, and those with vectors compute e^x by a polynomial (at most 1.1 units
       in the last place). F32 is exact fp32 unless the context's math asks for TF32, which a model
       adopts when it is opened; 16-bit operands accumulate in fp32. 4-bit and FP8 weights are
       dequantised to bf16 values in every mode, as bitsandbytes does, except in mode FP8. Built
       with -ffast-math, the CPU results are unspecified.

       Mode BF16 on the CPU rounds both operands of products with weights to the nearest bf16 while
       they are packed: those of projections, adapters and the head, forward and backward. Sums,
       and everything else, are fp32, and so is what is stored. Products of at most eight rows, as
       in decoding, may take their operands as they are. Every tier has the mode, but only
       neon_bf16, avx512_bf16 and amx have instructions for it, which take numbers below 2^-126 for
       zero; amx adds the products of even and of odd k apart, 32 k at a time. In mode F32,
       neon_bf16 has the bits of neon, and avx512_bf16 and amx have those of avx512. qlora_gemm of
       two bf16 matrices also uses these instructions. For amx, a context asks Linux once for
       permission to use the tiles (arch_prctl), as every process must.

       After the attention of the last layer, only rows with a label are needed: o_proj and MLP of
       that layer, the final norm and the head compute no others, in training and for the losses of
       qlora_eval and qlora_eval_sequences. On the GPU, their number is rounded up to whole chunks
       of the head (the plan's head_chunk), or to multiples of several chunks, so that there are at
       most eight sizes; if that is not less than the rows of the pass, all are computed. A row has
       the same dropout mask and, up to the rounding of products with another number of rows, the
       same values either way. The gradients of the last layer's o, gate, up and down, and of the
       norms after its attention, are sums over fewer rows, in another order. How many rows are
       computed depends on the labels of the micro-batch and, on the GPU, on desc.tokens and the
       plan's head_chunk. Models with tiles compute all rows, and so do those with several adapters
       on the GPU.

   TEXTS
       A model generates up to generate_sequences texts at a time, each with its own prompt,
       settings, seed and adapter; qlora_generate_next_each has the bits of one text at a time. A
       prompt with more tokens than a micro-batch is computed in pieces of that size, each over the
       keys and values of those before; up to rounding, the text is the same as with larger
       micro-batches. A text of more than generate_tokens tokens is refused, and so is a
       generate_tokens larger than max_positions. Texts can share a prompt
       (qlora_generate_desc.share), and a chat keeps its keys and values from turn to turn
       (qlora_generate_prompt).
       Without generate_positions, the cache has room for generate_sequences texts of
       generate_tokens tokens. With it, the texts share a pool of that many positions, in pages of
       16 positions or more, and one page more; where steps run on the device, pages have 128 or a
       multiple of it, and a text that shares its whole prompt uses the full pages of that prompt.
       When a turn begins (qlora_generate_begin, _feed, _prompt), the text reserves the pages for
       its tokens and max_tokens more (0: up to generate_tokens), less those that it shares. So a
       turn that has begun can always finish, and no text is ever removed for another one. If
       too few pages are free, the call returns QLORA_ERR_FULL and nothing has changed: call it
       again when another text has ended or begun a shorter turn. A text that would not fit an empty
       pool is refused with QLORA_ERR_ARGUMENT. qlora_model_info.free_positions is what is free.
       Pages may be moved to make room, but the bits are those of a model without a pool.

   LONGROPE
       A model with longrope (Phi 3) has two sets of rotary factors: one for texts of up to
       original_max_position tokens, one for longer ones. As in transformers, the length of a text
       alone decides, in training, in evaluation and in generation, whatever other texts the batch
       has and whatever lengths the model was opened for. A text that is generated and outgrows the
       first set is computed again from its first token, as transformers does it: that token takes
       as long as a prompt of that length, and the keys and values of the shorter text are not kept.
       A text takes keys and values from another one, or from its own previous prompt, only if both
       have the same set. With generate_positions, a text that can outgrow the first set in its turn
       shares no pages.

   SEVERAL ADAPTERS
       With desc.slots, a model has several adapters on one base, each with its own rank, scale and
       seed, its own trainer (desc.adapter: learning rate, schedule, clip, checkpoints) and its own
       files (qlora_adapter_select). qlora_train_step_each runs a step of all of them in one pass
       over the base: batch.adapters names the adapter of each sequence. Sums, norms and losses are
       those of each adapter; one that has finished is given no more sequences. Texts of several
       adapters can be generated at the same time (qlora_generate_desc.adapter). On the GPU, the
       adapters are stored side by side: every product runs once, over the rows of all adapters, as
       if they were one whose rank is the sum of their ranks, and the part of a row that belongs to
       other adapters is set to zero.
       Steps are graphs. A sum of ranks that is more than 128 and more than an eighth of the hidden
       size would cost more than it saves: then, and always on the CPU, the rows of each adapter are
       computed separately, without graphs. An adapter's values do not depend on the tokens of the
       others. On the CPU it has the bits of a training of its own with the same micro-batches, if
       its sequences are next to each other in every micro-batch and there are no tiles. On the GPU
       it has the same bits whatever tokens the others have and whichever of the others they belong
       to, if the model has the same slots and sizes, and its own sequences have the same places in
       the micro-batches, with as many labels before them; alone, or next to other ranks, it differs
       by rounding. (Computed separately, the sequences around its own must have the same lengths.)
       If the activations of one adapter are not finite, its update is skipped (last_skipped), and
       the others have the bits they would have had otherwise. Parameters that are not finite, from
       a file or written by the program, spoil all adapters that are stored side by side. Dropout,
       NEFTune, DoRA, trained norms, embeddings and rows, DPO and KTO, FP8 and several processes
       need a model with one adapter.

   FP8
       Two things, which do not need each other.
       QLORA_BASE_FP8 stores the frozen weights in e4m3, with one f32 scale per block of 128 x 128
       (its largest magnitude / 448): twice the memory of NF4 and less than a third of its error
       (2.7% of a normally distributed weight instead of 9.2%). Published FP8 folders of this form
       (quant_method fp8, fmt e4m3, weight_block_size [128, 128], activation_scheme dynamic;
       NAME.weight with NAME.weight_scale_inv) are read as they are, whatever desc.base is; any
       other setting of their quantization_config is refused by name, and so is a NaN. Products
       dequantise to bf16 values, on the CPU while they pack; generating reads the weights through
       such a copy as well, so with 16-bit copies (cache) or NF4 it is faster on a GPU.
       QLORA_MODE_FP8 is BF16 with faster products of 4-bit or FP8 weights: cuBLASLt (12.9 or later)
       multiplies e4m3 numbers, with one scale per token and one per stack of weights (q, k and v;
       gate and up). Adapters, embedding, head, norms, attention and loss stay as in BF16, and so
       does a token that is generated. It is approximate and never chosen automatically: one
       product is about 3.5% away from the exact one; on 24 small models, the losses of 20 steps
       were within 2.5% of those in fp32, and their means within 0.3%. Adapters of SmolLM2-135M
       trained in FP8 on gsm8k had a held-out loss 1.1% above those trained in BF16, evaluated in
       BF16, and 1.3% evaluated in FP8 (docs/fp8.md). DoRA is refused. It needs compute capability
       9.0, 4-bit or FP8 weights and widths that are multiples of 8 (intermediate: 4); FP8 weights
       are rounded once more, to the scale of their stack. The CPU computes the same products in
       fp32 as a slow reference.

   LIMITS
       Rows, columns and leading dimensions of a GEMM fit in 31 bits; buffers in 63.

   MODELS
       Folders of Llama, Mistral, Qwen 2, 2.5 and 3, Gemma 1, 2 and 3, Phi 3, 3.5 and 4, SmolLM3,
       OLMo 2 and 3, Granite 3 and those of Granite 4 without recurrent layers, GLM 4 (glm and
       glm4), Ministral 3, EXAONE 4, Seed-OSS, Arcee, Cohere 2, and the text part of Gemma 3,
       Mistral 3, Qwen 2.5 VL and Qwen 3 VL folders with a vision part. On the CPU also Mixtral,
       Qwen 2 and 3 with experts, OLMoE, Granite 3 with experts and GLM 4.5. Others are refused
       with the reason. src/arch.h has one row for each. Gemma always uses the tanh form of GELU;
       the dropout of a base model is never applied.

   QLORA DOES NOT
       pre-train, divide one model between several GPUs, run mixtures of experts on a GPU or vision
       towers, or open network connections itself (NCCL and MPI do).
*/

#if !defined(__cplusplus) && (!defined(__STDC_VERSION__) || __STDC_VERSION__ < 199901L) &&         \
    !defined(_MSC_VER)
#error "qlora.h needs C99 or C++11: compile with -std=c99 or later"
#include <stop> /* there is no such file: the compiler stops here */
#endif
