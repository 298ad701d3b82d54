"""Four micro-batches make one step, in fp16 with a scaler."""

from parts import DEVICE, STEPS, cross_entropy, features, mlp, tell, torch

net = mlp()
model = torch.compile(net)
optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**10)
for step in range(STEPS):
    for _ in range(4):
        x, y = features(8)
        with torch.autocast(DEVICE, dtype=torch.float16):
            loss = cross_entropy(model(x), y) / 4
        scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    tell(step, 4 * loss)
