#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Starts a server with the flags that one way of decoding needs on one kind of GPU.
#
#   bash scripts/serve.sh PROFILE [--docker [--image IMAGE]] [--target MODEL[@REVISION]] [--draft ...] [--print]
#
# Profiles: ar, mtp, dflash, dflash2, dspark, dflash_tfm, long. --help lists the options; --print shows the
# command and runs nothing. The flags and their reasons are in scripts/ops_lib/profiles.py.
set -euo pipefail
exec python3 "$(dirname "${BASH_SOURCE[0]}")/ops_lib/serve.py" "$@"
