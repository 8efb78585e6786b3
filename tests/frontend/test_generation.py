"""What a request becomes on the scheduler's wire: parameters, defaults, stop ids, prompts."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from frontend.request.generation import Defaults
from protocol.frontend import Submit
from protocol.packing import unpack_u32
from protocol.requests import Sampling
from tests.frontend.harness import CHAT, COMPLETIONS, Bench, bench, chat, completion

EOS = 258


async def submitted(made: Bench, path: str, body: dict[str, Any]) -> Submit:
    response = await made.post(path, body)
    assert response.status_code == 200, response.text
    return made.scheduler.submits[-1]


def prompt_of(submit: Submit) -> list[int]:
    return unpack_u32(submit.tokens).tolist()


async def test_a_plain_request_samples_neutrally_and_stops_at_the_models_end(here: Bench) -> None:
    submit = await submitted(here, CHAT, chat())
    assert submit.sampling == Sampling() and submit.priority == 0
    assert unpack_u32(submit.stop_ids).tolist() == [EOS]


async def test_every_parameter_arrives(here: Bench) -> None:
    fields = {
        "temperature": 0.5, "top_p": 0.25, "top_k": 40, "min_p": 0.125, "presence_penalty": 1.5,
        "frequency_penalty": -1.5, "repetition_penalty": 1.25, "min_tokens": 2,
    }  # fmt: skip
    for path, body in ((CHAT, chat()), (COMPLETIONS, completion())):
        more = {"max_tokens": 9, "seed": 77, "priority": -5, "stop_token_ids": [9, 3]}
        submit = await submitted(here, path, {**body, **fields, **more})
        assert submit.sampling == Sampling(**fields)
        assert (submit.max_tokens, submit.choices[0].seed, submit.priority) == (9, 77, -5)
        assert unpack_u32(submit.stop_ids).tolist() == [3, 9, EOS]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"top_k": -1}, {"top_k": 0}),
        ({"top_k": 0}, {"top_k": 0}),
        ({"top_k": 2**70}, {"top_k": 0}),
        ({"top_p": 0}, {"top_p": 1e-6}),
        ({"temperature": 0}, {"temperature": 0.0}),
    ],
)
async def test_values_at_the_edges_have_their_meaning(here: Bench, fields, expected) -> None:
    submit = await submitted(here, CHAT, chat(**fields))
    assert submit.sampling == Sampling(**expected)


async def test_a_negative_seed_is_a_seed_and_no_seed_is_drawn_anew(here: Bench) -> None:
    assert (await submitted(here, CHAT, chat(seed=-1))).choices[0].seed == 2**64 - 1
    drawn = {(await submitted(here, CHAT, chat())).choices[0].seed for _ in range(4)}
    assert len(drawn) == 4


async def test_ignore_eos_leaves_only_the_clients_stop_ids(here: Bench) -> None:
    submit = await submitted(here, CHAT, chat(ignore_eos=True, stop_token_ids=[7], max_tokens=2))
    assert unpack_u32(submit.stop_ids).tolist() == [7]


async def test_prompts_are_text_or_token_ids(here: Bench) -> None:
    assert prompt_of(await submitted(here, COMPLETIONS, completion("héy"))) == list("héy".encode())
    assert prompt_of(await submitted(here, COMPLETIONS, completion([5, 257, 0]))) == [5, 257, 0]


async def test_the_template_is_told_how_the_conversation_goes_on(here: Bench) -> None:
    start, end = [257], [258]
    opened = [*start, *b"user\nhi", *end, *b"\n"]
    assert prompt_of(await submitted(here, CHAT, chat())) == [*opened, *start, *b"assistant\n"]
    assert prompt_of(await submitted(here, CHAT, chat(add_generation_prompt=False))) == opened
    body = chat(continue_final_message=True)
    body["messages"].append({"role": "assistant", "content": "Well"})
    assert prompt_of(await submitted(here, CHAT, body)) == [*opened, *start, *b"assistant\nWell"]


async def test_control_tokens_in_what_a_user_writes_are_text(here: Bench) -> None:
    submit = await submitted(here, CHAT, chat("a<|im_end|>b"))
    assert prompt_of(submit).count(258) == 1 and b"<|im_end|>"[0] in prompt_of(submit)


async def test_template_arguments_come_from_the_server_and_then_the_request(tmp_path, artefacts) -> None:
    template = "{{ mood | default('none') }}/{{ messages[0].content }}"
    async with bench(
        tmp_path, artefacts, chat_template=template, default_chat_template_kwargs={"mood": "calm"}
    ) as made:
        assert prompt_of(await submitted(made, CHAT, chat())) == list(b"calm/hi")
        body = chat(chat_template_kwargs={"mood": "wild"})
        assert prompt_of(await submitted(made, CHAT, body)) == list(b"wild/hi")


async def test_a_template_that_refuses_is_a_400_with_its_words(tmp_path, artefacts) -> None:
    template = "{{ raise_exception('only one turn each') }}"
    async with bench(tmp_path, artefacts, chat_template=template) as made:
        for stream in (False, True):
            response = await made.post(CHAT, chat(stream=stream))
            assert response.status_code == 400 and "only one turn each" in response.json()["error"]["message"]


async def test_a_model_without_a_template_says_which_flag_gives_it_one(tmp_path, artefacts) -> None:
    async with bench(tmp_path, dataclasses.replace(artefacts, chat_templates={})) as made:
        response = await made.post(CHAT, chat())
        assert response.status_code == 400 and "--chat-template" in response.json()["error"]["message"]
        assert (await made.post(COMPLETIONS, completion())).status_code == 200


async def test_the_models_generation_config_gives_the_defaults_unless_told_not_to(tmp_path, artefacts) -> None:
    generation = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.1, "do_sample": True}
    model = dataclasses.replace(artefacts, generation_config=generation)
    async with bench(tmp_path, model) as made:
        submit = await submitted(made, CHAT, chat())
        assert submit.sampling == Sampling(temperature=0.6, top_p=0.95, top_k=20, repetition_penalty=1.1)
        assert (await submitted(made, CHAT, chat(temperature=1.0))).sampling.temperature == 1.0
    async with bench(tmp_path, model, generation_config="none") as made:
        assert (await submitted(made, CHAT, chat())).sampling == Sampling()


def test_nonsense_in_a_generation_config_is_as_good_as_absent() -> None:
    for value in (None, "hot", True, [], -1, 1e9):
        config = dict.fromkeys(("temperature", "top_p", "top_k", "repetition_penalty"), value)
        made = Defaults.of_model(config)
        assert dataclasses.replace(made, top_k=0) == Defaults()


async def test_max_model_len_caps_prompt_and_output(tmp_path, artefacts) -> None:
    async with bench(tmp_path, artefacts, max_model_len=50) as made:
        assert (await submitted(made, COMPLETIONS, completion("x" * 10, max_tokens=99))).max_tokens == 40
        assert (await made.post(COMPLETIONS, completion("x" * 50))).json()["error"]["code"] == "context_length_exceeded"
        assert (await made.client.get("/v1/models/alias")).json()["max_model_len"] == 50
