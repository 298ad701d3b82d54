"""The dashboard's frame: what every page shares. The pages themselves lie in ../pages.

Nothing here imports torch, writes SQL or knows a page: `main` starts, `frame` lays out, `store`
reads, `run_page` opens a page about a run, and the small modules beside them draw.
"""
