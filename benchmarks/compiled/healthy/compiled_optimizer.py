"""The model and the optimizer's step are compiled."""

from parts import DEVICE, STEPS, cross_entropy, features, mlp, tell, torch

net = mlp()
model = torch.compile(net)
optimizer = torch.optim.AdamW(net.parameters(), lr=torch.tensor(3e-3))
update = torch.compile(optimizer.step)
for step in range(STEPS):
    x, y = features()
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        loss = cross_entropy(model(x), y)
    loss.backward()
    update()
    optimizer.zero_grad()
    tell(step, loss)
