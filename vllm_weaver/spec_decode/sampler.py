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

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import SpeculativeConfig
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import InputBatch, get_num_sampled_and_rejected
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcessor
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from vllm_weaver.config import TreeVerify
from vllm_weaver.kernels.gather_rows import gather_rows
from vllm_weaver.kernels.greedy_walk import Walk, greedy_walk, row_argmax
from vllm_weaver.kernels.traversal_rows import bonus_rows, place_bonus, row_statistics
from vllm_weaver.kernels.traversal_walk import traversal_walk
from vllm_weaver.kernels.walk_record import record_walks
from vllm_weaver.spec_decode.step import TreeStep
from vllm_weaver.spec_decode.tree import TreeBuffers


@dataclass(kw_only=True)
class TreeSamplerOutput(SamplerOutput):
    """A sampler output with what the walks were like. It goes to the host on the stream that vLLM's copies of
    the output wait for: when these have arrived, so has the record.

    record: int32 [R, 2], see `kernels.walk_record`. chain_reasons: uint8 [R], see `metrics.CHAIN_REASONS`.
    """

    record: Tensor
    chain_reasons: np.ndarray

    def rows(self) -> list[tuple[int, int, int]]:
        """Nodes proposed, depth of branching and chain reasons of each request, once the copies are there."""
        pairs = zip(self.record.tolist(), self.chain_reasons.tolist(), strict=True)
        return [(nodes, branched, reasons) for (nodes, branched), reasons in pairs]


class CustomProcessor(LogitsProcessor):
    """A custom logits processor of the user's, and a note of the requests that it changes logits of."""

    def __init__(self, inner: LogitsProcessor, max_num_reqs: int) -> None:
        self.inner = inner
        self.acts = np.zeros(max_num_reqs, dtype=bool)

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """The processor's own answer, noted under the request's state index."""
        self.acts[req_idx] = acts = bool(self.inner.add_request(req_idx, sampling_params))
        return acts

    def apply_staged_writes(self) -> None:
        """As the processor."""
        self.inner.apply_staged_writes()

    def apply(self, logits: Tensor, ctx: LogitsContext) -> Tensor:
        """As the processor."""
        return self.inner.apply(logits, ctx)


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
        known = (LogitBiasState, PenaltiesState, BadWordsState)
        max_num_reqs = len(sampler.needs_logits_processing)
        sampler.logits_processors = [
            processor if isinstance(processor, known) else CustomProcessor(processor, max_num_reqs)
            for processor in sampler.logits_processors
        ]

    def history_dependent(self, index: np.ndarray) -> dict[str, np.ndarray]:
        """Which requests, by state index, need rows that follow one another, and why: bool [len(index)] by
        reason.

        Their logits depend on the tokens before a row. vLLM's processors take these from the rows above, as
        its interface tells custom processors to (`LogitsContext`: committed tokens from the request states,
        drafts from `input_ids`): right for a chain; on a tree the row above is another branch. A custom
        processor that declined the request in `add_request` does not count.
        """
        sampler = self.sampler
        reasons = {"penalty": sampler.penalties_state.use_penalty[index]}
        nobody = np.zeros(index.shape, dtype=bool)
        words = [
            p.num_bad_words.np[index] > 0 for p in sampler.logits_processors if isinstance(p, BadWordsState)
        ]
        reasons["bad_words"] = np.logical_or.reduce([nobody, *words])
        thinking = sampler.thinking_budget_state
        reasons["thinking_budget"] = thinking.use_thinking_budget[index] if thinking.enabled else nobody
        custom = [p.acts[index] for p in sampler.logits_processors if isinstance(p, CustomProcessor)]
        reasons["custom_processor"] = np.logical_or.reduce([nobody, *custom])
        return reasons

    def __call__(
        self,
        logits: Tensor,
        input_batch: InputBatch,
        draft_logits: Tensor | None = None,
        invalid_drafts: Tensor | None = None,
    ) -> SamplerOutput:
        """logits [num_logits, V], one row a node (and one a prefill that ends in this step), in batch order.

        `draft_logits` plays no part: acceptance compares tokens. `invalid_drafts` bool [num_logits] marks the
        rows of drafts that the scheduler did not know when it made a grammar's masks: they are no nodes. A
        node that the grammar refuses is one, but cannot be reached: its token is masked in its parent's row.
        """
        del draft_logits
        step, sampler = self.step, self.sampler
        num_nans = get_num_nans(logits) if sampler.compute_nans else None
        vocab_size = logits.shape[1]
        logprobs_dims = sampler.get_logprobs_dims(input_batch.idx_mapping_np)
        row_starts = input_batch.cu_num_logits[: step.num_reqs + 1]
        tokens = self._usable_tokens(row_starts, invalid_drafts)
        requests = input_batch.idx_mapping_np
        if not sampler.sampling_states.temperature.np[requests].any():
            # vLLM's sampler gets the same tokens out of its noise kernel, in three times as long.
            processed = logits
            if sampler.needs_logits_processing[requests].any():
                processed = sampler.apply_sampling_params(*self._rows_to_sample(logits, input_batch))
            chosen = row_argmax(processed)
        elif self.tree_verify == "traversal":
            chosen, processed = self._choose_by_traversal(logits, input_batch, row_starts, tokens)
        else:
            chosen, processed = sampler.sample(
                *self._rows_to_sample(logits, input_batch), return_logprobs=logprobs_dims is not None
            )
        walk = greedy_walk(
            chosen.to(torch.int64),
            row_starts,
            tokens,
            step.parents,
            step.num_nodes,
            vocab_size,
            path=(step.path, step.num_path),
        )
        record = record_walks(step.path, step.num_path, step.parents, step.num_nodes, step.stats.totals)
        step.drafts_verified = True
        logprobs = None
        if logprobs_dims is not None:
            scored = processed if sampler.logprobs_mode in PROCESSED_LOGPROBS_MODES else logits
            logprobs = self._logprobs(walk, scored, input_batch, row_starts, logprobs_dims)
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            walk.num_sampled,
            input_batch.seq_lens,
            input_batch.cu_num_logits,
            input_batch.idx_mapping,
            sampler.req_states.prefill_len.gpu,
        )
        return TreeSamplerOutput(
            record=record.to("cpu", non_blocking=True),
            chain_reasons=step.chain_reasons,
            sampled_token_ids=walk.sampled_token_ids,
            logprobs_tensors=logprobs,
            num_nans=num_nans,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
            sampling_mask_tensors=None,
        )

    def _logprobs(
        self, walk: Walk, logits: Tensor, input_batch: InputBatch, row_starts: Tensor, dims: tuple[int, int]
    ) -> LogprobsTensors:
        """Log-probabilities of the committed tokens, in the rows of a chain. (Upstream's method for chains
        knows no `logprob_token_ids`.) dims: top log-probabilities and token ids, at most, of a request."""
        num_logprobs, max_token_ids = dims
        scored = logits.clone()  # rows are moved along the paths, the caller keeps its own
        gather_rows(scored, row_starts, walk.path)
        index = torch.arange(len(scored), device=scored.device)
        request = torch.searchsorted(row_starts[1:].contiguous(), index, right=True)
        within = (index - row_starts[request]).clamp(max=walk.sampled_token_ids.shape[1] - 1)
        committed = walk.sampled_token_ids[request, within].clamp(min=0)  # rows past the path are not read
        return compute_topk_scores(
            scored,
            num_logprobs,
            committed,
            input_batch.cu_num_logits_np.tolist(),
            logprob_token_ids_state=self.sampler.logprob_token_ids_state,
            expanded_idx_mapping=input_batch.expanded_idx_mapping,
            max_per_req_token_ids=max_token_ids,
            logits_mode=self.sampler.logprobs_mode in ("raw_logits", "processed_logits"),
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
