"""Text to token ids and back: sentencepiece (LLaMA 1 and 2, Mistral), and tokenizer.json (Llama 3)."""
import re

from tinykv import UserError
from tinykv.files import checked, first_line, head, read_json, remedy


class Tokenizer:
    """Text <-> token ids, of either kind below.

    `encode` adds no special token, and reads no text as one: "<s>" in a text is three ordinary characters, as text
    from outside must not be able to end a document. bos_id, eos_id: None where there is none. add_bos: whether the
    model expects a text to begin with bos_id. vocab_size: the largest id + 1.
    """
    bos_id = eos_id = None
    add_bos = False

    def encode(self, text, bos=False):
        """text -> ids; bos: with bos_id in front where the model expects it."""
        return [self.bos_id] * (bos and self.add_bos) + self.encode_with_offsets(text)[0]


class SentencePieceTokenizer(Tokenizer):
    def __init__(self, path):
        from sentencepiece import SentencePieceProcessor
        try:
            self.pieces = SentencePieceProcessor(model_proto=path.read_bytes())
        except (RuntimeError, OSError) as error:
            raise UserError(f"{path} is not a whole sentencepiece model ({first_line(error)}){remedy(path)}") from None
        self.vocab_size = self.pieces.get_piece_size()
        if not self.vocab_size:
            raise UserError(f"{path} is a sentencepiece model of no pieces{remedy(path)}")
        own = {"bos_token": self.pieces.bos_id(), "eos_token": self.pieces.eos_id()}
        self.own = {name: None if i < 0 else i for name, i in own.items()}

    def encode_with_offsets(self, text):
        """text -> ids and [(start, end)] in characters. Of a character in several byte pieces, the last one has it."""
        found = self.pieces.encode(text, return_type="offset_mapping")
        return found["ids"], found["offsets"]

    def decode(self, ids):
        """ids -> text. Special tokens, and ids that a padded embedding has beyond the vocabulary, leave no text."""
        return self.pieces.decode([int(i) for i in ids if i < self.vocab_size])

    def begins_with_bos(self):
        return True  # the rule of LLaMA

    def id_of(self, piece):
        """The id of a piece or special token, by its name; None if there is none."""
        found = self.pieces.piece_to_id(piece)  # the id of <unk> for what it does not know
        return found if self.pieces.id_to_piece(found) == piece else None


class JsonTokenizer(Tokenizer):
    def __init__(self, path):
        from tokenizers import Tokenizer as Fast
        try:
            self.fast = Fast.from_str(path.read_text(encoding="utf-8"))
        except Exception as error:  # tokenizers raises no narrower class
            raise UserError(f"{path} is not a tokenizer ({first_line(error)}){remedy(path)}") from None
        self.fast.no_truncation()  # a file may carry the settings of the run that wrote it
        self.fast.no_padding()
        self.vocab_size = max(self.fast.get_vocab().values(), default=-1) + 1
        self.own = {"bos_token": None, "eos_token": None}
        self.fast.encode_special_tokens = True  # as ordinary text

    def encode_with_offsets(self, text):
        """text -> ids and [(start, end)] in characters. The pieces of one character all have it."""
        found = self.fast.encode(text, add_special_tokens=False)
        return found.ids, found.offsets

    def decode(self, ids):
        """ids -> text. Special tokens, and ids that a padded embedding has beyond the vocabulary, leave no text."""
        return self.fast.decode([int(i) for i in ids])

    def begins_with_bos(self):
        return self.fast.encode("").ids[:1] == [self.bos_id]  # the post-processor says

    def id_of(self, piece):
        """The id of a piece or special token, by its name; None if there is none."""
        return self.fast.token_to_id(piece)


def load_tokenizer(folder, config):
    """A checkpoint folder -> Tokenizer, whose ids all have a row in the model's embedding."""
    folder = checked(folder)
    tokenizer = open_tokenizer(folder)
    if tokenizer.vocab_size > config.vocab_size:
        raise UserError(f"{folder}: wrong tokenizer vocabulary, {tokenizer.vocab_size} tokens for a model of "
                        f"{config.vocab_size}; take tokenizer and model from the same checkpoint")
    path = folder / "tokenizer_config.json"
    settings = read_json(path) if path.exists() else {}
    tokenizer.bos_id = special_id(tokenizer, settings, "bos_token", config.bos_token_id)
    tokenizer.eos_id = special_id(tokenizer, settings, "eos_token", config.eos_token_id)
    rule = settings.get("add_bos_token")
    tokenizer.add_bos = tokenizer.bos_id is not None and (
        tokenizer.begins_with_bos() if rule is None else bool(rule))
    return tokenizer


def open_tokenizer(folder):
    pieces, fast = folder / "tokenizer.model", folder / "tokenizer.json"
    # Llama 3 has a tokenizer.model too, in tiktoken's format: lines of a base64 piece and its rank.
    if pieces.exists() and not (tiktoken := re.match(rb"[\w+/]+=* \d+\r?\n", head(pieces))):
        return SentencePieceTokenizer(pieces)
    if fast.exists():
        return JsonTokenizer(fast)
    if pieces.exists() and tiktoken:
        raise UserError(f"{pieces} is in tiktoken's format, which tinykv does not read; put the checkpoint's "
                        "tokenizer.json beside it")
    raise UserError(f"no tokenizer in {folder}; it must hold tokenizer.model (sentencepiece) or tokenizer.json")


def special_id(tokenizer, settings, name, fallback):
    """The id that tokenizer_config.json names, else the tokenizer's own; else, or if it has none, config.json's."""
    piece = settings.get(name)
    if isinstance(piece, dict):
        piece = piece.get("content")
    found = tokenizer.id_of(piece) if isinstance(piece, str) and piece else tokenizer.own[name]
    if found is None and isinstance(fallback, list):
        return next(iter(fallback), None)
    return fallback if found is None else found
