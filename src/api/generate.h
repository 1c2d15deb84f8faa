// ---- generation ---------------------------------------------------------------------------------

// With QLORA_NO_GENERATE beside the implementation, these functions are declared but left out: a
// program that calls one does not link.

// One text, generated token by token. A model has up to generate_sequences of them at a time, each
// with its own prompt, settings and seed; one that ends makes room for another. Training and
// evaluation may run between two tokens. All calls wait for what they return. On a GPU, the step
// after a token may be under way when qlora_generate_next returns; unless the next call is for
// texts that it has, it is computed again, so what a program calls between two tokens counts in any
// case. A program that writes to the model's memory with kernels or copies of its own calls
// qlora_ctx_sync afterwards.
typedef struct qlora_generation qlora_generation;

// Zero it before setting fields: 0 is the default of every field except the prompt.
typedef struct qlora_generate_desc {
    uint32_t reserved_must_be_zero0;
    const int32_t* prompt;
    int64_t prompt_tokens; // at least 1
    int64_t max_tokens;    // maximum new tokens per turn; 0 = up to the model's generate_tokens
    float temperature;     // 0 = always choose the most likely token
    int32_t top_k;         // choose only among the k most likely tokens; 0 = all
    float top_p;           // ... and among the most likely ones that make up p; 0 = all
    float min_p;           // ... and among those with at least min_p times the highest probability
    // Divides the logits above 0 of tokens that the text already has, and multiplies the others, as
    // in transformers. 0 = 1 = off.
    float repetition_penalty;
    uint64_t seed;        // for sampling
    const int32_t* stops; // ids that end a turn; NULL = the model's own, a single -1 = none
    int32_t stop_count;
    // Whether the text is computed with adapters. AUTO: as qlora_adapter_use says at each call,
    // with the selected one. ON: with adapter number `adapter`, whatever is selected or switched
    // off. OFF: with the base alone. In one qlora_generate_next_each, texts with and without
    // adapters take a pass each.
    qlora_choice adapters;
    int32_t adapter; // for ON, less than qlora_model_info.adapters; otherwise 0
    // A text of the same model that begins like this one; NULL = none. The keys and values of the
    // tokens with which both begin are taken from it. If the prompt is the whole text that it had
    // when its turn began, nothing is computed, and the tokens are those of a text that computed
    // the prompt itself, to the bit, if that one did so in a single call: k samples of a prompt
    // cost one prompt. If the prompt goes on differently, the rest is computed like that of
    // qlora_generate_prompt, and may differ by rounding. Both must have the same adapter, and
    // either may end first. After training or another change of the adapter's parameters, begin
    // without it: its keys and values come from the earlier ones.
    qlora_generation* share;
    // qlora_generate_begin, _feed and _prompt only take their tokens, and the next calls of
    // qlora_generate_slice run them.
    bool in_slices;
    uint32_t reserved_must_be_zero1;
} qlora_generate_desc;

// Runs the prompt. The desc, its prompt and its stops are not needed afterwards. Fails with
// QLORA_ERR_FULL if the model's generate_positions have no room for the text until others end.
QLORA_API qlora_result qlora_generate_begin(qlora_model* model, const qlora_generate_desc* desc,
                                            qlora_generation** out);
// Returns the next token. *stopped is true at the end of a turn: *token is then the stop token, or
// -1 if max_tokens or the model's generate_tokens have been reached.
QLORA_API qlora_result qlora_generate_next(qlora_generation* generation, int32_t* token,
                                           bool* stopped);
// The same for several texts of one model, in one pass: on a GPU that computes in bf16, the weights
// are read once for up to 64 of them. tokens[i] and stopped[i] belong to generations[i], whose turn
// must not have ended. If it fails because of one text, the others have their tokens. A text's
// tokens do not depend on which other texts there are, nor on their order: no sum contains values
// of two texts, and the order of every sum depends only on the model, the device, generate_tokens
// and generate_sequences. Models that differ in generate_sequences may differ by rounding.
QLORA_API qlora_result qlora_generate_next_each(qlora_generation* const* generations, int64_t count,
                                                int32_t* tokens, bool* stopped);
// The same as qlora_generate_next in slices, for programs that have a frame to draw: call it until
// *done is true; token and stopped are then those of qlora_generate_next, to the bit. Begin the
// text with desc.in_slices, so that its prompt is divided as well. A slice ends before the next
// piece would exceed the time; it does something in any case. Pieces are those of qlora_train_slice
// on the CPU, and on a GPU, where they take little time, a whole prompt and a token. In between,
// the model accepts no other call that computes with it, and the text none but qlora_generate_query
// and qlora_generate_end, which drops what is in the middle; other models of the context can be
// used.
QLORA_API qlora_result qlora_generate_slice(qlora_generation* generation, double milliseconds,
                                            int32_t* token, bool* stopped, bool* done);
// Appends ids to the text, after the last token that qlora_generate_next returned (including a stop
// token), and starts the next turn. The keys and values of the text so far are kept. Fails with
// QLORA_ERR_FULL, like qlora_generate_prompt, if there is no room for the turn; the text is then as
// it was.
QLORA_API qlora_result qlora_generate_feed(qlora_generation* generation, const int32_t* ids,
                                           int64_t count);
// Replaces the text by a new prompt and starts the next turn. The keys and values of the tokens
// with which both texts begin are kept, all others are computed; *kept, which may be NULL, is the
// number of kept tokens. So each turn of a chat can pass the whole conversation. After training,
// begin again: kept keys and values come from the earlier weights.
QLORA_API qlora_result qlora_generate_prompt(qlora_generation* generation, const int32_t* ids,
                                             int64_t count, int64_t* kept);
// Writes the natural logarithm of the probability that the model gave to the token which
// qlora_generate_next returned last: before temperature, repetition penalty, top_k, top_p and
// min_p.
QLORA_API qlora_result qlora_generate_logprob(qlora_generation* generation, double* out);
typedef struct qlora_generation_info {
    int64_t tokens;   // in the text, including the last one returned
    // Positions run through the model since qlora_generate_begin, with those of the prompt that
    // were not shared, and with those that longrope made run again (LONGROPE in the manual).
    int64_t computed;
} qlora_generation_info;
QLORA_API qlora_result qlora_generate_query(qlora_generation* generation,
                                            qlora_generation_info* out);
// Frees the generation, which may be NULL.
QLORA_API qlora_result qlora_generate_end(qlora_generation* generation);

// Called with each new token except a stop token, which ends the text. Return false to stop early;
// this is not an error.
typedef bool (*qlora_token_fn)(void* user, int32_t token);
// Generates a whole text in one call: begin, next until the turn ends, end.
QLORA_API qlora_result qlora_generate(qlora_model* model, const qlora_generate_desc* desc,
                                      qlora_token_fn fn, void* user);
