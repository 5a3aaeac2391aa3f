"""What a handle shows and does: summary, trace, overlay, pause, override, recipes."""

import copy
import threading

import accelerate
import pytest
import tiny
import torch
from PIL import Image
from probes import Every2

import tokred
from tokred.encoding import _Encoded


@pytest.mark.parametrize("method", tokred.methods().values(), ids=tokred.methods())
def test_methods_round_trip(method):
    parameters = {"keep": 0.375} | ({"layer": 3} if "layer" in method.__dataclass_fields__ else {})
    built = method(**parameters)
    assert method.from_dict(built.to_dict()) == built
    assert method.from_yaml(built.to_yaml()) == built
    with pytest.raises(AttributeError):
        built.keep = 0.5
    with pytest.raises(tokred.errors.ParameterError, match="not of"):
        method.from_dict({"method": "other"})


def test_apply_takes_names_objects_dicts_and_lists():
    model = tiny.llava()
    given = [
        ("fastv", {"keep": 0.5}),
        (tokred.FastV(keep=0.5), {}),
        ({"method": "fastv", "keep": 0.5}, {}),
        ([tokred.FastV(keep=0.5)], {}),
        (tokred.FastV(), {"keep": 0.5}),
    ]
    for method, parameters in given:
        with tokred.apply(model, method, **parameters) as handle:
            assert handle.methods == (tokred.FastV(keep=0.5),)


def test_apply_takes_a_recipe(tmp_path):
    model = tiny.llava()
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("- {method: uniform, keep: 0.5}\n- {method: fastv, layer: 3}\n")
    with tokred.apply(model, str(recipe)) as handle:
        assert handle.methods == (tokred.Uniform(keep=0.5), tokred.FastV(layer=3))
    recipe.write_text(tokred.DART(keep=0.5).to_yaml())
    with tokred.apply(model, str(recipe), layer=1) as handle:
        assert handle.methods == (tokred.DART(keep=0.5, layer=1),)
    for text in ("keep: 0.5", "[", "- dart"):
        recipe.write_text(text)
        with pytest.raises(tokred.errors.ParameterError, match="recipe"):
            tokred.apply(model, str(recipe))
    with pytest.raises(tokred.errors.ParameterError, match="cannot be read"):
        tokred.apply(model, str(tmp_path / "none.yaml"))


@pytest.mark.parametrize("family", ["llava", "llava_next"])
def test_a_step_on_the_features_sees_what_one_before_the_projector_left(family):
    model = tiny.BUILDERS[family]()
    batch = tiny.inputs(family, [tiny.ONE_IMAGE, tiny.TWO_IMAGES])
    media = {name: batch[name] for name in ("pixel_values", "image_sizes") if name in batch}
    zipped, diverse = tokred.VisionZip(keep=0.5), tokred.DivPrune(keep=0.5)
    with tokred.apply(model, zipped):
        encoded = model.model.get_image_features(**media, return_dict=True).pooler_output
    lengths, left, expected = [], [], []
    for feature in encoded:
        places = (~feature[:, 0].isnan()).nonzero()[:, 0]
        picks = diverse.picks(feature[places][None])[0]
        lengths.append(len(feature))
        left.append(len(places))
        expected.append(places[picks.sort().values].tolist())
    with tokred.apply(model, [zipped, diverse]) as handle:
        encoded = model.model.get_image_features(**media, return_dict=True).pooler_output
        assert [(~feature[:, 0].isnan()).nonzero()[:, 0].tolist() for feature in encoded] == expected
        model(**batch)
        stages = handle.summary().stages
    kept = [len(places) for places in expected]
    assert [stage.stage for stage in stages] == ["projector", "features"]
    for stage, before, after in zip(stages, (lengths, left), (left, kept), strict=True):
        assert stage.tokens_before == [before[0], before[1] + before[2]]
        assert stage.tokens_after == [after[0], after[1] + after[2]]


def test_an_inert_step_while_media_are_encoded_is_listed_too():
    model = tiny.llava()
    with tokred.apply(model, [tokred.VisionZip(keep=1.0), tokred.DivPrune(keep=0.5)]) as handle:
        model(**tiny.inputs("llava", [tiny.ONE_IMAGE]))
        counts = [(stage.method, stage.tokens_before, stage.tokens_after) for stage in handle.summary().stages]
    assert counts == [("visionzip", [16], [16]), ("divprune", [16], [8])]


def test_a_merged_token_follows_the_one_that_absorbed_it():
    item = _Encoded(torch.arange(5.0)[:, None])
    item.reduce(torch.tensor([0, 2, 4]), item.rows[[0, 2, 4]], torch.tensor([-1, 0, -1, 4, -1]))
    # Of the three that are left, the first goes into the last.
    item.reduce(torch.tensor([1, 2, -1]), torch.tensor([[2.0], [9.0], [0.0]]), torch.tensor([2, -1, -1]))
    assert item.merged_into.tolist() == [4, 4, -1, 4, -1]
    assert item.positions.tolist() == [2, 4]
    assert item.left == [3, 2]
    assert item.feature[[2, 4], 0].tolist() == [2.0, 9.0]
    assert item.feature[[0, 1, 3], 0].isnan().all()


def test_summary_counts_tokens_layers_and_calls():
    model = tiny.llava()
    batch = tiny.inputs("llava", [tiny.ONE_IMAGE, tiny.TWO_IMAGES])
    with tokred.apply(model, "fastv", keep=0.25, layer=1) as handle:
        model.generate(**batch, max_new_tokens=4)
        model(**batch)
        summary = handle.summary()
    assert summary.calls == 2
    [stage] = summary.to_dict()["stages"]
    assert stage["tokens_before"] == [16, 32]
    assert stage["tokens_after"] == [4, 8]
    assert summary.visual_tokens_before == 2 * 48
    assert summary.visual_tokens_after == 2 * 12
    assert summary.token_layers == pytest.approx((1 + 3 * 0.25) / 4)
    length = batch["input_ids"].shape[1]
    assert summary.layer_lengths == [length] + [length - 24] * 3
    assert summary.own_ms > 0
    assert "decoder_layer" in str(summary)
    assert "16, 32" in str(summary)


def test_trace_maps_tokens_to_cells():
    model = tiny.qwen2_vl()
    batch = tiny.inputs("qwen2_vl", [tiny.TWO_IMAGES])
    with tokred.apply(model, Every2()) as handle:
        model.generate(**batch, max_new_tokens=1)
        tokens = handle.trace()[0]
    cells = [(token.item, token.row, token.column) for token in tokens]
    assert cells == [(0, row, column) for row in range(4) for column in (0, 2)] + [
        (1, row, column) for row in range(2) for column in (0, 2)
    ]
    assert all(batch["input_ids"][0, token.position] == tiny.IMAGE for token in tokens)


def test_trace_of_tiles_and_newlines():
    model = tiny.llava_next()
    batch = tiny.inputs("llava_next", [tiny.Row((5, tiny.IMAGE, 6), ((2, 4),))])
    with tokred.apply(model, Every2(site="embeds")) as handle:
        model(**batch)
        tokens = handle.trace()[0]
    lengths = int((batch["input_ids"] == tiny.IMAGE).sum())
    assert len(tokens) == (lengths + 1) // 2
    assert [(token.view, token.row, token.column) for token in tokens[:3]] == [(0, 0, 0), (0, 0, 2), (0, 1, 0)]
    # Tiles of 8 columns with a newline make rows of 9: every second token alternates between even and odd columns.
    joined = [(token.row, token.column) for token in tokens if token.view == 1]
    assert (0, 0) in joined
    assert any(row == -1 for row, _ in joined)


def test_trace_names_what_was_merged():
    model = tiny.llava()
    batch = tiny.inputs("llava", [tiny.ONE_IMAGE])
    with tokred.apply(model, "visionzip", num_tokens=6, contextual_share=0.4) as handle:
        model(**batch)
        tokens = handle.trace()[0]
        picture = handle.overlay(Image.new("RGB", (16, 16), "red"))
    kept = {token.position for token in tokens}
    merged = [position for token in tokens for position in token.merged]
    assert len(tokens) == 6
    assert len(merged) == len(set(merged))
    media = set((batch["input_ids"][0] == tiny.IMAGE).nonzero()[:, 0].tolist())
    # Four dominant patches and contextual ones stay, the CLS token takes one more place, the rest is merged.
    assert set(merged) | kept == media
    assert picture.size == (448, 448)
    assert len(picture.getcolors(maxcolors=2**18)) > 3


def test_overlay_darkens_what_was_dropped():
    model = tiny.llava()
    batch = tiny.inputs("llava", [tiny.ONE_IMAGE])
    with tokred.apply(model, Every2()) as handle:
        model(**batch)
        picture = handle.overlay(Image.new("RGB", (448, 448), (200, 0, 0)))
        with pytest.raises(tokred.TokredError, match="no item 1"):
            handle.overlay(picture, item=1)
    cell = 112
    for index in range(16):
        middle = (index % 4 * cell + cell // 2, index // 4 * cell + cell // 2)
        red = picture.getpixel(middle)[0]
        assert (red == 200) == (index % 2 == 0)


def test_pause_stops_new_selections_only():
    model = tiny.llava()
    batch = tiny.inputs("llava", [tiny.ONE_IMAGE])
    stock = model(**batch).logits
    options = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, "output_scores": True}
    with tokred.apply(model, Every2(site=2)) as handle:
        first = model.generate(**batch, **options)
        ids = torch.cat([first.sequences, torch.tensor([[21, 22]])], 1)
        turn = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        cache = tiny.cache_of(first)
        expected = model.generate(**turn, **{tiny.CACHE_NAME: copy.deepcopy(cache)}, **options)
        handle.pause()
        assert torch.equal(model(**batch).logits, stock)
        paused = model.generate(**turn, **{tiny.CACHE_NAME: cache}, **options)
        handle.resume()
        assert not torch.equal(model(**batch).logits, stock)
    assert torch.equal(torch.stack(paused.scores), torch.stack(expected.scores))


def test_features_encoded_before_a_pause_leave_with_their_carriers():
    model = tiny.llava()
    batch = tiny.inputs("llava", [tiny.ONE_IMAGE])
    if not tiny.TAKES_ENCODED_MEDIA:
        pytest.skip("transformers below 5.20 takes no mm_encoder_outputs")
    with tokred.apply(model, Every2()) as handle:
        expected = model(**batch).logits
        encoded = model.model.get_image_features(batch.pop("pixel_values"), return_dict=True)
        handle.pause()
        assert torch.equal(model(**batch, mm_encoder_outputs={"image": encoded}).logits, expected)


def test_override_holds_in_its_thread_only():
    model = tiny.llava()
    batch = tiny.inputs("llava", [tiny.ONE_IMAGE])
    lengths = {}
    with tokred.apply(model, "random", keep=0.5) as handle:

        def run(name, keep):
            with torch.no_grad(), handle.override(keep=keep):
                barrier.wait(timeout=30)
                cache = tiny.cache_of(model(**batch))
                lengths[name] = cache.layers[0].keys.shape[-2]

        barrier = threading.Barrier(2)
        threads = [threading.Thread(target=run, args=arguments) for arguments in (("a", 0.25), ("b", 1.0))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        plain = tiny.cache_of(model(**batch)).layers[0].keys.shape[-2]
        with pytest.raises(tokred.errors.ParameterError, match="'ratio'"), handle.override(ratio=1):
            pass
    text = int((batch["input_ids"] != tiny.IMAGE).sum())
    assert (lengths["a"] - text, plain - text, lengths["b"] - text) == (4, 8, 16)


def test_override_cannot_move_a_site():
    model = tiny.llava()
    with (
        tokred.apply(model, "fastv", layer=2) as handle,
        pytest.raises(tokred.errors.ParameterError, match="cannot be moved"),
        handle.override(layer=1),
    ):
        pass


@pytest.mark.parametrize("method", ["random", "divprune", "uniform"])
def test_total_scope_shares_one_budget(method):
    model = tiny.qwen2_vl()
    batch = tiny.inputs("qwen2_vl", [tiny.TWO_IMAGES])
    with tokred.apply(model, method, num_tokens=6, scope="total") as handle:
        model(**batch)
        assert handle.summary().stages[-1].tokens_after == [6]
    with tokred.apply(model, method, num_tokens=6) as handle:
        model(**batch)
        assert handle.summary().stages[-1].tokens_after == [12]


def test_attention_implementation_may_change_after_apply():
    model = tiny.llava()
    batch = tiny.inputs("llava", [tiny.ONE_IMAGE])
    with tokred.apply(model, "fastv", keep=0.5):
        before = model(**batch).logits
        model.set_attn_implementation("eager")
        output = model(**batch, output_attentions=True)
        assert output.attentions[1] is not None
        torch.testing.assert_close(output.logits, before, atol=1e-5, rtol=1e-5)


def test_a_handle_that_never_acted_warns_once(caplog):
    model = tiny.llava()
    with caplog.at_level("WARNING", logger="tokred"), tokred.apply(model, "random"):
        model(**tiny.inputs("llava", [tiny.TEXT_ONLY]))
    with caplog.at_level("WARNING", logger="tokred"), tokred.apply(model, "random"):
        model(**tiny.inputs("llava", [tiny.ONE_IMAGE]))
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["random removed no token"]


def test_offloaded_weights_change_nothing():
    batch = tiny.inputs("qwen2_5_vl", [tiny.ONE_IMAGE, tiny.TWO_IMAGES])
    for method in ("divprune", "dart", "fastv"):
        model = tiny.qwen2_5_vl()
        with tokred.apply(model, method, keep=0.5):
            expected = model(**batch).logits
        accelerate.cpu_offload(model, execution_device="cpu")
        with tokred.apply(model, method, keep=0.5):
            assert torch.equal(model(**batch).logits, expected)


def test_results_are_deterministic():
    model = tiny.llava()
    batch = tiny.inputs("llava", [tiny.ONE_IMAGE])
    state = torch.get_rng_state()
    with tokred.apply(model, "random", keep=0.5):
        assert torch.equal(model(**batch).logits, model(**batch).logits)
    assert torch.equal(torch.get_rng_state(), state)
