"""Loss scale: what the scaler did, step by step, and who held the NaN or Inf at every skip."""

from app import states
from app.loss_scale import scale_data, scale_lab, scale_view, scale_windows_view
from app.runs import run_page, trainings

run = run_page.opened("Loss scale")
(run,) = trainings.pick(run, may_merge=False)
found = scale_data.read(run)
if not found.steps:
    states.no_step_of(run)
with states.part():
    scale_view.overview(found)
with states.part():
    scale_view.trajectory(found)
with states.part():
    scale_view.skips(run, found)
with states.part():
    scale_lab.draw(run, found)
with states.part():
    scale_windows_view.draw(run)
