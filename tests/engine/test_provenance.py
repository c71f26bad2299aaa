"""Provenance: the commit, whether it was edited, the user's own files, the data and the processor."""

import hashlib
import platform
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import tiny

from experiments.data import files, images, text
from experiments.engine import by_name, config, config_file, mesh, workdir
from tfm import mlp
from tfm.attention import score

HASH = "[0-9a-f]{40}"


def test_the_commit_is_that_of_the_code(monkeypatch):
    assert re.fullmatch(rf"|{HASH}(-dirty\.[0-9a-f]{{16}})?", workdir.describe_commit())
    monkeypatch.setenv("PATH", "")
    assert workdir.read_commit.__wrapped__() == ("", b"")  # no git here


@pytest.mark.skipif(not shutil.which("git"), reason="there is no git here")
def test_a_commit_whose_files_were_edited_says_so(tmp_path, monkeypatch):
    """The digest is that of `git diff HEAD`: untracked files do not count."""

    def git(*command):
        who = ["-c", "user.name=me", "-c", "user.email=me@here"]
        return subprocess.run(["git", *who, *command], cwd=tmp_path, check=True, capture_output=True).stdout

    monkeypatch.setattr(workdir, "__file__", str(tmp_path / "code.py"))

    def commit():
        return workdir.read_commit.__wrapped__()[0]

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
    (dirty, changes), right = workdir.read_commit.__wrapped__(), git("diff", "HEAD")
    assert dirty == f"{clean}-dirty.{hashlib.sha256(right).hexdigest()[:16]}" and changes == right
    assert b"+a = 2" in changes and b"b = 1" not in changes
    git("add", "code.py")
    assert commit() == dirty
    (tmp_path / "code.py").write_text("a = 3\n")
    assert commit() not in (dirty, clean)


# The user's own files


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A folder with files of the user's own, in which modules are found."""
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("of_mine")]:
        del sys.modules[name]


def test_the_config_file_and_the_modules_that_were_imported_are_the_sources(own):
    package = own / "of_mine_all"
    package.mkdir()
    beside = own / "of_mine_beside.py"
    beside.write_text("")
    for file in (own / "of_mine.py", package / "__init__.py", package / "arms.py", own / "of_mine_too.py"):
        code = "from tfm import mlp\nfrom tfm.attention import score\n\nmine, other = score.tied, mlp.relu\n"
        file.write_text("import of_mine_beside\n" + code)
    arms = [["a", {"model.score": "of_mine_all.arms:mine"}], ["b", {"model": {"mlp": "of_mine_too:other"}}]]
    file = tiny.config_file(own, "ablation", study__experiment="vision", model__score="of_mine:mine", study__arms=arms)
    loaded = config_file.load(file, base=tiny.base.get_config)
    settings = config.Settings(loaded, config_file.defaults(loaded, tiny.base.get_config), file=file)
    of_config = {own / "ablation_config.py": "ablation_config.py"}
    assert settings.sources() == of_config  # nothing is imported yet
    for name in ("of_mine:mine", "of_mine_all.arms:mine"):
        by_name.choose("score", name, by_name.candidates(score))
    sources = {own / "of_mine.py": "of_mine.py", package / "arms.py": "of_mine_all.arms.py"}
    sources |= {package / "__init__.py": "of_mine_all.py", beside: "of_mine_beside.py"}  # which these have imported
    assert settings.sources() == of_config | sources
    by_name.choose("mlp", "of_mine_too:other", by_name.candidates(mlp))
    sources |= {own / "of_mine_too.py": "of_mine_too.py"}
    assert settings.sources() == of_config | sources
    saved = config.Settings(loaded, config_file.defaults(loaded, tiny.base.get_config), file=str(own / "config.json"))
    assert saved.sources() == sources  # what a config in JSON says is in the run's own
    assert config.Settings(loaded, config_file.defaults(loaded, tiny.base.get_config)).sources() == sources


def test_configs_of_the_project_that_one_of_them_begins_with_are_not_the_users_own():
    file = by_name.ROOT / "configs" / "contradictions_small.py"
    loaded = config_file.load(str(file), base=tiny.base.get_config)
    defaults = config_file.defaults(loaded, tiny.base.get_config)
    assert config.Settings(loaded, defaults, file=str(file)).sources() == {file: file.name}


def test_the_first_source_stays_if_a_run_is_resumed_with_another_file(tmp_path, capsys):
    """Copies are kept of the user's files, and of the edits of ours; the SHA-256 says which one ran."""
    file, folder, digests = tmp_path / "mine.py", tmp_path / "run", {}
    for content in ("a = 1", "a = 1", "a = 2", "a = 1"):
        file.write_text(content)
        digest = hashlib.sha256(content.encode()).hexdigest()
        name = "mine.py" if content == "a = 1" else f"mine.{digest[:8]}.py"
        digests[name] = digest
        assert workdir.keep_sources(folder, {file: "mine.py"}) == {name: digest}
        assert (folder / "source" / name).read_text() == content
    (line,) = capsys.readouterr().out.splitlines()
    assert (
        "mine.py" in line and name in line and digests.keys() == {path.name for path in (folder / "source").iterdir()}
    )
    assert workdir.keep_sources(folder, {tmp_path / "gone.py": "gone.py"}, b"+a").keys() == {"checkout.diff"}
    assert (folder / "source" / "checkout.diff").read_bytes() == b"+a"


# The data, and the machine


def test_the_digest_of_data_depends_on_their_content_only(tmp_path):
    """Texts and images have the same digest in any folder, and another one if a letter or a pixel differs."""

    def of_text(folder, content):
        folder.mkdir()
        (folder / "text.txt").write_bytes(content)
        return text.load(str(folder / "text.txt")).sha256

    contents = tiny.TEXT, tiny.TEXT, b"x" + tiny.TEXT
    one, same, other = (of_text(tmp_path / name, c) for name, c in zip("abc", contents, strict=True))
    assert one == same != other and re.fullmatch("[0-9a-f]{64}", one)
    digits = images.load("digits")
    lighter = digits._replace(train_image_BYXZ=digits.train_image_BYXZ ^ 1)
    swapped = digits._replace(train_label_B=digits.evaluation_label_B, evaluation_label_B=digits.train_label_B)
    assert len({digits.sha256, images.load("digits").sha256, lighter.sha256, swapped.sha256}) == 3
    row, column = np.zeros((1, 4), np.uint8), np.zeros((4, 1), np.uint8)
    assert len({files.sha256(one) for one in (row, column, row.view(np.int32), row.astype(np.int8), "\0" * 4)}) == 5


def test_the_processor_has_a_name_with_and_without_proc_cpuinfo(monkeypatch):
    assert mesh.processor() and "\n" not in mesh.processor()
    assert f" on cpu ({mesh.processor()}): " in mesh.describe(mesh.make(data=1))
    monkeypatch.setattr(mesh.pathlib.Path, "read_text", lambda *_, **__: "processor : 0\nmodel name\t: A  B 7\n")
    assert mesh.processor.__wrapped__() == "A  B 7"
    monkeypatch.setattr(mesh.pathlib.Path, "read_text", lambda *_, **__: "Hardware : arm")
    assert mesh.processor.__wrapped__() == (platform.processor() or platform.machine()) != ""
