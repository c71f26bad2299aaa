"""Measure how well a causal model predicts a text: a run, or a published GPT-2, Llama or llama2.c model.

python -m experiments.tools.evaluate --checkpoint=DIR --file=test.txt
evaluate.run("DIR", file="test.txt")

Prints and returns nats and perplexity per token, bits per byte and perplexity per word. The last two can be compared
between models with different tokenizers. Every token except the first counts once, in windows of the model's context
that do not overlap, as in the evaluation of a run. With --stride=S, windows begin S tokens apart, and only the last S
tokens of each window count: this is slower, and these tokens have more context.
"""

import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from experiments.build import model as models
from experiments.data import perplexity, text, tokens, windows
from experiments.engine import batches, config, errors
from experiments.pretrained import open_model
from experiments.tools import command
from tfm import loss
from tfm.attention import mask as masks

BATCH = 2**13  # tokens
HELP = {
    "file": "The text, in the formats of text.source: test.txt, a folder, test.jsonl.",
    "field": "The column of a table with the text, as in text.field.",
    "stride": "Tokens from one window to the next; 0: the context of the model.",
}


def run(
    checkpoint: command.Path,
    *,
    file: command.Path = "",
    field: str = "",
    stride: int = 0,
    trust: tuple[str, ...] = (),
    device: str = "any",
    workdir: command.Path = "",
) -> dict[str, float]:
    """Return the measures of the text by name."""
    config.at_least(0, {"stride": stride})
    command.require("--file=test.txt", file)
    model, out = command.load(checkpoint, trust, device, "causal"), command.output(workdir, "evaluation.txt")
    tokenizer, part = open_model.load_tokenizer(model), text.load_whole(str(file), field)
    token_T = tokens.encode(tokenizer, part)
    if len(token_T) < 2:
        raise errors.UserError(f"{file} has {len(token_T)} tokens. At least 2 are needed: the first is not predicted.")
    N = min(model.facts["N"], len(token_T) - 1)
    begins = tokenizer.bos is not None and tokenizer.encode("")[:1].tolist() == [tokenizer.bos]
    ignored_id = tokenizer.bos if begins else -1  # the beginning of a text is no target
    sums = np.sum([*sum_batches(model, token_T, N=N, stride=stride, ignored_id=ignored_id)], axis=0, dtype=np.float64)
    nats, correct, n = sums.tolist()
    size = perplexity.size(part, first=tokenizer.decode(token_T[:1]))
    measures = perplexity.measure(nats, tokens=int(n), text=size) | {"accuracy": correct / n}
    lost = perplexity.find_difference(tokenizer, part)
    if lost:
        measures = {name: x for name, x in measures.items() if name not in ("bits_per_byte", "word_perplexity")}
    overlap = f", {stride} apart" if 0 < stride < N else " that do not overlap"
    lines = [f"{file} ({size.bytes:,} bytes, {size.words:,} words): {int(n):,} tokens in windows of {N}{overlap}"]
    for name, value in measures.items():
        lines.append(f"  {name.replace('_', ' '):<22}{f'{value:,.4f}' if abs(value) < 1e9 else f'{value:.4g}'}")
    if lost:
        lines.append(f"  no bits per byte, because the tokenizer does not restore the text: {lost}")
    command.report("\n".join(lines), out)
    return measures


def sum_batches(
    model: open_model.Trained, token_T: np.ndarray | tokens.Mapped, *, N: int, stride: int, ignored_id: int = -1
) -> Iterator[Any]:
    """Yield nats, correct predictions and number of tokens for each batch of windows. ignored_id is never a target."""
    network, mask = model.network(), models.add_window(model.fields, masks.causal)

    @jax.jit
    def measure(params: Any, batch: dict) -> tuple[jax.Array, ...]:
        weight_BN = batch["weight_BN"] * (batch["target_BN"] != ignored_id)
        x_BND, head = network.output(params, network.hidden(params, batch["w_BN"], mask=mask)[0])
        measures = loss.next_token(x_BND, head, batch["target_BN"], weight_BN, cap=network.spec.cap)
        return measures["loss"][0], measures["accuracy"][0], measures["loss"][1]

    fetch, n = windows.causal(token_T, N=N, evaluation=True, stride=stride)
    params, rows = jax.device_put(model.params), batches.evaluation(fetch, n=n, batch=max(min(BATCH // N, n), 1))
    for i in range(len(rows)):
        yield jax.device_get(measure(params, rows[i]))


if __name__ == "__main__":
    sys.exit(command.main(run, HELP, sys.argv))
