# SPDX-License-Identifier: Apache-2.0
"""Sizes of CUDA graphs: batches of whole trees are covered as far as a step reaches, or as the user chose."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests import tiny
from vllm_weaver import cpu


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A real configuration with trees of 33 nodes, as it would be on a GPU before sizes are added."""
    if not torch.cuda.is_available():
        cpu.prepare()
    folder: Path = tmp_path_factory.mktemp("models")
    target, draft = tiny.folder(folder, "hybrid"), tiny.folder(folder, "draft")
    spec = {"method": "dflash_tfm", "model": draft, "num_speculative_tokens": 32, "proposal": "chain"}
    return tiny.engine_args(target, speculative_config=spec).create_engine_config()


def sizes(config: Any, max_num_seqs: int, max_num_batched_tokens: int, before: list[int]) -> list[int]:
    config.scheduler_config.max_num_seqs = max_num_seqs
    config.scheduler_config.max_num_batched_tokens = max_num_batched_tokens
    config.compilation_config.cudagraph_capture_sizes = before
    config.compilation_config.max_cudagraph_capture_size = before[-1] if before else 0
    from vllm_weaver.hooks.config_side import cover_decode_batches

    cover_decode_batches(config)
    return config.compilation_config.cudagraph_capture_sizes


@pytest.mark.parametrize(
    ("seqs", "tokens", "most"), [(1, 2048, 1), (7, 2048, 7), (256, 8192, 248), (64, 500, 15)]
)
def test_every_batch_of_trees_fits_a_graph(config: Any, seqs: int, tokens: int, most: int) -> None:
    found = sizes(config, seqs, tokens, [1, 2, 4, 8])
    assert found == sorted(set(found)) and {1, 2, 4, 8} <= set(found)
    counts = [size // 33 for size in found if size % 33 == 0]
    assert counts[0] == 1 and counts[-1] == most
    steps = zip(counts, counts[1:], strict=False)
    assert all(later <= 2 * earlier or later - earlier <= 16 for earlier, later in steps)
    assert config.compilation_config.max_cudagraph_capture_size == max(8, 33 * most)


def test_eager_stays_eager(config: Any) -> None:
    assert sizes(config, 8, 2048, []) == []


@pytest.mark.parametrize("holder", ["engine_args", "compilation_config"])
@pytest.mark.parametrize("name", ["cudagraph_capture_sizes", "max_cudagraph_capture_size"])
def test_a_choice_of_the_user_counts(config: Any, holder: str, name: str) -> None:
    from vllm_weaver.hooks.config_side import _capture_sizes_given

    none = {"cudagraph_capture_sizes": None, "max_cudagraph_capture_size": None}
    compilation = SimpleNamespace(**none)
    arguments = SimpleNamespace(**none, compilation_config=compilation)
    assert not _capture_sizes_given(arguments)
    setattr(arguments if holder == "engine_args" else compilation, name, 8)
    assert _capture_sizes_given(arguments)
