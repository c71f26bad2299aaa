"""Synthetic tasks (data/synthetic.py): an answer for each token, such as the token before it.

Some tasks need attention with a direction: n attends to s, and s not to n.
"""

import functools
import pathlib
from typing import Any

from jax.sharding import Mesh

from experiments.config import settings as configs
from experiments.data import synthetic
from experiments.engine import run as runs
from experiments.model import baselines, build, checks, losses, probe, sharding, splits, task as tasks
from tfm import head as heads, layout as layouts
from tfm.attention import mask as masks


def config() -> dict[str, dict]:
    """Return the setting synthetic.task and its default.

    Tasks with the same N, W and mask (causal or not) compile to the same training step.
    """
    return {
        "synthetic": {
            "task": (
                "ring",
                "ring, previous, reachability, beats, membership, nearest, induction, modular_addition "
                "(experiments/data/synthetic.py). With the suffix _causal, tokens attend only to themselves and to "
                "earlier tokens; the last two always do. ring:20 has 20 tokens, modular_addition:59 adds modulo 59; "
                "the default is 12, of induction 32",
            ),
        }
    }


def prepare(settings: configs.Settings, mesh: Mesh) -> runs.Work:
    """Prepare the examples of the task, a model that predicts one of W tokens for each token, and the figures."""
    m, task = settings.model, synthetic.parse(settings.synthetic.task)
    N, W = task.N, task.W
    data = splits.make_splits(settings, *synthetic.TASKS[task.name].split(N, W), tokens=N)
    if task.causal:
        checks.check_causal(m)
    layout = sharding.choose_layout(settings, mesh, W=W)
    mask = build.add_window(m, masks.causal if task.causal else None)
    model = build.language_model(m, head=heads.masked_word, W=W, N=N, layout=layout, mask=mask)

    def inputs(batch: dict, layout: layouts.Layout = layouts.ONE) -> dict:
        return {"inputs": batch["w_BN"], "mask": mask}

    work = tasks.make_work(
        settings,
        model,
        inputs,
        losses.choose_token_loss(settings, model, sparse=False, layout=layout),
        data,
        baseline=functools.partial(baselines.guess_token, W=W),
        causal=("w_BN", 0) if task.causal else (),
        figures=functools.partial(figures, settings),
    )
    if task.name == "induction" and not m.flax:
        look = functools.partial(tasks.look, work, names=("A",))
        work = work._replace(task=probe.add_head_scores(work.task, look, N=N, W=W))
    return work


def figures(
    settings: configs.Settings, work: runs.Work, params: Any, folder: pathlib.Path, rows: list[dict]
) -> list[pathlib.Path]:
    """Draw curves of loss and accuracy, and attention weights of one held-out example. Return the files.

    rows: the metrics that the run logged. For the task induction, the curves include the scores of the heads whose
    scores are largest at the end.
    """
    from experiments.figures import plots  # imports matplotlib, which takes a second

    task = synthetic.parse(settings.synthetic.task)
    batch, A_MHNS = tasks.map_first_example(work, params)
    tokens = synthetic.spell(task.name, batch["w_BN"][0], N=task.N, W=task.W)
    title, folder = settings.synthetic.task.replace("_causal", ", causal").replace("_", " "), folder / "figures"
    curves = {"train/accuracy": "accuracy in training", "eval/accuracy": "held-out accuracy"}
    curves |= probe.choose_heads(rows)
    return [
        plots.loss_curves(folder / "loss.png", rows, unit="nats per target", title=title),
        plots.curves(folder / "accuracy.png", rows, curves, title=title),
        plots.attention_matrices(folder / "attention.png", A_MHNS=A_MHNS, queries=tokens, keys=tokens),
    ]
