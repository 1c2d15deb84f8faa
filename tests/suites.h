// suites.h - all suites in the order in which they run: X(name) for each SUITE(name).
#define TEST_SUITES(X)                                                                             \
    X(harness_suite)                                                                               \
    X(fake_suite)                                                                                  \
    X(runtime_suite)                                                                               \
    X(contracts_suite)                                                                             \
    X(faults_suite)                                                                                \
    X(tiers_suite)                                                                                 \
    X(gemm_suite)                                                                                  \
    X(nf4_suite)                                                                                   \
    X(linear_suite)                                                                                \
    X(linear_double_suite)                                                                         \
    X(fp8_suite)                                                                                   \
    X(ops_suite)                                                                                   \
    X(stream_suite)                                                                                \
    X(rows_suite)                                                                                  \
    X(attention_suite)                                                                             \
    X(formats_suite)                                                                               \
    X(gguf_suite)                                                                                  \
    X(system_suite)                                                                                \
    X(text_suite)                                                                                  \
    X(data_suite)                                                                                  \
    X(templates_suite)                                                                             \
    X(tokens_suite)                                                                                \
    X(parquet_suite)                                                                               \
    X(golden_suite)                                                                                \
    X(model_suite)                                                                                 \
    X(gradient_suite)                                                                              \
    X(threads_suite)                                                                               \
    X(steps_suite)                                                                                 \
    X(kept_suite)                                                                                  \
    X(page_suite)                                                                                  \
    X(methods_suite)                                                                               \
    X(generate_suite)                                                                              \
    X(step_suite)                                                                                  \
    X(mutant_suite)                                                                                \
    X(adapter_suite)
