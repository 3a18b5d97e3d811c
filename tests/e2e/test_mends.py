# SPDX-License-Identifier: Apache-2.0
"""What `vllm_weaver.cpu` mends in vLLM, where a test does not need the CPU that needs it."""

from __future__ import annotations

from typing import Any

import pytest
import torch


def test_a_single_row_reaches_the_convolution_with_strides_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    seen = []

    def record(*, x: torch.Tensor, **_: Any) -> torch.Tensor:
        seen.append(x)
        return x

    monkeypatch.setattr(gdn_attention.ops, "causal_conv1d_fwd_cpu", record)
    monkeypatch.setattr(gdn_attention, "is_conv_state_dim_first", lambda: False)
    projected = torch.arange(24.0).view(2, 12)[:, :8]  # q, k and v are part of a wider projection
    rest = dict.fromkeys(
        ("weight", "bias", "conv_states", "query_start_loc", "cache_indices", "has_initial_state",
         "silu_activation", "is_weight_packed")
    )  # fmt: skip
    for rows in (1, 2):
        gdn_attention._causal_conv1d_fwd_cpu(x=projected[:rows].transpose(0, 1), **rest)
    assert [x.stride() for x in seen] == [(1, 8), (1, 12)]
    assert all(torch.equal(x.transpose(0, 1), projected[: x.shape[1]]) for x in seen)
