"""The page Tensor Cores."""
