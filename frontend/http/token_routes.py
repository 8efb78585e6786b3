"""Tokens without generation: what a prompt is to the model, id by id, and back.

/tokenize and /render take the very bodies of /v1/chat/completions and /v1/completions and prepare them by the same
code, so their counts are the ``usage.prompt_tokens`` of the same request.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from frontend import errors
from frontend.http.exchange import JSON_HEADERS, ClientGone, Exchange
from frontend.request import fields
from frontend.request.requests import ChatRequest, CommonFields, CompletionRequest, TokenId
from frontend.service import INLINE_BODY, Frontend
from frontend.text.detokenizer import Detokenizer

Meta = msgspec.Meta

MAX_DETOKENIZED = 4_000_000
"""Ids of one /detokenize; the body limit is nearer."""


class TokenizeChatRequest(ChatRequest, kw_only=True, frozen=True):
    """POST /v1/tokenize with ``messages``, and POST /v1/chat/completions/render."""

    model: str = ""
    """The first served name unless given."""
    return_token_strs: bool | None = None
    """False leaves ``token_strs`` out."""


class TokenizeTextRequest(CompletionRequest, kw_only=True, frozen=True):
    """POST /v1/tokenize with ``prompt``: one prompt."""

    model: str = ""
    """The first served name unless given."""
    return_token_strs: bool | None = None
    """False leaves ``token_strs`` out."""


class DetokenizeRequest(msgspec.Struct, kw_only=True, frozen=True):
    """POST /v1/detokenize."""

    tokens: Annotated[list[TokenId], Meta(max_length=MAX_DETOKENIZED)]
    model: str = ""
    """The first served name unless given."""
    skip_special_tokens: bool | None = None
    """Leave special tokens out of the text; they are in it unless told otherwise."""


class Tokenized(msgspec.Struct):
    """The answer of /v1/tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None
    """As the vocabulary writes them, such as ``Ġhello``."""


class Detokenized(msgspec.Struct):
    """The answer of /v1/detokenize."""

    prompt: str


class TemplateUsed(msgspec.Struct):
    """Which template made a prompt."""

    name: str
    """``default``, ``tool_use``, …; ``override`` for one from the command line, ``request`` for the request's own."""
    source: str


class RenderedPrompt(msgspec.Struct):
    """The answer of /v1/chat/completions/render."""

    model: str
    prompt: str
    count: int
    max_model_len: int
    tokens: list[int]
    token_texts: list[str]
    """The text of each token; a byte that is no whole character is written ``\\xNN``."""
    template: TemplateUsed


class TokenWork(Response):
    """The answer to one request, made while its client is there."""

    def __init__(self, frontend: Frontend, work: Callable[[Frontend, bytes], Awaitable[msgspec.Struct]]) -> None:
        super().__init__()
        self._frontend = frontend
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        try:
            with self._frontend.bodies.hold() as held:
                body = await exchange.json_body(self._frontend.settings.max_body_bytes, held)
                answer = await exchange.while_connected(self._encoded(body))
            await exchange.respond(200, JSON_HEADERS, answer)
        except ClientGone:
            self._frontend.metrics.disconnects.inc()

    async def _encoded(self, body: bytes) -> bytes:
        return msgspec.json.encode(await self._work(self._frontend, body))


async def tokenize(frontend: Frontend, body: bytes) -> Tokenized:
    """The ids of a prompt or of a conversation."""
    has_messages = (
        _has_messages(body)
        if len(body) <= INLINE_BODY
        else await frontend.preparer.in_pool(lambda: _has_messages(body))
    )
    request = await _read(frontend, body, TokenizeChatRequest if has_messages else TokenizeTextRequest)
    ids = await frontend.preparer.in_pool(lambda: _one_prompt(frontend, request))
    assert isinstance(request, TokenizeChatRequest | TokenizeTextRequest)
    shown = None if request.return_token_strs is False else _vocabulary_strings(frontend, ids)
    return Tokenized(len(ids), _context(frontend), ids, shown)


async def detokenize(frontend: Frontend, body: bytes) -> Detokenized:
    """The text of ids, special tokens included."""

    def work() -> str:
        request, _ = fields.read(body, DetokenizeRequest, strict=frontend.settings.strict_fields)
        frontend.check_model(request.model or frontend.name)
        size = frontend.artefacts.vocab_size
        for at, token in enumerate(request.tokens):
            if token >= size:
                param = f"tokens[{at}]"
                raise errors.invalid_value(
                    param, f"Invalid value for '{param}': expected a token id from 0 to {size - 1}."
                )
        detokenizer = Detokenizer(frontend.token_bytes, skip_special_tokens=request.skip_special_tokens is True)
        return detokenizer.push(request.tokens) + detokenizer.flush()

    return Detokenized(work() if len(body) <= INLINE_BODY else await frontend.preparer.in_pool(work))


async def render(frontend: Frontend, body: bytes) -> RenderedPrompt:
    """What a conversation becomes before the model sees it."""
    request = await _read(frontend, body, TokenizeChatRequest)
    assert isinstance(request, TokenizeChatRequest)
    rendered, ids = await frontend.preparer.in_pool(
        lambda: (frontend.preparer.rendered(request), _one_prompt(frontend, request))
    )
    return RenderedPrompt(
        model=frontend.name,
        prompt=rendered.text,
        count=len(ids),
        max_model_len=_context(frontend),
        tokens=ids,
        token_texts=[frontend.token_bytes.of(index).decode("utf-8", "backslashreplace") for index in ids],
        template=TemplateUsed(rendered.template, request.chat_template or frontend.preparer.template_source(rendered)),
    )


async def _read(frontend: Frontend, body: bytes, kind: type[CommonFields]) -> CommonFields:
    def work() -> CommonFields:
        request, _ = fields.read(body, kind, strict=frontend.settings.strict_fields)
        frontend.check_model(request.model or frontend.name)
        frontend.preparer.check(request)
        return request

    return work() if len(body) <= INLINE_BODY else await frontend.preparer.in_pool(work)


_NULL = msgspec.Raw(b"null")


class _Probe(msgspec.Struct):
    messages: msgspec.Raw = _NULL
    prompt: msgspec.Raw = _NULL


def _has_messages(body: bytes) -> bool:
    """Which of the two bodies this is; a body that is neither is read as a prompt's, and refused as one."""
    try:
        probe = msgspec.json.decode(body, type=_Probe)
    except (msgspec.DecodeError, RecursionError, ValueError):
        return False
    if probe.messages != _NULL and probe.prompt != _NULL:
        raise errors.invalid_value("prompt", "Give either 'messages' or 'prompt', not both.")
    return probe.messages != _NULL


def _one_prompt(frontend: Frontend, request: CommonFields) -> list[int]:
    ids = frontend.preparer.prompt_ids(request, frontend.client.model)
    if not ids:
        raise errors.invalid_value(
            "messages" if isinstance(request, ChatRequest) else "prompt", "The prompt has no tokens."
        )
    return ids


def _vocabulary_strings(frontend: Frontend, ids: list[int]) -> list[str]:
    token_of = frontend.artefacts.tokenizer().id_to_token
    return [token_of(index) or "" for index in ids]


def _context(frontend: Frontend) -> int:
    return frontend.preparer.context(frontend.client.model)
