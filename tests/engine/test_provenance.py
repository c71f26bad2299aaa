"""Provenance: the commit and its edits, the user's own files, the data and the processor."""

import functools
import hashlib
import platform
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import tiny

from experiments.config import by_name, files as config_files, settings as configs
from experiments.data import files as data_files, images, text
from experiments.devices import mesh as meshes
from experiments.folder import workdir as workdirs
from tfm import mlp
from tfm.attention import score

HASH = "[0-9a-f]{40}"


def test_the_commit_is_a_hash_or_empty_without_git(monkeypatch):
    assert re.fullmatch(rf"|{HASH}(-dirty\.[0-9a-f]{{16}})?", workdirs.read_commit()[0])
    monkeypatch.setenv("PATH", "")
    assert workdirs.read_commit.__wrapped__() == ("", b"")  # git is not on the PATH


@pytest.mark.skipif(not shutil.which("git"), reason="there is no git here")
def test_the_commit_of_an_edited_checkout_has_a_digest_of_the_edits(tmp_path, monkeypatch):
    """The digest is that of `git diff HEAD`: untracked files do not count."""

    def git(*command):
        identity = ["-c", "user.name=me", "-c", "user.email=me@here"]
        return subprocess.run(["git", *identity, *command], cwd=tmp_path, check=True, capture_output=True).stdout

    monkeypatch.setattr(workdirs, "__file__", str(tmp_path / "code.py"))

    def commit():
        return workdirs.read_commit.__wrapped__()[0]

    assert commit() == ""  # not a checkout
    git("init", "-q")
    (tmp_path / "code.py").write_text("a = 1\n")
    git("add", "code.py")
    assert commit() == ""  # nothing is committed
    git("commit", "-qm", "a")
    (tmp_path / "mine.py").write_text("b = 1\n")
    clean = commit()
    assert re.fullmatch(HASH, clean)
    (tmp_path / "code.py").write_text("a = 2\n")
    (dirty, changes), diff = workdirs.read_commit.__wrapped__(), git("diff", "HEAD")
    assert dirty == f"{clean}-dirty.{hashlib.sha256(diff).hexdigest()[:16]}" and changes == diff
    assert b"+a = 2" in changes and b"b = 1" not in changes
    git("add", "code.py")
    assert commit() == dirty
    (tmp_path / "code.py").write_text("a = 3\n")
    assert commit() not in (dirty, clean)


# The user's own files


@pytest.fixture
def user_folder(tmp_path, monkeypatch):
    """Return a folder on sys.path for modules of the user."""
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("of_mine")]:
        del sys.modules[name]


def test_the_config_file_and_the_modules_that_were_imported_are_the_sources(user_folder):
    package = user_folder / "of_mine_all"
    package.mkdir()
    imported_file = user_folder / "of_mine_beside.py"
    imported_file.write_text("")
    code = "from tfm import mlp\nfrom tfm.attention import score\n\nmine, other = score.tied, mlp.relu\n"
    for name in ("of_mine.py", "of_mine_all/__init__.py", "of_mine_all/arms.py", "of_mine_too.py"):
        (user_folder / name).write_text("import of_mine_beside\n" + code)
    arms = [["a", {"model.score": "of_mine_all.arms:mine"}], ["b", {"model": {"mlp": "of_mine_too:other"}}]]
    file = tiny.config_file(
        user_folder, "ablation", study__experiment="vision", model__score="of_mine:mine", study__arms=arms
    )
    config = config_files.load(file)
    make_settings = functools.partial(configs.Settings, config)
    settings = make_settings(file=file)
    config_source = {user_folder / "ablation_config.py": "ablation_config.py"}
    assert settings.sources() == config_source  # nothing is imported yet
    for name in ("of_mine:mine", "of_mine_all.arms:mine"):
        by_name.choose("score", name, by_name.candidates(score))
    sources = {user_folder / "of_mine.py": "of_mine.py", package / "arms.py": "of_mine_all.arms.py"}
    sources |= {package / "__init__.py": "of_mine_all.py", imported_file: "of_mine_beside.py"}  # imported by arms.py
    assert settings.sources() == config_source | sources
    by_name.choose("mlp", "of_mine_too:other", by_name.candidates(mlp))
    sources |= {user_folder / "of_mine_too.py": "of_mine_too.py"}
    assert settings.sources() == config_source | sources
    # The run's config.json has the content of a JSON config.
    assert make_settings(file=str(user_folder / "config.json")).sources() == make_settings().sources() == sources


def test_project_configs_that_a_config_imports_are_not_sources_of_the_user():
    file = by_name.ROOT / "configs" / "contradictions_small.py"
    config = config_files.load(str(file))
    assert configs.Settings(config, file=str(file)).sources() == {file: file.name}


def test_the_first_source_stays_if_a_run_is_resumed_with_another_file(tmp_path, capsys):
    """A run copies the user's files and the edits of the checkout. The SHA-256 tells which version ran."""
    file, folder, digests = tmp_path / "mine.py", tmp_path / "run", {}
    for content in ("a = 1", "a = 1", "a = 2", "a = 1"):
        file.write_text(content)
        digest = hashlib.sha256(content.encode()).hexdigest()
        name = "mine.py" if content == "a = 1" else f"mine.{digest[:8]}.py"
        digests[name] = digest
        assert workdirs.keep_sources(folder, {file: "mine.py"}) == {name: digest}
        assert (folder / "source" / name).read_text() == content
    (line,) = capsys.readouterr().out.splitlines()
    assert "mine.py" in line and name in line
    assert digests.keys() == {path.name for path in (folder / "source").iterdir()}
    assert workdirs.keep_sources(folder, {tmp_path / "gone.py": "gone.py"}, b"+a").keys() == {"checkout.diff"}
    assert (folder / "source" / "checkout.diff").read_bytes() == b"+a"


# The data and the machine


def test_the_digest_of_data_depends_on_their_content_only(tmp_path):
    """Texts and images have the same digest in every folder, and another digest if a letter or a pixel differs."""

    def digest_of_text(folder, content):
        folder.mkdir()
        (folder / "text.txt").write_bytes(content)
        return text.load(str(folder / "text.txt")).sha256

    contents = tiny.TEXT, tiny.TEXT, b"x" + tiny.TEXT
    first, same, different = (digest_of_text(tmp_path / name, c) for name, c in zip("abc", contents, strict=True))
    assert first == same != different and re.fullmatch("[0-9a-f]{64}", first)
    digits = images.load("digits")
    lighter = digits._replace(train_image_BYXZ=digits.train_image_BYXZ ^ 1)
    swapped = digits._replace(train_label_B=digits.evaluation_label_B, evaluation_label_B=digits.train_label_B)
    assert len({digits.sha256, images.load("digits").sha256, lighter.sha256, swapped.sha256}) == 3
    row, column = np.zeros((1, 4), np.uint8), np.zeros((4, 1), np.uint8)
    others = row.view(np.int32), row.astype(np.int8), "\0" * 4
    assert len({data_files.sha256(one) for one in (row, column, *others)}) == 5


def test_the_processor_has_a_name_with_and_without_proc_cpuinfo(monkeypatch):
    assert meshes.processor() and "\n" not in meshes.processor()
    assert f" on cpu ({meshes.processor()}): " in meshes.describe(meshes.make(data=1))
    monkeypatch.setattr(meshes.pathlib.Path, "read_text", lambda *_, **__: "processor : 0\nmodel name\t: A  B 7\n")
    assert meshes.processor.__wrapped__() == "A  B 7"
    monkeypatch.setattr(meshes.pathlib.Path, "read_text", lambda *_, **__: "Hardware : arm")
    assert meshes.processor.__wrapped__() == (platform.processor() or platform.machine()) != ""
