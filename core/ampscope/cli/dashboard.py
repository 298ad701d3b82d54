"""``ampscope dashboard``: start Streamlit on the pages of this checkout or of the wheel.

ampscope dashboard
ampscope dashboard --classroom --host 0.0.0.0
ampscope dashboard --classroom --base-path class --public-url https://amp.example.org/class

The pages can run code, so that a browser must open a link with a token first, as a notebook server
asks for. The token goes to the server in its environment and to the browser in a file that only
this user can read: command lines are seen by every user of a machine.
"""

from __future__ import annotations

import contextlib
import html
import importlib.util
import os
import re
import secrets
import socket
import subprocess
import sys
import time
import tomllib
import webbrowser
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from urllib.parse import urlsplit

import click

import ampscope
from ampscope import loopback
from ampscope.cli import stopping
from ampscope.cli.options import store_option
from ampscope.errors import AmpscopeError, BadInput
from ampscope.files import TemporaryFolder
from ampscope.pythons import check_diagnoses, named_python

END_S = 10.0  # a page that is being drawn ends first
START_S = 60.0  # a loaded machine; an idle one takes 2 s
TOKEN = "AMPSCOPE_CLASSROOM_TOKEN"  # the variable's name, as in app/options.py
TEACHERS = "AMPSCOPE_CLASSROOM_TEACHERS"
LINK = "AMPSCOPE_CLASSROOM_LINK"  # for students, as it was printed
DASHBOARD_TOKEN = "AMPSCOPE_TOKEN"  # of a dashboard without a class
PUBLIC_URL = "AMPSCOPE_PUBLIC_URL"  # the address at which browsers find the dashboard
# After every run of a page Streamlit collects garbage of all generations, which takes 90 ms with
# pandas and plotly loaded, six times what moving a lesson's slider takes otherwise. Python's own
# collector does it when there is need (benchmarks/results/classroom_load.json has the memory).
_STREAMLIT = ("--runner.postScriptGC", "false")
_SECRETS = Path(".streamlit") / "secrets.toml"
_TOKEN = re.compile(r"[A-Za-z0-9_-]+")  # stands in a link as it is
MIN_TOKEN = 16  # characters of a token that an operator brings along; one made here has 43


@click.command()
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8501,
    show_default=True,
    help="0: one that is free.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to bind to.")
@click.option(
    "--workloads",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Folder whose workload files the New probe page may run.",
)
@click.option(
    "--scripts",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Folder whose Python files the Diagnosis page may run.",
)
@click.option(
    "--python",
    "pythons",
    multiple=True,
    metavar="NAME=PATH",
    help="Another Python (or virtual environment) that the Diagnosis page may run a script with.",
)
@click.option("--headless", is_flag=True, help="Do not open a browser.")
@click.option(
    "--classroom",
    is_flag=True,
    help="One teacher, many students: prints a link for each. Students run lessons and look.",
)
@click.option("--base-path", default="", help="Path below which a reverse proxy serves it.")
@click.option(
    "--public-url",
    "--url",
    "url",
    default="",
    help="Address at which browsers find it, behind a proxy or under another name.",
)
@click.option(
    "--token/--no-token",
    "has_token",
    default=True,
    help="Ask a browser for the token in the printed link (default), or let every user of this "
    "machine in. A class has links of its own.",
)
@click.option(
    "--sign-in",
    is_flag=True,
    help="With --classroom: every user signs in (OpenID Connect, .streamlit/secrets.toml).",
)
@click.option(
    "--teacher",
    "teachers",
    multiple=True,
    help="E-mail address of a teacher who signs in, or sub:ID.",
)
@store_option
def dashboard(
    port: int, host: str, workloads: Path | None, scripts: Path | None, pythons: tuple[str, ...],
    headless: bool, classroom: bool, base_path: str, url: str, has_token: bool, sign_in: bool,
    teachers: tuple[str, ...], store: Path,
) -> None:  # fmt: skip
    """Open the dashboard in a browser."""
    main = main_file()
    environment = {**os.environ, "AMPSCOPE_STORE": str(store.absolute())}
    if workloads is not None:
        environment["AMPSCOPE_WORKLOADS"] = str(workloads.resolve())
    if scripts is not None:
        environment["AMPSCOPE_SCRIPTS"] = str(scripts.resolve())
    if pythons:
        environment["AMPSCOPE_PYTHONS"] = os.pathsep.join(map(_checked_python, pythons))
    path, host = base_path.strip("/"), loopback.address(host)
    if not host:
        raise BadInput(
            "--host is empty. 127.0.0.1 is this machine alone; 0.0.0.0 is every address."
        )
    port = port or _free_port(host)
    command = ["--server.port", str(port), "--server.address", host]
    # The browser is opened here, with the token. Without the last option, Streamlit's first start
    # asks for an e-mail address and waits.
    command += ["--server.headless", "true", "--server.showEmailPrompt", "false"]
    command += ["--server.baseUrlPath", path] if path else []
    command += _public(url)
    environment[PUBLIC_URL] = url
    link = (url or f"http://{_shown(host)}:{port}/{path}").rstrip("/")
    if classroom:
        environment |= class_environment(os.environ, sign_in=sign_in, teachers=teachers)
        command += streamlit_options(Path.cwd(), sign_in=sign_in)
        environment[LINK] = url or f"{link}/"
    elif sign_in or teachers:
        raise BadInput("--sign-in and --teacher belong to a class: add --classroom.")
    else:
        clear(environment)
        environment[DASHBOARD_TOKEN] = token(os.environ, DASHBOARD_TOKEN) if has_token else ""
    _is_free(host, port)
    if classroom:
        announce(environment)
    else:
        link = _announced(link, environment[DASHBOARD_TOKEN])
    command += ["--logger.hideWelcomeMessage", "true"]  # its link has no token
    run = [sys.executable, "-m", "streamlit", "run", str(main), *command]
    server: subprocess.Popen[bytes] | None = None
    try:
        with stopping.deferred():  # a server that was started is known
            server = subprocess.Popen(run, env=environment, cwd=main.parent.parent)
        with contextlib.ExitStack() as stack:
            # A browser that opened by itself would show the students' side of a class.
            if not headless and not classroom and _answers(host, port, server):
                stack.enter_context(_browser(link))
            status = server.wait()
    except KeyboardInterrupt:
        status = 0
    finally:  # the server ends with this process: a class must not stay open behind it
        if server is not None:
            with stopping.deferred(again=False):
                _end(server)
    sys.exit(status)


def main_file() -> Path:
    """``app/main.py``: inside the wheel, else at the top of the checkout."""
    package = Path(str(resources.files(ampscope)))
    for folder in (package / "_dashboard", package.parent.parent):
        if (folder / "app" / "main.py").is_file():
            return folder / "app" / "main.py"
    raise AmpscopeError("The dashboard's files are missing. Install ampscope again.")


def _checked_python(text: str) -> str:
    """``NAME=PATH`` with the path made absolute. Raises BadInput where it can diagnose nothing."""
    python = named_python(text)
    check_diagnoses(python)
    return f"{python.name}={python.executable}"


def _free_port(host: str) -> int:
    """One that no program has now. Raises BadInput where this machine is not ``host``."""
    with _bound(host, 0) as tried:
        return int(tried.getsockname()[1])


def _public(url: str) -> list[str]:
    """What Streamlit must know of the address in the browser: without it a websocket from a page of
    another origin is refused."""
    if not url:
        return []
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise BadInput(
            f"--public-url {url!r} is not an address such as https://amp.example.org/class."
        )
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return ["--browser.serverAddress", parts.hostname, "--browser.serverPort", str(port)]


def _shown(host: str) -> str:
    """An address that another browser can open: the machine's name, where it leads there."""
    if host not in ("0.0.0.0", "::", ""):
        return f"[{host}]" if ":" in host else host
    name = socket.gethostname()
    with contextlib.suppress(OSError):
        if not socket.gethostbyname(name).startswith("127."):
            return name
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        asked.connect(("192.0.2.1", 9))  # nothing is sent; the system chooses the way out
        return str(asked.getsockname()[0])
    return "127.0.0.1" if name == "localhost" else name


def class_environment(
    given: Mapping[str, str], *, sign_in: bool, teachers: Sequence[str]
) -> dict[str, str]:
    """What the server of a class needs to know. The teacher's token goes to it in its environment:
    the command line of a process is seen by every user of a machine, its environment by its owner
    alone. If it is set beforehand, the link stays the same after a restart. Raises BadInput for a
    class that has no teacher."""
    if sign_in != bool(teachers):
        raise BadInput(
            "Signing in takes both: --sign-in, and --teacher with the address of each teacher."
        )
    if sign_in:
        return {TEACHERS: ",".join(teachers), TOKEN: ""}
    return {TOKEN: token(given, TOKEN), TEACHERS: ""}


def token(given: Mapping[str, str], name: str) -> str:
    """The one that the operator set as ``name``, or a new one. Raises BadInput for a short one."""
    found = given.get(name) or secrets.token_urlsafe(32)
    if len(found) < MIN_TOKEN or not _TOKEN.fullmatch(found):
        raise BadInput(f"{name} must have at least {MIN_TOKEN} letters, digits, - or _.")
    return found


def streamlit_options(folder: Path, *, sign_in: bool) -> list[str]:
    """Options of Streamlit's server. Raises BadInput when no user could sign in."""
    if not sign_in:
        return [*_STREAMLIT]
    places = [folder / _SECRETS, Path.home() / _SECRETS]
    found = [str(place) for place in places if place.is_file() and _has_auth(place)]
    if not found:
        raise BadInput(
            f"Signing in takes a section [auth] in {places[0]} or {places[1]}; docs/classroom.md "
            "has an example."
        )
    if importlib.util.find_spec("authlib") is None:
        raise BadInput('Signing in takes Authlib: pip install "streamlit[auth]"')
    return [*_STREAMLIT, "--secrets.files", found[0]]


def _has_auth(path: Path) -> bool:
    try:
        return "auth" in tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} cannot be read: {error}.") from error


def clear(environment: dict[str, str]) -> None:
    """A dashboard without a class is none because of what was exported earlier."""
    for name in (TOKEN, TEACHERS, LINK, DASHBOARD_TOKEN):
        environment.pop(name, None)


def _is_free(host: str, port: int) -> None:
    """Raises BadInput before a link is printed that would open another user's server. The server
    holds the other family's port itself (app/server.py)."""
    with _bound(host, port), loopback.held(host, port):
        pass


@contextlib.contextmanager
def _bound(host: str, port: int) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((host, port))
        except (OSError, UnicodeError) as error:  # no name that a network knows
            why = getattr(error, "strerror", None) or error
            option = "--port" if port else "--host"  # any port was asked for: the host it is
            raise BadInput(
                f"{host}:{port} cannot be served ({why}). Choose another with {option}."
            ) from error
        yield tried


def announce(environment: Mapping[str, str]) -> None:
    """Print the links."""
    base = environment[LINK].rstrip("/")
    click.echo(f"For students:  {base}/")
    if environment.get(TEACHERS):
        click.echo("The teacher opens the same link, and signs in.")
        return
    click.echo(f"For you alone: {base}/teacher/{environment[TOKEN]}")
    click.echo("Open yours before you share a screen: it makes that browser the teacher's.")
    click.echo(
        "If students cannot open theirs, name the machine as they do: --public-url http://NAME:PORT"
    )


def _announced(base: str, token: str) -> str:
    """Print the dashboard's link; returns it."""
    if not token:
        click.echo(f"Dashboard: {base}/")
        click.echo("Without a token every user of this machine can use it, and run code with it.")
        return f"{base}/"
    click.echo(f"Dashboard: {base}/open/{token}")
    click.echo("The link holds for a browser until that is closed. Who has it can run code here.")
    return f"{base}/open/{token}"


def _answers(host: str, port: int, server: subprocess.Popen[bytes]) -> bool:
    """Wait until the server accepts connections; False where it ended instead."""
    to = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    deadline = time.monotonic() + START_S
    while server.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection((to, port), timeout=1):
            return True
        time.sleep(0.1)
    return False


@contextlib.contextmanager
def _browser(link: str) -> Iterator[None]:
    """Open ``link`` by way of a file that this user alone can read, and that goes with the server:
    a browser's command line is seen by every user of the machine."""
    with TemporaryFolder() as folder:  # 0700
        page = Path(folder) / "dashboard.html"
        page.touch(0o600)
        to = html.escape(link)
        page.write_text(
            '<!doctype html><meta charset="utf-8"><meta name="referrer" content="no-referrer">'
            f'<meta http-equiv="refresh" content="0;url={to}"><title>ampscope</title>'
            f'<a href="{to}">Open the dashboard</a>\n',
            encoding="utf-8",
        )
        webbrowser.open(page.as_uri())
        yield


def _end(server: subprocess.Popen[bytes]) -> None:
    """Tell the server to end, and wait for it. Ctrl-C in a terminal has told it already; a signal
    to this process alone has not."""
    if server.poll() is None:
        server.terminate()
        try:
            server.wait(END_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
