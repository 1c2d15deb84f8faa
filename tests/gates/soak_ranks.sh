#!/usr/bin/env bash
# Kills one process of a run of several with signal 9, again and again, in every phase: while they
# meet, in a step, while rank 0 saves, and in an evaluation. Each time, all processes must end
# within a limit, and the next start must resume from the last checkpoint that was saved. A
# message must name a rank.
# At the end one process continues the run, and its adapter must be that of a run that nobody
# disturbed. Under Open MPI on the CPU, and with --ranks on the fake GPU with the fake NCCL.
# KILLS=100, SEED=..., MODES="mpi ranks"; `make soak` calls it.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1
B=${B:-build}
kills=${KILLS:-100}
seed=${SEED:-$RANDOM}
modes=${MODES:-mpi ranks}
RANDOM=$seed
echo "$kills kills, seed $seed"
make -s B="$B" "$B/finetune" "$B/fake/libcuda.so.1" "$B/fake/libcublas.so.13" \
    "$B/fake/libcublasLt.so.13" "$B/fake/libnccl.so.2" || exit 1
finetune=$PWD/$B/finetune
fakes=$PWD/$B/fake
work=$(mktemp -d "$PWD/$B/soak_ranks.XXXXXX") || exit 1
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1
export TMPDIR=$work

fail() {
    echo "FAILED, $mode, kill $count ($phase): $1"
    tail -n 30 out
    tail -n 3 run/log.jsonl
    cp -r "$work" "$work.failed"
    exit 1
}

command_of() { # command_of MODE: fills `start`
    case $1 in
    mpi)
        start=("$open_mpi" --allow-run-as-root --oversubscribe --bind-to none -n 3 "$finetune")
        usual=(--backend cpu --threads 1 --accumulate 4 --tokens 128 --length 64 --eval 60)
        world=3
        ;;
    ranks)
        start=(env "LD_LIBRARY_PATH=$fakes" CUDA_VISIBLE_DEVICES=0 FAKENCCL_WAITS=25000
            "$finetune" --ranks 2)
        usual=(--mode f32 --accumulate 2 --tokens 32 --length 32 --rank 2 --threads 1 --eval 4)
        world=2
        ;;
    esac
    usual+=(--model demo/model --data data.txt --eval-every 2 --save-every 1)
    usual+=(--schedule constant --warmup 0 --rank-limit 15)
}

# The processes of the run: the children of the launcher, or of the process that `env` became.
ranks_of() { pgrep -P "$launcher" finetune; }

# Waits until a phase has begun, or the run has ended. A little later may be the next phase: what
# counts is where the run was when it was killed, which `phase_now` finds out.
phase_await() {
    local i
    for ((i = 0; i < 4000; i++)); do
        case $1 in
        meeting) [[ $(ranks_of | wc -l) -eq $world ]] && return ;;
        step) grep -q "^ready" out && return ;;
        saving) grep -q "^ready" out && [[ -e run/checkpoint/pending ]] && return ;;
        evaluation) [[ $(phase_now) == evaluation ]] && return ;;
        esac
        kill -0 "$launcher" 2>/dev/null || return
        sleep 0.002
    done
}

phase_now() {
    local last
    if ! grep -q "^ready" out; then
        echo meeting
        return
    fi
    last=$(tail -n 1 run/log.jsonl 2>/dev/null)
    if [[ -e run/checkpoint/pending ]]; then
        echo saving
    elif [[ $last == *'"loss"'* && $last =~ \"step\":([0-9]+) ]] &&
        ((BASH_REMATCH[1] % 2 == 0)); then
        echo evaluation
    else
        echo step
    fi
}

ends_within() { # ends_within SECONDS: the launcher and all its processes
    local i left state
    for ((i = 0; i < $1 * 20; i++)); do
        left=0
        for id in $launcher $ids; do
            state=$(cut -d' ' -f3 "/proc/$id/stat" 2>/dev/null)
            [[ -n $state && $state != Z ]] && left=1
        done
        ((left == 0)) && return 0
        sleep 0.05
    done
    # shellcheck disable=SC2086 # a list
    kill -9 $launcher $ids 2>/dev/null
    return 1
}

open_mpi=
command -v mpirun.openmpi >/dev/null && open_mpi=mpirun.openmpi
[[ -z $open_mpi ]] && mpirun --version 2>/dev/null | grep -q "Open MPI" && open_mpi=mpirun
[[ -z $open_mpi && $modes == *mpi* ]] && echo "no Open MPI: only --ranks" && modes=ranks

"$finetune" --demo --steps 1 --backend cpu --out demo >out 2>&1 || exit 1
awk 'BEGIN { for (i = 0; i < 400; i++) print "number " i * 7919 % 1000 }' >data.txt
phases=(meeting step saving evaluation)
each=$((kills / $(wc -w <<<"$modes")))
for mode in $modes; do
    command_of "$mode"
    declare -A seen=([meeting]=0 [step]=0 [saving]=0 [evaluation]=0)
    rm -rf run one
    want=0 # the step of the last checkpoint
    resumed=0
    for ((count = 0; count < each; count++)); do
        phase=${phases[count % 4]}
        : >out # before the run does it, which is later: the last one's text would be taken for its
        "${start[@]}" "${usual[@]}" --out run --steps 100000 >out 2>&1 &
        launcher=$!
        phase_await "$phase"
        delay=$((RANDOM % 60)) # not in a subshell, which would seed RANDOM again
        [[ $phase == saving || $phase == evaluation ]] && delay=$((delay / 20))
        sleep "0.$(printf '%03d' "$delay")"
        ids=$(ranks_of | tr '\n' ' ')
        # shellcheck disable=SC2086,SC2206 # a list
        list=($ids)
        ((${#list[@]} > 0)) || fail "it ended before it was killed"
        kill -9 "${list[RANDOM % ${#list[@]}]}"
        phase=$(phase_now)
        seen[$phase]=$((seen[$phase] + 1))
        ends_within 60 || fail "a process was left after a minute"
        wait "$launcher" 2>/dev/null && fail "the launcher says that all is well"
        at=$(sed -n 's/^resumed after step \([0-9]*\) .*/\1/p' out)
        if [[ -n $at ]]; then
            ((at == want)) || fail "step $want was saved, but it resumed after step $at"
            ((at > 0)) && resumed=$((resumed + 1))
        elif grep -q "^ready" out; then
            ((want == 0)) || fail "step $want was saved, but it started over"
        fi
        if [[ $(head -n 1 run/checkpoint/latest 2>/dev/null) =~ step-([0-9]+) ]]; then
            want=${BASH_REMATCH[1]}
        fi
        grep -qE "rank [0-9]+ (with PID|was ended)|finetune: rank [0-9]" out ||
            fail "no rank is named"
        grep -qE "cannot read|damaged|is not valid JSON" out && fail "a file was damaged"
    done
    ((resumed > 0)) || fail "no run got far enough to resume"
    for phase in "${phases[@]}"; do
        ((each < 40 || seen[$phase] > 0)) || fail "no kill hit this phase"
    done
    # One process goes on, another world than before.
    end=$((want + 3))
    alone=()
    [[ $mode == ranks ]] && alone=(env "LD_LIBRARY_PATH=$fakes")
    "${alone[@]}" "$finetune" "${usual[@]}" --out run --steps $end --extend >out 2>&1 ||
        fail "one process cannot continue"
    "${alone[@]}" "$finetune" "${usual[@]}" --out one --steps $end >out 2>&1 || fail "alone"
    cmp run/adapter/adapter_model.safetensors one/adapter/adapter_model.safetensors ||
        fail "step $end: the adapter differs from that of an undisturbed run"
    echo "$mode: $each kills (${seen[meeting]} while they met, ${seen[step]} in a step," \
        "${seen[saving]} while saving, ${seen[evaluation]} in an evaluation), $resumed resumed," \
        "step $end bit-identical: ok"
done
