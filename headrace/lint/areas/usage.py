"""What is counted."""

from __future__ import annotations

import secrets
from typing import Any

from headrace.lint.answers import answer_of
from headrace.lint.exchange import accepted
from headrace.lint.facts import routes, tokenize
from headrace.lint.session import Session
from headrace.lint.verdicts import NotOffered, Wrong, check, check_each

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Count to five. 🦦"}]


@check("4", "prompt_tokens of a chat is what tokenize and render count.")
def counted_as_tokenized(session: Session) -> None:
    counted = accepted(tokenize(session, messages=MESSAGES))
    exchange = accepted(session.chat(messages=MESSAGES))
    if exchange.json["usage"]["prompt_tokens"] != counted.json["count"]:
        raise Wrong("prompt_tokens is not the count of tokenize", counted, exchange)
    body = {"model": session.target.model, "messages": MESSAGES}
    rendered = session.post("/v1/chat/completions/render", body)
    if rendered.status == 200 and str(counted.json["count"]).encode() not in rendered.reply.body:
        raise Wrong("render has another count", counted, rendered)


@check("4", "prompt_tokens of a completion is what tokenize counts.")
def prompt_counted(session: Session) -> None:
    for prompt in ("One, two, three.", "🦦 客单价", " "):
        counted = accepted(tokenize(session, prompt=prompt))
        exchange = accepted(session.complete(prompt=prompt))
        if exchange.json["usage"]["prompt_tokens"] != counted.json["count"]:
            raise Wrong("prompt_tokens is not the count of tokenize", counted, exchange)


@check_each("4", "completion_tokens is the limit when the limit cut, on {case}.", routes())
def counted_to_the_limit(session: Session, route: str) -> None:
    for limit in (1, 2, 3, 7, 16):
        for stream in (False, True):
            options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
            answer = answer_of(session.ask(route, max_tokens=limit, **options))
            right = answer.tokens() == limit if answer.finish_reason == "length" else answer.tokens() <= limit
            if not right:
                raise Wrong(f"{answer.tokens()} tokens, {answer.finish_reason!r}, limit {limit}", answer.exchange)


@check_each(
    "4",
    "completion_tokens counts up to the token that completes a stop string, alike in both transports, on {case}.",
    routes(),
)
def counted_to_the_stop(session: Session, route: str) -> None:
    session.facts.steady(session, route)
    whole = session.facts.reference(session, route)
    stop = whole.text[len(whole.text) // 2 :][:3]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    counts = [answer_of(session.ask(route, max_tokens=40, stop=[stop], **extra)).tokens() for extra in ({}, options)]
    if counts[0] != counts[1]:
        raise Wrong(f"{counts[0]} tokens whole, {counts[1]} streamed", *([session.last] if session.last else []))
    at = whole.text.index(stop) + len(stop)
    # The same text, cut by count: the fewest tokens whose text holds the stop string are those that are counted.
    shorter = answer_of(session.ask(route, max_tokens=max(1, counts[0] - 1)))
    longer = answer_of(session.ask(route, max_tokens=counts[0]))
    if len(longer.text.rstrip("\ufffd")) < at or (counts[0] > 1 and stop in shorter.text):
        raise Wrong(f"{counts[0]} tokens are not those up to the stop string", shorter.exchange, longer.exchange)


@check("4", "cached_tokens is 0 for a new prompt, and never hides tokens from prompt_tokens.")
def cached(session: Session) -> None:
    prompt = f"{secrets.token_hex(16)} " + "one two three four five six seven eight " * 24
    first, *others = [accepted(session.complete(prompt=prompt)) for _ in range(3)]
    usages: list[dict[str, Any]] = [exchange.json["usage"] for exchange in (first, *others)]
    counts = [(usage.get("prompt_tokens_details") or {}).get("cached_tokens") for usage in usages]
    if any(count is None for count in counts):
        raise Wrong("no cached_tokens", first)
    if counts[0] >= usages[0]["prompt_tokens"] // 2:
        raise Wrong(f"{counts[0]} cached tokens of a prompt never seen", first)
    if len({usage["prompt_tokens"] for usage in usages}) > 1:
        raise Wrong("prompt_tokens changes with the cache", first, others[0])
    if any(count >= usage["prompt_tokens"] for count, usage in zip(counts, usages, strict=True)):
        raise Wrong(f"cached tokens are {counts}", others[-1])
    if counts[-1] == 0:
        raise NotOffered("nothing is cached: the same prompt three times has 0 cached_tokens")


@check("4", "Warm and cold answers are the same.")
def warm_as_cold(session: Session) -> None:
    prompt = f"{secrets.token_hex(16)} " + "One, two, three, four, five, six, seven. " * 12
    answers = [answer_of(session.complete(prompt=prompt, max_tokens=16)) for _ in range(3)]
    if answers[1].text != answers[2].text:
        raise NotOffered("cannot be judged: warm answers differ among themselves")
    if answers[0].text != answers[1].text:
        raise Wrong("the cold answer is another", answers[0].exchange, answers[1].exchange)
