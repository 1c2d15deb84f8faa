// ---- Snappy, the raw format ---------------------------------------------------------------------

// Decodes a block of which the size is known. False: the data are damaged, or give another size.
static bool qlora__snappy_decode(const uint8_t* in, size_t size, uint8_t* out, size_t wanted) {
    const uint8_t* end = in + size;
    uint64_t announced = 0;
    size_t at = 0;
    for (unsigned shift = 0;; shift += 7) {
        if (in == end || shift > 28) {
            return false;
        }
        announced |= (uint64_t)(*in & 127) << shift;
        if (*in++ < 128) {
            break;
        }
    }
    if (announced != wanted) {
        return false;
    }
    while (in < end) {
        unsigned tag = *in++;
        size_t extra = (tag & 3) == 0   ? (tag >> 2 < 60 ? 0 : (tag >> 2) - 59)
                       : (tag & 3) == 3 ? 4
                                        : tag & 3; // bytes after the tag
        if (extra > (size_t)(end - in)) {
            return false;
        }
        size_t number = 0;
        for (size_t i = 0; i < extra; i++) {
            number |= (size_t)in[i] << (8 * i);
        }
        in += extra;
        if ((tag & 3) == 0) {
            size_t length = (extra == 0 ? tag >> 2 : number) + 1;
            if (length > (size_t)(end - in) || length > wanted - at) {
                return false;
            }
            memcpy(out + at, in, length);
            in += length;
            at += length;
            continue;
        }
        bool brief = (tag & 3) == 1;
        size_t length = brief ? 4 + (tag >> 2 & 7) : (tag >> 2) + 1;
        size_t offset = brief ? (size_t)(tag >> 5) << 8 | number : number;
        if (offset == 0 || offset > at || length > wanted - at) {
            return false;
        }
        for (size_t i = 0; i < length; i++) { // they may overlap: byte by byte
            out[at + i] = out[at + i - offset];
        }
        at += length;
    }
    return at == wanted;
}
