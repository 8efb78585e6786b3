"""``headrace chat``: talk with a running server in the terminal."""

from __future__ import annotations

from headrace.chat import ChatError, ChatSettings, run
from headrace.command_line.flag_table import CHAT
from headrace.command_line.flags import UsageError
from headrace.commands.common import EXIT_FAILED, EXIT_USAGE, complain, parse, to_settings

DESCRIPTION = "Talk with a running server; its answers stream into the terminal."


def main(arguments: list[str]) -> int:
    try:
        settings = to_settings(parse("chat", DESCRIPTION, CHAT, arguments, model_argument=False), ChatSettings)
        return run(settings)
    except UsageError as error:
        complain(str(error))
        return EXIT_USAGE
    except ChatError as error:
        complain(str(error))
        return EXIT_FAILED
