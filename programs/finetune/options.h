// options.h - reading the options.
#ifndef FINETUNE_OPTIONS_H
#define FINETUNE_OPTIONS_H

PRINTF(2, 3)
static bool fail(char error[1024], const char* format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(error, 1024, format, args);
    va_end(args);
    return false;
}

// The number of letters to change, add or drop to get from a to b.
static size_t word_distance(const char* a, const char* b) {
    size_t row[32];
    size_t width = strlen(b) < 31 ? strlen(b) : 31;
    for (size_t j = 0; j <= width; j++) {
        row[j] = j;
    }
    for (size_t i = 0; a[i] != '\0'; i++) {
        size_t corner = row[0];
        row[0] = i + 1;
        for (size_t j = 1; j <= width; j++) {
            size_t best = corner + (a[i] == b[j - 1] ? 0 : 1);
            corner = row[j];
            best = row[j] + 1 < best ? row[j] + 1 : best;
            row[j] = row[j - 1] + 1 < best ? row[j - 1] + 1 : best;
        }
    }
    return row[width];
}

static bool option_unknown(const char* word, char error[1024]) {
    const char* nearest = NULL;
    size_t distance = 3;
    for (size_t i = 0; i < OPTION_COUNT && strncmp(word, "--", 2) == 0; i++) {
        size_t d = word_distance(word + 2, option_table[i].name);
        if (option_table[i].kind != OPT_HEADING && d < distance) {
            nearest = option_table[i].name;
            distance = d;
        }
    }
    if (nearest != NULL) {
        return fail(error, "unknown option %s; did you mean --%s?", word, nearest);
    }
    return fail(error,
                word[0] == '-' ? "unknown option %s; see --help"
                               : "unexpected argument '%s'; options start with --",
                word);
}

static bool number_read(const option* row, const char* text, double* out, char error[1024]) {
    char* end = NULL;
    errno = 0;
    double value = strtod(text, &end);
    if (row->kind == OPT_SIZE && end != text && *end != '\0') {
        const char* units = "KMGT";
        const char* unit = strchr(units, toupper((unsigned char)*end));
        if (unit != NULL) {
            value *= pow(1024.0, (double)(unit - units + 1));
            end++;
            end += *end == 'i' ? 1 : 0;
            end += *end == 'B' ? 1 : 0;
        }
    }
    if (end == text || *end != '\0' || errno != 0) {
        return fail(error, "--%s: '%s' is not a number", row->name, text);
    }
    if (row->kind != OPT_REAL && value != floor(value)) {
        return fail(error, "--%s: '%s' is not a whole number", row->name, text);
    }
    if (!(value >= row->low && value <= row->high)) {
        char low[32];
        char high[32];
        return fail(error, "--%s: %s is out of range; use %s to %s", row->name, text,
                    limit_text(row->low, row->kind == OPT_SIZE, low),
                    limit_text(row->high, row->kind == OPT_SIZE, high));
    }
    *out = value;
    return true;
}

static bool choice_read(const option* row, const char* text, int64_t* out, char error[1024]) {
    const char* at = row->words;
    for (int64_t number = 0; *at != '\0'; number++) {
        size_t length = strcspn(at, "|");
        if (strlen(text) == length && strncmp(at, text, length) == 0) {
            *out = number;
            return true;
        }
        at += length;
        at += *at == '|' ? 1 : 0;
    }
    return fail(error, "--%s: '%s' is not one of %s", row->name, text, row->words);
}

static bool targets_read(const option* row, const char* text, int64_t* out, char error[1024]) {
    int64_t bits = strcmp(text, "all") == 0 ? QLORA_TARGET_ALL : 0;
    for (const char* at = text; bits != QLORA_TARGET_ALL && *at != '\0';) {
        size_t length = strcspn(at, ",");
        size_t stem = length > 5 && strncmp(at + length - 5, "_proj", 5) == 0 ? length - 5 : length;
        int64_t bit = 0;
        for (int i = 0; i < 9; i++) {
            bit |= strlen(target_names[i]) == stem && strncmp(target_names[i], at, stem) == 0
                       ? 1 << i
                       : 0;
        }
        if (bit == 0) {
            return fail(error,
                        "--%s: '%.*s' is not one of q, k, v, o, gate, up, down, qkv, gate_up",
                        row->name, (int)length, at);
        }
        bits |= bit;
        at += length;
        at += *at == ',' ? 1 : 0;
    }
    *out = bits;
    return bits != 0 ||
           fail(error, "--%s needs a value: all, or some of q,k,v,o,gate,up,down,qkv,gate_up",
                row->name);
}

static bool option_set(options* o, const option* row, const char* text, char error[1024]) {
    void* at = option_at(o, row);
    double number = 0.0;
    switch (row->kind) {
    case OPT_TEXT:
        *(const char**)at = text;
        return text[0] != '\0' || fail(error, "--%s needs a non-empty value", row->name);
    case OPT_CHOICE:
        return choice_read(row, text, (int64_t*)at, error);
    case OPT_TARGETS:
        return targets_read(row, text, (int64_t*)at, error);
    case OPT_REAL:
        return number_read(row, text, (double*)at, error);
    default:
        if (!number_read(row, text, &number, error)) {
            return false;
        }
        *(int64_t*)at = (int64_t)number;
        return true;
    }
}

static const option* option_find(const char* name, size_t length) {
    for (size_t i = 0; i < OPTION_COUNT; i++) {
        const option* row = &option_table[i];
        if (row->kind != OPT_HEADING && strlen(row->name) == length &&
            strncmp(row->name, name, length) == 0) {
            return row;
        }
    }
    return NULL;
}

static bool options_read(int argc, char** argv, options* o, char error[1024]) {
    for (int i = 1; i < argc; i++) {
        const char* word = strcmp(argv[i], "-h") == 0 ? "--help" : argv[i];
        const char* equals = strchr(word, '=');
        size_t length = equals != NULL ? (size_t)(equals - word) : strlen(word);
        const option* row =
            length > 2 && strncmp(word, "--", 2) == 0 ? option_find(word + 2, length - 2) : NULL;
        if (row == NULL) {
            return option_unknown(word, error);
        }
        if (row->kind == OPT_FLAG) {
            if (equals != NULL) {
                return fail(error, "--%s does not take a value", row->name);
            }
            *(bool*)option_at(o, row) = true;
            continue;
        }
        if (equals == NULL && i + 1 == argc) {
            return fail(error, "--%s needs a value: %s", row->name, row->words);
        }
        if (!option_set(o, row, equals != NULL ? equals + 1 : argv[++i], error)) {
            return false;
        }
    }
    return true;
}

static bool options_check(options* o, char error[1024]) {
    if (o->demo && (o->model != NULL || o->data != NULL)) {
        return fail(error, "--demo creates its own model and data; drop --model and --data");
    }
    if (o->model == NULL && !o->demo) {
        return fail(error, "--model DIR is required; see --help, or try --demo");
    }
    if (o->data == NULL && !o->demo && !o->plan) {
        return fail(error, "--data FILE is required");
    }
    if (o->out == NULL && !o->plan && !o->doctor) {
        return fail(error, "--out DIR is required: the adapter is saved there");
    }
    if (o->tokens != 0 && o->length != 0 && o->length > o->tokens) {
        return fail(error,
                    "--length (%lld) must not exceed --tokens (%lld): a sample has to fit into one "
                    "micro-batch",
                    (long long)o->length, (long long)o->tokens);
    }
    if (o->eval >= 1.0 && o->eval != floor(o->eval)) {
        return fail(error, "--eval: %g is neither a fraction below 1 nor a whole number", o->eval);
    }
    if (o->model != NULL && model_fault(o->model) != NULL) {
        return fail(error, "--model %s: %s", o->model, model_fault(o->model));
    }
    if (o->adapter != NULL && file_missing(o->adapter, "adapter_config.json")) {
        return fail(error, "--adapter %s: adapter_config.json not found", o->adapter);
    }
    return true;
}

#endif
