"""A class as it is started: its links, the teacher's cookie, a sub-path behind nginx, loopback."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
from click.testing import CliRunner
from playwright.sync_api import Page, Response, expect
from streamlit.proto.BackMsg_pb2 import BackMsg
from streamlit.proto.ForwardMsg_pb2 import ForwardMsg
from websockets.asyncio.client import connect

from ampscope.cli.main import main as command
from app import permissions
from tests.helpers import browser, stores
from tests.helpers.dashboard_server import in_a_loop

ROOT = Path(__file__).resolve().parents[4]
TOKEN = "a-token-that-no-student-knows"  # of the tests
PROOF = permissions.proof_value(TOKEN)
BASE = "amp/class"
SECRET = "zebrafinch"
T = TypeVar("T")


class Room:
    """A running class: where it is, and what it printed."""

    def __init__(self, port: int, log: Path) -> None:
        self.port, self.log = port, log
        self.url = f"http://127.0.0.1:{port}/{BASE}"


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Room]:
    """``ampscope dashboard --classroom --base-path amp/class``, with one run of the teacher's."""
    folder = tmp_path_factory.mktemp("class")
    stores.finished(folder / "runs.db", replace(stores.SPEC, label=SECRET))
    found = Room(browser._free_port(), folder / "log.txt")
    arguments = ["-m", "ampscope.cli.main", "dashboard", "--classroom", "--headless"]
    arguments += ["--base-path", BASE, "--url", "http://class.example.org/amp/class"]
    arguments += ["--port", str(found.port), "--store", str(folder / "runs.db")]
    environment = {**browser._environment(), "AMPSCOPE_CLASSROOM_TOKEN": TOKEN}
    with found.log.open("wb") as output:
        server = subprocess.Popen(
            [sys.executable, *arguments], stdout=output, stderr=output, env=environment,
            start_new_session=True,
        )  # fmt: skip
    try:
        browser._wait_until_healthy(found.url, server, found.log)
        yield found
    finally:
        os.killpg(server.pid, 15)
        server.wait(browser.START_S)


def get(port: int, path: str, **headers: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer


def texts(
    port: int, page: str = "", host: str = "", cookie: str = "", query: str = "",
    proof: str = PROOF,
) -> str:  # fmt: skip
    """All that a browser receives on its websocket for a page, as text."""
    shown = proof if cookie else ""
    return in_a_loop(_texts(port, page, host or f"127.0.0.1:{port}", cookie, query, shown))


async def _texts(port: int, page: str, host: str, cookie: str, query: str, proof: str) -> str:
    headers = {"Cookie": cookie} if cookie else {}
    received: list[str] = []
    async with connect(
        f"ws://{host}/{BASE}/_stcore/stream", host="127.0.0.1", port=port, max_size=None,
        subprotocols=["streamlit", *([f"ampscope.{proof}"] if proof else [])],
        origin=f"http://{host}", additional_headers=headers,
        proxy=None, open_timeout=60,
    ) as stream:  # type: ignore[call-arg]  # fmt: skip
        ask = BackMsg()
        ask.rerun_script.page_name = page
        ask.rerun_script.query_string = query
        await stream.send(ask.SerializeToString())
        while True:
            data = await asyncio.wait_for(stream.recv(), 60)
            assert isinstance(data, bytes)
            message = ForwardMsg.FromString(data)
            received.append(str(message))
            if message.WhichOneof("type") == "script_finished":
                return "\n".join(received)


def teacher(port: int) -> str:
    """The cookie of a browser that opened the teacher's link."""
    answer = get(port, f"/{BASE}/teacher/{TOKEN}")
    assert (answer.status, answer.headers["Location"]) == (303, f"/{BASE}/#ampscope={PROOF}")
    assert TOKEN not in answer.headers["Location"]
    assert answer.headers["Cache-Control"] == "no-store"
    cookie = answer.headers["Set-Cookie"]
    assert TOKEN not in cookie
    for wanted in ("HttpOnly", "SameSite=strict", f"Path=/{BASE}/"):
        assert wanted in cookie
    return cookie.partition(";")[0]


def test_the_links_are_printed_and_the_token_is_in_no_command_line(room: Room) -> None:
    printed = room.log.read_text()
    assert "For students:  http://class.example.org/amp/class/\n" in printed
    assert f"For you alone: http://class.example.org/amp/class/teacher/{TOKEN}\n" in printed
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            assert TOKEN.encode() not in entry.read_bytes()


def test_the_teachers_link_makes_the_teacher_and_no_other_does(room: Room) -> None:
    for wrong in (TOKEN[:-1], TOKEN + "x", "", "%00", "%C3%A9"):
        answer = get(room.port, f"/{BASE}/teacher/{wrong}")
        assert answer.status in (403, 404, 301, 200, 400), wrong  # no token: an ordinary page
        assert "Set-Cookie" not in answer.headers or "ampscope" not in answer.headers["Set-Cookie"]
    assert SECRET not in texts(room.port)
    assert SECRET in texts(room.port, cookie=teacher(room.port))
    assert SECRET not in texts(room.port, query=f"teacher={TOKEN}")
    real = teacher(room.port)
    forged = real[:-1] + ("1" if real.endswith("0") else "0")
    assert SECRET not in texts(room.port, cookie=forged)


def test_a_cookie_that_another_port_of_the_host_was_sent_is_worth_nothing(room: Room) -> None:
    """Browsers send a host's cookies to all its ports: the server there has the cookie."""
    cookie = teacher(room.port)
    for proof in ("", "0" * 64, cookie.partition("=")[2], TOKEN, PROOF[:-1], PROOF.upper()):
        assert SECRET not in texts(room.port, cookie=cookie, proof=proof), proof
    assert SECRET not in texts(room.port, cookie="x=y")  # the proof alone
    headers = {"Cookie": cookie, permissions.PROOF_HEADER: PROOF}
    assert SECRET not in texts(room.port, cookie=cookie, proof="")
    assert get(room.port, f"/{BASE}/", **headers).status == 200


def test_over_tls_the_cookie_is_for_this_host_alone(room: Room) -> None:
    answer = get(room.port, f"/{BASE}/teacher/{TOKEN}", **{"X-Forwarded-Proto": "https"})
    cookie = answer.headers["Set-Cookie"]
    assert cookie.startswith("__Host-")
    for wanted in ("HttpOnly", "SameSite=strict", "Path=/;", "Secure"):
        assert wanted in cookie
    assert "Domain" not in cookie
    assert SECRET in texts(room.port, cookie=cookie.partition(";")[0])


def test_another_sites_page_cannot_open_a_session(room: Room) -> None:
    """With a teacher's cookie that a browser would not send there anyway."""

    async def from_elsewhere() -> None:
        async with connect(
            f"ws://127.0.0.1:{room.port}/{BASE}/_stcore/stream", origin="http://evil.example",
            subprotocols=["streamlit"], proxy=None, open_timeout=60,
        ) as stream:  # type: ignore[call-arg]  # fmt: skip
            await asyncio.wait_for(stream.recv(), 10)

    with pytest.raises(Exception, match=r"40[03]"):
        in_a_loop(from_elsewhere())


def test_it_listens_on_loopback_alone(room: Room) -> None:
    listening = [
        line.split()[1].partition(":")[0]
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        for line in Path(table).read_text().splitlines()[1:]
        if line.split()[3] == "0A" and int(line.split()[1].partition(":")[2], 16) == room.port
    ]
    assert listening
    assert set(listening) <= {"0100007F", "00000000000000000000000001000000"}


def nginx() -> str | None:
    return os.environ.get("AMPSCOPE_NGINX") or shutil.which("nginx")


@pytest.fixture(scope="module")
def proxied(room: Room, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """nginx with the configuration of docs/classroom.md; where there is none, a tunnel in Python
    that passes on what it gets, which is all that the sub-path needs of a proxy."""
    port, found = browser._free_port(), nginx()
    folder = tmp_path_factory.mktemp("nginx")
    if found is None:
        with tunnel(port, room.port):
            yield port
        return
    process = subprocess.Popen([found, "-c", str(written(folder, port, room.port)), "-p", folder])
    try:
        wait_for(port)
        yield port
    finally:
        process.terminate()
        process.wait(30)


def written(folder: Path, port: int, behind: int) -> Path:
    """The documented server block in the least that nginx needs round it."""
    text = (ROOT / "docs" / "classroom.md").read_text()
    block = re.search(r"```nginx\n(.*?)```", text, re.DOTALL)
    assert block is not None
    own = block[1].replace("listen 80;", f"listen 127.0.0.1:{port};")
    own = own.replace("127.0.0.1:8501", f"127.0.0.1:{behind}").replace("/class/", f"/{BASE}/")
    assert own.count(f"127.0.0.1:{behind}") == own.count("proxy_pass") == 3
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    places = "".join(f"{kind}_temp_path {folder}/{kind};\n" for kind in kinds)
    (folder / "nginx.conf").write_text(
        f"daemon off; pid {folder}/pid; error_log {folder}/error.log;\n"
        f"events {{}}\nhttp {{\naccess_log off;\n{places}{own}}}\n"
    )
    return folder / "nginx.conf"


def wait_for(port: int) -> None:
    deadline = time.monotonic() + browser.START_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            get(port, "/")
            return
        time.sleep(0.05)
    raise RuntimeError("The proxy does not answer.")


@contextlib.contextmanager
def tunnel(port: int, behind: int) -> Iterator[None]:
    script = (
        "import asyncio, sys\n"
        "async def pump(r, w):\n"
        "    while data := await r.read(65536):\n"
        "        w.write(data); await w.drain()\n"
        "    w.close()\n"
        "async def serve(r, w):\n"
        "    r2, w2 = await asyncio.open_connection('127.0.0.1', int(sys.argv[2]))\n"
        "    await asyncio.gather(pump(r, w2), pump(r2, w), return_exceptions=True)\n"
        "async def main():\n"
        "    server = await asyncio.start_server(serve, '127.0.0.1', int(sys.argv[1]))\n"
        "    await server.serve_forever()\n"
        "asyncio.run(main())\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(port), str(behind)])
    try:
        wait_for(port)
        yield
    finally:
        process.terminate()
        process.wait(30)


def test_the_documented_nginx_is_accepted_by_nginx(tmp_path: Path) -> None:
    found = nginx()
    if found is None:
        pytest.skip("nginx is not installed (Debian: apt install nginx)")
    config = written(tmp_path, 8080, 8501)
    done = subprocess.run(
        [found, "-t", "-c", str(config), "-p", str(tmp_path)], capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert "syntax is ok" in done.stderr, done.stderr
    assert done.returncode == 0, done.stderr


def test_sessions_pages_and_cookies_pass_the_proxy(proxied: int) -> None:
    host = "class.example.org"
    assert get(proxied, f"/{BASE}/", Host=host).status == 200
    assert SECRET not in texts(proxied, host=host)
    assert SECRET in texts(proxied, host=host, cookie=teacher(proxied))


def is_refused(response: Response) -> bool:
    """Streamlit's page looks for its server at each level of the address, from the deepest up."""
    return response.status >= 400 and "/_stcore/" not in response.url


@pytest.mark.browser
def test_links_work_below_the_sub_path(proxied: int, browser_page: Page) -> None:
    """The teacher's link, a reload, every page of the navigation, and a link on a page."""
    page, base = browser_page, f"http://127.0.0.1:{proxied}/{BASE}"
    errors: list[str] = []
    page.on("response", lambda r: errors.append(r.url) if is_refused(r) else None)
    page.goto(f"{base}/")
    browser.settle(page)
    expect(page.get_by_role("link", name="New probe")).to_have_count(0)
    page.goto(f"{base}/teacher/{TOKEN}")
    browser.settle(page)
    assert page.url == f"{base}/"
    expect(page.get_by_role("link", name="New probe").first).to_be_visible()
    page.reload()
    browser.settle(page)
    expect(page.get_by_role("link", name="New probe").first).to_be_visible()
    page.get_by_role("link", name="All lessons").click()
    page.wait_for_url(f"{base}/learn")
    browser.settle(page)
    page.get_by_role("link", name="1 Numbers").last.click()
    page.wait_for_url(f"{base}/learn_01_numbers")
    browser.settle(page)
    page.go_back()
    page.wait_for_url(f"{base}/learn")
    page.goto(f"{base}/classroom")
    browser.settle(page)
    expect(page.get_by_role("heading", name="Class", exact=True)).to_be_visible()
    assert not errors
    assert TOKEN not in page.evaluate("document.documentElement.outerHTML + document.cookie")


def test_who_asks_for_any_port_of_another_machine_is_told_of_the_host() -> None:
    given = ["dashboard", "--headless", "--port", "0", "--host", "192.0.2.7"]
    refused = CliRunner().invoke(command, given)
    assert "--host" in refused.output + str(refused.exception)


def test_who_ends_the_command_ends_the_class(tmp_path: Path) -> None:
    port, log = browser._free_port(), tmp_path / "log.txt"
    with log.open("wb") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", "ampscope.cli.main", "dashboard", "--classroom", "--headless",
             "--port", str(port), "--store", str(tmp_path / "runs.db")],
            stdout=output, stderr=output, env=browser._environment(), start_new_session=True,
        )  # fmt: skip
    try:
        browser._wait_until_healthy(f"http://127.0.0.1:{port}", server, log)
        taken = CliRunner().invoke(command, ["dashboard", "--classroom", "--port", str(port)])
        assert "cannot be served" in taken.output + str(taken.exception)
        assert "For students" not in taken.output
        server.terminate()
        server.wait(browser.START_S)
        with pytest.raises(ConnectionRefusedError):
            get(port, "/")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, 9)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--sign-in"], "add --classroom"),
        (["--classroom", "--sign-in"], "--teacher"),
        (["--classroom", "--teacher", "a@b.org"], "--sign-in"),
        (["--classroom", "--url", "amp.example.org"], "is not an address"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(arguments: list[str], says: str) -> None:
    done = CliRunner().invoke(command, ["dashboard", "--headless", *arguments])
    assert done.exit_code != 0
    assert says in (done.output + str(done.exception))


def test_a_short_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMPSCOPE_CLASSROOM_TOKEN", "teacher")
    done = CliRunner().invoke(command, ["dashboard", "--classroom", "--headless"])
    assert "at least 16" in done.output + str(done.exception)
