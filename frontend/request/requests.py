"""The two requests, declared: every known field with its type, its range and its class.

``frontend.request.fields`` reads these annotations. A field without a marker is honoured. The neutral values of a
refused field are its documented no-op defaults; giving one is the same as not giving the field.
"""

from __future__ import annotations

from typing import Annotated, Any, Self

import msgspec

from frontend.request.fields import Inert, Refused, Synonyms

Meta = msgspec.Meta

MAX_N = 128
MAX_PROMPTS = 128
MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_STOP_BYTES = 256
"""Of one stop string, in UTF-8."""
MAX_STOP_IDS = 1024
MAX_BIASES = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_BYTES = 128
MAX_ALLOWED_IDS = 2**18
MAX_SALT = 128
MAX_REQUEST_ID = 256
MAX_TIMEOUT = 7 * 24 * 3600.0
"""Seconds."""
PRINTABLE = r"^[\x21-\x7e][\x20-\x7e]*$"
"""What may stand in a header as it is; the final line break that the pattern lets through is refused apart."""

_SPENT = ("logit_bias", "allowed_token_ids", "bad_words", "user", "metadata", "safety_identifier", "prompt_cache_key",
          "prediction", "verbosity")  # fmt: skip
"""Fields of any size that nothing needs after the Submit is made."""

StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_BYTES)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
StopStrings = Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)]
StopIds = Annotated[list[TokenId], Meta(max_length=MAX_STOP_IDS)]
OutputLimit = Annotated[int, Meta(ge=-1)]
"""-1 is no limit of the client's; what 0 means is decided where the budget is made."""
Probability = Annotated[float, Meta(ge=0.0, le=1.0)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
RepetitionPenalty = Annotated[float, Meta(ge=0.01, le=100.0)]
"""Logits are divided by it, or multiplied: beyond a hundred either way they might leave the numbers of a float."""
Alternatives = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
BadWord = Annotated[str, Meta(min_length=1, max_length=MAX_BAD_WORD_BYTES)]


class StreamOptions(msgspec.Struct, kw_only=True, frozen=True):
    """``stream_options``."""

    include_usage: bool | None = None
    """One last chunk with the usage."""
    continuous_usage_stats: bool | None = None
    """The running usage in every chunk."""
    include_obfuscation: Annotated[bool | None, Inert()] = None


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
    logit_bias: Annotated[dict[str, float], Meta(max_length=MAX_BIASES)] | None = None
    """Token id → what is added to its logit, -100 … 100."""
    allowed_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_ALLOWED_IDS)] | None = None
    bad_words: Annotated[list[BadWord], Meta(max_length=MAX_BAD_WORDS)] | None = None
    """Texts that the output never completes, as their tokens alone or after a space."""
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    best_of: int | None = None
    """Only as another word for n."""

    # What is told besides the text.
    prompt_logprobs: Alternatives | None = None
    echo: bool | None = None
    return_token_ids: Annotated[bool | None, Synonyms(("return_tokens",))] = None
    return_tokens_as_token_ids: bool | None = None
    """Logprobs name tokens ``token_id:N``."""
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: Annotated[bool | None, Synonyms(("no_stop_trim",))] = None

    # How the prompt is made.
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    """Only the last so many tokens of the prompt; -1 is as many as the context has room for."""
    cache_salt: Annotated[str, Meta(max_length=MAX_SALT)] | None = None
    """Only prompts with the same salt share cached prefixes."""

    # How it is delivered.
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Annotated[int, Meta(ge=-100, le=100)] | None = None
    timeout: Annotated[float, Meta(gt=0.0, le=MAX_TIMEOUT)] | None = None
    """Seconds from the request's arrival to the end of its answer."""
    request_id: Annotated[str, Meta(max_length=MAX_REQUEST_ID, pattern=PRINTABLE)] | None = None

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
    use_beam_search: Annotated[Any, Refused(neutral=(False,))] = None

    # Not offered yet.
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

    def without_prompt(self) -> Self:
        """The same request once its prompt is made: what is large and no longer needed is gone."""
        return msgspec.structs.replace(
            self,
            **dict.fromkeys(_SPENT, None),
            **self.spent_prompt(),
            service_tier=None if self.service_tier is None else "default",
        )

    def spent_prompt(self) -> dict[str, Any]:
        """The fields that only the prompt is made of, emptied."""
        raise NotImplementedError

    @property
    def choices(self) -> int:
        """Answers to each prompt."""
        return 1 if self.n is None else self.n

    def alternatives(self) -> int:
        """Likeliest tokens told beside each output token; -1 for no logprobs at all."""
        raise NotImplementedError

    def scores_prompt(self) -> int:
        """Likeliest tokens told beside each prompt token; -1 for no logprobs of the prompt."""
        return -1 if self.prompt_logprobs is None else self.prompt_logprobs

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

    chat_template: str | None = None
    """Refused unless the server was started with --trust-request-chat-template."""
    documents: list[dict[str, Any]] | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None

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

    def spent_prompt(self) -> dict[str, Any]:
        return {"messages": [], "documents": None, "chat_template": None, "chat_template_kwargs": None}

    def alternatives(self) -> int:
        return (self.top_logprobs or 0) if self.logprobs else -1

    def output_limit(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is None:
            return super().output_limit()
        return "max_completion_tokens", None if self.max_completion_tokens == -1 else self.max_completion_tokens


class CompletionRequest(CommonFields, kw_only=True, frozen=True):
    """POST /v1/completions."""

    prompt: str | list[Any]
    """A string, a list of token ids, or a list of either."""
    logprobs: Alternatives | None = None
    suffix: Annotated[Any, Refused(neutral=("",))] = None

    def spent_prompt(self) -> dict[str, Any]:
        return {"prompt": ""}

    def alternatives(self) -> int:
        return -1 if self.logprobs is None else self.logprobs

    def scores_prompt(self) -> int:
        echoed = self.alternatives() if self.echo else -1
        return max(echoed, super().scores_prompt())
