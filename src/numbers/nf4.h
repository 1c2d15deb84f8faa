// ---- NF4 ----------------------------------------------------------------------------------------

// 4-bit NormalFloat with block-wise scales, byte-identical to the storage of bitsandbytes. Element
// e of a matrix without gaps belongs to block e / block; a block may span rows, and the last block
// may be shorter.
//   absmax[b] = max |w| of the block
//   code[e]   = number of thresholds below w[e] * inv, inv = 1 / max(absmax[b], 1e-38)
//   value[e]  = level[code[e]] * absmax[b], in f32, then rounded to the requested type
// Byte i stores element 2i in its high half and 2i + 1 in its low half; after an odd count the last
// half is 7, the code of zero. Double quantisation stores one byte per block instead of absmax, in
// groups:
//   offset    = f32(sum of absmax) * f32(1 / blocks)
//   scale[g]  = max(max |absmax - offset|, 1e-38)
//   q[b]      = entry of a map of 256 that is nearest to (absmax[b] - offset) * (1 / scale[g])
//   absmax[b] = map[q[b]] * scale[g] + offset, each operation rounded
// Every operation is a single f32 one, so CPU and GPU agree in every bit. bitsandbytes' own CUDA
// kernels use an approximate reciprocal and may differ by one code at a threshold, and store 0
// instead of 7 for a block of zeros.

#define QLORA__NF4_SMALLEST 1e-38f
#define QLORA__NF4_MAPS 272 // 16 levels, followed by the map of the scales

static const float qlora__nf4_levels[16] = {
    -1.0f,
    -0.6961928009986877f,
    -0.5250730514526367f,
    -0.39491748809814453f,
    -0.28444138169288635f,
    -0.18477343022823334f,
    -0.09105003625154495f,
    0.0f,
    0.07958029955625534f,
    0.16093020141124725f,
    0.24611230194568634f,
    0.33791524171829224f,
    0.44070982933044434f,
    0.5626170039176941f,
    0.7229568362236023f,
    1.0f,
};

static const float qlora__nf4_thresholds[15] = {
    -0.8480963706970215f,  -0.6106328964233398f,  -0.4599952697753906f,   -0.33967941999435425f,
    -0.23460739850997925f, -0.13791173696517944f, -0.045525018125772476f, 0.03979014977812767f,
    0.120255246758461f,    0.2035212516784668f,   0.2920137643814087f,    0.3893125355243683f,
    0.5016634464263916f,   0.6427869200706482f,   0.8614784479141235f,
};

// The 16 levels and the signed dynamic map: for i = 0 ... 6 the midpoints between 2^i + 1 points
// spread evenly over [0.1, 1], times 10^(i-6), with both signs; 0; and 1. The points are computed
// as in torch's linspace (from both ends, one multiply-add each), because files contain exactly
// those bits; a map in a file replaces this one.
static void qlora__nf4_default_maps(float* maps) {
    static const float powers[7] = {1e-6f, 1e-5f, 1e-4f, 1e-3f, 1e-2f, 1e-1f, 1.0f};
    memcpy(maps, qlora__nf4_levels, sizeof qlora__nf4_levels);
    float* middle = maps + 16 + 127; // the entry for zero
    middle[0] = 0.0f;
    middle[128] = 1.0f;
    int at = 0;
    for (int i = 0; i < 7; i++) {
        int points = (1 << i) + 1;
        float step = (1.0f - 0.1f) / (float)(points - 1);
        float before = 0.1f;
        for (int j = 1; j < points; j++) {
            // In double, the product and the sum are exact, so this rounds once.
            float here = j < points / 2 ? (float)((double)0.1f + (double)step * (double)j)
                                        : (float)(1.0 - (double)step * (double)(points - 1 - j));
            float value = (before + here) / 2.0f * powers[i];
            at++;
            middle[at] = value;
            middle[-at] = -value;
            before = here;
        }
    }
}

static uint32_t qlora__nf4_code(float x) {
    uint32_t code = 0;
    for (int i = 0; i < 15; i++) {
        code += x > qlora__nf4_thresholds[i] ? 1u : 0u;
    }
    return code;
}

// Quantises blocks [first, last) of n elements.
static void qlora__nf4_quantise_blocks(const void* w, qlora_dtype dtype, int64_t n, int64_t block,
                                       uint8_t* codes, float* absmax, int64_t first, int64_t last) {
    for (int64_t b = first; b < last; b++) {
        int64_t begin = b * block;
        int64_t end = qlora__min(n, begin + block);
        float most = 0.0f;
        for (int64_t e = begin; e < end; e++) {
            float x = fabsf((float)qlora__load(w, dtype, e));
            most = x > most ? x : most;
        }
        float inv = 1.0f / (most > QLORA__NF4_SMALLEST ? most : QLORA__NF4_SMALLEST);
        for (int64_t e = begin; e < end; e += 2) {
            uint32_t high = qlora__nf4_code((float)qlora__load(w, dtype, e) * inv);
            uint32_t low = 7;
            if (e + 1 < end) {
                low = qlora__nf4_code((float)qlora__load(w, dtype, e + 1) * inv);
            }
            codes[e / 2] = (uint8_t)(high << 4 | low);
        }
        absmax[b] = most;
    }
}

// 1024 sums in f64, in the same order as the kernel's threads, folded in halves.
static float qlora__nf4_offset(const float* absmax, int64_t blocks) {
    double sums[1024];
    memset(sums, 0, sizeof sums);
    for (int64_t b = 0; b < blocks; b++) {
        sums[b % 1024] += (double)absmax[b];
    }
    for (int half = 512; half > 0; half /= 2) {
        for (int i = 0; i < half; i++) {
            sums[i] += sums[i + half];
        }
    }
    return blocks > 0 ? (float)sums[0] * (1.0f / (float)blocks) : 0.0f;
}

// Bisection from the middle, then the nearer of the last entry and its neighbour on the side of x.
// If both are equally near, the last entry of the bisection is used.
static int qlora__nf4_nearest(const float* map, float x) {
    int at = 127;
    int below = 0;
    int above = 255;
    for (int step = 64; step > 0; step /= 2) {
        if (x > map[at]) {
            below = at;
            at += step;
        } else {
            above = at;
            at -= step;
        }
    }
    if (x > map[at]) {
        return x > (map[above] + map[at]) * 0.5f ? above : at;
    }
    return x < (map[below] + map[at]) * 0.5f ? below : at;
}

static void qlora__nf4_quantise_scales(const float* absmax, int64_t blocks, int64_t group,
                                       float offset, const float* map, uint8_t* q, float* scales) {
    for (int64_t begin = 0; begin < blocks; begin += group) {
        int64_t end = qlora__min(blocks, begin + group);
        float most = QLORA__NF4_SMALLEST;
        for (int64_t b = begin; b < end; b++) {
            float x = fabsf(absmax[b] - offset);
            most = x > most ? x : most;
        }
        float inv = 1.0f / most;
        for (int64_t b = begin; b < end; b++) {
            q[b] = (uint8_t)qlora__nf4_nearest(map, (absmax[b] - offset) * inv);
        }
        scales[begin / group] = most;
    }
}

// The scale of block b. volatile prevents the compiler from fusing the product and the sum.
static float qlora__nf4_absmax(const qlora_nf4* w, int64_t b) {
    if (w->absmax != NULL) {
        return w->absmax[b];
    }
    volatile float product = w->maps[16 + w->absmax_codes[b]] * w->absmax_scales[b / w->block2];
    return product + w->offset[0];
}

static uint32_t qlora__nf4_code_at(const uint8_t* codes, int64_t e) {
    uint32_t byte = codes[e / 2];
    return e % 2 != 0 ? byte & 15u : byte >> 4;
}
