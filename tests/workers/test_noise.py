"""The noise is the documented function, bit by bit, and looks like Gumbel noise."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from workers import noise

pytestmark = pytest.mark.usefixtures("one_thread")

MASK32, MASK64 = (1 << 32) - 1, (1 << 64) - 1
F32 = np.float32


def reference_noise(seed: int, position: int, token: int) -> np.float32:
    """The module's docstring in plain Python: integers, and fp32 one operation at a time."""

    def mix64(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK64
        return z ^ (z >> 31)

    key = mix64((mix64(seed) + (position + 1) * 0x9E3779B97F4A7C15) & MASK64)
    x = (token * 0x9E3779B1 & MASK32) ^ (key & MASK32)
    x ^= x >> 16
    x = x * 0x7FEB352D & MASK32
    x ^= key >> 32
    x ^= x >> 15
    x = x * 0x846CA68B & MASK32
    x ^= x >> 16
    u = F32(x >> 8 | 1) * F32(2.0**-24)
    return -reference_ln(-reference_ln(u))


def reference_ln(a: np.float32) -> np.float32:
    bits = int(np.asarray(a, dtype=np.float32).view(np.int32))
    exponent = (bits - 0x3F3504F3) >> 23
    f = np.array(bits - (exponent << 23), dtype=np.int32).view(np.float32)[()] - F32(1)
    e, z = F32(exponent), f * f
    p = F32(noise.LOG_COEFFICIENTS[0])
    for coefficient in noise.LOG_COEFFICIENTS[1:]:
        p = p * f + F32(coefficient)
    return (((f * z) * p + e * F32(noise.LN2_LOW)) - z * F32(0.5) + f) + e * F32(noise.LN2_HIGH)


def _noise(seeds: list[int], positions: list[int], tokens: list[int]) -> torch.Tensor:
    keys = torch.from_numpy(noise.keys(np.array(seeds, dtype=np.uint64), np.array(positions, dtype=np.int64)))
    return noise.gumbel(noise.uniform(keys, torch.tensor(tokens, dtype=torch.int32)))


def test_noise_is_the_documented_function_bit_by_bit() -> None:
    seeds = [0, 1, 2**63, 2**64 - 1, 123456789]
    positions = [0, 7, 131071, 2**31 - 1, 42]
    tokens = [0, 1, 2, 255, 49151, 151935, 2**31 - 1]
    expected = [
        [reference_noise(seed, position, token) for token in tokens]
        for seed, position in zip(seeds, positions, strict=True)
    ]
    assert np.array_equal(_noise(seeds, positions, tokens).numpy(), np.array(expected, dtype=np.float32))


def test_golden_values_do_not_change() -> None:
    bits = _noise([7], [11], [0, 1, 2, 3]).numpy().view(np.uint32)[0]
    assert bits.tolist() == [0xBF168EB9, 0x3FB02A92, 0x3EB7E840, 0xBEF477E4]


def test_noise_is_bounded_and_within_an_ulp_or_two_of_the_logarithm() -> None:
    found = _noise([3], [5], list(range(50_000)))[0]
    assert found.min() > noise.SMALLEST and found.max() < noise.LARGEST
    extremes = torch.tensor([1, 2**24 - 1], dtype=torch.float32) * 2.0**-24
    low, high = (-noise.ln(-noise.ln(extremes))).tolist()
    assert (low > noise.SMALLEST, high < noise.LARGEST) == (True, True)
    a = torch.rand(100_000, generator=torch.Generator().manual_seed(0)) * 40 + 1e-6
    exact = torch.log(a.double())
    assert ((noise.ln(a).double() - exact).abs() <= 2.5e-7 * exact.abs().clamp(min=1e-3)).all()


def test_the_rough_noise_is_as_near_as_it_says() -> None:
    u = torch.cat((torch.arange(1, 4000, 2), torch.arange(2**24 - 4001, 2**24, 2))).float() * 2.0**-24
    assert (noise.rough_gumbel(u.clone()) - noise.gumbel(u)).abs().max() < noise.ROUGHNESS / 10


def test_noise_has_the_moments_of_gumbel_over_tokens_positions_and_seeds() -> None:
    n = 40_000
    for sample in (
        _noise([9], [4], list(range(n)))[0],
        _noise([9] * n, list(range(n)), [17])[:, 0],
        _noise(list(range(n)), [4] * n, [17])[:, 0],
    ):
        assert abs(sample.mean() - 0.5772157) < 4 * math.pi / math.sqrt(6 * n)
        assert abs(sample.var() - math.pi**2 / 6) < 0.05


def test_neighbours_are_not_correlated() -> None:
    n = 40_000
    tokens = list(range(n))
    base = _noise([9], [4], tokens)[0]
    for other in (_noise([9], [5], tokens)[0], _noise([10], [4], tokens)[0], torch.roll(base, 1)):
        assert abs(torch.corrcoef(torch.stack((base, other)))[0, 1]) < 4 / math.sqrt(n)
