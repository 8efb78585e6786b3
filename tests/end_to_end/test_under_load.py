"""A small pool under many clients: whatever they send, drop, send again or freeze, each gets its own answer.

All processes of a server with an engine whose answers are written down, so that every text is known beforehand.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from tests.end_to_end.serve_process import ServeProcess

pytestmark = pytest.mark.slow

CLIENTS = 64
ROUNDS = 4
TURNS = 100
WAIT = 120.0
SLOW = "one slow word after another, " * 40
STORY = "And then there was a story that went on for a while. " * 3
LARGE = "y" * 390


def answer_to(nonce: int) -> str:
    """What client ``nonce`` must get: its own number over and over, at its own length."""
    return f"<{nonce}>" * (10 + nonce % 23)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    """A pool of 42 blocks of 16 tokens, for 32 sequences at once: most of them preempt others."""
    script = tmp_path_factory.mktemp("script") / "script.jsonl"
    lines: list[dict[str, Any]] = [
        *({"match": {"prompt_contains": f"nonce-{at}-"}, "text": answer_to(at), "step_sizes": [at % 8 + 1, 2]}
          for at in range(CLIENTS)),
        {"match": {"prompt_contains": "slowly"}, "text": SLOW, "delay_ms": 10},
        {"match": {"prompt_contains": "story"}, "text": STORY, "step_sizes": [3]},
    ]  # fmt: skip
    script.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with ServeProcess(
        *("--launcher", "local", "--engine", "scripted", "--tokenizer", "byte", "--engine-script", str(script)),
        *("--kv-cache-memory", "15MiB", "--max-num-seqs", "32"),
    ) as server:
        yield server


@pytest.fixture
async def client(server: ServeProcess) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=2 * CLIENTS)
    async with httpx.AsyncClient(base_url=f"{server.url}/v1", timeout=WAIT, limits=limits) as made:
        yield made


class Streamed:
    """One streamed answer as far as it was read."""

    def __init__(self, client: httpx.AsyncClient, prompt: str, **fields: Any) -> None:
        body = {"model": "byte", "prompt": prompt, "max_tokens": 600, "stream": True, **fields}
        self._response = client.stream("POST", "/completions", json=body)
        self.text, self.finish, self.usage = "", None, None
        self.done = False

    async def read(self, least: int | None = None) -> Streamed:
        """To the end, or until there are so many characters; leaving early closes the connection."""
        async with self._response as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                self.done |= line == "data: [DONE]"
                if line.startswith("data: {"):
                    self._add(json.loads(line[6:]))
                if least is not None and len(self.text) >= least:
                    return self
        assert self.done
        return self

    def _add(self, event: dict[str, Any]) -> None:
        assert "error" not in event, event
        self.usage = event.get("usage") or self.usage
        for choice in event["choices"]:
            self.text += choice["text"]
            self.finish = choice["finish_reason"] or self.finish


async def complete(client: httpx.AsyncClient, prompt: str, **fields: Any) -> dict[str, Any]:
    body = {"model": "byte", "prompt": prompt, "max_tokens": 600, **fields}
    response = await client.post("/completions", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def test_no_answer_holds_anything_of_another(server: ServeProcess, client: httpx.AsyncClient) -> None:
    rng = random.Random(11)

    async def one(nonce: int) -> None:
        for at in range(ROUNDS):
            filler = "the same words for all " if nonce % 2 else f"{rng.random()} "
            prompt = filler * (nonce % 5) + f"nonce-{nonce}-"
            expected = answer_to(nonce)
            if rng.random() < 0.3:
                cut = await Streamed(client, prompt).read(least=rng.randrange(1, 20))
                assert expected.startswith(cut.text)
            elif at % 2:
                answer = await complete(client, prompt)
                assert answer["choices"][0]["text"] == expected
            else:
                streamed = await Streamed(client, prompt).read()
                assert (streamed.text, streamed.finish) == (expected, "stop")

    await asyncio.gather(*(one(nonce) for nonce in range(CLIENTS)))
    await asyncio.to_thread(server.wait_until_no_blocks_are_used)
    gauges = server.gauges()
    assert gauges.total("headrace_preemptions_total") > 0
    assert gauges.total("headrace_requests_running") == gauges.total("headrace_requests_waiting") == 0
    assert gauges.total("headrace_open_choices") == 0


async def test_a_conversation_goes_on_right_after_its_stream_was_dropped(
    server: ServeProcess, client: httpx.AsyncClient
) -> None:
    async def hold(first: int) -> None:
        for turn in range(first, TURNS, 4):
            prompt = f"{turn}: a story please"
            cut = await Streamed(client, prompt).read(least=turn % 30 + 1)
            prompt += cut.text + " Go on with the story."
            again = await Streamed(client, prompt, stream_options={"include_usage": True}).read()
            assert (again.text, again.finish) == (STORY, "stop")
            assert again.usage is not None and again.usage["prompt_tokens"] == len(prompt)
            assert again.usage["completion_tokens"] == len(STORY) + 1

    await asyncio.gather(*(hold(first) for first in range(4)))
    await asyncio.to_thread(server.wait_until_no_blocks_are_used)


async def test_small_requests_pass_a_large_one_that_waits_and_do_not_starve_it(
    server: ServeProcess, client: httpx.AsyncClient
) -> None:
    holder = asyncio.create_task(Streamed(client, LARGE + "slowly", max_tokens=200).read())
    await asyncio.to_thread(
        server.wait_for_gauges, lambda gauges: gauges.total("headrace_kv_blocks", state="used") > 24, "a holder"
    )
    large = asyncio.create_task(complete(client, "z" + LARGE, max_tokens=8))
    await asyncio.to_thread(
        server.wait_for_gauges, lambda gauges: gauges.total("headrace_requests_waiting") == 1, "the large one waiting"
    )
    for _ in range(8):
        await complete(client, "small", max_tokens=2)
    assert not large.done() and not holder.done()
    while not large.done():
        await complete(client, "small", max_tokens=2)
    assert (await large)["usage"]["completion_tokens"] == 8
    assert (await holder).text == SLOW[:200]


async def test_an_echo_scores_a_prompt_the_same_every_time(client: httpx.AsyncClient) -> None:
    prompt = "Score this prompt, whatever of it is kept from the last time. " * 4
    fields = {"echo": True, "logprobs": 1, "max_tokens": 1}
    first, *others = [(await complete(client, prompt, **fields))["choices"][0] for _ in range(3)]
    assert first["logprobs"]["token_logprobs"][0] is None
    assert len(first["logprobs"]["tokens"]) == len(prompt) + 1
    assert others == [first, first]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_dead_or_frozen_engine_costs_a_pause(
    server: ServeProcess, client: httpx.AsyncClient, how: signal.Signals
) -> None:
    """Others end these requests with an error; here they go on with the engine's successor."""
    ranks = server.pids("worker-rank")
    open_one = asyncio.create_task(Streamed(client, "slowly", max_tokens=150).read())
    await asyncio.to_thread(
        server.wait_for_gauges, lambda gauges: gauges.total("headrace_requests_running") == 1, "a stream running"
    )
    for pid in ranks:
        os.kill(pid, how)
    new_one = asyncio.create_task(complete(client, "nonce-7-"))
    async with asyncio.timeout(WAIT):
        assert (await open_one).text == SLOW[:150]
        assert (await new_one)["choices"][0]["text"] == answer_to(7)
    assert not set(ranks) & set(server.pids("worker-rank"))
    assert (await client.get("/models")).json()["data"][0]["status"] == "ready"
    await asyncio.to_thread(server.wait_until_no_blocks_are_used)
