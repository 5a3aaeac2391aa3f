"""The invariants of the design, over all methods and families in the registry."""

import copy
import pickle

import pytest
import tiny
import torch
from oracle import masked_logits, merged_embeds, surviving, surviving_by_layer
from probes import ADAPTIVE, NEEDS_CLS, PROBES

import tokred
from tokred.errors import LiveHandleError, UnsupportedFamilyError

FAMILIES = sorted(tokred.adapters())
METHODS = sorted(tokred.methods())
TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}


def _pairs():
    for family in FAMILIES:
        for method in METHODS:
            # The towers of Qwen have no CLS token; that they refuse is tested in test_errors.py.
            if not (method in NEEDS_CLS and family.startswith("qwen")):
                yield pytest.param(family, method, id=f"{family}-{method}")


every_pair = pytest.mark.parametrize(("family", "method"), list(_pairs()))
every_family = pytest.mark.parametrize("family", FAMILIES)
every_probe = pytest.mark.parametrize("probe", PROBES.values(), ids=PROBES)


def test_every_family_has_a_tiny_model():
    assert set(FAMILIES) == set(tiny.BUILDERS)


def _generate(model, batch, steps=5, **options):
    return model.generate(
        **batch, max_new_tokens=steps, do_sample=False, return_dict_in_generate=True, output_scores=True, **options
    )


def _scores(output):
    return torch.stack(output.scores, dim=1)


@every_pair
def test_keep_all_is_bit_equal(family, method):
    model = tiny.BUILDERS[family]()
    batch = tiny.inputs(family, [tiny.ONE_IMAGE, tiny.TWO_IMAGES])
    stock = model(**batch).logits
    with tokred.apply(model, method, keep=1.0):
        assert torch.equal(model(**batch).logits, stock)


@every_pair
def test_text_only_is_bit_equal(family, method):
    model = tiny.BUILDERS[family]()
    batch = tiny.inputs(family, [tiny.TEXT_ONLY])
    stock = _scores(_generate(model, batch))
    with tokred.apply(model, method, keep=0.25):
        assert torch.equal(_scores(_generate(model, batch)), stock)


@every_pair
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_removing_equals_masking(family, method, attention):
    _check_prefill(tiny.BUILDERS[family](attention), family, tokred.methods()[method](keep=0.4))


def _check_prefill(model, family, method):
    batch = tiny.inputs(family, [tiny.ONE_IMAGE, tiny.TWO_IMAGES])
    valid = batch["attention_mask"].bool()
    inputs = tiny.base_inputs(model, batch)
    with tokred.apply(model, method) as handle:
        embeds = merged_embeds(model, batch, inputs["inputs_embeds"])
        output = model(**batch, use_cache=True)
        kept = surviving_by_layer(tiny.cache_of(output), valid.shape[1])
        assert torch.equal(kept[-1] & valid, surviving(handle) & valid)
        assert handle.summary().layer_lengths[-1] < valid.shape[1]
    if not (kept[0] | ~valid).all():
        inputs["inputs_embeds"] = embeds
    expected, logits = masked_logits(model, inputs, kept, valid), output.logits
    alive = kept[-1] & valid
    assert not (alive | ~valid).all()
    torch.testing.assert_close(logits[alive], expected[alive], **TOLERANCE)


@every_family
@every_probe
def test_decode_equals_masking(family, probe):
    _check_decode(tiny.BUILDERS[family](), family, probe)


@pytest.mark.slow
@every_pair
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_decode_equals_masking_with_every_method(family, method, attention):
    model, kind = tiny.BUILDERS[family](attention), tokred.methods()[method]
    for scope in kind.scopes:
        _check_decode(model, family, kind(keep=0.4, scope=scope))


@pytest.mark.parametrize("family", ["llava", "llava_next"])
def test_methods_inside_the_tower_before_and_inside_the_decoder_compose(family):
    methods = [tokred.FastV(keep=0.5), tokred.DivPrune(keep=0.5), tokred.ToMe(keep=0.5)]
    model = tiny.BUILDERS[family]()
    _check_decode(model, family, methods)
    with tokred.apply(model, methods) as handle:
        model(**tiny.inputs(family, [tiny.ONE_IMAGE, tiny.TWO_IMAGES]))
        summary = handle.summary()
    assert [stage.stage for stage in summary.stages] == ["encoder_block", "features", "decoder_layer"]
    for earlier, later in zip(summary.stages, summary.stages[1:]):
        assert earlier.tokens_after == later.tokens_before
    if family == "llava":
        assert [stage.tokens_after for stage in summary.stages] == [[8, 16], [4, 8], [2, 4]]


def _check_decode(model, family, method):
    batch = tiny.inputs(family, [tiny.ONE_IMAGE, tiny.TWO_IMAGES])
    valid = batch["attention_mask"].bool()
    length = valid.shape[1]
    embeds = tiny.base_inputs(model, batch)["inputs_embeds"]
    with tokred.apply(model, method):
        embeds = merged_embeds(model, batch, embeds)
        # Random weights may well say the placeholder, which no later prompt could contain.
        output = _generate(model, batch, steps=4, suppress_tokens=[tiny.IMAGE])
        scores = _scores(output)
        kept = surviving_by_layer(tiny.cache_of(output), length)
    new = output.sequences[:, length:-1]
    ones = torch.ones_like(new)
    extended = batch | {
        "input_ids": torch.cat([batch["input_ids"], new], 1),
        "attention_mask": torch.cat([batch["attention_mask"], ones], 1),
    }
    if "mm_token_type_ids" in batch:
        extended["mm_token_type_ids"] = torch.cat([batch["mm_token_type_ids"], torch.zeros_like(ones)], 1)
    inputs = tiny.base_inputs(model, extended)
    if not (kept[0] | ~valid).all():
        inputs["inputs_embeds"] = torch.cat([embeds, inputs["inputs_embeds"][:, length:]], 1)
    if not family.startswith("qwen"):
        # Without position ids the stock forward counts padding; `generate` counts from the first token.
        inputs["position_ids"] = (extended["attention_mask"].cumsum(1) - 1).clamp(min=0)
    kept = [torch.cat([layer, ones.bool()], 1) for layer in kept]
    expected = masked_logits(model, inputs, kept, torch.cat([valid, ones.bool()], 1))
    expected[..., tiny.IMAGE] = -torch.inf
    torch.testing.assert_close(scores, expected[:, length - 1 :], **TOLERANCE)


@every_pair
def test_row_of_padded_batch_equals_single_run(family, method):
    _check_padding(tiny.BUILDERS[family](), family, tokred.methods()[method](keep=0.4))


def _check_padding(model, family, method):
    rows = [tiny.ONE_IMAGE, tiny.TWO_IMAGES, tiny.TEXT_ONLY]
    with tokred.apply(model, method):
        together = _scores(_generate(model, tiny.inputs(family, rows)))
        for index, row in enumerate(rows):
            alone = _scores(_generate(model, tiny.inputs(family, [row])))
            torch.testing.assert_close(together[index], alone[0], **TOLERANCE)


@pytest.mark.parametrize("family", ["llava", "llava_next"])
@pytest.mark.parametrize("method", ADAPTIVE, ids=repr)
def test_counts_that_the_images_decide(family, method):
    """Images of one batch keep different numbers of tokens, through prefill, decode and padding."""
    model = tiny.BUILDERS[family]()
    _check_prefill(model, family, method)
    _check_decode(model, family, method)
    _check_padding(model, family, method)
    with tokred.apply(model, method) as handle:
        model(**tiny.inputs(family, [tiny.ONE_IMAGE, tiny.TWO_IMAGES]))
        tokens = handle.trace()
    kept = [[token.item for token in row] for row in tokens]
    assert len({row.count(item) for row in kept for item in row}) > 1


@every_family
@every_probe
def test_right_padding_equals_single_run(family, probe):
    model = tiny.BUILDERS[family]()
    rows = [tiny.ONE_IMAGE, tiny.TWO_IMAGES]
    with tokred.apply(model, probe):
        batch = tiny.inputs(family, rows, pad_right=True)
        together = model(**batch).logits
        for index, row in enumerate(rows):
            alone = model(**tiny.inputs(family, [row])).logits
            torch.testing.assert_close(together[index, : alone.shape[1]], alone[0], **TOLERANCE)


@every_pair
def test_same_under_sdpa_and_eager(family, method):
    batch = tiny.inputs(family, [tiny.ONE_IMAGE, tiny.TWO_IMAGES])
    results, kept = [], []
    for attention in ("sdpa", "eager"):
        model = tiny.BUILDERS[family](attention)
        with tokred.apply(model, method, keep=0.4) as handle:
            results.append(_scores(_generate(model, batch)))
            kept.append(surviving(handle))
    assert torch.equal(*kept)
    # The two kernels of the stock model alone differ by 6e-6 on these prompts.
    torch.testing.assert_close(*results, atol=2e-5, rtol=1e-5)


@every_family
@every_probe
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_second_turn_equals_one_shot(family, probe, attention):
    model = tiny.BUILDERS[family](attention)
    batch = tiny.inputs(family, [tiny.ONE_IMAGE])
    with tokred.apply(model, probe):
        first = _generate(model, batch, steps=4)
        more = torch.tensor([[21, 22, 23]])
        ids = torch.cat([first.sequences, more], 1)
        full = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if "mm_token_type_ids" in batch:
            full["mm_token_type_ids"] = (ids == tiny.IMAGE).int()
        seen = []
        hook = model.model.language_model.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(kwargs["inputs_embeds"].shape[1]), with_kwargs=True
        )
        second = _generate(model, full | {tiny.CACHE_NAME: tiny.cache_of(first)}, steps=4)
        hook.remove()
        media = {name: value for name, value in batch.items() if name not in full}
        one_shot = _generate(model, full | media, steps=4)
    assert seen[0] == 4  # the last answer token, whose keys were not computed yet, and three new ones
    torch.testing.assert_close(_scores(second), _scores(one_shot), **TOLERANCE)


@every_probe
def test_second_turn_with_a_new_image(probe):
    model = tiny.llava()
    first_batch = tiny.inputs("llava", [tiny.ONE_IMAGE])
    with tokred.apply(model, probe):
        first = _generate(model, first_batch, steps=3)
        more = tiny.inputs("llava", [tiny.Row((21, tiny.IMAGE, 22, 23), ((4, 4),))])
        ids = torch.cat([first.sequences, more["input_ids"]], 1)
        full = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        second = _generate(
            model, full | {"pixel_values": more["pixel_values"], tiny.CACHE_NAME: tiny.cache_of(first)}, steps=4
        )
        both = torch.cat([first_batch["pixel_values"], more["pixel_values"]])
        one_shot = _generate(model, full | {"pixel_values": both}, steps=4)
    lengths = [layer.keys.shape[-2] for layer in tiny.cache_of(second).layers]
    assert lengths == [layer.keys.shape[-2] for layer in tiny.cache_of(one_shot).layers]
    torch.testing.assert_close(_scores(second), _scores(one_shot), **TOLERANCE)


@every_family
@every_probe
def test_a_copied_cache_goes_on_alone(family, probe):
    """Two continuations from copies of one conversation do not meet, and equal the continuation of the original."""
    model = tiny.BUILDERS[family]()
    batch = tiny.inputs(family, [tiny.ONE_IMAGE, tiny.ONE_IMAGE])
    with tokred.apply(model, probe):
        first = _generate(model, batch, steps=3)
        caches = [copy.deepcopy(tiny.cache_of(first)) for _ in range(2)]

        def go_on(tokens, cache):
            ids = torch.cat([first.sequences, torch.tensor([tokens] * 2)], 1)
            turn = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            if "mm_token_type_ids" in batch:
                turn["mm_token_type_ids"] = (ids == tiny.IMAGE).int()
            return _scores(_generate(model, turn | {tiny.CACHE_NAME: cache}, steps=3))

        one, other = go_on([21, 22], caches[0]), go_on([23, 24, 25], caches[1])
        assert torch.equal(go_on([21, 22], tiny.cache_of(first)), one)
        assert not torch.equal(one, other)


@every_family
@every_probe
def test_prompt_lookup_decoding_equals_greedy(family, probe):
    """Assisted decoding feeds several tokens at once and crops the cache."""
    model = tiny.BUILDERS[family]()
    batch = tiny.inputs(family, [tiny.ONE_IMAGE])
    with tokred.apply(model, probe):
        greedy = model.generate(**batch, max_new_tokens=12, do_sample=False)
        assisted = model.generate(**batch, max_new_tokens=12, do_sample=False, prompt_lookup_num_tokens=3)
    assert torch.equal(greedy, assisted)


@every_family
@every_probe
@pytest.mark.parametrize("mode", ["beams", "beam_sampling", "sampling", "no_cache"])
def test_generation_modes(family, probe, mode):
    model = tiny.BUILDERS[family]()
    second = tiny.TWO_IMAGES if tiny.BEAMS_REPEAT_IMAGES_BY_ROW else tiny.TEXT_ONLY
    batch = tiny.inputs(family, [tiny.ONE_IMAGE, second])
    options = {
        "beams": {"num_beams": 3, "do_sample": False},
        "beam_sampling": {"num_beams": 2, "do_sample": True},
        "sampling": {"do_sample": True, "num_return_sequences": 2},
        "no_cache": {"do_sample": False, "use_cache": False},
    }[mode]
    with tokred.apply(model, probe):
        torch.manual_seed(0)
        result = model.generate(**batch, max_new_tokens=5, return_dict_in_generate=True, output_scores=True, **options)
        assert torch.isfinite(torch.stack(result.scores)[:, :, 3:]).any(-1).all()
        if mode == "no_cache":
            cached = model.generate(**batch, max_new_tokens=5, do_sample=False)
            assert torch.equal(result.sequences, cached)
        assert torch.equal(result.sequences[0, : batch["input_ids"].shape[1]], batch["input_ids"][0])


@every_family
@every_probe
def test_beam_scores_equal_forward_scores(family, probe):
    """The score of the best beam is the sum of the log-probabilities that a plain forward gives its tokens."""
    model = tiny.BUILDERS[family]()
    batch = tiny.inputs(family, [tiny.ONE_IMAGE])
    prompt = batch["input_ids"].shape[1]
    with tokred.apply(model, probe):
        result = model.generate(
            **batch,
            max_new_tokens=4,
            num_beams=3,
            do_sample=False,
            length_penalty=0.0,
            return_dict_in_generate=True,
            output_scores=True,
        )
        ids = result.sequences
        full = batch | {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if "mm_token_type_ids" in batch:
            full["mm_token_type_ids"] = (ids == tiny.IMAGE).int()
        logs = model(**full).logits.log_softmax(-1)
    tokens = ids[:, prompt:]
    total = logs[:, prompt - 1 : -1].gather(-1, tokens.unsqueeze(-1)).sum()
    torch.testing.assert_close(result.sequences_scores[0], total, atol=1e-4, rtol=1e-4)


@every_family
@every_probe
def test_outputs_keep_the_callers_length(family, probe):
    model = tiny.BUILDERS[family]()
    batch = tiny.inputs(family, [tiny.ONE_IMAGE, tiny.TWO_IMAGES])
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    given = labels.clone()
    with tokred.apply(model, probe) as handle:
        output = model(**batch, labels=labels)
        kept = surviving(handle)
        last = model(**batch, logits_to_keep=1).logits
    assert output.logits.shape[:2] == batch["input_ids"].shape
    torch.testing.assert_close(last[:, 0], output.logits[:, -1])
    assert torch.equal(labels, given)
    expected = torch.nn.functional.cross_entropy(
        output.logits[:, :-1].flatten(0, 1), labels.masked_fill(~kept, -100)[:, 1:].flatten()
    )
    torch.testing.assert_close(output.loss, expected)


@every_family
@every_probe
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_mask_given_in_full_is_gathered(family, probe, attention):
    """A 4-D mask that also hides one text token equals the 2-D mask that hides it."""
    model = tiny.BUILDERS[family](attention)
    batch = tiny.inputs(family, [tiny.ONE_IMAGE])
    length = batch["input_ids"].shape[1]
    hidden = torch.ones(1, length, dtype=torch.long)
    hidden[0, 1] = 0
    seen = torch.ones(length, length, dtype=torch.bool).tril() & hidden.bool() | torch.eye(length, dtype=torch.bool)
    full = seen[None, None] if attention == "sdpa" else torch.where(seen, 0.0, torch.finfo(torch.float).min)[None, None]
    positions = tiny.base_inputs(model, batch)["position_ids"]
    if positions is None:
        positions = torch.arange(length).unsqueeze(0)
    with tokred.apply(model, probe):
        flat = model(**batch | {"attention_mask": hidden, "position_ids": positions}).logits
        given = model(**batch | {"attention_mask": full, "position_ids": positions}).logits
    torch.testing.assert_close(given[:, 2:], flat[:, 2:], **TOLERANCE)


@every_family
@every_probe
def test_two_handles_on_two_models_do_not_meet(family, probe):
    first, second = tiny.BUILDERS[family](), tiny.BUILDERS[family]()
    batch = tiny.inputs(family, [tiny.ONE_IMAGE])
    stock = second(**batch).logits
    with tokred.apply(first, probe):
        first(**batch)
        assert torch.equal(second(**batch).logits, stock)
        with tokred.apply(second, "random", keep=0.25) as other:
            second(**batch)
            first(**batch)
            assert other.summary().calls == 1


@every_family
def test_a_live_handle_forbids_copies(family):
    model = tiny.BUILDERS[family]()
    with tokred.apply(model, "random"):
        with pytest.raises(LiveHandleError, match="remove"):
            copy.deepcopy(model)
        with pytest.raises(LiveHandleError, match="remove"):
            pickle.dumps(model)
    copy.deepcopy(model)


@every_family
def test_methods_on_different_stages_compose(family):
    model = tiny.BUILDERS[family]()
    batch = tiny.inputs(family, [tiny.ONE_IMAGE, tiny.TWO_IMAGES])
    methods = [tokred.Uniform(keep=0.5), tokred.DART(keep=0.5, layer=1), tokred.FastV(keep=0.5, layer=3)]
    with tokred.apply(model, methods) as handle:
        together = _scores(_generate(model, batch))
        summary = handle.summary()
        stages = [(stage.stage, stage.method) for stage in summary.stages]
        for index, row in enumerate([tiny.ONE_IMAGE, tiny.TWO_IMAGES]):
            alone = _scores(_generate(model, tiny.inputs(family, [row])))
            torch.testing.assert_close(together[index], alone[0], **TOLERANCE)
    assert stages == [("features", "uniform"), ("decoder_layer", "dart"), ("decoder_layer", "fastv")]
    lengths = summary.layer_lengths
    assert lengths[0] > lengths[1] == lengths[2] > lengths[3]


@pytest.mark.parametrize("method", NEEDS_CLS)
def test_refused_without_cls_token(method):
    with pytest.raises(UnsupportedFamilyError, match="does not provide"):
        tokred.apply(tiny.qwen2_5_vl(), method)
