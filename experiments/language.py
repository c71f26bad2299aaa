"""Language models: predict the next token (causal, prefix; E24) or masked tokens from both sides (masked; E27)."""

import contextlib
import functools
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from experiments.build import baselines, checks, losses, model as models, sharding, splits, task as tasks
from experiments.data import corpus as corpora, perplexity, windows
from experiments.engine import by_name, config as configs, disk, errors, run, train_step
from tfm import head as heads, layout as layouts
from tfm.attention import mask as masks
from tfm.decode import generate

MASK = "[MASK]"
OBJECTIVES = {"causal": (), "prefix": (), "masked": (MASK,)}  # with the special tokens that each needs
SAMPLE = 400  # the most tokens of the sample at the end of a run
FILLED = 4  # held-out windows that are filled in
TEMPERATURE = 0.8  # of the sample; experiments.tools.sample has others


def config() -> dict[str, dict]:
    """Return the settings of the text and the objective."""
    return {
        "text": {
            "source": (
                "stdlib",
                "stdlib (Python's sources), docstrings (the English in them), tinyshakespeare, a path, or hub:NAME",
            ),
            "field": (
                "",
                "of JSON lines, CSV, Parquet or a data set: the field with the text; '': the file is the text",
            ),
            "tokenizer": (
                "bytes",
                "bytes, characters, bpe:8192 (words), or the path of a trained one: a file or a folder",
            ),
            "N": (64, "tokens of a window, the context"),
            "objective": (
                "causal",
                "causal: the next token; prefix: the same after a half read in both directions; masked: masked tokens",
            ),
            "head": (
                "linear",
                "the output matrix: linear, or tied (the embedding); tied+gelu (BERT), linear+tanh, ...: with a layer"
                " of this activation, norm and bias before it; linear+bias: with a bias",
            ),
        }
    }


def prepare(settings: configs.Settings, devices: Mesh) -> run.Work:
    """Return the text, the model, its loss, and the figures."""
    t, m = settings.text, settings.model
    corpus = corpora.read_corpus(t, by_name.choose("objective", t.objective, OBJECTIVES))
    masked, W = t.objective == "masked", corpus.tokenizer.size
    cut = choose_windows(t, corpus)
    data = splits.make_splits(
        settings, cut(corpus.train_T), cut(corpus.evaluation_T, evaluation=True), tokens=t.N, stride=t.N + 1
    )

    if not masked:
        checks.check_causal(m)
    layout = sharding.choose_layout(m, devices, W=W)
    mask = models.add_window(m, masks.padding(np.ones((1, t.N), bool)) if masked else causal_mask(t))
    head = heads.masked_word if masked else heads.next_word
    model = models.build_language_model(m, head=head, W=W, N=t.N, output=t.head, layout=layout, mask=mask)
    token_loss = losses.choose_token_loss(settings, model, sparse=t.objective != "causal", layout=layout)

    def inputs(batch: dict) -> dict:
        batch_mask = models.add_window(m, masks.padding(batch["valid_BS"])) if masked else mask
        return {"inputs": batch["w_BN"], "mask": batch_mask}

    def loss(params: Any, batch: dict, *, key_B: Any = None, layout: layouts.Layout = layouts.ONE) -> tuple:
        x_BND, aux = model.hidden(params, **inputs(batch), key_B=key_B, layout=layout)
        return token_loss(params, x_BND, batch, layout), aux

    def logits(params: Any, batch: dict) -> jax.Array:
        return model.apply(params, **inputs(batch))[0]

    most_frequent = corpora.count_tokens(corpus.train_T, W=W).argmax()
    data |= baselines.guess_token(data["evaluation"], W=W, answer=most_frequent)
    task = tasks.make_task(settings, model, loss, inputs, layout=layout, **data)
    sample = fill_windows(corpus, task, logits) if masked else generate_sample(settings, corpus, model)
    return run.Work(
        task,
        figures=functools.partial(figures, settings, corpus, task, sample),
        apply=logits,
        files=corpus.tokenizer.files,
        lines=corpus.lines,
        data_sha256=corpus.sha256,
    )


def choose_windows(t: configs.Settings, corpus: corpora.Corpus) -> Callable:
    """Return (token_T, evaluation=False) -> windows of the objective, for `splits`. Raises UserError if none fits."""
    configs.at_least(2 if t.objective == "prefix" else 1, {"text.N": t.N})
    if t.objective != "masked":
        return functools.partial(windows.causal, N=t.N, prefix=prefix_length(t))
    words = corpus.tokenizer
    if words.mask is None:
        raise errors.UserError(f"text.tokenizer = {t.tokenizer} has no special token {MASK!r}")
    return functools.partial(windows.masked, N=t.N, W=words.size, special=words.special, mask_id=words.mask)


def prefix_length(t: configs.Settings) -> int:
    """Return how many tokens of a window are read in both directions."""
    return t.N // 2 if t.objective == "prefix" else 0


def causal_mask(t: configs.Settings) -> masks.Mask:
    """Return the causal mask; a prefix is read in both directions."""
    prefix = prefix_length(t)
    return masks.either(masks.causal, masks.prefix(prefix)) if prefix else masks.causal


def generate_sample(settings: configs.Settings, corpus: corpora.Corpus, model: models.Model) -> Callable[[Any], str]:
    """Return params -> a text that the model generates, after a new line or, for `prefix`, half a held-out window."""
    t, length = settings.text, min(settings.text.N, SAMPLE)
    prefix = length // 2 if t.objective == "prefix" else 0
    prompt_N = corpus.evaluation_T[: prefix or 1]
    with contextlib.suppress(errors.UserError):  # the vocabulary may lack the new line
        line_N = corpus.tokenizer.encode("\n")[:length]
        prompt_N = line_N if line_N.size and not prefix else prompt_N
    prompt_BN = jnp.asarray(prompt_N)[None]
    steps, key = length - prompt_BN.size, jax.random.key(settings.seed)
    prompt_mask = models.add_window(settings.model, masks.prefix(prefix) if prefix else masks.causal)
    mask = models.add_window(settings.model, masks.causal)

    @jax.jit
    def sample(params: Any) -> jax.Array:
        layers = model.by_layer(params)

        def start(w_BN: jax.Array, length_B: jax.Array) -> Any:
            return model.start(params, w_BN, length_B, capacity=length, mask=prompt_mask)

        def step(cache: Any, w_B: jax.Array, n_B: jax.Array) -> Any:
            return model.step(layers, cache, w_B, n_B, mask=mask)

        prompt = prompt_BN, jnp.full(1, prompt_BN.size), key
        return generate.generate(start, step, *prompt, steps=steps, temperature=TEMPERATURE)[0]

    return lambda params: corpus.tokenizer.decode(np.asarray(sample(params))[0])


def fill_windows(corpus: corpora.Corpus, task: train_step.Task, logits: Callable) -> Callable[[Any], str]:
    """Return params -> held-out windows with masked tokens as _, as the model fills them in, and as they were."""

    def decode_each(token_N: np.ndarray) -> list[str]:
        return [corpus.tokenizer.decode([token]).replace("\n", "⏎") for token in token_N]

    def fill(params: Any) -> str:
        batch = {name: array[:FILLED] for name, array in task.evaluation[0].items()}
        predicted_BN = np.asarray(jax.jit(logits)(params, batch)).argmax(-1)
        lines = []
        rows = zip(batch["target_BN"], batch["weight_BN"] > 0, predicted_BN, strict=True)
        for target_N, masked_N, predicted_N in rows:
            truth, prediction = decode_each(target_N), decode_each(predicted_N)
            correct = int(np.sum(masked_N & (predicted_N == target_N)))
            lines += [f"masked: {''.join(np.where(masked_N, '_', truth))}"]
            lines += [f"filled: {''.join(np.where(masked_N, prediction, truth))}", f"truth:  {''.join(truth)}"]
            lines += [f"{correct} of {int(masked_N.sum())} correct", ""]
        return "\n".join(lines)

    return fill


def figures(
    settings: configs.Settings, corpus: corpora.Corpus, task: train_step.Task, sample: Callable, params, folder, rows
) -> Iterator[pathlib.Path | dict[str, float]]:
    """Yield bits per byte and word perplexity; the sample as text; loss curves; attention of a piece of text."""
    from experiments.figures import plots  # it imports matplotlib, which takes a second

    losses, targets = [row["eval/loss"] for row in rows if "eval/loss" in row], len(corpus.evaluation_T) - 1
    if losses and corpus.size is not None and settings.text.objective == "causal":
        measures = perplexity.measure(losses[-1] * targets, tokens=targets, text=corpus.size)
        yield {f"eval/{name}": measures[name] for name in ("bits_per_byte", "word_perplexity") if name in measures}
    text = sample(params)
    disk.write(folder / "sample.txt", f"{text}\n".encode())
    print(f"\n{text}")
    yield folder / "sample.txt"
    title = f"{settings.text.objective} language: {corpus.name}"
    yield plots.loss_curves(folder / "figures" / "loss.png", rows, unit="nats per token", title=title)
    batch, A_MHNS = tasks.map_first_example(task, params, tokens=24)
    names = [corpus.tokenizer.decode([token]) for token in batch["w_BN"][0]]
    yield plots.attention_matrices(folder / "figures" / "attention.png", A_MHNS=A_MHNS, queries=names, keys=names)
