// ---- layout of the declarations -----------------------------------------------------------------
// clang-format off
// Every public struct. qlora_ctx_create compares the sizes that the program and the library have.
#define QLORA_STRUCTS(X) \
    X(qlora_allocator)                                                                         \
    X(qlora_device_allocator)                                                                  \
    X(qlora_files)                                                                             \
    X(qlora_ctx_desc)                                                                          \
    X(qlora_native)                                                                            \
    X(qlora_memory_info)                                                                       \
    X(qlora_ctx_info)                                                                          \
    X(qlora_tensor)                                                                            \
    X(qlora_rope_desc)                                                                         \
    X(qlora_model_config)                                                                      \
    X(qlora_adapter_slot)                                                                      \
    X(qlora_model_desc)                                                                        \
    X(qlora_new_token)                                                                         \
    X(qlora_message)                                                                           \
    X(qlora_comm)                                                                              \
    X(qlora_nccl_desc)                                                                         \
    X(qlora_train_desc)                                                                        \
    X(qlora_plan_desc)                                                                         \
    X(qlora_plan_work)                                                                         \
    X(qlora_plan)                                                                              \
    X(qlora_cost)                                                                              \
    X(qlora_model_info)                                                                        \
    X(qlora_parameter_info)                                                                    \
    X(qlora_batch)                                                                             \
    X(qlora_train_info)                                                                        \
    X(qlora_eval_info)                                                                         \
    X(qlora_generate_desc)                                                                     \
    X(qlora_generation_info)                                                                   \
    X(qlora_adapter_desc)                                                                      \
    X(qlora_merge_desc)                                                                        \
    X(qlora_gemm_desc)                                                                         \
    X(qlora_nf4_desc)                                                                          \
    X(qlora_nf4)                                                                               \
    X(qlora_nf4_parts)                                                                         \
    X(qlora_clip_info)                                                                         \
    X(qlora_rotation_desc)                                                                     \
    X(qlora_cross_entropy_desc)                                                                \
    X(qlora_adamw_state)                                                                       \
    X(qlora_adamw_range)                                                                       \
    X(qlora_adamw_desc)                                                                        \
    X(qlora_dropout_desc)                                                                      \
    X(qlora_linear_part)                                                                       \
    X(qlora_linear_desc)                                                                       \
    X(qlora_attention_desc)                                                                    \
    X(qlora_graph_info)                                                                        \
    X(qlora_launch_desc)                                                                       \
    X(qlora_prewarm_product)                                                                   \
    X(qlora_prewarm_desc)                                                                      \
    X(qlora_cache_info)
// clang-format on

typedef enum qlora_struct_index {
#define QLORA_X_STRUCT(type) QLORA_STRUCT_##type,
    QLORA_STRUCTS(QLORA_X_STRUCT)
#undef QLORA_X_STRUCT
    QLORA_STRUCT_COUNT
} qlora_struct_index;

// A sum of the sizes, each with its own weight: a constant expression, equal in C and C++. It is
// expanded in the caller's code, whose compiler may warn of casts: a factor makes it 64 bits wide.
#define QLORA_STRUCT_WEIGHED(type)                                                                 \
    +UINT64_C(1) * sizeof(type) * (QLORA_STRUCT_##type + 3) * (QLORA_STRUCT_##type + 5) *          \
        (QLORA_STRUCT_##type + 7)
#define QLORA_ABI (UINT64_C(1) * QLORA_STRUCT_COUNT QLORA_STRUCTS(QLORA_STRUCT_WEIGHED))
