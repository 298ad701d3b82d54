"""Entry of the dashboard: `streamlit run app/main.py [-- OPTIONS]`; the options: app/options.py.

The file is used twice. Streamlit's command finds ``app`` in it and serves that, with the checks of
app/server.py in front; then it runs the file as a script, named ``__main__``, for each page.
Streamlit puts this file's folder on the path; the package `app` lies one folder up.
"""

import sys
from pathlib import Path

import streamlit

_HERE = Path(__file__).resolve().parent
if str(_HERE.parent) not in sys.path:
    # In place of app/ itself, whose module names are not meant for the top level.
    sys.path[:] = [str(_HERE.parent), *(p for p in sys.path if p != str(_HERE))]

if __name__ == "__main__":
    from app import states

    states.show()
else:
    from app import server

    app = streamlit.App(
        Path(__file__).resolve(),
        routes=server.routes(),
        middleware=server.MIDDLEWARE,
        lifespan=server.lifespan,
    )
