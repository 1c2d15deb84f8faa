// clip.cu - gradient clipping by norm, on the device, over any list of f32 tensors.
// targets: 75
// groups: train
//
// The gradients are divided into chunks of at most 8192 elements; an empty tensor has none. The
// host prepares these arrays once, in device memory:
//   tensors[t] = {data, count}
//   chunks[i]  = {t, group, j}: elements j * 8192 ... of tensor t; the chunks of a group are
//                contiguous
//   first[g]   = index of group g's first chunk, first[groups] = number of chunks
// Then these kernels run on one stream, in this order:
//   qlora_clip_squares   partials[i] = sum of squares of chunk i
//   qlora_clip_scale     results[g]  = {norm, scale}, flags[g] = 1 if the norm is not finite
//   qlora_clip_apply     gradients *= scale of their group, unless it is 1
//
//   norm  = sqrt(sum of squares)
//   scale = min(1, max_norm / (norm + 1e-6)); 1 if max_norm < 0 or the norm is not finite
//
// Squares are added in f32 within a thread (at most 32 of them) and in f64 after that, so |g| up to
// 1e18 cannot overflow and a sum over 2^40 elements keeps the accuracy of f32. Determinism: the
// chunks are fixed, each sum has one order, each output has one writer. No atomics.
#include "../common.cuh"

enum { CHUNK = 8192, THREADS = 256 };

struct clip_tensor {
    float* data;
    int64_t count;
};

struct clip_chunk {
    int32_t tensor;
    int32_t group;
    int64_t index;
};

__device__ __forceinline__ double block_sum(double v, double* shared, int32_t threads) {
    shared[threadIdx.x] = v;
    __syncthreads();
    for (int32_t o = threads / 2; o > 0; o >>= 1) {
        if ((int32_t)threadIdx.x < o) {
            shared[threadIdx.x] += shared[threadIdx.x + o];
        }
        __syncthreads();
    }
    return shared[0];
}

// Launch: grid = number of chunks, 256 threads, no dynamic shared memory.
QLORA_KERNEL __launch_bounds__(THREADS)
    qlora_clip_squares(const clip_tensor* tensors, const clip_chunk* chunks, double* partials) {
    __shared__ double shared[THREADS];
    clip_chunk chunk = chunks[blockIdx.x];
    clip_tensor tensor = tensors[chunk.tensor];
    int64_t begin = chunk.index * CHUNK;
    int64_t left = tensor.count - begin;
    const float* x = tensor.data + begin;
    float s[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    if (left >= CHUNK && (uintptr_t)x % 16 == 0) {
        float4 v[CHUNK / 4 / THREADS];
#pragma unroll
        for (int i = 0; i < CHUNK / 4 / THREADS; i++) {
            v[i] = ((const float4*)x)[threadIdx.x + THREADS * i];
        }
#pragma unroll
        for (int i = 0; i < CHUNK / 4 / THREADS; i++) {
            s[0] = fmaf(v[i].x, v[i].x, s[0]);
            s[1] = fmaf(v[i].y, v[i].y, s[1]);
            s[2] = fmaf(v[i].z, v[i].z, s[2]);
            s[3] = fmaf(v[i].w, v[i].w, s[3]);
        }
    } else {
        int32_t count = (int32_t)(left < CHUNK ? left : CHUNK);
#pragma unroll 1
        for (int32_t i = (int32_t)threadIdx.x; i < count; i += THREADS) {
            s[0] = fmaf(x[i], x[i], s[0]);
        }
    }
    double sum = block_sum((double)((s[0] + s[1]) + (s[2] + s[3])), shared, THREADS);
    if (threadIdx.x == 0) {
        partials[blockIdx.x] = sum;
    }
}

// Launch: grid = number of groups, 256 threads, no dynamic shared memory. max_norm is one float in
// device memory; results holds two floats per group.
QLORA_KERNEL __launch_bounds__(THREADS)
    qlora_clip_scale(const double* partials, const int64_t* first, const float* max_norm,
                     float* results, uint32_t* flags) {
    __shared__ double shared[THREADS];
    double sum = 0.0;
    for (int64_t i = first[blockIdx.x] + threadIdx.x; i < first[blockIdx.x + 1]; i += THREADS) {
        sum += partials[i];
    }
    sum = block_sum(sum, shared, THREADS);
    if (threadIdx.x == 0) {
        float norm = (float)sqrt(sum);
        bool finite = (__float_as_uint(norm) & 0x7fffffffu) < 0x7f800000u;
        float limit = *max_norm;
        float scale = __fdiv_rn(limit, norm + 1e-6f);
        // Comparisons with NaN are false, so a NaN limit also leaves the gradients unchanged.
        scale = finite && limit >= 0.0f && scale < 1.0f ? scale : 1.0f;
        results[2 * blockIdx.x] = norm;
        results[2 * blockIdx.x + 1] = scale;
        flags[blockIdx.x] = finite ? 0u : 1u;
    }
}

// Block 0 also writes any[0] = 1 if any group's flag is set, otherwise 0.
// Launch: grid = max(1, number of chunks), 256 threads, no dynamic shared memory.
QLORA_KERNEL __launch_bounds__(THREADS)
    qlora_clip_apply(const clip_tensor* tensors, const clip_chunk* chunks, int64_t chunk_count,
                     const float* results, const uint32_t* flags, int32_t groups, uint32_t* any) {
    if (blockIdx.x == 0) {
        __shared__ uint32_t shared[THREADS];
        uint32_t set = 0;
        for (int32_t g = (int32_t)threadIdx.x; g < groups; g += THREADS) {
            set |= flags[g];
        }
        shared[threadIdx.x] = set;
        __syncthreads();
        if (threadIdx.x == 0) {
            for (int32_t i = 1; i < THREADS; i++) {
                set |= shared[i];
            }
            *any = set;
        }
    }
    if (blockIdx.x >= chunk_count) {
        return;
    }
    clip_chunk chunk = chunks[blockIdx.x];
    float scale = results[2 * chunk.group + 1];
    if (scale == 1.0f) {
        return;
    }
    clip_tensor tensor = tensors[chunk.tensor];
    int64_t begin = chunk.index * CHUNK;
    int64_t left = tensor.count - begin;
    float* x = tensor.data + begin;
    if (left >= CHUNK && (uintptr_t)x % 16 == 0) {
        float4 v[CHUNK / 4 / THREADS];
#pragma unroll
        for (int i = 0; i < CHUNK / 4 / THREADS; i++) {
            v[i] = ((const float4*)x)[threadIdx.x + THREADS * i];
        }
#pragma unroll
        for (int i = 0; i < CHUNK / 4 / THREADS; i++) {
            ((float4*)x)[threadIdx.x + THREADS * i] =
                make_float4(v[i].x * scale, v[i].y * scale, v[i].z * scale, v[i].w * scale);
        }
        return;
    }
    int32_t count = (int32_t)(left < CHUNK ? left : CHUNK);
#pragma unroll 1
    for (int32_t i = (int32_t)threadIdx.x; i < count; i += THREADS) {
        x[i] *= scale;
    }
}
