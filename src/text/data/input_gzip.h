// Data files inside gzip: the decompressed bytes are read like those of any other file. Only a
// window of them is held, so that it does not matter how much a file becomes.

typedef struct qlora__text_gzip {
    qlora__gzip gzip;
    qlora__map map;
    size_t at;    // end of the decompressed bytes in the window
    size_t given; // how many of them have been passed on
    bool ended;
    uint8_t window[4 * QLORA__INFLATE_WINDOW];
} qlora__text_gzip;

static qlora_result qlora__text_gzip_read(qlora__env* env, qlora__text_input* input, char* to,
                                          size_t size, size_t* got) {
    qlora__text_gzip* g = (qlora__text_gzip*)input->state;
    if (g->given == g->at && !g->ended) {
        if (g->at > QLORA__INFLATE_WINDOW) {
            memmove(g->window, g->window + g->at - QLORA__INFLATE_WINDOW, QLORA__INFLATE_WINDOW);
            g->at = QLORA__INFLATE_WINDOW;
            g->given = g->at;
        }
        qlora_result r =
            qlora__gzip_read(env, &g->gzip, g->window, &g->at, sizeof g->window, &g->ended);
        if (r != QLORA_OK) { // not the fault of one record: nothing can follow
            return qlora__env_wrap(env, QLORA_ERR_FILE, "%s: ", input->name);
        }
    }
    *got = g->at - g->given < size ? g->at - g->given : size;
    if (*got > 0) {
        memcpy(to, g->window + g->given, *got);
        g->given += *got;
    }
    return QLORA_OK;
}

static void qlora__text_gzip_close(qlora__env* env, qlora__text_input* input) {
    qlora__text_gzip* g = (qlora__text_gzip*)input->state;
    if (g != NULL) {
        qlora__map_close(env, &g->map);
        qlora__env_free(env, g, sizeof *g);
        input->state = NULL;
    }
}

static qlora_result qlora__text_gzip_open(qlora__env* env, qlora__text_input* input) {
    qlora__text_gzip* g = (qlora__text_gzip*)qlora__text_zalloc(env, 1, sizeof *g);
    if (g == NULL) {
        return QLORA_ERR_MEMORY;
    }
    input->state = g;
    input->close = qlora__text_gzip_close;
    input->read = qlora__text_gzip_read;
    input->data = "";
    if (input->path != NULL) {
        QLORA__TRY(qlora__map_open(env, input->path, &g->map));
        qlora__gzip_begin(&g->gzip, g->map.data, (size_t)g->map.size);
    } else {
        qlora__gzip_begin(&g->gzip, (const uint8_t*)input->memory, input->memory_size);
    }
    return QLORA_OK;
}
