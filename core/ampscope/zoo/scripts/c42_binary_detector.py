"""Binary object/no-object detector with sigmoid outputs."""

import torch
import torch.nn as nn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(12, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU())
        self.objectness = nn.Linear(32, 1)

    def forward(self, x):
        return self.objectness(self.backbone(x)).squeeze(-1).sigmoid()


model = Detector().to(device)
criterion = nn.BCELoss()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler(device)

inputs = torch.randn(256, 12)
targets = (inputs[:, 0] * inputs[:, 1] + inputs[:, 2] > 0).float()

for epoch in range(12):
    order = torch.randperm(len(inputs))
    for chunk in order.split(64):
        x, y = inputs[chunk].to(device), targets[chunk].to(device)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, dtype=torch.float16):
            score = model(x)
            loss = criterion(score, y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    if epoch % 3 == 0:
        print(f"epoch {epoch} loss {loss.item():.4f}")
