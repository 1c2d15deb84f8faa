// ---- GEMM ---------------------------------------------------------------------------------------
typedef struct qlora_gemm_desc {
    bool trans_a;    // A is stored as [K, M]
    bool trans_b;    // B is stored as [N, K]
    float alpha;     // must be set: 0 means 0, not 1
    float beta;      // 0 = C is not read
    qlora_path path; // 0 = AUTO; NF4 is not accepted
} qlora_gemm_desc;

// C = alpha op(A) op(B) + beta C, row-major, for each matrix of the batch; an operand with batch 1
// is used for all of them. C must not overlap A or B. Rows, columns, leading dimensions and the
// batch must be at most 2^31 - 257. The context's math applies as to a forward product. Does not
// wait for the device.
//
// Types of A, B and C:
//   f32, f32, f32
//   bf16, bf16, bf16 or f32
//   f16, f16, f32
//   one of A and B f32, the other bf16 or f16, C f32, batch 1 on CUDA: the f32 operand is cast into
//   the scratch buffer, in slices if that is too small; for f16 it is first scaled by a power of
//   two chosen from its maximum, which alpha then cancels
QLORA_API qlora_result qlora_gemm(qlora_ctx* ctx, const qlora_gemm_desc* desc,
                                  const qlora_tensor* a, const qlora_tensor* b,
                                  const qlora_tensor* c);

// 0 = overwrite the result and choose the path automatically.
typedef enum qlora_product_flags {
    QLORA_PRODUCT_ACCUMULATE = 1, // add to the result
    QLORA_PRODUCT_PTX = 2,        // use the library's own kernels
    QLORA_PRODUCT_CUBLAS = 4,     // use cuBLAS
    QLORA_PRODUCT_FUSED = 8,      // NF4: dequantise inside the product; bf16, at most 32 rows
    QLORA_PRODUCT_UNFUSED = 16    // NF4: dequantise into the scratch buffer, then multiply
} qlora_product_flags;

// C[M,N] = A[M,K] B[K,N] and its two gradients, dA = dC B^T and dB = A^T dC; types and limits as in
// qlora_gemm. flags: ACCUMULATE, and PTX or CUBLAS. No call waits for the device.
QLORA_API qlora_result qlora_gemm_forward(qlora_ctx* ctx, const qlora_tensor* a,
                                          const qlora_tensor* b, const qlora_tensor* c,
                                          uint32_t flags);
QLORA_API qlora_result qlora_gemm_backward_a(qlora_ctx* ctx, const qlora_tensor* dc,
                                             const qlora_tensor* b, const qlora_tensor* da,
                                             uint32_t flags);
QLORA_API qlora_result qlora_gemm_backward_b(qlora_ctx* ctx, const qlora_tensor* a,
                                             const qlora_tensor* dc, const qlora_tensor* db,
                                             uint32_t flags);
// "cuBLAS" and so on; "unknown" for any other value.
QLORA_API const char* qlora_path_name(qlora_path path);

// ---- NF4 ----------------------------------------------------------------------------------------
// A frozen weight with 4 bits per element, byte-identical to bitsandbytes' storage: each block of
// `block` consecutive elements, in row-major order, shares a scale, and unless plain_scales is set,
// each group of `block2` scales is quantised to one byte each with a scale of its own.
typedef struct qlora_nf4_desc {
    int64_t rows;
    int64_t cols;
    int32_t block;     // elements per scale, a power of two from 32 to 4096; 0 = 64
    int32_t block2;    // scales per group, a power of two up to 2^20; 0 = 256
    bool plain_scales; // store one float per block instead of one byte
} qlora_nf4_desc;

// All addresses are in `memory`: device addresses on CUDA, host addresses on the CPU.
typedef struct qlora_nf4 {
    uint8_t* codes;        // (rows * cols + 1) / 2 bytes; element 2i is the high half of byte i
    float* absmax;         // one per block; NULL unless plain_scales
    uint8_t* absmax_codes; // one per block; NULL if plain_scales
    float* absmax_scales;  // one per block2 blocks; NULL if plain_scales
    float* offset;         // one, added to every scale; NULL if plain_scales
    float* maps;           // the 16 levels, then the 256 values of a scale's byte, ascending
    int64_t rows;
    int64_t cols;
    int32_t block;
    int32_t block2;
    bool owns_memory; // created, not wrapped
    float* ready; // for the CPU's products with few rows: scales of a model's weight; may be NULL
    qlora_tensor memory;
    qlora_ctx* owner;
} qlora_nf4;

// Host copies of the parts of a qlora_nf4; `levels` and `map` are the two parts of maps. A part
// that the weight does not have must be NULL.
typedef struct qlora_nf4_parts {
    uint8_t* codes;
    float* absmax;
    uint8_t* absmax_codes;
    float* absmax_scales;
    float* offset;
    float* levels; // 16
    float* map;    // 256
} qlora_nf4_parts;

// Number of bytes that such a weight needs; 0 if the desc is invalid.
QLORA_API size_t qlora_nf4_bytes(const qlora_nf4_desc* desc);
// Allocates a weight with bitsandbytes' maps; codes and scales are uninitialised. Free it with
// qlora_nf4_destroy, which zeroes the struct. Waits for the device.
QLORA_API qlora_result qlora_nf4_create(qlora_ctx* ctx, const qlora_nf4_desc* desc, qlora_nf4* out);
// The same in an existing U8 tensor of at least qlora_nf4_bytes bytes, 16-byte aligned, which must
// outlive the weight. Nothing is allocated, and destroying the weight frees nothing.
QLORA_API qlora_result qlora_nf4_wrap(qlora_ctx* ctx, const qlora_nf4_desc* desc,
                                      const qlora_tensor* memory, qlora_nf4* out);
QLORA_API qlora_result qlora_nf4_destroy(qlora_ctx* ctx, qlora_nf4* weight);
// Copies parts from or to host memory; parts that are NULL are left unchanged. Both calls wait for
// the device.
QLORA_API qlora_result qlora_nf4_write(qlora_ctx* ctx, const qlora_nf4* weight,
                                        const qlora_nf4_parts* parts);
QLORA_API qlora_result qlora_nf4_read(qlora_ctx* ctx, const qlora_nf4* weight,
                                          const qlora_nf4_parts* parts);
// Quantises a contiguous f32, bf16 or f16 matrix. Uses 4 bytes of scratch per block. Does not wait
// for the device.
QLORA_API qlora_result qlora_nf4_quantise(qlora_ctx* ctx, const qlora_tensor* source,
                                          const qlora_nf4* weight);
// Dequantises into an f32, bf16 or f16 matrix with any ld. via_bf16: an f32 result is rounded to
// bf16 first. Does not wait for the device.
QLORA_API qlora_result qlora_nf4_dequantise(qlora_ctx* ctx, const qlora_nf4* weight,
                                            const qlora_tensor* out, bool via_bf16);

// y = x W^T and dx = dy W. x and dy are f32 or bf16; y and dx have the same type, or f32. W is
// dequantised to bf16 values, whatever the type of x. An unfused product dequantises as much of W
// at a time as the free scratch holds and reports the path of its GEMM; a fused one, which only the
// forward product has, reports QLORA_PATH_NF4. (A fused dx = dy W does not exist: its sums run
// along the columns of W, across the blocks that share a scale, and backward products have the rows
// of a whole micro-batch, for which dequantising W once costs less than doing so for every tile.)
// flags: ACCUMULATE, PTX and CUBLAS imply an unfused product; without flags, small products are
// fused if the device can. No call waits for the device.
QLORA_API qlora_result qlora_nf4_gemm_forward(qlora_ctx* ctx, const qlora_tensor* x,
                                              const qlora_nf4* w, const qlora_tensor* y,
                                              uint32_t flags);
QLORA_API qlora_result qlora_nf4_gemm_backward(qlora_ctx* ctx, const qlora_tensor* dy,
                                               const qlora_nf4* w, const qlora_tensor* dx,
                                               uint32_t flags);
// Two weights with the same x (gate and up, or k and v); a fused product computes both in one
// launch.
QLORA_API qlora_result qlora_nf4_gemm_forward2(qlora_ctx* ctx, const qlora_tensor* x,
                                               const qlora_nf4* w1, const qlora_nf4* w2,
                                               const qlora_tensor* y1, const qlora_tensor* y2,
                                               uint32_t flags);
