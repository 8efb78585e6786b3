"""The official Python client, every whole answer and chat chunk strictly validated against its types."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionTokenLogprob

from tests.clients.answers import (
    ALIAS,
    MODEL,
    PLAIN,
    PLAIN_TEXT,
    UNICODE,
    UNICODE_TEXT,
    answer_tokens,
    ask,
    prompt_tokens,
    tokens,
)
from tests.end_to_end.serve_process import ServeProcess

pytestmark = pytest.mark.slow

USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}
ROOM = 1000


@pytest.fixture(scope="module")
def client(server: ServeProcess) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client


@pytest.fixture(scope="module")
def lenient(server: ServeProcess) -> Iterator[openai.OpenAI]:
    """For what the hosted API sends too, and the client's own types do not allow."""
    with server.client(_strict_response_validation=False) as client:
        yield client


def completion_chunks(lenient: openai.OpenAI, **body: Any) -> list[Completion]:
    """Of a text completion. The client's type has no null finish_reason, which all but the last chunk have
    everywhere: that alone is filled in before the strict validation."""
    chunks = []
    for chunk in lenient.completions.create(model=MODEL, stream=True, **body):
        sent = chunk.to_dict()
        for choice in sent["choices"]:
            assert "finish_reason" in choice
            choice["finish_reason"] = choice["finish_reason"] or "length"
        Completion.model_validate(sent)
        chunks.append(chunk)
    return chunks


def text_of(chunks: list[ChatCompletionChunk], index: int = 0) -> str:
    parts = (c.delta.content or "" for chunk in chunks for c in chunk.choices if c.index == index)
    return "".join(parts)


def test_a_chat_completion_is_the_script_in_both_transports(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=ask(UNICODE))
    chunks = list(client.chat.completions.create(model=MODEL, messages=ask(UNICODE), stream=True, **USAGE))
    (choice,) = whole.choices
    assert (choice.message.role, choice.message.content) == ("assistant", UNICODE_TEXT)
    assert (choice.message.tool_calls, choice.message.refusal, choice.logprobs) == (None, None, None)
    assert text_of(chunks) == UNICODE_TEXT
    assert all("\ufffd" not in (c.delta.content or "") for chunk in chunks for c in chunk.choices)
    finishes = [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason]
    assert finishes == [choice.finish_reason] == ["stop"]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert whole.usage is not None
    assert chunks[-1].usage == whole.usage and not chunks[-1].choices
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_usage_counts_template_and_end_token(client: openai.OpenAI) -> None:
    usage = client.chat.completions.create(model=MODEL, messages=ask(UNICODE)).usage
    assert usage is not None and usage.prompt_tokens_details and usage.completion_tokens_details
    assert usage.prompt_tokens == prompt_tokens(UNICODE)
    assert usage.completion_tokens == answer_tokens(UNICODE_TEXT)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.completion_tokens_details.reasoning_tokens == 0
    assert usage.prompt_tokens_details.cached_tokens is not None


def test_chunks_share_what_names_the_answer(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model=ALIAS, messages=ask(PLAIN), stream=True, **USAGE))
    assert len({(c.id, c.created, c.model, c.system_fingerprint, c.object) for c in chunks}) == 1
    assert chunks[0].model == MODEL and chunks[0].id.startswith("chatcmpl-")


def test_the_stream_helper_ends_with_the_whole_answer(client: openai.OpenAI) -> None:
    kinds, deltas = [], []
    with client.chat.completions.stream(model=MODEL, messages=ask(UNICODE), **USAGE) as stream:
        for event in stream:
            kinds.append(event.type)
            if event.type == "content.delta":
                deltas.append(event.delta)
                assert event.snapshot == "".join(deltas)
            elif event.type == "content.done":
                assert event.content == UNICODE_TEXT
        final = stream.get_final_completion()
    whole = client.chat.completions.create(model=MODEL, messages=ask(UNICODE))
    assert "".join(deltas) == final.choices[0].message.content == UNICODE_TEXT
    assert set(kinds) == {"chunk", "content.delta", "content.done"} and kinds.count("content.done") == 1
    assert final.usage == whole.usage
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason == "stop"


def test_the_stream_helper_gathers_logprobs(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": ask(UNICODE), "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**asked)
    done = []
    with client.chat.completions.stream(**asked) as stream:
        done = [event for event in stream if event.type == "logprobs.content.done"]
        final = stream.get_final_completion()
    assert whole.choices[0].logprobs is not None
    assert final.choices[0].logprobs == whole.choices[0].logprobs
    assert [event.content for event in done] == [whole.choices[0].logprobs.content]


@pytest.mark.parametrize("alternatives", [0, 20])
def test_logprobs_of_a_chat_spell_its_text(client: openai.OpenAI, alternatives: int) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": ask(UNICODE),
        "logprobs": True,
        "top_logprobs": alternatives,
    }
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert whole.choices[0].logprobs is not None and whole.choices[0].logprobs.content is not None
    entries = whole.choices[0].logprobs.content
    streamed: list[ChatCompletionTokenLogprob] = []
    for chunk in chunks:
        for choice in chunk.choices:
            streamed += (choice.logprobs and choice.logprobs.content) or []
    assert streamed == entries
    assert b"".join(bytes(entry.bytes or ()) for entry in entries).decode() == UNICODE_TEXT
    assert all(len(entry.top_logprobs) == alternatives for entry in entries)
    assert all(-9999.0 <= entry.logprob <= 0 and math.isfinite(entry.logprob) for entry in entries)


def test_two_choices_are_told_apart_in_both_transports(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=ask(PLAIN), n=2)
    chunks = list(client.chat.completions.create(model=MODEL, messages=ask(PLAIN), n=2, stream=True, **USAGE))
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert [choice.message.content for choice in whole.choices] == [text_of(chunks, 0), text_of(chunks, 1)]
    assert text_of(chunks, 1) == PLAIN_TEXT
    finishes = sorted((c.index, c.finish_reason) for chunk in chunks for c in chunk.choices if c.finish_reason)
    assert finishes == [(0, "stop"), (1, "stop")]
    assert chunks[-1].usage == whole.usage and whole.usage is not None
    assert whole.usage.completion_tokens == 2 * answer_tokens(PLAIN_TEXT)


def test_the_helper_takes_two_choices(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=ask(PLAIN), n=2) as stream:
        final = stream.get_final_completion()
    assert [choice.message.content for choice in final.choices] == [PLAIN_TEXT] * 2


def test_a_text_completion_is_the_script_in_both_transports(client: openai.OpenAI, lenient: openai.OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt=UNICODE, max_tokens=ROOM)
    chunks = completion_chunks(lenient, prompt=UNICODE, max_tokens=ROOM, **USAGE)
    assert whole.choices[0].text == UNICODE_TEXT and whole.id.startswith("cmpl-")
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == UNICODE_TEXT
    finishes = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert finishes == [whole.choices[0].finish_reason] == ["stop"]
    assert chunks[-1].usage == whole.usage


def test_a_list_of_prompts_is_answered_in_order(client: openai.OpenAI, lenient: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"prompt": [UNICODE, PLAIN], "n": 2, "max_tokens": ROOM}
    whole = client.completions.create(model=MODEL, **asked)
    texts = [""] * 4
    for chunk in completion_chunks(lenient, **asked):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert texts == [choice.text for choice in whole.choices] == [UNICODE_TEXT] * 2 + [PLAIN_TEXT] * 2
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == tokens(UNICODE) + tokens(PLAIN)


def test_prompts_may_be_token_ids(client: openai.OpenAI) -> None:
    ids = list(PLAIN.encode())
    one = client.completions.create(model=MODEL, prompt=ids, max_tokens=ROOM)
    two = client.completions.create(model=MODEL, prompt=[ids, list(UNICODE.encode())], max_tokens=ROOM)
    assert one.choices[0].text == PLAIN_TEXT
    assert [choice.text for choice in two.choices] == [PLAIN_TEXT, UNICODE_TEXT]


def test_logprobs_of_a_text_completion_are_equal_in_both_transports(
    client: openai.OpenAI, lenient: openai.OpenAI
) -> None:
    asked: dict[str, Any] = {"prompt": PLAIN, "max_tokens": ROOM, "logprobs": 3}
    whole = client.completions.create(model=MODEL, **asked).choices[0].logprobs
    assert whole is not None and whole.tokens and whole.text_offset == list(range(len(PLAIN_TEXT)))
    assert "".join(whole.tokens) == PLAIN_TEXT
    assert gathered(completion_chunks(lenient, **asked)) == whole.to_dict()


def test_an_echo_has_the_logprobs_of_its_prompt(lenient: openai.OpenAI) -> None:
    """The first prompt token has none; the client's type forgets that."""
    asked: dict[str, Any] = {"model": MODEL, "prompt": PLAIN, "max_tokens": ROOM, "logprobs": 3, "echo": True}
    choice = lenient.completions.create(**asked).choices[0]
    whole = choice.logprobs
    assert whole is not None and whole.tokens and whole.token_logprobs
    assert choice.text == "".join(whole.tokens) == PLAIN + PLAIN_TEXT
    assert whole.text_offset == list(range(len(PLAIN + PLAIN_TEXT)))
    assert whole.token_logprobs[0] is None and None not in whole.token_logprobs[1:]
    assert gathered(list(lenient.completions.create(**asked, stream=True))) == whole.to_dict()


def gathered(chunks: list[Completion]) -> dict[str, list[Any]]:
    """The logprobs of all chunks."""
    found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for choice in (choice for chunk in chunks for choice in chunk.choices if choice.logprobs):
        assert choice.logprobs is not None
        for name, values in choice.logprobs.to_dict().items():
            assert isinstance(values, list)
            found[name] += values
    return found


def test_budgets_and_stop_strings_end_an_answer(client: openai.OpenAI) -> None:
    cut = client.chat.completions.create(model=MODEL, messages=ask(PLAIN), max_completion_tokens=3)
    stopped = client.chat.completions.create(model=MODEL, messages=ask(PLAIN), stop=["France", "zebra"])
    assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == (PLAIN_TEXT[:3], "length")
    assert (stopped.choices[0].message.content, stopped.choices[0].finish_reason) == ("The capital of ", "stop")
    assert stopped.choices[0].to_dict()["stop_reason"] == "France"


def test_own_parameters_pass_through_extra_body(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=ask(PLAIN),
        extra_body={"top_k": 40, "min_p": 0.1, "priority": 1, "return_token_ids": True, "stop_token_ids": [ord("f")]},
    )
    assert answer.choices[0].message.content == "The capital o"
    assert answer.choices[0].to_dict()["token_ids"] == list(b"The capital of")


def test_fields_that_cannot_change_tokens_are_taken(client: openai.OpenAI) -> None:
    answer: ChatCompletion = client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": PLAIN}], "name": "ann"},
            {"role": "assistant", "content": None},
            {"role": "user", "content": PLAIN},
        ],
        metadata={"a": "b"},
        store=False,
        user="u",
        service_tier="auto",
        safety_identifier="s",
        prompt_cache_key="k",
        verbosity="low",
        logit_bias={},
        stop=None,
        response_format={"type": "text"},
    )
    assert answer.choices[0].message.content == PLAIN_TEXT and answer.service_tier == "default"


def test_models_are_listed_and_found(client: openai.OpenAI) -> None:
    listed = client.models.list()
    assert [entry.id for entry in listed] == [MODEL, ALIAS]
    one = client.models.retrieve(MODEL)
    assert one in listed.data and one.object == "model"
    assert one.to_dict()["status"] == "ready"


def test_raw_responses_show_the_headers(client: openai.OpenAI) -> None:
    create = client.chat.completions.with_raw_response.create
    raw = create(model=MODEL, messages=ask(PLAIN), extra_headers={"X-Request-Id": "mine-7"})
    assert raw.headers["x-request-id"] == raw.request_id == "mine-7"
    assert raw.headers["content-type"] == "application/json" and raw.headers["x-headrace-frontend"]
    parsed = raw.parse()
    assert parsed.choices[0].message.content == PLAIN_TEXT and parsed._request_id == "mine-7"
    with client.chat.completions.with_streaming_response.create(
        model=MODEL, messages=ask(PLAIN), stream=True
    ) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["cache-control"] == "no-cache, no-transform"
        assert response.headers["x-request-id"].startswith("req-")
        assert list(response.iter_lines())[-2] == "data: [DONE]"


async def test_the_asynchronous_client_streams_side_by_side(server: ServeProcess) -> None:
    import asyncio

    async def one(client: openai.AsyncOpenAI, content: str) -> str:
        text = ""
        async with client.chat.completions.stream(model=MODEL, messages=ask(content)) as stream:
            async for event in stream:
                if event.type == "content.delta":
                    text += event.delta
        return text

    strict: dict[str, Any] = {"_strict_response_validation": True, "max_retries": 0, "timeout": 60}
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", **strict) as client:
        texts = await asyncio.gather(*(one(client, [UNICODE, PLAIN][nth % 2]) for nth in range(16)))
    assert texts == [UNICODE_TEXT, PLAIN_TEXT] * 8
