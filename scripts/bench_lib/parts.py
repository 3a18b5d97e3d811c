# SPDX-License-Identifier: Apache-2.0
"""What a step's GPU time is made of: kernels of a profile, by the graph they ran in and by name."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

# First match counts. Names are those of this package, of vLLM, FlashAttention, cuBLAS and Inductor.
_KINDS = (
    (
        "GDN",
        r"gdn|gated_delta|gating_delta|fused_recurrent|chunk_|causal_conv1d|_tree_conv|l2norm_fwd|solve_tril",
    ),
    ("attention", r"tree_attention|combine_kernel|flash|fmha|reshape_and_cache"),
    ("pool", r"_(groups|bound|collect|order)_kernel"),
    ("Weaver", r"weaver|frontier|_(project|qkv|path_attention|gate_up|scores|select|start)_kernel"),
    ("walk and commit", r"walk|argmax|kv_compact|gather_rows|store_trees|fill_step"),
    ("sampling", r"gumbel|sampl|temperature|topk|min_p"),
    ("matrix products", r"nvjet|gemm|gemv|cutlass|splitk|cublas|sm90_xmma|matmul"),
)
KINDS = (*(name for name, _ in _KINDS), "other")


class Kernel(NamedTuple):
    """One kernel run: name, start and length in microseconds, and the launch that it came from."""

    name: str
    start: float
    length: float
    launch: int


def kind_of(name: str) -> str:
    """The part that a kernel of this name belongs to."""
    lowered = name.lower()
    return next((kind for kind, pattern in _KINDS if re.search(pattern, lowered)), "other")


def kernels_of(profiler: Any) -> list[Kernel]:
    """The kernels, copies and fills of a finished `torch.profiler.profile`, in order."""
    found = []
    for event in profiler.profiler.kineto_results.events():
        if event.device_type() == torch.autograd.DeviceType.CUDA and event.duration_ns() > 0:
            start, length = event.start_ns() / 1e3, event.duration_ns() / 1e3
            found.append(Kernel(event.name(), start, length, event.correlation_id()))
    return sorted(found, key=lambda kernel: kernel.start)


def break_down(kernels: Iterable[Kernel], steps: int) -> dict[str, float]:
    """Milliseconds a step of every part, of `idle` between kernels, and their sum `total`.

    A kernel that starts while an earlier one runs (a programmatic dependent launch waits so for its inputs)
    counts from that one's end on.

    A launch of more than 20 kernels is a graph: the longer one of a step is the target's (`verify`),
    the other the draft's; launches of single kernels are `eager`.
    """
    kernels = list(kernels)
    launches: dict[int, list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        launches[kernel.launch].append(kernel)
    graphs = {launch: sum(k.length for k in group) for launch, group in launches.items() if len(group) > 20}
    longest = max(graphs.values(), default=0.0)
    parts: dict[str, float] = defaultdict(float)
    busy_until = kernels[0].start if kernels else 0.0
    for kernel in kernels:
        where = "eager"
        if kernel.launch in graphs:
            where = "verify" if graphs[kernel.launch] > longest / 2 else "draft"
        end = kernel.start + kernel.length
        parts[f"{where}: {kind_of(kernel.name)}"] += (
            max(0.0, end - max(kernel.start, busy_until)) / 1e3 / steps
        )
        parts["idle"] += max(0.0, kernel.start - busy_until) / 1e3 / steps
        busy_until = max(busy_until, end)
    parts["total"] = (busy_until - kernels[0].start) / 1e3 / steps if kernels else 0.0
    return dict(parts)


def slowest(kernels: Iterable[Kernel], steps: int, count: int = 25) -> list[tuple[str, float, float]]:
    """Name, milliseconds and runs a step of the kernels that take longest."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for kernel in kernels:
        sums[kernel.name][0] += kernel.length / 1e3 / steps
        sums[kernel.name][1] += 1 / steps
    ordered = sorted(sums.items(), key=lambda item: -item[1][0])[:count]
    return [(name[:100], time, runs) for name, (time, runs) in ordered]
