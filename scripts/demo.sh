#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The demo in one command, on a machine without a GPU: sets up .venv once, then runs demo.py with it.
set -euo pipefail

scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if ! python=$(bash "$scripts/setup.sh"); then
    echo "demo: FAILED: the set-up did not finish, see above"
    exit 1
fi
exec "$python" "$scripts/demo.py" "$@"
