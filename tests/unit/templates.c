// templates.c - the template engine: what jinja2 does, limits, and real templates with golden
// renderings where they are present (../shared/templates).
#define _POSIX_C_SOURCE 200809L // mkdtemp, rmdir

#include "qlora.h"
#include "qlora_text.h"

#include "test.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define SHARED "../shared/templates/"

static const char conversation[] =
    "{\"messages\": [{\"role\": \"user\", \"content\": \"hi\"}], \"d\": {\"items\": 3, \"a\": 1.0},"
    " \"big\": 123456789012345678901234567890, \"round\": 100000000000000000000,"
    " \"least\": -9223372036854775809}";

static qlora_text* lib;

// Renders `source`; the result ends with a zero, or is NULL and *why says why.
static char* render(const char* source, size_t size, const char* json, bool prompt,
                    qlora_text_spans* spans, const char** why) {
    qlora_text_template* compiled = NULL;
    qlora_text_render_desc desc;
    qlora_text_bytes out = {0};
    char* copy = NULL;
    memset(&desc, 0, sizeof desc);
    desc.conversation = json;
    desc.conversation_size = strlen(json);
    desc.generation_prompt = prompt;
    desc.bos_token = "<s>";
    desc.eos_token = "</s>";
    desc.pad_token = "<pad>";
    desc.unk_token = "<unk>";
    desc.clock = 1785067200; // 2026-07-26T12:00:00
    static char error[1024];
    bool good = qlora_text_template_compile(lib, "t.jinja", source, size, &compiled) == QLORA_OK &&
                qlora_text_template_render(compiled, &desc, &out, spans) == QLORA_OK;
    snprintf(error, sizeof error, "%s", qlora_text_last_error(lib));
    *why = error;
    if (good) {
        copy = (char*)malloc(out.count + 1);
        if (copy != NULL) {
            memcpy(copy, out.count > 0 ? out.data : "", out.count);
            copy[out.count] = '\0';
        }
    }
    qlora_text_bytes_free(lib, &out);
    qlora_text_template_close(compiled);
    return copy;
}

// Each row: a template, and what it renders to; with a "!" in front, what its error contains.
static const char* const behaviours[][2] = {
    // formats of numbers
    {"{{ '%05.1f|%-4d|%+d|%x|%#o|%c|%%|%.3d|%5s|%r' % (2.25, 7, 3, 255, 8, 65, 5, 'a', 'b') }}",
     "002.2|7   |+3|ff|0o10|A|%|005|    a|'b'"},
    {"{{ '%#.3g %g %a' % (100, 1e-5, '\xC3\xA9') }}", "100. 1e-05 '\\xe9'"},
    {"{{ '{:010,} {:_x} {:.3} {:.1%} {:>{w}} {!r:^5}|'.format(-7, 1000000, 1234.5, 0.25, 1, 'a', "
     "w=3) }}",
     "-0,000,007 f_4240 1.23e+03 25.0%   1  'a' |"},
    {"{{ '{:,x}'.format(1) }}", "!does not fit"},
    {"{{ '{} {0}'.format(1) }}", "!are mixed"},
    {"{{ 1000000 % 1e-7 }} {{ -7.5 // 2 }} {{ 0.1 ** -3 }} {{ 1e22 % 12345.678 }}",
     "4.525188817411374e-11 -4.0 999.9999999999999 968.6064121235104"},
    {"{{ 1.5e300 ** 3 }}", "!a power is too large"},
    // whole numbers of more than 53 bits: quotients are rounded once, comparisons are exact
    {"{{ 1 / 9007199254740993 }} {{ -759567891056027357 / 80683 }} {{ -25280731329829578 / 3 }} "
     "{{ 9223372036854775807 / -9223372036854775807 }} {{ 0 / -9007199254740993 }}",
     "1.1102230246251564e-16 -9414224694867.906 -8426910443276526.0 -1.0 -0.0"},
    {"{{ 9007199254740993 == 9007199254740992.0 }}{{ 9007199254740993 > 9007199254740992.0 }}"
     "{{ 9223372036854775807 < 9223372036854775808.0 }}{{ -9007199254740993 < -9007199254740992.0 "
     "}}{{ 9007199254740993 in [9007199254740992.0] }}{{ 3 < 3.5 }}{{ 4 > 3.5 }}{{ -3 > -3.5 }}",
     "FalseTrueTrueTrueFalseTrueTrueTrue"},
    {"{{ 9223372036854775807 > 1e300 }}{{ 2 < 'inf' | float }}{{ 2 > '-inf' | float }}"
     "{{ 2 == 'nan' | float }}{{ 2 < 'nan' | float }}{{ 2 == 2.0 }}{{ {2: 'a'}[2.0] }}",
     "FalseTrueTrueFalseFalseTruea"},
    {"{{ 1e308 | round(2, 'floor') }}", "!round: the number is not finite with 2"},
    {"{{ 'x'.expandtabs(2147483648) }}", "!expandtabs: 2147483648 is too large"},
    {"{{ 15 | round(-1) }} {{ 25 | round(-1) }} {{ 1234.5 | round(-2) }} "
     "{{ 0.25 | round(1, 'ceil') }}",
     "20 20 1200.0 0.3"},
    {"{{ '0x1f' | int(base=16) }} {{ 'zz' | int(0, 36) }} {{ '\xD9\xA1\xD9\xA2' | int }} "
     "{{ 'inf' | float }}",
     "31 1295 12 inf"},
    {"{{ ('word ' * 900) | int }}{{ ('12' * 900 ~ 'x') | float }}", "00.0"},
    {"{{ ('12' * 900) | int }}", "!does not fit 64 bits"},
    // filters
    {"{{ 1000 | filesizeformat }} {{ 1025 | filesizeformat(true) }} {{ 1 | filesizeformat }} "
     "{{ '123456789' | filesizeformat }}",
     "1.0 kB 1.0 KiB 1 Byte 123.5 MB"},
    {"{{ 'one two-three  four' | wordwrap(8) }}|{{ 'abcdefgh' | wordwrap(3, wrapstring='/') }}",
     "one two-\nthree\nfour|abc/def/gh"},
    {"{{ '<p>a &amp;\n <b>b</b>&nbsp;&#x41;<!-- c --> &lt' | striptags }}", "a & b\xC2\xA0"
                                                                            "A <"},
    {"{{ '&Abreve;' | striptags }}", "!\"&Abreve;\" is not supported"},
    {"{{ 'f(&bar); &lt);' | striptags }}", "f(&bar); <);"},
    {"{{ {'id': 'a\"b', 'class': none, 'n': 1} | xmlattr }}|{{ {'a b': 1} | xmlattr }}",
     "!cannot be the name"},
    {"{{ {'id': 'a\"b', 'class': none, 'n': 1} | xmlattr }}", " id=\"a&#34;b\" n=\"1\""},
    {"{{ '(see www.a.org/x_(y)), me@b.de' | urlize(9, true) }}",
     "(see <a href=\"https://www.a.org/x_(y)\" rel=\"nofollow noopener\">www.a.org...</a>), "
     "<a href=\"mailto:me@b.de\">me@b.de</a>"},
    {"{{ {'b': 1, 'a': ['x' * 40, 'y' * 40]} | pprint }}",
     "{'a': ['xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx',\n"
     "       'yyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyy'],\n 'b': 1}"},
    {"{{ [1, 2] | random }}", "!\"random\" is not supported: its result cannot be repeated"},
    {"{{ [none, none] | sort }}{{ [[1], [2]] | sort(attribute='z') }}", "[None, None][[1], [2]]"},
    {"{% filter length %}abc{% endfilter %}", "!not a string"},
    {"{{ 'a' is divisibleby({}) }}{{ '%s' is divisibleby(3) }}", "FalseFalse"},
    {"{{ '\\x7f' | tojson(true) }}{{ '\\x7f' | tojson }}", "\"\\u007f\"\"\x7F\""},
    {"{{ d is sameas d }}{{ [] is sameas [] }}{{ none is sameas none }}{{ true is sameas true }}"
     "{{ 1 is sameas true }}{{ 5 is sameas 5 }}{{ 5 is sameas 5.0 }}{{ 'a' is sameas 'b' }}"
     "{{ true is sameas false }}{{ messages[0].role is sameas messages[0].role }}",
     "TrueFalseTrueTrueFalseTrueFalseFalseFalseTrue"},
    {"{{ messages[0].role is sameas 'user' }}", "!not supported for equal values of type str"},
    {"{{ 1.5 is sameas 1.5 }}", "!not supported for equal values of type float"},
    {"{{ 257 is sameas 257 }}", "!not supported for equal values of type int"},
    // methods
    {"{{ 'Stra\xC3\x9F"
     "e'.casefold() }}{{ 'abc'.translate({97: 'X', 98: none}) }}"
     "{{ '{a:>3}'.format_map({'a': 1}) }}{{ (5).bit_length() }}{{ (0.5).as_integer_ratio() }}"
     "{{ range(2, 9, 3).index(5) }}{{ {}.fromkeys('ab', 0) }}{{ (5).real }}{{ true.imag }}",
     "strasseXc  13(1, 2)1{'a': 0, 'b': 0}50"},
    {"{{ strftime_now('%V %U %W %G %C') }}", "30 30 29 2026 20"},
    {"{{ nope }}|{{ messages[9] }}|{{ none.x }}", "||"},
    {"{{ nope.x }}", "!\"nope\" is undefined"},
    {"{{ d['items'] }}|{{ d.items is callable }}|{{ d.a }}", "3|True|1.0"},
    {"{{ big }} {{ [big] | tojson }}",
     "123456789012345678901234567890 [123456789012345678901234567890]"},
    {"{{ big > 5 }}{{ 5 > big }}{{ big >= big }}{{ big == big }}{{ big < 1e300 }}{{ big > 1e29 }}"
     "{{ big < 'inf' | float }}{{ big > '-inf' | float }}{{ big < 'nan' | float }}"
     "{{ round == 1e20 }}{{ 1e20 in [round] }}{{ [big, 1, round] | sort | first }}"
     "{{ least < -5.5 }}{{ least > -1e20 }}{{ least < big }}",
     "TrueFalseTrueTrueTrueTrueTrueTrueFalseTrueTrue1TrueTrueTrue"},
    {"{{ 9223372036854775807 + 1 }}", "!does not fit 64 bits"},
    {"{{ 1e16 }} {{ 1e-7 }} {{ 0.1 + 0.2 }} {{ -0.0 }} {{ 1.5e300 }}",
     "1e+16 1e-07 0.30000000000000004 -0.0 1.5e+300"},
    {"{{ 7 // -2 }} {{ -7 % 3 }} {{ 2 ** 3 ** 2 }} {{ -2 ** 2 }} {{ 4 / 2 }}", "-4 2 64 4 2.0"},
    {"{{ 'a' ~ 'b' | upper }}{{ 1 + [1, 2] | length }}{{ 1 < 2 < 3 }}", "aB3True"},
    {"{{ 'abc'[::-1] }}{{ [1, 2, 3][-2:] }}{{ (1,) }}{{ [1].0 }}", "cba[2, 3](1,)1"},
    {"{{ ['a', \"it's\", none, 1.5, {'k': ('t',)}] }}",
     "['a', \"it's\", None, 1.5, {'k': ('t',)}]"},
    {"{% set g = messages | map(attribute='role') %}{{ g | join }}|{{ g | join }}", "user|"},
    {"{{ messages | map(attribute='role') | length }}", "!a generator has no length"},
    {"{% set _ = messages.append(1) %}", "!does not allow \"append\""},
    {"{{ messages.append is defined }}", "False"},
    {"{{ d | tojson(indent=1, sort_keys=true) }}", "{\n \"a\": 1.0,\n \"items\": 3\n}"},
    {"{{ '\\u00e9<' | tojson }}{{ '\\u00e9' | tojson(true) }}", "\"\xC3\xA9<\"\"\\u00e9\""},
    {"a\n  {% if true %}\n  b\n  {% endif %}\nc\n", "a\n  b\nc"},
    {"  {%+ if true %}x{% endif +%}\ny", "  x\ny"},
    {"a  {%- if true -%}\n\n b {%- endif %}\n\nc", "ab\nc"},
    {"x {# c #}\ny\r\n{% raw %}{{ a }}{% endraw %}", "x y\n{{ a }}"},
    {"{% set x = 1 %}{% for i in [1, 2] %}{{ x }}{% set x = x + 1 %}{% endfor %}{{ x }}", "111"},
    {"{% for i in [1] %}{{ bos_token }}{% endfor %}{% set bos_token = 'z' %}", ""},
    {"{% set ns = namespace(a=1) %}{% for i in [1, 2] %}{% set ns.a = ns.a + i %}{% endfor %}"
     "{{ ns.a }}",
     "4"},
    {"{% for x in [1, 2, 3, 4] if x % 2 == 0 %}{{ loop.index }}/{{ loop.length }} {% endfor %}",
     "1/2 2/2 "},
    {"{% for x in [1] %}{% continue %}{% else %}e{% endfor %}", "e"},
    {"{% for x in [1, 2, 3] %}{{ loop.previtem }}<{{ loop.nextitem }} {% endfor %}", "<2 1<3 2< "},
    {"{% macro m(a, b='z') %}[{{ a }}{{ b }}{{ x }}]{% endmacro %}{% set x = 5 %}{{ m(1) }}",
     "[1z5]"},
    {"{% macro m() %}({{ caller(1) }}){% endmacro %}{% call(x) m() %}<{{ x }}>{% endcall %}",
     "(<1>)"},
    // `loop` is not for sets in or as a loop's variable; `caller` as an argument needs a default
    {"{% for i in [1] %}{% if 0 %}{% set a, loop = 1, 2 %}{% endif %}{% endfor %}",
     "!\"loop\" cannot be set in a loop"},
    {"{% for i in [1] %}{% else %}{% set loop %}{% endset %}{% endfor %}",
     "!\"loop\" cannot be set in a loop"},
    {"{% for i in [1] %}{% macro m() %}{% set loop = 1 %}{% endmacro %}{% endfor %}",
     "!\"loop\" cannot be set in a loop"},
    {"{% for a, (b, loop) in [] %}{% endfor %}", "!\"loop\" cannot be set in a loop"},
    {"{% set loop = 1 %}{{ loop }}{% for i in [5] %}{{ loop.index }}{% with loop = 2 %}{{ loop }}"
     "{% endwith %}{% endfor %}{% set loop = 3 %}{{ loop }}",
     "1123"},
    {"{% set ns = namespace() %}{% for i in [1] %}{% set ns.loop = 4 %}{% endfor %}{{ ns.loop }}",
     "4"},
    {"{% macro m(caller) %}{{ caller }}{% endmacro %}", "!the argument \"caller\" needs a default"},
    {"{% macro m(caller) %}{% endmacro %}{% macro n(caller=none) %}{{ caller() if caller }}"
     "{% endmacro %}{{ m.caller }}{{ n.caller }}{{ n() }}{% call n() %}x{% endcall %}",
     "FalseTruex"},
    // a loop or macro whose `loop` or `caller` is first set further in has none
    {"{% for i in [1] %}{% macro m(loop=1) %}{% endmacro %}{{ loop is defined }}{% endfor %}"
     "{% for i in [1] %}{{ loop.index }}{% macro m(loop=1) %}{% endmacro %}{{ loop.index }}"
     "{% endfor %}",
     "False11"},
    {"{% macro m() %}{% for caller in [1] %}{{ caller }}{% endfor %}{% endmacro %}{{ m() }}"
     "{{ m.caller }}",
     "1False"},
    {"{% macro m(caller) %}{% macro n(caller=1) %}{% endmacro %}{{ caller }}{% endmacro %}"
     "{{ m(5) }}",
     "5"},
    {"{% macro m() %}{% macro n(caller=1) %}{% endmacro %}{% endmacro %}{% call m() %}{% endcall "
     "%}",
     "!caller"},
    // the end of the template ends a comment or raw block that nothing follows
    {"a {#", "a "},
    {"a {#-", "a"},
    {"a{% raw %}", "a"},
    {"a {# b", "!a comment {# is not closed"},
    {"a{% raw %} ", "!{% raw %} is not closed"},
    {"{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "!nested deeper than"},
    {"{% macro m(a) %}{% endmacro %}{{ m(1, 2) }}", "!takes 1 arguments, 2 are given"},
    {"{{ 'Stra\xC3\x9F\x65' | upper }}{{ '\xCE\xA3\xCE\x91\xCE\xA3'.lower() }}",
     "STRASSE\xCF\x83\xCE\xB1\xCF\x82"},
    // case is a property of its own: of Roman numerals, circled letters and modifiers, too
    {"{{ '\\u2167'.isupper() }}{{ '\\u24e8\\ufb04'.title() }}{{ '\\u0345'.islower() }}"
     "{{ '\\u24c3\\u03c3'.islower() }}{{ '\\u0187\\u02e4' is upper }}{{ '\\u01c5'.isupper() }}"
     "{{ '\\u2167\\u24d0'.swapcase() }}{{ '\\u01c5x'.istitle() }}",
     "True\xE2\x93\x8E\xEF\xAC\x84TrueFalseFalseFalse\xE2\x85\xB7\xE2\x92\xB6True"},
    // which sigma: marks, points and apostrophes do not end a word
    {"{{ '\\u0391\\u03a3.\\u0395'.lower() }} {{ \"\\u0391\\u03a3'\\u0395 \\u0391\\u03a3'\".lower() "
     "}} "
     "{{ '\\u0391\\u00ad\\u03a3'.lower() }}",
     "\xCE\xB1\xCF\x83.\xCE\xB5 \xCE\xB1\xCF\x83'\xCE\xB5 \xCE\xB1\xCF\x82' "
     "\xCE\xB1\xC2\xAD\xCF\x82"},
    {"{{ 'a,,b'.split(',') }}{{ ' a  b '.split() }}{{ 'a=b=c'.rsplit('=', 1) }}",
     "['a', '', 'b']['a', 'b']['a=b', 'c']"},
    {"{{ '\\u0391\\u03a3 \\u0391\\u0391\\u03a3' | title }}",
     "\xCE\x91\xCF\x83 \xCE\x91\xCE\xB1\xCF\x82"},
    {"{{ \"it's\" | title }}{{ \"it's\".title() }}", "It'sIt'S"},
    {"{{ '%s %d %5.2f' % ('a', 3, 2.5) }}|{{ '{:>3}{}'.format('a', 1) }}", "a 3  2.50|  a1"},
    {"{{ '<a>' | safe + '<b>' }}|{{ '<a>' | safe ~ '<b>' }}", "<a>&lt;b&gt;|<a><b>"},
    {"{{ {'b': 1, 'A': 2} | dictsort }}{{ ['b', 'A'] | sort }}", "[('A', 2), ('b', 1)]['A', 'b']"},
    {"{{ 2.5 | round }}{{ 10 | round }}{{ '3.7' | int }}{{ 'x' | int(7) }}", "2.01037"},
    {"{% if nope %}{{ 1 | nofilter }}{% endif %}ok", "ok"},
    {"{% if true %}{{ 1 | nofilter }}{% endif %}", "!no filter named \"nofilter\""},
    {"a\n{{ 1 | nofilter }}", "!line 2: there is no filter named"},
    {"a\n{{ raise_exception('Bad: ' ~ 1) }}", "!line 2: Bad: 1"},
    {"{% if true %}", "!one of these tags is missing"},
    {"{% foo %}", "!unknown tag \"foo\""},
    {"{% include 'x' %}", "!\"include\" is not supported"},
    {"{% break %}", "!a loop around break"},
    {"{{ 1 < 'a' }}", "!cannot be ordered"},
    {"{{ strftime_now('%Y-%m-%d %H:%M:%S %A %d %b') }}", "2026-07-26 12:00:00 Sunday 26 Jul"},
    {"{% set c = cycler(1, 2) %}{{ c.next() }}{{ c.next() }}{{ c.next() }}"
     "{% set j = joiner('-') %}{{ j() }}a{{ j() }}b",
     "121a-b"},
    {"{% set b | upper %}x{{ 1 }}{% endset %}{{ b }}{% filter lower %}AB{% endfilter %}", "X1ab"},
    {"{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "1"},
    // constants are computed first, where a slice of a number is undefined
    {"{{ (7)[:-1] }}|{{ [(0)[1:2], 1] | upper }}|{{ 'a' ~ (7)[1:] }}|{{ 'abc'[1:] }}",
     "|[UNDEFINED, 1]|a|bc"},
    {"{% if (7)[1:] %}{% endif %}", "!a int cannot be sliced"},
    {"{{ messages ~ (7)[1:] }}", "!a int cannot be sliced"},
    {"{{ messages | map(attribute='role') | wordcount }}", "5"},
    {"{{ messages | map(attribute='role') | upper }}", "!a generator cannot be printed"},
    // differences of views are sets
    {"{{ d.keys() - ['a'] }}{{ d - d.keys() }}{{ ['q'] - d.keys() }}", "{'items'}set(){'q'}"},
    {"{{ (d.keys() - ['a']) | length }}{{ 'a' in d.keys() - ['a'] }}{{ (d.items() - d.items()) | "
     "list }}",
     "1False[]"},
    {"{{ d.keys() == ['a', 'items'] - {}.keys() }}{{ d.keys() > ['a'] - {}.keys() }}"
     "{{ d.keys() <= d.items() }}{{ d.values() == d.values() }}{{ d.values() in d }}",
     "TrueTrueFalseFalseFalse"},
    {"{{ d.values() - [] }}", "!a dict view - a list is not possible"},
    {"{{ (d.keys() - []) - [] }}", "!a set - a list is not possible"},
    {"{{ d.keys() - 5 }}", "!a int cannot be made a set"},
    {"{{ d.keys() - [[1]] }}", "!a list cannot be the key"},
    {"{{ (d.keys() - []) | last }}", "!a set has no order"},
    {"{{ (d.keys() - []) | tojson }}", "!set"},
    {"{{ d.keys().isdisjoint(['b']) }}{{ d.keys().isdisjoint(d) }}", "TrueFalse"},
    {"{{ 'a b/c' | urlencode }}|{{ {'x y': '/'} | urlencode }}|{{ ['ab', (1, 2)] | urlencode }}|"
     "{{ none | urlencode }}",
     "a%20b/c|x+y=%2F|a=b&1=2|None"},
    {"{{ [1] | urlencode }}", "!item 0 is not a pair"},
    {"{{ 5 .real }}", "5"},
    {"{{ dict(nope) }}", "!\"nope\" is undefined"},
    {"{% set n = namespace(nope) %}{{ n.a }}", "!\"nope\" is undefined"},
    {"{{ self }}", "!\"self\" is not supported"},
    {"{{ self is defined }}", "!\"self\" is not supported"},
    {"{% set self = 3 %}{{ self }}", "3"},
    {"{{ d is filter }}", "!a dict is not the name of a filter"},
    {"{{ d is test }}", "!a dict is not the name of a test"},
    {"{{ '\xC7\x85\x61\x42'.swapcase() }}", "\xC7\x85\x41\x62"},
    {"{{ 'a' % nope }}{{ 'b' % range(2) }}{{ 'c' % [1] }}|{{ '%s' % nope }}|", "abc||"},
    {"{{ 'a' % 1 }}", "!does not use all its values"},
    // long parts: at the start, at the end, with a letter more, twice
    {"{% set p = 'ab' * 40 %}{{ ('x' ~ p ~ 'y').find(p) }} {{ p.find(p) }} {{ (p ~ p).find(p, "
     "1) }}"
     " {{ (p ~ 'a').rfind(p) }} {{ ('y' ~ p).rfind(p) }} {{ (p ~ p).rfind(p) }} {{ p in p[1:] "
     "}}"
     " {{ ('x' ~ p ~ p ~ 'y').split(p) }} {{ p.rfind(p ~ 'c') }} {{ p.count(p) }}",
     "1 0 2 0 1 80 False ['x', '', 'y'] -1 1"},
    {"{{ 1 if false }}|{{ 'x' is in 'xyz' }}|{{ not 1 == 2 }}", "|True|True"}};

TEST behaviour(void) {
    for (size_t i = 0; i < sizeof behaviours / sizeof behaviours[0]; i++) {
        const char* why = NULL;
        char* got =
            render(behaviours[i][0], strlen(behaviours[i][0]), conversation, false, NULL, &why);
        if (behaviours[i][1][0] == '!') {
            bool right = got == NULL && strstr(why, behaviours[i][1] + 1) != NULL;
            free(got);
            ASSERTm(behaviours[i][0], right);
            continue;
        }
        ASSERTm(why, got != NULL);
        ASSERT_STR_EQ(behaviours[i][1], got);
        free(got);
    }
    PASS();
}

// Templates that would run or grow without end stop at a limit, soon.
TEST hostile(void) {
    static const char* const rows[] = {
        "{% set ns = namespace(s='aaaaaaaa') %}{% for i in range(100000) %}"
        "{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% for a in range(100000) %}{% for b in range(100000) %}{{ a }}{% endfor %}{% endfor %}",
        "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
        "{{ 'x' * 99999999999 }}", "{{ range(99999999) }}", "{{ [[1] * 1000] * 100000 }}",
        "{{ ('x' * 10000).replace('x', 'y' * 100000) }}",
        "{% set ns = namespace(l=[1]) %}{% for i in range(64) %}{% set ns.l = [ns.l, ns.l] %}"
        "{% endfor %}{{ ns.l }}",
        "{% set ns = namespace(l=[]) %}{% for i in range(5000) %}{% set ns.l = [ns.l] %}"
        "{% endfor %}{{ ns.l }}",
        "{{ 'a'.center(999999999999) }}", "{{ '%999999999d' % 1 }}",
        "{% macro m(a) %}{{ m(a + 1) }}{{ m(a + 1) }}{% endmacro %}{{ m(0) }}",
        "{% set t = 'a' * 1200000 %}{% set p = 'a' * 120000 ~ 'b' %}{{ p in t }}{{ t.rfind(p) }}"
        "{{ 1 / 0 }}",
        "{{ 10 ** 99999999 }}",
        // filters on long text: each ends, then the division stops the template
        "{% set t = 'a' ~ '-' * 1000000 %}{{ t | wordwrap(5) | length }}{{ 1 / 0 }}",
        "{% set t = '&ampersandsandsandsandsands ' * 30000 %}{{ t | striptags }}{{ 1 / 0 }}",
        "{% set t = '(' * 300000 ~ ')' * 300000 %}{{ t | urlize | length }}{{ 1 / 0 }}",
        "{% set t = 'a.' * 300000 %}{{ t | urlize | length }}{{ 1 / 0 }}",
        "{% set ns = namespace(l=['a' * 90]) %}{% for i in range(500) %}{% set ns.l = [ns.l] %}"
        "{% endfor %}{{ ns.l | pprint | length }}{{ ('a b ' * 200000) | pprint | length }}{{ 1 / 0 "
        "}}"};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        const char* why = NULL;
        clock_t start = clock();
        char* got = render(rows[i], strlen(rows[i]), conversation, false, NULL, &why);
        double seconds = (double)(clock() - start) / CLOCKS_PER_SEC;
        bool stopped = got == NULL;
        free(got);
        ASSERTm(rows[i], stopped);
        // Far below one; a sanitizer or an emulated processor says nothing about speed.
        ASSERTm(rows[i], test_brief() || seconds < 5.0);
    }
    PASS();
}

// Source that is nested too deep for any stack.
TEST deep_source(void) {
    static const char* const parts[][3] = {
        {"{{ ", "(", "1"},     {"{{ ", "-", "1"},       {"{{ ", "not ", "1"},
        {"{{ ", "[", "1"},     {"{{ 1", " + 1", " }}"}, {"{{ 'a'", " | upper", " }}"},
        {"{{ a", ".a", " }}"}, {"", "{% if 1 %}", "x"}, {"{{ 1", " if 1 else 1", " }}"}};
    size_t room = 400000;
    char* source = (char*)malloc(room);
    ASSERT(source != NULL);
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
        size_t used = 0;
        const char* why = NULL;
        used += (size_t)snprintf(source, room, "%s", parts[i][0]);
        for (int k = 0; k < 20000; k++) {
            used += (size_t)snprintf(source + used, room - used, "%s", parts[i][1]);
        }
        used += (size_t)snprintf(source + used, room - used, "%s", parts[i][2]);
        char* got = render(source, used, conversation, false, NULL, &why);
        bool stopped = got == NULL && strstr(why, "nested deeper than") != NULL;
        free(got);
        ASSERTm(why, stopped);
    }
    free(source);
    PASS();
}

TEST generation_spans(void) {
    static const char source[] = "{% for m in [1, 2] %}<{% generation %}{{ m }}\xC3\xBC"
                                 "{% endgeneration %}>{% endfor %}";
    const char* why = NULL;
    qlora_text_spans spans = {0};
    char* got = render(source, strlen(source), conversation, false, &spans, &why);
    ASSERTm(why, got != NULL);
    ASSERT_STR_EQ("<1\xC3\xBC><2\xC3\xBC>", got);
    free(got);
    ASSERT_EQ((size_t)2, spans.count);
    ASSERT_EQ((size_t)1, spans.data[0].begin); // bytes
    ASSERT_EQ((size_t)4, spans.data[0].end);
    ASSERT_EQ((size_t)6, spans.data[1].begin);
    ASSERT_EQ((size_t)9, spans.data[1].end);
    qlora_text_spans_free(lib, &spans);
    PASS();
}

// ---- real templates

static char* file_read(const char* path, size_t* size) {
    FILE* file = fopen(path, "rb");
    char* data = NULL;
    size_t room = 0;
    *size = 0;
    if (file == NULL) {
        return NULL;
    }
    for (;;) {
        if (room - *size < 2) {
            room = room * 2 + 65536;
            char* moved = (char*)realloc(data, room);
            if (moved == NULL) {
                break;
            }
            data = moved;
        }
        size_t got = fread(data + *size, 1, room - *size - 1, file);
        *size += got;
        if (got == 0) {
            break;
        }
    }
    fclose(file);
    data[*size] = '\0';
    return data;
}

#define MARK "\n@~8f3a~@\n"

// The part of `text` before the next mark; *rest is behind it.
static char* part_next(char** rest) {
    char* part = *rest;
    char* end = strstr(part, MARK);
    if (end == NULL) {
        return NULL;
    }
    *end = '\0';
    *rest = end + strlen(MARK);
    return part;
}

// All values of a JSON array as the template `each` prints them, with marks between.
static char* array_print(const char* path, const char* each) {
    size_t size = 0;
    const char* why = NULL;
    char* data = file_read(path, &size);
    char source[600];
    char* json = data != NULL ? (char*)malloc(size + 64) : NULL;
    char* printed = NULL;
    snprintf(source, sizeof source, "{%% for r in list %%}%s{{ mark }}{%% endfor %%}", each);
    if (json != NULL) {
        snprintf(json, size + 64, "{\"mark\": \"\\n@~8f3a~@\\n\", \"list\": %s}", data);
        free(data);
        data = NULL;
        printed = render(source, strlen(source), json, false, NULL, &why);
    }
    free(json);
    free(data);
    return printed;
}

// Spans as the golden files write them, in code points; "" if there are none.
static void spans_show(const char* text, const qlora_text_spans* spans, char* out, size_t room) {
    size_t used = 0;
    out[0] = '\0';
    for (size_t i = 0; i < spans->count && used + 60 < room; i++) {
        size_t at[2] = {0, 0};
        for (size_t k = 0; k < spans->data[i].end; k++) {
            size_t start = ((unsigned char)text[k] & 0xC0) != 0x80 ? 1 : 0;
            at[0] += k < spans->data[i].begin ? start : 0;
            at[1] += start;
        }
        used += (size_t)snprintf(out + used, room - used, "%s[%lu, %lu]", i > 0 ? ", " : "[",
                                 (unsigned long)at[0], (unsigned long)at[1]);
    }
    if (spans->count > 0) {
        snprintf(out + used, room - used, "]");
    }
}

// One template with its 36 records; the number of wrong ones.
static int golden_check(const char* name, char** conversations, char* report, size_t room) {
    char path[300];
    size_t size = 0;
    int wrong = 0;
    snprintf(path, sizeof path, SHARED "%s.jinja", name);
    char* source = file_read(path, &size);
    snprintf(path, sizeof path, SHARED "golden/%s.json", name);
    char* records = array_print(path, "{{ r.text if r.text is defined else '@~error' }}{{ mark }}"
                                      "{{ r.spans | tojson if r.spans else '' }}");
    char* rest = records;
    if (source == NULL || records == NULL) {
        free(source);
        free(records);
        return 1;
    }
    for (int i = 0; i < 36; i++) {
        const char* why = NULL;
        char shown[600];
        qlora_text_spans spans = {0};
        const char* want = part_next(&rest);
        const char* places = part_next(&rest);
        char* got = render(source, size, conversations[i / 2], i % 2 != 0, &spans, &why);
        spans_show(got != NULL ? got : "", &spans, shown, sizeof shown);
        qlora_text_spans_free(lib, &spans);
        bool error = want != NULL && strcmp(want, "@~error") == 0;
        bool right = want != NULL && (error ? got == NULL : got != NULL && strcmp(got, want) == 0);
        right = right && places != NULL && strcmp(places, shown) == 0;
        if (!right) {
            snprintf(report, room, "%s, conversation %d: %.300s", name, i / 2,
                     got == NULL ? why : "other text");
            wrong++;
        }
        free(got);
    }
    free(source);
    free(records);
    return wrong;
}

TEST golden_templates(void) {
    static const char* const names[] = {"alpaca",
                                        "apertus",
                                        "chatml",
                                        "command-r",
                                        "command-r7b",
                                        "deepseek-r1-distill-qwen",
                                        "deepseek-v3.1",
                                        "deepseek-v4",
                                        "exaone-4",
                                        "falcon",
                                        "functionary-v3.2",
                                        "gemma-2",
                                        "gemma-3",
                                        "gemma-4",
                                        "glm-4",
                                        "glm-4.5",
                                        "gpt-oss",
                                        "granite-3.3",
                                        "granite-4.0",
                                        "hermes",
                                        "hunyuan-a13b",
                                        "kimi-k2",
                                        "kimi-k3",
                                        "laguna-s-2.1",
                                        "laguna-xs-2.1",
                                        "lfm2.5-8b-a1b",
                                        "llama-2-chat",
                                        "llama-3",
                                        "llama-3.1",
                                        "llama-3.2",
                                        "minimax-m2",
                                        "mistral-small-3.2",
                                        "mistral-v1",
                                        "mistral-v3",
                                        "nemotron-nano-v2",
                                        "olmo-3-think",
                                        "phi-3.5-mini",
                                        "phi-4-mini",
                                        "phi-4-reasoning",
                                        "qwen2.5",
                                        "qwen3",
                                        "qwen3-coder",
                                        "qwen3.5",
                                        "seed-oss",
                                        "smollm3",
                                        "vicuna",
                                        "zephyr"};
    char* all = array_print(SHARED "conversations.json", "{{ r | tojson }}");
    if (all == NULL) {
        SKIPm("no " SHARED);
    }
    char* conversations[18];
    char* rest = all;
    char report[512] = "";
    int wrong = 0;
    for (int i = 0; i < 18; i++) {
        conversations[i] = part_next(&rest);
        ASSERT(conversations[i] != NULL);
    }
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        wrong += golden_check(names[i], conversations, report, sizeof report);
    }
    free(all);
    ASSERT_EQm(report, 0, wrong);
    PASS();
}

// ---- what is trained

// The tokenizer of the golden data with the markers of several models.
static qlora_text_tok* marked_tok(void) {
    static const char* const markers[] = {"<|eot_id|>",
                                          "<|start_header_id|>",
                                          "<|end_header_id|>",
                                          "<end_of_turn>",
                                          "<start_of_turn>",
                                          "<|end|>",
                                          "<|user|>",
                                          "<|assistant|>",
                                          "[INST]",
                                          "[/INST]",
                                          "<tool_call>",
                                          "</tool_call>",
                                          "<think>",
                                          "</think>",
                                          "<|start|>",
                                          "<|message|>",
                                          "<|channel|>",
                                          "<|return|>"};
    size_t size = 0;
    char* data = file_read("tests/golden/text_byte.json", &size);
    char* more = data != NULL ? (char*)malloc(size + 4096) : NULL;
    char* list = data != NULL ? strstr(data, "],\"normalizer\"") : NULL; // ends added_tokens
    qlora_text_tok* tok = NULL;
    qlora_text_tok_info info;
    if (more == NULL || list == NULL ||
        qlora_text_tok_load(lib, "golden", data, size, &tok) != QLORA_OK ||
        qlora_text_tok_query(tok, &info) != QLORA_OK) {
        return NULL;
    }
    size_t head = (size_t)(list - data);
    size_t used = head;
    memcpy(more, data, head);
    for (size_t i = 0; i < sizeof markers / sizeof markers[0]; i++) {
        if (qlora_text_tok_find(tok, markers[i]) >= 0) {
            continue;
        }
        used += (size_t)snprintf(more + used, size + 4096 - used,
                                 ",{\"id\":%d,\"content\":\"%s\",\"single_word\":false,\"lstrip\":"
                                 "false,\"rstrip\":false,\"normalized\":false,\"special\":true}",
                                 (int)info.count++, markers[i]);
    }
    qlora_text_tok_close(tok);
    tok = NULL;
    memcpy(more + used, data + head, size - head);
    used += size - head;
    qlora_text_tok_load(lib, "marked", more, used, &tok);
    free(more);
    free(data);
    return tok;
}

// A sample as text, with what is trained in [[ ]].
static void sample_show(qlora_text_tok* tok, const qlora_text_sample* sample, char* out,
                        size_t room) {
    qlora_text_bytes text = {0};
    bool open = false;
    for (size_t i = 0; i <= sample->count; i++) {
        bool trained = i < sample->count && sample->labels[i] != -100;
        if (trained != open) {
            qlora_text_bytes_add(lib, &text, open ? "]]" : "[[", 2);
            open = trained;
        }
        if (i < sample->count) {
            qlora_text_decode(tok, sample->ids + i, 1, 0, &text);
        }
    }
    snprintf(out, room, "%.*s", (int)text.count, text.count > 0 ? text.data : "");
    qlora_text_bytes_free(lib, &text);
}

#define TURNS                                                                                      \
    "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"},{\"role\":\"assistant\",\"content\":"   \
    "\"yo\"},{\"role\":\"user\",\"content\":\"q\"},{\"role\":\"assistant\",\"content\":\"bye\"}]}"
#define CALLS(answer)                                                                              \
    "{\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"get\",\"parameters\":{}}}],"      \
    "\"messages\":[{\"role\":\"user\",\"content\":\"hi\"},{\"role\":\"assistant\",\"content\":"    \
    "\"\",\"tool_calls\":[{\"type\":\"function\",\"id\":\"123456789\",\"function\":{\"name\":"     \
    "\"get\",\"arguments\":\"{\\\"a\\\": 1}\"}}]},{\"role\":\"tool\",\"tool_call_id\":"            \
    "\"123456789\",\"name\":\"get\",\"content\":\"5\"},{\"role\":\"assistant\"," answer "}]}"

// Each row: a template, a record, which sample, and how it ends; with a "!", part of the error.
static const struct {
    const char* name;
    const char* record;
    size_t count;
    size_t sample;
    const char* want;
} mask_rows[] = {
    {"chatml", TURNS, 1, 0,
     "<s><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n[[yo<|im_end|>]]\n"
     "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n[[bye<|im_end|>]]"},
    {"llama-3", TURNS, 1, 0,
     "<s><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|><|start_header_id|>assistant"
     "<|end_header_id|>\n\n[[yo<|eot_id|>]]<|start_header_id|>user<|end_header_id|>\n\nq<|eot_id|>"
     "<|start_header_id|>assistant<|end_header_id|>\n\n[[bye<|eot_id|>]]"},
    {"llama-3.1", CALLS("\"content\":\"five\""), 1, 0,
     "<|start_header_id|>assistant<|end_header_id|>\n\n[[{\"name\": \"get\", \"parameters\": "
     "{\"a\": 1}}<|eot_id|>]]<|start_header_id|>ipython<|end_header_id|>\n\n\"5\"<|eot_id|>"
     "<|start_header_id|>assistant<|end_header_id|>\n\n[[five<|eot_id|>]]"},
    {"mistral-v3", TURNS, 1, 0, "<s>[INST] hi[/INST][[ yo</s>]][INST] q[/INST][[ bye</s>]]"},
    {"gemma-3", TURNS, 1, 0,
     "<start_of_turn>model\n[[yo<end_of_turn>]]\n<start_of_turn>user\nq<end_of_turn>\n"
     "<start_of_turn>model\n[[bye<end_of_turn>]]"},
    {"phi-3.5-mini", TURNS, 1, 0,
     "<s><|user|>\nhi<|end|>\n<|assistant|>\n[[yo<|end|>]]\n<|user|>\nq<|end|>\n<|assistant|>\n"
     "[[bye<|end|>]]"},
    {"phi-4-mini", TURNS, 1, 0,
     "<|user|>hi<|end|><|assistant|>[[yo<|end|>]]<|user|>q<|end|><|assistant|>[[bye<|end|>]]"},
    {"smollm3", TURNS, 1, 0,
     "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n[[yo<|im_end|>]]\n<|im_start|>user\n"
     "q<|im_end|>\n<|im_start|>assistant\n[[bye<|im_end|>]]"},
    {"smollm3", CALLS("\"content\":\"five\""), 0, 0, "!message 2 has tool_calls"},
    // earlier thoughts are dropped: a sample for each turn
    {"qwen3", TURNS, 2, 0,
     "<s><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n[[<think>\n\n</think>\n\nyo"
     "<|im_end|>]]"},
    {"qwen3", TURNS, 2, 1,
     "<s><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n<|im_start|>user\n"
     "q<|im_end|>\n<|im_start|>assistant\n[[<think>\n\n</think>\n\nbye<|im_end|>]]"},
    {"qwen3", CALLS("\"reasoning_content\":\"hm\",\"content\":\"five\""), 2, 0,
     "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n[[<think>\n\n</think>\n\n<tool_call>\n"
     "{\"name\": \"get\", \"arguments\": {\"a\": 1}}\n</tool_call><|im_end|>]]"},
    {"qwen3", CALLS("\"reasoning_content\":\"hm\",\"content\":\"five\""), 2, 1,
     "<|im_start|>assistant\n<tool_call>\n{\"name\": \"get\", \"arguments\": {\"a\": 1}}\n"
     "</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n"
     "<|im_start|>assistant\n[[<think>\nhm\n</think>\n\nfive<|im_end|>]]"},
    {"laguna-s-2.1", TURNS, 1, 0,
     "<user>hi</user>\n[[<assistant><think></think>yo</assistant>\n]]<user>q</user>\n"
     "[[<assistant><think></think>bye</assistant>\n]]"},
    // no end marker: EOS, or what the model stops at when the next turn begins
    {"falcon", TURNS, 1, 0, "Assistant:[[ yo]]\n\nUser: q\n\nAssistant:[[ bye</s>]]"},
    {"glm-4", TURNS, 1, 0,
     "[[yo]]\n[Round 1]\n\xE9\x97\xAE\xEF\xBC\x9Aq\n\xE7\xAD\x94\xEF\xBC\x9A[[bye</s>]]"},
    {"glm-4.5", TURNS, 1, 0,
     "<|user|>\nhi<|assistant|>[[\n<think></think>\nyo<|user|>]]\nq<|assistant|>[[\n<think></"
     "think>\n"
     "bye<|user|>]]"},
    // an empty answer, whose end is not the marker before its content
    {"gpt-oss",
     "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"},{\"role\":\"assistant\",\"content\":"
     "\"\"},{"
     "\"role\":\"user\",\"content\":\"q\"},{\"role\":\"assistant\",\"content\":\"bye\"}]}",
     2, 0, "<|start|>assistant[[<|channel|>final<|message|><|return|>]]"},
    {"deepseek-r1-distill-qwen", TURNS, 0, 0, "!generation prompt goes on with \"<think>"}};

TEST masks(size_t index) {
    char path[300];
    char got[8192];
    qlora_text_chat_desc chat_desc;
    qlora_text_data_desc data_desc;
    qlora_text_chat* chat = NULL;
    qlora_text_data* data = NULL;
    qlora_text_sample sample;
    const char* want = mask_rows[index].want;
    const char* record = mask_rows[index].record;
    memset(&chat_desc, 0, sizeof chat_desc);
    memset(&data_desc, 0, sizeof data_desc);
    snprintf(path, sizeof path, SHARED "%s.jinja", mask_rows[index].name);
    size_t size = 0;
    char* there = file_read(path, &size);
    free(there);
    if (there == NULL) {
        SKIPm("no " SHARED);
    }
    qlora_text_tok* tok = marked_tok();
    ASSERT(tok != NULL);
    char folder[] = "build/test-masks-XXXXXX";
    char config[64];
    ASSERT(mkdtemp(folder) != NULL);
    snprintf(config, sizeof config, "%s/config.json", folder);
    FILE* file = fopen(config, "wb");
    ASSERT(file != NULL &&
           fprintf(file, "{\"eos_token_id\": [%d, %d]}", (int)qlora_text_tok_find(tok, "</s>"),
                   (int)qlora_text_tok_find(tok, "<|user|>")) > 0);
    ASSERT(fclose(file) == 0);
    chat_desc.tok = tok;
    chat_desc.template_file = path;
    chat_desc.folder = mask_rows[index].name[0] == 'g' ? folder : NULL; // of GLM
    ASSERT_EQm(qlora_text_last_error(lib), QLORA_OK, qlora_text_chat_open(lib, &chat_desc, &chat));
    ASSERT(remove(config) == 0 && rmdir(folder) == 0);
    data_desc.chat = chat;
    data_desc.path = "x.jsonl";
    qlora_result r = qlora_text_data_load(lib, &data_desc, record, strlen(record), &data);
    if (want[0] == '!') {
        ASSERTm(qlora_text_last_error(lib),
                r != QLORA_OK && strstr(qlora_text_last_error(lib), want + 1) != NULL);
    } else {
        ASSERT_EQm(qlora_text_last_error(lib), QLORA_OK, r);
        ASSERT_EQ(mask_rows[index].count, qlora_text_data_count(data));
        ASSERT_EQ(QLORA_OK, qlora_text_sample_read(data, mask_rows[index].sample, &sample));
        sample_show(tok, &sample, got, sizeof got);
        size_t length = strlen(got);
        size_t wanted = strlen(want);
        ASSERT_STR_EQ(want, length >= wanted ? got + length - wanted : got);
    }
    qlora_text_data_close(data);
    qlora_text_chat_close(chat);
    qlora_text_tok_close(tok);
    PASS();
}

// A conversation as tokenize prints it: tokens, each followed by a |; trained ones in [ ].
static const struct {
    const char* source;
    const char* messages;
    const char* want;
} token_rows[] = {
    // with generation blocks, as in transformers: the whole text is encoded, and a token that is
    // partly the assistant's is trained
    {"{{ 't' }}{% generation %}{{ 'he' }}{% endgeneration %}{{ 'n' }}\n\n", "", "<s>|[th][en]\n|"},
    {"a t{% generation %}{% endgeneration %}h", "", "<s>|a| th|"},
    // otherwise the answer is encoded alone, as at inference, unless that is the same
    {"{% for m in messages %}{{ m.content }}{% endfor %}{{ 't' if add_generation_prompt }}",
     "{\"role\":\"user\",\"content\":\"q\"},{\"role\":\"assistant\",\"content\":\"the\"}",
     "<s>|q|t|[h][e][</s>]"},
    {"{% for m in messages %}{{ m.content }}{% endfor %}{{ ' t' if add_generation_prompt }}",
     "{\"role\":\"user\",\"content\":\"q\"},{\"role\":\"assistant\",\"content\":\" t the\"}",
     "<s>|q| t|[ the][</s>]"},
    // what follows the last answer stays, and a message can be switched off
    {"{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>\n{% endfor %}"
     "{{ '<|im_start|>' if add_generation_prompt }}",
     "{\"role\":\"assistant\",\"content\":\"t\",\"weight\":0},{\"role\":\"assistant\","
     "\"content\":\"e\"},{\"role\":\"assistant\",\"content\":\"r\",\"train\":false}",
     "<s>|<|im_start|>|t|<|im_end|>|\n|<|im_start|>|[e][<|im_end|>]\n|<|im_start|>|r|<|im_end|>|"
     "\n|"},
    // an answer that looks different once another follows is not trained in this text
    {"{% for m in messages %}<|im_start|>{{ m.content if loop.last or m.role == 'user' else 'x' }}"
     "<|im_end|>{% endfor %}{{ '<|im_start|>' if add_generation_prompt }}",
     "{\"role\":\"assistant\",\"content\":\"t\"},{\"role\":\"user\",\"content\":\"q\"},"
     "{\"role\":\"assistant\",\"content\":\"e\"}",
     "<s>|<|im_start|>|x|<|im_end|>|<|im_start|>|q|<|im_end|>|<|im_start|>|[e][<|im_end|>]"}};

TEST tokens_of_a_text(size_t index) {
    char got[512] = "";
    char talk[512];
    const char* path = test_path("tokens.jinja");
    qlora_text_chat_desc desc;
    qlora_text_chat* chat = NULL;
    qlora_text_ids ids = {0};
    qlora_text_ids labels = {0};
    qlora_text_bytes text = {0};
    FILE* file = fopen(path, "wb");
    ASSERT(file != NULL);
    ASSERT(fputs(token_rows[index].source, file) >= 0 && fclose(file) == 0);
    qlora_text_tok* tok = marked_tok();
    ASSERT(tok != NULL);
    memset(&desc, 0, sizeof desc);
    desc.tok = tok;
    desc.template_file = path;
    ASSERT_EQm(qlora_text_last_error(lib), QLORA_OK, qlora_text_chat_open(lib, &desc, &chat));
    remove(path);
    snprintf(talk, sizeof talk, "{\"messages\":[%s]}", token_rows[index].messages);
    ASSERT_EQm(qlora_text_last_error(lib), QLORA_OK,
               qlora_text_chat_encode_json(chat, talk, strlen(talk), false, &text, &ids, &labels));
    ASSERT_EQ(ids.count, labels.count);
    for (size_t i = 0; i < ids.count; i++) {
        qlora_text_bytes one = {0};
        bool trained = labels.data[i] != -100;
        size_t used = strlen(got);
        ASSERT_EQ(QLORA_OK, qlora_text_decode(tok, ids.data + i, 1, 0, &one));
        snprintf(got + used, sizeof got - used, trained ? "[%.*s]" : "%.*s|", (int)one.count,
                 one.data);
        qlora_text_bytes_free(lib, &one);
    }
    ASSERT_STR_EQ(token_rows[index].want, got);
    qlora_text_bytes_free(lib, &text);
    qlora_text_ids_free(lib, &ids);
    qlora_text_ids_free(lib, &labels);
    qlora_text_chat_close(chat);
    qlora_text_tok_close(tok);
    PASS();
}

// A template that changes earlier turns when others follow gives a sample for each turn. They are
// marked as one record, and training on everything trains each token of the record once: in later
// samples only what follows the answer of the sample before.
TEST turns_of_a_record(void) {
    static const char source[] =
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ '<think>' if loop.last and m.role == "
        "'assistant' }}{{ m.content }}{{ '<tool_call>' if m.tool_calls }}<|im_end|>\n{% endfor %}"
        "{{ '<|im_start|>assistant\n' if add_generation_prompt }}";
    static const char records[] =
        TURNS "\n{\"messages\":[{\"role\":\"user\",\"content\":\"a\"},{\"role\":\"assistant\","
              "\"content\":\"ba\",\"tool_calls\":[{\"name\":\"f\"}]},{\"role\":\"user\","
              "\"content\":\"q\"},"
              "{\"role\":\"assistant\",\"content\":\"c\"}]}";
    static const char* const want[] = {
        "<s>[[<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>yo<|im_end|>]]",
        "<s><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>"
        "[[\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n<think>bye<|im_end|>]]",
        "<s>[[<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<think>ba<tool_call><|im_end|>]"
        "]",
        "<s><|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nba<tool_call><|im_end|>"
        "[[\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n<think>c<|im_end|>]]"};
    char got[1024];
    const char* path = test_path("turns.jinja");
    qlora_text_chat_desc chat_desc;
    qlora_text_data_desc desc;
    qlora_text_chat* chat = NULL;
    qlora_text_data* data = NULL;
    qlora_text_tok* tok = marked_tok();
    memset(&chat_desc, 0, sizeof chat_desc);
    memset(&desc, 0, sizeof desc);
    FILE* file = fopen(path, "wb");
    ASSERT(file != NULL && tok != NULL);
    ASSERT(fputs(source, file) >= 0 && fclose(file) == 0);
    chat_desc.tok = tok;
    chat_desc.template_file = path;
    ASSERT_EQm(qlora_text_last_error(lib), QLORA_OK, qlora_text_chat_open(lib, &chat_desc, &chat));
    remove(path);
    desc.chat = chat;
    desc.path = "x.jsonl";
    desc.train_prompt = true;
    ASSERT_EQm(qlora_text_last_error(lib), QLORA_OK,
               qlora_text_data_load(lib, &desc, records, sizeof records - 1, &data));
    ASSERT_EQ((size_t)4, qlora_text_data_count(data));
    for (size_t i = 0; i < 4; i++) {
        qlora_text_sample sample;
        ASSERT_EQ(QLORA_OK, qlora_text_sample_read(data, i, &sample));
        ASSERT_EQ(i % 2 == 1, sample.continues);
        sample_show(tok, &sample, got, sizeof got);
        ASSERT_STR_EQ(want[i], got);
    }
    qlora_text_data_close(data);
    qlora_text_chat_close(chat);
    qlora_text_tok_close(tok);
    PASS();
}

// A chain of elif is long, not deep: it must not exhaust the stack.
TEST long_chains(void) {
    const char* path = test_path("chains.jinja");
    const int links = 150000; // more than a stack of 8 MB holds, 64 bytes each
    size_t room = (size_t)links * 12 + 200;
    char* source = (char*)malloc(room);
    ASSERT(source != NULL);
    size_t used = (size_t)snprintf(source, room, "{%% for x in [1] %%}{%% if 0 %%}");
    for (int k = 0; k < links; k++) {
        memcpy(source + used, "{% elif 0 %}", 12);
        used += 12;
    }
    used += (size_t)snprintf(source + used, room - used,
                             "{%% else %%}{{ loop.index }}{%% endif %%}{%% endfor %%}");
    const char* why = NULL;
    char* got = render(source, used, conversation, false, NULL, &why);
    bool same = got != NULL && strcmp(got, "1") == 0;
    free(got);
    ASSERTm(why, same);
    qlora_text_tok* tok = marked_tok();
    qlora_text_chat_desc desc;
    qlora_text_chat* chat = NULL;
    memset(&desc, 0, sizeof desc);
    desc.tok = tok;
    desc.template_file = path;
    FILE* file = fopen(path, "wb");
    ASSERT(file != NULL && tok != NULL);
    ASSERT(fwrite(source, 1, used, file) == used && fclose(file) == 0);
    free(source);
    ASSERT_EQm(qlora_text_last_error(lib), QLORA_OK, qlora_text_chat_open(lib, &desc, &chat));
    remove(path);
    qlora_text_chat_close(chat);
    qlora_text_tok_close(tok);
    PASS();
}

SUITE(templates_suite) {
    if (qlora_text_create(NULL, &lib) != QLORA_OK) {
        return;
    }
    RUN_TEST(behaviour);
    RUN_TEST(hostile);
    RUN_TEST(deep_source);
    RUN_TEST(generation_spans);
    RUN_TEST(golden_templates);
    RUN_TEST(long_chains);
    RUN_TEST(turns_of_a_record);
    for (size_t i = 0; i < sizeof mask_rows / sizeof mask_rows[0]; i++) {
        RUN_TESTp(masks, i);
    }
    for (size_t i = 0; i < sizeof token_rows / sizeof token_rows[0]; i++) {
        RUN_TESTp(tokens_of_a_text, i);
    }
    qlora_text_destroy(lib);
    lib = NULL;
}
