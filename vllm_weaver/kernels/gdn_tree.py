# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet over a tree of tokens: outputs of all nodes from the committed state, no per-node state.

With q, k, v the tree convolution of the projected inputs, per value head h (key head h // (HV / Hk)), g =
-exp(A_log) softplus(a + dt_bias), beta = sigmoid(b), q and k L2-normalised, q scaled by K^-0.5, and c_i the
sum of g over the path root..i, the recurrence

    S' = e^g S,  u = beta (v - S'^T k),  S = S' + k u^T,  o = S^T q

becomes, with S0 the committed state,

    u_i = beta_i (v_i - e^{c_i} S0^T k_i - sum_{j proper ancestor of i} e^{c_i - c_j} (k_j . k_i) u_j)
    o_i = e^{c_i} S0^T q_i + sum_{j ancestor of i or i} e^{c_i - c_j} (k_j . q_i) u_j

which is one unit lower triangular system a head (nodes are in topological order). c, k and u go to a
`GdnStash`, from which `gdn_commit` builds the state of any accepted leaf.

Three launches: what is one value a node (`gdn_prepare`), then what is one value a pair of nodes, then the
solve (`gdn_solve`). Buffers: packed token rows [T, C]; state [slots, HV, K, V] or transposed; stash and
scratch have one row a token. No state per node is ever materialised.

Floor for one request of n nodes: HV K V state elements and n (C + 2 HV) activations read, n HV V outputs and
n (C + HV + Hk K + HV V) stash elements written; 4 n K V + n^2 (2 K + 2 V) multiply-adds a value head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from vllm_weaver.kernels.ancestors import num_mask_words, unpack_mask
from vllm_weaver.kernels.common import Impl, expect, expect_dense_last, expect_indices, use_triton
from vllm_weaver.kernels.gdn_buffers import (
    FLOATS,
    GdnScratch,
    GdnShape,
    GdnStash,
    StateLayout,
    state_as_kv,
)
from vllm_weaver.kernels.gdn_dots import Precision, dot_options
from vllm_weaver.kernels.gdn_prepare import NODES, gdn_prepare_kernel
from vllm_weaver.kernels.gdn_solve import gdn_pairs_kernel, gdn_solve_kernel
from vllm_weaver.kernels.pdl import has_pdl, launch_options
from vllm_weaver.kernels.tree_conv import Activation, expect_conv_state, tree_conv_reference

_NORM_EPS = 1e-6


@dataclass(frozen=True)
class GdnTuning:
    """How the launches are cut. `tile`: nodes that are solved at a time, 16 or 32; `pull`: solved nodes whose
    contributions are taken at a time; `ahead`: whether launches begin before the ones that they depend on are
    done.

    Triton lays the warps of dependent products along the longer side of a block: where that is shorter than
    16 rows or 8 columns a warp, warps repeat each other's work (tile 32 by block_v 32 with 4 warps does).
    """

    tile: int
    block_v: int
    pull: int = 32
    prepare_warps: int = 4
    pair_warps: int = 1
    solve_warps: int = 2
    stages: int = 2
    ahead: bool = True
    precision: Precision = "bf16x3"

    @classmethod
    def for_slots(cls, slots: int) -> GdnTuning:
        """The fastest cut on an H200 for trees of up to `slots` nodes."""
        if slots <= 17:
            return cls(tile=16, block_v=32)
        if slots <= 65:
            return cls(tile=32, block_v=32, pair_warps=4)
        return cls(tile=32, block_v=32, ahead=False)


def gdn_tree_verify_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state_kv: Tensor,
    state_indices: Tensor,
    query_start_loc: Tensor,
    num_nodes: Tensor,
    parents: Tensor,
    ancestors: Tensor,
    activation: Activation,
    out: Tensor,
    stash: GdnStash,
    compute: torch.dtype = torch.float32,
) -> None:
    """`gdn_tree_verify` in plain PyTorch: a loop over requests, everything else batched over heads, in the
    dtype `compute` after the convolution."""
    mixed = torch.empty(x.shape, dtype=stash.k.dtype, device=x.device)
    tree_conv_reference(
        x, weight, bias, conv_state, state_indices, query_start_loc, num_nodes, parents, activation, mixed
    )
    (key_heads, k_dim), (heads, v_dim) = stash.k.shape[1:], stash.u.shape[1:]
    keys, per_key = key_heads * k_dim, heads // key_heads
    q, k, v = (
        part.unflatten(1, (count, -1))
        for part, count in zip(
            mixed.split([keys, keys, heads * v_dim], 1), (key_heads, key_heads, heads), strict=True
        )
    )
    rate = -A_log.to(compute).exp()
    starts = query_start_loc.tolist()
    for r, (nodes, slot) in enumerate(zip(num_nodes.tolist(), state_indices.tolist(), strict=True)):
        length = min(starts[r + 1] - starts[r], ancestors.shape[1])
        n = min(nodes, length)
        if n <= 0:
            continue
        rows = slice(starts[r], starts[r] + n)
        seen = unpack_mask(ancestors[r, :n], n)
        invalid = ~seen.diagonal()[:, None]

        g = rate * F.softplus(a[rows].to(compute) + dt_bias.to(compute))
        c = seen.to(compute) @ g.masked_fill(invalid, 0)
        beta = b[rows].to(compute).sigmoid().T[:, :, None]
        queries, keys_, values = (t[rows].to(compute).transpose(0, 1) for t in (q, k, v))
        q_scale, k_scale = (
            torch.rsqrt(t.square().sum(-1, keepdim=True) + _NORM_EPS) for t in (queries, keys_)
        )
        queries, unit_keys = queries * q_scale * k_dim**-0.5, keys_ * k_scale

        key_key = (unit_keys @ unit_keys.mT).repeat_interleave(per_key, 0)
        query_key = (queries @ unit_keys.mT).repeat_interleave(per_key, 0)
        span = c.T[:, :, None] - c.T[:, None, :]
        decay = span.masked_fill(~seen, -torch.inf).exp()

        output = torch.zeros_like(values)
        if 0 < slot < state_kv.shape[0]:
            start = state_kv[slot].to(compute)
            from_start = c.T.exp()[:, :, None]
            values = values - from_start * (unit_keys.repeat_interleave(per_key, 0) @ start)
            output = from_start * (queries.repeat_interleave(per_key, 0) @ start)
        u = torch.linalg.solve_triangular(
            beta * decay.tril(-1) * key_key, beta * values, upper=False, unitriangular=True
        )
        output = output + (decay * query_key) @ u

        out[rows] = output.transpose(0, 1).to(out.dtype)
        out[starts[r] + n : starts[r] + length] = 0
        stash.inputs[rows] = x[rows].masked_fill(invalid, 0)
        stash.k[rows] = k[rows]
        stash.k_scale[rows] = k_scale[..., 0].T.float()
        stash.c[rows] = c.float()
        stash.u[rows] = u.transpose(0, 1).float()


def gdn_tree_verify(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    state_indices: Tensor,
    query_start_loc: Tensor,
    num_nodes: Tensor,
    parents: Tensor,
    ancestors: Tensor,
    *,
    activation: Activation,
    out: Tensor,
    stash: GdnStash,
    scratch: GdnScratch | None,
    state_layout: StateLayout,
    impl: Impl = "auto",
    tuning: GdnTuning | None = None,
) -> None:
    """Outputs of every tree node into `out`, what a commit needs into `stash`; states are only read.

    x [T, C]: projected q, k, v before the convolution, C = 2 Hk K + HV V; weight, bias, conv_state,
    activation as for `tree_conv`; a, b [T, HV]; A_log, dt_bias [HV]; state [slots, HV, K, V] ("kv") or
    [slots, HV, V, K] ("vk"), any strides; state_indices, num_nodes int32 [R]; query_start_loc int32 [R+1];
    parents int32 [R, N] and ancestors int32 [R, N, ceil(N/32)], the masks of these parents; out [T, HV, V];
    stash of one layer; scratch, which the reference does not need. HV is a multiple of Hk.

    Rows of a request with num_nodes 0 are left alone, in `out` and in `stash`. A tree request has at most N
    rows; those from num_nodes on, and nodes that lack their own ancestor bit, give zeros. A slot <= 0 or out
    of range counts as zero states. Raises `ValueError` for shapes, dtypes or devices that do not fit.
    """
    tokens, channels = x.shape
    device = x.device
    shape = GdnShape(*stash.k.shape[1:], *stash.u.shape[1:])
    requests, slots = parents.shape
    state_kv = state_as_kv(state, state_layout)
    if activation not in (None, "silu"):
        raise ValueError(f"activation is {activation!r}; it must be None or 'silu'")
    if shape.heads % shape.key_heads:
        raise ValueError(f"{shape.heads} value heads must be a multiple of the {shape.key_heads} key heads")
    shapes: dict[str, tuple[Tensor, tuple[int | None, ...]]] = {
        "x": (x, (tokens, shape.channels)),
        "weight": (weight, (channels, None)),
        "a": (a, (tokens, shape.heads)),
        "b": (b, (tokens, shape.heads)),
        "A_log": (A_log, (shape.heads,)),
        "dt_bias": (dt_bias, (shape.heads,)),
        "out": (out, (tokens, shape.heads, shape.v_dim)),
    }
    for name, (tensor, sizes) in shapes.items():
        expect(name, tensor, sizes, device=device, dtypes=FLOATS)
        if name != "weight":
            expect_dense_last(name, tensor)
    if bias is not None:
        expect("bias", bias, (channels,), device=device, dtypes=FLOATS)
        expect_dense_last("bias", bias)
    expect_conv_state(conv_state, channels, weight.shape[1], device)
    expected_state = (None, shape.heads, shape.k_dim, shape.v_dim)
    expect("state (as [slots, HV, K, V])", state_kv, expected_state, device=device, dtypes=FLOATS)
    expect("state_indices", state_indices, (requests,), device=device, dtypes=(torch.int32,))
    expect_indices(
        device,
        ("query_start_loc", query_start_loc, (requests + 1,)),
        ("num_nodes", num_nodes, (requests,)),
        ("parents", parents, (requests, slots)),
        ("ancestors", ancestors, (requests, slots, num_mask_words(slots))),
    )
    stash.check((stash.c.shape[0],), shape, device=device)
    if tokens > stash.c.shape[0]:
        raise ValueError(f"the step has {tokens} rows; the stash was allocated for {stash.c.shape[0]}")
    step = (query_start_loc, num_nodes)
    if not use_triton(x, impl):
        gdn_tree_verify_reference(
            x, weight, bias, conv_state, a, b, A_log, dt_bias, state_kv, state_indices, *step,
            parents, ancestors, activation, out, stash,
        )  # fmt: skip
        return
    if scratch is None:
        raise ValueError("the Triton kernels need a scratch; make it with GdnScratch.allocate")
    scratch.check(tokens, slots, shape, device=device, dtype=stash.k.dtype)
    cut = tuning or GdnTuning.for_slots(slots)
    block_k = max(16, triton.next_power_of_2(shape.k_dim))
    block_v = min(cut.block_v, max(16, triton.next_power_of_2(shape.v_dim)))
    tiles, words = triton.cdiv(max(1, slots - 1), cut.tile), num_mask_words(slots)
    rows, pitch = scratch.lower.shape[1:]
    common = {
        "PITCH": pitch, "HV": shape.heads, "HEADS_PER_KEY": shape.heads // shape.key_heads,
        "K": shape.k_dim, "TILE": cut.tile, "BLOCK_K": block_k,
        **dot_options(device, stash.k.dtype, cut.precision),
        **launch_options(x),
    }  # fmt: skip
    gdn_prepare_kernel[(2 * shape.key_heads + shape.heads, triton.cdiv(slots, NODES), requests)](
        x, weight, weight if bias is None else bias, conv_state, a, b, A_log, dt_bias,
        state_indices, *step, parents, ancestors,
        stash.inputs, stash.k, stash.k_scale, stash.c, scratch.q, scratch.q_scale, scratch.v, scratch.beta,
        x.stride(0), *weight.stride(), *conv_state.stride(), a.stride(0), b.stride(0),
        state_indices.stride(0), conv_state.shape[0], slots,
        HK=shape.key_heads,
        HV=shape.heads,
        K=shape.k_dim,
        V=shape.v_dim,
        WIDTH=weight.shape[1],
        HAS_BIAS=bias is not None,
        SILU=activation == "silu",
        NORM_EPS=_NORM_EPS,
        WORDS=words,
        BLOCK_N=NODES,
        BLOCK_D=triton.next_power_of_2(max(shape.k_dim, shape.v_dim)),
        PDL=cut.ahead and has_pdl(x),
        num_warps=cut.prepare_warps,
    )  # fmt: skip
    gdn_pairs_kernel[(shape.heads, tiles * (tiles + 1) // 2, requests)](
        scratch.q, stash.k, scratch.q_scale, stash.k_scale, stash.c, scratch.beta, *step, ancestors,
        scratch.lower, scratch.attend, rows, slots, words, **common, num_warps=cut.pair_warps,
    )  # fmt: skip
    gdn_solve_kernel[(triton.cdiv(shape.v_dim, block_v), shape.heads, requests)](
        scratch.q, stash.k, scratch.q_scale, stash.k_scale, scratch.v, stash.c, scratch.beta,
        scratch.lower, scratch.attend, state_kv, state_indices, *step, out, stash.u,
        state_indices.stride(0), *state_kv.stride(), *out.stride()[:2], state_kv.shape[0], rows, slots,
        **common,
        V=shape.v_dim,
        PULL=cut.pull,
        BLOCK_V=block_v,
        AHEAD=cut.ahead,
        num_warps=cut.solve_warps,
        num_stages=cut.stages,
    )  # fmt: skip
