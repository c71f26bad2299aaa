"""Read the tokenizer of a trained model, published or our own, and choose the tokenizer that a config names."""

import json
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import tokenizers

from experiments.config import disk, errors
from experiments.data import bpe, tokenization, tokenizer_files

BATCH = 2**20  # characters encoded at a time; the library needs about 240 bytes of memory for each
# For roles that tokenizer_config.json does not name, the first of these special tokens in the vocabulary decides.
DEFAULT_NAMES = {
    "bos": ("<s>", "<|begin_of_text|>", "<bos>", "<|endoftext|>"),
    "eos": ("</s>", "<|end_of_text|>", "<eos>", "<|endoftext|>"),
    "mask": ("[MASK]", "<mask>"),
    "pad": ("[PAD]", "<pad>"),
    "between": (),  # separates documents; only ours have it (bpe.py)
}


class OfRun(tokenization.Plain):
    """The tokenizer of another run, used like a published one: no token separates documents."""

    document_start = None

    def encode_text(self, text: Iterable[bytes]) -> Iterator[np.ndarray]:
        return (self.encode(piece.text).astype(self.dtype) for piece in tokenization.documents(text))


class Published(tokenization.Tokenizer):
    """A `tokenizers.Tokenizer`. roles: the names of the special tokens bos, eos, mask, pad and between (documents)."""

    def __init__(
        self, library: tokenizers.Tokenizer, roles: Mapping[str, str | None], files: dict[str, bytes] | None = None
    ):
        self.library, self.files = library, files or {}
        self.size = 1 + max(library.get_vocab(with_added_tokens=True).values(), default=-1)
        ids = {role: None if name is None else library.token_to_id(name) for role, name in roles.items()}
        for role, id in ids.items():
            setattr(self, role, id)
        unknown = getattr(library.model, "unk_token", None)  # not all of the library's models have it
        self.unknown = None if unknown is None else library.token_to_id(unknown)
        added = {id for id, token in library.get_added_tokens_decoder().items() if token.special}
        self.special = frozenset(added | {id for id in ids.values() if id is not None})

    def encode(self, text: str, *, specials: bool = True) -> np.ndarray:
        """Return the ids of a text."""
        return np.asarray(
            self.library.encode(tokenization.check_unicode(text), add_special_tokens=specials).ids, np.int32
        )

    def encode_text(self, text: Iterable[bytes]) -> Iterator[np.ndarray]:
        """Yield the ids of the documents, with the special tokens around each, and `between` from one to the next."""
        between = [] if self.between is None else [self.between]
        before, after, first = *self._find_specials(), True
        for batch in batches(tokenization.documents(text)):
            texts = [piece.text for piece in batch]
            ids: list[int] = []
            encodings = self.library.encode_batch_fast(texts, add_special_tokens=False)
            for piece, encoding in zip(batch, encodings, strict=True):
                ids += [*between * (not first), *before] if piece.begins else []
                ids += encoding.ids
                ids += after if piece.ends else []
                first = False
            yield np.array(ids, self.dtype)

    @property
    def document_start(self) -> int | None:
        before, after = self._find_specials()
        between = [] if self.between is None else [self.between]
        return [None, *after, *between, *before][-1]

    def _find_specials(self) -> tuple[list[int], list[int]]:
        """Return the ids of the special tokens before and after a text."""
        complete, bare = (self.library.encode("a", add_special_tokens=specials).ids for specials in (True, False))
        starts = (i for i in range(len(complete)) if complete[i : i + len(bare)] == bare)
        start = next(starts, 0)
        return complete[:start], complete[start + len(bare) :]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text, without special tokens."""
        valid_ids = [id for id in tokenization.to_list(ids) if 0 <= id < self.size]
        return self.library.decode(valid_ids, skip_special_tokens=True)

    def stream(self, ids: Iterable[int], after: Sequence[int] | np.ndarray = ()) -> Iterator[str]:
        """Yield the text that each id adds, in complete characters."""
        # What an id adds depends on earlier ids; the ids of the last piece are enough. (If bytes are not UTF-8, the
        # byte fallback of the library may change text that was yielded before.)
        window = tokenization.to_list(after)
        start = len(window)  # the first id whose text was not yielded
        for id in ids:
            window.append(int(id))
            text, before = self.decode(window), self.decode(window[:start])
            if len(text) > len(before) and not text.endswith("\N{REPLACEMENT CHARACTER}"):
                yield text[len(before) :]
                window, start = window[start:], len(window) - start
        if rest := self.decode(window)[len(self.decode(window[:start])) :]:
            yield rest

    def name(self, id: int) -> str:
        """Return the name of an id; for an id of the model without a token it is the number in brackets."""
        return self.library.id_to_token(id) or f"[{id}]"


def batches(pieces: Iterable[tokenization.Piece]) -> Iterator[list[tokenization.Piece]]:
    """Yield lists of pieces with at least BATCH characters."""
    batch, n = [], 0
    for piece in pieces:
        batch.append(piece)
        n += len(piece.text)
        if n >= BATCH:
            yield batch
            batch, n = [], 0
    yield batch


def read(path: str | os.PathLike) -> tokenization.Tokenizer:
    """Return the tokenizer in a file, or in a folder. Raises UserError if there is none."""
    path = pathlib.Path(path)
    if path.is_dir():
        folder, path = path, tokenizer_files.find(path)
        errors.refuse((path is None, f"the folder {folder} has none of {', '.join(tokenizer_files.FILES)}"))
    files = tokenizer_files.read(path)
    with disk.reading(path, Exception):  # the library raises Exception for a damaged file
        saved = json.loads(files["tokenizer.json"])
        if "model" in saved:
            return read_library(files)
        if saved["kind"] not in tokenization.KINDS:
            raise ValueError(f"kind = {saved['kind']!r} must be one of {', '.join(tokenization.KINDS)}")
        return OfRun(saved["kind"], saved["characters"], tuple(saved["specials"]))


def make(
    name: str, text: Iterable[bytes], *, specials: tuple[str, ...] = (), evaluation: Iterable[bytes] = ()
) -> tokenization.Tokenizer:
    """Return the tokenizer that text.tokenizer names: one of tokenization.KINDS, a BPE ('bpe:8192'), or a path."""
    if W := bpe.size(name):
        return read(bpe.find_or_train(text, W=W, specials=specials))
    path = pathlib.Path(os.path.expanduser(name))
    if name in tokenization.KINDS or not name or not path.exists():
        return tokenization.make(name, text, specials=specials, evaluation=evaluation)
    return read(path)


def read_library(files: dict[str, bytes]) -> Published:
    """Return the tokenizer of the files that `tokenizer_files.read` returns. Raises Exception for a damaged file."""
    library = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
    config = json.loads(files["tokenizer_config.json"])
    library.encode_special_tokens = bool(config.get("split_special_tokens"))
    truncation = (library.truncation or {}).get("direction", "right").lower()
    library.no_padding()  # padding and truncation in the file are for the training of its model
    library.no_truncation()
    library.encode("\uf8ff")  # a private character: this raises if there is no id for unknown characters
    vocabulary, around = library.get_vocab(with_added_tokens=True), library.encode("").ids
    roles = {role: next((name for name in names if name in vocabulary), None) for role, names in DEFAULT_NAMES.items()}
    for role in roles:
        if f"{role}_token" in config:
            (roles[role],) = tokenizer_files.list_names(config[f"{role}_token"])
    if roles["between"] is None and roles["eos"] in vocabulary and not around:
        roles["between"] = roles["eos"]
    chosen = Published(library, roles, files)
    chosen.truncation_side = config.get("truncation_side") or truncation
    if chosen.truncation_side not in ("left", "right"):
        raise ValueError(f"truncation_side = {chosen.truncation_side!r} must be left or right")
    chosen.has_chat_template = bool(config.get("chat_template"))
    return chosen
