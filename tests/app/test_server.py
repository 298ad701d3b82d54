"""The door of the dashboard: names, origins, bodies, numbers, the secret, and nothing goes out."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import stat
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from click.testing import CliRunner
from playwright.sync_api import Page, expect
from streamlit.proto.BackMsg_pb2 import BackMsg
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from ampscope import extensions, loopback
from ampscope.cli import dashboard as cli
from ampscope.cli.main import main as command
from app import permissions, server
from tests.helpers import browser, stores
from tests.helpers.dashboard_server import (
    PLAIN,
    ROOT,
    Running,
    ask,
    draw,
    drawn,
    in_a_loop,
    opens,
    running,
    stream,
)

TOKEN = "a-token-that-no-other-user-knows"
PROOF = permissions.proof_value(TOKEN)
COOKIE = f"{permissions.cookie_name(TOKEN)}={permissions.cookie_value(TOKEN)}"
AMPSCOPE = ["-m", "ampscope.cli.main", "dashboard", "--headless"]


@pytest.fixture(scope="module", params=[PLAIN, [*AMPSCOPE, "--no-token"]], ids=["run", "ampscope"])
def either(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """Both ways to start the dashboard."""
    folder = tmp_path_factory.mktemp("server")
    stores.finished(folder / "runs.db", stores.SPEC)
    with running(folder, request.param) as found:
        yield found


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """`ampscope dashboard` as it is by default, with a token of ours."""
    folder = tmp_path_factory.mktemp("guarded")
    stores.finished(folder / "runs.db", stores.SPEC)
    with running(folder, AMPSCOPE, AMPSCOPE_TOKEN=TOKEN) as found:
        yield found


FOREIGN_HOSTS = (
    "evil.example", "evil.example:{port}", "localhost.evil.example:{port}", "127.0.0.1.evil:{port}",
    "10.1.2.3:{port}", "[2001:db8::1]:{port}", "localhost@evil:{port}", "evil/localhost", "", "a b",
    "localhost:80:80", "xn--lcalhost-n0a:{port}", "0.0.0.0:{port}", "[::ffff:10.1.2.3]:{port}",
)  # fmt: skip


@pytest.mark.parametrize("host", FOREIGN_HOSTS)
def test_a_name_that_is_not_this_servers_gets_nothing(either: Running, host: str) -> None:
    """DNS rebinding: a page at another name for 127.0.0.1, where Host and Origin agree."""
    host = host.format(port=either.port)
    for path in ("/", "/_stcore/health", "/learn", "/_stcore/host-config", "/static/x.js"):
        assert ask(either.port, path, Host=host)[0] in (400, 421), path
    if re.fullmatch(r"[\w.:\[\]-]+", host) and host.count(":80") < 2:  # one that a client can ask
        assert not opens(either.port, host=host, origin=f"http://{host}")


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "LOCALHOST.", "[::1]", "localhost:1"])
def test_loopback_by_any_of_its_names_is_served(either: Running, host: str) -> None:
    """Also another port: a tunnel (ssh -L) has its own."""
    assert ask(either.port, "/", Host=host)[0] == 200
    assert opens(either.port, host=host.rstrip("."), origin=f"http://{host.lower().rstrip('.')}")


FOREIGN_ORIGINS = (
    "http://evil.example", "null", "", "file://", "http://localhost:{other}", "http://0.0.0.0:{port}",
    "http://127.0.0.1:{other}", "https://127.0.0.1:{port}", "http://localhost:{port}",
    "http://127.0.0.1:{port}.evil.example", "http://x@127.0.0.1:{port}", "chrome-extension://abc",
    "http://127.0.0.1", "http://127.0.0.1:{port}/path", "http://[::1]:{port}",
)  # fmt: skip


@pytest.mark.parametrize("origin", FOREIGN_ORIGINS)
def test_a_page_of_another_origin_gets_nothing(either: Running, origin: str) -> None:
    """Another port of this machine is another origin, and so is another of its names."""
    origin = origin.format(port=either.port, other=either.port + 1)
    assert ask(either.port, "/", Origin=origin)[0] == 403
    assert not opens(either.port, origin=origin)


@pytest.mark.parametrize("name", ["a", "name", "x" * 40])
@pytest.mark.parametrize("count", [130, 2_000, 9_000])
def test_a_websocket_that_names_many_protocols_is_answered(
    either: Running, name: str, count: int
) -> None:
    names = ", ".join([name] * count)
    with socket.create_connection(("127.0.0.1", either.port), timeout=10) as client:
        client.sendall(
            f"GET /_stcore/stream HTTP/1.1\r\nHost: 127.0.0.1:{either.port}\r\n"
            "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
            f"Sec-WebSocket-Protocol: {names}\r\n\r\n".encode()
        )
        status = client.recv(64)
        assert status.startswith(b"HTTP/1.1 "), status
        if len(names) > 8192:
            assert status.split()[1] in (b"400", b"403", b"431")
            with contextlib.suppress(ConnectionResetError):
                while client.recv(4096):  # to its end
                    pass


def test_nobody_signs_in_where_that_was_not_set_up(either: Running) -> None:
    before = either.log.read_bytes()
    for path in ("/auth/login", "/auth/logout", "/oauth2callback", "/auth/login/", "//auth/login"):
        assert ask(either.port, path)[0] == 404, path
    assert either.log.read_bytes() == before


def test_the_page_itself_is_served(either: Running) -> None:
    own = f"http://127.0.0.1:{either.port}"
    assert ask(either.port, "/", Origin=own)[0] == 200
    assert opens(either.port, origin=own)


def test_what_a_browser_says_of_a_cross_site_request_is_heeded(either: Running) -> None:
    ways = (
        ("no-cors", "image"), ("no-cors", "script"), ("navigate", "iframe"), ("navigate", "embed"),
        ("cors", "empty"), ("websocket", "empty"),
    )  # fmt: skip
    for site in ("cross-site", "same-site"):
        for mode, dest in ways:
            said = {"Sec_Fetch_Site": site, "Sec_Fetch_Mode": mode, "Sec_Fetch_Dest": dest}
            assert ask(either.port, "/", **said)[0] == 403, said
        said = {"Sec_Fetch_Site": site, "Sec_Fetch_Mode": "navigate", "Sec_Fetch_Dest": "document"}
        assert ask(either.port, "/", **said)[0] == 200  # a link on another site may lead here


def test_refused_websockets_do_not_delay_others(either: Running) -> None:
    """Streamlit asks an outside address for its own, up to 2 s each time, in the event loop."""

    async def many() -> float:
        async def refused() -> None:
            with pytest.raises(InvalidStatus):
                async with stream(either.port, origin="http://evil.example"):
                    pass

        tasks = [asyncio.create_task(refused()) for _ in range(10)]
        started = time.monotonic()
        await asyncio.to_thread(ask, either.port, "/_stcore/health")
        took = time.monotonic() - started
        await asyncio.gather(*tasks)
        return took

    assert in_a_loop(many()) < 2.0  # 19.9 s without the door


@pytest.mark.parametrize("path", ["/_stcore/upload_file/abc/def", "/", "/learn", "/_stcore/health"])
@pytest.mark.parametrize("method", ["PUT", "POST", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW"])
def test_only_get_is_served(either: Running, method: str, path: str) -> None:
    assert ask(either.port, path, method)[0] == 405


def test_what_is_sent_is_not_kept(either: Running) -> None:
    """Eight uploads of 64 MB added 515 MB, and two minutes after leaving it was still there."""
    before = either.rss
    for method in ("PUT", "POST", "GET"):
        for length in (b"Content-Length: 67108864", b"Transfer-Encoding: chunked"):
            with socket.create_connection(("127.0.0.1", either.port), timeout=20) as raw:
                raw.sendall(
                    method.encode() + b" /_stcore/upload_file/a/b HTTP/1.1\r\n"
                    b"Host: localhost\r\n" + length + b"\r\n\r\n"
                )
                with contextlib.suppress(OSError):
                    for _ in range(64):
                        raw.sendall(
                            b"400\r\n" + b"x" * 1024 + b"\r\n" if b"ch" in length else b"x" * 2**20
                        )
    assert ask(either.port, "/_stcore/health")[0] == 200
    assert either.rss - before < 40


def test_streamlits_other_routes_are_closed(either: Running) -> None:
    for path in ("/_stcore/metrics", "/_stcore/upload_file/a/b", "/_stcore/agent",
                 "/_stcore/agent/openapi.json", "/_stcore/bidi-components/x/y", "/component/x/y",
                 "/app/static/x", "/_stcore/script-health-check", "//_stcore/metrics",
                 "/_stcore//metrics", "/_stcore/../_stcore/metrics"):  # fmt: skip
        assert ask(either.port, path)[0] in (400, 404), path


def test_no_page_can_be_framed_and_nothing_is_fetched_from_elsewhere(either: Running) -> None:
    for path in ("/", "/learn", "/_stcore/health", "/ampscope.js", "/favicon.png"):
        status, headers, _ = ask(either.port, path)
        assert status == 200, path
        policy = headers["content-security-policy"]
        assert "frame-ancestors 'none'" in policy
        assert "default-src 'self'" in policy
        assert headers["x-frame-options"] == "DENY"
        assert headers["x-content-type-options"] == "nosniff"


def test_the_code_of_charts_is_asked_for_with_the_page(either: Running) -> None:
    """Its name changes with Streamlit's version: without this test the link would go unnoticed."""
    _, _, page = ask(either.port, "/")
    given = r'<link rel="modulepreload" crossorigin href="([^"]*PlotlyChart[^"]*)">'
    (link,) = re.findall(given, page.decode())
    status, headers, code = ask(either.port, link)
    assert status == 200
    assert "javascript" in headers["content-type"]
    assert b"plotly" in code


def test_a_message_is_bounded_before_it_is_put_together(either: Running) -> None:
    before = either.rss

    async def flood() -> None:
        for _ in range(3):
            async with stream(either.port) as opened:
                with pytest.raises(ConnectionClosed) as closed:
                    await opened.send(b"x" * 2**20 for _ in range(40))  # one message, in fragments
                assert closed.value.rcvd is None or closed.value.rcvd.code == 1009

    in_a_loop(flood())
    assert ask(either.port, "/_stcore/health")[0] == 200
    assert either.rss - before < 40


def test_a_value_of_another_type_counts_as_none(either: Running) -> None:
    """Of 500 states with wrong types 195 ended in a page that could not be drawn."""

    async def attack() -> str:
        async with stream(either.port) as opened:
            said = await drawn(opened, "new_probe")
            wrong = BackMsg()
            wrong.rerun_script.page_name = "new_probe"
            for id_ in sorted(set(re.findall(r'id: "(\$\$ID-[^"]+)"', said))):
                state = wrong.rerun_script.widget_states.widgets.add(id=id_)
                if "start" in id_:
                    state.string_value = "x"
                elif len(id_) % 2:
                    state.string_array_value.data.append("x")
                else:
                    state.double_array_value.data.append(float("nan"))
            assert len(wrong.rerun_script.widget_states.widgets) > 10
            return await drawn(opened, wrong=wrong)

    said = in_a_loop(attack())
    assert "could not be drawn" not in said
    assert "New probe" in said


@pytest.mark.skipif("lessons" not in extensions.all_extensions(), reason="two pages of lessons")
def test_a_widget_of_another_page_is_no_widget_here(either: Running) -> None:
    """A forged click on the switch of the lesson before ended in an error of the page."""

    async def attack() -> str:
        async with stream(either.port) as opened:
            found = []
            for page in ("learn_01_numbers", "learn_02_gradients"):
                said = await drawn(opened, page)
                found += re.findall(r'id: "(\$\$ID-[^"]+-widget:type)"', said)
            answers = []
            for id_ in dict.fromkeys(found):
                forged = BackMsg()
                forged.rerun_script.page_name = "learn_02_gradients"
                forged.rerun_script.widget_states.widgets.add(id=id_, bool_value=True)
                answers.append(await drawn(opened, wrong=forged))
            assert len(answers) == 2
            return "\n".join(answers)

    before = either.log.read_text().count("KeyError")
    said = in_a_loop(attack())
    assert "exception {" not in said
    assert either.log.read_text().count("KeyError") == before


def test_nothing_leaves_the_machine(either: Running) -> None:
    """Start, pages, refused and accepted websockets, and a quarter of all paths that asked."""
    for page in ("", "learn", "hardware", "new_probe", "diagnosis"):
        in_a_loop(draw(either.port, page))
    for origin in ("http://evil.example", "http://8.8.8.8", "null"):
        assert not opens(either.port, origin=origin)
    either_log = either.log.read_text()
    assert "External URL" not in either_log
    assert "Network URL" not in either_log
    assert not either.outgoing.exists(), either.outgoing.read_text()


def has_namespaces() -> bool:
    done = subprocess.run(["unshare", "-rn", "true"], capture_output=True, check=False)
    return done.returncode == 0


def test_it_works_where_there_is_no_network(tmp_path: Path) -> None:
    """In a network namespace that has loopback alone: no wait, no error."""
    if sys.platform != "linux" or not has_namespaces():
        pytest.skip("no right to make a network namespace")
    script = (
        f"import sys; sys.path[:0] = [{str(ROOT)!r}]\n"
        "from pathlib import Path\nfrom tests.helpers import dashboard_server as t\n"
        f"with t.running(Path({str(tmp_path)!r}), t.PLAIN) as found:\n"
        "    t.in_a_loop(t.draw(found.port, ''))\n"
        "    assert not t.opens(found.port, origin='http://evil.example')\n"
        "    assert not found.outgoing.exists(), found.outgoing.read_text()\n"
        "    print('drawn')\n"
    )
    inside = f'ip link set lo up && exec {sys.executable} -c "$SCRIPT"'
    done = subprocess.run(
        ["unshare", "-rn", "sh", "-c", inside], capture_output=True, text=True, timeout=120,
        env={**os.environ, "SCRIPT": script}, check=False,
    )  # fmt: skip
    assert done.stdout == "drawn\n", done.stderr


def test_streamlit_run_listens_on_loopback_alone(either: Running) -> None:
    listening = [
        line.split()[1].partition(":")[0]
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        for line in Path(table).read_text().splitlines()[1:]
        if line.split()[3] == "0A" and int(line.split()[1].partition(":")[2], 16) == either.port
    ]
    assert set(listening) <= {"0100007F", "00000000000000000000000001000000"}
    assert listening


def test_websockets_are_bounded_for_a_client_and_the_teacher_still_enters(tmp_path: Path) -> None:
    """With 1,024 open files, 254 websockets blocked every other."""
    limits = ("sh", "-c", 'ulimit -n 1024; exec "$@"', "sh")
    arguments = [*AMPSCOPE, "--classroom"]
    with running(tmp_path, arguments, limits, AMPSCOPE_CLASSROOM_TOKEN=TOKEN) as found:
        in_a_loop(_fill(found.port))
        assert opens(found.port)  # they have left


async def _fill(port: int) -> None:
    most, most_each = 142, 71  # of 1,024 open files
    async with contextlib.AsyncExitStack() as stack:
        for number in range(most_each):
            opened = await stack.enter_async_context(stream(port))
            if number % 8 == 0:
                await drawn(opened, "learn")
        for _ in range(3):
            with pytest.raises(InvalidStatus):
                await stack.enter_async_context(stream(port))
        forwarded = {"X-Forwarded-For": "10.9.8.7"}  # as a proxy on this machine says
        for _ in range(most - most_each):
            await stack.enter_async_context(
                connect(f"ws://127.0.0.1:{port}/_stcore/stream", subprotocols=["streamlit"],
                        additional_headers=forwarded, proxy=None)  # type: ignore[call-arg, list-item]
            )  # fmt: skip
        for client in ("10.9.8.7", "10.9.8.8"):
            with pytest.raises(InvalidStatus):
                await connect(
                    f"ws://127.0.0.1:{port}/_stcore/stream", subprotocols=["streamlit"],
                    additional_headers={"X-Forwarded-For": client}, proxy=None,
                )  # type: ignore[call-arg, list-item]  # fmt: skip
        assert (await asyncio.to_thread(ask, port, "/_stcore/health"))[0] == 200
        teacher = await stack.enter_async_context(stream(port, cookie=COOKIE, proof=PROOF))
        assert "Class" in await drawn(teacher)


def test_capacity_follows_the_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    for files, expected in ((65_536, (512, 128)), (1024, (142, 71)), (256, (8, 4)), (64, (8, 4))):
        monkeypatch.setattr(server, "open_files", lambda files=files: files)
        assert server.capacity() == expected


def test_the_dashboard_asks_for_its_token(guarded: Running) -> None:
    assert not opens(guarded.port)
    wrong = (
        (COOKIE, ""), ("", PROOF), (COOKIE, "0" * 64), (COOKIE[:-1], PROOF), (COOKIE, TOKEN),
        (f"{COOKIE[:20]}=x", PROOF), (COOKIE, PROOF.upper()),
    )  # fmt: skip
    for cookie, proof in wrong:
        assert not opens(guarded.port, cookie=cookie, proof=proof), (cookie, proof)
    assert opens(guarded.port, cookie=COOKIE, proof=PROOF)
    assert opens(guarded.port, cookie=f"a=b; {COOKIE}", proof=PROOF)


def test_the_link_is_exchanged(guarded: Running) -> None:
    status, headers, body = ask(guarded.port, f"/open/{TOKEN}")
    assert (status, headers["location"]) == (303, f"/#ampscope={PROOF}")
    assert headers["cache-control"] == "no-store"
    assert headers["set-cookie"].startswith(f"{COOKIE};")
    for wanted in ("HttpOnly", "SameSite=strict", "Path=/"):
        assert wanted in headers["set-cookie"]
    assert TOKEN not in str(headers) + body.decode()
    for wrong in (TOKEN[:-1], TOKEN + "x", "%00", "%C3%A9", PROOF):
        status, headers, _ = ask(guarded.port, f"/open/{wrong}")
        assert status in (400, 403, 404)
        assert "ampscope" not in headers.get("set-cookie", "")
    assert ask(guarded.port, f"/teacher/{TOKEN}")[0] == 403  # there is no class


def test_files_of_a_page_need_the_cookie(guarded: Running) -> None:
    assert ask(guarded.port, "/media/abc.csv")[0] == 403
    assert ask(guarded.port, "/media/abc.csv", Cookie=COOKIE)[0] == 404
    assert ask(guarded.port, "/ampscope/open")[0] == 401
    proven = {"Cookie": COOKIE, "X_Ampscope_Proof": PROOF}
    assert ask(guarded.port, "/ampscope/open", **proven)[0] == 204


def test_the_printed_link_is_the_one_and_no_command_line_has_it(guarded: Running) -> None:
    assert f"Dashboard: {guarded.url}/open/{TOKEN}\n" in guarded.log.read_text()
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            assert TOKEN.encode() not in entry.read_bytes()


def test_nobody_can_listen_on_the_other_loopback_address_while_it_runs(either: Running) -> None:
    """A browser may look localhost up as [::1]: there the link's token went to another program."""
    with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError, match="in use"):
            other.bind(("::1", either.port))


@pytest.mark.parametrize(
    ("host", "other"), [("127.0.0.1", "::1"), ("localhost", "::1"), ("::1", "127.0.0.1")]
)
def test_a_port_that_another_program_has_on_the_other_loopback_address_is_refused(
    host: str, other: str, tmp_path: Path
) -> None:
    with socket.socket(socket.AF_INET6 if ":" in other else socket.AF_INET) as taken:
        taken.bind((other, 0))
        taken.listen()
        port = taken.getsockname()[1]
        run = [sys.executable, *AMPSCOPE, "--host", host, "--port", str(port)]
        done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert "/open/" not in done.stdout + done.stderr
        assert other in done.stderr
        assert f":{port} is taken" in done.stderr
        assert len(done.stderr.splitlines()) == 1
        if host == "127.0.0.1":
            plain = [sys.executable, *PLAIN, "--server.port", str(port)]
            done = subprocess.run(plain, cwd=tmp_path, capture_output=True, text=True, check=False)
            assert done.returncode == 1
            assert "Traceback" not in done.stderr
            assert f"[::1]:{port} is taken" in done.stdout


@pytest.mark.parametrize(
    ("host", "shown"), [("localhost", "127.0.0.1"), ("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")]
)
def test_a_link_names_an_address(host: str, shown: str) -> None:
    assert cli._shown(loopback.address(host)) == shown


@pytest.mark.parametrize("host", ["0", "0.0", "0x0", "0.0.0.0"])
def test_every_address_is_known_by_each_of_its_spellings(host: str) -> None:
    """Bound as such, it is held in the other family, too."""
    assert loopback.address(host) == "0.0.0.0"
    assert loopback.address("::0") == "::"


@pytest.mark.parametrize(
    "given", [["--port", "-1"], ["--port", "65536"], ["--host", ""], ["--host", "a" * 70]]
)
def test_an_address_that_cannot_be_served_is_one_sentence(given: list[str], tmp_path: Path) -> None:
    store = str(tmp_path / "runs.db")
    done = CliRunner().invoke(command, ["dashboard", "--headless", "--store", store, *given])
    assert done.exit_code == 2, done.output
    assert done.exception is None or isinstance(done.exception, SystemExit)
    assert "Dashboard:" not in done.output


@pytest.mark.slow
def test_a_free_port_is_chosen_and_its_link_works_on_every_address(tmp_path: Path) -> None:
    run = [sys.executable, *AMPSCOPE, "--host", "0", "--port", "0", "--store", "runs.db"]
    with subprocess.Popen(run, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            link = process.stdout.readline().removeprefix("Dashboard: ").strip()
            port = urlsplit(link).port
            assert port
            for _ in range(600):
                health = f"http://127.0.0.1:{port}/_stcore/health"
                with contextlib.suppress(OSError), urllib.request.urlopen(health):
                    break
                time.sleep(0.1)
            assert ask(port, urlsplit(link).path)[0] == 303
            with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as other:
                other.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                with pytest.raises(OSError, match="in use"):
                    other.bind(("::", port))
        finally:
            process.terminate()


@pytest.mark.browser
def test_a_browser_with_the_link_is_let_in_and_one_without_is_told(
    guarded: Running, browser_page: Page
) -> None:
    page = browser_page
    page.goto(guarded.url)
    expect(page.get_by_role("heading", name="This dashboard is locked")).to_be_visible()
    page.goto(f"{guarded.url}/open/{TOKEN}")
    browser.settle(page)
    assert page.url == f"{guarded.url}/"
    page.goto(f"{guarded.url}/learn")
    browser.settle(page)
    expect(page.get_by_role("heading", name="Lessons").first).to_be_visible()
    page.reload()
    browser.settle(page)
    assert TOKEN not in page.evaluate("document.documentElement.outerHTML + document.cookie")
    assert PROOF not in page.evaluate("document.documentElement.outerHTML + document.cookie")


@pytest.mark.browser
def test_a_page_on_another_port_of_this_host_cannot_use_the_dashboard(
    guarded: Running, browser_page: Page, tmp_path: Path
) -> None:
    """Same site, so the cookie goes along; another origin, so the proof does not."""
    page, other = browser_page, browser._free_port()
    (tmp_path / "index.html").write_text("<!doctype html><title>other</title>")
    site = subprocess.Popen(
        [sys.executable, "-m", "http.server", str(other), "--bind", "127.0.0.1"], cwd=tmp_path,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        page.goto(f"{guarded.url}/open/{TOKEN}")
        browser.settle(page)
        browser.settle(page)
        for _ in range(50):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{other}"):
                break
            time.sleep(0.1)
        page.goto(f"http://127.0.0.1:{other}/")
        result = page.evaluate(
            """async (port) => {
              const url = `ws://127.0.0.1:${port}/_stcore/stream`;
              const socket = await new Promise((done) => {
                const made = new WebSocket(url, ["streamlit"]);
                made.onopen = () => done("open"); made.onerror = () => done("refused");
              });
              const read = await fetch(`http://127.0.0.1:${port}/`, {credentials: "include"})
                .then(() => "read", () => "refused");
              const frame = document.createElement("iframe");
              frame.src = `http://127.0.0.1:${port}/`;
              document.body.append(frame);
              await new Promise((done) => { frame.onload = done; setTimeout(done, 3000); });
              let inside = "refused";
              try { inside = frame.contentDocument ? "refused" : "refused"; } catch (e) {}
              return {socket, read, proof: localStorage.length};
            }""",
            guarded.port,
        )
        assert result == {"socket": "refused", "read": "refused", "proof": 0}
    finally:
        site.terminate()
        site.wait(30)


@pytest.mark.browser
def test_pages_keep_to_their_policy_and_fetch_nothing_from_elsewhere(
    either: Running, browser_page: Page
) -> None:
    page = browser_page
    asked: list[str] = []
    said: list[str] = []
    page.on("request", lambda r: asked.append(r.url))
    page.on("console", lambda m: said.append(m.text))
    refused: list[str] = []
    page.on("response", lambda r: refused.append(r.url) if r.status >= 400 else None)
    for path in ("", "training", "gradients", "layers", "learn_01_numbers", "hardware", "op_lists"):
        page.goto(f"{either.url}/{path}")
        browser.settle(page)
    here = (f"{either.url}/", f"ws://127.0.0.1:{either.port}/", "data:", f"blob:{either.url}/")
    assert [url for url in asked if not url.startswith(here)] == []
    assert [url for url in refused if "/_stcore/" in url] == []  # the server is where it is sought
    assert [text for text in said if "Content Security Policy" in text or "violates" in text] == []


def test_no_token_is_an_answer_too() -> None:
    assert cli._announced("http://localhost:8501", "") == "http://localhost:8501/"


def test_the_browser_gets_the_link_in_a_file_that_is_this_users_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(cli.webbrowser, "open", opened.append)
    with cli._browser(f"http://localhost:1/open/{TOKEN}"):
        (uri,) = opened
        assert TOKEN not in uri
        path = Path(uri.removeprefix("file://"))
        assert TOKEN in path.read_text()
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not path.exists()


def test_a_short_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMPSCOPE_TOKEN", "secret")
    done = CliRunner().invoke(command, ["dashboard", "--headless"])
    assert "at least 16" in done.output + str(done.exception)


@pytest.mark.parametrize(
    ("options", "says", "not_says"),
    [
        ({}, ("can use this dashboard", "Without TLS"), ()),
        ({"AMPSCOPE_TOKEN": TOKEN}, ("Without TLS",), ("can use this dashboard",)),
        ({"AMPSCOPE_CLASSROOM_TOKEN": TOKEN}, ("Without TLS",), ("can use this dashboard",)),
        ({"AMPSCOPE_CONTAINER": "1"}, (), ("WARNING",)),
    ],
)
def test_an_open_address_is_warned_of(
    options: dict[str, str], says: tuple[str, ...], not_says: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    given = {"server.address": "0.0.0.0", "server.sslCertFile": ""}
    monkeypatch.setattr(server.streamlit, "get_option", given.get)
    text = " ".join(server.exposed(options))
    assert all(part in text for part in says)
    assert not any(part in text for part in not_says)
    given["server.address"] = "localhost"
    assert not server.exposed(options)


def test_a_server_on_all_addresses_knows_its_own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, object] = {"server.address": "0.0.0.0", "server.allowedHosts": ["lab.example"]}
    monkeypatch.setattr(server.streamlit, "get_option", given.get)
    monkeypatch.setenv("AMPSCOPE_PUBLIC_URL", "https://amp.example.org/class")
    hosts = server.Hosts()
    assert hosts.knows(f"{socket.gethostname()}:8501")
    assert hosts.knows("amp.example.org")
    assert hosts.knows("lab.example:1")
    assert hosts.public_origin() == "https://amp.example.org"
    for foreign in ("10.255.254.253:8501", "evil.example", "0.0.0.0:8501", "amp.example.org.evil"):
        assert not hosts.knows(foreign)
    given["server.address"] = "localhost"
    assert not server.Hosts().knows(socket.gethostname())
