"""Read the tokenizer of a trained model, published or our own, and make the tokenizer that a config names.

A file is tokenizer.json of the `tokenizers` library, a saved tokenizer of a run, or tok*.bin of llama2.c.
"""

import heapq
import json
import os
import pathlib
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import tokenizers

from experiments.data import bpe, tokenizer, tokenizer_config, vocabulary_files
from experiments.engine import disk, errors

BATCH = 2**20  # characters encoded at a time: the library takes some 240 bytes of memory for each
FILES = ("tokenizer.json", "tok*.bin", *vocabulary_files.NAMES)  # looked for in a folder, in this order
# Files next to tokenizer.json name the special of each role; without them, the usual names decide.
ROLE_FILES = (tokenizer_config.CONFIG, tokenizer_config.MAP)
USUAL = {
    "bos": ("<s>", "<|begin_of_text|>", "<bos>", "<|endoftext|>"),
    "eos": ("</s>", "<|end_of_text|>", "<eos>", "<|endoftext|>"),
    "mask": ("[MASK]", "<mask>"),
    "pad": ("[PAD]", "<pad>"),
    "between": (),  # between two documents; only ours have it (bpe.py)
}
SPECIALS = (b"<unk>", b"<s>", b"</s>")  # of llama2.c
UNKNOWN, BOS, EOS = range(len(SPECIALS))


class OfRun(tokenizer.Plain):
    """The tokenizer of another run, used like a published one: nothing stands between documents."""

    encode_text = tokenizer.Tokenizer.encode_text


class Published(tokenizer.Tokenizer):
    """A `tokenizers.Tokenizer`; `roles` names the specials that are bos, eos, mask, pad, and between."""

    def __init__(
        self, library: tokenizers.Tokenizer, roles: Mapping[str, str | None], files: dict[str, bytes] | None = None
    ):
        self.library, self.files = library, files or {}
        self.size = 1 + max(library.get_vocab(with_added_tokens=True).values(), default=-1)
        ids = {role: None if name is None else library.token_to_id(name) for role, name in roles.items()}
        for role, id in ids.items():
            setattr(self, role, id)
        unknown = getattr(library.model, "unk_token", None)  # the library's models differ in it
        self.unknown = None if unknown is None else library.token_to_id(unknown)
        added = {id for id, token in library.get_added_tokens_decoder().items() if token.special}
        self.special = frozenset(added | {id for id in ids.values() if id is not None})

    def encode(self, text: str, *, specials: bool = True) -> np.ndarray:
        return np.asarray(self.library.encode(tokenizer.checked(text), add_special_tokens=specials).ids, np.int32)

    def encode_text(self, text: Iterable[bytes]) -> Iterator[np.ndarray]:
        """Yield the ids of the documents, with the specials around each, and `between` from one to the next."""
        between = [] if self.between is None else [self.between]
        before, after, first = *self._around(), True
        for batch in batches(tokenizer.documents(text)):
            texts = [piece.text for piece in batch]
            ids: list[int] = []
            encodings = self.library.encode_batch_fast(texts, add_special_tokens=False)
            for piece, encoding in zip(batch, encodings, strict=True):
                ids += [*between * (not first), *before] if piece.begins else []
                ids += encoding.ids
                ids += after if piece.ends else []
                first = False
            yield np.array(ids, self.dtype)

    def _around(self) -> tuple[list[int], list[int]]:
        """Return the specials before and after a text."""
        complete, bare = (self.library.encode("a", add_special_tokens=specials).ids for specials in (True, False))
        starts = (i for i in range(len(complete)) if complete[i : i + len(bare)] == bare)
        start = next(starts, 0)
        return complete[:start], complete[start + len(bare) :]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text, without the specials."""
        known = [id for id in tokenizer.listed(ids) if 0 <= id < self.size]
        return self.library.decode(known, skip_special_tokens=True)

    def stream(self, ids: Iterable[int], after: Sequence[int] | np.ndarray = ()) -> Iterator[str]:
        # What an id adds depends on those before it; the ids of the last piece are enough. (If bytes are not UTF-8, the
        # byte fallback of the library may take back text that was yielded before.)
        window = tokenizer.listed(after)
        known = len(window)
        for id in ids:
            window.append(int(id))
            text, before = self.decode(window), self.decode(window[:known])
            if len(text) > len(before) and not text.endswith("\N{REPLACEMENT CHARACTER}"):
                yield text[len(before) :]
                window, known = window[known:], len(window) - known
        if rest := self.decode(window)[len(self.decode(window[:known])) :]:
            yield rest

    def name(self, id: int) -> str:
        return self.library.id_to_token(id) or f"[{id}]"  # a row of the model for which the file has no token


def batches(pieces: Iterable[tokenizer.Piece]) -> Iterator[list[tokenizer.Piece]]:
    """Yield lists of pieces with BATCH characters or more."""
    batch, n = [], 0
    for piece in pieces:
        batch.append(piece)
        n += len(piece.text)
        if n >= BATCH:
            yield batch
            batch, n = [], 0
    yield batch


class Pieces(tokenizer.Tokenizer):
    """The tokenizer in a tok*.bin of https://github.com/karpathy/llama2.c.

    Of the pairs of neighbours that are a piece together, the pair with the best score is merged first. A piece <0x41>
    is the byte 0x41, for characters that are not a piece. The `tokenizers` library cannot do this: it ranks pairs of
    pieces, and not the pieces that they become, and so merges others where pairs overlap."""

    bos, eos, unknown = BOS, EOS, UNKNOWN

    def __init__(self, table: Sequence[bytes], scores: Sequence[float], files: dict[str, bytes] | None = None):
        self.table, self.scores, self.files = tuple(table), tuple(scores), files or {}
        self.size, self.special = len(table), frozenset((UNKNOWN, BOS, EOS))
        matches = {i: re.fullmatch(rb"<0x([0-9A-F]{2})>", piece) for i, piece in enumerate(self.table)}
        self._byte_of = {i: bytes([int(match[1], 16)]) for i, match in matches.items() if match}
        self._id_of_byte = {content[0]: i for i, content in self._byte_of.items()}
        others = {UNKNOWN, BOS, EOS} | self._byte_of.keys()
        # The pieces of which text can consist; of two equal ones the first.
        self._id_of = {self.table[i]: i for i in reversed(range(len(self.table))) if i not in others}

    def encode(self, text: str, *, specials: bool = True) -> np.ndarray:
        ids: list[int] = []
        for character in " " + tokenizer.checked(text) if text else "":
            content = character.encode()
            known = self._id_of.get(content)
            ids += [self._id_of_byte.get(byte, UNKNOWN) for byte in content] if known is None else [known]
        return np.asarray([BOS] * specials + self._merge(ids), np.int32)

    def pieces(self, ids: Iterable[int]) -> Iterator[bytes]:
        """Yield the bytes that each id adds to the text: none for <s>, </s> and unknown ids."""
        starts = True
        for i in ids:
            content = self._byte_of.get(i, b"")
            if not content and 0 <= i < self.size and i not in (BOS, EOS):
                content = self.table[i].removeprefix(b" ") if starts else self.table[i]
            yield content
            starts = i == BOS

    def name(self, id: int) -> str:
        return self.table[id].decode("utf-8", "replace")

    def _merge(self, ids: list[int]) -> list[int]:
        """Merge neighbours while any can be: the best score first, of equal scores the leftmost."""
        left, right = list(range(-1, len(ids) - 1)), list(range(1, len(ids) + 1))
        pairs: list[tuple] = []

        def propose(i: int) -> None:
            j = right[i]
            both = self._id_of.get(self.table[ids[i]] + self.table[ids[j]]) if 0 <= i and j < len(ids) else None
            if both is not None:
                heapq.heappush(pairs, (-self.scores[both], i, j, ids[i], ids[j], both))

        for i in range(len(ids)):
            propose(i)
        while pairs:
            _, i, j, first, second, both = heapq.heappop(pairs)
            if ids[i] == first and ids[j] == second:  # neither was merged with another meanwhile
                ids[i], ids[j], right[i] = both, -1, right[j]
                if right[j] < len(ids):
                    left[right[j]] = i
                propose(i)
                propose(left[i])
        return [i for i in ids if i >= 0]


def read(path: str | os.PathLike) -> tokenizer.Tokenizer:
    """Return the tokenizer in a file, or in a folder with tokenizer.json or else another of FILES. Raises UserError if
    there is none or more than one."""
    path = pathlib.Path(path)
    if path.is_dir():
        found = next((files for pattern in FILES if (files := sorted(path.glob(pattern)))), [])
        if len(found) != 1:
            wrong = f"{len(found)} tokenizers: give one, as {found[0]}" if found else f"neither {' nor '.join(FILES)}"
            raise errors.UserError(f"the folder {path} has {wrong}")
        path = found[0]
    content = content_of(path)
    with disk.reading(path, TypeError):
        if path.suffix == ".bin":
            return read_pieces(content)
        saved = json.loads(content)
        if "model" in saved:
            return read_library(path, content)
        if saved["kind"] not in tokenizer.KINDS:
            raise ValueError(f"unknown kind {saved['kind']!r}")
        return OfRun(saved["kind"], saved["characters"], tuple(saved["specials"]))


def content_of(path: pathlib.Path) -> bytes:
    """Return what is in the file; for an older vocabulary, its tokenizer.json."""
    with disk.reading(path, Exception):  # the library raises nothing narrower for a damaged file
        if path.name in vocabulary_files.NAMES:
            return vocabulary_files.library(path).to_str().encode()
        return path.read_bytes()


def make(
    name: str, text: Iterable[bytes], *, specials: tuple[str, ...] = (), evaluation: Iterable[bytes] = ()
) -> tokenizer.Tokenizer:
    """Return the tokenizer that text.tokenizer names: one of tokenizer.KINDS, a BPE ('bpe:8192'), or that at a path."""
    if words := bpe.size(name):
        return read(bpe.cached(text, words=words, specials=specials))
    path = pathlib.Path(os.path.expanduser(name))
    if len(path.parts) > 1 and not path.exists():
        raise errors.UserError(f"text.tokenizer = {name} is a path, and nothing is there")
    if name in tokenizer.KINDS or not name or not path.exists():
        return tokenizer.make(name, text, specials=specials, evaluation=evaluation)
    return read(path)


def read_library(path: pathlib.Path, content: bytes) -> Published:
    """Return the tokenizer of a tokenizer.json with this content and of the files next to it."""
    config = tokenizer_config.read(path.parent, vocabulary_files.CLASSES.get(path.name, tokenizer_config.FROM_FILE))
    with disk.reading(path, Exception):  # as above
        library = tokenizer_config.apply(content, config)
        known = library.get_vocab(with_added_tokens=True)
        library.no_padding()  # a file keeps the settings for batches that its model was trained with
        library.no_truncation()
        library.encode("\uf8ff")  # a private character: fails if there is no id for unknown characters
        around = library.encode("").ids
    roles = {role: next((name for name in usual if name in known), None) for role, usual in USUAL.items()}
    roles |= {role: tokenizer_config.named(config, role) for role in roles if f"{role}_token" in config}
    if roles["between"] is None and roles["eos"] in known and not around:
        roles["between"] = roles["eos"]
    there = [path.with_name(name) for name in ROLE_FILES if path.with_name(name).is_file()]
    files = {"tokenizer.json": content} | {file.name: file.read_bytes() for file in there}
    saved = files.get(tokenizer_config.CONFIG, b"")
    if config["tokenizer_class"] != tokenizer_config.FROM_FILE and b"tokenizer_class" not in saved:
        files[tokenizer_config.CONFIG] = disk.as_json(config)  # the model's config.json names it, and is not kept
    return Published(library, roles, files)


def read_pieces(content: bytes) -> Pieces:
    """Return the tokenizer in a tok*.bin of llama2.c.

    The file has a little-endian int32, the length of the longest piece; then for each piece a float32 score, an int32
    length, and its bytes. Raises struct.error or ValueError for other content."""
    pieces, scores, at = [], [], 4
    while at < len(content):
        score, length = struct.unpack_from("<fi", content, at)
        (piece,) = struct.unpack_from(f"{length}s", content, at + 8)
        pieces.append(piece)
        scores.append(score)
        at += 8 + length
    if tuple(map(bytes.strip, pieces[: len(SPECIALS)])) != SPECIALS:
        raise ValueError("not a tokenizer of llama2.c: its first pieces are not <unk>, <s>, </s>")
    return Pieces(pieces, scores, {f"tok{len(pieces)}.bin": content})
