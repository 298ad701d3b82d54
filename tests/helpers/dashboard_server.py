"""A dashboard server as a process, its HTTP and websocket clients, and what it sends elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import subprocess
import sys
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import psutil
from streamlit.proto.BackMsg_pb2 import BackMsg
from streamlit.proto.ForwardMsg_pb2 import ForwardMsg
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus

from tests.helpers import browser

ROOT = Path(__file__).resolve().parents[2]
PLAIN = ["-m", "streamlit", "run", str(ROOT / "app" / "main.py"), "--server.headless", "true"]
# Notes each attempt of the server, or of what it starts, to reach another machine or a name server.
WATCHED = """
import ipaddress, os, sys
def is_local(host):
    if host in (None, "", "localhost", "0.0.0.0", "::", b"localhost"):
        return True
    try:
        return ipaddress.ip_address(host.decode() if isinstance(host, bytes) else host).is_loopback
    except ValueError:
        return False
def watch(event, arguments):
    if event == "socket.connect" or event == "socket.sendto":
        address = arguments[1]
        host = address[0] if isinstance(address, tuple) else None
    elif event in ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"):
        host = arguments[0]
    else:
        return
    if not is_local(host):
        with open(os.environ["OUTGOING"], "a") as file:
            file.write(f"{event} {host!r}\\n")
sys.addaudithook(watch)
"""
T = TypeVar("T")


class Running:
    """A server: its port, its process, what it printed and where it wanted to go."""

    def __init__(self, port: int, process: subprocess.Popen[bytes], folder: Path) -> None:
        self.port, self.process = port, process
        self.log, self.outgoing = folder / "log.txt", folder / "outgoing.txt"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def rss(self) -> float:
        """MB of the server and its children."""
        own = psutil.Process(self.process.pid)
        return sum(p.memory_info().rss for p in (own, *own.children(recursive=True))) / 1e6


@contextlib.contextmanager
def running(
    folder: Path, arguments: list[str], before: tuple[str, ...] = (), **environment: str
) -> Iterator[Running]:
    """A server on loopback, with its attempts to reach another machine written down."""
    (folder / "sitecustomize.py").write_text(WATCHED)
    port = browser._free_port()
    flag = "--port" if "dashboard" in arguments else "--server.port"
    run = [*before, sys.executable, *arguments, flag, str(port)]
    environment = {
        **browser._environment(), "PYTHONPATH": str(folder),
        "OUTGOING": str(folder / "outgoing.txt"), "AMPSCOPE_STORE": str(folder / "runs.db"),
        **environment,
    }  # fmt: skip
    with (folder / "log.txt").open("wb") as output:
        process = subprocess.Popen(
            run, stdout=output, stderr=output, env=environment, cwd=folder, start_new_session=True
        )
    try:
        browser._wait_until_healthy(f"http://127.0.0.1:{port}", process, folder / "log.txt")
        yield Running(port, process, folder)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait(browser.START_S)


def ask(
    port: int, path: str = "/", method: str = "GET", body: bytes | None = None, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, body=body, headers=named)
        answer = connection.getresponse()
        return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
    finally:
        connection.close()


def in_a_loop(work: Coroutine[Any, Any, T]) -> T:
    """In a thread of its own: Playwright's loop runs in this one once a browser was opened."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()


def stream(
    port: int, host: str = "", origin: str | None = None, cookie: str = "", proof: str = "",
    timeout: float = 30,
) -> connect:  # fmt: skip
    """The page's websocket, as a browser opens it at ``host``."""
    headers = {"Cookie": cookie} if cookie else {}
    return connect(
        f"ws://{host or f'127.0.0.1:{port}'}/_stcore/stream", host="127.0.0.1", port=port,
        origin=origin, subprotocols=["streamlit", *([f"ampscope.{proof}"] if proof else [])],
        additional_headers=headers, proxy=None, open_timeout=timeout, max_size=None,
        compression=None,
    )  # type: ignore[call-arg]  # fmt: skip


async def drawn(
    opened: ClientConnection, page: str = "", query: str = "", wrong: BackMsg | None = None
) -> str:
    """What a page sends, to its end, as text."""
    wanted = wrong or BackMsg()
    if wrong is None:
        wanted.rerun_script.page_name, wanted.rerun_script.query_string = page, query
    await opened.send(wanted.SerializeToString())
    received = []
    while True:
        data = await asyncio.wait_for(opened.recv(), 60)
        assert isinstance(data, bytes)
        message = ForwardMsg.FromString(data)
        received.append(str(message))
        if message.WhichOneof("type") == "script_finished":
            return "\n".join(received)


def opens(port: int, **how: Any) -> bool:
    """Whether a websocket is accepted and draws Home."""

    async def opening() -> bool:
        try:
            async with stream(port, **how) as opened:
                return "script_finished" in await drawn(opened)
        except InvalidStatus as refused:
            if refused.response.status_code not in (403, 503):
                raise
            return False

    return in_a_loop(opening())


async def draw(port: int, page: str) -> None:
    async with stream(port) as opened:
        await drawn(opened, page)
