// settings.h - the options that a resumed run must repeat, written and compared.
#ifndef FINETUNE_SETTINGS_H
#define FINETUNE_SETTINGS_H

// One line for each option that must stay the same when a run is resumed: "name value".
static void settings_write(options* o, char* out, size_t size) {
    size_t used = 0;
    out[0] = '\0';
    for (size_t i = 0; i < OPTION_COUNT && used < size; i++) {
        const option* row = &option_table[i];
        const void* at = option_at(o, row);
        if (!row->fixed) {
            continue;
        }
        int n = 0;
        if (row->kind == OPT_TEXT) {
            const char* text = *(const char* const*)at;
            n = snprintf(out + used, size - used, "%s %.200s\n", row->name,
                         text != NULL ? text : "-");
        } else if (row->kind == OPT_REAL) {
            n = snprintf(out + used, size - used, "%s %.17g\n", row->name, *(const double*)at);
        } else if (row->kind == OPT_FLAG) {
            n = snprintf(out + used, size - used, "%s %d\n", row->name, *(const bool*)at ? 1 : 0);
        } else {
            n = snprintf(out + used, size - used, "%s %lld\n", row->name,
                         (long long)*(const int64_t*)at);
        }
        used += n > 0 ? (size_t)n : 0;
    }
}

// A line of settings_write as the user would write it: "schedule 0" is "--schedule cosine".
static void setting_show(const char* line, size_t length, char out[256]) {
    size_t name = strcspn(line, " \n");
    const option* row = name < length ? option_find(line, name) : NULL;
    if (row == NULL) {
        snprintf(out, 256, "'%.*s'", (int)length, line);
        return;
    }
    const char* value = line + name + 1;
    int value_length = (int)(length - name - 1);
    long number = strtol(value, NULL, 10);
    if ((row->kind == OPT_TEXT && value_length == 1 && *value == '-') ||
        (row->kind == OPT_FLAG && number == 0)) {
        snprintf(out, 256, "no --%s", row->name);
    } else if (row->kind == OPT_FLAG) {
        snprintf(out, 256, "--%s", row->name);
    } else if (row->kind == OPT_CHOICE) {
        const char* word = row->words;
        for (; number > 0 && strchr(word, '|') != NULL; number--) {
            word = strchr(word, '|') + 1;
        }
        snprintf(out, 256, "--%s %.*s", row->name, (int)strcspn(word, "|"), word);
    } else if (row->kind == OPT_TARGETS && number == QLORA_TARGET_ALL) {
        snprintf(out, 256, "--%s all", row->name);
    } else if (row->kind == OPT_TARGETS) {
        int used = snprintf(out, 256, "--%s", row->name);
        for (int i = 0; i < 9; i++) {
            used += (number >> i & 1) == 0
                        ? 0
                        : snprintf(out + used, 256 - (size_t)used, "%s%s",
                                   strchr(out, ' ') == NULL ? " " : ",", target_names[i]);
        }
    } else if (row->kind == OPT_REAL) {
        snprintf(out, 256, "--%s %g", row->name, strtod(value, NULL));
    } else {
        snprintf(out, 256, "--%s %.*s", row->name, value_length, value);
    }
}

// Compares two results of settings_write; the first lines that differ go to line_a and line_b.
static bool settings_equal(const char* a, const char* b, char line_a[256], char line_b[256]) {
    while (*a != '\0' || *b != '\0') {
        size_t na = strcspn(a, "\n");
        size_t nb = strcspn(b, "\n");
        if (na != nb || memcmp(a, b, na) != 0) {
            setting_show(a, na, line_a);
            setting_show(b, nb, line_b);
            return false;
        }
        a += na + (a[na] == '\n' ? 1 : 0);
        b += nb + (b[nb] == '\n' ? 1 : 0);
    }
    return true;
}

#endif
