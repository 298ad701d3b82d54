"""How a step is executed: in which precision, by whose autocast lists, with whose arithmetic.

`autocast_lists` (with the precision modes) and `op_lists` (three frameworks' lists in common words)
are plain data and import no torch, so that the command line and the dashboard can read them.
`precision` puts a mode into effect. `rehearsal` makes a CPU follow CUDA's autocast lists and
`tensor_core` gives it Tensor Core arithmetic; together they are the *rehearsal of CUDA* that a
probe on a CPU runs by default. `benchmarks/remake_autocast_lists.py` compares the data with
the installed torch.
"""
