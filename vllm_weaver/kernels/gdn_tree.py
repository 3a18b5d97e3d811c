# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet over a tree of tokens: outputs of all nodes from the committed state, no per-node state.

Per value head h (key head h // (HV / Hk)), with g = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b), q
and k L2-normalised, q scaled by K^-0.5, and c_i the sum of g over the path root..i, the recurrence

    S' = e^g S,  u = beta (v - S'^T k),  S = S' + k u^T,  o = S^T q

becomes, with S0 the committed state,

    u_i = beta_i (v_i - e^{c_i} S0^T k_i - sum_{j proper ancestor of i} e^{c_i - c_j} (k_j . k_i) u_j)
    o_i = e^{c_i} S0^T q_i + sum_{j ancestor of i or i} e^{c_i - c_j} (k_j . q_i) u_j

which is one unit lower triangular system a head (nodes are in topological order). c, the normalised k and u
go to a `GdnStash`, from which `gdn_commit` builds the state of any accepted leaf.

Buffers: packed token rows [T, heads, dim]; state [slots, HV, K, V] or transposed; the stash has one row a
token. Neither a state per node nor any [N, N] matrix reaches memory: tiles of 16 or 32 nodes of both live in
registers.

Floor for one request of n nodes: HV K V state elements and n (2 Hk K + 2 HV V) activations read, n HV V
outputs and n (HV + Hk K + HV V) stash elements written; 4 n K V + n^2 (2 K + 2 V) multiply-adds a value head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from vllm_weaver.kernels.ancestors import num_mask_words, unpack_mask
from vllm_weaver.kernels.common import Impl, expect, expect_dense_last, expect_indices, use_triton

StateLayout = Literal["kv", "vk"]
"""Last two dimensions of the recurrent state: [K, V] (vLLM on CPU) or [V, K] (vLLM on CUDA)."""

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_NORM_EPS = 1e-6


@dataclass(frozen=True)
class GdnStash:
    """What a verify pass keeps until the commit, one row a packed token of the step.

    c fp32 [Tmax, HV]: log-decay from the committed state to the node. k [Tmax, Hk, K]: normalised keys.
    u [Tmax, HV, V]: the node's writes. Rows that are not valid tree nodes are never written.
    """

    c: Tensor
    k: Tensor
    u: Tensor

    @classmethod
    def allocate(
        cls,
        max_tokens: int,
        num_k_heads: int,
        k_dim: int,
        num_v_heads: int,
        v_dim: int,
        *,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> GdnStash:
        """Zero-filled buffers for steps of up to `max_tokens` packed rows; `dtype` is that of k and u."""
        return cls(
            torch.zeros(max_tokens, num_v_heads, device=device, dtype=torch.float32),
            torch.zeros(max_tokens, num_k_heads, k_dim, device=device, dtype=dtype),
            torch.zeros(max_tokens, num_v_heads, v_dim, device=device, dtype=dtype),
        )

    def check(
        self, num_k_heads: int, k_dim: int, num_v_heads: int, v_dim: int, *, device: torch.device
    ) -> None:
        """Raises `ValueError` unless the buffers have these sizes, are dense and lie on `device`."""
        tokens = self.c.shape[0]
        expect("stash.c", self.c, (tokens, num_v_heads), device=device, dtypes=(torch.float32,))
        expect("stash.k", self.k, (tokens, num_k_heads, k_dim), device=device, dtypes=_FLOATS)
        expect("stash.u", self.u, (tokens, num_v_heads, v_dim), device=device, dtypes=_FLOATS)
        if not (self.c.is_contiguous() and self.k.is_contiguous() and self.u.is_contiguous()):
            raise ValueError("the stash is not contiguous; make it with GdnStash.allocate")


def state_as_kv(state: Tensor, layout: StateLayout) -> Tensor:
    """View of a recurrent state [slots, HV, K, V] or [slots, HV, V, K] as [slots, HV, K, V]."""
    if layout not in ("kv", "vk"):
        raise ValueError(f"state_layout is {layout!r}; it must be 'kv' or 'vk'")
    return state if layout == "kv" else state.transpose(-1, -2)


def gdn_tree_verify_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state_kv: Tensor,
    state_indices: Tensor,
    query_start_loc: Tensor,
    num_nodes: Tensor,
    ancestors: Tensor,
    out: Tensor,
    stash: GdnStash,
) -> None:
    """`gdn_tree_verify` in plain PyTorch: a loop over requests, everything else batched over heads. fp32."""
    heads_per_key = v.shape[1] // k.shape[1]
    rate = -A_log.float().exp()
    starts = query_start_loc.tolist()
    for r, (nodes, slot) in enumerate(zip(num_nodes.tolist(), state_indices.tolist(), strict=True)):
        length = min(starts[r + 1] - starts[r], ancestors.shape[1])
        n = min(nodes, length)
        if n <= 0:
            continue
        rows = slice(starts[r], starts[r] + n)
        seen = unpack_mask(ancestors[r, :n], n)
        invalid = ~seen.diagonal()[:, None]

        g = rate * F.softplus(a[rows].float() + dt_bias.float())
        c = seen.float() @ g.masked_fill(invalid, 0)
        beta = b[rows].float().sigmoid().T[:, :, None]
        qn, kn = (
            x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _NORM_EPS)
            for x in (t[rows].float().masked_fill(invalid[..., None], 0) for t in (q, k))
        )
        values = v[rows].float().masked_fill(invalid[..., None], 0).transpose(0, 1)

        keys, queries = kn.transpose(0, 1), qn.transpose(0, 1) * q.shape[-1] ** -0.5
        key_key = (keys @ keys.mT).repeat_interleave(heads_per_key, 0)
        query_key = (queries @ keys.mT).repeat_interleave(heads_per_key, 0)
        span = c.T[:, :, None] - c.T[:, None, :]
        decay = span.masked_fill(~seen, -torch.inf).exp()

        output = torch.zeros_like(values)
        if 0 < slot < state_kv.shape[0]:
            start = state_kv[slot].float()
            from_start = c.T.exp()[:, :, None]
            values = values - from_start * (keys.repeat_interleave(heads_per_key, 0) @ start)
            output = from_start * (queries.repeat_interleave(heads_per_key, 0) @ start)
        u = torch.linalg.solve_triangular(
            beta * decay.tril(-1) * key_key, beta * values, upper=False, unitriangular=True
        )
        output = output + (decay * query_key) @ u

        out[rows] = output.transpose(0, 1).to(out.dtype)
        out[starts[r] + n : starts[r] + length] = 0
        stash.c[rows] = c
        stash.k[rows] = kn.to(stash.k.dtype)
        stash.u[rows] = u.transpose(0, 1).to(stash.u.dtype)


@triton.jit
def _unit_rows(x, mask, NORM_EPS: tl.constexpr):
    """L2-normalised fp32 rows of a tile of pointers; masked entries count as 0."""
    rows = tl.load(x, mask=mask, other=0.0).to(tl.float32)
    return rows * tl.rsqrt(tl.sum(rows * rows, axis=1) + NORM_EPS)[:, None]


@triton.jit
def _log_decay(a, dt_bias, A_log, mask):
    """g of a vector of gates a; softplus is linear above 20, as in vLLM's GDN kernels."""
    x = tl.load(a, mask=mask, other=0.0).to(tl.float32) + dt_bias
    return -tl.exp(A_log) * tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def _gdn_tree_kernel(
    q_ptr,  # [T, Hk, K]
    k_ptr,  # [T, Hk, K]
    v_ptr,  # [T, HV, V]
    a_ptr,  # [T, HV]
    b_ptr,  # [T, HV]
    A_log_ptr,  # [HV]
    dt_bias_ptr,  # [HV]
    state_ptr,  # [slots, HV, K, V]
    state_indices_ptr,  # [R]
    query_start_loc_ptr,  # [R + 1]
    num_nodes_ptr,  # [R]
    ancestors_ptr,  # [R, N, WORDS]
    out_ptr,  # [T, HV, V]
    c_ptr,  # [Tmax, HV]
    stash_k_ptr,  # [Tmax, Hk, K]
    u_ptr,  # [Tmax, HV, V]
    q_stride_t,
    q_stride_h,
    k_stride_t,
    k_stride_h,
    v_stride_t,
    v_stride_h,
    a_stride_t,
    b_stride_t,
    state_indices_stride,
    state_stride_slot,
    state_stride_h,
    state_stride_k,
    state_stride_v,
    out_stride_t,
    out_stride_h,
    num_slots,
    N,
    WORDS,
    HV: tl.constexpr,
    HEADS_PER_KEY: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    NORM_EPS: tl.constexpr,
    BLOCK_N: tl.constexpr,  # divides 32, so that a tile's columns lie in one mask word
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    v_tile, head, r = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n = tl.load(num_nodes_ptr + r)
    if n <= 0:
        return
    first = tl.load(query_start_loc_ptr + r).to(tl.int64)
    length = tl.minimum(tl.load(query_start_loc_ptr + r + 1) - first, N).to(tl.int32)
    n = tl.minimum(n, length)
    key_head = head // HEADS_PER_KEY

    in_tile = tl.arange(0, BLOCK_N)
    dim_k = tl.arange(0, BLOCK_K)
    dim_v = v_tile * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_k = dim_k < K
    mask_v = dim_v < V
    A_log = tl.load(A_log_ptr + head).to(tl.float32)
    dt_bias = tl.load(dt_bias_ptr + head).to(tl.float32)
    q_ptr += first * q_stride_t + key_head * q_stride_h
    k_ptr += first * k_stride_t + key_head * k_stride_h
    v_ptr += first * v_stride_t + head * v_stride_h
    a_ptr += first * a_stride_t + head
    b_ptr += first * b_stride_t + head
    out_ptr += first * out_stride_t + head * out_stride_h
    c_ptr += first * HV + head
    u_ptr += (first * HV + head) * V
    stash_k_ptr += (first * (HV // HEADS_PER_KEY) + key_head) * K
    ancestors_ptr += r.to(tl.int64) * N * WORDS

    slot = tl.load(state_indices_ptr + r * state_indices_stride).to(tl.int64)
    has_state = (slot > 0) & (slot < num_slots)
    slot = tl.where(has_state, slot, 0)
    start = tl.load(
        state_ptr
        + slot * state_stride_slot
        + head * state_stride_h
        + dim_k[:, None] * state_stride_k
        + dim_v[None, :] * state_stride_v,
        mask=(dim_k < tl.where(has_state, K, 0))[:, None] & mask_v[None, :],
        other=0.0,
    ).to(tl.float32)

    num_tiles = tl.cdiv(n, BLOCK_N)
    for tile in range(0, num_tiles):
        i = tile * BLOCK_N + in_tile
        words_i = ancestors_ptr + i * WORDS
        own_bits = tl.load(words_i + tile * BLOCK_N // 32, mask=i < n, other=0)
        seen = ((own_bits[:, None] >> (i & 31)[None, :]) & 1) != 0
        valid = ((own_bits >> (i & 31)) & 1) != 0
        tile_k = valid[:, None] & mask_k[None, :]
        tile_v = valid[:, None] & mask_v[None, :]

        # c first: every later use needs it. All V tiles of a head store the same values, each reads its own.
        g = _log_decay(a_ptr + i * a_stride_t, dt_bias, A_log, valid)
        c = tl.sum(tl.where(seen, g[None, :], 0.0), axis=1)
        for before in range(0, tile):
            j = before * BLOCK_N + in_tile
            bits = tl.load(words_i + before * BLOCK_N // 32, mask=i < n, other=0)
            g = _log_decay(a_ptr + j * a_stride_t, dt_bias, A_log, j < n)
            c += tl.sum(tl.where(((bits[:, None] >> (j & 31)[None, :]) & 1) != 0, g[None, :], 0.0), axis=1)
        tl.store(c_ptr + i * HV, c, mask=i < n)

        keys = _unit_rows(k_ptr + i[:, None] * k_stride_t + dim_k[None, :], tile_k, NORM_EPS)
        queries = _unit_rows(q_ptr + i[:, None] * q_stride_t + dim_k[None, :], tile_k, NORM_EPS) * (K**-0.5)
        if (v_tile == 0) & (head % HEADS_PER_KEY == 0):
            tl.store(
                stash_k_ptr + i[:, None] * (HV // HEADS_PER_KEY * K) + dim_k[None, :],
                keys.to(stash_k_ptr.dtype.element_ty),
                mask=(i < n)[:, None] & mask_k[None, :],
            )

        from_start = tl.exp(c)[:, None]
        values = tl.load(v_ptr + i[:, None] * v_stride_t + dim_v[None, :], mask=tile_v, other=0.0)
        values = values.to(tl.float32)
        values -= from_start * tl.dot(keys, start, input_precision="ieee")
        output = from_start * tl.dot(queries, start, input_precision="ieee")
        for before in range(0, tile):
            j = before * BLOCK_N + in_tile
            bits = tl.load(words_i + before * BLOCK_N // 32, mask=i < n, other=0)
            earlier = ((bits[:, None] >> (j & 31)[None, :]) & 1) != 0
            c_j = tl.load(c_ptr + j * HV)
            decay = tl.exp(tl.where(earlier, c[:, None] - c_j[None, :], float("-inf")))
            keys_j = _unit_rows(k_ptr + j[:, None] * k_stride_t + dim_k[None, :], mask_k[None, :], NORM_EPS)
            u_j = tl.load(u_ptr + j[:, None] * (HV * V) + dim_v[None, :], mask=mask_v[None, :], other=0.0)
            u_j = u_j.to(tl.float32)
            key_key = tl.dot(keys, tl.trans(keys_j), input_precision="ieee")
            query_key = tl.dot(queries, tl.trans(keys_j), input_precision="ieee")
            values -= tl.dot(decay * key_key, u_j, input_precision="ieee")
            output += tl.dot(decay * query_key, u_j, input_precision="ieee")

        # The tile's own triangle: row t is final once rows 0..t-1 have been subtracted from it.
        beta = tl.sigmoid(tl.load(b_ptr + i * b_stride_t, mask=valid, other=0.0).to(tl.float32))
        decay = tl.exp(tl.where(seen, c[:, None] - c[None, :], float("-inf")))
        key_key = tl.dot(keys, tl.trans(keys), input_precision="ieee")
        lower = tl.where(in_tile[:, None] > in_tile[None, :], beta[:, None] * decay * key_key, 0.0)
        u = beta[:, None] * values
        for t in range(0, tl.minimum(BLOCK_N, n - tile * BLOCK_N)):
            column = tl.sum(tl.where(in_tile[None, :] == t, lower, 0.0), axis=1)
            solved = tl.sum(tl.where(in_tile[:, None] == t, u, 0.0), axis=0)
            u -= column[:, None] * solved[None, :]
        tl.store(
            u_ptr + i[:, None] * (HV * V) + dim_v[None, :],
            u.to(u_ptr.dtype.element_ty),
            mask=(i < n)[:, None] & mask_v[None, :],
        )
        query_key = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        output += tl.dot(decay * query_key, u, input_precision="ieee")
        tl.store(
            out_ptr + i[:, None] * out_stride_t + dim_v[None, :],
            tl.where(valid[:, None], output, 0.0).to(out_ptr.dtype.element_ty),
            mask=(i < length)[:, None] & mask_v[None, :],
        )
        tl.debug_barrier()  # later tiles read c and u back

    for tile in range(num_tiles, tl.cdiv(length, BLOCK_N)):
        i = tile * BLOCK_N + in_tile
        tl.store(
            out_ptr + i[:, None] * out_stride_t + dim_v[None, :],
            tl.zeros([BLOCK_N, BLOCK_V], dtype=out_ptr.dtype.element_ty),
            mask=(i < length)[:, None] & mask_v[None, :],
        )


def gdn_tree_verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    state_indices: Tensor,
    query_start_loc: Tensor,
    num_nodes: Tensor,
    ancestors: Tensor,
    *,
    out: Tensor,
    stash: GdnStash,
    state_layout: StateLayout,
    impl: Impl = "auto",
) -> None:
    """Outputs of every tree node into `out`; c, k, u of every node into `stash`; `state` is only read.

    q, k [T, Hk, K]; v [T, HV, V]; a, b [T, HV]; A_log, dt_bias [HV]; state [slots, HV, K, V] ("kv") or
    [slots, HV, V, K] ("vk"), any strides; state_indices, num_nodes int32 [R]; query_start_loc int32 [R+1];
    ancestors int32 [R, N, ceil(N/32)]; out [T, HV, V]. HV is a multiple of Hk.

    Rows of a request with num_nodes 0 are left alone, in `out` and in `stash`. A tree request has at most N
    rows; those from num_nodes on, and nodes that lack their own ancestor bit, give zeros. A slot <= 0 or out
    of range counts as a zero state. Raises `ValueError` for shapes, dtypes or devices that do not fit.
    """
    tokens, key_heads, k_dim = q.shape
    heads, v_dim = v.shape[1:]
    requests, slots = ancestors.shape[:2]
    state_kv = state_as_kv(state, state_layout)
    if heads % key_heads:
        raise ValueError(f"v has {heads} heads; it must have a multiple of the {key_heads} heads of k")
    shapes: dict[str, tuple[Tensor, tuple[int | None, ...]]] = {
        "q": (q, (tokens, key_heads, k_dim)),
        "k": (k, (tokens, key_heads, k_dim)),
        "v": (v, (tokens, heads, v_dim)),
        "a": (a, (tokens, heads)),
        "b": (b, (tokens, heads)),
        "out": (out, (tokens, heads, v_dim)),
        "A_log": (A_log, (heads,)),
        "dt_bias": (dt_bias, (heads,)),
    }
    for name, (tensor, shape) in shapes.items():
        expect(name, tensor, shape, device=q.device, dtypes=_FLOATS)
        expect_dense_last(name, tensor)
    expected_state = (None, heads, k_dim, v_dim)
    expect("state (as [slots, HV, K, V])", state_kv, expected_state, device=q.device, dtypes=_FLOATS)
    expect("state_indices", state_indices, (requests,), device=q.device, dtypes=(torch.int32,))
    expect_indices(
        q.device,
        ("query_start_loc", query_start_loc, (requests + 1,)),
        ("num_nodes", num_nodes, (requests,)),
        ("ancestors", ancestors, (requests, slots, num_mask_words(slots))),
    )
    stash.check(key_heads, k_dim, heads, v_dim, device=q.device)
    if tokens > stash.c.shape[0]:
        raise ValueError(f"the step has {tokens} rows; the stash was allocated for {stash.c.shape[0]}")
    if not use_triton(q, impl):
        gdn_tree_verify_reference(
            q, k, v, a, b, A_log, dt_bias, state_kv, state_indices, query_start_loc, num_nodes, ancestors,
            out, stash,
        )  # fmt: skip
        return
    block_k = max(16, triton.next_power_of_2(k_dim))
    block_v = min(32, max(16, triton.next_power_of_2(v_dim)))
    _gdn_tree_kernel[(triton.cdiv(v_dim, block_v), heads, requests)](
        q, k, v, a, b, A_log, dt_bias, state_kv, state_indices, query_start_loc, num_nodes, ancestors,
        out, stash.c, stash.k, stash.u,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], a.stride(0), b.stride(0),
        state_indices.stride(0), *state_kv.stride(), *out.stride()[:2],
        state_kv.shape[0], slots, num_mask_words(slots),
        HV=heads,
        HEADS_PER_KEY=heads // key_heads,
        K=k_dim,
        V=v_dim,
        NORM_EPS=_NORM_EPS,
        BLOCK_N=16 if slots <= 48 or block_k > 128 else 32,
        BLOCK_K=block_k,
        BLOCK_V=block_v,
    )  # fmt: skip
