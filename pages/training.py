"""Training: how a watched training stands, what went wrong in it, and which rank was first."""

from app import states
from app.runs import run_page, trainings
from app.training import training_data, training_ranks, training_view

run = run_page.opened("Training")
ranks = trainings.ranks_of(run)
if len(ranks) > 1:
    found = training_ranks.read(ranks)
    with states.part():
        training_ranks.show(found)
else:
    found = [training_data.read(run)]
    with states.part():
        training_view.overview(found[0])
with states.part():
    training_view.alarms(found)
with states.part():
    training_view.capsules(found)
(one,) = trainings.pick(run, may_merge=False)
with states.part():
    training_view.curves(next(t for t in found if t.run.id == one.id))
with states.part():
    training_view.said(found)
