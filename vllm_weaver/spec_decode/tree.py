# SPDX-License-Identifier: Apache-2.0
"""The draft tree of a batch, its invariants, and where trees live between the steps of an engine.

A tree is a node list. Node 0 is the root: the token that the target has already chosen and not yet processed.
Every other node names its parent by index, and a parent always precedes its children. Two things follow that
everything else relies on: any prefix of the list is a tree (so a scheduler may cut it anywhere), and the d-th
node of a path has an index of at least d (so rows can be moved along a path in ascending order without a
second buffer). A chain is the tree with parents(i) = i − 1.

Letters in shapes: R requests of a batch, N node slots a request (tree budget + 1).
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from vllm_weaver.kernels.ancestors import ancestor_mask_words
from vllm_weaver.kernels.common import Impl
from vllm_weaver.kernels.tree_step import store_trees

_EMPTY = {"tokens": -1, "parents": -1, "depths": 0, "logprobs": float("-inf"), "num_nodes": 0}
_DTYPES = {
    "tokens": torch.int64,
    "parents": torch.int32,
    "depths": torch.int32,
    "logprobs": torch.float32,
    "num_nodes": torch.int32,
}


@dataclass
class Tree:
    """Draft trees of R requests; slots from `num_nodes` on hold the empty values named below."""

    tokens: Tensor
    """int64 [R, N]; the root's token at 0; −1 where invalid."""
    parents: Tensor
    """int32 [R, N]; −1 at the root and where invalid."""
    depths: Tensor
    """int32 [R, N]; 0 at the root and where invalid."""
    logprobs: Tensor
    """float32 [R, N]; cumulative log-probability under the drafter, 0 at the root, −inf where invalid."""
    num_nodes: Tensor
    """int32 [R]; valid nodes, the root included; 0 for a request without a tree."""

    @classmethod
    def empty(cls, num_requests: int, num_slots: int, device: torch.device | str) -> Tree:
        """Trees without any node, for `num_requests` requests of `num_slots` slots."""
        return cls(
            **{
                name: torch.full(
                    (num_requests,) if name == "num_nodes" else (num_requests, num_slots),
                    value,
                    dtype=_DTYPES[name],
                    device=device,
                )
                for name, value in _EMPTY.items()
            }
        )

    @classmethod
    def chain(cls, tokens: Tensor, num_nodes: Tensor, logprobs: Tensor | None = None) -> Tree:
        """Chains with these tokens int64 [R, N] (root first), cut at num_nodes [R]; log-probabilities default
        to 0."""
        num_requests, num_slots = tokens.shape
        index = torch.arange(num_slots, dtype=torch.int32, device=tokens.device).expand(num_requests, -1)
        if logprobs is None:
            logprobs = torch.zeros(tokens.shape, dtype=torch.float32, device=tokens.device)
        whole = torch.full((num_requests,), num_slots, dtype=torch.int32, device=tokens.device)
        return cls(tokens.to(torch.int64), index - 1, index, logprobs, whole).truncate(num_nodes)

    def arrays(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """tokens, parents, depths, logprobs and num_nodes."""
        return self.tokens, self.parents, self.depths, self.logprobs, self.num_nodes

    @property
    def num_slots(self) -> int:
        """N, the tree budget plus one."""
        return self.tokens.shape[1]

    def valid(self) -> Tensor:
        """bool [R, N]: which slots hold a node."""
        return torch.arange(self.num_slots, device=self.tokens.device) < self.num_nodes.unsqueeze(1)

    def truncate(self, num_nodes: Tensor) -> Tree:
        """The first `num_nodes` [R] nodes of each tree (fewer where there are fewer), as a new Tree; no host
        sync."""
        kept = torch.minimum(self.num_nodes, num_nodes.to(torch.int32)).clamp(min=0)
        valid = torch.arange(self.num_slots, device=self.tokens.device) < kept.unsqueeze(1)
        cut = {
            name: getattr(self, name).masked_fill(~valid, value)
            for name, value in _EMPTY.items()
            if name != "num_nodes"
        }
        return Tree(**cut, num_nodes=kept)

    def mask_words(self, *, impl: Impl = "auto") -> Tensor:
        """Ancestor bit masks int32 [R, N, ceil(N / 32)], see `kernels/ancestors.py`."""
        return ancestor_mask_words(self.parents, self.num_nodes, impl=impl)

    def validate(self, vocab_size: int, max_depth: int) -> None:
        """Checks every invariant on the host; raises `ValueError` naming request, node and value.

        For tests and debugging: it synchronises, so a decode step must not call it.
        """
        self._validate_layout()
        host = Tree(**{f.name: getattr(self, f.name).cpu() for f in fields(self)})
        index = torch.arange(host.num_slots)
        valid = host.valid()
        tokens, parents, depths, logprobs = host.tokens, host.parents, host.depths, host.logprobs
        _refuse(
            (host.num_nodes < 0) | (host.num_nodes > host.num_slots),
            host.num_nodes,
            f"num_nodes must be in [0, {host.num_slots}]",
        )
        for name, expected in (("tokens", -1), ("parents", -1), ("depths", 0), ("logprobs", float("-inf"))):
            values = getattr(host, name)
            _refuse(~valid & (values != expected), values, f"{name} of an invalid node must be {expected}")
        inner = valid & (index > 0)
        root = valid & (index == 0)
        _refuse(
            valid & ((tokens < 0) | (tokens >= vocab_size)), tokens, f"tokens must be in [0, {vocab_size})"
        )
        _refuse(root & (parents != -1), parents, "the root's parent must be -1")
        _refuse(inner & ((parents < 0) | (parents >= index)), parents, "a parent must precede its node")
        above = parents.clamp(min=0).long()
        _refuse(root & (depths != 0), depths, "the root's depth must be 0")
        _refuse(inner & (depths != depths.gather(1, above) + 1), depths, "depth must be the parent's plus 1")
        _refuse(inner & (depths > max_depth), depths, f"depth must be at most {max_depth}")
        _refuse(root & (logprobs != 0), logprobs, "the root's log-probability must be 0")
        _refuse(
            inner & ~((logprobs <= logprobs.gather(1, above)) & logprobs.isfinite()),
            logprobs,
            "a log-probability must be finite and at most the parent's",
        )
        twin = (parents.unsqueeze(2) == parents.unsqueeze(1)) & (tokens.unsqueeze(2) == tokens.unsqueeze(1))
        twin &= (index.unsqueeze(1) > index) & inner.unsqueeze(2) & inner.unsqueeze(1)
        _refuse(twin.any(-1), tokens, "siblings must have different tokens")

    def _validate_layout(self) -> None:
        shape = tuple(self.tokens.shape)
        for name, dtype in _DTYPES.items():
            tensor = getattr(self, name)
            expected = shape[:1] if name == "num_nodes" else shape
            if len(shape) != 2 or tuple(tensor.shape) != expected or tensor.dtype != dtype:
                raise ValueError(
                    f"Tree: {name} is {tensor.dtype} {tuple(tensor.shape)}, but must be {dtype} {expected}."
                )


def _refuse(bad: Tensor, values: Tensor, rule: str) -> None:
    """Raises for the first set entry of `bad`, [R] or [R, N]."""
    where = bad.nonzero()
    if len(where):
        place = where[0].tolist()
        node = f", node {place[1]}" if len(place) == 2 else ""
        raise ValueError(f"Tree: request {place[0]}{node}: {rule}, but found {values[tuple(place)].item()}.")


class TreeBuffers:
    """Trees kept between steps, by request state index; all memory is allocated here, once."""

    def __init__(self, max_num_reqs: int, num_slots: int, device: torch.device | str) -> None:
        self.trees = Tree.empty(max_num_reqs, num_slots, device)

    def store(self, tree: Tree, rows: Tensor, drafts: Tensor, chain_only: Tensor) -> None:
        """Keeps the batch's trees under their request state indices `rows` int64 [R] and writes their nodes,
        root left out, to `drafts` int64 [R, N - 1], see `kernels.tree_step.unpack_drafts`. Where `chain_only`
        int32 [R] is not 0, the tree is cut to the chain of first children. Rows outside [0, max_num_reqs) are
        padding, of which nothing is kept; the others must be distinct. `ValueError` for trees of another
        number of slots."""
        if tree.num_slots != self.trees.num_slots:
            raise ValueError(
                f"TreeBuffers hold {self.trees.num_slots} slots a request, but the tree has {tree.num_slots}."
            )
        store_trees(tree.arrays(), self.trees.arrays(), rows, drafts, chain_only)

    def nodes(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """tokens, parents, depths [S, N] and num_nodes [S], by request state index."""
        return self.trees.tokens, self.trees.parents, self.trees.depths, self.trees.num_nodes

    def clear(self, state_index: int) -> None:
        """Forgets a request's tree, as for a state index that a new request takes over."""
        self.trees.num_nodes[state_index] = 0
