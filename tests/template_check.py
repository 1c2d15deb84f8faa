#!/usr/bin/env python3
"""Compares the template engine with jinja2: random expressions, statements and whitespace, mutated
templates, random conversations. Needs jinja2 3.1.6.

usage: template_check.py [--cases N] [--seed S] [--templates DIR] [--tokenize build/tokenize]

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
import tempfile
from datetime import datetime

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox


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


def found(tokenize, folder, source, conversation):
    template_path = os.path.join(folder, "t.jinja")
    chat_path = os.path.join(folder, "c.json")
    with open(template_path, "wb") as f:
        f.write(source.encode("utf-8", "surrogatepass"))
    with open(chat_path, "w", encoding="utf-8") as f:
        json.dump(conversation, f, ensure_ascii=False)
    run = subprocess.run([tokenize, "--chat", chat_path, "--chat-template", template_path, "--bos",
                          "<s>", "--eos", "</s>", "--pad", "<pad>", "--unk", "<unk>", "--now",
                          "2026-07-26T12:00:00", "--text"], capture_output=True, timeout=20)
    if run.returncode == 0:
        return run.stdout.decode("utf-8", "replace"), None
    if run.returncode != 1:
        return None, "CRASH %d" % run.returncode
    return None, run.stderr.decode("utf-8", "replace")


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
    out = {"messages": messages, "d": {"a": 1, "b": "two", "items": 3}, "l": ["x", "y", "z"], "s": "a,b", "n": 5}
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


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--show", type=int, default=12)
    parser.add_argument("--templates", default="../shared/templates")
    parser.add_argument("--tokenize", default="build/tokenize")
    options = parser.parse_args()
    r = random.Random(options.seed)
    env = environment()
    sources = [open(f, encoding="utf-8", newline="").read()
               for f in sorted(glob.glob(os.path.join(options.templates, "*.jinja")))]
    equal = errors = unsupported = 0
    different = []
    start = "{% set ns = namespace(x=1) %}{% set x = 'X' %}"
    with tempfile.TemporaryDirectory() as folder:
        for case in range(options.cases):
            kind = case % 3
            if kind == 0:
                source = start + "{{ " + expression(r, 3) + " }}"
            elif kind == 1 or not sources:
                source = start + "".join(statement(r, 3) for _ in range(r.randrange(1, 5)))
            else:
                source = mutate(r, r.choice(sources))
            chat = conversation(r)
            want, why = expected(env, source, chat)
            got, error = found(options.tokenize, folder, source, chat)
            # an address is different each time: the engine refuses to print it
            address = r" at 0x[0-9a-f]{6,}|<(function|class|Macro|built-in) "
            if want is not None and re.search(address, want, re.IGNORECASE):
                if got is None:
                    want, why = None, "prints an address"
            if want is not None and any(0xD800 <= ord(c) < 0xE000 for c in want):
                want, why = None, "a surrogate"
            if want == got and (error is None or "CRASH" not in error):
                equal += 1
                errors += want is None
            elif error is not None and ("not supported" in error or "64 bits" in error):
                unsupported += 1
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
          % (equal, errors, unsupported, len(different)))
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
