"""The tokenizer of a trained model, published or our own, read from its files; and in the place of a run's own.

A file tells its kind: tokenizer.json for the `tokenizers` library, a saved tokenizer of a run, or tok*.bin of llama2.c.
"""

import contextlib
import json
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import tokenizers

from experiments.data import llama2c_tokenizer, tokenizer
from experiments.engine import disk, errors

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


class OfRun(tokenizer.Plain):
    """That of a run of ours, used as a published one is: nothing stands between documents, and any id may be drawn."""

    @property
    def ordinary(self) -> int:
        return self.size

    join = tokenizer.Tokenizer.join


class Published(tokenizer.Tokenizer):
    """That of a `tokenizers.Tokenizer`; `roles` names the specials that are bos, eos, mask and pad."""

    def __init__(
        self, library: tokenizers.Tokenizer, roles: Mapping[str, str | None], files: dict[str, bytes] | None = None
    ):
        self.library, self.files = library, files or {}
        self.size = self.ordinary = 1 + max(library.get_vocab(with_added_tokens=True).values(), default=-1)
        for role, name in roles.items():
            setattr(self, role, None if name is None else library.token_to_id(name))

    def encode(self, text: str, *, specials: bool = True) -> np.ndarray:
        with _refusing(f"the tokenizers library fails at the text {text[:40]!r}"):
            ids = self.library.encode(tokenizer.checked(text), add_special_tokens=specials).ids
        if max(ids, default=0) >= self.size:  # as what is put around a text may have
            raise errors.UserError(
                f"the tokenizer makes the id {max(ids)} of {text[:40]!r}, and it has {self.size} words"
            )
        return np.asarray(ids, np.int32)

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


def read(path: str | os.PathLike) -> tokenizer.Tokenizer:
    """The tokenizer in a file, or in a folder with tokenizer.json or else one tok*.bin.

    UserError where nothing is there, and for a damaged file.
    """
    path = pathlib.Path(path)
    if path.is_dir():
        found = next((some for pattern in FILES if (some := sorted(path.glob(pattern)))), [])
        if len(found) != 1:
            wrong = f"{len(found)} tokenizers: give one, as {found[0]}" if found else f"neither {' nor '.join(FILES)}"
            raise errors.UserError(f"the folder {path} has {wrong}")
        path = found[0]
    try:
        content = disk.read(path, LARGEST)
        saved = {} if path.suffix == ".bin" else json.loads(content.decode())
    except OSError as error:
        raise errors.UserError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise errors.UserError(f"{path} is damaged, or no tokenizer: {error}") from error
    if path.suffix == ".bin":
        return llama2c_tokenizer.read(str(path), content)
    if isinstance(saved, dict) and "model" in saved:
        return _read_library(path, content)
    if isinstance(saved, dict) and "kind" in saved:
        return tokenizer.from_json(saved, OfRun)
    raise errors.UserError(f"{path} is no tokenizer: it has neither a model, as tokenizer.json, nor a kind, as ours")


def make(
    name: str, documents: Sequence[bytes], *, specials: tuple[str, ...], evaluation: Sequence[bytes]
) -> tokenizer.Tokenizer:
    """The tokenizer of the kind `name`, made from the documents; or the one in the file or folder of that name.

    UserError as `tokenizer.make` and `read`.
    """
    path = pathlib.Path(os.path.expanduser(name))
    if len(path.parts) > 1 and not path.exists():
        raise errors.UserError(f"text.tokenizer = {name} is a path, and nothing is there")
    if name in tokenizer.KINDS or not name or not path.exists():
        return tokenizer.make(name, documents, specials=specials, evaluation=evaluation)
    return read(path)


def _read_library(path: pathlib.Path, content: bytes) -> Published:
    beside = {name: path.with_name(name) for name in ROLE_FILES if path.with_name(name).is_file()}
    with _refusing(f"{path} is damaged, or newer than the tokenizers library here"), _muted():
        library = tokenizers.Tokenizer.from_str(content.decode())
        known = library.get_vocab(with_added_tokens=True)
        library.no_padding()  # a file keeps the settings that its model was trained with: they are for batches
        library.no_truncation()
        library.encode("\uf8ff")  # a character of nobody's: shows whether there is something for the unknown
        library.decode([*known.values()])
    if max(known.values(), default=0) >= 2**31:
        raise errors.UserError(f"{path} is damaged: it has the id {max(known.values())}")
    # As the files beside say it, the first having the last word; else by the names in use.
    roles = {role: next((name for name in usual if name in known), None) for role, usual in USUAL.items()}
    for file in reversed(beside.values()):
        saved = disk.read_json(file, says="which special has which role")
        for role in (role for role in roles if f"{role}_token" in saved):
            name = saved[f"{role}_token"]
            name = name.get("content") if isinstance(name, dict) else name
            roles[role] = name if isinstance(name, str) else None
    files = {"tokenizer.json": content} | {name: file.read_bytes() for name, file in beside.items()}
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
