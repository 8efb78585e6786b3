"""Template doctor: does a chat template fit its model? A wrong one is the commonest cause of odd answers.

Every check renders small conversations and looks at the text and its tokens; nothing is asked of the model itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from frontend.text.errors import TemplateError
from frontend.text.templates import ChatTemplate
from headrace.model_files.artefacts import Artefacts

SYSTEM, USER, ASSISTANT, LATER, RESULT = (
    "Zebra system words.",
    "Yak user words.",
    "Walrus assistant words.",
    "Viper later words.",
    "Urial result words.",
)
"""Contents that no template has, so that they are found again."""
TOOL = {
    "type": "function",
    "function": {
        "name": "count_tapirs",
        "description": "Counts tapirs.",
        "parameters": {"type": "object", "properties": {"where": {"type": "string"}}},
    },
}
_MARKER = re.compile(
    r"<\|[^<>|\s]{1,40}\|>|<｜[^<>｜]{1,40}｜>|</?[a-zA-Z_][\w.:-]{0,40}>|\[/?[A-Z_]{2,20}\]|<</?[A-Z]+>>"
)


class Severity(IntEnum):
    """How bad a finding is."""

    OK = 0
    NOTE = 1
    """Good to know; the template may be meant so."""
    WARNING = 2
    """Right for few models."""
    ERROR = 3
    """Answers will be wrong."""


@dataclass(frozen=True)
class Finding:
    """What one check found."""

    check: str
    severity: Severity
    found: str
    hint: str = ""


def examine(
    artefacts: Artefacts, template: ChatTemplate, template_kwargs: Mapping[str, Any] | None = None
) -> list[Finding]:
    """All findings, in the order of the checks."""
    findings = [_end_tokens(artefacts)]
    if not template.available:
        return [
            *findings,
            Finding("template", Severity.WARNING, "the model has none", "chat answers 400 without --chat-template"),
        ]
    patient = _Patient(artefacts, template, dict(template_kwargs or {}))
    try:
        chat = patient.text([_user(USER), _assistant(ASSISTANT), _user(LATER)])
    except TemplateError as error:
        return [*findings, Finding("template", Severity.ERROR, f"cannot be used: {error}", "give --chat-template")]
    if any(content not in chat for content in (USER, LATER)):
        return [
            *findings,
            Finding("template", Severity.ERROR, "leaves out what users say", "give another --chat-template"),
        ]
    checks: tuple[Callable[[_Patient, str], Finding], ...] = (
        _markers,
        _end_marker,
        _begin,
        _generation_prompt,
        _system,
        _developer,
        _roles,
        _tools,
        _thinking,
    )
    return [*findings, *(check(patient, chat) for check in checks)]


def worst(findings: list[Finding]) -> Severity:
    """The severity of the worst finding."""
    return max((finding.severity for finding in findings), default=Severity.OK)


def table(findings: list[Finding]) -> str:
    """The findings for people, one a line."""
    width = max(len(finding.check) for finding in findings)
    return "\n".join(
        f"  {finding.severity.name.lower():<8}{finding.check:<{width}}  {finding.found}"
        + (f"; {finding.hint}" if finding.hint and finding.severity else "")
        for finding in findings
    )


@dataclass(frozen=True)
class _Patient:
    """A template and its model."""

    artefacts: Artefacts
    template: ChatTemplate
    kwargs: dict[str, Any]

    def text(self, messages: list[dict[str, Any]], **options: Any) -> str:
        """A rendered conversation. Raises TemplateError."""
        kwargs = {**self.kwargs, **options.pop("template_kwargs", {})}
        return self.template.render(messages, template_kwargs=kwargs, **options).text

    def is_token(self, text: str) -> bool:
        """Whether a text is one token."""
        return (
            text in self.artefacts.special.literals
            or len(self.template.encoder.encode_prompt(text, add_special_tokens=False)) == 1
        )

    @property
    def source(self) -> str:
        rendered = self.template.render([_user(USER)], template_kwargs=self.kwargs)
        return self.template.source(rendered.template)

    def first_special(self, text: str) -> tuple[str, int] | None:
        """The special token that comes first in a text: its text and id."""
        found = [(text.find(literal), -len(literal), literal) for literal in self.artefacts.special.literals if literal]
        inside = sorted(entry for entry in found if entry[0] >= 0)
        return (inside[0][2], self.artefacts.special.literals[inside[0][2]]) if inside else None


def _end_tokens(artefacts: Artefacts) -> Finding:
    names = {index: text for text, index in artefacts.special.literals.items()}
    if not artefacts.end_ids:
        return Finding("end tokens", Severity.ERROR, "there are none", "set eos_token_id in generation_config.json")
    return Finding("end tokens", Severity.OK, ", ".join(names.get(index, str(index)) for index in artefacts.end_ids))


def _markers(patient: _Patient, chat: str) -> Finding:
    """Markers such as <|im_start|> are one token each, or the model has never seen them."""
    markers = list(dict.fromkeys(_MARKER.findall(chat)))
    split = [marker for marker in markers if not patient.is_token(marker)]
    named = set(patient.artefacts.special.names.values())
    angled = [marker for marker in markers if marker[0] == "<" and marker[1] != "<" and marker not in named]
    if not markers:
        return Finding("markers", Severity.NOTE, "none", "plain words separate the turns")
    if not split:
        return Finding("markers", Severity.OK, f"{len(markers)}, each a token: {_listed(markers)}")
    found = f"not tokens of this model: {_listed(split)}"
    if angled and all(marker in split for marker in angled) and patient.first_special(_after_answer(chat)) is None:
        return Finding("markers", Severity.ERROR, found, "the template is another model's")
    if any(marker in split for marker in angled):
        return Finding("markers", Severity.WARNING, found, "right only if the model was trained on them as plain text")
    return Finding("markers", Severity.NOTE, found, "usual for [INST] and the like")


def _end_marker(patient: _Patient, chat: str) -> Finding:
    """What ends an answer in the history must end generation, or answers run on."""
    check = "end marker"
    if ASSISTANT not in chat:
        return Finding(check, Severity.ERROR, "earlier answers are left out", "give another --chat-template")
    marker = patient.first_special(_after_answer(chat))
    if marker is None:
        return Finding(
            check, Severity.WARNING, "no special token ends an answer", "answers end only when the model thinks of it"
        )
    text, index = marker
    if index not in patient.artefacts.end_ids:
        return Finding(
            check,
            Severity.ERROR,
            f"{text} ({index}) ends an answer and does not end generation",
            f"add {index} to eos_token_id in generation_config.json",
        )
    return Finding(check, Severity.OK, f"{text} ({index})")


def _begin(patient: _Patient, chat: str) -> Finding:
    """One BOS where the tokenizer wants one."""
    check, special = "BOS", patient.artefacts.special
    if special.bos_token is None:
        return Finding(check, Severity.OK, "the model has none")
    written, rest = 0, chat
    while rest.startswith(special.bos_token):
        written, rest = written + 1, rest.removeprefix(special.bos_token)
    if written == 1:
        return Finding(check, Severity.OK, f"{special.bos_token}, once")
    if written:
        return Finding(
            check,
            Severity.WARNING,
            f"{special.bos_token} is written {written} times",
            "the second is dropped where the tokenizer adds one",
        )
    if special.add_bos:
        return Finding(
            check,
            Severity.WARNING,
            f"the tokenizer begins with {special.bos_token} and the template does not",
            "begin the template with {{ bos_token }}",
        )
    return Finding(check, Severity.OK, "none, as the tokenizer has it")


def _generation_prompt(patient: _Patient, chat: str) -> Finding:
    """A prompt ends with what stands before answers in the history."""
    check = "generation prompt"
    if ASSISTANT not in chat:
        return Finding(check, Severity.NOTE, "cannot be judged")
    header = chat[chat.index(USER) + len(USER) : chat.index(ASSISTANT)].rstrip()
    prompt = patient.text([_user(USER)])
    tail = prompt[prompt.index(USER) + len(USER) :]
    if tail.startswith(header):
        return Finding(check, Severity.OK, _shown(tail) if tail.strip() else "none is needed")
    if patient.text([_user(USER)], add_generation_prompt=False) == prompt:
        return Finding(
            check,
            Severity.ERROR,
            "add_generation_prompt changes nothing",
            f"answers begin with {_shown(header)}: the template should write that",
        )
    return Finding(
        check,
        Severity.WARNING,
        f"{_shown(tail)} and not {_shown(header)}, which stands before earlier answers",
        "the model may begin otherwise than it was trained to",
    )


def _system(patient: _Patient, chat: str) -> Finding:
    try:
        text = patient.text([{"role": "system", "content": SYSTEM}, _user(USER)])
    except TemplateError as error:
        return Finding("system", Severity.WARNING, f"is refused: {error}", "such requests get a 400")
    if SYSTEM not in text:
        return Finding("system", Severity.ERROR, "is left out without a word", "give another --chat-template")
    return Finding("system", Severity.OK, "is shown")


def _developer(patient: _Patient, chat: str) -> Finding:
    known = "developer" in patient.source
    return Finding("developer", Severity.OK, "is a role of its own" if known else "is taken as system")


def _roles(patient: _Patient, chat: str) -> Finding:
    """Orders of roles that clients send and some templates refuse."""
    call = {"id": "call12345", "type": "function", "function": {"name": "count_tapirs", "arguments": {"where": "zoo"}}}
    orders = {
        "two user turns in a row": [_user(USER), _user(LATER)],
        "an assistant first": [_assistant(ASSISTANT), _user(USER)],
        "a system message later": [
            _user(USER),
            _assistant(ASSISTANT),
            {"role": "system", "content": SYSTEM},
            _user(LATER),
        ],
        "tool results": [
            _user(USER),
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call12345", "content": RESULT},
        ],
    }
    refused = [name for name, messages in orders.items() if _is_refused(patient, messages)]
    if not refused:
        return Finding("roles", Severity.OK, "every order is taken")
    return Finding("roles", Severity.NOTE, f"refuses {_listed(refused)}", "such requests get a 400")


def _tools(patient: _Patient, chat: str) -> Finding:
    try:
        shown = "count_tapirs" in patient.text([_user(USER)], tools=[TOOL])
    except TemplateError as error:
        return Finding("tools", Severity.NOTE, f"cannot be shown: {error}")
    return Finding("tools", Severity.OK, "are shown") if shown else Finding("tools", Severity.NOTE, "are ignored")


def _thinking(patient: _Patient, chat: str) -> Finding:
    found = list(_thinking_facts(patient))
    return Finding("thinking", Severity.OK, ", ".join(found) if found else "not known")


def _thinking_facts(patient: _Patient) -> Iterator[str]:
    for name in ("enable_thinking", "thinking", "reasoning_effort"):
        values = ("low", "high") if name == "reasoning_effort" else (False, True)
        texts = {_text_or_none(patient, {name: value}) for value in values}
        if len(texts) > 1 and None not in texts:
            yield f"{name} switches it"
    if re.search(r"<think>\s*$", patient.text([_user(USER)])):
        yield "the prompt opens it"
    if "reasoning_content" in patient.source:
        yield "earlier thoughts are known"


def _text_or_none(patient: _Patient, kwargs: dict[str, Any]) -> str | None:
    try:
        return patient.text([_user(USER)], template_kwargs=kwargs)
    except TemplateError:
        return None


def _after_answer(chat: str) -> str:
    """What stands between an earlier answer and the next user's words."""
    return chat.partition(ASSISTANT)[2].partition(LATER)[0]


def _is_refused(patient: _Patient, messages: list[dict[str, Any]]) -> bool:
    try:
        patient.text(messages)
    except TemplateError:
        return True
    return False


def _user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _assistant(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}…")


def _listed(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
