// gemm_tc.cu - matrix products on tensor cores, for 16-bit operands.
// groups: bf16 gemm
//
//   C[M,N] = alpha op(A) op(B) + beta C       row-major, strided-batched
//
// Parameters and semantics are those of gemm.cu (flags bit 1: C is bf16, otherwise f32); the
// kernel's name gives the transposition, first letter A, second letter B. Operands are bf16; the
// narrow kernel takes f16 too, and all forms, as the flags say. Products are exact; sums are f32.
// The caller guarantees that A and B are 16-byte aligned and that lda, ldb and their batch strides
// are multiples of 8. C may have any alignment. Nothing outside M, N, K is read or written; with
// beta == 0, C is never read.
//
// Launch: grid (ceil(M/rows), ceil(N/columns), batch); dynamic shared memory for the slices of
// operands in flight:
//
//   kernel        block       threads   slice along K   in flight   shared memory
//   wide_..       128 x 256       256              32           4          98,304
//   nn, nt, tn    128 x 128       128              32           3          49,152
//   narrow         64 x 64        128              64           4          65,536
//
// All of these fit the 99 KB per block of compute capability 8.6 and 8.9. In the first two, a warp
// computes 64 x 64, with sums in the order of the tensor cores' m16n8k16 steps along K, so both
// give the same bits. In a narrow block, each of the four warps takes every fourth step of K for
// all of C, and their sums are added in warp order; so it keeps its multiprocessor busy, although
// there are few of them. Blocks that run at the same time share rows and columns of operands, so
// that most copies hit the L2 cache.
//
// Determinism: one writer per element of C, fixed order along K.
#include "common.cuh"

enum { C_IS_BF16 = 1, A_TRANSPOSED = 2, B_TRANSPOSED = 4, A_IS_F16 = 8, BAND = 16 /* blocks */ };

// A warp's strip of 16 rows of C, in floats; the padding keeps rows in different banks.
enum { STRIP_LINE = 64 + 8, STRIP = 16 * STRIP_LINE };

__device__ __forceinline__ int32_t lane_index() {
    return (int32_t)(threadIdx.x % 32);
}

__device__ __forceinline__ int32_t warp_index() {
    return (int32_t)(threadIdx.x / 32);
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
template <bool ALONG_K, int LINES, int DEPTH, int THREADS> struct copier {
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
    bool has_chunks; // rows start at multiples of 16 bytes
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
    to.has_chunks = (uintptr_t)to.c % 16 == 0 && ldc % 8 == 0;
    return to;
}

// Eight columns of bf16, whole chunks.
__device__ __forceinline__ void write_chunk(bf16* p, float* x, float beta) {
    uint4* c = (uint4*)p;
    if (beta != 0.0f) {
        uint4 old = *c;
        uint32_t w[4] = {old.x, old.y, old.z, old.w};
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float y = __uint_as_float(i % 2 ? w[i / 2] & 0xffff0000u : w[i / 2] << 16);
            x[i] = fmaf(beta, y, x[i]);
        }
    }
    *c = make_uint4(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]),
                    pack_bf16(x[6], x[7]));
}

__device__ __forceinline__ void write_chunk(float* p, float* x, float beta) {
    float4* c = (float4*)p;
    if (beta != 0.0f) {
        float4 lo = c[0];
        float4 hi = c[1];
        float old[8] = {lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w};
#pragma unroll
        for (int i = 0; i < 8; i++) {
            x[i] = fmaf(beta, old[i], x[i]);
        }
    }
    c[0] = make_float4(x[0], x[1], x[2], x[3]);
    c[1] = make_float4(x[4], x[5], x[6], x[7]);
}

// Up to eight columns of a row, of which `valid` are inside C; v is in shared memory.
__device__ __forceinline__ void write_eight(const result& to, int64_t row, int32_t col,
                                            int32_t valid, const float* v) {
    int64_t at = row * to.ldc + col;
    if (to.has_chunks && valid >= 8) {
        float x[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            x[i] = to.factor * v[i];
        }
        if (to.is_bf16) {
            write_chunk((bf16*)to.c + at, x, to.beta);
        } else {
            write_chunk((float*)to.c + at, x, to.beta);
        }
        return;
    }
#pragma unroll 1
    for (int i = 0; i < min(valid, 8); i++) {
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

__device__ __forceinline__ void clear(float (&acc)[4][8][4]) {
#pragma unroll
    for (int i = 0; i < 128; i++) {
        acc[i / 32][i / 4 % 8][i % 4] = 0.0f;
    }
}

#define GEMM_PARAMETERS                                                                            \
    const void *A, const void *B, void *C, int32_t M, int32_t N, int32_t K, int64_t lda,           \
        int64_t ldb, int64_t ldc, int64_t strideA, int64_t strideB, int64_t strideC,               \
        const float *alpha_device, float alpha, float beta, int32_t flags
#define GEMM_ARGUMENTS                                                                             \
    A, B, C, M, N, K, lda, ldb, ldc, strideA, strideB, strideC, alpha_device, alpha, beta, flags

// ---- 64 x 64 per warp ----

struct corner {
    int32_t row;
    int32_t col;
};

// The first row and column of this block: blocks are numbered down the columns of bands of BAND
// rows of blocks, one band after another.
__device__ __forceinline__ corner block_corner(int32_t rows, int32_t cols) {
    int32_t index = (int32_t)(blockIdx.y * gridDim.x + blockIdx.x);
    int32_t band = index / (BAND * (int32_t)gridDim.y);
    int32_t height = min(BAND, (int32_t)gridDim.x - band * BAND);
    int32_t inside = index - band * BAND * (int32_t)gridDim.y;
    corner c = {(band * BAND + inside % height) * rows, inside / height * cols};
    return c;
}

// Writes a warp's 64 x 64 from `row` and `col` on, in strips.
__device__ __forceinline__ void write_warp(const result& to, float* strip,
                                           const float (&acc)[4][8][4], int32_t row, int32_t col,
                                           int32_t M, int32_t N) {
    int32_t chunk = (lane_index() & 7) * 8;
#pragma unroll 1
    for (int i = 0; i < 4; i++) {
        put_strip(strip, acc, i);
        __syncwarp();
#pragma unroll 1
        for (int line = lane_index() >> 3; line < 16; line += 4) {
            int32_t r = row + 16 * i + line;
            if (r < M && col + chunk < N) {
                write_eight(to, r, col + chunk, N - col - chunk, strip + line * STRIP_LINE + chunk);
            }
        }
        __syncwarp();
    }
}

// One block's work, 128 x WIDTH. While the tensor cores multiply 16 of K, the operands of the next
// 16 are read from shared memory into other registers.
template <bool TA, bool TB, int WIDTH, int STAGES>
__device__ __forceinline__ void tensor(GEMM_PARAMETERS) {
    const int ROWS = 128; // (the function is long because the iterations share all of their state)
    const int DEPTH = 32;
    const uint32_t A_BYTES = ROWS * DEPTH * 2;
    const uint32_t BYTES = (ROWS + WIDTH) * DEPTH * 2;
    typedef slice<!TA, ROWS, DEPTH> slice_a;
    typedef slice<TB, WIDTH, DEPTH> slice_b;
    extern __shared__ __align__(128) uint8_t shared[];
    int32_t warp = warp_index();
    int32_t warp_row = (warp & 1) * 64;
    int32_t warp_col = (warp >> 1) * 64;
    corner block = block_corner(ROWS, WIDTH);
    int64_t batch = blockIdx.z;
    copier<!TA, ROWS, DEPTH, WIDTH> copy_a;
    copier<TB, WIDTH, DEPTH, WIDTH> copy_b;
    copy_a.open(A, batch * strideA, lda, block.row, M, K);
    copy_b.open(B, batch * strideB, ldb, block.col, N, K);
    uint32_t ring = shared_address(shared);
    uint32_t last = ring + (STAGES - 1) * BYTES;
    uint32_t first_a = slice_a::of_a(warp_row, 0);
    uint32_t first_b = A_BYTES + slice_b::of_b(warp_col, 0);
    float acc[4][8][4];
    clear(acc);
    uint32_t put = ring;
#pragma unroll 1
    for (; put < last; put += BYTES) {
        copy_a.request(put);
        copy_b.request(put + A_BYTES);
        copy_commit();
    }
    uint32_t get = ring;
    uint32_t a[2][4][4];
    uint32_t b[2][4][4];
    copy_wait<STAGES - 2>();
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; i++) {
        slice_a::load(a[0][i], get, first_a, i, 0);
        slice_b::load(b[0][i], get, first_b, i, 0);
    }
    // Iteration s multiplies slice s and requests slice s + STAGES - 1. Past the end of K, slices
    // consist of zeros, and what is read of them is not multiplied.
#pragma unroll 1
    for (int32_t s = 0; s < (K + DEPTH - 1) / DEPTH; s++) {
#pragma unroll
        for (int k = 0; k < 2; k++) {
            if (k == 1) {
                copy_wait<STAGES - 3>();
                __syncthreads(); // slice s + 1 is visible to all, slice s no longer needed
                get = get == last ? ring : get + BYTES;
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
                slice_a::load(a[1 - k][i], get, first_a, i, 16 * (1 - k));
                slice_b::load(b[1 - k][i], get, first_b, i, 16 * (1 - k));
            }
            if (k == 0) {
                copy_a.request(put);
            } else {
                copy_b.request(put + A_BYTES);
                copy_commit();
                put = put == last ? ring : put + BYTES;
            }
#pragma unroll
            for (int i = 0; i < 32; i++) { // back and forth, so that one operand is the same
                int row = i / 8;
                int col = row % 2 ? 7 - i % 8 : i % 8;
                multiply<bf16>(acc[row][col], a[k][row], &b[k][col / 2][col % 2 * 2]);
            }
        }
    }
    copy_wait<0>();
    __syncthreads(); // the strips take the place of the slices
    result to = open_result(C, ldc, batch * strideC, alpha_device, alpha, beta, flags);
    write_warp(to, (float*)shared + warp * STRIP, acc, block.row + warp_row, block.col + warp_col,
               M, N);
}

// ---- few rows or columns: K over the warps of a block ----

enum { SIDE = 64, NARROW_STAGES = 4, NARROW_BYTES = SIDE * SIDE * 2 };

// A slice of 64 x 64 of an operand, as slice<> stores it; whether K is along its lines is known
// only at run time, as one kernel serves all forms.
struct narrow_operand {
    const uint16_t* from; // this thread's chunk of the first of its four lines, 16 lines apart
    int64_t ld;
    int64_t next; // from one slice to the next
    int32_t lines_left;
    int32_t chunk_left;
    bool along_k;
    uint32_t to;
    uint32_t first; // for ldmatrix
};

__device__ __forceinline__ narrow_operand open_narrow(const void* data, int64_t start, int64_t ld,
                                                      bool along_k, int32_t corner, int32_t size,
                                                      int32_t K) {
    int32_t line = (int32_t)(threadIdx.x / 8);
    int32_t chunk = (int32_t)(threadIdx.x % 8 * 8);
    int64_t corner_at = along_k ? corner * ld : corner;
    narrow_operand o;
    o.from = (const uint16_t*)data + start + corner_at + line * ld + chunk;
    o.ld = ld;
    o.next = along_k ? SIDE : SIDE * ld;
    o.lines_left = (along_k ? size - corner : K) - line;
    o.chunk_left = (along_k ? K : size - corner) - chunk;
    o.along_k = along_k;
    o.to = slice<true, SIDE, SIDE>::at(line, chunk);
    o.first = 0;
    return o;
}

__device__ __forceinline__ void request_narrow(narrow_operand& o, uint32_t base) {
    int32_t bytes = 2 * max(min(o.chunk_left, 8), 0);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        copy_async(base + o.to + (uint32_t)(j * 16 * SIDE * 2), o.from + 16 * j * o.ld,
                   o.lines_left > 16 * j ? bytes : 0);
    }
    o.from += o.next;
    o.lines_left -= o.along_k ? 0 : SIDE;
    o.chunk_left -= o.along_k ? SIDE : 0;
}

__device__ __forceinline__ void load_narrow(uint32_t* r, const narrow_operand& o, uint32_t base,
                                            int i) {
    if (o.along_k) {
        slice<true, SIDE, SIDE>::load(r, base, o.first, i, 0);
    } else {
        slice<false, SIDE, SIDE>::load(r, base, o.first, i, 0);
    }
}

// 16 rows of C: the columns that it has, 16 at a time.
template <typename T>
__device__ __forceinline__ void multiply_row(float (&acc)[8][4], const uint32_t* a,
                                             const uint32_t (&b)[4][4], int32_t cols) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
        if (16 * j < cols) {
            multiply<T>(acc[2 * j], a, &b[j][0]);
            multiply<T>(acc[2 * j + 1], a, &b[j][2]);
        }
    }
}

// Adds the warps' sums of 64 x 64 in strips, and writes them.
__device__ __forceinline__ void write_sums(const result& to, float* sums,
                                           const float (&acc)[4][8][4], const corner& block,
                                           int32_t M, int32_t N) {
    int32_t line = (int32_t)(threadIdx.x / 8);
    int32_t chunk = (int32_t)(threadIdx.x % 8 * 8);
    int32_t col = block.col + chunk;
#pragma unroll 1
    for (int i = 0; i < 4; i++) {
        int32_t row = block.row + 16 * i + line;
        __syncthreads(); // what was in this memory is no longer read
        put_strip(sums + warp_index() * STRIP, acc, i);
        __syncthreads();
        if (row < M && col < N) {
            float* v = sums + line * STRIP_LINE + chunk;
#pragma unroll
            for (int e = 0; e < 8; e++) {
                v[e] = v[e] + v[STRIP + e] + v[2 * STRIP + e] + v[3 * STRIP + e];
            }
            write_eight(to, row, col, N - col, v);
        }
    }
}

// One block's work, 64 x 64. Of a slice, each warp multiplies 16 of K; what is outside C is left
// out. This is long because the iterations share all of their state.
__device__ __forceinline__ void narrow(GEMM_PARAMETERS) {
    const uint32_t BYTES = 2 * NARROW_BYTES;
    extern __shared__ __align__(128) uint8_t shared[];
    int32_t warp = warp_index();
    corner block = {(int32_t)blockIdx.x * SIDE, (int32_t)blockIdx.y * SIDE};
    int32_t rows = M - block.row;
    int32_t cols = N - block.col;
    int64_t batch = blockIdx.z;
    bool is_f16 = (flags & A_IS_F16) != 0;
    narrow_operand oa =
        open_narrow(A, batch * strideA, lda, (flags & A_TRANSPOSED) == 0, block.row, M, K);
    narrow_operand ob =
        open_narrow(B, batch * strideB, ldb, (flags & B_TRANSPOSED) != 0, block.col, N, K);
    oa.first = oa.along_k ? slice<true, SIDE, SIDE>::of_a(0, 16 * warp)
                          : slice<false, SIDE, SIDE>::of_a(0, 16 * warp);
    ob.first = ob.along_k ? slice<true, SIDE, SIDE>::of_b(0, 16 * warp)
                          : slice<false, SIDE, SIDE>::of_b(0, 16 * warp);
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
        uint32_t b[4][4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            load_narrow(b[j], ob, get + NARROW_BYTES, j);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (16 * i < rows) {
                uint32_t a[4];
                load_narrow(a, oa, get, i);
                if (is_f16) {
                    multiply_row<f16>(acc[i], a, b, cols);
                } else {
                    multiply_row<bf16>(acc[i], a, b, cols);
                }
            }
        }
        get = get == last ? ring : get + BYTES;
    }
    copy_wait<0>();
    result to = open_result(C, ldc, batch * strideC, alpha_device, alpha, beta, flags);
    write_sums(to, (float*)shared, acc, block, M, N);
}

#define GEMM_TENSOR(name, ta, tb, width, stages, blocks)                                           \
    QLORA_KERNEL __launch_bounds__(width, blocks) qlora_gemm_tc_##name(GEMM_PARAMETERS) {          \
        tensor<ta, tb, width, stages>(GEMM_ARGUMENTS);                                             \
    }
GEMM_TENSOR(wide_nn, false, false, 256, 4, 1)
GEMM_TENSOR(wide_nt, false, true, 256, 4, 1)
GEMM_TENSOR(nn, false, false, 128, 3, 2)
GEMM_TENSOR(nt, false, true, 128, 3, 2)
GEMM_TENSOR(tn, true, false, 128, 3, 2)

QLORA_KERNEL __launch_bounds__(128, 2) qlora_gemm_tc_narrow(GEMM_PARAMETERS) {
    narrow(GEMM_ARGUMENTS);
}
