"""An untrusted file on its way into the store: read, checked whole, then written as new runs.

Nothing comes near the store before everything in the file has been checked, and it is written in
one transaction: a file that is refused leaves the store as it was. A refusal is one sentence that
names the place: ``step[17].loss: a number was expected, not a list``.
"""

from ampscope.store.importing.runs import Imported, import_file, opened

__all__ = ["Imported", "import_file", "opened"]
