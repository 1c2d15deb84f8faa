#!/usr/bin/env bash
# Prints the suites of suites.h in batches that can run at the same time, one batch per line, names
# separated by commas: each slow suite by itself, the slowest first, and the others by the five.
# Arguments are suites to leave out.
cd "$(dirname "$0")" || exit 1
slow="model_suite faults_suite attention_suite mutant_suite ops_suite golden_suite steps_suite"
slow="$slow generate_suite gradient_suite gemm_suite adapter_suite jobs_suite long_suite"
slow="$slow fp8_base_suite paging_suite labelled_suite ahead_suite texts_suite methods_suite"
slow="$slow comm_suite step_layers_suite kept_suite bf16_suite"
all=$(sed -n 's/.*X(\([a-z_0-9]*_suite\)).*/\1/p' suites.h |
    grep -vxF "$(printf '%s\n' "$@")")
for suite in $slow; do
    grep -x "$suite" <<<"$all"
done
# shellcheck disable=SC2086
grep -vxF "$(printf '%s\n' $slow)" <<<"$all" | xargs -n 5 | tr ' ' ,
