// half_barrier.cu - a program that racecheck reports although it has no race.
//
//   nvcc -arch=sm_90 -o build/half_barrier tests/half_barrier.cu
//   compute-sanitizer --tool racecheck build/half_barrier         (no reports)
//   compute-sanitizer --tool racecheck build/half_barrier half    (reports)
//
// All threads meet at __syncthreads between every write and read of sums[]. With "half", half of
// the threads also meet at a barrier of their own before; racecheck then overlooks whole-block
// barriers (CUDA 13.0 on an H200). qlora_decode_layers has barriers of that kind, so sanitize.sh
// leaves it out under racecheck.
#include <cstdio>

__global__ void sums_of_sums(float* out, int rounds, bool half) {
    __shared__ float sums[16];
    float value = (float)threadIdx.x;
    for (int i = 0; i < rounds; i++) {
        if (half && threadIdx.x < 256) {
            for (int k = 0; k < 3; k++) {
                asm volatile("bar.sync 1, 256;" ::: "memory");
            }
        }
        __syncthreads();
        if (threadIdx.x % 32 == 0) {
            sums[threadIdx.x / 32] = value;
        }
        __syncthreads();
        float sum = 0.0f;
        for (int k = 0; k < 16; k++) {
            sum += sums[k];
        }
        value = sum * 0.5f;
        __syncthreads();
    }
    out[blockIdx.x * blockDim.x + threadIdx.x] = value;
}

int main(int argc, char**) {
    float* out = nullptr;
    cudaError_t error = cudaMalloc(&out, 132 * 512 * sizeof *out);
    if (error == cudaSuccess) {
        sums_of_sums<<<132, 512>>>(out, 20, argc > 1);
        error = cudaDeviceSynchronize();
    }
    std::printf("%s\n", cudaGetErrorString(error));
    return error == cudaSuccess ? 0 : 1;
}
