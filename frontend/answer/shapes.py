"""The objects on the wire: chunks and whole answers of both routes, declared once.

Knows nothing of how an answer comes about; ``frontend.answer.answers`` fills them in.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from msgspec import UNSET, UnsetType

from frontend.answer.scores import ChatLogprobs, PromptLogprobs, TextLogprobs


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
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class TextChoice(msgspec.Struct):
    """A choice of /v1/completions, in chunks and in whole answers."""

    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Message(msgspec.Struct):
    role: str
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct):
    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET


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
    service_tier: str | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


@dataclass(frozen=True)
class Ending:
    """How a choice ended, as its client is told."""

    finish_reason: str
    stop_reason: str | int | None
    completion_tokens: int
