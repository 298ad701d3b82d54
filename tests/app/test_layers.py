"""The Layers page in every state, with sentences and tables that follow from the store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ampscope.records import ModuleRecord, OpRecord, RunSpec, State, StepRecord
from ampscope.store.writer import RunWriter
from tests.helpers import script_stores, stores
from tests.helpers.pages import NO_RUN, metrics, texts

Open = Callable[..., Any]


def written(
    store: Path, ops: list[list[OpRecord]], spec: RunSpec = stores.SPEC, modules: bool = True
) -> str:
    """A run whose step i ran ``ops[i]``."""
    writer = RunWriter.create(store, spec)
    writer.start(stores.MACHINE)
    if modules:
        writer.add_modules(
            [
                ModuleRecord(0, "", "Net", is_leaf=False),
                ModuleRecord(1, "fc", "Linear", "fp32", 10),
                ModuleRecord(2, "norm", "LayerNorm", "fp32", 30),
            ]
        )
    for step, found in enumerate(ops):
        writer.add_ops(hash(tuple(found)) % 1000, found)
        writer.add_step(StepRecord(step, loss=1.0, op_set=hash(tuple(found)) % 1000))
    writer.finish(State.FINISHED)
    writer.close()
    return writer.run_id


HALF = OpRecord(1, "forward", "aten.mm", "fp16,fp16", "fp16", 1, flops=3_000_000)
BACK = OpRecord(1, "backward", "aten.mm", "fp16,fp16", "fp16", 2, flops=5_000_000)
WIDE = OpRecord(2, "forward", "aten.native_layer_norm", "fp32", "fp32", 4)
MATMUL32 = OpRecord(0, "forward", "aten.mm", "fp32,fp32", "fp32", 1, flops=2_000_000)
CAST = OpRecord(1, "forward", "aten._to_copy", "fp32", "fp16", 6, is_cast=True)
CAST_BACK = OpRecord(1, "backward", "aten._to_copy", "fp16", "fp32", 1, is_cast=True)
ALL = [HALF, BACK, WIDE, MATMUL32, CAST, CAST_BACK]


def test_sentence_and_figures_are_those_of_the_run(store_path: Path, open_page: Open) -> None:
    app = open_page("layers", run=written(store_path, [ALL]))
    assert not app.exception
    words = texts(app)
    assert "80.0 % of the FLOPs ran in fp16; 2 of 3 computing modules stayed in fp32" in words
    assert "7 casts per step." in words
    assert metrics(app) == {
        "FLOPs in half": "80.0 %",
        "Casts per step": "7",
        "Modules in fp32": "2 of 3",
        "Parameters": "fp32",
    }
    assert "fc does most: 80.0 % of 10.0 million operations." in words
    assert "Not in half: 20.0 %, most of it in (model)." in words
    assert "7 casts per step: 6 from fp32 to fp16, 1 from fp16 to fp32." in words
    assert "Most in one place: 6 in fc (forward)." in words
    assert "5 forward calls in fp32: 4 of 5, 80.0 %, because an autocast list asks for it." in words
    assert "1 call would have run in half had autocast been on there." in words


def test_the_phase_filters_ops_casts_and_flops(store_path: Path, open_page: Open) -> None:
    app = open_page("layers", run=written(store_path, [ALL]), phase="backward")
    assert metrics(app)["FLOPs in half"] == "100.0 %"
    assert metrics(app)["Casts per step"] == "1"
    tree = app.dataframe[0].value.set_index("Path")
    assert tree.loc["fc", "MFLOP"] == 5.0
    assert tree.loc["fc", "Ops"] == 2
    assert tree.loc["norm", "Ops"] == 0


def test_the_table_of_modules_has_chips_for_each_dtype(store_path: Path, open_page: Open) -> None:
    app = open_page("layers", run=stores.finished(store_path))
    tree = app.dataframe[0].value.set_index("Path")
    row = tree.loc["h.0.mlp.up"]
    assert list(row["Weights"]) == ["fp32"]
    assert list(row["Activation"]) == ["fp16"]
    assert list(row["Output gradient"]) == ["fp16"]
    assert list(row["Weight gradient"]) == ["fp32"]
    assert list(row["Computed in"]) == ["fp16"]
    assert list(tree.loc["h.0.ln", "Computed in"]) == ["fp32"]
    assert list(tree.loc["h.0", "Weights"]) == []


def test_a_deep_link_opens_its_module(store_path: Path, open_page: Open) -> None:
    app = open_page("layers", run=stores.finished(store_path), module="h.1.ln")
    assert app.selectbox(key="widget:module").value == "h.1.ln"
    ops = app.dataframe[1].value
    assert "aten.native_layer_norm" in set(ops["Op"])
    norm = ops[ops["Op"] == "aten.native_layer_norm"].iloc[0]
    assert (norm["Autocast list"], norm["Calls"]) == ("fp32", 1)


def test_search_and_fold(store_path: Path, open_page: Open) -> None:
    run = stores.finished(store_path)
    app = open_page("layers", run=run, depth=1)
    tree = app.dataframe[0].value
    assert list(tree["Path"]) == ["(model)", "wte", "h", "head"] or "h.0" not in set(tree["Path"])
    app = open_page("layers", run=run, find="QKV")
    assert set(app.dataframe[0].value["Path"]) == {"h.0.attn.qkv", "h.1.attn.qkv"}
    assert "2 of 15 modules hold “QKV”" in texts(app)
    app.text_input[0].set_value("no such module").run()
    assert not app.exception
    assert "0 of 15 modules hold" in texts(app)


def test_steps_with_other_ops_can_be_chosen(store_path: Path, open_page: Open) -> None:
    run = written(store_path, [ALL, ALL, [HALF], ALL])
    app = open_page("layers", run=run)
    picker = app.selectbox(key="widget:ops")
    assert picker.options == ["steps 0 to 1, 3", "step 2"]
    picker.select("step 2").run()
    assert metrics(app)["Casts per step"] == "0"
    assert "No cast" in texts(app)


def test_a_run_in_fp32_says_so(store_path: Path, open_page: Open) -> None:
    spec = replace(stores.SPEC, precision="fp32")
    app = open_page("layers", run=written(store_path, [[MATMUL32, WIDE]], spec))
    words = texts(app)
    assert "Everything ran in fp32, as asked: 0 casts per step." in words
    assert metrics(app)["FLOPs in half"] == "0.0 %"
    assert "in a run without autocast; with it 1 of 5, 20.0 % of them would run in half." in words


def test_without_a_trace_stored_dtypes_remain(store_path: Path, open_page: Open) -> None:
    app = open_page("layers", run=written(store_path, [[]]))
    assert not app.exception
    words = texts(app)
    assert "The ops of this run were not traced." in words
    assert "--trace-every 1" in words
    assert metrics(app)["FLOPs in half"] == "none"
    assert "nan" not in words.lower()
    assert list(app.dataframe[0].value.set_index("Path").loc["fc", "Weights"]) == ["fp32"]


def test_a_run_without_modules(store_path: Path, open_page: Open) -> None:
    app = open_page("layers", run=written(store_path, [ALL], modules=False))
    assert not app.exception
    assert "This run holds no module." in texts(app)


@pytest.mark.parametrize("state", ["running", "failed", "cancelled", "lost", "finished"])
def test_every_state_shows_what_there_is(store_path: Path, open_page: Open, state: str) -> None:
    app = open_page("layers", run=getattr(stores, state)(store_path))
    assert not app.exception
    assert "of the FLOPs ran in fp16" in texts(app)


@pytest.mark.parametrize("state", ["queued", "failed"])
def test_no_step_yet(store_path: Path, open_page: Open, state: str) -> None:
    made = stores.queued(store_path) if state == "queued" else stores.failed(store_path, steps=0)
    app = open_page("layers", run=made)
    assert not app.exception
    assert not app.metric


def test_an_empty_store(open_page: Open) -> None:
    app = open_page("layers")
    assert not app.exception
    assert NO_RUN in texts(app)


def test_names_are_text(store_path: Path, open_page: Open) -> None:
    app = open_page("layers", run=stores.hostile(store_path))
    assert not app.exception
    raw = " ".join(e.value for kind in ("markdown", "subheader", "caption") for e in app.get(kind))
    assert "<script>" not in raw
    assert "<img" not in raw
    assert stores.HOSTILE[0] in set(app.dataframe[0].value["Path"])


def test_a_thousand_modules_start_folded(store_path: Path, open_page: Open) -> None:
    paths = ("", *(f"b.{i // 10}.{i % 10}" for i in range(999)))
    app = open_page("layers", run=stores.finished(store_path, paths=paths))
    assert not app.exception
    assert len(app.dataframe[0].value) <= 200
    app = open_page("layers", run=stores.many_modules(store_path), find="l.77")
    assert len(app.dataframe[0].value) == 11


def test_kernels_of_compiled_code_say_ops_dtype_and_what_they_do_not_round(
    store_path: Path, open_page: Open
) -> None:
    runs = script_stores.compiled_fault(store_path)
    app = open_page("layers", run=runs["compiled"])
    assert not app.exception
    words = texts(app)
    assert "kernels hand on in fp32: 1, in 1 kernel." in words
    rows = app.dataframe[0].value
    assert list(rows["Kernel"]) == [2]
    assert list(rows["Ops"]) == ["aten.mul × 2, aten.tanh"]
    assert list(rows["Not rounded"]) == ["aten.mul to bf16, train.py:2"]
    app.toggle(key="layers-fused").set_value(False).run()
    assert list(app.dataframe[0].value["Kernel"]) == [1, 2]
    # The eager run has no kernels of its own: those of its compiled run are shown.
    assert list(open_page("layers", run=runs["as_is"]).dataframe[0].value["Kernel"]) == [2]


def test_a_compiled_run_out_of_the_cache_says_how_to_see_kernels(
    store_path: Path, open_page: Open
) -> None:
    spec = replace(script_stores.SPEC, parent="one")
    app = open_page("layers", run=script_stores.healthy_run(store_path, "compiled", spec))
    assert not app.exception
    assert "its code came out of inductor's cache" in texts(app)
