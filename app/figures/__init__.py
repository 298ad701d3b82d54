"""Charts, one file per subject: from results of an analysis to Plotly figures. No Streamlit.

Each axis of exponents is log2 of the magnitude: the bar or cell of exponent e covers [e, e + 1).
Fills are palette colours with their own opacity and backgrounds are transparent, so that a figure
reads in the light and in the dark theme alike.
"""
