"""The words of a pretrained model, or of a run of ours: text to ids and back, the same few functions for each.

A file tells its kind: tokenizer.json for the `tokenizers` library, a saved tokenizer of a run, or tok*.bin of llama2.c.
"""

import codecs
import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from experiments.data import llama2c_tokenizer, tokenizer
from experiments.engine import errors

LARGEST = 2**28  # bytes of a file; the largest tokenizers in use have some 2**25
FILES = ("tokenizer.json", "tok*.bin")  # what is looked for in a folder
# Files beside tokenizer.json say which special has which role; where there are none, the names that are in use do.
ROLE_FILES = ("tokenizer_config.json", "special_tokens_map.json")
USUAL = {
    "bos": ("<s>", "<|begin_of_text|>", "<bos>", "<|endoftext|>"),
    "eos": ("</s>", "<|end_of_text|>", "<eos>", "<|endoftext|>"),
    "mask": ("[MASK]", "<mask>"),
    "pad": ("[PAD]", "<pad>"),
}


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """Ids 0 .. size-1 and the text they stand for; ids from `size` on, if a model has such rows, stand for none.

    encode(text, *, specials=True) -> int32 ids, with those that belong around a text (<s>, or [CLS] and [SEP]).
    decode(ids) -> text, without the specials; what is not UTF-8 is U+FFFD.
    stream(ids, after=()) -> what the ids add to the text of the ids `after`, as they come, in whole characters:
      "".join(stream(ids)) == decode(ids).
    name(id) -> what the id is called in its file, the name of a special too.
    """

    encode: Callable[..., np.ndarray]
    decode: Callable[[Sequence[int] | np.ndarray], str]
    stream: Callable[..., Iterator[str]]
    size: int
    name: Callable[[int], str]
    bos: int | None = None
    eos: int | None = None
    mask: int | None = None
    pad: int | None = None


def read(path: str | os.PathLike) -> Vocabulary:
    """The vocabulary in a file, or in a folder with tokenizer.json or else one tok*.bin.

    Raises:
      UserError: nothing there; a damaged file; a tokenizer.json without the `tokenizers` library.
    """
    path = _file(pathlib.Path(path))
    content = _content(path)
    if path.suffix == ".bin":
        return of_pieces(llama2c_tokenizer.read(str(path), content))
    saved = _json_object(path, content)
    if "model" in saved:
        return _read_library(path, content)
    if "kind" in saved:
        return of_run(tokenizer.from_json(saved))
    raise errors.UserError(f"{path} is no tokenizer: it has neither a model, as tokenizer.json, nor a kind, as ours")


def of_run(made: tokenizer.Tokenizer) -> Vocabulary:
    """That of a run of ours: nothing is put around a text, and specials are shown by their names."""

    def encode(text: str, *, specials: bool = True) -> np.ndarray:
        return made.encode(_unicode(text).encode())

    def content(id: int) -> bytes:
        if made.kind == "bytes" and 0 <= id < made.ordinary:
            return bytes([id])
        return made.decode([id]).encode() if 0 <= id < made.size else b""

    def bytes_of(ids: Iterable[int]) -> Iterator[bytes]:
        return map(content, ids)

    mask = made.special("[MASK]") if "[MASK]" in made.specials else None
    return Vocabulary(encode, *_from_bytes(bytes_of), size=made.size, name=lambda id: made.decode([id]), mask=mask)


def of_pieces(table: llama2c_tokenizer.Pieces) -> Vocabulary:
    """That of llama2.c: <s> comes before a text."""

    def encode(text: str, *, specials: bool = True) -> np.ndarray:
        return np.asarray([llama2c_tokenizer.BOS] * specials + table.encode(_unicode(text)), np.int32)

    def name(id: int) -> str:
        return table.pieces[id].decode("utf-8", "replace")

    parts = _from_bytes(table.decode)
    return Vocabulary(
        encode, *parts, size=len(table.pieces), name=name, bos=llama2c_tokenizer.BOS, eos=llama2c_tokenizer.EOS
    )


def of_library(made: Any, roles: dict[str, str | None]) -> Vocabulary:
    """That of a `tokenizers.Tokenizer`; `roles` names the specials that are bos, eos, mask and pad."""
    made.no_padding()  # a file keeps the settings that its model was trained with: they are for batches
    made.no_truncation()
    size = 1 + max(made.get_vocab(with_added_tokens=True).values(), default=-1)

    def encode(text: str, *, specials: bool = True) -> np.ndarray:
        with _refusing(f"the tokenizers library fails at the text {text[:40]!r}"):
            ids = made.encode(_unicode(text), add_special_tokens=specials).ids
        if max(ids, default=0) >= size:  # as what is put around a text may have
            raise errors.UserError(f"the tokenizer makes the id {max(ids)} of {text[:40]!r}, and it has {size} words")
        return np.asarray(ids, np.int32)

    def decode(ids: Sequence[int] | np.ndarray) -> str:
        known = [id for id in _listed(ids) if 0 <= id < size]
        with _refusing(f"the tokenizers library fails at the ids {known[:9]}"):
            return made.decode(known, skip_special_tokens=True)

    def stream(ids: Iterable[int], after: Sequence[int] | np.ndarray = ()) -> Iterator[str]:
        # What an id adds depends on those before it; the ones of the last piece are enough to know it. (Where bytes
        # are not UTF-8, the byte fallback of the library may take back what was text before: that has been told.)
        window = _listed(after)
        told = len(window)
        for id in ids:
            window.append(int(id))
            text, before = decode(window), decode(window[:told])
            if len(text) > len(before) and not text.endswith("\N{REPLACEMENT CHARACTER}"):
                yield text[len(before) :]
                window, told = window[told:], len(window) - told
        rest = decode(window)[len(decode(window[:told])) :]
        if rest:
            yield rest

    def name(id: int) -> str:
        return made.id_to_token(id) or f"[{id}]"  # a row of the model that the file has no word for

    ids_of = {role: None if name is None else made.token_to_id(name) for role, name in roles.items()}
    return Vocabulary(encode, decode, stream, size=size, name=name, **ids_of)


def _from_bytes(bytes_of: Callable[[Iterable[int]], Iterator[bytes]]) -> tuple[Callable, Callable]:
    """decode and stream, where the text is the bytes of the ids one after another."""

    def decode(ids: Sequence[int] | np.ndarray) -> str:
        return b"".join(bytes_of(_listed(ids))).decode("utf-8", "replace")

    def stream(ids: Iterable[int], after: Sequence[int] | np.ndarray = ()) -> Iterator[str]:
        known, decoder = _listed(after), codecs.getincrementaldecoder("utf-8")("replace")
        contents = bytes_of(itertools.chain(known, map(int, ids)))
        for _ in known:
            decoder.decode(next(contents))
        yield from filter(None, map(decoder.decode, contents))
        yield from filter(None, [decoder.decode(b"", final=True)])

    return decode, stream


def _read_library(path: pathlib.Path, content: bytes) -> Vocabulary:
    try:
        import tokenizers  # an extra: only here, where it is needed
    except ImportError as error:
        raise errors.UserError(f"{path} needs the tokenizers library: pip install '.[text]'") from error
    with _refusing(f"{path} is damaged, or newer than the tokenizers library here"), _muted():
        made = tokenizers.Tokenizer.from_str(content.decode())
        known = made.get_vocab(with_added_tokens=True)
        found = of_library(made, _roles(path, known))  # before anything is encoded: a file may pad to any length
        made.encode("\uf8ff")  # a character of nobody's: shows whether there is something for the unknown
        made.decode([*known.values()])
    if max(known.values(), default=0) >= 2**31:
        raise errors.UserError(f"{path} is damaged: it has the id {max(known.values())}")
    return found


@contextlib.contextmanager
def _refusing(told: str) -> Iterator[None]:
    """What the library has against its file is the user's to mend, also where its Rust panics."""
    try:
        yield
    except BaseException as error:  # a panic is no Exception, and its class cannot be imported
        # The library raises nothing narrower than Exception for a damaged file.
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise errors.UserError(f"{told}: {error}") from error


@contextlib.contextmanager
def _muted() -> Iterator[None]:
    """Without what Rust itself writes of a panic, as a panic becomes an exception that is told."""
    try:
        kept = os.dup(2)
    except OSError:  # it is closed
        yield
        return
    try:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _roles(path: pathlib.Path, known: Collection[str]) -> dict[str, str | None]:
    """Which special is bos, eos, mask, pad: as the files beside `path` say, else by the names in use."""
    roles = {role: next((name for name in USUAL[role] if name in known), None) for role in USUAL}
    for file in (path.with_name(name) for name in reversed(ROLE_FILES)):  # the first has the last word
        saved = _json_object(file, _content(file)) if file.is_file() else {}
        for role in roles.keys() & {key.removesuffix("_token") for key in saved if key.endswith("_token")}:
            name = saved[f"{role}_token"]
            name = name.get("content") if isinstance(name, dict) else name
            roles[role] = name if isinstance(name, str) else None
    return roles


def _file(path: pathlib.Path) -> pathlib.Path:
    """The file that a path given by the user means."""
    if not path.is_dir():
        return path
    for pattern in FILES:
        found = sorted(path.glob(pattern))
        if len(found) > 1:
            raise errors.UserError(f"{path} has {len(found)} tokenizers: give one, as {found[0]}")
        if found:
            return found[0]
    raise errors.UserError(f"the folder {path} has neither {' nor '.join(FILES)}")


def _content(path: pathlib.Path) -> bytes:
    try:
        if not path.is_file():
            raise errors.UserError(f"{path} is not there, or not a file")
        if path.stat().st_size > LARGEST:
            raise errors.UserError(f"{path} is too large for a tokenizer: {LARGEST} bytes are allowed")
        return path.read_bytes()
    except OSError as error:
        raise errors.UserError(f"{path} cannot be read: {error.strerror or error}") from error


def _json_object(path: pathlib.Path, content: bytes) -> dict[str, Any]:
    try:
        saved = json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise errors.UserError(f"{path} is damaged: it is not JSON") from error
    if not isinstance(saved, dict):
        raise errors.UserError(f"{path} is damaged: its JSON is not an object")
    return saved


def _unicode(text: str) -> str:
    """The text, where it can be written in UTF-8: what a terminal passes on undecoded cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise errors.UserError(f"{text[:40]!r} is not Unicode text: {error.reason}") from error
    return text


def _listed(ids: Sequence[int] | np.ndarray) -> list[int]:
    return np.asarray(ids, np.int64).reshape(-1).tolist()
