# SPDX-License-Identifier: Apache-2.0
"""How a draft checkpoint says that it is quantized, and which tensors each of its modules must then have.

A draft is read by its own files alone; the target's quantization never matters. Names in those files count
the draft's layers from 0, with or without a leading `model.`; vLLM builds the same layers after the target's
and fuses some of them. `DraftQuantization.scheme_of` decides for one module under all of its names, and both
the check of the files and the hook that tells vLLM go by its answer.

Every error is a `ValueError` of one sentence without the file's name, which the caller adds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

Shapes = tuple[tuple[int, ...], ...]
FLOATS = ("BF16", "F16", "F32")
FP8 = ("F8_E4M3",)
_SCALAR: Shapes = ((), (1,))

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Modules that vLLM makes of several of a checkpoint's."""
_FUSED_OF = {shard: fused for fused, shards in FUSED.items() for shard in shards}


@dataclass(frozen=True)
class Part:
    """One tensor of a module: allowed dtypes (safetensors' names) and shapes, from the sizes [out, in]."""

    dtypes: tuple[str, ...]
    shapes: Callable[[int, int], Shapes]
    required: bool = True
    shared: bool = False
    """Whether modules that vLLM fuses must agree on it: vLLM keeps one value and would scale the others
    wrongly."""


@dataclass(frozen=True)
class Scheme:
    """The tensors of a module, by the name after the module's."""

    name: str
    parts: Mapping[str, Part]


def _scalar(required: bool = True, shared: bool = False) -> Part:
    return Part(("F32", "BF16", "F16"), lambda o, i: _SCALAR, required, shared)


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


PLAIN = Scheme("unquantized", {"weight": Part(FLOATS, lambda o, i: ((o, i),))})
_FP8_WEIGHT = Part(FP8, lambda o, i: ((o, i),))
_FP4_WEIGHT = Part(("U8",), lambda o, i: ((o, i // 2),))
_FP4_SCALE = Part(FP8, lambda o, i: ((o, i // 16),))
_ROW_SCALE = Part(FLOATS, lambda o, i: ((o,), (o, 1)))


def _nvfp4(name: str, input_scale: bool) -> Scheme:
    return Scheme(
        name,
        {
            "weight": _FP4_WEIGHT,
            "weight_scale": _FP4_SCALE,
            "weight_scale_2": _scalar(shared=True),
            "input_scale": _scalar(required=input_scale),
        },
    )


def _block_scale(rows: int, columns: int) -> Part:
    def shapes(o: int, i: int) -> Shapes:
        a, b = _cdiv(o, rows), _cdiv(i, columns)
        return ((a, b), (a, 1, b, 1))

    return Part(FLOATS, shapes)


MODELOPT = {
    "FP8": Scheme(
        "ModelOpt FP8", {"weight": _FP8_WEIGHT, "weight_scale": _scalar(), "input_scale": _scalar()}
    ),
    "FP8_PER_CHANNEL_PER_TOKEN": Scheme(
        "ModelOpt FP8_PER_CHANNEL_PER_TOKEN", {"weight": _FP8_WEIGHT, "weight_scale": _ROW_SCALE}
    ),
    "FP8_PB_WO": Scheme(
        "ModelOpt FP8_PB_WO", {"weight": _FP8_WEIGHT, "weight_scale": _block_scale(128, 128)}
    ),
    "NVFP4": _nvfp4("ModelOpt NVFP4", input_scale=True),
    "W4A16_NVFP4": _nvfp4("ModelOpt W4A16_NVFP4", input_scale=False),
}
_Rule = Callable[[str], "Scheme | None"]


class DraftQuantization:
    """What a draft's quantization config says about its modules.

    config: `quantization_config` of the draft's config.json, or the content of its hf_quant_config.json.
    Raises ValueError where it is in no form that is known here.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        method = str(config.get("quant_method") or "").lower().replace("_", "-")
        producer = config.get("producer")
        name = producer.get("name") if isinstance(producer, Mapping) else producer
        nested = config.get("quantization")
        if method.startswith("modelopt") or (
            not method and (name == "modelopt" or isinstance(nested, Mapping))
        ):
            self._rule = _modelopt(_nested_modelopt(nested) if isinstance(nested, Mapping) else config)
        elif method == "compressed-tensors":
            self._rule = _compressed_tensors(config)
        elif method == "fp8":
            self._rule = _fp8(config)
        else:
            raise ValueError(
                f"its quantization has quant_method={config.get('quant_method')!r}, but a draft may be "
                "plain, 'modelopt' (FP8, NVFP4), 'compressed-tensors' or 'fp8'"
            )

    def scheme_of(self, module: str) -> Scheme:
        """The scheme of a linear module, named as in the checkpoint (`layers.0.mlp.up_proj`).

        Raises ValueError if modules that vLLM fuses with it have another."""
        schemes = {shard: self._single(shard) for shard in shards_of(module)}
        if len({scheme.name for scheme in schemes.values()}) > 1:
            said = ", ".join(f"{shard} is {scheme.name}" for shard, scheme in schemes.items())
            raise ValueError(
                f"its quantization differs within {fused_name(module)}, which vLLM fuses: {said}"
            )
        return schemes[module]

    def _single(self, module: str) -> Scheme:
        # vLLM never quantizes the selector's projection.
        found = None if module.startswith("candidate_selector.") else self._rule(module)
        return found or PLAIN


def fused_name(module: str) -> str:
    """The module that vLLM makes of this one and its siblings, or the module itself."""
    parent, dot, last = module.rpartition(".")
    return parent + dot + _FUSED_OF.get(last, last)


def shards_of(module: str) -> tuple[str, ...]:
    """All modules that vLLM fuses with this one, itself included."""
    parent, dot, last = module.rpartition(".")
    return tuple(parent + dot + shard for shard in FUSED.get(_FUSED_OF.get(last, ""), (last,)))


def _aliases(module: str) -> tuple[str, ...]:
    """The names that a quantization config may use for a module."""
    names = dict.fromkeys((module, fused_name(module)))
    return (*names, *(f"model.{name}" for name in names))


def _listed(config: Mapping[str, Any], *keys: str) -> list[str]:
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise ValueError(f"its quantization has {key}={value!r}, which must be a list of names")
        return value
    return []


# --- ModelOpt --------------------------------------------------------------------------------------------


def _algorithm(raw: Any) -> Scheme:
    algo = str(raw or "").upper()
    if algo not in MODELOPT:
        raise ValueError(
            f"its quantization has quant_algo={raw!r}, but a draft may have {', '.join(MODELOPT)} "
            "or MIXED_PRECISION of these"
        )
    return MODELOPT[algo]


def _nested_modelopt(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The inner mapping of the form that hf_quant_config.json has; vLLM insists on some of its keys."""
    needed = ("group_size", "kv_cache_quant_algo", "exclude_modules")
    missing = [key for key in needed if key not in config]
    if missing and str(config.get("quant_algo") or "").upper().endswith("NVFP4"):
        raise ValueError(
            f"its quantization lacks {', '.join(missing)}; vLLM needs it for NVFP4, null will do"
        )
    return config


def _modelopt(config: Mapping[str, Any]) -> _Rule:
    ignored = _listed(config, "exclude_modules", "ignore")

    def skipped(module: str) -> bool:
        return any(entry in name or fnmatch(name, entry) for name in _aliases(module) for entry in ignored)

    group = config.get("group_size")
    if group is not None and str(group) != "16":
        raise ValueError(f"its quantization has group_size={group!r}, but NVFP4 has groups of 16")
    if str(config.get("quant_algo") or "").upper() != "MIXED_PRECISION":
        scheme = _algorithm(config.get("quant_algo"))
        groups = config.get("config_groups")
        if scheme is MODELOPT["NVFP4"] and groups:  # as vLLM does
            weights_only = all(group.get("input_activations") is None for group in groups.values())
            scheme = MODELOPT["W4A16_NVFP4"] if weights_only else scheme
        return lambda module: None if skipped(module) else scheme
    layers = config.get("quantized_layers")
    if not isinstance(layers, Mapping) or not all(isinstance(info, Mapping) for info in layers.values()):
        raise ValueError("its quantization is MIXED_PRECISION without a mapping quantized_layers")
    schemes = {name: _algorithm(info.get("quant_algo")) for name, info in layers.items()}

    def mixed(module: str) -> Scheme | None:
        if skipped(module):
            return None
        return next((schemes[name] for name in _aliases(module) if name in schemes), None)

    return mixed


# --- fp8 and compressed-tensors --------------------------------------------------------------------------


def _fp8(config: Mapping[str, Any]) -> _Rule:
    ignored = set(_listed(config, "ignored_layers", "modules_to_not_convert"))
    parts = {"weight": _FP8_WEIGHT}
    block = config.get("weight_block_size")
    if block is not None:
        parts["weight_scale_inv"] = _block_scale(*block)
    else:
        parts["weight_scale"] = _scalar()
    activation = config.get("activation_scheme")
    if activation == "static":
        parts["input_scale"] = _scalar()
    elif activation != "dynamic":
        raise ValueError(
            f"its quantization has activation_scheme={activation!r}, which must be 'static' or 'dynamic'"
        )
    scheme = Scheme("FP8", parts)
    return lambda module: None if ignored.intersection(_aliases(module)) else scheme


def matches(entry: str, module: str) -> bool:
    """Whether an entry of compressed-tensors' `ignore` or `targets` means a linear module."""
    if entry == "Linear":
        return True
    if entry.startswith("re:"):
        return any(re.match(entry[3:], name) for name in _aliases(module))
    return entry in _aliases(module)


def _compressed_tensors(config: Mapping[str, Any]) -> _Rule:
    ignored = _listed(config, "ignore")
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ValueError("its quantization is compressed-tensors without config_groups")
    rules = []
    for name, group in groups.items():
        scheme = _compressed_scheme(name, group, group.get("format") or config.get("format"))
        # A name is more telling than the class: vLLM looks for names first.
        rules += [(entry == "Linear", entry, scheme) for entry in _listed(group, "targets")]
    rules.sort(key=lambda rule: rule[0])

    def rule(module: str) -> Scheme | None:
        if any(matches(entry, module) for entry in ignored if entry != "Linear"):
            return None
        return next((scheme for _, entry, scheme in rules if matches(entry, module)), None)

    return rule


def _compressed_scheme(name: str, group: Mapping[str, Any], form: Any) -> Scheme:
    weights, inputs = group.get("weights") or {}, group.get("input_activations")
    kind, bits, strategy = weights.get("type"), weights.get("num_bits"), weights.get("strategy")
    size = weights.get("group_size") or 0
    title = f"compressed-tensors {form} ({name})"
    if kind == "float" and bits == 4 and size == 16:
        parts = {
            "weight_packed": _FP4_WEIGHT,
            "weight_scale": _FP4_SCALE,
            "weight_global_scale": _scalar(shared=True),
        }
        if inputs:
            parts["input_global_scale"] = _scalar()
        return Scheme(title, parts)
    if bits == 8 and kind in ("float", "int") and form != "pack-quantized" and strategy != "group":
        parts = {"weight": _FP8_WEIGHT if kind == "float" else Part(("I8",), lambda o, i: ((o, i),))}
        if strategy == "block":
            parts["weight_scale"] = _block_scale(*weights["block_structure"])
        else:
            parts["weight_scale"] = _ROW_SCALE if strategy == "channel" else _scalar()
        if inputs and not inputs.get("dynamic"):
            parts["input_scale"] = _scalar()
        return Scheme(title, parts)
    if kind == "int" and isinstance(bits, int) and form == "pack-quantized":
        packed = 32 // bits

        def scales(o: int, i: int) -> Shapes:
            return ((o, i // size),) if size > 0 else ((o, 1), (o,))

        return Scheme(
            title,
            {
                "weight_packed": Part(("I32",), lambda o, i: ((o, _cdiv(i, packed)),)),
                "weight_scale": Part(FLOATS, scales),
                "weight_shape": Part(("I64", "I32"), lambda o, i: ((2,),)),
                "weight_zero_point": Part(
                    ("I32",), lambda o, i: tuple((_cdiv(a, packed), b) for a, b in scales(o, i)[:1]), False
                ),
                "weight_g_idx": Part(("I32",), lambda o, i: ((i,),), False),
            },
        )
    raise ValueError(
        f"its quantization has config_groups.{name} with weights of type {kind!r}, {bits!r} bits, strategy "
        f"{strategy!r} and format {form!r}, which no draft is supported in"
    )


# --- what vLLM is told -----------------------------------------------------------------------------------


def tell_vllm(quant_config: Any, found: DraftQuantization, names: Iterable[tuple[str, str]]) -> None:
    """Make a QuantizationConfig of vLLM agree with `found`, for modules (name in the draft, name in vLLM).

    Its lists name modules as the draft's files do; they are replaced by the names that vLLM has for them."""
    skipped, quantized = [], {}
    for module, ours in names:
        scheme = found.scheme_of(module)
        if scheme is PLAIN:
            skipped.append(ours)
        else:
            quantized[ours] = (module, scheme)
    for attribute in ("exclude_modules", "ignored_layers", "ignore"):
        if hasattr(quant_config, attribute):
            setattr(quant_config, attribute, list(dict.fromkeys(skipped)))
    if hasattr(quant_config, "quantized_layers"):
        quant_config.quantized_layers = {
            ours: {"quant_algo": scheme.name.removeprefix("ModelOpt ")}
            for ours, (_, scheme) in quantized.items()
        }
    if hasattr(quant_config, "target_scheme_map"):
        by_target = quant_config.target_scheme_map
        order = sorted(by_target, key=lambda entry: entry == "Linear")
        quant_config.target_scheme_map = {
            ours: by_target[next(entry for entry in order if matches(entry, module))]
            for ours, (module, _) in quantized.items()
        }
