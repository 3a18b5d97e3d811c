# SPDX-License-Identifier: Apache-2.0
"""The picture of bench_step: a step's cost over the tree budget, and what it is made of."""

from __future__ import annotations

import re
import statistics
from pathlib import Path
from typing import Any


def series(results: dict[str, Any], context: str) -> tuple[list[int], list[float], list[dict[str, float]]]:
    """Budgets in order, the step's cost as a multiple of plain decoding, and the parts in milliseconds."""
    found = []
    for name, arm in results["arms"].items():
        budget = re.fullmatch(r"tfm (\d+)", name)
        if budget and context in arm:
            found.append((int(budget[1]), arm[context]["ratio"], arm[context]["parts_ms"]))
    found.sort(key=lambda entry: entry[0])
    return [f[0] for f in found], [f[1] for f in found], [f[2] for f in found]


def draw(results: dict[str, Any], contexts: list[str], title: str, path: Path) -> None:
    """Writes the picture as PNG: per context the cost over the budget above, the parts below.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, len(contexts), figsize=(6 * len(contexts), 8), squeeze=False)
    for column, context in enumerate(contexts):
        budgets, ratios, parts = series(results, context)
        top, bottom = axes[0][column], axes[1][column]
        top.plot(budgets, ratios, marker="o", label="dflash_tfm")
        for name, style in (("dflash", "--"), ("tfm chain", ":")):
            if context in results["arms"].get(name, {}):
                top.axhline(
                    results["arms"][name][context]["ratio"], linestyle=style, color="gray", label=name
                )
        top.set(title=f"context {context}", xlabel="tree budget", ylabel="step / plain decode step")
        top.legend()
        names = sorted({name for part in parts for name in part} - {"total"})
        labels, heights = [str(b) for b in budgets], [0.0] * len(budgets)
        for name in sorted(names, key=lambda n: -statistics.mean(p.get(n, 0.0) for p in parts)):
            values = [part.get(name, 0.0) for part in parts]
            bottom.bar(labels, values, bottom=heights, label=name)
            heights = [a + b for a, b in zip(heights, values, strict=True)]
        bottom.set(xlabel="tree budget", ylabel="ms a step (profiled)")
        if names:
            bottom.legend(fontsize="x-small")
    figure.suptitle(title, fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
