"""What ampscope says of runs and diagnoses: as HTML, Markdown, notebook, terminal and JSON."""
