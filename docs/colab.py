# ---
# jupyter:
#   accelerator: TPU
#   colab:
#     gpuType: V5E1
#     provenance: []
#     toc_visible: true
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     name: python3
#   language_info:
#     name: python
# ---

# %% [markdown]
# # A laboratory for the transformer, on Colab
# Choose *Runtime > Change runtime type > v5e-1 TPU*, then run the cells from top to bottom: a few minutes.
# <!-- Made from docs/colab.py: edit that, then `python .ci/notebook.py`. -->

# %%
import os

REPOSITORY = os.environ.get("TFM_REPOSITORY", "https://github.com/OWNER/tfm")  # the address to clone from
STEPS = int(os.environ.get("TFM_STEPS", 1000))  # of training; the test of this notebook takes fewer

# %% [markdown]
# ## Install
# Colab's image brings JAX and its TPU. The constraints keep every version that is there; what is missing is added.

# %%
if not os.path.exists("launch.py"):
    # !test -d tfm || git clone --quiet "{REPOSITORY}" tfm
    os.chdir("tfm")

# %% language="bash"
# set -e
# pip list --format=freeze --exclude-editable > /tmp/image.txt
# pip install --quiet --editable . --constraint /tmp/image.txt
# pip list --format=freeze --exclude-editable > /tmp/installed.txt
# if diff /tmp/image.txt /tmp/installed.txt | grep "^<"; then
#     echo "pip replaced these packages of the image"
#     exit 1
# fi
# echo "installed; every package of the image is as it was"

# %% [markdown]
# ## Which chip?
# A TPU belongs to one process, so everything here runs in this one: `launch.run` does what `python launch.py` does.

# %%
import jax

import launch
from experiments.engine import compilation

compilation.start("any")
print(f"{jax.device_count()} x {jax.devices()[0].device_kind}")
if jax.default_backend() == "cpu":
    print("No TPU: Runtime > Change runtime type > v5e-1 TPU. All that follows also runs without, only slower.")

# %% [markdown]
# ## Train a vision transformer
# On handwritten digits, which scikit-learn brings. A config is a small file, here `configs/vit.py`.

# %%
vit = launch.run("configs/vit.py", **{"train.steps": STEPS})

# %% [markdown]
# Its figures: the loss, digits with what the model takes them for, which it confuses, and where its heads look.

# %%
from IPython.display import HTML, Image, display

display(*[Image(str(figure)) for figure in vit.figures])

# %% [markdown]
# What comes back is plain JAX: a tree of arrays, whose names carry their shapes, and a pure function of it.

# %%
answers_BC = vit.apply(vit.params, vit.batch)
print("the first digits are", vit.batch["label_B"][:10], "and taken for", answers_BC.argmax(-1)[:10])
jax.tree.map(lambda array: array.shape, vit.params["blocks"]["score"])

# %% [markdown]
# ## Change a field
# Attention compares a query $U_q x$ with a key $U_k x$. Does one matrix for both do? `configs/base.py` has every field.

# %%
tied = launch.run("configs/vit.py", **{"train.steps": STEPS, "model.score": "tied"})

# %%
for name, result in {"two matrices": vit, "one matrix": tied}.items():
    print(f"{name:13} {result.summary['eval/accuracy']:.1%} of the held-out digits")

# %% [markdown]
# One seed each: that is no comparison yet. A study with five seeds comes below.

# %% [markdown]
# ## Your own text
# Any text file will do: drop one on the *Files* panel at the left. This one is the reference manual that Python brings.

# %%
import pathlib
from pydoc_data import topics

manual = "\n".join(" ".join(topic.split()) for topic in topics.topics.values())
pathlib.Path("my_text.txt").write_text(manual, encoding="utf-8")
print(f"{len(manual):,} characters: {manual[:300]} ...")

# %% [markdown]
# A small model that learns fast reads it character by character; the last tenth or so is held out.

# %%
changes = {"text.source": "my_text.txt", "text.N": 128, "train.steps": STEPS}
text = launch.run("configs/shakespeare_speedrun.py", **changes)

# %% [markdown]
# And goes on with whatever you begin:

# %%
from experiments.tools import sample

story = sample.run(text.folder, prompt="The function ", temperature=0.5)

# %% [markdown]
# ## Your own score
# With one matrix for both, token $n$ is drawn to $s$ as much as $s$ to $n$: the logits are symmetric. Turn the queries
# by 90 degrees, with the same matrix, and they are skew: $l_{ns} = -l_{sn}$. What can each of the two learn?

# %%
# %%writefile my_score.py
import jax.numpy as jnp

from tfm.attention import score


def apply(params, x_BND, x_BSD):
    q_BHNK, k_BHSK = score.tied.apply(params, x_BND, x_BSD)
    first, second = jnp.split(q_BHNK, 2, axis=-1)
    return jnp.concatenate([-second, first], axis=-1), k_BHSK


rotated = score.Score(score.tied.init, apply)

# %% [markdown]
# Three scores (arms), two tasks (conditions), five seeds that are rows of one program. `ring` asks for the word before,
# `nearest` for the nearest word that is alike.

# %%
# %%writefile my_study.py
from configs import base


def get_config():
    config = base.get_config("ablation", of="synthetic")
    config.study.arms = [
        ("one_matrix", {"model.score": "tied"}),
        ("rotated", {"model.score": "my_score:rotated"}),
        ("two_matrices", {"model.score": "asymmetric"}),
    ]
    config.study.conditions = [(task, {"synthetic.task": task}) for task in ("ring", "nearest")]
    config.study.seeds = [0, 1, 2, 3, 4]
    config.study.metric = "eval/accuracy"
    config.model.M = config.model.H = 1
    config.model.D = 64
    config.optim.learning_rate = 3e-3
    config.optim.warmup_steps = 20
    config.train.batch_size = 32
    config.train.evaluate_every = 25
    return config


# %%
study = launch.run("my_study.py", **{"train.steps": STEPS // 4})

# %% [markdown]
# The report compares the arms seed by seed, and says no more than its intervals do.

# %%
import html

page = html.escape((study.folder / "report.html").read_text(encoding="utf-8"))
HTML(f'<div><iframe srcdoc="{page}" width="100%" height="900"></iframe></div>')

# %% [markdown]
# ## How fast is this chip?
# We have none and never measured it. This cell trains a model that suits the chip for a few steps, and writes the
# speed, the memory and the memory that the compiler promised into `results.json`.

# %%
import json
import subprocess
import sys

chip = {"TPU v5 lite": "v5e", "TPU v6 lite": "v6e"}.get(jax.devices()[0].device_kind)
config = f"configs/colab_{chip}.py" if chip else "configs/causal_lm.py"
few = {"train.steps": 30, "train.log_every": 1, "optim.warmup_steps": 10}
few |= {} if chip else {"train.steps": 15, "model.M": 1}
if chip:  # GPT-2's words
    import huggingface_hub

    huggingface_hub.hf_hub_download("openai-community/gpt2", "tokenizer.json", local_dir="gpt2")
speed = launch.run(config, workdir="runs/speed", **few)

# %%
said = {}
if chip:
    flags = [f"--topology={chip}-1", "--json=says.json", *(f"--config.{key}={few[key]}" for key in few)]
    done = subprocess.run([sys.executable, "launch.py", "--config", config, "--dry_run", *flags], check=False)
    said = {} if done.returncode else json.loads(pathlib.Path("says.json").read_text())
saved = json.loads((speed.folder / "config.json").read_text())
tokens = saved["config"]["train"]["batch_size"] * saved["config"]["text"]["N"]
measured = {"seconds_per_step": tokens / speed.summary["tokens_per_second"]}
peak = {"v5e": 197e12, "v6e": 918e12}.get(chip)  # FLOP/s of bfloat16
measured["share_of_peak"] = speed.summary["flops_per_step"] / measured["seconds_per_step"] / peak if chip else None
measured["memory"] = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
chips = {"chip": jax.devices()[0].device_kind, "chips": jax.device_count(), "config": config, "changes": few}
results = chips | {"measured": measured, "compiled": said, "summary": speed.summary}
pathlib.Path("results.json").write_text(json.dumps(results, indent=1))
print(json.dumps(results["measured"]), "is in results.json")

# %% [markdown]
# Please send us `results.json` (*Files* panel at the left, folder `tfm`), whatever it says: as an issue of `REPOSITORY`
# above. It holds the numbers of this run, the versions and the commit, and nothing about you.

# %% [markdown]
# ## Keep it, and go on after the runtime was taken away
# Colab takes a runtime back after a while, with all its files. A folder on your Drive stays.

# %%
import pathlib

try:
    from google.colab import drive

    drive.mount("/content/drive")
    folder = pathlib.Path("/content/drive/MyDrive/tfm")
except ImportError:  # not on Colab
    folder = pathlib.Path("runs/drive")
print(folder)

# %%
kept = launch.run("configs/vit.py", workdir=folder / "vit", **{"train.steps": STEPS, "train.save_every": 50})

# %% [markdown]
# On a new runtime, run the cells up to *Which chip?*, then the two above: the run goes on from its last checkpoint.
# A run that is to be longer goes on in the same way, so that we can see it here:

# %%
more = launch.run("configs/vit.py", workdir=folder / "vit", **{"train.steps": 2 * STEPS, "train.save_every": 50})

# %% [markdown]
# ## From here
# `README.md` has questions that were asked like this, with their answers, `configs/` a file for each, and `tfm/` the
# mathematics, equation by equation.
