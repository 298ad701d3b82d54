"""The dashboard. Its pages lie in ../pages; each draws what its room here gives it.

Nothing here imports torch or writes SQL. `main` starts, `frame` lays out, `store` reads, and what
every page may use stands beside them; `figures` builds charts. `runs` is what pages about runs
share. Every other room belongs to one page, or to two that show one kind of measurement, and knows
no other page's room but where pyproject.toml says so.
"""
