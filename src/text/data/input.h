// The bytes of a data file, in order, through a window that grows as far as one record needs.
//
// A decompressor replaces `read` and keeps what it needs in `state`; `unpack` opens it.

typedef struct qlora__text_input qlora__text_input;
struct qlora__text_input {
    const char* name;   // in messages
    const char* path;   // NULL: all bytes are in memory
    const char* memory; // then these
    size_t memory_size;
    // The window: data[at] is the next byte, base + at its place in the file.
    const char* data;
    size_t count;
    size_t at;
    uint64_t base;
    bool ended; // nothing follows the window
    // Opens the decompressor of a file that is compressed, else NULL.
    qlora_result (*unpack)(qlora__env* env, qlora__text_input* input);
    // Reads at most `size` bytes; *got = 0 at the end.
    qlora_result (*read)(qlora__env* env, qlora__text_input* input, char* to, size_t size,
                         size_t* got);
    void (*close)(qlora__env* env, qlora__text_input* input); // frees `state`; may be NULL
    void* state;
    void* file;
    qlora_text_bytes buffer;
};

enum { QLORA__TEXT_INPUT_STEP = 1 << 18 };

// The bytes of the file as they are on the disk.
static qlora_result qlora__text_input_file(qlora__env* env, qlora__text_input* input, char* to,
                                           size_t size, size_t* got) {
    int64_t count = env->files.read(input->file, to, size, env->files.user);
    if (count < 0 || (uint64_t)count > size) {
        int code = count < 0 ? (int)-count : EIO;
        return qlora__env_fail(env, QLORA_ERR_FILE, "cannot read %s: %s (%d)", input->name,
                               qlora__errno_text(code), code);
    }
    *got = (size_t)count;
    return QLORA_OK;
}

static qlora_result qlora__text_input_open(qlora__env* env, qlora__text_input* input) {
    if (input->unpack != NULL) {
        return input->unpack(env, input);
    }
    if (input->path == NULL) {
        input->data = input->memory;
        input->count = input->memory_size;
        input->ended = true;
        return QLORA_OK;
    }
    int code = env->files.open(input->path, QLORA_FILE_READ, &input->file, env->files.user);
    if (code != 0) {
        input->file = NULL;
        return qlora__env_fail(env, QLORA_ERR_FILE, "cannot read %s: %s (%d)", input->path,
                               qlora__errno_text(code), code);
    }
    input->read = qlora__text_input_file;
    return QLORA_OK;
}

static void qlora__text_input_close(qlora__env* env, qlora__text_input* input) {
    if (input->close != NULL) {
        input->close(env, input);
        input->close = NULL;
    }
    if (input->file != NULL) {
        env->files.close(input->file, env->files.user); // nothing was written: nothing is lost
        input->file = NULL;
    }
    qlora__text_bytes_free(env, &input->buffer);
}

// Drops the bytes before `at` and makes the window longer: at least twice as long as what is left,
// so that a long record is not looked through too often. Fails only for files.
static qlora_result qlora__text_input_more(qlora__env* env, qlora__text_input* input) {
    if (input->ended) {
        return QLORA_OK;
    }
    qlora_text_bytes* buffer = &input->buffer;
    size_t left = input->count - input->at;
    size_t wanted = left < QLORA__TEXT_INPUT_STEP ? (size_t)QLORA__TEXT_INPUT_STEP : left;
    if (input->at > 0 && left > 0) {
        memmove(buffer->data, buffer->data + input->at, left);
    }
    input->base += input->at;
    input->at = 0;
    buffer->count = left;
    QLORA__TRY(qlora__text_bytes_room(env, buffer, wanted));
    input->data = buffer->data;
    input->count = left;
    while (wanted > 0 && !input->ended) {
        size_t got = 0;
        QLORA__TRY(input->read(env, input, buffer->data + buffer->count, wanted, &got));
        buffer->count += got;
        wanted -= got;
        input->ended = got == 0;
    }
    input->count = buffer->count;
    return QLORA_OK;
}

// Makes sure that `size` bytes are in the window, unless the file ends before.
static qlora_result qlora__text_input_need(qlora__env* env, qlora__text_input* input, size_t size) {
    while (input->count - input->at < size && !input->ended) {
        QLORA__TRY(qlora__text_input_more(env, input));
    }
    return QLORA_OK;
}

static qlora_result qlora__text_input_skip_mark(qlora__env* env, qlora__text_input* input) {
    QLORA__TRY(qlora__text_input_need(env, input, 3));
    bool mark =
        input->count - input->at >= 3 && memcmp(input->data + input->at, "\xEF\xBB\xBF", 3) == 0;
    input->at += mark ? 3 : 0;
    return QLORA_OK;
}
