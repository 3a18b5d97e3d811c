# SPDX-License-Identifier: Apache-2.0
"""Finding, checking, reading and writing Weaver checkpoints.

A checkpoint is either a torch file (`.pth`, `.pt`) that holds `{"config": {...}, "state_dict": {...}}`, or a
`.safetensors` file with its config as JSON beside it (`<stem>.json`, or else `config.json`). Torch files are
only ever read with `weights_only=True`, so no file can run code. `resolve_weaver` turns what a user wrote
into a path, `inspect_weaver` checks everything but the numbers without reading them, `load_weaver` builds the
head.

Every error is a `ValueError` of one line that names the file.
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import Any

import huggingface_hub
import safetensors
import torch
from huggingface_hub import constants
from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.file_download import repo_folder_name
from safetensors.torch import save_file
from torch import Tensor

from vllm_weaver.spec_decode.weaver import WeaverConfig, WeaverHead

PUBLISHED_SHA256 = {
    # trymirai/weaver at revision 309ceb4b1a6c44e6a3dfaeab8db1547e904254f8, for Qwen3.6-27B.
    "qwen36_27b_weaver.pth": "71f540b143fb6bab14ba724c20e97a72ce198de103cfd228d31c3ce339227833",
}
"""SHA-256 of the published checkpoints, by file name."""

_TORCH_SUFFIXES = (".pth", ".pt")
_SUFFIXES = (*_TORCH_SUFFIXES, ".safetensors")
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SAFETENSORS = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def resolve_weaver(spec: str, revision: str | None = None, sha256: str | None = None) -> Path:
    """The local weights file that `spec` means.

    spec: a file, a folder that holds exactly one weights file, or `repo[:file]` on the Hugging Face hub
    (cached files are used as they are when HF_HUB_OFFLINE is set or the hub cannot be reached). revision:
    branch, tag or commit of the hub repo. sha256: 64 hexadecimal digits that the weights file must have."""
    local = Path(spec).expanduser()
    if spec and local.exists():
        if revision is not None:
            raise ValueError(
                f"weaver_revision is {revision!r}, but weaver {spec!r} is a local path; leave it out."
            )
        path = _pick_in_folder(local) if local.is_dir() else local
    else:
        repo, _, name = spec.partition(":")
        if not _REPO.fullmatch(repo) or (not name and repo.endswith(_SUFFIXES)):
            raise ValueError(
                f"weaver is {spec!r}: neither an existing path nor a hub name like owner/repo[:file]."
            )
        path = _fetch(repo, name, revision)
    if path.suffix not in _SUFFIXES:
        raise ValueError(f"weaver file {str(path)!r} has an unknown kind; use one of {', '.join(_SUFFIXES)}.")
    if sha256 is not None:
        _check_sha256(path, sha256)
    return path


def inspect_weaver(path: Path) -> WeaverConfig:
    """Checks config, tensor names, shapes and dtypes of a checkpoint, without reading its numbers."""
    return _read(path, "meta")[0]


def load_weaver(
    path: Path, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> WeaverHead:
    """The head of a checkpoint, checked as by `inspect_weaver`, in evaluation mode and without gradients.

    dtype defaults to the one that the file has its `token_in.weight` in; the whole head has one dtype.
    """
    config, tensors = _read(path, "cpu")
    with torch.device("meta"):
        head = WeaverHead(config)
    head.load_state_dict(tensors, assign=True)
    head.requires_grad_(False).eval()
    return head.to(device=device, dtype=dtype or head.dtype)


def save_weaver(head: WeaverHead, path: Path) -> None:
    """Writes a head as `path` (`.safetensors`) and its config as `<stem>.json` beside it."""
    if path.suffix != ".safetensors":
        raise ValueError(f"Weaver heads are saved as .safetensors, but the path is {str(path)!r}.")
    save_file({name: tensor.detach().contiguous() for name, tensor in head.state_dict().items()}, path)
    path.with_suffix(".json").write_text(json.dumps(asdict(head.config), indent=1) + "\n")


def same_numbers(first: WeaverHead, second: WeaverHead) -> bool:
    """Whether two heads have the same config and the same parameters bit for bit, dtypes included."""
    ours, theirs = first.state_dict(), second.state_dict()
    return (
        first.config == second.config
        and ours.keys() == theirs.keys()
        and all(
            tensor.dtype == theirs[name].dtype
            and torch.equal(
                tensor.contiguous().view(torch.uint8), theirs[name].contiguous().view(torch.uint8)
            )
            for name, tensor in ours.items()
        )
    )


def _pick_one(names: Iterable[str], place: str) -> str:
    found = sorted(name for name in names if name.endswith(_SUFFIXES))
    if len(found) != 1:
        what = f"{len(found)} ({_brief(found)})" if found else "none"
        raise ValueError(
            f"weaver: {place} must hold one {', '.join(_SUFFIXES)} file, but holds {what}; name the file."
        )
    return found[0]


def _pick_in_folder(folder: Path) -> Path:
    return folder / _pick_one((entry.name for entry in folder.iterdir()), f"folder {str(folder)!r}")


def _fetch(repo: str, name: str, revision: str | None) -> Path:
    if not name:
        name = _pick_one(_list_files(repo, revision), f"hub repo {repo!r}")
    if not name.endswith(".safetensors"):
        return _download(repo, name, revision)
    path = _download(repo, name, revision)
    own = str(PurePosixPath(name).with_suffix(".json"))
    shared = str(PurePosixPath(name).with_name("config.json"))
    try:
        _download(repo, own, revision)
    except ValueError:
        _download(repo, shared, revision)
    return path


def _list_files(repo: str, revision: str | None) -> list[str]:
    """File names of a hub repo, or those of its cached snapshot where the hub is not to be or cannot be
    asked."""
    if not constants.HF_HUB_OFFLINE:
        try:
            return huggingface_hub.list_repo_files(repo, revision=revision)
        except (RepositoryNotFoundError, RevisionNotFoundError) as error:
            raise ValueError(
                f"weaver: hub repo {repo!r}{_at(revision)} was not found: {_line(error)}"
            ) from None
        except Exception as error:  # any kind of network failure; the cache may still answer
            reason = f"the hub cannot be reached ({_line(error)})"
    else:
        reason = "HF_HUB_OFFLINE is set"
    store = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type="model")
    reference = store / "refs" / (revision or "main")
    commit = reference.read_text().strip() if reference.is_file() else revision or ""
    snapshot = store / "snapshots" / commit
    if not commit or not snapshot.is_dir():
        raise ValueError(
            f"weaver: {repo!r}{_at(revision)} is not in the local cache and {reason}; "
            f"fetch it with: {_command(repo, 'FILE', revision)}"
        )
    return [str(file.relative_to(snapshot)) for file in snapshot.rglob("*") if file.is_file()]


def _download(repo: str, name: str, revision: str | None) -> Path:
    try:
        return Path(huggingface_hub.hf_hub_download(repo, name, revision=revision))
    except Exception as error:  # the hub client raises many unrelated types; all mean that there is no file
        missing = isinstance(error, EntryNotFoundError) and not constants.HF_HUB_OFFLINE
        reason = "does not exist there" if missing else "could not be fetched and is not in the local cache"
        offline = " (HF_HUB_OFFLINE is set)" if constants.HF_HUB_OFFLINE else ""
        raise ValueError(
            f"weaver: file {name!r} of hub repo {repo!r}{_at(revision)} {reason}{offline}; "
            f"fetch it with: {_command(repo, name, revision)}"
        ) from error


def _command(repo: str, name: str, revision: str | None) -> str:
    return f"hf download {repo} {name}" + (f" --revision {revision}" if revision else "")


def _at(revision: str | None) -> str:
    return f" at revision {revision!r}" if revision else ""


def _check_sha256(path: Path, expected: str) -> None:
    if not re.fullmatch(r"[0-9a-fA-F]{64}", expected):
        raise ValueError(f"weaver_sha256 is {expected[:80]!r}, but must be 64 hexadecimal digits.")
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != expected.lower():
        raise ValueError(
            f"weaver file {str(path)!r} has SHA-256 {actual}, but weaver_sha256 is {expected.lower()}."
        )


def _read(path: Path, device: str) -> tuple[WeaverConfig, dict[str, Tensor]]:
    """Config and tensors of a file, checked; with device `meta` the numbers are not read."""
    if path.suffix in _TORCH_SUFFIXES:
        return _check(path, *_read_torch(path, device))
    return _check(path, _read_json(path), _read_safetensors(path, device))


def _read_safetensors(path: Path, device: str) -> dict[str, Tensor]:
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            if device != "meta":
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
            parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {
                name: torch.empty(
                    part.get_shape(), dtype=_SAFETENSORS.get(part.get_dtype(), torch.int64), device=device
                )
                for name, part in parts.items()
            }
    except (safetensors.SafetensorError, OSError) as error:
        raise ValueError(
            f"weaver file {str(path)!r} is not a readable safetensors file: {_line(error)}"
        ) from None


def _read_torch(path: Path, device: str) -> tuple[Any, Any]:
    try:
        with path.open("rb") as file:
            is_zip = file.read(4) == b"PK\x03\x04"
        with warnings.catch_warnings(action="ignore"):  # hints for pickle authors; what matters is raised
            content = torch.load(path, map_location=device, weights_only=True, mmap=is_zip)
    except FileNotFoundError:
        raise ValueError(f"weaver file {str(path)!r} does not exist.") from None
    except Exception as error:  # unpickling hostile or broken files raises about anything
        text = str(error)
        foreign = re.search(r"GLOBAL (\S+)", text)
        cause = text.partition("WeightsUnpickler error:")[2] or text
        reason = (
            f"it holds {_line(foreign[1], 80)}, neither a tensor nor a plain value"
            if foreign
            else f"it cannot be read as tensors and plain values ({_line(cause)})"
        )
        raise ValueError(f"weaver file {str(path)!r} is refused: {reason}; nothing in it was run.") from None
    if not isinstance(content, Mapping) or not {"config", "state_dict"} <= set(content):
        raise ValueError(f"weaver file {str(path)!r} must hold a mapping with 'config' and 'state_dict'.")
    return content["config"], content["state_dict"]


def _read_json(path: Path) -> Any:
    candidates = (path.with_suffix(".json"), path.with_name("config.json"))
    for candidate in candidates:
        if candidate.is_file():
            try:
                return json.loads(candidate.read_text())
            except ValueError as error:
                raise ValueError(
                    f"weaver config {str(candidate)!r} is not valid JSON: {_line(error)}"
                ) from None
    raise ValueError(
        f"weaver file {str(path)!r} needs its config beside it, as {' or '.join(map(str, candidates))}."
    )


def _check(path: Path, raw: Any, tensors: Any) -> tuple[WeaverConfig, dict[str, Tensor]]:
    """Config and tensors of a file, or one line that says what is wrong with them."""
    try:
        config = WeaverConfig.from_mapping(raw)
    except ValueError as error:
        raise ValueError(f"weaver file {str(path)!r}: {error}") from None
    if not isinstance(tensors, Mapping) or not all(isinstance(t, Tensor) for t in tensors.values()):
        raise ValueError(f"weaver file {str(path)!r}: state_dict must map names to tensors and nothing else.")
    if config.num_layers > len(tensors):  # before a head of that many blocks is built
        raise ValueError(
            f"weaver file {str(path)!r}: num_layers is {config.num_layers}, with {len(tensors)} tensors."
        )
    with torch.device("meta"):
        expected = WeaverHead(config).state_dict()
    faults = []
    if missing := expected.keys() - tensors.keys():
        faults.append(f"missing tensors: {_brief(missing)}")
    if extra := {str(name) for name in tensors if name not in expected}:
        faults.append(f"unexpected tensors: {_brief(extra)}")
    shared = [name for name in expected if name in tensors]
    wrong = [
        f"{name} is {list(tensors[name].shape)}, must be {list(expected[name].shape)}"
        for name in shared
        if tensors[name].shape != expected[name].shape
    ]
    if wrong:
        faults.append(f"wrong shapes: {_brief(wrong)}")
    if integers := [name for name in shared if tensors[name].dtype not in _SAFETENSORS.values()]:
        faults.append(f"not floating point: {_brief(integers)}")
    if faults:
        raise ValueError(f"weaver file {str(path)!r}: {'; '.join(faults)}.")
    return config, dict(tensors)


def _brief(names: Iterable[str], limit: int = 4) -> str:
    """A bounded, one-line list; names come from a file and may hold anything."""
    names = sorted(names)
    shown = ", ".join(_line(name, 90) for name in names[:limit])
    return shown + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _line(text: object, limit: int = 160) -> str:
    """The first bit of a text, as one printable line."""
    flat = " ".join(str(text).split())
    flat = "".join(char if char.isprintable() else "?" for char in flat)
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"
