# SPDX-License-Identifier: Apache-2.0
"""Convolution over trees and its commit, against windows gathered along every node's own path in float64."""

from __future__ import annotations

import random
from dataclasses import dataclass

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
    poison,
    same_bits,
)
from tests.trees import ancestors
from vllm_weaver.kernels.gdn_buffers import LayerTable
from vllm_weaver.kernels.tree_conv import tree_conv, tree_conv_commit

IMPLS = ("torch", "triton")
SLOTS = 9
MIXED = BATCHES["batch-4-mixed"]


@dataclass
class Problem:
    """Inputs of one convolution for a step."""

    step: Step
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    state: Tensor
    slots: list[int]

    @property
    def width(self) -> int:
        return self.weight.shape[1]

    @property
    def slot_tensor(self) -> Tensor:
        """Slots int32 [R] as a strided view, as a column of vLLM's state index table is."""
        return torch.tensor([[slot, 1] for slot in self.slots], dtype=torch.int32, device=self.x.device)[:, 0]

    def history(self, r: int, path: list[int]) -> Tensor:
        """Inputs of request r in order: the W - 1 of its state, then those of the path's nodes. float64."""
        slot, past = self.slots[r], self.width - 1
        if 0 < slot < SLOTS:
            old = self.state[slot, :, :past].T.double().cpu()
        else:
            old = torch.zeros(past, self.x.shape[1], dtype=torch.float64)
        return torch.cat((old, self.x[[self.step.starts[r] + i for i in path]].double().cpu()))

    def run(self, impl: str, activation: str | None = "silu", parents: Tensor | None = None) -> Tensor:
        """The kernel's output in a poisoned buffer whose channels are not dense."""
        out = poison(*self.x.shape, 2, device=self.x.device, dtype=self.x.dtype)[..., 0]
        before = self.state.clone()
        tree_conv(
            self.x, self.weight, self.bias, self.state, self.slot_tensor, self.step.query_start_loc,
            self.step.num_nodes, self.step.parents if parents is None else parents,
            activation=activation, out=out, impl=impl,
        )  # fmt: skip
        assert same_bits(self.state, before), "the convolution must not write the state"
        return out.contiguous()

    def expected(self, activation: str | None = "silu") -> Tensor:
        """Float64 outputs [T, C], zero where there is no node."""
        out = torch.zeros(self.x.shape, dtype=torch.float64)
        for r, tree in enumerate(self.step.trees):
            for i in range(len(tree or [])):
                window = self.history(r, ancestors(tree, i))[-self.width :]
                total = (window * self.weight.double().cpu().T).sum(0)
                if self.bias is not None:
                    total = total + self.bias.double().cpu()
                out[self.step.starts[r] + i] = total * total.sigmoid() if activation == "silu" else total
        return out


def make_problem(
    parts: list[Part],
    device: torch.device,
    *,
    channels: int = 70,
    width: int = 4,
    columns: int = 3,
    bias: bool = True,
    dtype: torch.dtype = torch.float32,
    slots: list[int] | None = None,
) -> Problem:
    """Random inputs; rows that are no node, unused slots and state columns from W - 1 on are NaN."""
    torch.manual_seed(0)
    step = make_step(parts, device)
    x = torch.randn(channels, step.num_rows).T
    x[step.foreign_rows() + step.placeholder_rows()] = torch.nan
    slots = slots if slots is not None else [1 + 2 * r for r in range(len(parts))]
    state = torch.full((SLOTS, columns, channels), torch.nan).transpose(1, 2)  # dense along channels
    for slot in slots:
        if 0 < slot < SLOTS:
            state[slot, :, : width - 1] = torch.randn(channels, width - 1)
    weight = torch.randn(width, channels).T
    to = {"device": device, "dtype": dtype}
    offset = torch.randn(channels).to(**to) if bias else None
    return Problem(step, x.to(**to), weight.to(**to), offset, state.to(**to), slots)


def check(problem: Problem, impl: str, tolerance: float, activation: str | None = "silu") -> None:
    """Outputs equal the windows, placeholders are zero, and no other row was written."""
    out, step = problem.run(impl, activation), problem.step
    nodes, foreign = step.node_rows(), step.foreign_rows()
    expected = problem.expected(activation)[nodes]
    torch.testing.assert_close(out[nodes].double().cpu(), expected, rtol=tolerance, atol=tolerance)
    assert (out[step.placeholder_rows()] == 0).all()
    assert same_bits(out[foreign], torch.full_like(out, torch.nan)[foreign])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("parts", BATCHES.values(), ids=BATCHES.keys())
def test_outputs_equal_the_windows(parts: list[Part], impl: str, device: torch.device) -> None:
    check(make_problem(parts, device), impl, 1e-5)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param({"width": 2, "columns": 1}, id="width-2"),
        pytest.param({"width": 3, "columns": 5, "bias": False}, id="width-3-wide-state-no-bias"),
        pytest.param({"width": 4, "columns": 36, "channels": 7}, id="state-widened-by-drafts"),
        pytest.param({"width": 5, "columns": 4, "channels": 129}, id="width-5"),
    ],
)
def test_widths_and_states(
    shape: dict[str, int], activation: str | None, impl: str, device: torch.device
) -> None:
    check(make_problem(MIXED, device, **shape), impl, 1e-5, activation)


@pytest.mark.parametrize("impl", IMPLS)
def test_bf16(impl: str, device: torch.device) -> None:
    check(make_problem(MIXED, device, dtype=torch.bfloat16), impl, 8e-3)


NULL_SLOTS = [0, -1, -(2**31), SLOTS, 2**31 - 1]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("slot", NULL_SLOTS)
def test_null_slots_count_as_a_zero_state(slot: int, impl: str, device: torch.device) -> None:
    check(make_problem([("random", 5, 0), ("chain", 3, 1)], device, slots=[2, slot]), impl, 1e-5)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("parent", [-1, 9, 10, 2**31 - 1, -(2**31)])
def test_nodes_after_a_hostile_parent_are_zero(parent: int, impl: str, device: torch.device) -> None:
    """Node 9 of 19 names an impossible parent: it and everything after it in that request is no node."""
    problem = make_problem([("random", 19, 0), ("random", 5, 0)], device)
    parents = problem.step.parents.clone()
    parents[0, 9] = parent
    out, expected = problem.run(impl, parents=parents).double().cpu(), problem.expected()
    torch.testing.assert_close(out[:9], expected[:9], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out[19:24], expected[19:24], rtol=1e-5, atol=1e-5)
    assert (out[9:19] == 0).all()


def check_commit(problem: Problem, paths: list[list[int]], path: Tensor, num_path: Tensor, impl: str) -> None:
    """Committed slots hold the path's last inputs exactly; everything else keeps its bits."""
    after, other = problem.state.clone(), problem.state.clone()
    layers = LayerTable.build([other, after], [torch.zeros_like(problem.slot_tensor), problem.slot_tensor])
    tree_conv_commit(
        torch.stack([torch.zeros_like(problem.x), problem.x]), layers, problem.step.query_start_loc, path,
        num_path, problem.width, num_nodes=problem.step.num_nodes, impl=impl,
    )  # fmt: skip
    assert same_bits(other, problem.state), "a layer without slots was written"
    expected = problem.state.clone()
    for r, slot in enumerate(problem.slots):
        if paths[r] and 0 < slot < SLOTS:
            last = problem.history(r, paths[r])[-(problem.width - 1) :]
            expected[slot, :, : problem.width - 1] = last.T.to(expected)
    assert same_bits(after, expected)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("parts", BATCHES.values(), ids=BATCHES.keys())
def test_commit_keeps_the_last_inputs(parts: list[Part], impl: str, device: torch.device) -> None:
    problem = make_problem(parts, device, columns=5)
    check_commit(problem, *problem.step.random_paths(random.Random(1)), impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("width", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("accepted", [1, 2, 3, 4, 9])
def test_commit_of_short_paths(accepted: int, width: int, impl: str, device: torch.device) -> None:
    """Paths shorter than the window keep the newest old columns."""
    problem = make_problem([("chain", 9, 0)], device, width=width, columns=width, channels=130)
    path = torch.full((1, problem.step.num_slots), -1, dtype=torch.int32)
    path[0, :accepted] = torch.arange(accepted)
    num_path = torch.tensor([accepted], dtype=torch.int32, device=device)
    check_commit(problem, [list(range(accepted))], path.to(device), num_path, impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("slot", NULL_SLOTS)
def test_null_slots_commit_nothing(slot: int, impl: str, device: torch.device) -> None:
    problem = make_problem([("random", 5, 0), ("chain", 3, 1)], device, slots=[2, slot])
    check_commit(problem, *problem.step.random_paths(random.Random(4)), impl)


@pytest.mark.parametrize("impl", IMPLS)
def test_commit_of_fp32_inputs_to_a_bf16_state(impl: str, device: torch.device) -> None:
    """Inputs that bf16 holds exactly: how the interpreter rounds is not what is tested."""
    problem = make_problem(MIXED, device)
    problem.x, problem.state = problem.x.bfloat16().float(), problem.state.bfloat16()
    check_commit(problem, *problem.step.random_paths(random.Random(5)), impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("path", "claimed", "usable"), HOSTILE_PATHS.values(), ids=HOSTILE_PATHS.keys())
def test_a_hostile_entry_ends_the_path(
    path: list[int], claimed: int, usable: int, impl: str, device: torch.device
) -> None:
    problem = make_problem(HOSTILE_PARTS, device)
    check_commit(problem, [path[:usable], [0, 1]], *hostile_path_tensors(path, claimed, problem.step), impl)


def test_wrong_arguments_are_named() -> None:
    problem = make_problem([("chain", 5, 0)], torch.device("cpu"), columns=2, width=3)
    problem.weight = torch.randn(70, 4)
    with pytest.raises(ValueError, match="conv_state has 2 columns and the convolution width 4"):
        problem.run("torch")
    problem.weight = torch.randn(69, 3)
    with pytest.raises(ValueError, match=r"weight has shape \[69, 3\]; it must be \[70, 3\]"):
        problem.run("torch")
    problem.weight = torch.randn(70, 3)
    with pytest.raises(ValueError, match="activation is 'relu'"):
        problem.run("torch", activation="relu")
