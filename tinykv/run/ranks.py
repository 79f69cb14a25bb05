"""One evaluation by several processes, on one machine or several, which torchrun starts:

    torchrun --nproc-per-node 4 eval_ppl.py --method all

Each process, called a rank, reads the model and the text. Rank 0 calibrates and sends the tables to
the others. Then each evaluates whole batches, the ones that one process would read, so that every
figure but the seconds is that of one process. Rank 0 alone prints and writes files.
"""
import os
import sys
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist

from tinykv import UserError
from tinykv.storage import CalibrationFile

PATIENCE = timedelta(days=30)  # calibration may take long; a rank that dies is seen without waiting


@contextmanager
def joined():
    """Around a command: join the other ranks. All but rank 0 are silent, also where they fail."""
    missing = {"RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} - os.environ.keys()
    if missing:
        raise UserError(f"WORLD_SIZE is set, and not {', '.join(sorted(missing))}; start with torchrun, "
                        "or unset WORLD_SIZE")
    dist.init_process_group(timeout=PATIENCE)  # gloo for tensors on a CPU, NCCL for those on a GPU
    if dist.get_rank() > 0:
        sys.stdout = sys.stderr = open(os.devnull, "w")
    yield
    dist.destroy_process_group()


def prepare(args):
    """Give each rank a GPU of its own, and leave files to rank 0. UserError if some ranks would be
    without a window."""
    if dist.get_world_size() > args.windows:
        raise UserError(f"torchrun started {dist.get_world_size()} processes for {args.windows} "
                        "windows; start fewer, or give more --windows")
    if args.device == "cuda":
        args.device = f"cuda:{os.environ['LOCAL_RANK']}"
    if dist.get_rank() > 0:
        args.json = args.plot = args.calibration = None


@contextmanager
def talking():
    """Around what the ranks tell each other: UserError if one of them is not there any more."""
    try:
        yield
    except RuntimeError:
        raise UserError("a process of this run has died, so some windows are missing; torchrun "
                        "says below which one") from None


class SharedCalibration(CalibrationFile):
    """A calibration file that rank 0 reads and writes. The others get what it finds there, or adds."""

    def get(self, name, made_of):
        if dist.get_rank() > 0:
            return self.sent(None)
        tables = super().get(name, made_of)
        return None if tables is None else self.sent(tables)

    def put(self, name, made_of, tables):
        super().put(name, made_of, tables)
        self.sent(tables)

    def sent(self, tables):
        """Tables of rank 0, on every rank."""
        tables = [tables]
        with talking():
            dist.broadcast_object_list(tables)
        device = self.model.lm_head.weight.device
        return {key: table.to(device) for key, table in tables[0].items()}


def share(windows, batch):
    """The windows of this rank, as many batches as the others have, give or take one."""
    n_batches = -(-len(windows.tokens) // batch)
    rank, n_ranks = dist.get_rank(), dist.get_world_size()
    first = rank * n_batches // n_ranks * batch
    last = (rank + 1) * n_batches // n_ranks * batch
    return replace(windows, tokens=windows.tokens[first:last], answers=windows.answers[first:last])


def gather(result):
    """The Result of this rank's windows -> of all windows, on every rank."""
    parts = [None] * dist.get_world_size()
    with talking():
        dist.all_gather_object(parts, replace(result, hidden=[]))
    total, *others = parts
    for part in others:  # in the order of the windows
        total.add(part)
    return replace(total, hidden=result.hidden)  # those of its own windows
