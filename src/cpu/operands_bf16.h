// ---- operands in bf16 ---------------------------------------------------------------------------

// The same as qlora__lines_pack, into the panels of qlora__cpu_bf16. Such a panel has half the size
// of one in f32, so what is counted in floats there, such as its stride, is half the steps here.

#define QLORA__SHORT 256 // elements that are converted at a time if they are not f32

// n elements of an NF4 weight from element `first` on.
static void qlora__operand_nf4_bf16(const qlora__cpu_bf16* bf16, const qlora_nf4* w, int64_t first,
                                    int64_t n, uint16_t* stage) {
    for (int64_t done = 0; done < n;) {
        int64_t e = first + done;
        float scale = 0.0f;
        int64_t now = qlora__nf4_together(w, e, n - done, &scale);
        if (now > 0) {
            bf16->nf4(w->maps, scale, w->codes + e / 2, now, stage + done);
        } else {
            stage[done] = qlora__nf4_alone(w, e, scale);
        }
        done += qlora__max(now, 1);
    }
}

// n elements of a piece: where they are, or in `stage`.
static const uint16_t* qlora__lines_bf16(const qlora__cpu_gemm* cpu, const qlora__cpu_bf16* bf16,
                                         const qlora__lines_piece* p, int64_t first, int64_t n,
                                         uint16_t* stage) {
    const qlora__operand* o = p->from;
    bool plain = !qlora__lines_rounded(p);
    if (plain && o->nf4 != NULL) {
        qlora__operand_nf4_bf16(bf16, o->nf4, first, n, stage);
        return stage;
    }
    if (plain && o->fp8 == NULL) {
        return (const uint16_t*)o->data + first;
    }
    bool in_place = o->dtype == QLORA_F32;
    for (int64_t i = 0; i < n;) {
        float some[QLORA__SHORT];
        int64_t now = in_place ? n : qlora__min(QLORA__SHORT, n - i);
        const float* from = qlora__operand_run(cpu, o, first + i, now, some);
        bf16->round(from, p->factor, now, stage + i);
        i += now;
    }
    return stage;
}

// Lines whose elements are next to each other.
static void qlora__lines_pack_lines(const qlora__cpu_gemm* cpu, const qlora__cpu_bf16* bf16,
                                    const qlora__cpu_bf16_side* side, const qlora__lines_piece* p,
                                    int64_t width, int64_t stride, const uint16_t* zero,
                                    uint16_t* out) {
    uint16_t stage[8 * QLORA__KC];
    const qlora__operand* o = p->from;
    int64_t padded = qlora__ceil_div(p->count, width) * width;
    for (int64_t i = 0; i < padded; i += bf16->together) {
        uint16_t* to = out + i / width * stride * width * 2;
        for (int64_t k = 0; k < p->steps; k += QLORA__KC) {
            const uint16_t* lines[8];
            int64_t n = qlora__min(QLORA__KC, p->steps - k);
            for (int64_t j = 0; j < bf16->together; j++) {
                int64_t at = (p->first + i + j) * o->ld + p->k + k;
                lines[j] = i + j < p->count
                               ? qlora__lines_bf16(cpu, bf16, p, at, n, stage + j * QLORA__KC)
                               : zero;
            }
            side->lines(lines, n, width, i % width, to + k * width);
        }
    }
}

// The rows of a wide matrix are in different pages, where processors do not look ahead.
static void qlora__lines_expect(const qlora__operand* o, int64_t first, int64_t n) {
    int64_t bytes = (int64_t)qlora_dtype_bytes(o->dtype);
    for (int64_t at = 0; o->data != NULL && at < n * bytes; at += 64) {
        QLORA__WILL_READ((const char*)o->data + first * bytes + at);
    }
}

// Lines whose elements of one k are next to each other, four k at a time.
static void qlora__lines_pack_quads(const qlora__cpu_gemm* cpu, const qlora__cpu_bf16* bf16,
                                    const qlora__cpu_bf16_side* side, const qlora__lines_piece* p,
                                    int64_t width, int64_t stride, uint16_t* out) {
    uint16_t stage[4][QLORA__NC + 8];
    const uint16_t* const rows[4] = {stage[0], stage[1], stage[2], stage[3]};
    const qlora__operand* o = p->from;
    int64_t part = QLORA__NC / width * width; // lines at a time
    int64_t steps = qlora__ceil_div(p->steps, bf16->group) * bf16->group;
    for (int64_t k = 0; k < steps; k += 4) {
        for (int64_t i = 0; i < p->count; i += part) {
            int64_t n = qlora__min(part, p->count - i);
            int64_t padded = qlora__ceil_div(n, width) * width;
            for (int64_t j = 0; j < 4; j++) {
                int64_t have = k + j < p->steps ? n : 0;
                int64_t at = (p->k + k + j) * o->ld + p->first + i;
                const uint16_t* from =
                    have > 0 ? qlora__lines_bf16(cpu, bf16, p, at, n, stage[j]) : stage[j];
                if (k + j + 8 < p->steps) {
                    qlora__lines_expect(o, at + 8 * o->ld, n);
                }
                if (from != stage[j]) {
                    memcpy(stage[j], from, (size_t)n * sizeof *from);
                }
                memset(stage[j] + have, 0, (size_t)(padded + 8 - have) * sizeof *from);
            }
            side->quad(rows, k, padded, width, stride * width * 2,
                       out + i / width * stride * width * 2);
        }
    }
}

// Packs into the panels from `out` on, whose first step begins a group.
static void qlora__lines_pack_bf16(const qlora__cpu_gemm* cpu, const qlora__cpu_bf16* bf16,
                                   const qlora__lines_piece* p, bool left, int64_t width,
                                   int64_t stride, const uint16_t* zero, uint16_t* out) {
    const qlora__cpu_bf16_side* side = left ? &bf16->left : &bf16->right;
    if (p->from->lines) {
        qlora__lines_pack_lines(cpu, bf16, side, p, width, stride, zero, out);
    } else {
        qlora__lines_pack_quads(cpu, bf16, side, p, width, stride, out);
    }
}

#undef QLORA__SHORT
