"""The course's grader: `python -m tinykv.course.grade FILE`. The assignments are in docs/course/.

    check.py    what a check is written with
    checks/     one file of checks for each assignment
    runner.py   how a submission runs: a process for each check, with limits of time and memory
    grade.py    the command
"""
