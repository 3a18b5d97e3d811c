# SPDX-License-Identifier: Apache-2.0
"""Tests of kernels; `settle` is what they share."""

import torch


def settle(device: torch.device) -> None:
    """All that was launched is complete: from here on a kernel may read it ahead of its turn."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
