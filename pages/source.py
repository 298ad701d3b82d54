"""Source: the script's text with dtypes, casts and first faults beside each line."""

from app import source, states
from app.runs import run_page

run = run_page.open_run("Source")
with states.contained():
    found = source.read(run)
    if found is not None:
        source.show_file(found)
