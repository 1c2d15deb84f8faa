// ---- e4m3 ---------------------------------------------------------------------------------------

// 8-bit floats: 1 bit of sign, 4 of exponent (bias 7), 3 of mantissa. The largest value is 448, the
// smallest 2^-9; there is no infinity, and 0x7f and 0xff are NaNs.
#define QLORA__E4M3_MOST 448.0f

// Rounds to nearest even; what is larger than 448 becomes 448, and a NaN stays a NaN, as in PTX.
static QLORA__UNUSED uint8_t qlora__e4m3_from(float x) {
    uint32_t u = qlora__bits(x);
    uint32_t sign = (u >> 24) & 0x80u;
    uint32_t a = u & 0x7fffffffu;
    if (a > 0x7f800000u) {
        return 0x7f;
    }
    if (a >= 0x43e00000u) { // 448 or more
        return (uint8_t)(sign | 0x7eu);
    }
    if (a < 0x3c800000u) { // below the smallest normal, 2^-6: let float addition do the rounding
        float magic = qlora__from_bits(a) + 16384.0f; // 16384 has an ulp of 2^-9
        return (uint8_t)(sign | (qlora__bits(magic) - 0x46800000u));
    }
    uint32_t rounded = a + 0x7ffffu + ((a >> 20) & 1u) - 0x3c000000u;
    return (uint8_t)(sign | rounded >> 20);
}

static QLORA__UNUSED float qlora__e4m3_to(uint8_t code) {
    uint32_t sign = (uint32_t)(code & 0x80u) << 24;
    uint32_t exponent = (code >> 3) & 15u;
    uint32_t mantissa = code & 7u;
    if ((code & 0x7fu) == 0x7fu) {
        return qlora__from_bits(sign | 0x7fc00000u);
    }
    if (exponent == 0) {
        float subnormal = (float)mantissa * (1.0f / 512.0f);
        return sign != 0 ? -subnormal : subnormal;
    }
    return qlora__from_bits(sign | (exponent + 120) << 23 | mantissa << 20);
}

#define QLORA__FP8_SMALLEST 1e-30f // of a scale, so that its inverse is finite

static float qlora__fp8_scale(float most) {
    float scale = most * (1.0f / QLORA__E4M3_MOST);
    return scale < QLORA__FP8_SMALLEST ? QLORA__FP8_SMALLEST : scale;
}
