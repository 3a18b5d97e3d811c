# SPDX-License-Identifier: Apache-2.0
"""Tests of kernels, and what they share."""

import torch

SHARED_MEMORY = {90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""Bytes that a program may have, by compute capability (times ten): NVIDIA's documents."""


def settle(device: torch.device) -> None:
    """All that was launched is complete: from here on a kernel may read it ahead of its turn."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
