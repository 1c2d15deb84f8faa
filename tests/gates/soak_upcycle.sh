#!/usr/bin/env bash
# A real use of a mixture of experts: the MLP of stories260K becomes each of 8 experts
# (tests/golden/upcycle.c), of which a token uses 2, and the mixture is trained on a few stories.
#
# At first it has the loss of the dense model, since all experts are alike and their weights add up
# to 1. Training must bring it far below that, and the merged folder must have the loss and the text
# of the adapter. Part of make soak.
cd "$(dirname "$0")/../.." || exit 1
B=${B:-build}
shared=${QLORA_SHARED:-../shared}
model=$shared/models/stories260K
data=$shared/data/tinystories-sample.txt
work=$B/upcycle-work
steps=${STEPS:-200}
if [[ ! -d $model || ! -e $data ]]; then
    echo "skipped: no $model or $data"
    exit 0
fi

fail() {
    echo "FAIL $*"
    exit 1
}

# loss_of FOLDER [OPTION...]: on all stories.
loss_of() {
    "$B/finetune" --model "$1" --eval-data "$data" --eval-only --backend cpu --base 32bit \
        --length 128 "${@:2}" 2>&1 | sed -n 's/^loss \([0-9.]*\), .*/\1/p'
}

# The text that the model continues with, greedily.
text_of() {
    "$B/generate" --backend cpu --base 32bit --prompt "One day, Ben" --max-tokens 60 "$@"
}

holds() { # holds FORMULA, with the losses a and b
    awk -v a="$1" -v b="$2" "BEGIN { exit !(a > 0 && b > 0 && ($3)) }"
}

${MAKE:-make} -s B="$B" "$B/finetune" "$B/generate" "$B/merge" || exit 1
rm -rf "$work"
mkdir -p "$work/moe"
cc -std=c99 -O1 -o "$work/upcycle" tests/golden/upcycle.c &&
    "$work/upcycle" "$model/model.safetensors" "$work/moe/model.safetensors" 5 8 || exit 1
sed 's/LlamaForCausalLM/MixtralForCausalLM/; s/"llama"/"mixtral"/
    s/"hidden_act"/"num_local_experts": 8, "num_experts_per_tok": 2, "hidden_act"/' \
    "$model/config.json" >"$work/moe/config.json"
cp "$model/tok512.bin" "$work/moe"

dense=$(loss_of "$model")
start=$(loss_of "$work/moe")
echo "loss of the dense model: $dense, of the mixture: $start"
holds "$dense" "$start" "a - b < 0.0002 && b - a < 0.0002" ||
    fail "the mixture does not begin as the dense model"
"$B/finetune" --model "$work/moe" --data "$data" --backend cpu --base 32bit --length 128 \
    --steps "$steps" --lr 1e-3 --rank 8 --targets attention,experts,router --out "$work/run" \
    >"$work/log" 2>&1 || fail "finetune: $(tail -1 "$work/log")"
grep "^model: .*experts [0-9]*, router [0-9]*" "$work/log" || fail "nothing says what is trained"
end=$(loss_of "$work/moe" --adapter "$work/run/adapter")
echo "loss after $steps steps: $end"
holds "$end" "$dense" "a < 0.5 * b" || fail "the loss is not half of that of the dense model"
"$B/merge" --model "$work/moe" --adapter "$work/run/adapter" --dtype f32 --out "$work/merged" \
    >"$work/merge" 2>&1 || fail "merge: $(tail -1 "$work/merge")"
merged=$(loss_of "$work/merged")
holds "$end" "$merged" "a - b < 0.0002 && b - a < 0.0002" ||
    fail "the loss of the merged folder is $merged"
text_of --model "$work/moe" --adapter "$work/run/adapter" >"$work/text" 2>&1 || fail "generate"
text_of --model "$work/merged" >"$work/text.merged" 2>&1 || fail "generate, merged"
cmp "$work/text" "$work/text.merged" || fail "the merged folder continues with another text"
head -3 "$work/text"
rm -rf "$work"
