"""What goes wrong is said in one line with a non-zero status, and nothing is left behind."""

from __future__ import annotations

import signal
import socket

import pytest

from tests.end_to_end.serve_process import ServeProcess

pytestmark = pytest.mark.slow


def fails(*arguments: str, port: int | None = None) -> str:
    """Run a serve that must fail by itself; returns its output."""
    server = ServeProcess(*arguments, port=port)
    server.start()
    status = server.wait(60)
    server.stop()
    assert status != 0, server.output
    assert "Traceback" not in server.output, server.output
    return server.output


def test_a_busy_port_is_named() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        output = fails("--launcher", "local", port=port)
    assert str(port) in output and "in use" in output


@pytest.mark.parametrize("launcher", ["local", "ray"])
def test_a_missing_model_is_named(launcher: str) -> None:
    output = fails("/no/such/model.gguf", "--launcher", launcher)
    assert "/no/such/model.gguf" in output


@pytest.mark.parametrize("launcher", ["local", "ray"])
def test_a_model_that_does_not_fit_says_by_how_much(launcher: str) -> None:
    output = fails("--launcher", launcher, "--kv-cache-memory", "900GiB")
    assert "GiB" in output


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_leave_nothing_behind(how: signal.Signals) -> None:
    with ServeProcess("--launcher", "local", "--engine", "scripted", "--tokenizer", "byte") as server:
        server.stop(how)
        assert not server.shared_memory_left()
