"""What methods observe in towers, against the attention weights of the eager stock model."""

import dataclasses
import importlib

import pytest
import tiny
import torch
from probes import Every2, Positive

import tokred
from tokred import Need


def _recorded(monkeypatch, model, batch):
    """Return what HiPrune sees of the batch: attention in the middle and at the end of the tower, and the grids."""
    seen = []

    def survivors(self, *observed):
        seen.append(observed)
        return torch.arange(self.count(observed[0].shape[1])).expand(len(observed[0]), -1)

    monkeypatch.setattr(tokred.HiPrune, "survivors", survivors)
    with tokred.apply(model, "hiprune", keep=0.5, layer=0):
        model(**batch)
    return seen


@pytest.mark.parametrize("family", ["llava", "llava_next"])
def test_column_sums_of_a_tower_with_tiles(family, monkeypatch):
    model = tiny.BUILDERS[family]("sdpa")
    batch = tiny.inputs(family, [tiny.ONE_IMAGE])
    [(shallow, deep, grid)] = _recorded(monkeypatch, model, batch)
    eager = tiny.BUILDERS[family]("eager")
    weights = eager.model.vision_tower(batch["pixel_values"].flatten(0, -4), output_attentions=True).attentions
    for sums, layer in ((shallow, 0), (deep, 1)):
        torch.testing.assert_close(sums, weights[layer].mean(1).sum(1)[:, 1:])
    assert grid[0, 5].tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("family", ["llava", "llava_next"])
@pytest.mark.parametrize("exact", [False, True])
def test_last_layer_of_a_tower(family, exact, monkeypatch):
    """PruMerge sees CLS attention and whole keys behind the feature; as released, attention has one head."""
    seen = []

    def merge(self, *observed):
        seen.append(observed)
        return tokred.Selection(torch.arange(4).expand(len(observed[0]), -1))

    monkeypatch.setattr(tokred.PruMerge, "merge", merge)
    model = tiny.BUILDERS[family]("sdpa")
    batch = tiny.inputs(family, [tiny.ONE_IMAGE])
    with tokred.apply(model, "prumerge", num_tokens=4, reference_exact=exact):
        model(**batch)
    [(attention, keys, hidden)] = seen

    eager = tiny.BUILDERS[family]("eager")
    projected = {}
    last = eager.model.vision_tower.encoder.layers[-1].self_attn
    for name in ("q_proj", "k_proj"):
        getattr(last, name).register_forward_hook(lambda module, args, out, name=name: projected.update({name: out}))
    tower = eager.model.vision_tower
    output = tower(batch["pixel_values"].flatten(0, -4), output_attentions=True, output_hidden_states=True)
    expected = output.attentions[-1][:, :, 0].mean(1)
    if exact:
        logits = projected["q_proj"][:, :1] @ projected["k_proj"].mT / 32**0.5
        expected = logits.softmax(-1)[:, 0]
    torch.testing.assert_close(attention, expected[:, 1:])
    torch.testing.assert_close(keys, projected["k_proj"][:, 1:])
    torch.testing.assert_close(hidden, output.hidden_states[-2][:, 1:])


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_column_sums_of_a_tower_that_merges(family, monkeypatch):
    """The second image is no square, and all images have more than one window."""
    model = tiny.BUILDERS[family]("sdpa")
    batch = tiny.inputs(family, [tiny.Row((5, tiny.START, tiny.IMAGE, tiny.END, tiny.IMAGE, 7), ((4, 4), (4, 6)))])
    seen = _recorded(monkeypatch, model, batch)

    eager = tiny.BUILDERS[family]("eager")
    modeling = importlib.import_module(type(eager).__module__)
    stock = modeling.eager_attention_forward
    weights = {}

    def attend(module, *args, **kwargs):
        output, probabilities = stock(module, *args, **kwargs)
        weights.setdefault(module, []).append(probabilities)
        return output, probabilities

    monkeypatch.setattr(modeling, "eager_attention_forward", attend)
    tower = eager.model.visual
    output = tower(batch["pixel_values"], grid_thw=batch["image_grid_thw"], return_dict=True)
    # Where each row of the tower's output goes, by comparing what the merger makes of it with the result.
    merged = tower.merger(output.last_hidden_state)
    place = torch.cdist(output.pooler_output, merged).argmin(dim=1)
    for layer, index in ((0, 0), (1, 1)):
        sums = torch.cat([part.mean(1).sum(1)[0] for part in weights[tower.blocks[layer].attn]])
        expected = sums.view(-1, 4).mean(1)[place].split([16, 24])
        for image, observed in zip(expected, seen, strict=True):
            torch.testing.assert_close(observed[index][0], image)
    assert [observed[2][0, 5].tolist() for observed in seen] == [[0, 0, 1, 1], [0, 0, 0, 5]]


def _seen_by(monkeypatch, method, model, batch):
    """Return what a method with one step before layer 2 observes, and score its tokens in their order."""
    seen = []

    def score(self, context):
        seen.append({need: context.observe(need) for need in self.needs if need is not Need.TEXT})
        if Need.TEXT in self.needs:
            seen[-1][Need.TEXT] = context.observe_text(Need.TEXT_ROWS)
        return -context.positions.float()

    monkeypatch.setattr(method, "score", score)
    with tokred.apply(model, method(layers=(2,), keep=0.5)):
        model(**batch)
    [observed] = seen
    return observed


def _rows(padded):
    return [tiny.ONE_IMAGE, tiny.Row((11, 12, *tiny.ONE_IMAGE.ids), tiny.ONE_IMAGE.sizes)][: 1 + padded]


@pytest.mark.parametrize("family", sorted(tiny.BUILDERS))
@pytest.mark.parametrize("padded", [False, True])
def test_next_row_is_what_the_layer_computes(family, padded, monkeypatch):
    """The oracle is layer 2 of the eager stock model."""
    batch = tiny.inputs(family, _rows(padded))
    observed = _seen_by(monkeypatch, tokred.PyramidDrop, tiny.BUILDERS[family]("sdpa"), batch)[Need.NEXT_ROW]
    weights = tiny.BUILDERS[family]("eager")(**batch, output_attentions=True).attentions[2]
    for row, ids in enumerate(batch["input_ids"]):
        torch.testing.assert_close(observed[row], weights[row, :, -1, ids == tiny.IMAGE], atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", sorted(tiny.BUILDERS))
@pytest.mark.parametrize("padded", [False, True])
def test_text_rows_are_what_the_layer_computes(family, padded, monkeypatch):
    """The oracle is layer 1 of the eager stock model; four text tokens follow the image."""
    batch = tiny.inputs(family, _rows(padded))
    observed = _seen_by(monkeypatch, tokred.AdaptInfer, tiny.BUILDERS[family]("sdpa"), batch)
    weights = tiny.BUILDERS[family]("eager")(**batch, output_attentions=True).attentions[1][:, :, -4:]
    torch.testing.assert_close(observed[Need.TEXT], weights[..., -4:], atol=1e-5, rtol=0)
    for row, ids in enumerate(batch["input_ids"]):
        expected = weights[row][..., ids == tiny.IMAGE]
        torch.testing.assert_close(observed[Need.TEXT_ROWS][row], expected, atol=1e-5, rtol=0)


def _embeddings_seen(monkeypatch, model, batch, *before):
    """Return what SparseVLM sees of the decoder's input before layers 1 and 2, of the media and of the text."""
    seen = []

    def score(self, context):
        seen.append((context.observe(Need.EMBEDDINGS), context.observe_text(Need.EMBEDDINGS)))
        return -context.positions.float()

    monkeypatch.setattr(tokred.SparseVLM, "score", score)
    with tokred.apply(model, [*before, tokred.SparseVLM(layers=(1, 2), keep=0.25)]) as handle:
        model(**batch)
        assert [stage.tokens_before > stage.tokens_after for stage in handle.summary().stages[-2:]] == [True, True]
    return seen


@pytest.mark.parametrize("family", sorted(tiny.BUILDERS))
@pytest.mark.parametrize("padded", [False, True])
def test_embeddings_are_those_of_the_start_at_every_step(family, padded, monkeypatch):
    """All tokens of the image, and the four text tokens behind it, as the stock decoder receives them."""
    model = tiny.BUILDERS[family]()
    batch = tiny.inputs(family, _rows(padded))
    embeds = tiny.base_inputs(model, batch)["inputs_embeds"]
    seen = _embeddings_seen(monkeypatch, model, batch)
    assert len(seen) == 2
    for media, text in seen:
        for row, ids in enumerate(batch["input_ids"]):
            assert torch.equal(media[row], embeds[row, ids == tiny.IMAGE])
            assert torch.equal(text[row], embeds[row, -4:])


def test_embeddings_of_what_an_earlier_method_left(monkeypatch):
    """Two images lose different numbers of tokens before the decoder, and are equally long after its first step."""
    model = tiny.llava()
    batch = tiny.inputs("llava", [tiny.ONE_IMAGE, tiny.Row((11, *tiny.ONE_IMAGE.ids), tiny.ONE_IMAGE.sizes)])
    with tokred.apply(model, Positive()):
        features = model.model.get_image_features(batch["pixel_values"], return_dict=True).pooler_output
    alive = [feature[~feature.isnan().any(-1)] for feature in features]
    assert len(alive[0]) != len(alive[1])
    seen = _embeddings_seen(monkeypatch, model, batch, Positive())
    text = tiny.base_inputs(model, batch)["inputs_embeds"][0, -4:]
    assert [media.shape[0] for media, _ in seen] == [1, 1, 1, 1]
    for index, (media, behind) in enumerate(seen):
        expected = next(feature for feature in alive if len(feature) == media.shape[1])
        torch.testing.assert_close(media[0], expected, msg=str(index))
        assert torch.equal(behind[0], text)


def _neurons_seen(monkeypatch, model, batch, *before):
    """Return the active neurons of media and text that CoreMatching sees before layer 2, and the input of that FFN."""
    seen, entered = [], []

    def survivors(self, media, text):
        seen.append((media, text))
        return torch.arange(self.count(media.shape[1])).expand(len(media), -1)

    monkeypatch.setattr(tokred.CoreMatching, "survivors", survivors)
    ffn = model.model.language_model.layers[1].mlp
    hook = ffn.register_forward_pre_hook(lambda module, args: entered.append(args[0]))
    with tokred.apply(model, [*before, tokred.CoreMatching(keep=0.5, layer=2)]):
        model(**batch)
    hook.remove()
    [observed], [entering] = seen, entered
    return *observed, entering


@pytest.mark.parametrize("family", sorted(tiny.BUILDERS))
@pytest.mark.parametrize("padded", [False, True])
def test_active_neurons_are_those_of_the_layer_before(family, padded, monkeypatch):
    """The oracle computes the FFN of layer 1 from what the stock model gives it; four text tokens follow the image."""
    batch = tiny.inputs(family, _rows(padded))
    media, text, _ = _neurons_seen(monkeypatch, tiny.BUILDERS[family](), batch)
    stock = tiny.BUILDERS[family]()
    ffn = stock.model.language_model.layers[1].mlp
    entered = []
    ffn.register_forward_pre_hook(lambda module, args: entered.append(args[0]))
    stock(**batch)
    active = _active(ffn, *entered)
    assert 0.2 < active.float().mean() < 0.8
    for row, ids in enumerate(batch["input_ids"]):
        assert torch.equal(media[row], active[row, ids == tiny.IMAGE])
        assert torch.equal(text[row], active[row, -4:])


def test_active_neurons_of_what_an_earlier_method_left(monkeypatch):
    model = tiny.llava()
    media, text, entering = _neurons_seen(monkeypatch, model, tiny.inputs("llava", [tiny.ONE_IMAGE]), Every2())
    active = _active(model.model.language_model.layers[1].mlp, entering)
    # Three tokens, eight of the image, four behind it.
    assert torch.equal(media, active[:, 3:11])
    assert torch.equal(text, active[:, 11:])


def _active(ffn, hidden):
    return ffn.act_fn(ffn.gate_proj(hidden)) * ffn.up_proj(hidden) > 0


def test_a_family_without_gated_ffn_provides_no_neurons():
    adapter = dataclasses.replace(tokred.adapters()["llava"], ffn=None)
    config = tiny.llava().config
    assert tokred.adapters()["llava"].provides(config) - adapter.provides(config) == {Need.ACTIVE_NEURONS}
