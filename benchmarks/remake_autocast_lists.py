"""Compare the data of `autocast_lists` with the autocast lists of the torch that is installed.

    python benchmarks/remake_autocast_lists.py      # prints the differences; exit status 1 if any

torch's wheel carries the C++ header in which the lists are X-macros:

    #define AT_FORALL_PROMOTE(_) \\
      _(addcdiv)                 \\
      _(pow, Tensor_Scalar)      \\

so the data can be compared with any torch release without building it. The header lacks the few ops
that `aten/src/ATen/autocast_mode.cpp` registers by itself; `NOT_IN_HEADER` names them.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from ampscope.policy.autocast_lists import CUDA_LISTS, NOT_IN_HEADER, TORCH_VERSION

MACRO_OF_LIST = {
    "lower_precision_fp": "AT_FORALL_LOWER_PRECISION_FP",
    "fp32": "AT_FORALL_FP32",
    "fp32_set_opt_dtype": "AT_FORALL_FP32_SET_OPT_DTYPE",
    "fp32_append_dtype": "AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE",
    "promote": "AT_FORALL_PROMOTE",
}
_PLAIN_ENTRY = re.compile(r"_\(\s*(\w+)\s*(?:,\s*(\w+)\s*)?\)")
_QUOTED_NAME = re.compile(r'"([\w.]+)"')


def installed_header() -> Path:
    """The header inside the installed torch wheel; found without importing torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("torch is not installed, so there is no header to read")
    return Path(spec.origin).parent / "include" / "ATen" / "autocast_mode.h"


def parse_header(text: str) -> dict[str, frozenset[str]]:
    """Op names (`name` or `name.overload`) by list name, as the header's macros give them."""
    return {name: _entries(_macro_body(text, macro)) for name, macro in MACRO_OF_LIST.items()}


def differences(
    header: Mapping[str, frozenset[str]], lists: Mapping[str, frozenset[str]]
) -> list[str]:
    """One line for each op that only one side has; empty when both agree."""
    lines = []
    for name, in_header in header.items():
        in_data = lists[name] - NOT_IN_HEADER
        lines += [f"{name}: {op} is in the header only" for op in sorted(in_header - in_data)]
        lines += [f"{name}: {op} is in the data only" for op in sorted(in_data - in_header)]
    return lines


def _macro_body(text: str, macro: str) -> str:
    """The macro's lines after the `#define`, joined, without the backslashes."""
    lines = iter(text.splitlines())
    body: list[str] = []
    for line in lines:
        if not line.startswith(f"#define {macro}(_)"):
            continue
        while line.endswith("\\"):
            line = next(lines)
            body.append(line.removesuffix("\\"))
        return " ".join(body)
    raise ValueError(f"the header has no macro {macro}; torch has moved its lists")


def _entries(body: str) -> frozenset[str]:
    quoted = _QUOTED_NAME.findall(body)  # the append-dtype macro names its ops in quotes
    if quoted:
        return frozenset(quoted)
    return frozenset(".".join(filter(None, entry)) for entry in _PLAIN_ENTRY.findall(body))


def main() -> int:
    """Print the differences between the installed torch and the data."""
    found = differences(parse_header(installed_header().read_text()), CUDA_LISTS)
    print("\n".join(found) or f"the lists are those of torch {TORCH_VERSION}, unchanged")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
