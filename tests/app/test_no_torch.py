"""The dashboard's process never loads torch: not to start, and not for any page."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.helpers import stores

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys
sys.path.insert(0, {root!r})
from streamlit.testing.v1 import AppTest
from streamlit.util import calc_hash
from app.links import ENTRIES, HOME

for entry in ENTRIES:
    page = AppTest.from_file({main!r}, default_timeout=60)
    if entry is not HOME:
        page._page_hash = calc_hash(entry.name)
    page.query_params["run"] = {run!r}
    page.run()
    assert not page.exception and not page.error, (entry.title, page.exception, page.error)
    assert page.title[0].value == entry.title, page.title[0].value
    print(entry.title)
loaded = sorted(name for name in sys.modules if name.split(".")[0] in ("torch", "numba"))
assert not loaded, loaded
"""


def test_no_page_loads_torch(tmp_path: Path) -> None:
    store = tmp_path / "runs.db"
    run = stores.finished(store)
    script = SCRIPT.format(root=str(ROOT), main=str(ROOT / "app" / "main.py"), run=run)
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "AMPSCOPE_STORE": str(store)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == "Home"
