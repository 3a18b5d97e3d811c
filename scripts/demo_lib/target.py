# SPDX-License-Identifier: Apache-2.0
"""The demo target: a Qwen3.5-style hybrid of three Gated DeltaNet layers and one of full attention.

It is the class of transformers itself, so any runtime that loads Qwen3.5 loads it. The head dimension of the
Gated DeltaNet layers is 128 because vLLM's CPU kernels take nothing smaller.
"""

import logging
import math
import time
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import nn
from transformers import DynamicCache, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from .corpus import sample_windows

log = logging.getLogger("train_demo")


def target_config(vocab_size: int, hidden: int, intermediate: int) -> Qwen3_5TextConfig:
    """Four layers; two value heads share a key head, two query heads share a key/value head."""
    return Qwen3_5TextConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.04,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
        },
    )


def optimizer_for(parameters: Iterable[nn.Parameter], rate: float, decay: float = 0.05) -> torch.optim.AdamW:
    """AdamW that decays matrices only."""
    trained = [p for p in parameters if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": decay},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98))


def set_rate(optimizer: torch.optim.Optimizer, peak: float, step: int, steps: int) -> None:
    """Linear warm-up over 5 % of the steps, then a cosine down to 2 % of the peak."""
    warm = max(1, steps // 20)
    factor = (
        (step + 1) / warm if step < warm else 0.51 + 0.49 * math.cos(math.pi * (step - warm) / (steps - warm))
    )
    for group in optimizer.param_groups:
        group["lr"] = peak * factor


def autocast(device: torch.device) -> torch.autocast:
    """bfloat16 matrix products on a GPU, full float32 on a CPU (slow bfloat16 there)."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")


def train_target(
    model: Qwen3_5ForCausalLM,
    stream: torch.Tensor,
    *,
    steps: int,
    batch: int,
    length: int,
    rate: float,
    seed: int,
) -> float:
    """Next-token training on windows of `stream` [tokens]; returns the mean loss of the last steps (10 %)."""
    device = stream.device
    generator = torch.Generator().manual_seed(seed)
    optimizer = optimizer_for(model.parameters(), rate)
    cpu_stream, tail, start = stream.cpu(), [], time.monotonic()
    model.train()
    for step in range(steps):
        set_rate(optimizer, rate, step, steps)
        window = sample_windows(cpu_stream, batch, length + 1, generator).to(device)
        with autocast(device):
            logits = model(input_ids=window[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step >= steps - max(1, steps // 10):
            tail.append(loss.detach())
        if step % max(1, steps // 12) == 0:
            log.info(
                "target step %d/%d loss %.3f (%.0f s)", step, steps, loss.item(), time.monotonic() - start
            )
    model.eval()
    return torch.stack(tail).mean().item()


@torch.no_grad()
def greedy_continuations(model: Qwen3_5ForCausalLM, prompts: torch.Tensor, new_tokens: int) -> torch.Tensor:
    """Greedy text after prompts [n, p] of one length, stops ignored: token ids [n, p + new_tokens]."""
    cache = DynamicCache(config=model.config)
    pieces, current = [prompts], prompts
    for _ in range(new_tokens):
        logits = model(input_ids=current, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        current = logits[:, -1].argmax(-1, keepdim=True)
        pieces.append(current)
    return torch.cat(pieces, 1)


@torch.no_grad()
def target_features(
    model: Qwen3_5ForCausalLM, tokens: torch.Tensor, layer_ids: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the drafter and the Weaver read of the target.

    Returns the outputs of the decoder layers `layer_ids` side by side [n, t, len(layer_ids) * hidden]
    (residual stream, before the final norm, which is what vLLM hands over as auxiliary states) and the final
    normed hidden states [n, t, hidden].
    """
    taken: dict[int, torch.Tensor] = {}

    def keep(layer: int) -> object:
        def hook(module: nn.Module, inputs: object, output: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
            taken[layer] = output[0] if isinstance(output, tuple) else output

        return hook

    handles = [model.model.layers[i].register_forward_hook(keep(i)) for i in layer_ids]
    try:
        final = model.model(input_ids=tokens, use_cache=False).last_hidden_state
    finally:
        for handle in handles:
            handle.remove()
    return torch.cat([taken[i] for i in layer_ids], -1), final


@torch.no_grad()
def smallest_gaps(model: Qwen3_5ForCausalLM, tokens: torch.Tensor, prompt: int) -> torch.Tensor:
    """How decided a text is: the smallest gap between the two highest logits of a row of [n, t], as [n].

    The first `prompt` tokens are given and do not count.
    """
    logits = model(input_ids=tokens, use_cache=False).logits[:, prompt - 1 : -1].float()
    best = logits.topk(2).values
    return (best[..., 0] - best[..., 1]).min(1).values


def loop_share(tokens: torch.Tensor, size: int = 8) -> float:
    """Share of rows [n, t] that repeat themselves: under half of their runs of `size` tokens are distinct."""
    looping = 0
    for row in tokens.tolist():
        runs = [tuple(row[i : i + size]) for i in range(len(row) - size + 1)]
        looping += len(set(runs)) < 0.5 * len(runs)
    return looping / len(tokens)
