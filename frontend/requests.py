"""The two requests, declared: every known field with its type, its range and its class.

``frontend.fields`` reads these annotations. A field without a marker is honoured. The neutral values of a refused
field are its documented no-op defaults; giving one is the same as not giving the field.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from frontend.fields import Inert, Refused, Synonyms

Meta = msgspec.Meta

MAX_STOP_STRINGS = 64
MAX_STOP_BYTES = 256
"""Of one stop string, in UTF-8."""
MAX_STOP_IDS = 1024

StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_BYTES)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
StopStrings = Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)]
StopIds = Annotated[list[TokenId], Meta(max_length=MAX_STOP_IDS)]
OutputLimit = Annotated[int, Meta(ge=-1)]
"""-1 is no limit of the client's; 0 is refused where the budget is made, with a message of its own."""
Probability = Annotated[float, Meta(ge=0.0, le=1.0)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
RepetitionPenalty = Annotated[float, Meta(gt=0.0, le=100.0)]


class StreamOptions(msgspec.Struct, kw_only=True, frozen=True):
    """``stream_options``."""

    include_usage: bool | None = None
    include_obfuscation: Annotated[bool | None, Inert()] = None
    continuous_usage_stats: Annotated[Any, Refused(neutral=(False,))] = None


class CommonFields(msgspec.Struct, kw_only=True, frozen=True):
    """What both routes take."""

    model: str

    # How long, and where it ends.
    max_tokens: Annotated[OutputLimit | None, Synonyms(("n_predict",))] = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    stop: StopString | StopStrings | None = None
    stop_token_ids: StopIds | None = None
    ignore_eos: bool | None = None

    # How tokens are chosen.
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Probability | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[RepetitionPenalty | None, Synonyms(("repeat_penalty",))] = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None

    # How it is delivered.
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Annotated[int, Meta(ge=-100, le=100)] | None = None

    # Cannot change tokens.
    user: Annotated[str | None, Inert()] = None
    metadata: Annotated[dict[str, Any] | None, Inert()] = None
    store: Annotated[bool | None, Inert()] = None
    service_tier: Annotated[str | None, Inert()] = None
    safety_identifier: Annotated[str | None, Inert()] = None
    prompt_cache_key: Annotated[str | None, Inert()] = None
    prediction: Annotated[dict[str, Any] | None, Inert()] = None
    verbosity: Annotated[str | None, Inert()] = None

    # Not offered.
    best_of: Annotated[Any, Refused(neutral=(1,))] = None
    use_beam_search: Annotated[Any, Refused(neutral=(False,))] = None

    # Not offered yet.
    n: Annotated[Any, Refused(neutral=(1,))] = None
    prompt_logprobs: Annotated[Any, Refused()] = None
    echo: Annotated[Any, Refused(neutral=(False,))] = None
    logit_bias: Annotated[Any, Refused()] = None
    bad_words: Annotated[Any, Refused()] = None
    allowed_token_ids: Annotated[Any, Refused()] = None
    include_stop_str_in_output: Annotated[Any, Refused(neutral=(False,)), Synonyms(("no_stop_trim",))] = None
    skip_special_tokens: Annotated[Any, Refused(neutral=(True,))] = None
    return_token_ids: Annotated[Any, Refused(neutral=(False,)), Synonyms(("return_tokens",))] = None
    return_tokens_as_token_ids: Annotated[Any, Refused(neutral=(False,))] = None
    truncate_prompt_tokens: Annotated[Any, Refused()] = None
    cache_salt: Annotated[Any, Refused(neutral=("",))] = None
    request_id: Annotated[Any, Refused()] = None
    timeout: Annotated[Any, Refused()] = None
    response_format: Annotated[Any, Refused(neutral=({"type": "text"},))] = None
    structured_outputs: Annotated[Any, Refused()] = None
    guided_json: Annotated[Any, Refused()] = None
    guided_regex: Annotated[Any, Refused()] = None
    guided_choice: Annotated[Any, Refused()] = None
    guided_grammar: Annotated[Any, Refused()] = None
    thinking_token_budget: Annotated[Any, Refused(neutral=(-1,)), Synonyms(("thinking_budget_tokens",))] = None

    def stop_strings(self) -> list[str]:
        """``stop`` as a list."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    def output_limit(self) -> tuple[str, int | None]:
        """The field that limits the output, and its value; None when the client set none."""
        return "max_tokens", None if self.max_tokens == -1 else self.max_tokens

    def wants_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class ChatRequest(CommonFields, kw_only=True, frozen=True):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: OutputLimit | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    add_special_tokens: Annotated[Any, Refused(neutral=(False,))] = None
    chat_template: Annotated[Any, Refused()] = None
    documents: Annotated[Any, Refused()] = None
    logprobs: Annotated[Any, Refused(neutral=(False,))] = None
    top_logprobs: Annotated[Any, Refused(neutral=(0,))] = None
    modalities: Annotated[Any, Refused(neutral=(["text"],))] = None
    audio: Annotated[Any, Refused()] = None
    web_search_options: Annotated[Any, Refused()] = None
    tools: Annotated[Any, Refused()] = None
    tool_choice: Annotated[Any, Refused(neutral=("none", "auto"))] = None
    parallel_tool_calls: Annotated[Any, Refused(neutral=(True,))] = None
    functions: Annotated[Any, Refused()] = None
    function_call: Annotated[Any, Refused(neutral=("none", "auto"))] = None
    reasoning_effort: Annotated[Any, Refused()] = None
    include_reasoning: Annotated[Any, Refused(neutral=(True,)), Synonyms(("separate_reasoning",))] = None

    def output_limit(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is None:
            return super().output_limit()
        return "max_completion_tokens", None if self.max_completion_tokens == -1 else self.max_completion_tokens


class CompletionRequest(CommonFields, kw_only=True, frozen=True):
    """POST /v1/completions."""

    prompt: str | list[Any]
    """A string or a list of token ids; lists of prompts are refused for now."""
    add_special_tokens: Annotated[Any, Refused(neutral=(True,))] = None
    logprobs: Annotated[Any, Refused()] = None
    suffix: Annotated[Any, Refused(neutral=("",))] = None
