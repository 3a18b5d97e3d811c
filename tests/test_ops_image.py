# SPDX-License-Identifier: Apache-2.0
"""The overlay image's scripts and the audit of files that fails its build. The build itself takes minutes and
a base image; scripts/build_image.sh is it."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_weaver import __version__, audit, doctor
from vllm_weaver.hooks import base

ROOT = Path(__file__).resolve().parents[1]
DOCKERFILE = (ROOT / "Dockerfile.overlay").read_text()
SCRIPTS = (
    "scripts/build_image.sh",
    "scripts/verify_image.sh",
    "scripts/serve.sh",
    "scripts/ops_lib/engine.sh",
)


# --- audit -----------------------------------------------------------------------------------------------


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a vLLM of three files, installed with a RECORD, in place of the real one."""
    lines = []
    for name in ("vllm/__init__.py", "vllm/config.py", "vllm/_C.so"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"# {name}\n")
        digest = base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{path.stat().st_size}")
    metadata = tmp_path / "vllm-0.32.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n")
    (metadata / "RECORD").write_text("\n".join([*lines, "vllm-0.32.0.dist-info/RECORD,,", ""]))
    distribution = importlib.metadata.Distribution.at(metadata)
    monkeypatch.setattr(audit, "vllm_distribution", lambda: distribution)
    spec = type("Spec", (), {"origin": str(tmp_path / "vllm" / "__init__.py")})
    monkeypatch.setattr(audit.importlib.util, "find_spec", lambda name: spec)
    return tmp_path


def test_files_as_installed_are_no_problem(installed: Path) -> None:
    (installed / "vllm" / "__pycache__").mkdir()
    (installed / "vllm" / "__pycache__" / "config.pyc").write_text("")
    assert audit.file_problem() is None


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (lambda root: (root / "vllm/config.py").write_text("other"), "vllm/config.py (changed)"),
        (lambda root: (root / "vllm/_C.so").write_text("other"), "vllm/_C.so (changed)"),
        (lambda root: (root / "vllm/config.py").unlink(), "vllm/config.py (missing)"),
        (lambda root: (root / "vllm/new.py").write_text(""), "vllm/new.py (added)"),
        (lambda root: [(root / f"vllm/{n}.py").write_text("") for n in range(5)], " and 2 more;"),
        (lambda root: (root / "vllm-0.32.0.dist-info/RECORD").write_text(""), "without a RECORD"),
    ],
    ids=["changed", "library", "missing", "added", "many", "no record"],
)
def test_a_touched_file_is_named(fault: object, expected: str, installed: Path) -> None:
    fault(installed)  # type: ignore[operator]
    found = audit.file_problem()
    assert found is not None and expected in found and "\n" not in found


def test_another_tree_in_front_of_vllm_is_named(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = type("Spec", (), {"origin": str(tmp_path / "mounted" / "vllm" / "__init__.py")})
    monkeypatch.setattr(audit.importlib.util, "find_spec", lambda name: spec)
    assert "mounted/vllm, not the installed" in (audit.file_problem() or "")
    monkeypatch.setattr(audit, "vllm_distribution", lambda: None)
    assert "no installation record" in (audit.file_problem() or "")


@pytest.mark.parametrize(
    ("has", "required", "good"),
    [
        (["sm_90", "sm_120"], "sm_120", True),
        (["sm_100a", "sm_120a"], "sm_120", True),
        (["sm_90", "compute_120"], "sm_120", True),
        (["sm_90", "sm_100"], "sm_120", False),
        (["sm_1200"], "sm_120", False),
        ([], "sm_120", False),
    ],
)
def test_architectures(has: list[str], required: str, good: bool) -> None:
    found = audit.architecture_problem(has, required)
    assert (found is None) == good
    if found is not None:
        assert required in found and (has[0] if has else "no CUDA code at all") in found


def test_doctor_audits_the_vllm_at_hand(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real one, whose files the tests leave alone; and a wrong version, and a missing architecture."""

    def run(*words: str) -> tuple[int, dict[str, object]]:
        monkeypatch.setattr(sys, "argv", ["doctor", "--json", "--audit", *words])
        status = doctor.main()
        return status, json.loads(capsys.readouterr().out)

    monkeypatch.setattr(audit, "architectures", lambda: ["sm_90", "sm_120"])
    status, found = run("--require-arch", "sm_120")
    assert (status, found["problems"]) == (0, [])
    assert found["architectures"] == ["sm_90", "sm_120"] and found["required_architecture"] == "sm_120"
    monkeypatch.setattr(audit, "file_problem", lambda: None)  # seconds, and seen above
    monkeypatch.setattr(audit, "architectures", lambda: ["sm_90"])
    status, found = run("--require-arch", "sm_120")
    assert status == 1 and "no code for sm_120" in str(found["problems"])
    monkeypatch.setattr(base, "vllm_version", lambda: "0.33.0")
    status, found = run()
    assert status == 1 and "the installed vLLM is 0.33.0" in str(found["problems"])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--require-arch", "sm_120"], "needs --audit"),
        (["--audit", "--require-arch", "12.0"], "look like sm_120"),
    ],
)
def test_doctor_names_a_wrong_option(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["doctor", *words])
    with pytest.raises(SystemExit) as error:
        doctor.main()
    assert error.value.code == 2 and expected in capsys.readouterr().err


# --- Dockerfile and scripts ------------------------------------------------------------------------------


def test_dockerfile_keeps_the_base_as_it_is() -> None:
    words = {line.split()[0] for line in DOCKERFILE.splitlines() if re.match(r"[A-Z]+ ", line)}
    assert words == {"ARG", "FROM", "LABEL", "ENV", "COPY", "RUN"}  # no ENTRYPOINT, CMD, USER, WORKDIR
    assert f"ARG BASE=vllm/vllm-openai:v{base.SUPPORTED_VLLM}\nFROM ${{BASE}}" in DOCKERFILE
    assert "--no-deps" in DOCKERFILE and "--audit" in DOCKERFILE and "apt" not in DOCKERFILE


@pytest.mark.parametrize("name", SCRIPTS)
def test_bash_and_shellcheck_accept(name: str) -> None:
    assert subprocess.run(["bash", "-n", ROOT / name], capture_output=True).returncode == 0
    if tool := shutil.which("shellcheck"):
        done = subprocess.run([tool, name], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


ENGINE = r"""#!/usr/bin/env bash
# Stands in for docker: notes its calls, and is an image with the labels of LABELS.
printf '%s\n' "$*" >>"$CALLS"
case "$*" in
    info | build*) ;;
    "image inspect --format {{.Config.Entrypoint}}"*) echo "${ENTRY:-[vllm serve]}" ;;
    "image inspect --format {{.Config.Labels}}"*) echo "map[$LABELS]" ;;
    "image inspect"*) [ -z "${MISSING:-}" ] ;;
    *doctor*) exit "${DOCTOR:-0}" ;;
    *probe.py*) exit "${PROBE:-0}" ;;
    run*) echo "$VERSION" ;;
esac
"""


@pytest.fixture
def engine(tmp_path: Path) -> dict[str, str]:
    """Environment with a stand-in for docker that has a right image."""
    docker = tmp_path / "bin" / "docker"
    docker.parent.mkdir()
    docker.write_text(ENGINE)
    docker.chmod(0o755)
    prefix = "org.opencontainers.image."
    labels = f"{prefix}base.name:base:1 {prefix}revision:abc {prefix}version:{__version__}"
    return {
        "PATH": f"{docker.parent}:{os.environ['PATH']}",
        "CALLS": str(tmp_path / "calls"),
        "VERSION": __version__,
        "LABELS": labels + " vllm-weaver.required-arch:sm_120",
    }


def script(name: str, environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(ROOT / "scripts" / name), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | environment)


in_git = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="the label's commit needs a git checkout")


@in_git
def test_build_passes_base_version_commit_and_architecture(engine: dict[str, str]) -> None:
    done = script("build_image.sh", engine, "--print", "--base", "mine:1@sha256:00", "--engine", "docker")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("docker build -f Dockerfile.overlay --build-arg BASE=mine:1@sha256:00 ")
    assert f"VERSION={__version__} " in done.stdout and "REQUIRED_ARCH=sm_120 " in done.stdout
    assert re.search(r"COMMIT=[0-9a-f]{40}(\+changes)? ", done.stdout)


@in_git
def test_build_builds_in_a_context_of_its_own_and_verifies(engine: dict[str, str]) -> None:
    commit = script("build_image.sh", engine, "--print", "--engine", "docker").stdout
    engine["LABELS"] = engine["LABELS"].replace(":abc", ":" + re.findall(r"COMMIT=(\S+)", commit)[0])
    done = script("build_image.sh", engine, "--require-arch", "none")
    assert done.returncode == 0, done.stderr
    assert "verify: ok: vllm-weaver:" in done.stderr and "nothing was run on a device" in done.stderr
    build = next(line for line in Path(engine["CALLS"]).read_text().splitlines() if line.startswith("build"))
    context = Path(build.split()[-1])
    assert not context.is_relative_to(ROOT) and not context.exists()


@in_git
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--require-arch", "12.0"], "must look like sm_120"),
        (["--base"], "--base needs a value"),
        (["--nonsense"], "unknown argument '--nonsense'"),
        (["--engine", "lxc"], "must be docker, podman or buildah"),
    ],
)
def test_build_names_a_mistake(words: list[str], expected: str, engine: dict[str, str]) -> None:
    done = script("build_image.sh", engine, *words)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith("image: FAILED: ") and expected in done.stderr


def test_verify_runs_audit_doctor_and_probe(engine: dict[str, str]) -> None:
    done = script("verify_image.sh", engine, "image:1", "--gpu", "--commit", "abc")
    assert done.returncode == 0, done.stderr
    calls = Path(engine["CALLS"]).read_text()
    assert "--entrypoint python3 image:1 -m vllm_weaver.doctor --audit --require-arch sm_120" in calls
    assert "run --rm --gpus all" in calls and "/demo/ops_lib/probe.py /demo/demo_models" in calls
    assert (
        done.stderr.splitlines()[-1] == "verify: ok: image:1 generates with trees what it generates without"
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"MISSING": "1"}, "docker has no image image:1"),
        ({"ENTRY": "[bash]"}, "is [bash], not [vllm serve]"),
        ({"LABELS": "a:b"}, "no label org.opencontainers.image.version"),
        ({"DOCTOR": "1"}, "the audit of image:1 has findings"),
        ({"PROBE": "1"}, "does not generate text rightly"),
        ({"VERSION": "0.0.9"}, "has vllm_weaver 0.0.9, but its label says"),
    ],
    ids=["no image", "entry point", "labels", "audit", "generation", "version"],
)
def test_verify_fails_closed(changes: dict[str, str], expected: str, engine: dict[str, str]) -> None:
    done = script("verify_image.sh", engine | changes, "image:1", "--gpu")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("verify: FAILED: ") and expected in done.stderr
    assert script("verify_image.sh", engine, "image:1", "--commit", "abd").returncode == 1
