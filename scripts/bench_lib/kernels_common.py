# SPDX-License-Identifier: Apache-2.0
"""What all kernel benchmarks share: settings, made-up trees, the correctness gate and the clock.

A `Case` is one line of the table. Its check runs first and raises BenchmarkError when the output is wrong.
Times are medians of replays of a CUDA graph of all its calls, which go round through buffers that together
are larger than the L2 cache, unless one call touches less than `HOT_BYTES`: what is that small has just been
written by another kernel of the step and costs a launch.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bench_lib.kernels_floor import Ceilings, Work
from bench_lib.provenance import BenchmarkError
from bench_lib.shapes import BLOCK, Shape
from vllm_weaver.kernels.ancestors import ancestor_mask_words
from vllm_weaver.kernels.common import Impl
from vllm_weaver.kernels.gdn_buffers import GdnShape

Call = Callable[[], Any]
ACCEPTED = 8  # nodes on a committed path, the root included
HOT_BYTES = 1 << 18
_MOST_COPIES = 256
_CALLS = 16  # a graph has this many calls at least


@dataclass(frozen=True)
class Setting:
    """Where and at which sizes the kernels run; the defaults are those of the full benchmark."""

    device: torch.device
    shape: Shape
    cache_bytes: int
    """The L2 cache."""
    impl: Impl = "auto"
    dtype: torch.dtype = torch.bfloat16
    nodes: tuple[int, ...] = (17, 33, 65, 129)
    attention_nodes: tuple[int, ...] = (17, 33, 129)
    prefixes: tuple[int, ...] = (512, 8192)
    budgets: tuple[int, ...] = (8, 32, 64, 128)
    batches: tuple[int, ...] = (1, 4)
    """Requests; beyond the first of these not all sizes are measured."""
    fp8: bool = True
    depth: int = BLOCK - 1
    """Of the draft, and of the deepest trees."""
    page: int = 784

    @classmethod
    def quick(cls, device: torch.device, shape: Shape, cache_bytes: int) -> Setting:
        """One size of everything, one request."""
        return cls(
            device, shape, cache_bytes, nodes=(33,), attention_nodes=(33,), budgets=(32,), batches=(1,),
            fp8=False,
        )  # fmt: skip

    @property
    def gdn(self) -> GdnShape:
        """Heads and dimensions of a Gated DeltaNet layer."""
        shape = self.shape
        return GdnShape(shape.key_heads, shape.gdn_dim, shape.value_heads, shape.gdn_dim)

    @property
    def attention_layers(self) -> int:
        """Every fourth layer attends."""
        return self.shape.layers // 4

    @property
    def gdn_layers(self) -> int:
        """The others."""
        return self.shape.layers - self.attention_layers

    @property
    def main_nodes(self) -> int:
        """The tree size of what is measured at one size only: 33, where it is among the sizes."""
        return 33 if 33 in self.nodes else self.nodes[-1]

    def sizes(self) -> list[tuple[int, int]]:
        """(nodes, requests): all sizes for one batch, the main size for the others."""
        first, *others = self.batches
        return [(n, first) for n in self.nodes] + [(self.main_nodes, r) for r in others]

    def copies(self, touched: float) -> int:
        """How many buffers to go round through when a call touches this many bytes of one."""
        if touched < HOT_BYTES:
            return 1
        return min(_MOST_COPIES, max(1, -(-4 * self.cache_bytes // int(touched))))

    def randn(self, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
        """Normally distributed numbers; the global generator decides, which every case seeds."""
        return torch.randn(*sizes, device=self.device, dtype=dtype or self.dtype)


@dataclass
class Case:
    """One kernel at one size. `calls` go round through the buffers and are alike."""

    kernel: str
    size: str
    work: Work
    calls: list[Call]
    check: Callable[[], dict[str, float]]
    """Raises BenchmarkError unless the outputs are right; gives the errors found."""
    reference: str = ""
    """What vLLM has for this; the fastest of `reference_calls` counts."""
    reference_calls: Callable[[], dict[str, list[Call]]] | None = None


@dataclass
class Result:
    """What was found for a case."""

    kernel: str
    size: str
    us: float
    floor_us: float
    errors: dict[str, float]
    reference: str = ""
    reference_us: float | None = None
    reference_variants_us: dict[str, float] = field(default_factory=dict)
    reference_missing: str = ""

    def row(self) -> list[str]:
        """Its line of the table."""
        ours = [
            self.kernel,
            self.size,
            f"{self.us:.2f}",
            f"{self.floor_us:.2f}",
            f"{self.us / self.floor_us:.1f}",
        ]
        if self.reference_us is not None:
            return [*ours, self.reference, f"{self.reference_us:.2f}", f"{self.us / self.reference_us:.2f}"]
        return [*ours, self.reference_missing[:60], "", ""]


COLUMNS = ["kernel", "size", "us", "floor us", "x floor", "reference", "its us", "/ reference"]


def require(what: str, error: float, limit: float) -> float:
    """The error; BenchmarkError where it is not below the limit (NaN is not)."""
    if not error <= limit:
        raise BenchmarkError(
            f"the correctness gate failed, so nothing is reported: {what} is off by {error:.2e}, and "
            f"{limit:.0e} is allowed"
        )
    return error


def relative_error(got: Tensor, want: Tensor) -> float:
    """|got - want| / |want|, of the Euclidean norms in float64."""
    want = want.double()
    return ((got.double() - want).norm() / want.norm()).item()


def require_equal(what: str, got: Any, want: Any) -> dict[str, float]:
    """Nothing to report; BenchmarkError unless the tensors (or sequences of them) hold the same bits."""
    pairs = [(got, want)] if isinstance(got, Tensor) else zip(got, want, strict=True)
    for one, other in pairs:
        if one.dtype != other.dtype or not torch.equal(_bits(one), _bits(other)):
            raise BenchmarkError(
                f"the correctness gate failed, so nothing is reported: {what} differs from its reference"
            )
    return {}


def _bits(tensor: Tensor) -> Tensor:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(kinds[tensor.element_size()])


def random_tree(nodes: int, depth: int, rng: random.Random) -> list[int]:
    """Parents of a tree of this many nodes that is `depth` deep at most."""
    parents, depths = [-1], [0]
    for i in range(1, nodes):
        parent = rng.randrange(max(0, i - 8), i)
        while depths[parent] >= depth:
            parent = parents[parent]
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return parents


class Trees:
    """A step of `requests` trees of `nodes` nodes, and an accepted path of each, as the kernels take them."""

    def __init__(self, setting: Setting, nodes: int, requests: int) -> None:
        rng = random.Random(nodes)
        self.nodes, self.requests, self.rows = nodes, requests, nodes * requests
        lists = [random_tree(nodes, setting.depth, rng) for _ in range(requests)]
        chains: list[list[int]] = [[] for _ in lists]
        depths = []
        for parents, chain in zip(lists, chains, strict=True):
            depth: list[int] = []
            for parent in parents:
                depth.append(depth[parent] + 1 if parent >= 0 else 0)
            # The last of the deepest nodes, so that a commit has something to move.
            node = max(range(nodes), key=lambda i, depth=depth: (depth[i], i))
            while node >= 0:
                chain.insert(0, node)
                node = parents[node]
            depths.append(depth)
        self.paths = [chain[:ACCEPTED] for chain in chains]

        def tensor(values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=setting.device)

        self.parents, self.depths = tensor(lists), tensor(depths)
        self.num_nodes = tensor([nodes] * requests)
        self.query_start_loc = tensor(list(range(0, self.rows + 1, nodes)))
        self.ancestors = ancestor_mask_words(self.parents, self.num_nodes, impl=setting.impl)
        self.path = tensor([path + [-1] * (nodes - len(path)) for path in self.paths])
        self.num_path = tensor([len(path) for path in self.paths])
        tokens = [rng.sample(range(setting.shape.vocab), nodes) for _ in lists]
        self.tokens = tensor(tokens, torch.int64)

    def moved_rows(self) -> int:
        """Rows of all requests that a commit has to move."""
        return sum(node != place for path in self.paths for place, node in enumerate(path))


def graph_us(calls: list[Call], replays: int = 25) -> float:
    """Median microseconds of one of these calls in a replayed CUDA graph."""
    calls = calls * max(1, -(-_CALLS // len(calls)))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        times = []
        for _ in range(3 + replays):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
    return sorted(times[3:])[replays // 2] * 1e3 / len(calls)


def measure_ceilings(device: torch.device) -> Ceilings:
    """The best rate that memory gives to a copy, an elementwise kernel or a sum over 1 GiB, and the rate of a
    bf16 matmul of 8192 by 8192 by 8192.

    A driver's copy alone reaches two thirds of what kernels do on an H200: a floor made of it would lie above
    what is measured."""
    numbers, side = 1 << 28, 8192
    source, target = (torch.ones(numbers, device=device) for _ in range(2))
    total = torch.empty((), device=device)
    a, b = (torch.randn(side, side, dtype=torch.bfloat16, device=device) for _ in range(2))
    product = torch.empty_like(a)
    passes: list[tuple[int, Call]] = [  # (bytes read and written, call)
        (8 * numbers, lambda: target.copy_(source)),
        (8 * numbers, lambda: torch.neg(source, out=target)),
        (4 * numbers, lambda: torch.sum(source, 0, out=total)),
    ]
    rates = [touched / graph_us([call], replays=9) * 1e6 for touched, call in passes]
    matmul_us = graph_us([lambda: torch.matmul(a, b, out=product)], replays=9)
    return Ceilings(max(rates), 2 * side**3 / matmul_us * 1e6)


def measure(case: Case, ceilings: Ceilings) -> Result:
    """Checks a case, then times it and what vLLM has for it."""
    errors = case.check()
    result = Result(case.kernel, case.size, graph_us(case.calls), ceilings.floor_us(case.work), errors)
    if case.reference_calls is not None:
        result.reference = case.reference
        try:
            for name, calls in case.reference_calls().items():
                result.reference_variants_us[name] = graph_us(calls)
            result.reference_us = min(result.reference_variants_us.values())
        except Exception as error:  # whatever an absent or different vLLM raises is a reason to show
            result.reference_missing = f"none: {type(error).__name__}: {error}".splitlines()[0]
    return result
