"""Inside a user's own training: ``ampscope.watch`` and what it is made of.

    with ampscope.watch(model, optimizer, scaler) as run:
        train()

watch             checks what it is given, opens a session; live_figure: in a notebook
session           one watched training, step by step; calls what is named below
watched_run       what a run says of itself: its row in the store, what cannot be seen
watched_optimizers  which optimizers step the watched models
models            numbers and names of modules and parameters
place             which rank of which training this process is
gradient_norms    what is read at every step: a norm per parameter, loss; clips: the training's own
schedule          at which steps histograms are taken, and when the schedule tightens
histograms        the exponent histograms of a step
flight            what is needed to run the present step again; buffer_copies is a part of it
bad_steps         what is done about a step that is not finite; sentinel: by this rank's own doing
capsule           such a step as a file; packed_values: a model's arguments in it
capsule_store     which bad steps are kept, and where
replay            runs a capsule again (rerun), op by op and beside fp32; replay_child: its process
step              an open step, its numbers, and its record when it is over
alarms            what a user should know of; alarm_dispatcher reports it
state_guard       whether a checkpoint taken now is healthy, and which was the last
webhook           sends alarms to an address
recorder          hands everything to a thread that writes the store
guard             an error of ampscope's own ends the watching, not the training
"""

from ampscope.watcher.alarms import AlarmBounds, TrainingStopped
from ampscope.watcher.capsule import CapsuleLimits
from ampscope.watcher.watch import Watch, watch

__all__ = ["AlarmBounds", "CapsuleLimits", "TrainingStopped", "Watch", "watch"]
