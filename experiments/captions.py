"""Images and words in one sequence: patches, which see each other, and behind them the name of the image's class, which
is written letter by letter (E1, E2, E22, E24)."""

import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from experiments import model as models, task as tasks
from experiments.data import images
from experiments.engine import batches, config as configs, disk, errors, run, train_step
from tfm import embed, head
from tfm.attention import mask as masks

SPELLED = "zero one two three four five six seven eight nine".split()  # of digits
SHOWN = 20  # captions in captions.txt


def config() -> dict[str, ConfigDict]:
    """The images, whose classes are their captions."""
    image = ConfigDict()
    image.source = "digits"  # digits (scikit-learn), mnist, fashion_mnist, hub:NAME, or a path (docs/configs.md)
    image.size = 0  # image files are made so many pixels high and wide; 0: they stay as they are, all alike
    image.patch = 2  # pixels of a patch's side
    image.augment = []  # of training images, in this order: shift:0.5, flip, crop:4 (augment.py)
    return {"image": image}


def spelled(classes: list[str]) -> tuple[str, np.ndarray, np.ndarray]:
    """(letters, w_CL, weight_CL): the name of each class as ids of letters and one that ends it, 0; of digits the word.
    weight: 1 up to the end of the name, 0 behind it."""
    names = [SPELLED[int(name)] if name in map(str, range(10)) else name for name in classes]
    letters = "\n" + "".join(sorted({*"".join(names)} - {"\n"}))
    ends_C, L = np.array([len(name) for name in names]), max(map(len, names)) + 1
    w_CL = np.array([[letters.index(letter) for letter in name.ljust(L, "\n")] for name in names], np.int32)
    return letters, w_CL, (np.arange(L) <= ends_C[:, None]).astype(np.float32)


def prepare(settings: configs.Settings, devices: Mesh) -> run.Work:
    """The images and their captions, the model, what is measured."""
    i, m = settings.image, settings.model
    data = images.configured(i.source, i.size)
    letters, w_CL, weight_CL = spelled(list(data.classes))
    patches, P = models.patches(*data.train_image_BYXZ.shape[1:], patch=i.patch)
    before, N = patches - 1, patches - 1 + w_CL.shape[1]  # the last patch is asked for the first letter
    models.check_causal(m)
    layout = models.layout(m, devices, W=len(letters))
    if layout.sequence:
        raise errors.UserError("patches and words are of one sequence, which no devices share: mesh.sequence must be 1")
    sizes = models.sized(embed.mixed, P=P, W=len(letters)), models.sized(head.next_word, W=len(letters))
    model = models.build(m, embed=sizes[0], head=sizes[1], N=N)
    mask = models.masked(m, masks.either(masks.causal, masks.prefix(patches)))

    def captioned(fetch: batches.Fetch, index_B: np.ndarray, rng: np.random.Generator | None) -> batches.Batch:
        batch = fetch(index_B, rng)
        if "other_label_B" in batch:
            raise errors.UserError("image.augment mixes images, and a caption is of one: leave mixup and cutmix out")
        c_B, wide = batch["label_B"], [(0, 0), (before, 0)]
        asked = {"target_BN": np.pad(w_CL[c_B], wide), "weight_BN": np.pad(weight_CL[c_B], wide)}
        return {"image_BYXZ": batch["image_BYXZ"], "w_BL": w_CL[c_B, :-1], **asked}

    train, evaluation, _ = images.both(data, i.augment)
    examples = ((functools.partial(captioned, fetch), n) for fetch, n in (train, evaluation))
    parts = tasks.parts(settings, *examples, tokens=N)

    def logits(params: Any, batch: dict, **options: Any) -> Any:
        inputs = {"v_BNP": embed.cut(batch["image_BYXZ"], size=i.patch), "w_BN": batch["w_BL"]}
        return model.apply(params, inputs, mask=mask, **options)

    def written(params: Any, image_BYXZ: jax.Array) -> jax.Array:
        """The likeliest letter after those before it, one by one: w_BL."""
        w_BL = jnp.zeros((len(image_BYXZ), w_CL.shape[1]), jnp.int32)
        for at in range(w_CL.shape[1]):
            l_BNW, _ = logits(params, {"image_BYXZ": image_BYXZ, "w_BL": w_BL[:, :-1]})
            w_BL = w_BL.at[:, at].set(l_BNW[:, before + at].argmax(-1))
        return w_BL

    parts["baseline"] = {"accuracy": tasks.always(parts["evaluation"], W=len(letters))}
    parts["guess"] = {"accuracy": "always the evaluation's most frequent letter"}
    task = tasks.of_words(settings, model, logits, few=True, layout=layout, **parts)
    lines = [*data.said.splitlines(), f"captions of {patches} patches and up to {w_CL.shape[1]} letters"]
    show = functools.partial(figures, settings, data, task, jax.jit(written), (letters, w_CL))
    return run.Work(task, show, lambda *inputs: logits(*inputs)[0], lines=lines, data_sha256=data.sha256)


def figures(
    settings, data: images.Images, task: train_step.Task, written, words, params: Any, folder: pathlib.Path, rows
):
    """Loss curves, what was written under held-out images, and the share of names without a wrong letter."""
    from experiments.figures import plots  # matplotlib, only where something is drawn

    letters, w_CL = words
    found = [np.asarray(written(params, task.evaluation[i]["image_BYXZ"])) for i in range(len(task.evaluation))]
    both = w_CL[data.evaluation_label_B], np.concatenate(found)
    truth, names = (["".join(letters[w] for w in w_L).partition("\n")[0] for w_L in w_BL] for w_BL in both)
    pairs = list(zip(truth, names, strict=False))  # the last batch is filled up
    right = sum(a == b for a, b in pairs) / len(pairs)
    lines = [f"{a}: {b}" for a, b in sorted(pairs[:SHOWN], key=lambda pair: pair[0] == pair[1])]
    disk.write(folder / "captions.txt", "\n".join(["class: what the model wrote", *lines, ""]).encode())
    title = f"{settings.experiment}: {data.name}, {right:.1%} of the names right"
    yield {"eval/names_right": right}
    yield plots.loss_curves(folder / "figures" / "loss.png", rows, unit="nats per letter", title=title)
    yield folder / "captions.txt"
