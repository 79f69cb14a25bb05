"""What a submission is given of Python: enough for any answer, and nothing that leads to the tests around it.

A module is a view of its public functions and classes, without the modules that it has itself imported. Of classes only
the file's own can be changed. What leads from an object to the code around it, such as `f.__globals__`, is refused.
"""
import ast
import builtins
import importlib
import re
import sys
from contextlib import suppress
from functools import cache
from types import ModuleType

import torch

from tinykv import UserError

NAME = "submission"  # of the module that a file makes
MODULES = re.compile(r"torch(\.(nn|nn\.functional|nn\.utils|linalg|special|autograd))?|numpy(\.linalg)?|math|"
                     r"tinykv\.(cache|model|kmeans|(codecs|methods)(\.\w+)?)|triton(\.language)?|bisect|collections|"
                     r"copy|dataclasses|fractions|functools|heapq|itertools|numbers|random|statistics|types|typing")
# of these, and of Python's own functions, what runs text or files, or makes classes of a text's names
HIDDEN = re.compile(r"load|save.*|compile|import_ir.*|\w*fromfile|\w*loadtxt|genfromtxt|fromregex|memmap|"
                    r"singledispatch.*|get_(type_hints|origin)|ForwardRef|\w*Type|make_dataclass|new_class|prepare_class|"
                    r"resolve_bases|dispatch_table|exec|eval|open|input|help|globals|locals|vars")
# names that may stand nowhere: most of Python's own; frames and code; other modules; what copies any attribute, reads
# names in a text, writes, or makes the loads of a kernel hard to see
MAGIC = "|".join("init post_init call name file doc slots len iter next getitem setitem contains repr eq hash".split())
REFUSED = re.compile(rf"__(?!({MAGIC})__)\w+__|(gi|cr|ag|tb)_\w+|f_(back|code|globals|locals)|func_\w+|sys|os|inspect|"
                     r"builtins|importlib|gc|traceback|warnings|_?ctypes|tl|core|semantic|pkgutil|rewriter|_?evaluate|"
                     r"wraps|update_wrapper|format|format_map|mro|from_file|tofile|dumps?|fileno|atomic_\w+")


def run(path, tree):
    """The module that a file's tree makes."""
    for node in ast.walk(tree):
        for name in names_of(node):
            if REFUSED.fullmatch(name):
                raise UserError(f"line {node.lineno} of your file says `{name}`, and an answer does without that")
    module = ModuleType(NAME)
    vars(module).update(__file__=str(path), __builtins__=GIVEN)
    with suppress(SystemExit):  # what stands above a sys.exit counts
        exec(compile(ast.fix_missing_locations(Guarded().visit(tree)), str(path), "exec"), vars(module))
    return module


def names_of(node):
    """The names that a node says: variables, attributes, arguments, functions, classes, keywords."""
    if isinstance(node, (ast.Constant, ast.alias)):  # a text, or what stands in an import
        return []
    if isinstance(node, (ast.Import, ast.ImportFrom)):  # `import sys` alone imports nothing
        parts = [part for alias in node.names for part in alias.name.split(".")[isinstance(node, ast.Import):]]
        return parts + [alias.asname for alias in node.names if (alias.asname or "").startswith("__")]
    if isinstance(node, ast.Name):  # a variable, which may be called `sys`
        return [node.id] if node.id.startswith("__") else []
    values = [part for _, value in ast.iter_fields(node) for part in (value if isinstance(value, list) else [value])]
    return [value for value in values if isinstance(value, str)]


class Guarded(ast.NodeTransformer):
    """Where a file sets an attribute, `own` looks at it, and at what it belongs to."""

    def visit_Attribute(self, node):
        self.generic_visit(node)
        if not isinstance(node.ctx, ast.Load):
            given = [node.value, ast.Constant(node.attr)]
            node.value = ast.copy_location(ast.Call(ast.Name("__own__", ast.Load()), given, []), node)
        return node


def own(owner, name):
    """An object of which a file may set an attribute."""
    if isinstance(owner, ModuleType) or isinstance(owner, type) and owner.__module__ != NAME:
        raise UserError(f"your file changes {owner.__name__}, which is not its own")
    if callable(getattr(type(owner), name, None)) and type(owner).__module__ != NAME:
        raise UserError(f"your file replaces `{name}` of a {type(owner).__name__}, which is not its own")
    return owner


def checked(function, owned=lambda owner, name: owner):
    """getattr, say, which takes no name that is refused."""
    def called(owner, name, *more):
        if REFUSED.fullmatch(name):
            raise UserError(f"your file asks for `{name}`, and an answer does without that")
        return function(owned(owner, name), name, *more)
    return called


def class_of(value):
    if isinstance(value, type):  # its own class makes classes, of any names
        raise UserError("your file asks for the type of a class, and an answer does without that")
    return type(value)


@cache
def view(name):
    """A module, as a file sees it; NotGiven if no answer needs it."""
    if not MODULES.fullmatch(name):
        return NotGiven()
    module = importlib.import_module(name)
    if name == "triton.language":  # which the interpreter has to find in a file
        importlib.import_module(f"{name}.extra")
        module.extra = NotGiven()  # it leads to all modules
        return module
    public = getattr(module, "__all__", vars(module)) if name in sys.stdlib_module_names else vars(module)
    if name == "triton":  # which has its compiler, too
        public = "jit", "cdiv", "next_power_of_2", "language"
    parts = {key: view(f"{name}.{key}") if isinstance(value, ModuleType) else value for key, value in
             vars(module).items() if key in public and not key.startswith("_") and not HIDDEN.fullmatch(key)}
    made = ModuleType(f"the course's {name}")
    vars(made).update(parts)
    return made


class NotGiven:
    """What a file imports of another module. A page does, above its table; whatever is called does nothing."""

    def __getattr__(self, name):
        return self

    def __call__(self, *_, **__):
        return self


def imported(name, _globals=None, _locals=None, fromlist=(), _level=0):
    whole = view(name)
    return whole if fromlist else view(name.partition(".")[0])


GIVEN = {name: value for name, value in vars(builtins).items() if not HIDDEN.fullmatch(name)} | {
    "__import__": imported, "__own__": own, "getattr": checked(getattr), "hasattr": checked(hasattr),
    "setattr": checked(setattr, own), "delattr": checked(delattr, own), "type": class_of}


def no_class_of_tensors(made):
    if made.__module__ == NAME:
        raise UserError(f"{made.__name__} is a class of tensors, which could say of itself what it likes")


torch.Tensor.__init_subclass__ = classmethod(no_class_of_tensors)
