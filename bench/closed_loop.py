"""A lean closed-loop client of any OpenAI-compatible server, and what a run of it measured. Standard library only.

Lines are stamped as they arrive and parsed after the run, so that the client stays cheap beside the server.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

WORDS = """
    time year people way day man thing woman life child world school state family student group country problem hand
    part place case week company system program question work government number night point home water room mother
    area money story fact month lot right study book eye job word business issue side kind head house service friend
    father power hour game line end member law car city community name
""".split()  # noqa: SIM905


@dataclass(frozen=True)
class Load:
    """What clients ask: prompts of about so many tokens (a word is one), each answered in full length."""

    name: str
    clients: int
    requests: int
    words: int
    output: int
    shared_words: int = 0
    """The first words of every prompt are the same."""


@dataclass(frozen=True)
class Measured:
    """One run. Times in milliseconds."""

    output_per_second: float
    input_per_second: float
    ttft_p50: float
    ttft_p99: float
    tpot_p50: float
    """Between tokens of one answer, on average over the answer."""
    failed: int
    client_cpu: float
    """Share of a core."""
    wall: float


@dataclass
class _Record:
    began: float
    status: int = 0
    lines: list[tuple[float, bytes]] = field(default_factory=list)


def run(host: str, port: int, model: str, load: Load, seed: int) -> Measured:
    """Send the load; one request a client at a time."""
    began, cpu = time.perf_counter(), time.process_time()
    records = asyncio.run(_clients(host, port, model, load, seed))
    wall, used = time.perf_counter() - began, time.process_time() - cpu
    return _measured(records, wall, used)


async def _clients(host: str, port: int, model: str, load: Load, seed: int) -> list[_Record]:
    rng, shared = random.Random(seed), _words(random.Random(1), load.shared_words)
    prompts = [f"{shared} [{rng.random()}] {_words(rng, load.words)}" for _ in range(load.requests)]
    waiting = iter(prompts)
    records: list[_Record] = []

    async def client() -> None:
        for prompt in waiting:
            body = {
                "model": model,
                "messages": [{"role": "user", "content": prompt}],
                "max_tokens": load.output,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            records.append(await _ask(host, port, body))

    await asyncio.gather(*(client() for _ in range(load.clients)))
    return records


async def _ask(host: str, port: int, body: dict[str, Any]) -> _Record:
    record = _Record(time.perf_counter())
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 20)
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    )
    writer.write(head.encode() + data)
    record.status = int((await reader.readline()).split()[1])
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            record.lines.append((time.perf_counter(), line))
    writer.close()
    return record


def _measured(records: list[_Record], wall: float, cpu: float) -> Measured:
    first_tokens, between, inputs, outputs, failed = [], [], 0, 0, 0
    for record in records:
        usage: dict[str, int] = {}
        stamps = []
        for stamp, line in record.lines:
            chunk = json.loads(line[6:])
            usage = chunk.get("usage") or usage
            if chunk.get("choices") and chunk["choices"][0]["delta"].get("content"):
                stamps.append(stamp)
        if record.status != 200 or not stamps or not usage:
            failed += 1
            continue
        inputs, outputs = inputs + usage["prompt_tokens"], outputs + usage["completion_tokens"]
        first_tokens.append(stamps[0] - record.began)
        if usage["completion_tokens"] > 1:
            between.append((stamps[-1] - stamps[0]) / (usage["completion_tokens"] - 1))
    return Measured(
        output_per_second=outputs / wall,
        input_per_second=inputs / wall,
        ttft_p50=1e3 * statistics.median(first_tokens or [0]),
        ttft_p99=1e3 * sorted(first_tokens or [0])[int(0.99 * len(first_tokens))] if first_tokens else 0,
        tpot_p50=1e3 * statistics.median(between or [0]),
        failed=failed,
        client_cpu=cpu / wall,
        wall=wall,
    )


def _words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(count))
