// ptx_cvt.h - conversions between all pairs of number types, cvta, isspacep.
#ifndef FAKECUDA_PTX_CVT_H
#define FAKECUDA_PTX_CVT_H

#include "ptx_alu.h"

// The most common pairs in real kernels, as vector loops; register widths equal type widths here.
#define CONVERT_OPS(X)                                                                             \
    X(f32_s32, true, TYPE_F32, TYPE_S32, f32, s32, a)                                              \
    X(f32_u32, true, TYPE_F32, TYPE_U32, f32, u32, a)                                              \
    X(f32_f16, false, TYPE_F32, TYPE_F16, f32, u16, f16_to_f32(a))                                 \
    X(f32_bf16, false, TYPE_F32, TYPE_BF16, f32, u16, f32_nan(bf16_to_f32(a)))                     \
    X(f16_f32, true, TYPE_F16, TYPE_F32, u16, f32, f16_from_f32(a))                                \
    X(bf16_f32, true, TYPE_BF16, TYPE_F32, u16, f32, bf16_from_f32(a))                             \
    X(f64_f32, false, TYPE_F64, TYPE_F32, f64, f32, f64_nan(a))                                    \
    X(f32_f64, true, TYPE_F32, TYPE_F64, f32, f64, f32_nan((f32)a))                                \
    X(s64_s32, false, TYPE_S64, TYPE_S32, s64, s32, a)                                             \
    X(u64_s32, false, TYPE_U64, TYPE_S32, s64, s32, a)                                             \
    X(s64_u32, false, TYPE_S64, TYPE_U32, u64, u32, a)                                             \
    X(u64_u32, false, TYPE_U64, TYPE_U32, u64, u32, a)                                             \
    X(u32_u64, false, TYPE_U32, TYPE_U64, u32, u64, a)                                             \
    X(s32_s64, false, TYPE_S32, TYPE_S64, u32, u64, a)                                             \
    X(u32_u16, false, TYPE_U32, TYPE_U16, u32, u16, a)                                             \
    X(s32_s16, false, TYPE_S32, TYPE_S16, s32, s16, a)                                             \
    X(u16_u32, false, TYPE_U16, TYPE_U32, u16, u32, a)

#define DEFINE_CONVERT(name, rounded, dt, st, td, ta, expression)                                  \
    DEFINE_UNARY(cvt_##name, "", td, ta, expression)

CONVERT_OPS(DEFINE_CONVERT)

typedef struct ptx_convert_row {
    bool rounded; // .rn is written
    u8 to;
    u8 from;
    ptx_exec exec;
} ptx_convert_row;

#define CONVERT_ROW(name, rounded, dt, st, td, ta, expression) {rounded, dt, st, exec_cvt_##name},

static const ptx_convert_row PTX_CONVERTS[] = {CONVERT_OPS(CONVERT_ROW)};

// ---- Any pair, one lane at a time ---------------------------------------------------------------

static u64 sign_extend(u64 raw, u32 bytes) {
    const u32 up = 64 - 8 * bytes;
    return (u64)((s64)(raw << up) >> up);
}

static u64 zero_extend(u64 raw, u32 bytes) {
    return raw & field_mask(8 * bytes);
}

static u64 extend(u64 raw, ptx_type type) {
    const ptx_type_info* info = &PTX_TYPES[type];
    return info->kind == 's' ? sign_extend(raw, info->bytes) : zero_extend(raw, info->bytes);
}

static f64 float_read(u64 raw, ptx_type type, u32 flags) {
    switch (type) {
    case TYPE_F16:
        return (f64)f16_to_f32((u16)raw);
    case TYPE_BF16:
        return (f64)bf16_to_f32((u16)raw);
    case TYPE_F32:
        return (f64)f32_in(f32_make((u32)raw), flags);
    default:
        return f64_make(raw);
    }
}

static u64 float_write(f64 x, ptx_type type, ptx_round round, u32 flags) {
    f64 y = x;
    if (flags & FLAG_SAT) {
        y = y > 0.0 ? (y < 1.0 ? y : 1.0) : 0.0;
    }
    if ((flags & FLAG_RELU) && y <= 0.0) {
        y = 0.0;
    }
    switch (type) {
    case TYPE_F16:
        return f16_from_f64(y, round);
    case TYPE_BF16:
        return bf16_from_f64(y, round);
    case TYPE_TF32:
        return f32_bits(f32_nan((f32)round_to_format(y, &FORMAT_TF32, round)));
    case TYPE_F32:
        return f32_bits(f32_in(f32_nan((f32)round_to_format(y, &FORMAT_F32, round)), flags));
    default:
        return f64_bits(f64_nan(y));
    }
}

// Out-of-range values are clamped; a NaN gives 0 or, if either type has 64 bits, only the top bit.
static u64 float_to_integer(f64 x, ptx_type from, ptx_type to, ptx_round round) {
    const u32 bits = PTX_TYPES[to].bytes * 8;
    if (x != x) {
        return from == TYPE_F64 || bits == 64 ? (u64)1 << (bits - 1) : 0;
    }
    const f64 y = round_to_integer(x, round);
    if (PTX_TYPES[to].kind == 's') {
        const f64 end = ldexp(1.0, (int)bits - 1);
        const u64 max = field_mask(bits - 1);
        return y >= end ? max : (y < -end ? ~max : (u64)(s64)y);
    }
    return y >= ldexp(1.0, (int)bits) ? field_mask(bits) : (y <= 0.0 ? 0 : (u64)y);
}

// An integer above 2^53 keeps a sticky bit, so that the single rounding in float_write is correct.
static f64 integer_to_float(u64 value, bool is_signed) {
    const bool negative = is_signed && (s64)value < 0;
    u64 size = negative ? 0 - value : value;
    if (size >> 53 != 0) {
        size = (size & ~(u64)0x7ff) | ((size & 0x7ff) != 0 ? 0x800u : 0u);
    }
    return negative ? -(f64)size : (f64)size;
}

static u64 saturate_integer(u64 value, ptx_type from, ptx_type to) {
    const u32 bits = PTX_TYPES[to].bytes * 8;
    const bool negative = PTX_TYPES[from].kind == 's' && (s64)value < 0;
    if (PTX_TYPES[to].kind == 's') {
        const s64 max = (s64)field_mask(bits - 1);
        if (negative) {
            return (u64)((s64)value < -max - 1 ? -max - 1 : (s64)value);
        }
        return value > (u64)max ? (u64)max : value;
    }
    return negative ? 0 : (value > field_mask(bits) ? field_mask(bits) : value);
}

static u64 convert(const ptx_insn* in, u64 raw) {
    const ptx_type to = (ptx_type)in->type;
    const ptx_type from = (ptx_type)in->type2;
    const ptx_round round = (ptx_round)in->round;
    if (PTX_TYPES[from].kind == 'f') {
        const f64 x = float_read(raw, from, in->flags);
        if (PTX_TYPES[to].kind != 'f') {
            return extend(float_to_integer(x, from, to, round), to);
        }
        if (in->flags & FLAG_TO_INTEGER) {
            return float_write(round_to_integer(x, round), to, ROUND_NEAREST, in->flags);
        }
        return float_write(x, to, round, in->flags);
    }
    const u64 value = extend(raw, from);
    if (PTX_TYPES[to].kind != 'f') {
        return extend(in->flags & FLAG_SAT ? saturate_integer(value, from, to) : value, to);
    }
    const bool is_signed = PTX_TYPES[from].kind == 's';
    if (to == TYPE_F64 && round == ROUND_NEAREST) {
        return f64_bits(is_signed ? (f64)(s64)value : (f64)value);
    }
    return float_write(integer_to_float(value, is_signed), to, round, in->flags);
}

static bool exec_cvt(ptx_warp* w, const ptx_insn* in, u32 mask) {
    for (u32 l = 0; l < PTX_LANES; l++) {
        if (lane_on(mask, l)) {
            lane_put(w, in->arg[0], in->width[0], l,
                     convert(in, lane_get(w, in->arg[1], in->width[1], l)));
        }
    }
    return true;
}

// cvt.rn.bf16x2.f32 d, a, b: a goes to the upper half.
static bool exec_cvt_pair(ptx_warp* w, const ptx_insn* in, u32 mask) {
    u32* d = LANES_u32(w, in->arg[0]);
    const f32* as = LANES_f32(w, in->arg[1]);
    const f32* bs = LANES_f32(w, in->arg[2]);
    if (in->type == TYPE_BF16X2 && in->round == ROUND_NEAREST && in->flags == FLAG_ROUNDED) {
        EACH_LANE(u32, , (u32)bf16_from_f32(as[l]) << 16 | bf16_from_f32(bs[l]))
        return true;
    }
    const ptx_type half = in->type == TYPE_BF16X2 ? TYPE_BF16 : TYPE_F16;
    const ptx_round round = (ptx_round)in->round;
    EACH_LANE(u32, ,
              float_write((f64)as[l], half, round, in->flags) << 16 |
                  float_write((f64)bs[l], half, round, in->flags))
    return true;
}

// 1 bit of sign, 4 of exponent (bias 7), 3 of mantissa; saturates to 448, 0x7f for a NaN.
static u16 e4m3_from_f32(f32 x) {
    const u16 sign = (u16)(f32_bits(x) >> 24 & 0x80u);
    f64 size = fabs((f64)x);
    if (x != x) {
        return 0x7f;
    }
    if (size >= 448.0) {
        return (u16)(sign | 0x7eu);
    }
    int exponent = -6; // of the smallest normal number, and of the steps below it
    while (size >= ldexp(1.0, exponent + 1)) {
        exponent++;
    }
    const u32 steps = (u32)round_to_integer(ldexp(size, 3 - exponent), ROUND_NEAREST);
    return (u16)(sign | (u16)(((u32)(exponent + 6) << 3) + steps));
}

// a goes to the upper byte.
static bool exec_cvt_e4m3(ptx_warp* w, const ptx_insn* in, u32 mask) {
    u16* d = LANES_u16(w, in->arg[0]);
    const f32* as = LANES_f32(w, in->arg[1]);
    const f32* bs = LANES_f32(w, in->arg[2]);
    EACH_LANE(u16, , (u32)e4m3_from_f32(as[l]) << 8 | e4m3_from_f32(bs[l]))
    return true;
}

// ---- Address spaces -----------------------------------------------------------------------------

static u64 space_base(u32 space) {
    return space == SPACE_SHARED  ? PTX_SHARED_BASE
           : space == SPACE_LOCAL ? PTX_LOCAL_BASE
           : space == SPACE_PARAM ? PTX_PARAM_BASE
                                  : 0;
}

// Global and constant addresses are already generic. in->sub: 1 from generic, 0 to generic.
static bool exec_cvta(ptx_warp* w, const ptx_insn* in, u32 mask) {
    u64* d = LANES_u64(w, in->arg[0]);
    const u64* as = LANES_u64(w, in->arg[1]);
    const u64 add = in->sub ? 0 - space_base(in->space) : space_base(in->space);
    EACH_LANE(u64, , as[l] + add)
    return true;
}

static bool exec_isspacep(ptx_warp* w, const ptx_insn* in, u32 mask) {
    const u64* as = LANES_u64(w, in->arg[1]);
    const u64 base = space_base(in->space);
    u32 bits = 0;
    for (u32 l = 0; l < PTX_LANES; l++) {
        const bool inside = base != 0 ? as[l] - base < PTX_WINDOW_BYTES : as[l] < PTX_LOCAL_BASE;
        bits |= (u32)inside << l;
    }
    pred_put(w, in->arg[0], mask, bits);
    return true;
}

#endif
