#ifdef QLORA__X86_BF16

// ---- AMX: products ------------------------------------------------------------------------------

// tdpbf16ps adds the products of 16 rows and 16 columns, 32 k each, to 16 x 16 sums: those of even
// and of odd k are added apart, each with a rounding, and the two results to the sum. It takes
// numbers below the smallest normal one for zero. A tile is 16 rows of 64 bytes: 32 k of a row, or
// pairs of two neighbouring k of 16 columns. Compilers do not use these registers themselves.

// Tells the thread's processor that all eight tiles have 16 rows of 64 bytes. A thread does this
// before its products and gives the registers back after them, so that they need not be saved.
static void qlora__amx_begin(void) {
    uint8_t config[64];
    memset(config, 0, sizeof config);
    config[0] = 1; // the only palette there is
    for (int i = 0; i < 8; i++) {
        config[16 + 2 * i] = 64;
        config[48 + i] = 16;
    }
    __asm__ volatile("ldtilecfg %0" ::"m"(config) : "memory");
}

static void qlora__amx_end(void) {
    __asm__ volatile("tilerelease" ::: "memory");
}

#define QLORA__TILE_LOAD(t, from, bytes)                                                           \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t ::"r"(from), "r"(bytes) : "memory")
#define QLORA__TILE_STORE(t, to, bytes)                                                            \
    __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"(to), "r"(bytes) : "memory")
#define QLORA__TILE_ZERO(t) __asm__ volatile("tilezero %%tmm" #t ::: "memory")
#define QLORA__TILE_ADD(c, a, b)                                                                   \
    __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::: "memory")

// C[32][32] += a[k][32] b[k][32]: four tiles of sums, two of a and two of b.
static void qlora__amx_tile(int64_t steps, const float* a, const float* b, float* c, int64_t ldc,
                            bool add) {
    const int64_t bytes = ldc * (int64_t)sizeof *c;
    const int64_t row = 64;
    const int64_t pair = 128;
    if (add) {
        QLORA__TILE_LOAD(0, c, bytes);
        QLORA__TILE_LOAD(1, c + 16, bytes);
        QLORA__TILE_LOAD(2, c + 16 * ldc, bytes);
        QLORA__TILE_LOAD(3, c + 16 * ldc + 16, bytes);
    } else {
        QLORA__TILE_ZERO(0);
        QLORA__TILE_ZERO(1);
        QLORA__TILE_ZERO(2);
        QLORA__TILE_ZERO(3);
    }
    for (int64_t k = 0; k < steps; k += 32) {
        QLORA__TILE_LOAD(6, b, pair);
        QLORA__TILE_LOAD(4, a, row);
        QLORA__TILE_ADD(0, 4, 6);
        QLORA__TILE_LOAD(7, b + 16, pair);
        QLORA__TILE_ADD(1, 4, 7);
        QLORA__TILE_LOAD(5, a + 256, row);
        QLORA__TILE_ADD(2, 5, 6);
        QLORA__TILE_ADD(3, 5, 7);
        a += 512;
        b += 512;
    }
    QLORA__TILE_STORE(0, c, bytes);
    QLORA__TILE_STORE(1, c + 16, bytes);
    QLORA__TILE_STORE(2, c + 16 * ldc, bytes);
    QLORA__TILE_STORE(3, c + 16 * ldc + 16, bytes);
}

// C[32][16] += a[k][32] b[k][16]
static void qlora__amx_narrow(int64_t steps, const float* a, const float* b, float* c, int64_t ldc,
                              bool add) {
    const int64_t bytes = ldc * (int64_t)sizeof *c;
    const int64_t row = 64;
    if (add) {
        QLORA__TILE_LOAD(0, c, bytes);
        QLORA__TILE_LOAD(1, c + 16 * ldc, bytes);
    } else {
        QLORA__TILE_ZERO(0);
        QLORA__TILE_ZERO(1);
    }
    for (int64_t k = 0; k < steps; k += 32) {
        QLORA__TILE_LOAD(6, b, row);
        QLORA__TILE_LOAD(4, a, row);
        QLORA__TILE_ADD(0, 4, 6);
        QLORA__TILE_LOAD(5, a + 256, row);
        QLORA__TILE_ADD(1, 5, 6);
        a += 512;
        b += 256;
    }
    QLORA__TILE_STORE(0, c, bytes);
    QLORA__TILE_STORE(1, c + 16 * ldc, bytes);
}

#undef QLORA__TILE_LOAD
#undef QLORA__TILE_STORE
#undef QLORA__TILE_ZERO
#undef QLORA__TILE_ADD

// ---- packing ------------------------------------------------------------------------------------

// Rows, 32 steps each.
static void qlora__amx_rows(const uint16_t* const* lines, int64_t n, int64_t width, int64_t line,
                            uint16_t* out) {
    out += 32 * line;
    for (int64_t k = 0; k < n; k += 32) {
        int64_t now = qlora__min(32, n - k);
        for (int i = 0; i < 8; i++) {
            if (now < 32) {
                memset(out + 32 * i, 0, 32 * sizeof *out);
            }
            memcpy(out + 32 * i, lines[i] + k, (size_t)now * sizeof *out);
        }
        out += 32 * width;
    }
}

// Four steps of two lines in each vector.
static void qlora__amx_rows_two(__m128i both, uint16_t* out) {
    _mm_storel_epi64((__m128i*)(void*)out, both);
    _mm_storel_epi64((__m128i*)(void*)(out + 32), _mm_unpackhi_epi64(both, both));
}

static void qlora__amx_rows_quad(const uint16_t* const* rows, int64_t k, int64_t n, int64_t width,
                                 int64_t jump, uint16_t* out) {
    for (int64_t i = 0; i < n; i += 8) {
        uint16_t* to = out + i / width * jump + k / 32 * 32 * width + i % width * 32 + k % 32;
        __m128i r0 = _mm_loadu_si128((const __m128i*)(const void*)(rows[0] + i));
        __m128i r1 = _mm_loadu_si128((const __m128i*)(const void*)(rows[1] + i));
        __m128i r2 = _mm_loadu_si128((const __m128i*)(const void*)(rows[2] + i));
        __m128i r3 = _mm_loadu_si128((const __m128i*)(const void*)(rows[3] + i));
        __m128i low01 = _mm_unpacklo_epi16(r0, r1);
        __m128i low23 = _mm_unpacklo_epi16(r2, r3);
        __m128i high01 = _mm_unpackhi_epi16(r0, r1);
        __m128i high23 = _mm_unpackhi_epi16(r2, r3);
        qlora__amx_rows_two(_mm_unpacklo_epi32(low01, low23), to);
        qlora__amx_rows_two(_mm_unpackhi_epi32(low01, low23), to + 64);
        qlora__amx_rows_two(_mm_unpacklo_epi32(high01, high23), to + 128);
        qlora__amx_rows_two(_mm_unpackhi_epi32(high01, high23), to + 192);
    }
}

// Columns as in tier avx512_bf16, to whole groups of 32 steps.
static void qlora__amx_columns(const uint16_t* const* lines, int64_t n, int64_t width, int64_t line,
                               uint16_t* out) {
    qlora__avx2_bf16_lines(lines, n, width, line, out);
    for (int64_t k = qlora__ceil_div(n, 8) * 8; k % 32 != 0; k += 2) {
        memset(out + k * width + 2 * line, 0, 16 * sizeof *out);
    }
}

static const qlora__cpu_bf16 qlora__amx_gemm = {
    {
        1280, // longer is faster, although the panels are in the second-level cache
        192,
        32,
        32,
        qlora__amx_tile,
        16,
        qlora__amx_narrow,
    },
    32,
    8,
    qlora__avx2_bf16_round,
    qlora__avx2_bf16_nf4,
    {qlora__amx_rows, qlora__amx_rows_quad},
    {qlora__amx_columns, qlora__avx2_bf16_quad},
    qlora__amx_begin,
    qlora__amx_end,
};

#endif // QLORA__X86_BF16
