#!/usr/bin/env bash
# Runs build/tests on every available backend and adds up the counts. `make test` calls it.
# The last line is `N passed, F failed, S skipped`. The status is 1 if anything failed, if nothing
# passed, or if anything was skipped while QLORA_TEST_REQUIRE_CUDA=1.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
B=${B:-build}

passed=0
failed=0
skipped=0
log=$B/tests.log
limit=${QLORA_TEST_TIMEOUT:-1800}
watch=()
if command -v timeout >/dev/null; then
    watch=(timeout "$limit")
fi

# A run that ends without its count line (a crash, the time limit) counts as one failure.
run() {
    local name=$1
    shift
    echo "== $name"
    "$@" 2>&1 | tee "$log"
    local status=${PIPESTATUS[0]}
    local line
    line=$(tail -n 1 "$log")
    if [[ $line =~ ^([0-9]+)\ passed,\ ([0-9]+)\ failed,\ ([0-9]+)\ skipped$ ]]; then
        passed=$((passed + BASH_REMATCH[1]))
        failed=$((failed + BASH_REMATCH[2]))
        skipped=$((skipped + BASH_REMATCH[3]))
        if [[ $status -ne 0 && ${BASH_REMATCH[2]} -eq 0 && ${BASH_REMATCH[1]} -ne 0 &&
            ${BASH_REMATCH[3]} -eq 0 ]]; then
            echo "$name: exit status $status after its last test"
            failed=$((failed + 1))
        fi
    else
        echo "$name: ended with status $status before printing its counts"
        failed=$((failed + 1))
    fi
}

# ${watch[@]+...}: with set -u, old shells treat an empty array as an error.
if [[ -e $B/fake/libcuda.so.1 ]]; then
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
