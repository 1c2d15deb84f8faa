// The tiers: what the processor has, one table each, and the choice of one for a context.

// ---- detection ----------------------------------------------------------------------------------

#ifdef QLORA__X86

typedef struct qlora__cpuid {
    uint32_t eax;
    uint32_t ebx;
    uint32_t ecx;
    uint32_t edx;
} qlora__cpuid;

#if defined(__GNUC__) || defined(__clang__)

static qlora__cpuid qlora__cpuid_read(uint32_t leaf, uint32_t sub) {
    qlora__cpuid r;
    __asm__ volatile("cpuid"
                     : "=a"(r.eax), "=b"(r.ebx), "=c"(r.ecx), "=d"(r.edx)
                     : "0"(leaf), "2"(sub));
    return r;
}

// The registers that the operating system saves. An illegal instruction without OSXSAVE.
static uint32_t qlora__xcr0(void) {
    uint32_t low = 0;
    uint32_t high = 0;
    __asm__ volatile(".byte 0x0f, 0x01, 0xd0" : "=a"(low), "=d"(high) : "c"(0)); // xgetbv
    return low;
}

#else

static qlora__cpuid qlora__cpuid_read(uint32_t leaf, uint32_t sub) {
    int out[4];
    qlora__cpuid r;
    __cpuidex(out, (int)leaf, (int)sub);
    r.eax = (uint32_t)out[0];
    r.ebx = (uint32_t)out[1];
    r.ecx = (uint32_t)out[2];
    r.edx = (uint32_t)out[3];
    return r;
}

static uint32_t qlora__xcr0(void) {
    return (uint32_t)_xgetbv(0);
}

#endif

// Whether CPUID 1 ECX, CPUID 7 EBX and XCR0 have all of these bits.
static bool qlora__x86_has(uint32_t ecx1, uint32_t ebx7, uint32_t saved) {
    const uint32_t osxsave = 1u << 27;
    if (qlora__cpuid_read(0, 0).eax < 7) {
        return false;
    }
    uint32_t one = qlora__cpuid_read(1, 0).ecx;
    return (one & osxsave) != 0 && (one & ecx1) == ecx1 &&
           (qlora__cpuid_read(7, 0).ebx & ebx7) == ebx7 && (qlora__xcr0() & saved) == saved;
}

#define QLORA__CPUID_AVX2 (1u << 12 | 1u << 28 | 1u << 29) // FMA, AVX, F16C

static bool qlora__has_avx2(void) {
    return qlora__x86_has(QLORA__CPUID_AVX2, 1u << 5, 0x6);
}

static bool qlora__has_avx512(void) {
    return qlora__x86_has(QLORA__CPUID_AVX2, 1u << 5 | 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31,
                          0xe6);
}

#undef QLORA__CPUID_AVX2

#ifdef QLORA__X86_BF16

static bool qlora__has_avx512_bf16(void) {
    return qlora__has_avx512() && qlora__cpuid_read(7, 0).eax >= 1 &&
           (qlora__cpuid_read(7, 1).eax >> 5 & 1u) != 0;
}

// AMX-BF16 and AMX-TILE, next to AVX-512, whose kernels do the rest.
static bool qlora__has_amx(void) {
    const uint32_t edx7 = 1u << 22 | 1u << 24;
    const uint32_t saved = 0x60000;
    return qlora__has_avx512() && (qlora__cpuid_read(7, 0).edx & edx7) == edx7 &&
           (qlora__xcr0() & saved) == saved && qlora__os_allows_amx();
}

#endif // QLORA__X86_BF16
#endif // QLORA__X86

static bool qlora__has_everything(void) {
    return true;
}

// ---- tables -------------------------------------------------------------------------------------

// From the slowest to the fastest.
static const qlora__cpu_table qlora__cpu_tables[] = {
    {QLORA_CPU_TIER_PORTABLE, "portable", "nothing", qlora__has_everything, true, NULL,
     &qlora__rows_portable, NULL, NULL, "portable"},
#ifdef QLORA__NEON
    {QLORA_CPU_TIER_NEON, "neon", "NEON", qlora__has_everything, true, &qlora__neon_gemm,
     &qlora__rows_neon, &qlora__neon_stream, NULL, "neon"},
#endif
#ifdef QLORA__NEON_BF16
    {QLORA_CPU_TIER_NEON_BF16, "neon_bf16", "NEON with BF16", qlora__os_has_arm_bf16, true,
     &qlora__neon_gemm, &qlora__rows_neon, &qlora__neon_stream, &qlora__neon_bf16_gemm,
     "neon"},
#endif
#ifdef QLORA__X86
    {QLORA_CPU_TIER_AVX2, "avx2", "AVX2, FMA and F16C", qlora__has_avx2, true, &qlora__avx2_gemm,
     &qlora__rows_avx2, &qlora__avx2_stream, NULL, "avx2"},
    {QLORA_CPU_TIER_AVX512, "avx512", "AVX-512 F, BW, DQ and VL", qlora__has_avx512, true,
     &qlora__avx512_gemm, &qlora__rows_avx512, &qlora__avx512_stream, NULL, "avx512"},
#endif
#ifdef QLORA__X86_BF16
    {QLORA_CPU_TIER_AVX512_BF16, "avx512_bf16", "AVX-512 with BF16", qlora__has_avx512_bf16, true,
     &qlora__avx512_gemm, &qlora__rows_avx512, &qlora__avx512_stream, &qlora__avx512_bf16_gemm,
     "avx512"},
    {QLORA_CPU_TIER_AMX, "amx", "AVX-512, AMX-BF16 and Linux", qlora__has_amx, true,
     &qlora__avx512_gemm, &qlora__rows_avx512, &qlora__avx512_stream, &qlora__amx_gemm, "avx512"},
#endif
};

#define QLORA__CPU_TABLES ((int)(sizeof qlora__cpu_tables / sizeof qlora__cpu_tables[0]))

static const char* const qlora__cpu_tier_names[] = {
    "best", "portable", "neon", "avx2", "avx512", "neon_bf16", "avx512_bf16", "amx"};

const char* qlora_cpu_tier_name(qlora_cpu_tier tier) {
    return (int)tier >= 0 && tier < QLORA_CPU_TIER_COUNT ? qlora__cpu_tier_names[tier] : "unknown";
}

// The table of a tier; NULL if this build has none.
static const qlora__cpu_table* qlora__cpu_table_of(qlora_cpu_tier tier) {
    for (int i = 0; i < QLORA__CPU_TABLES; i++) {
        if (qlora__cpu_tables[i].tier == tier) {
            return &qlora__cpu_tables[i];
        }
    }
    return NULL;
}

static const qlora__cpu_table* qlora__cpu_best(void) {
    for (int i = QLORA__CPU_TABLES - 1; i > 0; i--) {
        if (qlora__cpu_tables[i].proven && qlora__cpu_tables[i].present()) {
            return &qlora__cpu_tables[i];
        }
    }
    return &qlora__cpu_tables[0];
}

bool qlora_cpu_tier_usable(qlora_cpu_tier tier) {
    const qlora__cpu_table* table = qlora__cpu_table_of(tier);
    return tier == QLORA_CPU_TIER_BEST || (table != NULL && table->present());
}

// ---- choice -------------------------------------------------------------------------------------

#ifndef QLORA__CPU_TIER_SETTING // tests of another build have another name
#define QLORA__CPU_TIER_SETTING "QLORA_CPU_TIER"
#endif

// The tiers that can be used here, as "portable, neon".
static void qlora__cpu_tiers_text(char* text, size_t size) {
    size_t used = 0;
    text[0] = '\0';
    for (int i = 0; i < QLORA__CPU_TABLES; i++) {
        if (qlora__cpu_tables[i].present()) {
            qlora__append(text, size, &used, "%s%s", used > 0 ? ", " : "",
                          qlora__cpu_tables[i].name);
        }
    }
}

// Reads the tier that the environment asks for; BEST if it asks for none.
static qlora_result qlora__cpu_tier_setting(qlora_ctx* ctx, qlora_cpu_tier* tier) {
    char name[32];
    *tier = QLORA_CPU_TIER_BEST;
    if (!qlora__os_setting(QLORA__CPU_TIER_SETTING, name, sizeof name)) {
        return QLORA_OK;
    }
    for (int i = 0; i < (int)QLORA_CPU_TIER_COUNT; i++) {
        if (strcmp(name, qlora__cpu_tier_names[i]) == 0) {
            *tier = (qlora_cpu_tier)i;
            return QLORA_OK;
        }
    }
    char usable[64];
    qlora__cpu_tiers_text(usable, sizeof usable);
    return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                       "the environment variable " QLORA__CPU_TIER_SETTING
                       " is \"%s\"; it must be best, %s",
                       name, usable);
}

// Sets ctx->cpu: the tier of the desc, or the one that the environment names, or the fastest.
static qlora_result qlora__cpu_choose(qlora_ctx* ctx) {
    qlora_cpu_tier tier = ctx->desc.cpu_tier;
    const char* from = "desc.cpu_tier";
    if (tier == QLORA_CPU_TIER_BEST) {
        QLORA__TRY(qlora__cpu_tier_setting(ctx, &tier));
        from = "the environment variable " QLORA__CPU_TIER_SETTING;
    }
    const qlora__cpu_table* table =
        tier == QLORA_CPU_TIER_BEST ? qlora__cpu_best() : qlora__cpu_table_of(tier);
    if (table == NULL || !table->present()) {
        char usable[64];
        qlora__cpu_tiers_text(usable, sizeof usable);
        return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED, "%s is %s, which needs %s; usable here: %s",
                           from, qlora_cpu_tier_name(tier),
                           table != NULL ? table->needs : "another processor or build", usable);
    }
    ctx->cpu = table;
    ctx->desc.cpu_tier = table->tier;
    return QLORA_OK;
}
