"""Forward pass, backward pass and update in one compiled function."""

from parts import DEVICE, STEPS, cross_entropy, features, mlp, tell, torch

net = mlp()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


@torch.compile
def step_of(x, y):
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        loss = cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


for step in range(STEPS):
    tell(step, step_of(*features()))
