"""Op lists: which op runs in which precision under autocast, in three frameworks."""

import streamlit as st

from app import op_lists

st.title("Op lists", anchor=False)
op_lists.show_lists()
op_lists.show_whatif()
