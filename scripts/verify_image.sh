#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Verifies an image of Dockerfile.overlay: the audit once more, its labels and entry point, and, on request, that
# it generates text rightly.
#
#   bash scripts/verify_image.sh IMAGE [--engine docker|podman|buildah] [--commit HASH] [--gpu | --cpu]
#
# --gpu: with the machine's GPUs (docker, podman), --cpu: in Triton's interpreter, for an image with the CPU build
# of vLLM. Either runs the whole doctor and decodes the checkout's demo models with and without trees: the texts
# must be the same. Without either, nothing is run on a device, and the last line says so.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
step=verify
# shellcheck source=scripts/ops_lib/engine.sh
source "$root/scripts/ops_lib/engine.sh"
container=""
trap '[ -z "$container" ] || buildah rm "$container" >/dev/null' EXIT

image=""
engine=${ENGINE:-}
commit=""
device=""
while [ $# -gt 0 ]; do
    case $1 in
    --engine | --commit)
        value_of "$@"
        declare "${1#--}=$2" && shift 2
        ;;
    --gpu | --cpu) device=${1#--} && shift ;;
    -*) fail "unknown argument '$1'; see the head of scripts/verify_image.sh" ;;
    *)
        [ -z "$image" ] || fail "one image at a time, not '$image' and '$1'"
        image=$1 && shift
        ;;
    esac
done
[ -n "$image" ] || fail "name an image: bash scripts/verify_image.sh IMAGE"
[ -n "$engine" ] || engine=$(find_engine) || fail "$no_engine"
case $engine in
docker | podman) "$engine" image inspect "$image" >/dev/null 2>&1 || fail "$engine has no image $image" ;;
buildah)
    [ "$device" != gpu ] || fail "buildah gives a container no GPU; use --engine docker or podman"
    container=$(buildah from --pull-never "$image" 2>/dev/null) || fail "buildah has no image $image"
    ;;
*) fail "engine '$engine' must be docker, podman or buildah" ;;
esac

# A Python of the image, with the checkout's demo models and its probe to read.
in_image() {
    local gpus=()
    [ "$device" != gpu ] || gpus=(--gpus all)
    if [ "$engine" = buildah ]; then
        buildah run -v "$root/scripts:/demo:ro" "$container" -- python3 "$@"
    else
        "$engine" run --rm "${gpus[@]}" -v "$root/scripts:/demo:ro" --entrypoint python3 "$image" "$@"
    fi
}
# A field of the image's configuration, as a Go template names it.
field() {
    if [ "$engine" = buildah ]; then
        buildah inspect --type image --format "{{.OCIv1.Config.$1}}" "$image"
    else
        "$engine" image inspect --format "{{.Config.$1}}" "$image"
    fi
}

entry=$(field Entrypoint)
[ "$entry" = "[vllm serve]" ] ||
    fail "the entry point of $image is $entry, not [vllm serve]: the base is no image of vllm/vllm-openai"
labels=$(field Labels)
for label in version revision base.name; do
    case $labels in
    *"org.opencontainers.image.$label:"[!\ ]*) ;;
    *) fail "$image has no label org.opencontainers.image.$label: build it with scripts/build_image.sh" ;;
    esac
done
label() { sed -n "s/.*$1:\([^] ]*\).*/\1/p" <<<"$labels"; }
[ -z "$commit" ] || [ "$(label org.opencontainers.image.revision)" = "$commit" ] ||
    fail "$image was built from commit $(label org.opencontainers.image.revision), not $commit"
arch=$(label vllm-weaver.required-arch)

in_image -m vllm_weaver.doctor --audit ${arch:+--require-arch "$arch"} >&2 || fail "the audit of $image has findings"
installed=$(in_image -c 'import vllm_weaver; print(vllm_weaver.__version__)')
[ "$installed" = "$(label org.opencontainers.image.version)" ] ||
    fail "$image has vllm_weaver $installed, but its label says $(label org.opencontainers.image.version)"
if [ -z "$device" ]; then
    say "ok: $image as far as files go; nothing was run on a device (--gpu or --cpu does)"
    exit
fi
in_image -m vllm_weaver.doctor >&2 || fail "the doctor of $image has findings"
in_image /demo/ops_lib/probe.py /demo/demo_models >&2 || fail "$image does not generate text rightly"
say "ok: $image generates with trees what it generates without"
