"""Two runs: one beside the other, from the loss down to one module's histograms."""

from app import states
from app.ext import two_runs
from app.runs import run_page

run = run_page.open_run("Two runs")
second = two_runs.pick_second(run)
if second is None:
    states.nothing_recorded(
        "There is no second run to compare with.",
        "Start another probe, or run `ampscope diagnose` on a script: its controls are runs, too.",
    )
else:
    both = two_runs.read(run, second)
    with states.contained():
        two_runs.show_overview(both)
    with states.contained():
        two_runs.show_difference(both)
    with states.contained():
        values = two_runs.pick_values(both)
        found = two_runs.show_modules(both, values)
        if values is not None:
            two_runs.show_module(both, values, found)
