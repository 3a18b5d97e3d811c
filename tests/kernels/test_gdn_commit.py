# SPDX-License-Identifier: Apache-2.0
"""GDN commit: the state of an accepted leaf equals feeding the path's tokens one by one."""

from __future__ import annotations

import random

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
from vllm_weaver.kernels.gdn_commit import gdn_tree_commit
from vllm_weaver.kernels.gdn_tree import GdnStash

IMPLS = ("torch", "triton")
SENTINEL = 7.0
MIXED = BATCHES["batch-4-mixed"]


def commit(
    problem: Problem, stash: GdnStash, path: Tensor, num_path: Tensor, impl: str, layout: str = "kv"
) -> Tensor:
    """The state after the commit, as [slots, HV, K, V]."""
    state = problem.state_in(layout).nan_to_num(SENTINEL)  # NaN would hide an update of an unused slot
    gdn_tree_commit(
        stash, state, problem.slot_tensor, problem.step.query_start_loc, path, num_path,
        num_nodes=problem.step.num_nodes, state_layout=layout, impl=impl,
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
        pytest.param({"key_heads": 2, "heads": 6, "k_dim": 16, "v_dim": 16}, id="2-of-6-heads"),
        pytest.param({"key_heads": 3, "heads": 3, "k_dim": 20, "v_dim": 40}, id="odd-dims-two-value-tiles"),
        pytest.param({"key_heads": 1, "heads": 1, "k_dim": 8, "v_dim": 7}, id="dims-below-a-tile"),
    ],
)
def test_heads_dims_and_layouts(shape: dict[str, int], layout: str, impl: str, device: torch.device) -> None:
    problem = make_problem(MIXED, device, **shape)
    paths, path, num_path = problem.step.random_paths(random.Random(2))
    _, stash = problem.verify(impl, layout=layout)
    check(problem, paths, commit(problem, stash, path, num_path, impl, layout), 5e-5)


@pytest.mark.parametrize("impl", IMPLS)
def test_bf16_state(impl: str, device: torch.device) -> None:
    problem = make_problem(MIXED, device, dtype=torch.bfloat16, state_dtype=torch.bfloat16)
    paths, path, num_path = problem.step.random_paths(random.Random(3))
    _, stash = problem.verify(impl, stash_dtype=torch.bfloat16)
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
