# SPDX-License-Identifier: Apache-2.0
"""What a process holds in memory, and whether it holds more the more requests it has served.

Measured are live bytes, not the size of the process: after a garbage collection, what native code has from
malloc, how many blocks Python's own allocator has given out, and what torch has on the GPU. Free memory that
an allocator keeps, and holes between live objects, are no part of it.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import psutil
import torch

# Growth a request that is no leak: two measurements of one state differ by a few KiB.
MOST = {"native": 2048.0, "python": 16.0, "device": 256.0}
UNITS = {"native": "bytes from malloc", "python": "Python blocks", "device": "bytes on the GPU"}
# Without as many measurements, and as many requests in the second half of them, there is no verdict: the
# first half is warm-up, and a few KiB more or less are much for a few requests.
LEAST, LEAST_REQUESTS = 8, 30


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks",
            "keepcost",
        )
    ]  # fmt: skip


@dataclass(frozen=True)
class Sample:
    """Live memory after `finished` requests; native and device in bytes, python in blocks of its allocator
    (up to 512 bytes each), rss the size of the process."""

    finished: int
    native: int
    python: int
    device: int
    rss: int


def measure(finished: int) -> Sample:
    """The live memory of this process. Needs glibc 2.33 or later."""
    gc.collect()
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        raise SystemExit("the memory check needs mallinfo2 of glibc 2.33 or later, which this machine lacks")
    libc.malloc_trim(0)
    libc.mallinfo2.restype = _Mallinfo2
    info = libc.mallinfo2()
    device = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    return Sample(
        finished,
        info.uordblks + info.hblkhd,
        sys.getallocatedblocks(),
        int(device),
        int(psutil.Process().memory_info().rss),
    )


def enough(samples: Sequence[Sample]) -> bool:
    """Whether a run was long enough for a verdict."""
    served = samples[-1].finished - samples[len(samples) // 2].finished if samples else 0
    return len(samples) >= LEAST and served >= LEAST_REQUESTS


def growth(samples: Sequence[Sample], what: str) -> float:
    """Growth a request of `what` (a field of Sample): the median over the pauses of the second half. A leak
    grows between all of them; a table that was enlarged does so once."""
    half = samples[len(samples) // 2 :]
    rates = [
        (getattr(later, what) - getattr(earlier, what)) / (later.finished - earlier.finished)
        for earlier, later in itertools.pairwise(half)
        if later.finished > earlier.finished
    ]
    return statistics.median(rates) if rates else 0.0


def summary(samples: Sequence[Sample]) -> str:
    """One line for people."""
    if not samples:
        return "memory: not measured"
    mib = [f"{(s.native + s.device) / 2**20:.1f}" for s in samples]
    rates = ", ".join(f"{growth(samples, what):.0f} {unit}" for what, unit in UNITS.items())
    verdict = f"{rates} more a request in the second half" if enough(samples) else "too short for a verdict"
    first, last = (round(sample.rss / 2**20) for sample in (samples[0], samples[-1]))
    return f"live memory in pauses (MiB): {', '.join(mib)}; process {first} to {last}; {verdict}"


def leaks(samples: Sequence[Sample]) -> list[str]:
    """A sentence for each kind of memory that grew more than `MOST`; none if there is no verdict."""
    if not enough(samples):
        return []
    rates = {what: growth(samples, what) for what in MOST}
    return [
        f"memory: {rates[what]:.0f} {UNITS[what]} more a request, at most {most:.0f} are no leak"
        for what, most in MOST.items()
        if rates[what] > most
    ]
