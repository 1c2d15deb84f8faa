// ---- the choice of a token ----------------------------------------------------------------------

enum { QLORA__WORN_NONE = -1, QLORA__WORN_MIXED = -2 };

// One text. Its keys and values are in the model's cache. Its logits are kept on the host, so that
// training and evaluation can use the model between two tokens.
struct qlora_generation {
    qlora_ctx* ctx;
    qlora_model* m;
    qlora_generate_desc desc; // its pointers are NULL
    int32_t* stops;           // a copy
    int64_t stop_count;
    int64_t slot;     // which of the model's texts it is
    int64_t length;   // tokens in the cache
    int64_t asked;    // the same when its turn began: the prompt, whose logits are `first`
    int64_t made;     // new tokens in this turn
    int64_t computed; // positions that were run, in all turns
    bool is_long;     // what is in the cache was rotated as qlora__is_long says
    // What they were run with: an adapter's number, QLORA__WORN_NONE or, if several, _MIXED.
    int32_t worn;
    int32_t waiting;  // the last token returned, if it is not in the cache yet; -1 = none
    int32_t chosen; // the last token returned, if `logits` are those it was chosen from; -1 = none
    bool stopped;   // the turn has ended
    bool on_device; // the device has the state of the text: its next step needs nothing
    bool pending;   // it takes part in the step that is being prepared
    bool stepped;   // it had its token in this call before the step on the device
    bool chose;     // the device chose the last token, whose log-probability is `logprob`
    double logprob;
    // For qlora_generate_slice: tokens in `text` that were given and have not been run; what is in
    // the middle, NULL = nothing; the tokens that the text had before; and the result of the step
    int64_t due;
    qlora__errand* errand;
    int64_t slice_tokens;
    int32_t slice_token;
    bool slice_stopped;
    bool broken;                       // a pass failed, so the contents of the cache are unknown
    int32_t owners[QLORA__MOST_PAGES]; // of its pages in the cache: the slots they belong to
    // If the model has a pool: its pages, and where the first of them was, see generate/paging.h.
    int32_t pages[QLORA__MOST_PAGES];
    int64_t page_count;
    int32_t placed;
    char* memory;                      // of the arrays below and stops
    size_t bytes;
    float* logits;  // [V]
    float* first;   // [V]: the logits after `asked` tokens; NULL if the model has a single text
    float* weights; // [V], for sampling
    int32_t* order; // [V]
    uint16_t* raw;  // [V]
    uint8_t* seen;  // [V]: 1 if the text contains the token
    int32_t* ints;
    int32_t* text;  // [generate_tokens]: the tokens in the cache
};

// Orders tokens by weight, largest first, and equal weights by id.
static bool qlora__sample_before(const float* w, int32_t a, int32_t b) {
    return w[a] > w[b] || (!(w[a] < w[b]) && a < b);
}

static void qlora__sample_sift(const float* w, int32_t* heap, int64_t count, int64_t at) {
    int32_t moved = heap[at];
    for (int64_t child = 2 * at + 1; child < count; child = 2 * at + 1) {
        if (child + 1 < count && qlora__sample_before(w, heap[child + 1], heap[child])) {
            child++;
        }
        if (!qlora__sample_before(w, heap[child], moved)) {
            break;
        }
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = moved;
}

// Selects the tokens to sample from: the top_k largest weights, and of these the fewest that make
// up top_p of their sum. They are stored from the end of g->order backwards, largest first. Returns
// their number.
static int64_t qlora__sample_keep(const qlora_generation* g, int64_t vocab, double* sum) {
    const float* w = g->weights;
    int32_t* heap = g->order;
    int64_t most = g->desc.top_k > 0 ? qlora__min(g->desc.top_k, vocab) : vocab;
    double part = g->desc.top_p > 0.0f ? (double)g->desc.top_p : 1.0;
    double whole = 0.0;
    for (int64_t i = 0; i < vocab; i++) {
        heap[i] = (int32_t)i;
        whole += (double)w[i];
    }
    for (int64_t i = vocab / 2 - 1; i >= 0; i--) {
        qlora__sample_sift(w, heap, vocab, i);
    }
    // The sum of the top_k weights is known only once all of them are selected; without top_k, the
    // selection can stop early.
    double stop_at = g->desc.top_k > 0 ? 1e300 : part * whole;
    int64_t kept = 0;
    double out = 0.0;
    while (kept < most &&
           (kept == 0 || (out < stop_at && (g->desc.top_k > 0 || w[heap[0]] >= g->desc.min_p)))) {
        int64_t last = vocab - 1 - kept;
        int32_t top = heap[0];
        heap[0] = heap[last];
        heap[last] = top;
        qlora__sample_sift(w, heap, last, 0);
        out += (double)w[top];
        kept++;
    }
    double run = 0.0;
    int64_t count = 0;
    while (count < kept && (count == 0 || run < (g->desc.top_k > 0 ? part * out : stop_at))) {
        run += (double)w[heap[vocab - 1 - count]];
        count++;
    }
    while (count > 1 && w[heap[vocab - count]] < g->desc.min_p) { // the largest weight is 1
        count--;
        run -= (double)w[heap[vocab - 1 - count]];
    }
    *sum = run;
    return count;
}

// A number in [0, 1) that depends on the seed and the position alone.
static double qlora__sample_number(uint64_t seed, int64_t position) {
    const uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    const uint32_t counter[4] = {(uint32_t)position, (uint32_t)((uint64_t)position >> 32),
                                 0x67656eu, 0};
    uint32_t words[4];
    qlora__philox(counter, key, words);
    return ((double)(words[0] >> 5) * 67108864.0 + (double)(words[1] >> 6)) / 9007199254740992.0;
}

// Copies the logits to g->weights, with the repetition penalty.
static void qlora__sample_penalise(const qlora_generation* g, int64_t vocab) {
    float penalty = g->desc.repetition_penalty > 0.0f ? g->desc.repetition_penalty : 1.0f;
    for (int64_t i = 0; i < vocab; i++) {
        float logit = g->logits[i];
        g->weights[i] = g->seen[i] == 0 ? logit : logit > 0.0f ? logit / penalty : logit * penalty;
    }
}

// Chooses the token after `position` from g->logits.
static int32_t qlora__sample(const qlora_generation* g, int64_t vocab, int64_t position) {
    qlora__breathe(g->ctx);
    qlora__sample_penalise(g, vocab);
    float* w = g->weights;
    int32_t best = 0;
    for (int64_t i = 1; i < vocab; i++) {
        best = w[i] > w[best] ? (int32_t)i : best;
    }
    if (!(g->desc.temperature > 0.0f)) {
        return best;
    }
    double top = (double)w[best];
    double sum = 0.0;
    for (int64_t i = 0; i < vocab; i++) {
        w[i] = (float)exp(((double)w[i] - top) / (double)g->desc.temperature);
        sum += (double)w[i];
    }
    qlora__breathe(g->ctx);
    bool all = g->desc.top_k == 0 && !(g->desc.top_p > 0.0f) && !(g->desc.min_p > 0.0f);
    int64_t count = all ? vocab : qlora__sample_keep(g, vocab, &sum);
    double left = qlora__sample_number(g->desc.seed, position) * sum;
    int32_t token = best;
    for (int64_t i = 0; i < count; i++) {
        int32_t candidate = all ? (int32_t)i : g->order[vocab - 1 - i];
        if (w[candidate] > 0.0f) {
            token = candidate;
            left -= (double)w[candidate];
        }
        if (left < 0.0) {
            break;
        }
    }
    return token; // if rounding left a remainder, the last token that can be chosen
}
