// ---- Parquet: rows as JSON ----------------------------------------------------------------------

// ---- values

// Appends a string in quotes, unless it is not UTF-8.
static bool qlora__parquet_quote(qlora__string* out, const char* text, size_t size) {
    static const char hex[] = "0123456789abcdef";
    size_t at = 0;
    size_t done = 0;
    qlora__string_add(out, "\"", 1);
    while (at < size) {
        uint8_t c = (uint8_t)text[at];
        if (c >= 0x20 && c < 0x80 && c != '"' && c != '\\') {
            at++;
            continue;
        }
        if (c >= 0x80) {
            uint32_t step = qlora__utf8_size(text + at, size - at < 4 ? (uint32_t)(size - at) : 4);
            if (step == 0) {
                return false;
            }
            at += step;
            continue;
        }
        qlora__string_add(out, text + done, at - done);
        char escape[6] = {'\\', 'u', '0', '0', hex[c >> 4], hex[c & 15]};
        if (c >= 0x20) {
            escape[1] = (char)c;
        }
        qlora__string_add(out, escape, c >= 0x20 ? 2 : 6);
        at++;
        done = at;
    }
    qlora__string_add(out, text + done, at - done);
    qlora__string_add(out, "\"", 1);
    return true;
}

static double qlora__parquet_half(uint32_t bits) {
    uint32_t exponent = bits >> 10 & 31;
    double fraction = (double)(bits & 1023) / 1024.0;
    double value = exponent == 0 ? ldexp(fraction, -14) : ldexp(1.0 + fraction, (int)exponent - 15);
    if (exponent == 31) {
        value = (double)INFINITY; // or NaN: neither is a number in JSON
    }
    return bits >> 15 != 0 ? -value : value;
}

// A number with the digits that give the same double again.
static qlora_result qlora__parquet_real(qlora__env* env, qlora__string* out, double value) {
    qlora__json_writer writer;
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof bits);
    if ((bits >> 52 & 0x7FF) == 0x7FF) {
        return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                               "a value is not a finite number (NaN or infinity)");
    }
    qlora__json_write_begin(&writer, out, 0);
    qlora__json_write_double(&writer, NULL, value);
    return QLORA_OK;
}

// Appends an integer. One that does not fit in the bits that its annotation names is damaged, and
// readers that cut it off would see another number.
static qlora_result qlora__parquet_whole(qlora__env* env, const qlora__parquet_leaf* leaf,
                                         uint64_t value, qlora__string* out) {
    char digits[24];
    bool is_signed = leaf->form == QLORA__PARQUET_AS_INT;
    uint64_t sign = (uint64_t)1 << (8 * leaf->width - 1);
    if (is_signed && leaf->width < 8 && (value & sign) != 0) {
        value |= 0 - sign;
    }
    snprintf(digits, sizeof digits, is_signed ? "%lld" : "%llu", (long long)value);
    uint64_t above = leaf->bits == 64 ? 0 : value >> (leaf->bits - (is_signed ? 1 : 0));
    uint64_t ones = leaf->bits == 64 ? 0 : UINT64_MAX >> (leaf->bits - (is_signed ? 1 : 0));
    if (above != 0 && (!is_signed || above != ones)) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s does not fit in the %u bits of its type",
                               digits, leaf->bits);
    }
    qlora__string_puts(out, digits);
    return QLORA_OK;
}

// Appends leaf->value.
static qlora_result qlora__parquet_write(qlora__env* env, const qlora__parquet_leaf* leaf,
                                         qlora__string* out) {
    uint64_t bits = 0;
    float single = 0.0f;
    double real = 0.0;
    if (leaf->form != QLORA__PARQUET_AS_STRING) {
        memcpy(&bits, leaf->value, leaf->value_size < 8 ? leaf->value_size : 8);
    }
    switch (leaf->form) {
    case QLORA__PARQUET_AS_STRING:
        if (leaf->value_size > QLORA__PARQUET_MAX_ROW) {
            return qlora__env_fail(
                env, QLORA_ERR_UNSUPPORTED, "a string of %llu bytes; %llu at most",
                (unsigned long long)leaf->value_size, (unsigned long long)QLORA__PARQUET_MAX_ROW);
        }
        return qlora__parquet_quote(out, (const char*)leaf->value, leaf->value_size)
                   ? QLORA_OK
                   : qlora__env_fail(env, QLORA_ERR_FORMAT, "a string is not valid UTF-8");
    case QLORA__PARQUET_AS_BOOL:
        qlora__string_puts(out, bits != 0 ? "true" : "false");
        return QLORA_OK;
    case QLORA__PARQUET_AS_INT:
    case QLORA__PARQUET_AS_UINT:
        return qlora__parquet_whole(env, leaf, bits, out);
    case QLORA__PARQUET_AS_FLOAT:
        memcpy(&single, leaf->value, sizeof single);
        return qlora__parquet_real(env, out, (double)single);
    case QLORA__PARQUET_AS_DOUBLE:
        memcpy(&real, leaf->value, sizeof real);
        return qlora__parquet_real(env, out, real);
    case QLORA__PARQUET_AS_HALF:
        return qlora__parquet_real(env, out, qlora__parquet_half((uint32_t)bits));
    default:
        qlora__string_puts(out, "null");
        return QLORA_OK;
    }
}

// ---- assembly

// An open struct or list.
typedef struct qlora__parquet_part {
    uint32_t node;
    uint32_t child;  // struct: the next field
    uint32_t repeat; // repetition level that the entries of its first value must have
    bool begun;      // something has been written into it
} qlora__parquet_part;

typedef struct qlora__parquet_rows {
    qlora__env* env;
    qlora__parquet* p;
    qlora__string* out;
    qlora__parquet_part parts[QLORA__PARQUET_MAX_DEPTH + 1];
    uint32_t open;
} qlora__parquet_rows;

// The next entry of a column, which must exist and start at the given level.
static qlora_result qlora__parquet_expect(qlora__parquet_rows* w, qlora__parquet_leaf* leaf,
                                          uint32_t repeat) {
    QLORA__TRY(qlora__parquet_peek(w->env, w->p, leaf));
    if (leaf->ended || leaf->repetition != repeat) {
        return qlora__parquet_at(
            w->env, w->p, leaf,
            qlora__env_fail(w->env, QLORA_ERR_FORMAT, "%s",
                            leaf->ended ? "it has fewer rows than the row group"
                                        : "its levels contradict those of the other columns"));
    }
    return QLORA_OK;
}

// Writes a leaf; `present` is the definition level of what it is in.
static qlora_result qlora__parquet_leaf_write(qlora__parquet_rows* w, qlora__parquet_leaf* leaf,
                                              uint32_t present, uint32_t repeat) {
    QLORA__TRY(qlora__parquet_expect(w, leaf, repeat));
    qlora_result r = QLORA_OK;
    leaf->ready = false;
    if (leaf->definition < present) {
        r = qlora__env_fail(w->env, QLORA_ERR_FORMAT,
                            "its levels contradict those of the other columns");
    } else if (leaf->definition < leaf->max_definition) {
        qlora__string_puts(w->out, "null");
    } else if (!leaf->next(leaf)) {
        r = qlora__env_fail(w->env, QLORA_ERR_FORMAT, "a page has too few values, or invalid ones");
    } else {
        r = qlora__parquet_write(w->env, leaf, w->out);
    }
    return r == QLORA_OK ? r : qlora__parquet_at(w->env, w->p, leaf, r);
}

// Writes null or [] for everything inside a node: all columns must agree on it.
static qlora_result qlora__parquet_absent(qlora__parquet_rows* w, const qlora__parquet_node* n,
                                          uint32_t repeat, const char* word) {
    uint32_t definition = w->p->leaves[n->leaf].definition;
    for (uint32_t i = n->leaf; i < n->leaf_end; i++) {
        qlora__parquet_leaf* leaf = &w->p->leaves[i];
        QLORA__TRY(qlora__parquet_expect(w, leaf, repeat));
        if (leaf->definition != definition) {
            return qlora__parquet_at(
                w->env, w->p, leaf,
                qlora__env_fail(w->env, QLORA_ERR_FORMAT,
                                "its levels contradict those of the other columns"));
        }
        leaf->ready = false;
    }
    qlora__string_puts(w->out, word);
    return QLORA_OK;
}

// Writes a leaf or something absent, or opens a struct or a list.
static qlora_result qlora__parquet_enter(qlora__parquet_rows* w, uint32_t node, uint32_t within,
                                         uint32_t repeat) {
    const qlora__parquet_node* n = &w->p->nodes[node];
    qlora__parquet_leaf* leaf = &w->p->leaves[n->leaf];
    if (n->kind == QLORA__PARQUET_LEAF) {
        return qlora__parquet_leaf_write(w, leaf, within, repeat);
    }
    QLORA__TRY(qlora__parquet_expect(w, leaf, repeat));
    if (leaf->definition < within) {
        return qlora__parquet_at(
            w->env, w->p, leaf,
            qlora__env_fail(w->env, QLORA_ERR_FORMAT,
                            "its levels contradict those of the other columns"));
    }
    if (leaf->definition < n->present) {
        return qlora__parquet_absent(w, n, repeat, "null");
    }
    bool list = n->kind == QLORA__PARQUET_LIST;
    if (list && leaf->definition < n->filled) {
        return qlora__parquet_absent(w, n, repeat, "[]");
    }
    qlora__string_add(w->out, list ? "[" : "{", 1);
    qlora__parquet_part* part = &w->parts[w->open++];
    part->node = node;
    part->child = node + 1;
    part->repeat = repeat;
    part->begun = false;
    return QLORA_OK;
}

// The next field of the innermost struct, or its end.
static qlora_result qlora__parquet_field(qlora__parquet_rows* w, qlora__parquet_part* part) {
    const qlora__parquet_node* n = &w->p->nodes[part->node];
    if (part->child >= n->end) {
        qlora__string_add(w->out, "}", 1);
        w->open--;
        return QLORA_OK;
    }
    const qlora__parquet_node* field = &w->p->nodes[part->child];
    if (part->begun) {
        qlora__string_add(w->out, ",", 1);
    }
    part->begun = true;
    if (!qlora__parquet_quote(w->out, field->name, field->name_size)) {
        return qlora__env_fail(w->env, QLORA_ERR_FORMAT,
                               "%s: the name of a column is not valid UTF-8", w->p->label);
    }
    qlora__string_add(w->out, ":", 1);
    uint32_t child = part->child;
    part->child = field->end;
    if (field->skip) { // a value that nothing takes for its own
        qlora__string_puts(w->out, "{\"not read\":true}");
        return QLORA_OK;
    }
    return qlora__parquet_enter(w, child, n->present, part->repeat);
}

// The next element of the innermost list, or its end.
static qlora_result qlora__parquet_item(qlora__parquet_rows* w, qlora__parquet_part* part) {
    const qlora__parquet_node* n = &w->p->nodes[part->node];
    qlora__parquet_leaf* leaf = &w->p->leaves[n->leaf];
    if (!part->begun) {
        part->begun = true;
        return qlora__parquet_enter(w, part->node + 1, n->filled, part->repeat);
    }
    QLORA__TRY(qlora__parquet_peek(w->env, w->p, leaf));
    if (leaf->ended || leaf->repetition < n->repeat) {
        qlora__string_add(w->out, "]", 1);
        w->open--;
        return QLORA_OK;
    }
    qlora__string_add(w->out, ",", 1);
    return qlora__parquet_enter(w, part->node + 1, n->filled, n->repeat);
}

// Goes to the next row group that has rows, and checks that the last one is used up.
static qlora_result qlora__parquet_group_next(qlora__env* env, qlora__parquet* p) {
    while (p->rows_left == 0) {
        for (uint32_t field = 1; p->group > 0 && field < p->node_count;
             field = p->nodes[field].end) {
            for (uint32_t i = p->nodes[field].leaf;
                 !p->nodes[field].skip && i < p->nodes[field].leaf_end; i++) {
                qlora__parquet_leaf* leaf = &p->leaves[i];
                QLORA__TRY(qlora__parquet_peek(env, p, leaf));
                if (!leaf->ended) {
                    return qlora__parquet_at(
                        env, p, leaf,
                        qlora__env_fail(env, QLORA_ERR_FORMAT,
                                        "it has more rows than the row group"));
                }
            }
        }
        if (p->group == p->group_count) {
            return QLORA_OK;
        }
        p->group++;
        QLORA__TRY(qlora__parquet_group_open(env, p));
    }
    return QLORA_OK;
}

static qlora_result qlora__parquet_bounds(qlora__env* env, const qlora__parquet* p, size_t size) {
    if (size > QLORA__PARQUET_MAX_ROW) {
        return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                               "%s: row group %u, row %llu: more than %llu MiB of JSON", p->label,
                               p->group, (unsigned long long)p->row,
                               (unsigned long long)(QLORA__PARQUET_MAX_ROW >> 20));
    }
    if (size > p->text_limit - p->text) {
        return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                               "%s: row %llu: the rows have more than %llu bytes of JSON, which is "
                               "not plausible for a file of %llu bytes",
                               p->label, (unsigned long long)p->row,
                               (unsigned long long)p->text_limit, (unsigned long long)p->size);
    }
    return QLORA_OK;
}

// Writes the next row into `out`, which it empties first: an object with a member for every column,
// in the order of the schema. *found is false after the last row.
static qlora_result qlora__parquet_next(qlora__env* env, qlora__parquet* p, qlora__string* out,
                                        bool* found) {
    qlora__parquet_rows w;
    uint32_t refused = p->group == 0 ? qlora__parquet_unreadable(p) : 0;
    if (refused > 0) {
        char path[256];
        qlora__parquet_path(p, refused, path, sizeof path);
        return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                               "%s: column \"%s\" is %s, which is not supported", p->label, path,
                               p->nodes[refused].why);
    }
    *found = false;
    p->inside = false;
    out->size = 0;
    QLORA__TRY(qlora__parquet_group_next(env, p));
    if (p->rows_left == 0) {
        return QLORA_OK;
    }
    p->row++;
    p->rows_left--;
    p->inside = true;
    w.env = env;
    w.p = p;
    w.out = out;
    w.open = 1;
    memset(&w.parts[0], 0, sizeof w.parts[0]);
    w.parts[0].child = 1;
    qlora__string_add(out, "{", 1);
    while (w.open > 0) {
        qlora__parquet_part* part = &w.parts[w.open - 1];
        bool list = p->nodes[part->node].kind == QLORA__PARQUET_LIST;
        QLORA__TRY(list ? qlora__parquet_item(&w, part) : qlora__parquet_field(&w, part));
        QLORA__TRY(qlora__parquet_bounds(env, p, out->size));
        QLORA__TRY(out->result);
    }
    p->text += out->size;
    *found = true;
    return QLORA_OK;
}
