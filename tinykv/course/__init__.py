"""The course's commands. The assignments, with their tests, are in docs/course/.

    grade.py     grade a file, or a folder of them
    handout.py   write a repository to hand out, without the answers
    compare.py   what a submission gave, beside what is right
    confine.py   the limits of a submission's process
"""
