#!/usr/bin/env python3
"""Writes src/text/unicode/case_tables.h: upper, lower and title case, digits, as Python's str has
them.

usage: python3 tools/case_gen.py > src/text/unicode/case_tables.h

The committed file was made with Python 3.11 (Unicode 14.0). The data comes from the Unicode
Character Database, Copyright (c) 1991-2024 Unicode, Inc., under the Unicode License V3
(SPDX: Unicode-3.0), https://www.unicode.org/license.txt
"""
import unicodedata

CODES = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]


def case_runs(change):
    """[first, last, difference, stride] of the characters that change into one other."""
    out = []
    for c in CODES:
        s = change(chr(c))
        if len(s) != 1 or ord(s) == c:
            continue
        d = ord(s) - c
        if out and out[-1][2] == d and c - out[-1][1] == out[-1][3]:
            out[-1][1] = c
        elif out and out[-1][2] == d and out[-1][0] == out[-1][1] and c - out[-1][1] == 2:
            out[-1][1], out[-1][3] = c, 2
        else:
            out.append([c, c, d, 1])
    return out


def runs(test):
    out = []
    for c in CODES:
        if test(chr(c)):
            if out and out[-1][1] == c - 1:
                out[-1][1] = c
            else:
                out.append([c, c])
    return out


def table(kind, name, rows):
    print("static const %s qlora__text_%s[] = {" % (kind, name))
    line = "   "
    for row in rows:
        cell = " {" + ", ".join(row) + "},"
        if len(line) + len(cell) > 98:
            print(line)
            line = "   "
        line += cell
    print(line.rstrip(",") + "};")


def number(n):
    return str(n) if -10 < n < 10 else ("-" if n < 0 else "") + "0x%x" % abs(n)


print("// Case and digits of characters, for the string methods of templates.")
print("typedef struct qlora__text_case_run {")
print("    uint32_t first;\n    uint32_t last;\n    int32_t change;\n    uint32_t stride;")
print("} qlora__text_case_run;\n")
print("// A character that becomes several: zeros at the end are none.")
print("typedef struct qlora__text_case_long {")
print("    uint32_t code;\n    uint32_t to[3];")
print("} qlora__text_case_long;\n")
print("typedef struct qlora__text_code_run {")
print("    uint32_t first;\n    uint32_t last;")
print("} qlora__text_code_run;\n")
print("// clang-format off")
print("// Unicode %s, made by tools/case_gen.py." % unicodedata.unidata_version)
print("// Data: Copyright (c) 1991-2024 Unicode, Inc., Unicode License V3, SPDX Unicode-3.0,")
print("// https://www.unicode.org/license.txt")
for name, change in (("upper", str.upper), ("lower", str.lower)):
    table("qlora__text_case_run", name + "_runs",
          [[number(x) for x in row] for row in case_runs(change)])
for name, change, other in (("upper_long", str.upper, None), ("title_long", str.title, str.upper)):
    rows = []
    for c in CODES:
        s = change(chr(c))
        # title case is upper case where the two are the same
        if (len(s) > 1 if other is None else s != other(chr(c))):
            codes = [ord(x) for x in s] + [0, 0, 0]
            rows.append([number(c), "{" + ", ".join(number(x) for x in codes[:3]) + "}"])
    table("qlora__text_case_long", name, rows)
for name, test in (("decimal", str.isdecimal), ("digit", str.isdigit), ("numeric", str.isnumeric)):
    table("qlora__text_code_run", name + "_runs",
          [[number(x) for x in row] for row in runs(test)])
# Cased characters that are no letters of that case, and what a word's last sigma looks over.
for name, test in (("lower_more", lambda c: c.islower() and unicodedata.category(c) != "Ll"),
                   ("upper_more", lambda c: c.isupper() and unicodedata.category(c) != "Lu"),
                   ("ignorable", lambda c: ("A" + c + "\u03a3").lower()[-1] == "\u03c2" and
                    ("1" + c + "\u03a3").lower()[-1] == "\u03c3")):
    table("qlora__text_code_run", name + "_runs",
          [[number(x) for x in row] for row in runs(test)])
print("// clang-format on")
