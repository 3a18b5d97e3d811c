# SPDX-License-Identifier: Apache-2.0
"""How the commit kernels read an accepted path, so that KV, convolution and GDN state agree on its length.

A path row holds node indices, root first, padded with -1. What may be committed is its longest prefix that
starts at node 0, is strictly ascending (nodes are in topological order) and stays below the number of valid
nodes; the first entry that breaks a rule ends the path there, whatever `num_path` says. A path of length 0
commits nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def path_lengths(path: Tensor, num_path: Tensor, num_nodes: Tensor) -> Tensor:
    """Usable length int64 [R] of every row of path int32 [R, N], with num_path and num_nodes int32 [R]."""
    before = torch.nn.functional.pad(path[:, :-1], (1, 0), value=-1)
    good = (path > before) & (path < num_nodes[:, None])
    good[:, 0] &= path[:, 0] == 0
    good &= torch.arange(path.shape[1], device=path.device) < num_path[:, None]
    return good.to(torch.int64).cumprod(1).sum(1)


@triton.jit
def load_path_length(
    path_ptr,  # [N] this request's row
    num_path,
    num_nodes,
    N,
    BLOCK: tl.constexpr,  # a power of two >= N
):
    """`path_lengths` of one row."""
    at = tl.arange(0, BLOCK)
    node = tl.load(path_ptr + at, mask=at < N, other=-1)
    before = tl.load(path_ptr + at - 1, mask=(at > 0) & (at < N), other=-1)
    good = (node > before) & (node < num_nodes) & (at < num_path) & ((at > 0) | (node == 0))
    return tl.min(tl.where(good, BLOCK, at), axis=0)
