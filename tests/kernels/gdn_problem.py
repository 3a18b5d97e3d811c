# SPDX-License-Identifier: Apache-2.0
"""One GDN layer's inputs for a step of trees, and what is true of them: a sequential replay in float64.

The convolution is the identity unless a test says otherwise, so that q, k and v are the inputs themselves;
what it computes is the matter of `test_tree_conv`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.kernels.steps import Part, Step, make_step, poison, same_bits
from vllm_weaver.kernels.gdn_buffers import GdnScratch, GdnShape, GdnStash, StateLayout
from vllm_weaver.kernels.gdn_tree import gdn_tree_verify

SLOTS = 9
WIDTH = 4


@dataclass
class Problem:
    """Inputs of one layer for a step; state is [slots, HV, K, V] whatever layout the kernel is given."""

    step: Step
    shape: GdnShape
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    activation: str | None
    conv_state: Tensor
    a: Tensor
    b: Tensor
    A_log: Tensor
    dt_bias: Tensor
    state: Tensor
    slots: list[int]

    @property
    def slot_tensor(self) -> Tensor:
        """Slots int32 [R] as a strided view, as a column of vLLM's state index table is."""
        return torch.tensor([[slot, 1] for slot in self.slots], dtype=torch.int32, device=self.x.device)[:, 0]

    def state_in(self, layout: StateLayout) -> Tensor:
        """The state in this layout, slots further apart than dense."""
        state = self.state if layout == "kv" else self.state.transpose(-1, -2)
        return torch.cat((state, torch.zeros_like(state)), dim=1)[:, : state.shape[1]]

    def verify(
        self,
        impl: str,
        layout: StateLayout = "kv",
        parents: Tensor | None = None,
        ancestors: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        **how: Any,
    ) -> tuple[Tensor, GdnStash]:
        """Runs the kernel on poisoned buffers; the stash is that of one layer."""
        step, device, dtype = self.step, self.x.device, self.x.dtype
        rows, slots = step.num_rows + 2, step.num_slots
        stash = GdnStash.allocate(1, rows, self.shape, device=device, dtype=dtype).layer(0)
        scratch = GdnScratch.allocate(rows, slots + 3, self.shape, device=device, dtype=dtype)
        for buffer in (*vars(stash).values(), *vars(scratch).values()):
            buffer.fill_(torch.nan)
        out = poison(len(self.x), self.shape.heads, self.shape.v_dim, device=device, dtype=out_dtype or dtype)
        state = self.state_in(layout)
        before = state.clone()
        gdn_tree_verify(
            self.x, self.weight, self.bias, self.conv_state, self.a, self.b, self.A_log, self.dt_bias, state,
            self.slot_tensor, step.query_start_loc, step.num_nodes,
            step.parents if parents is None else parents,
            step.ancestors if ancestors is None else ancestors,
            activation=self.activation, out=out, stash=stash, scratch=scratch, state_layout=layout, impl=impl,
            **how,
        )  # fmt: skip
        assert same_bits(state, before), "verification must not write the state"
        return out, stash

    def start_state(self, r: int) -> Tensor:
        slot = self.slots[r]
        if 0 < slot < len(self.state):
            return self.state[slot].double().cpu()
        return torch.zeros(self.state.shape[1:], dtype=torch.float64)

    def advance(self, state: Tensor, row: int) -> tuple[Tensor, Tensor]:
        """One step of the recurrence in the state's dtype: the state [HV, K, V] after token `row`, and its
        output."""
        mixed, a, b, A_log, dt_bias = (
            x.to(state) for x in (self.x[row], self.a[row], self.b[row], self.A_log, self.dt_bias)
        )
        keys, group = self.shape.key_heads * self.shape.k_dim, self.shape.heads // self.shape.key_heads
        q, k = (x.unflatten(0, (self.shape.key_heads, -1)) for x in mixed[: 2 * keys].chunk(2))
        v = mixed[2 * keys :].unflatten(0, (self.shape.heads, -1))
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        q, k = q.repeat_interleave(group, 0) / q.shape[-1] ** 0.5, k.repeat_interleave(group, 0)
        g = -A_log.exp() * torch.log1p((a + dt_bias).exp())
        state = state * g.exp()[:, None, None]
        write = b.sigmoid()[:, None] * (v - torch.einsum("hkv,hk->hv", state, k))
        state = state + k[:, :, None] * write[:, None, :]
        return state, torch.einsum("hkv,hk->hv", state, q)

    def replay(self) -> tuple[Tensor, list[list[Tensor]]]:
        """Float64 outputs [T, HV, V] (zero where there is no node) and the state after every node."""
        out = torch.zeros(len(self.x), self.shape.heads, self.shape.v_dim, dtype=torch.float64)
        states: list[list[Tensor]] = []
        for r, tree in enumerate(self.step.trees):
            states.append([])
            for i, parent in enumerate(tree or []):
                before = self.start_state(r) if parent < 0 else states[r][parent]
                after, out[self.step.starts[r] + i] = self.advance(before, self.step.starts[r] + i)
                states[r].append(after)
        return out, states


def make_problem(
    parts: list[Part],
    device: torch.device,
    *,
    key_heads: int = 1,
    heads: int = 2,
    k_dim: int = 16,
    v_dim: int = 24,
    dtype: torch.dtype = torch.float32,
    state_dtype: torch.dtype = torch.float32,
    slots: list[int] | None = None,
    seed: int = 0,
) -> Problem:
    """Random inputs in rows further apart than dense; slots not in use are NaN."""
    step = make_step(parts, device, seed)
    torch.manual_seed(seed)
    shape, rows = GdnShape(key_heads, k_dim, heads, v_dim), step.num_rows
    mixed = torch.randn(rows, shape.channels + 5)
    mixed[step.foreign_rows() + step.placeholder_rows()] = torch.nan
    slots = slots if slots is not None else [1 + 2 * r for r in range(len(parts))]
    state = poison(SLOTS, heads, k_dim, v_dim, device=device)
    for slot in slots:
        if 0 < slot < SLOTS:
            state[slot] = torch.randn(heads, k_dim, v_dim)
    weight = torch.zeros(shape.channels, WIDTH)
    weight[:, -1] = 1
    conv_state = torch.randn(SLOTS, WIDTH - 1, shape.channels).transpose(1, 2)
    a, b = (torch.randn(rows, heads).mul_(2) for _ in range(2))
    return Problem(
        step, shape, mixed.to(device, dtype)[:, : shape.channels],
        weight.to(device, dtype), None, None, conv_state.to(device, dtype),
        a.to(device, dtype), b.to(device, dtype),
        torch.rand(heads, device=device).mul_(2).log(), torch.randn(heads, device=device),
        state.to(state_dtype), slots,
    )  # fmt: skip
