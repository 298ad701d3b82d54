"""Pure views over records: each answers one question with frozen dataclasses or numpy arrays.

Nothing here reads a store, draws a chart, or imports torch.
"""
