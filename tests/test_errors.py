"""Bad input: the documented error, and a model that is bit-equal to stock afterwards."""

import pytest
import tiny
import torch
from probes import Every2
from transformers import DynamicCache, Qwen2Config, Qwen2ForCausalLM, StaticCache

import tokred
from tokred.errors import (
    ParameterError,
    RemovedHandleError,
    StageTakenError,
    StaleCacheError,
    UnknownMethodError,
    UnsupportedAttentionError,
    UnsupportedCacheError,
    UnsupportedFamilyError,
    UnsupportedInputError,
    UnsupportedModelError,
)


@pytest.fixture
def model():
    return tiny.llava()


@pytest.fixture
def batch():
    return tiny.inputs("llava", [tiny.ONE_IMAGE])


@pytest.fixture(autouse=True)
def _bit_equal_afterwards(model, batch):
    stock = model(**batch).logits
    yield
    assert torch.equal(model(**batch).logits, stock)


def test_unknown_method_names_the_nearest(model):
    with pytest.raises(UnknownMethodError, match="did you mean 'divprune'"):
        tokred.apply(model, "divprun")


def test_unknown_parameter_names_the_allowed(model):
    with pytest.raises(ParameterError, match=r"no parameter 'ratio'; it has .*'keep'"):
        tokred.apply(model, "random", ratio=0.5)


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        ("random", {"keep": 0}),
        ("random", {"keep": 1.5}),
        ("random", {"keep": "half"}),
        ("random", {"num_tokens": 0}),
        ("random", {"scope": "frame"}),
        ("random", {"seed": 0.5}),
        ("fastv", {"layer": 0}),
        ("fastv", {"layer": 4}),
        ("dart", {"layer": 4}),
        ("dart", {"pivots_image": 0}),
        ("visionzip", {"contextual_share": 1.0}),
        ("visionzip", {"scope": "total"}),
    ],
)
def test_parameters_out_of_range(model, method, parameters):
    [(name, value)] = parameters.items()
    with pytest.raises(ParameterError, match=f"{name}={value!r}"):
        tokred.apply(model, method, **parameters)
    assert isinstance(ParameterError("x"), ValueError)


def test_unknown_family_names_the_nearest():
    text_only = Qwen2ForCausalLM(
        Qwen2Config(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=8)
    )
    with pytest.raises(UnsupportedModelError, match=r"'qwen2' \(Qwen2ForCausalLM\) is not supported.*qwen2_vl"):
        tokred.apply(text_only, "random")
    support = tokred.supported(text_only)
    assert not support
    assert "qwen2_vl" in support.nearest
    assert tokred.supported(tiny.llava())


@pytest.mark.parametrize("thing", [torch.nn.Linear(2, 2), object(), "llava"], ids=["module", "object", "str"])
def test_things_that_are_no_model(thing):
    with pytest.raises(UnsupportedModelError):
        tokred.apply(thing, "random")
    assert not tokred.supported(thing)


def test_data_parallel_wrapper(model):
    with pytest.raises(UnsupportedModelError, match=r"apply to its \.module"):
        tokred.apply(torch.nn.DataParallel(model), "random")


def test_pipeline_like_objects_are_unwrapped(model, batch):
    class Pipeline:
        def __init__(self, model):
            self.model = model

    with tokred.apply(Pipeline(model), "random") as handle:
        model(**batch)
        assert handle.summary().calls == 1


def test_two_methods_on_one_stage(model):
    with pytest.raises(StageTakenError, match="divprune and random both act on stage features"):
        tokred.apply(model, ["divprune", "random"])
    with pytest.raises(ParameterError, match="empty"):
        tokred.apply(model, [])
    with pytest.raises(ParameterError, match="list of 2 methods"):
        tokred.apply(model, ["divprune", "fastv"], keep=0.5)


def test_second_handle(model):
    with (
        tokred.apply(model, "random"),
        pytest.raises(StageTakenError, match=r"already has a handle \(random\)"),
    ):
        tokred.apply(model, "fastv")


def test_sliding_layers_are_refused():
    config = tiny.llava().config
    config.text_config.layer_types = ["full_attention", "sliding_attention"] * 2
    config.text_config.sliding_window = 8
    sliding = type(tiny.llava())(config)
    with pytest.raises(UnsupportedAttentionError, match="sliding_attention"):
        tokred.apply(sliding, "random")


def test_static_cache_is_refused_by_name(model, batch):
    with tokred.apply(model, "random"):
        with pytest.raises(UnsupportedCacheError, match="cache"):
            model.generate(**batch, max_new_tokens=2, cache_implementation="static")
        cache = StaticCache(config=model.config.get_text_config(), max_cache_len=64)
        with pytest.raises(UnsupportedCacheError, match="StaticLayer"):
            model(**batch, **{tiny.CACHE_NAME: cache})


def test_offloaded_cache_is_refused(model, batch):
    cache = DynamicCache(offloading=True) if torch.cuda.is_available() else DynamicCache()
    cache.offloading = True
    with tokred.apply(model, "random"), pytest.raises(UnsupportedCacheError, match="offload"):
        model(**batch, **{tiny.CACHE_NAME: cache})


def test_stale_cache(model, batch):
    with tokred.apply(model, "random"):
        cache = tiny.cache_of(model(**batch))
    with pytest.raises(StaleCacheError, match="keep the handle attached"):
        model(input_ids=torch.tensor([[5]]), **{tiny.CACHE_NAME: cache})


def test_mask_of_wrong_length(model, batch):
    with tokred.apply(model, "random"), pytest.raises(UnsupportedInputError, match="attention_mask has 3 columns"):
        model(**batch | {"attention_mask": torch.ones(1, 3, dtype=torch.long)})


def test_features_encoded_before_apply(model, batch):
    if not tiny.TAKES_ENCODED_MEDIA:
        pytest.skip("transformers below 5.20 takes no mm_encoder_outputs")
    encoded = model.model.get_image_features(batch["pixel_values"], return_dict=True)
    text = {name: value for name, value in batch.items() if name != "pixel_values"}
    with tokred.apply(model, "divprune"), pytest.raises(UnsupportedInputError, match="encoded without it"):
        model(**text, mm_encoder_outputs={"image": encoded})
    with tokred.apply(model, Every2(site="embeds")) as handle:
        model(**text, mm_encoder_outputs={"image": encoded})
        assert handle.summary().visual_tokens_after == 8


def test_embeddings_without_ids(model, batch):
    embeds = model.get_input_embeddings()(batch["input_ids"])
    with tokred.apply(model, "divprune"):
        with pytest.raises(UnsupportedInputError, match="mm_token_type_ids"):
            model(inputs_embeds=embeds, pixel_values=batch["pixel_values"])
        text = model.get_input_embeddings()(torch.tensor([[5, 6, 7]]))
        result = model(inputs_embeds=text).logits
    assert torch.equal(model(inputs_embeds=text).logits, result)


def test_packed_sequences_are_refused(model, batch):
    batch = {name: value for name, value in batch.items() if name != "attention_mask"}
    length = batch["input_ids"].shape[1]
    positions = torch.cat([torch.arange(length - 3), torch.arange(3)]).unsqueeze(0)
    with tokred.apply(model, Every2(site=2)), pytest.raises(UnsupportedInputError, match="packed"):
        model(**batch, position_ids=positions, use_cache=False)


def test_unknown_sequence_argument_is_refused(model, batch):
    length = batch["input_ids"].shape[1]
    with tokred.apply(model, "random"), pytest.raises(UnsupportedFamilyError, match="'extra' of shape"):
        model(**batch, extra=torch.zeros(1, length))


def test_an_argument_of_a_decode_step_is_not_taken_for_a_sequence(model, batch):
    """A decode step shortens nothing, and its one token has the length of any axis of size 1."""
    with tokred.apply(model, "random"):
        cache = tiny.cache_of(model(**batch))
        step = model(input_ids=torch.tensor([[7]]), **{tiny.CACHE_NAME: cache}, extra=torch.zeros(1, 1))
    assert torch.isfinite(step.logits).all()


def test_removed_handle(model):
    handle = tokred.apply(model, "random")
    handle.remove()
    handle.remove()
    with pytest.raises(RemovedHandleError):
        handle.pause()


def test_nothing_to_show_yet(model):
    with tokred.apply(model, "random") as handle:
        with pytest.raises(UnsupportedInputError, match="no media"):
            handle.trace()
        assert "nothing was removed" in str(handle.summary())


def test_exception_in_the_middle_of_generate(model, batch):
    calls = []

    def fail(module, args):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("planted")

    hook = model.model.language_model.layers[3].register_forward_pre_hook(fail)
    with tokred.apply(model, "fastv", keep=0.5):
        with pytest.raises(RuntimeError, match="planted"):
            model.generate(**batch, max_new_tokens=6)
        hook.remove()
        again = model.generate(**batch, max_new_tokens=3, do_sample=False)
    with tokred.apply(model, "fastv", keep=0.5):
        assert torch.equal(model.generate(**batch, max_new_tokens=3, do_sample=False), again)


def test_method_registration():
    with pytest.raises(tokred.errors.RegistrationError, match="not a dataclass"):
        tokred.register_method(int)

    class Clash(tokred.Random):
        name = "random"

    with pytest.raises(tokred.errors.RegistrationError, match="registered already"):
        tokred.register_method(Clash)
    with pytest.raises(tokred.errors.RegistrationError, match=r"neither a tokred\.adapters"):
        tokred.register_adapter("llava")
