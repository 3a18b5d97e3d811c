# SPDX-License-Identifier: Apache-2.0
"""The demo draft: a DFlash block drafter, its training, and the checkpoint that vLLM loads.

One forward drafts a whole block. Row 0 is the token that the target has just produced (the anchor, at
position a), rows 1..D are mask tokens at positions a+1..a+D, each predicting the token *at* its own position.
The rows see the context only through keys and values that every layer projects from the target's auxiliary
hidden states at the positions before a, and see one another without a causal mask. Embedding and output head
are the target's.

Method: DFlash, arXiv 2602.06036. The arithmetic is the one vLLM runs, so that training and serving agree.
"""

import json
import logging
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import Qwen3_5ForCausalLM

from .target import autocast, optimizer_for, set_rate, target_features

log = logging.getLogger("train_demo")
ROPE_THETA = 10000.0


class RMSNorm(nn.Module):
    """Root-mean-square norm in float32, cast back."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6) * self.weight.float()).to(x.dtype)


def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary embedding over the full head dimension, on x [n, t, heads, dim] at positions [n, t]."""
    half = x.shape[-1] // 2
    frequency = ROPE_THETA ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = (positions[..., None] * frequency)[:, :, None]
    a, b = x.float().split(half, -1)
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1).to(x.dtype)


class DraftAttention(nn.Module):
    """Block rows attend to the context before their anchor and to all rows of their block."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.q_proj = nn.Linear(hidden, heads * dim, bias=False)
        self.k_proj = nn.Linear(hidden, kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(hidden, kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(heads * dim, hidden, bias=False)
        self.q_norm, self.k_norm = RMSNorm(dim), RMSNorm(dim)

    def forward(
        self,
        rows: torch.Tensor,
        context: torch.Tensor,
        row_positions: torch.Tensor,
        context_positions: torch.Tensor,
        mask: torch.Tensor,
    ) -> torch.Tensor:
        source = torch.cat((context, rows), 1)
        positions = torch.cat((context_positions, row_positions), 1)
        query = rotate(self.q_norm(self.q_proj(rows).unflatten(-1, (-1, self.dim))), row_positions)
        key = rotate(self.k_norm(self.k_proj(source).unflatten(-1, (-1, self.dim))), positions)
        value = self.v_proj(source).unflatten(-1, (-1, self.dim))
        query, key, value = (x.transpose(1, 2).to(value.dtype) for x in (query, key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class DraftMLP(nn.Module):
    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    def __init__(self, hidden: int, intermediate: int, heads: int, kv_heads: int, dim: int) -> None:
        super().__init__()
        self.self_attn = DraftAttention(hidden, heads, kv_heads, dim)
        self.mlp = DraftMLP(hidden, intermediate)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(hidden), RMSNorm(hidden)

    def forward(self, rows: torch.Tensor, *context: torch.Tensor) -> torch.Tensor:
        rows = rows + self.self_attn(self.input_layernorm(rows), *context)
        return rows + self.mlp(self.post_attention_layernorm(rows))


class DFlashDraft(nn.Module):
    """The drafter; parameter names are those of the checkpoint.

    `config` is the content of the checkpoint's config.json.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        hidden, layer_ids = config["hidden_size"], config["dflash_config"]["target_layer_ids"]
        self.block = config["block_size"]
        self.mask_token = config["dflash_config"]["mask_token_id"]
        self.layer_ids: list[int] = layer_ids
        self.fc = nn.Linear(len(layer_ids) * hidden, hidden, bias=False)
        self.hidden_norm, self.norm = RMSNorm(hidden), RMSNorm(hidden)
        sizes = (config["intermediate_size"], config["num_attention_heads"], config["num_key_value_heads"])
        self.layers = nn.ModuleList(
            DraftLayer(hidden, *sizes, config["head_dim"]) for _ in range(config["num_hidden_layers"])
        )
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.04)

    def forward(
        self, embedding: torch.Tensor, features: torch.Tensor, tokens: torch.Tensor, anchors: torch.Tensor
    ) -> torch.Tensor:
        """Draft hidden states [n, anchors, block, hidden] (normed) of every block.

        embedding [vocab, hidden]; features [n, t, aux * hidden]; tokens [n, t]; anchors [n, m] are positions
        in 1..t-1: the block of anchor a uses the features before a and the token at a.
        """
        n, t = tokens.shape
        m, block, device = anchors.shape[1], self.block, tokens.device
        ids = torch.full((n, m, block), self.mask_token, device=device)
        ids[:, :, 0] = tokens.gather(1, anchors)
        row_positions = (anchors[..., None] + torch.arange(block, device=device)).flatten(1)
        context_positions = torch.arange(t, device=device).expand(n, t)
        sees_context = (context_positions[:, None] < anchors[..., None]).repeat_interleave(block, 1)
        owner = torch.arange(m, device=device).repeat_interleave(block)
        sees_block = (owner[:, None] == owner).expand(n, -1, -1)
        mask = torch.cat((sees_context, sees_block), 2)[:, None]
        context = self.hidden_norm(self.fc(features))
        rows = embedding[ids.flatten(1)].to(context.dtype)
        for layer in self.layers:
            rows = layer(rows, context, row_positions, context_positions, mask)
        return self.norm(rows).unflatten(1, (m, block))


def draft_config(
    target: dict[str, Any], *, layers: int, intermediate: int, target_layer_ids: list[int], mask_token: int
) -> dict[str, Any]:
    """config.json of the draft; `target` is the target's config as a dict.

    Heads are the target's, so that both kinds of attention layers have pages of one size in a KV cache.
    """
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": target["vocab_size"],
        "hidden_size": target["hidden_size"],
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": target["num_attention_heads"],
        "num_key_value_heads": target["num_key_value_heads"],
        "head_dim": target["head_dim"],
        "hidden_act": "silu",
        "max_position_embeddings": target["max_position_embeddings"],
        "rms_norm_eps": 1e-6,
        "rope_theta": ROPE_THETA,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "block_size": 8,
        "num_target_layers": target["num_hidden_layers"],
        "dflash_config": {"mask_token_id": mask_token, "target_layer_ids": target_layer_ids},
        "dtype": "bfloat16",
    }


def sample_anchors(
    n: int, count: int, first: int, last: int, generator: torch.Generator, device: torch.device
) -> torch.Tensor:
    """`count` distinct positions in first..last for each of n rows: [n, count], ascending."""
    order = torch.rand((n, last - first + 1), generator=generator).argsort(1)[:, :count]
    return (order.sort(1).values + first).to(device)


def train_draft(
    draft: DFlashDraft,
    target: Qwen3_5ForCausalLM,
    texts: torch.Tensor,
    *,
    prompt: int,
    steps: int,
    batch: int,
    anchors: int,
    rate: float,
    seed: int,
) -> float:
    """Distil the target's greedy text [n, t] (the first `prompt` tokens are given) into the draft.

    Cross entropy at every mask row; row j weighs exp(-(j-1)/4), since a late row only matters once all
    earlier ones were right. Returns the mean loss of the last tenth of the steps.
    """
    device, depth = texts.device, draft.block - 1
    weight = torch.exp(-torch.arange(depth, device=device) / 4)
    weight = weight / weight.sum()
    embedding, head = target.model.embed_tokens.weight.detach(), target.lm_head.weight.detach()
    generator = torch.Generator().manual_seed(seed)
    optimizer = optimizer_for(draft.parameters(), rate)
    tail, start = [], time.monotonic()
    draft.train()
    for step in range(steps):
        set_rate(optimizer, rate, step, steps)
        tokens = texts[torch.randint(0, len(texts), (batch,), generator=generator).to(device)]
        at = sample_anchors(batch, anchors, prompt, tokens.shape[1] - draft.block, generator, device)
        truth = tokens.gather(1, (at[..., None] + torch.arange(1, draft.block, device=device)).flatten(1))
        features, _ = target_features(target, tokens, draft.layer_ids)
        with autocast(device):
            hidden = draft(embedding.float(), features.float(), tokens, at)[:, :, 1:]
            logits = hidden @ head.to(hidden.dtype).T
        loss = F.cross_entropy(logits.float().flatten(0, 2), truth.flatten(), reduction="none")
        loss = (loss.view(-1, depth) * weight).sum(-1).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
        if step >= steps - max(1, steps // 10):
            tail.append(loss.detach())
        if step % max(1, steps // 12) == 0:
            log.info(
                "draft step %d/%d loss %.3f (%.0f s)", step, steps, loss.item(), time.monotonic() - start
            )
    draft.eval()
    return torch.stack(tail).mean().item()


def save_draft(draft: DFlashDraft, folder: Path) -> None:
    """Write config.json and model.safetensors (bfloat16)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(draft.config, indent=2) + "\n")
    weights = {
        name: value.detach().to("cpu", torch.bfloat16).contiguous()
        for name, value in draft.state_dict().items()
    }
    save_file(weights, folder / "model.safetensors")


def load_draft(folder: Path) -> DFlashDraft:
    """The draft that `save_draft` wrote, in float32."""
    draft = DFlashDraft(json.loads((folder / "config.json").read_text()))
    draft.load_state_dict(load_file(folder / "model.safetensors"))
    return draft.eval().requires_grad_(False)
