"""The acceptance cases A1 to A9: what breaks other tools (public bug reports), one named test each."""

import logging

import pytest
import tiny
import torch
from oracle import masked_logits, surviving
from probes import NEEDS_CLS, PROBES, Every2
from tiny import END, IMAGE, PAD, START, VIDEO

import tokred
from tokred.cache import handle_is_active
from tokred.errors import AlreadyCompiledError, StageTakenError

PROMPT = [5, 6, START] + [IMAGE] * 16 + [END, 7, 8, 9]
every_attention = pytest.mark.parametrize("attention", ["sdpa", "eager"])


def _prompt(seed=0):
    ids = torch.tensor([PROMPT])
    pixels = torch.randn(64, 96, generator=torch.Generator().manual_seed(seed))
    return {
        "input_ids": ids,
        "mm_token_type_ids": (ids == IMAGE).int(),
        "pixel_values": pixels,
        "image_grid_thw": torch.tensor([[1, 8, 8]]),
    }


def _generate(model, batch, steps=8, **options):
    return model.generate(
        **batch, max_new_tokens=steps, do_sample=False, return_dict_in_generate=True, output_scores=True, **options
    )


def _scores(output):
    return torch.stack(output.scores, dim=1)


class Recorder:
    """Notes the keyword arguments of every call of a module."""

    def __init__(self, module):
        self.calls = []
        self.hook = module.register_forward_pre_hook(lambda m, a, kw: self.calls.append((a, kw)), with_kwargs=True)

    def __enter__(self):
        return self.calls

    def __exit__(self, *_):
        self.hook.remove()


@pytest.mark.parametrize("site", ["features", "embeds"])
def test_a1_placeholders_and_positions(site):
    model = tiny.qwen2_5_vl()
    batch = _prompt()
    stock = tiny.base_inputs(model, batch)
    with tokred.apply(model, Every2(site=site)) as handle:
        with Recorder(model.model.language_model.layers[0]) as calls:
            output = _generate(model, batch)
        assert calls[0][0][0].shape[1] == 15
        assert torch.equal(output.sequences[:, :23], batch["input_ids"])
        kept = surviving(handle)
    short = kept[0].nonzero()[:, 0]
    assert short.tolist() == [0, 1, 2, *range(3, 19, 2), 19, 20, 21, 22]

    # Oracle: the stock language model on the gathered embeddings and positions, step by step on its own cache.
    embeds, positions = stock["inputs_embeds"][:, short], stock["position_ids"][..., short]
    step = {"inputs_embeds": embeds, "position_ids": positions}
    cache, expected = None, []
    following = int(positions.max()) + 1
    for token in output.sequences[0, 23:].tolist():
        result = model.model.language_model(**step, **{tiny.CACHE_NAME: cache}, use_cache=True)
        cache = tiny.cache_of(result)
        expected.append(model.lm_head(result.last_hidden_state[:, -1]))
        step = {
            "inputs_embeds": model.get_input_embeddings()(torch.tensor([[token]])),
            "position_ids": torch.full((3, 1, 1), following),
        }
        following += 1
    torch.testing.assert_close(_scores(output), torch.stack(expected, 1), atol=1e-6, rtol=0)


def test_a2_video_then_image():
    model = tiny.qwen2_5_vl()
    ids = torch.tensor([[5, START] + [VIDEO] * 16 + [END, 6, START] + [IMAGE] * 8 + [END, 7, 8]])
    generator = torch.Generator().manual_seed(0)
    batch = {
        "input_ids": ids,
        "mm_token_type_ids": torch.where(ids == VIDEO, 2, (ids == IMAGE).int()),
        "pixel_values_videos": torch.randn(64, 96, generator=generator),
        "video_grid_thw": torch.tensor([[2, 4, 8]]),
        "pixel_values": torch.randn(32, 96, generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, 8]]),
    }
    with Recorder(model.model.language_model) as calls:
        _generate(model, batch, steps=1)
    stock = calls[0][1]["position_ids"]
    for probe in (PROBES["features"], PROBES["embeds"], PROBES["layer2"]):
        with tokred.apply(model, probe) as handle:
            with Recorder(model.model.language_model) as calls:
                output = _generate(model, batch, steps=2)
            tokens = handle.trace()[0]
            kept = surviving(handle)[0]
        assert [sum(token.item == item for token in tokens) for item in (0, 1)] == [8, 4]
        assert [token.modality for token in tokens] == ["video"] * 8 + ["image"] * 4
        if probe.site != 2:
            assert torch.equal(calls[0][1]["position_ids"], stock[..., kept])
        assert torch.equal(calls[1][1]["position_ids"], stock[..., -1:] + 1)
        assert torch.isfinite(_scores(output)).all()


@pytest.mark.parametrize("probe", PROBES.values(), ids=PROBES)
def test_a3_batch_and_padding(probe):
    model = tiny.qwen2_5_vl()
    rows = [
        tiny.Row((5, 6, START, IMAGE, END, 7, 8, 9), ((4, 4),)),
        tiny.Row((5, 6, START, IMAGE, END, 7, 8, 9), ((2, 4),)),
    ]
    with tokred.apply(model, probe):
        batch = tiny.inputs("qwen2_5_vl", rows)
        assert batch["attention_mask"][1, :8].sum() == 0
        together = _scores(_generate(model, batch, steps=6))
        alone = _scores(_generate(model, tiny.inputs("qwen2_5_vl", rows[1:]), steps=6))
    torch.testing.assert_close(together[1], alone[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("probe", PROBES.values(), ids=PROBES)
def test_a4_second_turn(probe):
    model = tiny.qwen2_5_vl()
    batch = _prompt()
    with tokred.apply(model, probe):
        first = _generate(model, batch)
        ids = torch.cat([first.sequences, torch.tensor([[21, 22, 23]])], 1)
        assert ids.shape[1] == 34
        media = {"input_ids": ids, "mm_token_type_ids": (ids == IMAGE).int()}
        with Recorder(model.model.language_model) as calls:
            second = _generate(model, media | {tiny.CACHE_NAME: tiny.cache_of(first)}, steps=4)
        one_shot = _generate(model, batch | media, steps=4)
    assert calls[0][1]["inputs_embeds"].shape[1] == 4
    positions = calls[0][1]["position_ids"]
    assert positions[-1, 0].tolist() == [18, 19, 20, 21]
    torch.testing.assert_close(_scores(second), _scores(one_shot), atol=1e-5, rtol=0)


def test_a5_no_attention_weights():
    kept, scores = [], []
    for attention in ("sdpa", "eager"):
        model = tiny.qwen2_5_vl(attention)
        with tokred.apply(model, "fastv", layer=2, keep=0.5) as handle:
            with Recorder(model.model.language_model.layers[1]) as calls:
                output = _generate(model, _prompt(), steps=1)
            assert len(calls) == 1
            assert model.config._attn_implementation == attention
            assert model.model.language_model.config._attn_implementation == attention
            lengths = [layer.keys.shape[-2] for layer in tiny.cache_of(output).layers]
            kept.append(surviving(handle))
        assert lengths == [23, 23, 15, 15]
        scores.append(_scores(output))
    assert torch.equal(*kept)
    torch.testing.assert_close(*scores, atol=1e-5, rtol=0)


def test_a5_the_kept_set_is_that_of_the_attention_weights():
    """The tap sees what `output_attentions` of the stock eager model returns."""
    model = tiny.qwen2_5_vl("eager")
    weights = model(**_prompt(), output_attentions=True).attentions[1]
    media = (torch.tensor(PROMPT) == IMAGE).nonzero()[:, 0]
    best = weights[0, :, -1, media].mean(0).topk(8).indices.sort().values
    with tokred.apply(model, "fastv", layer=2, keep=0.5) as handle:
        model(**_prompt())
        positions = [token.position for token in handle.trace()[0]]
    assert positions == media[best].tolist()


@pytest.mark.parametrize("method", ["dart", "fastv"])
def test_a6_removing_equals_masking(method):
    model = tiny.qwen2_5_vl("eager")
    batch = _prompt()
    inputs = tiny.base_inputs(model, batch)
    with tokred.apply(model, method, layer=2, keep=0.5) as handle:
        logits = model(**batch).logits
        kept = surviving(handle)
    layers = model.config.text_config.num_hidden_layers
    whole = torch.ones_like(kept)
    expected = masked_logits(model, inputs, [whole] * 2 + [kept] * (layers - 2))
    torch.testing.assert_close(logits[kept], expected[kept], atol=1e-5, rtol=0)


def test_a7_apply_after_compile_is_refused():
    model = tiny.qwen2_5_vl()
    compiled = torch.compile(model, backend="eager")
    compiled(**_prompt())
    with pytest.raises(AlreadyCompiledError, match="compile"):
        tokred.apply(model, "random")
    del compiled
    torch._dynamo.reset()
    other = tiny.qwen2_5_vl()
    other.model.language_model.layers[0].compile(backend="eager")
    with pytest.raises(AlreadyCompiledError, match=r"layers\.0"):
        tokred.apply(other, "random")


@pytest.mark.parametrize("method", ["divprune", "fastv", "dart"])
def test_a7_apply_then_compile(method):
    torch._dynamo.reset()
    model = tiny.qwen2_5_vl()
    batch = _prompt()
    stock = model(**batch).logits
    handle = tokred.apply(model, method, keep=0.5)
    plain = model(**batch).logits
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(compiled(**batch).logits, plain, atol=1e-6, rtol=0)
    assert handle.summary().calls == 2
    handle.remove()
    assert torch.equal(compiled(**batch).logits, stock)


def _snapshot(model):
    """Everything that a handle might leave behind."""
    state = {}
    for name, module in model.named_modules():
        hooks = {key: dict(value) for key, value in vars(module).items() if key.endswith("_hooks")}
        state[name] = (type(module), sorted(vars(module)), hooks, id(getattr(module, "config", None)))
    return state, list(model.state_dict())


@pytest.mark.parametrize("family", sorted(tiny.BUILDERS))
@pytest.mark.parametrize("fails", [False, True], ids=["normal", "exception"])
@pytest.mark.parametrize("method", ["divprune", "dart", "fastv", "visionzip"])
def test_a8_restore(family, method, fails):
    if method == "visionzip" and family.startswith("qwen"):
        method = "uniform"
    model = tiny.BUILDERS[family]()
    batch = tiny.inputs(family, [tiny.ONE_IMAGE, tiny.TWO_IMAGES])
    stock = _scores(_generate(model, batch, steps=3))
    before = _snapshot(model)
    layer = model.model.language_model.layers[3]

    def fail(module, args):
        raise KeyboardInterrupt

    try:
        with tokred.apply(model, method, keep=0.5):
            with pytest.raises(StageTakenError):
                tokred.apply(model, "random")
            hook = layer.register_forward_pre_hook(fail) if fails else None
            _generate(model, batch, steps=3)
    except KeyboardInterrupt:
        hook.remove()
        assert fails
    assert _snapshot(model) == before
    assert not handle_is_active.get()
    assert torch.equal(_scores(_generate(model, batch, steps=3)), stock)
    # The failed call left nothing behind that a new handle would stumble on.
    with tokred.apply(model, method, keep=0.5) as handle:
        _generate(model, batch, steps=3)
        assert handle.summary().calls == 1


@pytest.mark.parametrize("method", sorted(set(tokred.methods()) - set(NEEDS_CLS)))
def test_a9_budgets_at_the_edge(method, caplog):
    for keep in (0.0, -0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="keep"):
            tokred.methods()[method](keep=keep)
    model = tiny.qwen2_5_vl()
    batch = _prompt()
    stock = model(**batch).logits
    with tokred.apply(model, method, keep=1.0):
        assert torch.equal(model(**batch).logits, stock)
    with caplog.at_level(logging.WARNING, logger="tokred"), tokred.apply(model, method, num_tokens=999):
        assert torch.equal(model(**batch).logits, stock)
        model(**batch)
    assert sum("999" in record.getMessage() for record in caplog.records) == 1
    with tokred.apply(model, method, keep=0.01) as handle:
        single = tiny.inputs("qwen2_5_vl", [tiny.Row((5, START, IMAGE, END, 7, 8, 9, 10, 11), ((1, 1),))])
        assert torch.isfinite(model(**single).logits).all()
        model(**batch)
        assert handle.summary().stages[-1].tokens_after == [1]
        text = {"input_ids": torch.tensor([[5, 6, 7, PAD + 3]])}
        logits = model(**text).logits
    assert torch.equal(model(**text).logits, logits)
