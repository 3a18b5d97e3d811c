#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The command line of serve.sh: builds a profile's command, for Docker or for a bare `vllm`, and runs it."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ops_lib import profiles, refusals
from ops_lib.profiles import Command, ProfileError, Request

# As build_image.sh names it. Read, not imported: a Docker host need not have the package.
_VERSION = (Path(__file__).resolve().parents[2] / "vllm_weaver" / "__init__.py").read_text()
IMAGE = "vllm-weaver:" + re.findall(r'^__version__ = "(.+)"$', _VERSION, re.MULTILINE)[0]
CACHE_VOLUME = "vllm-weaver-cache"


def detected_capability() -> tuple[int, int]:
    """Compute capability of the first GPU, from nvidia-smi. Raises ProfileError if there is none."""
    tool = shutil.which("nvidia-smi")
    text = ""
    if tool is not None:
        query = [tool, "--query-gpu=compute_cap", "--format=csv,noheader"]
        text = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    if not text:
        raise ProfileError(
            "no GPU found here; say what the server will run on: --capability 12.0 (or 10.0, 9.0)"
        )
    return capability(text.splitlines()[0])


def capability(text: str) -> tuple[int, int]:
    """`12.0` as (12, 0). Raises ProfileError on another form, and below 8.0, which no profile is made for."""
    match = re.fullmatch(r"(\d{1,2})\.(\d)", text.strip())
    if match is None:
        raise ProfileError(f"compute capability {text!r} must look like 12.0")
    found = int(match[1]), int(match[2])
    if found < (8, 0):
        raise ProfileError(f"compute capability {text} is below 8.0, which FlashAttention needs")
    return found


def docker(built: Command, request: Request, image: str) -> list[str]:
    """`docker run` of a built command: GPUs, caches that are kept, folders at their own paths."""
    words = ["docker", "run", "--rm", "--gpus", "all", "--ipc=host"]
    words += ["-p", f"127.0.0.1:{request.port}:{request.port}"]
    # Kernels compiled at first use, for minutes; see Dockerfile.overlay.
    words += ["-v", f"{CACHE_VOLUME}:/cache"]
    cache = os.environ.get("HF_HOME") or str(Path.home() / ".cache" / "huggingface")
    words += ["-v", f"{cache}:/cache/huggingface", "-e", "HF_HOME=/cache/huggingface"]
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE"):
        if name in os.environ:
            words += ["-e", name]  # the value stays out of the command line
    for name, value in built.environment.items():
        words += ["-e", f"{name}={value}"]
    resolved = request.with_models()
    for model in (resolved.target, resolved.draft, resolved.weaver):
        if model is not None and (model.local or Path(model.name).expanduser().exists()):
            path = Path(model.name).expanduser().resolve()
            words += ["-v", f"{path}:{path}:ro"]
    return [*words, image, *built.arguments]


def bare(built: Command, vllm: str) -> list[str]:
    """`vllm serve` with its environment in front."""
    setting = [f"{name}={value}" for name, value in built.environment.items()]
    return [*(["env", *setting] if setting else []), *shlex.split(vllm), "serve", *built.arguments]


def parser() -> argparse.ArgumentParser:
    """The options of serve.sh; everything after `--` goes to vLLM."""
    found = argparse.ArgumentParser(
        prog="serve.sh",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="profiles:\n"
        + "\n".join(f"  {name:11} {what}" for name, what in profiles.METHODS.items()),
    )
    found.add_argument("profile", choices=profiles.METHODS)
    found.add_argument("--target", help="folder, repository or repository@revision")
    found.add_argument("--draft", help="likewise; required where no draft is known for the target")
    found.add_argument("--weaver", help="Weaver checkpoint: file, folder or repository[:file][@revision]")
    found.add_argument("--budget", type=int, help="tree budget of dflash_tfm (default by GPU: 32 or 64)")
    found.add_argument("--tokens", type=int, help="draft tokens of mtp, dflash, dflash2, dspark")
    found.add_argument("--proposal", default="weaver", choices=("weaver", "ddtree", "chain"))
    found.add_argument("--capability", help="compute capability of the GPU (default: asked of nvidia-smi)")
    found.add_argument("--max-model-len", type=int)
    found.add_argument("--max-num-seqs", type=int, default=4)
    found.add_argument("--port", type=int, default=8000)
    found.add_argument("--served-model-name")
    found.add_argument("--docker", action="store_true", help="run the image in place of a bare vllm")
    found.add_argument("--image", default=IMAGE, help=f"with --docker (default {IMAGE})")
    found.add_argument(
        "--vllm", default="vllm", help="the vllm command (`python -m vllm_weaver.cpu` without a GPU)"
    )
    found.add_argument("--anyway", action="store_true", help="warn of known failures instead of refusing")
    found.add_argument(
        "--print", action="store_true", dest="only_print", help="show the command, run nothing"
    )
    return found


def weaver_source(text: str) -> profiles.Source:
    """A Weaver checkpoint's name: an existing path, or `repository[:file][@revision]`."""
    if Path(text).expanduser().exists():
        return profiles.Source(text)
    name, _, revision = text.partition("@")
    if name.partition(":")[0].count("/") != 1:
        raise ProfileError(f"--weaver {text!r} is neither a file or folder nor repository[:file][@revision]")
    return profiles.Source(name, revision or None)


def request_of(words: list[str]) -> tuple[argparse.Namespace, Request]:
    """The parsed options and what they ask for. Raises ProfileError on a value that cannot be."""
    at = words.index("--") if "--" in words else len(words)
    options = parser().parse_args(words[:at])
    for name in ("budget", "tokens", "max_model_len", "max_num_seqs"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ProfileError(f"--{name.replace('_', '-')} {value} must be at least 1")
    if options.budget is not None and (options.profile != "dflash_tfm" or options.budget > 256):
        raise ProfileError(f"--budget {options.budget} is for profile dflash_tfm, from 1 to 256")
    if options.tokens is not None and options.profile in ("ar", "long", "dflash_tfm"):
        raise ProfileError(f"--tokens is of no use to profile {options.profile!r}")
    return options, Request(
        profile=options.profile,
        capability=capability(options.capability) if options.capability else detected_capability(),
        target=profiles.source(options.target) if options.target else None,
        draft=profiles.source(options.draft) if options.draft else None,
        weaver=weaver_source(options.weaver) if options.weaver else None,
        budget=options.budget,
        tokens=options.tokens,
        proposal=options.proposal,
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        port=options.port,
        host="0.0.0.0" if options.docker else "127.0.0.1",
        served_name=options.served_model_name,
        extra=tuple(words[at + 1 :]),
    )


def main(words: list[str]) -> int:
    """Print or become the command; exit status 2 and one line where there is none."""
    try:
        options, request = request_of(words)
        warned: list[str] = []
        if options.anyway:
            built = profiles.command(request, lambda r, a: warned.extend(refusals.problems(r, a)))
        else:
            built = profiles.command(request, refusals.refuse)
    except ProfileError as error:
        print(f"serve: REFUSED: {error}", file=sys.stderr)
        return 2
    for note in [*(f"known to break: {text}" for text in warned), *built.notes]:
        print(f"serve: note: {note}", file=sys.stderr)
    line = docker(built, request, options.image) if options.docker else bare(built, options.vllm)
    if options.only_print:
        print(shlex.join(line))
        return 0
    print(f"serve: {shlex.join(line)}", file=sys.stderr, flush=True)
    program = shutil.which(line[0])
    if program is None:
        print(f"serve: REFUSED: there is no {line[0]} on PATH", file=sys.stderr)
        return 2
    os.execv(program, line)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
