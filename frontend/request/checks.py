"""What is wrong with a request beyond types and ranges: ids outside the vocabulary, fields that do not go together.

All of it is known before the prompt is made. Conversations have a module of their own, ``frontend.request.messages``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from frontend import errors
from frontend.request.requests import (
    MAX_BAD_WORD_BYTES,
    MAX_PROMPTS,
    MAX_STOP_BYTES,
    ChatRequest,
    CommonFields,
    CompletionRequest,
)
from protocol.requests import MAX_CHOICES

MAX_BIAS = 100


def check(request: CommonFields, *, vocabulary: int, max_logprobs: int) -> None:
    """Raise ApiError for what no route may ask for."""
    _check_ids(request.stop_token_ids or (), "stop_token_ids", vocabulary)
    _check_ids(request.allowed_token_ids or (), "allowed_token_ids", vocabulary)
    _check_biases(request.logit_bias or {}, vocabulary)
    _check_strings("stop", request.stop_strings(), MAX_STOP_BYTES)
    _check_strings("bad_words", request.bad_words or [], MAX_BAD_WORD_BYTES)
    if request.stream_options is not None and not request.stream:
        raise errors.invalid_value("stream_options", "'stream_options' is only allowed when 'stream' is true.")
    if request.best_of is not None and request.best_of != request.choices:
        raise errors.unsupported("best_of", "'best_of' is only supported with the value of 'n'.")
    if request.request_id is not None and request.request_id.endswith("\n"):
        raise errors.invalid_value("request_id", "Invalid value for 'request_id': expected printable characters.")
    if request.truncate_prompt_tokens == 0:
        raise errors.invalid_value(
            "truncate_prompt_tokens", "Invalid value for 'truncate_prompt_tokens': expected at least 1, or -1, got 0."
        )
    _check_logprobs(request, max_logprobs)


def _check_logprobs(request: CommonFields, most: int) -> None:
    if isinstance(request, ChatRequest) and request.top_logprobs and not request.logprobs:
        raise errors.invalid_value("top_logprobs", "'top_logprobs' is only allowed when 'logprobs' is true.")
    chat = isinstance(request, ChatRequest)
    asked = (("top_logprobs" if chat else "logprobs", request.alternatives()),)
    for name, value in (*asked, ("prompt_logprobs", request.prompt_logprobs or 0)):
        if value > most:
            raise errors.invalid_value(name, f"Invalid value for '{name}': expected at most {most}, got {value}.")


def _check_strings(name: str, strings: list[str], most: int) -> None:
    for at, string in enumerate(strings):
        if len(string.encode()) > most:
            param = f"{name}[{at}]"
            raise errors.invalid_value(param, f"Invalid value for '{param}': expected at most {most} bytes.")


def _check_ids(ids: Sequence[int], name: str, vocabulary: int) -> None:
    if not ids or max(ids) < vocabulary:
        return
    at, token = next((at, token) for at, token in enumerate(ids) if token >= vocabulary)
    param = f"{name}[{at}]"
    raise errors.invalid_value(
        param, f"Invalid value for '{param}': expected a token id below {vocabulary}, got {token}."
    )


def _check_biases(biases: dict[str, float], vocabulary: int) -> None:
    seen: set[int] = set()
    for name, bias in biases.items():
        param = f"logit_bias.{name[:32]}"
        if not (name.isascii() and name.isdecimal() and len(name) <= 10) or int(name) >= vocabulary:
            raise errors.invalid_value(
                param, f"Invalid key in 'logit_bias': expected a token id below {vocabulary}, got '{name[:32]}'."
            )
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            raise errors.invalid_value(
                param, f"Invalid value for '{param}': expected a number from -{MAX_BIAS} to {MAX_BIAS}."
            )
        if int(name) in seen:
            raise errors.invalid_value(param, f"'logit_bias' names token {int(name)} more than once.")
        seen.add(int(name))


def prompts_of(request: CompletionRequest, vocabulary: int) -> list[str | list[int]]:
    """The prompts of a completion, one or several, each a text or token ids. Raises ApiError."""
    prompt = request.prompt
    listed = _is_list_of_prompts(prompt)
    prompts: list[Any] = list(prompt) if listed else [prompt]
    if len(prompts) > MAX_PROMPTS:
        raise errors.invalid_value("prompt", f"'prompt' has {len(prompts)} prompts; expected at most {MAX_PROMPTS}.")
    if len(prompts) * request.choices > MAX_CHOICES:
        raise errors.invalid_value(
            "n", f"{len(prompts)} prompts times n = {request.choices} is more than {MAX_CHOICES} choices."
        )
    kind = type(prompts[0])
    for at, one in enumerate(prompts):
        param = f"prompt[{at}]" if listed else "prompt"
        if type(one) is not kind:
            raise errors.invalid_type(param, f"Invalid type for '{param}': prompts are all texts or all lists of ids.")
        if not one:
            raise errors.invalid_value(param, f"'{param}' is empty.")
        if isinstance(one, list):
            _check_prompt_ids(one, param, vocabulary)
    return prompts


def choices_of(request: CommonFields) -> int:
    """How many outputs a checked request asks for, over all of its prompts."""
    if isinstance(request, CompletionRequest) and _is_list_of_prompts(request.prompt):
        return len(request.prompt) * request.choices
    return request.choices


def _is_list_of_prompts(prompt: str | list[Any]) -> bool:
    return not isinstance(prompt, str) and bool(prompt) and isinstance(prompt[0], str | list)


def _check_prompt_ids(prompt: list[Any], param: str, vocabulary: int) -> None:
    """A prompt of token ids is what it says it is."""
    for at, token in enumerate(prompt):
        if type(token) is not int:
            raise errors.invalid_type(
                f"{param}[{at}]", f"Invalid type for '{param}[{at}]': expected a token id; prompts are lists of them."
            )
        if not 0 <= token < vocabulary:
            raise errors.invalid_value(
                f"{param}[{at}]", f"Invalid value for '{param}[{at}]': expected a token id from 0 to {vocabulary - 1}."
            )
