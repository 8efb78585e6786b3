"""``headrace serve [MODEL]``: a whole server on this host."""

from __future__ import annotations

import asyncio
import os
import sys

from headrace.command_line.flag_table import SERVE
from headrace.command_line.flags import UsageError
from headrace.command_line.serve_settings import serve_settings, trim_cache
from headrace.commands.common import EXIT_FAILED, EXIT_USAGE, LOG_LEVEL_VARIABLE, complain, parse
from headrace.model_files.artefact_error import ArtefactError
from headrace.supervision.announcer import Announcer
from headrace.supervision.supervisor import ServeError, serve

DESCRIPTION = "Serve MODEL on this host. Without MODEL, the small default model that comes with the install."


def main(arguments: list[str]) -> int:
    announcer = Announcer(sys.stdout, sys.stderr)
    try:
        given = parse("serve", DESCRIPTION, SERVE, arguments)
        os.environ[LOG_LEVEL_VARIABLE] = given.pop("log_level", "warning")
        trim_cache(given)
        asyncio.run(serve(serve_settings(given, os.environ), announcer))
    except UsageError as error:
        complain(str(error))
        return EXIT_USAGE
    except (ServeError, ArtefactError) as error:
        announcer.erase()
        complain(str(error))
        return EXIT_FAILED
    return 0
