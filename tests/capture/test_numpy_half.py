"""NumPy's float16: heard where a script casts to it, lifted by line or everywhere, and put back."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import numpy as np
import pytest

from ampscope.capture.script.numpy_half import NAMES, float16_looked_up
from ampscope.runner.controls import applied

HALF = np.dtype("e").type
TEXT = """
import numpy as np
from numpy import half
kept = (np.arange(4000.0) / 4000).astype(np.float16)
stamps = np.arange(4000.0).astype(np.float16)
others = np.zeros(3, half)
"""


def ran(tmp_path: Path, control: str) -> dict[str, np.dtype]:
    path = tmp_path / "prepare.py"
    path.write_text(TEXT)
    found: dict[str, object] = {}
    with applied(control, str(tmp_path)):
        exec(compile(TEXT, str(path), "exec"), found)
    return {name: found[name].dtype for name in ("kept", "stamps", "others")}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("control", "lifted"),
    [
        ("as_is", set()),
        ("bf16", set()),  # NumPy has none
        ("fp32", {"kept", "stamps", "others"}),
        ("fp32_lines:prepare.py:5", {"stamps"}),
        ("fp32_lines:prepare.py:3,prepare.py:5", {"stamps", "others"}),
    ],
)
def test_casts_in_numpy_are_lifted(tmp_path: Path, control: str, lifted: set[str]) -> None:
    made = ran(tmp_path, control)
    assert {name for name, dtype in made.items() if dtype == np.float32} == lifted
    assert all(dtype == HALF for name, dtype in made.items() if name not in lifted)


def test_numpy_is_as_it_was(tmp_path: Path) -> None:
    before = dict(vars(np))
    asked: list[str] = []
    with float16_looked_up(lambda half, frame: half), applied("fp32", str(tmp_path)):
        with float16_looked_up(lambda half, frame: asked.append(frame.f_code.co_name) or half):
            assert np.float32(1) == 1
            assert asked == []
            assert pickle.loads(pickle.dumps(np.zeros(2, "e"))).dtype == HALF
            assert getattr(np, NAMES[0]) is np.float32  # this file is a user's
        assert asked == [sys._getframe().f_code.co_name]
        with pytest.raises(AttributeError):
            np.no_such_name  # noqa: B018
    assert vars(np) == before
    assert np.float16 is np.half is HALF
