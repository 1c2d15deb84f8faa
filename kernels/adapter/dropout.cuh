// dropout.cuh - dropout whose mask depends only on an element's identity, not on where it is
// computed.
#ifndef QLORA_DROPOUT_CUH
#define QLORA_DROPOUT_CUH

#include "../vec.cuh"

// Philox 4x32, 10 rounds: four random words from a 128-bit counter and a 64-bit key.
__device__ __forceinline__ void philox(uint32_t (&c)[4], uint32_t key_lo, uint32_t key_hi) {
#pragma unroll
    for (int round = 0; round < 10; round++) {
        uint32_t hi0 = __umulhi(0xd2511f53u, c[0]);
        uint32_t lo0 = 0xd2511f53u * c[0];
        uint32_t hi1 = __umulhi(0xcd9e8d57u, c[2]);
        uint32_t lo1 = 0xcd9e8d57u * c[2];
        c[0] = hi1 ^ c[1] ^ key_lo;
        c[1] = lo1;
        c[2] = hi0 ^ c[3] ^ key_hi;
        c[3] = lo0;
        key_lo += 0x9e3779b9u;
        key_hi += 0xbb67ae85u;
    }
}

// y = x keep / (1 - p), or y += that with accumulate != 0; an element is kept if its random word is
// at least `threshold` = p 2^32. The word of column c is number c % 4 of philox(counter, key) with
//   counter = (c / 4, position, sequence, layer 2^8 + projection)
//   key     = seed + step * 0x9e3779b97f4a7c15
// state = {seed low, seed high, step, unused} in device memory. positions and sequences are [rows].
//
// Launch:
//   threads = a multiple of 32 up to 256
//   grid.x  = cols / (threads * N) rounded up
//   grid.y  = rows, at most 65535
// One writer per output; y may be x.
template <class T>
__device__ __forceinline__ void
dropout(const T* x, int64_t ldx, T* y, int64_t ldy, const int32_t* positions,
        const int32_t* sequences, const uint32_t* state, int32_t where, int64_t rows, int64_t cols,
        uint32_t threshold, float scale, int32_t accumulate) {
    const int N = lanes<T>::N;
    int64_t c = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * N;
    bool vec = rows_aligned(x, ldx) && rows_aligned(y, ldy);
    int64_t left = cols - c;
    if (left <= 0) {
        return;
    }
    uint64_t key =
        ((uint64_t)state[1] << 32 | state[0]) + (uint64_t)state[2] * 0x9e3779b97f4a7c15ull;
    for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
        float v[N];
        float old[N];
        uint4 raw = load_raw(x + row * ldx + c, left, vec);
        uint4 raw_old = make_uint4(0, 0, 0, 0);
        if (accumulate) {
            raw_old = load_raw(y + row * ldy + c, left, vec);
        }
        unpack(raw, v);
        unpack(raw_old, old);
#pragma unroll
        for (int k = 0; k < N; k += 4) {
            uint32_t word[4] = {(uint32_t)((c + k) >> 2), (uint32_t)positions[row],
                                (uint32_t)sequences[row], (uint32_t)where};
            philox(word, (uint32_t)key, (uint32_t)(key >> 32));
#pragma unroll
            for (int i = 0; i < 4; i++) {
                v[k + i] = word[i] >= threshold ? v[k + i] * scale : 0.0f;
                v[k + i] += old[k + i];
            }
        }
        store_raw(y + row * ldy + c, pack(v), left, vec);
    }
}

// NEFTune: h[row] += alpha / sqrt(L cols) u, with L the length of the row's sequence and u uniform
// in [-1, 1), from the same random words as dropout with 2^31 in place of the projection. seqs has
// max_sequences + 1 ascending bounds; rows after the last belong to no sequence and stay as they
// are. Launch as for dropout. One writer per output.
template <class T>
__device__ __forceinline__ void
noise(T* h, int64_t ld, const int32_t* positions, const int32_t* sequences, const uint32_t* state,
      const int32_t* seqs, int64_t max_sequences, int64_t rows, int64_t cols, float alpha) {
    const int N = lanes<T>::N;
    int64_t c = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * N;
    bool vec = rows_aligned(h, ld);
    int64_t left = cols - c;
    if (left <= 0) {
        return;
    }
    uint64_t key =
        ((uint64_t)state[1] << 32 | state[0]) + (uint64_t)state[2] * 0x9e3779b97f4a7c15ull;
    for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
        int64_t low = 0; // the last bound that is not after the row
        int64_t high = max_sequences + 1;
        while (high - low > 1) {
            int64_t middle = (low + high) / 2;
            if (seqs[middle] <= row) {
                low = middle;
            } else {
                high = middle;
            }
        }
        if (low == max_sequences) {
            continue;
        }
        int64_t length = seqs[low + 1] - seqs[low];
        float scale = alpha / sqrtf((float)(length * cols));
        float v[N];
        uint4 raw = load_raw(h + row * ld + c, left, vec);
        unpack(raw, v);
#pragma unroll
        for (int k = 0; k < N; k += 4) {
            uint32_t word[4] = {(uint32_t)((c + k) >> 2), (uint32_t)positions[row],
                                (uint32_t)sequences[row], 0x80000000u};
            philox(word, (uint32_t)key, (uint32_t)(key >> 32));
#pragma unroll
            for (int i = 0; i < 4; i++) {
                v[k + i] += ((float)(word[i] >> 8) * (2.0f / 16777216.0f) - 1.0f) * scale;
            }
        }
        store_raw(h + row * ld + c, pack(v), left, vec);
    }
}

#endif
