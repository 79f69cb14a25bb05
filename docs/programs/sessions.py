"""Run the commands of docs/*.md again, and replace what the pages print by what they print now.

    python docs/programs/sessions.py                  everything: an hour and more on 2 CPU cores
    python docs/programs/sessions.py --only figures   the commands that draw a figure
    python docs/programs/sessions.py --only kvquant   the commands with this word in them
    python docs/programs/sessions.py --only pdb       the debugger sessions

A block that begins with "$ python" is a command. The page gets as many of its last tables as it had before. Figures are
written where the commands say. A command may name a method that the page defines, `heavy.py:HeavyHitters`. A block that
begins with "$ python -m pdb" begins a session in the debugger, and blocks that begin with "(Pdb)" go on with it. In a
session, "..." stands for line numbers and for what a function returns.
"""
import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from tqdm import tqdm

ROOT = Path(__file__).parents[2]
COMMAND = re.compile(r"```console\n\$ (python (?!-m pdb)(?:[^\n\\]|\\\n)*)\n(.*?)```\n", re.DOTALL)
CODE = re.compile(r"```python\n(.*?)```\n", re.DOTALL)
SESSION = re.compile(r"```console\n(?=\$ python -m pdb |\(Pdb\) )(.*?)```\n", re.DOTALL)
PROMPT = "(Pdb) "


# Commands

def own_methods(text):
    """{file: code} of the classes that a page defines and calls `file.py:Class`."""
    found = {}
    for file, cls in re.findall(r"[ ,`](\w+\.py):(\w+)", text):
        for code in CODE.findall(text):
            if f"class {cls}(" in code:
                found[file] = code
    return found


def tables_of(command, n, files):
    """The last n tables that a command prints, between empty lines.

    files: `own_methods` of the page. A command that names one runs where the file is.
    """
    words = shlex.split(command.replace("\\\n", " "))[1:]
    folder = ROOT
    with tempfile.TemporaryDirectory() as own:
        if any(f"{file}:" in command for file in files):
            folder, words[0] = own, str(ROOT / words[0])
            for file, code in files.items():
                Path(own, file).write_text(code)
        done = subprocess.run([sys.executable, *words], cwd=folder, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"sessions.py: error: {command} ended with status {done.returncode}")
    blocks = done.stdout.rstrip().split("\n\n")
    return "\n\n".join(blocks[-n:])


def with_table(text, command, table):
    """A page's text, with a new table after a command."""
    for block in COMMAND.finditer(text):
        if block[1] == command:
            text = text.replace(block[0], f"```console\n$ {command}\n{table}\n```\n")
    return text


# Debugger sessions

def is_entry(line):
    """Whether a line of a session is typed by the reader."""
    return line.startswith(("$ ", PROMPT))


def session(text):
    """A page's text, with what pdb says now in the place of what it said."""
    # 1. what is typed: the command that starts pdb, then its commands
    lines = "".join(SESSION.findall(text)).splitlines()
    start, *entries = [line for line in lines if is_entry(line)]

    # 2. type it
    words = start.split()[2:]
    typed = "".join(entry.removeprefix(PROMPT) + "\n" for entry in entries)
    done = subprocess.run([sys.executable, *words], cwd=ROOT, stdout=subprocess.PIPE, text=True, input=typed)
    answers = [lasting(answer) for answer in done.stdout.split(PROMPT)]
    answers += [""] * len(entries)  # pdb may have ended early
    answered = [f"{entry}\n{answer}" for entry, answer in zip([start, *entries], answers)]

    # 3. each block has as many entries as before
    def again(block):
        n = sum(is_entry(line) for line in block[1].splitlines())
        answers_of_block = "".join(answered[:n])
        del answered[:n]
        return f"```console\n{answers_of_block}```\n"
    return SESSION.sub(again, text)


def lasting(answer):
    """An answer of pdb, without what differs between machines or after an edit elsewhere."""
    answer = answer.replace(f"{ROOT}{os.sep}", "")
    answer = re.sub(r"^Deleted breakpoint .*\n", "", answer, flags=re.MULTILINE)
    # a return value, which pdb cuts off
    answer = re.sub(r"\)->.*?(?=\n-> )", ")->...", answer, flags=re.DOTALL)
    return re.sub(r"(\.py)(\(|:)\d+", r"\1\2...", answer)  # line numbers


def main():
    p = argparse.ArgumentParser(description="Print the tables of docs/*.md anew.")
    p.add_argument("--only", metavar="WORD", default="", help="only commands that contain this")
    only = p.parse_args().only
    for page in tqdm([ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))], unit="page", disable=None):
        text = page.read_text()
        for command, printed in COMMAND.findall(text):
            if only in command:
                table = tables_of(command, len(printed.split("\n\n")), own_methods(text))
                # after each, so that nothing is lost if a later one fails
                page.write_text(with_table(page.read_text(), command, table))
        if any(only in block.splitlines()[0] for block in SESSION.findall(text) if block.startswith("$ ")):
            page.write_text(session(page.read_text()))


if __name__ == "__main__":
    main()
