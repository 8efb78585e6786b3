"""Token ids → text, a few ids at a time.

Every id stands for some bytes; the text is those bytes as UTF-8. Bytes that do not yet make a whole character are held
back. The bytes of every id are computed once per model, from the tokenizer's decoder.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer

from headrace.model_files.artefacts import ArtefactError
from headrace.model_files.gguf_tokenizer import byte_alphabet

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_utf8_decoder = codecs.getincrementaldecoder("utf-8")


@dataclass(frozen=True)
class TokenBytes:
    """What each id of one tokenizer decodes to. Made once per model, shared by all its streams."""

    every: tuple[bytes, ...] = field(repr=False)
    """By id; ids without a token are empty."""
    visible: tuple[bytes, ...] = field(repr=False)
    """The same with special tokens empty."""
    special: frozenset[int] = field(repr=False)
    strip_start: int
    """How many spaces the decoder takes off the start of a text."""
    first_spaceless: bool
    """Whether the decoder drops every space of a text's first token instead."""

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> TokenBytes:
        """Raises ArtefactError naming a decoder that is not supported."""
        decoder = tokenizer.decoder
        rule = _Rule.of(None if decoder is None else json.loads(decoder.__getstate__()))
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        every = [b""] * (max(vocabulary.values(), default=-1) + 1)
        to_bytes = rule.to_bytes
        for token, index in vocabulary.items():
            every[index] = to_bytes(token)
        special = frozenset(index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special)
        visible = tuple(b"" if index in special else data for index, data in enumerate(every))
        return cls(tuple(every), visible, special, rule.strip_start, rule.first_spaceless)

    def of(self, index: int) -> bytes:
        """The bytes of one id, for logprobs and tokenize; empty for an id that has no token."""
        return self.every[index] if 0 <= index < len(self.every) else b""


class Detokenizer:
    """The text of one growing sequence of ids.

    The concatenation of what `push` and `flush` return equals `tokenizer.decode` of all ids, however they were split.
    One difference is deliberate: bytes that are no UTF-8 become U+FFFD as Python's `errors="replace"` has it, where the
    library's byte-fallback decoder writes one for every byte of the whole run, valid characters included.

    `continues_text`: the sequence follows a raw prompt, so the space the decoder would take off the start of a text
    stays. `prompt_tail`: bytes at the end of the prompt that do not form a character yet. When the sequence completes
    it, the whole character is the beginning of the text; when it does not, the tail shows as U+FFFD if `echoed`, the
    prompt being shown too, and not at all otherwise.
    """

    def __init__(
        self,
        tokens: TokenBytes,
        *,
        skip_special_tokens: bool = True,
        continues_text: bool = False,
        prompt_tail: bytes = b"",
        echoed: bool = False,
    ) -> None:
        self._every = tokens.every
        self._table = tokens.visible if skip_special_tokens else tokens.every
        self._skipped = tokens.special if skip_special_tokens else frozenset()
        self._decoder = _utf8_decoder("replace")
        self._decode: Callable[..., str] = self._decoder.decode
        self._strip = 0 if continues_text else tokens.strip_start
        self._first_spaceless = tokens.first_spaceless and not continues_text
        self._echoed = echoed
        self._tail = prompt_tail
        self._after_tail = b""
        if prompt_tail:
            self._decode = self._decode_after_tail

    @staticmethod
    def incomplete_end(data: bytes) -> bytes:
        """The bytes at the end of `data` that may yet become a character."""
        decoder = _utf8_decoder("replace")
        decoder.decode(data)
        return decoder.getstate()[0]

    @property
    def pending(self) -> bool:
        """Whether bytes of an incomplete character are held back."""
        return bool(self._after_tail or self._decoder.getstate()[0])

    @property
    def leading_spaces(self) -> int | None:
        """How many spaces the next visible token loses at its start; None for all of its spaces.

        After bytes that are held back none: the text will begin with their character, or with U+FFFD.
        """
        if self._first_spaceless:
            return None
        return 0 if self.pending else self._strip

    def push(self, ids: Sequence[int]) -> str:
        """The new text that `ids` complete; ids outside the vocabulary are ignored."""
        try:
            data = b"".join(map(self._table.__getitem__, ids))
        except IndexError:
            size = len(self._table)
            return self.push([index for index in ids if index < size])
        if self._first_spaceless:
            data = self._drop_first_spaces(ids)
        text = self._decode(data)
        return self._stripped(text) if self._strip and text else text

    def spell(self, index: int) -> str:
        """The new text of one id that is shown even when it is special."""
        data = self._every[index] if index < len(self._every) else b""
        return self._decode(data)

    def flush(self) -> str:
        """The end of the text: U+FFFD for bytes that never became a character."""
        return self._decode(b"", True)

    def _decode_after_tail(self, data: bytes, final: bool = False) -> str:
        """Decode the first character, which the prompt may have begun."""
        self._after_tail += data
        if not self._after_tail and not (final and self._echoed):
            return ""
        decoder = _utf8_decoder("replace")
        text = decoder.decode(self._tail + self._after_tail, final)
        if not text:
            return ""
        if not self._echoed and not text[0].encode().startswith(self._tail):
            decoder = _utf8_decoder("replace")
            text = decoder.decode(self._after_tail, final)
        self._after_tail = b""
        self._decoder, self._decode = decoder, decoder.decode
        return text

    def _drop_first_spaces(self, ids: Sequence[int]) -> bytes:
        """The bytes of `ids`, without any space in the first token that is not skipped."""
        pieces = []
        for index in ids:
            data = self._table[index]
            if self._first_spaceless and index not in self._skipped:
                data = data.replace(b" ", b"")
                self._first_spaceless = False
            pieces.append(data)
        return b"".join(pieces)

    def _stripped(self, text: str) -> str:
        kept = text.lstrip(" ")
        taken = min(self._strip, len(text) - len(kept))
        self._strip = 0 if kept else self._strip - taken
        return text[taken:]


@dataclass(frozen=True)
class _Rule:
    """How a tokenizer's decoder turns one token into bytes."""

    to_bytes: Callable[[str], bytes]
    strip_start: int = 0
    first_spaceless: bool = False

    @classmethod
    def of(cls, decoder: dict[str, Any] | None) -> _Rule:
        steps = _steps(decoder)
        kinds = [step["type"] for step in steps]
        if kinds == ["ByteLevel"]:
            return cls(_ByteLevel())
        if kinds == ["Metaspace"]:
            (step,) = steps
            prefixed = step.get("prepend_scheme", "always") != "never"
            return cls(_Replacing([(step["replacement"], " ")], byte_tokens=False), first_spaceless=prefixed)
        strip = 0
        if kinds[-1:] == ["Strip"] and "Fuse" in kinds:
            last = steps.pop()
            if last["content"] == " " and last.get("stop", 0) == 0:
                strip = last["start"]
                kinds.pop()
        if steps and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "ByteLevel"} and "ByteLevel" not in kinds[1:]:
            replacements = [_replacement(step) for step in steps if step["type"] == "Replace"]
            if kinds[0] == "ByteLevel" and not replacements and "ByteFallback" not in kinds:
                return cls(_ByteLevel(), strip_start=strip)
            if kinds[0] != "ByteLevel":
                return cls(_Replacing(replacements, byte_tokens="ByteFallback" in kinds), strip_start=strip)
        raise ArtefactError(f"tokenizer decoder {' + '.join(kinds) or 'none'} is not supported")


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    return list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]


def _replacement(step: dict[str, Any]) -> tuple[str, str]:
    pattern = step["pattern"].get("String")
    if pattern is None:
        raise ArtefactError("a tokenizer decoder that replaces by a regular expression is not supported")
    return pattern, step["content"]


class _ByteLevel:
    """GPT-2's alphabet: one letter a byte. A token with any other letter is plain text."""

    def __init__(self) -> None:
        self._bytes = {letter: byte for byte, letter in byte_alphabet().items()}

    def __call__(self, token: str) -> bytes:
        try:
            return bytes(map(self._bytes.__getitem__, token))
        except KeyError:
            return token.encode("utf-8", "replace")


class _Replacing:
    """SentencePiece: a token is text with a stand-in for the space, or one byte written <0xNN>."""

    def __init__(self, replacements: Sequence[tuple[str, str]], *, byte_tokens: bool) -> None:
        self._replacements = replacements
        self._byte_tokens = byte_tokens

    def __call__(self, token: str) -> bytes:
        if self._byte_tokens and _BYTE_TOKEN.fullmatch(token):
            return bytes((int(token[3:5], 16),))
        for old, new in self._replacements:
            token = token.replace(old, new)
        return token.encode("utf-8", "replace")
