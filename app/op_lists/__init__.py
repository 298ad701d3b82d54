"""The page Op lists, and what if an op were on the other list."""
