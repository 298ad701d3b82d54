"""Telemetry: what the machine did while a run took place, and what disturbed it."""

from app import run_page, telemetry_view, trainings

run = run_page.opened("Telemetry")
(run,) = trainings.pick(run, may_merge=False)
telemetry_view.show(run)
