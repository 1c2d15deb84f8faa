#!/usr/bin/env bash
# Repeatedly kills a training run that saves after every step, at random moments, and restarts it:
# every start must resume, never from an earlier step than the one before, and the final result must
# be bit-identical to that of an undisturbed run. KILLS=100, SEED=... ; `make soak` calls it.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1
B=${B:-build}
kills=${KILLS:-100}
seed=${SEED:-$RANDOM}
RANDOM=$seed
echo "$kills kills, seed $seed"

if ! make -s B="$B" "$B/soak_kill"; then
    echo "soak_kill does not build"
    exit 1
fi
work=$(mktemp -d "$B/soak_kill.XXXXXX") || exit 1
trap 'rm -rf "$work"' EXIT

fail() {
    echo "FAILED after $done_kills kills: $1"
    cat "$work/out"
    exit 1
}

last=0
resumed=0
in_save=0
for ((done_kills = 0; done_kills < kills; done_kills++)); do
    "$B/soak_kill" "$work/run" 1000000 >"$work/out" 2>&1 &
    child=$!
    # 20 to 400 ms: before the first step, between steps, in the middle of a save
    delay=$((20 + RANDOM % 380)) # not in a subshell, which would seed RANDOM again
    sleep "0.$(printf '%03d' $delay)"
    kill -9 "$child" 2>/dev/null || fail "it ended before it was killed"
    wait "$child" 2>/dev/null
    if grep -q FAILED "$work/out"; then
        fail "it failed to resume"
    fi
    at=$(sed -n 's/^resumed at //p' "$work/out")
    if [[ -n $at ]]; then # otherwise it was killed before it could print this
        ((at >= last)) || fail "it fell back from step $last to $at"
        ((at > 0)) && resumed=$((resumed + 1))
        last=$at
    fi
    [[ -e $work/run/pending ]] && in_save=$((in_save + 1))
done
((resumed > 0)) || fail "no run got far enough to resume"

# Continues to a step that both runs reach. Leftovers of killed saves must be gone.
end=$((last + 200))
got=$("$B/soak_kill" "$work/run" "$end" 2>&1 | sed -n 's/^hash //p')
want=$("$B/soak_kill" "$work/none" "$end" nosave 2>&1 | sed -n 's/^hash //p')
[[ -n $want && $got == "$want" ]] || fail "step $end: hash $got; an undisturbed run has $want"
folders=$(find "$work/run" -mindepth 1 -maxdepth 1 -name 'step-*' | wc -l)
((folders == 2)) || fail "$folders checkpoint folders are left; expected 2"
echo "$kills kills ($in_save during a save), $resumed resumed, step $end bit-identical: ok"
