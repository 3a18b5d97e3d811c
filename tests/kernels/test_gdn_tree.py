# SPDX-License-Identifier: Apache-2.0
"""GDN over trees against a sequential replay in float64: per node, the recurrence from its parent's state."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels.gdn_problem import SLOTS, Problem, make_problem
from tests.kernels.steps import BATCHES, Part, poison, same_bits
from vllm_weaver.kernels.ancestors import ancestor_mask_words
from vllm_weaver.kernels.gdn_buffers import GdnScratch, GdnShape, GdnStash
from vllm_weaver.kernels.gdn_tree import GdnTuning, gdn_tree_verify, gdn_tree_verify_reference
from vllm_weaver.kernels.tree_conv import tree_conv

IMPLS = ("torch", "triton")
MIXED: list[Part] = [("random", 18, 1), ("prefill", 1, 0), ("chain", 3, 2)]


def check(problem: Problem, impl: str, tolerance: float, **how: object) -> None:
    """Outputs and stash equal the replay, and nothing else was written."""
    out, stash = problem.verify(impl, **how)
    step = problem.step
    expected, _ = problem.replay()
    nodes, foreign = step.node_rows(), step.foreign_rows()
    torch.testing.assert_close(out[nodes].double().cpu(), expected[nodes], rtol=tolerance, atol=tolerance)
    assert (out[step.placeholder_rows()] == 0).all()
    assert same_bits(out[foreign], poison(*out.shape, device=out.device, dtype=out.dtype)[foreign])
    for buffer in vars(stash).values():
        assert buffer[nodes].isfinite().all()
        others = [row for row in range(len(buffer)) if row not in set(nodes)]
        assert same_bits(buffer[others], torch.full_like(buffer, torch.nan)[others])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("parts", BATCHES.values(), ids=BATCHES.keys())
def test_outputs_equal_the_replay(parts: list[Part], impl: str, device: torch.device) -> None:
    large = parts[0][1] > 60
    if (
        large
        and impl == "triton"
        and device.type == "cpu"
        and parts[0][:2] not in (("random", 65), ("chain", 129))
    ):
        pytest.skip("seconds under the interpreter, and what differs is only the tree's shape")
    check(make_problem(parts, device, heads=1 if large else 2), impl, 5e-5)


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
    check(make_problem(MIXED, device, **shape), impl, 5e-5, layout=layout)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=["fp32-state", "bf16-state"])
def test_bf16_activations(state_dtype: torch.dtype, impl: str, device: torch.device) -> None:
    """Inputs and outputs rounded to bf16, arithmetic in fp32: the error is that of the output's rounding."""
    check(make_problem(MIXED, device, dtype=torch.bfloat16, state_dtype=state_dtype), impl, 8e-3)


@pytest.mark.parametrize("impl", IMPLS)
def test_inputs_go_through_the_convolution(impl: str, device: torch.device) -> None:
    """Equal to the convolution (see `test_tree_conv`) and then a layer without one."""
    problem = make_problem(MIXED, device, key_heads=1, heads=3, v_dim=12)
    problem.weight, problem.activation = torch.randn_like(problem.weight), "silu"
    problem.bias = torch.randn_like(problem.weight[:, 0])
    step, mixed = problem.step, torch.zeros_like(problem.x)
    tree_conv(
        problem.x, problem.weight, problem.bias, problem.conv_state, problem.slot_tensor,
        step.query_start_loc, step.num_nodes, step.parents, activation="silu", out=mixed, impl="torch",
    )  # fmt: skip
    identity = make_problem(MIXED, device, key_heads=1, heads=3, v_dim=12)
    expected, _ = replace(identity, x=mixed).replay()
    out, stash = problem.verify(impl)
    nodes = step.node_rows()
    torch.testing.assert_close(out[nodes].double().cpu(), expected[nodes], rtol=5e-5, atol=5e-5)
    assert same_bits(stash.inputs[nodes], problem.x[nodes])


@pytest.mark.parametrize(
    ("nodes", "tile", "pull"),
    [(1, 32, 32), (2, 16, 32), (17, 16, 32), (33, 32, 32), (34, 32, 64), (50, 16, 64), (70, 32, 16)],
)
def test_tile_sizes(nodes: int, tile: int, pull: int, device: torch.device) -> None:
    """Around the edges of tiles, which start at the root's children."""
    problem = make_problem([("random", nodes, 3)], device, heads=1)
    check(problem, "triton", 5e-5, tuning=GdnTuning(tile=tile, pull=pull, block_v=32))


def test_equal_keys_do_not_cancel(device: torch.device) -> None:
    """One token over and over: the triangle is dense with entries near 1."""
    problem = make_problem([("chain", 80, 0)], device, heads=1)
    keys = slice(problem.shape.k_dim, 2 * problem.shape.k_dim)
    problem.x[:, keys] = problem.x[0, keys]
    problem.a.fill_(-20.0)
    problem.b.fill_(20.0)
    check(problem, "triton", 1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["tf32", "tf32x3", "bf16x3"])
@pytest.mark.parametrize("tile", [16, 32])
def test_relative_error_on_tensor_cores(tile: int, precision: str) -> None:
    """bf16 activations at full dimensions: outputs and the u that the commit adds, in the norm."""
    problem = make_problem(
        [("random", 129, 0), ("chain", 33, 0)], torch.device("cuda"), key_heads=2, heads=6, k_dim=128,
        v_dim=128, dtype=torch.bfloat16,
    )  # fmt: skip
    step, nodes = problem.step, problem.step.node_rows()
    out, stash = problem.verify(
        "triton",
        "vk",
        out_dtype=torch.float32,
        tuning=GdnTuning(tile=tile, pull=32, block_v=32, precision=precision),
    )
    wanted, true_stash = (
        torch.zeros_like(out),
        GdnStash.allocate(1, len(stash.c), problem.shape, device=out.device, dtype=torch.bfloat16).layer(0),
    )
    gdn_tree_verify_reference(
        problem.x, problem.weight, None, problem.conv_state, problem.a, problem.b, problem.A_log,
        problem.dt_bias, problem.state, problem.slot_tensor, step.query_start_loc, step.num_nodes,
        step.parents, step.ancestors, None, wanted, true_stash, compute=torch.float64,
    )  # fmt: skip
    for got, true in ((out, wanted), (stash.u, true_stash.u)):
        error = (got[nodes].double() - true[nodes].double()).norm() / true[nodes].double().norm()
        assert error < (2e-3 if precision == "tf32" else 5e-5)


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
    out, stash = problem.verify(impl, parents=parents, ancestors=ancestor_mask_words(parents, step.num_nodes))
    torch.testing.assert_close(out[:9].double().cpu(), expected[:9], rtol=5e-5, atol=5e-5)
    torch.testing.assert_close(out[19:24].double().cpu(), expected[19:24], rtol=5e-5, atol=5e-5)
    assert (out[9:19] == 0).all()
    assert (stash.u[9:19] == 0).all()
    assert (stash.c[9:19] == 0).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 3, "key_heads": 2}, "3 value heads must be a multiple of the 2 key heads"),
        ({"state_layout": "kk"}, "state_layout is 'kk'"),
        ({"activation": "relu"}, "activation is 'relu'"),
        ({"impl": "cuda"}, "impl is 'cuda'"),
        ({"stash_rows": 2}, "the step has 8 rows; the stash was allocated for 2"),
        ({"scratch_rows": 2}, "the step has 8 rows and trees of 7 nodes; the scratch was allocated for 2"),
        ({"scratch": None}, "need a scratch"),
        ({"num_nodes": torch.zeros(1, dtype=torch.int64)}, "num_nodes has dtype torch.int64"),
        ({"ancestors": torch.zeros(1, 7, 2, dtype=torch.int32)}, r"ancestors has shape \[1, 7, 2\]"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_wrong_arguments_are_named(change: dict[str, object], message: str) -> None:
    sizes = {key: change[key] for key in ("heads", "key_heads") if key in change}
    cpu = torch.device("cpu")
    problem = make_problem([("chain", 5, 0)], cpu, **{"heads": 2, "key_heads": 1, **sizes})
    shape, kind = problem.shape, {"device": cpu, "dtype": torch.float32}
    rest = {key: value for key, value in change.items() if key not in (*sizes, "stash_rows", "scratch_rows")}
    arguments = {
        "num_nodes": problem.step.num_nodes, "parents": problem.step.parents,
        "ancestors": problem.step.ancestors, "state_layout": "kv", "activation": None, "impl": "triton",
        "out": torch.empty(8, shape.heads, shape.v_dim),
        "stash": GdnStash.allocate(1, change.get("stash_rows", 8), shape, **kind).layer(0),
        "scratch": GdnScratch.allocate(change.get("scratch_rows", 8), 7, shape, **kind), **rest,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        gdn_tree_verify(
            problem.x, problem.weight, None, problem.conv_state, problem.a, problem.b, problem.A_log,
            problem.dt_bias, problem.state, problem.slot_tensor, problem.step.query_start_loc, **arguments,
        )  # fmt: skip


def test_bytes_of_the_stash() -> None:
    shape = GdnShape(2, 8, 4, 16)
    stash = GdnStash.allocate(3, 5, shape, device=torch.device("cpu"), dtype=torch.bfloat16)
    assert GdnStash.nbytes(3, 5, shape, torch.bfloat16) == sum(x.nbytes for x in vars(stash).values())
