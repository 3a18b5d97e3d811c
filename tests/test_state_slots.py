# SPDX-License-Identifier: Apache-2.0
"""When the host may leave out the boundaries of a step: against every possible base and path."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vllm_weaver.spec_decode.state_slots import StateSlots


@pytest.mark.parametrize("unsettled", [0, 1, 5, 13, 40])
@pytest.mark.parametrize(("size", "longest"), [(5, 5), (16, 4), (16, 1)])
def test_steps_without_a_boundary_are_known(size: int, longest: int, unsettled: int) -> None:
    slots = StateSlots([torch.zeros(4, 2, dtype=torch.int32)], size, longest, unsettled)
    counts = np.arange(1, 4 * size, dtype=np.int32)
    crosses = [
        any(
            (base + nodes) // size > base // size
            for base in range(max(0, count - unsettled), count + 1)
            for nodes in range(1, longest + 1)
        )
        for count in counts.tolist()
    ]
    assert [slots.may_cross(counts[i : i + 1]) for i in range(len(counts))] == crosses
    assert slots.may_cross(counts) == any(crosses)
    assert not slots.may_cross(counts[~np.array(crosses)]), "of several requests, none, or no request at all"


def test_a_path_that_may_cross_two_boundaries_is_refused() -> None:
    tables = [torch.zeros(1, 2, dtype=torch.int32)]
    with pytest.raises(ValueError, match="blocks of 8 tokens cannot keep the states within an accepted path"):
        StateSlots(tables, 8, 9, 0)
