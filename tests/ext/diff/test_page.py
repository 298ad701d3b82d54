"""Two runs: what the page says of a pair, of a run alone, and of one that is not there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from streamlit.testing.v1 import AppTest

from ampscope.observations import Digests, DtypeEntry, Surroundings
from ampscope.records import OP_STEP, RunSpec
from tests.helpers import script_stores, stores

Open = Callable[..., AppTest]


def spec(precision: str, **more: object) -> RunSpec:
    return RunSpec(workload="gpt", precision=precision, steps=4, **more)  # type: ignore[arg-type]


def said(app: AppTest) -> str:
    kinds = (app.subheader, app.markdown, app.caption)
    return "\n".join(str(element.value) for kind in kinds for element in kind).translate(
        {ord("\\"): "", 0x2060: ""}
    )


def test_a_pair_is_compared_down_to_one_module(store_path: Path, open_page: Open) -> None:
    first = stores.finished(store_path, spec("fp32"))
    second = stores.finished(store_path, spec("fp16"))
    app = open_page("two_runs", run=first, second=second)
    assert not app.exception
    text = said(app)
    assert "same loss at each of 4 common steps" in text  # the made runs record the same numbers
    assert "gpt tiny fp32 is the solid blue line, gpt tiny fp16 the dashed orange one" in text
    assert "gpt tiny fp32 above, gpt tiny fp16 below" in text
    assert [m.label for m in app.metric] == ["Steps of both", "Skipped steps", "Not finite"]
    assert len(app.get("plotly_chart")) == 2
    (table,) = app.dataframe
    assert list(table.value)[2:5] == ["Lost, difference", "Values in", "Weights in"]
    for what in ("Lost", "Zero"):
        assert set(table.value[f"{what}, difference"]) <= {"0.0 %", "none"}


def test_what_underflowed_in_one_run_alone_comes_first(store_path: Path, open_page: Open) -> None:
    first, second = stores.finished(store_path, spec("fp16")), stores.finished(store_path)
    sql = "UPDATE shadow SET total=100, lost=?, below_range=? WHERE run=? AND role='grad_output'"
    stores.change(store_path, sql, 10, 10, first)
    stores.change(store_path, sql, 10, 10, second)
    stores.change(store_path, f"{sql} AND module=4", 30, 25, second)
    app = open_page("two_runs", run=first, second=second, both_step=0, role="grad_output")
    assert not app.exception
    text = said(app)
    (table,) = app.dataframe
    top = table.value.iloc[0]
    assert [top[f"Lost, {what}"] for what in ("first", "second", "difference")] == [
        "10.0 %", "25.0 %", "+15.0 %",
    ]  # fmt: skip
    assert f"Most apart in underflow: {top['Module']}, where" in text


def test_the_run_of_the_same_group_is_offered_first(store_path: Path, open_page: Open) -> None:
    same = stores.finished(store_path, spec("fp32", group="a1"))
    first = stores.finished(store_path, spec("fp16", group="a1"))
    stores.finished(store_path, spec("bf16"))
    app = open_page("two_runs", run=first)
    assert app.selectbox(key="widget:second").value == same


def test_which_of_the_two_has_no_histograms_is_said(store_path: Path, open_page: Open) -> None:
    first, second = stores.finished(store_path, spec("fp32")), stores.finished(store_path)
    stores.change(store_path, "DELETE FROM frame WHERE run = ?", second)
    text = said(open_page("two_runs", run=first, second=second))
    assert "Modules cannot be compared: only gpt tiny fp32 has histograms, and the weights" in text
    third = stores.finished(store_path)
    stores.change(store_path, "DELETE FROM frame WHERE run = ?", third)
    text = said(open_page("two_runs", run=third, second=second))
    assert "Modules cannot be compared: neither run has histograms" in text


def test_a_run_alone_has_nothing_beside_it(store_path: Path, open_page: Open) -> None:
    run = stores.finished(store_path, spec("fp16"))
    assert "There is no second run" in str(open_page("two_runs", run=run).info[0].value)


def test_a_second_run_that_is_not_there_is_said(store_path: Path, open_page: Open) -> None:
    first = stores.finished(store_path, spec("fp16"))
    stores.finished(store_path, spec("fp32"))
    app = open_page("two_runs", run=first, second="feedbeef0000")
    assert not app.exception
    assert "feedbeef0000" in "\n".join(str(e.value) for e in (*app.error, *app.markdown))


def test_names_alike_are_told_apart(store_path: Path, open_page: Open) -> None:
    first, second = (stores.finished(store_path, spec("fp16")) for _ in range(2))
    text = said(open_page("two_runs", run=first, second=second))
    assert "gpt tiny fp16 (first) is the solid blue line" in text
    assert "gpt tiny fp16 (second) the dashed orange one" in text


def test_runs_of_a_diff_show_where_they_part_and_their_dtypes(
    store_path: Path, open_page: Open
) -> None:
    def made(dtype: str, checksum: str, parent: str = "") -> str:
        digests = Digests(
            step=0, role="activation", scale=1.0, names=("<b>head</b>",), dtypes=(dtype,),
            totals=(1,), checksums=(checksum,), norms=(1.0,), peaks=(1.0,), nonfinite=(0,),
            sketches=("AAAAAAAA8D8=" if checksum == "01" else "AAAAAAAA4D8=",),
        )  # fmt: skip
        entry = DtypeEntry("activation", "head", dtype, "train.py:9", f"autocast ({dtype})")
        around = Surroundings(("optimizer0 eps",), (dtype,))
        asked = replace(script_stores.SPEC, settings=((OP_STEP, "0"),), parent=parent)
        seen = script_stores.seen([script_stores.one_step(0, 1.0)], digests, entry, around)
        return script_stores.run(store_path, "as_is", seen, asked)

    first = made("fp32", "01")
    made("fp32", "01", parent=first)
    app = open_page("two_runs", run=first, second=made("bf16", "02"))
    assert not app.exception
    text = said(app)
    assert "different from step 0 on" in text
    assert "2 runs of A are the same bit for bit" in text
    assert "1 activation fp32 → bf16" in text
    tables = [table.value for table in app.dataframe]
    ledger = next(table for table in tables if "Tensor" in table)
    assert list(ledger["In B"]) == ["bf16: autocast (bf16), train.py:9"]
