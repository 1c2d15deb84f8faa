static uint64_t qlora__text_mix(uint64_t x) {
    x ^= x >> 32;
    x *= 0x9E3779B97F4A7C15u;
    x ^= x >> 29;
    x *= 0xBF58476D1CE4E5B9u;
    return x ^ x >> 32;
}

static uint64_t qlora__text_hash(const char* data, size_t count) {
    uint64_t hash = 0x243F6A8885A308D3u ^ count;
    while (count >= 8) {
        uint64_t word;
        memcpy(&word, data, 8);
        hash = qlora__text_mix(hash ^ word);
        data += 8;
        count -= 8;
    }
    uint64_t word = 0;
    for (size_t i = 0; i < count; i++) {
        word = word << 8 | (unsigned char)data[i];
    }
    return qlora__text_mix(hash ^ word);
}

// Pairs of numbers to pairs of numbers. An empty place has key UINT64_MAX.
typedef struct qlora__text_pair {
    uint64_t key;
    uint32_t first;
    uint32_t second;
} qlora__text_pair;

typedef struct qlora__text_pairs {
    qlora__text_pair* data;
    size_t places; // a power of two, or 0
    size_t count;
} qlora__text_pairs;

static const qlora__text_pair* qlora__text_pairs_find(const qlora__text_pairs* pairs, uint32_t a,
                                                      uint32_t b) {
    if (pairs->places == 0) {
        return NULL;
    }
    uint64_t key = (uint64_t)a << 32 | b;
    size_t place = (size_t)qlora__text_mix(key) & (pairs->places - 1);
    while (pairs->data[place].key != key) {
        if (pairs->data[place].key == UINT64_MAX) {
            return NULL;
        }
        place = (place + 1) & (pairs->places - 1);
    }
    return &pairs->data[place];
}

static void qlora__text_pairs_place(qlora__text_pairs* pairs, qlora__text_pair pair) {
    size_t place = (size_t)qlora__text_mix(pair.key) & (pairs->places - 1);
    while (pairs->data[place].key != UINT64_MAX && pairs->data[place].key != pair.key) {
        place = (place + 1) & (pairs->places - 1);
    }
    pairs->count += pairs->data[place].key == UINT64_MAX ? 1 : 0;
    pairs->data[place] = pair;
}

static void qlora__text_pairs_free(qlora__env* env, qlora__text_pairs* pairs) {
    qlora__env_free(env, pairs->data, pairs->places * sizeof *pairs->data);
    memset(pairs, 0, sizeof *pairs);
}

// Places for `count` pairs, at most half of them used. Filling a table that fits is much faster
// than letting it grow.
static qlora_result qlora__text_pairs_reserve(qlora__env* env, qlora__text_pairs* pairs,
                                              size_t count) {
    qlora__text_pairs grown;
    grown.places = pairs->places > 0 ? pairs->places : 64;
    grown.count = 0;
    while (grown.places / 2 < count) {
        grown.places *= 2;
    }
    if (grown.places == pairs->places) {
        return QLORA_OK;
    }
    size_t bytes = 0;
    if (!qlora__mul(grown.places, sizeof(qlora__text_pair), &bytes)) {
        return qlora__env_fail(env, QLORA_ERR_MEMORY, "out of host memory");
    }
    grown.data = (qlora__text_pair*)qlora__env_alloc(env, bytes);
    if (grown.data == NULL) {
        return QLORA_ERR_MEMORY;
    }
    memset(grown.data, 0xFF, bytes);
    for (size_t i = 0; i < pairs->places; i++) {
        if (pairs->data[i].key != UINT64_MAX) {
            qlora__text_pairs_place(&grown, pairs->data[i]);
        }
    }
    qlora__text_pairs_free(env, pairs);
    *pairs = grown;
    return QLORA_OK;
}

// A later value for the same key replaces the earlier one.
static qlora_result qlora__text_pairs_put(qlora__env* env, qlora__text_pairs* pairs, uint32_t a,
                                          uint32_t b, uint32_t first, uint32_t second) {
    QLORA__TRY(qlora__text_pairs_reserve(env, pairs, pairs->count + 1));
    qlora__text_pair pair;
    pair.key = (uint64_t)a << 32 | b;
    pair.first = first;
    pair.second = second;
    qlora__text_pairs_place(pairs, pair);
    return QLORA_OK;
}

// Byte strings to ids. The strings follow one another in `bytes`.
typedef struct qlora__text_word {
    uint32_t at;
    uint32_t size;
    int32_t id;
} qlora__text_word;

typedef struct qlora__text_words {
    qlora_text_bytes bytes;
    qlora__text_word* data;
    size_t count;
    size_t capacity;
    uint32_t* table; // 1 + index into data, 0 is empty
    size_t places;
} qlora__text_words;

static size_t qlora__text_words_place(const qlora__text_words* words, const char* text,
                                      size_t size) {
    size_t place = (size_t)qlora__text_hash(text, size) & (words->places - 1);
    while (words->table[place] != 0) {
        const qlora__text_word* word = &words->data[words->table[place] - 1];
        if (word->size == size &&
            (size == 0 || memcmp(words->bytes.data + word->at, text, size) == 0)) {
            break;
        }
        place = (place + 1) & (words->places - 1);
    }
    return place;
}

static int32_t qlora__text_words_find(const qlora__text_words* words, const char* text,
                                      size_t size) {
    if (words->places == 0) {
        return -1;
    }
    uint32_t found = words->table[qlora__text_words_place(words, text, size)];
    return found == 0 ? -1 : words->data[found - 1].id;
}

// Places for `count` words, at most half of them used.
static qlora_result qlora__text_words_reserve(qlora__env* env, qlora__text_words* words,
                                              size_t count) {
    size_t places = words->places > 0 ? words->places : 64;
    while (places / 2 < count) {
        places *= 2;
    }
    if (places == words->places) {
        return QLORA_OK;
    }
    uint32_t* table = (uint32_t*)qlora__text_zalloc(env, places, sizeof(uint32_t));
    if (table == NULL) {
        return QLORA_ERR_MEMORY;
    }
    qlora__env_free(env, words->table, words->places * sizeof *words->table);
    words->table = table;
    words->places = places;
    for (size_t i = 0; i < words->count; i++) {
        const qlora__text_word* word = &words->data[i];
        table[qlora__text_words_place(words, words->bytes.data + word->at, word->size)] =
            (uint32_t)i + 1;
    }
    return QLORA_OK;
}

// A string that exists already gets the new id.
static qlora_result qlora__text_words_put(qlora__env* env, qlora__text_words* words,
                                          const char* text, size_t size, int32_t id) {
    QLORA__TRY(qlora__text_words_reserve(env, words, words->count + 1));
    size_t place = qlora__text_words_place(words, text, size);
    if (words->table[place] != 0) {
        words->data[words->table[place] - 1].id = id;
        return QLORA_OK;
    }
    if (words->bytes.count + size >= UINT32_MAX || words->count >= UINT32_MAX - 1) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "the vocabulary is larger than 4 GiB");
    }
    void* data = words->data;
    qlora_result r = qlora__text_reserve(env, &data, &words->capacity, words->count, 1,
                                         sizeof(qlora__text_word));
    words->data = (qlora__text_word*)data;
    QLORA__TRY(r);
    qlora__text_word* word = &words->data[words->count];
    word->at = (uint32_t)words->bytes.count;
    word->size = (uint32_t)size;
    word->id = id;
    QLORA__TRY(qlora__text_bytes_add(env, &words->bytes, text, size));
    words->count++;
    words->table[place] = (uint32_t)words->count;
    return QLORA_OK;
}

static void qlora__text_words_free(qlora__env* env, qlora__text_words* words) {
    qlora__text_bytes_free(env, &words->bytes);
    qlora__env_free(env, words->data, words->capacity * sizeof *words->data);
    qlora__env_free(env, words->table, words->places * sizeof *words->table);
    memset(words, 0, sizeof(*words));
}
