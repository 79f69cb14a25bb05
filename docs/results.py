"""Run the commands of docs/*.md again, and put what they print in the place of what stands there.

    python docs/results.py                  everything: an hour and more on 2 CPU cores
    python docs/results.py --only figures   the commands that draw a figure
    python docs/results.py --only kvquant   the commands with this word in them
    python docs/results.py --only pdb       the debugger sessions
    python docs/results.py --paper kvsink   the commands of one paper, as docs/papers.md lists them
    python docs/results.py --paper all      those of all five papers

A block that begins with "$ python" is a command. Of its output, the table is kept, without the
column of seconds. Figures are written where the commands say. A command may name a method that the
page defines, `heavy.py:HeavyHitters`. A block that begins with
"$ python -m pdb" begins a session in the debugger, and blocks that begin with "(Pdb)" go on with
it. In a session, "..." stands for line numbers and for what a function returns. The prose is
written by hand: read it again afterwards.

docs/papers.md lists the commands of each paper. What one of them prints goes where the command has a
block, on any page. If it has none, it is printed here.
"""
import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tqdm import tqdm

ROOT = Path(__file__).parent.parent
COMMAND = re.compile(r"```console\n\$ (python (?!-m pdb)(?:[^\n\\]|\\\n)*)\n(.*?)```\n", re.DOTALL)
CODE = re.compile(r"```python\n(.*?)```\n", re.DOTALL)
SESSION = re.compile(r"```console\n(?=\$ python -m pdb |\(Pdb\) )(.*?)```\n", re.DOTALL)
PROMPT = "(Pdb) "
PAPERS = ROOT / "docs" / "papers.md"


# Commands

def own_methods(text):
    """{file: code} of the classes that a page defines and calls `file.py:Class`."""
    found = {}
    for file, cls in re.findall(r"[ ,`](\w+\.py):(\w+)", text):
        for code in CODE.findall(text):
            if f"class {cls}(" in code:
                found[file] = code
    return found


def table_of(command, files):
    """The table that a command prints: what follows its last empty line, without the seconds.

    files: `own_methods` of the page. A command that names one runs where the file is.
    """
    words = command.replace("\\\n", " ").split()[1:]
    folder = ROOT
    with tempfile.TemporaryDirectory() as own:
        if any(f"{file}:" in command for file in files):
            folder, words[0] = own, str(ROOT / words[0])
            for file, code in files.items():
                Path(own, file).write_text(code)
        done = subprocess.run([sys.executable, *words], cwd=folder, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"results.py: error: {command} ended with status {done.returncode}")
    lines = done.stdout.rstrip().split("\n\n")[-1].splitlines()
    if lines[0].split()[-1] == "s":
        seconds = [line.split()[-1] for line in lines]
        width = max(map(len, lines)) - max(map(len, seconds))
        lines = [line[:width].rstrip() for line in lines]
    return "\n".join(lines)


def with_table(text, command, table):
    """A page's text, with a new table after a command."""
    for block in COMMAND.finditer(text):
        if block[1] == command:
            text = text.replace(block[0], f"```console\n$ {command}\n{table}\n```\n")
    return text


# Papers

def in_one_line(command):
    """A command as it is typed: without line breaks."""
    return " ".join(command.replace("\\\n", " ").split())


def commands_of_paper(name):
    """The commands in the section of papers.md whose heading begins with a name, each once; "all":
    in every section."""
    _, *sections = re.split(r"^## ", PAPERS.read_text(), flags=re.MULTILINE)
    found = []
    for section in sections:
        if name == "all" or section.lower().startswith(name.lower()):
            found += re.findall(r"`(python [^`]+)`", section)
            found += [command for command, _ in COMMAND.findall(section)]
    if not found:
        headings = ", ".join(section.split()[0] for section in sections)
        sys.exit(f"results.py: error: no paper {name!r} in {PAPERS.name}; there are {headings}")
    return list(dict.fromkeys(in_one_line(command) for command in found))


def print_paper(name, only=""):
    """Run a paper's commands: into the pages where they have a block, the others to stdout.

    only: a word that they contain.
    """
    pages = sorted(Path(ROOT, "docs").glob("*.md"))
    commands = [command for command in commands_of_paper(name) if only in command]
    for command in tqdm(commands, unit="command", disable=not sys.stderr.isatty()):
        table = table_of(command, files={})
        blocks = [(page, block) for page in pages for block, _ in COMMAND.findall(page.read_text())
                  if in_one_line(block) == command]
        for page, block in blocks:
            page.write_text(with_table(page.read_text(), block, table))
        if not blocks:
            print(f"$ {command}\n{table}\n", flush=True)


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
    done = subprocess.run([sys.executable, *words], cwd=ROOT, stdout=subprocess.PIPE, text=True,
                          input=typed)
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
    p.add_argument("--paper", metavar="NAME", help="only the commands of this paper in papers.md, or of all")
    args = p.parse_args()
    if args.paper:
        print_paper(args.paper, args.only)
        return

    # 1. the commands of all pages, and the pages with a session
    jobs, sessions = [], []
    for page in sorted(Path(ROOT, "docs").glob("*.md")):
        text = page.read_text()
        jobs += [(page, command) for command, _ in COMMAND.findall(text) if args.only in command]
        blocks = [block for block in SESSION.findall(text) if block.startswith("$ ")]
        if any(args.only in block.splitlines()[0] for block in blocks):
            sessions.append(page)

    # 2. run them; a page is written after each, so that nothing is lost if a later one fails
    for page, command in tqdm(jobs, unit="command", disable=not sys.stderr.isatty()):
        table = table_of(command, own_methods(page.read_text()))
        page.write_text(with_table(page.read_text(), command, table))
    for page in sessions:
        page.write_text(session(page.read_text()))


if __name__ == "__main__":
    main()
