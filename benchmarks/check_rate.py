"""How fast `ampscope check` reads checkpoints from the page cache, and in how much memory.

    python -m benchmarks.check_rate [--size 2e9] [--repeats 5]

A file of random weights of each format, once in safetensors and, of fp32, once by torch.save; it is
read once so that it lies in the page cache, then checked by the command; the best repeat counts.
Writes results/check_rate.json: GB/s over the command's whole time with its start, over the check
alone, and per second of processor time (that of its child included: a torch file's child imports
torch); the largest resident memory of the command and of its child; the machine's load meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ampscope.hardware.describe import describe_machine, one_line

OUT = Path(__file__).resolve().parent / "results" / "check_rate.json"
_MAKE = """
import sys, torch
from safetensors.torch import save_file
kind, path, size = sys.argv[1], sys.argv[2], int(float(sys.argv[3]))
dtype = getattr(torch, kind)
columns = 4096
rows = size // 8 // columns // dtype.itemsize
made = {f"layers.{i}.weight": (torch.randn(rows, columns) * 0.02).to(dtype) for i in range(8)}
torch.save(made, path) if path.endswith(".pt") else save_file(made, path)
"""
_CHECK = """
import json, resource, sys, time
from pathlib import Path
from ampscope.ext.checkpoints.check import check_checkpoint
from ampscope.cli.main import main
def cpu():
    used = [resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)
started, before = time.perf_counter(), cpu()
found = check_checkpoint(Path(sys.argv[1]))
spent = time.perf_counter() - started, cpu() - before
peak = [resource.getrusage(w).ru_maxrss * 1024
        for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
assert not found.findings and "torch" not in sys.modules
print(json.dumps([*spent, *peak, sum(t.elements for t in found.tensors)]))
"""


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=float, default=2e9, help="bytes of each file")
    parser.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for kind, suffix in (("float32", ".safetensors"), ("bfloat16", ".safetensors"),
                             ("float16", ".safetensors"), ("float8_e4m3fn", ".safetensors"),
                             ("float32", ".pt")):  # fmt: skip
            path = Path(folder) / f"x{suffix}"
            subprocess.run(
                [sys.executable, "-c", _MAKE, kind, str(path), str(asked.size)], check=True
            )
            found.append({"format": kind, "file": suffix} | measured(path, asked.repeats))
            print(json.dumps(found[-1]))
            path.unlink()
    document = {
        "schema": 1,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": one_line(describe_machine()),
        "files": found,
    }
    OUT.write_text(json.dumps(document, indent=1) + "\n")


def measured(path: Path, repeats: int) -> dict[str, Any]:
    """The best of some repeats."""
    size = path.stat().st_size
    with path.open("rb") as file:
        while file.read(1 << 24):
            pass
    best: dict[str, Any] = {}
    for _ in range(repeats):
        started = time.perf_counter()
        command = [sys.executable, "-c", _CHECK, str(path)]
        answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        whole_s = time.perf_counter() - started
        check_s, cpu_s, own, child, elements = json.loads(answer)
        this = {
            "bytes": size, "elements": elements,
            "gb_per_s": round(size / check_s / 1e9, 2),
            "gb_per_s_with_start": round(size / whole_s / 1e9, 2),
            "gb_per_cpu_s": round(size / cpu_s / 1e9, 2),
            "peak_mb": round(own / 1e6), "peak_child_mb": round(child / 1e6),
            "load": round(os.getloadavg()[0], 1),
        }  # fmt: skip
        if not best or this["gb_per_s"] > best["gb_per_s"]:
            best = this
    return best


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    main()
