// ---- GGUF tensor types --------------------------------------------------------------------------

// Every product of scales and codes is exact in f32, so that only the final addition or subtraction
// rounds: the values are the same bit for bit with and without fused multiply-add. The order of the
// factors decides the sign of a zero, so scales are multiplied first, as in llama.cpp.

static float qlora__gguf_half(const uint8_t* p) {
    return qlora__f16_to((uint16_t)(p[0] | p[1] << 8));
}

static void qlora__gguf_put16(uint8_t* p, uint16_t bits) {
    p[0] = (uint8_t)(bits & 255);
    p[1] = (uint8_t)(bits >> 8);
}

static uint32_t qlora__gguf_word(const uint8_t* p) {
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

// Code e of a run of 32: the low halves of 16 bytes, then the high halves.
static int qlora__gguf_nibble(const uint8_t* q, int e) {
    return e < 16 ? q[e] & 15 : q[e - 16] >> 4;
}

static void qlora__gguf_widen_f32(const uint8_t* in, float* out) {
    *out = qlora__from_bits(qlora__gguf_word(in));
}

static void qlora__gguf_widen_f16(const uint8_t* in, float* out) {
    *out = qlora__gguf_half(in);
}

static void qlora__gguf_widen_bf16(const uint8_t* in, float* out) {
    *out = qlora__bf16_to((uint16_t)(in[0] | in[1] << 8));
}

static void qlora__gguf_widen_q4_0(const uint8_t* in, float* out) {
    float d = qlora__gguf_half(in);
    for (int e = 0; e < 32; e++) {
        out[e] = d * (float)(qlora__gguf_nibble(in + 2, e) - 8);
    }
}

static void qlora__gguf_widen_q4_1(const uint8_t* in, float* out) {
    float d = qlora__gguf_half(in);
    float m = qlora__gguf_half(in + 2);
    for (int e = 0; e < 32; e++) {
        out[e] = d * (float)qlora__gguf_nibble(in + 4, e) + m;
    }
}

static void qlora__gguf_widen_q5_0(const uint8_t* in, float* out) {
    float d = qlora__gguf_half(in);
    uint32_t high = qlora__gguf_word(in + 2);
    for (int e = 0; e < 32; e++) {
        int code = qlora__gguf_nibble(in + 6, e) + 16 * (int)(high >> e & 1);
        out[e] = d * (float)(code - 16);
    }
}

static void qlora__gguf_widen_q5_1(const uint8_t* in, float* out) {
    float d = qlora__gguf_half(in);
    float m = qlora__gguf_half(in + 2);
    uint32_t high = qlora__gguf_word(in + 4);
    for (int e = 0; e < 32; e++) {
        int code = qlora__gguf_nibble(in + 8, e) + 16 * (int)(high >> e & 1);
        out[e] = d * (float)code + m;
    }
}

static void qlora__gguf_widen_q8_0(const uint8_t* in, float* out) {
    float d = qlora__gguf_half(in);
    for (int e = 0; e < 32; e++) {
        out[e] = d * (float)(int8_t)in[2 + e];
    }
}

// Two bits per code: four runs of 32 share the 32 bytes of each half of the block.
static int qlora__gguf_pair_code(const uint8_t* qs, int e) {
    return qs[e / 128 * 32 + e % 32] >> (2 * (e % 128 / 32)) & 3;
}

static void qlora__gguf_widen_q2_k(const uint8_t* in, float* out) {
    float d = qlora__gguf_half(in + 80);
    float least = qlora__gguf_half(in + 82);
    for (int e = 0; e < 256; e++) {
        int s = in[e / 16];
        float product = d * (float)(s & 15) * (float)qlora__gguf_pair_code(in + 16, e);
        out[e] = product - least * (float)(s >> 4);
    }
}

static void qlora__gguf_widen_q3_k(const uint8_t* in, float* out) {
    const uint8_t* scales = in + 96;
    float d = qlora__gguf_half(in + 108);
    for (int e = 0; e < 256; e++) {
        int k = e / 16;
        int s = k < 8 ? scales[k] & 15 : scales[k - 8] >> 4;
        s += 16 * (scales[8 + k % 4] >> (2 * (k / 4)) & 3);
        int bit = in[e % 32] >> (e / 32) & 1;
        int code = qlora__gguf_pair_code(in + 32, e) - (bit != 0 ? 0 : 4);
        out[e] = d * (float)(s - 32) * (float)code;
    }
}

// The six-bit scale and minimum of group g of 32 codes.
static void qlora__gguf_scale_pair(const uint8_t* scales, int g, int* scale, int* least) {
    if (g < 4) {
        *scale = scales[g] & 63;
        *least = scales[g + 4] & 63;
    } else {
        *scale = (scales[g + 4] & 15) + 16 * (scales[g - 4] >> 6);
        *least = (scales[g + 4] >> 4) + 16 * (scales[g] >> 6);
    }
}

// Q4_K, and Q5_K with its fifth bits in `high`.
static void qlora__gguf_widen_k(const uint8_t* in, const uint8_t* high, const uint8_t* qs,
                                float* out) {
    float d = qlora__gguf_half(in);
    float m = qlora__gguf_half(in + 2);
    for (int g = 0; g < 8; g++) {
        int scale = 0;
        int least = 0;
        qlora__gguf_scale_pair(in + 4, g, &scale, &least);
        for (int e = 0; e < 32; e++) {
            int byte = qs[32 * (g / 2) + e];
            int code = g % 2 == 0 ? byte & 15 : byte >> 4;
            code += high != NULL ? 16 * (high[e] >> g & 1) : 0;
            out[32 * g + e] = d * (float)scale * (float)code - m * (float)least;
        }
    }
}

static void qlora__gguf_widen_q4_k(const uint8_t* in, float* out) {
    qlora__gguf_widen_k(in, NULL, in + 16, out);
}

static void qlora__gguf_widen_q5_k(const uint8_t* in, float* out) {
    qlora__gguf_widen_k(in, in + 16, in + 48, out);
}

static void qlora__gguf_widen_q6_k(const uint8_t* in, float* out) {
    float d = qlora__gguf_half(in + 208);
    for (int e = 0; e < 256; e++) {
        int n = e / 128;
        int j = e % 128 / 32;
        int l = e % 32;
        int byte = in[64 * n + l + 32 * (j & 1)];
        int code = j < 2 ? byte & 15 : byte >> 4;
        code += 16 * (in[128 + 32 * n + l] >> (2 * j) & 3);
        out[e] = d * (float)(int8_t)in[192 + e / 16] * (float)(code - 32);
    }
}

// The levels of IQ4_NL and IQ4_XS.
static const int8_t qlora__gguf_iq4[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                           1,    13,   25,  38,  53,  69,  89,  113};

static void qlora__gguf_widen_iq4_nl(const uint8_t* in, float* out) {
    float d = qlora__gguf_half(in);
    for (int e = 0; e < 32; e++) {
        out[e] = d * (float)qlora__gguf_iq4[qlora__gguf_nibble(in + 2, e)];
    }
}

static void qlora__gguf_widen_iq4_xs(const uint8_t* in, float* out) {
    float d = qlora__gguf_half(in);
    int high = in[2] | in[3] << 8;
    for (int e = 0; e < 256; e++) {
        int g = e / 32;
        int s = (in[4 + g / 2] >> (4 * (g % 2)) & 15) + 16 * (high >> (2 * g) & 3);
        int level = qlora__gguf_iq4[qlora__gguf_nibble(in + 8 + 16 * g, e % 32)];
        out[e] = d * (float)(s - 32) * (float)level;
    }
}

// 2^(x - 128) times twice the value of a four-bit float. The first two exponents are subnormal.
static void qlora__gguf_widen_mxfp4(const uint8_t* in, float* out) {
    static const int8_t levels[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    uint32_t bits = in[0] < 2 ? (uint32_t)0x00200000 << in[0] : (uint32_t)(in[0] - 1) << 23;
    float d = qlora__from_bits(bits);
    for (int e = 0; e < 32; e++) {
        out[e] = d * (float)levels[qlora__gguf_nibble(in + 1, e)];
    }
}

static void qlora__gguf_pack_f32(const float* in, uint8_t* out) {
    uint32_t bits = qlora__bits(*in);
    qlora__gguf_put16(out, (uint16_t)(bits & 0xFFFF));
    qlora__gguf_put16(out + 2, (uint16_t)(bits >> 16));
}

static void qlora__gguf_pack_f16(const float* in, uint8_t* out) {
    qlora__gguf_put16(out, qlora__f16_from(*in));
}

static void qlora__gguf_pack_bf16(const float* in, uint8_t* out) {
    qlora__gguf_put16(out, qlora__bf16_from(*in));
}

// The codes use the scale before it is rounded to half precision, as in llama.cpp.
// The least normal number. The reciprocal of a smaller scale may be infinite; as a half it is 0.
#define QLORA__GGUF_LEAST 1.17549435e-38f

static void qlora__gguf_pack_q8_0(const float* in, uint8_t* out) {
    float most = 0.0f;
    for (int e = 0; e < 32; e++) {
        float size = fabsf(in[e]);
        most = size > most ? size : most;
    }
    float d = most / 127.0f;
    float inverse = d >= QLORA__GGUF_LEAST ? 1.0f / d : 0.0f;
    qlora__gguf_put16(out, qlora__f16_from(d));
    for (int e = 0; e < 32; e++) {
        out[2 + e] = (uint8_t)(int8_t)roundf(in[e] * inverse);
    }
}

static void qlora__gguf_pack_q4_0(const float* in, uint8_t* out) {
    float most = 0.0f; // the value of largest magnitude, with its sign
    for (int e = 0; e < 32; e++) {
        most = fabsf(in[e]) > fabsf(most) ? in[e] : most;
    }
    float d = most / -8.0f;
    float inverse = fabsf(d) >= QLORA__GGUF_LEAST ? 1.0f / d : 0.0f;
    qlora__gguf_put16(out, qlora__f16_from(d));
    for (int e = 0; e < 16; e++) {
        int low = (int)(in[e] * inverse + 8.5f);
        int high = (int)(in[e + 16] * inverse + 8.5f);
        low = low < 15 ? low : 15;
        high = high < 15 ? high : 15;
        out[2 + e] = (uint8_t)(low | high << 4);
    }
}

// ---- the table of types -------------------------------------------------------------------------

typedef struct qlora__gguf_type {
    uint32_t id;
    const char* name;
    uint32_t block;                                  // elements
    uint32_t bytes;                                  // of a block
    void (*widen)(const uint8_t* block, float* out); // NULL: the type is known but not supported
    void (*pack)(const float* in, uint8_t* block);   // NULL: the type is only read
} qlora__gguf_type;

static const qlora__gguf_type qlora__gguf_types[] = {
    {0, "F32", 1, 4, qlora__gguf_widen_f32, qlora__gguf_pack_f32},
    {1, "F16", 1, 2, qlora__gguf_widen_f16, qlora__gguf_pack_f16},
    {30, "BF16", 1, 2, qlora__gguf_widen_bf16, qlora__gguf_pack_bf16},
    {8, "Q8_0", 32, 34, qlora__gguf_widen_q8_0, qlora__gguf_pack_q8_0},
    {2, "Q4_0", 32, 18, qlora__gguf_widen_q4_0, qlora__gguf_pack_q4_0},
    {3, "Q4_1", 32, 20, qlora__gguf_widen_q4_1, NULL},
    {6, "Q5_0", 32, 22, qlora__gguf_widen_q5_0, NULL},
    {7, "Q5_1", 32, 24, qlora__gguf_widen_q5_1, NULL},
    {10, "Q2_K", 256, 84, qlora__gguf_widen_q2_k, NULL},
    {11, "Q3_K", 256, 110, qlora__gguf_widen_q3_k, NULL},
    {12, "Q4_K", 256, 144, qlora__gguf_widen_q4_k, NULL},
    {13, "Q5_K", 256, 176, qlora__gguf_widen_q5_k, NULL},
    {14, "Q6_K", 256, 210, qlora__gguf_widen_q6_k, NULL},
    {20, "IQ4_NL", 32, 18, qlora__gguf_widen_iq4_nl, NULL},
    {23, "IQ4_XS", 256, 136, qlora__gguf_widen_iq4_xs, NULL},
    {39, "MXFP4", 32, 17, qlora__gguf_widen_mxfp4, NULL},
    // known by name only
    {9, "Q8_1", 0, 0, NULL, NULL},
    {15, "Q8_K", 0, 0, NULL, NULL},
    {16, "IQ2_XXS", 0, 0, NULL, NULL},
    {17, "IQ2_XS", 0, 0, NULL, NULL},
    {18, "IQ3_XXS", 0, 0, NULL, NULL},
    {19, "IQ1_S", 0, 0, NULL, NULL},
    {21, "IQ3_S", 0, 0, NULL, NULL},
    {22, "IQ2_S", 0, 0, NULL, NULL},
    {24, "I8", 0, 0, NULL, NULL},
    {25, "I16", 0, 0, NULL, NULL},
    {26, "I32", 0, 0, NULL, NULL},
    {27, "I64", 0, 0, NULL, NULL},
    {28, "F64", 0, 0, NULL, NULL},
    {29, "IQ1_M", 0, 0, NULL, NULL},
    {34, "TQ1_0", 0, 0, NULL, NULL},
    {35, "TQ2_0", 0, 0, NULL, NULL},
    {40, "NVFP4", 0, 0, NULL, NULL},
    {41, "Q1_0", 0, 0, NULL, NULL},
    {42, "Q2_0", 0, 0, NULL, NULL},
};
#define QLORA__GGUF_TYPES (sizeof qlora__gguf_types / sizeof qlora__gguf_types[0])

// NULL if there is no type of that number.
static QLORA__UNUSED const qlora__gguf_type* qlora__gguf_type_of(uint32_t id) {
    for (size_t i = 0; i < QLORA__GGUF_TYPES; i++) {
        if (qlora__gguf_types[i].id == id) {
            return &qlora__gguf_types[i];
        }
    }
    return NULL;
}

static QLORA__UNUSED const qlora__gguf_type* qlora__gguf_type_named(const char* name) {
    for (size_t i = 0; i < QLORA__GGUF_TYPES; i++) {
        if (strcmp(qlora__gguf_types[i].name, name) == 0) {
            return &qlora__gguf_types[i];
        }
    }
    return NULL;
}

// `count` is a multiple of the block size.
static QLORA__UNUSED void qlora__gguf_widen(const qlora__gguf_type* type, const uint8_t* in,
                                            uint64_t count, float* out) {
    for (uint64_t i = 0; i < count / type->block; i++) {
        type->widen(in + i * type->bytes, out + i * type->block);
    }
}

static QLORA__UNUSED void qlora__gguf_pack(const qlora__gguf_type* type, const float* in,
                                           uint64_t count, uint8_t* out) {
    for (uint64_t i = 0; i < count / type->block; i++) {
        type->pack(in + i * type->block, out + i * type->bytes);
    }
}
