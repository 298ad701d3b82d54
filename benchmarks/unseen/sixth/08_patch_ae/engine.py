import math
import torch
import torch.nn.functional as F


class Engine:
    def __init__(self, cfg, model, device):
        self.cfg, self.model, self.device = cfg, model, device
        self.dtype = {"float16": torch.float16, "bfloat16": torch.bfloat16}.get(cfg.precision)
        self.opt = torch.optim.AdamW(model.parameters(), lr=cfg.lr)
        self.scaler = torch.amp.GradScaler(device, enabled=cfg.precision == "fp16")
        self.sched = torch.optim.lr_scheduler.LambdaLR(
            self.opt, lambda s: 0.5 * (1 + math.cos(math.pi * s / cfg.steps)))

    def losses(self, x):
        with torch.autocast(self.device, dtype=self.dtype, enabled=self.dtype is not None):
            rec, mu, lv = self.model(x)
        mu, lv = mu.float(), lv.float()
        kl = -0.5 * (1 + lv - mu.pow(2) - lv.exp()).mean()
        mse = F.mse_loss(rec.float(), x)
        return self.cfg.rec_w * (mse + self.cfg.beta * kl), mse

    def step(self, x):
        loss, mse = self.losses(x.to(self.device))
        self.opt.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.opt)
        self.scaler.update()
        self.sched.step()
        return mse.item()
