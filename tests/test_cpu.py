# SPDX-License-Identifier: Apache-2.0
"""vLLM without a GPU: the mends, refusals on the command line, a server whose engine is a forked process."""

from __future__ import annotations

import importlib.metadata
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from tests import tiny
from vllm_weaver import cpu

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
COMMAND = [sys.executable, "-m", "vllm_weaver.cpu"]
ENVIRONMENT = {key: value for key, value in os.environ.items() if not key.startswith("VLLM_USE_V2")} | {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def hybrid(root: Path) -> str:
    return tiny.folder(root, "hybrid")


@pytest.fixture(scope="module")
def draft(root: Path) -> str:
    return tiny.folder(root, "draft")


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env=ENVIRONMENT | environment,
    )


# --- prepare ---------------------------------------------------------------------------------------------

PREPARED = """
import json, os
from vllm_weaver import cpu
cpu.prepare(); first = cpu.applied(); cpu.prepare()
assert cpu.applied() == first
import vllm.v1.sample.ops.topk_topp_sampler as sampler
from vllm.triton_utils import HAS_TRITON
from vllm.utils.system_utils import get_mp_context
from vllm.platforms import current_platform
print(json.dumps(dict(
    triton=HAS_TRITON, method=get_mp_context().get_start_method(), device=current_platform.device_type,
    runner=os.environ["VLLM_USE_V2_MODEL_RUNNER"], top_k=sampler.apply_top_k_top_p_triton.__module__,
)))
"""


def test_prepare_makes_vllm_usable_and_is_idempotent() -> None:
    done = python(PREPARED)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "triton": True, "method": "fork", "device": "cpu", "runner": "1", "top_k": "vllm_weaver.cpu",
    }  # fmt: skip


def test_a_users_settings_are_respected() -> None:
    done = python(PREPARED, VLLM_USE_V2_MODEL_RUNNER="0", VLLM_WORKER_MULTIPROC_METHOD="spawn")
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["runner"], found["method"]) == ("0", "spawn")


@pytest.mark.parametrize("package", ["triton", "vllm.triton_utils"])
def test_too_late_is_said_in_one_sentence(package: str) -> None:
    code = f"import {package}\nfrom vllm_weaver import cpu\ncpu.prepare()"
    environment = {key: value for key, value in ENVIRONMENT.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1].startswith("RuntimeError: vllm_weaver.cpu.prepare() must run before")


def test_every_mend_that_was_applied_is_explained() -> None:
    cpu.prepare()
    assert set(cpu.applied()) <= set(cpu.MENDS)
    assert {"triton-cpu-backend", "interpreter-masks", "interpreter-range"} <= set(cpu.applied())


def test_the_alias_answers_for_vllm_only() -> None:
    cpu.prepare()
    assert importlib.metadata.version("vllm").startswith("0.32.0")
    assert importlib.metadata.version("torch") == torch.__version__
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("no-such-distribution")


@triton.jit
def _masked_copy(
    out,  # [n]
    source,  # [n]
    keep,  # [n], bool; loaded, it is a mask whose data are integers
    n: tl.constexpr,
):
    index = tl.arange(0, n)
    mask = tl.load(keep + index) & (index < n - 1)
    tl.store(out + index, tl.load(source + index, mask=mask, other=7), mask=mask)


@triton.jit
def _sum_of_squares(
    out,  # [1], int64
    n,
):
    total = tl.zeros((1,), dtype=tl.int64)
    for i in tl.range(0, n, 2):
        total += i.to(tl.int64) * i
    tl.store(out + tl.arange(0, 1), total)


def test_interpreter_takes_masks_that_were_loaded() -> None:
    cpu.prepare()
    out = torch.full((4,), -5)
    _masked_copy[(1,)](out, torch.arange(4), torch.tensor([True, False, True, True]), 4)
    assert out.tolist() == [0, -5, 2, -5]


def test_interpreter_gives_range_variables_that_are_tensors() -> None:
    cpu.prepare()
    out = torch.zeros(1, dtype=torch.int64)
    _sum_of_squares[(1,)](out, 9)
    assert out.item() == 0 + 4 + 16 + 36 + 64


def test_top_k_top_p_keeps_what_the_definition_keeps() -> None:
    cpu.prepare()
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0], [0.0, 3.0, 1.0, 2.0]])
    kept = apply_top_k_top_p(logits.clone(), torch.tensor([2, 4]), torch.tensor([1.0, 0.7])).isfinite()
    assert kept.tolist() == [[False, True, False, True], [False, True, False, True]]


# --- command line ----------------------------------------------------------------------------------------


def serve(target: str, speculative: dict[str, Any], **environment: str) -> subprocess.CompletedProcess[str]:
    command = [
        *COMMAND, "serve", target, "--load-format", "dummy", "--skip-tokenizer-init", "--enforce-eager",
        "--max-model-len", "256", "--speculative-config", json.dumps(speculative),
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=ENVIRONMENT | environment)


@pytest.mark.parametrize(
    ("change", "environment", "expected"),
    [
        ({"proposals": "chain"}, {}, "unknown key 'proposals' (value 'chain'); did you mean 'proposal'?"),
        ({}, {"VLLM_USE_V2_MODEL_RUNNER": "0"}, "VLLM_USE_V2_MODEL_RUNNER=0 switches it off"),
    ],
    ids=["wrong key", "V1 runner"],
)
def test_serve_refuses_with_one_line(
    change: dict[str, str], environment: dict[str, str], expected: str, hybrid: str, draft: str
) -> None:
    spec = {"method": "dflash_tfm", "model": draft, "num_speculative_tokens": 8, "proposal": "chain"} | change
    done = serve(hybrid, spec, **environment)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: ") and expected in last
    assert "Traceback" not in done.stderr and "EngineCore" not in done.stdout + done.stderr


def test_serve_answers_from_a_forked_engine(hybrid: str, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        *COMMAND, "serve", hybrid, "--load-format", "dummy", "--skip-tokenizer-init", "--enforce-eager",
        "--max-model-len", "256", "--max-num-seqs", "2", "--enable-scale-out",
        "--host", "127.0.0.1", "--port", str(port),
    ]  # fmt: skip
    log = tmp_path / "server.log"
    with log.open("w") as file:
        server = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=ENVIRONMENT)
    try:
        _wait(server, f"http://127.0.0.1:{port}/health", log)
        body = {
            "token_ids": [5, 9, 200, 31],
            "sampling_params": {
                "temperature": 0.8, "top_k": 5, "seed": 1, "max_tokens": 6,
                "ignore_eos": True, "detokenize": False,
            },
        }  # fmt: skip
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/inference/v1/generate",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            tokens = json.load(answer)["choices"][0]["token_ids"]
        assert len(tokens) == 6 and all(0 <= token < tiny.VOCAB for token in tokens)
        assert "V2 Model Runner" in log.read_text()
    finally:
        server.terminate()
        server.wait(timeout=60)


def _wait(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    for _ in range(240):
        if server.poll() is not None:
            pytest.fail(f"the server ended: {log.read_text()[-3000:]}")
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.5)
    pytest.fail(f"the server did not come up: {log.read_text()[-3000:]}")
