"""A frontend names the blocks of its prompts, under the caller's and the client's salt, and keeps the names."""

from __future__ import annotations

from pathlib import Path

from headrace.model_files.artefacts import Artefacts
from protocol.block_hashes import pack_hashes, root_hash
from protocol.frontend import Submit
from tests.frontend.harness import COMPLETIONS, Bench, bench, completion

PROMPT = "x" * 50
"""Three blocks of 16 bytes and a rest."""


async def submitted(here: Bench, prompt: str = PROMPT, **fields: object) -> Submit:
    answer = await here.post(COMPLETIONS, completion(prompt, max_tokens=1, **fields))
    assert answer.status_code == 200, answer.text
    return here.scheduler.submits[-1]


async def test_a_prompts_full_blocks_are_named_by_the_models_block_size(here: Bench) -> None:
    submit = await submitted(here)
    assert submit.block_size == 16 and len(submit.block_hashes) == 16 * (len(submit.tokens) // 64) >= 48
    assert submit.block_hashes == pack_hashes(root_hash(submit.salt), submit.tokens, 16)
    assert (await submitted(here, "hi")).block_hashes == b""


async def test_one_salt_gives_one_name_and_another_another(here: Bench) -> None:
    names = [
        (await submitted(here, **salt)).block_hashes for salt in ({}, {}, {"cache_salt": "a"}, {"cache_salt": "b"})
    ]
    assert names[0] == names[1] and len(set(names)) == 3


async def test_nothing_is_named_when_reuse_is_turned_off(tmp_path: Path, artefacts: Artefacts) -> None:
    async with bench(tmp_path, artefacts, prefix_caching=False) as here:
        submit = await submitted(here)
        assert (submit.block_size, submit.block_hashes) == (0, b"")
