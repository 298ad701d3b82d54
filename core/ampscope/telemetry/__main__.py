"""The sampler's process: see the package. Its standard output is one sentence, or nothing."""

from __future__ import annotations

import gc
import os
import sys
from argparse import ArgumentParser
from pathlib import Path

from ampscope.errors import StoreError
from ampscope.store.processes import process_start_time
from ampscope.store.samples import SampleRows
from ampscope.telemetry.cpu import CpuReader
from ampscope.telemetry.sampler import Sampler, say
from ampscope.telemetry.values import DeviceLost, DeviceReader


def main() -> None:
    """Sample until the run ends; a failure is one sentence, never more."""
    parser = ArgumentParser(prog="python -m ampscope.telemetry", description=__doc__)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--run", required=True)
    parser.add_argument("--pid", type=int, required=True, help="the run's process")
    parser.add_argument("--device", default="cpu", help="cpu or cuda:N")
    parser.add_argument("--uuid", default="", help="of that GPU")
    options = parser.parse_args()
    started = process_start_time(options.pid)
    notes: list[str] = []
    readers: list[DeviceReader] = [CpuReader(options.pid)]
    if options.device.startswith("cuda"):
        from ampscope.telemetry.gpu import GpuReader

        try:
            readers.insert(0, GpuReader(options.device, options.uuid, options.pid))
        except DeviceLost as lost:
            notes.append(str(lost))
    gc.freeze()  # what was imported stays; a collection need not look at it
    try:
        with SampleRows(options.store, options.run) as rows:
            sampler = Sampler(rows, readers)
            sampler.run(sys.stdin.fileno(), options.pid, started)
            notes += sampler.notes
            sampler.close()
    except StoreError as error:
        notes.append(f"The machine's readings end early: {error}")
    say(notes, sys.stdout.fileno())
    os._exit(0)  # all is written: taking Python down would only make the run's end wait


if __name__ == "__main__":
    main()
