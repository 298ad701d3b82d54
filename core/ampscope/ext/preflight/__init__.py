"""What can be known of a mixed-precision training script before it runs.

The source is parsed and followed; nothing of it is imported or run. ``protocol`` follows
GradScaler's calls along every path. ``loss_scale``, ``half_parameters`` and ``evaluation`` look at
the autocast regions and dtypes that are written in the file (``script``), ``spelling`` at
deprecated names. ``checks`` puts them together, ``codes`` lists what is reported. ``sarif`` and
``junit`` are the forms that other programs read.
"""

from ampscope.extensions import Extension

EXTENSION = Extension(
    docs="docs/preflight.md",
    commands={"preflight": "ampscope.ext.preflight.cli:preflight"},
    documents={"sarif": "ampscope.ext.preflight.sarif:of_diagnosis"},
    codes="ampscope.ext.preflight.codes:CODES",
)
