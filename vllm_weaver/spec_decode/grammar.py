# SPDX-License-Identifier: Apache-2.0
"""Structured output on trees: the mask of a node's row is the grammar's after the path from the root to it.

vLLM computes masks in the scheduler, along a chain: row i + 1 after the drafts 0 .. i. Here the drafts of a
request are the nodes of its tree (`kernels.tree_step.unpack_drafts`), and a depth-first visit feeds the
grammar a node's token, fills the node's row, visits the children and takes the token back.

A node that the grammar refuses is masked in its parent's row and has probability 0 there, so that no walk
gets to it, whatever its own row says: nothing is pruned, and rows below a refusal are left open.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from vllm_weaver.kernels.tree_step import unpack_drafts


class TreeGrammars:
    """Stands where a scheduler has vLLM's `StructuredOutputManager`, which does the rest."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._bounds = manager._get_constraint_bounds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    def validate_tokens(self, request: Any, spec_tokens: list[int]) -> list[int]:
        """All drafts, since the masks say what of a tree a grammar refuses; none of a tree without nodes,
        which would only be rows. (Of requests without a grammar vLLM may not have been told the drafts: all
        are kept.)
        """
        return [] if request.use_structured_output and spec_tokens[:1] == [-1] else spec_tokens

    def accept_tokens(self, request: Any, new_token_ids: list[int]) -> bool:
        """Advance the grammar by what a step committed; False where it refuses.

        One by one, as plain decoding does: with `ignore_eos` tokens follow the answer's end, which guidance
        refuses where the end is in the same call.
        """
        accept = self._manager.accept_tokens
        if not request.use_structured_output or self._bounds(request, ()).constraint_start > 0:
            return bool(accept(request, new_token_ids))
        return all(accept(request, [token]) for token in new_token_ids)

    def grammar_bitmask(
        self,
        requests: dict[str, Any],
        structured_output_request_ids: list[str],
        scheduled_spec_decode_tokens: dict[str, list[int]],
    ) -> np.ndarray | None:
        """int32 [rows, words]: the masks of the requests, in order, a row for each root and each draft.

        vLLM makes the roots' rows and leaves all others open, as for drafts that it does not know.
        """
        unknown = {name: [-1] * len(drafts) for name, drafts in scheduled_spec_decode_tokens.items()}
        masks: Any = self._manager.grammar_bitmask(requests, structured_output_request_ids, unknown)
        first = 0
        for name in structured_output_request_ids:
            drafts = scheduled_spec_decode_tokens.get(name, [])
            rows = masks[first : first + 1 + len(drafts)]
            tokens, parents = unpack_drafts(drafts)
            if tokens:
                self._fill(requests[name], [-1, *tokens], [-1, *parents], rows)
            first += len(rows)
        return masks

    def _fill(self, request: Any, tokens: list[int], parents: list[int], rows: np.ndarray) -> None:
        starts = [self._bounds(request, ())] * len(tokens)
        if starts[0].constraint_start > 0:  # still reasoning: each path says for itself where that ends
            for leaf in set(range(len(tokens))) - set(parents):
                path = path_to(leaf, parents)
                bounds = self._bounds(request, [tokens[node] for node in path])
                for node in path:
                    starts[node] = bounds
        grammar = request.structured_output_request.grammar
        TreeMasks(request.request_id, grammar, tokens, parents, starts, rows).fill()


def path_to(node: int, parents: Sequence[int]) -> list[int]:
    """The nodes from below the root to `node`."""
    path = []
    while node > 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


class TreeMasks:
    """The masks of one tree of N nodes, root first.

    tokens, parents [N]: as in `spec_decode.tree`; starts [N]: vLLM's `ConstraintBounds` of a path through the
    node: how many of its drafts the grammar does not see, and how many of its rows are open; rows int32
    [N or more, words]: the root's is filled, the others are open; `fill` fills them in place and leaves the
    grammar as it was.
    """

    def __init__(
        self,
        request_id: str,
        grammar: Any,
        tokens: Sequence[int],
        parents: Sequence[int],
        starts: Sequence[Any],
        rows: np.ndarray,
    ) -> None:
        self.request_id = request_id
        self.grammar = grammar
        self.tokens = tokens
        self.starts = starts
        self.rows = rows
        self.masks = torch.from_numpy(rows)  # the same memory
        self.children: list[list[int]] = [[] for _ in tokens]
        for node, parent in enumerate(parents[1:], start=1):
            self.children[parent].append(node)

    def fill(self, node: int = 0, depth: int = 0) -> None:
        """Fill the rows below `node`, after whose path the grammar stands, and whose row is filled."""
        if self.grammar.is_terminated():
            return  # nothing is masked any more
        for child in self.children[node]:
            unseen, unmasked = self.starts[child]
            if depth < unseen:
                self._mask(child, depth + 1 >= unmasked)
                self.fill(child, depth + 1)
                continue
            if depth < unmasked:  # the parent's row is open: see what the grammar says in its place
                self._mask(child, True)
            allowed = self._allows(child if depth < unmasked else node, self.tokens[child])
            if allowed and self.grammar.accept_tokens(self.request_id, [self.tokens[child]]):
                self._mask(child, depth + 1 >= unmasked)
                self.fill(child, depth + 1)
                self.grammar.rollback(1)
            else:
                self.rows[child] = -1

    def _mask(self, node: int, constrained: bool) -> None:
        if constrained and not self.grammar.is_terminated():
            self.grammar.fill_bitmask(self.masks, node)
        else:
            self.rows[node] = -1

    def _allows(self, row: int, token: int) -> bool:
        word = token >> 5
        return word < self.rows.shape[1] and bool(int(self.rows[row, word]) >> (token & 31) & 1)
