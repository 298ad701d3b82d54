"""Entry of the dashboard: `streamlit run app/main.py [-- --store FILE --workloads DIR]`.

Streamlit puts this file's folder on the path; the package `app` lies one folder up.
"""

import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent
if str(_HERE.parent) not in sys.path:
    # In place of app/ itself, whose module names are not meant for the top level.
    sys.path[:] = [str(_HERE.parent), *(p for p in sys.path if p != str(_HERE))]

from app import frame  # noqa: E402  - needs the path set above

frame.show()
