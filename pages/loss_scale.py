"""Loss scale: what the scaler did, step by step, and who held the NaN or Inf at every skip."""

from app import run_page, scale_view

run = run_page.opened("Loss scale")
found = scale_view.read(run)
scale_view.overview(found)
scale_view.trajectory(found)
scale_view.skips(run, found)
