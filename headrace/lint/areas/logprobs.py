"""Log-probabilities in both shapes."""

from __future__ import annotations

import math
from typing import Any

from headrace.lint import shapes
from headrace.lint.answers import Answer, Choice, answer_of
from headrace.lint.exchange import accepted, refused
from headrace.lint.session import BEGINNING, Session
from headrace.lint.verdicts import NotOffered, Wrong, check, check_each

TOPS = {"none": None, "0": 0, "1": 1, "5": 5, "20": 20}
WARM_TOLERANCE = 1e-3
LONG_PROMPT = "One, two, three, four, five, six, seven, eight, nine, ten. " * 6


def _entries(answer: Answer) -> list[dict[str, Any]]:
    entries = answer.choices[0].logprobs
    if entries is None:
        raise Wrong("logprobs are null though asked for", answer.exchange)
    return entries


@check_each("6", "Chat logprobs with top_logprobs {case} have token, logprob, bytes and so many alternatives.", TOPS)
def chat_shape(session: Session, top: int | None) -> None:
    fields = {} if top is None else {"top_logprobs": top}
    for stream in (False, True):
        answer = answer_of(session.chat(logprobs=True, stream=stream, **fields), "logprobs", "top_logprobs")
        for entry in _entries(answer):
            if problem := shapes.first(shapes.logprob_problems(entry, top or 0)):
                raise Wrong(problem, answer.exchange)


@check("6", "There is one entry per counted token, the ending one excepted.")
def one_per_token(session: Session) -> None:
    for limit in (1, 2, 5, 8, 40):
        answer = answer_of(session.chat(logprobs=True, max_tokens=limit), "logprobs")
        count, entries = answer.tokens(), len(_entries(answer))
        right = (count,) if answer.finish_reason == "length" else (count, count - 1)
        if entries not in right:
            raise Wrong(f"{entries} entries of {count} tokens, finish_reason {answer.finish_reason!r}", answer.exchange)


@check("6", "The bytes of all entries are the text.")
def bytes_are_the_text(session: Session) -> None:
    for content in ("Count from one to ten.", "Say: 🦦👩‍🚀客单价é"):
        messages = [{"role": "user", "content": content}]
        for stream in (False, True):
            answer = answer_of(session.chat(messages=messages, logprobs=True, max_tokens=24, stream=stream), "logprobs")
            lists = [entry.get("bytes") for entry in _entries(answer)]
            if any(data is None for data in lists):
                raise NotOffered("bytes are null")
            joined = bytes(byte for data in lists if data is not None for byte in data)
            if joined.decode("utf-8", "replace") != answer.text:
                raise Wrong(f"the bytes are {joined[:80]!r}", answer.exchange)


@check("6", "A greedy token is the likeliest, and stands first among its alternatives.")
def greedy_is_first(session: Session) -> None:
    session.facts.samples(session, "chat")
    answer = answer_of(session.chat(logprobs=True, top_logprobs=2, repetition_penalty=1), "logprobs", "top_logprobs")
    for entry in _entries(answer):
        top = entry["top_logprobs"]
        if entry["logprob"] < top[0]["logprob"] - 1e-4:
            raise Wrong(f"token {entry['token']!r} is not the likeliest", answer.exchange)


@check("6", "top_logprobs hold the chosen token with the same value, when it is among them.")
def same_value(session: Session) -> None:
    answer = answer_of(session.chat(logprobs=True, top_logprobs=5), "logprobs", "top_logprobs")
    for entry in _entries(answer):
        for top in entry["top_logprobs"]:
            if top["token"] == entry["token"] and top["bytes"] == entry["bytes"]:
                if not math.isclose(top["logprob"], entry["logprob"], abs_tol=1e-4):
                    raise Wrong(f"{entry['token']!r} is {entry['logprob']} and {top['logprob']}", answer.exchange)
                break


@check("6", "Asking for logprobs does not change the text.")
def text_unchanged(session: Session) -> None:
    session.facts.steady(session, "chat")
    plain = answer_of(session.chat(max_tokens=24))
    with_them = answer_of(session.chat(max_tokens=24, logprobs=True, top_logprobs=3), "logprobs")
    if plain.text != with_them.text:
        raise Wrong("another text with logprobs", plain.exchange, with_them.exchange)
    if plain.choices[0].logprobs is not None:
        raise Wrong("logprobs without asking", plain.exchange)


@check("6", "top_logprobs without logprobs, and beyond 0…20, are a 400.")
def chat_bounds(session: Session) -> None:
    accepted(session.chat(logprobs=True), "logprobs")
    for fields in ({"top_logprobs": 3}, {"logprobs": False, "top_logprobs": 3}):
        refused(session.chat(**fields), 400, param="top_logprobs")
    for top in (21, -1, 1_000_000_000):
        refused(session.chat(logprobs=True, top_logprobs=top), 400, param="top_logprobs")


def _arrays(answer: Answer) -> dict[str, list[Any]]:
    arrays = answer.choices[0].arrays
    if arrays is None:
        raise Wrong("logprobs are null though asked for", answer.exchange)
    return arrays


@check_each("6", "Completions logprobs {case} are four arrays of one length.", {"0": 0, "1": 1, "5": 5, "20": 20})
def text_shape(session: Session, top: int) -> None:
    for stream in (False, True):
        exchange = session.complete(logprobs=top, stream=stream)
        if exchange.status == 400 and top > 5:
            raise NotOffered(str(exchange.error.get("message", ""))[:120])
        answer = answer_of(exchange, "logprobs")
        arrays = _arrays(answer)
        lengths = {name: len(values) for name, values in arrays.items() if name != "top_logprobs" or top}
        if len(set(lengths.values())) != 1 or not lengths["tokens"]:
            raise Wrong(f"lengths {lengths}", answer.exchange)
        for value in arrays["token_logprobs"]:
            if problem := shapes.first(shapes.value_problems(value)):
                raise Wrong(problem, answer.exchange)
        for alternatives in arrays["top_logprobs"] if top else ():
            # Tokens that look alike share a key, so there may be fewer; the chosen one may be one more.
            if not isinstance(alternatives, dict) or not 1 <= len(alternatives) <= top + 1:
                raise Wrong(f"alternatives {alternatives!r}"[:200], answer.exchange)


@check("6", "text_offset says where each token begins in the text.")
def offsets(session: Session) -> None:
    for fields in ({}, {"echo": True}):
        answer = answer_of(session.complete(logprobs=1, max_tokens=16, **fields), "logprobs", "echo")
        arrays = _arrays(answer)
        starts = arrays["text_offset"]
        if starts != sorted(starts) or starts[0] != 0:
            raise Wrong(f"text_offset is {starts}", answer.exchange)
        for start, token in zip(starts, arrays["tokens"], strict=True):
            plain = "\ufffd" not in token and not token.startswith(("bytes:", "<", "\\x"))
            if plain and answer.text[start : start + len(token)] not in (token, ""):
                raise Wrong(f"{token!r} is not at {start}", answer.exchange)


@check("6", "echo with logprobs scores the prompt: nothing for its first token, one value for each other.")
def echo_scores(session: Session) -> None:
    for limit in (0, 1):
        answer = answer_of(session.complete(echo=True, logprobs=1, max_tokens=limit), "echo", "logprobs")
        values = _arrays(answer)["token_logprobs"]
        count = answer.tokens("prompt_tokens")
        if len(values) not in (count + answer.tokens(), count + max(0, answer.tokens() - 1)):
            raise Wrong(f"{len(values)} values for {count} + {answer.tokens()} tokens", answer.exchange)
        if values[0] is not None or any(value is None for value in values[1:]):
            raise Wrong(f"values are {values}"[:200], answer.exchange)


@check("6", "Scores of a prompt are the same with a cold and a warm prefix cache.")
def cold_and_warm(session: Session) -> None:
    fields: dict[str, Any] = {"prompt": LONG_PROMPT, "echo": True, "logprobs": 1, "max_tokens": 1}
    first, *others = [answer_of(session.complete(**fields), "echo", "logprobs") for _ in range(3)]
    for other in others:
        left, right = _arrays(first)["token_logprobs"], _arrays(other)["token_logprobs"]
        if len(left) != len(right) or not all(map(_same, left, right)):
            raise Wrong("other scores the second time", first.exchange, other.exchange)


@check("6", "prompt_logprobs has one entry per prompt token, the first null, cold and warm.")
def prompt_logprobs(session: Session) -> None:
    for route, fields in (("chat", {}), ("completions", {"prompt": LONG_PROMPT})):
        seen = []
        for _ in range(2):
            exchange = accepted(session.ask(route, prompt_logprobs=1, **fields), "prompt_logprobs")
            values = exchange.json.get("prompt_logprobs") or exchange.json["choices"][0].get("prompt_logprobs")
            count = exchange.json["usage"]["prompt_tokens"]
            if not isinstance(values, list) or len(values) != count or values[0] is not None or None in values[1:]:
                raise Wrong(f"prompt_logprobs of {count} tokens: {str(values)[:80]}", exchange)
            seen.append([sorted(entry) if isinstance(entry, dict) else entry for entry in values])
        if seen[0] != seen[1]:
            raise Wrong("other tokens the second time", *([session.last] if session.last else []))


@check("6", "return_tokens_as_token_ids names tokens token_id:N.")
def names_as_ids(session: Session) -> None:
    options = {"return_tokens_as_token_ids": True}
    chat = answer_of(session.chat(logprobs=True, top_logprobs=1, **options), "logprobs", *options)
    names = [entry["token"] for entry in _entries(chat)]
    text = answer_of(session.complete(logprobs=1, **options), "logprobs", *options)
    for answer, found in ((chat, names), (text, _arrays(text)["tokens"])):
        if not all(str(name).startswith("token_id:") and str(name)[9:].isdigit() for name in found):
            raise Wrong(f"tokens are {found}"[:200], answer.exchange)


@check_each(
    "2",
    "return_token_ids gives the ids of answer and prompt on {case}.",
    {"chat": "chat", "completions": "completions"},
)
def token_ids(session: Session, route: str) -> None:
    exchange = session.ask(route, return_token_ids=True)
    choice: Choice = answer_of(exchange, "return_token_ids").choices[0]
    count = exchange.json["usage"]["completion_tokens"]
    if choice.token_ids is None or not count - 1 <= len(choice.token_ids) <= count:
        raise Wrong(f"token_ids {choice.token_ids} of {count} tokens", exchange)
    prompt = exchange.json.get("prompt_token_ids") or exchange.json["choices"][0].get("prompt_token_ids")
    if not isinstance(prompt, list) or len(prompt) != exchange.json["usage"]["prompt_tokens"]:
        raise Wrong("prompt_token_ids are not the prompt's", exchange)
    if route == "completions" and prompt[-1] not in session.facts.tokens(session, BEGINNING):
        raise Wrong("prompt_token_ids are not the prompt's", exchange)


def _same(one: object, other: object) -> bool:
    if isinstance(one, float | int) and isinstance(other, float | int):
        return math.isclose(one, other, abs_tol=WARM_TOLERANCE)
    return one == other
