"""Digests: distances of sketches against torch's own, checksums, and what cannot be read."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ampscope.capture.script import run_digests
from ampscope.capture.script.run_digests import digest


@pytest.mark.parametrize("size", [1, 7, 16, 1000, 20_000])
def test_distances_follow_from_sketches(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_digests, "BLOCK", 4096)  # also over several blocks
    run_digests._hashes.cache_clear()
    generator = torch.Generator().manual_seed(size)
    one = torch.randn(size, generator=generator)
    ratios = []
    for _ in range(20):
        other = one + 1e-3 * torch.randn(size, generator=generator)
        first, second = digest(one), digest(other)
        assert first is not None
        assert second is not None
        apart = np.linalg.norm(np.subtract(first.sketch, second.sketch))
        ratios.append(float(apart / (one.double() - other.double()).norm()))
        assert first.norm == pytest.approx(float(one.double().norm()))
        assert first.peak == float(one.abs().max())
    run_digests._hashes.cache_clear()
    mean_square = float(np.mean(np.square(ratios)))
    assert mean_square == pytest.approx(1, abs=4 * (2 / 16 / 20) ** 0.5 if size > 16 else 1e-6)


def test_differences_with_a_pattern_are_no_larger_in_a_sketch() -> None:
    """One constant for all elements, and rows that come again, as the words of a text do."""
    rows = torch.randn(40, 96, generator=torch.Generator().manual_seed(0))
    ratios = []
    for seed in range(20):
        words = torch.randint(0, 40, (192,), generator=torch.Generator().manual_seed(seed))
        for pattern in (rows[words], torch.full((4096 + seed,), 0.1)):
            found = digest(pattern)
            assert found is not None
            ratios.append(float(np.linalg.norm(found.sketch)) / found.norm)
    assert float(np.mean(np.square(ratios))) == pytest.approx(1, abs=0.25)


def test_a_checksum_shows_each_bit_and_each_place() -> None:
    values = torch.arange(1, 65, dtype=torch.float32)
    base = digest(values)
    assert base is not None
    seen = {base.checksum}
    for place in range(64):
        changed = values.clone()
        changed[place] = torch.nextafter(changed[place], torch.tensor(torch.inf))
        found = digest(changed)
        assert found is not None
        seen.add(found.checksum)
    swapped = digest(values.flip(0))
    assert swapped is not None
    assert len(seen | {swapped.checksum}) == 66
    again = digest(values.reshape(8, 8).T.contiguous().T)  # other strides, the same elements
    assert again == base


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_sketch_does_not_depend_on_the_dtype(dtype: torch.dtype) -> None:
    values = torch.tensor([1.0, -2.5, 0.0, 1024.0])
    first, second = digest(values), digest(values.to(dtype))
    assert first is not None
    assert second is not None
    assert first.sketch == second.sketch


def test_what_is_not_finite_is_counted_and_the_rest_stays() -> None:
    found = digest(torch.tensor([1.0, torch.nan, torch.inf, -torch.inf, 2.0]))
    assert found is not None
    assert (found.nonfinite, found.peak, found.norm) == (3, 2.0, 5**0.5)


def test_whole_numbers_and_what_holds_none() -> None:
    assert digest(torch.tensor([1, 2, 3])) != digest(torch.tensor([1, 3, 2]))
    assert digest(torch.tensor([True, False])) is not None
    assert digest(torch.empty(3, device="meta")) is None
    assert digest(torch.zeros(2, dtype=torch.complex64)) is None
    empty = digest(torch.zeros(0))
    assert empty is not None
    assert empty.total == 0
