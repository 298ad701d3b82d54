"""A script that differs from run to run is told so, and one that repeats itself is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ampscope.analysis.repeatability import difference
from ampscope.analysis.run_view import RunView
from ampscope.launcher.script_runs import ScriptRuns
from tests.helpers.script_runner import Runner, spec, write_script

GENERATOR = """
import numpy as np
from base import *
rng = np.random.default_rng({seed})
x = torch.from_numpy(rng.standard_normal((8, 4)).astype("float32"))
m(x).mean().backward(); o.step()
"""
MISSING = """
import numpy as np
from base import *
class Filled(torch.nn.Module):
    def forward(self, x): return m(torch.nan_to_num(x))
rng = np.random.default_rng({seed})
x = torch.from_numpy(rng.standard_normal((8, 4)).astype("float32"))
x[2, 1] = torch.nan
Filled()(x).mean().backward(); o.step()
"""
CLOCK = """
import time, torch
torch.manual_seed({seed})
m = torch.nn.Linear(4, 2)
m(torch.ones(8, 4)).mean().backward(); torch.optim.SGD(m.parameters(), 0.1).step()
"""
NO_SEED = """
import random, numpy, torch
m = torch.nn.Linear(4, 2)
x = torch.rand(8, 4) * random.random() * float(numpy.random.rand())
m(x).mean().backward(); torch.optim.SGD(m.parameters(), 0.1).step()
"""
HALF = """
from base import *
m.half()(torch.randn(8, 4).half()).float().mean().backward(); o.step()
"""


@pytest.fixture(scope="module")
def twice(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    """What differs between a script's run as it is and another one."""
    folder: Path = tmp_path_factory.mktemp("repeat")
    with ScriptRuns(spec(), folder / "runs.db") as runs:

        def compared(text: str, control: str = "as_is") -> str:
            path = write_script(folder, "train.py", text)
            run = Runner(runs)
            views = [
                RunView(c, c, run(path, control=c).run.observations) for c in ("as_is", control)
            ]
            assert all(view.steps for view in views)
            return difference(*views)

        yield compared


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (GENERATOR.format(seed=""), "the first inputs"),
        (GENERATOR.format(seed="3"), ""),
        (MISSING.format(seed=""), "the first inputs"),
        (MISSING.format(seed="3"), ""),
        (CLOCK.format(seed="time.time_ns()"), "the initial weights"),
        (CLOCK.format(seed="3"), ""),
        (NO_SEED, ""),
    ],
    ids=[
        "own_generator",
        "own_generator_seeded",
        "missing",
        "missing_seeded",
        "clock",
        "seeded",
        "no_seed_at_all",
    ],
)
def test_what_differs_between_two_runs(text: str, says: str, twice: Callable[..., str]) -> None:
    assert twice(text) == says


def test_precision_is_no_difference(twice: Callable[..., str]) -> None:
    assert twice(HALF, "fp32") == ""
