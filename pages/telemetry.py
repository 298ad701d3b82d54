"""Telemetry: what the machine did while a run took place, and what disturbed it."""

from app import states
from app.runs import run_page, trainings
from app.telemetry import telemetry_view

run = run_page.opened("Telemetry")
(run,) = trainings.pick(run, may_merge=False)
with states.part():
    telemetry_view.show(run)
