"""What a person and a script see of a start."""

from __future__ import annotations

import io
import re
import shlex

import msgspec

from headrace.supervision.announcer import Announcer


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_ready_line_has_the_url_and_a_call_to_paste() -> None:
    out = io.StringIO()
    Announcer(out, io.StringIO()).ready("it's", "http://127.0.0.1:8123", "1 frontend")
    first, _, call = out.getvalue().partition("\n")
    assert "http://127.0.0.1:8123/v1" in first
    words = shlex.split(call.replace("\\\n", " "))
    assert words[:2] == ["curl", "http://127.0.0.1:8123/v1/chat/completions"]
    assert msgspec.json.decode(words[words.index("-d") + 1])["model"] == "it's"


def test_without_a_terminal_progress_is_one_line_a_stage() -> None:
    err = io.StringIO()
    announcer = Announcer(io.StringIO(), err)
    for percent in range(0, 100, 10):
        announcer.progress(f"loading weights {percent}%")
    announcer.progress("warming up")
    assert err.getvalue().splitlines() == ["loading weights …", "warming up …"]


def test_on_a_terminal_the_line_is_rewritten_and_taken_back() -> None:
    out, err = io.StringIO(), Terminal()
    announcer = Announcer(out, err)
    announcer.progress("loading weights 10%")
    announcer.progress("loading weights 20%")
    announcer.ready("m", "http://h:1", "")
    assert "\n" not in err.getvalue()
    assert err.getvalue().endswith("\r\x1b[K")
    assert len(re.findall("loading", err.getvalue())) == 2


def test_what_went_wrong_is_a_line_of_its_own() -> None:
    err = Terminal()
    announcer = Announcer(io.StringIO(), err)
    announcer.progress("loading")
    announcer.say("frontend-0 ended")
    assert err.getvalue().endswith("\r\x1b[Kheadrace: frontend-0 ended\n")


def test_the_call_to_paste_names_a_key_where_one_is_asked_for() -> None:
    for asks in (False, True):
        out = io.StringIO()
        Announcer(out, io.StringIO()).ready("m", "https://h:1", "1 frontend", asks_for_keys=asks)
        assert ("authorization: Bearer KEY" in out.getvalue()) is asks


class NobodyThere(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_what_nobody_reads_any_more_hurts_nobody() -> None:
    announcer = Announcer(NobodyThere(), NobodyThere())
    announcer.progress("loading")
    announcer.ready("m", "http://127.0.0.1:1", "1 frontend")
    announcer.say("ending")
