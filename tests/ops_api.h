// ops_api.h - the operators as a table, so that one test can compare the library as built with the
// same loops built in double (internal/double.c).
#ifndef QLORA_TEST_OPS_API_H
#define QLORA_TEST_OPS_API_H

typedef struct ops_api {
    size_t real_bytes; // size of one element of an F32 tensor on the CPU: 4, or 8 in double
    qlora_result (*ctx_create)(const qlora_ctx_desc* desc, qlora_ctx** out, int version,
                               uint64_t abi);
    qlora_result (*ctx_destroy)(qlora_ctx* ctx);
    const char* (*last_error)(const qlora_ctx* ctx);
    qlora_result (*tensor_create)(qlora_ctx* ctx, qlora_dtype dtype, int64_t rows, int64_t cols,
                                  qlora_tensor* out);
    qlora_result (*tensor_destroy)(qlora_ctx* ctx, qlora_tensor* tensor);
    qlora_result (*tensor_write)(qlora_ctx* ctx, const qlora_tensor* t, const void* source,
                                 size_t bytes);
    qlora_result (*tensor_read)(qlora_ctx* ctx, const qlora_tensor* t, void* target, size_t bytes);
    qlora_result (*silu_forward)(qlora_ctx* ctx, const qlora_tensor* x, const qlora_tensor* y);
    qlora_result (*silu_backward)(qlora_ctx* ctx, const qlora_tensor* x, const qlora_tensor* dy,
                                  const qlora_tensor* dx);
    qlora_result (*swiglu_forward)(qlora_ctx* ctx, const qlora_tensor* gate, const qlora_tensor* up,
                                   const qlora_tensor* h);
    qlora_result (*swiglu_backward)(qlora_ctx* ctx, const qlora_tensor* dh,
                                    const qlora_tensor* gate, const qlora_tensor* up,
                                    const qlora_tensor* dgate, const qlora_tensor* dup,
                                    const qlora_tensor* h);
    qlora_result (*geglu_forward)(qlora_ctx* ctx, const qlora_tensor* gate, const qlora_tensor* up,
                                  const qlora_tensor* h);
    qlora_result (*geglu_backward)(qlora_ctx* ctx, const qlora_tensor* dh, const qlora_tensor* gate,
                                   const qlora_tensor* up, const qlora_tensor* dgate,
                                   const qlora_tensor* dup, const qlora_tensor* h);
    qlora_result (*cap)(qlora_ctx* ctx, float cap, const qlora_tensor* x, const qlora_tensor* y);
    qlora_result (*mul)(qlora_ctx* ctx, const qlora_tensor* a, const qlora_tensor* b,
                        const qlora_tensor* y);
    qlora_result (*add)(qlora_ctx* ctx, const qlora_tensor* a, const qlora_tensor* b,
                        const qlora_tensor* y);
    qlora_result (*scale)(qlora_ctx* ctx, float alpha, const qlora_tensor* x,
                          const qlora_tensor* y);
    qlora_result (*fill)(qlora_ctx* ctx, float value, const qlora_tensor* y);
    qlora_result (*rmsnorm_forward)(qlora_ctx* ctx, const qlora_tensor* x, const qlora_tensor* w,
                                    float eps, const qlora_tensor* y);
    qlora_result (*rmsnorm_residual_forward)(qlora_ctx* ctx, const qlora_tensor* h,
                                             const qlora_tensor* delta, const qlora_tensor* w,
                                             float eps, const qlora_tensor* sum,
                                             const qlora_tensor* y);
    qlora_result (*rmsnorm_backward)(qlora_ctx* ctx, const qlora_tensor* dy, const qlora_tensor* x,
                                     const qlora_tensor* w, float eps, const qlora_tensor* dres,
                                     const qlora_tensor* dx, const qlora_tensor* dw);
    qlora_result (*rope_forward)(qlora_ctx* ctx, const qlora_tensor* x, int64_t rotated,
                                 const qlora_tensor* positions, const qlora_tensor* table,
                                 const qlora_tensor* bias, const qlora_tensor* flag);
    qlora_result (*rope_backward)(qlora_ctx* ctx, const qlora_tensor* dx, int64_t rotated,
                                  const qlora_tensor* positions, const qlora_tensor* table,
                                  const qlora_tensor* flag);
    qlora_result (*rope_apply)(qlora_ctx* ctx, const qlora_rotation_desc* desc,
                               const qlora_tensor* x, const qlora_tensor* positions,
                               const qlora_tensor* table, const qlora_tensor* bias,
                               const qlora_tensor* flag);
    qlora_result (*heads_split)(qlora_ctx* ctx, const qlora_tensor* x, const qlora_tensor* y);
    qlora_result (*heads_join)(qlora_ctx* ctx, const qlora_tensor* x, const qlora_tensor* y);
    qlora_result (*transpose)(qlora_ctx* ctx, const qlora_tensor* x, const qlora_tensor* y);
    qlora_result (*scores_mask)(qlora_ctx* ctx, const qlora_tensor* s, float scale, bool causal,
                                int64_t window);
    qlora_result (*softmax_forward)(qlora_ctx* ctx, const qlora_tensor* x, const qlora_tensor* y);
    qlora_result (*softmax_backward)(qlora_ctx* ctx, const qlora_tensor* y, const qlora_tensor* dy,
                                     const qlora_tensor* dx);
    qlora_result (*embed)(qlora_ctx* ctx, const qlora_tensor* table, const qlora_tensor* ids,
                          const qlora_tensor* y, const qlora_tensor* flag);
    qlora_result (*cross_entropy)(qlora_ctx* ctx, const qlora_cross_entropy_desc* args);
    qlora_result (*argmax)(qlora_ctx* ctx, const qlora_tensor* x, const qlora_tensor* ids);
    qlora_result (*adamw_step)(qlora_ctx* ctx, const qlora_adamw_desc* args);
    qlora_result (*adamw_shadow)(qlora_ctx* ctx, const qlora_adamw_desc* args);
    qlora_result (*dropout)(qlora_ctx* ctx, const qlora_dropout_desc* args);
    qlora_result (*attention_forward)(qlora_ctx* ctx, const qlora_attention_desc* desc,
                                      const qlora_tensor* q, const qlora_tensor* k,
                                      const qlora_tensor* v, const qlora_tensor* seqs,
                                      const qlora_tensor* o, const qlora_tensor* lse);
    qlora_result (*attention_backward)(qlora_ctx* ctx, const qlora_attention_desc* desc,
                                       const qlora_tensor* q, const qlora_tensor* k,
                                       const qlora_tensor* v, const qlora_tensor* seqs,
                                       const qlora_tensor* o, const qlora_tensor* lse,
                                       const qlora_tensor* d_o, const qlora_tensor* dq,
                                       const qlora_tensor* dk, const qlora_tensor* dv);
} ops_api;

// In the order of the members above, after real_bytes.
#define OPS_API_FUNCTIONS                                                                          \
    qlora_ctx_create_abi, qlora_ctx_destroy, qlora_last_error, qlora_tensor_create,                \
        qlora_tensor_destroy, qlora_tensor_write, qlora_tensor_read, qlora_silu_forward,           \
        qlora_silu_backward, qlora_swiglu_forward, qlora_swiglu_backward, qlora_geglu_forward,     \
        qlora_geglu_backward, qlora_cap, qlora_mul, qlora_add, qlora_scale, qlora_fill,            \
        qlora_rmsnorm_forward, qlora_rmsnorm_residual_forward, qlora_rmsnorm_backward,             \
        qlora_rope_forward, qlora_rope_backward, qlora_rope_apply, qlora_heads_split,              \
        qlora_heads_join, qlora_transpose, qlora_scores_mask, qlora_softmax_forward,               \
        qlora_softmax_backward, qlora_embed, qlora_cross_entropy, qlora_argmax, qlora_adamw_step,  \
        qlora_adamw_shadow, qlora_dropout, qlora_attention_forward, qlora_attention_backward

// The operators in double, on the CPU only.
const ops_api* ops_in_double(void);

#endif
