#!/usr/bin/env bash
# Prints the registers, shared memory, stack and spills of every kernel, as reported by ptxas.
# `make ptx-report` calls it.
# Usage: tools/ptx_report.sh [sm_NN...]   (default: sm_75 where supported, sm_80, sm_90)
set -euo pipefail
cd "$(dirname "$0")/.."
B=${B:-build}
PTXAS=${PTXAS:-ptxas}
targets=${*:-sm_75 sm_80 sm_90}

command -v "$PTXAS" >/dev/null || { echo "ptx_report: $PTXAS not found" >&2; exit 1; }
printf '%-44s %-7s %9s %9s %7s %7s\n' kernel target registers shared stack spills
for module in $("$B/ptx-tool" --list | awk '{ print $1 }' | sort -u); do
    for target in $targets; do
        "$B/ptx-tool" --emit "$module" "$target" >"$B/report.ptx" 2>/dev/null || continue
        "$PTXAS" -v -arch="$target" -o /dev/null "$B/report.ptx" 2>&1 | awk -v target="$target" '
            /Compiling entry function/ { split($0, part, "\047"); kernel = part[2] }
            /bytes stack frame/ {
                stack = $1; spills = 0
                for (i = 1; i < NF; i++) if ($(i + 2) == "spill") spills += $i
            }
            /Used [0-9]+ registers/ {
                shared = 0
                if (match($0, /[0-9]+ bytes smem/)) shared = substr($0, RSTART) + 0
                registers = $0; sub(/.*Used /, "", registers)
                printf "%-44s %-7s %9d %9d %7d %7d%s\n", kernel, target, registers + 0, shared,
                    stack, spills, (spills > 0 ? "  <- spills" : "")
            }'
    done
done
