"""Server time of the run pages over a run of 500 modules x 1,000 steps, and what its store weighs.

    python benchmarks/page_time.py            # results/page_time.json

The run is synthetic and hard to compress: every histogram bin is a Poisson draw, modules differ and
drift. Each page is drawn by Streamlit's own test runner through app/main.py, which is the script's
time plus the building of messages, without the network and the browser. `first` is a new session on
empty caches, `again` the same session once more, and `slider` a move of the loss-scale slider. Each is
[wall, CPU] seconds: on a machine that does something else too, the second is what the page takes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from contest import setting

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the pages are no installed package

from ampscope.exponents import POS_ZERO, RAW_LEN  # noqa: E402
from ampscope.records import (  # noqa: E402
    Frame,
    Machine,
    ModuleRecord,
    NonFiniteRecord,
    OpRecord,
    Role,
    RunSpec,
    ShadowRecord,
    State,
    StepRecord,
)
from ampscope.store.writer import RunWriter  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "page_time.json"
GOAL_S, GOAL_MIB = 0.5, 300.0
PAGES = ("layers", "gradients", "loss_scale")
ELEMENTS = 65_536  # of one module's tensor
SHADOW_EVERY, SKIP_EVERY = 10, 100
SPREAD = 3.0  # of a tensor's exponents, in powers of two; recorded GPT gradients have 2 to 4
ZERO_BIN = 1 + 149  # column of the exponent 0


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--modules", type=int, default=500)
    arguments.add_argument("--steps", type=int, default=1000)
    arguments.add_argument("--rounds", type=int, default=7)
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "runs.db"
        run = write_run(store, given.modules, given.steps)
        result = {
            "run": {"modules": given.modules, "steps": given.steps, "roles": len(Role)},
            "store_mib": round(size_mib(store), 1),
            "goal": {"page_s": GOAL_S, "store_mib": GOAL_MIB},
            "pages_s": {page: measure(store, run, page, given.rounds) for page in PAGES},
            "setting": setting(),
        }
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def measure(store: Path, run: str, page: str, rounds: int) -> dict[str, list[float]]:
    """Medians of [wall, CPU] in seconds. The first session is left out: it imports the page."""
    os.environ["AMPSCOPE_STORE"] = str(store)
    times: dict[str, list[tuple[float, float]]] = {}
    for turn in range(rounds + 1):
        app = session(page, run)
        found = {"first": seconds(app.run), "again": seconds(app.run), **interactions(app, page)}
        if turn:
            for name, value in found.items():
                times.setdefault(name, []).append(value)
    return {name: np.median(values, axis=0).round(3).tolist() for name, values in times.items()}


def interactions(app: Any, page: str) -> dict[str, tuple[float, float]]:
    """What people do most on the Gradients page."""
    if page != "gradients":
        return {}
    app.slider(key="gradients:scale").set_value(7)
    slider = seconds(app.run)
    app.select_slider(key="widget:step").set_value(500)
    step = seconds(app.run)
    app.toggle(key="gradients:history").set_value(True)
    return {"slider": slider, "step": step, "history_of_one_module": seconds(app.run)}


def session(page: str, run: str) -> Any:
    """A new session on empty caches."""
    import streamlit as st
    from streamlit.testing.v1 import AppTest

    st.cache_data.clear()
    app = AppTest.from_file(str(ROOT / "app" / "main.py"), default_timeout=120)
    app.switch_page(str(ROOT / "pages" / f"{page}.py"))
    app.query_params["run"] = run
    return app


def seconds(function: Any) -> tuple[float, float]:
    """(wall, CPU) of one run of a page, all threads of this process."""
    wall, cpu = time.perf_counter(), time.process_time()
    app = function()
    elapsed = time.perf_counter() - wall, time.process_time() - cpu
    if app.exception or not app.metric:
        raise RuntimeError(f"the page failed: {[e.message for e in app.exception]}")
    return elapsed


def size_mib(store: Path) -> float:
    """The store with its write-ahead log."""
    return sum(f.stat().st_size for f in store.parent.glob(f"{store.name}*")) / 2**20


def write_run(store: Path, modules: int, steps: int) -> str:
    """The synthetic run; about a minute for 500 x 1,000."""
    rng = np.random.default_rng(0)
    writer = RunWriter.create(store, RunSpec("gpt", size="large", steps=steps))
    writer.start(Machine("cpu", "benchmark", "rehearsal"))
    writer.add_modules(module_records(modules))
    writer.add_ops(0, [op for index in range(1, modules + 1) for op in op_records(index)])
    centres = rng.normal(-14, 4, (len(Role), modules))
    for step in range(steps):
        skipped = step % SKIP_EVERY == 0
        writer.add_step(
            StepRecord(
                step,
                loss=3.0 / (1 + step / 50),
                scale=2.0**16,
                growth_counter=step % SKIP_EVERY,
                skipped=skipped,
                grad_norm=float("inf") if skipped else 1.0,
                lr=1e-3,
                step_time_s=0.2,
                op_set=0,
            )
        )
        centres += rng.normal(0, 0.05, centres.shape)
        for place, role in enumerate(Role):
            writer.add_frame(frame_of(rng, role, step, centres[place]))
        if step % SHADOW_EVERY == 0:
            writer.add_shadow(shadow_records(rng, step, modules))
        if skipped:
            bad = range(modules, 0, -1)
            writer.add_nonfinite(
                NonFiniteRecord(step, f"h.{i}.weight", order, ELEMENTS, 1, 2, 3)
                for order, i in enumerate(bad)
            )
        if step % 20 == 19:
            writer.flush()
    writer.finish(State.FINISHED)
    writer.close()
    return writer.run_id


def module_records(modules: int) -> list[ModuleRecord]:
    names = ("norm", "attn.qkv", "attn.proj", "mlp.up", "mlp.down")
    leaves = [
        ModuleRecord(i + 1, f"h.{i // 5}.{names[i % 5]}", "Linear", "fp32", 10_000)
        for i in range(modules)
    ]
    return [ModuleRecord(0, "", "GPT", is_leaf=False), *leaves]


def op_records(index: int) -> list[OpRecord]:
    """Ten lines of a trace, as a recorded Linear has them."""
    views = [
        OpRecord(index, phase, f"aten.{op}", "fp16", "fp16", 2)
        for phase in ("forward", "backward")
        for op in ("t", "view", "detach")
    ]
    return [
        OpRecord(index, "forward", "aten._to_copy", "fp32", "fp16", 3, is_cast=True),
        OpRecord(index, "forward", "aten.addmm", "fp16,fp16,fp16", "fp16", 1, flops=10**9),
        OpRecord(index, "backward", "aten.mm", "fp16,fp16", "fp16", 2, flops=2 * 10**9),
        OpRecord(index, "backward", "aten._to_copy", "fp16", "fp32", 2, is_cast=True),
        *views,
    ]


def frame_of(rng: np.random.Generator, role: Role, step: int, centres: np.ndarray) -> Frame:
    """Bell curves round ``centres``; fp16 holds nothing below 2^-24."""
    exponents = np.arange(-40, 16)
    bells = np.exp(-0.5 * ((exponents - centres[:, None]) / SPREAD) ** 2)
    counts = rng.poisson(ELEMENTS * bells / bells.sum(axis=1, keepdims=True))
    rows = np.zeros((len(centres), RAW_LEN), np.int64)
    rows[:, ZERO_BIN - 40 : ZERO_BIN + 16] = counts
    rows[:, POS_ZERO] = rows[:, : ZERO_BIN - 24].sum(axis=1)
    rows[:, : ZERO_BIN - 24] = 0
    modules = tuple(range(1, len(centres) + 1))
    scale = 2.0**16 if role.is_gradient else 1.0
    return Frame(step, role, modules, ("fp16",) * len(modules), rows, scale)


def shadow_records(rng: np.random.Generator, step: int, modules: int) -> list[ShadowRecord]:
    roles = (Role.ACTIVATION, Role.GRAD_OUTPUT, Role.WEIGHT_GRAD)
    lost = rng.integers(0, 2000, (len(roles), modules))
    return [
        ShadowRecord(step, m + 1, role, ELEMENTS, int(lost[r, m]), 500, 40, 1e-3, 0.999, 2.0)
        for r, role in enumerate(roles)
        for m in range(modules)
    ]


if __name__ == "__main__":
    main()
