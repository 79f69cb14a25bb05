"""Run the commands of docs/*.md again and put what they print in the place of what stands there.

    python docs/results.py                  everything: about 15 minutes on 2 CPU cores
    python docs/results.py --only kvquant   the commands with this word in them

A block that begins with "$ python" is a command; of its output the table is kept, without the seconds. Figures are
written where the commands say. The words around the tables are written by hand: read them again afterwards.
"""
import argparse
import re
import subprocess
import sys
from pathlib import Path

from tqdm import tqdm

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"```console\n\$ (python [^\n]*(?:\\\n[^\n]*)*)\n(.*?)```\n", re.DOTALL)


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


def main():
    p = argparse.ArgumentParser(description="Print the tables of docs/*.md anew.")
    p.add_argument("--only", metavar="WORD", default="", help="only commands that contain this")
    args = p.parse_args()
    pages = sorted(Path(ROOT, "docs").glob("*.md"))
    jobs = [(page, command) for page in pages for command, _ in BLOCK.findall(page.read_text()) if args.only in command]
    for page, command in tqdm(jobs, unit="command"):
        table = table_of(command)
        text = page.read_text()
        for old in BLOCK.finditer(text):
            if old[1] == command:
                text = text.replace(old[0], f"```console\n$ {command}\n{table}\n```\n")
        page.write_text(text)


if __name__ == "__main__":
    main()
