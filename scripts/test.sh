#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The whole test suite: bash scripts/test.sh [--all] [pytest options]
# Sets up .venv once, then runs ruff, mypy and pytest. --all runs the full end-to-end grid in place of the subset
# that covers it. Exit status 0 only if everything passed.
set -uo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
all=()
if [ "${1:-}" = --all ]; then
    all=(--all)
    shift
fi
options=("$@")
summary=""
failed=0

# note NAME STATUS SECONDS: a line of the summary
note() {
    local result=passed
    if [ "$2" -eq 5 ] && [ "${#options[@]}" -gt 0 ]; then
        result="no test chosen" # by pytest options such as -k, which need not fit every part
    elif [ "$2" -ne 0 ]; then
        result="FAILED ($2)"
        failed=1
    fi
    summary+=$(printf '%-22s %-14s %4d s' "$1" "$result" "$3")$'\n'
}

# step NAME COMMAND...: run it, note its time and whether it passed
step() {
    local name=$1 start=$SECONDS status=0
    shift
    echo
    echo "== $name"
    "$@" || status=$?
    note "$name" "$status" $((SECONDS - start))
}

# beside NAME COMMAND... -- NAME COMMAND...: two steps at once; what the first one prints is shown after the second
beside() {
    local name=$1 start=$SECONDS log status seconds first=()
    shift
    while [ "$1" != -- ]; do
        first+=("$1")
        shift
    done
    shift
    log=$(mktemp)
    {
        "${first[@]}" >"$log" 2>&1
        echo $? $((SECONDS - start)) >"$log.end"
    } &
    step "$@"
    wait $!
    echo
    echo "== $name"
    cat "$log"
    read -r status seconds <"$log.end" || status=1
    rm -f "$log" "$log.end"
    note "$name" "$status" "${seconds:-$((SECONDS - start))}"
}

python=$(bash scripts/setup.sh) || exit 1
# The problems are small: on two cores more threads would mostly wait for each other.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
step "ruff check" "$python" -m ruff check .
step "ruff format" "$python" -m ruff format --check .
step "mypy" "$python" -m mypy
# Processes of their own: kernels are tested under Triton's interpreter as it is; the others load vLLM, for which
# vllm_weaver.cpu mends it; and engines read their environment when vLLM is imported.
units=(tests --ignore tests/kernels --ignore tests/gpu --ignore tests/e2e)
# An engine keeps one core busy. Here are two halves of about the same length; a new file joins the first.
other_half=(tests/e2e/test_{requests,sampling,sampling_law,server,startup,targets}.py)
one_half=(tests/e2e)
for file in "${other_half[@]}"; do one_half+=(--ignore "$file"); done
if "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    step "pytest, kernels" "$python" -m pytest tests/kernels "${options[@]}"
    step "pytest, other units" "$python" -m pytest "${units[@]}" "${options[@]}"
    step "pytest, engines on GPU" "$python" -m pytest tests/gpu "${options[@]}"
else
    beside "pytest, kernels" "$python" -m pytest tests/kernels -m "not gpu" "${options[@]}" -- \
        "pytest, other units" "$python" -m pytest "${units[@]}" -m "not gpu" "${options[@]}"
    beside "pytest, end to end 1" "$python" -m pytest "${one_half[@]}" -m "not gpu" "${all[@]}" "${options[@]}" -- \
        "pytest, end to end 2" "$python" -m pytest "${other_half[@]}" -m "not gpu" "${all[@]}" "${options[@]}"
fi

echo
printf '%s' "$summary"
if [ "$failed" -ne 0 ]; then
    echo "test: FAILED after $SECONDS s"
    exit 1
fi
echo "test: ok after $SECONDS s"
