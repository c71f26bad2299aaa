"""Sentence pairs: read from files, split by the source sentences, and encoded as subwords in arrays."""

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

from experiments.config import errors, settings as configs
from experiments.data import bpe, download, files as data_files, pretrained_tokenizer, tokenization
from experiments.engine import batches

# name -> (file name, its address, sha256)
NAMED = {
    "spa-eng": (
        "spa-eng.zip",
        "https://storage.googleapis.com/download.tensorflow.org/data/spa-eng.zip",
        "0c4fd7825d3d872488d38c157f784e035edab4f2ff0df25a2a208790ecb5b58f",
    )
}
EVALUATION_SHARE = 0.05
ENDINGS = (".tsv", ".txt")  # of the files with pairs in a folder or zip
LANGUAGE = r"\.[a-z]{2}|\.[a-z]{2,3}[-_][A-Za-z]{2,4}"  # .en, .pt_BR, .zho_Hans: the ends of parallel files' names
PIECE = 10_000  # sentences encoded at a time: the library takes some kilobytes for each
CODES = """ar bg ca cs da de el en es et eu fa fi fr ga gl he hi hr hu id is it ja ka ko lt lv mk ms nl no pl pt ro ru
sk sl sq sr sv sw ta th tr uk ur vi zh english french german spanish italian portuguese russian chinese japanese"""
NAMES = {*CODES.split(), *"source src target tgt trg sentence translation id index score".split()}  # of columns
SPECIALS = ("[PAD]", "[BOS]", "[EOS]")
PAD, BOS, EOS = range(len(SPECIALS))
FORM = "a line is a sentence, a tab, and its translation, or two parallel files end in .en and .es, for example"
NUMBER = re.compile(r"[-+]?[0-9]+([.,][0-9]+)?")

Pair = tuple[str, str]


def load(source: str) -> data_files.Rows:
    """Return the pairs of a named set or a path.

    Pairs are tab-separated UTF-8 lines of a file, or of the .tsv and .txt files in a folder or zip. Empty lines are
    skipped; of more than two columns, the first two are used. A folder or zip without such files may contain parallel
    files (some.en and some.es), whose lines are pairs. A path may also be the common beginning of their names (some).
    The source is the first column, or the language that comes first in the alphabet.

    Sentences are in Unicode's form NFC. Unless file names define the parts (`data_files.split_rows`), about 5 % of the
    sources are held out with all their translations, by `sentence_key`. Raises UserError for other content.
    """
    counts: Counter[str] = Counter()

    def read(file: data_files.File) -> Iterator[Pair]:
        if not file.translation:
            yield from read_lines(file, counts)
            return
        for pair in zip(*align_lines([file, file.translation]), strict=True):
            counts["are skipped, because one side is empty"] += any(pair) and not all(pair)
            if all(pair):
                yield pair

    with contextlib.ExitStack() as zips:
        files = find(source, zips)
        by_name = {} if source in NAMED else data_files.split_by_names("pairs", files)
        form = f"sentence pairs: {FORM}"
        rows = data_files.split_rows(source, by_name, files, read, form=form, share=EVALUATION_SHARE, key=sentence_key)
    description = rows.description
    if not description and any(file.translation for file in files):
        description = f"{source}: the lines of {data_files.join_names(files)} are pairs"
    lines = (f"{n:,} lines {remark}" for remark, n in counts.items() if n)
    return rows._replace(description=data_files.join_lines(source, description, lines))


def sentence_key(sentence: str) -> str:
    """Return the words of a sentence without case and punctuation; without a word, the sentence."""
    # Marks (category M) count as letters: without them, different words of many scripts would be equal.
    letters = (c if c.isalnum() or unicodedata.category(c)[0] == "M" else " " for c in sentence.casefold())
    return " ".join("".join(letters).split()) or sentence


def find(source: str, zips: contextlib.ExitStack) -> list[data_files.File]:
    """Return the files of a named set or a path; of parallel files the first, whose field translation is the second.

    zips: keeps a zip open, whose members are read later. The list is empty for a folder or zip without pairs. Raises
    UserError if the path does not exist, a zip is damaged, or there are parallel files in more than two languages.
    """
    if source in NAMED:
        source = str(download.fetch(*NAMED[source]))
    path = pathlib.Path(os.path.expanduser(source))
    if os.path.isfile(path) and zipfile.is_zipfile(path):
        return choose_files(data_files.members(path, zips))
    if os.path.isdir(path.parent) and not os.path.exists(path):
        # The files of the path's name and a language: some.en and some.es.gz for some.
        alike = [file for file in sorted(path.parent.glob(f"{glob.escape(path.name)}.*")) if file.is_file()]
        parallel = [file for file in alike if "." not in strip_gz(file).name[len(path.name) + 1 :]]
        if len(parallel) == 2:
            return [join_translation(*map(data_files.on_disk, parallel))]
    files = data_files.find(source, f"a named set of pairs ({', '.join(NAMED)})")
    return choose_files(files) if os.path.isdir(path) and source else files


def choose_files(files: Sequence[data_files.File]) -> list[data_files.File]:
    """Return the files with tab-separated pairs, or else the parallel files, joined by `join_translation`.

    If there are neither, return []. Files and folders whose names begin with _ are skipped. Raises UserError for
    parallel files in more than two languages.
    """
    files = [file for file in files if not any(step.startswith("_") for step in file.inside.parts)]
    if separated := [file for file in files if strip_gz(file.inside).suffix.lower() in ENDINGS]:
        return separated
    groups: dict[pathlib.PurePath, list[data_files.File]] = {}
    for file in files:
        if re.fullmatch(LANGUAGE, strip_gz(file.inside).suffix):
            groups.setdefault(strip_gz(file.inside).with_suffix(""), []).append(file)
    parallel = [group for group in groups.values() if len(group) > 1]
    languages = {strip_gz(file.inside).suffix for group in parallel for file in group}
    if len(languages) > 2:
        names = ", ".join(sorted(languages))
        raise errors.UserError(f"{parallel[0][0].name} and others are parallel in {names}. Keep only two languages.")
    return [join_translation(*group) for group in parallel]


def join_translation(source: data_files.File, translation: data_files.File) -> data_files.File:
    """Return the first file, with the second as its translation."""
    return source._replace(size=source.size + translation.size, translation=translation)


def strip_gz(path: pathlib.PurePath) -> pathlib.PurePath:
    """Return the path without .gz at its end."""
    return path.with_suffix("") if path.suffix.lower() == ".gz" else path


def read_lines(file: data_files.File, counts: Counter[str]) -> Iterator[Pair]:
    """Yield the first two columns, separated by tabs, of a file's lines. Count lines with more columns in `counts`.

    counts: remark to print -> number of lines. Raises UserError if one of the two columns is missing, empty or
    a column of numbers, or if the first line seems to be a header.
    """
    lines, numbers = 0, Counter()
    for number, line in enumerate(read_nfc_lines(file), 1):
        if not line:
            continue
        cells, problem = [cell.strip() for cell in line.split("\t")], ""
        if len(cells) < 2 or not all(cells[:2]):
            problem = f"needs two columns, neither of them empty ({FORM}): {line[:40]!r}"
        elif not lines and len({*cells}) > 1 and all(re.split("[-_]", cell.lower())[0] in NAMES for cell in cells[:3]):
            problem = "is a header, not a pair. Remove it."
        if problem:
            raise errors.UserError(f"{file.name}, line {number} {problem}")
        lines += 1
        if len(cells) > 2:
            counts["have more than two columns; the first two are used"] += 1
            numbers.update(i for i in (0, 1) if NUMBER.fullmatch(cells[i]))
        yield tuple(cells[:2])
    for column, n in numbers.items():
        if 2 * n > lines:
            problem = f"contains numbers in {n:,} of {lines:,} lines. Remove it: the first two columns are the pair."
            raise errors.UserError(f"column {column + 1} of {file.name} {problem}")


def align_lines(parallel: Sequence[data_files.File]) -> list[list[str]]:
    """Return the sentences of each file, empty lines included. Raises UserError if one has more lines than another."""
    sides = [[line.strip() for line in read_nfc_lines(file)] for file in parallel]
    for file, side in zip(parallel, sides, strict=True):
        if len(side) != len(sides[0]):
            problem = f"has {len(sides[0]):,} lines and {file.name} has {len(side):,} lines. Make them translations"
            raise errors.UserError(f"{parallel[0].name} {problem}, line by line.")
    return sides


def read_nfc_lines(file: data_files.File) -> Iterator[str]:
    """Yield the lines of a file, in NFC."""
    for line in data_files.lines(file):
        yield unicodedata.normalize("NFC", line.removesuffix("\r"))


def most_common_words(sentences: Iterable[str], n: int = 200) -> list[str]:
    """Return the most frequent words of the sentences, which identify their language."""
    return [word for word, _ in Counter(" ".join(map(sentence_key, sentences)).split()).most_common(n)]


def share_of_words(sentences: Iterable[str], words: Iterable[str]) -> float:
    """Return the share of the sentences' words that are among `words`; 0 if the sentences have no words.

    words: without case and punctuation, as `sentence_key` returns them.
    """
    common, spoken = {*words}, " ".join(map(sentence_key, sentences)).split()
    return sum(word in common for word in spoken) / max(len(spoken), 1)


class Subwords(pretrained_tokenizer.Published):
    """Byte-level byte-pair encoding (Sennrich et al. 2016): ids 0 .. W-1 are special tokens, bytes, and their merges.

    No text is a special token: a sentence with the letters "[EOS]" is encoded as these letters.
    """

    def __init__(self, library: tokenizers.Tokenizer):
        super().__init__(library, {})
        library.encode_special_tokens = True

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text before the first [EOS], without special tokens, with U+FFFD for bytes that are not UTF-8."""
        ids = tokenization.to_list(ids)
        return super().decode(ids[: ids.index(EOS)] if EOS in ids else ids)


def train(sentences: Iterable[str], *, W: int) -> Subwords:
    """Learn W token ids, or fewer if the text has too few pairs to merge. The order of sentences does not matter.

    Raises UserError if W is less than the number of special tokens and bytes, or a sentence is not Unicode.
    """
    configs.at_least(len(SPECIALS) + 256, {"pairs.vocabulary": W})  # special tokens and bytes
    return Subwords(bpe.learn(map(tokenization.check_unicode, sentences), W=W, specials=SPECIALS))


class Rows(NamedTuple):
    """The token ids of the pairs that fit, padded to N (`pad`)."""

    source_BS: np.ndarray
    target_BN: np.ndarray
    longer: int  # number of pairs that do not fit, and have no row


def pad(subwords: Subwords, sentences: Sequence[str], *, N: int) -> tuple[np.ndarray, np.ndarray]:
    """Return each sentence as a row of its ids, [EOS] and [PAD], (B, N) int32, and whether it fits, (B,) bool.

    A sentence of more than N - 1 ids does not fit: its row is all padding, nothing is truncated.
    """
    id_BN, fits_B = np.full((len(sentences), N), PAD, np.int32), np.zeros(len(sentences), bool)
    for first in range(0, len(sentences), PIECE):
        for b, id_T in enumerate(subwords.encode_all(sentences[first : first + PIECE]), first):
            fits_B[b] = len(id_T) < N
            if fits_B[b]:
                id_BN[b, : len(id_T)], id_BN[b, len(id_T)] = id_T, EOS
    return id_BN, fits_B


def rows(subwords: Subwords, pairs: Sequence[Pair], *, N: int) -> Rows:
    """Return the pairs as padded arrays, in their order, without pairs of more than N tokens (with [EOS]) a side.

    Raises UserError if no pair fits.
    """
    source_BN, fits_B = pad(subwords, [source for source, _ in pairs], N=N)
    target_BN, target_fits_B = pad(subwords, [target for _, target in pairs], N=N)
    fits_B &= target_fits_B
    if not fits_B.any():
        raise errors.UserError(f"none of {len(pairs)} pairs fits into pairs.N = {N} tokens a side. Choose a larger N.")
    return Rows(source_BN[fits_B], target_BN[fits_B], int(np.sum(~fits_B)))


def examples(rows: Rows) -> tuple[batches.Fetch, int]:
    """Return `(fetch, n)`: fetch(index_B, rng) returns the batch of these B of the n pairs, and ignores rng.

    A batch has `source_BS`, `valid_BS` (False: padding), `w_BN`, `target_BN` and `weight_BN`. `w_BN` is [BOS], followed
    by the target without its last id: the token before each target token. `weight_BN` (float32) is 1 for every token of
    the target and its [EOS], and 0 for padding.
    """

    def fetch(index_B: np.ndarray, rng: np.random.Generator | None) -> batches.Batch:
        source_BS, target_BN = rows.source_BS[index_B], rows.target_BN[index_B]
        return {
            "source_BS": source_BS,
            "valid_BS": source_BS != PAD,
            "w_BN": np.pad(target_BN[:, :-1], ((0, 0), (1, 0)), constant_values=BOS),
            "target_BN": target_BN,
            "weight_BN": (target_BN != PAD).astype(np.float32),
        }

    return fetch, len(rows.source_BS)
