"""Inside somebody's own training: ``ampscope.watch`` and what it is made of.

    with ampscope.watch(model, optimizer, scaler) as run:
        train()

step_hooks  sees steps end: optimizer hooks, GradScaler's methods, backward
numbers     what is read at every step: a norm per parameter, loss, scale
schedule    at which steps histograms are taken, and when the schedule tightens
histograms  the exponent histograms of a step
flight      what is needed to run a failing step again; capsule keeps it in a file, replay runs it
alarms      what a person should hear of
recorder    hands everything to a thread that writes the store
"""

from ampscope.watcher.alarms import AlarmBounds, TrainingStopped
from ampscope.watcher.capsule import CapsuleLimits
from ampscope.watcher.watch import Watch, watch

__all__ = ["AlarmBounds", "CapsuleLimits", "TrainingStopped", "Watch", "watch"]
