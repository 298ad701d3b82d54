"""The page Training: a watched run, and the ranks of a distributed one."""
