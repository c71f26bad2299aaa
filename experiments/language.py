"""Language models: predict the next token (causal, prefix), or masked tokens from both sides (masked).

These are equations E24 and E27 of docs/mathematics.md.
"""

import contextlib
import functools
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from experiments.config import by_name, disk, errors, settings as configs
from experiments.data import corpus as corpora, perplexity, windows
from experiments.devices import mesh as meshes
from experiments.engine import run as runs, train_step
from experiments.folder import log
from experiments.model import baselines, build, checks, losses, sharding, splits, task as tasks, variants
from tfm import head as heads, layout as layouts, models, variant
from tfm.attention import mask as masks
from tfm.decode import generate

MASK = "[MASK]"
OBJECTIVES = {"causal": (), "prefix": (), "masked": (MASK,)}  # objective -> the special tokens that it needs
SAMPLE = 400  # the most tokens of the sample at the end of a run
FILLED = 4  # number of held-out windows in which the model fills in masked tokens
TEMPERATURE = 0.8  # of the sample; experiments.tools.sample has a flag for others


def config() -> dict[str, dict]:
    """Return {"text": {setting: (default, help)}}, the settings of the text and the objective."""
    return {
        "text": {
            "source": (
                "stdlib",
                "text: stdlib (Python's standard library), docstrings (of the standard library), tinyshakespeare, a "
                "path, hub:NAME (a data set of the Hugging Face hub), your function my_file:read, or several of them "
                "with their shares of the training tokens: a.txt:0.7, b.txt:0.3",
            ),
            "field": (
                "",
                "name of the field with the text, in JSON lines, CSV, Parquet or hub:NAME; '': files are plain text",
            ),
            "tokenizer": (
                "bytes",
                "bytes, characters, bpe:8192 (a byte-level BPE of 8,192 tokens, learned from the training data), "
                "the path of a trained tokenizer (a file or a folder), or your function my_file:words",
            ),
            "N": (64, "tokens of a window (context length)"),
            "documents": (
                False,
                "with several documents and the objective causal: tokens attend only to their own document, in which "
                "positions begin at 0; False: to all earlier tokens of the window",
            ),
            "objective": (
                "causal",
                "what to predict: causal (the next token), prefix (the next token in the second half of a window; in "
                "the first half tokens see both directions), masked (masked tokens)",
            ),
            "head": (
                "linear",
                "output matrix: linear, or tied (the embedding). With +gelu (tied+gelu: BERT), +tanh, ... a layer with "
                "this activation, a bias and a norm comes before the matrix; with +bias, logits have a bias",
            ),
        }
    }


def choose_windows(t: configs.Settings, corpus: corpora.Corpus) -> Callable:
    """Return the function (token_T, evaluation=False) -> examples for t.objective (splits.Examples).

    t: the section `text`. token_T: ids of a part of the corpus. Raises UserError for an invalid text.N, or if the
    objective is masked and the tokenizer has no mask token.
    """
    configs.at_least(2 if t.objective == "prefix" else 1, {"text.N": t.N})
    if t.objective != "masked":
        start = corpus.tokenizer.document_start if t.documents else None
        return functools.partial(windows.causal, N=t.N, prefix=prefix_length(t), document_start=start)
    tokenizer = corpus.tokenizer
    if tokenizer.mask is None:
        raise errors.UserError(
            f"text.tokenizer = {t.tokenizer} has no mask token. Choose another tokenizer or another text.objective"
        )
    return functools.partial(windows.masked, N=t.N, W=tokenizer.size, special=tokenizer.special, mask_id=tokenizer.mask)


def prefix_length(t: configs.Settings) -> int:
    """Return the number of tokens at the beginning of a window that see both directions; 0 without a prefix."""
    return t.N // 2 if t.objective == "prefix" else 0


def choose_loss(settings: configs.Settings, model: models.Model) -> Callable[..., train_step.Ratios]:
    """Return (params, x_BND, batch, layout) -> {metric: (sum, count)} for loss, accuracy and train.metrics."""
    sparse = settings.text.objective != "causal"
    return losses.choose_token_loss(settings, model, sparse=sparse, layout=model.layout)


def prepare(
    settings: configs.Settings,
    mesh: Mesh,
    *,
    read: Callable[..., corpora.Corpus] = corpora.read_corpus,
    windows: Callable[..., Callable] = choose_windows,
    head: variant.Variant | None = None,
    change: Callable[[models.Model], models.Model] = models.unchanged,
    loss: Callable[..., Callable[..., train_step.Ratios]] = choose_loss,
) -> runs.Work:
    """Prepare the text, the model, its loss, and the figures. An experiment of the user's may exchange the parts.

    * read(t, specials) -> corpora.Corpus: the text and its tokenizer. t: the section `text`. specials: the special
      tokens that the objective needs, such as [MASK].
    * windows(t, corpus): the function that cuts ids into examples with w_BN, target_BN and weight_BN.
    * head: the head of the model, with further parameters, such as a matrix for the token after the next. Its `apply`
      returns next-token logits.
    * change(model) -> model: models.map_params quantises its weights, for example.
    * loss(settings, model): the function (params, x_BND, batch, layout) -> {"loss": (sum, count), "accuracy": ...} of
      the tokens x_BND before the head. Its "loss" is that of the next token, from which bits per byte follow;
      Task.weights adds other losses.

    The baseline, the sample and the figures use these parts too. So do the tools if Work.kind names the built-in
    experiment whose inputs and outputs the model has.
    """
    t, m = settings.text, settings.model
    check_documents(settings, mesh)
    corpus = read(t, by_name.choose("objective", t.objective, OBJECTIVES))
    masked, W = t.objective == "masked", corpus.tokenizer.size
    data = make_data(settings, windows(t, corpus), corpus)
    mask = build.add_window(m, masks.padding(np.ones((1, t.N), bool), at_end=True) if masked else causal_mask(t))
    model = change(make_model(settings, mesh, build.within_documents(mask, data["evaluation"][0])["mask"], head, W=W))
    most_frequent = corpora.count_tokens(corpus.train_T, W=W).argmax()
    return tasks.make_work(
        settings,
        model,
        choose_inputs(m, mask),
        loss(settings, model),
        data,
        baseline=functools.partial(baselines.guess_token, W=W, token=most_frequent),
        causal=() if masked else ("w_BN", 0),
        figures=functools.partial(figures, settings, corpus),
        files=corpus.tokenizer.files,
        lines=[*corpus.lines, *describe_head(settings, W)],
        data_sha256=corpus.sha256,
    )


def describe_head(settings: configs.Settings, W: int) -> list[str]:
    """Return [a line about the first loss] if the output matrix is a new embedding (of W tokens), else [].

    The rows of the embedding have length 1, so logits begin with variance 1.
    """
    if settings.model.flax or settings.init_from or not settings.text.head.startswith("tied"):
        return []
    return [f"text.head = {settings.text.head}: the loss begins 0.3 to 1 nat above ln W = {np.log(W):.2f}"]


def choose_inputs(m: configs.Settings, mask: masks.Mask) -> Callable[[dict], dict]:
    """Return the function batch -> {argument of models.Model.hidden: value}.

    The arguments are inputs, mask and, for a batch with documents, code_n, the positions in them; for a Flax module
    inputs and valid. mask: for batches without padding; a batch with valid_BS gets a mask of its padding.
    """
    is_flax = bool(m.flax)

    def inputs(batch: dict, layout: layouts.Layout = layouts.ONE) -> dict:
        if is_flax:
            return {"inputs": batch["w_BN"], "valid": batch.get("valid_BS")}
        is_padded = "valid_BS" in batch
        batch_mask = build.add_window(m, masks.padding(batch["valid_BS"], at_end=True)) if is_padded else mask
        return {"inputs": batch["w_BN"]} | build.within_documents(batch_mask, batch)

    return inputs


def check_documents(settings: configs.Settings, mesh: Mesh) -> None:
    """Raise UserError if text.documents does not fit other settings.

    It needs a causal objective, mesh.sequence = 1, no model.flax, and rotations that depend on the offset alone.
    """
    t, m, sequence = settings.text, settings.model, mesh.shape[meshes.SEQUENCE]
    if t.documents:
        errors.refuse(
            (t.objective != "causal", f"text.documents = True needs text.objective = causal, not {t.objective}"),
            (m.flax, f"text.documents = True is not for model.flax = {m.flax}: your module chooses its mask"),
            (sequence > 1, f"text.documents = True needs mesh.sequence = 1, not {sequence}"),
            (
                variants.choose(m, "relative_position").is_dynamic,
                f"text.documents = True excludes model.relative_position = {m.relative_position}, whose rotations "
                "depend on the position in the window. Choose another one",
            ),
        )


def make_data(settings: configs.Settings, cut: Callable, corpus: corpora.Corpus) -> dict[str, Any]:
    """Return {field of Task: value} with the windows of both splits. cut: (token_T, evaluation=False) -> examples."""
    N, examples = settings.text.N, (cut(corpus.train_T), cut(corpus.evaluation_T, evaluation=True))
    return splits.make_splits(settings, *examples, tokens=N, stride=N + 1)


def make_model(
    settings: configs.Settings, mesh: Mesh, mask: masks.Mask, head: variant.Variant | None, *, W: int
) -> models.Model:
    """Return the model of the settings, or the user's Flax module. Raises UserError for a norm that is not causal."""
    t, m, masked = settings.text, settings.model, settings.text.objective == "masked"
    if m.flax:
        from experiments.model import flax_model  # imports flax.nnx, which takes 0.1 s

        inputs, outputs = jax.ShapeDtypeStruct((2, t.N), jnp.int32), (2, t.N, W)
        return flax_model.build(m, mesh, inputs, outputs, padded=masked, W=W, N=t.N)
    if not masked:
        checks.check_causal(m)
    head = head or (heads.masked_word if masked else heads.next_word)
    layout = sharding.choose_layout(settings, mesh, W=W)
    return build.language_model(m, head=head, W=W, N=t.N, output=t.head, layout=layout, mask=mask)


def causal_mask(t: configs.Settings) -> masks.Mask:
    """Return the causal mask; the tokens of a prefix see each other in both directions."""
    prefix = prefix_length(t)
    return masks.prefix(prefix) if prefix else masks.causal


def generate_sample(settings: configs.Settings, corpus: corpora.Corpus, model: models.Model, params: Any) -> str:
    """Return a text: a prompt, and how the model continues it.

    The prompt is a newline, or the first held-out token if the vocabulary lacks the newline. For the objective
    `prefix` it is the beginning of the held-out text.
    """
    t, length = settings.text, min(settings.text.N, SAMPLE)
    prefix = length // 2 if t.objective == "prefix" else 0
    prompt_N = corpus.evaluation_T[: prefix or 1]
    with contextlib.suppress(errors.UserError):  # the vocabulary may not have the new line
        line_N = corpus.tokenizer.encode("\n")[:length]
        prompt_N = line_N if line_N.size and not prefix else prompt_N
    prompt_BN = jnp.asarray(prompt_N)[None]
    steps, key = length - prompt_BN.size, jax.random.key(settings.seed)
    prompt_mask = build.add_window(settings.model, masks.prefix(prefix) if prefix else masks.causal)
    mask = build.add_window(settings.model, masks.causal)

    @jax.jit
    def sample(params: Any) -> jax.Array:
        layers = model.by_layer(params)

        def start(w_BN: jax.Array, length_B: jax.Array) -> Any:
            return model.start(params, w_BN, length_B, capacity=length, mask=prompt_mask)

        def step(cache: Any, w_B: jax.Array, n_B: jax.Array) -> Any:
            return model.step(layers, cache, w_B, n_B, mask=mask)

        prompt = prompt_BN, jnp.full(1, prompt_BN.size), key
        return generate.generate(start, step, *prompt, steps=steps, temperature=TEMPERATURE)[0]

    return corpus.tokenizer.decode(np.asarray(sample(params))[0])


def fill_windows(corpus: corpora.Corpus, work: runs.Work, params: Any) -> str:
    """Return FILLED held-out windows as one text, each masked (as _), filled in by the model, and as it really is."""

    def decode_each(token_N: np.ndarray) -> list[str]:
        return [corpus.tokenizer.decode([token]).replace("\n", "⏎") for token in token_N]

    batch = {name: array[:FILLED] for name, array in work.task.evaluation[0].items()}
    predicted_BN, lines = np.asarray(jax.jit(work.apply)(params, batch)).argmax(-1), []
    rows = zip(batch["target_BN"], batch["weight_BN"] > 0, predicted_BN, strict=True)
    for target_N, masked_N, predicted_N in rows:
        truth, prediction = decode_each(target_N), decode_each(predicted_N)
        correct = int(np.sum(masked_N & (predicted_N == target_N)))
        lines += [f"masked: {''.join(np.where(masked_N, '_', truth))}"]
        lines += [f"filled: {''.join(np.where(masked_N, prediction, truth))}", f"truth:  {''.join(truth)}"]
        lines += [f"{correct} of {int(masked_N.sum())} correct", ""]
    return "\n".join(lines)


def figures(
    settings: configs.Settings, corpus: corpora.Corpus, work: runs.Work, params, folder, rows
) -> Iterator[pathlib.Path | dict[str, float]]:
    """Yield files: a sample, loss curves, and attention weights of a few tokens (not of a Flax module).

    Before, yield {"eval/bits_per_byte", "eval/word_perplexity"} for a causal model, as far as they are known. rows: of
    metrics.jsonl.
    """
    from experiments.figures import plots  # imports matplotlib, which takes a second

    name = "loss" if settings.train.loss == losses.CROSS_ENTROPY else losses.CROSS_ENTROPY  # of train.metrics
    nats, targets = [row[f"eval/{name}"] for row in rows if f"eval/{name}" in row], len(corpus.evaluation_T) - 1
    if nats and corpus.size is not None and settings.text.objective == "causal":
        measures = perplexity.measure(nats[-1] * targets, tokens=targets, text=corpus.size)
        yield {f"eval/{name}": measures[name] for name in ("bits_per_byte", "word_perplexity") if name in measures}
    if settings.text.objective == "masked":
        text = fill_windows(corpus, work, params)
    else:
        text = generate_sample(settings, corpus, work.model, params)
    disk.write(folder / "sample.txt", f"{text}\n".encode())
    log.say(f"\n{text}\n")
    yield folder / "sample.txt"
    title = f"{settings.text.objective} language: {corpus.name}"
    yield plots.loss_curves(folder / "figures" / "loss.png", rows, unit="nats per token", title=title)
    if settings.model.flax:
        return
    batch, A_MHNS = tasks.map_first_example(work, params, tokens=24)
    names = [corpus.tokenizer.decode([token]) for token in batch["w_BN"][0]]
    yield plots.attention_matrices(folder / "figures" / "attention.png", A_MHNS=A_MHNS, queries=names, keys=names)
