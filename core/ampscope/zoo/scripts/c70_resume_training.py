"""Train in two phases with a checkpoint in between, as after a pre-empted job."""

import tempfile
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(20, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        return self.fc2(F.relu(self.fc1(x)))


class Trainer:
    def __init__(self, device):
        self.device = device
        self.model = Net().to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3)
        self.scaler = torch.amp.GradScaler(device)
        self.teacher = torch.randn(20, 10, generator=torch.Generator().manual_seed(9))
        self.step = 0

    def save(self, path):
        checkpoint = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
        }
        torch.save(checkpoint, path)

    def load(self, path):
        checkpoint = torch.load(path, map_location=self.device)
        self.model.load_state_dict(checkpoint["model"])
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        self.step = checkpoint["step"]

    def train(self, until):
        while self.step < until:
            x = torch.randn(256, 20)
            y = 4.0 * torch.tanh(x @ self.teacher)
            x, y = x.to(self.device), y.to(self.device)
            self.optimizer.zero_grad()
            with torch.autocast(self.device, dtype=torch.float16):
                logits = self.model(x)
                loss = F.mse_loss(logits, y, reduction="sum")
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.step += 1
            if self.step % 10 == 0:
                scale = self.scaler.get_scale()
                print(f"step {self.step}: loss per item {loss.item() / 256:.4f}, scale {scale:g}")


def main():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "last.pt"
        first = Trainer(device)
        first.train(until=40)
        first.save(path)

        print("resuming from", path.name)
        second = Trainer(device)
        second.load(path)
        second.train(until=80)


if __name__ == "__main__":
    main()
