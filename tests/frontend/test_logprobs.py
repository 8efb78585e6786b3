"""Logprobs in both shapes, echo, and token ids: what exactly is told."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.frontend import Frame
from protocol.packing import unpack_u32
from tests.frontend.fake_scheduler import Script, score_of
from tests.frontend.folding import both, whole
from tests.frontend.harness import CHAT, COMPLETIONS, Bench, chat, completion, parse_events

EOS = 258


def told(value: float) -> float:
    return value if value > -9999 else -9999.0


async def content_of(here: Bench, text: str | bytes, **fields: Any) -> list[dict[str, Any]]:
    here.scheduler.script = lambda submit: Script.text(text)
    answer = await both(here, CHAT, chat(logprobs=True, **fields))
    return answer[0]["logprobs"].get("content", [])


async def test_a_chat_entry_has_name_value_bytes_and_alternatives(here: Bench) -> None:
    entries = await content_of(here, "abcd", top_logprobs=2)
    for position, (entry, letter) in enumerate(zip(entries, "abcd", strict=True)):
        _, ((_, value), *others) = score_of(ord(letter), position, 2)
        assert (entry["token"], entry["bytes"]) == (letter, [ord(letter)])
        assert entry["logprob"] == told(value)
        assert [top["logprob"] for top in entry["top_logprobs"]] == [told(other) for _, other in others]
        assert all(list(top) == ["token", "logprob", "bytes"] for top in entry["top_logprobs"])
    assert entries[3]["logprob"] == -9999.0


async def test_without_alternatives_the_list_is_empty_and_without_tokens_so_are_the_entries(here: Bench) -> None:
    assert all(entry["top_logprobs"] == [] for entry in await content_of(here, "ab"))
    here.scheduler.script = lambda submit: Script.text("")
    body = (await here.post(CHAT, chat(logprobs=True))).json()
    assert body["choices"][0]["logprobs"] == {"content": [], "refusal": None}


async def test_the_bytes_of_split_characters_are_exact(here: Bench) -> None:
    text = "客👍é"
    entries = await content_of(here, text)
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == text
    assert all(entry["token"] == "\ufffd" for entry in entries)


@pytest.mark.parametrize(("text", "fields", "shown"), [
    ("ab", {}, "ab"),
    ("abXc", {"stop_token_ids": [ord("X")]}, "ab"),
    ("abXc", {"stop_token_ids": [ord("X")], "include_stop_str_in_output": True}, "abX"),
    ("ab世c", {"stop": "世"}, "ab"),
    ("ab世c", {"stop": "世", "include_stop_str_in_output": True}, "ab世"),
    ("abST", {"stop": "STOP"}, "abST"),
    ("abcdef", {"max_tokens": 3}, "abc"),
])  # fmt: skip
async def test_entries_are_those_of_the_text_and_of_no_stop(here: Bench, text, fields, shown) -> None:
    entries = await content_of(here, text, **fields)
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == shown


async def test_the_four_arrays_of_a_completion(here: Bench) -> None:
    here.scheduler.script = lambda submit: Script.text("aé")
    arrays = (await both(here, COMPLETIONS, completion(logprobs=1)))[0]["logprobs"]
    assert arrays["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9"]
    assert arrays["text_offset"] == [0, 1, 1]
    assert arrays["token_logprobs"] == [-0.125, -8.0625, -8.125]
    assert arrays["top_logprobs"][0] == {"a": -0.125}
    assert set(arrays["top_logprobs"][1]) == {"bytes:\\xc4", "bytes:\\xc3"}
    arrays = (await both(here, COMPLETIONS, completion(logprobs=0)))[0]["logprobs"]
    assert arrays["top_logprobs"][0] == {"a": -0.125}


@pytest.mark.parametrize("cuts", [(), (1, 2, 3), (2,)])
async def test_echo_scores_the_prompt_and_max_tokens_0_nothing_else(here: Bench, cuts: tuple[int, ...]) -> None:
    here.scheduler.script = lambda submit: Script.text("xy", prompt_cuts=cuts)
    body = completion("hé!", echo=True, logprobs=1)
    answer = await both(here, COMPLETIONS, {**body, "max_tokens": 1})
    arrays = answer[0]["logprobs"]
    assert answer[0]["text"] == "hé!x" and arrays["text_offset"] == [0, 1, 1, 2, 3]
    assert arrays["tokens"] == ["h", "bytes:\\xc3", "bytes:\\xa9", "!", "x"]
    assert arrays["token_logprobs"][0] is None and None not in arrays["token_logprobs"][1:]
    assert arrays["top_logprobs"][0] is None
    scoring = await both(here, COMPLETIONS, {**body, "max_tokens": 0})
    assert scoring[0]["text"] == "hé!" and scoring[0]["finish_reason"] == "length"
    assert {name: values[:-1] for name, values in arrays.items()} == scoring[0]["logprobs"]
    assert scoring["usage"]["completion_tokens"] == 0


async def test_each_choice_echoes_its_own_prompt(here: Bench) -> None:
    here.scheduler.script = lambda submit: Script.text("!")
    body = completion(["ab", "c"], n=2, echo=True, logprobs=0, max_tokens=1)
    answer = await both(here, COMPLETIONS, body)
    assert [answer[at]["text"] for at in range(4)] == ["ab!", "ab!", "c!", "c!"]
    assert [len(answer[at]["logprobs"]["tokens"]) for at in range(4)] == [3, 3, 2, 2]
    assert answer["usage"]["prompt_tokens"] == 3


async def test_prompt_logprobs_are_told_by_token_id_with_ranks(here: Bench) -> None:
    here.scheduler.script = lambda submit: Script.text("x", prompt_cuts=(2,))
    scores = (await both(here, COMPLETIONS, completion("abc", prompt_logprobs=1)))[0]["prompt_logprobs"]
    assert scores[0] is None and len(scores) == 3
    assert scores[1][str(ord("b"))] == {"logprob": -8.0625, "rank": 30, "decoded_token": "b"}
    assert scores[1][str(ord("c"))] == {"logprob": -0.25, "rank": 1, "decoded_token": "c"}
    answer = await both(here, CHAT, chat(prompt_logprobs=0, n=2))
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]


async def test_prompt_logprobs_that_never_come_are_the_engines_error(here: Bench) -> None:
    here.scheduler.script = lambda submit: Script.text("x", scores_prompt=False)
    response = await here.post(COMPLETIONS, completion("abc", prompt_logprobs=1))
    assert response.status_code == 500 and response.json()["error"]["code"] == "engine_error"
    response = await here.post(COMPLETIONS, completion("abc", prompt_logprobs=1, stream=True))
    if response.status_code == 200:  # a token had come before the end
        events = parse_events(response.content)
        assert [event["error"]["code"] for event in events[:-1]] == ["engine_error"] and events[-1] == "[DONE]"
    else:
        assert response.status_code == 500 and response.json()["error"]["code"] == "engine_error"


async def test_tokens_can_be_named_by_their_ids(here: Bench) -> None:
    here.scheduler.script = lambda submit: Script.text("ab")
    options = {"return_tokens_as_token_ids": True}
    entries = (await both(here, CHAT, chat(logprobs=True, top_logprobs=1, **options)))[0]["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == ["token_id:97", "token_id:98"]
    assert entries[1]["top_logprobs"][0]["token"] == "token_id:99" and entries[1]["bytes"] == [98]
    arrays = (await both(here, COMPLETIONS, completion(logprobs=1, **options)))[0]["logprobs"]
    assert arrays["tokens"] == ["token_id:97", "token_id:98"]


async def test_token_ids_are_those_of_the_usage_and_of_the_prompt(here: Bench) -> None:
    here.scheduler.script = lambda submit: Script.text("one STOP two", steps=(3,))
    for stop, count in (({}, 13), ({"stop": "STOP"}, 8)):
        answer = await both(here, CHAT, chat(return_token_ids=True, **stop))
        assert answer[0]["token_ids"] == [*b"one STOP two", EOS][:count]
        assert answer["prompt_token_ids"] == unpack_u32(here.scheduler.submits[-1].tokens).tolist()
        answer = await both(here, COMPLETIONS, completion(["ab", "c"], return_token_ids=True, **stop))
        assert [answer[at]["prompt_token_ids"] for at in (0, 1)] == [[*b"ab"], [*b"c"]]


async def test_special_tokens_are_shown_on_request_and_counted_always(here: Bench) -> None:
    here.scheduler.script = lambda submit: Script([*b"a", 257, *b"b", EOS])
    answer = await both(here, CHAT, chat(logprobs=True))
    assert answer[0]["text"] == "ab"
    entries = answer[0]["logprobs"]["content"]
    assert [(entry["token"], bytes(entry["bytes"])) for entry in entries][1] == ("<|im_start|>", b"")
    answer = await both(here, CHAT, chat(logprobs=True, skip_special_tokens=False))
    assert answer[0]["text"] == "a<|im_start|>b"
    assert bytes(b for entry in answer[0]["logprobs"]["content"] for b in entry["bytes"]) == b"a<|im_start|>b"


@pytest.mark.parametrize("split", range(1, 4))
@pytest.mark.parametrize("path_fields", [{}, {"logprobs": 0}])
async def test_a_character_that_the_prompt_began_is_whole_in_the_answer(here: Bench, split, path_fields) -> None:
    data = "x👍".encode()
    prompt, rest = list(data[: 1 + split]), [*data[1 + split :], *b"y", EOS]
    here.scheduler.script = lambda submit: Script(rest)
    assert (await both(here, COMPLETIONS, completion(prompt, **path_fields)))[0]["text"] == "👍y"
    assert (await both(here, COMPLETIONS, completion(prompt, echo=True, **path_fields)))[0]["text"] == "x👍y"
    here.scheduler.script = lambda submit: Script([*b"y", EOS])
    assert (await both(here, COMPLETIONS, completion(prompt, **path_fields)))[0]["text"] == "y"
    assert (await both(here, COMPLETIONS, completion(prompt, echo=True, **path_fields)))[0]["text"] == "x\ufffdy"


async def test_logprobs_survive_a_new_session_and_a_lost_frame(here: Bench) -> None:
    text = "abcdefghij"
    here.scheduler.script = lambda submit: Script.text(text)
    wanted = await both(here, CHAT, chat(logprobs=True, top_logprobs=1))
    here.scheduler.script = lambda submit: Script.text(text, skip_frame_at=4, steps=(2,))
    assert (await whole(here, CHAT, chat(logprobs=True, top_logprobs=1)))[0]["logprobs"]["content"] == (
        wanted[0]["logprobs"]["content"]
    )


async def test_records_of_the_wrong_length_are_no_frame(here: Bench) -> None:
    here.scheduler.script = lambda submit: Script.text("ab")
    before = here.frontend.client.statistics().frames_malformed
    here.scheduler.broadcast(Frame("group-0", 1, logprobs=b"1234"))
    await here.until_here(lambda: here.frontend.client.statistics().frames_malformed == before + 1, "counted")
    assert (await both(here, CHAT, chat(logprobs=True)))[0]["text"] == "ab"
