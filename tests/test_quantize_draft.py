# SPDX-License-Identifier: Apache-2.0
"""scripts/quantize_draft.py: the packed numbers, the layout, what calibration captures, and going on after an
interruption. The whole run on the demo models is behind `--all`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from scripts import quantize_draft  # prepares vLLM's environment
from scripts.quantize_lib import capture, nvfp4
from tests import drafts, quantized
from tests.e2e import models
from tests.e2e.harness import DEMO
from tests.test_draft_checkpoint import check
from tests.test_draft_loading import assert_means, hooks, load  # noqa: F401
from tests.test_quantized_heads import emulated, vllm_config  # noqa: F401

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Folders of a target (its configuration) and a draft."""
    target = tmp_path / "target"
    target.mkdir()
    config = {"hidden_size": models.HIDDEN, "num_hidden_layers": 3, "vocab_size": models.VOCAB}
    (target / "config.json").write_text(json.dumps({"text_config": config}))
    return target, models.random_draft(tmp_path / "draft")


def run(*argv: object) -> int:
    return quantize_draft.main([str(argument) for argument in argv])


def test_packing_is_the_nearest_code() -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(70, 64, generator=generator) * torch.rand(70, 1, generator=generator)
    codes, scales, factor, error = nvfp4.pack(weight)
    assert codes.shape == (70, 32) and codes.dtype == torch.uint8
    assert scales.shape == (70, 4) and scales.dtype == torch.float8_e4m3fn
    assert float(factor) == pytest.approx(float(weight.abs().max()) / 2688)
    back = quantized.nvfp4_meaning(codes, scales, factor)
    assert float((back - weight.double()).norm() / weight.double().norm()) == pytest.approx(error, rel=1e-3)
    grid = torch.cat((-quantized.E2M1.flip(0), quantized.E2M1))
    step = (scales.double() * factor.double()).repeat_interleave(16, dim=1)
    nearest = (weight.double().unsqueeze(-1) - grid * step.unsqueeze(-1)).abs().amin(-1)
    torch.testing.assert_close((back - weight.double()).abs(), nearest, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("value, sentence", [(float("nan"), "not finite"), (None, "not a multiple of 16")])
def test_packing_refuses(value: float | None, sentence: str) -> None:
    weight = torch.ones(4, 24) if value is None else torch.full((4, 32), value)
    with pytest.raises(ValueError, match=sentence):
        nvfp4.pack(weight)


@pytest.mark.parametrize("second", [False, True], ids=["dflash", "dflash2"])
@pytest.mark.usefixtures("emulated", "hooks")
def test_uncalibrated(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], second: bool
) -> None:
    target, draft = pair
    if second:
        draft = drafts.second_generation(tmp_path / "draft2")
    out = tmp_path / "out"
    assert run("--target", target, "--draft", draft, "--out", out, "--rtn") == 0
    before, after = load_file(draft / "model.safetensors"), load_file(out / "model.safetensors")
    packed = [name for name in after if name.endswith(".weight_scale")]
    assert len(packed) == 7 * drafts.LAYERS
    modules = {}
    for name in packed:
        module = name.removesuffix(".weight_scale")
        parts = {
            s: after[f"{module}.{s}"] for s in ("weight", "weight_scale", "weight_scale_2", "input_scale")
        }
        assert float(parts["input_scale"]) == nvfp4.UNCALIBRATED
        modules[module] = quantized.Packed(
            {}, {}, quantized.nvfp4_meaning(*list(parts.values())[:3]), error=0.16
        )
        off = modules[module].meaning - before[f"{module}.weight"].double()
        assert off.norm() < 0.13 * before[f"{module}.weight"].double().norm()
    for layer in range(drafts.LAYERS):  # fused modules share their scales
        for fused in nvfp4.FUSED_MODULES:
            shards = nvfp4.shard_names(layer, fused)
            assert len({float(after[f"{shard}.weight_scale_2"]) for shard in shards}) == 1
    modules["fc"] = quantized.Packed({}, {}, before["fc.weight"].bfloat16().double())
    untouched = before.keys() & after.keys() - {f"{module}.weight" for module in modules if module != "fc"}
    assert len(untouched) > 8 and all(torch.equal(before[name], after[name]) for name in untouched)
    report = json.loads((out / "report.json").read_text())
    assert report["layers_ratio"] < 0.45 * 0.5  # the random draft is in float32
    assert "calibration: none" in capsys.readouterr().out
    check(out)
    if not second:
        assert_means(load(tmp_path, out), modules)
    assert run("--target", target, "--draft", draft, "--out", out, "--rtn") == 1
    assert "holds a finished draft already" in capsys.readouterr().err


def test_scales_come_from_the_peaks(pair: tuple[Path, Path]) -> None:
    _, draft = pair
    weights = nvfp4.read_weights(draft)
    names = [f"layers.{i}.{fused}" for i in range(drafts.LAYERS) for fused in nvfp4.FUSED_MODULES]
    peaks = {name: 1.5 + i for i, name in enumerate(names)}
    packed, reports = nvfp4.quantize(weights, drafts.LAYERS, peaks, torch.device("cpu"))
    assert [report.module for report in reports] == names
    for layer in range(drafts.LAYERS):
        for fused in nvfp4.FUSED_MODULES:
            for shard in nvfp4.shard_names(layer, fused):
                expected = peaks[f"layers.{layer}.{fused}"] / (6 * 448)
                assert float(packed[f"{shard}.input_scale"]) == pytest.approx(expected)


class Draft(nn.Module):
    """A draft with the modules that are watched."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model._fused_kv_weight = torch.ones(1)
        layer = nn.Module()
        layer.self_attn, layer.mlp = nn.Module(), nn.Module()
        for name in nvfp4.FUSED_MODULES:
            parent, _, child = name.partition(".")
            setattr(getattr(layer, parent), child, nn.Identity())
        self.model.layers = nn.ModuleList([layer])


def test_recording() -> None:
    draft, state = Draft(), capture.Calibration("key")
    layer = draft.model.layers[0]
    for peak in (3.0, 2.0):
        with capture.recording(draft, state):
            assert draft.model._fused_kv_weight is None  # prompts pass through the modules
            layer.mlp.down_proj(torch.tensor([[1.0, -peak], [0.5, 0.25]]))
            layer.mlp.down_proj(torch.zeros(0, 2))
    assert state.peaks == {"layers.0.mlp.down_proj": 3.0} and state.rows == {"layers.0.mlp.down_proj": 4}
    layer.mlp.down_proj(torch.tensor([[99.0]]))  # nobody is watching
    assert state.peaks == {"layers.0.mlp.down_proj": 3.0} and draft.model._fused_kv_weight is not None
    for value in (float("nan"), float("inf"), 0.0):
        with pytest.raises(ValueError, match="largest value"), capture.recording(draft, state):
            layer.mlp.up = layer.self_attn.o_proj(torch.full((1, 2), value))


def test_goes_on_where_it_stopped(
    pair: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import contextlib

    target, draft = pair
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(f"prompt {i}" for i in range(7)))
    served: list[int] = []
    broken = True

    @contextlib.contextmanager
    def serving(run: Any) -> Iterator[Any]:
        yield SimpleNamespace()

    def generate(llm: Any, run: Any, chosen: Any, first: int) -> int:
        if broken and first >= 4:
            raise KeyboardInterrupt
        served.extend(range(first, first + len(chosen)))
        return 0

    @contextlib.contextmanager
    def recording(model: Any, state: capture.Calibration) -> Iterator[None]:
        yield
        for layer in range(drafts.LAYERS):
            for fused in nvfp4.FUSED_MODULES:
                name = f"layers.{layer}.{fused}"
                state.peaks[name] = max(state.peaks.get(name, 0.0), 1.0 + len(served))
                state.rows[name] = len(served)

    monkeypatch.setattr(capture, "serving", serving)
    monkeypatch.setattr(capture, "generate", generate)
    monkeypatch.setattr(capture, "recording", recording)
    monkeypatch.setattr(capture, "draft_of", lambda llm: None)
    out = tmp_path / "out"
    command = ("--target", target, "--draft", draft, "--out", out, "--prompts", prompts, "--batch", 2)
    with pytest.raises(KeyboardInterrupt):
        run(*command)
    assert served == [0, 1, 2, 3] and not (out / "model.safetensors").exists()
    assert run(*command, "--tokens", 9) == 1
    assert "belongs to another draft, target, set of prompts or setting" in capsys.readouterr().err
    broken = False
    assert run(*command) == 0
    assert served == list(range(7))
    report = json.loads((out / "report.json").read_text())
    assert report["calibrated"] and report["prompts"] == 7 and report["modules"][0]["input_peak"] == 8.0
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / "calibration.json").write_text("{")
    assert run(*command[:4], "--out", tmp_path / "again", *command[6:]) == 1
    assert "is damaged" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name, content, expected",
    [
        ("p.txt", "a\n\nb\nc\n", ["b", "c"]),
        ("p.jsonl", '{"prompt": "a"}\n{"messages": [{"role": "user"}]}\n', [[{"role": "user"}]]),
        ("p.json", '{"text": ["a", "b"]}', ["b"]),
        ("p.json", "[[1], [2], [3], [4]]", [[2], [3]]),
    ],
)
def test_prompts(tmp_path: Path, name: str, content: str, expected: list[Any]) -> None:
    (tmp_path / name).write_text(content)
    assert quantize_draft.read_prompts(tmp_path / name, 1, 2) == expected
    with pytest.raises(ValueError, match="none after the first 9"):
        quantize_draft.read_prompts(tmp_path / name, 9, None)


def test_refusals(pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, draft = pair
    out = tmp_path / "out"
    assert run("--target", target, "--draft", tmp_path / "none", "--out", out, "--rtn") == 1
    assert "no readable config.json" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run("--target", target, "--draft", draft, "--out", out)
    assert "--prompts is needed" in capsys.readouterr().err
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{}\n")
    assert run("--target", target, "--draft", draft, "--out", out, "--prompts", bad) == 1
    assert "cannot be read: KeyError" in capsys.readouterr().err
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("text")
    command = ("--target", target, "--draft", draft, "--out", out, "--prompts", prompts, "--engine")
    for options, sentence in (
        (
            '{"enforce_eager": false, "model": "x"}',
            "--engine has enforce_eager, model, which this script sets",
        ),
        ('{"gpu_memory": 1}', "--engine has gpu_memory, which vLLM's LLM does not have"),
    ):
        assert run(*command, options) == 1
        assert sentence in capsys.readouterr().err
    for options, sentence in (("{", "'{' is no JSON"), ("[]", "'[]' is no JSON object")):
        with pytest.raises(SystemExit):
            run(*command, options)
        assert sentence in capsys.readouterr().err
    drafts.configure(draft, num_target_layers=9)
    assert run("--target", target, "--draft", draft, "--out", out, "--rtn") == 1
    assert "num_target_layers is 9" in capsys.readouterr().err
    drafts.configure(draft, quantization_config={"quant_method": "fp8"})
    assert run("--target", target, "--draft", draft, "--out", out, "--rtn") == 1
    assert "is quantized already" in capsys.readouterr().err


@pytest.mark.full
def test_demo_draft(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The demo triple for real: calibrated in vLLM, loaded by vLLM, and no worse than without calibration."""
    common = ("--target", DEMO / "target", "--tokens", 48, "--temperature", 0, "--max-model-len", 512)
    prompts = ("--prompts", DEMO / "prompts.json", "--count", 8, "--batch", 8)
    for name, options in (("rtn", ("--rtn",)), ("calibrated", prompts)):
        assert run(*common, "--draft", DEMO / "draft", "--out", tmp_path / name, *options) == 0
    report = json.loads((tmp_path / "calibrated" / "report.json").read_text())
    assert report["layers_ratio"] < 0.45 and report["prompts"] == 8
    capfd.readouterr()
    folders = (tmp_path / "rtn", tmp_path / "calibrated")
    assert run(*common, *prompts, "--skip", 8, "--evaluate", *folders) == 0
    lengths = [float(line.split()[3]) for line in capfd.readouterr().out.splitlines() if "accepted" in line]
    assert len(lengths) == 2 and lengths[1] >= lengths[0] > 1.2, lengths
