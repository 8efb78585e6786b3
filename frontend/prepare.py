"""From a checked request to a Submission: the prompt rendered and tokenised, and everything that needs its length."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from frontend import errors, generation, messages
from frontend.feed import Submission
from frontend.generation import StopRules
from frontend.requests import ChatRequest, CommonFields, CompletionRequest
from frontend.text.errors import TemplateError
from frontend.text.templates import ChatTemplate, Rendered
from headrace.artefacts import Artefacts
from protocol.frontend import ModelInfo
from protocol.packing import pack_u32

ResultT = TypeVar("ResultT")

COMPLETION_MAX_TOKENS = 16
"""Output limit of /v1/completions without one from the client; a chat may fill the context."""


@dataclass(frozen=True)
class Prepared:
    """A request ready to be submitted, and what its answer will say about it."""

    submission: Submission
    seeds: tuple[int, ...]
    rules: StopRules
    fingerprint: str
    continues_text: bool
    """The output goes on after a raw prompt, in the middle of a text."""
    notes: dict[str, str] = field(default_factory=dict)
    """Response headers that tell what was changed."""


class Preparer:
    """Knows the model's tokenizer, template and defaults; has a bounded pool of threads for the heavy part."""

    def __init__(
        self,
        artefacts: Artefacts,
        template: ChatTemplate,
        *,
        defaults: generation.Defaults,
        template_kwargs: dict[str, Any],
        max_model_len: int,
        threads: int,
    ) -> None:
        self._artefacts = artefacts
        self._template = template
        self._defaults = defaults
        self._template_kwargs = template_kwargs
        self._max_model_len = max_model_len
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="headrace-prompt")

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def context(self, model: ModelInfo | None) -> int:
        """Most tokens of prompt and output together."""
        limits = [self._artefacts.context]
        if self._max_model_len:
            limits.append(self._max_model_len)
        if model is not None:
            limits.append(model.context)
        return min(limits)

    async def in_pool(self, work: Callable[[], ResultT]) -> ResultT:
        """Run CPU work without holding up the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def check(self, request: CommonFields) -> None:
        """Everything that can be checked before the prompt is made. Raises ApiError."""
        vocabulary = self._artefacts.vocab_size
        generation.check_stops(request, vocabulary=vocabulary)
        if request.stream_options is not None and not request.stream:
            raise errors.invalid_value("stream_options", "'stream_options' is only allowed when 'stream' is true.")
        if isinstance(request, ChatRequest):
            self._check_chat(request)
        elif isinstance(request, CompletionRequest) and not isinstance(request.prompt, str):
            _check_ids(request.prompt, vocabulary)

    def prompt_ids(self, request: CommonFields) -> list[int]:
        """The prompt's ids; heavy, for a thread. Raises ApiError for a conversation the template refuses."""
        if isinstance(request, ChatRequest):
            return self._chat_ids(request)
        assert isinstance(request, CompletionRequest)
        if isinstance(request.prompt, str):
            return self._template.encoder.encode_prompt(request.prompt)
        return request.prompt

    def finish(self, request: CommonFields, ids: list[int], model: ModelInfo) -> Prepared:
        """Budget and parameters, now that the prompt's length is known. Raises ApiError."""
        chat = isinstance(request, ChatRequest)
        param = "messages" if chat else "prompt"
        if not ids:
            raise errors.invalid_value(param, "The prompt has no tokens.")
        budget = generation.budget(
            request,
            prompt=len(ids),
            context=self.context(model),
            default=None if chat else COMPLETION_MAX_TOKENS,
            where=param,
            param=param,
        )
        rules = generation.stop_rules(request, self._artefacts.end_ids, max_tokens=budget.max_tokens)
        submission = Submission(
            model=model.name,
            tokens=pack_u32(ids),
            max_tokens=budget.max_tokens,
            sampling=generation.sampling(request, self._defaults, vocabulary=self._artefacts.vocab_size),
            stop_ids=pack_u32(sorted(rules.ids)),
            priority=request.priority or 0,
        )
        return Prepared(
            submission,
            seeds=(generation.seed_of(request),),
            rules=rules,
            fingerprint=f"fp_{model.numerics_digest.hex()[:12]}",
            continues_text=not chat,
            notes={"x-clamped": f"max_tokens={budget.max_tokens}"} if budget.clamped else {},
        )

    def _check_chat(self, request: ChatRequest) -> None:
        if not self._template.available:
            raise errors.invalid_value(
                "messages", "This model has no chat template; start the server with --chat-template to give it one."
            )
        messages.check(request.messages)
        if request.continue_final_message and request.add_generation_prompt:
            raise errors.invalid_value(
                "continue_final_message", "'add_generation_prompt' and 'continue_final_message' exclude each other."
            )

    def rendered(self, request: ChatRequest) -> Rendered:
        """The conversation as the template writes it; heavy, for a thread. Raises ApiError."""
        continues = bool(request.continue_final_message)
        generates = not continues if request.add_generation_prompt is None else request.add_generation_prompt
        try:
            return self._template.render(
                request.messages,
                add_generation_prompt=generates,
                continue_final_message=continues,
                template_kwargs={**self._template_kwargs, **(request.chat_template_kwargs or {})},
            )
        except TemplateError as error:
            raise _bad_conversation(error) from error

    def template_source(self, rendered: Rendered) -> str:
        """The text of the server's template that made it."""
        return self._template.source(rendered.template)

    def _chat_ids(self, request: ChatRequest) -> list[int]:
        rendered = self.rendered(request)
        try:
            return self._template.encode(rendered)
        except TemplateError as error:
            raise _bad_conversation(error) from error


def _bad_conversation(error: TemplateError) -> errors.ApiError:
    return errors.invalid_value(error.param or "messages", f"Bad conversation: {error}.")


def _check_ids(prompt: list[Any], vocabulary: int) -> None:
    """A prompt of token ids is what it says it is."""
    if prompt and isinstance(prompt[0], str | list):
        raise errors.unsupported("prompt", "Lists of prompts are not supported here yet; send one prompt.")
    for at, token in enumerate(prompt):
        if isinstance(token, bool) or not isinstance(token, int):
            raise errors.invalid_type(f"prompt[{at}]", f"Invalid type for 'prompt[{at}]': expected a token id.")
        if not 0 <= token < vocabulary:
            raise errors.invalid_value(
                f"prompt[{at}]", f"Invalid value for 'prompt[{at}]': expected a token id from 0 to {vocabulary - 1}."
            )
