"""What goes wrong inside ampscope is not the training's: it ends the watching, with a warning."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from ampscope.errors import AmpscopeError
from ampscope.watcher.alarms import AmpscopeWarning

P = ParamSpec("P")
T = TypeVar("T", bound="Contained")


class Contained(Protocol):
    """What has methods that are called from inside somebody's training."""

    is_off: bool  # nothing is watched any more

    def gave_up(self, reason: str) -> None: ...


def contained(
    method: Callable[Concatenate[T, P], None],
) -> Callable[Concatenate[T, P], None]:
    """Only alarms that are meant to be raised leave ``method``; any other exception ends the
    watching, and the training goes on."""

    @functools.wraps(method)
    def wrapper(self: T, /, *args: P.args, **kwargs: P.kwargs) -> None:
        if self.is_off:
            return
        try:
            method(self, *args, **kwargs)
        except AmpscopeError:
            raise
        except Exception as error:  # of any kind: it would end somebody's training
            self.is_off = True
            reason = f"ampscope watches no more: {type(error).__name__}: {error}"
            self.gave_up(reason)
            warnings.warn(reason, AmpscopeWarning, stacklevel=2)

    return wrapper


def quietly(function: Callable[..., Any], failed: Callable[[Exception], None]) -> Any:
    """``function``'s result, or None when it raised, which ``failed`` is told."""
    try:
        return function()
    except Exception as error:  # as above
        failed(error)
        return None
