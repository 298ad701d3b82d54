"""A diagnosis whose runs are jobs of a cluster."""

from ampscope.extensions import Extension

_RUNS = "ampscope.ext.jobs.submitted_runs:SubmittedRuns"
EXTENSION = Extension(
    docs="docs/rehearsal.md", job_engines={"slurm": _RUNS, "ray": _RUNS, "local": _RUNS}
)
