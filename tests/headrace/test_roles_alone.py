"""Each role runs alone, found by address: what several hosts would do, here on one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx
import pytest

from tests.end_to_end.serve_process import free_port, processes_mentioning

pytestmark = pytest.mark.slow

BYTE = ("--engine", "scripted", "--tokenizer", "byte", "--launcher", "local")


@contextmanager
def headrace(marker: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A role as a process; ended by SIGTERM, to which every role answers with status 0."""
    command = [sys.executable, "-m", "headrace", *arguments]
    with subprocess.Popen(command, env={**os.environ, "HEADRACE_TEST_MARKER": marker}) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            status = process.wait(60)
    assert status == 0, arguments


def answer(url: str, name: str, roles: list[subprocess.Popen[bytes]]) -> str:
    """A completion, as soon as the parts have found each other."""
    for _ in range(600):
        assert all(role.poll() is None for role in roles)
        try:
            reply = httpx.post(f"{url}/v1/completions", json={"model": name, "prompt": "x"}, timeout=60)
            if reply.status_code == 200:
                return str(reply.json()["choices"][0]["text"])
        except httpx.TransportError:
            pass
        threading.Event().wait(0.05)
    raise AssertionError("no answer")


def test_roles_find_each_other_by_address_in_any_order() -> None:
    frontends, workers, http = (f"tcp://127.0.0.1:{free_port()}" for _ in range(3))
    port = http.rpartition(":")[2]
    marker = f"headrace-roles-{port}-{os.getpid()}"
    name = ("--served-model-name", "alone")
    commands = (
        ("frontend", "--tokenizer", "byte", *name, "--scheduler", frontends, "--port", port),
        ("workers", *BYTE, *name, "--scheduler", workers),
        ("scheduler", "--frontend-bind", frontends, "--worker-bind", workers),
    )
    with ExitStack() as stack:
        roles = [stack.enter_context(headrace(marker, *command)) for command in commands]
        assert answer(f"http://127.0.0.1:{port}", "alone", roles) == "This is a script"  # 16 tokens
    assert not processes_mentioning(marker)


@pytest.mark.parametrize(
    "arguments",
    [
        ("scheduler", "--frontend-bind", "tcp://0.0.0.0:5570"),
        ("frontend", "--tokenizer", "byte", "--scheduler", "tcp://10.0.0.1:5570"),
        ("workers", *BYTE, "--scheduler", "tcp://10.0.0.1:5571"),
    ],
)
def test_an_open_socket_without_encryption_must_be_asked_for(arguments: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "headrace", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert "--insecure-sockets" in done.stderr and done.stderr.count("\n") == 1, done.stderr
