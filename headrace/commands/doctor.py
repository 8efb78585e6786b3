"""``headrace doctor [MODEL]``: whether a model's chat template fits it."""

from __future__ import annotations

import sys

from frontend import doctor
from frontend.text.errors import TemplateError
from frontend.text.templates import ChatTemplate, read_override
from headrace.command_line.flags import UsageError
from headrace.commands.common import EXIT_FAILED, EXIT_USAGE, complain, parse
from headrace.model_files.artefacts import ArtefactError

DESCRIPTION = "Judge the chat template of MODEL: markers, end marker, BOS, roles, generation prompt."


def main(arguments: list[str]) -> int:
    from headrace.command_line.flag_table import DOCTOR
    from headrace.command_line.serve_settings import artefacts_of, with_model

    try:
        given = with_model(parse("doctor", DESCRIPTION, DOCTOR, arguments))
        artefacts = artefacts_of(given)
        override = read_override(given["chat_template"]) if given.get("chat_template") else None
        content_format = given.get("chat_template_content_format", "auto")
        template = ChatTemplate(
            artefacts, override, content_format=None if content_format == "auto" else content_format
        )
        findings = doctor.examine(artefacts, template, given.get("default_chat_template_kwargs"))
    except UsageError as error:
        complain(str(error))
        return EXIT_USAGE
    except (ArtefactError, TemplateError) as error:
        complain(str(error))
        return EXIT_FAILED
    sys.stdout.write(f"{artefacts.name}\n{doctor.table(findings)}\n")
    return EXIT_FAILED if doctor.worst(findings) is doctor.Severity.ERROR else 0
