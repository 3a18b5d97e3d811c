# SPDX-License-Identifier: Apache-2.0
"""A server that is started for a measurement and stopped after it, with everything it started."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from .client import Server

STOP_SECONDS = 60.0


class StartError(Exception):
    """Why a server did not come up; the message is one sentence for the user."""


def free_port() -> int:
    """A TCP port of this machine that nothing listens at now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def fill(template: str, **values: int) -> list[str]:
    """The words of a command with `{name}` replaced. Raises StartError if a name is missing from it."""
    for name in values:
        if "{" + name + "}" not in template:
            raise StartError(f"the command {template!r} has no {{{name}}} to be replaced")
        template = template.replace("{" + name + "}", str(values[name]))
    return shlex.split(template)


def _say(text: str) -> None:
    print(f"server: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def running(command: list[str], port: int, log: Path, start_seconds: float) -> Iterator[Server]:
    """Start `command`, wait until it answers /health, stop it at the end, whatever happened.

    Its output goes to `log`. Raises StartError if it ends or does not answer in time.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        try:
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        except OSError as error:
            raise StartError(f"{command[0]} cannot be started: {error.strerror}") from None
    try:
        server = Server(f"http://127.0.0.1:{port}")
        _wait(process, server, log, start_seconds)
        yield server
    finally:
        stop(process)


def _wait(process: subprocess.Popen[bytes], server: Server, log: Path, seconds: float) -> None:
    start = said = time.monotonic()
    while not server.healthy():
        now = time.monotonic()
        if process.poll() is not None:
            last = (log.read_text(errors="replace").strip() or "no output").splitlines()[-1]
            raise StartError(
                f"the server ended with status {process.returncode}: {last[:200]} (all of it: {log})"
            )
        if now - start > seconds:
            raise StartError(f"the server was not ready within {seconds:.0f} s; its output is in {log}")
        if now - said > 15:
            said = now
            _say(f"starting, {now - start:.0f} s")
        time.sleep(0.2)
    _say(f"ready after {time.monotonic() - start:.0f} s")


def stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM (a background job ignores SIGINT) and, after STOP_SECONDS, SIGKILL to the session that the
    process leads; waits for it."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # an engine process that outlived its server
    process.wait()
