"""Training: how a watched training stands, what went wrong in it, and which rank was first."""

from app import states, training
from app.runs import run_page

run = run_page.open_run("Training")
ranks = run_page.ranks_of(run)
if len(ranks) > 1:
    found = training.read_ranks(ranks)
    with states.contained():
        training.show_ranks(found)
else:
    found = [training.read(run)]
    with states.contained():
        training.show_overview(found[0])
with states.contained():
    training.show_alarms(found)
with states.contained():
    training.show_capsules(found)
(one,) = run_page.pick(run, may_merge=False)
with states.contained():
    training.show_curves(next(t for t in found if t.run.id == one.id))
with states.contained():
    training.show_reports(found)
