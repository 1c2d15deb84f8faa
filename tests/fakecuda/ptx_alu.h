// ptx_alu.h - the lane-wise instructions: one line each for form, types and semantics.
//
// The lists below are used twice, for the functions and for the rows of the form table. A form is
// the mnemonic with "a|b" for alternatives and "?" after optional parts; a, b, c are the operands.
#ifndef FAKECUDA_PTX_ALU_H
#define FAKECUDA_PTX_ALU_H

#include "ptx_number.h"

#if defined(__GNUC__) && !defined(__clang__)
#define PTX_INDEPENDENT _Pragma("GCC ivdep") // a result register may be an operand, lane by lane
#else
#define PTX_INDEPENDENT
#endif

// The loop over the lanes. It has no tests when all lanes of the warp are active, so that it can
// be vectorised.
#define EACH_LANE(type, load, expression)                                                          \
    if (mask == PTX_FULL) {                                                                        \
        PTX_INDEPENDENT for (u32 l = 0; l < PTX_LANES; l++) {                                      \
            load;                                                                                  \
            d[l] = (type)(expression);                                                             \
        }                                                                                          \
    } else {                                                                                       \
        PTX_INDEPENDENT for (u32 l = 0; l < PTX_LANES; l++) {                                      \
            load;                                                                                  \
            const type result = (type)(expression);                                                \
            d[l] = mask >> l & 1u ? result : d[l];                                                 \
        }                                                                                          \
    }

#define DEFINE_UNARY(name, form, td, ta, expression)                                               \
    static bool exec_##name(ptx_warp* w, const ptx_insn* in, u32 mask) {                           \
        td* d = LANES_##td(w, in->arg[0]);                                                         \
        const ta* as = LANES_##ta(w, in->arg[1]);                                                  \
        EACH_LANE(td, const ta a = as[l], expression)                                              \
        return true;                                                                               \
    }

#define DEFINE_BINARY(name, form, td, ta, tb, expression)                                          \
    static bool exec_##name(ptx_warp* w, const ptx_insn* in, u32 mask) {                           \
        td* d = LANES_##td(w, in->arg[0]);                                                         \
        const ta* as = LANES_##ta(w, in->arg[1]);                                                  \
        const tb* bs = LANES_##tb(w, in->arg[2]);                                                  \
        EACH_LANE(td, const ta a = as[l]; const tb b = bs[l], expression)                          \
        return true;                                                                               \
    }

#define DEFINE_TERNARY(name, form, td, ta, tb, tc, expression)                                     \
    static bool exec_##name(ptx_warp* w, const ptx_insn* in, u32 mask) {                           \
        td* d = LANES_##td(w, in->arg[0]);                                                         \
        const ta* as = LANES_##ta(w, in->arg[1]);                                                  \
        const tb* bs = LANES_##tb(w, in->arg[2]);                                                  \
        const tc* cs = LANES_##tc(w, in->arg[3]);                                                  \
        EACH_LANE(td, const ta a = as[l]; const tb b = bs[l]; const tc c = cs[l], expression)      \
        return true;                                                                               \
    }

// ---- Integers and bits --------------------------------------------------------------------------

#define UNARY_OPS(X)                                                                               \
    X(not_16, "not.b16", u16, u16, ~(u32)a)                                                        \
    X(not_32, "not.b32", u32, u32, ~a)                                                             \
    X(not_64, "not.b64", u64, u64, ~a)                                                             \
    X(cnot_16, "cnot.b16", u16, u16, a == 0)                                                       \
    X(cnot_32, "cnot.b32", u32, u32, a == 0)                                                       \
    X(cnot_64, "cnot.b64", u64, u64, a == 0)                                                       \
    X(neg_16, "neg.s16", u16, u16, 0u - a)                                                         \
    X(neg_32, "neg.s32", u32, u32, 0u - a)                                                         \
    X(neg_64, "neg.s64", u64, u64, 0u - a)                                                         \
    X(abs_16, "abs.s16", u16, u16, a & 0x8000u ? 0u - a : a)                                       \
    X(abs_32, "abs.s32", u32, u32, a & 0x80000000u ? 0u - a : a)                                   \
    X(abs_64, "abs.s64", u64, u64, a >> 63 ? 0u - a : a)                                           \
    X(popc_32, "popc.b32", u32, u32, __builtin_popcount(a))                                        \
    X(popc_64, "popc.b64", u32, u64, __builtin_popcountll(a))                                      \
    X(clz_32, "clz.b32", u32, u32, leading_zeros(a, 32))                                           \
    X(clz_64, "clz.b64", u32, u64, leading_zeros(a, 64))                                           \
    X(brev_32, "brev.b32", u32, u32, reverse_bits(a, 32))                                          \
    X(brev_64, "brev.b64", u64, u64, reverse_bits(a, 64))                                          \
    X(bfind_u32, "bfind.u32", u32, u32, find_highest(a, 32, false))                                \
    X(bfind_s32, "bfind.s32", u32, u32, find_highest(a, 32, true))                                 \
    X(bfind_u64, "bfind.u64", u32, u64, find_highest(a, 64, false))                                \
    X(bfind_s64, "bfind.s64", u32, u64, find_highest(a, 64, true))                                 \
    X(bfind_top_u32, "bfind.shiftamt.u32", u32, u32, shift_to_top(a, 32, false))                   \
    X(bfind_top_s32, "bfind.shiftamt.s32", u32, u32, shift_to_top(a, 32, true))                    \
    X(bfind_top_u64, "bfind.shiftamt.u64", u32, u64, shift_to_top(a, 64, false))                   \
    X(bfind_top_s64, "bfind.shiftamt.s64", u32, u64, shift_to_top(a, 64, true))                    \
    X(abs_f32, "abs.f32", u32, u32, a & 0x7fffffffu)                                               \
    X(neg_f32, "neg.f32", u32, u32, a ^ 0x80000000u)                                               \
    X(abs_f64, "abs.f64", u64, u64, a << 1 >> 1)                                                   \
    X(neg_f64, "neg.f64", u64, u64, a ^ (u64)1 << 63)                                              \
    X(rcp_f64, "rcp.rn.f64", f64, f64, f64_nan(1.0 / a))                                           \
    X(rcp_approx_f64, "rcp.approx.ftz.f64", f64, f64, f64_nan(1.0 / a))                            \
    X(sqrt_f64, "sqrt.rn.f64", f64, f64, f64_nan(sqrt(a)))                                         \
    X(rsqrt_f64, "rsqrt.approx.ftz?.f64", f64, f64, f64_nan(1.0 / sqrt(a)))                        \
    X(tanh_f32, "tanh.approx.f32", f32, f32, f32_nan(tanhf(a)))

#define BINARY_OPS(X)                                                                              \
    X(add_16, "add.u16|s16", u16, u16, u16, (u32)a + b)                                            \
    X(add_32, "add.u32|s32", u32, u32, u32, a + b)                                                 \
    X(add_64, "add.u64|s64", u64, u64, u64, a + b)                                                 \
    X(add_sat, "add.sat.s32", s32, s32, s32, clamp_s32((s64)a + b))                                \
    X(sub_16, "sub.u16|s16", u16, u16, u16, (u32)a - b)                                            \
    X(sub_32, "sub.u32|s32", u32, u32, u32, a - b)                                                 \
    X(sub_64, "sub.u64|s64", u64, u64, u64, a - b)                                                 \
    X(sub_sat, "sub.sat.s32", s32, s32, s32, clamp_s32((s64)a - b))                                \
    X(mul_16, "mul.lo.u16|s16", u16, u16, u16, (u32)a* b)                                          \
    X(mul_32, "mul.lo.u32|s32", u32, u32, u32, a* b)                                               \
    X(mul_64, "mul.lo.u64|s64", u64, u64, u64, a* b)                                               \
    X(mulhi_u16, "mul.hi.u16", u16, u16, u16, (u32)a* b >> 16)                                     \
    X(mulhi_s16, "mul.hi.s16", s16, s16, s16, (s32)a* b >> 16)                                     \
    X(mulhi_u32, "mul.hi.u32", u32, u32, u32, (u64)a* b >> 32)                                     \
    X(mulhi_s32, "mul.hi.s32", s32, s32, s32, (s64)a* b >> 32)                                     \
    X(mulhi_u64, "mul.hi.u64", u64, u64, u64, mul_high_u64(a, b))                                  \
    X(mulhi_s64, "mul.hi.s64", s64, s64, s64, mul_high_s64(a, b))                                  \
    X(mulwide_u16, "mul.wide.u16", u32, u16, u16, (u32)a* b)                                       \
    X(mulwide_s16, "mul.wide.s16", s32, s16, s16, (s32)a* b)                                       \
    X(mulwide_u32, "mul.wide.u32", u64, u32, u32, (u64)a* b)                                       \
    X(mulwide_s32, "mul.wide.s32", s64, s32, s32, (s64)a* b)                                       \
    X(div_u16, "div.u16", u16, u16, u16, div_u64(a, b))                                            \
    X(div_s16, "div.s16", s16, s16, s16, div_s64(a, b))                                            \
    X(div_u32, "div.u32", u32, u32, u32, div_u32(a, b))                                            \
    X(div_s32, "div.s32", s32, s32, s32, div_s64(a, b))                                            \
    X(div_u64, "div.u64", u64, u64, u64, div_u64(a, b))                                            \
    X(div_s64, "div.s64", s64, s64, s64, div_s64(a, b))                                            \
    X(rem_u16, "rem.u16", u16, u16, u16, rem_u64(a, b))                                            \
    X(rem_s16, "rem.s16", s16, s16, s16, rem_s64(a, b))                                            \
    X(rem_u32, "rem.u32", u32, u32, u32, rem_u32(a, b))                                            \
    X(rem_s32, "rem.s32", s32, s32, s32, rem_s64(a, b))                                            \
    X(rem_u64, "rem.u64", u64, u64, u64, rem_u64(a, b))                                            \
    X(rem_s64, "rem.s64", s64, s64, s64, rem_s64(a, b))                                            \
    X(min_u16, "min.u16", u16, u16, u16, a < b ? a : b)                                            \
    X(min_s16, "min.s16", s16, s16, s16, a < b ? a : b)                                            \
    X(min_u32, "min.u32", u32, u32, u32, a < b ? a : b)                                            \
    X(min_s32, "min.s32", s32, s32, s32, a < b ? a : b)                                            \
    X(min_u64, "min.u64", u64, u64, u64, a < b ? a : b)                                            \
    X(min_s64, "min.s64", s64, s64, s64, a < b ? a : b)                                            \
    X(max_u16, "max.u16", u16, u16, u16, a > b ? a : b)                                            \
    X(max_s16, "max.s16", s16, s16, s16, a > b ? a : b)                                            \
    X(max_u32, "max.u32", u32, u32, u32, a > b ? a : b)                                            \
    X(max_s32, "max.s32", s32, s32, s32, a > b ? a : b)                                            \
    X(max_u64, "max.u64", u64, u64, u64, a > b ? a : b)                                            \
    X(max_s64, "max.s64", s64, s64, s64, a > b ? a : b)                                            \
    X(and_16, "and.b16", u16, u16, u16, a& b)                                                      \
    X(and_32, "and.b32", u32, u32, u32, a& b)                                                      \
    X(and_64, "and.b64", u64, u64, u64, a& b)                                                      \
    X(or_16, "or.b16", u16, u16, u16, a | b)                                                       \
    X(or_32, "or.b32", u32, u32, u32, a | b)                                                       \
    X(or_64, "or.b64", u64, u64, u64, a | b)                                                       \
    X(xor_16, "xor.b16", u16, u16, u16, a ^ b)                                                     \
    X(xor_32, "xor.b32", u32, u32, u32, a ^ b)                                                     \
    X(xor_64, "xor.b64", u64, u64, u64, a ^ b)                                                     \
    X(shl_16, "shl.b16", u16, u16, u32, shift_left(a, b, 16))                                      \
    X(shl_32, "shl.b32", u32, u32, u32, b > 31 ? 0 : a << (b & 31))                                \
    X(shl_64, "shl.b64", u64, u64, u32, b > 63 ? 0 : a << (b & 63))                                \
    X(shr_u16, "shr.u16|b16", u16, u16, u32, shift_right(a, b, 16))                                \
    X(shr_s16, "shr.s16", s16, s16, u32, shift_right_signed(a, b, 16))                             \
    X(shr_u32, "shr.u32|b32", u32, u32, u32, b > 31 ? 0 : a >> (b & 31))                           \
    X(shr_s32, "shr.s32", s32, s32, u32, a >> (b > 31 ? 31 : b))                                   \
    X(shr_u64, "shr.u64|b64", u64, u64, u32, b > 63 ? 0 : a >> (b & 63))                           \
    X(shr_s64, "shr.s64", s64, s64, u32, a >> (b > 63 ? 63 : b))                                   \
    X(copysign_f32, "copysign.f32", u32, u32, u32, (a & 0x80000000u) | (b & 0x7fffffffu))          \
    X(copysign_f64, "copysign.f64", u64, u64, u64, (a >> 63 << 63) | (b << 1 >> 1))                \
    X(add_f64, "add.rn?.f64", f64, f64, f64, f64_nan(a + b))                                       \
    X(sub_f64, "sub.rn?.f64", f64, f64, f64, f64_nan(a - b))                                       \
    X(mul_f64, "mul.rn?.f64", f64, f64, f64, f64_nan(a* b))                                        \
    X(div_f64, "div.rn.f64", f64, f64, f64, f64_nan(a / b))                                        \
    X(min_f64, "min.f64", f64, f64, f64, f64_min(a, b))                                            \
    X(max_f64, "max.f64", f64, f64, f64, f64_max(a, b))

#define TERNARY_OPS(X)                                                                             \
    X(mad_16, "mad.lo.u16|s16", u16, u16, u16, u16, (u32)a* b + c)                                 \
    X(mad_32, "mad.lo.u32|s32", u32, u32, u32, u32, a* b + c)                                      \
    X(mad_64, "mad.lo.u64|s64", u64, u64, u64, u64, a* b + c)                                      \
    X(madhi_u32, "mad.hi.u32", u32, u32, u32, u32, ((u64)a * b >> 32) + c)                         \
    X(madhi_s32, "mad.hi.s32", s32, s32, s32, s32, ((s64)a * b >> 32) + c)                         \
    X(madhi_u64, "mad.hi.u64", u64, u64, u64, u64, mul_high_u64(a, b) + c)                         \
    X(madhi_s64, "mad.hi.s64", u64, u64, u64, u64, (u64)mul_high_s64((s64)a, (s64)b) + c)          \
    X(madwide_u16, "mad.wide.u16", u32, u16, u16, u32, (u32)a* b + c)                              \
    X(madwide_s16, "mad.wide.s16", u32, s16, s16, u32, (u32)((s32)a * b) + c)                      \
    X(madwide_u32, "mad.wide.u32", u64, u32, u32, u64, (u64)a* b + c)                              \
    X(madwide_s32, "mad.wide.s32", u64, s32, s32, u64, (u64)((s64)a * b) + c)                      \
    X(sad_u32, "sad.u32", u32, u32, u32, u32, c + (a > b ? a - b : b - a))                         \
    X(sad_s32, "sad.s32", u32, s32, s32, u32, c + (a > b ? (u32)a - (u32)b : (u32)b - (u32)a))     \
    X(shf_l_wrap, "shf.l.wrap.b32", u32, u32, u32, u32, funnel(a, b, c & 31, true))                \
    X(shf_r_wrap, "shf.r.wrap.b32", u32, u32, u32, u32, funnel(a, b, c & 31, false))               \
    X(shf_l_clamp, "shf.l.clamp.b32", u32, u32, u32, u32, funnel(a, b, c > 32 ? 32 : c, true))     \
    X(shf_r_clamp, "shf.r.clamp.b32", u32, u32, u32, u32, funnel(a, b, c > 32 ? 32 : c, false))    \
    X(bfe_u32, "bfe.u32", u32, u32, u32, u32, field_extract(a, b, c, 32, false))                   \
    X(bfe_s32, "bfe.s32", u32, u32, u32, u32, field_extract(a, b, c, 32, true))                    \
    X(bfe_u64, "bfe.u64", u64, u64, u32, u32, field_extract(a, b, c, 64, false))                   \
    X(bfe_s64, "bfe.s64", u64, u64, u32, u32, field_extract(a, b, c, 64, true))                    \
    X(prmt, "prmt.b32", u32, u32, u32, u32, permute_bytes(a, b, c))                                \
    X(slct_32, "slct.b32|u32|s32|f32.s32", u32, u32, u32, s32, c >= 0 ? a : b)                     \
    X(slct_64, "slct.b64|u64|s64|f64.s32", u64, u64, u64, s32, c >= 0 ? a : b)                     \
    X(slct_f32, "slct.b32|u32|s32|f32.f32", u32, u32, u32, f32, c >= 0.0f ? a : b)                 \
    X(fma_f64, "fma.rn.f64", f64, f64, f64, f64, f64_nan(fma(a, b, c)))                            \
    X(mad_f64, "mad.rn.f64", f64, f64, f64, f64, f64_nan(fma(a, b, c)))

static inline s32 clamp_s32(s64 x) {
    return (s32)(x < INT32_MIN ? INT32_MIN : (x > INT32_MAX ? INT32_MAX : x));
}

UNARY_OPS(DEFINE_UNARY)
BINARY_OPS(DEFINE_BINARY)
TERNARY_OPS(DEFINE_TERNARY)

// ---- f32 ----------------------------------------------------------------------------------------

// There are two functions each: the plain form, and the one with .ftz or .sat (if the form
// allows them).
#define DEFINE_F32_UNARY(name, form, form2, expression)                                            \
    DEFINE_UNARY(name, form, f32, f32, f32_nan(expression))                                        \
    static bool exec_##name##_2(ptx_warp* w, const ptx_insn* in, u32 mask) {                       \
        f32* d = LANES_f32(w, in->arg[0]);                                                         \
        const f32* as = LANES_f32(w, in->arg[1]);                                                  \
        EACH_LANE(f32, const f32 a = f32_in(as[l], in->flags),                                     \
                  f32_out(f32_nan(expression), in->flags))                                         \
        return true;                                                                               \
    }

#define DEFINE_F32_BINARY(name, form, form2, expression)                                           \
    DEFINE_BINARY(name, form, f32, f32, f32, f32_nan(expression))                                  \
    static bool exec_##name##_2(ptx_warp* w, const ptx_insn* in, u32 mask) {                       \
        f32* d = LANES_f32(w, in->arg[0]);                                                         \
        const f32* as = LANES_f32(w, in->arg[1]);                                                  \
        const f32* bs = LANES_f32(w, in->arg[2]);                                                  \
        EACH_LANE(f32, const f32 a = f32_in(as[l], in->flags);                                     \
                  const f32 b = f32_in(bs[l], in->flags), f32_out(f32_nan(expression), in->flags)) \
        return true;                                                                               \
    }

#define DEFINE_F32_TERNARY(name, form, form2, expression)                                          \
    DEFINE_TERNARY(name, form, f32, f32, f32, f32, f32_nan(expression))                            \
    static bool exec_##name##_2(ptx_warp* w, const ptx_insn* in, u32 mask) {                       \
        f32* d = LANES_f32(w, in->arg[0]);                                                         \
        const f32* as = LANES_f32(w, in->arg[1]);                                                  \
        const f32* bs = LANES_f32(w, in->arg[2]);                                                  \
        const f32* cs = LANES_f32(w, in->arg[3]);                                                  \
        EACH_LANE(f32, const f32 a = f32_in(as[l], in->flags);                                     \
                  const f32 b = f32_in(bs[l], in->flags);                                          \
                  const f32 c = f32_in(cs[l], in->flags), f32_out(f32_nan(expression), in->flags)) \
        return true;                                                                               \
    }

// The .approx functions use the C library, rounded to f32: more accurate than the device.
#define F32_UNARY_OPS(X)                                                                           \
    X(rcp, "rcp.rn|approx.f32", "rcp.rn|approx.ftz.f32", 1.0f / a)                                 \
    X(sqrt, "sqrt.rn|approx.f32", "sqrt.rn|approx.ftz.f32", sqrtf(a))                              \
    X(rsqrt, "rsqrt.approx.f32", "rsqrt.approx.ftz.f32", (f32)(1.0 / sqrt((f64)a)))                \
    X(ex2, "ex2.approx.f32", "ex2.approx.ftz.f32", exp2f(a))                                       \
    X(lg2, "lg2.approx.f32", "lg2.approx.ftz.f32", log2f(a))                                       \
    X(sin, "sin.approx.f32", "sin.approx.ftz.f32", sinf(a))                                        \
    X(cos, "cos.approx.f32", "cos.approx.ftz.f32", cosf(a))                                        \
    X(abs_ftz, "abs.ftz.f32", "abs.ftz.f32", fabsf(f32_flush(a)))                                  \
    X(neg_ftz, "neg.ftz.f32", "neg.ftz.f32", -f32_flush(a))

#define F32_BINARY_OPS(X)                                                                          \
    X(add, "add.rn?.f32", "add.rn?.ftz?.sat?.f32", a + b)                                          \
    X(sub, "sub.rn?.f32", "sub.rn?.ftz?.sat?.f32", a - b)                                          \
    X(mul, "mul.rn?.f32", "mul.rn?.ftz?.sat?.f32", a* b)                                           \
    X(div, "div.rn|full|approx.f32", "div.rn|full|approx.ftz.f32", a / b)                          \
    X(min_f32, "min.f32", "min.ftz.f32", f32_min(a, b))                                            \
    X(max_f32, "max.f32", "max.ftz.f32", f32_max(a, b))                                            \
    X(min_nan, "min.NaN.f32", "min.ftz.NaN.f32", a != a || b != b ? a + b : f32_min(a, b))         \
    X(max_nan, "max.NaN.f32", "max.ftz.NaN.f32", a != a || b != b ? a + b : f32_max(a, b))         \
    X(add_to, "add.rz|rm|rp.f32", "add.rz|rm|rp.ftz?.sat?.f32",                                    \
      f32_fma_directed(a, 1.0f, b, (ptx_round)in->round))                                          \
    X(sub_to, "sub.rz|rm|rp.f32", "sub.rz|rm|rp.ftz?.sat?.f32",                                    \
      f32_fma_directed(a, 1.0f, -b, (ptx_round)in->round))                                         \
    X(mul_to, "mul.rz|rm|rp.f32", "mul.rz|rm|rp.ftz?.sat?.f32",                                    \
      f32_nan((f32)round_to_format((f64)a*(f64)b, &FORMAT_F32, (ptx_round)in->round)))

#define F32_TERNARY_OPS(X)                                                                         \
    X(fma, "fma.rn.f32", "fma.rn.ftz?.sat?.f32", fmaf(a, b, c))                                    \
    X(mad, "mad.rn.f32", "mad.rn.ftz?.sat?.f32", fmaf(a, b, c))                                    \
    X(fma_to, "fma.rz|rm|rp.f32", "fma.rz|rm|rp.ftz?.sat?.f32",                                    \
      f32_fma_directed(a, b, c, (ptx_round)in->round))

F32_UNARY_OPS(DEFINE_F32_UNARY)
F32_BINARY_OPS(DEFINE_F32_BINARY)
F32_TERNARY_OPS(DEFINE_F32_TERNARY)

// ---- Predicates ---------------------------------------------------------------------------------

static inline void pred_put(ptx_warp* w, u32 at, u32 mask, u32 bits) {
    if (at != PTX_NONE) {
        PRED(w, at) = (PRED(w, at) & ~mask) | (bits & mask);
    }
}

static inline u32 pred_get(const ptx_warp* w, const ptx_insn* in, u32 index) {
    const u32 bits = PRED(w, in->arg[index]);
    return in->negated >> index & 1u ? ~bits : bits;
}

#define PREDICATE_OPS(X)                                                                           \
    X(and_pred, "and.pred", "ppp", a& b)                                                           \
    X(or_pred, "or.pred", "ppp", a | b)                                                            \
    X(xor_pred, "xor.pred", "ppp", a ^ b)                                                          \
    X(not_pred, "not.pred", "pp", ~a)                                                              \
    X(mov_pred, "mov.pred", "pp", a)

#define DEFINE_PREDICATE(name, form, args, expression)                                             \
    static bool exec_##name(ptx_warp* w, const ptx_insn* in, u32 mask) {                           \
        const u32 a = PRED(w, in->arg[1]);                                                         \
        const u32 b = PRED(w, in->arg[2]);                                                         \
        (void)b;                                                                                   \
        pred_put(w, in->arg[0], mask, expression);                                                 \
        return true;                                                                               \
    }

PREDICATE_OPS(DEFINE_PREDICATE)

#define SELECT_OPS(X)                                                                              \
    X(selp_16, "selp.b16|u16|s16", u16, "hhhp")                                                    \
    X(selp_32, "selp.b32|u32|s32|f32", u32, "rrrp")                                                \
    X(selp_64, "selp.b64|u64|s64|f64", u64, "lllp")

#define DEFINE_SELECT(name, form, type, args)                                                      \
    static bool exec_##name(ptx_warp* w, const ptx_insn* in, u32 mask) {                           \
        type* d = LANES_##type(w, in->arg[0]);                                                     \
        const type* as = LANES_##type(w, in->arg[1]);                                              \
        const type* bs = LANES_##type(w, in->arg[2]);                                              \
        const u32 p = PRED(w, in->arg[3]);                                                         \
        EACH_LANE(type, const type a = as[l]; const type b = bs[l], p >> l & 1u ? a : b)           \
        return true;                                                                               \
    }

SELECT_OPS(DEFINE_SELECT)

// ---- Comparisons --------------------------------------------------------------------------------

#define DEFINE_COMPARE(type, name, expression)                                                     \
    static u32 compare_##name##_##type(const void* pa, const void* pb) {                           \
        const type* as = (const type*)pa;                                                          \
        const type* bs = (const type*)pb;                                                          \
        u32 bits = 0;                                                                              \
        for (u32 l = 0; l < PTX_LANES; l++) {                                                      \
            const type a = as[l];                                                                  \
            const type b = bs[l];                                                                  \
            bits |= (u32)(expression) << l;                                                        \
        }                                                                                          \
        return bits;                                                                               \
    }

#define ORDERED_COMPARES(X, type)                                                                  \
    X(type, eq, a == b)                                                                            \
    X(type, ne, (a < b) || (a > b))                                                                \
    X(type, lt, a < b)                                                                             \
    X(type, le, a <= b)                                                                            \
    X(type, gt, a > b)                                                                             \
    X(type, ge, a >= b)

#define UNORDERED_COMPARES(X, type)                                                                \
    X(type, equ, !((a < b) || (a > b)))                                                            \
    X(type, neu, a != b)                                                                           \
    X(type, ltu, !(a >= b))                                                                        \
    X(type, leu, !(a > b))                                                                         \
    X(type, gtu, !(a <= b))                                                                        \
    X(type, geu, !(a < b))                                                                         \
    X(type, num, a == a && b == b)                                                                 \
    X(type, nan, a != a || b != b)

ORDERED_COMPARES(DEFINE_COMPARE, u16)
ORDERED_COMPARES(DEFINE_COMPARE, s16)
ORDERED_COMPARES(DEFINE_COMPARE, u32)
ORDERED_COMPARES(DEFINE_COMPARE, s32)
ORDERED_COMPARES(DEFINE_COMPARE, u64)
ORDERED_COMPARES(DEFINE_COMPARE, s64)
ORDERED_COMPARES(DEFINE_COMPARE, f32)
ORDERED_COMPARES(DEFINE_COMPARE, f64)
UNORDERED_COMPARES(DEFINE_COMPARE, f32)
UNORDERED_COMPARES(DEFINE_COMPARE, f64)

typedef struct ptx_compare_row {
    const char* name;
    u8 type;
    ptx_compare compare;
} ptx_compare_row;

#define COMPARE_ROW_u16(name) {#name, TYPE_U16, compare_##name##_u16},
#define COMPARE_ROW_s16(name) {#name, TYPE_S16, compare_##name##_s16},
#define COMPARE_ROW_u32(name) {#name, TYPE_U32, compare_##name##_u32},
#define COMPARE_ROW_s32(name) {#name, TYPE_S32, compare_##name##_s32},
#define COMPARE_ROW_u64(name) {#name, TYPE_U64, compare_##name##_u64},
#define COMPARE_ROW_s64(name) {#name, TYPE_S64, compare_##name##_s64},
#define COMPARE_ROW_f32(name) {#name, TYPE_F32, compare_##name##_f32},
#define COMPARE_ROW_f64(name) {#name, TYPE_F64, compare_##name##_f64},
#define COMPARE_ROW(type, name, expression) COMPARE_ROW_##type(name)

static const ptx_compare_row PTX_COMPARES[] = {
    // clang-format off
    ORDERED_COMPARES(COMPARE_ROW, u16)
    ORDERED_COMPARES(COMPARE_ROW, s16)
    ORDERED_COMPARES(COMPARE_ROW, u32)
    ORDERED_COMPARES(COMPARE_ROW, s32)
    ORDERED_COMPARES(COMPARE_ROW, u64)
    ORDERED_COMPARES(COMPARE_ROW, s64)
    ORDERED_COMPARES(COMPARE_ROW, f32)
    ORDERED_COMPARES(COMPARE_ROW, f64)
    UNORDERED_COMPARES(COMPARE_ROW, f32)
    UNORDERED_COMPARES(COMPARE_ROW, f64)
    // clang-format on
    // Untyped bits support equality comparisons only; lo, ls, hi, hs are the unsigned order.
    {"eq", TYPE_B16, compare_eq_u16},
    {"ne", TYPE_B16, compare_ne_u16},
    {"eq", TYPE_B32, compare_eq_u32},
    {"ne", TYPE_B32, compare_ne_u32},
    {"eq", TYPE_B64, compare_eq_u64},
    {"ne", TYPE_B64, compare_ne_u64},
    {"lo", TYPE_U32, compare_lt_u32},
    {"ls", TYPE_U32, compare_le_u32},
    {"hi", TYPE_U32, compare_gt_u32},
    {"hs", TYPE_U32, compare_ge_u32},
    {"lo", TYPE_U64, compare_lt_u64},
    {"ls", TYPE_U64, compare_le_u64},
    {"hi", TYPE_U64, compare_gt_u64},
    {"hs", TYPE_U64, compare_ge_u64},
};

enum { COMBINE_NONE, COMBINE_AND, COMBINE_OR, COMBINE_XOR };

static u32 combine(u32 bits, u32 with, u32 how) {
    switch (how) {
    case COMBINE_AND:
        return bits & with;
    case COMBINE_OR:
        return bits | with;
    case COMBINE_XOR:
        return bits ^ with;
    default:
        return bits;
    }
}

static f32 compared(const ptx_warp* w, const ptx_insn* in, u32 index, u32 lane) {
    switch (in->type2) {
    case TYPE_F16:
        return f16_to_f32(LANES_u16(w, in->arg[index])[lane]);
    case TYPE_BF16:
        return bf16_to_f32(LANES_u16(w, in->arg[index])[lane]);
    default:
        return f32_in(LANES_f32(w, in->arg[index])[lane], in->flags);
    }
}

// Compares arg[2] and arg[3], before combination with predicate arg[4]. Halves are compared as f32.
static u32 compare_lanes(const ptx_warp* w, const ptx_insn* in) {
    const bool half = in->type2 == TYPE_F16 || in->type2 == TYPE_BF16;
    if (!half && !(in->flags & FLAG_FTZ)) {
        return in->compare(w->file + in->arg[2], w->file + in->arg[3]);
    }
    f32 a[PTX_LANES];
    f32 b[PTX_LANES];
    for (u32 l = 0; l < PTX_LANES; l++) {
        a[l] = compared(w, in, 2, l);
        b[l] = compared(w, in, 3, l);
    }
    return in->compare(a, b);
}

// setp p|q, a, b, c: p = (a ? b) op c, q = !(a ? b) op c.
static bool exec_setp(ptx_warp* w, const ptx_insn* in, u32 mask) {
    const u32 bits = compare_lanes(w, in);
    if (in->sub == COMBINE_NONE) {
        pred_put(w, in->arg[0], mask, bits);
        pred_put(w, in->arg[1], mask, ~bits);
        return true;
    }
    const u32 with = pred_get(w, in, 4);
    pred_put(w, in->arg[0], mask, combine(bits, with, in->sub));
    pred_put(w, in->arg[1], mask, combine(~bits, with, in->sub));
    return true;
}

static bool exec_set(ptx_warp* w, const ptx_insn* in, u32 mask) {
    u32 bits = compare_lanes(w, in);
    if (in->sub != COMBINE_NONE) {
        bits = combine(bits, pred_get(w, in, 4), in->sub);
    }
    const u32 yes = in->type == TYPE_F32 ? 0x3f800000u : PTX_FULL;
    u32* d = LANES_u32(w, in->arg[0]);
    EACH_LANE(u32, , bits >> l & 1u ? yes : 0)
    return true;
}

enum {
    TESTP_FINITE,
    TESTP_INFINITE,
    TESTP_NUMBER,
    TESTP_NOTANUMBER,
    TESTP_NORMAL,
    TESTP_SUBNORMAL
};

static bool exec_testp(ptx_warp* w, const ptx_insn* in, u32 mask) {
    u32 bits = 0;
    for (u32 l = 0; l < PTX_LANES; l++) {
        const bool single = in->type == TYPE_F32;
        const int class_of = single ? fpclassify(LANES_f32(w, in->arg[1])[l])
                                    : fpclassify(LANES_f64(w, in->arg[1])[l]);
        const bool answer[] = {class_of != FP_NAN && class_of != FP_INFINITE,
                               class_of == FP_INFINITE,
                               class_of != FP_NAN,
                               class_of == FP_NAN,
                               class_of == FP_NORMAL,
                               class_of == FP_SUBNORMAL};
        bits |= (u32)answer[in->sub] << l;
    }
    pred_put(w, in->arg[0], mask, bits);
    return true;
}

// ---- mov, lop3 ----------------------------------------------------------------------------------

#define MOVE_OPS(X)                                                                                \
    X(mov_16, u16, u16, a)                                                                         \
    X(mov_32, u32, u32, a)                                                                         \
    X(mov_64, u64, u64, a)

#define DEFINE_MOVE(name, td, ta, expression) DEFINE_UNARY(name, "", td, ta, expression)

MOVE_OPS(DEFINE_MOVE)

static bool exec_mov_clock(ptx_warp* w, const ptx_insn* in, u32 mask) {
    w->run->clock++;
    for (u32 l = 0; l < PTX_LANES; l++) {
        if (lane_on(mask, l)) {
            lane_put(w, in->arg[0], in->width[0], l, w->run->clock);
        }
    }
    return true;
}

// mov.b64 d, {a, b} and the like: the first element is the low part.
static bool exec_mov_pack(ptx_warp* w, const ptx_insn* in, u32 mask) {
    const u32 part = PTX_TYPES[in->type].bytes / in->vector;
    for (u32 l = 0; l < PTX_LANES; l++) {
        u64 value = 0;
        for (u32 i = 0; i < in->vector; i++) {
            value |= lane_get(w, in->arg[1 + i], part, l) << (8 * part * i);
        }
        if (lane_on(mask, l)) {
            lane_put(w, in->arg[0], in->width[0], l, value);
        }
    }
    return true;
}

static bool exec_mov_unpack(ptx_warp* w, const ptx_insn* in, u32 mask) {
    const u32 part = PTX_TYPES[in->type].bytes / in->vector;
    for (u32 l = 0; l < PTX_LANES; l++) {
        const u64 value = lane_get(w, in->arg[in->vector], PTX_TYPES[in->type].bytes, l);
        for (u32 i = 0; i < in->vector && lane_on(mask, l); i++) {
            if (in->arg[i] != PTX_NONE) {
                lane_put(w, in->arg[i], part, l, value >> (8 * part * i));
            }
        }
    }
    return true;
}

static bool exec_lop3(ptx_warp* w, const ptx_insn* in, u32 mask) {
    u32* d = LANES_u32(w, in->arg[0]);
    const u32* as = LANES_u32(w, in->arg[1]);
    const u32* bs = LANES_u32(w, in->arg[2]);
    const u32* cs = LANES_u32(w, in->arg[3]);
    const u32 table = (u32)in->offset;
    EACH_LANE(u32, , logic3(as[l], bs[l], cs[l], table))
    return true;
}

// ---- f16 and bf16 arithmetic --------------------------------------------------------------------

enum { HALF_ADD, HALF_SUB, HALF_MUL, HALF_FMA, HALF_MIN, HALF_MAX, HALF_NEG, HALF_ABS };

// Rounds the exact result once; sums and products are computed in f64, rounded to odd.
static u16 half_compute(const ptx_insn* in, const u16 x[3]) {
    const bool bf = in->type == TYPE_BF16 || in->type == TYPE_BF16X2;
    const f64 a = half_to_f64(x[0], bf);
    const f64 b = half_to_f64(x[1], bf);
    const f64 c = half_to_f64(x[2], bf);
    f64 y = 0.0;
    switch (in->sub) {
    case HALF_NEG:
        return x[0] ^ 0x8000u;
    case HALF_ABS:
        return x[0] & 0x7fffu;
    case HALF_ADD:
        y = add_odd(a, b);
        break;
    case HALF_SUB:
        y = add_odd(a, -b);
        break;
    case HALF_MUL:
        y = a * b;
        break;
    case HALF_FMA:
        y = add_odd(a * b, c);
        break;
    case HALF_MIN:
        y = f64_min(a, b);
        break;
    default:
        y = f64_max(a, b);
        break;
    }
    if ((in->flags & FLAG_RELU) && !(y > 0.0)) {
        y = y != y ? y : 0.0;
    }
    if (in->flags & FLAG_SAT) {
        y = y > 0.0 ? (y < 1.0 ? y : 1.0) : 0.0;
    }
    return half_from_f64(y, bf, ROUND_NEAREST);
}

static bool exec_half(ptx_warp* w, const ptx_insn* in, u32 mask) {
    const u32 bytes = PTX_TYPES[in->type].bytes;
    for (u32 l = 0; l < PTX_LANES; l++) {
        if (!lane_on(mask, l)) {
            continue;
        }
        u64 value = 0;
        for (u32 half = 0; half < bytes / 2; half++) {
            u16 x[3] = {0, 0, 0};
            for (u32 i = 0; i < in->vector; i++) {
                x[i] = (u16)(lane_get(w, in->arg[1 + i], bytes, l) >> (16 * half));
            }
            value |= (u64)half_compute(in, x) << (16 * half);
        }
        lane_put(w, in->arg[0], bytes, l, value);
    }
    return true;
}

#endif
