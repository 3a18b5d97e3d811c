#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The kernels on a GPU at the shape of Qwen3.6-27B: time, floor, and vLLM's kernel for a chain as wide.

    python scripts/bench_kernels.py --out results/kernels.json

Every kernel is first compared with its PyTorch reference at the size that is then timed; if one is wrong,
nothing is reported. Times are medians of replayed CUDA graphs. The floor is what the device would take, at
the memory and matmul rates measured in this run, for the bytes and operations that the kernel cannot do
without.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the package, where it is not installed

import torch
from bench_lib.provenance import BenchmarkError, provenance, say, table, write_json


@torch.no_grad()
def measure_all(names: set[str], quick: bool) -> dict[str, Any]:
    """The report as a dictionary; `results` holds a list of `Result`."""
    from bench_lib import kernels_accept, kernels_attention, kernels_gdn, kernels_step, kernels_weaver
    from bench_lib.kernels_common import Setting, measure, measure_ceilings
    from bench_lib.shapes import SHAPES

    families = (kernels_gdn, kernels_attention, kernels_weaver, kernels_step, kernels_accept)
    known = [name for family in families for name in family.NAMES]
    if names - set(known):
        raise BenchmarkError(
            f"--only names no kernel {sorted(names - set(known))[0]!r}; there are {', '.join(known)}"
        )
    names = names or set(known)
    device = torch.device("cuda", torch.cuda.current_device())
    cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    make = Setting.quick if quick else Setting
    setting = make(device, SHAPES["27b"], cache_bytes)
    ceilings = measure_ceilings(device)
    results, began = [], time.perf_counter()
    for family in families:
        for case in family.cases(setting, names):
            results.append(measure(case, ceilings))
            say(f"{time.perf_counter() - began:4.0f} s  {case.kernel}, {case.size}: {results[-1].us:.2f} us")
            del case  # and with it the buffers, before the next ones are made
        torch.cuda.empty_cache()
    report = {"ceilings": vars(ceilings), "results": results}
    if not quick and "gdn_commit" in names:
        report["gdn_drift"] = kernels_gdn.drift(setting)
    return report


def show(report: dict[str, Any]) -> str:
    """The table, and what it rests on."""
    from bench_lib.kernels_common import COLUMNS

    ceilings = report["ceilings"]
    lines = [
        table(COLUMNS, [result.row() for result in report["results"]]),
        "",
        f"measured: memory at {ceilings['bytes_per_second'] / 1e12:.2f} TB/s, "
        f"bf16 matmuls at {ceilings['operations_per_second'] / 1e12:.0f} TFLOP/s",
    ]
    if "gdn_drift" in report:
        drift = report["gdn_drift"]
        lines.append(
            f"GDN state after {drift['commits']} commits, relative error: {drift['verify_and_commit']:.1e}; "
            f"vLLM's sequential kernel: {drift['sequential']:.1e}"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="only these kernels")
    parser.add_argument("--quick", action="store_true", help="one size of each, one request, no drift")
    arguments = parser.parse_args()
    try:
        if not torch.cuda.is_available():
            raise BenchmarkError("this benchmark needs a CUDA device, and torch finds none")
        torch.set_float32_matmul_precision("highest")  # references in fp32 are fp32
        report = measure_all(set(arguments.only), arguments.quick)
        facts = provenance(shape="27b", quick=arguments.quick)
        results = [vars(result) for result in report["results"]]
        write_json(arguments.out, {"provenance": facts, **report, "results": results})
        print(show(report))
    except BenchmarkError as error:
        print(f"bench_kernels: FAILED: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
