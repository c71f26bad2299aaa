"""Sentence pairs, source and target, in a training and an evaluation part that depend on the sentences alone; and as
arrays: what an encoder reads, and what a decoder is to predict from what it has written so far.
"""

import contextlib
import os
import pathlib
import unicodedata
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from experiments.data import download, pair_files, parts, subwords
from experiments.engine import batches, disk, errors

# name -> (file name, where a person finds it, sha256)
NAMED = {
    "spa-eng": (
        "spa-eng.zip",
        "https://storage.googleapis.com/download.tensorflow.org/data/spa-eng.zip",
        "0c4fd7825d3d872488d38c157f784e035edab4f2ff0df25a2a208790ecb5b58f",
    ),
}
EVALUATION_SHARE = 0.05
BOM = "\ufeff"
PIECE = 10_000  # sentences encoded at a time: the library takes some kilobytes for each
FORM = "a line is a sentence, a tab, and its translation, or two parallel files end in .en and .es, say"

Pair = tuple[str, str]


class Pairs(NamedTuple):
    """Sentences and their translations; `said`: which file became what, '' where there is nothing to tell."""

    name: str
    train: list[Pair]
    evaluation: list[Pair]
    said: str


def load(
    source: str,
    *,
    data_dir: str = "",
    reverse: bool = False,
    share: float = 1.0,
) -> Pairs:
    """Pairs from a named set or a path: tab-separated UTF-8 lines, in a file, or in a folder's or zip's .tsv and .txt.

    The first column is the source and the second the target (`reverse`: the other way round); further columns are
    ignored, so are empty lines, and files and folders whose names begin with a dot or an underscore. A folder or zip
    without such files may hold parallel ones, as said.en and said.es, whose lines are pairs, or a path be what the
    names of two share (said); the source is the language that comes first in the alphabet. What is gzipped is unpacked.
    Sentences are in Unicode's form NFC.

    The names of files tell what is held out, as train.tsv and valid.tsv do (`parts.by_names`). Where they do not, about
    5 % of the source sentences are held out, with all their translations; sources that differ only in case,
    punctuation and spaces fall on the same side. `share` of the others is for training.

    Raises:
      UserError: neither a name nor a path that exists; a damaged or dangerous zip, or too large a file; a line that is
      not UTF-8, has no second column or an empty side; parallel files of unequal length; a share outside (0, 1]; too
      few sentences to split; parts that do not fit together.
    """
    if not 0 < share <= 1:
        raise errors.UserError(f"the share of the pairs must be above 0 and at most 1, and {share} is not")
    with contextlib.ExitStack() as zips:
        every = pair_files.texts(_path(source, data_dir), zips)
        texts = {parts.TRAIN: every} if source in NAMED else _by_names(every)
        names = [part for part in (parts.TRAIN, parts.evaluated(texts)) if part in texts]
        pair_files.check_size(source, sum(file.size for part in names for one in texts[part] for file in one))
        sides = [[pair for one in texts[part] for pair in _pairs(one)] for part in names]
    for part, some in zip(names, sides, strict=True):
        if not some:
            where = f"{source}: the part {part}" if len(names) > 1 else source
            raise errors.UserError(f"{where} holds no sentence pairs: {FORM}")
    if reverse:
        sides = [[(target, source) for source, target in some] for some in sides]
    named = {part: [pair_files.called(one, reverse=reverse) for one in of] for part, of in texts.items()}
    if len(sides) == 2:
        train, evaluation = sides
        keys = {sentence_key(source) for source, _ in train}
        both = sum(sentence_key(source) in keys for source, _ in evaluation)
        said = parts.told(source, "by their names,", named)
        said += f" ({both:,} of {len(evaluation):,} sources to evaluate are trained on, too)" if both else ""
    else:
        train, evaluation = _apart(sides[0], share=EVALUATION_SHARE)
        couples = any(len(one) > 1 for one in texts[parts.TRAIN])
        said = f"{source}: the lines of {parts.listed(named[parts.TRAIN])} are pairs" if couples else ""
    if share < 1:  # by other digests: by the same ones, those held out would be missing from the smallest
        _, train = _apart(train, share=share, salt="share")
    return Pairs(source, train, evaluation, said)


def _by_names(texts: Sequence[pair_files.Text]) -> dict[str, list[pair_files.Text]]:
    """The texts of each part; all are to train on where names tell nothing."""
    sizes = [sum(file.size for file in one) for one in texts]
    numbers = parts.by_names("pairs", [one[0].inside for one in texts], sizes)
    return {part: [texts[i] for i in of] for part, of in numbers.items()} or {parts.TRAIN: [*texts]}


def sentence_key(sentence: str) -> str:
    """What two sentences share that differ only in case, punctuation and spaces; without a word, the sentence itself.

    Split by it, for 'Go on!' is no test of a model that was trained on 'Go on.'.
    """
    # Marks (category M) count as letters: without them, words of many scripts would fall together.
    letters = (c if c.isalnum() or unicodedata.category(c)[0] == "M" else " " for c in sentence.casefold())
    return " ".join("".join(letters).split()) or sentence


def _apart(pairs: list[Pair], *, share: float, salt: str = "") -> tuple[list[Pair], list[Pair]]:
    """The pairs but those of about `share` of the sources, and these; another salt makes another choice."""
    out_B = parts.held_out([f"{salt}{sentence_key(source)}".encode() for source, _ in pairs], share=share)
    sides = (np.flatnonzero(out_B == side).tolist() for side in (False, True))
    kept, held = ([pairs[b] for b in side] for side in sides)
    return kept, held


def _path(source: str, data_dir: str) -> pathlib.Path:
    """The file of the named set, checked, or the user's own path."""
    if source not in NAMED:
        path = pathlib.Path(os.path.expanduser(source))
        if not source or not (os.path.exists(path) or pair_files.beginning(path)):
            names = ", ".join(NAMED)
            raise errors.UserError(f"{source!r} is neither a named set of pairs ({names}) nor a path that exists")
        return path
    file_name, url, sha256 = NAMED[source]
    path = download.here(file_name, sha256, data_dir=data_dir)
    if path is None:
        where = ", ".join(map(str, download.places(data_dir)))
        raise errors.UserError(f"{source} was not found in {where}: download {url} into one of these folders")
    return path


def _pairs(text: pair_files.Text) -> Iterator[Pair]:
    """The pairs of a file's lines, or of those of two files. Raises UserError that names file and line."""
    if len(text) == 1:
        yield from _tab_separated(text[0].name, text[0].read())
        return
    sides = [[line.strip() for line in _lines(file.name, file.read())] for file in text]
    counts = [len(side) - (side[-1] == "") for side in sides]  # without what stands behind the last line's end
    if counts[0] != counts[1]:
        what = " and ".join(f"{file.name} has {count:,} lines" for file, count in zip(text, counts, strict=True))
        raise errors.UserError(
            f"{what}: a line of one must be the translation of the other's (pairs.source = PATH names other files)"
        )
    yield from ((source, target) for source, target in zip(*sides, strict=False) if source and target)


def _lines(name: str, content: bytes) -> Iterator[str]:
    """The lines, in NFC. Raises UserError that names file and line."""
    for number, line in enumerate(content.split(b"\n"), 1):
        try:
            text = line.decode("utf-8").removesuffix("\r")
        except UnicodeDecodeError as error:
            raise errors.UserError(f"{name}, line {number}: not UTF-8 text: {line[:40]!r}") from error
        yield unicodedata.normalize("NFC", text.removeprefix(BOM) if number == 1 else text)


def _tab_separated(name: str, content: bytes) -> Iterator[Pair]:
    for number, line in enumerate(_lines(name, content), 1):
        columns = line.split("\t")
        if columns == [""]:
            continue
        if len(columns) < 2:
            raise errors.UserError(f"{name}, line {number}: no second column after a tab ({FORM}): {line[:40]!r}")
        source, target = (column.strip() for column in columns[:2])
        if not source or not target:
            side = "second" if source else "first"
            raise errors.UserError(f"{name}, line {number}: the {side} column is empty")
        yield source, target


class Rows(NamedTuple):
    """The pairs whose sides fit into N tokens: ids, [EOS], padding (int32)."""

    source_BS: np.ndarray
    target_BN: np.ndarray
    longer: int  # pairs that do not fit, and have no row


def padded(words: subwords.Subwords, sentences: Sequence[str], *, N: int) -> tuple[np.ndarray, np.ndarray]:
    """Each sentence as a row of its ids, [EOS] and [PAD]: (B, N) int32, and whether it fits, (B,) bool.

    One of more than N - 1 ids does not: its row is all padding, nothing is cut.
    """
    id_BN, fits_B = np.full((len(sentences), N), subwords.PAD, np.int32), np.zeros(len(sentences), bool)
    for first in range(0, len(sentences), PIECE):
        for b, id_T in enumerate(words.encode(sentences[first : first + PIECE]), first):
            fits_B[b] = len(id_T) < N
            if fits_B[b]:
                id_BN[b, : len(id_T)], id_BN[b, len(id_T)] = id_T, subwords.EOS
    return id_BN, fits_B


def rows(words: subwords.Subwords, pairs: Sequence[Pair], *, N: int) -> Rows:
    """The pairs as arrays, in their order, without those of which a side needs more than N tokens, its [EOS] included.

    Raises:
      UserError: not one pair fits; more than the memory has room for.
    """
    needed = 4 * 4 * N * len(pairs)  # int32, and those that fit once more
    disk.check_memory(f"{len(pairs):,} pairs of 2 x {N} tokens", needed)
    source_BN, source_fits_B = padded(words, [source for source, _ in pairs], N=N)
    target_BN, target_fits_B = padded(words, [target for _, target in pairs], N=N)
    fits_B = source_fits_B & target_fits_B
    if not fits_B.any():
        raise errors.UserError(f"not one of {len(pairs)} pairs has at most N = {N} tokens a side: choose a larger N")
    return Rows(source_BN[fits_B], target_BN[fits_B], int(np.sum(~fits_B)))


def examples(of: Rows) -> tuple[batches.Fetch, int]:
    """`(fetch, n)` for `batches`: `source_BS`, `valid_BS` (False: padding), `w_BN`, `target_BN` and `weight_BN`.

    `w_BN` is the target behind [BOS], one place later: what stands before each word that is to be predicted.
    `weight_BN` (float32) is 1 for every word of the target and its [EOS], and 0 for padding.
    """

    def fetch(index_B: np.ndarray, rng: np.random.Generator | None) -> batches.Batch:
        source_BS, target_BN = of.source_BS[index_B], of.target_BN[index_B]
        begin_B1 = np.full((len(index_B), 1), subwords.BOS, np.int32)
        return {
            "source_BS": source_BS,
            "valid_BS": source_BS != subwords.PAD,
            "w_BN": np.concatenate([begin_B1, target_BN[:, :-1]], axis=1),
            "target_BN": target_BN,
            "weight_BN": (target_BN != subwords.PAD).astype(np.float32),
        }

    return fetch, len(of.source_BS)
