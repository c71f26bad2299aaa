"""Text: predict the next word (causal, E24) or the hidden words from both sides (masked, E27)."""

import functools
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments import model as models
from experiments.engine import config, errors, job, train
from experiments.engine.data import batches, text, tokenizer, windows
from tfm import decode, embed, head, loss, variant
from tfm import mask as masks

MASK = "[MASK]"


class Corpus(NamedTuple):
    """A text as token ids, split into training and evaluation part."""

    name: str
    tokenizer: tokenizer.Tokenizer
    train_T: np.ndarray
    evaluation_T: np.ndarray


class Objective(NamedTuple):
    """What is asked of the tokens."""

    specials: tuple[str, ...]  # ids beside those of the text
    mask: Callable[[dict], masks.Mask]  # batch -> who may attend to whom
    head: variant.Variant
    windows: Callable[..., tuple]  # (settings, corpus) -> (fetch, n) for training and (fetch, n) for evaluation
    show: Callable[..., Callable[[Any], str]]  # (settings, corpus, task, logits) -> (params -> text for a person)


def run(settings: config.Settings, folder: pathlib.Path | None) -> None:
    """Train and evaluate what the config says; causal: write a sample of text, masked: fill hidden words in."""
    devices = job.devices(settings)
    objective = config.choose("objective", settings.text.objective, OBJECTIVES)
    corpus = read(settings, objective)
    model = build(settings, corpus, objective)
    (fetch, n), (fetch_evaluation, n_evaluation) = objective.windows(settings, corpus)

    def logits(params: Any, batch: dict, **options: Any) -> Any:
        return model.apply(params, batch["w_BN"], mask=objective.mask(batch), **options)

    def measure(params: Any, batch: dict, key: jax.Array) -> train.Ratios:
        answer = logits(params, batch), batch["target_BN"], batch["weight_BN"]
        return {"loss": loss.cross_entropy(*answer), "accuracy": loss.accuracy(*answer)}

    evaluation = batches.evaluation(fetch_evaluation, n=n_evaluation, batch=settings.train.evaluate_batch)
    task = train.Task(
        init=model.init,
        measure=measure,
        train=batches.train(fetch, n=n, batch=settings.train.batch, seed=settings.seed),
        evaluation=evaluation,
        tokens_per_example=settings.text.N,
        baseline={"accuracy": most_frequent(corpus, evaluation)},
    )
    show = objective.show(settings, corpus, task, logits)
    job.run(settings, folder, task, devices, functools.partial(figures, settings, corpus, task, logits, show))


def read(settings: config.Settings, objective: Objective) -> Corpus:
    """The text of the config, tokenised; the vocabulary comes from the training part."""
    config.at_least(1, {"text.N": settings.text.N})
    documents = text.load(settings.text.source, data_dir=settings.data_dir)
    made = tokenizer.make(
        settings.text.tokenizer, documents.train, specials=objective.specials, evaluation=documents.evaluation
    )
    parts = [tokenizer.join(made, part) for part in (documents.train, documents.evaluation)]
    print(
        f"{documents.name}: {len(parts[0]):,} tokens to train on, {len(parts[1]):,} to evaluate, vocabulary {made.size}"
    )
    return Corpus(documents.name, made, *parts)


def build(settings: config.Settings, corpus: Corpus, objective: Objective) -> models.Model:
    """The language model for this vocabulary."""
    W = corpus.tokenizer.size
    return models.build(
        settings.model,
        embed_init=functools.partial(embed.words.init, W=W),
        embed_apply=embed.words.apply,
        head_init=functools.partial(objective.head.init, W=W),
        head_apply=objective.head.apply,
        N=settings.text.N,
        tied_output=settings.text.tied_output,
    )


def most_frequent(corpus: Corpus, evaluation: Any) -> float:
    """The accuracy, on what the evaluation asks for, of always answering the most frequent training token."""
    answer = np.bincount(corpus.train_T).argmax()
    right = asked = 0.0
    for i in range(len(evaluation)):
        batch = evaluation[i]
        right += float(np.sum((batch["target_BN"] == answer) * batch["weight_BN"]))
        asked += float(np.sum(batch["weight_BN"]))
    return right / asked


def causal_windows(settings: config.Settings, corpus: Corpus) -> Any:
    N = settings.text.N
    return windows.causal(corpus.train_T, N=N), windows.causal_evaluation(corpus.evaluation_T, N=N)


def masked_windows(settings: config.Settings, corpus: Corpus) -> Any:
    made = corpus.tokenizer
    rule = {"W": made.size, "ordinary": made.ordinary, "mask_id": made.special(MASK), "rate": settings.text.mask_rate}
    N = settings.text.N
    return windows.masked(corpus.train_T, N=N, **rule), windows.masked_evaluation(corpus.evaluation_T, N=N, **rule)


def generated(settings: config.Settings, corpus: Corpus, task: train.Task, logits: Any) -> Any:
    """params -> the prompt, continued by the model."""
    s, context, key = settings.sample, settings.text.N, jax.random.key(settings.seed)
    try:
        prompt_BN = jnp.asarray(corpus.tokenizer.encode(s.prompt.encode()))[None]
    except errors.UserError as error:
        raise errors.UserError(f"sample.prompt does not suit this text: {error}") from error
    if prompt_BN.size == 0:
        raise errors.UserError("sample.prompt must hold at least one token")
    config.at_least(0, {"sample.length": s.length, "sample.temperature": s.temperature})
    sample = functools.partial(decode.sample, steps=s.length, context=context, temperature=s.temperature)

    @jax.jit
    def words(params: Any) -> jax.Array:
        return sample(lambda w_BC: logits(params, {"w_BN": w_BC}), prompt_BN, key)

    return lambda params: corpus.tokenizer.decode(np.asarray(words(params))[0])


def filled(settings: config.Settings, corpus: Corpus, task: train.Task, logits: Any) -> Any:
    """params -> held-out windows: what the model saw (hidden tokens as _), what it made of it, and what stood there."""
    shown = 4

    def spell(tokens_N: np.ndarray) -> list[str]:
        return [corpus.tokenizer.decode([token]).replace("\n", "⏎") for token in tokens_N]

    def fill(params: Any) -> str:
        batch = {name: array[:shown] for name, array in task.evaluation[0].items()}
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


OBJECTIVES = {
    "causal": Objective((), lambda batch: masks.causal, head.next_word, causal_windows, generated),
    "masked": Objective(
        (MASK,), lambda batch: masks.padding(batch["valid_BN"]), head.masked_word, masked_windows, filled
    ),
}


def figures(
    settings, corpus: Corpus, task: train.Task, logits, show, params: Any, folder: pathlib.Path, rows: list[dict]
):
    """Loss curves, attention of a short piece of held-out text, and the sample or the filled-in words as text."""
    from experiments.engine import figures as draw  # matplotlib, only where something is drawn

    files = {name: folder / "figures" / f"{name}.png" for name in ("loss", "attention")}
    job.loss_figure(
        files["loss"], rows, unit="nats per token", title=f"{settings.text.objective} language: {corpus.name}"
    )
    piece = {name: array[:1, :24] for name, array in task.evaluation[0].items()}
    _, A_MBHNS = jax.jit(functools.partial(logits, maps=True))(params, piece)
    tokens = [corpus.tokenizer.decode([token]) for token in piece["w_BN"][0]]
    draw.attention_matrices(files["attention"], A_MHNS=np.asarray(A_MBHNS)[:, 0], tokens=tokens)
    words = folder / "sample.txt"
    answer = show(params)
    words.write_text(answer + "\n", encoding="utf-8")
    print(f"\n{answer}")
    return [*files.values(), words]
