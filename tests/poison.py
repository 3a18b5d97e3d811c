# SPDX-License-Identifier: Apache-2.0
"""A fixture that fills fresh memory with NaN or huge integers, so that an output entry nobody wrote shows
up."""

from collections.abc import Callable

import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.empty` and `torch.empty_like` return poison."""

    def poison(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def poisoned(*args: object, **kwargs: object) -> torch.Tensor:
            tensor = make(*args, **kwargs)
            if tensor.dtype == torch.bool:
                return tensor
            return tensor.fill_(
                float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max - 7
            )

        return poisoned

    monkeypatch.setattr(torch, "empty", poison(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poison(torch.empty_like))
