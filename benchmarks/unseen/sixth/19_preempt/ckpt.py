import os
import torch


def save(path, model, opt, sched, scaler, step):
    tmp = path + ".tmp"
    torch.save({
        "model": model.state_dict(),
        "optimizer": opt.state_dict(),
        "lr_sched": sched.state_dict(),
        "scaler": scaler.state_dict(),
        "step": step,
        "rng": torch.get_rng_state(),
    }, tmp)
    os.replace(tmp, path)


def restore(path, **objs):
    if not os.path.exists(path):
        return 0
    st = torch.load(path, map_location="cpu", weights_only=True)
    for k, o in objs.items():
        if k in st:
            o.load_state_dict(st[k])
    torch.set_rng_state(st["rng"])
    return st["step"]
