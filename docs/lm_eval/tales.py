"""The questions of the first test stories that fit a window of the embedded model."""
from itertools import islice

import datasets

from tinykv.lab.data.stories import stories


def questions(**settings):
    """A row for each answer: the story up to it, and the answer."""
    rows = []
    for story in islice(stories("test"), 40):
        if len(story.text) < 2500:
            rows += [{"context": story.text[:start], "answer": story.text[start:end]}
                     for _, start, end in story.answers]
    return {"test": datasets.Dataset.from_list(rows)}
