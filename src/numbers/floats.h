// ---- floats -------------------------------------------------------------------------------------

static uint32_t qlora__bits(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

static float qlora__from_bits(uint32_t u) {
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

// Tests the bits, because compilers fold isfinite() away with -ffast-math.
static QLORA__UNUSED bool qlora__finite(float x) {
    return (qlora__bits(x) & 0x7f800000u) != 0x7f800000u;
}

// Rounds to nearest even; a NaN stays a NaN.
static uint16_t qlora__bf16_from(float x) {
    uint32_t u = qlora__bits(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) {
        return 0x7fff;
    }
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

static float qlora__bf16_to(uint16_t h) {
    return qlora__from_bits((uint32_t)h << 16);
}

static uint16_t qlora__f16_from(float x) {
    uint32_t u = qlora__bits(x);
    uint32_t sign = (u >> 16) & 0x8000u;
    uint32_t a = u & 0x7fffffffu;
    if (a > 0x7f800000u) {
        return 0x7fff;
    }
    if (a >= 0x47800000u) { // 65536 or more
        return (uint16_t)(sign | 0x7c00u);
    }
    if (a < 0x38800000u) { // below the smallest normal: let float addition do the rounding
        float magic = qlora__from_bits(a) + 0.5f; // 0.5 has an ulp of 2^-24, f16's smallest step
        return (uint16_t)(sign | (qlora__bits(magic) - 0x3f000000u));
    }
    uint32_t rounded = a + 0xfffu + ((a >> 13) & 1u) - 0x38000000u;
    return (uint16_t)(sign | (rounded >> 13));
}

static float qlora__f16_to(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16;
    uint32_t exponent = (h >> 10) & 31u;
    uint32_t mantissa = h & 0x3ffu;
    if (exponent == 31) {
        return qlora__from_bits(sign | 0x7f800000u | mantissa << 13);
    }
    if (exponent == 0) {
        float subnormal = (float)mantissa * (1.0f / 16777216.0f);
        return sign != 0 ? -subnormal : subnormal;
    }
    return qlora__from_bits(sign | (exponent + 112) << 23 | mantissa << 13);
}

size_t qlora_dtype_bytes(qlora_dtype dtype) {
    switch (dtype) {
    case QLORA_F32:
        return sizeof(QLORA__REAL);
    case QLORA_BF16:
    case QLORA_F16:
        return 2;
    case QLORA_I32:
        return 4;
    case QLORA_U8:
        return 1;
    }
    return 0;
}

const char* qlora_dtype_name(qlora_dtype dtype) {
    static const char* const names[] = {"f32", "bf16", "f16", "i32", "u8"};
    return (int)dtype >= 0 && dtype <= QLORA_U8 ? names[dtype] : "unknown";
}

#define QLORA__IS_F32 (1u << QLORA_F32)
#define QLORA__IS_BF16 (1u << QLORA_BF16)
#define QLORA__IS_F16 (1u << QLORA_F16)
#define QLORA__IS_I32 (1u << QLORA_I32)
#define QLORA__IS_U8 (1u << QLORA_U8)
#define QLORA__IS_FLOAT (QLORA__IS_F32 | QLORA__IS_BF16 | QLORA__IS_F16)

// Element access on the CPU for every dtype.
static QLORA__REAL qlora__load(const void* data, qlora_dtype dtype, int64_t index) {
    switch (dtype) {
    case QLORA_F32:
        return ((const QLORA__REAL*)data)[index];
    case QLORA_BF16:
        return (QLORA__REAL)qlora__bf16_to(((const uint16_t*)data)[index]);
    case QLORA_F16:
        return (QLORA__REAL)qlora__f16_to(((const uint16_t*)data)[index]);
    case QLORA_I32:
        return (QLORA__REAL)((const int32_t*)data)[index];
    case QLORA_U8:
        return (QLORA__REAL)((const uint8_t*)data)[index];
    }
    return (QLORA__REAL)0;
}

static void qlora__store(void* data, qlora_dtype dtype, int64_t index, QLORA__REAL value) {
    if (dtype == QLORA_F32) {
        ((QLORA__REAL*)data)[index] = value;
    } else if (dtype == QLORA_BF16) {
        ((uint16_t*)data)[index] = qlora__bf16_from((float)value);
    } else if (dtype == QLORA_F16) {
        ((uint16_t*)data)[index] = qlora__f16_from((float)value);
    }
}

static QLORA__UNUSED QLORA__REAL qlora__at(const qlora_tensor* t, int64_t row, int64_t col) {
    return qlora__load(t->data, t->dtype, row * t->ld + col);
}

static QLORA__UNUSED void qlora__put(const qlora_tensor* t, int64_t row, int64_t col,
                                     QLORA__REAL value) {
    qlora__store(t->data, t->dtype, row * t->ld + col, value);
}

// exp, log, sqrt, fabs and tanh in the precision of QLORA__REAL.
#define QLORA__MATH1(name)                                                                         \
    static QLORA__UNUSED QLORA__REAL qlora__##name(QLORA__REAL x) {                                \
        return sizeof x == sizeof(float) ? (QLORA__REAL)name##f((float)x)                          \
                                         : (QLORA__REAL)name((double)x);                           \
    }
QLORA__MATH1(exp)
QLORA__MATH1(log)
QLORA__MATH1(sqrt)
QLORA__MATH1(fabs)
QLORA__MATH1(tanh)
#undef QLORA__MATH1
