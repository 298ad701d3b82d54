"""Batch norm in training and in evaluation: two compilations of one model."""

from parts import DEVICE, STEPS, Convolutions, cross_entropy, pictures, tell, torch

net = Convolutions()
model = torch.compile(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
for step in range(STEPS):
    x, y = pictures()
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        loss = cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 4:
        net.eval()
        with torch.no_grad():
            tell(step + 1, cross_entropy(model(x), y))
        net.train()
