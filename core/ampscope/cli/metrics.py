"""``ampscope metrics``: a Prometheus endpoint over the store."""

from __future__ import annotations

import threading
from pathlib import Path

import click

from ampscope.cli.options import store_option
from ampscope.errors import BadInput
from ampscope.exports.prometheus import serve


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at.")
@click.option("--port", default=9464, show_default=True, type=click.IntRange(0, 65535))
@store_option
def metrics(host: str, port: int, store: Path) -> None:
    """Serve scale, skips, lost share and step time of running trainings to Prometheus."""
    try:
        address, stop = serve(store, host, port)
    except OSError as error:
        reason = error.strerror or error
        raise BadInput(f"Cannot listen at {host}:{port}: {reason}. Choose another --port.") from (
            error
        )
    click.echo(f"{address} (end with Ctrl+C)")
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        pass
    finally:
        stop()
