"""From a checked request to what is submitted: prompts made, and everything that needs their length."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from frontend import errors
from frontend.answer.feed import Submission
from frontend.http.keys import ANYONE, Caller
from frontend.request import checks, generation, messages
from frontend.request.generation import StopRules
from frontend.request.prompts import Prompt, PromptMaker
from frontend.request.requests import ChatRequest, CommonFields, CompletionRequest
from frontend.settings import FrontendSettings
from frontend.text.detokenizer import TokenBytes
from frontend.text.templates import ChatTemplate, Rendered
from headrace.model_files.artefacts import Artefacts
from protocol.block_hashes import pack_hashes, root_hash
from protocol.frontend import ModelInfo
from protocol.packing import pack_u32

ResultT = TypeVar("ResultT")

COMPLETION_MAX_TOKENS = 16
"""Output limit of /v1/completions without one from the client; a chat may fill the context."""
SALT_BYTES = 16


@dataclass(frozen=True)
class PreparedPrompt:
    """One prompt ready to be submitted: its choices are admitted as one."""

    prompt: Prompt
    submission: Submission
    seeds: tuple[int, ...]
    rules: StopRules


@dataclass(frozen=True)
class Prepared:
    """A request ready to be submitted, and what its answer will say about it."""

    prompts: tuple[PreparedPrompt, ...]
    fingerprint: str
    continues_text: bool
    """The output goes on after a raw prompt, in the middle of a text."""
    deadline: float | None = None
    notes: dict[str, str] = field(default_factory=dict)
    """Response headers that tell what was changed."""


class Preparer:
    """Knows the model's tokenizer, template and defaults; has a bounded pool of threads for the heavy part."""

    def __init__(
        self,
        settings: FrontendSettings,
        artefacts: Artefacts,
        template: ChatTemplate,
        tokens: TokenBytes,
        *,
        defaults: generation.Defaults,
    ) -> None:
        self._settings = settings
        self._artefacts = artefacts
        self._template = template
        self._defaults = defaults
        self._maker = PromptMaker(settings, artefacts, template, tokens)
        self._pool = ThreadPoolExecutor(settings.tokenizer_threads, thread_name_prefix="headrace-prompt")

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def context(self, model: ModelInfo | None) -> int:
        """Most tokens of prompt and output together."""
        limits = [self._artefacts.context]
        if self._settings.max_model_len:
            limits.append(self._settings.max_model_len)
        if model is not None:
            limits.append(model.context)
        return min(limits)

    async def in_pool(self, work: Callable[[], ResultT]) -> ResultT:
        """Run CPU work without holding up the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def check(self, request: CommonFields) -> None:
        """Everything that can be checked before the prompt is made. Raises ApiError."""
        vocabulary = self._artefacts.vocab_size
        checks.check(request, vocabulary=vocabulary, max_logprobs=self._settings.max_logprobs)
        if isinstance(request, ChatRequest):
            self._check_chat(request)
        elif isinstance(request, CompletionRequest):
            checks.prompts_of(request, vocabulary)

    def prompt_ids(self, request: CommonFields, model: ModelInfo | None = None) -> list[int]:
        """The ids of a request's one prompt; heavy, for a thread. Raises ApiError."""
        prompts = self._maker.prompts(request, context=self.context(model))
        if len(prompts) > 1:
            raise errors.invalid_value("prompt", f"'prompt' has {len(prompts)} prompts; expected one.")
        return prompts[0].ids

    def rendered(self, request: ChatRequest) -> Rendered:
        """The conversation as the template writes it; heavy, for a thread. Raises ApiError."""
        return self._maker.render(request)

    @property
    def template(self) -> ChatTemplate:
        """The server's own templates."""
        return self._template

    def template_source(self, rendered: Rendered) -> str:
        """The text of the server's template that made it."""
        return self._template.source(rendered.template)

    def prepare(
        self, request: CommonFields, model: ModelInfo, *, caller: Caller = ANYONE, deadline: float | None = None
    ) -> Prepared:
        """Prompts, budgets and parameters; heavy, for a thread. Raises ApiError."""
        context = self.context(model)
        bad_words = self._maker.bad_words(request.bad_words or [])
        prompts: list[PreparedPrompt] = []
        clamped: list[int] = []
        for prompt in self._maker.prompts(request, context=context):
            made, is_clamped = self._prompt(request, prompt, context)
            sampling = generation.sampling(
                request, self._defaults, vocabulary=self._artefacts.vocab_size, bad_words=bad_words
            )
            tokens = pack_u32(prompt.ids)
            salt = _salt(caller.salt, request.cache_salt)
            block_size = model.block_size if self._settings.prefix_caching else 0
            submission = Submission(
                model=model.name,
                tokens=tokens,
                max_tokens=made.max_tokens,
                sampling=sampling,
                stop_ids=pack_u32(sorted(made.ids)),
                priority=caller.priority_of(request.priority),
                tenant=caller.tenant,
                salt=salt,
                block_hashes=pack_hashes(root_hash(salt), tokens, block_size),
                block_size=block_size,
                deadline=deadline,
            )
            prompts.append(PreparedPrompt(prompt, submission, generation.seeds(request), made))
            if is_clamped:
                clamped.append(made.max_tokens)
        return Prepared(
            tuple(prompts),
            fingerprint=f"fp_{model.numerics_digest.hex()[:12]}",
            continues_text=isinstance(request, CompletionRequest),
            deadline=deadline,
            notes={"x-clamped": f"max_tokens={min(clamped)}"} if clamped else {},
        )

    def _prompt(self, request: CommonFields, prompt: Prompt, context: int) -> tuple[StopRules, bool]:
        chat = isinstance(request, ChatRequest)
        param = "messages" if chat else "prompt"
        if not prompt.ids:
            raise errors.invalid_value(param, "The prompt has no tokens.")
        budget = generation.budget(
            request,
            prompt=len(prompt.ids),
            context=context,
            default=None if chat else COMPLETION_MAX_TOKENS,
            where=param,
            param=param,
            strict=self._settings.strict_limits,
        )
        rules = generation.stop_rules(request, self._artefacts.end_ids, max_tokens=budget.max_tokens)
        return rules, budget.clamped

    def _check_chat(self, request: ChatRequest) -> None:
        if request.chat_template is not None and not self._settings.trust_request_chat_template:
            raise errors.unsupported(
                "chat_template",
                "This server takes no templates from requests; --trust-request-chat-template would allow it.",
            )
        if not self._template.available and request.chat_template is None:
            raise errors.invalid_value(
                "messages", "This model has no chat template; start the server with --chat-template to give it one."
            )
        messages.check(request.messages)
        if request.continue_final_message and request.add_generation_prompt:
            raise errors.invalid_value(
                "continue_final_message", "'add_generation_prompt' and 'continue_final_message' exclude each other."
            )


def _salt(caller: bytes, given: str | None) -> bytes:
    """What keeps cached prefixes apart: the caller's salt, and the client's within it."""
    if not given:
        return caller
    return hashlib.blake2b(given.encode(), key=caller[:64], digest_size=SALT_BYTES).digest()
