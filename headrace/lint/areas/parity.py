"""One answer, two transports: the whole answer is the fold of the stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.lint.answers import answer_of, differences
from headrace.lint.facts import REFERENCE_TOKENS, routes
from headrace.lint.session import Session
from headrace.lint.verdicts import NotOffered, Wrong, check_each

VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "long": {"max_tokens": 90},
    "to its own end": {"max_tokens": 120, "stop": ["five", "5"]},
    "sampled with a seed": {"temperature": 1.2, "seed": 11, "max_tokens": 24},
    "hot with a seed": {"temperature": 2.0, "seed": 5, "max_tokens": 40},
    "n=3": {"n": 3, "temperature": 1.0, "seed": 3, "max_tokens": 16},
    "penalties": {"frequency_penalty": 1.5, "presence_penalty": 1.0, "max_tokens": 24},
    "min_tokens": {"min_tokens": 20, "max_tokens": 24},
    "ignore_eos": {"ignore_eos": True, "max_tokens": 90},
    "stop kept": {"stop": ["e"], "include_stop_str_in_output": True, "max_tokens": 40},
    "several stops": {"stop": ["e ", "ee", "n", "ne"], "max_tokens": 40},
    "special tokens shown": {"skip_special_tokens": False, "max_tokens": 80},
    "token ids": {"return_token_ids": True},
    "emoji bytes": {"messages": [{"role": "user", "content": "Repeat: 🦦👩‍🚀é客"}], "max_tokens": 24},
}

CHAT_ONLY: Mapping[str, Mapping[str, Any]] = {
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "logprobs with a stop": {"logprobs": True, "stop": ["e"], "max_tokens": 40},
    "logprobs, n=2": {"logprobs": True, "n": 2, "temperature": 1.0, "seed": 4},
    "token names as ids": {"logprobs": True, "return_tokens_as_token_ids": True},
}

TEXT_ONLY: Mapping[str, Mapping[str, Any]] = {
    "logprobs": {"logprobs": 2},
    "logprobs with a stop": {"logprobs": 1, "stop": ["e"], "max_tokens": 40},
    "echo": {"echo": True},
    "echo with logprobs": {"echo": True, "logprobs": 1},
    "echo alone": {"echo": True, "logprobs": 1, "max_tokens": 0},
    "two prompts": {"prompt": ["One, two,", "The sky is"]},
    "two prompts, n=2": {"prompt": ["One, two,", "The sky is"], "n": 2, "temperature": 1.0, "seed": 4},
}


def _cases() -> dict[str, tuple[str, Mapping[str, Any]]]:
    cases: dict[str, tuple[str, Mapping[str, Any]]] = {}
    for route in routes():
        own = CHAT_ONLY if route == "chat" else TEXT_ONLY
        for name, fields in {**VARIANTS, **own}.items():
            if route == "chat" or "messages" not in fields:
                cases[f"{route}, {name}"] = (route, fields)
    return cases


@check_each("3", "{case}: text, finish, logprobs and usage are the same streamed and whole.", _cases())
def same_in_both(session: Session, case: tuple[str, Mapping[str, Any]]) -> None:
    route, fields = case
    whole = answer_of(session.ask(route, **fields), *fields)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    streamed = answer_of(session.ask(route, **fields, **options), *fields)
    if not (found := differences(whole, streamed)):
        return
    session.facts.steady(session, route)
    for _ in range(2):
        if differences(whole, answer_of(session.ask(route, **fields), *fields)):
            raise NotOffered("the same request twice gives two answers, so transports cannot be compared")
    raise Wrong("; ".join(found[:3]), whole.exchange, streamed.exchange)


@check_each("3", "Cut at any number of tokens, {case} gives the same text and count in both transports.", routes())
def cut_anywhere(session: Session, route: str) -> None:
    longest = session.facts.reference(session, route)
    session.facts.steady(session, route)
    for limit in (1, 2, 3, 4, 5, 6, 7, 9, 12, 15, 18, 21, 25, REFERENCE_TOKENS - 1):
        whole = answer_of(session.ask(route, max_tokens=limit))
        options = {"stream": True, "stream_options": {"include_usage": True}}
        streamed = answer_of(session.ask(route, max_tokens=limit, **options))
        if found := differences(whole, streamed):
            raise Wrong(f"max_tokens {limit}: {found[0]}", whole.exchange, streamed.exchange)
        if not longest.text.startswith(whole.text.rstrip("\ufffd")):
            raise Wrong(
                f"max_tokens {limit} is not the beginning of the longer answer", longest.exchange, whole.exchange
            )
        if whole.finish_reason == "length" and whole.tokens() != limit:
            raise Wrong(f"length after {whole.tokens()} of {limit} tokens", whole.exchange)
