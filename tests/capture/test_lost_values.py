"""Infinities that became finite again, and constants that rounding took away: what is lost of
fp32's result is measured where it begins to matter, and what loses nothing is left alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ampscope.capture.script import op_facts
from ampscope.observations import BadOp, OpUse
from tests.helpers.script_watching import watched


def _seen(make: Callable[[Tensor], Tensor]) -> tuple[list[BadOp], list[OpUse]]:
    """Bad ops and uses of a forward and backward pass; 16 rows of half-precision activations."""
    x = torch.linspace(-300.0, 300.0, 64).reshape(16, 4).half().requires_grad_()
    with watched() as seen:
        make(x).float().sum().backward()
    bad = [b for b in seen.watch.records() if b.kind == "nonfinite" and b.phase == "forward"]
    return bad, [u for u in seen.watch.uses.records() if u.name == "half_constant"]


def _rms_norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1.0)


def _divided_by_a_norm(x: Tensor) -> Tensor:
    return x / torch.linalg.vector_norm(x * 100).view(1, 1)


def _of_a_view(x: Tensor) -> Tensor:
    return x / x.pow(2).sum(-1).sqrt().unsqueeze(-1)


@pytest.mark.parametrize(
    ("make", "op"),
    [
        (_rms_norm, "aten.rsqrt"),
        (_divided_by_a_norm, "aten.div"),
        (_of_a_view, "aten.div"),
    ],
)
def test_an_overflow_that_becomes_finite_and_wrong_is_measured(
    make: Callable[[Tensor], Tensor], op: str
) -> None:
    bad, _ = _seen(make)
    assert bad[0].lost is not None
    assert bad[0].lost > 0.05
    assert bad[0].lost_at.startswith(f"{op}, test_lost_values.py:")


def test_in_an_evaluation_what_a_module_loses_is_measured_without_a_backward_pass() -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return _divided_by_a_norm(x * self.weight.half())

    model, x = Norm(), torch.linspace(-300.0, 300.0, 64).reshape(16, 4).half()
    for is_learnt in (True, False):
        with watched() as seen, torch.no_grad():
            model(x) if is_learnt else _divided_by_a_norm(x)
        (bad,) = [b for b in seen.watch.records() if b.kind == "nonfinite"]
        assert bad.lost == (1.0 if is_learnt else None)
    with watched() as seen:
        with torch.no_grad():
            model(x)
        model(x).float().sum().backward()
    (bad,) = [b for b in seen.watch.records() if b.kind == "nonfinite" and b.phase == "forward"]
    assert (bad.count, bad.grad_enabled) == (2, True)  # the training is what counts


def _with_large(make: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """``make`` is given the activations and their square, of which some are infinite."""
    return lambda x: make(x, x.pow(2))


def _metric(x: Tensor) -> Tensor:
    with torch.no_grad():
        x.pow(2).mean(-1).reciprocal()
    return x


HARMLESS: dict[str, Callable[[Tensor], Tensor]] = {
    "clamp": _with_large(lambda x, large: large.clamp(max=1e3)),
    "minimum": _with_large(lambda x, large: torch.minimum(large, x.abs())),
    "where": _with_large(lambda x, large: torch.where(large < 100.0, large, x)),
    "masked_fill": _with_large(lambda x, large: large.masked_fill(large > 100.0, 0.0)),
    "own handling": _with_large(lambda x, large: torch.nan_to_num(large)),
    "tanh": _with_large(lambda x, large: torch.tanh(large)),
    "sigmoid": _with_large(lambda x, large: torch.sigmoid(large)),
    "bell": _with_large(lambda x, large: torch.exp(-large)),
    "softmax": _with_large(lambda x, large: torch.softmax(-large, 0)),
    "written over": _with_large(lambda x, large: torch.rsqrt(large.fill_(4.0))),
    "a metric": _metric,
    "no gradient": _with_large(lambda x, large: x + 0.0 * large.detach().reciprocal()),
    "never used": _with_large(lambda x, large: (large.reciprocal(), x)[1]),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_an_infinity_that_is_discarded_or_saturates_loses_nothing(name: str) -> None:
    bad, _ = _seen(HARMLESS[name])
    assert bad
    assert [b.lost for b in bad] == [None]


def _decay(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """A memory of 4,000 steps: 1 - 2e-4 is 1 in fp16."""

    def make(x: Tensor) -> Tensor:
        keep = (1 - 2e-4 * torch.ones(4)).to(dtype)  # here
        return x * (1 - keep.float() ** 4000).to(x.dtype)

    return make


def test_a_constant_that_rounding_took_away_is_found_where_it_was_rounded() -> None:
    _, uses = _seen(_decay(torch.float16))
    with open(__file__) as file:
        number = next(n for n, line in enumerate(file, 1) if line.endswith("# here\n"))
    assert [(u.op, u.value) for u in uses] == [("mul", 1.0)]
    assert uses[0].line == f"test_lost_values.py:{number}"


def _clock(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Time as a running sum of 600 steps: in bf16 it stands still at a half."""

    def make(x: Tensor) -> Tensor:
        t, dt = torch.zeros((), dtype=dtype), torch.tensor(1 / 600, dtype=dtype)
        for _ in range(600):
            t = t + dt
        return x.float() / t.float()

    return make


def _of_one_table(x: Tensor) -> Tensor:
    """A short sum of a table that rounding took away: the sum itself loses nothing."""
    keep = (1 - 2e-4 * torch.ones(4)).half()
    total = torch.zeros(4, dtype=torch.float16)
    for _ in range(4):
        total = total + (1 - keep)
    return x * (1 + 1e3 * total).to(x.dtype)


def test_what_a_running_sum_lost_is_no_constants_doing() -> None:
    """The sum is off by its own roundings, as large in each of several forward passes."""
    x = torch.linspace(-3.0, 3.0, 64).half().requires_grad_()
    with watched() as seen:
        for _ in range(3):
            _clock(torch.bfloat16)(x).sum().backward()
    assert [u.name for u in seen.watch.uses.records() if u.name == "half_constant"] == []
    (drift,) = [b for b in seen.watch.records() if b.kind == "drift"]
    assert drift.error == pytest.approx(1.0, abs=0.02)  # half of the time is lost
    _, uses = _seen(_of_one_table)
    assert [u.op for u in uses] == ["mul"]


def test_the_gate_of_a_recurrence_is_no_running_sum() -> None:
    """It adds two projections, both of them new at each time-step: their roundings do not add up.
    2,000 time-steps, as a GRU takes them in a few epochs."""
    torch.manual_seed(0)
    bias = torch.ones(256, dtype=torch.bfloat16)
    with watched() as seen:
        for inputs in torch.randn(2000, 2, 256, dtype=torch.bfloat16):
            projected = inputs[0] + bias
            projected + inputs[1]
    assert [b for b in seen.watch.records() if b.kind == "drift"] == []


def test_totals_that_one_line_adds_to_in_turn_are_sums_of_their_own() -> None:
    with watched() as seen:
        totals = [torch.zeros((), dtype=torch.bfloat16) for _ in range(3)]
        terms = [torch.tensor(n / 600, dtype=torch.bfloat16) for n in (1, 2, 3)]
        for _ in range(600):
            totals = [total + term for total, term in zip(totals, terms, strict=True)]
    (drift,) = [b for b in seen.watch.records() if b.kind == "drift"]
    assert drift.error == pytest.approx(1.0, abs=0.02)


KEPT: dict[str, Callable[[Tensor], Tensor]] = {
    "in fp32": _decay(torch.float32),
    "a vanishing epsilon": lambda x: x + torch.full((4,), 1e-9).half(),
    "a table": lambda x: x * torch.linspace(0.1, 1.0, 4).half(),
    "other random numbers": lambda x: x * torch.randn(4).half() + torch.randn(4, dtype=x.dtype),
    "a mask": lambda x: x * (1 - torch.tensor([1.0, 0.0, 1.0, 0.0]).half()),
    "changed in place": lambda x: x * (1 - (1 - 2e-4 * torch.ones(4)).half()).fill_(0.5),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_a_constant_that_is_rounded_a_little_is_none(name: str) -> None:
    assert _seen(KEPT[name])[1] == []


def _evaluated(size: float) -> list[OpUse]:
    """What is noted of a half model with BatchNorm that trains on inputs of about ``size``."""
    torch.manual_seed(0)
    x = (torch.randn(64, 8) * size).half()
    with watched() as seen:
        norm = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).half()
        for _ in range(20):
            norm(x).float().sum().backward()
        with torch.no_grad():
            norm.eval()(x)
    assert bool(norm[1].running_var.isfinite().all()) is (size < 100)
    return seen.watch.uses.records()


def test_running_statistics_that_outgrew_half_are_no_constant() -> None:
    """A variance of 10^6 is infinity in fp16: the evaluation divides by it. A training does not use
    it, and normalises well."""
    (use,) = (u for u in _evaluated(1000) if u.name.startswith("half_"))
    assert (use.name, use.module) == ("half_statistics", "1")
    assert use.line.startswith("test_lost_values.py:")
    assert use.value == pytest.approx(1.0, abs=0.01)  # nothing is left of what fp32 gives


def test_running_statistics_that_half_precision_holds_are_none() -> None:
    assert [u for u in _evaluated(5) if u.name.startswith("half_")] == []


def test_what_an_op_gives_in_fp32_leaves_running_statistics_alone() -> None:
    """Half inputs and fp32 statistics, as under autocast: the op that is run again to compare would
    update them a second time."""
    torch.manual_seed(0)
    x, norm, alone = torch.randn(16, 8).half(), nn.BatchNorm1d(8), nn.BatchNorm1d(8)
    call = torch.ops.aten.native_batch_norm.default
    given = (x, norm.weight, norm.bias, norm.running_mean, norm.running_var, True, 0.1, 1e-5)
    assert op_facts.in_fp32(call, given, {}) is not None
    assert norm.state_dict().keys() == alone.state_dict().keys()
    for name, value in norm.state_dict().items():
        assert torch.equal(value, alone.state_dict()[name]), name


@pytest.mark.parametrize(
    ("is_learned", "name"), [(True, "half_learned_phase"), (False, "half_phase")]
)
def test_the_argument_of_a_sine_is_the_models_or_a_tables(is_learned: bool, name: str) -> None:
    with watched() as seen:
        argument = torch.linspace(0.0, 1000.0, 64).bfloat16().requires_grad_(is_learned)
        (argument * 1.0).sin()
    assert [u.name for u in seen.watch.uses.records() if "phase" in u.name] == [name]
