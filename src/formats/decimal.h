#ifndef QLORA__PART_DECIMAL
#define QLORA__PART_DECIMAL

// Every reader of this floor processes untrusted bytes. It either returns a value that obeys all
// rules of its format, or fails with an error text that names the file and the fault; it never
// reads outside the bytes that were passed to it. Nothing here depends on devices.

// ---- numbers in text, independent of the C locale -----------------------------------------------

// A natural number of up to 5120 bits: enough to compare 801 digits times a power of ten with the
// neighbourhood of any double.
#define QLORA__BIG_WORDS 160
typedef struct qlora__big {
    uint32_t word[QLORA__BIG_WORDS];
    uint32_t count;
} qlora__big;

static QLORA__UNUSED void qlora__big_mul_add(qlora__big* b, uint32_t factor, uint32_t carry_in) {
    uint64_t carry = carry_in;
    for (uint32_t i = 0; i < b->count; i++) {
        carry += (uint64_t)b->word[i] * factor;
        b->word[i] = (uint32_t)carry;
        carry >>= 32;
    }
    if (carry != 0 && b->count < QLORA__BIG_WORDS) {
        b->word[b->count] = (uint32_t)carry;
        b->count++;
    }
}

static QLORA__UNUSED void qlora__big_shift(qlora__big* b, int bits) {
    for (; bits >= 31; bits -= 31) {
        qlora__big_mul_add(b, 1u << 31, 0);
    }
    qlora__big_mul_add(b, 1u << bits, 0);
}

static QLORA__UNUSED void qlora__big_mul_pow10(qlora__big* b, int power) {
    for (; power >= 9; power -= 9) {
        qlora__big_mul_add(b, 1000000000u, 0);
    }
    for (; power > 0; power--) {
        qlora__big_mul_add(b, 10u, 0);
    }
}

static QLORA__UNUSED int qlora__big_compare(const qlora__big* a, const qlora__big* b) {
    if (a->count != b->count) {
        return a->count < b->count ? -1 : 1;
    }
    for (uint32_t i = a->count; i > 0; i--) {
        if (a->word[i - 1] != b->word[i - 1]) {
            return a->word[i - 1] < b->word[i - 1] ? -1 : 1;
        }
    }
    return 0;
}

// A decimal number without a sign: digits x 10^exponent, with no leading zero. Digits after the
// 800th matter only in that they make the number a little larger: a single further digit 1
// represents them.
#define QLORA__DECIMAL_DIGITS 800
typedef struct qlora__decimal {
    uint8_t digit[QLORA__DECIMAL_DIGITS + 1];
    int count;
    int exponent;
} qlora__decimal;

// The sign of decimal - n x 2^power.
static QLORA__UNUSED int qlora__decimal_compare(const qlora__decimal* d, uint64_t n, int power) {
    qlora__big left;
    qlora__big right;
    left.count = 0;
    for (int i = 0; i < d->count; i++) {
        qlora__big_mul_add(&left, 10u, d->digit[i]);
    }
    right.word[0] = (uint32_t)n;
    right.word[1] = (uint32_t)(n >> 32);
    right.count = right.word[1] != 0 ? 2 : 1;
    qlora__big_mul_pow10(d->exponent > 0 ? &left : &right, abs(d->exponent));
    qlora__big_shift(power > 0 ? &right : &left, abs(power));
    return qlora__big_compare(&left, &right);
}

// The double nearest to d, with ties to even: an estimate that is good to a few units, followed by
// exact comparisons with the midpoints to its neighbours. Infinity if d is out of range.
static QLORA__UNUSED double qlora__decimal_to_double(const qlora__decimal* d) {
    static const double pow10[23] = {1e0,  1e1,  1e2,  1e3,  1e4,  1e5,  1e6,  1e7,
                                     1e8,  1e9,  1e10, 1e11, 1e12, 1e13, 1e14, 1e15,
                                     1e16, 1e17, 1e18, 1e19, 1e20, 1e21, 1e22};
    uint64_t bits = 0;
    double x = 0.0;
    int magnitude = d->count + d->exponent;
    if (d->count == 0 || magnitude < -330) {
        return 0.0;
    }
    if (magnitude > 310) {
        bits = 0x7FF0000000000000u;
        memcpy(&x, &bits, sizeof x);
        return x;
    }
    uint64_t lead = 0;
    int used = 0;
    for (; used < d->count && used < 18; used++) {
        lead = lead * 10 + d->digit[used];
    }
    int scale = d->exponent + d->count - used;
    x = (double)lead;
    for (; scale > 0; scale -= scale < 22 ? scale : 22) {
        x *= pow10[scale < 22 ? scale : 22];
    }
    for (; scale < 0; scale += -scale < 22 ? -scale : 22) {
        x /= pow10[-scale < 22 ? -scale : 22];
    }
    memcpy(&bits, &x, sizeof bits);
    if (bits >= 0x7FF0000000000000u) {
        bits = 0x7FEFFFFFFFFFFFFFu;
    }
    while (bits < 0x7FF0000000000000u) {
        uint64_t mantissa = bits & 0xFFFFFFFFFFFFFu;
        int exponent = (int)(bits >> 52);
        int power = (exponent == 0 ? 1 : exponent) - 1075;
        mantissa |= exponent == 0 ? 0 : (uint64_t)1 << 52;
        int above = qlora__decimal_compare(d, 2 * mantissa + 1, power - 1);
        if (above > 0 || (above == 0 && (mantissa & 1) != 0)) {
            bits++;
            continue;
        }
        if (bits == 0) {
            break;
        }
        // Just below a power of two, the neighbour is only half a step away.
        bool edge = (bits & 0xFFFFFFFFFFFFFu) == 0 && exponent > 1;
        int below = edge ? qlora__decimal_compare(d, 4 * mantissa - 1, power - 2)
                         : qlora__decimal_compare(d, 2 * mantissa - 1, power - 1);
        if (below < 0 || (below == 0 && (mantissa & 1) != 0)) {
            bits--;
            continue;
        }
        break;
    }
    memcpy(&x, &bits, sizeof x);
    return x;
}

// Converts a number in JSON syntax (already checked) to the nearest double.
static QLORA__UNUSED double qlora__number_parse(const char* text, size_t size) {
    qlora__decimal d;
    size_t i = 0;
    bool negative = size > 0 && text[0] == '-';
    bool fraction = false;
    bool more = false;
    d.count = 0;
    d.exponent = 0;
    for (i = negative ? 1 : 0; i < size && text[i] != 'e' && text[i] != 'E'; i++) {
        if (text[i] == '.') {
            fraction = true;
            continue;
        }
        // An exponent of a million is as good as any larger one, and cannot overflow.
        if (d.count == QLORA__DECIMAL_DIGITS) {
            more = more || text[i] != '0';
            d.exponent += fraction || d.exponent > 1000000 ? 0 : 1;
            continue;
        }
        if (d.count > 0 || text[i] != '0') {
            d.digit[d.count] = (uint8_t)(text[i] - '0');
            d.count++;
        }
        d.exponent -= fraction && d.exponent > -1000000 ? 1 : 0;
    }
    if (more) {
        d.digit[d.count] = 1;
        d.count++;
        d.exponent--;
    }
    if (i < size) {
        bool minus = text[i + 1] == '-';
        int power = 0;
        for (i += minus || text[i + 1] == '+' ? 2 : 1; i < size; i++) {
            power = power > 1000000 ? power : power * 10 + (text[i] - '0');
        }
        d.exponent += minus ? -power : power;
    }
    double x = qlora__decimal_to_double(&d);
    return negative ? -x : x;
}

#endif // QLORA__PART_DECIMAL
