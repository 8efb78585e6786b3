from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from frontend.text.templates import ChatTemplate, NoTemplateError, TemplateError, read_override
from headrace.model_files.artefacts import Artefacts

TEMPLATES = Path(__file__).parent / "templates"
ARGUMENTS_AS_TEXT = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}"
    "{{ 'call ' + c.function.arguments }}"
    "{% endfor %}{% endfor %}"
)


def _text(artefacts: Artefacts, source: str, *messages: dict[str, Any], **options: Any) -> str:
    return ChatTemplate(artefacts, source).render(list(messages), **options).text


def _call(arguments: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]}


@pytest.mark.parametrize("content", [{"content": None}, {}, {"content": ""}, {"content": []}])
def test_absent_content_is_empty(smollm2: Artefacts, content: dict[str, Any]) -> None:
    text = ChatTemplate(smollm2).render([{"role": "user", **content}]).text
    assert "<|im_start|>user\n<|im_end|>" in text


def test_text_parts_are_joined_for_templates_that_want_a_string(smollm2: Artefacts) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert "user\none\ntwo<|im_end|>" in ChatTemplate(smollm2).render([{"role": "user", "content": parts}]).text


def test_text_parts_stay_parts_for_templates_that_iterate(smollm2: Artefacts) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    source = (TEMPLATES / "parts.jinja").read_text()
    assert "<turn user>onetwo</turn>" in _text(smollm2, source, {"role": "user", "content": parts})


def test_developer_is_system_unless_the_template_knows_it(smollm2: Artefacts) -> None:
    message = {"role": "developer", "content": "d"}
    source = (TEMPLATES / "chatml.jinja").read_text()
    assert "<|im_start|>system\nd" in _text(smollm2, source, message)
    assert "<|im_start|>developer\nd" in _text(smollm2, source + "{# developer #}", message)


@pytest.mark.parametrize("arguments", ['{"a": "é"}', {"a": "é"}])
def test_call_arguments_take_the_form_the_template_wants(smollm2: Artefacts, arguments: Any) -> None:
    user = {"role": "user", "content": "u"}
    as_object = (TEMPLATES / "qwen.jinja").read_text()
    assert '"arguments": {"a": "é"}}' in _text(smollm2, as_object, user, _call(arguments))
    assert _text(smollm2, ARGUMENTS_AS_TEXT, user, _call(arguments)) == 'call {"a": "é"}'


def test_call_arguments_that_are_no_json_stay_text(smollm2: Artefacts) -> None:
    user = {"role": "user", "content": "u"}
    assert _text(smollm2, ARGUMENTS_AS_TEXT, user, _call("{broken")) == "call {broken"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (["text"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "pirate", "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": 7}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0]"),
        ([{"role": "assistant", "tool_calls": "f"}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0]"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 3}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_what_is_wrong_is_named(smollm2: Artefacts, messages: list[Any], param: str) -> None:
    with pytest.raises(TemplateError) as caught:
        ChatTemplate(smollm2).render(messages)
    assert caught.value.param == param
    assert "\n" not in str(caught.value)


def test_generation_prompt_and_continuation_exclude_each_other(smollm2: Artefacts) -> None:
    with pytest.raises(TemplateError):
        ChatTemplate(smollm2).render([{"role": "assistant", "content": "a"}], continue_final_message=True)


def test_a_model_without_template_says_which_flag_helps(smollm2: Artefacts) -> None:
    template = ChatTemplate(replace(smollm2, chat_templates={}))
    assert not template.available
    with pytest.raises(NoTemplateError, match="--chat-template"):
        template.render([{"role": "user", "content": "x"}])


def test_template_refusals_reach_the_client(smollm2: Artefacts) -> None:
    with pytest.raises(TemplateError, match="only odd"):
        _text(smollm2, "{{ raise_exception('only odd') }}", {"role": "user", "content": "x"})


@pytest.mark.parametrize("source", ["{% for %}", "{{ 1 | nofilter }}", "{% endif %}", "{% unknown %}"])
def test_invalid_templates_are_found_at_start(smollm2: Artefacts, source: str) -> None:
    with pytest.raises(TemplateError, match="not valid"):
        ChatTemplate(smollm2, source).check()


def test_template_kwargs_reach_the_template_but_not_its_own_variables(smollm2: Artefacts) -> None:
    user = {"role": "user", "content": "x"}
    assert _text(smollm2, "{{ style }}{{ eos_token }}", user, template_kwargs={"style": "s"}) == "s<|im_end|>"
    with pytest.raises(TemplateError) as caught:
        _text(smollm2, "{{ messages }}", user, template_kwargs={"messages": []})
    assert caught.value.param == "messages"


def test_an_override_is_a_file_or_the_template_itself(tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_text("{{ messages }}")
    assert read_override(str(path)) == read_override("{{ messages }}") == "{{ messages }}"
    with pytest.raises(TemplateError, match=r"missing\.jinja"):
        read_override(str(tmp_path / "missing.jinja"))


def test_a_second_bos_is_never_sent(smollm2: Artefacts) -> None:
    special = replace(smollm2.special, add_bos=True)
    template = ChatTemplate(replace(smollm2, special=special), "{{ bos_token }}{{ messages[0].content }}")
    bos = special.bos_id
    assert template.encode(template.render([{"role": "system", "content": "<|im_start|>x"}])).count(bos or -1) == 1
