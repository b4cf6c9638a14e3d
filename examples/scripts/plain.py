"""Plain PyTorch: micro-batches, accumulation, JSON lines, and a checkpoint to resume from."""

import argparse
import json
import os
from pathlib import Path

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, required=True)
parser.add_argument("--accum", type=int, required=True)
parser.add_argument("--lr", type=float, required=True)
parser.add_argument("--seed", type=int, required=True)
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--log-every", type=int, required=True)
parser.add_argument("--hidden", type=int, required=True)
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--resume", type=Path)
args = parser.parse_args()

x = torch.randn(4096, 8, generator=torch.Generator().manual_seed(0))
y = x.sum(1, keepdim=True).sin()
torch.manual_seed(args.seed)
model = nn.Sequential(nn.Linear(8, args.hidden), nn.Tanh(), nn.Linear(args.hidden, 1))
optimizer = torch.optim.AdamW(model.parameters(), args.lr)
start = 0
if args.resume:
    state = torch.load(args.resume)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    start = state["step"]

checkpoint = Path(os.environ["RAYPIPE_CHECKPOINT_DIR"]) / "last.pt"
with (args.out / "metrics.jsonl").open("a") as log:
    for step in range(start + 1, args.steps + 1):
        rows = torch.randint(
            3072, (args.accum, args.batch_size), generator=torch.Generator().manual_seed(step)
        )
        loss = 0.0
        for micro_batch in rows:
            error = nn.functional.mse_loss(model(x[micro_batch]), y[micro_batch]) / args.accum
            error.backward()
            loss += error.item()
        optimizer.step()
        optimizer.zero_grad()
        record = {"step": step, "loss": loss, "lr": args.lr}
        if step % 50 == 0:
            with torch.no_grad():
                record["eval_loss"] = nn.functional.mse_loss(model(x[3072:]), y[3072:]).item()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, checkpoint.with_suffix(".tmp"))
            checkpoint.with_suffix(".tmp").rename(checkpoint)
        if step % args.log_every == 0:
            print(json.dumps(record), file=log, flush=True)
torch.save(model.state_dict(), args.out / "model.pt")
