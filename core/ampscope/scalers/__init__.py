"""Loss-scaling policies of PyTorch, PaddlePaddle, Keras and TensorFlow as pure step functions, and
their replay over recorded exponents. Imports no framework.

policies   one step of each policy, in fp32 arithmetic, with its framework's defaults
overflow   which loss scales overflow the gradients of a recorded step
replay     the trajectory that a policy would have taken over a recorded run
"""
