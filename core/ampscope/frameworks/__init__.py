"""PaddlePaddle and TensorFlow/Keras: adapters that write the same records as PyTorch's instruments.

Each framework runs in a process of its own, with a Python that has it and need not have torch; the
dashboard and the command line import none of them.

names        which frameworks there are, what they are called, which versions were tried
pythons      which Python has a framework; one sentence when none has
environments `ampscope frameworks install|check`
recognise    which framework a script trains with, read from its imports
settings     controls and interventions as settings that every adapter understands
tensors      a tensor as NumPy bits with its dtype's name; exponents counted by numba
steps        what an adapter hands over at each optimizer step
recorder     those facts as records of a run: steps, frames, attempts, scans, bad layers
op_sets      the ops of each step, kept once
array_sums   norms and largest magnitudes in few passes
watch_run    the run of a training that somebody watches from inside
fit_ends     how a framework's fit ends
networks     one LeNet, MLP and small transformer: weights and batches for every framework
child        `python -m ampscope.frameworks.child`: a probe
script       `python -m ampscope.frameworks.script`: a user's script, untouched
server       starts the runs of one script, and says how each ended
keras/       imports keras and tensorflow; nothing else does
paddle/      imports paddle; nothing else does
"""
