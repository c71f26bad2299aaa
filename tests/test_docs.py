"""README.md and docs/: their commands are commands, their Python runs, and what they link to is there."""

import importlib
import importlib.util
import inspect
import pathlib
import re
import runpy
import shlex
import sys
import tomllib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags

import launch
from benchmarks import __main__ as benchmarks
from configs import base
from experiments.dry_run import topology
from experiments.engine import by_name, config, config_file

ROOT = pathlib.Path(__file__).parents[1]
PAGES = {file.relative_to(ROOT).as_posix(): file.read_text(encoding="utf-8") for file in ROOT.glob("docs/**/*.md")}
README = PAGES["README.md"] = (ROOT / "README.md").read_text(encoding="utf-8")
OWN = {file for page in PAGES.values() for file in re.findall(r"^```python\n# ([\w/]+\.py)\n", page, re.MULTILINE)}
SETTING = re.compile(r"--config\.([\w.]+)(?:=(.*))?", re.DOTALL)


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)


def commands(page: str) -> Iterator[list[str]]:
    """The words of every command, in blocks for a shell and in backquotes, without variables of the environment."""
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL))
    for line in "\n".join([*blocks(page, "bash"), *spans]).replace("\\\n", " ").splitlines():
        for part in re.split(r"&&|;", line.removesuffix(" ...")):
            if start := re.search(r"(?:^|[\s=])((?:python|pip|pytest)\s.*)", part):
                text = start[1] if start[1].count('"') % 2 == 0 else start[1].rstrip().removesuffix('"')
                yield shlex.split(text, comments=True)


ALL = sorted({tuple(words) for page in PAGES.values() for words in commands(page) if words != ["pip", "install"]})


def launched(words: list[str]) -> None:
    """The words behind launch.py: its flags, a config that is there, settings that it has (of one that a page shows,
    or whose experiment is of one's own, .ci/guides.py sees them)."""
    own = {flag.name for flag in flags.FLAGS.get_flags_for_module(launch)}
    options, changes, file = iter(words), [], "configs/vit.py"
    for word in options:
        if setting := SETTING.fullmatch(word):
            changes.append(setting.groups())
            continue
        name, _, value = word.removeprefix("--").partition("=")
        assert word.startswith("--") and name in own, f"launch.py has no flag {word}"
        if not value and name not in ("dry_run", "distributed"):
            value = next(options, "")
        file = value if name == "config" and value else file
    if file in OWN:
        return
    settings = config_file.load(str(ROOT / file), base=base.get_config)
    for key, value in changes:
        config.assign(settings, key, value)


def checked(words: list[str]) -> None:
    """Fails where the command cannot be meant: a flag, a file, an extra that is not there."""
    if words[0] == "pip":
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        assert words[1] == "install" and set(re.findall(r"\w+", words[-1])) <= project["optional-dependencies"].keys()
    elif words[0] == "pytest":
        assert all((ROOT / word).exists() for word in words[1:] if word.startswith("tests/"))
    elif words[1:3] == ["-m", "benchmarks"]:
        benchmarks.arguments(words[3:])
    elif words[1:3] == ["-m", "benchmarks.tpu_estimate"]:
        assert (ROOT / words[3]).is_file() and words[4] in topology.NAMES
    elif words[1] == "-m":
        names = inspect.signature(importlib.import_module(words[2]).run).parameters
        assert {word.partition("=")[0].removeprefix("--") for word in words[3:]} <= names.keys()
    elif words[1] == "launch.py":
        launched(words[2:])
    elif words[1] not in OWN:
        text = (ROOT / words[1]).read_text(encoding="utf-8")
        assert all(word in text for word in words[2:] if word.startswith("--"))


@pytest.mark.parametrize("words", ALL, ids=shlex.join)
def test_commands_are_commands(words: tuple[str, ...]) -> None:
    checked(list(words))


def test_all_kinds_of_commands_are_seen() -> None:
    modules = {words[2] for words in ALL if words[1:2] == ("-m",)}
    assert len(ALL) > 25 and {"benchmarks", "experiments.tools.sample", "experiments.tools.export"} <= modules
    assert {"pip", "pytest"} < {words[0] for words in ALL}


@pytest.mark.parametrize(
    "command",
    [
        "python launch.py --config configs/no.py",
        "python launch.py --config configs/vit.py --config.train.stepz=3",
        "python launch.py --config configs/vit.py --workdirs=a",
        "python -m experiments.tools.sample --checkpoint=a --length=3",
        "python -m benchmarks --only step_z",
    ],
)
def test_a_wrong_command_is_seen(command: str) -> None:
    with pytest.raises((Exception, SystemExit)):
        checked(next(commands(f"`{command}`")))


def test_settings_configs_tests_and_links_that_are_named_exist() -> None:
    every = set()
    for experiment in "language vision text_classification translation masked_image synthetic convolution".split():
        every |= config.flat(base.get_config("ablation", of=experiment).to_dict()).keys()
    every |= {key.rpartition(".")[0] for key in every}
    for name, page in PAGES.items():
        fields = re.findall(r"--config\.([a-z_]+(?:\.\w+)?)", page)
        fields += re.findall(r"`((?:model|train|text|image|pairs|mesh|optim)\.(?!txt|py|safetensors)\w+)`", page)
        own = re.findall(r'"(\w+)": ConfigDict', page)  # sections of an experiment that the page shows
        assert not {field for field in fields if field.partition(".")[0] not in own} - every, name
        assert all((ROOT / file).is_file() for file in re.findall(r"configs/\w+\.py", page)), name
        assert all(list(ROOT.glob(f"tests/**/{file}")) for file in re.findall(r"test_\w+\.py", page)), name
        for target in re.findall(r"\]\(([^)#]+)", page):
            assert "://" in target or ((ROOT / name).parent / target).exists(), f"{name}: {target}"
    pages = {name for name in PAGES if re.fullmatch(r"docs/\w+\.md", name)}
    assert {f"docs/{name}.md" for name in re.findall(r"\(docs/(\w+)\.md\)", README)} == pages


def test_names_of_other_projects_lead_to_the_settings_beside_them() -> None:
    part = PAGES["docs/configs.md"].partition("## If you come from")[2].partition("\n## ")[0]
    rows = [re.findall(r"`([\w.]+)`", line) for line in part.splitlines() if line.startswith("| `")]
    assert len(rows) == 16
    for ours, *theirs in rows:
        for name in theirs:
            assert by_name.translate_foreign(name) == [ours] or name in (ours, ours.partition(".")[2]), name


def test_the_library_as_readme_shows_it() -> None:
    """A language model, its gradient, and the same in Flax (which test_as_flax.py trains)."""
    score_of_ones_own, _, library, flax = blocks(README, "python")
    names: dict = {}
    exec(library, names)
    leaves = jax.tree.leaves(jax.device_get(names["gradient"]))
    assert len(leaves) > 8 and all(np.isfinite(leaf).all() and np.any(leaf != 0) for leaf in leaves)
    exec(flax, names)
    np.testing.assert_allclose(names["logits"], names["module"](jnp.zeros((3, 16), int)), rtol=1e-5, atol=1e-5)

    exec(score_of_ones_own, names)
    x_BND = jax.random.normal(jax.random.key(0), (2, 5, 6))
    drawn = names["turned"].init(jax.random.key(1), H=2, K=4, D=6, bias=False)
    logits_BHNS = np.einsum("bhnk,bhsk->bhns", *names["turned"].apply(drawn, x_BND, x_BND))
    np.testing.assert_allclose(logits_BHNS, -logits_BHNS.swapaxes(2, 3), atol=1e-5)


def test_python_of_all_pages_imports_what_is_there_and_their_configs_are_such(tmp_path: pathlib.Path) -> None:
    for block in (block for page in PAGES.values() for block in blocks(page, "python")):
        for module, names in re.findall(r"^from (\S+) import (.+)$", block, flags=re.MULTILINE):
            for name in re.sub(r" as \w+", "", names).split(", "):
                there = hasattr(importlib.import_module(module), name)
                assert there or importlib.util.find_spec(f"{module}.{name}")
    for page, experiment in (("docs/configs.md", "vision"), ("docs/studies.md", "ablation")):
        file = tmp_path / f"{experiment}.py"
        file.write_text(blocks(PAGES[page], "python")[0], encoding="utf-8")
        assert config_file.load(str(file), base=base.get_config).experiment == experiment


def test_the_page_of_the_mathematics_is_what_the_code_says() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "mathematics.py"))["text"]()
    assert PAGES["docs/mathematics.md"] == page, "python docs/mathematics.py makes it anew"
    table = re.findall(r"^\| (?:E\d+|  ) .*\| ([^|]+) \|$", page, flags=re.MULTILINE)
    files = {file for cell in table for file in re.findall(r"[\w/]+\.py", cell)}
    assert len(files) > 12
    assert not [file for file in files if not list(ROOT.glob(f"tfm/**/{file}")) and not (ROOT / file).is_file()]
    assert {f"E{n}" for n in range(1, 31)} <= set(re.findall(r"^\| (E\d+)", page, flags=re.MULTILINE))


def test_import_tfm_shows_what_there_is() -> None:
    import tfm

    assert {"attention", "block", "decode", "transformer"} <= set(dir(tfm)) and "flax" not in vars(tfm)
    assert sys.modules["tfm.transformer"] is tfm.transformer
