# SPDX-License-Identifier: Apache-2.0
"""Training of the demo Weaver head, with the very module that serving uses.

The draft's marginals are fixed. For an anchor on the target's greedy text the true continuation is fed as a
chain of nodes; the head learns to put the next true token first among the candidates of its mask row.
"""

import logging
import time
from dataclasses import dataclass

import torch
from torch import nn
from transformers import Qwen3_5ForCausalLM

from vllm_weaver.spec_decode.weaver import WeaverHead, node_rows, pool_logprobs

from .draft import DFlashDraft, sample_anchors
from .target import optimizer_for, set_rate, target_features

log = logging.getLogger("train_demo")


@dataclass
class Blocks:
    """What one drafting step knows, for R anchors (D mask rows each)."""

    hidden: torch.Tensor
    """[R, d] the target's final normed state whose logits gave the anchor token."""
    draft_hidden: torch.Tensor
    """[R, D, d] the draft's output at the mask rows."""
    logits: torch.Tensor
    """[R, D, V] the draft's logits."""
    tokens: torch.Tensor
    """[R, D + 1] the true text from the anchor on."""


@torch.no_grad()
def draft_blocks(
    target: Qwen3_5ForCausalLM, draft: DFlashDraft, tokens: torch.Tensor, anchors: torch.Tensor
) -> Blocks:
    """Draft at the anchors [n, m] of the texts [n, t]; anchors are in 1..t-1-D. R = n * m."""
    embedding, head = target.model.embed_tokens.weight, target.lm_head.weight
    features, final = target_features(target, tokens, draft.layer_ids)
    dtype = draft.fc.weight.dtype
    rows = draft(embedding.to(dtype), features.to(dtype), tokens, anchors)[:, :, 1:].flatten(0, 1)
    before = (anchors - 1)[..., None].expand(-1, -1, final.shape[-1])
    span = anchors[..., None] + torch.arange(draft.block, device=tokens.device)
    return Blocks(
        hidden=final.gather(1, before).flatten(0, 1),
        draft_hidden=rows,
        logits=(rows @ head.to(dtype).T).float(),
        tokens=tokens.gather(1, span.flatten(1)).view(-1, draft.block),
    )


def chain_loss(
    head: WeaverHead, target: Qwen3_5ForCausalLM, blocks: Blocks
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross entropy of the true next token over the pool [R, D] and whether the pool holds it [R, D]."""
    depth = blocks.logits.shape[1]
    device = blocks.logits.device
    pool_logits, pool_ids = blocks.logits.topk(head.config.candidate_pool_size)
    prefix = head.prompt(blocks.hidden.to(head.dtype), blocks.draft_hidden.to(head.dtype))
    table = head.token_table(target.model.embed_tokens.weight.detach())
    residual = head.residual_table(target.lm_head.weight.detach())
    rope = node_rows(torch.arange(depth, device=device), depth) + 1
    visible = torch.ones(depth, depth, dtype=torch.bool, device=device).tril()
    chain = table[blocks.tokens[:, :-1]]
    query = head.forward_nodes(chain, rope.expand(len(chain), depth), visible, prefix)
    logprobs = pool_logprobs(pool_logits, pool_ids, residual[pool_ids], query)
    hit = pool_ids == blocks.tokens[:, 1:, None]
    return -(logprobs.masked_fill(~hit, 0.0)).sum(-1), hit.any(-1)


def train_weaver(
    head: WeaverHead,
    target: Qwen3_5ForCausalLM,
    draft: DFlashDraft,
    texts: torch.Tensor,
    *,
    prompt: int,
    steps: int,
    batch: int,
    anchors: int,
    rate: float,
    seed: int,
) -> float:
    """Train on anchors of the greedy texts [n, t]; returns the mean loss of the last tenth of the steps."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = optimizer_for(head.parameters(), rate)
    tail, start = [], time.monotonic()
    head.train()
    for step in range(steps):
        set_rate(optimizer, rate, step, steps)
        tokens = texts[torch.randint(0, len(texts), (batch,), generator=generator).to(texts.device)]
        at = sample_anchors(batch, anchors, prompt, tokens.shape[1] - draft.block, generator, texts.device)
        losses, known = chain_loss(head, target, draft_blocks(target, draft, tokens, at))
        loss = losses.sum() / known.sum().clamp(min=1)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        if step >= steps - max(1, steps // 10):
            tail.append(loss.detach())
        if step % max(1, steps // 12) == 0:
            log.info(
                "weaver step %d/%d loss %.3f (%.0f s)", step, steps, loss.item(), time.monotonic() - start
            )
    head.eval()
    return torch.stack(tail).mean().item()
