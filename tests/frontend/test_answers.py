"""One answer, two transports: the same text, ending and usage, however the engine cuts its steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from tests.frontend.fake_scheduler import Script
from tests.frontend.harness import CHAT, COMPLETIONS, Bench, chat, completion

EOS = 258


@dataclass(frozen=True)
class Answer:
    """What must be equal in both transports."""

    text: str
    finish_reason: str
    stop_reason: str | int | None
    usage: dict[str, Any]


def request_for(path: str, **fields: Any) -> dict[str, Any]:
    return chat(**fields) if path == CHAT else completion(**{"max_tokens": 500, **fields})


async def whole(bench: Bench, path: str, **fields: Any) -> Answer:
    response = await bench.post(path, request_for(path, **fields))
    assert response.status_code == 200, response.text
    body = response.json()
    (choice,) = body["choices"]
    text = choice["message"]["content"] if path == CHAT else choice["text"]
    return Answer(text, choice["finish_reason"], choice["stop_reason"], body["usage"])


async def streamed(bench: Bench, path: str, **fields: Any) -> Answer:
    events = await bench.events(path, request_for(path, stream_options={"include_usage": True}, **fields))
    assert events.pop() == "[DONE]"
    usage = events.pop()
    assert usage["choices"] == []
    parts = [
        (event["choices"][0]["delta"].get("content", "") if path == CHAT else event["choices"][0]["text"])
        for event in events
    ]
    last = events[-1]["choices"][0]
    return Answer("".join(parts), last["finish_reason"], last["stop_reason"], usage["usage"])


async def both(bench: Bench, path: str = CHAT, **fields: Any) -> Answer:
    """The answer, which is checked to be the same streamed and whole."""
    one, other = await whole(bench, path, **fields), await streamed(bench, path, **fields)
    assert one == other
    return one


CASES: list[tuple[str | bytes, dict[str, Any], tuple[str, str, str | int | None, int]]] = [
    ("plain text", {}, ("plain text", "stop", None, 11)),
    ("", {}, ("", "stop", None, 1)),
    ("Grüße, 世界! 👩‍👩‍👧", {}, ("Grüße, 世界! 👩‍👩‍👧", "stop", None, 36)),
    ('line\nbreak\u2028"quoted"\\\x01', {}, ('line\nbreak\u2028"quoted"\\\x01', "stop", None, 24)),
    ("abcdef", {"max_tokens": 3}, ("abc", "length", None, 3)),
    ("one STOP two", {"stop": "STOP"}, ("one ", "stop", "STOP", 8)),
    ("one STOP two", {"stop": ["two", "STOP"]}, ("one ", "stop", "STOP", 8)),
    ("one STO two", {"stop": ["STOP"]}, ("one STO two", "stop", None, 12)),
    ("ends with STO", {"stop": ["STOP"]}, ("ends with STO", "stop", None, 14)),
    ("cut at STO", {"stop": ["STOP"], "max_tokens": 10}, ("cut at STO", "length", None, 10)),
    ("abcSTOP", {"stop": ["STOP"], "max_tokens": 7}, ("abc", "stop", "STOP", 7)),
    ("x世y", {"stop": ["世"]}, ("x", "stop", "世", 4)),
    ("aXbXc", {"stop_token_ids": [ord("X")]}, ("a", "stop", ord("X"), 2)),
    ("aXbXc", {"stop_token_ids": [ord("X")], "min_tokens": 3}, ("aXb", "stop", ord("X"), 4)),
    ("a.b.c", {"stop": ["."], "min_tokens": 3}, ("a.b", "stop", ".", 4)),
    ("a<>b<>c", {"stop": ["<>"], "min_tokens": 3}, ("a", "stop", "<>", 3)),
    (b"ab\xff\xfecd", {}, ("ab��cd", "stop", None, 7)),
]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(("text", "fields", "expected"), CASES, ids=range(len(CASES)))
async def test_both_transports_give_the_same_answer(here: Bench, path, text, fields, expected) -> None:
    here.scheduler.script = lambda submit: Script.text(text)
    answer = await both(here, path, **fields)
    assert (answer.text, answer.finish_reason, answer.stop_reason) == expected[:3]
    assert answer.usage["completion_tokens"] == expected[3]


async def test_the_size_of_a_step_changes_nothing(here: Bench) -> None:
    text = "One 世界 👩‍👩‍👧 two END three"
    for fields in ({}, {"stop": ["END", "D th"]}, {"max_tokens": 9}, {"stop_token_ids": [ord("w")]}):
        answers = set()
        for steps in [(1,), (2,), (3,), (4,), (5,), (6,), (7,), (8,), (1, 8, 2)]:
            here.scheduler.script = lambda submit, steps=steps: Script.text(text, steps=steps)
            answers.add(repr(await both(here, **fields)))
        assert len(answers) == 1


async def test_a_cut_inside_a_character_reads_the_same_in_both_transports(here: Bench) -> None:
    text = "é👍!"
    for limit in range(1, 8):
        here.scheduler.script = lambda submit: Script.text(text)
        answer = await both(here, max_tokens=limit)
        assert answer.usage["completion_tokens"] == limit and answer.finish_reason == "length"
        assert answer.text == text.encode()[:limit].decode(errors="replace")


async def test_ignore_eos_runs_to_the_limit(here: Bench) -> None:
    here.scheduler.script = lambda submit: Script([*b"ab", EOS, *b"cdefgh"], steps=(3,))
    answer = await both(here, ignore_eos=True, max_tokens=6)
    assert (answer.text, answer.finish_reason, answer.usage["completion_tokens"]) == ("abcde", "length", 6)


async def test_usage_adds_up_and_tells_what_was_cached(here: Bench) -> None:
    here.scheduler.script = lambda submit: Script.text("four", cached=3)
    answer = await both(here, COMPLETIONS, prompt="12345")
    assert answer.usage == {
        "prompt_tokens": 5,
        "completion_tokens": 5,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


async def test_prompt_tokens_count_the_rendered_template(here: Bench) -> None:
    answer = await both(here)
    rendered = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert answer.usage["prompt_tokens"] == len(rendered) - 2 * len("<|im_start|>") - len("<|im_end|>") + 3


async def test_a_stop_string_ends_the_choice_at_the_scheduler_too(here: Bench) -> None:
    here.scheduler.script = lambda submit: Script([*b"ab.", *b"c" * 400], gate=50)
    answer = await whole(here, CHAT, stop=["."])
    assert answer.text == "ab"
    await here.until(lambda: not here.scheduler.jobs, "the choice aborted")


async def test_the_envelope_of_a_whole_answer_has_every_key(here: Bench) -> None:
    body = (await here.post(CHAT, chat())).json()
    assert body["id"].startswith("chatcmpl-") and body["object"] == "chat.completion"
    assert body["model"] == "llama-8b" and body["system_fingerprint"].startswith("fp_")
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "ok", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    body = (await here.post(COMPLETIONS, completion())).json()
    assert body["id"].startswith("cmpl-") and body["object"] == "text_completion"
    assert body["choices"] == [
        {"index": 0, "text": "ok", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]


async def test_an_alias_is_accepted_and_the_first_name_is_echoed(here: Bench) -> None:
    assert (await here.post(CHAT, {**chat(), "model": "alias"})).json()["model"] == "llama-8b"
    assert here.scheduler.submits[-1].model == "llama-8b"
