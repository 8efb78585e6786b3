"""Answers as a client ends up with them, from either transport, and what every stream must be on its raw bytes."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.frontend.harness import CHAT, SECONDS, Bench, parse_events

ARRAYS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
CHUNK_KEYS = ["id", "object", "created", "model", "system_fingerprint", "choices"]


def whole_answer(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """What of a whole answer must be equal in a stream."""
    answer: dict[str, Any] = {"usage": body["usage"], "prompt_logprobs": body.get("prompt_logprobs")}
    answer["prompt_token_ids"] = body.get("prompt_token_ids")
    for at, choice in enumerate(body["choices"]):
        assert choice["index"] == at
        said = choice["message"]["content"] if path == CHAT else choice["text"]
        answer[at] = {**_told(choice), "text": said, "logprobs": choice["logprobs"] or {}}
    return answer


def folded_answer(path: str, raw: bytes, *, usage: bool = True) -> dict[str, Any]:
    """The same from a stream's raw bytes, which are checked on the way."""
    chunks = lint(path, raw, usage=usage)
    answer: dict[str, Any] = {"usage": chunks.pop()["usage"] if usage else None}
    answer["prompt_logprobs"] = chunks[0].get("prompt_logprobs")
    answer["prompt_token_ids"] = chunks[0].get("prompt_token_ids")
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            _add(path, choices.setdefault(choice["index"], {"text": "", "logprobs": {}}), choice)
    answer.update(sorted(choices.items()))
    return answer


def _told(choice: dict[str, Any]) -> dict[str, Any]:
    names = ("finish_reason", "stop_reason", "token_ids", "prompt_token_ids", "prompt_logprobs")
    return {name: choice.get(name) for name in names}


def _add(path: str, fold: dict[str, Any], choice: dict[str, Any]) -> None:
    fold["text"] += choice["delta"].get("content", "") if path == CHAT else choice["text"]
    told = _told(choice)
    ids = told.pop("token_ids")
    fold["token_ids"] = fold.get("token_ids") if ids is None else [*(fold.get("token_ids") or []), *ids]
    fold.update({name: value for name, value in told.items() if value is not None or name not in fold})
    for name, values in (choice["logprobs"] or {}).items():
        fold["logprobs"][name] = None if values is None else [*fold["logprobs"].get(name, []), *values]


def lint(path: str, raw: bytes, *, usage: bool, continuous: bool = False) -> list[Any]:
    """Check framing, envelopes and order; returns the chunks. Comments are taken out first."""
    raw.decode("utf-8")
    events = parse_events(b"".join(f + b"\n\n" for f in raw.split(b"\n\n")[:-1] if not f.startswith(b": ")))
    assert events.pop() == "[DONE]" and "[DONE]" not in events
    for name in ("id", "created", "model", "system_fingerprint", "object"):
        assert len({chunk[name] for chunk in events}) == 1, name
    assert events[0]["object"] == ("chat.completion.chunk" if path == CHAT else "text_completion")
    assert all(list(chunk)[:6] == CHUNK_KEYS for chunk in events)
    last = events[-1]
    assert (last["choices"] == [] and "usage" in last) == usage
    ordinary = events[:-1] if usage else events
    assert all(len(chunk["choices"]) == 1 for chunk in ordinary)
    assert all(("usage" in chunk) == continuous for chunk in ordinary)
    _lint_choices(path, [chunk["choices"][0] for chunk in ordinary])
    return events


def _lint_choices(path: str, choices: list[dict[str, Any]]) -> None:
    ended: set[int] = set()
    opened: list[int] = []
    for choice in choices:
        index = choice["index"]
        assert index not in ended, "a chunk after the finish"
        assert "logprobs" in choice and "finish_reason" in choice
        assert ("stop_reason" in choice) == (choice["finish_reason"] is not None)
        if choice["finish_reason"] is not None:
            ended.add(index)
        first = index not in opened
        if first:
            opened.append(index)
        if path == CHAT:
            role = choice["delta"].get("role")
            assert (role == "assistant" and choice["delta"]["content"] == "") if first else role is None
            assert first or choice["delta"].get("content", "x") != ""
            assert first or choice["finish_reason"] is not None or choice["delta"]["content"]
        else:
            assert choice["finish_reason"] is not None or choice["text"] or choice["logprobs"]
    assert ended == set(opened) and sorted(opened) == list(range(len(opened)))
    if path == CHAT:
        assert opened == sorted(opened)
        assert [choice["index"] for choice in choices[: len(opened)]] == opened


async def whole(bench: Bench, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """A whole answer."""
    response = await bench.post(path, body)
    assert response.status_code == 200, response.text
    return whole_answer(path, response.json())


async def streamed(bench: Bench, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The same request streamed."""
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    response = await bench.post(path, body)
    assert response.status_code == 200, response.text
    return folded_answer(path, response.content)


async def both(bench: Bench, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The answer, which is checked to be the same in both transports."""
    async with asyncio.timeout(SECONDS):
        one, other = await whole(bench, path, body), await streamed(bench, path, body)
    for answer in (one, other):
        for part in answer.values():
            if isinstance(part, dict) and part.get("logprobs") is not None:
                # A stream without a single entry says null in every chunk; a whole answer has empty lists.
                part["logprobs"] = {name: value for name, value in part["logprobs"].items() if value}
    assert one == other
    return one
