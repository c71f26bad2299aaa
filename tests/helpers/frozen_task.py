"""A task of two layers with a running statistic, for tests of frozen parameters and adapters."""

import jax
import jax.numpy as jnp
import tiny

from experiments.engine import train_step
from tfm import layout as layouts, loss


def small_task() -> train_step.Task:
    """Return a task of two layers that can be sharded. The parameter norm/mean_D is a running statistic."""
    linear = tiny.linear_task()

    def init(key):
        x = jax.random.normal(key, (90,))
        layers = {
            "mlp": {"W_DD": x[:32].reshape(2, 4, 4), "b_D": x[32:40].reshape(2, 4)},
            "norm": {"mean_D": x[40:48].reshape(2, 4)},
        }
        return {"embed": {"W_DP": x[48:68].reshape(4, 5)}, "blocks": layers, "head": {"G_CD": x[68:80].reshape(3, 4)}}

    def mean(params, batch, *, key_B=None, layout=layouts.ONE):
        leaves = layouts.gather_features(params["embed"] | params["head"], layout)
        x_BD = batch["x_BD"] @ leaves["W_DP"].T
        for m in range(2):
            layer = layouts.gather_features(jax.tree.map(lambda leaf, m=m: leaf[m], params["blocks"]), layout)
            x_BD = jnp.tanh(x_BD @ layer["mlp"]["W_DD"].T + layer["mlp"]["b_D"])
        arguments = x_BD @ leaves["G_CD"].T, batch["label_B"], batch["weight_B"]
        return {"loss": loss.cross_entropy(*arguments)}, {"running": {"blocks": {"norm": {"mean_D": jnp.ones((2, 4))}}}}

    return linear._replace(init=init, loss=mean)
