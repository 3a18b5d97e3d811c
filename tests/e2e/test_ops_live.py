# SPDX-License-Identifier: Apache-2.0
"""The scripts of operation against real servers of the demo models; minutes, so with --all only.

Their logic is tested against a stand-in in tests/test_ops_*.py; here, that a real server says what they take
it to say.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Timer
from typing import Any

import pytest

from tests.e2e import harness
from tests.e2e.harness import DEMO
from tests.e2e.server import ROOT, Server, running

sys.path.insert(0, str(ROOT / "scripts"))

import bench  # noqa: E402  (the path comes first)
import smoke_gate  # noqa: E402
from ops_lib import checks, client  # noqa: E402

# A parser whose named calls are JSON: the demo model knows no format of tool calls.
OPTIONS = (
    "--served-model-name", "demo", "--max-model-len", "512", "--max-num-seqs", "4", "--enforce-eager",
    "--no-enable-prefix-caching", "--enable-auto-tool-choice", "--tool-call-parser", "xlam",
    "--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}',
)  # fmt: skip
SPECULATION = ("--speculative-config", json.dumps(harness.trees(16)["speculative_config"]))


pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """One server with trees, one without, and one with trees whose target has one tensor scrambled."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("ops")
    shutil.copytree(DEMO / "target", folder / "scrambled")
    weights = load_file(folder / "scrambled" / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    order = torch.randperm(weights[name].numel(), generator=torch.Generator().manual_seed(0))
    weights[name] = weights[name].flatten()[order].view_as(weights[name]).contiguous()
    save_file(weights, folder / "scrambled" / "model.safetensors")
    found = {
        "trees": Server(folder / "trees", DEMO / "target", *OPTIONS, *SPECULATION),
        "plain": Server(folder / "plain", DEMO / "target", *OPTIONS),
        "scrambled": Server(folder / "wrong", folder / "scrambled", *OPTIONS, *SPECULATION),
    }
    with running(*found.values()):
        yield found


def judge(server: Server, plain: Server | None = None, **more: Any) -> dict[str, checks.Result]:
    expected = smoke_gate.expectations(DEMO / "expectations.json")
    gate = checks.Gate(
        client.Server(f"http://127.0.0.1:{server.port}", more.pop("model", None), 120.0),
        expected,
        plain=client.Server(f"http://127.0.0.1:{plain.port}", None, 120.0) if plain else None,
        **more,
    )
    return {result.name: result for result in checks.run(gate)}


def test_a_right_server_is_green(servers: dict[str, Server]) -> None:
    results = judge(servers["trees"], servers["plain"])
    assert {name: r.status for name, r in results.items()} == dict.fromkeys(checks.CHECKS, "ok"), results


def test_faults_are_red(servers: dict[str, Server]) -> None:
    plain = judge(servers["plain"])
    assert [name for name, r in plain.items() if r.status == "failed"] == ["speculation"], plain
    wrong = judge(servers["trees"], model="other")
    assert [name for name, r in wrong.items() if r.status == "failed"] == ["model"], wrong
    scrambled = judge(servers["scrambled"])
    assert scrambled["canaries"].status == "failed", scrambled


def test_figures_are_those_of_metrics(servers: dict[str, Server], tmp_path: Path) -> None:
    texts = json.loads((DEMO / "prompts.json").read_text())["text"][:3]
    file = tmp_path / "demo.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    url = f"http://127.0.0.1:{servers['trees'].port}"
    words = [
        "--url",
        url,
        "--datasets",
        str(file),
        "--temperature",
        "0",
        "--max-new-tokens",
        "16",
        "--ignore-eos",
    ]
    before = servers["trees"].metrics()
    results = bench.run(bench.parse([*words, "--warmup", "0", "--out", str(tmp_path / "out")]))
    grown = {name: value - before[name] for name, value in servers["trees"].metrics().items()}
    row, samples = results["datasets"]["demo"], results["requests"]["demo"]
    assert (row["errors"], row["tokens"], row["other_tokens"]) == (0, 48, 0)
    assert grown["vllm:generation_tokens_total"] == 48
    assert sum(sample["steps"] for sample in samples) == grown["vllm:spec_decode_num_drafts_total"]
    accepted = grown["vllm:spec_decode_num_accepted_tokens_total"]
    assert row["tau_pooled"] == pytest.approx(1 + accepted / grown["vllm:spec_decode_num_drafts_total"])
    assert row["tau"] == pytest.approx(sum(16 / sample["steps"] for sample in samples) / 3)


def test_a_server_killed_mid_stream_is_red(servers: dict[str, Server]) -> None:
    """The last one: it ends the plain server."""
    kill = Timer(2.0, servers["plain"].end)
    kill.start()
    start = time.monotonic()
    results = judge(servers["plain"], speculation=False)
    kill.join()
    broken = [r for r in results.values() if r.status == "failed"]
    assert len(broken) == 1 and broken[0].name in ("generation", "canaries"), results
    assert "connection was lost" in broken[0].detail or "no answer" in broken[0].detail
    assert results["alive"].status == "skipped" and time.monotonic() - start < 120
