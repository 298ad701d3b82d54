"""The patch is code that a person pastes: it is pasted here, and it must cure."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ampscope.diagnosis.findings import Finding
from ampscope.diagnosis.result import Trial
from ampscope.report import fix_words
from ampscope.rules.verdict import Fix, Status, Verdict, island, island_patch
from tests.helpers.evidence_making import bad_op


class Block(nn.Module):
    """65,536 in fp16 is infinite; the second argument is a keyword, as in many models."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(64, 4, bias=False)
        nn.init.constant_(self.wide.weight, 32.0)

    def forward(self, x: Tensor, *, gate: Tensor) -> Tensor:
        out: Tensor = self.wide(x) * gate
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.ones((), dtype=torch.float16)
        out: Tensor = self.first(x, gate=gate) + self.second(x, gate=gate)
        return out


def loss_of(model: Model) -> Tensor:
    with torch.autocast("cpu", dtype=torch.float16):
        return model(torch.full((2, 64), 32.0)).float().sum()


@pytest.mark.parametrize("paths", [("first.wide", "second.wide"), ("first", "second")])
def test_the_pasted_patch_cures(paths: tuple[str, ...]) -> None:
    model = Model()
    assert torch.isinf(loss_of(model))
    exec(island_patch(*paths), {"model": model})
    assert loss_of(model).item() == 2 * 2 * 4 * 64 * 32.0 * 32.0
    loss_of(model).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert torch.isfinite(parameter.grad).all()


def test_a_patch_for_one_of_two_leaves_the_other_alone() -> None:
    model = Model()
    exec(island_patch("first"), {"model": model})
    assert torch.isinf(loss_of(model))


def test_without_a_module_it_is_a_form_for_an_expression() -> None:
    assert "enabled=False" in island_patch("")
    assert "get_submodule" not in island_patch("")


def test_a_patch_is_of_the_control_that_cured() -> None:
    rule = island(bad_op("aten.mm", module="first", line="train.py:6"), "fp32_module", "Keep it.")
    verdict = Verdict(
        Status.FOUND, "why", module="first", line="train.py:6", code="a @ b", fix=rule
    )
    finding = Finding("activation_overflow", verdict, ())
    modules = Trial("fp32_modules:first,second", "fp32_module", True, None)
    lines = Trial("fp32_lines:train.py:6", "rewrite_op", True, None)
    assert "['first', 'second']" in fix_words.patch(finding, modules)
    assert "train.py:6\n#     a @ b\nwith torch.autocast" in fix_words.patch(finding, lines)
    assert "get_submodule" not in fix_words.patch(finding, lines)
    assert "['first']" in fix_words.patch(finding, None)


def test_what_is_said_fits_the_patch() -> None:
    """The rule's patch makes fp32 weights; the run that worked kept fp32 masters."""
    fix = Fix(
        "fp32_params", "Keep the weights in fp32.", "model = model.float()\n", ("fp32_state",)
    )
    finding = Finding("small_update_lost", Verdict(Status.FOUND, fix=fix))
    cured = Trial("fp32_state", "fp32_optimizer_state", True, 1.0)
    said = fix_words.sentence(finding, cured)
    assert said == "Keep the weights in fp32. It was run with fp32 master weights."
    assert fix_words.patch(finding, cured) == fix.patch
