#!/usr/bin/env bash
# sanitize.sh - runs the suites under compute-sanitizer on a machine with an NVIDIA GPU.
#
#   tests/sanitize.sh [--tools memcheck,racecheck,initcheck] [--suites A,B] [--out DIR]
#                     [--limit SECONDS] [--each SECONDS] [--jobs N] [--apart] [--again]
#                     [--no-cublas] [--shared] [--without A,B]
#
# Every suite runs under every tool in a process of its own, with --backend cuda. The output is kept
# in DIR (build/sanitize): TOOL/SUITE.log. If --limit is reached, the script ends with status 3, and
# the same command goes on where it stopped; --again starts from the beginning, and so does a new
# build/tests. A suite that needs more than --each seconds (300) is run test by test; with --apart,
# all are. --jobs processes run at a time (1); six are about twice as fast. Tests that repeat the
# same code many times do less (QLORA_TEST_BRIEF). With --no-cublas, our own products take the place
# of cuBLAS's; DIR is then build/sanitize-alone. racecheck checks nothing but shared memory, and a
# launch that it looks at takes about 10 ms: with --shared, our kernels that use none are left out,
# so that tests of whole models end sooner. (cuBLAS's kernels fail if the tool leaves them out.)
# --without leaves out some more, such as norms, which other tests launch a thousand times.
# racecheck always leaves out qlora_decode_layers, in which half of a block has barriers of its own:
# it reports races across barriers of the whole block there (half_barrier.cu shows that).
#
# One line per suite and tool: ok, FAIL or left, then the tests and the reports. Reports in kernels
# named qlora_* are ours. racecheck's reports that name nothing but kernels of NVIDIA's libraries
# (cuBLAS: nvjet_*, cutlass*, ...; NCCL) are counted apart, with the names, and do not fail the run:
# we cannot change them. Under memcheck and initcheck they do, because the memory is ours. So does
# everything else: a report without a kernel, an unknown kernel, a failed test, a crash, a test that
# takes too long, a log without a summary. Status: 0 all clean, 1 findings, 2 cannot run, 3 not all
# of it has run.
set -uo pipefail

export QLORA_TEST_BRIEF=1
tools=memcheck,racecheck,initcheck
suites=
out=
limit=0
each=300
jobs=1
apart=
again=
alone=
only_shared=
without=
while [[ $# -gt 0 ]]; do
    case $1 in
    --tools) tools=${2:-}; shift ;;
    --suites) suites=${2:-}; shift ;;
    --out) out=${2:-}; shift ;;
    --limit) limit=${2:-}; shift ;;
    --each) each=${2:-}; shift ;;
    --jobs) jobs=${2:-}; shift ;;
    --apart) apart=1 ;;
    --again) again=1 ;;
    --no-cublas) alone=1 ;;
    --shared) only_shared=1 ;;
    --without) without=${2:-}; shift ;;
    -h | --help) sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "sanitize: unknown option $1" >&2; exit 2 ;;
    esac
    shift || { echo "sanitize: the last option needs a value" >&2; exit 2; }
done

cannot() {
    echo "sanitize: $*" >&2
    exit 2
}

B=${B:-build}
out=${out:-$B/sanitize${alone:+-alone}}
[[ -z $alone ]] || export QLORA_TEST_NO_CUBLAS=1
here=$(dirname "$0")
[[ -x $B/tests ]] || cannot "$B/tests not found: run this in the root of the repository, after" \
    "\`make $B/tests\`"
[[ -d tests/golden ]] || cannot "tests/golden not found: run this in the root of the repository"
for tool in compute-sanitizer timeout awk cksum; do
    command -v $tool >/dev/null || cannot "$tool not found"
done
[[ $limit =~ ^[0-9]+$ && $each =~ ^[1-9][0-9]*$ ]] ||
    cannot "--limit and --each are whole numbers of seconds"
[[ $jobs =~ ^[1-9][0-9]?$ ]] || cannot "--jobs is a number from 1 to 99"
for tool in ${tools//,/ }; do
    [[ $tool =~ ^(memcheck|racecheck|initcheck|synccheck)$ ]] ||
        cannot "--tools: $tool is not memcheck, racecheck, initcheck or synccheck"
done
[[ -n ${SANITIZE_NO_PROBE:-} ]] || "$B/tests" --probe-cuda ||
    cannot "no NVIDIA driver with a device found"

declared=$("$B/tests" -l --backend cuda | sed -n 's/^\* Suite \(.*\):$/\1/p')
[[ -n $declared ]] || cannot "$B/tests -l lists no suites"
for suite in ${suites//,/ }; do
    grep -qx "$suite" <<<"$declared" || cannot "--suites: $B/tests has no $suite"
done
suites=${suites:-$declared}

mkdir -p "$out" || cannot "cannot create $out"
print=$(cksum <"$B/tests")
if [[ -n $again || $(cat "$out/build" 2>/dev/null) != "$print" ]]; then
    [[ ! -e $out/build ]] || echo "sanitize: starting from the beginning"
    for tool in memcheck racecheck initcheck synccheck; do
        rm -rf "${out:?}/$tool"
    done
    echo "$print" >"$out/build"
fi

# Prints the kernels that use no shared memory.
kernels_without_shared() {
    awk '/^static const char.*qlora__ptx_words/ { table = 1; next }
         /^};/ { table = 0 }
         table { # the words that stand for something with shared memory, as tools/embed.c has them
             for (; match($0, /"[^"]*"/); $0 = substr($0, RSTART + RLENGTH)) {
                 second = sprintf("%c", 33 + (place - 6) % 94)
                 word = place < 6 ? substr("#&\047*=^", place + 1, 1) \
                                  : substr("`~", 1 + int((place - 6) / 94), 1) second
                 if (substr($0, RSTART, RLENGTH) ~ /\.shared|shared::/) {
                     words[word] = 1
                 }
                 place++
             }
             next
         }
         /^".visible .entry / {
             name = $3
             sub(/\(.*/, "", name)
             all[name] = 1
         }
         name != "" && /\.shared|shared::/ { uses[name] = 1 }
         name != "" && !(name in uses) {
             for (; match($0, /[`~].|[#&\047*=^]/); $0 = substr($0, RSTART + RLENGTH)) {
                 if (substr($0, RSTART, RLENGTH) in words) {
                     uses[name] = 1
                 }
             }
         }
         END {
             for (name in all) {
                 if (!(name in uses)) {
                     print name
                 }
             }
         }' kernels_ptx.h
}

filter=(--kernel-name-exclude kne=qlora_decode_layers) # of racecheck
if [[ -n $only_shared ]]; then
    grep -qs '^".visible .entry qlora_' kernels_ptx.h || cannot "kernels_ptx.h has no kernels"
    while read -r kernel; do
        filter+=(--kernel-name-exclude "kne=$kernel")
    done < <(kernels_without_shared)
fi
for kernel in ${without//,/ }; do
    grep -qs "^\".visible .entry $kernel(" kernels_ptx.h ||
        cannot "--without: kernels_ptx.h has no $kernel"
    filter+=(--kernel-name-exclude "kne=$kernel")
done

began=$SECONDS
started=0 # processes of this slice
[[ $limit -eq 0 || $limit -ge $each ]] || each=$limit

# The seconds that the next process may take; 0 if there are none left.
allowed() {
    local left=$((limit - (SECONDS - began)))
    if [[ $limit -eq 0 || $left -gt $each ]]; then
        echo "$each"
    else
        echo $((left > 0 ? left : 0))
    fi
}

# once TOOL SUITE [TEST]: runs it unless its verdict is known; fails if there is no time for it.
# A verdict is a file of lines "WORD VALUE": those of sanitize.awk, and those printed here.
once() {
    local tool=$1 suite=$2 name=$out/$1/$2${3:+.$3} seconds status line chosen=()
    [[ ! -e $name.verdict ]] || return 0
    seconds=$(allowed)
    [[ $seconds -gt 0 ]] || return 1
    mkdir -p "$out/$tool"
    [[ $tool != racecheck ]] || chosen=("${filter[@]}")
    # Tests make calls fail on purpose and check the results: API errors are not findings.
    timeout -k 10 "$seconds" compute-sanitizer --tool "$tool" --target-processes all \
        --report-api-errors no --print-limit 10000 "${chosen[@]}" \
        "$B/tests" --backend cuda --suites "$suite" ${3:+-e -t "$3"} >"$name.log" 2>&1
    status=$?
    if [[ ($status -eq 124 || $status -eq 137) && $seconds -lt $each && $started -gt 1 ]]; then
        return 1 # the slice ended, not the time of this suite
    fi
    {
        [[ $status -ne 124 && $status -ne 137 ]] || echo "timeout $seconds"
        line=$(grep -aE '^[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped$' "$name.log" | tail -n 1)
        read -r passed _ failed _ <<<"$line"
        if [[ -n $line ]]; then
            echo "passed $passed"
            echo "failed $failed"
        else
            echo "crash $status"
        fi
        LC_ALL=C awk -f "$here/sanitize.awk" "$name.log"
    } >"$name.partial"
    mv "$name.partial" "$name.verdict"
}

# run_all TOOL: runs the lines "SUITE [TEST]", --jobs at a time.
run_all() {
    local suite test
    while read -r suite test; do
        while [[ $(jobs -rp | wc -l) -ge $jobs ]]; do
            wait -n
        done
        started=$((started + 1))
        once "$1" "$suite" ${test:+"$test"} </dev/null &
    done
    wait
}

# tests_of TOOL SUITE: those of a suite that is run test by test; nothing for another one.
tests_of() {
    ! grep -qs '^timeout' "$out/$1/$2.verdict" ||
        "$B/tests" -l --backend cuda --suites "$2" | sed -n "s/^  /$2 /p"
}

# Runs the suites under a tool, then, test by test, those that took too long.
tool_run() {
    local tool=$1 suite
    for suite in ${suites//,/ }; do
        # What makes no CUDA calls under one tool makes none under the next.
        mkdir -p "$out/$tool"
        if [[ ! -e $out/$tool/$suite.verdict ]] &&
            grep -qs '^unused' "$out"/*/"$suite".verdict; then
            cp "$(grep -ls '^unused' "$out"/*/"$suite".verdict | head -n 1)" \
                "$out/$tool/$suite.verdict"
        fi
        [[ -z $apart || -e $out/$tool/$suite.verdict ]] ||
            echo "timeout 0" >"$out/$tool/$suite.verdict"
    done
    run_all "$tool" < <(printf '%s\n' ${suites//,/ })
    run_all "$tool" < <(for suite in ${suites//,/ }; do tests_of "$tool" "$suite"; done)
}

# Whether a suite, or all of its tests, have run.
suite_ran() {
    local suite test
    [[ -e $out/$1/$2.verdict ]] || return 1
    while read -r suite test; do
        [[ -e $out/$1/$suite.$test.verdict ]] || return 1
    done < <(tests_of "$1" "$2")
}

# The verdicts of a suite: its own, or those of its tests.
verdicts() {
    local name=$out/$1/$2
    if grep -q '^timeout' "$name.verdict"; then
        ls "$name".*.verdict 2>/dev/null || echo "$name.verdict"
    else
        echo "$name.verdict"
    fi
}

# Prints the line of a suite, and those of the kernels; the status is 1 for a finding.
suite_print() {
    local tool=$1 suite=$2 files
    mapfile -t files < <(verdicts "$tool" "$suite")
    awk -v tool="$tool" -v suite="$suite" -v log_file="$out/$tool/$suite*.log" '
        { sum[$1] += $2 }
        $1 == "timeout" { why = why ", took more than " $2 " s: " FILENAME }
        $1 == "crash" { ended++ }
        $1 == "crash" && $2 != 124 && $2 != 137 {
            why = why ", ended with status " $2 " before its last line: " FILENAME
        }
        $1 == "lost" { why = why ", " substr($0, 6) }
        $1 == "unnamed" { unnamed = substr($0, 9) }
        $1 == "summaries" && $2 == 0 { silent++ }
        $1 == "unused" { unused++ }
        $1 == "kernel" { owner[$4] = $2; count[$4] += $3 }
        END {
            bad = sum["ours"] + sum["other"] + sum["none"] + sum["failed"]
            bad += tool == "racecheck" ? 0 : sum["library"]
            if (silent > unused && why == "") {
                why = ", the tool printed no summary"
            }
            if (sum["passed"] + sum["failed"] == 0 && !unused && why == "") {
                note = ", no test of it runs on a GPU"
            } else if (unused && bad == 0 && why == "") {
                note = ", makes no CUDA calls"
            }
            word = bad > 0 || why != "" ? "FAIL" : "ok"
            printf "%-4s %-9s %-20s %d passed, %d failed; reports: %d in our kernels, %d in ",
                word, tool, suite, sum["passed"], sum["failed"], sum["ours"], sum["library"]
            printf "kernels of NVIDIA, %d in others, %d in none%s%s\n", sum["other"],
                sum["none"], why, note
            for (name in count) {
                whose = owner[name] == "other" ? "UNKNOWN" : "OURS"
                whose = owner[name] == "library" ? "NOT OURS" : whose
                printf "       %s %s, %d reports: %s\n", tool, whose, count[name], name
            }
            if (unnamed != "") {
                print "       " tool " without a kernel, such as: " unnamed
            }
            if (word != "ok") {
                print "       see " log_file
            }
            exit word != "ok"
        }' "${files[@]}"
}

findings=0
left=0
clean=0
foreign=0
for tool in ${tools//,/ }; do
    tool_run "$tool"
    for suite in ${suites//,/ }; do
        if ! suite_ran "$tool" "$suite"; then
            left=$((left + 1))
            printf 'left %-9s %s\n' "$tool" "$suite"
        elif suite_print "$tool" "$suite"; then
            clean=$((clean + 1))
        else
            findings=$((findings + 1))
        fi
        if [[ $tool == racecheck && -e $out/$tool/$suite.verdict ]]; then
            mapfile -t files < <(verdicts "$tool" "$suite")
            foreign=$((foreign + $(awk '$1 == "library" { n += $2 } END { print n + 0 }' \
                "${files[@]}")))
        fi
    done
done
[[ -z $without ]] || echo "sanitize: racecheck left out $without"
echo "sanitize: $clean clean, $findings with findings, $left left, $foreign reports of racecheck" \
    "in kernels of NVIDIA's libraries; output in $out"
[[ $findings -eq 0 ]] || exit 1
[[ $left -eq 0 ]] || exit 3
