# SPDX-License-Identifier: Apache-2.0
"""Causal short convolution over a tree of tokens, and the commit of its state.

A node sees the last W - 1 inputs on its own path, continued above the root into the committed state:

    out_i = activation(bias + w_{W-1} x_i + sum_{m=1..W-1} w_{W-1-m} x_{m-th predecessor of i})

The predecessor of a node is its parent, that of the root is the newest state column (W - 2), and that of
column j is column j - 1. The commit leaves the last W - 1 inputs of the accepted path, again continued into
the old state, in columns 0..W-2, oldest first.

Buffers: packed token rows [T, C]; state [slots, C, S]. Windows of W inputs are never materialised: a tile of
nodes climbs its parents and accumulates in registers. A verify step runs the convolution inside
`gdn_prepare`, through `conv_tile`; the commit reaches the states of all layers in one launch.

Floor for one request of n nodes: n C inputs and (W - 1) C state elements read, n C outputs written, n W C
multiply-adds; the commit reads and writes (W - 1) C elements.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from vllm_weaver.kernels.accepted_path import load_path_length, path_lengths
from vllm_weaver.kernels.ancestors import count_usable_nodes, load_usable_count
from vllm_weaver.kernels.common import Impl, expect, expect_dense_last, expect_indices, use_triton
from vllm_weaver.kernels.gdn_buffers import FLOATS, TL_DTYPES, LayerTable, load_layer_slot

Activation = Literal["silu"] | None


def tree_conv_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    state_indices: Tensor,
    query_start_loc: Tensor,
    num_nodes: Tensor,
    parents: Tensor,
    activation: Activation,
    out: Tensor,
) -> None:
    """`tree_conv` in plain PyTorch, fp32, a loop over requests."""
    past = weight.shape[1] - 1
    taps = weight.float()
    starts = query_start_loc.tolist()
    usable = count_usable_nodes(parents, torch.minimum(num_nodes, query_start_loc.diff())).tolist()
    for r, (n, slot) in enumerate(zip(usable, state_indices.tolist(), strict=True)):
        if n == 0:
            continue
        rows = slice(starts[r], starts[r] + n)
        # One sequence holds the state columns and then the nodes; `before` leads one step up a path in it.
        root = torch.arange(-1, past, device=x.device)
        before = torch.cat((root, past + parents[r, 1:n].long()))
        if 0 < slot < conv_state.shape[0]:
            old = conv_state[slot, :, :past].T.float()
        else:
            old = x.new_zeros(past, x.shape[1], dtype=torch.float32)
        inputs = torch.cat((old, x[rows].float()))

        at = past + torch.arange(n, device=x.device)
        total = inputs[at] * taps[:, past]
        for m in range(1, past + 1):
            at = before[at]
            total = total + inputs[at] * taps[:, past - m]
        if bias is not None:
            total = total + bias.float()
        if activation == "silu":
            total = F.silu(total)
        out[rows] = total.to(out.dtype)
        out[starts[r] + n : min(starts[r + 1], starts[r] + parents.shape[1])] = 0


@triton.jit
def conv_tile(
    x_ptr,  # [rows, C] of the request
    weight_ptr,  # [C, WIDTH]
    bias_ptr,  # [C], not read without HAS_BIAS
    state_ptr,  # [C, S] of the request, not read without has_state
    parents_ptr,  # [N] of the request
    i,  # [BLOCK_N] nodes
    valid,  # [BLOCK_N]
    channel,  # [BLOCK_C]
    in_c,  # [BLOCK_C]
    has_state,
    x_stride_t,
    x_stride_c,
    weight_stride_c,
    weight_stride_w,
    state_stride_c,
    state_stride_s,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
):
    """fp32 convolution outputs [BLOCK_N, BLOCK_C] of some nodes and channels of one request; what is not
    valid holds no meaning."""
    total = tl.zeros([i.shape[0], channel.shape[0]], dtype=tl.float32)
    if HAS_BIAS:
        total += tl.load(bias_ptr + channel, mask=in_c, other=0.0).to(tl.float32)[None, :]
    no_state = tl.where(has_state, 0, -WIDTH)
    at = i  # node m steps up the path; -1, -2, ...: state columns, newest first
    for m in tl.static_range(0, WIDTH):
        if m > 0:
            parent = tl.load(parents_ptr + at, mask=valid & (at > 0), other=0)
            at = tl.where(at > 0, tl.maximum(tl.minimum(parent, at - 1), 0), at - 1)
        from_x = tl.load(
            x_ptr + at[:, None] * x_stride_t + channel[None, :] * x_stride_c,
            mask=(valid & (at >= 0))[:, None] & in_c[None, :],
            other=0.0,
        ).to(tl.float32)
        from_state = tl.load(
            state_ptr + channel[None, :] * state_stride_c + (WIDTH - 1 + at)[:, None] * state_stride_s,
            mask=(valid & (at < no_state))[:, None] & in_c[None, :],
            other=0.0,
        ).to(tl.float32)
        tap = tl.load(
            weight_ptr + channel * weight_stride_c + (WIDTH - 1 - m) * weight_stride_w, mask=in_c, other=0.0
        ).to(tl.float32)
        total += (from_x + from_state) * tap[None, :]
    if SILU:
        total = total * tl.sigmoid(total)
    return total


@triton.jit
def _tree_conv_kernel(
    x_ptr,  # [T, C]
    weight_ptr,  # [C, WIDTH]
    bias_ptr,  # [C], not read without HAS_BIAS
    state_ptr,  # [slots, C, S]
    state_indices_ptr,  # [R]
    query_start_loc_ptr,  # [R + 1]
    num_nodes_ptr,  # [R]
    parents_ptr,  # [R, N]
    out_ptr,  # [T, C]
    x_stride_t,
    x_stride_c,
    weight_stride_c,
    weight_stride_w,
    state_indices_stride,
    state_stride_slot,
    state_stride_c,
    state_stride_s,
    out_stride_t,
    out_stride_c,
    num_slots,
    C,
    N,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_TREE: tl.constexpr,  # a power of two >= N
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    r = tl.program_id(2)
    n = tl.load(num_nodes_ptr + r)
    if n <= 0:
        return
    first = tl.load(query_start_loc_ptr + r).to(tl.int64)
    length = tl.minimum(tl.load(query_start_loc_ptr + r + 1) - first, N)
    i = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    in_c = channel < C
    parents_ptr += r.to(tl.int64) * N
    n = load_usable_count(parents_ptr, tl.minimum(n, length), N, BLOCK_TREE)

    slot = tl.load(state_indices_ptr + r * state_indices_stride).to(tl.int64)
    has_state = (slot > 0) & (slot < num_slots)
    state_ptr += tl.where(has_state, slot, 0) * state_stride_slot
    x_ptr += first * x_stride_t
    out_ptr += first * out_stride_t

    valid = i < n
    total = conv_tile(
        x_ptr, weight_ptr, bias_ptr, state_ptr, parents_ptr, i, valid, channel, in_c, has_state,
        x_stride_t, x_stride_c, weight_stride_c, weight_stride_w, state_stride_c, state_stride_s,
        WIDTH, HAS_BIAS, SILU,
    )  # fmt: skip
    tl.store(
        out_ptr + i[:, None] * out_stride_t + channel[None, :] * out_stride_c,
        tl.where(valid[:, None], total, 0.0).to(out_ptr.dtype.element_ty),
        mask=(i < length)[:, None] & in_c[None, :],
    )


def tree_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    state_indices: Tensor,
    query_start_loc: Tensor,
    num_nodes: Tensor,
    parents: Tensor,
    *,
    activation: Activation,
    out: Tensor,
    impl: Impl = "auto",
) -> None:
    """Convolution outputs of every tree node into `out`; `conv_state` is only read.

    x, out [T, C], any strides; weight [C, W], oldest tap first; bias [C] or None; conv_state [slots, C, S]
    with S >= W - 1, any strides, columns 0..W-2 hold the last inputs, oldest first; state_indices, num_nodes
    int32 [R]; query_start_loc int32 [R+1]; parents int32 [R, N], a tree as `ancestors.count_usable_nodes`
    reads it.

    Rows of a request with num_nodes 0 are left alone. A tree request has at most N rows; those from num_nodes
    on, or from the first node with an impossible parent on, give zeros. A slot <= 0 or out of range counts as
    a zero state. Raises `ValueError` for shapes, dtypes or devices that do not fit.
    """
    if activation not in (None, "silu"):
        raise ValueError(f"activation is {activation!r}; it must be None or 'silu'")
    channels, width = x.shape[1], weight.shape[1]
    requests, slots = parents.shape
    expect("x", x, (None, channels), device=x.device, dtypes=FLOATS)
    expect("out", out, (x.shape[0], channels), device=x.device, dtypes=FLOATS)
    expect("weight", weight, (channels, width), device=x.device, dtypes=FLOATS)
    if bias is not None:
        expect("bias", bias, (channels,), device=x.device, dtypes=FLOATS)
    expect_conv_state(conv_state, channels, width, x.device)
    expect("state_indices", state_indices, (requests,), device=x.device, dtypes=(torch.int32,))
    expect_indices(
        x.device,
        ("query_start_loc", query_start_loc, (requests + 1,)),
        ("num_nodes", num_nodes, (requests,)),
        ("parents", parents, (requests, slots)),
    )
    if not use_triton(x, impl):
        tree_conv_reference(
            x, weight, bias, conv_state, state_indices, query_start_loc, num_nodes, parents, activation, out
        )
        return
    block_n, block_c = 16, 64
    _tree_conv_kernel[(triton.cdiv(channels, block_c), triton.cdiv(slots, block_n), requests)](
        x, weight, weight if bias is None else bias.contiguous(), conv_state,
        state_indices, query_start_loc, num_nodes, parents, out,
        *x.stride(), *weight.stride(), state_indices.stride(0), *conv_state.stride(), *out.stride(),
        conv_state.shape[0], channels, slots,
        WIDTH=width,
        HAS_BIAS=bias is not None,
        SILU=activation == "silu",
        BLOCK_TREE=triton.next_power_of_2(slots),
        BLOCK_N=block_n,
        BLOCK_C=block_c,
    )  # fmt: skip


def tree_conv_commit_reference(
    x: Tensor,
    conv_state: Tensor,
    state_indices: Tensor,
    query_start_loc: Tensor,
    num_nodes: Tensor,
    path: Tensor,
    num_path: Tensor,
    width: int,
) -> None:
    """`tree_conv_commit` of one layer in plain PyTorch, a loop over requests."""
    past = width - 1
    starts = query_start_loc.tolist()
    lengths = path_lengths(path, num_path, torch.minimum(num_nodes, query_start_loc.diff())).tolist()
    for r, (length, slot) in enumerate(zip(lengths, state_indices.tolist(), strict=True)):
        if length == 0 or not 0 < slot < conv_state.shape[0]:
            continue
        accepted = x[starts[r] + path[r, :length].long()].to(conv_state.dtype)
        columns = conv_state[slot, :, :past]
        columns.copy_(torch.cat((columns.T, accepted))[length:].T)


@triton.jit
def _tree_conv_commit_kernel(
    x_ptr,  # [layers, rows, C]
    pointers_ptr,  # [layers] addresses of states [slots, C, S]
    index_pointers_ptr,  # [layers] addresses of state indices
    index_strides_ptr,  # [layers]
    query_start_loc_ptr,  # [R + 1]
    num_nodes_ptr,  # [R]
    path_ptr,  # [R, N]
    num_path_ptr,  # [R]
    x_stride_layer,
    x_stride_t,
    state_stride_slot,
    state_stride_c,
    state_stride_s,
    num_slots,
    C,
    N,
    DTYPE: tl.constexpr,
    PAST: tl.constexpr,  # W - 1
    BLOCK_PATH: tl.constexpr,
    BLOCK_PAST: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    layer, r = tl.program_id(1), tl.program_id(2)
    slot = load_layer_slot(index_pointers_ptr, index_strides_ptr, layer, r)
    first = tl.load(query_start_loc_ptr + r).to(tl.int64)
    n = tl.minimum(tl.load(num_nodes_ptr + r), tl.load(query_start_loc_ptr + r + 1) - first)
    path_ptr += r.to(tl.int64) * N
    length = load_path_length(path_ptr, tl.load(num_path_ptr + r), n, N, BLOCK_PATH)
    if (length == 0) | (slot <= 0) | (slot >= num_slots):
        return

    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    column = tl.arange(0, BLOCK_PAST)
    in_tile = (channel < C)[:, None] & (column < PAST)[None, :]
    source = column + length  # in the sequence of old columns and then path nodes
    old = source < PAST
    state_ptr = tl.load(pointers_ptr + layer).to(tl.pointer_type(DTYPE))
    state_ptr += slot * state_stride_slot + channel[:, None] * state_stride_c
    kept = tl.load(state_ptr + source[None, :] * state_stride_s, mask=in_tile & old[None, :], other=0.0)
    node = tl.load(path_ptr + source - PAST, mask=(column < PAST) & (source >= PAST), other=0)
    entered = tl.load(
        x_ptr + layer.to(tl.int64) * x_stride_layer + (first + node)[None, :] * x_stride_t + channel[:, None],
        mask=in_tile & (source >= PAST)[None, :],
        other=0.0,
    )
    tl.debug_barrier()  # every old column has been read before one is overwritten
    tl.store(
        state_ptr + column[None, :] * state_stride_s,
        tl.where(old[None, :], kept, entered.to(DTYPE)),
        mask=in_tile,
    )


def tree_conv_commit(
    x: Tensor,
    layers: LayerTable,
    query_start_loc: Tensor,
    path: Tensor,
    num_path: Tensor,
    width: int,
    *,
    num_nodes: Tensor,
    impl: Impl = "auto",
) -> None:
    """Shifts the inputs of every request's accepted path into all layers' convolution states, in place.

    x [layers, rows, C]: the raw convolution inputs of the step (not its outputs); layers: the states [slots,
    C, S] as for `tree_conv` and their index columns; num_nodes, query_start_loc as for `tree_conv`; path
    int32 [R, N] and num_path int32 [R] as `accepted_path` reads them; `width` is W. Columns from W - 1 on
    are never touched. A request whose path is empty, or whose slot is <= 0 or out of range, changes nothing.
    Raises `ValueError` for shapes, dtypes or devices that do not fit.
    """
    conv_state = layers.states[0]
    count, channels = len(layers.states), x.shape[2]
    requests, slots = path.shape
    expect("x", x, (count, None, channels), device=conv_state.device, dtypes=FLOATS)
    expect_dense_last("x", x)
    expect_conv_state(conv_state, channels, width, x.device)
    layers.check_requests(requests)
    expect_indices(
        x.device,
        ("query_start_loc", query_start_loc, (requests + 1,)),
        ("num_nodes", num_nodes, (requests,)),
        ("path", path, (requests, slots)),
        ("num_path", num_path, (requests,)),
    )
    if not use_triton(x, impl):
        for inputs, state, indices in zip(x, layers.states, layers.indices, strict=True):
            step = (indices[:requests], query_start_loc, num_nodes, path, num_path)
            tree_conv_commit_reference(inputs, state, *step, width)
        return
    block_c = 256
    _tree_conv_commit_kernel[(triton.cdiv(channels, block_c), count, requests)](
        x, layers.pointers, layers.index_pointers, layers.index_strides,
        query_start_loc, num_nodes, path, num_path,
        *x.stride()[:2], *conv_state.stride(), conv_state.shape[0], channels, slots,
        DTYPE=TL_DTYPES[conv_state.dtype],
        PAST=width - 1,
        BLOCK_PATH=triton.next_power_of_2(slots),
        BLOCK_PAST=triton.next_power_of_2(width - 1),
        BLOCK_C=block_c,
    )  # fmt: skip


def expect_conv_state(conv_state: Tensor, channels: int, width: int, device: torch.device) -> None:
    """Raises `ValueError` unless a convolution state [slots, C, S] has room for the width's past."""
    expect("conv_state", conv_state, (None, channels, None), device=device, dtypes=FLOATS)
    if width < 2 or conv_state.shape[2] < width - 1:
        raise ValueError(
            f"conv_state has {conv_state.shape[2]} columns and the convolution width {width}; "
            "the width must be at least 2 and the state must have at least width - 1 columns"
        )
