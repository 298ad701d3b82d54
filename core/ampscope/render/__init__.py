"""A document as HTML, Markdown, notebook and terminal; a diagnosis as JSON; charts as PNG."""
