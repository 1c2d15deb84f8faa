// ---- attention ----------------------------------------------------------------------------------
//
// Within a sequence, for query i and the keys j that it sees (i - window < j <= i):
//
//   s[j] = scale q[i].k[j], or cap tanh(scale q[i].k[j] / cap) with a cap
//   lse[i] = log(sum_j exp(s[j])),  p[j] = exp(s[j] - lse[i])
//   o[i] = sum_j p[j] v[j]
//   D[i] = do[i].o[i],       ds[j] = p[j] (do[i].v[j] - D[i]), times 1 - (s[j] / cap)^2
//   dq[i] = scale sum_j ds[j] k[j]
//   dk[j] = scale sum_i ds[j] q[i],  dv[j] = sum_i p[j] do[i]
//
// The sums of dk and dv also run over all query heads of the key head's group.

#define QLORA__HEAD_MAX 256
#define QLORA__KEY_BLOCK 64

typedef struct qlora__attention {
    int64_t tokens;
    int64_t before; // keys before that of the first query; 0 but for forward passes
    int64_t n_seqs;
    int64_t longest; // sequence
    int64_t heads;
    int64_t kv_heads;
    int64_t hd;
    int64_t window;
    float scale;
    float cap; // 0 = none
    const qlora_tensor* q;
    const qlora_tensor* k;
    const qlora_tensor* v;
    const qlora_tensor* seqs;
    const qlora_tensor* o;
    const qlora_tensor* lse;
    const qlora_tensor* d_o;
    const qlora_tensor* dq;
    const qlora_tensor* dk;
    const qlora_tensor* dv;
    QLORA__REAL* dots; // D, [heads][tokens]
    void* stats;       // f32 [heads][2 tokens] on the device; NULL = scratch
} qlora__attention;

// Eight partial sums give a fixed order that the compiler can still vectorise.
static QLORA__REAL qlora__dot(const QLORA__REAL* x, const QLORA__REAL* y, int64_t n) {
    QLORA__REAL part[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        for (int j = 0; j < 8; j++) {
            part[j] += x[i + j] * y[i + j];
        }
    }
    for (; i < n; i++) {
        part[i % 8] += x[i] * y[i];
    }
    return ((part[0] + part[4]) + (part[2] + part[6])) +
           ((part[1] + part[5]) + (part[3] + part[7]));
}

// y += a x. Computing eight products first lets the compiler vectorise without knowing that x and y
// do not overlap.
static void qlora__add_scaled(QLORA__REAL* y, QLORA__REAL a, const QLORA__REAL* x, int64_t n) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        QLORA__REAL product[8];
        for (int j = 0; j < 8; j++) {
            product[j] = a * x[i + j];
        }
        for (int j = 0; j < 8; j++) {
            y[i + j] += product[j];
        }
    }
    for (; i < n; i++) {
        y[i] += a * x[i];
    }
}

// Returns one head of one token: in place for f32, otherwise converted into `room`.
static const QLORA__REAL* qlora__head_get(const qlora_tensor* t, int64_t token, int64_t head,
                                          int64_t hd, QLORA__REAL* room) {
    int64_t first = token * t->ld + head * hd;
    if (t->dtype == QLORA_F32) {
        return (const QLORA__REAL*)t->data + first;
    }
    for (int64_t i = 0; i < hd; i++) {
        room[i] = qlora__load(t->data, t->dtype, first + i);
    }
    return room;
}

static void qlora__head_put(const qlora_tensor* t, int64_t token, int64_t head, int64_t hd,
                            const QLORA__REAL* x, QLORA__REAL factor) {
    for (int64_t i = 0; i < hd; i++) {
        qlora__put(t, token, head * hd + i, x != NULL ? x[i] * factor : 0);
    }
}

// Finds the sequence [*begin, *end) that contains a token; false if the token is in the tail.
static bool qlora__sequence_of(const qlora__attention* a, int64_t token, int64_t* begin,
                               int64_t* end) {
    const int32_t* offsets = (const int32_t*)a->seqs->data;
    int64_t low = 0;
    int64_t high = a->n_seqs;
    while (low < high) { // find the last offset that is not after the token
        int64_t middle = (low + high + 1) / 2;
        if (offsets[middle] <= token) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    *begin = offsets[low];
    *end = low < a->n_seqs ? offsets[low + 1] : a->tokens;
    return low < a->n_seqs;
}

// A score from its product, and its derivative.
static QLORA__REAL qlora__score_of(const qlora__attention* a, QLORA__REAL product) {
    QLORA__REAL s = product * (QLORA__REAL)a->scale;
    QLORA__REAL cap = (QLORA__REAL)a->cap;
    return a->cap > 0.0f ? cap * qlora__tanh(s / cap) : s;
}

static QLORA__REAL qlora__score_slope(const qlora__attention* a, QLORA__REAL s) {
    QLORA__REAL cap = (QLORA__REAL)a->cap;
    return a->cap > 0.0f ? 1 - s / cap * (s / cap) : 1;
}

// The softmax runs over blocks of keys; the sums are rescaled when a block has a larger score.
static void qlora__attention_query(const qlora__attention* a, int64_t head, int64_t i,
                                   int64_t begin) {
    QLORA__REAL room[QLORA__HEAD_MAX];
    QLORA__REAL q_room[QLORA__HEAD_MAX];
    QLORA__REAL acc[QLORA__HEAD_MAX];
    QLORA__REAL s[QLORA__KEY_BLOCK];
    int64_t kv_head = head / (a->heads / a->kv_heads);
    const QLORA__REAL* q = qlora__head_get(a->q, i, head, a->hd, q_room);
    QLORA__REAL top = (QLORA__REAL)-3.0e38; // below every score, and finite for -ffast-math
    QLORA__REAL sum = 0;
    memset(acc, 0, (size_t)a->hd * sizeof acc[0]);
    int64_t own = a->before + i; // the key of the query
    int64_t j0 = a->window > 0 && own - a->window + 1 > begin ? own - a->window + 1 : begin;
    for (; j0 <= own; j0 += QLORA__KEY_BLOCK) {
        int64_t n = own + 1 - j0 < QLORA__KEY_BLOCK ? own + 1 - j0 : QLORA__KEY_BLOCK;
        QLORA__REAL peak = top;
        for (int64_t j = 0; j < n; j++) {
            const QLORA__REAL* k = qlora__head_get(a->k, j0 + j, kv_head, a->hd, room);
            s[j] = qlora__score_of(a, qlora__dot(q, k, a->hd));
            peak = s[j] > peak ? s[j] : peak;
        }
        QLORA__REAL shrink = qlora__exp(top - peak);
        top = peak;
        sum *= shrink;
        for (int64_t d = 0; d < a->hd; d++) {
            acc[d] *= shrink;
        }
        for (int64_t j = 0; j < n; j++) {
            QLORA__REAL p = qlora__exp(s[j] - top);
            sum += p;
            qlora__add_scaled(acc, p, qlora__head_get(a->v, j0 + j, kv_head, a->hd, room), a->hd);
        }
    }
    qlora__head_put(a->o, i, head, a->hd, acc, 1 / sum);
    qlora__put(a->lse, head, i, top + qlora__log(sum));
}

static void qlora__attention_forward_items(void* user, int64_t from, int64_t to) {
    const qlora__attention* a = (const qlora__attention*)user;
    for (int64_t item = from; item < to; item++) {
        int64_t head = item / a->tokens;
        int64_t token = item % a->tokens;
        int64_t begin = 0;
        int64_t end = 0;
        if (qlora__sequence_of(a, token, &begin, &end)) {
            qlora__attention_query(a, head, token, begin);
        } else {
            qlora__head_put(a->o, token, head, a->hd, NULL, 0);
            qlora__put(a->lse, head, token, 0);
        }
    }
}

static void qlora__attention_dq(const qlora__attention* a, int64_t head, int64_t i, int64_t begin) {
    QLORA__REAL room[QLORA__HEAD_MAX];
    QLORA__REAL q_room[QLORA__HEAD_MAX];
    QLORA__REAL do_room[QLORA__HEAD_MAX];
    QLORA__REAL acc[QLORA__HEAD_MAX];
    int64_t kv_head = head / (a->heads / a->kv_heads);
    const QLORA__REAL* q = qlora__head_get(a->q, i, head, a->hd, q_room);
    const QLORA__REAL* d_o = qlora__head_get(a->d_o, i, head, a->hd, do_room);
    QLORA__REAL lse = qlora__at(a->lse, head, i);
    QLORA__REAL dot = qlora__dot(d_o, qlora__head_get(a->o, i, head, a->hd, room), a->hd);
    a->dots[head * a->tokens + i] = dot;
    memset(acc, 0, (size_t)a->hd * sizeof acc[0]);
    int64_t j = a->window > 0 && i - a->window + 1 > begin ? i - a->window + 1 : begin;
    for (; j <= i; j++) {
        QLORA__REAL dp =
            qlora__dot(d_o, qlora__head_get(a->v, j, kv_head, a->hd, room), a->hd) - dot;
        const QLORA__REAL* k = qlora__head_get(a->k, j, kv_head, a->hd, room);
        QLORA__REAL s = qlora__score_of(a, qlora__dot(q, k, a->hd));
        QLORA__REAL p = qlora__exp(s - lse);
        qlora__add_scaled(acc, p * dp * qlora__score_slope(a, s), k, a->hd);
    }
    qlora__head_put(a->dq, i, head, a->hd, acc, (QLORA__REAL)a->scale);
}

static void qlora__attention_dq_items(void* user, int64_t from, int64_t to) {
    const qlora__attention* a = (const qlora__attention*)user;
    for (int64_t item = from; item < to; item++) {
        int64_t head = item / a->tokens;
        int64_t token = item % a->tokens;
        int64_t begin = 0;
        int64_t end = 0;
        if (qlora__sequence_of(a, token, &begin, &end)) {
            qlora__attention_dq(a, head, token, begin);
        } else {
            qlora__head_put(a->dq, token, head, a->hd, NULL, 0);
        }
    }
}

static void qlora__attention_dkv(const qlora__attention* a, int64_t kv_head, int64_t j,
                                 int64_t end) {
    QLORA__REAL k_room[QLORA__HEAD_MAX];
    QLORA__REAL v_room[QLORA__HEAD_MAX];
    QLORA__REAL q_room[QLORA__HEAD_MAX];
    QLORA__REAL do_room[QLORA__HEAD_MAX];
    QLORA__REAL acc_k[QLORA__HEAD_MAX];
    QLORA__REAL acc_v[QLORA__HEAD_MAX];
    int64_t group = a->heads / a->kv_heads;
    const QLORA__REAL* k = qlora__head_get(a->k, j, kv_head, a->hd, k_room);
    const QLORA__REAL* v = qlora__head_get(a->v, j, kv_head, a->hd, v_room);
    memset(acc_k, 0, (size_t)a->hd * sizeof acc_k[0]);
    memset(acc_v, 0, (size_t)a->hd * sizeof acc_v[0]);
    if (a->window > 0 && a->window < end - j) {
        end = j + a->window;
    }
    for (int64_t head = kv_head * group; head < kv_head * group + group; head++) {
        for (int64_t i = j; i < end; i++) {
            const QLORA__REAL* q = qlora__head_get(a->q, i, head, a->hd, q_room);
            const QLORA__REAL* d_o = qlora__head_get(a->d_o, i, head, a->hd, do_room);
            QLORA__REAL s = qlora__score_of(a, qlora__dot(q, k, a->hd));
            QLORA__REAL p = qlora__exp(s - qlora__at(a->lse, head, i));
            QLORA__REAL dp = qlora__dot(d_o, v, a->hd) - a->dots[head * a->tokens + i];
            qlora__add_scaled(acc_v, p, d_o, a->hd);
            qlora__add_scaled(acc_k, p * dp * qlora__score_slope(a, s), q, a->hd);
        }
    }
    qlora__head_put(a->dk, j, kv_head, a->hd, acc_k, (QLORA__REAL)a->scale);
    qlora__head_put(a->dv, j, kv_head, a->hd, acc_v, 1);
}

static void qlora__attention_dkv_items(void* user, int64_t from, int64_t to) {
    const qlora__attention* a = (const qlora__attention*)user;
    for (int64_t item = from; item < to; item++) {
        int64_t kv_head = item / a->tokens;
        int64_t token = item % a->tokens;
        int64_t begin = 0;
        int64_t end = 0;
        if (qlora__sequence_of(a, token, &begin, &end)) {
            qlora__attention_dkv(a, kv_head, token, end);
        } else {
            qlora__head_put(a->dk, token, kv_head, a->hd, NULL, 0);
            qlora__head_put(a->dv, token, kv_head, a->hd, NULL, 0);
        }
    }
}

// Offsets in host memory can be checked. On a device, the kernels clamp them to the matrices
// instead.
static qlora_result qlora__sequences_check(qlora_ctx* ctx, const qlora__attention* a) {
    const int32_t* offsets = (const int32_t*)a->seqs->data;
    for (int64_t s = 0; s <= a->n_seqs; s++) {
        int64_t least = s > 0 ? offsets[s - 1] : 0;
        int64_t most = s > 0 ? a->tokens : 0;
        if (offsets[s] < least || offsets[s] > most) {
            return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                               "seqs[%lld] is %d; it must be from %lld to %lld", (long long)s,
                               (int)offsets[s], (long long)least, (long long)most);
        }
    }
    return QLORA_OK;
}
