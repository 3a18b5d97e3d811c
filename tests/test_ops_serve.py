# SPDX-License-Identifier: Apache-2.0
"""Serve profiles: vLLM's own parser takes every one, known failures are refused by name."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from ops_lib import profiles, refusals  # noqa: E402  (the path comes first)
from ops_lib.profiles import BF16_27B, NVFP4_27B, ProfileError, Request, Source  # noqa: E402
from ops_lib.serve import IMAGE, capability, docker, main, weaver_source  # noqa: E402

from vllm_weaver import __version__, cpu  # noqa: E402

CAPABILITIES = ((9, 0), (10, 0), (12, 0), (12, 1))
DRAFTS = {"dflash2": "DFlash2DraftModel", "dspark": "Qwen3DSparkModel"}


def model(folder: Path, architecture: str, **config: Any) -> Path:
    """A model folder that holds a config.json alone."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"architectures": [architecture], "model_type": "qwen3"} | config
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def arguments(request: Request) -> list[str]:
    return profiles.command(request, refusals.refuse).arguments


def speculative(request: Request) -> dict[str, Any]:
    return json.loads(refusals.value_of(arguments(request), "--speculative-config") or "null")


def cli(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = main(list(words))
    printed = capsys.readouterr()
    return status, printed.out, printed.err


# --- what vLLM makes of it -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def vllm_parser() -> Any:
    """The parser of `vllm serve`, with the plugin loaded as vLLM loads it."""
    if not torch.cuda.is_available():
        cpu.prepare()
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.plugins import load_general_plugins
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    load_general_plugins()
    return make_arg_parser(FlexibleArgumentParser())


@pytest.mark.parametrize("profile", profiles.METHODS)
def test_vllm_parses_every_profile_on_every_gpu(profile: str, vllm_parser: Any, tmp_path: Path) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import validate_parsed_serve_args

    target = model(tmp_path / "target", "Qwen3_5ForConditionalGeneration", model_type="qwen3_5")
    draft = model(tmp_path / "draft", DRAFTS.get(profile, "DFlashDraftModel"))
    weaver = tmp_path / "weaver"
    weaver.mkdir()
    request = Request(
        profile,
        (9, 0),
        target=Source(str(target)),
        draft=Source(str(draft)) if profile in profiles.NEEDS_DRAFT else None,
        weaver=Source(str(weaver)) if profile == "dflash_tfm" else None,
    )
    for gpu in CAPABILITIES:
        line = arguments(profiles.replace(request, capability=gpu))
        parsed = vllm_parser.parse_args(line)
        parsed.model = parsed.model_tag  # as `vllm serve` does
        validate_parsed_serve_args(parsed)
        engine = AsyncEngineArgs.from_cli_args(parsed)
        assert engine.model == str(target)
        assert engine.enable_prefix_caching is False and engine.quantization is None
        wanted = (speculative(profiles.replace(request, capability=gpu)) or {}).get("method")
        assert (engine.speculative_config or {}).get("method") == wanted
        if profile == "dflash_tfm":
            assert engine.attention_config.flash_attn_version == (2 if gpu[0] == 12 else None)


def test_keys_of_the_tree_profile_are_those_of_the_package(vllm_parser: Any) -> None:
    from vllm_weaver.config import check_keys

    for proposal in ("weaver", "ddtree", "chain"):
        check_keys(speculative(Request("dflash_tfm", (12, 0), proposal=proposal)))


# --- what a profile says ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu", "budget", "target"), [((12, 0), 32, NVFP4_27B), ((10, 0), 64, BF16_27B), ((9, 0), 32, BF16_27B)]
)
def test_budget_and_target_by_gpu(gpu: tuple[int, int], budget: int, target: Source) -> None:
    request = Request("dflash_tfm", gpu)
    line = arguments(request)
    assert speculative(request)["num_speculative_tokens"] == budget
    assert line[0] == target.name and refusals.value_of(line, "--revision") == target.revision
    assert speculative(request)["weaver_sha256"] == profiles.WEAVER_27B_SHA256
    assert refusals.value_of(line, "--attention-backend") == "FLASH_ATTN"


def test_no_flash_attention_4_on_sm_120_in_any_profile() -> None:
    for profile in ("ar", "mtp", "dflash", "dflash_tfm", "long"):
        line = arguments(Request(profile, (12, 0)))
        backend = refusals.value_of(line, "--attention-backend")
        config = refusals.value_of(line, "--attention-config")
        assert backend == "FLASHINFER" or json.loads(config or "{}") == {"flash_attn_version": 2}


@pytest.mark.parametrize(
    ("profile", "gpu", "expected"),
    [("ar", (12, 0), "fp8"), ("dflash_tfm", (12, 0), "bfloat16"), ("dflash_tfm", (9, 0), "fp8")],
)
def test_fp8_keys_are_kept_where_the_backend_reads_them(
    profile: str, gpu: tuple[int, int], expected: str, tmp_path: Path
) -> None:
    """For the named checkpoint, and for a folder that says so in either of ModelOpt's forms."""
    target = model(tmp_path / "a", "Qwen3_5ForCausalLM", quantization_config={"kv_cache_quant_algo": "FP8"})
    other = model(tmp_path / "b", "Qwen3_5ForCausalLM")
    (other / "hf_quant_config.json").write_text('{"quantization": {"kv_cache_quant_algo": "FP8"}}')
    draft, head = profiles.DFLASH_27B, profiles.WEAVER_27B
    for found in (NVFP4_27B, Source(str(target)), Source(str(other))):
        request = Request(profile, gpu, target=found)
        if profile == "dflash_tfm":
            request = profiles.replace(request, draft=draft, weaver=head)
        assert refusals.value_of(arguments(request), "--kv-cache-dtype") == expected
    plain = model(tmp_path / "c", "Qwen3_5ForCausalLM")
    assert "--kv-cache-dtype" not in arguments(Request("ar", gpu, target=Source(str(plain))))


def test_flags_of_one_family_each(tmp_path: Path) -> None:
    draft = Source(str(model(tmp_path / "draft", "Qwen3DSparkModel")))
    line = arguments(Request("dspark", (9, 0), draft=draft))
    assert refusals.value_of(line, "--mamba-ssm-cache-dtype") == "bfloat16"
    assert "--reasoning-parser" in line
    newer = Source("r0b0tlab/Qwen3.8-27B-NVFP4-MTP-sm121", "0" * 40)
    assert "--reasoning-parser" not in arguments(Request("mtp", (12, 1), target=newer))
    line = arguments(Request("long", (12, 0)))
    assert refusals.value_of(line, "--max-model-len") == "262144"
    assert refusals.value_of(line, "--max-num-batched-tokens") == "8192"


# --- what is refused -------------------------------------------------------------------------------------


def refused(tmp_path: Path) -> dict[str, tuple[Request, str]]:
    loose = model(tmp_path / "loose", "Qwen3_5ForCausalLM")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (loose / "model.safetensors.index.json").write_text(json.dumps(index))
    raw = Source(str(model(tmp_path / "raw", "DSparkDraftModel", model_type="dspark")))
    second = Source(str(model(tmp_path / "second", "DFlash2DraftModel")))
    frozen = "nvidia/Qwen3.6-35B-A3B-NVFP4"
    return {
        "FA4 on sm_120": (
            Request("dflash_tfm", (12, 0), extra=("--attention-config", '{"flash_attn_version": 4}')),
            "Paged KV not supported on SM 12.0",
        ),
        "forced quantization": (
            Request("ar", (12, 0), extra=("--quantization=modelopt_fp4",)),
            "block_n = 128",
        ),
        "compressed tensors": (
            Request("ar", (12, 0), target=Source("unsloth/Qwen3.6-27B-NVFP4")),
            "No compressed-tensors compatible scheme",
        ),
        "replaced weights": (Request("ar", (12, 0), target=Source(frozen)), "612d523c58"),
        "fp8 cache of the MoE": (
            Request("ar", (9, 0), target=Source(frozen, "612d523c58"), extra=("--kv-cache-dtype", "fp8")),
            "crashes",
        ),
        "fp8 cache by version 2": (
            Request("dflash_tfm", (12, 0), extra=("--kv-cache-dtype", "fp8")),
            "reads no fp8",
        ),
        "prefix caching": (
            Request("dflash_tfm", (9, 0), extra=("--enable-prefix-caching",)),
            "recurrent states",
        ),
        "reasoning parser": (
            Request("ar", (12, 1), target=Source("a/Qwen3.8-27B"), extra=("--reasoning-parser", "qwen3")),
            "no <think> tokens",
        ),
        "raw DSpark draft": (Request("dspark", (9, 0), draft=raw), "never a request"),
        "another draft": (Request("dflash", (9, 0), draft=second), "is a DFlash2DraftModel"),
        "missing shards": (
            Request("ar", (9, 0), target=Source(str(loose))),
            "lacks model-00001-of-00002.safetensors",
        ),
    }


def test_every_known_failure_is_refused_by_name(tmp_path: Path) -> None:
    cases = refused(tmp_path)
    for name, (request, expected) in cases.items():
        with pytest.raises(ProfileError) as error:
            arguments(request)
        assert expected in str(error.value) and "\n" not in str(error.value), name
    hit = {check for r, _ in cases.values() for check in refusals.REFUSALS if check(*resolved(r)) is not None}
    assert hit == set(refusals.REFUSALS)


def resolved(request: Request) -> tuple[Request, list[str]]:
    seen: list[tuple[Request, list[str]]] = []
    profiles.command(request, lambda r, a: seen.append((r, a)))
    return seen[0]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("ar", "--capability", "7.5"), "below 8.0"),
        (("ar", "--capability", "hopper"), "must look like 12.0"),
        (("ar", "--capability", "9.0", "--target", "not-there"), "neither a folder nor a hub repository"),
        (("ar", "--capability", "9.0", "--target", "./not-there"), "no folder"),
        (("ar", "--capability", "9.0", "--target", "a/b@"), "repository@revision"),
        (("ar", "--capability", "9.0", "--budget", "8"), "for profile dflash_tfm"),
        (("dflash_tfm", "--capability", "9.0", "--budget", "257"), "from 1 to 256"),
        (("ar", "--capability", "9.0", "--tokens", "8"), "of no use"),
        (("ar", "--capability", "9.0", "--draft", "a/b"), "uses no --draft"),
        (("dspark", "--capability", "9.0"), "needs --draft"),
        (("dflash_tfm", "--capability", "9.0", "--draft", "a/b"), "needs --weaver"),
        (
            ("dflash_tfm", "--capability", "9.0", "--proposal", "chain", "--weaver", "a/b:c"),
            "proposal 'weaver'",
        ),
        (("dflash_tfm", "--capability", "9.0", "--weaver", "nothing"), "neither a file or folder"),
    ],
)
def test_a_mistake_is_one_line(
    words: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = cli(capsys, *words, "--print")
    assert (status, out) == (2, "")
    assert err.startswith("serve: REFUSED: ") and expected in err and err.count("\n") == 1


def test_without_a_gpu_its_capability_must_be_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    status, _, err = cli(capsys, "ar", "--print")
    assert status == 2 and "--capability 12.0" in err
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 12.1\necho 9.0\n")
    tool.chmod(0o755)
    status, out, _ = cli(capsys, "ar", "--print")
    assert status == 0 and "FLASHINFER" in out


def test_anyway_warns_in_place_of_refusing(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("ar", "--capability", "12.0", "--anyway", "--print", "--", "--quantization", "modelopt_fp4")
    status, out, err = cli(capsys, *words)
    assert status == 0 and shlex.split(out)[-2:] == ["--quantization", "modelopt_fp4"]
    assert "known to break: --quantization modelopt_fp4" in err


# --- how it is run ---------------------------------------------------------------------------------------


def test_print_shows_what_would_be_run_and_runs_nothing(tmp_path: Path) -> None:
    vllm = tmp_path / "vllm"
    vllm.write_text('#!/bin/sh\nfor word; do echo "$word"; done\n')
    vllm.chmod(0o755)
    call = ["bash", str(ROOT / "scripts/serve.sh"), "dflash_tfm", "--capability", "12.0", "--vllm", str(vllm)]
    shown = subprocess.run([*call, "--print"], capture_output=True, text=True, check=True).stdout
    assert shown.startswith("env VLLM_USE_V2_MODEL_RUNNER=1 ") and shown.count("\n") == 1
    ran = subprocess.run(call, capture_output=True, text=True, check=True).stdout.splitlines()
    assert ran == shlex.split(shown)[3:]


def test_docker_mounts_folders_and_caches_and_keeps_secrets_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    target = model(tmp_path / "target", "Qwen3_5ForCausalLM")
    request = Request("ar", (12, 0), target=Source(str(target)), host="0.0.0.0", port=8123)
    words = docker(profiles.command(request, refusals.refuse), request, "image:1")
    assert f"{target}:{target}:ro" in words and f"{tmp_path}/hub:/cache/huggingface" in words
    assert "HF_TOKEN" in words and not any("secret" in word for word in words)
    assert words[words.index("image:1") + 1] == str(target)
    assert "127.0.0.1:8123:8123" in words and "vllm-weaver-cache:/cache" in words


def test_names_of_models_and_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert profiles.source("a/b@c") == Source("a/b", "c")
    assert weaver_source("a/b:c/d.pth@e") == Source("a/b:c/d.pth", "e")
    head = tmp_path / "head.safetensors"
    head.write_bytes(b"")
    assert weaver_source(str(head)) == Source(str(head))
    assert capability("12.1") == (12, 1)
    assert IMAGE.endswith(f":{__version__}")
    monkeypatch.chdir(model(tmp_path / "target", "Qwen3_5ForCausalLM").parent)
    assert arguments(Request("ar", (9, 0), target=profiles.source("target")))[0] == os.path.realpath("target")
