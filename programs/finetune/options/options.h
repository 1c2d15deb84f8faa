// options.h - the options: from the command line, from a file, and checked.
#ifndef FINETUNE_OPTIONS_H
#define FINETUNE_OPTIONS_H

// Removes the spaces around a text and one pair of quotes.
static char* line_trim(char* text) {
    text += strspn(text, " \t");
    size_t length = strlen(text);
    while (length > 0 && strchr(" \t\r", text[length - 1]) != NULL) {
        text[--length] = '\0';
    }
    if (length >= 2 && (text[0] == '"' || text[0] == '\'') && text[length - 1] == text[0]) {
        text[length - 1] = '\0';
        text++;
    }
    return text;
}

// Replaces a JSON string by what it stands for, which is never longer.
static bool line_unquote(char* text, char error[1024]) {
    json_reader r = json_start(text, strlen(text));
    blob value;
    memset(&value, 0, sizeof value);
    bool ok = json_string(&r, &value) && json_end(&r) && blob_add(&value, "", 1) &&
              strlen(value.data) + 1 == value.count;
    if (ok) {
        memcpy(text, value.data, value.count);
    }
    blob_free(&value);
    return ok || error_set(error, "'%.200s' is not a JSON string", text);
}

// One line of a file of options: "name value", "name = value" or "--name value", and "name" for a
// flag; "name: value" with a JSON string, which can contain the end of a line. Empty lines and
// lines that start with # have no meaning.
static bool config_line(const option_set* set, char* line, char error[1024]) {
    line += strspn(line, " \t\r");
    if (*line == '\0' || *line == '#') {
        return true;
    }
    char* name = strncmp(line, "--", 2) == 0 ? line + 2 : line;
    size_t length = strcspn(name, " \t\r=:");
    const option* row = option_find(set, name, length);
    if (row == NULL) {
        char word[64];
        snprintf(word, sizeof word, "--%.*s", (int)(length < 60 ? length : 60), name);
        return option_unknown(set, word, error);
    }
    char* value = name + length + strspn(name + length, " \t\r");
    bool json = name[length] == ':';
    if (json) {
        value++;
        value += strspn(value, " \t\r");
        if (!line_unquote(value, error)) {
            return false;
        }
    } else {
        value = line_trim(*value == '=' ? value + 1 : value);
    }
    if (row->kind == OPT_FLAG) {
        *(bool*)option_at(set, row) = true;
        return *value == '\0' || error_set(error, "--%s does not take a value", row->name);
    }
    if (strcmp(row->name, "config") == 0) {
        return error_set(error, "--config cannot be used in a file of options");
    }
    return option_store(set, row, value, error);
}

// Whether a line begins an earlier part of a run, see parts.h.
static bool line_parts(const char* line) {
    return strncmp(line, "until ", 6) == 0;
}

// Reads a file of options, which must stay in memory: the values point into it. The parts at its
// end are left as they are.
static bool config_read(const option_set* set, const char* path, blob* text, char error[1024]) {
    char what[1024];
    size_t number = 1;
    bool mark = text->count >= 3 && memcmp(text->data, "\xEF\xBB\xBF", 3) == 0;
    for (char* line = text->data + (mark ? 3 : 0); line != NULL; number++) {
        char* end = strchr(line, '\n');
        if (line_parts(line)) {
            ((options*)set->values)->parts = line;
            break;
        }
        if (end != NULL) {
            *end = '\0';
        }
        if (!config_line(set, line, what)) {
            return error_set(error, "%.400s:%zu: %.500s", path, number, what);
        }
        line = end != NULL ? end + 1 : NULL;
    }
    return true;
}

// The command line, on top of the file that it may name. A list in the command line replaces the
// one in the file.
static bool options_take(const option_set* set, int argc, char** argv, blob* text,
                         char error[1024]) {
    options* o = (options*)set->values;
    options_clear(o);
    if (!options_read(set, 1, argc, argv, error) || o->config == NULL) {
        return error[0] == '\0';
    }
    options given = *o;
    const char* path = o->config;
    int code = blob_read_path(text, path);
    if (code != 0) {
        return error_set(error, "--config %s: %s", path, strerror(code));
    }
    options_clear(o);
    if (strlen(text->data) != text->count) {
        return error_set(error, "--config %s: the file is not text", path);
    }
    if (!config_read(set, path, text, error)) {
        return false;
    }
    if (given.training.epochs > 0.0 && given.training.steps == 0) {
        o->training.steps = 0; // it would override the epochs of the command line
    }
    o->data.files.count = given.data.files.count > 0 ? 0 : o->data.files.count;
    o->data.eval_files.count = given.data.eval_files.count > 0 ? 0 : o->data.eval_files.count;
    o->sampling.prompts.count = given.sampling.prompts.count > 0 ? 0 : o->sampling.prompts.count;
    o->sampling.messages.count = given.sampling.messages.count > 0 ? 0 : o->sampling.messages.count;
    return options_read(set, 1, argc, argv, error);
}

static bool ends_in(const char* text, const char* ending) { // in any case
    size_t length = strlen(text);
    size_t size = strlen(ending);
    for (size_t i = 0; length >= size && i < size; i++) {
        if (tolower((unsigned char)text[length - size + i]) != ending[i]) {
            return false;
        }
    }
    return length >= size;
}

static bool adapter_is_folder(const options* o, char error[1024]) {
    if (o->adapter.from != NULL &&
        (ends_in(o->adapter.from, ".gguf") || file_is_gguf(o->adapter.from))) {
        return error_set(error,
                         "--adapter %s is a GGUF file; give the adapter's folder in PEFT format",
                         o->adapter.from);
    }
    return true;
}

// What an adapter decides cannot be given beside it.
static bool adapter_check(options* o, char adapter[FOLDER_PATH], char error[1024]) {
    if (o->adapter.from == NULL) {
        return o->adapter.expert_layout == 0 || error_set(error, "--expert-layout needs --adapter");
    }
    const char* beside = o->adapter.rank != 0              ? "rank"
                         : o->adapter.alpha != 0.0         ? "alpha"
                         : o->adapter.targets != 0         ? "targets"
                         : o->adapter.rslora               ? "rslora"
                         : o->adapter.dora                 ? "dora"
                         : o->adapter.save_modules != 0    ? "save-modules"
                         : o->adapter.train_tokens != NULL ? "train-tokens"
                         : o->adapter.add_tokens != NULL   ? "add-tokens"
                                                           : NULL;
    if (beside != NULL) {
        return error_set(error, "--%s cannot be given with --adapter, which decides it", beside);
    }
    if (!folder_adapter(o->adapter.from, adapter)) {
        char why[HUB_ADVICE];
        return error_set(error, "--adapter %s: adapter_config.json not found%s", o->adapter.from,
                         adapter_advice(o->adapter.from, why));
    }
    o->adapter.from = adapter;
    // Norms that were trained with the adapter belong to it.
    o->adapter.train_norms =
        o->adapter.train_norms || !file_missing(adapter, "trained_norms.safetensors");
    return true;
}

// Standard input can be read once.
static bool inputs_check(const options* o, char error[1024]) {
    int inputs = 0;
    const option_texts* lists[2] = {&o->data.files, &o->data.eval_files};
    for (int k = 0; k < 2; k++) {
        for (int64_t i = 0; i < lists[k]->count; i++) {
            inputs += strcmp(lists[k]->items[i], "-") == 0 ? 1 : 0;
        }
    }
    return inputs < 2 || error_set(error, "standard input (-) can be given only once");
}

// A GGUF file is a model. A pipe is not looked into, as what is read from it is gone, nor is a file
// of a known form, as a text may begin with these letters.
static bool data_is_not_gguf(const options* o, bool eval, const char* path, char error[1024]) {
    bool named = ends_in(path, ".gguf");
    bool unknown = o->data.format == NULL && !qlora_text_data_known(path);
    if (path_is_file(path) && ((named && unknown) || ((named || unknown) && file_is_gguf(path)))) {
        return error_set(error, "--%s %s is a GGUF file, which contains a model and not data",
                         eval ? "eval-data" : "data", path);
    }
    return true;
}

// Whether the library knows the form of the data. The names of whole files are also endings.
static bool format_check(const options* o, char error[1024]) {
    char names[256] = "";
    char endings[160] = "";
    bool given = o->data.format == NULL;
    for (size_t i = 0; qlora_text_data_formats(i) != NULL; i++) {
        const char* name = qlora_text_data_formats(i);
        size_t used = strlen(names);
        snprintf(names + used, sizeof names - used, "%s%s", used > 0 ? ", " : "", name);
        given = given || strcmp(name, o->data.format) == 0;
        char file[64];
        snprintf(file, sizeof file, "x.%s", name);
        used = strlen(endings);
        if (qlora_text_data_known(file)) {
            snprintf(endings + used, sizeof endings - used, "%s.%s", used > 0 ? ", " : "", name);
        }
    }
    if (!given) {
        return error_set(error, "--format: '%.60s' is not one of %s", o->data.format, names);
    }
    const option_texts* lists[2] = {&o->data.files, &o->data.eval_files};
    for (int64_t i = 0; i < o->data.files.count + o->data.eval_files.count; i++) {
        bool eval = i >= o->data.files.count;
        const char* path = lists[eval]->items[eval ? i - o->data.files.count : i];
        char why[HUB_ADVICE];
        const char* hub = hub_advice(path, eval ? "--eval-data" : "--data", why);
        if (hub[0] != '\0' && !qlora_text_data_known(path)) {
            return error_set(error, "--%s %s: no such file%s", eval ? "eval-data" : "data", path,
                             hub);
        }
        if (strcmp(path, "-") == 0 || !path_exists(path) || path_is_folder(path)) {
            continue;
        }
        if (!data_is_not_gguf(o, eval, path, error)) {
            return false;
        }
        if (o->data.format == NULL && !qlora_text_data_known(path)) {
            return error_set(error, "--%s %s: the name must end in %s, or --format must be given",
                             eval ? "eval-data" : "data", path, endings);
        }
    }
    return true;
}

// settings.txt has one line per option, and a run can be resumed only if it can be read again.
static bool lines_check(const options* o, char error[1024]) {
    const struct {
        const char* name;
        const char* value;
    } texts[] = {{"model", o->model.path},
                 {"adapter", o->adapter.from},
                 {"template", o->data.template_name},
                 {"chat-template", o->data.chat_template},
                 {"columns", o->data.columns},
                 {"add-tokens", o->adapter.add_tokens}};
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        if (texts[i].value != NULL && strchr(texts[i].value, '\n') != NULL) {
            return error_set(error, "--%s: the value contains a line end", texts[i].name);
        }
    }
    const option_texts* lists[2] = {&o->data.files, &o->data.eval_files};
    for (int k = 0; k < 2; k++) {
        for (int64_t i = 0; i < lists[k]->count; i++) {
            if (strchr(lists[k]->items[i], '\n') != NULL) {
                return error_set(error, "--%s: the value contains a line end",
                                 k == 0 ? "data" : "eval-data");
            }
        }
    }
    return true;
}

static bool needs_check(const options* o, char error[1024]) {
    bool look = o->plan || o->doctor || o->eval.only;
    if (o->demo && (o->model.path != NULL || o->data.files.count > 0)) {
        return error_set(error, "--demo creates its own model and data; drop --model and --data");
    }
    if (o->demo && o->model.rope_scale != NULL) {
        return error_set(error, "--rope-scale needs --model; drop --demo");
    }
    if (o->demo && o->eval.only) {
        return error_set(error, "--eval-only needs --model and --data; drop --demo");
    }
    if (o->adapter.add_tokens != NULL && (o->demo || o->eval.only)) {
        return error_set(error, "--add-tokens cannot be used with %s",
                         o->demo ? "--demo" : "--eval-only");
    }
    if (o->model.path == NULL && !o->demo) {
        return error_set(error, "--model DIR is required; see --help, or try --demo");
    }
    if (o->data.files.count == 0 && !o->demo && !o->plan &&
        !(o->eval.only && o->data.eval_files.count > 0)) {
        return error_set(error, "--data FILE is required");
    }
    if (o->output.folder == NULL && !look && !o->demo) {
        return error_set(error, "--out DIR is required: the adapter is saved there");
    }
    if (o->json && !o->doctor && !o->eval.only) {
        return error_set(error, "--json needs --doctor or --eval-only");
    }
    return true;
}

// Reads --train-tokens into `rows`, at most `room` of them; -1 if it is not a list of ids.
static int64_t token_rows_read(const char* text, int32_t* rows, int64_t room) {
    int64_t count = 0;
    while (text != NULL && count < room) {
        char* end = NULL;
        long value = strtol(text, &end, 10);
        if (end == text || value < 0 || value > INT32_MAX || (*end != ',' && *end != '\0')) {
            return -1;
        }
        rows[count++] = (int32_t)value;
        text = *end == ',' ? end + 1 : NULL;
    }
    return text == NULL ? count : -1;
}

static bool train_tokens_check(const options* o, char error[1024]) {
    int32_t rows[MAX_TOKEN_ROWS];
    return token_rows_read(o->adapter.train_tokens, rows, MAX_TOKEN_ROWS) >= 0 ||
           error_set(error, "--train-tokens: '%.60s' is not a list of at most %d token ids",
                     o->adapter.train_tokens, MAX_TOKEN_ROWS);
}

typedef char option_targets_are_those_of_the_library
    [OPTION_ALL_TARGETS == QLORA_TARGET_ALL && QLORA_TARGET_GATE_UP == 256 &&
             (QLORA_TARGET_EXPERTS_IN | QLORA_TARGET_EXPERTS_OUT) == 6144 &&
             QLORA_TARGET_ROUTER == 8192 && QLORA_TARGET_SHARED_GATE == 16384 &&
             QLORA_TARGET_ATTENTION == 32768
         ? 1
         : -1];

// Reads --lr-factors, NAME=X,...; false if it is not such a list.
static bool lr_factors_read(const char* text, double factors[QLORA_LR_FACTORS]) {
    static const char* const names[QLORA_LR_FACTORS] = {
        "q",       "k",     "v",     "o",          "gate",        "up",     "down",       "qkv",
        "gate_up", "norms", "embed", "experts_in", "experts_out", "router", "shared_gate"};
    while (text != NULL) {
        size_t size = strcspn(text, "=,");
        int which = 0;
        while (which < QLORA_LR_FACTORS &&
               (strlen(names[which]) != size || strncmp(text, names[which], size) != 0)) {
            which++;
        }
        char* end = NULL;
        double value = text[size] == '=' ? strtod(text + size + 1, &end) : 0.0;
        if (which == QLORA_LR_FACTORS || end == NULL || end == text + size + 1 ||
            (*end != ',' && *end != '\0') || !(value >= 1e-3 && value <= 1e3) ||
            factors[which] != 0.0) {
            return false;
        }
        factors[which] = value;
        text = *end == ',' ? end + 1 : NULL;
    }
    return true;
}

static bool lr_factors_check(const options* o, char error[1024]) {
    double factors[QLORA_LR_FACTORS] = {0.0};
    return lr_factors_read(o->optimizer.lr_factors, factors) ||
           error_set(error,
                     "--lr-factors: '%.60s' is not a list of NAME=X, each name once, with X from "
                     "0.001 to 1000 and a name of q, k, v, o, gate, up, down, qkv, gate_up, norms, "
                     "embed, experts_in, experts_out, router, shared_gate",
                     o->optimizer.lr_factors);
}

// Options of a method are refused where they would have no effect.
static bool method_check(const options* o, char error[1024]) {
    const method_row* method = method_of(o->method.kind);
    const struct {
        const char* name;
        bool given;
        int bit; // in the options of a method
    } rows[] = {{"beta", o->method.beta > 0.0, METHOD_BETA},
                {"label-smoothing", o->method.label_smoothing > 0.0, METHOD_PAIRS},
                {"sft-alpha", o->method.sft_alpha > 0.0, METHOD_PAIRS},
                {"desirable-weight", o->method.desirable_weight > 0.0, METHOD_WEIGHTS},
                {"undesirable-weight", o->method.undesirable_weight > 0.0, METHOD_WEIGHTS},
                {"reference", o->method.reference != REFERENCE_PRECOMPUTE, METHOD_REFERENCE},
                {"train-prompt", o->data.train_prompt, METHOD_ANSWERS},
                {"train-norms", o->adapter.train_norms, METHOD_ANSWERS},
                {"demo", o->demo, METHOD_ANSWERS},
                {"eval-only", o->eval.only, METHOD_ANSWERS}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        if (rows[i].given && (method->options & rows[i].bit) == 0) {
            return error_set(error, "--%s cannot be used with --method %s", rows[i].name,
                             method->name);
        }
    }
    return true;
}

static bool options_check(options* o, char adapter[FOLDER_PATH], char error[1024]) {
    if (!needs_check(o, error) || !inputs_check(o, error) || !lines_check(o, error) ||
        !format_check(o, error) || !adapter_is_folder(o, error) || !method_check(o, error) ||
        !train_tokens_check(o, error) || !lr_factors_check(o, error)) {
        return false;
    }
    bool chosen = o->data.length != 0 && o->data.length != OPTION_MAX;
    if (o->training.tokens != 0 && chosen && o->data.length > o->training.tokens) {
        return error_set(error,
                         "--length (%lld) must not exceed --tokens (%lld): a sample has to fit "
                         "into one micro-batch",
                         (long long)o->data.length, (long long)o->training.tokens);
    }
    if (o->eval.share >= 1.0 && o->eval.share != floor(o->eval.share)) {
        return error_set(error, "--eval: %g is neither a fraction below 1 nor a whole number",
                         o->eval.share);
    }
    if (o->machine.device >= 0 && o->machine.backend == QLORA_BACKEND_CPU) {
        return error_set(error, "--device %lld needs a GPU; drop --backend cpu",
                         (long long)o->machine.device);
    }
    char why[HUB_ADVICE];
    const char* fault = o->model.path != NULL ? model_fault(o->model.path, why) : NULL;
    if (fault != NULL) {
        return error_set(error, "--model %s: %s", o->model.path, fault);
    }
    return adapter_check(o, adapter, error);
}

#endif
