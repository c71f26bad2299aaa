"""Synthetic tasks (data/synthetic.py): predict a token for each token. Some tasks need directional attention."""

import functools
import pathlib
import re
from typing import Any

from jax.sharding import Mesh

from experiments.config import errors, settings as configs
from experiments.data import synthetic
from experiments.engine import run as runs, train_step
from experiments.model import baselines, checks, losses, model as models, sharding, splits, task as tasks
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
    fields = splits.make_splits(settings, (fetch, synthetic.EPOCH), (fetch, HELD_OUT), tokens=N)
    if causal:
        checks.check_causal(m)
    layout, mask = sharding.choose_layout(m, mesh, W=W), models.add_window(m, masks.causal if causal else None)
    model = models.build_language_model(m, head=heads.masked_word, W=W, N=N, layout=layout, mask=mask)
    token_loss = losses.choose_token_loss(settings, model, sparse=False, layout=layout)

    def inputs(batch: dict) -> dict:
        return {"inputs": batch["w_BN"], "mask": mask}

    def loss(params: Any, batch: dict, *, key_B: Any = None, layout: layouts.Layout = layouts.ONE) -> tuple:
        x_BND, aux = model.hidden(params, **inputs(batch), key_B=key_B, layout=layout)
        return token_loss(params, x_BND, batch, layout), aux

    def logits(params: Any, batch: dict) -> Any:
        return model.apply(params, **inputs(batch))[0]

    fields |= baselines.guess_token(fields["evaluation"], W=W, owner="held-out examples'")
    fields["causal"] = ("w_BN", 0) if causal else ()
    task = tasks.make_task(settings, model, loss, inputs, layout=layout, **fields)
    return runs.Work(task, figures=functools.partial(figures, settings, task), apply=logits)


def figures(
    settings: configs.Settings, task: train_step.Task, params: Any, folder: pathlib.Path, rows: list[dict]
) -> list[pathlib.Path]:
    """Draw the loss curves, and the attention weights of one held-out example."""
    from experiments.figures import plots  # imports matplotlib, which takes a second

    name, _, N = parse(settings.synthetic.task)
    batch, A_MHNS = tasks.map_first_example(task, params)
    tokens = synthetic.spell(name, batch["w_BN"][0], N=N, W=2 * N)
    title, folder = settings.synthetic.task.replace("_", ", "), folder / "figures"
    return [
        plots.loss_curves(folder / "loss.png", rows, unit="nats per target", title=title),
        plots.attention_matrices(folder / "attention.png", A_MHNS=A_MHNS, queries=tokens, keys=tokens),
    ]
