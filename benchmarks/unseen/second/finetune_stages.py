import argparse
import torch
import torch.nn as nn
import torch.nn.functional as F


class Backbone(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())


class Classifier(nn.Module):
    def __init__(self, classes=6):
        super().__init__()
        self.backbone = Backbone()
        self.head = nn.Linear(32, classes)

    def forward(self, x):
        return self.head(self.backbone(x))


def set_trainable(module, flag):
    for p in module.parameters():
        p.requires_grad_(flag)


def loader(n_steps, centers, batch=64):
    for _ in range(n_steps):
        y = torch.randint(len(centers), (batch,))
        yield centers[y] + 1.2 * torch.randn(batch, centers.shape[1]), y


def run_stage(name, model, opts, scaler, data):
    for step, (x, y) in enumerate(data):
        for o in opts:
            o.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        for o in opts:
            scaler.step(o)
        scaler.update()
        if step % 20 == 19:
            print(f"{name} step {step + 1} loss {loss.item():.4f}")


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--stage1", type=int, default=60)
    ap.add_argument("--stage2", type=int, default=60)
    args = ap.parse_args()
    torch.manual_seed(0)
    centers = torch.randn(6, 24)
    model = Classifier()
    body = torch.optim.AdamW(model.backbone.parameters(), lr=2e-3)
    head = torch.optim.AdamW(model.head.parameters(), lr=2e-3)
    scaler = torch.amp.GradScaler("cpu")
    run_stage("all", model, [body, head], scaler, loader(args.stage1, centers))
    set_trainable(model.backbone, False)
    run_stage("head", model, [body, head], scaler, loader(args.stage2, centers))


if __name__ == "__main__":
    main()
