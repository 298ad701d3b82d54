"""fp16 with a scaler, gradients unscaled and clipped."""

from parts import DEVICE, GPT, STEPS, cross_entropy, nn, sentences, tell, torch

net = GPT()
model = torch.compile(net)
optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**12)
for step in range(STEPS):
    x, y = sentences()
    with torch.autocast(DEVICE, dtype=torch.float16):
        loss = cross_entropy(model(x), y)
    optimizer.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    tell(step, loss)
