// attn.cuh - how attention blocks find their work; shared by attn.cu and attn_f32.cu.
//
// cu holds n_seqs + 1 ascending token offsets; sequence s is [cu[s], cu[s + 1]), unused entries
// repeat the last one, and the tokens from cu[n_seqs] on are a tail, treated as one more sequence
// that is only zeroed. Sequence s owns the tile numbers from cu[s] / rows + s on: enough for its
// tiles, whatever its length, so a block finds its sequence by a binary search, no list is needed,
// and floor(tokens / rows) + n_seqs + 1 blocks cover every packing.
#ifndef QLORA_ATTN_CUH
#define QLORA_ATTN_CUH

#include "common.cuh"

struct attn_tile {
    int32_t begin;  // first token of the sequence
    int32_t length; // of the sequence
    int32_t first;  // first row of the tile, counted in the sequence; >= length: nothing to do
    bool tail;      // not a sequence: rows to be zeroed
};

// Whatever stands in cu, no block leaves the matrices: offsets are taken into 0 .. tokens.
__device__ __forceinline__ int32_t attn_offset(const int32_t* cu, int32_t i, int32_t tokens) {
    return min(max(cu[i], 0), tokens);
}

__device__ __forceinline__ attn_tile attn_find(const int32_t* cu, int32_t n_seqs, int32_t tokens,
                                               int32_t rows, int32_t id) {
    int32_t low = 0;
    int32_t high = n_seqs;
    while (low < high) {
        int32_t middle = (low + high + 1) >> 1;
        if (attn_offset(cu, middle, tokens) / rows + middle <= id) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    attn_tile t;
    t.begin = attn_offset(cu, low, tokens);
    t.tail = low == n_seqs;
    t.length = (t.tail ? tokens : attn_offset(cu, low + 1, tokens)) - t.begin;
    t.first = (id - (t.begin / rows + low)) * rows;
    if (t.first < 0) {
        t.first = t.length; // cu[0] is not 0: these tokens belong to nobody
    }
    return t;
}

#endif
