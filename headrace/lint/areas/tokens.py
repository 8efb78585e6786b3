"""tokenize, detokenize and render: what the server builds of a request."""

from __future__ import annotations

from typing import Any

from headrace.lint import shapes
from headrace.lint.exchange import Exchange, accepted, offered_route, refused
from headrace.lint.facts import tokenize
from headrace.lint.session import Session
from headrace.lint.verdicts import NotOffered, Wrong, check, check_each

MESSAGES = [{"role": "user", "content": "Hello 🦦"}]
RENDER = "/v1/chat/completions/render"

BROKEN_TOKENIZE: dict[str, dict[str, Any]] = {
    "neither prompt nor messages": {},
    "a number as prompt": {"prompt": 5},
    "messages that are none": {"messages": "x"},
    "an unknown model": {"model": "no-such-model", "prompt": "x"},
}

BROKEN_DETOKENIZE: dict[str, dict[str, Any]] = {
    "no tokens": {},
    "a string": {"tokens": "x"},
    "a negative id": {"tokens": [-1]},
    "an id out of the vocabulary": {"tokens": [99_999_999]},
    "a huge id": {"tokens": [2**70]},
    "a float": {"tokens": [1.5]},
}


def _ids(exchange: Exchange) -> list[int]:
    body = exchange.json
    tokens = body.get("tokens")
    if not isinstance(tokens, list) or not all(shapes.is_count(token) for token in tokens):
        raise Wrong("tokens is not a list of ids", exchange)
    if body.get("count") != len(tokens):
        raise Wrong(f"count is {body.get('count')!r} of {len(tokens)} tokens", exchange)
    return tokens


@check("1", "tokenize answers count, max_model_len, tokens and token_strs.")
def tokenize_shape(session: Session) -> None:
    for fields in ({"prompt": "Hello 🦦"}, {"messages": MESSAGES}):
        exchange = accepted(tokenize(session, **fields))
        ids = _ids(exchange)
        body = exchange.json
        if not shapes.is_count(body.get("max_model_len")):
            raise Wrong(f"max_model_len is {body.get('max_model_len')!r}", exchange)
        strings = body.get("token_strs")
        if strings is not None and (not isinstance(strings, list) or len(strings) != len(ids)):
            raise Wrong("token_strs is not one string per token", exchange)


@check("1", "tokenize and detokenize are there without /v1 too.")
def without_v1(session: Session) -> None:
    model = session.target.model
    prefixed = accepted(offered_route(session.post("/v1/tokenize", {"model": model, "prompt": "Hi"})))
    plain = accepted(offered_route(session.post("/tokenize", {"model": model, "prompt": "Hi"})))
    if _ids(prefixed) != _ids(plain):
        raise Wrong("two answers", prefixed, plain)
    accepted(offered_route(session.post("/detokenize", {"model": model, "tokens": _ids(plain)})))


@check("1", "add_generation_prompt and continue_final_message reach the template in tokenize.")
def template_fields(session: Session) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "One,"}]
    new = _ids(accepted(tokenize(session, messages=messages)))
    closed = _ids(accepted(tokenize(session, messages=messages, add_generation_prompt=False)))
    fields = {"add_generation_prompt": False, "continue_final_message": True}
    opened = _ids(accepted(tokenize(session, messages=messages, **fields)))
    if not len(opened) <= len(closed) <= len(new) or len(opened) == len(new):
        raise Wrong(f"{len(new)}, {len(closed)} and {len(opened)} tokens", *([session.last] if session.last else []))


@check_each("5", "tokenize with {case} is a 400, or a 404 for the model.", BROKEN_TOKENIZE)
def broken_tokenize(session: Session, fields: dict[str, Any]) -> None:
    accepted(tokenize(session, prompt="x"))
    path = "/v1/tokenize" if session.post("/v1/tokenize", {"prompt": "x"}).status != 404 else "/tokenize"
    refused(session.post(path, {"model": session.target.model, **fields}), (400, 404))


@check_each("5", "detokenize with {case} is a 400.", BROKEN_DETOKENIZE)
def broken_detokenize(session: Session, fields: dict[str, Any]) -> None:
    model = session.target.model
    path = next(
        (
            p
            for p in ("/v1/detokenize", "/detokenize")
            if session.post(p, {"model": model, "tokens": [1]}).status == 200
        ),
        "",
    )
    if not path:
        raise NotOffered("no detokenize route")
    refused(session.post(path, {"model": model, **fields}), 400)


@check("1", "render shows the prompt that is built: text and ids, as many as tokenize counts.")
def render(session: Session) -> None:
    exchange = accepted(offered_route(session.post(RENDER, {"model": session.target.model, "messages": MESSAGES})))
    body = exchange.json
    text = next((body[name] for name in ("prompt", "text", "rendered") if isinstance(body.get(name), str)), None)
    if text is None or "Hello 🦦" not in text:
        raise Wrong("no rendered text with the message in it", exchange)
    ids = next(
        (body[name] for name in ("token_ids", "tokens", "ids", "prompt_token_ids") if _is_ids(body.get(name))), None
    )
    if ids is None:
        raise Wrong("no ids", exchange)
    counted = accepted(tokenize(session, messages=MESSAGES))
    if ids != _ids(counted):
        raise Wrong("other ids than tokenize has", counted, exchange)
    texts = [value for value in body.values() if isinstance(value, list) and len(value) == len(ids)]
    if not any(all(isinstance(entry, str) for entry in value) for value in texts):
        raise Wrong("no text per token", exchange)
    if "template" not in exchange.reply.body.decode("utf-8", "replace"):
        raise Wrong("the template is not named", exchange)


@check("5", "render refuses what chat refuses.")
def broken_render(session: Session) -> None:
    model = session.target.model
    accepted(offered_route(session.post(RENDER, {"model": model, "messages": MESSAGES})))
    broken: tuple[dict[str, Any], ...] = (
        {},
        {"messages": "x"},
        {"messages": [{"role": "wizard", "content": "x"}]},
        {"messages": []},
    )
    for fields in broken:
        refused(session.post(RENDER, {"model": model, **fields}), 400, param="messages")


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(shapes.is_count(token) for token in value)
