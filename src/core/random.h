// ---- random numbers -----------------------------------------------------------------------------

// Philox 4x32 with 10 rounds: four random words that depend only on the counter and the key, so
// that any part of a stream can be recomputed, in any order, on the CPU and on the GPU.
static QLORA__UNUSED void qlora__philox(const uint32_t counter[4], const uint32_t key[2],
                                        uint32_t out[4]) {
    uint32_t c[4] = {counter[0], counter[1], counter[2], counter[3]};
    uint32_t k[2] = {key[0], key[1]};
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c[0];
        uint64_t p1 = (uint64_t)0xCD9E8D57u * c[2];
        uint32_t c1 = c[1];
        uint32_t c3 = c[3];
        c[0] = (uint32_t)(p1 >> 32) ^ c1 ^ k[0];
        c[1] = (uint32_t)p1;
        c[2] = (uint32_t)(p0 >> 32) ^ c3 ^ k[1];
        c[3] = (uint32_t)p0;
        k[0] += 0x9E3779B9u;
        k[1] += 0xBB67AE85u;
    }
    memcpy(out, c, sizeof c);
}
