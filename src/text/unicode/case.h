// The class of a character without the expanded table.
static QLORA__UNUSED uint32_t qlora__jin_class(uint32_t code) {
    size_t low = 0;
    size_t high = QLORA__TEXT_COUNT(qlora__text_class_runs);
    while (high - low > 1) {
        size_t middle = (low + high) / 2;
        if (qlora__text_class_runs[middle] >> 8 <= code) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return qlora__text_class_runs[low] & 0x7F;
}

static QLORA__UNUSED bool qlora__text_in_runs(const qlora__text_code_run* runs, size_t count,
                                              uint32_t code) {
    for (size_t i = 0; i < count && runs[i].first <= code; i++) {
        if (code <= runs[i].last) {
            return true;
        }
    }
    return false;
}

static uint32_t qlora__text_case_map(const qlora__text_case_run* runs, size_t count,
                                     uint32_t code) {
    size_t low = 0;
    size_t high = count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (runs[middle].last < code) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    bool inside =
        low < count && runs[low].first <= code && (code - runs[low].first) % runs[low].stride == 0;
    return inside ? (uint32_t)((int32_t)code + runs[low].change) : code;
}

static const qlora__text_case_long* qlora__text_case_find(const qlora__text_case_long* rows,
                                                          size_t count, uint32_t code) {
    for (size_t i = 0; i < count && rows[i].code <= code; i++) {
        if (rows[i].code == code) {
            return &rows[i];
        }
    }
    return NULL;
}

typedef enum qlora__text_case {
    QLORA__TEXT_LOWER_CASE,
    QLORA__TEXT_UPPER_CASE,
    QLORA__TEXT_TITLE_CASE
} qlora__text_case;

// What a character becomes: up to three. The final sigma is up to the caller.
static size_t qlora__text_case_of(uint32_t code, qlora__text_case to, uint32_t out[3]) {
    out[0] = code;
    if (code < 0x80) {
        bool lower = code >= 'a' && code <= 'z';
        bool upper = code >= 'A' && code <= 'Z';
        out[0] =
            to == QLORA__TEXT_LOWER_CASE ? (upper ? code + 32 : code) : (lower ? code - 32 : code);
        return 1;
    }
    const qlora__text_case_long* row = NULL;
    if (to == QLORA__TEXT_LOWER_CASE) {
        if (code == 0x130) { // the only character whose lower case is two
            out[0] = 'i';
            out[1] = 0x307;
            return 2;
        }
        out[0] = qlora__text_case_map(qlora__text_lower_runs,
                                      QLORA__TEXT_COUNT(qlora__text_lower_runs), code);
        return 1;
    }
    if (to == QLORA__TEXT_TITLE_CASE) {
        row = qlora__text_case_find(qlora__text_title_long,
                                    QLORA__TEXT_COUNT(qlora__text_title_long), code);
    }
    if (row == NULL) {
        row = qlora__text_case_find(qlora__text_upper_long,
                                    QLORA__TEXT_COUNT(qlora__text_upper_long), code);
    }
    if (row == NULL) {
        out[0] = qlora__text_case_map(qlora__text_upper_runs,
                                      QLORA__TEXT_COUNT(qlora__text_upper_runs), code);
        return 1;
    }
    size_t count = 0;
    while (count < 3 && row->to[count] != 0) {
        out[count] = row->to[count];
        count++;
    }
    return count;
}
