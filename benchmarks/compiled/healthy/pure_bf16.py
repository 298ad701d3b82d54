"""Weights, gradients and optimizer in bf16, with a rate that bf16 can hold."""

from parts import STEPS, cross_entropy, features, mlp, tell, torch

net = mlp().bfloat16()
model = torch.compile(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(STEPS):
    x, y = features()
    loss = cross_entropy(model(x.bfloat16()), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    tell(step, loss)
