"""``ampscope preflight``: what can be known of a training script before it runs."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import click

from ampscope.errors import BadInput
from ampscope.files import write_whole
from ampscope.preflight.checks import (
    Settings,
    check_paths,
    difference,
    repaired,
    settings_of,
    write_repaired,
)
from ampscope.preflight.formats import FORMATS, written
from ampscope.report.document import visible

EXIT_NOTHING, EXIT_FINDINGS = 0, 1


@click.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--format", "form", type=click.Choice(FORMATS), default="text", show_default=True,
    help="How findings are written.",
)  # fmt: skip
@click.option("--out", type=click.Path(path_type=Path), help="Write there, not to standard output.")
@click.option("--diff", "show_diff", is_flag=True, help="Show the safe repairs, change nothing.")
@click.option("--fix", is_flag=True, help="Write the safe repairs; what is left is reported.")
@click.option(
    "--config", type=click.Path(path_type=Path),
    help="A pyproject.toml.  [default: the nearest above the first path]",
)  # fmt: skip
def preflight(
    paths: tuple[Path, ...], form: str, out: Path | None, show_diff: bool, fix: bool,
    config: Path | None,
) -> None:  # fmt: skip
    """Check training scripts, or all below folders, without running them.

    Exit status: 0 nothing found, 1 findings, 2 bad input.
    """
    settings = settings_for(paths[0], config)
    result = check_paths(paths, settings)
    if show_diff or fix:
        for source in list(result.sources.values()):
            found = [f for f in result.findings if f.path == source.path]
            changed = repaired(source, found)
            if changed == source.text:
                continue
            if show_diff:
                click.echo(_harmless(difference(source, changed)), nl=False)
            if fix:
                write_repaired(source, changed)
        if show_diff and not fix:
            sys.exit(EXIT_FINDINGS if result.findings else EXIT_NOTHING)
        result = check_paths(paths, settings)
    for sentence in result.unread:
        click.echo(f"Left out: {visible(sentence)}", err=True)
    _write(written(result, form), form, out)
    sys.exit(EXIT_FINDINGS if result.findings else EXIT_NOTHING)


def _write(text: str, form: str, out: Path | None) -> None:
    if out is None:
        click.echo(_harmless(text) if form == "text" else text)
        return
    try:
        write_whole(out, text + "\n")
    except OSError as error:
        raise BadInput(f"Cannot write {out}: {error.strerror}.") from error


def _harmless(text: str) -> str:
    """Lines of a file, without what would act on a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def settings_for(first: Path, config: Path | None = None) -> Settings:
    """``[tool.ampscope.preflight]`` of the named file, or of the nearest above ``first``."""
    if config is None:
        start = first.absolute()
        folders = [start, *start.parents] if first.is_dir() else list(start.parents)
        files = (folder / "pyproject.toml" for folder in folders)
        config = next((file for file in files if file.is_file()), None)
        if config is None:
            return Settings()
    try:
        tables = tomllib.loads(config.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"Cannot read {config}: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{config} is not TOML: {error}.") from error
    table = tables.get("tool", {}).get("ampscope", {}).get("preflight", {})
    return settings_of(table, str(config))
