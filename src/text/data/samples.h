// Samples: kept in memory, or found again in their file.
//
// A kept sample takes 4 bytes per token and one bit that says whether it is trained; if its labels
// are not its ids, 8 bytes per token. In a stream only the place of its record is kept.

typedef struct qlora__text_record {
    union {
        const int32_t* ids; // kept, followed by bits or labels
        uint64_t hash;      // of the record, which is in the file
    } as;
    uint64_t
        place;     // of the record in the file, in bytes; for prompts, of the reference in the data
    uint32_t size; // of the record, or of the reference, there
    uint32_t part;  // which sample of the record; of a document, the first id that is in it
    uint32_t count; // tokens
    uint32_t trained;
    uint64_t line : 55;
    uint64_t answered : 1;  // it has a reference
    uint64_t chat : 1;      // it is in the chat format
    uint64_t continues : 1; // of the same record as the sample before
    uint64_t endless : 1;
    uint64_t desirable : 1;
    uint64_t kept : 1;
    uint64_t labelled : 1; // labels follow the ids, not bits
    uint64_t begins : 1;   // the bytes are the start of a document
    uint64_t ends : 1;     // the sample is its end
} qlora__text_record;

typedef struct qlora__text_block {
    int32_t* data;
    size_t used;
    size_t capacity;
} qlora__text_block;

typedef struct qlora__text_loader qlora__text_loader;

struct qlora_text_data {
    qlora_text* text;
    qlora_text_ids ids; // of the record that is being read
    qlora_text_ids labels;
    qlora__text_record* records;
    size_t count;
    size_t capacity;
    qlora__text_block* blocks;
    size_t block_count;
    size_t block_capacity;
    qlora_text_bytes
        ignored; // names that no sample used, each with ", " after it; ends with a zero
    qlora_text_bytes lacking; // names of desc.columns, in the same way
    // the record that is being read
    uint64_t place;
    uint64_t hash;
    uint32_t size;
    uint32_t part;
    bool desirable;
    bool any_chat; // a record was a conversation
    bool own_bos;  // a text begins with BOS, to which none was added
    bool endless;
    bool placed; // can be read again: nothing of it is kept
    bool begins; // as in qlora__text_record
    bool ends;
    // prompts
    bool chat;             // the record is a conversation
    const char* reference; // the answer of the record, or NULL
    size_t reference_size;
    qlora_text_bytes references; // of all records
    // a stream
    qlora__text_loader* loader; // NULL: everything is kept
    bool again;                 // a record is read again, for the sample number `wanted` of it
    bool found;
    uint32_t wanted;
    uint32_t wanted_count;
    qlora_text_ids shown[2]; // ids and labels of the sample that was read last
    qlora_text_bytes bytes;  // the record of that sample
};

// One block holds many samples, so that growing copies nothing.
enum { QLORA__TEXT_BLOCK_MIN = 1 << 12, QLORA__TEXT_BLOCK_MAX = 1 << 18 };

static qlora_result qlora__text_block_take(qlora__env* env, qlora_text_data* data, size_t words,
                                           int32_t** out) {
    qlora__text_block* last = data->block_count > 0 ? &data->blocks[data->block_count - 1] : NULL;
    if (last == NULL || last->capacity - last->used < words) {
        void* blocks = data->blocks;
        qlora_result r = qlora__text_reserve(env, &blocks, &data->block_capacity, data->block_count,
                                             1, sizeof(qlora__text_block));
        data->blocks = (qlora__text_block*)blocks;
        QLORA__TRY(r);
        size_t capacity = last == NULL ? (size_t)QLORA__TEXT_BLOCK_MIN : last->capacity * 2;
        capacity = capacity < QLORA__TEXT_BLOCK_MAX ? capacity : (size_t)QLORA__TEXT_BLOCK_MAX;
        capacity = capacity < words ? words : capacity;
        last = &data->blocks[data->block_count];
        last->data = (int32_t*)qlora__text_zalloc(env, capacity, sizeof(int32_t));
        if (last->data == NULL) {
            return QLORA_ERR_MEMORY;
        }
        last->used = 0;
        last->capacity = capacity;
        data->block_count++;
    }
    *out = last->data + last->used;
    last->used += words;
    return QLORA_OK;
}

// Keeps a sample with what is trained of it.
static qlora_result qlora__text_sample_keep(qlora__env* env, qlora_text_data* data,
                                            const int32_t* ids, const int32_t* labels,
                                            qlora__text_record* record) {
    size_t count = record->count;
    int32_t* kept = NULL;
    bool labelled = false;
    for (size_t i = 0; i < count; i++) {
        labelled = labelled || (labels[i] != -100 && labels[i] != ids[i]);
    }
    record->labelled = labelled ? 1 : 0;
    size_t words = labelled ? count : (count + 31) / 32;
    // an empty sample points to something as well
    QLORA__TRY(qlora__text_block_take(env, data, count + words + (count == 0 ? 1 : 0), &kept));
    record->as.ids = kept;
    if (count == 0) {
        return QLORA_OK;
    }
    memcpy(kept, ids, count * sizeof(int32_t));
    if (labelled) {
        memcpy(kept + count, labels, count * sizeof(int32_t));
        return QLORA_OK;
    }
    for (size_t word = 0; word < words; word++) {
        uint32_t bits = 0;
        for (size_t i = 32 * word; i < 32 * word + 32 && i < count; i++) {
            bits |= labels[i] != -100 ? 1u << (i % 32) : 0u;
        }
        memcpy(kept + count + word, &bits, sizeof bits);
    }
    return QLORA_OK;
}

// A sample of a record that is read again: only the wanted one is taken.
static qlora_result qlora__text_sample_again(qlora__env* env, qlora_text_data* data,
                                             const int32_t* ids, const int32_t* labels,
                                             size_t count) {
    const int32_t* from[2] = {ids, labels};
    bool wanted = data->part++ == data->wanted;
    for (int i = 0; i < 2 && wanted; i++) {
        data->shown[i].count = 0;
        QLORA__TRY(qlora__text_ids_room(env, &data->shown[i], count + 1));
        if (count > 0) {
            memcpy(data->shown[i].data, from[i], count * sizeof(int32_t));
        }
        data->shown[i].count = count;
    }
    data->found = data->found || wanted;
    return QLORA_OK;
}

// Keeps the answer of a prompt.
static qlora_result qlora__text_sample_answer(qlora__env* env, qlora_text_data* data,
                                              qlora__text_record* record) {
    record->chat = data->chat ? 1 : 0;
    record->answered = data->reference != NULL ? 1 : 0;
    if (data->reference == NULL) {
        return QLORA_OK;
    }
    if (data->reference_size > UINT32_MAX) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "an answer of %llu bytes; the limit is %llu",
                               (unsigned long long)data->reference_size,
                               (unsigned long long)UINT32_MAX);
    }
    record->place = data->references.count;
    record->size = (uint32_t)data->reference_size;
    QLORA__TRY(qlora__text_bytes_room(env, &data->references, 1)); // an empty one has a place
    return qlora__text_bytes_add(env, &data->references, data->reference, data->reference_size);
}

// Adds a sample. `continues`: of the same record as the one before.
static qlora_result qlora__text_sample_close(qlora__env* env, qlora_text_data* data,
                                             const int32_t* ids, const int32_t* labels,
                                             size_t count, size_t line, bool continues) {
    if (data->again) {
        return qlora__text_sample_again(env, data, ids, labels, count);
    }
    void* records = data->records;
    qlora_result r = qlora__text_reserve(env, &records, &data->capacity, data->count, 1,
                                         sizeof(qlora__text_record));
    data->records = (qlora__text_record*)records;
    QLORA__TRY(r);
    if (count > UINT32_MAX) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "a sample of %llu tokens; the limit is %llu",
                               (unsigned long long)count, (unsigned long long)UINT32_MAX);
    }
    qlora__text_record* record = &data->records[data->count];
    memset(record, 0, sizeof *record);
    record->place = data->place;
    record->size = data->size;
    record->part = data->part++;
    record->count = (uint32_t)count;
    record->line = line & (UINT64_MAX >> 9);
    record->continues = continues ? 1 : 0;
    record->endless = data->endless ? 1 : 0;
    record->desirable = data->desirable ? 1 : 0;
    record->kept = data->placed ? 0 : 1;
    record->begins = data->begins ? 1 : 0;
    record->ends = data->ends ? 1 : 0;
    record->as.hash = data->hash;
    for (size_t i = 1; i < count; i++) {
        record->trained += labels[i] != -100 ? 1 : 0;
    }
    if (!data->placed) {
        QLORA__TRY(qlora__text_sample_keep(env, data, ids, labels, record));
    }
    QLORA__TRY(qlora__text_sample_answer(env, data, record));
    data->count++;
    return QLORA_OK;
}

// Everything from `begin` becomes one sample.
static qlora_result qlora__text_data_close_record(qlora__env* env, qlora_text_data* data,
                                                  size_t begin, size_t line) {
    // even an empty sample has arrays to point into
    QLORA__TRY(qlora__text_ids_room(env, &data->ids, 1));
    QLORA__TRY(qlora__text_ids_room(env, &data->labels, 1));
    QLORA__TRY(qlora__text_sample_close(env, data, data->ids.data + begin,
                                        data->labels.data + begin, data->ids.count - begin, line,
                                        data->part > 0));
    data->ids.count = begin;
    data->labels.count = begin;
    return QLORA_OK;
}

// Gives back the memory that was meant for more samples.
static void qlora__text_samples_fit(qlora__env* env, qlora_text_data* data) {
    size_t element = sizeof(qlora__text_record);
    if (data->count > 0 && data->count < data->capacity) {
        void* fit = qlora__env_realloc(env, data->records, data->count * element,
                                       data->capacity * element, data->count * element);
        if (fit == NULL) { // the larger memory does as well
            env->error[0] = 0;
            return;
        }
        data->records = (qlora__text_record*)fit;
        data->capacity = data->count;
    }
}

// The labels of a kept sample, in memory that the next call uses again.
static qlora_result qlora__text_sample_labels(qlora__env* env, qlora_text_data* data,
                                              const qlora__text_record* record,
                                              const int32_t** labels) {
    const int32_t* ids = record->as.ids;
    if (record->labelled != 0) {
        *labels = ids + record->count;
        return QLORA_OK;
    }
    qlora_text_ids* shown = &data->shown[1];
    shown->count = 0;
    QLORA__TRY(qlora__text_ids_room(env, shown, (size_t)record->count + 1));
    for (size_t i = 0; i < record->count; i++) {
        uint32_t bits = (uint32_t)ids[record->count + i / 32];
        shown->data[i] = (bits >> (i % 32) & 1u) != 0 ? ids[i] : -100;
    }
    *labels = shown->data;
    return QLORA_OK;
}

static qlora_result qlora__text_label_rest(qlora__env* env, qlora_text_data* data, bool trained) {
    size_t from = data->labels.count;
    size_t count = data->ids.count > from ? data->ids.count - from : 0;
    QLORA__TRY(qlora__text_ids_room(env, &data->labels, count));
    for (size_t i = from; i < from + count; i++) {
        data->labels.data[i] = trained ? data->ids.data[i] : -100;
    }
    data->labels.count += count;
    return QLORA_OK;
}
