"""A script held to the limits of its project: lost gradients, new fp32 islands, slower steps."""

from ampscope.extensions import Extension

EXTENSION = Extension(
    docs="docs/preflight.md",
    needs=("preflight",),
    commands={"budget": "ampscope.ext.budget.cli:budget"},
)
