"""Made tasks, some of which need to know the direction from one token to another: ring, previous, reachability, beats,
membership, nearest (data/synthetic.py)."""

import functools
import pathlib
import re
from typing import Any

from jax.sharding import Mesh
from ml_collections import ConfigDict

from experiments import model as models, task as tasks
from experiments.data import synthetic
from experiments.engine import config as configs, errors, run, train_step
from tfm import head
from tfm.attention import mask as masks

CAUSAL = "_causal"  # ends the name of a task in which no token sees a later one
TOKENS = 12  # of an example
HELD_OUT = 512  # examples of an evaluation, the same in every run


def config() -> dict[str, ConfigDict]:
    """The task, whose data are made. What is compiled for one serves all of as many tokens, or causal ones."""
    synthetic = ConfigDict()
    synthetic.task = "ring"  # ring, previous, reachability, beats, membership, nearest (data/synthetic.py); or
    # ring_causal, ...: where a token attends to itself and to what came before only; ring:20, ...: of 20 tokens, not 12
    return {"synthetic": synthetic}


def named(task: str) -> tuple[str, bool, int]:
    """Of synthetic.task the rule, whether it is causal, and N: tokens, each one of 2 N words, as its answer is."""
    name, colon, tokens = task.partition(":")
    if colon and not re.fullmatch("[0-9]{1,9}", tokens):
        raise errors.UserError(f"synthetic.task = {task}: behind the colon stands the number of tokens, as in ring:20")
    return name.removesuffix(CAUSAL), name.endswith(CAUSAL), int(tokens or TOKENS)


def prepare(settings: configs.Settings, devices: Mesh) -> run.Work:
    """The task, the model, what is measured: every token is asked, and answers with one of W words or numbers."""
    m, (name, causal, N) = settings.model, named(settings.synthetic.task)
    W, fetch = 2 * N, synthetic.examples(name, N=N, W=2 * N)
    if causal:
        models.check_causal(m)
    model = models.language(m, answer=head.masked_word, W=W, N=N)
    mask = models.masked(m, masks.causal if causal else None)
    parts = tasks.parts(settings, (fetch, synthetic.EPOCH), (fetch, HELD_OUT), tokens=N)

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


def figures(settings: configs.Settings, task: train_step.Task, params: Any, folder: pathlib.Path, rows: list[dict]):
    """Loss curves, and the attention weights of one held-out example."""
    from experiments.figures import plots as draw  # matplotlib, only where something is drawn

    given, folder = settings.synthetic.task, folder / "figures"
    one, A_MHNS = tasks.example(task, params)
    name, _, N = named(given)
    tokens = synthetic.spelled(name, one["w_BN"][0], N=N, W=2 * N)
    return [
        draw.loss_curves(folder / "loss.png", rows, unit="nats per answer", title=given.replace("_", ", ")),
        draw.attention_matrices(folder / "attention.png", A_MHNS=A_MHNS, queries=tokens, keys=tokens),
    ]
