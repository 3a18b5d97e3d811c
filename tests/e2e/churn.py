# SPDX-License-Identifier: Apache-2.0
"""Churn: random requests come, wait, are preempted, aborted and finished; each equals its run alone.

    python -m tests.e2e.churn --minutes 10 --seed 1

A catalogue of requests is drawn from the seed: prompts with shared beginnings, lengths, sampling parameters,
penalties, banned words, grammars, log-probabilities, stop strings. vLLM without speculation answers each one
alone. Then an engine with trees and a small KV cache gets them in random order and number, again and again,
and loses some to aborts. Every answer is compared with the one alone, an aborted one as far as it came; at
the end no block, no state index and no memory may be missing, and the engine must still answer.

The random target (`--target random`, the default without a GPU) is attention-only and in float32: answers
must be equal. Its draft knows nothing; accepted paths come from an oracle. The demo target (`--target demo`)
is a hybrid in bf16, whose rows round otherwise in another batch: a greedy answer may then part from the one
alone at a near-tie, a sampled one (whose noise decides too) in few requests.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

if __name__ == "__main__":  # as the conftest does for tests; before vLLM is imported
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if not torch.cuda.is_available():
        import tests.e2e.conftest  # noqa: F401

import psutil

from tests.e2e import harness, models, oracle
from tests.e2e.churn_requests import Answer, Request, catalogue, difference, logprob_difference, parted

# A step of bf16 at logits of 16 to 32, which random prompts and biases bring about; see `harness.TIE`.
TIE = 0.13
# Sampled answers of a bf16 engine that may differ; a wrong state or cache shows in most answers.
MAX_TIES = 0.12
# Allocators keep what they once had. What a leak of one small buffer a request would cost is far more.
RSS_GROWTH = 48 * 2**20


# --- engines ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """Models and engine options of a run."""

    target: Path
    draft: Path
    plain: dict[str, Any]
    ours: dict[str, Any]
    exact: bool
    longest: int

    @property
    def oracle(self) -> bool:
        """Whether accepted paths need an oracle."""
        return self.exact


def random_models(folder: Path) -> None:
    """The attention-only pair, with the demo's tokenizer."""
    models.attention_only(folder / "target", 1024)
    models.random_draft(folder / "draft", vocab=1024)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(harness.DEMO / "target" / name, folder / "target" / name)


def setting(arguments: argparse.Namespace, folder: Path) -> Setting:
    """Where to run and with what, from the command line's options."""
    cuda, chosen = torch.cuda.is_available(), arguments.target
    exact = (chosen or ("demo" if cuda else "random")) == "random"
    if exact and arguments.graphs:
        raise SystemExit(
            "--graphs needs --target demo: the oracle of the random target is no part of a graph"
        )
    common: dict[str, Any] = {
        "max_model_len": 192 if exact else 448,
        "max_num_seqs": arguments.concurrency,
        "enforce_eager": True,
        "enable_prefix_caching": False,
    }
    if cuda:
        from vllm_weaver import plugin

        plugin.register()  # where the package is not installed there is no entry point
        common |= {
            "gpu_memory_utilization": 0.2,
            "attention_backend": "FLASH_ATTN",
            "additional_config": {"gdn_prefill_backend": "triton"},
        }
    if not exact:
        common["logprobs_mode"] = "processed_logprobs"  # a near-tie is one of what is chosen from
    if exact:
        random_models(folder)
        common |= {"dtype": "float32", "block_size": 32}
    target = folder / "target" if exact else harness.DEMO / "target"
    draft = folder / "draft" if exact else harness.DEMO / "draft"
    ours = dict(common) | harness.trees(arguments.budget, "ddtree" if exact else "weaver", draft)
    ours["enable_prefix_caching"] = arguments.prefix_caching
    ours["num_gpu_blocks_override"] = arguments.blocks or (
        # Room for about half of the requests at their longest, without shared blocks.
        max(8, 5 * arguments.concurrency // 4) if exact else max(9, 5 * arguments.concurrency // 2)
    )
    ours["long_prefill_token_threshold"] = arguments.chunk
    ours["async_scheduling"] = arguments.async_scheduling
    if arguments.graphs:
        ours |= {
            "enforce_eager": False,
            "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
        }
    return Setting(target, draft, common, ours, exact, 96 if exact else 330)


def alone(
    where: Setting, count: int, rng: random.Random, max_tokens: int
) -> tuple[list[Request], list[Answer]]:
    """The catalogue, and what vLLM without speculation answers to each request, one at a time."""
    with harness.engine(where.target, **where.plain) as llm:
        tokenizer = llm.get_tokenizer()
        vocab = llm.model_config.get_vocab_size()
        requests = catalogue(count, rng, harness.demo_prompts(tokenizer), vocab, max_tokens, where.longest)
        # Near-ties are judged by the log-probabilities of many tokens.
        more = {} if where.exact else {"logprobs": harness.TOP}
        answers = [Answer.of(ask(llm, request, **more)) for request in requests]
    return requests, answers


def ask(llm: Any, request: Request, **more: Any) -> Any:
    """The answer to one request by an engine that has nothing else to do."""
    prompt = {"prompt_token_ids": list(request.prompt)}
    sampling = replace(request, params=request.params | more).sampling()
    return llm.generate([prompt], sampling, use_tqdm=False)[0].outputs[0]


# --- the run ---------------------------------------------------------------------------------------------


@dataclass
class Report:
    """What happened. `wrong` are failures, `ties` excused differences (bf16 only), by request."""

    seconds: float = 0.0
    added: int = 0
    finished: int = 0
    aborted: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    compared: int = 0
    ties: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    preemptions: int = 0
    hits: int = 0
    stats: dict[str, int] = field(default_factory=dict)
    rss: list[int] = field(default_factory=list)

    def summary(self) -> str:
        """A few lines for people."""
        mib = [round(value / 2**20) for value in self.rss]
        verifies = max(1, self.stats.get("verifies", 0))
        return "\n".join(
            [
                f"{self.seconds:.0f} s: {self.added} requests, {self.finished} finished, aborted "
                f"{dict(self.aborted)}; {self.tokens} tokens of finished ones, {self.compared} compared",
                f"kinds finished: {dict(self.kinds)}",
                f"{self.preemptions} preemptions, {self.hits} prompt tokens from the prefix cache, "
                f"{1 + self.stats.get('accepted', 0) / verifies:.2f} tokens a verify, {self.stats}",
                f"memory of the process (MiB): {mib}",
                f"{len(self.ties)} near-ties" + "".join(f"\n  {line}" for line in self.ties[:20]),
                f"{len(self.wrong)} wrong" + "".join(f"\n  {line}" for line in self.wrong[:20]),
            ]
        )


@dataclass
class _Live:
    which: int
    seen: Answer | None = None


class Churn:
    """One run on an engine with trees."""

    def __init__(
        self, llm: Any, where: Setting, requests: list[Request], answers: list[Answer], rng: random.Random
    ) -> None:
        self.llm, self.where, self.rng = llm, where, rng
        self.requests, self.answers = requests, answers
        self.engine, self.runner = llm.llm_engine, harness.runner(llm)
        self.core = self.engine.engine_core.engine_core
        self.report = Report()
        self.live: dict[str, _Live] = {}
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

    def run(self, seconds: float, in_flight: int) -> Report:
        """Churn for `seconds`, then let the rest finish, and check what is left."""
        start = time.monotonic()
        next_sample = 0.25
        while (now := time.monotonic() - start) < seconds:
            if now > next_sample * seconds:
                self.report.rss.append(self._rss())
                next_sample += 0.25
            self._arrive(in_flight)
            if self.live and self.rng.random() < 0.08:
                self.abort(self.rng.choice(sorted(self.live)))
            self.step()
        self.drain(300 + seconds)
        self._settle()
        self.report.seconds = time.monotonic() - start
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

    def _compare(self, which: int, found: Answer, finished: bool) -> None:
        self.report.compared += 1
        request, expected = self.requests[which], self.answers[which]
        what = difference(expected, found, finished)
        if what is None and finished:
            what = logprob_difference(request, expected, found, 1e-3 if self.where.exact else 0.2)
        if what is None:
            return
        line = f"request {which} ({request.kind}): {what}"
        at = parted(expected, found)
        if at is None or self.where.exact:
            self.report.wrong.append(line)
        elif request.params["temperature"] > 0:
            self.report.ties.append(line)
        else:
            gap = expected.gap(at, found.tokens[at])
            excused = self.report.ties if gap <= TIE else self.report.wrong
            excused.append(f"{line}, {gap:.3f} less likely")

    def _settle(self) -> None:
        """Steps without requests: what finished last is freed by the step after."""
        for _ in range(3):
            self.core.step_fn()
        gc.collect()

    def _rss(self) -> int:
        if torch.cuda.is_available():
            return int(torch.cuda.memory_allocated())
        gc.collect()
        with contextlib.suppress(OSError, AttributeError):  # glibc only: freed memory that it still keeps
            ctypes.CDLL(None).malloc_trim(0)
        return int(psutil.Process().memory_info().rss)

    def check_held(self) -> None:
        """Everything that requests hold is as it was before the first one."""
        for name, value in self.held().items():
            if value != self.before[name]:
                self.report.wrong.append(f"{name}: {value}, but {self.before[name]} before the run")

    def _check_end(self) -> None:
        report = self.report
        report.rss.append(self._rss())
        self.check_held()
        metrics = {m.name: m.value for m in self.llm.get_metrics() if hasattr(m, "value")}
        report.preemptions = int(metrics["vllm:num_preemptions"])
        report.hits = int(metrics["vllm:prefix_cache_hits"])
        report.stats = self.runner.model_state.step.stats.read()
        if report.seconds > 120 and report.rss[-1] - report.rss[0] > RSS_GROWTH:
            report.wrong.append(f"memory grew from {report.rss[0]} to {report.rss[-1]} bytes")
        if len(set(report.ties)) > max(2, MAX_TIES * len(self.requests)):
            report.wrong.append(f"{len(set(report.ties))} of {len(self.requests)} requests have near-ties")
        for which in range(min(3, len(self.requests))):
            self._compare(which, Answer.of(ask(self.llm, self.requests[which])), finished=True)


@contextlib.contextmanager
def asynchronous(wanted: bool) -> Iterator[None]:
    """Asynchronous scheduling on the CPU too, where vLLM has no use for it and switches it off."""
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config

    def check(cls: Any, config: Any) -> None:
        original(config)
        config.scheduler_config.async_scheduling = True

    if wanted:
        CpuPlatform.check_and_update_config = classmethod(check)
    try:
        yield
    finally:
        CpuPlatform.check_and_update_config = original


@contextlib.contextmanager
def engine(where: Setting, requests: list[Request], answers: list[Answer]) -> Iterator[Any]:
    """The engine with trees, with an oracle where the draft knows nothing."""
    wanted = where.ours.get("async_scheduling", False)
    with (
        asynchronous(wanted and not torch.cuda.is_available()),
        harness.engine(where.target, **where.ours) as llm,
    ):
        assert llm.llm_engine.vllm_config.scheduler_config.async_scheduling == wanted
        if where.oracle:
            known = [
                harness.Reference(request.prompt, answer.tokens, ())
                for request, answer in zip(requests, answers, strict=True)
            ]
            shapes = [oracle.second_child, oracle.late, oracle.chain, oracle.none, oracle.wrong]
            oracle.install(harness.runner(llm), known, shapes)
        yield llm


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m tests.e2e.churn", description=(__doc__ or "").split("\n")[0]
    )
    made.add_argument("--minutes", type=float, default=10, help="how long requests keep coming")
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
    made.add_argument("--graphs", action="store_true", help="CUDA graphs for decode steps")
    for name, text in (
        ("prefix-caching", "automatic prefix caching (default on)"),
        ("async-scheduling", "asynchronous scheduling (default on)"),
    ):
        made.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, default=True, help=text)
    return made


def main(words: Sequence[str] | None = None) -> Report:
    """A whole run, from the command line's words."""
    arguments = parser().parse_args(words)
    rng = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as folder:
        where = setting(arguments, Path(folder))
        start = time.monotonic()
        requests, answers = alone(where, arguments.requests, rng, arguments.max_tokens)
        print(f"{len(requests)} requests answered alone in {time.monotonic() - start:.0f} s", flush=True)
        with engine(where, requests, answers) as llm:
            in_flight = arguments.concurrency * 3 // 2
            report = Churn(llm, where, requests, answers, rng).run(60 * arguments.minutes, in_flight)
    print(report.summary(), flush=True)
    return report


if __name__ == "__main__":
    sys.exit(1 if main().wrong else 0)
