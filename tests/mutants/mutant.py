"""A mutant, and the words for the cells in which it has to fail."""
from dataclasses import dataclass, field

import torch

TOKEN = {"scheme": "token-dynamic"}
CHANNEL = {"scheme": "channel-dynamic"}
T_STATIC = {"scheme": "token-static"}
C_STATIC = {"scheme": "channel-static"}
KVQUANT = {"scheme": "kvquant"}
PAPER = {"protocol": "paper"}
DOUBLE = {"dtype": torch.float64}
LONG = {"length": "6G+3"}


@dataclass(frozen=True)
class Mutant:
    """A class that is wrong on purpose. `method` passes `check` in a cell, and fails it there with
    the wrong class in the place of the one that it is made from: see `wrong` in cases.py."""
    method: type
    check: callable  # of invariants.py
    wrong: type
    cell: dict = field(default_factory=dict)

    @property
    def name(self):
        check = self.check.__name__.removeprefix("check_")
        return f"{self.wrong.__name__}-{self.method.__name__.lower()}-{check}"
