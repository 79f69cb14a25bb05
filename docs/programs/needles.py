"""Write a text of facts that are asked for later, for the column `answers` of a real model.

    python docs/programs/needles.py --model path/to/SmolLM2 --text path/to/text.txt --out needles.txt
    python eval_ppl.py --model path/to/SmolLM2 --data needles.txt --calib-data path/to/text.txt \
        --context 384 --windows 20

Every window of so many tokens is a piece of the text with five facts strewn among its sentences, "The secret number of
Oslo is 482.", and ends with the same five in another order, their numbers marked as answers.
"""
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from tinykv import UserError, files, hf
from tinykv.cli import Parser, one_line
from tinykv.shared_flags import check_counts

CITIES = ("Amsterdam Berlin Cairo Dublin Florence Geneva Helsinki Istanbul Jakarta Kyoto Lisbon Madrid Nairobi Oslo "
          "Prague Quito Rome Seoul Tokyo Vienna").split()
FACT = " The secret number of {} is {}."
MARKED = FACT.format("{}", "<answer>{}</answer>")


def window(sentences, draw, n_tokens, context, facts=5):
    """One window's text: sentences in their order, facts among them, questions at the end, `context` - 1 tokens.

    sentences: yields more of the text. n_tokens: of a text.
    """
    keys = draw.sample(CITIES, facts)
    pairs = [(city, draw.randrange(100, 1000)) for city in keys]
    questions = "".join(FACT.format(*pair) for pair in pairs)
    hay = []
    while n_tokens("".join(hay) + questions * 2) < context - 1:
        hay.append(next(sentences))
    # cut the last sentences to the length, word by word
    words = "".join(hay).split(" ")
    while n_tokens(" ".join(words) + questions * 2) > context - 1:
        words.pop()
    n = context - 1 - n_tokens(" ".join(words) + questions * 2)
    text = " ".join(words) + " so" * n
    ends = [i + 1 for i in range(len(text) - 1) if text[i:i + 2] == ". "]
    for place, pair in sorted(zip(draw.choices(ends, k=facts), draw.sample(pairs, facts)), reverse=True):
        text = text[:place] + FACT.format(*pair) + text[place:]
    return text + "".join(MARKED.format(*pair) for pair in pairs)


def main():
    p = Parser(prog="python docs/programs/needles.py", description=__doc__)
    p.add_argument("--model", metavar="DIR", required=True, help="whose tokens are counted")
    p.add_argument("--text", metavar="FILE", required=True, help="its second half is what the facts are strewn in")
    p.add_argument("--out", metavar="FILE", required=True, type=Path)
    p.add_argument("--context", type=int, default=384, help="tokens of a window (default: 384)")
    p.add_argument("--windows", type=int, default=20, help="(default: 20)")
    with one_line(p):
        args = p.parse_args()
        check_counts(args, 256, "context")
        check_counts(args, 1, "windows")
        tokenizer = hf.load_tokenizer(args.model, hf.load_config(args.model))
        text = files.read_text(args.text)
        lines = [line.strip() for line in text[len(text) // 2:].splitlines() if len(line) > 200]
        sentences = (sentence + ". " for line in lines for sentence in line.split(" . "))
        draw = random.Random(0)
        try:
            found = [window(sentences, draw, lambda t: len(tokenizer.encode(t)), args.context)
                     for _ in range(args.windows)]
        except StopIteration:
            raise UserError(f"{args.text} has sentences for fewer than {args.windows} windows; give a longer "
                            "text") from None
        files.write(args.out, lambda part: part.write_text("\n".join(found), encoding="utf-8"))


if __name__ == "__main__":
    main()
