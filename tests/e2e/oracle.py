# SPDX-License-Identifier: Apache-2.0
"""A proposer that knows the plain continuation and hides it in a tree of a chosen shape.

It makes tests independent of a draft's luck: accepted paths are as long, and as winding, as a test wants.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, MutableSequence, Sequence
from typing import Any

import torch

from tests.e2e.harness import Reference
from vllm_weaver.spec_decode.tree import Tree

# continuation, budget, vocabulary -> (tokens, parents) of the nodes after the root
Shape = Callable[[list[int], int, int], tuple[list[int], list[int]]]


def second_child(continuation: list[int], budget: int, vocab: int) -> tuple[list[int], list[int]]:
    """At every depth a wrong first child, then the true one: every accepted path runs through second
    children."""
    tokens, parents, parent = [], [], 0
    for token in continuation:
        if len(tokens) + 2 > budget:
            break
        tokens += [(token + 1) % vocab, token]
        parents += [parent, parent]
        parent = len(tokens)
    return tokens, parents


def chain(continuation: list[int], budget: int, vocab: int) -> tuple[list[int], list[int]]:
    """The true continuation as a chain."""
    tokens = continuation[:budget]
    return tokens, list(range(len(tokens)))


def wrong(continuation: list[int], budget: int, vocab: int) -> tuple[list[int], list[int]]:
    """A star of wrong tokens: nothing can be accepted."""
    truth = continuation[0] if continuation else 0
    count = min(budget, vocab - 1)
    return [(truth + 1 + i) % vocab for i in range(count)], [0] * count


def none(continuation: list[int], budget: int, vocab: int) -> tuple[list[int], list[int]]:
    """No drafts."""
    return [], []


def late(continuation: list[int], budget: int, vocab: int) -> tuple[list[int], list[int]]:
    """The true path at the highest indices the budget allows, behind a star of wrong tokens."""
    path = continuation[: max(1, budget // 3)]
    stars = budget - len(path)
    tokens, parents = wrong(continuation, stars, vocab)
    if not path:
        return tokens, parents
    at = len(tokens)
    return tokens + path, parents + [0] + list(range(at + 1, at + len(path)))


def install(
    runner: Any,
    references: Sequence[Reference],
    shapes: Sequence[Shape],
    offered: MutableSequence[list[int]] | None = None,
) -> MutableSequence[list[int]]:
    """Replace the engine's proposer. Step k of the engine uses `shapes[k % len(shapes)]`.

    Returns `offered` (by default a new list), which gets one entry a proposal: for each row, the nodes
    offered (the root not counted).
    """
    speculator, states = runner.speculator, runner.req_states
    record: MutableSequence[list[int]] = [] if offered is None else offered
    turns = itertools.cycle(shapes)

    def propose(
        hidden: Any,
        draft_hidden: Any,
        draft_logits: Any,
        root_tokens: torch.Tensor,
        budget: int,
        **limits: Any,
    ) -> Tree:
        rows = len(root_tokens)
        shape = next(turns)
        tree = Tree.empty(rows, budget + 1, root_tokens.device)
        counts = []
        indexes = speculator.sample_idx_mapping[: rows * speculator.num_speculative_steps].view(rows, -1)[
            :, 0
        ]
        for row, index in enumerate(indexes.tolist()):
            total = int(states.total_len.gpu[index])
            known = states.all_token_ids.gpu[index, :total].tolist()
            following = continuation_of(references, known)
            room = int(limits["max_depth"][row])
            tokens, parents = shape(following[:room], budget, runner.vocab_size) if room else ([], [])
            counts.append(len(tokens))
            fill(tree, row, int(root_tokens[row]), tokens, parents)
        record.append(counts)
        tree.validate(runner.vocab_size, budget)
        return tree

    speculator.proposer.propose = propose
    return record


def continuation_of(references: Sequence[Reference], known: list[int]) -> list[int]:
    """What plain decoding says after `known`; empty where no reference starts with it."""
    for reference in references:
        whole = [*reference.prompt, *reference.tokens]
        if len(known) > len(reference.prompt) and whole[: len(known)] == known:
            return whole[len(known) :]
    return []


def fill(tree: Tree, row: int, root: int, tokens: Sequence[int], parents: Sequence[int]) -> None:
    """Write one request's tree, with made-up log-probabilities that fall with depth."""
    count = len(tokens)
    tree.tokens[row, : count + 1] = torch.tensor([root, *tokens])
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    tree.parents[row, : count + 1] = torch.tensor([-1, *parents], dtype=torch.int32)
    tree.depths[row, : count + 1] = torch.tensor(depths, dtype=torch.int32)
    tree.logprobs[row, : count + 1] = -torch.tensor(depths, dtype=torch.float32)
    tree.num_nodes[row] = count + 1
