"""Compile the CUDA counter ahead of time: ``python triton_compile.py 75 80 90``, without a GPU.

Prints a line of JSON for each compute capability and variant of the kernel: the registers that a
thread takes, and the bytes that it spills. Runs with the Triton that Python finds.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ampscope.capture import exponent_cuda

PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def compiled(capability: int, variant: exponent_cuda.Variant) -> dict[str, object]:
    """Compile what a launch would."""
    kernel = exponent_cuda._count
    given = {"columns": exponent_cuda.COLUMNS, "tile": exponent_cuda.TILE, "tiles": variant.tiles}
    signature = {
        one.name: "constexpr" if one.is_constexpr else one.annotation_type or "*i64"
        for one in kernel.params
    }
    pointers = [one.num for one in kernel.params if signature[one.name] == "*i64"]
    assert len(pointers) == 2, signature  # whose alignment a launch sees; it specialises no other
    assert all(one.do_not_specialize for one in kernel.params if signature[one.name] == "i64")
    source = ASTSource(
        kernel, signature, given, attrs={(place,): [["tt.divisibility", 16]] for place in pointers}
    )
    made = triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": variant.num_warps, "maxnreg": variant.maxnreg},
    )
    assert made.asm["cubin"]
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(made.asm["ptx"])
        file.flush()
        said = subprocess.run(
            [
                PTXAS / ("ptxas-blackwell" if capability >= 100 else "ptxas"), "-v",
                f"--gpu-name=sm_{capability}" + "a" * (capability >= 90), file.name,
                "-o", "/dev/null",
            ],
            capture_output=True, text=True, check=True,
        ).stderr  # fmt: skip
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill", said)))
    (registers,) = re.findall(r"Used (\d+) registers", said)
    return {
        "triton": triton.__version__, "capability": capability, "variant": variant._asdict(),
        "registers": int(registers), "spilled_bytes": spilled,
    }  # fmt: skip


if __name__ == "__main__":
    variants = exponent_cuda.VARIANTS if "--all" in sys.argv else [exponent_cuda.DEFAULT]
    for capability in filter(str.isdigit, sys.argv[1:]):
        for variant in variants:
            print(json.dumps(compiled(int(capability), variant)), flush=True)
