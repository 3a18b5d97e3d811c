# SPDX-License-Identifier: Apache-2.0
"""Engines of the benchmark in this process: one set of dummy weights for all of them, and the time of a step.

A step's time is the interval between two successive starts of a decode step, with the engine running ahead of
the GPU as it does when it serves (async scheduling). In a steady state that is the GPU's time for a step, or
the host's where that is longer.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench_lib.provenance import BenchmarkError, say

WARM_UP = 8  # steps left out at the start of every run


@dataclass(frozen=True)
class Arm:
    """One of the things compared: plain decoding, in-tree DFlash, or `dflash_tfm` with some budget."""

    name: str
    method: str | None = None
    budget: int = 0
    proposal: str = "weaver"

    @property
    def rows(self) -> int:
        """Rows of a decode step for one request."""
        return 1 + self.budget

    def options(self, models: dict[str, Path]) -> dict[str, Any]:
        """Engine options that make the arm."""
        if self.method is None:
            return {}
        config = {"method": self.method, "model": str(models["draft"]), "num_speculative_tokens": self.budget}
        if self.method == "dflash_tfm":
            config["proposal"] = self.proposal
            if self.proposal == "weaver":
                config["weaver"] = str(models["weaver"])
        return {"speculative_config": config}


def share_dummy_weights() -> None:
    """From here on every model of one class and shape gets the first one's dummy weights, and its memory."""
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    original = DummyModelLoader.load_weights
    kept: dict[str, dict[str, torch.Tensor]] = {}

    def load_weights(self: Any, model: torch.nn.Module, model_config: Any) -> None:
        name = f"{type(model).__name__} {model_config.model}"
        if name not in kept:
            original(self, model, model_config)
            kept[name] = {key: parameter.data for key, parameter in model.named_parameters()}
            return
        for key, parameter in model.named_parameters():
            parameter.data = kept[name][key]
        gc.collect()
        torch.cuda.empty_cache()

    DummyModelLoader.load_weights = load_weights


@dataclass
class Engine:
    """A started arm."""

    arm: Arm
    llm: Any
    starts: list[float] = field(default_factory=list)

    @classmethod
    def start(cls, arm: Arm, models: dict[str, Path], options: dict[str, Any]) -> Engine:
        """Starts vLLM; weights are dummies."""
        from vllm import LLM

        say(f"{arm.name}: starting")
        begin = time.perf_counter()
        llm = LLM(str(models["target"]), **(options | arm.options(models)))
        engine = cls(arm, llm)
        runner = engine.runner
        execute = runner.execute_model

        def timed(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            if scheduler_output.total_num_scheduled_tokens == arm.rows:
                engine.starts.append(time.perf_counter())
            return execute(scheduler_output, *args, **kwargs)

        runner.execute_model = timed
        say(f"{arm.name}: started in {time.perf_counter() - begin:.0f} s")
        return engine

    @property
    def runner(self) -> Any:
        """The model runner."""
        core = self.llm.llm_engine.engine_core.engine_core
        return core.model_executor.driver_worker.worker.model_runner

    def generate(self, context: int, tokens: int) -> None:
        """One request of `context` prompt tokens, then `tokens` greedy ones."""
        from vllm import SamplingParams

        generator = torch.Generator().manual_seed(context)
        prompt = torch.randint(1000, 100_000, (context,), generator=generator).tolist()
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        self.starts.clear()
        self.llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)

    def step_ms(self, context: int, steps: int) -> float:
        """Median milliseconds of a decode step at this context length."""
        wanted = steps + WARM_UP + 1
        self.generate(
            context, (wanted + 1) * (1 if self.arm.method is None else 2)
        )  # some drafts are accepted
        times = self.starts[:wanted]
        intervals = [1e3 * (b - a) for a, b in zip(times, times[1:], strict=False)][WARM_UP:]
        if len(intervals) < steps // 2:
            raise BenchmarkError(
                f"{self.arm.name} ran {len(intervals)} steps of {self.arm.rows} rows, but at least "
                f"{steps // 2} were expected: its steps have another width"
            )
        return statistics.median(intervals)

    def during(self, context: int, tokens: int, action: Callable[[], None], at_step: int) -> None:
        """Generates, and calls `action` when decode step `at_step` starts."""
        execute = self.runner.execute_model

        def watched(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            if scheduler_output.total_num_scheduled_tokens == self.arm.rows and len(self.starts) == at_step:
                action()
            return execute(scheduler_output, *args, **kwargs)

        self.runner.execute_model = watched
        try:
            self.generate(context, tokens)
        finally:
            self.runner.execute_model = execute

    def close(self) -> None:
        """Ends the engine and frees what it does not share with the others of this process."""
        from unittest.mock import patch

        with patch("vllm.v1.engine.core.cleanup_dist_env_and_memory"):  # the process groups are common
            self.llm.llm_engine.engine_core.shutdown()
        self.llm = None
        gc.collect()
        torch.cuda.empty_cache()
