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
# Choose *Runtime > Change runtime type > v5e-1 TPU*, then run the cells from top to bottom. It takes a few minutes.
# <!-- Made from docs/colab.py: edit that, then `python .ci/notebook.py`. -->

# %%
import os

REPOSITORY = os.environ.get("TFM_REPOSITORY", "")  # the address to clone from
STEPS = int(os.environ.get("TFM_STEPS", 1000))  # of training; at least 84: the study trains for STEPS // 4 > 20 steps

# %% [markdown]
# ## How do I install it?
# If you opened this notebook with *File > Upload notebook*, drop an archive of the repository on the *Files* panel at
# the left: `tfm.zip`, made by `git archive --output=tfm.zip HEAD`, or another `tfm*.zip` or `tfm*.tar.gz`.

# %%
import pathlib
import shutil
import subprocess

if not os.path.exists("launch.py"):
    if not list(pathlib.Path().glob("tfm/**/launch.py")):
        if archives := sorted([*pathlib.Path().glob("tfm*.zip"), *pathlib.Path().glob("tfm*.tar*")]):
            rules = {} if archives[0].suffix == ".zip" else {"filter": "data"}
            shutil.unpack_archive(archives[0], "tfm", **rules)
        elif REPOSITORY:
            subprocess.run(["git", "clone", "--quiet", REPOSITORY, "tfm"], check=True)
    if not (launch_files := list(pathlib.Path().glob("tfm/**/launch.py"))):
        raise FileNotFoundError("the repository: drop tfm.zip on the Files panel at the left, and run this cell again")
    os.chdir(launch_files[0].parent)

# %% [markdown]
# Colab has JAX with TPU support. This adds only what is missing; the constraints keep every installed version.

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
# A TPU belongs to one process, so everything here runs in this one. `launch.run` does the same as `python launch.py`.

# %%
import jax

import launch
from experiments.devices import compilation

compilation.start("any")
print(f"{jax.device_count()} x {jax.devices()[0].device_kind}")
if jax.default_backend() == "cpu":
    print("No TPU: Runtime > Change runtime type > v5e-1 TPU. All that follows also runs without, only slower.")

# %% [markdown]
# ## Can a transformer read handwriting?
# It learns from scikit-learn's handwritten digits. The config is a short file, `configs/vit.py`.

# %%
vit = launch.run("configs/vit.py", **{"train.steps": STEPS})

# %% [markdown]
# The figures show the loss, digits with the model's answers, the digits that it confuses, and where its heads look.

# %%
from IPython.display import HTML, Image, display

display(*[Image(str(figure)) for figure in vit.figures])

# %% [markdown]
# The result is plain JAX: a tree of arrays, whose names state their shapes, and a pure function.

# %%
answers_BC = vit.apply(vit.params, vit.batch)
print("the first digits are", vit.batch["label_B"][:10], "and taken for", answers_BC.argmax(-1)[:10])
jax.tree.map(lambda array: array.shape, vit.params["blocks"]["score"])

# %% [markdown]
# ## Does attention need two matrices?
# It compares a query $U_q x$ with a key $U_k x$. Is one matrix enough? Change one setting (all: `configs/base.py`):

# %%
tied = launch.run("configs/vit.py", **{"train.steps": STEPS, "model.score": "tied"})

# %%
for name, result in {"two matrices": vit, "one matrix": tied}.items():
    print(f"{name:13} {result.summary['eval/accuracy']:.1%} of the held-out digits")

# %% [markdown]
# One seed each proves nothing yet: a lucky start may decide. A study with five seeds comes below.

# %% [markdown]
# ## Can it learn to write?
# Use any text file: drop it on the *Files* panel at the left. This one is Python's own reference manual.

# %%
import pathlib
from pydoc_data import topics

manual = "\n".join(" ".join(topic.split()) for topic in topics.topics.values())
pathlib.Path("my_text.txt").write_text(manual, encoding="utf-8")
print(f"{len(manual):,} characters: {manual[:300]} ...")

# %% [markdown]
# A small model that learns fast reads it character by character. About the last tenth is held out.

# %%
changes = {"text.source": "my_text.txt", "text.N": 128, "train.steps": STEPS}
text = launch.run("configs/shakespeare_speedrun.py", **changes)

# %% [markdown]
# Begin a sentence, and the model continues it:

# %%
from experiments.tools import sample

story = sample.run(text.folder, prompt="The function ", temperature=0.5)

# %% [markdown]
# ## Which heads does a model use?
# A model of two layers reads random tokens that repeat. To continue the text, it must find the token that followed the
# same token earlier. One layer does not learn this. Does the accuracy jump?

# %%
repeats = launch.run("configs/induction.py", **{"train.steps": STEPS})

# %% [markdown]
# Which heads attend to the token before, and which to the token after the earlier copy (`induction`)? `worth` is the
# increase of the loss without a head. The guide `docs/guides/inside.md` goes on from here.

# %%
from experiments.tools import heads

table = heads.run(repeats.folder)

# %% [markdown]
# ## What can my own score learn?
# With one matrix, the logits are symmetric: $l_{ns} = l_{sn}$. If you rotate the queries by 90 degrees, the same matrix
# makes them antisymmetric: $l_{ns} = -l_{sn}$. What can each of the two learn? Guess before you run the study.

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
# The study has three scores (arms), two tasks (conditions) and five seeds, which one program trains together. `ring`
# asks for the previous token, `nearest` for the nearest token of the same kind.

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
# The report compares the arms seed by seed, and claims no more than its intervals support.

# %%
import html

page = html.escape((study.folder / "report.html").read_text(encoding="utf-8"))
HTML(f'<div><iframe srcdoc="{page}" width="100%" height="900"></iframe></div>')

# %% [markdown]
# ## How fast is this chip?
# We have no TPU, so you can measure what we cannot. This cell compiles three models, and prints the time and memory of
# their training steps next to those that the compiler expects. It takes about five minutes.

# %%
from benchmarks import on_tpu

on_tpu.run()

# %% [markdown]
# Please paste these lines into an issue of the repository, whatever the numbers are.

# %% [markdown]
# ## Keep it: what if Colab ends the runtime?
# Colab ends a runtime after a while, and deletes its files. A folder on your Drive stays.

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
# On a new runtime, run the cells up to *Which chip?*, then the two above: the run resumes from its last checkpoint.
# A run with more steps resumes in the same way, so you can see it here:

# %%
more = launch.run("configs/vit.py", workdir=folder / "vit", **{"train.steps": 2 * STEPS, "train.save_every": 50})

# %% [markdown]
# ## What next?
# `README.md` has more questions like these, `configs/` a file for each, and `tfm/` the mathematics, equation by
# equation.
