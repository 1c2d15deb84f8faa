// ---- streamed weights: kernels for few rows -----------------------------------------------------

// A product with one or a few rows costs what reading and converting the weights costs. These
// kernels convert four lines of W (rows that are stored one after the other) in registers, without
// a copy, and multiply them by one row x. Each sum has an order that depends only on its length.

#define QLORA__STREAM_LINES 4
#define QLORA__STREAM_STEP 64  // 4-bit weights per step of the kernel
#define QLORA__STREAM_COLS 16  // columns per call of blend
#define QLORA__STREAM_LONG 256 // elements of a line that is better read alone than with three more

// One line of an NF4 weight: 32 bytes of codes and a scale per step.
typedef struct qlora__nf4_line {
    const uint8_t* codes;
    const float* scales;
} qlora__nf4_line;

struct qlora__cpu_stream {
    // Element order[i] of each 64 elements of x is element i of what the kernel for NF4 reads:
    // weights come out of their bytes in the order that needs the fewest instructions.
    const uint8_t* order;
    // sums[i] = the dot product of x and line i: `steps` times 64 weights, with one scale each.
    void (*nf4)(const float* levels, const qlora__nf4_line* lines, int64_t steps, const float* x,
                float* sums);
    // The same with scales from qlora__stream_prepare.
    void (*ready)(const float* levels, const qlora__nf4_line* lines, int64_t steps, const float* x,
                  float* sums);
    // scales = scales * factor + offset, each operation rounded. A NaN becomes one that stays a NaN
    // when its upper half is rounded.
    void (*scale)(float* scales, int64_t n, float factor, float offset);
    // The same as nf4 for lines of f32, bf16 or f16, with any n and x as it is.
    void (*dense)(const void* const* lines, qlora_dtype dtype, int64_t n, const float* x,
                  float* sums);
    // sums[j] = a[0] b[0][j] + ... + a[n - 1] b[n - 1][j] for 16 columns of f32; ld: from row to
    // row of b.
    void (*blend)(const float* a, const float* b, int64_t ld, int64_t n, float* sums);
};

// The scales of `steps` times 64 weights from element e on, one per step, as qlora__nf4_absmax
// computes them.
static void qlora__stream_scales(const qlora__cpu_stream* stream, const qlora_nf4* w, int64_t e,
                                 int64_t steps, float* scales) {
    int64_t each = w->block / QLORA__STREAM_STEP;
    int64_t b = e / w->block;
    int64_t skip = e % w->block / QLORA__STREAM_STEP; // steps of the block that come before e
    int64_t blocks = qlora__ceil_div(skip + steps, each);
    if (w->absmax != NULL) {
        memcpy(scales, w->absmax + b, (size_t)blocks * sizeof *scales);
        stream->scale(scales, blocks, 1.0f, 0.0f);
    }
    for (int64_t done = 0; w->absmax == NULL && done < blocks;) { // one group after the other
        int64_t group = (b + done) / w->block2;
        int64_t n = qlora__min(blocks - done, (group + 1) * w->block2 - b - done);
        const uint8_t* codes = w->absmax_codes + b + done;
        const float* map = w->maps + 16;
        float* out = scales + done;
        int64_t i = 0;
        for (; i + 4 <= n; i += 4) {
            out[i] = map[codes[i]];
            out[i + 1] = map[codes[i + 1]];
            out[i + 2] = map[codes[i + 2]];
            out[i + 3] = map[codes[i + 3]];
        }
        for (; i < n; i++) {
            out[i] = map[codes[i]];
        }
        stream->scale(scales + done, n, w->absmax_scales[group], w->offset[0]);
        done += n;
    }
    for (int64_t i = steps - 1; each > 1 && i >= 0; i--) {
        scales[i] = scales[(skip + i) / each];
    }
}

// Whether the values of a block, rounded to the nearest bf16 with ties away from zero, are those
// that NF4 is defined by, where ties go to even numbers: `bits` are those of the scale to try.
static bool qlora__stream_agrees(const float* levels, float scale, uint32_t bits) {
    bool same = true;
    for (int i = 0; i < 16; i++) {
        uint32_t got = (qlora__bits(levels[i] * qlora__from_bits(bits)) + 0x8000u) >> 16;
        same = same && got == qlora__bf16_from(levels[i] * scale);
    }
    return same;
}

// Decodes the scales of a whole weight, one per 64 weights, for the kernel that rounds ties away
// from zero. Where a tie matters (one block in thousands), a neighbouring number takes the place of
// the scale, one that gives the same 16 values. False if there is none, or the scale is not finite.
static bool qlora__stream_prepare(const qlora__cpu_stream* stream, const qlora_nf4* w,
                                  int64_t first, int64_t steps, float* scales) {
    static const int32_t moves[] = {1, -1, 2, -2, 3, -3, 4, -4};
    qlora__stream_scales(stream, w, first * QLORA__STREAM_STEP, steps, scales);
    for (int64_t i = 0; i < steps; i++) {
        uint32_t bits = qlora__bits(scales[i]);
        bool found = qlora__stream_agrees(w->maps, scales[i], bits);
        for (size_t k = 0; !found && k < sizeof moves / sizeof moves[0]; k++) {
            uint32_t moved = bits + (uint32_t)moves[k];
            found = qlora__finite(scales[i]) && qlora__stream_agrees(w->maps, scales[i], moved);
            scales[i] = found ? qlora__from_bits(moved) : scales[i];
        }
        if (!found || !qlora__finite(scales[i])) {
            return false;
        }
    }
    return true;
}

// Copies the last elements of four lines, `bytes` each, to the beginning of lines of zeros, so that
// the kernels need no loop for single elements.
static QLORA__UNUSED void qlora__stream_tail(const void* const* lines, size_t at, size_t bytes,
                                             char room[QLORA__STREAM_LINES][64],
                                             const void* tail[QLORA__STREAM_LINES]) {
    memset(room, 0, QLORA__STREAM_LINES * 64);
    for (int i = 0; i < QLORA__STREAM_LINES; i++) {
        memcpy(room[i], (const char*)lines[i] + at, bytes);
        tail[i] = room[i];
    }
}
