# SPDX-License-Identifier: Apache-2.0
"""Weaver checkpoints: finding them (local, hub cache, offline), refusing bad ones in one line, reading good
ones."""

import hashlib
import json
import os
import pickle
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants

from tests.test_weaver import CONFIG, random_head
from vllm_weaver.spec_decode.weaver_checkpoint import inspect_weaver, load_weaver, resolve_weaver, save_weaver

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def write_torch(path: Path, change: Callable[[dict[str, Any], dict[str, Any]], None] | None = None) -> Path:
    config, tensors = asdict(CONFIG), dict(random_head(dtype=torch.float32).state_dict())
    if change:
        change(config, tensors)
    torch.save({"config": config, "state_dict": tensors}, path)
    return path


def write_safetensors(path: Path) -> Path:
    save_weaver(random_head(dtype=torch.float32), path)
    return path


def refusal(path: Path) -> str:
    """The error of both ways to look at a file, which must agree and be one bounded line."""
    messages = []
    for look in (inspect_weaver, load_weaver):
        with pytest.raises(ValueError) as caught:
            look(path)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert "\n" not in messages[0] and len(messages[0]) < 900 + len(str(path)) and str(path) in messages[0]
    return messages[0]


@pytest.mark.parametrize(
    "write, name", [(write_torch, "w.pth"), (write_torch, "w.pt"), (write_safetensors, "w.safetensors")]
)
def test_round_trip(tmp_path: Path, write: Callable[[Path], Path], name: str) -> None:
    path = write(tmp_path / name)
    assert inspect_weaver(path) == CONFIG
    head = load_weaver(path)
    expected = random_head(dtype=torch.float32).state_dict()
    assert head.dtype == torch.float32 and not head.training
    assert head.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[key]) for key, value in head.state_dict().items())
    assert not any(p.requires_grad for p in head.parameters())
    half = load_weaver(path, dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}


def test_shared_config_and_older_torch_format(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "w.safetensors")
    path.with_suffix(".json").rename(tmp_path / "config.json")
    assert inspect_weaver(path) == CONFIG
    old = tmp_path / "old.pth"
    content = {"config": asdict(CONFIG), "state_dict": random_head(dtype=torch.float32).state_dict()}
    torch.save(content, old, _use_new_zipfile_serialization=False)
    assert inspect_weaver(old) == CONFIG and load_weaver(old).dtype == torch.float32


class Malicious:
    """Creates a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.target}",)


@pytest.mark.parametrize("plain", [False, True], ids=["torch file", "plain pickle"])
def test_malicious_pickle_runs_nothing(tmp_path: Path, plain: bool) -> None:
    path, target = tmp_path / "evil.pth", tmp_path / "executed"
    content = {"config": asdict(CONFIG), "state_dict": {"out_norm.bias": Malicious(target)}}
    if plain:
        path.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, path)
    message = refusal(path)
    assert "nothing in it was run" in message
    assert plain or "it holds posix.system, neither a tensor nor a plain value" in message
    assert not target.exists()


@pytest.mark.parametrize("data", [b"", b"junk" * 50, b"PK\x03\x04junk"], ids=["empty", "junk", "broken zip"])
@pytest.mark.parametrize("name", ["w.pth", "w.safetensors"])
def test_damaged_file(tmp_path: Path, name: str, data: bytes) -> None:
    path = write_torch(tmp_path / name) if name == "w.pth" else write_safetensors(tmp_path / name)
    path.write_bytes(data)
    assert "read" in refusal(path)


@pytest.mark.parametrize("keep", [0.5, 0.98])
@pytest.mark.parametrize("name", ["w.pth", "w.safetensors"])
def test_truncated_file(tmp_path: Path, name: str, keep: float) -> None:
    path = write_torch(tmp_path / name) if name == "w.pth" else write_safetensors(tmp_path / name)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    assert "read" in refusal(path)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda c, t: t.pop("out_norm.bias"), "missing tensors: out_norm.bias"),
        (lambda c, t: t.update({"blocks.7.extra": torch.ones(1)}), "unexpected tensors: blocks.7.extra"),
        (lambda c, t: t.update({"x\ny" * 500: torch.ones(1)}), "unexpected tensors: x yx y"),
        (lambda c, t: t.update({f"extra.{i}": torch.ones(1) for i in range(900)}), "and 896 more"),
        (lambda c, t: t.update({"token_in.bias": torch.ones(3)}), r"token_in.bias is [3], must be [16]"),
        (
            lambda c, t: t.update({"token_in.bias": torch.ones(16).long()}),
            "not floating point: token_in.bias",
        ),
        (lambda c, t: t.update({"token_in.bias": 5}), "state_dict must map names to tensors"),
        (lambda c, t: t.clear(), "tensors"),
        (lambda c, t: c.update(encoder_mode=1), "encoder_mode is 1, but only 3 is supported"),
        (lambda c, t: c.update(score_head=2), "score_head is 2, but only 4 is supported"),
        (lambda c, t: c.update(activation="gelu"), "activation is 'gelu', but only 'swiglu' is supported"),
        (
            lambda c, t: c.update(num_layers=10**12),
            "num_layers must be an integer from 1 to 1048576, but is 1000000000000",
        ),
        (lambda c, t: c.update(num_layers=10**6), "num_layers is 1000000, with 31 tensors"),
        (lambda c, t: c.update(num_layers=3), "missing tensors: blocks.2."),
        (lambda c, t: c.update(d_rank=1 << 20), "wrong shapes"),
        (lambda c, t: c.pop("K"), "missing key(s) K"),
        (lambda c, t: c.update(window=4), "unknown key 'window' with value '4'"),
    ],
)
def test_wrong_content_is_named(tmp_path: Path, change: Callable[..., None], message: str) -> None:
    assert message in refusal(write_torch(tmp_path / "w.pth", change))


def test_all_faults_of_the_tensors_in_one_line(tmp_path: Path) -> None:
    def change(config: dict[str, Any], tensors: dict[str, Any]) -> None:
        del tensors["proposal_in.weight"], tensors["embed_norm.bias"]
        tensors["spare"] = torch.ones(2)
        tensors["out_norm.weight"] = torch.ones(1, 16)

    message = refusal(write_torch(tmp_path / "w.pth", change))
    assert (
        "missing tensors: embed_norm.bias, proposal_in.weight; unexpected tensors: spare; wrong shapes"
        in message
    )


@pytest.mark.parametrize("content", [[1, 2], {"config": {}}, {"state_dict": {}}, torch.ones(2)], ids=str)
def test_wrong_top_level(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "w.pth")
    assert "must hold a mapping with 'config' and 'state_dict'" in refusal(tmp_path / "w.pth")


def test_missing_files_and_configs(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "none.pth")
    path = write_safetensors(tmp_path / "w.safetensors")
    path.with_suffix(".json").write_text("{")
    with pytest.raises(ValueError, match="w.json' is not valid JSON"):
        inspect_weaver(path)
    path.with_suffix(".json").write_text("[]")
    assert "expected a mapping" in refusal(path)
    path.with_suffix(".json").unlink()
    assert "needs its config beside it" in refusal(path)
    with pytest.raises(ValueError, match="saved as .safetensors"):
        save_weaver(random_head(), tmp_path / "w.pth")


def test_local_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_torch(tmp_path / "w.pth")
    assert resolve_weaver(str(path)) == path
    assert resolve_weaver(str(tmp_path)) == path
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_weaver("~/w.pth") == path
    monkeypatch.chdir(tmp_path.parent)
    (tmp_path.parent / "org").mkdir()
    path.rename(
        tmp_path.parent / "org" / "repo"
    )  # an existing path wins over a hub name, whatever it is called
    with pytest.raises(
        ValueError, match="'org/repo' has an unknown kind; use one of .pth, .pt, .safetensors"
    ):
        resolve_weaver("org/repo")
    with pytest.raises(ValueError, match="weaver_revision is 'main', but weaver .* is a local path"):
        resolve_weaver(str(tmp_path), revision="main")
    with pytest.raises(ValueError, match="must hold one .pth, .pt, .safetensors file, but holds none"):
        resolve_weaver(str(tmp_path))
    for name in "abcdef":
        (tmp_path / f"{name}.pth").touch()
    with pytest.raises(ValueError, match=r"holds 6 \(a.pth, b.pth, c.pth, d.pth and 2 more\); name the file"):
        resolve_weaver(str(tmp_path))


@pytest.mark.parametrize(
    "spec", ["/nowhere/w.pth", "nowhere.pth", "org/w.safetensors", "a/b/c", "a", "", "a b/c:d.pth"]
)
def test_neither_a_path_nor_a_hub_name(spec: str) -> None:
    with pytest.raises(ValueError, match="neither an existing path nor a hub name") as caught:
        resolve_weaver(spec)
    assert repr(spec) in str(caught.value)


def test_sha256(tmp_path: Path) -> None:
    path = write_torch(tmp_path / "w.pth")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert resolve_weaver(str(path), sha256=digest.upper()) == path
    wrong = "0" * 64
    with pytest.raises(ValueError) as caught:
        resolve_weaver(str(path), sha256=wrong)
    assert digest in str(caught.value) and wrong in str(caught.value)
    with pytest.raises(ValueError, match="weaver_sha256 is 'abc', but must be 64 hexadecimal digits"):
        resolve_weaver(str(path), sha256="abc")


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache with one repo, and no network: the folder of its snapshot."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for module in (constants, huggingface_hub.file_download.constants):
        monkeypatch.setattr(module, "HF_HUB_CACHE", str(tmp_path))
    store = tmp_path / "models--org--heads"
    (store / "refs").mkdir(parents=True)
    (store / "refs" / "main").write_text(COMMIT)
    snapshot = store / "snapshots" / COMMIT
    (snapshot / "weaver").mkdir(parents=True)
    return snapshot


@pytest.mark.parametrize("spec", ["org/heads:weaver/w.pth", "org/heads"])
@pytest.mark.parametrize("revision", [None, "main", COMMIT])
def test_offline_hub(hub_cache: Path, spec: str, revision: str | None) -> None:
    path = write_torch(hub_cache / "weaver" / "w.pth")
    (hub_cache / "README.md").touch()
    found = resolve_weaver(spec, revision=revision, sha256=hashlib.sha256(path.read_bytes()).hexdigest())
    assert found == path
    assert inspect_weaver(found) == CONFIG


@pytest.mark.parametrize("shared", [False, True], ids=["stem.json", "config.json"])
def test_offline_hub_safetensors(hub_cache: Path, shared: bool) -> None:
    path = write_safetensors(hub_cache / "weaver" / "w.safetensors")
    if shared:
        path.with_suffix(".json").rename(path.with_name("config.json"))
    assert inspect_weaver(resolve_weaver("org/heads")) == CONFIG
    path.with_name("config.json" if shared else "w.json").unlink()
    with pytest.raises(ValueError, match="hf download org/heads weaver/config.json"):
        resolve_weaver("org/heads")


def test_offline_missing_names_the_command(hub_cache: Path) -> None:
    with pytest.raises(ValueError, match="HF_HUB_OFFLINE is set.*hf download org/heads weaver/w.pth$"):
        resolve_weaver("org/heads:weaver/w.pth")
    with pytest.raises(ValueError, match="hf download org/heads w.pth --revision v2$"):
        resolve_weaver("org/heads:w.pth", revision="v2")
    with pytest.raises(
        ValueError, match="'org/other' is not in the local cache.*hf download org/other FILE$"
    ):
        resolve_weaver("org/other")
    with pytest.raises(ValueError, match="hub repo 'org/heads' must hold one .* but holds none"):
        resolve_weaver("org/heads")


def test_unreachable_hub_uses_the_cache(hub_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_torch(hub_cache / "weaver" / "w.pth")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    def unreachable(*args: object, **kwargs: object) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(huggingface_hub, "list_repo_files", unreachable)
    monkeypatch.setattr(
        huggingface_hub, "hf_hub_download", lambda repo, name, revision: str(hub_cache / name)
    )
    assert resolve_weaver("org/heads") == path
    with pytest.raises(
        ValueError, match="the hub cannot be reached .no route to host.; fetch it with: hf download"
    ):
        resolve_weaver("org/other")


def test_config_file_is_what_save_writes(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "w.safetensors")
    assert json.loads(path.with_suffix(".json").read_text()) == asdict(CONFIG)
