// decode_text.cuh - the state of a text in flight, on the device.
#ifndef QLORA_DECODE_TEXT_CUH
#define QLORA_DECODE_TEXT_CUH

#include "../common.cuh"

// Same layout as qlora__decode_text.
struct decode_text {
    int32_t token;    // to be run
    int32_t position; // of that token
    int32_t alive;    // 0: its row is computed, but nothing is stored
    int32_t top_k;
    float temperature;
    float top_p;
    float min_p;
    float penalty;
    uint32_t seed_low;
    uint32_t seed_high;
    int32_t chosen; // the results of the step
    int32_t bad;    // a logit that is not finite, or -1
    double logprob;
};

// What a step tells the host about a text, in its memory; same layout as qlora__decode_result.
struct decode_result {
    uint64_t done; // written last: position after the token that was run << 32 | token chosen
    double logprob;
    int32_t bad;
    int32_t unused;
};

#endif
