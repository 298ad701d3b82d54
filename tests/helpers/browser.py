"""Start the dashboard as a person would, and drive it in Chromium with Playwright."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright
from playwright.sync_api import TimeoutError as PlaywrightTimeout

from ampscope.store.reader import Reader

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# Headless, and silent towards the net: the tests need none.
ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
START_S = 60.0  # a loaded CI machine; an idle one takes 2 s
WAIT_MS = 60_000  # for one reaction of the page, on a loaded machine


def executable() -> str | None:
    """Path of a Chromium, or None."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


@contextlib.contextmanager
def launched(path: str) -> Iterator[Browser]:
    """A running Chromium."""
    expect.set_options(timeout=WAIT_MS)
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        yield running
        running.close()


@contextlib.contextmanager
def page_of(
    running: Browser, width: int = 1400, height: int = 1000, scheme: str = "light"
) -> Iterator[Page]:
    """A fresh page with its own session."""
    context = running.new_context(
        viewport={"width": width, "height": height},
        color_scheme=scheme,  # type: ignore[arg-type]  # "light" or "dark"
    )
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)
    yield page
    context.close()


def settle(page: Page) -> None:
    """Wait until the page has a title and the server has nothing more to send."""
    expect(page.locator("[data-testid=stMain] h1").first).to_be_visible(timeout=WAIT_MS)
    expect(page.locator("[data-testid=stApp]")).to_have_attribute(
        "data-test-script-state", "notRunning", timeout=WAIT_MS
    )


def open_popover(page: Page, name: str, content: Locator) -> None:
    """Press the button ``name`` until ``content`` of its popover shows: a click that meets a page
    still being drawn is lost."""
    for _ in range(3):
        page.get_by_role("button", name=name).click()
        with contextlib.suppress(PlaywrightTimeout):
            return content.wait_for(timeout=WAIT_MS / 6)
    raise AssertionError(f"no popover opens at {name!r}")


class Servers:
    """Dashboards started in a test, all ended after it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._running: list[subprocess.Popen[bytes]] = []
        self._stores: set[Path] = set()

    def __enter__(self) -> Servers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for store in self._stores:
            _end_probes(store)
        for server in self._running:
            server.kill()
        for server in self._running:
            server.wait(timeout=START_S)

    def start(self, store: Path, *arguments: str) -> str:
        """Start on ``store`` with the operator's other ``arguments``; returns the URL."""
        self._stores.add(store)
        port = _free_port()
        command = [sys.executable, "-m", "streamlit", "run", str(ROOT / "app" / "main.py")]
        command += ["--server.port", str(port), "--server.headless", "true"]
        command += ["--", "--store", str(store), *arguments]
        log = self.folder / f"server-{port}.log"
        with log.open("wb") as output:
            server = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env=_environment(),
            )
        self._running.append(server)
        url = f"http://127.0.0.1:{port}"
        _wait_until_healthy(url, server, log)
        return url


def _end_probes(store: Path) -> None:
    """Probes outlive the dashboard by design; those of a test must not outlive the test."""
    if not store.exists():
        return
    with Reader(store) as reader:
        active = [run for run in reader.runs() if run.state.is_active]
    for run in active:
        if run.pid not in (None, os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(run.pid, signal.SIGKILL)


def _environment() -> dict[str, str]:
    """Without the operator's variables and without pytest's."""
    dropped = ("AMPSCOPE_", "STREAMLIT_", "PYTEST_")
    return {k: v for k, v in os.environ.items() if not k.startswith(dropped)}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_healthy(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"The dashboard ended at once:\n{log.read_text()}")
        if _is_healthy(url):
            return
        time.sleep(0.05)
    raise RuntimeError(f"The dashboard did not answer within {START_S} s:\n{log.read_text()}")


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/_stcore/health", timeout=1) as answer:
            return bool(answer.status == 200)
    except OSError:  # urllib's URLError is one
        return False
