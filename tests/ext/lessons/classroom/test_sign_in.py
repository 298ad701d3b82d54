"""A class that signs in, with a provider of the test's own and a real browser. Needs Authlib."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from playwright.sync_api import Page, expect

from ampscope.cli.main import main as command
from tests.helpers import browser, stores
from tests.helpers.identity_provider import CLIENT, Provider

SECRET = "zebrafinch"
TEACHER = "ada@example.org"


@pytest.fixture
def provider() -> Iterator[Provider]:
    pytest.importorskip("authlib")
    with Provider(browser._free_port()).running() as running:
        yield running


@pytest.fixture
def url(tmp_path: Path, provider: Provider) -> Iterator[str]:
    """``ampscope dashboard --classroom --sign-in`` in a folder with its secrets."""
    port = browser._free_port()
    url = f"http://127.0.0.1:{port}"
    (tmp_path / ".streamlit").mkdir()
    (tmp_path / ".streamlit" / "secrets.toml").write_text(
        f'[auth]\nredirect_uri = "{url}/oauth2callback"\ncookie_secret = "of the test"\n'
        f'client_id = "{CLIENT}"\nclient_secret = "x"\n'
        f'server_metadata_url = "{provider.url}/.well-known/openid-configuration"\n'
    )
    stores.finished(tmp_path / "runs.db", replace(stores.SPEC, label=SECRET))
    arguments = ["-m", "ampscope.cli.main", "dashboard", "--classroom", "--headless", "--sign-in"]
    arguments += ["--teacher", TEACHER, "--port", str(port), "--store", str(tmp_path / "runs.db")]
    log = tmp_path / "log.txt"
    with log.open("wb") as output:
        server = subprocess.Popen(
            [sys.executable, *arguments], stdout=output, stderr=output, cwd=tmp_path,
            env=browser._environment(), start_new_session=True,
        )  # fmt: skip
    try:
        browser._wait_until_healthy(url, server, log)
        yield url
    finally:
        os.killpg(server.pid, 15)
        server.wait(browser.START_S)


@pytest.mark.browser
def test_who_signs_in_is_who_the_provider_says(
    url: str, provider: Provider, browser_page: Page
) -> None:
    page = browser_page
    page.goto(f"{url}/learn_01_numbers?guess1=a")
    browser.settle(page)
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
    expect(page.get_by_text("Predict first")).to_have_count(0)
    provider.next = "eve@example.org"
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("heading", name="Home")).to_be_visible()
    expect(page.get_by_text("eve@example.org")).to_be_visible()
    expect(page.get_by_text(SECRET)).to_have_count(0)
    expect(page.get_by_role("link", name="New probe")).to_have_count(0)
    provider.next = TEACHER
    page.get_by_role("button", name="Sign out").click()
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_text(SECRET)).to_be_visible()
    expect(page.get_by_role("link", name="New probe").first).to_be_visible()
    assert page.goto(f"{url}/teacher/").status in (200, 404)  # type: ignore[union-attr]


def test_without_a_section_auth_nothing_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    asked = ["dashboard", "--classroom", "--sign-in", "--teacher", TEACHER, "--headless"]
    done = CliRunner().invoke(command, asked)
    assert "[auth]" in done.output
    assert done.exit_code != 0
