"""Logprob records → what clients are told about tokens: names, bytes, values, alternatives.

``bytes`` are what a token adds to the text, so the bytes of all entries are the text: empty for a special token that is
not shown, without the space that a decoder takes off the start of a text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from frontend.text.detokenizer import TokenBytes

MINUS_INFINITY = -9999.0
"""What minus infinity is told as: JSON has none."""

Records = np.ndarray[tuple[int], np.dtype[np.void]]


class Alternative(msgspec.Struct):
    """A token that could have been chosen."""

    token: str
    logprob: float
    bytes: list[int]


class TokenScore(msgspec.Struct):
    """One output token of a chat."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[Alternative]


class ChatLogprobs(msgspec.Struct):
    """``logprobs`` of a chat choice."""

    content: list[TokenScore]
    refusal: None = None


class TextLogprobs(msgspec.Struct):
    """``logprobs`` of a completions choice: four arrays of one length."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []

    def extend(self, other: TextLogprobs) -> None:
        """Append another piece of the same choice."""
        self.tokens += other.tokens
        self.token_logprobs += other.token_logprobs
        self.top_logprobs += other.top_logprobs
        self.text_offset += other.text_offset


class PromptScore(msgspec.Struct):
    """One candidate at one position of a prompt."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptScore] | None]
"""``prompt_logprobs``: per prompt token its candidates by token id, null for the first."""


@dataclass(frozen=True)
class Scored:
    """One output token: its record, where it begins in the text, and the spaces it loses there."""

    token: int
    start: int
    leading_spaces: int | None = 0
    """None: all that the token has."""
    special_too: bool = False
    """It is shown even when it is a special token."""


class Speller:
    """Names and bytes of tokens as one request wants them."""

    def __init__(self, tokens: TokenBytes, *, skip_special: bool, as_ids: bool) -> None:
        self._tokens = tokens
        self._shown = tokens.visible if skip_special else tokens.every
        self._as_ids = as_ids

    def name(self, token: int) -> str:
        """The token as text; broken characters show as U+FFFD."""
        return f"token_id:{token}" if self._as_ids else self._tokens.of(token).decode("utf-8", "replace")

    def exact_name(self, token: int) -> str:
        """The token as text, or as ``bytes:\\xNN…`` when it is no whole text: no two byte sequences share a name."""
        if self._as_ids:
            return f"token_id:{token}"
        data = self._tokens.of(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def data(self, token: int, place: Scored) -> list[int]:
        """The bytes the token adds, or would have added, to the text in this place."""
        leading_spaces = place.leading_spaces
        table = self._tokens.every if place.special_too else self._shown
        data = table[token] if token < len(table) else b""
        if leading_spaces is None:
            return list(data.replace(b" ", b""))
        lost = min(leading_spaces, len(data) - len(data.lstrip(b" "))) if leading_spaces else 0
        return list(data[lost:])


def chat_scores(speller: Speller, scored: Sequence[Scored], records: Records) -> list[TokenScore]:
    """The entries of some output tokens."""
    made = []
    for one, record in zip(scored, records, strict=True):
        (_, value), *others = record["pairs"].tolist()
        tops = [Alternative(speller.name(token), _value(given), speller.data(token, one)) for token, given in others]
        made.append(TokenScore(speller.name(one.token), _value(value), speller.data(one.token, one), tops))
    return made


def text_scores(speller: Speller, scored: Sequence[Scored], records: Records) -> TextLogprobs:
    """The arrays of some output tokens."""
    made = TextLogprobs()
    for one, record in zip(scored, records, strict=True):
        _append(made, speller, one.token, one.start, record)
    return made


def echoed_scores(
    speller: Speller, ids: Sequence[int], offsets: Iterable[int], records: Records, alternatives: int
) -> TextLogprobs:
    """The arrays of a prompt that is shown; nothing is known of its first token."""
    made = TextLogprobs()
    for at, (token, offset) in enumerate(zip(ids, offsets, strict=True)):
        if at == 0:
            made.extend(TextLogprobs([speller.exact_name(token)], [None], [None], [offset]))
        else:
            _append(made, speller, token, offset, records[at - 1], alternatives)
    return made


def prompt_scores(speller: Speller, records: Records, alternatives: int) -> PromptLogprobs:
    """``prompt_logprobs``: the token itself first, then so many alternatives."""
    made: PromptLogprobs = [None]
    for record in records:
        (token, value), *others = record["pairs"].tolist()
        candidates = {str(token): PromptScore(_value(value), int(record["rank"]), speller.name(token))}
        for other_rank, (other, logprob) in enumerate(others[:alternatives], 1):
            candidates.setdefault(str(other), PromptScore(_value(logprob), other_rank, speller.name(other)))
        made.append(candidates)
    return made


def _append(
    made: TextLogprobs, speller: Speller, token: int, start: int, record: Any, alternatives: int | None = None
) -> None:
    (_, value), *others = record["pairs"].tolist()
    names: dict[str, float] = {}
    for other, logprob in others[:alternatives]:
        names.setdefault(speller.exact_name(other), _value(logprob))
    names.setdefault(speller.exact_name(token), _value(value))
    made.extend(TextLogprobs([speller.exact_name(token)], [_value(value)], [names], [start]))


def _value(logprob: float) -> float:
    return logprob if math.isfinite(logprob) and logprob > MINUS_INFINITY else MINUS_INFINITY
