"""The Frameworks page and the what-if of op lists, on runs written by hand."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest

from ampscope.ext.frameworks.differences import differences, layers
from ampscope.numerics.histogram import EXPONENTS, POS_INF, POS_ZERO, RAW_LEN, Raw
from ampscope.records import Frame, Machine, ModuleRecord, Role, RunSpec, State, StepRecord
from ampscope.store.writer import RunWriter
from tests.helpers import stores

Open = Callable[..., AppTest]
PATHS = ("fc1", "ln", "head")
GROUP = "abcd1234"


def row(**counts: int) -> Raw:
    """Elements by power of two: row(e3=5, zero=2, inf=1)."""
    out = np.zeros(RAW_LEN, np.int64)
    special = {"zero": POS_ZERO, "inf": POS_INF}
    for name, count in counts.items():
        exponent = name.removeprefix("e").replace("_", "-")
        at = special[name] if name in special else list(EXPONENTS).index(int(exponent))
        out[at] = count
    return out


SAME = {path: row(e0=60, e1=40) for path in PATHS}


def written(
    store: Path, framework: str, rows: dict[str, Raw], dtypes: dict[str, str], scale: float = 1.0,
    ended: tuple[State, str] = (State.FINISHED, ""),
) -> str:  # fmt: skip
    spec = RunSpec("shared-mlp", framework=framework, group=GROUP, steps=2, label=framework)
    writer = RunWriter.create(store, spec)
    version = {"torch": "", "keras": "3.15.1 on TensorFlow 2.21.0", "paddle": "3.3.1"}[framework]
    machine = Machine(
        "cpu", "Test CPU", "native", torch="2.13.0", framework=framework,
        framework_version=version, arithmetic="emulated" if framework == "paddle" else "real",
        scaler="forced" if framework == "paddle" else "",
    )  # fmt: skip
    writer.start(machine)
    writer.add_modules(ModuleRecord(i, path, "Dense", "fp32") for i, path in enumerate(PATHS))
    for step in range(2):
        writer.add_step(StepRecord(step, loss=2.0 - step, scale=scale, skipped=False))
        for role in (Role.ACTIVATION, Role.GRAD_OUTPUT):
            kept = tuple(dtypes.get(path, "fp16") for path in PATHS)
            stacked = np.stack([rows[path] for path in PATHS])
            writer.add_frame(
                Frame(step, role, (0, 1, 2), kept, stacked, scale if role.is_gradient else 1.0)
            )
    writer.finish(*ended)
    writer.close()
    return writer.run_id


def plain(text: str) -> str:
    return text.replace("\\", "").replace("\u2060", "")


def test_empty_says_what_to_do(open_page: Open) -> None:
    app = open_page("frameworks")
    assert not app.exception
    assert "No network has been trained" in app.info[0].value
    assert app.button[0].label.startswith("Train in")


def test_the_form_leaves_out_what_is_missing(open_page: Open, monkeypatch, tmp_path: Path) -> None:
    from app.runs import actions

    started: list[RunSpec] = []
    monkeypatch.setattr(actions, "launch", lambda spec, path: started.append(spec))
    monkeypatch.setenv("AMPSCOPE_KERAS_PYTHON", str(tmp_path / "nowhere"))
    monkeypatch.setenv("AMPSCOPE_PADDLE_PYTHON", sys.executable)
    app = open_page("frameworks")
    assert any("AMPSCOPE_KERAS_PYTHON names" in plain(c.value) for c in app.caption)
    app.button(key="fw-start").click().run()
    assert not app.error
    assert [spec.framework for spec in started] == ["torch", "paddle"]


def test_the_answer_names_where_frameworks_part(open_page: Open, store_path: Path) -> None:
    written(store_path, "torch", SAME, {"ln": "fp32"})
    written(store_path, "keras", {**SAME, "head": row(e0=10, e1=90)}, {})
    written(store_path, "paddle", SAME, {"ln": "fp32"})
    app = open_page("frameworks")
    assert not app.exception
    assert plain(app.subheader[0].value) == (
        "Keras differs from PyTorch in 2 of 3 layers, most in head (the same dtype (fp16): other "
        "sums or other roundings before it); Paddle is the same in all of 3 layers."
    )
    facts = app.dataframe[0].value
    assert facts.loc["half precision", "Paddle"].startswith("emulated")
    assert facts.loc["loss scaler", "Paddle"] == "forced"
    assert "Keras 3.15.1 on TensorFlow 2.21.0" in facts.loc["software", "Keras"]
    table = app.dataframe[1].value.set_index(["framework", "layer"])
    assert table.loc[("Keras", "head"), "in another power of two"] == "50.00 %"
    assert "fp32 in PyTorch, fp16 in Keras" in table.loc[("Keras", "ln"), "why"]


def test_loss_scales_are_no_difference(open_page: Open, store_path: Path) -> None:
    written(store_path, "torch", {p: row(e16=60, e17=40) for p in PATHS}, {}, 2.0**16)
    written(store_path, "keras", {p: row(e15=60, e16=40) for p in PATHS}, {}, 2.0**15)
    app = open_page("frameworks", role="grad_output")
    assert not app.exception
    assert plain(app.subheader[0].value) == "Keras is the same in all of 3 layers."


def test_one_framework_that_failed_leaves_the_others_on_the_page(
    open_page: Open, store_path: Path
) -> None:
    written(store_path, "torch", SAME, {})
    spec = RunSpec("shared-mlp", framework="keras", group=GROUP, steps=2)
    writer = RunWriter.create(store_path, spec)
    writer.finish(State.FAILED, "The run's process crashed in native code (SIGSEGV).")
    writer.close()
    app = open_page("frameworks")
    assert not app.exception
    texts = " ".join(plain(m.value) for m in (*app.info, *app.error, *app.warning))
    assert "Fewer than two frameworks" in texts
    assert "SIGSEGV" in texts


@pytest.mark.parametrize(
    ("steps", "says"),
    [(0, "Keras failed: not compared."), (2, "Keras failed after 2 steps.")],
)
def test_the_answer_says_that_a_framework_failed(
    open_page: Open, store_path: Path, steps: int, says: str
) -> None:
    written(store_path, "torch", SAME, {})
    if steps:
        written(store_path, "keras", SAME, {}, ended=(State.FAILED, "no *kernel* for that"))
    else:
        writer = RunWriter.create(store_path, RunSpec("shared-mlp", framework="keras", group=GROUP))
        writer.finish(State.FAILED, "no *kernel* for that")
        writer.close()
    written(store_path, "paddle", SAME, {})
    app = open_page("frameworks")
    assert not app.exception
    said = plain(app.subheader[0].value)
    assert "Paddle is the same in all of 3 layers; " in said
    assert said.endswith(f"; {says}")
    assert "Keras: no *kernel* for that" in [plain(c.value) for c in app.caption]


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (row(e0=9, zero=1), row(e0=4, zero=6), "more zeros in B"),
        (row(e0=10), row(e0=9, inf=1), "not finite in B"),
        (row(e0=10), row(e0=20), "not the same tensor: 10 and 20"),
        (row(e0=1000), row(e0=999, e1=1), "the same but for rounding"),
    ],
)
def test_why(first: Raw, second: Raw, words: str) -> None:
    def seen(one: Raw) -> dict[str, object]:
        return layers(Frame(0, Role.ACTIVATION, (0,), ("fp16",), one[None, :]), {0: "fc"})

    (found,) = differences(seen(first), seen(second), ("A", "B"))
    assert words in found.why


def test_what_if_compares_both_runs(open_page: Open, store_path: Path) -> None:
    spec = replace(stores.SPEC, group=GROUP)
    stores.finished(store_path, spec)
    stores.finished(store_path, replace(spec, control="op_lists:linear=fp32"))
    app = open_page("op_lists", whatif=GROUP)
    assert not app.exception
    said = " ".join(plain(m.value) for m in app.markdown)
    assert "With linear in fp32, the loss after 12 steps is" in said
    table = app.dataframe[1].value
    assert list(table.columns) == ["unchanged lists", "fp16 linear=fp32"]
    assert table.loc["linear gave", "unchanged lists"].startswith("fp16 × ")
    assert table.loc["skipped steps"].tolist() == ["1 of 12", "1 of 12"]
    lost = table.loc["gradients lost against fp32"].tolist()
    assert all(" %" in text for text in lost)
    assert "\\" not in "".join(lost), "a table shows Markdown as it is"


def test_what_if_starts_both_and_refuses_nonsense(open_page: Open, monkeypatch) -> None:
    from app.runs import actions

    started = []
    monkeypatch.setattr(actions, "launch", lambda spec, path: started.append(spec))
    app = open_page("op_lists")
    app.button(key="wi-start").click().run()
    assert not app.exception
    assert [spec.control for spec in started] == ["", "op_lists:softmax=half"]
    assert len({spec.group for spec in started}) == 1
