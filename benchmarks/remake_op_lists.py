"""Remakes core/ampscope/policy/op_lists.json from installed frameworks.

python benchmarks/remake_op_lists.py PADDLE_PYTHON TENSORFLOW_PYTHON

Paddle is asked for its lists. TensorFlow ships its own as a C++ header, which is parsed: of each
list what stands in its initialiser, and what is inserted for CUDA under a condition (a version of
CUDA or cuDNN); what is inserted for oneDNN alone is left out.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

TARGET = Path(__file__).resolve().parent.parent / "core/ampscope/policy/op_lists.json"
PADDLE = """
import json, paddle
from paddle.amp import amp_lists
lists = {n: getattr(amp_lists, n + "_list")() for n in ("white", "black")}
print(json.dumps({"version": paddle.__version__, "lists": {
    n: {d: {l: sorted(ops) for l, ops in levels.items()} for d, levels in lists[n].items()}
    for n in lists}}))
"""
TENSORFLOW = """
from importlib import metadata, util
print(metadata.version("tensorflow-cpu"))
print(util.find_spec("tensorflow").submodule_search_locations[0])
"""
HEADER = "include/tensorflow/core/grappler/optimizers/auto_mixed_precision_lists.h"
CLASS = "class AutoMixedPrecisionListsFp16"
TENSOR_LIST_OPS: list[str] = []  # of the header's own helper, read first
NAMES = {"allow": "AllowList", "infer": "InferList", "deny": "DenyList", "clear": "ClearList"}


def asked(python: str, program: str) -> str:
    """What a program prints; a framework may warn before."""
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True)
    return done.stdout


def tensorflow_lists(header: str) -> dict[str, dict[str, list[str]]]:
    """List -> {"always": ops, "conditional": ops} of the fp16 lists."""
    body = header[header.index(CLASS) :]
    body = body[: body.index("\nclass ", 1)]
    return {name: one_list(body, function) for name, function in NAMES.items()}


def one_list(body: str, function: str) -> dict[str, list[str]]:
    text = body[body.index(f"{function}() override") :]
    text = text[: text.index("return list;")]
    start = text.index("auto list = gtl::FlatSet<string>{")
    first, rest = text[start : text.index("};", start)], text[text.index("};", start) :]
    rest = re.sub(r"if \(use_onednn_\) \{.*?\n    \}", "", rest, flags=re.DOTALL)
    inserted = re.findall(r'list\.insert\("(\w+)"\)', rest)
    if "AddTensorListOps(&list)" in rest:
        inserted += TENSOR_LIST_OPS
    return {"always": sorted(re.findall(r'"(\w+)"', first)), "conditional": sorted(inserted)}


def main() -> None:
    """Write the file."""
    paddle = json.loads(asked(sys.argv[1], PADDLE).splitlines()[-1])
    version, folder = asked(sys.argv[2], TENSORFLOW).split()
    header = (Path(folder) / HEADER).read_text()
    helper = header[header.index("static void AddTensorListOps") :]
    helper = helper[: helper.index("  }\n")]
    TENSOR_LIST_OPS.extend(re.findall(r'"(\w+)"', helper))
    content = {
        "made": datetime.now(UTC).date().isoformat(),
        "by": "benchmarks/remake_op_lists.py",
        "paddle": paddle,
        "tensorflow": {"version": version, "lists": tensorflow_lists(header)},
    }
    TARGET.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
