"""Whole steps: right, and the logits of a row the same bits in any batch, chunking, pool and team."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from tests.workers.native_cpu.oracle import oracle_logits
from tests.workers.native_cpu.rig import WIDE, FloatArray, Row, Shape, last_logits, pack, step, tiny_model
from workers.backends.native_cpu.backend import NativeCpu
from workers.backends.native_cpu.errors import NativeCpuError
from workers.backends.native_cpu.library import Activation, Matrix, NativeConfig, NativeLibrary, NumericType, Team

SHAPES = {
    "llama": Shape(),
    "untied head": Shape(tied=False),
    "biases": Shape(bias=True, heads=4, kv_heads=2, head_dim=16),
    "norms of q and k": Shape(qk_norm=True, heads=4, kv_heads=4, head_dim=40),
    "windows, caps, branch norms": Shape(
        window=20,
        branch_norms=True,
        attention_softcap=5.0,
        logit_softcap=3.0,
        activation=Activation.GELU_TANH,
        embedding_multiplier=2.0,
        residual_multiplier=0.5,
    ),
    "part of a head rotated": Shape(rotary_dim=16, head_dim=64, heads=2, kv_heads=1),
}

KINDS = {
    "bf16": (NumericType.BF16,),
    "int8": (NumericType.INT8,),
    "mixed blocks": (NumericType.Q4_0, NumericType.Q4_1, NumericType.Q5_0, NumericType.Q5_1, NumericType.Q8_0),
    "K-quants": (NumericType.Q4_K, NumericType.Q6_K, NumericType.Q5_K),
    "some of each": (NumericType.BF16, NumericType.Q6_K, NumericType.INT8, NumericType.Q4_1),
}
KVS = (NumericType.BF16, NumericType.INT8)


def tokens_of(seed: int, count: int, vocab: int = 150) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab, count).tolist()


def blocks_of(seed: int, count: int, pool: int = 160) -> list[int]:
    """Blocks for ``count`` tokens, in no order."""
    return np.random.default_rng(seed).permutation(pool)[: -(-count // 16)].tolist()


def error_of(logits: FloatArray, exact: npt.NDArray[np.float64]) -> float:
    """Root mean square of the differences, in standard deviations of the logits."""
    return float(np.sqrt(np.square(logits - exact).mean()) / exact.std())


def rounding(library: NativeLibrary) -> float:
    """What is expected of it: AMX rounds activations to bf16."""
    return 0.03 if library.isa == "amx" else 0.005


@pytest.mark.parametrize("name", SHAPES)
def test_logits_are_the_plain_decoders(library: NativeLibrary, team: Team, name: str) -> None:
    model = tiny_model(library, team, SHAPES[name])
    tokens = tokens_of(1, 150)
    exact = oracle_logits(model, tokens)
    judged = list(range(150))
    outputs = step(model.backend, [Row(tokens, 0, blocks_of(1, 150))], judged)
    logits = np.concatenate([piece.copy() for piece in outputs.judged])
    assert error_of(logits, exact) < rounding(library)
    np.testing.assert_array_equal(logits[-1], outputs.logits[0])


@pytest.mark.parametrize("name", KINDS)
def test_every_format_serves_in_every_place(library: NativeLibrary, team: Team, name: str) -> None:
    model = tiny_model(library, team, WIDE, KINDS[name])
    tokens = tokens_of(2, 70)
    exact = oracle_logits(model, tokens)[-1]
    logits = last_logits(model.backend, tokens, blocks_of(2, 70), [70])
    assert error_of(logits, exact) < rounding(library)


def test_an_int8_pool_stays_close(library: NativeLibrary, team: Team) -> None:
    model = tiny_model(library, team, SHAPES["llama"], kv=NumericType.INT8)
    tokens = tokens_of(3, 150)
    exact = oracle_logits(model, tokens)[-1]
    logits = last_logits(model.backend, tokens, blocks_of(3, 150), [150])
    assert error_of(logits, exact) < 0.05


@pytest.mark.parametrize("kv", KVS, ids=lambda kv: f"{kv.name} pool")
@pytest.mark.parametrize("name", KINDS)
def test_logits_do_not_depend_on_chunks_blocks_or_threads(
    library: NativeLibrary, team: Team, lone: Team, name: str, kv: NumericType
) -> None:
    tokens = tokens_of(4, 150)
    model = tiny_model(library, team, WIDE, KINDS[name], kv)
    whole = last_logits(model.backend, tokens, blocks_of(4, 150), [150])
    for seed, chunks in enumerate(([1], [149, 1], [16], [17, 3, 64, 5], [100, 50])):
        cut = last_logits(model.backend, tokens, blocks_of(seed, 150), chunks)
        np.testing.assert_array_equal(cut, whole, err_msg=str(chunks))
    other = tiny_model(library, lone, WIDE, KINDS[name], kv)
    np.testing.assert_array_equal(last_logits(other.backend, tokens, blocks_of(9, 150), [70]), whole)


@pytest.mark.parametrize("shape", [SHAPES["llama"], SHAPES["windows, caps, branch norms"]], ids=["llama", "windows"])
def test_a_long_past_is_summed_in_one_order(library: NativeLibrary, team: Team, shape: Shape) -> None:
    """Beyond 512 tokens the past is summed in spans: side by side for a decode, one after another for a chunk."""
    model = tiny_model(library, team, shape)
    tokens = tokens_of(5, 1100)
    blocks = blocks_of(5, 1100)
    whole = last_logits(model.backend, tokens, blocks, [1100])
    np.testing.assert_array_equal(last_logits(model.backend, tokens, blocks, [1099, 1]), whole)
    np.testing.assert_array_equal(last_logits(model.backend, tokens, blocks, [511, 64, 1, 300]), whole)
    exact = oracle_logits(model, tokens)[-1]
    assert error_of(whole, exact) < rounding(library)


@pytest.mark.parametrize("name", KINDS)
def test_a_row_has_the_same_bits_alone_and_in_a_batch(library: NativeLibrary, team: Team, name: str) -> None:
    model = tiny_model(library, team, WIDE, KINDS[name])
    lengths = [1, 2, 15, 16, 17, 40, 64, 65, 90]
    sequences = [tokens_of(10 + index, length + 1) for index, length in enumerate(lengths)]
    pool = iter(np.random.default_rng(0).permutation(160).tolist())
    blocks = [[next(pool) for _ in range(-(-len(tokens) // 16))] for tokens in sequences]
    alone = [last_logits(model.backend, tokens, owned, [200]) for tokens, owned in zip(sequences, blocks, strict=True)]
    # Recomputed together: first chunks of unequal length, then the rest of some beside decodes of others.
    firsts = [Row(tokens[:-1], 0, owned) for tokens, owned in zip(sequences, blocks, strict=True)]
    step(model.backend, firsts[::-1])
    halves = [max(1, len(tokens) // 2) for tokens in sequences]
    mixed = []
    for index, (tokens, owned) in enumerate(zip(sequences, blocks, strict=True)):
        start = len(tokens) - 1 if index % 2 else halves[index]
        mixed.append(Row(tokens[start:], start, owned))
    outputs = step(model.backend, mixed)
    for index, expected in enumerate(alone):
        np.testing.assert_array_equal(outputs.logits[index], expected, err_msg=f"sequence of {lengths[index]}")
    np.testing.assert_array_equal(outputs.greedy, np.stack(alone).argmax(axis=1))


def test_only_rows_that_sample_get_logits(library: NativeLibrary, team: Team) -> None:
    model = tiny_model(library, team, SHAPES["llama"])
    rows = [Row(tokens_of(seed, 5), 0, [seed], samples=seed != 1) for seed in range(3)]
    outputs = step(model.backend, rows)
    assert outputs.logits.shape == (2, 150)
    for index, seed in enumerate((0, 2)):
        np.testing.assert_array_equal(
            outputs.logits[index].copy(), last_logits(model.backend, rows[seed].tokens, [9], [5])
        )
        outputs = step(model.backend, rows)


def test_judged_tokens_get_the_logits_they_would_sample_from(library: NativeLibrary, team: Team) -> None:
    model = tiny_model(library, team, SHAPES["llama"])
    tokens = tokens_of(6, 80)
    one_by_one = []
    for position, token in enumerate(tokens):
        one_by_one.append(step(model.backend, [Row([token], position, [0, 1, 2, 3, 4])]).logits[0].copy())
    mate = Row(tokens_of(7, 3), 0, [20])
    judged = [3 + position for position in range(79)]
    outputs = step(model.backend, [mate, Row(tokens, 0, [5, 6, 7, 8, 9])], judged)
    pieces = [piece.copy() for piece in outputs.judged]
    assert len(pieces) > 1
    np.testing.assert_array_equal(np.concatenate(pieces), np.stack(one_by_one[:79]))


@pytest.mark.parametrize("kv", KVS, ids=lambda kv: f"{kv.name} pool")
@pytest.mark.parametrize("kind", [NumericType.BF16, NumericType.INT8], ids=lambda kind: kind.name)
def test_a_broken_row_reaches_no_other(library: NativeLibrary, team: Team, kind: NumericType, kv: NumericType) -> None:
    model = tiny_model(library, team, Shape(tied=False), (kind,), kv, broken_token=7)
    healthy = [Row([1, 2, 3], 0, [0]), Row([4, 5], 0, [2])]
    alone = [step(model.backend, [row]).logits[0].copy() for row in healthy]
    outputs = step(model.backend, [healthy[0], Row([9, 7, 9], 0, [1]), healthy[1]])
    assert outputs.broken.tolist() == [False, True, False]
    np.testing.assert_array_equal(outputs.logits[[0, 2]], np.stack(alone))
    model.backend.clear_blocks(np.array([1], dtype=np.int32))
    np.testing.assert_array_equal(step(model.backend, [Row([1, 2, 3], 0, [1])]).logits[0], alone[0])


def test_ties_go_to_the_lowest_id(library: NativeLibrary, team: Team) -> None:
    """A head of zeros: all logits are equal."""
    model = tiny_model(library, team, Shape(tied=False))
    zeros = pack(library, team, np.zeros((150, 72), dtype=np.float32), NumericType.F32, NumericType.BF16, (150, 72))
    model.backend.attach_matrix(Matrix.HEAD, 0, 0, NumericType.BF16, (150, 72), zeros.data)
    model.backend.complete()
    outputs = step(model.backend, [Row([1], 0, [0]), Row([2], 0, [1])])
    assert outputs.greedy.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        (Row([1], 0, [160]), "block 160 of a pool of 160"),
        (Row([150], 0, [0]), "token id 150 of a vocabulary of 150"),
        (Row([1] * 17, 0, [0]), "row 0 needs 2 blocks of 1"),
        (Row([1], 1200, list(range(80))), "the rope tables hold 1200 positions"),
    ],
)
def test_a_step_that_contradicts_the_model_is_refused(
    library: NativeLibrary, team: Team, row: Row, complaint: str
) -> None:
    model = tiny_model(library, team, SHAPES["llama"])
    with pytest.raises(NativeCpuError, match=complaint):
        step(model.backend, [row])


def test_a_missing_weight_is_named(library: NativeLibrary, team: Team) -> None:
    table = np.ones((4, 8), dtype=np.float32)
    sizes = {"vocab_size": 8, "hidden_size": 16, "intermediate_size": 16, "num_layers": 1}
    heads = {"num_heads": 1, "num_kv_heads": 1, "head_dim": 16}
    config = NativeConfig(**sizes, **heads, norm_eps=1e-5, rope_cos=table, rope_sin=table)
    with pytest.raises(NativeCpuError, match="the embedding was not attached"):
        NativeCpu(library, team, config).complete()
