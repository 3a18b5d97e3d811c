# SPDX-License-Identifier: Apache-2.0
"""What demo.py prints: lines of progress, the table of results, and what the table must show."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.e2e.harness import TIE, Reference, difference

MIN_BRANCHING = 0.2  # of the weaver's accepted paths; below, its trees would be chains with ornaments
COLUMNS = (
    "proposal",
    "prompts",
    "tokens",
    "accepted length",
    "branching paths",
    "identical to plain decoding",
)
_start = time.monotonic()


class DemoError(RuntimeError):
    """Something is not as the demo promises; one sentence."""


def say(line: str) -> None:
    """Print a line of progress with the seconds since start."""
    print(f"[{time.monotonic() - _start:4.0f} s] {line}", flush=True)


@dataclass
class Row:
    """One line of the table.

    tau: tokens a target step, the bonus token counted. branching: share of the paths with an accepted draft
    that pass through a child which is not its parent's first; None where it is not known. ties, different:
    prompts that part from plain decoding, at a near-tie or elsewhere.
    """

    proposal: str
    prompts: int = 0
    tokens: int = 0
    tau: float = 1.0
    branching: float | None = None
    ties: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)

    def add(self, name: str, reference: Reference, tokens: Sequence[int]) -> None:
        """Count a prompt's `tokens`, and note where they part from plain decoding."""
        self.prompts += 1
        self.tokens += len(tokens)
        found = difference(reference, tokens)
        if found is not None:
            position, gap = found
            note = f"{name}, token {position}: log-probabilities {gap:.3f} apart"
            (self.ties if gap <= TIE else self.different).append(note)
        elif len(tokens) != len(reference.tokens):
            self.different.append(f"{name}: {len(tokens)} tokens, plain decoding has {len(reference.tokens)}")

    def cells(self) -> tuple[str, ...]:
        """The row's text, one entry a column."""
        same = f"{self.prompts - len(self.different)}/{self.prompts}"
        if self.ties:
            same += f" ({len(self.ties)} near-tie{'s' if len(self.ties) > 1 else ''})"
        branching = "-" if self.branching is None else f"{self.branching:.0%}"
        return self.proposal, str(self.prompts), str(self.tokens), f"{self.tau:.2f}", branching, same


def print_table(rows: Sequence[Row]) -> None:
    """Print the rows under their columns, and below them every near-tie that was counted as identical."""
    lines = [COLUMNS, *(row.cells() for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print()
    for first, *rest in lines:
        print(
            "  ".join([first.ljust(widths[0]), *(c.rjust(w) for c, w in zip(rest, widths[1:], strict=True))])
        )
    print()
    ties = [f"{row.proposal}, {tie}" for row in rows for tie in row.ties]
    if ties:
        print(f"Near-ties: plain decoding found both tokens as likely, to {TIE}; bfloat16 rounding decides.")
    for tie in ties:
        print(f"  {tie}")


def check(rows: Mapping[str, Row]) -> None:
    """Raise DemoError at the first promise that the table does not keep."""
    for row in rows.values():
        if row.different:
            raise DemoError(f"{row.proposal} is not identical to plain decoding: {row.different[0]}")
    chain, weaver, served = rows["chain"], rows["weaver"], rows["served"]
    if not 1 < chain.tau < weaver.tau:
        raise DemoError(
            "accepted lengths must be ordered plain 1 < chain < weaver, "
            f"but chain has {chain.tau:.2f} and weaver {weaver.tau:.2f}"
        )
    if (weaver.branching or 0) < MIN_BRANCHING:
        raise DemoError(
            f"{weaver.branching:.0%} of the weaver's accepted paths branch, less than {MIN_BRANCHING:.0%}"
        )
    if served.tau <= 1:
        raise DemoError("the server accepted no draft")
