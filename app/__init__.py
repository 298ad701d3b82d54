"""The dashboard. Its pages lie in ../pages; each draws what its module here gives it.

Nothing here imports torch or writes SQL. `main` starts, `server` checks every request, `states`
draws the frame and the designed states, `store` reads behind `permissions`, and what every page may
use stands beside them; `figures` builds charts, `runs` holds what pages about runs share, `ext` the
pages of extensions. Every other module belongs to one page, or to two that show one kind of
measurement, and knows no other page's module but where pyproject.toml says so.
"""
