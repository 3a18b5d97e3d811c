#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the image of Dockerfile.overlay from this checkout and verifies it.
#
#   bash scripts/build_image.sh [--base IMAGE[@sha256:...]] [--tag NAME] [--require-arch SM|none]
#                               [--engine docker|podman|buildah] [--print] [--no-verify]
#
# Exit status 0 only if the image was built, its audit passed and it was verified.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
step=image
# shellcheck source=scripts/ops_lib/engine.sh
source "$root/scripts/ops_lib/engine.sh"
context=""
trap '[ -z "$context" ] || rm -rf "$context"' EXIT

base=$(sed -n 's/^ARG BASE=//p' "$root/Dockerfile.overlay" | head -n 1)
tag=""
arch=$(sed -n 's/^ARG REQUIRED_ARCH=//p' "$root/Dockerfile.overlay")
engine=${ENGINE:-}
only_print=""
verify=yes
while [ $# -gt 0 ]; do
    case $1 in
    --base | --tag | --require-arch | --engine) value_of "$@" ;;
    esac
    case $1 in
    --base) base=$2 && shift 2 ;;
    --tag) tag=$2 && shift 2 ;;
    --require-arch) arch=$2 && shift 2 ;;
    --engine) engine=$2 && shift 2 ;;
    --print) only_print=yes && shift ;;
    --no-verify) verify="" && shift ;;
    *) fail "unknown argument '$1'; see the head of scripts/build_image.sh" ;;
    esac
done
case $arch in
none) arch="" ;;
sm_[0-9][0-9] | sm_[0-9][0-9][0-9]) ;;
*) fail "--require-arch '$arch' must look like sm_120, or be none" ;;
esac

version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' "$root/vllm_weaver/__init__.py")
[ -n "$version" ] || fail "vllm_weaver/__init__.py names no version"
tag=${tag:-vllm-weaver:$version}
commit=$(git -C "$root" rev-parse HEAD 2>/dev/null) || fail "the label needs a commit: build from a git checkout"
parts=(pyproject.toml README.md LICENSE vllm_weaver Dockerfile.overlay)
[ -z "$(git -C "$root" status --porcelain -- "${parts[@]}")" ] || commit+="+changes"
case $commit in
*+changes) say "there are changes that are not committed; the label says so" ;;
esac

[ -n "$engine" ] || engine=$(find_engine) || fail "$no_engine"
arguments=(--build-arg "BASE=$base" --build-arg "VERSION=$version" --build-arg "COMMIT=$commit"
    --build-arg "REQUIRED_ARCH=$arch" -t "$tag")
case $engine in
docker | podman) command=("$engine" build) ;;
buildah) command=(buildah bud) ;;
*) fail "engine '$engine' must be docker, podman or buildah" ;;
esac
if [ -n "$only_print" ]; then
    printf '%q ' "${command[@]}" -f Dockerfile.overlay "${arguments[@]}" . && echo
    exit
fi
[ -n "$arch" ] || say "that the base has code for a GPU is not required"

# A context of its own: what is copied is what is listed above, whatever else lies in the checkout.
context=$(mktemp -d)
for part in "${parts[@]}"; do
    cp -R "$root/$part" "$context/"
done
find "$context" -name __pycache__ -prune -exec rm -r {} +
"${command[@]}" -f "$context/Dockerfile.overlay" "${arguments[@]}" "$context" >&2 ||
    fail "$engine did not build $tag on $base; its audit's findings, if any, are above"
say "built $tag on $base"
[ -z "$verify" ] || bash "$root/scripts/verify_image.sh" "$tag" --engine "$engine" --commit "$commit"
