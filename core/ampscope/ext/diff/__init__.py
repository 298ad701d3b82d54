"""Two runs: from where on one computes other numbers than the other, and what explains it.

`runs` makes the runs of ``ampscope diff``, `run_diff` compares them, `words` says what was found;
`two_runs` compares any two runs of a store for the page Two runs.
"""

from ampscope.extensions import Extension, Page

EXTENSION = Extension(
    docs="docs/diff.md",
    commands={"diff": "ampscope.ext.diff.cli:diff"},
    pages=(Page("two_runs", "Two runs", "difference", within="Trainings", of_run=True),),
)
