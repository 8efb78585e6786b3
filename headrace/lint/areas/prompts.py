"""Prompts of /v1/completions: strings, ids, lists of both, echo."""

from __future__ import annotations

from typing import Any

from headrace.lint.answers import answer_of, differences
from headrace.lint.exchange import accepted, refused
from headrace.lint.session import BEGINNING, Session
from headrace.lint.verdicts import NotOffered, Wrong, check, check_each

BROKEN: dict[str, Any] = {
    "a negative id": [-1],
    "a negative id in a list": [[-1]],
    "an id out of the vocabulary": [99_999_999],
    "an id beyond 32 bits": [2**33],
    "an id beyond 64 bits": [2**70],
    "a number": 5,
    "an object": {"a": 1},
    "true": True,
    "a list of floats": [1.5],
    "a list of booleans": [True],
    "a mixed list": ["a", 1],
    "a mixed list of lists": [[1], "a"],
    "three levels": [[[1]]],
    "an empty list": [],
    "an empty list in a list": [[1], []],
    "a list with null": [None],
    "129 prompts": ["a"] * 129,
    "100,000 prompts": ["a"] * 100_000,
}


@check_each("5", "A prompt that is {case} is a 400, in a stream too.", BROKEN)
def broken(session: Session, prompt: Any) -> None:
    for stream in (False, True):
        refused(session.complete(prompt=prompt, stream=stream), 400, param="prompt")


@check("5", "An empty prompt is a 400 or a generation from nothing, never a 5xx.")
def empty_string(session: Session) -> None:
    for prompt in ("", [""]):
        exchange = session.complete(prompt=prompt, max_tokens=2)
        if exchange.status != 200:
            refused(exchange, 400)


@check("2", "A prompt of token ids is the same as the text of these ids.")
def ids_as_text(session: Session) -> None:
    ids = session.facts.tokens(session, BEGINNING)
    session.facts.steady(session, "completions")
    text = answer_of(session.complete(add_special_tokens=False), "add_special_tokens")
    given = answer_of(session.complete(prompt=ids))
    if found := differences(text, given):
        raise Wrong(found[0], text.exchange, given.exchange)


@check("2", "Each prompt of a list gets the answer it gets alone.")
def listed_prompts(session: Session) -> None:
    session.facts.steady(session, "completions")
    prompts = [BEGINNING, "The sky is", BEGINNING]
    for stream in (False, True):
        options = {"stream_options": {"include_usage": True}} if stream else {}
        listed = answer_of(session.complete(prompt=prompts, stream=stream, **options))
        alone = [answer_of(session.complete(prompt=prompt)) for prompt in prompts]
        if [choice.text for choice in listed.choices] != [answer.text for answer in alone]:
            raise Wrong("texts differ from those of the prompts alone", listed.exchange, alone[0].exchange)
        for name in ("prompt_tokens", "completion_tokens"):
            if listed.tokens(name) != sum(answer.tokens(name) for answer in alone):
                raise Wrong(f"{name} is not the sum over the prompts", listed.exchange, alone[0].exchange)


@check("2", "A list of lists of ids gives one choice each.")
def listed_ids(session: Session) -> None:
    ids = session.facts.tokens(session, BEGINNING)
    answer = answer_of(session.complete(prompt=[ids, ids[:2]]))
    if [choice.index for choice in answer.choices] != [0, 1]:
        raise Wrong(f"choices {[choice.index for choice in answer.choices]}", answer.exchange)


@check("3", "With several prompts and n, index is prompt·n + i.")
def index_of_prompt_and_n(session: Session) -> None:
    session.facts.steady(session, "completions")
    prompts = [BEGINNING, "The sky is"]
    alone = [answer_of(session.complete(prompt=prompt)).text for prompt in prompts]
    for stream in (False, True):
        # top_k 1 is as good as greedy, and some servers refuse several greedy choices.
        fields = {"n": 2, "temperature": 1, "top_k": 1, "stream": stream}
        answer = answer_of(session.complete(prompt=prompts, **fields), "n", "top_k")
        if [choice.index for choice in answer.choices] != [0, 1, 2, 3]:
            raise Wrong(f"choices {[choice.index for choice in answer.choices]}", answer.exchange)
        if [choice.text for choice in answer.choices] != [alone[0], alone[0], alone[1], alone[1]]:
            raise Wrong("texts are not in the order of prompts", answer.exchange)


@check("8", "Prompts times n beyond 256 are a 400.")
def too_many_choices(session: Session) -> None:
    accepted(session.complete(prompt=["a", "b"], n=2, temperature=1, max_tokens=1))
    refused(session.complete(prompt=["a"] * 100, n=3, temperature=1, max_tokens=1), 400)


@check("6", "echo gives the prompt back, to the byte, before the completion.")
def echoed(session: Session) -> None:
    prompt = "One 🦦, deux 客单价, trois é"
    for stream in (False, True):
        plain = answer_of(session.complete(prompt=prompt))
        answer = answer_of(session.complete(prompt=prompt, echo=True, stream=stream), "echo")
        if not answer.text.startswith(prompt):
            raise Wrong("the text does not begin with the prompt", answer.exchange)
        if answer.text != prompt + plain.text:
            session.facts.steady(session, "completions")
            raise Wrong("the text is not prompt and completion", plain.exchange, answer.exchange)


@check("6", "echo with max_tokens 0 gives the prompt alone.")
def echo_alone(session: Session) -> None:
    for stream in (False, True):
        options = {"stream_options": {"include_usage": True}} if stream else {}
        answer = answer_of(session.complete(echo=True, max_tokens=0, stream=stream, **options), "echo")
        if answer.text != BEGINNING or answer.finish_reason != "length":
            raise Wrong(f"text {answer.text[:60]!r}, finish_reason {answer.finish_reason!r}", answer.exchange)
        if answer.tokens() != 0:
            raise Wrong(f"{answer.tokens()} completion tokens", answer.exchange)


@check("2", "max_tokens 0 without echo is a 400.")
def nothing_asked(session: Session) -> None:
    refused(session.complete(max_tokens=0), 400, param="max_tokens")


@check("2", "A prompt that ends amid a character is answered, alike in both transports.")
def half_a_character(session: Session) -> None:
    ids = session.facts.tokens(session, "🦦")
    if len(ids) < 2:
        raise NotOffered("the tokenizer has whole characters only")
    session.facts.steady(session, "completions")
    for cut in range(1, len(ids)):
        whole = answer_of(session.complete(prompt=ids[:cut]))
        streamed = answer_of(session.complete(prompt=ids[:cut], stream=True))
        if found := differences(whole, streamed):
            raise Wrong(found[0], whole.exchange, streamed.exchange)


@check("2", "truncate_prompt_tokens keeps that many tokens of the prompt.")
def truncated(session: Session) -> None:
    exchange = accepted(session.complete(truncate_prompt_tokens=2), "truncate_prompt_tokens")
    count = exchange.json["usage"]["prompt_tokens"]
    if count > 3:
        raise Wrong(f"{count} prompt tokens", exchange)
