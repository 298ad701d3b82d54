"""Metric depth from predicted disparity; far points get no depth."""
import torch
from torch import nn
import torch.nn.functional as F


class DisparityNet(nn.Module):
    def __init__(self, n_in=16, width=64, max_disp=64.0):
        super().__init__()
        self.max_disp = max_disp
        self.features = nn.Sequential(nn.Linear(n_in, width), nn.ELU(), nn.Linear(width, width), nn.ELU())
        self.logit = nn.Linear(width, 1)

    def forward(self, x, sky):
        logit = self.logit(self.features(x)).squeeze(-1)
        return self.max_disp * torch.sigmoid(logit - 20.0 * sky.to(logit.dtype))


class DepthHead(nn.Module):
    def __init__(self, min_disp=0.05):
        super().__init__()
        self.min_disp = min_disp

    def forward(self, disp, focal_baseline):
        depth = focal_baseline / disp
        return torch.where(disp > self.min_disp, depth, torch.zeros_like(depth))


class StereoModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = DisparityNet()
        self.to_depth = DepthHead()

    def forward(self, x, sky, focal_baseline):
        disp = self.net(x, sky)
        return disp, self.to_depth(disp, focal_baseline)


def scene(n, gen, mix):
    z = torch.randn(n, 16, generator=gen)
    logit = -2.0 + 2.0 * (z @ mix)
    sky = torch.rand(n, generator=gen) < 0.15
    logit = torch.where(sky, torch.full_like(logit, -25.0), logit)
    disp = 64 * torch.sigmoid(logit)
    fb = 20 + 5 * torch.rand(n, generator=gen)
    return z, sky, fb, disp, torch.where(disp > 0.5, fb / disp, torch.zeros_like(disp)), disp > 0.5


def fit(steps=120):
    torch.manual_seed(2)
    gen = torch.Generator().manual_seed(77)
    mix = torch.randn(16, generator=gen) / 4
    model = StereoModel()
    nn.init.constant_(model.net.logit.bias, -2.0)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step in range(steps):
        x, sky, fb, disp_gt, depth_gt, valid = scene(96, gen, mix)
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            disp, depth = model(x, sky, fb)
            loss = F.l1_loss(disp.float(), disp_gt) + 0.1 * F.smooth_l1_loss(depth[valid], depth_gt[valid])
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        if step % 20 == 0:
            print(step, f"{loss.item():.4f}", scaler.get_scale())


fit()
