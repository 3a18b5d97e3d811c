# SPDX-License-Identifier: Apache-2.0
"""Benchmark, sweep and needle in a haystack against a stand-in for the server: what the figures are, and what
is refused."""

from __future__ import annotations

import csv
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ops_stub import Stub, serving

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import bench  # noqa: E402  (the path comes first)
import niah  # noqa: E402
import sweep_budget  # noqa: E402
from ops_lib import datasets, measure, report  # noqa: E402
from ops_lib.client import Server, ServerError  # noqa: E402
from ops_lib.datasets import DatasetError, Lock  # noqa: E402
from ops_lib.measure import Sample, Settings  # noqa: E402
from ops_lib.process import StartError, fill, free_port, running  # noqa: E402


def jsonl(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    return jsonl(tmp_path / "mine.jsonl", *({"prompt": f"question {n}"} for n in range(10)))


def run(stub: Stub, tmp_path: Path, *words: str) -> dict[str, Any]:
    return bench.run(bench.parse(["--url", stub.url, "--out", str(tmp_path / "out"), *words]))


# --- figures ---------------------------------------------------------------------------------------------


def test_figures_are_those_of_the_server(prompts: str, tmp_path: Path) -> None:
    """12 tokens a request and 3 accepted a step: 3 verify steps, so tau = 4; the sums are /metrics'."""
    with serving(Stub(lambda prompt: "x" * 12, step_delay=0.004)) as stub:
        before = dict(stub.counters)
        results = run(stub, tmp_path, "--datasets", prompts, "--warmup", "0", "--prompts", "6")
    row = results["datasets"]["mine"]
    assert (row["requests"], row["errors"], row["tokens"]) == (6, 0, 72)
    assert row["tau"] == 4 and row["tau_pooled"] == 4
    assert row["throughput"] == pytest.approx(72 / row["seconds"])
    low, high = row["throughput_interval"]
    assert low <= row["throughput"] <= high
    grown = stub.counters["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"]
    assert row["counted"]["generated"] == grown == 72
    assert row["other_tokens"] == 0
    assert 0 < row["first_token_seconds"] < row["seconds"]
    assert results["macro"]["throughput"] == row["throughput"]
    assert len(stub.requests) == 6 and stub.flushes == 0  # the server caches nothing


def test_another_client_is_noticed(prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def answer(prompt: str) -> str:
        stub.count(1, 5)
        return "x" * 8

    stub = Stub(answer)
    with serving(stub):
        results = run(stub, tmp_path, "--datasets", prompts, "--warmup", "0", "--prompts", "2")
    assert results["datasets"]["mine"]["other_tokens"] == 10
    assert "10 tokens of other clients" in capsys.readouterr().err


def test_macro_average_is_the_mean_of_datasets_not_of_requests(tmp_path: Path) -> None:
    few = jsonl(tmp_path / "few.jsonl", *({"prompt": f"{n}"} for n in range(2)))
    many = jsonl(tmp_path / "many.jsonl", *({"turns": [f"{n}", "and?"]} for n in range(6)))
    with serving(Stub(lambda prompt: "x" * 8)) as stub:
        results = run(stub, tmp_path, "--datasets", few, many, "--baseline", "few=100", "many=50")
    rows = results["datasets"]
    rates = [rows["few"]["throughput"], rows["many"]["throughput"]]
    assert results["macro"]["throughput"] == pytest.approx(sum(rates) / 2)
    assert rows["few"]["speedup"] == pytest.approx(rates[0] / 100)
    assert results["macro"]["speedup"] == pytest.approx((rates[0] / 100 + rates[1] / 50) / 2)
    assert rows["many"]["tokens"] == 6 * 2 * 8
    second = stub.requests[-1]["messages"]
    assert [message["role"] for message in second] == ["user", "assistant", "user"]


def test_requests_together_have_one_wall_time_and_a_pooled_tau(prompts: str, tmp_path: Path) -> None:
    with serving(Stub(lambda prompt: "x" * 12, step_delay=0.03)) as stub:
        alone = run(stub, tmp_path, "--datasets", prompts)["datasets"]["mine"]
        together = run(stub, tmp_path, "--datasets", prompts, "--concurrency", "5")["datasets"]["mine"]
    assert together["requests"] == 10 and together["throughput"] > 2 * alone["throughput"]
    assert together["tau"] is None and together["tau_pooled"] == 4


def test_cached_prefixes_are_flushed_before_each_request(prompts: str, tmp_path: Path) -> None:
    with serving(Stub(prefix_caching=True)) as stub:
        run(stub, tmp_path, "--datasets", prompts, "--prompts", "3", "--warmup", "1")
        assert stub.flushes == 1 + 3  # once to see that it can be done
        run(stub, tmp_path, "--datasets", prompts, "--keep-cache")
        assert stub.flushes == 4


def test_failed_requests_are_counted_and_make_the_status(
    prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(Stub(status=503)) as stub:
        words = ["bench.py", "--url", stub.url, "--out", str(tmp_path / "out"), "--datasets", prompts]
        monkeypatch.setattr(sys, "argv", [*words, "--warmup", "0"])
        assert bench.main() == 1
    assert "10 requests failed" in capsys.readouterr().err
    row = json.loads((tmp_path / "out.json").read_text())["datasets"]["mine"]
    assert (row["errors"], row["throughput"], row["first_error"]) == (10, None, "status 503: no room")


def test_precision_ends_a_dataset_early(prompts: str, tmp_path: Path) -> None:
    with serving(Stub(lambda prompt: "x" * 16, step_delay=0.01)) as stub:
        words = ["--datasets", prompts, "--precision", "0.5", "--min-prompts", "4"]
        assert run(stub, tmp_path, *words)["datasets"]["mine"]["requests"] == 4


def test_seeds_make_the_same_requests(prompts: str, tmp_path: Path) -> None:
    def asked(seed: str) -> list[tuple[str, int]]:
        with serving(Stub()) as stub:
            run(stub, tmp_path, "--datasets", prompts, "--seed", seed, "--warmup", "0")
        return [(body["messages"][0]["content"], body["seed"]) for body in stub.requests]

    assert asked("1") == asked("1") != asked("2")


def test_files_and_table(prompts: str, tmp_path: Path) -> None:
    with serving(Stub()) as stub:
        results = run(stub, tmp_path, "--datasets", prompts, "--label", "trees")
    report.write_all(tmp_path / "sub" / "out", results)
    with (tmp_path / "sub" / "out.csv").open() as file:
        header, line = csv.reader(file)
    assert tuple(header) == report.COLUMNS and line[0] == "mine"
    text = (tmp_path / "sub" / "out.md").read_text()
    assert text.startswith("**trees**: stub, vLLM 0.32.0") and "| mine" in text
    again = report.baseline_of([str(tmp_path / "sub" / "out.json")])
    assert again == {"mine": results["datasets"]["mine"]["throughput"]}


def test_interval_of_the_mean() -> None:
    assert measure.interval([1.0]) is None
    assert measure.interval([2.0, 2.0, 2.0]) == [2.0, 2.0]
    low, high = measure.interval([float(n % 10) for n in range(200)]) or (0, 0)
    assert 3.9 < low < 4.5 < high < 5.1 and high - low == pytest.approx(2 * 1.96 * 2.87 / 200**0.5, rel=0.15)
    samples = [Sample(10, 1, 1.0, 0.1), Sample(30, 1, 3.0, 0.1)]
    assert measure.rate_interval(samples, 4.0) == pytest.approx([10, 10])


def test_decode_rate_leaves_out_the_first_token_of_each_turn() -> None:
    assert Sample(11, 1, seconds=1.5, first_seconds=0.5).decode_rate == pytest.approx(10)
    assert Sample(22, 1, seconds=3.0, first_seconds=1.0, turns=2).decode_rate == pytest.approx(10)
    assert Sample(1, 1, seconds=1.0, first_seconds=0.5).decode_rate is None


def test_counters_that_do_not_hold_the_answers_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ops_lib.client.SETTLE_SECONDS", 0.05)
    with serving(Stub()) as stub:
        server = Server(stub.url)
        with pytest.raises(ServerError, match="counts 0 generated tokens, the answers hold 5"):
            server.settled(server.counts(), 5)


# --- ladder ----------------------------------------------------------------------------------------------


def test_ladder_calls_vllm_bench_serve(tmp_path: Path) -> None:
    vllm = tmp_path / "vllm"
    vllm.write_text(
        "#!/usr/bin/env bash\n"
        "while [ $# -gt 0 ]; do case $1 in --result-dir) d=$2;; --result-filename) f=$2;; esac; shift; done\n"
        'echo \'{"mean_tpot_ms": 5.0, "output_throughput": 321.5, "completed": 8}\' >"$d/$f"\n'
    )
    vllm.chmod(0o755)
    with serving(Stub()) as stub:
        results = run(stub, tmp_path, "--ladder", "1", "2", "--ladder-vllm", shlex.quote(str(vllm)))
        assert [row["decode_tokens_a_second"] for row in results["ladder"]] == [200.0, 200.0]
        text = report.markdown(results)
        assert "greedy: 1024 random tokens in, 256 out" in text
        assert "| 2           | 200.00       | 321.50" in text and "temperature" not in text
        with pytest.raises(bench.BenchError, match="at concurrency 1 failed"):
            run(stub, tmp_path / "other", "--ladder", "1", "--ladder-vllm", "false")


# --- datasets --------------------------------------------------------------------------------------------


def test_forms_of_a_jsonl_file_and_its_lock(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    name = jsonl(path, {"text": "go"}, {"prompt": "p"}, {"turns": ["a", "b"]}, {"messages": messages})
    lock = Lock(tmp_path / "lock.json")
    prompts, version = datasets.load(name, lock, seed=0)
    assert sorted(len(prompt) for prompt in prompts) == [1, 1, 2, 2] and len(version) == 64
    assert [{"role": "text", "content": "go"}] in prompts
    datasets.load(name, Lock(tmp_path / "lock.json"), seed=3)
    jsonl(path, {"prompt": "other"})
    with pytest.raises(DatasetError, match="would not be comparable"):
        datasets.load(name, Lock(tmp_path / "lock.json"), seed=0)


@pytest.mark.parametrize(
    ("line", "word"),
    [("{", "line 1"), ('{"q": 1}', "'text'"), ("[]", "a row is an object"), ("", "no prompts")],
)
def test_a_file_that_cannot_be_read_is_one_sentence(line: str, word: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(line)
    with pytest.raises(DatasetError, match=word):
        datasets.load(str(tmp_path / "a.jsonl"), Lock(tmp_path / "lock.json"), seed=0)


def test_spec_bench_has_six_categories(tmp_path: Path) -> None:
    rows = [{"category": c, "turns": [c]} for group in datasets.SPEC_BENCH.values() for c in group]
    file = Path(jsonl(tmp_path / "question.jsonl", *rows))
    lock = Lock(tmp_path / "lock.json")
    sizes = {name: len(datasets.load(name, lock, 0, file)[0]) for name in datasets.SPEC_BENCH}
    assert sizes == {name: len(group) for name, group in datasets.SPEC_BENCH.items()} and len(sizes) == 6
    with pytest.raises(DatasetError, match="needs --spec-bench FILE"):
        datasets.load("spec_qa", lock, 0)


def test_hub_datasets_are_read_at_the_revision_in_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    asked: list[str] = []
    rows = [{"question": "1 + 1?", "prompt": ["a"], "problem": "p", "text": "t"}]

    class Api:
        def dataset_info(self, repo: str) -> Any:
            asked.append(repo)
            return type("Info", (), {"sha": "c" * 40})

    def rows_of(name: str, dataset: Any, revision: str) -> Any:
        assert revision == "c" * 40
        return rows

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(datasets, "_rows", rows_of)
    for _ in range(2):
        prompts, version = datasets.load("gsm8k", Lock(tmp_path / "lock.json"), 0)
        assert version == "c" * 40 and "1 + 1?" in prompts[0][0]["content"]
    assert asked == ["openai/gsm8k"]
    assert set(datasets.PAPER) == {
        "mtbench", "sharechat", "gsm8k", "math500", "aime25", "humaneval", "mbpp", "livecodebench"
    }  # fmt: skip


# --- refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "word"),
    [
        ((), "name --datasets"),
        (("--datasets", "a", "--concurrency", "0"), "--concurrency 0 must be at least 1"),
        (("--datasets", "a", "--precision", "2"), "--precision 2.0"),
        (("--datasets", "a", "--precision", "0.1", "--concurrency", "2"), "not independent"),
    ],
)
def test_wrong_options_are_named(
    words: tuple[str, ...], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        bench.parse(list(words))
    assert word in capsys.readouterr().err


@pytest.mark.parametrize("baseline", ["mtbench=fast", "mtbench=0", "not-there.json"])
def test_a_wrong_baseline_is_named(baseline: str) -> None:
    with pytest.raises(report.ReportError, match=baseline):
        report.baseline_of([baseline])


def test_two_files_of_one_name_are_refused(prompts: str, tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    other = jsonl(tmp_path / "b" / "mine.jsonl", {"prompt": "p"})
    with serving(Stub()) as stub, pytest.raises(bench.BenchError, match="one name"):
        run(stub, tmp_path, "--datasets", prompts, other)


def test_a_name_that_is_no_dataset_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="neither a JSONL file"):
        datasets.load("gsm9k", Lock(tmp_path / "lock.json"), 0)


# --- sweep -----------------------------------------------------------------------------------------------


def test_sweep_restarts_servers_and_names_the_best_budget(
    prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = f"{shlex.quote(sys.executable)} -m tests.ops_stub {{port}} "
    out = tmp_path / "sweep"
    words = ["--budgets", "4", "2", "--restarts", "2", "--serve", stub + "{budget}", "--plain", stub + "0",
             "--out", str(out), "--", "--datasets", prompts, "--prompts", "3", "--warmup", "0"]  # fmt: skip
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["sweep_budget.py", *words])
    assert sweep_budget.main() == 0
    results = json.loads((tmp_path / "sweep.json").read_text())
    assert results["best"] == 4 and [p["budget"] for p in results["points"]] == [0, 2, 4]
    assert all(len(p["throughputs"]) == 2 for p in results["points"])
    assert [p["tau"] for p in results["points"]] == [None, 2, 4]
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert "sweep: best budget: 4" in capsys.readouterr().out
    assert (tmp_path / "sweep.4.2.json").exists() and (tmp_path / "sweep.plain.1.log").exists()


def sweep_point(budget: int, low: float, high: float, errors: int = 0) -> dict[str, Any]:
    return {
        "budget": budget,
        "throughput": (low + high) / 2,
        "lowest": low,
        "highest": high,
        "errors": errors,
    }


def test_the_best_budget_is_sound_and_its_equals_are_named() -> None:
    points = [sweep_point(0, 900, 900), sweep_point(16, 9, 10.5), sweep_point(32, 10, 12),
              sweep_point(64, 7, 9), sweep_point(128, 50, 60, errors=1)]  # fmt: skip
    assert sweep_budget.best(points) == (32, [16])
    with pytest.raises(bench.BenchError, match="at every budget"):
        sweep_budget.best(points[-1:])


def test_a_server_that_does_not_start_is_one_sentence(tmp_path: Path) -> None:
    command = ["bash", "-c", "echo first; echo no such model; exit 3"]
    with (
        pytest.raises(StartError, match="status 3: no such model"),
        running(command, free_port(), tmp_path / "log", 10),
    ):
        pass
    with (
        pytest.raises(StartError, match="not ready within 1 s"),
        running(["sleep", "60"], free_port(), tmp_path / "log", 1),
    ):
        pass
    with pytest.raises(StartError, match="has no {budget}"):
        fill("vllm serve --port {port}", port=1, budget=2)


# --- needle in a haystack --------------------------------------------------------------------------------


def test_needles_are_sought_at_every_length_and_depth(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(prompt: str) -> str:
        """Finds what is in the first 1,500 words."""
        seen = " ".join(prompt.split()[:1500])
        return "It is " + seen.partition("lighthouse is ")[2].partition(".")[0]

    with serving(Stub(answer)) as stub:
        words = ["niah.py", "--url", stub.url, "--out", str(tmp_path / "n"), "--depths", "0", "1"]
        monkeypatch.setattr(sys, "argv", [*words, "--up-to", "2100"])
        assert niah.main() == 1
        assert "FAILED: 3 of 4 found" in capsys.readouterr().out
        monkeypatch.setattr(sys, "argv", [*words, "--lengths", "500", "1000"])
        assert niah.main() == 0
        monkeypatch.setattr(sys, "argv", [*words, "--lengths", "5000"])
        assert niah.main() == 2
    assert "too few for a prompt of 5000" in capsys.readouterr().err
    results = json.loads((tmp_path / "n.json").read_text())
    assert results["share"] == 1 and [p["length"] for p in results["probes"]] == [500, 500, 1000, 1000]
    assert (tmp_path / "n.png").read_bytes().startswith(b"\x89PNG")


def test_lengths_double_up_to_the_context() -> None:
    assert niah.lengths_of(niah.parse([]), 8256) == [1024, 2048, 4096, 8192]
    assert niah.lengths_of(niah.parse(["--up-to", "262144"]), 262144)[-1] == 262144 - niah.ANSWER_TOKENS
    assert niah.lengths_of(niah.parse(["--up-to", "300"]), 8192) == [300]


def test_settings_are_told_to_the_server(prompts: str, tmp_path: Path) -> None:
    with serving(Stub()) as stub:
        run(
            stub,
            tmp_path,
            "--datasets",
            prompts,
            "--reasoning",
            "off",
            "--ignore-eos",
            "--max-new-tokens",
            "7",
        )
    body = stub.requests[-1]
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert (body["ignore_eos"], body["max_tokens"], body["temperature"]) == (True, 7, 1.0)
    assert Settings().max_tokens == 4096
