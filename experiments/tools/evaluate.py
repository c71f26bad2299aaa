"""How well a causal model predicts a text: a run made here, or a published GPT-2, Llama or llama2.c model.

python -m experiments.tools.evaluate --checkpoint=DIR --file=test.txt
evaluate.run("DIR", file="test.txt")

Tells nats and perplexity per token, bits per byte and perplexity per word, and returns these numbers by name; the last
two can be compared between models with other tokens. Every token but the first is counted once, in windows as long as
the model's context, one behind the other as in the run's own evaluation: the first tokens of each are told little. With
--stride=S windows begin S tokens apart, and each asks for its last S tokens alone, which see the others before them;
that is slower, and the text easier to predict.
"""

import os
import sys
from typing import Any

import jax
import numpy as np

from experiments import model as models
from experiments.data import perplexity, text, tokens, windows
from experiments.engine import batches, config, errors
from experiments.pretrained import open_model
from experiments.tools import command
from tfm import word_loss
from tfm.attention import mask as masks

AT_ONCE = 2**13  # tokens


@command.tool(
    file="The text, as text.source names it, but all of it: test.txt, a folder, test.jsonl.",
    field="Of tables, as text.field: the field with the text.",
    stride="Tokens from one window to the next; 0: the model's context.",
)
def run(
    checkpoint: str | os.PathLike,
    *,
    file: str | os.PathLike = "",
    field: str = "",
    stride: int = 0,
    trust: tuple[str, ...] = (),
    device: str = "any",
    workdir: str | os.PathLike = "",
) -> dict[str, float]:
    """What the model makes of the file, by name."""
    model = open_model.open(checkpoint, trust=trust)
    open_model.expect(model, "causal")
    config.at_least(0, {"stride": stride})
    if not str(file):
        raise errors.UserError("say which text: --file=test.txt")
    words, part = open_model.words(model), text.whole(str(file), field)
    token_T = tokens.of(words, part)
    if len(token_T) < 2:
        raise errors.UserError(f"{file} has {len(token_T)} tokens, and the first that is counted is the second")
    N = min(model.facts["N"], len(token_T) - 1)
    begins = words.bos is not None and words.encode("")[:1].tolist() == [words.bos]  # which no text has to predict
    how = {"N": N, "stride": stride, "never": words.bos if begins else -1}
    nats, right, asked = np.sum([*counts(model, token_T, **how)], axis=0, dtype=np.float64)
    size = perplexity.size(part, first=words.decode(token_T[:1]))
    measures = perplexity.measures(float(nats), tokens=int(asked), of=size) | {"accuracy": float(right / asked)}
    if lost := perplexity.lost(words, part):
        measures = {name: x for name, x in measures.items() if name not in ("bits_per_byte", "word_perplexity")}
    shown = "\n".join(f"  {name.replace('_', ' '):<22}{shorter(value)}" for name, value in measures.items())
    shown += f"\n  no bits per byte, as the tokenizer does not give back the text: {lost}" * bool(lost)
    how = f", {stride} apart" if 0 < stride < N else " that do not overlap"
    title = f"{file} ({size.bytes:,} bytes, {size.words:,} words): {int(asked):,} tokens in windows of {N}{how}"
    command.tell(f"{title}\n{shown}", workdir, "evaluation.txt")
    return measures


def shorter(value: float) -> str:
    """Return the number with four digits behind the point, or as a power of ten if it is large."""
    return f"{value:,.4f}" if abs(value) < 1e9 else f"{value:.4g}"


def counts(
    model: open_model.Trained, token_T: np.ndarray | tokens.Mapped, *, N: int, stride: int, never: int = -1
) -> Any:
    """Of each batch of windows the nats of what was asked, how many of it were right, and how many it was. never: the
    id that begins texts, and is not asked for."""
    network, mask = model.network(), models.masked(model.fields, masks.causal)

    @jax.jit
    def measured(params: Any, batch: dict) -> tuple[jax.Array, ...]:
        asked = word_loss.Asked(batch["target_BN"], batch["weight_BN"] * (batch["target_BN"] != never))
        found, _ = network.apply(params, batch["w_BN"], mask=mask, asked=asked)
        return found["loss"][0], found["accuracy"][0], found["loss"][1]

    fetch, n = windows.causal(token_T, N=N, evaluation=True, stride=stride)
    params, rows = jax.device_put(model.params), batches.evaluation(fetch, n=n, batch=max(min(AT_ONCE // N, n), 1))
    for i in range(len(rows)):
        yield jax.device_get(measured(params, rows[i]))


if __name__ == "__main__":
    sys.exit(run.main(sys.argv))
