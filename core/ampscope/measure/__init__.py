"""What a child process measures: products and copies alone, a step's products, precisions beside
each other, batch sizes. Imports torch; writes records.results to the store.

kinds        which measurement a run asks for
timing       one call, timed often: median and quartiles
"""
