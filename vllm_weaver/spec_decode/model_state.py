# SPDX-License-Identifier: Apache-2.0
"""Model states that run decode rows as trees: RoPE positions, attention metadata, and the commit after the
walk.

`TreeStateMixin` holds the tree part once; the two classes at the end put it in front of vLLM's model state
for hybrid models and of the one for attention-only models. vLLM calls, in this order in a step:
`prepare_attn`, `prepare_inputs`, the model, the sampler, `postprocess_state`, the speculator.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.config.compilation import CUDAGraphMode
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.model_states.interface import ModelState
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState
from vllm.v1.worker.gpu.states import RequestState
from vllm.v1.worker.utils import AttentionGroup

from vllm_weaver.config import settings_of
from vllm_weaver.spec_decode import attention, gdn
from vllm_weaver.spec_decode.blas import prefer_cublaslt
from vllm_weaver.spec_decode.metrics import reason_masks
from vllm_weaver.spec_decode.sampler import TreeVerifier
from vllm_weaver.spec_decode.state_slots import StateSlots
from vllm_weaver.spec_decode.step import LayerTrees, TreeStep, layer_trees
from vllm_weaver.spec_decode.tree import TreeBuffers

logger = init_logger(__name__)


class TreeStateMixin:
    """The tree part of a model state; see the module's docstring.

    Attributes:
        trees: the tree of every request for its next verify, by request state index; the speculator writes
        it.
        step: the trees of the step that is running.
    """

    def __init__(self, vllm_config: VllmConfig, model: Any, encoder_cache: Any, device: torch.device) -> None:
        super().__init__(vllm_config, model, encoder_cache, device)  # type: ignore[call-arg]
        settings = settings_of(vllm_config)
        assert settings is not None  # chosen by the hook only for a config with settings
        self.settings = settings
        max_num_reqs = vllm_config.scheduler_config.max_num_seqs
        max_num_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self.trees = TreeBuffers(max_num_reqs, settings.budget + 1, device)
        self.step = TreeStep(max_num_reqs, max_num_tokens, settings.budget, device)
        self._verifier: TreeVerifier | None = None
        self._req_states: RequestState | None = None
        self._step_batch: InputBatch | None = None
        self._metadata: dict[str, Any] = {}
        self._captured = False
        self._tables: dict[str, Tensor] = {}
        self._kv_plan: attention.CommitPlan | None = None
        self._gdn_plan: gdn.CommitPlan | None = None
        self._boundary_plan: gdn.CommitPlan | None = None
        self._slots: StateSlots | None = None  # None where column 0 of a block table is the state's
        self._boundary_tables: dict[str, Tensor] = {}
        self._may_cross = False
        self.attention_layers: dict[str, Any] = {
            name: layer
            for name, layer in get_layers_from_vllm_config(vllm_config, Attention).items()
            if not getattr(layer, "is_draft_layer", False)
        }
        self.gdn_layers: dict[str, Any] = dict(get_layers_from_vllm_config(vllm_config, MambaBase))
        prefer_cublaslt(model, self.step)
        attention.install(self.attention_layers)
        recurrent, dtype = list(self.gdn_layers.values()), self.dtype  # type: ignore[attr-defined]
        rows = min(max_num_reqs * (settings.budget + 1), max_num_tokens)
        gdn.install(recurrent, rows, settings.budget + 1, device, dtype)
        logger.info(
            "dflash_tfm: %.2f GiB keep %d rows of %d recurrent layers between verification and commit; "
            "max_num_seqs and max_num_batched_tokens bound the rows",
            gdn.stash_bytes(recurrent, rows, dtype) / 2**30,
            rows,
            len(recurrent),
        )

    # --- requests ---------------------------------------------------------------------------------------

    def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
        """A state index gets a new owner: its last owner's tree is forgotten."""
        super().add_request(req_index, new_req_data)  # type: ignore[misc]
        self.trees.clear(req_index)

    def custom_sampler(self, sampler: Any) -> tuple[Any, Any]:
        """vLLM's own sampler for steps without drafts, the tree verifier for the others."""
        self._req_states = sampler.req_states
        speculative_config = self.vllm_config.speculative_config  # type: ignore[attr-defined]
        self._verifier = TreeVerifier(
            sampler, speculative_config, self.step, self.trees, self.settings.tree_verify
        )
        return sampler, self._verifier

    def _chain_reasons(self, input_batch: InputBatch) -> np.ndarray:
        """uint8 [num_reqs]: why a request's trees are chains, as a mask of `CHAIN_REASONS`; 0 for real trees.

        vLLM processes logits with the tokens before a row, taking the row above for the token before. That is
        right for chains. (The masks of a grammar know the tree: `grammar.TreeGrammars`.)
        """
        index = input_batch.idx_mapping_np[: input_batch.num_reqs]
        if self._verifier is None:
            return np.zeros(len(index), dtype=np.uint8)
        return reason_masks(self._verifier.history_dependent(index))

    # --- a step -----------------------------------------------------------------------------------------

    def prepare_attn(
        self,
        input_batch: InputBatch,
        cudagraph_mode: CUDAGraphMode,
        block_tables: tuple[Tensor, ...],
        slot_mappings: Tensor,
        attn_groups: list[list[AttentionGroup]],
        kv_cache_config: KVCacheConfig,
        for_capture: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """vLLM's metadata, with the step's trees attached to every target layer.

        A step that replays a whole graph of trees reads the step's buffers, block tables and lengths, which
        stay where they are, and nothing of vLLM's metadata: none is built then, which would be some 30
        launches.
        """
        dummy = not input_batch.prefill_len_np.any()  # no real request has an empty prompt
        req_states = None if dummy else self._req_states
        is_tree = self.step.begin(input_batch, req_states, self.trees, self._chain_reasons(input_batch))
        self._step_batch = input_batch
        if input_batch.prefill_runs_as_decode_np is not None:
            # vLLM's own metadata must split the batch as we do; this is the field that it consults for that.
            input_batch.prefill_runs_as_decode_np = input_batch.prefill_runs_as_decode_np | (
                is_tree & input_batch.is_prefilling_np
            )
        if cudagraph_mode == CUDAGraphMode.FULL and self.step.all_trees and not for_capture:
            metadata: dict[str, Any] = {
                name: SimpleNamespace() for name in self.attention_layers.keys() | self.gdn_layers.keys()
            }
        else:
            metadata = super().prepare_attn(  # type: ignore[misc]
                input_batch,
                cudagraph_mode,
                block_tables,
                slot_mappings,
                attn_groups,
                kv_cache_config,
                for_capture,
                **kwargs,
            )
        self._captured |= for_capture
        if self._slots is not None:
            self._slots.locate(input_batch.seq_lens, input_batch.num_reqs)
            self._may_cross = self._slots.may_cross(
                input_batch.num_computed_tokens_np[: input_batch.num_reqs][is_tree]
            )
        self._attach(metadata, block_tables, kv_cache_config)
        self._metadata = metadata
        if not dummy:
            self._reset_fresh(input_batch, is_tree)
            self._explain_eager(cudagraph_mode, input_batch)
        return metadata

    def _explain_eager(self, cudagraph_mode: CUDAGraphMode, input_batch: InputBatch) -> None:
        """One warning for each reason why a step made of trees alone does not replay a whole graph."""
        compilation = self.vllm_config.compilation_config  # type: ignore[attr-defined]
        if not self._captured or not self.step.all_trees or cudagraph_mode == CUDAGraphMode.FULL:
            return
        nodes, largest = self.step.budget + 1, compilation.max_cudagraph_capture_size
        if (input_batch.num_scheduled_tokens != nodes).any():
            reason = (
                f"a request came with fewer rows than a tree of {nodes} nodes (new, or near its length limit)"
            )
        elif input_batch.num_reqs * nodes > largest:
            reason = (
                f"{input_batch.num_reqs} trees of {nodes} nodes are more rows than the largest captured size "
                f"({largest}; see --max-cudagraph-capture-size)"
            )
        elif input_batch.is_prefilling_np.any():
            reason = "a prompt of one token is among them, which vLLM runs without its decode graphs"
        else:
            reason = f"vLLM chose {cudagraph_mode.name} for trees of {nodes} nodes"
        logger.warning_once("dflash_tfm: a decode step ran without its CUDA graph: %s", reason)

    def get_additional_cg_support(self) -> tuple[AttentionCGSupport, str | None]:
        """Whole graphs for decode batches only: a captured step takes every request for a tree."""
        return AttentionCGSupport.UNIFORM_BATCH, "tree attention"

    def _attach(
        self, metadata: dict[str, Any], block_tables: tuple[Tensor, ...], kv_cache_config: Any
    ) -> None:
        ours = self.attention_layers.keys() | self.gdn_layers.keys()
        for group, block_table in zip(kv_cache_config.kv_cache_groups, block_tables, strict=True):
            named = ours & set(group.layer_names) & metadata.keys()
            if self._slots is not None and named & self.gdn_layers.keys():
                block_table = self._tables[group.layer_names[0]]
            trees = LayerTrees(self.step, block_table[: self.step.num_reqs])
            for name in named:
                metadata[name].trees = trees

    def _reset_fresh(self, input_batch: InputBatch, is_tree: np.ndarray) -> None:
        # The host's count is exact at 0: nothing of the request was ever scheduled.
        fresh = is_tree & (input_batch.num_computed_tokens_np[: input_batch.num_reqs] == 0)
        if fresh.any() and self.gdn_layers:
            chosen = torch.from_numpy(fresh.nonzero()[0]).to(self.step.device)
            gdn.reset_slots(
                self.gdn_layers.values(), lambda layer: self._trees_of(layer.prefix).state_indices[chosen]
            )

    def _trees_of(self, layer_name: str) -> LayerTrees:
        return layer_trees(self._metadata[layer_name])

    def prepare_inputs(self, input_batch: InputBatch, req_states: RequestState) -> dict[str, Any]:
        """RoPE positions base + depth for tree nodes, in place of the linear ones that slots are computed
        from."""
        inputs = super().prepare_inputs(input_batch, req_states)  # type: ignore[misc]
        if self._step_batch is None or self._step_batch is not input_batch:
            # Memory profiling: no metadata was built, there are no trees.
            return inputs
        positions = inputs.get("positions")
        if positions is None:
            return {**inputs, "positions": self.step.positions()}
        # M-RoPE: three rows that, for generated text, differ from the sequence position by one offset each.
        positions += self.step.shift
        return inputs

    def prepare_dummy_inputs(self, num_reqs: int, num_tokens: int) -> dict[str, Any]:
        """The buffers that `prepare_inputs` fills, for graph capture."""
        inputs = super().prepare_dummy_inputs(num_reqs, num_tokens)  # type: ignore[misc]
        return {"positions": self.step.positions(num_tokens), **inputs}

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig, block_tables: BlockTables) -> None:
        """The caches were bound, perhaps anew: what a commit knows of them is worked out at its next run."""
        super().initialize_kv_cache(kv_cache_config, block_tables)  # type: ignore[misc]
        self._captured = False
        # Not here: this also runs for the small caches of memory profiling, which nothing may keep alive.
        self._kv_plan = self._gdn_plan = self._boundary_plan = None
        tables = list(block_tables.input_block_tables)
        names = [group.layer_names for group in kv_cache_config.kv_cache_groups]
        self._slots = None
        if self.gdn_layers and self.vllm_config.cache_config.mamba_cache_mode == "align":  # type: ignore[attr-defined]
            ids, spec = self._get_mamba_group_info(kv_cache_config)  # type: ignore[attr-defined]
            # Drafts of the step before may be unsettled, unless the scheduler waits for every step's output.
            unsettled = (self.vllm_config.max_concurrent_batches - 1) * self.settings.budget  # type: ignore[attr-defined]
            self._slots = StateSlots(
                [tables[i] for i in ids], spec.block_size, self.settings.depth + 1, unsettled
            )
            for i, working in zip(ids, self._slots.working, strict=True):
                tables[i] = working
            self._boundary_tables = {
                name: table for i, table in zip(ids, self._slots.boundary, strict=True) for name in names[i]
            }
        self._tables = {name: table for group, table in zip(names, tables, strict=True) for name in group}

    def postprocess_state(
        self, idx_mapping: Tensor, num_sampled: Tensor | int, num_computed_tokens: Tensor | None = None
    ) -> None:
        """Commit the accepted paths: K and V, GDN state, convolution state.

        vLLM's own bookkeeping (which of several state slots to resume from) does not run: there is one slot a
        request, and after the commit it is the accepted one.
        """
        step = self.step
        if not step.any_tree:
            return
        if self._kv_plan is None and self.attention_layers:
            self._kv_plan = attention.CommitPlan.build(_pairs(self.attention_layers, self._tables))
        if self._gdn_plan is None and self.gdn_layers:
            self._gdn_plan = gdn.CommitPlan.build(_pairs(self.gdn_layers, self._tables))
            if self._slots is not None:
                self._boundary_plan = gdn.CommitPlan.build(_pairs(self.gdn_layers, self._boundary_tables))
                self._may_cross = True  # so that kernels are compiled in a warm-up, not when a path crosses
        if step.drafts_verified and self._kv_plan is not None:
            attention.commit(self._kv_plan, step)
        if self._slots is not None and self._boundary_plan is not None and self._may_cross:
            # First: it starts from the states before the step, which the commit below replaces.
            self._slots.start_boundaries(step, idx_mapping, self._mamba_ctx)  # type: ignore[attr-defined]
            gdn.commit(self._boundary_plan, step, self._slots.boundary_path[: step.num_reqs])
        if self._gdn_plan is not None:
            gdn.commit(self._gdn_plan, step)


def _pairs(layers: dict[str, Any], tables: dict[str, Tensor]) -> list[tuple[Any, Tensor]]:
    return [(layer, tables[name]) for name, layer in layers.items()]


class TreeHybridModelState(TreeStateMixin, MambaHybridModelState):
    """Trees on a hybrid model (Gated DeltaNet and attention)."""


class TreeDefaultModelState(TreeStateMixin, DefaultModelState):
    """Trees on an attention-only model."""


_TREE_STATES: dict[type[ModelState], type[ModelState]] = {
    MambaHybridModelState: TreeHybridModelState,
    DefaultModelState: TreeDefaultModelState,
}


def tree_state_class(upstream: type[ModelState]) -> type[ModelState]:
    """The tree form of the model state that vLLM chose for a target.

    Raises:
        ValueError: there is none.
    """
    if upstream not in _TREE_STATES:
        supported = ", ".join(sorted(cls.__name__ for cls in _TREE_STATES))
        raise ValueError(
            f"dflash_tfm: the target runs with vLLM's model state {upstream.__name__}, which has no tree "
            f"form (supported: {supported}); serve this model without dflash_tfm."
        )
    return _TREE_STATES[upstream]
