"""The training loop: AMP, clipping, checkpoints and logging in one place."""
import torch

from data import Tags
from model import Tagger, tag_loss


class Engine:
    def __init__(self, cfg):
        self.cfg = cfg
        torch.manual_seed(cfg.seed)
        self.train_data = Tags(cfg, cfg.seed)
        self.model = Tagger(cfg)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=cfg.lr)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13)
        self.step = 0

    def train_one_epoch(self):
        self.model.train()
        for _ in range(self.cfg.steps_per_epoch):
            ids, tags = self.train_data.batch(self.cfg.batch)
            self.optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cpu", dtype=self.cfg.dtype):
                logits = self.model(ids)
                loss = tag_loss(logits, tags)
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.cfg.clip)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            if self.step % 20 == 0:
                print(f"[{self.step:03d}] loss={loss.item():.4f} scale={self.scaler.get_scale():.0f}")
            self.step += 1

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        ids, tags = Tags(self.cfg, 99).batch(96)
        with torch.autocast("cpu", dtype=self.cfg.dtype):
            return tag_loss(self.model(ids), tags).item()

    def save(self, path):
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save({**state, "scaler": self.scaler.state_dict(), "step": self.step}, path)
