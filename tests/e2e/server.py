# SPDX-License-Identifier: Apache-2.0
"""`python -m vllm_weaver.cpu` as a process of its own: start it, read what it says, ask it, stop it, count
what is left of it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 180.0  # a server is up after 15 s on two quiet cores
ANSWER_SECONDS = 120.0
STOP_SECONDS = 30.0


def environment(**changes: str) -> dict[str, str]:
    """A user's environment on a small machine: nothing that the tests of this process have set for vLLM."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("VLLM_", "TRITON_"))}
    small = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    return kept | small | changes


def until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Wait until `condition()` is true; AssertionError with `what` if it is not within `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.1)


class Command:
    """A Python command in a session of its own, from the root of this checkout, its output in two files."""

    def __init__(self, folder: Path, *arguments: str, **changes: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._files = (folder / "stdout", folder / "stderr")
        with self._files[0].open("w") as stdout, self._files[1].open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=ROOT,
                env=environment(**changes),
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )

    @property
    def stdout(self) -> str:
        return self._files[0].read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return self._files[1].read_text(errors="replace")

    @property
    def tail(self) -> str:
        """The end of both outputs, for messages of failed tests."""
        return f"--- stdout\n{self.stdout[-3000:]}\n--- stderr\n{self.stderr[-3000:]}"

    def living(self) -> list[psutil.Process]:
        """Processes of the session that still run, the command's own among them."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError, PermissionError):
                same = os.getsid(process.pid) == self.process.pid
                if same and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def wait(self, seconds: float) -> int:
        """Exit status; AssertionError if there is none within `seconds`."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds:.0f} s\n{self.tail}") from None

    def end(self) -> None:
        """Leave nothing running, whatever happened."""
        for process in self.living():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.wait()


class Server(Command):
    """`python -m vllm_weaver.cpu serve MODEL ...` on a free port."""

    def __init__(self, folder: Path, model: str | Path, *options: str, **changes: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        place = ("--host", "127.0.0.1", "--port", str(self.port))
        super().__init__(folder, "-m", "vllm_weaver.cpu", "serve", str(model), *place, *options, **changes)

    def get(self, path: str) -> str | None:
        """What `GET path` answers, or None if there is no answer or a status other than 200."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as answer:
                return answer.read().decode()
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return None

    def healthy(self) -> bool:
        """Whether the server says that its engine lives."""
        return self.get("/health") is not None

    def wait_ready(self) -> None:
        """Return once the server answers; AssertionError with its output if it ends or takes too long."""

        def ready() -> bool:
            assert self.process.poll() is None, f"the server ended\n{self.tail}"
            return self.healthy()

        until(ready, START_SECONDS, "a server that answers")

    @cached_property
    def client(self) -> Any:
        """An OpenAI client without retries."""
        import openai

        url = f"http://127.0.0.1:{self.port}/v1"
        return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=ANSWER_SECONDS)

    def metrics(self) -> dict[str, float]:
        """Each metric by name, summed over its labels."""
        from prometheus_client.parser import text_string_to_metric_families

        text = self.get("/metrics")
        assert text is not None, "no answer from /metrics"
        totals: dict[str, float] = defaultdict(float)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                totals[sample.name] += sample.value
        return totals

    def interrupt(self) -> None:
        """SIGINT to the server's process, as from a terminal or a supervisor."""
        self.process.send_signal(signal.SIGINT)


@contextlib.contextmanager
def running(*servers: Server) -> Iterator[None]:
    """Wait for servers that were started at the same time; nothing of them is left at the end."""
    try:
        for server in servers:
            server.wait_ready()
        yield
    finally:
        for server in servers:
            server.end()
