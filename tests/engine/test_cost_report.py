"""FLOPs against the formulas of E29, the parameter table, and what --dry_run shows."""

import functools
import itertools
import re
import types

import dots
import jax
import jax.numpy as jnp
import pytest
import tiny

from experiments.engine import compilation, disk, mesh, summary as summaries
from tfm import loss
from tfm.attention import explicit, flash, mask, splash

B, N, D, H, M, F, W = 2, 7, 12, 3, 5, 20, 256


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_bytes(tiny.TEXT)
    return str(file)


def task(text, **changes):
    sizes = {"model__D": D, "model__H": H, "model__M": M, "model__F": F, "text__N": N, "model__attention": "explicit"}
    return tiny.task_of(tiny.settings("language", text__source=text, **(sizes | changes)))


def forward(task):
    params = jax.eval_shape(task.init, jax.random.key(0))
    batch = {name: array[:B] for name, array in task.train[0].items()}
    return compilation.flops(task.loss, params, batch), params, batch


def layer(*, K=D // H, projections=4):
    """E29 for one layer and B sequences: projections, attention (logits and averages), MLP; two per multiply-add."""
    T = B * N
    return projections * 2 * T * D * H * K + B * 2 * 2 * H * N * N * K + 4 * T * D * F


HEAD = 2 * B * N * D * W


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model__remat": "none"}, M * layer() + HEAD),
        ({"model__K": 11}, M * layer(K=11) + HEAD),
        ({"model__score": "tied"}, M * layer(projections=3) + HEAD),
        ({"model__position": "sinusoidal", "model__norm": "token_plain", "model__bias": "none"}, M * layer() + HEAD),
        ({"text__objective": "masked"}, M * layer() + HEAD + 2 * B * N * D),  # one id more: the mask
    ],
)
def test_flops_are_those_of_the_formula_for_every_variant(text, changes, expected):
    assert forward(task(text, **changes))[0] == expected


def test_the_backward_pass_costs_twice_the_forward_one_and_remat_one_more(text):
    def gradient(task):
        counted, params, batch = forward(task)
        loss = jax.grad(lambda params: task.loss(params, batch)[0]["loss"][0])
        return compilation.flops(loss, params), counted

    whole, counted = gradient(task(text))
    assert whole == 3 * counted
    again, _ = gradient(task(text, model__remat="full"))
    assert 3 * counted < again <= 4 * counted


def test_flops_of_nested_programs():
    a, b = jnp.ones((3, 5)), jnp.ones((5, 7))
    product = 2 * 3 * 5 * 7
    assert compilation.flops(jnp.matmul, a, b) == product
    assert compilation.flops(jax.jit(lambda a, b: jax.jit(jnp.matmul)(a, b) + a @ b), a, b) == 2 * product
    assert compilation.flops(lambda a, b: jax.lax.map(lambda _: a @ b, jnp.arange(11)), a, b) == 11 * product
    assert compilation.flops(jax.vmap(jnp.matmul, (0, None)), jnp.ones((4, 3, 5)), b) == 4 * product
    assert compilation.flops(jax.vmap(jnp.matmul), jnp.ones((4, 3, 5)), jnp.ones((4, 5, 7))) == 4 * product
    assert compilation.flops(lambda a, b: a[:, :1] + 1, a, b) == 0
    x_BHNK = jnp.ones((1, 2, 64, 8))  # flash attention skips what is masked, in a branch: the dearest of each counts
    for name in ("flash", "explicit"):
        call = functools.partial({"explicit": explicit, "flash": flash}[name].attention, mask=mask.causal, scale=1.0)
        assert compilation.flops(call, x_BHNK, x_BHNK, x_BHNK) == 2 * 2 * 2 * 64 * 64 * 8
        assert compilation.flops(call, x_BHNK, x_BHNK, x_BHNK, kernels=True) == 0
    x_BHNK = jnp.ones((3, 2, 1024, 8))
    call = functools.partial(splash.attention, mask=mask.causal, scale=1.0, interpret=True)
    assert compilation.flops(call, x_BHNK, x_BHNK, x_BHNK, kernels=True) == 3 * 2 * 2 * 2 * 1024 * 1024 * 8
    assert compilation.flops(lambda x: call(x, x, x)[0] @ jnp.ones((8, 5)), x_BHNK) == 3 * 2 * 2 * 1024 * 8 * (2048 + 5)


def test_flops_of_a_head_in_chunks_are_those_of_all_tokens(monkeypatch):
    monkeypatch.setattr(loss, "FROM", 1)
    monkeypatch.setattr(loss, "LOGITS", 16 * 24)
    targets, head = (jnp.zeros((2, 32), jnp.int32), jnp.ones((2, 32))), {"G_WD": jnp.ones((24, 5))}
    found = compilation.flops(lambda x_BND: loss.next_token(x_BND, head, *targets)["loss"], jnp.ones((2, 32, 5)))
    assert found == 2 * 64 * 24 * 5


def test_the_peak_is_a_rate_that_products_reach(monkeypatch):
    assert 1e8 < compilation.measure_peak(devices=mesh.make(data=1), repeats=1) < 1e15
    seconds = types.SimpleNamespace(perf_counter=itertools.count().__next__)  # every product takes one
    monkeypatch.setattr(compilation, "time", seconds)
    assert compilation.measure_peak(devices=mesh.make(data=1)) == 2 * 1536**3


def test_the_parameter_table():
    shape = jax.ShapeDtypeStruct
    params = {"blocks": {"mlp": {"W1_FD": shape((2, 700, 3), jnp.float32)}}, "head": {"b_C": shape((11,), jnp.float32)}}
    assert summaries.format_table(params) == "\n".join(
        [
            "  blocks/mlp/W1_FD  M=2 F=700 D=3  4,200",
            "  head/b_C          C=11              11",
            "  --------------------------------------",
            "  total                            4,211",
        ]
    )


def test_numbers_with_prefixes():
    shown = {0: "0 B", 999: "999 B", 1000: "1 kB", 1.5e6: "1.5 MB", 1.23e9: "1.23 GB", 4e12: "4 TB", 5e18: "5e+03 PB"}
    assert {number: summaries.format_si(number, "B") for number in shown} == shown


def test_the_result_block():
    summary = {"experiment": "vision", "eval/loss": 0.5, "eval/accuracy": 0.2, "baseline/accuracy": 0.1}
    summary |= {"wall_seconds": 12.34, "compile_seconds": 3.21, "tokens_per_second": 12345.6}
    summary["guess"] = {"accuracy": "always the first", "loss": "none such"}
    lines = summaries.format_result(summary, ["a.png", "b.json"]).splitlines()
    assert lines[1] == "  eval/loss              0.5000"
    assert lines[3] == "  baseline/accuracy      0.1000  always the first"
    assert "12.3 s, 3.2 s of it compiling" in lines[4] and "12,346 tokens/s" in lines[5]
    assert [line.strip() for line in lines[6:]] == ["a.png", "b.json"]


def test_a_dry_run_shows_the_costs_and_writes_nothing(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    changes = dots.CHANGES | {"train.batch_size": 60}
    config = tiny.config_file(tmp_path, "dots", **changes)
    outcome = tiny.run("--config", config, "--dry_run", "--workdir", str(tmp_path / "run"))
    assert (outcome.code, outcome.err) == (0, "")
    params = jax.eval_shape(tiny.task_of(tiny.settings("dots", model=False, **changes)).init, jax.random.key(0))
    numbers = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert summaries.format_table(params) in outcome.out
    assert "FLOP per step (3 x forward) of 60 examples, 60 tokens" in outcome.out
    moments = 2 * 4 * numbers + 2 * 4  # two per parameter, and two counts of steps
    assert re.search(rf"parameters +{disk.size(4 * numbers)}\n +optimiser +{disk.size(moments)}\n", outcome.out)
    held = 4 * numbers + moments + 4 + 8 + 60 * (5 + 3) * 4  # and the step, the key, points of 5 numbers and 3 more
    argument = float(re.search(r"step of 60 examples: .* \(argument ([\d.]+) KiB", outcome.out)[1])
    assert 0.5 * held < 1024 * argument < 2 * held
    assert not (tmp_path / "run").exists() and not list((tmp_path / "here").iterdir())
