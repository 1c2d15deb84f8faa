#!/usr/bin/env python3
"""Writes the Unicode tables in src/text/unicode/tables.h, between its two GENERATED lines.

usage: python3 tools/unicode_gen.py src/text/unicode/tables.h

Needs Unicode 16.0.0 data: Python 3.14, or `pip install unicodedata2==16.0.0`. That is the version
used by the regular expressions of the `tokenizers` library (checked for every code point). Its
normaliser uses Unicode 9.0, so normalisation leaves later characters unchanged, as it does: the
list LATER below contains the combining marks and composed characters of Unicode 10 to 16. Its
Punctuation step uses Unicode 8.0: NEW_PUNCT and OLD_PUNCT contain the difference.

The data comes from the Unicode Character Database, Copyright (c) 1991-2024 Unicode, Inc.,
under the Unicode License V3 (SPDX: Unicode-3.0), https://www.unicode.org/license.txt
"""
import sys

try:
    import unicodedata2 as u
except ImportError:
    import unicodedata as u

WANTED = "16.0.0"

# Combining marks and canonical composites that are not in Unicode 9.0.
LATER = """
7fd 897-89f 8ca-8d3 9fe c3c d3b-d3c eba 1715 1abf-1ace 1df6-1dfa a82c 10d24-10d27 10d69-10d6d
10eab-10eac 10efd-10eff 10f46-10f50 10f82-10f85 11070 1133b 113ce-113d0 1145e 11839-1183a
1193d-1193e 11943 119e0 11a34 11a47 11a99 11d42 11d44-11d45 11d97 11f41-11f42 1612f 16ff0-16ff1
1e08f 1e130-1e136 1e2ae 1e2ec-1e2ef 1e4ec-1e4ef 1e5ee-1e5ef
105c9 105e4 11383 11385 1138e 11391 113c5 113c7 113c8 11938 16121-16128 16d68-16d6a
"""

# Punctuation that is not in Unicode 8.0, and characters that were punctuation then but are symbols
# now.
NEW_PUNCT = """
61d 9fd a76 c77 c84 1b4e-1b4f 1b7d-1b7f 2e43-2e4f 2e52-2e5d 10d6e 10ead 10f55-10f59 10f86-10f89
113d4-113d5 113d7-113d8 1144b-1144f 1145a-1145b 1145d 11660-1166c 116b9 1183b 11944-11946 119e2
11a3f-11a46 11a9a-11a9c 11a9e-11aa2 11b00-11b09 11be1 11c41-11c45 11c70-11c71 11ef7-11ef8
11f43-11f4f 11fff 12ff1-12ff2 16d6d-16d6f 16e97-16e9a 16fe2 1e5ff 1e95e-1e95f
"""
OLD_PUNCT = "166d"

SPACES = [9, 10, 11, 12, 13, 0x20, 0x85, 0xA0, 0x1680, 0x2028, 0x2029, 0x202F, 0x205F, 0x3000]
SPACES += range(0x2000, 0x200B)
# Symbols that are Alphabetic (Other_Alphabetic outside the marks), hence part of \w.
ALPHABETIC = [*range(0x24B6, 0x24EA), *range(0x1F130, 0x1F14A), *range(0x1F150, 0x1F16A),
              *range(0x1F170, 0x1F18A)]

# Class numbers, identical to the QLORA__TEXT_C_ constants in qlora_text.h.
OTHER, UPPER, LOWER, LETTER, MARK, DIGIT, NUMBER, CONNECTOR, PUNCT, SYMBOL, WORD_SYMBOL, SPACE, \
    JOINER, PUNCT_NEW, SYMBOL_OLD_PUNCT = range(15)
CLASS = {"Lu": UPPER, "Lt": UPPER, "Ll": LOWER, "Lm": LETTER, "Lo": LETTER, "Mn": MARK, "Mc": MARK,
         "Me": MARK, "Nd": DIGIT, "Nl": DIGIT, "No": NUMBER, "Pc": CONNECTOR, "Pd": PUNCT,
         "Ps": PUNCT, "Pe": PUNCT, "Pi": PUNCT, "Pf": PUNCT, "Po": PUNCT, "Sm": SYMBOL,
         "Sc": SYMBOL, "Sk": SYMBOL, "So": SYMBOL}


def code_points():
    return (c for c in range(0x110000) if not 0xD800 <= c < 0xE000)


def class_of(c):
    if c in SPACE_SET:
        return SPACE
    if c in (0x200C, 0x200D):
        return JOINER
    if c in ALPHABETIC_SET:
        return WORD_SYMBOL
    if c in NEW_PUNCT_SET:
        return PUNCT_NEW
    if u.category(chr(c))[0] == "S" and c in OLD_PUNCT_SET:
        return SYMBOL_OLD_PUNCT
    return CLASS.get(u.category(chr(c)), OTHER)


def members(ranges):
    found = set()
    for word in ranges.split():
        ends = [int(x, 16) for x in word.split("-")]
        found.update(range(ends[0], ends[-1] + 1))
    return found


def rows(words, width=100):
    lines, line = [], "   "
    for word in words:
        if len(line) + 1 + len(word) > width:
            lines.append(line)
            line = "   "
        line += " " + word
    return lines + [line]


def table(kind, name, words):
    return ["static const %s qlora__text_%s[] = {" % (kind, name)] + rows(words) + ["};"]


def generate():
    new = members(LATER)
    ccc = {c: u.combining(chr(c)) for c in code_points() if u.combining(chr(c)) and c not in new}
    decomposed = {}
    for c in code_points():
        parts = u.decomposition(chr(c)).split()
        if parts and not parts[0].startswith("<") and c not in new:
            decomposed[c] = [int(p, 16) for p in parts]
    # Pairs that compose again, i.e. whose NFC is the original character, are not excluded.
    pairs = {}
    for c, parts in decomposed.items():
        if len(parts) == 2 and u.normalize("NFC", chr(parts[0]) + chr(parts[1])) == chr(c):
            pairs[tuple(parts)] = c
    unstable = set(ccc) | {second for _, second in pairs}
    unstable |= set(range(0x1161, 0x1176)) | set(range(0x11A8, 0x11C3))
    unstable |= {c for c in decomposed if c not in pairs.values()}

    classes, last = [], None
    for c in range(0x110000):
        value = OTHER if 0xD800 <= c < 0xE000 else class_of(c)
        value |= 0x80 if c in unstable else 0
        if value != last:
            classes.append("0x%x," % (c << 8 | value))
            last = value
    order = sorted(decomposed)
    out = ["// Unicode %s (normalisation as of 9.0), made by tools/unicode_gen.py." % WANTED,
           "// Data: Copyright (c) 1991-2024 Unicode, Inc., Unicode License V3, SPDX Unicode-3.0,",
           "// https://www.unicode.org/license.txt",
           "// Runs of equal class: first code point << 8 | may change under NFC << 7 | class."]
    out += table("uint32_t", "class_runs", classes)
    out += ["// Canonical decompositions, sorted: character, first, second (0: there is none)."]
    words = []
    for c in order:
        first, second = (decomposed[c] + [0])[:2]
        words.append("{0x%x,0x%x,0x%x}," % (c, first, second))
    out += table("qlora__text_decomposition", "decompositions", words)
    out += ["// Rows of the table above that compose, sorted by first and second."]
    index = {c: i for i, c in enumerate(order)}
    out += table("uint16_t", "compositions", ["%d," % index[pairs[p]] for p in sorted(pairs)])
    runs = []
    for c in sorted(ccc):
        if runs and runs[-1][1] == c - 1 and runs[-1][2] == ccc[c]:
            runs[-1][1] = c
        else:
            runs.append([c, c, ccc[c]])
    out += ["// Canonical combining classes, sorted: first, last, class."]
    out += table("qlora__text_combining", "combinings", ["{0x%x,0x%x,%d}," % tuple(r) for r in runs])
    return out


def main():
    if u.unidata_version != WANTED:
        sys.exit("unicode_gen: this Python has Unicode %s, not %s; see the top of this file"
                 % (u.unidata_version, WANTED))
    path = sys.argv[1]
    with open(path, encoding="ascii") as file:
        lines = file.read().split("\n")
    begin = next(i for i, line in enumerate(lines) if line.startswith("// GENERATED BEGIN"))
    end = next(i for i, line in enumerate(lines) if line.startswith("// GENERATED END"))
    lines[begin + 1:end] = ["// clang-format off"] + generate() + ["// clang-format on"]
    with open(path, "w", encoding="ascii", newline="\n") as file:
        file.write("\n".join(lines))


SPACE_SET = set(SPACES)
ALPHABETIC_SET = set(ALPHABETIC)
NEW_PUNCT_SET = members(NEW_PUNCT)
OLD_PUNCT_SET = members(OLD_PUNCT)
if __name__ == "__main__":
    main()
