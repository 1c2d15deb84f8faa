// ---- generation ---------------------------------------------------------------------------------
typedef struct qlora_generate_desc {
    uint32_t reserved_must_be_zero0;
    const int32_t* prompt;
    int64_t prompt_tokens;
    int64_t max_tokens;    // new ones; 0 = as many as the plan's generate_tokens leave
    float temperature;     // 0 = greedy
    int32_t top_k;         // 0 = all
    float top_p;           // 0 = all
    uint64_t seed;
    const int32_t* stops;  // NULL = the model's own; -1 as the only one = none
    int32_t stop_count;
    uint32_t reserved_must_be_zero1;
} qlora_generate_desc;
// Called with each new token but not with the stop that ends the text; false stops (which is no
// error).
typedef bool (*qlora_token_fn)(void* user, int32_t token);
QLORA_API qlora_result qlora_generate(qlora_model* model, const qlora_generate_desc* desc,
                                      qlora_token_fn fn, void* user);
