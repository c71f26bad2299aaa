"""Text: predict the next word (causal, prefix; E24) or the hidden words from both sides (masked; E27)."""

import functools
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from experiments import model as models
from experiments.data import masking, pretrained_tokenizer, text, tokenizer, windows
from experiments.engine import batches, by_name, disk, errors, run
from experiments.engine import config as configs
from experiments.engine import step as steps
from tfm import head, variant
from tfm import layout as layouts
from tfm.attention import mask as masks
from tfm.decode import generate, kv_cache

MASK, MASK_RATE = "[MASK]", 0.15  # share of hidden words, as of BERT's
PIECE = 2**20  # tokens counted at a time
LONGEST = 1_000_000  # tokens of the sample at the end of a run
TEMPERATURE = 0.8  # of the sample; python -m experiments.tools.sample draws otherwise


class Corpus(NamedTuple):
    """A text as token ids (of few words in few bytes), split into training and evaluation part."""

    name: str
    tokenizer: tokenizer.Tokenizer
    train_T: np.ndarray
    evaluation_T: np.ndarray
    lines: list[str]  # about it, for a person


class Objective(NamedTuple):
    """What is asked of the tokens."""

    specials: tuple[str, ...]  # ids beside those of the text
    mask: Callable[[configs.Settings, dict], masks.Mask]  # (settings, batch) -> who may attend to whom
    head: variant.Variant
    windows: Callable[..., tuple]  # (settings, corpus) -> (fetch, n) for training and (fetch, n) for evaluation
    show: Callable[..., Callable[[Any], str]]  # (settings, corpus, task, model, logits) -> (params -> text to read)


def config() -> dict[str, ConfigDict]:
    """The text, what is asked of it, and what is shown at the end."""
    text, sample = ConfigDict(), ConfigDict()
    text.source = "stdlib"  # stdlib (Python's sources), docstrings (the English in them), tinyshakespeare, or a path
    text.tokenizer = "bytes"  # bytes, characters, or the path of a trained model's: a file, or its folder
    text.N = 64  # tokens of a window, the context
    text.objective = "causal"  # causal: the next word; prefix: behind a half read both ways; masked: hidden words
    text.tied_output = False  # the output matrix is the embedding
    text.transform = False  # one more layer, with norm and bias, before the output matrix, as BERT has
    sample.prompt = "\n"  # what generated text begins with (causal only)
    sample.max_new_tokens = 400  # tokens generated (causal only)
    return {"text": text, "sample": sample}


def prepare(settings: configs.Settings, devices: Mesh) -> run.Work:
    """The words, the model, what is measured."""
    objective = by_name.choose("objective", settings.text.objective, OBJECTIVES)
    corpus = read(settings, objective)
    model = build(settings, corpus, objective)
    (fetch, n), (fetch_evaluation, n_evaluation) = objective.windows(settings, corpus)

    def logits(params: Any, batch: dict, **options: Any) -> Any:
        mask = models.masked(settings.model, objective.mask(settings, batch))
        return model.apply(params, batch["w_BN"], mask=mask, **options)

    def loss_and_metrics(
        params: Any, batch: dict, key_B: jax.Array | None, over: layouts.Layout = layouts.ONE
    ) -> steps.Ratios:
        logits_BNW, seen = logits(params, batch, key_B=key_B, over=over)
        return models.word_measures(logits_BNW, batch, over) | steps.running(seen)

    evaluation = batches.evaluation(fetch_evaluation, n=n_evaluation, batch=settings.train.evaluate_batch)
    task = steps.Task(
        init=model.init,
        loss_and_metrics=loss_and_metrics,
        train=batches.train(
            fetch, n=n, batch=settings.train.batch_size, seed=settings.seed, growth=settings.train.growth
        ),
        evaluation=evaluation,
        tokens_per_example=settings.text.N,
        baseline={"accuracy": most_frequent(corpus, evaluation)},
        guess={"accuracy": "always the training part's most frequent token"},
        layout=models.layout(settings.model, devices, W=corpus.tokenizer.size),
        probe=models.probe(settings.model),
        maps=lambda params, batch: logits(params, batch, maps=True)[1]["A_MBHNS"],
    )
    show = objective.show(settings, corpus, task, model, logits)
    draw = functools.partial(figures, settings, corpus, task, show)
    files = corpus.tokenizer.files
    return run.Work(task, draw, lambda params, batch: logits(params, batch)[0], files, lines=corpus.lines)


def read(settings: configs.Settings, objective: Objective) -> Corpus:
    """The text of the config, tokenised; the vocabulary comes from the training part."""
    configs.at_least(1, {"text.N": settings.text.N})
    t = settings.text
    documents = text.load(t.source)
    made = pretrained_tokenizer.make(
        t.tokenizer, documents.train, specials=objective.specials, evaluation=documents.evaluation
    )
    rows = [made.join(part) for part in (documents.train, documents.evaluation)]
    told = (
        f"{documents.name}: {len(rows[0]):,} tokens to train on, {len(rows[1]):,} to evaluate, vocabulary {made.size}"
    )
    return Corpus(documents.name, made, *rows, [*documents.said.splitlines(), told])


def build(settings: configs.Settings, corpus: Corpus, objective: Objective) -> models.Model:
    """The language model for this vocabulary. UserError where its predictions would look at what they predict."""
    if settings.text.objective != "masked" and settings.model.norm == "instance":
        raise errors.UserError("model.norm = instance looks at later words, which a causal model is to predict")
    t = settings.text
    return models.language(
        settings.model,
        answer=objective.head,
        W=corpus.tokenizer.size,
        N=t.N,
        tied_output=t.tied_output,
        transform=t.transform,
    )


def most_frequent(corpus: Corpus, evaluation: Any) -> float:
    """The accuracy, on what the evaluation asks for, of always answering the most frequent training token."""
    answer = token_counts(corpus.train_T, W=corpus.tokenizer.size).argmax()
    right = asked = 0.0
    for i in range(len(evaluation)):
        batch = evaluation[i]
        right += float(np.sum((batch["target_BN"] == answer) * batch["weight_BN"]))
        asked += float(np.sum(batch["weight_BN"]))
    if not asked:
        raise errors.UserError("not one held-out word is hidden: give more text")
    return right / asked


def token_counts(token_T: np.ndarray, *, W: int) -> np.ndarray:
    """How often each token occurs, (W,): counted piece by piece, for numpy counts in a copy of 8 bytes a token."""
    pieces = (token_T[first : first + PIECE] for first in range(0, len(token_T), PIECE))
    return sum((np.bincount(piece, minlength=W) for piece in pieces), np.zeros(W, int))


def causal_windows(settings: configs.Settings, corpus: Corpus) -> Any:
    N = settings.text.N
    return windows.causal(corpus.train_T, N=N), windows.causal(corpus.evaluation_T, N=N, evaluation=True)


def half(settings: configs.Settings) -> int:
    """The length of a prefix. UserError for windows that have no two halves."""
    configs.at_least(2, {"text.N": settings.text.N})
    return settings.text.N // 2


def prefix_windows(settings: configs.Settings, corpus: Corpus) -> Any:
    """As causal, but nothing is asked inside the prefix, where a word is seen before it would be predicted."""
    prefix = half(settings)

    def beyond(fetch: batches.Fetch) -> batches.Fetch:
        def cut(index_B: np.ndarray, rng: np.random.Generator | None) -> batches.Batch:
            batch = fetch(index_B, rng)
            asked_N = np.arange(settings.text.N) >= prefix - 1
            return batch | {"weight_BN": batch["weight_BN"] * asked_N.astype(np.float32)}

        return cut

    return tuple((beyond(fetch), n) for fetch, n in causal_windows(settings, corpus))


def masked_windows(settings: configs.Settings, corpus: Corpus) -> Any:
    made = corpus.tokenizer
    rule = {"W": made.size, "ordinary": made.ordinary, "mask_id": made.special(MASK), "rate": MASK_RATE}
    N = settings.text.N
    return masking.words(corpus.train_T, N=N, **rule), masking.words(corpus.evaluation_T, N=N, evaluation=True, **rule)


def prompt(settings: configs.Settings, corpus: Corpus) -> jax.Array:
    """The prompt of the config as one row of tokens, (1, N)."""
    try:
        prompt_BN = jnp.asarray(corpus.tokenizer.encode(settings.sample.prompt))[None]
    except errors.UserError as error:
        raise errors.UserError(f"sample.prompt does not suit this text: {error}") from error
    if prompt_BN.size == 0:
        raise errors.UserError("sample.prompt must hold at least one token")
    return prompt_BN


def generated(settings: configs.Settings, corpus: Corpus, task: steps.Task, model: models.Model, logits: Any) -> Any:
    """params -> the prompt, continued by the model: through its cache, or, beyond its context, with a window."""
    s, context, key = settings.sample, settings.text.N, jax.random.key(settings.seed)
    prompt_BN = prompt(settings, corpus)
    configs.at_least(0, {"sample.max_new_tokens": s.max_new_tokens})
    if s.max_new_tokens > LONGEST:  # or the run would not end
        raise errors.UserError(f"sample.max_new_tokens must be at most {LONGEST:,}, and {s.max_new_tokens:,} is not")
    room, how = context - prompt_BN.shape[1], {"steps": s.max_new_tokens, "temperature": TEMPERATURE}
    if settings.text.objective == "prefix" and s.max_new_tokens > room:
        raise errors.UserError(
            f"sample.max_new_tokens = {s.max_new_tokens} tokens after a prompt of {prompt_BN.size} do not fit into"
            f" text.N = {context}"
        )

    @jax.jit
    def words(params: Any) -> jax.Array:
        if settings.text.objective == "prefix" or s.max_new_tokens <= room:
            return continued(model, settings, params, prompt_BN, key, **how)
        return generate.sample(lambda w_BC: logits(params, {"w_BN": w_BC})[0], prompt_BN, key, context=context, **how)

    return lambda params: corpus.tokenizer.decode(np.asarray(words(params))[0])


def continued(
    model: models.Model, settings: configs.Settings, params: Any, prompt_BN: jax.Array, key: jax.Array, **drawing: Any
) -> jax.Array:
    """The prompt and the words after it, each computed from kept keys and values (E23); a prefix is read both ways."""
    B, N = prompt_BN.shape
    first = masks.causal
    if settings.text.objective == "prefix":
        first = masks.either(masks.causal, masks.prefix(N))
    later, layers = models.masked(settings.model, masks.causal), kv_cache.by_layer(params)

    def start(w_BN: jax.Array, length_B: jax.Array) -> Any:
        mask = models.masked(settings.model, first)
        return model.start(params, w_BN, length_B, capacity=N + drawing["steps"], mask=mask)

    def step(cache: Any, w_B: jax.Array, n_B: jax.Array) -> Any:
        return model.step(layers, cache, w_B, n_B, mask=later)

    return generate.generate(start, step, prompt_BN, jnp.full(B, N), key, **drawing)[0]


def filled(settings: configs.Settings, corpus: Corpus, task: steps.Task, model: models.Model, logits: Any) -> Any:
    """params -> held-out windows: what the model saw (hidden tokens as _), what it made of it, and what stood there."""
    shown = 4

    def spell(tokens_N: np.ndarray) -> list[str]:
        return [corpus.tokenizer.decode([token]).replace("\n", "⏎") for token in tokens_N]

    def fill(params: Any) -> str:
        batch = {name: array[:shown] for name, array in task.evaluation[0].items()}
        found_BN = np.asarray(jax.jit(logits)(params, batch)[0]).argmax(-1)
        lines = []
        for target_N, hidden_N, found_N in zip(batch["target_BN"], batch["weight_BN"] > 0, found_BN, strict=True):
            truth, answer = spell(target_N), spell(found_N)
            seen = "".join("_" if hidden else word for hidden, word in zip(hidden_N, truth, strict=True))
            full = "".join(np.where(hidden_N, answer, truth))
            right = f"{int(np.sum(hidden_N & (found_N == target_N)))} of {int(hidden_N.sum())} right"
            lines += [f"hidden: {seen}", f"filled: {full}", f"truth:  {''.join(truth)}", right, ""]
        return "\n".join(lines)

    return fill


def read_both_ways(settings: configs.Settings, batch: dict) -> masks.Mask:
    return masks.either(masks.causal, masks.prefix(half(settings)))


OBJECTIVES = {
    "causal": Objective((), lambda settings, batch: masks.causal, head.next_word, causal_windows, generated),
    "prefix": Objective((), read_both_ways, head.next_word, prefix_windows, generated),
    "masked": Objective(
        (MASK,), lambda settings, batch: masks.padding(batch["valid_BS"]), head.masked_word, masked_windows, filled
    ),
}


def figures(settings, corpus: Corpus, task: steps.Task, show, params: Any, folder: pathlib.Path, rows: list[dict]):
    """Loss curves, attention of a short piece of held-out text, and the sample or the filled-in words as text."""
    from experiments.figures import plots as draw  # matplotlib, only where something is drawn

    files = {name: folder / "figures" / f"{name}.png" for name in ("loss", "attention")}
    draw.loss_figure(
        files["loss"], rows, unit="nats per token", title=f"{settings.text.objective} language: {corpus.name}"
    )
    piece = {name: array[:1, :24] for name, array in task.evaluation[0].items()}
    A_MBHNS = jax.jit(task.maps)(params, piece)
    tokens = [corpus.tokenizer.decode([token]) for token in piece["w_BN"][0]]
    draw.attention_matrices(files["attention"], A_MHNS=np.asarray(A_MBHNS)[:, 0], tokens=tokens)
    words = folder / "sample.txt"
    answer = show(params)
    disk.write(words, f"{answer}\n".encode())
    print(f"\n{answer}")
    return [*files.values(), words]
