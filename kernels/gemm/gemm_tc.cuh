// gemm_tc.cuh - tiles of matrix products on tensor cores, for gemm_tc.cu and the products of
// experts (grouped_tc.cu).
#ifndef QLORA_GEMM_TC_CUH
#define QLORA_GEMM_TC_CUH

#include "../common.cuh"

enum { C_IS_BF16 = 1, A_TRANSPOSED = 2, B_TRANSPOSED = 4, A_IS_F16 = 8 };

// A warp's strip of 16 rows of C, in floats; the padding keeps rows in different banks.
enum { STRIP_LINE = 64 + 8, STRIP = 16 * STRIP_LINE };

__device__ __forceinline__ int32_t lane_index() {
    return (int32_t)(threadIdx.x % 32);
}

__device__ __forceinline__ int32_t warp_index() {
    return (int32_t)(threadIdx.x / 32);
}

__device__ __forceinline__ uint8_t* block_memory() {
    extern __shared__ __align__(128) uint8_t shared[];
    return shared;
}

__device__ __forceinline__ uint32_t shared_address(const void* p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

// Copies 16 bytes, replacing the last 16 - bytes by zeros; with 0, `from` is not accessed.
__device__ __forceinline__ void copy_async(uint32_t to, const void* from, int32_t bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void copy_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until all groups except the LEFT newest have arrived.
template <int LEFT> __device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

template <bool TRANSPOSED> __device__ __forceinline__ void load_matrix(uint32_t* r, uint32_t from) {
    if (TRANSPOSED) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(from)
                     : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(from)
                     : "memory");
    }
}

#define MMA(type)                                                                                  \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 "                    \
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                 \
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                  \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))

// c += a b, for 16 rows, 8 columns and 16 elements of K.
template <typename T>
__device__ __forceinline__ void multiply(float* c, const uint32_t* a, const uint32_t* b);

template <>
__device__ __forceinline__ void multiply<bf16>(float* c, const uint32_t* a, const uint32_t* b) {
    MMA("bf16");
}

template <>
__device__ __forceinline__ void multiply<f16>(float* c, const uint32_t* a, const uint32_t* b) {
    MMA("f16");
}

// ---- slices of operands in shared memory ----

// A slice of an operand: LINES rows or columns of the product, DEPTH elements of K. If K is the
// contiguous dimension, it is stored as LINES lines of DEPTH, otherwise as DEPTH lines of LINES;
// the 16-byte chunks of a line are permuted so that the eight lines that one ldmatrix reads are in
// different banks.
template <bool ALONG_K, int LINES, int DEPTH> struct slice {
    static __device__ __forceinline__ uint32_t at(int32_t outer, int32_t k) {
        if (ALONG_K) {
            int32_t line = DEPTH == 32 ? outer >> 1 & 3 : outer & 7;
            return (uint32_t)(outer * (DEPTH * 2) + (((k >> 3) ^ line) << 4));
        }
        return (uint32_t)(k * (LINES * 2) + (((outer >> 3) ^ (k & 7)) << 4));
    }

    // Where this lane's address for the first ldmatrix of a warp is: pieces of 8 x 8 are ordered by
    // rows, then k, for A; by k, then columns, for B.
    static __device__ __forceinline__ uint32_t of_a(int32_t outer, int32_t k) {
        int32_t lane = lane_index();
        return ALONG_K ? at(outer + (lane & 15), k + (lane >> 4) * 8)
                       : at(outer + (lane & 8), k + (lane >> 4) * 8 + (lane & 7));
    }

    static __device__ __forceinline__ uint32_t of_b(int32_t outer, int32_t k) {
        int32_t lane = lane_index();
        return ALONG_K ? at(outer + (lane >> 4) * 8 + (lane & 7), k + (lane & 8))
                       : at(outer + (lane >> 4) * 8, k + (lane & 15));
    }

    // 16 x 16 elements: 16 i after the first along the outer dimension, k after it along K.
    static __device__ __forceinline__ void load(uint32_t* r, uint32_t base, uint32_t first, int i,
                                                int k) {
        uint32_t place = ALONG_K ? (first ^ (uint32_t)(k * 2)) + (uint32_t)(16 * i * DEPTH * 2)
                                 : (first ^ (uint32_t)(32 * i)) + (uint32_t)(k * LINES * 2);
        load_matrix<!ALONG_K>(r, base + place);
    }
};

// What a thread copies of each slice: chunks of 16 bytes from lines STEP apart.
template <bool ALONG_K, int LINES, int DEPTH> struct copier {
    static const int THREADS = 128;
    static const int PER_LINE = (ALONG_K ? DEPTH : LINES) / 8;
    static const int STEP = THREADS / PER_LINE; // a multiple of 8: the permutation stays the same
    static const int COUNT = LINES * DEPTH / 8 / THREADS;
    const uint16_t* from[ALONG_K ? COUNT : 1];
    int64_t step; // of the lines, if they are along K
    int32_t k_left;
    int32_t bytes;
    uint32_t to;

    __device__ __forceinline__ void open(const void* data, int64_t start, int64_t ld,
                                         int32_t corner, int32_t size, int32_t K) {
        const uint16_t* p = (const uint16_t*)data + start;
        int32_t line = (int32_t)(threadIdx.x / PER_LINE);
        int32_t inside = (int32_t)(threadIdx.x % PER_LINE * 8);
        if (ALONG_K) {
#pragma unroll
            for (int j = 0; j < COUNT; j++) { // lines after the last repeat it: never written to C
                from[j] = p + min(corner + line + STEP * j, size - 1) * ld + inside;
            }
            k_left = K - inside;
            to = slice<ALONG_K, LINES, DEPTH>::at(line, inside);
        } else {
            from[0] = p + line * ld + corner + inside;
            step = STEP * ld;
            k_left = K - line;
            bytes = 2 * max(min(size - corner - inside, 8), 0);
            to = slice<ALONG_K, LINES, DEPTH>::at(inside, line);
        }
    }

    // Requests the next slice; zeros after the end of K.
    __device__ __forceinline__ void request(uint32_t base) {
#pragma unroll
        for (int j = 0; j < COUNT; j++) {
            uint32_t place = base + to + (uint32_t)(j * STEP * PER_LINE * 16);
            if (ALONG_K) {
                copy_async(place, from[j], 2 * max(min(k_left, 8), 0));
                from[j] += DEPTH;
            } else {
                copy_async(place, from[0] + j * step, k_left > j * STEP ? bytes : 0);
            }
        }
        if (!ALONG_K) {
            from[0] += COUNT * step;
        }
        k_left -= DEPTH;
    }
};

// ---- results ----

struct result {
    void* c;
    int64_t ldc;
    float factor;
    float beta;
    bool is_bf16;
    bool has_quads; // rows start where four columns are aligned
};

__device__ __forceinline__ result open_result(void* C, int64_t ldc, int64_t start,
                                              const float* alpha_device, float alpha, float beta,
                                              int32_t flags) {
    result to;
    to.is_bf16 = (flags & C_IS_BF16) != 0;
    to.c = to.is_bf16 ? (void*)((bf16*)C + start) : (void*)((float*)C + start);
    to.ldc = ldc;
    to.factor = alpha_device ? alpha * *alpha_device : alpha;
    to.beta = beta;
    to.has_quads = (uintptr_t)to.c % 16 == 0 && ldc % 4 == 0;
    return to;
}

// Four columns at an aligned address.
__device__ __forceinline__ void write_quad(bf16* c, float4 x, float beta) {
    if (beta != 0.0f) {
        uint2 old = *(const uint2*)c;
        x.x = fmaf(beta, __uint_as_float(old.x << 16), x.x);
        x.y = fmaf(beta, __uint_as_float(old.x & 0xffff0000u), x.y);
        x.z = fmaf(beta, __uint_as_float(old.y << 16), x.z);
        x.w = fmaf(beta, __uint_as_float(old.y & 0xffff0000u), x.w);
    }
    *(uint2*)c = make_uint2(pack_bf16(x.x, x.y), pack_bf16(x.z, x.w));
}

__device__ __forceinline__ void write_quad(float* c, float4 x, float beta) {
    if (beta != 0.0f) {
        float4 old = *(const float4*)c;
        x.x = fmaf(beta, old.x, x.x);
        x.y = fmaf(beta, old.y, x.y);
        x.z = fmaf(beta, old.z, x.z);
        x.w = fmaf(beta, old.w, x.w);
    }
    *(float4*)c = x;
}

// Up to four columns of a row, of which `valid` are inside C; v is in shared memory.
__device__ __forceinline__ void write_four(const result& to, int64_t row, int32_t col,
                                           int32_t valid, const float* v) {
    int64_t at = row * to.ldc + col;
    if (to.has_quads && valid >= 4) {
        float4 x = *(const float4*)v;
        x.x *= to.factor;
        x.y *= to.factor;
        x.z *= to.factor;
        x.w *= to.factor;
        if (to.is_bf16) {
            write_quad((bf16*)to.c + at, x, to.beta);
        } else {
            write_quad((float*)to.c + at, x, to.beta);
        }
        return;
    }
#pragma unroll 1
    for (int i = 0; i < min(valid, 4); i++) {
        float y = to.factor * v[i];
        if (to.is_bf16) {
            bf16* c = (bf16*)to.c + at + i;
            *c = to_bf16(to.beta != 0.0f ? fmaf(to.beta, to_float(*c), y) : y);
        } else {
            float* c = (float*)to.c + at + i;
            *c = to.beta != 0.0f ? fmaf(to.beta, *c, y) : y;
        }
    }
}

// Puts rows 16 i to 16 i + 15 of a warp's sums into its strip. Registers have no index, so every i
// has its own code; what reads the strip exists only once.
__device__ __forceinline__ void put_strip(float* strip, const float (&acc)[4][8][4], int i) {
    int32_t lane = lane_index();
    float* p = strip + (lane >> 2) * STRIP_LINE + (lane & 3) * 2;
#pragma unroll
    for (int ii = 0; ii < 4; ii++) {
        if (ii == i) {
#pragma unroll
            for (int j = 0; j < 8; j++) {
                *(float2*)(p + 8 * j) = make_float2(acc[ii][j][0], acc[ii][j][1]);
                *(float2*)(p + 8 * j + 8 * STRIP_LINE) = make_float2(acc[ii][j][2], acc[ii][j][3]);
            }
        }
    }
}

// As constants, the zeros would be written again on every way to the first use.
__device__ __forceinline__ void clear(float (&acc)[4][8][4]) {
#pragma unroll
    for (int i = 0; i < 128; i++) {
        asm volatile("mov.f32 %0, 0f00000000;" : "=f"(acc[i / 32][i / 4 % 8][i % 4]));
    }
}

#define GEMM_PARAMETERS                                                                            \
    const void *A, const void *B, void *C, int32_t M, int32_t N, int32_t K, int64_t lda,           \
        int64_t ldb, int64_t ldc, int64_t strideA, int64_t strideB, int64_t strideC,               \
        const float *alpha_device, float alpha, float beta, int32_t flags
#define GEMM_ARGUMENTS                                                                             \
    A, B, C, M, N, K, lda, ldb, ldc, strideA, strideB, strideC, alpha_device, alpha, beta, flags

// ---- 64 x 64 per warp ----

enum { TILE = 128, DEPTH = 32, STAGES = 4 };
enum { SLICE_BYTES = TILE * DEPTH * 2, STAGE_BYTES = 2 * SLICE_BYTES };

struct corner {
    int32_t row;
    int32_t col;
};

// Writes a warp's 64 x 64 from `row` and `col` on, in strips.
__device__ __forceinline__ void write_warp(const result& to, float* strip,
                                           const float (&acc)[4][8][4], int32_t row, int32_t col,
                                           int32_t M, int32_t N) {
    int32_t quad = (lane_index() & 15) * 4;
#pragma unroll 1
    for (int i = 0; i < 4; i++) {
        put_strip(strip, acc, i);
        __syncwarp();
#pragma unroll 1
        for (int line = lane_index() >> 4; line < 16; line += 2) {
            int32_t r = row + 16 * i + line;
            if (r < M && col + quad < N) {
                write_four(to, r, col + quad, N - col - quad, strip + line * STRIP_LINE + quad);
            }
        }
        __syncwarp();
    }
}

// Adds the products of all slices. While the tensor cores multiply 16 of K, the operands of the
// next 16 are read from shared memory into other registers. STAGES - 1 slices have been requested,
// and the first 16 of K are in a[0] and b[0].
template <typename T, class SLICE_A, class SLICE_B, class COPY_A, class COPY_B>
__device__ __forceinline__ void multiply_slices(float (&acc)[4][8][4], COPY_A& copy_a,
                                                COPY_B& copy_b, uint32_t ring, uint32_t first_a,
                                                uint32_t first_b, int32_t slices,
                                                uint32_t (&a)[2][4][4], uint32_t (&b)[2][4][4]) {
    uint32_t last = ring + (STAGES - 1) * STAGE_BYTES;
    uint32_t put = last;
    uint32_t get = ring;
    // Iteration s multiplies slice s and requests slice s + STAGES - 1. Past the end of K, slices
    // consist of zeros, and what is read of them is not multiplied.
#pragma unroll 1
    for (int32_t s = 0; s < slices; s++) {
#pragma unroll
        for (int k = 0; k < 2; k++) {
            if (k == 1) {
                copy_wait<STAGES - 3>();
                __syncthreads(); // slice s + 1 is visible to all, slice s no longer needed
                get = get == last ? ring : get + STAGE_BYTES;
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
                SLICE_A::load(a[1 - k][i], get, first_a, i, 16 * (1 - k));
                SLICE_B::load(b[1 - k][i], get, first_b, i, 16 * (1 - k));
            }
            if (k == 0) {
                copy_a.request(put);
            } else {
                copy_b.request(put + SLICE_BYTES);
                copy_commit();
                put = put == last ? ring : put + STAGE_BYTES;
            }
#pragma unroll
            for (int i = 0; i < 32; i++) { // back and forth, so that one operand stays the same
                int row = i / 8;
                int col = row % 2 ? 7 - i % 8 : i % 8;
                multiply<T>(acc[row][col], a[k][row], &b[k][col / 2][col % 2 * 2]);
            }
        }
    }
}

// One block's work.
template <bool TA, bool TB>
__device__ __forceinline__ void tensor(const corner& block, int64_t batch, GEMM_PARAMETERS) {
    typedef slice<!TA, TILE, DEPTH> slice_a;
    typedef slice<TB, TILE, DEPTH> slice_b;
    typedef copier<!TA, TILE, DEPTH> copier_a;
    typedef copier<TB, TILE, DEPTH> copier_b;
    uint8_t* shared = block_memory();
    int32_t warp = warp_index();
    int32_t warp_row = (warp & 1) * 64;
    int32_t warp_col = (warp >> 1) * 64;
    int32_t slices = (K + DEPTH - 1) / DEPTH;
    copier_a copy_a;
    copier_b copy_b;
    copy_a.open(A, batch * strideA, lda, block.row, M, K);
    copy_b.open(B, batch * strideB, ldb, block.col, N, K);
    uint32_t ring = shared_address(shared);
    uint32_t first_a = slice_a::of_a(warp_row, 0);
    uint32_t first_b = SLICE_BYTES + slice_b::of_b(warp_col, 0);
    float acc[4][8][4];
    clear(acc);
#pragma unroll 1
    for (uint32_t s = 0; s < STAGES - 1; s++) {
        copy_a.request(ring + s * STAGE_BYTES);
        copy_b.request(ring + s * STAGE_BYTES + SLICE_BYTES);
        copy_commit();
    }
    copy_wait<STAGES - 2>();
    __syncthreads();
    uint32_t a[2][4][4];
    uint32_t b[2][4][4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        slice_a::load(a[0][i], ring, first_a, i, 0);
        slice_b::load(b[0][i], ring, first_b, i, 0);
    }
    if (flags & A_IS_F16) {
        multiply_slices<f16, slice_a, slice_b>(acc, copy_a, copy_b, ring, first_a, first_b, slices,
                                               a, b);
    } else {
        multiply_slices<bf16, slice_a, slice_b>(acc, copy_a, copy_b, ring, first_a, first_b, slices,
                                                a, b);
    }
    copy_wait<0>();
    __syncthreads(); // the strips take the place of the slices
    result to = open_result(C, ldc, batch * strideC, alpha_device, alpha, beta, flags);
    write_warp(to, (float*)shared + warp * STRIP, acc, block.row + warp_row, block.col + warp_col,
               M, N);
}

// ---- few rows or columns: K over the warps of a block ----

enum { SIDE = 64, NARROW_STAGES = 6, NARROW_BYTES = SIDE * SIDE * 2 };

// A slice of 64 x 64 of an operand, as slice<> stores it, and what a thread copies of it. Whether K
// is along its lines is known only at run time: one kernel serves all forms.
struct narrow_operand {
    const uint16_t* from; // this thread's chunk of the first of its four lines, 16 lines apart
    int64_t ld;
    int64_t next; // from one slice to the next
    int32_t lines_left;
    int32_t chunk_left;
    int32_t line_step; // of lines_left and chunk_left, from one slice to the next
    int32_t chunk_step;
    int32_t lines; // up to here; the pieces of the others are outside C and not multiplied
    uint32_t to;
};

__device__ __forceinline__ narrow_operand open_narrow(const void* data, int64_t start, int64_t ld,
                                                      bool along_k, int32_t corner, int32_t size,
                                                      int32_t K) {
    int32_t line = (int32_t)(threadIdx.x / 8);
    int32_t chunk = (int32_t)(threadIdx.x % 8 * 8);
    narrow_operand o;
    o.from = (const uint16_t*)data + start + (along_k ? corner * ld : corner) + line * ld + chunk;
    o.ld = ld;
    o.next = along_k ? SIDE : SIDE * ld;
    o.lines_left = (along_k ? size - corner : K) - line;
    o.chunk_left = (along_k ? K : size - corner) - chunk;
    o.line_step = along_k ? 0 : SIDE;
    o.chunk_step = SIDE - o.line_step;
    o.lines = along_k ? size - corner : (chunk & ~15) < size - corner ? SIDE : 0;
    o.to = slice<true, SIDE, SIDE>::at(line, chunk);
    return o;
}

__device__ __forceinline__ void request_narrow(narrow_operand& o, uint32_t base) {
    int32_t bytes = 2 * max(min(o.chunk_left, 8), 0);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        if (16 * j < o.lines) {
            copy_async(base + o.to + (uint32_t)(j * 16 * SIDE * 2), o.from + 16 * j * o.ld,
                       o.lines_left > 16 * j ? bytes : 0);
        }
    }
    o.from += o.next;
    o.lines_left -= o.line_step;
    o.chunk_left -= o.chunk_step;
}

// A warp's part of a slice, 16 of K: the 16 x 16 pieces that are inside C. What is loaded of the
// others is not used; waiting for one piece after the other would take longer.
template <bool A_ALONG_K, bool B_ALONG_K>
__device__ __forceinline__ void multiply_narrow(float (&acc)[4][8][4], uint32_t base, int32_t rows,
                                                int32_t cols) {
    typedef slice<A_ALONG_K, SIDE, SIDE> slice_a;
    typedef slice<B_ALONG_K, SIDE, SIDE> slice_b;
    uint32_t first_a = slice_a::of_a(0, 16 * warp_index());
    uint32_t first_b = NARROW_BYTES + slice_b::of_b(0, 16 * warp_index());
    uint32_t a[4][4];
    uint32_t b[4][4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        slice_a::load(a[i], base, first_a, i, 0);
        slice_b::load(b[i], base, first_b, i, 0);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (16 * i < rows && 16 * j < cols) {
                multiply<bf16>(acc[i][2 * j], a[i], &b[j][0]);
                multiply<bf16>(acc[i][2 * j + 1], a[i], &b[j][2]);
            }
        }
    }
}

// Adds the warps' sums of 64 x 64 in strips, and writes them.
__device__ __forceinline__ void write_sums(const result& to, float* sums,
                                           const float (&acc)[4][8][4], const corner& block,
                                           int32_t M, int32_t N) {
    int32_t quad = (int32_t)(threadIdx.x % 16 * 4);
    int32_t col = block.col + quad;
#pragma unroll 1
    for (int i = 0; i < 4; i++) {
        __syncthreads(); // what was in this memory is no longer read
        put_strip(sums + warp_index() * STRIP, acc, i);
        __syncthreads();
#pragma unroll 1
        for (int line = (int)(threadIdx.x / 16); line < 16; line += 8) {
            int32_t row = block.row + 16 * i + line;
            float* v = sums + line * STRIP_LINE + quad;
            if (row < M && col < N) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    v[e] = v[e] + v[STRIP + e] + v[2 * STRIP + e] + v[3 * STRIP + e];
                }
                write_four(to, row, col, N - col, v);
            }
        }
    }
}

// One block's work, 64 x 64.
__device__ __forceinline__ void narrow(const corner& block, int64_t batch, GEMM_PARAMETERS) {
    const uint32_t BYTES = 2 * NARROW_BYTES;
    uint8_t* shared = block_memory();
    int32_t rows = M - block.row;
    int32_t cols = N - block.col;
    bool ta = (flags & A_TRANSPOSED) != 0;
    bool tb = (flags & B_TRANSPOSED) != 0;
    narrow_operand oa = open_narrow(A, batch * strideA, lda, !ta, block.row, M, K);
    narrow_operand ob = open_narrow(B, batch * strideB, ldb, tb, block.col, N, K);
    uint32_t ring = shared_address(shared);
    uint32_t last = ring + (NARROW_STAGES - 1) * BYTES;
    float acc[4][8][4];
    clear(acc);
    uint32_t put = ring;
#pragma unroll 1
    for (; put < last; put += BYTES) {
        request_narrow(oa, put);
        request_narrow(ob, put + NARROW_BYTES);
        copy_commit();
    }
    uint32_t get = ring;
#pragma unroll 1
    for (int32_t s = 0; s < (K + SIDE - 1) / SIDE; s++) {
        copy_wait<NARROW_STAGES - 2>();
        __syncthreads(); // slice s is visible to all, slice s - 1 no longer needed
        request_narrow(oa, put);
        request_narrow(ob, put + NARROW_BYTES);
        copy_commit();
        put = put == last ? ring : put + BYTES;
        if (ta) {
            multiply_narrow<false, false>(acc, get, rows, cols);
        } else if (tb) {
            multiply_narrow<true, true>(acc, get, rows, cols);
        } else {
            multiply_narrow<true, false>(acc, get, rows, cols);
        }
        get = get == last ? ring : get + BYTES;
    }
    copy_wait<0>();
    result to = open_result(C, ldc, batch * strideC, alpha_device, alpha, beta, flags);
    write_sums(to, (float*)shared, acc, block, M, N);
}

#endif
