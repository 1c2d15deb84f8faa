// ---- noise on embeddings ------------------------------------------------------------------------
//
// NEFTune: h[row] += alpha / sqrt(L cols) u, with L the length of the row's sequence and u uniform
// in [-1, 1). The word of an element is that of dropout with 2^31 in place of layer and projection,
// which no projection has; u = (word / 2^8) / 2^23 - 1.

// Which tokens the rows of a batch are.
typedef struct qlora__batch_rows {
    const qlora_tensor* positions;
    const qlora_tensor* sequences; // index in the data
    const qlora_tensor* seqs;      // I32: where the sequences begin, and where the last one ends
    const qlora_tensor* state;     // of dropout
} qlora__batch_rows;

typedef struct qlora__noise_job {
    const qlora_tensor* h;
    const qlora__batch_rows* rows;
    float alpha;
} qlora__noise_job;

static void qlora__noise_rows(void* user, int64_t begin, int64_t end) {
    const qlora__noise_job* job = (const qlora__noise_job*)user;
    const qlora_tensor* state = job->rows->state;
    int64_t cols = job->h->cols;
    uint64_t seed =
        (uint64_t)(uint32_t)qlora__index_at(state, 1) << 32 | (uint32_t)qlora__index_at(state, 0);
    uint64_t mixed = seed + (uint64_t)(uint32_t)qlora__index_at(state, 2) * 0x9e3779b97f4a7c15u;
    const uint32_t key[2] = {(uint32_t)mixed, (uint32_t)(mixed >> 32)};
    int64_t s = 0; // the sequence of the row
    for (int64_t row = begin; row < end; row++) {
        while (s < job->rows->seqs->cols - 1 && qlora__index_at(job->rows->seqs, s + 1) <= row) {
            s++;
        }
        if (s == job->rows->seqs->cols - 1) {
            return; // rows after the last sequence
        }
        int64_t length =
            qlora__index_at(job->rows->seqs, s + 1) - qlora__index_at(job->rows->seqs, s);
        float scale = job->alpha / sqrtf((float)(length * cols));
        for (int64_t c = 0; c < cols; c += 4) {
            const uint32_t counter[4] = {
                (uint32_t)(c / 4), (uint32_t)qlora__index_at(job->rows->positions, row),
                (uint32_t)qlora__index_at(job->rows->sequences, row), 0x80000000u};
            uint32_t words[4];
            qlora__philox(counter, key, words);
            for (int64_t i = c; i < c + 4 && i < cols; i++) {
                float u = (float)(words[i - c] >> 8) * (2.0f / 16777216.0f) - 1.0f;
                qlora__put(job->h, row, i, qlora__at(job->h, row, i) + (QLORA__REAL)(u * scale));
            }
        }
    }
}

static qlora_result qlora__noise(qlora_ctx* ctx, const qlora_tensor* h,
                                 const qlora__batch_rows* rows, float alpha) {
    if (qlora__on_cpu(ctx)) {
        qlora__noise_job job = {h, rows, alpha};
        qlora__parallel(ctx, h->rows, 1 + 1024 / (1 + h->cols), qlora__noise_rows, &job);
        return QLORA_OK;
    }
    int64_t max_sequences = rows->seqs->cols - 1;
    qlora__point_shape shape = qlora__point_shape_of(h->cols, qlora__piece(h->dtype));
    void* args[] = {(void*)&h->data,
                    (void*)&h->ld,
                    (void*)&rows->positions->data,
                    (void*)&rows->sequences->data,
                    (void*)&rows->state->data,
                    (void*)&rows->seqs->data,
                    &max_sequences,
                    (void*)&h->rows,
                    (void*)&h->cols,
                    &alpha};
    return qlora__launch(
        ctx, h->dtype == QLORA_F32 ? QLORA__K_dropout_noise_f32 : QLORA__K_dropout_noise_bf16,
        shape.blocks, qlora__min(h->rows, 65535), 1, shape.threads, 0, args);
}
