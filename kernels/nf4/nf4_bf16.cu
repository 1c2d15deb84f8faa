// nf4_bf16.cu - the kernels of nf4.cuh that dequantise to 16 bits.
// targets: 80
// groups: bf16 nf4
#include "../adapter/linear.cuh"
#include "nf4.cuh"

NF4_DEQUANTISE(bf16, bf16)
NF4_DEQUANTISE(f16, f16)

enum { PLACE_STACKS = 4, PLACE_PARTS = 3 };

// Same layout as qlora__place_part.
struct place_part {
    const uint8_t* codes;
    const float* absmax; // null if the scales are double-quantised
    const uint8_t* q;
    const float* scales;
    const float* offset;
    const float* maps;
    const bf16* a;  // [rank, in]
    const bf16* sb; // [out, rank]
    int64_t lda;
    int64_t ldsb;
    int32_t out;
    int32_t rank;
    int32_t block_shift; // log2
    int32_t group_shift;
    int32_t row;   // the first one in the operand
    int32_t first; // block of the stack
};

// Same layout as qlora__place_stack.
struct place_stack {
    place_part parts[PLACE_PARTS];
    bf16* operand;
    int64_t ld;
    int64_t in;
    int32_t pad;
    int32_t width;
    int32_t across;   // blocks of a row
    int32_t first;    // block of the launch
    int32_t adapters; // block of the stack from which on they write the adapters
    int32_t unused;
};

struct place_stacks {
    place_stack stacks[PLACE_STACKS];
};

// The operands of up to four stacks of NF4 weights, with their adapters (linear.cuh): what
// nf4_dequantise and place write, in one launch. Parts and stacks that are not there begin at a
// block that is not either. Launch: 256 threads, grid: the blocks of all parts, each as many as for
// nf4_dequantise, a row of blocks after the other, and those of place. Element-wise, one writer per
// output.
QLORA_KERNEL __launch_bounds__(256)
    qlora_nf4_place_bf16(const __grid_constant__ place_stacks p) {
    int32_t number = 0;
#pragma unroll
    for (int i = 1; i < PLACE_STACKS; i++) {
        number = (int32_t)blockIdx.x >= p.stacks[i].first ? i : number;
    }
    const place_stack* s = &p.stacks[number];
    const place_part* w = s->parts;
    int32_t block = (int32_t)blockIdx.x - s->first;
    if (block >= s->adapters) {
        place(s->operand, s->ld, s->in, s->pad, w[0].a, w[0].lda, w[0].sb, w[0].ldsb, w[0].out,
              w[0].rank, w[1].a, w[1].lda, w[1].sb, w[1].ldsb, w[1].out, w[1].rank, w[2].a,
              w[2].lda, w[2].sb, w[2].ldsb, w[2].out, w[2].rank, (uint32_t)(block - s->adapters));
        return;
    }
    w += block >= w[2].first ? 2 : block >= w[1].first ? 1 : 0;
    block -= w->first;
    nf4_dequantise(w->codes, w->absmax, w->q, w->scales, w->offset, w->maps, s->in, 0, 0,
                   s->operand + w->row * s->ld, w->out, s->in, s->ld, w->block_shift,
                   w->group_shift, s->width, 0, (uint32_t)(block / s->across),
                   (uint32_t)(block % s->across));
}
