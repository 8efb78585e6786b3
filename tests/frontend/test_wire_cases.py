"""Faults that other servers had in public, by kind: each row is one kind of trigger and what is right.

The rows are kinds, not incidents: every value, both routes, both transports. Kinds with tests of their own elsewhere
(stops, parity, envelopes, sessions, templates) are not repeated here.
"""

from __future__ import annotations

import asyncio
import struct
from dataclasses import dataclass
from typing import Any

import pytest

from protocol.frontend import FinishReason
from protocol.packing import pack_u32, unpack_u32
from tests.frontend.fake_scheduler import Script
from tests.frontend.folding import both, whole
from tests.frontend.harness import CHAT, COMPLETIONS, Bench, bench, chat, completion, parse_events

VOCABULARY = 259
BOTH = (CHAT, COMPLETIONS)
HUGE = (10**9, 2**31, 2**63, 2**64, 2**200)


@dataclass(frozen=True)
class Kind:
    """One kind of bad request: each value of the field is a 400 that names it."""

    what: str
    field: str
    values: tuple[Any, ...]
    routes: tuple[str, ...] = BOTH
    beside: tuple[tuple[str, Any], ...] = ()
    code: str | None = None


REFUSED = (
    Kind("biases on keys that are no token, twice, out of range or not numbers", "logit_bias", (
        {str(VOCABULARY): 1}, {"191222": -100}, {"AI": -100}, {"-1": 5}, {"1.5": 1}, {"": 1}, {" 1": 1}, {"٣": 1},
        {"1": 1e6}, {"1": -101}, {"1": "x"}, {"1": None}, {"1": 1, "01": 2}, {"9" * 5000: 1}, "x", [1],
        {str(at % VOCABULARY) + " " * (at // VOCABULARY): 0 for at in range(1025)},
    )),
    Kind("ids outside the vocabulary", "stop_token_ids", ([-1], [VOCABULARY], [2**63], ["a"], [1.5], [True], "x", 5)),
    Kind("ids outside the vocabulary", "allowed_token_ids", ([-1], [VOCABULARY], [2**63], ["a"], [[1]], 5)),
    Kind("lists longer than any model needs", "stop_token_ids", ([1] * 1025,)),
    Kind("lists longer than any model needs", "bad_words", (["x"] * 129, ["x" * 129], ["é" * 100], [""], [5], "x")),
    Kind("counters without bound", "n", (0, -1, 129, 5_000_000, *HUGE, 1.5, True, "2")),
    Kind("counters without bound", "best_of", (2, 1_000_000, 2**70), code="unsupported_parameter"),
    Kind("counters without bound", "prompt_logprobs", (-1, 21, *HUGE, 1.5, True)),
    Kind("counters without bound", "top_logprobs", (-1, 21, *HUGE, 1.5, True), (CHAT,), (("logprobs", True),)),
    Kind("counters without bound", "logprobs", (-1, 21, *HUGE, 1.5, True), (COMPLETIONS,)),
    Kind("counters without bound", "truncate_prompt_tokens", (0, -2, 1.5, "x")),
    Kind("counters without bound", "min_tokens", (-1, 10**9, 2**63), beside=(("max_tokens", 40),)),
    Kind("alternatives of nothing", "top_logprobs", (1, 20), (CHAT,)),
    Kind("alternatives of nothing", "top_logprobs", (1, 20), (CHAT,), (("logprobs", False),)),
    Kind("the shape of the other route", "logprobs", (5, "yes", 0), (CHAT,)),
    Kind("no output to make", "max_tokens", (0,)),
    Kind("no output to make, in a chat even with an echo", "max_tokens", (0,), (CHAT,), (("echo", True),)),
    Kind("an empty stop string", "stop", ("", ["a", ""], [["a"]], 5, {"a": 1})),
    Kind("prompts that are no prompts", "prompt", (
        [-1], [[-1]], [99_999_999], [[1], [VOCABULARY]], [2**70], [[1], []], [], "", [""], ["a", ""], ["a", 1],
        [1, "a"], [[1], "a"], ["a", [1]], [[[1]]], [None], [1.5], [True], {"a": 1}, 5, [{}],
    ), (COMPLETIONS,)),
    Kind("more prompts than one request may have", "prompt", (["a"] * 129, [[1]] * 90_000), (COMPLETIONS,)),
    Kind("parts without number that are no parts", "messages", tuple(
        [{"role": "user", "content": [part] * 2000}]
        for part in ({"type": "text", "text": 5}, {"type": "nope"}, 5, None, [], {}, {"type": ["text"]})
    ), (CHAT,)),
    Kind("messages without number that are no messages", "messages", tuple(
        [message] * 2000 for message in (5, None, [], {}, {"role": "x" * 1000}, {"role": "user", "content": 5})
    ), (CHAT,)),
    Kind("templates from strangers", "chat_template", ("{{ 1 }}", "{% raw"), (CHAT,), code="unsupported_parameter"),
    Kind("names that cannot be a header", "request_id", ("", "a\nb", "a\n", "é", "x" * 257, " a", 5)),
    Kind("deadlines that are none", "timeout", (0, -1, "x", 10**9, [1])),
    Kind("salts that are no text", "cache_salt", (5, ["x"], "x" * 129)),
    Kind("flags that are no flags", "echo", ("yes", 1, [1])),
    Kind("flags that are no flags", "skip_special_tokens", ("yes", 1, [1])),
    Kind("documents that are no objects", "documents", ("x", 5, [5], ["x"]), (CHAT,)),
)  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: f"{kind.field}: {kind.what}")
async def test_it_is_a_400_that_names_the_field_and_harms_nobody(here: Bench, kind: Kind) -> None:
    here.scheduler.script = lambda submit: Script([*b"survivor"], gate=1)
    body = chat(stream=True, max_tokens=8)
    survivor = asyncio.create_task(here.post(CHAT, body))
    await here.until(lambda: len(here.scheduler.submits) == 1, "the survivor running")
    for path in kind.routes:
        for value in kind.values:
            for stream in (False, True):
                request = {**(chat() if path == CHAT else completion()), **dict(kind.beside), kind.field: value}
                response = await here.post(path, {**request, "stream": stream})
                assert response.status_code == 400, (value, response.text)
                assert response.headers["content-type"] == "application/json"
                error = response.json()["error"]
                named = kind.field in (error["param"] or "") or kind.field in error["message"]
                assert named and len(response.content) < 4096, (value, error)
                assert kind.code in (None, error["code"])
    assert len(here.scheduler.submits) == 1
    here.scheduler.open_gates()
    assert b"[DONE]" in (await survivor).content
    assert (await here.client.get("/health")).status_code == 200


TAKEN: list[tuple[str, dict[str, Any]]] = [
    ("the whole vocabulary allowed, twice over", {"allowed_token_ids": [*range(VOCABULARY)] * 8}),
    ("as many biases as may be", {"logit_bias": {str(at): at % 100 for at in range(VOCABULARY)}}),
    ("200 stop ids", {"stop_token_ids": [130 + at % 90 for at in range(200)]}),
    ("no stop at all, said three ways", {"stop": None, "stop_token_ids": [], "bad_words": []}),
    ("limits beyond all numbers", {"max_tokens": 2**63}),
    ("top_k beyond all numbers", {"top_k": 2**63}),
    ("two requests of one name", {"request_id": "dup"}),
    ("as many choices as may be", {"n": 128, "max_tokens": 1}),
    ("best_of as n", {"n": 2, "best_of": 2}),
    ("seconds without end", {"timeout": 604800}),
]


@pytest.mark.parametrize(("what", "fields"), TAKEN, ids=[what for what, _ in TAKEN])
async def test_it_is_answered(here: Bench, what: str, fields: dict[str, Any]) -> None:
    for path, body in ((CHAT, chat(**fields)), (COMPLETIONS, completion(**fields))):
        first, second = await asyncio.gather(both(here, path, body), both(here, path, body))
        assert first == second and first[0]["text"].startswith("o")


async def test_the_forms_of_a_stop_string_mean_the_same(here: Bench) -> None:
    here.scheduler.script = lambda submit: Script.text("one. two. three")
    for path, body in ((CHAT, chat()), (COMPLETIONS, completion(max_tokens=50))):
        for stop in (".", ["."], [".", "."], ["three", ".", "x", "y", "z", "w"]):
            answer = await both(here, path, {**body, "stop": stop})
            assert (answer[0]["text"], answer[0]["stop_reason"]) == ("one", ".")
        for stop in (None, []):
            assert (await both(here, path, {**body, "stop": stop}))[0]["text"] == "one. two. three"


@pytest.mark.parametrize("header", [True, False])
async def test_requests_of_one_name_end_one_by_one(here: Bench, header: bool) -> None:
    """The name is the client's; what is aborted or ends is never another request of that name."""
    here.scheduler.script = lambda submit: Script.text("abc", gate=1)
    headers, fields = ({"x-request-id": "dup"}, {}) if header else ({}, {"request_id": "dup"})
    asking = [asyncio.create_task(here.post(CHAT, chat(**fields), headers=headers)) for _ in range(3)]
    await here.until(lambda: len(here.scheduler.jobs) == 3, "all under way")
    asking[1].cancel()
    await here.until(lambda: len(here.scheduler.aborted) == 1, "one aborted")
    here.scheduler.open_gates()
    answers = [await asking[0], await asking[2]]
    assert [answer.json()["choices"][0]["message"]["content"] for answer in answers] == ["abc", "abc"]
    assert len({answer.json()["id"] for answer in answers}) == 2
    assert {answer.headers["x-request-id"] for answer in answers} == {"dup"}


async def test_what_says_nothing_in_a_history_is_as_good_as_absent(tmp_path, artefacts) -> None:
    """Fields that clients send along empty, for templates that branch on whether they are there."""
    template = (
        "{% for m in messages %}{% if m.tool_calls is defined %}{{ m.tool_calls[0].function.name }}{% endif %}"
        "{% if m.function_call is defined or m.refusal is defined %}!{% endif %}{{ m.content }}{% endfor %}"
    )
    async with bench(tmp_path, artefacts, chat_template=template) as made:
        for empty in (
            {"tool_calls": []},
            {"tool_calls": None},
            {"function_call": None, "refusal": None, "tool_calls": []},
        ):
            body = chat("a")
            body["messages"].append({"role": "assistant", "content": "b", **empty})
            response = await made.post(CHAT, body)
            assert response.status_code == 200, response.text
            assert bytes(unpack_u32(made.scheduler.submits[-1].tokens).tolist()) == b"ab"


async def test_a_bias_an_allowance_and_a_ban_arrive_as_they_were_meant(here: Bench) -> None:
    await here.post(CHAT, chat(logit_bias={"7": -100, "12": 1.5}, allowed_token_ids=[9, 3, 9], bad_words=["no"]))
    sampling = here.scheduler.submits[-1].sampling
    assert struct.unpack("<IfIf", sampling.logit_bias) == (7, -100.0, 12, 1.5)
    assert unpack_u32(sampling.allowed_ids).tolist() == [3, 9]
    assert sampling.bad_words == (pack_u32(b"no"), pack_u32(b" no"))


async def test_constraints_that_leave_no_token_are_the_clients_mistake(here: Bench) -> None:
    """Allowed ids that are all bad words, end tokens before min_tokens: only the engine sees it, at some token."""
    here.scheduler.script = lambda submit: Script([*b"ab"], fault_at=0, fault=FinishReason.NO_TOKEN)
    for path, body in ((CHAT, chat()), (COMPLETIONS, completion())):
        for stream in (False, True):
            response = await here.post(path, {**body, "stream": stream})
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (400, "invalid_value")
            assert "allowed_token_ids" in error["message"]
    here.scheduler.script = lambda submit: Script([*b"ab"], fault_at=2, fault=FinishReason.NO_TOKEN)
    *_, event, done = parse_events((await here.post(CHAT, chat(stream=True))).content)
    assert event["error"]["type"] == "invalid_request_error" and done == "[DONE]"
    assert (await here.post(CHAT, chat())).status_code == 400


async def test_salts_keep_prefixes_apart_and_reach_the_scheduler_as_digests(here: Bench) -> None:
    for fields in ({}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"cache_salt": "a"}, {"cache_salt": ""}):
        await here.post(CHAT, chat(**fields))
    salts = [submit.salt for submit in here.scheduler.submits]
    assert salts[0] == salts[4] == b"" and salts[1] == salts[3] != salts[2] and len(salts[1]) == 16


async def test_a_prompt_is_cut_to_its_last_tokens(here: Bench) -> None:
    here.scheduler.script = lambda submit: Script.text("x")
    answer = await both(here, COMPLETIONS, completion("abcdef", truncate_prompt_tokens=3, echo=True, logprobs=0))
    assert answer[0]["text"] == "defx" and answer["usage"]["prompt_tokens"] == 3
    long = completion("x" * 2000, truncate_prompt_tokens=-1, max_tokens=10)
    assert (await whole(here, COMPLETIONS, long))["usage"]["prompt_tokens"] == 990
    assert (await whole(here, CHAT, chat(truncate_prompt_tokens=4)))["usage"]["prompt_tokens"] == 4


async def test_a_chat_echo_repeats_the_turn_that_goes_on(here: Bench) -> None:
    body = chat(echo=True, continue_final_message=True)
    body["messages"].append({"role": "assistant", "content": [{"type": "text", "text": "Well"}]})
    assert (await both(here, CHAT, body))[0]["text"] == "Wellok"
    assert (await both(here, CHAT, chat(echo=True)))[0]["text"] == "ok"


async def test_the_message_of_an_answer_can_be_sent_back(here: Bench) -> None:
    message = (await here.post(CHAT, chat())).json()["choices"][0]["message"]
    body = chat()
    body["messages"] += [message, {"role": "user", "content": "and?"}]
    assert (await here.post(CHAT, body)).status_code == 200


async def test_documents_and_trusted_templates_reach_the_prompt(tmp_path, artefacts) -> None:
    async with bench(tmp_path, artefacts, trust_request_chat_template=True) as made:
        template = "{% for document in documents %}[{{ document.title }}]{% endfor %}{{ messages[0].content }}"
        await made.post(CHAT, chat(chat_template=template, documents=[{"title": "t"}]))
        assert bytes(unpack_u32(made.scheduler.submits[-1].tokens).tolist()) == b"[t]hi"
        for broken in ("{% raw", "{{ nothing.at.all }}"):
            assert (await made.post(CHAT, chat(chat_template=broken))).status_code == 400
