# SPDX-License-Identifier: Apache-2.0
"""A process that has imported the `vllm` command line and forks for every command: what a start does without
the seconds that importing takes. As a script it is that process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Outcome:
    """Exit status and outputs of a command."""

    status: int
    stdout: str
    stderr: str


class WarmCommandLine:
    """Runs commands of `python -m vllm_weaver.cpu` one after another, each in a forked process."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.forks"],
            cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip

    def run(self, folder: Path, *words: str) -> Outcome:
        """The command `vllm words...`; its outputs go through files in `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        files = [str(folder / "stdout"), str(folder / "stderr")]
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({"words": words, "files": files}) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise AssertionError(f"the process that forks ended with status {self.process.wait()}")
        return Outcome(int(answer), *(Path(file).read_text(errors="replace") for file in files))

    def close(self) -> None:
        """No more commands."""
        self.process.kill()
        self.process.wait()


def _serve() -> list[str] | None:
    """Forks for every line of standard input; returns the command's words in a forked process, else None."""
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            for number, file in enumerate(job["files"], start=1):
                os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            answers.close()
            words: list[str] = job["words"]
            return words
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        answers.write(f"{status}\n")
        answers.flush()
    return None


def main() -> int:
    """See the module's docstring."""
    from vllm_weaver import cpu

    cpu.prepare()
    import vllm.entrypoints.cli.main
    import vllm.entrypoints.cli.preload
    import vllm.entrypoints.cli.serve
    import vllm.entrypoints.openai.api_server
    import vllm.v1.engine.async_llm  # noqa: F401  (as all of these: for the import alone)

    words = _serve()
    if words is None:
        return 0
    sys.argv = ["vllm", *words]
    return cpu.main()


if __name__ == "__main__":
    raise SystemExit(main())
