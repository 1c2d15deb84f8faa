// ---- GEMM ---------------------------------------------------------------------------------------
typedef struct qlora_gemm_desc {
    bool trans_a; // A is stored [K, M]
    bool trans_b; // B is stored [N, K]
    float alpha;
    float beta; // 0: C is not read
    qlora_path path;
} qlora_gemm_desc;

// C = alpha op(A) op(B) + beta C, row-major, batch by batch (a batch of 1 serves all). With the
// context's math it counts as a forward product.
// Types (A, B, C): f32 f32 f32; bf16 bf16 {bf16, f32}; f16 f16 f32; and f32 with one operand of
// bf16 or f16, C f32: the f32 operand is cast into the scratch, for f16 scaled by a power of two
// from its own maximum, and back in alpha.
QLORA_API qlora_result qlora_gemm(qlora_ctx* ctx, const qlora_gemm_desc* desc,
                                  const qlora_tensor* a, const qlora_tensor* b,
                                  const qlora_tensor* c);

// 0 overwrites the result and chooses the path by itself.
typedef enum qlora_product_flags {
    QLORA_PRODUCT_ACCUMULATE = 1, // add to the result
    QLORA_PRODUCT_PTX = 2,        // our own kernels
    QLORA_PRODUCT_CUBLAS = 4,     // cuBLAS
    QLORA_PRODUCT_FUSED = 8,      // NF4: dequantise inside the product; bf16, at most 32 rows
    QLORA_PRODUCT_UNFUSED = 16    // NF4: dequantise into the scratch, then multiply
} qlora_product_flags;

// C[M,N] = A[M,K] B[K,N] and its two gradients: dA = dC B^T, dB = A^T dC. flags:
// qlora_product_flags, the first three.
QLORA_API qlora_result qlora_gemm_forward(qlora_ctx* ctx, const qlora_tensor* a,
                                          const qlora_tensor* b, const qlora_tensor* c,
                                          uint32_t flags);
QLORA_API qlora_result qlora_gemm_backward_a(qlora_ctx* ctx, const qlora_tensor* dc,
                                             const qlora_tensor* b, const qlora_tensor* da,
                                             uint32_t flags);
QLORA_API qlora_result qlora_gemm_backward_b(qlora_ctx* ctx, const qlora_tensor* a,
                                             const qlora_tensor* dc, const qlora_tensor* db,
                                             uint32_t flags);
QLORA_API const char* qlora_path_name(qlora_path path);

// ---- NF4
// ------------------------------------------------------------------------------------------ A
// frozen weight in 4 bits an element, byte for byte as bitsandbytes stores it: blocks of `block`
// elements along the rows share a scale, and (unless plain_scales) `block2` scales share another.
typedef struct qlora_nf4_desc {
    int64_t rows;
    int64_t cols;
    int32_t block;     // elements with one scale, a power of two from 32 to 4096; 0 = 64
    int32_t block2;    // scales with one scale of their own, a power of two; 0 = 256
    bool plain_scales; // one float a block instead of one byte
} qlora_nf4_desc;

// Addresses are the device's on CUDA, the host's on the CPU; all lie in `memory`.
typedef struct qlora_nf4 {
    uint8_t* codes;        // (rows * cols + 1) / 2; element 2i in the high half of byte i
    float* absmax;         // one a block; NULL unless plain_scales
    uint8_t* absmax_codes; // one a block; NULL when plain_scales
    float* absmax_scales;  // one for block2 blocks
    float* offset;         // one
    float* maps;           // the 16 levels, then the 256 values of a scale's byte, ascending
    int64_t rows;
    int64_t cols;
    int32_t block;
    int32_t block2;
    bool owns_memory;
    qlora_tensor memory;
    qlora_ctx* owner;
} qlora_nf4;

// The host's copies of the parts; NULL where a part is absent or not wanted. levels and map follow
// maps.
typedef struct qlora_nf4_parts {
    uint8_t* codes;
    float* absmax;
    uint8_t* absmax_codes;
    float* absmax_scales;
    float* offset;
    float* levels; // 16
    float* map;    // 256
} qlora_nf4_parts;

// Bytes that a weight of this description takes, 0 when the description is not valid.
QLORA_API size_t qlora_nf4_bytes(const qlora_nf4_desc* desc);
// The maps are set to bitsandbytes' own; codes and scales are not set.
QLORA_API qlora_result qlora_nf4_create(qlora_ctx* ctx, const qlora_nf4_desc* desc, qlora_nf4* out);
// The same inside a U8 tensor of qlora_nf4_bytes or more bytes, 16-byte aligned, that outlives it.
QLORA_API qlora_result qlora_nf4_wrap(qlora_ctx* ctx, const qlora_nf4_desc* desc,
                                      const qlora_tensor* memory, qlora_nf4* out);
QLORA_API qlora_result qlora_nf4_destroy(qlora_ctx* ctx, qlora_nf4* weight);
// Both wait for the device. Parts that are NULL stay as they are.
QLORA_API qlora_result qlora_nf4_write(qlora_ctx* ctx, const qlora_nf4* weight,
                                        const qlora_nf4_parts* parts);
QLORA_API qlora_result qlora_nf4_read(qlora_ctx* ctx, const qlora_nf4* weight,
                                          const qlora_nf4_parts* parts);
// From a contiguous matrix of f32, bf16 or f16. Uses 4 bytes of scratch a block.
QLORA_API qlora_result qlora_nf4_quantise(qlora_ctx* ctx, const qlora_tensor* source,
                                          const qlora_nf4* weight);
// Into f32, bf16 or f16, any ld. via_bf16: an f32 out gets the values that a bf16 one would.
QLORA_API qlora_result qlora_nf4_dequantise(qlora_ctx* ctx, const qlora_nf4* weight,
                                            const qlora_tensor* out, bool via_bf16);

// y = x W^T and dx = dy W. x and y (dy, dx) are f32, or bf16 (y may be f32 then). The weights are
// the bf16 values that NF4 stands for, whatever the type of x. Uses what scratch there is: a weight
// that does not fit is taken in slices. Fused: reported as QLORA_PATH_NF4; else the GEMM's path.
// flags: qlora_product_flags; ACCUMULATE, PTX and CUBLAS mean an unfused product.
QLORA_API qlora_result qlora_nf4_gemm_forward(qlora_ctx* ctx, const qlora_tensor* x,
                                              const qlora_nf4* w, const qlora_tensor* y,
                                              uint32_t flags);
QLORA_API qlora_result qlora_nf4_gemm_backward(qlora_ctx* ctx, const qlora_tensor* dy,
                                               const qlora_nf4* w, const qlora_tensor* dx,
                                               uint32_t flags);
// Two weights with the same x (gate and up, k and v); fused, one pass over x serves both.
QLORA_API qlora_result qlora_nf4_gemm_forward2(qlora_ctx* ctx, const qlora_tensor* x,
                                               const qlora_nf4* w1, const qlora_nf4* w2,
                                               const qlora_tensor* y1, const qlora_tensor* y2,
                                               uint32_t flags);
