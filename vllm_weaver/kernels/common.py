# SPDX-License-Identifier: Apache-2.0
"""What every kernel wrapper shares: the choice between reference and Triton, and the argument checks.

Wrappers run inside a decode step, so nothing here reads a tensor's contents (no device-to-host
synchronisation): checks look at shapes, dtypes and devices only.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import torch
import triton
from torch import Tensor

Impl = Literal["auto", "torch", "triton"]
"""`auto`: Triton for CUDA tensors, the PyTorch reference for CPU tensors; the other two force one of them."""


def use_triton(tensor: Tensor, impl: Impl) -> bool:
    """Whether a call on `tensor` runs the Triton kernel.

    Raises `ValueError` for an impl that is unknown or cannot run.
    """
    if impl not in ("auto", "torch", "triton"):
        raise ValueError(f"impl is {impl!r}; it must be 'auto', 'torch' or 'triton'")
    if impl == "auto":
        return tensor.is_cuda
    if impl == "triton" and not tensor.is_cuda and not triton.knobs.runtime.interpret:
        raise ValueError("impl='triton' on a CPU tensor needs TRITON_INTERPRET=1 before triton is imported")
    return impl == "triton"


def expect(
    name: str,
    tensor: Tensor,
    shape: tuple[int | None, ...],
    *,
    device: torch.device,
    dtypes: Collection[torch.dtype] | None = None,
) -> None:
    """Raises `ValueError` unless `tensor` has this shape (None: any size), device and one of these dtypes."""
    got = tuple(tensor.shape)
    if len(got) != len(shape) or any(w is not None and w != g for g, w in zip(got, shape, strict=True)):
        wanted = "[" + ", ".join("*" if size is None else str(size) for size in shape) + "]"
        raise ValueError(f"{name} has shape {list(got)}; it must be {wanted}")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}; it must be on {device} like the other arguments")
    if dtypes is not None and tensor.dtype not in dtypes:
        raise ValueError(f"{name} has dtype {tensor.dtype}; it must be one of {', '.join(map(str, dtypes))}")


def expect_indices(device: torch.device, *arguments: tuple[str, Tensor, tuple[int | None, ...]]) -> None:
    """Raises `ValueError` unless every (name, tensor, shape) is a contiguous int32 tensor of that shape."""
    for name, tensor, shape in arguments:
        expect(name, tensor, shape, device=device, dtypes=(torch.int32,))
        if not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}; it must be contiguous")


def expect_dense_last(name: str, tensor: Tensor) -> None:
    """Raises `ValueError` unless the last dimension of `tensor` has stride 1."""
    if tensor.stride(-1) != 1 and tensor.shape[-1] != 1:
        raise ValueError(f"{name} has strides {tensor.stride()}; its last dimension must be contiguous")


def expect_logits(logits: Tensor, vocab_size: int | None) -> int:
    """The vocabulary's size, by default the width of logits [*, >= vocab_size]. Raises `ValueError` unless
    they have two dimensions, at least that width, and rows whose numbers lie side by side."""
    vocab_size = logits.shape[-1] if vocab_size is None else vocab_size
    expect("logits", logits, (None, None), device=logits.device)
    if not 1 <= vocab_size <= logits.shape[1]:
        raise ValueError(
            f"vocab_size is {vocab_size}; it must be in [1, {logits.shape[1]}], the width of the logits"
        )
    expect_dense_last("logits", logits)
    return vocab_size
