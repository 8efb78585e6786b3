"""The objects on the wire: chunks and whole answers of both routes, declared once.

A text chunk differs from the next one only in its text, so what is around the text is encoded once per choice:
``TextChunk`` is that prefix and suffix. Knows nothing of how an answer comes about.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import msgspec
from msgspec import UNSET, UnsetType

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.encode
_MARK = "\0"
_MARK_JSON = _encode(_MARK)


class PromptDetails(msgspec.Struct):
    cached_tokens: int


class CompletionDetails(msgspec.Struct):
    reasoning_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails

    @classmethod
    def of(cls, prompt: int, completion: int, cached: int) -> Usage:
        return cls(prompt, completion, prompt + completion, PromptDetails(cached), CompletionDetails(0))


class Delta(msgspec.Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChunkChoice(msgspec.Struct):
    index: int
    delta: Delta
    logprobs: None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET


class TextChoice(msgspec.Struct):
    """A choice of /v1/completions, in chunks and in whole answers."""

    index: int
    text: str
    logprobs: None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET


class Message(msgspec.Struct):
    role: str
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct):
    index: int
    message: Message
    logprobs: None
    finish_reason: str
    stop_reason: str | int | None


ChoiceShape = ChunkChoice | TextChoice | ChatChoice


class Envelope(msgspec.Struct):
    """Every chunk and every whole answer."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChoiceShape]
    usage: Usage | UnsetType = UNSET


@dataclass(frozen=True)
class Ending:
    """How a choice ended, as its client is told."""

    finish_reason: str
    stop_reason: str | int | None
    completion_tokens: int


@dataclass(frozen=True)
class Whole:
    """A folded choice."""

    text: str
    ending: Ending


@dataclass(frozen=True)
class TextChunk:
    """An event with some text: everything but the text is already encoded."""

    prefix: bytes
    suffix: bytes

    def event(self, text: str) -> bytes:
        return self.prefix + _encode(text) + self.suffix


@dataclass(frozen=True)
class Answer(ABC):
    """One answer's envelope, and the events and objects that carry it."""

    id: str
    created: int
    model: str
    system_fingerprint: str

    @abstractmethod
    def opening(self, index: int) -> bytes:
        """The event that opens a choice; empty when the route has none."""

    @abstractmethod
    def text_chunk(self, index: int) -> TextChunk:
        """The events with text of a choice that goes on."""

    @abstractmethod
    def last(self, index: int, text: str, ending: Ending) -> bytes:
        """The event that ends a choice, with the text still due."""

    @abstractmethod
    def whole(self, choices: list[Whole], usage: Usage) -> bytes:
        """The body of a non-streaming answer."""

    @abstractmethod
    def usage(self, usage: Usage) -> bytes:
        """The event with the usage."""

    def _body(self, kind: str, choices: list[ChoiceShape], usage: Usage | UnsetType = UNSET) -> bytes:
        return _encode(Envelope(self.id, kind, self.created, self.model, self.system_fingerprint, choices, usage))


class ChatAnswer(Answer):
    """POST /v1/chat/completions."""

    def opening(self, index: int) -> bytes:
        return self._event(ChunkChoice(index, Delta(role="assistant", content="")))

    def text_chunk(self, index: int) -> TextChunk:
        return _split(self._event(ChunkChoice(index, Delta(content=_MARK))))

    def last(self, index: int, text: str, ending: Ending) -> bytes:
        delta = Delta(content=text) if text else Delta()
        return self._event(
            ChunkChoice(index, delta, finish_reason=ending.finish_reason, stop_reason=ending.stop_reason)
        )

    def whole(self, choices: list[Whole], usage: Usage) -> bytes:
        made: list[ChoiceShape] = [
            ChatChoice(
                index, Message("assistant", choice.text), None, choice.ending.finish_reason, choice.ending.stop_reason
            )
            for index, choice in enumerate(choices)
        ]
        return self._body("chat.completion", made, usage)

    def usage(self, usage: Usage) -> bytes:
        return event(self._body("chat.completion.chunk", [], usage))

    def _event(self, choice: ChunkChoice) -> bytes:
        return event(self._body("chat.completion.chunk", [choice]))


class CompletionAnswer(Answer):
    """POST /v1/completions: chunks and whole answers have the same object name and the same choices."""

    def opening(self, index: int) -> bytes:
        return b""

    def text_chunk(self, index: int) -> TextChunk:
        return _split(event(self._body("text_completion", [TextChoice(index, _MARK)])))

    def last(self, index: int, text: str, ending: Ending) -> bytes:
        return event(self._body("text_completion", [self._ended(index, text, ending)]))

    def whole(self, choices: list[Whole], usage: Usage) -> bytes:
        made: list[ChoiceShape] = [self._ended(at, choice.text, choice.ending) for at, choice in enumerate(choices)]
        return self._body("text_completion", made, usage)

    def usage(self, usage: Usage) -> bytes:
        return event(self._body("text_completion", [], usage))

    def _ended(self, index: int, text: str, ending: Ending) -> TextChoice:
        return TextChoice(index, text, finish_reason=ending.finish_reason, stop_reason=ending.stop_reason)


def event(body: bytes) -> bytes:
    """One server-sent event: JSON has no line breaks, so it is one ``data:`` line."""
    return b"data: " + body + b"\n\n"


def _split(encoded: bytes) -> TextChunk:
    # From the right: nothing after the text is anybody's input.
    prefix, _, suffix = encoded.rpartition(_MARK_JSON)
    return TextChunk(prefix, suffix)
