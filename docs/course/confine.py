"""The limits of the process in which a submission runs: its memory, time, files and system calls."""
import ctypes
import errno
import os
import platform
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

MEMORY = 2 * 2 ** 30  # bytes that it may ask for
SECONDS = 90  # of computing: each test of an assignment may run as long as a test may
FILE_SIZE = 16 * 2 ** 20  # bytes of a file that it may write
DISK = 256 * 2 ** 10  # KiB of all that it may hold there at once, looked at once a second

# Linux's Landlock (landlock(7)): rights to files by folder, which a process gives up for good
CREATE, ADD, RESTRICT = 444, 445, 446
EXECUTE, WRITE, READ, LIST = 1, 2, 4, 8
NO_NEW_PRIVILEGES, SECCOMP, FILTER = 38, 22, 2  # of prctl(2)
# what Python reads; of /proc only what concerns the process itself: the grader's own command line has the seed
PYTHONS = {"/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/passwd", "/etc/localtime", "/proc/self", "/proc/cpuinfo",
           "/proc/meminfo", "/sys/devices/system", "/dev/null", "/dev/zero", "/dev/random", "/dev/urandom",
           sys.prefix, sys.base_prefix, site.getusersitepackages(), *site.getsitepackages()}

# Machines whose system calls are known, with the number that a filter (seccomp(2)) knows them by
MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# Calls that Landlock leaves open: (number on x86_64, on aarch64). None where there is no such call
REFUSED = [
    # other processes: socket, io_uring_setup, shmget, semget, msgget, mq_open, add_key, request_key, keyctl, bpf
    (41, 198), (425, 425), (29, 194), (64, 190), (68, 186), (240, 180), (248, 217), (249, 218), (250, 219), (321, 280),
    # what a file is marked with, though it can only be read: chmod, fchmod, fchmodat, fchmodat2, chown, fchown, lchown,
    # fchownat, utime, utimes, futimesat, utimensat, and truncate
    (90, None), (91, 52), (268, 53), (452, 452), (92, None), (93, 55), (94, None), (260, 54), (132, None), (235, None),
    (261, None), (280, 88), (76, 45),
    # the same: setxattr, lsetxattr, fsetxattr, removexattr, lremovexattr, fremovexattr, setxattrat, removexattrat,
    # file_setattr
    (188, 5), (189, 6), (190, 7), (197, 14), (198, 15), (199, 16), (463, 463), (466, 466), (469, 469),
    # signals, and how another process is scheduled: kill, tkill, tgkill, rt_sigqueueinfo, rt_tgsigqueueinfo,
    # pidfd_send_signal, setpriority, ioprio_set, sched_setparam, sched_setscheduler, sched_setaffinity, sched_setattr
    (62, 129), (200, 130), (234, 131), (129, 138), (297, 240), (424, 424), (141, 140), (251, 30), (142, 118),
    (144, 119), (203, 122), (314, 274),
    # to leave the group that is killed: setsid, setpgid
    (112, 157), (109, 154),
]
STARTS = [(57, None), (58, None)]  # fork, vfork
CLONE, CLONE3, THREAD = (56, 220), (435, 435), 0x10000
IOCTL, LIMITS = (16, 29), (302, 261)  # ioctl marks files, too; prlimit64 sets limits of any process


def landlock():
    """The version of the system's Landlock; 0 or less where there is none."""
    if sys.platform != "linux":
        return 0
    return ctypes.CDLL(None).syscall(CREATE, None, ctypes.c_size_t(0), 1)


def seccomp():
    """Whether system calls can be refused: the system asks for a filter, and this machine's numbers are known."""
    if sys.platform != "linux" or platform.machine() not in MACHINES:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(SECCOMP, FILTER, 0, 0, 0)
    return ctypes.get_errno() == errno.EFAULT


def hole(root):
    """Why `confine` cannot hide a repository, or what is written while grading, in words; "" if it can."""
    if landlock() < 1:
        return ("this system has no Landlock (Linux has it from 5.13 on, unless a container forbids it), so a "
                "submission has all of your rights, and can read the answers")
    if not seccomp():
        return "this system refuses no system calls (seccomp), so a submission can leave processes behind"
    for what in (root, gettempdir()):
        for path in PYTHONS:
            if Path(what).resolve().is_relative_to(Path(path).resolve()):
                return f"{what} lies in {path}, which a submission reads, as Python's own files are there"
    return ""


def confine(folder, readable=(), seconds=SECONDS, starts=False):
    """From now on this process reads Python's own folders and those given, and writes in `folder` alone. starts:
    whether it may start others."""
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_SIZE, FILE_SIZE))
    if sys.platform != "linux":
        return
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, now + MEMORY))
    libc = ctypes.CDLL(None)
    libc.capset(struct.pack("Ii", 0x20080522, 0), bytes(24))  # what root may do besides; this version has 64 of them
    libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    # a system without them: the copy of the repository has no answers all the same
    if landlock() >= 1:
        restrict_files(libc, folder, readable)
    if seccomp():
        refuse_calls(libc, starts)


def restrict_files(libc, folder, readable):
    version = landlock()
    files = 2 ** (13 if version < 2 else 14 if version < 3 else 15) - 1  # all rights to files that it knows
    network, others = (3 if version >= 4 else 0), (3 if version >= 6 else 0)  # TCP; signals and sockets
    rules = struct.pack("QQQ", files, network, others)[:8 if version < 4 else 16 if version < 6 else 24]
    ruleset = libc.syscall(CREATE, rules, ctypes.c_size_t(len(rules)), 0)
    for path in [*PYTHONS, *readable]:
        allow(libc, ruleset, path, EXECUTE | READ | LIST)
    allow(libc, ruleset, "/dev/null", READ | WRITE)
    allow(libc, ruleset, folder, files)
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


def refuse_calls(libc, starts):
    """A filter of calls. Each line of it: an instruction, how many lines to skip if it is true, and if not, a value."""
    load, equal, at_least, any_bit, mask, result = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
    number, machine, first, second = 0, 4, 16, 24  # where a call's data are: the low halves of its arguments
    killed, allowed = 0x80000000, 0x7FFF0000

    def refusal(error):
        return result, 0, 0, 0x50000 + error

    column = list(MACHINES).index(platform.machine())
    lines = [(load, 0, 0, machine), (equal, 1, 0, MACHINES[platform.machine()]), (result, 0, 0, killed),
             (load, 0, 0, number), (at_least, 0, 1, 0x40000000), (result, 0, 0, killed)]  # of a third kind, x32
    for call in REFUSED + STARTS * (not starts):
        if call[column] is not None:
            lines += [(equal, 0, 1, call[column]), refusal(errno.EPERM)]
    if not starts:  # without clone3, which hides its flags, threads take clone
        lines += [(equal, 0, 1, CLONE3[column]), refusal(errno.ENOSYS)]
        lines += [(equal, 0, 4, CLONE[column]), (load, 0, 0, first), (any_bit, 1, 0, THREAD), refusal(errno.EPERM),
                  (result, 0, 0, allowed)]
    lines += [(equal, 0, 4, LIMITS[column]), (load, 0, 0, first), (equal, 1, 0, 0), refusal(errno.EPERM),
              (result, 0, 0, allowed)]
    # of ioctl only what a terminal is asked
    lines += [(equal, 0, 4, IOCTL[column]), (load, 0, 0, second), (mask, 0, 0, 0xFFFFFF00), (equal, 1, 0, 0x5400),
              refusal(errno.EPERM), (result, 0, 0, allowed)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in lines))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(lines), ctypes.addressof(code)))
    if libc.prctl(SECCOMP, FILTER, program, 0, 0):
        raise OSError("seccomp refuses")


# Such a process, seen from outside

def run(words, given, seconds, root, folder):
    """Run a module of the repository `root`, and the words behind its name, in a process that is given a text on stdin,
    and whose output is dropped -> whether it ended in time, and did not fill the folder, into which alone it is to
    write. What it has started ends with it."""
    if resource is None:
        raise UserError("this system cannot limit what a process takes, so nothing is graded; on Windows, use WSL. "
                        "`pytest docs/course/1-affine`, say, runs a student's tests anywhere")
    environment = {"PATH": os.environ.get("PATH", ""), "HOME": folder, "TMPDIR": folder, "PYTHONPATH": root,
                   "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    process = subprocess.Popen([sys.executable, "-m", *words], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL, text=True, start_new_session=True, cwd=root, env=environment)
    try:
        for _ in range(seconds):
            with suppress(subprocess.TimeoutExpired):
                process.communicate(given, 1)
                return True
            given = None  # it has been sent
            held = subprocess.run(["du", "-sk", folder], capture_output=True, text=True).stdout
            if int(held.split()[0]) > DISK:
                break
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
