// What the kernels between the products of a decoding step are given, for one text and for many.
#ifndef QLORA_DECODE_ARGS_CUH
#define QLORA_DECODE_ARGS_CUH

#include "decode_text.cuh"

// Same layout as qlora__decode_norm.
struct decode_norm {
    const bf16* h;
    bf16* h_out;
    const bf16* embed;
    const decode_text* texts;
    const float* y; // [splits, rows, hidden]
    const bf16* sb; // [hidden, z_rank]
    const float* z; // [slices, rows, z_rank]
    const float* after;
    const float* w;
    bf16* x;
    const bf16* a[3]; // [ranks[i], hidden]
    int64_t ld_embed;
    int64_t ldx;
    int32_t ranks[3];
    int32_t z_rank;
    int32_t hidden;
    int32_t rows;
    float scale;
    float eps;
    int32_t slices; // of z
    int32_t splits; // of y, with many texts; 0 is 1
    int32_t mean;   // 1: the norm subtracts the mean
};

// Same layout as qlora__decode_attention.
struct decode_attention {
    const bf16* qkv;
    const bf16* bias;
    const float* q_norm;
    const float* k_norm;
    const float* turn;   // [positions, 2 half]: cosines, sines; null = no rotation
    const float* turn_q; // the same for q
    bf16* cache;
    const int32_t* pages; // [rows, pages of a text]
    const decode_text* texts;
    float* partials; // [rows, heads, pages of a text, dim + 2]
    uint32_t* counters;
    bf16* o;
    int64_t ld; // of qkv
    int64_t ld_cache;
    int64_t ldo;
    int32_t heads;
    int32_t kv_heads;
    int32_t dim;
    int32_t half;
    int32_t neighbours;
    int32_t window;     // 0 = none
    int32_t chunk;      // positions of a page
    int32_t norm_heads; // the norm of q is over one head, or over all: 1 or 0
    float scale;
    float cap;
    float eps;
    int32_t a_rank;
    const bf16* a; // [a_rank, heads * dim], of the next product; null: no z
    float* z;      // [gridDim.x, rows, a_rank]: its partial sums
};

#endif // QLORA_DECODE_ARGS_CUH
