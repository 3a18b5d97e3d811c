#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Set-up of demo.sh and test.sh: a virtual environment .venv in the checkout with the pinned packages of
# requirements.txt and this package. Prints the path of its Python; progress goes to standard error. A second run
# finds everything in place. With VLLM_WEAVER_VENV=FOLDER that environment is used as it is.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
pins=$root/scripts/requirements.txt
# A PyPI torch is a CUDA build of several GB; this index has the CPU builds. Asked only where pip finds none.
torch_cpu_index=https://download.pytorch.org/whl/cpu

say() { echo "setup: $*" >&2; }
fail() {
    echo "setup: FAILED: $*" >&2
    exit 1
}

# The first Python of a version that vLLM supports; PYTHON names another.
find_python() {
    local candidate seen=""
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.14}; do
        version=$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue
        case $version in
        3.11 | 3.12 | 3.13 | 3.14)
            echo "$candidate"
            return
            ;;
        esac
        seen+="${seen:+, }$candidate is $version"
    done
    fail "needs Python 3.11 to 3.14 (${seen:-none found}); install one, or name it: PYTHON=/path/to/python3.12"
}

# pip with the arguments given; into the log, with a sign of life for every 20 packages and every large file.
pip_install() {
    "$venv/bin/python" -m pip --disable-pip-version-check install --progress-bar off "$@" 2>&1 |
        tee -a "$log" |
        awk '/^Collecting / && ++n % 20 == 0 { print "setup:   " n " packages found" }
             /^ *Downloading .*\([0-9.]+ [MG]B\)/ && ($(NF - 1) + 0 > 0) {
                 size = substr($(NF - 1), 2) + 0
                 if (size >= 20 || $NF ~ /GB/) print "setup:   downloading " $2 " " $(NF - 1) " " $NF }
             /^Installing collected/ { print "setup:   installing " NF - 3 " packages" }
             { fflush() }' >&2
}

last_error() {
    grep -iE '^ *(error|fatal)|No space left' "$log" | tail -n 1 | cut -c 1-300 || true
}

if [ -n "${VLLM_WEAVER_VENV:-}" ]; then
    [ -x "$VLLM_WEAVER_VENV/bin/python" ] || fail "VLLM_WEAVER_VENV=$VLLM_WEAVER_VENV has no bin/python"
    "$VLLM_WEAVER_VENV/bin/python" -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("vllm"))' ||
        fail "VLLM_WEAVER_VENV=$VLLM_WEAVER_VENV has no vLLM; unset it, and an environment is made"
    echo "$VLLM_WEAVER_VENV/bin/python"
    exit
fi

[ "$(uname -s)" = Linux ] || fail "needs Linux: Triton, which vLLM's V2 runner is written in, has no $(uname -s) build"
venv=$root/.venv
stamp=$venv/vllm-weaver-setup
log=$venv/setup.log
# Everything that decides what is in the environment; an editable install also knows where the checkout is.
wanted=$({ cat "$pins" "$root/pyproject.toml" "${BASH_SOURCE[0]}"; echo "$root"; } | sha256sum | cut -d ' ' -f 1)
if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && "$venv/bin/python" -c '' 2>/dev/null; then
    echo "$venv/bin/python"
    exit
fi

start=$SECONDS
python=$(find_python)
say "making $venv ($("$python" --version 2>&1)); once, some minutes and about 4 GB"
# Without a stamp a set-up was interrupted, and a package may be there in part.
if [ ! -f "$stamp" ] || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    error=$("$python" -m venv --clear "$venv" 2>&1) ||
        fail "$python -m venv did not work (on Debian and Ubuntu install python3-venv): $(tail -n 1 <<<"$error")"
fi
rm -f "$stamp"
: >"$log"

torch=$(grep '^torch==' "$pins")
say "1/3 $torch"
index=()
if ! pip_install "$torch"; then
    index=(--extra-index-url "$torch_cpu_index")
    say "not found where pip looks by default; asking PyTorch's index of CPU builds"
    pip_install "${index[@]}" "$torch" || fail "pip could not install $torch: $(last_error) (all of it: $log)"
fi
say "2/3 vLLM, the other packages of scripts/requirements.txt and what they need"
pip_install "${index[@]}" -r "$pins" || fail "pip could not install scripts/requirements.txt: $(last_error) (all of it: $log)"
say "3/3 this package"
pip_install --no-build-isolation --no-deps -e "$root" || fail "pip could not install this package: $(last_error) (all of it: $log)"
echo "$wanted" >"$stamp"
say "done in $((SECONDS - start)) s"
echo "$venv/bin/python"
