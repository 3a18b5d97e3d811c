# SPDX-License-Identifier: Apache-2.0
"""Full attention over a tree: the implementation objects that the target's attention layers run with.

A layer's KV cache, metadata and backend stay vLLM's. Only the layer's `impl` object is replaced after the
model is loaded, by one of a class derived from what it was: rows that belong to a tree attend to the
committed prefix and to their ancestors, all other rows behave as before.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from vllm_weaver.kernels.kv_compact import KvCompactPlan, kv_compact
from vllm_weaver.kernels.tree_attention import Scale, tree_attention
from vllm_weaver.spec_decode.step import LayerTrees, TreeStep, layer_trees


class TreeAttentionCPU(CPUAttentionBackendImpl):
    """Tree attention on the CPU. vLLM's CPU kernels pack K and V in a layout that depends on the processor,
    so this class owns a plain one in the same memory ([block, kv head, K or V, slot, dim]) and computes every
    row."""

    @staticmethod
    def cache_views(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of a layer's cache as [blocks, block size, kv heads, head dim]."""
        blocks, heads, block_size, width = kv_cache.shape
        plain = kv_cache.view(blocks, heads, 2, block_size, width // 2).permute(2, 0, 3, 1, 4)
        return plain[0], plain[1]

    @classmethod
    def row_views(cls, kv_cache: Tensor) -> tuple[Tensor, ...]:
        """Views [blocks, block size, ...] that together cover a layer's K and V: what a commit moves."""
        return cls.cache_views(kv_cache)

    def do_kv_cache_update(
        self, layer: torch.nn.Module, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write K and V [T, kv heads, dim] to their slots; slots below 0 are padding."""
        rows = min(key.shape[0], slot_mapping.shape[0])
        slots = slot_mapping[:rows].long()
        real = (slots >= 0).nonzero().flatten()
        for cache, new in zip(self.cache_views(kv_cache), (key, value), strict=True):
            block, offset = slots[real] // cache.shape[1], slots[real] % cache.shape[1]
            cache[block, offset] = new[real].to(cache.dtype)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """See `CPUAttentionBackendImpl.forward`; query [T, heads, dim], output [T, heads * dim] or alike."""
        if attn_metadata is None:  # memory profiling
            return output
        trees = layer_trees(attn_metadata)
        _attend(self, trees, query, kv_cache, attn_metadata, output, causal_rows=True)
        return output


@functools.cache
def tree_attention_flash() -> type:
    """The tree form of vLLM's FlashAttention implementation; a function, as it needs a GPU build."""
    from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

    class TreeAttentionFlash(FlashAttentionImpl):
        """Tree attention over the rows that are trees; FlashAttention, as chains, where there are others."""

        def cache_views(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
            """K and V of a layer's cache [blocks, heads, size, 2 * dim] as [blocks, size, heads, dim]."""
            if self.kv_cache_dtype in ("fp8", "fp8_e4m3"):
                kv_cache = kv_cache.view(torch.float8_e4m3fn)  # vLLM keeps quantised caches as bytes
            keys, values = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
            return keys, values

        @staticmethod
        def row_views(kv_cache: Tensor) -> tuple[Tensor, ...]:
            """See `TreeAttentionCPU.row_views`; K and V of a row lie side by side."""
            return (kv_cache.transpose(1, 2),)

        def forward(
            self,
            layer: Any,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            kv_cache: Tensor,
            attn_metadata: Any,
            output: Tensor,
            output_scale: Tensor | None = None,
            output_block_scale: Tensor | None = None,
        ) -> Tensor:
            """See `FlashAttentionImpl.forward`. K and V are in the cache already (`do_kv_cache_update`)."""
            trees = None if attn_metadata is None else layer_trees(attn_metadata)
            if trees is None or not trees.step.all_trees:
                super().forward(
                    layer, query, key, value, kv_cache, attn_metadata, output, output_scale,
                    output_block_scale,
                )  # fmt: skip
            if trees is not None and trees.step.any_tree:
                # Scales stay on the device: a layer's may be filled in after this was captured.
                quantized = kv_cache.element_size() == 1
                _attend(
                    self, trees, query, kv_cache, attn_metadata, output, causal_rows=False,
                    q_scale=layer._q_scale if query.element_size() == 1 else 1.0,
                    k_scale=layer._k_scale if quantized else 1.0,
                    v_scale=layer._v_scale if quantized else 1.0,
                )  # fmt: skip
            return output

    return TreeAttentionFlash


def _attend(
    impl: Any,
    trees: LayerTrees,
    query: Tensor,
    kv_cache: Tensor,
    metadata: Any,
    output: Tensor,
    *,
    causal_rows: bool,
    q_scale: Scale = 1.0,
    k_scale: Scale = 1.0,
    v_scale: Scale = 1.0,
) -> None:
    keys, values = impl.cache_views(kv_cache)
    rows, step = metadata.num_actual_tokens, trees.step
    tree_attention(
        query[:rows],
        keys,
        values,
        trees.block_table,
        step.query_start_loc,
        metadata.seq_lens[: step.num_reqs],
        step.num_nodes,
        step.ancestors,
        scale=impl.scale,
        softcap=impl.logits_soft_cap,
        out=output[:rows].view(query[:rows].shape),
        causal_rows=causal_rows,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
    )


def _refuse_unsupported(name: str, impl: Any) -> None:
    """One sentence for an attention feature whose tree form does not exist."""
    if impl.alibi_slopes is not None:
        what = "ALiBi slopes"
    elif impl.sliding_window not in (-1, None, (-1, -1)):
        what = f"a sliding window ({impl.sliding_window})"
    elif getattr(impl, "sinks", None) is not None:
        what = "attention sinks"
    else:
        return
    raise ValueError(
        f"dflash_tfm: the target's layer {name} uses {what}, for which there is no tree attention; "
        "serve this model without dflash_tfm."
    )


def install(layers: dict[str, Any]) -> None:
    """Replace the `impl` of the target's attention layers by its tree form.

    Raises:
        ValueError: a layer uses a feature or an attention backend without a tree form.
    """
    for name, layer in layers.items():
        if type(layer.impl) is CPUAttentionBackendImpl:
            tree_class: type = TreeAttentionCPU
        elif layer.attn_backend.get_name() == "FLASH_ATTN":
            tree_class = tree_attention_flash()
        else:
            raise ValueError(
                f"dflash_tfm: the target's layer {name} runs on attention backend "
                f"{layer.attn_backend.get_name()}, which has no tree attention; use --attention-backend "
                "FLASH_ATTN (on a CPU: CPU_ATTN, the only one there)."
            )
        _refuse_unsupported(name, layer.impl)
        impl = copy.copy(layer.impl)
        impl.__class__ = tree_class
        layer.impl = impl


@dataclass(frozen=True)
class CommitPlan:
    """The KV caches of all layers and their groups' block tables: one part for every cache layout."""

    parts: tuple[KvCompactPlan, ...]

    @classmethod
    def build(cls, layers: Iterable[tuple[Any, Tensor]]) -> CommitPlan:
        """The plan of these (attention layer, its group's block table int32 [max requests, blocks]) pairs.

        Made once, after the KV caches are bound. The tables must stay where they are, and hold the batch's
        rows, in batch order, whenever the plan is used (in vLLM: `BlockTables.input_block_tables`).
        """
        layouts: dict[Any, list[tuple[Tensor, Tensor]]] = {}
        for layer, block_table in layers:
            for view in layer.impl.row_views(layer.kv_cache):
                layout = (view.shape, view.stride(), view.dtype, view.device)
                layouts.setdefault(layout, []).append((view, block_table))
        return cls(tuple(KvCompactPlan.build(*zip(*part, strict=True)) for part in layouts.values()))


def commit(plan: CommitPlan, step: TreeStep) -> None:
    """Move K and V of the accepted nodes to the slots after the committed prefix, in every layer."""
    for part in plan.parts:
        kv_compact(part, step.base, step.path, step.num_path, num_nodes=step.num_nodes)
