import json
import os
import time
import torch


class Callback:
    def on_train_start(self, tr): pass
    def after_backward(self, tr): pass
    def after_step(self, tr): pass
    def on_epoch_end(self, tr): pass


class GradClip(Callback):
    def __init__(self, max_norm):
        self.max_norm = max_norm

    def after_backward(self, tr):
        params = [p for g in tr.optimizer.param_groups for p in g["params"] if p.grad is not None]
        tr.log["gnorm"] = float(torch.nn.utils.clip_grad_norm_(params, self.max_norm))


class JsonLog(Callback):
    def __init__(self, path):
        self.path = path

    def on_train_start(self, tr):
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        self.t0 = time.time()
        open(self.path, "w").close()

    def on_epoch_end(self, tr):
        with open(self.path, "a") as f:
            f.write(json.dumps({k: v for k, v in tr.log.items() if k != "gnorm"}) + "\n")
        print(f"ep {tr.epoch} loss {tr.log['loss']:.4f} acc {tr.log['acc']:.3f} [{time.time() - self.t0:.1f}s]")


class EMA(Callback):
    def __init__(self, decay=0.95):
        self.d = decay

    def on_train_start(self, tr):
        self.shadow = {k: v.detach().clone().float() for k, v in tr.model.state_dict().items() if v.is_floating_point()}

    @torch.no_grad()
    def after_step(self, tr):
        for k, v in tr.model.state_dict().items():
            if k in self.shadow:
                self.shadow[k].lerp_(v.float(), 1 - self.d)
