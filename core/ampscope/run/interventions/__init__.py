"""Interventions: one change each, applied to a script from outside and taken back on exit."""
