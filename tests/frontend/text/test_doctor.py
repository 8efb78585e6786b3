"""The doctor tells a template that fits its model from one that does not."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from frontend.doctor import Finding, Severity, examine, table, worst
from frontend.text.templates import ChatTemplate
from headrace.commands import doctor
from headrace.model_files.artefacts import Artefacts, SpecialTokens
from tests.frontend.harness import live_bench

TEMPLATES = Path(__file__).parent / "templates"
HEADER = "{{ '<|im_start|>assistant\\n' }}"
OK, NOTE, WARNING, ERROR = Severity.OK, Severity.NOTE, Severity.WARNING, Severity.ERROR


def model_with(byte_model: Artefacts, *literals: str, end: str, bos: str = "", add_bos: bool = False) -> Artefacts:
    """The byte model with other special tokens."""
    ids = {literal: 300 + at for at, literal in enumerate(literals)}
    names = {"eos_token": end, **({"bos_token": bos} if bos else {})}
    special = SpecialTokens(
        names=names, literals=ids, bos_id=ids.get(bos), eos_id=ids[end], add_bos=add_bos, add_eos=False
    )
    return replace(byte_model, special=special, end_ids=(ids[end],))


def diagnosis(artefacts: Artefacts, template: str | None = None, **kwargs: object) -> dict[str, Finding]:
    findings = examine(artefacts, ChatTemplate(artefacts, template), kwargs)
    text = table(findings)
    assert text.count("\n") == len(findings) - 1 and all(finding.found in text for finding in findings)
    return {finding.check: finding for finding in findings}


def read(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text()


def test_a_models_own_template_is_healthy(smollm2: Artefacts, byte_model: Artefacts) -> None:
    for artefacts in (smollm2, byte_model):
        found = diagnosis(artefacts)
        assert {check: finding for check, finding in found.items() if finding.severity > NOTE} == {}
        assert found["end marker"].found.startswith("<|im_end|>")


@pytest.mark.parametrize(
    ("name", "literals", "end", "bos", "expected"),
    [
        ("llama3", ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), "<|eot_id|>",
         "<|begin_of_text|>", {}),
        ("qwen", ("<|im_start|>", "<|im_end|>"), "<|im_end|>", "", {}),
        ("chatml", ("<|im_start|>", "<|im_end|>"), "<|im_end|>", "", {}),
        ("gemma", ("<bos>", "<start_of_turn>", "<end_of_turn>"), "<end_of_turn>", "<bos>",
         {"system": WARNING, "roles": NOTE, "tools": NOTE}),
        ("mistral", ("<s>", "</s>", "[INST]", "[/INST]"), "</s>", "<s>", {"roles": NOTE}),
        ("llama2", ("<s>", "</s>"), "</s>", "<s>", {"markers": NOTE, "roles": NOTE, "tools": NOTE}),
        ("zephyr", ("<s>", "</s>"), "</s>", "", {"markers": WARNING, "tools": NOTE}),
    ],
)  # fmt: skip
def test_templates_of_known_models_fit_their_tokens(
    byte_model: Artefacts, name: str, literals: tuple[str, ...], end: str, bos: str, expected: dict[str, Severity]
) -> None:
    found = diagnosis(model_with(byte_model, *literals, end=end, bos=bos, add_bos=bool(bos)), read(name))
    unwell = {check: finding.severity for check, finding in found.items() if finding.severity > OK}
    assert {check: severity for check, severity in unwell.items() if check not in ("tools", "roles")} == {
        check: severity for check, severity in expected.items() if check not in ("tools", "roles")
    }, table(list(found.values()))
    assert all(unwell.get(check, OK) <= NOTE for check in ("tools", "roles"))


@pytest.mark.parametrize(
    ("template", "check", "severity", "said"),
    [
        (read("llama3"), "markers", ERROR, "<|start_header_id|>"),
        (read("llama3"), "end marker", WARNING, "no special token"),
        (read("gemma"), "markers", ERROR, "<start_of_turn>"),
        (
            read("chatml").replace("<|im_end|>", "<|endoftext|>"),
            "end marker",
            ERROR,
            "<|endoftext|> (256)",
        ),
        (read("chatml").replace("add_generation_prompt", "false"), "generation prompt", ERROR, "changes nothing"),
        (read("chatml").replace(HEADER, "{{ 'AI: ' }}"), "generation prompt", WARNING, "AI: "),
        ("{{ bos_token }}" * 2 + read("chatml"), "BOS", WARNING, "2 times"),
        (read("chatml").replace("message in messages", "message in messages if message.role != 'system'"), "system",
         ERROR, "without a word"),
        ("{% for m in messages %}{{ raise_exception('no') if m.role == 'system' }}{% endfor %}" + read("chatml"),
         "system", WARNING, "is refused"),
        (read("chatml").replace("message in messages", "message in messages if message.role == 'assistant'"),
         "template", ERROR, "what users say"),
        (read("chatml").replace("message in messages", "message in messages if message.role != 'assistant'"),
         "end marker", ERROR, "left out"),
        ("{{ nothing.here }}" + read("chatml"), "template", ERROR, "cannot be used"),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", "markers", NOTE, "none"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_found(
    byte_model: Artefacts, template: str, check: str, severity: Severity, said: str
) -> None:
    finding = diagnosis(byte_model, template)[check]
    assert finding.severity is severity and said in finding.found, finding
    assert finding.hint


def test_a_missing_bos_is_found(byte_model: Artefacts) -> None:
    artefacts = model_with(byte_model, "<s>", "<|im_start|>", "<|im_end|>", end="<|im_end|>", bos="<s>", add_bos=True)
    assert diagnosis(artefacts, read("chatml"))["BOS"].severity is WARNING
    assert diagnosis(artefacts, "{{ bos_token }}" + read("chatml"))["BOS"].severity is OK


def test_no_template_and_no_end_are_found(byte_model: Artefacts) -> None:
    assert diagnosis(replace(byte_model, chat_templates={}))["template"].severity is WARNING
    assert diagnosis(replace(byte_model, end_ids=()))["end tokens"].severity is ERROR


def test_what_a_template_knows_is_told(byte_model: Artefacts) -> None:
    opens = "{{ '' if enable_thinking is defined and not enable_thinking else '<think>\\n' }}"
    thinking = read("chatml").replace(HEADER, HEADER + opens)
    found = diagnosis(byte_model, thinking)
    assert "enable_thinking switches it" in found["thinking"].found and "opens it" in found["thinking"].found
    assert "opens it" not in diagnosis(byte_model, thinking, enable_thinking=False)["thinking"].found
    assert diagnosis(byte_model, read("qwen"))["tools"].found == "are shown"
    assert diagnosis(byte_model, read("chatml"))["developer"].found == "is taken as system"
    knows = read("chatml") + "{# developer #}"
    assert diagnosis(byte_model, knows)["developer"].found == "is a role of its own"


def test_the_command_prints_the_table_and_fails_for_a_wrong_template(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor.main(["--tokenizer", "byte"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("byte\n") and "end marker" in shown
    (tmp_path / "wrong.jinja").write_text(read("llama3"))
    assert doctor.main(["--tokenizer", "byte", "--chat-template", str(tmp_path / "wrong.jinja")]) == 1
    assert "error   markers" in capsys.readouterr().out
    (tmp_path / "broken.jinja").write_text("{% if %}")
    assert doctor.main(["--tokenizer", "byte", "--chat-template", str(tmp_path / "broken.jinja")]) == 1
    assert capsys.readouterr().out.count("cannot be used") == 1
    assert doctor.main(["/no/such/model"]) == 1
    assert doctor.main(["--max-num-seqs", "3"]) == 2
    assert capsys.readouterr().err.count("headrace: ") == 2


def test_the_worst_counts() -> None:
    assert worst([]) is OK
    assert worst([Finding("a", NOTE, ""), Finding("b", ERROR, ""), Finding("c", WARNING, "")]) is ERROR


@pytest.mark.parametrize(("name", "level"), [("frontend", "INFO"), ("frontend-0", "INFO"), ("frontend-1", None)])
async def test_one_frontend_logs_the_table_at_its_start(
    tmp_path: Path, byte_model: Artefacts, name: str, level: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "headrace.frontend")
    async with live_bench(tmp_path, byte_model, name=name) as live:
        await live.until_here(lambda: level is None or _tables(caplog), "logged")
        assert [record.levelname for record in _tables(caplog)] == ([level] if level else [])


async def test_a_wrong_template_is_logged_as_a_warning(
    tmp_path: Path, byte_model: Artefacts, caplog: pytest.LogCaptureFixture
) -> None:
    async with live_bench(tmp_path, byte_model, name="frontend-0", chat_template=read("llama3")) as live:
        await live.until_here(lambda: _tables(caplog), "logged")
        assert _tables(caplog)[0].levelname == "WARNING"


def _tables(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if "the chat template of byte" in record.getMessage()]
