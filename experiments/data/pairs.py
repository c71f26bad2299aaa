"""Sentence pairs, source and target, in a training and an evaluation part that depend on the sentences alone; cut into
subwords; and as arrays: what an encoder reads, and what a decoder is to predict from what it has written so far.
"""

import contextlib
import glob
import os
import pathlib
import re
import unicodedata
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import tokenizers

from experiments.data import bpe, download, files, pretrained_tokenizer, tokenizer
from experiments.engine import batches, disk, errors

# name -> (file name, where a person finds it, sha256)
NAMED = {
    "spa-eng": (
        "spa-eng.zip",
        "https://storage.googleapis.com/download.tensorflow.org/data/spa-eng.zip",
        "0c4fd7825d3d872488d38c157f784e035edab4f2ff0df25a2a208790ecb5b58f",
    )
}
EVALUATION_SHARE = 0.05
ENDINGS = (".tsv", ".txt")  # of the files of a folder or zip that hold pairs
HIDDEN = (".", "_")  # begin the names of files and folders that do not
LANGUAGE = r"\.[a-z]{2}|\.[a-z]{2,3}[-_][A-Za-z]{2,4}"  # .en, .pt_BR, .zho_Hans: the ends of parallel files' names
COPIES = 8  # bytes in memory for each of text: strings have some 50 bytes beside their letters (measured: 6.5)
PIECE = 10_000  # sentences encoded at a time: the library takes some kilobytes for each
CODES = "ar bg ca cs da de el en es et eu fa fi fr ga gl he hi hr hu id is it ja ka ko lt lv mk ms nl no pl pt ro ru sk"
CODES += (
    " sl sq sr sv sw ta th tr uk ur vi zh english french german spanish italian portuguese russian chinese japanese"
)
NAMES = {*CODES.split(), *"source src target tgt trg sentence translation id index score".split()}  # of columns
SPECIALS = ("[PAD]", "[BOS]", "[EOS]")
PAD, BOS, EOS = range(len(SPECIALS))
LEAST = len(SPECIALS) + 256  # ids: specials and bytes
FORM = "a line is a sentence, a tab, and its translation, or two parallel files end in .en and .es, say"

NUMBER = re.compile(r"[-+]?[0-9]+([.,][0-9]+)?")

Pair = tuple[str, str]


def load(source: str, *, reverse: bool = False) -> files.Rows:
    """Pairs from a named set or a path: tab-separated UTF-8 lines, in a file, or in a folder's or zip's .tsv and .txt.

    Empty lines are ignored, and columns after source and target, of which the number is told. A folder or zip without
    such files may hold parallel ones, as said.en and said.es, whose lines are pairs, or a path be what the names of two
    share (said); the source is the language that comes first in the alphabet. reverse: source and target are exchanged.
    Sentences are in Unicode's form NFC. Without names that tell it (`files.by_names`), about 5 % of the sources are
    held out, with all their translations; those of the same `sentence_key` fall on one side. UserError for what is not
    there, damaged, dangerous or too large, a line that is no pair, a header, columns of numbers, too few sentences to
    split.
    """
    left: Counter[str] = Counter()

    def read(file: files.File) -> Iterator[Pair]:
        return (pair[::-1] if reverse else pair for pair in _pairs(file, left))

    with contextlib.ExitStack() as zips:
        found = _found(source, zips)
        how = {"of": f"sentence pairs: {FORM}", "key": _key, "share": EVALUATION_SHARE, "copies": COPIES}
        rows = files.divided(source, "" if source in NAMED else "pairs", found, read, **how)
    if not rows.said and any(file.beside for file in found):
        rows = rows._replace(said=f"{source}: the lines of {files.listed(found)} are pairs")
    more = (f"{source}: {n:,} lines {what}" for what, n in left.items())
    return rows._replace(said="\n".join(filter(None, [rows.said, *more])))


def sentence_key(sentence: str) -> str:
    """What sentences share that differ only in case, punctuation and spaces; without a word, the sentence itself."""
    # Marks (category M) count as letters: without them, words of many scripts would fall together.
    letters = (c if c.isalnum() or unicodedata.category(c)[0] == "M" else " " for c in sentence.casefold())
    return " ".join("".join(letters).split()) or sentence


def _key(pair: Pair) -> bytes:
    return sentence_key(pair[0]).encode()


def _found(source: str, zips: contextlib.ExitStack) -> list[files.File]:
    """The files that a name or a path stands for, of parallel ones the first with the other beside it."""
    path = pathlib.Path(os.path.expanduser(source))
    if source in NAMED:
        file_name, url, sha256 = NAMED[source]
        path = download.here(file_name, sha256)
        if path is None:
            where = ", ".join(map(str, download.places()))
            raise errors.UserError(f"{source} was not found in {where}: download {url} into one of these folders")
    if source and os.path.isdir(path):
        return _by_twos(files.folder(path, HIDDEN))
    if os.path.isfile(path):  # to look into a pipe could take forever
        return _by_twos(files.members(path, zips, HIDDEN)) if zipfile.is_zipfile(path) else [files.on_disk(path)]
    if source and os.path.exists(path):
        raise errors.UserError(f"{path} is neither a file nor a folder")
    # The two files whose names are this one's and a language: said.en and said.es.gz for said.
    pattern = f"{glob.escape(path.name)}.*"
    alike = sorted(path.parent.glob(pattern)) if path.name and os.path.isdir(path.parent) else []
    two = [file for file in alike if file.is_file() and "." not in _bare(file).name[len(path.name) + 1 :]]
    if len(two) != 2:
        named = ", ".join(NAMED)
        raise errors.UserError(f"{source!r} is neither a named set of pairs ({named}) nor a path that exists")
    first, second = map(files.on_disk, two)
    return [first._replace(size=first.size + second.size, beside=second)]


def _by_twos(found: Sequence[files.File]) -> list[files.File]:
    """The files with tab-separated pairs; where there are none, those that are parallel, the first with the other."""
    alone = [file for file in found if _bare(file.inside).suffix.lower() in ENDINGS]
    couples: dict[pathlib.PurePath, list[files.File]] = {}
    for file in found:
        if re.fullmatch(LANGUAGE, _bare(file.inside).suffix):
            couples.setdefault(_bare(file.inside).with_suffix(""), []).append(file)
    groups = [group for group in couples.values() if len(group) > 1 and not alone]
    languages = [[_bare(file.inside).suffix for file in group] for group in groups]
    if any(len(some) > 2 or some != languages[0] for some in languages):
        every = sorted({language for some in languages for language in some})
        wrong = f"{groups[0][0].name} and others are parallel in more than two languages ({', '.join(every)})"
        raise errors.UserError(f"{wrong}: put those of two into a folder of their own")
    return alone or [first._replace(size=first.size + second.size, beside=second) for first, second in groups]


def _bare(path: pathlib.PurePath) -> pathlib.PurePath:
    """The path without the .gz behind it."""
    return path.with_suffix("") if path.suffix.lower() == ".gz" else path


def _pairs(file: files.File, left: Counter[str]) -> Iterator[Pair]:
    """The pairs of a file's lines, or of those of two files. left: counts what is left out of them. UserError names
    file and line."""
    if file.beside:
        for pair in zip(*parallel([file, file.beside]), strict=True):
            if all(pair):
                yield pair
            elif any(pair):
                left["are left out, as one side is empty"] += 1
        return
    lines, numbers = 0, Counter()
    for number, line in enumerate(_lines(file), 1):
        cells = [cell.strip() for cell in line.split("\t")]
        if lines == 0 and len({*cells}) > 1 and all(re.split("[-_]", cell.lower())[0] in NAMES for cell in cells[:3]):
            raise errors.UserError(f"{file.name}, line {number} is a header and no pair: leave it out")
        lines += line != ""
        if len(cells) > 1 and all(cells[:2]):
            if len(cells) > 2:
                left["have more than two columns, of which the first two are used"] += 1
                numbers.update(i for i in (0, 1) if NUMBER.fullmatch(cells[i]))
            yield tuple(cells[:2])
        elif line:
            wrong = f"no second column after a tab ({FORM}): {line[:40]!r}"
            if len(cells) > 1:
                wrong = f"the {'second' if cells[0] else 'first'} column is empty"
            raise errors.UserError(f"{file.name}, line {number}: {wrong}")
    for column, n in numbers.items():
        if 2 * n > lines:
            wrong = f"column {column + 1} of {file.name} holds numbers in {n:,} of {lines:,} lines, and no sentences"
            raise errors.UserError(f"{wrong}: leave it out, so that source and target are the first two columns")


def parallel(some: Sequence[files.File]) -> list[list[str]]:
    """The sentences of each file, empty lines included. UserError where one has more lines than another."""
    sides = [[line.strip() for line in _lines(file)] for file in some]
    sides = [side[:-1] if side[-1] == "" else side for side in sides]  # what stands behind the last line's end
    for file, side in zip(some, sides, strict=True):
        if len(side) != len(sides[0]):
            wrong = f"{some[0].name} has {len(sides[0]):,} lines and {file.name} has {len(side):,} lines"
            raise errors.UserError(f"{wrong}: a line of one must be the translation of the other's")
    return sides


def _lines(file: files.File) -> Iterator[str]:
    """The lines, in NFC."""
    for line in files.read(file, copies=COPIES).split(b"\n"):
        yield unicodedata.normalize("NFC", line.decode().removesuffix("\r"))


def commonest(sentences: Iterable[str], n: int = 200) -> list[str]:
    """Return the words that stand most often in the sentences, by which their language is known again."""
    return [word for word, _ in Counter(word for one in sentences for word in sentence_key(one).split()).most_common(n)]


def looks_like(sentences: Iterable[str], words: Iterable[str]) -> float:
    """Return the share of the sentences' words that are among these."""
    own, every = {*words}, [word for one in sentences for word in sentence_key(one).split()]
    return sum(word in own for word in every) / max(len(every), 1)


class Subwords(pretrained_tokenizer.Published):
    """Byte-level byte-pair encoding (Sennrich et al. 2016): ids 0 .. W-1 are specials, bytes, and what they are merged
    into. No text is a special: a sentence that contains the letters "[EOS]" is encoded as these letters."""

    def __init__(self, library: tokenizers.Tokenizer):
        super().__init__(library, {})
        library.encode_special_tokens = True

    def rows(self, sentences: Sequence[str]) -> list[list[int]]:
        """The ids of each sentence, without specials. Raises UserError for what is not Unicode text."""
        return [one.ids for one in self.library.encode_batch([*map(tokenizer.checked, sentences)])]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text up to the first [EOS], other specials left out; what is not UTF-8 as U+FFFD."""
        known = tokenizer.listed(ids)
        return super().decode(known[: known.index(EOS)] if EOS in known else known)


def train(sentences: Iterable[str], *, W: int) -> Subwords:
    """W ids or fewer (where the text has no more pairs to merge), the same for the same sentences in any order."""
    if W < LEAST:
        raise errors.UserError(f"a vocabulary of subwords needs at least {LEAST} ids (bytes, specials), not {W}")
    return Subwords(bpe.learned(map(tokenizer.checked, sentences), words=W, specials=SPECIALS))


class Rows(NamedTuple):
    source_BS: np.ndarray
    target_BN: np.ndarray
    longer: int  # pairs that do not fit, and have no row


def padded(words: Subwords, sentences: Sequence[str], *, N: int) -> tuple[np.ndarray, np.ndarray]:
    """Each sentence as a row of its ids, [EOS] and [PAD]: (B, N) int32, and whether it fits, (B,) bool. One of more
    than N - 1 ids does not: its row is all padding, nothing is cut."""
    id_BN, fits_B = np.full((len(sentences), N), PAD, np.int32), np.zeros(len(sentences), bool)
    for first in range(0, len(sentences), PIECE):
        for b, id_T in enumerate(words.rows(sentences[first : first + PIECE]), first):
            fits_B[b] = len(id_T) < N
            if fits_B[b]:
                id_BN[b, : len(id_T)], id_BN[b, len(id_T)] = id_T, EOS
    return id_BN, fits_B


def rows(words: Subwords, pairs: Sequence[Pair], *, N: int) -> Rows:
    """The pairs as `padded` arrays, in their order, without those of which a side needs more than N tokens. UserError
    where not one pair fits, and for more than the memory has room for."""
    # int32, and those that fit once more
    disk.check_memory(f"{len(pairs):,} pairs of 2 x {N} tokens", 4 * 4 * N * len(pairs))
    source_BN, fits_B = padded(words, [source for source, _ in pairs], N=N)
    target_BN, target_fits_B = padded(words, [target for _, target in pairs], N=N)
    fits_B &= target_fits_B
    if not fits_B.any():
        raise errors.UserError(f"not one of {len(pairs)} pairs has at most N = {N} tokens a side: choose a larger N")
    return Rows(source_BN[fits_B], target_BN[fits_B], int(np.sum(~fits_B)))


def examples(of: Rows) -> tuple[batches.Fetch, int]:
    """`(fetch, n)` for `batches`: `source_BS`, `valid_BS` (False: padding), `w_BN`, `target_BN` and `weight_BN`. `w_BN`
    is the target behind [BOS], one place later: what stands before each word that is to be predicted. `weight_BN`
    (float32) is 1 for every word of the target and its [EOS], and 0 for padding."""

    def fetch(index_B: np.ndarray, rng: np.random.Generator | None) -> batches.Batch:
        source_BS, target_BN = of.source_BS[index_B], of.target_BN[index_B]
        return {
            "source_BS": source_BS,
            "valid_BS": source_BS != PAD,
            "w_BN": np.pad(target_BN[:, :-1], ((0, 0), (1, 0)), constant_values=BOS),
            "target_BN": target_BN,
            "weight_BN": (target_BN != PAD).astype(np.float32),
        }

    return fetch, len(of.source_BS)
