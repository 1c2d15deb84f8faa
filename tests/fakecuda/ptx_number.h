// ptx_number.h - number formats: IEEE single with PTX's NaN and flush rules, f16, bf16, tf32.
#ifndef FAKECUDA_PTX_NUMBER_H
#define FAKECUDA_PTX_NUMBER_H

#include "ptx_core.h"

static inline u32 f32_bits(f32 x) {
    u32 bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline f32 f32_make(u32 bits) {
    f32 x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline u64 f64_bits(f64 x) {
    u64 bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline f64 f64_make(u64 bits) {
    f64 x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

// Every NaN result in f32 has this bit pattern on the device, whatever the host would propagate.
static inline f32 f32_nan(f32 x) {
    return x == x ? x : f32_make(0x7fffffffu);
}

static inline f64 f64_nan(f64 x) {
    return x == x ? x : f64_make(0x7ff8000000000000u);
}

static inline f32 f32_flush(f32 x) {
    const u32 bits = f32_bits(x);
    return (bits & 0x7f800000u) == 0 ? f32_make(bits & 0x80000000u) : x;
}

static inline f32 f32_saturate(f32 x) {
    return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; // NaN becomes 0
}

// Flushes and saturates the inputs and results of an instruction with .ftz or .sat.
static inline f32 f32_in(f32 x, u32 flags) {
    return flags & FLAG_FTZ ? f32_flush(x) : x;
}

static inline f32 f32_out(f32 x, u32 flags) {
    const f32 y = f32_in(x, flags);
    return flags & FLAG_SAT ? f32_saturate(y) : y;
}

// A number wins over a NaN; -0 is less than +0.
static inline f32 f32_min(f32 a, f32 b) {
    const f32 equal = f32_make(f32_bits(a) | f32_bits(b));
    const f32 lesser = a < b ? a : (b < a ? b : equal);
    return a != a ? f32_nan(b) : (b != b ? a : lesser);
}

static inline f32 f32_max(f32 a, f32 b) {
    const f32 equal = f32_make(f32_bits(a) & f32_bits(b));
    const f32 greater = a > b ? a : (b > a ? b : equal);
    return a != a ? f32_nan(b) : (b != b ? a : greater);
}

static inline f64 f64_min(f64 a, f64 b) {
    const f64 equal = f64_make(f64_bits(a) | f64_bits(b));
    const f64 lesser = a < b ? a : (b < a ? b : equal);
    return a != a ? f64_nan(b) : (b != b ? a : lesser);
}

static inline f64 f64_max(f64 a, f64 b) {
    const f64 equal = f64_make(f64_bits(a) & f64_bits(b));
    const f64 greater = a > b ? a : (b > a ? b : equal);
    return a != a ? f64_nan(b) : (b != b ? a : greater);
}

// ---- 16-bit floats ------------------------------------------------------------------------------

static inline f32 f16_to_f32(u16 half) {
    const u32 sign = (u32)(half & 0x8000u) << 16;
    const u32 rest = (u32)(half & 0x7fffu) << 13;
    const u32 finite = f32_bits(f32_make(rest) * 0x1p112f); // adjusts the exponent bias, exactly
    const u32 special = rest > 0x0f800000u ? 0x7fffffffu : 0x7f800000u;
    return f32_make(rest < 0x0f800000u ? sign | finite
                                       : (rest > 0x0f800000u ? special : sign | special));
}

static inline u16 f16_from_f32(f32 x) {
    const u32 bits = f32_bits(x);
    const u32 sign = bits >> 16 & 0x8000u;
    const u32 rest = bits & 0x7fffffffu;
    if (rest > 0x7f800000u) {
        return 0x7fffu;
    }
    if (rest >= 0x477ff000u) { // 65520 and above round to infinity
        return (u16)(sign | 0x7c00u);
    }
    if (rest < 0x38800000u) { // below 2^-14: adding 0.5 rounds at 2^-24, the subnormal step
        return (u16)(sign | (f32_bits(f32_make(rest) + 0.5f) - 0x3f000000u));
    }
    return (u16)(sign | (rest - 0x38000000u + 0xfffu + (rest >> 13 & 1u)) >> 13);
}

static inline f32 bf16_to_f32(u16 bits) {
    return f32_make((u32)bits << 16);
}

static inline u16 bf16_from_f32(f32 x) {
    const u32 bits = f32_bits(x);
    const u32 rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    return (u16)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fffu : rounded);
}

// ---- Rounding -----------------------------------------------------------------------------------

static f64 round_to_integer(f64 x, ptx_round mode) {
    switch (mode) {
    case ROUND_ZERO:
        return trunc(x);
    case ROUND_DOWN:
        return floor(x);
    case ROUND_UP:
        return ceil(x);
    case ROUND_AWAY:
        return round(x);
    default:
        return nearbyint(x);
    }
}

// A binary format, defined by its precision, smallest normal exponent and largest finite value.
typedef struct ptx_format {
    int precision;
    int min_exponent;
    f64 max;
} ptx_format;

static const ptx_format FORMAT_F32 = {24, -126, (f64)FLT_MAX};
static const ptx_format FORMAT_F16 = {11, -14, 65504.0};
static const ptx_format FORMAT_BF16 = {8, -126, 0x1.fep127};
static const ptx_format FORMAT_TF32 = {11, -126, 0x1.ffcp127};

// Rounds x once to a value of the format. Infinities and NaN are unchanged.
static f64 round_to_format(f64 x, const ptx_format* format, ptx_round mode) {
    if (x == 0.0 || x - x != 0.0) {
        return x;
    }
    const int exponent = ilogb(x);
    const int step = (exponent < format->min_exponent ? format->min_exponent : exponent) -
                     (format->precision - 1);
    const f64 y = ldexp(round_to_integer(ldexp(x, -step), mode), step);
    if (fabs(y) <= format->max) {
        return y;
    }
    const bool to_infinity =
        mode == ROUND_NEAREST || mode == ROUND_AWAY || mode == (x > 0.0 ? ROUND_UP : ROUND_DOWN);
    return copysign(to_infinity ? (f64)INFINITY : format->max, x);
}

// a + b rounded to odd in double: rounding that again to a format of at most 51 bits, in any mode,
// gives the same as rounding the exact sum.
static f64 add_odd(f64 a, f64 b) {
    const f64 sum = a + b;
    if (sum - sum != 0.0) {
        return sum;
    }
    const f64 b_part = sum - a;
    const f64 error = (a - (sum - b_part)) + (b - b_part);
    const u64 bits = f64_bits(sum);
    if (error == 0.0 || (bits & 1u) != 0) {
        return sum;
    }
    return f64_make((error > 0.0) == (sum > 0.0) ? bits + 1 : bits - 1);
}

// a * b + c in f32 with directed rounding; the product of two f32 is exact in f64.
static f32 f32_fma_directed(f32 a, f32 b, f32 c, ptx_round mode) {
    return f32_nan((f32)round_to_format(add_odd((f64)a * (f64)b, (f64)c), &FORMAT_F32, mode));
}

static u16 f16_from_f64(f64 x, ptx_round mode) {
    return f16_from_f32((f32)round_to_format(x, &FORMAT_F16, mode));
}

static u16 bf16_from_f64(f64 x, ptx_round mode) {
    return bf16_from_f32((f32)round_to_format(x, &FORMAT_BF16, mode));
}

static f64 half_to_f64(u16 bits, bool bf) {
    return (f64)(bf ? bf16_to_f32(bits) : f16_to_f32(bits));
}

static u16 half_from_f64(f64 x, bool bf, ptx_round mode) {
    return bf ? bf16_from_f64(x, mode) : f16_from_f64(x, mode);
}

// ---- Integers -----------------------------------------------------------------------------------

static inline u64 mul_high_u64(u64 a, u64 b) {
    const u64 a_low = a & 0xffffffffu;
    const u64 b_low = b & 0xffffffffu;
    const u64 low = a_low * b_low;
    const u64 mid = (a >> 32) * b_low + (low >> 32);
    const u64 mid2 = a_low * (b >> 32) + (mid & 0xffffffffu);
    return (a >> 32) * (b >> 32) + (mid >> 32) + (mid2 >> 32);
}

static inline s64 mul_high_s64(s64 a, s64 b) {
    const u64 high = mul_high_u64((u64)a, (u64)b);
    return (s64)(high - (a < 0 ? (u64)b : 0u) - (b < 0 ? (u64)a : 0u));
}

// Division by zero gives all ones on the device; the smallest value divided by -1 gives itself.
static inline u64 div_u64(u64 a, u64 b) {
    return b == 0 ? ~(u64)0 : a / b;
}

static inline s64 div_s64(s64 a, s64 b) {
    return b == 0 ? -1 : (b == -1 ? (s64)(0u - (u64)a) : a / b);
}

static inline u64 rem_u64(u64 a, u64 b) {
    return b == 0 ? a : a % b;
}

static inline s64 rem_s64(s64 a, s64 b) {
    return b == 0 ? a : (b == -1 ? 0 : a % b);
}

static inline u32 div_u32(u32 a, u32 b) {
    return b == 0 ? ~(u32)0 : a / b;
}

static inline u32 rem_u32(u32 a, u32 b) {
    return b == 0 ? a : a % b;
}

static inline u64 shift_left(u64 a, u32 by, u32 bits) {
    return by >= bits ? 0 : a << by;
}

static inline u64 shift_right(u64 a, u32 by, u32 bits) {
    return by >= bits ? 0 : a >> by;
}

static inline s64 shift_right_signed(s64 a, u32 by, u32 bits) {
    return a >> (by >= bits ? bits - 1 : by);
}

static inline u32 funnel(u32 low, u32 high, u32 by, bool left) { // by is at most 32
    const u64 both = (u64)high << 32 | low;
    return (u32)(left ? both >> (32 - by) : both >> by);
}

static inline u64 field_mask(u32 length) {
    return length >= 64 ? ~(u64)0 : ((u64)1 << length) - 1;
}

static u64 field_extract(u64 a, u32 position, u32 length, u32 bits, bool is_signed) {
    const u32 from = position & 255u;
    const u32 count = length & 255u;
    if (count == 0) {
        return 0;
    }
    const u32 last = from + count - 1 < bits - 1 ? from + count - 1 : bits - 1;
    const u64 fill = is_signed && (a >> last & 1u) != 0 ? ~(u64)0 : 0;
    const u64 value = from >= bits ? 0 : a >> from;
    const u64 valid = field_mask(from >= bits ? 0 : last - from + 1);
    return (value & valid) | (fill & ~valid);
}

static u64 field_insert(u64 a, u64 b, u32 position, u32 length, u32 bits) {
    const u32 at = position & 255u;
    const u64 mask = at >= bits ? 0 : field_mask(length & 255u) << at;
    return (b & ~mask) | (at >= bits ? 0 : (a << at) & mask);
}

static u64 reverse_bits(u64 a, u32 bits) {
    u64 y = 0;
    for (u32 i = 0; i < bits; i++) {
        y |= (a >> i & 1u) << (bits - 1 - i);
    }
    return y;
}

static u32 leading_zeros(u64 a, u32 bits) {
    return a == 0 ? bits : (u32)__builtin_clzll(a) - (64 - bits);
}

// Position of the highest bit that differs from the sign, or all ones if there is none.
static u32 find_highest(u64 a, u32 bits, bool is_signed) {
    const u64 all = field_mask(bits);
    const u64 value = is_signed && (a >> (bits - 1) & 1u) != 0 ? ~a & all : a & all;
    return value == 0 ? ~(u32)0 : 63 - (u32)__builtin_clzll(value);
}

// The shift that moves that bit to the top.
static u32 shift_to_top(u64 a, u32 bits, bool is_signed) {
    const u32 highest = find_highest(a, bits, is_signed);
    return highest == ~(u32)0 ? highest : bits - 1 - highest;
}

static u32 logic3(u32 a, u32 b, u32 c, u32 table) {
    u32 y = 0;
    for (u32 i = 0; i < 8; i++) {
        const u32 row = (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
        y |= table >> i & 1u ? row : 0;
    }
    return y;
}

static u32 permute_bytes(u32 a, u32 b, u32 select) {
    const u64 bytes = (u64)b << 32 | a;
    u32 y = 0;
    for (u32 i = 0; i < 4; i++) {
        const u32 pick = select >> (4 * i) & 15u;
        const u32 byte = (u32)(bytes >> (8 * (pick & 7u))) & 255u;
        y |= (pick & 8u ? (byte & 128u ? 255u : 0u) : byte) << (8 * i);
    }
    return y;
}

#endif
