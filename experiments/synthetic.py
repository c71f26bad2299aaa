"""Made tasks, some of which need to know the direction from one token to another: ring, previous, reachability, beats,
membership, nearest (data/synthetic.py)."""

import functools
import pathlib
from typing import Any

from jax.sharding import Mesh
from ml_collections import ConfigDict

from experiments import model as models
from experiments import task as tasks
from experiments.data import synthetic
from experiments.engine import config as configs
from experiments.engine import run, step
from tfm import head
from tfm.attention import mask as masks

CAUSAL = "_causal"  # ends the name of a task in which no token sees a later one
HELD_OUT = 512  # examples of an evaluation, the same in every run


def config() -> dict[str, ConfigDict]:
    """The task, whose data are made. What is compiled for one serves all of the same N and causal."""
    synthetic = ConfigDict()
    synthetic.task = "ring"  # ring, previous, reachability, beats, membership, nearest (data/synthetic.py); or
    # ring_causal, ...: where a token attends to itself and to what came before only
    synthetic.N = 12  # tokens of an example; each is one of 2 N words, and so is its answer
    return {"synthetic": synthetic}


def prepare(settings: configs.Settings, devices: Mesh) -> run.Work:
    """The task, the model, what is measured: every token is asked, and answers with one of W words or numbers."""
    s, m = settings.synthetic, settings.model
    W, task_name, causal = 2 * s.N, s.task.removesuffix(CAUSAL), s.task.endswith(CAUSAL)
    fetch = synthetic.examples(task_name, N=s.N, W=W)
    if causal:
        models.check_causal(m)
    model = models.language(m, answer=head.masked_word, W=W, N=s.N, tied_output=False)
    mask = models.masked(m, masks.causal if causal else None)
    parts = tasks.parts(settings, (fetch, synthetic.EPOCH), (fetch, HELD_OUT), tokens=s.N)

    def logits(params: Any, batch: dict, **options: Any) -> Any:
        return model.apply(params, batch["w_BN"], mask=mask, **options)

    task = tasks.of_words(
        settings,
        model,
        logits,
        baseline={"accuracy": tasks.always(parts["evaluation"], W=W)},
        guess={"accuracy": "always the held-out examples' most frequent answer"},
        layout=models.layout(m, devices, W=W),
        **parts,
    )
    return run.Work(task, functools.partial(figures, settings, task), lambda *inputs: logits(*inputs)[0])


def figures(settings: configs.Settings, task: step.Task, params: Any, folder: pathlib.Path, rows: list[dict]):
    """Loss curves, and the attention weights of one held-out example."""
    from experiments.figures import plots as draw  # matplotlib, only where something is drawn

    s, folder = settings.synthetic, folder / "figures"
    one, A_MHNS = tasks.example(task, params)
    tokens = synthetic.spelled(s.task.removesuffix(CAUSAL), one["w_BN"][0], N=s.N, W=2 * s.N)
    return [
        draw.loss_curves(folder / "loss.png", rows, unit="nats per answer", title=s.task.replace("_", ", ")),
        draw.attention_matrices(folder / "attention.png", A_MHNS=A_MHNS, queries=tokens, keys=tokens),
    ]
