import json
import os
import shutil
import tempfile
import torch
from job import Job

here = os.path.dirname(os.path.abspath(__file__))


def main():
    cfg = json.load(open(os.path.join(here, "cfg.json")))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    work = tempfile.mkdtemp()
    path = os.path.join(work, "last.pt")
    try:
        for slot in range(cfg["slots"]):
            job = Job(cfg, device, path)
            mse = job.run(cfg["slot_steps"])
            print(f"slot {slot} steps done {job.start} mse {mse:.3f}")
    finally:
        shutil.rmtree(work)


if __name__ == "__main__":
    main()
