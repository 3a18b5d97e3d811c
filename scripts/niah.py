#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Needle in a haystack: is one fact found in long prompts, at every length and depth?

    python scripts/niah.py --url http://127.0.0.1:8000 --up-to 262144 --out results/niah

Lengths are tokens as the server counts them: --lengths, or doubling up to --up-to. Writes OUT.json and
OUT.png; exit status 0 only if at least the share --require of the needles was found and no request failed.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from ops_lib import haystack
from ops_lib.client import Server, ServerError
from ops_lib.report import origin, write_json

SMALLEST = 1024
ANSWER_TOKENS = 64


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="niah.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model")
    parser.add_argument("--up-to", type=int, help="longest prompt (default: what the server takes)")
    parser.add_argument("--lengths", nargs="+", type=int, help="these lengths in place of doubling ones")
    parser.add_argument("--depths", nargs="+", type=float, default=[0.0, 0.25, 0.5, 0.75, 1.0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--require", type=float, default=1.0, help="share that must be found (default 1)")
    parser.add_argument("--completion", action="store_true", help="no chat template")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds without a byte")
    parser.add_argument("--out", type=Path, default=Path("results/niah"))
    arguments = parser.parse_args(words)
    if any(not 0 <= depth <= 1 for depth in arguments.depths) or not 0 <= arguments.require <= 1:
        parser.error("--depths and --require must be from 0 to 1")
    if any(length < 1 for length in (arguments.lengths or [arguments.up_to or 1])):
        parser.error("--lengths and --up-to must be at least 1")
    return arguments


def lengths_of(arguments: argparse.Namespace, limit: int) -> list[int]:
    """Lengths to try, none longer than the server takes together with an answer. Raises ServerError."""
    room = limit - ANSWER_TOKENS
    wanted = arguments.lengths
    if wanted is None:
        longest = min(arguments.up_to or room, room)
        if arguments.up_to and arguments.up_to > room:
            # Up to the context's end is what was meant; the answer needs its room.
            print(f"niah: the longest prompt is {room}: {limit} less an answer", file=sys.stderr)
        wanted = [longest]
        while wanted[0] // 2 >= SMALLEST:
            wanted.insert(0, wanted[0] // 2)
    for length in wanted:
        if length > room:
            raise ServerError(
                f"the server takes {limit} tokens, too few for a prompt of {length} and an answer"
            )
    return sorted(wanted)


def probe(server: Server, length: int, depth: float, seed: int, chat: bool) -> dict[str, Any]:
    """One needle: found or not, with the answer and the time; `error` if the request failed."""
    found: dict[str, Any] = {"length": length, "depth": depth}
    try:
        prompt, number, exact = haystack.of_length(server, length, depth, seed, chat)
        start = time.monotonic()
        body = {"temperature": 0, "max_tokens": ANSWER_TOKENS}
        if chat:
            # Reasoning would need an answer of unknown length.
            messages = [{"role": "user", "content": prompt}]
            answer = server.chat(messages, chat_template_kwargs={"enable_thinking": False}, **body)
        else:
            answer = server.complete(prompt, **body)
    except ServerError as error:
        return {**found, "found": False, "error": str(error)}
    return {
        **found,
        "tokens": exact,
        "found": number in answer.text,
        "answer": answer.text[:200],
        "seconds": round(time.monotonic() - start, 3),
        "first_token_seconds": round(answer.first_seconds, 3),
        "error": None,
    }


def draw(probes: list[dict[str, Any]], path: Path, title: str) -> None:
    """Lengths over depths as PNG, a field a needle. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lengths = sorted({p["length"] for p in probes})
    depths = sorted({p["depth"] for p in probes})
    grid = [[0.0] * len(lengths) for _ in depths]
    for p in probes:
        grid[depths.index(p["depth"])][lengths.index(p["length"])] = 1.0 if p["found"] else 0.0
    figure, axis = pyplot.subplots(figsize=(1.1 * len(lengths) + 2.5, 0.6 * len(depths) + 1.8))
    axis.imshow(grid, vmin=0, vmax=1, cmap="RdYlGn", alpha=0.5, aspect="auto")
    axis.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axis.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
    for p in probes:
        mark = "failed" if p["error"] else "found" if p["found"] else "missed"
        place = (lengths.index(p["length"]), depths.index(p["depth"]))
        axis.text(*place, mark, ha="center", va="center", fontsize="small")
    axis.set(xlabel="prompt tokens", ylabel="depth of the needle", title=title)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> int:
    """Probe and write; 0 if enough was found, 1 if not, 2 if nothing could be asked."""
    arguments = parse()
    server = Server(arguments.url, arguments.model, arguments.timeout)
    try:
        head = origin(server, "niah")
        limit = head["max_model_len"]
        if not limit:
            raise ServerError(f"the server has no model {server.model!r} whose length it tells")
        lengths = lengths_of(arguments, limit)
    except ServerError as error:
        print(f"niah: FAILED: {error}", file=sys.stderr)
        return 2
    probes = []
    for length in lengths:
        for depth in arguments.depths:
            result = probe(server, length, depth, arguments.seed + len(probes), not arguments.completion)
            probes.append(result)
            state = result["error"] or ("found" if result["found"] else f"missed: {result['answer'][:60]!r}")
            print(f"niah: {length} tokens, depth {depth:.0%}: {state}", flush=True)
    found = sum(p["found"] for p in probes)
    failed = sum(p["error"] is not None for p in probes)
    share = found / len(probes)
    write_json(
        arguments.out.with_name(arguments.out.name + ".json"), {**head, "share": share, "probes": probes}
    )
    try:
        title = f"{found} of {len(probes)} found"
        draw(probes, arguments.out.with_name(arguments.out.name + ".png"), title)
    except ImportError:
        print("niah: no picture: matplotlib is not installed (pip install matplotlib)", file=sys.stderr)
    good = share >= arguments.require and not failed
    print(f"niah: {'ok' if good else 'FAILED'}: {found} of {len(probes)} found, {failed} requests failed")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
