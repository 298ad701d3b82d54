"""Options that several commands share. Those of measurements that are named as a field of RunSpec
go into it as they are (:func:`measurement`)."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from ampscope.control import BASELINE
from ampscope.errors import BadInput
from ampscope.privacy import PARTS, VARIABLE
from ampscope.records import RunSpec
from ampscope.store.db import default_path
from ampscope.workloads.catalog import BUILTIN, SIZES, is_script

Command = TypeVar("Command", bound=Callable[..., None])


def _leave_out(context: click.Context, option: click.Parameter, parts: tuple[str, ...]) -> None:
    """Children inherit it with the environment."""
    if parts:
        before = os.environ.get(VARIABLE, "")
        os.environ[VARIABLE] = ",".join(filter(None, (before, *parts)))


leave_out_option = click.option(
    "--leave-out",
    multiple=True,
    type=click.Choice(PARTS),
    callback=_leave_out,
    expose_value=False,
    help="Do not record the script's arguments, the machine's name, paths, lines of source.",
)
memory_limit_option = click.option(
    "--memory-limit",
    default=0,
    help="MiB that a run may take: of private memory on a CPU, of each GPU on CUDA; 0 is no limit.",
)
store_option = click.option(
    "--store",
    type=click.Path(path_type=Path),
    default=default_path,
    show_default="AMPSCOPE_STORE, else ~/.local/share/ampscope/runs.db",
    help="The SQLite file that holds the runs.",
)
seed_option = click.option("--seed", default=0, show_default=True)
device_option = click.option(
    "--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N."
)
json_file_option = click.option(
    "--json", "out", type=click.Path(path_type=Path), help="Write everything there."
)


def size_option(default: str) -> Callable[[Command], Command]:
    """Of a built-in workload."""
    return click.option("--size", type=click.Choice(SIZES), default=default, show_default=True)


def time_limit_option(default: float, text: str = "Seconds.") -> Callable[[Command], Command]:
    """Of a run, in seconds."""
    return click.option(
        "--time-limit", "time_limit_s", default=default, show_default=True, help=text
    )


def measurement(
    kind: str, workload: str, args: tuple[str, ...] = (), *, label: str = "", **fields: Any
) -> RunSpec:
    """What ``workload`` is measured for; a script has ``label`` beside its name. Raises BadInput
    for arguments of what is no script."""
    script = is_script(workload)
    if args and not script:
        raise BadInput(f"{workload} takes no arguments; only a script does.")
    return RunSpec(
        workload=absolute(workload),
        args=args,
        kind=kind,
        policy="native",  # a rehearsal of CUDA's rules says nothing about time
        control=BASELINE if script else "",
        label=f"{Path(workload).name}{label}" if script else "",
        **fields,
    )


def absolute(workload: str) -> str:
    """A user's file is found again whatever the child's working directory is."""
    path, colon, function = workload.partition(":")
    if workload in BUILTIN or not path.endswith(".py"):
        return workload
    return f"{Path(path).expanduser().absolute()}{colon}{function}"


def own_table(config: Path, name: str) -> object:
    """``[tool.ampscope.NAME]`` of a pyproject.toml, {} where it has none; NAME itself
    may be anything. Raises BadInput for a file that cannot be read or is not TOML, and where
    [tool] or [tool.ampscope] is not a table."""
    try:
        found: object = tomllib.loads(config.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"Cannot read {config}: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{config} is not TOML: {error}.") from error
    path = ""
    for key in ("tool", "ampscope", name):
        if not isinstance(found, dict):
            raise BadInput(f"[{path}] of {config} is not a table.")
        found = found.get(key, {})
        path = f"{path}.{key}".lstrip(".")
    return found
