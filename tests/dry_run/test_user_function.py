"""A user's function is compiled for described chips, or for this machine, and mistakes name the file and the line."""

import json
import pathlib
import re

import jax
import pytest
import tiny
from errors import raises

from experiments.config import errors, files as config_files
from experiments.devices import compilation
from experiments.dry_run import __main__ as command, topology as topologies, user_function as user_functions

libtpu = pytest.mark.skipif(compilation.libtpu() is None, reason='libtpu is not installed: pip install -e ".[aot]"')
SOURCE = """
import functools
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

def mean(x_BD, scale=1):
    return scale * x_BD.mean(0)

def needs_two(x_BD, y_B): return x_BD + y_B

@functools.partial(jax.jit, static_argnames="name", donate_argnums=0)
def noise(x_BD, key, scale, name):
    return x_BD + scale * jax.random.normal(key, x_BD.shape) if name == "normal" else x_BD

def product(x_BD):
    two = 2
    return x_BD @ x_BD * two

number = 3

def example(): return (np.ones((16, 5)),)  # float64, which JAX makes float32
def noise_example(): return jnp.ones((16, 5)), jax.random.key(0), 2.0, "normal"
def huge(): return (jax.ShapeDtypeStruct((2**19, 2**13), np.float32),)
def listed(): return [np.ones(3)]
def without_arrays(): return (3,)
def failing(devices): raise KeyError("lost")

def sharded(devices):
    mesh = jax.make_mesh((len(devices),), ("data",), devices=devices)
    return jax.ShapeDtypeStruct((16, 5), np.float32, sharding=NamedSharding(mesh, P("data"))), jnp.ones(5)

def elsewhere(): return sharded(jax.devices()[:2])
"""


def place(text: str) -> str:
    """Return the file and the line of SOURCE that begins with this text, as an error names it."""
    lines = map(str.strip, SOURCE.splitlines())
    return f"my_file.py, line {next(n for n, line in enumerate(lines, 1) if line.startswith(text))}"


@pytest.fixture(autouse=True)
def my_file(tmp_path, monkeypatch):
    before = {name: getattr(jax.config, name) for name in ("jax_platforms", "jax_enable_compilation_cache")}
    (tmp_path / "my_file.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    yield tmp_path / "my_file.py"
    config_files.forget_user_modules(tmp_path)
    for name, value in before.items():
        jax.config.update(name, value)


def dry_run(*argv: str) -> tiny.Outcome:
    return tiny.call(command.run, command.HELP, *argv, positional="functions")


def test_a_plain_function_is_compiled_for_this_machine():
    code, out, err = dry_run("my_file:mean")
    assert (code, err) == (0, "")
    assert "my_file:mean" in out and "argument 320 bytes, output 20 bytes" in out


def test_keys_numbers_static_arguments_and_donation_are_kept():
    program = user_functions.load("my_file:noise", jax.devices()[:1], "noise_example")
    x, key, *rest = program.arguments
    assert rest == [2.0, "normal"] and jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key)
    assert isinstance(x, jax.ShapeDtypeStruct) and x.sharding.device_set == {jax.devices()[0]}
    (compiled,) = topologies.compile_programs([program])
    assert compiled.compiled.memory_analysis().alias_size_in_bytes == 16 * 5 * 4


def test_arrays_are_replicated_over_the_mesh_of_the_other_arguments():
    x, scale = user_functions.load("my_file:mean", jax.devices()[:4], "sharded").arguments
    assert x.sharding.shard_shape(x.shape) == (4, 5)
    assert scale.sharding.mesh is x.sharding.mesh and scale.sharding.is_fully_replicated
    code, out, err = dry_run("my_file:mean", "--example=sharded")
    assert (code, err) == (0, "") and "all-reduce 1 x, 20 bytes" in out


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        ("my_file", ['"my_file"', "my_file:step"]),
        ("", ["my_file:step"]),
        ("my_file:mean my_file:product", ["my_file:mean my_file:product"]),
        ("my_file:mean --json=a.json", ["--json=a.json", "--topology"]),
        ("my_file:mean --topology=v5e-3", ["v5e-3", "v5e-4"]),
        ("no_file:mean", ["no_file:mean", "no_file.py"]),
        ("my_file:median", ["my_file.py", "median"]),
        ("my_file:number", ["my_file.py", "number", "3"]),
        ("my_file:mean --example=examples", ["my_file.py", "examples(devices)"]),
        ("my_file:mean --example=listed", ["my_file.py", "listed(devices)", "[array"]),
        ("my_file:mean --example=without_arrays", ["my_file.py", "without_arrays(devices)", "(3,)"]),
        ("my_file:mean --example=failing", [place("def failing"), "KeyError", "lost"]),
        ("my_file:product", [place("return x_BD @ x_BD"), "TypeError"]),
        ("my_file:needs_two", [place("def needs_two").replace(",", ": needs_two,"), "TypeError", "y_B"]),
    ],
)
def test_a_mistake_is_one_sentence_with_the_file_and_the_line(argv, parts):
    code, out, err = dry_run(*argv.split())
    assert (code, out) == (2, "") and err.count("\n") == 1 and [part for part in parts if part not in err] == []


def test_a_sharding_over_other_devices_would_compile_for_them_and_is_an_error():
    with raises(errors.UserError, "my_file.py", "elsewhere", "devices"):
        user_functions.load("my_file:mean", jax.devices()[2:4], "elsewhere")


def test_the_file_of_the_page_about_tpus_is_compiled(my_file):
    page = (pathlib.Path(command.__file__).parents[2] / "docs/tpu.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(# my_file.py\n.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert block.count("\n") <= 20
    my_file.write_text(block)
    code, out, err = dry_run("my_file:step")
    assert (code, err) == (0, "") and "all-reduce" in out


@libtpu
def test_a_function_is_compiled_for_described_chips(tmp_path):
    file = tmp_path / "report.json"
    code, out, err = dry_run("my_file:mean", "--example=sharded", "--topology=v5e-8", f"--json={file}")
    assert code == 0, err
    report = json.loads(file.read_text())
    (program,) = report["programs"]
    assert report["compiled"] and report["chips"] == 8 and "8 x TPU v5" in out
    assert program["collectives"] == {"all-reduce": {"times": 1, "bytes": 20}}
    assert 0 < program["argument_bytes"] < program["needed_bytes"] < report["hbm_bytes"] == 15.75 * 2**30


@libtpu
def test_a_function_that_is_too_large_is_reported_with_the_compilers_reason(tmp_path):
    file = tmp_path / "report.json"
    code, out, err = dry_run("my_file:mean", "--example=huge", "--topology=v5e-1", f"--json={file}")
    report = json.loads(file.read_text())
    assert code == 1 and not report["compiled"] and "15.75" in report["reason"] and "15.75" in err
