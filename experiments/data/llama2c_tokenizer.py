"""The pieces of text in a tok*.bin of https://github.com/karpathy/llama2.c, and how a text falls into them.

A little-endian int32, the length of the longest piece; then for each piece a float32 score, an int32 length, its bytes.
Ids 0, 1, 2 are <unk>, <s>, </s>; a piece <0x41> is the byte 0x41, for characters that are no piece. By hand, since the
`tokenizers` library ranks pairs of pieces, and not what they become: where these overlap, it joins others.
"""

import heapq
import math
import re
import struct
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from experiments.data import tokenizer
from experiments.engine import errors

SPECIALS = (b"<unk>", b"<s>", b"</s>")
UNKNOWN, BOS, EOS = range(len(SPECIALS))
SPACE = b" "  # stands before every text, so that its first word is a piece like the others


class Pieces(tokenizer.Tokenizer):
    """Piece i is worth score i: of two neighbours that are a piece together, the pair of the best score joins first."""

    bos, eos = BOS, EOS

    def __init__(self, table: Sequence[bytes], scores: Sequence[float], files: dict[str, bytes] | None = None):
        self.table, self.scores, self.files = tuple(table), tuple(scores), files or {}
        self.size = self.ordinary = len(table)
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
                content = self.table[i].removeprefix(SPACE) if starts else self.table[i]
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
            if ids[i] != first or right[i] != j or ids[j] != second:
                continue  # one of the two has been joined with another meanwhile
            ids[i], ids[j], right[i] = both, -1, right[j]
            if right[j] < len(ids):
                left[right[j]] = i
            propose(i)
            propose(left[i])
        return [i for i in ids if i >= 0]


def read(path: str, content: bytes) -> Pieces:
    """The pieces in the content of a file. Raises UserError, naming `path`, where it does not hold together."""
    if len(content) < 4:
        raise errors.UserError(f"{path} is cut off or no tokenizer of llama2.c: it has {len(content)} bytes")
    (longest,), pieces, scores, at = struct.unpack_from("<i", content), [], [], 4
    while at < len(content):
        where = f"{path}, piece {len(pieces)}"
        if at + 8 > len(content):
            raise errors.UserError(f"{where}: the file is cut off")
        score, length = struct.unpack_from("<fi", content, at)
        at += 8 + length
        if not math.isfinite(score):
            raise errors.UserError(f"{where}: its score {score} is not a finite number")
        if not 1 <= length <= longest:
            raise errors.UserError(f"{where}: its length {length} is not between 1 and {longest}, that of the longest")
        if at > len(content):
            raise errors.UserError(f"{where}: the file is cut off")
        scores.append(score)
        pieces.append(content[at - length : at])
    if tuple(map(bytes.strip, pieces[: len(SPECIALS)])) != SPECIALS:
        raise errors.UserError(f"{path} is no tokenizer of llama2.c: its first pieces are not <unk>, <s>, </s>")
    return Pieces(pieces, scores, {f"tok{len(pieces)}.bin": content})
