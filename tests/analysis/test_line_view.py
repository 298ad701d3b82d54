"""A script's text with what its lines did, from observations written by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ampscope.analysis.hand_casts import HandCast, hand_casts, without_casts
from ampscope.analysis.line_view import files, place
from ampscope.analysis.module_line import ModuleLine, module_line
from ampscope.analysis.run_view import RunView
from ampscope.observations import BadOp, HalfSite, LineUse, Observation, Outcome, SourceText
from tests.helpers.evidence_making import bad_op, but, steps

TEXT = SourceText("train.py", ("import torch", "x = w.half() @ v", "loss = x.sum()", ""))


def view(*observations: Observation) -> RunView:
    return RunView("as_is", "1", (*observations, Outcome(ended="returned")))


def use(line: int, op: str, takes: str, makes: str, **more: object) -> LineUse:
    return LineUse(f"train.py:{line}", op, tuple(takes.split()), makes, **more)  # type: ignore[arg-type]


def test_what_stands_beside_each_line() -> None:
    (file,) = files(
        view(
            TEXT,
            use(2, "_to_copy", "fp32", "fp16", calls=2, cast=10, lost=4),
            use(2, "view", "fp16", "fp16", calls=9),
            use(2, "mm", "fp16", "fp16", calls=2),
            use(2, "mm", "fp16", "fp16", calls=4, backward=True),
            use(3, "sum", "fp16", "fp32", calls=2),
        )
    )
    assert [line.text for line in file.lines] == list(TEXT.lines)
    assert [line.number for line in file.lines] == [1, 2, 3, 4]
    assert [line.forward for line in file.lines] == ["", "fp16", "fp16 → fp32", ""]
    assert [line.backward for line in file.lines] == ["", "fp16", "", ""]
    assert file.lines[1].casts == "fp32 → fp16 × 2"
    assert (file.lines[1].cast, file.lines[1].lost) == (10, 4)
    assert file.told == 2


def test_what_becomes_half_before_any_op_is_seen() -> None:
    site = HalfSite(
        "cast", "train.py:1", "Tensor.half", "fp16", "whole numbers", prepares=True, calls=2,
        elements=9, changed=4, merged=3, distinct=8,
    )  # fmt: skip
    (file,) = files(view(TEXT, site))
    assert file.told == 1
    (said,) = file.lines[0].sites
    for fact in ("whole numbers", "fp16", "Tensor.half", "2 times", "9", "4 changed", "8", "3"):
        assert fact in said


def test_the_first_bad_op_and_the_steps_that_it_cost() -> None:
    def bad(number: int, line: int, **more: object) -> BadOp:
        made = bad_op("aten.mm", id=number, line=f"train.py:{line}", kind="nonfinite")
        return replace(made, reached_gradient=True, **more)  # type: ignore[arg-type]

    made = but(steps([1.0] * 6), (1, 2, 5), skipped=True)
    (file,) = files(
        view(
            TEXT,
            *made,
            bad(0, 2, step=1, last_step=2, count=2),
            bad(1, 3, step=1, last_step=5),
        )
    )
    assert "first bad op" in file.lines[1].notes[0]
    assert file.lines[1].notes[1] == "2 skipped steps began here."
    assert file.lines[2].notes[1] == "1 skipped step began here."
    assert "first bad op" not in file.lines[2].notes[0]


def test_an_error_stands_at_its_line() -> None:
    ended = Outcome("exception", error_type="ValueError", error_text="no", error_line="train.py:3")
    (file,) = files(RunView("as_is", "1", (TEXT, ended)))
    assert file.lines[2].notes == ("ValueError: no",)


def test_files_without_text_are_left_out() -> None:
    assert files(view(SourceText("a.py", ()), use(2, "mm", "fp16", "fp16"))) == []
    assert files(view(use(2, "mm", "fp16", "fp16"))) == []


@pytest.mark.parametrize(
    ("code", "without"),
    [
        ("y = net(x.half()).float()", "y = net(x).float()"),
        ("x = x.to(torch.float16)", "x = x"),
        ("x = x.to(dtype=torch.bfloat16)", "x = x"),
        ('x = x.to("cuda", torch.float16)', 'x = x.to("cuda")'),
        ("x = x.to(device, dtype=torch.half, non_blocking=True)",
         "x = x.to(device, non_blocking=True)"),
        ("x = x.type(torch.float16)", "x = x"),
        ('x = x.type("torch.cuda.HalfTensor")', "x = x"),
        ("w = w.bfloat16() + 1", "w = w + 1"),
        ("x = x.to(y.dtype).to(torch.float32)", "x = x.to(y.dtype).to(torch.float32)"),
    ],
)  # fmt: skip
def test_a_line_without_the_casts_that_it_spells_out(code: str, without: str) -> None:
    assert without_casts(code) == without


def test_casts_by_hand_are_written_and_were_seen() -> None:
    text = SourceText(
        "train.py", ("y = x.half()", "w = w.to(x.dtype)", "z = z.half()", "x.float()")
    )
    casts = [use(n, "_to_copy", "fp32", "fp16") for n in (1, 2)]  # the third line did not run
    others = [use(4, "_to_copy", "fp16", "fp32"), use(1, "mm", "fp16", "fp16")]
    assert hand_casts(view(text, *casts, *others)) == [HandCast("train.py:1", "fp16", "y = x")]
    under_autocast = Outcome("returned", uses_autocast="fp16")
    assert hand_casts(RunView("as_is", "r", [text, *casts, under_autocast])) == []


def test_places() -> None:
    assert place("src/net.py:41") == ("src/net.py", 41)
    assert place("") == place("net.py") == place("net.py:x") == place(":4") == ("", 0)


MODEL = SourceText(
    "model.py",
    (
        "class Gate(nn.Module):",
        "    def __init__(self, width):",
        "        self.up = nn.Linear(width, width)",
        "",
        "    def forward(self, x):",
        "        x = x * 2",
        "        return x * self.up(x)",
        "",
        "class Net(nn.Module):",
        "    def __init__(self):",
        "        self.inner = nn.ModuleList([Gate(8)])",
        "    def forward(self, x):",
        "        for gate in self.inner:",
        "            x = gate(x)",
        "        return x",
        "class Bare(Gate):",
        "    extra = 1",
    ),
)
TYPES = {
    "": "Net", "inner": "ModuleList", "inner.0": "Gate", "inner.0.up": "Linear", "head": "Linear",
    "bare": "Bare",
}  # fmt: skip


def test_a_module_is_found_in_the_recorded_source() -> None:
    found = {path: module_line([MODEL], TYPES, path) for path in TYPES}
    assert found[""] == ModuleLine("model.py:12", "Net", is_called=False)
    assert found["inner.0"] == ModuleLine("model.py:5", "Gate", is_called=False)
    assert found["inner.0.up"] == ModuleLine("model.py:7", "Gate", is_called=True)
    assert found["inner"] == ModuleLine("model.py:13", "Net", is_called=True)
    assert found["bare"] == ModuleLine("model.py:16", "Bare", is_called=False)
    assert found["head"] is None  # its forward does not name it


def test_a_module_of_two_possible_classes_or_of_no_source_is_not_placed() -> None:
    assert module_line([MODEL, replace(MODEL, file="b.py")], TYPES, "inner.0") is None
    assert module_line([], TYPES, "inner.0") is None
    assert module_line([replace(MODEL, lines=("class Gate(",))], TYPES, "inner.0") is None
    deep = "(" * 100_000
    assert module_line([replace(MODEL, lines=(deep, "\x00"))], TYPES, "inner.0") is None
    assert module_line([replace(MODEL, lines=("-" * 20_000 + "1",))], TYPES, "") is None
