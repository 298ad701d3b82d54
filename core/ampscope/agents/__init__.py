"""What a coding agent may ask ampscope for, over the Model Context Protocol (docs/agents.md)."""
