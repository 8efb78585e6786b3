"""Every known field keeps the promise of its class, on both routes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.errors import ApiError
from frontend.request import fields
from frontend.request.requests import ChatRequest, CommonFields, CompletionRequest
from tests.frontend.harness import MODEL, chat, completion

REQUESTS: list[tuple[type[CommonFields], dict[str, Any]]] = [(ChatRequest, chat()), (CompletionRequest, completion())]

HONOURED = {
    "model", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "seed", "stop", "stop_token_ids", "ignore_eos", "stream",
    "stream_options", "priority", "n", "best_of", "logit_bias", "allowed_token_ids", "bad_words", "logprobs",
    "prompt_logprobs", "echo", "return_token_ids", "return_tokens_as_token_ids", "skip_special_tokens",
    "include_stop_str_in_output", "add_special_tokens", "truncate_prompt_tokens", "cache_salt", "timeout", "request_id",
}  # fmt: skip
INERT = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prediction", "verbosity",
}  # fmt: skip


def read(kind: type[CommonFields], body: dict[str, Any], **options: Any) -> tuple[CommonFields, list[str]]:
    return fields.read(msgspec.json.encode(body), kind, **options)


def refusal(kind: type[CommonFields], body: dict[str, Any], **options: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read(kind, body, **options)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(("kind", "body"), REQUESTS)
def test_the_classes_of_the_fields_are_those_of_the_contract(kind, body) -> None:
    rules = fields.table_of(kind).rules
    honoured = {name for name, rule in rules.items() if rule.refused is None and not rule.inert}
    own = {"messages", "max_completion_tokens", "add_generation_prompt", "continue_final_message", "top_logprobs",
           "chat_template_kwargs", "chat_template", "documents"} if kind is ChatRequest else {"prompt"}  # fmt: skip
    assert honoured == HONOURED | own
    assert {name for name, rule in rules.items() if rule.inert} == INERT


@pytest.mark.parametrize(("kind", "body"), REQUESTS)
def test_a_field_not_offered_is_refused_by_name_unless_neutral(kind, body) -> None:
    plain = read(kind, body)
    for name, rule in fields.table_of(kind).rules.items():
        if rule.refused is None:
            continue
        for value in (None, [], {}, *rule.refused.neutral):
            assert read(kind, {**body, name: value}) == plain, (name, value)
        for value in ("surely not neutral", 12345, [0], {"type": "x"}):
            error = refusal(kind, {**body, name: value})
            assert (error.code, error.param) == ("unsupported_parameter", name)


@pytest.mark.parametrize(("kind", "body"), REQUESTS)
def test_null_and_empty_values_of_optional_fields_mean_absent(kind, body) -> None:
    plain = read(kind, body)
    for name, rule in fields.table_of(kind).rules.items():
        if not rule.required:
            for value in (None, [], {}):
                assert read(kind, {**body, name: value}) == plain, (name, value)


@pytest.mark.parametrize(("kind", "body"), REQUESTS)
def test_inert_fields_are_typed_and_change_nothing(kind, body) -> None:
    good = {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "flex", "safety_identifier": "s",
            "prompt_cache_key": "k", "prediction": {"type": "content"}, "verbosity": "low"}  # fmt: skip
    assert set(good) == INERT
    _, ignored = read(kind, {**body, **good})
    assert ignored == []
    for name in INERT:
        assert refusal(kind, {**body, name: 7}).code == "invalid_type"


@pytest.mark.parametrize(("kind", "body"), REQUESTS)
def test_synonyms_mean_the_same_and_must_agree(kind, body) -> None:
    assert read(kind, {**body, "n_predict": 7})[0] == read(kind, {**body, "max_tokens": 7})[0]
    assert read(kind, {**body, "repeat_penalty": 1.5, "repetition_penalty": 1.5})[1] == []
    error = refusal(kind, {**body, "max_tokens": 7, "n_predict": 8})
    assert error.code == "invalid_value" and "max_tokens" in error.message and "n_predict" in error.message
    assert read(kind, {**body, "no_stop_trim": True})[0].include_stop_str_in_output
    error = refusal(kind, {**body, "no_stop_trim": True, "include_stop_str_in_output": False})
    assert "no_stop_trim" in error.message
    assert read(kind, {**body, "return_tokens": True})[0].return_token_ids


@pytest.mark.parametrize(
    ("name", "meant"),
    [("temprature", "temperature"), ("Seed", "seed"), ("top_kk", "top_k"), ("streams", "stream"),
     ("n_predic", "n_predict"), ("max_token", "max_tokens")],
)  # fmt: skip
def test_a_slip_is_refused_with_what_was_meant(name: str, meant: str) -> None:
    for kind, body in REQUESTS:
        error = refusal(kind, {**body, name: 1})
        assert (error.code, error.param) == ("unknown_parameter", name) and f"'{meant}'" in error.message


def test_other_unknown_fields_are_ignored_and_named_or_refused_when_strict() -> None:
    for kind, body in REQUESTS:
        unknown = {"id": 1, "k": 2, "typical_p": 0.5, "stream": True, "stream_options": {"wholly_new": 1}}
        request, ignored = read(kind, {**body, **unknown})
        assert ignored == ["id", "k", "typical_p", "stream_options.wholly_new"] and request.stream
        error = refusal(kind, {**body, "typical_p": 0.5}, strict=True)
        assert (error.code, error.param) == ("unknown_parameter", "typical_p")


def test_a_slip_inside_an_object_is_refused_too() -> None:
    error = refusal(ChatRequest, {**chat(), "stream": True, "stream_options": {"include_usages": True}})
    assert error.param == "stream_options.include_usages"


@given(st.text(max_size=200))
def test_the_header_of_ignored_fields_is_plain_whatever_the_names(name: str) -> None:
    header = fields.ignored_header([name] * 20)
    assert header.isascii() and header.isprintable() and len(header) <= 16 * 66


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
awkward = st.recursive(
    st.text(alphabet='"\\[{x\n/é', max_size=6),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(alphabet='"\\[{', max_size=3), inner, max_size=4)
    ),
    max_leaves=12,
)


def containers(value: Any) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + sum(map(containers, value)) if isinstance(value, list) else 0


@given(awkward, st.integers(0, 40))
def test_containers_are_counted_without_parsing_whatever_stands_in_strings(value: Any, cut: int) -> None:
    data = msgspec.json.encode(value)
    assert fields.count_containers(data) == containers(value)
    assert fields.count_containers(data[:cut]) <= containers(value)


known_names = st.sampled_from(sorted({*fields.table_of(ChatRequest).rules, *fields.table_of(CompletionRequest).rules}))


@given(st.dictionaries(known_names | st.text(max_size=12), json_values, max_size=6), st.booleans())
def test_any_object_is_a_request_or_one_clients_error(extra: dict[str, Any], complete: bool) -> None:
    for kind, body in REQUESTS:
        try:
            request, _ = read(kind, {**body, **extra} if complete else extra)
        except ApiError as error:
            assert error.status == 400 and error.code and len(error.message) <= 2000
        else:
            assert request.model == MODEL or "model" in extra
