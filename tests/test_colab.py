"""Packages of Colab's image: its published list becomes constraints for pip, and our version bounds admit them."""

import pathlib
import runpy
import subprocess
import sys
import tomllib

import pytest
from packaging import requirements, utils

ROOT = pathlib.Path(__file__).parent.parent
SCRIPT = ROOT / ".ci/colab.py"
LIST = """\
# Do not modify this file
seven==7.0.1

-e git+https://example.org/own@c0ffee#egg=own
Torch_3 @ https://example.org/whl/torch_3-2.9.0%2Bcpu-cp313-cp313-linux_x86_64.whl#sha256=11
source @ file:///dist/source-1.0.0.tar.gz
late.rc1==0.3rc1
"""


def test_constraints_have_every_version_of_a_list():
    lines = runpy.run_path(SCRIPT)["constraints"](LIST, "2003-02-01").splitlines()
    assert [line for line in lines if not line.startswith("#")] == [
        "seven==7.0.1",
        "Torch_3==2.9.0+cpu",
        "late.rc1==0.3rc1",
    ]
    header = " ".join(line for line in lines if line.startswith("#"))
    assert "image of 2003-02-01" in header and "address: Torch_3." in header and "version: own, source." in header


@pytest.mark.parametrize(
    "text, date, sentence",
    [
        (LIST, "1 February", "Invalid isoformat string: '1 February'"),
        ("<html>", "2003-02-01", "Expected package name"),
        ("# empty\n", "2003-02-01", "no line of the form name==version"),
    ],
)
def test_an_invalid_list_or_date_is_an_error_and_writes_no_file(text, date, sentence, tmp_path):
    script = tmp_path / "colab.py"
    script.write_bytes(SCRIPT.read_bytes())
    (tmp_path / "list.txt").write_text(text)
    process = subprocess.run([sys.executable, script, tmp_path / "list.txt", date], capture_output=True, text=True)
    assert process.returncode == 1 and sentence in process.stderr and "Traceback" not in process.stderr
    assert not list(tmp_path.glob("colab-*"))


def test_the_image_meets_every_bound():
    """Hence pip does not replace a package of the image."""
    (image,) = ROOT.glob(".ci/colab-*.txt")
    lines = [line.split("==") for line in image.read_text().splitlines() if not line.startswith("#")]
    version = {utils.canonicalize_name(name): version for name, version in lines}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    bounds = [
        requirements.Requirement(b) for b in sum(project["optional-dependencies"].values(), project["dependencies"])
    ]
    common = [requirement for requirement in bounds if utils.canonicalize_name(requirement.name) in version]
    assert {"jax", "flax", "absl-py", "tokenizers", "pytest"} <= {requirement.name for requirement in common}
    assert not [
        f"{b}: {version[utils.canonicalize_name(b.name)]}"
        for b in common
        if version[utils.canonicalize_name(b.name)] not in b.specifier
    ]
