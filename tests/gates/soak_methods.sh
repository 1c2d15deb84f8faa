#!/usr/bin/env bash
# The golden folders of training methods: all of them on the CPU, but for methods that the library
# does not have (its message is printed); some on the fake GPU, which takes minutes for each. Part
# of make soak.
cd "$(dirname "$0")/../.." || exit 1
B=${B:-build}
methods=${QLORA_SHARED:-../shared}/methods
if [[ ! -d $methods ]]; then
    echo "skipped: no $methods"
    exit 0
fi
${MAKE:-make} -s B="$B" "$B/golden" "$B/fake/libcuda.so.1" "$B/fake/libcublas.so.13" || exit 1
folders=()
for folder in "$methods"/*/golden.json; do
    folders+=("${folder%/golden.json}")
done
"$B/golden" --known "${folders[@]}" | grep -v " ok$"
[[ ${PIPESTATUS[0]} -eq 0 ]] || exit 1
for name in kto dpo-sft dora trained-tokens modules-to-save-tied; do
    LD_LIBRARY_PATH=$B/fake "$B/golden" --backend cuda "$methods/$name" | grep -v " ok$"
    [[ ${PIPESTATUS[0]} -eq 0 ]] || exit 1
done
LD_LIBRARY_PATH=$B/fake "$B/golden" --backend cuda --mode bf16 "$methods/dora" "$methods/dpo" \
    "$methods/modules-to-save-untied" | grep -v " ok$"
[[ ${PIPESTATUS[0]} -eq 0 ]]
