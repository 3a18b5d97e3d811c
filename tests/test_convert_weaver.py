# SPDX-License-Identifier: Apache-2.0
"""scripts/convert_weaver.py: the same numbers in a safer file, and nothing written where something is
wrong."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

from scripts import convert_weaver
from tests.test_weaver_checkpoint import CONFIG, Malicious, write_safetensors, write_torch
from vllm_weaver.spec_decode import weaver_checkpoint
from vllm_weaver.spec_decode.weaver_checkpoint import (
    PUBLISHED_SHA256,
    inspect_weaver,
    load_weaver,
    same_numbers,
)


def refused(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """The one line of a refusal; nothing may have been written."""
    assert convert_weaver.main([str(argument) for argument in argv]) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    return printed.err


def test_converts_bit_for_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def half(config: dict, tensors: dict) -> None:
        for name, tensor in tensors.items():
            tensors[name] = tensor.bfloat16()
        tensors["out_norm.bias"][0] = -0.0

    source = write_torch(tmp_path / "head.pth", half)
    assert convert_weaver.main([str(source), str(tmp_path / "out")]) == 0
    result = tmp_path / "out" / "head.safetensors"
    assert inspect_weaver(result) == CONFIG
    head = load_weaver(result)
    assert head.dtype == torch.bfloat16 and same_numbers(head, load_weaver(source))
    head.out_norm.bias[0] = 0.0  # equal as a number, not bit for bit
    assert not same_numbers(head, load_weaver(source))
    printed = capsys.readouterr().out
    for path in (source, result):
        assert hashlib.sha256(path.read_bytes()).hexdigest() in printed
    assert "not a published file" in printed and "equal bit for bit" in printed
    assert "exists already" in refused(capsys, source, tmp_path / "out")


def test_published_names_have_their_digest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (name, digest), *_ = PUBLISHED_SHA256.items()
    source = write_torch(tmp_path / name)
    actual = hashlib.sha256(source.read_bytes()).hexdigest()
    message = refused(capsys, source, tmp_path / "out")
    assert digest in message and actual in message and not (tmp_path / "out").exists()
    assert convert_weaver.main([str(source), str(tmp_path / "out"), "--sha256", actual]) == 0
    monkeypatch.setitem(PUBLISHED_SHA256, name, actual)
    capsys.readouterr()
    assert convert_weaver.main([str(source), str(tmp_path / "again")]) == 0
    assert "(the published file)" in capsys.readouterr().out


def test_refusals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    assert "already; nothing needs doing" in refused(
        capsys, write_safetensors(tmp_path / "w.safetensors"), out
    )
    source = write_torch(tmp_path / "w.pth")
    assert "weaver_sha256 is" in refused(capsys, source, out, "--sha256", "0" * 64)
    evil = tmp_path / "evil.pth"
    torch.save({"config": {}, "state_dict": {"x": Malicious(tmp_path / "executed")}}, evil)
    assert "nothing in it was run" in refused(capsys, evil, out) and not (tmp_path / "executed").exists()
    assert "neither an existing path" in refused(capsys, tmp_path / "none.pth", out)
    assert not out.exists()

    def careless(head: torch.nn.Module, path: Path) -> None:
        head.out_norm.bias.data += 1
        weaver_checkpoint.save_weaver(head, path)
        head.out_norm.bias.data -= 1

    monkeypatch.setattr(convert_weaver, "save_weaver", careless)
    assert "did not read back as it was written" in refused(capsys, source, out)
    assert list(out.iterdir()) == []
