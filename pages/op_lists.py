"""Op lists: which op runs in which precision under autocast, in three frameworks."""

import streamlit as st

from app import links, op_lists

st.title("Op lists", anchor=False)
links.show_section("Reference")
op_lists.show_lists()
op_lists.show_whatif()
