"""Loss-scaling policies of PyTorch, PaddlePaddle, Keras and TensorFlow as pure step functions, and
their replay over recorded exponents. Imports no framework.

replay     one step of each policy, in fp32 arithmetic; which loss scales overflow a recorded step;
           the trajectory that a policy would have taken over a recorded run; what to set instead
"""
