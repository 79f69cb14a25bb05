"""The limits of the process in which a submission runs: its memory, time and files."""
import ctypes
import os
import resource
import site
import struct
import sys
from pathlib import Path
from tempfile import gettempdir

MEMORY = 2 * 2 ** 30  # bytes that it may ask for
SECONDS = 90  # of computing: each test of an assignment may run as long as a test may
FILE_SIZE = 16 * 2 ** 20  # bytes of a file that it may write

# Linux's Landlock (landlock(7)): rights to files by folder, which a process gives up for good
CREATE, ADD, RESTRICT, NO_NEW_PRIVILEGES = 444, 445, 446, 38
EXECUTE, WRITE, READ, LIST = 1, 2, 4, 8
# what Python reads; of /proc only what concerns the process itself: the grader's own command line has the seed
PYTHONS = {"/usr", "/lib", "/lib64", "/etc", "/proc/self", "/proc/cpuinfo", "/proc/meminfo", "/sys", "/dev",
           sys.prefix, sys.base_prefix, site.getusersitepackages(), *site.getsitepackages()}


def landlock():
    """The version of the system's Landlock; 0 or less where there is none."""
    if sys.platform != "linux":
        return 0
    return ctypes.CDLL(None).syscall(CREATE, None, ctypes.c_size_t(0), 1)


def hole(root):
    """Why `confine` cannot hide a repository, or what is written while grading, in words; "" if it can."""
    if landlock() < 1:
        return ("this system has no Landlock (Linux has it from 5.13 on, unless a container forbids it), so a "
                "submission has all of your rights, and can read the answers")
    for what in (root, gettempdir()):
        for path in PYTHONS:
            if Path(what).resolve().is_relative_to(Path(path).resolve()):
                return f"{what} lies in {path}, which a submission reads, as Python's own files are there"
    return ""


def confine(folder, readable=(), seconds=SECONDS):
    """From now on this process reads Python's own folders and those given, and writes in `folder` alone."""
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_SIZE, FILE_SIZE))
    if sys.platform != "linux":
        return
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, now + MEMORY))

    libc, version = ctypes.CDLL(None), landlock()
    if version < 1:  # a kernel without it: the copy of the repository has no answers all the same
        return
    files = 2 ** (13 if version < 2 else 14 if version < 3 else 15) - 1  # all rights to files that it knows
    network, others = (3 if version >= 4 else 0), (3 if version >= 6 else 0)  # TCP; signals and sockets
    rules = struct.pack("QQQ", files, network, others)[:8 if version < 4 else 16 if version < 6 else 24]
    ruleset = libc.syscall(CREATE, rules, ctypes.c_size_t(len(rules)), 0)
    for path in [*PYTHONS, *readable]:
        allow(libc, ruleset, path, EXECUTE | READ | LIST)
    allow(libc, ruleset, "/dev/null", READ | WRITE)
    allow(libc, ruleset, folder, files)
    libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    if libc.syscall(RESTRICT, ruleset, 0):
        raise OSError("Landlock refuses")
    os.close(ruleset)


def allow(libc, ruleset, path, rights):
    if not os.path.exists(path):
        return
    if not os.path.isdir(path):
        rights &= EXECUTE | WRITE | READ  # Landlock refuses a rule that gives a file the rights of a folder
    file = os.open(path, os.O_PATH)
    refused = libc.syscall(ADD, ruleset, 1, struct.pack("=Qi", rights, file), 0)
    os.close(file)
    if refused:
        raise OSError(f"Landlock refuses a rule for {path}")
