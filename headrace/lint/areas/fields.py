"""Every request field by its class: what is taken, what is refused, and that neutral values mean absent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.lint.exchange import Exchange, accepted, is_path, refused, unsupported
from headrace.lint.facts import routes
from headrace.lint.session import Session
from headrace.lint.verdicts import NotOffered, Wrong, check, check_each, raise_all

OUT_OF_VOCABULARY = 99_999_999


@dataclass(frozen=True)
class Field:
    """A field that does what it says: values that are right and values that are a 400."""

    name: str
    good: tuple[Any, ...]
    bad: tuple[Any, ...]
    route: str = ""
    """Only there; empty is both."""
    beside: Mapping[str, Any] = field(default_factory=dict)
    """Fields that go with it."""


FLAG_BAD = ("yes", 2, [1])

HONOURED = (
    Field("max_tokens", (1, 3, None), (-2, 1.5, "5", True, {"a": 1})),
    Field("max_tokens", (), (0,), "chat"),
    Field("max_completion_tokens", (1, 3, None), (0, -2, 1.5, "5"), "chat", {"max_tokens": ...}),
    Field("min_tokens", (0, 1, None), (-1, 9, 1.5, "x")),
    Field("temperature", (0, 0.5, 1, 2, 2.0, None), (-0.1, 2.1, "hot", True, [1], 1e300)),
    Field("top_p", (0.1, 1, None), (-0.1, 1.1, "x", True)),
    Field("top_k", (-1, 0, 1, 40, None), (-2, 1.5, "x")),
    Field("min_p", (0, 0.1, 1, None), (-0.1, 1.1, "x")),
    Field("repetition_penalty", (1, 1.2, None), (0, -1, "x")),
    Field("frequency_penalty", (-2, 0, 2, None), (-2.1, 2.1, "x")),
    Field("presence_penalty", (-2, 0, 2, None), (-2.1, 2.1, "x")),
    Field("seed", (0, 7, 2**63 - 1, None), (1.5, "x", 2**64, {"a": 1})),
    Field("n", (1, 2, None), (0, -1, 129, 1.5, "x", True), beside={"temperature": 0.7}),
    Field(
        "stop", ("@@@", ["@@@"], ["a@@", "b@@", "c@@", "d@@"], [], None), ("", [""], 5, [5], ["x" * 300], ["@@@"] * 65)
    ),
    Field("stop_token_ids", ([1], [1, 2], [], None), ([-1], ["a"], [OUT_OF_VOCABULARY], "x", 5, [1.5])),
    Field("ignore_eos", (True, False, None), FLAG_BAD),
    Field("include_stop_str_in_output", (True, False, None), FLAG_BAD),
    Field("skip_special_tokens", (True, False, None), FLAG_BAD),
    Field("return_token_ids", (True, False, None), FLAG_BAD),
    Field("return_tokens_as_token_ids", (True, False, None), FLAG_BAD),
    Field("add_special_tokens", (True, False, None), FLAG_BAD),
    Field(
        "logit_bias",
        ({"1": 1}, {"1": -100, "2": 100}, {}, None),
        ({"AI": -100}, {"-1": 5}, {"1": 101}, {"1": "x"}, {str(OUT_OF_VOCABULARY): 1}, "x", {"1": 1e6}),
    ),
    Field("bad_words", (["zyx"], [], None), ([5], "zyx", 5, [""])),
    Field("allowed_token_ids", ([1, 2, 3], None), ([-1], ["x"], [OUT_OF_VOCABULARY], 5)),
    Field("prompt_logprobs", (1, None), (-2, "x", 10**9)),
    Field("priority", (-100, 0, 100, None), (-101, 101, 1.5, "x")),
    Field("timeout", (50, 50.5, None), (-1, "x", [1])),
    Field("request_id", ("lint-1", None), (5, "x" * 257, "a\nb")),
    Field("cache_salt", ("pepper", None), (5, ["x"])),
    Field("truncate_prompt_tokens", (4, -1, None), (-2, "x", 1.5)),
    Field("stream", (False, None), ("yes", 1, {"a": 1})),
    Field(
        "stream_options",
        ({"include_usage": True}, {"include_usage": False}, {}, None),
        ("x", 5, {"include_usage": "yes"}),
        beside={"stream": True},
    ),
    Field("logprobs", (True, False, None), ("yes", 5), "chat"),
    Field("top_logprobs", (0, 1, 20, None), (-1, 21, 10**9, 1.5, "x"), "chat", {"logprobs": True}),
    Field("logprobs", (0, 1, 5, None), (-2, 21, 10**9, 1.5, "x"), "completions"),
    Field("echo", (True, False, None), FLAG_BAD, "completions"),
    Field("add_generation_prompt", (True, False, None), FLAG_BAD, "chat"),
    Field("continue_final_message", (False, None), FLAG_BAD, "chat"),
    Field("chat_template_kwargs", ({}, {"zebra": 1}, None), ("x", 5), "chat"),
    Field("documents", ([{"title": "a", "text": "b"}], [], None), ("x", 5, [5]), "chat"),
)


def _honoured() -> dict[str, tuple[str, Field]]:
    cases: dict[str, tuple[str, Field]] = {}
    for route in routes():
        for entry in HONOURED:
            if entry.route in ("", route):
                name = f"{entry.name} on {route}"
                cases[name if name not in cases else f"{name}, 0"] = (route, entry)
    return cases


@check_each("2", "{case}: right values are taken, wrong ones are a 400 that names the field.", _honoured())
def honoured(session: Session, case: tuple[str, Field]) -> None:
    route, entry = case
    problems: list[Wrong] = []
    missing = ""
    for value in entry.good:
        exchange = session.ask(route, **{**entry.beside, "max_tokens": 4, **_also(entry), entry.name: value})
        try:
            accepted(exchange, entry.name)
        except Wrong as wrong:
            problems.append(Wrong(f"{value!r}: {wrong.why}", exchange))
        except NotOffered as reason:
            missing = str(reason)
    for value in entry.bad:
        exchange = session.ask(route, **{**entry.beside, "max_tokens": 4, **_also(entry), entry.name: value})
        if unsupported(exchange) and any(is_path(exchange.error.get("param"), other) for other in entry.beside):
            missing = str(exchange.error.get("message", ""))
        elif problem := _not_refused(exchange, entry.name):
            problems.append(Wrong(f"{str(value)[:40]!r}: {problem}", exchange))
    if missing and all(exchange_is_silent(problem) for problem in problems):
        raise NotOffered(missing)
    raise_all(problems)


def exchange_is_silent(problem: Wrong) -> bool:
    """Whether the server ignored the field openly, so that any value is taken."""
    return all("x-ignored-fields" in dict(exchange.reply.headers) for exchange in problem.exchanges)


def _also(entry: Field) -> dict[str, Any]:
    return {"max_tokens": ...} if entry.name == "max_completion_tokens" else {}


def _not_refused(exchange: Exchange, name: str) -> str:
    if exchange.status != 400:
        return f"answered {exchange.status} where 400 is right"
    error = exchange.error
    if not is_path(error.get("param"), name) and name not in str(error.get("message", "")):
        return f"neither param {error.get('param')!r} nor the message names {name}"
    return ""


INERT: Mapping[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "user": (("u-1", None), (5, {"a": 1})),
    "metadata": (({"a": "b"}, {}, None), ("x", 5)),
    "store": ((True, False, None), ("x",)),
    "service_tier": (("auto", "default", None), (5,)),
    "safety_identifier": (("s-1", None), (5,)),
    "prompt_cache_key": (("k", None), (5,)),
    "prediction": (({"type": "content", "content": "x"}, None), (5, "x")),
    "verbosity": (("low", None), (5,)),
}


@check_each(
    "2", "{case} changes no token: taken on both routes, typed, without effect.", {name: name for name in INERT}
)
def inert(session: Session, name: str) -> None:
    good, bad = INERT[name]
    for route in routes():
        plain = accepted(session.ask(route))
        for value in good:
            exchange = accepted(session.ask(route, **{name: value}))
            if _said(exchange) != _said(plain):
                session.facts.steady(session, route)
                raise Wrong(f"{name}={value!r} changes the answer", plain, exchange)
        for value in bad:
            refused(session.ask(route, **{name: value}), 400, param=name)


def _said(exchange: Exchange) -> list[Any]:
    return [choice.get("message", {}).get("content") or choice.get("text") for choice in exchange.json["choices"]]


@check("2", "service_tier is answered with default.")
def service_tier_answered(session: Session) -> None:
    exchange = accepted(session.chat(service_tier="auto"), "service_tier")
    if exchange.json.get("service_tier") != "default":
        raise Wrong(f"service_tier is {exchange.json.get('service_tier')!r}", exchange)


@check("2", "stream_options.include_obfuscation is taken and changes nothing.")
def include_obfuscation(session: Session) -> None:
    accepted(session.chat(stream=True, stream_options={"include_obfuscation": True}))


NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "audio": (None, {}),
    "modalities": (None, [], ["text"]),
    "web_search_options": (None, {}),
    "best_of": (None, 1),
    "use_beam_search": (None, False),
    "suffix": (None, ""),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "parallel_tool_calls": (None, True),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None, {}),
    "guided_json": (None,),
    "reasoning_effort": (None,),
    "include_reasoning": (None, True),
    "thinking_token_budget": (None,),
    "logit_bias": (None, {}),
    "stop": (None, []),
    "stop_token_ids": (None, []),
    "bad_words": (None, []),
    "documents": (None, []),
    "chat_template_kwargs": (None, {}),
    "metadata": (None, {}),
    "top_logprobs": (None,),
    "stream_options": (None,),
    "max_tokens": (None,),
    "seed": (None,),
}

COMPLETIONS_TOO = (
    "best_of",
    "use_beam_search",
    "suffix",
    "logit_bias",
    "stop",
    "stop_token_ids",
    "response_format",
    "seed",
)


@check_each("2", "{case}: null, [], {} and the documented default mean absent.", {name: name for name in NEUTRAL})
def neutral(session: Session, name: str) -> None:
    problems = []
    for route in routes():
        if route == "completions" and name not in COMPLETIONS_TOO:
            continue
        for value in NEUTRAL[name]:
            limits = {"max_tokens": ..., "max_completion_tokens": 4} if name == "max_tokens" and route == "chat" else {}
            exchange = session.ask(route, **{"max_tokens": 4, **limits, **({} if limits else {name: value})})
            if exchange.status != 200:
                problems.append(Wrong(f"{route}: {name}={value!r} answered {exchange.status}", exchange))
    raise_all(problems)


REFUSED: Mapping[str, tuple[str, Any]] = {
    "audio": ("chat", {"voice": "alloy", "format": "wav"}),
    "modalities": ("chat", ["text", "audio"]),
    "web_search_options": ("chat", {"search_context_size": "low"}),
    "best_of": ("completions", 2),
    "use_beam_search": ("completions", True),
    "suffix": ("completions", " and so on"),
}


@check_each(
    "2",
    "{case} beyond its neutral value is a 400 unsupported_parameter, not silence.",
    {name: name for name in REFUSED},
)
def refused_field(session: Session, name: str) -> None:
    route, value = REFUSED[name]
    exchange = session.ask(route, **{name: value})
    if exchange.status == 200 and name in ("best_of", "suffix", "use_beam_search"):
        raise NotOffered("taken; whether it is honoured cannot be seen")
    refused(exchange, 400, code="unsupported_parameter", param=name)


SYNONYMS: Mapping[str, tuple[str, str, Any, Any]] = {
    "n_predict": ("completions", "max_tokens", 3, 5),
    "repeat_penalty": ("completions", "repetition_penalty", 1.1, 1.2),
    "no_stop_trim": ("chat", "include_stop_str_in_output", True, False),
    "separate_reasoning": ("chat", "include_reasoning", True, False),
    "thinking_budget_tokens": ("chat", "thinking_token_budget", 5, 7),
}


@check_each(
    "2", "{case} is read as its synonym, and two different values are a 400.", {name: name for name in SYNONYMS}
)
def synonym(session: Session, name: str) -> None:
    route, canonical, value, other = SYNONYMS[name]
    exchange = accepted(session.ask(route, **{canonical: ..., name: value}), name)
    if canonical == "max_tokens" and exchange.json["usage"]["completion_tokens"] > value:
        raise Wrong("n_predict limits nothing", exchange)
    if session.ask(route, **{canonical: value, name: value}).status != 200:
        raise Wrong("the same value under both names is refused", session.last or exchange)
    refused(session.ask(route, **{canonical: value, name: other}), 400)


@check("2", "max_completion_tokens wins over max_tokens.")
def max_completion_tokens_wins(session: Session) -> None:
    exchange = accepted(session.chat(max_tokens=8, max_completion_tokens=2), "max_completion_tokens")
    if exchange.json["usage"]["completion_tokens"] > 2:
        raise Wrong("more than 2 tokens", exchange)


@check("2", "A completion without max_tokens has at most 16.")
def default_limit(session: Session) -> None:
    for value in (..., None, -1):
        exchange = accepted(session.complete(max_tokens=value))
        count = exchange.json["usage"]["completion_tokens"]
        if count > 16 or (count < 16 and exchange.json["choices"][0]["finish_reason"] == "length"):
            raise Wrong(f"{count} tokens with max_tokens={'absent' if value is ... else value}", exchange)


@check_each("2", "A seed repeats a sampled answer on {case}, and another seed changes it.", routes())
def seed_repeats(session: Session, route: str) -> None:
    session.facts.samples(session, route)
    fields: dict[str, Any] = {"temperature": 1.5, "max_tokens": 24}
    first, again = (accepted(session.ask(route, seed=7, **fields), "seed") for _ in range(2))
    if _said(first) != _said(again):
        raise Wrong("the same seed gives two answers", first, again)
    if all(_said(accepted(session.ask(route, seed=seed, **fields))) == _said(first) for seed in (8, 9, 10)):
        raise Wrong("four seeds give one answer", first)


@check_each("2", "top_k 1 and a tiny top_p are greedy at any temperature, on {case}.", routes())
def narrow_sampling(session: Session, route: str) -> None:
    session.facts.samples(session, route)
    session.facts.steady(session, route)
    greedy = accepted(session.ask(route, max_tokens=16))
    for narrow in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        exchange = accepted(session.ask(route, max_tokens=16, **{"temperature": 1.5, "seed": 3, **narrow}), *narrow)
        if _said(exchange) != _said(greedy):
            raise Wrong(f"{narrow} is not greedy", greedy, exchange)


@check("2", "logit_bias −100 keeps a token out, and allowed_token_ids all others.")
def token_masks(session: Session) -> None:
    session.facts.samples(session, "completions")
    chosen = accepted(session.complete(max_tokens=4, return_token_ids=True), "return_token_ids")
    ids = chosen.json["choices"][0].get("token_ids")
    if not isinstance(ids, list) or not ids:
        raise NotOffered("no token_ids in the answer")
    for masks in ({"logit_bias": {str(ids[0]): -100}}, {"allowed_token_ids": [ids[-1]], "ignore_eos": True}):
        exchange = session.complete(max_tokens=4, return_token_ids=True, **masks)
        if unsupported(exchange):
            continue
        now = accepted(exchange, *masks).json["choices"][0]["token_ids"]
        if "logit_bias" in masks and ids[0] in now:
            raise Wrong(f"token {ids[0]} came in spite of its bias", exchange)
        if "allowed_token_ids" in masks and set(now) != {ids[-1]}:
            raise Wrong(f"tokens {now} where only {ids[-1]} is allowed", exchange)


@check("2", "bad_words keep a word's tokens out.")
def bad_words(session: Session) -> None:
    session.facts.samples(session, "completions")
    plain = accepted(session.complete(max_tokens=24, return_token_ids=True), "return_token_ids")
    ids = plain.json["choices"][0].get("token_ids") or []
    for word in dict.fromkeys(_said(plain)[0].split()):
        banned = session.facts.tokens(session, f" {word}")
        if not _within(banned, ids):
            continue
        fields = {"bad_words": [word], "return_token_ids": True}
        exchange = accepted(session.complete(max_tokens=24, **fields), *fields)
        if _within(banned, exchange.json["choices"][0]["token_ids"]):
            raise Wrong(f"the tokens {banned} of {word!r} are in the answer", exchange)
        return
    raise NotOffered("the answer has no word that is known by its tokens")


def _within(part: list[int], ids: list[int]) -> bool:
    return any(ids[at : at + len(part)] == part for at in range(len(ids) - len(part) + 1))


@check_each("2", "min_tokens and ignore_eos hold on {case}.", routes())
def at_least(session: Session, route: str) -> None:
    exchange = accepted(session.ask(route, max_tokens=80, min_tokens=70), "min_tokens")
    if exchange.json["usage"]["completion_tokens"] < 70:
        raise Wrong("fewer than min_tokens", exchange)
    exchange = accepted(session.ask(route, max_tokens=80, ignore_eos=True), "ignore_eos")
    choice = exchange.json["choices"][0]
    if exchange.json["usage"]["completion_tokens"] != 80 or choice["finish_reason"] != "length":
        raise Wrong("ignore_eos does not run to the limit", exchange)


@check("2", "A total deadline that is too short is a 504, or ends the answer as a timeout.")
def short_timeout(session: Session) -> None:
    exchange = session.chat(timeout=0.001, max_tokens=400, ignore_eos=True)
    if exchange.status == 504:
        if exchange.reply.header("x-should-retry") != "false":
            raise Wrong("504 without x-should-retry: false", exchange)
        return
    choice = accepted(exchange, "timeout").json["choices"][0]
    if choice.get("stop_reason") != "timeout" or choice["finish_reason"] != "length":
        raise Wrong("a deadline of a millisecond has no effect", exchange)
