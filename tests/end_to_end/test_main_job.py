"""One command serves a real model to the official client, through every process of the real architecture."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.end_to_end.prompts import PROMPTS
from tests.end_to_end.serve_process import ServeProcess
from tests.workers.native_rig import has_native_library

pytestmark = pytest.mark.slow

PARIS = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def server() -> Iterator[ServeProcess]:
    """The real model, and a pool small enough to preempt. The short context bounds answers that nothing else does.

    Answers are the same alone and under load: on the native engine in every precision, else in float32.
    """
    arguments = {
        "--launcher": "local",
        "--served-model-name": "llama-8b",
        "--dtype": "auto" if has_native_library() else "float32",
        "--max-num-seqs": "32",
        "--max-model-len": "512",
        "--kv-cache-memory": "96MiB",
    }
    with ServeProcess(*(word for pair in arguments.items() for word in pair)) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: ServeProcess) -> openai.OpenAI:
    return server.client()


def streamed(client: openai.OpenAI, **body: Any) -> tuple[str, str | None, Any]:
    """Text, finish reason and usage of a streamed chat completion."""
    text, finish, usage = [], None, None
    stream = client.chat.completions.create(
        model="llama-8b", stream=True, stream_options={"include_usage": True}, **body
    )
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text.append(choice.delta.content or "")
            finish = choice.finish_reason or finish
    return "".join(text), finish, usage


def counts(usage: Any) -> tuple[int, int, int]:
    """What does not depend on who asked before."""
    return usage.prompt_tokens, usage.completion_tokens, usage.total_tokens


def test_the_capital_of_france_is_paris_in_both_transports(client) -> None:
    whole = client.chat.completions.create(model="llama-8b", messages=PARIS, temperature=0)
    text, finish, usage = streamed(client, messages=PARIS, temperature=0)
    assert "Paris" in whole.choices[0].message.content
    assert (text, finish) == (whole.choices[0].message.content, whole.choices[0].finish_reason)
    assert counts(usage) == counts(whole.usage)


def test_one_seed_gives_one_answer_at_temperature_one(client) -> None:
    request = {"messages": PARIS, "temperature": 1, "seed": 1234, "max_tokens": 48}
    whole = client.chat.completions.create(model="llama-8b", **request)
    text, finish, usage = streamed(client, **request)
    assert (text, finish, counts(usage)) == (
        whole.choices[0].message.content,
        whole.choices[0].finish_reason,
        counts(whole.usage),
    )
    other = client.chat.completions.create(model="llama-8b", **{**request, "seed": 4321})
    assert other.choices[0].message.content != text


def test_choices_differ_by_seed_and_come_again_and_agree_at_temperature_zero(client) -> None:
    request = {"messages": PARIS, "n": 4, "max_tokens": 24}
    first, second = (
        client.chat.completions.create(model="llama-8b", temperature=1, seed=7, **request).choices for _ in range(2)
    )
    texts = [choice.message.content for choice in first]
    assert len(set(texts)) > 1 and texts == [choice.message.content for choice in second]
    greedy = client.chat.completions.create(model="llama-8b", temperature=0, **request).choices
    assert len({choice.message.content for choice in greedy}) == 1


def test_usage_counts_the_rendered_template(client) -> None:
    """31 tokens: the template's default system turn, the user turn and the opening of the answer."""
    whole = client.chat.completions.create(model="llama-8b", messages=PARIS, temperature=0, max_tokens=5)
    assert whole.usage.completion_tokens == 5 and whole.choices[0].finish_reason == "length"
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 5
    longer = client.chat.completions.create(
        model="llama-8b",
        messages=[{"role": "system", "content": "Be brief."}, *PARIS],
        temperature=0,
        max_tokens=5,
    )
    assert whole.usage.prompt_tokens == 37
    assert longer.usage.prompt_tokens < whole.usage.prompt_tokens


def test_the_call_of_the_contract_works_verbatim(client) -> None:
    messages = PARIS
    stream = client.chat.completions.create(
        model="llama-8b", messages=messages, stream=True, extra_body={"top_k": 40, "priority": 1}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] in ("stop", "length")


def test_text_completions_stream_what_they_answer_whole(server, client) -> None:
    """The client's type of a chunk has no null finish_reason, which every server sends: streams are read leniently."""
    lenient = server.client(_strict_response_validation=False)
    request = {"model": "llama-8b", "prompt": "The capital of France is", "temperature": 0, "max_tokens": 12}
    whole = client.completions.create(**request)
    text = "".join(chunk.choices[0].text for chunk in lenient.completions.create(stream=True, **request))
    assert text == whole.choices[0].text and "Paris" in text


def test_sixty_four_streams_with_random_aborts_answer_as_each_does_alone(server, client) -> None:
    alone = {
        prompt: streamed(client, messages=[{"role": "user", "content": prompt}], temperature=0, max_tokens=48)
        for prompt in PROMPTS
    }
    rng = random.Random(7)
    plans = [(PROMPTS[index % 8], rng.random() < 0.25, rng.randrange(1, 30)) for index in range(64)]

    def run(prompt: str, aborts: bool, after: int) -> tuple[str, bool, str, int]:
        stream = client.chat.completions.create(
            model="llama-8b",
            messages=[{"role": "user", "content": prompt}],
            temperature=0,
            max_tokens=48,
            stream=True,
        )
        text, ends = "", 0
        for seen, chunk in enumerate(stream):
            text += chunk.choices[0].delta.content or ""
            ends += chunk.choices[0].finish_reason is not None
            if aborts and seen >= after:
                stream.close()
                return prompt, ends == 0, text, ends
        return prompt, False, text, ends

    with ThreadPoolExecutor(64) as pool:
        results = list(pool.map(lambda plan: run(*plan), plans))
    assert any(aborted for _, aborted, _, _ in results)
    for prompt, aborted, text, ends in results:
        if aborted:
            assert alone[prompt][0].startswith(text)
        else:
            assert (text, ends) == (alone[prompt][0], 1)
    server.wait_until_no_blocks_are_used()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_blocks(server: ServeProcess, stream: bool) -> None:
    body = (
        f'{{"model":"llama-8b","stream":{str(stream).lower()},"ignore_eos":true,"max_tokens":4000,'
        '"messages":[{"role":"user","content":"Tell a long story."}]}'
    )
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        server.wait_for_gauges(lambda gauges: gauges.total("headrace_kv_blocks", state="used") > 0, "a KV block in use")
    server.wait_until_no_blocks_are_used()


def test_a_bad_request_harms_nobody_else(client) -> None:
    done = threading.Event()
    texts: list[str] = []

    def survivor() -> None:
        texts.append(streamed(client, messages=PARIS, temperature=0, max_tokens=200)[0])
        done.set()

    thread = threading.Thread(target=survivor)
    thread.start()
    bad_bodies: tuple[dict[str, Any], ...] = (
        {"temperature": -1},
        {"max_tokens": "many"},
        {"extra_body": {"stop_token_ids": [10**9]}},
        {"extra_body": {"allowed_token_ids": [2], "min_tokens": 5}},  # the end token alone
        {"messages": "hi"},
    )
    for bad in bad_bodies:
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model="llama-8b", **{"messages": PARIS, **bad})
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="another", messages=PARIS)
    thread.join(120)
    assert done.is_set() and "Paris" in texts[0]
