"""Every template of ours on every conversation: text and ids as transformers' `apply_chat_template` makes them."""

from __future__ import annotations

import copy
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import pytest

from frontend.text.templates import ChatTemplate, TemplateError
from headrace.model_files.artefacts import Artefacts
from tests.frontend.text.conversations import CONVERSATIONS

pytestmark = pytest.mark.slow  # importing the oracle takes seconds

NAMES = sorted(path.stem for path in (Path(__file__).parent / "templates").glob("*.jinja"))
NOW = datetime(2024, 7, 26, 12, 0)
SAME_REFUSAL = "refused"


class FrozenClock(datetime):
    @classmethod
    def now(cls, tz: Any = None) -> datetime:
        return NOW


@pytest.fixture(scope="module")
def oracle(smollm2: Artefacts) -> Any:
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import chat_template_utils

    patch = pytest.MonkeyPatch()
    patch.setattr(chat_template_utils, "datetime", FrozenClock)
    yield PreTrainedTokenizerFast(tokenizer_object=smollm2.tokenizer(), **smollm2.special.names)
    patch.undo()


def _template(smollm2: Artefacts, name: str) -> str:
    if name == "smollm2":
        return smollm2.chat_templates["default"]
    return (Path(__file__).parent / "templates" / f"{name}.jinja").read_text()


def _expected(oracle: Any, source: str, conversation: dict[str, Any]) -> tuple[str, list[int]] | str:
    arguments = copy.deepcopy(conversation)
    arguments |= arguments.pop("template_kwargs", {})
    arguments.setdefault("add_generation_prompt", True)
    messages = arguments.pop("messages")
    try:
        text = oracle.apply_chat_template(messages, chat_template=source, tokenize=False, **arguments)
        return text, oracle.apply_chat_template(messages, chat_template=source, return_dict=False, **arguments)
    except (jinja2.TemplateError, ValueError, TypeError):
        return SAME_REFUSAL


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", ["smollm2", *NAMES])
def test_text_and_ids_equal_transformers(smollm2: Artefacts, oracle: Any, name: str, conversation: str) -> None:
    source = _template(smollm2, name)
    given = CONVERSATIONS[conversation]
    expected = _expected(oracle, source, given)
    template = ChatTemplate(smollm2, source, clock=lambda: NOW)
    before = copy.deepcopy(given)
    try:
        rendered = template.render(**given)
        got: Any = (rendered.text, template.encode(rendered))
    except TemplateError:
        got = SAME_REFUSAL
    assert given == before, "the request was changed"
    if expected == SAME_REFUSAL and all("content" in message for message in given["messages"]):
        assert got == SAME_REFUSAL
    elif expected != SAME_REFUSAL:
        assert got == expected


def test_most_pairs_are_not_refusals(smollm2: Artefacts, oracle: Any) -> None:
    refused = [
        (name, conversation)
        for name in ["smollm2", *NAMES]
        for conversation, given in CONVERSATIONS.items()
        if _expected(oracle, _template(smollm2, name), given) == SAME_REFUSAL
    ]
    assert len(refused) <= 0.25 * (len(NAMES) + 1) * len(CONVERSATIONS), refused


def test_named_templates_are_chosen_as_transformers_chooses(smollm2: Artefacts, oracle: Any) -> None:
    templates = {"default": "plain", "tool_use": "with tools", "rag": "other"}
    template = ChatTemplate(replace(smollm2, chat_templates=templates))
    messages = [{"role": "user", "content": "?"}]
    tools = CONVERSATIONS["tools offered"]["tools"]
    oracle.chat_template = templates
    try:
        for offered in (None, tools):
            expected = oracle.apply_chat_template(messages, tools=offered, tokenize=False)
            assert template.render(messages, tools=offered).text == expected
    finally:
        oracle.chat_template = None
