"""Fixtures of the dashboard's tests: a store of its own, pages under AppTest, Chromium.

A test that drives Chromium carries the marker ``browser``. Without a Chromium it is skipped with a
reason, except in CI, where a missing browser is a failure.
"""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

ROOT = Path(__file__).resolve().parent.parent
# Hundreds of tests start runs of a second or two; a process that reads the machine beside each of
# them would slow them down for nothing. Tests of the readings switch them on.
os.environ.setdefault("AMPSCOPE_TELEMETRY", "0")
if "PYTEST_XDIST_WORKER" in os.environ:  # there is a worker for each core
    os.environ.setdefault("OMP_NUM_THREADS", "1")
SLOW_LIMIT_S = 1200
# A shell without job control starts "pytest &" with SIGINT ignored; nohup ignores SIGHUP. Child
# processes inherit both.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
# What an example takes says how busy the machine is, and nothing of the code.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")


def interpret_triton() -> None:
    """Where Triton is installed and there is no GPU, the CUDA counter is run by its interpreter;
    Triton decides when it is imported, and parts of torch import it."""
    if importlib.util.find_spec("triton") is None:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        import torch

        if not torch.cuda.is_available():
            importlib.import_module("ampscope.capture.exponent_cuda")


interpret_triton()


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--slow`` and ``--thorough``: run the long tests, too."""
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")
    parser.addoption(
        "--thorough", action="store_true", help="also run the tests marked thorough (an hour)"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without ``--slow`` or ``-m`` with that word, slow tests are skipped and counted as such, and
    the same for thorough ones. A test that is named by its own id runs."""
    for item in _slow(items):
        item.add_marker(pytest.mark.slow)
    for item in items:
        quick = item.get_closest_marker("quick")
        if quick and item.name.partition("[")[2].rstrip("]") not in quick.args:
            item.add_marker(pytest.mark.slow)
    for item in items:
        # The first may measure for all of its file.
        if item.get_closest_marker("slow") and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SLOW_LIMIT_S))
    named = {argument for argument in config.args if "::" in argument}
    for word in ("slow", "thorough"):
        if config.getoption(f"--{word}") or word in config.getoption("-m"):
            continue
        reason = pytest.mark.skip(reason=f"takes long: runs with --{word} or -m {word}")
        for item in items:
            if item.get_closest_marker(word) and item.nodeid not in named:
                item.add_marker(reason)


def _slow(items: list[pytest.Item]) -> list[pytest.Item]:
    """Those of slow_tests.txt, which benchmarks/slow_tests.py writes from a recorded run. Where it
    names all tests of a file, the shortest stays in the quick suite."""
    lines = (ROOT / "tests" / "slow_tests.txt").read_text().splitlines()
    seconds = {test: int(took) for took, test in (line.split(" ", 1) for line in lines)}
    by_file: dict[Path, list[pytest.Item]] = {}
    for item in items:
        if not item.get_closest_marker("thorough"):
            by_file.setdefault(item.path, []).append(item)
    slow: list[pytest.Item] = []
    for tests in by_file.values():
        found = [item for item in tests if item.nodeid in seconds]
        if len(found) == len(tests):
            found.remove(min(found, key=lambda item: seconds[item.nodeid]))
        slow += found
    return slow


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many tests were left out, and why: a skip among thousands is easily missed."""
    skipped = terminalreporter.stats.get("skipped", [])
    for word in ("slow", "thorough"):
        left_out = sum(f"runs with --{word}" in str(report.longrepr) for report in skipped)
        if left_out:
            text = f"{left_out} {word} tests were not run; pytest --{word} runs them as well."
            terminalreporter.write_line(text)
    without = sum("Chromium is not installed" in str(report.longrepr) for report in skipped)
    if without:
        terminalreporter.write_line(
            f"{without} browser tests were skipped: apt-get install chromium runs them."
        )


@pytest.fixture(scope="session", autouse=True)
def _no_components() -> None:
    """Each AppTest looks through every installed package for components of Streamlit, which takes
    longer than most pages; the dashboard has none."""
    try:
        from streamlit.components.v2 import manifest_scanner
    except ImportError:  # a machine that trains has no dashboard, and its tests run all the same
        return
    manifest_scanner.scan_component_manifests = list  # type: ignore[assignment]


@pytest.fixture
def store_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store that does not exist yet, and that the dashboard will read."""
    path = tmp_path / "runs.db"
    monkeypatch.setenv("AMPSCOPE_STORE", str(path))
    monkeypatch.delenv("AMPSCOPE_WORKLOADS", raising=False)
    return path


@pytest.fixture
def open_page(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., object]:
    """``open_page("home", run=…)``: the page under AppTest, run once, through the real frame."""
    from streamlit.testing.v1 import AppTest
    from streamlit.util import calc_hash

    from ampscope.launcher import children

    # No process that waits: hundreds of pages are opened, and few of them measure.
    monkeypatch.setattr(children, "expect", lambda store: None)

    def opened(page: str, **query: object) -> AppTest:
        app = AppTest.from_file(str(ROOT / "app" / "main.py"), default_timeout=30)
        if page != "home":
            app._page_hash = calc_hash(page)  # switch_page() knows pages with a file alone
        for name, value in query.items():
            app.query_params[name] = str(value)
        return app.run()

    return opened


@pytest.fixture
def stand_in() -> Callable[..., object]:
    """Makes a script find a CUDA device, where the extension that does so is there."""
    from ampscope import extensions

    if not extensions.simulated_device():
        pytest.skip("no extension simulates a CUDA device")
    return extensions.load(extensions.simulated_device())  # type: ignore[no-any-return]


@pytest.fixture(scope="session", autouse=True)
def _shared_by_workers(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Where helpers keep what one worker has measured for all of them."""
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    os.environ["AMPSCOPE_TESTS_SHARED"] = str(shared)


@pytest.fixture(scope="session")
def chromium() -> Iterator[object]:
    """One headless Chromium for all browser tests."""
    from tests.helpers import browser

    found = browser.executable()
    if found is None:
        reason = "Chromium is not installed (Debian: apt install chromium)"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    with browser.launched(found) as running:
        yield running


@pytest.fixture
def dashboard(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """``dashboard(store, workloads=None)`` starts `streamlit run app/main.py`; returns its URL."""
    from tests.helpers import browser

    with browser.Servers(tmp_path) as servers:
        yield servers.start


@pytest.fixture
def browser_page(chromium: object) -> Iterator[object]:
    """A fresh browser page, 1400 x 1000."""
    from tests.helpers import browser

    with browser.page_of(chromium) as page:
        yield page
