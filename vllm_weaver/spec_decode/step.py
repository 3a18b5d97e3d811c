# SPDX-License-Identifier: Apache-2.0
"""One target step seen as trees: which rows are tree nodes, who sees whom, and which path was accepted.

vLLM packs the query tokens of all requests of a step into rows. A request that decodes owns `1 + drafts`
rows; here these rows are the nodes of its tree. Everything that depends on the tree (RoPE positions, masks,
walk, commit) reads this object; it is filled once a step, in batch order, into buffers allocated at start.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from vllm_weaver.kernels.ancestors import ancestor_mask_words, num_mask_words
from vllm_weaver.spec_decode.tree import TreeBuffers

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.states import RequestState


def tree_requests(input_batch: InputBatch, budget: int) -> np.ndarray:
    """Which requests of the batch decode in this step, as bool [num_reqs].

    The rule is vLLM's own for speculative rows (not prefilling, at most `1 + budget` query tokens), widened
    by one case: a prompt of a single token that the scheduler padded with placeholder drafts. vLLM runs that
    one through its prefill kernels, which cannot take the placeholders back.
    """
    prefilling = input_batch.is_prefilling_np
    if input_batch.prefill_runs_as_decode_np is not None:
        prefilling = prefilling & ~input_batch.prefill_runs_as_decode_np
    drafts = input_batch.num_draft_tokens_per_req
    scheduled = input_batch.num_scheduled_tokens
    if drafts is not None:
        prefilling = prefilling & ~((drafts > 0) & (scheduled - drafts == 1))
    return ~prefilling & (scheduled > 0) & (scheduled <= budget + 1)


@dataclass
class TreeStats:
    """Counters since start, over verified trees: `totals` int64 [4] = verifies, accepted drafts,
    paths with an accepted draft, paths through a child that is not its parent's first."""

    totals: Tensor

    def read(self) -> dict[str, int]:
        """The counters as Python integers (copies from the device)."""
        names = ("verifies", "accepted", "nonempty_paths", "branching_paths")
        return dict(zip(names, self.totals.tolist(), strict=True))


class TreeStep:
    """The trees of one step, in batch order. R requests, N = budget + 1 node slots.

    Attributes (first `num_reqs` entries are live):
        tokens int64, parents int32, depths int32 [R, N]: the trees, cut to the rows that were scheduled.
        num_nodes int32 [R]: valid nodes; 0 for a request that is no tree in this step.
        ancestors int32 [R, N, ceil(N/32)]: bit masks, see `kernels.ancestors`.
        base int64 [R]: committed tokens before the step (the root's position).
        path int32 [R, N], num_path int32 [R]: accepted nodes, root first; set to the root alone until a walk
        ran.
        query_start_loc int32 [R + 1]: the batch's row offsets.
    """

    def __init__(self, max_num_reqs: int, max_num_tokens: int, budget: int, device: torch.device) -> None:
        nodes = budget + 1
        self.budget = budget
        self.device = device

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._tokens = zeros(max_num_reqs, nodes, dtype=torch.int64)
        self._parents = zeros(max_num_reqs, nodes)
        self._depths = zeros(max_num_reqs, nodes)
        self._num_nodes = zeros(max_num_reqs)
        self._ancestors = zeros(max_num_reqs, nodes, num_mask_words(nodes))
        self._base = zeros(max_num_reqs, dtype=torch.int64)
        self._path = zeros(max_num_reqs, nodes)
        self._num_path = zeros(max_num_reqs)
        self._positions = zeros(max_num_tokens, dtype=torch.int64)
        self.stats = TreeStats(torch.zeros(4, dtype=torch.int64, device=device))
        self.query_start_loc = zeros(1)
        self.num_reqs = 0
        self.num_rows = 0
        self.num_tokens = 0
        self.any_tree = False
        self.drafts_verified = False

    tokens = property(lambda self: self._tokens[: self.num_reqs])
    parents = property(lambda self: self._parents[: self.num_reqs])
    depths = property(lambda self: self._depths[: self.num_reqs])
    num_nodes = property(lambda self: self._num_nodes[: self.num_reqs])
    ancestors = property(lambda self: self._ancestors[: self.num_reqs])
    base = property(lambda self: self._base[: self.num_reqs])
    path = property(lambda self: self._path[: self.num_reqs])
    num_path = property(lambda self: self._num_path[: self.num_reqs])
    positions = property(lambda self: self._positions[: self.num_tokens])
    """int64 [num_tokens]: sequence position of every row; base + depth for tree nodes, linear elsewhere."""

    def begin(
        self,
        input_batch: InputBatch,
        req_states: RequestState | None,
        trees: TreeBuffers,
        root_only: np.ndarray,
    ) -> np.ndarray:
        """Fill the step from the batch and the stored trees; returns `tree_requests`.

        Args:
            input_batch: the batch that is about to run.
            req_states: the runner's request states, or None in a dummy run (every request is then cut to its
            root).
            trees: the trees that the speculator left, by request state index.
            root_only: bool [num_reqs], requests whose drafts must not be looked at.
        """
        num_reqs = input_batch.num_reqs
        self.num_reqs = num_reqs
        self.num_tokens = input_batch.num_tokens_after_padding
        self.query_start_loc = input_batch.query_start_loc[: num_reqs + 1]
        is_tree = tree_requests(input_batch, self.budget)
        self.any_tree = bool(is_tree.any())
        starts = input_batch.query_start_loc_np[: num_reqs + 1]
        # Rows beyond the last tree are never a tree's: kernels may be handed only the rows before it.
        self.num_rows = int(starts[1:][is_tree].max()) if self.any_tree else 0
        self.drafts_verified = False

        drafts = input_batch.num_draft_tokens_per_req
        rows = np.ones(num_reqs, dtype=np.int32) if drafts is None else drafts + 1
        rows = np.where(root_only, 1, rows) if req_states is not None else np.ones_like(rows)
        rows = np.where(is_tree, rows, 0).astype(np.int32)
        limit = torch.from_numpy(rows).to(self.device, non_blocking=True)

        index = input_batch.idx_mapping[:num_reqs]
        if req_states is not None:
            self.base.copy_(req_states.num_computed_tokens.gpu[index])
            # Drafts follow the token after the prefill: rows that start inside it carry placeholders.
            inside_prefill = self.base < req_states.prefill_len.gpu[index]
            limit = torch.where(inside_prefill, limit.clamp(max=1), limit)
        else:
            self.base.zero_()
        tree = trees.gather(index)
        self.tokens.copy_(tree.tokens)
        self.parents.copy_(tree.parents)
        self.depths.copy_(tree.depths)
        self.num_nodes.copy_(torch.minimum(tree.num_nodes.clamp(min=1), limit))
        self.ancestors.copy_(ancestor_mask_words(self.parents, self.num_nodes))
        self.path.fill_(-1)
        self.num_path.copy_(self.num_nodes.clamp(max=1))
        self.path[:, 0] = self.num_path - 1
        self._fill_rows(input_batch, starts)
        return is_tree

    def _fill_rows(self, input_batch: InputBatch, starts: np.ndarray) -> None:
        """Per row: its request, node, validity, position; and the input ids of the nodes."""
        num_tokens = int(starts[-1])
        request_np = np.repeat(np.arange(self.num_reqs), np.diff(starts))
        node_np = np.minimum(np.arange(num_tokens) - starts[request_np], self.budget)
        request = torch.from_numpy(request_np).to(self.device, non_blocking=True)
        node = torch.from_numpy(node_np).to(self.device, non_blocking=True)
        in_tree = self.num_nodes[request] > 0
        valid = node < self.num_nodes[request]
        depth = torch.where(valid, self.depths[request, node], 0)
        self.positions.copy_(input_batch.positions)
        live = self.positions[:num_tokens]
        self.row_shift = torch.where(in_tree, self.base[request] + depth - live, 0)
        live += self.row_shift
        # Placeholders (-1) and cut-off drafts must never reach the embedding: id 0 stands in, seen by nobody.
        ids = input_batch.input_ids[:num_tokens]
        drafted = torch.where(valid, self.tokens[request, node], 0).to(ids.dtype)
        ids.copy_(torch.where(in_tree & (node > 0), drafted, ids))

    def accept(self, path: Tensor, num_path: Tensor) -> None:
        """Record the walk's result and count it. path int32 [R, N], num_path int32 [R] (0: no tree)."""
        self.path.copy_(path)
        self.num_path.copy_(num_path)
        self.drafts_verified = True
        self._count()

    def _count(self) -> None:
        accepted = (self.num_path - 1).clamp(min=0)
        parents = self.parents.long()
        slot = torch.arange(parents.shape[1], device=self.device)
        earlier = slot[None, :] < slot[:, None]
        later_child = ((parents[:, :, None] == parents[:, None, :]) & earlier).any(-1)
        on_path = (slot >= 1) & (slot < self.num_path[:, None])
        branching = (later_child.gather(1, self.path.long().clamp(min=0)) & on_path).any(-1)
        self.stats.totals += torch.stack(
            [(self.num_path > 0).sum(), accepted.sum(), (accepted > 0).sum(), branching.sum()]
        )


@dataclass(frozen=True)
class LayerTrees:
    """What the attention metadata of a target layer carries: the step and the layer group's own block ids.

    Attributes:
        step: the step's trees.
        block_table: int32 [R, blocks] of the layer's KV cache group; for recurrent layers column 0 is the
        state slot.
    """

    step: TreeStep
    block_table: Tensor

    @property
    def state_indices(self) -> Tensor:
        """int32 [R]: recurrent state slot of every request."""
        return self.block_table[: self.step.num_reqs, 0]


def layer_trees(metadata: object) -> LayerTrees:
    """The trees that `TreeModelState.prepare_attn` attached to a layer's attention metadata.

    Raises:
        RuntimeError: the metadata was built by another model state; running on would ignore the tree.
    """
    trees = getattr(metadata, "trees", None)
    if not isinstance(trees, LayerTrees):
        raise RuntimeError(
            f"dflash_tfm: attention metadata of type {type(metadata).__name__} carries no trees; the "
            "target's layers must run under TreeModelState (please report this with your serve command)."
        )
    return trees
