# SPDX-License-Identifier: Apache-2.0
"""Combinations that are known to break: what is refused before a server is started, and the failure it saves.

Each was reported by others for the models and engines named in docs/failure-modes.md. `--anyway` turns a
refusal into a warning, for whoever wants to see whether it still holds.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from .profiles import Flags, ProfileError, Request, Source

# The revision of nvidia/Qwen3.6-35B-A3B-NVFP4 before its weights were replaced under the same name.
FROZEN_35B = "612d523c58"


def value_of(arguments: Flags, flag: str) -> str | None:
    """The last value of `--flag VALUE` or `--flag=VALUE`; None if it is not there."""
    found = None
    for index, word in enumerate(arguments):
        if word == flag and index + 1 < len(arguments):
            found = arguments[index + 1]
        elif word.startswith(flag + "="):
            found = word.partition("=")[2]
    return found


def _flash_attn_version(arguments: Flags) -> int | None:
    for flag in ("--attention-config", "-ac"):
        text = value_of(arguments, flag)
        if text:
            try:
                return json.loads(text).get("flash_attn_version")
            except (ValueError, AttributeError):
                raise ProfileError(f"{flag} {text!r} is not a JSON object") from None
    dotted = value_of(arguments, "--attention-config.flash_attn_version")
    return int(dotted) if dotted and dotted.isdigit() else None


def _flash_attention_4(request: Request, arguments: Flags) -> str | None:
    if not request.blackwell_workstation or _flash_attn_version(arguments) != 4:
        return None
    return "FlashAttention 4 on compute capability 12.x stops with `Paged KV not supported on SM 12.0`; use 2"


def _forced_quantization(request: Request, arguments: Flags) -> str | None:
    forced = value_of(arguments, "--quantization") or value_of(arguments, "-q")
    assert request.target is not None
    if forced is None or "nvfp4" not in request.target.name.lower():
        return None
    return (
        f"--quantization {forced} with {request.target.name}: a mixed checkpoint is recognised by itself; "
        "forced, it fails with `does not match` or `output_partition_size = 48 is not divisible by "
        "block_n = 128`; leave the flag out"
    )


def _unloadable_checkpoint(request: Request, arguments: Flags) -> str | None:
    assert request.target is not None
    if request.target.name.lower() != "unsloth/qwen3.6-27b-nvfp4":
        return None
    return (
        "unsloth/Qwen3.6-27B-NVFP4 was seen to fail with `No compressed-tensors compatible scheme was "
        "found`; use nvidia/Qwen3.6-27B-NVFP4"
    )


def _replaced_weights(request: Request, arguments: Flags) -> str | None:
    assert request.target is not None
    if request.target.name != "nvidia/Qwen3.6-35B-A3B-NVFP4":
        return None
    if (request.target.revision or "").startswith(FROZEN_35B):
        return None
    return (
        "nvidia/Qwen3.6-35B-A3B-NVFP4 was replaced by weights that loop; use Koopah/Qwen3.6-35B-A3B-NVFP4, "
        f"or the revision {FROZEN_35B} of it"
    )


def _fp8_cache(request: Request, arguments: Flags) -> str | None:
    kind = value_of(arguments, "--kv-cache-dtype") or "auto"
    assert request.target is not None
    if not kind.startswith("fp8"):
        return None
    if "Qwen3.6-35B-A3B" in request.target.name:
        return f"--kv-cache-dtype {kind} crashes with {request.target.name}; leave the flag out"
    if request.profile == "dflash_tfm" and request.blackwell_workstation:
        return (
            f"--kv-cache-dtype {kind} with profile dflash_tfm: FLASH_ATTN is version 2 on compute capability "
            "12.x, which reads no fp8; use bfloat16"
        )
    return None


def _prefix_caching(request: Request, arguments: Flags) -> str | None:
    if request.profile != "dflash_tfm" or "--enable-prefix-caching" not in arguments:
        return None
    return "--enable-prefix-caching: a tree step does not write the cached recurrent states; leave it out"


def _reasoning_parser(request: Request, arguments: Flags) -> str | None:
    assert request.target is not None
    if "Qwen3.8" not in request.target.name or value_of(arguments, "--reasoning-parser") is None:
        return None
    return "--reasoning-parser with a Qwen3.8 model: it has no <think> tokens, so answers come out empty"


def _draft_architecture(request: Request, arguments: Flags) -> str | None:
    if request.draft is None or not request.draft.local:
        return None
    config = request.draft.config()
    names = config.get("architectures") or []
    found = names[0] if names else None
    wanted = {
        "dflash": ("DFlashDraftModel",),
        "dflash_tfm": ("DFlashDraftModel",),
        "dflash2": ("DFlash2DraftModel",),
        "dspark": ("Qwen3DSparkModel", "DSparkDraftModel"),
    }[request.profile]
    if found not in wanted:
        return (
            f"the draft {request.draft.name} is a {found}, but profile {request.profile!r} drafts with "
            f"{' or '.join(wanted)}"
        )
    if request.profile == "dspark" and config.get("model_type") != "qwen3":
        return (
            f"the draft {request.draft.name} has model_type {config.get('model_type')!r}: such a server "
            "answers /health and then never a request; rewrite its config.json (model_type qwen3)"
        )
    return None


def _missing_shards(request: Request, arguments: Flags) -> str | None:
    for what in (request.target, request.draft):
        missing = [] if what is None or not what.local else missing_shards(what)
        if missing:
            return (
                f"{what and what.name} lacks {missing[0]} and {len(missing) - 1} other files of its index; "
                "download the whole repository"
            )
    return None


def missing_shards(folder: Source) -> list[str]:
    """Files that the folder's index of safetensors names and that are not there."""
    index = folder.path / "model.safetensors.index.json"
    if not index.is_file():
        return []
    names = set(json.loads(index.read_text()).get("weight_map", {}).values())
    return sorted(name for name in names if not (folder.path / name).is_file())


REFUSALS: tuple[Callable[[Request, Flags], str | None], ...] = (
    _flash_attention_4,
    _forced_quantization,
    _unloadable_checkpoint,
    _replaced_weights,
    _fp8_cache,
    _prefix_caching,
    _reasoning_parser,
    _draft_architecture,
    _missing_shards,
)


def problems(request: Request, arguments: Flags) -> list[str]:
    """One sentence for each known failure that these arguments run into."""
    return [found for check in REFUSALS if (found := check(request, arguments)) is not None]


def refuse(request: Request, arguments: Flags) -> None:
    """Raise ProfileError with the first known failure, if there is one."""
    found = problems(request, arguments)
    if found:
        raise ProfileError(f"{found[0]} (--anyway starts it nevertheless)")
