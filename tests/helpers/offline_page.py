"""Open a report from disk in Chromium with the network off, and write down all that it tries."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from playwright.sync_api import Browser, Page


@dataclass
class Watched:
    """A page, and what happened in it that must not."""

    page: Page
    requests: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    dialogs: list[str] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)  # of requests that were stopped

    @property
    def trouble(self) -> list[str]:
        """Requests other than for the file itself, errors of the console and the page, dialogs."""
        others = [f"request: {url}" for url in self.requests[1:]]
        return [*others, *self.errors, *self.dialogs]


@contextlib.contextmanager
def opened(browser: Browser, path: Path, scheme: str = "light") -> Iterator[Watched]:
    """The page of ``path`` in a fresh context that is offline."""
    context = browser.new_context(
        viewport={"width": 1200, "height": 900},
        color_scheme=scheme,  # type: ignore[arg-type]  # "light" or "dark"
    )
    context.set_offline(True)
    page = context.new_page()
    page.set_default_timeout(60_000)
    watched = Watched(page)
    page.on("request", lambda request: watched.requests.append(request.url))
    page.on("requestfailed", lambda r: watched.failures.update({r.url: r.failure or ""}))
    page.on("pageerror", lambda error: watched.errors.append(f"error: {error}"))
    page.on(
        "console",
        lambda m: watched.errors.append(f"{m.type}: {m.text}") if m.type != "log" else None,
    )

    def dismiss(dialog: object) -> None:
        watched.dialogs.append(f"dialog: {dialog}")
        dialog.dismiss()  # type: ignore[attr-defined]  # playwright's Dialog

    page.on("dialog", dismiss)
    page.goto(path.as_uri())
    yield watched
    context.close()


def use(page: Page) -> None:
    """What a reader does: open every detail, point at charts, zoom, switch a curve, print."""
    for chart in page.locator("figure.lines").all():
        svg = chart.locator(":scope > svg")
        svg.scroll_into_view_if_needed()
        box = svg.bounding_box()
        assert box is not None
        x, y, width = box["x"], box["y"] + box["height"] / 3, box["width"]
        page.mouse.move(x + width / 2, y)
        assert chart.locator("output").text_content()
        page.mouse.down()
        page.mouse.move(x + 0.8 * width, y, steps=3)
        page.mouse.up()
        entry = chart.locator("button.entry").first
        entry.click()
        entry.click()
        chart.get_by_role("button", name="Whole range").click()
    for details in page.locator("details > summary").all():
        details.click()
    for chart in page.locator("figure.bars").all()[:4]:
        bar = chart.locator("rect:has(title)").first
        if bar.count():
            bar.hover()
            assert " of " in (chart.locator("output").text_content() or "")
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    page.emulate_media(media="screen")
