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

    figure, axes = pyplot.subplots(2, len(contexts), figsize=(6 * len(contexts) + 2, 8), squeeze=False)
    found = {context: series(results, context) for context in contexts}
    names = _largest_first([part for _, _, parts in found.values() for part in parts])
    colors = dict(zip(names, pyplot.get_cmap("tab20").colors * (len(names) // 20 + 1), strict=False))
    for column, context in enumerate(contexts):
        budgets, ratios, parts = found[context]
        top, bottom = axes[0][column], axes[1][column]
        top.plot(budgets, ratios, marker="o", label="dflash_tfm")
        for name, style in (("dflash", "--"), ("tfm chain", ":")):
            if context in results["arms"].get(name, {}):
                top.axhline(
                    results["arms"][name][context]["ratio"], linestyle=style, color="gray", label=name
                )
        top.set(title=f"context {context}", xlabel="tree budget", ylabel="step / plain decode step")
        top.set_xticks(budgets)
        top.legend()
        labels, heights = [str(b) for b in budgets], [0.0] * len(budgets)
        for name in names:
            values = [part.get(name, 0.0) for part in parts]
            bottom.bar(labels, values, bottom=heights, color=colors[name])
            heights = [a + b for a, b in zip(heights, values, strict=True)]
        bottom.set(xlabel="tree budget", ylabel="ms a step (profiled)")
    figure.suptitle(title, fontsize="small")
    figure.tight_layout()
    if names:  # one for all, beside the pictures; its order is that of the bars, from above
        patches = [pyplot.Rectangle((0, 0), 1, 1, color=colors[name]) for name in reversed(names)]
        figure.legend(patches, names[::-1], loc="center left", bbox_to_anchor=(1.0, 0.3), fontsize="x-small")
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


def _largest_first(parts: list[dict[str, float]]) -> list[str]:
    """Names of the parts by their mean, without the total."""
    names = sorted({name for part in parts for name in part} - {"total"})
    return sorted(names, key=lambda name: -statistics.mean(part.get(name, 0.0) for part in parts))
