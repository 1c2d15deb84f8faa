#!/usr/bin/env python3
"""Compares the template engine with jinja2: every documented filter, test, global function and method
with random arguments, formats of numbers, random expressions, statements and whitespace, names in
nested scopes, letters of any kind, mutated templates, random conversations. Needs jinja2 3.1.6.

usage: template_check.py [--cases N] [--seed S] [--kind NAME] [--templates DIR]
                         [--side build/template_side]

With a DIR that has conversations.json, the templates in tests/golden/templates and DIR are rendered
for each of them first.

Every case is rendered by both. Equal means: the same text, or an error in both. What the engine
reports as not supported is counted separately. Prints the first differences; exit status 1 if there
are any.
"""
import argparse
import glob
import json
import os
import random
import re
import subprocess
import sys
import unicodedata
from datetime import datetime

import jinja2
import jinja2.ext
import jinja2.filters
import jinja2.nodes
import jinja2.sandbox
import jinja2.tests


class Generation(jinja2.ext.Extension):
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

    def _text(self, caller):
        return caller()


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                      sort_keys=sort_keys)


def environment():
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"])
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    clock = datetime(2026, 7, 26, 12, 0, 0)
    env.globals["strftime_now"] = lambda format: clock.strftime(format)
    return env


def expected(env, source, conversation):
    given = {"tools": None, "documents": None, "bos_token": "<s>", "eos_token": "</s>",
             "pad_token": "<pad>", "unk_token": "<unk>", "add_generation_prompt": False}
    given.update(conversation)
    try:
        return env.from_string(source).render(**given), None
    except Exception as error:  # whatever Python raises is an error of the template
        return None, "%s: %s" % (type(error).__name__, error)


class Side:
    """build/template_side: renders case after case; started again after a crash."""

    def __init__(self, program):
        self.program = program
        self.process = None

    def render(self, source, conversation):
        if self.process is None or self.process.poll() is not None:
            self.process = subprocess.Popen([self.program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        text = source.encode("utf-8", "surrogatepass")
        chat = json.dumps(conversation, ensure_ascii=False).encode("utf-8")
        prompt = conversation.get("add_generation_prompt", False)
        try:
            self.process.stdin.write(b"%d %d %d\n" % (prompt, len(text), len(chat)) + text + chat)
            self.process.stdin.flush()
            status, size = self.process.stdout.readline().split()
            answer = self.process.stdout.read(int(size)).decode("utf-8", "replace")
        except (ValueError, BrokenPipeError):
            return None, "CRASH %d" % self.process.wait()
        return (answer, None) if status == b"0" else (None, answer)


ATOMS = ["1", "0", "-3", "2.5", "1e16", "true", "false", "none", "'a'", "''", "'a b  c'", "'Stra\u00dfe'",
         "'\u4e16\U0001F44D\u00e9'", "[]", "[1, 2, 3]", "['b', 'A', 'c']", "{}", "{'a': 1, 'b': [2]}", "(1, 2)",
         "(1,)", "()", "nope", "messages", "messages[0]", "messages[0].content", "messages[-1]['role']",
         "tools", "bos_token", "range(3)", "ns", "ns.x", "d", "d.a", "l", "s", "n", "'x,y,,z'", "'  pad '",
         "'10'", "'3.7'", "'<b>&'", "messages | map(attribute='role')", "d.items()", "d.keys()",
         "'a\\nb\\n\\nc'", "100", "7", "[none, true, 1.0]", "[[1, 2], [3]]", "['x', 'y']"]
# no large numbers, and ** only with a small exponent: Python would compute for hours
BINARY = ["+", "-", "*", "/", "//", "%", "~", "==", "!=", "<", "<=", ">", ">=", "in", "not in",
          "and", "or"]
FILTERS = ["trim", "upper", "lower", "title", "capitalize", "length", "list", "string", "first", "last",
           "tojson", "tojson(indent=2)", "tojson(sort_keys=true)", "join", "join('-')", "default('q')",
           "default('q', true)", "int", "float", "abs", "round", "round(1)", "sort", "unique | list", "reverse | list",
           "items | list", "dictsort", "replace('a', 'X')", "indent(2)", "indent(2, true)", "safe", "e",
           "sum", "max", "min", "batch(2) | list", "slice(2) | list", "map('upper') | list",
           "select | list", "reject | list", "select('string') | list", "map(attribute='role') | list",
           "selectattr('role') | list", "selectattr('role', 'equalto', 'user') | list", "count",
           "rejectattr('x', 'defined') | list", "wordcount", "truncate(5)", "center(9)", "format(1)",
           "groupby('role') | list", "map('length') | list", "attr('a')", "sort(reverse=true)",
           "join(', ', attribute='role')", "select('in', [1, 'a']) | list", "urlencode", "forceescape",
           "map('int') | list", "list | length", "batch(2, 'z') | list", "round(0, 'floor')", "wordwrap(3)"]
TESTS = ["defined", "undefined", "none", "string", "mapping", "iterable", "sequence", "number", "boolean",
         "true", "false", "integer", "float", "callable", "odd", "even", "eq 1", "in [1, 'a']", "not none",
         "divisibleby 2", "lower", "upper", "sameas none", "gt 1", "escaped", "not string", "ne('a')"]
METHODS = [".strip()", ".upper()", ".split()", ".split(',')", ".split('a', 1)", ".items()", ".keys()",
           ".values()", ".get('a')", ".get('z', 0)", ".startswith('a')", ".endswith(('a', 'c'))", ".lower()",
           ".replace('a', 'bb')", ".lstrip('a')", ".rstrip()", ".find('b')", ".count('a')", ".title()",
           ".index(1)", ".join(['p', 'q'])", ".join(l)", ".append(1)", ".pop()", ".copy()", ".splitlines()",
           ".rsplit('b', 1)", ".isdigit()", ".isalpha()", ".capitalize()", ".zfill(5)", ".partition('b')",
           ".rpartition(',')", ".removeprefix('a')", ".center(7, '*')", ".ljust(4)", ".format(1, a=2)",
           ".swapcase()", ".rfind('a')", ".isupper()", ".update({'q': 1})", ".x", "['a']", "[0]", "[-1]",
           "[1:]", "[:-1]", "[::-1]", "[::2]", "[5]", ".a", ".__class__", "[1:2]", ".length", "[nope]",
           ".0", ".rsplit(none, 1)", ".expandtabs()", ".istitle()", ".split(none, 1)", "['items']"]


def expression(r, depth):
    if depth <= 0 or r.random() < 0.15:
        return r.choice(ATOMS)
    kind = r.randrange(12)
    inner = lambda: expression(r, depth - 1)
    if kind < 3:
        return "%s %s %s" % (inner(), r.choice(BINARY), inner())
    if kind < 6:
        return "(%s) | %s" % (inner(), r.choice(FILTERS))
    if kind == 6:
        return "(%s) is %s" % (inner(), r.choice(TESTS))
    if kind < 9:
        return "(%s)%s" % (inner(), r.choice(METHODS))
    if kind == 9:
        return "(%s if %s else %s)" % (inner(), inner(), inner())
    if kind == 10:
        return r.choice(["not %s", "-(%s)", "[%s, 1]", "{'k': %s}", "(%s, 2)", "'%%s|%%s' %% (%s, 1)", "+%s",
                         "%s if 0", "dict(a=%s)", "range(%s)", "f(%s)", "f(1, b=%s)", "namespace(q=%s).q", "(%s) ** 2"]) % inner()
    return "%s[%s]" % (r.choice(ATOMS), inner())


# ---- what jinja2 and Python document, each with arguments that fit it or nearly do

STRINGS = ["a", "", " ", "abc", "Hello World", "  pad\t", "x,y,,z", "a-b-c d--e", "<b>bold</b> &amp; x", "it's",
           "Stra\u00dfe", "\u4e16\U0001F44D\u00e9", "A\nb\r\nc\n", "10", "-3.5e2", "0x1f", "1_000", " 42 ", "inf", "nan",
           "\u0661\u0662", "a\u00a0b\u2003c", "\u01c6\u0130I\u03a3", "one two three four five six", "a" * 30, "%s|%d",
           "{}-{a}", "\\d", "\"q\"", "<!-- c --> <a href='x'>t</a>", "&lt;&#62;&quot;&nbsp;", "\ufb01x", "tab\tb", "_id9",
           "long-hyphenated-word and more", "x=1&y=2/z?", "a.b@c.de", "http://a.io/x(y).", "www.site.org,", "Zz\u0301",
           "true", "None", "\x00\x1f\x7f\x85", "\u2028sep", "CamelCase word_Two", "1.5", "1e400", "123456789012345678901234567890"]
NUMBERS = ["0", "1", "-1", "2", "3", "5", "7", "10", "-7", "79", "255", "1000", "123456", "1000000", "1.0", "0.5", "2.5",
           "-0.0", "-2.675", "3.14159", "1e3", "1e16", "1.5e300", "1e-7", "12345.678", "99.99", "0.1", "true", "false",
           "4611686018427387904", "9007199254740993", "1e22", "123456789.987", "5e-324", "1025.0"]
LISTS = ["[]", "[1, 2, 3]", "['b', 'A', 'c', 'B']", "[3, 1.5, true]", "(1, 2)", "()", "range(4)", "range(9, 0, -3)",
         "[[1, 2], [3]]", "[none, 0, '', 'x']", "messages", "d.items()", "d.keys()", "d.values()", "people", "'xyz'",
         "[['a', 1], ['b', 2]]", "[{'k': 2}, {'k': 1}, {'k': 2}]", "['x', 'Y', 'x']", "[1, 'a', none, 2.5, (1,), {'z': 0}]",
         "messages | map(attribute='role')", "[0.1, 0.2, 0.3]", "[true, 1, 1.0]", "tools"]
DICTS = ["{}", "{'a': 1, 'b': [2]}", "d", "{'B': 1, 'a': 3, 'c': 2}", "{1: 'x', none: 'y', 'k': 2.0}", "messages[0]",
         "{'id': 'a<b', 'class': none, 'x': nope, 'n': 1}", "dict(a=1, b='q')", "people[0]", "{'a b': 1}", "{'k': {'j': {'i': 0}}}"]
OTHERS = ["none", "nope", "ns", "f", "nope.x", "loop", "dict", "cycler(1, 2)", "joiner()"]
KEYWORDS = {"trim": "chars", "tojson": "ensure_ascii indent separators sort_keys", "default": "default_value boolean",
            "join": "d attribute", "replace": "old new count", "indent": "width first blank",
            "truncate": "length killwords end leeway", "center": "width", "int": "default base", "float": "default",
            "round": "precision method", "batch": "linecount fill_with", "slice": "slices fill_with",
            "unique": "case_sensitive attribute", "sort": "reverse case_sensitive attribute",
            "max": "case_sensitive attribute", "min": "case_sensitive attribute", "sum": "attribute start",
            "dictsort": "case_sensitive by reverse", "groupby": "attribute default case_sensitive", "attr": "name",
            "filesizeformat": "binary", "wordwrap": "width break_long_words wrapstring break_on_hyphens",
            "urlize": "trim_url_limit nofollow target rel extra_schemes", "xmlattr": "autospace", "pprint": "",
            "striptags": "", "map": "attribute default", "split": "sep maxsplit", "rsplit": "sep maxsplit",
            "splitlines": "keepends", "expandtabs": "tabsize", "encode": "encoding errors"}
ALL_FILTERS = sorted(set(jinja2.filters.FILTERS) - {"random"})
ALL_TESTS = sorted(jinja2.tests.TESTS)
METHODS_OF = {"s": [n for n in dir(str) if not n.startswith("_")], "l": [n for n in dir(list) if not n.startswith("_")],
              "d": [n for n in dir(dict) if not n.startswith("_")], "i": [n for n in dir(int) if not n.startswith("_")],
              "f": [n for n in dir(float) if not n.startswith("_")], "t": ["count", "index"],
              "r": ["count", "index", "start", "stop", "step"]}
# usual arguments: without them, most calls would be errors
USUAL = {"attribute": ["'role'", "'k'", "'a'", "0", "'name'", "'a.b'", "'k,role'"], "width": ["1", "3", "4", "7", "12", "20"],
         "method": ["'floor'", "'ceil'", "'common'"], "precision": ["0", "1", "2", "3", "-1", "-2"], "base": ["2", "8", "16", "0", "10", "36"],
         "by": ["'key'", "'value'"], "separators": ["(',', ':')", "[', ', ' = ']"], "indent": ["0", "1", "2", "4", "none", "'-'"],
         "length": ["3", "5", "9", "20"], "leeway": ["0", "2", "5"], "end": ["''", "'..'", "'\u2026'"], "start": ["0", "1.5", "10"],
         "count": ["0", "1", "2", "-1"], "maxsplit": ["0", "1", "2", "-1"], "linecount": ["1", "2", "3"], "slices": ["1", "2", "3", "4"],
         "wrapstring": ["'\\n'", "'|'", "'  '"], "extra_schemes": ["['tel:']", "['ftp://', 'x+y:']", "['bad']"], "trim_url_limit": ["3", "10", "0"],
         "target": ["'_blank'", "'a\"b'"], "rel": ["'nofollow ugc'", "'b a'"], "chars": ["'a'", "' x'", "'\u00e9'"], "old": ["'a'", "''", "'l'"],
         "new": ["'X'", "''", "'<b>'"], "encoding": ["'utf-8'"]}
FORMATS = ["%s", "%r", "%a", "%d", "%i", "%u", "%x", "%X", "%o", "%e", "%E", "%f", "%F", "%g", "%G", "%c", "%%", "%5d", "%-5d|", "%05d",
           "%+d", "% d", "%.3d", "%8.3d", "%#x", "%#o", "%.2f", "%8.2f", "%08.2f", "%-8.2f|", "%+.1e", "%.0f", "%.10g", "%#g", "%#.3g", "%5s|",
           "%-5s|", "%.2s", "%5.1s|", "%.3r", "%*d", "%.*f", "%(a)s", "%(a)5.1f", "%5%", "%ld", "%hd", "%b", "%5c|", "%-5%|", "%#.0f", "%x y", "100%"]
SPECS = ["", "d", "b", "o", "x", "X", "c", "e", "E", "f", "F", "g", "G", "n", "%", "s", "5", "<5", ">5", "^5", "=5", "*^9", "+", "-", " ", "+d", "#x", "#b", "#o",
         "05", "05d", "+05d", ",", "_", ",d", "_x", "_b", "#_x", "010,", "012,d", ",.2f", "015,.2f", "_.3f", ".2f", ".0f", ".3", ".10", ".1", "8.3f", "<8.2e", "^+9.1f",
         ".1%", ".0%", "8.1%", "#g", "#.3g", ".3g", ".17g", ".0e", "z.1f", "0", "00", "0<5", "0=6", "\u00e9^7", ".3s", "5.2s", "<.2", "10s", "=+7d", ",x", ",s", "5c", "d ", "1.f", "020b"]
SCRAPS = "0123456789<>^=+- #,_.zbcdeEfFgGnosxX%*"


def quoted(text):
    out = "'"
    for c in text:
        out += {"'": "\\'", "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\x00": "\\x00"}.get(c, c)
    return out + "'"


def string_value(r):
    if r.random() < 0.2:
        return quoted("".join(r.choice(STRINGS)[:r.randrange(9)] + r.choice(["", " ", "-", "--", "\n"]) for _ in range(r.randrange(1, 5))))
    if r.random() < 0.08:
        return "(" + quoted(r.choice(STRINGS)) + " | " + r.choice(["safe", "e"]) + ")"
    return quoted(r.choice(STRINGS))


def value_of(r, kinds="sssnnlldo"):
    kind = r.choice(kinds)
    if kind == "s":
        return string_value(r)
    return r.choice({"n": NUMBERS, "l": LISTS, "d": DICTS, "o": OTHERS}[kind])


def arguments(r, name):
    names = KEYWORDS.get(name, "").split()
    given = []
    count = r.choice([0, 0, 1, 1, 1, 2, 2, 3]) if names else r.choice([0, 0, 0, 1, 1, 2])
    for i in range(count):
        own = names[i] if i < len(names) else ""
        usual = USUAL.get(own)
        text = r.choice(usual) if usual and r.random() < 0.85 else r.choice(["true", "false", "none"]) if r.random() < 0.25 \
            else value_of(r, "ssssnnnld")
        given.append((own, text))
    if names and r.random() < 0.35:
        r.shuffle(given)
        return ", ".join("%s=%s" % (n, t) if n else t for n, t in sorted(given, key=lambda g: g[0] != ""))
    if names and r.random() < 0.3:
        own = r.choice(names)
        return "%s=%s" % (own, r.choice(USUAL.get(own, ["true", "1", "'a'"])))
    return ", ".join(t for n, t in given)


def documented_filter(r):
    name = r.choice(ALL_FILTERS)
    kinds = {"dictsort": "dddl", "items": "dddl", "xmlattr": "dddd", "filesizeformat": "nnns", "round": "nnnn", "abs": "nnns",
             "int": "ssnn", "float": "ssnn", "urlize": "ssss", "wordwrap": "ssss", "striptags": "sssl", "format": "ssss", "pprint": "ldlds"}
    kinds = kinds.get(name, "lllsd" if name in ("batch", "slice", "groupby", "sort", "unique", "sum", "min", "max", "join", "map", "select",
                                                "reject", "selectattr", "rejectattr", "first", "last", "reverse", "list") else "sssnldo")
    value = value_of(r, kinds)
    if name in ("map", "select", "reject", "selectattr", "rejectattr"):
        if name == "map":
            given = r.choice(["attribute=%s" % r.choice(USUAL["attribute"]), "attribute='k', default='D'", quoted(r.choice(ALL_FILTERS)),
                              "'default', 'x'", "'replace', 'a', 'b'", "'round', 1"])
        elif name in ("select", "reject"):
            given = r.choice(["", quoted(r.choice(ALL_TESTS)), "'in', [1, 'x']", "'gt', 1", "'ne', 'a'"])
        else:
            given = r.choice(["'role'", "'k'", "0", "'role', 'equalto', 'user'", "'k', 'gt', 1", "'role', 'in', ['user', 'tool']", "'a', 'defined'",
                              "'content', " + quoted(r.choice(ALL_TESTS))])
    elif name == "format":
        value = quoted("".join(r.choice(FORMATS) for _ in range(r.randrange(1, 3))))
        given = ", ".join(value_of(r, "nnns") for _ in range(r.randrange(0, 3)))
    else:
        given = arguments(r, name)
    after = r.choice(["", "", "", " | list", " | length", " | tojson", " | join('|')", " | first", " | upper", " + ''", " ~ 1", " is escaped"])
    return "%s | %s%s%s" % (value, name, "(" + given + ")" if given else "", after)


def documented_test(r):
    name = r.choice(ALL_TESTS)
    given = value_of(r, "snnld") if r.random() < 0.6 else ""
    if name in ("test", "filter") and r.random() < 0.7:
        return "%s is %s" % (quoted(r.choice(ALL_TESTS + ALL_FILTERS + ["zz"])), name)
    name = name if re.match("[a-z]", name) else "eq"
    return "%s is %s%s%s" % (value_of(r), r.choice(["", "", "not "]), name, "(" + given + ")" if given else "")


def documented_method(r):
    kind = r.choice("ssssssldiftr")
    value = {"s": string_value(r), "l": r.choice([v for v in LISTS if v[0] == "["]), "d": r.choice(DICTS),
             "i": "(" + r.choice([n for n in NUMBERS if n.lstrip("-").isdigit()]) + ")", "t": "(1, 2, 1, 'a')", "r": "range(2, 20, 3)",
             "f": "(" + r.choice([n for n in NUMBERS if "." in n or "e" in n]) + ")"}[kind]
    name = r.choice(METHODS_OF[kind])
    if name == "format":
        value = quoted("".join(r.choice(["{}", "{0}", "{a}", "{1}", "{:" + r.choice(SPECS) + "}", "{0!r}", "{a!s:>6}", "{0[0]}", "{a.x}", "{{", "}}", "{!a}", "{:{}}",
                                         "{:>{w}}", "{0:{1}}", "{", "}", "{a[k]}"]) for _ in range(r.randrange(1, 4))))
        return "%s.format(%s)" % (value, r.choice(["%s", "%s, %s", "%s, a=%s", "a=%s, w=5", "%s, '<6'", "%s, 8, a={'k': 1}"]).replace("%s", value_of(r, "nnsl"), 1).replace("%s", value_of(r, "nns")))
    if name == "format_map":
        return "%s.format_map({'a': %s, 'b': 2})" % (r.choice(["'{a}'", "'{a:>8}|{b}'", "'{c}'", "'{}'"]), value_of(r, "ns"))
    if name in ("translate", "maketrans"):
        return "%s.translate({%s})" % (value, r.choice(["97: 'X', 98: none", "97: 120", "98: 'long'", ""]))
    count = 2 if name == "replace" else r.choice([0, 1, 1, 2, 3])
    if name in KEYWORDS and r.random() < 0.5:
        given = arguments(r, name)
    elif name in ("center", "ljust", "rjust", "zfill"):
        given = ", ".join([r.choice(["0", "3", "8", "11", "-2"])] + (["'*'"] if r.random() < 0.4 and name != "zfill" else []))
    elif name in ("startswith", "endswith", "find", "rfind", "index", "rindex", "count") and kind == "s":
        given = ", ".join([r.choice(["'a'", "''", "'b'", "'l'", "('a', 'x')", "' '", "'\u00e9'"])] + [r.choice(["0", "1", "-2", "5", "none"]) for _ in range(r.randrange(3))])
    elif count and re.match("is|cap|swap|low|upp|tit|fold|keys|val|item|copy|bit|conj|as_|hex|real|imag", name) and r.random() < 0.9:
        given = ""
    else:
        given = ", ".join(value_of(r, "sssnnl") for _ in range(count))
    return "%s.%s%s" % (value, name, "(" + given + ")" if r.random() < 0.95 else " is callable")


def documented_format(r):
    number = r.choice(NUMBERS + [quoted(r.choice(STRINGS)), "'x'", "none", "[1]", "inf", "nan"])
    number = {"inf": "(n * 1e308)", "nan": "(n * 1e308 - n * 1e308)"}.get(number, number)
    if r.random() < 0.2:
        number = "%s%d.%de%d" % (r.choice(["", "-"]), r.randrange(100), r.randrange(10 ** r.randrange(1, 12)), r.randrange(-25, 25))
    if r.random() < 0.5:
        spec = r.choice(SPECS) if r.random() < 0.7 else "".join(r.choice(SCRAPS) for _ in range(r.randrange(1, 6)))
        return "%s.format(%s)" % (quoted("{:" + spec + "}|"), number)
    format = "".join(r.choice(FORMATS) for _ in range(r.choice([1, 1, 1, 2])))
    if r.random() < 0.25:
        format = "%" + "".join(r.choice("0123456789-+ #.*") for _ in range(r.randrange(4))) + r.choice("diouxXeEfFgGcrsa%")
    return "%s %% %s" % (quoted(format), r.choice([number, "(%s,)" % number, "(%s, %s)" % (number, r.choice(NUMBERS)), "{'a': %s}" % number, "(3, %s)" % number]))


def documented_number(r):
    a, b = r.choice(NUMBERS), r.choice(NUMBERS)
    if r.random() < 0.3:
        a = "%s%d" % (r.choice(["", "-"]), r.randrange(10 ** r.randrange(1, 18)))
    if r.random() < 0.15:
        b = "%s%d.%d" % (r.choice(["", "-"]), r.randrange(100), r.randrange(1000))
    return r.choice(["(%s) %s (%s)" % (a, r.choice(["+", "-", "*", "/", "//", "%", "==", "<", "<=", ">", "!="]), b), "(%s) ** %d" % (a, r.randrange(-3, 4)),
                     "(%s) ** 0.5" % a, "(%s) | round(%s)" % (a, r.choice(["0", "1", "2", "-1", "3, 'floor'", "1, 'ceil'", "-2, 'floor'"])), "-(%s)" % a, "(%s) | string" % a,
                     "[%s, %s] | sum" % (a, b), "[%s, %s] | sort" % (a, b), "(%s) | int" % a, "(%s) | float" % a, "'%s' | int" % a, "'%s' | float" % a, "'%s' | int(base=16)" % a,
                     "(%s) | tojson" % a, "(%s) is divisibleby(%s)" % (a, b), "{%s: 1, %s: 2}" % (a, b), "(%s) | filesizeformat%s" % (a, r.choice(["", "(true)"])), "[%s] | max" % a])


def documented_global(r):
    return r.choice([
        "{%% set c = cycler(%s, %s) %%}{{ c.next() }}{{ c.current }}{{ c.next() }}{{ c.next() }}{{ c.reset() }}{{ c.next() }}" % (value_of(r), value_of(r)),
        "{%% set j = joiner(%s) %%}{{ j() }}{{ j() }}{{ j() }}" % r.choice(["", "'|'", "sep='-'", "1", "none"]),
        "{{ range(%s) }}{{ range(%s) | list }}" % (", ".join(str(r.randrange(-4, 9)) for _ in range(r.randrange(1, 4))), r.choice(NUMBERS[:9])),
        "{{ dict(%s) }}" % r.choice(["a=1", "[['a', 1]]", "d, b=2", "d", "[(1, 2)], c=3", "messages", "1", "nope", "'ab'", "[[1, 2, 3]]"]),
        "{%% set q = namespace(%s) %%}{%% set q.a = %s %%}{{ q.a }}{{ q.b }}{{ q['a'] }}{{ q }}" % (r.choice(["", "a=1", "d", "{'b': 2}", "b=nope"]), value_of(r)),
        "{%% for x in %s recursive %%}{{ loop.depth }}{{ loop.depth0 }}{{ x }}{%% if x is iterable and x is not string %%}({{ loop(x) }}){%% endif %%}{%% endfor %%}" % r.choice(LISTS),
        "{%% for x in %s %%}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}"
        "{{ loop.cycle('a', 'b', 1) }}{{ loop.changed(x) }}{{ loop.previtem }}<{{ loop.nextitem }}{%% endfor %%}" % r.choice(LISTS),
        "{%% filter %s %%}%s{{ 1 }}\n b{%% endfilter %%}" % (r.choice(["upper", "trim", "indent(2, true)", "replace('b', 'c')", "wordwrap(3)", "length", "list", "title | trim"]), r.choice(STRINGS).replace("{", "")),
        "{%% with a = %s, b = a %%}{{ a }}{{ b }}{%% set c = 3 %%}{%% endwith %%}{{ a }}{{ c }}" % value_of(r),
        "{%% macro g(a, b=%s, *c) %%}{%% endmacro %%}" % r.choice(NUMBERS),
        "{%% macro g(a, b=%s) %%}{{ a }}|{{ b }}|{{ varargs }}|{{ kwargs }}|{{ caller('p', 2) if caller }}{%% endmacro %%}{{ g(%s) }}{%% call(x, y=3) g(1, z=%s) %%}<{{ x }}{{ y }}>{%% endcall %%}"
        % (value_of(r), r.choice(["", "1", "1, 2", "1, 2, 3", "b=4", "k=5", "1, a=2", "*[1, 2]", "**{'a': 7}", "*l, **d"]), value_of(r)),
        "{%% macro g() %%}x{%% endmacro %%}{{ g.name }}{{ g.arguments }}{{ g.catch_kwargs }}{{ g.catch_varargs }}{{ g.caller }}{{ g is callable }}",
        "{%% autoescape %s %%}{{ %s }}{{ '<' ~ %s }}{%% endautoescape %%}" % (r.choice(["true", "false"]), value_of(r), value_of(r)),
        "{%% do %s %%}" % value_of(r), "{%% include 'x' %s%%}" % r.choice(["", "ignore missing "]), "{% import 'x' as y %}", "{% from 'x' import y %}", "{% extends 'x' %}",
        "{%% block b %s%%}B{{ 1 }}{%% endblock %s%%}{{ self.b() }}" % (r.choice(["", "scoped ", "required "]), r.choice(["", "b ", "c "])),
        "{% raw %}{{ x }} {% if %}{% endraw %}", "{%- raw -%} a {%- endraw -%} b", "# for x in l\n## c\n", "{% trans %}x{% endtrans %}", "{% debug %}", "{{ _('x') }}", "{{ lipsum(1) | length }}",
        "{{ self }}", "{{ strftime_now('%s') }}" % "".join("%" + r.choice("aAbBcdefHIjklmMnprRsStTuUVwWxXyYzZ%CDFgGh-") + r.choice(["", " "]) for _ in range(r.randrange(1, 4))),
        "{{ l[%s:%s:%s] }}{{ 'abcd\u00e9f'[%s:%s:%s] }}" % tuple(r.choice(["", "0", "1", "-1", "2", "-3", "9", "none"]) for _ in range(6)),
        "{{ (%s)[%s] }}" % (value_of(r, "sld"), value_of(r, "nns")), "{{ %s is sameas %s }}" % (value_of(r), value_of(r)), "{{ %s in %s }}" % (value_of(r), value_of(r, "sld")),
        "{{ %s if %s }}|{{ %s }}" % (value_of(r), value_of(r), value_of(r)), "{{ (%s) * %s }}" % (value_of(r, "sl"), r.choice(["0", "2", "-1", "true"])), "{{ %s ~ %s ~ %s }}" % (value_of(r), value_of(r), value_of(r)),
        "{{ %s %s %s }}" % (value_of(r), r.choice(["<", ">", "<=", ">=", "==", "!=", "and", "or", "+", "*"]), value_of(r)),
        "{{ %s | tojson(%s) }}" % (value_of(r, "sld"), arguments(r, "tojson")), "{{ %s | tojson(indent=%d, sort_keys=%s) }}" % (r.choice(DICTS), r.randrange(5), r.choice(["true", "false"])),
        "{%% set %s = %s %%}{{ x }}{{ y }}" % (r.choice(["x, y", "(x, y)", "x", "x.y", "[x, y]"]), value_of(r)), "{%% for %s in %s %%}{{ x }},{%% else %%}none{%% endfor %%}" % (r.choice(["x", "x, y", "(x, y)", "x, (y, z)"]), r.choice(LISTS))])


# ---- scopes: the same few names set and read in nested loops, macros and blocks

NAMES = ["x", "y", "z", "i", "f", "g", "ns", "loop", "caller", "messages"]


def scope_value(r):
    name = r.choice(NAMES)
    return r.choice([name, name, name, "%s is defined" % name, "ns.%s" % r.choice("xyz"), "[%s, 1]" % name, "loop.%s" % r.choice(["index", "last", "nextitem", "previtem", "depth"]),
                     "%s(%s)" % (r.choice("fgfg"), r.choice(["", "1", "x", "x=2", "1, y=z"])), "%s ~ %s" % (name, r.choice(NAMES)), "caller(%s)" % r.choice(["", "x"]), "%d" % r.randrange(3)])


def scope_part(r, depth):
    kind = r.randrange(14)
    body = lambda: "".join(scope_part(r, depth - 1) for _ in range(r.randrange(1, 4)))
    if depth <= 0 or kind < 4:
        return "{{ %s }};" % scope_value(r)
    if kind < 7:
        return "{%% set %s = %s %%}" % (r.choice(["x", "y", "z", "i", "ns.x", "ns.loop", "x, y", "f", "messages", "loop"]), scope_value(r))
    if kind == 7:
        return "{%% if %s %%}%s{%% else %%}%s{%% endif %%}" % (scope_value(r), body(), body())
    if kind < 10:
        return "{%% for %s in %s%s %%}%s%s{%% endfor %%}" % (r.choice(["x", "y", "i", "i", "z", "loop"]), r.choice(["[1, 2]", "[]", "range(3)", "messages", "'ab'"]),
                                                          " if " + scope_value(r) if r.random() < 0.3 else "", body(), "{% else %}" + body() if r.random() < 0.3 else "")
    if kind == 10:
        return "{%% macro %s(%s) %%}%s{%% endmacro %%}" % (r.choice("fg"), r.choice(["", "x", "x, y=x", "x=y, y=x", "caller", "caller=none", "kwargs", "loop=1"]), body())
    if kind == 11:
        return "{%% call%s %s(%s) %%}%s{%% endcall %%}" % (r.choice(["", "(x)", "(y=1)"]), r.choice("fg"), r.choice(["", "1", "x"]), body())
    if kind == 12:
        return r.choice(["{%% set %s %%}" % r.choice(["x", "ns.y", "z | upper"]) + body() + "{% endset %}", "{% generation %}" + body() + "{% endgeneration %}",
                         "{%% with %s %%}" % r.choice(["x = y, y = x", "loop = 1", ""]) + body() + "{% endwith %}", "{% filter upper %}" + body() + "{% endfilter %}"])
    return r.choice(["{% break %}", "{% continue %}", "{% if loop.index == 2 %}{% break %}{% endif %}", "{% set ns = namespace(x=y) %}", "{#", "{% raw %}"])


def documented_scope(r):
    start = "{% macro f(x, y=2) %}({{ x }}{{ y }}{{ z }}{{ caller() if caller }}){% endmacro %}" \
            "{% macro g(x=1, y=x) %}<{{ x }}{{ y }}{{ i }}{{ varargs }}{{ kwargs }}{{ caller(1) if caller }}>{% endmacro %}"
    return start + "".join(scope_part(r, 2) for _ in range(r.randrange(1, 5)))


# ---- letters: every string method with characters of any kind, but not those newer than Python's tables

LETTERS = [(0x20, 0x7F), (0x80, 0x600), (0x1E00, 0x2200), (0x2460, 0x2500), (0x13A0, 0x1400), (0x10A0, 0x1100), (0x1C80, 0x1CC0), (0xFB00, 0xFB20), (0xFF00, 0xFF60),
           (0x10400, 0x10450), (0x1F130, 0x1F190), (0, 0x20000)]
SIGMAS = "\u03a3\u03a3\u03c3.'\u2019\u00ad\u0301\u0345A\u0391 \u2167\u24e8\u01c5\u00df\u0130\u00aa"


def letters(r):
    text = [r.choice(SIGMAS) if r.random() < 0.3 else chr(r.randrange(*r.choice(LETTERS))) for _ in range(r.randrange(7))]
    return quoted("".join(c for c in text if unicodedata.category(c) not in ("Cn", "Cs")))


def documented_letters(r):
    calls = [".upper()", ".lower()", ".title()", ".capitalize()", ".swapcase()", ".casefold()", ".isalpha()", ".isdigit()", ".isdecimal()", ".isnumeric()", ".isalnum()", ".isspace()",
             ".isupper()", ".islower()", ".istitle()", ".isprintable()", ".split()", ".strip()", ".splitlines()", " | upper", " | lower", " | title", " | capitalize", " | trim", " | wordcount",
             " | tojson", " | tojson(true)", " | length", " | int", " | float", " | urlencode", " is upper", " is lower", " | wordwrap(3)", " | list", " | pprint"]
    return "%s%s" % (letters(r), r.choice(calls))


DOCUMENTED = [("filter", documented_filter), ("test", documented_test), ("method", documented_method), ("format", documented_format),
              ("number", documented_number), ("global", documented_global), ("scope", documented_scope), ("letters", documented_letters)]


def space(r):
    return r.choice(["", "", "", " ", "\n", "  \n", "\n  ", "\t", "\n\n", "\r\n"])


def tag(r, text):
    return "{%" + r.choice(["", "", "-", "+"]) + " " + text + " " + r.choice(["", "", "-", "+"]) + "%}"


def statement(r, depth):
    kind = r.randrange(16)
    body = lambda: "".join(statement(r, depth - 1) for _ in range(r.randrange(1, 4)))
    if depth <= 0 or kind < 4:
        return space(r) + "{{" + r.choice(["", "", "-"]) + " " + expression(r, 2) + " " + \
            r.choice(["", "", "-"]) + "}}" + space(r)
    if kind == 4:
        return space(r) + tag(r, "if " + expression(r, 2)) + body() + tag(r, "elif " + expression(r, 1)) + \
            body() + tag(r, "else") + body() + tag(r, "endif")
    if kind == 5:
        return tag(r, "if " + expression(r, 1)) + space(r) + body() + space(r) + tag(r, "endif") + space(r)
    if kind < 8:
        head = r.choice(["for x in %s", "for k, v in %s", "for x in %s if x", "for (x, y), z in %s",
                         "for x in %s if x is string"]) % expression(r, 1)
        extra = r.choice(["", "{{ loop.index }}", "{{ loop.last }}", "{{ loop.length }}", "{{ loop.previtem }}",
                          "{{ loop.nextitem }}", "{{ loop.cycle(1, 2) }}", "{{ loop.changed(x) }}",
                          "{{ loop.revindex }}", tag(r, "break"), tag(r, "continue")])
        other = tag(r, "else") + "E" if r.random() < 0.3 else ""
        return tag(r, head) + "{{ x }}" + extra + body() + other + tag(r, "endfor") + space(r)
    if kind < 11:
        name = r.choice(["x", "s", "n", "l", "ns.x", "ns.y", "d", "a, b", "bos_token"])
        return tag(r, "set %s = %s" % (name, expression(r, 2)))
    if kind == 11:
        return tag(r, r.choice(["set x", "set s | upper", "set s | trim | length"])) + body() + tag(r, "endset")
    if kind == 12:
        return tag(r, "macro f(a, b=%s, c='z')" % expression(r, 1)) + "[{{ a }}|{{ b }}|{{ c }}|{{ x }}]" + \
            r.choice(["", "{{ caller() }}", "{{ varargs }}", "{{ kwargs }}"]) + tag(r, "endmacro")
    if kind == 13:
        return r.choice(["{{ f(1, 2) }}", "{{ f() }}", "{{ f(c=3) }}", "{{ f(1, 2, 3, 4) }}", "{{ f(q=1) }}",
                         tag(r, "call f(1)") + "C{{ x }}" + tag(r, "endcall"),
                         tag(r, "filter upper") + "abc{{ x }}" + tag(r, "endfilter"),
                         tag(r, "with q = 1, x = 5") + "{{ q }}{{ x }}" + tag(r, "endwith"),
                         tag(r, "generation") + "g{{ x }}" + tag(r, "set x = 9") + tag(r, "endgeneration")])
    if kind == 14:
        return r.choice(["{# c #}", "{#- c -#}", "\n  {# c #}\n", "{# c +#}\n",
                         tag(r, "raw") + "{{ x }}" + space(r) + tag(r, "endraw")]) + space(r)
    return space(r) + r.choice(["text", "{", "}", "%}", "{ {", "a\nb", "#}", "\u00fc"]) + space(r)


def conversation(r):
    words = ["hi", "", " x ", "a\nb", "\u00fc\U0001F600", "<think>t</think>\n\nanswer", "{{ x }}", "'q' \"r\"", "A"]
    messages = []
    for i in range(r.randrange(0, 6)):
        role = r.choice(["user", "assistant", "system", "tool", "user", "assistant"])
        message = {"role": role, "content": r.choice(words + [None, [{"type": "text", "text": "p"}]])}
        if role == "assistant" and r.random() < 0.4:
            message["tool_calls"] = [{"id": "c1", "type": "function", "function": {
                "name": "get", "arguments": r.choice([{"a": 1.0, "b": [True, None]}, "{\"a\": 1}", {}])}}]
        if r.random() < 0.2:
            message["reasoning_content"] = r.choice(words)
        if role == "tool":
            message["name"] = "get"
            message["tool_call_id"] = "c1"
        messages.append(message)
    out = {"people": [{"name": "Bo", "k": 2, "a": {"b": 1}}, {"name": "al", "k": 1, "a": {"b": 3}}],
           "messages": messages, "d": {"a": 1, "b": "two", "items": 3}, "l": ["x", "y", "z"], "s": "a,b", "n": 5}
    if r.random() < 0.4:
        out["tools"] = [{"type": "function", "function": {"name": "get", "description": "d", "parameters": {
            "type": "object", "properties": {"a": {"type": ["number", "null"], "enum": [1, 2.5]}},
            "required": ["a"]}}}]
    if r.random() < 0.3:
        out["enable_thinking"] = r.choice([True, False])
    return out


def mutate(r, source):
    for _ in range(r.randrange(1, 4)):
        kind = r.randrange(6)
        at = r.randrange(len(source) + 1)
        if kind == 0:
            source = source[:at] + source[at + r.randrange(1, 8):]
        elif kind == 1:
            source = source[:at] + r.choice(["-", "+", " ", "\n", "'", "|", "}", "not ", "1"]) + source[at:]
        elif kind == 2:
            lines = source.split("\n")
            del lines[r.randrange(len(lines))]
            source = "\n".join(lines)
        elif kind == 3:
            old, new = r.choice([("-%}", "%}"), ("{%-", "{%"), ("content", "role"), (" and ", " or "), ("==", "!="),
                                 ("[0]", "[-1]"), ("'user'", "'tool'"), ("trim", "upper"), ("length", "list"),
                                 ("is defined", "is string"), ("+", "~"), ("loop.last", "loop.first"), ("| tojson", "")])
            source = source.replace(old, new, r.randrange(1, 3))
        elif kind == 4:
            ends = [i for i in range(len(source)) if source.startswith("%}", i) or source.startswith("}}", i)]
            if ends:
                i = r.choice(ends) + 2
                source = source[:i] + "{{ " + expression(r, 2) + " }}" + source[i:]
        else:
            source = source[:at] + r.choice(["\n", "  ", "\t\n"]) + source[at:]
    return source


OWN_TEMPLATES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "golden", "templates")
QLORA_ADDRESS = "0x7fa90badc0de"  # what the engine has for one
KINDS = ["expression", "statement", "mutated"] + [name for name, make in DOCUMENTED]


def case_of(r, kind, sources):
    start = "{% set ns = namespace(x=1) %}{% set x = 'X' %}"
    if kind == "mutated" and sources:
        return mutate(r, r.choice(sources))
    if kind in ("statement", "mutated"):
        return start + "".join(statement(r, 3) for _ in range(r.randrange(1, 5)))
    if kind == "expression":
        return start + "{{ " + expression(r, 3) + " }}"
    text = dict(DOCUMENTED)[kind](r)
    return start + (text if kind in ("global", "scope") else "{{ " + text + " }}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=9000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--show", type=int, default=12)
    parser.add_argument("--kind", choices=KINDS, help="only these cases")
    parser.add_argument("--unsupported", action="store_true", help="list what is not supported")
    parser.add_argument("--templates", default="../shared/templates")
    parser.add_argument("--side", default="build/template_side")
    options = parser.parse_args()
    r = random.Random(options.seed)
    env = environment()
    side = Side(options.side)
    sources = [open(f, encoding="utf-8", newline="").read()
               for f in sorted(glob.glob(os.path.join(OWN_TEMPLATES, "*.jinja")) +
                               glob.glob(os.path.join(options.templates, "*.jinja")))]
    equal = errors = 0
    unsupported = {}
    different = []
    chats = os.path.join(options.templates, "conversations.json")
    given = []
    if os.path.exists(chats) and options.kind is None:
        with open(chats, encoding="utf-8") as f:
            given = [(source, dict(chat, add_generation_prompt=prompt)) for chat in json.load(f)
                     for source in sources for prompt in (False, True)]
    for case in range(-len(given), options.cases):
        if case < 0:
            source, chat = given[case]
        else:
            source = case_of(r, options.kind or KINDS[case % len(KINDS)], sources)
            chat = conversation(r)
        want, why = expected(env, source, chat)
        got, error = side.render(source, chat)
        # an address is different each time: the engine refuses to print it
        address = r" at 0x[0-9a-f]{6,}|<(function|class|Macro|built-in|method) |<bound method|<jinja2"
        if want is not None and re.search(address, want.replace("', '", "").replace("|", ""), re.IGNORECASE):
            if got is None or QLORA_ADDRESS in got.replace("', '", "").replace("|", ""):
                want, why = got, "prints an address"
        if want is not None and any(0xD800 <= ord(c) < 0xE000 for c in want):
            want, why = None, "a surrogate"
        if want == got and (error is None or "CRASH" not in error):
            equal += 1
            errors += want is None
        elif error is not None and re.search("not supported|64 bits|cannot be printed", error):
            reason = error.split(": ", 1)[-1][:90]
            unsupported[reason] = unsupported.get(reason, 0) + 1
        else:
            different.append((case, source, chat, want, why, got, error))
    for case, source, chat, want, why, got, error in different[:options.show]:
        print("case %d: %r" % (case, source[-700:] if len(source) > 700 else source))
        print("   jinja2: %r" % (want[-300:] if want is not None else why,))
        print("   ours:   %r" % (got[-300:] if got is not None else error,))
        if want is not None and got is not None:
            at = next((i for i, (a, b) in enumerate(zip(want, got)) if a != b), min(len(want), len(got)))
            print("   at %d: %r / %r" % (at, want[max(0, at - 30):at + 40], got[max(0, at - 30):at + 40]))
    print("%d equal (%d of them errors), %d not supported, %d different"
          % (equal, errors, sum(unsupported.values()), len(different)))
    if options.unsupported:
        for reason in sorted(unsupported, key=unsupported.get, reverse=True):
            print("%6d %s" % (unsupported[reason], reason))
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
