# SPDX-License-Identifier: Apache-2.0
"""GDN commit: the state of an accepted leaf equals feeding the path's tokens one by one."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.kernels.gdn_problem import SLOTS, Problem, make_problem
from tests.kernels.steps import (
    BATCHES,
    HOSTILE_PARTS,
    HOSTILE_PATHS,
    Part,
    hostile_path_tensors,
    same_bits,
)
from vllm_weaver.kernels.gdn_buffers import GdnStash, LayerTable
from vllm_weaver.kernels.gdn_commit import gdn_tree_commit

IMPLS = ("torch", "triton")
SENTINEL = 7.0
MIXED: list[Part] = [("random", 18, 1), ("prefill", 1, 0), ("chain", 3, 2)]


def stacked(*stashes: GdnStash) -> GdnStash:
    """Stashes of single layers as one of all layers."""
    return GdnStash(**{name: torch.stack([vars(s)[name] for s in stashes]) for name in vars(stashes[0])})


def commit(
    problem: Problem, stash: GdnStash, path: Tensor, num_path: Tensor, impl: str, layout: str = "kv"
) -> Tensor:
    """The state after the commit, as [slots, HV, K, V]."""
    state = problem.state_in(layout).nan_to_num(SENTINEL)  # NaN would hide an update of an unused slot
    gdn_tree_commit(
        stacked(stash), LayerTable.build([state], [problem.slot_tensor]), problem.step.query_start_loc, path,
        num_path, num_nodes=problem.step.num_nodes, state_layout=layout, impl=impl,
    )  # fmt: skip
    return state if layout == "kv" else state.transpose(-1, -2)


def check(problem: Problem, paths: list[list[int]], after: Tensor, tolerance: float) -> None:
    """Every committed slot holds its leaf's replayed state; all other slots keep their bits."""
    _, states = problem.replay()
    committed = {
        slot: states[r][paths[r][-1]] for r, slot in enumerate(problem.slots) if paths[r] and 0 < slot < SLOTS
    }
    for slot in range(SLOTS):
        if slot in committed:
            torch.testing.assert_close(
                after[slot].double().cpu(), committed[slot], rtol=tolerance, atol=tolerance
            )
        else:
            before = problem.state[slot].nan_to_num(SENTINEL)
            assert same_bits(after[slot].contiguous(), before), f"slot {slot} was written"


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("parts", BATCHES.values(), ids=BATCHES.keys())
def test_state_equals_the_replay(parts: list[Part], impl: str, device: torch.device) -> None:
    problem = make_problem(parts, device)
    paths, path, num_path = problem.step.random_paths(random.Random(1))
    _, stash = problem.verify("torch")
    check(problem, paths, commit(problem, stash, path, num_path, impl), 5e-5)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("layout", ["kv", "vk"])
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param({"key_heads": 2, "heads": 4, "k_dim": 16, "v_dim": 16}, id="2-of-4-heads"),
        pytest.param({"key_heads": 3, "heads": 3, "k_dim": 20, "v_dim": 40}, id="odd-dims-two-value-tiles"),
        pytest.param({"key_heads": 1, "heads": 1, "k_dim": 8, "v_dim": 7}, id="dims-below-a-tile"),
    ],
)
def test_heads_dims_and_layouts(shape: dict[str, int], layout: str, impl: str, device: torch.device) -> None:
    problem = make_problem(MIXED, device, **shape)
    paths, path, num_path = problem.step.random_paths(random.Random(2))
    _, stash = problem.verify("torch", layout=layout)
    check(problem, paths, commit(problem, stash, path, num_path, impl, layout), 5e-5)


@pytest.mark.parametrize("impl", IMPLS)
def test_bf16_state(impl: str, device: torch.device) -> None:
    problem = make_problem(MIXED, device, dtype=torch.bfloat16, state_dtype=torch.bfloat16)
    paths, path, num_path = problem.step.random_paths(random.Random(3))
    _, stash = problem.verify("torch")
    check(problem, paths, commit(problem, stash, path, num_path, impl), 4e-2)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("slot", [0, -1, -(2**31), SLOTS, 2**31 - 1])
def test_null_slots_commit_nothing(slot: int, impl: str, device: torch.device) -> None:
    problem = make_problem([("random", 5, 0), ("chain", 3, 1)], device, slots=[2, slot])
    paths, path, num_path = problem.step.random_paths(random.Random(4))
    _, stash = problem.verify("torch")
    check(problem, paths, commit(problem, stash, path, num_path, impl), 5e-5)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("path", "claimed", "usable"), HOSTILE_PATHS.values(), ids=HOSTILE_PATHS.keys())
def test_a_hostile_entry_ends_the_path(
    path: list[int], claimed: int, usable: int, impl: str, device: torch.device
) -> None:
    problem = make_problem(HOSTILE_PARTS, device)
    _, stash = problem.verify("torch")
    table, num_path = hostile_path_tensors(path, claimed, problem.step)
    after = commit(problem, stash, table, num_path, impl)
    check(problem, [path[:usable], [0, 1]], after, 5e-5)


@pytest.mark.parametrize("impl", IMPLS)
def test_layers_have_their_own_slots_and_states(impl: str, device: torch.device) -> None:
    """Two layers whose index columns lie in tables of different widths, longer than the step."""
    problems = [make_problem(MIXED, device, slots=[1 + r + 4 * x for r in range(3)], seed=x) for x in (0, 1)]
    problems[1] = replace(problems[1], step=problems[0].step)  # one step, seen by two layers
    step = problems[0].step
    problems[1].x = torch.where(problems[0].x.isnan(), torch.nan, problems[1].x.nan_to_num(0.5))
    paths, path, num_path = step.random_paths(random.Random(6))
    stash = stacked(*(problem.verify("torch")[1] for problem in problems))
    states = [problem.state_in("vk").nan_to_num(SENTINEL) for problem in problems]
    columns = [
        torch.tensor([[slot] * width for slot in (*problem.slots, 2)], dtype=torch.int32, device=device)[:, 0]
        for problem, width in zip(problems, (2, 3), strict=True)
    ]
    gdn_tree_commit(
        stash, LayerTable.build(states, columns), step.query_start_loc, path, num_path,
        num_nodes=step.num_nodes, state_layout="vk", impl=impl,
    )  # fmt: skip
    for problem, state in zip(problems, states, strict=True):
        check(problem, paths, state.transpose(-1, -2), 5e-5)


def test_tables_that_do_not_fit_are_named() -> None:
    column = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="0 states and 0 index columns"):
        LayerTable.build([], [])
    with pytest.raises(ValueError, match="layer 1's state"):
        LayerTable.build([torch.zeros(2, 3), torch.zeros(2, 4)], [column, column])
    with pytest.raises(ValueError, match="the step has 3 requests; the state indices were bound for 2"):
        LayerTable.build([torch.zeros(2, 3)], [column]).check_requests(3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_drift_over_2000_commits() -> None:
    """Verify and commit of chains against float64. (vLLM's own kernel beside it: `tests/test_bench.py`.)"""
    problem = make_problem(
        [("chain", 3, 0)], torch.device("cuda"), key_heads=1, heads=2, k_dim=128, v_dim=128,
        dtype=torch.bfloat16,
    )  # fmt: skip
    problem.A_log.fill_(-5.0)  # slow decay: errors stay
    path, num_path = torch.full((1, 5), -1, dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    path[0, :3] = torch.arange(3)
    path, num_path = path.cuda(), num_path.cuda()
    slot = problem.slots[0]
    true, plain = problem.state[slot].double(), problem.state[slot].clone()
    for _ in range(2000):
        problem.x.copy_(torch.randn_like(problem.x))
        problem.a.copy_(torch.randn_like(problem.a))
        problem.b.copy_(torch.randn_like(problem.b))
        _, stash = problem.verify("triton")
        problem.state = commit(problem, stash, path, num_path, "triton")
        for row in range(3):
            true, plain = (problem.advance(s, row)[0] for s in (true, plain))
    ours, sequential = (
        ((s.double() - true).norm() / true.norm()).item() for s in (problem.state[slot], plain)
    )
    print(f"relative error of the state: {ours:.2e}; token by token in fp32: {sequential:.2e}")
    assert ours < 1e-5
