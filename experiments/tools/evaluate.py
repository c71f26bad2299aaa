"""How well a causal model predicts a text: a run made here, or a published GPT-2, Llama or llama2.c model.

python -m experiments.tools.evaluate --checkpoint=DIR --file=test.txt
evaluate.run("DIR", file="test.txt")

Prints nats and perplexity per token, bits per byte and perplexity per word, and returns these numbers by name; the last
two can be compared between models with other tokens. Every token but the first is counted once, in windows of the
model's context that do not overlap, as in a run's own evaluation. With --stride=S windows begin S tokens apart and each
counts its last S tokens alone: that is slower, and these tokens have more context.
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
    "file": "The text, as text.source names it, all of it: test.txt, a folder, test.jsonl.",
    "field": "The field of a table with the text, as text.field.",
    "stride": "Tokens from one window to the next; 0: the model's context.",
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
    if not str(file):
        raise errors.UserError("the text is missing: --file=test.txt")
    model, out = command.load(checkpoint, trust, device, "causal"), command.output(workdir, "evaluation.txt")
    tokenizer, part = open_model.load_tokenizer(model), text.load_whole(str(file), field)
    token_T = tokens.encode(tokenizer, part)
    if len(token_T) < 2:
        raise errors.UserError(f"{file} has {len(token_T)} tokens: the first token is not predicted, so 2 are needed")
    N = min(model.facts["N"], len(token_T) - 1)
    begins = tokenizer.bos is not None and tokenizer.encode("")[:1].tolist() == [tokenizer.bos]
    ignored = tokenizer.bos if begins else -1  # no text has to predict where it begins
    sums = np.sum([*counts(model, token_T, N=N, stride=stride, ignored=ignored)], axis=0, dtype=np.float64)
    nats, right, n = sums.tolist()
    size = perplexity.size(part, first=tokenizer.decode(token_T[:1]))
    measures = perplexity.measure(nats, tokens=int(n), text=size) | {"accuracy": right / n}
    lost = perplexity.find_difference(tokenizer, part)
    if lost:
        measures = {name: x for name, x in measures.items() if name not in ("bits_per_byte", "word_perplexity")}
    windows_ = f"windows of {N}" + (f", {stride} apart" if 0 < stride < N else " that do not overlap")
    lines = [f"{file} ({size.bytes:,} bytes, {size.words:,} words): {int(n):,} tokens in {windows_}"]
    lines += [f"  {name.replace('_', ' '):<22}{shown(value)}" for name, value in measures.items()]
    lines += [f"  no bits per byte, as the tokenizer does not give back the text: {lost}"] * bool(lost)
    command.report("\n".join(lines), out)
    return measures


def shown(value: float) -> str:
    """Return the number with four decimals, or as a power of ten if it is large."""
    return f"{value:,.4f}" if abs(value) < 1e9 else f"{value:.4g}"


def counts(
    model: open_model.Trained, token_T: np.ndarray | tokens.Mapped, *, N: int, stride: int, ignored: int = -1
) -> Iterator[Any]:
    """Yield for each batch of windows: nats, correct predictions, and tokens. ignored: an id that is no target."""
    network, mask = model.network(), models.add_window(model.fields, masks.causal)

    @jax.jit
    def measured(params: Any, batch: dict) -> tuple[jax.Array, ...]:
        weight_BN = batch["weight_BN"] * (batch["target_BN"] != ignored)
        x_BND, head = network.output(params, network.hidden(params, batch["w_BN"], mask=mask)[0])
        measures = loss.next_token(x_BND, head, batch["target_BN"], weight_BN, cap=network.spec.cap)
        return measures["loss"][0], measures["accuracy"][0], measures["loss"][1]

    fetch, n = windows.causal(token_T, N=N, evaluation=True, stride=stride)
    params, rows = jax.device_put(model.params), batches.evaluation(fetch, n=n, batch=max(min(BATCH // N, n), 1))
    for i in range(len(rows)):
        yield jax.device_get(measured(params, rows[i]))


if __name__ == "__main__":
    sys.exit(command.main(run, HELP, sys.argv))
