// ---- the key/value cache of decoding ------------------------------------------------------------

// Rows of the cache of a layer: each has the keys, then the values, of a position of a text.
static qlora_tensor qlora__cache_rows(const qlora_model* m, int64_t layer, int64_t first,
                                      int64_t rows) {
    qlora_tensor t = m->texts.kv_cache;
    int64_t row = layer * m->texts.cache_all + first;
    size_t offset = (size_t)(row * t.ld) * qlora_dtype_bytes(t.dtype);
    t.data = (char*)t.data + offset;
    t.bytes -= offset;
    t.rows = rows;
    return t;
}
