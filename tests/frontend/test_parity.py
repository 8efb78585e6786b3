"""One answer, two transports, any steps: for whatever fields a request has."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protocol.frontend import Submit
from tests.frontend.fake_scheduler import Script
from tests.frontend.folding import both
from tests.frontend.harness import CHAT, COMPLETIONS, Bench, chat, completion

EOS = 258
LETTERS = [*b"ab. ", *"é".encode(), *"👍".encode(), 255, 257]

outputs = st.lists(st.sampled_from([*LETTERS, EOS]), min_size=12, max_size=12)
stops = st.lists(st.sampled_from(["a", "ab", "b.", ". a", "é", "👍", "bé"]), min_size=1, max_size=3, unique=True)
common: dict[str, st.SearchStrategy[Any]] = {
    "n": st.integers(1, 3),
    "stop": stops,
    "stop_token_ids": st.just([ord("b"), 257]),
    "include_stop_str_in_output": st.booleans(),
    "ignore_eos": st.booleans(),
    "min_tokens": st.integers(0, 3),
    "skip_special_tokens": st.booleans(),
    "return_token_ids": st.booleans(),
    "return_tokens_as_token_ids": st.booleans(),
    "prompt_logprobs": st.integers(0, 2),
}
chats = st.fixed_dictionaries(
    {"max_tokens": st.integers(3, 10)},
    optional={
        **common,
        "logprobs": st.just(True),
        "add_special_tokens": st.booleans(),
        "echo": st.booleans(),
    },
).map(lambda fields: (CHAT, chat(**fields)))
prompts = st.sampled_from(["hi", "hé👍", ["a", "bc"], [5, 257, 6], [[1], list("é".encode()), [255, 240]]])
completions = st.fixed_dictionaries(
    {"prompt": prompts, "max_tokens": st.integers(3, 10)},
    optional={**common, "logprobs": st.integers(0, 3), "echo": st.booleans()},
).map(lambda fields: (COMPLETIONS, completion(**fields)))
step_lists = st.lists(st.integers(1, 8), min_size=1, max_size=4)


@given(
    chats | completions,
    st.lists(outputs, min_size=3, max_size=3),
    st.lists(step_lists, min_size=2, max_size=2),
    st.lists(st.integers(1, 40), max_size=3),
)
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_any_request_has_one_answer(here: Bench, request_, texts, steps, cuts) -> None:
    path, body = request_
    answers = []
    for steps_now in steps:

        def script(submit: Submit, steps_now: list[int] = steps_now) -> Script:
            first, *others = texts
            return Script(first, steps_now, variants=others, prompt_cuts=sorted(set(cuts)), cached=len(steps_now))

        here.scheduler.script = script
        answers.append(await both(here, path, body))
    for answer in answers:
        answer["usage"].pop("prompt_tokens_details")
    assert answers[0] == answers[1]
    check_sums(body, answers[0])


def check_sums(body: dict[str, Any], answer: dict[str, Any]) -> None:
    """What must hold between the parts of an answer."""
    choices = [part for key, part in answer.items() if isinstance(key, int)]
    listed = body.get("prompt", "")
    prompts = len(listed) if isinstance(listed, list) and isinstance(listed[0], str | list) else 1
    assert len(choices) == prompts * body.get("n", 1)
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + answer["usage"]["completion_tokens"]
    if body.get("return_token_ids"):
        assert answer["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in choices)
    if all(choice["finish_reason"] == "length" for choice in choices):
        assert answer["usage"]["completion_tokens"] == len(choices) * body.get("max_tokens", 0)
