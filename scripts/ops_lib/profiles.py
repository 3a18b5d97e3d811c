# SPDX-License-Identifier: Apache-2.0
"""Serve profiles: the flags of `vllm serve` for each way of decoding, each with its reason. Standard library
only, so that a host which has nothing but Docker can use them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

Flags = list[str]
METHODS = {
    "ar": "no speculation: the baseline",
    "mtp": "the target's own multi-token head, 3 tokens",
    "dflash": "in-tree DFlash, a chain of 15 tokens",
    "dflash2": "in-tree DFlash2, 8 tokens",
    "dspark": "in-tree DSpark, 7 tokens",
    "dflash_tfm": "trees of this package, over DFlash and a Weaver head",
    "long": "no speculation, 262,144 tokens of context",
}
NEEDS_DRAFT = ("dflash", "dflash2", "dspark", "dflash_tfm")


class ProfileError(Exception):
    """Why there is no command; the message is one sentence for the user."""


@dataclass(frozen=True)
class Source:
    """A model: a hub repository or a local folder, with a revision (commit, tag, branch) or None."""

    name: str
    revision: str | None = None

    @property
    def local(self) -> bool:
        """Whether this names a folder of this machine."""
        return self.name.startswith((".", "/", "~")) or Path(self.name).is_dir()

    @property
    def path(self) -> Path:
        """The folder; only of a local source."""
        return Path(self.name).expanduser().resolve()

    def config(self) -> dict[str, Any]:
        """The folder's config.json; empty for a hub repository, which is not looked at here."""
        if not self.local:
            return {}
        file = self.path / "config.json"
        if not file.is_file():
            raise ProfileError(f"{self.name!r} is no model folder: it has no config.json")
        try:
            return dict(json.loads(file.read_text()))
        except ValueError as error:
            raise ProfileError(f"{file} is not JSON: {error}") from None


def source(text: str) -> Source:
    """`repo`, `repo@revision` or a folder, as a Source. Raises ProfileError on an empty part."""
    if Path(text).expanduser().is_dir():
        return Source(text)
    name, at, revision = text.partition("@")
    if not name or (at and not revision):
        raise ProfileError(f"model {text!r} must be a folder, a repository or repository@revision")
    found = Source(name, revision or None)
    if found.local:
        raise ProfileError(f"there is no folder {text!r}")
    if name.count("/") != 1:
        raise ProfileError(f"model {text!r} is neither a folder nor a hub repository (owner/name)")
    return found


# What the documents tested together. Weights that move under a name have broken deployments before.
NVFP4_27B = Source("nvidia/Qwen3.6-27B-NVFP4", "0893e1606ff3d5f97a441f405d5fc541a6bdf404")
BF16_27B = Source("Qwen/Qwen3.6-27B", "6a9e13bd6fc8f0983b9b99948120bc37f49c13e9")
DFLASH_27B = Source("z-lab/Qwen3.6-27B-DFlash", "0919688658996800f86b895034249700e9481106")
WEAVER_27B = Source(
    "trymirai/weaver:weaver/qwen36_27b_weaver.pth", "309ceb4b1a6c44e6a3dfaeab8db1547e904254f8"
)
WEAVER_27B_SHA256 = "71f540b143fb6bab14ba724c20e97a72ce198de103cfd228d31c3ce339227833"


@dataclass(frozen=True)
class Request:
    """What the user asked for. `capability` is (major, minor) of the GPU; None fields mean the default."""

    profile: str
    capability: tuple[int, int]
    target: Source | None = None
    draft: Source | None = None
    weaver: Source | None = None
    budget: int | None = None
    tokens: int | None = None
    proposal: str = "weaver"
    max_model_len: int | None = None
    max_num_seqs: int = 4
    port: int = 8000
    host: str = "127.0.0.1"
    served_name: str | None = None
    extra: tuple[str, ...] = ()

    @property
    def blackwell_workstation(self) -> bool:
        """RTX PRO 6000, RTX 5090 (12.0) and DGX Spark (12.1): sm_120 kernels, no FlashAttention 4."""
        return self.capability[0] == 12

    def with_models(self) -> Request:
        """The request with the models that the profile is made for where none were named."""
        target = self.target or (NVFP4_27B if self.blackwell_workstation else BF16_27B)
        draft, weaver = self.draft, self.weaver
        if self.profile in ("dflash", "dflash_tfm") and draft is None and "Qwen3.6-27B" in target.name:
            draft = DFLASH_27B
        wants_weaver = self.profile == "dflash_tfm" and self.proposal == "weaver"
        if wants_weaver and weaver is None and draft == DFLASH_27B:
            weaver = WEAVER_27B
        if self.profile in NEEDS_DRAFT and draft is None:
            raise ProfileError(
                f"profile {self.profile!r} needs --draft: there is no draft known for {target.name}"
            )
        if wants_weaver and weaver is None:
            raise ProfileError(
                f"profile 'dflash_tfm' needs --weaver for the draft {draft and draft.name}; "
                "or grow trees without a head: --proposal ddtree"
            )
        if draft is not None and self.profile not in NEEDS_DRAFT:
            raise ProfileError(f"profile {self.profile!r} uses no --draft ({draft.name}); leave it out")
        if weaver is not None and not wants_weaver:
            raise ProfileError(
                f"--weaver {weaver.name} is of use to profile 'dflash_tfm' with proposal 'weaver'"
            )
        return replace(self, target=target, draft=draft, weaver=weaver)


@dataclass
class Command:
    """The server's arguments after `vllm serve`, and environment variables it needs."""

    arguments: Flags
    environment: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def default_budget(capability: tuple[int, int]) -> int:
    """The best budget that others measured on such a GPU, in another engine (docs/budget.md)."""
    # B200 class: the paper's 64. RTX PRO 6000: a curve with its peak at 32. Elsewhere nothing was published;
    # the smaller tree costs less where it does not pay.
    return 64 if capability[0] == 10 else 32


def ships_fp8_kv(target: Source) -> bool:
    """Whether the checkpoint was made for keys and values in fp8 (ModelOpt's `kv_cache_quant_algo: FP8`)."""
    if not target.local:
        return target.name == NVFP4_27B.name
    quantization = target.config().get("quantization_config") or {}
    found = quantization.get("kv_cache_quant_algo") or quantization.get("kv_cache_scheme")
    modelopt = target.path / "hf_quant_config.json"
    if found is None and modelopt.is_file():
        found = json.loads(modelopt.read_text()).get("quantization", {}).get("kv_cache_quant_algo")
    if isinstance(found, dict):  # ModelOpt's newer form
        return found.get("num_bits") == 8 and found.get("type") == "float"
    return isinstance(found, str) and found.upper() == "FP8"


def _attention(request: Request) -> Flags:
    """Backend by compute capability."""
    if request.profile == "dflash_tfm":
        # Tree attention is written for FLASH_ATTN's cache, everywhere.
        flags = ["--attention-backend", "FLASH_ATTN"]
        if request.blackwell_workstation:
            # FlashAttention 4 stops there with `Paged KV not supported on SM 12.0`; 2 is what runs.
            flags += ["--attention-config", '{"flash_attn_version": 2}']
        return flags
    if request.blackwell_workstation:
        # FlashInfer has code for sm_120a, and reads fp8 keys and values there; FlashAttention 2 does not.
        return ["--attention-backend", "FLASHINFER"]
    return []  # vLLM's own choice: FlashAttention 3 on sm_90, FlashInfer with TRT-LLM kernels on sm_100


def _kv_cache(request: Request, notes: list[str]) -> Flags:
    """The type of keys and values. A checkpoint calibrated for fp8 keeps it: without its flag, or with the
    flag and no calibration, answers were wrong (19 x 23 = 417)."""
    assert request.target is not None
    if not ships_fp8_kv(request.target):
        return []  # vLLM's auto: the model's type, or what the checkpoint says
    if request.profile == "dflash_tfm" and request.capability[0] != 9:
        # FLASH_ATTN reads fp8 by version 3 (sm_90) and, for some head sizes, 4 (sm_100).
        notes.append("the checkpoint's fp8 keys and values are kept as bfloat16: twice the cache memory")
        return ["--kv-cache-dtype", "bfloat16"]
    return ["--kv-cache-dtype", "fp8"]


def _parsers(request: Request) -> Flags:
    """Reasoning and tool calls, for models of the Qwen3.5 and 3.6 families."""
    assert request.target is not None
    name = request.target.name + " " + str(request.target.config().get("_name_or_path", ""))
    # Qwen's XML form of tool calls.
    flags = ["--enable-auto-tool-choice", "--tool-call-parser", "qwen3_xml"]
    if "Qwen3.8" in name:
        return flags  # has no <think> tokens: the parser would take the whole answer for reasoning
    return ["--reasoning-parser", "qwen3", *flags]


def _speculative(request: Request) -> dict[str, Any] | None:
    """The speculative config of the profile; None for plain decoding."""
    draft: dict[str, Any] = {}
    if request.draft is not None:
        draft["model"] = str(request.draft.path) if request.draft.local else request.draft.name
        if request.draft.revision is not None:
            draft["revision"] = request.draft.revision
    tokens = {"mtp": 3, "dflash": 15, "dflash2": 8, "dspark": 7}
    if request.profile in tokens:
        # dflash: its block of 16 holds the bonus token. dflash2 8, dspark 7, mtp 3: as published for each.
        method = "dflash" if request.profile == "dflash2" else request.profile
        return {
            "method": method,
            **draft,
            "num_speculative_tokens": request.tokens or tokens[request.profile],
        }
    if request.profile != "dflash_tfm":
        return None
    config = {
        "method": "dflash_tfm",
        **draft,
        "num_speculative_tokens": request.budget or default_budget(request.capability),
        "proposal": request.proposal,
    }
    if request.weaver is not None:
        path = Path(request.weaver.name).expanduser()  # a file or a folder, if it is here
        config["weaver"] = str(path.resolve()) if path.exists() else request.weaver.name
        if request.weaver.revision is not None:
            config["weaver_revision"] = request.weaver.revision
        if request.weaver == WEAVER_27B:
            config["weaver_sha256"] = WEAVER_27B_SHA256
    return config


def _lengths(request: Request) -> Flags:
    if request.profile == "long":
        # The whole context in one request: chunks of 8,192, and room left for the activations of a chunk.
        return [
            "--max-model-len", str(request.max_model_len or 262144), "--gpu-memory-utilization", "0.85",
            "--max-num-batched-tokens", "8192",
        ]  # fmt: skip
    return ["--max-model-len", str(request.max_model_len or 32768)]


def command(request: Request, refuse: Callable[[Request, Flags], None]) -> Command:
    """Arguments and environment for a request; `refuse` raises ProfileError for what is known to break.

    Raises ProfileError where something that the profile needs is missing.
    """
    request = request.with_models()
    assert request.target is not None
    target, notes = request.target, []
    arguments = [str(target.path) if target.local else target.name]
    if target.revision is not None:
        arguments += ["--revision", target.revision]
    elif not target.local:
        notes.append(f"{target.name} is not pinned to a revision: its weights may change under you")
    arguments += ["--served-model-name", request.served_name or target.name.rstrip("/").rpartition("/")[2]]
    arguments += ["--host", request.host, "--port", str(request.port)]
    # Qwen3.5 and later are hybrids: a cached prefix would need the recurrent states at its end, which cost
    # memory and, with drafts, are not written.
    arguments += ["--no-enable-prefix-caching"]
    # No --quantization: a mixed checkpoint is recognised, and forcing one algorithm breaks it.
    arguments += _lengths(request)
    arguments += ["--max-num-seqs", str(request.max_num_seqs)]
    arguments += _attention(request)
    arguments += _kv_cache(request, notes)
    arguments += _parsers(request)
    if request.profile == "dspark":
        # Else the recurrent states are float32, whose verify stages stop admission at about 47 requests.
        arguments += ["--mamba-ssm-cache-dtype", "bfloat16"]
    if request.profile == "dflash2" and request.blackwell_workstation:
        # The dummy run of the autotuner is not the layout of a draft block, and fails on sm_121.
        arguments += ["--no-enable-flashinfer-autotune"]
    environment = {}
    if request.profile in NEEDS_DRAFT:
        # DFlash2's selector and the trees are in the V2 runner only; V1 drafts as DFlash, silently.
        environment["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    speculative = _speculative(request)
    if speculative is not None:
        arguments += ["--speculative-config", json.dumps(speculative)]
    arguments += request.extra
    refuse(request, arguments)
    return Command(arguments, environment, notes)
