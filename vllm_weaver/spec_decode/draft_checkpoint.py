# SPDX-License-Identifier: Apache-2.0
"""Whether a DFlash or DFlash2 draft's files are whole, fit the target, and mean what their config says.

`check_draft` reads headers and scales only, before any weight is loaded: complete shards, digests, sizes and
layer ids that fit the target, every tensor known, none missing, dtypes and shapes of the quantization that
the draft's own files name, and finite scales. vLLM's loader drops or leaves out most of such faults silently.

Every error is a `ValueError` of one sentence that names the file and the tensor or key.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch

from vllm_weaver.spec_decode.draft_quantization import (
    FLOATS,
    PLAIN,
    DraftQuantization,
    Part,
    fused_name,
    shards_of,
)

ARCHITECTURES = ("DFlashDraftModel", "DFlash2DraftModel")
INDEX = "model.safetensors.index.json"
PUBLISHED_SHA256 = {
    # z-lab/Qwen3.6-27B-DFlash, by revision: the folder's name in the hub's cache.
    "0919688658996800f86b895034249700e9481106": {
        "model.safetensors": "e0c050b34798d32728a164d2c3f1681746ff85c11945701b0205b654e2f1fdbe"
    }
}
_DIGEST_LINE = re.compile(r"([0-9a-fA-F]{64})\s+[*]?(\S.*)")
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.safetensors")
_INTEGERS = ("I64", "I32")
# As vLLM's loader renames them.
_RENAMED = (("midlayer.", "layers.0."), ("encoder.output_norm_enc.", "hidden_norm."), ("encoder.fc.", "fc."))


@dataclass(frozen=True)
class TargetShape:
    """What of a target a draft has to fit."""

    hidden_size: int
    num_layers: int
    vocab_size: int


@dataclass(frozen=True)
class DraftFacts:
    """What loading has to know of a draft's files.

    d2t: whether its vocabulary is a selection of the target's. own_head: whether it brings an lm_head.
    packed_head: whether that is quantized."""

    d2t: bool
    own_head: bool
    packed_head: bool


@dataclass(frozen=True)
class _Tensor:
    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]

    def read(self) -> torch.Tensor:
        with safetensors.safe_open(self.file, framework="pt") as file:
            return file.get_tensor(self.name)


def check_draft(
    folder: Path, config: Any, quantization: Mapping[str, Any] | None, target: TargetShape
) -> DraftFacts:
    """Checks the draft in `folder`.

    config: its configuration as vLLM parsed it (attributes). quantization: the quantization config that its
    own files have, or None. Raises ValueError, one sentence, at the first fault."""
    architecture = (getattr(config, "architectures", None) or [None])[0]
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"draft {str(folder / 'config.json')!r}: architectures is {architecture!r}, but must be "
            f"{' or '.join(map(repr, ARCHITECTURES))}"
        )
    _check_config(folder / "config.json", config, target)
    tensors = _tensors(folder)
    _check_digests(folder, {tensor.file for tensor in tensors.values()})
    try:
        found = DraftQuantization(quantization) if quantization else None
        expected = dict(_expected(config, architecture, found, tensors))
    except ValueError as error:
        raise ValueError(f"draft {str(folder / 'config.json')!r}: {error}") from None
    _check_names(folder, expected, tensors, found)
    for name, (part, sizes) in expected.items():
        if name in tensors:
            _check_tensor(tensors[name], part, sizes)
    _check_shared(expected, tensors)
    own_head = any(name.startswith("lm_head.") for name in tensors)
    packed_head = own_head and found is not None and found.scheme_of("lm_head") is not PLAIN
    facts = DraftFacts("d2t" in tensors, own_head, packed_head)
    _check_vocabulary(folder, config, tensors, target, facts)
    return facts


# --- configuration ---------------------------------------------------------------------------------------


def _nested(config: Any) -> dict[str, Any]:
    return dict(getattr(config, "dflash_config", None) or {})


def target_layers(config: Any) -> list[int]:
    """Ids, from 0, of the target's layers whose outputs the draft reads."""
    ids = _nested(config).get("target_layer_ids")
    if ids is None:
        shifted = getattr(config, "eagle_aux_hidden_state_layer_ids", None)
        ids = [i - 1 for i in shifted] if shifted else None
    if not isinstance(ids, list | tuple) or not ids or any(type(i) is not int for i in ids):
        raise ValueError(f"dflash_config.target_layer_ids is {ids!r}, but must be a list of layer numbers")
    return list(ids)


def _check_config(file: Path, config: Any, target: TargetShape) -> None:
    where = f"draft {str(file)!r}"
    try:
        layers = target_layers(config)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    outside = [i for i in layers if not 0 <= i < target.num_layers]
    if outside or len(set(layers)) < len(layers):
        raise ValueError(
            f"{where}: dflash_config.target_layer_ids is {layers}, but must be different numbers from 0 to "
            f"{target.num_layers - 1}, the target's layers; the draft belongs to another target"
        )
    made_for = getattr(config, "num_target_layers", None)
    if made_for is not None and made_for != target.num_layers:
        raise ValueError(
            f"{where}: num_target_layers is {made_for}, but the target has {target.num_layers} layers; "
            "the draft belongs to another target"
        )
    hidden = getattr(config, "target_hidden_size", None) or config.hidden_size
    for key, value in (("target_hidden_size", hidden), ("hidden_size", config.hidden_size)):
        # The draft works on the target's embeddings and its output goes through the target's lm_head.
        if value != target.hidden_size:
            raise ValueError(
                f"{where}: {key} is {value}, but the target's hidden size is {target.hidden_size}; "
                "the draft belongs to another target"
            )
    mask = _nested(config).get("mask_token_id", getattr(config, "mask_token_id", None))
    if type(mask) is not int or not 0 <= mask < min(config.vocab_size, target.vocab_size):
        raise ValueError(
            f"{where}: dflash_config.mask_token_id is {mask!r}, but must be a token id below "
            f"{min(config.vocab_size, target.vocab_size)}, the smaller vocabulary of draft and target"
        )


# --- files -----------------------------------------------------------------------------------------------


def _files(folder: Path) -> list[Path]:
    """The weight files, all of them there."""
    index = folder / INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"draft index {str(index)!r} has no readable weight_map") from None
        for name in names:
            if not (folder / name).is_file():
                raise ValueError(f"draft {str(folder)!r} lacks {name}, which {INDEX} names; fetch it again")
        return [folder / name for name in names]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"draft {str(folder)!r} holds no .safetensors file; fetch or convert its weights")
    for file in files:
        match = _SHARD.fullmatch(file.name)
        for number in range(1, int(match[3]) + 1) if match else ():
            sibling = f"{match[1]}-{number:05d}-of-{match[3]}.safetensors"  # type: ignore[index]
            if not (folder / sibling).is_file():
                raise ValueError(f"draft {str(folder)!r} lacks {sibling}, a part of {file.name}'s set")
    return files


def _tensors(folder: Path) -> dict[str, _Tensor]:
    """All tensors by the name that vLLM's loader gives them, without their numbers."""
    found: dict[str, _Tensor] = {}
    for path in _files(folder):
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a mapping)
                    part = file.get_slice(name)
                    plain = name
                    for old, new in _RENAMED:
                        plain = plain.replace(old, new)
                    if plain in found:
                        raise ValueError(
                            f"draft file {str(path)!r} holds {name} again, which {found[plain].file.name} has"
                        )
                    found[plain] = _Tensor(name, path, part.get_dtype(), tuple(part.get_shape()))
        except (safetensors.SafetensorError, OSError) as error:
            reason = " ".join(str(error).split())[:160]
            raise ValueError(
                f"draft file {str(path)!r} is not a whole safetensors file ({reason}); fetch it again"
            ) from None
    index = folder / INDEX
    if index.is_file():
        for name, file_name in json.loads(index.read_text())["weight_map"].items():
            with_name = [tensor for tensor in found.values() if tensor.name == name]
            if not with_name or with_name[0].file.name != file_name:
                raise ValueError(
                    f"draft file {str(folder / file_name)!r} lacks {name}, which {INDEX} says it has"
                )
    return found


def _check_digests(folder: Path, files: set[Path]) -> None:
    """Digests that are listed beside the files, or known here, must be those of the files."""
    expected = dict(PUBLISHED_SHA256.get(folder.name, {}))
    lists = [*folder.glob("*.sha256"), *folder.glob("SHA256SUMS*"), *folder.glob("sha256sums*")]
    for listing in sorted(lists):
        for line in listing.read_text(errors="replace").splitlines():
            match = _DIGEST_LINE.fullmatch(line.strip())
            if match:
                expected[Path(match[2]).name] = match[1].lower()
    for path in sorted(files):
        wanted = expected.get(path.name)
        if wanted is None:
            continue
        with path.open("rb") as file:
            actual = hashlib.file_digest(file, "sha256").hexdigest()
        if actual != wanted:
            raise ValueError(
                f"draft file {str(path)!r} has SHA-256 {actual}, but must have {wanted}; fetch it again"
            )


# --- tensors ---------------------------------------------------------------------------------------------

_Expected = tuple[str, tuple[Part, tuple[int, int]]]


def linear_modules(config: Any) -> dict[str, tuple[int, int]]:
    """The draft's linear modules that may be quantized, by name, and their sizes [out, in]."""
    hidden = config.hidden_size
    head_dim = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    query, key = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    inner, nested = config.intermediate_size, _nested(config)
    modules: dict[str, tuple[int, int]] = {}
    for layer in range(config.num_hidden_layers):
        at = f"layers.{layer}."
        modules |= {
            f"{at}self_attn.q_proj": (query, hidden),
            f"{at}self_attn.k_proj": (key, hidden),
            f"{at}self_attn.v_proj": (key, hidden),
            f"{at}self_attn.o_proj": (hidden, query),
            f"{at}mlp.gate_proj": (inner, hidden),
            f"{at}mlp.up_proj": (inner, hidden),
            f"{at}mlp.down_proj": (hidden, inner),
        }
        if "conv_kernel_size" in nested:
            rows = 2 * nested["conv_kernel_size"] * (hidden // nested["conv_group_size"])
            modules |= {f"{at}{conv}.kernel_projection": (rows, hidden) for conv in _CONVS}
    if _uses_features(config):
        features = getattr(config, "target_hidden_size", None) or hidden
        modules["fc"] = (hidden, features * len(target_layers(config)))
    return modules


_CONVS = ("attention_conv", "mlp_conv")


def _uses_features(config: Any) -> bool:
    return bool(_nested(config).get("use_aux_hidden_state", getattr(config, "use_aux_hidden_state", True)))


def _expected(
    config: Any, architecture: str, found: DraftQuantization | None, tensors: Mapping[str, _Tensor]
) -> Iterator[_Expected]:
    """Every tensor that the draft must or may have."""
    hidden, nested = config.hidden_size, _nested(config)
    head_dim = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    draft_vocab = getattr(config, "draft_vocab_size", None) or config.vocab_size

    def plain(name: str, *shape: int, required: bool = True, dtypes: tuple[str, ...] = FLOATS) -> _Expected:
        return name, (Part(dtypes, lambda o, i: (shape,), required), (0, 0))

    modules = linear_modules(config)
    if any(name.startswith("lm_head.") for name in tensors):
        modules["lm_head"] = (draft_vocab, hidden)
    for module, sizes in modules.items():
        scheme = found.scheme_of(module) if found else PLAIN
        for suffix, part in scheme.parts.items():
            yield f"{module}.{suffix}", (part, sizes)
        if ".self_attn." in module and getattr(config, "attention_bias", False):
            yield plain(f"{module}.bias", sizes[0])
    sinks = nested.get("attention_sink_bias", getattr(config, "add_swa_attention_sink_bias", False))
    for layer in range(config.num_hidden_layers):
        at = f"layers.{layer}."
        yield plain(f"{at}input_layernorm.weight", hidden)
        yield plain(f"{at}post_attention_layernorm.weight", hidden)
        yield plain(f"{at}self_attn.q_norm.weight", head_dim)
        yield plain(f"{at}self_attn.k_norm.weight", head_dim)
        if sinks:
            yield plain(f"{at}self_attn.attention_sink_bias", config.num_attention_heads)
        if found:  # scales of a quantized KV cache
            for kind in "kv":
                name = f"{at}self_attn.{kind}_proj.{kind}_scale"
                yield name, (Part(FLOATS, lambda o, i: ((), (1,)), False), (0, 0))
        if architecture == "DFlash2DraftModel":
            for conv in _CONVS:
                yield plain(f"{at}{conv}.base_kernel", 2, nested["conv_kernel_size"], hidden)
    yield plain("hidden_norm.weight", hidden)
    yield plain("norm.weight", hidden)
    yield plain("embed_tokens.weight", config.vocab_size, hidden, required=False)
    yield plain("d2t", draft_vocab, required=draft_vocab < config.vocab_size, dtypes=_INTEGERS)
    yield plain("t2d", config.vocab_size, required=False, dtypes=("BOOL", *_INTEGERS))
    if architecture == "DFlash2DraftModel":
        rank = nested["selector_rank"]
        yield plain("candidate_selector.predecessor_codebook", config.vocab_size, rank)
        yield plain("candidate_selector.successor_codebook", config.vocab_size, rank)
        yield plain("candidate_selector.hidden_projection.weight", rank, hidden)


def _check_names(
    folder: Path,
    expected: Mapping[str, tuple[Part, tuple[int, int]]],
    tensors: Mapping[str, _Tensor],
    found: DraftQuantization | None,
) -> None:
    missing = [name for name, (part, _) in expected.items() if part.required and name not in tensors]
    surplus = [name for name in tensors if name not in expected]
    for name in (*missing, *surplus):  # the same module in another format: one fault, not many
        module = name.rpartition(".")[0]
        if any(extra.rpartition(".")[0] == module for extra in surplus) and (
            found is not None or any("scale" in extra for extra in surplus)
        ):
            scheme = found.scheme_of(module).name if found and name in missing else None
            holds = sorted(t.rpartition(".")[2] for t in tensors if t.rpartition(".")[0] == module)
            file = next((t.file for n, t in tensors.items() if n.rpartition(".")[0] == module), folder)
            raise ValueError(
                f"draft file {str(file)!r}: {module} has {', '.join(holds)}, but by the draft's own "
                f"quantization config it is {scheme or _said(found, module)}; "
                "correct the config's list of ignored modules or its quantization"
            )
    if missing:
        file = folder / INDEX if (folder / INDEX).is_file() else next(iter(tensors.values())).file
        raise ValueError(f"draft file {str(file)!r} lacks {_some(missing)}")
    if surplus:
        tensor = tensors[surplus[0]]
        raise ValueError(
            f"draft file {str(tensor.file)!r} holds {_some(surplus)}, which a draft of this configuration "
            "does not have; vLLM would not use it"
        )


def _said(found: DraftQuantization | None, module: str) -> str:
    return (found.scheme_of(module) if found else PLAIN).name


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _check_tensor(tensor: _Tensor, part: Part, sizes: tuple[int, int]) -> None:
    where = f"draft file {str(tensor.file)!r}: {tensor.name}"
    if tensor.dtype not in part.dtypes:
        raise ValueError(
            f"{where} is {tensor.dtype}, but must be {' or '.join(part.dtypes)} by the draft's own config"
        )
    shapes = part.shapes(*sizes)
    if tensor.shape not in shapes:
        raise ValueError(f"{where} has shape {list(tensor.shape)}, but must have {list(shapes[0])}")
    if "scale" not in tensor.name:
        return
    values = tensor.read().float()
    if not values.isfinite().all():
        raise ValueError(f"{where} is not finite everywhere; the file is damaged or was never calibrated")
    if values.numel() == 1 and float(values) <= 0:
        raise ValueError(f"{where} is {float(values)}, but must be above 0; it was never calibrated")


def _check_shared(
    expected: Mapping[str, tuple[Part, tuple[int, int]]], tensors: Mapping[str, _Tensor]
) -> None:
    """Scales that fused modules must share: vLLM keeps the largest, without changing the weights."""
    values: dict[tuple[str, str], set[float]] = defaultdict(set)
    for name, (part, _) in expected.items():
        if not part.shared or name not in tensors:
            continue
        module, _, suffix = name.rpartition(".")
        group = values[fused_name(module), suffix]
        group.add(float(tensors[name].read()))
        if len(group) > 1:
            raise ValueError(
                f"draft file {str(tensors[name].file)!r}: {suffix} differs between "
                f"{', '.join(shards_of(module))}, which vLLM fuses and gives one; quantize them together"
            )


def _check_vocabulary(
    folder: Path, config: Any, tensors: Mapping[str, _Tensor], target: TargetShape, facts: DraftFacts
) -> None:
    if not facts.d2t:
        return
    if not facts.own_head:
        raise ValueError(f"draft file {str(tensors['d2t'].file)!r} holds d2t without an lm_head of its own")
    offsets = tensors["d2t"].read().long()
    if len(offsets) == target.vocab_size:
        raise ValueError(
            f"draft file {str(tensors['d2t'].file)!r} holds d2t for all {target.vocab_size} ids of the "
            "target; a draft of the whole vocabulary needs none"
        )
    ids = torch.arange(len(offsets)) + offsets
    limit = min(config.vocab_size, target.vocab_size)
    if int(ids.min()) < 0 or int(ids.max()) >= limit or len(ids.unique()) < len(ids):
        raise ValueError(
            f"draft file {str(tensors['d2t'].file)!r}: d2t maps to ids from {int(ids.min())} to "
            f"{int(ids.max())}, but must map to different ids below {limit}"
        )
