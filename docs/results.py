"""Run the commands of docs/*.md again and put what they print in the place of what stands there.

    python docs/results.py                  everything: an hour and more on 2 CPU cores
    python docs/results.py --only figures   the commands that draw a figure
    python docs/results.py --only kvquant   the commands with this word in them

A block that begins with "$ python" is a command; of its output the table is kept, without the seconds. Figures are
written where the commands say. "$ python -m pdb" begins a session in the debugger, and blocks that begin with "(Pdb)"
go on with it; file names are kept from the repository on, and "..." stands for what changes with every edit. The words
around all this are written by hand: read them again afterwards.
"""
import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

from tqdm import tqdm

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"```console\n\$ (python (?!-m pdb)(?:[^\n\\]|\\\n)*)\n(.*?)```\n", re.DOTALL)
SESSION = re.compile(r"```console\n(?=\$ python -m pdb |\(Pdb\) )(.*?)```\n", re.DOTALL)
PROMPT = "(Pdb) "


def table_of(command):
    """What a command prints after its last empty line, without the column of seconds."""
    words = command.replace("\\\n", " ").split()[1:]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"results.py: error: {command} ended with status {done.returncode}")
    lines = done.stdout.rstrip().split("\n\n")[-1].splitlines()
    if lines[0].split()[-1] == "s":
        width = max(map(len, lines)) - len(max((line.split()[-1] for line in lines), key=len))
        lines = [line[:width].rstrip() for line in lines]
    return "\n".join(lines)


def session(text):
    """A page's text, with what pdb says now in the place of what it said."""
    lines = "".join(SESSION.findall(text)).splitlines()
    start, *words = [line for line in lines if line.startswith(("$ ", PROMPT))]
    done = subprocess.run([sys.executable, *start.split()[2:]], cwd=ROOT, stdout=subprocess.PIPE, text=True,
                          input="".join(word.removeprefix(PROMPT) + "\n" for word in words))
    said = dict(enumerate(map(lasting, done.stdout.split(PROMPT))))
    entries = iter(f"{word}\n{said.get(i, '')}" for i, word in enumerate([start, *words]))

    def again(block):
        count = sum(line.startswith(("$ ", PROMPT)) for line in block[1].splitlines())
        return "```console\n" + "".join(next(entries) for _ in range(count)) + "```\n"
    return SESSION.sub(again, text)


def lasting(said):
    """Of what pdb says, what is the same on every machine and after an edit elsewhere in the file."""
    said = said.replace(f"{ROOT}{os.sep}", "")
    said = re.sub(r"^Deleted breakpoint .*\n", "", said, flags=re.MULTILINE)
    said = re.sub(r"\)->.*?(?=\n-> )", ")->...", said, flags=re.DOTALL)  # what a function returns, cut off by pdb
    return re.sub(r"(\.py)(\(|:)\d+", r"\1\2...", said)  # line numbers


def main():
    p = argparse.ArgumentParser(description="Print the tables of docs/*.md anew.")
    p.add_argument("--only", metavar="WORD", default="", help="only commands that contain this")
    args = p.parse_args()
    pages = sorted(Path(ROOT, "docs").glob("*.md"))
    jobs = [(page, command) for page in pages for command, _ in BLOCK.findall(page.read_text()) if args.only in command]
    sessions = [page for page in pages if any(args.only in line for line in "".join(SESSION.findall(page.read_text()))
                                              .splitlines() if line.startswith("$ "))]
    for page, command in tqdm(jobs, unit="command", disable=not sys.stderr.isatty()):
        table = table_of(command)
        text = page.read_text()
        for old in BLOCK.finditer(text):
            if old[1] == command:
                text = text.replace(old[0], f"```console\n$ {command}\n{table}\n```\n")
        page.write_text(text)
    for page in sessions:
        page.write_text(session(page.read_text()))


if __name__ == "__main__":
    main()
