"""Write an HTML page that shows what each head attends to, in a model of texts or a classifier of images.

python -m experiments.tools.attention --checkpoint=DIR --prompt='The king is in the' --output=attention.html
python -m experiments.tools.attention --checkpoint=DIR --file=digit.png --output=attention.html
attention.run("DIR", prompt="The king is in the", output="attention.html")

The page is one file with the weights of all layers and heads, and loads nothing. The tool prints the mean weight of
each head on the previous token, the token itself, the next and the first one, and its mean entropy in nats.
"""

import base64
import functools
import pathlib

import jax
import jinja2
import numpy as np

from experiments import command as commands
from experiments.config import disk, errors
from experiments.data import image_file
from experiments.folder import log
from experiments.pretrained import trained
from experiments.studies import tables
from experiments.tools import prompts
from tfm import inside

MOST = 24_000_000  # weights of a page, a byte each
LEVELS = 255  # the largest byte
RELATIONS = ("previous", "itself", "next", "first")
HELP = {
    "prompt": "The text, or token ids such as '0 1 2' if the model has no tokenizer.",
    "file": "The image, for a classifier of images.",
    "output": "A new .html file for the page.",
}


def run(
    checkpoint: commands.Path,
    *,
    prompt: str = "",
    file: commands.Path = "",
    output: commands.Path = "",
    trust: tuple[str, ...] = (),
    device: str = "any",
    workdir: commands.Path = "",
) -> str:
    """Print and return a table of the attention of each head on `prompt`, or on the image `file`.

    Its columns are the mean weight on the previous token, the token itself, the next and the first, and the entropy.
    output: the HTML page to write, if any. workdir: a folder, which gets the table as attention.txt.
    """
    out, page = commands.output(workdir, "attention.txt"), commands.new_file(output, "--output", ".html")
    model = commands.load(checkpoint, trust, device)
    A_MHNN, names, lines = look(model, prompt, file)
    scores = measure(A_MHNN)
    lines.append(tables.align(tabulate(scores)))
    if page:
        html = render(f"{model.path}", A_MHNN, names, scores)
        disk.write_new(page, html.encode(errors="backslashreplace"))
        lines.append(f"wrote {page}: {disk.size(len(html))}")
    return commands.report("\n".join(lines), out)


def look(model: trained.Trained, prompt: str, file: commands.Path) -> tuple[np.ndarray, list[str], list[str]]:
    """Return the attention weights A_MHNN, the names of the tokens, and lines about the image; [] for a prompt.

    file: the image for an image model; other models read the prompt. Raises UserError for another kind of model, for a
    wrong or missing input, and for more than MOST weights.
    """
    kinds = [kind for kind in trained.HEADS if kind != "prefix"]  # whose attention depends on where a prefix ends
    trained.check_kind(model, *kinds, "image", needs_head=False)
    is_image = model.kind == "image"
    flags = ("--file", "--prompt") if is_image else ("--prompt", "--file")
    unused = str(prompt if is_image else file)
    errors.refuse((unused, f"the model in {model.path} {trained.DOES[model.kind]}. Give {flags[0]}, not {flags[1]}."))
    if is_image:
        commands.require("--file=digit.png", file)
        inputs, line = image_file.read(pathlib.Path(file).expanduser(), model.image_format)
        rows, columns = (side // model.facts["patch"] for side in inputs.shape[1:3])
        names, lines = [f"{y + 1},{x + 1}" for y, x in np.ndindex(rows, columns)], [line]
    else:
        id_N, names = prompts.read_prompt(model, prompt)
        inputs, lines = id_N[None], []
    compute = functools.partial(model.compute, jax.device_put(model.params), inputs, names=("A",), output="features")
    M, _, H, N, _ = jax.eval_shape(compute)[1]["A"].shape
    size = f"{M} layers, {H} heads and {N} tokens have {M * H * N * N:,} weights, more than {MOST:,}"
    remedy = "Choose a model with fewer patches" if is_image else "Shorten the --prompt"
    errors.refuse((M * H * N * N > MOST, f"{size}. {remedy}."))
    names = ["class"] * (N - len(names)) + names  # the class token of an image comes first
    return jax.device_get(compute()[1]["A"])[:, 0], names, lines


def measure(A_MHNN: np.ndarray) -> dict[str, np.ndarray]:
    """Return {name: (M, H)}: the mean weight on the tokens "previous", "itself", "next", "first"; "entropy" in nats."""
    # In a text of period 0, the same token one period earlier is the token itself, and the next one followed it.
    scores = inside.head_scores(A_MHNN[:, None], period=0)
    means = [scores["previous"], scores["duplicate"], scores["induction"], A_MHNN[..., 0].mean(-1)]
    return dict(zip((*RELATIONS, "entropy"), jax.device_get([*means, scores["entropy"]]), strict=True))


def choose_relation(scores: dict[str, np.ndarray], m: int, h: int) -> str:
    """Return the one of RELATIONS that has the largest mean weight in head h of layer m; of equals the first."""
    return max(RELATIONS, key=lambda name: np.nan_to_num(scores[name][m, h]))


def tabulate(scores: dict[str, np.ndarray]) -> tables.Table:
    """Return a table with a row for each head of each layer. scores: {name: x_MH}, the result of `measure`."""
    rows = []
    for m, h in np.ndindex(scores["first"].shape):
        numbers = (f"{x_MH[m, h]:z.3f}".replace("nan", tables.NONE) for x_MH in scores.values())
        rows.append([f"{m + 1}", f"{h + 1}", choose_relation(scores, m, h), *numbers])
    return tables.Table(["layer", "head", "most attended", *scores], rows)


def render(title: str, A_MHNN: np.ndarray, names: list[str], scores: dict[str, np.ndarray]) -> str:
    """Return the HTML of the page. A weight is a byte, in units of the largest weight / LEVELS; negative ones become 0.

    names: of the tokens. scores: {name: (M, H)}, the result of `measure`.
    """
    M, H, N, _ = A_MHNN.shape
    unit = max(float(A_MHNN.max()), 1e-9) / LEVELS
    weights = np.rint(A_MHNN / unit).clip(0, LEVELS).astype(np.uint8)
    heads = [(choose_relation(scores, m, h), m, h) for m, h in np.ndindex(M, H)]
    data = {"M": M, "H": H, "unit": unit, "names": names, "weights": base64.b64encode(weights).decode()}
    data["relations"] = [f"{name} token {scores[name][m, h]:.2f}" for name, m, h in heads]
    loader = jinja2.FileSystemLoader(pathlib.Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.get_template("attention.html.j2").render(title=title.translate(log.CONTROL), data=data, N=N)


if __name__ == "__main__":
    commands.main(run, HELP)
