"""Messages in every form that clients send them."""

from __future__ import annotations

from typing import Any

from headrace.lint.exchange import accepted, refused
from headrace.lint.facts import tokenize
from headrace.lint.session import Session
from headrace.lint.verdicts import NotOffered, Wrong, check, check_each

USER = {"role": "user", "content": "Count to five."}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}

TAKEN: dict[str, list[dict[str, Any]]] = {
    "a string": [USER],
    "one text part": [{"role": "user", "content": [{"type": "text", "text": "Count to five."}]}],
    "two text parts": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
    "an empty string": [{"role": "user", "content": ""}],
    "system first": [{"role": "system", "content": "Be brief."}, USER],
    "system as parts": [{"role": "system", "content": [{"type": "text", "text": "Be brief."}]}, USER],
    "developer": [{"role": "developer", "content": "Be brief."}, USER],
    "a name": [{**USER, "name": "otter"}],
    "a second turn": [USER, {"role": "assistant", "content": "1 2 3 4 5"}, {"role": "user", "content": "More."}],
    "assistant content null": [USER, {"role": "assistant", "content": None}, USER],
    "assistant content missing": [USER, {"role": "assistant"}, USER],
    "assistant tool_calls []": [USER, {"role": "assistant", "content": "hi", "tool_calls": []}, USER],
    "assistant with null extras": [
        USER,
        {"role": "assistant", "content": "hi", "tool_calls": None, "refusal": None, "function_call": None},
        USER,
    ],
    "unknown extra keys": [{**USER, "zebra": {"a": 1}}],
    "emoji and CJK": [{"role": "user", "content": "👩‍🚀 客单价 é ☂️"}],
    "100 turns": [USER, {"role": "assistant", "content": "ok"}] * 50 + [USER],
}

TOOL_HISTORY: dict[str, list[dict[str, Any]]] = {
    "arguments as a string": [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Sunny."},
    ],
    "arguments as an object": [
        USER,
        {
            "role": "assistant",
            "tool_calls": [{**CALL, "function": {"name": "weather", "arguments": {"city": "Paris"}}}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "Sunny."}]},
    ],
    "arguments that are no JSON": [
        USER,
        {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "weather", "arguments": "{oops"}}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Sunny."},
    ],
}

BROKEN: dict[str, Any] = {
    "an empty list": [],
    "a string": "hello",
    "an object": {"role": "user", "content": "hi"},
    "a list of numbers": [5],
    "an empty message": [{}],
    "no role": [{"content": "hi"}],
    "role null": [{"role": None, "content": "hi"}],
    "an unknown role": [{"role": "wizard", "content": "hi"}],
    "content a number": [{"role": "user", "content": 5}],
    "content an object": [{"role": "user", "content": {"text": "hi"}}],
    "a part without type": [{"role": "user", "content": [{"text": "hi"}]}],
    "a part of unknown type": [{"role": "user", "content": [{"type": "hologram", "hologram": 1}]}],
    "a text part without text": [{"role": "user", "content": [{"type": "text"}]}],
    "a part that is a number": [{"role": "user", "content": [5]}],
    "the second message broken": [USER, {"role": "assistant", "content": 5}, USER],
}


@check_each("2", "Messages with {case} are taken, in a stream too.", TAKEN)
def taken(session: Session, messages: list[dict[str, Any]]) -> None:
    for stream in (False, True):
        accepted(session.chat(messages=messages, stream=stream, max_tokens=2))


@check_each("2", "A history of tool calls with {case} is taken or refused with 400.", TOOL_HISTORY)
def tool_history(session: Session, messages: list[dict[str, Any]]) -> None:
    exchange = session.chat(messages=messages, max_tokens=2)
    if exchange.status == 400:
        raise NotOffered(str(exchange.error.get("message", ""))[:120])
    accepted(exchange)


@check_each("5", "Messages that are {case} are a 400 that says where.", BROKEN)
def broken(session: Session, messages: Any) -> None:
    for stream in (False, True):
        refused(session.chat(messages=messages, stream=stream), 400, param="messages")


@check("2", "A part of a type that is not offered is a 400 that names the type.")
def image_part(session: Session) -> None:
    url = "data:image/png;base64,iVBORw0KGgo="
    content = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": url}}]
    exchange = session.chat(messages=[{"role": "user", "content": content}], max_tokens=2)
    if exchange.status == 200:
        raise NotOffered("images are offered, and judged by no check here")
    refused(exchange, 400, says="image")


@check("2", "The message of an answer can be sent back as it is.")
def sent_back(session: Session) -> None:
    message = accepted(session.chat()).json["choices"][0]["message"]
    accepted(session.chat(messages=[USER, message, USER]))


@check("2", "add_generation_prompt together with continue_final_message is a 400.")
def two_endings(session: Session) -> None:
    messages = [USER, {"role": "assistant", "content": "One, two,"}]
    refused(session.chat(messages=messages, add_generation_prompt=True, continue_final_message=True), 400)


@check("2", "continue_final_message goes on with the last message: its prompt is shorter than that of a new turn.")
def continued(session: Session) -> None:
    messages = [USER, {"role": "assistant", "content": "One, two,"}]
    fields = {"messages": messages, "add_generation_prompt": False}
    exchange = accepted(session.chat(**fields, continue_final_message=True), "continue_final_message")
    fresh = accepted(session.chat(messages=messages))
    if exchange.json["usage"]["prompt_tokens"] >= fresh.json["usage"]["prompt_tokens"]:
        raise Wrong("the prompt is no shorter than with a new turn", fresh, exchange)


@check("2", "A special token that a user writes is text, not control.")
def special_tokens_in_content(session: Session) -> None:
    marker, special = _a_special_token(session)

    def count(content: str) -> int:
        exchange = accepted(tokenize(session, messages=[{"role": "user", "content": content}]))
        return list(exchange.json["tokens"]).count(special)

    if count(f"a {marker} b") != count("a b"):
        raise Wrong(f"{marker} in a user's message becomes token {special}", *([session.last] if session.last else []))


def _a_special_token(session: Session) -> tuple[str, int]:
    for text in ("<|im_end|>", "<|eot_id|>", "<|im_start|>", "</s>", "<|endoftext|>", "<end_of_turn>", "<|end|>"):
        exchange = tokenize(session, prompt=text, add_special_tokens=False)
        ids = exchange.json.get("tokens") if exchange.status == 200 else None
        if isinstance(ids, list) and len(ids) == 1:
            return text, ids[0]
    raise NotOffered("no special token is known to be one")
