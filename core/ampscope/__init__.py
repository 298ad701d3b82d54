"""ampscope: diagnostics for mixed-precision training, with measurements.

``import ampscope`` does not load torch; the dashboard and the command line never do. Trainings run
in child processes (``ampscope.runner``), or are the user's own (``ampscope.watch``).

    from ampscope import Workload      # what a user's own workload file returns
    ampscope.watch(model)              # record a training loop from inside
    ampscope.open_store("runs.db")     # a reader of a store, or of a file of `ampscope runs export`

Each is loaded on first use. `watch` and `Workload` need torch.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as typing's; the import of typing is a third of this package's

if TYPE_CHECKING:
    from ampscope.healthy import last_healthy
    from ampscope.store.importing import opened as open_store
    from ampscope.watcher.alarms import AlarmBounds
    from ampscope.watcher.capsule import CapsuleLimits
    from ampscope.watcher.watch import Watch, watch
    from ampscope.workloads.protocol import Workload

__all__ = [
    "AlarmBounds",
    "CapsuleLimits",
    "Watch",
    "Workload",
    "__version__",
    "last_healthy",
    "open_store",
    "watch",
]
_OF_WATCHER = ("AlarmBounds", "CapsuleLimits", "Watch", "watch")
__version__ = "0.2.0"


def __getattr__(name: str) -> object:
    """Load the torch-dependent names only when they are asked for (PEP 562)."""
    if name == "Workload":
        from ampscope.workloads.protocol import Workload

        return Workload
    if name == "open_store":
        from ampscope.store.importing import opened

        return opened
    if name == "last_healthy":
        from ampscope.healthy import last_healthy

        return last_healthy
    if name in _OF_WATCHER:
        from ampscope import watcher

        return getattr(watcher, name)
    raise AttributeError(f"module 'ampscope' has no attribute {name!r}")
