"""Whether inductor can generate code here: on a CPU it needs a C++ compiler (``CXX``, or g++)."""

from __future__ import annotations

import os
import shutil

import pytest

needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None,
    reason="inductor needs a C++ compiler: install g++, or name one in CXX",
)
