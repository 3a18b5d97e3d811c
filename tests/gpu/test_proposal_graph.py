# SPDX-License-Identifier: Apache-2.0
"""Weaver proposals in a CUDA graph, whose kernels read ahead of their turn: nothing that is read is stale."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from bench_lib.kernels_common import Setting  # noqa: E402
from bench_lib.kernels_weaver import Inputs, Weavers  # noqa: E402
from bench_lib.shapes import SHAPES  # noqa: E402

from vllm_weaver.spec_decode import weaver_growth  # noqa: E402
from vllm_weaver.spec_decode.tree import Tree  # noqa: E402

LAUNCHES = (
    "project", "qkv", "gate_up", "path_attention", "candidate_scores", "start_growth", "select_nodes",
)  # fmt: skip
REPLAYS = 100


def one_by_one(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same launch with nothing beside it."""

    def launch(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        torch.cuda.synchronize()
        return result

    return launch


def contents(tree: Tree) -> list[Tensor]:
    return [tree.tokens.clone(), tree.parents.clone(), tree.logprobs.clone(), tree.num_nodes.clone()]


@pytest.fixture(scope="module")
def weavers() -> Weavers:
    return Weavers(Setting(torch.device("cuda"), SHAPES["2b"], cache_bytes=0), 1)


@pytest.mark.parametrize("requests, budget", [(1, 32), (1, 64), (4, 32), (12, 33)])
def test_replays_equal_launches_one_by_one(
    weavers: Weavers, requests: int, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sets of inputs take turns in the same buffers, so that what an earlier replay left is wrong."""
    proposer, given = weavers.proposers[0], Inputs(weavers.setting, requests, 0)
    cases = [Inputs(weavers.setting, requests, seed) for seed in (1, 2)]

    def fill(source: Inputs) -> None:
        for name in ("hidden", "draft_hidden", "logits", "roots"):
            getattr(given, name).copy_(getattr(source, name))

    with torch.inference_mode():
        expected = []
        with monkeypatch.context() as patch:
            for name in LAUNCHES:
                patch.setattr(weaver_growth, name, one_by_one(getattr(weaver_growth, name)))
            for case in cases:
                fill(case)
                expected.append(contents(given.propose(proposer, budget)))
        assert not torch.equal(expected[0][0], expected[1][0])
        given.propose(proposer, budget)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            tree = given.propose(proposer, budget)
        for turn in range(REPLAYS):
            fill(cases[turn % 2])
            graph.replay()
            for found, want in zip(contents(tree), expected[turn % 2], strict=True):
                assert torch.equal(found, want), f"replay {turn}"
