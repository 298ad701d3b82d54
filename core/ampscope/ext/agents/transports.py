"""How a client reaches the server: stdio, or HTTP on loopback with a token.

Over stdio the protocol has standard output for itself; everything else goes to standard error.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import signal
import socket
import sys

import anyio
import uvicorn
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from ampscope import loopback
from ampscope.cli import stopping
from ampscope.errors import BadInput
from ampscope.ext.agents.jobs import stop_all
from ampscope.ext.agents.server import AgentServer

HOST, PATH = "127.0.0.1", "/mcp"
GRACE_S = 3  # that open requests have to end after a signal, over HTTP


def serve_stdio(server: AgentServer) -> None:
    """Until the client closes standard input, or a signal comes."""
    anyio.run(_until_signal, server)


async def _until_signal(server: AgentServer) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(_stopped_by_signal)
        await server.run_stdio_async()
        group.cancel_scope.cancel()


async def _stopped_by_signal() -> None:
    """Not by an exception, as in other commands: the thread that reads standard input cannot be
    interrupted, and would be waited for."""
    numbers = [n for n in stopping.SIGNALS if signal.getsignal(n) is not signal.SIG_IGN]
    with anyio.open_signal_receiver(*numbers) as signals:
        async for _ in signals:
            stop_all()
            os.write(2, stopping.SENTENCE.encode())
            os._exit(stopping.EXIT_STOPPED)


def serve_http(server: AgentServer, port: int) -> None:
    """On loopback alone, until a signal. The token is made here and printed once, to standard
    error. Raises BadInput for a port that cannot be had."""
    with (
        contextlib.ExitStack() as stack,
        socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listening,
    ):
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((HOST, port))
            listening.listen()  # a client that reads the address below can connect
        except (OSError, OverflowError) as error:
            raise BadInput(f"Port {port} of {HOST} cannot be had: {error}.") from error
        bound, token = listening.getsockname()[1], secrets.token_urlsafe(32)
        stack.enter_context(loopback.held(HOST, bound))
        guarded = RequestGuard(server.streamable_http_app(host=HOST), token, bound)
        print(
            f"ampscope: http://{HOST}:{bound}{PATH}\nampscope: Authorization: Bearer {token}",
            file=sys.stderr,
            flush=True,
        )
        config = uvicorn.Config(
            guarded,
            log_level="warning",
            access_log=False,
            lifespan="on",
            timeout_graceful_shutdown=GRACE_S,
        )
        uvicorn.Server(config).run(sockets=[listening])


class RequestGuard:
    """Refuses, before the protocol sees it, a request with another name (421, against DNS
    rebinding), from another origin (403), or without the token (401)."""

    def __init__(self, app: ASGIApp, token: str, port: int) -> None:
        names = [f"{name}:{port}" for name in (HOST, "localhost")]
        self._app = app
        self._expected = f"Bearer {token}".encode()
        self._hosts = {name.encode() for name in names}
        self._origins = {f"http://{name}".encode() for name in names}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope) if scope["type"] == "http" else (403, "HTTP alone.")
        if refusal is None:
            await self._app(scope, receive, send)
            return
        await PlainTextResponse(f"{refusal[1]}\n", refusal[0])(scope, receive, send)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        values: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            values.setdefault(name.lower(), []).append(value)
        hosts, origins = values.get(b"host", []), values.get(b"origin", [])
        if len(hosts) != 1 or hosts[0].lower() not in self._hosts:
            return 421, "This server answers to its loopback address alone."
        if any(origin.lower() not in self._origins for origin in origins):
            return 403, "Requests from other origins are refused."
        tokens = values.get(b"authorization", [])
        if len(tokens) != 1 or not hmac.compare_digest(tokens[0], self._expected):
            return 401, "The token is missing or wrong: Authorization: Bearer TOKEN."
        return None
