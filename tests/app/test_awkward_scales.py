"""Loss scales at the ends of the range: a scaler that skips 165 steps in a row arrives at zero."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from ampscope.render.html import to_html
from ampscope.store.reader import Reader
from ampscope.story.build import document
from tests.helpers import stores

SCALES = (0.0, 5e-324, 1e300, float("inf"))
PAGES = ("training", "loss_scale", "gradients", "layers")


@pytest.mark.parametrize("scale", SCALES, ids=str)
def test_every_page_and_report_is_drawn(
    store_path: Path, open_page: Callable[..., AppTest], scale: float
) -> None:
    run = stores.finished(store_path)
    with contextlib.closing(sqlite3.connect(store_path)) as store, store:
        store.execute("UPDATE step SET scale = ? WHERE step % 2 = 1", (scale,))
        store.execute("UPDATE frame SET scale = ?", (scale,))
    for page in PAGES:
        app = open_page(page, run=run)
        assert not app.exception, page
        assert not [box.value for box in app.error], page
        assert app.subheader, page
    with Reader(store_path) as reader:
        assert len(to_html(document(reader, [run]))) > 10_000
