// Filters for HTML: striptags, urlize, xmlattr.

// ---- striptags ----------------------------------------------------------------------------------

typedef struct qlora__jin_entity {
    const char* name;
    uint32_t code;
} qlora__jin_entity;

// The names that HTML also reads without a semicolon: those of Latin-1, from U+00A0 on, and a few.
static const char qlora__jin_latin_names[] =
    "nbsp iexcl cent pound curren yen brvbar sect uml copy ordf laquo not shy reg macr deg plusmn "
    "sup2 sup3 acute micro para middot cedil sup1 ordm raquo frac14 frac12 frac34 iquest Agrave "
    "Aacute Acirc Atilde Auml Aring AElig Ccedil Egrave Eacute Ecirc Euml Igrave Iacute Icirc Iuml "
    "ETH Ntilde Ograve Oacute Ocirc Otilde Ouml times Oslash Ugrave Uacute Ucirc Uuml Yacute THORN "
    "szlig agrave aacute acirc atilde auml aring aelig ccedil egrave eacute ecirc euml igrave "
    "iacute icirc iuml eth ntilde ograve oacute ocirc otilde ouml divide oslash ugrave uacute "
    "ucirc uuml yacute thorn yuml";
static const qlora__jin_entity qlora__jin_short_entities[] = {
    {"amp", '&'}, {"lt", '<'}, {"gt", '>'},   {"quot", '"'},  {"AMP", '&'},
    {"LT", '<'},  {"GT", '>'}, {"QUOT", '"'}, {"COPY", 0xA9}, {"REG", 0xAE}};
// Names that need their semicolon. HTML has 2,000 more, which are refused.
static const qlora__jin_entity qlora__jin_entities[] = {
    {"apos", '\''},     {"hellip", 0x2026}, {"mdash", 0x2014},  {"ndash", 0x2013},
    {"lsquo", 0x2018},  {"rsquo", 0x2019},  {"ldquo", 0x201C},  {"rdquo", 0x201D},
    {"sbquo", 0x201A},  {"bdquo", 0x201E},  {"bull", 0x2022},   {"trade", 0x2122},
    {"euro", 0x20AC},   {"rarr", 0x2192},   {"larr", 0x2190},   {"uarr", 0x2191},
    {"darr", 0x2193},   {"harr", 0x2194},   {"le", 0x2264},     {"ge", 0x2265},
    {"ne", 0x2260},     {"ensp", 0x2002},   {"emsp", 0x2003},   {"thinsp", 0x2009},
    {"zwnj", 0x200C},   {"zwj", 0x200D},    {"prime", 0x2032},  {"dagger", 0x2020},
    {"permil", 0x2030}, {"lsaquo", 0x2039}, {"rsaquo", 0x203A}, {"infin", 0x221E},
    {"minus", 0x2212},  {"asymp", 0x2248},  {"equiv", 0x2261}};

// The character of a name, or 0. `closed`: a semicolon follows.
static uint32_t qlora__jin_entity_of(const char* name, size_t size, bool closed) {
    uint32_t code = 0xA0;
    for (const char* at = qlora__jin_latin_names; *at != '\0'; code++) {
        size_t length = strcspn(at, " ");
        if (length == size && memcmp(at, name, size) == 0) {
            return code;
        }
        at += length + (at[length] == ' ' ? 1 : 0);
    }
    for (size_t i = 0; i < QLORA__TEXT_COUNT(qlora__jin_short_entities); i++) {
        if (qlora__jin_named(qlora__jin_short_entities[i].name, name, size)) {
            return qlora__jin_short_entities[i].code;
        }
    }
    for (size_t i = 0; closed && i < QLORA__TEXT_COUNT(qlora__jin_entities); i++) {
        if (qlora__jin_named(qlora__jin_entities[i].name, name, size)) {
            return qlora__jin_entities[i].code;
        }
    }
    return 0;
}

// A number as HTML 5 reads it: some mean characters of Windows, some are left out.
static qlora_result qlora__jin_put_reference(qlora__jin_machine* m, uint32_t code,
                                             qlora__jin_buffer* out) {
    static const uint16_t windows[32] = {
        0x20AC, 0x81,   0x201A, 0x192,  0x201E, 0x2026, 0x2020, 0x2021, 0x2C6,  0x2030, 0x160,
        0x2039, 0x152,  0x8D,   0x17D,  0x8F,   0x90,   0x2018, 0x2019, 0x201C, 0x201D, 0x2022,
        0x2013, 0x2014, 0x2DC,  0x2122, 0x161,  0x203A, 0x153,  0x9D,   0x17E,  0x178};
    if (code >= 0x80 && code <= 0x9F) {
        return qlora__jin_put_code(m, out, windows[code - 0x80]);
    }
    if (code == 0 || (code >= 0xD800 && code <= 0xDFFF) || code > 0x10FFFF) {
        return qlora__jin_put_code(m, out, 0xFFFD);
    }
    bool left_out = (code < 0x20 && code != '\t' && code != '\n' && code != '\f' && code != '\r') ||
                    code == 0x7F || (code >= 0xFDD0 && code <= 0xFDEF) || (code & 0xFFFE) == 0xFFFE;
    return left_out ? QLORA_OK : qlora__jin_put_code(m, out, code);
}

// A number behind "&#"; *at moves behind it. Nothing is written when it is none.
static qlora_result qlora__jin_put_number(qlora__jin_machine* m, const qlora__jin_string* s,
                                          size_t* at, qlora__jin_buffer* out) {
    size_t next = *at + 2;
    bool hex = next < s->bytes && (s->data[next] | 0x20) == 'x';
    uint32_t code = 0;
    next += hex ? 1 : 0;
    size_t digits = next;
    for (; next < s->bytes; next++) {
        int64_t digit = qlora__jin_digit_value(s->data[next]);
        if (digit >= (hex ? 16 : 10)) {
            break;
        }
        code = code > 0x110000 ? code : code * (hex ? 16u : 10u) + (uint32_t)digit;
    }
    if (next == digits) {
        return QLORA_OK;
    }
    *at = next + (next < s->bytes && s->data[next] == ';' ? 1 : 0);
    return qlora__jin_put_reference(m, code, out);
}

// A name behind "&": the longest that is known.
static qlora_result qlora__jin_put_named(qlora__jin_machine* m, const qlora__jin_string* s,
                                         size_t* at, qlora__jin_buffer* out) {
    const char* name = s->data + *at + 1;
    size_t size = 0;
    size_t chars = 0;
    while (*at + 1 + size < s->bytes && strchr("\t\n\f <&#;", name[size]) == NULL) {
        bool first = ((unsigned char)name[size] & 0xC0) != 0x80;
        if (first && chars == 32) {
            break;
        }
        chars += first ? 1 : 0;
        size++;
    }
    bool closed = *at + 1 + size < s->bytes && name[size] == ';';
    uint32_t code = size > 0 ? qlora__jin_entity_of(name, size, closed) : 0;
    bool letters = true; // names of HTML have nothing else, except digits
    for (size_t i = 0; i < size; i++) {
        char c = name[i];
        letters = letters && ((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
                              (c >= '0' && c <= '9'));
    }
    if (code == 0 && closed && size > 1 && letters) {
        return qlora__jin_fail(m, "striptags: the character reference \"&%.*s;\" is not supported",
                               (int)(size < 60 ? size : 60), name);
    }
    closed = code != 0 && closed;
    while (code == 0 && size > 2) {
        size--;
        code = qlora__jin_entity_of(name, size, false);
    }
    if (code != 0) {
        *at += 1 + size + (closed ? 1 : 0);
        return qlora__jin_put_code(m, out, code);
    }
    return QLORA_OK;
}

// html.unescape().
static qlora_result qlora__jin_unescape(qlora__jin_machine* m, const qlora__jin_string* s,
                                        qlora__jin_buffer* out) {
    for (size_t at = 0; at < s->bytes;) {
        size_t before = at;
        if (s->data[at] == '&' && at + 1 < s->bytes) {
            QLORA__TRY(qlora__jin_work(m, s->data[at + 1] == '#' ? 2 : 200));
            QLORA__TRY(s->data[at + 1] == '#' ? qlora__jin_put_number(m, s, &at, out)
                                              : qlora__jin_put_named(m, s, &at, out));
        }
        if (at == before) {
            QLORA__TRY(qlora__jin_put(m, out, s->data + at, 1));
            at++;
        }
    }
    return QLORA_OK;
}

QLORA__JIN_FILTER(striptags) {
    qlora__jin_value text;
    qlora__jin_value words;
    qlora__jin_buffer plain;
    qlora__jin_buffer joined;
    qlora__jin_buffer result;
    size_t at = 0;
    memset(&plain, 0, sizeof plain);
    memset(&joined, 0, sizeof joined);
    memset(&result, 0, sizeof result);
    QLORA__TRY(qlora__jin_text(m, in[0], &text));
    const qlora__jin_string* s = text.as.string;
    for (;;) {
        size_t open = qlora__jin_find_bytes(s->data, s->bytes, at, "<", 1);
        bool comment =
            open != SIZE_MAX && s->bytes - open >= 4 && memcmp(s->data + open, "<!--", 4) == 0;
        size_t close = open == SIZE_MAX ? SIZE_MAX
                       : comment ? qlora__jin_find_bytes(s->data, s->bytes, open + 4, "-->", 3)
                                 : qlora__jin_find_bytes(s->data, s->bytes, open, ">", 1);
        if (close == SIZE_MAX) {
            break;
        }
        QLORA__TRY(qlora__jin_work(m, 1));
        QLORA__TRY(qlora__jin_put(m, &plain, s->data + at, open - at));
        at = close + (comment ? 3 : 1);
    }
    QLORA__TRY(qlora__jin_put(m, &plain, s->data + at, s->bytes - at));
    QLORA__TRY(qlora__jin_buffer_string(m, &plain, &text));
    QLORA__TRY(qlora__jin_split(m, text, qlora__jin_none(), -1, &words));
    for (size_t i = 0; i < words.as.list->count; i++) {
        if (i > 0) {
            QLORA__TRY(qlora__jin_puts(m, &joined, " "));
        }
        QLORA__TRY(qlora__jin_print(m, words.as.list->items[i], &joined));
    }
    QLORA__TRY(qlora__jin_buffer_string(m, &joined, &text));
    QLORA__TRY(qlora__jin_unescape(m, text.as.string, &result));
    return qlora__jin_buffer_string(m, &result, out);
}

// ---- xmlattr ------------------------------------------------------------------------------------

QLORA__JIN_FILTER(xmlattr) {
    qlora__jin_buffer buffer;
    memset(&buffer, 0, sizeof buffer);
    if (in[0].kind != QLORA__JIN_DICT) {
        return in[0].kind == QLORA__JIN_UNDEFINED
                   ? qlora__jin_undefined_error(m, in[0])
                   : qlora__jin_fail(m, "xmlattr: a dictionary is needed, not a %s",
                                     qlora__jin_type(in[0]));
    }
    bool space = in[1].kind == QLORA__JIN_MISSING || qlora__jin_truth(in[1]);
    for (size_t i = 0; i < in[0].as.dict->count; i++) {
        qlora__jin_value key = in[0].as.dict->keys[i];
        qlora__jin_value value = in[0].as.dict->values[i];
        if (value.kind == QLORA__JIN_NONE || value.kind == QLORA__JIN_UNDEFINED) {
            continue;
        }
        QLORA__TRY(qlora__jin_need_string(m, "xmlattr", key));
        const qlora__jin_string* name = key.as.string;
        for (size_t k = 0; k < name->bytes; k++) {
            if (name->data[k] != '\0' && strchr(" \t\n\r\f\v/>=", name->data[k]) != NULL) {
                return qlora__jin_fail(m, "xmlattr: \"%.*s\" cannot be the name of an attribute",
                                       (int)(name->bytes < 60 ? name->bytes : 60), name->data);
            }
        }
        if (space || buffer.count > 0) {
            QLORA__TRY(qlora__jin_puts(m, &buffer, " "));
        }
        QLORA__TRY(qlora__jin_escape_html(m, key, &buffer));
        QLORA__TRY(qlora__jin_puts(m, &buffer, "=\""));
        QLORA__TRY(qlora__jin_escape_html(m, value, &buffer));
        QLORA__TRY(qlora__jin_puts(m, &buffer, "\""));
    }
    return qlora__jin_buffer_string(m, &buffer, out);
}

// ---- urlize -------------------------------------------------------------------------------------

// Letters for a pattern that ignores case: four more than those of ASCII are equal to one of them.
static uint32_t qlora__jin_url_fold(uint32_t code) {
    return code >= 'A' && code <= 'Z'       ? code + 32
           : code == 0x17F                  ? (uint32_t)'s'
           : code == 0x130 || code == 0x131 ? (uint32_t)'i'
           : code == 0x212A                 ? (uint32_t)'k'
                                            : code;
}

// Whether a word of ASCII is at `at`, in any case.
static bool qlora__jin_line_has(const qlora__jin_line* line, size_t at, const char* word) {
    while (*word != '\0' && at < line->count &&
           qlora__jin_url_fold(line->codes[at]) == (uint32_t)(unsigned char)*word) {
        word++;
        at++;
    }
    return *word == '\0';
}

static bool qlora__jin_is_label(uint32_t code) {
    return code == '%' || code == '-' || qlora__jin_is_word(code);
}

// What may follow a host: a port, then a path. True when the line ends as it must.
static bool qlora__jin_url_rest(const qlora__jin_line* line, size_t at) {
    if (at < line->count && line->codes[at] == ':') {
        size_t digits = at + 1;
        while (digits < line->count && qlora__jin_is_decimal(line->codes[digits])) {
            digits++;
        }
        if (digits == at + 1 || digits > at + 6) {
            return false;
        }
        at = digits;
    }
    return at == line->count || line->codes[at] == '/' || line->codes[at] == '?' ||
           line->codes[at] == '#';
}

// A host whose names are separated by points: from `at` on, names of `least` to `most` characters.
// With a scheme the last one is of letters, or that of another script; else it is a usual one.
static bool qlora__jin_url_host(const qlora__jin_line* line, size_t at, bool scheme) {
    static const char* const usual[] = {"com", "net", "int", "edu", "gov", "org", "info", "mil"};
    size_t least = scheme ? 1 : 2;
    size_t most = scheme ? SIZE_MAX : 63;
    for (bool first = true;; first = false) {
        size_t end = at;
        for (size_t i = 0; !scheme && !first && i < QLORA__TEXT_COUNT(usual); i++) {
            if (qlora__jin_line_has(line, at, usual[i]) &&
                qlora__jin_url_rest(line, at + strlen(usual[i]))) {
                return true;
            }
        }
        if (scheme) {
            while (end < line->count && qlora__jin_url_fold(line->codes[end]) >= 'a' &&
                   qlora__jin_url_fold(line->codes[end]) <= 'z') {
                end++;
            }
            if (end - at >= 2 && end - at <= 63 && qlora__jin_url_rest(line, end)) {
                return true;
            }
            size_t start = at + 4;
            for (end = start; end < line->count && line->codes[end] != '-' &&
                              qlora__jin_is_label(line->codes[end]);
                 end++) {
            }
            if (qlora__jin_line_has(line, at, "xn--") && end >= start + 2 && end <= start + 59 &&
                qlora__jin_url_rest(line, end)) {
                return true;
            }
        }
        for (end = at; end < line->count && qlora__jin_is_label(line->codes[end]); end++) {
        }
        if (end - at < least || end - at > most || end == line->count || line->codes[end] != '.') {
            return false;
        }
        at = end + 1;
    }
}

// Up to `most` digits, of any script or hexadecimal ones too; returns where they end.
static size_t qlora__jin_url_digits(const qlora__jin_line* line, size_t at, size_t most, bool hex) {
    for (size_t end = at + most; at < end && at < line->count; at++) {
        uint32_t code = qlora__jin_url_fold(line->codes[at]);
        if (!qlora__jin_is_decimal(code) && !(hex && code >= 'a' && code <= 'f')) {
            break;
        }
    }
    return at;
}

// The address of a machine: four numbers, or hexadecimal ones in brackets.
static bool qlora__jin_url_address(const qlora__jin_line* line, size_t at) {
    if (at < line->count && line->codes[at] == '[') {
        at++;
        for (int group = 0; group < 8; group++) {
            at = qlora__jin_url_digits(line, at, 4, true);
            bool colon = at < line->count && line->codes[at] == ':';
            if (group < 2 && !colon) {
                return false;
            }
            at += colon ? 1 : 0;
        }
        return at < line->count && line->codes[at] == ']' && qlora__jin_url_rest(line, at + 1);
    }
    for (int part = 0; part < 4; part++) {
        if (part > 0 && (at >= line->count || line->codes[at] != '.')) {
            return false;
        }
        at += part > 0 ? 1 : 0;
        size_t end = qlora__jin_url_digits(line, at, 3, false);
        if (end == at) {
            return false;
        }
        at = end;
    }
    return qlora__jin_url_rest(line, at);
}

static bool qlora__jin_is_url(const qlora__jin_line* line) {
    size_t scheme = qlora__jin_line_has(line, 0, "https://")  ? 8
                    : qlora__jin_line_has(line, 0, "http://") ? 7
                                                              : 0;
    bool www = qlora__jin_line_has(line, 0, "www.");
    return (scheme > 0 &&
            (qlora__jin_url_host(line, scheme, true) || qlora__jin_url_address(line, scheme))) ||
           (www && qlora__jin_url_host(line, 4, true)) || qlora__jin_url_host(line, 0, false);
}

// An address of electronic mail, from `begin` on.
static bool qlora__jin_is_mail(const qlora__jin_line* line, size_t begin) {
    size_t at = line->count;
    size_t point = 0;
    while (at > begin && line->codes[at - 1] != '@') {
        at--;
    }
    if (at < begin + 2 || at >= line->count || !qlora__jin_is_word(line->codes[at])) {
        return false;
    }
    for (size_t i = at; i < line->count; i++) {
        uint32_t code = line->codes[i];
        if (code != '.' && code != '-' && !qlora__jin_is_word(code)) {
            return false;
        }
        point = code == '.' ? i : code == '-' ? 0 : point; // 0: no point, or a dash behind it
    }
    return point > 0 && point + 1 < line->count;
}

typedef struct qlora__jin_links {
    qlora__jin_value attributes; // rel and target, as text
    qlora__jin_value limit;
    qlora__jin_value schemes;
    qlora__jin_buffer* out;
} qlora__jin_links;

static bool qlora__jin_starts(const char* data, size_t size, const char* with) {
    return size >= strlen(with) && memcmp(data, with, strlen(with)) == 0;
}

static size_t qlora__jin_count_in(const char* data, size_t size, const char* part) {
    size_t count = 0;
    size_t at = 0;
    while ((at = qlora__jin_find_bytes(data, size, at, part, strlen(part))) != SIZE_MAX) {
        at += strlen(part);
        count++;
    }
    return count;
}

// <a href="BEFORE text"ATTRIBUTES>SHOWN</a>
static qlora_result qlora__jin_put_link(qlora__jin_machine* m, const qlora__jin_links* links,
                                        const char* before, qlora__jin_value text, bool attributes,
                                        qlora__jin_value shown) {
    QLORA__TRY(qlora__jin_puts(m, links->out, "<a href=\""));
    QLORA__TRY(qlora__jin_puts(m, links->out, before));
    QLORA__TRY(qlora__jin_print(m, text, links->out));
    QLORA__TRY(qlora__jin_puts(m, links->out, "\""));
    if (attributes) {
        QLORA__TRY(qlora__jin_print(m, links->attributes, links->out));
    }
    QLORA__TRY(qlora__jin_puts(m, links->out, ">"));
    QLORA__TRY(qlora__jin_print(m, shown, links->out));
    return qlora__jin_puts(m, links->out, "</a>");
}

// The text that a link shows: cut at the limit.
static qlora_result qlora__jin_link_text(qlora__jin_machine* m, const qlora__jin_links* links,
                                         qlora__jin_value text, qlora__jin_value* out) {
    int64_t limit = 0;
    *out = text;
    if (!qlora__jin_given(links->limit)) {
        return QLORA_OK;
    }
    if (links->limit.kind == QLORA__JIN_FLOAT && text.as.string->chars <= 1) {
        return qlora__jin_fail(m, "urlize: a limit that is a float is not supported");
    }
    QLORA__TRY(qlora__jin_need_integer(m, "urlize", links->limit, &limit));
    if ((int64_t)text.as.string->chars > limit) {
        qlora__jin_value parts[3];
        qlora__jin_value dots;
        bool found = false;
        parts[0] = qlora__jin_none();
        parts[1] = qlora__jin_int(limit);
        parts[2] = qlora__jin_none();
        QLORA__TRY(qlora__jin_slice(m, text, parts, out, &found));
        QLORA__TRY(qlora__jin_string_of(m, "...", &dots));
        return qlora__jin_join_strings(m, *out, dots, out);
    }
    return QLORA_OK;
}

// A word without brackets and marks around it: a link if it is one.
static qlora_result qlora__jin_put_word(qlora__jin_machine* m, const qlora__jin_links* links,
                                        qlora__jin_value word) {
    const qlora__jin_string* s = word.as.string;
    qlora__jin_line line;
    qlora__jin_value shown = word;
    QLORA__TRY(qlora__jin_line_make(m, s, &line));
    if (qlora__jin_is_url(&line)) {
        bool scheme = qlora__jin_starts(s->data, s->bytes, "https://") ||
                      qlora__jin_starts(s->data, s->bytes, "http://");
        QLORA__TRY(qlora__jin_link_text(m, links, word, &shown));
        return qlora__jin_put_link(m, links, scheme ? "" : "https://", word, true, shown);
    }
    if (qlora__jin_starts(s->data, s->bytes, "mailto:") && qlora__jin_is_mail(&line, 7)) {
        QLORA__TRY(qlora__jin_part(m, word, 7, s->bytes, &shown));
        return qlora__jin_put_link(m, links, "", word, false, shown);
    }
    if (s->bytes > 0 && !qlora__jin_starts(s->data, s->bytes, "www.") && s->data[0] != '@' &&
        memchr(s->data, ':', s->bytes) == NULL && qlora__jin_is_mail(&line, 0)) {
        return qlora__jin_put_link(m, links, "mailto:", word, false, word);
    }
    for (size_t i = 0; i < links->schemes.as.list->count; i++) {
        const qlora__jin_string* scheme = links->schemes.as.list->items[i].as.string;
        if (s->bytes > scheme->bytes && memcmp(s->data, scheme->data, scheme->bytes) == 0) {
            return qlora__jin_put_link(m, links, "", word, true, word);
        }
    }
    return qlora__jin_print(m, word, links->out);
}

// Where the word itself is in s[begin..end): without brackets before it and marks behind it, but
// with as many closing brackets as it has open ones.
static void qlora__jin_word_inside(const qlora__jin_string* s, size_t* begin, size_t* end) {
    static const char* const pairs[3][2] = {{"(", ")"}, {"<", ">"}, {"&lt;", "&gt;"}};
    const char* data = s->data;
    size_t last = *end;
    while (*begin < last && (data[*begin] == '(' || data[*begin] == '<' ||
                             qlora__jin_starts(data + *begin, last - *begin, "&lt;"))) {
        *begin += data[*begin] == '&' ? 4 : 1;
    }
    for (bool more = *end > *begin; more; more = *end > *begin) {
        bool entity = *end - *begin >= 4 && memcmp(data + *end - 4, "&gt;", 4) == 0;
        if (!entity && strchr(")>.,", data[*end - 1]) == NULL) {
            break;
        }
        *end -= entity ? 4 : 1;
    }
    for (int i = 0; i < 3; i++) {
        size_t open = qlora__jin_count_in(data + *begin, *end - *begin, pairs[i][0]);
        size_t closed = qlora__jin_count_in(data + *begin, *end - *begin, pairs[i][1]);
        size_t there = qlora__jin_count_in(data + *end, last - *end, pairs[i][1]);
        size_t moved = open <= closed ? 0 : open < there ? open : there;
        for (; moved > 0; moved--) {
            size_t at = qlora__jin_find_bytes(data, last, *end, pairs[i][1], strlen(pairs[i][1]));
            *end = at + strlen(pairs[i][1]);
        }
    }
}

// The attributes of every link: rel with its words in order, and target.
static qlora_result qlora__jin_link_attributes(qlora__jin_machine* m, const qlora__jin_value* in,
                                               qlora__jin_value* out) {
    qlora__jin_buffer buffer;
    qlora__jin_value words;
    qlora__jin_value word;
    qlora__jin_value* keys = NULL;
    memset(&buffer, 0, sizeof buffer);
    QLORA__TRY(qlora__jin_list_make(m, QLORA__JIN_LIST, 4, &words));
    if (qlora__jin_truth(in[4])) {
        QLORA__TRY(qlora__jin_need_string(m, "urlize", in[4]));
        QLORA__TRY(qlora__jin_split(m, in[4], qlora__jin_none(), -1, &words));
    }
    if (qlora__jin_truth(in[2])) {
        QLORA__TRY(qlora__jin_string_of(m, "nofollow", &word));
        QLORA__TRY(qlora__jin_list_add(m, words.as.list, word));
    }
    QLORA__TRY(qlora__jin_string_of(m, "noopener", &word));
    QLORA__TRY(qlora__jin_list_add(m, words.as.list, word));
    QLORA__TRY(qlora__jin_sort_keys_of(m, words.as.list, qlora__jin_none(), true, &keys));
    QLORA__TRY(qlora__jin_sort(m, words.as.list, keys, false));
    QLORA__TRY(qlora__jin_puts(m, &buffer, " rel=\""));
    for (size_t i = 0; i < words.as.list->count; i++) {
        word = words.as.list->items[i];
        if (i > 0 && qlora__jin_compare_strings(words.as.list->items[i - 1].as.string,
                                                word.as.string) == 0) {
            continue;
        }
        if (i > 0) {
            QLORA__TRY(qlora__jin_puts(m, &buffer, " "));
        }
        word.flag = 0;
        QLORA__TRY(qlora__jin_escape_html(m, word, &buffer));
    }
    QLORA__TRY(qlora__jin_puts(m, &buffer, "\""));
    if (qlora__jin_truth(in[3])) {
        QLORA__TRY(qlora__jin_puts(m, &buffer, " target=\""));
        QLORA__TRY(qlora__jin_escape_html(m, in[3], &buffer));
        QLORA__TRY(qlora__jin_puts(m, &buffer, "\""));
    }
    return qlora__jin_buffer_string(m, &buffer, out);
}

// Further schemes: two or more characters, a colon, up to two slashes.
static qlora_result qlora__jin_link_schemes(qlora__jin_machine* m, qlora__jin_value given,
                                            qlora__jin_value* out) {
    if (!qlora__jin_given(given)) {
        return qlora__jin_list_make(m, QLORA__JIN_LIST, 0, out);
    }
    QLORA__TRY(qlora__jin_to_list(m, given, out));
    for (size_t i = 0; i < out->as.list->count; i++) {
        qlora__jin_line line;
        QLORA__TRY(qlora__jin_need_string(m, "urlize", out->as.list->items[i]));
        const qlora__jin_string* s = out->as.list->items[i].as.string;
        QLORA__TRY(qlora__jin_line_make(m, s, &line));
        size_t at = 0;
        while (at < line.count && (line.codes[at] == '.' || line.codes[at] == '+' ||
                                   line.codes[at] == '-' || qlora__jin_is_word(line.codes[at]))) {
            at++;
        }
        bool valid = at >= 2 && at < line.count && line.codes[at] == ':' && line.count - at <= 3;
        for (at++; at < line.count; at++) {
            valid = valid && line.codes[at] == '/';
        }
        if (!valid) {
            return qlora__jin_fail(m, "urlize: \"%.*s\" is not the scheme of an address",
                                   (int)(s->bytes < 60 ? s->bytes : 60), s->data);
        }
    }
    return QLORA_OK;
}

QLORA__JIN_FILTER(urlize) {
    qlora__jin_links links;
    qlora__jin_buffer escaped;
    qlora__jin_buffer buffer;
    qlora__jin_value text;
    memset(&links, 0, sizeof links);
    memset(&escaped, 0, sizeof escaped);
    memset(&buffer, 0, sizeof buffer);
    links.out = &buffer;
    links.limit = in[1];
    QLORA__TRY(qlora__jin_link_attributes(m, in, &links.attributes));
    QLORA__TRY(qlora__jin_link_schemes(m, in[5], &links.schemes));
    QLORA__TRY(qlora__jin_escape_html(m, in[0], &escaped));
    QLORA__TRY(qlora__jin_buffer_string(m, &escaped, &text));
    const qlora__jin_string* s = text.as.string;
    for (size_t at = 0; at < s->bytes;) {
        size_t word = qlora__jin_skip_space(s->data, s->bytes, at);
        size_t end = word;
        size_t step = 0;
        QLORA__TRY(qlora__jin_put(m, &buffer, s->data + at, word - at));
        while (end < s->bytes &&
               !qlora__jin_is_space(qlora__jin_code_at(s->data, s->bytes, end, &step))) {
            end += step;
        }
        size_t begin = word;
        size_t close = end;
        qlora__jin_value inside;
        QLORA__TRY(qlora__jin_work(m, 1 + (end - word) / 4));
        qlora__jin_word_inside(s, &begin, &close);
        QLORA__TRY(qlora__jin_put(m, &buffer, s->data + word, begin - word));
        QLORA__TRY(qlora__jin_part(m, text, begin, close, &inside));
        QLORA__TRY(qlora__jin_put_word(m, &links, inside));
        QLORA__TRY(qlora__jin_put(m, &buffer, s->data + close, end - close));
        at = end;
    }
    return qlora__jin_buffer_string(m, &buffer, out);
}
