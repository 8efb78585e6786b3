"""The same over Ray: two frontends, one scheduler, two groups of real actors. Never skipped."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

import httpx
import pytest

from tests.end_to_end.serve_process import ServeProcess, processes_mentioning

pytestmark = pytest.mark.slow

PARIS = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}


@pytest.fixture(scope="module")
def server() -> Iterator[ServeProcess]:
    with ServeProcess("--frontends", "2", "--groups", "2", "--kv-cache-memory", "128MiB") as server:
        server.wait_for_gauges(both_groups, "two groups")
        yield server


def both_groups(gauges) -> bool:
    groups = {
        name.partition('group="')[2].partition('"')[0] for name in gauges if name.startswith("headrace_kv_blocks{")
    }
    return len(groups) == 2


def test_two_ray_groups_share_a_mixed_load(server: ServeProcess) -> None:
    client = server.client()
    model = client.models.list().data[0].id
    threads, answers = [], []

    def ask(stream: bool, salt: str) -> None:
        # Without a prefix in common nothing draws them to one group.
        options = {"model": model, "max_tokens": 24, "extra_body": {"cache_salt": salt}, **PARIS}
        if stream:
            chunks = client.chat.completions.create(stream=True, **options)
            answers.append("".join(chunk.choices[0].delta.content or "" for chunk in chunks))
        else:
            whole = client.chat.completions.create(**options)
            answers.append(whole.choices[0].message.content)

    for index in range(12):
        threads.append(threading.Thread(target=ask, args=(index % 2 == 0, f"salt {index}")))
        threads[-1].start()
    for thread in threads:
        thread.join(120)
    assert len(answers) == 12 and all("Paris" in answer for answer in answers)
    gauges = server.gauges()
    for group in ("0", "1"):
        assert any(
            value > 0 and name.startswith("headrace_generation_tokens_total") and f'{group}"' in name
            for name, value in gauges.items()
        ), f"group {group} generated nothing: {gauges}"
    server.wait_until_no_blocks_are_used()


class Follower:
    """One stream, followed to its end or its break on a thread of its own."""

    def __init__(self, server: ServeProcess, model: str) -> None:
        self.frontend = ""
        self.ended = False
        self.started = threading.Event()
        self._url = f"{server.url}/v1/chat/completions"
        self._body = {**PARIS, "model": model, "stream": True, "ignore_eos": True, "max_tokens": 120}
        self.thread = threading.Thread(target=self._follow)
        self.thread.start()
        assert self.started.wait(60)

    def _follow(self) -> None:
        with (
            contextlib.suppress(httpx.HTTPError),
            httpx.Client(timeout=120) as client,
            client.stream("POST", self._url, json=self._body) as response,
        ):
            self.frontend = response.headers["x-headrace-frontend"]
            lines = response.iter_lines()
            next(lines)
            self.started.set()
            self.ended = any(line == "data: [DONE]" for line in lines)


def test_killing_one_frontend_leaves_the_others_streams_untouched(server: ServeProcess) -> None:
    model = server.client().models.list().data[0].id
    streams = [Follower(server, model) for _ in range(2)]
    while len({stream.frontend for stream in streams}) < 2:
        assert len(streams) < 32, "every connection went to one frontend"
        streams.append(Follower(server, model))
    os.kill(server.pids(r"headrace frontend")[0], signal.SIGKILL)
    for stream in streams:
        stream.thread.join(120)
    ends = {
        name: {stream.ended for stream in streams if stream.frontend == name}
        for name in {stream.frontend for stream in streams}
    }
    assert sorted(ends.values(), key=max) == [{False}, {True}], ends
    server.wait_until_no_blocks_are_used()


def test_sigterm_leaves_no_process_no_shared_memory_and_no_ray_daemon(server: ServeProcess) -> None:
    """Last in this module: it ends the server."""
    assert server.pids(r"raylet|gcs_server"), "Ray's daemons carry the marker of this server"
    assert server.stop(signal.SIGTERM) == 0
    assert not processes_mentioning(server.marker)
    assert not server.shared_memory_left()
