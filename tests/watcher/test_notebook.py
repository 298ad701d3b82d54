"""The live figure in a real Jupyter kernel."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

CELL = """
import sys, time
sys.path.insert(0, {tests!r})
from tests.helpers.watched import small_net, train_bf16
import ampscope
import importlib
importlib.import_module("ampscope.watcher.live_figure").EVERY_S = 0.5
model = small_net()
run = ampscope.watch(model, store={store!r}, name="<b>mine</b>")
for _ in range(4):
    train_bf16(3, model)
    time.sleep(0.7)
run.close()
"""


@pytest.mark.filterwarnings("ignore")  # of the client's own event loop
def test_a_cell_shows_the_run_while_it_trains(tmp_path: Path) -> None:
    source = CELL.format(tests=str(Path(__file__).parents[2]), store=str(tmp_path / "runs.db"))
    cell = nbformat.v4.new_code_cell(source)
    book = nbformat.v4.new_notebook(cells=[cell])
    updates = []
    client = nbclient.NotebookClient(book, timeout=120, kernel_name="python3")
    original = client.process_message

    def noted(message: dict[str, object], *arguments: object) -> object:
        if message["msg_type"] == "update_display_data":
            updates.append(message)
        return original(message, *arguments)

    client.process_message = noted
    client.execute()
    errors = [output for output in cell.outputs if output.output_type == "error"]
    assert not errors, errors
    shown = [output.data for output in cell.outputs if output.output_type == "display_data"]
    assert len(shown) == 2, "a sentence and a figure"
    assert "step 11" in shown[0]["text/html"]
    assert "&lt;b&gt;mine" in shown[0]["text/html"]
    assert "/training?run=" in shown[0]["text/html"]
    figure = shown[1]["application/vnd.plotly.v1+json"]
    assert len(json.loads(json.dumps(figure))["data"]) == 2
    assert len(updates) >= 3, "the figure was drawn anew while the cell ran"
