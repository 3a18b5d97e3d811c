# SPDX-License-Identifier: Apache-2.0
"""What a walk through a tree was like: the nodes it could choose from, and where it left the first children.

    nodes = num_nodes - 1;   branched = depth of the first node on the path that has an earlier sibling, or 0

Of any walk (greedy or sampled): it reads only the path that the walk left. Floor: 4·N bytes of parents a
request and 4 bytes a path node, one launch, 8 bytes a request written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_weaver.kernels.common import Impl, expect, expect_dense_last, expect_indices, use_triton

COUNTERS = ("verifies", "accepted", "nonempty_paths", "branching_paths")
"""What is counted over requests with a path: requests, accepted drafts, paths with an accepted draft, and
paths through a node that is not the first child of its parent."""


def record_walks_reference(
    path: Tensor, num_path: Tensor, parents: Tensor, num_nodes: Tensor
) -> tuple[Tensor, Tensor]:
    """The rule of `record_walks` in plain PyTorch: the record, and what to add to the totals."""
    num_slots = path.shape[1]
    index = torch.arange(num_slots, device=path.device)
    on_path = (index > 0) & (index < num_path[:, None])
    node = path.clamp(min=0).long()
    parent = parents.gather(1, node)
    siblings = (parents[:, None, :] == parent[:, :, None]) & (index > 0)
    earlier = (siblings & (index < node[:, :, None])).any(2)
    branched = torch.where(on_path & earlier, index, num_slots).amin(1)
    branched = branched.where(branched < num_slots, 0).to(torch.int32)
    walked = num_path > 0
    accepted = (num_path - 1).clamp(min=0)
    nodes = torch.where(walked, (num_nodes - 1).clamp(min=0), 0)
    totals = torch.stack([walked.sum(), accepted.sum(), (accepted > 0).sum(), (branched > 0).sum()])
    return torch.stack([nodes.to(torch.int32), branched], dim=1), totals


@triton.jit
def _record_walks_kernel(
    path_ptr,  # [R, N]
    num_path_ptr,  # [R]
    parents_ptr,  # [R, N]
    num_nodes_ptr,  # [R]
    record_ptr,  # [R, 2] out
    totals_ptr,  # [4] in, out
    parents_stride,
    N,
    BLOCK: tl.constexpr,  # a power of two >= N
):
    request = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    num_path = tl.load(num_path_ptr + request)
    parents_ptr += request * parents_stride
    parents = tl.load(parents_ptr + index, mask=(index > 0) & (index < N), other=-2)
    branched = tl.full((), 0, tl.int32)
    for depth in range(1, num_path):
        node = tl.load(path_ptr + request * N + depth)
        parent = tl.load(parents_ptr + node)
        first = tl.min(tl.where(parents == parent, index, BLOCK), axis=0)
        branched = tl.where((branched == 0) & (first < node), depth, branched)
    nodes = tl.maximum(tl.load(num_nodes_ptr + request) - 1, 0)
    tl.store(record_ptr + request * 2, tl.where(num_path > 0, nodes, 0))
    tl.store(record_ptr + request * 2 + 1, branched)
    if num_path > 0:
        tl.atomic_add(totals_ptr, 1)
        tl.atomic_add(totals_ptr + 1, num_path - 1)
        tl.atomic_add(totals_ptr + 2, (num_path > 1).to(tl.int32))
        tl.atomic_add(totals_ptr + 3, (branched > 0).to(tl.int32))


def record_walks(
    path: Tensor,
    num_path: Tensor,
    parents: Tensor,
    num_nodes: Tensor,
    totals: Tensor,
    *,
    impl: Impl = "auto",
) -> Tensor:
    """Record int32 [R, 2] of a step's walks: nodes that were proposed (the root not counted; 0 without a
    path), and the depth where the path first branched (0: nowhere). Adds the `COUNTERS` to `totals`
    int64 [4].

    path int32 [R, N] and num_path int32 [R], contiguous, as a walk leaves them (every node below N, its
    ancestors before it); parents int32 [R, N]; num_nodes int32 [R]. `ValueError` for shapes, dtypes or
    devices that do not fit."""
    num_requests, num_slots = path.shape
    device = path.device
    shape = (num_requests, num_slots)
    expect_indices(device, ("path", path, shape), ("num_path", num_path, (num_requests,)))
    expect("parents", parents, shape, device=device, dtypes=(torch.int32,))
    expect_dense_last("parents", parents)
    expect("num_nodes", num_nodes, (num_requests,), device=device, dtypes=(torch.int32,))
    expect("totals", totals, (len(COUNTERS),), device=device, dtypes=(torch.int64,))
    if not use_triton(path, impl):
        record, counts = record_walks_reference(path, num_path, parents, num_nodes)
        totals += counts
        return record
    record = torch.empty(num_requests, 2, dtype=torch.int32, device=device)
    if num_requests:
        _record_walks_kernel[(num_requests,)](
            path, num_path, parents, num_nodes.contiguous(), record, totals, parents.stride(0), num_slots,
            BLOCK=triton.next_power_of_2(num_slots),
            num_warps=1,
        )  # fmt: skip
    return record
