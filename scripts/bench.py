#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Throughput and accepted length of a running server, dataset by dataset, as the Weaver paper defines them.

    python scripts/bench.py --url http://127.0.0.1:8000 --datasets mtbench gsm8k humaneval --out results/tfm
    python scripts/bench.py ... --baseline results/ar.json      # or: --baseline mtbench=89.9 gsm8k=90.2

Writes OUT.json (every request), OUT.csv and OUT.md (the table). Datasets: see --list. Needs httpx and
prometheus_client, which vLLM brings.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ops_lib import datasets
from ops_lib.client import Server, ServerError
from ops_lib.datasets import DatasetError
from ops_lib.measure import Measured, Settings, ask, macro, measure
from ops_lib.report import ReportError, baseline_of, markdown, origin, write_all


class BenchError(Exception):
    """Why there is nothing to report; the message is one sentence for the user."""


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="bench.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default %(default)s)")
    parser.add_argument("--model", help="served name (default: the server's first)")
    parser.add_argument(
        "--datasets", nargs="+", default=[], metavar="NAME", help="names (--list), JSONL files"
    )
    parser.add_argument("--spec-bench", type=Path, help="question.jsonl of Spec-Bench, for the spec_ names")
    parser.add_argument("--list", action="store_true", help="name the datasets and end")
    parser.add_argument("--dataset-lock", type=Path, help="versions of the datasets (default: beside OUT)")
    parser.add_argument("--out", type=Path, default=Path("results/bench"), help="default %(default)s")
    parser.add_argument("--label", default="server", help="the method's name in the table")
    parser.add_argument("--baseline", nargs="+", default=[], metavar="FILE|NAME=RATE", help="for speed-ups")
    parser.add_argument("--concurrency", type=int, default=1, help="requests at a time (default 1)")
    parser.add_argument("--prompts", type=int, default=80, help="at most so many a dataset (default 80)")
    parser.add_argument(
        "--min-prompts", type=int, default=8, help="before --precision may end it (default 8)"
    )
    parser.add_argument(
        "--precision", type=float, default=0.0, metavar="SHARE",
        help="end a dataset once the 95 %% interval of its throughput is within this share, such as 0.03",
    )  # fmt: skip
    parser.add_argument("--max-new-tokens", type=int, default=4096)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0, help="of the order of prompts and of sampling")
    parser.add_argument("--reasoning", choices=("on", "off", "default"), default="default")
    parser.add_argument("--ignore-eos", action="store_true", help="always --max-new-tokens tokens")
    parser.add_argument("--warmup", type=int, default=2, help="requests before anything counts (default 2)")
    parser.add_argument("--keep-cache", action="store_true", help="do not flush cached prefixes")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds without a byte are an error")
    parser.add_argument("--ladder", nargs="+", type=int, default=[], metavar="N", help="also run `vllm bench "
                        "serve` with random prompts at these concurrencies")  # fmt: skip
    parser.add_argument("--ladder-vllm", default="vllm", help="its command (default %(default)s)")
    parser.add_argument("--ladder-tokenizer", help="folder or repository (default: the server's model)")
    parser.add_argument("--ladder-lengths", nargs=2, type=int, default=[1024, 256], metavar=("IN", "OUT"))
    arguments = parser.parse_args(words)
    if arguments.list:
        print("\n".join(datasets.NAMES))
        raise SystemExit(0)
    if not arguments.datasets and not arguments.ladder:
        parser.error("name --datasets (see --list), or a --ladder")
    for name in ("concurrency", "prompts", "min_prompts", "max_new_tokens"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(arguments, name)} must be at least 1")
    if not 0 <= arguments.precision < 1:
        parser.error(f"--precision {arguments.precision} must be from 0 up to 1")
    if arguments.precision and arguments.concurrency > 1:
        parser.error("--precision needs --concurrency 1: requests that run together are not independent")
    return arguments


def settings_of(arguments: argparse.Namespace, server: Server) -> Settings:
    """How to ask. Raises ServerError if cached prefixes would have to be flushed and cannot be."""
    caching = server.prefix_caching()
    flush = not arguments.keep_cache and caching is not False
    if flush:
        server.flush_cache()
    body: dict[str, Any] = {}
    if arguments.reasoning != "default":
        body["chat_template_kwargs"] = {"enable_thinking": arguments.reasoning == "on"}
    return Settings(
        max_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        seed=arguments.seed,
        concurrency=arguments.concurrency,
        flush=flush,
        ignore_eos=arguments.ignore_eos,
        body=body,
        min_prompts=arguments.min_prompts,
        max_prompts=arguments.prompts,
        precision=arguments.precision,
    )


@contextlib.contextmanager
def progress(name: str, total: int) -> Any:
    """A progress bar of one dataset; yields the function to call after each request."""
    from tqdm import tqdm

    with tqdm(total=total, desc=name, file=sys.stderr, mininterval=0.5) as bar:

        def shown(measured: Measured) -> None:
            bar.update(1)
            if measured.seconds:
                bar.set_postfix_str(
                    f"{measured.tokens / measured.seconds:.1f} tok/s, {len(measured.errors)} errors"
                )

        yield shown


def ladder(arguments: argparse.Namespace, server: Server) -> list[dict[str, Any]]:
    """`vllm bench serve` at each concurrency: decode tokens a second (1000 / mean TPOT) and in all.

    Raises BenchError if it does not run to its end.
    """
    tokenizer = arguments.ladder_tokenizer
    if tokenizer is None:  # where the server has its model from
        tokenizer = next(card["root"] for card in server.models() if card["id"] == server.model)
    length_in, length_out = arguments.ladder_lengths
    rows = []
    for concurrency in arguments.ladder:
        file = arguments.out.with_name(f"{arguments.out.name}.ladder-{concurrency}.json").resolve()
        file.parent.mkdir(parents=True, exist_ok=True)
        command = [
            *shlex.split(arguments.ladder_vllm), "bench", "serve", "--backend", "openai",
            "--base-url", server.url, "--model", server.model, "--tokenizer", tokenizer,
            "--dataset-name", "random", "--random-input-len", str(length_in),
            "--random-output-len", str(length_out), "--num-prompts", str(max(8, 4 * concurrency)),
            "--max-concurrency", str(concurrency), "--temperature", "0", "--seed", str(arguments.seed),
            "--ignore-eos", "--disable-tqdm", "--save-result", "--result-dir", str(file.parent),
            "--result-filename", file.name,
        ]  # fmt: skip
        print(f"bench: {shlex.join(command)}", file=sys.stderr, flush=True)
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0 or not file.is_file():
            last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
            raise BenchError(f"`vllm bench serve` at concurrency {concurrency} failed: {last[:200]}")
        found = json.loads(file.read_text())
        rows.append(
            {
                "concurrency": concurrency,
                "decode_tokens_a_second": 1000 / found["mean_tpot_ms"],
                "total_tokens_a_second": found["output_throughput"],
                "completed": found["completed"],
                "file": file.name,
            }
        )
    return rows


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure everything that was asked for; the content of OUT.json. Raises an error of one sentence."""
    baseline = baseline_of(arguments.baseline)
    lock = datasets.Lock(arguments.dataset_lock or arguments.out.with_name("datasets.lock.json"))
    loaded = {
        name: datasets.load(name, lock, arguments.seed, arguments.spec_bench) for name in arguments.datasets
    }
    server = Server(arguments.url, arguments.model, arguments.timeout)
    settings = settings_of(arguments, server)
    for index, prompt in enumerate(next(iter(loaded.values()))[0][: arguments.warmup] if loaded else []):
        ask(server, prompt, settings, index)
    labels = [name if name in datasets.NAMES else Path(name).stem for name in loaded]
    if len(set(labels)) < len(labels):
        raise BenchError(f"two datasets would have one name in the table: {', '.join(sorted(labels))}")
    rows, requests = {}, {}
    for label, (prompts, version) in zip(labels, loaded.values(), strict=True):
        with progress(label, min(len(prompts), settings.max_prompts)) as shown:
            measured = measure(server, label, prompts, settings, shown)
        row = measured.summary()
        if row["other_tokens"] and not row["errors"]:
            others = f"{row['other_tokens']:.0f} tokens of other clients"
            print(f"bench: {label}: the server made {others} meanwhile; repeat it alone", file=sys.stderr)
        old = baseline.get(label)
        row["speedup"] = row["throughput"] / old if old and row["throughput"] else None
        row["version"] = version
        rows[label] = row
        requests[label] = [asdict(sample) for sample in measured.samples]
    return {
        **origin(server, arguments.label),
        "settings": asdict(settings),
        "baseline": baseline,
        "datasets": rows,
        "macro": macro(rows) if rows else None,
        "ladder": ladder(arguments, server),
        "ladder_lengths": arguments.ladder_lengths,
        "requests": requests,
    }


def main() -> int:
    """Measure and write; 0 if every request was answered, 1 if some failed, 2 if nothing came of it."""
    arguments = parse()
    start = time.monotonic()
    try:
        results = run(arguments)
    except (BenchError, ReportError, DatasetError, ServerError) as error:
        print(f"bench: FAILED: {error}", file=sys.stderr)
        return 2
    results["total_seconds"] = time.monotonic() - start
    write_all(arguments.out, results)
    print(markdown(results))
    errors = sum(row["errors"] for row in results["datasets"].values())
    if errors:
        print(f"bench: {errors} requests failed; the figures are of the others", file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    raise SystemExit(main())
