"""Files that people take with them: whole or as they were, and no formulas in them."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from ampscope.errors import StoreError
from ampscope.files import write_whole, written_aside
from ampscope.store import export
from ampscope.store.reader import Reader
from app.chart import as_csv_text
from tests.helpers import stores


def test_a_full_disk_leaves_the_good_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, out = tmp_path / "runs.db", tmp_path / "run.json"
    run_id = stores.finished(store)
    with Reader(store) as reader:
        export.to_json(reader, [reader.run(run_id)], out)
        good = out.read_bytes()
        written = 0
        real = export._json

        def full(value: Any) -> str:
            nonlocal written
            written += 1
            if written > 20:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(value)

        monkeypatch.setattr(export, "_json", full)
        with pytest.raises(StoreError, match="No space left"):
            export.to_json(reader, [reader.run(run_id)], out)
    assert out.read_bytes() == good
    assert json.loads(good)
    assert sorted(p.name for p in tmp_path.iterdir() if "part" in p.name) == []


def test_a_file_keeps_its_permissions_and_a_link_its_target(tmp_path: Path) -> None:
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    real.write_text("old")
    real.chmod(0o640)
    link.symlink_to(real)
    write_whole(link, "new")
    assert link.is_symlink()
    assert real.read_text() == "new"
    assert real.stat().st_mode & 0o777 == 0o640


def test_a_device_is_written_to_as_it_is() -> None:
    with written_aside(Path(os.devnull)) as path:
        assert path == Path(os.devnull)


def test_no_cell_is_a_formula() -> None:
    table = pd.DataFrame(
        {
            "=name": ["=HYPERLINK(1)", "+1+1", "-2+3", "@SUM(A1)", "\t=1", " =1", "fc.weight"],
            "exponent": ["-4", "-149", "1e-3", "+0", "nan", "=2", "7"],
            "loss": [-1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
        }
    )
    lines = as_csv_text(table).splitlines()
    assert lines[0] == "'=name,exponent,loss"
    cells = [line.split(",")[0].strip('"') for line in lines[1:]]
    assert cells == ["'=HYPERLINK(1)", "'+1+1", "'-2+3", "'@SUM(A1)", "'\t=1", "' =1", "fc.weight"]
    assert [line.split(",")[1] for line in lines[1:]] == [
        "-4",
        "-149",
        "1e-3",
        "+0",
        "nan",
        "'=2",
        "7",
    ]
    assert lines[1].endswith(",-1.0")
