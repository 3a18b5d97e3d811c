# SPDX-License-Identifier: Apache-2.0
"""The two engines of `churn`: vLLM without speculation in a process of its own, and the engine under test.

The first answers every request of the catalogue alone, one after the other, while the second one starts and,
if it needs no oracle, already works.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import shutil
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tests.e2e import fields, harness, models
from tests.e2e.churn_requests import Answer, Request, catalogue


def prepare() -> None:
    """The environment of a process that will import vLLM; what is set already is left as it is."""
    for name, value in (
        ("OMP_NUM_THREADS", "1"),
        ("VLLM_ENABLE_V1_MULTIPROCESSING", "0"),
        ("VLLM_LOGGING_LEVEL", "ERROR"),
        ("HF_HUB_OFFLINE", "1"),
        # vLLM's CPU matrix products keep a primitive (0.3 MiB) for every weight shape and number of rows that
        # a step has had, up to 1,024: for half an hour that looks like a leak.
        ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16"),
    ):
        os.environ.setdefault(name, value)
    if not torch.cuda.is_available():
        import tests.e2e.conftest  # noqa: F401


@dataclass(frozen=True)
class Setting:
    """Models and engine options of a run: `plain` for the answers alone, `tested` for the churn."""

    target: Path
    plain: dict[str, Any]
    tested: dict[str, Any]
    exact: bool
    longest: int

    @property
    def crowd(self) -> dict[str, Any]:
        """Options of the engine under test, without speculation."""
        return {name: value for name, value in self.tested.items() if name != "speculative_config"}

    @property
    def trees(self) -> bool:
        """Whether the engine under test speculates."""
        return "speculative_config" in self.tested

    @property
    def graphs(self) -> bool:
        """Whether the engine under test replays CUDA graphs."""
        return not self.tested["enforce_eager"]

    @property
    def asynchronous(self) -> bool:
        """Whether the engine under test schedules ahead of its steps."""
        return bool(self.tested["async_scheduling"])

    @property
    def oracle(self) -> bool:
        """Whether accepted paths need an oracle."""
        return self.trees and self.exact

    def comparison(self, count: int) -> str:
        """One line: what is compared with what, by which rule."""
        tested = "vLLM as it is"
        if self.trees:
            config = self.tested["speculative_config"]
            tested = f"dflash_tfm (budget {config['num_speculative_tokens']}, {config['proposal']})"
        rule = "they must be equal"
        if not self.exact:
            rule = "bf16: they may part at near-ties"
        on = ["CUDA graphs" if self.graphs else "eager", f"{self.tested['max_num_seqs']} at once"]
        on += ["asynchronous scheduling"] if self.asynchronous else []
        on += ["prefix caching"] if self.tested["enable_prefix_caching"] else []
        return (
            f"compared: answers of {tested} in a crowd ({', '.join(on)}) with those of vLLM without "
            f"speculation to the same {count} requests, one at a time, eager; {rule}"
        )


def random_models(folder: Path) -> None:
    """The attention-only pair, with the demo's tokenizer."""
    models.attention_only(folder / "target", 1024)
    models.random_draft(folder / "draft", vocab=1024)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(harness.DEMO / "target" / name, folder / "target" / name)


def setting(arguments: argparse.Namespace, folder: Path) -> Setting:
    """Where to run and with what, from the command line's options; random models are made in `folder`."""
    cuda, chosen = torch.cuda.is_available(), arguments.target
    exact = (chosen or ("demo" if cuda else "random")) == "random"
    if exact and arguments.graphs:
        raise SystemExit(
            "--graphs needs --target demo: the oracle of the random target is no part of a graph"
        )
    if arguments.graphs and not cuda:
        raise SystemExit("--graphs needs a GPU: there are no CUDA graphs on a CPU")
    common: dict[str, Any] = {
        "max_model_len": 192 if exact else 448,
        "max_num_seqs": arguments.concurrency,
        "enforce_eager": True,
        "enable_prefix_caching": False,
    }
    if cuda:
        common |= harness.GPU
    if exact:
        random_models(folder)
        common |= {"dtype": "float32", "block_size": 32}
        longest = 96
    else:
        # A near-tie is one of what is chosen from.
        common |= {"logprobs_mode": "processed_logprobs", "max_logprobs": -1}
        longest = 330
        if not cuda:
            # The longest prompts grow out of their block, where another request has to make room.
            common["block_size"] = harness.BLOCK
            longest = harness.BLOCK - 4
    models_at = folder if exact else harness.DEMO
    tested = common | {
        "enable_prefix_caching": arguments.prefix_caching,
        "num_gpu_blocks_override": arguments.blocks
        # Room for about half of the requests at their longest, without shared blocks.
        or (max(8, 5 * arguments.concurrency // 4) if exact else max(9, 5 * arguments.concurrency // 2)),
        "long_prefill_token_threshold": arguments.chunk,
        "async_scheduling": arguments.async_scheduling,
    }
    if not arguments.plain:
        tested |= harness.trees(arguments.budget, "ddtree" if exact else "weaver", models_at / "draft")
    if arguments.graphs:
        tested |= {
            "enforce_eager": False,
            "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
        }
    return Setting(models_at / "target", common, tested, exact, longest)


def requests_of(where: Setting, count: int, rng: random.Random, max_tokens: int) -> list[Request]:
    """The catalogue of a run."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(where.target)
    vocab = json.loads((where.target / "config.json").read_text())["vocab_size"]
    return catalogue(count, rng, harness.demo_prompts(tokenizer), vocab, max_tokens, where.longest)


# --- answers alone ---------------------------------------------------------------------------------------


def ask(llm: Any, requests: Sequence[Request]) -> list[Answer]:
    """The answers to one batch by an engine that has nothing else to do."""
    cases = [fields.Case(request.prompt, request.sampling()) for request in requests]
    return [Answer.of(output.outputs[0]) for output in fields.ask(llm, cases)]


def _answer_alone(where: Setting, requests: Sequence[Request], answers: Connection) -> None:
    """Send the answer of vLLM without speculation to each request, one at a time, then its own noise (see
    `Answers`); a process runs this."""
    prepare()
    # Near-ties are judged by log-probabilities; noise can choose any token.
    if not where.exact:
        requests = [
            replace(request, params=request.params | {"logprobs": -1 if request.sampled else harness.TOP})
            for request in requests
        ]
    alone: list[Answer] = []
    with harness.engine(where.target, **where.plain) as llm:
        for request in requests:
            alone += ask(llm, [request])
            answers.send(alone[-1])
    answers.send(0.0 if where.exact else _noise(where, requests, alone))


def _noise(where: Setting, requests: Sequence[Request], alone: Sequence[Answer], rounds: int = 4) -> float:
    """How far vLLM without speculation is from its answers alone (see `Request.apart`) in the setting under
    test: all requests at once, in random orders, with caching and chunks."""
    rng, noise = random.Random(0), 0.0
    with asynchronous(where.asynchronous), harness.engine(where.target, **where.crowd) as llm:
        for _ in range(rounds):
            order = rng.sample(range(len(requests)), len(requests))
            found = ask(llm, [requests[which] for which in order])
            for which, answer in zip(order, found, strict=True):
                noise = max(noise, requests[which].apart(alone[which], answer))
    return noise


class Answers:
    """The answers alone, in the order of the catalogue, as they come from their process.

    noise: how far log-probability gaps of vLLM without speculation are off in a crowd, by rounding alone, at
    temperature 1; None until `all` has returned."""

    def __init__(self, count: int, process: Any, connection: Connection) -> None:
        self._count, self._process, self._connection = count, process, connection
        self._known: list[Answer] = []
        self.noise: float | None = None

    def get(self, which: int) -> Answer | None:
        """The answer to a request of the catalogue, or None as long as it is not there."""
        while len(self._known) < self._count and self._connection.poll():
            self._receive()
        return self._known[which] if which < len(self._known) else None

    def all(self) -> list[Answer]:
        """All answers; waits for them and for `noise`."""
        while self.noise is None:
            self._receive()
        return self._known

    def _receive(self) -> None:
        try:
            received = self._connection.recv()
            if isinstance(received, Answer):
                self._known.append(received)
            else:
                self.noise = received
        except EOFError:
            self._process.join()
            raise RuntimeError(
                f"the process that answers requests alone ended with status {self._process.exitcode} after "
                f"{len(self._known)} of {self._count} answers; its own message is above"
            ) from None


@contextlib.contextmanager
def answered_alone(where: Setting, requests: Sequence[Request]) -> Iterator[Answers]:
    """The answers by vLLM without speculation, which a process begins to give."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer_alone, args=(where, requests, sender))
    process.start()
    sender.close()
    try:
        yield Answers(len(requests), process, receiver)
    finally:
        process.terminate()
        process.join()
        receiver.close()


# --- the engine under test -------------------------------------------------------------------------------


@contextlib.contextmanager
def asynchronous(wanted: bool) -> Iterator[None]:
    """Asynchronous scheduling on the CPU too, where vLLM has no use for it and switches it off."""
    if not wanted or torch.cuda.is_available():
        yield
        return
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config

    def check(cls: Any, config: Any) -> None:
        original(config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(check)
    try:
        yield
    finally:
        CpuPlatform.check_and_update_config = original


@contextlib.contextmanager
def engine(where: Setting, requests: Sequence[Request], answers: Answers) -> Iterator[Any]:
    """The engine under test, with an oracle where the draft knows nothing."""
    if torch.cuda.is_available():
        from vllm_weaver import plugin

        plugin.register()  # where the package is not installed there is no entry point
    with asynchronous(where.asynchronous), harness.engine(where.target, **where.tested) as llm:
        assert llm.llm_engine.vllm_config.scheduler_config.async_scheduling == where.asynchronous
        if where.oracle:
            from tests.e2e import oracle  # imports Triton, for which `prepare` would come too late

            known = [
                harness.Reference(request.prompt, answer.tokens, ())
                for request, answer in zip(requests, answers.all(), strict=True)
            ]
            shapes = [oracle.second_child, oracle.late, oracle.chain, oracle.none, oracle.wrong]
            # What was offered is of no interest here, and a record of all of it would look like a leak.
            oracle.install(harness.runner(llm), known, shapes, deque(maxlen=1))
        yield llm
