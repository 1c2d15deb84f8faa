// sample.cu - the choice of the next token of each text, from bf16 logits.
// targets: 80 90
// groups: bf16
//
// As on the host (src/generate.h): logits of tokens that the text has are divided or multiplied by
// the penalty; with temperature 0 the largest is chosen, the first of equal ones. Otherwise tokens
// have the weight e^((logit - largest) / temperature), and those that top_k, top_p and min_p leave
// share the interval [0, 1), the most likely one first, and without these settings in the order of
// their ids; the random number of seed and position tells which is chosen.
//
// Weights are added as integers of 2^-40, so no sum depends on its order. A token is found by
// value: in a histogram of 1024 steps of (largest - logit) / temperature, of which the last one
// contains every token with a weight of 0, and within a step by the digits of the logit.
#include "decode_text.cuh"
#include "../early.cuh"
#include "../vec.cuh"

enum { SAMPLE_PART = 2048, SAMPLE_STEPS = 1024, SAMPLE_DIGITS = 2048 };

// What a block of the first kernel found; same size as qlora__sample_part.
struct sample_part {
    float top; // with the penalty
    int32_t at;
    float raw_top;
    float raw_sum; // of e^(logit - raw_top)
    int32_t bad;
    int32_t unused[3];
};

__device__ __forceinline__ float sample_logit(const bf16* logits, const uint8_t* seen,
                                              float penalty, int32_t i) {
    float v = to_float(logits[i]);
    if (seen && seen[i] != 0) {
        v = v > 0.0f ? __fdiv_rn(v, penalty) : __fmul_rn(v, penalty);
    }
    return v;
}

__device__ __forceinline__ void sample_better(float& top, int32_t& at, float other, int32_t where) {
    if (other > top || (other == top && where < at)) {
        top = other;
        at = where;
    }
}

// Launch: grid (ceil(vocab / SAMPLE_PART), rows), 256 threads. It is long because all logits of a
// thread are requested at once and kept.
QLORA_KERNEL __launch_bounds__(256)
    qlora_sample_parts(const bf16* logits, int64_t ld, int32_t vocab, const decode_text* texts,
                       const uint8_t* seen, sample_part* parts) {
    __shared__ float tops[8];
    __shared__ int32_t places[8];
    __shared__ int32_t bads[8];
    __shared__ float sums[32];
    early_next();
    early_wait();
    int64_t n = blockIdx.y;
    float penalty = texts[n].penalty;
    const uint8_t* had = penalty != 1.0f ? seen + n * vocab : 0;
    const bf16* row = logits + n * ld;
    int32_t first = (int32_t)blockIdx.x * SAMPLE_PART;
    float top = -INFINITY;
    float raw = -INFINITY;
    int32_t at = vocab;
    int32_t bad = vocab;
    float v[SAMPLE_PART / 256];
#pragma unroll
    for (int32_t k = 0; k < SAMPLE_PART / 256; k++) { // the loads are independent
        int32_t i = first + (int32_t)threadIdx.x + k * 256;
        v[k] = i < vocab ? to_float(row[i]) : 0.0f;
    }
#pragma unroll
    for (int32_t k = 0; k < SAMPLE_PART / 256; k++) {
        int32_t i = first + (int32_t)threadIdx.x + k * 256;
        if (i < vocab) {
            bad = fabsf(v[k]) < INFINITY || i > bad ? bad : i;
            raw = fmaxf(raw, v[k]);
            sample_better(top, at, had ? sample_logit(row, had, penalty, i) : v[k], i);
        }
    }
    raw = row_max(raw, sums, 256);
    float sum = 0.0f;
#pragma unroll
    for (int32_t k = 0; k < SAMPLE_PART / 256; k++) {
        if (first + (int32_t)threadIdx.x + k * 256 < vocab) {
            sum += expf(v[k] - raw);
        }
    }
    sum = row_sum(sum, sums, 256);
    for (int o = 16; o > 0; o >>= 1) {
        float other = __shfl_xor_sync(QLORA_FULL_WARP, top, o);
        int32_t where = __shfl_xor_sync(QLORA_FULL_WARP, at, o);
        int32_t wrong = __shfl_xor_sync(QLORA_FULL_WARP, bad, o);
        sample_better(top, at, other, where);
        bad = wrong < bad ? wrong : bad;
    }
    if (threadIdx.x % 32 == 0) {
        tops[threadIdx.x / 32] = top;
        places[threadIdx.x / 32] = at;
        bads[threadIdx.x / 32] = bad;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < 8; w++) {
            sample_better(top, at, tops[w], places[w]);
            bad = bads[w] < bad ? bads[w] : bad;
        }
        sample_part* to = parts + n * gridDim.x + blockIdx.x;
        to->top = top;
        to->at = at;
        to->raw_top = raw;
        to->raw_sum = sum;
        to->bad = bad;
    }
}

struct sample_shared {
    uint64_t mass[SAMPLE_DIGITS];
    uint32_t count[SAMPLE_DIGITS];
    uint64_t step_mass[SAMPLE_STEPS];
    uint32_t step_count[SAMPLE_STEPS];
    uint64_t totals[32];
    uint64_t before; // what the search found: the sum of the bins before `bin`
    int32_t bin;
};

struct sample_row {
    const bf16* logits;
    const uint8_t* seen;
    float penalty;
    float top;
    float temperature;
    float step; // steps per unit of logits
    int32_t vocab;
};

// The weight of a logit.
__device__ __forceinline__ float sample_weight(const sample_row& r, float logit) {
    return expf((logit - r.top) / r.temperature);
}

__device__ __forceinline__ uint64_t sample_mass(float weight) {
    return (uint64_t)(weight * 1099511627776.0f);
}

__device__ __forceinline__ int32_t sample_step(const sample_row& r, float logit) {
    float at = (r.top - logit) * r.step;
    return at < (float)(SAMPLE_STEPS - 1) ? (int32_t)at : SAMPLE_STEPS - 1;
}

// Larger logits have smaller keys.
__device__ __forceinline__ uint32_t sample_key(float logit) {
    uint32_t bits = __float_as_uint(logit);
    return (bits & 0x80000000u) != 0 ? bits : ~bits & 0x7fffffffu;
}

enum { SAMPLE_BY_STEP, SAMPLE_BY_DIGIT, SAMPLE_BY_ID };

// What a pass over the tokens counts, and in which bins.
struct sample_pass {
    int32_t mode;
    int32_t step;    // BY_DIGIT, BY_ID: the step of the tokens; -1 = all
    uint32_t prefix; // the digits that are known
    int32_t known;   // shift that leaves only them; 32 = none
    int32_t shift;
    float least; // BY_ID: weights below do not count
    int32_t chunk;
};

// Adds the tokens to the bins: steps, digits of the key, or chunks of ids, where the lanes of a
// warp have the same bin. All threads of the block.
__device__ __forceinline__ void sample_count(const sample_row& r, const sample_pass& p,
                                             sample_shared* s) {
    uint64_t* mass = p.mode == SAMPLE_BY_STEP ? s->step_mass : s->mass;
    uint32_t* count = p.mode == SAMPLE_BY_STEP ? s->step_count : s->count;
    int32_t bins = p.mode == SAMPLE_BY_STEP ? SAMPLE_STEPS : SAMPLE_DIGITS;
    __syncthreads();
    for (int32_t i = (int32_t)threadIdx.x; i < bins; i += (int32_t)blockDim.x) {
        mass[i] = 0;
        count[i] = 0;
    }
    __syncthreads();
    int32_t end = (r.vocab + 31) / 32 * 32;
#pragma unroll 1
    for (int32_t i = (int32_t)threadIdx.x; i < end; i += (int32_t)blockDim.x) {
        bool inside = i < r.vocab;
        float logit = inside ? sample_logit(r.logits, r.seen, r.penalty, i) : -INFINITY;
        int32_t step = sample_step(r, logit);
        uint32_t key = sample_key(logit);
        bool counts = inside && (p.step < 0 ? step < SAMPLE_STEPS - 1 : step == p.step) &&
                      (p.known > 31 || key >> p.known == p.prefix);
        float weight = counts ? sample_weight(r, logit) : 0.0f;
        counts = counts && weight >= p.least;
        uint64_t own = counts ? sample_mass(weight) : 0;
        if (p.mode == SAMPLE_BY_ID) {
            uint32_t many = (uint32_t)__popc(__ballot_sync(QLORA_FULL_WARP, counts));
            for (int o = 16; o > 0; o >>= 1) {
                uint32_t low = __shfl_xor_sync(QLORA_FULL_WARP, (uint32_t)own, o);
                uint32_t high = __shfl_xor_sync(QLORA_FULL_WARP, (uint32_t)(own >> 32), o);
                own += (uint64_t)high << 32 | low;
            }
            if (threadIdx.x % 32 == 0 && many > 0) {
                atomicAdd((unsigned long long*)&mass[i / p.chunk], (unsigned long long)own);
                atomicAdd(&count[i / p.chunk], many);
            }
        } else if (counts) {
            int32_t bin =
                p.mode == SAMPLE_BY_STEP ? step : (int32_t)(key >> p.shift & (SAMPLE_DIGITS - 1));
            atomicAdd((unsigned long long*)&mass[bin], (unsigned long long)own);
            atomicAdd(&count[bin], 1u);
        }
    }
    __syncthreads();
}

// The first bin up to which the sum of masses, or of counts, is at least `target`; -1 if there is
// none. Returns the whole sum. All 1024 threads.
__device__ __forceinline__ uint64_t sample_find(sample_shared* s, bool steps, bool counts,
                                                uint64_t target) {
    const uint64_t* mass = steps ? s->step_mass : s->mass;
    const uint32_t* count = steps ? s->step_count : s->count;
    int32_t t = (int32_t)threadIdx.x;
    int32_t width = steps ? 1 : 2;
    uint64_t v[2] = {counts ? count[t * width] : mass[t * width], 0};
    if (!steps) {
        v[1] = counts ? count[2 * t + 1] : mass[2 * t + 1];
    }
    uint64_t sum = v[0] + v[1];
    for (int o = 1; o < 32; o <<= 1) {
        uint32_t low = __shfl_up_sync(QLORA_FULL_WARP, (uint32_t)sum, o);
        uint32_t high = __shfl_up_sync(QLORA_FULL_WARP, (uint32_t)(sum >> 32), o);
        sum += t % 32 >= o ? (uint64_t)high << 32 | low : 0;
    }
    if (t % 32 == 31) {
        s->totals[t / 32] = sum;
    }
    if (t == 0) {
        s->bin = -1;
        s->before = 0;
    }
    __syncthreads();
    uint64_t whole = 0;
    uint64_t before = sum - v[0] - v[1];
#pragma unroll 1
    for (int w = 0; w < 32; w++) {
        before += w < t / 32 ? s->totals[w] : 0;
        whole += s->totals[w];
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (before < target && target <= before + v[i]) {
            s->bin = t * width + i;
            s->before = before;
        }
        before += v[i];
    }
    __syncthreads();
    return whole;
}

// The sum of the weights up to the token at which the masses, or the counts, reach `target`, in
// *whole; that token's key and which of those with this key it is, in *key and *tie. False if the
// token's weight is 0.
__device__ __forceinline__ bool sample_reach(const sample_row& r, sample_shared* s, bool counts,
                                             uint64_t target, uint64_t* whole, uint32_t* key,
                                             uint64_t* tie) {
    sample_find(s, true, counts, target);
    if (s->bin < 0) {
        return false;
    }
    sample_pass p;
    p.mode = SAMPLE_BY_DIGIT;
    p.step = s->bin;
    p.prefix = 0;
    p.known = 32;
    p.shift = 21;
    p.least = 0.0f;
    p.chunk = 1;
    uint64_t mass_before = 0;
    uint64_t left = target - s->before;
    for (int32_t i = (int32_t)threadIdx.x; i < SAMPLE_STEPS; i += (int32_t)blockDim.x) {
        s->mass[i] = i < p.step ? s->step_mass[i] : 0;
        s->mass[i + SAMPLE_STEPS] = 0;
    }
    __syncthreads();
    mass_before = sample_find(s, false, false, ~(uint64_t)0);
#pragma unroll 1
    for (int level = 0; level < 3; level++) {
        sample_count(r, p, s);
        sample_find(s, false, counts, left);
        int32_t bin = s->bin;
        left -= s->before;
        __syncthreads();
        // The masses before the bin, whatever was searched for.
        for (int32_t i = bin + (int32_t)threadIdx.x; i < SAMPLE_DIGITS && level < 2;
             i += (int32_t)blockDim.x) {
            s->mass[i] = 0;
        }
        if (level < 2) {
            __syncthreads();
            mass_before += sample_find(s, false, false, ~(uint64_t)0);
        }
        p.prefix = p.prefix << (level == 2 ? 10 : 11) | (uint32_t)bin;
        p.known = p.shift;
        p.shift = level == 0 ? 10 : 0;
        if (level == 2) {
            uint64_t each = s->mass[bin] / (s->count[bin] > 0 ? s->count[bin] : 1);
            uint64_t many = counts ? left : each > 0 ? (left + each - 1) / each : 1;
            __syncthreads();
            for (int32_t i = bin + (int32_t)threadIdx.x; i < SAMPLE_DIGITS;
                 i += (int32_t)blockDim.x) {
                s->mass[i] = 0;
            }
            __syncthreads();
            mass_before += sample_find(s, false, false, ~(uint64_t)0);
            *whole = mass_before + many * each;
            *key = p.prefix;
            *tie = many;
        }
    }
    return true;
}

// The id at which the masses, or the number of tokens with this key, reach `target` in the order of
// the ids.
__device__ __forceinline__ int32_t sample_id(const sample_row& r, sample_shared* s, bool by_key,
                                             uint32_t key, int32_t fallback, uint64_t target) {
    sample_pass p;
    p.mode = SAMPLE_BY_ID;
    p.step = -1;
    p.prefix = key;
    p.known = by_key ? 0 : 32;
    p.shift = 0;
    p.least = 0.0f;
    p.chunk = ((r.vocab + SAMPLE_DIGITS - 1) / SAMPLE_DIGITS + 31) / 32 * 32;
    sample_count(r, p, s);
    sample_find(s, false, by_key, target);
    if (s->bin < 0) {
        return fallback;
    }
    uint64_t sum = s->before;
    int32_t found = fallback;
    int32_t first = s->bin * p.chunk;
#pragma unroll 1
    for (int32_t i = first; threadIdx.x == 0 && i < first + p.chunk && i < r.vocab; i++) {
        float logit = sample_logit(r.logits, r.seen, r.penalty, i);
        bool counts = sample_step(r, logit) < SAMPLE_STEPS - 1;
        uint64_t own = counts ? sample_mass(sample_weight(r, logit)) : 0;
        own = by_key ? (counts && sample_key(logit) == key ? 1 : 0) : own;
        if (sum < target && target <= sum + own) {
            found = i;
        }
        sum += own;
    }
    return found;
}

// The number in [0, 1) of seed and position, times `whole`, and 1 more.
__device__ __forceinline__ uint64_t sample_draw(const decode_text& text, uint64_t whole) {
    uint32_t c[4] = {(uint32_t)text.position, 0, 0x67656eu, 0};
    uint32_t k0 = text.seed_low;
    uint32_t k1 = text.seed_high;
#pragma unroll 1
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c[0];
        uint64_t p1 = (uint64_t)0xCD9E8D57u * c[2];
        c[0] = (uint32_t)(p1 >> 32) ^ c[1] ^ k0;
        c[1] = (uint32_t)p1;
        c[2] = (uint32_t)(p0 >> 32) ^ c[3] ^ k1;
        c[3] = (uint32_t)p0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    double u = ((double)(c[0] >> 5) * 67108864.0 + (double)(c[1] >> 6)) / 9007199254740992.0;
    uint64_t target = (uint64_t)(u * (double)whole) + 1;
    return target < whole ? target : whole;
}

__device__ __forceinline__ int32_t sample_token(const sample_row& r, sample_shared* s,
                                                const decode_text& text, int32_t best) {
    sample_pass p;
    p.mode = SAMPLE_BY_STEP;
    p.step = -1;
    p.prefix = 0;
    p.known = 32;
    p.shift = 0;
    p.least = 0.0f;
    p.chunk = 1;
    sample_count(r, p, s);
    uint64_t whole = sample_find(s, true, false, ~(uint64_t)0);
    bool all = text.top_k == 0 && !(text.top_p > 0.0f) && !(text.min_p > 0.0f);
    uint32_t key = 0;
    uint64_t tie = 0;
    // The goals: the sum of top_k weights, that of the fewest which make up top_p, the draw.
#pragma unroll 1
    for (int goal = all ? 3 : 0; goal < 3; goal++) {
        uint64_t target = (uint64_t)text.top_k;
        if (goal == 1) {
            target = (uint64_t)ceil((double)text.top_p * (double)whole);
            target = target < whole ? target : whole;
        }
        if (goal == 2 && text.min_p > 0.0f) {
            p.mode = SAMPLE_BY_ID;
            p.least = text.min_p;
            p.chunk = ((r.vocab + SAMPLE_DIGITS - 1) / SAMPLE_DIGITS + 31) / 32 * 32;
            sample_count(r, p, s);
            uint64_t likely = sample_find(s, false, false, ~(uint64_t)0);
            whole = likely < whole ? likely : whole;
        }
        if (goal == 2) {
            target = sample_draw(text, whole);
        }
        if (goal == 2 || target > 0) {
            uint64_t sum = whole;
            if (sample_reach(r, s, goal == 0, target, &sum, &key, &tie) && goal < 2) {
                whole = sum;
            }
        }
    }
    return sample_id(r, s, !all, key, best, all ? sample_draw(text, whole) : tie);
}

// Launch: grid rows, 1024 threads. Writes the results of each text and prepares its next step. They
// also go to `results`, memory of the host, [2, rows], a slot for even and one for odd positions:
// `done`, which the host has set to 0 before the launch, comes last, after a fence for the system.
// It is long because every warp looks at all parts.
QLORA_KERNEL __launch_bounds__(1024)
    qlora_sample_choose(const bf16* logits, int64_t ld, int32_t vocab, decode_text* texts,
                        uint8_t* seen, const sample_part* parts, int32_t count,
                        decode_result* results) {
    __shared__ sample_shared s;
    early_next();
    early_wait();
    int64_t n = blockIdx.x;
    decode_text text = texts[n];
    if (text.alive == 0) {
        return;
    }
    float top = -INFINITY;
    float raw = -INFINITY;
    int32_t best = vocab;
    int32_t bad = vocab;
    int32_t lane = (int32_t)threadIdx.x % 32;
    for (int32_t i = lane; i < count; i += 32) { // few, and every warp needs them
        const sample_part* part = parts + n * count + i;
        sample_better(top, best, part->top, part->at);
        raw = fmaxf(raw, part->raw_top);
        bad = part->bad < bad ? part->bad : bad;
    }
#pragma unroll
    for (int o = 16; o > 0; o >>= 1) {
        float other = __shfl_xor_sync(QLORA_FULL_WARP, top, o);
        int32_t at = __shfl_xor_sync(QLORA_FULL_WARP, best, o);
        int32_t worse = __shfl_xor_sync(QLORA_FULL_WARP, bad, o);
        sample_better(top, best, other, at);
        bad = worse < bad ? worse : bad;
    }
    raw = warp_max(raw);
    sample_row r;
    r.logits = logits + n * ld;
    r.seen = text.penalty != 1.0f ? seen + n * vocab : 0;
    r.penalty = text.penalty;
    r.top = top;
    r.temperature = text.temperature;
    r.step = fminf((float)(SAMPLE_STEPS - 1) / (28.0f * text.temperature), 1e30f);
    r.vocab = vocab;
    int32_t token = best < vocab ? best : 0;
    if (text.temperature > 0.0f && bad == vocab) {
        token = sample_token(r, &s, text, best);
    }
    double sum = 0.0;
    if (threadIdx.x < 32) {
        for (int32_t i = lane; i < count; i += 32) {
            const sample_part* part = parts + n * count + i;
            sum += (double)part->raw_sum * exp((double)part->raw_top - (double)raw);
        }
#pragma unroll
        for (int o = 16; o > 0; o >>= 1) {
            uint64_t bits = (uint64_t)__double_as_longlong(sum);
            uint32_t low = __shfl_xor_sync(QLORA_FULL_WARP, (uint32_t)bits, o);
            uint32_t high = __shfl_xor_sync(QLORA_FULL_WARP, (uint32_t)(bits >> 32), o);
            sum += __longlong_as_double((long long)((uint64_t)high << 32 | low));
        }
    }
    if (threadIdx.x == 0) {
        double logprob = (double)to_float(r.logits[token]) - (double)raw - log(sum);
        texts[n].logprob = logprob;
        texts[n].chosen = token;
        texts[n].token = token;
        texts[n].position = text.position + 1;
        texts[n].bad = bad < vocab ? bad : -1;
        if (r.seen) {
            seen[n * vocab + token] = 1;
        }
        decode_result* to = results + (text.position & 1) * (int64_t)gridDim.x + n;
        to->logprob = logprob;
        to->bad = bad < vocab ? bad : -1;
        __threadfence_system();
        *(volatile uint64_t*)&to->done = (uint64_t)(text.position + 1) << 32 | (uint32_t)token;
    }
}
