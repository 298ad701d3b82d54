"""Op lists: which op runs in which precision under autocast, in three frameworks."""

import streamlit as st

from app.op_lists import op_lists_view, op_lists_whatif

st.title("Op lists", anchor=False)
op_lists_view.show()
op_lists_whatif.show()
