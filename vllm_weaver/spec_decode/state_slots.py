# SPDX-License-Identifier: Apache-2.0
"""Which block of a request holds its recurrent state, and which one a prefix cache keeps.

Without prefix caching a request has one state block, column 0 of its group's block table. In mamba cache mode
`align` the table is by position: block c keeps the state after (c + 1) * block_size tokens for the cache, and
a step works in the block that the end of its rows falls into, drafts included; vLLM moves the state there
before the forward pass. A step that starts with b tokens and commits p of them therefore leaves

    in the working block    the state after b + p tokens,
    in block a/size - 1     the state after a = size * floor((b + p) / size) tokens, if a > b

The second one is a *boundary*; without drafts it is always the working block itself. vLLM's own way to fill
it takes the state of every draft position from memory; here it is a second commit, along the path's first
a - b nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from vllm.v1.worker.mamba_utils import MambaSpecDecodeGPUContext

    from vllm_weaver.spec_decode.step import TreeStep


class StateSlots:
    """The state slots of a batch in mode `align`, in buffers that a replayed CUDA graph may know.

    G groups of recurrent layers. Attributes:
        working: G tensors int32 [max requests, 1], each request's working block in batch order; 0, the null
        block, for padding.
        boundary: the same for boundaries; 0 where the step has none to fill.
        boundary_path int32 [max requests]: path nodes up to the boundary; 0 where there is none to fill.
    """

    def __init__(
        self,
        tables: Sequence[Tensor],
        block_size: int,
        longest_path: int,
        device: torch.device,
    ) -> None:
        """Buffers for the block tables int32 [max requests, columns] of the groups, rows in batch order.

        Raises:
            ValueError: a path of `longest_path` nodes may cross two boundaries.
        """
        if block_size < longest_path:
            raise ValueError(
                f"dflash_tfm: mamba cache mode 'align' with blocks of {block_size} tokens cannot keep the "
                f"states within an accepted path of up to {longest_path}; set --block-size to at least "
                f"{longest_path} or use --no-enable-prefix-caching."
            )
        self.block_size = block_size
        self._tables = list(tables)
        requests = tables[0].shape[0]

        def buffers() -> list[Tensor]:
            return [torch.zeros(requests, 1, dtype=torch.int32, device=device) for _ in tables]

        self.working, self.boundary = buffers(), buffers()
        self.boundary_path = torch.zeros(requests, dtype=torch.int32, device=device)
        self._columns = torch.zeros(requests, dtype=torch.int64, device=device)
        # By request state index, as vLLM's copy kernel reads them.
        self._source = torch.full((requests,), -1, dtype=torch.int32, device=device)
        self._target = torch.zeros(requests, dtype=torch.int32, device=device)
        self._no_shift = torch.zeros(requests, dtype=torch.int32, device=device)

    def locate(self, seq_lens: Tensor, num_reqs: int) -> None:
        """Fill `working` for a step; seq_lens int [>= num_reqs], tokens at its end, drafts included."""
        columns = self._columns[:num_reqs]
        columns.copy_((seq_lens[:num_reqs] - 1).div(self.block_size, rounding_mode="floor").clamp(min=0))
        for table, working in zip(self._tables, self.working, strict=True):
            working[:num_reqs] = table[:num_reqs].gather(1, columns[:, None])
            working[num_reqs:] = 0

    def start_boundaries(
        self, step: TreeStep, idx_mapping: Tensor, context: MambaSpecDecodeGPUContext
    ) -> None:
        """Fill `boundary` and `boundary_path`, and copy the states before the step to the boundaries.

        Args:
            step: after its walk. idx_mapping int32 [R]: request state indices.
            context: vLLM's table of the states' addresses, for its copy kernel.
        """
        rows = step.num_reqs
        start, nodes, working = step.base, step.num_path.long(), self._columns[:rows]
        end = start + nodes
        last = end.div(self.block_size, rounding_mode="floor")  # boundaries at or before the end
        needed = (nodes > 0) & (last * self.block_size > start) & (last - 1 != working)
        column = (last - 1).clamp(min=0)
        self.boundary_path[:rows] = torch.where(needed, last * self.block_size - start, 0)
        for table, boundary in zip(self._tables, self.boundary, strict=True):
            found = table[:rows].gather(1, column[:, None])
            boundary[:rows] = found.masked_fill(~needed[:, None], 0)
        index = idx_mapping[:rows].long()
        self._source[index] = torch.where(needed, working, -1).int()
        self._target[index] = column.int()
        context.run_fused_precopy(rows, self._target, self._source, self._no_shift, idx_mapping)
