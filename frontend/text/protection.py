"""Keeps special-token text that a user wrote from becoming special tokens.

Before rendering, every special-token literal in untrusted text is wrapped in two private-use characters that occur
nowhere in the input; after rendering they are taken out again and what they enclosed is remembered as a protected
span. Templates see nothing unusual unless a message holds such a literal.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from frontend.text.conversation import Message, is_untrusted
from frontend.text.errors import TemplateError

_PRIVATE_USE = range(0xE000, 0xF900)
_PRIVATE_CHARACTER = re.compile("[\ue000-\uf8ff]")
_ESCAPED_CHARACTER = re.compile(r"\\u([ef][0-9a-fA-F]{3})", re.IGNORECASE)


Spans = tuple[tuple[int, int], ...]


class LiteralGuard:
    """Finds the special-token literals of one tokenizer. Longer ones win at the same place."""

    def __init__(self, literals: Iterable[str]) -> None:
        self._longest_first = sorted(filter(None, literals), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self._longest_first)) or r"(?!)")

    def is_needed(self, messages: list[Message], documents: list[dict[str, Any]] | None) -> bool:
        """Whether untrusted text holds a literal, also one that is split between neighbouring content parts."""
        return self._is_in(documents) or any(
            self._is_in(message) or self._is_split(message) for message in messages if is_untrusted(message)
        )

    def mark(
        self, messages: list[Message], documents: list[dict[str, Any]] | None, marks: Marks
    ) -> tuple[list[Message], list[dict[str, Any]] | None]:
        """The same input with every literal in untrusted text between marks."""
        marked = [self._mark_message(message, marks) if is_untrusted(message) else message for message in messages]
        return marked, self._mark(documents, marks)

    def take_out(self, rendered: str, marks: Marks) -> tuple[str, Spans]:
        """The text without marks, and the spans they enclosed.

        Where the template cut off one mark of a pair, the literal beside the other is still protected. A span may be
        empty: no special token is read across it either.
        """
        pieces: list[str] = []
        boundaries: list[tuple[int, bool]] = []  # (position, whether a span begins here)
        at = 0
        for index, piece in enumerate(marks.pattern.split(rendered)):
            if index % 2 == 0:
                pieces.append(piece)
                at += len(piece)
            else:
                boundaries.append((at, marks.is_begin(piece)))
        text = "".join(pieces)
        return text, self._spans(text, boundaries)

    def _spans(self, text: str, boundaries: list[tuple[int, bool]]) -> Spans:
        spans: list[tuple[int, int]] = []
        opened: int | None = None
        for at, begins in [*boundaries, (len(text), True)]:
            if begins:
                if opened is not None:
                    spans.append((opened, self._literal_from(text, opened)))
                opened = at
            else:
                spans.append((self._literal_until(text, at) if opened is None else opened, at))
                opened = None
        return tuple(spans)

    def _literal_from(self, text: str, start: int) -> int:
        found = self._pattern.match(text, start)
        return found.end() if found else start

    def _literal_until(self, text: str, end: int) -> int:
        return next((end - len(one) for one in self._longest_first if text.endswith(one, 0, end)), end)

    def _is_in(self, value: Any) -> bool:
        if isinstance(value, str):
            return self._pattern.search(value) is not None
        return any(map(self._is_in, _children(value)))

    def _is_split(self, message: Message) -> bool:
        """Whether joining the content parts makes a literal that no part has."""
        content = message.get("content")
        if not isinstance(content, list) or len(content) < 2:
            return False
        texts = [part["text"] for part in content]
        whole = [literal for text in texts for literal in self._pattern.findall(text)]
        return self._pattern.findall("".join(texts)) != whole

    def _mark_message(self, message: Message, marks: Marks) -> Message:
        if self._is_split(message):
            text = "".join(part["text"] for part in message["content"])
            message = {**message, "content": [{"type": "text", "text": text}]}
        return {key: value if key == "role" else self._mark(value, marks) for key, value in message.items()}

    def _mark(self, value: Any, marks: Marks) -> Any:
        if isinstance(value, str):
            return self._pattern.sub(lambda found: marks.begin + found.group() + marks.end, value)
        if isinstance(value, dict):
            return {self._mark(key, marks): self._mark(item, marks) for key, item in value.items()}
        if isinstance(value, list):
            return [self._mark(item, marks) for item in value]
        return value


class Marks:
    """Two characters that stand before and after a protected literal."""

    def __init__(self, *occupied: Any) -> None:
        """Choose characters that occur in no string inside `occupied`, plain or JSON-escaped."""
        used = set(_private_characters(list(occupied)))
        free = [chr(code) for code in _PRIVATE_USE if chr(code) not in used]
        if len(free) < 2:
            raise TemplateError("the conversation uses every private-use character", param="messages")
        self.begin, self.end = free[:2]
        forms = [form for mark in free[:2] for form in (re.escape(mark), re.escape(_escaped(mark)))]
        self.pattern = re.compile("(" + "|".join(forms) + ")")

    def is_begin(self, mark: str) -> bool:
        return mark in (self.begin, _escaped(self.begin))


def _escaped(mark: str) -> str:
    return f"\\u{ord(mark):04x}"


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    return value if isinstance(value, list) else ()


def _private_characters(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield from _PRIVATE_CHARACTER.findall(value)
        yield from (chr(int(code, 16)) for code in _ESCAPED_CHARACTER.findall(value))
    for child in _children(value):
        yield from _private_characters(child)
