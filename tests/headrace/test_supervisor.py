"""A real server of real processes: what dies is started again, and at the end nothing is left."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.end_to_end.serve_process import ServeProcess

pytestmark = pytest.mark.slow

FOREVER = "never ending " * 500
BYTE = ("--launcher", "local", "--engine", "scripted", "--tokenizer", "byte")


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers quickly, or slowly for a long time when the prompt says so."""
    path = tmp_path_factory.mktemp("script") / "script.jsonl"
    lines = [
        {"match": {"prompt_contains": "slowly"}, "text": FOREVER, "delay_ms": 5},
        {"match": {}, "text": "quick"},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def server(script: Path) -> Iterator[ServeProcess]:
    """Two frontends and two groups."""
    with ServeProcess(*BYTE, "--engine-script", str(script), "--frontends", "2", "--groups", "2") as server:
        yield server


class Stream:
    """One streamed answer on a connection of its own."""

    def __init__(self, server: ServeProcess, prompt: str) -> None:
        self._client = httpx.Client(timeout=60)
        body = {"model": "byte", "prompt": prompt, "stream": True, "max_tokens": 4000}
        request = self._client.build_request("POST", f"{server.url}/v1/completions", json=body)
        self._response = self._client.send(request, stream=True)
        assert self._response.status_code == 200, self._response.read()
        self.frontend = self._response.headers["x-headrace-frontend"]
        self._lines = self._response.iter_lines()

    def next_text(self) -> str:
        """Text of the next event that has some; "" at the end."""
        for line in self._lines:
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                if text := event["choices"][0]["text"]:
                    return str(text)
        return ""

    def close(self) -> None:
        self._client.close()


def ask(server: ServeProcess) -> str:
    """One quick answer, whatever is being restarted: a connection that died with its frontend is tried again."""
    for _ in range(100):
        try:
            reply = httpx.post(f"{server.url}/v1/completions", json={"model": "byte", "prompt": "x"}, timeout=60)
        except httpx.TransportError:
            continue
        if reply.status_code == 200:
            return str(reply.json()["choices"][0]["text"])
    raise AssertionError(server.output)


def wait_for_pids(server: ServeProcess, pattern: str, count: int, gone: set[int]) -> None:
    """Wait until there are this many processes of a kind, and none of those that are to be gone."""
    for _ in range(3000):
        pids = set(server.pids(pattern))
        if len(pids) == count and not pids & gone:
            return
        threading.Event().wait(0.01)
    raise AssertionError(server.output)


def test_killing_one_frontend_leaves_the_others_streams_untouched(server: ServeProcess) -> None:
    streams: dict[str, Stream] = {}
    while len(streams) < 2:
        stream = Stream(server, "slowly")
        if stream.frontend in streams:
            stream.close()
        else:
            streams[stream.frontend] = stream
    victim, witness = sorted(streams)
    assert all(stream.next_text() for stream in streams.values())
    before = set(server.pids("headrace frontend"))
    [pid] = [pid for pid in before if f'"name":"{victim}"' in Path(f"/proc/{pid}/environ").read_text()]
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(httpx.TransportError):
        while streams[victim].next_text():
            pass
    text = "".join(streams[witness].next_text() for _ in range(200))
    assert text in FOREVER
    wait_for_pids(server, "headrace frontend", 2, gone={pid})
    for stream in streams.values():
        stream.close()


def test_a_killed_scheduler_is_started_again_and_open_streams_go_on(server: ServeProcess) -> None:
    stream = Stream(server, "slowly")
    text = stream.next_text()
    old = set(server.pids("headrace scheduler"))
    for pid in old:
        os.kill(pid, signal.SIGKILL)
    wait_for_pids(server, "headrace scheduler", 1, gone=old)
    for _ in range(100):
        text += stream.next_text()
    assert FOREVER.startswith(text)
    stream.close()


def test_a_killed_launcher_is_started_again_and_serving_never_stops(server: ServeProcess) -> None:
    ranks = set(server.pids("worker-rank"))
    old = set(server.pids("headrace workers"))
    for pid in old:
        os.kill(pid, signal.SIGKILL)
    assert ask(server) == "quick"
    wait_for_pids(server, "headrace workers", 1, gone=old)
    assert ask(server) == "quick"
    assert set(server.pids("worker-rank")) == ranks


def test_a_killed_rank_is_started_again(server: ServeProcess) -> None:
    ranks = set(server.pids("worker-rank"))
    os.kill(min(ranks), signal.SIGKILL)
    assert ask(server) == "quick"
    wait_for_pids(server, "worker-rank", 2, gone={min(ranks)})
    # By the launcher that took the ranks of a killed one over: the other rank is still the first launcher's.
    assert max(ranks) in server.pids("worker-rank")


def test_a_killed_supervisor_takes_everything_with_it(script: Path) -> None:
    with ServeProcess(*BYTE, "--engine-script", str(script)) as server:
        assert server.process is not None
        server.process.kill()
        server.process.wait()
        wait_for_pids(server, "", 0, gone=set())
        assert not server.shared_memory_left()


def test_a_lost_ray_head_is_replaced_and_a_killed_supervisor_takes_ray_with_it(script: Path) -> None:
    with ServeProcess(*BYTE, "--launcher", "ray", "--engine-script", str(script)) as server:
        assert ask(server) == "quick"
        lost = set(server.pids("headrace ray-head|raylet|RankActor|gcs_server"))
        assert len(lost) == 4
        [guard] = server.pids("headrace ray-head")
        os.kill(guard, signal.SIGKILL)
        assert ask(server) == "quick"
        wait_for_pids(server, "headrace ray-head|raylet|RankActor|gcs_server", 4, gone=lost)
        assert server.process is not None
        server.process.kill()
        server.process.wait()
        wait_for_pids(server, "", 0, gone=set())
        assert not server.shared_memory_left()


def test_a_stream_finishes_after_the_first_signal_and_a_second_one_ends_it(script: Path) -> None:
    with ServeProcess(*BYTE, "--engine-script", str(script)) as server:
        assert server.process is not None
        stream = Stream(server, "slowly")
        assert stream.next_text()
        server.process.send_signal(signal.SIGINT)
        server.wait_for_line("once more", 30)
        assert "".join(stream.next_text() for _ in range(50)) in FOREVER
        server.process.send_signal(signal.SIGINT)
        assert server.stop() == 0


def test_a_signal_while_starting_ends_everything() -> None:
    server = ServeProcess(*BYTE)
    server.start()
    server.wait_for_line("starting", 30)
    assert server.stop(signal.SIGTERM) == 0
    assert not server.shared_memory_left()


def test_a_script_that_cannot_be_used_is_one_line_and_no_endless_restart(tmp_path: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{\n")
    server = ServeProcess(*BYTE, "--engine-script", str(broken))
    server.start()
    assert server.wait() == 1
    server.stop()
    assert str(broken) in server.lines[-1]
    assert "Traceback" not in server.output


def test_a_server_whose_output_nobody_reads_serves_on_and_ends_when_told(script: Path) -> None:
    with ServeProcess(*BYTE, "--engine-script", str(script)) as server:
        server.stop_reading()
        os.kill(server.pids("headrace scheduler")[0], signal.SIGKILL)  # something to say
        assert ask(server) == "quick"
        assert server.stop() == 0
