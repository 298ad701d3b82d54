"""Files that are small for what they hold: what is let in takes under 300 MB and 20 s of a core."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ampscope.errors import BadInput
from ampscope.records import Curve
from ampscope.store.export import to_json
from ampscope.store.importing import import_file, opened
from ampscope.store.reader import Reader
from ampscope.story import result_tables
from tests.helpers.exported_run import write_run

MOST_BYTES = 300 * 10**6
MOST_S = 20.0  # of processor time: 4 to 12 s on the machines at hand
IMPORT = """
import sys, time
from pathlib import Path
import ampscope.store.importing as importing
started = time.process_time()
try:
    importing.import_file(Path(sys.argv[1]), Path(sys.argv[2]))
    came = "in"
except Exception as error:
    came = f"refused: {error}"
peak = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if "VmHWM" in line)
print(peak, time.process_time() - started, came)
"""


@pytest.fixture
def exported(tmp_path: Path) -> dict[str, Any]:
    run_id = write_run(tmp_path / "runs.db")
    with Reader(tmp_path / "runs.db") as reader:
        to_json(reader, [reader.run(run_id)], tmp_path / "run.json")
    document: dict[str, Any] = json.loads((tmp_path / "run.json").read_text())
    return document


def many_histograms(document: dict[str, Any]) -> None:
    """The attack: 745,355 histograms of one frame, each empty."""
    row = {**document["histogram"][0], "counts": {}}
    document["module"] = [{**document["module"][1], "index": n} for n in range(200_000)]
    document["histogram"] = [{**row, "module": n} for n in range(60_000)]


def full_histograms(document: dict[str, Any]) -> None:
    """As many bins as are let in, in the largest frames that are."""
    counts = {str(n): 1_000_000 + n for n in range(-50, 0)}
    row = {**document["histogram"][0], "counts": counts, "last_step": None}
    document["module"] = [{**document["module"][1], "index": n} for n in range(5_000)]
    document["histogram"] = [
        {**row, "module": n, "step": step} for step in range(4) for n in range(4_000)
    ]


def many_steps(document: dict[str, Any]) -> None:
    step = {"step": 0, "loss": 1.2345678, "scale": 65536.0}
    document["step"] = [{**step, "step": n} for n in range(240_000)]


def long_curve(document: dict[str, Any]) -> None:
    record = {"record": "Curve", "name": "c", "series": "s"}
    document["result"] = [{**record, "x": list(range(500_000)), "y": [0.5] * 500_000}]


def many_curves(document: dict[str, Any]) -> None:
    record = {"record": "Curve", "series": "s", "x": list(range(19_000)), "y": [0.5] * 19_000}
    document["result"] = [{**record, "name": f"c{n}"} for n in range(30)]


def many_keys(document: dict[str, Any]) -> None:
    document["run"] = {f"k{n}": n for n in range(900_000)}


FILES = (many_histograms, full_histograms, many_steps, long_curve, many_curves, many_keys)


@pytest.mark.parametrize("change", FILES)
def test_a_file_takes_a_bounded_time_and_memory(
    change: Any, exported: dict[str, Any], tmp_path: Path
) -> None:
    change(exported)
    file = tmp_path / "big.json"
    file.write_text(json.dumps(exported, separators=(",", ":")))
    child = [sys.executable, "-c", IMPORT, str(file), str(tmp_path / "other.db")]
    said = subprocess.run(child, capture_output=True, text=True, check=True, timeout=120).stdout
    peak, took, came = said.split(maxsplit=2)
    print(change.__name__, f"{file.stat().st_size / 2**20:.1f} MiB", said)
    assert int(peak) < MOST_BYTES
    assert float(took) < MOST_S
    is_let_in = change in (full_histograms, many_steps, many_curves)
    assert came.strip() == "in" if is_let_in else came.startswith("refused:")


def test_a_frame_of_too_many_histograms_is_refused_by_its_place(
    exported: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ampscope.store.importing import values

    monkeypatch.setattr(values, "MOST_HISTOGRAMS", 1)
    exported["histogram"].append({**exported["histogram"][0], "module": 0})
    file = tmp_path / "run.json"
    file.write_text(json.dumps(exported))
    with pytest.raises(BadInput, match="histogram: 2 are of one step and role"):
        import_file(file, tmp_path / "other.db")


def test_a_long_curve_is_thinned_in_a_report() -> None:
    y = [0.0] * 20_000
    y[12_345], y[777] = 9.0, float("nan")
    pairs = result_tables._pairs(Curve("c", "s", tuple(map(float, range(20_000))), tuple(y)))
    assert len(pairs) <= 3 * result_tables.MOST_POINTS
    assert (12_345.0, 9.0) in pairs
    assert any(value != value for _, value in pairs)


@pytest.mark.parametrize("path", ["/proc/kmsg", "/dev/zero", "/proc/self/mem"])
def test_what_the_system_makes_up_is_refused_at_once(path: str, tmp_path: Path) -> None:
    if not os.path.exists(path):
        pytest.skip(f"{path} is not here")
    started = time.monotonic()
    with pytest.raises(BadInput):
        import_file(Path(path), tmp_path / "other.db")
    with pytest.raises(Exception, match=r"empty|not a file|permission|SQLite|Cannot|failed"):
        opened(path)
    assert time.monotonic() - started < 2


def test_a_named_pipe_is_refused_at_once(tmp_path: Path) -> None:
    pipe = tmp_path / "run.json"
    os.mkfifo(pipe)
    started = time.monotonic()
    with pytest.raises(BadInput, match="no ordinary file"):
        import_file(pipe, tmp_path / "other.db")
    with pytest.raises(Exception, match="a named pipe"):
        opened(pipe)
    assert time.monotonic() - started < 2
