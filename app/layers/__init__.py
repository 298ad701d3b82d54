"""The page Layers: dtypes, casts and ops of one step."""
