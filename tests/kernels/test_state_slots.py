# SPDX-License-Identifier: Apache-2.0
"""Blocks of recurrent states: against plain Python, in tables with garbage behind what a request uses."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from vllm_weaver.kernels.state_slots import SlotBuffers, find_boundaries, locate_states

IMPLS = ("torch", "triton")
POISON = 2**31 - 8


def block_id(group: int, row: int, column: int) -> int:
    return 1 + group * 1_000_000 + row * 1000 + column


@dataclass
class Batch:
    """Requests (base, nodes on the path, tokens at the end of the rows, state index) in tables of `rows` rows
    and `width` columns; ids behind the last column that a request uses are garbage, and row strides larger
    than `width`."""

    requests: list[tuple[int, int, int, int]]
    rows: int
    width: int
    size: int
    device: torch.device
    groups: int = 3
    buffers: SlotBuffers = field(init=False)

    def __post_init__(self) -> None:
        whole = torch.full((self.groups, self.rows, self.width + 3), POISON, dtype=torch.int32)
        for group in range(self.groups):
            for row, (base, nodes, end, _) in enumerate(self.requests):
                used = max(base + nodes, end, 1)
                for column in range(min(self.width, (used - 1) // self.size + 1)):
                    whole[group, row, column] = block_id(group, row, column)
        tables = [table[:, : self.width] for table in whole.to(self.device)]
        self.buffers = SlotBuffers.allocate(tables, self.size)
        for array in self.outputs():
            array.fill_(POISON)

    def outputs(self) -> list[Tensor]:
        b = self.buffers
        return [*b.working, *b.boundary, b.columns, b.boundary_path, b.source, b.target]

    def column(self, which: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor([r[which] for r in self.requests], dtype=dtype, device=self.device)

    def run(self, impl: str, index: torch.dtype) -> None:
        addresses = [array.data_ptr() for array in self.outputs()]
        locate_states(self.buffers, self.column(2), impl=impl)
        base, states = self.column(0, torch.int64), self.column(3, index)
        find_boundaries(self.buffers, base, self.column(1), states, impl=impl)
        assert [array.data_ptr() for array in self.outputs()] == addresses

    def expected(self) -> list[list[int]]:
        """What `outputs` should hold."""
        working = [[0] * self.rows for _ in range(self.groups)]
        boundary = [[POISON] * self.rows for _ in range(self.groups)]
        columns, steps = [-1] * self.rows, [POISON] * self.rows
        source, target = [POISON] * self.rows, [POISON] * self.rows
        for row, (base, nodes, end, state) in enumerate(self.requests):
            at = max(end - 1, 0) // self.size
            columns[row] = at if at < self.width else -1
            # The last end of a block that the path passes or reaches, if it is not the working block's.
            ends = [t for t in range(base + 1, base + nodes + 1) if t % self.size == 0 and t > 0]
            to = ends[-1] // self.size - 1 if ends else -1
            crossed = 0 <= to < self.width and columns[row] >= 0 and to != at and 0 <= state < self.rows
            steps[row] = ends[-1] - base if crossed else 0
            for group in range(self.groups):
                if columns[row] >= 0:
                    working[group][row] = block_id(group, row, at)
                boundary[group][row] = block_id(group, row, to) if crossed else 0
            if 0 <= state < self.rows:
                source[state], target[state] = (at, to) if crossed else (-1, 0)
        return [*working, *boundary, columns, steps, source, target]

    def check(self, impl: str, index: torch.dtype = torch.int64) -> None:
        self.run(impl, index)
        assert [array.flatten().tolist() for array in self.outputs()] == self.expected()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("groups", [1, 2, 3, 5])
@pytest.mark.parametrize(("count", "rows"), [(1, 1), (3, 4), (7, 130), (129, 131)])
def test_random_batches(device: torch.device, count: int, rows: int, groups: int, impl: str) -> None:
    """Trees anywhere, cut ones and requests without a path between them, padding rows behind."""
    rng = random.Random(count * groups)
    size, states, requests = 11, rng.sample(range(rows), count), []
    for state in states:
        base, drafts = rng.randrange(60), rng.randrange(9)
        requests.append((base, rng.randrange(0, drafts + 2), base + 1 + drafts, state))
    batch = Batch(requests, rows, 9, size, device, groups)
    batch.check(impl)
    if count > 7:
        steps = batch.buffers.boundary_path[:count]
        assert 0 < (steps > 0).sum() < count and (steps > 1).any()


@pytest.mark.parametrize("impl", IMPLS)
def test_around_a_boundary(device: torch.device, impl: str) -> None:
    """Paths that end before, at and behind a block's end, with rows that reach the next block or do not."""
    requests = [
        (28, 3, 40, 4),  # 28 + 3 < 32
        (28, 4, 40, 3),  # ends at 32
        (28, 9, 40, 2),  # passes 32
        (28, 4, 32, 1),  # the working block ends there
        (32, 1, 40, 0),  # starts there
        (31, 1, 48, 5),  # the root alone reaches it
        (28, 0, 40, 6),  # no path
    ]
    batch = Batch(requests, 9, 5, 16, device)
    batch.check(impl)
    assert batch.buffers.boundary_path.tolist() == [0, 4, 4, 0, 0, 1, 0, POISON, POISON]
    assert batch.buffers.columns.tolist() == [2, 2, 2, 1, 2, 2, 2, -1, -1]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("end", [-(2**31), 0, 65, 2**31 - 1])
def test_rows_outside_the_table(device: torch.device, end: int, impl: str) -> None:
    """Nothing is read behind it, and nothing crosses; no tokens at all count as column 0."""
    Batch([(60, 6, 80, 1), (60, 6, end, 0), (30, 3, 40, 2)], 4, 4, 16, device).check(impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("base", [-9, 62, 2**31 - 6, 2**40 - 2])
def test_boundaries_outside_the_table(device: torch.device, base: int, impl: str) -> None:
    Batch([(30, 3, 40, 2), (base, 9, 33, 0)], 4, 3, 16, device).check(impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("state", [-1, 4, -(2**31), 2**31 - 1])
def test_a_state_index_out_of_range(device: torch.device, state: int, index: torch.dtype, impl: str) -> None:
    Batch([(30, 3, 40, state), (30, 3, 40, 2)], 4, 3, 16, device).check(impl, index)


def test_one_launch_each(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the number of groups; and nothing else runs on the device."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from vllm_weaver.kernels import state_slots

    batch = Batch([(30, 3, 40, 1), (5, 3, 22, 0)], 9, 5, 16, device)
    arguments = batch.column(2), batch.column(0, torch.int64), batch.column(1), batch.column(3)
    ran: list[str] = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            ran.append(str(func))
            return func(*args, **(kwargs or {}))

    class Counted:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: tuple[int, ...]) -> object:
            return lambda *args, **kwargs: ran.append(self.name)

    for name in ("_locate_states_kernel", "_find_boundaries_kernel"):
        monkeypatch.setattr(state_slots, name, Counted(name))
    with Record():
        locate_states(batch.buffers, arguments[0], impl="triton")
        find_boundaries(batch.buffers, *arguments[1:], impl="triton")
    assert ran == ["_locate_states_kernel", "_find_boundaries_kernel"]


def test_arguments_that_do_not_fit_are_named() -> None:
    table, four = torch.zeros(3, 2, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    with pytest.raises(ValueError, match="0 block tables with blocks of 16 tokens"):
        SlotBuffers.allocate([], 16)
    with pytest.raises(ValueError, match=r"block_table has shape \[3, 1\]; it must be \[3, 2\]"):
        SlotBuffers.allocate([table, table[:, :1]], 16)
    buffers = SlotBuffers.allocate([table], 16)
    with pytest.raises(ValueError, match="the step has 4 requests; the block tables have 3 rows"):
        locate_states(buffers, four)
    with pytest.raises(ValueError, match="seq_lens has dtype torch.int64"):
        locate_states(buffers, four[:3].long())
    with pytest.raises(ValueError, match="base has dtype torch.int32"):
        find_boundaries(buffers, four, four, four)
    with pytest.raises(ValueError, match="the step has 4 requests"):
        find_boundaries(buffers, four.long(), four, four)
    with pytest.raises(ValueError, match=r"num_path has shape \[4\]; it must be \[3\]"):
        find_boundaries(buffers, four[:3].long(), four, four[:3])
