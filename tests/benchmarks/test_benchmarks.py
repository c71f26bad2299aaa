"""The benchmark's harness and its participants at sizes that take no time; what it measures is not tested."""

import json

import jax
import matplotlib.figure
import numpy as np
import pytest

from benchmarks import __main__ as command, flax_peer, growth, ours, participant, report, session, sizes
from tfm import shapes

TINY = {
    "words": sizes.WORKLOADS["step_a"].changed(M=1, H=2, D=6, N=5, B=3, W=65),
    "images": sizes.WORKLOADS["step_c"].changed(M=1, H=2, D=6, B=10, Y=10, patch=5),
    "generation": sizes.WORKLOADS["generate"].changed(M=1, H=2, D=6, N=17, B=3, new=13),
}
SIZE = sizes.WORKLOADS["step_a"].changed(steps=30, lead=2, rounds=3)
SECONDS = {"ours": [1.0, 2.0, 1.0], "transformers": [3.0, 4.0, 5.0], "flax": [2.0, 6.0, 1.0]}


class Sleeper:
    """A participant that answers at once, with seconds that were given to it, and writes down when it was asked."""

    def __init__(self, name: str, seconds: list[float], turns: list, parameters: int = 7):
        self.name, self._seconds, self._turns = name, iter(seconds), turns
        self.facts = {"parameters": parameters, "threads": 2, "versions": {}, "step_flops": 6e9}
        self.closed = False

    def take(self, steps: int, *, lead: int) -> dict[str, float]:
        self._turns.append((self.name, lead, steps))
        return {"seconds": next(self._seconds) * steps, "loss": 4.0, "peak_bytes": 11}

    def close(self) -> None:
        self.closed = True


def measured(size=SIZE, seconds=SECONDS, **counts: int):
    """A measurement with sleepers: (result, their turns)."""
    turns, sleepers = [], {}

    def start(name: str, way: tuple, given: sizes.Workload, environment: dict) -> Sleeper:
        assert bool(environment) == (name == "ours") and given is size
        if name not in seconds:
            raise participant.Unavailable("there is no C++ compiler")
        sleepers[name] = Sleeper(name, seconds[name], turns, counts.get(name, 7))
        return sleepers[name]

    try:
        return session.measure("step_a", size, session.PEERS, start=start), turns
    finally:
        assert all(sleeper.closed for sleeper in sleepers.values())


def test_participants_take_turns_and_ratios_are_those_of_each_turn():
    result, turns = measured()
    assert turns == [("ours", 2, 30), ("transformers", 2, 30), ("flax", 2, 30)] * 3
    assert result["ours"]["seconds"] == [1.0, 2.0, 1.0] and result["ours"]["per_second"] == 12 * 64
    assert result["peers"]["transformers"]["ratio"] == 3.0  # of 3/1, 4/2, 5/1; that of the medians would be 4
    assert result["peers"]["transformers"]["ratio_spread"] == [2.0, 5.0]
    assert (result["fastest_peer"], result["ratio"], result["ratio_spread"]) == ("flax", 2.0, [1.0, 3.0])
    assert result["missing"] == {"transformers compiled": "there is no C++ compiler"}
    with pytest.raises(RuntimeError, match="not of one size: ours 7, transformers 7, flax 8 parameters"):
        measured(flax=8)


def test_without_any_peer_ours_is_measured_alone():
    result, _ = measured(SIZE.changed(rounds=1), {"ours": [1.0]})
    assert (result["peers"], "ratio" in result, len(result["missing"])) == ({}, False, 3)
    assert "transformers is missing: there is no C++ compiler" in report.workload("step_a", result)
    assert report.overview({"step_a": result}) == ""


def test_a_process_answers_only_when_asked_and_what_it_prints_is_no_answer(monkeypatch):
    monkeypatch.setenv("GIVEN", "before")
    one = participant.Participant("one", ("tests.helpers.stand_in", "works"), SIZE, {"GIVEN": "now"})
    try:
        assert (one.facts["parameters"], one.facts["title"], one.facts["GIVEN"]) == (7, SIZE.title, "now")
        answer = one.take(3, lead=100)
        assert answer["loss"] == 3.0 and 0.03 <= answer["seconds"] < 1 and answer["peak_bytes"] > 2**20
    finally:
        one.close()


@pytest.mark.parametrize(
    ("way", "error", "sentence"),
    [
        (("tests.helpers.stand_in", "missing"), participant.Unavailable, "^there is no such library$"),
        (("tests.no_such_file",), participant.Unavailable, "^No module named 'tests.no_such_file'$"),
        (("tests.helpers.stand_in", "fails"), RuntimeError, "(?s)one has ended.*the model cannot be built"),
    ],
)
def test_what_a_process_lacks_is_one_sentence_and_its_failure_is_told(way, error, sentence):
    with pytest.raises(error, match=sentence):
        participant.Participant("one", way, SIZE)


@pytest.mark.parametrize("name", ["step_a", "step_c"])  # of words, of images
def test_ours_and_the_peers_have_equally_many_parameters(name):
    size = sizes.WORKLOADS[name]
    task, images = ours.planned(size).task, size.kind == "images"
    mine = shapes.total(jax.eval_shape(task.init, jax.random.key(0)))
    peer, batches = (flax_peer.ViT(size), sizes.images) if images else (flax_peer.GPT2(size), sizes.words)
    example = batches(size.changed(B=1))[0][0]
    theirs = jax.eval_shape(peer.init, jax.random.key(0), example)["params"]
    assert mine == sum(leaf.size for leaf in jax.tree.leaves(theirs))
    assert task.train[0]["image_BYXZ" if images else "w_BN"].shape == (size.B, *example.shape[1:])


@pytest.mark.parametrize("name", ["step_a", "step_c"])
def test_ours_and_transformers_have_equally_many_parameters(name):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from benchmarks import torch_peer

    size = sizes.WORKLOADS[name]
    task, model = ours.planned(size).task, (torch_peer.vit if size.kind == "images" else torch_peer.gpt2)(size)
    assert shapes.total(jax.eval_shape(task.init, jax.random.key(0))) == torch_peer.parameters(model)


@pytest.mark.parametrize(("peer", "kind"), [(ours, "words"), (flax_peer, "images")])
def test_steps_train(peer, kind, monkeypatch):
    """Random targets of a few batches that come again and again can be learned; a step that does nothing cannot."""
    monkeypatch.setattr(sizes, "KEPT", 2)
    monkeypatch.setitem(sizes.OPTIMISER, "learning_rate", 0.03)
    built = peer.build(TINY[kind])
    first = built.steps(1)
    assert built.parameters > 100 and np.isfinite(first)
    assert built.steps(60) < first - 0.3
    if peer is ours:  # by hand: 3 x (products of a layer, of the output, and of the pairs that a query may attend to)
        B, N, D, W = 3, 5, 6, 65
        layer = 2 * B * N * 12 * D**2 + 2 * 2 * B * D * N * (N + 1) // 2
        assert built.facts["step_flops"] == 3 * (layer + 2 * B * N * D * W)
        B, N, D, C = 10, 5, 6, 10  # of images: four patches of 25 pixels, a class token, no mask
        layer = 2 * B * N * 12 * D**2 + 2 * 2 * B * D * N * N
        assert ours.step_flops(TINY["images"]) == 3 * (layer + 2 * B * 4 * 25 * D + 2 * B * D * C)


def test_both_generate_all_words_that_were_asked_for_and_flax_those_that_its_model_says(monkeypatch):
    """Words drawn at a temperature near 0 are the likeliest ones by the model without a cache."""
    monkeypatch.setattr(sizes, "TEMPERATURE", 1e-6)
    size, drawn = TINY["generation"], []
    mine, (steps, params) = ours.build(size), flax_peer.generation(size)
    assert mine.parameters == sum(leaf.size for leaf in jax.tree.leaves(params))
    with monkeypatch.context() as patch:
        patch.setattr(jax, "device_get", lambda words: drawn.append(np.asarray(words)) or words)
        assert steps(1) == 0.0
    w_BN = np.concatenate([sizes.prompt(size), drawn[0].T], axis=1)
    logits_BNW = jax.jit(flax_peer.GPT2(size).apply)({"params": params}, w_BN[:, :-1])
    np.testing.assert_array_equal(logits_BNW.argmax(-1), w_BN[:, 1:])
    assert mine.steps(2) == 0.0  # each counts its words, or fails
    monkeypatch.setattr(sizes.Workload, "counted", 41)
    for short in (mine.steps, steps):
        with pytest.raises(RuntimeError, match="39 words instead of 41"):
            short(1)


@pytest.mark.parametrize("W", [65, 301])
def test_inputs_have_every_word_and_no_two_batches_alike(W, tmp_path):
    size = TINY["words"].changed(W=W)
    ours.write_text(tmp_path / "text", size)
    assert len(set((tmp_path / "text").read_text(encoding="utf-8"))) == W
    batches = [w_BN.tobytes() for w_BN, _ in sizes.words(size)]
    assert len(set(batches)) == len(batches) == sizes.KEPT
    w_BN, target_BN = sizes.words(size)[0]
    np.testing.assert_array_equal(w_BN[:, 1:], target_BN[:, :-1])


def test_every_workload_has_a_toy():
    for size in (sizes.WORKLOADS | sizes.GPU).values():
        assert size.toy().platform == "cpu" and size.toy().counted <= 2 * 32**3
    assert list(session.peers(sizes.GPU["gpu_fused"])) == ["transformers", "transformers compiled"]
    assert list(session.peers(sizes.WORKLOADS["read"])) == ["PyTorch"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--only", "step_z"], 'no measurement "step_z"; the right names are: step_a, step_b'),
        (["--rounds", "0"], "--rounds must be at least 1, and 0 is not"),
        (["--json", "nowhere/a.json"], "nowhere/a.json cannot be written: there is no folder"),
    ],
)
def test_a_wrong_command_is_one_sentence_and_code_2(words, sentence, capsys):
    with pytest.raises(SystemExit) as ended:
        command.arguments(words)
    text = capsys.readouterr().err
    assert ended.value.code == 2 and sentence in text and text.count("\n") == 1


def test_the_files_say_what_was_measured(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.mmap_max=0")
    result, _ = measured()
    monkeypatch.setattr(session, "measure", lambda *_, **__: result)
    files = ["--json", str(tmp_path / "a.json"), "--png", str(tmp_path / "a.png")]
    assert command.main(["--only", "step_a", "step_d", "step_a", *files]) == 0
    written, told = json.loads((tmp_path / "a.json").read_text()), capsys.readouterr().out
    assert list(written) == ["machine", "versions", "step_a", "step_d"]
    assert written["step_a"]["ratio"] == 2.0 and written["machine"]["cores"] >= 1 and "jax" in written["versions"]
    assert written["machine"]["memory_gib"] > 0.5 and written["machine"]["processor"]
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "2.00        ?   flax (1.00-3.00)" in told and "\nGLIBC_TUNABLES=glibc.malloc.mmap_max=0\n" in told


def test_our_share_of_the_product_rate_and_the_limit():
    """A step of 1 s in which 6 GFLOP are done, beside products at 8 GFLOP/s; the fastest peer's takes 2 s."""
    rates = {"ours": {"per_second": 8e9}, "peers": {"PyTorch": {"per_second": 7e9}}}
    results = {"machine": {}, "step_a": measured()[0], "product": rates}
    report.add_limits(results, sizes.WORKLOADS)
    assert results["step_a"]["ours"]["share_of_product_rate"] == 0.75
    assert results["step_a"]["ratio_at_most"] == pytest.approx(2 / 0.75)
    assert "2.00     2.67   flax (1.00-3.00), 75% of the product rate" in report.overview({"a": results["step_a"]})


def test_words_are_limited_by_products_or_by_reading():
    size = sizes.Workload("", "generation", M=2, H=1, D=3, B=5, W=7, new=11)
    matrices, kept = 2 * 12 * 9 + 7 * 3, 2 * 2 * 5 * 3 * 6  # 6: keys and values of a word, in the mean
    assert report.generation(size, product=1, read=1e9) == 2 * 5 * 11 * matrices
    assert report.generation(size, product=1e9, read=1) == 4 * 11 * (matrices + kept)


def test_every_bar_is_as_high_as_its_ratio_or_is_cut_and_says_so():
    result, _ = measured()
    result["peers"]["flax"] |= {"ratio": 31.0, "ratio_spread": [30.0, 33.0]}
    axes = matplotlib.figure.Figure().subplots()
    report.bars(axes, 0, result)
    assert [bar.get_height() for bar in axes.patches] == [1.0, 3.0, report.HIGHEST]
    assert [text.get_text() for text in axes.texts] == ["3.00", "↑ 31.0"]


def test_growth_and_start_are_tables():
    row = {"M": 3, "N": 64, "attention": "flash", "trace_seconds": 0.5, "compile_seconds": 2.0}
    row |= {"temporary_bytes": 2**21, "seconds": None, "peak_bytes": None}
    assert growth.show([row]).splitlines()[1].split()[3:] == ["0.5", "2", "2", "MiB", "-", "-"]
    seen = {(size.M, size.N, size.attention) for size in growth.grown(toy=False)}
    assert {(48, 64, "flash"), (1, 16384, "explicit")} <= seen
    lines = growth.show_start({"missing": {"flax": "no flax"}, "ours": {"cold": 7.31, "warm": 4.0}}).splitlines()
    assert lines[1].split() == ["ours", "7.3", "s", "4.0", "s"] and lines[2].endswith("not measured: no flax")
