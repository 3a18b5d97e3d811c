# SPDX-License-Identifier: Apache-2.0
"""vLLM without a GPU: the mends, and a server whose engine is a forked process."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from tests import tiny
from tests.e2e.server import Server, environment, running
from vllm_weaver import cpu

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")


def python(code: str, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment(**changes),
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
    done = python(f"import {package}\nfrom vllm_weaver import cpu\ncpu.prepare()")
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1].startswith("RuntimeError: vllm_weaver.cpu.prepare() must run before")


def test_every_mend_that_was_applied_is_explained() -> None:
    cpu.prepare()
    assert set(cpu.applied()) <= set(cpu.MENDS)
    interpreter = {"interpreter-masks", "interpreter-bfloat16", "interpreter-range"}
    assert {"triton-cpu-backend"} | interpreter <= set(cpu.applied())


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


@triton.jit
def _arithmetic(
    out,  # [6, n], float32
    source,  # [m], bfloat16
    m,
    n: tl.constexpr,
):
    index = tl.arange(0, n)
    x = tl.load(source + index, mask=index < m, other=float("-inf"))
    first = tl.load(source)
    tl.store(out + index, (x >= first).to(tl.float32))
    tl.store(out + n + index, tl.maximum(x, first).to(tl.float32))
    tl.store(out + 2 * n + index, (x + first).to(tl.float32))
    tl.store(out + 3 * n + index, (-x * 2).to(tl.float32))
    tl.store(out + 4 * n + index, tl.where(index < m, x, 0.0).to(tl.int32).to(tl.float32))
    tl.store(out + 5 * n + index, tl.fma(x, x, first).to(tl.float32))


def test_interpreter_computes_with_the_values_of_bfloat16() -> None:
    cpu.prepare()
    out, infinity = torch.full((6, 8), -5.0), float("inf")
    _arithmetic[(1,)](out, torch.tensor([2.0, -1.0, 3.5, -6.0, 2.0], dtype=torch.bfloat16), 5, 8)
    x = torch.tensor([2.0, -1.0, 3.5, -6.0, 2.0] + 3 * [-infinity])
    expected = torch.stack([(x >= 2).float(), x.clamp(min=2), x + 2, -2 * x, x.trunc(), x * x + 2])
    expected[4, 5:] = 0.0
    assert torch.equal(out, expected)


@pytest.mark.parametrize("vocab", [300, 1024, 9000])
def test_logprobs_and_ranks_of_bfloat16_logits(vocab: int) -> None:
    """vLLM's kernels compare logits; padding is -inf and must not become the largest."""
    cpu.prepare()
    from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores

    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    logits[1, 5] = -float("inf")
    logits[2] -= 20
    chosen = torch.tensor([7, 3, 250])
    scores = compute_topk_scores(logits, 4, chosen)
    expected = logits.float().log_softmax(-1)
    found = scores.logprobs, scores.logprob_token_ids
    torch.testing.assert_close(found[0], expected.gather(1, found[1].long()), rtol=1e-3, atol=1e-3)
    at_least = logits >= logits.gather(1, chosen[:, None])
    assert scores.selected_token_ranks.tolist() == at_least.sum(1).tolist()


@triton.jit
def _double(x):
    return x + x


@triton.jit
def _quadruple(
    out,  # [n]
    n: tl.constexpr,
):
    index = tl.arange(0, n)
    tl.store(out + index, _double(_double(index)))


def test_interpreter_leaves_the_language_as_it_was() -> None:
    cpu.prepare()
    before = {place: dict(vars(place)) for place in (tl, tl.core, tl.math, tl.tensor)}
    for _ in range(2):
        out = torch.zeros(4, dtype=torch.int32)
        _quadruple[(1,)](out, 4)
        assert out.tolist() == [0, 4, 8, 12]
        assert before == {place: dict(vars(place)) for place in before}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_greedy_tokens_are_those_of_the_gumbel_kernel(temperature: float) -> None:
    cpu.prepare()
    from vllm.v1.worker.gpu.sample import gumbel, sampler

    logits = torch.randn(3, 1500, generator=torch.Generator().manual_seed(0))
    logits[0, [1400, 7]] = 9.0  # of two equals the first is chosen
    given = (
        torch.tensor([2, 0, 2], dtype=torch.int32),
        torch.tensor([0.0, 1.0, temperature]),
        torch.tensor([1, 2, 3]),
        torch.tensor([4, 5, 6]),
    )
    options = {"apply_temperature": False, "is_drafting": False}
    chosen = sampler.gumbel_sample(logits, *given, **options)
    assert chosen.tolist() == gumbel.gumbel_sample(logits, *given, **options).tolist()
    greedy = [7, *logits[1:].argmax(dim=-1).tolist()]
    assert (chosen.tolist() == greedy) == (temperature == 0)


def test_top_k_top_p_keeps_what_the_definition_keeps() -> None:
    cpu.prepare()
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0], [0.0, 3.0, 1.0, 2.0]])
    kept = apply_top_k_top_p(logits.clone(), torch.tensor([2, 4]), torch.tensor([1.0, 0.7])).isfinite()
    assert kept.tolist() == [[False, True, False, True], [False, True, False, True]]


# --- command line ----------------------------------------------------------------------------------------


def test_a_forked_process_lets_go_of_its_parents_ports() -> None:
    """The port is free for a successor while an engine still lives."""
    done = python("""
import socket, time
from vllm_weaver import cpu
cpu.prepare()
from vllm.utils.system_utils import get_mp_context
def hold(pipe):
    pipe.recv()
if __name__ == "__main__":
    context = get_mp_context()
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    server.listen()
    address = server.getsockname()
    ours, theirs = context.Pipe()
    child = context.Process(target=hold, args=(theirs,))
    child.start()
    server.close()
    deadline = time.monotonic() + 30
    while True:
        try:
            socket.create_server(address, reuse_port=False).close()
            break
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert child.is_alive()
    ours.send(None)
    child.join()
    print(child.exitcode)
""")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "0"


def test_serve_answers_from_a_forked_engine(tmp_path: Path) -> None:
    options = ["--load-format", "dummy", "--skip-tokenizer-init", "--enforce-eager", "--enable-scale-out"]
    limits = ["--max-model-len", "256", "--max-num-seqs", "2"]
    server = Server(tmp_path / "output", tiny.folder(tmp_path, "hybrid"), *options, *limits)
    sampling = {
        "temperature": 0.8, "top_k": 5, "seed": 1, "max_tokens": 6, "ignore_eos": True, "detokenize": False,
    }  # fmt: skip
    body = {"token_ids": [5, 9, 200, 31], "sampling_params": sampling}
    with running(server):
        request = urllib.request.Request(
            f"http://127.0.0.1:{server.port}/inference/v1/generate",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            tokens = json.load(answer)["choices"][0]["token_ids"]
        assert len(tokens) == 6 and all(0 <= token < tiny.VOCAB for token in tokens)
        assert "V2 Model Runner" in server.stdout
