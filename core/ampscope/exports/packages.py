"""Packages that ampscope does without: asked for when they are needed, missed in one sentence."""

from __future__ import annotations

from importlib.util import find_spec

from ampscope.errors import BadInput


def require(package: str, extra: str) -> None:
    """Raises BadInput, with what to install, when ``package`` is not there."""
    if find_spec(package) is None:
        raise BadInput(f'{package} is not installed: pip install "ampscope[{extra}]"')
