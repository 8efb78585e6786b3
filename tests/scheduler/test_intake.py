"""Which Submits a cell takes, and what it makes of them."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from protocol.frontend import FinishReason, RejectCode
from protocol.packing import BIAS, pack_u32
from protocol.requests import Choice, Grammar, Reasoning, Sampling
from tests.scheduler.fake_worker import VOCAB, register
from tests.scheduler.rig import Rig, submit


@pytest.fixture
def rig() -> Rig:
    return Rig()


def biases(*pairs: tuple[int, float]) -> bytes:
    return np.array(list(pairs), dtype=BIAS).tobytes()


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (submit(1, []), RejectCode.INVALID),
        (replace(submit(1), tokens=b"\1\0\0"), RejectCode.INVALID),
        (submit(1, [VOCAB]), RejectCode.INVALID),
        (submit(1, stop=(VOCAB,)), RejectCode.INVALID),
        (submit(1, resume=(VOCAB,)), RejectCode.INVALID),
        (replace(submit(1), stop_ids=b"\1"), RejectCode.INVALID),
        (replace(submit(1), block_hashes=b"\1"), RejectCode.INVALID),
        (replace(submit(1), choices=(Choice(-1, 0),)), RejectCode.INVALID),
        (replace(submit(1), choices=(Choice(1, -1),)), RejectCode.INVALID),
        (replace(submit(1), choices=(Choice(1, 0), Choice(1, 1))), RejectCode.INVALID),
        (submit(1, list(range(64))), RejectCode.NEVER_FITS),
        (submit(1, model="other"), RejectCode.UNKNOWN_MODEL),
        (submit(1, grammar=Grammar("json_object", "")), RejectCode.UNSUPPORTED),
        (submit(1, reasoning=Reasoning(b"", b"")), RejectCode.UNSUPPORTED),
        (submit(1, adapter="a"), RejectCode.UNSUPPORTED),
        (submit(1, list(range(65)), max_tokens=0), RejectCode.NEVER_FITS),
        (submit(1, sampling=Sampling(logit_bias=b"\1")), RejectCode.INVALID),
        (submit(1, sampling=Sampling(logit_bias=biases((VOCAB, 1.0)))), RejectCode.INVALID),
        (submit(1, sampling=Sampling(logit_bias=biases((1, float("nan"))))), RejectCode.INVALID),
        (submit(1, sampling=Sampling(logit_bias=biases((1, float("-inf"))))), RejectCode.INVALID),
        (submit(1, sampling=Sampling(logit_bias=biases((1, 1.0), (1, 2.0)))), RejectCode.INVALID),
        (submit(1, sampling=Sampling(allowed_ids=pack_u32([VOCAB]))), RejectCode.INVALID),
        (submit(1, sampling=Sampling(allowed_ids=b"\1\2")), RejectCode.INVALID),
        (submit(1, sampling=Sampling(allowed_ids=pack_u32([1] * (VOCAB + 1)))), RejectCode.INVALID),
        (submit(1, sampling=Sampling(bad_words=(b"",))), RejectCode.INVALID),
        (submit(1, sampling=Sampling(bad_words=(pack_u32([VOCAB]),))), RejectCode.INVALID),
        (submit(1, sampling=Sampling(bad_words=(pack_u32([1] * 257),))), RejectCode.INVALID),
        (submit(1, sampling=Sampling(bad_words=(pack_u32([1]),) * 257)), RejectCode.INVALID),
    ],
)
def test_a_submit_that_cannot_be_honoured_is_rejected_whole_with_its_reason(rig: Rig, message, code) -> None:
    rig.group()
    frontend = rig.frontend()
    rig.submit(frontend, message)
    (reject,) = set(frontend.rejects.values())
    assert reject.code is code and reject.message
    assert set(reject.rids) == {choice.rid for choice in message.choices}
    rig.check_at_rest()


@pytest.mark.parametrize("vocab", [VOCAB, 5])
def test_more_alternatives_than_tokens_are_refused(rig: Rig, vocab: int) -> None:
    rig.group(register(vocab_size=vocab))
    frontend = rig.frontend()
    rig.submit(frontend, submit(1, [1, 2], sampling=Sampling(logprobs=6)))
    rig.submit(frontend, submit(2, [1, 2], sampling=Sampling(prompt_logprobs=6)))
    assert frontend.rejects.keys() == ({1, 2} if vocab < 6 else set())


def test_biases_allowed_ids_and_bad_words_travel_on_to_the_worker(rig: Rig) -> None:
    worker, frontend = rig.group(), rig.frontend()
    sampling = Sampling(
        logit_bias=biases((VOCAB - 1, -100.0), (0, 3.5)), allowed_ids=pack_u32([1, 2]), bad_words=(pack_u32([1, 2]),)
    )
    rig.submit(frontend, submit(1, sampling=sampling))
    assert worker.plans[0].adds[0].sampling == sampling


def test_one_bad_choice_rejects_all(rig: Rig) -> None:
    rig.group()
    frontend = rig.frontend()
    rig.submit(frontend, replace(submit(1), choices=(Choice(1, 0), Choice(2, 0, pack_u32([VOCAB])))))
    assert frontend.rejects.keys() == {1, 2}


def test_a_rid_that_is_live_keeps_its_one_finish(rig: Rig) -> None:
    rig.group()
    frontend = rig.frontend()
    rig.submit(frontend, submit(1))
    rig.cell.submit(frontend.session, submit(1, [9]), rig.now)
    rig.turn()
    rig.run_until_idle()
    assert not frontend.rejects
    rig.check_outcomes()


def test_the_context_limits_the_output(rig: Rig) -> None:
    rig.group(register(context=12))
    frontend = rig.frontend()
    rig.submit(frontend, submit(1, [1, 2, 3], max_tokens=100))
    rig.run_until_idle()
    assert frontend.finishes[1].reason is FinishReason.LENGTH and frontend.finishes[1].count == 9


def test_choices_of_one_submit_have_their_own_seeds_and_ends(rig: Rig) -> None:
    rig.group()
    frontend = rig.frontend()
    message = replace(submit(1, max_tokens=5), choices=tuple(Choice(rid, 100 + rid) for rid in range(1, 5)))
    rig.submit(frontend, message)
    rig.run_until_idle()
    assert frontend.finishes.keys() == {1, 2, 3, 4}
    assert len({tuple(output) for output in frontend.output.values()}) == 4
    rig.check_outcomes()
