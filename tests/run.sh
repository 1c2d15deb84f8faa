#!/usr/bin/env bash
# Runs build/tests on every available backend and adds up the counts. `make test` calls it.
# On the fake GPU, tests that run the same code again and again are brief; FULL=1 runs all of them.
# The last line is `N passed, F failed, S skipped`. The status is 1 if anything failed, if nothing
# passed, or if anything was skipped while QLORA_TEST_REQUIRE_CUDA=1.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
export B=${B:-build}

limit=${QLORA_TEST_TIMEOUT:-1800}
watch=()
if command -v timeout >/dev/null; then
    watch=(timeout "$limit")
fi

# --batch SUITES: one process of the run with the fake GPU; used below.
if [[ ${1:-} == --batch ]]; then
    log=$B/tests.${2%%,*}
    [[ -n ${FULL:-} ]] || export QLORA_TEST_BRIEF=1
    LD_LIBRARY_PATH="$B/fake${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" \
        ${watch[@]+"${watch[@]}"} $B/tests --suites "$2" >"$log.log" 2>&1
    echo $? >"$log.status"
    times >"$log.times" # of what this process has waited for, in the second line
    cat "$log.log"
    awk -F'[ms ]' -v suites="$2" \
        'NR == 2 { n = $1 * 60 + $2 + $4 * 60 + $5
            printf "(%s: %d s of the processor)\n", suites, n }' \
        "$log.times"
    exit 0
fi

passed=0
failed=0
skipped=0

# count NAME STATUS LOG: adds up the counts in the last line. A run that ends without them (a crash,
# the time limit) counts as one failure. A status of 1 without a failure is a run in which no test
# passed, or one was skipped that must not be.
count() {
    local name=$1 status=$2 line
    line=$(tail -n 1 "$3")
    if [[ $line =~ ^([0-9]+)\ passed,\ ([0-9]+)\ failed,\ ([0-9]+)\ skipped$ ]]; then
        passed=$((passed + BASH_REMATCH[1]))
        failed=$((failed + BASH_REMATCH[2]))
        skipped=$((skipped + BASH_REMATCH[3]))
        if [[ $status != [01] || ($status -eq 1 && ${BASH_REMATCH[2]} -eq 0 &&
            ${BASH_REMATCH[1]} -ne 0 && ${BASH_REMATCH[3]} -eq 0) ]]; then
            echo "$name: exit status $status after its last test"
            failed=$((failed + 1))
        fi
    else
        echo "$name: ended with status $status before printing its counts"
        failed=$((failed + 1))
    fi
}

run() {
    local name=$1
    shift
    echo "== $name"
    "$@" 2>&1 | tee "$B/tests.log"
    count "$name" "${PIPESTATUS[0]}" "$B/tests.log"
}

# Every suite, in batches, two at a time; a batch prints when it has ended.
run_batches() {
    local name=$1 suites log
    echo "== $name"
    rm -f "$B"/tests.*_suite.{log,status,times}
    tests/batches.sh | xargs -P 2 -n 1 "$BASH" tests/run.sh --batch
    for suites in $(tests/batches.sh); do
        log=$B/tests.${suites%%,*}
        touch "$log.log"
        count "${suites%%,*}" "$(cat "$log.status" 2>/dev/null)" "$log.log"
    done
}

# ${watch[@]+...}: with set -u, old shells treat an empty array as an error.
if [[ -e $B/fake/libcuda.so.1 && $# -eq 0 ]]; then
    run_batches "CPU and fake GPU"
elif [[ -e $B/fake/libcuda.so.1 ]]; then
    run "CPU and fake GPU" env LD_LIBRARY_PATH="$B/fake${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" \
        ${watch[@]+"${watch[@]}"} $B/tests "$@"
else
    run "CPU" ${watch[@]+"${watch[@]}"} $B/tests --backend cpu "$@"
fi
if $B/tests --probe-cuda; then
    run "GPU" ${watch[@]+"${watch[@]}"} $B/tests --backend cuda "$@"
else
    echo "no NVIDIA driver with a device found: the real GPU was not tested"
    if [[ ${QLORA_TEST_REQUIRE_CUDA:-0} == 1 ]]; then
        skipped=$((skipped + 1))
    fi
fi

echo
echo "$passed passed, $failed failed, $skipped skipped"
[[ $failed -eq 0 && $passed -gt 0 && (${QLORA_TEST_REQUIRE_CUDA:-0} != 1 || $skipped -eq 0) ]]
