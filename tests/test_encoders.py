"""Methods inside image encoders that stand alone, over all families of encoders."""

import copy
import threading
from functools import partial

import pytest
import tiny
import tiny_encoders
import torch
import transformers
from PIL import Image

import tokred
from tokred.adapters.encoders import find_encoders
from tokred.errors import (
    ParameterError,
    StageTakenError,
    UnsupportedAttentionError,
    UnsupportedFamilyError,
    UnsupportedInputError,
    UnsupportedModelError,
)
from tokred.merging import Tokens
from tokred.vision.tome import Pairs, merge, pair_tokens, pair_with_every

FAMILIES = tiny_encoders.FAMILIES
every_family = pytest.mark.parametrize("family", FAMILIES)
TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}


def _encoder(model):
    [encoder] = find_encoders(model, list(tokred.encoders().values()))
    return encoder


def test_every_family_has_a_tiny_model():
    assert set(FAMILIES) == set(tokred.encoders())


@every_family
def test_the_encoder_and_its_prefix_are_found(family):
    encoder = _encoder(tiny_encoders.build(family))
    assert encoder.adapter.name == family
    assert len(encoder.blocks) == tiny_encoders.LAYERS
    assert encoder.prefix == tiny_encoders.PREFIX[family]


@every_family
@pytest.mark.parametrize("parameters", [{"keep": 1.0}, {"r": 0}, {"r": []}], ids=str)
def test_an_inert_setting_is_bit_equal(family, parameters):
    model, inputs = tiny_encoders.build(family), tiny_encoders.pictures(family)
    stock = tiny_encoders.outputs(model, inputs)
    with tokred.apply(model, "tome", **parameters) as handle:
        assert all(map(torch.equal, tiny_encoders.outputs(model, inputs), stock))
    assert handle.summary().calls == 0


@every_family
def test_remove_leaves_no_trace(family):
    model, inputs = tiny_encoders.build(family), tiny_encoders.pictures(family)
    stock = tiny_encoders.outputs(model, inputs)
    hooks = [(dict(m._forward_hooks), dict(m._forward_pre_hooks)) for m in model.modules()]
    with tokred.apply(model, "tome", r=8):
        assert not torch.equal(tiny_encoders.outputs(model, inputs)[0], stock[0])
    assert [(dict(m._forward_hooks), dict(m._forward_pre_hooks)) for m in model.modules()] == hooks
    assert all(map(torch.equal, tiny_encoders.outputs(model, inputs), stock))


def _groups(monkeypatch):
    """Return a dict that fills with the groups that hold from a block on: for each token its place, and who was first.

    The blocks are counted by the reductions, so each of the first ones has to reduce.
    """
    seen = {}
    reduce = Tokens.reduce

    def note(self, selection):
        reduce(self, selection)
        seen[len(seen)] = self.places, self.first

    monkeypatch.setattr(Tokens, "reduce", note)
    return seen


def _average(model, groups, prefix):
    """Let the stock blocks replace the tokens of each group by their mean, at full length.

    A key that occurs s times counts in a softmax as one with the logarithm of s added, so this has to equal merging.
    """
    encoder = _encoder(model)
    adapter = encoder.adapter

    def average(places, module, args):
        [hidden] = args
        belongs = torch.nn.functional.one_hot(places, int(places.max()) + 1).to(hidden.dtype)
        hidden.copy_(belongs @ (belongs.transpose(1, 2) @ hidden / belongs.sum(1).unsqueeze(-1)))

    def turn(places, first, module, args, kwargs):
        own = first.gather(1, places)[:, prefix:] - prefix
        return args, kwargs | {adapter.rotary: tuple(part[own].unsqueeze(1) for part in kwargs[adapter.rotary])}

    for index, block in enumerate(encoder.blocks):
        if index in groups:
            block.get_submodule(adapter.norm).register_forward_pre_hook(partial(average, groups[index][0]))
        if adapter.rotary and index:
            before = groups[min(index - 1, max(groups))]
            attention = block.get_submodule(adapter.attention)
            attention.register_forward_pre_hook(partial(turn, *before), with_kwargs=True)


KERNELS = [
    pytest.param(family, attention, id=f"{family}-{attention}")
    for family in FAMILIES
    for attention in (["sdpa"] if family in ("timm", "open_clip") else ["sdpa", "eager"])
]


@pytest.mark.parametrize(("family", "attention"), KERNELS)
@pytest.mark.parametrize("parameters", [{"r": 11}, {"keep": 0.3, "inflect": -0.5}, {"every": 3}], ids=str)
def test_merging_equals_averaging_at_full_length(family, attention, parameters, monkeypatch):
    model, inputs = tiny_encoders.build(family, attention), tiny_encoders.pictures(family)
    groups = _groups(monkeypatch)
    with tokred.apply(model, "tome", **parameters):
        found = tiny_encoders.outputs(model, inputs)
    assert len(groups) == (1 if "every" in parameters else tiny_encoders.LAYERS)
    _average(model, groups, tiny_encoders.PREFIX[family])
    expected = tiny_encoders.outputs(model, inputs)
    assert [x.shape for x in found] == [x.shape for x in expected]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, **TOLERANCE)


@every_family
def test_unfused_attention_of_timm_and_all_others_see_short_sequences(family):
    model, inputs = tiny_encoders.build(family), tiny_encoders.pictures(family)
    encoder, seen = _encoder(model), []
    for block in encoder.blocks:
        if family == "timm":
            block.attn.fused_attn = False
        mlp = block.get_submodule(encoder.adapter.norm)
        mlp.register_forward_hook(lambda module, args, output: seen.append(output.shape[1] - encoder.prefix))
    with tokred.apply(model, "tome", keep=0.25) as handle:
        shapes = [x.shape for x in tiny_encoders.outputs(model, inputs)]
        summary = handle.summary()
    assert seen == [52, 40, 28, 16]
    assert summary.layer_lengths == [left + encoder.prefix for left in (64, 52, 40, 28)]
    assert summary.token_layers == pytest.approx((64 + 52 + 40 + 28) / (4 * 64))
    assert [stage.tokens_after for stage in summary.stages] == [[left, left] for left in seen]
    assert (summary.visual_tokens_before, summary.visual_tokens_after) == (2 * 64, 2 * 16)
    assert shapes == [x.shape for x in tiny_encoders.outputs(model, inputs)]


@every_family
def test_a_picture_in_a_batch_is_merged_as_alone(family):
    model, inputs = tiny_encoders.build(family), tiny_encoders.pictures(family, count=3)
    with tokred.apply(model, "tome", r=9):
        together = tiny_encoders.outputs(model, inputs)
        for index in range(3):
            alone = tiny_encoders.outputs(model, {name: x[index : index + 1] for name, x in inputs.items()})
            for whole, part in zip(together, alone, strict=True):
                torch.testing.assert_close(whole[index], part[0], **TOLERANCE)


def test_without_restoring_the_output_is_short():
    model, inputs = tiny_encoders.build("vit"), tiny_encoders.pictures("vit")
    with tokred.apply(model, "tome", r=8, restore=False):
        assert model.vit(**inputs).last_hidden_state.shape[1] == 1 + 64 - 4 * 8
        states = model(**inputs, output_hidden_states=True).hidden_states
    assert [state.shape[1] - 1 for state in states] == [64, 56, 48, 40, 32]


@pytest.mark.parametrize("family", ["vit", "timm", "open_clip"])
def test_sizes_weigh_attention_only_if_asked_for(family):
    model, inputs = tiny_encoders.build(family), tiny_encoders.pictures(family)
    encoder, masks = _encoder(model), []
    attention = encoder.blocks[2].get_submodule(encoder.adapter.attention)

    def note(module, args, kwargs):
        masks.append(kwargs.get(encoder.adapter.mask))

    with tokred.apply(model, "tome", r=8):
        attention.register_forward_pre_hook(note, with_kwargs=True)
        tiny_encoders.outputs(model, inputs)
    with tokred.apply(model, "tome", r=8, prop_attn=False):
        attention.register_forward_pre_hook(note, with_kwargs=True)
        tiny_encoders.outputs(model, inputs)
    weighed, _, plain = masks  # the first hook sees the second call too, before the second handle does
    assert plain is None
    sizes = weighed.flatten(1).exp()
    torch.testing.assert_close(sizes.sum(1), torch.full((2,), 65.0))


def test_trace_and_overlay_show_the_groups():
    model, inputs = tiny_encoders.build("vit"), tiny_encoders.pictures("vit")
    with tokred.apply(model, "tome", keep=0.5) as handle:
        tiny_encoders.outputs(model, inputs)
        trace = handle.trace()
        picture = handle.overlay(Image.new("RGB", (64, 64), "white"), sample=1)
    assert [len(tokens) for tokens in trace] == [32, 32]
    for tokens in trace:
        members = [position for token in tokens for position in (token.position, *token.merged)]
        assert sorted(members) == list(range(64))
        assert all(token.position < min(token.merged, default=64) for token in tokens)
        assert [(token.row, token.column) for token in tokens] == [divmod(token.position, 8) for token in tokens]
    assert len(picture.getcolors()) > 3


def test_pause_resume_and_override():
    model, inputs = tiny_encoders.build("vit"), tiny_encoders.pictures("vit")
    [stock] = tiny_encoders.outputs(model, inputs)
    with tokred.apply(model, "tome", r=8) as handle:
        [merged] = tiny_encoders.outputs(model, inputs)
        handle.pause()
        assert torch.equal(tiny_encoders.outputs(model, inputs)[0], stock)
        handle.resume()
        assert torch.equal(tiny_encoders.outputs(model, inputs)[0], merged)
        with handle.override(r=4):
            tiny_encoders.outputs(model, inputs)
        assert handle.summary().stages[-1].tokens_after == [48, 48]


def test_an_error_leaves_the_model_as_it_was():
    model, inputs = tiny_encoders.build("vit"), tiny_encoders.pictures("vit")
    [stock] = tiny_encoders.outputs(model, inputs)

    def fail(module, args):
        raise RuntimeError("in the middle")

    with tokred.apply(model, "tome", r=8) as handle:
        [merged] = tiny_encoders.outputs(model, inputs)
        hook = model.vit.layers[2].mlp.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="in the middle"):
            model(**inputs)
        hook.remove()
        handle.pause()
        assert torch.equal(tiny_encoders.outputs(model, inputs)[0], stock)
        handle.resume()
        assert torch.equal(tiny_encoders.outputs(model, inputs)[0], merged)
    assert torch.equal(tiny_encoders.outputs(model, inputs)[0], stock)


def test_two_encoders_and_two_threads_do_not_meet():
    models = [tiny_encoders.build(family) for family in ("vit", "dinov2")]
    inputs = tiny_encoders.pictures("vit")
    alone = []
    for model, r in zip(models, (8, 12), strict=True):
        with tokred.apply(model, "tome", r=r):
            alone.append(tiny_encoders.outputs(model, inputs)[0])
    found = [[], []]

    def run(index):
        for _ in range(10):
            found[index].append(tiny_encoders.outputs(models[index], inputs)[0])

    with tokred.apply(models[0], "tome", r=8), tokred.apply(models[1], "tome", r=12):
        threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for outputs, expected in zip(found, alone, strict=True):
        assert len(outputs) == 10
        assert all(torch.equal(output, expected) for output in outputs)


def test_inference_mode_and_half_precision():
    model, inputs = tiny_encoders.build("vit"), tiny_encoders.pictures("vit")
    with tokred.apply(model, "tome", r=8):
        [expected] = tiny_encoders.outputs(model, inputs)
        with torch.inference_mode():
            assert torch.equal(tiny_encoders.outputs(model, inputs)[0], expected)
        model.to(torch.bfloat16)
        [half] = tiny_encoders.outputs(model, {"pixel_values": inputs["pixel_values"].bfloat16()})
    assert half.dtype == torch.bfloat16
    assert half.isfinite().all()


def test_a_model_that_needs_gradients_is_told_to_switch_them_off():
    model, inputs = tiny_encoders.build("vit").requires_grad_(True), tiny_encoders.pictures("vit")
    refused = pytest.raises(UnsupportedInputError, match="no_grad")
    with tokred.apply(model, "tome", r=8), torch.enable_grad(), refused:
        model(**inputs)


def test_padded_pictures_are_refused():
    model, inputs = tiny_encoders.build("siglip2"), tiny_encoders.pictures("siglip2")
    inputs["pixel_attention_mask"][1, 40:] = 0
    inputs["spatial_shapes"] = torch.tensor([[8, 8], [5, 8]])
    with tokred.apply(model, "tome", r=8), pytest.raises(UnsupportedInputError, match="padded"):
        model(**inputs)


def test_a_kernel_that_takes_no_numbers_as_mask_is_refused():
    model, inputs = tiny_encoders.build("vit"), tiny_encoders.pictures("vit")
    attention = model.vit.layers[2].attention
    attention.config = copy.copy(attention.config)
    attention.config._attn_implementation = "flash_attention_2"
    with tokred.apply(model, "tome", r=8), pytest.raises(UnsupportedAttentionError, match="prop_attn=False"):
        model(**inputs)


def test_methods_of_other_stages_are_refused_on_an_encoder():
    model = tiny_encoders.build("vit")
    with pytest.raises(UnsupportedFamilyError, match="features"):
        tokred.apply(model, "divprune")
    with pytest.raises(UnsupportedFamilyError, match="decoder"):
        tokred.apply(model, "fastv")


def test_a_second_handle_and_two_methods_on_one_block_are_refused():
    model = tiny_encoders.build("timm")
    with tokred.apply(model, "tome"), pytest.raises(StageTakenError, match="tome"):
        tokred.apply(model, "tome")
    with pytest.raises(StageTakenError, match="encoder_block 0"):
        tokred.apply(model, [tokred.ToMe(r=4), tokred.ToMe(every=2)])


def test_supported_names_what_is_wrong():
    assert tokred.supported(tiny_encoders.build("open_clip"))
    no_encoder = tokred.supported(torch.nn.Linear(2, 2))
    assert not no_encoder
    assert "timm" in no_encoder.reason
    both = torch.nn.ModuleList([tiny_encoders.build("vit"), tiny_encoders.build("timm")])
    with pytest.raises(UnsupportedModelError, match=r"'0\.vit\.layers', '1\.blocks'"):
        tokred.apply(both, "tome")


def test_the_text_tower_of_clip_is_left_alone():
    text = transformers.CLIPTextConfig(hidden_size=24, intermediate_size=48, num_hidden_layers=2, num_attention_heads=3)
    vision = tiny_encoders.build("clip").config
    model = transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision)).eval()
    ids = torch.tensor([[1, 2, 3, 4]])
    inputs = tiny_encoders.pictures("clip")
    with torch.no_grad():
        stock = model(input_ids=ids, **inputs)
        with tokred.apply(model, "tome", r=8):
            found = model(input_ids=ids, **inputs)
    assert torch.equal(found.text_embeds, stock.text_embeds)
    assert not torch.equal(found.image_embeds, stock.image_embeds)


def test_the_tower_of_a_model_merges_as_it_does_alone():
    """The feature is the output of the second of three blocks: the third may not merge, the second has to."""
    model, batch = tiny.llava(), tiny.inputs("llava", [tiny.TWO_IMAGES])
    pixels = batch["pixel_values"]
    with tokred.apply(model.model.vision_tower, "tome", r=[5, 3], restore=False) as handle:
        states = model.model.vision_tower(pixels, output_hidden_states=True).hidden_states[-2]
        merged = handle._session.statistics.last
    with tokred.apply(model, "tome", keep=0.5, inflect=-0.25) as handle:
        encoded = model.model.get_image_features(pixels, return_dict=True).pooler_output
        model(**batch)
        trace = handle.trace()[0]
    order = merged.block.tokens.first[:, 1:].argsort(dim=1)
    expected = model.model.multi_modal_projector(states[:, 1:][torch.arange(2).unsqueeze(1), order])
    alone = [(token.item, token.row, token.column) for item in merged.trace() for token in item]
    assert len(trace) == len(alone) == 16
    assert [(token.row, token.column) for token in trace] == [cell[1:] for cell in alone]
    for feature, rows in zip(encoded, expected, strict=True):
        torch.testing.assert_close(feature[~feature[:, 0].isnan()], rows, **TOLERANCE)


def test_a_tower_whose_tokens_another_method_observes_cannot_merge():
    with pytest.raises(UnsupportedFamilyError, match="observes all tokens of the tower"):
        tokred.apply(tiny.llava(), ["tome", "visionzip"])


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"r": -1}, "r=-1"),
        ({"r": [3, -2]}, "r="),
        ({"r": 2.5}, "r=2.5"),
        ({"inflect": 2}, "inflect=2"),
        ({"every": 1}, "every=1"),
        ({"every": 2, "r": 3}, "exclude"),
        ({"keep": 0}, "keep=0"),
    ],
)
def test_bad_parameters_are_named(parameters, message):
    with pytest.raises(ParameterError, match=message):
        tokred.ToMe(**parameters)


def test_the_most_similar_pair_merges_and_the_prefix_stays():
    """Behind two special tokens stand a, b, c, d, e: places 2, 4, 6 match 3 and 5; e is nearly d, c is half b."""
    a, b, c, d, e = (torch.tensor([x, y]) for x, y in ((1.0, 0.0), (0.0, 1.0), (1.0, 1.0), (-1.0, 0.1), (-1.0, 0.0)))
    keys = torch.stack([d, d, a, b, c, d, e])[None]
    pairs = pair_tokens(keys, 1, prefix=2)
    assert (pairs.sources.tolist(), pairs.targets.tolist()) == ([[6]], [[5]])
    assert pairs.keep.tolist() == [[0, 1, 2, 4, 3, 5]]
    pairs = pair_tokens(keys, 2, prefix=2)
    assert (pairs.sources.tolist(), pairs.targets.tolist()) == ([[6, 4]], [[5, 3]])


def test_a_merged_token_is_the_mean_of_all_it_stands_for():
    x = torch.tensor([[[0.0], [6.0], [3.0], [9.0]]])
    pairs = Pairs(torch.tensor([[0, 1]]), torch.tensor([[2, 3]]), torch.tensor([[1, 1]]))
    # The target stands for two tokens already, one source for three.
    rows = merge(x, torch.tensor([[1.0, 2, 3, 1]]), pairs)
    torch.testing.assert_close(rows, torch.tensor([[[0.0], [(2 * 6 + 3 * 3 + 9) / 6]]]))


def test_every_third_token_absorbs_the_others_and_the_rest_stays():
    keys = torch.eye(3)[[0, 0, 1, 0, 1, 2, 0, 2]][None]
    # Groups (1, 2, 3) and (4, 5, 6) behind one special token: targets 3 and 6; token 7 belongs to no group.
    pairs = pair_with_every(keys, 3, prefix=1)
    assert pairs.keep.tolist() == [[0, 3, 6, 7]]
    assert pairs.sources.tolist() == [[1, 2, 4, 5]]
    assert pairs.targets.tolist() == [[3, 3, 3, 3]]


def test_a_schedule_that_falls_ends_at_zero_and_lists_are_filled():
    assert sum(stage for stage in tokred.vision.tome.schedule(12, 16, -1.0)) <= 12 * 16
    assert tokred.vision.tome.schedule(5, 4, -1.0) == [8, 6, 4, 2, 0]
    assert tokred.vision.tome.schedule(4, (3, 2)) == [3, 2, 0, 0]
