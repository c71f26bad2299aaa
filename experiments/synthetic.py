"""Synthetic tasks (data/synthetic.py): predict a token for each token. Some tasks need directional attention."""

import functools
import pathlib
import re
from typing import Any

from jax.sharding import Mesh

from experiments.config import errors, settings as configs
from experiments.data import synthetic
from experiments.engine import run as runs
from experiments.model import baselines, build, checks, losses, sharding, splits, task as tasks
from tfm import head as heads, layout as layouts
from tfm.attention import mask as masks

TOKENS = 12  # of an example, by default
HELD_OUT = 512  # number of held-out examples, which are the same in every run


def config() -> dict[str, dict]:
    """Return the setting of the task. Tasks with the same number of tokens compile to the same program."""
    return {
        "synthetic": {
            "task": (
                "ring",
                "ring, previous, reachability, beats, membership, nearest (experiments/data/synthetic.py). With the "
                "suffix _causal, tokens attend only to themselves and to earlier tokens. ring:20 has 20 tokens; the "
                "default is 12",
            ),
        }
    }


def parse(task: str) -> tuple[str, bool, int]:
    """Return the parts of synthetic.task: the name of the rule, whether it is causal, and N, the number of tokens.

    Raises UserError if the task does not have this form.
    """
    match = re.fullmatch(r"([^:]*?)(_causal)?(?::([0-9]{1,9}))?", task)
    if match is None:
        raise errors.UserError(
            f"synthetic.task = {task}: write only the number of tokens after the colon, as in ring:20"
        )
    return match[1], match[2] is not None, int(match[3] or TOKENS)


def prepare(settings: configs.Settings, mesh: Mesh) -> runs.Work:
    """Prepare the examples of the task, a model that predicts one of W = 2 N tokens for each token, and the figures."""
    m, (name, causal, N) = settings.model, parse(settings.synthetic.task)
    W = 2 * N
    fetch = synthetic.examples(name, N=N, W=W)
    data = splits.make_splits(settings, (fetch, synthetic.EPOCH), (fetch, HELD_OUT), tokens=N)
    if causal:
        checks.check_causal(m)
    layout, mask = sharding.choose_layout(settings, mesh, W=W), build.add_window(m, masks.causal if causal else None)
    model = build.language_model(m, head=heads.masked_word, W=W, N=N, layout=layout, mask=mask)

    def inputs(batch: dict, layout: layouts.Layout = layouts.ONE) -> dict:
        return {"inputs": batch["w_BN"], "mask": mask}

    return tasks.make_work(
        settings,
        model,
        inputs,
        losses.choose_token_loss(settings, model, sparse=False, layout=layout),
        data,
        baseline=functools.partial(baselines.guess_token, W=W),
        causal=("w_BN", 0) if causal else (),
        figures=functools.partial(figures, settings),
    )


def figures(
    settings: configs.Settings, work: runs.Work, params: Any, folder: pathlib.Path, rows: list[dict]
) -> list[pathlib.Path]:
    """Draw the loss curves, and the attention weights of one held-out example."""
    from experiments.figures import plots  # imports matplotlib, which takes a second

    name, _, N = parse(settings.synthetic.task)
    batch, A_MHNS = tasks.map_first_example(work, params)
    tokens = synthetic.spell(name, batch["w_BN"][0], N=N, W=2 * N)
    title, folder = settings.synthetic.task.replace("_", ", "), folder / "figures"
    return [
        plots.loss_curves(folder / "loss.png", rows, unit="nats per target", title=title),
        plots.attention_matrices(folder / "attention.png", A_MHNS=A_MHNS, queries=tokens, keys=tokens),
    ]
