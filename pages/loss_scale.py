"""Loss scale: what the scaler did, step by step, and who held the NaN or Inf at every skip."""

from app import loss_scale, states
from app.runs import run_page

run = run_page.open_run("Loss scale")
(run,) = run_page.pick(run, may_merge=False)
found = loss_scale.read(run)
if not found.steps:
    states.no_step_of(run)
with states.contained():
    loss_scale.show_overview(found)
with states.contained():
    loss_scale.show_trajectory(found)
with states.contained():
    loss_scale.show_skips(run, found)
with states.contained():
    loss_scale.draw_lab(run, found)
with states.contained():
    loss_scale.draw_windows(run)
