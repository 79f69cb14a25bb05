"""Chats -> token rows with a response mask, in Vicuna's template.

A file of chats has one chat a line, as JSON: a list of turns, or ShareGPT's {"conversations": [...]}. A turn is
{"from": "human" or "gpt", "value": text}. Each question, with its answer after it, becomes

    USER: question ASSISTANT: answer</s>

and the tokens of the answers, `</s>` among them, are the response: the mask is True there. BOS belongs to the prefix,
and so does the system prompt, unless it is given: then it precedes the first question.
"""
import torch
from torch.nn.utils.rnn import pad_sequence

from tinykv import UserError
from tinykv.lab.files import parse_json, read_text

# Vicuna's, for chats without a prefix that holds one
SYSTEM = ("A chat between a curious user and an artificial intelligence assistant. The assistant gives "
          "helpful, detailed, and polite answers to the user's questions.")
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}


def load_chats(path, tokenizer, n, longest, system=""):
    """The first n chats of a file of which `longest` tokens hold some of an answer -> tokens (n, T), shorter chats
    filled up, and response (n, T), True at answers.

    system: text before the first question. UserError for another kind of file, or too few chats.
    """
    chats, masks = [], []
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if line.strip() and len(chats) < n:
            tokens, response = encode_chat(turns_of(line, path, number), tokenizer, system)
            if any(response[:longest]):
                chats.append(torch.tensor(tokens[:longest]))
                masks.append(torch.tensor(response[:longest]))
    if len(chats) < n:
        raise UserError(f"{path} has {len(chats)} chats in which the first {longest} tokens hold some of an "
                        f"answer, and {n} are needed; ask for fewer, or for more tokens of each")
    # shorter ones are filled up on the right, which no token before sees
    return pad_sequence(chats, batch_first=True), pad_sequence(masks, batch_first=True)


def turns_of(line, path, number):
    """A line of the file -> [(question, answer)]."""
    try:
        chat = parse_json(line)
        turns = chat["conversations"] if isinstance(chat, dict) else chat
        roles = [ROLES[turn["from"]] for turn in turns]
        texts = [turn["value"].encode().decode() for turn in turns]  # UTF-8 has no half of a surrogate pair
    except (KeyError, TypeError, ValueError, AttributeError):
        roles = []
    if not roles or roles != ["user", "assistant"] * (len(roles) // 2):
        raise UserError(f'{path}, line {number} is no chat; a chat is a list of turns {{"from": "human" or '
                        '"gpt", "value": text}, a question and an answer in turn')
    return list(zip(texts[::2], texts[1::2]))


def encode_chat(rounds, tokenizer, system=""):
    """[(question, answer)] -> its ids, and whether each is of a response: two lists."""
    ids, response = [], []
    for i, (question, answer) in enumerate(rounds):
        before = f"{system} " if system and i == 0 else ""
        prompt = f"{before}USER: {question} ASSISTANT:"
        pieces, offsets = tokenizer.encode_with_offsets(f"{prompt} {answer}")
        ids += pieces
        # a token is of the response if it holds a character after the prompt
        response += [end > len(prompt) for _, end in offsets]
        if tokenizer.eos_id is not None:
            ids.append(tokenizer.eos_id)
            response.append(True)
    return ids, response
