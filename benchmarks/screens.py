"""Pictures of every page: light and dark, 1440 and 390 wide, over an empty, a small and a large
store; and how high each page is.

    python benchmarks/screens.py FOLDER                 # all; about twenty minutes
    python benchmarks/screens.py FOLDER --pages gradients,zoo --stores small --themes light
    python benchmarks/screens.py FOLDER --small runs.db # with runs of one's own
    python benchmarks/screens.py --docs                 # the pictures of docs/images

FOLDER gets STORE-PAGE-THEME-WIDTH.png and heights.json: the pixels that a page scrolls through, and
whether anything in it is wider than the page.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from large_run import write_run

from ampscope.ext.lessons.catalog import lesson_spec
from ampscope.launcher.launch import follow, launch
from ampscope.store.reader import Reader

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the tests' way of starting a dashboard and a Chromium

from app.links import ENTRIES  # noqa: E402  - needs the path set above
from tests.helpers import browser, script_stores, stores  # noqa: E402

THEMES, WIDTHS, HEIGHT = ("light", "dark"), (1440, 390), 900
DOCS_HEIGHT = 1400  # the answer, and the chart below it
WAIT_MS = 180_000  # on a machine that does something else too
MOST_PX = 16_000  # of one picture; Chromium draws no higher ones
MODULES, STEPS = 500, 200  # of the large run
SIZES = """() => { const main = document.querySelector('[data-testid=stMain]');
    return [main.scrollHeight, main.scrollWidth - main.clientWidth]; }"""
IS_DRAWN = """() => !document.querySelector(
    '[data-testid=stMain] [data-testid=stSkeleton], .js-plotly-plot:not(:has(.main-svg))')"""
# Pictures of docs/images: page, kind of the run, and what else its address says.
DOCS = {
    "diagnosis": ("diagnosis", "script", ""),
    "gradients": ("gradients", "probe", ""),
    "lesson": ("learn_03_underflow", "", "?guess3=show&scale3=256.0"),
}


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("folder", type=Path, nargs="?")
    arguments.add_argument("--pages", default="", help="names, separated by commas")
    arguments.add_argument("--stores", default="empty,small,large")
    arguments.add_argument("--themes", default=",".join(THEMES))
    arguments.add_argument("--widths", default=",".join(map(str, WIDTHS)))
    arguments.add_argument("--small", type=Path, help="a store to show in place of a made one")
    arguments.add_argument("--docs", action="store_true", help="renew docs/images from --small")
    given = arguments.parse_args()
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = stack.enter_context(browser.Servers(scratch))
        chromium = stack.enter_context(browser.launched(browser.executable() or "chromium"))
        if given.docs:
            for_docs(servers, chromium, given.small or small(scratch / "small.db"))
            return
        if given.folder is None:
            arguments.error("name the FOLDER for the pictures")
        given.folder.mkdir(parents=True, exist_ok=True)
        wanted = given.pages.split(",") if given.pages else [e.name for e in ENTRIES]
        heights: dict[str, dict[str, list[int]]] = {}
        for name in given.stores.split(","):
            store = given.small if name == "small" and given.small else made(name, scratch)
            url = servers.start(store)
            for theme in given.themes.split(","):
                for width in map(int, given.widths.split(",")):
                    size = (width, HEIGHT, theme)
                    with browser.page_of(chromium, *size) as page:
                        for entry in wanted:
                            key = f"{name}-{entry}-{theme}-{width}"
                            file = given.folder / f"{key}.png"
                            heights[key] = picture(page, f"{url}{address(entry, store)}", file)
                            print(key, *heights[key], flush=True)
        kept = given.folder / "heights.json"
        kept.write_text(json.dumps(heights, indent=1) + "\n")


def made(name: str, folder: Path) -> Path:
    """A store of that kind."""
    store = folder / f"{name}.db"
    if name == "small":
        return small(store)
    if name == "large":
        write_run(store, MODULES, STEPS)
        write_run(store, MODULES, STEPS)
        script_stores.overflow(store)
    return store


def small(store: Path) -> Path:
    """A diagnosis of each kind, and two probes."""
    for write in (script_stores.undetermined, script_stores.no_fault, script_stores.overflow):
        write(store)
    stores.finished(store)
    stores.finished(store)
    return store


def address(entry: str, store: Path, kind: str = "") -> str:
    """Of a page; a page of one run names the newest (of ``kind``) that has something to show
    there."""
    if not store.exists() or entry == "home":
        return "/" if entry == "home" else f"/{entry}"
    with Reader(store) as reader:
        runs = reader.runs()
        asked = first([r for r in runs if kind in ("", r.spec.kind)], entry, reader)
    return f"/{entry}{asked}"


def first(runs: Sequence[Any], entry: str, reader: Reader) -> str:
    kinds = {"diagnosis": "script", "source": "script", "training": "watch"}
    held = {"gradients": "frame", "layers": "module", "telemetry": "telemetry"}
    kind, fact = kinds.get(entry, ""), held.get(entry, "")
    if entry not in {*kinds, *held, "loss_scale", "two_runs"}:
        return ""
    found = [
        run.id
        for run in runs
        if run.spec.is_training
        and run.steps_done
        and run.spec.kind in (kind or run.spec.kind)
        and (not fact or fact in reader.held(run.id))
        and run.spec.control in ("", "as_is")
    ]
    second = f"&second={found[1]}" if entry == "two_runs" and found[1:] else ""
    return f"?run={found[0]}{second}" if found else ""


def picture(page: Any, url: str, file: Path) -> list[int]:
    """The whole page as one picture; its height in pixels, and by how much it is too wide."""
    page.set_viewport_size({"width": page.viewport_size["width"], "height": HEIGHT})
    page.goto(url)
    drawn(page)
    height, too_wide = page.evaluate(SIZES)
    width = page.viewport_size["width"]
    page.set_viewport_size({"width": width, "height": min(max(height, HEIGHT), MOST_PX)})
    drawn(page)
    page.screenshot(path=str(file))
    return [height, too_wide]


def drawn(page: Any) -> None:
    """Wait until the browser has drawn what the server sent."""
    browser.settle(page)
    page.wait_for_function(IS_DRAWN, timeout=WAIT_MS)
    page.wait_for_timeout(300)  # charts fade in


def for_docs(servers: browser.Servers, chromium: Any, store: Path) -> None:
    """docs/images, as wide as a page of GitHub shows them sharply."""
    underflow = lesson_spec("underflow")
    for _ in follow(store, launch(underflow, store)):
        pass
    url = servers.start(store)
    for name, (entry, kind, query) in DOCS.items():
        with browser.page_of(chromium, 1440, DOCS_HEIGHT) as page:
            page.goto(f"{url}{address(entry, store, kind)}{query}")
            drawn(page)
            page.screenshot(path=str(ROOT / "docs" / "images" / f"{name}.png"))


if __name__ == "__main__":
    main()
