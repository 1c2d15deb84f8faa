#!/usr/bin/env bash
# Uses finetune with several processes under mpirun: the same adapter as one process, bit for bit;
# processes that are stopped, killed or hung. Needs bash and Open MPI or MPICH; creates its own
# small model. Usage: use_mpi.sh [-v]. The last line is `N passed, F failed, S skipped`.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1
B=${B:-build}
root=$PWD
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
        kill -0 $launcher 2>/dev/null || break
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
usual="$usual --mode f32" # what several processes compute in; one may choose bf16
# shellcheck disable=SC2086 # options
"$finetune" $usual --out one >out 2>&1
check "one process" test -s one/adapter/adapter_model.safetensors

# DPO and KTO: the texts are divided between the processes, and the numbers are the same.
preferences() {
    local method
    awk 'BEGIN { for (i = 0; i < 60; i++)
        printf "{\"prompt\": \"is %d even?\", \"chosen\": \" %s\", \"rejected\": \" perhaps\"}\n",
            i * 7, i % 2 ? "no, it is odd" : "yes" }' >dpo.jsonl
    awk 'BEGIN { for (i = 0; i < 60; i++)
        printf "{\"prompt\": \"is %d even?\", \"completion\": \" %s\", \"label\": %s}\n",
            i * 7, i % 3 ? "no, it is odd" : "yes", i % 2 ? "true" : "false" }' >kto.jsonl
    for method in dpo kto; do
        local these="--method $method --steps 4 --eval 20 --eval-every 2"
        local before="--reference precompute"
        usual=${usual/data.txt/$method.jsonl}
        # shellcheck disable=SC2086 # options
        "$finetune" $usual $these $before --out $method-one >out 2>&1
        # shellcheck disable=SC2086 # options
        open_run 3 $these $before --out $method-three
        usual=${usual/$method.jsonl/data.txt}
        check "$method, 3 processes" cmp -s $method-one/adapter/adapter_model.safetensors \
            $method-three/adapter/adapter_model.safetensors
        check "$method, the held-out losses" \
            test "$(grep -c eval_accuracy $method-one/log.jsonl)" = 3
        check "$method, the same" cmp -s <(grep eval_accuracy $method-one/log.jsonl) \
            <(grep eval_accuracy $method-three/log.jsonl)
        check "$method, the log-probabilities by the base" \
            cmp -s $method-one/references.bin $method-three/references.bin
    done
}

# Every call of MPI fails once, in one of three ranks: all of them end, and the call is named.
faults() {
    local library call
    library=$(ldconfig -p 2>/dev/null | sed -n 's/.*libmpi\.so\.40 .*=> //p' | head -1)
    if [[ -z $library ]] || ! cc -shared -fPIC -o libmpi_faults.so \
        "$root/tests/gates/mpi_faults.c" -Wl,--no-as-needed "$library" -ldl; then
        skipped=$((skipped + 1))
        return
    fi
    export QLORA_MPI_LIBRARY=$PWD/libmpi_faults.so
    for call in Initialized:1 Init_thread:1 Comm_set_errhandler:1 Comm_rank:1 Comm_size:1 Irecv:1 \
        Isend:1 Test:1 Irecv:40 Isend:40 Test:200; do
        rm -rf fault
        MPI_FAULT=$call:1 open_start --out fault --rank-limit 20
        check "MPI_$call fails in rank 1: all end" ends_within 60
        check "MPI_$call is named" grep -q "MPI_${call%:*} failed" out
    done
    rm -rf fault
    MPI_FAULT=none:1:1 open_run 3 --out fault
    check "the same library without a fault" same fault
    unset QLORA_MPI_LIBRARY
}

# Makes the first value of the final norm so large that gradients are not finite.
norm_enlarge() {
    local header at
    header=$(od -An -tu8 -N8 "$1" | tr -d ' ')
    at=$(head -c $((header + 8)) "$1" | tail -c "$header" | tr '{' '\n' |
        sed -n '/"model.norm.weight"/{n;p}' |
        sed 's/.*"data_offsets": *\[ *\([0-9]*\).*/\1/')
    printf '\346\261\141\177' | dd of="$1" bs=1 seek=$((header + 8 + at)) conv=notrunc 2>/dev/null
}

# --rank-limit is no limit for the disk of rank 0.
slow_disk() {
    if ! cc -shared -fPIC -o slow_disk.so "$root/tests/gates/slow_disk.c" -ldl; then
        skipped=$((skipped + 1))
        return
    fi
    LD_PRELOAD=$PWD/slow_disk.so open_run 2 --out slow --save-every 2 --rank-limit 1
    check "a slow disk" same slow
    # Ten gradients that are not finite end the run; what rank 0 then saves is not cut off.
    cp -r demo/model huge
    norm_enlarge huge/model.safetensors
    usual=${usual/demo\/model/huge}
    LD_PRELOAD=$PWD/slow_disk.so open_run 2 --out spoilt --steps 40 --save-every 1000
    usual=${usual/huge/demo\/model}
    check "gradients that are not finite, said once" \
        test "$(grep -c 'ten consecutive non-finite gradients' out)" = 1
    check "the steps before them are saved" \
        test -s spoilt/adapter/adapter_model.safetensors -a -s spoilt/checkpoint/latest
    check "and nothing is left over" \
        test ! -e spoilt/.finetune.lock -a ! -e spoilt/checkpoint/pending
}

# A failure that does not stop the training is no reason to end the other ranks by force.
borne() {
    open_run 2 --out borne --steps 3
    : >borne/snapshots
    open_run 2 --out borne --steps 7 --snapshot-every 5
    check "snapshots that cannot be saved" grep -q "finetune: .*borne/snapshots" out
    check "all ranks end by themselves" test "$(grep -c MPI_ABORT out)" = 0
    check "and the steps are saved" grep -q "step-7" borne/checkpoint/latest
}

# Samples are not counted either, and rank 0 itself waits no longer than --rank-limit.
waits() {
    local library i
    local prompts=()
    for ((i = 0; i < 32; i++)); do
        prompts+=(--sample-prompt "the number $i")
    done
    open_run 2 --out sampled --rank-limit 1 --steps 1 --length 900 --tokens 900 \
        --rope-scale linear:4 --sample-tokens 880 "${prompts[@]}"
    check "samples that take longer than --rank-limit" grep -q step-1 sampled/checkpoint/latest
    library=$(ldconfig -p 2>/dev/null | sed -n 's/.*libmpi\.so\.40 .*=> //p' | head -1)
    if [[ -z $library ]] || ! cc -shared -fPIC -o libmpi_hang.so \
        "$root/tests/gates/mpi_hang.c" -Wl,--no-as-needed "$library" -ldl; then
        skipped=$((skipped + 1))
        return
    fi
    rm -rf long
    # shellcheck disable=SC2086 # options
    QLORA_MPI_LIBRARY=$PWD/libmpi_hang.so $open_mpi --allow-run-as-root --oversubscribe \
        --bind-to none -n 3 "$finetune" $usual --out long --save-every 1 --rank-limit 2 \
        >out 2>&1 &
    launcher=$!
    check "a rank that hangs while the others wait for rank 0" ends_within 60
    check "is named by rank 0" grep -q "rank 1 has not answered for 2 s" out
    rm -rf long
}

if [[ -n $open_mpi ]]; then
    preferences
    faults
    slow_disk
    borne
    waits
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
