# SPDX-License-Identifier: Apache-2.0
"""Start-up by the command line, each in a process of its own (most of them forked from one that has imported
vLLM already, see `forks`): a mistake ends it with one line before any
weight of the target is read, every valid form gives the same settings, and who does not ask for trees gets
vLLM as it is."""

from __future__ import annotations

import json
import os
import queue
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.forks import Outcome, WarmCommandLine
from tests.e2e.harness import DEMO
from tests.e2e.server import Command, environment
from vllm_weaver.spec_decode.weaver import WeaverConfig, WeaverHead
from vllm_weaver.spec_decode.weaver_checkpoint import save_weaver

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
SECONDS = 180  # a refusal takes 10 s on two quiet cores
SPEC: dict[str, Any] = {
    "method": "dflash_tfm",
    "model": str(DEMO / "draft"),
    "weaver": str(DEMO / "weaver"),
    "num_speculative_tokens": 16,
}
# What any start prints when it comes to the target's weights; the control shows that it does.
MARKERS = ("Loading model from scratch", "EngineCore")


# --- files -----------------------------------------------------------------------------------------------


class Hostile:
    """Unpickled by Python, it makes a folder."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def write_files(folder: Path) -> None:
    """A target whose weights cannot be read, and Weaver checkpoints with one fault each."""
    from safetensors.torch import load_file, save_file

    target = folder / "target"
    target.mkdir()
    for file in (DEMO / "target").iterdir():
        content = file.read_bytes()
        (target / file.name).write_bytes(content[:4096] if file.suffix == ".safetensors" else content)

    config = json.loads((DEMO / "weaver" / "weaver.json").read_text())
    tensors = load_file(DEMO / "weaver" / "weaver.safetensors")
    first, *rest = sorted(tensors)
    broken = {
        "lacking": {name: tensors[name] for name in rest},
        "surplus": tensors | {"surplus.weight": torch.zeros(1)},
    }
    for name, content in broken.items():
        save_file(content, folder / f"{name}.safetensors")
        (folder / f"{name}.json").write_text(json.dumps(config))
    save_weaver(WeaverHead(WeaverConfig(**(config | {"d_model": 128}))), folder / "narrow.safetensors")
    hostile = {"config": config, "state_dict": tensors, "more": Hostile(folder / "executed")}
    torch.save(hostile, folder / "hostile.pth")


MISSING_TENSOR = "blocks.0.down_proj.bias"  # the first in alphabetical order


# --- the processes ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Refusal:
    """A serve command that must be refused; `{folder}` stands for where the files are.

    change: what differs from SPEC, None to leave a key out. dotted: write keys as options, not as JSON.
    """

    expected: tuple[str, ...]
    change: dict[str, Any] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    dotted: bool = False


BUDGET = "it must be the tree budget, an integer from 1 to 256"
REFUSALS = {
    "wrong key": Refusal(
        ("unknown key 'proposals' (value 'ddtree')", "did you mean 'proposal'?"), {"proposals": "ddtree"}
    ),
    "budget 0": Refusal(("num_speculative_tokens=0 ", BUDGET), {"num_speculative_tokens": 0}),
    "budget 257": Refusal(
        ("num_speculative_tokens=257 ", BUDGET), {"num_speculative_tokens": 257}, dotted=True
    ),
    "budget many": Refusal(
        ("num_speculative_tokens='many' ", BUDGET), {"num_speculative_tokens": "many"}, dotted=True
    ),
    "budget true": Refusal(("num_speculative_tokens=True ", BUDGET), {"num_speculative_tokens": True}),
    "missing Weaver file": Refusal(
        ("{folder}/none.pth", "neither an existing path"), {"weaver": "{folder}/none.pth"}
    ),
    "missing tensor": Refusal(
        ("{folder}/lacking.safetensors", f"missing tensors: {MISSING_TENSOR}"),
        {"weaver": "{folder}/lacking.safetensors"},
    ),
    "extra tensor": Refusal(
        ("{folder}/surplus.safetensors", "unexpected tensors: surplus.weight"),
        {"weaver": "{folder}/surplus.safetensors"},
    ),
    "malicious pickle": Refusal(
        ("{folder}/hostile.pth", "mkdir", "nothing in it was run"), {"weaver": "{folder}/hostile.pth"}
    ),
    "Weaver of another width": Refusal(
        ("{folder}/narrow.safetensors", "d_model is 128", "{folder}/target", "is 192"),
        {"weaver": "{folder}/narrow.safetensors"},
    ),
    "V2 runner off": Refusal(
        ("VLLM_USE_V2_MODEL_RUNNER=0", "unset it or set it to 1"),
        environment={"VLLM_USE_V2_MODEL_RUNNER": "0"},
    ),
    "weaver with proposal chain": Refusal(
        ("weaver=", "contradicts proposal='chain'", "leave one of them out"), {"proposal": "chain"}
    ),
    "sleep": Refusal(("--enable-sleep-mode=True", "it must be False"), options=("--enable-sleep-mode",)),
    "two devices": Refusal(
        ("--tensor-parallel-size=2", "it must be 1"), options=("--tensor-parallel-size", "2")
    ),
}
CONTROL = "right settings"


def serve(refusal: Refusal, folder: Path) -> list[str]:
    """The serve command of a case, on the target that cannot be read."""
    spec = {key: value for key, value in (SPEC | refusal.change).items() if value is not None}
    if refusal.dotted:
        settings = [
            word for key, value in spec.items() for word in (f"--speculative-config.{key}", str(value))
        ]
    else:
        settings = ["--speculative-config", json.dumps(spec)]
    common = ["--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "4"]
    words = ["serve", "{folder}/target", *common, *settings, *refusal.options]
    return ["-m", "vllm_weaver.cpu", *(word.replace("{folder}", str(folder)) for word in words)]


SHOW_FORMS = """
import dataclasses, json, sys
from vllm_weaver import cpu
cpu.prepare()
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm_weaver.config import settings_of
parser = make_arg_parser(FlexibleArgumentParser())
settings = {}
for name, words in json.loads(sys.argv[1]).items():
    config = AsyncEngineArgs.from_cli_args(parser.parse_args(words)).create_engine_config()
    settings[name] = dataclasses.asdict(settings_of(config)) | {"v2": config.use_v2_model_runner}
print(json.dumps(settings))
"""


def forms() -> dict[str, list[str]]:
    """Command lines that say the same."""
    spec = SPEC | {"candidate_pool_size": 32, "proposal": "weaver"}
    engine = ["--model", str(DEMO / "target"), "--max-model-len", "512", "--enforce-eager"]

    def dotted(separator: str, *skipped: str) -> list[str]:
        left = {key: value for key, value in spec.items() if key not in skipped}
        pairs = [(f"--speculative-config.{k}".replace("_", separator), str(v)) for k, v in left.items()]
        return [word for pair in pairs for word in pair]

    flags = ["--spec-method", spec["method"], "--spec-model", spec["model"], "--spec-tokens", "16"]
    return {
        "json": [*engine, "--speculative-config", json.dumps(spec)],
        "dotted": [*engine, *dotted("_")],
        "dotted, hyphens": [*engine, *dotted("-")],
        "flags and dotted": [*engine, *flags, *dotted("_", "method", "model", "num_speculative_tokens")],
    }


SHOW_PLAIN = """
import json, sys
from vllm_weaver import cpu
cpu.prepare()
from vllm.engine import arg_utils
found = {}
for name, speculative in json.loads(sys.argv[1]).items():
    config = arg_utils.EngineArgs(
        model=sys.argv[2], enforce_eager=True, max_model_len=512, speculative_config=speculative
    ).create_engine_config()
    found[name] = [config.compute_hash(), str(config)]
found["class"] = arg_utils.SpeculativeConfig.__name__
print(json.dumps(found))
"""
PLAIN = {
    "no speculation": None,
    "plain DFlash": {"method": "dflash", "model": str(DEMO / "draft"), "num_speculative_tokens": 7},
}
PLAIN_RUN = ["-c", SHOW_PLAIN, json.dumps(PLAIN), str(DEMO / "target")]
WITH, WITHOUT = "with the plugin", "without the plugin"

Job = Callable[[Path], tuple[list[str], dict[str, str]]]  # folder of the files -> arguments, environment
JOBS: dict[str, Job] = {
    **{
        name: lambda folder, refusal=refusal: (serve(refusal, folder), refusal.environment)
        for name, refusal in REFUSALS.items()
    },
    CONTROL: lambda folder: (serve(Refusal(()), folder), {}),
    "forms": lambda folder: (["-c", SHOW_FORMS, json.dumps(forms())], {}),
    WITH: lambda folder: (PLAIN_RUN, {}),
    WITHOUT: lambda folder: (PLAIN_RUN, {"VLLM_PLUGINS": ""}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("startup")
    write_files(path)
    return path


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, folder: Path) -> Iterator[dict[str, Future[Outcome]]]:
    """The jobs that the selected tests name in their parameters, at most two of them at once."""
    commands: list[Command] = []
    warm: queue.SimpleQueue[WarmCommandLine] = queue.SimpleQueue()
    forking = [WarmCommandLine(environment()) for _ in range(2)]
    for command_line in forking:
        warm.put(command_line)

    def run(name: str) -> Outcome:
        arguments, changes = JOBS[name](folder)
        output = folder / f"output of {name}"
        if name in REFUSALS and not changes:
            command_line = warm.get()
            try:
                return command_line.run(output, *arguments[2:])
            finally:
                warm.put(command_line)
        command = Command(output, *arguments, **changes)
        commands.append(command)
        try:
            return Outcome(command.wait(SECONDS), command.stdout, command.stderr)
        finally:
            command.end()

    named = [
        value
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
        for value in item.callspec.params.values()
    ]
    with ThreadPoolExecutor(max_workers=2) as pool:
        yield {name: pool.submit(run, name) for name in dict.fromkeys(named)}
        pool.shutdown(wait=False, cancel_futures=True)
        for command in commands:
            command.end()
        for command_line in forking:
            command_line.close()


# --- tests -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("job", REFUSALS)
def test_a_mistake_is_one_line_before_any_weight_is_read(
    job: str, outcomes: dict[str, Future[Outcome]], folder: Path
) -> None:
    outcome = outcomes[job].result()
    output = outcome.stdout + outcome.stderr
    assert outcome.status == 1, output[-3000:]
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    assert errors == outcome.stderr.splitlines()[-1:]
    for part in REFUSALS[job].expected:
        assert part.replace("{folder}", str(folder)) in errors[0]
    assert "Traceback" not in output
    for marker in MARKERS:
        assert marker not in output


@pytest.mark.parametrize("job", [CONTROL])
def test_without_a_mistake_the_weights_are_read(job: str, outcomes: dict[str, Future[Outcome]]) -> None:
    """The control of the test above: the same command, right, comes to the weights and falls over them."""
    outcome = outcomes[job].result()
    output = outcome.stdout + outcome.stderr
    assert outcome.status != 0
    for marker in MARKERS:
        assert marker in output
    assert "SafetensorError" in output
    assert not [line for line in output.splitlines() if line.startswith("error: ")]


@pytest.mark.parametrize("job", ["malicious pickle"])
def test_a_malicious_pickle_is_not_run(job: str, outcomes: dict[str, Future[Outcome]], folder: Path) -> None:
    outcomes[job].result()
    marker = folder / "executed"
    assert not marker.exists()
    torch.load(folder / "hostile.pth", weights_only=False)  # what it would have done
    assert marker.is_dir()


@pytest.mark.parametrize("job", ["forms"])
def test_every_form_gives_the_same_settings(job: str, outcomes: dict[str, Future[Outcome]]) -> None:
    outcome = outcomes[job].result()
    assert outcome.status == 0, outcome.stderr[-3000:]
    settings = json.loads(outcome.stdout.splitlines()[-1])
    assert list(settings) == list(forms())
    for name, found in settings.items():
        assert found == {
            "budget": 16,
            "depth": 7,
            "proposal": "weaver",
            "tree_verify": "target_only",
            "weaver": str(DEMO / "weaver" / "weaver.safetensors"),
            "weaver_revision": None,
            "weaver_sha256": None,
            "candidate_pool_size": 32,
            "v2": True,
        }, name


@pytest.mark.parametrize(("job", "other"), [(WITH, WITHOUT)])
def test_without_our_method_vllm_is_as_before(
    job: str, other: str, outcomes: dict[str, Future[Outcome]]
) -> None:
    found = {}
    for name in (job, other):
        outcome = outcomes[name].result()
        assert outcome.status == 0, outcome.stderr[-3000:]
        found[name] = json.loads(outcome.stdout.splitlines()[-1])
    assert found[WITH].pop("class") == "WeaverSpeculativeConfig"
    assert found[WITHOUT].pop("class") == "SpeculativeConfig"
    assert found[WITH] == found[WITHOUT]
    assert list(found[WITH]) == list(PLAIN)
