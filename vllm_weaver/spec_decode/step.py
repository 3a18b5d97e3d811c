# SPDX-License-Identifier: Apache-2.0
"""One target step seen as trees: which rows are tree nodes, who sees whom, and which path was accepted.

vLLM packs the query tokens of all requests of a step into rows. A request that decodes owns `1 + drafts`
rows; here these rows are the nodes of its tree. Everything that depends on the tree (RoPE positions, masks,
walk, commit) reads this object; it is filled once a step, in batch order, into buffers allocated at start,
whose addresses a replayed CUDA graph knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from vllm_weaver.kernels.tree_step import StepArrays, fill_step
from vllm_weaver.kernels.walk_record import COUNTERS
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
    """Counters since start: `totals` int64 [4] on the device, see `kernels.walk_record.COUNTERS`."""

    totals: Tensor

    def read(self) -> dict[str, int]:
        """The counters as Python integers (copies from the device)."""
        return dict(zip(COUNTERS, self.totals.tolist(), strict=True))


class TreeStep:
    """The trees of one step, in batch order. R requests, N = budget + 1 node slots.

    Attributes (views of the first `num_reqs` entries of buffers that never move):
        tokens int64, parents int32, depths int32 [R, N]: the trees, cut to the rows that were scheduled.
        num_nodes int32 [R]: valid nodes; 0 for a request that is no tree in this step.
        ancestors int32 [R, N, ceil(N/32)]: bit masks, see `kernels.ancestors`.
        base int64 [R]: committed tokens before the step (the root's position).
        path int32 [R, N], num_path int32 [R]: accepted nodes, root first; the root alone until a walk ran.
        query_start_loc int32 [R + 1]: the batch's row offsets.
        all_trees, any_tree: whether every request of the step is a tree, and whether one is.
        num_rows: rows up to the end of the last tree. num_tokens: rows, padding included.
        drafts_verified: whether the walk has run.
        chain_only int32 [max R]: requests whose next tree must be a chain, in batch order.
        chain_reasons uint8 [R], on the host: why, as given to `begin`.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    num_nodes: Tensor
    ancestors: Tensor
    base: Tensor
    path: Tensor
    num_path: Tensor

    def __init__(self, max_num_reqs: int, max_num_tokens: int, budget: int, device: torch.device) -> None:
        self.budget = budget
        self.device = device
        self._arrays = StepArrays.allocate(max_num_reqs, budget + 1, device)
        self._limits = torch.zeros(max_num_reqs, dtype=torch.int32, device=device)
        self.chain_only = torch.zeros(max_num_reqs, dtype=torch.int32, device=device)
        self.chain_reasons = np.zeros(0, dtype=np.uint8)
        self._some_chains = False
        self._nothing_computed = torch.zeros(max_num_reqs, dtype=torch.int32, device=device)
        self._positions = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)
        self._shift = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)
        self.stats = TreeStats(torch.zeros(len(COUNTERS), dtype=torch.int64, device=device))
        self.query_start_loc = torch.zeros(1, dtype=torch.int32, device=device)
        self.num_rows = 0
        self.num_tokens = 0
        self.any_tree = False
        self.all_trees = False
        self.drafts_verified = False
        self._view(0)

    def _view(self, num_reqs: int) -> None:
        self.num_reqs = num_reqs
        vars(self).update(vars(self._arrays.first(num_reqs)))

    def positions(self, num_tokens: int | None = None) -> Tensor:
        """int64 [num_tokens]: position of every row in its sequence; base + depth for tree nodes."""
        return self._positions[: self.num_tokens if num_tokens is None else num_tokens]

    @property
    def shift(self) -> Tensor:
        """int64 [num_tokens]: what `positions` differs by from the linear positions."""
        return self._shift[: self.num_tokens]

    def begin(
        self,
        input_batch: InputBatch,
        req_states: RequestState | None,
        trees: TreeBuffers,
        chain_reasons: np.ndarray,
    ) -> np.ndarray:
        """Fill the step from the batch and the stored trees; returns `tree_requests`.

        Args:
            input_batch: the batch that is about to run; padding requests at its end become empty trees.
            req_states: the runner's request states, or None in a dummy run (every request is then cut to its
            root).
            trees: the trees that the speculator left, by request state index.
            chain_reasons: uint8 [num_reqs], not 0 for requests whose trees must be chains; see
            `metrics.CHAIN_REASONS`.
        """
        from vllm.utils.torch_utils import async_tensor_h2d

        num_reqs, padded = input_batch.num_reqs, input_batch.num_reqs_after_padding
        self._view(num_reqs)
        self.num_tokens = input_batch.num_tokens_after_padding
        self.query_start_loc = input_batch.query_start_loc[: num_reqs + 1]
        is_tree = tree_requests(input_batch, self.budget)
        self.any_tree, self.all_trees = bool(is_tree.any()), bool(is_tree.all())
        starts = input_batch.query_start_loc_np[: num_reqs + 1]
        # Rows beyond the last tree are never a tree's: kernels may be handed only the rows before it.
        self.num_rows = int(starts[1:][is_tree].max()) if self.any_tree else 0
        self.drafts_verified = False

        drafts = input_batch.num_draft_tokens_per_req
        limits = np.zeros(padded, dtype=np.int32)
        limits[:num_reqs] = 1 if drafts is None or req_states is None else drafts + 1
        limits[:num_reqs][~is_tree] = 0
        async_tensor_h2d(limits, out=self._limits[:padded])
        self.chain_reasons = chain_reasons
        if chain_reasons.any() or self._some_chains:  # else all of it is 0 already
            flags = np.zeros(len(self.chain_only), dtype=np.int32)
            flags[:num_reqs] = chain_reasons != 0
            async_tensor_h2d(flags, out=self.chain_only)
            self._some_chains = bool(chain_reasons.any())
        computed = prefill_len = self._nothing_computed
        if req_states is not None:
            computed, prefill_len = req_states.num_computed_tokens.gpu, req_states.prefill_len.gpu
        self.positions().copy_(input_batch.positions)
        self.shift.zero_()
        fill_step(
            self._arrays.first(padded),
            trees.nodes(),
            input_batch.idx_mapping[:num_reqs],
            self._limits[:padded],
            input_batch.query_start_loc[: padded + 1],
            computed,
            prefill_len,
            self.positions(),
            self.shift,
            input_batch.input_ids,
        )
        return is_tree


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
