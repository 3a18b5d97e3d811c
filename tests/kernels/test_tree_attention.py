# SPDX-License-Identifier: Apache-2.0
"""Tree attention against float64 attention over each node's own list of visible positions."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.kernels.steps import BATCHES, Part, Step, make_step, poison, same_bits
from tests.trees import ancestors
from vllm_weaver.kernels import tree_attention as kernel
from vllm_weaver.kernels.ancestors import ancestor_mask_words
from vllm_weaver.kernels.tree_attention import tree_attention
from vllm_weaver.kernels.tree_attention_layout import MAX_SPLITS, split_counts

IMPLS = ("torch", "triton")
MIXED = BATCHES["batch-4-mixed"]


@dataclass
class Problem:
    """One attention layer of a step. Positions that nobody may see hold NaN in the caches."""

    step: Step
    prefixes: list[int]
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    table: Tensor

    @property
    def page(self) -> int:
        return self.k_cache.shape[1]

    def place(self, r: int, position: int) -> tuple[int, int]:
        return int(self.table[r, position // self.page]), position % self.page

    def run(self, impl: str, ancestor_words: Tensor | None = None, **options: float | Tensor) -> Tensor:
        """The kernel's output in a poisoned buffer with strides of its own."""
        step, device = self.step, self.q.device
        dtype = torch.bfloat16 if self.q.element_size() == 1 else self.q.dtype
        out = poison(self.q.shape[0], 2, *self.q.shape[1:], device=device, dtype=dtype)[:, 0]
        lengths = [b - a + p for a, b, p in zip(step.starts, step.starts[1:], self.prefixes, strict=False)]
        tree_attention(
            self.q, self.k_cache, self.v_cache, self.table.to(device), step.query_start_loc,
            torch.tensor(lengths, dtype=torch.int32, device=device), step.num_nodes,
            step.ancestors if ancestor_words is None else ancestor_words,
            scale=self.q.shape[-1] ** -0.5, out=out, impl=impl, **options,
        )  # fmt: skip
        return out.contiguous()

    def attend(
        self,
        r: int,
        i: int,
        tail: list[int],
        softcap: float = 0.0,
        q_scale: float | Tensor = 1.0,
        k_scale: float | Tensor = 1.0,
        v_scale: float | Tensor = 1.0,
    ) -> Tensor:
        """Float64 attention [Hq, D] of row i of request r to its prefix and these of its own rows."""
        base = self.prefixes[r]
        places = [self.place(r, position) for position in [*range(base), *(base + j for j in tail)]]
        blocks, rows = (torch.tensor(x) for x in zip(*places, strict=True))
        q = self.q[self.step.starts[r] + i].cpu().float().double()
        group = q.shape[0] // self.k_cache.shape[2]
        q_scale, k_scale, v_scale = (
            torch.as_tensor(factor, dtype=torch.float64).reshape(-1, 1).cpu()
            for factor in (q_scale, k_scale, v_scale)
        )
        k, v = (
            (cache.cpu().float()[blocks, rows].double() * factor).repeat_interleave(group, 1)
            for cache, factor in ((self.k_cache, k_scale), (self.v_cache, v_scale))
        )
        q = (q.view(-1, group, q.shape[1]) * q_scale[:, None]).flatten(0, 1)
        scores = torch.einsum("hd,phd->hp", q, k) * q.shape[-1] ** -0.5
        if softcap:
            scores = softcap * (scores / softcap).tanh()
        return torch.einsum("hp,phd->hd", scores.softmax(-1), v)

    def expected(self, **options: float | Tensor) -> Tensor:
        """Float64 outputs [T, Hq, D], zero where there is no node."""
        out = torch.zeros(self.q.shape, dtype=torch.float64)
        for r, tree in enumerate(self.step.trees):
            for i in range(len(tree or [])):
                out[self.step.starts[r] + i] = self.attend(r, i, ancestors(tree, i), **options)
        return out


def make_problem(
    parts: list[Part],
    device: torch.device,
    *,
    prefixes: list[int] | None = None,
    page: int = 16,
    kv_heads: int = 1,
    group: int = 2,
    dim: int = 16,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    layout: str = "split",
) -> Problem:
    """Random inputs. layout: `split` (K and V dense), `interleaved` ([blocks, 2, ...]), `heads-first`."""
    torch.manual_seed(0)
    rng = random.Random(0)
    step = make_step(parts, device)
    prefixes = prefixes if prefixes is not None else [(37, 0, 16, 5)[r] for r in range(len(parts))]
    lengths = [b - a + p for a, b, p in zip(step.starts, step.starts[1:], prefixes, strict=False)]
    used = [-(-n // page) for n in lengths]
    blocks = sum(used) + 4
    free = list(range(1, blocks))
    rng.shuffle(free)
    table = torch.full((len(parts), max(used) + 1), 2**31 - 1, dtype=torch.int32)  # beyond use: garbage
    live = torch.zeros(blocks, page, dtype=torch.bool)
    for r, count in enumerate(used):
        table[r, :count] = torch.tensor([free.pop() for _ in range(count)], dtype=torch.int32)
        tree = step.trees[r]
        position = torch.arange(prefixes[r] + (lengths[r] - prefixes[r] if tree is None else len(tree)))
        live[table[r, position // page].long(), position % page] = True
    kv = torch.randn(blocks, page, 2, kv_heads, dim)
    kv[~live] = torch.nan
    kv = kv.to(device, cache_dtype or dtype)  # before it is cut: a moved view would come out dense
    k, v = (kv[:, :, i] for i in range(2))
    if layout == "split":
        k, v = k.contiguous(), v.contiguous()
    elif layout == "interleaved":
        k, v = kv.transpose(1, 2).contiguous().unbind(1)
    else:
        k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    q = torch.randn(step.num_rows, kv_heads * group, dim + 3)
    q[step.placeholder_rows() + list(range(step.starts[-1], step.num_rows))] = torch.nan
    return Problem(step, prefixes, q.to(device, dtype)[..., :dim], k, v, table)


def check(problem: Problem, impl: str, tolerance: float, **options: float | Tensor) -> None:
    """Outputs equal plain attention, placeholders are zero, and no other row was written."""
    out, step = problem.run(impl, **options), problem.step
    nodes, foreign = step.node_rows(), step.foreign_rows()
    expected = problem.expected(**options)[nodes]
    torch.testing.assert_close(out[nodes].double().cpu(), expected, rtol=tolerance, atol=tolerance)
    assert (out[step.placeholder_rows()] == 0).all()
    assert same_bits(out[foreign], torch.full_like(out, torch.nan)[foreign])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("parts", BATCHES.values(), ids=BATCHES.keys())
def test_outputs_equal_plain_attention(parts: list[Part], impl: str, device: torch.device) -> None:
    check(make_problem(parts, device), impl, 1e-5)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("page", [16, 32, 48])
@pytest.mark.parametrize("prefix", [0, 1, 15, 16, 17, 31, 32, 33, 100])
def test_prefixes_across_page_and_tile_edges(prefix: int, page: int, impl: str, device: torch.device) -> None:
    check(make_problem([("random", 9, 2)], device, prefixes=[prefix], page=page), impl, 1e-5)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("layout", ["split", "interleaved", "heads-first"])
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param({"kv_heads": 2, "group": 3, "dim": 32}, id="2-kv-heads-of-3"),
        pytest.param({"kv_heads": 1, "group": 8, "dim": 80}, id="1-kv-head-of-8-dim-80"),
        pytest.param({"kv_heads": 3, "group": 1, "dim": 64}, id="no-groups-dim-64"),
        pytest.param({"kv_heads": 1, "group": 6, "dim": 256}, id="dim-256"),
    ],
)
def test_heads_dims_and_layouts(shape: dict[str, int], layout: str, impl: str, device: torch.device) -> None:
    check(make_problem(MIXED, device, layout=layout, **shape), impl, 1e-5)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype: torch.dtype, impl: str, device: torch.device) -> None:
    check(make_problem(MIXED, device, dtype=dtype, dim=64), impl, 2e-2)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fp8_cache_with_scales(dtype: torch.dtype, impl: str, device: torch.device) -> None:
    problem = make_problem(MIXED, device, dtype=dtype, cache_dtype=torch.float8_e4m3fn, dim=64)
    check(problem, impl, 1e-5 if dtype == torch.float32 else 2e-2, k_scale=0.75, v_scale=1.5)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("heads", [1, 2], ids=["one-scale", "a-scale-a-head"])
def test_fp8_query_and_scales_on_the_device(heads: int, impl: str, device: torch.device) -> None:
    """As vLLM's layers hold them: tensors of one element, or of one for each KV head."""
    problem = make_problem(
        MIXED, device, cache_dtype=torch.float8_e4m3fn, kv_heads=2, group=3, dim=32, layout="heads-first"
    )
    problem.q = problem.q.to(torch.float8_e4m3fn)
    scales = torch.tensor([[1.5, 0.75], [0.5, 2.0], [1.25, 0.25]], device=device)[:, :heads]
    names = ("q_scale", "k_scale", "v_scale")
    shape = () if heads == 1 else (2,)
    # The output is bf16.
    check(problem, impl, 2e-2, **{k: v.reshape(shape) for k, v in zip(names, scales, strict=True)})


@pytest.fixture
def many_processors(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Under the interpreter too, requests are worth splitting (a GPU has its own number)."""
    if device.type == "cpu":
        monkeypatch.setattr(kernel, "device_limits", lambda _: (12, 0))


@pytest.mark.usefixtures("many_processors")
@pytest.mark.parametrize(
    ("parts", "prefixes"),
    [
        ([("random", 5, 2)], [0]),
        ([("random", 5, 2)], [31]),
        ([("random", 5, 0)], [200]),
        ([("chain", 34, 1)], [33]),
        ([("random", 5, 2), ("chain", 3, 1)], [5, 300]),
        ([("random", 5, 0), ("prefill", 4, 0), ("chain", 3, 0)], [260, 100, 3]),
    ],
    ids=["no-prefix", "one-tile", "seven-tiles", "tail-in-two-tiles", "uneven", "uneven-prefill"],
)
@pytest.mark.parametrize("page", [16, 48])
def test_splits(parts: list[Part], prefixes: list[int], page: int, device: torch.device) -> None:
    check(make_problem(parts, device, prefixes=prefixes, page=page, group=1), "triton", 1e-5)


@pytest.mark.usefixtures("many_processors")
def test_splits_without_anything_to_see(device: torch.device) -> None:
    """Null blocks and rows without their own bit, in a request that is split."""
    problem = make_problem([("random", 9, 1)], device, prefixes=[150], group=1)
    problem.table[0, 2:7] = 0
    parents = problem.step.parents.clone()
    parents[0, 5] = 2**31 - 1
    out = problem.run("triton", ancestor_words=ancestor_mask_words(parents, problem.step.num_nodes))
    problem.table = torch.cat((problem.table[:, :2], problem.table[:, 7:]), dim=1)
    problem.prefixes = [150 - 5 * 16]
    torch.testing.assert_close(out[:5].double().cpu(), problem.expected()[:5], rtol=1e-5, atol=1e-5)
    assert (out[5:10] == 0).all()
    problem.table.zero_()
    assert (problem.run("triton")[:10] == 0).all()


@pytest.mark.parametrize("slots", [80, 132, 188])
@pytest.mark.parametrize("tiles", [1, 4, 8, 28, 72, 200])
@pytest.mark.parametrize("requests", [1, 2, 3, 8, 256])
def test_split_counts_keep_the_grid_small(requests: int, tiles: int, slots: int) -> None:
    shares, splits = split_counts(requests, tiles, slots)
    assert 1 <= splits <= shares <= MAX_SPLITS
    assert splits == 1 or requests * splits * tiles <= max(4 * slots, 16 * tiles)
    if requests == 1 and tiles * MAX_SPLITS >= slots >= tiles:
        assert tiles * shares >= 0.5 * slots


LONG = [
    pytest.param([("random", 33, 0)], [8192], {}, id="8192"),
    pytest.param([("random", 129, 4)], [70_001], {"kv_heads": 2, "page": 784}, id="70001-page-784"),
    pytest.param([("random", 33, 0), ("chain", 5, 2)], [262_144, 100], {"kv_heads": 1}, id="262144-and-100"),
]


@pytest.mark.parametrize(("parts", "prefixes", "shape"), LONG)
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_long_prefixes(
    parts: list[Part], prefixes: list[int], shape: dict, cache_dtype: torch.dtype, device: torch.device
) -> None:
    """Against the fp32 reference, whose own test is the float64 one above."""
    if device.type == "cpu":
        pytest.skip("hours under the interpreter")
    shape = {"kv_heads": 4, "group": 6, "dim": 256, "page": 64, "layout": "heads-first", **shape}
    problem = make_problem(
        parts, device, prefixes=prefixes, dtype=torch.bfloat16, cache_dtype=cache_dtype, **shape
    )
    scales = {} if cache_dtype == torch.bfloat16 else {"k_scale": 0.5, "v_scale": 2.0}
    for factor, tolerance in ((1, 1e-2), (16, 4e-2)):  # with 16 a few positions of the many decide
        problem.q *= factor
        out, expected = problem.run("triton", **scales), problem.run("torch", **scales)
        torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("impl", IMPLS)
def test_softcap(impl: str, device: torch.device) -> None:
    problem = make_problem(MIXED, device)
    problem.q *= 8  # scores well into the bend
    check(problem, impl, 1e-5, softcap=2.5)


@pytest.mark.parametrize("impl", IMPLS)
def test_large_scores_do_not_overflow(impl: str, device: torch.device) -> None:
    problem = make_problem(MIXED, device)
    problem.q *= 1000
    check(problem, impl, 1e-3)  # scores of about 1000 carry an absolute error of 1e-4


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("parent", [-1, 9, 10, 2**31 - 1, -(2**31)])
def test_nodes_after_a_hostile_parent_are_zero(parent: int, impl: str, device: torch.device) -> None:
    """Node 9 of 19 names an impossible parent: its mask row and all later ones are empty."""
    problem = make_problem([("random", 19, 0), ("random", 5, 0)], device)
    parents = problem.step.parents.clone()
    parents[0, 9] = parent
    words = ancestor_mask_words(parents, problem.step.num_nodes)
    out, expected = problem.run(impl, ancestor_words=words).double().cpu(), problem.expected()
    torch.testing.assert_close(out[:9], expected[:9], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out[19:24], expected[19:24], rtol=1e-5, atol=1e-5)
    assert (out[9:19] == 0).all()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("block", [0, -1, -(2**31), 2**31 - 1])
def test_blocks_out_of_range_are_invisible(block: int, impl: str, device: torch.device) -> None:
    """One page of the prefix has an id that must not be followed: it counts as not there."""
    problem = make_problem([("random", 9, 0)], device, prefixes=[40])
    problem.table[0, 1] = block
    out = problem.run(impl)
    # Without that page the prefix is positions 0..15 and 32..39: the same rows, one page less.
    problem.table = torch.cat((problem.table[:, :1], problem.table[:, 2:]), dim=1)
    problem.prefixes = [24]
    torch.testing.assert_close(out[:9].double().cpu(), problem.expected()[:9], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_row_that_sees_nothing_is_zero(impl: str, device: torch.device) -> None:
    """A table of null blocks, as in a warm-up step."""
    problem = make_problem([("random", 9, 0)], device, prefixes=[40])
    problem.table.zero_()
    assert (problem.run(impl)[:9] == 0).all()


def test_causal_rows_are_a_chain() -> None:
    """The reference can compute prefill chunks of the same step as well; trees are not affected."""
    cpu = torch.device("cpu")
    parts = [("prefill", 7, 0), ("random", 9, 2), ("prefill", 1, 0)]
    problem = make_problem(parts, cpu, prefixes=[20, 5, 33])
    out = problem.run("torch", causal_rows=True)
    expected = problem.expected()
    for row in range(7):
        expected[row] = problem.attend(0, row, list(range(row + 1)))
    expected[18] = problem.attend(2, 0, [0])
    rows = [*range(18), 18]
    torch.testing.assert_close(out[rows].double(), expected[rows], rtol=1e-5, atol=1e-5)
    assert out[19:].isnan().all()


def test_wrong_arguments_are_named(device: torch.device) -> None:
    problem = make_problem([("chain", 5, 0)], device)
    with pytest.raises(ValueError, match="causal_rows=True needs the PyTorch reference"):
        problem.run("triton", causal_rows=True)
    problem.v_cache = problem.v_cache.bfloat16()
    with pytest.raises(ValueError, match="v_cache has dtype torch.bfloat16"):
        problem.run("torch")
    problem.q = problem.q.repeat(1, 2, 1)[:, :3]
    problem.k_cache = problem.k_cache.repeat(1, 1, 2, 1)
    with pytest.raises(ValueError, match="q has 3 heads; it must have a multiple of the 2 heads of k_cache"):
        problem.run("torch")
