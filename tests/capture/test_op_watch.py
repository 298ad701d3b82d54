"""The root op: the first whose finite inputs gave a non-finite output, against NumPy's own fp16."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ampscope.capture.script import op_watch
from ampscope.capture.script.op_uses import fixed_sentence
from ampscope.observations import BadOp
from tests.helpers.script_watching import watched

HERE = Path(__file__)


class Exponential(nn.Module):
    """exp, the op to blame in most cases here."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(x)  # the blamed line


class Root(nn.Module):
    """sqrt, whose derivative at 0 is infinite."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sqrt(x)  # the line behind the backward op


def _line_of(text: str) -> str:
    lines = HERE.read_text().splitlines()
    numbers = [n for n, line in enumerate(lines, 1) if line.strip() == text]
    assert len(numbers) == 1
    return f"{HERE.name}:{numbers[0]}"


def _bad(run: Callable[[], Tensor | None]) -> tuple[list[BadOp], int | None]:
    """Non-finite ops, and the one that the result descends from."""
    with watched() as seen:
        result = run()
        taint = seen.watch.taint_of(result)
        return [b for b in seen.watch.records() if b.kind == "nonfinite"], taint


def test_forward_root_with_module_line_magnitudes_and_fp32_value() -> None:
    model = nn.Sequential(nn.Identity(), nn.Sequential(nn.Identity(), Exponential()))
    x = torch.tensor([[1.0, -12.0, 11.5, 0.25]], dtype=torch.float16)
    bad, taint = _bad(lambda: (model(x) * 2 - 5).sum())
    root = bad[0]
    assert taint == root.id
    assert (root.op, root.phase, root.dtype) == ("aten.exp", "forward", "fp16")
    assert (root.module, root.module_type) == ("1.1", "Exponential")
    assert root.line == _line_of("return torch.exp(x)  # the blamed line")
    assert root.code == "return torch.exp(x)  # the blamed line"
    assert (root.inputs[0].max_abs, root.inputs[0].min_abs) == (12.0, 0.25)
    assert (root.pos_inf, root.nan, root.total) == (1, 0, 4)
    assert root.fp32_finite is True
    assert root.fp32_max == pytest.approx(math.exp(11.5), rel=1e-6)
    assert root.fp32_max > 65504
    assert len(bad) == 1  # what follows inherits the fault and is none of its own


def test_matmul_overflow_against_numpy() -> None:
    made = np.random.default_rng(0)
    a, b = (made.normal(0, 60, (8, 64)).astype(np.float16) for _ in range(2))
    a[3], b[5] = 60, 50  # 64 * 3,000 = 192,000
    bad, _ = _bad(lambda: torch.from_numpy(a) @ torch.from_numpy(b).T)
    exact = np.abs(a.astype(np.float64) @ b.astype(np.float64).T)
    assert [b.op for b in bad] == ["aten.mm"]
    assert bad[0].fp32_max == pytest.approx(exact.max(), rel=1e-5)
    assert bad[0].pos_inf + bad[0].neg_inf == int((exact >= 65520).sum())  # 65,520 rounds to inf
    assert [o.max_abs for o in bad[0].inputs] == [float(abs(a).max()), float(abs(b).max())]


def test_backward_root_is_named_by_its_forward_line() -> None:
    model = nn.Sequential(nn.Identity(), Root())
    x = torch.tensor([4.0, 0.0, 9.0], requires_grad=True)
    with watched() as seen:
        model(x).sum().backward()
        taint = seen.watch.taint_of(x.grad)
    bad = [b for b in seen.watch.records() if b.kind == "nonfinite"]
    assert [b.id for b in bad] == [taint]
    assert (bad[0].phase, bad[0].node, bad[0].module) == ("backward", "SqrtBackward0", "1")
    assert bad[0].line == _line_of("return torch.sqrt(x)  # the line behind the backward op")
    assert bad[0].pos_inf == 1


def test_overflow_of_a_scaled_gradient_is_found_in_the_backward_pass() -> None:
    weight = torch.full((4, 1), 200.0, dtype=torch.float16)
    x = torch.ones(2, 4, dtype=torch.float16, requires_grad=True)
    with watched() as seen:
        ((x @ weight).sum() * 1.0).backward(torch.tensor(1000.0, dtype=torch.float16))
        taint = seen.watch.taint_of(x.grad)
    bad = seen.watch.records()
    assert taint is not None
    root = next(b for b in bad if b.id == taint)
    assert (root.phase, root.op, root.node) == ("backward", "aten.mm", "MmBackward0")
    assert root.fp32_max == 200_000.0


def test_an_in_place_op_is_found_and_again_at_the_same_place_only_counts() -> None:
    total = torch.full((3,), 40_000.0, dtype=torch.float16)

    def script() -> Tensor:
        for _ in range(5):
            fresh = total.clone()
            fresh.add_(total)
        return fresh

    bad, taint = _bad(script)
    assert [(b.op, b.count, b.pos_inf) for b in bad] == [("aten.add_", 5, 3)]
    assert taint == bad[0].id


def test_sums_are_looked_at_again_after_an_optimizer_step_that_raised() -> None:
    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            own = torch.full((8,), 2048.0, dtype=torch.float16)
            own.add_(torch.ones(8, dtype=torch.float16))  # a sum of the optimizer's own
            raise ValueError

    count = torch.full((8,), 2048.0, dtype=torch.float16)
    with watched() as seen:
        with pytest.raises(ValueError):  # noqa: PT011  # its own
            Failing([torch.ones(1, requires_grad=True)], lr=0.1).step()
        assert seen.watch.records() == []
        count.add_(torch.ones(8, dtype=torch.float16))
    assert {(bad.kind, bad.op) for bad in seen.watch.records()} == {("stall", "aten.add_")}


def test_a_users_function_is_named() -> None:
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * x * x

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            return gradients[0]

    bad, _ = _bad(lambda: Cube.apply(torch.full((2,), 100.0, dtype=torch.float16)))
    assert [(b.op, b.function) for b in bad] == [("aten.mul", "Cube")]


def test_consumers_and_producers_are_named_nearest_first() -> None:
    x = torch.full((2, 2), 300.0, dtype=torch.float16)
    bad, _ = _bad(lambda: torch.softmax(((x + 0).relu() @ x.relu()) * 0.5, -1))
    assert bad[0].op == "aten.mm"
    assert bad[0].inputs[0].producers[:2] == ("relu", "add")
    assert bad[0].consumers[:2] == ("mul", "_softmax")


def test_it_sleeps_after_its_budget() -> None:
    x = torch.tensor([20.0], dtype=torch.float16)
    with watched(budget=3) as seen:
        for _ in range(3):
            x = x * 1.0
        torch.exp(x)
    assert seen.watch.seen_ops == 3
    assert seen.watch.records() == []


FACTORS = st.lists(st.sampled_from([0.5, 1.5, 2.0, 3.0, 7.0, 30.0, 200.0]), min_size=1, max_size=12)


@settings(max_examples=40)
@given(FACTORS)
def test_the_first_overflow_of_a_chain_of_products_is_the_root(factors: list[float]) -> None:
    """NumPy multiplies the same fp16 numbers and says which product is the first infinity."""
    value, expected, exact = np.float16(1), None, 0.0
    with np.errstate(over="ignore"):
        for step, factor in enumerate(factors):
            before, value = value, np.float16(value * np.float16(factor))
            if expected is None and np.isinf(value):
                expected, exact = step, float(before) * factor
    with watched() as seen:
        x = torch.ones(1, dtype=torch.float16)
        makers: list[Tensor] = []
        for factor in factors:
            x = x * torch.tensor(factor, dtype=torch.float16)
            makers.append(x)
        taints = [seen.watch.taint_of(t) for t in makers]
    first = next((n for n, t in enumerate(taints) if t is not None), None)
    assert first == expected
    bad = seen.watch.records()
    assert len(bad) == (expected is not None)
    if expected is not None:
        assert bad[0].fp32_max == exact


def _scaled_product(x: Tensor) -> None:
    eight = torch.float8_e4m3fn
    a, b = x.to(eight), x.to(eight).t()
    torch._scaled_mm(a, b, scale_a=torch.tensor(1.0), scale_b=torch.tensor(1.0))


class Packed(Tensor):
    """A quantized weight of a library: it computes in its own way."""

    @staticmethod
    def __new__(cls, kept: Tensor) -> Packed:
        return Tensor._make_wrapper_subclass(cls, kept.shape, dtype=torch.float32)

    def __init__(self, kept: Tensor) -> None:
        self.kept = kept

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [a.kept.float() if isinstance(a, Packed) else a for a in args]
        return func(*plain, **(kwargs or {}))


@pytest.mark.parametrize(
    ("run", "op"),
    [
        (_scaled_product, "_scaled_mm"),
        (lambda x: x.to(torch.float8_e5m2).float(), "_to_copy"),
        (lambda x: torch._int_mm(x.to(torch.int8), x.to(torch.int8).t()), "_int_mm"),
        (lambda x: x @ Packed(x.t().to(torch.int8)), "mm of Packed"),
    ],
)
def test_what_the_control_cannot_change_is_named(run: Callable[[Tensor], object], op: str) -> None:
    with watched() as seen:
        run(torch.ones(32, 32))
    assert op in [u.op for u in seen.watch.uses.records() if u.name == "fixed_precision"]
    sentence = fixed_sentence(seen.watch.uses.records())
    assert sentence.startswith("Not judged: ")
    assert HERE.name in sentence


def test_plain_half_precision_is_judged() -> None:
    with watched() as seen:
        (torch.ones(4, 4).half() @ torch.ones(4, 4).half()).float().sum()
    assert fixed_sentence(seen.watch.uses.records()) == ""


def test_looks_at_skipped_gradients_grow_with_their_number_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A scaler checks all gradients in one op, and none has to do with another."""
    looks: list[int] = []
    real = op_watch.all_finite

    def counted(tensor: Tensor) -> bool:
        looks.append(id(tensor))
        return real(tensor)

    def looked(count: int) -> int:
        gradients = [torch.full((3,), math.inf) for _ in range(count)]
        found, inverse = torch.zeros(1), torch.full((1,), 0.5)
        looks.clear()
        with watched() as seen:
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse)
        assert float(found) == 1.0
        assert seen.watch.taint_of(gradients[-1]) is not None
        return len(looks)

    with monkeypatch.context() as patch:
        patch.setattr(op_watch, "all_finite", counted)
        few, many = looked(10), looked(100)
    assert 0 < many <= 10 * few
