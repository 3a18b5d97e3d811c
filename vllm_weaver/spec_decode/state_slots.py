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
a - b nodes. Steps in which no path can reach a boundary, by what the host knows of their lengths, go without.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from vllm_weaver.kernels.state_slots import SlotBuffers, find_boundaries, locate_states

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
        self, tables: Sequence[Tensor], block_size: int, longest_path: int, unsettled_drafts: int
    ) -> None:
        """Buffers for the block tables int32 [max requests, columns] of the groups, rows in batch order.

        Args:
            longest_path: nodes of an accepted path, at most.
            unsettled_drafts: drafts of a request, at most, in steps whose outputs the scheduler has not seen
            when it schedules the next one; it counts them as computed.

        Raises:
            ValueError: a path of `longest_path` nodes may cross two boundaries.
        """
        if block_size < longest_path:
            raise ValueError(
                f"dflash_tfm: mamba cache mode 'align' with blocks of {block_size} tokens cannot keep the "
                f"states within an accepted path of up to {longest_path}; set --block-size to at least "
                f"{longest_path} or use --no-enable-prefix-caching."
            )
        self.longest_path = longest_path
        self.unsettled_drafts = unsettled_drafts
        self._buffers = SlotBuffers.allocate(tables, block_size)
        self.working, self.boundary = self._buffers.working, self._buffers.boundary
        self.boundary_path = self._buffers.boundary_path
        self._no_shift = torch.zeros_like(self.boundary_path)

    def locate(self, seq_lens: Tensor, num_reqs: int) -> None:
        """Fill `working` for a step; seq_lens int32 [>= num_reqs], tokens at its end, drafts included."""
        locate_states(self._buffers, seq_lens[:num_reqs])

    def may_cross(self, computed: np.ndarray) -> bool:
        """Whether a path may cross a boundary, as far as the host knows; never False where one does.

        Args:
            computed: int [trees], the scheduler's counts of computed tokens. One is at least what the device
            has, and above it by the rejected ones of the unsettled drafts.
        """
        size = self._buffers.block_size
        least = np.maximum(computed - self.unsettled_drafts, 0)
        return bool(((computed + self.longest_path) // size > least // size).any())

    def start_boundaries(
        self, step: TreeStep, idx_mapping: Tensor, context: MambaSpecDecodeGPUContext
    ) -> None:
        """Fill `boundary` and `boundary_path`, and copy the states before the step to the boundaries.

        Args:
            step: after its walk. idx_mapping int [R]: request state indices.
            context: vLLM's table of the states' addresses, for its copy kernel.
        """
        buffers = self._buffers
        find_boundaries(buffers, step.base, step.num_path, idx_mapping)
        context.run_fused_precopy(step.num_reqs, buffers.target, buffers.source, self._no_shift, idx_mapping)
