"""Measure how well a causal model predicts a text: a run, or a published GPT-2 or Llama model.

python -m experiments.tools.evaluate --checkpoint=DIR --file=test.txt
python -m experiments.tools.evaluate --checkpoint=DIR --file=test.jsonl --field=text --output=measures.csv
evaluate.run("DIR", file="test.txt")

The tool prints and returns nats and perplexity per token, bits per byte and perplexity per word. The last two can be
compared between models with different tokenizers. Every token except the first counts once, in windows of the model's
context that do not overlap, as in the evaluation of a run. With --stride=S, windows begin S tokens apart, and only the
last S tokens of each window count. For a run with text.documents, documents do not see each other either.
--output=measures.csv has a row for each document, computed without the text before it.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import tqdm

from experiments import command as commands
from experiments.config import errors, settings as configs
from experiments.data import corpus as corpora, perplexity, pretrained_tokenizer, text, tokenization, windows
from experiments.engine import batches
from experiments.model import build
from experiments.pretrained import trained
from tfm.attention import mask as masks

BATCH = 2**13  # tokens of a batch of windows
HELP = {"stride": "Tokens from the start of a window to the next start; 0: the context of the model."}


def run(
    checkpoint: commands.Path,
    *,
    file: commands.Path = "",
    field: str = "",
    stride: int = 0,
    output: commands.Path = "",
    trust: tuple[str, ...] = (),
    device: str = "any",
    workdir: commands.Path = "",
) -> dict[str, float]:
    """Print and return how well the model predicts the text `file`: {"nats_per_token": ..., "accuracy": ..., ...}.

    stride: tokens from the start of a window to the next start; 0: the windows do not overlap. output: a CSV file with
    the measures of each document. Raises UserError if `file` has fewer than 2 tokens.
    """
    configs.at_least(0, {"stride": stride})
    commands.require("--file=test.txt", file)
    files = commands.check_files(workdir, "evaluation.txt", output)
    model, part = commands.load(checkpoint, trust, device, "causal"), text.load_whole(str(file), field)
    tokenizer, start = load_tokenizer(model)
    token_T = corpora.encode(tokenizer, part)
    if len(token_T) < 2:
        raise errors.UserError(f"{file} has {len(token_T)} tokens. At least 2 are needed: the first is not predicted.")
    N = min(model.facts["N"], len(token_T) - 1)
    sum_measures = functools.partial(sum_windows, make_measure(model, tokenizer), stride=stride, document_start=start)
    nats, correct, n = sum_measures(token_T, N=N, batch=max(BATCH // N, 1)).tolist()
    size = perplexity.size(part, first=tokenizer.decode(token_T[:1]))
    measures = perplexity.measure(nats, tokens=int(n), text=size) | {"accuracy": correct / n}
    if difference := perplexity.find_difference(tokenizer, part):
        measures = {name: x for name, x in measures.items() if name not in ("bits_per_byte", "word_perplexity")}
    overlap = f", {stride} apart" if 0 < stride < N else " that do not overlap"
    lines = [f"{file} ({size.bytes:,} bytes, {size.words:,} words): {int(n):,} tokens in windows of {N}{overlap}"]
    for name, value in measures.items():
        lines.append(f"  {name.replace('_', ' '):<22}{f'{value:,.4f}' if abs(value) < 1e9 else f'{value:.4g}'}")
    lines += [f"  no bits per byte, because the tokenizer does not restore the text: {difference}"] * bool(difference)

    def tabulate() -> tuple[list[str], list[list]]:
        columns = [name for name in ("nats_per_token", "bits_per_byte") if name in measures]
        measure = functools.partial(measure_document, sum_measures, tokenizer, model.facts["N"], columns)
        documents = tqdm.tqdm(text.documents(str(file), field), unit=" documents", disable=None)
        return ["document", "tokens", *columns], [[name, *measure(content)] for name, content in documents]

    commands.finish(files, lines, tabulate)
    return measures


def load_tokenizer(model: trained.Trained) -> tuple[tokenization.Tokenizer, int | None]:
    """Return the tokenizer, and the token at which a document begins if documents do not see each other, else None."""
    tokenizer = model.tokenizer
    if not model.facts.get("documents"):
        return tokenizer, None
    if isinstance(tokenizer, pretrained_tokenizer.OfRun):  # NUL separates documents, as in the run
        tokenizer = tokenization.Plain(tokenizer.kind, tokenizer.characters, tokenizer.specials)
    return tokenizer, tokenizer.document_start


def measure_document(
    sum_measures: Callable, tokenizer: tokenization.Tokenizer, N: int, names: list[str], content: bytes
) -> list[float]:
    """Return the number of predicted tokens of a document, and its measures `names`; [0] if no token is predicted.

    names: keys of the result of perplexity.measure, such as "nats_per_token", a mean. sum_measures: `sum_windows` with
    its measure_batch. Windows are padded, so that few shapes are compiled.
    """
    token_T = tokenizer.join([content])
    if len(token_T) < 2:
        return [0]
    width = min(N, 1 << (len(token_T) - 2).bit_length())
    nats, _, n = sum_measures(token_T, N=min(N, len(token_T) - 1), batch=1, width=width)
    size = perplexity.size([content], first=tokenizer.decode(token_T[:1]))
    measures = perplexity.measure(nats, tokens=max(int(n), 1), text=size)
    return [int(n), *(measures[name] for name in names)] if n else [0]


def make_measure(model: trained.Trained, tokenizer: tokenization.Tokenizer) -> Callable[[batches.Batch], tuple]:
    """Return the function batch of windows -> sums over its predicted tokens: (nats, correct predictions, tokens)."""
    network, mask = model.network(), build.add_window(model.fields, masks.causal)
    has_bos = tokenizer.bos is not None and tokenizer.encode("")[:1].tolist() == [tokenizer.bos]
    ignored_id = tokenizer.bos if has_bos else -1  # the token before a text is not a target

    @jax.jit
    def measure(params: Any, batch: dict) -> tuple[jax.Array, ...]:
        weight_BN = batch["weight_BN"] * (batch["target_BN"] != ignored_id)
        call = build.within_documents(mask, batch)
        x_BND, _ = network.hidden(params, batch["w_BN"], **call)
        measures = network.loss(params, x_BND, batch["target_BN"], weight_BN)
        return measures["loss"][0], measures["accuracy"][0], measures["loss"][1]

    return functools.partial(measure, jax.device_put(model.params))


def sum_windows(
    measure_batch: Callable, token_T: np.ndarray | corpora.Mapped, *, N: int, batch: int, width: int = 0, **options: Any
) -> np.ndarray:
    """Return (nats, correct predictions, predicted tokens), each summed over the windows of a text.

    measure_batch: the result of `make_measure`. token_T: the text. N: tokens of a window, padded to `width` if it is
    larger. batch: windows in a batch. options: further arguments of windows.causal.
    """
    fetch, n = windows.causal(token_T, N=N, evaluation=True, **options)

    def fetch_padded(index_B: np.ndarray, rng: None) -> batches.Batch:
        return {name: np.pad(x, ((0, 0), (0, max(width - N, 0)))) for name, x in fetch(index_B, rng).items()}

    rows = batches.evaluation(fetch_padded, n=n, batch=min(batch, n))
    sums = [jax.device_get(measure_batch(rows[i])) for i in range(len(rows))]
    return np.sum(sums, axis=0, dtype=np.float64)


if __name__ == "__main__":
    commands.main(run, HELP)
