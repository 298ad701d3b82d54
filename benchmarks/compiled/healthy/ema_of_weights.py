"""An average of the weights, evaluated by compiled code of its own."""

import copy

from parts import DEVICE, STEPS, cross_entropy, features, mlp, tell, torch

net = mlp()
average = copy.deepcopy(net).requires_grad_(False)
model, judge = torch.compile(net), torch.compile(average)
optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3)
for step in range(STEPS):
    x, y = features()
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        loss = cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for mean, now in zip(average.parameters(), net.parameters(), strict=True):
            mean.lerp_(now, 0.1)
        held_out = cross_entropy(judge(x), y)
    tell(step, held_out)
