# SPDX-License-Identifier: Apache-2.0
"""When the target's products prefer cuBLASLt: trees alone, measured widths, a GPU like the measured one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn

from vllm_weaver.spec_decode.blas import VARIABLE, prefer_cublaslt

GPU = torch.device("cuda")


class Recorder:
    """Stands for PyTorch's setting; `seen`: what it was whenever the model ran."""

    def __init__(self) -> None:
        self.now = "cublas"
        self.seen: list[str] = []

    def library(self, wanted: str | None = None) -> str:
        self.now = wanted or self.now
        return self.now


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    found = Recorder()
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", found.library)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return found


def model_of(recorder: Recorder, step: Any) -> nn.Module:
    class Model(nn.Module):
        def forward(self, fail: bool = False) -> None:
            recorder.seen.append(recorder.now)
            if fail:
                raise RuntimeError("no memory")

    model = Model()
    prefer_cublaslt(model, step)
    return model


def test_trees_of_measured_widths_alone(recorder: Recorder) -> None:
    step = SimpleNamespace(device=GPU, all_trees=True, num_tokens=33)
    model = model_of(recorder, step)
    model()
    for step.all_trees, step.num_tokens in ((False, 33), (True, 16), (True, 67), (True, 17), (True, 66)):
        model()
    assert recorder.seen == ["cublaslt", "cublas", "cublas", "cublas", "cublaslt", "cublaslt"]
    assert recorder.now == "cublas"


def test_a_failed_step_leaves_the_setting_as_it_was(recorder: Recorder) -> None:
    model = model_of(recorder, SimpleNamespace(device=GPU, all_trees=True, num_tokens=33))
    with pytest.raises(RuntimeError, match="no memory"):
        model(fail=True)
    assert recorder.seen == ["cublaslt"] and recorder.now == "cublas"


def test_whoever_sets_the_variable_decides(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "0")
    model_of(recorder, SimpleNamespace(device=GPU, all_trees=True, num_tokens=33))()
    assert recorder.seen == ["cublas"]


@pytest.mark.parametrize("device, capability", [("cuda", (12, 0)), ("cuda", (10, 0)), ("cpu", (9, 0))])
def test_other_devices_keep_the_default(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, device: str, capability: tuple[int, int]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    model_of(recorder, SimpleNamespace(device=torch.device(device), all_trees=True, num_tokens=33))()
    assert recorder.seen == ["cublas"]
