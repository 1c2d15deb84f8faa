// ---- matching a compiled pattern ----------------------------------------------------------------

// The machine: a position in the text and in the program, and the choices to come back to.
typedef struct qlora__pattern_run {
    qlora__env* env;
    qlora__pattern* p;
    const qlora__text_view* v;
    size_t begin; // of the text that is searched
    size_t at;
    int32_t step;
    size_t depth; // frames in use
    size_t mark;  // the last mark, or SIZE_MAX
} qlora__pattern_run;

// The length of the character at a position if the set has it, else 0.
static size_t qlora__pattern_one(const qlora__text_view* v, size_t at,
                                 const qlora__pattern_set* set) {
    if (at >= v->end) {
        return 0;
    }
    unsigned char c = v->s[at];
    if (c < 0x80 && v->code_of_byte == NULL) {
        return set->ascii[c / 32] >> c % 32 & 1;
    }
    size_t length = 1;
    uint32_t code = 0;
    unsigned bit = qlora__text_class_at(v, at, &length);
    if (v->code_of_byte != NULL) {
        code = v->code_of_byte[c];
    } else if (qlora__text_utf8(v->s + at, v->end - at, &code) == 0) {
        code = QLORA__TEXT_CODES + c; // an invalid byte is in no range
    }
    return qlora__pattern_has(set, bit, code) ? length : 0;
}

// The start of the character before a position. An invalid byte is a character of its own.
static size_t qlora__pattern_before(const qlora__pattern_run* r, size_t at) {
    size_t back = at - 1;
    uint32_t code;
    while (r->v->code_of_byte == NULL && back > r->begin && at - back < 4 &&
           (r->v->s[back] & 0xC0) == 0x80) {
        back--;
    }
    bool whole = qlora__text_utf8(r->v->s + back, at - back, &code) == at - back;
    return whole ? back : at - 1;
}

static bool qlora__pattern_line_end(const qlora__text_view* v, size_t at) {
    return v->code_of_byte == NULL && v->s[at] == '\n';
}

static bool qlora__pattern_is_word(const qlora__pattern_run* r, size_t at) {
    size_t length;
    uint32_t code = 0;
    if (qlora__text_class_at(r->v, at, &length) & QLORA__TEXT_W) {
        return true;
    }
    return length == 2 && qlora__text_utf8(r->v->s + at, length, &code) == 2 &&
           qlora__pattern_in(qlora__pattern_words, QLORA__TEXT_COUNT(qlora__pattern_words), code);
}

static qlora_result qlora__pattern_push(qlora__pattern_run* r, int32_t kind, int32_t step,
                                        size_t at, size_t begin) {
    void* data = r->p->frames;
    qlora_result result = qlora__text_reserve(r->env, &data, &r->p->frame_capacity, r->depth, 1,
                                              sizeof *r->p->frames);
    r->p->frames = (qlora__pattern_frame*)data;
    QLORA__TRY(result);
    qlora__pattern_frame* f = &r->p->frames[r->depth];
    f->kind = kind;
    f->step = step;
    f->at = at;
    f->begin = begin;
    if (kind >= QLORA__PATTERN_MARK) {
        f->begin = r->mark;
        r->mark = r->depth;
    }
    r->depth++;
    return QLORA_OK;
}

// Goes back to the last choice; false if there is none.
static bool qlora__pattern_back(qlora__pattern_run* r) {
    while (r->depth > 0) {
        qlora__pattern_frame* f = &r->p->frames[r->depth - 1];
        r->step = f->step;
        r->at = f->at;
        if (f->kind == QLORA__PATTERN_SHORTER) {
            r->at = qlora__pattern_before(r, f->at);
            f->at = r->at;
            r->depth -= r->at <= f->begin ? 1 : 0;
            return true;
        }
        if (f->kind == QLORA__PATTERN_LONGER) {
            const qlora__pattern_step* s = &r->p->steps[f->step - 1];
            size_t n = qlora__pattern_one(r->v, f->at, &r->p->sets[s->a]);
            f->begin -= 1; // how many more it may take
            f->at += n;
            r->at = f->at;
            r->depth -= n == 0 || f->begin == 0 ? 1 : 0;
            if (n > 0) {
                return true;
            }
            continue;
        }
        r->depth--;
        if (f->kind == QLORA__PATTERN_KEPT) {
            r->p->kept[f->begin] = f->at;
            continue;
        }
        if (f->kind == QLORA__PATTERN_CHOICE) {
            return true;
        }
        r->mark = f->begin;
        if (f->kind == QLORA__PATTERN_MARK_NOT) {
            return true; // what must not follow does not: continue after it
        }
    }
    return false;
}

static qlora_result qlora__pattern_take_run(qlora__pattern_run* r, const qlora__pattern_step* s,
                                            bool* fits) {
    const qlora__pattern_set* set = &r->p->sets[s->a];
    int32_t count = 0;
    size_t floor = r->at; // the end of the shortest run
    size_t at = r->at;
    int32_t most = s->mode == QLORA__PATTERN_RELUCTANT ? s->least : s->most;
    while (most < 0 || count < most) {
        size_t n = qlora__pattern_one(r->v, at, set);
        if (n == 0) {
            break;
        }
        at += n;
        count++;
        floor = count <= s->least ? at : floor;
        r->p->left -= r->p->left > 0 ? 1 : 0;
    }
    *fits = count >= s->least;
    r->at = at;
    r->step++;
    if (!*fits || s->mode == QLORA__PATTERN_POSSESSIVE) {
        return QLORA_OK;
    }
    if (s->mode == QLORA__PATTERN_RELUCTANT) {
        size_t more = s->most < 0 ? SIZE_MAX : (size_t)(s->most - s->least);
        return more > 0 ? qlora__pattern_push(r, QLORA__PATTERN_LONGER, r->step, at, more)
                        : QLORA_OK;
    }
    return at > floor ? qlora__pattern_push(r, QLORA__PATTERN_SHORTER, r->step, at, floor)
                      : QLORA_OK;
}

// Whether an anchor holds at the present position.
static bool qlora__pattern_holds(const qlora__pattern_run* r, const qlora__pattern_step* s) {
    const qlora__text_view* v = r->v;
    bool first = r->at == r->begin;
    bool last = r->at >= v->end;
    switch (s->op) {
    case QLORA__PATTERN_LINE_BEGIN:
        return first || qlora__pattern_line_end(v, r->at - 1);
    case QLORA__PATTERN_LINE_END:
        return last || qlora__pattern_line_end(v, r->at);
    case QLORA__PATTERN_TEXT_BEGIN:
        return first;
    case QLORA__PATTERN_TEXT_END:
        return last;
    case QLORA__PATTERN_LAST_LINE:
        return last || (r->at + 1 == v->end && qlora__pattern_line_end(v, r->at));
    default: { // WORD
        bool before = !first && qlora__pattern_is_word(r, qlora__pattern_before(r, r->at));
        bool after = !last && qlora__pattern_is_word(r, r->at);
        return (before != after) != (s->mode != 0);
    }
    }
}

// The end of a look-ahead or an atomic group: forgets the choices made inside.
static void qlora__pattern_forget(qlora__pattern_run* r) {
    r->depth = r->mark;
    r->mark = r->p->frames[r->depth].begin;
}

// Executes one step; *fits is false if it fails.
static qlora_result qlora__pattern_execute(qlora__pattern_run* r, bool* fits) {
    const qlora__pattern_step* s = &r->p->steps[r->step];
    size_t n = 0;
    *fits = true;
    switch (s->op) {
    case QLORA__PATTERN_SET:
        n = qlora__pattern_one(r->v, r->at, &r->p->sets[s->a]);
        r->at += n;
        r->step++;
        *fits = n > 0;
        return QLORA_OK;
    case QLORA__PATTERN_RUN:
        return qlora__pattern_take_run(r, s, fits);
    case QLORA__PATTERN_SPLIT:
        r->step++;
        return qlora__pattern_push(r, QLORA__PATTERN_CHOICE, r->step - 1 + s->a, r->at, 0);
    case QLORA__PATTERN_LAZY:
        r->step += s->a;
        return qlora__pattern_push(r, QLORA__PATTERN_CHOICE, r->step - s->a + 1, r->at, 0);
    case QLORA__PATTERN_JUMP:
        r->step += s->a;
        return QLORA_OK;
    case QLORA__PATTERN_KEEP:
        n = (size_t)s->mode;
        QLORA__TRY(qlora__pattern_push(r, QLORA__PATTERN_KEPT, r->step, r->p->kept[n], n));
        r->p->kept[n] = r->at;
        r->step++;
        return QLORA_OK;
    case QLORA__PATTERN_LOOK:
        r->step++;
        return qlora__pattern_push(r, s->mode != 0 ? QLORA__PATTERN_MARK_NOT : QLORA__PATTERN_MARK,
                                   r->step + s->a, r->at, 0);
    case QLORA__PATTERN_ATOMIC:
        r->step++;
        return qlora__pattern_push(r, QLORA__PATTERN_MARK, r->step, r->at, 0);
    case QLORA__PATTERN_LOOK_END:
        qlora__pattern_forget(r);
        *fits = r->p->frames[r->depth].kind == QLORA__PATTERN_MARK; // else it must not follow
        r->at = r->p->frames[r->depth].at;
        r->step++;
        return QLORA_OK;
    case QLORA__PATTERN_ATOMIC_END:
        qlora__pattern_forget(r);
        r->step++;
        return QLORA_OK;
    default:
        *fits = qlora__pattern_holds(r, s);
        r->step++;
        return QLORA_OK;
    }
}

// Allows as many steps as matching a text of this size may take. The patterns of tokenizers need a
// few per character; the limit is far above that.
static void qlora__pattern_allow(qlora__pattern* p, size_t size) {
    p->left = 1000000 + 256 * (uint64_t)size;
}

// The end of the match at a position; the position itself if there is none, or an empty one. The
// text that is searched begins at `begin`.
static qlora_result qlora__pattern_match(qlora__env* env, qlora__pattern* p,
                                         const qlora__text_view* v, size_t begin, size_t at,
                                         size_t* end) {
    qlora__pattern_run r;
    memset(&r, 0, sizeof r);
    r.env = env;
    r.p = p;
    r.v = v;
    r.begin = begin;
    r.at = at;
    r.mark = SIZE_MAX;
    p->kept[0] = p->kept[1] = SIZE_MAX;
    *end = at;
    while (p->steps[r.step].op != QLORA__PATTERN_MATCH) {
        bool fits = true;
        QLORA__TRY(qlora__pattern_execute(&r, &fits));
        if (!fits && !qlora__pattern_back(&r)) {
            return QLORA_OK;
        }
        if (p->left == 0) {
            return qlora__env_fail(env, QLORA_ERR_LIMIT,
                                   "a regular expression takes too many steps on this text");
        }
        p->left--;
    }
    *end = r.at;
    return QLORA_OK;
}
