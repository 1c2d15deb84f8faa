static uint64_t text__mix(uint64_t x) {
    x ^= x >> 32;
    x *= 0x9E3779B97F4A7C15u;
    x ^= x >> 29;
    x *= 0xBF58476D1CE4E5B9u;
    return x ^ x >> 32;
}

static uint64_t text__hash(const char* data, size_t count) {
    uint64_t hash = 0x243F6A8885A308D3u ^ count;
    while (count >= 8) {
        uint64_t word;
        memcpy(&word, data, 8);
        hash = text__mix(hash ^ word);
        data += 8;
        count -= 8;
    }
    uint64_t word = 0;
    for (size_t i = 0; i < count; i++) {
        word = word << 8 | (unsigned char)data[i];
    }
    return text__mix(hash ^ word);
}

// Pairs of numbers to pairs of numbers. An empty place has key UINT64_MAX.
typedef struct text__pair {
    uint64_t key;
    uint32_t first;
    uint32_t second;
} text__pair;

typedef struct text__pairs {
    text__pair* data;
    size_t places; // a power of two, or 0
    size_t count;
} text__pairs;

static const text__pair* text__pairs_find(const text__pairs* pairs, uint32_t a, uint32_t b) {
    if (pairs->places == 0) {
        return NULL;
    }
    uint64_t key = (uint64_t)a << 32 | b;
    size_t place = (size_t)text__mix(key) & (pairs->places - 1);
    while (pairs->data[place].key != key) {
        if (pairs->data[place].key == UINT64_MAX) {
            return NULL;
        }
        place = (place + 1) & (pairs->places - 1);
    }
    return &pairs->data[place];
}

static void text__pairs_place(text__pairs* pairs, text__pair pair) {
    size_t place = (size_t)text__mix(pair.key) & (pairs->places - 1);
    while (pairs->data[place].key != UINT64_MAX && pairs->data[place].key != pair.key) {
        place = (place + 1) & (pairs->places - 1);
    }
    pairs->count += pairs->data[place].key == UINT64_MAX ? 1 : 0;
    pairs->data[place] = pair;
}

// A later value for the same key replaces the earlier one.
static bool text__pairs_put(text__pairs* pairs, uint32_t a, uint32_t b, uint32_t first,
                            uint32_t second, text_error* error) {
    if ((pairs->count + 1) * 2 > pairs->places) {
        text__pairs grown;
        grown.places = pairs->places > 0 ? pairs->places * 2 : 64;
        grown.count = 0;
        grown.data = (text__pair*)text__zalloc(grown.places, sizeof(text__pair), error);
        TEXT__TRY(grown.data != NULL);
        memset(grown.data, 0xFF, grown.places * sizeof(text__pair));
        for (size_t i = 0; i < pairs->places; i++) {
            if (pairs->data[i].key != UINT64_MAX) {
                text__pairs_place(&grown, pairs->data[i]);
            }
        }
        TEXT_FREE(pairs->data);
        *pairs = grown;
    }
    text__pair pair;
    pair.key = (uint64_t)a << 32 | b;
    pair.first = first;
    pair.second = second;
    text__pairs_place(pairs, pair);
    return true;
}

// Byte strings to ids. The strings lie one after another in `bytes`.
typedef struct text__word {
    uint32_t at;
    uint32_t size;
    int32_t id;
} text__word;

typedef struct text__words {
    text_bytes bytes;
    text__word* data;
    size_t count;
    size_t capacity;
    uint32_t* table; // 1 + index into data, 0 is empty
    size_t places;
} text__words;

static size_t text__words_place(const text__words* words, const char* text, size_t size) {
    size_t place = (size_t)text__hash(text, size) & (words->places - 1);
    while (words->table[place] != 0) {
        const text__word* word = &words->data[words->table[place] - 1];
        if (word->size == size &&
            (size == 0 || memcmp(words->bytes.data + word->at, text, size) == 0)) {
            break;
        }
        place = (place + 1) & (words->places - 1);
    }
    return place;
}

static int32_t text__words_find(const text__words* words, const char* text, size_t size) {
    if (words->places == 0) {
        return -1;
    }
    uint32_t found = words->table[text__words_place(words, text, size)];
    return found == 0 ? -1 : words->data[found - 1].id;
}

static bool text__words_grow(text__words* words, text_error* error) {
    size_t places = words->places > 0 ? words->places * 2 : 64;
    uint32_t* table = (uint32_t*)text__zalloc(places, sizeof(uint32_t), error);
    TEXT__TRY(table != NULL);
    TEXT_FREE(words->table);
    words->table = table;
    words->places = places;
    for (size_t i = 0; i < words->count; i++) {
        const text__word* word = &words->data[i];
        table[text__words_place(words, words->bytes.data + word->at, word->size)] = (uint32_t)i + 1;
    }
    return true;
}

// The same string again gets the new id.
static bool text__words_put(text__words* words, const char* text, size_t size, int32_t id,
                            text_error* error) {
    if ((words->count + 1) * 2 > words->places) {
        TEXT__TRY(text__words_grow(words, error));
    }
    size_t place = text__words_place(words, text, size);
    if (words->table[place] != 0) {
        words->data[words->table[place] - 1].id = id;
        return true;
    }
    if (words->bytes.count + size >= UINT32_MAX || words->count >= UINT32_MAX - 1) {
        return text__fail(error, "the vocabulary is larger than 4 GiB");
    }
    void* data = words->data;
    bool good = text__reserve(&data, &words->capacity, words->count, 1, sizeof(text__word), error);
    words->data = (text__word*)data;
    TEXT__TRY(good);
    text__word* word = &words->data[words->count];
    word->at = (uint32_t)words->bytes.count;
    word->size = (uint32_t)size;
    word->id = id;
    TEXT__TRY(text_bytes_add(&words->bytes, text, size, error));
    words->count++;
    words->table[place] = (uint32_t)words->count;
    return true;
}

static void text__words_free(text__words* words) {
    text_bytes_free(&words->bytes);
    TEXT_FREE(words->data);
    TEXT_FREE(words->table);
    memset(words, 0, sizeof(*words));
}
