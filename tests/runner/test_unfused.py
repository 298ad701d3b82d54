"""An op kept out of inductor's kernels is computed by torch's own, and nothing stays changed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._inductor import decomposition, lowering

from ampscope.runner.controls import applied
from tests.helpers.inductor import needs_compiler

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.compile warns of its own code
GELU = torch.ops.aten.gelu.default


def wrong(x: Tensor, approximate: str = "none") -> Tensor:
    return x * 2


@pytest.fixture
def planted() -> Iterator[None]:
    """A decomposition of GELU that is wrong, in the table and in the copy that inductor keeps."""
    right = decomposition.decompositions.pop(GELU)
    decomposition.decompositions[GELU] = wrong
    decomposition.fast_random_decomps.cache_clear()
    decomposition.fast_random_decomps()
    yield
    decomposition.decompositions[GELU] = right
    decomposition.fast_random_decomps.cache_clear()


def compiled(x: Tensor) -> Tensor:
    torch._dynamo.reset()
    return torch.compile(lambda a: torch.nn.functional.gelu(a + 1))(x)  # type: ignore[no-any-return]  # torch types it so


@needs_compiler
@pytest.mark.usefixtures("planted")
def test_torchs_own_kernel_computes_the_op_and_all_is_put_back() -> None:
    x = torch.linspace(-2, 2, 16)
    eager = torch.nn.functional.gelu(x + 1)
    before = lowering.lowerings.get(GELU), GELU in lowering.fallbacks
    with applied("compiled;unfused:aten.gelu"):
        assert torch.allclose(compiled(x), eager)
    assert decomposition.decompositions[GELU] is wrong
    assert (lowering.lowerings.get(GELU), GELU in lowering.fallbacks) == before
    assert torch.allclose(compiled(x), 2 * (x + 1))


@needs_compiler
@pytest.mark.usefixtures("planted")
def test_what_the_user_is_to_paste_does_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from ampscope.rules.compiled_code import _UNFUSED

    monkeypatch.setenv("CI", "true")  # torch refuses more there
    x = torch.linspace(-2, 2, 16)
    changed = torch._inductor.config.force_disable_caches
    kept = lowering.lowerings.copy(), lowering.fallbacks.copy()
    kept_inputs = lowering.needs_realized_inputs.copy()
    try:
        exec(_UNFUSED.format(packets="torch.ops.aten.gelu,"), {"torch": torch})
        assert torch.allclose(compiled(x), torch.nn.functional.gelu(x + 1))
    finally:
        torch._inductor.config.force_disable_caches = changed
        for live, before in (
            (lowering.lowerings, kept[0]),
            (lowering.fallbacks, kept[1]),
            (lowering.needs_realized_inputs, kept_inputs),
        ):
            live.clear()
            live.update(before)


def test_a_view_and_what_is_no_op_are_left_alone() -> None:
    before = dict(lowering.lowerings)
    with applied("compiled;unfused:aten.t,aten.no_such_op,getitem"):
        pass
    assert lowering.lowerings == before
