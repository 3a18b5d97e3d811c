# SPDX-License-Identifier: Apache-2.0
"""Prompts to measure with: the paper's datasets and Spec-Bench, at a pinned revision, or a local JSONL file.

A name on the hub can get new content. The first use of a dataset notes its commit (of a file: its SHA-256)
in a lock file; later uses take exactly that, or say that it is not to be had.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .measure import Prompt

SPEC_BENCH_FILE = "spec_bench"
# Categories of Spec-Bench's question.jsonl; its first is MT-Bench's own eight together.
_MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
SPEC_BENCH = {
    "spec_mt": _MT_BENCH,
    "spec_translation": ("translation",),
    "spec_summarization": ("summarization",),
    "spec_qa": ("qa",),
    "spec_math": ("math_reasoning",),
    "spec_rag": ("rag",),
}


class DatasetError(Exception):
    """Why there are no prompts; the message is one sentence for the user."""


@dataclass(frozen=True)
class HubDataset:
    """A dataset repository on the hub: `load_dataset(repo, config, split)`, or one JSONL `file` of it.

    `turns` makes the user's turns from a row; an empty list skips it.
    """

    repo: str
    split: str
    turns: Callable[[Mapping[str, Any]], list[str]]
    config: str | None = None
    file: str | None = None


def _column(name: str, before: str = "") -> Callable[[Mapping[str, Any]], list[str]]:
    return lambda row: [before + row[name]] if row[name] else []


def _sharegpt(row: Mapping[str, Any]) -> list[str]:
    first = next((turn["value"] for turn in row["conversations"] if turn["from"] == "human"), "")
    return [first] if first.strip() else []


_BOXED = "Solve the problem. Put the final answer into \\boxed{}.\n\n"
_PYTHON = "Write a Python program. Answer with code.\n\n"
PAPER: dict[str, HubDataset] = {
    "mtbench": HubDataset("HuggingFaceH4/mt_bench_prompts", "train", lambda row: list(row["prompt"])),
    # First questions of shared conversations.
    "sharechat": HubDataset(
        "anon8231489123/ShareGPT_Vicuna_unfiltered", "train", _sharegpt,
        file="ShareGPT_V3_unfiltered_cleaned_split.json",
    ),
    "gsm8k": HubDataset("openai/gsm8k", "test", _column("question", _BOXED), config="main"),
    "math500": HubDataset("HuggingFaceH4/MATH-500", "test", _column("problem", _BOXED)),
    "aime25": HubDataset("math-ai/aime25", "test", _column("problem", _BOXED)),
    "humaneval": HubDataset(
        "openai/openai_humaneval", "test", _column("prompt", "Complete this Python function.\n\n")
    ),
    "mbpp": HubDataset("google-research-datasets/mbpp", "test", _column("text", _PYTHON), config="full"),
    "livecodebench": HubDataset(
        "livecodebench/code_generation_lite", "test", _column("question_content", _PYTHON),
        file="test6.jsonl",
    ),
}  # fmt: skip
NAMES = (*PAPER, *SPEC_BENCH)


class Lock:
    """The lock file: for each dataset the revision or hash that it has been read at."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.known: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
        except ValueError as error:
            raise DatasetError(f"--dataset-lock {path} is not JSON: {error}") from None

    def note(self, name: str, version: str) -> None:
        """Note a version; DatasetError if another one is noted already."""
        old = self.known.get(name)
        if old == version:
            return
        if old is not None:
            raise DatasetError(
                f"{name} is now {version[:16]}, but {self.path} has {old[:16]}: results would not be "
                "comparable; get that version, or use another --dataset-lock"
            )
        self.known[name] = version
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.known, indent=1, sort_keys=True) + "\n")


def load(name: str, lock: Lock, seed: int, spec_bench: Path | None = None) -> tuple[list[Prompt], str]:
    """All prompts of a dataset in an order that `seed` decides, and the version they are of.

    `name`: one of NAMES, or the path of a JSONL file. Raises DatasetError.
    """
    if name in SPEC_BENCH:
        if spec_bench is None:
            raise DatasetError(
                f"{name} needs --spec-bench FILE, the question.jsonl of github.com/hemingkx/Spec-Bench"
            )
        prompts, version = _jsonl(spec_bench, SPEC_BENCH[name]), _sha256(spec_bench)
        lock.note(SPEC_BENCH_FILE, version)
    elif name in PAPER:
        prompts, version = _from_hub(name, PAPER[name], lock)
    elif Path(name).is_file():
        prompts, version = _jsonl(Path(name)), _sha256(Path(name))
        lock.note(str(Path(name).resolve()), version)
    else:
        raise DatasetError(
            f"dataset {name!r} is neither a JSONL file that exists nor one of {', '.join(NAMES)}"
        )
    if not prompts:
        raise DatasetError(f"{name} has no prompts")
    random.Random(seed).shuffle(prompts)
    return prompts, version


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _user(turns: list[str]) -> Prompt:
    return [{"role": "user", "content": turn} for turn in turns]


def _jsonl(path: Path, categories: tuple[str, ...] | None = None) -> list[Prompt]:
    """Prompts of a JSONL file; each row has `messages`, `turns` (user turns), `prompt` (one user turn), or
    `text` (to go on from, without a chat template)."""
    prompts = []
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise DatasetError(f"{path} cannot be read: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if categories is not None and row["category"] not in categories:
                continue
            prompts.append(_row(row))
        except (ValueError, KeyError, TypeError) as error:
            raise DatasetError(
                f"{path}, line {number}: {error}; a row is an object with messages, turns, prompt or text"
            ) from None
    return prompts


def _row(row: Mapping[str, Any]) -> Prompt:
    if "messages" in row:
        return [{"role": message["role"], "content": message["content"]} for message in row["messages"]]
    if "turns" in row:
        return _user(list(row["turns"]))
    if "prompt" in row:
        return _user([row["prompt"]])
    return [{"role": "text", "content": row["text"]}]


def _from_hub(name: str, dataset: HubDataset, lock: Lock) -> tuple[list[Prompt], str]:
    try:
        import huggingface_hub
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled
    except ImportError:
        raise DatasetError(f"{name} comes from the hub: pip install huggingface_hub") from None
    revision = lock.known.get(name)
    try:
        if revision is None:
            revision = str(huggingface_hub.HfApi().dataset_info(dataset.repo).sha)
        rows = _rows(name, dataset, revision)
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        raise DatasetError(
            f"{name} ({dataset.repo}) cannot be had: {' '.join(str(error).split())[:200]}; "
            "log in where it is gated, or use a local JSONL file"
        ) from None
    lock.note(name, revision)
    return [_user(turns) for row in rows if (turns := dataset.turns(row))], revision


def _rows(name: str, dataset: HubDataset, revision: str) -> Any:
    if dataset.file is not None:
        import huggingface_hub

        path = huggingface_hub.hf_hub_download(
            dataset.repo, dataset.file, repo_type="dataset", revision=revision
        )
        text = Path(path).read_text()
        if dataset.file.endswith(".jsonl"):
            return [json.loads(line) for line in text.splitlines() if line.strip()]
        return json.loads(text)
    try:
        import datasets
    except ImportError:
        raise DatasetError(f"{name} needs the package datasets: pip install datasets") from None
    return datasets.load_dataset(dataset.repo, dataset.config, split=dataset.split, revision=revision)
