# SPDX-License-Identifier: Apache-2.0
"""Which steps build vLLM's attention metadata: all but those that replay a whole graph of trees."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config.compilation import CUDAGraphMode

from vllm_weaver.spec_decode.model_state import TreeStateMixin
from vllm_weaver.spec_decode.step import layer_trees

LAYERS = ("attention", "recurrent")


class Upstream:
    """Stands for vLLM's model state."""

    built = 0

    def prepare_attn(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self.built += 1
        return {name: SimpleNamespace(num_actual_tokens=33) for name in (*LAYERS, "of the draft")}


class State(TreeStateMixin, Upstream):  # type: ignore[misc]
    """The tree part in front of it, with a step that was begun."""

    def __init__(self, all_trees: bool) -> None:
        self.step = SimpleNamespace(  # type: ignore[assignment]
            all_trees=all_trees, num_reqs=1, begin=lambda *_: np.array([all_trees])
        )
        self.trees = self._req_states = self._slots = self._verifier = None  # type: ignore[assignment]
        self.attention_layers, self.gdn_layers = {"attention": None}, {"recurrent": None}
        self._captured = False


def prepare(state: State, mode: CUDAGraphMode, for_capture: bool) -> dict[str, Any]:
    batch = SimpleNamespace(
        prefill_len_np=np.zeros(1, dtype=np.int32), idx_mapping_np=np.zeros(1, dtype=np.int32), num_reqs=1,
        prefill_runs_as_decode_np=None,
    )  # fmt: skip
    groups = SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=[name]) for name in LAYERS])
    tables = tuple(torch.full((4, 2), number, dtype=torch.int32) for number in (5, 6))
    return state.prepare_attn(batch, mode, tables, None, [], groups, for_capture)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "mode, all_trees, for_capture, built",
    [
        (CUDAGraphMode.FULL, True, False, 0),
        (CUDAGraphMode.FULL, True, True, 1),  # the capture itself, and dummy runs
        (CUDAGraphMode.FULL, False, False, 1),  # plain decoding rows in a graph of one row each
        (CUDAGraphMode.PIECEWISE, True, False, 1),
        (CUDAGraphMode.NONE, True, False, 1),
    ],
)
def test_only_a_replayed_graph_of_trees_goes_without_metadata(
    mode: CUDAGraphMode, all_trees: bool, for_capture: bool, built: int
) -> None:
    state = State(all_trees)
    metadata = prepare(state, mode, for_capture)
    assert state.built == built
    for name, number in zip(LAYERS, (5, 6), strict=True):
        trees = layer_trees(metadata[name])
        assert trees.step is state.step and trees.state_indices.tolist() == [number]
