"""The Tensor Cores page in its states, on a real store with numbers that are known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import plotly.graph_objects as go
import pytest
from streamlit.testing.v1 import AppTest

from ampscope.records import Matmul, Padded, Place, RunSpec, State
from app import tensor_cores
from app.figures.hardware import Dot, RooflineCeiling, roofline
from app.runs import measurements
from tests.helpers.core_results import CPU, linear, stored, timing
from tests.helpers.stores import HOSTILE

Open = Callable[..., AppTest]
PADDED = Padded(((50257, 50304),), 2 * 1024 * 50304 * 768, timing(1e-3))
HEAD = linear(1024, 50257, 768, 1.8e-3, 8e-3, module="lm_head", padded=(PADDED,))
BLOCKS = linear(
    1024, 768, 768, 5e-6, 40e-6, places=tuple(Place(f"h.{i}.mlp", "forward", 1) for i in range(12))
)
LOSS = linear(512, 512, 512, 1e-5, None, module="loss", dtype="fp32", kernels=())
UNTOLD = linear(64, 64, 64, 5e-6, 5e-6, module="h.0.gate", kernels=("kernel_of_next_year",))


def plain(text: str) -> str:
    return text.replace("\\", "").replace("\u2060", "")


def said(app: AppTest) -> str:
    return plain("\n".join(str(x.value) for x in (*app.subheader, *app.markdown, *app.caption)))


def test_none_yet(open_page: Open) -> None:
    app = open_page("tensor_cores")
    assert not app.exception
    assert "No training step has been measured yet" in plain(app.info[0].value)
    assert [b.label for b in app.button] == ["Measure its matmuls"]


def test_finished_says_what_is_used_and_what_padding_gains(
    open_page: Open, store_path: Path
) -> None:
    stored(store_path, [HEAD, BLOCKS, LOSS, UNTOLD])
    app = open_page("tensor_cores")
    assert not app.exception
    answer = plain(app.subheader[0].value)
    assert answer.startswith("13 of 15 matmuls and convolutions, ")
    assert "run on Tensor Cores; of 1 it is unknown" in answer
    assert answer.endswith(
        "lm_head misses by one dimension: padding 50257 to 50304 gains 1.8×, measured."
    )
    figures = {metric.label: metric.value for metric in app.metric}
    assert figures["Matmuls that use them"] == "13 of 15"
    assert figures["Unknown"] == "1"
    # 8 ms, 12 x 40 us and 5 us of controls over 1.8 ms, 12 x 5 us and 5 us
    assert figures["Against fp32"] == f"{(8e-3 + 12 * 40e-6 + 5e-6) / (1.8e-3 + 65e-6):.2f}×"
    assert "NVIDIA H100" in said(app)


def test_the_table_has_a_line_for_each_layer(open_page: Open, store_path: Path) -> None:
    stored(store_path, [HEAD, BLOCKS, LOSS, UNTOLD])
    table = open_page("tensor_cores").dataframe[1].value
    assert len(table) == 15
    used = dict(zip(table["Layer"], table["Used"], strict=True))
    assert used["lm_head"] == used["h.3.mlp"] == "used"
    assert used["loss"] == "not used"
    assert used["h.0.gate"] == "unknown"
    fits = dict(zip(table["Layer"], table["Fits"], strict=True))
    assert fits["lm_head"] == "eligible, at reduced efficiency"
    assert fits["loss"] == "not eligible"


def test_the_search_is_in_the_address(open_page: Open, store_path: Path) -> None:
    stored(store_path, [HEAD, BLOCKS, LOSS, UNTOLD])
    app = open_page("tensor_cores", matmul="unknown")
    assert "1 of 15, 6.7 % lines hold “unknown”." in said(app)
    assert list(app.dataframe[1].value["Layer"]) == ["h.0.gate"]


def test_running_shows_what_has_come(open_page: Open, store_path: Path) -> None:
    stored(store_path, [HEAD], state=State.RUNNING)
    app = open_page("tensor_cores")
    assert not app.exception
    assert "3 are not measured yet" in plain(app.subheader[0].value)
    assert any("Measuring" in info.value for info in app.info)


def test_failed_says_why_and_offers_another(open_page: Open, store_path: Path) -> None:
    stored(store_path, [], state=State.FAILED, message="Out of memory. Use a smaller size.")
    app = open_page("tensor_cores")
    assert not app.exception
    assert "Out of memory. Use a smaller size." in plain(app.error[0].value)
    assert [b.label for b in app.button] == ["Measure its matmuls"]


def test_a_cpu_is_not_called_tensor_cores(open_page: Open, store_path: Path) -> None:
    kernels = ("matmul brg_matmul:avx512_core_bf16",)
    stored(store_path, [linear(1024, 256, 256, 1e-3, 2e-3, kernels=kernels)], CPU)
    app = open_page("tensor_cores")
    assert "half-precision instructions (AVX512-BF16)" in plain(app.subheader[0].value)
    assert "A CPU has no Tensor Cores." in said(app)


def test_names_from_a_model_are_nothing_but_text(open_page: Open, store_path: Path) -> None:
    hostile = [
        linear(1024, 50257, 768, 1.8e-3, 8e-3, module=name, padded=(PADDED,)) for name in HOSTILE
    ]
    stored(store_path, hostile)
    app = open_page("tensor_cores")
    assert not app.exception
    shown = "".join(str(x.value) for x in (*app.subheader, *app.markdown, *app.caption))
    assert not any(name in shown for name in HOSTILE)


def test_a_thousand_layers(open_page: Open, store_path: Path) -> None:
    places = tuple(Place(f"h.{i}", "forward", 1) for i in range(1000))
    stored(store_path, [linear(1024, 768, 768, 5e-6, 40e-6, places=places)])
    app = open_page("tensor_cores")
    assert not app.exception
    assert "1,000 of 1,000 matmuls" in plain(app.subheader[0].value)
    assert len(app.dataframe[0].value) == 1000


def test_the_form_starts_what_was_chosen(open_page: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[RunSpec] = []
    monkeypatch.setattr(measurements, "start", asked.append)
    app = open_page("tensor_cores")
    app.selectbox(key="cores-precision").set_value("fp32")
    app.selectbox(key="np-workload").set_value("resnet")
    app.button(key="cores-start").click().run()
    (spec,) = asked
    assert (spec.kind, spec.workload, spec.precision) == ("cores", "resnet", "fp32")
    assert spec.policy == "native"


def dot(dtype: str, verdict: str, name: str = "layer") -> Dot:
    return Dot(100.0, 5e13, 4.5e13, 5.5e13, dtype, verdict, (name, "second"))


def test_the_rooflines_dots_bars_and_ceilings() -> None:
    dots = [dot("bf16", "used"), dot("bf16", "unknown"), dot("fp32", "not used")]
    figure = roofline(dots, [RooflineCeiling("bf16", 7e14), RooflineCeiling("fp32", 5e13)], 2.5e12)
    named = {t.name: t for t in figure.data if t.name}
    assert set(named) >= {"bf16, used", "bf16, unknown", "fp32, not used"}
    assert len({named[n].marker.symbol for n in named if ", " in n and "copy" not in n}) == 3
    used: go.Scatter = named["bf16, used"]
    assert list(used.y) == [50.0]  # TFLOP/s
    assert list(used.error_y.array) == [5.0]
    assert list(used.error_y.arrayminus) == [5.0]
    flat = [t for t in figure.data if t.mode == "lines" and t.y[0] == t.y[1]]
    assert [t.y[0] for t in flat] == [700.0, 50.0]
    assert [t.x[0] for t in flat] == [280.0, 20.0]  # from 7e14 / 2.5e12 FLOP per byte on
    # At the right end of the plot; one on the axis may be rounded to beyond it, and is not drawn.
    labels = [(a.text.partition(",")[0], a.xref, a.x) for a in figure.layout.annotations]
    assert labels == [("bf16", "x domain", 1), ("fp32", "x domain", 1)]


def test_hover_shows_the_whole_name_as_text() -> None:
    name = "encoder." * 20 + "<b>x</b>"
    (text,) = roofline([dot("fp16", "used", name)], [], None).data[0].hovertext
    assert text.startswith("<b>" + "encoder." * 20 + "&lt;b&gt;x&lt;/b&gt;</b>")


def test_a_matmul_without_a_time_has_a_line_and_no_rate() -> None:
    matmul: Matmul = linear(8, 8, 8, 1e-6, None)
    untimed = Matmul(
        **{f: getattr(matmul, f) for f in Matmul.__slots__}
        | {"timing": None, "note": "It could not be run alone."}
    )
    from tests.helpers.core_results import used

    (row,) = tensor_cores.product_table(used(untimed).layers()).to_dict("records")
    assert row["GFLOP/s"] is None
    assert row["Signs"] == "It could not be run alone."
