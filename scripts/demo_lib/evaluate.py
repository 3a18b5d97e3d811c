# SPDX-License-Identifier: Apache-2.0
"""Simulated speculative decoding of the demo models: accepted length on greedy texts of the target.

Greedy verification accepts exactly the drafted tokens that the target would have written, so one greedy text
decides every step: trees for all its positions are grown in one batch, by the proposers that serving uses,
then the positions that decoding would really visit are walked.
"""

from dataclasses import dataclass

import torch
from transformers import Qwen3_5ForCausalLM

from vllm_weaver.spec_decode.proposers import ChainProposer, DDTreeProposer, TreeProposer, WeaverProposer
from vllm_weaver.spec_decode.tree import Tree
from vllm_weaver.spec_decode.weaver import WeaverHead

from .draft import DFlashDraft
from .weaver import draft_blocks

MAX_TREES = 2048  # grown at a time


def proposers(target: Qwen3_5ForCausalLM, head: WeaverHead) -> dict[str, TreeProposer]:
    """The three proposals for this target; plain PyTorch on every device, so that all machines agree."""
    vocab_size = target.config.vocab_size
    embedding, lm_head = target.model.embed_tokens.weight, target.lm_head.weight
    tables = head.token_table(embedding), head.residual_table(lm_head)
    return {
        "chain": ChainProposer(vocab_size, impl="torch"),
        "ddtree": DDTreeProposer(vocab_size, impl="torch"),
        "weaver": WeaverProposer(head, *tables, vocab_size=vocab_size, impl="torch"),
    }


def accepted(tree: Tree, truth: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Accepted drafts [R], and whether the path leaves a first child, bool [R].

    truth [R, D + 1] is the target's text from the root on.
    """
    parents = tree.parents.long()
    right = (tree.tokens == truth.gather(1, tree.depths.long())) & tree.valid()
    on_path, later = right.clone(), torch.zeros_like(right)
    for node in range(1, tree.num_slots):
        above = parents[:, node : node + 1].clamp(min=0)
        on_path[:, node] &= on_path.gather(1, above)[:, 0]
        later[:, node] = (parents[:, 1:node] == parents[:, node : node + 1]).any(1)
    return on_path.sum(1) - 1, (on_path & later).any(1)


@dataclass
class Score:
    """Accepted length (tokens a target step, the bonus token counted) and how it came about."""

    tau: float
    branching: float
    """share of steps with an accepted draft whose path passes through a child that is not the first"""
    steps: int


@torch.no_grad()
def evaluate(
    target: Qwen3_5ForCausalLM,
    draft: DFlashDraft,
    head: WeaverHead,
    texts: torch.Tensor,
    *,
    prompt: int,
    budget: int,
) -> dict[str, Score]:
    """Decode the greedy texts [n, t], whose first `prompt` tokens are given, with every proposal.

    Trees have `budget` nodes below the root, a chain has D.
    """
    depth = draft.block - 1
    anchors = torch.arange(prompt, texts.shape[1] - depth, device=texts.device)
    found: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for part in texts.split(max(1, MAX_TREES // len(anchors))):
        blocks = draft_blocks(target, draft, part, anchors.expand(len(part), -1))
        states = blocks.hidden.to(head.dtype), blocks.draft_hidden.to(head.dtype), blocks.logits
        for name, proposer in proposers(target, head).items():
            tree = proposer.propose(*states, blocks.tokens[:, 0], depth if name == "chain" else budget)
            counts, branches = accepted(tree, blocks.tokens)
            found.setdefault(name, []).append(
                (counts.view(len(part), -1).cpu(), branches.view(len(part), -1).cpu())
            )
    return {
        name: _walk(torch.cat([c for c, _ in f]), torch.cat([b for _, b in f])) for name, f in found.items()
    }


def _walk(counts: torch.Tensor, branches: torch.Tensor) -> Score:
    """Visit the positions that decoding would visit; counts and branches are [texts, positions]."""
    steps = tokens = paths = branching = 0
    for row, branch in zip(counts.tolist(), branches.tolist(), strict=True):
        at = 0
        while at < len(row):
            steps, tokens = steps + 1, tokens + row[at] + 1
            paths, branching = paths + (row[at] > 0), branching + branch[at]
            at += row[at] + 1
    return Score(tokens / steps, branching / max(1, paths), steps)
