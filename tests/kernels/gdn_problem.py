# SPDX-License-Identifier: Apache-2.0
"""One GDN layer's inputs for a step of trees, and what is true of them: a sequential replay in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.kernels.steps import Part, Step, make_step, poison, same_bits
from vllm_weaver.kernels.gdn_tree import GdnStash, StateLayout, gdn_tree_verify

SLOTS = 9


@dataclass
class Problem:
    """Inputs of one layer for a step; state is [slots, HV, K, V] whatever layout the kernel is given."""

    step: Step
    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    A_log: Tensor
    dt_bias: Tensor
    state: Tensor
    slots: list[int]

    @property
    def slot_tensor(self) -> Tensor:
        """Slots int32 [R] as a strided view, as a column of vLLM's state index table is."""
        return torch.tensor([[slot, 1] for slot in self.slots], dtype=torch.int32, device=self.q.device)[:, 0]

    def state_in(self, layout: StateLayout) -> Tensor:
        """The state in this layout, slots further apart than dense."""
        state = self.state if layout == "kv" else self.state.transpose(-1, -2)
        return torch.cat((state, torch.zeros_like(state)), dim=1)[:, : state.shape[1]]

    def verify(
        self,
        impl: str,
        layout: StateLayout = "kv",
        stash_dtype: torch.dtype = torch.float32,
        ancestors: Tensor | None = None,
    ) -> tuple[Tensor, GdnStash]:
        """Runs the kernel on poisoned buffers."""
        step, device = self.step, self.q.device
        rows = step.num_rows + 2
        stash = GdnStash(
            poison(rows, self.a.shape[1], device=device),
            poison(rows, *self.k.shape[1:], device=device, dtype=stash_dtype),
            poison(rows, *self.v.shape[1:], device=device, dtype=stash_dtype),
        )
        out = poison(*self.v.shape, device=device, dtype=self.q.dtype)
        state = self.state_in(layout)
        before = state.clone()
        gdn_tree_verify(
            self.q, self.k, self.v, self.a, self.b, self.A_log, self.dt_bias, state,
            self.slot_tensor, step.query_start_loc, step.num_nodes,
            step.ancestors if ancestors is None else ancestors,
            out=out, stash=stash, state_layout=layout, impl=impl,
        )  # fmt: skip
        assert same_bits(state, before), "verification must not write the state"
        return out, stash

    def start_state(self, r: int) -> Tensor:
        slot = self.slots[r]
        if 0 < slot < len(self.state):
            return self.state[slot].double().cpu()
        return torch.zeros(self.state.shape[1:], dtype=torch.float64)

    def advance(self, state: Tensor, row: int) -> tuple[Tensor, Tensor]:
        """One step of the recurrence in float64: the state [HV, K, V] after token `row`, and its output."""
        q, k, v, a, b = (x[row].double().cpu() for x in (self.q, self.k, self.v, self.a, self.b))
        group = v.shape[0] // k.shape[0]
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        q, k = q.repeat_interleave(group, 0) / q.shape[-1] ** 0.5, k.repeat_interleave(group, 0)
        g = -self.A_log.double().cpu().exp() * torch.log1p((a + self.dt_bias.double().cpu()).exp())
        state = state * g.exp()[:, None, None]
        write = b.sigmoid()[:, None] * (v - torch.einsum("hkv,hk->hv", state, k))
        state = state + k[:, :, None] * write[:, None, :]
        return state, torch.einsum("hkv,hk->hv", state, q)

    def replay(self) -> tuple[Tensor, list[list[Tensor]]]:
        """Float64 outputs [T, HV, V] (zero where there is no node) and the state after every node."""
        out = torch.zeros(self.v.shape, dtype=torch.float64)
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
    """Random inputs; q, k and v are strided views of one packed buffer, slots not in use are NaN."""
    step = make_step(parts, device, seed)
    torch.manual_seed(seed)
    rows, sizes = step.num_rows, [key_heads * k_dim, key_heads * k_dim, heads * v_dim]
    mixed = torch.randn(rows, sum(sizes) + 5)
    mixed[step.foreign_rows() + step.placeholder_rows()] = torch.nan
    mixed = mixed.to(device, dtype)
    q, k, v = (
        part.unflatten(1, (h, -1))
        for part, h in zip(mixed[:, :-5].split(sizes, 1), (key_heads, key_heads, heads), strict=True)
    )
    slots = slots if slots is not None else [1 + 2 * r for r in range(len(parts))]
    state = poison(SLOTS, heads, k_dim, v_dim, device=device)
    for slot in slots:
        if 0 < slot < SLOTS:
            state[slot] = torch.randn(heads, k_dim, v_dim)
    return Problem(
        step, q, k, v,
        *(torch.randn(rows, heads).mul_(2).to(device, dtype) for _ in range(2)),
        torch.rand(heads, device=device).mul_(2).log(), torch.randn(heads, device=device),
        state.to(state_dtype), slots,
    )  # fmt: skip
