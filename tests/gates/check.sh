#!/usr/bin/env bash
# check.sh - the gates of `make check`. Usage: tests/gates/check.sh [--list | GATE...]
#
# Each gate prints one line: ok, FAIL or skip, its name, its seconds by the clock and of processor
# time, and why it was skipped. If it fails, its findings follow. The status is 1 if any gate
# failed. Two gates run at a time (JOBS=n: n gates), each with a folder of its own for its files,
# build/check/GATE. gates.sh injects a defect for every gate and verifies that the gate catches it.
# CHECK_FAST=1 ends a gate at its first finding.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1

MAKE=${MAKE:-make}
CLANG=${CLANG:-clang}
NVCC=${NVCC:-nvcc}
PTXAS=${PTXAS:-ptxas}
OUT=build/check # of the gate that runs: build/check/GATE

WARN="-Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wsign-conversion -Wundef -Wcast-align -Wvla"
WARN="$WARN -Werror"
WARN_C="$WARN -Wstrict-prototypes -Wmissing-prototypes"
LIBS="-lm -lpthread -ldl"
MACROS="QLORA_STATIC QLORA_DLL QLORA_NO_CUDA QLORA_NO_MODEL QLORA_ASSERT QLORA_KERNELS_HEADER"
MACROS="$MACROS QLORA_DEBUG QLORA_NO_SIMD QLORA_NO_COMM"
PTX_TARGETS=${PTX_TARGETS:-75 80 90 120} # `make soak` has all
SKIP=77

# ---- shared by the gates; each runs in its own subshell, so `bad` is its own ----

bad=0

fault() {
    echo "$*"
    bad=1
    [[ -z ${CHECK_FAST:-} ]] || exit 1
}

# Reports every input line as a fault.
faults() {
    local prefix=$1 line
    while IFS= read -r line; do
        fault "$prefix$line"
    done
}

# Skips the gate; the reason is its last line of output.
skip() {
    echo "$*"
    exit $SKIP
}

have() {
    command -v "$1" >/dev/null 2>&1
}

need() {
    local tool
    for tool in "$@"; do
        have "$tool" || skip "$tool not found"
    done
}

need_file() {
    local file
    for file in "$@"; do
        [[ -e $file ]] || skip "$file not found"
    done
}

# Runs make in the folder build, which the gates share: one make at a time. Warnings are errors, as
# what is built there is not compiled again for its warnings.
build() {
    set -- CFLAGS=-Werror "$@"
    if have flock; then
        # shellcheck disable=SC2086
        flock build/check/lock $MAKE -s "$@"
    else
        $MAKE -s "$@"
    fi
}

compilers() {
    have gcc && echo gcc
    have "$CLANG" && echo "$CLANG"
}

# The compiler that finds most: clang reports unused functions in any compilation.
thorough() {
    compilers | tail -n 1
}

# Turns a command that only checks into the one with which gcc reports them too.
in_full() {
    if [[ $1 == gcc* ]]; then
        echo "${1/-fsyntax-only/-o /dev/null -c}"
    else
        echo "$1"
    fi
}

# object COMMAND... SOURCE: compiles with this command what several gates need, once for all of
# them, and prints the name of the object. It is kept under a sum of all that it depends on.
object() {
    local kept=build/check/objects made
    mkdir -p $kept
    made=$kept/$({ echo "$*" && "$1" --version && cat qlora.h qlora_text.h kernels_ptx.h \
        "${@: -1}"; } | cksum | tr ' ' -)
    (
        ! have flock || flock 9
        [[ -e $made.done ]] || { "$@" -c -o "$made.o" && touch "$made.done"; }
    ) 9>"$made.lock" >&2 && echo "$made.o"
}

# The implementation, as in two_b.c, without the optimizer: it would only remove some of what the
# gates search for. Beside the object is the graph of calls, if this gcc writes one.
implementation() {
    local calls=-fcallgraph-info
    gcc $calls -E -x c /dev/null >/dev/null 2>&1 || calls=
    # shellcheck disable=SC2086
    object gcc -I. -std=c99 $calls tests/gates/compile/two_b.c
}

# Prints the first compiler that can build and run a program with these flags.
compiler_with() {
    local cc
    for cc in $CLANG gcc; do
        if have "$cc" && echo 'int main(void) { return 0; }' >$OUT/probe.c &&
            "$cc" "$@" -o $OUT/probe $OUT/probe.c 2>/dev/null && $OUT/probe 2>/dev/null; then
            echo "$cc"
            return
        fi
    done
}

# Runs the command lines in a file, two at a time; fails if any of them fails.
run_all() {
    [[ -s $1 ]] || { fault "nothing to run"; return; }
    local after=false # 255 makes xargs stop
    [[ -z ${CHECK_FAST:-} ]] || after="exit 255"
    xargs -P 2 -d '\n' -I LINE bash -c "{ LINE; } || $after" <"$1" || bad=1
    [[ $bad -eq 0 || -z ${CHECK_FAST:-} ]] || exit 1
}

# Lists the text files of the repository, with or without git.
files() {
    if have git && git rev-parse --git-dir >/dev/null 2>&1; then
        git ls-files -co --exclude-standard
    else
        find . -type f -not -path './build/*' -not -path './.git/*' | sed 's,^\./,,'
    fi | xargs -d '\n' grep -Il . --
}

# Golden data is not reformatted.
sources() {
    files | grep -E '(\.(c|cpp|h|cu|cuh|sh|awk|md)|Makefile|\.ci/run|LICENSE)$' |
        grep -v '^tests/golden/'
}

# ---- text ----

# text_faults WHAT PATTERN FILE...: at most three findings per file.
text_faults() {
    local what=$1 pattern=$2
    shift 2
    faults "$what: " < <(LC_ALL=C grep -m 3 -HnP -- "$pattern" "$@" | cut -c 1-200)
}

gate_text() {
    local f every=() no_tabs=() narrow=()
    while read -r f; do
        every+=("$f")
        [[ $f == Makefile ]] || no_tabs+=("$f")
        [[ $f == kernels_ptx.h || $f == *.md ]] || narrow+=("$f")
        [[ -z $(tail -c 1 "$f") ]] || fault "$f: no newline at the end of the file"
    done < <(sources)
    text_faults "not ASCII" '[^ -~[:cntrl:]]' "${every[@]}"
    text_faults "CR" '\r' "${every[@]}"
    text_faults "trailing blank" '[ \t]+$' "${every[@]}"
    text_faults "tab" '\t' "${no_tabs[@]}"
    text_faults "over 100 columns" '^.{101,}' "${narrow[@]}"
}

# The repository must not contain paths of anyone's machine.
gate_paths() {
    faults "" < <(files | grep -vE '^tests/gates/(check|gates).sh$' |
        xargs grep -nE '(^|[^A-Za-z0-9_./-])/(work|root|home)/' -- | head -5)
}

# The committed headers must match their parts, and an edited header must be rejected with the name
# of the part to edit.
gate_assembled() {
    local h d=$OUT/assembled
    rm -rf $d
    mkdir -p $d
    build build/amalgamate || return 1
    for h in qlora.h qlora_text.h; do
        build/amalgamate --check src/$h $h || bad=1
    done
    [[ $bad -eq 0 ]] || return 1
    cp -r src qlora.h $d/
    sed -i 's/^    return y;$/    return -y;/' $d/qlora.h
    sed -i '0,/^#define QLORA_VERSION_MINOR/s/^#define QLORA_VERSION_MINOR/& 7 \/\//' $d/qlora.h
    local amalgamate=$PWD/build/amalgamate
    (cd $d && "$amalgamate" src/qlora.h qlora.h) >$d/log 2>&1 && fault "an edit was overwritten"
    grep -q '^  src/api/linkage.h:' $d/log || fault "the part to edit is not named: $(cat $d/log)"
    cmp -s qlora.h $d/qlora.h && fault "the edit was not made, or it was lost"
    # Lines of the header must have the same text as the lines that --where names.
    local line at
    for line in 7 200 1500 9000 15000; do
        # between two parts there are only a blank line and a banner
        sed -n "${line}p" qlora.h | grep -qE '^(//@@ .*)?$' && line=$((line + 4))
        at=$(build/amalgamate --where $line src/qlora.h) || bad=1
        [[ $(sed -n "${line}p" qlora.h) == "$(sed -n "${at##*:}p" "${at%:*}")" ]] ||
            fault "line $line is not $at"
    done
}

# Prints the first words of the lines of CONTENTS.
contents_of() {
    awk '/^ *CONTENTS/ { on = 1; next }
        on && /^ *[a-z_\/]+  +[^ ]/ { print $1; seen = 1; next }
        on && seen && /^ *$/ { exit }' "$1"
}

# CONTENTS and the banners of a header must list the same floors in the same order.
gate_contents() {
    need_file qlora.h
    contents_of qlora.h >$OUT/contents
    sed -n 's,^//@@ src/,,p' qlora.h | grep -v '^qlora\.h$' | sed 's,/.*,,; s,\.h$,,' |
        uniq >$OUT/floors
    [[ -s $OUT/floors ]] || fault "qlora.h has no banners"
    diff $OUT/contents $OUT/floors || fault "CONTENTS (<) and floors (>) differ"
    # qlora_text.h: its own rooms one by one, of the shared floors only the name.
    contents_of qlora_text.h >$OUT/contents
    sed -n 's,^//@@ src/,,p' qlora_text.h | grep -vE '^(qlora_text|text/manual)\.h$' |
        sed 's,\.h$,,; /^text/!s,/.*,,' | uniq >$OUT/floors
    [[ -s $OUT/floors ]] || fault "qlora_text.h: no banners"
    diff $OUT/contents $OUT/floors || fault "qlora_text.h: CONTENTS (<) and parts (>) differ"
}

# A part uses only what parts before it define. A static prototype would only hide that it does not.
gate_layers() {
    local frame parts
    for frame in qlora qlora_text; do
        mapfile -t parts < <(sed -n 's,^#include "\(.*\)",src/\1,p' src/$frame.h)
        awk -f tests/gates/check_layers.awk "${parts[@]}" || bad=1
    done
    faults "a prototype that hides a call upwards: " < <(awk '
        FNR == 1 { text = "" } /^static [^=]*\(/ { text = $0; at = FNR }
        text != "" && FNR > at { text = text $0 }
        text ~ /\{/ { text = "" }
        text ~ /;/ { if (text ~ /\) *;/) print FILENAME ":" at ": " text; text = "" }' \
        src/*.h src/*/*.h src/*/*/*.h | grep -v __attribute__)
}

# What qlora_ctx_create compares: the list has every public struct, and the sum is the same in C and
# in C++.
gate_abi() {
    diff <(sed -nE 's/^(typedef )?struct (qlora_[a-z0-9_]*) \{.*/\2/p' src/api/*.h | sort) \
        <(sed -n 's/^ *X(\(qlora_[a-z0-9_]*\)).*/\1/p' src/api/abi.h | sort) ||
        fault "the structs (<) and QLORA_STRUCTS of src/api/abi.h (>) differ"
    need cc c++
    local d=$OUT/abi
    mkdir -p $d
    printf '#include "qlora.h"\n#include <stdio.h>\nint main(void) {\n    %s\n}\n' \
        'return printf("%llx\n", (unsigned long long)QLORA_ABI) < 0;' >$d/abi.c
    cp $d/abi.c $d/abi.cpp
    cc -I. -Isrc $d/abi.c -o $d/c && c++ -I. -Isrc $d/abi.cpp -o $d/cpp || bad=1
    diff <($d/c) <($d/cpp) || fault "QLORA_ABI differs between C (<) and C++ (>)"
}


# At most 60 lines, or 100 with a reason. Kernels, whose parts share registers: up to 200 with a
# reason. Tests, which are often tables: 100, or more with a reason. In the library and the
# programs, at most 8 parameters: of more, those that belong together are a struct. But
# qlora_attention_backward is public, and programs that exist call it. The same for structs of more
# than 60 fields.
gate_functions() {
    local f soft limit most
    while read -r f; do
        soft=60
        limit=100
        most=1000
        [[ $f == kernels/*.cu* ]] && limit=200
        [[ $f == tests/* ]] && soft=100 limit=1000
        [[ $f == src/* || $f == programs/* ]] && most=8
        awk -v f="$f" -v soft=$soft -v limit=$limit -v most=$most \
            -v except=qlora_attention_backward -f tests/gates/check_functions.awk "$f" || bad=1
        [[ $most == 1000 ]] ||
            awk -v f="$f" -v most=60 -f tests/gates/check_structs.awk "$f" || bad=1
    done < <(sources | grep -E '\.(c|cpp|h|cu|cuh)$' | grep -vE '^(kernels_ptx|qlora.*)\.h$')
}

gate_words() {
    need_file qlora.h
    awk -f tests/gates/check_words.awk qlora.h || bad=1
    awk -f tests/gates/check_words.awk qlora_text.h || bad=1
    # What differs between methods of training is asked of their rows.
    faults "a method by name, not by its row: " < <(grep -rn QLORA_METHOD_ src programs |
        grep -vE '^(src/(api/[a-z_]*|trainer/methods)|programs/finetune/options/method)\.h:')
    # What walks a model asks the rows of the kinds of its parts, whose names are those of the rows.
    local kinds
    kinds=$(sed -nE 's/^    \{"([a-z0-9]+)",.*/\1/p' src/model/*/plans.h | paste -sd "|")
    [[ $kinds == *"|"* ]] || fault "src/model/*/plans.h: no rows with names of kinds"
    kinds="qlora__($kinds)_|QLORA__(MIXER|FFN)_[A-Z]"
    kinds="$kinds|qlora_+(swiglu|geglu|relu2|attention)_(for|back)ward"
    faults "a kind of part by name, not by its row: " < <(
        grep -rnE "$kinds" src/model src/generate src/train src/trainer src/adapter |
            grep -vE '^src/model/(mixers|ffns)/' | sed 's/qlora__plain_name//g' | grep -E "$kinds")
    # Documents: sentences that can be followed, and figures in tables.
    local page pages=()
    for page in *.md docs/*.md tests/README.md; do
        [[ $page == docs/history.md ]] || pages+=("$page")
    done
    awk -v words=40 -v figures=8 -f tools/prose.awk "${pages[@]}" >$OUT/prose ||
        fault "$(grep -E '^[^ ]*:[0-9]+: ' $OUT/prose)"
}

gate_comments() {
    sources | grep -E '^(src|programs|tests|kernels|tools|examples)/.*\.(c|cpp|h|cu|cuh)$' |
        xargs awk -f tests/gates/check_comments.awk || bad=1
}

gate_scripts() {
    local f
    for f in tests/*.sh tests/*/*.sh tools/*.sh .ci/run; do
        [[ -e $f ]] || continue
        bash -n "$f" || bad=1
        [[ -x $f ]] || fault "$f is not executable"
        if have shellcheck; then
            shellcheck -S warning "$f" || bad=1
        fi
    done
}

# Libraries are opened in src/platform alone. On Windows the search leaves out the current folder;
# what the code there tries is tested with stand-ins for the system's functions. On POSIX the suite
# runtime has the test; here, only that the check comes before the call.
gate_libraries() {
    local part=$OUT/part.h cc words
    need_file src/platform/windows.h src/platform/posix.h
    words='LoadLibrary|LoadPackagedLibrary|LoadModule|SetDllDirectory|AddDllDirectory|dlm?open'
    faults "opens a library outside src/platform: " < <(
        grep -nE "($words)[A-Za-z]* *\(" -r src programs examples |
            grep -vE '^src/platform/(posix|windows)\.h:')
    faults "not LoadLibraryExA: " < <(
        grep -nE "($words)[A-Za-z]* *\(" src/platform/windows.h |
            grep -vE '[^A-Za-z]LoadLibraryExA\(')
    awk '/[(]name, .\/.[)]/ { checked = 1 } /dlopen[(]/ { calls++; unchecked += !checked }
        END { exit calls != 1 || unchecked }' src/platform/posix.h ||
        fault "src/platform/posix.h: not one dlopen after the check for relative paths"
    cc=$(compilers | head -n 1)
    [[ -n $cc ]] || skip "neither gcc nor $CLANG found"
    sed -n '/qlora__path_is_whole(const char/,/^static.*qlora__library_symbol(/p' \
        src/platform/windows.h | sed '$d' >"$part"
    # shellcheck disable=SC2086
    $cc -std=c99 $WARN_C -DPART="\"$part\"" -I. -o $OUT/libraries \
        tests/gates/compile/windows_libraries.c || fault "windows_libraries.c does not compile"
    [[ $bad -ne 0 ]] || $OUT/libraries || bad=1
}

# The script for compute-sanitizer, with stand-ins for the tool and the tests.
gate_sanitize() {
    tests/gates/use_sanitize.sh "$OUT" || bad=1
}

# ---- compiling ----

macro_flag() {
    case $1 in
    QLORA_ASSERT) echo '-DQLORA_ASSERT(x)=((void)(x))' ;;
    QLORA_KERNELS_HEADER) echo '-DQLORA_KERNELS_HEADER="tests/gates/compile/other_kernels.h"' ;;
    *) echo "-D$1" ;;
    esac
}

# Prints the command lines for every macro, alone and with the others.
macro_lines() {
    local macro all=""
    echo "$1 tests/gates/compile/config.c"
    echo "$1 tests/gates/compile/after_declarations.c"
    echo "$1 -DNDEBUG -DQLORA_NO_CUDA -DQLORA_NO_MODEL tests/gates/compile/config.c"
    for macro in $MACROS; do
        all="$all '$(macro_flag "$macro")'"
        echo "$1 '$(macro_flag "$macro")' tests/gates/compile/config.c"
        # With QLORA_STATIC, the declarations alone would be undefined static functions.
        [[ $macro == QLORA_STATIC ]] ||
            echo "$1 '$(macro_flag "$macro")' tests/gates/compile/declarations.c"
    done
    echo "$1 $all tests/gates/compile/config.c"
}

# Every macro in C with the compiler that finds most; the others, and C++, see those that add code
# together, and those that leave some out.
# Warnings of the optimizer: the gate `programs` compiles both headers with -O2, this one all code
# with -O3, in finetune, so that the compiler sees the sizes of what they return. The other
# compilations do without: clang has no such warnings.
gate_warnings() {
    need_file qlora.h
    local cc c cxx run macro more
    [[ -n $(compilers) ]] || skip "neither gcc nor $CLANG found"
    for macro in QLORA_ASSERT QLORA_DEBUG QLORA_DLL QLORA_NO_SIMD QLORA_NO_COMM; do
        more="${more:-} '$(macro_flag "$macro")'"
    done
    for cc in $(compilers); do
        c="$cc -I. -std=c99 $WARN_C -fsyntax-only"
        cxx="$cc -I. -x c++ -std=c++11 $WARN -fsyntax-only"
        if [[ $cc == $(thorough) ]]; then
            macro_lines "$(in_full "$c")"
        else
            echo "$c tests/gates/compile/config.c"
        fi
        echo "$cxx tests/gates/compile/config.c"
        for run in "$c" "$cxx"; do
            echo "$run tests/gates/compile/declarations.c"
            echo "$run $more tests/gates/compile/config.c"
            echo "$run -DQLORA_NO_CUDA -DQLORA_NO_MODEL tests/gates/compile/config.c"
        done
        # Flags that users may set.
        echo "$c -ffast-math -funsigned-char tests/gates/compile/config.c"
        echo "$c -std=c11 -fsigned-char tests/gates/compile/config.c"
        echo "$cxx -std=c++17 -fno-exceptions -fno-rtti tests/gates/compile/config.c"
        [[ $cc != gcc ]] ||
            echo "gcc -I. -std=c99 -O3 -DQLORA__ONE_LEVEL -Wall -Wextra -Werror -o /dev/null" \
                "-c programs/finetune.c"
    done >$OUT/warnings.commands
    run_all $OUT/warnings.commands
}

gate_link() {
    need_file qlora.h
    need gcc
    local d=$OUT/link t=tests/gates/compile a b ld=gcc few="-DQLORA_NO_MODEL -DQLORA_NO_CUDA"
    rm -rf $d
    mkdir -p $d
    b=$(implementation) && cp "$b" $d/b_c.o || bad=1
    gcc -I. -std=c99 -c -o $d/a_c.o $t/two_a.c || bad=1
    # How names are linked does not depend on what is left out.
    if have g++; then
        ld=g++
        # shellcheck disable=SC2086
        g++ -I. -x c++ -std=c++11 $few -c -o $d/b_cxx.o $t/two_b.c || bad=1
        g++ -I. -x c++ -std=c++11 -c -o $d/a_cxx.o $t/two_a.c || bad=1
    fi
    for a in $d/a_*.o; do
        for b in $d/b_*.o; do
            # shellcheck disable=SC2086
            { $ld -o $d/two "$a" "$b" $LIBS && $d/two >/dev/null; } ||
                fault "$a and $b do not link and run"
        done
    done
    # shellcheck disable=SC2086
    { gcc -I. -std=c99 $few -o $d/static $t/static_a.c $t/static_b.c $LIBS && $d/static; } ||
        fault "two private copies cannot be linked into one program"
    # shellcheck disable=SC2086
    { gcc -I. -std=c99 $few -o $d/after $t/after_declarations.c $LIBS && $d/after; } ||
        fault "including the declarations before the implementation fails"
    # shellcheck disable=SC2086
    if gcc -o $d/none $d/a_c.o $LIBS 2>/dev/null; then
        fault "a program links without the implementation"
    fi
    # With a system header first, it must compile, or fail with our #error, whose advice must work.
    if ! gcc -I. -std=c99 -fsyntax-only $t/late.c 2>$d/late.log; then
        grep -q '#error.*_POSIX_C_SOURCE=200809L' $d/late.log ||
            fault "with a system header first, there is no helpful #error: $(head -3 $d/late.log)"
    fi
    gcc -I. -std=c99 -D_POSIX_C_SOURCE=200809L -fsyntax-only $t/late.c ||
        fault "with a system header first, -D_POSIX_C_SOURCE=200809L does not help"
    gcc -I. -std=c99 -Wall -Wextra -Werror -fsyntax-only $t/crowded.c ||
        fault "a macro of another header breaks the implementation"
    # An older C meets one #error, and nothing else but the end of the compilation.
    local header
    for header in qlora qlora_text; do
        echo "#include \"$header.h\"" >$d/old.c
        gcc -I. -std=c89 -c -o /dev/null $d/old.c 2>$d/old.log && fault "$header.h: C89 compiles"
        grep ' error:' $d/old.log | grep -v 'fatal error: stop' >$d/old.errors
        [[ $(wc -l <$d/old.errors) -eq 1 ]] && grep -q '#error.*needs C99' $d/old.errors ||
            fault "$header.h in C89: not one #error that says what is needed: $(head -3 $d/old.log)"
    done
}

# symbols_of PREFIX OBJECT NAME: what this object of the implementation exports, calls and keeps.
symbols_of() {
    local prefix=$1 object=$2 name=$3
    local never="exit|_exit|abort|printf|puts|putchar|vprintf|__assert_fail"
    nm -g --defined-only "$object" | awk '$NF != "two_b_version" { print $NF }' | sort -u \
        >$OUT/defined
    faults "$name: exported, but not public: " < <(grep -vE "^${prefix}[a-z0-9]" $OUT/defined)
    if [[ $name == QLORA_STATIC ]]; then
        faults "$name: exported: " <$OUT/defined
    fi
    faults "$name: writable: " < <(objdump -t "$object" |
        grep -E ' O (\.(data|bss|tdata|tbss)|\*COM\*)' | grep -v '\.data\.rel\.ro')
    faults "$name: calls " < <(nm -u "$object" | awk '{ print $NF }' | grep -xE "($never)")
}

# static_symbols PREFIX CONFIG.c: under QLORA_STATIC, where the optimizer leaves out nearly all.
static_symbols() {
    gcc -I. -std=c99 -O1 -DQLORA_STATIC -c -o $OUT/symbols.o "tests/gates/compile/$2" ||
        { bad=1; return; }
    symbols_of "$1" $OUT/symbols.o QLORA_STATIC
}

# Every declared function must exist in the object that was looked at last.
all_defined() {
    gcc -I. -E -P "tests/gates/compile/$1" | tr '\n' ' ' | tr ';' '\n' | grep 'extern' |
        grep -oE 'qlora_[a-z0-9_]+ *\(' | tr -d ' (' | sort -u >$OUT/declared
    [[ -s $OUT/declared ]] || fault "no declarations found"
    faults "declared, not defined: " < <(comm -23 $OUT/declared $OUT/defined)
    faults "defined, not declared: " < <(comm -13 $OUT/declared $OUT/defined)
}

# Without the model where a macro changes nothing in it.
gate_symbols() {
    need_file qlora.h
    need gcc nm objdump
    local object macro
    object=$(implementation) || return 1
    symbols_of qlora_ "$object" DEFAULT
    all_defined declarations.c
    static_symbols qlora_ config.c
    for macro in QLORA_DEBUG QLORA_NO_CUDA; do
        gcc -I. -std=c99 -DQLORA_DLL -DQLORA_NO_MODEL -D$macro -c -o $OUT/symbols.o \
            tests/gates/compile/config.c || return 1
        symbols_of qlora_ $OUT/symbols.o $macro
    done
}

# qlora_text.h: alone, beside qlora.h in both orders, in two units, in both languages.
gate_text_header() {
    need_file qlora.h qlora_text.h
    need gcc nm objdump
    local d=$OUT/text_header t=tests/gates/compile cc c cxx object few
    rm -rf $d
    mkdir -p $d
    few="-DQLORA_NO_MODEL -DQLORA_NO_CUDA"
    for cc in $(compilers); do
        c="$cc -I. -std=c99 $WARN_C -fsyntax-only"
        cxx="$cc -I. -x c++ -std=c++11 $WARN -fsyntax-only"
        [[ $cc == $(thorough) ]] || echo "$c $t/text_config.c"
        echo "$c $t/text_declarations.c"
        echo "$cxx $t/text_declarations.c"
        echo "$cxx -DTEXT_FIRST $t/text_both.c"
        [[ $cc == $(thorough) ]] || continue
        echo "$(in_full "$c") $t/text_config.c"
        echo "$cxx $t/text_config.c"
        echo "$cxx $t/text_both.c"
        echo "$c -DQLORA_DLL $few $t/text_config.c"
        echo "$(in_full "$c") -DQLORA_STATIC $t/text_config.c"
        echo "$c -DQLORA_STATIC $t/text_both.c"
        echo "$c -DQLORA_NO_MODEL $t/text_both.c"
        echo "$c -DQLORA_NO_CUDA -DTEXT_FIRST $t/text_both.c"
    done >$d/commands
    run_all $d/commands
    # One unit; then two units. Alone it links with the C library only.
    gcc -I. -std=c99 -o $d/alone $t/text_alone.c && $d/alone tests/golden/text_spm.json ||
        fault "qlora_text.h alone does not link and run"
    # shellcheck disable=SC2086
    { gcc -I. -std=c99 $few -DTEXT_FIRST -o $d/both $t/text_both.c $LIBS && $d/both; } ||
        fault "both headers in one unit do not link and run"
    gcc -I. -std=c99 -c -o $d/a.o $t/text_two_a.c || bad=1
    gcc -I. -std=c99 -c -o $d/b.o $t/text_two_b.c || bad=1
    object=$(implementation) || bad=1
    # shellcheck disable=SC2086
    { gcc -o $d/two $d/a.o $d/b.o "$object" $LIBS && $d/two >/dev/null; } ||
        fault "two units do not link and run"
    # Headers of different versions.
    mkdir -p $d/other
    cp qlora.h kernels_ptx.h $d/other/
    sed 's/\(QLORA_VERSION_PATCH\) 0$/\1 1/; s/\(QLORA_VERSION_PATCH\) != 0/\1 != 1/' qlora_text.h \
        >$d/other/qlora_text.h
    if gcc -I$d/other -std=c99 -fsyntax-only $t/text_both.c 2>$d/version.log; then
        fault "headers of different versions compile together"
    fi
    grep -q '#error.*different versions' $d/version.log ||
        fault "headers of different versions: no helpful #error: $(head -3 $d/version.log)"
    static_symbols qlora_text_ text_config.c
    [[ -e $d/b.o ]] || return
    symbols_of qlora_text_ $d/b.o DEFAULT
    all_defined text_declarations.c
    text_left_out $d
}

# Macros that leave out parts of qlora_text.h, one per line: at least this many bytes of the object,
# names, what is then refused by name.
TEXT_LEFT_OUT="QLORA_TEXT_NO_PARQUET 40000 qlora__(parquet|thrift|snappy|zstd)_ parquet
QLORA_TEXT_NO_GGUF 15000 qlora__gguf_(parse|find|get|next|vocab|pre) gguf folder
QLORA_TEXT_NO_DATA 90000 qlora_(text_data|text_sample|_parquet|_gzip|_inflate|_text_data|_text_csv)
QLORA_TEXT_NO_TEMPLATES 300000 qlora_(text_(template|chat|spans|data|sample)|_jin_(eval|parse))"

# They compile without warnings, alone and together; their code is not in the object; what is left
# runs; and the rest is refused with the name of the macro.
text_left_out() {
    local d=$1 t=tests/gates/compile/text_left_out.c macro bytes names calls call whole left cc all=
    cc=$(thorough)
    {
        echo "gcc -I. -std=c99 $WARN_C -c -o $d/left_nothing.o $t"
        while read -r macro bytes names calls; do
            all="$all -D$macro"
            echo "gcc -I. -std=c99 $WARN_C -D$macro -c -o $d/$macro.o $t"
            echo "$cc -I. -std=c99 $WARN_C -D$macro -fsyntax-only $t"
            echo "$cc -I. -x c++ -std=c++11 $WARN -D$macro -fsyntax-only $t"
        done <<<"$TEXT_LEFT_OUT"
        echo "gcc -I. -std=c99 $WARN_C -DQLORA_STATIC$all -c -o /dev/null $t"
        echo "$cc -I. -std=c99 $WARN_C$all -DTEXT_FIRST -fsyntax-only ${t%/*}/text_both.c"
    } >$d/left_out.commands
    run_all $d/left_out.commands
    whole=$(size $d/left_nothing.o | awk 'END { print $1 + $2 }')
    while read -r macro bytes names calls; do
        left=$(size $d/$macro.o | awk 'END { print $1 + $2 }')
        [[ $((whole - left)) -ge $bytes ]] ||
            fault "$macro: $whole bytes become $left, which is not $bytes less"
        faults "$macro: not left out: " < <(nm $d/$macro.o | grep -E " $names")
        nm -g --defined-only $d/$macro.o | awk '{ print $NF }' | sort -u >$d/defined
        faults "$macro: left out as well: " < <(comm -23 $OUT/declared $d/defined |
            grep -vE "^$names")
        gcc -o $d/left_out $d/$macro.o && $d/left_out tests/golden/text_spm.json >$d/$macro.out ||
            fault "$macro: what is left does not work: $(cat $d/$macro.out)"
        for call in $calls; do
            grep -q "^$call: unsupported: .* left out by $macro\$" $d/$macro.out ||
                fault "$macro: no clear error for $call: $(cat $d/$macro.out)"
        done
    done <<<"$TEXT_LEFT_OUT"
}

# Macros that leave out rooms of qlora.h, one per line: at least this many bytes of the object with
# -O1, names of the rooms, what is then refused by name.
LEFT_OUT="QLORA_NO_TRAIN 70000 qlora_(train|trainer|checkpoint|comm|_trainer|_backward_b)_? train
QLORA_NO_GENERATE 18000 qlora_(generate|_generate|_decode_enqueue|_texts_) generate
QLORA_NO_MERGE 45000 qlora_(merge_|_merge_|adapter_save_tokenizer)
QLORA_NO_GGUF 60000 qlora__gguf_(parse|find|widen|pack|model|begin|config|view) gguf config export"

# qlora.h with rooms left out: it compiles without warnings; their code is not in the object; what
# is left gives the same bits, also on a GPU; and the rest is refused with the name of the macro.
gate_left_out() {
    need_file qlora.h
    need gcc nm size
    local d=$OUT/left_out t=tests/gates/compile/parts_left_out.c macro bytes names calls cc all=
    rm -rf $d
    mkdir -p $d
    build -j2 build/fake/libcuda.so.1 build/fake/libcublas.so.13 || return 1
    cc=$(thorough)
    {
        echo "gcc -I. -std=c99 -O1 -c -o $d/nothing.o $t"
        echo "gcc -I. -std=c99 -O2 $(left_out_player) -c -o $d/player.o $t"
        while read -r macro bytes names calls; do
            all="$all -D$macro"
            echo "gcc -I. -std=c99 -O1 $WARN_C -D$macro -c -o $d/$macro.o $t"
            echo "$cc -I. -std=c99 $WARN_C -D$macro -fsyntax-only $t"
            echo "$cc -I. -x c++ -std=c++11 $WARN -D$macro -fsyntax-only $t"
        done <<<"$LEFT_OUT"
        echo "gcc -I. -std=c99 $WARN_C -DQLORA_STATIC$all -c -o /dev/null $t"
        echo "$cc -I. -std=c99 $WARN_C -DQLORA_STATIC$all -fsyntax-only $t"
        echo "$cc -I. -x c++ -std=c++11 $WARN$all -fsyntax-only $t"
    } >$d/commands
    run_all $d/commands
    nm -g --defined-only $d/nothing.o | awk '{ print $NF }' | sort -u >$d/public
    left_out_run nothing
    while read -r macro bytes names calls; do
        left_out_object "$macro" "$bytes" "$names"
        left_out_run "$macro" "$calls"
    done <<<"$LEFT_OUT"
    left_out_run player train
    # A game that speaks with adapters: at most half of the 5,948,074 bytes of commit 8565662.
    bytes=$(size $d/player.o | awk 'END { print $1 + $2 }')
    [[ $bytes -le 2974037 ]] || fault "the object of a player has $bytes bytes"
}

left_out_player() {
    echo "-DQLORA_NO_TRAIN -DQLORA_NO_MERGE -DQLORA_PTX_NO_TRAIN"
}

left_out_object() {
    local macro=$1 bytes=$2 names=$3 whole left
    whole=$(size $d/nothing.o | awk 'END { print $1 + $2 }')
    left=$(size $d/$macro.o | awk 'END { print $1 + $2 }')
    [[ $((whole - left)) -ge $bytes ]] ||
        fault "$macro: $whole bytes become $left, which is not $bytes less"
    faults "$macro: not left out: " < <(nm $d/$macro.o | grep -E " $names")
    nm -g --defined-only $d/$macro.o | awk '{ print $NF }' | sort -u >$d/defined
    faults "$macro: left out as well: " < <(comm -23 $d/public $d/defined |
        grep -vE "^(qlora_nccl_id|qlora_gradient_read|$names)")
}

# left_out_run NAME CALLS: on the CPU and the fake GPU, with the same results as with everything.
left_out_run() {
    local name=$1 calls=${2:-} call gpu
    # shellcheck disable=SC2086
    gcc -o $d/program $d/$name.o $LIBS || { fault "$name does not link"; return; }
    for gpu in none build/fake; do
        LD_LIBRARY_PATH=$gpu $d/program $d/adapter >$d/$name.out ||
            fault "$name: what is left does not work ($gpu): $(cat $d/$name.out)"
        [[ $name != nothing ]] || cp $d/nothing.out $d/${gpu##*/}.whole
        grep -E '^(loss|with|without)' $d/$name.out >$d/results
        faults "$name: not a result of the whole library ($gpu): " < <(
            grep -vxFf $d/${gpu##*/}.whole $d/results)
        [[ $(wc -l <$d/results) -ge 2 ]] || fault "$name: no results ($gpu)"
        for call in $calls; do
            grep -qE "^$call: unsupported: .* left out by QLORA_NO_" $d/$name.out ||
                fault "$name: no clear error for $call: $(cat $d/$name.out)"
        done
        for call in $(sed -n 's/^\([a-z]*\): unsupported: .*/\1/p' $d/$name.out); do
            [[ " $calls " == *" $call "* ]] || fault "$name: also refuses $call"
        done
    done
}

# What a C++ project sees: no warning from the declarations and public macros in its own code, with
# flags that forbid casts as in C; examples, and with them README's program, that it can take over
# (their implementations are compiled by other gates); and an implementation without warnings of the
# optimizer, which in C++ also knows of exceptions.
gate_cxx() {
    need_file qlora.h qlora_text.h
    need g++
    local cxx f casts done="-DQLORA_IMPLEMENTATION_DONE -DQLORA_TEXT_IMPLEMENTATION_DONE"
    for cxx in g++ "$CLANG++"; do
        have "$cxx" || continue
        casts="-Wold-style-cast"
        [[ $cxx != g++ ]] || casts="$casts -Wuseless-cast"
        echo "$cxx -I. -std=c++17 $WARN $casts -fsyntax-only tests/gates/compile/caller.cpp"
        for f in examples/*.c; do
            echo "$cxx -I. -x c++ -std=c++17 -Werror $done -fsyntax-only $f"
        done
    done >$OUT/commands
    echo "g++ -I. -x c++ -std=c++11 -O1 $WARN -c -o /dev/null tests/gates/compile/text_config.c" \
        >>$OUT/commands
    run_all $OUT/commands
}

# Prints the macros that qlora.h and kernels_ptx.h leave defined, found by the preprocessor's line
# markers.
macros_left() {
    gcc -I. -std=c99 -E -dD "$1" | awk '
        /^# [0-9]+ "/ { ours = ($3 ~ /(qlora|kernels_ptx)\.h"/) }
        /^#define / { name = $2; sub(/\(.*/, "", name); if (ours) left[name] = 1 }
        /^#undef / { delete left[$2] }
        END { for (name in left) print name }' | sort
}

gate_macros() {
    need_file qlora.h
    need gcc
    # qlora_ctx_create hands the header's version on; every other lower-case name is a function.
    local ok='^(QLORA|qlora_ctx_create$|_POSIX_C_SOURCE$|_DARWIN_C_SOURCE$|_FILE_OFFSET_BITS$)'
    faults "left defined: " < <(macros_left tests/gates/compile/config.c | grep -vE "$ok")
    faults "left defined by the declarations: " < <(macros_left tests/gates/compile/declarations.c |
        grep -E '^(QLORA__|QLORA_X_)|^[^Q]' | grep -v '^qlora_ctx_create$')
    faults "private name among the declarations: " < <(
        gcc -I. -E -P tests/gates/compile/declarations.c |
        grep -oE '\bqlora__[a-z_]+' | sort -u)
}

# No function may call itself, directly or indirectly (calls through pointers are not detected).
gate_recursion() {
    need_file qlora.h
    need gcc tsort
    local object
    object=$(implementation) || return 1
    [[ -e ${object%.o}.ci ]] || skip "this gcc has no -fcallgraph-info"
    sed -n 's/^edge: { sourcename: "\([^"]*\)" targetname: "\([^"]*\)".*/\1 \2/p' \
        "${object%.o}.ci" |
        sed 's,[^ ]*:,,g' | grep -v '__indirect_call' | sort -u >$OUT/calls
    [[ -s $OUT/calls ]] || fault "no call graph"
    faults "calls itself: " < <(awk '$1 == $2 { print $1 }' $OUT/calls)
    faults "" < <(tsort $OUT/calls 2>&1 >/dev/null | head -20)
}

# Compiles everything else with -Werror: into build, for the tests and for other gates, and for its
# warnings only what is not built there, and everything with the other compiler. The implementations
# are left out where private names are not needed: the gates `warnings` and `text_header` have them.
gate_programs() {
    local cc f built=gcc done="-DQLORA_IMPLEMENTATION_DONE -DQLORA_TEXT_IMPLEMENTATION_DONE"
    [[ $(cc --version) == *"Free Software Foundation"* ]] || built=$CLANG
    build -j2 all build/{embed,ptx-tool,bench,soak_kill,ptx_test,golden} CFLAGS=-Werror || bad=1
    for f in programs/*.c examples/*.c tools/*.c tests/{unit,fakecuda,bench,golden,gates}/*.c \
        tests/internal/{library,text_library,double}.c; do
        for cc in $(compilers); do
            [[ $cc != "$built" || ! -e $(built_from "$f") ]] || continue
            [[ $f == programs/* || $f == examples/* ]] || done=
            echo "$cc -I. -Itests -std=c99 $WARN_C $done -fsyntax-only $f"
        done
    done >$OUT/commands
    run_all $OUT/commands
    bench_experts
}

# Steps and texts of a small mixture of experts, of which two layers are left.
bench_experts() {
    local tiny=(--shape tiny-experts --layers 2 --backend cpu)
    build/bench step "${tiny[@]}" --batch 2 --seq 32 --once --targets attention,experts \
        --optimizer adamw8bit >$OUT/bench 2>&1 || fault "bench step: $(tail -1 $OUT/bench)"
    grep -q "trained parameters: attention 14336, experts 28672$" $OUT/bench ||
        fault "bench step does not say what is trained: $(sed -n 2p $OUT/bench)"
    build/bench generate "${tiny[@]}" --prompt 8 --new 4 --runs 1 --targets router \
        >$OUT/bench 2>&1 || fault "bench generate: $(tail -1 $OUT/bench)"
    build/bench step "${tiny[@]}" --batch 1 --seq 8 --layers 4 >$OUT/bench 2>&1 &&
        fault "bench step takes more layers than there are"
    grep -q -- "--layers is 4; tiny-experts has 3 layers" $OUT/bench ||
        fault "bench step does not say why: $(tail -1 $OUT/bench)"
}

# Prints what the Makefile builds from a source with all of our warnings.
built_from() {
    local name=${1%.c}
    case $name in
    tests/bench/bench | tests/golden/golden | tests/gates/soak_kill | tools/embed | programs/* | \
        examples/* | */ptx_test) echo "build/${name##*/}" ;;
    */variant) echo build/fake/libcuda.so.1 ;;
    tests/*) echo "build/obj/${name#tests/}.o" ;;
    *) echo /nowhere ;;
    esac
}

# Examples must be short, start with a compile command that works, and run on both backends. The
# command of hello.c is tried as it is. Those of the others compile the same library: they are tried
# without the model, for errors, and with the objects of the build, to link.
gate_examples() {
    local f name command objects="build/obj/qlora.o build/obj/qlora_text.o"
    local done="-DQLORA_IMPLEMENTATION_DONE -DQLORA_TEXT_IMPLEMENTATION_DONE"
    build -j2 examples build/fake/libcuda.so.1 build/fake/libcublas.so.13 CFLAGS=-Werror || return 1
    : >$OUT/commands
    for f in examples/*.c; do
        name=$(basename "$f" .c)
        [[ $(wc -l <"$f") -le 120 ]] || fault "$f is longer than 120 lines"
        command=$(head -12 "$f" | sed -n 's,^//[ $]*\(cc .*\),\1,p' | head -1 |
            sed "s, -o [^ ]*, -o $OUT/$name,; s, -O2 , -O2 -Werror ,")
        [[ $command == *" $f "* ]] || fault "$f: no compile command at the top"
        if [[ $name == hello ]]; then
            echo "$command" >>$OUT/commands
        else
            {
                echo "$command -DQLORA_NO_MODEL -DQLORA_NO_CUDA -fsyntax-only"
                echo "${command/ $f / $f $done $objects }"
            } >>$OUT/commands
            # As its command has no object of the library.
            [[ $(grep -cE '^#define QLORA_(TEXT_)?IMPLEMENTATION$' "$f") -eq \
                $(grep -cE '^#include "qlora(_text)?.h"' "$f") ]] ||
                fault "$f does not define every implementation"
        fi
        grep -q '^// check: needs ' "$f" && continue
        build/"$name" >"$OUT/$name.out" 2>&1 || fault "$name fails: $(tail -5 "$OUT/$name.out")"
        if [[ -e build/fake/libcuda.so.1 ]]; then
            LD_LIBRARY_PATH=build/fake build/"$name" >"$OUT/$name.out" 2>&1 ||
                fault "$name fails on the fake GPU: $(tail -5 "$OUT/$name.out")"
        fi
    done
    run_all $OUT/commands
}

# Uses the programs as a person would.
# finetune with several processes.
gate_mpi() {
    have mpirun || have mpiexec.mpich || skip "neither mpirun nor mpiexec.mpich found"
    build -j2 build/finetune || return 1
    tests/gates/use_mpi.sh || bad=1
}

gate_use() {
    build -j2 examples build/fake/libcuda.so.1 build/fake/libcublas.so.13 CFLAGS=-Werror || return 1
    use_all build tests/gates/use_programs.sh tests/gates/use_tools.sh
}

# Opens the page and the plot of two runs in a browser: light and dark, narrow and wide.
gate_page() {
    local name browser=
    for name in chromium chromium-browser google-chrome chrome; do
        browser=${browser:-$(command -v $name)}
    done
    [[ -n $browser ]] || skip "chromium not found"
    build build/finetune CFLAGS=-Werror || return 1
    echo '<p>a browser' >$OUT/probe.html
    timeout 60 "$browser" --headless --no-sandbox --disable-gpu --user-data-dir=$OUT/probe \
        --dump-dom "file://$PWD/$OUT/probe.html" 2>/dev/null | grep -q 'a browser' ||
        skip "$browser does not start here"
    tests/gates/page.sh "$browser" $OUT/page || bad=1
}

# use_all B SCRIPT...: runs the scripts at the same time, with the programs in B.
use_all() {
    local b=$1 script out
    shift
    for script in "$@"; do
        out=$OUT/$(basename "${script%% *}" .sh).out
        echo "NO_BUILD=1 B=$b $script >$out 2>&1 ||" \
            "{ echo ${script%% *}:; grep -A8 '^FAIL' $out; tail -1 $out; false; }"
    done >$OUT/commands
    run_all $OUT/commands
}

# The same with gcc's sanitizers in the programs; they see other mistakes than clang's. The groups
# that mainly train, wait or kill would take many minutes under the sanitizers.
gate_use_gcc() {
    local groups="wrong_use looking logs inputs doctors configs adapters sampling events"
    use_sanitized gcc build/check-gcc-san "tests/gates/use_programs.sh $groups" \
        tests/gates/use_tools.sh
}

# Everything with clang's sanitizers. It takes long, so only `make soak` runs it.
gate_use_clang() {
    use_sanitized "$CLANG" build/check-clang-san tests/gates/use_programs.sh \
        tests/gates/use_tools.sh
}

# use_sanitized COMPILER B SCRIPT...
use_sanitized() {
    local cc=$1 b=$2 name
    shift 2
    need "$cc"
    local flags="-O1 -g1 -fno-omit-frame-pointer -fsanitize=address,undefined"
    flags="$flags -fno-sanitize-recover=all"
    echo 'int main(void) { return 0; }' >$OUT/probe.c
    # shellcheck disable=SC2086
    { "$cc" $flags -o $OUT/probe $OUT/probe.c && $OUT/probe; } 2>/dev/null ||
        skip "this $cc has no sanitizers"
    $MAKE -s -j2 examples "B=$b" CC="$cc" CFLAGS="$flags" || return 1
    # On aarch64, the search for leaks costs 4 s per process; only the examples below pay for it.
    local options=${ASAN_OPTIONS:-}
    [[ $(uname -m) != aarch64 ]] || options=detect_leaks=0${options:+:$options}
    # AddressSanitizer reserves more addresses than any limit of a test allows.
    USE_MEMORY=unlimited ASAN_OPTIONS=$options use_all "$b" "$@"
    for name in hello gemm clip_graph; do
        "$b/$name" >"$OUT/$name.out" 2>&1 || fault "$name: $(tail -5 "$OUT/$name.out")"
    done
}

# Writes out the C blocks of the documents whose first line names a file (`// hello.c`), then runs
# every line of their sh blocks that starts with `cc `, and the program that it builds. Outside of
# README.md, a line that only compiles is checked for errors, and the object is that of the build.
gate_readme() {
    need_file README.md qlora.h kernels_ptx.h
    local d=$OUT/readme page line out
    rm -rf $d
    mkdir -p $d
    ln -s "$PWD/qlora.h" "$PWD/kernels_ptx.h" "$PWD/qlora_text.h" $d/
    tests/gates/check_docs.sh || fault "what the documents name does not exist"
    for page in README.md docs/*.md; do
        awk -v d=$d '/^```c$/ { on = 1; first = 1; next } /^```/ { on = 0; file = "" }
            on && first && match($0, /^\/\/ [A-Za-z0-9_]+\.c/) {
                file = d "/" substr($0, RSTART + 3, RLENGTH - 3)
            }
            on { first = 0; if (file != "") print > file }' "$page"
        awk '/^```(sh|bash|console)$/ { on = 1; next } /^```/ { on = 0 }
            on && sub(/^(\$ )?cc /, "cc ")' "$page" >$d/commands
        [[ $page != README.md || -s $d/commands ]] || fault "README.md has no compile command"
        while read -r line; do
            out=$(sed -n 's/.* -o \([^ ]*\).*/\1/p' <<<"$line")
            if [[ $page != README.md && $line == *" -c "* ]]; then
                out=$(sed 's/.* \([a-z_]*\)\.c$/\1.o/' <<<"$line")
                build "build/obj/$out" && cp "build/obj/$out" $d/ || return 1
                (cd $d && bash -c "${line/ -c / -fsyntax-only }") || fault "command fails: $line"
                continue
            fi
            line=${line/ -O2 / -O0 } # the gate `examples` has the same program with -O2
            (cd $d && bash -c "${line%%&&*}") || { fault "command fails: $line"; continue; }
            (cd $d && "./${out:-a.out}" >out 2>&1) ||
                fault "$page: ${out:-a.out} fails: $(tail -3 $d/out)"
        done <$d/commands
    done
    # The program is examples/hello.c, and prints what README.md shows.
    diff <(sed '1,/^[^/]/{/^[^/]/!d}' examples/hello.c) <(tail -n +2 $d/hello.c) ||
        fault "examples/hello.c (<) and README.md (>) differ"
    (cd $d && ./hello) >$d/hello.out
    grep -A4 '^step 20  loss' README.md | head -4 | sed 's/[0-9]$/./' >$d/hello.want
    sed 's/\(loss .*\)[0-9]$/\1./' $d/hello.out | diff <(sed 's/\.\.$/../' $d/hello.want) - ||
        fault "hello prints something else than README.md shows"
}

# ---- kernels ----

gate_ptx_fresh() {
    need_file kernels_ptx.h
    build build/ptx-tool || return 1
    build/ptx-tool --check kernels_ptx.h kernels/*.cu* kernels/*/* || bad=1
}

gate_ptx_same() {
    need_file kernels_ptx.h
    need "$NVCC"
    local mine theirs
    mine=$($NVCC --version | sed -n 's/.*, V\([0-9.]*\).*/\1/p')
    theirs=$(sed -n 's,^// nvcc ,,p' kernels_ptx.h)
    [[ $mine == "$theirs" ]] || skip "kernels_ptx.h is from nvcc $theirs; this is $mine"
    build build/embed || return 1
    build -j2 ptx-header OUT=$OUT/kernels_ptx.h \
        TEXTS="$(build/embed --texts build/ptx kernels/*/*.cu | tr '\n' ' ')" || return 1
    cmp kernels_ptx.h $OUT/kernels_ptx.h || bad=1
}

# Assembles the PTX that qlora.h would pass to a driver, for every target.
gate_ptx_assemble() {
    need_file kernels_ptx.h
    need "$PTXAS"
    local module target text known d=$OUT/ptx
    rm -rf $d
    mkdir -p $d
    build build/ptx-tool || return 1
    known=$($PTXAS --help | tr -c 'a-z0-9_' '\n' | grep '^sm_' | sort -u)
    {
        for module in $(build/ptx-tool --list | awk '$2 !~ /a$/ { print $1 }' | sort -u); do
            for target in $PTX_TARGETS; do
                echo "$module $target"
            done
        done
        # PTX for a single target, such as sm_90a.
        build/ptx-tool --list | sed -n 's/^\([^ ]*\) sm_\([0-9]*a\) .*/\1 \2/p'
    } >$d/wanted
    while read -r module target; do
        text=$d/$module.$target
        if ! grep -qx "sm_$target" <<<"$known"; then
            echo "(this ptxas does not know sm_$target)" >&2
        elif build/ptx-tool --emit "$module" "sm_$target" >"$text.ptx" 2>/dev/null; then
            echo "$PTXAS -arch=sm_$target -o $text.cubin $text.ptx"
        elif [[ $target != 75 ]]; then
            echo "echo no PTX of $module for sm_$target; false"
        fi
    done <$d/wanted >$d/commands
    run_all $d/commands
    faults "kernel without prefix: " < <(grep -hoE '\.visible \.entry [A-Za-z0-9_$]+' $d/*.ptx |
        awk '$3 !~ /^qlora_/ { print $3 }' | sort -u)
}

# Tests the embedder: the PTX that it keeps, its hashes and its errors.
gate_embed() {
    local d=$OUT/embed t=tests/gates/compile/embed n
    rm -rf $d
    mkdir -p $d
    build build/embed || return 1
    printf '// targets: 80\n' >$d/marked.cu
    printf 'comma gamma\n' >$d/plain.cu
    printf 'asm("mma.sync.aligned");\n' >$d/tensor.cu
    printf 'cp.async\n' >$d/copy.cu
    for n in "marked 80" "plain 75 80" "tensor 80" "copy 80"; do
        [[ "${n%% *} $(build/embed --targets "$d/${n%% *}.cu")" == "$n" ]] ||
            fault "wrong targets: $n"
    done
    cp $t/plain.ptx $d/plain.sm_75.ptx
    sed 's/$/ /; s/%tid.x/%ntid.x/' $t/plain.ptx >$d/plain.sm_80.ptx
    for n in 1 2; do
        build/embed --write $d/$n.h --nvcc 1.2 $d/plain.cu $d/plain.sm_80.ptx $d/plain.sm_75.ptx ||
            return 1
    done
    cmp $d/1.h $d/2.h || fault "two runs differ"
    gcc -std=c99 $WARN_C -DEMBED_TABLE="\"$PWD/$d/1.h\"" -o $d/tool tools/embed.c || return 1
    $d/tool --check $d/1.h $d/plain.cu || fault "its own output fails the check"
    $d/tool --emit plain sm_75 | diff $t/plain.sm_75.expected - || fault "wrong PTX for sm_75"
    $d/tool --emit plain sm_86 | grep -q '%ntid.x' || fault "sm_86 does not get the PTX of sm_80"
    [[ $($d/tool --emit plain sm_121 | head -2 | xargs) == ".version 8.8 .target sm_121" ]] ||
        fault "wrong header lines for sm_121"
    # A kernel that is the same for two targets is written once, and stays when one text goes.
    { cat $t/plain.ptx; echo '.visible .entry qlora_second() { ret; }'; } >$d/plain.sm_75.ptx
    sed 's/%tid.x/%ntid.x/' $d/plain.sm_75.ptx >$d/plain.sm_80.ptx
    printf '// groups: one two\n' >$d/plain.cu
    build/embed --write $d/3.h --nvcc 1.2 $d/plain.cu $d/plain.sm_80.ptx $d/plain.sm_75.ptx || bad=1
    [[ $(grep -c 'qlora_second' $d/3.h) -eq 1 ]] || fault "a shared kernel is written twice"
    for n in "" SM80 TWO; do
        gcc -std=c99 $WARN_C ${n:+-DQLORA_PTX_NO_$n} -DEMBED_TABLE="\"$PWD/$d/3.h\"" -o $d/tool3$n \
            tools/embed.c || bad=1
    done
    $d/tool3 --emit plain sm_86 | grep -c 'ntid\|second' | grep -qx 2 || fault "sm_86: wrong text"
    $d/tool3SM80 --emit plain sm_86 | grep -c ' a0,%tid\|second' | grep -qx 2 ||
        fault "without the text for sm_80, that for sm_75 does not serve"
    build/embed --only "plain sm_80" $d/3.h $d/4.h || bad=1
    gcc -std=c99 $WARN_C -DEMBED_TABLE="\"$PWD/$d/4.h\"" -o $d/tool4 tools/embed.c || bad=1
    [[ $($d/tool4 --list) == "plain sm_80 "* ]] && $d/tool4 --check $d/4.h $d/plain.cu ||
        fault "--only sm_80 loses what both texts share"
    $d/tool3TWO --list | grep -q . && fault "a module of the group two stays"
    gate_embed_registers "$d"
    gate_embed_packed "$d"
    printf '// targets: 80\n// groups: Big\n' >$d/plain.cu
    build/embed --write $d/x.h --nvcc 1 $d/plain.cu $d/plain.sm_80.ptx 2>/dev/null &&
        fault "a group that cannot be a macro passes"
    printf 'comma gamma\n' >$d/plain.cu
    if have sha256sum; then
        for n in 0 1 55 56 63 64 65 119 120 1000; do
            head -c $n tools/embed.c >$d/n.cuh
            build/embed --write $d/n.h --nvcc 1 $d/n.cuh $d/plain.sm_75.ptx
            grep -q "sha256 $(sha256sum <$d/n.cuh | cut -c 1-64) " $d/n.h ||
                fault "wrong sha256 of $n bytes"
        done
    fi
    printf 'x' >>$d/plain.cu
    build/embed --sources $d/1.h $d/plain.cu >/dev/null && fault "a stale source passes"
    printf '.visible .entry q() { \303\244 }\n' >$d/bad.sm_80.ptx
    build/embed --write $d/x.h --nvcc 1 $d/plain.cu $d/bad.sm_80.ptx 2>/dev/null &&
        fault "PTX that is not ASCII passes"
    for n in '.func q()\n{\nret;\n}\n' '.global .b8 q[4];\n' '{ }\n'; do
        printf ".visible .entry qlora_one()\n{\nret;\n}\n$n" >$d/bad.sm_80.ptx
        printf ".visible .entry qlora_two()\n{\nret;\n}\n" >>$d/bad.sm_80.ptx
        build/embed --write $d/x.h --nvcc 1 $d/plain.cu $d/bad.sm_80.ptx 2>/dev/null &&
            fault "a text passes that cannot be cut: $n"
    done
    return 0
}

# Names of more registers than letters and numbers suffice for: every register keeps a name of its
# own, within a declared range, and those that occur most have the shortest ones.
gate_embed_registers() {
    local d=$1 i
    {
        printf '.visible .entry qlora_many()\n{\n.reg .b32 %%r<6000>;\n.reg .f32 %%f<6000>;\n'
        for ((i = 0; i < 5000; i++)); do
            printf 'mov.u32 %%r%d,%d;\nadd.u32 %%r%d,%d;\n' $i $i $i $i
            [[ $i -lt 4900 ]] || printf 'or.u32 %%r%d,%d;\nor.u32 %%f%d,f%d;\n' $i $i $i $i
        done
        printf 'ret;\n}\n'
    } >$d/many.sm_75.ptx
    printf 'comma\n' >$d/many.cu
    build/embed --write $d/many.h --nvcc 1.2 $d/many.cu $d/many.sm_75.ptx || bad=1
    gcc -std=c99 -DEMBED_TABLE="\"$PWD/$d/many.h\"" -o $d/tool_many tools/embed.c || bad=1
    $d/tool_many --emit many sm_75 | tr '{;' '\n\n' | awk '
        $1 == ".reg" {
            n = split($3, ranges, ",")
            for (i = 1; i <= n; i++) {
                split(ranges[i], x, /[<>]/)
                for (j = 0; j < x[2]; j++) declared[x[1] j]++
            }
        }
        $1 ~ /u32$/ {
            split($2, x, ",")
            if (!(x[1] in declared)) print x[1] " is not declared"
            if (x[2] in name && name[x[2]] != x[1]) print "register " x[2] " has two names"
            if (x[1] in owner && owner[x[1]] != x[2]) print x[1] " is two registers"
            if (x[2] + 0 >= 4900 && length(x[1]) > 2) print x[1] " occurs often and is long"
            name[x[2]] = x[1]
            owner[x[1]] = x[2]
        }
        END {
            for (i in declared) count += declared[i]
            for (i in name) used++
            print used " of " count
        }' | head -5 >$d/many.log
    [[ $(cat $d/many.log) == "5100 of 5100" ]] || fault "names of registers: $(cat $d/many.log)"
}

# embed --packed: the same texts, with the macros and --only, of a small header and of the real one;
# damage and headers that it does not understand are refused.
gate_embed_packed() {
    local d=$1 n module target
    for n in 5 6; do
        build/embed --packed $d/3.h $d/$n.h || fault "--packed fails"
    done
    cmp $d/5.h $d/6.h || fault "--packed: two runs differ"
    build/embed --only "plain sm_80" $d/5.h $d/7.h || bad=1
    build/embed --packed $d/4.h $d/8.h || bad=1
    build/embed --packed --only "plain sm_80" $d/3.h $d/9.h && cmp $d/8.h $d/9.h ||
        fault "--packed --only differs from one after the other"
    for n in "5" "5 SM80" "5 TWO" 7 8; do
        # shellcheck disable=SC2086
        set -- $n
        gcc -std=c99 $WARN_C ${2:+-DQLORA_PTX_NO_$2} -DEMBED_TABLE="\"$PWD/$d/$1.h\"" \
            -o $d/tool$1${2:-} tools/embed.c || bad=1
    done
    for n in "3 5" "3SM80 5SM80" "3TWO 5TWO" "4 7" "4 8"; do
        $d/tool${n% *} --emit plain sm_86 >$d/plain.out 2>&1
        $d/tool${n#* } --emit plain sm_86 >$d/packed.out 2>&1
        diff <($d/tool${n% *} --list) <($d/tool${n#* } --list) && cmp $d/plain.out $d/packed.out ||
            fault "--packed: the text is another one: $n"
    done
    $d/tool5 --check $d/5.h $d/plain.cu || fault "a packed header fails the check"
    sed '/^static const char qlora__ptx_2/{n;y/abcdefgh/bcdefgha/}' $d/5.h >$d/damaged.h
    gcc -std=c99 -DEMBED_TABLE="\"$PWD/$d/damaged.h\"" -o $d/tool_damaged tools/embed.c || bad=1
    $d/tool_damaged --check $d/damaged.h $d/plain.cu >/dev/null && fault "damage passes the check"
    $d/tool_damaged --emit plain sm_80 >/dev/null 2>&1 && fault "damaged PTX is printed"
    build/embed --packed $d/5.h $d/x.h 2>/dev/null && fault "a packed header is packed again"
    sed 's/%ntid.x/%ntid.y/' $d/3.h >$d/edited.h
    build/embed --packed $d/edited.h $d/x.h 2>$d/edited.log && fault "an edited text is packed"
    grep -q 'plain_80: its text has been edited' $d/edited.log ||
        fault "an edited text: $(cat $d/edited.log)"
    build/embed --packed Makefile $d/x.h 2>/dev/null && fault "a file without texts is packed"
    mkdir -p $d/real
    build build/ptx-tool ptx-packed B=$d/real || return
    n=$(wc -c <$d/real/kernels_ptx.h)
    # Less than half of the plain header, whose words have short forms.
    [[ $((2 * n)) -lt $(wc -c <kernels_ptx.h) ]] || fault "the packed header has $n bytes"
    gcc -std=c99 $WARN_C -DEMBED_TABLE="\"$PWD/$d/real/kernels_ptx.h\"" -o $d/tool_real \
        tools/embed.c || bad=1
    $d/tool_real --check $d/real/kernels_ptx.h kernels/*.cu* kernels/*/* ||
        fault "the packed header: wrong texts"
    while read -r module target _; do
        build/ptx-tool --emit "$module" "$target" >$d/plain.out
        $d/tool_real --emit "$module" "$target" >$d/packed.out
        cmp $d/plain.out $d/packed.out ||
            fault "$module for $target is another text when packed"
    done < <(build/ptx-tool --list)
}

# The groups that a module must be in, from the needs of its kernels in the registry.
registry_groups() {
    awk -F'[(,) ]+' '
        BEGIN {
            of["GEMM"] = "gemm"; of["GEMM16"] = "bf16 gemm"; of["BF16"] = "bf16"; of["F32"] = "f32"
            of["NF4"] = "nf4"; of["NF4_BF16"] = "bf16 nf4"; of["LORA_BF16"] = "bf16"
            of["FP8"] = "bf16 fp8"; of["FP8_BASE"] = "fp8"; of["FP8_BASE_BF16"] = "bf16 fp8"
            of["STEP"] = "bf16"; of["STEP_NF4"] = "bf16 nf4"
            of["GATED"] = "bf16"; of["CALL_F32"] = "f32"; of["CALL_BF16"] = "bf16"
            of["CALL_NF4"] = "nf4"; of["CALL_NF4_BF16"] = "bf16 nf4"; of["CALL_LORA_BF16"] = "bf16"
            of["NOISE_BF16"] = "bf16"; of["PAIRS_BF16"] = "bf16"
            of["CAP_F32"] = "f32"; of["CAP_BF16"] = "bf16"; of["HEAD_NF4_BF16"] = "bf16 nf4"
            of["MEAN_NORM_F32"] = "f32"; of["MEAN_NORM_BF16"] = "bf16"
            of["EXPERTS"] = "experts"; of["EXPERTS_F32"] = "f32 experts"
            of["EXPERTS_BF16"] = "bf16 experts"; of["EXPERTS_WG"] = "bf16 experts"
            of["RELU2_F32"] = "f32"; of["RELU2_BF16"] = "bf16"
            of["STEP_WG"] = "bf16 nf4"; of["STEP_LAYERS"] = "bf16 nf4"; of["STEP_HEAD"] = "bf16"
            of["HEADANY"] = "headany"; of["HEAD128CAP"] = "bf16 head128cap"
            count = split("32 64 80 96 128 192 256", sizes, " ")
            for (i = 1; i <= count; i++) of["HEAD" sizes[i]] = "bf16 head" sizes[i]
            of["GEMM_WG"] = "bf16 gemm"; of["HEAD64WG"] = "bf16 head64"
            of["HEAD96WG"] = "bf16 head96"; of["HEAD128WG"] = "bf16 head128"
            of["HEAD256WG"] = "bf16 head256"
        }
        /^    X\([a-z]/ {
            # What all its kernels have in common.
            first = !($4 in module)
            need = $6
            train = sub(/(^|_)TRAIN$/, "", need) ? " train" : ""
            count = split(of[need] train, words, " ")
            left = ""
            for (i = 1; i <= count; i++) {
                if (first || index(" " module[$4] " ", " " words[i] " ")) {
                    left = left (left == "" ? "" : " ") words[i]
                }
            }
            module[$4] = left
        }
        END { for (m in module) print m ":", module[m] == "" ? "core" : module[m] }' \
        src/cache/registry.h | sort
}

# Groups of modules: as the registry says; each macro takes its bytes out of the object; a program
# built with what it needs runs; a call that needs more fails with a name for everything.
gate_groups() {
    need gcc size
    need_file kernels_ptx.h
    local d=$OUT/groups t=tests/gates/compile/left_out.c macro bytes whole left kernel
    local cc="gcc -I. -std=c99 -O0 $WARN_C -DQLORA_NO_MODEL"
    rm -rf $d
    mkdir -p $d
    build -j2 build/embed build/fake/libcuda.so.1 build/fake/libcublas.so.13 || return 1
    sed -n 's,^// texts \([a-z0-9_]*\) sm_[0-9a-z]*:,\1:,p' kernels_ptx.h | sort -u >$d/header
    registry_groups >$d/registry
    diff $d/header $d/registry || fault "groups of kernels/*/*.cu (<) and needs of the registry (>)"
    $cc -c -o $d/whole.o $t || return 1
    whole=$(bytes_of kernels_ptx.h)
    sed -n 's,^//  *\(QLORA_PTX_NO_[A-Z0-9]*\)  *\([0-9]*\) bytes.*,\1 \2,p' kernels_ptx.h \
        >$d/macros
    [[ $(wc -l <$d/macros) -ge 9 ]] || fault "too few groups in kernels_ptx.h"
    while read -r macro bytes; do
        left=$(bytes_of kernels_ptx.h -D"$macro")
        [[ $((whole - left)) -ge $bytes ]] ||
            fault "$macro: $whole bytes become $left, less than the $bytes of its texts"
    done <$d/macros
    # shellcheck disable=SC2046,SC2086
    $cc $(sed 's/ .*//; s/^/-D/' $d/macros) -o $d/none $t $LIBS || bad=1
    for macro in NO_HEAD64 NO_BF16; do
        # shellcheck disable=SC2086
        $cc -DQLORA_PTX_$macro -o $d/$macro $t $LIBS || bad=1
        LD_LIBRARY_PATH=build/fake $d/$macro get attn64_bwd_q attention 64 prewarm 64 attention 20 \
            >$d/$macro.out || fault "$macro: status $?"
        for kernel in "get.*attn64_bwd_q" "attention 64.*attn64_.*fwd" "prewarm 64.*[a-z0-9_]*"; do
            grep -qE "^$kernel is not in this build: its module .* left out by QLORA_PTX_$macro\$" \
                $d/$macro.out || fault "$macro: no clear error for $kernel: $(cat $d/$macro.out)"
        done
        grep -q "^attention 20: OK" $d/$macro.out || fault "$macro: other kernels do not work"
    done
    LD_LIBRARY_PATH=build/fake $d/none get cast_scale | grep -q 'left out by QLORA_PTX_NO_CORE$' ||
        fault "all groups left out: no clear error"
    gate_groups_only "$d" "$cc"
    gate_groups_packed "$d" "$cc"
}

# bytes_of HEADER FLAGS...: prints the bytes that its texts have in an object.
bytes_of() {
    local header=$1
    shift
    gcc -std=c99 "$@" -x c -c -o $OUT/texts.o "$header" &&
        size $OUT/texts.o | awk 'END { print $1 + $2 }'
}

gate_groups_only() {
    local d=$1 cc=$2
    build/embed --only "gemm" kernels_ptx.h $d/small.h || return 1
    [[ $(wc -c <$d/small.h) -lt 300000 ]] || fault "--only gemm leaves $(wc -c <$d/small.h) bytes"
    # shellcheck disable=SC2086
    $cc -DQLORA_KERNELS_HEADER="\"$PWD/$d/small.h\"" -o $d/gemm examples/gemm.c $LIBS || bad=1
    LD_LIBRARY_PATH=build/fake $d/gemm >$d/gemm.out || fault "gemm with --only gemm: status $?"
    grep -q '^PTX  *ran as' $d/gemm.out || fault "gemm did not run on PTX: $(cat $d/gemm.out)"
    # shellcheck disable=SC2086
    $cc -DQLORA_KERNELS_HEADER="\"$PWD/$d/small.h\"" -o $d/small tests/gates/compile/left_out.c \
        $LIBS || bad=1
    LD_LIBRARY_PATH=build/fake $d/small get gemm_big_f32 get clip_apply >$d/small.out || bad=1
    grep -q '^get gemm_big_f32: OK' $d/small.out || fault "--only gemm lost gemm"
    grep -q 'kernel clip_apply .* module clip was left out by embed --only gemm$' $d/small.out ||
        fault "--only: no clear error: $(cat $d/small.out)"
    build/embed --only "bf16 core sm_75" kernels_ptx.h $d/two.h || bad=1
    grep -q '^static.*qlora__ptx_cast_75' $d/two.h || fault "--only: a listed group is lost"
    grep -qE '^static.*qlora__ptx_(norm|norm_bf16)_' $d/two.h && fault "--only: too much is left"
    build/embed --only "gemm frob" kernels_ptx.h $d/x.h 2>/dev/null &&
        fault "--only takes a word that names nothing"
    return 0
}

# The library with packed texts: every kernel loads on every device as from plain ones, a macro
# leaves out its bytes and is named, damage is an error that names the module.
gate_groups_packed() {
    local d=$1 cc=$2 t=tests/gates/compile/left_out.c macro bytes whole left n
    local -a kernels
    build/embed --packed kernels_ptx.h $d/packed.h || return
    cc="$cc -DQLORA_KERNELS_HEADER=\"\\\"$PWD/$d/packed.h\\\"\""
    eval "$cc -c -o $d/packed.o $t" || return
    whole=$(bytes_of $d/packed.h)
    for macro in QLORA_PTX_NO_HEAD64 QLORA_PTX_NO_SM80 QLORA_PTX_NO_BF16; do
        bytes=$(sed -n "s,^//  *$macro  *\([0-9]*\) bytes.*,\1,p" $d/packed.h)
        left=$(bytes_of $d/packed.h -D$macro)
        [[ ${bytes:-0} -gt 10000 && $((whole - left)) -ge $bytes ]] ||
            fault "packed, $macro: $whole bytes become $left; its texts have ${bytes:-no bytes}"
    done
    # shellcheck disable=SC2086
    { gcc -o $d/packed $d/packed.o $LIBS && gcc -o $d/whole $d/whole.o $LIBS &&
        eval "$cc -DQLORA_PTX_NO_HEAD64 -o $d/packed64 $t $LIBS"; } || bad=1
    mapfile -t kernels < <(sed -n 's/^    X(\([a-z0-9_]*\), .*/get\n\1/p' src/cache/registry.h)
    [[ ${#kernels[@]} -gt 200 ]] || fault "too few kernels in the registry"
    for n in 80 90; do
        FAKECUDA_CC=$n LD_LIBRARY_PATH=build/fake $d/packed "${kernels[@]}" >$d/packed.$n.out ||
            fault "packed, sm_$n: status $?"
        FAKECUDA_CC=$n LD_LIBRARY_PATH=build/fake $d/whole "${kernels[@]}" >$d/whole.$n.out
        diff $d/whole.$n.out $d/packed.$n.out || fault "packed texts load differently on sm_$n"
    done
    [[ $(grep -c ': OK' $d/packed.90.out) -eq $((${#kernels[@]} / 2)) ]] ||
        fault "packed: not every kernel loads on sm_90"
    LD_LIBRARY_PATH=build/fake $d/packed64 get attn64_bwd_q attention 20 >$d/packed64.out || bad=1
    grep -q 'its module attn64_bwd was left out by QLORA_PTX_NO_HEAD64$' $d/packed64.out &&
        grep -q '^attention 20: OK' $d/packed64.out || fault "packed: $(cat $d/packed64.out)"
    for n in $(compilers); do
        eval "${cc/gcc/$n} -DTEXT_FIRST -fsyntax-only tests/gates/compile/text_both.c" &&
            eval "${cc/gcc -I. -std=c99 -O0 $WARN_C/$n -I. -x c++ -std=c++11 $WARN}" \
                -fsyntax-only tests/gates/compile/text_both.c ||
            fault "$n: packed texts do not compile"
    done
    # A character of every chunk is another one.
    sed '/^static const char qlora__ptx_[0-9]/{n;y/abcdefgh/bcdefgha/}' $d/packed.h >$d/damaged.h
    eval "${cc/packed.h/damaged.h} -o $d/damaged $t $LIBS" || bad=1
    LD_LIBRARY_PATH=build/fake $d/damaged get attn64_fwd get norm_rms_fwd_f32 >$d/damaged.out ||
        bad=1
    [[ $(grep -c 'kernel module [a-z0-9]*: its packed PTX for sm_.* is damaged: ' $d/damaged.out) \
        -eq 2 ]] || fault "damaged texts: $(cat $d/damaged.out)"
    # Neither form may pass for the other.
    sed 's/^\(#define QLORA__KERNEL_ABI\) 104.*/\1 105/' $d/packed.h >$d/damaged.h
    eval "${cc/packed.h/damaged.h} -fsyntax-only $t" 2>/dev/null && fault "another ABI compiles"
    return 0
}

# Compares our declarations of the driver and cuBLAS with NVIDIA's headers and libraries.
gate_contract() {
    need_file qlora.h
    need g++
    grep -q 'QLORA__CUDA_SYMBOLS(X)' qlora.h || skip "qlora.h has no table of CUDA symbols"
    local root=${CUDA_HOME:-} stub
    if [[ -z $root ]] && have "$NVCC"; then
        root=$(dirname "$(dirname "$(command -v "$NVCC")")")
    fi
    [[ -e $root/include/cuda.h ]] || skip "cuda.h not found (set CUDA_HOME)"
    [[ -e $root/include/cublas_v2.h ]] || skip "cublas_v2.h not found"
    sed -n 's/^#define QLORA__\(CU[A-Z]*_[A-Z0-9_]*\) [-(0-9].*/VALUE(\1)/p' qlora.h >$OUT/values.h
    # shellcheck disable=SC2086
    g++ -std=c++11 -I. -isystem "$root/include" -Wall -Wextra -Werror \
        -DCONTRACT_VALUES="\"$PWD/$OUT/values.h\"" -o $OUT/contract \
        tests/gates/contract_cuda.cpp $LIBS || return 1
    stub=$(find -L "$root" -name libcuda.so -path '*stubs*' 2>/dev/null | head -1)
    LD_LIBRARY_PATH="$root/lib64" $OUT/contract ${stub:+"$stub"} || bad=1
}

# ---- as a package ----

# The shared library: its name, what leaves it, and a program that uses it.
gate_shared() {
    need gcc nm readelf
    [[ $(uname -s) == Linux ]] || skip "make shared is for ELF systems"
    local d=$OUT/shared b=build/check-shared version
    rm -rf $d
    mkdir -p $d
    version=$(sed -n 's/^#define QLORA_VERSION_STRING "\(.*\)"/\1/p' qlora.h)
    # Names are the same without the optimizer and the kernels.
    $MAKE -s -j2 shared B=$b CFLAGS="-O0 -g0" CPPFLAGS=-DQLORA_NO_CUDA || return 1
    readelf -d $b/libqlora.so | grep -qF "soname: [libqlora.so.$version]" ||
        fault "the soname is not libqlora.so.$version"
    nm -D --defined-only $b/libqlora.so | awk '{ print $NF }' | sort >$d/exported
    nm -g --defined-only $b/obj/pic/qlora.o $b/obj/pic/qlora_text.o | awk 'NF > 2 { print $NF }' |
        sort >$d/public
    [[ -s $d/public ]] || fault "no public functions"
    diff $d/public $d/exported || fault "public (<) and exported (>) names differ"
    faults "exported, but not ours: " < <(grep -vE '^(qlora|text)_[a-z0-9]' $d/exported)
    gcc -I. -std=c99 -O1 -DQLORA_IMPLEMENTATION_DONE -o $d/hello examples/hello.c -L$b -lqlora ||
        return 1
    readelf -d $d/hello | grep -qF "[libqlora.so.$version]" || fault "hello does not need it"
    LD_LIBRARY_PATH=$b $d/hello >$d/hello.out 2>&1 ||
        fault "hello fails: $(tail -3 $d/hello.out)"
}

# A project that uses the library by way of CMake: LANGUAGE, how it gets qlora, the target.
cmake_project() {
    local dir=$1 language=$2 how=$3 target=$4 source
    mkdir -p "$dir"
    source=main.c
    [[ $language == C ]] || source=main.cpp
    printf '%s\n' "cmake_minimum_required(VERSION 3.14)" "project(game LANGUAGES $language)" \
        "$how" "add_executable(game $source)" "target_link_libraries(game PRIVATE $target)" \
        >"$dir/CMakeLists.txt"
    if [[ $target == qlora::headers ]]; then
        printf '#define %s\n' QLORA_IMPLEMENTATION QLORA_NO_MODEL QLORA_NO_CUDA >"$dir/$source"
    fi
    printf '%s\n' '#include "qlora.h"' '#include <stdio.h>' \
        'int main(void) { puts(QLORA_VERSION_STRING); return qlora_version() != QLORA_VERSION; }' \
        >>"$dir/$source"
}

cmake_runs() {
    local dir=$1
    shift
    { cmake -S "$dir" -B "$dir/build" -DCMAKE_BUILD_TYPE=Debug -DCMAKE_C_FLAGS_DEBUG=-O0 \
        "$@" &&
        cmake --build "$dir/build"; } >"$dir/log" 2>&1 ||
        { fault "$dir: $(tail -5 "$dir/log")"; return; }
    "$dir/build/game" >"$dir/out" || fault "$dir: the program fails"
}

# As a part of other projects, and installed by CMake.
gate_packaging() {
    need cmake gcc
    local d=$PWD/$OUT/packaging fetch how
    rm -rf "$d"
    mkdir -p "$d"
    fetch="include(FetchContent)
FetchContent_Declare(qlora SOURCE_DIR $PWD)
FetchContent_MakeAvailable(qlora)"
    how="C"
    have g++ && how="CXX"
    cmake_project "$d/fetch" $how "$fetch" qlora::qlora
    cmake_runs "$d/fetch" "-DQLORA_DEFINITIONS=QLORA_NO_CUDA;QLORA_NO_MODEL"
    cmake_project "$d/packed" C "add_subdirectory($PWD qlora)" qlora::qlora
    cmake_runs "$d/packed" -DQLORA_PACKED=ON -DQLORA_DEFINITIONS=QLORA_NO_MODEL
    find "$d/packed/build" -name 'finetune*' -o -name 'qlora_tests*' | grep -q . &&
        fault "a subproject builds programs or tests that nobody asked for"
    grep -rq --include=libqlora.a 'visible .entry qlora_attn' "$d/packed/build" &&
        fault "QLORA_PACKED does not pack"
    cmake_project "$d/headers" C "add_subdirectory($PWD qlora)" qlora::headers
    cmake_runs "$d/headers"
    # By itself: everything but the tests, which have the sources that make has; installed, found.
    { cmake -S . -B "$d/own" -DCMAKE_BUILD_TYPE=Debug -DCMAKE_C_FLAGS_DEBUG=-O0 \
        -DQLORA_DEFINITIONS=QLORA_NO_CUDA -DCMAKE_INSTALL_PREFIX="$d/prefix" -DQLORA_TESTS=OFF &&
        cmake --build "$d/own" -j2 && cmake --install "$d/own"; } >"$d/own.log" 2>&1 ||
        { fault "$(tail -5 "$d/own.log")"; return; }
    cmake -S . -B "$d/own" -DQLORA_TESTS=ON -DCMAKE_EXPORT_COMPILE_COMMANDS=ON >"$d/own.log" 2>&1 ||
        fault "$(tail -5 "$d/own.log")"
    diff <(grep -oE '"file": .*/tests/[^"]*' "$d/own/compile_commands.json" |
        sed 's,.*/tests/,tests/,' | sort) \
        <(ls tests/unit/*.c tests/internal/{double,library,text_library}.c | sort) ||
        fault "the tests are built from other files by CMake (<) than by make (>)"
    sed -n 's/^ *"command": "\(.*harness\.c\)",*$/\1 -fsyntax-only/p' \
        "$d/own/compile_commands.json" | sed 's/\\"/"/g; s/ -o [^ ]*//' >"$d/own.commands"
    run_all "$d/own.commands"
    "$d/prefix/bin/plan" --version >/dev/null || fault "an installed program does not run"
    cmake_project "$d/found" C "find_package(qlora REQUIRED)" qlora::qlora
    cmake_runs "$d/found" "-DCMAKE_PREFIX_PATH=$d/prefix"
    if have pkg-config; then
        pkg_config_runs "$d/prefix/lib*/pkgconfig" "$d"
    fi
}

# pkg_config_runs FOLDER WORK: a program compiled with what qlora.pc says, from elsewhere.
pkg_config_runs() {
    local folder work=$2 flags
    folder=$(compgen -G "$1" | head -1)
    flags=$(PKG_CONFIG_PATH=$folder pkg-config --cflags --libs qlora) ||
        { fault "pkg-config does not find qlora in $1"; return; }
    [[ $(PKG_CONFIG_PATH=$folder pkg-config --modversion qlora) == \
        "$(sed -n 's/^#define QLORA_VERSION_STRING "\(.*\)"/\1/p' qlora.h)" ]] ||
        fault "qlora.pc has another version"
    printf '%s\n' '#include <qlora.h>' \
        'int main(void) { return qlora_version() != QLORA_VERSION; }' >"$work/pc.c"
    # shellcheck disable=SC2086
    { (cd "$work" && gcc -o pc pc.c $flags) && "$work/pc"; } ||
        fault "a program built with '$flags' fails"
}

# make install, and that uninstall removes all of it and nothing else.
gate_install() {
    need gcc
    local d=$PWD/$OUT/install
    rm -rf "$d"
    mkdir -p "$d/stage/usr/bin"
    echo "somebody else's" >"$d/stage/usr/bin/other"
    build -j2 install PREFIX="$d/prefix" >/dev/null || return 1
    "$d/prefix/bin/finetune" --version >/dev/null || fault "an installed program does not run"
    if have pkg-config; then
        pkg_config_runs "$d/prefix/lib/pkgconfig" "$d"
    fi
    build uninstall PREFIX="$d/prefix" >/dev/null || bad=1
    faults "left by uninstall: " < <(find "$d/prefix" ! -type d)
    build install DESTDIR="$d/stage" PREFIX=/usr >/dev/null || bad=1
    [[ -e $d/stage/usr/include/qlora_text.h && -e $d/stage/usr/lib/libqlora.a ]] ||
        fault "DESTDIR: $(find "$d/stage" ! -type d)"
    grep -qx 'includedir=/usr/include' "$d/stage/usr/lib/pkgconfig/qlora.pc" ||
        fault "DESTDIR is in qlora.pc"
    build uninstall DESTDIR="$d/stage" PREFIX=/usr >/dev/null || bad=1
    faults "left by uninstall: " < <(find "$d/stage" ! -type d ! -name other)
    [[ -e $d/stage/usr/bin/other ]] || fault "uninstall removes what it did not install"
}

# ---- running ----

# The PTX interpreter behind the fake GPU, instruction by instruction.
gate_interpreter() {
    build build/ptx_test || return 1
    build/ptx_test >$OUT/ptx_test.out 2>&1 || fault "$(tail -5 $OUT/ptx_test.out)"
    grep -qE '^ptx: [1-9][0-9]{3,} checks, 0 failed$' $OUT/ptx_test.out ||
        fault "too few checks: $(tail -1 $OUT/ptx_test.out)"
}

# run_batches WORDS B COMMAND...: runs B/tests with the command in front and the options after `--`:
# the suites that have these words in suites.h (or have one not: -WORD), two batches at a time. A
# batch may have no test for the chosen backend. CHECK_SUITES names suites to run instead.
run_batches() {
    local words=$1 b=$2 before=() suites out
    shift 2
    while [[ $1 != -- ]]; do
        before+=("$1")
        shift
    done
    shift
    rm -f $OUT/*_suite.out
    # shellcheck disable=SC2086
    for suites in ${CHECK_SUITES:-$(tests/batches.sh $words)}; do
        out=$OUT/${suites%%,*}.out
        echo "timeout 1500 ${before[*]} $b/tests --suites $suites $* >$out 2>&1 ||" \
            "tail -1 $out | grep -q '^0 passed, 0 failed'"
    done >$OUT/commands
    run_all $OUT/commands
    [[ $bad -eq 0 ]] && return
    grep -E -A12 'ERROR|runtime error|WARNING|^FAIL' $OUT/*_suite.out | head -30
    tail -n 1 $OUT/*_suite.out
}

# sanitized NAME WORDS FLAGS OPTIONS...: runs suites with a sanitizer. The fake GPU is built without
# one; it checks its own memory.
sanitized() {
    local name=$1 words=$2 flags=$3 cc
    shift 3
    need_file qlora.h
    # shellcheck disable=SC2086
    cc=$(compiler_with $flags)
    [[ -n $cc ]] || skip "no compiler supports $flags"
    build -j2 build/fake/lib{cuda.so.1,cublas.so.13,cublasLt.so.13,nccl.so.2,fakempi.so} \
        build/fake-{stub,omit}/libcuda.so.1 \
        build/fake-omit/libcublas.so.13 CFLAGS=-Werror || return 1
    $MAKE -s -j2 "build/$name/tests" "B=build/$name" CC="$cc" QUICK="${quick:-}" \
        CFLAGS="-O1 -g1 -fno-omit-frame-pointer $flags" || return 1
    run_batches "$words" "build/$name" env LD_LIBRARY_PATH=build/fake QLORA_TEST_BRIEF=1 -- "$@"
}

# Compiled with the sign that `char` has on x86-64, where an index can be negative. Without the
# mutants: those make tests fail, and a failing test leaks.
gate_asan() {
    local flags="-fsanitize=address,undefined -fno-sanitize-recover=all -fsigned-char"
    sanitized asan "-PLAIN -KERNELS" "$flags"
    [[ -n ${CHECK_SUITES:-} || $bad -ne 0 ]] || sanitized asan KERNELS "$flags" --backend cpu
}

# What has threads, and what counts on them.
gate_tsan() {
    local quick="text_library double" # nothing there has threads
    sanitized tsan THREADS "-fsanitize=thread" --backend cpu
}

# Fixtures from transformers, PEFT and bitsandbytes: all on the CPU, and one on the fake GPU with
# the kernels of an old and a new device. One is in the repository, the others are in ../shared.
gate_golden() {
    need_file tests/golden/golden.c qlora.h
    local shared=${QLORA_SHARED:-../shared} dirs=() own=()
    while read -r d; do own+=("$(dirname "$d")"); done < <(ls -d tests/golden/*/golden.json)
    while read -r d; do dirs+=("$(dirname "$d")"); done < <(ls -d \
        "$shared"/{fixtures,experts,blocks,hybrids}/*/golden.json 2>/dev/null)
    [[ ${#own[@]} -gt 0 ]] || skip "no fixture folders"
    build build/golden build/fake/libcu{da.so.1,blas.so.13,blasLt.so.13} || return 1
    build/golden "${own[@]}" >$OUT/golden.own 2>&1 ||
        fault "$(grep -E 'FAILED|error' $OUT/golden.own)"
    # Families that the library does not support are left out in its own words.
    [[ ${#dirs[@]} -eq 0 ]] || build/golden --known "${dirs[@]}" >$OUT/golden.out 2>&1 ||
        fault "$(awk '/^[^ ]/ { d = $0 } /FAILED|error/ { print d ":" $0 }' $OUT/golden.out)"
    local cc tier
    for tier in portable neon neon_bf16 avx2 avx512 avx512_bf16 amx; do
        QLORA_CPU_TIER=$tier build/golden --backend cpu tests/golden/tiny >$OUT/golden.$tier 2>&1 ||
            grep -q 'usable here' $OUT/golden.$tier || fault "$tier: $(tail -5 $OUT/golden.$tier)"
        QLORA_CPU_TIER=$tier build/golden --backend cpu --mode bf16 tests/golden/tiny \
            tests/golden/granite4 >$OUT/golden.$tier 2>&1 ||
            grep -q 'usable here' $OUT/golden.$tier ||
            fault "$tier, bf16: $(tail -5 $OUT/golden.$tier)"
    done
    for cc in 75 90; do
        FAKECUDA_CC=$cc LD_LIBRARY_PATH=build/fake build/golden --backend cuda --mode f32 \
            tests/golden/tiny >$OUT/golden.$cc 2>&1 || fault "sm_$cc: $(tail -5 $OUT/golden.$cc)"
    done
}

# Runs each fuzzer briefly: it must build, run, and find nothing. `make soak` runs them for long.
# CHECK_FUZZERS names sources to run instead of all; "FILE:SECONDS" gives one another time.
gate_fuzz() {
    local f name seconds targets=()
    [[ $(compiler_with -fsanitize=address) == "$CLANG" ]] || skip "no clang with libFuzzer found"
    for f in ${CHECK_FUZZERS:-tests/fuzz/*.c}; do
        [[ $f != *library.c ]] || continue # all targets of a header
        name=fuzz_$(basename "${f%:*}" .c)
        targets+=("build/$name")
        seconds=5
        [[ $f != *:* ]] || seconds=${f##*:}
        mkdir -p "build/$name.corpus"
        # An input may take five seconds, as in make soak, of a machine that other gates share.
        echo "build/$name -max_total_time=$seconds -timeout=25 -artifact_prefix=build/$name." \
            "build/$name.corpus >$OUT/$name.out 2>&1 ||" \
            "{ echo $name:; tail -20 $OUT/$name.out; false; }"
    done >$OUT/commands
    build -j2 "${targets[@]}" CFLAGS=-Werror || return 1
    run_all $OUT/commands
}

# Compiles for another processor, and runs what depends on it under qemu if it is found. The
# programs are only checked for warnings: their code does not depend on the processor.
cross() {
    local machine=$1 b=build/check-$1 cc=$1-linux-gnu-gcc qemu f
    need_file qlora.h
    [[ $(uname -m) != "$machine" ]] || skip "this is the native architecture"
    need "$cc"
    for f in programs/*.c examples/*.c; do
        # shellcheck disable=SC2086
        $cc -I. -std=c99 $WARN_C -fsyntax-only "$f" || bad=1
    done
    $MAKE -s -j2 "$b/tests" "B=$b" CC="$cc" QUICK="text_library double" CFLAGS="-Werror -O1" ||
        return 1 # no suite of the two has the word ARCH
    qemu=$(command -v "qemu-$machine-static" || command -v "qemu-$machine") ||
        skip "compiled but not run: qemu-$machine not found"
    run_batches ARCH "$b" "$qemu" -L "/usr/$machine-linux-gnu" -E QLORA_TEST_BRIEF=1 \
        -- --backend cpu
}

gate_x86_64() {
    cross x86_64
}

gate_aarch64() {
    cross aarch64
}

gate_mingw() {
    need_file qlora.h
    local cc=x86_64-w64-mingw32-gcc wine
    need $cc
    $cc -I. -std=c99 $WARN_C -c -o $OUT/win_b.o tests/gates/compile/two_b.c || bad=1
    $cc -I. -std=c99 $WARN_C -DQLORA_DLL -c -o /dev/null tests/gates/compile/two_b.c || bad=1
    $cc -I. -x c++ -std=c++11 $WARN -fsyntax-only tests/gates/compile/two_b.c || bad=1
    $cc -I. -std=c99 $WARN_C -fsyntax-only tests/gates/compile/text_both.c || bad=1
    $cc -I. -std=c99 $WARN_C -DTEXT_FIRST -fsyntax-only tests/gates/compile/text_both.c || bad=1
    $cc -I. -std=c99 $WARN_C -DQLORA_DLL -fsyntax-only tests/gates/compile/text_config.c || bad=1
    $cc -I. -std=c99 -o $OUT/win.exe tests/gates/compile/two_a.c $OUT/win_b.o || bad=1
    wine_prepare
    if wine=$(wine_for $cc); then
        "$wine" $OUT/win.exe >/dev/null 2>&1 || fault "win.exe fails under wine"
    fi
}

# A Windows of the gate's own, without messages.
wine_prepare() {
    export LC_ALL=C.UTF-8 WINEPREFIX=$PWD/$OUT/prefix WINEDEBUG=-all
    export WINEDLLOVERRIDES="mscoree,mshtml="
}

# wine_for COMPILER...: prints the wine that runs the programs of this compiler. It may run none of
# another processor.
wine_for() {
    local wine
    echo 'int main(void) { return 7; }' >$OUT/probe.c
    "$@" -o $OUT/probe.exe $OUT/probe.c 2>/dev/null || return 1
    for wine in ${WINE:-wine64 wine}; do
        have "$wine" || continue
        timeout 300 "$wine" $OUT/probe.exe >/dev/null 2>&1
        [[ $? -ne 7 ]] || { echo "$wine"; return; }
    done
    return 1
}

# Runs what depends on the system under Windows' rules: files, names, locks, threads, clocks, and
# the processor's fast loops. On aarch64, set WINDOWS_CC to a compiler for it, for example
# "python3 -m ziglang cc -target aarch64-windows-gnu".
gate_wine() {
    local cc=${WINDOWS_CC:-x86_64-w64-mingw32-gcc} b=build/check-wine wine program
    need "${cc%% *}" ${WINE:+"$WINE"}
    wine_prepare
    # shellcheck disable=SC2086
    wine=$(wine_for $cc) || skip "no wine that runs the programs of $cc (set WINE, WINDOWS_CC)"
    # The C library's printf of some versions of wine takes other arguments than Windows'.
    $MAKE -s -j2 OS=Windows_NT B=$b CC="$cc" QUICK=double CFLAGS=-O1 \
        CPPFLAGS=-D__USE_MINGW_ANSI_STDIO=1 \
        $b/tests $b/hello $b/golden $b/finetune $b/generate || return 1
    for program in tests hello golden finetune generate; do
        ln -f $b/$program.exe $b/$program || return 1 # not every wine adds .exe by itself
    done
    run_batches WINDOWS $b env QLORA_TEST_BRIEF=1 "$wine" -- --backend cpu
    "$wine" $b/hello >$OUT/hello.out 2>&1 || fault "hello fails: $(tail -3 $OUT/hello.out)"
    "$wine" $b/golden tests/golden/tiny >$OUT/golden.out 2>&1 ||
        fault "golden fails: $(tail -3 $OUT/golden.out)"
    wine_finetune "$wine" $b
}

# A run that is continued, one that finds its folder in use, and the text of its model.
wine_finetune() {
    local wine=$1 b=$2 d=$OUT/run-$'\xc3\xa9' holder # a name outside ASCII
    rm -rf $OUT/run-*
    "$wine" $b/finetune --demo --steps 8 --save-every 2 --out "$d" >$OUT/first.out 2>&1 ||
        fault "finetune fails: $(tail -3 $OUT/first.out)"
    [[ -s $d/adapter/adapter_model.safetensors ]] || fault "no adapter under that name"
    grep -q ' 0 tok/s' $OUT/first.out && fault "the clock is too coarse: $(cat $OUT/first.out)"
    [[ $(find "$d/checkpoint" -type d -empty | wc -l) -eq 0 ]] || fault "empty folders are left"
    "$wine" $b/finetune --demo --steps 12 --out "$d" >$OUT/second.out 2>&1 &&
        grep -q 'resumed after step 8' $OUT/second.out ||
        fault "finetune does not resume: $(tail -3 $OUT/second.out)"
    "$wine" $b/finetune --demo --steps 100000 --out "$d.held" >$OUT/third.out 2>&1 &
    holder=$!
    for _ in {1..300}; do
        [[ -s $d.held/.finetune.lock ]] && break
        sleep 0.1
    done
    "$wine" $b/finetune --demo --steps 1 --out "$d.held" >$OUT/fourth.out 2>&1 &&
        fault "two runs in one folder"
    grep -q 'is in use by' $OUT/fourth.out || fault "no word about the lock: $(cat $OUT/fourth.out)"
    kill $holder
    wait $holder 2>/dev/null
    "$wine" $b/generate --model "$d/model" --adapter "$d/adapter" --prompt "3 and 4 is" \
        --max-tokens 4 >$OUT/generate.out 2>&1 || fault "generate: $(tail -3 $OUT/generate.out)"
}

# Another C library, linked statically; dlopen finds nothing there, so the CPU is used. `char` has
# the sign that it has on the other processors.
gate_musl() {
    need musl-gcc
    local d=$OUT/musl sign=-funsigned-char
    [[ $(uname -m) == x86_64 ]] || sign=-fsigned-char
    mkdir -p $d
    musl-gcc -I. -std=c99 $WARN_C -static -o $d/hello examples/hello.c -lm || return 1
    $d/hello >$d/hello.out 2>&1 || fault "hello fails: $(tail -3 $d/hello.out)"
    $MAKE -s -j2 build/check-musl/tests build/check-musl/tokenize B=build/check-musl CC=musl-gcc \
        OPTIMIZE=-O1 QUICK=double CFLAGS="-static $sign" || return 1
    build/check-musl/tokenize --version >$d/tokenize.out || fault "tokenize fails"
    run_batches LIBC build/check-musl env QLORA_TEST_BRIEF=1 -- --backend cpu
}

# Checks the Windows code with clang in MSVC mode and our own system headers; GNU extensions are
# errors. Unused functions are marked with an attribute that this mode does not have.
gate_msvc() {
    need_file qlora.h
    need "$CLANG"
    local flags="--target=x86_64-pc-windows-msvc -fms-compatibility -ffreestanding -nostdlibinc"
    flags="$flags -isystem tests/gates/compile/msvc -I. -fsyntax-only $WARN -Wgnu"
    flags="$flags -Wlanguage-extension-token -Wno-unused-function"
    local f
    for f in config declarations text_config text_declarations text_both; do
        echo "$CLANG -std=c99 $flags tests/gates/compile/$f.c"
        echo "$CLANG -x c++ -std=c++11 $flags tests/gates/compile/$f.c"
        echo "$CLANG -std=c99 $flags -DQLORA_DLL tests/gates/compile/$f.c"
        echo "$CLANG -std=c99 $flags -DQLORA_NO_CUDA tests/gates/compile/$f.c"
    done >$OUT/msvc.commands
    run_all $OUT/msvc.commands
}

# ---- the list, longest first, so that none runs alone at the end ----
# `make soak` also runs use_clang.

GATES="assembled asan programs aarch64 x86_64 use tsan fuzz warnings golden use_gcc mpi musl"
GATES="$GATES left_out ptx_same packaging ptx_assemble groups text_header cxx link examples"
GATES="$GATES install mingw wine shared symbols readme page recursion contract interpreter msvc"
GATES="$GATES embed layers"
GATES="$GATES sanitize ptx_fresh functions words comments abi macros text paths scripts libraries"
GATES="$GATES contents"

if [[ ${1:-} == --list ]]; then
    tr ' ' '\n' <<<"$GATES"
    exit 0
fi

# Prints the processor seconds of everything that this process has waited for; unlike those of the
# clock, they do not depend on what else the machine does.
processor_seconds() {
    times >"$OUT/times"
    awk -F'[ms ]' 'NR == 2 { printf "%d", $1 * 60 + $2 + $4 * 60 + $5 }' "$OUT/times"
}

# Prints a word if a gate took twice the processor time of its line in times.md, and over 10 s.
slower() {
    local now usual
    now=$(<"build/check/$1/seconds")
    usual=$(sed -n "s/^| $1 | [0-9]* | \([0-9]*\) |\$/\1/p" tests/gates/times.md 2>/dev/null)
    [[ -z $usual || $now -le 10 || $now -lt $((2 * usual)) ]] ||
        echo "  (more than twice the $usual s of tests/gates/times.md)"
}

# Prints the seconds of the gates that ran: the table of times.md.
times_table() {
    local gate
    printf '| gate | seconds | of the processor |\n| --- | --- | --- |\n'
    for gate in "$@"; do
        [[ ! -s build/check/$gate/clock ]] || printf '%s %s %s\n' "$gate" \
            "$(<"build/check/$gate/clock")" "$(<"build/check/$gate/seconds")"
    done | sort -k 3,3nr -k 1,1 | sed 's/\([^ ]*\) \([^ ]*\) \([^ ]*\)/| \1 | \2 | \3 |/'
}

# Runs one gate, and prints and keeps its verdict.
run_gate() {
    local gate=$1 began=$SECONDS status took word
    OUT=build/check/$gate
    mkdir -p "$OUT"
    rm -f "$OUT/verdict"
    (
        "gate_$gate" || bad=1
        exit $bad
    ) >"$OUT/log" 2>&1
    status=$?
    processor_seconds >"$OUT/seconds"
    echo $((SECONDS - began)) >"$OUT/clock"
    took=$(printf '%-13s %4d s, processor %4d s' "$gate" $((SECONDS - began)) "$(<"$OUT/seconds")")
    case $status in
    0) word=ok ;;
    "$SKIP") word=skip ;;
    *) word=FAIL ;;
    esac
    # In one piece, as another gate may print at the same time.
    case $word in
    ok) echo "ok    $took$(slower "$gate")" ;;
    skip) echo "skip  $took  $(tail -n 1 "$OUT/log")" ;;
    FAIL) printf 'FAIL  %s\n%s\n' "$took" "$(tail -40 "$OUT/log" | sed 's/^/      /')" ;;
    esac
    echo $word >"$OUT/verdict"
}

if [[ ${1:-} == --one ]]; then
    run_gate "$2"
    exit 0
fi

mkdir -p build/check/objects
find build/check/objects -type f -mtime +0 -delete
read -ra chosen <<<"${*:-$GATES}"
for gate in "${chosen[@]}"; do
    declare -F "gate_$gate" >/dev/null || { echo "check: unknown gate $gate" >&2; exit 1; }
    rm -f "build/check/$gate/"{verdict,clock}
done
# The gate `assembled` checks the committed headers; the others check newly assembled ones.
[[ " ${chosen[*]} " != *" assembled "* ]] || run_gate assembled
$MAKE -s headers || exit 1
export MAKE CLANG NVCC PTXAS
unset MAKEFLAGS MFLAGS MAKELEVEL # gates say how many jobs they start
have flock || JOBS=1
printf '%s\n' "${chosen[@]}" | grep -vx assembled |
    xargs -r -P "${JOBS:-2}" -n 1 tests/gates/check.sh --one
passed=0
failed=0
skipped=0
for gate in "${chosen[@]}"; do
    case $(cat "build/check/$gate/verdict" 2>/dev/null) in
    ok) passed=$((passed + 1)) ;;
    skip) skipped=$((skipped + 1)) ;;
    *) failed=$((failed + 1)) ;;
    esac
done
[[ ${#chosen[@]} -lt 20 ]] || times_table "${chosen[@]}" | tee build/check/times
echo "check: $passed gates passed, $failed failed, $skipped skipped, $SECONDS s"
[[ $failed -eq 0 ]]
