#!/usr/bin/env bash
# Makes every driver call in a model's life (open, train, evaluate, read back) fail once. Each time,
# there must be an error or the same result, no leak, and no effect on the next model. `make test`
# tries some of the calls. `make soak` calls this.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1
B=${B:-build}
QLORA_TEST_SOAK=1 LD_LIBRARY_PATH=$B/fake "$B/tests" --backend fake -t driver_calls_may_fail
