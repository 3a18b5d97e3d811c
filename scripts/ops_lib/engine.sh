# shellcheck shell=bash
# SPDX-License-Identifier: Apache-2.0
# Which container engine there is, for build_image.sh and verify_image.sh; to be sourced.

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
