# SPDX-License-Identifier: Apache-2.0
"""Where a benchmark's numbers come from: machine, versions, commit and command, written beside them."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]


class BenchmarkError(Exception):
    """Why there is nothing to report; the message is one sentence for the user."""


def say(text: str) -> None:
    """A line of progress on standard error."""
    print(f"bench: {text}", file=sys.stderr, flush=True)


def commit() -> str:
    """The checkout's commit, marked when it has changes; where there is no git, `VLLM_WEAVER_COMMIT`."""
    named = os.environ.get("VLLM_WEAVER_COMMIT")
    if named:
        return named
    try:
        options = {"cwd": ROOT, "capture_output": True, "text": True, "check": True}
        head = subprocess.run(["git", "rev-parse", "HEAD"], **options).stdout.strip()  # type: ignore[call-overload]
        changed = subprocess.run(["git", "status", "--porcelain"], **options).stdout.strip()  # type: ignore[call-overload]
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+changes" if changed else "")


def provenance(**more: Any) -> dict[str, Any]:
    """Facts to store with every result."""

    def version(name: str) -> str | None:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return None

    device = torch.cuda.get_device_properties(0)
    return {
        "gpu": device.name,
        "compute_capability": f"{device.major}.{device.minor}",
        "multiprocessors": device.multi_processor_count,
        "cuda": torch.version.cuda,
        "versions": {name: version(name) for name in ("vllm", "torch", "triton", "transformers")},
        "python": sys.version.split()[0],
        "commit": commit(),
        "command": " ".join([Path(sys.executable).name, *sys.argv]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **more,
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes the results, in full or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    partial.replace(path)
    say(f"wrote {path}")


def table(columns: list[str], rows: list[list[Any]]) -> str:
    """An aligned text table; numbers to the right."""
    cells = [columns, *([f"{x:.3f}" if isinstance(x, float) else str(x) for x in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    lines = []
    for row in cells:
        fields = [
            cell.ljust(w) if i == 0 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(fields).rstrip())
    lines.insert(1, "  ".join("-" * w for w in widths))
    return "\n".join(lines)
