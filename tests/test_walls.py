"""The walls between the rooms: who may import whom, what stands in one file only, and how large a room may be.

Read from the files alone; nothing of the project is imported.
"""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PURE = set("jax numpy math functools itertools operator typing collections dataclasses zlib re tfm".split())
OUTSIDE = ("tests", "docs", ".ci")  # these use whatever a user may
FLAX = "tfm/as_flax.py"  # the one file of tfm that imports flax
DEVICES = {"shard_map", "distributed", "devices", "local_devices", "__version__", "version"}
MESH = "experiments/engine/mesh.py"
SEVERAL = {  # what several processes need, and what starts JAX
    "experiments/engine/distributed.py": {"distributed", "devices"},
    "experiments/engine/compilation.py": {"devices", "__version__"},
}


# The rooms of experiments/, from the ground up; a file of its own is a room too, and all others are experiments.
FLOORS = (
    {"engine"},
    {"compiler", "data", "figures", "variants"},
    {"model"},
    {"pretrained"},
    {"studies"},
    set(),  # experiments
    {"tools"},
)
EXPERIMENT = 5


def below(path: str, parts: list[str]) -> bool:
    """Whether a file of experiments/ may import this: of its own room, or of one on a floor below."""
    own = path.removesuffix(".py").split("/")[1]
    other = parts[1] if len(parts) > 1 else ""
    floors = [next((i for i, rooms in enumerate(FLOORS) if room in rooms), EXPERIMENT) for room in (own, other)]
    return own == other or floors[1] < floors[0]


def imported(node: ast.AST) -> list[str]:
    """`from a import b, c` is a.b and a.c, and `import a.b` is a.b."""
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{name.name}" for name in node.names]
    return [name.name for name in node.names] if isinstance(node, ast.Import) else []


def faults(path: str, source: str) -> set[str]:
    """What the file at `path` (from the root) does that it may not."""
    found, room = set(), path.split("/")[0]
    for node in ast.walk(ast.parse(source)):
        for name in imported(node):
            top, parts = name.split(".")[0], name.split(".")
            if room == "tfm" and top not in PURE and (top, path) != ("flax", FLAX):
                found.add(f"tfm imports {top}")
            if path.startswith("experiments/engine/") and top == "tfm" and parts[1:2] not in (["shapes"], ["layout"]):
                found.add(f"the engine imports {name}")
            if top == "experiments" and room == "experiments" and not below(path, parts):
                found.add(f"imports {name}")
            if top == "configs" and room not in ("launch.py", "configs", *OUTSIDE):
                found.add("imports configs")
            if top in ("pickle", "cloudpickle", "dill", "tensorflow"):
                found.add(f"imports {top}")
            if (
                parts[-1] in DEVICES - SEVERAL.get(path, set())
                and top == "jax"
                and path != MESH
                and room not in OUTSIDE
            ):
                found.add(f"touches {name}")
        if isinstance(node, ast.Name) and room == "tfm" and node.id in ("print", "open"):
            found.add(f"tfm uses {node.id}")
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "jax":
            if node.attr in DEVICES - SEVERAL.get(path, set()) and path != MESH and room not in OUTSIDE:
                found.add(f"touches jax.{node.attr}")
        if getattr(node, "id", None) == "pmap" or getattr(node, "attr", None) == "pmap":
            found.add("uses pmap")
        if isinstance(node, ast.keyword) and node.arg == "check_vma" and getattr(node.value, "value", None) is not True:
            found.add("switches check_vma off")
    return found


ROOMS = ("tfm", "experiments", "configs", "benchmarks", "docs", ".ci", "tests")
FILES = {
    str(file.relative_to(ROOT)): file.read_text(encoding="utf-8")
    for file in [ROOT / "launch.py", *(file for room in ROOMS for file in sorted((ROOT / room).rglob("*.py")))]
}
LINES = {path: len(text.splitlines()) for path, text in FILES.items()}
LONGEST = 350  # lines of a file
STILL_LONGER = {
    "tests/engine/test_bad_input.py": 415,
    "tests/engine/test_config.py": 387,
    "tests/engine/test_disk.py": 388,
    "tests/engine/test_fuzz_config.py": 394,
    "tests/pretrained/test_parity.py": 382,
    "tests/reference.py": 391,
}  # to be divided
# About as many as there are, of 16,000 and 15,000 lines that there may be in the end: these numbers only fall.
ENGINE_FILES, SOURCE_LINES, TEST_LINES = 22, 22_300, 25_850


def test_the_walls_stand():
    assert "tfm/shapes.py" in FILES
    assert {path: faults(path, text) for path, text in FILES.items() if faults(path, text)} == {}


def test_a_room_can_be_seen_across():
    assert {path: n for path, n in LINES.items() if n > max(LONGEST, STILL_LONGER.get(path, 0))} == {}
    assert sum(path.startswith("experiments/engine/") for path in FILES) <= ENGINE_FILES
    tests = sum(n for path, n in LINES.items() if path.startswith("tests/"))
    assert tests <= TEST_LINES
    assert sum(LINES.values()) - tests <= SOURCE_LINES


def test_tests_mirror_the_rooms():
    """Beside tests of the whole: a folder for each room of the same name, and none for what is no room."""
    rooms = {path.parent.name for path in map(pathlib.Path, FILES) if path.parts[0] in ("tfm", "experiments")}
    folders = {path.parts[1] for path in map(pathlib.Path, FILES) if path.match("tests/*/test_*.py")}
    assert folders <= rooms | {"benchmarks"} and {"tfm", "engine", "experiments"} <= folders
    assert {path for path in FILES if path.startswith("tests/test_")} <= {f"tests/test_{of}.py" for of in WHOLE}


WHOLE = ("walls", "docs", "notebook", "colab")


@pytest.mark.parametrize(
    ("path", "source", "fault"),
    [
        ("tfm/a.py", "import optax", "tfm imports optax"),
        ("tfm/a.py", "def f():\n    from flax import struct", "tfm imports flax"),
        ("tfm/as_flax.py", "import optax", "tfm imports optax"),
        ("tfm/a.py", "import os.path", "tfm imports os"),
        ("tfm/a.py", "print(1)", "tfm uses print"),
        ("tfm/a.py", "x = open('x')", "tfm uses open"),
        ("tfm/a.py", "from experiments.engine import step", "tfm imports experiments"),
        ("experiments/engine/step.py", "from tfm import attention", "the engine imports tfm.attention"),
        ("experiments/engine/log.py", "import tfm", "the engine imports tfm"),
        ("experiments/engine/step.py", "from experiments import vision", "imports experiments.vision"),
        ("experiments/vision.py", "from experiments import language", "imports experiments.language"),
        ("experiments/vision.py", "import experiments.language.x", "imports experiments.language.x"),
        ("experiments/vision.py", "from configs import base", "imports configs"),
        ("benchmarks/a.py", "import configs.base", "imports configs"),
        ("tests/a.py", "import pickle", "imports pickle"),
        ("launch.py", "from tensorflow import data", "imports tensorflow"),
        ("experiments/engine/step.py", "import jax\njax.shard_map(f)", "touches jax.shard_map"),
        (
            "experiments/engine/step.py",
            "from jax.experimental.shard_map import shard_map",
            "touches jax.experimental.shard_map.shard_map",
        ),
        ("launch.py", "import jax\njax.distributed.initialize()", "touches jax.distributed"),
        ("experiments/engine/disk.py", "import jax\njax.devices()", "touches jax.devices"),
        ("experiments/engine/loop.py", "from jax import distributed", "touches jax.distributed"),
        ("launch.py", "from jax import devices", "touches jax.devices"),
        ("tfm/a.py", "jax.__version__", "touches jax.__version__"),
        ("tests/a.py", "jax.pmap(f)", "uses pmap"),
        ("tests/a.py", "f(check_vma=False)", "switches check_vma off"),
    ],
)
def test_a_hole_in_a_wall_is_seen(path, source, fault):
    assert fault in faults(path, source)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("experiments/engine/optim.py", "from tfm import shapes\nimport tfm.shapes\nfrom tfm.shapes import letters"),
        ("experiments/vision.py", "from experiments import model\nfrom experiments.engine import step\nimport tfm"),
        ("experiments/engine/mesh.py", "import jax\njax.shard_map(f, check_vma=True)\njax.devices()\njax.__version__"),
        ("launch.py", "import configs\nprint(open)"),
        ("tfm/as_flax.py", "from flax import nnx"),
        ("tests/a.py", "import jax\nfrom configs import base\njax.devices()"),
        ("tfm/a.py", "from collections.abc import Callable\nimport jax.numpy as jnp\nfrom tfm import shapes"),
    ],
)
def test_a_door_is_no_hole(path, source):
    assert faults(path, source) == set()
