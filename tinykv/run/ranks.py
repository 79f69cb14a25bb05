"""One evaluation by several processes, on one machine or several, which torchrun starts:

    torchrun --nproc-per-node 4 eval_ppl.py --method all

Each process, called a rank, reads the model and the text. Rank 0 calibrates and sends the tables to
the others. Then each evaluates whole batches, the ones that one process would read, so that every
figure but the seconds is that of one process. Rank 0 alone prints and writes files.
"""
import os
import signal
import sys
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from tinykv import UserError
from tinykv.evaluate import check_left
from tinykv.storage import CalibrationFile

PATIENCE = timedelta(days=30)  # calibration may take long; a rank that dies is seen without waiting


@contextmanager
def joined():
    """Around a command: join the other ranks, and be silent on all but rank 0.

    The first rank to fail says why. The others then end without a word.
    """
    store, rank, n_ranks = next(dist.rendezvous("env://"))
    # tensors on a CPU are sent by gloo, tensors on a GPU by NCCL
    dist.init_process_group(store=store, rank=rank, world_size=n_ranks, timeout=PATIENCE)
    signal.signal(signal.SIGTERM, stopped)
    with ExitStack() as stack:
        if rank > 0:
            nowhere = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(redirect_stdout(nowhere))
            stack.enter_context(redirect_stderr(nowhere))
        try:
            yield
        except (Exception, KeyboardInterrupt):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            try:
                first = store.add("failed ranks", 1) == 1
            except RuntimeError:  # rank 0 held the store, and has ended
                first = False
            if not first:
                sys.exit(2)
            raise
    dist.destroy_process_group()


def stopped(*_):
    raise UserError("torchrun stops this run; a process of it has died, or it was told to stop")


@contextmanager
def talking():
    """Around what the ranks tell each other: UserError if one of them is not there any more."""
    try:
        yield
    except RuntimeError:
        raise UserError("a process of this run has died, so some windows are missing; torchrun "
                        "says below which one") from None


def prepare(args):
    """Give each rank a GPU of its own. UserError if some ranks would be without a window."""
    if args.device == "cuda":
        args.device = f"cuda:{os.environ['LOCAL_RANK']}"
    if dist.get_world_size() > args.windows:
        raise UserError(f"torchrun started {dist.get_world_size()} processes for {args.windows} "
                        "windows; start fewer, or give more --windows")


class SharedCalibration(CalibrationFile):
    """A calibration file that rank 0 reads and writes; its tables reach every rank."""

    def __init__(self, path, model, data):
        super().__init__(path if dist.get_rank() == 0 else None, model, data)

    def take(self, name, calibrate):
        device = self.model.lm_head.weight.device
        tables, shapes = {}, [None]
        if dist.get_rank() == 0:
            tables = super().take(name, calibrate)
            tables = {key: table.to(device).contiguous() for key, table in tables.items()}
            shapes = [{key: (table.shape, table.dtype) for key, table in tables.items()}]
        with talking():
            dist.broadcast_object_list(shapes)
            for key, (shape, dtype) in shapes[0].items():
                if dist.get_rank() > 0:
                    tables[key] = torch.empty(shape, dtype=dtype, device=device)
                # as bytes: NCCL does not know every dtype
                dist.broadcast(tables[key].view(-1).view(torch.uint8), src=0)
        return tables


def share(windows, batch):
    """The windows of this rank, as many batches as the others have, give or take one."""
    n_batches = -(-len(windows.tokens) // batch)
    rank, n_ranks = dist.get_rank(), dist.get_world_size()
    first = rank * n_batches // n_ranks * batch
    last = (rank + 1) * n_batches // n_ranks * batch
    return replace(windows, tokens=windows.tokens[first:last], answers=windows.answers[first:last])


def gather(results):
    """{name: Result} of this rank's windows -> of all windows on rank 0, None on the others."""
    parts = [None] * dist.get_world_size()
    with talking():
        dist.all_gather_object(parts, results)
    if dist.get_rank() > 0:
        return None
    total = parts[0]
    for part in parts[1:]:  # in the order of the windows
        for name in total:
            total[name].add(part[name])
    check_left(total)
    return total
