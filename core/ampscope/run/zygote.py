"""A process that has imported torch once and forks a child for every run of a script.

``python -m ampscope.run.zygote --store FILE`` reads lines ``RUN_ID<TAB>OUTPUT_FILE`` from standard
input, forks, and answers ``RUN_ID<TAB>STATUS`` on standard output when the child has ended.
Importing torch takes 1.5 to 3 s; a diagnosis makes 3 to 12 runs. Nothing that starts threads runs
before a fork, and torch starts its own at the first parallel op.
"""

from __future__ import annotations

import os
import selectors
import signal
import sys
from pathlib import Path

import click

POLL_S = 0.02


@click.command()
@click.option("--store", type=click.Path(path_type=Path), required=True)
def main(store: Path) -> None:
    """Serve runs of STORE until standard input ends."""
    import torch  # the import that every child shares

    import ampscope.run.script_child
    import ampscope.run.script_recorder  # noqa: F401  # so that children find it loaded

    torch.manual_seed(0)
    # Loaded now rather than once a child: optimizers import this lazily (0.5 s and more).
    import torch._dynamo

    children: dict[int, str] = {}
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    pending = b""
    open_input = True
    _answer("ready", 0)
    while open_input or children:
        if open_input and selector.select(POLL_S):
            chunk = os.read(0, 65536)
            open_input = bool(chunk)
            pending += chunk
            *lines, pending = pending.split(b"\n")
            for line in lines:
                _start(line.decode(), store, children)
        elif not open_input:
            _kill(children)
        _reap(children)


def _start(line: str, store: Path, children: dict[int, str]) -> None:
    run_id, output = line.split("\t")
    pid = os.fork()
    if pid:
        children[pid] = run_id
        return
    os.setsid()  # its own group, so that what the script starts dies with it
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        from ampscope.run.script_child import detach_output, run_child
        from ampscope.store.reader import Reader

        detach_output(Path(output))
        with Reader(store) as reader:
            spec = reader.run(run_id).spec
        status = run_child(store, run_id, spec)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _reap(children: dict[int, str]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        run_id = children.pop(pid, None)
        if run_id is not None:
            _answer(run_id, os.waitstatus_to_exitcode(status))


def _kill(children: dict[int, str]) -> None:
    for pid in children:
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _answer(run_id: str, status: int) -> None:
    os.write(1, f"{run_id}\t{status}\n".encode())


if __name__ == "__main__":
    main()
