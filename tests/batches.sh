#!/usr/bin/env bash
# Prints the suites of suites.h in batches that can run at the same time, one batch per line, names
# separated by commas: each slow suite by itself, the slowest first, and the others by the five.
# Usage: batches.sh [WORD | -WORD]...: only suites that have these words in suites.h, or have not.
cd "$(dirname "$0")" || exit 1
# The slowest first; other slow suites follow in the order of suites.h.
first="mutant_suite step_layers_suite ahead_suite long_suite step_suite model_suite ops_suite
attention_suite faults_suite steps_suite golden_suite"
rows=$(sed -n 's/^ *X(\([a-z_0-9]*_suite\), \([A-Z ]*\)).*/\1 \2 /p' suites.h)
for word in "$@"; do
    case $word in
    -*) rows=$(grep -v " ${word#-} " <<<"$rows") ;;
    *) rows=$(grep " $word " <<<"$rows") ;;
    esac
done
for suite in $first; do
    sed -n "s/^\($suite\) .*/\1/p" <<<"$rows"
done
# shellcheck disable=SC2086
grep ' SLOW ' <<<"$rows" | cut -d ' ' -f 1 | grep -vxF "$(printf '%s\n' $first)"
grep ' SHORT ' <<<"$rows" | cut -d ' ' -f 1 | xargs -r -n 5 | tr ' ' ,
