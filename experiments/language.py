"""Text: predict the next word (causal, prefix; E24) or the hidden words from both sides (masked; E27)."""

import contextlib
import functools
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from experiments.build import checks, model as models, sharding, task as tasks
from experiments.data import bpe, perplexity, pretrained_tokenizer, text, tokenizer, tokens, windows
from experiments.engine import by_name, config as configs, disk, errors, run, train_step as steps
from tfm import head
from tfm.attention import mask as masks
from tfm.decode import generate

MASK = "[MASK]"
PIECE = 2**20  # tokens counted at a time
OBJECTIVES = {"causal": (), "prefix": (), "masked": (MASK,)}  # with the words that it needs beside those of the text
LONGEST = 400  # tokens of the sample at the end of a run
FILLED = 4  # windows that are shown
TEMPERATURE = 0.8  # of the sample; python -m experiments.tools.sample draws otherwise


class Corpus(NamedTuple):
    """A text as token ids (of few words in few bytes), split into training and evaluation part."""

    name: str
    tokenizer: tokenizer.Tokenizer
    train_T: np.ndarray | tokens.Mapped
    evaluation_T: np.ndarray | tokens.Mapped
    lines: list[str]  # about it, for a person
    sha256: str  # of the text
    size: perplexity.Size | None  # of the evaluation part behind its first token; None where tokens are bytes


def config() -> dict[str, dict]:
    """The text, and what is asked of it."""
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
                "causal: the next word; prefix: behind a half read both ways; masked: hidden words",
            ),
            "head": (
                "linear",
                "the output matrix: linear, or tied, the embedding; tied+gelu (as BERT), linear+tanh, ...: before"
                " it one more layer of this activation, with norm and bias; linear+bias: that alone",
            ),
        }
    }


def prepare(settings: configs.Settings, devices: Mesh) -> run.Work:
    """The words, the model, what is measured."""
    t, m = settings.text, settings.model
    corpus = read(settings, by_name.choose("objective", t.objective, OBJECTIVES))
    masked, W = t.objective == "masked", corpus.tokenizer.size
    if not masked:
        checks.check_causal(m)
    configs.at_least(2 if t.objective == "prefix" else 1, {"text.N": t.N})
    prefix = t.N // 2 if t.objective == "prefix" else 0
    causal = masks.either(masks.causal, masks.prefix(prefix)) if prefix else masks.causal
    layout = sharding.choose_layout(m, devices, W=W)
    own = {"mask": models.masked(m, masks.padding(np.ones((1, t.N), bool)) if masked else causal), "layout": layout}
    answer = head.masked_word if masked else head.next_word
    model = models.language(m, answer=answer, W=W, N=t.N, output=t.head, **own)
    if masked and corpus.tokenizer.mask is None:
        raise errors.UserError(f"this tokenizer has no special {MASK!r}")
    own = {"W": W, "special": corpus.tokenizer.special, "mask_id": corpus.tokenizer.mask}
    asked = own if masked else {"prefix": prefix}
    cut = functools.partial(windows.masked if masked else windows.causal, N=t.N, **asked)
    both = cut(corpus.train_T), cut(corpus.evaluation_T, evaluation=True)
    parts = tasks.parts(settings, *both, tokens=t.N, apart=t.N + 1)
    most_frequent = token_counts(corpus.train_T, W=W).argmax()

    def hidden(params: Any, batch: dict, **options: Any) -> Any:
        mask = masks.padding(batch["valid_BS"]) if masked else causal
        return model.hidden(params, batch["w_BN"], mask=models.masked(m, mask), **options)

    def logits(params: Any, batch: dict) -> jax.Array:
        return model.logits(params, hidden(params, batch)[0])

    task = tasks.of_tokens(
        settings,
        model,
        hidden,
        sparse=t.objective != "causal",
        baseline={"accuracy": tasks.always(parts["evaluation"], W=W, answer=most_frequent)},
        guess={"accuracy": "always the training part's most frequent token"},
        layout=layout,
        **parts,
    )
    show = filled(corpus, task, logits) if masked else generated(settings, corpus, model)
    draw = functools.partial(figures, settings, corpus, task, show)
    told = {"files": corpus.tokenizer.files, "lines": corpus.lines, "data_sha256": corpus.sha256}
    return run.Work(task, draw, logits, **told)


def read(settings: configs.Settings, specials: tuple[str, ...]) -> Corpus:
    """The text of the config, tokenised; the vocabulary comes from the training part."""
    t = settings.text
    documents = text.load(t.source, t.field)
    both = documents.train, documents.evaluation
    of = pretrained_tokenizer.make(t.tokenizer, both[0], specials=specials, evaluation=both[1])
    rows = [tokens.of(of, part) for part in both]
    lengths = f"{len(rows[0]):,} tokens to train on, {len(rows[1]):,} to evaluate"
    fewer = f" ({t.tokenizer} asks for more, and the text has no more pairs)" if of.size < bpe.size(t.tokenizer) else ""
    lines = [*documents.said.splitlines(), f"{documents.name}: {lengths}, vocabulary {of.size}{fewer}"]
    if isinstance(of, pretrained_tokenizer.Published) and len(documents.train.reads) > 1:
        ids = of.encode("") if of.between is None else [of.between]
        lines.append(f"{documents.name}: {''.join(map(of.name, ids)) or 'no token'} separates documents")
        for name in dict.fromkeys(map(of.name, ids)):
            if n := tokenizer.occurrences(name, both[0]):
                lines.append(f"{documents.name}: the texts to train on hold {name} {n:,} times, each an end of a text")
    if of.unknown is not None:
        shares = [token_counts(row, W=of.size)[of.unknown] / max(len(row), 1) for row in rows]
        lines.append(
            f"{documents.name}: {shares[0]:.2%} of the tokens to train on are unknown, {shares[1]:.2%} to evaluate"
        )
    size = None if t.tokenizer == "bytes" else perplexity.size(both[1], first=of.decode(rows[1][:1]))
    if size and (lost := perplexity.lost(of, both[1])):
        lines.append(f"{documents.name}: no bits per byte, as the tokenizer does not give back the text: {lost}")
        size = None
    elif size and size.bytes > perplexity.LONGEST * size.words:
        lines.append(f"{documents.name}: no perplexity of words, as no spaces stand between these")
    return Corpus(documents.name, of, *rows, lines, documents.sha256, size)


def token_counts(token_T: np.ndarray | tokens.Mapped, *, W: int) -> np.ndarray:
    """How often each token occurs, (W,): counted piece by piece, for numpy counts in a copy of 8 bytes a token."""
    pieces = (token_T[first : first + PIECE] for first in range(0, len(token_T), PIECE))
    return sum((np.bincount(piece, minlength=W) for piece in pieces), np.zeros(W, int))


def generated(settings: configs.Settings, corpus: Corpus, model: models.Model) -> Callable[[Any], str]:
    """params -> a new line, or a prefix of held-out text that is read both ways, continued by the model through its
    cache (E23) to the end of its context."""
    whole, key = min(settings.text.N, LONGEST), jax.random.key(settings.seed)
    prefix = whole // 2 if settings.text.objective == "prefix" else 0
    prompt_N = corpus.evaluation_T[: prefix or 1]
    with contextlib.suppress(errors.UserError):  # these words may have no new line
        line_N = corpus.tokenizer.encode("\n")[:whole]
        prompt_N = line_N if line_N.size and not prefix else prompt_N
    prompt_BN = jnp.asarray(prompt_N)[None]
    how = {"steps": whole - prompt_BN.size, "temperature": TEMPERATURE}
    first = masks.prefix(prefix) if prefix else masks.causal
    of_prompt, later = (models.masked(settings.model, mask) for mask in (first, masks.causal))

    @jax.jit
    def words(params: Any) -> jax.Array:
        layers = model.by_layer(params)

        def start(w_BN: jax.Array, length_B: jax.Array) -> Any:
            return model.start(params, w_BN, length_B, capacity=whole, mask=of_prompt)

        def step(cache: Any, w_B: jax.Array, n_B: jax.Array) -> Any:
            return model.step(layers, cache, w_B, n_B, mask=later)

        return generate.generate(start, step, prompt_BN, jnp.full(1, prompt_BN.size), key, **how)[0]

    return lambda params: corpus.tokenizer.decode(np.asarray(words(params))[0])


def filled(corpus: Corpus, task: steps.Task, logits: Callable) -> Callable[[Any], str]:
    """params -> held-out windows: what the model saw (hidden tokens as _), what it made of it, and what stood there."""

    def spell(tokens_N: np.ndarray) -> list[str]:
        return [corpus.tokenizer.decode([token]).replace("\n", "⏎") for token in tokens_N]

    def fill(params: Any) -> str:
        batch = {name: array[:FILLED] for name, array in task.evaluation[0].items()}
        found_BN = np.asarray(jax.jit(logits)(params, batch)).argmax(-1)
        lines = []
        for target_N, hidden_N, found_N in zip(batch["target_BN"], batch["weight_BN"] > 0, found_BN, strict=True):
            truth, answer = spell(target_N), spell(found_N)
            seen = "".join("_" if hidden else word for hidden, word in zip(hidden_N, truth, strict=True))
            full = "".join(np.where(hidden_N, answer, truth))
            right = f"{int(np.sum(hidden_N & (found_N == target_N)))} of {int(hidden_N.sum())} right"
            lines += [f"hidden: {seen}", f"filled: {full}", f"truth:  {''.join(truth)}", right, ""]
        return "\n".join(lines)

    return fill


def figures(settings, corpus: Corpus, task: steps.Task, show, params: Any, folder: pathlib.Path, rows: list[dict]):
    """Loss curves, attention of a short piece of held-out text, and the sample or the filled-in words as text; and what
    runs with other tokens can be compared by."""
    from experiments.figures import plots as draw  # matplotlib, only where something is drawn

    loss, asked = [row["eval/loss"] for row in rows if "eval/loss" in row], len(corpus.evaluation_T) - 1
    if loss and corpus.size is not None and settings.text.objective == "causal":
        measures = perplexity.measures(loss[-1] * asked, tokens=asked, of=corpus.size)
        yield {f"eval/{name}": measures[name] for name in ("bits_per_byte", "word_perplexity") if name in measures}
    title = f"{settings.text.objective} language: {corpus.name}"
    piece, A_MHNS = tasks.example(task, params, tokens=24)
    tokens = [corpus.tokenizer.decode([token]) for token in piece["w_BN"][0]]
    words, answer = folder / "sample.txt", show(params)
    disk.write(words, f"{answer}\n".encode())
    print(f"\n{answer}")
    yield words
    yield draw.loss_curves(folder / "figures" / "loss.png", rows, unit="nats per token", title=title)
    yield draw.attention_matrices(folder / "figures" / "attention.png", A_MHNS=A_MHNS, queries=tokens, keys=tokens)
