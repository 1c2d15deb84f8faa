#!/usr/bin/env bash
# Lets every single driver call of a model's life (open, train, evaluate, read back) fail once: an
# error or the same result, no leak, and the next life as if nothing had been. `make test` tries
# some of the calls. `make soak` calls this.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1
B=${B:-build}
QLORA_TEST_SOAK=1 LD_LIBRARY_PATH=$B/fake "$B/tests" --backend fake -t driver_calls_may_fail
