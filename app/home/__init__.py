"""The page Home: the demo and the recent runs."""
