"""The page Source: what stands beside the lines, and what a hostile line can do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ampscope.observations import LineUse, SourceText
from ampscope.records import ModuleRecord
from ampscope.store.writer import RunWriter
from app.runs import diagnoses
from tests.helpers import script_stores, stores
from tests.helpers.classes import Class
from tests.helpers.pages import links, texts

Open = Callable[..., Any]
HOSTILE = "x = '<script>window.hacked = 1</script><img src=x onerror=alert(1)>'"
LINES = ["import torch", *(f"y{n} = {n}" for n in range(200)), HOSTILE, "h = self.wo(x)"]
LAST = len(LINES)


@pytest.fixture(autouse=True)
def _settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnoses, "BETWEEN_RUNS_S", -1.0)


def diagnosed(store: Path, *lines: str) -> str:
    bad = replace(script_stores.bad_op(line=f"train.py:{LAST}"), kind="nonfinite")
    takes = LineUse(f"train.py:{LAST}", "_to_copy", ("fp32",), "fp16", calls=3, cast=200, lost=50)
    mm = LineUse(f"train.py:{LAST}", "mm", ("fp16",), "fp16", calls=3)
    steps = [script_stores.broken(n) for n in range(script_stores.STEPS)]
    seen = script_stores.seen(steps, bad, takes, mm, SourceText("train.py", lines))
    return script_stores.run(store, "as_is", seen)


def source(app: Any) -> str:
    return "\n".join(str(block.value) for block in app.code)


def test_dtypes_casts_and_the_first_bad_op_stand_beside_the_line(
    store_path: Path, open_page: Open
) -> None:
    run = diagnosed(store_path, *LINES)
    app = open_page("source", run=run, line=f"train.py:{LAST}")
    assert not app.exception
    words = texts(app)
    assert "train.py: 1 line of 1 that computed did so in half precision" in words
    assert f"most is lost by the casts of line {LAST}: 25.0 % of their elements" in words
    assert f"Line {LAST}." in words
    rows = source(app).splitlines()
    row = next(n for n, line in enumerate(rows) if line.startswith(">"))
    for cell in (str(LAST), "fp16", "h = self.wo(x)"):
        assert cell in rows[row]
    assert rows[row].index("h = self.wo(x)") == rows[0].index("source")
    assert rows[row + 1].endswith("^ casts fp32 → fp16 × 3; 25.0 % of the elements lost")
    assert "the first bad op" in rows[row + 2]


def test_of_a_control_it_is_said_whose_lines_these_are(store_path: Path, open_page: Open) -> None:
    run = diagnosed(store_path, *LINES)
    steps = [script_stores.broken(n) for n in range(script_stores.STEPS)]
    control = script_stores.run(store_path, "fp32", script_stores.seen(steps))
    said = {r: "the unchanged run" in texts(open_page("source", run=r)) for r in (run, control)}
    assert said == {run: False, control: True}


def test_of_a_long_file_only_what_is_told_of_is_shown(store_path: Path, open_page: Open) -> None:
    app = open_page("source", run=diagnosed(store_path, *LINES))
    assert "200 lines of which nothing is told" not in source(app)
    assert "lines of which nothing is told" in source(app)
    assert "y3 = 3" not in source(app)
    app.toggle(key="source-whole").set_value(True).run()
    assert "y3 = 3" in source(app)


def test_a_line_of_the_script_is_shown_as_it_is(store_path: Path, open_page: Open) -> None:
    assert HOSTILE in source(open_page("source", run=diagnosed(store_path, *LINES)))


def test_a_run_without_its_source_says_so(store_path: Path, open_page: Open) -> None:
    assert "This run holds no source." in texts(open_page("source", run=diagnosed(store_path)))
    probe = stores.finished(store_path)
    assert "This run holds no source." in texts(open_page("source", run=probe))


def test_a_student_sees_no_source(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ampscope.store import sharing

    run = diagnosed(store_path, *LINES)
    sharing.share(store_path, [run], wanted=True)
    app = Class(monkeypatch).student().page("source", run=run)
    assert not app.exception
    assert "not shown to the class" in texts(app)
    assert "self.wo" not in source(app)


def test_lines_of_a_fused_kernel_are_marked(store_path: Path, open_page: Open) -> None:
    app = open_page("source", run=script_stores.compiled_fault(store_path)["as_is"])
    assert not app.exception
    rows = source(app).splitlines()
    column = rows[0].index("krn")
    assert [row[column : column + 3].strip() for row in rows[1:3]] == ["", "2"]
    assert rows[3].endswith("^ not rounded in kernel 2: aten.mul to bf16")
    assert rows[4][column : column + 3].strip() == "2"
    assert "by their number on the page Layers" in texts(app)


def test_layers_leads_to_a_module_s_lines(store_path: Path, open_page: Open) -> None:
    text = ("class Net(Module):", "    def forward(self, x):", "        return self.head(x)")
    steps = [script_stores.one_step(n, 1.0 / (n + 1)) for n in range(script_stores.STEPS)]
    seen = script_stores.seen(steps, SourceText("train.py", text))
    run = script_stores.run(store_path, "as_is", seen)
    modules = [ModuleRecord(0, "", "Net", is_leaf=False), ModuleRecord(1, "head", "Linear")]
    writer = RunWriter(store_path, run)
    writer.add_modules(modules)
    writer.close()
    opened = {
        name: [one for one in links(open_page("layers", run=run, module=name)) if "line=" in one[1]]
        for name in ("head", "(model)")
    }
    assert opened["head"] == [
        ("Source: train.py:3, in the forward of Net", f"run={run}&line=train.py%3A3")
    ]
    assert opened["(model)"][0][0] == "Source: train.py:2, forward of Net"
    app = open_page("source", run=run, line="train.py:3")
    assert any(line.startswith(">") for line in source(app).splitlines())
