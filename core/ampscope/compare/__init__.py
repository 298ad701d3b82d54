"""What a comparison of precisions and a batch search mean: pure views over their results.

No torch, no store: :mod:`ampscope.measure` wrote the records, these functions read them.
"""
