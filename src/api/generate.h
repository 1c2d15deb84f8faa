// ---- generation ---------------------------------------------------------------------------------
typedef struct qlora_generate_desc {
    uint32_t reserved_must_be_zero0;
    const int32_t* prompt;
    int64_t prompt_tokens;
    int64_t max_tokens;    // new tokens per turn; 0 = until the model's generate_tokens are used up
    float temperature;     // 0 = greedy
    int32_t top_k;         // 0 = all
    float top_p;           // 0 = all
    uint64_t seed;
    const int32_t* stops;  // NULL = the model's own; a single -1 = none
    int32_t stop_count;
    uint32_t reserved_must_be_zero1;
} qlora_generate_desc;

// One text, generated a token at a time. A model has at most one generation at a time; training and
// evaluation may run between two of its tokens.
typedef struct qlora_generation qlora_generation;
// Computes the prompt. The desc and what it points to are not needed afterwards.
QLORA_API qlora_result qlora_generate_begin(qlora_model* model, const qlora_generate_desc* desc,
                                            qlora_generation** out);
// The next token. *stopped is true at the end of a turn: *token is then the stop token, or -1 when
// max_tokens or the room for the text is used up.
QLORA_API qlora_result qlora_generate_next(qlora_generation* generation, int32_t* token,
                                           bool* stopped);
// Appends ids to the text, after the last token that qlora_generate_next returned (a stop token
// included), and starts the next turn. Keys and values of the text so far are kept.
QLORA_API qlora_result qlora_generate_feed(qlora_generation* generation, const int32_t* ids,
                                           int64_t count);
QLORA_API qlora_result qlora_generate_end(qlora_generation* generation);

// Called with each new token, but not with the stop token that ends the text. Return false to stop;
// this is not an error.
typedef bool (*qlora_token_fn)(void* user, int32_t token);
// A whole text: begin, next until it stops, end.
QLORA_API qlora_result qlora_generate(qlora_model* model, const qlora_generate_desc* desc,
                                      qlora_token_fn fn, void* user);
