"""Pages over malformed imports: what was let in is drawn, or said to be unreadable, never a crash.

    python benchmarks/import_pages.py [--files 10000]      # results/import_pages.json

The files are those of import_mutations.py, changed alike. Of each that is imported, every page that
shows such a run is drawn by Streamlit's own test runner, through the dashboard's frame:
- drawn: no exception, and nothing for the frame's net to catch
- unreadable: the page says in one sentence that the run cannot be read
- failed: anything else, with its traceback
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

os.environ.setdefault("STREAMLIT_LOGGER_LEVEL", "error")  # it has no server here, and says so

import import_mutations  # puts the repository's root on the path
import mutations
from streamlit.testing.v1 import AppTest

from ampscope.launcher import children
from ampscope.records import RunInfo
from ampscope.store.importing import import_file
from ampscope.store.importing.values import Refusal
from ampscope.store.reader import Reader
from ampscope.store.writer import delete_run
from app import states

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "benchmarks" / "results" / "import_pages.json"
SHOWN = 12  # failures that are kept as examples
OF_A_RUN = ("home", "training", "layers", "gradients", "loss_scale", "telemetry", "op_lists")
PAGES = {
    "probe": OF_A_RUN,
    "watch": OF_A_RUN,
    "script": ("diagnosis", *OF_A_RUN),
    "compare": ("home", "compare", "telemetry"),
    "batch": ("home", "batch_size", "telemetry"),
    "cores": ("home", "tensor_cores", "telemetry"),
    "bench": ("home", "hardware", "telemetry"),
    "lesson": ("home", "telemetry"),  # a lesson shows what was measured here alone
}


class Net(logging.Handler):
    """What the frame caught: the tracebacks that it logs, and the sentences on unreadable runs."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.caught: list[str] = []
        self.unreadable: list[str] = []

    def say(self, sentence: str) -> None:
        """Stands where the page would say so."""
        self.unreadable.append(sentence)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the end of the traceback."""
        error = record.exc_info[1] if record.exc_info else None
        lines = traceback.format_exception(error, limit=-4) if error else [record.getMessage()]
        self.caught.append("".join(lines))


def main() -> None:
    """Change, import, draw; keep what came of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=OUT)
    asked = parser.parse_args()
    started = time.perf_counter()
    children.expect = lambda store: None  # type: ignore[assignment]  # no process that waits
    with tempfile.TemporaryDirectory() as folder:
        found = trials(asked.files, asked.seed, Path(folder))
    found["seconds"] = round(time.perf_counter() - started, 1)
    asked.out.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))


def trials(count: int, seed: int, folder: Path) -> dict[str, object]:
    """Counts of what was drawn of ``count`` changed files."""
    chance = random.Random(seed)
    good = import_mutations.made_up(folder)
    store, path = folder / "into.db", folder / "changed.json"
    os.environ["AMPSCOPE_STORE"] = str(store)
    net = Net()
    logger = logging.getLogger("ampscope.dashboard")
    logger.addHandler(net)
    logger.propagate = False
    states.unreadable = net.say
    imported, drawn, unreadable = Counter[str](), Counter[str](), Counter[str]()
    failed: list[str] = []
    for number in range(-len(good), count):  # first the good ones: each page draws them
        name = [*good][number] if number < 0 else chance.choice([*good])
        content, sort = (good[name], "good") if number < 0 else mutations.mutate(chance, good[name])
        path.write_bytes(content)
        try:
            runs = import_file(path, store)
        except Refusal:
            continue
        imported[sort.partition(",")[0]] += 1
        ids = [run.run_id for run in runs]
        for page in _pages(store, ids[0]):
            net.caught, net.unreadable = [], []
            if went_wrong := [*_failures(page, ids[0]), *net.caught]:
                failed.append(f"{number} {name}, {sort}, {page}:\n{''.join(went_wrong)}")
            elif net.unreadable:
                unreadable[f"{page}: {net.unreadable[0][:160]}"] += 1
            else:
                drawn[page] += 1
        for run_id in ids:
            delete_run(store, run_id)
    return {
        "files": count,
        "seed": seed,
        "imported": sum(imported.values()),
        "imported_by_change": dict(imported.most_common()),
        "pages": sum(drawn.values()) + sum(unreadable.values()) + len(failed),
        "drawn": sum(drawn.values()),
        "unreadable": sum(unreadable.values()),
        "failed": len(failed),
        "drawn_by_page": dict(drawn.most_common()),
        "unreadable_sentences": dict(unreadable.most_common(SHOWN)),
        "failures": failed[:SHOWN],
    }


def _pages(store: Path, run_id: str) -> tuple[str, ...]:
    with Reader(store) as reader:
        info: RunInfo = reader.run(run_id)
    return PAGES[info.spec.kind]


def _failures(page: str, run_id: str) -> list[str]:
    """What no page may do: raise, or take a minute."""
    app = AppTest.from_file(str(ROOT / "app" / "main.py"), default_timeout=60)
    if page != "home":
        app.switch_page(str(ROOT / "pages" / f"{page}.py"))
    app.query_params["run"] = run_id
    try:
        app.run()
    except Exception:
        return [traceback.format_exc(limit=-2)]
    return [str(raised.value) for raised in app.exception]


if __name__ == "__main__":
    main()
