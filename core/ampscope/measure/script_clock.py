"""An untouched script in one precision, as a process.

``python -m ampscope.measure.script_clock --precision bf16 --steps 30 --seconds 20 --seed 0 --out
FILE SCRIPT ARGS…`` writes one JSON object: seconds and loss of each step, memory, what stood in the
way. It ends the script after its steps, or when the time is over.
"""

from __future__ import annotations

from pathlib import Path

import click
import torch

from ampscope.measure.script_precision import in_precision
from ampscope.measure.step_clock import Clock, observed
from ampscope.run.script_main import stage
from ampscope.run.script_text import execute


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--precision", required=True)
@click.option("--steps", type=int, required=True)
@click.option("--seconds", type=float, required=True)
@click.option("--seed", type=int, required=True)
@click.option("--cuda/--cpu", "on_cuda", default=False)
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def main(
    precision: str, steps: int, seconds: float, seed: int, on_cuda: bool, out: Path, script: str,
    args: tuple[str, ...],
) -> None:  # fmt: skip
    """Run SCRIPT in PRECISION and keep the time of its steps."""
    clock = Clock(steps, seconds, out, on_cuda=on_cuda)
    problem = ""
    try:
        with stage(script, args), observed(clock), in_precision(precision, clock):
            torch.manual_seed(seed)
            execute(script)
    except SystemExit as error:
        problem = f"It called sys.exit({error.code})." if error.code else ""
    except BaseException as error:
        problem = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    clock.write(problem)


if __name__ == "__main__":
    main()
