"""The prefill benchmark on tiny models: its columns, its definition of the ideal, and its bar."""

import json
import os
import sys
import time

import pytest
import torch
from tokred_evals import bench, cli, kernels, measure
from torch import nn
from typer.testing import CliRunner

import tokred.kernels
from tokred.adapters.base import cache_argument

METHODS = "random,uniform,divprune,dart,fastv,visionzip"


@pytest.fixture(scope="module")
def smoke_run(tmp_path_factory):
    """Output, rows and details of one smoke run over everything."""
    before = torch.get_num_threads()
    path = tmp_path_factory.mktemp("bench") / "rows.json"
    arguments = ["bench", "prefill", "--smoke", "--threads", "1", "--methods", METHODS, "--json", str(path)]
    ran = CliRunner().invoke(cli.app, arguments)
    torch.set_num_threads(before)
    assert ran.exit_code == 0, ran.output
    return ran.stdout, json.loads(path.read_text()), json.loads(path.with_name("rows.meta.json").read_text())


def test_rows_have_exactly_the_published_keys(smoke_run):
    _, rows, _ = smoke_run
    assert rows
    for row in rows:
        assert tuple(row) == bench.KEYS
        assert row["achieved_lo"] <= row["achieved_over_ideal"] <= row["achieved_hi"]
        assert min(row["stock_ms"], row["tokred_ms"], row["ideal_ms"], row["short_input_ms"]) > 0


def test_every_model_and_method_has_a_row_or_a_reason(smoke_run):
    _, rows, meta = smoke_run
    for model in bench.MODELS:
        measured = {row["method"] for row in rows if row["model"] == model}
        assert measured | set(meta["refused"][model]) == set(METHODS.split(","))
    assert set(meta["refused"]["qwen2_5_vl"]) == {"visionzip"}
    assert "cls_row" in meta["refused"]["qwen2_5_vl"]["visionzip"]
    assert meta["refused"]["llava"] == {}


def test_token_layers_follow_from_the_lengths(smoke_run):
    _, rows, meta = smoke_run
    for row, detail in zip(rows, meta["details"], strict=True):
        model = bench.MODELS[row["model"]](True)
        seen = [length - model.text for length in detail["layer_lengths"]]
        assert row["token_layers"] == pytest.approx(sum(seen) / (len(seen) * model.visual))
        assert seen[-1] == max(1, round(row["keep"] * model.visual))
        assert (detail["ideal_over_short_decoder"] is not None) == (row["method"] not in ("dart", "fastv"))


def test_output_states_the_bar_and_that_a_smoke_run_proves_nothing(smoke_run):
    text, _, _ = smoke_run
    for part in ("allocator", "threads: 1", "bar: median over rows >= 0.95", "smoke run", "decode against", "same"):
        assert part in text


def test_only_the_tapped_attention_of_the_tower_stays_in(smoke_run):
    _, _, meta = smoke_run
    for detail in meta["details"]:
        expected = ["encoder.layers.1.self_attn"] if detail["method"] == "visionzip" else []
        assert detail["tapped_tower_modules"] == expected


@pytest.mark.parametrize("name", list(bench.MODELS))
def test_replayed_tower_changes_no_logit(name):
    model = bench.MODELS[name](True)
    recording = bench.record(model)
    other = measure.twin(model.model)
    bench._replay(other.get_submodule(model.tower), recording, [])
    with torch.no_grad():
        want = model.model(**model.inputs, logits_to_keep=1).logits
        assert torch.equal(other(**model.inputs, logits_to_keep=1).logits, want)


@pytest.mark.parametrize("name", list(bench.MODELS))
def test_ideal_at_full_length_calls_the_stock_layers_once_each(name):
    model = bench.MODELS[name](True)
    recording = bench.record(model)
    lengths = bench.observe_lengths(model, model.model)
    ideal = bench.Ideal(model, recording, lengths, [])
    calls = []
    for layer in model.model.get_submodule(model.language).layers:
        layer.register_forward_hook(lambda module, args, output: calls.append(output.shape[1]))
    run = ideal.run()
    assert calls == lengths.layers == [model.inputs["input_ids"].shape[1]] * len(calls)
    assert 0 < run["decoder"] < run["all"]


def test_ideal_decoder_computes_what_stock_computes():
    model = bench.build_llava(True)
    recording = bench.record(model)
    ideal = bench.Ideal(model, recording, bench.observe_lengths(model, model.model), [])
    heads = []
    model.model.lm_head.register_forward_hook(lambda module, args, output: heads.append(output))
    ideal.run()
    [hidden] = ideal.hidden.values()
    with torch.no_grad():
        want = model.model.lm_head(model.model.model.language_model(inputs_embeds=hidden).last_hidden_state[:, -1:])
    torch.testing.assert_close(heads[0], want)


def test_short_input_really_is_short():
    model = bench.build_qwen2_5_vl(True)
    short = bench.ShortInput(model, bench.record(model), 5)
    lengths = []
    layer = model.model.get_submodule(model.language).layers[0]
    layer.register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append((args[0] if args else kwargs["hidden_states"]).shape[1]),
        with_kwargs=True,
    )
    short.run()
    assert lengths == [model.text + 5]
    assert len(short.decode()) == bench.DECODE_TOKENS - 1


@pytest.mark.parametrize("name", list(bench.MODELS))
def test_the_stock_model_decodes_on_a_cache_of_given_lengths(name):
    model = bench.MODELS[name](True)
    lengths = [9, 9, 5, 3]
    cached = bench.SameCache(model, lengths)
    seen = []
    for layer in model.model.get_submodule(model.language).layers:

        def note(module, args, kwargs):
            held = kwargs[cache_argument(module.forward)]
            seen.append((args[0].shape[1], held.layers[module.self_attn.layer_idx].get_seq_length()))

        layer.register_forward_pre_hook(note, with_kwargs=True)
    assert len(cached.decode()) == bench.DECODE_TOKENS - 1
    assert seen[:4] == [(1, length) for length in lengths]
    assert seen[-4:] == [(1, length + bench.DECODE_TOKENS - 1) for length in lengths]


def test_operations_stand_beside_a_peer_that_computes_the_same(tmp_path):
    before = torch.get_num_threads()
    path = tmp_path / "new" / "kernels.json"
    arguments = ["bench", "kernels", "--tokens", "8", "--rounds", "2", "--threads", "1", "--json", str(path)]
    ran = CliRunner().invoke(cli.app, arguments)
    torch.set_num_threads(before)
    assert ran.exit_code == 0, ran.output
    rows = json.loads(path.read_text())["rows"]
    made = kernels.cases(8, (torch.device("cpu"), torch.float32))
    assert [row["operation"] for row in rows] == list(made) == sorted(tokred.kernels.__all__)
    assert all(row["ms"] > 0 and row["peer_ms"] > 0 and row["peer"] in ran.stdout for row in rows)
    for name, (_, ours, peer, given) in made.items():
        expected = peer(*given)
        torch.testing.assert_close(ours(*given), expected[1] if name == "topk_indices" else expected)


@pytest.mark.parametrize("arguments", [["--tokens", "3"], ["--rounds", "0"]])
def test_bad_input_of_the_kernel_bench_is_one_line(arguments):
    ran = CliRunner().invoke(cli.app, ["bench", "kernels", *arguments])
    assert ran.exit_code == 2
    assert len(ran.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "nope"], "nope"),
        (["--models", "nope"], "there are llava, qwen2_5_vl"),
        (["--keep", "0"], "keep=0"),
        (["--keep", "half"], "--keep 'half'"),
        (["--rounds", "0"], "rounds=0"),
        (["--dtype", "int8"], "unknown dtype 'int8'"),
        (["--device", "nope"], "device 'nope' is not usable"),
    ],
)
def test_bad_input_is_one_line(arguments, message):
    ran = CliRunner().invoke(cli.app, ["bench", "prefill", "--smoke", *arguments])
    assert ran.exit_code == 2
    assert message in ran.stderr
    assert ran.stderr.count("\n") == 1


def test_verdict_follows_the_published_rule():
    def judge(median, high, rounds=bench.MIN_ROUNDS):
        row = {"achieved_over_ideal": median}
        detail = {
            "model": "m",
            "method": "x",
            "keep": 0.1,
            "passes": high >= bench.BAR_ROW_UPPER and median >= bench.BAR_ROW,
            "ideal_over_short_decoder": 1.01,
        }
        return bench.verdict([row], [detail], rounds)

    assert judge(0.96, 0.97)["passes"]
    assert not judge(0.93, 0.96)["passes"]
    assert judge(0.93, 0.96)["failing"] == []
    assert judge(0.91, 0.96)["failing"] == ["m/x/0.1"]
    assert judge(0.94, 0.945)["failing"] == ["m/x/0.1"]
    assert not judge(0.96, 0.97, rounds=bench.MIN_ROUNDS - 1)["passes"]


def test_restart_sets_the_allocator_once(monkeypatch):
    started = []
    monkeypatch.setattr(os, "execve", lambda *arguments: started.append(arguments))
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(sys, "argv", ["tokred", "bench", "prefill", "--help"])
    for name in measure.ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit):
        cli.main()
    assert started == []
    measure.restart_with_allocator()
    [(program, arguments, environment)] = started
    assert program == arguments[0] == sys.executable
    assert {name: environment[name] for name in measure.ALLOCATOR} == measure.ALLOCATOR
    for name, value in measure.ALLOCATOR.items():
        monkeypatch.setenv(name, value)
    measure.restart_with_allocator()
    assert len(started) == 1


def test_twin_shares_weights_and_nothing_else():
    model = bench.build_llava(True).model
    other = measure.twin(model)
    for (name, a), (_, b) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert a is b, name
    with tokred.apply(other, "fastv", keep=0.5):
        assert not any(module._forward_pre_hooks for module in model.modules())


def test_clock_tells_hooks_from_the_forward():
    module = nn.Identity()
    module.register_forward_pre_hook(lambda module, args: time.sleep(0.006))
    clock = measure.Clock(torch.device("cpu"))
    clock.watch(module, "outer", with_hooks=True)
    clock.watch(module, "inner", with_hooks=False)
    module(torch.zeros(1))
    seconds = clock.take()
    assert seconds["outer"] > 0.005 > seconds["inner"]
    assert clock.take() == {}
    clock.close()
    assert len(module._forward_pre_hooks) == 1


def test_intervals():
    low, high = measure.wilson(8, 10)
    assert low == pytest.approx(0.4902, abs=1e-3)
    assert high == pytest.approx(0.9433, abs=1e-3)
    assert measure.wilson(0, 5)[0] == 0
    assert measure.wilson(5, 5)[1] == 1
    assert measure.bootstrap([2.0, 2.0, 2.0]) == (2.0, 2.0, 2.0)
    middle, low, high = measure.bootstrap([1.0, 2.0, 3.0, 4.0, 5.0])
    assert 1 <= low <= middle == 3 <= high <= 5


def test_interleave_runs_every_arm_once_a_round_in_changing_order():
    order = []
    arms = {name: (lambda name=name: order.append(name) or name) for name in "abc"}
    results = measure.interleave(arms, 20, seed=0, tick=lambda: None)
    rounds = [tuple(order[start : start + 3]) for start in range(0, 60, 3)]
    assert all(sorted(one) == ["a", "b", "c"] for one in rounds)
    assert len(set(rounds)) > 1
    assert {name: len(values) for name, values in results.items()} == {"a": 20, "b": 20, "c": 20}
