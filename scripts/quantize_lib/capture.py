# SPDX-License-Identifier: Apache-2.0
"""What reaches a draft's linear layers while vLLM serves prompts with it: the largest input of each, from
prefills and decode steps, and the accepted length. The state is saved after every batch of prompts."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from scripts.quantize_lib.nvfp4 import FUSED_MODULES


@dataclass(frozen=True)
class Run:
    """How prompts are run: the target and draft folders, generation, and more options of vLLM's `LLM`."""

    target: str
    draft: str
    depth: int
    tokens: int
    temperature: float
    batch: int
    max_model_len: int
    engine: Mapping[str, Any] = field(default_factory=dict)

    def options(self) -> dict[str, Any]:
        """All options of the `LLM`; ValueError, one sentence, where `engine` has one that is set here or that
        vLLM does not know."""
        from vllm.engine.arg_utils import EngineArgs

        ours: dict[str, Any] = {
            "model": self.target,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.batch,
            "enforce_eager": True,  # hooks see every step
            "enable_prefix_caching": False,  # a cached prompt would not pass through the draft again
            "disable_log_stats": False,
            "speculative_config": {
                "method": "dflash",
                "model": self.draft,
                "num_speculative_tokens": self.depth,
            },
        }
        if taken := sorted(ours.keys() & self.engine.keys()):
            raise ValueError(f"--engine has {', '.join(taken)}, which this script sets itself; leave it out")
        if unknown := sorted(self.engine.keys() - {known.name for known in fields(EngineArgs)}):
            raise ValueError(f"--engine has {', '.join(unknown)}, which vLLM's LLM does not have")
        return ours | dict(self.engine)


@dataclass
class Calibration:
    """Largest inputs by fused module so far. `key` says of which run."""

    key: str
    prompts: int = 0
    rows: dict[str, int] = field(default_factory=dict)
    peaks: dict[str, float] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self), indent=1) + "\n")
        partial.rename(path)


def load_calibration(path: Path, key: str) -> Calibration:
    """The state to go on from; ValueError if the file is of another run."""
    if not path.is_file():
        return Calibration(key)
    try:
        state = Calibration(**json.loads(path.read_text()))
    except (ValueError, TypeError):
        raise ValueError(f"{str(path)!r} is damaged; remove it to calibrate from the start") from None
    if state.key != key:
        raise ValueError(
            f"{str(path)!r} belongs to another draft, target, set of prompts or setting; remove it to "
            "calibrate from the start"
        )
    return state


def key_of(run: Run, prompts: Sequence[Any], weights: Path) -> str:
    """Identity of a calibration: everything that changes what is captured."""
    digest = hashlib.sha256(
        json.dumps([run.tokens, run.temperature, list(prompts), dict(run.engine)], sort_keys=True).encode()
    )
    digest.update(Path(run.target).name.encode())
    for file in sorted(weights.glob("*.safetensors")):
        with file.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()


@contextlib.contextmanager
def serving(run: Run) -> Iterator[Any]:
    """An eager `LLM` in this process, where hooks can be put into the draft (`method=dflash`); shut down at
    the end."""
    from vllm import LLM

    llm = LLM(**run.options())
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def draft_of(llm: Any) -> Any:
    """The draft model of an in-process engine."""
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    return executor.driver_worker.worker.model_runner.speculator.model


@contextlib.contextmanager
def recording(draft: Any, state: Calibration) -> Iterator[None]:
    """Forward pre-hooks on every module that is to be quantized; peaks go to `state` at the end."""
    peaks: dict[str, torch.Tensor] = {}
    rows: dict[str, int] = {}
    handles = []

    def watch(name: str, module: torch.nn.Module) -> None:
        def hook(_: Any, inputs: tuple[Any, ...]) -> None:
            x = inputs[0]
            if not len(x):
                return
            peak = x.detach().abs().amax().float()
            peaks[name] = torch.maximum(peaks[name], peak) if name in peaks else peak
            rows[name] = rows.get(name, 0) + len(x)

        handles.append(module.register_forward_pre_hook(hook))

    for number, layer in enumerate(draft.model.layers):
        for fused in FUSED_MODULES:
            watch(f"layers.{number}.{fused}", layer.get_submodule(fused))
    # A plain draft projects the prompt's keys and values by one product for all layers, past the modules; a
    # quantized one calls each module. So does this one while it is watched.
    fused_weight, draft.model._fused_kv_weight = draft.model._fused_kv_weight, None
    try:
        yield
    finally:
        draft.model._fused_kv_weight = fused_weight
        for handle in handles:
            handle.remove()
    for name, peak in peaks.items():
        value = float(peak)
        if not 0 < value < float("inf"):
            raise ValueError(
                f"the input of {name} has the largest value {value}; the draft or target is damaged"
            )
        state.peaks[name] = max(state.peaks.get(name, 0.0), value)
        state.rows[name] = state.rows.get(name, 0) + rows[name]


def token_ids(llm: Any, prompt: Any) -> list[int]:
    """Token ids of a prompt: a text, a list of ids, or a conversation (`[{"role": ..., "content": ...}]`)."""
    if isinstance(prompt, str):
        return list(llm.get_tokenizer().encode(prompt))
    if prompt and isinstance(prompt[0], dict):
        return list(
            llm.get_tokenizer().apply_chat_template(prompt, add_generation_prompt=True, tokenize=True)
        )
    return list(prompt)


def generate(llm: Any, run: Run, prompts: Sequence[Any], first: int) -> int:
    """Serves a batch of prompts, the first of which has number `first`; returns the tokens generated."""
    from vllm import SamplingParams

    params = [
        SamplingParams(
            temperature=run.temperature,
            max_tokens=run.tokens,
            seed=first + i,
            detokenize=False,
            ignore_eos=False,
        )
        for i in range(len(prompts))
    ]
    requests = [{"prompt_token_ids": token_ids(llm, prompt)} for prompt in prompts]
    outputs = llm.generate(requests, params, use_tqdm=False)
    return sum(len(output.outputs[0].token_ids) for output in outputs)


def calibrate(run: Run, prompts: Sequence[Any], state: Calibration, path: Path) -> None:
    """Runs the prompts that `state` has not seen; saves it to `path` after every batch."""
    from tqdm import tqdm

    if state.prompts >= len(prompts):
        return
    with (
        serving(run) as llm,
        tqdm(total=len(prompts), initial=state.prompts, unit="prompt", desc="calibration") as bar,
    ):
        while state.prompts < len(prompts):
            chosen = prompts[state.prompts : state.prompts + run.batch]
            with recording(draft_of(llm), state):
                generate(llm, run, chosen, state.prompts)
            state.prompts += len(chosen)
            state.save(path)
            bar.update(len(chosen))


def accepted_length(run: Run, prompts: Sequence[Any]) -> tuple[float, int]:
    """Mean tokens a verify step commits (1 + accepted drafts) over the prompts, and the steps."""
    from tqdm import tqdm

    with serving(run) as llm:
        for at in tqdm(range(0, len(prompts), run.batch), unit="batch", desc=Path(run.draft).name):
            generate(llm, run, prompts[at : at + run.batch], at)
        metrics = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    steps = metrics["vllm:spec_decode_num_drafts"]
    if not steps:
        raise ValueError(
            "nothing was drafted, so there is no accepted length; give longer prompts or --tokens"
        )
    return 1 + metrics["vllm:spec_decode_num_accepted_tokens"] / steps, int(steps)
