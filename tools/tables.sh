#!/usr/bin/env bash
# tables.sh - writes the tables of docs/speed.md, which are the rows of docs/speed.csv, and those of
# docs/models.md, which are rows of src/arch.h. Usage: tools/tables.sh [--check]
# With --check, nothing is written; the status is 1 if a table is not what it would write.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
status=0
for page in docs/speed.md docs/models.md; do
    if ! text=$(awk -f tools/tables.awk docs/speed.csv src/arch.h $page); then
        echo "$page: its tables cannot be made"
        status=1
    elif [[ ${1:-} != --check ]]; then
        printf '%s\n' "$text" >$page
    elif ! diff $page - <<<"$text"; then
        echo "$page (<) is not what tools/tables.sh writes (>)"
        status=1
    fi
done
exit $status
