# SPDX-License-Identifier: Apache-2.0
"""Verification of a tree: what the target chooses at every node, and the walk that follows it.

From the root the walk goes to the child that holds the node's chosen token. Who chooses is the setting
`tree_verify`:

- `target_only`: each node's row is sampled as vLLM would sample it without speculation: same processing,
  same noise for the request's seed and the node's position. The text is the one of plain decoding.
- `traversal`: `kernels.traversal_walk` chooses the path of a sampled request; then vLLM's own sampler draws
  the bonus token from the last node's row. The law of the text is the one of plain decoding, and a request's
  text depends on its seed and its drafts alone. Of the target's distribution, one row a request is copied.

Greedy requests give the same text under both. The noise of a request without a seed is that of the random
seed which vLLM gives it when it arrives. The result has the shape of vLLM's own rejection sampler: accepted
tokens and the bonus token, in chain order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import SpeculativeConfig
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.v1.worker.gpu.input_batch import InputBatch, get_num_sampled_and_rejected
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from vllm_weaver.config import TreeVerify
from vllm_weaver.kernels.gather_rows import gather_rows
from vllm_weaver.kernels.greedy_walk import greedy_walk
from vllm_weaver.kernels.traversal_rows import bonus_rows, place_bonus, row_statistics
from vllm_weaver.kernels.traversal_walk import traversal_walk
from vllm_weaver.spec_decode.step import TreeStep
from vllm_weaver.spec_decode.tree import TreeBuffers


class TreeVerifier(RejectionSampler):
    """Stands where vLLM's rejection sampler stands; see the module's docstring.

    trees: where the trees of `step` were taken from; `tree_verify`: see `vllm_weaver.config`.
    """

    def __init__(
        self,
        sampler: Sampler,
        speculative_config: SpeculativeConfig,
        step: TreeStep,
        trees: TreeBuffers,
        tree_verify: TreeVerify,
    ) -> None:
        super().__init__(sampler, speculative_config, step.device)
        self.step = step
        self.trees = trees
        self.tree_verify = tree_verify

    def history_dependent(self, index: np.ndarray) -> np.ndarray:
        """bool [len(index)]: requests (by state index) whose logits vLLM's own processors change with the
        tokens before a row, which they take from the rows above; on a tree that is another branch."""
        sampler = self.sampler
        needs = sampler.penalties_state.use_penalty[index].copy()
        for processor in sampler.logits_processors:
            counts = getattr(processor, "num_bad_words", None)
            if counts is not None:
                needs |= counts.np[index] > 0
        thinking = sampler.thinking_budget_state
        return needs | thinking.use_thinking_budget[index] if thinking.enabled else needs

    def custom(self, index: np.ndarray) -> np.ndarray:
        """bool [len(index)]: requests (by state index) that a custom processor may look at."""
        known = {"LogitBiasState", "PenaltiesState", "BadWordsState"}
        if all(type(processor).__name__ in known for processor in self.sampler.logits_processors):
            return np.zeros(index.shape, dtype=bool)
        return self.sampler.needs_logits_processing[index].copy()

    def __call__(
        self,
        logits: Tensor,
        input_batch: InputBatch,
        draft_logits: Tensor | None = None,
        invalid_drafts: Tensor | None = None,
    ) -> SamplerOutput:
        """logits [num_logits, V], one row a node (and one a prefill that ends in this step), in batch order.

        `draft_logits` plays no part: acceptance compares tokens. `invalid_drafts` bool [num_logits] marks the
        rows of drafts that a grammar refuses: they are no nodes. (A request with a grammar has a chain.)
        """
        del draft_logits
        step, sampler = self.step, self.sampler
        num_nans = get_num_nans(logits) if sampler.compute_nans else None
        vocab_size = logits.shape[1]
        num_logprobs = sampler.sampling_states.max_num_logprobs(input_batch.idx_mapping_np)
        row_starts = input_batch.cu_num_logits[: step.num_reqs + 1]
        tokens = self._usable_tokens(row_starts, invalid_drafts)
        some_sampled = sampler.sampling_states.temperature.np[input_batch.idx_mapping_np].any()
        if self.tree_verify == "traversal" and some_sampled:
            chosen, processed = self._choose_by_traversal(logits, input_batch, row_starts, tokens)
        else:
            chosen, processed = sampler.sample(
                *self._rows_to_sample(logits, input_batch), return_logprobs=num_logprobs != NO_LOGPROBS
            )
        walk = greedy_walk(
            chosen.to(torch.int64),
            row_starts,
            tokens,
            step.parents,
            step.num_nodes,
            vocab_size,
            path=(step.path, step.num_path),
            counters=step.stats.totals,
        )
        step.drafts_verified = True
        logprobs = None
        if num_logprobs != NO_LOGPROBS:
            scored = processed if sampler.logprobs_mode in PROCESSED_LOGPROBS_MODES else logits
            scored = scored.clone()  # rows are moved along the paths, the caller keeps its own
            gather_rows(scored, row_starts, walk.path)
            logprobs = self._get_logprobs_tensors(
                walk.sampled_token_ids, walk.num_sampled, scored, input_batch.cu_num_logits,
                input_batch.cu_num_logits_np, num_logprobs,
            )  # fmt: skip
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            walk.num_sampled,
            input_batch.seq_lens,
            input_batch.cu_num_logits,
            input_batch.idx_mapping,
            sampler.req_states.prefill_len.gpu,
        )
        return SamplerOutput(
            sampled_token_ids=walk.sampled_token_ids,
            logprobs_tensors=logprobs,
            num_nans=num_nans,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
            sampling_mask_tensors=None,
        )

    def _rows_to_sample(self, logits: Tensor, input_batch: InputBatch) -> tuple[Any, ...]:
        """What vLLM's sampler is told of a batch's rows: a chain's, but for the positions."""
        rows = input_batch.logits_indices
        return (
            logits,
            input_batch.expanded_idx_mapping,
            input_batch.idx_mapping,
            input_batch.idx_mapping_np,
            self.step.positions()[rows],
            input_batch.input_ids[rows],
            input_batch.expanded_local_pos,
            input_batch.seq_lens_cpu_upper_bound.numpy(),
        )

    def _choose_by_traversal(
        self, logits: Tensor, input_batch: InputBatch, row_starts: Tensor, tokens: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The choice int64 [num_logits] of every row, as far as a walk gets to it, and the processed logits.

        The bonus token has vLLM's noise for its position, which no other step uses: each position gets its
        token from one row only. So a row without drafts is sampled as it is in a step without any.
        """
        step, sampler = self.step, self.sampler
        requests = input_batch.idx_mapping[: step.num_reqs]
        temperatures = sampler.sampling_states.temperature.gpu
        seeds = sampler.sampling_states.seeds.gpu
        rows = self._rows_to_sample(logits, input_batch)
        processed: Tensor = sampler.apply_sampling_params(*rows)
        statistics = row_statistics(processed)
        end = traversal_walk(
            processed,
            statistics,
            row_starts,
            tokens,
            step.parents,
            step.num_nodes,
            self.trees.trees.logprobs,
            requests,
            temperatures,
            seeds,
            step.base,
        )
        bonus = gumbel_sample(
            bonus_rows(processed, end.final_rows, end.excluded, end.num_excluded),
            requests,
            temperatures,
            seeds,
            rows[4][end.final_rows.clamp(min=0)],
            apply_temperature=False,
            is_drafting=False,
            use_fp64=sampler.use_fp64_gumbel,
        )
        place_bonus(statistics.best, end.final_rows, bonus)
        return statistics.best, processed

    def _usable_tokens(self, row_starts: Tensor, invalid_drafts: Tensor | None) -> Tensor:
        """The step's tokens [R, N], those of invalid drafts replaced by one that nothing can be equal to."""
        tokens: Tensor = self.step.tokens
        if invalid_drafts is None:
            return tokens
        node = torch.arange(tokens.shape[1], device=tokens.device)
        row = row_starts[:-1, None] + node
        invalid = invalid_drafts[row.clamp(max=len(invalid_drafts) - 1)] & (row < row_starts[1:, None])
        return tokens.masked_fill(invalid & (node > 0), -1)
