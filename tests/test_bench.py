# SPDX-License-Identifier: Apache-2.0
"""The benchmarks' own parts: floors, profile parts, tables, shapes, and kernel cases at tiny sizes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))  # as for the scripts themselves

import bench_step
from bench_lib import (
    kernels_accept,
    kernels_attention,
    kernels_common,
    kernels_floor,
    kernels_gdn,
    kernels_step,
    kernels_weaver,
    plot,
    provenance,
)
from bench_lib.kernels_common import Case, Setting
from bench_lib.parts import Kernel, break_down, kind_of, slowest
from bench_lib.shapes import BLOCK, SHAPES, Shape, draft_config, target_config

from vllm_weaver.kernels.gdn_buffers import GdnShape
from vllm_weaver.spec_decode.weaver import WeaverConfig, WeaverHead

ROOT = Path(__file__).resolve().parents[1]
FAMILIES = (kernels_gdn, kernels_attention, kernels_weaver, kernels_step, kernels_accept)
NAMES = [(family, name) for family in FAMILIES for name in family.NAMES]
NO_VLLM = "none: ImportError: no module named vllm"
CPU_ONLY = pytest.mark.skipif(torch.cuda.is_available(), reason="beside a GPU the interpreter is off")

# --- a step's profile -------------------------------------------------------------------------------------


def kernels(*spans: tuple[str, float, float, int]) -> list[Kernel]:
    return [Kernel(*span) for span in spans]


def test_parts_of_single_launches_and_idle_time() -> None:
    """Overlapping kernels leave no idle time, gaps do; all of it is divided by the steps."""
    found = break_down(
        kernels(
            ("tree_attention", 0.0, 1000.0, 1), ("nvjet_tst", 500.0, 1000.0, 2),
            ("nvjet_tst", 3500.0, 500.0, 3),
        ),
        2,
    )  # fmt: skip
    assert found == {"eager: attention": 0.5, "eager: matrix products": 0.5, "idle": 1.0, "total": 2.0}


def test_parts_by_the_graph_that_they_ran_in() -> None:
    """The long graph is the target's, the other the draft's; a launch of few kernels is none."""
    spans = [("gdn_solve_kernel", 100.0 * i, 100.0, 1) for i in range(30)]
    spans += [("_scores_weaver", 3000.0 + 10 * i, 10.0, 2) for i in range(30)]
    spans += [("fill_step", 3300.0 + 10 * i, 10.0, 3) for i in range(20)]
    found = break_down(kernels(*spans), 1)
    assert found["verify: GDN"] == pytest.approx(3.0) and found["draft: Weaver"] == pytest.approx(0.3)
    assert found["eager: walk and commit"] == pytest.approx(0.2)
    assert found["idle"] == 0 and found["total"] == pytest.approx(3.5)


def test_nothing_profiled() -> None:
    assert break_down([], 1) == {"total": 0.0}


def test_slowest_kernels_come_first() -> None:
    found = slowest(kernels(("a", 0, 10, 1), ("b", 10, 25, 2), ("a", 35, 10, 3)), 2)
    assert found == [("b", 0.0125, 0.5), ("a", 0.01, 1.0)]


@pytest.mark.parametrize(
    "name, kind",
    [
        ("gdn_prepare_kernel", "GDN"),
        ("_causal_conv1d_update_kernel", "GDN"),
        ("fused_sigmoid_gating_delta_rule_update_kernel", "GDN"),
        ("_tree_attention_kernel", "attention"),
        ("void flash_fwd_splitkv", "attention"),
        ("_start_frontier", "Weaver"),
        ("_collect_kernel", "pool"),
        ("_bound_kernel", "pool"),
        ("combine_kernel", "attention"),
        *((f"_{name}_kernel", "Weaver") for name in ("project", "qkv", "path_attention", "gate_up")),
        *((f"_{name}_kernel", "Weaver") for name in ("scores", "select", "start")),
        ("_store_trees_kernel", "walk and commit"),
        ("_greedy_walk_kernel", "walk and commit"),
        ("_kv_compact_kernel", "walk and commit"),
        ("nvjet_tst_128x8", "matrix products"),
        ("triton_poi_fused_add_0", "other"),
    ],
)
def test_kinds_of_kernels(name: str, kind: str) -> None:
    assert kind_of(name) == kind


# --- tables, provenance, shapes ---------------------------------------------------------------------------


def test_table_aligns_numbers_to_the_right() -> None:
    text = provenance.table(["arm", "ms"], [["plain", 1.5], ["a longer name", 12]])
    assert text.splitlines() == [
        "arm               ms",
        "-------------  -----",
        "plain          1.500",
        "a longer name     12",
    ]


def test_commit_from_the_environment_from_git_and_unknown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VLLM_WEAVER_COMMIT", "abc")
    assert provenance.commit() == "abc"
    monkeypatch.delenv("VLLM_WEAVER_COMMIT")
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert provenance.commit() == "unknown"
    monkeypatch.setenv("PATH", "")
    assert provenance.commit() == "unknown"


def parameters(config: dict[str, Any]) -> int:
    """Parameters of a target of this configuration, norms left out."""
    d = config["hidden_size"]
    q, kv = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    heads = config["linear_num_value_heads"]
    values = heads * config["linear_value_head_dim"]
    attention = d * (q * (2 if config["attn_output_gate"] else 1) + 2 * kv) + q * d
    gdn = d * (2 * keys + 2 * values + 2 * heads) + values * d
    gdn += (2 * keys + values) * config["linear_conv_kernel_dim"]
    kinds = config["layer_types"]
    assert len(kinds) == config["num_hidden_layers"]
    mixers = sum(attention if kind == "full_attention" else gdn for kind in kinds)
    return mixers + len(kinds) * 3 * d * config["intermediate_size"] + 2 * config["vocab_size"] * d


def test_target_has_27_billion_parameters() -> None:
    assert parameters(target_config(SHAPES["27b"])) == pytest.approx(27e9, rel=0.02)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_draft_reads_layers_of_the_target(shape: Shape) -> None:
    config = draft_config(shape)
    ids = config["dflash_config"]["target_layer_ids"]
    assert len(set(ids)) == len(ids) == shape.draft_layers
    assert ids == sorted(ids) and ids[0] >= 0 and ids[-1] < shape.layers == config["num_target_layers"]
    assert config["block_size"] == BLOCK and config["vocab_size"] == shape.vocab


def weaver_config(shape: Shape) -> WeaverConfig:
    return WeaverConfig(
        shape.hidden, shape.hidden, shape.rank, shape.weaver_layers, shape.weaver_heads, shape.weaver_mlp,
        K=BLOCK - 1, candidate_pool_size=shape.pool,
    )  # fmt: skip


def test_weaver_head_has_the_published_size() -> None:
    with torch.device("meta"):
        head = WeaverHead(weaver_config(SHAPES["27b"]))
    assert sum(p.numel() for p in head.parameters()) == pytest.approx(56.7e6, rel=0.005)


# --- floors -----------------------------------------------------------------------------------------------

GDN = GdnShape(16, 128, 48, 128)


def test_the_longer_of_bytes_and_operations_counts() -> None:
    ceilings = kernels_floor.Ceilings(bytes_per_second=4e12, operations_per_second=8e14)
    assert ceilings.floor_us(kernels_floor.Work(8e6, 8e8)) == pytest.approx(2.0)
    assert ceilings.floor_us(kernels_floor.Work(8e6, 8e9)) == pytest.approx(10.0)
    total = kernels_floor.Work(1, 2) * 3 + kernels_floor.Work(4)
    assert total == kernels_floor.Work(7, 6)


def test_commit_floor_is_the_one_that_the_targets_name() -> None:
    """48 layers' states read and written once at 4.2 TB/s: 72 us."""
    ceilings = kernels_floor.Ceilings(4.2e12, 8e14)
    floor = ceilings.floor_us(kernels_floor.gdn_commit(GDN, 48, 0, 1))
    assert floor == pytest.approx(72, rel=0.01)
    assert kernels_floor.gdn_commit(GDN, 48, 8, 1).bytes == kernels_floor.gdn_commit(GDN, 48, 0, 1).bytes + (
        48 * 8 * (2 * 2048 + 4 * 16 + 4 * 48 + 4 * 6144)
    )


def test_attention_floor_is_the_one_that_the_docstring_names() -> None:
    work = kernels_floor.attention(33, 8192, 1, 24, 4, 256, 2)
    assert work.bytes == 8225 * 4 * 2 * 256 * 2 + 2 * 33 * 24 * 256 * 2
    assert work.operations == pytest.approx(6.6e9, rel=0.01)
    assert kernels_floor.attention(33, 8192, 4, 24, 4, 256, 2) == work * 4
    halved = kernels_floor.attention(33, 8192, 1, 24, 4, 256, 1)
    assert work.bytes - halved.bytes == 8225 * 4 * 2 * 256 + 33 * 24 * 256, "outputs are bf16 all the same"


def test_verify_floor_reads_the_state_once_a_request() -> None:
    state = 4 * 48 * 128 * 128
    one, more = (kernels_floor.gdn_verify(GDN, 33, requests, 4) for requests in (1, 4))
    assert state < one.bytes < 2.1 * state
    assert more.bytes == pytest.approx(4 * one.bytes, rel=0.05) and more.operations == 4 * one.operations


def test_weaver_floors_count_the_heads_weights() -> None:
    config = weaver_config(SHAPES["27b"])
    with torch.device("meta"):
        head = WeaverHead(config)
    block = sum(p.numel() for p in head.blocks.parameters() if p.ndim == 2)
    work = kernels_floor.weaver_round(config, 2, 512)
    assert work.bytes == 2 * block + 2 * 512 * (2 * 2048 + 12)
    assert kernels_floor.weaver_round(config, 4, 512).operations == 2 * work.operations
    one = kernels_floor.weaver_proposal(config, 1000, 15, 512, 2, 1, 1)
    two = kernels_floor.weaver_proposal(config, 1000, 15, 512, 2, 2, 1)
    assert two.bytes - one.bytes == work.bytes
    prompt = kernels_floor.weaver_prompt(config, 15, 1)
    assert prompt.operations == 2 * 16 * (head.proposal_in.weight.numel() + 2 * 2048 * 2048)


def test_small_floors() -> None:
    assert kernels_floor.move_rows(3, 10).bytes == 60
    assert kernels_floor.row_argmax(33, 1000).bytes == 33 * 2008
    assert kernels_floor.candidate_pool(2, 100, 5).bytes == 2 * (200 + 60 + 4)
    assert kernels_floor.ancestor_masks(33, 1).bytes == 33 * 12


# --- the kernels at tiny sizes ----------------------------------------------------------------------------

TINY = Shape(
    hidden=32, intermediate=64, layers=4, heads=4, kv_heads=2, key_heads=1, value_heads=2, vocab=300,
    draft_layers=2, draft_heads=2, draft_kv_heads=1, rank=32, weaver_mlp=24, head_dim=16, gdn_dim=16,
    weaver_heads=2, pool=16,
)  # fmt: skip


def tiny(**changes: Any) -> Setting:
    options = dict(
        impl="triton", dtype=torch.float32, nodes=(5, 9), attention_nodes=(5,), prefixes=(20,), budgets=(3,),
        batches=(1, 2), fp8=False, page=16,
        depth=2,
    )  # fmt: skip
    return Setting(torch.device("cpu"), TINY, 1 << 20, **(options | changes))


@CPU_ONLY
@pytest.mark.parametrize("family, name", NAMES, ids=[name for _, name in NAMES])
def test_every_case_passes_its_check_and_its_calls_run(family: Any, name: str) -> None:
    found = 0
    for case in family.cases(tiny(), {name}):
        assert case.kernel == name and case.work.bytes > 0
        errors = case.check()
        assert all(0 <= error < 1e-3 for error in errors.values()), errors
        for call in case.calls[:1] + case.calls[1:][-1:]:
            call()
        found += 1
    assert found >= 2, "one and two requests"


@CPU_ONLY
def test_drift_compares_three_states() -> None:
    found = kernels_gdn.drift(tiny(), commits=3)
    assert found["commits"] == 3 and found["verify_and_commit"] < 1e-5 and found["sequential"] < 1e-5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_state_drifts_no_more_than_under_vllms_kernel() -> None:
    device = torch.device("cuda")
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    found = kernels_gdn.drift(Setting(device, SHAPES["27b"], cache))
    assert found["verify_and_commit"] <= found["sequential"], found


def broken(monkeypatch: pytest.MonkeyPatch, family: Any, kernel: str, argument: str) -> None:
    """`kernel` goes wrong: what it leaves in `argument` (or returns) is off."""
    right = getattr(family, kernel)

    def wrong(*args: Any, **kwargs: Any) -> Any:
        result = right(*args, **kwargs)
        if kwargs.get("impl") != "torch":
            (kwargs[argument] if argument else result).add_(1)
        return result

    monkeypatch.setattr(family, kernel, wrong)


@CPU_ONLY
@pytest.mark.parametrize(
    "family, name, kernel, argument",
    [
        (kernels_gdn, "gdn_verify", "gdn_tree_verify", "out"),
        (kernels_attention, "tree_attention", "tree_attention", "out"),
        (kernels_step, "row_argmax", "row_argmax", ""),
        (kernels_step, "ancestor_masks", "ancestor_mask_words", ""),
    ],
)
def test_a_wrong_kernel_stops_at_the_gate(
    monkeypatch: pytest.MonkeyPatch, family: Any, name: str, kernel: str, argument: str
) -> None:
    broken(monkeypatch, family, kernel, argument)
    with pytest.raises(provenance.BenchmarkError, match="correctness gate failed, so nothing is reported"):
        next(iter(family.cases(tiny(batches=(1,)), {name}))).check()


@CPU_ONLY
def test_a_wrong_weaver_score_stops_at_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_weaver.spec_decode import weaver_growth

    right = weaver_growth.candidate_scores
    monkeypatch.setattr(weaver_growth, "candidate_scores", lambda *args, **more: right(*args, **more) * 1.5)
    case = next(kernels_weaver.cases(tiny(batches=(1,)), {"weaver_proposal"}))
    with pytest.raises(provenance.BenchmarkError, match="weaver proposal"):
        case.check()


def test_nan_is_no_small_error() -> None:
    nan = torch.full((3,), torch.nan)
    with pytest.raises(provenance.BenchmarkError, match="off by nan"):
        kernels_common.require("x", kernels_common.relative_error(nan, torch.ones(3)), 1)


def test_a_missing_reference_is_shown_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without vLLM there is a line, without that column; with variants the fastest counts."""
    times = iter((8.0, 5.0, 4.0, 8.0))
    monkeypatch.setattr(kernels_common, "graph_us", lambda calls: next(times))

    def absent() -> dict[str, Any]:
        raise ImportError("no module named vllm")

    work, ceilings = kernels_floor.Work(4e6), kernels_floor.Ceilings(4e12, 1e15)
    case = Case("k", "s", work, [], lambda: {"x": 0.1}, "FA", absent)
    missing = kernels_common.measure(case, ceilings)
    assert missing.row() == [
        "k",
        "s",
        "8.00",
        "1.00",
        "8.0",
        NO_VLLM,
        "",
        "",
    ]
    case.reference_calls = lambda: {"a": [], "b": []}
    there = kernels_common.measure(case, ceilings)
    assert there.row() == ["k", "s", "5.00", "1.00", "5.0", "FA", "4.00", "1.25"]
    assert there.reference_variants_us == {"a": 4.0, "b": 8.0} and there.errors == {"x": 0.1}


def test_buffers_go_round_beyond_the_cache() -> None:
    setting = Setting(torch.device("cpu"), TINY, 50 << 20)
    assert setting.copies(1000) == 1, "what is small is hot"
    assert setting.copies(33.5e6) * 33.5e6 >= 4 * (50 << 20)
    assert setting.copies(1e9) == 1
    assert setting.gdn_layers == 3 and setting.attention_layers == 1


def test_random_trees_are_trees_of_bounded_depth() -> None:
    trees = kernels_common.Trees(tiny(impl="torch", depth=15), 33, 2)
    for r, path in enumerate(trees.paths):
        parents = trees.parents[r].tolist()
        assert parents[0] == -1 and all(0 <= parent < i for i, parent in enumerate(parents) if i)
        assert path[0] == 0 and all(parents[b] == a for a, b in zip(path, path[1:], strict=False))
        assert len(path) == kernels_common.ACCEPTED and trees.moved_rows() > 0
    assert trees.depths.max() <= 15
    assert kernels_common.Trees(tiny(impl="torch"), 33, 1).depths.max() == 2


# --- without a GPU ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", ["bench_kernels", "bench_step"])
def test_without_cuda_there_is_one_sentence(script: str, tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / f"{script}.py", "--out", out],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    sentence = f"{script}: FAILED: this benchmark needs a CUDA device, and torch finds none\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", sentence)
    assert not out.exists()


# --- a table from several runs ----------------------------------------------------------------------------

FACTS: dict[str, Any] = dict.fromkeys(bench_step.SAME, "this")


def arm(ratio: float) -> dict[str, Any]:
    """An arm's entry at one context."""
    return {"ratio": ratio, "plain_ms": [10.0], "arm_ms": [10.0 * ratio], "parts_ms": {"idle": ratio}}


def found(**arms: dict[str, Any]) -> dict[str, Any]:
    """What a run measured."""
    return {"arms": arms, "plain_parts_ms": {"512": {"idle": 1.0}, "8192": {"idle": 1.0}}}


def test_a_later_run_adds_its_arms(tmp_path: Path) -> None:
    file = tmp_path / "step.json"
    first = bench_step.joined({}, found(dflash={"512": arm(1.4)}), FACTS)
    file.write_text(json.dumps({"provenance": FACTS, **first}))
    known = bench_step.earlier(file, FACTS | {"date": "later"})
    both = bench_step.joined(known, found(dflash={"8192": arm(1.5)}, tfm={"512": arm(1.2)}), FACTS)
    assert {name: list(contexts) for name, contexts in both["arms"].items()} == {
        "dflash": ["512", "8192"],
        "tfm": ["512"],
    }
    assert len(both["runs"]) == 2
    lines = bench_step.report(both).splitlines()
    # The second context has no entry of the second arm, which the table then leaves out.
    assert [line.split()[0] for line in lines if line.startswith(("dflash", "tfm"))] == [
        "dflash",
        "tfm",
        "dflash",
    ]
    assert "0.857" in lines[3]  # 1.2 / 1.4


@pytest.mark.parametrize("name", bench_step.SAME)
def test_runs_that_differ_are_not_joined(name: str, tmp_path: Path) -> None:
    file = tmp_path / "step.json"
    file.write_text(json.dumps({"provenance": FACTS, **bench_step.joined({}, found(), FACTS)}))
    with pytest.raises(provenance.BenchmarkError, match=f"with {name} 'this', this run has 'other'"):
        bench_step.earlier(file, FACTS | {name: "other"})
    with pytest.raises(provenance.BenchmarkError, match="there is no .* to add to"):
        bench_step.earlier(tmp_path / "none.json", FACTS)


# --- the picture -----------------------------------------------------------------------------------------

STEP_RESULTS = {
    "arms": {
        "dflash": {"512": {"ratio": 1.4, "parts_ms": {"idle": 1.0}}},
        "tfm 64": {"512": {"ratio": 1.5, "parts_ms": {"verify: GDN": 2.0, "idle": 0.5, "total": 2.5}}},
        "tfm 8": {"512": {"ratio": 1.2, "parts_ms": {"verify: GDN": 1.0, "total": 1.0}}},
    }
}


def test_series_are_ordered_by_budget() -> None:
    budgets, ratios, parts = plot.series(STEP_RESULTS, "512")
    assert budgets == [8, 64] and ratios == [1.2, 1.5]
    assert parts[1]["idle"] == 0.5
    assert plot.series(STEP_RESULTS, "8192") == ([], [], [])


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    plot.draw(STEP_RESULTS, ["512"], "made up", tmp_path / "step.png")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
