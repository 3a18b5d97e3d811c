# SPDX-License-Identifier: Apache-2.0
"""Buffers of the Gated DeltaNet tree kernels: what outlives a layer (stash), what does not (scratch), layers.

The stash holds, for every packed row of a step and every layer, what the commits need; all layers lie in one
tensor a field, so that one launch reaches them. The scratch passes values between the launches of one layer
and is shared by all layers. `LayerTable` is how a kernel reaches tensors that belong to the layers one by
one: device tables of their addresses, made once.

Bytes: see `GdnStash.nbytes`; the scratch is dominated by two fp32 [HV, rows, N] matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_weaver.kernels.common import expect

StateLayout = Literal["kv", "vk"]
"""Last two dimensions of the recurrent state: [K, V] (vLLM on CPU) or [V, K] (vLLM on CUDA)."""

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
TL_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
TILE = 32
"""Nodes of the largest tile whose triangle is inverted."""


def state_as_kv(state: Tensor, layout: StateLayout) -> Tensor:
    """View of a recurrent state [slots, HV, K, V] or [slots, HV, V, K] as [slots, HV, K, V]."""
    if layout not in ("kv", "vk"):
        raise ValueError(f"state_layout is {layout!r}; it must be 'kv' or 'vk'")
    return state if layout == "kv" else state.transpose(-1, -2)


@dataclass(frozen=True)
class GdnShape:
    """Heads and dimensions of a Gated DeltaNet layer (of one tensor-parallel rank)."""

    key_heads: int
    k_dim: int
    heads: int
    v_dim: int

    @property
    def channels(self) -> int:
        """Channels of the convolution: q and k of every key head, v of every value head."""
        return 2 * self.key_heads * self.k_dim + self.heads * self.v_dim


@dataclass(frozen=True)
class GdnStash:
    """What a verify pass keeps until the commit; [layers, rows, ...], or [rows, ...] of one layer.

    inputs [rows, C]: the convolution's raw inputs. k [rows, Hk, K]: its outputs for the keys, and k_scale
    fp32 [rows, Hk]: the factors that normalise them. c fp32 [rows, HV]: log-decay from the committed state to
    the node. u fp32 [rows, HV, V]: the node's writes. Rows that are not tree nodes are never written.
    """

    inputs: Tensor
    k: Tensor
    k_scale: Tensor
    c: Tensor
    u: Tensor

    @staticmethod
    def _shapes(shape: GdnShape, dtype: torch.dtype) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {
            "inputs": ((shape.channels,), dtype),
            "k": ((shape.key_heads, shape.k_dim), dtype),
            "k_scale": ((shape.key_heads,), torch.float32),
            "c": ((shape.heads,), torch.float32),
            "u": ((shape.heads, shape.v_dim), torch.float32),
        }

    @classmethod
    def allocate(
        cls, layers: int, rows: int, shape: GdnShape, *, device: torch.device, dtype: torch.dtype
    ) -> GdnStash:
        """Zero-filled buffers for steps of up to `rows` packed rows; `dtype` is that of the activations."""
        return cls(
            **{
                name: torch.zeros(layers, rows, *row, device=device, dtype=kind)
                for name, (row, kind) in cls._shapes(shape, dtype).items()
            }
        )

    @classmethod
    def nbytes(cls, layers: int, rows: int, shape: GdnShape, dtype: torch.dtype) -> int:
        """Bytes that `allocate` takes."""
        sizes = (torch.Size(row).numel() * kind.itemsize for row, kind in cls._shapes(shape, dtype).values())
        return layers * rows * sum(sizes)

    def layer(self, index: int) -> GdnStash:
        """The buffers of one layer, [rows, ...]."""
        return GdnStash(**{field.name: getattr(self, field.name)[index] for field in fields(self)})

    def check(self, leading: tuple[int, ...], shape: GdnShape, *, device: torch.device) -> None:
        """Raises `ValueError` unless all buffers are [*leading, ...] of this shape, dense and on `device`."""
        for name, (row, kind) in self._shapes(shape, self.k.dtype).items():
            tensor: Tensor = getattr(self, name)
            dtypes = (kind,) if kind == torch.float32 else FLOATS
            expect(f"stash.{name}", tensor, (*leading, *row), device=device, dtypes=dtypes)
            if not tensor.is_contiguous():
                raise ValueError(f"stash.{name} is not contiguous; make it with GdnStash.allocate")


@dataclass(frozen=True)
class GdnScratch:
    """What the launches of one layer hand on; contents are void between layers.

    q [rows, Hk, K] and q_scale fp32 [rows, Hk], as k in the stash, the scale times K^-0.5; v [rows, HV, V];
    beta fp32 [rows, HV]. lower, attend fp32 [HV, rows, P], P the slots of a tree rounded up to tiles: the
    decayed products of keys with keys (times beta; on the diagonal T of `gdn_solve`)
    and of queries with keys.
    """

    q: Tensor
    q_scale: Tensor
    v: Tensor
    beta: Tensor
    lower: Tensor
    attend: Tensor

    @classmethod
    def allocate(
        cls, rows: int, slots: int, shape: GdnShape, *, device: torch.device, dtype: torch.dtype
    ) -> GdnScratch:
        """Buffers for steps of up to `rows` rows and trees of up to `slots` nodes."""

        def empty(*sizes: int, kind: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(sizes, device=device, dtype=kind)

        pitch = -(-slots // TILE) * TILE
        return cls(
            empty(rows, shape.key_heads, shape.k_dim, kind=dtype),
            empty(rows, shape.key_heads),
            empty(rows, shape.heads, shape.v_dim, kind=dtype),
            empty(rows, shape.heads),
            empty(shape.heads, rows, pitch),
            empty(shape.heads, rows, pitch),
        )

    def check(
        self, rows: int, slots: int, shape: GdnShape, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Raises `ValueError` unless a step of these sizes fits."""
        have = self.q.shape[0]
        expect("scratch.q", self.q, (None, shape.key_heads, shape.k_dim), device=device, dtypes=(dtype,))
        expect("scratch.v", self.v, (have, shape.heads, shape.v_dim), device=device, dtypes=(dtype,))
        expect("scratch.lower", self.lower, (shape.heads, have, None), device=device)
        if rows > have or slots > self.lower.shape[2]:
            raise ValueError(
                f"the step has {rows} rows and trees of {slots} nodes; the scratch was allocated for {have} "
                f"and {self.lower.shape[2]}"
            )


@dataclass(frozen=True)
class LayerTable:
    """One tensor and one column of state indices a layer, and device tables of their addresses.

    states: tensors that agree in shape, strides, dtype and device. indices int32 [requests] each, any stride.
    pointers, index_pointers, index_strides int64 [layers] on their device; `aligned` when every state starts
    at a multiple of 16 bytes. Both kinds of tensors must stay where they are.
    """

    states: tuple[Tensor, ...]
    indices: tuple[Tensor, ...]
    pointers: Tensor
    index_pointers: Tensor
    index_strides: Tensor
    aligned: bool

    @classmethod
    def build(cls, states: Sequence[Tensor], indices: Sequence[Tensor]) -> LayerTable:
        """Makes the tables; copies addresses to the device, so not for use within a step.

        Raises `ValueError` when there is no layer, when layers differ, or for indices that do not fit.
        """
        if not states or len(states) != len(indices):
            raise ValueError(f"{len(states)} states and {len(indices)} index columns; one of each a layer")
        facts = [(state.shape, state.stride(), state.dtype, state.device) for state in states]
        for i, fact in enumerate(facts):
            if fact != facts[0]:
                raise ValueError(
                    f"layer {i}'s state (shape, strides, dtype, device) is {fact}; not {facts[0]}"
                )
        device = states[0].device
        for i, column in enumerate(indices):
            expect(f"state_indices of layer {i}", column, (None,), device=device, dtypes=(torch.int32,))

        def table(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        addresses = [state.data_ptr() for state in states]
        return cls(
            tuple(states),
            tuple(indices),
            table(addresses),
            table([column.data_ptr() for column in indices]),
            table([column.stride(0) for column in indices]),
            all(address % 16 == 0 for address in addresses),
        )

    def check_requests(self, requests: int) -> None:
        """Raises `ValueError` unless every layer's column has an entry for each of `requests`."""
        have = min(column.shape[0] for column in self.indices)
        if requests > have:
            raise ValueError(f"the step has {requests} requests; the state indices were bound for {have}")


@triton.jit
def load_layer_slot(
    index_pointers_ptr,  # [layers]
    index_strides_ptr,  # [layers]
    layer,
    r,
):
    """State slot int64 of request r in a layer of a `LayerTable`."""
    column = tl.load(index_pointers_ptr + layer).to(tl.pointer_type(tl.int32))
    return tl.load(column + r * tl.load(index_strides_ptr + layer)).to(tl.int64)
