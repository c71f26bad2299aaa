"""The tokenizer of a trained model, published or our own, read from its files; and in the place of a run's own.

A file tells its kind: tokenizer.json for the `tokenizers` library, a saved tokenizer of a run, or tok*.bin of llama2.c.
"""

import contextlib
import heapq
import itertools
import json
import math
import os
import pathlib
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tokenizers

from experiments.data import bpe, tokenizer, tokenizer_config, vocabulary_files
from experiments.engine import disk, errors

FILES = ("tokenizer.json", "tok*.bin", *vocabulary_files.NAMES)  # what is looked for in a folder
# Files next to tokenizer.json say which special has which role; if there are none, the names that are in use do.
ROLE_FILES = (tokenizer_config.CONFIG, tokenizer_config.MAP)
USUAL = {
    "bos": ("<s>", "<|begin_of_text|>", "<bos>", "<|endoftext|>"),
    "eos": ("</s>", "<|end_of_text|>", "<eos>", "<|endoftext|>"),
    "mask": ("[MASK]", "<mask>"),
    "pad": ("[PAD]", "<pad>"),
    "between": (),  # two documents, as ours have it (bpe.py)
}

SPECIALS = (b"<unk>", b"<s>", b"</s>")  # of llama2.c
UNKNOWN, BOS, EOS = range(len(SPECIALS))


class OfRun(tokenizer.Plain):
    """That of a run of ours, used as a published one is: nothing stands between documents."""

    parts, ids = tokenizer.Tokenizer.parts, tokenizer.Tokenizer.ids


class Published(tokenizer.Tokenizer):
    """That of a `tokenizers.Tokenizer`; `roles` names the specials that are bos, eos, mask, pad, and between."""

    def __init__(
        self, library: tokenizers.Tokenizer, roles: Mapping[str, str | None], files: dict[str, bytes] | None = None
    ):
        self.library, self.files = library, files or {}
        self.size = 1 + max(library.get_vocab(with_added_tokens=True).values(), default=-1)
        for role, name in roles.items():
            setattr(self, role, None if name is None else library.token_to_id(name))
        added = library.get_added_tokens_decoder().items()
        own = [getattr(self, role) for role in roles]
        unknown = getattr(getattr(library, "model", None), "unk_token", None)
        self.unknown = None if unknown is None else library.token_to_id(unknown)
        self.special = frozenset([id for id, one in added if one.special] + [id for id in own if id is not None])

    def encode(self, text: str, *, specials: bool = True) -> np.ndarray:
        with _refusing(f"the tokenizers library fails at the text {text[:40]!r}"):
            ids = self.library.encode(tokenizer.checked(text), add_special_tokens=specials).ids
        if max(ids, default=0) >= self.size:  # as what is put around a text may have
            made = f"makes the id {max(ids)} of {text[:40]!r}"
            raise errors.UserError(f"the tokenizer {made}, and it has {self.size} words")
        return np.asarray(ids, np.int32)

    def ids(self, part: list[str]) -> np.ndarray:
        with _refusing("the tokenizers library fails at the text"):
            rows = [encoding.ids for encoding in self.library.encode_batch_fast(part)]
            for i, text in enumerate(part):
                if isinstance(text, tokenizer.Cut):  # specials belong around the document, and not around its pieces
                    rows[i] = self._around(text)
        id_T = np.fromiter(itertools.chain.from_iterable(rows), np.int64)
        if id_T.size and id_T.max() >= self.size:  # as what is put around a text may have
            raise errors.UserError(f"the tokenizer makes the id {id_T.max()}, and it has {self.size} words")
        return id_T.astype(self.dtype)

    def _around(self, text: tokenizer.Cut) -> list[int]:
        """The ids of a piece of a document, with the specials before or after this."""
        whole, bare = (self.library.encode("a", add_special_tokens=specials).ids for specials in (True, False))
        at = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), 0)
        ids = self.library.encode(text, add_special_tokens=False).ids
        return whole[:at] * text.begins + ids + whole[at + len(bare) :] * text.ends

    def parts(self, text: Iterable[bytes]) -> Iterator[list[str]]:
        if self.between is None:
            return super().parts(text)
        name = self.name(self.between)
        parts = super().parts(piece.replace(tokenizer.SEPARATOR.encode(), name.encode()) for piece in text)
        apart = re.compile(f"({re.escape(name)})")
        return (list(filter(None, itertools.chain.from_iterable(map(apart.split, part)))) for part in parts)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text, without the specials."""
        known = [id for id in tokenizer.listed(ids) if 0 <= id < self.size]
        with _refusing(f"the tokenizers library fails at the ids {known[:9]}"):
            return self.library.decode(known, skip_special_tokens=True)

    def stream(self, ids: Iterable[int], after: Sequence[int] | np.ndarray = ()) -> Iterator[str]:
        # What an id adds depends on those before it; the ones of the last piece are enough to know it. (Where bytes
        # are not UTF-8, the byte fallback of the library may take back what was text before: that has been told.)
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
        return self.library.id_to_token(id) or f"[{id}]"  # a row of the model that the file has no word for


class Pieces(tokenizer.Tokenizer):
    """That of a tok*.bin of https://github.com/karpathy/llama2.c: of two neighbours that are a piece together, the pair
    of the best score joins first. A piece <0x41> is the byte 0x41, for characters that are no piece. By hand, since the
    `tokenizers` library ranks pairs of pieces, and not what they become: where these overlap, it joins others."""

    bos, eos, unknown = BOS, EOS, UNKNOWN

    def __init__(self, table: Sequence[bytes], scores: Sequence[float], files: dict[str, bytes] | None = None):
        self.table, self.scores, self.files = tuple(table), tuple(scores), files or {}
        self.size, self.special = len(table), frozenset((UNKNOWN, BOS, EOS))
        matches = {i: re.fullmatch(rb"<0x([0-9A-F]{2})>", piece) for i, piece in enumerate(self.table)}
        self._byte_of = {i: bytes([int(match[1], 16)]) for i, match in matches.items() if match}
        self._id_of_byte = {content[0]: i for i, content in self._byte_of.items()}
        apart = {UNKNOWN, BOS, EOS} | self._byte_of.keys()
        # The pieces that text can fall into; of two equal ones the first.
        self._id_of = {self.table[i]: i for i in reversed(range(len(self.table))) if i not in apart}

    def encode(self, text: str, *, specials: bool = True) -> np.ndarray:
        ids: list[int] = []
        for character in " " + tokenizer.checked(text) if text else "":
            content = character.encode()
            known = self._id_of.get(content)
            ids += [self._id_of_byte.get(byte, UNKNOWN) for byte in content] if known is None else [known]
        return np.asarray([BOS] * specials + self._joined(ids), np.int32)

    def pieces(self, ids: Iterable[int]) -> Iterator[bytes]:
        """The bytes that each id adds to the text: none for <s>, </s> and what is no id."""
        starts = True
        for i in ids:
            content = self._byte_of.get(i, b"")
            if not content and 0 <= i < self.size and i not in (BOS, EOS):
                content = self.table[i].removeprefix(b" ") if starts else self.table[i]
            yield content
            starts = i == BOS

    def name(self, id: int) -> str:
        return self.table[id].decode("utf-8", "replace")

    def _joined(self, ids: list[int]) -> list[int]:
        """Neighbours joined as long as any can be, the best score first, of equals the leftmost."""
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
            if ids[i] == first and ids[j] == second:  # none has been joined with another meanwhile
                ids[i], ids[j], right[i] = both, -1, right[j]
                if right[j] < len(ids):
                    left[right[j]] = i
                propose(i)
                propose(left[i])
        return [i for i in ids if i >= 0]


def read(path: str | os.PathLike) -> tokenizer.Tokenizer:
    """The tokenizer in a file, or in a folder with tokenizer.json or else another of FILES. UserError where none is."""
    path = pathlib.Path(path)
    if path.is_dir():
        found = next((some for pattern in FILES if (some := sorted(path.glob(pattern)))), [])
        if len(found) != 1:
            wrong = f"{len(found)} tokenizers: give one, as {found[0]}" if found else f"neither {' nor '.join(FILES)}"
            raise errors.UserError(f"the folder {path} has {wrong}")
        path = found[0]
    content = content_of(path)
    try:
        saved = {} if path.suffix == ".bin" else json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise errors.UserError(f"{path} is damaged, or no tokenizer: {error}") from error
    if path.suffix == ".bin":
        return read_pieces(str(path), content)
    if isinstance(saved, dict) and "model" in saved:
        return _read_library(path, content)
    if isinstance(saved, dict) and "kind" in saved:
        return tokenizer.from_json(saved, OfRun)
    raise errors.UserError(f"{path} is no tokenizer: it has neither a model, as tokenizer.json, nor a kind, as ours")


def content_of(path: pathlib.Path) -> bytes:
    """What is in the file; of an older vocabulary, what its tokenizer.json would be. UserError: it cannot be read."""
    if path.name not in vocabulary_files.NAMES:
        try:
            return path.read_bytes()
        except OSError as error:
            raise errors.UserError(f"{path} cannot be read: {error.strerror or error}") from error
        except ValueError as error:
            raise errors.UserError(f"{path} is damaged, or no tokenizer: {error}") from error
    with _refusing(f"{path} is damaged, or newer than the tokenizers library here"), _muted():
        return vocabulary_files.library(path).to_str().encode()


def _beside(path: pathlib.Path) -> dict[str, pathlib.Path]:
    return {name: path.with_name(name) for name in ROLE_FILES if path.with_name(name).is_file()}


def make(name: str, text: Iterable[bytes], **options: Any) -> tokenizer.Tokenizer:
    """`tokenizer.make(name, text, **options)`, the BPE that 'bpe:8192' asks for, or what `read` finds at a path."""
    if words := bpe.size(name):
        return read(bpe.cached(text, words=words, specials=options.get("specials", ())))
    path = pathlib.Path(os.path.expanduser(name))
    if len(path.parts) > 1 and not path.exists():
        raise errors.UserError(f"text.tokenizer = {name} is a path, and nothing is there")
    if name in tokenizer.KINDS or not name or not path.exists():
        return tokenizer.make(name, text, **options)
    return read(path)


def _read_library(path: pathlib.Path, content: bytes) -> Published:
    config = tokenizer_config.read(path.parent, vocabulary_files.CLASSES.get(path.name, tokenizer_config.FROM_FILE))
    with _refusing(f"{path} is damaged, or newer than the tokenizers library here"), _muted():
        library = tokenizer_config.apply(content, config)
        known = library.get_vocab(with_added_tokens=True)
        library.no_padding()  # a file keeps the settings that its model was trained with: they are for batches
        library.no_truncation()
        library.encode("\uf8ff")  # a character of nobody's: shows whether there is something for the unknown
        library.decode([*known.values()])
        plain = not library.encode("").ids  # nothing is put around a text
    if max(known.values(), default=0) >= 2**31:
        raise errors.UserError(f"{path} is damaged: it has the id {max(known.values())}")
    # As the config says it; else by the names in use.
    roles = {role: next((name for name in usual if name in known), None) for role, usual in USUAL.items()}
    roles |= {role: tokenizer_config.named(config, role) for role in roles if f"{role}_token" in config}
    if roles["between"] is None and roles["eos"] in known and plain:
        roles["between"] = roles["eos"]
    files = {"tokenizer.json": content} | {name: file.read_bytes() for name, file in _beside(path).items()}
    saved = files.get(ROLE_FILES[0], b"")
    if config["tokenizer_class"] != tokenizer_config.FROM_FILE and b"tokenizer_class" not in saved:
        files[ROLE_FILES[0]] = disk.as_json(config)  # it was named elsewhere, in a file that is not kept
    return Published(library, roles, files)


@contextlib.contextmanager
def _refusing(sentence: str) -> Iterator[None]:
    """What the library has against its file is the user's to mend, also where its Rust panics."""
    try:
        yield
    except BaseException as error:  # a panic is no Exception, and its class cannot be imported
        # The library raises nothing narrower than Exception for a damaged file.
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise errors.UserError(f"{sentence}: {error}") from error


@contextlib.contextmanager
def _muted() -> Iterator[None]:
    """Without what Rust itself writes of a panic, as a panic becomes an exception that is told."""
    try:
        copy = os.dup(2)
    except OSError:  # it is closed
        yield
        return
    try:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 2)
        yield
    finally:
        os.dup2(copy, 2)
        os.close(copy)


def read_pieces(path: str, content: bytes) -> Pieces:
    """The pieces in the content of a tok*.bin: a little-endian int32, the length of the longest piece; then for each
    piece a float32 score, an int32 length, its bytes. UserError, naming `path`, where it does not hold together."""
    pieces, scores, at, wrong = [], [], 4, ""
    try:
        (longest,) = struct.unpack_from("<i", content)
        while at < len(content) and not wrong:
            score, length = struct.unpack_from("<fi", content, at)
            if not math.isfinite(score):
                wrong = f"its score {score} is not a finite number"
            elif not 1 <= length <= longest:
                wrong = f"its length {length} is not between 1 and {longest}, that of the longest"
            else:
                pieces += struct.unpack_from(f"{length}s", content, at + 8)
                scores.append(score)
                at += 8 + length
    except struct.error:
        wrong = "the file is cut off"
    if wrong:
        raise errors.UserError(f"{path}, piece {len(pieces)}: {wrong}")
    if tuple(map(bytes.strip, pieces[: len(SPECIALS)])) != SPECIALS:
        raise errors.UserError(f"{path} is no tokenizer of llama2.c: its first pieces are not <unk>, <s>, </s>")
    return Pieces(pieces, scores, {f"tok{len(pieces)}.bin": content})
