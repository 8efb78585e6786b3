"""Chat templates: a conversation → the string and the token ids the model sees."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2

from frontend.text.budget import RenderLimitExceeded, RenderLimits
from frontend.text.content_format import detect_content_format
from frontend.text.conversation import (
    ArgumentsFormat,
    ContentFormat,
    Message,
    normalise,
    with_empty_contents,
)
from frontend.text.encoder import PromptEncoder
from frontend.text.errors import NoTemplateError, TemplateError, TemplateLimitError
from frontend.text.protection import LiteralGuard, Marks, Spans
from frontend.text.sandbox import ChatEnvironment
from headrace.model_files.artefacts import Artefacts

__all__ = ["ChatTemplate", "NoTemplateError", "Rendered", "TemplateError", "TemplateLimitError", "read_override"]

_EVALUATION_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What evaluating an expression of a template can raise."""

_OWN_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
"""Appended to the message to continue; where it comes out, the prompt ends. As transformers does it."""

_MAX_SOURCE = 1 << 20


@dataclass(frozen=True)
class Rendered:
    """A rendered conversation."""

    text: str
    protected: Spans
    """Where special-token text is text only."""
    template: str
    """Its name: "default", "tool_use", …; "override" for one from the command line, "request" for a request's own."""


def read_override(value: str) -> str:
    """What --chat-template names: a file's contents, or the template itself when it has braces."""
    if "{" in value:
        return value
    try:
        return Path(value).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TemplateError(f"chat template {value}: cannot be read: {error}") from error


class ChatTemplate:
    """One model's chat templates. Safe to share between threads.

    `override` replaces them all. `content_format` says whether templates get content as a string or as a list of
    parts; None decides from the template's text. `trust_contents` lets special-token text of users be special tokens.
    """

    def __init__(
        self,
        artefacts: Artefacts,
        override: str | None = None,
        *,
        clock: Callable[[], datetime] = datetime.now,
        limits: RenderLimits | None = None,
        content_format: ContentFormat | None = None,
        trust_contents: bool = False,
    ) -> None:
        self._environment = ChatEnvironment(clock, limits or RenderLimits())
        environment = self._environment
        sources = {"override": override} if override else artefacts.chat_templates
        self._templates = {name: _Template(environment, name, source) for name, source in sources.items()}
        self._special_names: dict[str, Any] = dict(artefacts.special.names)
        self._content_format = content_format
        self._guard = LiteralGuard(() if trust_contents else artefacts.special.literals)
        self._encoder = PromptEncoder(artefacts)
        self._model = artefacts.name

    @property
    def available(self) -> bool:
        """Whether the model can chat at all."""
        return bool(self._templates)

    @property
    def encoder(self) -> PromptEncoder:
        """The encoder for raw prompts of the same model."""
        return self._encoder

    def replaced(self, source: str) -> ChatTemplate:
        """The same with one other template, such as a request's own; the encoder is shared."""
        other = copy.copy(self)
        other._templates = {"request": _Template(self._environment, "request", source)}
        return other

    def source(self, name: str) -> str:
        """The text of a template by the name `Rendered.template` gives."""
        return self._templates[name].source

    def check(self) -> None:
        """Compile every template now. Raises TemplateError for one that is not valid."""
        for template in self._templates.values():
            template.compiled  # noqa: B018 — compiling is the point

    def render(
        self,
        messages: list[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> Rendered:
        """Render a conversation of plain JSON values. Raises TemplateError for anything wrong with it."""
        if continue_final_message and add_generation_prompt:
            raise TemplateError(
                "continue_final_message and add_generation_prompt cannot both be true", param="continue_final_message"
            )
        try:
            return self._render(
                self._choose(tools),
                messages,
                {"tools": tools or None, "add_generation_prompt": add_generation_prompt},
                documents,
                template_kwargs,
                continue_final_message,
            )
        except RecursionError as error:
            raise TemplateError("the conversation is nested too deeply", param="messages") from error

    def encode(self, rendered: Rendered) -> list[int]:
        """Token ids of a rendered conversation. The template writes BOS itself; a second one is never added."""
        return self._encoder.encode_rendered(rendered.text, rendered.protected)

    def _render(
        self,
        template: _Template,
        messages: list[Message],
        variables: dict[str, Any],
        documents: list[dict[str, Any]] | None,
        template_kwargs: dict[str, Any] | None,
        continues: bool,
    ) -> Rendered:
        variables = {**self._special_names, **self._checked_kwargs(template_kwargs), **variables}
        has_calls = any(isinstance(message, dict) and message.get("tool_calls") for message in messages)
        made = normalise(
            messages,
            content=self._content_format or template.content_format,
            arguments=template.arguments_format if has_calls else "object",
            knows_developer="developer" in template.source,
        )
        if not self._guard.is_needed(made, documents):
            text = _evaluate(template, made, {**variables, "documents": documents}, continues)
            return Rendered(text, (), template.name)
        marks = Marks(made, documents, variables["tools"], template_kwargs, template.source)
        made, documents = self._guard.mark(made, documents, marks)
        text = _evaluate(template, made, {**variables, "documents": documents}, continues)
        text, protected = self._guard.take_out(text, marks)
        return Rendered(text, protected, template.name)

    def _choose(self, tools: list[dict[str, Any]] | None) -> _Template:
        for name in ("request", "override", "tool_use" if tools else "", "default"):
            if name in self._templates:
                return self._templates[name]
        if self._templates:
            names = ", ".join(sorted(self._templates))
            raise NoTemplateError(f"{self._model} has no default chat template, only {names}; give --chat-template")
        raise NoTemplateError(f"{self._model} has no chat template; start the server with --chat-template FILE")

    def _checked_kwargs(self, kwargs: dict[str, Any] | None) -> dict[str, Any]:
        if taken := _OWN_VARIABLES.intersection(kwargs or ()):
            name = min(taken)
            raise TemplateError(f"{name} is a field of the request, not of chat_template_kwargs", param=name)
        return kwargs or {}


class _Template:
    """One template: its source, compiled when first used, and what it expects of messages."""

    def __init__(self, environment: ChatEnvironment, name: str, source: str) -> None:
        self.name = name
        self.source = source
        self._environment = environment

    @cached_property
    def compiled(self) -> jinja2.Template:
        if len(self.source) > _MAX_SOURCE:
            raise TemplateError(f"the chat template {self.name} is longer than {_MAX_SOURCE} characters")
        try:
            return self._environment.compile_template(self.source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(
                f"the chat template {self.name} is not valid: line {error.lineno}: {error.message}"
            ) from error
        except (RenderLimitExceeded, *_EVALUATION_ERRORS) as error:
            raise TemplateError(f"the chat template {self.name} cannot be compiled: {error}") from error

    @cached_property
    def content_format(self) -> ContentFormat:
        return detect_content_format(self._environment, self.source)

    @cached_property
    def arguments_format(self) -> ArgumentsFormat:
        """Tried out: an object is right unless only text comes out as the JSON that went in."""
        needle = {"needle": "haystack"}
        text = json.dumps(needle)
        if self._shows(needle, '"needle"') or not self._shows(text, text):
            return "object"
        return "string"

    def _shows(self, arguments: Any, wanted: str) -> bool:
        call = {"id": "call00000", "type": "function", "function": {"name": "find", "arguments": arguments}}
        messages = [
            {"role": "user", "content": "Find it."},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        try:
            return wanted in self.evaluate({"messages": messages, "tools": None, "documents": None, "bos_token": ""})
        except TemplateError:
            return False

    def evaluate(self, variables: dict[str, Any]) -> str:
        try:
            return self._environment.render_template(self.compiled, variables)
        except RenderLimitExceeded as error:
            raise TemplateLimitError(f"the chat template {self.name} was stopped: {error}") from error
        except jinja2.UndefinedError as error:
            raise _MissingValue(f"the chat template {self.name} cannot be applied: {error.message}") from error
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template refuses this conversation: {error.message}") from error
        except _EVALUATION_ERRORS as error:
            raise TemplateError(
                f"the chat template {self.name} cannot be applied: {type(error).__name__}: {error}"
            ) from error


class _MissingValue(TemplateError):
    """The template uses something the conversation does not have."""


def _evaluate(template: _Template, messages: list[Message], variables: dict[str, Any], continues: bool) -> str:
    final = ""
    if continues:
        messages, final = _tag_final_message(template, messages)
    try:
        text = template.evaluate({**variables, "messages": messages})
    except _MissingValue:
        if all("content" in message for message in messages):
            raise
        text = template.evaluate({**variables, "messages": with_empty_contents(messages)})
    return _cut_at_tag(text, final) if continues else text


def _tag_final_message(template: _Template, messages: list[Message]) -> tuple[list[Message], str]:
    """The messages with a tag after the text to continue, and that text."""
    *earlier, last = messages
    content = last.get("content")
    tagged: Any
    if isinstance(content, str):
        final, tagged = content, content + _CONTINUE_TAG
    elif isinstance(content, list) and content:
        final = content[-1]["text"]
        tagged = [*content[:-1], {**content[-1], "text": final + _CONTINUE_TAG}]
    else:
        raise TemplateError("the last message has no content to continue", param="messages")
    if "content" not in template.source:
        raise TemplateError("the chat template does not show message contents, so none can be continued")
    return [*earlier, {**last, "content": tagged}], final


def _cut_at_tag(text: str, final: str) -> str:
    if final.strip() not in text or _CONTINUE_TAG.strip() not in text:
        raise TemplateError("the chat template leaves out the last message, so it cannot be continued")
    at = text.rindex(_CONTINUE_TAG.strip())
    if text.startswith(_CONTINUE_TAG, at):
        return text[:at]
    return text[:at].rstrip()  # the template trims contents
