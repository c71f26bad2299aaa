"""Made tasks, some of which need to know the direction from one token to another: ring, previous, reachability, beats,
membership, nearest (data/synthetic.py)."""

import functools
import pathlib
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from experiments import model as models
from experiments.data import synthetic
from experiments.engine import batches, errors, run, step
from experiments.engine import config as configs
from tfm import head
from tfm import layout as layouts
from tfm.attention import mask as masks

HELD_OUT = 512  # examples of an evaluation, the same in every run


def config() -> dict[str, ConfigDict]:
    """The task, whose data are made. What is compiled for one serves all of the same N and causal."""
    synthetic = ConfigDict()
    synthetic.task = "ring"  # ring, previous, reachability, beats, membership, nearest (data/synthetic.py)
    synthetic.N = 12  # tokens of an example; each is one of 2 N words, and so is its answer
    synthetic.causal = False  # a token attends to itself and to what came before only
    return {"synthetic": synthetic}


def prepare(settings: configs.Settings, devices: Mesh) -> run.Work:
    """The task, the model, what is measured."""
    s, t = settings.synthetic, settings.train
    fetch, model, mask = examples(settings), build(settings), models.masked(settings.model, masked(settings))
    evaluation = batches.evaluation(fetch, n=HELD_OUT, batch=t.evaluate_batch)

    def logits(params: Any, batch: dict, **options: Any) -> Any:
        return model.apply(params, batch["w_BN"], mask=mask, **options)

    def loss_and_metrics(
        params: Any, batch: dict, key_B: jax.Array | None, over: layouts.Layout = layouts.ONE
    ) -> step.Ratios:
        logits_BNW, seen = logits(params, batch, key_B=key_B, over=over)
        return models.word_measures(logits_BNW, batch, over) | step.running(seen)

    task = step.Task(
        init=model.init,
        loss_and_metrics=loss_and_metrics,
        train=batches.train(fetch, n=synthetic.EPOCH, batch=t.batch_size, seed=settings.seed, growth=t.growth),
        evaluation=evaluation,
        tokens_per_example=s.N,
        baseline={"accuracy": most_frequent(evaluation, W=2 * s.N)},
        guess={"accuracy": "always the held-out examples' most frequent answer"},
        layout=models.layout(settings.model, devices, W=2 * s.N),
        probe=models.probe(settings.model),
        maps=lambda params, batch: logits(params, batch, maps=True)[1]["A_MBHNS"],
    )
    show = functools.partial(figures, settings, task)
    return run.Work(task, show, lambda params, batch: logits(params, batch)[0])


def examples(settings: configs.Settings) -> batches.Fetch:
    """The examples of the config's task. Raises UserError for a task that is none, and sizes that do not suit it."""
    s = settings.synthetic
    return synthetic.examples(s.task, N=s.N, W=2 * s.N)


def build(settings: configs.Settings) -> models.Model:
    """The model: every token is asked, and answers with one of W words or numbers."""
    s = settings.synthetic
    if s.causal and settings.model.norm == "instance":
        raise errors.UserError("model.norm = instance looks at later words, which synthetic.causal forbids")
    return models.language(settings.model, answer=head.masked_word, W=2 * s.N, N=s.N, tied_output=False)


def masked(settings: configs.Settings) -> masks.Mask | None:
    """Who may attend to whom, but for the window of the model."""
    return masks.causal if settings.synthetic.causal else None


def most_frequent(evaluation: Any, *, W: int) -> float:
    """The accuracy of always giving the answer that is the most frequent one of the held-out examples."""
    count_W = np.zeros(W)
    for i in range(len(evaluation)):
        batch = evaluation[i]
        count_W += np.bincount(batch["target_BN"].ravel(), weights=batch["weight_BN"].ravel(), minlength=W)
    return float(count_W.max() / count_W.sum())


def figures(settings: configs.Settings, task: step.Task, params: Any, folder: pathlib.Path, rows: list[dict]):
    """Loss curves, and the attention weights of one held-out example."""
    from experiments.figures import plots as draw  # matplotlib, only where something is drawn

    s = settings.synthetic
    files = {name: folder / "figures" / f"{name}.png" for name in ("loss", "attention")}
    draw.loss_figure(files["loss"], rows, unit="nats per answer", title=s.task + (", causal" if s.causal else ""))
    one = {name: array[:1] for name, array in task.evaluation[0].items()}
    A_MBHNS = jax.jit(task.maps)(params, one)
    tokens = synthetic.spelled(s.task, one["w_BN"][0], N=s.N, W=2 * s.N)
    draw.attention_matrices(files["attention"], A_MHNS=np.asarray(A_MBHNS)[:, 0], tokens=tokens)
    return list(files.values())
