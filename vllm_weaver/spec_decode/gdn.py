# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet layers over a tree: the layer's core in a verify step, and the commit of its state.

Tree rows go through `kernels.gdn_tree`, convolution included, which only reads the committed states and
leaves what a commit needs in the layer's stash; all other rows (prefill chunks) go through vLLM's own code,
unchanged. After the walk `commit` moves the states of all layers along the accepted path. One state slot a
request, whatever the budget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vllm_weaver.kernels.gdn_buffers import GdnScratch, GdnShape, GdnStash, LayerTable, StateLayout
from vllm_weaver.kernels.gdn_commit import gdn_tree_commit
from vllm_weaver.kernels.gdn_tree import gdn_tree_verify
from vllm_weaver.kernels.tree_conv import tree_conv_commit
from vllm_weaver.spec_decode.step import LayerTrees, TreeStep, layer_trees

if TYPE_CHECKING:
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata


@dataclass(frozen=True)
class LayerBuffers:
    """A layer's place in the buffers: its `index` in the `stashes` of all layers, and the shared scratch."""

    index: int
    stashes: GdnStash
    stash: GdnStash
    scratch: GdnScratch | None


def _shape(layer: Any) -> GdnShape:
    return GdnShape(
        layer.num_k_heads // layer.tp_size,
        layer.head_k_dim,
        layer.num_v_heads // layer.tp_size,
        layer.head_v_dim,
    )


def install(
    layers: Sequence[Any], max_rows: int, max_nodes: int, device: torch.device, dtype: torch.dtype
) -> None:
    """Prepare the target's recurrent layers for trees: stash, scratch, one state slot of the plain width.

    Args:
        layers: all of them.
        max_rows: packed rows that a step's trees may take. max_nodes: nodes of a tree.

    Raises:
        ValueError: a layer is of a kind without a tree form, or they differ in heads or dimensions.
    """
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention

    for layer in layers:
        if not isinstance(layer, QwenGatedDeltaNetAttention):
            raise ValueError(
                f"dflash_tfm: the target's layer {layer.prefix} is a {type(layer).__name__}, which has no "
                "tree form (supported: QwenGatedDeltaNetAttention); serve this model without dflash_tfm."
            )
        if _shape(layer) != _shape(layers[0]):
            raise ValueError(
                f"dflash_tfm: the target's layers {layer.prefix} and {layers[0].prefix} differ in heads or "
                "dimensions, which has no tree form; serve this model without dflash_tfm."
            )
        # vLLM widens the convolution state by the number of drafts; the commit needs no such room.
        layer.num_spec = 0
        # Its fused kernel is for chains: the first switch keeps the model off the op that may call it, the
        # second keeps that op off the kernel where a compiled model from a cache calls the op nevertheless.
        layer.enable_fused_gdn_spec_decode = False
        if layer.gdn_decode_kernel == "cuda":
            layer.gdn_decode_kernel = "triton"
    if not layers:
        return
    shape, scratch = _shape(layers[0]), None
    stashes = GdnStash.allocate(len(layers), max_rows, shape, device=device, dtype=dtype)
    if device.type == "cuda":  # the references need none
        scratch = GdnScratch.allocate(max_rows, max_nodes, shape, device=device, dtype=dtype)
    for i, layer in enumerate(layers):
        layer.tree_stash = LayerBuffers(i, stashes, stashes.layer(i), scratch)


def stash_bytes(layers: Sequence[Any], max_rows: int, dtype: torch.dtype) -> int:
    """Bytes of the stash that `install` allocates."""
    return GdnStash.nbytes(len(layers), max_rows, _shape(layers[0]), dtype) if layers else 0


def _state_layout(layer: Any) -> StateLayout:
    # vLLM's CPU kernels read the [slot, HV, V, K] allocation as [slot, HV, K, V]; its CUDA kernels do not.
    return "kv" if layer.kv_cache[1].device.type == "cpu" else "vk"


def _recurrent_state(layer: Any) -> Tensor:
    state = layer.kv_cache[1]
    if _state_layout(layer) == "kv":
        slots, heads, v_dim, k_dim = state.shape
        return state.view(slots, heads, k_dim, v_dim)
    return state


def _conv_state(layer: Any) -> Tensor:
    """The convolution state as [slots, C, width - 1]."""
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    state = layer.kv_cache[0]
    return state if is_conv_state_dim_first() else state.transpose(-1, -2)


def _conv_weight(layer: Any) -> Tensor:
    """The convolution weight as [C, width]; vLLM's CPU path packs the parameter and keeps a plain copy beside
    it."""
    weight = getattr(layer.conv1d, "_cpu_unpacked_conv_weight", None)
    if weight is None:
        weight = layer.conv1d.weight
    return weight.view(weight.size(0), -1)


def _write_gate(b: Tensor) -> Tensor:
    """Gate logits whose sigmoid is the beta that the platform's own decode kernel would use.

    vLLM's CPU decode kernel evaluates 1 / (1 + exp(-b)) in the dtype of b, rounding after every operation: up
    to 0.4 % from the exact value. Exact gates here would be better numbers and another text than plain
    decoding's.
    """
    if b.device.type != "cpu":
        return b
    rounded = (1 + (-b.float()).exp().to(b.dtype).float()).to(b.dtype)
    return (1 / rounded.float()).to(b.dtype).float().logit()


def verify(layer: Any, trees: LayerTrees, mixed_qkv: Tensor, b: Tensor, a: Tensor, out: Tensor) -> None:
    """The layer's core for the tree rows of a step. Committed state is read only.

    Args:
        layer: a `QwenGatedDeltaNetAttention` with a `tree_stash`.
        trees: the step and the layer's state slots.
        mixed_qkv: [T, C] projected q, k, v. b, a: [T, HV] gates. out: [T, HV, V], tree rows are written.
    """
    step, buffers = trees.step, layer.tree_stash
    rows = step.num_rows
    gdn_tree_verify(
        mixed_qkv[:rows],
        _conv_weight(layer),
        layer.conv1d.bias,
        _conv_state(layer),
        a[:rows],
        _write_gate(b[:rows]),
        layer.A_log,
        layer.dt_bias,
        _recurrent_state(layer),
        trees.state_indices,
        step.query_start_loc,
        step.num_nodes,
        step.parents,
        step.ancestors,
        activation=layer.activation,
        out=out[:rows],
        stash=buffers.stash,
        scratch=buffers.scratch,
        state_layout=_state_layout(layer),
    )


@dataclass(frozen=True)
class CommitPlan:
    """What the commit needs to know of all layers, worked out once: where their states and slots lie."""

    stashes: GdnStash
    conv: LayerTable
    recurrent: LayerTable
    width: int
    state_layout: StateLayout

    @classmethod
    def build(cls, layers: Iterable[tuple[Any, Tensor]]) -> CommitPlan:
        """The plan of these (layer, its group's block table int32 [max requests, blocks]) pairs: all layers
        that `install` got, in any order.

        Made once, after the KV caches are bound. The tables must stay where they are, and hold the batch's
        rows, in batch order, whenever the plan is used (in vLLM: `BlockTables.input_block_tables`).
        """
        pairs = sorted(layers, key=lambda pair: pair[0].tree_stash.index)
        first, slots = pairs[0][0], [table[:, 0] for _, table in pairs]
        return cls(
            first.tree_stash.stashes,
            LayerTable.build([_conv_state(layer) for layer, _ in pairs], slots),
            LayerTable.build([_recurrent_state(layer) for layer, _ in pairs], slots),
            _conv_weight(first).shape[1],
            _state_layout(first),
        )


def commit(plan: CommitPlan, step: TreeStep, num_path: Tensor | None = None) -> None:
    """Move every layer's convolution and recurrent state along each request's accepted path, to its leaf or
    over its first `num_path` nodes (int32 [R], at most the path's)."""
    path = (step.query_start_loc, step.path, step.num_path if num_path is None else num_path)
    tree_conv_commit(plan.stashes.inputs, plan.conv, *path, plan.width, num_nodes=step.num_nodes)
    gdn_tree_commit(
        plan.stashes, plan.recurrent, *path, num_nodes=step.num_nodes, state_layout=plan.state_layout
    )


def reset_slots(layers: Iterable[Any], slots: Callable[[Any], Tensor]) -> None:
    """Zero the convolution and recurrent state in each layer's `slots` (int [n]).

    For requests that start in this step as trees (prompts of one token): a reused slot holds its last owner's
    state; vLLM's prefill kernels are told to ignore it, tree kernels read it.
    """
    for layer in layers:
        chosen = slots(layer).long()
        _recurrent_state(layer)[chosen] = 0
        _conv_state(layer)[chosen] = 0


def non_tree_metadata(metadata: GDNAttentionMetadata) -> GDNAttentionMetadata:
    """The metadata of a mixed step reduced to its rows that are no trees, renumbered from 0.

    vLLM builds a mixed step's `non_spec_*` and `prefill_*` fields for exactly these rows, so only the
    switches that mark the step as speculative are cleared.
    """
    return replace(
        metadata,
        num_spec_decodes=0,
        num_spec_decode_tokens=0,
        num_actual_tokens=metadata.num_prefill_tokens + metadata.num_decode_tokens,
        spec_query_start_loc=None,
        spec_state_indices_tensor=None,
        spec_sequence_masks=None,
        spec_sequence_masks_cpu=None,
        spec_token_indx=None,
        non_spec_token_indx=None,
        num_accepted_tokens=None,
    )


def forward_core_cpu(
    upstream: Callable[..., None],
    layer: Any,
    metadata: GDNAttentionMetadata,
    mixed_qkv: Tensor,
    b: Tensor,
    a: Tensor,
    out: Tensor,
) -> None:
    """The CPU op's core: `upstream` is vLLM's function for steps without speculative rows."""
    if metadata.spec_sequence_masks is None:
        upstream(layer, metadata, mixed_qkv, b, a, out)
        return

    def run_upstream(part: GDNAttentionMetadata, *tensors: Tensor) -> None:
        upstream(layer, part, *tensors)

    _forward_mixed(run_upstream, layer, metadata, mixed_qkv, b, a, out)


def forward_core_cuda(
    upstream: Callable[..., None], layer: Any, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor
) -> None:
    """The CUDA op's core: `upstream` is vLLM's method, which takes its metadata from the forward context."""
    from vllm.forward_context import get_forward_context

    context = get_forward_context()
    every = context.attn_metadata
    metadata = every.get(layer.prefix) if isinstance(every, dict) else None
    if metadata is None or metadata.spec_sequence_masks is None:
        upstream(layer, mixed_qkv, b, a, core_attn_out)
        return

    def run_upstream(part: GDNAttentionMetadata, *tensors: Tensor) -> None:
        context.attn_metadata = {**every, layer.prefix: part}
        try:
            upstream(layer, *tensors)
        finally:
            context.attn_metadata = every

    _forward_mixed(run_upstream, layer, metadata, mixed_qkv, b, a, core_attn_out)


def _forward_mixed(
    upstream: Callable[..., None],
    layer: Any,
    metadata: GDNAttentionMetadata,
    mixed_qkv: Tensor,
    b: Tensor,
    a: Tensor,
    out: Tensor,
) -> None:
    """Tree rows by `verify`, the others packed together by `upstream(metadata, mixed_qkv, b, a, out)`."""
    verify(layer, layer_trees(metadata), mixed_qkv, b, a, out)
    if metadata.num_prefill_tokens + metadata.num_decode_tokens:
        index = metadata.non_spec_token_indx
        assert index is not None  # vLLM sets it whenever a step mixes both kinds of rows
        part = torch.zeros(index.numel(), *out.shape[1:], dtype=out.dtype, device=out.device)
        upstream(non_tree_metadata(metadata), mixed_qkv[index], b[index], a[index], part)
        out[index] = part
