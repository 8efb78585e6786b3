"""Ten times the load a server can take: it does as much as at saturation, quickly, and refuses the rest in words.

The measured part runs in the long run only; tests/scheduler/test_admission.py has the short form, in counts.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from tests.end_to_end.serve_process import ServeProcess, processes_mentioning

logger = logging.getLogger(__name__)

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

GROUPS, SLOTS, QUEUE = 2, 8, 16
STEP_MS, FEWEST, MOST = 100, 16, 48
SATURATION_SECONDS, OVERLOAD_SECONDS, WARM_UP_SECONDS = 25.0, 40.0, 10.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    """Two groups of eight slots whose steps take 100 ms: about 4.7 requests of 32 tokens on average a second."""
    script = tmp_path_factory.mktemp("script") / "script.jsonl"
    script.write_text(json.dumps({"match": {}, "text": "x" * 1000, "delay_ms": STEP_MS}) + "\n")
    with ServeProcess(
        *("--launcher", "local", "--engine", "scripted", "--tokenizer", "byte", "--engine-script", str(script)),
        *("--groups", str(GROUPS), "--frontends", "2", "--max-num-seqs", str(SLOTS)),
        *("--max-queue-requests", str(QUEUE)),
    ) as server:
        server.wait_for_groups(GROUPS)
        yield server


@dataclass
class Tally:
    """What clients saw."""

    finished: list[tuple[float, float]] = field(default_factory=list)
    """(when it ended, how long it took)"""
    refused: list[int] = field(default_factory=list)
    """Retry-After of each 429."""
    refusal_seconds: list[float] = field(default_factory=list)
    other: list[int] = field(default_factory=list)

    def rate(self, since: float, until: float) -> float:
        """Answers a second."""
        return sum(since <= ended < until for ended, _ in self.finished) / (until - since)


async def ask(client: httpx.AsyncClient, tally: Tally, nth: int) -> None:
    began = time.monotonic()
    tokens = FEWEST + 13 * nth % (MOST - FEWEST + 1)  # all of one length would come and go in waves
    body = {"model": "byte", "prompt": f"request {nth}", "max_tokens": tokens}
    response = await client.post("/completions", json=body)
    ended = time.monotonic()
    if response.status_code == 200:
        assert response.json()["usage"]["completion_tokens"] == tokens
        tally.finished.append((ended, ended - began))
    elif response.status_code == 429:
        assert response.json()["error"]["code"] == "overloaded"
        tally.refused.append(int(response.headers["retry-after"]))
        tally.refusal_seconds.append(ended - began)
    else:
        tally.other.append(response.status_code)


async def closed_loop(client: httpx.AsyncClient, clients: int, seconds: float) -> float:
    """Answers a second with so many clients that each ask again at once."""
    tally, ends, numbers = Tally(), time.monotonic() + seconds, itertools.count()

    async def one() -> None:
        while time.monotonic() < ends:
            await ask(client, tally, next(numbers))

    await asyncio.gather(*(one() for _ in range(clients)))
    return tally.rate(ends - seconds * 0.8, ends)


async def open_loop(client: httpx.AsyncClient, rate: float, seconds: float) -> tuple[Tally, float, float]:
    """So many requests a second, whatever becomes of them; when it began, and the rate that was reached."""
    tally, began = Tally(), time.monotonic()
    tasks: set[asyncio.Task[None]] = set()
    nth = 0
    while time.monotonic() < began + seconds:
        await asyncio.sleep(max(0.0, began + nth / rate - time.monotonic()))
        task = asyncio.create_task(ask(client, tally, nth))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        nth += 1
    await asyncio.gather(*tasks)
    return tally, began, nth / seconds


def resident(server: ServeProcess) -> dict[str, int]:
    """Bytes of each process of the server, by what it is and its pid."""
    sizes = {}
    for pid, command in processes_mentioning(server.marker).items():
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        sizes[f"{pid} {command[-60:]}"] = pages * os.sysconf("SC_PAGE_SIZE")
    return sizes


async def test_at_ten_times_the_load_goodput_stays_and_the_rest_is_refused_in_time(server: ServeProcess) -> None:
    limits = httpx.Limits(max_connections=512, max_keepalive_connections=512)
    async with httpx.AsyncClient(base_url=f"{server.url}/v1", timeout=60, limits=limits) as client:
        await closed_loop(client, 2 * GROUPS * SLOTS, 4.0)
        saturation = await closed_loop(client, 2 * GROUPS * SLOTS, SATURATION_SECONDS)
        measuring = asyncio.create_task(open_loop(client, 10 * saturation, OVERLOAD_SECONDS))
        await asyncio.sleep(WARM_UP_SECONDS)
        before = resident(server)
        tally, began, offered = await measuring
        after = resident(server)
    goodput = tally.rate(began + WARM_UP_SECONDS, began + OVERLOAD_SECONDS)
    times = sorted(took for _, took in tally.finished)
    p50, p99 = times[len(times) // 2], times[int(len(times) * 0.99)]
    service = (MOST + 2) * STEP_MS / 1000
    bound = 1.5 * (QUEUE / saturation + service) + 1.0
    growth = {name: after[name] - size for name, size in before.items() if name in after}
    refusals = sorted(tally.refusal_seconds)
    logger.warning(
        "saturation %.1f/s, offered %.0f/s, goodput %.1f/s; admitted p50 %.2f s, p99 %.2f s, bound %.2f s; %d refused, "
        "p50 %.0f ms, Retry-After %d to %d s; largest growth of a process %.1f MiB, largest process %.0f MiB",
        *(saturation, offered, goodput, p50, p99, bound, len(tally.refused)),
        *(1000 * refusals[len(refusals) // 2], min(tally.refused), max(tally.refused)),
        *(max(growth.values()) / 2**20, max(before.values()) / 2**20),
    )
    assert not tally.other
    assert offered >= 7 * saturation, "the clients of this test were too slow"
    assert goodput >= 0.9 * saturation
    assert p99 <= bound
    assert len(tally.refused) >= 0.8 * (len(tally.refused) + len(tally.finished))
    assert all(1 <= seconds <= 60 for seconds in tally.refused)
    assert max(growth.values()) <= 16 * 2**20, growth
    gauges = server.gauges()
    assert gauges.total("headrace_requests_waiting") <= QUEUE
    server.wait_until_no_blocks_are_used()
