#!/usr/bin/env bash
# Uses finetune with several processes under mpirun: the same adapter as one process, bit for bit;
# processes that are stopped, killed or hung. Needs bash and Open MPI or MPICH; creates its own
# small model. Usage: use_mpi.sh [-v]. The last line is `N passed, F failed, S skipped`.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1
B=${B:-build}
verbose=${1:-}
finetune=$PWD/$B/finetune
work=$PWD/$B/test-mpi
passed=0
failed=0
skipped=0
rm -rf "$work"
mkdir -p "$work"
cd "$work" || exit 1

check() { # check NAME COMMAND...
    local name=$1
    shift
    if "$@"; then
        passed=$((passed + 1))
        [[ $verbose == -v ]] && echo "ok    $name"
    else
        failed=$((failed + 1))
        echo "FAIL  $name"
        tail -n 12 out 2>/dev/null | sed 's/^/      /'
    fi
}

same() { # the adapter of a run is that of one process
    cmp -s "$1/adapter/adapter_model.safetensors" one/adapter/adapter_model.safetensors
}

open_mpi=
command -v mpirun.openmpi >/dev/null && open_mpi=mpirun.openmpi
[[ -z $open_mpi ]] && mpirun --version 2>/dev/null | grep -q "Open MPI" && open_mpi=mpirun
mpich=
command -v mpiexec.mpich >/dev/null && mpich=mpiexec.mpich

open_run() { # open_run N ARGUMENT...
    local n=$1
    shift
    # shellcheck disable=SC2086 # options
    $open_mpi --allow-run-as-root --oversubscribe --bind-to none -n "$n" "$finetune" $usual "$@" \
        >out 2>&1
}

# Starts a run of 3 processes in the background; $launcher is its process, $second that of rank 1.
open_start() {
    # shellcheck disable=SC2086 # options
    $open_mpi --allow-run-as-root --oversubscribe --bind-to none -n 3 "$finetune" $usual "$@" \
        >out 2>&1 &
    launcher=$!
    for ((i = 0; i < 600; i++)); do
        [[ -s long/checkpoint/latest ]] && break
        sleep 0.1
    done
    second=$(pgrep -P $launcher finetune | sed -n 2p)
}

# Waits for the launcher for at most so many seconds.
ends_within() {
    local i
    for ((i = 0; i < $1 * 10; i++)); do
        kill -0 "$launcher" 2>/dev/null || break
        sleep 0.1
    done
    if kill -0 "$launcher" 2>/dev/null; then
        kill -9 "$launcher"
        return 1
    fi
    wait "$launcher"
    return 0
}

whole() { # the last checkpoint of the run can be resumed, by one process, with the same bits
    # shellcheck disable=SC2086 # options
    "$finetune" $usual --out long --save-every 1 >out 2>&1 && same long
}

if [[ -z $open_mpi && -z $mpich ]]; then
    echo "0 passed, 0 failed, 1 skipped"
    exit 0
fi

"$finetune" --demo --steps 1 --backend cpu --out demo >out 2>&1 || cat out
awk 'BEGIN { for (i = 0; i < 400; i++) print "the number " i * 7919 % 1000 " comes after " i }' \
    >data.txt
usual="--model demo/model --data data.txt --backend cpu --threads 1 --steps 6 --accumulate 4"
usual="$usual --tokens 128 --length 64 --eval 8 --eval-every 3"
# shellcheck disable=SC2086 # options
"$finetune" $usual --out one >out 2>&1
check "one process" test -s one/adapter/adapter_model.safetensors

if [[ -n $open_mpi ]]; then
    for n in 2 4; do
        open_run $n --out open$n
        check "Open MPI, $n processes" same open$n
        check "the held-out losses of $n processes" \
            cmp -s <(grep eval_loss one/log.jsonl) <(grep eval_loss open$n/log.jsonl)
    done
    check "the log says how many ranks there are" grep -q '"ranks":4' open4/log.jsonl
    check "one process owns the folder" test ! -e open4/.finetune.lock
    open_run 2 --out open2 --no-such-option
    check "an option that does not exist, said once" \
        test "$(grep -c 'finetune: unknown option' out)" = 1
    rm -rf none
    open_run 2 --out none --data /nonexistent.txt
    check "a file that does not exist, said once" \
        test "$(grep -c '^finetune: .*nonexistent' out)" = 1
    RANK=0 WORLD_SIZE=3 open_run 2 --out none
    check "launchers that contradict each other" \
        grep -q "Open MPI says that this is process .* of 2, but torchrun says 0 of 3" out
    long="--out long --save-every 1 --steps 400"
    # shellcheck disable=SC2086 # options
    open_start $long
    kill -INT "$second"
    check "Ctrl-C on one rank ends all" ends_within 60
    check "and saves once" test "$(grep -c 'saved to long' out)" = 1
    rm -rf long
    # shellcheck disable=SC2086 # options
    open_start $long
    kill -KILL "$second"
    check "a rank that is killed ends all" ends_within 60
    "$finetune" --model demo/model --data data.txt --eval-only --backend cpu \
        --adapter "long/checkpoint/$(head -1 long/checkpoint/latest)" >out 2>&1
    check "the checkpoint is whole" grep -q "^loss" out
    rm -rf long
    # shellcheck disable=SC2086 # options
    open_start $long --rank-limit 2
    kill -STOP "$second"
    check "a rank that hangs ends all" ends_within 60
    kill -KILL "$second" 2>/dev/null
    check "and is named" grep -q "rank 1 has not answered for 2 s" out
    rm -rf long
    open_run 3 --out long --steps 6 --save-every 1 --snapshot-every 2
    rm -rf long/adapter
    check "a finished run of 3 is opened by one process" whole
else
    skipped=$((skipped + 1))
fi
if [[ -n $mpich ]]; then
    # shellcheck disable=SC2086 # options
    $mpich -n 3 "$finetune" $usual --out mpich >out 2>&1
    check "MPICH, 3 processes" same mpich
else
    skipped=$((skipped + 1))
fi
echo "$passed passed, $failed failed, $skipped skipped"
[[ $failed -eq 0 ]]
