"""``ampscope hardware``: what this machine is, and what AMP can and cannot give on it."""

from __future__ import annotations

import click

from ampscope.hardware.describe import describe_machine, report_json, sentence


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def hardware(as_json: bool) -> None:
    """Say what this machine can do for mixed precision."""
    report = describe_machine()
    click.echo(report_json(report) if as_json else sentence(report))
