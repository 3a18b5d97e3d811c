# SPDX-License-Identifier: Apache-2.0
"""Churn: random requests come, wait, are preempted, aborted and finished; each equals its run alone.

    python -m tests.e2e.churn --minutes 10 --seed 1
    python -m tests.e2e.churn --minutes 3 --graphs --concurrency 32        # on a GPU

A catalogue of requests is drawn from the seed: prompts with shared beginnings, lengths, sampling parameters,
penalties, banned words, grammars, log-probabilities, stop strings. vLLM without speculation answers each one
alone, in a process of its own. An engine with trees and a small KV cache (or, with `--plain`, the same
without trees) gets them in random order and number, again and again, and loses some to aborts. Every answer
is compared with the one alone, an aborted one as far as it came. A dozen times the engine runs dry: then no
block and no state index may be missing, and memory must not have grown (see `churn_memory`).

The random target (`--target random`, the default without a GPU) is attention-only and in float32: answers
must be equal. Its draft knows nothing; accepted paths come from an oracle. The demo target (`--target demo`)
is a hybrid in bf16, whose rows round otherwise in another batch: an answer may then part from the one alone
at a near-tie, which a sampled one has where noise and log-probability together are close. Where rounding
carries a token across a limit such as `top_p`, all that is left to choose from changes: few answers may.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.e2e import churn_engines, churn_memory, harness
from tests.e2e.churn_engines import Answers, Setting
from tests.e2e.churn_requests import Answer, Request, difference, logprob_difference, parted
from tests.e2e.following import SLACK

if __name__ == "__main__":
    churn_engines.prepare()

# A step of bf16 at logits of 16 to 32, which random prompts and biases bring about; see `harness.TIE`.
TIE = 0.13
# Log-probabilities in bf16, with and without trees, are up to 0.8 (rms 0.14) from those that a float32 run of
# the demo target gives to the best 20 tokens.
NOISE = 1.0
# Shares of a bf16 engine's answers that may be excused; a wrong state or cache shows in most answers.
MOST = {"near-ties": 0.25, "limits crossed": 0.05}
# How often a run of some length lets the engine run dry.
PAUSES, SECONDS_BETWEEN = 12, 20


@dataclass
class Report:
    """What happened. `wrong` are failures, `ties` and `limits` excused differences (bf16 only: gaps of at
    most `tie`, from the `noise` of plain decoding; both in logits); `ahead` are the steps that ended with the
    next one under way, `replays` whole CUDA graphs by model."""

    seconds: float = 0.0
    waited: float = 0.0
    added: int = 0
    finished: int = 0
    aborted: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    compared: int = 0
    ties: Counter[str] = field(default_factory=Counter)
    limits: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    preemptions: int = 0
    hits: int = 0
    stats: dict[str, int] = field(default_factory=dict)
    memory: list[churn_memory.Sample] = field(default_factory=list)
    steps: int = 0
    ahead: int = 0
    noise: float = 0.0
    tie: float = 0.0
    replays: dict[str, int] = field(default_factory=dict)

    def summary(self) -> str:
        """A few lines for people."""
        verifies = self.stats.get("verifies", 0)
        each = 1 + self.stats["accepted"] / verifies if verifies else 1
        return "\n".join(
            [
                f"{self.seconds:.0f} s, then {self.waited:.0f} s for the last answers alone: {self.added} "
                f"requests, {self.finished} finished, aborted {dict(self.aborted)}; {self.tokens} tokens of "
                f"finished ones, {self.compared} compared",
                f"kinds finished: {dict(self.kinds)}",
                f"{self.preemptions} preemptions, {self.hits} prompt tokens from the prefix cache; "
                f"{self.stats or 'no trees'}, {each:.2f} tokens a verify",
                f"{self.steps} steps of the engine, {self.ahead} of them with the next one under way; "
                f"CUDA graphs replayed: {self.replays or 'none'}",
                churn_memory.summary(self.memory),
                _listed(
                    f"near-ties (gaps of at most {self.tie:.3f} at temperature 1; without speculation "
                    f"gaps are up to {self.noise:.3f} from those alone in such a crowd)",
                    self.ties,
                ),
                _listed("limits crossed (top_k, top_p, min_p)", self.limits),
                _listed("wrong", Counter(self.wrong)),
            ]
        )


def _listed(what: str, lines: Counter[str], most: int = 20) -> str:
    rows = [f"\n  {line}" + f" ({count} times)" * (count > 1) for line, count in lines.most_common(most)]
    return f"{lines.total()} {what}, {len(lines)} different ones" + "".join(rows)


@dataclass
class _Live:
    which: int
    seen: Answer | None = None


class Churn:
    """One run on the engine under test."""

    def __init__(
        self, llm: Any, where: Setting, requests: list[Request], answers: Answers, rng: random.Random
    ) -> None:
        self.llm, self.where, self.rng = llm, where, rng
        self.requests, self.answers = requests, answers
        self.engine, self.runner = llm.llm_engine, harness.runner(llm)
        self.core = self.engine.engine_core.engine_core
        self.report = Report()
        self.live: dict[str, _Live] = {}
        self.waiting: defaultdict[int, list[tuple[Answer, bool]]] = defaultdict(list)
        # Answers in bf16 that part, with the gap at temperature 1 and whether a limit takes part.
        self.apart: Counter[tuple[str, float, bool]] = Counter()
        if where.graphs:
            self.report.replays = harness.count_replays(self.runner)
        self.before = self.held()

    def held(self) -> dict[str, Any]:
        """Everything that a request may hold; the same before and after a run."""
        scheduler, states = self.core.scheduler, self.runner.req_states
        cache = scheduler.kv_cache_manager
        found: dict[str, Any] = {
            "free blocks": cache.block_pool.get_num_free_blocks(),
            "requests of the scheduler": len(scheduler.requests),
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "state indices": len(states.req_id_to_index),
            "free state indices": sorted(states.free_indices),
            "requests of the front end": self.engine.get_num_unfinished_requests(),
        }
        for number, manager in enumerate(cache.coordinator.single_type_managers):
            for name in (
                "req_to_blocks",
                "num_cached_block",
                "last_state_block_idx",
                "_allocated_block_reqs",
            ):
                if hasattr(manager, name):
                    found[f"group {number}: {name}"] = len(getattr(manager, name))
        return found

    def run(self, seconds: float, in_flight: int, least: int = 0) -> Report:
        """Churn for `seconds` and until `least` requests came; in pauses the rest finishes, and what is left
        is checked."""
        start = time.monotonic()
        pauses = min(PAUSES, max(1, int(seconds // SECONDS_BETWEEN)))
        for pause in range(1, pauses + 1):
            end, count = start + seconds * pause / pauses, least * pause // pauses
            while time.monotonic() < end or self.report.added < count:
                self._arrive(in_flight)
                if self.live and self.rng.random() < 0.08:
                    self.abort(self.rng.choice(sorted(self.live)))
                self.step()
            self.drain(300)
            self._settle()
            self.check_held()
            self._catch_up()
            self.report.memory.append(churn_memory.measure(self.report.finished))
        self.report.seconds = time.monotonic() - start
        self.answers.all()
        self.report.waited = time.monotonic() - start - self.report.seconds
        self._catch_up()
        self._check_end()
        return self.report

    def _arrive(self, in_flight: int) -> None:
        # Bursts and lulls: at times the engine runs dry, at times requests wait.
        if len(self.live) >= in_flight or self.rng.random() > (0.5 if len(self.live) > 1 else 0.9):
            return
        for _ in range(self.rng.choice([1, 1, 2, in_flight // 2])):
            name = self.add(self.rng.randrange(len(self.requests)))
            if self.rng.random() < 0.02:
                self.abort(name)

    def add(self, which: int) -> str:
        """Send a request of the catalogue; returns the name that it has in `live`."""
        request, name = self.requests[which], f"churn-{self.report.added}"
        self.engine.add_request(name, {"prompt_token_ids": list(request.prompt)}, request.sampling())
        self.live[name] = _Live(which)
        self.report.added += 1
        return name

    def abort(self, name: str) -> None:
        """Abort a live request, and compare what it got."""
        live = self.live.pop(name)
        self.engine.abort_request([name])
        self.report.aborted["before any token" if live.seen is None else "in the middle"] += 1
        if live.seen is not None:
            self._compare(live.which, live.seen, finished=False)

    def drain(self, seconds: float) -> None:
        """Steps until no request is left; it is a failure if that takes longer than `seconds`."""
        deadline = time.monotonic() + seconds
        while self.engine.has_unfinished_requests():
            if time.monotonic() > deadline:
                self.report.wrong.append(f"{len(self.live)} requests never finished")
                break
            self.step()

    def step(self) -> None:
        """One step of the engine; finished answers are compared."""
        for output in self.engine.step():
            live = self.live.get(output.request_id)
            if live is None:  # aborted while its step was under way
                continue
            live.seen = Answer.of(output.outputs[0])
            if output.finished:
                del self.live[output.request_id]
                self.report.finished += 1
                self.report.tokens += len(live.seen.tokens)
                self.report.kinds[self.requests[live.which].kind] += 1
                self._compare(live.which, live.seen, finished=True)
        self.report.steps += 1
        self.report.ahead += bool(self.core.batch_queue)

    def _catch_up(self) -> None:
        """Compare what came before the answer alone did, as far as that is there now."""
        for which in [which for which in self.waiting if self.answers.get(which) is not None]:
            for found, finished in self.waiting.pop(which):
                self._compare(which, found, finished)

    def _compare(self, which: int, found: Answer, finished: bool) -> None:
        request, expected = self.requests[which], self.answers.get(which)
        if expected is None:
            self.waiting[which].append((found, finished))
            return
        self.report.compared += 1
        what = difference(expected, found, finished)
        if what is None and finished:
            what = logprob_difference(request, expected, found, self._tolerance(request))
        if what is None:
            return
        line = f"request {which} ({request.kind}): {what}"
        at = parted(expected, found)
        if at is None or self.where.exact:
            self.report.wrong.append(line)
            return
        gap = request.gap(expected, at, found.tokens[at])
        self.apart[f"{line}, {gap:.3f} from being chosen", gap / request.scale, request.filtered] += 1

    def judge(self) -> None:
        """What parted in bf16 is a near-tie, a limit crossed, or wrong, by the noise of plain decoding, which
        comes after the last answer alone."""
        assert self.answers.noise is not None
        self.report.noise = self.answers.noise
        self.report.tie = max(TIE, SLACK * self.report.noise)
        for (line, gap, filtered), count in self.apart.items():
            if gap <= self.report.tie:
                self.report.ties[line] += count
            elif filtered:
                self.report.limits[line] += count
            else:
                self.report.wrong += [line] * count
        self.apart.clear()

    def _tolerance(self, request: Request) -> float:
        """How far a log-probability may be off. A token that rounding carries across a limit changes all
        others' too, by any amount."""
        if self.where.exact:
            return 1e-3
        if request.filtered:
            return float("inf")
        return NOISE * request.scale

    def _settle(self) -> None:
        """Steps without requests: what finished last is freed by the step after."""
        for _ in range(3):
            self.core.step_fn()

    def check_held(self) -> None:
        """Everything that requests hold is as it was before the first one."""
        for name, value in self.held().items():
            if value != self.before[name]:
                self.report.wrong.append(f"{name}: {value}, but {self.before[name]} before the run")

    def _check_end(self) -> None:
        report = self.report
        metrics = {m.name: m.value for m in self.llm.get_metrics() if hasattr(m, "value")}
        report.preemptions = int(metrics["vllm:num_preemptions"])
        report.hits = int(metrics["vllm:prefix_cache_hits"])
        if self.where.trees:
            report.stats = self.runner.model_state.step.stats.read()
        report.wrong += churn_memory.leaks(report.memory)
        self.check_modes()
        for which in range(min(3, len(self.requests))):
            (found,) = churn_engines.ask(self.llm, [self.requests[which]])
            self._compare(which, found, finished=True)
        if not self.where.exact:
            self.judge()
        for what, lines in (("near-ties", report.ties), ("limits crossed", report.limits)):
            if lines.total() > max(2, MOST[what] * report.compared):
                report.wrong.append(f"{what}: {lines.total()} of {report.compared} answers, too many")

    def check_modes(self) -> None:
        """What was asked for did happen: steps ahead of their scheduler, replays of CUDA graphs."""
        if self.where.asynchronous and not self.report.ahead:
            self.report.wrong.append("asynchronous scheduling: no step began before the last one's end")
        for model, count in self.report.replays.items():
            if count == 0:
                self.report.wrong.append(f"CUDA graphs: none of the {model} was replayed")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m tests.e2e.churn", description=(__doc__ or "").split("\n")[0]
    )
    made.add_argument("--minutes", type=float, default=10, help="how long requests keep coming")
    made.add_argument("--least", type=int, default=0, help="and until this many requests came")
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--requests", type=int, default=56, help="size of the catalogue")
    made.add_argument("--concurrency", type=int, default=8, help="--max-num-seqs of the engine")
    made.add_argument("--max-tokens", type=int, default=40, help="of a request, at most")
    made.add_argument("--budget", type=int, default=16, help="nodes of a tree")
    made.add_argument("--blocks", type=int, help="blocks of the KV cache (default: too few for all)")
    made.add_argument("--chunk", type=int, default=48, help="--long-prefill-token-threshold")
    made.add_argument(
        "--target",
        choices=["random", "demo"],
        help="default: demo on a GPU, random elsewhere; random is for the CPU",
    )
    made.add_argument("--graphs", action="store_true", help="CUDA graphs for decode steps (on a GPU)")
    made.add_argument("--plain", action="store_true", help="no trees: the same churn by vLLM as it is")
    for name, text in (
        ("prefix-caching", "automatic prefix caching (default on)"),
        ("async-scheduling", "asynchronous scheduling (default on)"),
    ):
        made.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, default=True, help=text)
    return made


def main(words: Sequence[str] | None = None) -> Report:
    """A whole run, from the command line's words."""
    arguments = parser().parse_args(words)
    churn_memory.measure(0)  # where it cannot be measured, say so before minutes have passed
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        where = churn_engines.setting(arguments, Path(folder))
        rng = random.Random(arguments.seed)
        requests = churn_engines.requests_of(where, arguments.requests, rng, arguments.max_tokens)
        with (
            churn_engines.answered_alone(where, requests) as answers,
            churn_engines.engine(where, requests, answers) as llm,
        ):
            print(f"the engine under test came up in {time.monotonic() - start:.0f} s", flush=True)
            churn = Churn(llm, where, requests, answers, rng)
            in_flight = arguments.concurrency * 3 // 2
            report = churn.run(60 * arguments.minutes, in_flight, arguments.least)
    print(where.comparison(len(requests)), report.summary(), sep="\n", flush=True)
    return report


if __name__ == "__main__":
    sys.exit(1 if main().wrong else 0)
