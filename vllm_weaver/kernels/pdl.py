# SPDX-License-Identifier: Apache-2.0
"""Programmatic dependent launches (compute capability 9.0 on): a kernel starts while the one before it ends.

A kernel launched with `launch_options` may be set up, and run up to its `wait_for_inputs`, as soon as every
program of the kernel before it has called `let_next_start` (or has ended). What was written by earlier
kernels must not be read, and what they read must not be written, before the wait. A kernel that has waited
knows all earlier ones to be complete, provided that each of them waited too or was launched without this. So
it must wait even where it has nothing to do, unless the kernels before it had nothing to do either.

If the kernel before takes its turn (waits, and only then lets the next one start), whatever was launched
before that one is complete when this one starts, and may be read ahead of the wait.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def launch_options(tensor: Tensor) -> dict[str, bool]:
    """Keyword arguments for a launch on the device of `tensor`: constexpr PDL and the attribute."""
    pdl = has_pdl(tensor)
    return {"PDL": pdl, "launch_pdl": pdl} if tensor.is_cuda else {"PDL": pdl}


def has_pdl(tensor: Tensor) -> bool:
    """Whether the device of `tensor` knows such launches."""
    return tensor.is_cuda and torch.cuda.get_device_capability(tensor.device)[0] >= 9


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """From here on the next kernel may be set up."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Returns when the kernel before has ended and its writes are visible."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def take_turn(PDL: tl.constexpr):
    """`wait_for_inputs`, then `let_next_start`: the link of a chain of launches."""
    wait_for_inputs(PDL)
    let_next_start(PDL)
