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

    def ask(stream: bool) -> None:
        if stream:
            chunks = client.chat.completions.create(model=model, stream=True, max_tokens=24, **PARIS)
            answers.append("".join(chunk.choices[0].delta.content or "" for chunk in chunks))
        else:
            whole = client.chat.completions.create(model=model, max_tokens=24, **PARIS)
            answers.append(whole.choices[0].message.content)

    for index in range(12):
        threads.append(threading.Thread(target=ask, args=(index % 2 == 0,)))
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


def test_killing_one_frontend_leaves_the_others_streams_untouched(server: ServeProcess) -> None:
    body = {**PARIS, "model": server.client().models.list().data[0].id, "stream": True, "ignore_eos": True}
    body["max_tokens"] = 400
    outcomes: dict[str, list[bool]] = {}
    started = threading.Barrier(9)
    lock = threading.Lock()

    def follow() -> None:
        """Open a stream, note its frontend, and follow it to its end or its break."""
        ended = False
        instance = ""
        with (
            contextlib.suppress(httpx.HTTPError),
            httpx.Client(timeout=120) as client,
            client.stream("POST", f"{server.url}/v1/chat/completions", json=body) as response,
        ):
            instance = response.headers["x-headrace-frontend"]
            lines = response.iter_lines()
            next(lines)
            started.wait(60)
            ended = any(line == "data: [DONE]" for line in lines)
        with lock:
            outcomes.setdefault(instance, []).append(ended)

    threads = [threading.Thread(target=follow) for _ in range(8)]
    for thread in threads:
        thread.start()
    started.wait(60)
    victim = server.pids(r"headrace frontend")[0]
    os.kill(victim, signal.SIGKILL)
    for thread in threads:
        thread.join(120)
    assert sum(len(ends) for ends in outcomes.values()) == 8
    for ends in outcomes.values():
        assert all(ends) or not any(ends), f"a frontend's streams ended differently: {outcomes}"
    assert sum(all(ends) for ends in outcomes.values()) >= 1, outcomes
    server.wait_until_no_blocks_are_used()


def test_sigterm_leaves_no_process_no_shared_memory_and_no_ray_daemon(server: ServeProcess) -> None:
    """Last in this module: it ends the server."""
    assert server.pids(r"raylet|gcs_server"), "Ray's daemons carry the marker of this server"
    assert server.stop(signal.SIGTERM) == 0
    assert not processes_mentioning(server.marker)
    assert not server.shared_memory_left()
