// method.h - the methods of training: one row for each choice of --method. The other parts ask the
// row, and none of them contains the name of a method, which the gate `words` checks.
#ifndef FINETUNE_METHOD_H
#define FINETUNE_METHOD_H

// The options that not every method reads.
enum {
    METHOD_BETA = 1,
    METHOD_PAIRS = 2,   // label-smoothing and sft-alpha
    METHOD_WEIGHTS = 4, // desirable-weight and undesirable-weight
    METHOD_REFERENCE = 8,
    METHOD_ANSWERS = 16 // of answers only: train-prompt, train-norms, demo, eval-only
};

#define METHOD_NUMBERS 2

// A number of qlora_train_info that is in the log.
typedef struct method_number {
    const char* name; // NULL: none
    size_t offset;
} method_number;

typedef struct method_row {
    qlora_method method;
    const char* name;
    const char* unit; // what a sample is called
    size_t texts;     // of a sample; two are compared with each other
    qlora_text_preference records;
    int options;      // bits of those it reads
    bool preferences; // it is measured against the base, by rewards, and its steps are whole
    bool roles;       // every text has a role
    bool mismatched;  // a step begins with mismatched texts, so that none may be alone in it
    method_number numbers[METHOD_NUMBERS]; // that only its log has
} method_row;

// clang-format off
static const method_row method_rows[] = {
    {QLORA_METHOD_SFT, "sft", "sample", 1, QLORA_TEXT_ANSWERS, METHOD_ANSWERS,
     false, false, false,
     {{NULL, 0}, {NULL, 0}}},
    {QLORA_METHOD_DPO, "dpo", "pair", 2, QLORA_TEXT_PAIRS,
     METHOD_BETA | METHOD_PAIRS | METHOD_REFERENCE,
     true, false, false,
     {{"preference_loss", offsetof(qlora_train_info, preference_loss)},
      {"chosen_nll", offsetof(qlora_train_info, chosen_nll)}}},
    {QLORA_METHOD_KTO, "kto", "sample", 1, QLORA_TEXT_JUDGED,
     METHOD_BETA | METHOD_WEIGHTS | METHOD_REFERENCE,
     true, true, true,
     {{"kl", offsetof(qlora_train_info, kl)}, {NULL, 0}}}};
// clang-format on

// The row of a choice of --method. The first one was there before there was a choice.
static const method_row* method_of(int64_t method) {
    const size_t count = sizeof method_rows / sizeof method_rows[0];
    for (size_t i = 0; i < count; i++) {
        if ((int64_t)method_rows[i].method == method) {
            return &method_rows[i];
        }
    }
    return &method_rows[0];
}

static double method_number_at(const qlora_train_info* info, const method_number* number) {
    double value = 0.0;
    memcpy(&value, (const char*)info + number->offset, sizeof value);
    return value;
}

#endif
