"""What a coding agent may ask ampscope for, over the Model Context Protocol (docs/agents.md)."""

from ampscope.extensions import Extension

EXTENSION = Extension(
    docs="docs/agents.md",
    needs=("preflight", "diff"),
    commands={"mcp": "ampscope.ext.agents.cli:mcp"},
)
