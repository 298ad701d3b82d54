"""What reaches Streamlit, and from whom: the checks in front of every request of the dashboard.

`streamlit run app/main.py` and `ampscope dashboard` both serve app/main.py's ``app``, which has the
middleware :class:`RequestGate`. It decides before Streamlit sees a request:

- Host and Origin. Only names of this server pass: loopback, the address it is bound to, and what
  the operator named. A page under any other name (DNS rebinding), on another port or of another
  site gets nothing, and Streamlit never comes to ask the internet for this machine's address.
- Methods, bodies, routes. The pages only read; nothing is uploaded, so only GET without a body is
  served, and of Streamlit's own routes those that its page uses.
- Number and size: websockets for each client and in all, and bytes of a message.
- The secret, where there is one (`ampscope dashboard`, or AMPSCOPE_TOKEN with `streamlit run`).

    GET /open/TOKEN      ->  this browser may use the dashboard
    GET /teacher/TOKEN   ->  this browser is the teacher's

Such a link is exchanged for two things, and a websocket must show both. A cookie (HttpOnly,
SameSite=Strict, until the browser is closed): but a browser sends it to every port of this host. So
there is a second value, the proof, which the page keeps in the storage of its origin, port included
(see proof.js), and sends as a subprotocol, which no page of another origin can.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import ipaddress
import os
import re
import secrets
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import streamlit
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from streamlit import cli_util, config, net_util
from streamlit.runtime.state.common import user_key_from_element_id
from streamlit.runtime.state.session_state import Serialized, Value, WStates
from streamlit.web.server import server_util

from ampscope import loopback
from ampscope.errors import BadInput
from app import options, permissions

WRONG = "This is not the link of this dashboard. The terminal that runs it shows the link."
WRONG_TEACHER = "This is not the teacher's link of this class. The terminal shows the link."
LOCKED = """<!doctype html><html lang="en"><meta charset="utf-8"><title>ampscope</title>
<body style="font-family:sans-serif;max-width:40rem;margin:4rem auto;padding:0 1rem">
<h1>This dashboard is locked</h1>
<p>Open the link that <code>ampscope dashboard</code> prints in its terminal. The link holds for
this browser until it is closed, or until the dashboard is started again.</p></body></html>"""
UNKNOWN_HOST = (
    "This server is not known under the name in this request. If the name is right, start the "
    "dashboard with --public-url (ampscope dashboard) or --server.allowedHosts (streamlit run)."
)

SHORTEST_TOKEN = 16  # characters
MAX_MESSAGE = 1_000_000  # bytes of a websocket message from a browser
PER_CLIENT = 128  # websockets of one address: a class behind one router has one
IN_ALL = 512
PROVEN = 64  # in addition, for browsers that showed the secret
FILES_EACH = 4  # open files of a session that draws a page: its socket, and the store's
FILES_KEPT = 200  # for everything else
OPEN_FILES = 65_536
_KEEP, CLOSED_S = "server.disconnectedSessionTTL", 10
IN_CONTAINER = "AMPSCOPE_CONTAINER"  # set by the Dockerfile: what is published decides there
OWN_NAMES_S = 10.0  # for how long what was read of this machine's addresses is used

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::([0-9]{1,5}))?", re.IGNORECASE)
_CORE = ("health", "host-config", "stream")  # of Streamlit's routes under _stcore/
_CLOSED = ("component", "app")  # Streamlit's routes for custom components and static files
_SIGN_IN = ("auth", "oauth2callback")  # and for a class that signs in
_NUMBERS = {"int_value", "double_value"}  # of Streamlit's WidgetState
_PROTOCOL = "ampscope."  # before the proof among a websocket's subprotocols
_NOT_TAKEN = b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_PROOF = permissions.PROOF_HEADER.lower().encode()

SCRIPT = Path(__file__).with_name("proof.js").read_text(encoding="utf-8")


def base() -> str:
    """Path below which the dashboard is served: `` or ``/path``."""
    path = str(streamlit.get_option("server.baseUrlPath") or "").strip("/")
    return f"/{path}" if path else ""


def routes() -> list[Route]:
    """The dashboard's own addresses, beside Streamlit's."""
    return [
        Route(f"{base()}/open/{{token}}", open_link, methods=["GET"]),
        Route(f"{base()}/teacher/{{token}}", teacher_link, methods=["GET"]),
        Route(f"{base()}/ampscope.js", script, methods=["GET"]),
        Route(f"{base()}/ampscope/open", is_open, methods=["GET"]),
        Route(f"{base()}/ampscope/locked", locked, methods=["GET"]),
    ]


async def open_link(request: Request) -> Response:
    """The dashboard's link, opened in a browser."""
    return _exchanged(request, options.token(os.environ), WRONG)


async def teacher_link(request: Request) -> Response:
    """The teacher's link, opened in a browser."""
    classroom = options.classroom(os.environ)
    token = classroom.token if classroom is not None and not classroom.signs_in else ""
    return _exchanged(request, token, WRONG_TEACHER)


def _exchanged(request: Request, token: str, wrong: str) -> Response:
    given = str(request.path_params["token"])
    if not token or not secrets.compare_digest(given.encode(), token.encode()):
        return PlainTextResponse(wrong, status_code=403)
    # The script in the page takes the fragment away before anything is drawn.
    to = f"{base()}/#ampscope={permissions.proof_value(token)}"
    answer = RedirectResponse(to, status_code=303)
    answer.headers["Cache-Control"] = "no-store"
    answer.headers["Referrer-Policy"] = "no-referrer"
    is_https = _is_https(request)
    answer.set_cookie(
        permissions.cookie_name(token, is_https=is_https),
        permissions.cookie_value(token),
        path="/" if is_https else f"{base()}/",  # as the prefix __Host- demands
        secure=is_https,
        httponly=True,
        samesite="strict",
    )
    return answer


async def script(request: Request) -> Response:
    """What the page runs before Streamlit's own scripts."""
    return Response(SCRIPT, media_type="text/javascript", headers={"Cache-Control": "no-cache"})


async def is_open(request: Request) -> Response:
    """Whether this browser may use the dashboard; 401 where it must open the link first."""
    token = options.token(os.environ)
    proof = request.headers.get(permissions.PROOF_HEADER, "")
    is_fine = not token or permissions.is_proven(token, request.cookies, proof)
    return Response(status_code=204 if is_fine else 401, headers={"Cache-Control": "no-store"})


async def locked(request: Request) -> Response:
    """What a browser shows that has not opened the link."""
    return HTMLResponse(LOCKED, status_code=403)


def _is_https(request: Request) -> bool:
    """Also behind a proxy that speaks http to us. A browser that lies harms its own cookie only."""
    return "https" in (request.url.scheme, request.headers.get("x-forwarded-proto"))


class Hosts:
    """The names under which this server answers."""

    def __init__(self) -> None:
        self._own: frozenset[str] = frozenset()
        self._read_at = -OWN_NAMES_S

    def knows(self, host: str) -> bool:
        """``host`` is a request's Host header, with or without a port."""
        found = _HOST.fullmatch(host)
        if found is None:
            return False
        name = found[1].lower().rstrip(".").strip("[]")
        return (
            loopback.is_loopback(name) or name in self._named() or name in self._of_this_machine()
        )

    def public_origin(self) -> str:
        """Scheme, host and port that the operator named, else an empty text."""
        parts = urlsplit(os.environ.get(options.PUBLIC_URL, ""))
        return _origin(f"{parts.scheme}://{parts.netloc}") if parts.netloc else ""

    def _named(self) -> set[str]:
        """By the operator, one way or the other."""
        named = [
            streamlit.get_option("server.address"),
            streamlit.get_option("browser.serverAddress"),
            urlsplit(os.environ.get(options.PUBLIC_URL, "")).hostname,
            *(streamlit.get_option("server.allowedHosts") or []),
        ]
        return {str(name).lower().rstrip(".").strip("[]") for name in named if name} - _ANY

    def _of_this_machine(self) -> frozenset[str]:
        """Where it listens on every address: they, and the machine's name. No name is looked up."""
        if str(streamlit.get_option("server.address") or "") not in _ANY:
            return frozenset()
        if time.monotonic() - self._read_at > OWN_NAMES_S:
            self._read_at = time.monotonic()
            addresses = (a for each in psutil.net_if_addrs().values() for a in each)
            ip = (socket.AF_INET, socket.AF_INET6)
            found = {a.address.partition("%")[0].lower() for a in addresses if a.family in ip}
            self._own = frozenset(found | {socket.gethostname().lower()})
        return self._own


_ANY = {"", "0.0.0.0", "::"}


def _origin(text: str) -> str:
    """An origin as a browser writes it, without the scheme's own port; empty where it is none."""
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        return ""
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
        return ""
    if parts.path not in ("", "/") or parts.query or parts.fragment:
        return ""
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    usual = {"http": 80, "https": 443}[parts.scheme]
    return f"{parts.scheme}://{host}" + ("" if port in (None, usual) else f":{port}")


class Refused(Exception):  # noqa: N818  # says what happened
    """Why a request is not served, with its HTTP status."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status, self.why = status, why


class RequestGate:
    """ASGI middleware in front of Streamlit."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._hosts = Hosts()
        self._open: Counter[str] = Counter()  # websockets of each client; "" has shown the secret

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        is_websocket = scope["type"] == "websocket"
        try:
            headers = _headers(scope)
            self._check_names(scope, headers)
            if is_websocket:
                await self._stream(scope, headers, receive, send)
                return
            _check_request(scope, headers)
        except Refused as refused:
            await _refuse(refused, receive, send, is_websocket=is_websocket)
            return
        await self._page(scope, headers, receive, send)

    def _check_names(self, scope: Scope, headers: dict[str, str]) -> None:
        host = headers.get("host", "")
        if not self._hosts.knows(host):
            raise Refused(421, UNKNOWN_HOST)
        if (given := headers.get("origin")) is not None:
            scheme = "https" if scope.get("scheme") in ("https", "wss") else "http"
            own = {_origin(f"{scheme}://{host}"), self._hosts.public_origin()} - {""}
            if _origin(given) not in own:
                raise Refused(403, "A page of another origin has no access to this dashboard.")

    async def _stream(
        self, scope: Scope, headers: dict[str, str], receive: Receive, send: Send
    ) -> None:
        """A websocket: the one way to run a page."""
        if _below_base(scope) != "/_stcore/stream":
            raise Refused(404, "There is nothing at this address.")
        proof = _take_proof(scope, headers)
        token = options.secret(os.environ)
        is_proven = bool(token) and permissions.is_proven(token, _cookies(headers), proof)
        if options.token(os.environ) and not is_proven:
            raise Refused(403, "Open the link that the terminal of this dashboard shows.")
        client = "" if is_proven else _client(scope)
        most, most_each = capacity()
        unproven = self._open.total() - self._open[""]
        if is_proven and self._open[""] >= PROVEN:
            raise Refused(503, "Too many tabs are open. Close one.")
        if not is_proven and (unproven >= most or self._open[client] >= most_each):
            raise Refused(503, "Too many tabs are open. Close one, or try again later.")
        self._open[client] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._open[client] -= 1
            if not self._open[client]:
                del self._open[client]

    async def _page(
        self, scope: Scope, headers: dict[str, str], receive: Receive, send: Send
    ) -> None:
        """A plain request; the page itself gets the script that keeps the proof."""
        policy = _policy(headers["host"])
        below = _below_base(scope)
        token = options.token(os.environ) if below.startswith("/media/") else ""
        if token and not permissions.has_cookie(token, _cookies(headers)):
            # What a page shows. The address holds a hash; the cookie is the second lock.
            await _refuse(Refused(403, "Locked."), receive, send, is_websocket=False)
            return
        if below.startswith(
            ("/static/", "/media/", "/_stcore/", "/ampscope", "/open/", "/teacher/")
        ):
            await self._app(scope, receive, _with_headers(send, policy))
            return
        dropped = (b"accept-encoding", b"if-none-match", b"if-modified-since", b"range")
        scope = {**scope, "headers": [(k, v) for k, v in scope["headers"] if k not in dropped]}
        await self._app(scope, receive, _with_headers(_with_script(send), policy))


def _headers(scope: Scope) -> dict[str, str]:
    """By lower-case name. Two of a kind that matters are a trick, not a request."""
    found: dict[str, str] = {}
    for key, value in scope["headers"]:
        name = key.decode("latin-1").lower()
        if name in found and name in ("host", "origin"):
            raise Refused(400, f"Two headers {name}.")
        joiner = "; " if name == "cookie" else ", "
        text = value.decode("latin-1")
        found[name] = f"{found[name]}{joiner}{text}" if name in found else text
    return found


def _check_request(scope: Scope, headers: dict[str, str]) -> None:
    if scope["method"] not in ("GET", "HEAD"):
        raise Refused(405, "Only GET is served: a page is used over its websocket.")
    if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
        raise Refused(413, "A request has no body here.")
    if headers.get("sec-fetch-site") in ("cross-site", "same-site") and not (
        headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    ):
        raise Refused(403, "A page of another origin has no access to this dashboard.")
    first, _, rest = _below_base(scope).lstrip("/").partition("/")
    if first in _CLOSED or (first == "_stcore" and rest.strip("/") not in _CORE):
        raise Refused(404, "There is nothing at this address.")
    if first in _SIGN_IN:
        classroom = options.classroom(os.environ)
        if classroom is None or not classroom.signs_in:
            raise Refused(404, "This dashboard has no sign-in.")


def _below_base(scope: Scope) -> str:
    """The path without the base path, as Streamlit's routes see it."""
    path = "/" + re.sub(r"/+", "/", str(scope["path"])).lstrip("/")
    own = base()
    return path[len(own) :] or "/" if own and (path + "/").startswith(own + "/") else path


def _client(scope: Scope) -> str:
    """Its address; of a proxy on this machine, the one that it passes on. IPv6 by its network."""
    host = str((scope.get("client") or ("unknown",))[0])
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host)
        if isinstance(address, ipaddress.IPv6Address):
            if address.ipv4_mapped is not None:
                return str(address.ipv4_mapped)
            return str(ipaddress.ip_network((address, 64), strict=False))
    return host or "unknown"


def _cookies(headers: dict[str, str]) -> dict[str, str]:
    pairs = (part.strip().partition("=") for part in headers.get("cookie", "").split(";"))
    return {name: value for name, sign, value in pairs if sign}


def _take_proof(scope: Scope, headers: dict[str, str]) -> str:
    """Out of the subprotocols, which Streamlit reads by their place, into a header of its own."""
    asked = [one.strip() for one in headers.get("sec-websocket-protocol", "").split(",")]
    proofs = [one for one in asked if one.startswith(_PROTOCOL)]
    others = [one for one in asked if not one.startswith(_PROTOCOL)]
    proof = proofs[-1].removeprefix(_PROTOCOL) if proofs else ""
    taken = (b"sec-websocket-protocol", _PROOF)
    kept = [(key, value) for key, value in scope["headers"] if key.lower() not in taken]
    if any(others):
        kept.append((b"sec-websocket-protocol", ", ".join(others).encode("latin-1")))
    kept.append((_PROOF, proof.encode("latin-1")))
    scope["headers"] = kept
    scope["subprotocols"] = [one for one in others if one]
    return proof


def _policy(host: str) -> list[tuple[bytes, bytes]]:
    """Headers of every answer. Scripts and pictures come from this server alone, so a text from a
    run that were taken for markup could still fetch nothing."""
    content = (
        "default-src 'self'; script-src 'self' 'unsafe-inline' 'wasm-unsafe-eval'; "
        "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; "
        f"connect-src 'self' ws://{host} wss://{host}; worker-src 'self' blob:; "
        "object-src 'none'; base-uri 'self'; form-action 'self'; frame-ancestors 'none'"
    )
    return [
        (b"content-security-policy", content.encode("latin-1")),
        (b"x-frame-options", b"DENY"),
        (b"x-content-type-options", b"nosniff"),
        (b"referrer-policy", b"same-origin"),
        (b"cross-origin-opener-policy", b"same-origin"),
        (b"cross-origin-resource-policy", b"same-origin"),
    ]


def _with_headers(send: Send, added: list[tuple[bytes, bytes]]) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            own = {key.lower() for key, _ in message.get("headers", [])}
            extra = [(key, value) for key, value in added if key not in own]
            message = {**message, "headers": [*message.get("headers", []), *extra]}
        await send(message)

    return sending


@functools.cache
def chart_preload() -> str:
    """A modulepreload link to Streamlit's chart code (5 MB). Without it the browser fetches the
    code only at the first chart. Empty if the file is not found."""
    scripts = Path(streamlit.__file__).parent / "static" / "static" / "js"
    found = [path.name for path in scripts.glob("PlotlyChart.*.js")]
    if len(found) != 1:
        return ""
    return f'<link rel="modulepreload" crossorigin href="{base()}/static/js/{found[0]}">'


def _with_script(send: Send) -> Send:
    """An HTML answer gets the script at the top of its head, and the link to the charts' code at
    its end. It is a few kilobytes long."""
    start: list[Message] = []
    body: list[bytes] = []

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            kinds = [v for k, v in message.get("headers", []) if k.lower() == b"content-type"]
            if message["status"] == 200 and kinds and kinds[0].startswith(b"text/html"):
                start.append(message)
                return
        if not start or message["type"] != "http.response.body":
            await send(message)
            return
        body.append(message.get("body", b""))
        if message.get("more_body"):
            return
        own = f'<head><script src="{base()}/ampscope.js"></script>'.encode()
        page = b"".join(body).replace(b"<head>", own, 1)
        page = page.replace(b"</head>", chart_preload().encode() + b"</head>", 1)
        changed = (b"content-length", b"etag", b"last-modified", b"accept-ranges")
        kept = [(k, v) for k, v in start[0]["headers"] if k.lower() not in changed]
        length = (b"content-length", str(len(page)).encode())
        await send({**start[0], "headers": [*kept, length]})
        await send({"type": "http.response.body", "body": page})

    return sending


async def _refuse(refused: Refused, receive: Receive, send: Send, *, is_websocket: bool) -> None:
    """An answer in one sentence. What a request still sends is not read."""
    if is_websocket:
        await receive()  # the handshake
        await send({"type": "websocket.close", "code": 1008, "reason": refused.why})
        return
    text = refused.why.encode()
    headers = [
        (b"content-type", b"text/plain; charset=utf-8"),
        (b"content-length", str(len(text)).encode()),
        (b"cache-control", b"no-store"),
        (b"connection", b"close"),
        (b"x-content-type-options", b"nosniff"),
    ]
    await send({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": text})


def capacity() -> tuple[int, int]:
    """Websockets without the secret: in all, and of one client. Fewer where the system lets this
    process open few files."""
    in_all = max(8, min(IN_ALL, (open_files() - FILES_KEPT) // FILES_EACH - PROVEN))
    return in_all, min(PER_CLIENT, max(4, in_all // 2))


def open_files() -> int:
    """How many files this process may have open."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return OPEN_FILES if soft == resource.RLIM_INFINITY else soft
    return OPEN_FILES


def _raise_open_files() -> None:
    """As many as the system lets a process have without asking: often 1,024 until it asks."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _bound_messages() -> None:
    """A frame of a websocket is bounded where it is put together: Streamlit hands uvicorn its bound
    for the other direction, 200 MB."""
    from uvicorn.protocols.websockets import websockets_sansio_impl as implementation

    protocol = implementation.WebSocketsSansIOProtocol
    plain = protocol.__init__

    def bounded(self, config, *args, **named):  # type: ignore[no-untyped-def]
        config.ws_max_size = min(config.ws_max_size, MAX_MESSAGE)
        plain(self, config, *args, **named)

    protocol.__init__ = bounded  # type: ignore[method-assign]
    plainly = protocol.data_received

    def answered(self, data):  # type: ignore[no-untyped-def]
        """Headers that websockets does not take, such as a line of more than 8 KiB: uvicorn would
        say nothing and keep the socket."""
        plainly(self, data)
        if self.conn.handshake_exc is not None and not self.handshake_initiated:
            self.transport.write(b"".join(self.conn.data_to_send()) or _NOT_TAKEN)
            self.transport.close()

    protocol.data_received = answered  # type: ignore[method-assign]


def _mistrust_widget_values() -> None:
    """A value of another type than its widget's, or one that the widget cannot read, is taken for
    none: the widget stands at its default. Streamlit believes what a browser sends."""
    plain = WStates.__getitem__

    def checked(self: WStates, key: str) -> Any:
        state, metadata = self.states.get(key), self.widget_metadata.get(key)
        if not isinstance(state, Serialized) or metadata is None:
            return plain(self, key)
        sent, wanted = state.value.WhichOneof("value"), metadata.value_type
        # A browser sends a number input's whole numbers as such, whatever the widget declares.
        if sent in (None, wanted) or {sent, wanted} == _NUMBERS:
            with contextlib.suppress(Exception):  # any that a widget's own reading may raise
                return plain(self, key)
        self.states[key] = Value(copy.deepcopy(metadata.deserializer(None)))
        return plain(self, key)

    WStates.__getitem__ = checked  # type: ignore[method-assign]
    told = WStates.call_callback

    def called(self: WStates, widget_id: str) -> None:
        """Nothing is done for a widget that this page no longer has: its value is gone."""
        key = user_key_from_element_id(widget_id)
        if key is None or key in streamlit.session_state:
            told(self, widget_id)

    WStates.call_callback = called  # type: ignore[method-assign]


def _stay_on_this_machine() -> None:
    """Streamlit asks checkip.amazonaws.com for this machine's address where a Host or Origin is
    not one that it knows. The door has judged those already."""
    net_util.get_external_ip = lambda: None
    net_util.get_internal_ip = lambda: None


def _forget_closed_pages() -> None:
    """A session without a browser is kept for one that comes back from a lost connection: two
    minutes, half a MiB each. Here the address brings a page back, so seconds do."""
    if not config.is_manually_set(_KEEP):
        config.set_option(_KEEP, CLOSED_S, __name__)


@contextlib.asynccontextmanager
async def lifespan(app: streamlit.App) -> AsyncIterator[None]:
    """Set up the server process, and open a browser as `streamlit run` does for a plain script."""
    _raise_open_files()
    bound = loopback.address(str(streamlit.get_option("server.address") or ""))
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(loopback.held(bound, int(streamlit.get_option("server.port"))))
        except BadInput as error:
            warn([str(error)])
            os._exit(1)  # nothing is served yet; anything raised here is printed as a traceback
        warn([*exposed(os.environ), *how_to_open(os.environ)])
        if not streamlit.get_option("server.headless"):
            address = str(streamlit.get_option("browser.serverAddress") or "127.0.0.1")
            cli_util.open_browser(server_util.get_url(address))
        yield


def exposed(environment: Mapping[str, str]) -> list[str]:
    """What the operator should know of who can reach this server."""
    address = str(streamlit.get_option("server.address") or "")
    if loopback.is_loopback(address.strip("[]")) or IN_CONTAINER in environment:
        return []
    said = []
    if not options.secret(environment) and options.classroom(environment) is None:
        said.append(
            "WARNING: Any user who reaches this machine over the network can use this dashboard, "
            "and "
            "that is to run code here. Start it with `ampscope dashboard`, which asks for a token, "
            "or set AMPSCOPE_TOKEN."
        )
    if not streamlit.get_option("server.sslCertFile"):
        said.append(
            "WARNING: Without TLS others on the network can read what is sent, links with tokens "
            "included. Serve it behind a proxy with TLS (docs/classroom.md)."
        )
    return said


def how_to_open(environment: Mapping[str, str]) -> list[str]:
    """With `streamlit run` and a token: the printed address has none. `ampscope dashboard` prints
    its own link, and no welcome."""
    token = options.token(environment)
    if not token or streamlit.get_option("logger.hideWelcomeMessage"):
        return []
    said = ["Open the address above with /open/ and the value of AMPSCOPE_TOKEN after it."]
    if len(token) < SHORTEST_TOKEN:
        said.append(f"WARNING: AMPSCOPE_TOKEN should have {SHORTEST_TOKEN} characters at least.")
    return said


def warn(lines: Iterable[str]) -> None:
    """Say it on the server's terminal."""
    for line in lines:
        cli_util.print_to_cli(f"  {line}", fg="yellow")


_stay_on_this_machine()
_forget_closed_pages()
_bound_messages()
_mistrust_widget_values()
MIDDLEWARE = [Middleware(RequestGate)]
