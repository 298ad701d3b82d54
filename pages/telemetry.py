"""Telemetry: what the machine did while a run took place, and what disturbed it."""

from app import states, telemetry
from app.runs import run_page

run = run_page.open_run("Telemetry")
(run,) = run_page.pick(run, may_merge=False)
with states.contained():
    telemetry.show_telemetry(run)
