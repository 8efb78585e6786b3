"""Requests → token ids, and what of a prompt an answer may show again. CPU work, for a thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from frontend import errors
from frontend.request import checks
from frontend.request.requests import ChatRequest, CommonFields, CompletionRequest
from frontend.settings import FrontendSettings
from frontend.text.detokenizer import Detokenizer, TokenBytes
from frontend.text.errors import TemplateError
from frontend.text.templates import ChatTemplate, Rendered
from headrace.model_files.artefacts import Artefacts
from protocol.packing import pack_u32


@dataclass(frozen=True)
class Prompt:
    """One prompt."""

    ids: list[int]
    echo: str | None = None
    """What the answer shows before the output; None when it was not asked for."""
    offsets: tuple[int, ...] = ()
    """Where each id begins in the echoed text; only when it is shown with logprobs."""
    tail: bytes = b""
    """Bytes at the end that do not form a character yet: the output may complete it."""


class PromptMaker:
    """Renders conversations and encodes texts, with one model's templates and tokenizer."""

    def __init__(
        self, settings: FrontendSettings, artefacts: Artefacts, template: ChatTemplate, tokens: TokenBytes
    ) -> None:
        self._settings = settings
        self._artefacts = artefacts
        self._template = template
        self._tokens = tokens

    def prompts(self, request: CommonFields, *, context: int) -> list[Prompt]:
        """The prompts of a request that was checked. Raises ApiError for a conversation the template refuses."""
        if isinstance(request, ChatRequest):
            ids = self._truncated(self.chat_ids(request, self.render(request)), request, context)
            return [Prompt(ids, echo=_last_turn(request) if request.echo else None, tail=self._tail(ids))]
        assert isinstance(request, CompletionRequest)
        found = checks.prompts_of(request, self._artefacts.vocab_size)
        return [self._completion(request, prompt, context) for prompt in found]

    def render(self, request: ChatRequest) -> Rendered:
        """The conversation as the model will see it. Raises ApiError."""
        continues = bool(request.continue_final_message)
        generates = not continues if request.add_generation_prompt is None else request.add_generation_prompt
        try:
            template = self._template
            if request.chat_template is not None:
                template = template.replaced(request.chat_template)
            return template.render(
                request.messages,
                add_generation_prompt=generates,
                continue_final_message=continues,
                documents=request.documents,
                template_kwargs={**self._settings.default_chat_template_kwargs, **(request.chat_template_kwargs or {})},
            )
        except TemplateError as error:
            raise errors.invalid_value(error.param or "messages", f"Bad conversation: {error}.") from error

    def chat_ids(self, request: ChatRequest, rendered: Rendered) -> list[int]:
        """The ids of a rendered conversation. Raises ApiError."""
        try:
            ids = self._template.encode(rendered)
        except TemplateError as error:
            raise errors.invalid_value(error.param or "messages", f"Bad conversation: {error}.") from error
        return self._template.encoder.with_special_tokens(ids) if request.add_special_tokens else ids

    def bad_words(self, words: list[str]) -> tuple[bytes, ...]:
        """The id sequences of each word, at the start of a text and after a space."""
        encoder = self._template.encoder
        spellings = [spelling for word in words for spelling in (word, f" {word.lstrip()}")]
        found = [encoder.encode_prompt(spelling, add_special_tokens=False) for spelling in spellings]
        return tuple(dict.fromkeys(pack_u32(ids) for ids in found if ids))

    def _completion(self, request: CompletionRequest, prompt: str | list[int], context: int) -> Prompt:
        encoder = self._template.encoder
        special = request.add_special_tokens is not False
        if isinstance(prompt, str):
            plain = encoder.encode_prompt(prompt, add_special_tokens=False)
            whole = encoder.with_special_tokens(plain) if special else plain
        else:
            plain = whole = prompt
        ids = self._truncated(whole, request, context)
        tail = self._tail(ids)
        if not request.echo:
            return Prompt(ids, tail=tail)
        if isinstance(prompt, str) and ids is whole:
            # Special tokens that the text itself names are text in an echo, and the ones put around it are not there.
            added = whole.index(plain[0]) if plain else len(whole)
            starts = self._starts(plain, Detokenizer(self._tokens, skip_special_tokens=False))[0]
            ends = len(whole) - added - len(plain)
            offsets = [0] * added + [min(start, len(prompt)) for start in starts] + [len(prompt)] * ends
            return Prompt(ids, echo=prompt, offsets=tuple(offsets))
        starts, text = self._starts(ids, Detokenizer(self._tokens, skip_special_tokens=skips_special(request)))
        return Prompt(ids, echo=text, offsets=tuple(starts), tail=tail)

    def _truncated(self, ids: list[int], request: CommonFields, context: int) -> list[int]:
        """The last tokens of a prompt that is longer than the client wants."""
        most = request.truncate_prompt_tokens
        if most is None:
            return ids
        if most == -1:
            asked = request.output_limit()[1]
            most = context - 1 if asked is None else context - asked
            most = most if most > 0 else context - 1
        return ids if len(ids) <= most else ids[-most:]

    def _tail(self, ids: list[int]) -> bytes:
        data = b""
        for index in reversed(ids[-8:]):
            data = self._tokens.of(index) + data
            if len(data) >= 4:
                break
        return Detokenizer.incomplete_end(data)

    @staticmethod
    def _starts(ids: list[int], detokenizer: Detokenizer) -> tuple[list[int], str]:
        """Where each id begins in the text of all, and the text, without what is no whole character at its end."""
        starts: list[int] = []
        pieces: list[str] = []
        length = 0
        for index in ids:
            starts.append(length)
            pieces.append(detokenizer.push((index,)))
            length += len(pieces[-1])
        return starts, "".join(pieces)


def skips_special(request: CommonFields) -> bool:
    """Whether special tokens are left out of what the answer shows."""
    return request.skip_special_tokens is not False


def _last_turn(request: ChatRequest) -> str:
    """The text of the last message, when the answer goes on in its role."""
    last = request.messages[-1]
    if last.get("role") != "assistant":
        return ""
    content: Any = last.get("content")
    if isinstance(content, list):
        return "\n".join(part if isinstance(part, str) else part.get("text") or "" for part in content)
    return content or ""
