"""A generator and a critic, both compiled, each with an optimizer."""

from parts import DEVICE, STEPS, F, mlp, tell, torch

maker, critic = mlp(4, 32, 2), mlp(2, 32, 1)
make, judge = torch.compile(maker), torch.compile(critic)
optimizers = [torch.optim.Adam(m.parameters(), lr=1e-3, betas=(0.5, 0.9)) for m in (maker, critic)]
for step in range(STEPS):
    angle = 6.28 * torch.rand(64)
    real, noise = torch.stack([angle.cos(), angle.sin()], 1), torch.randn(64, 4)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        fake = make(noise)
        loss = (
            F.softplus(-judge(real).float()).mean()
            + F.softplus(judge(fake.detach()).float()).mean()
        )
    optimizers[1].zero_grad()
    loss.backward()
    optimizers[1].step()
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        loss = F.softplus(-judge(make(noise)).float()).mean()
    optimizers[0].zero_grad()
    loss.backward()
    optimizers[0].step()
    tell(step, loss)
