"""The lint finds nothing wrong with a server that keeps the contract, and each way of breaking it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.cli import main
from headrace.lint.areas import all_checks
from headrace.lint.command import LintError, LintSettings, choose, run
from headrace.lint.runner import run_checks
from headrace.lint.session import Target
from headrace.lint.verdicts import Outcome, Verdict
from headrace.lint.wire import Address
from tests.headrace.lint.fake_server import NAME, FakeServer, fake_server

pytestmark = pytest.mark.slow

SECONDS = 20.0


def judge(server: FakeServer, *only: str, concurrency: int = 4) -> list[Outcome]:
    target = Target(Address.of(server.url), NAME, server.key, SECONDS)
    return run_checks(target, choose(only), concurrency=concurrency)


def titles(outcomes: list[Outcome], verdict: Verdict) -> dict[str, str]:
    return {outcome.check.title: outcome.why for outcome in outcomes if outcome.verdict is verdict}


def test_nothing_is_wrong_with_a_server_that_keeps_the_contract() -> None:
    with fake_server(key="secret") as server:
        outcomes = judge(server)
    assert titles(outcomes, Verdict.WRONG) == {}
    assert len(titles(outcomes, Verdict.RIGHT)) > 450
    assert {outcome.check.title for outcome in outcomes} >= {check.title for check in all_checks()}


def test_the_judgement_is_the_same_with_any_number_of_checks_at_once() -> None:
    areas = ("parity", "streams", "usage", "choices")
    with fake_server() as server:
        one, many = (judge(server, *areas, concurrency=number) for number in (1, 16))
    assert [(o.check.title, o.verdict) for o in one] == [(o.check.title, o.verdict) for o in many]


QUIRKS = {
    # Framing of HTTP and of streams.
    "short bodies": ("models/cards", "models/cards"),
    "no last chunk": ("streams/is a stream", "streams/is a stream: chat"),
    "chunks for HTTP/1.0": ("connections/http", "connections/http 1 0"),
    "no request id": ("models/cards", "every reply/request id"),
    "plain streams": ("streams/is a stream", "streams/is a stream: chat"),
    "cached streams": ("streams/is a stream", "every reply/stream headers"),
    "ends without [DONE]": ("streams/is a stream", "every reply/stream end"),
    "two [DONE]": ("streams/is a stream", "every reply/stream end"),
    "error line": ("streams/is a stream", "every reply/event framing"),
    "no space after data": ("streams/is a stream", "every reply/event framing"),
    "one line break": ("streams/text chunks", "every reply/event framing"),
    "NaN in a stream": ("streams/text chunks", "every reply/event framing"),
    "same key twice": ("models/cards", "every reply/strict JSON"),
    # Envelopes and order.
    "id changes": ("streams/is a stream", "every reply/chunk envelope"),
    "same ids": ("streams/is no stream", "every reply/unique ids"),
    "no role": ("streams/is a stream", "every reply/role first"),
    "finish key missing": ("streams/is a stream", "every reply/chunk keys"),
    "null calls in deltas": ("streams/is a stream", "every reply/chunk keys"),
    "tool_calls null": ("streams/is no stream", "every reply/answer shape"),
    "no finish": ("streams/is a stream", "every reply/one finish"),
    "two finishes": ("streams/is a stream", "every reply/one finish"),
    "index 0": ("choices/indexes", "choices/indexes: chat"),
    # One answer, two transports.
    "loses the tail": ("parity/same in both: chat, plain", "parity/same in both: chat, plain"),
    "sums for deltas": ("streams/deltas not sums", "streams/deltas not sums: chat"),
    "stop in streams": ("parity/same in both: chat, plain", "parity/same in both: chat, plain"),
    "another answer whole": ("parity/same in both: completions", "parity/same in both: completions, plain"),
    "no logprobs in streams": ("parity/same in both: chat, logprobs", "parity/same in both: chat, logprobs"),
    "half characters": ("parity/cut anywhere", "parity/cut anywhere: chat"),
    "stop for length": ("fields/at least", "fields/at least: chat"),
    # Usage.
    "usage null": ("usage/counted to the limit", "usage/counted to the limit: chat"),
    "usage everywhere": ("streams/usage when asked", "every reply/usage chunk"),
    "no usage chunk": ("streams/usage when asked", "streams/usage when asked: chat"),
    "wrong total": ("streams/is no stream", "every reply/usage sums"),
    "no details": ("streams/is no stream", "every reply/usage sums"),
    "counts one choice": ("choices/usage", "choices/usage: chat"),
    "cached tokens left out": ("usage/cached", "usage/cached"),
    "another count": ("usage/prompt counted", "usage/prompt counted"),
    # Stops and text.
    "ignores stop": ("stops/cuts before", "stops/cuts before: chat"),
    "keeps stop": ("stops/cuts before", "stops/cuts before: completions"),
    "strips text": ("text/tokens and back: spaces", "text/tokens and back: spaces and breaks"),
    "user text is control": ("messages/special tokens", "messages/special tokens in content"),
    # Logprobs.
    "drops an entry": ("logprobs/one per token", "logprobs/one per token"),
    "scores start with 0": ("logprobs/echo scores", "logprobs/echo scores"),
    "broken emoji": ("logprobs/bytes", "logprobs/bytes are the text"),
    # Fields.
    "any temperature": ("fields/honoured: temperature", "fields/honoured: temperature on chat"),
    "any user": ("fields/inert: user", "fields/inert: user"),
    "max_tokens wins": ("fields/max completion", "fields/max completion tokens wins"),
    "no deadlines": ("fields/short timeout", "fields/short timeout"),
    "ignores seed": ("fields/seed", "fields/seed repeats: chat"),
    "same choices": ("choices/seeded", "choices/seeded: chat"),
    "ignores masks": ("fields/token masks", "fields/token masks"),
    "no typo check": ("unknown fields/typo", "unknown fields/typo: temprature"),
    "drops fields silently": ("unknown fields/named", "unknown fields/named in header: chat"),
    # Errors.
    "detail errors": ("errors/missing messages", "every reply/error body"),
    "numbers for codes": ("errors/missing messages", "every reply/error body"),
    "HTML errors": ("errors/missing messages", "every reply/error body"),
    "200 for errors": ("errors/missing messages", "errors/missing messages"),
    "repeats the input": ("errors/missing messages", "every reply/error size"),
    "500 for bad JSON": ("malformed/body: half an object", "malformed/body: half an object"),
    "takes NaN": ("malformed/value: NaN", "malformed/value: NaN"),
    "any type": ("errors/content type", "errors/content type: chat"),
    "no body limit": ("errors/large body:", "errors/large body: chat"),
    "any model name": ("errors/unknown model", "errors/unknown model: chat"),
    "no 404 for models": ("errors/unknown model", "errors/unknown model: chat"),
    # Lifecycle.
    "own request ids": ("lifecycle/request ids", "lifecycle/request ids"),
    "dies of a bias": ("lifecycle/survivor", "lifecycle/survivor"),
}
"""A way of breaking the contract → the checks that are run, and one that has to find it."""


@pytest.mark.parametrize("quirk", QUIRKS)
def test_each_way_of_breaking_the_contract_is_found(quirk: str) -> None:
    only, finder = QUIRKS[quirk]
    with fake_server(quirk) as server:
        wrong = titles(judge(server, only), Verdict.WRONG)
    assert finder in wrong, f"{quirk} was not found; wrong were {wrong}"


@pytest.mark.parametrize(
    ("quirk", "finder"),
    [("no auth", "auth/guarded: chat"), ("open slash", "auth/disguised paths")],
)
def test_holes_around_the_key_are_found(quirk: str, finder: str) -> None:
    with fake_server(quirk, key="secret") as server:
        outcomes = judge(server, "auth")
    if quirk == "no auth":
        assert titles(outcomes, Verdict.NOT_OFFERED).get(finder) == "the server asks for no key"
    else:
        assert finder in titles(outcomes, Verdict.WRONG)


def test_a_model_whose_greedy_answers_vary_is_not_judged_by_its_text() -> None:
    with fake_server("random") as server:
        outcomes = judge(server, "parity", "stops", "prompts", "choices")
    assert titles(outcomes, Verdict.WRONG) == {}


def test_the_report_shows_the_bytes_of_what_is_wrong(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    written = tmp_path / "verdicts.json"
    with fake_server("detail errors") as server:
        status = main(["lint", server.url, "--only", "errors/missing messages", "--json", str(written)])
    shown = capsys.readouterr().out
    assert status == 1
    assert 'POST /v1/chat/completions {"model": "fake"' in shown and '{"detail": "messages are missing"}' in shown
    content = json.loads(written.read_text())
    assert content["model"] == NAME
    assert {check["verdict"] for check in content["checks"]} == {"right", "wrong", "not offered"}
    assert all(len(shown_bytes) < 2000 for check in content["checks"] for shown_bytes in check["bytes"])


def test_the_status_is_0_only_when_nothing_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server() as server:
        assert main(["lint", server.url, "--only", "models", "routes"]) == 0
        assert "0 wrong" in capsys.readouterr().out.splitlines()[-1]
        assert run(LintSettings(url=server.url, only=("features",), complete=True)) == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["lint"], "which server"),
        (["lint", "ftp://x"], "is not http"),
        (["lint", "http://127.0.0.1:9"], "is that the server's address"),
        (["lint", "http://127.0.0.1:9", "--only", "surfing"], "the areas are"),
    ],
)
def test_what_cannot_be_judged_is_one_line(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


def test_a_server_that_goes_away_is_wrong_where_it_went_and_not_judged_on() -> None:
    with fake_server() as server:
        pass
    outcomes = judge(server, "models", "errors", "streams")
    wrong = titles(outcomes, Verdict.WRONG)
    assert 0 < len(wrong) <= 8 and all("no connection" in why for why in wrong.values())
    assert "the server is gone" in titles(outcomes, Verdict.NOT_OFFERED).values()


def test_a_server_that_wants_a_key_says_so() -> None:
    with fake_server(key="secret") as server, pytest.raises(LintError, match="--api-key"):
        run(LintSettings(url=server.url))


def test_every_check_has_a_sentence_and_a_title_of_its_own() -> None:
    checks = all_checks()
    assert len({check.title for check in checks}) == len(checks)
    assert all(check.right.endswith(".") and len(check.right) < 200 for check in checks)
