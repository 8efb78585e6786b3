"""Text → token ids."""

from __future__ import annotations

import re
import secrets
from functools import cached_property

from tokenizers import AddedToken, Tokenizer

from frontend.text.errors import TemplateError
from frontend.text.protection import Spans
from headrace.model_files.artefacts import Artefacts


class PromptEncoder:
    """Encodes prompts with one model's tokenizer. Safe to share between threads."""

    def __init__(self, artefacts: Artefacts) -> None:
        self._tokenizer = artefacts.tokenizer()
        self._special = artefacts.special

    def encode_prompt(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """A raw prompt, with BOS before it and EOS after it where the model wants them; never two BOS."""
        ids = self._encode(text)
        return self.with_special_tokens(ids) if add_special_tokens else ids

    def with_special_tokens(self, ids: list[int]) -> list[int]:
        """The same ids with BOS before them and EOS after them, where the model wants them; never two BOS."""
        special = self._special
        made = list(ids)
        if special.add_bos and special.bos_id is not None and made[:1] != [special.bos_id]:
            made.insert(0, special.bos_id)
        if special.add_eos and special.eos_id is not None:
            made.append(special.eos_id)
        return made

    def encode_rendered(self, text: str, protected: Spans = ()) -> list[int]:
        """A rendered template, which writes its own special tokens. Inside `protected` they are text."""
        ids = self._plain.encode(text, protected) if protected else self._encode(text)
        bos = self._special.bos_id
        if self._special.add_bos and bos is not None and ids[:2] == [bos, bos]:
            del ids[0]  # the template writes BOS and so does a message or an override
        return ids

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    @cached_property
    def _plain(self) -> _StandInEncoder:
        return _StandInEncoder(self._tokenizer)


class _StandInEncoder:
    """A second tokenizer that reads no special-token text, and stand-ins for the special tokens that are meant.

    The whole string is encoded at once, so that what surrounds a protected literal is cut as it would be without it.
    A meant special token is replaced by its stand-in: an added token whose text holds a random number and so cannot
    occur in what a client sends.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._plain = Tokenizer.from_str(tokenizer.to_str())
        self._plain.encode_special_tokens = True
        nonce = secrets.token_hex(16)
        added = tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(index for index, token in added.items() if token.special)
        self._stand_ins = {added[index].content: f"\ue000{nonce}.{index}\ue001" for index in self._special_ids}
        self._break = f"\ue000{nonce}.break\ue001"
        stand_ins = [
            AddedToken(
                text,
                special=False,
                normalized=False,
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
            )
            for token in added.values()
            if (text := self._stand_ins.get(token.content)) is not None
        ]
        self._plain.add_tokens([*stand_ins, AddedToken(self._break, special=False, normalized=False)])
        self._meant_ids: dict[int, list[int]] = {self._id_of(self._break): []}
        for index in self._special_ids:
            self._meant_ids[self._id_of(self._stand_ins[added[index].content])] = [index]
        longest_first = sorted((token.content for token in added.values()), key=len, reverse=True)
        self._literal = re.compile("|".join(map(re.escape, longest_first)))

    def encode(self, text: str, protected: Spans) -> list[int]:
        """The ids of `text`; special tokens are read only outside the protected spans."""
        ids = self._plain.encode(self._with_stand_ins(text, protected, split=False), add_special_tokens=False).ids
        if not self._special_ids.isdisjoint(ids):  # this vocabulary merges plain text into a special token
            ids = self._plain.encode(self._with_stand_ins(text, protected, split=True), add_special_tokens=False).ids
            if not self._special_ids.isdisjoint(ids):
                raise TemplateError("a message holds a special token that this tokenizer cannot encode as plain text")
        return [meant for index in ids for meant in self._meant_ids.get(index, (index,))]

    def _with_stand_ins(self, text: str, protected: Spans, *, split: bool) -> str:
        pieces = []
        at = 0
        for start, end in protected:
            pieces.append(self._literal.sub(self._stand_in, text[at:start]))
            literal = text[start:end]
            pieces.append(self._break.join(literal) if split else literal)
            at = end
        pieces.append(self._literal.sub(self._stand_in, text[at:]))
        return "".join(pieces)

    def _stand_in(self, found: re.Match[str]) -> str:
        return self._stand_ins.get(found.group(), found.group())

    def _id_of(self, text: str) -> int:
        index = self._plain.token_to_id(text)
        assert index is not None, "every stand-in was just added"
        return index
