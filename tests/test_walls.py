"""Rules on imports between packages, and functions that only some files may use. The test parses the source files."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PURE = set("jax numpy math functools itertools operator typing collections dataclasses concurrent zlib re tfm".split())
NEVER = ("pickle", "cloudpickle", "dill", "tensorflow")
OUTSIDE = ("tests", "docs", ".ci")  # these may use everything that a user may use
DEVICES = {"shard_map", "distributed", "devices", "local_devices", "__version__", "version"}  # attributes of jax
ALLOWED_USES = {  # {file: the attributes of DEVICES that it may use}
    "experiments/devices/mesh.py": DEVICES,
    "experiments/devices/distributed.py": {"distributed", "devices"},
    "experiments/devices/compilation.py": {"devices", "__version__"},
}
# disk.open_regular refuses pipes and devices, for which all other functions may wait for ever. Only these files of
# experiments/ may use others, for files that are not the user's.
MAY_OPEN = tuple(
    f"experiments/{file}.py" for file in ("config/disk", "devices/mesh", "devices/distributed", "ablation")
)
MAY_OPEN += ("experiments/command.py",)  # /dev/null
OPENERS = (".read_bytes", ".read_text", ".fromfile", ".loadtxt", ".genfromtxt")
FLOORS = (  # packages of experiments/, lowest first; a file in experiments/ counts as a package
    {"config"},
    {"devices"},
    {"folder"},
    {"engine"},
    {"dry_run", "data", "figures"},
    {"model"},
    {"pretrained"},
    {"studies"},
    set(),  # all others are experiments
    {"tools"},
)


def find_floor(package: str) -> int:
    return next((i for i, packages in enumerate(FLOORS) if package in packages), FLOORS.index(set()))


def list_imports(tree: ast.AST) -> set[str]:
    """Return the imported names: a.b and a.c for `from a import b, c`."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{name.name}" for name in node.names}
        elif isinstance(node, ast.Import):
            names |= {name.name for name in node.names}
    return names


def find_faults(path: str, source: str) -> set[str]:
    """Return the forbidden imports and uses in a file. path: relative to the project's root."""
    tree, (package, *rest) = ast.parse(source), path.removesuffix(".py").split("/")
    forbidden = set() if package in OUTSIDE else DEVICES - ALLOWED_USES.get(path, set())
    result = set()
    own = "tools" if rest[-1:] == ["__main__"] else rest[0] if rest else ""  # a package's command is a tool
    for name in list_imports(tree):
        top, *inner = name.split(".")
        second = inner[0] if inner else ""
        if package == "tfm" and top not in PURE and (top, path) != ("flax", "tfm/as_flax.py"):
            result.add(f"tfm imports {top}")
        if (
            find_floor(own) <= find_floor("engine")
            and package == "experiments"
            and top == "tfm"
            and second not in ("shapes", "layout", "mup")
        ):
            result.add(f"the engine imports {name}")
        if package == top == "experiments" and own != second and find_floor(second) >= find_floor(own):
            result.add(f"imports {name}")
        if top in NEVER or (top == "configs" and package not in ("launch", "configs", *OUTSIDE)):
            result.add(f"imports {top}")
        if top == "jax" and inner[-1:] and inner[-1] in forbidden:
            result.add(f"touches {name}")
        if name.startswith("jax._src") or name == "contextvars.ContextVar" or name == "contextvars":
            result.add(f"imports {top}")
        if package == "tests" and top.startswith("test_"):
            result.add(f"imports the test file {top}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "jax" and node.attr in forbidden:
            result.add(f"touches jax.{node.attr}")
        if package == "tfm" and getattr(node, "id", "") in ("print", "open"):
            result.add(f"tfm uses {node.id}")
        name = ast.unparse(node) if isinstance(getattr(node, "ctx", None), ast.Load) else ""
        if name.endswith(OPENERS) and name != "disk.read_bytes" or name in ("open", "os.open"):
            result |= {f"opens a file by {name}"} if package == "experiments" and path not in MAY_OPEN else set()
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            result.add("has a bare except")
        if "pmap" in (getattr(node, "id", ""), getattr(node, "attr", "")):
            result.add("uses pmap")
        if isinstance(node, ast.keyword) and node.arg == "check_vma" and getattr(node.value, "value", None) is not True:
            result.add("switches check_vma off")
    return result


PACKAGES = ("tfm", "experiments", "configs", "benchmarks", "docs", ".ci", "tests")
FILES = {
    str(file.relative_to(ROOT)): file.read_text(encoding="utf-8")
    for file in [ROOT / "launch.py", *(file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py")))]
}


def test_no_file_has_a_forbidden_import_or_use():
    assert "tfm/shapes.py" in FILES
    assert {path: find_faults(path, text) for path, text in FILES.items() if find_faults(path, text)} == {}


def test_tests_mirror_the_packages():
    """Each folder of tests has the name of a package. The other test files are about the whole project."""
    packages = {path.parent.name for path in map(pathlib.Path, FILES) if path.parts[0] in ("tfm", "experiments")}
    folders = {path.parts[1] for path in map(pathlib.Path, FILES) if path.match("tests/*/test_*.py")}
    assert folders <= packages | {"benchmarks"} and {"tfm", "engine", "experiments"} <= folders
    project_tests = {f"tests/test_{name}.py" for name in ("walls", "docs", "golden", "notebook", "colab")}
    assert {path for path in FILES if path.startswith("tests/test_")} <= project_tests


def test_every_test_file_is_collected(request, collected_files):
    """Pytest skips folders of some names, such as build. Checked below the arguments of the command: all of tests/."""
    paths = [pathlib.Path(argument.partition("::")[0]).absolute() for argument in request.config.args]
    expected = {file for path in paths for file in ([path] if path.is_file() else path.rglob("test_*.py"))}
    assert expected - collected_files == set() and pathlib.Path(__file__) in collected_files


@pytest.mark.parametrize(
    ("path", "source", "fault"),
    [
        ("tfm/a.py", "def f():\n    from flax import struct", "tfm imports flax"),
        ("tfm/a.py", "import os.path", "tfm imports os"),
        ("tfm/a.py", "x = open('x')", "tfm uses open"),
        ("experiments/engine/step.py", "from tfm import attention", "the engine imports tfm.attention"),
        ("experiments/engine/step.py", "from experiments import vision", "imports experiments.vision"),
        ("experiments/folder/log.py", "from experiments.engine import loop", "imports experiments.engine.loop"),
        ("experiments/vision.py", "import experiments.language.x", "imports experiments.language.x"),
        ("experiments/vision.py", "from configs import base", "imports configs"),
        ("tests/a.py", "import pickle", "imports pickle"),
        ("experiments/engine/step.py", "import jax\njax.shard_map(f)", "touches jax.shard_map"),
        ("experiments/engine/loop.py", "from jax import distributed", "touches jax.distributed"),
        ("tests/a.py", "jax.pmap(f)", "uses pmap"),
        ("tests/a.py", "f(check_vma=False)", "switches check_vma off"),
        ("tests/test_a.py", "from test_b import f", "imports the test file test_b"),
        ("experiments/folder/log.py", "try:\n    f()\nexcept:\n    pass", "has a bare except"),
        ("experiments/folder/log.py", "from contextvars import ContextVar", "imports contextvars"),
        ("tfm/a.py", "from jax._src import core", "imports jax"),
        ("experiments/data/a.py", "f = functools.partial(open, 'x')", "opens a file by open"),
        ("experiments/data/a.py", "file.read_bytes()", "opens a file by file.read_bytes"),
        # allowed imports and uses
        ("experiments/data/a.py", "model = open_model.open(disk.read_bytes(x))\nclass A:\n    open: int", None),
        ("experiments/engine/step.py", "from tfm import shapes\nimport tfm.shapes", None),
        (
            "experiments/vision.py",
            "from experiments.model import model\nfrom experiments.engine import step\nimport tfm",
            None,
        ),
        ("experiments/devices/mesh.py", "jax.shard_map(f, check_vma=True)\njax.devices()\njax.__version__", None),
        ("tfm/as_flax.py", "from flax import nnx", None),
        ("tests/a.py", "import jax\nfrom configs import base\njax.devices()", None),
    ],
)
def test_a_forbidden_import_or_use_is_reported_and_an_allowed_one_is_not(path, source, fault):
    assert find_faults(path, source) == ({fault} if fault else set())
