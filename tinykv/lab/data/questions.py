"""Short texts that end in a question and its answer -> token rows: those that the page of the analysis is about."""
from bisect import bisect_right
from dataclasses import dataclass

import torch

from tinykv import UserError
from tinykv.lab import files


@dataclass
class Questions:
    """Texts, and the answers in them."""
    tokens: torch.Tensor  # (W, T); a shorter text is filled up on the right, which no earlier token sees
    lengths: list  # of each text, in tokens
    answers: list  # per text [(start, end)], in tokens


def read_questions(path, tokenizer, longest):
    """A file of texts with a blank line between them -> Questions. The last word of each is its answer."""
    texts = [text.strip() for text in files.read_text(path).split("\n\n") if text.strip()]
    if not texts:
        raise UserError(f"{path} has no text")
    bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    tokens, answers = [], []
    for number, text in enumerate(texts, 1):
        ids, offsets = tokenizer.encode_with_offsets(text)
        answer = len(text) - len(text.split()[-1])  # where it begins, in characters
        start = len(bos) + bisect_right([end for _, end in offsets], answer)  # the first token to end after that
        tokens.append(torch.tensor(bos + ids))  # (T of this text)
        answers.append([(start, len(tokens[-1]))])
        if start == 0 or len(tokens[-1]) > longest:
            raise UserError(f"{path}: text {number} has {len(tokens[-1])} tokens; give a question, its answer, no more "
                            f"than {longest} tokens, with a blank line between texts")
    return Questions(torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True), list(map(len, tokens)), answers)
