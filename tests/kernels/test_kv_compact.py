# SPDX-License-Identifier: Apache-2.0
"""KV compaction: every row of a path ends where a chain would have written it, and no other byte changes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.steps import (
    BATCHES,
    HOSTILE_PARTS,
    HOSTILE_PATHS,
    Part,
    Step,
    hostile_path_tensors,
    make_step,
    same_bits,
)
from vllm_weaver.kernels.kv_compact import KvCompactPlan, kv_compact

IMPLS = ("torch", "triton")
MIXED = BATCHES["batch-4-mixed"]
BLOCKS = 64


def random_bits(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Every bit pattern of the dtype, NaN included."""
    size = torch.empty(0, dtype=dtype).element_size()
    return torch.randint(0, 256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8).to(device).view(dtype)


def split_kv(layers: int, page: int, heads: int, dim: int, **kind: Any) -> list[Tensor]:
    """K and V views of caches [2, blocks, page, heads, dim]."""
    caches = random_bits(layers, 2, BLOCKS, page, heads, dim, **kind)
    return [view for layer in caches for view in layer]


def interleaved_kv(layers: int, page: int, heads: int, dim: int, **kind: Any) -> list[Tensor]:
    """K and V views of caches [blocks, 2, page, heads, dim]."""
    caches = random_bits(layers, BLOCKS, 2, page, heads, dim, **kind)
    return [layer[:, i] for layer in caches for i in range(2)]


def heads_first(layers: int, page: int, heads: int, dim: int, **kind: Any) -> list[Tensor]:
    """Views of caches [blocks, heads, page, dim]: the rows of a position are `page` apart."""
    return [layer.transpose(1, 2) for layer in random_bits(layers, BLOCKS, heads, page, dim, **kind)]


def transposed_rows(layers: int, page: int, heads: int, dim: int, **kind: Any) -> list[Tensor]:
    """Views of caches [blocks, page, dim, heads]: dense rows whose last dimension is not."""
    return [layer.transpose(2, 3) for layer in random_bits(layers, BLOCKS, page, dim, heads, **kind)]


def every_other(layers: int, page: int, heads: int, dim: int, **kind: Any) -> list[Tensor]:
    """Views of every second element: rows that are not dense at all."""
    return [layer[..., 0] for layer in random_bits(layers, BLOCKS, page, heads, dim, 2, **kind)]


LAYOUTS = {f.__name__: f for f in (split_kv, interleaved_kv, heads_first, transposed_rows, every_other)}


def block_tables(step: Step, base: list[int], page: int, rng: random.Random) -> Tensor:
    """int32 [R, M]: distinct blocks that cover every request's rows, then ids nobody may follow."""
    free = list(range(1, BLOCKS))
    rng.shuffle(free)
    used = [-(-(b + step.num_slots) // page) for b in base]
    width = max(used) + 1
    rows = [[free.pop() for _ in range(n)] for n in used]
    return torch.tensor([row + [2**31 - 1] * (width - len(row)) for row in rows], dtype=torch.int32)


def expected_after(
    caches: list[Tensor], table: Tensor, base: list[int], paths: list[list[int]], page: int
) -> list[Tensor]:
    """The caches after moving row by row, read from a snapshot."""
    result = [cache.clone() for cache in caches]
    for r, path in enumerate(paths):
        for d, node in enumerate(path):
            places = [divmod(base[r] + x, page) for x in (node, d)]
            blocks = [int(table[r, column]) for column, _ in places]
            if all(0 < block < BLOCKS for block in blocks):
                for new, old in zip(result, caches, strict=True):
                    new[blocks[1], places[1][1]] = old[blocks[0], places[0][1]]
    return result


def check(
    caches: list[Tensor], table: Tensor, base: list[int], step: Step, paths: list[list[int]], path: Tensor,
    num_path: Tensor, impl: str, base_dtype: torch.dtype = torch.int32,
) -> None:  # fmt: skip
    device = path.device
    expected = expected_after(caches, table, base, paths, caches[0].shape[1])
    plan = KvCompactPlan.build(caches, [table.to(device)] * len(caches))
    base_tensor = torch.tensor(base, dtype=base_dtype, device=device)
    kv_compact(plan, base_tensor, path, num_path, num_nodes=step.num_nodes, impl=impl)
    for i, (got, wanted) in enumerate(zip(caches, expected, strict=True)):
        assert same_bits(got, wanted), f"cache {i} differs"


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("parts", BATCHES.values(), ids=BATCHES.keys())
def test_paths_become_chains(parts: list[Part], impl: str, device: torch.device) -> None:
    rng = random.Random(3)
    step = make_step(parts, device)
    base = [rng.randrange(40) for _ in parts]
    caches = split_kv(1, 16, 1, 8, dtype=torch.float32, device=device)
    check(caches, block_tables(step, base, 16, rng), base, step, *step.random_paths(rng), impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("page", "heads", "dim"), [(16, 3, 20), (32, 1, 7)], ids=["page-16", "page-32-odd-row"]
)
def test_layouts_and_dtypes(
    page: int, heads: int, dim: int, layout: str, dtype: torch.dtype, impl: str, device: torch.device
) -> None:
    rng = random.Random(5)
    step = make_step(MIXED, device)
    base = [0, 3, page - 1, 70]
    caches = LAYOUTS[layout](2, page, heads, dim, dtype=dtype, device=device)
    table = block_tables(step, base, page, rng)
    check(caches, table, base, step, *step.random_paths(rng), impl, base_dtype=torch.int64)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("block", [0, -1, BLOCKS, 2**31 - 1, -(2**31)])
def test_null_and_foreign_blocks_are_left_alone(block: int, impl: str, device: torch.device) -> None:
    """A path that crosses a page whose id must not be followed: what lies elsewhere still moves."""
    step = make_step([("chain", 40, 0)], device)
    table = torch.tensor([[5, block, 7, 9, 0]], dtype=torch.int32)
    nodes = [0, 3, 9, 20, 21, 30, 39]
    path = torch.tensor([nodes + [-1] * (step.num_slots - len(nodes))], dtype=torch.int32, device=device)
    num_path = torch.tensor([len(nodes)], dtype=torch.int32, device=device)
    caches = split_kv(1, 16, 2, 8, dtype=torch.bfloat16, device=device)
    check(caches, table, [10], step, [nodes], path, num_path, impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("base", [-1, -100, 60, 2**31 - 2, 2**40])
def test_positions_outside_the_table_are_left_alone(base: int, impl: str, device: torch.device) -> None:
    step = make_step([("chain", 6, 0)], device)
    path = torch.tensor([[0, 2, 5] + [-1] * (step.num_slots - 3)], dtype=torch.int32, device=device)
    caches = split_kv(1, 16, 1, 8, dtype=torch.float32, device=device)
    expected = [cache.clone() for cache in caches]
    table = torch.tensor([[1, 2, 3, 4]], dtype=torch.int32, device=device)
    kv_compact(
        KvCompactPlan.build(caches, [table] * 2), torch.tensor([base], device=device), path,
        torch.tensor([3], dtype=torch.int32, device=device), num_nodes=step.num_nodes, impl=impl,
    )  # fmt: skip
    # Only base 60 and -1 have both ends of a move inside positions 0..63.
    for got, wanted in zip(caches, expected, strict=True):
        if base == 60:
            wanted[4, 13] = wanted[4, 14]
        elif base == -1:
            wanted[1, 0], wanted[1, 1] = wanted[1, 1].clone(), wanted[1, 4].clone()
        assert same_bits(got, wanted)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("path", "claimed", "usable"), HOSTILE_PATHS.values(), ids=HOSTILE_PATHS.keys())
def test_a_hostile_entry_ends_the_path(
    path: list[int], claimed: int, usable: int, impl: str, device: torch.device
) -> None:
    step = make_step(HOSTILE_PARTS, device)
    base = [13, 30]
    table = block_tables(step, base, 16, random.Random(6))
    caches = split_kv(1, 16, 1, 8, dtype=torch.float32, device=device)
    tensors = hostile_path_tensors(path, claimed, step)
    check(caches, table, base, step, [path[:usable], [0, 1]], *tensors, impl)


@pytest.mark.parametrize(
    ("layout", "dim", "dtype", "word", "outer", "inner"),
    [
        ("split_kv", 20, torch.float32, 8, 1, 30),
        ("split_kv", 7, torch.bfloat16, 2, 1, 21),
        ("heads_first", 8, torch.bfloat16, 8, 3, 2),
        ("transposed_rows", 8, torch.float32, 8, 1, 12),
        ("every_other", 7, torch.float32, 4, 1, 21),
    ],
)
def test_plan_merges_rows_into_wide_words(
    layout: str, dim: int, dtype: torch.dtype, word: int, outer: int, inner: int
) -> None:
    caches = LAYOUTS[layout](2, 16, 3, dim, dtype=dtype, device=torch.device("cpu"))
    plan = KvCompactPlan.build(caches, [torch.zeros(1, 1, dtype=torch.int32)] * len(caches))
    assert (plan.word, plan.outer, plan.inner) == (word, outer, inner)


@pytest.mark.parametrize("impl", IMPLS)
def test_groups_have_block_tables_of_their_own(impl: str, device: torch.device) -> None:
    """Layers of three groups in one call: tables of different widths, with more rows than requests."""
    rng = random.Random(8)
    step = make_step(MIXED, device)
    base = [0, 3, 15, 70]
    paths, path, num_path = step.random_paths(rng)
    caches = split_kv(3, 16, 2, 8, dtype=torch.bfloat16, device=device)
    tables = [block_tables(step, base, 16, rng) for _ in range(3)]
    tables = [torch.nn.functional.pad(t, (0, i, 0, i), value=-1) for i, t in enumerate(tables)]
    expected = [
        after
        for i, table in enumerate(tables)
        for after in expected_after(caches[2 * i : 2 * i + 2], table, base, paths, 16)
    ]
    plan = KvCompactPlan.build(caches, [tables[i // 2].to(device) for i in range(6)])
    kv_compact(plan, torch.tensor(base, device=device), path, num_path, num_nodes=step.num_nodes, impl=impl)
    for i, (got, wanted) in enumerate(zip(caches, expected, strict=True)):
        assert same_bits(got, wanted), f"cache {i} differs"


def test_arguments_that_do_not_fit_are_named() -> None:
    one, table = torch.zeros(4, 16, 2, 8), torch.zeros(1, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match="no cache"):
        KvCompactPlan.build([], [])
    with pytest.raises(ValueError, match=r"cache 0 has shape \[4, 16\]"):
        KvCompactPlan.build([one[:, :, 0, 0]], [table])
    with pytest.raises(ValueError, match=r"cache 1 \(shape, strides, dtype, device\) is"):
        KvCompactPlan.build([one, one.bfloat16()], [table] * 2)
    with pytest.raises(ValueError, match="may have two strides at most"):
        KvCompactPlan.build([torch.zeros(4, 16, 4, 6, 8)[:, :, ::2, ::2, ::2]], [table])
    with pytest.raises(ValueError, match="1 block tables for 2 caches"):
        KvCompactPlan.build([one, one], [table])
    with pytest.raises(ValueError, match="block_table has dtype torch.int64"):
        KvCompactPlan.build([one], [table.long()])
    two = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="2 requests, but a block table of the plan has 1 rows"):
        kv_compact(KvCompactPlan.build([one], [table]), two, two[:, None], two, num_nodes=two)
