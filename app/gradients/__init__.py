"""The page Gradients: heat map, one module's histograms, underflow over time."""
