"""``ampscope mcp``: the tools of ampscope for a coding agent (docs/agents.md)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import click

from ampscope.cli.options import store_option
from ampscope.errors import BadInput


@click.command()
@click.option(
    "--scripts",
    multiple=True,
    type=click.Path(path_type=Path),
    help="A folder; scripts below it can be checked and run. May be repeated; without it none can.",
)
@click.option(
    "--http",
    "port",
    type=click.IntRange(0, 65535),
    help="Serve HTTP on this port of 127.0.0.1 instead of stdio; 0 takes a free one. A token is "
    "printed at start.",
)
@store_option
def mcp(scripts: tuple[Path, ...], port: int | None, store: Path) -> None:
    """Serve ampscope's tools to a coding agent over the Model Context Protocol.

    Over stdio standard output belongs to the protocol. Ends when the client does, or by a signal.
    """
    missing = [name for name in ("mcp", "resvg_py") if importlib.util.find_spec(name) is None]
    if missing:
        raise BadInput(
            f"ampscope mcp needs the package {missing[0]}. Install it with: "
            "pip install 'ampscope[mcp]'"
        )
    from ampscope.ext.agents.jobs import Folders  # the other commands do without the SDK
    from ampscope.ext.agents.server import make_server
    from ampscope.ext.agents.transports import serve_http, serve_stdio

    server = make_server(store, Folders(scripts))
    if port is None:
        serve_stdio(server)
    else:
        serve_http(server, port)
