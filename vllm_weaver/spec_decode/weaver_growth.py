# SPDX-License-Identifier: Apache-2.0
"""Growing a Weaver tree with kernels: the prompt, then rounds of expanding and taking nodes.

The same mathematics as `WeaverHead.prompt`, `WeaverHead.step_nodes` and the plain loop of `WeaverProposer`,
in seven launches a round (for each block qkv, attention, o_proj, gate_up and down_proj; then scores and
selection) and three before them, none of which needs the host. A prompt of L blocks runs only the key and
value part of the last one, as nothing else of it is read.

Floor: a round streams the weights of the blocks (8 r² + 6 m r bytes each in a 16-bit dtype, 50 MB at r =
2048, m = 1365) and gathers P rows of the residual table a node. Besides the weights, which are the head's
own apart from a padded down_proj, the cache of keys and values [L, 2, R, D + 1 + N, H, h] is all that lives
longer than a round."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_weaver.kernels.frontier import Growth, Rows, select_nodes, start_growth
from vllm_weaver.kernels.weaver_attention import path_attention
from vllm_weaver.kernels.weaver_linear import COLUMNS, gate_up, project, qkv
from vllm_weaver.kernels.weaver_scores import candidate_scores
from vllm_weaver.spec_decode.weaver import WeaverBlock, WeaverHead, WeaverNorm


@dataclass
class _Block:
    """A block's weights; biases fp32, with the shift of the norm before folded in."""

    norm_attn: Tensor
    qkv: Tensor
    qkv_bias: Tensor
    o: Tensor
    o_bias: Tensor
    norm_mlp: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor
    down: Tensor
    """Its rows padded with zeros to the width that `gate_up` has, which keeps them aligned."""
    down_bias: Tensor


def _folded(weight: Tensor, bias: Tensor | None, norm: WeaverNorm) -> Tensor:
    shift = torch.mv(weight.float(), norm.bias.float())
    return shift if bias is None else shift + bias.float()


def _prepare(block: WeaverBlock) -> _Block:
    o, down = block.o_proj.weight, block.down_proj.weight
    padding = -down.shape[1] % COLUMNS
    return _Block(
        norm_attn=block.norm_attn.weight,
        qkv=block.qkv_proj.weight,
        qkv_bias=_folded(block.qkv_proj.weight, None, block.norm_attn),
        o=o,
        o_bias=torch.zeros(len(o), dtype=torch.float32, device=o.device),
        norm_mlp=block.norm_mlp.weight,
        gate_up=block.gate_up_proj.weight,
        gate_up_bias=_folded(block.gate_up_proj.weight, block.gate_up_proj.bias, block.norm_mlp),
        down=torch.nn.functional.pad(down, (0, padding)).contiguous(),
        down_bias=block.down_proj.bias.float(),
    )


class WeaverGrowth:
    """A head and its tables, ready for the kernels. The parameters must not change afterwards."""

    @torch.no_grad()
    def __init__(self, head: WeaverHead, token_table: Tensor, residual_table: Tensor) -> None:
        config = head.config
        self.head = head
        self.token_table = token_table.to(head.dtype).contiguous()
        self.residual_table = residual_table.contiguous()
        self.blocks = [_prepare(block) for block in head.blocks]  # type: ignore[arg-type]
        self.proposal_bias = _folded(head.proposal_in.weight, head.proposal_in.bias, head.output_norm)
        self.positions = torch.arange(config.K + 1, dtype=torch.int32, device=token_table.device)
        self.rope = head.rope(self.positions, torch.float32)

    def new_cache(self, num_requests: int, length: int) -> Tensor:
        """Keys and values [L, 2, R, length, H, h], undefined."""
        config = self.head.config
        shape = (config.num_layers, 2, num_requests, length, config.num_heads, config.head_dim)
        return torch.empty(shape, dtype=self.head.dtype, device=self.token_table.device)

    def prompt(self, hidden: Tensor, draft_hidden: Tensor, cache: Tensor) -> None:
        """Writes the keys and values of the D + 1 prompt rows, see `WeaverHead.prompt`, to the cache."""
        head = self.head
        rows = head.prompt_rows(hidden, draft_hidden)
        num_requests, length = rows.shape[:2]
        x = project(
            rows.flatten(0, 1),
            head.proposal_in.weight,
            self.proposal_bias,
            norm_weight=head.output_norm.weight,
        )
        places = self.positions[:length].expand(num_requests, -1).reshape(-1)
        for layer, block in enumerate(self.blocks):
            last = layer + 1 == len(self.blocks)
            q = qkv(
                x,
                block.qkv,
                block.qkv_bias,
                block.norm_attn,
                self.rope,
                places,
                places,
                cache[layer],
                queries=not last,
            )
            if q is not None:
                x = self._combine(block, path_attention(q, cache[layer], length), x, None)

    def expand(
        self, growth: Growth, rows: Rows, cache: Tensor, pool_values: Tensor, pool_ids: Tensor
    ) -> Tensor:
        """Runs new nodes through the head; their candidates' scores fp32 [R, n, P]."""
        positions, places = rows.positions.flatten(), rows.places.flatten()
        x, index = self.token_table, rows.tokens.flatten()
        for layer, block in enumerate(self.blocks):
            source = index if layer == 0 else None
            q = qkv(
                x,
                block.qkv,
                block.qkv_bias,
                block.norm_attn,
                self.rope,
                positions,
                places,
                cache[layer],
                index=source,
            )
            assert q is not None
            attention = path_attention(q, cache[layer], growth.depth + 1, places, growth.paths, early=True)
            x = self._combine(block, attention, x, source)
        norm = self.head.out_norm
        return candidate_scores(
            x, norm.weight, norm.bias, self.residual_table, pool_values, pool_ids, rows, early=True
        )

    def _combine(self, block: _Block, attention: Tensor, x: Tensor, index: Tensor | None) -> Tensor:
        x = project(attention.flatten(1), block.o, block.o_bias, residual=x, index=index)
        inner = gate_up(x, block.gate_up, block.gate_up_bias, block.norm_mlp)
        return project(inner, block.down, block.down_bias, residual=x)

    def grow(
        self,
        hidden: Tensor,
        draft_hidden: Tensor,
        roots: Tensor,
        pool_values: Tensor,
        pool_ids: Tensor,
        vocab_size: int,
        budget: int,
        width: int,
        rounds: int,
        max_depth: Tensor | None,
        max_nodes: Tensor | None,
    ) -> Growth:
        """Trees of `rounds` rounds of `width` nodes; arguments as in `TreeProposer.propose`, the pool [R, D,
        P]."""
        num_requests, depth = draft_hidden.shape[:2]
        cache = self.new_cache(num_requests, depth + 2 + budget)
        self.prompt(hidden, draft_hidden, cache)
        growth, rows = start_growth(roots, budget + 1, depth, vocab_size, max_depth, max_nodes)
        for _ in range(rounds):
            scores = self.expand(growth, rows, cache, pool_values, pool_ids)
            rows = select_nodes(growth, rows, scores, pool_ids, width, early=True)
        return growth
