#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The cost of a decode step on a GPU: plain decoding, in-tree chain DFlash, dflash_tfm at several budgets.

    python scripts/bench_step.py --out results/step.json
    python scripts/bench_step.py --out results/step.json --add --arms 'tfm 128'    # one more arm

All arms run in this process on one set of dummy weights (what is compared is the step, not the acceptance).
Every arm is measured in turns with plain decoding (A B A B); its ratio is that of the medians. First the demo
models must decode with trees what they decode plainly, in the same compilation mode, or nothing is reported;
they do so in a process beside this one, while plain decoding is being compiled here.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `tests`: the gate compares as the tests do

from bench_lib.plot import draw
from bench_lib.provenance import BenchmarkError, provenance, say, table, write_json

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
GATE_BUDGET = 32
SAME = ("gpu", "multiprocessors", "cuda", "versions", "commit", "shape", "mode", "batch")
"""What runs whose arms stand in one table must agree in."""


def engine_options(mode: str, contexts: list[int]) -> dict[str, Any]:
    """Options of all arms. Mode `default` is vLLM's own; `0` compiles nothing and captures decode steps."""
    options: dict[str, Any] = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": max(contexts) + 1024,
        "max_num_seqs": 1,
        "max_num_batched_tokens": 2048,
        "enable_prefix_caching": False,
        "async_scheduling": True,
        "gpu_memory_utilization": 0.3,
        "kv_cache_memory_bytes": 3 << 30,
        "attention_backend": "FLASH_ATTN",
        "additional_config": {"gdn_prefill_backend": "triton"},
    }
    if mode == "0":
        options["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    return options


def check_losslessness(mode: str) -> dict[str, Any]:
    """Trees on the demo models must give plain decoding's text; BenchmarkError otherwise."""
    from tests.e2e import harness
    from vllm_weaver import plugin

    plugin.register()  # as in main, in the process that this runs in
    options: dict[str, Any] = {
        "enforce_eager": False,
        "gpu_memory_utilization": 0.05,
        "kv_cache_memory_bytes": 2 << 30,  # a measurement would be disturbed by the process beside it
        "attention_backend": "FLASH_ATTN",
        "additional_config": {"gdn_prefill_backend": "triton"},
    }
    if mode == "0":
        options["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    say("gate: the demo models, plain and with trees")
    plain = options | {"cudagraph_capture_sizes": [1, 2, 4]}
    depth, nodes = 7, GATE_BUDGET + 1  # the demo draft's blocks have 8 positions
    sizes = sorted({n * rows for n in (1, 2, 4) for rows in (depth + 1, nodes)})
    options |= {"cudagraph_capture_sizes": sizes}
    with harness.engine(harness.DEMO / "target", **plain) as llm:
        references = harness.references(llm, harness.demo_prompts(llm.get_tokenizer(), 8), 64)
    with harness.engine(harness.DEMO / "target", **options, **harness.trees(GATE_BUDGET)) as llm:
        outputs = harness.greedy(llm, [r.prompt for r in references], 64)
        stats = harness.runner(llm).model_state.step.stats.read()
    try:
        harness.assert_identical(references, outputs)
    except AssertionError as error:
        raise BenchmarkError(f"the correctness gate failed, so nothing is reported: {error}") from None
    if stats["branching_paths"] == 0:
        raise BenchmarkError("the correctness gate failed: no accepted path left the first children")
    return {"prompts": len(references), "tokens": 64, "budget": GATE_BUDGET, **stats}


def profile(engine: Any, context: int) -> tuple[dict[str, float], list[tuple[str, float, float]]]:
    """Parts of a step in milliseconds, and the slowest kernels."""
    import torch
    from bench_lib.parts import break_down, kernels_of, slowest

    first, recorder = 16, torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])

    def begin() -> None:
        torch.cuda.synchronize()
        recorder.start()

    engine.during(context, 3 * first, begin, first)
    torch.cuda.synchronize()
    recorder.stop()
    kernels, steps = kernels_of(recorder), max(1, len(engine.starts) - first)
    return break_down(kernels, steps), slowest(kernels, steps)


def measure(
    arguments: argparse.Namespace,
    folder: Path,
    ready: Callable[[], None],
    keep: Callable[[dict[str, Any]], None],
) -> None:
    """All arms; the report goes to `keep` whenever an arm is done. `ready` returns when nothing else uses the
    GPU; it is called when plain decoding has started."""
    from bench_lib.engines import Arm, Engine, share_dummy_weights
    from bench_lib.shapes import BLOCK, SHAPES, write_models

    models = write_models(folder, SHAPES[arguments.shape])
    options = engine_options(arguments.mode, arguments.contexts)
    arms = [Arm("dflash", "dflash", BLOCK - 1), Arm("tfm chain", "dflash_tfm", BLOCK - 1, "chain")]
    arms += [Arm(f"tfm {budget}", "dflash_tfm", budget) for budget in arguments.budgets]
    # The same for all arms, and for those of a later --add: so that they share what is compiled.
    sizes = sorted({BLOCK} | {arm.rows for arm in arms})
    if arguments.arms:
        by_name = {arm.name: arm for arm in arms}
        unknown = [name for name in arguments.arms if name not in by_name]
        if unknown:
            raise BenchmarkError(f"there is no arm {unknown[0]!r}; there are {', '.join(map(repr, by_name))}")
        arms = [by_name[name] for name in arguments.arms]
    share_dummy_weights()
    plain = Engine.start(Arm("plain"), models, options | {"cudagraph_capture_sizes": [1]})
    ready()
    for context in arguments.contexts:
        plain.step_ms(context, arguments.steps)
    parts = {str(c): profile(plain, c)[0] for c in arguments.contexts}
    results: dict[str, Any] = {}
    report = {"arms": results, "plain_parts_ms": parts}
    for arm in arms:
        engine = Engine.start(arm, models, options | {"cudagraph_capture_sizes": sizes})
        results[arm.name] = {}
        for context in arguments.contexts:
            engine.step_ms(context, arguments.steps)  # compiles what compiles late
            turns: dict[str, list[float]] = {"plain": [], "arm": []}
            for _ in range(arguments.rounds):
                turns["plain"].append(plain.step_ms(context, arguments.steps))
                turns["arm"].append(engine.step_ms(context, arguments.steps))
            parts, top = profile(engine, context)
            ratio = statistics.median(turns["arm"]) / statistics.median(turns["plain"])
            say(f"{arm.name}, context {context}: {ratio:.3f} x plain")
            results[arm.name][str(context)] = {
                "ratio": ratio,
                "plain_ms": turns["plain"],
                "arm_ms": turns["arm"],
                "parts_ms": parts,
                "slowest": top,
            }
        engine.close()
        keep(report)


def earlier(path: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """The report in the file that this run adds its arms to.

    Raises:
        BenchmarkError: there is none, or it is of another machine, version, commit, shape or mode.
    """
    if not path.exists():
        raise BenchmarkError(f"--add: there is no {path} to add to; leave --add out for a first run")
    found = json.loads(path.read_text())
    for name in SAME:
        old, new = found["provenance"].get(name), facts[name]
        if old != new:
            raise BenchmarkError(f"--add: {path} was measured with {name} {old!r}, this run has {new!r}")
    return {key: found[key] for key in ("arms", "plain_parts_ms", "runs", "provenance")}


def joined(known: dict[str, Any], found: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    """An earlier report (or {}) with this run's arms; of an arm and context in both, this run's."""
    arms = dict(known.get("arms", {}))
    for name, contexts in found["arms"].items():
        arms[name] = arms.get(name, {}) | contexts
    return {
        "arms": arms,
        "plain_parts_ms": known.get("plain_parts_ms", {}) | found["plain_parts_ms"],
        "runs": [*known.get("runs", []), facts],
    }


def contexts_of(results: dict[str, Any]) -> list[str]:
    """The prompt lengths of a report, in order."""
    return sorted({context for found in results["arms"].values() for context in found}, key=int)


def report(results: dict[str, Any]) -> str:
    """The tables: ratios, then parts."""
    lines = []
    for context in contexts_of(results):
        dflash = results["arms"].get("dflash", {}).get(context)
        rows = []
        arms = {name: found[context] for name, found in results["arms"].items() if context in found}
        for name, entry in arms.items():
            arm, plain = statistics.median(entry["arm_ms"]), statistics.median(entry["plain_ms"])
            against = entry["ratio"] / dflash["ratio"] if dflash else float("nan")
            spread = max(entry["arm_ms"]) / min(entry["arm_ms"]) - 1
            rows.append([name, arm, plain, entry["ratio"], against, f"{100 * spread:.1f} %"])
        columns = [f"context {context}", "ms", "plain ms", "/ plain", "/ dflash", "spread"]
        lines += [table(columns, rows), ""]
        names = sorted({part for entry in arms.values() for part in entry["parts_ms"]})
        columns = ["ms a step (profiled)", "plain", *arms]
        sources = [results["plain_parts_ms"][context], *(entry["parts_ms"] for entry in arms.values())]
        lines += [table(columns, [[name, *(s.get(name, 0.0) for s in sources)] for name in names]), ""]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="27b", choices=["27b", "2b"], help="target shape (default 27b)")
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 8192], help="prompt lengths")
    parser.add_argument("--budgets", type=int, nargs="*", default=[8, 16, 32, 64, 128], help="tree budgets")
    parser.add_argument(
        "--arms", nargs="+", help="only these, in this order: 'tfm BUDGET', 'tfm chain', 'dflash'"
    )
    parser.add_argument(
        "--mode", default="default", choices=["default", "0"], help="compilation mode of all arms"
    )
    parser.add_argument("--steps", type=int, default=48, help="steps a measurement (default 48)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each pair of arms (default 3)")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--add", action="store_true", help="add the arms to those that the file has")
    arguments = parser.parse_args()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import torch

    try:
        if not torch.cuda.is_available():
            raise BenchmarkError("this benchmark needs a CUDA device, and torch finds none")
        from vllm_weaver import plugin

        plugin.register()  # where the package is not installed there is no entry point
        facts = provenance(shape=arguments.shape, mode=arguments.mode, batch=1)
        known = earlier(arguments.out, facts) if arguments.add else {}
        with ProcessPoolExecutor(1, get_context("spawn")) as beside, tempfile.TemporaryDirectory() as folder:
            gate = None if known else beside.submit(check_losslessness, arguments.mode)

            def ready() -> None:
                # What the file was measured with, which this run agrees in, has passed the gate.
                facts["gate"] = gate.result() if gate else known["provenance"]["gate"]
                beside.shutdown()

            def keep(found: dict[str, Any]) -> None:
                write_json(arguments.out, {"provenance": facts, **joined(known, found, facts)})

            measure(arguments, Path(folder), ready, keep)
        results = json.loads(arguments.out.read_text())
        print(report(results))
        picture = arguments.out.with_suffix(".png")
        title = f"{facts['gpu']}, {arguments.shape}, batch 1, mode {arguments.mode}, {facts['date']}"
        try:
            draw(results, contexts_of(results), title, picture)
            say(f"wrote {picture}")
        except ImportError:
            say(f"no {picture}: matplotlib is not installed; pip install matplotlib")
    except BenchmarkError as error:
        print(f"bench_step: FAILED: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
