// random.cu - random weights from a seed, bit-identical to those of the CPU.
// targets: 75
//
//   x[i] = (sum of twelve 16-bit numbers - 393210) * (deviation / 65536)
//
// The sum of twelve uniform numbers is close enough to normal for weights (it is limited to six
// deviations), and as an integer sum it is exact: there is a single rounding, the same everywhere.
// The words come from Philox 4x32-10 with the counter (pair low, pair high, stream, call) and the
// seed as the key; three calls produce the pair (2p, 2p + 1).
// Launch: 256 threads, grid ceil(n / 512). Element-wise, one writer per output.
#include "../common.cuh"

struct words {
    uint32_t w[4];
};

__device__ __forceinline__ words philox(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3,
                                        uint32_t k0, uint32_t k1) {
#pragma unroll
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c0;
        uint64_t p1 = (uint64_t)0xCD9E8D57u * c2;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)p1;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)p0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    words out = {{c0, c1, c2, c3}};
    return out;
}

template <typename T>
__device__ __forceinline__ void normal(T* out, int64_t n, uint32_t seed_low, uint32_t seed_high,
                                       uint32_t stream, float step) {
    int64_t pair = (int64_t)blockIdx.x * 256 + threadIdx.x;
    if (2 * pair >= n) {
        return;
    }
    int32_t sum[2] = {-393210, -393210};
#pragma unroll
    for (uint32_t call = 0; call < 3; call++) {
        words r = philox((uint32_t)pair, (uint32_t)(pair >> 32), stream, call, seed_low, seed_high);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            sum[(4 * call + i) / 6] += (int32_t)(r.w[i] & 0xffffu) + (int32_t)(r.w[i] >> 16);
        }
    }
    store(out + 2 * pair, (float)sum[0] * step);
    if (2 * pair + 1 < n) {
        store(out + 2 * pair + 1, (float)sum[1] * step);
    }
}

#define RANDOM_NORMAL(name, type)                                                                  \
    QLORA_KERNEL __launch_bounds__(256)                                                            \
        qlora_random_normal_##name(type* out, int64_t n, uint32_t seed_low, uint32_t seed_high,    \
                                   uint32_t stream, float step) {                                  \
        normal(out, n, seed_low, seed_high, stream, step);                                         \
    }
RANDOM_NORMAL(f32, float)
RANDOM_NORMAL(bf16, bf16)
