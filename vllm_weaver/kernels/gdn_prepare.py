# SPDX-License-Identifier: Apache-2.0
"""First launch of the Gated DeltaNet tree verify: everything that is one value a node, from `mixed_qkv`.

Per node: the tree convolution of all channels (see `tree_conv`), rounded to the activations' dtype as
vLLM's kernels leave it; the factors 1 / |q| and 1 / |k| of every key head; c = sum of g over the path root..i
and beta of every value head; and a copy of the raw inputs for the convolution's commit. Buffers: `GdnStash`
and `GdnScratch`.

Neither windows of the convolution nor g are materialised. Floor for n nodes: n C inputs and (W - 1) C state
elements read, 2 n C elements written.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_weaver.kernels.pdl import let_next_start
from vllm_weaver.kernels.tree_conv import conv_tile

NODES = 16
"""Nodes of a program; divides 32, so that their own bits lie in one mask word."""


@triton.jit
def _log_decay(a, dt_bias, A_log):
    """g of gates a; softplus is linear above 20, as in vLLM's GDN kernels."""
    x = a.to(tl.float32) + dt_bias
    return -tl.exp(A_log) * tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def gdn_prepare_kernel(
    x_ptr,  # [T, C]
    weight_ptr,  # [C, WIDTH]
    bias_ptr,  # [C], not read without HAS_BIAS
    conv_state_ptr,  # [slots, C, S]
    a_ptr,  # [T, HV]
    b_ptr,  # [T, HV]
    A_log_ptr,  # [HV]
    dt_bias_ptr,  # [HV]
    state_indices_ptr,  # [R]
    query_start_loc_ptr,  # [R + 1]
    num_nodes_ptr,  # [R]
    parents_ptr,  # [R, N]
    ancestors_ptr,  # [R, N, WORDS]
    inputs_ptr,  # [rows, C]
    k_ptr,  # [rows, HK, K]
    k_scale_ptr,  # [rows, HK]
    c_ptr,  # [rows, HV]
    q_ptr,  # [rows, HK, K]
    q_scale_ptr,  # [rows, HK]
    v_ptr,  # [rows, HV, V]
    beta_ptr,  # [rows, HV]
    x_stride_t,
    weight_stride_c,
    weight_stride_w,
    conv_stride_slot,
    conv_stride_c,
    conv_stride_s,
    a_stride_t,
    b_stride_t,
    state_indices_stride,
    num_slots,
    N,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    NORM_EPS: tl.constexpr,
    WORDS: tl.constexpr,  # mask words of a node
    BLOCK_N: tl.constexpr,  # NODES
    BLOCK_D: tl.constexpr,  # a power of two >= K and V
    PDL: tl.constexpr,
):
    let_next_start(PDL)  # nothing is to be waited for: this launch is an ordinary one
    unit, tile, r = tl.program_id(0), tl.program_id(1), tl.program_id(2)  # unit: q heads, k heads, v heads
    n = tl.load(num_nodes_ptr + r)
    first = tl.load(query_start_loc_ptr + r).to(tl.int64)
    slot = tl.load(state_indices_ptr + r * state_indices_stride).to(tl.int64)
    n = tl.minimum(n, tl.minimum(tl.load(query_start_loc_ptr + r + 1) - first, N).to(tl.int32))
    if tile * BLOCK_N >= n:
        return
    i = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    parents_ptr += r.to(tl.int64) * N
    ancestors_ptr += (r.to(tl.int64) * N + i) * WORDS
    in_tree = i < n
    bits = tl.load(ancestors_ptr + tile * BLOCK_N // 32, mask=in_tree, other=0)
    valid = ((bits >> (i & 31)) & 1) != 0

    has_state = (slot > 0) & (slot < num_slots)
    conv_state_ptr += tl.where(has_state, slot, 0) * conv_stride_slot
    is_value = unit >= 2 * HK
    value_head = unit - 2 * HK
    dim = tl.arange(0, BLOCK_D)
    in_d = dim < tl.where(is_value, V, K)
    channel = tl.where(is_value, 2 * HK * K + value_head * V, unit * K) + dim
    store = in_tree[:, None] & in_d[None, :]
    row = first + i

    x_ptr += first * x_stride_t
    raw = tl.load(x_ptr + i[:, None] * x_stride_t + channel[None, :], mask=valid[:, None] & store, other=0.0)
    tl.store(
        inputs_ptr + row[:, None] * (2 * HK * K + HV * V) + channel[None, :],
        raw.to(inputs_ptr.dtype.element_ty),
        mask=store,
    )
    mixed = conv_tile(
        x_ptr, weight_ptr, bias_ptr, conv_state_ptr, parents_ptr, i, valid, channel, in_d, has_state,
        x_stride_t, 1, weight_stride_c, weight_stride_w, conv_stride_c, conv_stride_s,
        WIDTH, HAS_BIAS, SILU,
    )  # fmt: skip
    mixed = tl.where(valid[:, None] & in_d[None, :], mixed, 0.0).to(k_ptr.dtype.element_ty)
    if is_value:
        tl.store(v_ptr + (row[:, None] * HV + value_head) * V + dim[None, :], mixed, mask=store)
        # Unrolled, so that the sums over ancestors wait for one round of loads, not for a loop of them.
        dt_bias = tl.load(dt_bias_ptr + value_head).to(tl.float32)
        A_log = tl.load(A_log_ptr + value_head).to(tl.float32)
        c = tl.zeros((BLOCK_N,), dtype=tl.float32)
        for at in tl.static_range(0, WORDS):
            j = at * 32 + tl.arange(0, 32)
            a = tl.load(a_ptr + (first + j) * a_stride_t + value_head, mask=j < n, other=0.0)
            word = tl.load(ancestors_ptr + at, mask=in_tree, other=0)
            seen = (((word[:, None] >> (j & 31)[None, :]) & 1) != 0) & (j < n)[None, :]
            c += tl.sum(tl.where(seen, _log_decay(a, dt_bias, A_log)[None, :], 0.0), axis=1)
        tl.store(c_ptr + row * HV + value_head, c, mask=in_tree)
        b = tl.load(b_ptr + row * b_stride_t + value_head, mask=valid, other=0.0).to(tl.float32)
        tl.store(beta_ptr + row * HV + value_head, tl.sigmoid(b), mask=in_tree)
    else:
        exact = mixed.to(tl.float32)
        scale = tl.rsqrt(tl.sum(exact * exact, axis=1) + NORM_EPS)
        if unit < HK:
            tl.store(q_ptr + (row[:, None] * HK + unit) * K + dim[None, :], mixed, mask=store)
            tl.store(q_scale_ptr + row * HK + unit, scale * (K**-0.5), mask=in_tree)
        else:
            tl.store(k_ptr + (row[:, None] * HK + unit - HK) * K + dim[None, :], mixed, mask=store)
            tl.store(k_scale_ptr + row * HK + unit - HK, scale, mask=in_tree)
