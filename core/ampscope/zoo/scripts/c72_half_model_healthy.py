"""Fine-tune a small regression model in half precision to save memory."""

import torch
import torch.nn as nn


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU())
        self.out = nn.Linear(48, 2)

    def forward(self, x):
        return self.out(self.body(x))


def main():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Regressor().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler(device)
    mse = nn.MSELoss()
    mixing = torch.randn(12, 2) / 4

    for step in range(40):
        x = torch.randn(64, 12)
        y = torch.sin(x @ mixing)
        x, y = x.to(device), y.to(device)
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.float16):
            loss = mse(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step % 10 == 0:
            print(step, loss.item())


if __name__ == "__main__":
    main()
