"""What a check is written with.

A check is a function of a submission and a random generator. It returns if the answer is right, and
raises `Wrong` with a message to the student if it is not:

    @check(points=6)
    def observe_top_k(submission, rng):
        '''observe: the sinks are the k tokens with the largest numbers'''
        ...
        expect(found == sinks, f"of |H[i, c]| = {shown(sizes)} with k = 2 you keep ...")

The first line of its docstring is what the grader prints. Whatever is drawn comes from `rng`, so
that another seed makes another check of the same kind.
"""
import importlib
import pkgutil
import random
from dataclasses import dataclass

import torch

from tinykv import UserError


class Wrong(Exception):
    """The answer is wrong. The message says, in one or two sentences, what was tried on which small
    input, what came, what should have come, and where to look."""


def check(points, seconds=4):
    """Mark a function as a check. seconds: of computing, which a right answer needs less than half
    of."""
    def mark(function):
        function.points, function.seconds = points, seconds
        return function
    return mark


def expect(right, message):
    """Wrong(message) unless `right`."""
    if not right:
        raise Wrong(message)


KINDS = {
    "numbers": "a tensor of floating-point numbers",
    "integers": "a tensor of integers",
    "booleans": "a tensor of booleans",
}


def expect_tensor(x, kind, shape, what):
    """Wrong unless x is a tensor of a kind (of KINDS) and a shape. what: its name in the message."""
    wanted = f"{KINDS[kind]} of shape {tuple(shape)}"
    if not isinstance(x, torch.Tensor):
        raise Wrong(f"{what} has to be {wanted}; yours is of type {type(x).__name__}.")
    found = "numbers" if x.is_floating_point() else "booleans" if x.dtype == torch.bool else "integers"
    if found != kind or tuple(x.shape) != tuple(shape):
        raise Wrong(f"{what} has to be {wanted}; yours is {KINDS[found]} of shape {tuple(x.shape)}.")


def shown(numbers, digits=3):
    """Numbers as a message shows them: a tensor or nested lists, rounded."""
    if isinstance(numbers, torch.Tensor):
        numbers = numbers.tolist()
    if isinstance(numbers, (list, tuple)):
        return "[" + ", ".join(shown(x, digits) for x in numbers) + "]"
    return f"{numbers:.{digits}g}" if isinstance(numbers, float) else str(numbers)


def normal(rng, *shape):
    """Normal numbers of a shape, fp32, drawn from `rng`."""
    generator = torch.Generator().manual_seed(rng.getrandbits(62))
    return torch.randn(shape, generator=generator)


# The assignments

@dataclass
class Assignment:
    """An assignment, as its file of checks declares it."""
    name: str  # of the file, and of ASSIGNMENT in a submission
    number: int
    title: str
    answers: tuple  # modules that hold the answer, which a submission may not import
    blanks: dict  # {file: functions that a handed-out repository lacks; None: it lacks the file}
    needs: tuple  # packages that not every computer has
    checks: dict  # {name: function}, in the order of the file

    @property
    def points(self):
        return sum(function.points for function in self.checks.values())


def names():
    """The names of all assignments."""
    package = importlib.import_module("tinykv.course.checks")
    return sorted(module.name for module in pkgutil.iter_modules(package.__path__))


def load(name):
    """The assignment of this name. UserError if there is none."""
    if name not in names():
        raise UserError(f"there is no assignment {name!r}; there are {', '.join(names())}")
    module = importlib.import_module(f"tinykv.course.checks.{name}")
    checks = {key: value for key, value in vars(module).items() if hasattr(value, "points")}
    blanks = getattr(module, "BLANKS", {})
    needs = getattr(module, "NEEDS", ())
    return Assignment(name, module.NUMBER, module.TITLE, module.ANSWERS, blanks, needs, checks)


def rng_of(seed, assignment, name):
    """The random generator of a check: a seed gives each check numbers of its own."""
    return random.Random(f"{seed} {assignment} {name}")
