"""Choose the tokenizer that a config names, and read the tokenizer of a trained model, published or our own.

A published tokenizer gives the ids of AutoTokenizer in transformers. If tokenizer.json alone decides them, this module
reads it. Otherwise transformers reads the folder, which stays as it is, and the result becomes a new tokenizer.json in
memory, which a run saves.
"""

import json
import os
import pathlib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tokenizers

from experiments.config import by_name, disk, errors
from experiments.data import bpe, files as data_files, tokenization
from experiments.folder import records

JSON, CONFIG, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
FILES = (JSON, "vocab.txt", "vocab.json")  # in a folder; the first that exists is read
NEIGHBOURS = (CONFIG, "special_tokens_map.json", "added_tokens.json", "config.json")
FROM_FILE = "PreTrainedTokenizerFast"
UNCHANGED = (FROM_FILE, "PreTrainedTokenizer", "TokenizersBackend")  # classes that use tokenizer.json as it is
UNCHANGED_TYPES = (None, "llama", "mistral")  # types of models with such a class, if tokenizer_config.json names none
# Fields of tokenizer_config.json that a tokenizer read by transformers keeps.
KEPT = ("split_special_tokens", "clean_up_tokenization_spaces", "chat_template", "truncation_side", "padding_side")
KEPT += ("model_input_names", "model_max_length")
# For roles that tokenizer_config.json does not name, the first of these special tokens in the vocabulary decides.
DEFAULT_NAMES = {
    "bos": ("<s>", "<|begin_of_text|>", "<bos>", "<|endoftext|>"),
    "eos": ("</s>", "<|end_of_text|>", "<eos>", "<|endoftext|>"),
    "mask": ("[MASK]", "<mask>"),
    "pad": ("[PAD]", "<pad>"),
    "between": (),  # separates documents; only ours have it (bpe.py)
}


class OfRun(tokenization.Plain):
    """The tokenizer of bytes or characters that a run has saved. Unlike in that run, no token separates documents."""

    encode_text = tokenization.Tokenizer.encode_text
    document_start = None


class Published(tokenization.Tokenizer):
    """A tokenizer made from `library`, a `tokenizers.Tokenizer`.

    files: {name: content} of the files from which `read` makes the same tokenizer.
    roles: {role: name of its token or None} for the roles bos, eos, mask, pad, and between (two documents).
    """

    def __init__(
        self, library: tokenizers.Tokenizer, roles: Mapping[str, str | None], files: dict[str, bytes] | None = None
    ):
        self.library, self.files = library, files or {}
        self.size = 1 + max(library.get_vocab(with_added_tokens=True).values(), default=-1)
        ids = {role: None if name is None else library.token_to_id(name) for role, name in roles.items()}
        vars(self).update(ids)
        unknown = getattr(library.model, "unk_token", None)  # not all of the library's models have it
        self.unknown = None if unknown is None else library.token_to_id(unknown)
        added = {id for id, token in library.get_added_tokens_decoder().items() if token.special}
        self.special = frozenset(added | {id for id in ids.values() if id is not None})

    def encode(self, text: str, *, specials: bool = True) -> np.ndarray:
        """Return the ids of a text (int32). specials: whether to add special tokens around it, such as [CLS] and [SEP].

        Raises UserError if the text is not Unicode.
        """
        text = tokenization.check_unicode(text)
        return np.asarray(self.library.encode(text, add_special_tokens=specials).ids, np.int32)

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        valid = [*map(tokenization.check_unicode, texts)]
        return [encoding.ids for encoding in self.library.encode_batch_fast(valid, add_special_tokens=False)]

    @property
    def around(self) -> tuple[list[int], list[int]]:
        complete, bare = (self.library.encode("a", add_special_tokens=specials).ids for specials in (True, False))
        start = next((i for i in range(len(complete)) if complete[i : i + len(bare)] == bare), 0)
        return complete[:start], complete[start + len(bare) :]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of the ids. Special tokens, and numbers that are not ids, add nothing."""
        valid_ids = [id for id in tokenization.to_list(ids) if 0 <= id < self.size]
        return self.library.decode(valid_ids, skip_special_tokens=True)

    def name(self, id: int) -> str:
        """Return the name of an id; for an id of the model without a token it is the number in brackets."""
        return self.library.id_to_token(id) or f"[{id}]"


class Users(tokenization.Tokenizer):
    """The tokenizer `theirs`, which the user's function `name` has returned. No file restores it."""

    can_restore = False

    def __init__(self, name: str, theirs: Any):
        self.function, self.theirs, self.size = name, theirs, int(theirs.size)
        roles = {role: getattr(theirs, role, None) for role in (*DEFAULT_NAMES, "unknown")}
        vars(self).update(roles)
        self.special = frozenset(id for id in roles.values() if id is not None)
        self.files = {JSON: disk.as_json({"kind": name})}

    def encode(self, text: str, *, specials: bool = True) -> np.ndarray:
        with by_name.user_errors(f"text.tokenizer = {self.function}"):
            id_T = np.asarray(self.theirs.encode(tokenization.check_unicode(text)))
        is_valid = id_T.ndim == 1 and (not id_T.size or id_T.dtype.kind in "iu" and id_T.max() < self.size)
        if not is_valid or id_T.min(initial=0) < 0:
            problem = f"encode({text[:20]!r}) returned {str(id_T)[:60]}"
            raise errors.UserError(f"text.tokenizer = {self.function}: {problem}, not ids from 0 to {self.size - 1}.")
        return id_T.astype(np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        valid_ids = [id for id in tokenization.to_list(ids) if 0 <= id < self.size]
        with by_name.user_errors(f"text.tokenizer = {self.function}"):
            return self.theirs.decode(valid_ids)

    def name(self, id: int) -> str:
        return f"[{id}]"


def make(
    name: str, text: Iterable[bytes], *, specials: tuple[str, ...] = (), evaluation: Iterable[bytes] = ()
) -> tokenization.Tokenizer:
    """Return the tokenizer that text.tokenizer names.

    It is one of tokenization.KINDS, a BPE ('bpe:8192'), the user's function ('my_file:words'), or a path. text,
    evaluation: the bytes of training and evaluation documents, separated by NUL. specials: names of special tokens.
    """
    if W := bpe.size(name):
        return read(bpe.find_or_train(text, W=W, specials=specials))
    if by_name.CODE.fullmatch(name):
        return make_users(name, text)
    path = pathlib.Path(os.path.expanduser(name))
    if name in tokenization.KINDS or not name or not path.exists():
        return tokenization.make(name, text, specials=specials, evaluation=evaluation)
    return read(path)


def make_users(name: str, text: Iterable[bytes]) -> tokenization.Tokenizer:
    """Return the tokenizer that the user's function `name`, "my_file:function", makes from the training documents.

    The function receives an iterator of str. It returns an object with size, encode and decode, or a tokenizer of the
    library `tokenizers`, also one inside a tokenizer of transformers. Only the latter is saved with the run. text: the
    bytes of the documents. Raises UserError if the function fails or returns something else.
    """
    function = by_name.choose("tokenizer", name, {"bytes": tokenization.make}, "text.tokenizer")
    with by_name.user_errors(f"text.tokenizer = {name}"):
        theirs = function(piece.text for piece in tokenization.documents(text))
        library = getattr(theirs, "backend_tokenizer", theirs)
        if isinstance(library, tokenizers.Tokenizer):
            config = disk.as_json({"tokenizer_class": FROM_FILE})
            return read_library({JSON: library.to_str().encode(), CONFIG: config})
        if missing := [attribute for attribute in ("size", "encode", "decode") if not hasattr(theirs, attribute)]:
            problem = f"it returned {type(theirs).__name__} without {', '.join(missing)}"
            raise TypeError(f"{problem}, not a tokenizers.Tokenizer, nor an object with size, encode and decode")
        return Users(name, theirs)


def read(path: str | os.PathLike) -> tokenization.Tokenizer:
    """Return the tokenizer in a file, or in a folder. Raises UserError if there is none, or if it cannot be read.

    This is so if it is damaged, or if only a user's function can make it.
    """
    path = pathlib.Path(path)
    if path.is_dir():
        folder, path = path, find(path)
        errors.refuse((path is None, f"the folder {folder} has none of {', '.join(FILES)}"))
    files = read_files(path)
    with disk.reading(path, Exception):  # the library raises Exception for a damaged file
        saved = json.loads(files[JSON])
        if "model" in saved:
            return read_library(files)
        if by_name.CODE.fullmatch(kind := str(saved["kind"])):
            remedy = f"Let {kind} return a tokenizers.Tokenizer, or use the result of launch.run"
            raise ValueError(f"it names your function {kind}, and no file holds the tokenizer it returns. {remedy}")
        if kind not in tokenization.KINDS:
            raise ValueError(f"kind = {kind!r} must be one of {', '.join(tokenization.KINDS)}")
        return OfRun(kind, saved["characters"], tuple(saved["specials"]))


def find(folder: pathlib.Path) -> pathlib.Path | None:
    """Return the file of the tokenizer in a folder, which `read` reads, or None."""
    return next((file for name in FILES if (file := folder / name).is_file()), None)


def read_files(path: pathlib.Path) -> dict[str, bytes]:
    """Return {"tokenizer.json": its bytes, "tokenizer_config.json": its bytes}, which define a tokenizer.

    The first maps a text to ids, without adding special tokens such as [CLS]; the second names the special tokens, and
    is left out for a tokenizer of bytes or characters. path: a file. Other files of its folder are read only if its
    name is tokenizer.json, vocab.txt or vocab.json. Raises UserError if a file is damaged, if the folder defines the
    tokenizer by code, and if transformers must read it and is not installed.
    """
    with disk.reading(path, TypeError):
        content = disk.read_bytes(path)
        library = json.loads(content) if path.name not in FILES[1:] else {"model": None}
        if "model" not in library:
            return {JSON: content}
    files = [path.with_name(name) for name in NEIGHBOURS] if path.name in FILES else []
    contents = {file.name: records.read_object(file, {}) for file in files if file.is_file()}
    config, specials, additions, model = (contents.get(name, {}) for name in NEIGHBOURS)
    if "added_tokens_decoder" not in config:  # else transformers does not read special_tokens_map.json
        config |= {key: value.get("content") if isinstance(value, dict) else value for key, value in specials.items()}
    if files and (template := path.with_name(TEMPLATE)).is_file():
        with disk.reading(template):
            config["chat_template"] = disk.read_bytes(template).decode()
    if "auto_map" in config:
        problem = f"{path.with_name(CONFIG)}: auto_map names code, which is never executed"
        raise errors.UserError(f"{problem}. Choose a tokenizer without code, or remove auto_map")
    with disk.reading(path, TypeError, AttributeError, KeyError):
        fields = {"tokenizer_class": model.get("tokenizer_class")} | config | {"added_tokens.json": [*additions]}
        reason = find_difference(library, fields, model.get("model_type")) if library["model"] else path.name
    if reason:
        return convert(path, config, reason)
    return {JSON: content, CONFIG: disk.as_json(config | {"tokenizer_class": FROM_FILE})}


def find_difference(library: Mapping[str, Any], fields: Mapping[str, Any], model_type: str | None) -> str:
    """Return the reason why transformers may give other ids than tokenizer.json alone, or '' if there is none.

    library: the content of tokenizer.json. fields: those of tokenizer_config.json and the other files next to it.
    model_type: in config.json.
    """
    kind = fields["tokenizer_class"]
    if kind not in UNCHANGED and (kind or model_type not in UNCHANGED_TYPES):
        return f"tokenizer_class = {kind}, model_type = {model_type}"
    tokens = {token["content"] for token in library.get("added_tokens", [])}
    for name, value in fields.items():
        adds = name in ("add_bos_token", "add_eos_token") and value is not None
        names_tokens = name.endswith(("_token", "_tokens", "_decoder", ".json")) and not isinstance(value, bool)
        if adds or names_tokens and not tokens.issuperset({*list_names(value)} - {None}):
            return f"{name} = {str(value)[:60]}"
    return ""


def list_names(value: Any) -> Iterator[Any]:
    """Yield the names of the tokens in a field: a name, an object with `content`, or a list or object of them."""
    if isinstance(value, dict) and "content" in value:
        yield value["content"]
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from list_names(item)
    else:
        yield value


def convert(path: pathlib.Path, config: Mapping[str, Any], reason: str) -> dict[str, bytes]:
    """Return {file name: content} of the tokenizer in the folder of `path`, read by transformers.

    config: the content of tokenizer_config.json. reason: why only transformers can read the tokenizer. Raises UserError
    if transformers is not installed, or cannot read it.
    """
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that there is no PyTorch
    with data_files.require_extra(f"{path} ({reason})"):
        import transformers
    with disk.reading(path, Exception), warnings.catch_warnings():
        # transformers 5.15 reads vocab.txt and vocab.json by a constructor of which the tokenizers library warns.
        warnings.filterwarnings("ignore", r"Deprecated in 0\.9\.0: \w+\.__init__ will not create", DeprecationWarning)
        options = {"local_files_only": True, "trust_remote_code": False}
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(path.parent), **options)
        content = tokenizer.backend_tokenizer.to_str().encode()
        roles = {f"{role}_token": None for role in DEFAULT_NAMES} | tokenizer.special_tokens_map
    fields = {name: config[name] for name in KEPT if name in config}
    return {JSON: content, CONFIG: disk.as_json(fields | roles | {"tokenizer_class": FROM_FILE})}


def read_library(files: dict[str, bytes]) -> Published:
    """Return the tokenizer of the files that `read_files` returns. Raises Exception for a damaged file."""
    library = tokenizers.Tokenizer.from_str(files[JSON].decode())
    config = json.loads(files[CONFIG])
    library.encode_special_tokens = bool(config.get("split_special_tokens"))
    truncation = (library.truncation or {}).get("direction", "right").lower()
    library.no_padding()  # padding and truncation in the file are for the training of its model
    library.no_truncation()
    library.encode("\uf8ff")  # a private character: this raises if there is no id for unknown characters
    vocabulary, around = library.get_vocab(with_added_tokens=True), library.encode("").ids
    roles = {role: next((name for name in names if name in vocabulary), None) for role, names in DEFAULT_NAMES.items()}
    for role in roles:
        if f"{role}_token" in config:
            (roles[role],) = list_names(config[f"{role}_token"])
    if roles["between"] is None and roles["eos"] in vocabulary and not around:
        roles["between"] = roles["eos"]
    chosen = Published(library, roles, files)
    chosen.truncation_side = config.get("truncation_side") or truncation
    if chosen.truncation_side not in ("left", "right"):
        raise ValueError(f"truncation_side = {chosen.truncation_side!r} must be left or right")
    chosen.has_chat_template = bool(config.get("chat_template"))
    return chosen
