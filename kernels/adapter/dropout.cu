// dropout.cu - the kernels of dropout.cuh for f32.
// targets: 75
// groups: train
#include "dropout.cuh"

QLORA_KERNEL __launch_bounds__(256)
    qlora_dropout_f32(const float* x, int64_t ldx, float* y, int64_t ldy, const int32_t* positions,
                      const int32_t* sequences, const uint32_t* state, int32_t where, int64_t rows,
                      int64_t cols, uint32_t threshold, float scale, int32_t accumulate) {
    dropout(x, ldx, y, ldy, positions, sequences, state, where, rows, cols, threshold, scale,
            accumulate);
}

QLORA_KERNEL qlora_dropout_noise_f32(float* h, int64_t ld, const int32_t* positions,
                                     const int32_t* sequences, const uint32_t* state,
                                     const int32_t* seqs, int64_t max_sequences, int64_t rows,
                                     int64_t cols, float alpha) {
    noise(h, ld, positions, sequences, state, seqs, max_sequences, rows, cols, alpha);
}
