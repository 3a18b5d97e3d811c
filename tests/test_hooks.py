# SPDX-License-Identifier: Apache-2.0
"""The hooks: written against this vLLM, applied once, refused elsewhere, invisible without `dflash_tfm`."""

from __future__ import annotations

import functools
import importlib
import logging
import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests import tiny
from vllm_weaver import cpu, plugin
from vllm_weaver.hooks import HOOKS, base, install

pytestmark = pytest.mark.usefixtures("root")
BY_NAME = {hook.name: hook for hook in HOOKS}
CONFIG_HOOKS = [hook for hook in HOOKS if hook.phase == "config"]
LATER_HOOKS = [hook for hook in HOOKS if hook.phase != "config"]


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not torch.cuda.is_available():
        cpu.prepare()
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def spec(root: Path) -> dict[str, Any]:
    draft = tiny.folder(root, "draft")
    return {"method": "dflash_tfm", "model": draft, "num_speculative_tokens": 16, "proposal": "chain"}


@pytest.fixture(scope="session")
def hybrid(root: Path) -> str:
    return tiny.folder(root, "hybrid")


@pytest.fixture
def unhooked(root: Path) -> Iterator[None]:
    """vLLM as it is without us, and the config hooks back in place afterwards."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    base.revert(HOOKS)
    yield
    plugin.register()


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    """Messages that vllm_weaver logs as warnings (vLLM's loggers do not propagate, so caplog sees none)."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    base.logger.addHandler(handler)
    base.logger.setLevel(logging.WARNING)  # whatever level another test's vLLM has chosen
    yield said
    base.logger.setLevel(logging.NOTSET)
    base.logger.removeHandler(handler)


# --- the list --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BY_NAME)
def test_hook_is_written_against_the_installed_vllm(name: str) -> None:
    hook = BY_NAME[name]
    assert base.fingerprint(hook.source or hook.target) == hook.fingerprint
    assert base.status(hook).state in ("applied", "pending")


@pytest.mark.parametrize("name", BY_NAME)
def test_hook_says_where_why_and_until_when(name: str) -> None:
    hook = BY_NAME[name]
    assert hook.reason and hook.removal
    file = (hook.source or hook.target).partition(":")[0].replace(".", "/")
    assert hook.upstream.startswith(f"https://github.com/vllm-project/vllm/blob/v0.32.0/{file}")
    module, _, function = hook.make.partition(":")
    assert module.startswith("vllm_weaver.")
    assert callable(getattr(importlib.import_module(module), function))


def test_names_and_targets_are_unique() -> None:
    assert len(BY_NAME) == len(HOOKS) == len({hook.target for hook in HOOKS})


def test_fingerprint_command_agrees() -> None:
    from vllm_weaver.hooks.__main__ import main

    assert main() == 0


# --- in vLLM ---------------------------------------------------------------------------------------------


def test_plugin_is_loaded_through_its_entry_point(root: Path) -> None:
    from vllm.plugins import load_plugins_by_group

    assert load_plugins_by_group("vllm.general_plugins")["vllm_weaver"] is plugin.register


def test_registering_twice_changes_nothing(unhooked: None) -> None:
    from vllm.engine import arg_utils

    plugin.register()
    first = {
        hook.name: base._current(hook.target, sys.modules[hook.target.partition(":")[0]])
        for hook in CONFIG_HOOKS
    }
    plugin.register()
    again = {
        hook.name: base._current(hook.target, sys.modules[hook.target.partition(":")[0]])
        for hook in CONFIG_HOOKS
    }
    assert first == again
    assert arg_utils.SpeculativeConfig.__name__ == "WeaverSpeculativeConfig"
    assert {base.status(hook).state for hook in CONFIG_HOOKS} == {"applied"}


def test_a_plain_config_is_the_same_with_and_without_hooks(unhooked: None, hybrid: str) -> None:
    before = tiny.engine_args(hybrid).create_engine_config()
    plugin.register()
    after = tiny.engine_args(hybrid).create_engine_config()
    assert before.compute_hash() == after.compute_hash()
    assert before.num_lookahead_tokens == after.num_lookahead_tokens == 0
    assert before.cache_config == after.cache_config and before.scheduler_config == after.scheduler_config


def test_config_hooks_are_all_that_a_plain_engine_gets(unhooked: None, hybrid: str) -> None:
    plugin.register()
    install.activate(tiny.engine_args(hybrid).create_engine_config())
    assert {base.status(hook).state for hook in CONFIG_HOOKS} == {"applied"}
    assert {base.status(hook).state for hook in LATER_HOOKS} == {"pending"}


def test_a_worker_with_settings_applies_every_hook_before_its_device(
    unhooked: None, hybrid: str, spec: dict[str, Any]
) -> None:
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    plugin.register()
    seen: list[set[str]] = []
    wrapper = WorkerWrapperBase()
    wrapper.vllm_config = tiny.engine_args(hybrid, speculative_config=dict(spec)).create_engine_config()
    wrapper.worker = SimpleNamespace(
        init_device=lambda: seen.append({base.status(hook).state for hook in HOOKS})
    )
    wrapper.init_device()
    wrapper.init_device()
    assert seen == [{"applied"}, {"applied"}]


def test_a_worker_checks_its_config_again(unhooked: None, hybrid: str, spec: dict[str, Any]) -> None:
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    from vllm_weaver.config import ConfigError

    plugin.register()
    wrapper = WorkerWrapperBase()
    wrapper.vllm_config = tiny.engine_args(hybrid, speculative_config=dict(spec)).create_engine_config()
    wrapper.vllm_config.parallel_config.tensor_parallel_size = 2
    wrapper.worker = SimpleNamespace(init_device=lambda: pytest.fail("the worker must not start"))
    with pytest.raises(ConfigError, match="--tensor-parallel-size=2"):
        wrapper.init_device()


CHILD = """
import pickle, sys
from vllm_weaver import cpu
if {on_cpu}: cpu.prepare()
config = pickle.load(open(sys.argv[1], "rb"))
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm_weaver.config import settings_of
from vllm_weaver.hooks import HOOKS, base, install
phases = lambda: sorted({{(h.phase, base.status(h).state) for h in HOOKS}})
before = phases()
install.activate(config)
print(repr((settings_of(config).budget, before, phases())))
"""


def test_a_fresh_process_gets_the_config_by_pickle(
    root: Path, tmp_path: Path, hybrid: str, spec: dict[str, Any]
) -> None:
    """As a spawned engine or worker does: nothing is inherited, plugins are loaded after unpickling."""
    config = tiny.engine_args(hybrid, speculative_config=dict(spec)).create_engine_config()
    file = tmp_path / "config.pickle"
    file.write_bytes(pickle.dumps(config))
    code = CHILD.format(on_cpu=not torch.cuda.is_available())
    run = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-2000:]
    budget, before, after = eval(run.stdout.splitlines()[-1])  # noqa: S307 (our own repr)
    assert budget == 16
    assert ("config", "applied") in before and all(
        state == "pending" for phase, state in before if phase != "config"
    )
    assert {state for _, state in after} == {"applied"}


# --- another vLLM ----------------------------------------------------------------------------------------


@pytest.fixture
def guarded(unhooked: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Lets a test install into a vLLM it has made unfit; takes the guard off again."""
    from vllm.engine import arg_utils

    monkeypatch.setattr(install, "_refusal", None)
    original = arg_utils.EngineArgs.create_engine_config
    yield monkeypatch
    monkeypatch.undo()
    arg_utils.EngineArgs.create_engine_config = original


def check_refused_but_otherwise_untouched(hybrid: str, spec: dict[str, Any], warnings: list[str]) -> str:
    from vllm.config.speculative import SpeculativeConfig
    from vllm.engine import arg_utils

    plugin.register()
    plugin.register()
    assert arg_utils.SpeculativeConfig is SpeculativeConfig
    assert not base._owned
    assert len(warnings) == 1
    assert tiny.engine_args(hybrid).create_engine_config().speculative_config is None
    with pytest.raises(base.HookError) as caught:
        tiny.engine_args(hybrid, speculative_config=dict(spec)).create_engine_config()
    message = str(caught.value)
    assert "\n" not in message and message in warnings[0]
    assert len(warnings) == 1
    return message


@pytest.mark.parametrize("version", ["0.31.1", "0.32.1", "0.33.0rc1", "dev"])
def test_another_version_is_refused_with_the_remedy(
    version: str, guarded: pytest.MonkeyPatch, hybrid: str, spec: dict[str, Any], warnings: list[str]
) -> None:
    guarded.setattr(base, "vllm_version", lambda: version)
    message = check_refused_but_otherwise_untouched(hybrid, spec, warnings)
    assert f"the installed vLLM is {version}" in message and "install vllm==0.32.0" in message


@pytest.mark.parametrize("name", BY_NAME)
def test_a_changed_target_is_refused(
    name: str, guarded: pytest.MonkeyPatch, hybrid: str, spec: dict[str, Any], warnings: list[str]
) -> None:
    hooks = tuple(replace(hook, fingerprint="0" * 16) if hook.name == name else hook for hook in HOOKS)
    guarded.setattr(install, "HOOKS", hooks)
    message = check_refused_but_otherwise_untouched(hybrid, spec, warnings)
    assert repr(name) in message and "expected 0000000000000000" in message and "vllm==0.32.0" in message


def test_another_packages_patch_is_refused(
    guarded: pytest.MonkeyPatch, hybrid: str, spec: dict[str, Any], warnings: list[str]
) -> None:
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    original = WorkerWrapperBase.init_device

    @functools.wraps(original)  # copies the module's name: the patch must be found all the same
    def other(self: Any) -> Any:
        return original(self)

    guarded.setattr(WorkerWrapperBase, "init_device", other)
    message = check_refused_but_otherwise_untouched(hybrid, spec, warnings)
    assert "WorkerWrapperBase.init_device is patched by" in message and Path(__file__).name in message


def test_an_unexpected_failure_never_reaches_vllm(
    guarded: pytest.MonkeyPatch, hybrid: str, spec: dict[str, Any], warnings: list[str]
) -> None:
    def broken(hooks: Any) -> None:
        raise KeyError("surprise")

    guarded.setattr(base, "problem", broken)
    assert "KeyError: 'surprise'" in check_refused_but_otherwise_untouched(hybrid, spec, warnings)


# --- the framework, on a stub package --------------------------------------------------------------------

STUB = """
class Thing:
    @property
    def size(self):
        return 1

    @staticmethod
    def plain(x):
        return x


def helper(x):
    return x + 1
"""


def doubled(original: Any) -> Any:
    """A `make` function for the stub's hooks."""
    return lambda x: 2 * original(x)


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, list[base.Hook]]]:
    """A package `stublib` whose module `user` imports `helper` by name; the file of `lib`, two hooks."""
    package = tmp_path / "stublib"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "lib.py").write_text(STUB)
    (package / "user.py").write_text("from stublib.lib import helper\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    make = f"{__name__}:doubled"
    common = dict(phase="config", kind="wrap", reason="r", removal="r", make=make)
    hooks = [
        base.Hook(
            name=name, target=target, source=source, fingerprint=base.fingerprint(source) or "", **common
        )
        for name, target, source in (
            ("helper", "stublib.user:helper", "stublib.lib:helper"),
            ("plain", "stublib.lib:Thing.plain", "stublib.lib:Thing.plain"),
        )
    ]
    yield package / "lib.py", hooks
    base.revert(hooks)
    base._parse.cache_clear()
    base._package_dir.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "stublib"]:
        del sys.modules[name]


def load(name: str) -> ModuleType:
    return importlib.import_module(name)


def test_verifying_imports_nothing(stub: tuple[Path, list[base.Hook]]) -> None:
    _, hooks = stub
    assert [base.status(hook).state for hook in hooks] == ["pending", "pending"]
    assert "stublib" not in sys.modules


def test_apply_rebinds_in_the_consumer_only_and_once(stub: tuple[Path, list[base.Hook]]) -> None:
    _, (helper, _) = stub
    base.apply([helper])
    base.apply([helper])
    assert load("stublib.user").helper(1) == 4
    assert load("stublib.lib").helper(1) == 2
    assert base.status(helper).state == "applied"
    base.revert([helper])
    assert load("stublib.user").helper(1) == 2


@pytest.mark.parametrize(
    ("edit", "state"),
    [
        (("return x + 1", "return x + 2"), "upstream changed"),
        (("return x + 1", "return x  +  1"), "pending"),  # white space only
        (("def helper", "def renamed"), "missing target"),
    ],
    ids=["changed", "white space", "renamed"],
)
def test_edited_upstream(edit: tuple[str, str], state: str, stub: tuple[Path, list[base.Hook]]) -> None:
    file, (helper, _) = stub
    file.write_text(file.read_text().replace(*edit))
    base._parse.cache_clear()
    assert base.status(helper).state == state


def test_missing_module_is_a_missing_target(stub: tuple[Path, list[base.Hook]]) -> None:
    file, (helper, _) = stub
    file.unlink()
    assert base.status(helper).state == "missing target"


def test_missing_name_in_the_consumer_is_a_missing_target(stub: tuple[Path, list[base.Hook]]) -> None:
    _, (helper, _) = stub
    del load("stublib.user").helper
    with pytest.raises(base.HookError, match="stublib.user:helper does not exist"):
        base.apply([helper])


def test_a_conflict_leaves_every_target_alone(stub: tuple[Path, list[base.Hook]]) -> None:
    _, (helper, plain) = stub
    thing = load("stublib.lib").Thing
    thing.plain = staticmethod(lambda x: -x)
    with pytest.raises(base.HookError, match="Thing.plain is patched by .*test_hooks.py"):
        base.apply([helper, plain])
    assert load("stublib.user").helper(1) == 2 and thing.plain(1) == -1


def test_a_later_patch_over_ours_is_a_conflict(stub: tuple[Path, list[base.Hook]]) -> None:
    _, (helper, _) = stub
    base.apply([helper])
    user = load("stublib.user")
    user.helper = functools.wraps(user.helper)(lambda x: 0)
    assert base.status(helper).state == "conflict"
    base.revert([helper])
    assert user.helper(1) == 0  # not ours to take away


def test_two_hooks_of_ours_on_one_target_are_a_conflict(stub: tuple[Path, list[base.Hook]]) -> None:
    _, (helper, _) = stub
    base.apply([helper])
    second = replace(helper, name="second")
    with pytest.raises(base.HookError, match="already replaced by our hook 'helper'"):
        base.apply([second])


def test_fingerprint_covers_decorators_and_nesting(stub: tuple[Path, list[base.Hook]]) -> None:
    assert base.upstream_source("stublib.lib:Thing.size") == (
        "    @property\n    def size(self):\n        return 1"
    )
    assert base.upstream_source("stublib.lib:Thing.nothing") is None
    assert base.upstream_source("no_such_package:x") is None
