"""``ampscope dashboard``: start Streamlit on the pages of this checkout or of the wheel.

ampscope dashboard
ampscope dashboard --classroom --host 0.0.0.0
ampscope dashboard --classroom --base-path class --url https://amp.example.org/class
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from importlib import resources
from pathlib import Path
from urllib.parse import urlsplit

import click

import ampscope
from ampscope.cli import classroom as classes
from ampscope.cli.options import store_option
from ampscope.errors import AmpscopeError, BadInput


@click.command()
@click.option("--port", default=8501, show_default=True)
@click.option("--host", default="localhost", show_default=True, help="Address to bind to.")
@click.option(
    "--workloads",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Folder whose workload files the New probe page may run.",
)
@click.option("--headless", is_flag=True, help="Do not open a browser.")
@click.option(
    "--classroom",
    is_flag=True,
    help="One teacher, many students: prints a link for each. Students run lessons and look.",
)
@click.option("--base-path", default="", help="Path below which a reverse proxy serves it.")
@click.option("--url", default="", help="Address at which browsers find it, behind a proxy.")
@click.option(
    "--sign-in",
    is_flag=True,
    help="With --classroom: everybody signs in (OpenID Connect, .streamlit/secrets.toml).",
)
@click.option(
    "--teacher",
    "teachers",
    multiple=True,
    help="E-mail address of a teacher who signs in, or sub:ID.",
)
@store_option
def dashboard(
    port: int, host: str, workloads: Path | None, headless: bool, classroom: bool, base_path: str,
    url: str, sign_in: bool, teachers: tuple[str, ...], store: Path,
) -> None:  # fmt: skip
    """Open the dashboard in a browser."""
    main = main_file()
    environment = {**os.environ, "AMPSCOPE_STORE": str(store.absolute())}
    if workloads is not None:
        environment["AMPSCOPE_WORKLOADS"] = str(workloads.resolve())
    path = base_path.strip("/")
    command = ["--server.port", str(port), "--server.address", host]
    # Without the second, Streamlit's first start asks for an e-mail address and waits.
    # A browser that opened by itself would show the students' side of a class.
    quiet = str(headless or classroom).lower()
    command += ["--server.headless", quiet, "--server.showEmailPrompt", "false"]
    command += ["--server.baseUrlPath", path] if path else []
    command += _public(url)
    if classroom:
        main = main.with_name("classroom.py")
        environment |= classes.environment(os.environ, sign_in=sign_in, teachers=teachers)
        command += classes.streamlit_options(Path.cwd(), sign_in=sign_in)
        environment[classes.LINK] = url or f"http://{_shown(host)}:{port}/{path}"
    elif sign_in or teachers:
        raise BadInput("--sign-in and --teacher belong to a class: add --classroom.")
    else:
        classes.clear(environment)
    _is_free(host, port)
    if classroom:
        classes.announce(environment)
    run = [sys.executable, "-m", "streamlit", "run", str(main), *command]
    server = subprocess.Popen(run, env=environment, cwd=main.parent.parent)
    # Whoever ends this process means the server: a class must not stay open behind it.
    signal.signal(signal.SIGTERM, lambda number, frame: server.terminate())
    try:
        sys.exit(server.wait())
    except KeyboardInterrupt:
        server.wait()
        sys.exit(0)


def main_file() -> Path:
    """``app/main.py``: inside the wheel, else at the top of the checkout."""
    package = Path(str(resources.files(ampscope)))
    for folder in (package / "_dashboard", package.parent.parent):
        if (folder / "app" / "main.py").is_file():
            return folder / "app" / "main.py"
    raise AmpscopeError("The dashboard's files are missing. Install ampscope again.")


def _public(url: str) -> list[str]:
    """What Streamlit must know of the address in the browser: without it a websocket from a page of
    another origin is refused."""
    if not url:
        return []
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise BadInput(f"--url {url!r} is not an address such as https://amp.example.org/class.")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return ["--browser.serverAddress", parts.hostname, "--browser.serverPort", str(port)]


def _is_free(host: str, port: int) -> None:
    """Raises BadInput before a link is printed that would open somebody else's server."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((host, port))
        except OSError as error:
            raise BadInput(
                f"{host}:{port} cannot be served ({error.strerror}). Choose another with --port."
            ) from error


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
    return name
