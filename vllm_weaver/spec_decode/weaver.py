# SPDX-License-Identifier: Apache-2.0
"""The Weaver head: turns a block drafter's D independent marginals into conditional scores for tree nodes.

Weaver ("Trees from Marginals", arXiv 2607.06763) is a small transformer of width `r`. It reads the target's
last hidden state and the D mask-position hidden states of the draft once (the *prompt*), and then one row per
tree node. A node attends to the whole prompt, to its ancestors and to itself; its output, the *query*,
re-scores the draft's candidates for the node's children:

    score(c) = draft_logit(c) + R[c] · query,   child log-probability = log-softmax over the pool's scores.

Two per-token tables are computed once after loading: E = token_in(embed_norm(W_embed)) (node inputs) and
R = W_lm_head @ lm_head_query_in.weight (residual rows), both [V, r].

There are two ways to run node rows. `forward_nodes` takes a whole node set with its ancestor mask and is
differentiable: it is what training uses and what the tests hold to be true. `step_nodes` takes only the new
nodes of a round and a cache of earlier nodes' keys and values: it is what the proposer uses where there is no
Triton. Both go through the same block code. On a GPU the proposer runs kernels over the same weights, see
`weaver_growth.py`.

Letters in shapes: R requests, D draft depth, n node rows of a call, N node slots of a cache, P pool size, V
vocabulary, d target hidden size (`d_model`), r head width (`d_rank`), H heads, h = r / H head dimension, L
blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm_weaver.kernels.ancestors import unpack_mask
from vllm_weaver.kernels.weaver_attention import attend

SLICE_BYTES = 1 << 25
"""Size of the fp32 rows that table building works on at a time."""
HEAD_ROWS = 32
"""Rows that an lm_head gets at a time: enough for its matrix product to be limited by memory alone."""

_NORM_EPS = 1e-6
_MAX_SIZE = 1 << 20  # far above any real size; keeps a damaged config from asking for absurd memory
_SUPPORTED: dict[str, Any] = {"encoder_mode": 3, "score_head": 4, "activation": "swiglu"}


@dataclass(frozen=True)
class WeaverConfig:
    """Shape of a Weaver head, as the `config` entry of its checkpoint gives it.

    Raises `ValueError`, naming key and value, for a value that is of the wrong type, out of range or not
    supported."""

    d_model: int
    """Hidden size of the target (and of the draft's output)."""
    d_embed: int
    """Width of the target's token embedding."""
    d_rank: int
    """Width of the head itself."""
    num_layers: int
    num_heads: int
    mlp_dim: int
    K: int
    """Largest draft depth the head was trained for."""
    candidate_pool_size: int
    """Number of candidates scored per node."""
    encoder_mode: int = 3
    score_head: int = 4
    activation: str = "swiglu"
    rope_base: float = 10000.0

    def __post_init__(self) -> None:
        for name in (
            "d_model",
            "d_embed",
            "d_rank",
            "num_layers",
            "num_heads",
            "mlp_dim",
            "K",
            "candidate_pool_size",
        ):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= _MAX_SIZE:
                raise ValueError(
                    f"Weaver config: {name} must be an integer from 1 to {_MAX_SIZE}, but is {value!r}."
                )
        for name, supported in _SUPPORTED.items():
            value = getattr(self, name)
            if type(value) is not type(supported) or value != supported:
                raise ValueError(f"Weaver config: {name} is {value!r}, but only {supported!r} is supported.")
        base = self.rope_base
        if type(base) not in (int, float) or not math.isfinite(base) or base <= 0:
            raise ValueError(f"Weaver config: rope_base must be a finite number above 0, but is {base!r}.")
        if self.d_rank % self.num_heads or (self.d_rank // self.num_heads) % 2:
            raise ValueError(
                f"Weaver config: d_rank is {self.d_rank}, but must be an even multiple of num_heads "
                f"({self.num_heads})."
            )

    @property
    def head_dim(self) -> int:
        """Dimension of one attention head, `d_rank / num_heads`."""
        return self.d_rank // self.num_heads

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> WeaverConfig:
        """Builds the config from a checkpoint's mapping; unknown and missing keys raise `ValueError`."""
        if not isinstance(mapping, Mapping):
            raise ValueError(f"Weaver config: expected a mapping, but found a {type(mapping).__name__}.")
        known = {f.name for f in fields(cls)}
        unknown = sorted(str(key) for key in mapping if key not in known)
        if unknown:
            key = unknown[0]
            raise ValueError(
                f"Weaver config: unknown key {key!r} with value {str(mapping.get(key))[:80]!r}; "
                f"known keys are {', '.join(sorted(known))}."
            )
        required = {f.name for f in fields(cls) if f.default is MISSING}
        missing = sorted(required - set(mapping))
        if missing:
            raise ValueError(f"Weaver config: missing key(s) {', '.join(missing)}.")
        return cls(**mapping)


@dataclass
class PrefixKV:
    """Rotated keys and values of the D + 1 prompt rows, one entry per block."""

    keys: list[Tensor]
    """L tensors [R, D + 1, H, h]."""
    values: list[Tensor]
    """L tensors [R, D + 1, H, h]."""

    @property
    def depth(self) -> int:
        """The draft depth D this prompt was made of."""
        return self.keys[0].shape[1] - 1


@dataclass
class NodeKV:
    """Rotated keys and values of tree nodes, by node slot; the slot after the last takes the writes of
    skipped rows."""

    keys: Tensor
    """[L, R, N + 1, H, h]."""
    values: Tensor
    """[L, R, N + 1, H, h]."""


class WeaverNorm(nn.Module):
    """`x / sqrt(mean(x²) + 1e-6) * weight + bias` over the last dimension, in fp32 at least, cast back."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + _NORM_EPS)
        return (wide * scale * self.weight + self.bias).to(x.dtype)


class WeaverBlock(nn.Module):
    """One pre-norm transformer block; what the rows attend to is decided by the caller."""

    def __init__(self, config: WeaverConfig) -> None:
        super().__init__()
        rank = config.d_rank
        self.num_heads = config.num_heads
        self.norm_attn = WeaverNorm(rank)
        self.qkv_proj = nn.Linear(rank, 3 * rank, bias=False)
        self.o_proj = nn.Linear(rank, rank, bias=False)
        self.norm_mlp = WeaverNorm(rank)
        self.gate_up_proj = nn.Linear(rank, 2 * config.mlp_dim)
        self.down_proj = nn.Linear(config.mlp_dim, rank)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows [R, n, r] to rotated q, rotated k and v, each [R, n, H, h]; cos and sin are [R, n, h / 2]."""
        q, k, v = self.qkv_proj(self.norm_attn(x)).unflatten(-1, (3, self.num_heads, -1)).unbind(2)
        return rotate_half(q, cos, sin), rotate_half(k, cos, sin), v

    def combine(self, x: Tensor, attention: Tensor) -> Tensor:
        """Adds the attention output [R, n, H, h] and then the gated MLP to the rows [R, n, r]."""
        x = x + self.o_proj(attention.flatten(-2))
        gate, up = self.gate_up_proj(self.norm_mlp(x)).chunk(2, dim=-1)
        return x + self.down_proj(F.silu(gate) * up)


def rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE in the rotate-half layout on x [R, n, H, h] with cos and sin [R, n, h / 2], in their dtype, cast
    back."""
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def node_rows(depths: Tensor, draft_depth: int) -> Tensor:
    """The mask row a node of this depth predicts its children with, `min(depth, D − 1)`, same shape as
    `depths`.

    The node's RoPE position is one more: prompt row 0 is the target's hidden state, mask row j sits at
    position j + 1."""
    return depths.clamp(0, draft_depth - 1)


def pool_logprobs(draft_logits: Tensor, pool_ids: Tensor, residual: Tensor, query: Tensor) -> Tensor:
    """Conditional log-probabilities of a node's candidates: log-softmax over the pool of `draft_logit + R[c]
    · query`.

    draft_logits [..., P] and pool_ids [..., P] (−1: no candidate), residual rows [..., P, r] of those ids
    (any finite row where the id is −1), query [..., r]. Returns [..., P] in fp32 (fp64 where the residual
    rows are): −inf at −1, and −inf everywhere for a row whose scores are not finite. Differentiable."""
    dtype = torch.promote_types(residual.dtype, torch.float32)
    scores = draft_logits.to(dtype) + (residual.to(dtype) @ query.to(dtype).unsqueeze(-1)).squeeze(-1)
    usable = (pool_ids >= 0) & scores.isfinite()
    floor = torch.finfo(dtype).min  # finite, so that a row without any candidate has no NaN gradient
    logprobs = torch.log_softmax(scores.masked_fill(~usable, floor), dim=-1)
    return logprobs.masked_fill(~usable, float("-inf"))


class WeaverHead(nn.Module):
    """The Weaver head; parameter names are those of the published checkpoints.

    A new head starts with `lm_head_query_in` at zero: its scores are then exactly the draft's logits, which
    is where training should begin."""

    def __init__(self, config: WeaverConfig) -> None:
        super().__init__()
        self.config = config
        self.output_norm = WeaverNorm(config.d_model)
        self.embed_norm = WeaverNorm(config.d_embed)
        self.token_in = nn.Linear(config.d_embed, config.d_rank)
        self.proposal_in = nn.Linear(config.d_model, config.d_rank)
        self.blocks = nn.ModuleList(WeaverBlock(config) for _ in range(config.num_layers))
        self.out_norm = WeaverNorm(config.d_rank)
        self.lm_head_query_in = nn.Linear(config.d_rank, config.d_model, bias=False)
        nn.init.zeros_(self.lm_head_query_in.weight)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the parameters, which rows and tables have too."""
        return self.token_in.weight.dtype

    def token_table(
        self, embedding: Tensor | Callable[[Tensor], Tensor], num_rows: int | None = None
    ) -> Tensor:
        """E = token_in(embed_norm(W_embed)): embedding rows [V, d_embed] to node inputs [V, r].

        `embedding` is the weight, or a callable that maps ids [n] to rows [n, d_embed] for the ids below
        `num_rows` (a quantized embedding's own lookup). Also maps any selection of embedding rows, which is
        how training embeds single tokens. Rows are taken in slices: besides the table, memory for a few fp32
        slices of `SLICE_BYTES` is all that is needed."""
        if isinstance(embedding, Tensor):
            weight = embedding
            num_rows, device = len(weight), weight.device

            def rows_of(start: int, stop: int) -> Tensor:
                return weight[start:stop]
        else:
            if num_rows is None:
                raise ValueError("Weaver token table: a lookup needs num_rows, the number of its ids.")
            lookup, device = embedding, self.token_in.weight.device

            def rows_of(start: int, stop: int) -> Tensor:
                return lookup(torch.arange(start, stop, device=device))

        table = torch.empty(num_rows, self.config.d_rank, dtype=self.dtype, device=device)
        step = max(1, SLICE_BYTES // (4 * self.config.d_embed))
        for start in range(0, num_rows, step):
            rows = rows_of(start, min(start + step, num_rows))
            self._check_width("embedding", rows, self.config.d_embed, "d_embed")
            table[start : start + step] = self.token_in(self.embed_norm(rows.to(self.dtype)))
        return table

    def residual_table(self, lm_head: Tensor | Callable[[Tensor], Tensor]) -> Tensor:
        """R = W_lm_head @ lm_head_query_in.weight, [V, r], contiguous.

        `lm_head` is the weight [V, d], or a callable that maps rows [n, d] to logits [n, V]. A quantized head
        passes its own method as the callable: applied to `lm_head_query_in.weight.T` it yields the transpose
        of R, so the rows of W_lm_head are never dequantized. The callable's logits must be raw (no scaling,
        soft cap or gather). It gets `HEAD_ROWS` rows at a time, a weight is read in slices: besides the
        table, only one slice exists."""
        query_in = self.lm_head_query_in.weight
        rank = self.config.d_rank
        if isinstance(lm_head, Tensor):
            self._check_width("lm_head", lm_head, self.config.d_model, "d_model")
            table = torch.empty(len(lm_head), rank, dtype=self.dtype, device=lm_head.device)
            step = max(1, SLICE_BYTES // (4 * max(self.config.d_model, rank)))
            for start in range(0, len(lm_head), step):
                table[start : start + step] = lm_head[start : start + step].to(self.dtype) @ query_in
            return table
        parts: Tensor | None = None
        for start in range(0, rank, HEAD_ROWS):
            rows = query_in[:, start : start + HEAD_ROWS].T.contiguous()
            logits = lm_head(rows)
            if logits.ndim != 2 or logits.shape[0] != len(rows):
                raise ValueError(
                    f"Weaver residual table: lm_head returned shape {tuple(logits.shape)}, "
                    f"expected ({len(rows)}, vocabulary)."
                )
            if parts is None:
                parts = torch.empty(logits.shape[1], rank, dtype=self.dtype, device=logits.device)
            parts[:, start : start + HEAD_ROWS] = logits.T
        assert parts is not None  # d_rank is at least 1
        return parts

    def prompt_rows(self, hidden: Tensor, draft_hidden: Tensor) -> Tensor:
        """The prompt's input rows [R, D + 1, d] in the head's dtype.

        hidden [R, d]: the target's final normed hidden state at the token whose logits gave the root token;
        draft_hidden [R, D, d]: the draft's output at its D mask positions, 1 <= D <= K (`ValueError`
        otherwise)."""
        depth = draft_hidden.shape[1]
        if not 1 <= depth <= self.config.K:
            raise ValueError(
                f"Weaver: the draft depth is {depth}, but this head allows 1 to {self.config.K} (its K); "
                f"use a draft whose block_size is at most {self.config.K + 1}."
            )
        self._check_width("hidden state", hidden, self.config.d_model, "d_model")
        self._check_width("draft hidden state", draft_hidden, self.config.d_model, "d_model")
        return torch.cat((hidden.unsqueeze(1), draft_hidden), dim=1).to(self.dtype)

    def prompt(self, hidden: Tensor, draft_hidden: Tensor) -> PrefixKV:
        """Runs the D + 1 prompt rows (see `prompt_rows`) and returns their keys and values."""
        x = self.proposal_in(self.output_norm(self.prompt_rows(hidden, draft_hidden)))
        depth = draft_hidden.shape[1]
        causal = torch.ones(depth + 1, depth + 1, dtype=torch.bool, device=x.device).tril()
        positions = torch.arange(depth + 1, device=x.device)
        prefix = PrefixKV([], [])

        def causal_attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            prefix.keys.append(k)
            prefix.values.append(v)
            return attend(q, k[:, :0], v[:, :0], k, v, causal)

        self._run(x, positions.expand(x.shape[:2]), causal_attention)
        return prefix

    def forward_nodes(self, x: Tensor, rope_positions: Tensor, visible: Tensor, prefix: PrefixKV) -> Tensor:
        """Queries of a whole node set at once, differentiable.

        x [R, n, r]: rows of the token table; rope_positions [R, n]: `node_rows(depths, D) + 1`; visible bool
        [R, n, n] (or [n, n]): entry (i, j) says that node i attends to node j (its ancestors and itself,
        nothing else). Every node attends to the whole prefix. Returns queries [R, n, r]."""

        def node_attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(q, prefix.keys[layer], prefix.values[layer], k, v, visible)

        return self.out_norm(self._run(x, rope_positions, node_attention))

    def step_nodes(
        self,
        x: Tensor,
        rope_positions: Tensor,
        slots: Tensor,
        mask_words: Tensor,
        prefix: PrefixKV,
        nodes: NodeKV,
    ) -> Tensor:
        """Queries [R, n, r] of the n new nodes of a round; writes their keys and values into `nodes`.

        slots [R, n] are node slots in [0, N), or −1 for a row to skip (its query is meaningless, and it
        writes to the spare slot only). mask_words int32 [R, n, ceil(N / 32)]: bit j of word j // 32 is set
        when the row attends to slot j; that includes its own slot, and never a slot that no round has
        written."""
        spare = nodes.keys.shape[2] - 1
        visible = unpack_mask(mask_words, spare + 1)
        rows = torch.where((slots >= 0) & (slots < spare), slots, spare).to(torch.int64)
        index = rows[..., None, None].expand(-1, -1, *nodes.keys.shape[3:])

        def cached_attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            nodes.keys[layer].scatter_(1, index, k)
            nodes.values[layer].scatter_(1, index, v)
            kv = (prefix.keys[layer], prefix.values[layer], nodes.keys[layer], nodes.values[layer])
            return attend(q, *kv, visible)

        return self.out_norm(self._run(x, rope_positions, cached_attention))

    def new_node_kv(self, num_requests: int, num_slots: int, device: torch.device) -> NodeKV:
        """An empty node cache for `num_slots` nodes a request."""
        cfg = self.config
        shape = (cfg.num_layers, num_requests, num_slots + 1, cfg.num_heads, cfg.head_dim)
        return NodeKV(*(torch.zeros(shape, dtype=self.dtype, device=device) for _ in range(2)))

    def rope(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines [*, h / 2] at these positions [*]."""
        cfg = self.config
        exponent = torch.arange(0, cfg.head_dim, 2, device=positions.device, dtype=dtype) / cfg.head_dim
        angles = positions.unsqueeze(-1).to(dtype) * cfg.rope_base**-exponent
        return angles.cos(), angles.sin()

    def _run(
        self, x: Tensor, positions: Tensor, attention: Callable[[int, Tensor, Tensor, Tensor], Tensor]
    ) -> Tensor:
        cos, sin = self.rope(positions, torch.promote_types(x.dtype, torch.float32))
        for layer, block in enumerate(self.blocks):
            q, k, v = block.project(x, cos, sin)  # type: ignore[operator]
            x = block.combine(x, attention(layer, q, k, v))  # type: ignore[operator]
        return x

    @staticmethod
    def _check_width(what: str, tensor: Tensor, width: int, key: str) -> None:
        if tensor.shape[-1] != width:
            raise ValueError(
                f"Weaver: the {what} has width {tensor.shape[-1]}, but the checkpoint's {key} is {width}; "
                "the Weaver file belongs to another target model."
            )
