"""Multi-token prediction (Gloeckle et al. 2024): `language` with a second output matrix for the token after the next.

As experiment = "configs.arms.multi_token". With targets.later = 0 it is `language` itself.
"""

from experiments import language
from tfm import head as heads, initial

FIELDS = {"later": (0.0, "weight of the loss of the token after the next; 0: no such loss, and no second matrix")}


def config():
    """Return the settings of `language`, and the section `targets`."""
    return language.config() | {"targets": FIELDS}


def init(key, *, W, D, **sizes):
    """Draw the matrix of the next token, and G2_WD for the token after it."""
    return heads.next_word.init(key, W=W, D=D, **sizes) | initial.normal(key, "G2_WD", 0.02, W=W, D=D)


def prepare(settings, mesh):
    """Prepare the experiment. Training minimises loss + targets.later * loss_later."""
    if not settings.targets.later:
        return language.prepare(settings, mesh)._replace(kind="language")

    def two_losses(settings, model):
        next_loss = language.choose_loss(settings, model)

        def measure(params, x_BND, batch, layout):
            y_BND, head = model.output(params, x_BND, layout=layout)
            target_BN, weight_BN = batch["target_BN"][:, 1:], batch["weight_BN"][:, 1:]
            later = heads.next_word.loss({"G_WD": head["G2_WD"]}, y_BND[:, :-1], target_BN, weight_BN, layout=layout)
            return next_loss(params, x_BND, batch, layout) | {"loss_later": later["loss"]}

        return measure

    work = language.prepare(settings, mesh, head=heads.next_word._replace(init=init), loss=two_losses)
    task = work.task._replace(weights={"loss_later": settings.targets.later})
    return work._replace(task=task, kind="language")  # the first matrix predicts as in `language`
