"""Formats, exponent histograms and what can be read from them, with NumPy alone."""
