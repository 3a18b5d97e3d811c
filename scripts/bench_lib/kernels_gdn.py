# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of the Gated DeltaNet kernels, and how precise they are.

All layers of the target, each with its own states, which together are far beyond the L2 cache. Outputs and
committed states are compared with float64 (what the convolution gives is rounded to the activations' dtype
first, there as here); outputs as they are before they are rounded to bf16.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from bench_lib import kernels_floor as floor
from bench_lib.kernels_common import Call, Case, Setting, Trees, relative_error, require, require_equal
from vllm_weaver.kernels.gdn_buffers import GdnScratch, GdnStash, LayerTable
from vllm_weaver.kernels.gdn_commit import gdn_tree_commit
from vllm_weaver.kernels.gdn_tree import gdn_tree_verify, gdn_tree_verify_reference
from vllm_weaver.kernels.tree_conv import tree_conv_commit, tree_conv_reference

NAMES = ("gdn_verify", "gdn_commit", "conv_commit")
WIDTH = 4
LIMIT = 2e-3
DRIFT_COMMITS = 2000


class GdnStep:
    """Inputs, states and buffers of a step in some Gated DeltaNet layers; states are [V, K], as on CUDA."""

    def __init__(self, setting: Setting, nodes: int, requests: int, layers: int) -> None:
        torch.manual_seed(nodes)
        self.setting, self.trees, self.layers = setting, Trees(setting, nodes, requests), layers
        shape, rows, slots = setting.gdn, self.trees.rows, requests + 1
        device, dtype = setting.device, setting.dtype
        # Block 0 is vLLM's null block. Convolution states lie transposed, activations in a wider projection.
        self.conv = [setting.randn(slots, WIDTH - 1, shape.channels).transpose(1, 2) for _ in range(layers)]
        self.states = [
            setting.randn(slots, shape.heads, shape.v_dim, shape.k_dim, dtype=torch.float32)
            for _ in range(layers)
        ]
        table = torch.zeros(requests, 8, dtype=torch.int32, device=device)
        table[:, 0] = torch.arange(1, slots)
        self.index = table[:, 0]
        self.x = setting.randn(rows, shape.channels + shape.heads * shape.v_dim)[:, : shape.channels]
        self.a, self.b = setting.randn(rows, shape.heads), setting.randn(rows, shape.heads)
        self.A_log = setting.randn(shape.heads, dtype=torch.float32) * 0.5
        self.dt_bias = setting.randn(shape.heads)
        self.weight = setting.randn(shape.channels, WIDTH) * 0.5
        self.stash = GdnStash.allocate(layers, rows, shape, device=device, dtype=dtype)
        # One pitch for all sizes, as it is a compile-time constant.
        self.scratch = GdnScratch.allocate(rows, max(setting.nodes), shape, device=device, dtype=dtype)
        self.out = torch.empty(rows, shape.heads, shape.v_dim, device=device, dtype=dtype)

    def verify(self, layer: int, out: Tensor | None = None) -> None:
        """Runs the kernels of one layer."""
        trees = self.trees
        gdn_tree_verify(
            self.x, self.weight, None, self.conv[layer], self.a, self.b, self.A_log, self.dt_bias,
            self.states[layer], self.index, trees.query_start_loc, trees.num_nodes, trees.parents,
            trees.ancestors, activation="silu", out=self.out if out is None else out,
            stash=self.stash.layer(layer), scratch=self.scratch, state_layout="vk", impl=self.setting.impl,
        )  # fmt: skip

    def commit_states(self, table: LayerTable) -> None:
        """Commits the recurrent states of all layers."""
        trees = self.trees
        gdn_tree_commit(
            self.stash, table, trees.query_start_loc, trees.path, trees.num_path,
            num_nodes=trees.num_nodes, state_layout="vk", impl=self.setting.impl,
        )  # fmt: skip

    def commit_conv(self, table: LayerTable, reference: bool = False) -> None:
        """Commits the convolution states of all layers."""
        trees = self.trees
        tree_conv_commit(
            self.stash.inputs, table, trees.query_start_loc, trees.path, trees.num_path, WIDTH,
            num_nodes=trees.num_nodes, impl="torch" if reference else self.setting.impl,
        )  # fmt: skip

    def table(self, states: list[Tensor]) -> LayerTable:
        """These states of all layers, for a commit."""
        return LayerTable.build(states, [self.index] * self.layers)

    def check_verify(self) -> dict[str, float]:
        """Outputs and writes of layer 0 against float64."""
        trees, shape = self.trees, self.setting.gdn
        got = torch.full_like(self.out, torch.nan, dtype=torch.float32)
        self.verify(0, got)
        want = torch.empty_like(got, dtype=torch.float64)
        true = GdnStash.allocate(1, trees.rows, shape, device=got.device, dtype=self.x.dtype).layer(0)
        gdn_tree_verify_reference(
            self.x, self.weight, None, self.conv[0], self.a, self.b, self.A_log, self.dt_bias,
            self.states[0].transpose(-1, -2), self.index, trees.query_start_loc, trees.num_nodes,
            trees.parents, trees.ancestors, "silu", want, true, compute=torch.float64,
        )  # fmt: skip
        what = f"gdn_verify at {trees.nodes} nodes"
        return {
            "outputs": require(f"{what}: outputs", relative_error(got, want), LIMIT),
            "writes": require(f"{what}: writes", relative_error(self.stash.layer(0).u, true.u), LIMIT),
        }

    def check_commit(self) -> dict[str, float]:
        """The states of the first and the last layer against a sequential replay in float64."""
        for layer in range(self.layers):
            self.verify(layer)
        tested = sorted({0, self.layers - 1})
        want = [self.replayed(layer) for layer in tested]
        self.commit_states(self.table(self.states))
        error = max(
            relative_error(self.states[layer][1:].transpose(-1, -2), true)
            for layer, true in zip(tested, want, strict=True)
        )
        return {"state": require(f"gdn_commit at {self.trees.nodes} nodes: state", error, LIMIT)}

    def check_conv_commit(self) -> dict[str, float]:
        """All layers' convolution states, bit by bit."""
        for layer in range(self.layers):
            self.verify(layer)
        want = [state.clone() for state in self.conv]
        self.commit_conv(self.table(want), reference=True)
        self.commit_conv(self.table(self.conv))
        return require_equal("conv_commit", self.conv, want)

    def replayed(self, layer: int) -> Tensor:
        """Float64 states [R, HV, K, V] after every request's accepted path, one token after another."""
        trees, shape = self.trees, self.setting.gdn
        mixed = torch.empty(self.x.shape, dtype=self.x.dtype, device=self.x.device)
        tree_conv_reference(
            self.x, self.weight, None, self.conv[layer], self.index, trees.query_start_loc, trees.num_nodes,
            trees.parents, "silu", mixed,
        )  # fmt: skip
        keys = shape.key_heads * shape.k_dim
        k = mixed[:, keys : 2 * keys].unflatten(1, (shape.key_heads, -1))
        v = mixed[:, 2 * keys :].unflatten(1, (shape.heads, -1))
        states = []
        for r, path in enumerate(trees.paths):
            state = self.states[layer][r + 1].transpose(-1, -2).double()
            for node in path:
                row = r * trees.nodes + node
                state = self.advance(state, row, k[row], v[row])
            states.append(state)
        return torch.stack(states)

    def advance(self, state: Tensor, row: int, k: Tensor, v: Tensor) -> Tensor:
        """The recurrence's next state [HV, K, V] after a token, in the dtype of `state`."""
        k, v, a, b = (x.to(state.dtype) for x in (k, v, self.a[row], self.b[row]))
        k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
        k = k.repeat_interleave(len(v) // len(k), 0)
        g = -self.A_log.to(state.dtype).exp() * F.softplus(a + self.dt_bias.to(state.dtype))
        state = state * g.exp()[:, None, None]
        write = b.sigmoid()[:, None] * (v - torch.einsum("hkv,hk->hv", state, k))
        return state + k[:, :, None] * write[:, None, :]


def chain_calls(step: GdnStep) -> list[Call]:
    """vLLM's kernels for a chain of drafts as wide as the tree, as `_forward_core` runs them for a layer."""
    from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update
    from vllm.third_party.flash_linear_attention.ops import fused_sigmoid_gating_delta_rule_update

    trees, shape, setting = step.trees, step.setting.gdn, step.setting
    n, requests, rows = trees.nodes, trees.requests, trees.rows
    keys = shape.key_heads * shape.k_dim
    index = torch.arange(1, rows + 1, dtype=torch.int32, device=setting.device).view(requests, n)
    conv_index = torch.arange(1, requests + 1, dtype=torch.int32, device=setting.device)
    accepted = torch.ones(requests, dtype=torch.int32, device=setting.device)
    conv = setting.randn(requests + 1, WIDTH - 1 + n - 1, shape.channels).transpose(1, 2)
    conved = torch.empty(rows, shape.channels, dtype=setting.dtype, device=setting.device)
    sizes = (rows + 1, shape.heads, shape.v_dim, shape.k_dim)
    touched = 4 * rows * shape.heads * shape.v_dim * shape.k_dim
    states = [torch.zeros(sizes, device=setting.device) for _ in range(max(2, setting.copies(touched)))]

    def call(state: Tensor) -> None:
        mixed = causal_conv1d_update(
            step.x, conv, step.weight, None, "silu", conv_state_indices=conv_index,
            num_accepted_tokens=accepted, query_start_loc=trees.query_start_loc, max_query_len=n,
            validate_data=False, out=conved,
        )  # fmt: skip
        parts = mixed.split([keys, keys, shape.heads * shape.v_dim], dim=-1)
        flat = torch.cat([part.reshape(-1) for part in parts])
        q, k, v = flat.split([part.numel() for part in parts])
        fused_sigmoid_gating_delta_rule_update(
            A_log=step.A_log, a=step.a, b=step.b, dt_bias=step.dt_bias,
            q=q.view(1, rows, -1, shape.k_dim), k=k.view(1, rows, -1, shape.k_dim),
            v=v.view(1, rows, -1, shape.v_dim), initial_state=state, inplace_final_state=True,
            cu_seqlens=trees.query_start_loc, ssm_state_indices=index, num_accepted_tokens=accepted,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip

    call(states[0])
    if not states[0][1:].flatten(1).any(1).all():
        raise RuntimeError("vLLM's chain kernel left states unwritten, so its time would mean nothing")
    return [partial(call, state) for state in states]


def cases(setting: Setting, wanted: set[str]) -> Iterator[Case]:
    """The cases of this file's kernels."""
    for nodes, requests in setting.sizes():
        main = nodes == setting.main_nodes
        if not (wanted & set(NAMES) if main else "gdn_verify" in wanted):
            continue
        step = GdnStep(setting, nodes, requests, setting.gdn_layers)
        shape, layers = setting.gdn, range(step.layers)
        size = f"{nodes} nodes, R={requests}"
        if "gdn_verify" in wanted:
            yield Case(
                "gdn_verify", f"{size}, a layer",
                floor.gdn_verify(shape, nodes, requests, WIDTH),
                [partial(step.verify, layer) for layer in layers],
                step.check_verify, "vLLM chain + conv", lambda step=step: {"": chain_calls(step)},
            )  # fmt: skip
        path = len(step.trees.paths[0])
        size = f"{step.layers} layers, path {path}, R={requests}"
        if main and "gdn_commit" in wanted:
            yield Case(
                "gdn_commit", size, floor.gdn_commit(shape, step.layers, path, requests),
                [partial(step.commit_states, step.table(step.states))], step.check_commit,
            )  # fmt: skip
        if main and "conv_commit" in wanted:
            work = floor.conv_commit(shape, step.layers, requests, WIDTH)
            # The states go round; the few inputs that the path needs stay in the L2 cache.
            others = range(1, setting.copies(work.bytes))
            tables = [step.table(step.conv), *(step.table([x.clone() for x in step.conv]) for _ in others)]
            yield Case(
                "conv_commit", size, work,
                [partial(step.commit_conv, table) for table in tables], step.check_conv_commit,
            )  # fmt: skip


class Sequential:
    """A state [HV, V, K] that goes on token by token: with vLLM's own kernel, or in fp32 without a GPU."""

    def __init__(self, step: GdnStep, start: Tensor) -> None:
        self.step = step
        self.states = torch.stack((torch.zeros_like(start), start))  # slot 0 is vLLM's null block
        self.starts = torch.tensor([0, 1], dtype=torch.int32, device=start.device)
        self.slot = torch.ones(1, dtype=torch.int32, device=start.device)

    def advance(self, row: int, k: Tensor, v: Tensor) -> None:
        """The state after the token of this row, whose key is k [Hk, K] and value v [HV, V]."""
        step = self.step
        if not k.is_cuda:
            self.states[1] = step.advance(self.states[1].transpose(-1, -2), row, k, v).transpose(-1, -2)
            return
        from vllm.third_party.flash_linear_attention.ops import fused_sigmoid_gating_delta_rule_update

        k = k[None, None]
        fused_sigmoid_gating_delta_rule_update(
            A_log=step.A_log, a=step.a[row : row + 1], b=step.b[row : row + 1], dt_bias=step.dt_bias,
            q=k, k=k, v=v[None, None], initial_state=self.states, inplace_final_state=True,
            cu_seqlens=self.starts, ssm_state_indices=self.slot, use_qk_l2norm_in_kernel=True,
        )  # fmt: skip


@torch.no_grad()
def drift(setting: Setting, commits: int = DRIFT_COMMITS) -> dict[str, float]:
    """Relative error of a state after many steps against float64: verify and commit, and token by token with
    vLLM's own kernel (the recurrence in fp32 where there is no GPU). Slow decay, so that errors stay."""
    step = GdnStep(setting, setting.nodes[0], 1, 1)
    step.A_log.fill_(-5.0)
    path = step.trees.paths[0] = step.trees.paths[0][:4]
    step.trees.path[0, len(path) :] = -1
    step.trees.num_path.fill_(len(path))
    table, stash = step.table(step.states), step.stash.layer(0)
    true = step.states[0][1].transpose(-1, -2).double()
    sequential = Sequential(step, step.states[0][1])
    for _ in range(commits):
        for inputs in (step.x, step.a, step.b):
            inputs.normal_()
        step.verify(0)
        step.commit_states(table)
        for row in path:
            # The same convolution outputs for all three; they are checked elsewhere.
            k, v = stash.k[row], step.scratch.v[row]
            true = step.advance(true, row, k, v)
            sequential.advance(row, k, v)
    ours, theirs = (
        relative_error(state.transpose(-1, -2), true) for state in (step.states[0][1], sequential.states[1])
    )
    require(f"the state after {commits} commits", ours, LIMIT)
    return {"commits": commits, "verify_and_commit": ours, "sequential": theirs}
