"""A run of three steps whose export can be worked out by hand; used by every exporter's test.

Step 0 has scale 3 (no power of two), step 1 is skipped with an infinite loss, step 2 has scale 2.
The weight gradient of ``fc`` at step 0, as recorded: five in [2^-4, 2^-3), seven in [2^-2, 2^-1),
nine zeros, one NaN, two infinities; at step 2: four in [2^0, 2^1).
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np

from ampscope.numerics.histogram import (
    FIRST,
    LOWEST,
    NAN,
    NEG_INF,
    NEG_ZERO,
    POS_INF,
    POS_ZERO,
    RAW_LEN,
)
from ampscope.records import (
    Frame,
    ModuleRecord,
    Role,
    RunSpec,
    ShadowRecord,
    State,
    StepRecord,
)
from ampscope.store.writer import RunWriter
from tests.helpers.stores import MACHINE

EDGES_0 = [0.0625 / 3, 0.125 / 3, 0.25 / 3, 0.5 / 3]  # step 0, unscaled
COUNTS_0 = [5, 0, 7]


def write_run(store: Path, root_activation: bool = True) -> str:
    """Returns the run's id."""
    writer = RunWriter.create(store, RunSpec("gpt", steps=3, label="by hand"))
    writer.start(MACHINE)
    writer.add_modules(
        (ModuleRecord(0, "", "Net", is_leaf=False), ModuleRecord(1, "fc", "Linear", "fp32", 24))
    )
    writer.add_step(_step(0, 2.5, 3.0))
    writer.add_step(_step(1, math.inf, 4.0, skipped=True))
    writer.add_step(_step(2, 1.5, 2.0))
    gradient = _row({-4: 5, -2: 7})
    gradient[[POS_ZERO, NEG_ZERO, NAN, POS_INF, NEG_INF]] = [8, 1, 1, 1, 1]
    writer.add_frame(_frame(0, Role.WEIGHT_GRAD, 1, gradient, 3.0))
    writer.add_frame(_frame(2, Role.WEIGHT_GRAD, 1, _row({0: 4}), 2.0))
    # fp16 rounds magnitudes below 2^-25 to zero: 3 of these 12; zeros and NaN are no part of it.
    output = _row({-26: 3, -25: 4, 0: 5})
    output[[POS_ZERO, NAN]] = [20, 2]
    writer.add_frame(_frame(0, Role.GRAD_OUTPUT, 1, output, 3.0))
    if root_activation:
        writer.add_frame(_frame(0, Role.ACTIVATION, 0, _row({1: 6}), 1.0))
    writer.add_shadow(
        [ShadowRecord(0, m, Role.GRAD_OUTPUT, 50, 1 + m, 0, 0, None, None, None) for m in (0, 1)]
    )
    writer.finish(State.FINISHED)
    writer.close()
    return writer.run_id


def _step(number: int, loss: float, scale: float, skipped: bool = False) -> StepRecord:
    return StepRecord(
        number, loss=loss, scale=scale, skipped=skipped, grad_norm=0.25, lr=1e-3,
        step_time_s=10.0, overhead_s=1.0, moved_share=0.5,
    )  # fmt: skip


def _row(counts: dict[int, int]) -> np.ndarray:
    out = np.zeros(RAW_LEN, np.int64)
    for exponent, count in counts.items():
        out[FIRST + exponent - LOWEST] = count
    return out


def _frame(step: int, role: Role, module: int, row: np.ndarray, scale: float) -> Frame:
    return Frame(step, role, (module,), ("fp32",), row[None, :], scale)


def check_nothing_is_sent(export: list[str], **more: str) -> None:
    """A proxy that counts who comes: the command ``export`` does not, a program that asks for a
    page does. ``more``: variables of the export's environment."""
    page = [sys.executable, "-c", PAGE]
    came = {}
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        proxy.settimeout(0.5)
        address = f"http://127.0.0.1:{proxy.getsockname()[1]}"
        environment = {k: v for k, v in os.environ.items() if k not in UNSET}
        environment |= dict.fromkeys(PROXIES, address) | more
        for name, command in (("export", export), ("page", page)):
            child = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
            came[name], has_ended = 0, False
            while not has_ended:  # one more look after its end, for what was left waiting
                has_ended = child.poll() is not None
                with contextlib.suppress(TimeoutError):
                    proxy.accept()[0].close()
                    came[name] += 1
            if name == "export":
                assert child.returncode == 0
    assert came == {"export": 0, "page": 1}


PAGE = "import urllib.request as r\nr.urlopen('http://example.invalid', timeout=9)"
PROXIES = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
UNSET = {"NO_PROXY", "no_proxy", "WANDB_ERROR_REPORTING"}
