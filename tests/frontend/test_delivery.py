"""When a stream commits, what keeps it alive, how it ends, and what its options change."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import openai
import pytest

from protocol.frontend import RejectCode, Submit
from protocol.ids import hash64
from tests.frontend.fake_scheduler import Script
from tests.frontend.folding import folded_answer, lint, streamed, whole
from tests.frontend.harness import CHAT, COMPLETIONS, Bench, bench, chat, completion, live_bench, parse_events

ROUTES = [(CHAT, chat()), (COMPLETIONS, completion(max_tokens=50))]


async def read_until(pieces: Any, received: bytes, what: bytes) -> bytes:
    while what not in received:
        received += await anext(pieces)
    return received


async def rest(pieces: Any) -> bytes:
    return b"".join([piece async for piece in pieces])


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_a_silent_stream_commits_and_pings(tmp_path, artefacts, path: str, body: dict[str, Any]) -> None:
    async with live_bench(tmp_path, artefacts, early_commit=0.0, ping_interval=0.01) as live:
        live.scheduler.script = lambda submit: Script.text("abc", gate=0)
        async with live.client.stream("POST", path, json={**body, "stream": True, "n": 2}) as response:
            assert response.status_code == 200
            pieces = response.aiter_raw()
            received = await read_until(pieces, b"", b": ping\n\n: ping\n\n")
            assert received.count(b'"role":"assistant"') == (2 if path == CHAT else 0)
            live.scheduler.open_gates()
            received += await rest(pieces)
        answer = folded_answer(path, received, usage=False)
        assert [answer[at]["text"] for at in (0, 1)] == ["abc", "abc"]


@pytest.mark.parametrize(
    "fields", [{}, {"echo": True, "logprobs": 1}, {"prompt_logprobs": 1, "return_token_ids": True}]
)
async def test_a_queued_stream_commits_and_pings_too(tmp_path, artefacts, fields: dict[str, Any]) -> None:
    """Nothing is known of it yet, not even the logprobs of its prompt; a new session brings it all."""
    async with live_bench(tmp_path, artefacts, early_commit=0.0, ping_interval=0.01) as live:
        live.scheduler.script = lambda submit: Script(admit=False)
        body = completion("say", max_tokens=50, stream=True, **fields)
        async with live.client.stream("POST", COMPLETIONS, json=body) as response:
            assert response.status_code == 200
            pieces = response.aiter_raw()
            received = await read_until(pieces, b"", b": ping\n\n: ping\n\n: ping\n\n")
            live.scheduler.script = lambda submit: Script.text("abc")
            live.scheduler.restart()
            received += await rest(pieces)
        assert folded_answer(COMPLETIONS, received, usage=False)[0]["text"] == ("sayabc" if "echo" in fields else "abc")


async def test_the_official_client_hears_no_pings(tmp_path, artefacts) -> None:
    async with live_bench(tmp_path, artefacts, early_commit=0.0, ping_interval=0.005) as live:
        live.scheduler.script = lambda submit: Script.text("abc", gate=1)
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{live.port}/v1", api_key="x", max_retries=0)
        async with client.chat.completions.stream(
            model="llama-8b", messages=[{"role": "user", "content": "x"}]
        ) as helper:
            seen = 0
            async for event in helper:
                seen += event.type == "content.delta"
                if seen == 1:
                    await asyncio.sleep(0.05)  # pings meanwhile
                    live.scheduler.open_gates()
            final = await helper.get_final_completion()
        assert final.choices[0].message.content == "abc" and final.choices[0].finish_reason == "stop"


async def test_silence_between_tokens_is_filled_too(tmp_path, artefacts) -> None:
    async with live_bench(tmp_path, artefacts, ping_interval=0.01) as live:
        live.scheduler.script = lambda submit: Script.text("abc", gate=1)
        async with live.client.stream("POST", CHAT, json=chat(stream=True)) as response:
            pieces = response.aiter_raw()
            received = await read_until(pieces, b"", b": ping\n\n")
            live.scheduler.open_gates()
            received += await rest(pieces)
        assert folded_answer(CHAT, received, usage=False)[0]["text"] == "abc"


async def test_an_error_after_an_early_commit_is_an_event(tmp_path, artefacts) -> None:
    async with bench(tmp_path, artefacts, early_commit=0.0) as here:
        here.scheduler.script = lambda submit: Script(reject=RejectCode.OVERLOADED)
        response = await here.post(CHAT, chat(stream=True))
        events = parse_events(response.content)
        assert response.status_code == 200 and events[-1] == "[DONE]"
        assert events[-2]["error"]["code"] == "overloaded" and events[-2]["error"]["type"] == "rate_limit_error"
        whole_one = await here.post(CHAT, chat())
        assert whole_one.status_code == 429


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_a_finish_can_always_have_a_chunk_of_its_own(tmp_path, artefacts, path, body) -> None:
    async with bench(tmp_path, artefacts, separate_finish_chunk=True) as here:
        here.scheduler.script = lambda submit: Script.text("abcd", steps=(8,))
        for more in ({}, {"logprobs": True if path == CHAT else 0, "return_token_ids": True}):
            response = await here.post(path, {**body, **more, "stream": True, "max_tokens": 4})
            chunks = lint(path, response.content, usage=False)
            last = chunks[-1]["choices"][0]
            assert last["finish_reason"] == "length" and last["logprobs"] is None
            assert (last["delta"] == {}) if path == CHAT else (last["text"] == "")
            assert (await streamed(here, path, {**body, **more}))[0]["text"] == "abcd"


async def test_usage_can_be_forced_and_can_run_along(tmp_path, artefacts) -> None:
    async with bench(tmp_path, artefacts, force_include_usage=True) as here:
        here.scheduler.script = lambda submit: Script.text("abcd", cached=2)
        for options in ({}, {"stream_options": {"include_usage": False}}):
            response = await here.post(CHAT, chat(stream=True, **options))
            assert lint(CHAT, response.content, usage=True)[-1]["usage"]["completion_tokens"] == 5
        for path, body in ROUTES:
            options = {"include_usage": True, "continuous_usage_stats": True}
            response = await here.post(path, {**body, "stream": True, "stream_options": options, "n": 2})
            chunks = lint(path, response.content, usage=True, continuous=True)
            counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
            assert counts == sorted(counts) and counts[-1] == 10
            assert all(chunk["usage"]["prompt_tokens"] == chunks[-1]["usage"]["prompt_tokens"] for chunk in chunks)


# Deadlines


@pytest.mark.parametrize("by_scheduler", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_deadline_after_a_token_is_a_normal_end_for_every_choice(here: Bench, stream, by_scheduler) -> None:
    script = Script.text("abc", gate=2, variants=[[], [*b"xyz"]])
    if by_scheduler:
        script = Script([*b"ab"], deadline_at=2, variants=[[], [*b"xy"]])
    assert (await here.post(CHAT, chat())).status_code == 200  # what is made once is made
    here.scheduler.script = lambda submit: script
    body = chat(n=3, timeout=30 if by_scheduler else 1, max_tokens=9)
    answer = await (streamed if stream else whole)(here, CHAT, body)
    texts = [answer[at]["text"] for at in range(3)]
    # The scheduler's deadline for one choice ends all of them, and another's last token may come after it.
    assert texts[:2] == ["ab", ""] and texts[2] in (("", "x", "xy") if by_scheduler else ("xy",))
    assert all((answer[at]["finish_reason"], answer[at]["stop_reason"]) == ("length", "timeout") for at in range(3))
    assert answer["usage"]["completion_tokens"] == len("".join(texts))
    await here.until(lambda: not here.scheduler.jobs, "all choices ended")
    assert 0 <= here.scheduler.submits[-1].remaining_ms <= body["timeout"] * 1000


@pytest.mark.parametrize("stream", [False, True])
async def test_a_deadline_before_the_first_token_is_a_504(here: Bench, stream: bool) -> None:
    for script in (Script.text("abc", gate=0), Script(deadline_at=0), Script(admit=False)):
        here.scheduler.script = lambda submit, script=script: script
        response = await here.post(CHAT, chat(timeout=0.2, stream=stream))
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["type"]) == (504, "timeout", "timeout_error")
        assert response.headers["x-should-retry"] == "false"


async def test_a_deadline_also_counts_while_a_request_is_held(tmp_path, artefacts) -> None:
    async with bench(tmp_path, artefacts, registered=False) as made:
        assert (await made.post(CHAT, chat(timeout=0.05))).status_code == 504
        assert made.frontend.preparing == 0


# Several choices


async def test_choices_of_a_prompt_travel_together_with_their_seeds(here: Bench) -> None:
    await here.post(COMPLETIONS, completion(["a", "b"], n=3, seed=7))
    assert [len(submit.choices) for submit in here.scheduler.submits] == [3, 3]
    for submit in here.scheduler.submits:
        assert [choice.seed for choice in submit.choices] == [7, hash64(7, 1), hash64(7, 2)]
    await here.post(COMPLETIONS, completion(["a", "b"], n=2))
    seeds = {choice.seed for submit in here.scheduler.submits[2:] for choice in submit.choices}
    assert len(seeds) == 4


def test_hash64_is_blake2b_of_the_numbers() -> None:
    data = (7).to_bytes(8, "little") + (1).to_bytes(8, "little")
    assert hash64(7, 1) == int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
    assert len({hash64(7, index) for index in range(256)}) == 256


async def test_prompts_of_a_list_fail_as_one_answer(here: Bench) -> None:
    def script(submit: Submit) -> Script:
        return Script(reject=RejectCode.OVERLOADED) if submit.tokens[0] == ord("b") else Script.text("x", gate=0)

    here.scheduler.script = script
    for stream in (False, True):
        response = await here.post(COMPLETIONS, completion(["a", "b", "a"], n=2, stream=stream))
        assert response.status_code == 429 and response.json()["error"]["code"] == "overloaded"
        await here.until(lambda: not here.scheduler.jobs, "the other prompts' choices aborted")


async def test_a_choice_that_fails_ends_the_stream_of_all(here: Bench) -> None:
    here.scheduler.script = lambda submit: Script([*b"abc"], fault_at=3, variants=[[*b"xyzxyz"]], gate=5)
    response = await here.post(CHAT, chat(n=2, stream=True))
    events = parse_events(response.content)
    assert events[-1] == "[DONE]" and events[-2]["error"]["code"] == "engine_error"
    await here.until(lambda: not here.scheduler.jobs, "the other choice aborted")
    assert (await here.post(CHAT, chat(n=2))).status_code == 500


async def test_choices_end_one_by_one(here: Bench) -> None:
    here.scheduler.script = lambda submit: Script([*b"a", 258], variants=[[*b"long answer", 258], [258]])
    for answer in (await whole(here, CHAT, chat(n=3)), await streamed(here, CHAT, chat(n=3))):
        assert [answer[at]["text"] for at in range(3)] == ["a", "long answer", ""]
        assert answer["usage"]["completion_tokens"] == 15


# What else a request may say


async def test_a_request_id_of_the_body_is_echoed_on_answers_and_errors(here: Bench) -> None:
    assert (await here.post(CHAT, chat(request_id="mine 1"))).headers["x-request-id"] == "mine 1"
    here.scheduler.script = lambda submit: Script(reject=RejectCode.OVERLOADED)
    response = await here.post(CHAT, chat(request_id="mine 2"))
    assert response.status_code == 429 and response.headers.get_list("x-request-id") == ["mine 2"]
    response = await here.post(CHAT, chat(request_id="body"), headers={"x-request-id": "header"})
    assert response.headers.get_list("x-request-id") == ["header"]


async def test_a_service_tier_is_answered_default(here: Bench) -> None:
    assert (await here.post(CHAT, chat(service_tier="flex"))).json()["service_tier"] == "default"
    assert "service_tier" not in (await here.post(CHAT, chat())).json()


async def test_strict_limits_refuse_what_would_be_clamped(tmp_path, artefacts) -> None:
    async with bench(tmp_path, artefacts, strict_limits=True) as made:
        error = (await made.post(COMPLETIONS, completion("12345", max_tokens=5000))).json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
        assert (await made.post(COMPLETIONS, completion("12345", max_tokens=995))).status_code == 200
