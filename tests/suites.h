// suites.h - all suites in the order in which they run, X(name, words) for each SUITE(name): which
// gates of tests/gates/check.sh run it besides `make test` and the gate asan, and how.
//
//     SLOW     takes more than a few seconds: a batch of its own (batches.sh); others are SHORT
//     PLAIN    not under a sanitizer
//     KERNELS  mostly tests kernels, or what others test with longer texts: under AddressSanitizer
//              only on the CPU, as the fake GPU checks its own memory, and other suites launch the
//              same kernels
//     ARCH     has code per processor, or loops whose sums a processor may round differently: runs
//              on the other one under qemu (gates x86_64, aarch64)
//     LIBC     uses what C libraries have of their own: files, numbers as text, threads, stacks;
//              text, because the gate musl also turns the sign of `char`
//     THREADS  starts threads, or counts on them: under ThreadSanitizer (gate tsan)
//     WINDOWS  depends on the system or on the compiler's ABI (gate wine)
#define TEST_SUITES(X)                                                                             \
    X(harness_suite, SHORT LIBC THREADS WINDOWS)                                                   \
    X(fake_suite, SHORT)                                                                           \
    X(runtime_suite, SHORT LIBC THREADS WINDOWS)                                                   \
    X(contracts_suite, SHORT THREADS WINDOWS)                                                      \
    X(packed_suite, SHORT)                                                                         \
    X(faults_suite, SLOW)                                                                          \
    X(tiers_suite, SHORT ARCH WINDOWS)                                                             \
    X(gemm_suite, SLOW KERNELS ARCH THREADS WINDOWS)                                               \
    X(nf4_suite, SHORT KERNELS ARCH WINDOWS)                                                       \
    X(linear_suite, SHORT KERNELS ARCH THREADS)                                                    \
    X(linear_double_suite, SHORT)                                                                  \
    X(fp8_suite, SHORT KERNELS)                                                                    \
    X(fp8_base_suite, SLOW KERNELS)                                                                \
    X(bf16_suite, SLOW ARCH)                                                                       \
    X(head_suite, SHORT KERNELS)                                                                   \
    X(labelled_suite, SLOW KERNELS)                                                                \
    X(away_suite, SHORT KERNELS)                                                                   \
    X(ops_suite, SLOW ARCH THREADS)                                                                \
    X(stream_suite, SHORT ARCH)                                                                    \
    X(rows_suite, SHORT ARCH THREADS)                                                              \
    X(optimizer_suite, SHORT ARCH THREADS)                                                         \
    X(later_suite, SHORT KERNELS)                                                                  \
    X(attention_suite, SLOW KERNELS ARCH THREADS)                                                  \
    X(formats_suite, SHORT LIBC WINDOWS)                                                           \
    X(gguf_suite, SHORT LIBC WINDOWS)                                                              \
    X(gguf_experts_suite, SHORT LIBC)                                                              \
    X(expert_layouts_suite, SHORT)                                                                 \
    X(system_suite, SHORT LIBC WINDOWS)                                                            \
    X(text_suite, SHORT LIBC WINDOWS)                                                              \
    X(data_suite, SHORT LIBC WINDOWS)                                                              \
    X(templates_suite, SHORT)                                                                      \
    X(tokens_suite, SHORT LIBC WINDOWS)                                                            \
    X(parquet_suite, SHORT WINDOWS)                                                                \
    X(golden_suite, SLOW WINDOWS)                                                                  \
    X(model_suite, SLOW)                                                                           \
    X(cost_suite, SHORT)                                                                           \
    X(long_suite, SLOW KERNELS)                                                                    \
    X(gradient_suite, SLOW)                                                                        \
    X(reference_suite, SHORT ARCH)                                                                 \
    X(reference_double_suite, SHORT)                                                               \
    X(modes_suite, SHORT)                                                                          \
    X(threads_suite, SHORT LIBC THREADS WINDOWS)                                                   \
    X(steps_suite, SLOW THREADS WINDOWS)                                                           \
    X(tree_suite, SHORT KERNELS)                                                                   \
    X(owners_suite, SHORT KERNELS)                                                                 \
    X(gated_suite, SHORT KERNELS)                                                                  \
    X(experts_suite, SHORT ARCH THREADS)                                                           \
    X(experts_gpu_suite, SHORT KERNELS)                                                            \
    X(blocks_suite, SLOW KERNELS ARCH)                                                             \
    X(tails_suite, SHORT KERNELS)                                                                  \
    X(fp8_tails_suite, SHORT KERNELS)                                                              \
    X(skinny_suite, SHORT KERNELS)                                                                 \
    X(place_suite, SHORT KERNELS)                                                                  \
    X(comm_suite, SLOW LIBC THREADS)                                                               \
    X(kept_suite, SLOW LIBC WINDOWS)                                                               \
    X(page_suite, SHORT LIBC WINDOWS)                                                              \
    X(jobs_suite, SLOW LIBC THREADS)                                                               \
    X(methods_suite, SLOW)                                                                         \
    X(new_tokens_suite, SHORT)                                                                     \
    X(generate_suite, SLOW THREADS WINDOWS)                                                        \
    X(step_suite, SLOW KERNELS WINDOWS)                                                            \
    X(step_layers_suite, SLOW KERNELS)                                                             \
    X(texts_suite, SLOW THREADS)                                                                   \
    X(ahead_suite, SLOW KERNELS THREADS)                                                           \
    X(paging_suite, SLOW)                                                                          \
    X(mutant_suite, SLOW PLAIN)                                                                    \
    X(adapter_suite, SLOW)
