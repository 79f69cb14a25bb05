"""Text to token ids and back: sentencepiece (LLaMA 1 and 2, Mistral), and tokenizer.json (Llama 3, Qwen)."""
from tinykv import UserError, first_line
from tinykv.hf.config import check_file, checkpoint_folder, read_json


class Tokenizer:
    """Text <-> token ids: what the two kinds below share.

    `encode` adds no special token, and never reads one out of a text: "<s>" in a text is three ordinary characters, so
    text from outside cannot end a document.
    """
    # vocab_size: the largest id + 1
    bos_id = eos_id = None  # None where there is none
    add_bos = False  # whether the model expects a text to begin with bos_id
    builtin_ids = {}  # of special tokens, those that the tokenizer's own file names

    def encode(self, text, bos=False):
        """text -> ids. bos: put bos_id in front, where the model expects it."""
        ids, _ = self.encode_with_offsets(text)
        if bos and self.add_bos:
            return [self.bos_id, *ids]
        return ids


class SentencePieceTokenizer(Tokenizer):
    def __init__(self, path):
        from sentencepiece import SentencePieceProcessor
        self.pieces = SentencePieceProcessor(model_file=str(path))
        self.vocab_size = self.pieces.get_piece_size()
        ids = {"bos_token": self.pieces.bos_id(), "eos_token": self.pieces.eos_id()}
        self.builtin_ids = {name: i for name, i in ids.items() if i >= 0}  # -1: there is none

    def encode_with_offsets(self, text):
        """text -> ids and [(start, end)] in characters; of byte pieces, the last has the character."""
        encoded = self.pieces.encode(text, return_type="offset_mapping")
        return encoded["ids"], encoded["offsets"]

    def decode(self, ids):
        """ids -> text. Special tokens, and ids after the vocabulary, leave no text."""
        return self.pieces.decode([int(i) for i in ids if i < self.vocab_size])

    def begins_with_bos(self):
        return True  # the rule of LLaMA

    def id_of(self, piece):
        """The id of a piece or special token, by its name; None if there is none."""
        token_id = self.pieces.piece_to_id(piece)  # that of <unk> for an unknown piece
        return token_id if self.pieces.id_to_piece(token_id) == piece else None


class JsonTokenizer(Tokenizer):
    def __init__(self, path):
        from tokenizers import Tokenizer as Fast
        self.fast = Fast.from_file(str(path))
        # a file may carry the settings of the run that wrote it
        self.fast.no_truncation()
        self.fast.no_padding()
        self.fast.encode_special_tokens = True  # as ordinary text
        self.vocab_size = max(self.fast.get_vocab().values(), default=-1) + 1

    def encode_with_offsets(self, text):
        """text -> ids and [(start, end)] in characters; of byte pieces, each has the character."""
        encoded = self.fast.encode(text, add_special_tokens=False)
        return encoded.ids, encoded.offsets

    def decode(self, ids):
        """ids -> text. Special tokens, and ids after the vocabulary, leave no text."""
        return self.fast.decode([int(i) for i in ids])

    def begins_with_bos(self):
        return self.fast.encode("").ids[:1] == [self.bos_id]  # the file's post-processor decides

    def id_of(self, piece):
        """The id of a piece or special token, by its name; None if there is none."""
        return self.fast.token_to_id(piece)


def load_tokenizer(folder, config):
    """A checkpoint folder -> Tokenizer."""
    folder = checkpoint_folder(folder)
    tokenizer = open_tokenizer(folder)
    if tokenizer.vocab_size > config.vocab_size:  # each id needs a row of the model's embedding
        raise UserError(f"{folder}: wrong tokenizer vocabulary, {tokenizer.vocab_size} tokens for a model of "
                        f"{config.vocab_size}; take tokenizer and model from the same checkpoint")

    # the special tokens; does a text begin with bos_id? tokenizer_config.json decides, or else the tokenizer
    path = folder / "tokenizer_config.json"
    settings = read_json(path) if path.exists() else {}
    tokenizer.bos_id = special_id(tokenizer, settings, "bos_token", config.bos_token_id)
    tokenizer.eos_id = special_id(tokenizer, settings, "eos_token", config.eos_token_id)
    add_bos = settings.get("add_bos_token")
    if add_bos is None:
        add_bos = tokenizer.begins_with_bos()
    tokenizer.add_bos = tokenizer.bos_id is not None and bool(add_bos)
    return tokenizer


def open_tokenizer(folder):
    """The folder's sentencepiece model, or else its tokenizer.json."""
    for name, kind in {"tokenizer.model": SentencePieceTokenizer, "tokenizer.json": JsonTokenizer}.items():
        path = folder / name
        if path.exists():
            return opened(kind, path)
    raise UserError(f"no tokenizer in {folder}; it must hold tokenizer.json, or tokenizer.model as sentencepiece "
                    "writes it")


def opened(kind, path):
    """The tokenizer of a file. UserError if it is none."""
    check_file(path)
    try:
        return kind(path)
    except BaseException as error:  # of many kinds, a Rust library's panic among them
        if isinstance(error, KeyboardInterrupt | ImportError):  # ImportError: what it needs is not installed
            raise
        raise UserError(f"{path} is not a whole tokenizer ({first_line(error)}); download it again") from None


def special_id(tokenizer, settings, name, fallback):
    """The id of "bos_token" or "eos_token"; None if there is none.

    It comes from the name in tokenizer_config.json, or without such a name from the tokenizer's own file. If neither
    gives an id, it is `fallback`, the value in config.json.
    """
    piece = settings.get(name)
    if isinstance(piece, dict):
        piece = piece.get("content")
    if name in settings and piece is None and not tokenizer.builtin_ids:
        return None  # a Qwen's file says so, whatever config.json has
    if not isinstance(piece, str | None) or piece and piece.encode(errors="ignore").decode() != piece:  # half a pair
        raise UserError(f"{name} in tokenizer_config.json is {repr(piece)[:80]}; it has to be a text")
    token_id = tokenizer.id_of(piece) if piece else tokenizer.builtin_ids.get(name)
    if token_id is None:
        token_id = next(iter(fallback), None) if isinstance(fallback, list) else fallback
    return token_id
