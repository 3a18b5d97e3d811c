# SPDX-License-Identifier: Apache-2.0
"""GDN over trees against a sequential replay in float64: per node, the recurrence from its parent's state."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.gdn_problem import SLOTS, Problem, make_problem
from tests.kernels.steps import BATCHES, Part, poison, same_bits
from vllm_weaver.kernels.ancestors import ancestor_mask_words
from vllm_weaver.kernels.gdn_tree import GdnStash, gdn_tree_verify

IMPLS = ("torch", "triton")
MIXED = BATCHES["batch-4-mixed"]


def check(problem: Problem, impl: str, tolerance: float, **how: object) -> None:
    """Outputs and stash equal the replay, and nothing else was written."""
    out, stash = problem.verify(impl, **how)
    step = problem.step
    expected, _ = problem.replay()
    nodes, foreign = step.node_rows(), step.foreign_rows()
    torch.testing.assert_close(out[nodes].double().cpu(), expected[nodes], rtol=tolerance, atol=tolerance)
    assert (out[step.placeholder_rows()] == 0).all()
    assert same_bits(out[foreign], poison(*out.shape, device=out.device, dtype=out.dtype)[foreign])
    for buffer in (stash.c, stash.k, stash.u):
        assert buffer[nodes].isfinite().all()
        others = [row for row in range(len(buffer)) if row not in set(nodes)]
        assert same_bits(buffer[others], torch.full_like(buffer, torch.nan)[others])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("parts", BATCHES.values(), ids=BATCHES.keys())
def test_outputs_equal_the_replay(parts: list[Part], impl: str, device: torch.device) -> None:
    check(make_problem(parts, device), impl, 5e-5)


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
    check(make_problem(MIXED, device, **shape), impl, 5e-5, layout=layout)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=["fp32-state", "bf16-state"])
def test_bf16_activations(state_dtype: torch.dtype, impl: str, device: torch.device) -> None:
    """Inputs and outputs rounded to bf16, arithmetic in fp32: the error is that of the output's rounding."""
    check(make_problem(MIXED, device, dtype=torch.bfloat16, state_dtype=state_dtype), impl, 8e-3)


@pytest.mark.parametrize("impl", IMPLS)
def test_bf16_stash(impl: str, device: torch.device) -> None:
    check(make_problem(MIXED, device), impl, 4e-2, stash_dtype=torch.bfloat16)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("slot", [0, -1, -(2**31), SLOTS, 2**31 - 1])
def test_null_slots_count_as_a_zero_state(slot: int, impl: str, device: torch.device) -> None:
    check(make_problem([("random", 5, 0), ("chain", 3, 1)], device, slots=[2, slot]), impl, 5e-5)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("gate", [-90.0, 19.9, 20.1, 90.0])
def test_extreme_decay(gate: float, impl: str, device: torch.device) -> None:
    """Nearly no decay, both sides of softplus' threshold, and decay that underflows."""
    problem = make_problem([("random", 19, 0)], device)
    problem.a.fill_(gate)
    problem.dt_bias.zero_()
    check(problem, impl, 5e-5)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("parent", [-1, 9, 10, 2**31 - 1, -(2**31)])
def test_nodes_after_a_hostile_parent_are_zero(parent: int, impl: str, device: torch.device) -> None:
    """Node 9 of 19 names an impossible parent: its mask row and all later ones are empty."""
    problem = make_problem([("random", 19, 0), ("random", 5, 0)], device)
    step = problem.step
    parents = step.parents.clone()
    parents[0, 9] = parent
    expected, _ = problem.replay()
    out, stash = problem.verify(impl, ancestors=ancestor_mask_words(parents, step.num_nodes))
    torch.testing.assert_close(out[:9].double().cpu(), expected[:9], rtol=5e-5, atol=5e-5)
    torch.testing.assert_close(out[19:24].double().cpu(), expected[19:24], rtol=5e-5, atol=5e-5)
    assert (out[9:19] == 0).all()
    assert (stash.u[9:19] == 0).all()
    assert (stash.c[9:19] == 0).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 3, "key_heads": 2}, "multiple of the 2 heads"),
        ({"state_layout": "kk"}, "state_layout is 'kk'"),
        ({"impl": "cuda"}, "impl is 'cuda'"),
        ({"stash_rows": 2}, "the step has 8 rows; the stash was allocated for 2"),
        ({"num_nodes": torch.zeros(1, dtype=torch.int64)}, "num_nodes has dtype torch.int64"),
        ({"ancestors": torch.zeros(1, 7, 2, dtype=torch.int32)}, r"ancestors has shape \[1, 7, 2\]"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_wrong_arguments_are_named(change: dict[str, object], message: str) -> None:
    sizes = {key: change.pop(key) for key in ("heads", "key_heads") if key in change}
    problem = make_problem([("chain", 5, 0)], torch.device("cpu"), **{"heads": 2, "key_heads": 1, **sizes})
    stash_rows = change.pop("stash_rows", 8)
    stash = GdnStash.allocate(stash_rows, 1, 16, problem.v.shape[1], 24, device=torch.device("cpu"))
    arguments = {
        "num_nodes": problem.step.num_nodes, "ancestors": problem.step.ancestors, "state_layout": "kv",
        "impl": "torch", "out": torch.empty(problem.v.shape), "stash": stash, **change,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        gdn_tree_verify(
            problem.q, problem.k, problem.v, problem.a, problem.b, problem.A_log, problem.dt_bias,
            problem.state, problem.slot_tensor, problem.step.query_start_loc, **arguments,
        )  # fmt: skip
