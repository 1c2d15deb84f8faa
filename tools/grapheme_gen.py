#!/usr/bin/env python3
"""Writes src/text/unicode/grapheme_tables.h: what characters are for the borders between
graphemes.

usage: python3 tools/grapheme_gen.py > src/text/unicode/grapheme_tables.h

Needs `pip install regex==2026.11.9 unicodedata2==16.0.0`. What is not in Unicode 16.0 counts as any
other character, as in the `tokenizers` library 0.23.3. The data comes from the Unicode Character Database, Copyright
(c) 1991-2025 Unicode, Inc., under the Unicode License V3 (SPDX: Unicode-3.0),
https://www.unicode.org/license.txt
"""
import regex
import unicodedata2

CLASSES = [  # the first that fits; class 0 is any other
    r"\p{InCB=Linker}", r"\p{GCB=ZWJ}", r"[\p{GCB=Extend}&&\p{InCB=Extend}]",
    r"\p{GCB=Extend}", r"\p{GCB=SpacingMark}", r"\p{GCB=Prepend}",
    r"[\p{GCB=Control}\p{GCB=CR}\p{GCB=LF}]", r"\p{GCB=L}", r"\p{GCB=V}", r"\p{GCB=T}",
    r"\p{GCB=LV}", r"\p{GCB=LVT}", r"\p{GCB=Regional_Indicator}", r"\p{ExtPict}",
    r"\p{InCB=Consonant}"]
KEPT = [r"[\p{GCB=Control}\p{GCB=CR}\p{GCB=LF}]", r"\p{ExtPict}"]  # also if not assigned
TESTS = [regex.compile(c, regex.V1) for c in CLASSES]


def kind(code):
    if 0xD800 <= code < 0xE000 or 0xAC00 <= code <= 0xD7A3:  # syllables of Hangul are computed
        return 0
    found = next((i + 1 for i, test in enumerate(TESTS) if test.match(chr(code))), 0)
    reserved = CLASSES[found - 1] in KEPT
    return found if reserved or unicodedata2.category(chr(code)) != "Cn" else 0


print("// Classes for the borders between graphemes.")
print("// clang-format off")
print("// Made by tools/grapheme_gen.py.")
print("// Data: Copyright (c) 1991-2025 Unicode, Inc., Unicode License V3, SPDX Unicode-3.0,")
print("// https://www.unicode.org/license.txt")
print("// Runs of equal class: first code point << 8 | class, in the order of the enum below.")
print("static const uint32_t qlora__text_grapheme_runs[] = {")
line, last = "   ", None
for code in range(0x110000):
    now = kind(code)
    if now != last:
        cell = " 0x%x," % (code << 8 | now)
        if len(line) + len(cell) > 98:
            print(line)
            line = "   "
        line += cell
        last = now
print(line.rstrip(",") + "};")
print("// clang-format on")
