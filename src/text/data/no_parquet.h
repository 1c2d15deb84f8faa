// .parquet in a build without it.

static qlora_result qlora__text_parquet_open(qlora__env* env, qlora__text_source* source) {
    return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                           "%s: Parquet files are not in this build: they were left out by "
                           "QLORA_TEXT_NO_PARQUET",
                           source->input.name);
}
