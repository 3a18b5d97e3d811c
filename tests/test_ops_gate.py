# SPDX-License-Identifier: Apache-2.0
"""The smoke gate, against a stand-in for the server: all green when it is right, and the right line red when
not."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ops_stub import Stub, serving

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import smoke_gate  # noqa: E402  (the path comes first)
from ops_lib import checks, haystack  # noqa: E402
from ops_lib.checks import Gate  # noqa: E402
from ops_lib.client import Server, ServerError  # noqa: E402

EXPECTED = smoke_gate.expectations(smoke_gate.EXPECTATIONS)


def right(prompt: str) -> str:
    """What a good model says: the canaries' answers, and the needle of a long text."""
    number = re.search(r"secret number of the lighthouse is (\d+)", prompt)
    if number:
        return f"It is {number[1]}."
    for canary in EXPECTED["canaries"]:
        if canary["prompt"] == prompt:
            return canary["expect"].replace("\\b", "").replace("(?i)", "").rjust(12)
    return "some text of a model"


def judge(stub: Stub, **more: Any) -> dict[str, checks.Result]:
    """Every check's result by name."""
    plain = more.pop("plain", None)
    gate = Gate(
        Server(stub.url, more.pop("model", None), timeout=5.0),
        dict(EXPECTED) | {"long_context": {"tokens": 300}},
        plain=Server(plain.url) if plain else None,
        say=lambda text: None,
        **more,
    )
    return {result.name: result for result in checks.run(gate)}


def failed(results: dict[str, checks.Result]) -> list[str]:
    return [name for name, result in results.items() if result.status == "failed"]


def test_a_right_server_passes_every_check() -> None:
    with serving(Stub(right)) as stub, serving(Stub(right, accepted=None)) as plain:
        results = judge(stub, plain=plain)
    assert {name: r.status for name, r in results.items()} == dict.fromkeys(checks.CHECKS, "ok"), results
    assert "accepted length 4.00" in results["speculation"].detail
    assert "14 of 14" in results["canaries"].detail
    assert json.loads(results["json"].detail) == {"city": "Paris"}


def scrambled(prompt: str) -> str:
    return right(prompt).replace("437", "417")


FAULTS: dict[str, tuple[Stub, dict[str, Any], str, str]] = {
    "no speculation": (Stub(right, accepted=None), {}, "speculation", "made no drafts"),
    "speculation not meant": (Stub(right), {"speculation": False}, "speculation", "should make none"),
    "drafts that do not fit": (Stub(right, accepted=0.1), {}, "speculation", "outside of 2.0 to 16.0"),
    "wrong model": (Stub(right), {"model": "other"}, "model", "'stub', not 'other'"),
    "wrong answer": (Stub(scrambled), {}, "canaries", "1 of 14 wrong: 'What is 19 times 23?"),
    "empty answers": (Stub(lambda prompt: ""), {}, "generation", "without text"),
    "killed mid-stream": (Stub(right, die_after=1), {}, "generation", "after 1 pieces"),
    "a refusal": (Stub(right, status=503), {}, "generation", "status 503: no room"),
    "no tool call": (Stub(right, tool_calls=False), {}, "tool call", "no tool was called"),
    "a hang": (Stub(right, hang=True), {"first_timeout": 0.1}, "generation", "it hangs"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_makes_its_own_line_red(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "HANG_HINT_SECONDS", 0.2)
    stub, more, line, detail = FAULTS[fault]
    with serving(stub):
        results = judge(stub, **more)
    assert failed(results)[0] == line, results
    assert detail in results[line].detail and "\n" not in results[line].detail
    if fault in ("wrong model", "killed mid-stream", "a hang", "a refusal"):
        assert failed(results) == [line]
        assert results["alive"].status == "skipped" and line in results["alive"].detail


def test_a_server_that_is_not_there_fails_the_first_check_only() -> None:
    results = judge(Stub(url="http://127.0.0.1:9"))
    assert failed(results) == ["health"]


def test_a_slow_first_request_is_not_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "HANG_HINT_SECONDS", 0.3)
    with serving(Stub(right, first_delay=2.0)) as stub:
        said: list[str] = []
        gate = Gate(Server(stub.url), EXPECTED, first_timeout=30, say=said.append)
        detail = checks.first_generation(gate)
    assert "compiled kernels, once" in detail
    assert said and all("kernels may be compiling" in line for line in said)


@pytest.mark.parametrize(
    ("offset", "status", "word"), [(1, "failed", "near-ties"), (2, "failed", "less likely")]
)
def test_greedy_answers_are_compared_with_the_plain_server(offset: int, status: str, word: str) -> None:
    """The stub's second choice is 0.01 less likely, any other is not among its best. One answer differs in
    every question, which is more near-ties than chance makes."""
    shift = {ord("p"): ord("p") + offset, ord("o"): ord("o") + offset}
    with (
        serving(Stub(lambda prompt: prompt[:9].translate(shift))) as stub,
        serving(Stub(lambda prompt: prompt[:9] + "po")) as plain,
    ):
        stub.answer = lambda prompt: (prompt[:9] + "po").translate(shift)
        result = judge(stub, plain=plain)["identity"]
    assert result.status == status and word in result.detail


@pytest.mark.parametrize(
    ("found", "expected"),
    [([1, 2], None), ([1, 3], (1, 0.5)), ([1, 4], (1, float("inf"))), ([1], (1, float("inf")))],
    ids=["same", "second choice", "unheard of", "shorter"],
)
def test_where_two_answers_part(found: list[int], expected: tuple[int, float] | None) -> None:
    logprobs = [{"token_id:1": 0.0}, {"token_id:2": -0.25, "token_id:3": -0.75}]
    assert checks.parting_gap([1, 2], found, logprobs) == expected


def test_a_haystack_has_the_length_that_was_asked_for() -> None:
    with serving(Stub(right)) as stub:
        server = Server(stub.url)
        prompt, number, length = haystack.of_length(server, 500, 0.3, seed=1)
        with pytest.raises(ServerError, match="too few"):
            haystack.of_length(server, 5, 0.3, seed=1)
    assert 480 <= length <= 500 and prompt.count(number) == 1
    assert 0.2 < prompt.index(number) / len(prompt) < 0.4
    assert number == haystack.needle(1)


def test_command_line_prints_a_line_a_check_and_writes_json(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts/smoke_gate.py"), "--json", str(tmp_path / "gate.json")]
    with serving(Stub(right, accepted=None)) as stub:
        done = subprocess.run(
            [*command, "--url", stub.url, "--skip", "long context"],
            capture_output=True,
            text=True,
            timeout=60,
        )
    lines = done.stdout.splitlines()
    assert done.returncode == 1 and len(lines) == len(checks.CHECKS) + 1, done.stderr
    assert lines[-1] == "smoke: FAILED: speculation (2 skipped)"
    report = json.loads((tmp_path / "gate.json").read_text())
    assert report["ok"] is False and [c["name"] for c in report["checks"]] == list(checks.CHECKS)


def test_expectations_of_the_demo_models_and_wrong_ones(tmp_path: Path) -> None:
    demo = smoke_gate.expectations(ROOT / "scripts/demo_models/expectations.json")
    assert len(demo["canaries"]) >= 12 and all(re.compile(c["expect"]) for c in demo["canaries"])
    assert EXPECTED["canaries"][0] == {
        "prompt": "What is 19 times 23? Answer with the number alone.",
        "expect": "\\b437\\b",
    }
    for text, word in (("{", "Expecting"), ("{}", "lacks accepted_length")):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ValueError, match=word):
            smoke_gate.expectations(tmp_path / "bad.json")
