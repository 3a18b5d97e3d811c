# SPDX-License-Identifier: Apache-2.0
"""How the Gated DeltaNet kernels multiply: fp32 accuracy from tensor cores.

An operand that comes from bf16 activations is exact in bf16, and so is its product with a bf16 number in an
fp32 accumulator. The other operand, fp32, is cut into bf16 parts whose sum it is (8 bits each, so two parts
give 2^-17 and three all of fp32), and the parts are multiplied one by one. Two fp32 operands use Triton's own
`input_precision`. Nothing is materialised; the floor is one tensor-core product a part.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl

Precision = Literal["tf32", "tf32x3", "bf16x3", "bf16x6", "ieee"]
"""Of a product of two fp32 operands; `ieee` (no tensor cores) is what the interpreter runs."""


def dot_options(device: torch.device, dtype: torch.dtype, precision: Precision) -> dict[str, object]:
    """PRECISION and PARTS of a launch: PARTS is the number of bf16 parts, 0 to multiply as fp32."""
    if device.type != "cuda" or precision == "ieee":
        return {"PRECISION": "ieee", "PARTS": 0}
    parts = 3 if precision in ("tf32x3", "bf16x6") else 2
    return {"PRECISION": precision, "PARTS": parts if dtype == torch.bfloat16 else 0}


@triton.jit
def bf16_parts(x):
    """Three bf16 tensors, large to small, whose sum is the fp32 tensor x."""
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def dot_parts(a, parts, PARTS: tl.constexpr):
    """a @ sum(parts[:PARTS]) of a bf16 tensor and `bf16_parts`, small products first."""
    total = tl.dot(a, parts[1])
    if PARTS == 3:
        total = tl.dot(a, parts[2], total)
    return tl.dot(a, parts[0], total)


@triton.jit
def dot_activations(a, b, PRECISION: tl.constexpr, PARTS: tl.constexpr):
    """a @ b of two tensors in the activations' dtype."""
    if PARTS > 0:
        return tl.dot(a, b)
    return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision=PRECISION)
