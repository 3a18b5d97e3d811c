#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Which tree budget is the fastest on this machine: a server a budget, restarted, measured by bench.py.

    python scripts/sweep_budget.py --budgets 16 32 64 --out results/sweep \\
      --serve 'bash scripts/serve.sh dflash_tfm --budget {budget} --port {port}' \\
      --plain 'bash scripts/serve.sh ar --port {port}' \\
      -- --datasets mtbench gsm8k --temperature 0 --max-new-tokens 1024

What follows `--` goes to bench.py. Restarts are taken in rounds over all budgets, so that a machine that
warms up does not favour one of them. Writes OUT.json, OUT.md and OUT.png, and names the best budget.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import bench
from ops_lib.client import ServerError
from ops_lib.datasets import DatasetError
from ops_lib.process import StartError, fill, free_port, running
from ops_lib.report import ReportError, write_json

PLAIN = 0  # the place of plain decoding among the budgets
SERVE = "bash scripts/serve.sh dflash_tfm --budget {budget} --port {port}"


def parse(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options, and those of bench.py after `--`."""
    parser = argparse.ArgumentParser(
        prog="sweep_budget.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--budgets", nargs="+", type=int, default=[8, 16, 32, 64, 128])
    parser.add_argument("--restarts", type=int, default=3, help="servers a budget (default 3)")
    parser.add_argument("--serve", default=SERVE, help="the server's command (default: %(default)s)")
    parser.add_argument("--plain", help="the command of a server without speculation, to compare with")
    parser.add_argument("--start-seconds", type=float, default=1800.0, help="a server may take to start")
    parser.add_argument("--out", type=Path, default=Path("results/sweep"))
    at = words.index("--") if "--" in words else len(words)
    arguments = parser.parse_args(words[:at])
    if arguments.restarts < 1 or any(not 1 <= budget <= 256 for budget in arguments.budgets):
        parser.error("--restarts must be at least 1, --budgets from 1 to 256")
    return arguments, words[at + 1 :]


def measure(arguments: argparse.Namespace, options: list[str], budget: int, restart: int) -> dict[str, Any]:
    """Start a server of this budget, run bench.py on it, stop it; bench.py's results."""
    port = free_port()
    values = {"port": port} if budget == PLAIN else {"port": port, "budget": budget}
    command = fill(arguments.plain if budget == PLAIN else arguments.serve, **values)
    name = f"{arguments.out.name}.{'plain' if budget == PLAIN else budget}.{restart}"
    out = arguments.out.with_name(name)
    label = "plain" if budget == PLAIN else f"budget {budget}"
    with running(command, port, out.with_name(out.name + ".log"), arguments.start_seconds) as server:
        words = [*options, "--url", server.url, "--out", str(out), "--label", label]
        if "--dataset-lock" not in options:
            words += ["--dataset-lock", str(arguments.out.with_name("datasets.lock.json"))]
        results = bench.run(bench.parse(words))
    write_json(out.with_name(out.name + ".json"), results)
    if results["macro"] is None or results["macro"]["throughput"] is None:
        raise bench.BenchError(f"{label}: nothing was measured, {results['macro']['errors']} requests failed")
    return results


def point(budget: int, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """What the restarts of one budget say together."""
    rates = [run["macro"]["throughput"] for run in runs]
    taus = [run["macro"]["tau"] or run["macro"]["tau_pooled"] for run in runs]
    known = [tau for tau in taus if tau is not None]
    return {
        "budget": budget,
        "throughput": statistics.fmean(rates),
        "lowest": min(rates),
        "highest": max(rates),
        "throughputs": rates,
        "tau": statistics.fmean(known) if known else None,
        "errors": sum(run["macro"]["errors"] for run in runs),
    }


def best(points: list[dict[str, Any]]) -> tuple[int, list[int]]:
    """The budget with the highest mean, and the others whose spread reaches it: they may be as good.

    Budgets at which requests failed do not count.
    """
    sound = [p for p in points if p["budget"] != PLAIN and not p["errors"]]
    if not sound:
        raise bench.BenchError("at every budget some requests failed, so none is the best")
    first = max(sound, key=lambda p: p["throughput"])
    near = [p["budget"] for p in sound if p is not first and p["highest"] >= first["lowest"]]
    return first["budget"], near


def markdown(points: list[dict[str, Any]]) -> str:
    """The curve as a Markdown table."""
    plain = next((p["throughput"] for p in points if p["budget"] == PLAIN), None)
    lines = ["| budget | tok/s | lowest-highest | x plain | tau | errors |", "|---|---|---|---|---|---|"]
    for p in points:
        times = f"{p['throughput'] / plain:.2f}" if plain else "-"
        tau = "-" if p["tau"] is None else f"{p['tau']:.2f}"
        name = "plain" if p["budget"] == PLAIN else p["budget"]
        spread = f"{p['lowest']:.2f}-{p['highest']:.2f}"
        lines.append(f"| {name} | {p['throughput']:.2f} | {spread} | {times} | {tau} | {p['errors']} |")
    return "\n".join(lines)


def draw(points: list[dict[str, Any]], chosen: int, path: Path) -> None:
    """The curve with its spread as PNG. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    trees = [p for p in points if p["budget"] != PLAIN]
    figure, axis = pyplot.subplots(figsize=(7, 4.5))
    budgets, rates = [p["budget"] for p in trees], [p["throughput"] for p in trees]
    spread = [[p["throughput"] - p["lowest"] for p in trees], [p["highest"] - p["throughput"] for p in trees]]
    axis.errorbar(budgets, rates, yerr=spread, marker="o", capsize=4, label="trees: mean, lowest, highest")
    for p in trees:
        if p["tau"] is not None:
            place = {"xytext": (0, 5), "textcoords": "offset points", "ha": "center", "fontsize": "small"}
            axis.annotate(f"tau {p['tau']:.2f}", (p["budget"], p["highest"]), **place)
    for p in points:
        if p["budget"] == PLAIN:
            axis.axhline(p["throughput"], linestyle="--", color="gray", label="plain decoding")
    axis.axvline(chosen, linestyle=":", color="gray")
    axis.set_xscale("log", base=2)
    axis.set_xticks(budgets, [str(budget) for budget in budgets])
    axis.margins(y=0.15)
    axis.set(xlabel="tree budget", ylabel="tokens/s, mean over datasets", title=f"best budget: {chosen}")
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def sweep(arguments: argparse.Namespace, options: list[str]) -> dict[str, Any]:
    """Every round over every budget; the points, in order of budget. Raises an error of one sentence."""
    budgets = sorted({*arguments.budgets, *([PLAIN] if arguments.plain else [])})
    runs: dict[int, list[dict[str, Any]]] = {budget: [] for budget in budgets}
    for restart in range(1, arguments.restarts + 1):
        for budget in budgets:
            print(f"sweep: restart {restart}, budget {budget or 'none'}", file=sys.stderr, flush=True)
            runs[budget].append(measure(arguments, options, budget, restart))
    points = [point(budget, runs[budget]) for budget in budgets]
    chosen, near = best(points)
    first = runs[budgets[0]][0]
    keys = ("model", "server_version", "versions_here", "gpus_here", "commit", "date")
    return {
        "best": chosen,
        "as_good_within_the_spread": near,
        "points": points,
        "restarts": arguments.restarts,
        "command": " ".join(["sweep_budget.py", *sys.argv[1:]]),
        **{key: first[key] for key in keys},
    }


def main() -> int:
    """Sweep and write; 0 if a best budget was found."""
    arguments, options = parse(sys.argv[1:])
    start = time.monotonic()
    try:
        results = sweep(arguments, options)
    except (bench.BenchError, StartError, ReportError, DatasetError, ServerError) as error:
        print(f"sweep: FAILED: {error}", file=sys.stderr)
        return 2
    results["total_seconds"] = time.monotonic() - start
    out = arguments.out
    write_json(out.with_name(out.name + ".json"), results)
    table = markdown(results["points"])
    out.with_name(out.name + ".md").write_text(table + "\n")
    print(table)
    try:
        draw(results["points"], results["best"], out.with_name(out.name + ".png"))
    except ImportError:
        print("sweep: no picture: matplotlib is not installed (pip install matplotlib)", file=sys.stderr)
    near = results["as_good_within_the_spread"]
    also = f"; within the spread as good: {', '.join(map(str, near))}" if near else ""
    print(f"sweep: best budget: {results['best']}{also}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
