"""Dtypes of lines: which the script's lines compute in, against what plain torch says of them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from ampscope.capture.script.line_uses import LineUses, _text
from ampscope.capture.script.module_paths import ModulePaths
from ampscope.capture.script.op_watch import OpWatch
from ampscope.observations import LineUse, SourceText
from ampscope.source_lines import SourceLines


@contextmanager
def counted() -> Iterator[LineUses]:
    paths = ModulePaths()
    watch = OpWatch(paths, SourceLines(), 10_000)
    uses = LineUses(watch.place)
    watch.on_op = uses.record
    with paths, watch:
        yield uses


def of_line(uses: LineUses, text: str) -> list[LineUse]:
    """Those of this file's only line that holds ``text``."""
    lines = inspect.getsource(inspect.getmodule(of_line)).splitlines()  # type: ignore[arg-type]
    (number,) = (n for n, line in enumerate(lines, 1) if text in line and "of_line" not in line)
    found = [r for r in uses.records() if isinstance(r, LineUse)]
    return [use for use in found if use.line.endswith(f"test_line_uses.py:{number}")]


def test_forward_backward_and_casts_of_a_line() -> None:
    linear, x = nn.Linear(4, 3), torch.randn(2, 4)
    with counted() as uses:
        with torch.autocast("cpu", torch.bfloat16):
            y = linear(x)  # the matmul
        z = y.float().square().sum()  # in fp32
        z.backward()
    matmul = [use for use in of_line(uses, "# the matmul") if use.op == "addmm"]
    assert [(use.takes, use.makes, use.backward) for use in matmul] == [(("bf16",), "bf16", False)]
    casts = [u for u in of_line(uses, "# the matmul") if u.op == "_to_copy" and not u.backward]
    assert {(use.takes, use.makes) for use in casts} == {(("fp32",), "bf16")}
    assert sum(use.calls for use in casts) == 3  # weight, bias, input
    backward = {use.op for use in of_line(uses, "# the matmul") if use.backward}
    assert "mm" in backward  # of the weight's gradient
    fp32 = [use for use in of_line(uses, "# in fp32") if use.op in ("pow", "sum")]
    assert {(use.takes, use.makes) for use in fp32} == {(("fp32",), "fp32")}


def test_a_long_file_is_masked_before_it_is_cut(tmp_path: Path) -> None:
    file = tmp_path / "long.py"
    inner = "\n".join(["    x = 1"] * 4_990)
    file.write_text(
        f"def f():\n{inner}\n    password = (\n        'a'\n        'TAIL'\n" + "\n" * 99 + ")\n"
    )
    text = _text(str(file))
    assert len(text.lines) == 5_000
    assert "TAIL" not in "\n".join(text.lines)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_a_cast_loses_is_counted(dtype: torch.dtype) -> None:
    values = torch.tensor([0.0, 1.0, 1e-9, -1e-30, 1e-42, 7.0])
    with counted() as uses:
        values.to(dtype)  # the cast
    (use,) = of_line(uses, "# the cast")
    oracle = int(((values != 0) & (values.to(dtype) == 0)).sum())
    assert (use.cast, use.lost) == (5, oracle)


def test_a_cast_to_a_wider_dtype_loses_nothing() -> None:
    half = torch.ones(3, dtype=torch.float16)
    with counted() as uses:
        half.float()  # widened
    (use,) = of_line(uses, "# widened")
    assert (use.cast, use.lost, use.makes) == (0, 0, "fp32")


def test_a_tensor_without_numbers_is_left_alone() -> None:
    tensor = torch.ones(3, device="meta")
    with counted() as uses:
        tensor.to(torch.float16)  # of nothing
    assert not of_line(uses, "# of nothing")


def test_the_text_of_the_file_is_kept() -> None:
    with counted() as uses:
        torch.ones(2).sum()
    (text,) = (r for r in uses.records() if isinstance(r, SourceText))
    assert text.file.endswith("test_line_uses.py")
    assert text.lines[0] == __doc__.join(('"""', '"""'))  # type: ignore[union-attr]
