# SPDX-License-Identifier: Apache-2.0
"""Between the steps of an engine: drafted trees out to per-request storage, and back in as rows of a step.

`store_trees` writes a batch's trees under their request state indices and their nodes where the scheduler
looks for drafts; of a request that needs a chain it keeps the first children from the root on. `fill_step`
reads them back in the order of the next batch. For batch row r with state index s, b computed tokens and
`limit` rows that may be nodes:

    num_nodes = min(max(stored nodes, 1), limit)        (limit 0: r is no tree; inside a prefill: at most 1)
    path = the root alone                               (until a walk ran)
    row of node i:  position = b + depth_i,  shift = position - linear position,  input id = token_i  (i > 0)

Rows past num_nodes of a tree request stand at the root's depth and carry id 0; rows of other requests are
left as they are. Ancestor masks are those of `ancestors.py`. Everything goes into buffers at fixed addresses,
which a replayed CUDA graph reads.

Floor: 20·N bytes a request read and 20·N + 4·N·ceil(N / 32) written, 24 bytes a row; one launch each way,
nothing else is materialised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_weaver.kernels.ancestors import (
    ancestor_mask_words,
    climb_ancestors,
    count_usable_nodes,
    load_usable_count,
    num_mask_words,
)
from vllm_weaver.kernels.common import Impl, expect, expect_indices, use_triton

_INT = (torch.int32,)
_LONG = (torch.int64,)
_ANY_INT = (torch.int32, torch.int64)


@dataclass(frozen=True)
class StepArrays:
    """What a step knows of its trees, batch row by batch row; R requests, N node slots.

    tokens int64, parents int32, depths int32 [R, N]; num_nodes int32 [R]; ancestors int32 [R, N, ceil(N/32)];
    base int64 [R]; path int32 [R, N]; num_path int32 [R]. All contiguous.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    num_nodes: Tensor
    ancestors: Tensor
    base: Tensor
    path: Tensor
    num_path: Tensor

    @classmethod
    def allocate(cls, num_reqs: int, num_slots: int, device: torch.device) -> StepArrays:
        """Zero-filled arrays: no request is a tree."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        nodes = (num_reqs, num_slots)
        return cls(
            tokens=zeros(*nodes, dtype=torch.int64),
            parents=zeros(*nodes),
            depths=zeros(*nodes),
            num_nodes=zeros(num_reqs),
            ancestors=zeros(*nodes, num_mask_words(num_slots)),
            base=zeros(num_reqs, dtype=torch.int64),
            path=zeros(*nodes),
            num_path=zeros(num_reqs),
        )

    def first(self, num_reqs: int) -> StepArrays:
        """Views of the first `num_reqs` requests."""
        return StepArrays(**{name: array[:num_reqs] for name, array in vars(self).items()})


def fill_step_reference(
    step: StepArrays,
    stored: tuple[Tensor, Tensor, Tensor, Tensor],
    idx_mapping: Tensor,
    limits: Tensor,
    query_start_loc: Tensor,
    num_computed: Tensor,
    prefill_len: Tensor,
    positions: Tensor,
    shift: Tensor,
    input_ids: Tensor,
) -> None:
    """`fill_step` in plain PyTorch."""
    padded, slots = step.tokens.shape
    state = torch.nn.functional.pad(idx_mapping.long(), (0, padded - len(idx_mapping)), value=-1)
    known = (state >= 0) & (state < min(len(stored[3]), len(num_computed)))
    state, limits = state.where(known, 0), limits.where(known, 0)
    tokens, parents, depths, num_nodes = (array[state] for array in stored)
    step.base.copy_(torch.where(limits > 0, num_computed[state], 0))
    inside_prefill = step.base < prefill_len[state]
    limit = torch.where(inside_prefill, limits.clamp(max=1), limits)
    step.num_nodes.copy_(torch.minimum(num_nodes.clamp(min=1), limit))
    index = torch.arange(slots, device=tokens.device)
    valid = index < step.num_nodes[:, None]
    step.tokens.copy_(tokens.masked_fill(~valid, -1))
    step.parents.copy_(parents.masked_fill(~valid, -1))
    step.depths.copy_(depths.masked_fill(~valid, 0))
    step.ancestors.copy_(ancestor_mask_words(step.parents, step.num_nodes, impl="torch"))
    step.num_path.copy_(step.num_nodes.clamp(max=1))
    step.path.fill_(-1)
    step.path[:, 0] = step.num_path - 1

    starts = query_start_loc.tolist()
    for r, nodes in enumerate(step.num_nodes.tolist()):
        if nodes == 0:
            continue
        rows = slice(starts[r], min(starts[r + 1], starts[r] + slots))
        count = rows.stop - rows.start
        position = step.base[r] + step.depths[r, :count]
        shift[rows] = position - positions[rows]
        positions[rows] = position
        drafted = step.tokens[r, :count].clamp(min=0).to(input_ids.dtype)
        input_ids[rows] = torch.where(index[:count] > 0, drafted, input_ids[rows])


@triton.jit
def _fill_step_kernel(
    stored_tokens_ptr,  # [S, N]
    stored_parents_ptr,  # [S, N]
    stored_depths_ptr,  # [S, N]
    stored_num_nodes_ptr,  # [S]
    idx_mapping_ptr,  # [num_reqs]
    limits_ptr,  # [R]
    query_start_loc_ptr,  # [R + 1]
    num_computed_ptr,  # [>= max state index + 1]
    prefill_len_ptr,  # [>= max state index + 1]
    positions_ptr,  # [T]
    shift_ptr,  # [T]
    input_ids_ptr,  # [T]
    tokens_ptr,  # [R, N] out
    parents_ptr,  # [R, N] out
    depths_ptr,  # [R, N] out
    num_nodes_ptr,  # [R] out
    ancestors_ptr,  # [R, N, W] out
    base_ptr,  # [R] out
    path_ptr,  # [R, N] out
    num_path_ptr,  # [R] out
    num_reqs,
    num_states,
    N,
    W,
    BLOCK: tl.constexpr,  # a power of two >= N
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,  # a power of two >= W
):
    request = tl.program_id(0).to(tl.int64)
    limit = tl.load(limits_ptr + request)
    state = tl.load(idx_mapping_ptr + tl.minimum(request, num_reqs - 1)).to(tl.int64)
    limit = tl.where((request < num_reqs) & (state >= 0) & (state < num_states), limit, 0)
    state = tl.where(limit > 0, state, 0)
    base = tl.load(num_computed_ptr + state).to(tl.int64)
    base = tl.where(limit > 0, base, 0)
    inside_prefill = base < tl.load(prefill_len_ptr + state).to(tl.int64)
    limit = tl.where(inside_prefill, tl.minimum(limit, 1), limit)
    nodes = tl.minimum(tl.maximum(tl.load(stored_num_nodes_ptr + state), 1), limit)
    num_path = tl.minimum(nodes, 1)

    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    valid = row < nodes
    stored = state * N + row
    token = tl.load(stored_tokens_ptr + stored, mask=valid, other=-1)
    parent = tl.load(stored_parents_ptr + stored, mask=valid, other=-1)
    depth = tl.load(stored_depths_ptr + stored, mask=valid, other=0)
    out = request * N + row
    inside = row < N
    tl.store(tokens_ptr + out, token, mask=inside)
    tl.store(parents_ptr + out, parent, mask=inside)
    tl.store(depths_ptr + out, depth, mask=inside)
    tl.store(path_ptr + out, tl.where(row == 0, num_path - 1, -1), mask=inside)
    words = climb_ancestors(stored_parents_ptr + state * N, nodes, row, N, BLOCK, ROWS, WORDS)
    word = tl.arange(0, WORDS)
    tl.store(
        ancestors_ptr + out[:, None] * W + word[None, :], words, mask=inside[:, None] & (word < W)[None, :]
    )
    if tl.program_id(1) == 0:
        tl.store(num_nodes_ptr + request, nodes)
        tl.store(base_ptr + request, base)
        tl.store(num_path_ptr + request, num_path)

    first = tl.load(query_start_loc_ptr + request)
    count = tl.load(query_start_loc_ptr + request + 1) - first
    mine = inside & (row < tl.where(nodes > 0, count, 0))
    at = first.to(tl.int64) + row
    position = base + depth
    linear = tl.load(positions_ptr + at, mask=mine, other=0)
    tl.store(shift_ptr + at, position - linear, mask=mine)
    tl.store(positions_ptr + at, position, mask=mine)
    drafted = tl.maximum(token, 0).to(input_ids_ptr.dtype.element_ty)
    tl.store(input_ids_ptr + at, drafted, mask=mine & (row > 0))


def fill_step(
    step: StepArrays,
    stored: tuple[Tensor, Tensor, Tensor, Tensor],
    idx_mapping: Tensor,
    limits: Tensor,
    query_start_loc: Tensor,
    num_computed: Tensor,
    prefill_len: Tensor,
    positions: Tensor,
    shift: Tensor,
    input_ids: Tensor,
    *,
    impl: Impl = "auto",
) -> None:
    """Fills `step` (R requests, padding ones included) and the rows of its trees, in place.

    stored: tokens int64, parents int32, depths int32 [S, N] and num_nodes int32 [S], by request state index;
    idx_mapping [<= R] state index of each real request (one outside [0, S): no tree); limits int32 [R];
    query_start_loc int32 [R + 1]; num_computed and prefill_len [>= S - 1], by state index; positions int64
    [T], linear on entry; shift int64 [T]; input_ids [T], whose placeholders and cut-off drafts become 0.
    `ValueError` for shapes, dtypes or devices that do not fit.
    """
    requests, slots = step.tokens.shape
    device = step.tokens.device
    states = len(stored[3])
    for name, array, dtypes in zip(
        ("tokens", "parents", "depths"), stored[:3], (_LONG, _INT, _INT), strict=True
    ):
        expect(f"stored {name}", array, (states, slots), device=device, dtypes=dtypes)
    expect("stored num_nodes", stored[3], (states,), device=device, dtypes=_INT)
    expect("idx_mapping", idx_mapping, (None,), device=device, dtypes=_ANY_INT)
    expect("limits", limits, (requests,), device=device, dtypes=_INT)
    expect("query_start_loc", query_start_loc, (requests + 1,), device=device, dtypes=_INT)
    expect("num_computed", num_computed, (None,), device=device, dtypes=_ANY_INT)
    expect("prefill_len", prefill_len, (len(num_computed),), device=device, dtypes=_ANY_INT)
    expect("positions", positions, (None,), device=device, dtypes=_LONG)
    expect("shift", shift, (len(positions),), device=device, dtypes=_LONG)
    expect("input_ids", input_ids, (None,), device=device, dtypes=_ANY_INT)
    if not 1 <= len(idx_mapping) <= requests:
        raise ValueError(f"idx_mapping has {len(idx_mapping)} requests; it must have 1 to {requests}")
    if not use_triton(step.tokens, impl):
        fill_step_reference(
            step, stored, idx_mapping, limits, query_start_loc, num_computed, prefill_len,
            positions, shift, input_ids,
        )  # fmt: skip
        return
    rows = 32
    _fill_step_kernel[(requests, triton.cdiv(slots, rows))](
        *stored, idx_mapping, limits, query_start_loc, num_computed, prefill_len, positions, shift, input_ids,
        step.tokens, step.parents, step.depths, step.num_nodes, step.ancestors, step.base, step.path,
        step.num_path, len(idx_mapping), min(states, len(num_computed)), slots, num_mask_words(slots),
        BLOCK=triton.next_power_of_2(slots),
        ROWS=rows,
        WORDS=triton.next_power_of_2(num_mask_words(slots)),
        num_warps=1,
    )  # fmt: skip


PARENT_SHIFT = 32


def unpack_drafts(drafts: Sequence[int]) -> tuple[list[int], list[int]]:
    """Tokens and parents of the nodes 1, 2, ... that vLLM's draft tokens stand for, up to the first -1.

    vLLM takes a draft for a token and shows it to its scheduler, which has to know the tree for the masks of
    a grammar: the parent's index stands above bit 32. Where vLLM's worker copies drafts into its int32 input
    ids, the token alone is left, and `fill_step` writes the ids of a tree's rows anew.
    """
    end = next((index for index, draft in enumerate(drafts) if draft < 0), len(drafts))
    mask = (1 << PARENT_SHIFT) - 1
    return [draft & mask for draft in drafts[:end]], [draft >> PARENT_SHIFT for draft in drafts[:end]]


@triton.jit
def _store_trees_kernel(
    tokens_ptr,  # [R, N]
    parents_ptr,  # [R, N]
    depths_ptr,  # [R, N]
    logprobs_ptr,  # [R, N]
    num_nodes_ptr,  # [R]
    rows_ptr,  # [R * rows_stride]
    chain_only_ptr,  # [R]
    stored_tokens_ptr,  # [S, N] out
    stored_parents_ptr,  # [S, N] out
    stored_depths_ptr,  # [S, N] out
    stored_logprobs_ptr,  # [S, N] out
    stored_num_nodes_ptr,  # [S] out
    drafts_ptr,  # [R, N - 1] out
    rows_stride,
    drafts_stride,
    num_states,
    N,
    PARENT_SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,  # a power of two >= N
):
    request = tl.program_id(0).to(tl.int64)
    state = tl.load(rows_ptr + request * rows_stride).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < N
    parents_ptr += request * N
    nodes = load_usable_count(parents_ptr, tl.load(num_nodes_ptr + request), N, BLOCK)
    parent = tl.load(parents_ptr + at, mask=inside, other=-1)
    node = tl.where(at < nodes, at, -1)
    if tl.load(chain_only_ptr + request) != 0:
        node = tl.where(at == 0, tl.minimum(nodes, 1) - 1, -1)
        current = tl.minimum(nodes, 1) - 1
        length = tl.minimum(nodes, 1)
        while current >= 0:
            child = tl.min(tl.where((parent == current) & (at > 0) & (at < nodes), at, BLOCK), axis=0)
            current = tl.where(child < BLOCK, child, -1)
            node = tl.where((at == length) & (current >= 0), current, node)
            length += (current >= 0).to(tl.int32)
        nodes = length
        parent = at - 1
    source = request * N + tl.maximum(node, 0)
    valid = inside & (node >= 0)
    token = tl.load(tokens_ptr + source, mask=valid, other=-1)
    draft = tl.where(valid, (parent.to(tl.int64) << PARENT_SHIFT) | token, -1)
    tl.store(drafts_ptr + request * drafts_stride + at - 1, draft, mask=inside & (at > 0))
    if (state >= 0) & (state < num_states):
        target = state * N + at
        depth = tl.load(depths_ptr + source, mask=valid, other=0)
        logprob = tl.load(logprobs_ptr + source, mask=valid, other=float("-inf"))
        tl.store(stored_tokens_ptr + target, token, mask=inside)
        tl.store(stored_parents_ptr + target, tl.where(valid, parent, -1), mask=inside)
        tl.store(stored_depths_ptr + target, depth, mask=inside)
        tl.store(stored_logprobs_ptr + target, logprob, mask=inside)
        tl.store(stored_num_nodes_ptr + state, nodes)


def store_trees_reference(
    tree: tuple[Tensor, ...], stored: tuple[Tensor, ...], rows: Tensor, drafts: Tensor, chain_only: Tensor
) -> None:
    """`store_trees` in plain PyTorch, a loop over the requests that want a chain."""
    tokens, parents, depths, logprobs, num_nodes = (array.clone() for array in tree)
    num_nodes = count_usable_nodes(parents, num_nodes)
    for r in chain_only.nonzero().flatten().tolist():
        above = parents[r, : int(num_nodes[r])].tolist()
        path = [0] if above else []
        while path and path[-1] in above[1:]:
            path.append(above.index(path[-1], 1))
        count = len(path)
        for array in (tokens, depths, logprobs):
            array[r, :count] = array[r, path].clone()
        parents[r, :count] = torch.arange(-1, count - 1, dtype=parents.dtype)
        num_nodes[r] = count
    beyond = torch.arange(tokens.shape[1], device=tokens.device) >= num_nodes[:, None]
    empty = zip((tokens, parents, depths, logprobs), (-1, -1, 0, float("-inf")), strict=True)
    arrays = [array.masked_fill(beyond, value) for array, value in empty]
    packed = arrays[0] | arrays[1].long() << PARENT_SHIFT
    drafts.copy_(packed.masked_fill(beyond, -1)[:, 1:])
    known = (rows >= 0) & (rows < len(stored[-1]))
    for source, target in zip((*arrays, num_nodes), stored, strict=True):
        target[rows[known].long()] = source[known]


def store_trees(
    tree: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    stored: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    rows: Tensor,
    drafts: Tensor,
    chain_only: Tensor,
    *,
    impl: Impl = "auto",
) -> None:
    """Stores a batch's trees under the state indices `rows`, and their nodes as `drafts` (`unpack_drafts`).

    tree: tokens int64, parents int32, depths int32, logprobs fp32 [R, N] and num_nodes int32 [R]; stored: the
    same of S states; rows int64 [R], any stride, distinct where they lie in [0, S): trees of other rows are
    kept nowhere; drafts int64 [R, N - 1], -1 past the last node; chain_only int32 [R]: where it is not 0,
    only the chain of first children from the root is left of the tree. `ValueError` for shapes, dtypes or
    devices that do not fit.
    """
    requests, slots = tree[0].shape
    device = tree[0].device
    dtypes = (torch.int64, torch.int32, torch.int32, torch.float32, torch.int32)
    for which, arrays, count in (("tree", tree, requests), ("stored", stored, len(stored[4]))):
        for index, (array, dtype) in enumerate(zip(arrays, dtypes, strict=True)):
            shape = (count,) if index == 4 else (count, slots)
            expect(f"{which}[{index}]", array, shape, device=device, dtypes=(dtype,))
            if not array.is_contiguous():
                raise ValueError(f"{which}[{index}] has strides {array.stride()}; it must be contiguous")
    expect("rows", rows, (requests,), device=device, dtypes=_LONG)
    expect("drafts", drafts, (requests, slots - 1), device=device, dtypes=_LONG)
    expect_indices(device, ("chain_only", chain_only, (requests,)))
    if not use_triton(tree[0], impl):
        store_trees_reference(tree, stored, rows, drafts, chain_only)
        return
    _store_trees_kernel[(requests,)](
        *tree, rows, chain_only, *stored, drafts, rows.stride(0), drafts.stride(0), len(stored[4]), slots,
        PARENT_SHIFT=PARENT_SHIFT,
        BLOCK=triton.next_power_of_2(slots),
        num_warps=1,
    )  # fmt: skip
