"""A library that is not installed is said in one sentence."""

from __future__ import annotations

import subprocess
import sys

import pytest

LIBRARIES = {
    "lightning": ("lightning", "pytorch_lightning"),
    "transformers": ("transformers",),
    "accelerate": ("accelerate",),
}


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_missing_library_is_one_sentence(name: str) -> None:
    """Asked in a fresh process in which the library cannot be found."""
    hidden = dict.fromkeys(LIBRARIES[name])
    code = f"import sys; sys.modules.update({hidden}); import ampscope.integrations.{name}"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90)
    assert found.returncode == 1
    last = found.stderr.strip().splitlines()[-1]
    assert last.endswith(f'is not installed: pip install "ampscope[{name}]"'), found.stderr
