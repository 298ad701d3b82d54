"""The page New probe: its form."""
