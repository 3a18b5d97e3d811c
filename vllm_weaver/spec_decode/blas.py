# SPDX-License-Identifier: Apache-2.0
"""The library behind the target's unquantized matrix products in a step made of trees.

PyTorch calls cuBLAS by default. At the widths of a few trees it may choose worse than cuBLASLt does: of a 27B
model in bf16, the down projection (17,408 to 5,120) takes 53.0 us at 33 rows and 55.5 at 66 with the one,
47.9 and 49.6 with the other, and no product of the layer is more than 2 % slower; from 129 rows on and at 9
it is the other way round (59.3 and 75.8 at 129). So the preference, which is PyTorch's own setting, is given
where that was measured (one H200, torch 2.11.0+cu130) and nowhere else, and only while the target's forward
pass is launched, or captured, for rows that all belong to trees: products of prompts, of mixed steps and of
the draft stay as they are.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.nn as nn

from vllm_weaver.spec_decode.step import TreeStep

VARIABLE = "TORCH_BLAS_PREFER_CUBLASLT"
"""PyTorch's own variable: whoever sets it, to whatever, decides for the whole process."""
_MEASURED_ON = (9, 0)  # compute capability
_ROWS = range(17, 67)


def prefer_cublaslt(model: nn.Module, step: TreeStep) -> None:
    """From here on `model` runs with cuBLASLt preferred where the header says that it is faster.

    Nothing happens on another device than that, or where the user has set `VARIABLE`."""
    if step.device.type != "cuda" or VARIABLE in os.environ:
        return
    if torch.cuda.get_device_capability(step.device) != _MEASURED_ON:
        return
    library = torch.backends.cuda.preferred_blas_library
    before: list[Any] = []

    def begin(*_: Any) -> None:
        if step.all_trees and step.num_tokens in _ROWS:
            before.append(library())
            library("cublaslt")

    def end(*_: Any) -> None:
        while before:
            library(before.pop())

    model.register_forward_pre_hook(begin)
    model.register_forward_hook(end, always_call=True)
