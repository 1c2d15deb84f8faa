// ---- weights in FP8 -----------------------------------------------------------------------------
//
// A frozen weight in e4m3 with one scale per block of 128 x 128 elements; at the right and lower
// edges, blocks are smaller. This is also the form of published FP8 checkpoints.
//
//   quantise     scale = max |w| of the block / 448, code = e4m3(w * (1 / scale))
//   dequantise   W = bf16(code * scale), the product rounded to f32 first, on every path

#define QLORA__FP8_BLOCK 128
#define QLORA__FP8_LARGEST 1e30f // of a scale, so that 448 times it is finite

typedef struct qlora_fp8_weight qlora__fp8_weight;
struct qlora_fp8_weight {
    uint8_t* codes; // [rows, cols]
    float* scales;  // [rows / 128, cols / 128], both rounded up
    int64_t rows;
    int64_t cols;
    qlora_tensor memory; // both: device addresses on CUDA, host addresses on the CPU
    qlora_ctx* owner;
};

static int64_t qlora__fp8_blocks(int64_t n) {
    return (n + QLORA__FP8_BLOCK - 1) / QLORA__FP8_BLOCK;
}

// 16 weights that share a scale, in steps that compilers turn into vectors. A code below 8 is
// subnormal: with the exponent of 2^-6 it is too large by exactly that.
static void qlora__fp8_widen16(const uint8_t* codes, float scale, float* out) {
    for (int i = 0; i < 16; i++) {
        uint32_t code = codes[i];
        uint32_t size = code & 0x7fu;
        bool low = size < 8;
        float value = qlora__from_bits((size << 20) + (low ? 121u << 23 : 120u << 23));
        value -= low ? 0.015625f : 0.0f;
        uint32_t u = qlora__bits(value * scale) | (code & 0x80u) << 24;
        u += 0x7fffu + (u >> 16 & 1u);
        out[i] = qlora__from_bits(u & 0xffff0000u);
    }
}

// Elements [col, col + n) of a row, in f32 with bf16 values.
static void qlora__fp8_widen(const qlora__fp8_weight* w, int64_t row, int64_t col, int64_t n,
                             float* out) {
    const uint8_t* codes = w->codes + row * w->cols;
    const float* scales = w->scales + row / QLORA__FP8_BLOCK * qlora__fp8_blocks(w->cols);
    int64_t end = col + n;
    while (col < end) {
        float scale = scales[col / QLORA__FP8_BLOCK];
        int64_t stop = (col / QLORA__FP8_BLOCK + 1) * QLORA__FP8_BLOCK;
        stop = stop < end ? stop : end;
        for (; col + 16 <= stop; col += 16, out += 16) {
            qlora__fp8_widen16(codes + col, scale, out);
        }
        if (col < stop) {
            uint8_t few[16];
            float values[16];
            size_t left = (size_t)(stop - col);
            memset(few, 0, sizeof few);
            memcpy(few, codes + col, left);
            qlora__fp8_widen16(few, scale, values);
            memcpy(out, values, left * sizeof *out);
            out += left;
            col = stop;
        }
    }
}

// Quantises block (i, j) of a matrix with the size of the weight. A value that is not finite makes
// the scale a NaN.
static void qlora__fp8_quantise_block(const qlora_tensor* source, const qlora__fp8_weight* w,
                                      int64_t i, int64_t j) {
    int64_t first = i * QLORA__FP8_BLOCK;
    int64_t left = j * QLORA__FP8_BLOCK;
    int64_t last = qlora__min(w->rows, first + QLORA__FP8_BLOCK);
    int64_t right = qlora__min(w->cols, left + QLORA__FP8_BLOCK);
    uint32_t most = 0; // bits of magnitudes have their order, and those of a NaN come last
    for (int64_t r = first; r < last; r++) {
        for (int64_t c = left; c < right; c++) {
            float x = (float)qlora__load(source->data, source->dtype, r * source->ld + c);
            uint32_t size = qlora__bits(x) & 0x7fffffffu;
            most = size > most ? size : most;
        }
    }
    float scale = qlora__from_bits(0x7fc00000u);
    float inverse = 0.0f;
    if (most < 0x7f800000u) {
        scale = qlora__fp8_scale(qlora__from_bits(most));
        inverse = 1.0f / scale;
    }
    for (int64_t r = first; r < last; r++) {
        for (int64_t c = left; c < right; c++) {
            float x = (float)qlora__load(source->data, source->dtype, r * source->ld + c);
            w->codes[r * w->cols + c] = qlora__e4m3_from(x * inverse);
        }
    }
    w->scales[i * qlora__fp8_blocks(w->cols) + j] = scale;
}

// The first NaN among n codes; n if there is none.
static QLORA__UNUSED uint64_t qlora__fp8_first_nan(const uint8_t* codes, uint64_t n) {
    uint64_t at = 0;
    for (; at + 8 <= n; at += 8) {
        uint64_t eight = 0;
        memcpy(&eight, codes + at, sizeof eight);
        eight = (eight & 0x7f7f7f7f7f7f7f7fu) + 0x0101010101010101u;
        if ((eight & 0x8080808080808080u) != 0) {
            break;
        }
    }
    while (at < n && (codes[at] & 0x7fu) != 0x7fu) {
        at++;
    }
    return at;
}
