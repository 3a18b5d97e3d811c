#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Is a running server really right? One line a check; exit status 0 only if none failed.

    python scripts/smoke_gate.py --url http://127.0.0.1:8000 [--plain-url URL] [--json FILE]

A server that answers /health may still die in its first forward pass, answer nonsense, or decode without the
speculation that was meant. --expect names what another model should say (default: an instruction-tuned one).
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from ops_lib import checks
from ops_lib.checks import Gate, Result
from ops_lib.client import Server

EXPECTATIONS = Path(__file__).resolve().parent / "ops_lib" / "expectations.json"
KEYS = {"mode", "max_tokens", "accepted_length", "tool_choice", "long_context", "canaries"}


def expectations(path: Path) -> dict[str, object]:
    """The file of expectations; ValueError (one sentence) if it cannot be one."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"--expect {path}: {error}") from None
    missing = sorted(KEYS - set(found))
    if missing:
        raise ValueError(f"--expect {path} lacks {', '.join(missing)}; see {EXPECTATIONS.name}")
    if found["mode"] not in ("chat", "completion") or not found["canaries"]:
        raise ValueError(f"--expect {path}: mode must be chat or completion, and there must be canaries")
    return dict(found)


def show(result: Result) -> None:
    """One line of the report."""
    mark = {"ok": "ok", "failed": "FAILED", "skipped": "skipped"}[result.status]
    print(f"{mark:8} {result.name:13} {result.seconds:7.1f} s  {result.detail}", flush=True)


def main() -> int:
    """Run the checks; 0 if none failed, 1 if one did, 2 on a wrong option."""
    parser = argparse.ArgumentParser(
        prog="smoke_gate.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default %(default)s)")
    parser.add_argument("--model", help="the name that must be served (default: whatever is)")
    parser.add_argument("--plain-url", help="a server of the same model without speculation, to compare with")
    parser.add_argument("--no-speculation", action="store_true", help="the server should make no drafts")
    parser.add_argument("--expect", type=Path, default=EXPECTATIONS, help="what the model should say")
    parser.add_argument("--long-tokens", type=int, help="length of the long prompt (default 8192)")
    parser.add_argument("--first-timeout", type=float, default=900.0, help="seconds a first request may take")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds without a byte in later ones")
    parser.add_argument("--skip", action="append", default=[], choices=tuple(checks.CHECKS), metavar="CHECK")
    parser.add_argument("--json", type=Path, dest="report", help="write the results there")
    arguments = parser.parse_args()
    try:
        expected = expectations(arguments.expect)
    except ValueError as error:
        parser.error(str(error))
    waits = max(arguments.timeout, arguments.first_timeout)
    gate = Gate(
        Server(arguments.url, arguments.model, waits),
        expected,
        speculation=not arguments.no_speculation,
        plain=Server(arguments.plain_url, None, arguments.timeout) if arguments.plain_url else None,
        first_timeout=arguments.first_timeout,
        long_tokens=arguments.long_tokens,
        say=lambda text: print(f"smoke: {text}", file=sys.stderr, flush=True),
    )
    results = checks.run(gate, arguments.skip, show)
    failed = [result.name for result in results if result.status == "failed"]
    if arguments.report is not None:
        content = {
            "ok": not failed,
            "url": arguments.url,
            "checks": [asdict(result) for result in results],
        }
        arguments.report.parent.mkdir(parents=True, exist_ok=True)
        arguments.report.write_text(json.dumps(content, indent=1) + "\n")
    skipped = sum(result.status == "skipped" for result in results)
    verdict = f"FAILED: {', '.join(failed)}" if failed else "ok"
    print(f"smoke: {verdict}" + (f" ({skipped} skipped)" if skipped else ""), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
