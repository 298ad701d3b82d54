"""PaddlePaddle and TensorFlow/Keras: adapters that write the same records as PyTorch's instruments.

Each framework runs in a process of its own, with a Python that has it and need not have torch; the
dashboard and the command line import none of them.

pythons      the frameworks as data, the Python that has one, `ampscope frameworks install|check`,
             and which framework a script trains with, read from its imports
adapters     what every adapter offers, and the settings that all understand
tensors      a tensor as NumPy bits with its dtype's name; exponents counted by numba
recorder     an adapter's facts as records of a run: steps, frames, ops, optimizer steps, bad layers
watch_run    the run of a training that a user watches from inside, and how a fit ends
networks     one LeNet, MLP and small transformer: weights and batches for every framework
child        `python -m ampscope.frameworks.child`: a probe
script       `python -m ampscope.frameworks.script`: a user's script, untouched
server       starts the runs of one script, and says how each ended
keras/       imports keras and tensorflow; nothing else does
paddle/      imports paddle; nothing else does
"""
