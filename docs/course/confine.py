"""The limits of the process in which a submission runs: its memory, time, files and system calls.

Landlock and seccomp serve any user, in containers too: `pip install landlock==1.0.0.dev5 pyseccomp`. Bubblewrap, which
needs user namespaces, is refused by Docker and by Ubuntu 24.04 as they are installed.
"""
import ctypes
import errno
import os
import signal
import site
import stat
import struct
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from tempfile import gettempdir

from tinykv import UserError

try:
    import resource
except ModuleNotFoundError:  # on Windows, where a student's own tests run, and nothing is graded
    resource = None
try:
    import landlock
    import pyseccomp
    landlock.landlock_abi_version()
except (ImportError, RuntimeError, OSError):  # not installed, no libseccomp, or no Landlock
    landlock = None

MEMORY = 2 * 2 ** 30  # bytes that it may ask for
FILE_SIZE = 16 * 2 ** 20  # bytes of a file that it may write
OPEN = 64  # files that it may have open

# what Python reads; of /proc only what concerns the process itself: the grader's own command line has the seed
PYTHONS = {"/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/passwd", "/etc/localtime", "/proc/self", "/proc/cpuinfo",
           "/proc/meminfo", "/sys/devices/system", "/dev/null", "/dev/zero", "/dev/random", "/dev/urandom",
           sys.prefix, sys.base_prefix, site.getusersitepackages(), *site.getsitepackages()}
# calls that Landlock leaves open: other processes; memory that is not counted; who opens what; what a file is marked
# with, or has lost; signals, and another's turn; to leave the group that is killed. By number, the same on all
# machines, what libseccomp may not know: fchmodat2, setxattrat, removexattrat, file_setattr
REFUSED = """socket io_uring_setup shmget semget msgget mq_open add_key request_key keyctl bpf memfd_create
    memfd_secret inotify_init inotify_init1 fanotify_init unshare setns chmod fchmod fchmodat chown fchown
    lchown fchownat utime utimes futimesat utimensat truncate ftruncate fallocate setxattr lsetxattr fsetxattr
    removexattr lremovexattr fremovexattr 452 463 466 469 kill tkill tgkill rt_sigqueueinfo rt_tgsigqueueinfo
    pidfd_send_signal setpriority ioprio_set sched_setparam sched_setscheduler sched_setaffinity sched_setattr
    setsid setpgid""".split()
THREAD = 0x10000  # a flag of clone
FLAGS = 4, 8, 10, 15  # what fcntl may not set: that a file is only added to, and who gets its signals


def hole(root):
    """Why `confine` cannot hide a repository, or what is written while grading, in words; "" if it can."""
    if landlock is None:
        return ("there is no Landlock (Linux from 5.13 on), libseccomp, landlock or pyseccomp (`pip install "
                "landlock==1.0.0.dev5 pyseccomp`), so a submission has all of your rights, and can read the answers")
    for path in PYTHONS:
        if Path(path, "tinykv").exists():
            return f"tinykv is installed in {path}, which a submission reads; `pip uninstall tinykv`"
        for what in (root, gettempdir()):
            if Path(what).resolve().is_relative_to(Path(path).resolve()):
                return f"{what} lies in {path}, which a submission reads, as Python's own files are there"
    return ""


def confine(readable, seconds, folder=None, starts=False):
    """From now on this process reads Python's own folders and those given, writes in `folder` alone, if at all, and may
    compute for some seconds. starts: whether it may start others."""
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_SIZE, FILE_SIZE))
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN, OPEN))
    if sys.platform != "linux":
        return
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, now + MEMORY))
    # what root may do besides; this version has 64 of them
    ctypes.CDLL(None).capset(struct.pack("Ii", 0x20080522, 0), bytes(24))
    if landlock is not None:  # without it, the copy of the repository has no answers all the same
        restrict_files(readable, folder)
        refuse_calls(starts)


def restrict_files(readable, folder):
    ctypes.set_errno(0)  # landlock takes an earlier call's error for its own
    rights, rules = landlock.FSAccess, landlock.Ruleset()
    for path in filter(os.path.exists, [*PYTHONS, *readable]):
        folders = rights.READ_DIR if os.path.isdir(path) else rights(0)
        rules.allow(path, rules=rights.EXECUTE | rights.READ_FILE | folders)
    rules.allow("/dev/null", rules=rights.READ_FILE | rights.WRITE_FILE)
    if folder:
        rules.allow(folder)
    rules.apply()


def refuse_calls(starts):
    calls, refused, arg = pyseccomp.SyscallFilter(pyseccomp.ALLOW), pyseccomp.ERRNO(errno.EPERM), pyseccomp.Arg
    for call in REFUSED:
        calls.add_rule(refused, int(call) if call.isdigit() else call)
    if not starts:  # without clone3, which hides its flags, threads take clone
        calls.add_rule(pyseccomp.ERRNO(errno.ENOSYS), "clone3")
        calls.add_rule(refused, "clone", arg(0, pyseccomp.MASKED_EQ, THREAD, 0))
        for call in ("fork", "vfork"):
            calls.add_rule(refused, call)
    for flag in FLAGS:
        calls.add_rule(refused, "fcntl", arg(1, pyseccomp.EQ, flag))
    calls.add_rule(refused, "prlimit64", arg(0, pyseccomp.NE, 0))  # another's limits
    for test, bound in ((pyseccomp.LT, 0x5400), (pyseccomp.GE, 0x5500)):  # of ioctl only what a terminal is asked
        calls.add_rule(refused, "ioctl", arg(1, test, bound))
    calls.load()


# Such a process, seen from outside

def run(words, given, seconds, root, folder, files=()):
    """Run a module of the repository `root`, and the words behind its name, in a process that is given a text on stdin,
    and some open files, and whose output is dropped -> whether it ended in time. folder: where it may write. What it
    has started ends with it."""
    if resource is None:
        raise UserError("this system cannot limit what a process takes, so nothing is graded; on Windows, use WSL. "
                        "`pytest docs/course/1-affine`, say, runs a student's tests anywhere")
    environment = {"PATH": os.environ.get("PATH", ""), "HOME": folder, "TMPDIR": folder, "PYTHONPATH": root,
                   "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    process = subprocess.Popen([sys.executable, "-m", *words], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL, text=True, start_new_session=True, cwd=root, env=environment,
                               pass_fds=files)
    try:
        process.communicate(given, seconds)
        return True
    except subprocess.TimeoutExpired:
        return False
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def written(path):
    """The bytes of a file that a confined process has written. OSError for a link, which may lead out of its folder,
    and for what may have no end."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError("no file")
        return file.read()
