"""The server from outside: over stdio with the SDK's client, over HTTP with its token, and how the
children that it starts end."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from pathlib import Path
from typing import Any

import anyio
import httpx2
import psutil
import pytest
from click.testing import CliRunner
from mcp import Client, StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client

from ampscope.cli.main import main
from ampscope.ext.agents.jobs import run_child
from ampscope.ext.agents.transports import RequestGuard
from tests.helpers.dashboard_server import in_a_loop

TOKEN, PORT = "t0ken", 4321
OVERFLOWS = """
import sys, torch
torch.manual_seed(0)
m = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
with torch.no_grad(): m[1].weight.mul_(3e5); m[2].weight.mul_(1e-5)
o = torch.optim.SGD(m.parameters(), 1e-9)
print("arguments", sys.argv[1:])
for i in range(6):
    o.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = m(torch.randn(16, 8)).float().mean()
    loss.backward(); o.step()
"""
Message = MutableMapping[str, Any]
GOOD = {"host": f"127.0.0.1:{PORT}", "authorization": f"Bearer {TOKEN}"}


def status(headers: list[tuple[str, str]], kind: str = "http") -> int:
    """What the guard answers; 200 is what the application behind it says."""
    sent: list[Message] = []

    async def application(
        scope: Message,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    scope = {"type": kind, "method": "POST", "path": "/mcp", "headers": raw}
    in_a_loop(RequestGuard(application, TOKEN, PORT)(scope, receive, send))
    return int(sent[0]["status"])


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, 200),
        ({"host": f"LOCALHOST:{PORT}"}, 200),
        ({"origin": f"http://127.0.0.1:{PORT}"}, 200),
        ({"host": "evil.example"}, 421),
        ({"host": "127.0.0.1"}, 421),
        ({"host": f"127.0.0.1:{PORT + 1}"}, 421),
        ({"host": f"127.0.0.1:{PORT}.evil.example"}, 421),
        ({"host": None}, 421),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": f"http://127.0.0.1:{PORT + 1}"}, 403),
        ({"origin": "null"}, 403),
        ({"authorization": None}, 401),
        ({"authorization": f"Bearer {TOKEN}x"}, 401),
        ({"authorization": f"Bearer {TOKEN[:-1]}"}, 401),
        ({"authorization": TOKEN}, 401),
        ({"authorization": "Bearer tökén"}, 401),
    ],
)
def test_who_is_let_in(changed: dict[str, str | None], expected: int) -> None:
    headers = {**GOOD, **changed}
    assert status([(n, v) for n, v in headers.items() if v is not None]) == expected


def test_a_header_that_stands_twice_is_refused() -> None:
    assert status([*GOOD.items(), ("host", "evil.example")]) == 421
    assert status([*GOOD.items(), ("authorization", "Bearer other")]) == 401
    assert (
        status([*GOOD.items(), ("origin", f"http://127.0.0.1:{PORT}"), ("origin", "null")]) == 403
    )


def test_a_websocket_is_refused() -> None:
    assert status([*GOOD.items()], "websocket") == 403


def test_a_child_is_heard(tmp_path: Path) -> None:
    code = "import sys; print(1, end=''); print('a\\nRunning: b', file=sys.stderr); sys.exit(3)"
    heard: list[str] = []
    done = in_a_loop(run_child([sys.executable, "-c", code], tmp_path, heard.append))
    assert done == (3, "1", "Running: b")
    assert heard == ["a", "Running: b"]


def test_a_cancelled_child_is_told_to_stop(tmp_path: Path) -> None:
    """It may clean up, and is gone when the cancelled call returns."""
    code = """
import os, pathlib, signal, sys, time
def stop(*_):
    pathlib.Path("stopped").write_text("yes")
    sys.exit(1)
signal.signal(signal.SIGTERM, stop)
print(os.getpid(), file=sys.stderr, flush=True)
time.sleep(60)
"""
    pids: list[int] = []

    async def cancelled() -> None:
        async with anyio.create_task_group() as group:

            def hear(text: str) -> None:
                pids.append(int(text))
                group.cancel_scope.cancel()

            await run_child([sys.executable, "-c", code], tmp_path, hear)

    in_a_loop(cancelled())
    assert (tmp_path / "stopped").read_text() == "yes"
    assert not psutil.pid_exists(pids[0])


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--scripts", "nowhere"], "no folder nowhere"),
        (["--http", "1"], "Port 1 of 127.0.0.1 cannot be had"),
    ],
)
def test_a_wrong_start_is_one_sentence(
    arguments: list[str], what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if "--http" in arguments and os.geteuid() == 0:
        held = _holds_a_port()
        port = next(held)
        arguments, what = ["--http", str(port)], f"Port {port} of 127.0.0.1 cannot be had"
    done = CliRunner().invoke(main, ["mcp", "--store", str(tmp_path / "r.db"), *arguments])
    assert done.exit_code == 2
    assert what in done.stderr
    assert done.stdout == ""


def test_a_port_that_another_program_has_on_the_other_loopback_address_is_refused(
    tmp_path: Path,
) -> None:
    with socket.socket(socket.AF_INET6) as other:
        other.bind(("::1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        done = CliRunner().invoke(main, ["mcp", "--store", str(tmp_path / "r.db"), "--http", port])
    assert done.exit_code == 2
    assert f"[::1]:{port} is taken" in done.stderr
    assert "Bearer" not in done.stderr


def _holds_a_port() -> Iterator[int]:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


def test_without_the_extra_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = CliRunner().invoke(main, ["mcp"])
    assert done.exit_code == 2
    assert "pip install 'ampscope[mcp]'" in done.stderr


def command(*arguments: object) -> list[str]:
    return ["-P", "-m", "ampscope.cli.main", "mcp", *map(str, arguments)]


def test_over_stdio(tmp_path: Path) -> None:
    """A diagnosis with its progress, a fix tried by hand, one that is cancelled, and a picture."""
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "train.py").write_text(OVERFLOWS)
    store = tmp_path / "r.db"
    arguments = command("--scripts", folder, "--store", store)
    heard: list[tuple[float, str]] = []

    async def hear(progress: float, total: float | None, message: str | None) -> None:
        heard.append((progress, message or ""))

    async def walk() -> None:
        server = StdioServerParameters(command=sys.executable, args=arguments, env=dict(os.environ))
        async with Client(stdio_client(server)) as client:
            asked = {"script": "train.py", "args": ["--x", "1"], "verify": False}
            found = await client.call_tool("diagnose", asked, progress_callback=hear)
            assert not found.is_error, found.content
            verdict = found.structured_content
            assert verdict is not None
            assert verdict["findings"][0]["cause"] == "activation_overflow"
            assert verdict["findings"][0]["fix"]["verified"] is None
            tried = await client.call_tool(
                "try_fix", {"run_id": verdict["run"], "control": "fp32_modules:1,2"}
            )
            assert not tried.is_error, tried.content
            assert tried.structured_content is not None
            assert tried.structured_content["state"] == "finished"
            assert tried.structured_content["cured"] is True
            chart = await client.call_tool("render_chart", {"run_id": verdict["run"]})
            assert chart.content[0].type == "image"
            children = psutil.Process().children()  # other tests have left some of theirs
            serving = next(child for child in children if "mcp" in child.cmdline())
            for child in (serving, *serving.children(recursive=True)):
                maps = {Path(m.path).name for m in child.memory_maps()}
                assert not [name for name in maps if name.startswith("libtorch")]

            async def cancelled() -> None:
                async def stop(progress: float, total: float | None, message: str | None) -> None:
                    if "Running" in (message or ""):
                        group.cancel_scope.cancel()

                async with anyio.create_task_group() as group:
                    await client.call_tool(
                        "diagnose", {"script": "train.py"}, progress_callback=stop
                    )

            await cancelled()
            again = await client.call_tool("list_runs", {"limit": 100})
            assert not again.is_error

    in_a_loop(walk())
    words = [message for _, message in heard]
    assert any("Running: baseline" in text for text in words)
    assert any("Running: fp32" in text for text in words)
    seconds = [progress for progress, _ in heard]
    assert all(one < other for one, other in itertools.pairwise(seconds))


def test_over_http(tmp_path: Path) -> None:
    """On loopback alone; the token is said once, on standard error, and needed."""
    arguments = command("--http", 0, "--store", tmp_path / "r.db")
    server = subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert server.stderr is not None
        assert server.stdout is not None
        address = server.stderr.readline().removeprefix("ampscope: ").strip()
        said = server.stderr.readline().strip()
        match = re.fullmatch(r"ampscope: Authorization: (Bearer [\w-]{40,})", said)
        assert match is not None, said
        bound = psutil.Process(server.pid).net_connections(kind="inet")
        assert {c.laddr.ip for c in bound if c.status == psutil.CONN_LISTEN} == {"127.0.0.1"}

        async def tools(authorization: str) -> set[str]:
            async with (
                httpx2.AsyncClient(headers={"Authorization": authorization}) as http,
                Client(streamable_http_client(address, http_client=http)) as client,
            ):
                return {tool.name for tool in (await client.list_tools()).tools}

        assert "diagnose" in in_a_loop(tools(match[1]))
        body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/list"})
        for headers, code in (
            ({}, 401),
            ({"Authorization": "Bearer x"}, 401),
            ({"Authorization": match[1], "Origin": "https://evil.example"}, 403),
            ({"Authorization": match[1], "Host": "evil.example"}, 421),
        ):
            answer = httpx2.post(address, content=body, headers=headers)
            assert answer.status_code == code
        server.send_signal(signal.SIGTERM)
        output, errors = server.communicate(timeout=60)
        assert output == ""
        assert "Traceback" not in errors
        assert match[1].removeprefix("Bearer ") not in errors
    finally:
        with contextlib.suppress(ProcessLookupError):
            server.kill()
        server.communicate()
