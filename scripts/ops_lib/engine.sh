# shellcheck shell=bash
# SPDX-License-Identifier: Apache-2.0
# Messages, and which container engine there is, for build_image.sh and verify_image.sh; to be sourced where `step`
# says which of them it is.

say() { echo "${step:?}: $*" >&2; }
fail() {
    say "FAILED: $*"
    exit 1
}
value_of() { if [ $# -lt 2 ] || [ -z "$2" ]; then fail "$1 needs a value"; fi; }

# shellcheck disable=SC2034  # read by those that source this
no_engine="no container engine works here: install docker or podman, or buildah, which needs no daemon; \
or name one with --engine"

# The first engine that works; a docker whose daemon is not there does not.
find_engine() {
    local candidate
    for candidate in docker podman; do
        if command -v "$candidate" >/dev/null && "$candidate" info >/dev/null 2>&1; then
            echo "$candidate"
            return
        fi
    done
    command -v buildah >/dev/null && echo buildah
}
