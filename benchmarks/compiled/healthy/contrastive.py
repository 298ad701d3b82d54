"""Two compiled towers and a learnt temperature."""

from parts import DEVICE, STEPS, F, math, mlp, nn, tell, torch

towers = nn.ModuleList([mlp(16, 32, 8), mlp(16, 32, 8)])
scale = nn.Parameter(torch.tensor(math.log(10.0)))
models = [torch.compile(tower) for tower in towers]
optimizer = torch.optim.AdamW([*towers.parameters(), scale], lr=3e-3)
for step in range(STEPS):
    shared = torch.randn(32, 16)
    views = [shared + 0.1 * torch.randn(32, 16) for _ in models]
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        a, b = (F.normalize(m(v).float(), dim=1) for m, v in zip(models, views, strict=True))
        loss = F.cross_entropy(scale.exp() * a @ b.t(), torch.arange(32))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    tell(step, loss)
