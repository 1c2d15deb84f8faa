// nf4.cu - the kernels of nf4.cuh that quantise, and that dequantise to f32.
// targets: 75
// groups: nf4
#include "nf4.cuh"

NF4_QUANTISE(f32, float)
NF4_QUANTISE(bf16, bf16)
NF4_QUANTISE(f16, f16)

// offset[0] = f32(sum) * inverse, inverse = f32(1 / blocks). Thread t adds absmax[t], [t + 1024],
// ... in f64; the 1024 sums are reduced by halves. Launch: one block of 1024 threads.
QLORA_KERNEL __launch_bounds__(1024)
    qlora_nf4_offset(const float* absmax, int64_t blocks, float inverse, float* offset) {
    __shared__ double shared[1024];
    double sum = 0.0;
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < blocks; i += 1024) {
        sum += (double)absmax[i];
    }
    shared[threadIdx.x] = sum;
    __syncthreads();
    for (int32_t o = 512; o > 0; o >>= 1) {
        if ((int32_t)threadIdx.x < o) {
            shared[threadIdx.x] += shared[threadIdx.x + o];
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        offset[0] = __fmul_rn((float)shared[0], inverse);
    }
}

// One warp per group of scales. Launch: 256 threads, grid ceil(groups / 8).
QLORA_KERNEL __launch_bounds__(256)
    qlora_nf4_quantise_scales(const float* absmax, int64_t blocks, int32_t group,
                              const float* offset, const float* maps, uint8_t* q, float* scales) {
    __shared__ float map[256];
    map[threadIdx.x] = maps[16 + threadIdx.x];
    __syncthreads();
    int64_t g = (int64_t)blockIdx.x * 8 + threadIdx.x / 32;
    int64_t begin = g * group;
    if (begin >= blocks) {
        return;
    }
    int64_t end = blocks - begin < group ? blocks : begin + group;
    int32_t lane = (int32_t)threadIdx.x % 32;
    float middle = *offset;
    float most = 0.0f;
#pragma unroll 1
    for (int64_t i = begin + lane; i < end; i += 32) {
        most = fmaxf(most, fabsf(__fsub_rn(absmax[i], middle)));
    }
    most = fmaxf(warp_max(most), NF4_SMALLEST);
    float inv = __frcp_rn(most);
#pragma unroll 1
    for (int64_t i = begin + lane; i < end; i += 32) {
        q[i] = (uint8_t)nf4_nearest(map, __fmul_rn(__fsub_rn(absmax[i], middle), inv));
    }
    if (lane == 0) {
        scales[g] = most;
    }
}

NF4_DEQUANTISE(f32, float)
