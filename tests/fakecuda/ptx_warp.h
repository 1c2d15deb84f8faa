// ptx_warp.h - what the lanes of a warp do together: shuffles, votes, reductions, mma.
#ifndef FAKECUDA_PTX_WARP_H
#define FAKECUDA_PTX_WARP_H

#include "ptx_memory.h"

// The member mask that lane l named.
static u32 members_of(const ptx_warp* w, const ptx_insn* in, u32 lane) {
    return LANES_u32(w, in->arg[in->members])[lane];
}

// Every lane must be a member of its own mask, and members must agree on it.
static bool members_check(ptx_warp* w, const ptx_insn* in, u32 mask) {
    const u32 first = members_of(w, in, lane_first(mask));
    bool uniform = (mask & ~first) == 0;
    for (u32 l = 0; l < PTX_LANES; l++) {
        uniform = uniform && (!lane_on(mask, l) || members_of(w, in, l) == first);
    }
    if (uniform) {
        return true;
    }
    for (u32 l = 0; l < PTX_LANES; l++) {
        if (!lane_on(mask, l)) {
            continue;
        }
        const u32 members = members_of(w, in, l);
        if (!lane_on(members, l)) {
            return trap(w, in, PTX_TRAP_SYNC, l, "lane %u is not in its member mask 0x%08x", l, members);
        }
        for (u32 m = 0; m < PTX_LANES; m++) {
            if (lane_on(members & mask, m) && members_of(w, in, m) != members) {
                return trap(w, in, PTX_TRAP_SYNC, l, "lanes %u and %u name different member masks", l, m);
            }
        }
    }
    return true;
}

static bool exec_activemask(ptx_warp* w, const ptx_insn* in, u32 mask) {
    u32* d = LANES_u32(w, in->arg[0]);
    EACH_LANE(u32, , mask)
    return true;
}

static bool exec_nothing(ptx_warp* w, const ptx_insn* in, u32 mask) {
    (void)w;
    (void)in;
    (void)mask;
    return true;
}

static bool exec_syncwarp(ptx_warp* w, const ptx_insn* in, u32 mask) {
    return members_check(w, in, mask);
}

static bool exec_trap(ptx_warp* w, const ptx_insn* in, u32 mask) {
    return trap(w, in, PTX_TRAP_OTHER, lane_first(mask), "the kernel trapped");
}

// ---- shfl ---------------------------------------------------------------------------------------

enum { SHFL_UP, SHFL_DOWN, SHFL_BFLY, SHFL_IDX };

// The lane that lane l reads, or l itself and *valid = false when it lies outside the segment.
static u32 shuffle_source(u32 mode, u32 l, u32 b, u32 c, bool* valid) {
    const u32 segment = c >> 8 & 31u;
    const u32 clamp = c & 31u;
    const u32 step = b & 31u;
    const s32 bound = (s32)((l & segment) | (clamp & ~segment));
    s32 j = 0;
    switch (mode) {
    case SHFL_UP:
        j = (s32)l - (s32)step;
        *valid = j >= bound;
        break;
    case SHFL_DOWN:
        j = (s32)(l + step);
        *valid = j <= bound;
        break;
    case SHFL_BFLY:
        j = (s32)(l ^ step);
        *valid = j <= bound;
        break;
    default:
        j = (s32)((l & segment) | (step & ~segment));
        *valid = j <= bound;
        break;
    }
    return *valid ? (u32)j : l;
}

// arg: result, predicate or PTX_NONE, value, b, c, member mask.
static bool exec_shfl(ptx_warp* w, const ptx_insn* in, u32 mask) {
    if (!members_check(w, in, mask)) {
        return false;
    }
    u32 value[PTX_LANES];
    memcpy(value, LANES_u32(w, in->arg[2]), sizeof value);
    const u32* bs = LANES_u32(w, in->arg[3]);
    const u32* cs = LANES_u32(w, in->arg[4]);
    u32* d = LANES_u32(w, in->arg[0]);
    u32 result[PTX_LANES] = {0};
    u32 valid_bits = 0;
    for (u32 l = 0; l < PTX_LANES; l++) {
        if (!lane_on(mask, l)) {
            continue;
        }
        bool valid = false;
        const u32 from = shuffle_source(in->sub, l, bs[l], cs[l], &valid);
        if (!lane_on(mask, from) && lane_on(w->live, from)) {
            return trap(w, in, PTX_TRAP_SYNC, l, "reads lane %u, which does not take part", from);
        }
        result[l] = lane_on(mask, from) ? value[from] : 0xCBCBCBCBu; // an exited lane has no value
        valid_bits |= (u32)valid << l;
    }
    for (u32 l = 0; l < PTX_LANES; l++) {
        d[l] = lane_on(mask, l) ? result[l] : d[l];
    }
    pred_put(w, in->arg[1], mask, valid_bits);
    return true;
}

// ---- vote, match, redux -------------------------------------------------------------------------

enum { VOTE_ALL, VOTE_ANY, VOTE_UNI, VOTE_BALLOT };

// arg: result, predicate, member mask.
static bool exec_vote(ptx_warp* w, const ptx_insn* in, u32 mask) {
    if (!members_check(w, in, mask)) {
        return false;
    }
    const u32 yes = pred_get(w, in, 1);
    u32 bits = 0;
    for (u32 l = 0; l < PTX_LANES; l++) {
        if (!lane_on(mask, l)) {
            continue;
        }
        const u32 members = members_of(w, in, l) & mask;
        const u32 votes = yes & members;
        const bool answer[] = {votes == members, votes != 0, votes == members || votes == 0};
        if (in->sub == VOTE_BALLOT) {
            LANES_u32(w, in->arg[0])[l] = votes;
        } else {
            bits |= (u32)answer[in->sub] << l;
        }
    }
    if (in->sub != VOTE_BALLOT) {
        pred_put(w, in->arg[0], mask, bits);
    }
    return true;
}

// arg: result, predicate or PTX_NONE, value, member mask. in->sub: 1 for match.all.
static bool exec_match(ptx_warp* w, const ptx_insn* in, u32 mask) {
    if (!members_check(w, in, mask)) {
        return false;
    }
    const u32 size = PTX_TYPES[in->type].bytes;
    u32 result[PTX_LANES] = {0};
    u32 all_bits = 0;
    for (u32 l = 0; l < PTX_LANES; l++) {
        const u32 members = lane_on(mask, l) ? members_of(w, in, l) & mask : 0;
        u32 equal = 0;
        for (u32 m = 0; m < PTX_LANES; m++) {
            const bool match = lane_get(w, in->arg[2], size, l) == lane_get(w, in->arg[2], size, m);
            equal |= (u32)(lane_on(members, m) && match) << m;
        }
        all_bits |= (u32)(equal == members) << l;
        result[l] = in->sub ? (equal == members ? members : 0) : equal;
    }
    for (u32 l = 0; l < PTX_LANES; l++) {
        if (lane_on(mask, l)) {
            LANES_u32(w, in->arg[0])[l] = result[l];
        }
    }
    pred_put(w, in->arg[1], mask, all_bits);
    return true;
}

// arg: result, value, member mask. in->sub is one of ATOM_ADD, MIN, MAX, AND, OR, XOR.
static bool exec_redux(ptx_warp* w, const ptx_insn* in, u32 mask) {
    if (!members_check(w, in, mask)) {
        return false;
    }
    u32 result[PTX_LANES] = {0};
    const u32* value = LANES_u32(w, in->arg[1]);
    for (u32 l = 0; l < PTX_LANES; l++) {
        const u32 members = lane_on(mask, l) ? members_of(w, in, l) & mask : 0;
        u64 sum = value[l];
        for (u32 m = 0; m < PTX_LANES; m++) {
            if (lane_on(members, m) && m != l) {
                sum = atom_apply(in->sub, (ptx_type)in->type, (u32)sum, value[m], 0);
            }
        }
        result[l] = (u32)sum;
    }
    for (u32 l = 0; l < PTX_LANES; l++) {
        if (lane_on(mask, l)) {
            LANES_u32(w, in->arg[0])[l] = result[l];
        }
    }
    return true;
}

// ---- mma ----------------------------------------------------------------------------------------

// m16n8kK, A row-major 16 x K, B column-major K x 8. Lane l holds, with g = l / 4 and t = l % 4:
//   C: register i: row g + 8 (i / 2), column 2 t + i % 2
//   16-bit A: register i: row g + 8 (i % 2), columns 2 t + 8 (i / 2) and the next; B alike, rows by k
//   tf32 A: register i: row g + 8 (i % 2), column t + 4 (i / 2); B alike
// The sum runs over k from 0 up, starting from C, each product and each sum rounded to f32; products of
// 16-bit and tf32 numbers are exact.
typedef struct ptx_mma {
    f32 a[16][16];
    f32 b[16][8];
    f32 c[16][8];
} ptx_mma;

static f32 mma_element(u32 raw, u32 half, u32 type) {
    const u16 bits = (u16)(raw >> (16 * half));
    if (type == TYPE_TF32) {
        return f32_make(raw & 0xffffe000u);
    }
    return type == TYPE_F16 ? f16_to_f32(bits) : bf16_to_f32(bits);
}

static void mma_gather(const ptx_warp* w, const ptx_insn* in, ptx_mma* m, u32 a_count, u32 first) {
    const u32 pair = in->type2 == TYPE_TF32 ? 1 : 2; // elements in a register
    for (u32 i = 0; i < a_count; i++) {
        const u32* from = LANES_u32(w, in->arg[first + i]);
        for (u32 l = 0; l < PTX_LANES; l++) {
            for (u32 h = 0; h < pair; h++) {
                m->a[l / 4 + 8 * (i % 2)][l % 4 * pair + 4 * pair * (i / 2) + h] =
                    mma_element(from[l], h, in->type2);
            }
        }
    }
    for (u32 i = 0; i < a_count / 2; i++) {
        const u32* from = LANES_u32(w, in->arg[first + a_count + i]);
        for (u32 l = 0; l < PTX_LANES; l++) {
            for (u32 h = 0; h < pair; h++) {
                m->b[l % 4 * pair + 4 * pair * i + h][l / 4] = mma_element(from[l], h, in->type2);
            }
        }
    }
}

static void mma_multiply(ptx_mma* m, u32 depth) {
    for (u32 i = 0; i < 16; i++) {
        f32 sum[8];
        memcpy(sum, m->c[i], sizeof sum);
        for (u32 k = 0; k < depth; k++) {
            const f32 a = m->a[i][k];
            for (u32 j = 0; j < 8; j++) {
                sum[j] += a * m->b[k][j];
            }
        }
        memcpy(m->c[i], sum, sizeof sum);
    }
}

// in->vector is K, in->type the type of C and D, in->type2 that of A and B.
static bool exec_mma(ptx_warp* w, const ptx_insn* in, u32 mask) {
    if (mask != PTX_FULL) {
        return trap(w, in, PTX_TRAP_SYNC, lane_first(mask), "needs all 32 lanes, has 0x%08x", mask);
    }
    const u32 c_count = in->type == TYPE_F32 ? 4 : 2;
    const u32 a_count = in->vector / (in->type2 == TYPE_TF32 ? 2u : 4u);
    const u32 c_first = c_count + a_count + a_count / 2;
    ptx_mma m;
    mma_gather(w, in, &m, a_count, c_count);
    for (u32 i = 0; i < 4; i++) {
        for (u32 l = 0; l < PTX_LANES; l++) {
            f32* c = &m.c[l / 4 + 8 * (i / 2)][l % 4 * 2 + i % 2];
            *c = c_count == 4 ? LANES_f32(w, in->arg[c_first + i])[l]
                              : mma_element(LANES_u32(w, in->arg[c_first + i / 2])[l], i % 2, TYPE_F16);
        }
    }
    mma_multiply(&m, in->vector);
    for (u32 i = 0; i < c_count; i++) {
        for (u32 l = 0; l < PTX_LANES; l++) {
            if (c_count == 4) {
                LANES_f32(w, in->arg[i])[l] = f32_nan(m.c[l / 4 + 8 * (i / 2)][l % 4 * 2 + i % 2]);
            } else {
                const f32* pair = &m.c[l / 4 + 8 * i][l % 4 * 2];
                LANES_u32(w, in->arg[i])[l] = (u32)f16_from_f32(pair[1]) << 16 | f16_from_f32(pair[0]);
            }
        }
    }
    w->run->stats.mma++;
    return true;
}

#endif
