# SPDX-License-Identifier: Apache-2.0
"""The drafting side: vLLM's DFlash speculator with a tree proposer behind the draft model.

The draft still predicts one block of D = block size - 1 positions for each request; its marginals (and the
Weaver head) become a tree of at most `num_speculative_tokens` nodes. The tree goes to the model state's
buffers, its nodes to vLLM as draft tokens, in node order.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

from vllm_weaver.config import WeaverSettings, settings_of
from vllm_weaver.draft import check_draft_files, fit_loaded_draft, keep_own_head
from vllm_weaver.kernels.gather_rows import gather_rows
from vllm_weaver.spec_decode.model_state import TreeStateMixin
from vllm_weaver.spec_decode.proposers import ChainProposer, DDTreeProposer, TreeProposer, WeaverProposer
from vllm_weaver.spec_decode.tables import build_tables, target_ends, usable_vocabulary
from vllm_weaver.spec_decode.weaver_checkpoint import load_weaver


def build_proposer(
    settings: WeaverSettings, target_model: Any, vocab_size: int, dtype: torch.dtype, device: torch.device
) -> TreeProposer:
    """The proposer that the settings ask for, with its tables computed from the target's embedding and head.

    vocab_size is the draft's; ids that the target pads its layers with are never proposed either.
    """
    ends = target_ends(target_model)
    vocab_size = usable_vocabulary(vocab_size, ends)
    if settings.proposal == "chain":
        return ChainProposer(vocab_size)
    if settings.proposal == "ddtree":
        return DDTreeProposer(vocab_size, settings.candidate_pool_size)
    assert settings.weaver is not None  # resolved while the config was built
    head = load_weaver(Path(settings.weaver), dtype=dtype, device=device)
    with torch.inference_mode():
        return WeaverProposer(head, *build_tables(head, ends), settings.candidate_pool_size, vocab_size)


class DFlashTfmSpeculator(DFlashSpeculator):
    """DFlash draft model and tree proposer; see the module's docstring."""

    _speculator_name = "DFlash-TfM"

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        settings = settings_of(vllm_config)
        assert settings is not None  # chosen by the hook only for a config with settings
        self.settings = settings
        # vLLM sizes a block by num_speculative_tokens; here that is the tree budget and the block is the
        # draft's own. `draft_tokens`, allocated above, keeps the budget's width: it is what the runner
        # stores.
        self.num_speculative_steps = settings.depth
        self.num_query_per_req = 1 + settings.depth
        samples = self.max_num_reqs * settings.depth
        self.sample_indices = torch.zeros(samples, dtype=torch.int64, device=device)
        self.sample_pos = torch.zeros(samples, dtype=torch.int64, device=device)
        self.sample_idx_mapping = torch.full((samples,), -1, dtype=torch.int64, device=device)
        self.sample_col = torch.arange(settings.depth, dtype=torch.int32, device=device).repeat(
            self.max_num_reqs
        )
        self._anchor = torch.zeros(
            self.max_num_reqs, vllm_config.model_config.get_hidden_size(), dtype=self.dtype, device=device
        )
        self._block_rows = torch.arange(self.num_query_per_req, device=device)
        self._tree_state: TreeStateMixin | None = None
        self.proposer: TreeProposer

    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: set[str]) -> nn.Module:
        """The draft model, and from target and draft the proposer with its tables."""
        facts = check_draft_files(self.vllm_config)
        if facts is not None:
            keep_own_head(self.draft_model_config.hf_config, facts, target_ends(target_model).lm_head)
        model = super().load_draft_model(target_model, target_attn_layer_names)
        fit_loaded_draft(model, facts, self.num_query_per_req)
        self.proposer = build_proposer(self.settings, target_model, self.vocab_size, self.dtype, self.device)
        return model

    def set_attn(self, model_state: Any, *args: Any, **kwargs: Any) -> None:
        """vLLM's set-up; from here on trees have a place to go."""
        super().set_attn(model_state, *args, **kwargs)
        self._tree_state = model_state

    def _num_graph_context_tokens(self, num_reqs: int) -> int:
        # A captured draft step stores the context of one full verify, which has the budget's width, not the
        # block's.
        return min(num_reqs * (self.settings.budget + 1), self.max_num_tokens)

    @torch.inference_mode()
    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: dict[str, Any],
        slot_mappings: dict[str, Tensor],
        last_hidden_states: Tensor,
        aux_hidden_states: list[Tensor] | None,
        num_sampled: Tensor,
        num_rejected: Tensor,
        *args: Any,
        dummy_run: bool = False,
        **kwargs: Any,
    ) -> Tensor:
        """Drafts int64 [num_reqs, budget] in node order, -1 where a tree has fewer nodes; each is a token and
        its parent, see `kernels.tree_step.unpack_drafts`.

        Hidden states come in node order. They are moved along the accepted path first, so that the draft's
        context is the chain of accepted tokens that vLLM's own code expects.
        """
        num_reqs = input_batch.num_reqs
        state = None if dummy_run else self._tree_state
        if state is not None and state.step.drafts_verified:
            step = state.step
            gather_rows([last_hidden_states, *(aux_hidden_states or [])], step.query_start_loc, step.path)
        last = input_batch.query_start_loc[1 : num_reqs + 1] - num_rejected[:num_reqs] - 1
        torch.index_select(last_hidden_states, 0, last, out=self._anchor[:num_reqs])
        return super().propose(
            input_batch, attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states, num_sampled,
            num_rejected,
            *args, dummy_run=dummy_run, **kwargs,
        )  # fmt: skip

    def _generate_draft(
        self,
        num_reqs: int,
        num_tokens_padded: int,
        attn_metadata: dict[str, Any] | None,
        slot_mappings: dict[str, Tensor] | None,
        num_tokens_across_dp: Tensor | None,
        cudagraph_runtime_mode: CUDAGraphMode = CUDAGraphMode.NONE,
    ) -> None:
        depth, queries = self.settings.depth, self.num_query_per_req
        block = slice(0, num_reqs * queries)
        # The number of further positions that exist: rows past it have no slot of their own (vLLM would give
        # them one of the request's last block), and no node may stand there.
        root_positions = self.input_buffers.positions[block].view(num_reqs, queries)[:, 0]
        room = (self.max_model_len - 1 - root_positions).clamp(min=0)
        if slot_mappings is not None:
            beyond = (self._block_rows > room[:, None]).flatten()
            # A group of layers shares one mapping; the target's groups play no part here.
            mappings = (slot_mappings[name] for name in self.draft_attn_layer_names)
            for mapping in {mapping.data_ptr(): mapping for mapping in mappings}.values():
                mapping[block].masked_fill_(beyond, PAD_SLOT_ID)
        hidden = self._run_model(
            num_tokens_padded, attn_metadata, slot_mappings, num_tokens_across_dp, cudagraph_runtime_mode
        )
        samples = slice(0, num_reqs * depth)
        draft_hidden = hidden[self.sample_indices[samples]]
        draft_logits = self.compute_draft_logits(draft_hidden, 0)
        roots = self.input_buffers.input_ids[block].view(num_reqs, queries)[:, 0].to(torch.int64)
        tree = self.proposer.propose(
            self._anchor[:num_reqs],
            draft_hidden.view(num_reqs, depth, -1),
            draft_logits.view(num_reqs, depth, -1),
            roots,
            self.settings.budget,
            max_depth=room,
        )
        if self._tree_state is None:  # memory profiling, before there is any state
            self.draft_tokens[:num_reqs] = tree.tokens[:, 1:]
            return
        index = self.sample_idx_mapping[samples].view(num_reqs, depth)[:, 0]
        chain_only = self._tree_state.step.chain_only[:num_reqs]
        self._tree_state.trees.store(tree, index, self.draft_tokens[:num_reqs], chain_only)
