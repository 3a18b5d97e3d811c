# SPDX-License-Identifier: Apache-2.0
"""Verification of a tree: what the target chooses at every node, and the walk that follows it.

Each node's row is sampled as vLLM would sample it without speculation: same processing, same noise for the
request's seed and the node's position. From the root the walk goes to the child that holds the chosen token,
so that the text is the one of plain decoding (greedy or seeded). The result has the shape of vLLM's own
rejection sampler: accepted tokens and the bonus token, in chain order.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from vllm.config import SpeculativeConfig
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.v1.worker.gpu.input_batch import InputBatch, get_num_sampled_and_rejected
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from vllm_weaver.kernels.gather_rows import gather_rows
from vllm_weaver.kernels.greedy_walk import greedy_walk
from vllm_weaver.spec_decode.step import TreeStep


class TreeVerifier(RejectionSampler):
    """Stands where vLLM's rejection sampler stands; see the module's docstring."""

    def __init__(self, sampler: Sampler, speculative_config: SpeculativeConfig, step: TreeStep) -> None:
        super().__init__(sampler, speculative_config, step.device)
        self.step = step

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
        rows = input_batch.logits_indices
        chosen, processed = sampler.sample(
            logits,
            input_batch.expanded_idx_mapping,
            input_batch.idx_mapping,
            input_batch.idx_mapping_np,
            step.positions()[rows],
            input_batch.input_ids[rows],
            input_batch.expanded_local_pos,
            input_batch.seq_lens_cpu_upper_bound.numpy(),
            return_logprobs=num_logprobs != NO_LOGPROBS,
        )
        row_starts = input_batch.cu_num_logits[: step.num_reqs + 1]
        walk = greedy_walk(
            chosen.to(torch.int64),
            row_starts,
            self._usable_tokens(row_starts, invalid_drafts),
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

    def _usable_tokens(self, row_starts: Tensor, invalid_drafts: Tensor | None) -> Tensor:
        """The step's tokens [R, N], those of invalid drafts replaced by one that nothing can be equal to."""
        tokens: Tensor = self.step.tokens
        if invalid_drafts is None:
            return tokens
        node = torch.arange(tokens.shape[1], device=tokens.device)
        row = row_starts[:-1, None] + node
        invalid = invalid_drafts[row.clamp(max=len(invalid_drafts) - 1)] & (row < row_starts[1:, None])
        return tokens.masked_fill(invalid & (node > 0), -1)
