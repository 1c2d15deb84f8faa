// attn.cuh - how attention blocks find their work; used by attn_tc.cuh and attn_f32.cu.
//
// cu holds n_seqs + 1 ascending token offsets; sequence s is [cu[s], cu[s + 1]) and unused entries
// repeat the last one. The tokens from cu[n_seqs] on are a tail, which is treated as one more
// sequence that is only zeroed. The tile numbers of sequence s start at cu[s] / rows + s, which
// leaves enough of them for its tiles, whatever its length. A block can therefore find its sequence
// by binary search, without a list, and floor(tokens / rows) + n_seqs + 1 blocks cover
// every packing.
#ifndef QLORA_ATTN_CUH
#define QLORA_ATTN_CUH

#include "../common.cuh"

struct attn_tile {
    int32_t begin;  // first token of the sequence
    int32_t length; // length of the sequence
    int32_t first;  // first row of the tile within the sequence; >= length: nothing to do
    bool tail;      // not a sequence: the rows are zeroed
};

// Clamps the offsets to 0 .. tokens, so that no contents of cu can make a block access memory
// outside the matrices.
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
        t.first = t.length; // cu[0] is not 0: these tokens belong to no sequence
    }
    return t;
}

#endif
