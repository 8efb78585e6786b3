"""One answer's envelope, and the events and objects that carry it, on either route.

A plain text chunk differs from the next one only in its text, so what is around the text is encoded once per choice:
``TextChunk`` is that prefix and suffix.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from frontend.answer import scores
from frontend.answer.choice import Delta
from frontend.answer.feed import PromptScores
from frontend.answer.scores import ChatLogprobs, PromptLogprobs, Speller, TextLogprobs
from frontend.answer.shapes import ChatChoice, ChoiceShape, ChunkChoice, Ending, Envelope, Message, TextChoice, Usage
from frontend.answer.shapes import Delta as DeltaShape
from frontend.request.prompts import Prompt

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
_encode = msgspec.json.encode
_MARK = "\0"
_MARK_JSON = _encode(_MARK)


@dataclass(frozen=True)
class TextChunk:
    """An event with some text: everything but the text is already encoded."""

    prefix: bytes
    suffix: bytes

    def event(self, text: str) -> bytes:
        return self.prefix + _encode(text) + self.suffix


@dataclass(frozen=True)
class Details:
    """What an answer tells besides its text."""

    speller: Speller
    alternatives: int = -1
    """Per output token; -1 is no logprobs."""
    prompt_alternatives: int = -1
    """Per prompt token, in ``prompt_logprobs``; -1 is none."""
    token_ids: bool = False
    service_tier: bool = False
    """Was asked about."""

    @property
    def of_prompt(self) -> bool:
        """The first chunk of a choice has something about its prompt."""
        return self.token_ids or self.prompt_alternatives >= 0

    @property
    def of_tokens(self) -> bool:
        """Chunks have something about their tokens."""
        return self.token_ids or self.alternatives >= 0


@dataclass(frozen=True)
class Asked:
    """A prompt, and its logprobs when they were asked for."""

    prompt: Prompt
    scores: PromptScores | None

    def told_ids(self, details: Details) -> list[int] | UnsetType:
        return self.prompt.ids if details.token_ids else UNSET

    def told_scores(self, details: Details) -> PromptLogprobs | UnsetType:
        if details.prompt_alternatives < 0 or self.scores is None:
            return UNSET
        return scores.prompt_scores(details.speller, self.scores.records(), details.prompt_alternatives)


@dataclass
class Fold:
    """One choice of a whole answer, put together from its deltas."""

    asked: Asked
    parts: list[str] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    ending: Ending | None = None


@dataclass(frozen=True)
class Answer(ABC):
    """One answer on one route."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    details: Details

    @abstractmethod
    def opening(self, index: int, asked: Asked, usage: Usage | UnsetType = UNSET) -> list[bytes]:
        """The events that open a choice: its role, and the prompt when it is echoed."""

    @abstractmethod
    def text_chunk(self, index: int) -> TextChunk:
        """The events with nothing but text of a choice that goes on."""

    @abstractmethod
    def chunk(self, index: int, delta: Delta, *, asked: Asked | None = None, usage: Usage | UnsetType = UNSET) -> bytes:
        """Any event of a choice; ``asked`` is given when it is the first one."""

    @abstractmethod
    def begin(self, asked: Asked) -> Fold:
        """A whole choice with its echo and nothing else yet."""

    def add(self, fold: Fold, delta: Delta) -> None:
        """Take one more delta into a whole choice."""
        fold.parts.append(delta.text)
        fold.ids.extend(delta.ids)
        fold.ending = delta.ending
        logprobs = self._logprobs(delta)
        if logprobs is not None:
            fold.logprobs.append(logprobs)

    @abstractmethod
    def whole(self, folds: Sequence[Fold], usage: Usage) -> bytes:
        """The body of a non-streaming answer."""

    @abstractmethod
    def usage(self, usage: Usage) -> bytes:
        """The event with the usage."""

    @abstractmethod
    def _logprobs(self, delta: Delta) -> Any:
        """The logprobs that go out with a delta, or None."""

    def _ids(self, ids: Sequence[int]) -> list[int] | UnsetType:
        return list(ids) if self.details.token_ids else UNSET

    def _body(
        self, kind: str, choices: list[ChoiceShape], usage: Usage | UnsetType = UNSET, asked: Asked | None = None
    ) -> bytes:
        envelope = Envelope(
            self.id,
            kind,
            self.created,
            self.model,
            self.system_fingerprint,
            choices,
            usage,
            service_tier="default" if self.details.service_tier else UNSET,
            prompt_token_ids=UNSET if asked is None else asked.told_ids(self.details),
            prompt_logprobs=UNSET if asked is None else asked.told_scores(self.details),
        )
        return _encode(envelope)


class ChatAnswer(Answer):
    """POST /v1/chat/completions."""

    def opening(self, index: int, asked: Asked, usage: Usage | UnsetType = UNSET) -> list[bytes]:
        role = ChunkChoice(index, DeltaShape(role="assistant", content=""))
        events = [event(self._body("chat.completion.chunk", [role], usage, asked if index == 0 else None))]
        if asked.prompt.echo:
            events.append(self.chunk(index, Delta(asked.prompt.echo, 0, None), usage=usage))
        return events

    def text_chunk(self, index: int) -> TextChunk:
        choice = ChunkChoice(index, DeltaShape(content=_MARK))
        return _split(event(self._body("chat.completion.chunk", [choice])))

    def chunk(self, index: int, delta: Delta, *, asked: Asked | None = None, usage: Usage | UnsetType = UNSET) -> bytes:
        choice = ChunkChoice(
            index,
            DeltaShape(content=delta.text) if delta.text else DeltaShape(),
            self._logprobs(delta),
            token_ids=self._ids(delta.ids),
        )
        if delta.ending is not None:
            choice.finish_reason, choice.stop_reason = delta.ending.finish_reason, delta.ending.stop_reason
        return event(self._body("chat.completion.chunk", [choice], usage))

    def begin(self, asked: Asked) -> Fold:
        return Fold(asked, parts=[asked.prompt.echo or ""])

    def whole(self, folds: Sequence[Fold], usage: Usage) -> bytes:
        made: list[ChoiceShape] = []
        for index, fold in enumerate(folds):
            assert fold.ending is not None
            logprobs = None
            if self.details.alternatives >= 0:
                logprobs = ChatLogprobs([entry for piece in fold.logprobs for entry in piece.content])
            made.append(
                ChatChoice(
                    index,
                    Message("assistant", "".join(fold.parts)),
                    logprobs,
                    fold.ending.finish_reason,
                    fold.ending.stop_reason,
                    self._ids(fold.ids),
                )
            )
        return self._body("chat.completion", made, usage, asked=folds[0].asked)

    def usage(self, usage: Usage) -> bytes:
        return event(self._body("chat.completion.chunk", [], usage))

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        if delta.records is None or not delta.scored:
            return None
        return ChatLogprobs(scores.chat_scores(self.details.speller, delta.scored, delta.records))


class CompletionAnswer(Answer):
    """POST /v1/completions: chunks and whole answers have the same object name and the same choices."""

    def opening(self, index: int, asked: Asked, usage: Usage | UnsetType = UNSET) -> list[bytes]:
        echoed = self._echoed(asked)
        if not asked.prompt.echo and echoed is None:
            return []
        choice = TextChoice(index, asked.prompt.echo or "", echoed, token_ids=self._ids([]), **self._told(asked))
        return [event(self._body("text_completion", [choice], usage))]

    def text_chunk(self, index: int) -> TextChunk:
        return _split(event(self._body("text_completion", [TextChoice(index, _MARK)])))

    def chunk(self, index: int, delta: Delta, *, asked: Asked | None = None, usage: Usage | UnsetType = UNSET) -> bytes:
        choice = TextChoice(
            index,
            delta.text,
            self._logprobs(delta),
            token_ids=self._ids(delta.ids),
            **({} if asked is None else self._told(asked)),
        )
        if delta.ending is not None:
            choice.finish_reason, choice.stop_reason = delta.ending.finish_reason, delta.ending.stop_reason
        return event(self._body("text_completion", [choice], usage))

    def begin(self, asked: Asked) -> Fold:
        fold = Fold(asked, parts=[asked.prompt.echo or ""])
        echoed = self._echoed(asked)
        if echoed is not None:
            fold.logprobs.append(echoed)
        return fold

    def whole(self, folds: Sequence[Fold], usage: Usage) -> bytes:
        made: list[ChoiceShape] = []
        for index, fold in enumerate(folds):
            assert fold.ending is not None
            logprobs = TextLogprobs() if self.details.alternatives >= 0 else None
            for piece in fold.logprobs:
                assert logprobs is not None
                logprobs.extend(piece)
            choice = TextChoice(
                index,
                "".join(fold.parts),
                logprobs,
                fold.ending.finish_reason,
                fold.ending.stop_reason,
                self._ids(fold.ids),
                **self._told(fold.asked),
            )
            made.append(choice)
        return self._body("text_completion", made, usage)

    def usage(self, usage: Usage) -> bytes:
        return event(self._body("text_completion", [], usage))

    def _logprobs(self, delta: Delta) -> TextLogprobs | None:
        if delta.records is None or not delta.scored:
            return None
        return scores.text_scores(self.details.speller, delta.scored, delta.records)

    def _echoed(self, asked: Asked) -> TextLogprobs | None:
        """The logprobs of an echoed prompt."""
        prompt, alternatives = asked.prompt, self.details.alternatives
        if prompt.echo is None or alternatives < 0 or asked.scores is None:
            return None
        return scores.echoed_scores(
            self.details.speller, prompt.ids, prompt.offsets, asked.scores.records(), alternatives
        )

    def _told(self, asked: Asked) -> dict[str, Any]:
        return {
            "prompt_token_ids": asked.told_ids(self.details),
            "prompt_logprobs": asked.told_scores(self.details),
        }


def event(body: bytes) -> bytes:
    """One server-sent event: JSON has no line breaks, so it is one ``data:`` line."""
    return b"data: " + body + b"\n\n"


def _split(encoded: bytes) -> TextChunk:
    # From the right: nothing after the text is anybody's input.
    prefix, _, suffix = encoded.rpartition(_MARK_JSON)
    return TextChunk(prefix, suffix)
