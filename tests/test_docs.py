"""README.md and docs/: commands parse, Python runs, and links have targets."""

import importlib
import importlib.util
import inspect
import os
import pathlib
import re
import runpy
import shlex
import sys
import tomllib
from collections.abc import Iterator

import jax
import numpy as np
import published
import pytest
import tiny
from absl import flags
from errors import raises

import launch
from benchmarks import __main__ as benchmarks, records
from configs import base
from experiments import command as tools, language
from experiments.config import by_name, errors, files as config_files, settings as configs
from experiments.dry_run import __main__ as dry_run_command, topology as topologies
from experiments.engine import run as runs
from experiments.pretrained import open_model
from tfm import shapes

ROOT = pathlib.Path(__file__).parents[1]
PAGES = {file.relative_to(ROOT).as_posix(): file.read_text(encoding="utf-8") for file in ROOT.glob("docs/**/*.md")}
README = PAGES["README.md"] = (ROOT / "README.md").read_text(encoding="utf-8")
PAGE_FILES = {
    file for page in PAGES.values() for file in re.findall(r"^```python\n# ([\w/]+\.py)\n", page, re.MULTILINE)
}
SETTING = re.compile(r"--config\.([\w.]+)(?:=(.*))?", re.DOTALL)


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)


def commands(page: str) -> Iterator[list[str]]:
    """Yield the arguments of every command in shell blocks and in backquotes, without environment variables."""
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL))
    for line in "\n".join([*blocks(page, "bash"), *spans]).replace("\\\n", " ").splitlines():
        for part in re.split(r"&&|;", line.removesuffix(" ...")):
            if start := re.search(r"(?:^|[\s=])((?:python|pip|pytest)\s.*)", part):
                text = start[1] if start[1].count('"') % 2 == 0 else start[1].rstrip().removesuffix('"')
                yield shlex.split(text, comments=True)


ALL = sorted({tuple(words) for page in PAGES.values() for words in commands(page) if words != ["pip", "install"]})


def check_launch(arguments: list[str]) -> None:
    """Check the arguments of launch.py: flags, a config file, its settings (.ci/guides.py runs the pages' configs)."""
    names = {flag.name for flag in flags.FLAGS.get_flags_for_module(launch)}
    options, changes, file = iter(arguments), [], "configs/vit.py"
    for option in options:
        if setting := SETTING.fullmatch(option):
            changes.append(setting.groups())
            continue
        name, _, value = option.removeprefix("--").partition("=")
        assert option.startswith("--") and name in names, f"launch.py has no flag {option}"
        if not value and name not in ("dry_run", "distributed"):
            value = next(options, "")
        file = value if name == "config" and value else file
    if file in PAGE_FILES:
        return
    settings = config_files.load(str(ROOT / file))
    for key, value in changes:
        configs.assign(settings, key, value)


def check(words: list[str]) -> None:
    """Fail if the command has an unknown flag, file or extra."""
    if words[0] == "pip":
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        assert words[1] == "install" and set(re.findall(r"\w+", words[-1])) <= project["optional-dependencies"].keys()
    elif words[0] == "pytest":
        assert all((ROOT / word).exists() for word in words[1:] if word.startswith("tests/"))
    elif words[1:3] == ["-m", "benchmarks"]:
        benchmarks.arguments(words[3:])
    elif words[1:3] == ["-m", "benchmarks.records"]:
        records.parse(words[3:])
    elif words[1:3] == ["-m", "benchmarks.tpu_estimate"]:
        assert words[3] == "--all" or by_name.CODE.fullmatch(words[3]) or (ROOT / words[3]).is_file()
        assert all(word in topologies.NAMES for word in words[4:5])
    elif words[1:3] == ["-m", "experiments.dry_run"]:
        values = tools.arguments(dry_run_command.run, dry_run_command.HELP, words[2:], positional="functions")
        assert all(map(by_name.CODE.fullmatch, values["functions"])) and values["topology"] in ["", *topologies.NAMES]
    elif words[1:] == ["-m", "experiments.tools"]:
        assert importlib.util.find_spec("experiments.tools.__main__")
    elif words[1] == "-m":
        names = tools.list_flags(importlib.import_module(words[2]).run)
        positional = {"runs": {"RUN"}, "table": {"results.csv", "OUT/records.csv", "DIR/runs.csv"}}
        names = {"--" + name for name in names}.union(*(positional.get(name, ()) for name in names))
        assert {word.partition("=")[0] for word in words[3:]} <= names
    elif words[1] == "launch.py":
        check_launch(words[2:])
    elif words[1] not in PAGE_FILES:
        text = (ROOT / words[1]).read_text(encoding="utf-8")
        assert all(word in text for word in words[2:] if word.startswith("--"))


@pytest.mark.parametrize("words", ALL, ids=shlex.join)
def test_commands_of_pages_are_valid(words: tuple[str, ...]) -> None:
    check(list(words))


def test_commands_of_every_kind_are_found() -> None:
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
def test_an_invalid_command_fails(command: str) -> None:
    with pytest.raises((Exception, SystemExit)):
        check(next(commands(f"`{command}`")))


def test_settings_configs_tests_and_links_exist() -> None:
    settings = set()
    for experiment in "language vision text_classification translation masked_image synthetic convolution".split():
        settings |= configs.flat(base.get_config("ablation", of=experiment).to_dict()).keys()
    settings |= {key.rpartition(".")[0] for key in settings}
    for name, page in PAGES.items():
        fields = re.findall(r"--config\.([a-z_]+(?:\.\w+)?)", page)
        fields += re.findall(r"`((?:model|train|text|image|pairs|mesh|optim)\.(?!txt|py|safetensors)\w+)`", page)
        sections = re.findall(r'"(\w+)": ConfigDict', page)  # sections of an experiment that the page shows
        assert not {field for field in fields if field.partition(".")[0] not in sections} - settings, name
        assert all((ROOT / file).is_file() for file in re.findall(r"configs/\w+\.py", page)), name
        assert all(list(ROOT.glob(f"tests/**/{file}")) for file in re.findall(r"test_\w+\.py", page)), name
        for target in re.findall(r"\]\(([^)#]+)", page):
            assert "://" in target or ((ROOT / name).parent / target).exists(), f"{name}: {target}"
    pages = {name for name in PAGES if re.fullmatch(r"docs/\w+\.md", name)}
    assert {f"docs/{name}.md" for name in re.findall(r"\(docs/(\w+)\.md\)", README)} == pages


def test_pages_are_two_clicks_from_readme_and_show_a_file_before_they_run_it() -> None:
    links = {name: set(re.findall(r"\]\(([^)#]+\.md)", page)) for name, page in PAGES.items()}
    near = links["README.md"]
    near = near | {
        os.path.normpath(pathlib.Path(name).parent / link) for name in near & links.keys() for link in links[name]
    }
    assert PAGES.keys() - near <= {"README.md"}
    lines = re.sub(r".*badge.*\n\n", "", README).splitlines()
    assert len(lines) <= 115 and max(map(len, lines)) <= 120
    for name, page in PAGES.items():
        for block in re.finditer(r"^```python\n# (\w+)\.py\n", page, re.MULTILINE):
            earlier = blocks(page[: block.start()], "bash")
            assert not re.search(rf"\b{block[1]}(\.py|:)", "".join(earlier)), f"{name}: {block[1]}"


def test_names_of_other_projects_lead_to_our_settings() -> None:
    section = PAGES["docs/configs.md"].partition("## What is it called in ")[2].partition("\n## ")[0]
    rows = [re.findall(r"`([\w.]+)`", line) for line in section.splitlines() if line.startswith("| `")]
    assert len(rows) == 16
    for our_name, *foreign in rows:
        for name in foreign:
            assert by_name.translate(name) == [our_name] or name in (our_name, our_name.partition(".")[2]), name


def test_the_library_and_the_score_in_readme(capsys: pytest.CaptureFixture) -> None:
    score, library = blocks(README, "python")
    names: dict = {}
    exec(library, names)
    assert re.fullmatch(r"[34]\.\d{3} nats per token\n", capsys.readouterr().out)
    leaves = jax.tree.leaves(jax.device_get(names["gradient"]))
    assert len(leaves) > 8 and all(np.isfinite(leaf).all() and np.any(leaf != 0) for leaf in leaves)

    exec(score, names)
    x_BND = jax.random.normal(jax.random.key(0), (2, 5, 6))
    params = names["rotated"].init(jax.random.key(1), H=2, K=4, D=6, bias=False)
    logits_BHNS = np.einsum("bhnk,bhsk->bhns", *names["rotated"].apply(params, x_BND, x_BND))
    np.testing.assert_allclose(logits_BHNS, -logits_BHNS.swapaxes(2, 3), atol=1e-5)


def test_arrays_of_another_program_become_a_run(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = [block for block in blocks(PAGES["docs/using_models.md"], "python") if "theirs.npz" in block]
    monkeypatch.chdir(tmp_path)
    run = published.write_run(pathlib.Path("runs/theirs"), "language", **{"model.M": 2, "model.H": 2, "model.K": 3})
    before = shapes.flat(open_model.open(run).params)
    expected = {path: np.float32(array[..., ::-1] + 1) for path, array in before.items()}
    theirs = dict(expected)
    theirs["words"], queries_MHKD = theirs.pop("embed/E_WD"), theirs.pop("blocks/score/Uq_HKD")
    theirs |= {f"layer.{m}.query": queries_MHKD[m].reshape(6, -1).T for m in range(2)}
    np.savez("theirs.npz", **theirs, more=np.zeros(3))
    with raises(errors.UserError, "theirs.npz", "more (3,) is left over"):
        exec(block, {})
    np.savez("theirs.npz", **theirs)
    exec(block, {})
    params = shapes.flat(open_model.open(run).params)
    assert params.keys() == expected.keys()
    for path, array in expected.items():
        np.testing.assert_array_equal(params[path], array, err_msg=path)


def test_the_experiment_with_given_word_vectors_freezes_them_and_counts_words(tmp_path, monkeypatch) -> None:
    pytest.importorskip("tokenizers", reason="a tokenizer of words needs the extra [text]")
    file, words = (block for block in blocks(PAGES["docs/using_models.md"], "python") if "words.json" in block)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    pathlib.Path("my_text.txt").write_text("the king reads and the king fights . " * 99, encoding="utf-8")
    exec(words, {})
    names: dict = {"__name__": "my_vectors"}
    exec(file, names)
    pathlib.Path("vectors.txt").write_text("4 8\n" + "".join(f"{w} {'0.5 ' * 8}\n" for w in "the king a b".split()))
    changes = {"text.source": "my_text.txt", "text.tokenizer": "words.json"}
    settings = tiny.settings("language", **changes)
    work = names["prepare"](settings, runs.make_mesh(settings))
    assert "2 vectors are used, 2 are of words that the vocabulary lacks, and 5 words of" in work.lines[-1]
    given_W = (work.params["embed/E_WD"] == 0.5).all(1)
    assert given_W.sum() == 2 and "embed/E_WD" in shapes.flat(jax.eval_shape(work.task.init, jax.random.key(0)))
    assert 'config.optim.frozen = ["embed/E_WD"]' in file
    with raises(errors.UserError, "vectors.txt", "model.D = 8, not 16"):
        names["prepare"](settings.replace({"model.D": 16}), runs.make_mesh(settings))


def test_imports_and_configs_of_pages_exist(tmp_path: pathlib.Path) -> None:
    for block in (block for page in PAGES.values() for block in blocks(page, "python")):
        for module, names in re.findall(r"^from (\S+) import (.+)$", block, flags=re.MULTILINE):
            for name in re.sub(r" as \w+", "", names).split(", "):
                assert hasattr(importlib.import_module(module), name) or importlib.util.find_spec(f"{module}.{name}")
    for page, experiment in (("docs/configs.md", "vision"), ("docs/studies.md", "ablation")):
        file = tmp_path / f"{experiment}.py"
        file.write_text(blocks(PAGES[page], "python")[0], encoding="utf-8")
        assert config_files.load(str(file)).experiment == experiment


def test_the_page_of_the_mathematics_is_up_to_date() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "mathematics.py"))["text"]()
    assert PAGES["docs/mathematics.md"] == page, "run python docs/mathematics.py"
    table = re.findall(r"^\| (?:E\d+|  ) .*\| ([^|]+) \|$", page, flags=re.MULTILINE)
    files = {file for cell in table for file in re.findall(r"[\w/]+\.py", cell)}
    assert len(files) > 12
    assert not [file for file in files if not list(ROOT.glob(f"tfm/**/{file}")) and not (ROOT / file).is_file()]
    assert {f"E{n}" for n in range(1, 31)} <= set(re.findall(r"^\| (E\d+)", page, flags=re.MULTILINE))


def test_the_page_of_parts_has_the_defaults_the_forms_and_the_arguments_of_the_code() -> None:
    rows = re.findall(
        r"^\| `(\w+)(?:\.(\w+))?` \|(?: `([^`]*)`)? \| (.*) \|$", PAGES["docs/extending.md"], re.MULTILINE
    )
    parts, fields = [row for row in rows if row[1]], tiny.fields()
    assert len(parts) == 18
    for section, name, default, form in parts:
        value = fields[f"{section}.{name}"]
        assert default.strip() == ("" if value == "" else str(value)), name
        for label, file in re.findall(r"as `(\w+)` in `([\w/]+)\.py`", form):
            assert hasattr(importlib.import_module(file.replace("/", ".")), label), file
    keywords = inspect.getfullargspec(language.prepare).kwonlyargs
    assert re.findall(r"^\| `(\w+)` \|.*\|$", PAGES["docs/extending.md"].split("As an argument")[1], re.M) == keywords


def test_import_tfm_shows_its_modules() -> None:
    import tfm

    assert {"attention", "block", "decode", "transformer"} <= set(dir(tfm)) and "flax" not in vars(tfm)
    assert sys.modules["tfm.transformer"] is tfm.transformer


def test_references_has_every_cited_work() -> None:
    """A citation is an author or two and a year: Su et al. 2021; Zhang and Sennrich 2019; (Turner 2023; E18)."""
    citation = re.compile(r"\b((?:[A-Z][a-z]+ Team|[A-Z][a-zé]+(?: and [A-Z][a-zé]+| et al\.)?) (?:19|20)\d\d)\b")
    sources = [file for folder in ("tfm", "experiments", "configs") for file in (ROOT / folder).rglob("*.py")]
    missing = {work for file in sources for work in citation.findall(file.read_text(encoding="utf-8"))}
    missing -= {work for work in missing if work in PAGES["docs/references.md"]}
    assert not missing
