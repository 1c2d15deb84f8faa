// ptx_warp.h - instructions that the lanes of a warp execute together: shuffles, votes,
// reductions, mma.
#ifndef FAKECUDA_PTX_WARP_H
#define FAKECUDA_PTX_WARP_H

#include "ptx_memory.h"

// The member mask given by lane l.
static u32 members_of(const ptx_warp* w, const ptx_insn* in, u32 lane) {
    return LANES_u32(w, in->arg[in->members])[lane];
}

// Every lane must be a member of its own mask, and all members must give the same mask.
static bool members_check(ptx_warp* w, const ptx_insn* in, u32 mask) {
    const u32* all = LANES_u32(w, in->arg[in->members]);
    const u32 first = all[lane_first(mask)];
    u32 differ = mask & ~first;
    for (u32 l = 0; l < PTX_LANES; l++) {
        differ |= lane_on(mask, l) ? all[l] ^ first : 0;
    }
    if (differ == 0) {
        return true;
    }
    for (u32 l = 0; l < PTX_LANES; l++) {
        if (!lane_on(mask, l)) {
            continue;
        }
        const u32 members = members_of(w, in, l);
        if (!lane_on(members, l)) {
            return trap(w, in, PTX_TRAP_SYNC, l, "lane %u is not in its member mask 0x%08x", l,
                        members);
        }
        for (u32 m = 0; m < PTX_LANES; m++) {
            if (lane_on(members & mask, m) && members_of(w, in, m) != members) {
                return trap(w, in, PTX_TRAP_SYNC, l, "lanes %u and %u name different member masks",
                            l, m);
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

// The lane that lane l reads, or l itself and *valid = false if it is outside the segment.
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
    u32 from[PTX_LANES];
    u32 valid_bits = 0;
    for (u32 l = 0; l < PTX_LANES; l++) {
        bool valid = false;
        from[l] = shuffle_source(in->sub, l, bs[l], cs[l], &valid);
        valid_bits |= (u32)valid << l;
    }
    for (u32 l = 0; l < PTX_LANES && mask != PTX_FULL; l++) {
        if (!lane_on(mask, l) || lane_on(mask, from[l])) {
            continue;
        }
        if (lane_on(w->live, from[l])) {
            return trap(w, in, PTX_TRAP_SYNC, l, "reads lane %u, which does not take part",
                        from[l]);
        }
        value[from[l]] = 0xCBCBCBCBu; // an exited lane has no value
    }
    for (u32 l = 0; l < PTX_LANES; l++) {
        const u32 result = value[from[l]];
        d[l] = lane_on(mask, l) ? result : d[l];
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
//   C:        register i: row g + 8 (i / 2), column 2 t + i % 2
//   16-bit A: register i: row g + 8 (i % 2), columns 2 t + 8 (i / 2) and the next
//   16-bit B: the same, with rows by k
//   tf32 A:   register i: row g + 8 (i % 2), column t + 4 (i / 2); B the same
// The sum over k starts from C and proceeds in ascending order, with each product and each sum
// rounded to f32; products of 16-bit and tf32 numbers are exact.
typedef f32 f32x4 __attribute__((vector_size(16)));

typedef struct ptx_mma {
    f32 a[16][16];
    f32 b[16][8];
    f32 c[16][8];
} ptx_mma;

// The elements that a register of A or B holds for each lane: the low and high halves, or one tf32.
static void mma_unpack(const u32* from, u32 type, f32 low[PTX_LANES], f32 high[PTX_LANES]) {
    if (type == TYPE_BF16) {
        for (u32 l = 0; l < PTX_LANES; l++) {
            low[l] = f32_make(from[l] << 16);
            high[l] = f32_make(from[l] & 0xffff0000u);
        }
    } else if (type == TYPE_F16) {
        for (u32 l = 0; l < PTX_LANES; l++) {
            low[l] = f16_to_f32((u16)from[l]);
            high[l] = f16_to_f32((u16)(from[l] >> 16));
        }
    } else {
        for (u32 l = 0; l < PTX_LANES; l++) {
            low[l] = f32_make(from[l] & 0xffffe000u);
        }
    }
}

// Lane l's value goes to or comes from row l / 4, column step * (l % 4) of a matrix.
static inline void mma_place(f32* to, u32 width, u32 step, const f32 value[PTX_LANES]) {
    for (u32 g = 0; g < 8; g++) {
        f32* row = to + (size_t)g * width;
        row[0] = value[4 * g];
        row[step] = value[4 * g + 1];
        row[2 * step] = value[4 * g + 2];
        row[3 * step] = value[4 * g + 3];
    }
}

static inline void mma_pick(const f32* from, u32 width, u32 step, f32 value[PTX_LANES]) {
    for (u32 g = 0; g < 8; g++) {
        const f32* row = from + (size_t)g * width;
        value[4 * g] = f32_nan(row[0]);
        value[4 * g + 1] = f32_nan(row[step]);
        value[4 * g + 2] = f32_nan(row[2 * step]);
        value[4 * g + 3] = f32_nan(row[3 * step]);
    }
}

static void mma_gather(const ptx_warp* w, const ptx_insn* in, ptx_mma* m, u32 a_count, u32 first) {
    const u32 pair = in->type2 == TYPE_TF32 ? 1 : 2; // elements per register
    f32 element[2][PTX_LANES];
    for (u32 i = 0; i < a_count; i++) {
        mma_unpack(LANES_u32(w, in->arg[first + i]), in->type2, element[0], element[1]);
        for (u32 h = 0; h < pair; h++) {
            mma_place(&m->a[8 * (i % 2)][4 * pair * (i / 2) + h], 16, pair, element[h]);
        }
    }
    for (u32 i = 0; i < a_count / 2; i++) {
        mma_unpack(LANES_u32(w, in->arg[first + a_count + i]), in->type2, element[0], element[1]);
        for (u32 h = 0; h < pair; h++) { // B's columns correspond to A's rows
            mma_place(&m->b[4 * pair * i + h][0], 1, 8 * pair, element[h]);
        }
    }
}

// Rows i to i + 3, columns j to j + 3 of C: four independent sums.
static void mma_tile(ptx_mma* m, u32 depth, u32 i, u32 j) {
    f32x4 sum[4];
    for (u32 r = 0; r < 4; r++) {
        memcpy(&sum[r], &m->c[i + r][j], sizeof sum[r]);
    }
    for (u32 k = 0; k < depth; k++) {
        f32x4 b;
        memcpy(&b, &m->b[k][j], sizeof b);
        sum[0] += m->a[i][k] * b;
        sum[1] += m->a[i + 1][k] * b;
        sum[2] += m->a[i + 2][k] * b;
        sum[3] += m->a[i + 3][k] * b;
    }
    for (u32 r = 0; r < 4; r++) {
        memcpy(&m->c[i + r][j], &sum[r], sizeof sum[r]);
    }
}

static void mma_multiply(ptx_mma* m, u32 depth) {
    for (u32 i = 0; i < 16; i += 4) {
        mma_tile(m, depth, i, 0);
        mma_tile(m, depth, i, 4);
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
    f32 element[2][PTX_LANES];
    for (u32 i = 0; i < c_count; i++) {
        if (c_count == 4) {
            mma_place(&m.c[8 * (i / 2)][i % 2], 8, 2, LANES_f32(w, in->arg[c_first + i]));
        } else {
            mma_unpack(LANES_u32(w, in->arg[c_first + i]), TYPE_F16, element[0], element[1]);
            mma_place(&m.c[8 * i][0], 8, 2, element[0]);
            mma_place(&m.c[8 * i][1], 8, 2, element[1]);
        }
    }
    mma_multiply(&m, in->vector);
    for (u32 i = 0; i < c_count; i++) {
        if (c_count == 4) {
            mma_pick(&m.c[8 * (i / 2)][i % 2], 8, 2, LANES_f32(w, in->arg[i]));
            continue;
        }
        mma_pick(&m.c[8 * i][0], 8, 2, element[0]);
        mma_pick(&m.c[8 * i][1], 8, 2, element[1]);
        for (u32 l = 0; l < PTX_LANES; l++) {
            const u32 high = f16_from_f32(element[1][l]);
            LANES_u32(w, in->arg[i])[l] = high << 16 | f16_from_f32(element[0][l]);
        }
    }
    w->run->stats.mma++;
    return true;
}

#endif
