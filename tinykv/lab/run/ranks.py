"""One evaluation by several processes, on one machine or several, which torchrun starts:

    torchrun --nproc-per-node 4 eval_ppl.py --method all

Each process, called a rank, reads the model and the text. Rank 0 calibrates and sends the tables to the others. Then
each evaluates whole batches, the ones that one process would read, so that every figure but the seconds is that of one
process. Only rank 0 prints and writes files. A single process is rank 0, and exchanges nothing.
"""
import os
import sys
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist

from tinykv import UserError
from tinykv.evaluate import sum_of

PATIENCE = timedelta(days=30)  # calibration may take long; a rank that dies is seen without waiting


@contextmanager
def joined():
    """Around a command: join the other ranks, if there are any. All but rank 0 are silent, also where they fail."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        yield
        return
    lacking = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if lacking:
        raise UserError(f"WORLD_SIZE is set, but not {', '.join(lacking)}; start with torchrun, or unset WORLD_SIZE")
    dist.init_process_group(timeout=PATIENCE)  # gloo for tensors on a CPU, NCCL for those on a GPU
    if dist.get_rank() > 0:
        sys.stdout = sys.stderr = open(os.devnull, "w")
    yield
    dist.destroy_process_group()


def here():
    """(this process's rank, the number of ranks)."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def prepare(args):
    """Adapt the flags to this rank: each has its own GPU, and only rank 0 writes files."""
    rank, n_ranks = here()
    if n_ranks > 1 and args.device == "cuda":
        args.device = f"cuda:{os.environ['LOCAL_RANK']}"
    if rank > 0:
        args.json = args.plot = args.calibration = None


def shared(compute, device):
    """What `compute()` returns on rank 0, {name: tensor} or None, on the device of every rank."""
    rank, n_ranks = here()
    sent = [compute() if rank == 0 else None]
    if n_ranks > 1:
        dist.broadcast_object_list(sent)
        sent[0] = sent[0] and {name: tensor.to(device) for name, tensor in sent[0].items()}
    return sent[0]


def own_windows(windows, batch):
    """The windows of this rank, as many batches as the others have, give or take one."""
    rank, n_ranks = here()
    n_batches = -(-len(windows.tokens) // batch)
    own = slice(*(r * n_batches // n_ranks * batch for r in (rank, rank + 1)))
    return replace(windows, tokens=windows.tokens[own], answers=windows.answers[own])


def gather(result):
    """The Result of this rank's windows -> of all windows, on every rank."""
    _, n_ranks = here()
    if n_ranks == 1:
        return result
    parts = [None] * n_ranks
    dist.all_gather_object(parts, replace(result, exact=[]))
    # fp16's predictions stay those of this rank's windows
    return replace(sum_of(parts), exact=result.exact, windows=result.windows, model=result.model)
