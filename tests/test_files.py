"""Files that are not ours to touch: what is written leaves devices, pipes, links and modes as they are."""
import json
import os
import random
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from test_cli import SMALL, refused, run

import eval_ppl
import train_intact
from tinykv import UserError, hf
from tinykv.run.cli import EMBEDDED
from tinykv.storage import CalibrationFile, read_json, write, write_json

ROOT = Path(__file__).parent.parent


@pytest.fixture
def command(capsys, monkeypatch):
    return lambda *words: run(eval_ppl, capsys, monkeypatch, *words)


def left_behind(folder):
    return list(folder.glob("*.tmp")) + list(folder.glob(".*.tmp"))


# ---- what is at the path

def test_a_device_stays_a_device(tmp_path):
    """A node of its own where that is allowed, as a replaced /dev/null would be one for all."""
    node = tmp_path / "null"
    try:
        os.mknod(node, 0o666 | 0o020000, os.makedev(1, 3))
        write_json(node, {"a": 1})
    except PermissionError:
        pytest.skip("device nodes cannot be made, or not be written to, here")
    except UserError as error:  # a file system without devices
        assert "cannot be written" in str(error)
    assert node.is_char_device() and not left_behind(tmp_path)


def test_a_pipe_is_written_into(tmp_path):
    pipe, found = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: found.append(pipe.read_text()), daemon=True)
    reader.start()
    write_json(pipe, {"a": 1})
    reader.join(10)
    assert pipe.is_fifo() and json.loads(found[0]) == {"a": 1} and not left_behind(tmp_path)


def test_an_open_file_is_written_into(tmp_path):
    reading, writing = os.pipe()
    write_json(Path(f"/dev/fd/{writing}"), {"a": 1})
    os.close(writing)
    with open(reading) as file:
        assert json.load(file) == {"a": 1}


@pytest.mark.whole  # a process of its own
def test_a_table_and_json_on_stdout(tmp_path):
    """Into a file: neither cuts the other off."""
    with open(tmp_path / "out.txt", "w") as out:
        done = subprocess.run([sys.executable, "eval_ppl.py", "--method", "fp16", "--json", "/dev/stdout", *SMALL],
                              cwd=ROOT, stdout=out, stderr=subprocess.PIPE, text=True)
    text = (tmp_path / "out.txt").read_text()
    assert (done.returncode, done.stderr) == (0, "") and "fp16" in text and '"versions"' in text


def test_the_target_of_a_link_is_replaced(tmp_path):
    (tmp_path / "folder").mkdir()
    target, link = tmp_path / "folder" / "target.json", tmp_path / "link.json"
    target.write_text("old")
    link.symlink_to(target)
    write_json(link, {"a": 1})
    assert link.is_symlink() and read_json(target) == read_json(link) == {"a": 1}
    assert not left_behind(tmp_path) and not left_behind(tmp_path / "folder")


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664])
def test_the_mode_stays(tmp_path, mode):
    path = tmp_path / "x.json"
    path.write_text("old")
    path.chmod(mode)
    write_json(path, {"a": 1})
    assert path.stat().st_mode & 0o777 == mode


def test_the_mode_of_a_new_file_is_the_users(tmp_path):
    mask = os.umask(0o027)
    try:
        write_json(tmp_path / "x.json", {"a": 1})
    finally:
        os.umask(mask)
    assert (tmp_path / "x.json").stat().st_mode & 0o777 == 0o640


def test_the_temporary_name_cannot_be_guessed(tmp_path):
    """Links under the names that the process number gives lead nowhere."""
    victim, path = tmp_path / "victim", tmp_path / "x.json"
    victim.write_text("precious")
    (tmp_path / f"x.json.{os.getpid()}.tmp").symlink_to(victim)
    seen = []

    def fill(part):
        seen.append(part)
        assert part.exists() and not part.is_symlink() and part.parent == tmp_path
        part.write_text("{}")
    write(path, fill)
    write(path, fill)
    assert victim.read_text() == "precious" and path.read_text() == "{}" and seen[0] != seen[1]


@pytest.mark.parametrize("name", ["x" * 300 + ".json", "nul\0.json"])
def test_a_name_that_no_file_can_have(command, tmp_path, name):
    assert "--json" in refused(command, "--method", "fp16", "--json", tmp_path / name, *SMALL)
    with pytest.raises(UserError, match="cannot be written"):
        write_json(tmp_path / name, {})


def test_what_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("old")

    def fill(part):
        part.write_text("half")
        raise OSError(28, "No space left on device")
    with pytest.raises(UserError, match="No space left"):
        write(path, fill)
    assert path.read_text() == "old" and not left_behind(tmp_path)


# ---- what is read

@pytest.mark.parametrize("flag", ["--data", "--calibration", "--prefix"])
def test_a_pipe_in_the_place_of_a_file_is_refused(command, tmp_path, flag):
    """And not waited for."""
    pipe = tmp_path / ("pipe.safetensors" if flag == "--prefix" else "pipe")
    os.mkfifo(pipe)
    method = "intactkv" if flag == "--prefix" else "rtn"
    assert "a pipe" in refused(command, "--method", method, flag, pipe, *SMALL) and pipe.is_fifo()


# ---- two flags, two runs

def test_two_flags_of_one_file(command, capsys, monkeypatch, tmp_path):
    path = tmp_path / "x.safetensors"
    (tmp_path / "link.safetensors").symlink_to(path)
    for other in (path, tmp_path / "link.safetensors", tmp_path / "." / path.name):
        line = refused(command, "--method", "rtn", "--json", path, "--calibration", other, *SMALL)
        assert "--json" in line and "--calibration" in line and not path.exists()
    status, _, err = run(train_intact, capsys, monkeypatch, "--out", path, "--calibration", path)
    assert status == 2 and "--out" in err and "--calibration" in err and not path.exists()


def test_two_runs_that_add_to_one_calibration_file(tmp_path):
    model, _ = hf.load(EMBEDDED)
    path = tmp_path / "tables.safetensors"
    files = [CalibrationFile(path, model, "data") for _ in range(3)]  # all of them see no file yet
    for number, file in enumerate(files):
        file.take(f"method {number}", lambda number=number: {"table": torch.ones(2) * number})
        file.save()
    assert set(CalibrationFile(path, model, "data").tables) == {"method 0", "method 1", "method 2"}


ADDING = """
import sys, torch
from tinykv import hf
from tinykv.run.cli import EMBEDDED
from tinykv.storage import CalibrationFile
model, _ = hf.load(EMBEDDED)
for number in range(6):
    file = CalibrationFile(sys.argv[1], model, "data")
    file.take(f"{sys.argv[2]} {number}", lambda: {"table": torch.ones(2)})
    file.save()
"""


@pytest.mark.whole  # two imports of torch
def test_two_processes_lose_no_addition(tmp_path):
    path = tmp_path / "tables.safetensors"
    running = [subprocess.Popen([sys.executable, "-c", ADDING, str(path), name], cwd=ROOT) for name in "ab"]
    assert [process.wait(120) for process in running] == [0, 0]
    model, _ = hf.load(EMBEDDED)
    assert len(CalibrationFile(path, model, "data").tables) == 12 and not left_behind(tmp_path)


# ---- bad moments

def test_a_folder_that_cannot_be_written_to(command, tmp_path):
    for path in ("/proc/x.json", "/proc/version/x.json"):
        with pytest.raises(UserError, match="cannot be written"):
            write_json(path, {})
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere else")
    tmp_path.chmod(0o500)
    assert "--json" in refused(command, "--method", "fp16", "--json", tmp_path / "x.json", *SMALL)


TRAINING = """
import sys
from dataclasses import replace
from tinykv.assets import make
make.PHASES = [replace(make.PHASES[0], until=130, rows=1, length=24)]
make.print_report = lambda folder: None
make.main()
"""


def kill_within(process, seconds):
    """Kill it then, unless it has ended before."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    process.kill()
    process.communicate()


@pytest.mark.whole  # several processes, half a minute and more
def test_training_that_is_killed_again_and_again(tmp_path):
    """The same command goes on from what was saved last, to the bits of a run that nobody stopped."""
    def start(out):
        return subprocess.Popen([sys.executable, "-c", TRAINING, "--out", str(tmp_path / out), "--device", "cpu"],
                                cwd=ROOT, stderr=subprocess.PIPE, text=True)
    rng = random.Random(0)
    for _ in range(2):
        process = start("killed")
        while process.poll() is None and not (tmp_path / "killed" / "training.jsonl").exists():
            time.sleep(0.01)
        kill_within(process, rng.uniform(0, 5))
    for out in ("killed", "once"):
        _, err = start(out).communicate(timeout=300)
        assert err == ""
    killed, once = (hf.load_model(tmp_path / out).state_dict() for out in ("killed", "once"))
    assert all(torch.equal(killed[name], once[name]) for name in once)


@pytest.mark.whole  # several processes, half a minute and more
def test_an_analysis_that_is_killed_leaves_whole_files(tmp_path):
    path, rng = tmp_path / "numbers.json", random.Random(1)
    path.write_text('{"old": 1}')
    for _ in range(4):
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", "tinykv.analysis", "norms", "--context", "64", "--windows", "1", "--json",
             path, "--out", tmp_path], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        process.stdout.readline()
        kill_within(process, rng.uniform(0, 2))
        assert {"old", "norms"} & json.loads(path.read_text()).keys()
        figure = tmp_path / "norms.png"
        assert not figure.exists() or figure.read_bytes().endswith(b"IEND\xaeB`\x82")
